// How values are written in a slab, as the kernels ask it: of a codec, which is a struct of
//
//     T            what is multiplied, __half or __nv_bfloat16
//     constants    what a launch tells of the weight besides its bytes
//     SAME_SIZE    whether all slabs are of one size, so that nobody has to look up where one begins
//     takes        whether there is a kernel of a shape for many tokens: not where ptxas has too few registers, and so
//                  waits for each product, nor 192 x 192 where it is slower than 128 x 192 (sparse11 8 %, dense12 a quarter:
//                  12288 x 12288 by 384 tokens, H100, 2026-11-28)
//     SCALED       whether sums are to be multiplied with constants.scales[row] * FOLD
//     BASE         byte of a slab to which the readers' addresses refer
//     LEAST_BYTES  of a slab, where they differ
//     FOLD         a power of two that a SCALED codec leaves out of what it decodes
//     HALVES_TO    tokens up to which a warp takes two tiles of every other slab (few_kernel.cuh), 0: never. Else also:
//     half_reader  as few_reader, but tiles 0 and 1 that it is asked for are neighbours in a slab
//     STEPS, HALF_STEPS
//                  how many steps few_reader and half_reader make before operand A of the first is whole (1, 2 or 4):
//                  listed values come after them. Products wait for that (ring_kernel.cuh)
//     few_reader   a warp that takes the same tile of every slab (few_kernel.cuh, ring_kernel.cuh). prepare: a tile,
//                  while the one before it is multiplied, in steps 0 to 3; load_next: what step + 1 wants; make:
//                  operand A of a step; move_1_to_0: the tile that was prepared as 1 is 0 from then on
//     many_reader  the same of a warp that takes tile after tile (many_kernel.cuh). open: a slab; skip_half: to its third
//                  tile; advance: to the tile that is prepared
//     READS_AHEAD  whether there is also:
//     ahead_reader the same where a thread has registers for two tiles (macko_slab_reads_ahead). open: a slab, and what
//                  is read ahead of its first tile; start: at this or the third one; load_next: of tile NEXT what step
//                  STEP leaves room for; read_ahead: of the tile after that, once TILE is made
//
// It is in codec.cuh of a folder of ../codecs, after with_weight(m, run), which calls run(slab_weight) of the matrix m with
// the codec of its types. Reader functions are templates of the step, and of which of two
// tiles is meant (0 or 1).
#pragma once

#include "../core/cuda.cuh"
#include "../core/wgmma.cuh"
#include "decode.cuh"
#include "schedule.h"

namespace macko {

// The weight of a launch.
template <class CODEC>
struct slab_weight {
    using codec = CODEC;
    using T = typename CODEC::T;
    const uint8_t *data;
    const int32_t *offsets; // NULL if SAME_SIZE
    int64_t rows, cols;
    int widest;    // units of the largest slab
    int64_t units; // of data
    typename CODEC::constants constants;
};

// few_reader, or of two neighbouring tiles (HALF) half_reader.
template <class CODEC, bool HALF>
struct few_reader_of {
    using type = typename CODEC::few_reader;
    static constexpr int STEPS = CODEC::STEPS;
};
template <class CODEC>
struct few_reader_of<CODEC, true> {
    using type = typename CODEC::half_reader;
    static constexpr int STEPS = CODEC::HALF_STEPS;
};

// A tile with none before it. TILE: of a reader of few tokens, which of two.
template <int... TILE, class READER, typename... ARGUMENTS>
__device__ __forceinline__ void prepare_tile(READER &reader, const ARGUMENTS &...arguments) {
    reader.template prepare<0, TILE...>(arguments...);
    reader.template prepare<1, TILE...>(arguments...);
    reader.template prepare<2, TILE...>(arguments...);
    reader.template prepare<3, TILE...>(arguments...);
}

// d += a b of a warp, 16 x 16 by 16 x 8, from compute capability 8.0 on.
template <typename T>
__device__ __forceinline__ void mma(float *d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
#define MACKO_SLAB_MMA(T, KIND)                                                                                        \
    template <>                                                                                                        \
    __device__ __forceinline__ void mma<T>(float *d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {               \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND                                            \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                  \
    }
MACKO_SLAB_MMA(__half, "f16")
MACKO_SLAB_MMA(__nv_bfloat16, "bf16")

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
                                            b + 2 * step + part * PART * (MACKO_SLAB_TILE_COLS * 2 / 16));
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
