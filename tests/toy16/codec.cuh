// From a slab of toy16 to the registers of operand A, which it holds as they are (slab/codec.cuh says what kernels ask).
#pragma once

#include "../../slab/codec.cuh"
#include "toy16.h"

namespace macko {

template <typename VALUE>
struct toy16 {
    using T = VALUE;
    struct constants {};
    static constexpr bool SAME_SIZE = true, SCALED = false, READS_AHEAD = false;
    static constexpr int STEPS = 1;
    static constexpr int BASE = 0, HALVES_TO = 0;
    static constexpr int TILE_BYTES = MACKO_SLAB_SLICES * 4 * MACKO_TOY16_STEP_BYTES;
    static constexpr bool takes(macko_slab_many_shape shape) { // one is enough here
        return shape.tokens == 64 && shape.row_blocks == 2;
    }
    __device__ static uint32_t lane_at(int tile, int slice, int lane) {
        return tile * TILE_BYTES + slice * 4 * MACKO_TOY16_STEP_BYTES + lane * 16;
    }

    struct few_reader {
        uint32_t at;
        __device__ few_reader(const constants &, int tile, int slice, int lane) : at(lane_at(tile, slice, lane)) {
        }
        template <int STEP, int TILE>
        __device__ void prepare(uint32_t, const constants &) {
        }
        template <int STEP, int TILE>
        __device__ void load_next(uint32_t slab, const constants &) {
            read_128(values, slab + at + STEP * MACKO_TOY16_STEP_BYTES);
        }
        template <int STEP, int TILE>
        __device__ void make(uint32_t (&a)[4][4], const constants &) {
            for (int i = 0; i < 4; i++) a[STEP][i] = values[i];
        }
        __device__ void move_1_to_0() {
        }
        uint32_t values[4];
    };

    struct many_reader {
        uint32_t at, here, values[4];
        __device__ explicit many_reader(const constants &) {
        }
        __device__ void open(uint32_t slab, int slice, int lane) {
            at = slab + lane_at(0, slice, lane);
        }
        __device__ void skip_half() {
            at += MACKO_SLAB_HALF_TILES * TILE_BYTES;
        }
        __device__ void advance(bool) {
            here = at;
            at += TILE_BYTES;
        }
        template <int STEP>
        __device__ void prepare(const constants &) {
        }
        template <int STEP>
        __device__ void load_next(const constants &) {
            read_128(values, here + STEP * MACKO_TOY16_STEP_BYTES);
        }
        template <int STEP>
        __device__ void make(uint32_t (&a)[4][4], const constants &) {
            for (int i = 0; i < 4; i++) a[STEP][i] = values[i];
        }
    };
};

template <typename RUN>
cudaError_t with_weight(const macko_toy16_matrix &m, const RUN &run) {
    constexpr int UNITS = MACKO_TOY16_SLAB_BYTES / MACKO_SLAB_UNIT;
    const int64_t units = macko_slab_count(m.rows, m.cols) * UNITS;
    const auto of = [&](auto codec) {
        return run(slab_weight<decltype(codec)>{m.data, nullptr, m.rows, m.cols, UNITS, units, {}});
    };
    return m.dtype == MACKO_F16 ? of(toy16<__half>()) : of(toy16<__nv_bfloat16>());
}

} // namespace macko
