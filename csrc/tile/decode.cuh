// How a warp reads its part of a tile: from the mask and the values in shared memory to the registers of operand A.
//
// What it costs on an H200, for 32 elements a lane: see docs/performance.md.
#pragma once

#include "../core/cuda.cuh"
#include "tile.h"

namespace macko {

// With an offset of the load's own.
template <int OFFSET = 0>
__device__ __forceinline__ uint32_t load_value(uint32_t at) {
    uint32_t value;
    asm("ld.shared.u16 %0, [%1 + %2];" : "=r"(value) : "r"(at), "n"(OFFSET));
    return value;
}

// prmt itself: __byte_perm would mask the selector first.
__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}

// A lane's part of a tile: its mask and where its values of each group begin. Found in four steps, which the products of
// the tile before leave time for.
struct tile_lane {
    uint32_t mask, at[TILE_GROUPS];
    uint32_t start, own[2];
    uint32_t sum[2]; // of the groups' values, a byte each, over the lanes up to this one: at most 128

    __device__ __forceinline__ void set_own(uint32_t both) {
        own[0] = both & 0x0f0f0f0fu;
        own[1] = both >> 4 & 0x0f0f0f0fu;
    }

    // The lane's counts, four bits each, and the first two steps of their sums over the lanes.
    __device__ __forceinline__ void add_counts(uint32_t both) {
        set_own(both);
        add_from_below(both, 1); // at most 8 still
        sum[0] = both & 0x0f0f0f0fu;
        sum[1] = both >> 4 & 0x0f0f0f0fu;
#pragma unroll
        for (int half = 0; half < 2; half++) add_from_below(sum[half], 2);
    }

    template <int STEP>
    __device__ __forceinline__ void prepare(uint32_t place, int part, int lane) {
        if (STEP == 0) {
            asm volatile("ld.shared.u32 %0, [%1];"
                         : "=r"(mask)
                         : "r"(place + part * (TILE_LANES * 4) + lane * 4)
                         : "memory");
            asm volatile("{ .reg .b16 v;\nld.shared.u16 v, [%1];\ncvt.u32.u16 %0, v; }"
                         : "=r"(start)
                         : "r"(place + TILE_STARTS + part * 2)
                         : "memory");
            start += place;
        } else if (STEP == 1) {
            // Bits j and j + 4 of the four bytes at once: values of group j in the low four bits, of j + 4 above them.
            uint32_t both = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) both += __dp4a(mask >> j & 0x11111111u, 0x01010101u, 0u) << (8 * j);
            add_counts(both);
        } else if (STEP == 2) {
#pragma unroll
            for (int distance = 4; distance < WARP; distance *= 2)
                for (int half = 0; half < 2; half++) add_from_below(sum[half], distance);
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t total = __shfl_sync(FULL_WARP, sum[half], WARP - 1), before = sum[half] - own[half];
                const uint32_t base[4] = {start, __dp4a(total, 0x00000002u, start), __dp4a(total, 0x00000202u, start),
                                          __dp4a(total, 0x00020202u, start)};
#pragma unroll
                for (int j = 0; j < 4; j++) at[half * 4 + j] = __dp4a(before, 2u << (8 * j), base[j]);
                start = __dp4a(total, 0x02020202u, start);
            }
        }
    }

    __device__ __forceinline__ uint32_t bits(int j) const {
        return mask >> j & 0x01010101u;
    }

    // The values at the lane's place of group j on, one for each element: whether it belongs to it, the mask says.
    __device__ __forceinline__ void load(int j, uint32_t (&values)[TILE_QUAD]) const {
        const uint32_t b = bits(j);
        values[0] = load_value(at[j]);
        values[1] = load_value(__dp4a(b, 0x00000002u, at[j]));
        values[2] = load_value(__dp4a(b, 0x00000202u, at[j]));
        values[3] = load_value(__dp4a(b, 0x00020202u, at[j]));
    }

    // Two registers of the operand. Elements without a value take the zeros above another one's 16 bits.
    __device__ __forceinline__ void place(int j, const uint32_t (&values)[TILE_QUAD], uint32_t &low,
                                          uint32_t &high) const {
        const uint32_t selectors = 0x76327632u - 0x22u * bits(j);
        low = byte_permute(values[0], values[1], selectors);
        high = byte_permute(values[2], values[3], selectors >> 16);
    }
};

// Weights of dp4a, a byte each. They come with the launch, as dp4a takes them from there itself: immediates go through
// uniform registers, an instruction each time.
struct tile_weights {
    uint32_t one = 0x01010101, one_up = 0x80808080;                 // 1, and 1 << 7
    uint32_t two[4] = {0x2, 0x200, 0x20000, 0x2000000};             // for one byte
    uint32_t below[4] = {0, 0x2, 0x202, 0x20202}, all = 0x02020202; // for all bytes in front of one; for all
    uint32_t back[2][4] = {{0, 0xfe, 0xfefe, 0xfefefe},
                           {0, 0xff, 0xffff, 0xffffff}}; // -2, or -1, for those in front of one
};

// tile_lane in fewer instructions.
struct mm_lane : tile_lane {
    struct operands { // none
        __device__ __forceinline__ explicit operands(int) {
        }
    };
    // Groups j and j + 4 of the four bytes at once. No bit is moved: each counts 1 << j.
    __device__ __forceinline__ uint32_t counts(const tile_weights &weights) const {
        const uint32_t low = __dp4a(mask & 0x22222222u, weights.one_up, __dp4a(mask & 0x11111111u, weights.one, 0u));
        const uint32_t high = __dp4a(mask & 0x88888888u, weights.one_up, __dp4a(mask & 0x44444444u, weights.one, 0u));
        return low + (high << 14);
    }

    template <int STEP>
    __device__ __forceinline__ void prepare(uint32_t place, int part, int lane, const tile_weights &weights,
                                            const operands &) {
        if (STEP == 1) {
            add_counts(counts(weights));
        } else if (STEP == 3) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t total = __shfl_sync(FULL_WARP, sum[half], WARP - 1), before = sum[half] - own[half];
#pragma unroll
                for (int j = 0; j < 4; j++)
                    at[half * 4 + j] =
                        __dp4a(before, weights.two[j], j ? __dp4a(total, weights.below[j], start) : start);
                start = __dp4a(total, weights.all, start);
            }
        } else {
            tile_lane::prepare<STEP>(place, part, lane);
        }
    }

    // Of each element of group j that has no value, 1 << j % 2 in its byte: one shift serves two groups.
    __device__ __forceinline__ uint32_t missing(int j) const {
        return ~(mask >> (j & ~1)) & 0x01010101u << j % 2;
    }

    // As if each element had a value, and back by those that are missing: what is added for each is free.
    __device__ __forceinline__ void load(int j, uint32_t (&values)[TILE_QUAD], const tile_weights &weights) const {
        const int m = missing(j), from = at[j];
        const uint32_t (&back)[4] = weights.back[j % 2];
        values[0] = load_value<0>(from);
        values[1] = load_value<2>(__dp4a(m, (int)back[1], from));
        values[2] = load_value<4>(__dp4a(m, (int)back[2], from));
        values[3] = load_value<6>(__dp4a(m, (int)back[3], from));
    }

    __device__ __forceinline__ void place(int j, const uint32_t (&values)[TILE_QUAD], uint32_t &low,
                                          uint32_t &high) const {
        const uint32_t selectors = 0x54105410u + (0x22u >> j % 2) * missing(j);
        low = byte_permute(values[0], values[1], selectors);
        high = byte_permute(values[2], values[3], selectors >> 16);
    }
};

// Of bytes, on the tensor cores: 16 x 8 sums of 16 products, and of 32 more.
__device__ __forceinline__ void multiply_bytes(uint32_t (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(a0), "r"(a1), "r"(b), "r"(0));
}
__device__ __forceinline__ void multiply_add_bytes(uint32_t *d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                   uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// mm_lane whose counts are added up over the lanes by the tensor cores, where these have time: no shuffles. Lane 4 g + t
// has all lanes of smaller g below it, and those of its own g with smaller t. The first product adds the counts of each g
// up, column g' of its result; of row g that is group g % 2 (and of row g + 8 the one two further on), as the second
// product takes them: its rows are g, its columns 2 t + b the group b of a pair, and its other 16 products the own g's.
struct scan_lane : mm_lane {
    struct operands {   // those that do not change
        uint32_t quad;  // 1 for byte g % 2
        uint32_t below; // 2 for byte b where 2 t + b < g
        uint32_t left;  // column g = 2 t' + b: 2 for byte b where t < t'
        __device__ __forceinline__ explicit operands(int lane) {
            const int g = lane / 4, t = lane % 4;
            quad = held(1u << 8 * (g % 2));
            below = held((2 * t < g ? 0x2u : 0) | (2 * t + 1 < g ? 0x200u : 0));
            left = held(t < g / 2 ? 2u << 8 * (g % 2) : 0);
        }
    };
    uint32_t quads[2][4];

    template <int STEP>
    __device__ __forceinline__ void prepare(uint32_t place, int part, int lane, const tile_weights &weights,
                                            const operands &constant) {
        if (STEP == 0) {
            tile_lane::prepare<0>(place, part, lane);
        } else if (STEP == 1) {
            set_own(counts(weights));
#pragma unroll
            for (int half = 0; half < 2; half++) sum[half] = __reduce_add_sync(FULL_WARP, own[half]);
        } else if (STEP == 2) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                multiply_bytes(quads[half], constant.quad, constant.quad << 16, own[half]);
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t sums = byte_permute(byte_permute(quads[half][0], quads[half][1], 0x7740),
                                                   byte_permute(quads[half][2], quads[half][3], 0x7740), 0x5410);
#pragma unroll
                for (int j = 0; j < 4; j++) at[half * 4 + j] = j ? __dp4a(sum[half], weights.below[j], start) : start;
                multiply_add_bytes(at + half * 4, constant.below, constant.below << 16, own[half], own[half] >> 16,
                                   sums, constant.left);
                start = __dp4a(sum[half], weights.all, start);
            }
        }
    }
};

} // namespace macko
