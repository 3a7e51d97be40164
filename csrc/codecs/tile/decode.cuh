// How a warp decodes its slice of a tile: from the mask and the values in shared memory to the registers of operand A.
//
//     tile_streams::begin      where a lane's two streams are: heads at its own columns, and after `spill` the tails
//     tile_lane::read          the mask, 32 elements: group j is bits j, 8 + j, 16 + j, 24 + j
//     tile_lane::load          four values of a group, right ones and neighbours; its stream goes on to the next group
//     tile_lane::place         the right ones, and zeros, into two registers of operand A
#pragma once

#include "../../slab/decode.cuh"
#include "tile.h"

namespace macko {

// Not volatile, so that the compiler may move it; its address comes from a load behind the pipeline's barrier.
// LAST: of a stream's last group, of which what is missing may lie behind the slab, and is dropped. verify/sanitize.py knows
// these loads by that.
template <bool LAST = false>
__device__ __forceinline__ uint32_t load_value(uint32_t at) {
    uint32_t value;
    asm("ld.shared.u16 %0, [%1];" : "=r"(value) : "r"(at));
    return value;
}

// What every group multiplies with. Weights of dp4a and dp2a, a byte each, are kernel arguments, because an instruction
// takes one operand from there itself: immediates go through uniform registers, an instruction each time.
struct tile_weights {
    // A missing value of a group j, 1 << j % 2 in its byte, is a row less: for the first two bytes, for all.
    uint32_t first_two[2] = {0x8080, 0xc0c0}, all[2] = {0x80808080, 0xc0c0c0c0};
    uint32_t spill[MACKO_TILE_STREAMS] = {0x0001, 0x0100}; // of a word its lower half, its upper one
    uint32_t select = 0x1054;                              // the first value, the second one
};

// What dp2a multiplies with bytes, of 16 bits each: a selector's change where the first of two elements has no value,
// and where the second one has none.
struct tile_numbers {
    uint32_t missing[2]; // of groups j, by j % 2

    __device__ __forceinline__ explicit tile_numbers(int lane) {
        for (int i = 0; i < 2; i++) missing[i] = hidden(0x22004422 >> i, lane, threadIdx.y);
    }
};

// Where a lane's two streams go on at the beginning of a tile, or of their tails.
struct tile_streams {
    uint32_t values, spills; // where the slice's values begin; the lane's two spill offsets, 16 bits each
    uint32_t at[MACKO_TILE_STREAMS];

    __device__ __forceinline__ void begin(uint32_t slab, int slice, int lane) {
        uint32_t first;
        read_16(first, slab + MACKO_TILE_SLICES_AT + slice * 2);
        read_32(spills, slab + MACKO_TILE_SPILLS_AT + (slice * MACKO_SLAB_LANES + lane) * 4);
        values = slab + MACKO_TILE_VALUES_AT + first * MACKO_TILE_ROW_BYTES;
        at[0] = values + lane * 4;
        at[1] = at[0] + 2;
    }
    __device__ __forceinline__ void spill(const tile_weights &weights = tile_weights()) {
        for (int i = 0; i < MACKO_TILE_STREAMS; i++) at[i] = __dp2a_lo(spills, weights.spill[i], values);
    }
    // To the end of a tile with this mask.
    __device__ __forceinline__ void skip(uint32_t mask) {
        at[0] += __popc(mask & MACKO_TILE_STREAM_BITS) * MACKO_TILE_ROW_BYTES;
        at[1] += __popc(mask & ~MACKO_TILE_STREAM_BITS) * MACKO_TILE_ROW_BYTES;
    }
};

// What a lane has of a tile: its mask, and its streams, which go on with every group that is loaded: four rows, less
// one for each value that is missing. The four rows are part of the next loads. So groups are loaded in order, once.
struct tile_lane {
    uint32_t mask, at[MACKO_TILE_STREAMS];

    __device__ __forceinline__ void read(uint32_t mask_at) {
        read_32(mask, mask_at);
    }
    __device__ __forceinline__ void begin(const uint32_t (&from)[MACKO_TILE_STREAMS]) {
        for (int i = 0; i < MACKO_TILE_STREAMS; i++) at[i] = from[i];
    }

    // Of each element of group j that has no value, 1 << j % 2 in its byte: one shift serves two groups.
    __device__ __forceinline__ uint32_t missing(int j) const {
        return ~(mask >> (j & ~1)) & 0x01010101u << j % 2;
    }

    // Elements 0 and 1 of group j find their values in the two rows from the group's begin on, elements 2 and 3 in the
    // two rows from the third element's begin on: two rows further, less one for each of the first two that is missing.
    // `place` picks by the mask. before: tiles whose values come before this one's, if the streams began there.
    __device__ __forceinline__ void load(int j, uint32_t (&values)[MACKO_SLAB_QUAD], const tile_weights &weights,
                                         int before = 0) {
        const uint32_t row = (before * MACKO_SLAB_GROUPS / MACKO_TILE_STREAMS + j % 4) * MACKO_SLAB_QUAD;
        uint32_t &from = at[j / 4];
        const uint32_t third = __dp4a((int)missing(j), (int)weights.first_two[j % 2], (int)from);
#pragma unroll
        for (int i = 0; i < MACKO_SLAB_QUAD; i++) {
            const uint32_t value_at = (i < 2 ? from : third) + (row + i) * MACKO_TILE_ROW_BYTES;
            values[i] = j % 4 < 3 ? load_value(value_at) : load_value<true>(value_at);
        }
        from = __dp4a((int)missing(j), (int)weights.all[j % 2], (int)from);
    }

    // Two registers of the operand, two elements each. The first element takes the first value; the second one the
    // second value, or the first where the first element has none. Elements without a value take the zeros above a
    // value's 16 bits.
    __device__ __forceinline__ void place(int j, const uint32_t (&values)[MACKO_SLAB_QUAD], uint32_t &low,
                                          uint32_t &high, const tile_numbers &numbers,
                                          const tile_weights &weights) const {
        const uint32_t changes = numbers.missing[j % 2];
        low = byte_permute(values[1], values[0], __dp2a_lo(changes, missing(j), weights.select));
        high = byte_permute(values[3], values[2], __dp2a_hi(changes, missing(j), weights.select));
    }
};

} // namespace macko
