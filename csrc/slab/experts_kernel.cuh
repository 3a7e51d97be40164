// The kernel for stacks of experts, on any GPU from compute capability 8.0 on: ring_kernel.cuh's product with other work.
//
//     item    an expert, some of its tokens (a tile, which is consecutive rows of x), a row block. Items of a row block
//             follow each other, so that its slabs come from L2 when another tile of tokens takes them
//     block   two an SM where a stage is small enough: one decodes while the other waits at a barrier (8 experts of
//             1536 x 2048, H100: 18.4 us for 20.8). It takes items b, b + blocks, ...: how many there are it works out from
//             `ends`, which only the device knows. No item is shared: a block that went on with another's sums gained
//             nothing there, where 192 items leave SMs idle, nor at 3000 items
//     early   in gated_experts what the second product reads first, ends and slabs, is there before the gate's kernel ends:
//             it is fetched while that runs (one token, Qwen3-30B's experts, H100: 31.7 us, 39.0 without both)
//     stage   | slab | x: [token][256 columns] | as in ring_kernel.cuh, in one ring that goes on over the ends of items
//
// Tiles are of 16, 32 or 64 tokens with the same sums for each token, so its bits do not depend on the others.
#pragma once

#include "experts.h"
#include "ring_kernel.cuh"

namespace macko {
namespace {

template <class CODEC>
struct experts_task {
    ring_task<CODEC> ring; // the weight, x and stages
    const int32_t *ends, *order;
    typename CODEC::T *y;
    int64_t tokens, rows;
    int experts, row_blocks, slabs, top_k;
    unsigned last_x; // the last row of x
    bool early;
};

// The items of a block, and the slabs of each.
template <int TOKENS>
struct experts_walk {
    const int *firsts, *tiles; // of experts: the first token, tiles before its own; behind the last their ends
    int experts, row_blocks, slabs;
    int64_t items, item;
    int expert = 0, row_block, first, tokens, slab; // tokens: of the item

    // Finds where the item is; false: there is none.
    __device__ __forceinline__ bool open() {
        if (item >= items) return false;
        for (int behind = experts; behind - expert > 1;) { // halving: a block's first one may be behind hundreds
            const int middle = (expert + behind) / 2;
            ((int64_t)tiles[middle] * row_blocks <= item ? expert : behind) = middle;
        }
        const int of_expert = int(item - (int64_t)tiles[expert] * row_blocks);
        const int count = tiles[expert + 1] - tiles[expert], tile = of_expert % count;
        row_block = of_expert / count;
        first = firsts[expert] + tile * TOKENS;
        tokens = min(TOKENS, firsts[expert + 1] - first);
        slab = 0;
        return true;
    }
    __device__ __forceinline__ bool open_next() {
        item += gridDim.x;
        return open();
    }
    __device__ __forceinline__ bool advance() {
        return ++slab < slabs || open_next();
    }
    // Of the whole matrix.
    __device__ __forceinline__ int64_t slab_of_all() const {
        return ((int64_t)expert * row_blocks + row_block) * slabs + slab;
    }
};

// firsts and tiles of all experts, by the whole block. sums: a word a warp.
template <class CODEC, class SHAPE>
__device__ __forceinline__ void experts_count(const experts_task<CODEC> &task, int *firsts, int *tiles, int *sums) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    // Not from L1, which before pdl_wait may have what was there before.
    const auto end_of = [&](int expert) {
        return expert < 0 ? 0 : min(max(__ldcg(task.ends + expert), 0), (int)task.tokens);
    };
    int before = 0;
    for (int begin = 0; begin < task.experts; begin += SHAPE::THREADS) {
        const int expert = begin + threadIdx.x;
        int first = 0, count = 0;
        if (expert < task.experts) {
            first = end_of(expert - 1);
            count = (max(end_of(expert) - first, 0) + SHAPE::TOKENS - 1) / SHAPE::TOKENS;
        }
        const int sum = warp_inclusive_sum(count);
        if (lane == WARP - 1) sums[warp] = sum;
        __syncthreads();
        int all = before, own = before;
        for (int other = 0; other < SHAPE::THREADS / WARP; other++) {
            if (other == warp) own = all;
            all += sums[other];
        }
        if (expert < task.experts) {
            firsts[expert] = first;
            tiles[expert] = own + sum - count;
        }
        before = all;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        firsts[task.experts] = end_of(task.experts - 1);
        tiles[task.experts] = before;
    }
    __syncthreads();
}

// What a thread fetches: slabs and their tokens, a stage after the other.
template <class CODEC, class SHAPE>
struct experts_fetch {
    const experts_task<CODEC> &experts;
    const ring_task<CODEC> &task;
    experts_walk<SHAPE::TOKENS> ahead;
    bool more;
    uint32_t ring, ring_end, to; // to: the stage
    int from, units;             // of the slab
    uint32_t x_to;               // where a thread's first chunk of x goes in a stage
    unsigned
        x_rows[SHAPE::TOKENS / SHAPE::RING_WARPS]; // of the item's tokens those of a thread, where there is an order

    __device__ __forceinline__ experts_fetch(const experts_task<CODEC> &experts,
                                             const experts_walk<SHAPE::TOKENS> &walk, uint32_t base)
        : experts(experts), task(experts.ring), ahead(walk), ring(base), to(base) {
        ring_end = ring + task.stages * task.stage_bytes;
        const uint32_t chunk = threadIdx.x % WARP, token = threadIdx.x / WARP; // a warp copies a token's columns
        x_to = opaque(task.x_at + token * SHAPE::X_ROW + ((chunk & ~7u) | ((chunk ^ token) & 7)) * 16);
        more = ahead.open();
        look_up();
    }
    __device__ __forceinline__ void look_up() {
        if (experts.order && more && ahead.slab == 0) {
#pragma unroll
            for (int k = 0; k < SHAPE::TOKENS / SHAPE::RING_WARPS; k++)
                if (const int token = threadIdx.x / WARP + k * SHAPE::RING_WARPS; token < ahead.tokens)
                    x_rows[k] = min((unsigned)experts.order[ahead.first + token] / experts.top_k, experts.last_x);
        }
        units = task.slab_units;
        if (CODEC::SAME_SIZE || !more) return;
        const int32_t *offset = task.offsets + ahead.slab_of_all();
        from = offset[0];
        units = offset[1] - from;
    }
    __device__ __forceinline__ void slab() const {
        constexpr int STEP = SHAPE::THREADS * 16, UNROLLED = 4;
        const int64_t unit = CODEC::SAME_SIZE ? ahead.slab_of_all() * task.slab_units : from;
        const int at = threadIdx.x * 16, bytes = units * MACKO_SLAB_UNIT - at;
        const uint8_t *source = task.data + unit * MACKO_SLAB_UNIT + at;
#pragma unroll 1
        for (int i = 0; i < bytes; i += UNROLLED * STEP)
#pragma unroll
            for (int k = 0; k < UNROLLED; k++)
                if (k == 0 || i + k * STEP < bytes) copy_async_of_line(to + at + i + k * STEP, source + i + k * STEP);
    }
    // Tokens that are not there stay what they are: their sums are not stored.
    __device__ __forceinline__ void tokens_of_slab() const {
        const int token = threadIdx.x / WARP, col = ahead.slab * MACKO_SLAB_COLS + threadIdx.x % WARP * 8;
        const int bytes = max(0, min(16, (task.cols - col) * 2));
        const uint16_t *chunk = task.x + (bytes ? col : 0);
#pragma unroll
        for (int k = 0; k < SHAPE::TOKENS / SHAPE::RING_WARPS; k++)
            if (const int other = token + k * SHAPE::RING_WARPS; other < ahead.tokens) {
                const int64_t row = experts.order ? x_rows[k] : ahead.first + other;
                copy_async_some(to + x_to + k * SHAPE::RING_WARPS * SHAPE::X_ROW, chunk + row * task.x_stride, bytes);
            }
    }
    __device__ __forceinline__ void stage(bool slabs = true, bool tokens = true) {
        if (more && slabs) slab();
        if (more && tokens) tokens_of_slab();
        if (tokens) commit_copies();
        more = more && ahead.advance();
        to += task.stage_bytes;
        if (to == ring_end) to = ring;
        look_up();
    }
};

// Four sums of a thread of a group: two rows, two tokens. eight: of the item's tokens.
template <class CODEC, int TOKENS>
__device__ __forceinline__ void experts_store(const experts_task<CODEC> &task, const experts_walk<TOKENS> &here,
                                              int eight, int thread, const float (&sum)[4]) {
    const int row = here.row_block * MACKO_SLAB_ROWS + thread / WARP * 16 + thread % WARP / 4;
    const int token = eight * 8 + thread % 4 * 2;
    typename CODEC::T *y = task.y + (int64_t)(here.first + token) * task.rows + row;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        if (row + k * 8 >= task.rows) continue;
        float scale = 1;
        if constexpr (CODEC::SCALED) {
            const int64_t of_all = (int64_t)here.expert * task.row_blocks * MACKO_SLAB_ROWS + row + k * 8;
            scale = task.ring.weights.scales[of_all] * CODEC::FOLD;
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (token + i < here.tokens)
                y[i * task.rows + k * 8] = from_float<typename CODEC::T>(sum[2 * k + i] * scale);
    }
}

// Registers for two blocks an SM, where they have the shared memory.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int experts_blocks(int tokens) {
    return tokens == MACKO_EXPERTS_LEAST_TOKENS ? 2 : 1;
}
#else
constexpr int experts_blocks(int) {
    return 1;
}
#endif

template <class CODEC, class SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, experts_blocks(SHAPE::TOKENS))
    slab_experts_kernel(const __grid_constant__ experts_task<CODEC> task) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = __shfl_sync(FULL_WARP, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
    const int group = warp / MACKO_SLAB_SLICES, slice = warp % MACKO_SLAB_SLICES,
              thread = threadIdx.x % SHAPE::GROUP_THREADS;
    const ring_task<CODEC> &ring = task.ring;
    float4 *const meeting = (float4 *)(shared + ring.stages * ring.stage_bytes);
    int *const firsts = (int *)(meeting + (SHAPE::GROUPS - 1) * SHAPE::AT_ONCE * SHAPE::GROUP_THREADS),
               *const tiles = firsts + task.experts + 1, *const warp_sums = tiles + task.experts + 1;
    if (!task.early) pdl_launch_dependents(); // not before the kernel has ended that wrote x and ends
    experts_count<CODEC, SHAPE>(task, firsts, tiles, warp_sums);
    const int64_t items = task.slabs ? (int64_t)tiles[task.experts] * task.row_blocks : 0;
    experts_walk<SHAPE::TOKENS> here{firsts, tiles, task.experts, task.row_blocks, task.slabs, items, blockIdx.x};
    experts_fetch<CODEC, SHAPE> fetch(task, here, shared_address(shared));
    if (task.early) {
        experts_fetch<CODEC, SHAPE> weights = fetch;
        for (int stage = 0; stage + 1 < ring.stages; stage++) weights.stage(true, false);
        pdl_launch_dependents();
    }
    for (int stage = 0; stage + 1 < ring.stages; stage++) fetch.stage(!task.early);
    const int64_t stored = (int64_t)firsts[task.experts] * task.rows, all = task.tokens * task.rows;
    for (int64_t i = stored + blockIdx.x * SHAPE::THREADS + threadIdx.x; i < all; i += gridDim.x * SHAPE::THREADS)
        task.y[i] = from_float<typename CODEC::T>(0);
    ring_product<CODEC, SHAPE> product(ring, group, slice, lane, 0);
    uint32_t stage = fetch.ring;
    for (bool more = here.open(); more; more = here.open_next()) {
        product.clear();
#pragma unroll 1
        for (int left = task.slabs; left; left--) {
            wait_for_copies(ring.stages - 2);
            named_barrier_sync(1, SHAPE::THREADS);
            fetch.stage();
            product.stage(stage);
            stage += ring.stage_bytes;
            if (stage == fetch.ring_end) stage = fetch.ring;
        }
        product.meet(meeting, group, thread); // what it has of the item before is read: a stage's barrier lies between
        product.own(group, here.tokens,
                    [&](int, int eight, const float (&s)[4]) { experts_store(task, here, eight, thread, s); });
    }
    wait_copies<0>();
#endif
}

// Sums of 16 tokens stay at one group: two were measured for rings alone.
template <int TOKENS>
struct experts_shape : ring_shape<TOKENS, MACKO_RING_WIDE> {
    static constexpr int OWNED = experts_shape::AT_ONCE;
};

template <class CODEC, int TOKENS>
cudaError_t launch_experts(const experts_task<CODEC> &task, const macko_experts_plan &plan, const device_info &device,
                           cudaStream_t stream) {
    using SHAPE = experts_shape<TOKENS>;
    constexpr auto kernel = slab_experts_kernel<CODEC, SHAPE>;
    if (const cudaError_t error = allow_all_shared_memory<kernel>(device, 100)) return error;
    const bool pdl = device.major >= 9 && may_use_pdl(stream, SHAPE::THREADS);
    return launch_kernel(kernel, {plan.blocks, SHAPE::THREADS, plan.shared_bytes, pdl}, stream, task);
}

template <class CODEC>
cudaError_t multiply_experts(const slab_weight<CODEC> &w, const slab_experts_product &p,
                             const macko_experts_plan &plan) {
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    experts_task<CODEC> task{};
    task.ring = ring_task_of(w);
    task.ring.x = (const uint16_t *)p.x;
    task.ring.x_stride = p.x_stride;
    task.ring.stages = plan.stages;
    task.ring.stage_bytes = plan.stage_bytes;
    task.ring.x_at = plan.x_at;
    task.ends = p.ends;
    task.order = p.order;
    task.top_k = (int)p.top_k;
    task.last_x = (unsigned)p.x_rows - 1;
    task.y = (typename CODEC::T *)p.y;
    task.early = p.early;
    task.tokens = p.tokens;
    task.rows = p.rows;
    task.experts = (int)p.experts;
    task.row_blocks = (int)macko_slab_row_blocks(p.rows);
    task.slabs = plan.stages ? (int)macko_slabs_across(w.cols) : 0;
    return for_constant<16, 32, 64>(plan.tile, [&](auto tokens) {
        return launch_experts<CODEC, decltype(tokens)::value>(task, plan, device, p.stream);
    });
}

} // namespace

template <class MATRIX>
cudaError_t slab_experts(const MATRIX &m, const slab_experts_product &p, const macko_experts_plan &plan) {
    return with_weight(m, [&](const auto &weight) { return multiply_experts(weight, p, plan); });
}

} // namespace macko
