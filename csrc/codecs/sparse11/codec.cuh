// From a slab of sparse11 to the registers of operand A (sparse11.h; slab/codec.cuh says what the kernels ask).
//
// A stream is bytes, so what a step of eight elements takes is found at any byte of it, and no instruction tests an
// element. The bytes of elements 0 to 3 are the four from where the step begins, those of elements 7 to 4 the four
// before its end. Of bits in nibbles one multiplication gives each element's rank among those that have a value, which
// is where its byte is, and to those that have none it gives a zero byte. The high bytes come from the table by code.
#pragma once

#include "../../slab/codec.cuh"
#include "../../slab/columns.cuh"
#include "sparse11.h"

namespace macko {

struct sparse11_weights {
    uint32_t table[2];
};

// What every step multiplies with or looks up, in registers: the compiler would load or make a number at each use whose
// origin it knows, also through `opaque`. And factors that it does not know it does not turn into shifts and additions, of
// which the ALU has enough.
struct sparse11_numbers {
    uint32_t table[2], one, four, upper, first_ranks, last_ranks;

    __device__ __forceinline__ sparse11_numbers(const sparse11_weights &weights, int lane, int zero = 0) {
        for (int i = 0; i < 2; i++) table[i] = hidden(weights.table[i], lane, zero);
        one = hidden(1, lane, zero);
        four = hidden(4, lane, zero);
        upper = hidden(0x0100, lane, zero);
        first_ranks = hidden((0x1110 - 4) / 4, lane, zero);
        last_ranks = hidden(-((0x1110u + 4) / 4), lane, zero);
    }
};

// What a lane has of a tile.
template <typename T>
struct sparse11_lane {
    static constexpr int STEPS = MACKO_SLAB_STEPS;
    static constexpr int ZEROS =
        std::is_same_v<T, __half> ? 3 : 0; // at the end of a number, which move it to its place
    static constexpr uint32_t ONES = 0x11111111;
    uint32_t codes[STEPS];  // first as they lie in the slab, then a nibble an element
    uint32_t have[STEPS];   // bit 2 of an element's nibble: it has a value
    uint32_t at[STEPS + 1]; // bits of the column before a step's values
    uint32_t column;        // where it begins
    uint32_t slab, where;   // where the tile is; the slice's values, and its list

    __device__ __forceinline__ void read_codes(uint32_t from) {
#pragma unroll
        for (int i = 0; i < MACKO_SPARSE11_WORDS; i++) read_32(codes[i], from + i * MACKO_SLAB_LANES * 4);
    }
    // at[0] is known.
    __device__ __forceinline__ void count(const sparse11_numbers &numbers) {
        codes[3] = (codes[0] >> 3 & ONES) | (codes[1] >> 2 & 2 * ONES) | (codes[2] >> 1 & 4 * ONES);
#pragma unroll
        for (int i = 0; i < MACKO_SPARSE11_WORDS; i++) codes[i] &= 7 * ONES;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            have[step] = (codes[step] | (codes[step] * numbers.one + 3 * ONES)) & 4 * ONES;
            at[step + 1] = at[step] + 8 * __popc(have[step]);
        }
    }
    // A step's words, or those at the last one's end; goes_on: after which the next tile begins.
    __device__ __forceinline__ void load(int step, uint32_t (&words)[3], uint32_t four, bool goes_on = false) const {
        load_around(words, at[step], column, four, step > 0, step < STEPS || goes_on);
    }
    // here, next: what was loaded of this step and of the next one.
    __device__ __forceinline__ void make(int step, const uint32_t (&here)[3], const uint32_t (&next)[3],
                                         uint32_t (&a)[4], const sparse11_numbers &numbers) const {
        const uint32_t first = funnel_shift(here[1], here[2], at[step]),
                       last = funnel_shift(next[0], next[1], at[step + 1]);
        // Of an element e < 4 the nibble is 4 - 4 have[e] + the number of those before it; 4 and more are zero bytes.
        const uint32_t low0 = byte_permute(first, 0, have[step] * numbers.first_ranks + 0x4444);
        const uint32_t low1 = byte_permute(last, 0, upper_half(have[step], numbers) * numbers.last_ranks + 0x7777);
        const uint32_t high0 = byte_permute(numbers.table[0], numbers.table[1], codes[step]);
        const uint32_t high1 = byte_permute(numbers.table[0], numbers.table[1], upper_half(codes[step], numbers));
        a[0] = byte_permute(low0, high0, 0x5140) << ZEROS;
        a[1] = byte_permute(low0, high0, 0x7362) << ZEROS;
        a[2] = byte_permute(low1, high1, 0x5140) << ZEROS;
        a[3] = byte_permute(low1, high1, 0x7362) << ZEROS;
    }
    // >> 16 by a dot product, as the ALU has enough to do.
    __device__ __forceinline__ static uint32_t upper_half(uint32_t word, const sparse11_numbers &numbers) {
        return __dp2a_lo(word, numbers.upper, 0u);
    }
    // The listed values of steps FIRST to STEP, one by one: few slices have any, and those mostly one, so that the word
    // after it is read with it. place: the lane's, as in a list.
    template <int FIRST, int STEP>
    __device__ __forceinline__ void put_listed(uint32_t (&a)[4][4], uint32_t place) const {
        if (where < (uint32_t)(MACKO_SPARSE11_END_AT + 1) << 16) return;
        constexpr uint32_t END = (uint32_t)(STEP + 1) << 24;
        uint32_t entry, next, at = slab + (where >> 16);
        read_32(entry, at);
        read_32(next, at + 4);
        if (STEP < STEPS - 1 && entry >= END) return;
        do {
            const uint32_t of_step = (entry ^ place) & 0x00fe0000, half = entry & 1 << 16 ? 0x5410 : 0x3254;
            const auto put = [&](uint32_t (&to)[4]) {
#pragma unroll
                for (int i = 0; i < 4;
                     i++) // volatile: else the ways below become one, in which all registers are looked at
                    asm volatile("{ .reg .pred p;\nsetp.eq.u32 p, %1, %4;\n@p prmt.b32 %0, %0, %2, %3; }"
                                 : "+r"(to[i])
                                 : "r"(of_step), "r"(entry), "r"(half), "r"(i << 17));
            };
            // All lanes go one way, to the four registers of the value's step.
            const uint32_t step = entry >> 24;
            if (FIRST <= 0 && step == 0)
                put(a[0]);
            else if (FIRST <= 1 && step == 1)
                put(a[1]);
            else if (STEP >= 2 && step == 2)
                put(a[2]);
            else if (STEP >= 3 && step == 3)
                put(a[3]);
            entry = next;
            at += 4;
            read_32(next, at + 4);
        } while (entry < END);
    }
};

template <typename VALUE>
struct sparse11 {
    using T = VALUE;
    using constants = sparse11_weights;
    static constexpr bool SAME_SIZE = false, SCALED = false, READS_AHEAD = false;
    static constexpr int STEPS = 2, HALF_STEPS = 4;
    static constexpr int BASE = 0, LEAST_BYTES = MACKO_SPARSE11_VALUES_AT,
                         HALVES_TO = 32; // with more tokens there are too few stages for two at once
    static constexpr bool takes(macko_slab_many_shape shape) {
        return !macko_slab_few_registers(shape);
    }

    template <bool HALF>
    struct reader : column_reader<sparse11_lane<T>, sparse11_numbers, HALF> {
        using columns = column_reader<sparse11_lane<T>, sparse11_numbers, HALF>;
        using columns::lanes, columns::words, columns::start, columns::numbers, columns::own_column;
        static constexpr int NEXT_TILE = MACKO_SLAB_SLICES * 4;
        // Offsets in a slab of the lane's codes and start, and of the warp's where.
        uint32_t codes_at, start_at, where_at;

        __device__ __forceinline__ reader(const constants &weights, int tile, int slice, int lane)
            : columns(sparse11_numbers(weights, lane, HALF ? threadIdx.y : 0)) {
            codes_at = opaque((tile * MACKO_SLAB_SLICES + slice) * MACKO_SPARSE11_SLICE_BYTES + lane * 4);
            start_at = opaque(MACKO_SPARSE11_STARTS_AT + (slice * MACKO_SLAB_LANES + lane) * 4);
            where_at = opaque(MACKO_SPARSE11_SLICES_AT + (tile * MACKO_SLAB_SLICES + slice) * 4);
            this->hold(tile, lane);
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void prepare(uint32_t slab, const constants &) {
            constexpr bool GOES_ON = HALF && TILE == 1;
            sparse11_lane<T> &tile = lanes[TILE];
            if (STEP == 0) {
                tile.slab = slab;
                read_32(tile.where, slab + where_at + (GOES_ON ? NEXT_TILE : 0));
                if (!GOES_ON) read_32(start, slab + start_at);
                tile.read_codes(slab + codes_at + (GOES_ON ? MACKO_SLAB_SLICES * MACKO_SPARSE11_SLICE_BYTES : 0));
            } else if (STEP == 1) {
                this->template begin<TILE>(slab + (tile.where & 0xffff));
            } else if (STEP == 2) {
                tile.count(numbers);
            } else {
                this->template load_first<TILE>();
            }
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void make(uint32_t (&a)[4][4], const constants &) {
            lanes[TILE].make(STEP, words[STEP], words[STEP + 1], a[STEP], numbers);
            if constexpr (HALF ? STEP == 3 : STEP % 2)
                lanes[TILE].template put_listed<HALF ? 0 : STEP - 1, STEP>(a, own_column << 17);
        }
    };
    using few_reader = reader<false>;
    using half_reader = reader<true>;

    struct many_reader : column_stream<sparse11_lane<T>, sparse11_numbers> {
        using columns = column_stream<sparse11_lane<T>, sparse11_numbers>;
        using columns::values, columns::start, columns::numbers, columns::here, columns::next, columns::words;
        static constexpr int TILE_BYTES = MACKO_SLAB_SLICES * MACKO_SPARSE11_SLICE_BYTES;
        // The slab; of the tile that is prepared the lane's codes and the warp's where.
        uint32_t slab, codes_at, where_at;

        __device__ __forceinline__ explicit many_reader(const constants &weights)
            : columns(sparse11_numbers(weights, threadIdx.x % WARP)) {
        }
        __device__ __forceinline__ void open(uint32_t first, int slice, int lane) {
            slab = first;
            codes_at = slab + slice * MACKO_SPARSE11_SLICE_BYTES + lane * 4;
            where_at = slab + MACKO_SPARSE11_SLICES_AT + slice * 4;
            read_32(start, slab + MACKO_SPARSE11_STARTS_AT + (slice * MACKO_SLAB_LANES + lane) * 4);
            read_32(values, where_at);
            values = slab + (values & 0xffff);
            this->begin(lane);
        }
        __device__ __forceinline__ void skip_half() {
            codes_at += MACKO_SLAB_TILES / 2 * TILE_BYTES;
            where_at += MACKO_SLAB_TILES / 2 * MACKO_SLAB_SLICES * 4;
            this->spill();
        }
        __device__ __forceinline__ void advance(bool to_second_half) {
            codes_at += TILE_BYTES;
            where_at += MACKO_SLAB_SLICES * 4;
            this->go_on(to_second_half);
        }
        template <int STEP>
        __device__ __forceinline__ void prepare(const constants &) {
            if (STEP == 0) {
                next.slab = slab;
                read_32(next.where, where_at);
                next.read_codes(codes_at);
            } else if (STEP == 1) {
                this->place_next();
                next.count(numbers);
            } else if (STEP == 3) {
                this->load_first();
            }
        }
        template <int STEP>
        __device__ __forceinline__ void make(uint32_t (&a)[4][4], const constants &) {
            here.make(STEP, words[STEP], words[STEP + 1], a[STEP], numbers);
            if constexpr (STEP % 2) here.template put_listed<STEP - 1, STEP>(a, (threadIdx.x % WARP) << 19);
        }
    };
};

template <typename RUN>
cudaError_t with_weight(const macko_sparse11_matrix &m, const RUN &run) {
    const auto of = [&](auto codec) {
        return run(slab_weight<decltype(codec)>{
            m.data, m.offsets, m.rows, m.cols, m.widest, m.units, {{m.table[0], m.table[1]}}});
    };
    return m.dtype == MACKO_F16 ? of(sparse11<__half>()) : of(sparse11<__nv_bfloat16>());
}

} // namespace macko
