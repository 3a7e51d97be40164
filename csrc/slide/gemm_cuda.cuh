// The GEMM kernel of sm_90a: out[token][row] from packed weights, sparse or dense, and lifted activations. Blocks are
// persistent: a cluster takes one output tile after the other.
//
//     output tile  64 or 128 rows x TOKENS tokens of a block; the weight is operand A, the only one that may be sparse
//     warpgroups   | consumer 0: rows 0..63 | consumer 1: rows 64..127, of large tiles | producer: one thread |
//     stage        | tokens, TOKENS x 128 bytes: TMA, 128-byte swizzle | weights, a tile a consumer: bulk copies |
//                  128 bytes of expanded columns, a k tile; one full and one empty mbarrier
//     cluster      of large tiles 2 blocks with neighbouring rows: each loads half of the tokens and multicasts it to both
//                  (without it 50 % slower on an H200); of few small tiles 2 or 4 blocks that share one tile, each some of its
//                  k tiles (split-K): the first block adds the others' sums, which come through DSMEM; of few large tiles,
//                  whose sums are many, 2 to 4 blocks, or pairs, each of which adds the sums of some tokens
//     consumer     | k tiles 0, 1 | store 0 of the tile before | k tiles 2, 3 | store 1 | ... | last sums: scale, round, keep |
//     a store      up to 32 tokens x 64 rows: stmatrix into a staging buffer, of which there are two, then TMA
//
// Sparse wgmma reads its tokens at twice the dense rate, 128 B a clock with the weights: what shared memory can give.
// So a sparse step of 64 x 256 takes 144 clocks instead of 128, and a stage 625 of 512 (H200, 2026-11-21).
#pragma once

#include <type_traits>

#include "../core/cuda.cuh"
#include "../core/pipeline.cuh"
#include "../core/wgmma.cuh"
#include "slide.h"

namespace macko {

// The C++ type of the numbers, and of their sums.
template <macko_slide_type TYPE>
using slide_element =
    std::conditional_t<TYPE == MACKO_SLIDE_S8, int8_t,
                       std::conditional_t<TYPE == MACKO_SLIDE_E4M3, __nv_fp8_e4m3,
                                          std::conditional_t<TYPE == MACKO_SLIDE_F16, __half, __nv_bfloat16>>>;
template <macko_slide_type TYPE>
using slide_sum = std::conditional_t<TYPE == MACKO_SLIDE_S8, int32_t, float>;

enum slide_kind { SLIDE_DENSE = 0, SLIDE_SPARSE = 1 };

// Rows x tokens of a block's tile: a warpgroup has 64 rows.
enum slide_size : int {
    SLIDE_64x16 = 64 << 16 | 16,
    SLIDE_64x32 = 64 << 16 | 32,
    SLIDE_64x64 = 64 << 16 | 64,
    SLIDE_128x64 = 128 << 16 | 64,
    SLIDE_128x128 = 128 << 16 | 128,
    SLIDE_128x192 = 128 << 16 | 192,
    SLIDE_128x256 = 128 << 16 | 256,
    SLIDE_256x128 = 256 << 16 | 128, // of GPUs without wgmma
};

__host__ __device__ constexpr int slide_size_rows(slide_size size) {
    return size >> 16;
}
__host__ __device__ constexpr int slide_size_tokens(slide_size size) {
    return size & 0xffff;
}

// Who adds the sums of blocks that share k tiles. All: large tiles alone, 1 or 2 blocks that multicast at run time. Down of
// Qwen2.5-7B, 6:8: 64, 128, 256 tokens 1.22, 1.18, 1.28 times as fast as before; but small tiles that finish so took 6 % more
// at 16 tokens, and large tiles without splits 1 to 2 % more where one kernel served all (H100, 2026-11-28).
enum slide_finish { SLIDE_FIRST_FINISHES, SLIDE_ALL_FINISH };

// Blocks of a cluster: those that multicast tokens, times those that share k tiles (split-K).
struct slide_cluster {
    int multicast, splits;
};

struct slide_plan {
    slide_size size;
    slide_cluster cluster;
};

constexpr slide_finish slide_finish_of(slide_plan plan) {
    const bool large = slide_size_rows(plan.size) == 128;
    return plan.size == SLIDE_128x64 || (large && plan.cluster.splits > 1) ? SLIDE_ALL_FINISH : SLIDE_FIRST_FINISHES;
}

// What the launcher prepares. A tile is that of a cluster; after the whole tiles come halves of tiles.
struct slide_task {
    // The last tile along the tokens has a tensor map with a smaller box: rows after the last token take TMA longer than rows
    // that exist (down at 72 tokens 40.5 -> 25.9 us).
    CUtensorMap lifted, last_lifted, out;
    const uint8_t *packed;
    const float *scale, *token_scale;
    const uint16_t *bias;
    int64_t rows;
    int tokens, row_blocks, k_tiles, row_tiles, token_tiles;
    int whole_tiles, num_tiles;
    int last_share; // tokens of a last tile that each block of a cluster loads
    int splits;     // blocks, or pairs, that share the k tiles of one tile (split-K)
    int uses_pdl;   // the launch starts while the quantiser still runs
    int is_bf16;    // the output and the bias; else fp16
    int multicast;  // blocks of a pair, or 1: where all finish, else a constant
};

// With what it takes of the arguments as they are.
inline slide_task slide_task_of(const macko_slide_gemm_args &args) {
    slide_task task{};
    task.packed = args.weight.packed;
    task.scale = args.weight.scale;
    task.token_scale = args.token_scale;
    task.bias = (const uint16_t *)args.bias;
    task.rows = args.weight.shape.rows;
    task.tokens = (int)args.tokens;
    task.row_blocks = (int)macko_slide_row_blocks(task.rows);
    task.is_bf16 = args.out_dtype == MACKO_BF16;
    return task;
}

template <macko_slide_type TYPE, slide_kind KIND, slide_size SIZE, slide_finish FINISH>
struct slide_tile {
    static constexpr bool ALL_FINISH = FINISH == SLIDE_ALL_FINISH;
    static constexpr int TOKENS = slide_size_tokens(SIZE);
    static constexpr int WARPGROUPS = slide_size_rows(SIZE) / 64;
    static constexpr int CLUSTER = TOKENS >= 128 ? 2 : 1; // blocks that multicast, unless all finish
    static constexpr int BLOCKS_PER_SM = WARPGROUPS == 1 ? 2 : 1;
    static constexpr int THREADS = 128 * (WARPGROUPS + 1);
    static constexpr int META_BYTES = KIND == SLIDE_DENSE ? 0 : TYPE <= MACKO_SLIDE_E4M3 ? 1024 : 512;
    static constexpr int VALUE_BYTES = KIND == SLIDE_DENSE ? 8192 : 4096;
    static constexpr int TILE_BYTES = VALUE_BYTES + META_BYTES;
    static constexpr int TOKEN_BYTES = TOKENS * 128, WEIGHT_BYTES = WARPGROUPS * TILE_BYTES; // of a stage
    static constexpr int STORE_TOKENS = TOKENS < 32 ? TOKENS : 32; // tokens of a TMA store, at most a warp's
    static constexpr int STORE_BYTES = STORE_TOKENS * 128;
    // An SM has 228 KB, of which each block loses 1 KB.
    static constexpr int BUDGET = 228 * 1024 / BLOCKS_PER_SM - 1024 - (SIZE == SLIDE_128x64 ? 32 << 10 : 0);
    static constexpr int MAX_SPLITS = ALL_FINISH ? 4 : CLUSTER > 1 ? 1 : TOKENS == 64 ? 2 : 4;
    static constexpr int PARTIAL_BYTES = TOKENS * 256; // 64 rows of partial sums
    static constexpr int ALL_PARTIALS = ALL_FINISH ? 0 : (MAX_SPLITS - 1) * PARTIAL_BYTES;
    static constexpr int FIXED = WARPGROUPS * 2 * STORE_BYTES + ALL_PARTIALS + 256;
    static constexpr int FIT = (BUDGET - FIXED) / (TOKEN_BYTES + WEIGHT_BYTES);
    static constexpr int STAGES = FIT < 15 ? FIT : 15;
    __host__ __device__ static int multicast(const slide_task &task) {
        return ALL_FINISH ? task.multicast : CLUSTER;
    }
    __host__ __device__ static int blocks(const slide_task &task) { // of a cluster
        return ALL_FINISH ? task.multicast * task.splits : MAX_SPLITS > 1 ? task.splits : CLUSTER;
    }
    // Of a stage.
    __host__ __device__ static int releases(const slide_task &task) {
        return WARPGROUPS * (KIND == SLIDE_SPARSE ? 127 + multicast(task) : multicast(task));
    }
    static constexpr int PREFETCH = 65536 / WEIGHT_BYTES; // stages, so that all blocks' together fit L2
    // Offsets in shared memory; the swizzles want multiples of 1024 (tokens, staging, dense tiles) and 512.
    static constexpr int STAGING = STAGES * TOKEN_BYTES;
    static constexpr int WEIGHTS = STAGING + WARPGROUPS * 2 * STORE_BYTES;
    static constexpr int PARTIALS = WEIGHTS + STAGES * WEIGHT_BYTES;
    static constexpr int BARRIERS = PARTIALS + ALL_PARTIALS; // full, empty, partial sums arrived
    static constexpr int SMEM_BYTES = BARRIERS + STAGES * 16 + 8;
    // All finish, when all stages have been read: sums where tokens were, the scales of tokens where outputs are staged, and
    // the finished octets of tokens, at most half of a tile's and one, where weights were.
    static constexpr int OCTETS = TOKENS / 8, DONE_BYTES = (OCTETS / 2 + 1) * 1024;
    static_assert(!ALL_FINISH || (WARPGROUPS * PARTIAL_BYTES <= STAGES * TOKEN_BYTES && TOKENS * 4 <= 2 * STORE_BYTES));
    static_assert(!ALL_FINISH || WARPGROUPS * DONE_BYTES <= STAGES * WEIGHT_BYTES);
    // 96 or 128 sums a thread and the rounded ones of the tile before need more registers than 384 threads get: the
    // producer deallocates its own for the consumers (setmaxnreg).
    static constexpr bool MOVES_REGISTERS = TOKENS > 128;
    static_assert(STAGES >= 4 && SMEM_BYTES <= BUDGET && STAGES <= 15);
    static constexpr int CONSUMER_REGISTERS = ALL_FINISH ? 232 : 240, PRODUCER_REGISTERS = ALL_FINISH ? 40 : 24;
    static_assert((CONSUMER_REGISTERS * WARPGROUPS + PRODUCER_REGISTERS) * 128 <= 168 * THREADS || !MOVES_REGISTERS,
                  "setmaxnreg would hang");
};

// How many tiles are done whole by so many clusters at once. Where the last wave would occupy at most half of the clusters,
// its tiles are cut into halves, half of the rows each, which blocks do with one warpgroup: float8 at 4096 tokens
// 96.8 -> 88.6 us for o, 475 -> 432 us for down (3.4 rounds; H200, under load).
__host__ __device__ constexpr int64_t slide_whole_tiles(int64_t tiles, int64_t clusters, int warpgroups) {
    return warpgroups > 1 && tiles % clusters * 2 <= clusters ? tiles / clusters * clusters : tiles;
}

// What a block does of a tile: row blocks of 64 rows from `row_block` on, one for each warpgroup that has work.
struct slide_work {
    int row_block, warpgroups, token_tile;
};

// Tiles in groups of a few row tiles, all token tiles of a group together: both operands are found in L2.
template <class TILE>
__device__ __forceinline__ slide_work slide_work_of(const slide_task &task, int tile, int rank) {
    constexpr int GROUP = 8;
    const int half = tile - task.whole_tiles; // index among the halves; negative: a whole tile
    if (TILE::WARPGROUPS > 1 && half >= 0) tile = task.whole_tiles + half / 2;
    const int group = tile / (GROUP * task.token_tiles), in_group = tile - group * GROUP * task.token_tiles;
    const int rows = min(GROUP, task.row_tiles - group * GROUP);
    const int token_tile = in_group / rows, row_tile = group * GROUP + in_group - token_tile * rows;
    if (TILE::WARPGROUPS > 1 && half >= 0)
        return {(row_tile * TILE::WARPGROUPS + half % 2) * TILE::multicast(task) + rank, 1, token_tile};
    return {(row_tile * TILE::multicast(task) + rank) * TILE::WARPGROUPS, TILE::WARPGROUPS, token_tile};
}

// The first k tile of one of the blocks that share a tile (split-K): they get whole pairs.
template <class TILE>
__device__ __forceinline__ int slide_first_k_tile(const slide_task &task, int split) {
    if (TILE::MAX_SPLITS == 1) return split ? task.k_tiles : 0;
    return task.k_tiles / 2 * split / task.splits * 2;
}

__device__ __forceinline__ uint32_t slide_pack2(float low, float high, int is_bf16) {
    return is_bf16 ? from_float2<__nv_bfloat16>(low, high) : from_float2<__half>(low, high);
}

__device__ __forceinline__ float slide_bias(const slide_task &task, int64_t row) {
    if (!task.bias || row >= task.rows) return 0;
    const uint16_t bits = task.bias[row];
    return task.is_bf16 ? __uint_as_float((uint32_t)bits << 16) : __half2float(__ushort_as_half(bits));
}

// The producer, one thread of a block: fills the stages with the tokens and the weights of all tiles of its cluster.
template <class TILE>
__device__ void slide_produce(const slide_task &task, uint32_t smem, int rank, int split) {
    const int blocks = TILE::blocks(task), multicast = TILE::multicast(task);
    const int first_k_tile = slide_first_k_tile<TILE>(task, split),
              last_k_tile = slide_first_k_tile<TILE>(task, split + 1);
    const uint16_t ranks = ((1 << multicast) - 1) << (TILE::ALL_FINISH ? split * multicast : 0);
    const uint32_t full = smem + TILE::BARRIERS, empty = full + TILE::STAGES * 8;
    // Past the last row block: any rows do, their output is not stored.
    const auto weights_of = [&](int row_block) {
        return task.packed + (int64_t)min(row_block, task.row_blocks - 1) * task.k_tiles * TILE::TILE_BYTES;
    };
    if (task.uses_pdl && (int)blockIdx.x / blocks < task.num_tiles) {
        // PDL: the weights exist before the tokens do, so the first ones are brought to L2 meanwhile.
        const slide_work work = slide_work_of<TILE>(task, blockIdx.x / blocks, rank);
        for (int i = 0; i < work.warpgroups; i++)
            sm90::bulk_prefetch_l2(weights_of(work.row_block + i) + (int64_t)first_k_tile * TILE::TILE_BYTES,
                                   min(last_k_tile - first_k_tile, TILE::PREFETCH) * TILE::TILE_BYTES);
    }
    pdl_wait();
    sm90::pipeline_state pipeline;
    for (int tile = blockIdx.x / blocks; tile < task.num_tiles; tile += gridDim.x / blocks) {
        const slide_work work = slide_work_of<TILE>(task, tile, rank);
        const bool is_last = work.token_tile == task.token_tiles - 1;
        const CUtensorMap *lifted = is_last ? &task.last_lifted : &task.lifted;
        const int share = is_last ? task.last_share : TILE::TOKENS / multicast;
        const int token = work.token_tile * TILE::TOKENS + rank * share;
        const uint8_t *weights[TILE::WARPGROUPS];
#pragma unroll
        for (int i = 0; i < TILE::WARPGROUPS; i++) weights[i] = weights_of(work.row_block + i);
        for (int k_tile = first_k_tile; k_tile < last_k_tile; k_tile++, pipeline.advance(TILE::STAGES)) {
            const uint32_t barrier = full + pipeline.stage * 8;
            sm90::producer_acquire(empty, pipeline);
            sm90::barrier_arrive_expect_tx(barrier, share * multicast * 128 + work.warpgroups * TILE::TILE_BYTES);
            const uint32_t tokens = smem + pipeline.stage * TILE::TOKEN_BYTES + rank * share * 128;
            if (multicast == 1)
                sm90::tma_load(tokens, lifted, k_tile * 128, token, barrier);
            else
                sm90::tma_load_multicast(tokens, lifted, k_tile * 128, token, barrier, ranks);
#pragma unroll
            for (int i = 0; i < TILE::WARPGROUPS; i++)
                if (i < work.warpgroups)
                    sm90::bulk_copy(smem + TILE::WEIGHTS + pipeline.stage * TILE::WEIGHT_BYTES + i * TILE::TILE_BYTES,
                                    weights[i] + (int64_t)k_tile * TILE::TILE_BYTES, TILE::TILE_BYTES, barrier);
        }
    }
}

// The products of a stage. meta: the registers for its metadata, which lie at meta_at.
template <macko_slide_type TYPE, slide_kind KIND, int TOKENS>
__device__ __forceinline__ void slide_multiply(slide_sum<TYPE> (&sums)[TOKENS / 2], uint64_t weights, uint64_t tokens,
                                               uint32_t meta_at, uint32_t (&meta)[2], int add) {
    using MMA = sm90::wgmma<slide_element<TYPE>, TOKENS>;
    if constexpr (KIND == SLIDE_DENSE) {
        sm90::warpgroup_arrive();
#pragma unroll
        for (int step = 0; step < 4; step++) MMA::dense(sums, weights + 2 * step, tokens + 2 * step, step ? 1 : add);
    } else if constexpr (TYPE <= MACKO_SLIDE_E4M3) {
        sm90::load_shared(meta[0], meta_at);
        sm90::load_shared(meta[1], meta_at + 512);
        sm90::warpgroup_arrive();
        MMA::template sparse<0>(sums, weights, tokens, meta[0], add);
        MMA::template sparse<0>(sums, weights + 2, tokens + 4, meta[1], 1);
    } else {
        sm90::load_shared(meta[0], meta_at);
        sm90::warpgroup_arrive();
        MMA::template sparse<0>(sums, weights, tokens, meta[0], add);
        MMA::template sparse<1>(sums, weights + 2, tokens + 4, meta[0], 1);
    }
    sm90::warpgroup_commit_batch();
}

// Split-K: the first block adds the others' sums, in order. A cluster has one tile then. False: another block has it now.
template <class TILE, typename SUM>
__device__ __forceinline__ bool slide_add_partials(const slide_task &task, uint32_t smem, uint32_t sums_here, int split,
                                                   int thread, SUM (&sums)[TILE::TOKENS / 2]) {
    if (split > 0) {
#pragma unroll
        for (int i = 0; i < TILE::TOKENS / 2; i++)
            sm90::dsmem_store(smem + TILE::PARTIALS + (split - 1) * TILE::PARTIAL_BYTES + i * 512 + thread * 4, 0,
                              sums[i]);
        sm90::barrier_arrive_release(sums_here, 0);
        return false;
    }
    if (task.splits > 1) sm90::barrier_wait_acquire(sums_here, 0);
    for (int other = 0; other < task.splits - 1; other++) {
#pragma unroll
        for (int i = 0; i < TILE::TOKENS / 2; i++) {
            SUM theirs;
            sm90::load_shared(theirs, smem + TILE::PARTIALS + other * TILE::PARTIAL_BYTES + i * 512 + thread * 4);
            sums[i] += theirs;
        }
    }
    return true;
}

// All finish: each block of a cluster leaves its sums in its shared memory, and finishes some of the tile's octets of tokens: it
// reads their sums from all blocks (DSMEM), adds them in the order of the splits, scales, rounds and stores them. A cluster
// has one tile then.
template <class TILE, typename SUM, int STORES>
__device__ __forceinline__ void slide_finish_split(const slide_task &task, uint32_t smem, int rank, int split,
                                                   int warpgroup, const SUM (&sums)[TILE::TOKENS / 2],
                                                   const float (&scale)[2], const float (&bias)[2],
                                                   const float (&token_scale)[STORES], int first_row, int first_token) {
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    const uint32_t partials = smem + warpgroup * TILE::PARTIAL_BYTES + thread * 16;
    const uint32_t scales = smem + TILE::STAGING + warpgroup * 2 * TILE::STORE_BYTES;
    const uint32_t done = smem + TILE::WEIGHTS + warpgroup * TILE::DONE_BYTES;
    const int octets = min(TILE::OCTETS, (task.tokens - first_token + 7) / 8);
    const int first = split * octets / task.splits, last = (split + 1) * octets / task.splits;
    named_barrier_sync(15, TILE::WARPGROUPS * 128); // the other warpgroup reads the same tokens
#pragma unroll
    for (int octet = 0; octet < TILE::OCTETS; octet++)
        if (octet < octets) sm90::store_shared_16(partials + octet * 2048, &sums[octet * 4]);
#pragma unroll
    for (int store = 0; store < STORES; store++)
        if (warp == store % 4 && lane < TILE::STORE_TOKENS)
            sm90::store_shared(scales + (store * TILE::STORE_TOKENS + lane) * 4, token_scale[store]);
    sm90::cluster_sync();
    for (int octet = first; octet < last; octet++) {
        SUM total[4];
#pragma unroll 1
        for (int other = 0; other < task.splits; other += 4) {
            SUM theirs[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (other + i < task.splits)
                    sm90::dsmem_load_16(
                        theirs[i], sm90::dsmem_address(partials + octet * 2048, (other + i) * task.multicast + rank));
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (other + i < task.splits) total[j] = other + i ? total[j] + theirs[i][j] : theirs[i][j];
        }
        float by[2];
        sm90::load_shared(by[0], scales + (octet * 8 + lane % 4 * 2) * 4);
        sm90::load_shared(by[1], scales + (octet * 8 + lane % 4 * 2 + 1) * 4);
        uint32_t rounded[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            rounded[i] = slide_pack2(fmaf(scale[i], by[0] * (float)total[2 * i], bias[i]),
                                     fmaf(scale[i], by[1] * (float)total[2 * i + 1], bias[i]), task.is_bf16);
        sm90::stmatrix_x2_trans(
            done + (octet - first) * 1024 + lane % 8 * 128 + (((warp * 2 + lane / 8 % 2) ^ (lane % 8)) << 4), rounded);
    }
    sm90::cluster_arrive(); // what others have here has been read
    sm90::fence_proxy_async();
    sm90::warpgroup_sync(warpgroup);
    if (thread == 0)
        for (int octet = first; octet < last; octet++)
            sm90::tma_store(&task.out, first_row, first_token + octet * 8, done + (octet - first) * 1024);
}

// A finished tile as it will be stored: slices of 16 tokens, an stmatrix each. Two rows a thread, row and row + 8.
template <class TILE, typename SUM, int SLICES, int STORES>
__device__ __forceinline__ void slide_round(const slide_task &task, const SUM (&sums)[SLICES * 8],
                                            const float (&scale)[2], const float (&bias)[2],
                                            const float (&token_scale)[STORES], uint32_t (&rounded)[SLICES][4]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int token = slice * 16 + half * 8, in_store = token % TILE::STORE_TOKENS + lane % 4 * 2;
            const float by[2] = {__shfl_sync(FULL_WARP, token_scale[token / TILE::STORE_TOKENS], in_store),
                                 __shfl_sync(FULL_WARP, token_scale[token / TILE::STORE_TOKENS], in_store + 1)};
            const auto *sum = sums + token / 2;
#pragma unroll
            for (int i = 0; i < 2; i++)
                rounded[slice][2 * half + i] =
                    slide_pack2(fmaf(scale[i], by[0] * (float)sum[2 * i], bias[i]),
                                fmaf(scale[i], by[1] * (float)sum[2 * i + 1], bias[i]), task.is_bf16);
        }
    }
}

// A consumer warpgroup: 64 rows. Thread (warp, lane) holds rows 16 warp + lane / 4 (+ 8), tokens 8 j + 2 (lane % 4) (+ 1).
// Releasing a stage is no function of its own: ptxas orders the instructions of every large tile in another way then.
template <macko_slide_type TYPE, slide_kind KIND, slide_size SIZE, slide_finish FINISH>
__device__ void slide_consume(const slide_task &task, uint32_t smem, int rank, int split, int warpgroup) {
    using TILE = slide_tile<TYPE, KIND, SIZE, FINISH>;
    constexpr int TOKENS = TILE::TOKENS, STORES = TOKENS / TILE::STORE_TOKENS;
    const uint32_t full = smem + TILE::BARRIERS, empty = full + TILE::STAGES * 8, sums_here = empty + TILE::STAGES * 8;
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = __shfl_sync(0xffffffffu, thread / 32, 0);
    const int blocks = TILE::blocks(task), multicast = TILE::multicast(task);
    const int pair = TILE::ALL_FINISH ? split * multicast : 0; // its first block in the cluster
    const int k_tiles = slide_first_k_tile<TILE>(task, split + 1) - slide_first_k_tile<TILE>(task, split);
    const uint64_t first_weights =
        sm90::smem_descriptor<KIND == SLIDE_SPARSE ? 64 : 128>(smem + TILE::WEIGHTS + warpgroup * TILE::TILE_BYTES);
    const uint64_t first_tokens = sm90::smem_descriptor<128>(smem);
    const uint32_t first_meta = smem + TILE::WEIGHTS + warpgroup * TILE::TILE_BYTES + TILE::VALUE_BYTES + thread * 4;
    const uint32_t staging = smem + TILE::STAGING + warpgroup * 2 * TILE::STORE_BYTES;

    // The finished tile: rounded, in slices of 16 tokens (an stmatrix each), and stored between the products of the next tile.
    constexpr int SLICES = TOKENS / 16, STORE_SLICES = TILE::STORE_TOKENS / 16;
    uint32_t rounded[SLICES][4];
    int stored = STORES, stored_row = 0, stored_token = 0;
    const auto store_next = [&] {
        const uint32_t to = staging + (stored & 1) * TILE::STORE_BYTES;
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
            if (slice / STORE_SLICES != stored) continue;
            const int token = slice % STORE_SLICES * 16 + lane / 16 * 8 + lane % 8, chunk16 = warp * 2 + lane / 8 % 2;
            sm90::stmatrix_x4_trans(to + token * 128 + ((chunk16 ^ (token & 7)) << 4), rounded[slice]);
        }
        if (thread == 0) sm90::tma_store_wait_read(); // so that after the barrier the other buffer is free
        sm90::fence_proxy_async();
        sm90::warpgroup_sync(warpgroup);
        if (thread == 0) sm90::tma_store(&task.out, stored_row, stored_token + stored * TILE::STORE_TOKENS, to);
        stored++;
    };

    // Releases a stage, also for a warpgroup that has no work. Once one warp of a warpgroup has waited for a wgmma, all of its
    // reads are done, so one lane could arrive for all. But metadata are read by ordinary loads: each lane arrives for its own.
    slide_work work{};
    const auto release = [&](int stage) {
        const uint32_t barrier = empty + stage * 8;
        const int times = 1 + TILE::WARPGROUPS - work.warpgroups;
        if (KIND == SLIDE_SPARSE) {
            sm90::barrier_arrive(barrier, times);
            if (multicast > 1 && thread == 0) sm90::barrier_arrive_remote(barrier, pair + (rank ^ 1), times);
        } else if (lane == 0 && warp < multicast) {
            TILE::ALL_FINISH || TILE::CLUSTER > 1 ? sm90::barrier_arrive_remote(barrier, pair + warp, times)
                                                  : sm90::barrier_arrive(barrier);
        }
    };

    sm90::pipeline_state pipeline;
    for (int tile = blockIdx.x / blocks; tile < task.num_tiles; tile += gridDim.x / blocks) {
        work = slide_work_of<TILE>(task, tile, rank);
        if (warpgroup >= work.warpgroups) break; // halves come last
        const int64_t first_row = (int64_t)(work.row_block + warpgroup) * 64;
        const int first_token = work.token_tile * TOKENS;
        // Loaded now, used after the products: their latency is hidden. Each warp holds the scales of all tokens.
        const int64_t row = first_row + warp * 16 + lane / 4;
        const float scale[2] = {row < task.rows ? task.scale[row] : 0, row + 8 < task.rows ? task.scale[row + 8] : 0};
        const float bias[2] = {slide_bias(task, row), slide_bias(task, row + 8)};
        float token_scale[STORES];
#pragma unroll
        for (int store = 0; store < STORES; store++)
            token_scale[store] =
                task.token_scale
                    ? task.token_scale[min(first_token + store * TILE::STORE_TOKENS + lane, task.tokens - 1)]
                    : 1;

        slide_sum<TYPE> sums[TOKENS / 2]; // overwritten, not added to, by the first product
        int previous = -1;
        // wgmma reads its metadata registers while it runs, when those of the next stage are loaded already: two sets, in turn.
        const auto multiply = [&](int k_tile, uint32_t (&meta)[2]) {
            const int stage = pipeline.stage;
            sm90::consumer_wait(full, pipeline);
            const uint64_t tokens = first_tokens + stage * (TILE::TOKEN_BYTES >> 4);
            const uint64_t weights = first_weights + stage * (TILE::WEIGHT_BYTES >> 4);
            slide_multiply<TYPE, KIND, TOKENS>(sums, weights, tokens, first_meta + stage * TILE::WEIGHT_BYTES, meta,
                                               k_tile);
            sm90::warpgroup_wait<1>();
            if (previous >= 0) release(previous);
            previous = stage;
            pipeline.advance(TILE::STAGES);
        };
        uint32_t even_meta[2], odd_meta[2];
#pragma unroll 1
        for (int k_tile = 0; k_tile < k_tiles; k_tile += 2) {
            multiply(k_tile, even_meta);
            multiply(k_tile + 1, odd_meta);
            if (stored < STORES) store_next();
        }
        while (stored < STORES) store_next();
        sm90::warpgroup_wait<0>();
        sm90::warpgroup_fence_operand(sums);
        release(previous);

        if constexpr (TILE::ALL_FINISH) {
            slide_finish_split<TILE>(task, smem, rank, split, warpgroup, sums, scale, bias, token_scale, (int)first_row,
                                     first_token);
            break;
        } else if (TILE::MAX_SPLITS > 1 && !slide_add_partials<TILE>(task, smem, sums_here, split, thread, sums)) {
            return;
        }

        slide_round<TILE>(task, sums, scale, bias, token_scale, rounded);
        stored = 0, stored_row = (int)first_row, stored_token = first_token;
    }
    while (stored < STORES) store_next();
    if (thread == 0) sm90::tma_store_wait();
}

template <macko_slide_type TYPE, slide_kind KIND, slide_size SIZE, slide_finish FINISH>
__global__ void __launch_bounds__(slide_tile<TYPE, KIND, SIZE, FINISH>::THREADS,
                                  slide_tile<TYPE, KIND, SIZE, FINISH>::BLOCKS_PER_SM)
    slide_gemm_kernel(const __grid_constant__ slide_task task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using TILE = slide_tile<TYPE, KIND, SIZE, FINISH>;
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t smem = shared_address(memory), barriers = smem + TILE::BARRIERS;
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    // The blocks of a cluster either multicast tokens, for rows of their own, or share the k tiles of one output tile.
    const int rank = blockIdx.x % TILE::multicast(task);
    const int split = TILE::ALL_FINISH    ? blockIdx.x / task.multicast % task.splits
                      : TILE::CLUSTER > 1 ? 0
                                          : blockIdx.x % task.splits;
    const bool clustered = TILE::ALL_FINISH || TILE::CLUSTER > 1 || task.splits > 1;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < TILE::STAGES; stage++) {
            sm90::barrier_init(barriers + stage * 8, 1);
            sm90::barrier_init(barriers + (TILE::STAGES + stage) * 8, TILE::releases(task));
        }
        sm90::prefetch_tensor_map(&task.lifted);
        sm90::prefetch_tensor_map(&task.last_lifted);
        sm90::prefetch_tensor_map(&task.out);
        if (!TILE::ALL_FINISH) sm90::barrier_init(barriers + TILE::STAGES * 16, 128 * (task.splits - 1) + 1);
        if (!TILE::ALL_FINISH && task.splits > 1) sm90::barrier_arrive(barriers + TILE::STAGES * 16);
        sm90::fence_barrier_init();
        sm90::fence_proxy_async();
    }
    __syncthreads();
    if (clustered) sm90::cluster_sync();
    if (warpgroup == TILE::WARPGROUPS) {
        if (TILE::MOVES_REGISTERS) sm90::warpgroup_reg_dealloc<TILE::PRODUCER_REGISTERS>();
        if (threadIdx.x == TILE::WARPGROUPS * 128) slide_produce<TILE>(task, smem, rank, split);
        if (TILE::ALL_FINISH) {
            __syncwarp();
            sm90::cluster_sync(); // with all sums there
            sm90::cluster_arrive();
        }
    } else {
        if (TILE::MOVES_REGISTERS) sm90::warpgroup_reg_alloc<TILE::CONSUMER_REGISTERS>();
        pdl_wait(); // the previous kernel made the tokens' scales
        slide_consume<TYPE, KIND, SIZE, FINISH>(task, smem, rank, split, warpgroup);
    }
    __syncwarp();
    // No block may leave while another one of its cluster writes into it, or reads from it.
    if (TILE::ALL_FINISH)
        sm90::cluster_wait();
    else if (clustered)
        sm90::cluster_sync();
#endif
}

// Launches the task on tiles of this size; defined for each TYPE in its own file.
template <macko_slide_type TYPE>
cudaError_t slide_run(slide_kind kind, slide_plan plan, const macko_slide_gemm_args &args, int num_sms,
                      cudaStream_t stream);

template <macko_slide_type TYPE, slide_kind KIND, slide_size SIZE, slide_finish FINISH>
cudaError_t slide_launch(const macko_slide_gemm_args &args, slide_cluster cluster, int num_sms, cudaStream_t stream) {
    using TILE = slide_tile<TYPE, KIND, SIZE, FINISH>;
    const macko_slide_shape &shape = args.weight.shape;
    const int64_t token_bytes = args.lifted_cols * macko_slide_element_bytes(TYPE);
    slide_task task = slide_task_of(args);
    task.k_tiles = (int)macko_slide_k_tiles(shape.cols, shape.n, TYPE);
    task.token_tiles = (int)((args.tokens + TILE::TOKENS - 1) / TILE::TOKENS);
    task.multicast = cluster.multicast;
    task.splits = std::max(1, std::min(cluster.splits, task.k_tiles / 2));
    const bool exists =
        TILE::ALL_FINISH ? cluster.multicast == 1 || cluster.multicast == 2 : cluster.multicast == TILE::CLUSTER;
    if (!exists || cluster.splits > TILE::MAX_SPLITS || (TILE::ALL_FINISH && task.splits < 2))
        return cudaErrorInvalidValue; // as a knob may say
    const int cluster_blocks = task.multicast * task.splits, cluster_rows = TILE::WARPGROUPS * task.multicast;
    task.row_tiles = (task.row_blocks + cluster_rows - 1) / cluster_rows;
    const int64_t tiles = (int64_t)task.row_tiles * task.token_tiles, slots = num_sms * TILE::BLOCKS_PER_SM;
    const int64_t clusters = slots / cluster_blocks;
    const int64_t whole = TILE::ALL_FINISH ? tiles : slide_whole_tiles(tiles, clusters, TILE::WARPGROUPS);
    task.whole_tiles = (int)whole;
    task.num_tiles = (int)(2 * tiles - task.whole_tiles);
    const int last = task.tokens - (task.token_tiles - 1) * TILE::TOKENS;
    task.last_share = task.multicast == 1 ? last : (last + 8 * task.multicast - 1) / (8 * task.multicast) * 8;
    const auto map_tokens = [&](CUtensorMap *map, int tokens) {
        return sm90::make_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, args.lifted, token_bytes, args.tokens,
                                     token_bytes, 128, tokens);
    };
    cudaError_t status = map_tokens(&task.lifted, TILE::TOKENS / task.multicast);
    if (status == cudaSuccess) status = map_tokens(&task.last_lifted, task.last_share);
    if (status == cudaSuccess)
        status = sm90::make_tensor_map(&task.out, CU_TENSOR_MAP_DATA_TYPE_UINT16, args.out, shape.rows, args.tokens,
                                       args.out_stride * 2, 64, TILE::ALL_FINISH ? 8 : TILE::STORE_TOKENS);
    if (status == cudaSuccess)
        status = cudaFuncSetAttribute(slide_gemm_kernel<TYPE, KIND, SIZE, FINISH>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, TILE::SMEM_BYTES);
    if (status != cudaSuccess) return status;
    // PDL, starting beside the quantiser, saves 1 us of 10, or 2 of 25. Where not all SMs are needed, blocks avoid those that
    // the quantiser still occupies and pile up on others (down at 16 tokens 26.9 us instead of 25.2); with many tokens the
    // blocks fall out of step, and large GEMMs take 1 to 3 % longer (H200).
    const int64_t blocks = (int64_t)task.num_tiles * cluster_blocks;
    task.uses_pdl =
        args.follows_quantiser && args.tokens <= 512 && (args.tokens <= 4 || blocks <= num_sms || blocks >= slots);
    if (const int *said = macko_knob(MACKO_KNOB_PDL)) task.uses_pdl = args.follows_quantiser && said[0];
    return launch_kernel(
        slide_gemm_kernel<TYPE, KIND, SIZE, FINISH>,
        {(TILE::ALL_FINISH ? task.num_tiles : std::min<int64_t>(task.num_tiles, clusters)) * cluster_blocks,
         TILE::THREADS, TILE::SMEM_BYTES, task.uses_pdl != 0, cluster_blocks},
        stream, task);
}

template <macko_slide_type TYPE, slide_kind KIND>
cudaError_t slide_run_kind(slide_plan plan, const macko_slide_gemm_args &args, int num_sms, cudaStream_t stream) {
    if (slide_finish_of(plan) == SLIDE_ALL_FINISH)
        return for_constant<SLIDE_128x64, SLIDE_128x128, SLIDE_128x256>(plan.size, [&](auto of) {
            constexpr slide_size SIZE = slide_size(decltype(of)::value);
            return slide_launch<TYPE, KIND, SIZE, SLIDE_ALL_FINISH>(args, plan.cluster, num_sms, stream);
        });
    return for_constant<SLIDE_64x16, SLIDE_64x32, SLIDE_64x64, SLIDE_128x128, SLIDE_128x192, SLIDE_128x256>(
        plan.size, [&](auto of) {
            constexpr slide_size SIZE = slide_size(decltype(of)::value);
            return slide_launch<TYPE, KIND, SIZE, SLIDE_FIRST_FINISHES>(args, plan.cluster, num_sms, stream);
        });
}

template <macko_slide_type TYPE>
cudaError_t slide_run(slide_kind kind, slide_plan plan, const macko_slide_gemm_args &args, int num_sms,
                      cudaStream_t stream) {
    return kind == SLIDE_SPARSE ? slide_run_kind<TYPE, SLIDE_SPARSE>(plan, args, num_sms, stream)
                                : slide_run_kind<TYPE, SLIDE_DENSE>(plan, args, num_sms, stream);
}

} // namespace macko
