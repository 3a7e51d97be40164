// The order of pairs by expert, and the weighted sum: experts.h says what they give.
#include "experts.h"

#include "../core/cuda.cuh"

using namespace macko;

namespace {

constexpr int MOST_WARPS = 32, SUM_THREADS = 128, AT_ONCE = 8;
constexpr int64_t COUNT_BYTES = 48 << 10; // of shared memory that every block may have

// One block. A warp has consecutive pairs: it counts those of each expert, learns how many come before its own, and puts
// them there. counts [warps][experts + 1], the last of pairs that are no expert's; begins [experts + 1].
template <typename ID>
__global__ void __launch_bounds__(MOST_WARPS *WARP)
    expert_order(const ID *ids, int pairs, int experts, int32_t *order, int32_t *places, int32_t *ends) {
    extern __shared__ int counts[];
    pdl_launch_dependents();
    const int warps = blockDim.x / WARP, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, bins = experts + 1;
    int *const own = counts + warp * bins, *const begins = counts + warps * bins;
    for (int i = threadIdx.x; i < warps * bins; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    const int a_warp = (pairs + warps * WARP - 1) / (warps * WARP) * WARP;
    const int first = min(pairs, warp * a_warp), last = min(pairs, first + a_warp);
    // body(pair, expert, place among the warp's pairs of it), and counts them.
    const auto each = [&](auto body) {
        for (int base = first; base < last; base += WARP) {
            const int pair = base + lane;
            const unsigned active = __ballot_sync(FULL_WARP, pair < last);
            int expert = 0, before = 1, all = 0;
            if (pair < last) {
                const ID id = ids[pair];
                expert = id < 0 || id > experts ? experts : (int)id;
                const unsigned alike = __match_any_sync(active, expert);
                before = __popc(alike & ((1u << lane) - 1));
                all = __popc(alike);
                body(pair, expert, own[expert] + before);
            }
            __syncwarp();
            if (!before) own[expert] += all;
            __syncwarp();
        }
    };
    each([](int, int, int) {});
    __syncthreads();
    for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) {
        int sum = 0;
        for (int other = 0; other < warps; other++) {
            const int count = counts[other * bins + bin];
            counts[other * bins + bin] = sum;
            sum += count;
        }
        begins[bin] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        int before = 0;
        for (int base = 0; base < bins; base += WARP) {
            const int bin = base + lane, count = bin < bins ? begins[bin] : 0;
            const int sum = before + (int)warp_inclusive_sum(count);
            if (bin < bins) begins[bin] = sum - count;
            if (bin < experts) ends[bin] = sum;
            before = __shfl_sync(FULL_WARP, sum, WARP - 1);
        }
    }
    __syncthreads();
    each([&](int pair, int expert, int nth) {
        const int place = begins[expert] + nth;
        order[place] = pair;
        places[pair] = expert < experts ? place : -1;
    });
}

// The product as torch rounds it, then in fp32.
template <typename T>
__device__ __forceinline__ float term(float x, T weight) {
    return to_float(from_float<T>(x * to_float(weight)));
}
__device__ __forceinline__ float term(float x, float weight) {
    return __fmul_rn(x, weight);
}

// __ldcg, of which the compiler knows for all types that it comes after pdl_wait.
__device__ __forceinline__ float load_cg(const float *at) {
    return __ldcg(at);
}
template <typename T>
__device__ __forceinline__ T load_cg(const T *at) {
    const unsigned short bits = __ldcg((const unsigned short *)at);
    return *(const T *)&bits;
}

// COLS columns a thread, 8 by one load or 1; blocks_per_token blocks do a token.
template <typename T, typename WEIGHT, int COLS>
__global__ void __launch_bounds__(SUM_THREADS)
    expert_sum(const T *x, int rows, int cols, const int32_t *places, const WEIGHT *weights, int top_k, T *y,
               unsigned blocks_per_token, bool early) {
    if (!early) pdl_launch_dependents();
    const int64_t token = blockIdx.x / blocks_per_token;
    const int col = ((int)(blockIdx.x % blocks_per_token) * SUM_THREADS + threadIdx.x) * COLS;
    if (col >= cols) return;
    float sums[COLS] = {};
    for (int slot = 0; slot < top_k; slot += AT_ONCE) { // what it loads for some slots it waits for once
        int place[AT_ONCE];
        WEIGHT weight[AT_ONCE];
        bool there[AT_ONCE];
        alignas(16) T held[AT_ONCE][COLS];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int64_t at = token * top_k + min(slot + k, top_k - 1);
            place[k] = __ldcg(places + at); // not from L1, which before pdl_wait may have what was there before
            weight[k] = load_cg(weights + at);
        }
        if (early && !slot) pdl_launch_dependents();
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            there[k] = slot + k < top_k && place[k] >= 0 && place[k] < rows;
            if (!there[k]) continue;
            const T *from = x + (int64_t)place[k] * cols + col;
            if constexpr (COLS == 8)
                *(uint4 *)held[k] = *(const uint4 *)from;
            else
                held[k][0] = *from;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
            for (int i = 0; i < COLS; i++)
                if (there[k]) sums[i] = __fadd_rn(sums[i], term(to_float(held[k][i]), weight[k]));
    }
    alignas(16) T made[COLS];
#pragma unroll
    for (int i = 0; i < COLS; i++) made[i] = from_float<T>(sums[i]);
    T *to = y + token * cols + col;
    if constexpr (COLS == 8)
        *(uint4 *)to = *(const uint4 *)made;
    else
        *to = made[0];
}

__global__ void __launch_bounds__(SUM_THREADS)
    expert_rows(const int32_t *order, int top_k, const uint4 *x, int x_rows, int vectors, uint4 *y) {
    pdl_launch_dependents();
    const unsigned row = min((unsigned)(order[blockIdx.x] / top_k), (unsigned)x_rows - 1);
    for (int i = threadIdx.x; i < vectors; i += SUM_THREADS)
        y[(int64_t)blockIdx.x * vectors + i] = x[(int64_t)row * vectors + i];
}

template <typename T, typename WEIGHT>
cudaError_t sum(const macko_expert_sum &p, cudaStream_t stream) {
    const bool wide = p.cols % 8 == 0;
    const int64_t blocks_per_token = ceil_div(p.cols, SUM_THREADS * (wide ? 8 : 1));
    const auto kernel = wide ? expert_sum<T, WEIGHT, 8> : expert_sum<T, WEIGHT, 1>;
    return launch_between(kernel, {p.tokens * blocks_per_token, SUM_THREADS, 0}, ANY_KERNEL, stream, (const T *)p.x,
                          (int)p.rows, (int)p.cols, p.places, (const WEIGHT *)p.weights, (int)p.top_k, (T *)p.y,
                          (unsigned)blocks_per_token, p.early && p.top_k);
}

} // namespace

cudaError_t macko_expert_order_cuda(const macko_expert_order *p, cudaStream_t stream) {
    int warps = MOST_WARPS;
    const auto bytes = [&] { return (warps + 1) * (p->experts + 1) * (int64_t)sizeof(int); };
    while (warps > 1 && (bytes() > COUNT_BYTES || (warps / 2) * (int64_t)WARP >= p->pairs)) warps /= 2;
    if (bytes() > COUNT_BYTES) return cudaErrorInvalidValue;
    const auto run = [&](const auto *ids) {
        using ID = std::decay_t<decltype(*ids)>;
        return launch_between(expert_order<ID>, {1, warps * WARP, (int)bytes()}, ANY_KERNEL, stream, ids, (int)p->pairs,
                              (int)p->experts, p->order, p->places, p->ends);
    };
    return p->id_bytes == 8 ? run((const int64_t *)p->ids) : run((const int32_t *)p->ids);
}

cudaError_t macko_expert_sum_cuda(const macko_expert_sum *p, cudaStream_t stream) {
    if (!p->tokens || !p->cols) return cudaSuccess;
    const bool half = p->dtype == MACKO_F16;
    if (p->weights_dtype == MACKO_F32)
        return half ? sum<__half, float>(*p, stream) : sum<__nv_bfloat16, float>(*p, stream);
    return half ? sum<__half, __half>(*p, stream) : sum<__nv_bfloat16, __nv_bfloat16>(*p, stream);
}

cudaError_t macko_expert_rows_cuda(const int32_t *order, int64_t count, int64_t top_k, const void *x, int64_t x_rows,
                                   int64_t cols, void *y, cudaStream_t stream) {
    if (!count || !cols || !x_rows) return cudaSuccess;
    return launch_between(expert_rows, {count, SUM_THREADS, 0}, ANY_KERNEL, stream, order, (int)top_k, (const uint4 *)x,
                          (int)x_rows, (int)(cols / 8), (uint4 *)y);
}
