// From a slab of sparse8 to the registers of operand A (sparse8.h; slab/codec.cuh says what the kernels ask).
//
// As in sparse11, a step's bytes are found at any byte of a stream, and its elements' ranks among those that have a
// value by one multiplication. Elements without one take a zero from beside the stream.
#pragma once

#include "../../slab/columns.cuh"
#include "../dense8/bytes.cuh"
#include "sparse8.h"

namespace macko {

// What every step adds or multiplies with, in registers (sparse11_numbers says why).
struct sparse8_numbers {
    uint32_t four, upper, first_none, last_none;

    __device__ __forceinline__ explicit sparse8_numbers(int lane, int zero = 0) {
        four = hidden(4, lane, zero);
        upper = hidden(0x0100, lane, zero);
        first_none = hidden(0x4444, lane, zero);
        last_none = hidden(0x7777, lane, zero);
    }
};

// What a lane has of a tile.
template <macko_byte_kind KIND, typename T>
struct sparse8_lane {
    using bytes = four_bytes<KIND, T>;
    static constexpr uint32_t ONES = 0x11111111;
    static constexpr int STEPS = MACKO_SLAB_STEPS;
    uint32_t mask, have[STEPS]; // bit bit(step) of an element's nibble: it has a value
    uint32_t at[STEPS + 1];     // bits of the column before a step's values
    uint32_t column;            // where it begins

    // That of the mask, but for the last step: of bit 3 no factor makes ranks.
    __device__ __forceinline__ static constexpr int bit(int step) {
        return step < 3 ? 2 - step : 2;
    }
    // at[0] is known.
    __device__ __forceinline__ void count() {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            have[step] = (step < 3 ? mask : mask >> 1) & ONES << bit(step);
            at[step + 1] = at[step] + 8 * __popc(have[step]);
        }
    }
    // A step's words, or those at the last one's end; goes_on: after which the next tile begins.
    __device__ __forceinline__ void load(int step, uint32_t (&words)[3], uint32_t four, bool goes_on = false) const {
        load_around(words, at[step], column, four, step > 0, step < STEPS || goes_on);
    }
    // here, next: what was loaded of this step and of the next one.
    __device__ __forceinline__ void make(int step, const uint32_t (&here)[3], const uint32_t (&next)[3],
                                         uint32_t (&a)[4], const sparse8_numbers &numbers) const {
        const uint32_t first = funnel_shift(here[1], here[2], at[step]),
                       last = funnel_shift(next[0], next[1], at[step + 1]);
        // Of an element i < 4 the nibble is 4 - 4 have + the number of those before it, of the others 7 - 4 have - that
        // of those after it in the stream; 4 and more are zeros.
        const int first_factor = (0x1110 - 4) >> bit(step), last_factor = -((0x1110 + 4) >> bit(step));
        const uint32_t first_ranks = have[step] * first_factor + numbers.first_none;
        bytes::make(byte_permute(first, bytes::ZEROS, first_ranks), a[0], a[1]);
        const uint32_t last_ranks = __dp2a_lo(have[step], numbers.upper, 0u) * last_factor + numbers.last_none;
        bytes::make(byte_permute(last, bytes::ZEROS, last_ranks), a[2], a[3]);
    }
};

template <macko_byte_kind KIND, typename VALUE>
struct sparse8 {
    using T = VALUE;
    using constants = byte_weights;
    using lane_type = sparse8_lane<KIND, T>;
    static constexpr bool SAME_SIZE = false, SCALED = true, READS_AHEAD = false;
    static constexpr int STEPS = 1, HALF_STEPS = 1;
    static constexpr float FOLD = four_bytes<KIND, T>::FOLD;
    static constexpr int BASE = 0, LEAST_BYTES = MACKO_SPARSE8_VALUES_AT,
                         HALVES_TO = 32; // with more tokens there are too few stages for two at once
    static constexpr bool takes(macko_slab_many_shape shape) {
        return !macko_slab_few_registers(shape) && shape.split_k <= 2;
    }

    template <bool HALF>
    struct reader : column_reader<lane_type, sparse8_numbers, HALF> {
        using columns = column_reader<lane_type, sparse8_numbers, HALF>;
        using columns::lanes, columns::words, columns::start, columns::numbers;
        // Offsets in a slab of the lane's mask and start, and of where its slice begins.
        uint32_t mask_at, start_at, slice_at;
        uint32_t values;

        __device__ __forceinline__ reader(const constants &, int tile, int slice, int lane)
            : columns(sparse8_numbers(lane, HALF ? threadIdx.y : 0)) {
            mask_at = opaque(slab_mask_at(0, tile, slice, lane));
            start_at = opaque(MACKO_SPARSE8_STARTS_AT + (slice * MACKO_SLAB_LANES + lane) * 4);
            slice_at = opaque(MACKO_SPARSE8_SLICES_AT + slice * 4);
            this->hold(tile, lane);
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void prepare(uint32_t slab, const constants &) {
            constexpr bool GOES_ON = HALF && TILE == 1;
            lane_type &tile = lanes[TILE];
            if (STEP == 0) {
                if (!GOES_ON) read_32(values, slab + slice_at);
                if (!GOES_ON) read_32(start, slab + start_at);
                read_32(tile.mask, slab + mask_at + (GOES_ON ? MACKO_SLAB_MASK_BYTES : 0));
            } else if (STEP == 1) {
                this->template begin<TILE>(slab + values);
            } else if (STEP == 2) {
                tile.count();
            } else {
                this->template load_first<TILE>();
            }
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void make(uint32_t (&a)[4][4], const constants &) {
            lanes[TILE].make(STEP, words[STEP], words[STEP + 1], a[STEP], numbers);
        }
    };
    using few_reader = reader<false>;
    using half_reader = reader<true>;

    struct many_reader : column_stream<lane_type, sparse8_numbers> {
        using columns = column_stream<lane_type, sparse8_numbers>;
        using columns::values, columns::start, columns::numbers, columns::here, columns::next, columns::words;
        uint32_t mask_at; // of the tile that is prepared

        __device__ __forceinline__ explicit many_reader(const constants &)
            : columns(sparse8_numbers(threadIdx.x % WARP)) {
        }
        __device__ __forceinline__ void open(uint32_t slab, int slice, int lane) {
            mask_at = slab_mask_at(slab, 0, slice, lane);
            read_32(start, slab + MACKO_SPARSE8_STARTS_AT + (slice * MACKO_SLAB_LANES + lane) * 4);
            read_32(values, slab + MACKO_SPARSE8_SLICES_AT + slice * 4);
            values += slab;
            this->begin(lane);
        }
        __device__ __forceinline__ void skip_half() {
            mask_at += MACKO_SLAB_TILES / 2 * MACKO_SLAB_MASK_BYTES;
            this->spill();
        }
        __device__ __forceinline__ void advance(bool to_second_half) {
            mask_at += MACKO_SLAB_MASK_BYTES;
            this->go_on(to_second_half);
        }
        template <int STEP>
        __device__ __forceinline__ void prepare(const constants &) {
            if (STEP == 0) {
                read_32(next.mask, mask_at);
            } else if (STEP == 1) {
                this->place_next();
                next.count();
            } else if (STEP == 3) {
                this->load_first();
            }
        }
        template <int STEP>
        __device__ __forceinline__ void make(uint32_t (&a)[4][4], const constants &) {
            here.make(STEP, words[STEP], words[STEP + 1], a[STEP], numbers);
        }
    };
};

template <typename RUN>
cudaError_t with_weight(const macko_sparse8_matrix &m, const RUN &run) {
    return with_codec<sparse8>(m.kind, m.dtype, [&](auto codec) {
        return run(slab_weight<decltype(codec)>{m.data, m.offsets, m.rows, m.cols, m.widest, m.units, {m.scales}});
    });
}

} // namespace macko
