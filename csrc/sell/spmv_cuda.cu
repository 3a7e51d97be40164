// y = W x + bias on CUDA, from the sell layout, in one launch, which may normalise x before.
#include "stream.cuh"

using namespace macko;

namespace {

constexpr int CP_ASYNC_STAGES = SELL_MIN_STAGES; // an immediate of the instruction that waits
constexpr int LONG_X = 8192;                     // columns; halves of a shorter x gained nothing

// How a block brings its slots into shared memory.
enum Copy {
    BULK,     // sm_90 and up: one warp fetches whole stages for all, cp.async.bulk and mbarriers
    CP_ASYNC, // sm_80 and up: each warp fetches its own slots, 16 bytes a lane
};

constexpr int GATE_THREADS = 128;

// What a block multiplies.
enum Input {
    AS_IT_IS,
    RMS_NORM, // x by its root mean square, times a weight a column
};

template <typename T>
struct Norm {
    const T *weight; // [cols]
    float eps;
};

// Where the previous kernel's end is waited for, what it wrote is read from L2.
__device__ __forceinline__ uint4 load_piece(const uint4 *from) {
    return __ldcg(from);
}

template <typename T>
__device__ __forceinline__ float sum_of_squares(uint4 piece, float sum) {
    for (const uint32_t word : {piece.x, piece.y, piece.z, piece.w}) {
        const float2 x = to_float2<T>(word);
        sum = fmaf(x.y, x.y, fmaf(x.x, x.x, sum));
    }
    return sum;
}

// Rounded twice, as modules do it: x scaled, and its product with the weight.
template <typename T>
__device__ __forceinline__ uint4 normalised(uint4 piece, uint4 weight, float scale) {
    const auto two = [scale](uint32_t x, uint32_t w) {
        const float2 v = to_float2<T>(x), factor = to_float2<T>(w);
        const float2 scaled = to_float2<T>(from_float2<T>(v.x * scale, v.y * scale));
        return from_float2<T>(scaled.x * factor.x, scaled.y * factor.y);
    };
    return make_uint4(two(piece.x, weight.x), two(piece.y, weight.y), two(piece.z, weight.z), two(piece.w, weight.w));
}

/*
 * x / sqrt(mean(x^2) + eps) * weight into own_x, by `threads` threads and every block for itself: a kernel in front of
 * this one would take longer, for no block of this one could start before it is through. `partial` has room for a float
 * a warp. A thread reads only the weights that it fetched.
 */
template <typename T>
__device__ __forceinline__ void stage_normalised(uint4 *own_x, const T *x, const Norm<T> &norm, int cols, int threads,
                                                 float *partial) {
    // Pieces of 8 columns that a thread holds from one pass to the next: 8192 columns by 8 warps.
    constexpr int HELD = 4;
    const auto *from = (const uint4 *)x;
    const int pieces = cols / 8, warp = threadIdx.x / WARP;
    uint4 held_x[HELD] = {};
#pragma unroll
    for (int k = 0; k < HELD; k++)
        if (threadIdx.x + k * threads < pieces) held_x[k] = load_piece(from + threadIdx.x + k * threads);
#pragma unroll 1
    for (int i = threadIdx.x; i < pieces; i += threads)
        copy_async<16>(shared_address(own_x + i), (const uint4 *)norm.weight + i);
    float sum = 0;
#pragma unroll
    for (int k = 0; k < HELD; k++) sum = sum_of_squares<T>(held_x[k], sum);
#pragma unroll 1
    for (int i = threadIdx.x + HELD * threads; i < pieces; i += threads)
        sum = sum_of_squares<T>(load_piece(from + i), sum);
    for (int distance = WARP / 2; distance; distance >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
    if (threadIdx.x % WARP == 0) partial[warp] = sum;
    named_barrier_sync(1, threads); // but not the warp that fills the ring
    float total = 0;
    for (int w = 0; w < threads / WARP; w++) total += partial[w];
    const float scale = rsqrtf(total / cols + norm.eps);
    commit_copies();
    wait_copies<0>();
#pragma unroll
    for (int k = 0; k < HELD; k++)
        if (const int i = threadIdx.x + k * threads; i < pieces) own_x[i] = normalised<T>(held_x[k], own_x[i], scale);
#pragma unroll 1
    for (int i = threadIdx.x + HELD * threads; i < pieces; i += threads)
        own_x[i] = normalised<T>(load_piece(from + i), own_x[i], scale);
}

// The part of x behind ring.split comes by a bulk copy, if x can be read so. Parameters are read only by the functions, and
// late: they are not there yet when the first stage is fetched.
template <typename T>
struct RestOfX {
    const Ring &ring;
    const T *const &x;
    const int64_t &cols;
    uint32_t x_at, barrier;

    __device__ int bytes() const {
        return ring.split < NO_SPLIT && (uintptr_t)x % 16 == 0 ? ((int)cols / 8 - ring.split) * 16 : 0;
    }
    __device__ void fetch() const {
        if (bytes() <= 0) return;
        sm90::barrier_init(barrier, 1);
        sm90::fence_barrier_init();
        sm90::barrier_arrive_expect_tx(barrier, bytes());
        sm90::bulk_copy(x_at + ring.split * 16, x + ring.split * 8, bytes(), barrier);
    }
    __device__ void wait() const {
        if (bytes() > 0) barrier_wait(barrier, 0);
    }
};

// Eight products; `address` is that of the first x not passed yet. dp4a picks a byte of the distances, scales it and adds
// the address, so that an x costs one instruction and its load.
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
__device__ __forceinline__ void multiply_step(const Step &step, uint32_t &address, float (&sum)[2]) {
    for (int half = 0; half < 2; half++)
        multiply_8<T, GAP_BITS>(step.values[half], gap_field<GAP_BITS>(step.planes, 2 * half),
                                gap_field<GAP_BITS>(step.planes, 2 * half + 1), address, sum);
}

/*
 * A block owns the rows of a block of the layout. Shared memory holds a ring of stages, x (and zeros behind it, for
 * padding) and a partial sum a task: the ring first, so that the first fetch does not wait for the parameter cols.
 * m.warps warps decode: a lane walks a chunk of a row, then the next one. With BULK there is one warp more, which keeps
 * the ring full. At the end 2^k lanes add up a row's partial sums in a fixed order.
 */
template <typename T, int GAP_BITS, Copy COPY, Input INPUT>
__global__ void __launch_bounds__((SELL_MAX_WARPS + 1) * WARP, 2)
    spmv(const Ring ring, const sell_matrix m, const T *x, const T *bias, T *y, const Norm<T> norm) {
#if __CUDA_ARCH__ < 900
    if constexpr (COPY == CP_ASYNC) {
#else
    {
#endif
        extern __shared__ __align__(128) uint8_t shared[];
        __shared__ __align__(8) uint64_t barriers[2 * SELL_MAX_STAGES + 1]; // for each stage: filled, emptied; x
        __shared__ __align__(16) sell_block header;
        constexpr int SLOT = SELL_LANES * (SELL_STEP * 2 + GAP_BITS * 2);
        const int warps = m.warps, threads = warps * WARP, stage_bytes = warps * SLOT, cols = (int)m.cols;
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        const int ring_stages = COPY == BULK ? ring.stages : CP_ASYNC_STAGES;
        uint8_t *own_x = shared + ring_stages * stage_bytes;
        const uint32_t ring_at = shared_address(shared), x_at = ring_at + ring_stages * stage_bytes;
        const uint32_t filled = shared_address(barriers);
        [[maybe_unused]] const uint32_t emptied = filled + 8 * SELL_MAX_STAGES;
#if __CUDA_ARCH__ >= 900
        const RestOfX<T> rest = {ring, x, m.cols, x_at, filled + 8 * 2 * SELL_MAX_STAGES};
        if (COPY == BULK && warp == warps) {
            fill_ring<SLOT>(m, blockIdx.x, ring, ring_at, filled, emptied, header, lane, rest);
            return;
        }
#endif
        // Through shared memory for the same reason as in fill_ring.
        if (threadIdx.x < sizeof header / 16)
            copy_async<16>(shared_address(&header) + threadIdx.x * 16,
                           (const uint4 *)(m.blocks + blockIdx.x) + threadIdx.x);
        uint32_t base = m.bases[sell_first_base(blockIdx.x, warps, warp) + lane];

        // x, and zeros behind it. Not by a bulk copy: it would stand in line behind the stages (0.2 us at 4096 x 4096).
        // Before the wait there are weights only, so that their way from memory is over when x comes.
        const int whole = (uintptr_t)x % 16 == 0 ? cols / 8 : 0, zeros_at = (cols + 7) / 8;
        const int split = min(whole, ring.split);
        if (cols + threadIdx.x < zeros_at * 8) ((uint16_t *)own_x)[cols + threadIdx.x] = 0;
#pragma unroll 1
        for (int i = zeros_at + threadIdx.x; i < sell_x_bytes(cols) / 16; i += threads)
            ((uint4 *)own_x)[i] = make_uint4(0, 0, 0, 0);
#if __CUDA_ARCH__ >= 900
        if (INPUT == RMS_NORM && blockIdx.x == 0 && threadIdx.x == 0) sm90::bulk_prefetch_l2(norm.weight, cols * 2);
        sm90::pdl_wait();
#endif
        if constexpr (INPUT == RMS_NORM) {
            stage_normalised((uint4 *)own_x, x, norm, cols, threads, (float *)(own_x + sell_x_bytes(cols)));
        } else {
#pragma unroll 1
            for (int i = threadIdx.x; i < split; i += threads) copy_async<16>(x_at + i * 16, x + i * 8);
            commit_copies();
#pragma unroll 1
            for (int i = whole * 8 + threadIdx.x; i < cols; i += threads) ((T *)own_x)[i] = x[i];
        }

        // Not wait_copies<0>: ptxas orders what follows otherwise then, and that is not what was timed.
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads(); // x is there but for the rest, and the barriers of the ring
        const sell_block b = load_block(&header);

        // CP_ASYNC: this warp's slots, CP_ASYNC_STAGES of them under way.
        const uint8_t *next = m.data + sell_tail_slot(&b, m.num_blocks, warps, m.head) * SLOT;
        const int lane_steps = COPY == CP_ASYNC && lane < warps ? sell_steps_of_warp(&b, warps, lane) : 0;
        const int own_steps = COPY == CP_ASYNC ? __shfl_sync(FULL_WARP, lane_steps, warp) : 0;
        int fetched = 0;
        auto fetch_own = [&](uint32_t offset) {
            const int slots = stage_slots(lane_steps, fetched);
            const bool behind = fetched >= m.head;
            if (fetched < own_steps) {
                const int64_t head_slot = sell_head_slot(blockIdx.x, m.num_blocks, warps, fetched);
                const uint8_t *from = (behind ? next : m.data + head_slot * SLOT) + warp * SLOT;
                const uint32_t to = ring_at + offset + warp * SLOT;
                for (int piece = lane * 16; piece < SLOT; piece += WARP * 16) copy_async<16>(to + piece, from + piece);
            }
            commit_copies(); // an empty one too, to keep count
            if (behind) next += slots * SLOT;
            fetched++;
        };
        if (COPY == CP_ASYNC)
            for (int place = 0; place < CP_ASYNC_STAGES; place++) fetch_own(place * stage_bytes);

        // Lanes that will add up a row: 2^log_lanes, as few as leave each of them SUMS_AT_ONCE partial sums or fewer.
        const int groups = sell_groups(&b), long_groups = sell_long_groups(&b);
        const int rows = max(b.rows, 1), group_chunks = small_quotient(threads, rows);
        const int enough = min(32 - __clz(max(b.chunks - 1, 0) / SUMS_AT_ONCE), 5);
        const int log_lanes = group_chunks ? min(31 - __clz(group_chunks), enough) : 0;
        const int first_row = threadIdx.x >> log_lanes, part = threadIdx.x & ((1 << log_lanes) - 1);
        int out = -1;

        // Partial sums lie chunk by chunk, an odd number of them a chunk, so that those of a row are in different banks.
        float *sums = (float *)(own_x + sell_x_bytes(cols));
        const int stride = b.rows | 1;
        // What the end needs is ready before it: nothing overlaps with the end.
        const uint32_t own_sums = held(shared_address(sums + part * stride + first_row));
        const int num_sums = (int)held((b.chunks - part + (1 << log_lanes) - 1) >> log_lanes);
        // Where the sum of this lane's task of a group goes, 0 where it has none: one register in the loop, not four.
        static_assert(SELL_MAX_SUMS + WARP < 1 << 12, "small_quotient");
        const auto place_of = [&](int group) {
            const int task = group * WARP + lane, chunk = small_quotient(task, rows), row = task - chunk * rows;
            return chunk < b.chunks ? held(shared_address(sums + chunk * stride + row)) : 0;
        };

        const LaneSlot slot = lane_slot<GAP_BITS>(ring_at + warp * SLOT, lane);
        const uint32_t ring_bytes = held(ring_stages * stage_bytes);
        const uint32_t first_barrier = held(filled);
        uint32_t offset = 0, barrier = first_barrier, parity = 0;
        auto advance = [&] {
            offset += stage_bytes;
            barrier += 8;
            if (offset == ring_bytes) offset = 0, barrier = first_barrier, parity ^= 1;
        };
        int stages_left = b.stages;
#if __CUDA_ARCH__ >= 900
        // The rest of x is waited for only where a lane may come to it before the ring begins anew: see fill_ring.
        if (COPY == BULK && INPUT == AS_IT_IS && split < whole) {
            const bool near = (int)base >= cols || (int)base + ring.stages * (SELL_STEP << GAP_BITS) <= split * 8;
            if (b.steps <= ring.stages || !__all_sync(FULL_WARP, near)) barrier_wait(rest.barrier, 0);
        }
#endif
#pragma unroll 1
        for (int group = warp; group < groups; group += warps) {
            uint32_t address = x_at + 2 * base;
            const uint32_t place = place_of(group);
            if (group + warps < groups) base = m.bases[sell_later_base(&b, m.num_blocks, warps, group) + lane];
            // Behind the first use of base: what waits for one of two loads waits for both, and this one takes half a microsecond.
            if (group == warp && first_row < b.rows) out = m.perm[b.row + first_row];
            float sum[2] = {};
            int steps = b.steps - (group >= long_groups);
            stages_left -= steps;
#pragma unroll 1
            do {
                if (COPY == BULK) {
                    barrier_wait(barrier, parity);
                } else {
                    wait_copies<CP_ASYNC_STAGES - 1>();
                    __syncwarp();
                }
                const Step step = load_step<GAP_BITS>(slot, offset);
                __syncwarp();
                if (COPY == CP_ASYNC) fetch_own(offset);
                multiply_step<T, GAP_BITS>(step, address, sum);
                if (COPY == BULK) give_back(barrier + 8 * SELL_MAX_STAGES, lane);
                advance();
            } while (--steps);
            if (place) asm volatile("st.shared.f32 [%0], %1;" ::"r"(place), "f"(sum[0] + sum[1]) : "memory");
        }
        if (COPY == BULK) // the ring waits for all warps, so those with less to do go along
#pragma unroll 1
            for (; stages_left > 0; stages_left--) {
                barrier_wait(barrier, parity);
                give_back(barrier + 8 * SELL_MAX_STAGES, lane);
                advance();
            }
        named_barrier_sync(1, threads); // but not the warp that filled the ring

        // The block's neighbour still decodes, and each load or shuffle waits in line behind its gathers: loads that are
        // on their way together, and few shuffles.
        const uint32_t sum_bytes = 4 * stride << log_lanes; // from one sum of a lane to its next
        uint32_t at = own_sums;
#pragma unroll 1
        for (int r = first_row; r - first_row < b.rows; r += threads >> log_lanes, at += threads >> log_lanes << 2) {
            float sum = sum_of(at, sum_bytes, r < b.rows, num_sums);
            __syncwarp();
#pragma unroll 1
            for (int distance = 1 << log_lanes >> 1; distance; distance >>= 1)
                sum += __shfl_xor_sync(FULL_WARP, sum, distance);
            if (r < b.rows && part == 0) {
                if (r != first_row || out < 0) out = m.perm[b.row + r];
                if (bias) sum += to_float(bias[out]);
                y[out] = from_float<T>(sum);
            }
        }
    }
}

// x = silu(gate) * up, eight columns a thread, rounded twice as modules do it. It lets the next kernel start before it
// waits itself, for which there has to be a spmv behind it, that reads nothing but weights before its own wait. Not where
// spmv puts x into shared memory: by count that takes as long there, in each of two blocks an SM.
template <typename T>
__global__ void __launch_bounds__(GATE_THREADS) gate_x(const T *gate, const T *up, T *x, int pieces) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    sm90::pdl_wait();
#endif
    const int i = blockIdx.x * GATE_THREADS + threadIdx.x;
    if (i >= pieces) return;
    const uint4 g = load_piece((const uint4 *)gate + i), u = load_piece((const uint4 *)up + i);
    const auto two = [](uint32_t gates, uint32_t ups) {
        const float2 a = to_float2<T>(gates), b = to_float2<T>(ups);
        const float2 silu = to_float2<T>(from_float2<T>(a.x / (1 + __expf(-a.x)), a.y / (1 + __expf(-a.y))));
        return from_float2<T>(silu.x * b.x, silu.y * b.y);
    };
    ((uint4 *)x)[i] = make_uint4(two(g.x, u.x), two(g.y, u.y), two(g.z, u.z), two(g.w, u.w));
}

template <typename T, int GAP_BITS, Copy COPY, Input INPUT>
cudaError_t launch_spmv(const sell_matrix &m, const sell_shape &shape, const Device &device, const T *x,
                        const Norm<T> &norm, const T *bias, T *y, bool chained, cudaStream_t stream) {
    constexpr auto KERNEL = spmv<T, GAP_BITS, COPY, INPUT>;
    const cudaError_t error = allow_all_shared_memory<KERNEL>(device, cudaSharedmemCarveoutMaxShared);
    if (error) return error;
    // In a chain of blocks with many stages, where two blocks share an SM, the whole ring; else one stage less, with which a
    // plain launch is up to 3 % faster where x is short.
    const bool all = shape.blocks_per_sm == 1 || (chained && !has_few_stages(m));
    const int stages = all ? shape.stages : std::max(shape.stages - 1, std::min(shape.stages, +SELL_MIN_STAGES));
    // Behind an ordinary kernel three stages a block are enough to keep memory busy until x is there, and the first of them
    // is complete the sooner the fewer there are (docs/notes/2026-11.md has the times of 1, 2 and 4).
    Ring ring = ring_of(m, stages, chained ? stages : env_number("MACKO_FIRST", 3));
    // The second half of a long x comes later, so that half of the warps begin earlier: in a plain launch behind one stage.
    if (!chained) ring.early = sell_min(env_number("MACKO_EARLY", 1), stages);
    if (COPY == BULK && INPUT == AS_IT_IS && m.cols > LONG_X) ring.split = (int)ceil_div(m.cols, 128) * 8;
    cudaLaunchAttribute attribute = pdl_attribute();
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(m.num_blocks);
    config.blockDim = dim3((m.warps + (COPY == BULK)) * WARP);
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = chained ? 1 : 0;
    return cudaLaunchKernelEx(&config, KERNEL, ring, m, x, bias, y, norm);
}

template <typename T, int GAP_BITS>
cudaError_t launch_copy(const sell_matrix &m, const sell_shape &shape, const void *x, const sell_norm *norm,
                        const void *bias, void *y, cudaStream_t stream) {
    Device device;
    if (const cudaError_t error = current_device(&device)) return error;
    const bool bulk = device.major >= 9 && !env_is("MACKO_COPY", "cp_async");
    const auto launch = bulk
                            ? norm ? launch_spmv<T, GAP_BITS, BULK, RMS_NORM> : launch_spmv<T, GAP_BITS, BULK, AS_IT_IS>
                        : norm ? launch_spmv<T, GAP_BITS, CP_ASYNC, RMS_NORM>
                               : launch_spmv<T, GAP_BITS, CP_ASYNC, AS_IT_IS>;
    const bool chained = bulk && may_use_pdl(stream, (m.warps + 1) * WARP);
    const Norm<T> of_type = norm ? Norm<T>{(const T *)norm->weight, norm->eps} : Norm<T>{};
    return launch(m, shape, device, (const T *)x, of_type, (const T *)bias, (T *)y, chained, stream);
}

template <typename T>
cudaError_t launch_width(const sell_matrix &m, const sell_shape &shape, const void *x, const sell_norm *norm,
                         const void *bias, void *y, cudaStream_t stream) {
    switch (m.gap_bits) {
    case 2: return launch_copy<T, 2>(m, shape, x, norm, bias, y, stream);
    case 3: return launch_copy<T, 3>(m, shape, x, norm, bias, y, stream);
    case 4: return launch_copy<T, 4>(m, shape, x, norm, bias, y, stream);
    case 5: return launch_copy<T, 5>(m, shape, x, norm, bias, y, stream);
    case 6: return launch_copy<T, 6>(m, shape, x, norm, bias, y, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace

cudaError_t sell_spmv_cuda(const sell_matrix *s, const void *x, const sell_norm *norm, const void *bias, void *y,
                           cudaStream_t stream) {
    if (!s->rows) return cudaSuccess;
    sell_device device;
    const cudaError_t error = sell_device_cuda(&device);
    if (error) return error;
    sell_shape shape = sell_launch_shape(s->cols, s->gap_bits, s->warps, device);
    if (!shape.stages) return cudaErrorInvalidConfiguration;
    shape.stages = std::clamp(env_number("MACKO_STAGES", shape.stages), 1, int(SELL_MAX_STAGES));
    const int ring_bytes = shape.stages * s->warps * sell_slot_bytes(s->gap_bits);
    shape.shared_bytes = std::max(shape.shared_bytes, sell_fixed_bytes(s->cols) + ring_bytes);
    return s->dtype == MACKO_F16 ? launch_width<__half>(*s, shape, x, norm, bias, y, stream)
                                 : launch_width<__nv_bfloat16>(*s, shape, x, norm, bias, y, stream);
}

cudaError_t sell_gate_cuda(const sell_matrix *s, const void *gate, const void *up, void *x, cudaStream_t stream) {
    if (!s->cols) return cudaSuccess;
    Device device;
    if (const cudaError_t error = current_device(&device)) return error;
    cudaLaunchAttribute attribute = pdl_attribute();
    const int pieces = (int)(s->cols / 8);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((pieces + GATE_THREADS - 1) / GATE_THREADS);
    config.blockDim = dim3(GATE_THREADS);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = device.major >= 9 && may_use_pdl(stream, (s->warps + 1) * WARP);
    const auto launch = [&](auto kernel, auto *out) {
        return cudaLaunchKernelEx(&config, kernel, (decltype(out))gate, (decltype(out))up, out, pieces);
    };
    return s->dtype == MACKO_F16 ? launch(gate_x<__half>, (__half *)x)
                                 : launch(gate_x<__nv_bfloat16>, (__nv_bfloat16 *)x);
}
