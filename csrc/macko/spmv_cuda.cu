// y = W x on CUDA, from the canonical format, in one launch.
#include "macko.cuh"

using namespace macko;

namespace {

// One block an SM: x is staged once. 64 registers a thread are just enough for one step in flight (H200: 25.4 us at
// 8192x8192; two steps in flight 27.8, 768 threads 27.3, 512 threads twice 25.4).
constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP;
constexpr int LANE_CHUNKS = 2; // a step: what a warp decodes together, 512 entries
constexpr int STEP_CHUNKS = LANE_CHUNKS * WARP;

// Positions: column + MARGIN, so that the entries of the row before, which share a row's first chunk, have one too.
constexpr uint32_t MARGIN = MACKO_CHUNK;

// Zeros after x: what a chunk that begins at the end can reach.
__host__ __device__ constexpr uint32_t reach(int bits) {
    return MACKO_CHUNK << bits;
}

// Where x is gathered from. Shared memory unless it is too large for it.
enum class x_memory { SHARED, GLOBAL };

// Whether a step lies inside the row, or its first or last chunk holds entries of other rows.
enum class step_kind { WHOLE, EDGE };

// start > stop stands for a row that row_ptr does not describe.
struct row_entries {
    uint32_t index, start, stop;
};

template <int BITS>
struct row_step {
    uint4 values[LANE_CHUNKS];
    delta_word<BITS> deltas[LANE_CHUNKS];
};

// The lane's chunks of a step, zeros where the row has ended.
template <int BITS>
__device__ __forceinline__ row_step<BITS> load_step(const macko_matrix &m, uint32_t first_chunk, uint32_t stop) {
    row_step<BITS> step;
#pragma unroll
    for (int i = 0; i < LANE_CHUNKS; i++) {
        const uint32_t chunk = first_chunk + i * WARP + threadIdx.x % WARP;
        step.values[i] = make_uint4(0, 0, 0, 0);
        step.deltas[i] = 0;
        if (chunk * MACKO_CHUNK < stop) {
            step.values[i] = load_stream((const uint4 *)m.values + chunk);
            step.deltas[i] = load_stream((const delta_word<BITS> *)m.deltas + chunk);
        }
    }
    return step;
}

// The lane's share of a row so far.
struct lane_sum {
    float even = 0, odd = 0;
    uint32_t highest = 0; // position: past the limit in a corrupted row
};

// Adds a step. `position` is the first one that the entries before the step have not passed, and moves on past its last
// entry. `kind` is a constant once this is inlined.
template <typename T, int BITS, x_memory X_MEMORY>
__device__ __forceinline__ void add_step(step_kind kind, row_step<BITS> step, const row_entries &row,
                                         uint32_t first_chunk, uint32_t limit, const T *x_global, uint32_t &position,
                                         lane_sum &sum) {
    extern __shared__ uint4 x_shared[];
    const int lane = threadIdx.x % WARP;
    uint32_t kept[LANE_CHUNKS] = {0, 0};  // bits: the chunk's entries that are the row's
    uint32_t after[LANE_CHUNKS] = {0, 0}; // how many of the chunk lie after the row
    if (kind == step_kind::EDGE) {
#pragma unroll
        for (int i = 0; i < LANE_CHUNKS; i++) {
            const uint32_t entry = (first_chunk + i * WARP + lane) * MACKO_CHUNK;
            const int begin = min(max(int(row.start - entry), 0), MACKO_CHUNK);
            const int end = min(max(int(row.stop - entry), 0), MACKO_CHUNK);
            step.deltas[i] = keep_deltas<BITS>(step.deltas[i], begin, end);
            kept[i] = (1u << end) - (1u << min(begin, end));
            after[i] = MACKO_CHUNK - end;
        }
    }
    const chunk_offsets<BITS> offsets[LANE_CHUNKS] = {chunk_offsets<BITS>(step.deltas[0]),
                                                      chunk_offsets<BITS>(step.deltas[1])};
    // Both chunks' sums in one scan: 32 of them are at most 32 * 8 * 255 < 2^16.
    const uint32_t own = offsets[0].sum() | offsets[1].sum() << 16;
    const uint32_t through = warp_inclusive_sum(own), total = __shfl_sync(FULL_WARP, through, WARP - 1);
    const uint32_t before = through - own;
    const uint32_t positions[LANE_CHUNKS] = {position + lane * MACKO_CHUNK + (before & 0xffff),
                                             position + (WARP + lane) * MACKO_CHUNK + (total & 0xffff) +
                                                 (before >> 16)};
    position += STEP_CHUNKS * MACKO_CHUNK + (total & 0xffff) + (total >> 16);

#pragma unroll
    for (int i = 0; i < LANE_CHUNKS; i++) {
        if (kind == step_kind::EDGE && (first_chunk + i * WARP) * MACKO_CHUNK >= row.stop) break;
        if (kind == step_kind::WHOLE || kept[i])
            sum.highest = max(sum.highest, offsets[i].at(MACKO_CHUNK - 1, positions[i], 1) - after[i]);
        // The only check of bounds that the gathers need: `reach` zeros lie after x.
        const uint32_t base = min(positions[i], limit);
        const uint32_t words[4] = {step.values[i].x, step.values[i].y, step.values[i].z, step.values[i].w};
#pragma unroll
        for (int k = 0; k < MACKO_CHUNK; k++) {
            float x;
            if (X_MEMORY == x_memory::SHARED)
                x = to_float(*(const T *)((const char *)x_shared + offsets[i].at(k, base * sizeof(T), sizeof(T))));
            else
                x = to_float(x_global[min(offsets[i].at(k, base, 1) - MARGIN, limit - MARGIN - 1)]);
            const float2 pair = to_float2<T>(words[k / 2]);
            float &half = k & 1 ? sum.odd : sum.even;
            if (kind == step_kind::WHOLE || (kept[i] & 1u << k)) half = fmaf(k & 1 ? pair.y : pair.x, x, half);
        }
    }
}

// x with MARGIN zeros before it and `zeros` after it, into shared memory.
template <typename T>
__device__ void stage_x(const T *x, uint32_t cols, uint32_t zeros) {
    extern __shared__ uint4 x_shared[];
    T *staged = (T *)x_shared;
    uint32_t done = 0;
    if ((uintptr_t)x % sizeof(uint4) == 0) {
        done = cols / 8 * 8;
        for (uint32_t i = threadIdx.x; i < cols / 8; i += THREADS) x_shared[1 + i] = ((const uint4 *)x)[i];
    }
    for (uint32_t i = done + threadIdx.x; i < cols; i += THREADS) staged[MARGIN + i] = x[i];
    for (uint32_t i = threadIdx.x; i < MARGIN; i += THREADS) staged[i] = from_float<T>(0);
    for (uint32_t i = threadIdx.x; i < zeros; i += THREADS) staged[MARGIN + cols + i] = from_float<T>(0);
}

// A block holds x and owns every gridDim-th row. Its warps take a row each, and the next when they are done, so that
// long rows hold up no one; which warp takes a row does not change its sum.
//
//     entries of a row        |== step 0, 512 entries ==|== step 1 ==| ... |= last step =|    first and last chunk: EDGE, they
//     a step, 2 loads a lane  | chunk of lane 0 | ... | lane 31 | chunk of lane 0 | ... |    may hold entries of other rows
//     chunk, 8 entries        16 bytes of values, BITS bytes of deltas
//     position of an entry    sum of (delta + 1) before it: over the row, over the lanes (a scan), in the chunk (one multiplication)
//
// The step after the one that is being added is always in flight, across the end of the row too.
template <typename T, int BITS, x_memory X_MEMORY>
__global__ void __launch_bounds__(THREADS, 1) spmv(macko_matrix m, const T *x, const T *bias, T *y) {
    __shared__ uint32_t rows_taken;
    const uint32_t rows = m.rows, limit = uint32_t(m.cols) + MARGIN;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

    const auto fetch_row = [&](uint32_t taken) {
        row_entries row = {blockIdx.x + taken * gridDim.x, 0, 0};
        if (row.index < rows) {
            row.start = m.row_ptr[row.index];
            row.stop = m.row_ptr[row.index + 1];
        }
        return row;
    };
    const auto load_first_step = [&](row_entries &row) {
        // A negative number is a large one here.
        if (row.start > row.stop || row.stop > m.capacity) row = {row.index, MACKO_CHUNK, 0};
        return load_step<BITS>(m, row.start / MACKO_CHUNK, row.stop);
    };

    row_entries row = fetch_row(warp), next_row = fetch_row(WARPS + warp);
    row_step<BITS> next_step = load_first_step(row);
    if (threadIdx.x == 0) rows_taken = 2 * WARPS;
    if (X_MEMORY == x_memory::SHARED) stage_x(x, uint32_t(m.cols), reach(BITS));
    __syncthreads();

    while (row.index < rows) {
        uint32_t chunk = row.start / MACKO_CHUNK, position = MARGIN - row.start % MACKO_CHUNK;
        const T row_bias = bias ? bias[row.index] : from_float<T>(0);
        lane_sum sum;
        do {
            const row_step<BITS> step = next_step;
            const uint32_t this_chunk = chunk;
            chunk += STEP_CHUNKS;
            if (chunk * MACKO_CHUNK < row.stop)
                next_step = load_step<BITS>(m, chunk, row.stop);
            else
                next_step = load_first_step(next_row);
            if (this_chunk * MACKO_CHUNK >= row.start && chunk * MACKO_CHUNK <= row.stop)
                add_step<T, BITS, X_MEMORY>(step_kind::WHOLE, step, row, this_chunk, limit, x, position, sum);
            else
                add_step<T, BITS, X_MEMORY>(step_kind::EDGE, step, row, this_chunk, limit, x, position, sum);
        } while (chunk * MACKO_CHUNK < row.stop);

        const bool good = sum.highest < limit && row.start <= row.stop;
        const float y_row = warp_sum(good ? sum.even + sum.odd : NAN);
        if (lane == 0) y[row.index] = from_float<T>(y_row + to_float(row_bias));
        row = next_row;
        uint32_t taken = 0;
        if (lane == 0) taken = atomicAdd(&rows_taken, 1);
        next_row = fetch_row(__shfl_sync(FULL_WARP, taken, 0));
    }
}

template <typename T, int BITS, x_memory X_MEMORY>
cudaError_t launch(const macko_matrix &m, const device_info &device, size_t shared_bytes, const void *x,
                   const void *bias, void *y, cudaStream_t stream) {
    if (const cudaError_t error = allow_all_shared_memory<spmv<T, BITS, X_MEMORY>>(device)) return error;
    const unsigned blocks = unsigned(std::min<int64_t>(device.num_sms, m.rows));
    spmv<T, BITS, X_MEMORY><<<blocks, THREADS, shared_bytes, stream>>>(m, (const T *)x, (const T *)bias, (T *)y);
    return cudaGetLastError();
}

template <typename T, int BITS>
cudaError_t place_x(const macko_matrix &m, const void *x, const void *bias, void *y, cudaStream_t stream) {
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    const int64_t shared_bytes = (m.cols + MARGIN + reach(BITS)) * int64_t(sizeof(T));
    constexpr int64_t STATIC_BYTES = 64;
    if (shared_bytes + STATIC_BYTES <= device.shared_bytes)
        return launch<T, BITS, x_memory::SHARED>(m, device, shared_bytes, x, bias, y, stream);
    return launch<T, BITS, x_memory::GLOBAL>(m, device, 0, x, bias, y, stream);
}

template <typename T>
cudaError_t run(const macko_matrix &m, const void *x, const void *bias, void *y, cudaStream_t stream) {
    return for_constant<2, 4, 8>(m.delta_bits, [&](auto bits) { return place_x<T, bits>(m, x, bias, y, stream); });
}

} // namespace

cudaError_t macko_spmv_cuda(const macko_matrix *m, const void *x, const void *bias, void *y, cudaStream_t stream) {
    if (!m->rows) return cudaSuccess;
    return m->dtype == MACKO_F16 ? run<__half>(*m, x, bias, y, stream) : run<__nv_bfloat16>(*m, x, bias, y, stream);
}
