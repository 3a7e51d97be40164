// slide_quant_fused on CUDA: largest magnitude, codes and lifting in one pass over the tokens.
#include <algorithm>

#include "../core/cuda.cuh"
#include "quant_cuda.cuh"

using namespace macko;

namespace {

constexpr int MAX_THREADS = 1024;
constexpr int VECTOR = 8;      // 16-bit numbers of a 16-byte load
constexpr int ZERO_COLS = 160; // behind a token: the last group and the windows that fill the depth read there

template <typename T>
__device__ __forceinline__ float2 pair_of(uint32_t bits);
template <>
__device__ __forceinline__ float2 pair_of<__half>(uint32_t bits) {
    return __half22float2(*reinterpret_cast<const __half2 *>(&bits));
}
template <>
__device__ __forceinline__ float2 pair_of<__nv_bfloat16>(uint32_t bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

// Largest of both halves; bits of |value| order as the values do, NaN above Inf.
__device__ __forceinline__ uint32_t larger(uint32_t most, uint32_t bits) {
    return __vmaxu2(most, bits & 0x7fff7fffu);
}

// Reads a token into shared memory, zeros behind it, and returns the bits of its largest magnitude to all threads.
__device__ uint32_t read_token(const uint16_t *__restrict__ token, int cols, bool aligned, uint4 *line) {
    __shared__ uint32_t of_warp[MAX_THREADS / WARP];
    const int vectors = (cols + ZERO_COLS) / VECTOR;
    uint32_t most = 0;
    if (aligned) {
        const uint4 *from = (const uint4 *)token;
#pragma unroll 4
        for (int i = threadIdx.x; i < cols / VECTOR; i += blockDim.x) {
            const uint4 v = __ldcs(from + i); // read once: L2 is for the codes, which the GEMM reads next
            line[i] = v;
            most = larger(larger(larger(larger(most, v.x), v.y), v.z), v.w);
        }
        for (int i = cols / VECTOR + threadIdx.x; i < vectors; i += blockDim.x) line[i] = make_uint4(0, 0, 0, 0);
    } else {
        for (int i = threadIdx.x; i < vectors * VECTOR; i += blockDim.x) {
            const uint16_t v = i < cols ? token[i] : 0;
            ((uint16_t *)line)[i] = v;
            most = larger(most, v);
        }
    }
    most = __reduce_max_sync(FULL_WARP, max(most & 0xffff, most >> 16));
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = most;
    __syncthreads();
    most = threadIdx.x % WARP < blockDim.x / WARP ? of_warp[threadIdx.x % WARP] : 0;
    return __reduce_max_sync(FULL_WARP, most);
}

// A block owns a token, a thread a window at a time: neighbours read neighbouring pairs, free of bank conflicts (with
// four windows a thread, for 16-byte stores, six lanes met in a bank and lifting took 1.6 times as long on an H200).
// inverse = ceil(2^32 / (n - 1)): the group of window v is the high word of v * inverse (exact: v < 2^16, n - 1 < 8).
template <typename T, macko_slide_type TYPE>
__global__ void __launch_bounds__(MAX_THREADS)
    quantise(const T *__restrict__ x, int cols, int depth, uint32_t inverse, bool aligned, void *lifted, float *scale) {
    extern __shared__ uint4 line[];
    constexpr bool KEEPS_BITS = TYPE >= MACKO_SLIDE_F16;
    const int64_t token = blockIdx.x;
    const uint32_t most = read_token((const uint16_t *)x + token * cols, cols, aligned, line);
    const macko_slide_quantiser by = macko_slide_quantiser_of(pair_of<T>(most).x, TYPE);
    if (threadIdx.x == 0) scale[token] = KEEPS_BITS ? 1.0f : by.scale;

    const uint32_t *pairs = (const uint32_t *)line;
    const uint32_t windows = depth / 4;
    const auto first_pair = [&](uint32_t window) { return window + (inverse ? __umulhi(window, inverse) : window); };
    if (KEEPS_BITS) {
        uint2 *out = (uint2 *)lifted + token * windows;
        for (uint32_t window = threadIdx.x; window < windows; window += blockDim.x)
            out[window] = make_uint2(pairs[first_pair(window)], pairs[first_pair(window) + 1]);
        return;
    }
    uint32_t *out = (uint32_t *)lifted + token * windows;
    const auto codes = [&](uint32_t window, auto scaled) {
        const uint32_t pair = first_pair(window), col = 2 * pair;
        const float2 low = pair_of<T>(pairs[pair]), high = pair_of<T>(pairs[pair + 1]);
        out[window] = slide_codes4<TYPE>(scaled(low.x, col), scaled(low.y, col + 1), scaled(high.x, col + 2),
                                         scaled(high.y, col + 3));
    };
    if (by.before == 1 && by.factor == by.factor) {
#pragma unroll 4
        for (uint32_t window = threadIdx.x; window < windows; window += blockDim.x)
            codes(window, [&](float v, uint32_t) { return v * by.factor; });
    } else { // tiny numbers; or NaN, which must not reach the zeros behind the token
        for (uint32_t window = threadIdx.x; window < windows; window += blockDim.x)
            codes(window, [&](float v, uint32_t col) { return col < cols ? v * by.before * by.factor : 0.0f; });
    }
}

template <typename T, macko_slide_type TYPE>
cudaError_t launch(const void *x, int64_t tokens, int cols, int n, void *lifted, float *scale, cudaStream_t stream) {
    int device = 0, num_sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    // Many tokens: blocks of about four loads a thread, several of them on an SM. Few: one load a thread, for latency.
    const int vectors = (int)ceil_div(cols, VECTOR), per_thread = tokens > num_sms ? 4 : 1;
    const int threads = std::min<int>(std::max<int>(ceil_div(ceil_div(vectors, per_thread), 64) * 64, 64),
                                      per_thread == 4 ? 512 : MAX_THREADS);
    const int smem_bytes = (int)ceil_div(cols + ZERO_COLS, VECTOR) * 16;
    const cudaError_t status =
        cudaFuncSetAttribute(quantise<T, TYPE>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (status != cudaSuccess) return status;
    const bool aligned = cols % VECTOR == 0 && (uintptr_t)x % 16 == 0;
    const uint32_t inverse = n <= 2 ? 0 : (uint32_t)(((1ull << 32) + n - 2) / (n - 1));
    quantise<T, TYPE><<<(unsigned)tokens, threads, smem_bytes, stream>>>(
        (const T *)x, cols, (int)macko_slide_depth(cols, n), inverse, aligned, lifted, scale);
    return cudaGetLastError();
}

} // namespace

cudaError_t macko_slide_quant_cuda(const void *x, macko_dtype dtype, int64_t tokens, int64_t cols, int n,
                                   macko_slide_type type, void *lifted, float *scale, cudaStream_t stream) {
    if (!tokens) return cudaSuccess;
    const auto run = [&](auto launcher) { return launcher(x, tokens, (int)cols, n, lifted, scale, stream); };
    if (macko_slide_element_bytes(type) == 2) return run(launch<__half, MACKO_SLIDE_F16>);
    if (type == MACKO_SLIDE_S8)
        return run(dtype == MACKO_F16 ? launch<__half, MACKO_SLIDE_S8> : launch<__nv_bfloat16, MACKO_SLIDE_S8>);
    return run(dtype == MACKO_F16 ? launch<__half, MACKO_SLIDE_E4M3> : launch<__nv_bfloat16, MACKO_SLIDE_E4M3>);
}
