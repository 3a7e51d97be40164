// slide_quant_fused on CUDA: largest magnitude, codes and lifting in one pass over the tokens.
#include <algorithm>

#include "../core/cuda.cuh"
#include "quant_cuda.cuh"

using namespace macko;

namespace {

constexpr int MAX_THREADS = 1024;
constexpr int VECTOR = 8;      // 16-bit numbers of a 16-byte load
constexpr int ZERO_COLS = 160; // behind a token

// Of a token in shared memory, zeros behind it among them.
__host__ __device__ constexpr int line_vectors(int cols) {
    return (cols + ZERO_COLS + VECTOR - 1) / VECTOR;
}

// Largest of both halves; bits of |value| order as the values do, NaN above Inf.
__device__ __forceinline__ uint32_t larger(uint32_t most, uint32_t bits) {
    return __vmaxu2(most, bits & 0x7fff7fffu);
}

// Sixteen bytes to shared memory, without registers and at no wait. `x` is read once: L2 is for the codes.
__device__ __forceinline__ void copy_16(uint32_t to, const void *from, uint64_t once) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(once)
                 : "memory");
}

struct quant_task {
    const uint16_t *x;
    uint8_t *lifted;
    float *scale;
    int64_t tokens;
    int cols, depth;
    int aligned;      // x can be copied by 16 bytes
    int streams;      // the codes will not stay in L2 until they are read
    uint32_t inverse; // ceil(2^32 / (n - 1)), for n > 2: the group of window v is the high word of v * inverse
};

// The bits of a token's largest |value|, for every thread. Also the barrier behind which all of `line` is there.
__device__ __forceinline__ uint32_t largest(const uint4 *line, int vectors, uint32_t *of_warp) {
    uint32_t most = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) { // what this thread itself copied
        const uint4 v = line[i];
        most = larger(larger(larger(larger(most, v.x), v.y), v.z), v.w);
    }
    most = __reduce_max_sync(FULL_WARP, max(most & 0xffff, most >> 16));
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = most;
    __syncthreads();
    most = threadIdx.x % WARP < blockDim.x / WARP ? of_warp[threadIdx.x % WARP] : 0;
    return __reduce_max_sync(FULL_WARP, most);
}

template <typename V>
__device__ __forceinline__ void store_codes(V *to, V codes, int streams) {
    if (streams)
        __stcs(to, codes);
    else
        *to = codes;
}

// Codes of a token that is not lifted, a vector a thread. `scaled` is given value and column.
template <typename T, macko_slide_type TYPE, typename SCALED>
__device__ __forceinline__ void write_plain(const quant_task &task, const uint4 *line, uint8_t *to,
                                            const SCALED &scaled) {
#pragma unroll 2
    for (int i = threadIdx.x; i < task.depth / VECTOR; i += blockDim.x) {
        const uint4 v = line[i];
        if (TYPE >= MACKO_SLIDE_F16) {
            store_codes((uint4 *)to + i, v, task.streams);
            continue;
        }
        const float2 a = to_float2<T>(v.x), b = to_float2<T>(v.y), c = to_float2<T>(v.z), d = to_float2<T>(v.w);
        const int col = i * VECTOR;
        const uint32_t low =
            slide_codes4<TYPE>(scaled(a.x, col), scaled(a.y, col + 1), scaled(b.x, col + 2), scaled(b.y, col + 3));
        const uint32_t high =
            slide_codes4<TYPE>(scaled(c.x, col + 4), scaled(c.y, col + 5), scaled(d.x, col + 6), scaled(d.y, col + 7));
        store_codes((uint2 *)to + i, make_uint2(low, high), task.streams);
    }
}

// Codes of a lifted token, a window a thread: neighbours read neighbouring pairs, free of bank conflicts (with four
// windows a thread, for 16-byte stores, six lanes met in a bank and lifting took 1.6 times as long on an H200).
template <typename T, macko_slide_type TYPE, typename SCALED>
__device__ __forceinline__ void write_lifted(const quant_task &task, const uint32_t *pairs, uint8_t *to,
                                             const SCALED &scaled) {
    const uint32_t windows = task.depth / 4;
#pragma unroll 4
    for (uint32_t window = threadIdx.x; window < windows; window += blockDim.x) {
        const uint32_t pair = window + __umulhi(window, task.inverse); // exact: window < 2^16, n - 1 < 8
        const uint32_t first = pairs[pair], second = pairs[pair + 1];
        if (TYPE >= MACKO_SLIDE_F16) {
            store_codes((uint2 *)to + window, make_uint2(first, second), task.streams);
            continue;
        }
        const float2 low = to_float2<T>(first), high = to_float2<T>(second);
        const int col = 2 * pair;
        const uint32_t codes = slide_codes4<TYPE>(scaled(low.x, col), scaled(low.y, col + 1), scaled(high.x, col + 2),
                                                  scaled(high.y, col + 3));
        store_codes((uint32_t *)to + window, codes, task.streams);
    }
}

// A block takes every gridDim-th token: into shared memory, and from there twice. That the blocks of an SM are at
// different places keeps memory busy (two lines a block, the next token on its way, were no faster on an H200).
template <typename T, macko_slide_type TYPE>
__global__ void __launch_bounds__(MAX_THREADS) quantise(const quant_task task) {
    extern __shared__ uint4 line[];
    __shared__ uint32_t of_warp[MAX_THREADS / WARP];
    constexpr bool KEEPS_BITS = TYPE >= MACKO_SLIDE_F16;
    uint64_t once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    const int vectors = (int)ceil_div(task.cols, VECTOR);
    // Behind a token's columns there are zeros: the last group and the windows that fill the depth read there.
    for (int col = task.cols + threadIdx.x; col < line_vectors(task.cols) * VECTOR; col += blockDim.x)
        ((uint16_t *)line)[col] = 0;
    for (int64_t token = blockIdx.x; token < task.tokens; token += gridDim.x) {
        __syncthreads(); // the token before is through with the line
        const uint16_t *from = task.x + token * task.cols;
        if (task.aligned) {
            const uint32_t at = (uint32_t)__cvta_generic_to_shared(line);
#pragma unroll 4
            for (int i = threadIdx.x; i < vectors; i += blockDim.x) copy_16(at + i * 16, from + i * VECTOR, once);
        } else {
            for (int i = threadIdx.x; i < vectors; i += blockDim.x)
                for (int col = i * VECTOR; col < min((i + 1) * VECTOR, task.cols); col++)
                    ((uint16_t *)line)[col] = from[col];
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("griddepcontrol.launch_dependents;"); // the GEMM may fetch weights, behind the first tokens
#endif
        asm volatile("cp.async.wait_all;" ::: "memory");
        const uint32_t most = largest(line, KEEPS_BITS ? 0 : vectors, of_warp);
        const macko_slide_quantiser by = macko_slide_quantiser_of(to_float2<T>(most).x, TYPE);
        if (threadIdx.x == 0) task.scale[token] = KEEPS_BITS ? 1.0f : by.scale;
        uint8_t *to = task.lifted + token * task.depth * macko_slide_element_bytes(TYPE);
        const auto write = [&](const auto &scaled) {
            if (task.inverse)
                write_lifted<T, TYPE>(task, (const uint32_t *)line, to, scaled);
            else
                write_plain<T, TYPE>(task, line, to, scaled);
        };
        if (KEEPS_BITS || (by.before == 1 && by.factor == by.factor))
            write([&](float v, int) { return v * by.factor; });
        else // tiny numbers; or NaN, which must not reach the zeros behind the token
            write([&](float v, int col) { return col < task.cols ? v * by.before * by.factor : 0.0f; });
    }
}

template <typename T, macko_slide_type TYPE>
cudaError_t launch(const void *x, int64_t tokens, int cols, int n, void *lifted, float *scale, cudaStream_t stream) {
    Device device;
    cudaError_t status = current_device(&device);
    if (!status) status = allow_all_shared_memory<quantise<T, TYPE>>(device);
    if (status) return status;
    quant_task task{};
    task.x = (const uint16_t *)x;
    task.lifted = (uint8_t *)lifted;
    task.scale = scale;
    task.tokens = tokens;
    task.cols = cols;
    task.depth = (int)macko_slide_depth(cols, n);
    task.aligned = cols % VECTOR == 0 && (uintptr_t)x % 16 == 0;
    // Streaming stores: 126.6 -> 122.2 us for 155 MB of codes, but 22.9 -> 23.9 us for 29 MB (H200, 50 MB of L2).
    task.streams = tokens * task.depth * macko_slide_element_bytes(TYPE) > 32 << 20;
    task.inverse = n <= 2 ? 0 : (uint32_t)(((1ull << 32) + n - 2) / (n - 1));
    // Few tokens: a load a thread, for latency. Many: eight, and as many blocks as an SM holds.
    const bool many = tokens > device.num_sms;
    const int wanted = (int)ceil_div(ceil_div(cols, VECTOR * (many ? 8 : 1)), WARP) * WARP;
    const int threads = std::min(std::max(wanted, WARP), MAX_THREADS), smem_bytes = line_vectors(cols) * 16;
    const int per_sm = std::min({device.shared_bytes / (smem_bytes + 1280), 2048 / threads, 32});
    const int64_t blocks = many ? std::min(tokens, (int64_t)std::max(per_sm, 1) * device.num_sms) : tokens;
    quantise<T, TYPE><<<(unsigned)blocks, threads, smem_bytes, stream>>>(task);
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
