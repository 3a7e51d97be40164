// The kernel for stacks of experts by many tokens each (sm_90a): the products of many_kernel.cuh, in whole output tiles.
//
//     item       an expert, up to TOKENS of its tokens (consecutive rows of x), ROW_BLOCKS row blocks of each of the two
//                blocks of a cluster, which multicast the tokens to each other. Items of the same rows follow each other, so
//                that their slabs come from L2
//     cluster    takes items c, c + clusters, ...: which these are each warp works out for itself from `ends`, which only
//                the device knows
//     products   by 64, 128, 192 or 256 tokens, as many as the item has: the sums of a token are the same
//     output     from registers, as another item's rows follow in y
//
// A weight is decoded once for all tokens of an item. Of Qwen3's 1536 x 2048 by 128 experts an SM takes 93 pairs of slabs:
// 160 us by 128 tokens an expert, 225 by 256 (3000 and 4240 clocks a pair, many_plan.c), and memory 240 and 280 (3 TB/s).
#pragma once

#include "experts.h"
#include "many_kernel.cuh"

namespace macko {
namespace {

template <class CODEC>
struct experts_many_task {
    using T = typename CODEC::T;
    CUtensorMap x; // boxes of MACKO_SLAB_TILE_COLS columns by EXPERTS_BOX tokens
    const uint8_t *data;
    const int32_t *offsets, *ends;
    T *y;
    int64_t rows;
    int tokens, experts, row_blocks, slabs;
    int slab_units; // of every slab, if SAME_SIZE
    macko_slab_many_stages stages;
    typename CODEC::constants weights;
    bool early;
};

using experts_many_shape = many_shape<MACKO_EXPERTS_MANY_TOKENS, MACKO_EXPERTS_MANY_ROW_BLOCKS, 1>;
constexpr int EXPERTS_BOX = 32, EXPERTS_TOKENS_STEP = EXPERTS_BOX * MACKO_SLAB_CLUSTER_BLOCKS;

// The items of a cluster; all lanes of a warp walk together.
struct experts_many_walk {
    const int32_t *ends;
    int tokens, experts, row_tiles; // of all
    int item, clusters;
    int from = 0, tiles = 0, begin = 0; // the experts that lanes look at; tiles of tokens, and tokens, of those before
    int expert, row_tile, first, count; // of the item: its tokens
    bool shared;                        // its slabs are another item's too

    template <class CODEC>
    __device__ __forceinline__ explicit experts_many_walk(const experts_many_task<CODEC> &task)
        : ends(task.ends), tokens(task.tokens), experts(task.experts),
          row_tiles((int)ceil_div(task.row_blocks, MACKO_EXPERTS_MANY_ROW_BLOCKS * MACKO_SLAB_CLUSTER_BLOCKS)),
          item(blockIdx.x / MACKO_SLAB_CLUSTER_BLOCKS), clusters(gridDim.x / MACKO_SLAB_CLUSTER_BLOCKS) {
    }
    // Finds where the item is; false: there is none.
    __device__ __forceinline__ bool open() {
        const int lane = threadIdx.x % WARP;
        for (; from < experts; from += WARP) {
            // Not from L1, as in experts_count.
            const int end = min(max(__ldcg(ends + min(from + lane, experts - 1)), 0), tokens),
                      before = __shfl_up_sync(FULL_WARP, end, 1);
            const int own = lane ? before : begin;
            const int parts = (max(end - own, 0) + MACKO_EXPERTS_MANY_TOKENS - 1) / MACKO_EXPERTS_MANY_TOKENS;
            const int sum = warp_inclusive_sum(parts), all = __shfl_sync(FULL_WARP, sum, WARP - 1);
            if (const unsigned reach = __ballot_sync(FULL_WARP, (tiles + sum) * row_tiles > item)) {
                const int at = __ffs(reach) - 1, several = macko_slab_uniform(__shfl_sync(FULL_WARP, parts, at));
                const int in_expert = item - (tiles + __shfl_sync(FULL_WARP, sum - parts, at)) * row_tiles;
                expert = macko_slab_uniform(from + at);
                row_tile = macko_slab_uniform(in_expert / several);
                const int done = (in_expert - row_tile * several) * MACKO_EXPERTS_MANY_TOKENS;
                first = macko_slab_uniform(__shfl_sync(FULL_WARP, own, at) + done);
                count = macko_slab_uniform(min(__shfl_sync(FULL_WARP, end, at) - first, MACKO_EXPERTS_MANY_TOKENS));
                shared = several > 1;
                return true;
            }
            tiles += all;
            begin = __shfl_sync(FULL_WARP, end, WARP - 1);
        }
        return false;
    }
    __device__ __forceinline__ bool open_next() {
        item += clusters;
        return open();
    }
    // Of an expert; behind its last there is nothing.
    __device__ __forceinline__ int row_block(int rank, int warpgroup) const {
        return (row_tile * MACKO_SLAB_CLUSTER_BLOCKS + rank) * MACKO_EXPERTS_MANY_ROW_BLOCKS + warpgroup;
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class SHAPE, class CODEC>
__device__ __forceinline__ void fetch_experts_tokens(const experts_many_task<CODEC> &task, uint32_t smem, int rank) {
    constexpr int BOX_BYTES = EXPERTS_BOX * MACKO_SLAB_TILE_COLS * 2;
    const int lane = threadIdx.x % WARP;
    sm90::pipeline_state x;
    experts_many_walk walk(task);
    for (bool more = walk.open(); more; more = walk.open_next()) {
        // Behind the last box is whatever was there: each token has its own row of y.
        const int boxes = (int)ceil_div(walk.count, EXPERTS_BOX), half = (boxes + 1) / 2, box = rank * half + lane;
        for (int tile = 0; tile < task.slabs * MACKO_SLAB_TILES; tile++) {
            const uint32_t full = smem + SHAPE::X_FULL + x.stage * 8;
            sm90::producer_acquire(smem + SHAPE::X_EMPTY, x);
            if (lane == 0) sm90::barrier_arrive_expect_tx(full, boxes * BOX_BYTES);
            __syncwarp();
            if (lane < half && box < boxes)
                sm90::tma_load_multicast(smem + SHAPE::X + x.stage * SHAPE::STAGE_BYTES + box * BOX_BYTES, &task.x,
                                         tile * MACKO_SLAB_TILE_COLS, walk.first + box * EXPERTS_BOX, full, 3);
            __syncwarp();
            x.advance(task.stages.x);
        }
    }
    for (int i = 0; i < task.stages.x; i++) { // no block leaves before all that the other one sends it has come
        sm90::producer_acquire(smem + SHAPE::X_EMPTY, x);
        x.advance(task.stages.x);
    }
}

// A lane for each row block.
template <class SHAPE, class CODEC>
__device__ __forceinline__ void fetch_experts_slabs(const experts_many_task<CODEC> &task, uint32_t smem, int rank) {
    const int lane = threadIdx.x % WARP;
    const uint32_t slabs_at = smem + SHAPE::X + task.stages.x * SHAPE::STAGE_BYTES;
    const uint64_t once = evict_first();
    sm90::pipeline_state slabs;
    experts_many_walk walk(task);
    for (bool more = walk.open(); more; more = walk.open_next()) {
        const int row_block = min(walk.row_block(rank, lane), task.row_blocks - 1);
        const int64_t of_all = ((int64_t)walk.expert * task.row_blocks + row_block) * task.slabs;
        for (int slab = 0; slab < task.slabs; slab++) {
            int64_t from = (of_all + slab) * task.slab_units, to = from + task.slab_units;
            if (!CODEC::SAME_SIZE) from = task.offsets[of_all + slab], to = task.offsets[of_all + slab + 1];
            copy_slabs<SHAPE>(smem, slabs_at, task.stages, slabs, task.data, from, to, walk.shared ? 0 : once);
        }
    }
}

// Rounds and stores a warpgroup's sums: 16 rows of a token, all of a sector, from four lanes.
template <int TOKENS, class CODEC>
__device__ __forceinline__ void store_experts_sums(const experts_many_task<CODEC> &task, const experts_many_walk &item,
                                                   int row_block, const float (&sums)[TOKENS / 2]) {
    using T = typename CODEC::T;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x % MACKO_SLAB_WARPGROUP / WARP, odd = lane & 1;
    const int first_row = row_block * MACKO_SLAB_ROWS + warp * 16, row = first_row + odd * 8 + (lane & 2) * 2;
    [[maybe_unused]] float scale[2] = {0, 0};
    if constexpr (CODEC::SCALED)
        for (int k = 0; k < 2; k++)
            if (const int at = first_row + lane / 4 + 8 * k; at < task.rows)
                scale[k] =
                    task.weights.scales[(int64_t)item.expert * task.row_blocks * MACKO_SLAB_ROWS + at] * CODEC::FOLD;
    T *to = task.y + (item.first + lane / 4) * task.rows + row;
#pragma unroll
    for (int eight = 0; eight < TOKENS / 8; eight++) {
        if (eight * 8 >= item.count) break;
        uint32_t words[2]; // of the lane's token: rows 2 (lane % 4) and the next, and the same 8 further
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float *sum = sums + eight * 4 + 2 * k;
            if constexpr (CODEC::SCALED)
                words[k] = movmatrix(from_float2<T>(sum[0] * scale[k], sum[1] * scale[k]));
            else
                words[k] = movmatrix(from_float2<T>(sum[0], sum[1]));
        }
        const uint32_t other = __shfl_xor_sync(FULL_WARP, odd ? words[0] : words[1], 1);
        if (eight * 8 + lane / 4 < item.count && row < task.rows)
            *(uint2 *)(to + eight * 8 * task.rows) = odd ? make_uint2(other, words[1]) : make_uint2(words[0], other);
    }
}

// A consumer warpgroup's 64 rows of an item, by TOKENS tokens; as consume in many_kernel.cuh, which says what is waited for.
template <int TOKENS, class SHAPE, class CODEC>
__device__ __forceinline__ void multiply_item(const experts_many_task<CODEC> &task, uint32_t smem,
                                              const experts_many_walk &item, int rank, int warpgroup,
                                              sm90::pipeline_state &x, sm90::pipeline_state &slabs) {
    tile_consumer<SHAPE, experts_many_task<CODEC>> own(task, smem, rank, warpgroup);
    own.x = x, own.slabs = slabs;
    float sums[TOKENS / 2];
    uint32_t a[4][4];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0;
    sm90::warpgroup_fence_operand(sums);
    typename CODEC::many_reader reader(task.weights);
    own.wait_for_slab();
    own.open_slab(reader);
    prepare_tile(reader, task.weights);
    const bool lags = task.stages.x > SHAPE::LAG;
    const int waits_at = lags && warpgroup ? 1 : 0;
#pragma unroll 1
    for (int left = task.slabs; left > 0; left--) {
        const int stage = own.slabs.stage;
#pragma unroll
        for (int in_slab = 0; in_slab < MACKO_SLAB_TILES; in_slab++) {
            if (in_slab == MACKO_SLAB_TILES - SHAPE::LAG && left == waits_at) named_barrier_sync(FIRST_THROUGH, 256);
            own.template multiply_tile<TOKENS>(reader, sums, a, in_slab, left > 1);
        }
        own.release_slab(stage);
    }
    if (lags && warpgroup == 0) named_barrier_arrive(FIRST_THROUGH, 256);
    own.slabs.advance(task.stages.slabs);
    sm90::warpgroup_wait<0>();
    sm90::warpgroup_fence_operand(sums);
    own.release(own.last_stage);
    x = own.x, slabs = own.slabs;
    store_experts_sums<TOKENS>(task, item, item.row_block(rank, warpgroup), sums);
}

#endif

template <class CODEC, class SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, 1)
    slab_experts_many_kernel(const __grid_constant__ experts_many_task<CODEC> task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    static_assert(SHAPE::MULTICAST == 2 && SHAPE::ROW_BLOCKS == 2 && SHAPE::TOKENS == 4 * EXPERTS_TOKENS_STEP);
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t smem = opaque(shared_address(shared));
    const int warpgroup = macko_slab_uniform(threadIdx.x / MACKO_SLAB_WARPGROUP),
              warp = macko_slab_uniform(threadIdx.x / WARP % 4), rank = blockIdx.x % MACKO_SLAB_CLUSTER_BLOCKS;
    if (warpgroup < SHAPE::ROW_BLOCKS || warp < 2) make_barriers<SHAPE>(smem);
    sm90::cluster_sync();
    if (!task.early || warpgroup < SHAPE::ROW_BLOCKS || warp < 3) // slabs may come before
        pdl_launch_dependents(); // not before the kernel has ended that wrote x and ends
    if (warpgroup < SHAPE::ROW_BLOCKS) {
        sm90::warpgroup_reg_alloc<SHAPE::REGISTERS>();
        sm90::pipeline_state x, slabs;
        experts_many_walk walk(task);
        for (bool more = walk.open(); more; more = walk.open_next()) {
            const auto multiply = [&](auto tokens) {
                multiply_item<decltype(tokens)::value, SHAPE>(task, smem, walk, rank, warpgroup, x, slabs);
            };
            if (walk.count > 3 * EXPERTS_TOKENS_STEP)
                multiply(std::integral_constant<int, 4 * EXPERTS_TOKENS_STEP>());
            else if (walk.count > 2 * EXPERTS_TOKENS_STEP)
                multiply(std::integral_constant<int, 3 * EXPERTS_TOKENS_STEP>());
            else if (walk.count > EXPERTS_TOKENS_STEP)
                multiply(std::integral_constant<int, 2 * EXPERTS_TOKENS_STEP>());
            else
                multiply(std::integral_constant<int, EXPERTS_TOKENS_STEP>());
        }
        return;
    }
    sm90::warpgroup_reg_dealloc<SHAPE::PRODUCER_REGISTERS>();
    if (warp == 3) {
        fetch_experts_slabs<SHAPE>(task, smem, rank);
    } else if (warp == 2) {
        fetch_experts_tokens<SHAPE>(task, smem, rank);
    } else { // zeros behind the last end
        const int end = min(max(task.ends[task.experts - 1], 0), task.tokens);
        const int64_t all = task.tokens * task.rows, threads = 2 * WARP;
        for (int64_t i = end * task.rows + blockIdx.x * threads + threadIdx.x % threads; i < all;
             i += gridDim.x * threads)
            task.y[i] = from_float<typename CODEC::T>(0);
    }
#endif
}

template <class CODEC>
cudaError_t multiply_experts_many(const slab_weight<CODEC> &w, const slab_experts_product &p) {
    using SHAPE = experts_many_shape;
    constexpr auto kernel = slab_experts_many_kernel<CODEC, SHAPE>;
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    experts_many_task<CODEC> task{};
    task.data = w.data;
    task.offsets = w.offsets;
    task.ends = p.ends;
    task.y = (typename CODEC::T *)p.y;
    task.early = p.early;
    task.rows = p.rows;
    task.tokens = (int)p.tokens;
    task.experts = (int)p.experts;
    task.row_blocks = (int)macko_slab_row_blocks(p.rows);
    task.slabs = (int)macko_slabs_across(w.cols);
    task.slab_units = w.widest;
    task.weights = w.constants;
    if (!macko_slab_many_fit_stages(SHAPE::plain(), w.widest, device.shared_bytes, &task.stages))
        return cudaErrorInvalidValue;
    cudaError_t error = sm90::make_tensor_map(&task.x, CU_TENSOR_MAP_DATA_TYPE_UINT16, p.x, w.cols, p.tokens,
                                              p.x_stride * 2, MACKO_SLAB_TILE_COLS, EXPERTS_BOX);
    if (!error) error = allow_all_shared_memory<kernel>(device);
    int clusters = 0;
    if (!error)
        error = max_active_clusters<kernel, MACKO_SLAB_CLUSTER_BLOCKS>(
            device, MACKO_SLAB_CLUSTER_BLOCKS, SHAPE::THREADS, device.shared_bytes - 1024, &clusters);
    if (error) return error;
    return launch_clusters<SHAPE>(kernel, task, clusters, task.stages, p.stream);
}

} // namespace

template <class MATRIX>
cudaError_t slab_experts_many(const MATRIX &m, const slab_experts_product &p) {
    return with_weight(m, [&](const auto &weight) { return multiply_experts_many(weight, p); });
}

} // namespace macko
