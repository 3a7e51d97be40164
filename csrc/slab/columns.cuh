// Streams of bytes in columns (columns_cpu.h), as sparse11 and sparse8 walk them: what their readers of a few and of many
// tokens have in common. A step of eight elements begins at any byte of its column.
#pragma once

#include "decode.cuh"

namespace macko {

// The words of a column around where a step's values begin, which is `at` bits after the column's; before, after: of those
// beside it, which are wanted. four: 4, whose origin the compiler does not know.
__device__ __forceinline__ void load_around(uint32_t (&words)[3], uint32_t at, uint32_t column, uint32_t four,
                                            bool before, bool after) {
    const uint32_t row = (at & ~31u) * four + column;
    if (before) words[0] = load_row<-1>(row);
    words[1] = load_row<0>(row);
    if (after) words[2] = load_row<1>(row);
}

// HALF: tiles 0 and 1 are neighbours in a slab, and a stream goes on from the one to the other. Else any two tiles.
template <class LANE, class NUMBERS, bool HALF>
struct column_reader {
    static constexpr int STEPS = MACKO_SLAB_STEPS;
    // Warpgroups differ by factors, not by branches: dp4a of a start with `before` gives the bits of the column before
    // the tile's values, and a permutation gives which column it is.
    uint32_t before, own_column, select;
    NUMBERS numbers;
    LANE lanes[2];
    uint32_t words[STEPS + 1][3], start;

    __device__ __forceinline__ explicit column_reader(const NUMBERS &numbers) : numbers(numbers) {
    }
    // After what the codec has of its own, as registers are given out in that order.
    __device__ __forceinline__ void hold(int tile, int lane) {
        const bool tail = tile >= MACKO_SLAB_TILES / 2, odd = tile % 2;
        before = opaque((tail ? 8u : 0) | (odd ? 8u << (tail ? 24 : 16) : 0));
        own_column = opaque(lane * 4);
        select = opaque(tail ? 0x5551 : 0x5554);
    }
    // Where a tile's values begin, in the slice's, which begin at `values`; and its first words.
    template <int TILE>
    __device__ __forceinline__ void begin(uint32_t values) {
        constexpr bool GOES_ON = HALF && TILE == 1;
        lanes[TILE].at[0] = GOES_ON ? lanes[0].at[STEPS] : __dp4a(start, before, 0u);
        lanes[TILE].column = GOES_ON ? lanes[0].column : values + byte_permute(start, own_column, select);
    }
    template <int TILE>
    __device__ __forceinline__ void load_first() {
        if (HALF && TILE == 1)
            for (int i = 1; i < 3; i++) words[0][i] = words[STEPS][i];
        else
            lanes[TILE].load(0, words[0], numbers.four);
        lanes[TILE].load(1, words[1], numbers.four);
    }
    template <int STEP, int TILE, class CONSTANTS>
    __device__ __forceinline__ void load_next(uint32_t, const CONSTANTS &) {
        if (STEP < 3) lanes[TILE].load(STEP + 2, words[STEP + 2], numbers.four, HALF && TILE == 0);
    }
    __device__ __forceinline__ void move_1_to_0() {
        lanes[0] = lanes[1];
    }
};

// Of a reader of many tokens: the slice's values and the lane's start; of the tile that is prepared where its values begin.
template <class LANE, class NUMBERS>
struct column_stream {
    uint32_t values, start, column, at;
    NUMBERS numbers;
    LANE here, next;
    uint32_t words[MACKO_SLAB_STEPS + 1][3];

    __device__ __forceinline__ explicit column_stream(const NUMBERS &numbers) : numbers(numbers) {
    }
    __device__ __forceinline__ void begin(int lane) {
        column = values + lane * 4;
        at = 0;
    }
    __device__ __forceinline__ void spill() {
        column = values + (start >> 8 & 0xff);
        at = (start & 0xff) * 8;
    }
    __device__ __forceinline__ void go_on(bool to_second_half) {
        here = next;
        at = next.at[MACKO_SLAB_STEPS];
        if (to_second_half) spill();
    }
    __device__ __forceinline__ void place_next() {
        next.at[0] = at;
        next.column = column;
    }
    __device__ __forceinline__ void load_first() {
        next.load(0, words[0], numbers.four);
        next.load(1, words[1], numbers.four);
    }
    template <int STEP, class CONSTANTS>
    __device__ __forceinline__ void load_next(const CONSTANTS &) {
        if (STEP < 3) here.load(STEP + 2, words[STEP + 2], numbers.four);
    }
};

} // namespace macko
