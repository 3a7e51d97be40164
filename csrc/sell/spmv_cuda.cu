// y = W x + bias on CUDA, from the sell layout, in one launch, which may normalise x before.
#include "../input/rows.cuh"
#include "stream.cuh"

using namespace macko;

namespace {

constexpr int CP_ASYNC_STAGES = MACKO_SELL_MIN_STAGES; // an immediate of the instruction that waits
constexpr int LONG_X = 8192;                           // columns; halves of a shorter x gained nothing

// How a block's slots come into shared memory.
enum sell_copy {
    BULK,     // sm_90 and up: a producer warp fetches whole stages, cp.async.bulk and mbarriers
    CP_ASYNC, // before: each consumer warp fetches its own slots, 16 bytes a lane; before sm_80 copies wait for memory
};

// What a block multiplies.
enum sell_input {
    AS_IT_IS,
    RMS_NORM, // x by its root mean square, times a weight a column
};

template <typename T>
struct sell_norm {
    const T *weight; // [cols]
    float eps;
};

/*
 * x / sqrt(mean(x^2) + eps) * weight into x_shared, by `threads` threads and every block for itself: a kernel before this one
 * would take longer, for no block of this one could start before it has ended. `partial` holds a float a warp. A
 * thread reads only the weights that it fetched.
 */
template <typename T>
__device__ __forceinline__ void stage_normalised(uint4 *x_shared, const T *x, const sell_norm<T> &norm, int cols,
                                                 int threads, float *partial) {
    // Vectors of 8 columns that a thread holds in registers from one pass to the next: 8192 columns by 8 warps.
    constexpr int KEPT = 4;
    const int vectors = cols / 8;
    row_walk<T, KEPT> row{(const uint4 *)x, vectors, threads};
#pragma unroll
    for (int k = 0; k < KEPT; k++)
        if (threadIdx.x + k * threads < vectors) row.kept[k] = load_vector(row.from + threadIdx.x + k * threads);
#pragma unroll 1
    for (int i = threadIdx.x; i < vectors; i += threads)
        copy_async<16>(shared_address(x_shared + i), (const uint4 *)norm.weight + i);
    const float sum = row.squares();
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = sum;
    named_barrier_sync(CONSUMERS, threads);
    float total = 0;
    for (int w = 0; w < threads / WARP; w++) total += partial[w];
    const float scale = rsqrtf(total / cols + norm.eps);
    commit_copies();
    wait_copies<0>();
    row.for_each([&](int i, uint4 vector, int) { x_shared[i] = normalised<T>(vector, x_shared[i], scale); });
}

// x from pipeline.x_split on comes by a bulk copy, if x is aligned for one. Members are references to the kernel's parameters,
// read as late as possible: those have not arrived yet when the first stage is fetched.
template <typename T>
struct sell_late_x {
    const sell_pipeline &pipeline;
    const T *const &x;
    const int64_t &cols;
    uint32_t x_at, barrier;

    __device__ int bytes() const {
        return pipeline.x_split < NO_SPLIT && (uintptr_t)x % 16 == 0 ? ((int)cols / 8 - pipeline.x_split) * 16 : 0;
    }
    __device__ void fetch() const {
        if (bytes() <= 0) return;
        sm90::barrier_init(barrier, 1);
        sm90::fence_barrier_init();
        sm90::barrier_arrive_expect_tx(barrier, bytes());
        sm90::bulk_copy(x_at + pipeline.x_split * 16, x + pipeline.x_split * 8, bytes(), barrier);
    }
    __device__ void wait() const {
        if (bytes() > 0) barrier_wait(barrier, 0);
    }
    // By consumers: only if a lane may reach it in the first round of stages, see sell_producer.
    template <int GAP_BITS>
    __device__ void wait_unless_near(const macko_sell_block &b, const uint32_t &base, const int &of_cols) const {
        if (bytes() <= 0) return;
        const bool near =
            (int)base >= of_cols || (int)base + pipeline.stages * (MACKO_SELL_STEP << GAP_BITS) <= pipeline.x_split * 8;
        if (b.steps <= pipeline.stages || !__all_sync(FULL_WARP, near)) barrier_wait(barrier, 0);
    }
};

// Eight products; `address` is that of the first x that the lane has not passed. dp4a picks a byte of the distances, scales
// it and adds the address: one instruction an x, beside its load.
template <typename T, int GAP_BITS>
__device__ __forceinline__ void multiply_8(uint4 values, uint32_t even, uint32_t odd, uint32_t &address,
                                           float (&sum)[2]) {
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
    const auto [to_even, to_odd] = distances<GAP_BITS>(even, odd);
    uint16_t x[8]; // all asked for before the first product, which waits
    for (int pair = 0; pair < 4; pair++) {
        const uint32_t pick = 2u << (8 * pair), last = __dp4a(to_odd, pick, address);
        x[2 * pair] = load_shared_2(__dp4a(to_even, pick, address));
        x[2 * pair + 1] = load_shared_2(last);
        if (pair == 3 || (GAP_BITS == 6 && pair == 1)) address = last + 2;
    }
    for (int pair = 0; pair < 4; pair++) {
        const float2 w = to_float2<T>(words[pair]);
        sum[0] = fmaf(w.x, widen<T>(x[2 * pair]), sum[0]);
        sum[1] = fmaf(w.y, widen<T>(x[2 * pair + 1]), sum[1]);
    }
}

template <typename T, int GAP_BITS>
__device__ __forceinline__ void multiply_step(const sell_step &step, uint32_t &address, float (&sum)[2]) {
    for (int half = 0; half < 2; half++)
        multiply_8<T, GAP_BITS>(step.values[half], gap_field<GAP_BITS>(step.planes, 2 * half),
                                gap_field<GAP_BITS>(step.planes, 2 * half + 1), address, sum);
}

// What the consumers fetch before all warps meet: the block's header, x, and zeros after it. This lane's first base.
template <typename T, sell_input INPUT>
__device__ __forceinline__ void stage_input(const sell_pipeline &pipeline, const macko_sell_matrix &m,
                                            const T *const &x, const sell_norm<T> &norm, const int &cols,
                                            const int &threads, uint8_t *const &x_shared, const uint32_t &x_at,
                                            macko_sell_block &header, uint32_t &base) {
    const int warps = m.warps, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // The header, through shared memory: see sell_producer.
    if (threadIdx.x < sizeof header / 16)
        copy_async<16>(shared_address(&header) + threadIdx.x * 16,
                       (const uint4 *)(m.blocks + blockIdx.x) + threadIdx.x);
    base = m.bases[macko_sell_first_base(blockIdx.x, warps, warp) + lane];

    // x, and zeros after it. Not by a bulk copy: that would queue after those of the stages (0.2 us at 4096 x 4096).
    // Before pdl_wait only weights are asked for: their latency has passed when x arrives.
    const int whole = (uintptr_t)x % 16 == 0 ? cols / 8 : 0, zeros_at = (cols + 7) / 8;
    const int split = min(whole, pipeline.x_split);
    if (cols + threadIdx.x < zeros_at * 8) ((uint16_t *)x_shared)[cols + threadIdx.x] = 0;
#pragma unroll 1
    for (int i = zeros_at + threadIdx.x; i < macko_sell_x_bytes(cols) / 16; i += threads)
        ((uint4 *)x_shared)[i] = make_uint4(0, 0, 0, 0);
#if __CUDA_ARCH__ >= 900
    if (INPUT == RMS_NORM && blockIdx.x == 0 && threadIdx.x == 0) sm90::bulk_prefetch_l2(norm.weight, cols * 2);
    pdl_wait();
#endif
    if constexpr (INPUT == RMS_NORM) {
        stage_normalised((uint4 *)x_shared, x, norm, cols, threads, (float *)(x_shared + macko_sell_x_bytes(cols)));
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < split; i += threads) copy_async<16>(x_at + i * 16, x + i * 8);
        commit_copies();
#pragma unroll 1
        for (int i = whole * 8 + threadIdx.x; i < cols; i += threads) ((T *)x_shared)[i] = x[i];
    }
#if __CUDA_ARCH__ >= 800
    // Not wait_copies<0>: ptxas orders what follows otherwise then, and that is not what was timed.
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}

// CP_ASYNC: a consumer warp's slots, CP_ASYNC_STAGES of them under way.
struct sell_own_slots {
    const uint8_t *next;  // stage of the tail
    int of_lane, of_warp; // steps: of warp `lane`, and of this one
    int fetched = 0;

    template <int SLOT>
    __device__ __forceinline__ void fetch(const macko_sell_matrix &m, const int &warps, const int &warp,
                                          const int &lane, const uint32_t &to) {
        const int slots = stage_slots(of_lane, fetched);
        const bool in_tail = fetched >= m.head;
        if (fetched < of_warp) {
            const int64_t head_slot = macko_sell_head_slot(blockIdx.x, m.num_blocks, warps, fetched);
            const uint8_t *from = (in_tail ? next : m.data + head_slot * SLOT) + warp * SLOT;
            for (int byte = lane * 16; byte < SLOT; byte += WARP * 16) copy_async<16>(to + byte, from + byte);
        }
        commit_copies(); // an empty one too, to keep count
        if (in_tail) next += slots * SLOT;
        fetched++;
    }
};

// What a thread has of the results: 2^log_lanes lanes add up a row, as few as leave each of them at most SUMS_AT_ONCE
// partial sums. All is computed before the loop of products: nothing would hide it after them.
struct sell_results {
    int log_lanes, first_row, row_lane, out_row, num_sums;
    uint32_t own_sums; // the first of a lane's

    __device__ __forceinline__ sell_results(const macko_sell_block &b, const int &rows, const int &threads) {
        const int group_chunks = small_quotient(threads, rows);
        const int enough = min(32 - __clz(max(b.chunks - 1, 0) / SUMS_AT_ONCE), 5);
        log_lanes = group_chunks ? min(31 - __clz(group_chunks), enough) : 0;
        first_row = threadIdx.x >> log_lanes, row_lane = threadIdx.x & ((1 << log_lanes) - 1);
        out_row = -1;
    }
    __device__ __forceinline__ void find_sums(const macko_sell_block &b, float *sums, const int &stride) {
        own_sums = opaque(shared_address(sums + row_lane * stride + first_row));
        num_sums = (int)opaque((b.chunks - row_lane + (1 << log_lanes) - 1) >> log_lanes);
    }
    // The other block of the SM still decodes, and each load or shuffle queues after its gathers: so loads go out several
    // at once, and shuffles are few.
    template <typename T>
    __device__ __forceinline__ void store(const macko_sell_matrix &m, const macko_sell_block &b, const int &threads,
                                          const int &stride, const T *const &bias, T *const &y) {
        const uint32_t sum_bytes = 4 * stride << log_lanes; // from one sum of a lane to its next
        uint32_t at = own_sums;
#pragma unroll 1
        for (int r = first_row; r - first_row < b.rows; r += threads >> log_lanes, at += threads >> log_lanes << 2) {
            float sum = sum_of(at, sum_bytes, r < b.rows, num_sums);
            __syncwarp();
#pragma unroll 1
            for (int distance = 1 << log_lanes >> 1; distance; distance >>= 1)
                sum += __shfl_xor_sync(FULL_WARP, sum, distance);
            if (r < b.rows && row_lane == 0) {
                if (r != first_row || out_row < 0) out_row = m.perm[b.row + r];
                if (bias) sum += to_float(bias[out_row]);
                y[out_row] = from_float<T>(sum);
            }
        }
    }
};

/*
 * A thread block owns the rows of one block of the layout.
 *
 *     warps 0 .. m.warps - 1   consumers: of each stage a slot of its own; a lane walks a chunk of a row, then its next chunk
 *     warp m.warps             producer (BULK only): fills the stages, see sell_producer
 *
 *     shared memory            | stage 0 | stage 1 | ... | x, then MACKO_SELL_PAD zeros | partial sums [chunk][rows | 1] |
 *     a stage                  | slot of warp 0 | slot of warp 1 | ... |
 *
 *     task: chunk c of row r   sum over its entries of value * x[column]  ->  partial sums[c][r]
 *     row r                    2^log_lanes lanes add up partial sums[..][r] in a fixed order, add the bias, store y
 *
 * The stages lie first, so that the first fetch does not wait for the parameter cols. Padding (value 0, gap 0) points at the
 * zeros after x.
 */
template <typename T, int GAP_BITS, sell_copy COPY, sell_input INPUT>
__global__ void __launch_bounds__((MACKO_SELL_MAX_WARPS + 1) * WARP, 2)
    spmv(const sell_pipeline pipeline, const macko_sell_matrix m, const T *x, const T *bias, T *y,
         const sell_norm<T> norm) {
#if __CUDA_ARCH__ < 900
    if constexpr (COPY == CP_ASYNC) {
#else
    {
#endif
        extern __shared__ __align__(128) uint8_t shared[];
        // full of each stage, empty of each stage, late_x
        __shared__ __align__(8) uint64_t barriers[2 * MACKO_SELL_MAX_STAGES + 1];
        __shared__ __align__(16) macko_sell_block header;
        constexpr int SLOT = MACKO_SELL_LANES * (MACKO_SELL_STEP * 2 + GAP_BITS * 2);
        const int warps = m.warps, threads = warps * WARP, stage_bytes = warps * SLOT, cols = (int)m.cols;
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        const int num_stages = COPY == BULK ? pipeline.stages : CP_ASYNC_STAGES;
        uint8_t *x_shared = shared + num_stages * stage_bytes;
        const uint32_t stages_at = shared_address(shared), x_at = stages_at + num_stages * stage_bytes;
        const uint32_t full = shared_address(barriers);
        [[maybe_unused]] const uint32_t empty = full + 8 * MACKO_SELL_MAX_STAGES;
        const bool produces = COPY == BULK && warp == warps;
        uint32_t base = 0;
#if __CUDA_ARCH__ >= 900
        const sell_late_x<T> late_x = {pipeline, x, m.cols, x_at, full + 8 * 2 * MACKO_SELL_MAX_STAGES};
        const sell_producer<SLOT, sell_late_x<T>> producer = {m,    pipeline, (int)blockIdx.x, stages_at,
                                                              full, empty,    late_x};
        if (produces && lane == 0) producer.begin();
        __syncwarp();
#endif
        if (!produces) stage_input<T, INPUT>(pipeline, m, x, norm, cols, threads, x_shared, x_at, header, base);
        __syncthreads(); // x but for late_x, the header and the barriers are ready
        const macko_sell_block b = load_block(&header);
#if __CUDA_ARCH__ >= 900
        if (produces) {
            producer.run(b, lane);
            return;
        }
#endif

        sell_own_slots own = {m.data + macko_sell_tail_slot(&b, m.num_blocks, warps, m.head) * SLOT};
        own.of_lane = COPY == CP_ASYNC && lane < warps ? macko_sell_steps_of_warp(&b, warps, lane) : 0;
        own.of_warp = COPY == CP_ASYNC ? __shfl_sync(FULL_WARP, own.of_lane, warp) : 0;
        auto fetch_own = [&](uint32_t offset) {
            own.fetch<SLOT>(m, warps, warp, lane, stages_at + offset + warp * SLOT);
        };
        if (COPY == CP_ASYNC)
            for (int index = 0; index < CP_ASYNC_STAGES; index++) fetch_own(index * stage_bytes);

        const int groups = macko_sell_groups(&b), long_groups = macko_sell_long_groups(&b), rows = max(b.rows, 1);
        sell_results results(b, rows, threads);

        // Partial sums lie chunk by chunk, an odd number of them a chunk, so that those of a row are in different banks.
        float *sums = (float *)(x_shared + macko_sell_x_bytes(cols));
        const int stride = b.rows | 1;
        results.find_sums(b, sums, stride);
        // Address of the sum of this lane's task of a group, 0 where it has none: one register in the loop, not four.
        static_assert(MACKO_SELL_MAX_SUMS + WARP < 1 << 12, "small_quotient");
        const auto sum_address = [&](int group) {
            const int task = group * WARP + lane, chunk = small_quotient(task, rows), row = task - chunk * rows;
            return chunk < b.chunks ? opaque(shared_address(sums + chunk * stride + row)) : 0;
        };

        const sell_lane_slot slot = lane_slot<GAP_BITS>(stages_at + warp * SLOT, lane);
        sell_position at(num_stages * stage_bytes, full, b.stages);
#if __CUDA_ARCH__ >= 900
        if (COPY == BULK && INPUT == AS_IT_IS) late_x.template wait_unless_near<GAP_BITS>(b, base, cols);
#endif
#pragma unroll 1
        for (int group = warp; group < groups; group += warps) {
            uint32_t address = x_at + 2 * base;
            const uint32_t sum_at = sum_address(group);
            if (group + warps < groups) base = m.bases[macko_sell_later_base(&b, m.num_blocks, warps, group) + lane];
            // Not before the loop: waiting for base there would wait for this load, too (half a microsecond).
            if (group == warp && results.first_row < b.rows) results.out_row = m.perm[b.row + results.first_row];
            float sum[2] = {};
            int steps = b.steps - (group >= long_groups);
            at.stages_left -= steps;
#pragma unroll 1
            do {
                if (COPY == BULK) {
                    barrier_wait(at.barrier, at.phase);
                } else {
                    wait_copies<CP_ASYNC_STAGES - 1>();
                    __syncwarp();
                }
                const sell_step step = load_step<GAP_BITS>(slot, at.offset);
                __syncwarp();
                if (COPY == CP_ASYNC) fetch_own(at.offset);
                multiply_step<T, GAP_BITS>(step, address, sum);
                if (COPY == BULK) release_stage(at.barrier + 8 * MACKO_SELL_MAX_STAGES, lane);
                at.advance(stage_bytes);
            } while (--steps);
            if (sum_at) asm volatile("st.shared.f32 [%0], %1;" ::"r"(sum_at), "f"(sum[0] + sum[1]) : "memory");
        }
        if (COPY == BULK) at.release_rest(stage_bytes, lane);
        named_barrier_sync(CONSUMERS, threads);

        results.store(m, b, threads, stride, bias, y);
    }
}

template <typename T, int GAP_BITS, sell_copy COPY, sell_input INPUT>
cudaError_t launch_spmv(const macko_sell_matrix &m, const macko_sell_shape &shape, const device_info &device,
                        const T *x, const sell_norm<T> &norm, const T *bias, T *y, bool pdl, cudaStream_t stream) {
    constexpr auto KERNEL = spmv<T, GAP_BITS, COPY, INPUT>;
    const cudaError_t error = allow_all_shared_memory<KERNEL>(device, cudaSharedmemCarveoutMaxShared);
    if (error) return error;
    // All stages with one block an SM, or with PDL where blocks have many; else one stage less, with which a plain launch is up
    // to 3 % faster where x is short.
    const bool all = shape.blocks_per_sm == 1 || (pdl && !has_few_stages(m));
    const int stages = all ? shape.stages : std::max(shape.stages - 1, std::min(shape.stages, +MACKO_SELL_MIN_STAGES));
    // Without PDL three stages a block are enough to keep memory busy until x has arrived, and the fewer there are, the sooner
    // the first one is complete (docs/notes/2026-11.md has the times of 1, 2 and 4).
    sell_pipeline pipeline = pipeline_of(m, stages, pdl ? stages : macko_knob_number(MACKO_KNOB_FIRST, 3));
    // The second half of a long x is fetched after the first stages (without PDL: after one), so that half of the warps begin
    // earlier.
    if (!pdl) pipeline.before_pdl_wait = macko_sell_min(macko_knob_number(MACKO_KNOB_EARLY, 1), stages);
    if (COPY == BULK && INPUT == AS_IT_IS && m.cols > LONG_X) pipeline.x_split = (int)ceil_div(m.cols, 128) * 8;
    return launch_kernel(KERNEL, {m.num_blocks, (m.warps + (COPY == BULK)) * WARP, shape.shared_bytes, pdl}, stream,
                         pipeline, m, x, bias, y, norm);
}

template <typename T, int GAP_BITS>
cudaError_t launch_copy(const macko_sell_matrix &m, const macko_sell_shape &shape, const void *x,
                        const macko_sell_norm *norm, const void *bias, void *y, cudaStream_t stream) {
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    const bool bulk = macko_has_bulk_copies(device.major);
    const auto launch = bulk
                            ? norm ? launch_spmv<T, GAP_BITS, BULK, RMS_NORM> : launch_spmv<T, GAP_BITS, BULK, AS_IT_IS>
                        : norm ? launch_spmv<T, GAP_BITS, CP_ASYNC, RMS_NORM>
                               : launch_spmv<T, GAP_BITS, CP_ASYNC, AS_IT_IS>;
    const bool pdl = bulk && may_use_pdl(stream, (m.warps + 1) * WARP);
    const sell_norm<T> of_type = norm ? sell_norm<T>{(const T *)norm->weight, norm->eps} : sell_norm<T>{};
    return launch(m, shape, device, (const T *)x, of_type, (const T *)bias, (T *)y, pdl, stream);
}

template <typename T>
cudaError_t launch_width(const macko_sell_matrix &m, const macko_sell_shape &shape, const void *x,
                         const macko_sell_norm *norm, const void *bias, void *y, cudaStream_t stream) {
    return for_constant<2, 3, 4, 5, 6>(
        m.gap_bits, [&](auto bits) { return launch_copy<T, bits>(m, shape, x, norm, bias, y, stream); });
}

} // namespace

cudaError_t macko_sell_spmv_cuda(const macko_sell_matrix *s, const void *x, const macko_sell_norm *norm,
                                 const void *bias, void *y, cudaStream_t stream) {
    if (!s->rows) return cudaSuccess;
    macko_sell_device device;
    const cudaError_t error = macko_sell_device_cuda(&device);
    if (error) return error;
    macko_sell_shape shape = macko_sell_launch_shape(s->cols, s->gap_bits, s->warps, device);
    if (!shape.stages) return cudaErrorInvalidConfiguration;
    shape.stages = std::clamp(macko_knob_number(MACKO_KNOB_STAGES, shape.stages), 1, int(MACKO_SELL_MAX_STAGES));
    const int pipeline_bytes = shape.stages * s->warps * macko_sell_slot_bytes(s->gap_bits);
    shape.shared_bytes = std::max(shape.shared_bytes, macko_sell_fixed_bytes(s->cols) + pipeline_bytes);
    return s->dtype == MACKO_F16 ? launch_width<__half>(*s, shape, x, norm, bias, y, stream)
                                 : launch_width<__nv_bfloat16>(*s, shape, x, norm, bias, y, stream);
}
