// How a warp decodes its slice of a tile: from the mask and the values in shared memory to the registers of operand A.
//
//     tile_streams::begin      where a lane's two streams are: heads at its own columns, and after `spill` the tails
//     tile_lane::read          the mask, 32 elements: group j is bits j, 8 + j, 16 + j, 24 + j
//     tile_lane::count         how many values each group has
//     tile_lane::find          so where each group's values begin; the streams go on after this tile
//     tile_lane::load          four values of a group, right ones and neighbours
//     tile_lane::place         the right ones, and zeros, into two registers of operand A
#pragma once

#include "../core/cuda.cuh"
#include "tile.h"

namespace macko {

// OFFSET is part of the instruction.
template <int OFFSET = 0>
__device__ __forceinline__ uint32_t load_value(uint32_t at) {
    uint32_t value;
    asm("ld.shared.u16 %0, [%1 + %2];" : "=r"(value) : "r"(at), "n"(OFFSET));
    return value;
}

// Words of a slab. Volatile: the compiler keeps them in the order of the program.
__device__ __forceinline__ void read_16(uint32_t &to, uint32_t from) {
    asm volatile("{ .reg .b16 v;\nld.shared.u16 v, [%1];\ncvt.u32.u16 %0, v; }" : "=r"(to) : "r"(from) : "memory");
}
__device__ __forceinline__ void read_32(uint32_t &to, uint32_t from) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to) : "r"(from) : "memory");
}

// 16 bytes: nothing but this keeps them behind the pipeline's barrier, where no load before gave their address.
__device__ __forceinline__ void read_128(uint32_t (&to)[4], uint32_t from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// prmt itself: __byte_perm would mask the selector first.
__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}

// 32 bits of two words from a bit on, mod 32.
__device__ __forceinline__ uint32_t funnel_shift(uint32_t low, uint32_t high, uint32_t bits) {
    uint32_t word;
    asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(low), "r"(high), "r"(bits));
    return word;
}

// A row of columns of bytes (columns_cpu.h), from one of them. Not volatile, so that the compiler may move it; its address comes from a load behind the pipeline's barrier.
template <int ROW>
__device__ __forceinline__ uint32_t load_row(uint32_t at) {
    uint32_t word;
    asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(word) : "r"(at), "n"(ROW * MACKO_TILE_COLUMNS_ROW_BYTES));
    return word;
}

// A number whose origin the compiler does not know. zero: 0 where it may know that all lanes have the same, for which there
// are registers of their own; else threadIdx.y.
__device__ __forceinline__ uint32_t hidden(uint32_t number, int lane, int zero) {
    return __shfl_sync(FULL_WARP, lane ? 0 : number, zero);
}

// Weights of dp4a, a byte each. They are kernel arguments, because dp4a takes an operand from there itself: immediates
// go through uniform registers, an instruction each time.
struct tile_weights {
    uint32_t one = 0x01010101, one_up = 0x80808080;                    // 1, and 1 << 7
    uint32_t below[4] = {0, 0x80, 0x8080, 0x808080}, all = 0x80808080; // 128 for all bytes before byte i; for all bytes
    uint32_t back[2] = {0x8080, 0xc0c0};             // -128 (j even) or -64 (j odd) for the first two bytes
    uint32_t all_back[2] = {0x80808080, 0xc0c0c0c0}; // and for all
    uint32_t pick = 0x1054;
    uint32_t half[2] = {0x0001, 0x0100};
};

// Where a lane's two streams go on at the beginning of a tile. A warp that takes tile after tile begins with a slab's
// first one; `find` moves the streams to the end of each tile, and before the third tile they go on at their spill
// offsets.
struct tile_streams {
    uint32_t values, spills; // where the slice's values begin; the lane's two spill offsets, 16 bits each
    uint32_t at[MACKO_TILE_STREAMS];

    __device__ __forceinline__ void begin(uint32_t slab, int slice, int lane) {
        uint32_t first;
        read_16(first, slab + MACKO_TILE_SLICES_AT + slice * 2);
        read_32(spills, slab + MACKO_TILE_SPILLS_AT + (slice * MACKO_TILE_LANES + lane) * 4);
        values = slab + MACKO_TILE_VALUES_AT + first * MACKO_TILE_ROW_BYTES;
        at[0] = values + lane * 4;
        at[1] = at[0] + 2;
    }
    __device__ __forceinline__ void spill() {
        at[0] = values + (spills & 0xffff);
        at[1] = values + (spills >> 16);
    }
    __device__ __forceinline__ void spill(const tile_weights &weights) {
        for (int i = 0; i < MACKO_TILE_STREAMS; i++) at[i] = __dp2a_lo(spills, weights.half[i], values);
    }
    // To the end of a tile with this mask.
    __device__ __forceinline__ void skip(uint32_t mask) {
        at[0] += __popc(mask & MACKO_TILE_STREAM_BITS) * MACKO_TILE_ROW_BYTES;
        at[1] += __popc(mask & ~MACKO_TILE_STREAM_BITS) * MACKO_TILE_ROW_BYTES;
    }
};

// What a lane has of a tile: its mask, and where its values of each group begin.
struct tile_lane {
    uint32_t mask, at[MACKO_TILE_GROUPS];
    uint32_t own[MACKO_TILE_STREAMS]; // how many each group has, a byte each

    __device__ __forceinline__ static uint32_t mask_at(uint32_t slab, int tile, int slice, int lane) {
        return slab + tile * MACKO_TILE_MASK_BYTES + (slice * MACKO_TILE_LANES + lane) * 4;
    }
    __device__ __forceinline__ void read(uint32_t mask_at) {
        read_32(mask, mask_at);
    }
    // Byte j of `both` has the counts of groups j and j + 4, four bits each. dp4a adds up the bits of four elements
    // where they stand, at bit j of each byte; weight 128 lifts those of odd groups by seven bits, into the next byte.
    __device__ __forceinline__ void count(const tile_weights &weights) {
        const uint32_t low = __dp4a(mask & 0x22222222u, weights.one_up, __dp4a(mask & 0x11111111u, weights.one, 0u));
        const uint32_t high = __dp4a(mask & 0x88888888u, weights.one_up, __dp4a(mask & 0x44444444u, weights.one, 0u));
        const uint32_t both = low + (high << 14);
        own[0] = both & 0x0f0f0f0fu;
        own[1] = both >> 4 & 0x0f0f0f0fu;
    }
    // Moves the streams to the end of this tile.
    __device__ __forceinline__ void find(const tile_weights &weights, tile_streams &streams) {
#pragma unroll
        for (int stream = 0; stream < MACKO_TILE_STREAMS; stream++) {
            uint32_t &from = streams.at[stream];
#pragma unroll
            for (int j = 0; j < 4; j++) at[stream * 4 + j] = j ? __dp4a(own[stream], weights.below[j], from) : from;
            from = __dp4a(own[stream], weights.all, from);
        }
    }

    // Of each element of group j that has no value, 1 << j % 2 in its byte: one shift serves two groups.
    __device__ __forceinline__ uint32_t missing(int j) const {
        return ~(mask >> (j & ~1)) & 0x01010101u << j % 2;
    }

    // Elements 0 and 1 of group j find their values in the two rows from the group's begin on, elements 2 and 3 in the
    // two rows from the third element's begin on. `place` picks by the mask. That begin is two rows further, less one
    // for each of the first two elements that is missing: +2 rows is part of the load, and dp4a subtracts.
    __device__ __forceinline__ void load(int j, uint32_t (&values)[MACKO_TILE_QUAD],
                                         const tile_weights &weights) const {
        const uint32_t third = __dp4a((int)missing(j), (int)weights.back[j % 2], (int)at[j]);
        values[0] = load_value<0>(at[j]);
        values[1] = load_value<MACKO_TILE_ROW_BYTES>(at[j]);
        values[2] = load_value<2 * MACKO_TILE_ROW_BYTES>(third);
        values[3] = load_value<3 * MACKO_TILE_ROW_BYTES>(third);
    }

    // Two registers of the operand, two elements each. The first element takes the first value; the second one the
    // second value, or the first where the first element has none. Elements without a value take the zeros above a
    // value's 16 bits.
    __device__ __forceinline__ void place(int j, const uint32_t (&values)[MACKO_TILE_QUAD], uint32_t &low,
                                          uint32_t &high) const {
        const uint32_t m = missing(j), step = 0x4422u >> j % 2;
        low = byte_permute(values[1], values[0], 0x1054u + step * m);
        high = byte_permute(values[3], values[2], 0x1054u + step * (m >> 16));
    }
};

// What every group multiplies with, in registers.
struct tile_numbers {
    uint32_t pairs[2];

    __device__ __forceinline__ explicit tile_numbers(int lane) {
        pairs[0] = hidden(0x22004422, lane, threadIdx.y);
        pairs[1] = hidden(0x11002211, lane, threadIdx.y);
    }
};

// What a lane has of a tile whose groups it takes one after the other.
struct tile_walk {
    uint32_t mask;
    uint32_t at[MACKO_TILE_STREAMS];

    __device__ __forceinline__ void read(uint32_t mask_at) {
        read_32(mask, mask_at);
    }
    __device__ __forceinline__ uint32_t missing(int j) const {
        return ~(mask >> (j & ~1)) & 0x01010101u << j % 2;
    }
    template <int J, int TILE>
    __device__ __forceinline__ void load(uint32_t (&values)[MACKO_TILE_QUAD], const tile_weights &weights) {
        constexpr int ROW = (TILE * 4 + J % 4) * MACKO_TILE_QUAD;
        uint32_t &from = at[J / 4];
        const int m = (int)missing(J);
        const uint32_t third = __dp4a(m, (int)weights.back[J % 2], (int)from);
        values[0] = load_value<ROW * MACKO_TILE_ROW_BYTES>(from);
        values[1] = load_value<(ROW + 1) * MACKO_TILE_ROW_BYTES>(from);
        values[2] = load_value<(ROW + 2) * MACKO_TILE_ROW_BYTES>(third);
        values[3] = load_value<(ROW + 3) * MACKO_TILE_ROW_BYTES>(third);
        from = __dp4a(m, (int)weights.all_back[J % 2], (int)from);
    }
    __device__ __forceinline__ void place(int j, const uint32_t (&values)[MACKO_TILE_QUAD], uint32_t &low,
                                          uint32_t &high, const tile_numbers &numbers,
                                          const tile_weights &weights) const {
        const uint32_t m = missing(j);
        low = byte_permute(values[1], values[0], __dp2a_lo(numbers.pairs[j % 2], m, weights.pick));
        high = byte_permute(values[3], values[2], __dp2a_hi(numbers.pairs[j % 2], m, weights.pick));
    }
};

} // namespace macko
