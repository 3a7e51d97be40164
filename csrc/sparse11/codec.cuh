// From a slab of sparse11 to the registers of operand A (sparse11.h; tile/codec.cuh says what the kernels ask).
//
// A stream is bytes, so what a step of eight elements takes is found at any byte of it, and no instruction tests an
// element. The bytes of elements 0 to 3 are the four from where the step begins, those of elements 7 to 4 the four
// before its end. Of bits in nibbles one multiplication gives each element's rank among those that have a value, which
// is where its byte is, and to those that have none it gives a zero byte. The high bytes come from the table by code.
#pragma once

#include "../tile/codec.cuh"
#include "sparse11.h"

namespace macko {

struct sparse11_weights {
    uint32_t table[2];
};

// What every step multiplies with or looks up, in registers: the compiler would load or make a number at each use whose
// origin it knows, also through `held`. And factors that it does not know it does not turn into shifts and additions, of
// which the ALU has enough.
struct sparse11_numbers {
    uint32_t table[2], one, four, first_ranks, last_ranks;

    __device__ __forceinline__ sparse11_numbers(const sparse11_weights &weights, int lane) {
        const auto hidden = [&](uint32_t number) { return __shfl_sync(FULL_WARP, lane ? 0 : number, 0); };
        for (int i = 0; i < 2; i++) table[i] = hidden(weights.table[i]);
        one = hidden(1);
        four = hidden(4);
        first_ranks = hidden((0x1110 - 4) / 4);
        last_ranks = hidden(-((0x1110u + 4) / 4));
    }
};

// What a lane has of a tile.
template <typename T>
struct sparse11_lane {
    static constexpr int ZEROS =
        std::is_same_v<T, __half> ? 3 : 0; // at the end of a number, which move it to its place
    static constexpr int STEPS = MACKO_SPARSE11_STEPS;
    static constexpr uint32_t ONES = 0x11111111;
    uint32_t codes[STEPS];    // first as they lie in the slab, then a nibble an element
    uint32_t have[STEPS];     // bit 3 of an element's nibble: it has a value
    uint32_t at[STEPS + 1];   // bits of the column before a step's values
    uint32_t column;          // where it begins
    uint32_t entry, entry_at; // the next one of the warp's part of the list, and where it stands

    __device__ __forceinline__ void read_codes(uint32_t from) {
#pragma unroll
        for (int i = 0; i < MACKO_SPARSE11_WORDS; i++) read_32(codes[i], from + i * MACKO_TILE_LANES * 4);
    }
    __device__ __forceinline__ void find_list(uint32_t slab, uint32_t part) {
        entry_at = slab + (part >> 16);
        read_32(entry, entry_at);
    }
    // at[0] is known.
    __device__ __forceinline__ void count(const sparse11_numbers &numbers) {
        codes[3] = (codes[0] >> 3 & ONES) | (codes[1] >> 2 & 2 * ONES) | (codes[2] >> 1 & 4 * ONES);
#pragma unroll
        for (int i = 0; i < MACKO_SPARSE11_WORDS; i++) codes[i] &= 7 * ONES;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            have[step] = (codes[step] * numbers.one + 7 * ONES) & 8 * ONES;
            at[step + 1] = at[step] + 8 * __popc(have[step]);
        }
    }
    // The words around where a step's values begin, or the last one's end.
    __device__ __forceinline__ void load(int step, uint32_t (&words)[3], const sparse11_numbers &numbers) const {
        const uint32_t row = (at[step] & ~31u) * numbers.four + column;
        if (step > 0) words[0] = load_row<-1>(row);
        words[1] = load_row<0>(row);
        if (step < STEPS) words[2] = load_row<1>(row);
    }
    // here, next: what was loaded of this step and of the next one.
    __device__ __forceinline__ void make(int step, const uint32_t (&here)[3], const uint32_t (&next)[3],
                                         uint32_t (&a)[4], const sparse11_numbers &numbers) const {
        const uint32_t first = funnel_shift(here[1], here[2], at[step]),
                       last = funnel_shift(next[0], next[1], at[step + 1]);
        // Of an element e < 4 the nibble is 4 - 4 have[e] + the number of those before it; 4 and more are zero bytes.
        const uint32_t low0 = byte_permute(first, 0, (have[step] >> 1) * numbers.first_ranks + 0x4444);
        const uint32_t low1 = byte_permute(last, 0, (have[step] >> 17) * numbers.last_ranks + 0x7777);
        const uint32_t high0 = byte_permute(numbers.table[0], numbers.table[1], codes[step]);
        const uint32_t high1 = byte_permute(numbers.table[0], numbers.table[1], codes[step] >> 16);
        a[0] = byte_permute(low0, high0, 0x5140) << ZEROS;
        a[1] = byte_permute(low0, high0, 0x7362) << ZEROS;
        a[2] = byte_permute(low1, high1, 0x5140) << ZEROS;
        a[3] = byte_permute(low1, high1, 0x7362) << ZEROS;
    }
    // The listed values of steps STEP - 1 and STEP, one by one: few steps have any.
    template <int STEP>
    __device__ __forceinline__ void put_listed(uint32_t (&a)[4][4]) {
        if (entry >= (uint32_t)(STEP + 1) << 24) return;
        const uint32_t lane = (threadIdx.x % WARP) << 19;
        const auto put = [&](uint32_t (&to)[4]) {
            const uint32_t pair = (entry ^ lane) & 0xfe0000, half = entry & 1 << 16 ? 0x5410 : 0x3254;
#pragma unroll
            for (int i = 0; i < 4; i++) // asm: an index that is not known would put `a` into local memory
                asm("{ .reg .pred p;\nsetp.eq.u32 p, %1, %4;\n@p prmt.b32 %0, %0, %2, %3; }"
                    : "+r"(to[i])
                    : "r"(pair), "r"(entry), "r"(half), "r"(i << 17));
        };
        do {
            if (entry < (uint32_t)STEP << 24)
                put(a[STEP - 1]);
            else
                put(a[STEP]);
            entry_at += 4;
            read_32(entry, entry_at);
        } while (entry < (uint32_t)(STEP + 1) << 24);
    }
};

template <typename VALUE>
struct sparse11 {
    using T = VALUE;
    using constants = sparse11_weights;
    static constexpr bool SAME_SIZE = false, SCALED = false;
    static constexpr int BASE = 0;

    struct few_reader {
        // Offsets in a slab of the lane's codes and start, and of the warp's part.
        uint32_t codes_at, start_at, part_at;
        // Warpgroups differ by factors, not by branches: dp4a of a start with `before` gives the bits of the column before
        // the tile's values, and a permutation gives which column it is.
        uint32_t before, own_column, select;
        sparse11_numbers numbers;
        sparse11_lane<T> lanes[2];
        uint32_t words[MACKO_SPARSE11_STEPS + 1][3], start, part;

        __device__ __forceinline__ few_reader(const constants &weights, int tile, int slice, int lane)
            : numbers(weights, lane) {
            const bool tail = tile >= MACKO_TILE_SLAB_TILES / 2, odd = tile % 2;
            codes_at = held((tile * MACKO_TILE_SLICES + slice) * MACKO_SPARSE11_SLICE_BYTES + lane * 4);
            start_at = held(MACKO_SPARSE11_STARTS_AT + (slice * MACKO_TILE_LANES + lane) * 4);
            part_at = held(MACKO_SPARSE11_PARTS_AT + (tile * MACKO_TILE_SLICES + slice) * 4);
            before = held((tail ? 8u : 0) | (odd ? 8u << (tail ? 24 : 16) : 0));
            own_column = held(lane * 4);
            select = held(tail ? 0x5551 : 0x5554);
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void prepare(uint32_t slab, const constants &) {
            sparse11_lane<T> &tile = lanes[TILE];
            if (STEP == 0) {
                read_32(part, slab + part_at);
                read_32(start, slab + start_at);
                tile.read_codes(slab + codes_at);
            } else if (STEP == 1) {
                tile.at[0] = __dp4a(start, before, 0u);
                tile.column = slab + (part & 0xffff) + byte_permute(start, own_column, select);
            } else if (STEP == 2) {
                tile.count(numbers);
            } else {
                tile.find_list(slab, part);
                tile.load(0, words[0], numbers);
                tile.load(1, words[1], numbers);
            }
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void load_next(uint32_t, const constants &) {
            if (STEP < 3) lanes[TILE].load(STEP + 2, words[STEP + 2], numbers);
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void make(uint32_t (&a)[4][4], const constants &) {
            lanes[TILE].make(STEP, words[STEP], words[STEP + 1], a[STEP], numbers);
            if constexpr (STEP % 2) lanes[TILE].template put_listed<STEP>(a);
        }
        __device__ __forceinline__ void move_1_to_0() {
            lanes[0] = lanes[1];
        }
    };

    struct many_reader {
        static constexpr int TILE_BYTES = MACKO_TILE_SLICES * MACKO_SPARSE11_SLICE_BYTES;
        sparse11_numbers numbers;
        // The slab, its slice's values and the lane's start; of the tile that is prepared the lane's codes, the warp's part,
        // and where its values begin.
        uint32_t slab, values, start, codes_at, part_at, column, at;
        sparse11_lane<T> here, next;
        uint32_t words[MACKO_SPARSE11_STEPS + 1][3], part;

        __device__ __forceinline__ explicit many_reader(const constants &weights)
            : numbers(weights, threadIdx.x % WARP) {
        }
        __device__ __forceinline__ void open(uint32_t begin, int slice, int lane) {
            slab = begin;
            codes_at = slab + slice * MACKO_SPARSE11_SLICE_BYTES + lane * 4;
            part_at = slab + MACKO_SPARSE11_PARTS_AT + slice * 4;
            read_32(start, slab + MACKO_SPARSE11_STARTS_AT + (slice * MACKO_TILE_LANES + lane) * 4);
            read_32(values, part_at);
            values = slab + (values & 0xffff);
            column = values + lane * 4;
            at = 0;
        }
        __device__ __forceinline__ void spill() {
            column = values + (start >> 8 & 0xff);
            at = (start & 0xff) * 8;
        }
        __device__ __forceinline__ void skip_half() {
            codes_at += MACKO_TILE_SLAB_TILES / 2 * TILE_BYTES;
            part_at += MACKO_TILE_SLAB_TILES / 2 * MACKO_TILE_SLICES * 4;
            spill();
        }
        __device__ __forceinline__ void prepare_first(const constants &weights) {
            prepare<0>(weights);
            prepare<1>(weights);
            prepare<2>(weights);
            prepare<3>(weights);
        }
        __device__ __forceinline__ void advance(bool to_second_half) {
            here = next;
            codes_at += TILE_BYTES;
            part_at += MACKO_TILE_SLICES * 4;
            at = next.at[MACKO_SPARSE11_STEPS];
            if (to_second_half) spill();
        }
        template <int STEP>
        __device__ __forceinline__ void prepare(const constants &) {
            if (STEP == 0) {
                read_32(part, part_at);
                next.read_codes(codes_at);
            } else if (STEP == 1) {
                next.at[0] = at;
                next.column = column;
                next.count(numbers);
            } else if (STEP == 2) {
                next.find_list(slab, part);
            } else {
                next.load(0, words[0], numbers);
                next.load(1, words[1], numbers);
            }
        }
        template <int STEP>
        __device__ __forceinline__ void load_next(const constants &) {
            if (STEP < 3) here.load(STEP + 2, words[STEP + 2], numbers);
        }
        template <int STEP>
        __device__ __forceinline__ void make(uint32_t (&a)[4][4], const constants &) {
            here.make(STEP, words[STEP], words[STEP + 1], a[STEP], numbers);
            if constexpr (STEP % 2) here.template put_listed<STEP>(a);
        }
    };
};

} // namespace macko
