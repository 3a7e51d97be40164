// The GEMM kernel of GPUs without wgmma: out[token][row] from packed weights and lifted activations by mma.sync and mma.sp
// (sm_80 on; float8 sm_89 on), whose lanes take metadata as slide.h stores them. Blocks are persistent.
//
//     unit      an output tile of ROWS x TOKENS; of those that would keep few blocks busy some of the k tiles (split-K)
//     block     | warp: WARP_ROWS x WARP_TOKENS of the tile, in m16n8 products: slices of 16 rows x octets of tokens |
//     stage     | tokens, TOKENS x 128 bytes, 128-byte swizzle | weights, BLOCKS tiles as packed |  cp.async by all threads
//     k tile    all steps but one: products, ldmatrix of the step behind | stage k + 1 is there, k is read: __syncthreads, or
//               a barrier in two halves | fetch k + STAGES, with two halves one less | last step: products, ldmatrix of the
//               first step of stage k + 1
//     end       scale, round, transpose (movmatrix), through 16 tokens of shared memory a warp, 16 bytes a lane to out;
//               meanwhile the first stages of the next unit are on their way
//
// Tokens' registers are filled again as soon as their last product has read them, a step ahead; weights have two sets.
#pragma once

#include "../core/cuda.cuh"
#include "gemm_cuda.cuh"

namespace macko {

// Warps of 64 x 64 read least from shared memory: of a large dense tile 64 KB a stage, with 64 x 32 96 KB (H200, down at 2048
// tokens: 510 us instead of 592). Float8 has 64 x 32: where its products are made of half-precision ones there are no
// registers for more.
template <macko_slide_type TYPE, slide_kind KIND, slide_size SIZE>
struct mma_tile {
    static constexpr bool IS_16_BIT = TYPE >= MACKO_SLIDE_F16, IS_SPARSE = KIND == SLIDE_SPARSE;
    static constexpr int ROWS = slide_size_rows(SIZE), TOKENS = slide_size_tokens(SIZE);
    static constexpr int WARP_ROWS = TOKENS == 16 ? 16 : TOKENS == 64 ? 32 : 64;
    static constexpr int WARP_TOKENS = TOKENS == 16 ? 16 : TOKENS == 128 && TYPE != MACKO_SLIDE_E4M3 ? 64 : 32;
    static constexpr int SLICES = WARP_ROWS / 16, OCTETS = WARP_TOKENS / 8;
    static constexpr int ROW_WARPS = ROWS / WARP_ROWS, WARPS = ROW_WARPS * (TOKENS / WARP_TOKENS);
    static constexpr int THREADS = WARPS * WARP;
    static constexpr int BLOCKS_PER_SM = WARP_ROWS < 64 ? 3 : THREADS == 128 ? 2 : 1; // that registers are left for
    static constexpr int BLOCKS = ROWS / MACKO_SLIDE_BLOCK_ROWS;                      // of rows
    static constexpr int TOKEN_BYTES = TOKENS * MACKO_SLIDE_TILE_BYTES;
    static constexpr int VALUE_BYTES = (IS_SPARSE ? 1 : 2) * MACKO_SLIDE_VALUE_BYTES;
    static constexpr int TILE_BYTES = VALUE_BYTES + (!IS_SPARSE ? 0 : IS_16_BIT ? 512 : 1024);
    static constexpr int STAGE_BYTES = TOKEN_BYTES + BLOCKS * TILE_BYTES;
    // Copies of 16 bytes that a thread makes of a stage.
    static constexpr int TOKEN_COPIES = TOKEN_BYTES / 16 / THREADS;
    static constexpr int WEIGHT_COPIES = (BLOCKS * TILE_BYTES / 16 + THREADS - 1) / THREADS;
    static constexpr int COPIES = TOKEN_COPIES + WEIGHT_COPIES;
    // A token's rows of a warp in shared memory, 16 bytes longer than they are: lanes' words then lie in different banks.
    static constexpr int LINE = WARP_ROWS * 2 + 16, END_TOKENS = 16, END_BYTES = WARPS * END_TOKENS * LINE;
    static constexpr int bytes(int stages) {
        return stages * STAGE_BYTES + END_BYTES + 16; // and a barrier
    }
    static_assert(TOKEN_COPIES * THREADS * 16 == TOKEN_BYTES && THREADS % 64 == 0);
};

struct mma_task {
    slide_task common; // num_tiles: of units; k_tiles: those that tokens have
    const uint8_t *lifted;
    uint16_t *out;
    int whole, split;     // tiles that are a unit each, first, and those after them that are common.splits units each
    void *partial;        // [splits][split][TOKENS][ROWS] sums
    int64_t row_bytes;    // of a block of 64 packed rows
    uint32_t token_bytes; // of a lifted token
    int64_t out_stride;
    int stages;
};

// Whether a stage's barrier is in two halves, where a block has an SM to itself: each warp arrives before its first step and
// waits before its last: faster on an H100. A stage then is free a k tile later, so a fetch is in flight with four, which
// 99 KB have no room for. Before 9.0 an arrival is a fence and ten instructions.
template <class TILE>
__host__ __device__ constexpr bool mma_arrives_early(int major) {
    return TILE::ROWS == 256 && major >= 9 && major < 12;
}

template <macko_slide_type TYPE>
__device__ constexpr bool mma_is_there() {
#if __CUDA_ARCH__ >= 890
    return true;
#elif __CUDA_ARCH__ >= 800
    return TYPE != MACKO_SLIDE_E4M3;
#else
    return false;
#endif
}

// Waits until all but the last `most` fetches, 0 to 2, have arrived. As predicates: a switch would be a jump.
__device__ __forceinline__ void wait_for_fetches(int most) {
    asm volatile("{ .reg .pred p, q;\n"
                 "  setp.lt.s32 p, %0, 1; setp.lt.s32 q, %0, 2;\n"
                 "  cp.async.wait_group 2;\n"
                 "  @q cp.async.wait_group 1;\n"
                 "  @p cp.async.wait_group 0; }" ::"r"(most)
                 : "memory");
}

// d (16 rows x 8 tokens) += A * B: a sparse step is 32 bytes of A and 64 of B, a dense one 32 and 32. SELECT: which half
// of the lanes gives the metadata of a 16-bit step.
template <macko_slide_type TYPE, int SELECT, typename D>
__device__ __forceinline__ void mma_sparse(D (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t meta);
template <macko_slide_type TYPE, typename D>
__device__ __forceinline__ void mma_dense(D (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

#define MACKO_MMA(TYPE, D, SHAPE, KIND, C)                                                                             \
    template <>                                                                                                        \
    __device__ __forceinline__ void mma_dense<TYPE, D>(D(&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {   \
        asm("mma.sync.aligned." SHAPE ".row.col." KIND " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "               \
            "{%0, %1, %2, %3};"                                                                                        \
            : "+" C(d[0]), "+" C(d[1]), "+" C(d[2]), "+" C(d[3])                                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                           \
    }
#define MACKO_MMA_SPARSE(TYPE, SELECT, D, SHAPE, KIND, C)                                                              \
    template <>                                                                                                        \
    __device__ __forceinline__ void mma_sparse<TYPE, SELECT, D>(D(&d)[4], const uint32_t (&a)[4],                      \
                                                                const uint32_t (&b)[4], uint32_t meta) {               \
        asm("mma.sp::ordered_metadata.sync.aligned." SHAPE ".row.col." KIND " {%0, %1, %2, %3}, "                      \
            "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, " #SELECT ";"                                \
            : "+" C(d[0]), "+" C(d[1]), "+" C(d[2]), "+" C(d[3])                                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(meta));      \
    }
#define MACKO_MMA_16(TYPE, KIND)                                                                                       \
    MACKO_MMA(TYPE, float, "m16n8k16", KIND, "f")                                                                      \
    MACKO_MMA_SPARSE(TYPE, 0, float, "m16n8k32", KIND, "f")                                                            \
    MACKO_MMA_SPARSE(TYPE, 1, float, "m16n8k32", KIND, "f")
#define MACKO_MMA_8(TYPE, D, KIND, C)                                                                                  \
    MACKO_MMA(TYPE, D, "m16n8k32", KIND, C) MACKO_MMA_SPARSE(TYPE, 0, D, "m16n8k64", KIND, C)
MACKO_MMA_8(MACKO_SLIDE_S8, int32_t, "s32.s8.s8.s32", "r")
MACKO_MMA_16(MACKO_SLIDE_F16, "f32.f16.f16.f32")
MACKO_MMA_16(MACKO_SLIDE_BF16, "f32.bf16.bf16.f32")
MACKO_MMA_8(MACKO_SLIDE_E4M3, float, "f32.e4m3.e4m3.f32", "f")

// Which tile a unit is of, and which of its k tiles.
template <class TILE>
struct mma_unit {
    int row_tile, token_tile, split_tile, split, first_k, k_tiles; // split_tile: of mma_task.partial, or below 0

    // Tiles in groups of a few row tiles, all token tiles of a group together: both operands are found in L2.
    __device__ mma_unit(const mma_task &of, int index) {
        constexpr int GROUP = 8;
        const slide_task &task = of.common;
        split_tile = index < of.whole ? -1 : (index - of.whole) / task.splits;
        split = index < of.whole ? 0 : (index - of.whole) % task.splits;
        const int tile = index < of.whole ? index : of.whole + split_tile, splits = index < of.whole ? 1 : task.splits;
        const int group = tile / (GROUP * task.token_tiles), first_in_group = group * GROUP;
        const int in_group = tile - first_in_group * task.token_tiles;
        const int group_rows = min(GROUP, task.row_tiles - first_in_group);
        token_tile = in_group / group_rows, row_tile = first_in_group + in_group % group_rows;
        first_k = split * task.k_tiles / splits;
        k_tiles = (split + 1) * task.k_tiles / splits - first_k;
    }
};

// What a thread copies of every stage of a unit: the same rows, a k tile further on.
template <class TILE>
struct mma_copies {
    static constexpr int VECTORS = TILE::BLOCKS * TILE::TILE_BYTES / 16;
    const uint8_t *tokens, *weights; // of the tile's next k tile
    uint32_t token_offset[TILE::TOKEN_COPIES], weight_offset[TILE::WEIGHT_COPIES];
    uint32_t token_to, weight_to; // in a stage
    int unit, left;               // left: k tiles of it; of no unit more than there ever are
    int bytes_left;               // of a token of 16-bit numbers, whose row may end within a k tile

    __device__ mma_copies(const mma_task &task, uint32_t smem) : unit(blockIdx.x) {
        token_to = smem + threadIdx.x / 8 * 128 + ((threadIdx.x ^ threadIdx.x / 8) % 8 << 4);
        weight_to = smem + TILE::TOKEN_BYTES + threadIdx.x * 16;
        start(task);
    }

    // The first k tile of `unit`. After the last token and the last row block: any do, their output is not stored.
    __device__ void start(const mma_task &task) {
        if (unit >= task.common.num_tiles) {
            left = INT_MAX;
            return;
        }
        const mma_unit<TILE> at(task, unit);
        const int first_token = at.token_tile * TILE::TOKENS, first_block = at.row_tile * TILE::BLOCKS;
        tokens = task.lifted + (int64_t)first_token * task.token_bytes + at.first_k * MACKO_SLIDE_TILE_BYTES;
        weights = task.common.packed + first_block * task.row_bytes + (int64_t)at.first_k * TILE::TILE_BYTES;
#pragma unroll
        for (int j = 0; j < TILE::TOKEN_COPIES; j++) {
            const int token = threadIdx.x / 8 + j * (TILE::THREADS / 8);
            token_offset[j] =
                min(token, task.common.tokens - 1 - first_token) * task.token_bytes + threadIdx.x % 8 * 16;
        }
#pragma unroll
        for (int j = 0; j < TILE::WEIGHT_COPIES; j++) {
            const int vector = threadIdx.x + j * TILE::THREADS, block = vector / (TILE::TILE_BYTES / 16);
            weight_offset[j] = min(block, task.common.row_blocks - 1 - first_block) * (uint32_t)task.row_bytes +
                               vector % (TILE::TILE_BYTES / 16) * 16;
        }
        left = at.k_tiles;
        bytes_left = task.token_bytes - at.first_k * MACKO_SLIDE_TILE_BYTES - threadIdx.x % 8 * 16;
    }

    // Copy `j` of the next k tile to a stage.
    __device__ __forceinline__ void copy(const mma_task &task, uint32_t stage, int j) {
        if (left > INT_MAX / 2) return; // there is no unit more
        if (j < TILE::TOKEN_COPIES) {
            const uint32_t to = token_to + stage + j * (TILE::THREADS / 8 * 128);
            if constexpr (TILE::IS_16_BIT)
                copy_async_some(to, tokens + token_offset[j], bytes_left <= 0 ? 0 : 16);
            else
                copy_async<16>(to, tokens + token_offset[j]);
        } else {
            j -= TILE::TOKEN_COPIES;
            if ((j + 1) * TILE::THREADS <= VECTORS || threadIdx.x + j * TILE::THREADS < VECTORS)
                copy_async<16>(weight_to + stage + j * (TILE::THREADS * 16), weights + weight_offset[j]);
        }
    }

    // After the copies of a k tile; it commits whether or not there were any, so that those which wait count right.
    __device__ __forceinline__ void next() {
        tokens += MACKO_SLIDE_TILE_BYTES;
        weights += TILE::TILE_BYTES;
        if constexpr (TILE::IS_16_BIT) bytes_left -= MACKO_SLIDE_TILE_BYTES;
        commit_copies();
    }

    // After `count` k tiles have been fetched: to the next unit where this one is at its end.
    __device__ void advance(const mma_task &task, int count) {
        if ((left -= count) > 0) return;
        unit += gridDim.x;
        start(task);
    }
};

// A warp's operands and sums. A step is what one product takes of a k tile: half of a sparse one, a quarter of a dense one.
template <macko_slide_type TYPE, slide_kind KIND, slide_size SIZE>
struct mma_warp {
    using TILE = mma_tile<TYPE, KIND, SIZE>;
    static constexpr int STEPS = TILE::IS_SPARSE ? 2 : 4;
    uint32_t tokens_at, values_at, meta_at; // for ldmatrix, in a stage
    uint32_t tokens[TILE::OCTETS][4];       // of the half that is multiplied, or of the next one
    uint32_t values[2][TILE::SLICES][4];    // of this step and of the next one
    uint32_t meta[2][4];
    slide_sum<TYPE> sums[TILE::SLICES][TILE::OCTETS][4];

    __device__ mma_warp(uint32_t smem) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const int row = warp % TILE::ROW_WARPS * TILE::WARP_ROWS, token = warp / TILE::ROW_WARPS * TILE::WARP_TOKENS;
        const uint32_t weights_at = smem + TILE::TOKEN_BYTES + row / 64 * TILE::TILE_BYTES;
        const int lane_row = row % 64 + lane % 16;
        tokens_at = smem + (token + lane % 8) * 128 + ((lane / 8 ^ lane % 8) << 4);
        values_at = weights_at + (TILE::IS_SPARSE ? lane_row * 64 + ((lane / 16 ^ lane_row / 2 % 4) << 4)
                                                  : lane_row * 128 + ((lane / 16 ^ lane_row % 8) << 4));
        // The words of a slice are 128 bytes: a matrix for ldmatrix.
        meta_at = weights_at + TILE::VALUE_BYTES + (row % 64 / 16 + lane / 8 % TILE::SLICES) * 128 + lane % 8 * 16;
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int slice = 0; slice < TILE::SLICES; slice++)
#pragma unroll
            for (int octet = 0; octet < TILE::OCTETS; octet++)
#pragma unroll
                for (auto &sum : sums[slice][octet]) sum = 0;
    }

    template <int HALF>
    __device__ __forceinline__ void load_tokens(int octet, uint32_t stage) {
        ldmatrix_x4(tokens[octet], (tokens_at ^ HALF * 64) + stage + octet * 1024);
    }

    template <int STEP>
    __device__ __forceinline__ void load_values(int slice, uint32_t stage) {
        ldmatrix_x4(values[STEP % 2][slice], (values_at ^ STEP * 32) + stage + slice * (TILE::IS_SPARSE ? 1024 : 2048));
    }

    // 16-bit k tiles have one word for both halves.
    template <int HALF>
    __device__ __forceinline__ void load_meta(uint32_t stage) {
        if constexpr (!TILE::IS_SPARSE) return;
        if constexpr (TILE::IS_16_BIT && HALF) {
#pragma unroll
            for (int slice = 0; slice < TILE::SLICES; slice++) meta[1][slice] = meta[0][slice];
        } else {
            ldmatrix_x4(meta[HALF], meta_at + stage + HALF * 512);
        }
    }

    // What the first step of a stage takes.
    __device__ void load(uint32_t stage) {
        load_meta<0>(stage);
#pragma unroll
        for (int octet = 0; octet < TILE::OCTETS; octet++) load_tokens<0>(octet, stage);
#pragma unroll
        for (int slice = 0; slice < TILE::SLICES; slice++) load_values<0>(slice, stage);
    }

    // Step STEP of a stage; what the next step takes comes from stage `next`, a load every few products: they take their
    // turns in shared memory with those of other warps. copy(j): copy j of a later stage, dealt out likewise.
    template <int STEP, class COPY>
    __device__ __forceinline__ void multiply(uint32_t next, COPY copy) {
        constexpr int PER_HALF = STEPS / 2, HALF = STEP / PER_HALF, NEXT = (STEP + 1) % STEPS;
        if constexpr (STEP % PER_HALF == 0) load_meta<1 - HALF>(next);
#pragma unroll
        for (int octet = 0; octet < TILE::OCTETS; octet++) {
#pragma unroll
            for (int slice = 0; slice < TILE::SLICES; slice++) {
                if constexpr (TILE::IS_SPARSE)
                    mma_sparse<TYPE, TILE::IS_16_BIT ? HALF : 0>(sums[slice][octet], values[STEP % 2][slice],
                                                                 tokens[octet], meta[HALF][slice]);
                else
                    mma_dense<TYPE>(sums[slice][octet], values[STEP % 2][slice], tokens[octet][STEP % 2 * 2],
                                    tokens[octet][STEP % 2 * 2 + 1]);
            }
            if constexpr ((STEP + 1) % PER_HALF == 0) load_tokens<1 - HALF>(octet, next);
            if (octet * TILE::SLICES % TILE::OCTETS == 0) load_values<NEXT>(octet * TILE::SLICES / TILE::OCTETS, next);
            // A copy behind a load costs three instructions more (LDS of no address): so some copies together.
            constexpr int GROUP = TILE::OCTETS < 4 ? TILE::OCTETS : 4, COPIES = TILE::COPIES;
            if (octet % GROUP) continue;
            const int begin = octet * COPIES / TILE::OCTETS, end = (octet + GROUP) * COPIES / TILE::OCTETS;
#pragma unroll
            for (int j = 0; j < COPIES; j++) // from 0: else it is not unrolled, and offsets lie in local memory
                if (begin <= j && j < end) copy(j);
        }
    }

    // Sums of a part of the k tiles, to be added up: lanes have 8 rows of a token together.
    __device__ void store_partial(const mma_task &task, const mma_unit<TILE> &unit, int row, int token) {
        const int lane = threadIdx.x % WARP, tile = unit.split * task.split + unit.split_tile;
        auto *to = (slide_sum<TYPE> *)task.partial + (int64_t)tile * (TILE::ROWS * TILE::TOKENS) +
                   (token + lane % 4 * 2) * TILE::ROWS + row + lane / 4;
#pragma unroll
        for (int i = 0; i < TILE::SLICES * TILE::OCTETS * 4; i++) {
            const int slice = i / (TILE::OCTETS * 4), octet = i / 4 % TILE::OCTETS;
            to[(octet * 8 + i % 2) * TILE::ROWS + slice * 16 + i / 2 % 2 * 8] = sums[slice][octet][i % 4];
        }
    }

    // Scaled, rounded and stored, END_TOKENS tokens at a time: through the warp's shared memory at `at`, so that a token's
    // rows are together.
    __device__ void store(const mma_task &task, uint32_t at, int64_t first_row, int first_token) {
        const int lane = threadIdx.x % WARP;
        const slide_task &common = task.common;
        float scale[2 * TILE::SLICES], bias[2 * TILE::SLICES];
#pragma unroll
        for (int i = 0; i < 2 * TILE::SLICES; i++) {
            const int64_t row = first_row + i * 8 + lane / 4;
            scale[i] = row < common.rows ? common.scale[row] : 0, bias[i] = slide_bias(common, row);
        }
#pragma unroll
        for (int pair = 0; pair < TILE::OCTETS / 2; pair++, first_token += TILE::END_TOKENS) {
            float by_token[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = first_token + i / 2 * 8 + lane % 4 * 2 + i % 2;
                by_token[i] = common.token_scale && token < common.tokens ? common.token_scale[token] : 1;
            }
#pragma unroll
            for (int i = 0; i < 2 * TILE::SLICES; i++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const slide_sum<TYPE> *two = sums[i / 2][2 * pair + j] + i % 2 * 2;
                    const uint32_t rounded =
                        slide_pack2(fmaf(scale[i], by_token[2 * j] * (float)two[0], bias[i]),
                                    fmaf(scale[i], by_token[2 * j + 1] * (float)two[1], bias[i]), common.is_bf16);
                    store_shared_4(at + (j * 8 + lane / 4) * TILE::LINE + i * 16 + lane % 4 * 4, movmatrix(rounded));
                }
            }
            __syncwarp();
            store_lines(task, at, first_row, first_token);
            __syncwarp();
        }
    }

    __device__ __forceinline__ void store_lines(const mma_task &task, uint32_t at, int64_t first_row, int first_token) {
        constexpr int EIGHTS = TILE::WARP_ROWS / 8;
#pragma unroll
        for (int i = threadIdx.x % WARP; i < TILE::END_TOKENS * EIGHTS; i += WARP) {
            const int token = first_token + i / EIGHTS;
            const int64_t row = first_row + i % EIGHTS * 8;
            if (token < task.common.tokens && row < task.out_stride)
                *(uint4 *)(task.out + token * task.out_stride + row) =
                    load_shared_16(at + i / EIGHTS * TILE::LINE + i % EIGHTS * 16);
        }
    }
};

template <macko_slide_type TYPE, slide_kind KIND, slide_size SIZE>
__global__ void __launch_bounds__(mma_tile<TYPE, KIND, SIZE>::THREADS, mma_tile<TYPE, KIND, SIZE>::BLOCKS_PER_SM)
    slide_mma_kernel(const __grid_constant__ mma_task task) {
    if constexpr (!mma_is_there<TYPE>()) return; // and is not launched
    using TILE = mma_tile<TYPE, KIND, SIZE>;
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t smem = shared_address(memory), end = task.stages * TILE::STAGE_BYTES;
    const int warp = threadIdx.x / WARP;
    mma_copies<TILE> copies(task, smem);
#ifdef __CUDA_ARCH__
    constexpr bool EARLY = mma_arrives_early<TILE>(__CUDA_ARCH__ / 100);
#else
    constexpr bool EARLY = false;
#endif
    const uint32_t barrier = smem + end + TILE::END_BYTES;
    uint32_t phase = 0;
    if (EARLY && threadIdx.x == 0) sm90::barrier_init(barrier, TILE::WARPS * sm90::WARP_ARRIVALS);
    for (uint32_t stage = 0; stage < end - EARLY * TILE::STAGE_BYTES; stage += TILE::STAGE_BYTES) {
#pragma unroll
        for (int j = 0; j < TILE::COPIES; j++) copies.copy(task, stage, j);
        copies.next();
        copies.advance(task, 1);
    }
    const int most = task.stages - 2 - EARLY; // fetches that need not have arrived for the next stage
    wait_for_fetches(most);                   // one more than has to be
    __syncthreads();
    mma_warp<TYPE, KIND, SIZE> own(smem);
    own.load(0);
    own.clear();
    uint32_t stage = 0;
    for (int index = blockIdx.x; index < task.common.num_tiles; index += gridDim.x) {
        const mma_unit<TILE> unit(task, index);
        for (int left = unit.k_tiles; left;) {
            const int count = min(left, copies.left);
            for (int k_tile = 0; k_tile < count; k_tile++) {
                const auto none = [](int) {};
                if constexpr (EARLY) {
                    wait_for_fetches(most);
                    __syncwarp();
                    if (threadIdx.x % WARP < sm90::WARP_ARRIVALS) sm90::barrier_arrive(barrier);
                }
                own.template multiply<0>(stage, none);
                if constexpr (own.STEPS == 4) {
                    own.template multiply<1>(stage, none);
                    own.template multiply<2>(stage, none);
                }
                // The next stage has arrived for all warps, and all have read this one, or the one before.
                if constexpr (EARLY) {
                    sm90::barrier_wait(barrier, phase);
                    phase ^= 1;
                } else {
                    wait_for_fetches(most);
                    __syncthreads();
                }
                const uint32_t read = EARLY ? (stage == 0 ? end : stage) - TILE::STAGE_BYTES : stage;
                stage = stage + TILE::STAGE_BYTES == end ? 0 : stage + TILE::STAGE_BYTES;
                own.template multiply<own.STEPS - 1>(stage, [&](int j) { copies.copy(task, read, j); });
                copies.next();
            }
            copies.advance(task, count);
            left -= count;
        }
        const int row = warp % TILE::ROW_WARPS * TILE::WARP_ROWS, token = warp / TILE::ROW_WARPS * TILE::WARP_TOKENS;
        if (unit.split_tile >= 0)
            own.store_partial(task, unit, row, token);
        else
            own.store(task, smem + end + warp * TILE::END_TOKENS * TILE::LINE, unit.row_tile * TILE::ROWS + row,
                      unit.token_tile * TILE::TOKENS + token);
        own.clear();
    }
    wait_copies<0>();
}

// out from the partial sums of split-K, added in the order of the splits; blockIdx.x is a tile, a thread has a row of a
// token.
template <typename SUM, class TILE>
__global__ void slide_mma_add_splits(const __grid_constant__ mma_task task) {
    const mma_unit<TILE> unit(task, task.whole + blockIdx.x * task.common.splits);
    const int at = blockIdx.y * blockDim.x + threadIdx.x;
    const int row = unit.row_tile * TILE::ROWS + at % TILE::ROWS;
    const int token = unit.token_tile * TILE::TOKENS + at / TILE::ROWS;
    if (row >= task.common.rows || token >= task.common.tokens) return;
    const SUM *partial = (const SUM *)task.partial + (int64_t)blockIdx.x * (TILE::ROWS * TILE::TOKENS) + at;
    SUM sum = 0;
    for (int split = 0; split < task.common.splits; split++)
        sum += partial[(int64_t)split * task.split * (TILE::ROWS * TILE::TOKENS)];
    const float by_token = task.common.token_scale ? task.common.token_scale[token] : 1;
    const float value = fmaf(task.common.scale[row], by_token * (float)sum, slide_bias(task.common, row));
    task.out[token * task.out_stride + row] = (uint16_t)slide_pack2(value, 0, task.common.is_bf16);
}

} // namespace macko
