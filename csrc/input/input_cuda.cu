// Kernels of what stands before a product: input.h says what they give.
#include "input.h"
#include "rows.cuh"

using namespace macko;

namespace {

constexpr int GATE_THREADS = 128;
constexpr int NORM_THREADS = 512; // of a token: 4096 columns in one pass
constexpr int KEPT = 4;           // vectors of 8 columns that a thread holds from one pass to the next: 16384 columns

// The next kernel may start, and then this one waits for the one before: input.h says why that is right.
__device__ __forceinline__ void start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    pdl_wait();
#endif
}

// y = silu(gate) * up, eight columns a thread; blocks_per_token blocks do a token. Not fused into a product: each of its blocks
// would compute all of it, which by count takes as long.
template <typename T>
__global__ void __launch_bounds__(GATE_THREADS) gate(const T *gate, int64_t gate_stride, const T *up, int64_t up_stride,
                                                     T *y, int vectors, unsigned blocks_per_token) {
    start();
    const unsigned token = blockIdx.x / blocks_per_token, block = blockIdx.x % blocks_per_token;
    const int i = (int)block * GATE_THREADS + threadIdx.x;
    if (i >= vectors) return;
    const uint4 g = load_vector((const uint4 *)(gate + token * gate_stride) + i);
    const uint4 u = load_vector((const uint4 *)(up + token * up_stride) + i);
    const auto two = [](uint32_t gates, uint32_t ups) {
        const float2 a = to_float2<T>(gates), b = to_float2<T>(ups);
        const float2 silu = to_float2<T>(from_float2<T>(a.x / (1 + __expf(-a.x)), a.y / (1 + __expf(-a.y))));
        return from_float2<T>(silu.x * b.x, silu.y * b.y);
    };
    ((uint4 *)y)[(int64_t)token * vectors + i] = make_uint4(two(g.x, u.x), two(g.y, u.y), two(g.z, u.z), two(g.w, u.w));
}

// x + other, eight columns, rounded.
template <typename T>
__device__ __forceinline__ uint4 added(uint4 x, uint4 other) {
    const auto two = [](uint32_t x, uint32_t other) {
        const float2 a = to_float2<T>(x), b = to_float2<T>(other);
        return from_float2<T>(a.x + b.x, a.y + b.y);
    };
    return make_uint4(two(x.x, other.x), two(x.y, other.y), two(x.z, other.z), two(x.w, other.w));
}

// A block a token. A thread norms the vectors that it has added up, so what it has written it may read.
template <typename T>
__global__ void __launch_bounds__(NORM_THREADS)
    rms_norm(const T *x, const T *other, const T *weight, float eps, T *y, T *sum, int cols) {
    __shared__ float partial[NORM_THREADS / WARP];
    const int vectors = cols / 8;
    const int64_t first = int64_t(blockIdx.x) * vectors;
    row_walk<T, KEPT> row{(const uint4 *)x + first, vectors, NORM_THREADS};
    uint4 kept_weight[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) // not what the previous kernel wrote
        if (const int i = threadIdx.x + k * NORM_THREADS; i < vectors)
            kept_weight[k] = __ldg((const uint4 *)weight + i);
    start();
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (const int i = threadIdx.x + k * NORM_THREADS; i < vectors) row.kept[k] = load_vector(row.from + i);
    if (other) {
        const uint4 *others = (const uint4 *)other + first;
        uint4 *to = (uint4 *)sum + first;
#pragma unroll
        for (int k = 0; k < KEPT; k++)
            if (const int i = threadIdx.x + k * NORM_THREADS; i < vectors)
                to[i] = row.kept[k] = added<T>(row.kept[k], load_vector(others + i));
#pragma unroll 1
        for (int i = threadIdx.x + KEPT * NORM_THREADS; i < vectors; i += NORM_THREADS)
            to[i] = added<T>(load_vector(row.from + i), load_vector(others + i));
        row.from = to;
    }
    const float squares = row.squares();
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = squares;
    __syncthreads();
    float total = 0;
    for (const float part : partial) total += part;
    const float scale = rsqrtf(total / cols + eps);
    row.for_each([&](int i, uint4 vector, int k) {
        ((uint4 *)y)[first + i] =
            normalised<T>(vector, k < KEPT ? kept_weight[k] : __ldg((const uint4 *)weight + i), scale);
    });
}

} // namespace

cudaError_t macko_gate_cuda(macko_dtype dtype, int64_t tokens, int64_t cols, const void *gates, int64_t gate_stride,
                            const void *up, int64_t up_stride, void *y, cudaStream_t stream) {
    if (!tokens || !cols) return cudaSuccess;
    const int64_t vectors = cols / 8, blocks_per_token = ceil_div(vectors, GATE_THREADS);
    const auto run = [&](auto *out) {
        using T = std::remove_pointer_t<decltype(out)>;
        return launch_between(gate<T>, {tokens * blocks_per_token, GATE_THREADS, 0}, 0, stream, (const T *)gates,
                              gate_stride, (const T *)up, up_stride, out, (int)vectors, (unsigned)blocks_per_token);
    };
    return dtype == MACKO_F16 ? run((__half *)y) : run((__nv_bfloat16 *)y);
}

cudaError_t macko_rms_norm_cuda(macko_dtype dtype, int64_t tokens, int64_t cols, const void *x, const void *other,
                                const void *weight, float eps, void *y, void *sum, cudaStream_t stream) {
    if (!tokens || !cols) return cudaSuccess;
    const auto run = [&](auto *out) {
        using T = std::remove_pointer_t<decltype(out)>;
        return launch_between(rms_norm<T>, {tokens, NORM_THREADS, 0}, 0, stream, (const T *)x, (const T *)other,
                              (const T *)weight, eps, out, (T *)sum, (int)cols);
    };
    return dtype == MACKO_F16 ? run((__half *)y) : run((__nv_bfloat16 *)y);
}
