// y = x W^T + bias on CUDA for a few tokens, from the sell layout: the stream of spmv, with x as [column][N tokens].
#include "stream.cuh"

using namespace macko;

namespace {

constexpr int MAX_CONSUMER_GROUPS = 2;
constexpr int MIN_STAGES = 3; // with 2 the consumers wait for memory
constexpr int MAX_THREADS = (2 * (8 + 1) > MACKO_SELL_MAX_WARPS + 1 ? 2 * (8 + 1) : MACKO_SELL_MAX_WARPS + 1) * WARP;
[[maybe_unused]] constexpr int X_AT_ONCE = 32; // words of x that a thread has in flight

// N 16-bit values, the tokens of one column, from shared memory as words.
template <int N>
struct sell_tokens {
    uint32_t words[N / 2];
};
template <int N>
__device__ __forceinline__ sell_tokens<N> load_tokens(uint32_t at) {
    sell_tokens<N> x;
    if constexpr (N == 2) {
        x.words[0] = load_shared_4(at);
    } else if constexpr (N == 4) {
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.words[0]), "=r"(x.words[1]) : "r"(at));
    } else {
        const uint4 eight = load_shared_16(at);
        x = {{eight.x, eight.y, eight.z, eight.w}};
    }
    return x;
}

// Eight entries times N tokens; see multiply_8 of spmv, from which it differs in the size of an x.
template <typename T, int GAP_BITS, int N>
__device__ __forceinline__ void multiply_8(uint4 values, uint32_t even, uint32_t odd, uint32_t &address,
                                           float (&sum)[N]) {
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
    const auto [to_even, to_odd] = distances<GAP_BITS>(even, odd);
    sell_tokens<N> x[8]; // all asked for before the first product, which waits
    for (int pair = 0; pair < 4; pair++) {
        const uint32_t pick = 2u * N << (8 * pair), last = __dp4a(to_odd, pick, address);
        x[2 * pair] = load_tokens<N>(__dp4a(to_even, pick, address));
        x[2 * pair + 1] = load_tokens<N>(last);
        if (pair == 3 || (GAP_BITS == 6 && pair == 1)) address = last + 2 * N;
    }
    for (int entry = 0; entry < 8; entry++) {
        const float2 w = to_float2<T>(words[entry / 2]);
        for (int word = 0; word < N / 2; word++) {
            const float2 two = to_float2<T>(x[entry].words[word]);
            sum[2 * word] = fmaf(entry % 2 ? w.y : w.x, two.x, sum[2 * word]);
            sum[2 * word + 1] = fmaf(entry % 2 ? w.y : w.x, two.y, sum[2 * word + 1]);
        }
    }
}

template <typename T, int GAP_BITS, int N>
__device__ __forceinline__ void multiply_step(const sell_step &step, uint32_t &address, float (&sum)[N]) {
    for (int half = 0; half < 2; half++)
        multiply_8<T, GAP_BITS>(step.values[half], gap_field<GAP_BITS>(step.planes, 2 * half),
                                gap_field<GAP_BITS>(step.planes, 2 * half + 1), address, sum);
}

// x [tokens, cols] into shared memory as [cols][N], zeros for the tokens that are missing.
template <typename T, int N>
__device__ __forceinline__ void interleave(const T *x, int tokens, int cols, uint8_t *shared, int thread, int threads) {
    constexpr int COLS = N < 8 ? 4 : 2,
                  VECTORS = COLS * N / 8;            // columns of a load; 16-byte stores of what N loads bring
    constexpr int LOADS = X_AT_ONCE / (4 * VECTORS); // all asked for before the first is needed
    const uint16_t *source = (const uint16_t *)x;
    const int whole = cols % COLS == 0 && (uintptr_t)x % (2 * COLS) == 0 ? cols / COLS : 0;
#pragma unroll 1
    for (int first = thread; first < whole; first += LOADS * threads) {
        uint32_t in[LOADS][N][COLS / 2];
        for (int i = 0; i < LOADS; i++)
            for (int n = 0; n < N; n++) {
                const int at = first + i * threads;
                const uint16_t *from = source + (int64_t)n * cols + at * COLS;
                const bool there = n < tokens && at < whole;
                if (COLS == 4) {
                    const uint2 two = there ? *(const uint2 *)from : make_uint2(0, 0);
                    in[i][n][0] = two.x, in[i][n][COLS / 2 - 1] = two.y;
                } else {
                    in[i][n][0] = there ? *(const uint32_t *)from : 0;
                }
            }
        for (int i = 0; i < LOADS; i++) {
            const int at = first + i * threads;
            if (at >= whole) break;
            uint4 out[VECTORS]; // column after column
            for (int word = 0; word < 4 * VECTORS; word++) {
                const int col = word / (N / 2), n = word % (N / 2) * 2;
                ((uint32_t *)out)[word] =
                    __byte_perm(in[i][n][col / 2], in[i][n + 1][col / 2], col % 2 ? 0x7632 : 0x5410);
            }
            uint4 *to = (uint4 *)shared + at * VECTORS;
            const bool swap = VECTORS == 2 && thread & 4; // so that eight lanes write to all banks
            to[swap] = swap ? out[VECTORS - 1] : out[0];
            if (VECTORS == 2) to[!swap] = swap ? out[0] : out[VECTORS - 1];
        }
    }
#pragma unroll 1
    for (int i = whole * COLS * N + thread; i < cols * N; i += threads)
        ((uint16_t *)shared)[i] = i % N < tokens ? source[(int64_t)(i % N) * cols + i / N] : 0;
}

// Bytes of x in shared memory. Padding moves a lane past the columns; after each step it is set back to x_end.
__host__ __device__ constexpr int x_bytes(int64_t cols, int n) {
    return (int)((cols + MACKO_SELL_STEP) * 2 * n + 127) / 128 * 128;
}

__host__ __device__ constexpr int sums_bytes(int n) {
    return MACKO_SELL_MAX_SUMS * 4 * n;
}

struct sell_launch {
    sell_pipeline pipeline; // of a consumer group
    int consumer_groups;    // of a block
    int tokens;             // 1..N
};

#if __CUDA_ARCH__ >= 900

// A lane's results: each a row and a token, added up by 2^log_lanes lanes; lane l of a warp works on result l % together
// of the warp. All is computed before the loop of products.
struct sell_results {
    int count, log_lanes, together, own, row_lane, out_row, num_sums;
    uint32_t own_sums;

    __device__ __forceinline__ sell_results(int results, const int &threads, const int &warp, const int &lane) {
        count = results;
        log_lanes = count && count < threads ? min(31 - __clz(small_quotient(threads, count)), 5) : 0;
        together = WARP >> log_lanes, own = warp * together + (lane & (together - 1));
        row_lane = lane >> (5 - log_lanes);
        out_row = -1;
    }
    template <int N>
    __device__ __forceinline__ void find_sums(const macko_sell_block &b, const uint32_t &sums, const int &stride) {
        own_sums = opaque(sums + 4 * (row_lane * stride * N + own));
        num_sums = (int)opaque((b.chunks - row_lane + (1 << log_lanes) - 1) >> log_lanes);
    }
    template <int N, typename T>
    __device__ __forceinline__ void store(const macko_sell_matrix &m, const macko_sell_block &b, const int &tokens,
                                          const int &warps, const int &stride, const int &lane, const T *const &bias,
                                          T *const &y) {
        const uint32_t sum_bytes = stride * N * 4 << log_lanes; // from one sum of a lane to its next
        uint32_t at = own_sums;
#pragma unroll 1
        for (int result = own; result - (own & (together - 1)) < count;
             result += warps * together, at += warps * together * 4) {
            float sum = sum_of(at, sum_bytes, result < count, num_sums);
            __syncwarp();
#pragma unroll 1
            for (int distance = together; distance < WARP; distance *= 2)
                sum += __shfl_xor_sync(FULL_WARP, sum, distance);
            const int token = result % N;
            if (result < count && token < tokens && lane < together) {
                if (result != own || out_row < 0) out_row = m.perm[b.row + result / N];
                y[token * m.rows + out_row] = from_float<T>(bias ? sum + to_float(bias[out_row]) : sum);
            }
        }
    }
};

// What a consumer group fetches before it waits for x: its block's header, this lane's first base, and zeros after x.
template <int N>
__device__ __forceinline__ void fetch_header(const macko_sell_matrix &m, const int &block, const int &warp,
                                             const int &lane, macko_sell_block &header, uint8_t *const &x_shared,
                                             uint32_t &base) {
    const int consumer_thread = warp * WARP + lane;
    const bool owns = block < m.num_blocks;
    if (consumer_thread < sizeof(macko_sell_block) / 16) { // through shared memory: see sell_producer
        if (owns)
            copy_async<16>(shared_address(&header) + consumer_thread * 16,
                           (const uint4 *)(m.blocks + block) + consumer_thread);
        else
            ((uint4 *)&header)[consumer_thread] = make_uint4(0, 0, 0, 0);
    }
    commit_copies();
    if (owns) base = m.bases[macko_sell_first_base(block, m.warps, warp) + lane];
    if (threadIdx.x < MACKO_SELL_STEP * N / 2) ((uint32_t *)(x_shared + (int)m.cols * 2 * N))[threadIdx.x] = 0;
}

#endif

/*
 * A thread block has one or two consumer groups that share x. Each owns the rows of one block of the layout and does what a
 * thread block of spmv does, with a pipeline and partial sums of its own.
 *
 *     warps           | m.warps of group 0 | m.warps of group 1 | producer of group 0 | producer of group 1 |
 *     shared memory   | stages of group 0 | stages of group 1 | x [column][N], zeros | sums of group 0 | sums of group 1 |
 *     a lane's task   N sums a chunk of a row  ->  sums [chunk][rows | 1][N]
 *     a result        row r, token n: 2^log_lanes lanes add up sums [..][r][n] in a fixed order
 */
template <typename T, int GAP_BITS, int N>
__global__ void __launch_bounds__(MAX_THREADS, 1)
    spmm(const sell_launch launch, const macko_sell_matrix m, const T *x, const T *bias, T *y) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ __align__(8) uint64_t barriers[MAX_CONSUMER_GROUPS * 2 * MACKO_SELL_MAX_STAGES];
    __shared__ __align__(16) macko_sell_block headers[MAX_CONSUMER_GROUPS];
    constexpr int SLOT = MACKO_SELL_LANES * (MACKO_SELL_STEP * 2 + GAP_BITS * 2);
    const int warps = m.warps, stage_bytes = warps * SLOT, cols = (int)m.cols,
              consumer_warps = launch.consumer_groups * warps;
    const int block_warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool produces = block_warp >= consumer_warps;
    const int consumer_group = produces ? block_warp - consumer_warps : block_warp >= warps,
              warp = block_warp - consumer_group * warps;
    const int block = blockIdx.x * launch.consumer_groups + consumer_group,
              pipeline_bytes = launch.pipeline.stages * stage_bytes;
    const uint32_t stages_at = shared_address(shared) + consumer_group * pipeline_bytes;
    const uint32_t full = shared_address(barriers + consumer_group * 2 * MACKO_SELL_MAX_STAGES),
                   empty = full + 8 * MACKO_SELL_MAX_STAGES;
    const int threads = warps * WARP;
    const sell_no_late_x late_x;
    const sell_producer<SLOT, sell_no_late_x> producer = {m, launch.pipeline, block, stages_at, full, empty, late_x};
    uint8_t *x_shared = shared + launch.consumer_groups * pipeline_bytes;
    uint32_t base = 0;
    if (produces) {
        if (lane == 0) producer.begin();
        __syncwarp();
    } else {
        fetch_header<N>(m, block, warp, lane, headers[consumer_group], x_shared, base);
        pdl_wait(); // from here on, x may be read
        interleave<T, N>(x, launch.tokens, cols, x_shared, threadIdx.x, consumer_warps * WARP);
        wait_copies<0>();
    }
    __syncthreads(); // x, the headers and the barriers are ready
    const macko_sell_block b = load_block(&headers[consumer_group]);
    if (produces) {
        producer.run(b, lane);
        return;
    }

    sell_results results(b.rows * N, threads, warp, lane);

    // Partial sums lie chunk by chunk, rows | 1 of them a chunk, N tokens each.
    const int groups = macko_sell_groups(&b), long_groups = macko_sell_long_groups(&b);
    const int rows = max(b.rows, 1), stride = b.rows | 1;
    const uint32_t x_at = opaque(shared_address(x_shared)), x_end = opaque(x_at + 2 * N * cols);
    const uint32_t sums = opaque(x_at + x_bytes(cols, N) + consumer_group * sums_bytes(N));
    static_assert(MACKO_SELL_MAX_SUMS + WARP < 1 << 12, "small_quotient");
    const auto sum_address = [&](int group) { // of this lane's sums of a group, 0 where it has none
        const int task = group * WARP + lane, chunk = small_quotient(task, rows), row = task - chunk * rows;
        return chunk < b.chunks ? opaque(sums + (chunk * stride + row) * (4 * N)) : 0;
    };
    results.find_sums<N>(b, sums, stride);
    const sell_lane_slot slot = lane_slot<GAP_BITS>(stages_at + warp * SLOT, lane);
    sell_position at(pipeline_bytes, full, b.stages);
#pragma unroll 1
    for (int group = warp; group < groups; group += warps) {
        uint32_t address = x_at + 2 * N * base;
        const uint32_t sum_at = sum_address(group);
        if (group + warps < groups) base = m.bases[macko_sell_later_base(&b, m.num_blocks, warps, group) + lane];
        if (group == warp && results.own < results.count)
            results.out_row = m.perm[b.row + results.own / N]; // not before the loop: see spmv
        float sum[N] = {};
        int steps = b.steps - (group >= long_groups);
        at.stages_left -= steps;
#pragma unroll 1
        do {
            barrier_wait(at.barrier, at.phase);
            const sell_step step = load_step<GAP_BITS>(slot, at.offset);
            __syncwarp();
            multiply_step<T, GAP_BITS>(step, address, sum);
            release_stage(at.barrier + 8 * MACKO_SELL_MAX_STAGES, lane);
            address = min(address, x_end);
            at.advance(stage_bytes);
        } while (--steps);
        if (sum_at)
            for (int n = 0; n < N; n += 2)
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(sum_at + 4 * n), "f"(sum[n]), "f"(sum[n + 1])
                             : "memory");
    }
    at.release_rest(stage_bytes, lane);
    named_barrier_sync(CONSUMERS + consumer_group, threads);

    results.store<N>(m, b, launch.tokens, warps, stride, lane, bias, y);
#endif
}

// Shared memory and consumer groups for N tokens. pipeline.stages is 0 where x and the partial sums leave too little for stages.
sell_launch shape_of(const macko_sell_matrix &m, int n, const macko_sell_device &device, int *shared_bytes) {
    const int stage = m.warps * macko_sell_slot_bytes(m.gap_bits),
              available = device.shared_per_block - MACKO_SELL_BARRIER_BYTES;
    for (int consumer_groups = m.warps <= 8 && m.num_blocks > device.num_sms ? MAX_CONSUMER_GROUPS : 1; consumer_groups;
         consumer_groups--) {
        const int fixed = x_bytes(m.cols, n) + consumer_groups * sums_bytes(n);
        const int fit = (available - fixed) / (consumer_groups * stage),
                  wanted = (80 * 1024 / consumer_groups + stage / 2) / stage;
        const int stages = std::min({fit, std::max(wanted, int(MACKO_SELL_MIN_STAGES)), int(MACKO_SELL_MAX_STAGES)});
        *shared_bytes = fixed + consumer_groups * stages * stage;
        if (stages >= MIN_STAGES) return {{stages, 0, 0, 0}, consumer_groups, 0};
    }
    return {};
}

template <typename T, int GAP_BITS, int N>
cudaError_t launch_spmm(const macko_sell_matrix &m, sell_launch launch, int shared_bytes, const T *x, const T *bias,
                        T *y, cudaStream_t stream) {
    device_info device;
    cudaError_t error = current_device(&device);
    if (!error) error = allow_all_shared_memory<spmm<T, GAP_BITS, N>>(device);
    if (error) return error;
    const int threads = launch.consumer_groups * (m.warps + 1) * WARP;
    const bool pdl = may_use_pdl(stream, threads);
    // The fewer stages are asked for before x, the sooner it arrives: 2 where decoding takes longer than the weights need from
    // memory, or where blocks have few stages; else 3. H200, with PDL, 2 / 3 / all: 7.48 / 8.03 / 8.35 us for 4 tokens
    // (4096 x 4096, density 0.3), 5.68 / 6.06 / 6.31 for 2, 21.2 / 20.7 / 21.0 for 2 (8192 x 8192, density 0.5).
    const bool few = pdl && m.slots <= (int64_t)10 * m.num_blocks * m.warps;
    launch.pipeline = pipeline_of(m, launch.pipeline.stages, N > 2 || few ? 2 : 3);
    return launch_kernel(spmm<T, GAP_BITS, N>,
                         {ceil_div(m.num_blocks, launch.consumer_groups), threads, shared_bytes, pdl}, stream, launch,
                         m, x, bias, y);
}

template <typename T>
cudaError_t launch_width(const macko_sell_matrix &m, const sell_launch &launch, int n, int shared_bytes, const void *x,
                         const void *bias, void *y, cudaStream_t stream) {
    return for_constant<2, 3, 4, 5, 6>(m.gap_bits, [&](auto bits) {
        return for_constant<8, 4, 2>(n, [&](auto width) {
            return launch_spmm<T, bits, width>(m, launch, shared_bytes, (const T *)x, (const T *)bias, (T *)y, stream);
        });
    });
}

} // namespace

cudaError_t macko_sell_spmm_cuda(const macko_sell_matrix *s, int64_t tokens, const void *x, const void *bias, void *y,
                                 cudaStream_t stream) {
    if (!s->rows) return cudaSuccess;
    macko_sell_device device;
    device_info facts;
    cudaError_t error = macko_sell_device_cuda(&device);
    if (!error) error = current_device(&facts);
    if (error) return error;
    const bool bulk = macko_has_bulk_copies(facts.major);
    for (int64_t token = 0; token < tokens && !error;) {
        const char *x_here = (const char *)x + token * s->cols * 2;
        char *y_here = (char *)y + token * s->rows * 2;
        const int64_t left = tokens - token;
        int n = !bulk || left == 1 ? 1 : left == 2 ? 2 : left <= 4 ? 4 : 8, shared_bytes = 0;
        sell_launch launch = {};
        for (; n > 1; n /= 2) { // the most tokens that fit
            launch = shape_of(*s, n, device, &shared_bytes);
            if (launch.pipeline.stages) break;
        }
        launch.tokens = (int)std::min<int64_t>(n, left);
        if (n == 1)
            error = macko_sell_spmv_cuda(s, x_here, nullptr, bias, y_here, stream);
        else if (s->dtype == MACKO_F16)
            error = launch_width<__half>(*s, launch, n, shared_bytes, x_here, bias, y_here, stream);
        else
            error = launch_width<__nv_bfloat16>(*s, launch, n, shared_bytes, x_here, bias, y_here, stream);
        token += launch.tokens;
    }
    return error;
}
