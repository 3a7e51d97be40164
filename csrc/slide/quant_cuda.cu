// slide_quant_fused on CUDA: largest magnitude, codes and lifting in one pass over the tokens.
#include <algorithm>

#include "../core/cuda.cuh"
#include "quant_cuda.cuh"

using namespace macko;

namespace {

constexpr int MAX_THREADS = 1024;
constexpr int VECTOR = 8;      // 16-bit numbers of a 16-byte load
constexpr int ZERO_COLS = 160; // behind a token
constexpr int MAX_LINES = 3;   // tokens of a block in shared memory: one at work, two on their way

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

// Sixteen bytes to shared memory, without registers and at no wait: `x` is read once, L2 is for the codes.
__device__ __forceinline__ void copy_16(uint32_t to, const void *from, uint64_t once) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(once)
                 : "memory");
}

template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

struct quant_task {
    const uint16_t *x;
    uint8_t *lifted;
    float *scale;
    int64_t tokens;
    int cols, depth;
    int line_vectors; // of a token in shared memory: its columns, and zeros
    int lines;        // tokens in shared memory: 1 to MAX_LINES
    int aligned;      // x can be copied by 16 bytes
    uint32_t inverse; // ceil(2^32 / (n - 1)), for n > 2: the group of window v is the high word of v * inverse
};

// A token's bits of |value|, the largest; every thread gets it. Also the barrier behind which all of `line` is there.
__device__ __forceinline__ uint32_t largest(const uint4 *line, int vectors, uint32_t *of_warp) {
    uint32_t most = 0;
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

// Codes of a token that is not lifted: a thread takes the vectors that it copied. `scaled` is given value and column.
template <typename T, macko_slide_type TYPE, typename SCALED>
__device__ __forceinline__ void write_plain(const uint4 *line, int vectors, uint8_t *to, const SCALED &scaled) {
#pragma unroll 2
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        const uint4 v = line[i];
        if (TYPE >= MACKO_SLIDE_F16) {
            ((uint4 *)to)[i] = v;
            continue;
        }
        const float2 a = pair_of<T>(v.x), b = pair_of<T>(v.y), c = pair_of<T>(v.z), d = pair_of<T>(v.w);
        const int col = i * VECTOR;
        const uint32_t low =
            slide_codes4<TYPE>(scaled(a.x, col), scaled(a.y, col + 1), scaled(b.x, col + 2), scaled(b.y, col + 3));
        const uint32_t high =
            slide_codes4<TYPE>(scaled(c.x, col + 4), scaled(c.y, col + 5), scaled(d.x, col + 6), scaled(d.y, col + 7));
        ((uint2 *)to)[i] = make_uint2(low, high);
    }
}

// Codes of a lifted token, a window a thread: neighbours read neighbouring pairs, free of bank conflicts (with four
// windows a thread, for 16-byte stores, six lanes met in a bank and lifting took 1.6 times as long on an H200).
template <typename T, macko_slide_type TYPE, typename SCALED>
__device__ __forceinline__ void write_lifted(const uint32_t *pairs, uint32_t windows, uint32_t inverse, uint8_t *to,
                                             const SCALED &scaled) {
#pragma unroll 4
    for (uint32_t window = threadIdx.x; window < windows; window += blockDim.x) {
        const uint32_t pair = window + __umulhi(window, inverse); // exact: window < 2^16, n - 1 < 8
        const uint32_t first = pairs[pair], second = pairs[pair + 1];
        if (TYPE >= MACKO_SLIDE_F16) {
            ((uint2 *)to)[window] = make_uint2(first, second);
            continue;
        }
        const float2 low = pair_of<T>(first), high = pair_of<T>(second);
        const int col = 2 * pair;
        ((uint32_t *)to)[window] = slide_codes4<TYPE>(scaled(low.x, col), scaled(low.y, col + 1),
                                                      scaled(high.x, col + 2), scaled(high.y, col + 3));
    }
}

// A block takes every gridDim-th token. While it works on one, the next ones are on their way into shared memory.
template <typename T, macko_slide_type TYPE>
__global__ void __launch_bounds__(MAX_THREADS) quantise(const quant_task task) {
    extern __shared__ uint4 memory[];
    __shared__ uint32_t of_warp[2][MAX_THREADS / WARP];
    constexpr bool KEEPS_BITS = TYPE >= MACKO_SLIDE_F16;
    uint64_t once;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    const int vectors = (int)ceil_div(task.cols, VECTOR);
    const auto fetch = [&](int64_t token, int line) {
        uint4 *to = memory + line * task.line_vectors;
        const uint16_t *from = task.x + token * task.cols;
        if (token < task.tokens && task.aligned) {
            const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
            for (int i = threadIdx.x; i < vectors; i += blockDim.x) copy_16(at + i * 16, from + i * VECTOR, once);
        } else if (token < task.tokens) {
            for (int i = threadIdx.x; i < vectors; i += blockDim.x)
                for (int col = i * VECTOR; col < min((i + 1) * VECTOR, task.cols); col++)
                    ((uint16_t *)to)[col] = from[col];
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    const int64_t stride = gridDim.x;
    int64_t token = blockIdx.x;
    fetch(token, 0);
    for (int ahead = 1; ahead < task.lines - 1; ahead++) fetch(token + ahead * stride, ahead);
    // Behind a token's columns: the last group and the windows that fill the depth read there.
    for (int line = 0; line < task.lines; line++)
        for (int i = task.cols + threadIdx.x; i < task.line_vectors * VECTOR; i += blockDim.x)
            ((uint16_t *)(memory + line * task.line_vectors))[i] = 0;
    __syncthreads();
    for (int turn = 0, line = 0; token < task.tokens; token += stride, turn++) {
        if (task.lines == MAX_LINES)
            wait_for_copies<MAX_LINES - 2>();
        else
            wait_for_copies<0>();
        const uint4 *here = memory + line * task.line_vectors;
        const uint32_t most = largest(here, KEEPS_BITS ? 0 : vectors, of_warp[turn & 1]);
#if __CUDA_ARCH__ >= 900
        // The GEMM may fetch weights, now that they do not stand in x's way.
        asm volatile("griddepcontrol.launch_dependents;");
#endif
        // Everybody is through with the token before: its line is free.
        const int before = line == 0 ? task.lines - 1 : line - 1;
        if (task.lines > 1) fetch(token + (task.lines - 1) * stride, before);
        line = line + 1 == task.lines ? 0 : line + 1;

        const macko_slide_quantiser by = macko_slide_quantiser_of(pair_of<T>(most).x, TYPE);
        if (threadIdx.x == 0) task.scale[token] = KEEPS_BITS ? 1.0f : by.scale;
        uint8_t *to = task.lifted + token * task.depth * macko_slide_element_bytes(TYPE);
        const auto write = [&](const auto &scaled) {
            if (task.inverse)
                write_lifted<T, TYPE>((const uint32_t *)here, task.depth / 4, task.inverse, to, scaled);
            else
                write_plain<T, TYPE>(here, task.depth / VECTOR, to, scaled);
        };
        if (KEEPS_BITS || (by.before == 1 && by.factor == by.factor))
            write([&](float v, int) { return v * by.factor; });
        else // tiny numbers; or NaN, which must not reach the zeros behind the token
            write([&](float v, int col) { return col < task.cols ? v * by.before * by.factor : 0.0f; });
        if (task.lines == 1) {
            __syncthreads();
            fetch(token + stride, 0);
        }
    }
}

template <typename T, macko_slide_type TYPE>
cudaError_t launch(const void *x, int64_t tokens, int cols, int n, void *lifted, float *scale, cudaStream_t stream) {
    Device device;
    cudaError_t status = current_device(&device);
    if (!status) status = allow_all_shared_memory<quantise<T, TYPE>>(device);
    if (status) return status;
    const int vectors = (int)ceil_div(cols, VECTOR);
    quant_task task = {(const uint16_t *)x,
                       (uint8_t *)lifted,
                       scale,
                       tokens,
                       cols,
                       (int)macko_slide_depth(cols, n),
                       (int)ceil_div(cols + ZERO_COLS, VECTOR),
                       1,
                       cols % VECTOR == 0 && (uintptr_t)x % 16 == 0,
                       n <= 2 ? 0 : (uint32_t)(((1ull << 32) + n - 2) / (n - 1))};
    // Few tokens: a load a thread, for latency. Many: about four, and as many blocks as an SM holds.
    const int per_thread = tokens > device.num_sms ? 4 : 1;
    int threads = std::min(std::max((int)ceil_div(ceil_div(vectors, per_thread), 64) * 64, 64), MAX_THREADS);
    const int line_bytes = task.line_vectors * 16, most_bytes = device.shared_bytes - 256;
    int per_sm = 1;
    if (per_thread > 1) {
        task.lines = std::min(MAX_LINES, std::max(1, most_bytes / line_bytes));
        if (2 * task.lines * line_bytes <= most_bytes - 2048) threads = std::min(threads, MAX_THREADS / 2);
        per_sm = std::max(1, std::min(2048 / threads, most_bytes / (task.lines * line_bytes + 1024 + 256)));
    }
    const int64_t blocks = std::min<int64_t>(tokens, (int64_t)per_sm * device.num_sms);
    quantise<T, TYPE><<<(unsigned)(per_thread > 1 ? blocks : tokens), threads, task.lines * line_bytes, stream>>>(task);
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
