// From a slab of dense8 to the registers of operand A (dense8.h; slab/codec.cuh says what the kernels ask).
#pragma once

#include "bytes.cuh"
#include "dense8.h"

namespace macko {

template <macko_byte_kind KIND, typename VALUE>
struct dense8 {
    using T = VALUE;
    using constants = byte_weights;
    using bytes = four_bytes<KIND, T>;
    static constexpr bool SAME_SIZE = true, SCALED = true, READS_AHEAD = false;
    static constexpr int STEPS = 1;
    static constexpr float FOLD = bytes::FOLD;
    static constexpr int BASE = 0, HALVES_TO = 0;
    static constexpr bool takes(macko_slab_many_shape shape) {
        return (shape.tokens <= 256 || shape.split_k < 2) && !macko_slab_few_registers(shape) && shape.split_k <= 2;
    }
    static constexpr int TILE_BYTES = MACKO_SLAB_SLICES * MACKO_DENSE8_SLICE_BYTES,
                         CHUNK = MACKO_SLAB_LANES * MACKO_DENSE8_CHUNK; // of a warp

    __device__ __forceinline__ static void make_step(uint32_t (&a)[4], const uint32_t (&of_two)[4], int step) {
        bytes::make(of_two[step % 2 * 2], a[0], a[1]);
        bytes::make(of_two[step % 2 * 2 + 1], a[2], a[3]);
    }

    // Of a tile the first two steps are loaded while the last two of the one before are multiplied.
    struct few_reader {
        uint32_t own; // offset in a slab of the lane's bytes
        uint32_t two[2][4];

        __device__ __forceinline__ few_reader(const constants &, int tile, int slice, int lane) {
            own = opaque(tile * TILE_BYTES + slice * MACKO_DENSE8_SLICE_BYTES + lane * MACKO_DENSE8_CHUNK);
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void prepare(uint32_t slab, const constants &) {
            if (STEP == 2) read_128(two[0], slab + own);
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void load_next(uint32_t slab, const constants &) {
            if (STEP == 0) read_128(two[1], slab + own + CHUNK);
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void make(uint32_t (&a)[4][4], const constants &) {
            make_step(a[STEP], two[STEP / 2], STEP);
        }
        __device__ __forceinline__ void move_1_to_0() {
        }
    };

    struct many_reader {
        uint32_t tile_at, here_at; // the lane's bytes of the tile that is prepared, and of that which is multiplied
        uint32_t two[2][4];

        __device__ __forceinline__ explicit many_reader(const constants &) {
        }
        __device__ __forceinline__ void open(uint32_t at, int slice, int lane) {
            tile_at = at + slice * MACKO_DENSE8_SLICE_BYTES + lane * MACKO_DENSE8_CHUNK;
        }
        __device__ __forceinline__ void skip_half() {
            tile_at += MACKO_SLAB_TILES / 2 * TILE_BYTES;
        }
        __device__ __forceinline__ void advance(bool) {
            here_at = tile_at;
            tile_at += TILE_BYTES;
        }
        template <int STEP>
        __device__ __forceinline__ void prepare(const constants &) {
            if (STEP == 2) read_128(two[0], tile_at);
        }
        template <int STEP>
        __device__ __forceinline__ void load_next(const constants &) {
            if (STEP == 0) read_128(two[1], here_at + CHUNK);
        }
        template <int STEP>
        __device__ __forceinline__ void make(uint32_t (&a)[4][4], const constants &) {
            make_step(a[STEP], two[STEP / 2], STEP);
        }
    };
};

template <typename RUN>
cudaError_t with_weight(const macko_dense8_matrix &m, const RUN &run) {
    const int64_t units = macko_slab_count(m.rows, m.cols) * MACKO_DENSE8_UNITS;
    return with_codec<dense8>(m.kind, m.dtype, [&](auto codec) {
        return run(
            slab_weight<decltype(codec)>{m.data, nullptr, m.rows, m.cols, MACKO_DENSE8_UNITS, units, {m.scales}});
    });
}

} // namespace macko
