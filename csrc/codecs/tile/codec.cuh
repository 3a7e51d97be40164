// From a slab of the tile layout to the registers of operand A (tile.h; slab/codec.cuh says what the kernels ask).
#pragma once

#include "../../slab/codec.cuh"
#include "decode.cuh"

namespace macko {

template <typename T_>
struct sparse16 {
    using T = T_;
    using constants = tile_weights;
    static constexpr bool SAME_SIZE = false, SCALED = false, READS_AHEAD = false;
    static constexpr int STEPS = 1, HALF_STEPS = 1;
    static constexpr int BASE = MACKO_TILE_VALUES_AT, // masks and offsets lie at fixed distances before it
        LEAST_BYTES = MACKO_TILE_VALUES_AT,
                         HALVES_TO = 16; // with more tokens there are too few stages for two at once
    static constexpr bool takes(macko_slab_many_shape) {
        return true;
    }

    // HALF: tiles 0 and 1 are neighbours in a slab, and streams go on from the one to the other. Else any two tiles.
    template <bool HALF>
    struct reader {
        // Offsets of a lane's words of its slice, of this tile, and of its slice's first row.
        uint32_t words, tile_words, first;
        // Warpgroups differ by masks, not by branches, which would take more instructions. A stream begins at the lane's
        // column (tiles 0 and 1, the head) or at its spill offset (tiles 2 and 3, the tail); after the values of the
        // tile before in tiles 1 and 3.
        uint32_t spill_mask, column, words_before, low, high;
        tile_numbers numbers;
        tile_lane tiles[2];
        uint32_t values[2][2][MACKO_SLAB_QUAD];
        tile_streams streams;
        uint32_t before;

        __device__ __forceinline__ reader(const constants &, int tile, int slice, int lane) : numbers(lane) {
            const bool tail = tile >= MACKO_SLAB_TILES / 2, odd = tile % 2;
            words = opaque((slice * MACKO_SLAB_LANES + lane) * 4);
            tile_words = opaque(words + tile * MACKO_SLAB_MASK_BYTES);
            first = opaque(slice * 2);
            spill_mask = opaque(tail ? ~0u : 0);
            column = opaque(tail ? 0 : lane * 4 + ((lane * 4 + 2) << 16));
            words_before = opaque(odd ? tile_words - MACKO_SLAB_MASK_BYTES : tile_words);
            low = opaque(odd ? MACKO_TILE_STREAM_BITS : 0);
            high = opaque(low << 4);
        }
        // Its mask is read, its streams are found, and their first values loaded.
        template <int STEP, int TILE>
        __device__ __forceinline__ void prepare(uint32_t slab, const constants &weights) {
            constexpr bool GOES_ON = HALF && TILE == 1;
            const uint32_t header = slab - MACKO_TILE_VALUES_AT;
            tile_lane &tile = tiles[TILE];
            if (STEP == 0) { // all loads
                if (!GOES_ON) read_16(streams.values, header + MACKO_TILE_SLICES_AT + first);
                if (!GOES_ON) read_32(streams.spills, header + MACKO_TILE_SPILLS_AT + words);
                if (!HALF) read_32(before, header + words_before);
                tile.read(header + tile_words + (GOES_ON ? MACKO_SLAB_MASK_BYTES : 0));
            } else if (STEP == 1 && !GOES_ON) {
                streams.values = slab + streams.values * MACKO_TILE_ROW_BYTES;
                streams.spills = (streams.spills & spill_mask) | column;
                streams.spill(weights);
                if (!HALF) streams.at[0] += __popc(before & low) * MACKO_TILE_ROW_BYTES;
                if (!HALF) streams.at[1] += __popc(before & high) * MACKO_TILE_ROW_BYTES;
                tile.begin(streams.at);
            } else if (STEP == 3) {
                if (GOES_ON) tile.begin(tiles[0].at);
                load<0, TILE>(weights);
            }
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void load(const constants &weights) {
#pragma unroll
            for (int i = 0; i < 2; i++) tiles[TILE].load(2 * STEP + i, values[STEP % 2][i], weights, HALF ? TILE : 0);
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void load_next(uint32_t, const constants &weights) {
            if constexpr (STEP < 3) load<STEP + 1, TILE>(weights);
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void make(uint32_t (&a)[4][4], const constants &weights) {
            tiles[TILE].place(2 * STEP, values[STEP % 2][0], a[STEP][0], a[STEP][1], numbers, weights);
            tiles[TILE].place(2 * STEP + 1, values[STEP % 2][1], a[STEP][2], a[STEP][3], numbers, weights);
        }
        __device__ __forceinline__ void move_1_to_0() {
            tiles[0] = tiles[1];
        }
    };
    using few_reader = reader<false>;
    using half_reader = reader<true>;

    struct many_reader {
        tile_numbers numbers;
        tile_lane here, next;
        tile_streams streams;
        uint32_t values[2][2][MACKO_SLAB_QUAD], mask_at;

        __device__ __forceinline__ explicit many_reader(const constants &) : numbers(threadIdx.x % WARP) {
        }
        __device__ __forceinline__ void load(tile_lane &tile, int step, const constants &weights) {
#pragma unroll
            for (int i = 0; i < 2; i++) tile.load(2 * step + i, values[step % 2][i], weights);
        }
        // A slab from its first tile on.
        __device__ __forceinline__ void open(uint32_t slab, int slice, int lane) {
            streams.begin(slab, slice, lane);
            mask_at = slab_mask_at(slab, 0, slice, lane);
        }
        __device__ __forceinline__ void skip_half() {
            mask_at += MACKO_SLAB_TILES / 2 * MACKO_SLAB_MASK_BYTES;
            streams.spill();
        }
        // To the tile that is prepared. to_second_half: what is prepared next is in it.
        __device__ __forceinline__ void advance(bool to_second_half) {
            here = next;
            mask_at += MACKO_SLAB_MASK_BYTES;
            if (to_second_half) streams.spill();
        }
        template <int STEP>
        __device__ __forceinline__ void prepare(const constants &weights) {
            if (STEP == 0) next.read(mask_at);
            if (STEP == 1) {
                next.begin(streams.at);
                streams.skip(next.mask);
            }
            if (STEP == 3) load(next, 0, weights);
        }
        template <int STEP>
        __device__ __forceinline__ void load_next(const constants &weights) {
            if (STEP < 3) load(here, STEP + 1, weights);
        }
        template <int STEP>
        __device__ __forceinline__ void make(uint32_t (&a)[4][4], const constants &weights) {
            here.place(2 * STEP, values[STEP % 2][0], a[STEP][0], a[STEP][1], numbers, weights);
            here.place(2 * STEP + 1, values[STEP % 2][1], a[STEP][2], a[STEP][3], numbers, weights);
        }
    };
};

// Calls run(weight).
template <typename RUN>
cudaError_t with_weight(const macko_tile_matrix &m, const RUN &run) {
    const auto of = [&](auto codec) {
        return run(slab_weight<decltype(codec)>{m.data, m.offsets, m.rows, m.cols, m.widest, m.units, {}});
    };
    return m.dtype == MACKO_F16 ? of(sparse16<__half>()) : of(sparse16<__nv_bfloat16>());
}

} // namespace macko
