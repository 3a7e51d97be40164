// How values are written in a slab, as the kernels ask it: of a codec, which is a struct of
//
//     T            what is multiplied, __half or __nv_bfloat16
//     constants    what a launch tells of the weight besides its bytes
//     SAME_SIZE    whether all slabs are of one size, so that nobody has to look up where one begins
//     takes        whether there is a kernel of a shape for many tokens: not where ptxas has too few registers, and so
//                  waits for each product
//     SCALED       whether sums are to be multiplied with constants.scales[row] * FOLD
//     BASE         byte of a slab to which the readers' addresses refer
//     HALVES_TO    tokens up to which a warp takes two tiles of every other slab (few_kernel.cuh), 0: never. Else also:
//     half_reader  as few_reader, but tiles 0 and 1 that it is asked for are neighbours in a slab
//     few_reader   a warp that takes the same tile of every slab (few_kernel.cuh): prepares a tile while the one before
//                  it is multiplied, in steps 0 to 3; loads what step + 1 wants; and makes operand A of a step
//     many_reader  the same of a warp that takes tile after tile (many_kernel.cuh)
//
// This file has the codec of the tile layout itself, masks and 16 bits a value (tile.h); those of dense12, dense8,
// sparse11 and sparse8 are in codec.cuh of their folders. Reader functions are templates of the step, and of which of
// two tiles is meant (0 or 1).
#pragma once

#include "../../core/cuda.cuh"
#include "../../core/wgmma.cuh"
#include "../../slab/schedule.h"
#include "decode.cuh"

namespace macko {

// The weight of a launch.
template <class CODEC>
struct slab_weight {
    using T = typename CODEC::T;
    const uint8_t *data;
    const int32_t *offsets; // NULL if SAME_SIZE
    int64_t rows, cols;
    int widest;    // units of the largest slab
    int64_t units; // of data
    typename CODEC::constants constants;
};

template <typename T_>
struct sparse16 {
    using T = T_;
    using constants = tile_weights;
    static constexpr bool SAME_SIZE = false, SCALED = false;
    static constexpr int BASE = MACKO_TILE_VALUES_AT, // masks and offsets lie at fixed distances before it
        HALVES_TO = 16;                               // with more tokens there are too few stages for two at once
    static constexpr bool takes(macko_tile_many_shape) {
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
        uint32_t values[2][2][MACKO_TILE_QUAD];
        tile_streams streams;
        uint32_t before;

        __device__ __forceinline__ reader(const constants &, int tile, int slice, int lane) : numbers(lane) {
            const bool tail = tile >= MACKO_TILE_SLAB_TILES / 2, odd = tile % 2;
            words = held((slice * MACKO_TILE_LANES + lane) * 4);
            tile_words = held(words + tile * MACKO_TILE_MASK_BYTES);
            first = held(slice * 2);
            spill_mask = held(tail ? ~0u : 0);
            column = held(tail ? 0 : lane * 4 + ((lane * 4 + 2) << 16));
            words_before = held(odd ? tile_words - MACKO_TILE_MASK_BYTES : tile_words);
            low = held(odd ? MACKO_TILE_STREAM_BITS : 0);
            high = held(low << 4);
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
                tile.read(header + tile_words + (GOES_ON ? MACKO_TILE_MASK_BYTES : 0));
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
        uint32_t values[2][2][MACKO_TILE_QUAD], mask_at;

        __device__ __forceinline__ explicit many_reader(const constants &) : numbers(threadIdx.x % WARP) {
        }
        __device__ __forceinline__ void load(tile_lane &tile, int step, const constants &weights) {
#pragma unroll
            for (int i = 0; i < 2; i++) tile.load(2 * step + i, values[step % 2][i], weights);
        }
        // A slab from its first tile on.
        __device__ __forceinline__ void open(uint32_t slab, int slice, int lane) {
            streams.begin(slab, slice, lane);
            mask_at = tile_lane::mask_at(slab, 0, slice, lane);
        }
        __device__ __forceinline__ void skip_half() {
            mask_at += MACKO_TILE_SLAB_TILES / 2 * MACKO_TILE_MASK_BYTES;
            streams.spill();
        }
        // Without a tile before it.
        __device__ __forceinline__ void prepare_first(const constants &weights) {
            prepare<0>(weights);
            prepare<1>(weights);
            prepare<3>(weights);
        }
        // To the tile that is prepared. to_second_half: what is prepared next is in it.
        __device__ __forceinline__ void advance(bool to_second_half) {
            here = next;
            mask_at += MACKO_TILE_MASK_BYTES;
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

// Of each layout: calls run(weight).
template <typename RUN>
cudaError_t with_weight(const macko_tile_matrix &m, const RUN &run) {
    const auto of = [&](auto codec) {
        return run(slab_weight<decltype(codec)>{m.data, m.offsets, m.rows, m.cols, m.widest, m.units, {}});
    };
    return m.dtype == MACKO_F16 ? of(sparse16<__half>()) : of(sparse16<__nv_bfloat16>());
}

// d += a b of a warp, 16 x 16 by 16 x 8, from compute capability 8.0 on.
template <typename T>
__device__ __forceinline__ void mma(float *d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
#define MACKO_TILE_MMA(T, KIND)                                                                                        \
    template <>                                                                                                        \
    __device__ __forceinline__ void mma<T>(float *d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {               \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND                                            \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                  \
    }
MACKO_TILE_MMA(__half, "f16")
MACKO_TILE_MMA(__nv_bfloat16, "bf16")

// After every second step the products of both with the tile's tokens at b. Two together, as the warps of a warpgroup wait
// for each other at every wgmma. One takes 256 tokens at most: more are two.
template <typename T, int TOKENS, int STEP>
__device__ __forceinline__ void multiply_pair(float (&sums)[TOKENS / 2], const uint32_t (&a)[4][4], uint64_t b) {
    constexpr int PARTS = TOKENS > 256 ? 2 : 1, PART = TOKENS / PARTS;
    if (STEP % 2 == 0) return;
    sm90::warpgroup_arrive();
#pragma unroll
    for (int step = STEP - 1; step <= STEP; step++)
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            sm90::wgmma<T, PART>::registers(*(float (*)[PART / 2])(sums + part * (PART / 2)), a[step],
                                            b + 2 * step + part * PART * (MACKO_TILE_COLS * 2 / 16));
    sm90::warpgroup_commit_batch();
}

// The same of a whole tile at once, where the next one has registers of its own.
template <typename T, int TOKENS>
__device__ __forceinline__ void multiply_tile(float (&sums)[TOKENS / 2], uint32_t (&a)[4][4], uint64_t b) {
    // Made before the first product: else the compiler moves some in between, and ptxas has each product wait.
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+r"(a[i / 4][i % 4]));
    sm90::warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < 4; step++) sm90::wgmma<T, TOKENS>::registers(sums, a[step], b + 2 * step);
    sm90::warpgroup_commit_batch();
}

} // namespace macko
