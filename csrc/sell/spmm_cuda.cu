// y = x W^T + bias on CUDA for a few tokens, from the sell layout: the stream of spmv, with N tokens of x beside each other.
#include "stream.cuh"

using namespace macko;

namespace {

constexpr int MAX_TEAMS = 2;
constexpr int MIN_STAGES = 3; // with 2 the ring runs dry
constexpr int MAX_THREADS = (2 * (8 + 1) > SELL_MAX_WARPS + 1 ? 2 * (8 + 1) : SELL_MAX_WARPS + 1) * WARP;

// N 16-bit values, the tokens of one column, from shared memory as words.
template <int N>
struct Tokens {
    uint32_t words[N / 2];
};
__device__ __forceinline__ Tokens<2> load_tokens(uint32_t at, Tokens<2>) {
    return {{load_shared_4(at)}};
}
__device__ __forceinline__ Tokens<4> load_tokens(uint32_t at, Tokens<4>) {
    Tokens<4> x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.words[0]), "=r"(x.words[1]) : "r"(at));
    return x;
}
__device__ __forceinline__ Tokens<8> load_tokens(uint32_t at, Tokens<8>) {
    const uint4 x = load_shared_16(at);
    return {{x.x, x.y, x.z, x.w}};
}

// Eight entries times N tokens; see multiply_8 of spmv, from which it differs in the size of an x.
template <typename T, int GAP_BITS, int N>
__device__ __forceinline__ void multiply_8(uint4 values, uint32_t even, uint32_t odd, uint32_t &address,
                                           float (&sum)[N]) {
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
    const uint32_t pairs = even + odd;
    // 6-bit gaps: sums of four entries fit a byte, those of eight do not, so the upper pairs start anew behind entry 3.
    const uint32_t to_odd =
        GAP_BITS < 6 ? pairs * 0x01010101u + 0x07050301u : pairs + (pairs << 8 & 0xff00ff00u) + 0x03010301u;
    const uint32_t to_even = to_odd - odd - 0x01010101u;
    for (int pair = 0; pair < 4; pair++) {
        const uint32_t pick = 2u * N << (8 * pair);
        const uint32_t last = __dp4a(to_odd, pick, address);
        const Tokens<N> x[2] = {load_tokens(__dp4a(to_even, pick, address), Tokens<N>()),
                                load_tokens(last, Tokens<N>())};
        const float2 w = to_float2<T>(words[pair]);
        for (int entry = 0; entry < 2; entry++)
            for (int word = 0; word < N / 2; word++) {
                const float2 two = to_float2<T>(x[entry].words[word]);
                sum[2 * word] = fmaf(entry ? w.y : w.x, two.x, sum[2 * word]);
                sum[2 * word + 1] = fmaf(entry ? w.y : w.x, two.y, sum[2 * word + 1]);
            }
        if (pair == 3 || (GAP_BITS == 6 && pair == 1)) address = last + 2 * N;
    }
}

// A lane's share of the slot at `offset` in the ring.
template <typename T, int GAP_BITS, int N>
__device__ __forceinline__ void multiply_step(LaneSlot at, uint32_t offset, uint32_t &address, float (&sum)[N]) {
    uint32_t planes[4] = {};
    for (int plane = 0; plane < GAP_BITS / 2; plane++)
        planes[plane] = load_shared_4(at.planes + offset + plane * SELL_LANES * 4);
    if (GAP_BITS % 2) {
        const uint32_t nibbles = load_shared_2(at.nibbles + offset);
        planes[GAP_BITS / 2] = nibbles | nibbles << 12; // nibbles 0, 2, 1, 3 are the low halves of bytes 0 to 3
    }
    uint4 values[2];
    for (int half = 0; half < 2; half++) values[half] = load_shared_16(at.values + offset + half * SELL_LANES * 16);
    for (int half = 0; half < 2; half++)
        multiply_8<T, GAP_BITS>(values[half], gap_field<GAP_BITS>(planes, 2 * half),
                                gap_field<GAP_BITS>(planes, 2 * half + 1), address, sum);
}

// x [tokens, cols] into shared memory as [cols][N], zeros for the tokens that are missing and behind the last column.
template <typename T, int N>
__device__ __forceinline__ void interleave(const T *x, int tokens, int cols, uint8_t *shared, int thread, int threads) {
    const uint16_t *source = (const uint16_t *)x;
    const int pairs = cols % 2 == 0 && (uintptr_t)x % 4 == 0 ? cols / 2 : 0;
#pragma unroll(16 / N)
    for (int pair = thread; pair < pairs; pair += threads) {
        uint32_t in[N], out[N]; // out: the tokens of the even column, then those of the odd one
        for (int n = 0; n < N; n++) in[n] = n < tokens ? *(const uint32_t *)(source + (int64_t)n * cols + 2 * pair) : 0;
        for (int n = 0; n < N; n += 2) {
            out[n / 2] = __byte_perm(in[n], in[n + 1], 0x5410);
            out[N / 2 + n / 2] = __byte_perm(in[n], in[n + 1], 0x7632);
        }
        uint8_t *to = shared + pair * (4 * N);
        if (N == 2) *(uint2 *)to = make_uint2(out[0], out[1]);
        for (int n = 0; n + 4 <= N; n += 4)
            ((uint4 *)to)[n / 4] = make_uint4(out[n], out[n + 1], out[n + 2], out[n + 3]);
    }
    for (int i = pairs * 2 * N + thread; i < cols * N; i += threads)
        ((uint16_t *)shared)[i] = i % N < tokens ? source[(int64_t)(i % N) * cols + i / N] : 0;
    for (int i = thread; i < SELL_STEP * N; i += threads) ((uint16_t *)shared)[cols * N + i] = 0;
}

// Bytes of x in shared memory. Padding points behind the columns, but is brought back after each step.
__host__ __device__ constexpr int x_bytes(int64_t cols, int n) {
    return (int)((cols + SELL_STEP) * 2 * n + 127) / 128 * 128;
}

__host__ __device__ constexpr int sums_bytes(int n) {
    return SELL_MAX_SUMS * 4 * n;
}

struct Launch {
    int tokens; // 1..N
    int teams;
    int stages; // of a team's ring
};

/*
 * A block has one or two teams that share x. A team owns the rows of a block of the layout, has a ring and a table of
 * partial sums, and does what a block of spmv does: m.warps warps decode, one more keeps the ring full.
 */
template <typename T, int GAP_BITS, int N>
__global__ void __launch_bounds__(MAX_THREADS, 1)
    spmm(const sell_matrix m, const T *x, const T *bias, T *y, const Launch launch) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ __align__(8) uint64_t barriers[MAX_TEAMS * 2 * SELL_MAX_STAGES];
    __shared__ __align__(16) sell_block headers[MAX_TEAMS];
    constexpr int SLOT = SELL_LANES * (SELL_STEP * 2 + GAP_BITS * 2);
    const int warps = m.warps, stage_bytes = warps * SLOT, cols = (int)m.cols, consumers = launch.teams * warps;
    const int block_warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool fetches = block_warp >= consumers;
    const int team = fetches ? block_warp - consumers : block_warp / warps, warp = block_warp - team * warps;
    const int block = blockIdx.x * launch.teams + team;
    const uint32_t x_at = shared_address(shared);
    float *sums = (float *)(shared + x_bytes(cols, N) + team * sums_bytes(N));
    const uint32_t ring = x_at + x_bytes(cols, N) + launch.teams * sums_bytes(N) + team * launch.stages * stage_bytes;
    const uint32_t filled = shared_address(barriers + team * 2 * SELL_MAX_STAGES),
                   emptied = filled + 8 * SELL_MAX_STAGES;

    if (fetches) {
        const Ring whole = {launch.stages, launch.stages, launch.stages};
        fill_ring<SLOT>(m, block, whole, ring, filled, emptied, headers[team], lane);
        return;
    }
    sell_block b = {}; // of a team without a block
    if (block < m.num_blocks) b = load_block(m.blocks + block);
    if (warp == 0 && lane == 0) headers[team] = b;
    sm90::wait_for_previous_launch(); // from here on, what the previous kernel wrote may be read
    interleave<T, N>(x, launch.tokens, cols, shared, threadIdx.x, consumers * WARP);
    const int groups = sell_groups(&b), long_groups = sell_long_groups(&b), threads = warps * WARP;
    uint32_t base = warp < groups ? m.bases[sell_first_base(block, warps, warp) + lane] : 0;

    // Results are rows * N; 2^log_lanes lanes will add up one, next to it in the warp the lanes of the next results.
    const int results = b.rows * N, team_thread = warp * WARP + lane;
    const int log_lanes = results && results < threads ? min(31 - __clz(small_quotient(threads, results)), 5) : 0;
    const int together = WARP >> log_lanes, own = warp * together + (lane & (together - 1));
    int out = own < results ? m.perm[b.row + own / N] : 0;

    // Partial sums lie chunk by chunk, rows | 1 of them a chunk, N tokens each.
    const int rows = max(b.rows, 1), stride = b.rows | 1;
    const int group_chunks = rows <= threads ? small_quotient(threads, rows) : 0;
    const int group_rows = threads - group_chunks * rows; // from a group of this warp to the next
    int chunk = rows <= threads ? small_quotient(team_thread, rows) : 0, row = team_thread - chunk * rows;
    const LaneSlot slot = lane_slot<GAP_BITS>(ring + warp * SLOT, lane);
    const uint32_t ring_bytes = held(launch.stages * stage_bytes), first_barrier = held(filled);
    const uint32_t x_end = held(x_at + 2 * N * cols);
    uint32_t offset = 0, barrier = first_barrier, parity = 0;
    auto advance = [&] {
        offset += stage_bytes;
        barrier += 8;
        if (offset == ring_bytes) offset = 0, barrier = first_barrier, parity ^= 1;
    };
    __syncthreads();
    int stages_left = b.stages;
#pragma unroll 1
    for (int group = warp; group < groups; group += warps) {
        uint32_t address = x_at + 2 * N * base;
        if (group + warps < groups) base = m.bases[sell_later_base(&b, m.num_blocks, warps, group) + lane];
        float sum[N] = {};
        int steps = b.steps - (group >= long_groups);
        stages_left -= steps;
#pragma unroll 1
        do {
            barrier_wait(barrier, parity);
            multiply_step<T, GAP_BITS>(slot, offset, address, sum);
            address = min(address, x_end);
            __syncwarp();
            give_back(barrier + 8 * SELL_MAX_STAGES, lane);
            advance();
        } while (--steps);
        if (chunk < b.chunks)
            for (int n = 0; n < N; n += 2)
                ((float2 *)sums)[((chunk * stride + row) * N + n) / 2] = make_float2(sum[n], sum[n + 1]);
        chunk += group_chunks;
        row += group_rows;
        if (row >= rows) row -= rows, chunk++;
    }
#pragma unroll 1
    for (; stages_left > 0; stages_left--) { // the ring waits for all warps, so those with less to do go along
        barrier_wait(barrier, parity);
        give_back(barrier + 8 * SELL_MAX_STAGES, lane);
        advance();
    }
    sync_threads(1 + team, threads);

#pragma unroll 1
    for (int result = own; result - (own & (together - 1)) < results; result += warps * together) {
        float sum = 0;
        if (result < results)
            for (int c = lane / together; c < b.chunks; c += 1 << log_lanes) sum += sums[c * stride * N + result];
        for (int distance = together; distance < WARP; distance *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
        const int token = result % N;
        if (result < results && token < launch.tokens && lane < together) {
            if (result != own) out = m.perm[b.row + result / N];
            y[token * m.rows + out] = from_float<T>(bias ? sum + to_float(bias[out]) : sum);
        }
    }
#endif
}

// Shared memory and teams for N tokens. stages is 0 where x and the partial sums leave no room for a ring.
Launch shape_of(const sell_matrix &m, int n, const sell_device &device, int *shared_bytes) {
    const int stage = m.warps * sell_slot_bytes(m.gap_bits), room = device.shared_per_block - SELL_BARRIER_BYTES;
    for (int teams = m.warps <= 8 && m.num_blocks > device.num_sms ? MAX_TEAMS : 1; teams; teams--) {
        const int fixed = x_bytes(m.cols, n) + teams * sums_bytes(n);
        const int fit = (room - fixed) / (teams * stage), wanted = (80 * 1024 / teams + stage / 2) / stage;
        const int stages = std::min({fit, std::max(wanted, int(SELL_MIN_STAGES)), int(SELL_MAX_STAGES)});
        *shared_bytes = fixed + teams * stages * stage;
        if (stages >= MIN_STAGES) return {0, teams, stages};
    }
    return {0, 1, 0};
}

template <typename T, int GAP_BITS, int N>
cudaError_t launch_spmm(const sell_matrix &m, const Launch &launch, int shared_bytes, const T *x, const T *bias, T *y,
                        cudaStream_t stream) {
    Device device;
    cudaError_t error = current_device(&device);
    if (!error) error = allow_all_shared_memory<spmm<T, GAP_BITS, N>>(device);
    if (error) return error;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)ceil_div(m.num_blocks, launch.teams));
    config.blockDim = dim3(launch.teams * (m.warps + 1) * WARP);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = may_overlap(stream, config.blockDim.x) ? 1 : 0;
    return cudaLaunchKernelEx(&config, spmm<T, GAP_BITS, N>, m, x, bias, y, launch);
}

template <typename T, int GAP_BITS>
cudaError_t launch_tokens(const sell_matrix &m, const Launch &launch, int n, int shared_bytes, const void *x,
                          const void *bias, void *y, cudaStream_t stream) {
    const auto run = n == 8   ? launch_spmm<T, GAP_BITS, 8>
                     : n == 4 ? launch_spmm<T, GAP_BITS, 4>
                              : launch_spmm<T, GAP_BITS, 2>;
    return run(m, launch, shared_bytes, (const T *)x, (const T *)bias, (T *)y, stream);
}

template <typename T>
cudaError_t launch_width(const sell_matrix &m, const Launch &launch, int n, int shared_bytes, const void *x,
                         const void *bias, void *y, cudaStream_t stream) {
    switch (m.gap_bits) {
    case 2: return launch_tokens<T, 2>(m, launch, n, shared_bytes, x, bias, y, stream);
    case 3: return launch_tokens<T, 3>(m, launch, n, shared_bytes, x, bias, y, stream);
    case 4: return launch_tokens<T, 4>(m, launch, n, shared_bytes, x, bias, y, stream);
    case 5: return launch_tokens<T, 5>(m, launch, n, shared_bytes, x, bias, y, stream);
    case 6: return launch_tokens<T, 6>(m, launch, n, shared_bytes, x, bias, y, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace

cudaError_t sell_spmm_cuda(const sell_matrix *s, int64_t tokens, const void *x, const void *bias, void *y,
                           cudaStream_t stream) {
    if (!s->rows) return cudaSuccess;
    sell_device device;
    Device facts;
    cudaError_t error = sell_device_cuda(&device);
    if (!error) error = current_device(&facts);
    if (error) return error;
    const bool bulk = facts.major >= 9 && !is("MACKO_COPY", "cp_async");
    for (int64_t token = 0; token < tokens && !error;) {
        const char *x_here = (const char *)x + token * s->cols * 2;
        char *y_here = (char *)y + token * s->rows * 2;
        const int64_t left = tokens - token;
        int n = !bulk || left == 1 ? 1 : left == 2 ? 2 : left <= 4 ? 4 : 8, shared_bytes = 0;
        Launch launch = {};
        for (; n > 1; n /= 2) { // the most tokens that fit
            launch = shape_of(*s, n, device, &shared_bytes);
            if (launch.stages) break;
        }
        launch.tokens = (int)std::min<int64_t>(n, left);
        if (n == 1)
            error = sell_spmv_cuda(s, x_here, bias, y_here, stream);
        else if (s->dtype == MACKO_F16)
            error = launch_width<__half>(*s, launch, n, shared_bytes, x_here, bias, y_here, stream);
        else
            error = launch_width<__nv_bfloat16>(*s, launch, n, shared_bytes, x_here, bias, y_here, stream);
        token += launch.tokens;
    }
    return error;
}
