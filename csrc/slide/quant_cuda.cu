// slide_quant_fused on CUDA: largest magnitude, codes and lifting in one pass over the tokens.
#include <algorithm>

#include "../core/cuda.cuh"
#include "quant_cuda.cuh"

using namespace macko;

namespace {

constexpr int MAX_THREADS = 1024;
constexpr int VECTOR = 8;      // 16-bit numbers of a 16-byte load
constexpr int ZERO_COLS = 160; // after a token

// Of a token's codes in shared memory and the zeros after them.
__host__ __device__ constexpr int line_vectors(int cols) {
    return (cols + ZERO_COLS + VECTOR - 1) / VECTOR;
}

// Largest of both halves; bits of |value| order as the values do, NaN above Inf.
__device__ __forceinline__ uint32_t larger(uint32_t most, uint32_t bits) {
    return __vmaxu2(most, bits & 0x7fff7fffu);
}

struct quant_task {
    const uint16_t *x;
    uint8_t *lifted;
    float *scale;
    int64_t tokens;
    int cols, depth;
    int aligned;      // x can be read by 16 bytes
    int streams;      // the codes will not stay in L2 until they are read
    uint32_t windows; // of a group: n - 1, for n > 2; 0: nothing is lifted
    uint32_t inverse; // ceil(2^32 / windows): the group of window v is the high word of v * inverse
};

// Vector i of a token, zeros where it ends. x is read once: L2 is for the codes.
__device__ __forceinline__ uint4 load_vector(const quant_task &task, const uint16_t *from, int i, uint64_t once) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (task.aligned) {
        if (i * VECTOR < task.cols)
            asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "l"(from + i * VECTOR), "l"(once));
        return v;
    }
    uint32_t words[VECTOR / 2] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < VECTOR; k++)
        if (i * VECTOR + k < task.cols) words[k / 2] |= (uint32_t)from[i * VECTOR + k] << k % 2 * 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// The codes of a vector. `scaled` is given value and column, `codes4` four scaled values.
template <typename T, typename SCALED, typename CODES4>
__device__ __forceinline__ uint2 codes_of(const uint4 &v, int col, const SCALED &scaled, const CODES4 &codes4) {
    const float2 a = to_float2<T>(v.x), b = to_float2<T>(v.y), c = to_float2<T>(v.z), d = to_float2<T>(v.w);
    return make_uint2(codes4(scaled(a.x, col), scaled(a.y, col + 1), scaled(b.x, col + 2), scaled(b.y, col + 3)),
                      codes4(scaled(c.x, col + 4), scaled(c.y, col + 5), scaled(d.x, col + 6), scaled(d.y, col + 7)));
}

template <typename V>
__device__ __forceinline__ void store_codes(V *to, V codes, int streams) {
    if (streams)
        __stcs(to, codes);
    else
        *to = codes;
}

// From the codes in shared memory to the lifted token: four windows, 16 bytes, a thread. They lie in six pairs of codes, for
// which a thread reads four words; funnel shifts align them to where each window begins.
__device__ __forceinline__ void write_codes(const quant_task &task, const uint4 *line, uint8_t *to) {
#pragma unroll 2
    for (int i = threadIdx.x; i < task.depth / 16; i += blockDim.x) {
        if (!task.windows) {
            store_codes((uint4 *)to + i, line[i], task.streams);
            continue;
        }
        const uint32_t window = 4 * i, group = __umulhi(window, task.inverse); // exact: window < 2^16, n - 1 < 8
        const uint32_t in_group = window - group * task.windows, pair = window + group, shift = pair % 2 * 16;
        const uint32_t *words = (const uint32_t *)line + pair / 2;
        const uint32_t w1 = words[1], w2 = words[2];
        const uint32_t a = __funnelshift_r(words[0], w1, shift), b = __funnelshift_r(w1, w2, shift);
        const uint32_t c = __funnelshift_r(w2, words[3], shift);
        // Window k begins at pair k, one further after the end of a group. Shifts of 32 give the upper word.
        const auto skip = [&](uint32_t k) { return in_group + k >= task.windows ? 16u : 0u; };
        const uint4 codes = make_uint4(a, __funnelshift_rc(a, b, 16 + skip(1)), __funnelshift_rc(b, c, skip(2)),
                                       __funnelshift_rc(b, c, 16 + skip(3)));
        store_codes((uint4 *)to + i, codes, task.streams);
    }
}

// The same of 16-bit numbers: a window, 8 bytes, a thread.
__device__ __forceinline__ void write_numbers(const quant_task &task, const uint4 *line, uint8_t *to) {
    const uint32_t *pairs = (const uint32_t *)line;
#pragma unroll 4
    for (uint32_t window = threadIdx.x; window < (uint32_t)task.depth / 4; window += blockDim.x) {
        const uint32_t pair = task.windows ? window + __umulhi(window, task.inverse) : 2 * window;
        store_codes((uint2 *)to + window, make_uint2(pairs[pair], pairs[pair + 1]), task.streams);
    }
}

// A block's token. A thread holds HELD vectors of it in registers, so that it is read once (a row of more than HELD *
// MAX_THREADS vectors: twice), and puts their codes into shared memory, from where whole lines are written. Many small
// blocks keep memory busy: persistent ones, which loaded the next token before they wrote the last, took 5 to
// 10 % longer (H200, 8192 tokens).
template <typename T, macko_slide_type TYPE, int HELD>
__global__ void __launch_bounds__(MAX_THREADS) quantise(const quant_task task) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ uint4 line[];
    __shared__ uint32_t of_warp[MAX_THREADS / WARP];
    constexpr bool KEEPS_BITS = TYPE >= MACKO_SLIDE_F16;
    const uint64_t once = evict_first();
    const int64_t token = blockIdx.x;
    const uint16_t *from = task.x + token * task.cols;
    const int vectors = (int)ceil_div(task.cols, VECTOR), step = HELD * blockDim.x;
    uint4 held[HELD];
    const auto load = [&](int first) {
#pragma unroll
        for (int j = 0; j < HELD; j++) held[j] = load_vector(task, from, first + j * blockDim.x, once);
    };
    load(threadIdx.x);
#if __CUDA_ARCH__ >= 900
    // PDL: the GEMM may fetch weights once the loads of the last tokens have been issued.
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    uint32_t most = 0;
    for (int first = threadIdx.x; !KEEPS_BITS;) {
#pragma unroll
        for (int j = 0; j < HELD; j++)
            most = larger(larger(larger(larger(most, held[j].x), held[j].y), held[j].z), held[j].w);
        first += step;
        if (first >= vectors) break;
        load(first);
    }
    most = __reduce_max_sync(FULL_WARP, max(most & 0xffff, most >> 16));
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = most;
    __syncthreads();
    most = threadIdx.x % WARP < blockDim.x / WARP ? of_warp[threadIdx.x % WARP] : 0;
    most = __reduce_max_sync(FULL_WARP, most);
    const macko_slide_quantiser by = macko_slide_quantiser_of(to_float2<T>(most).x, TYPE);
    if (threadIdx.x == 0) task.scale[token] = KEEPS_BITS ? 1.0f : by.scale;

    uint2 *codes = (uint2 *)line; // of 8-bit types
    const auto put = [&](const auto &scaled, const auto &codes4) {
        for (int first = threadIdx.x; first < vectors; first += step) {
            if (step < vectors && (first >= step || !KEEPS_BITS)) load(first); // it did not fit: again
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                const int i = first + j * blockDim.x;
                if (i >= vectors) continue;
                if (KEEPS_BITS)
                    line[i] = held[j];
                else
                    codes[i] = codes_of<T>(held[j], i * VECTOR, scaled, codes4);
            }
        }
    };
    if (KEEPS_BITS || (by.before == 1 && by.factor > 0))
        put([&](float v, int) { return __fmul_rn(v, by.factor); }, slide_codes4_finite<TYPE>);
    else // tiny numbers and zeros; or NaN and Inf, which must not reach the zeros after the token
        put([&](float v, int col) { return col < task.cols ? v * by.before * by.factor : 0.0f; }, slide_codes4<TYPE>);
    for (int i = vectors + threadIdx.x; i < line_vectors(task.cols); i += blockDim.x) {
        if (KEEPS_BITS)
            line[i] = make_uint4(0, 0, 0, 0);
        else
            codes[i] = make_uint2(0, 0);
    }
    __syncthreads();
    uint8_t *to = task.lifted + token * task.depth * macko_slide_element_bytes(TYPE);
    if (KEEPS_BITS)
        write_numbers(task, line, to);
    else
        write_codes(task, line, to);
#endif
}

template <typename T, macko_slide_type TYPE, int HELD>
cudaError_t run(const quant_task &task, const device_info &device, cudaStream_t stream) {
    if (const cudaError_t status = allow_all_shared_memory<quantise<T, TYPE, HELD>>(device)) return status;
    const int wanted = (int)ceil_div(task.cols, HELD * VECTOR * WARP) * WARP;
    const int threads = std::min(std::max(wanted, WARP), MAX_THREADS);
    const int smem_bytes = line_vectors(task.cols) * VECTOR * macko_slide_element_bytes(TYPE);
    quantise<T, TYPE, HELD><<<(unsigned)task.tokens, threads, smem_bytes, stream>>>(task);
    return cudaGetLastError();
}

template <typename T, macko_slide_type TYPE>
cudaError_t launch(const void *x, int64_t tokens, int cols, int n, void *lifted, float *scale, cudaStream_t stream) {
    device_info device;
    if (const cudaError_t status = current_device(&device)) return status;
    quant_task task{};
    task.x = (const uint16_t *)x;
    task.lifted = (uint8_t *)lifted;
    task.scale = scale;
    task.tokens = tokens;
    task.cols = cols;
    task.depth = (int)macko_slide_depth(cols, n);
    task.aligned = cols % VECTOR == 0 && (uintptr_t)x % 16 == 0;
    // Streaming stores: 118.5 -> 110.0 us for 155 MB of codes, but 21.6 -> 22.7 us for 29 MB (H200, 50 MB of L2).
    task.streams = tokens * task.depth * macko_slide_element_bytes(TYPE) > 32 << 20;
    task.windows = n <= 2 ? 0 : n - 1;
    task.inverse = n <= 2 ? 0 : (uint32_t)(((1ull << 32) + n - 2) / (n - 1));
    // Few tokens: as many threads as there can be, for latency. Many: 4 vectors a thread, and 8 where that would take so
    // many threads that two blocks fit an SM (H200, 8192 tokens in 6:8: 3584 columns 26.6 and 27.0 us, 14336 99.0 and
    // 100.5, 18944 137.8 and 131.4; with 2 vectors 3584 took 27.3).
    int held = tokens > device.num_sms ? (cols <= 14336 ? 4 : 8) : 1;
    while (held < 8 && cols > held * VECTOR * MAX_THREADS) held *= 2;
    return for_constant<1, 2, 4, 8>(held, [&](auto each) { return run<T, TYPE, each>(task, device, stream); });
}

} // namespace

cudaError_t macko_slide_quant_cuda(const void *x, macko_dtype dtype, int64_t tokens, int64_t cols, int n,
                                   macko_slide_type type, void *lifted, float *scale, cudaStream_t stream) {
    if (!tokens) return cudaSuccess;
    const auto with = [&](auto launcher) { return launcher(x, tokens, (int)cols, n, lifted, scale, stream); };
    if (macko_slide_element_bytes(type) == 2) return with(launch<__half, MACKO_SLIDE_F16>);
    if (type == MACKO_SLIDE_S8)
        return with(dtype == MACKO_F16 ? launch<__half, MACKO_SLIDE_S8> : launch<__nv_bfloat16, MACKO_SLIDE_S8>);
    return with(dtype == MACKO_F16 ? launch<__half, MACKO_SLIDE_E4M3> : launch<__nv_bfloat16, MACKO_SLIDE_E4M3>);
}
