// y = W x + bias on CUDA, from the sell layout, in one launch.
#include <stdlib.h>
#include <string.h>

#include "../core/cuda.cuh"
#include "sell.h"

using namespace macko;

namespace {

constexpr int CP_ASYNC_STAGES = SELL_MIN_STAGES;        // an immediate of the instruction that waits
constexpr int VALUE_BYTES = SELL_LANES * SELL_STEP * 2; // of a slot; its gaps follow

// How a block brings its slots into shared memory.
enum Copy {
    BULK,     // sm_90 and up: one warp fetches whole stages for all, cp.async.bulk and mbarriers
    CP_ASYNC, // sm_80 and up: each warp fetches its own slots, 16 bytes a lane
};

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

__device__ __forceinline__ uint16_t load_shared_2(uint32_t at) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}

// Hides how a register was made, so that the loop holds it instead of making it again: one instruction a value less.
__device__ __forceinline__ uint32_t held(uint32_t value) {
    uint32_t same;
    asm volatile("mov.u32 %0, %1;" : "=r"(same) : "r"(value));
    return same;
}

// One value or two of them as bits -> float.
template <typename T>
__device__ __forceinline__ float widen(uint16_t bits);
template <>
__device__ __forceinline__ float widen<__half>(uint16_t bits) {
    return __half2float(__ushort_as_half(bits));
}
template <>
__device__ __forceinline__ float widen<__nv_bfloat16>(uint16_t bits) {
    return __uint_as_float((uint32_t)bits << 16);
}
template <typename T>
__device__ __forceinline__ float2 widen2(uint32_t bits);
template <>
__device__ __forceinline__ float2 widen2<__half>(uint32_t bits) {
    return __half22float2(*(const __half2 *)&bits);
}
template <>
__device__ __forceinline__ float2 widen2<__nv_bfloat16>(uint32_t bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}

// The four gaps of field 0..3, one in each byte, from the planes of sell.h.
template <int GAP_BITS>
__device__ __forceinline__ uint32_t gap_field(const uint32_t (&planes)[4], int field) {
    constexpr uint32_t ONES = 0x01010101u;
    const int plane = field * GAP_BITS / 8, shift = field * GAP_BITS % 8, here = 8 - shift;
    uint32_t gaps = planes[plane] >> shift;
    if (here < GAP_BITS) { // the rest is in the next plane
        const uint32_t low = ONES * ((1u << here) - 1);
        gaps = (gaps & low) | (planes[plane + 1] << here & ~low);
    }
    return gaps & ONES * ((1u << GAP_BITS) - 1);
}

// Where in a slot a lane's share lies.
struct LaneSlot {
    uint32_t values, planes, nibbles;
};

template <int GAP_BITS>
__device__ __forceinline__ LaneSlot lane_slot(uint32_t slot, int lane) {
    const uint32_t gaps = slot + VALUE_BYTES;
    return {held(slot + lane * 16), held(gaps + lane * 4), held(gaps + GAP_BITS / 2 * SELL_LANES * 4 + lane * 2)};
}

/*
 * Eight products. even and odd hold the gaps of entries 0, 2, 4, 6 and 1, 3, 5, 7; `address` that of the first x not
 * passed yet. One multiplication gives the four sums of gaps up to an odd entry (at most 8 * 31 + 7 < 256), and dp4a
 * picks a byte, scales it and adds the address, so that an x costs one instruction and its load.
 */
template <typename T, int GAP_BITS>
__device__ __forceinline__ void multiply_8(uint4 values, uint32_t even, uint32_t odd, uint32_t &address,
                                           float (&sum)[2]) {
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
    const uint32_t pairs = even + odd;
    // 6-bit gaps: sums of four entries fit a byte, those of eight do not, so the upper pairs start anew behind entry 3.
    const uint32_t to_odd =
        GAP_BITS < 6 ? pairs * 0x01010101u + 0x07050301u : pairs + (pairs << 8 & 0xff00ff00u) + 0x03010301u;
    const uint32_t to_even = to_odd - odd - 0x01010101u;
    for (int pair = 0; pair < 4; pair++) {
        const uint32_t pick = 2u << (8 * pair);
        const float x0 = widen<T>(load_shared_2(__dp4a(to_even, pick, address)));
        const uint32_t last = __dp4a(to_odd, pick, address);
        const float x1 = widen<T>(load_shared_2(last));
        const float2 w = widen2<T>(words[pair]);
        sum[0] = fmaf(w.x, x0, sum[0]);
        sum[1] = fmaf(w.y, x1, sum[1]);
        if (pair == 3 || (GAP_BITS == 6 && pair == 1)) address = last + 2;
    }
}

// A lane's share of the slot at `offset` in the ring.
template <typename T, int GAP_BITS>
__device__ __forceinline__ void multiply_step(LaneSlot at, uint32_t offset, uint32_t &address, float (&sum)[2]) {
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

__device__ __forceinline__ void copy_16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// What sm_90 added. A barrier's phase ends when all arrivals and all announced bytes are in.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{ .reg .pred done;\n"
                 "again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again_%=; }" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}
// Announces `bytes` to the barrier and fetches them; all multiples of 16.
__device__ __forceinline__ void fetch_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier,
                                           uint64_t policy) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ sell_block load_block(const sell_block *from) {
    const int4 first = ((const int4 *)from)[0], second = ((const int4 *)from)[1];
    return {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
}

// Slots of a stage, where lane w knows the steps of warp w; see "pairs" in sell.h.
__device__ __forceinline__ int stage_slots(int steps_of_lane, int stage) {
    return 2 * __popc(__ballot_sync(FULL_WARP, steps_of_lane > stage) & 0x55555555u);
}

// a / b for 0 <= a < 2^12 and 0 < b < 2^12: a twentieth of the latency of an integer division.
__device__ __forceinline__ int small_quotient(int a, int b) {
    return (int)__fdividef(a + 0.5f, (float)b);
}

struct Launch {
    int stages; // of the ring, at most SELL_MAX_STAGES
    int early;  // stages to fetch before the previous kernel's end is waited for
};

// The work of the warp that keeps the ring full: fetches the head, lets the others begin, fetches what is behind.
template <int SLOT>
__device__ __forceinline__ void fill_ring(const sell_matrix &m, const sell_block &b, const Launch &launch,
                                          uint32_t ring, uint32_t filled, uint32_t emptied, const uint8_t *head_data,
                                          const uint8_t *next, int lane) {
    const int stage_bytes = m.warps * SLOT, blind = min(m.head, launch.stages);
    uint64_t once; // the weights do not push x out of L2
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    if (lane == 0) {
#pragma unroll 1
        for (int stage = 0; stage < launch.stages; stage++) barrier_init(filled + 8 * stage, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#pragma unroll 1
        for (int stage = 0; stage < blind; stage++) {
            if (stage == launch.early) asm volatile("griddepcontrol.wait;" ::: "memory");
            fetch_bulk(ring + stage * stage_bytes, head_data + stage * stage_bytes, stage_bytes, filled + 8 * stage,
                       once);
        }
        asm volatile("griddepcontrol.launch_dependents;");
#pragma unroll 1
        for (int stage = 0; stage < launch.stages; stage++) barrier_init(emptied + 8 * stage, m.warps);
    }
    __syncwarp();
    __syncthreads();
    const int own_steps = lane < m.warps ? sell_steps_of_warp(&b, m.warps, lane) : 0;
    int place = blind % launch.stages;
    uint32_t parity = blind < launch.stages; // of the round before: 0 from the second round on
#pragma unroll 1
    for (int stage = blind; stage < b.stages; stage++) {
        const bool in_head = stage < m.head;
        const int bytes = in_head ? stage_bytes : stage_slots(own_steps, stage) * SLOT;
        if (lane == 0) {
            if (stage >= launch.stages) barrier_wait(emptied + 8 * place, parity);
            fetch_bulk(ring + place * stage_bytes, in_head ? head_data + stage * stage_bytes : next, bytes,
                       filled + 8 * place, once);
        }
        if (!in_head) next += bytes;
        if (++place == launch.stages) place = 0, parity ^= 1;
    }
    // A block may not end while a copy is under way: the stages of the head that nobody needed.
#pragma unroll 1
    for (int stage = b.stages; stage < blind; stage++) barrier_wait(filled + 8 * stage, 0);
}

/*
 * A block owns the rows of a block of the layout. Shared memory holds x (and zeros behind it, for padding), a partial
 * sum a task, and a ring of stages. m.warps warps decode: a lane walks a chunk of a row, then the next one. With BULK
 * there is one warp more, which keeps the ring full. At the end 2^k lanes add up a row's partial sums in a fixed order.
 */
template <typename T, int GAP_BITS, Copy COPY>
__global__ void __launch_bounds__((SELL_MAX_WARPS + 1) * WARP, 2)
    spmv(const sell_matrix m, const T *x, const T *bias, T *y, const Launch launch) {
#if __CUDA_ARCH__ < 900
    if constexpr (COPY == CP_ASYNC) {
#else
    {
#endif
        extern __shared__ __align__(128) uint8_t shared[];
        __shared__ __align__(8) uint64_t barriers[2 * SELL_MAX_STAGES]; // for each stage: filled, emptied
        constexpr int SLOT = SELL_LANES * (SELL_STEP * 2 + GAP_BITS * 2);
        const int warps = m.warps, threads = warps * WARP, stage_bytes = warps * SLOT, cols = (int)m.cols;
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        const uint32_t x_at = shared_address(shared), ring = x_at + sell_fixed_bytes(cols);
        const uint32_t filled = shared_address(barriers), emptied = filled + 8 * SELL_MAX_STAGES;
        const uint8_t *head_data = m.data + (int64_t)blockIdx.x * m.head * stage_bytes;
        const sell_block b = load_block(m.blocks + blockIdx.x); // half a microsecond away
        const uint8_t *next = m.data + ((int64_t)m.num_blocks * m.head * warps + b.slot) * SLOT;

#if __CUDA_ARCH__ >= 900
        if (COPY == BULK && warp == warps) {
            fill_ring<SLOT>(m, b, launch, ring, filled, emptied, head_data, next, lane);
            __syncthreads();
            return;
        }
#endif
        uint32_t base = m.bases[((int64_t)blockIdx.x * warps + warp) * SELL_LANES + lane];

        // x, and zeros behind it. Not by a bulk copy: it would stand in line behind the stages (0.2 us at 4096 x 4096).
        // Before the wait there are weights only, so that their way from memory is over when x comes.
        const int whole = (uintptr_t)x % 16 == 0 ? cols / 8 : 0, zeros_at = (cols + 7) / 8;
        if (cols + threadIdx.x < zeros_at * 8) ((uint16_t *)shared)[cols + threadIdx.x] = 0;
#pragma unroll 1
        for (int i = zeros_at + threadIdx.x; i < sell_x_bytes(cols) / 16; i += threads)
            ((uint4 *)shared)[i] = make_uint4(0, 0, 0, 0);
#if __CUDA_ARCH__ >= 900
        asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#pragma unroll 1
        for (int i = threadIdx.x; i < whole; i += threads) copy_16(x_at + i * 16, x + i * 8);
        asm volatile("cp.async.commit_group;" ::: "memory");
#pragma unroll 1
        for (int i = whole * 8 + threadIdx.x; i < cols; i += threads) ((T *)shared)[i] = x[i];

        // CP_ASYNC: this warp's slots, CP_ASYNC_STAGES of them under way.
        const int lane_steps = COPY == CP_ASYNC && lane < warps ? sell_steps_of_warp(&b, warps, lane) : 0;
        const int own_steps = COPY == CP_ASYNC ? __shfl_sync(FULL_WARP, lane_steps, warp) : 0;
        int fetched = 0;
        auto fetch_own = [&](uint32_t offset) {
            const int slots = stage_slots(lane_steps, fetched);
            if (fetched < own_steps) {
                const uint8_t *from = (fetched < m.head ? head_data + fetched * stage_bytes : next) + warp * SLOT;
                const uint32_t to = ring + offset + warp * SLOT;
                for (int piece = lane * 16; piece < SLOT; piece += WARP * 16) copy_16(to + piece, from + piece);
            }
            asm volatile("cp.async.commit_group;" ::: "memory"); // an empty one too, to keep count
            if (fetched >= m.head) next += slots * SLOT;
            fetched++;
        };
        if (COPY == CP_ASYNC)
            for (int place = 0; place < CP_ASYNC_STAGES; place++) fetch_own(place * stage_bytes);

        // Lanes that will write y: 2^log_lanes of them a row.
        const int groups = sell_groups(&b), long_groups = sell_long_groups(&b);
        const int rows = max(b.rows, 1), group_chunks = small_quotient(threads, rows);
        const int log_lanes = group_chunks ? min(31 - __clz(group_chunks), 5) : 0;
        const int first_row = threadIdx.x >> log_lanes, part = threadIdx.x & ((1 << log_lanes) - 1);
        int out = first_row < b.rows ? m.perm[b.row + first_row] : 0;

        // Partial sums lie chunk by chunk, an odd number of them a chunk, so that those of a row are in different banks.
        float *sums = (float *)(shared + sell_x_bytes(cols));
        const int stride = b.rows | 1;
        const int group_rows = threads - group_chunks * rows; // from a group of this warp to the next
        int chunk = small_quotient(threadIdx.x, rows), row = (int)threadIdx.x - chunk * rows;

        asm volatile("cp.async.wait_group %0;" ::"n"(COPY == CP_ASYNC ? CP_ASYNC_STAGES : 0) : "memory"); // x is there
        __syncthreads();
        const LaneSlot slot = lane_slot<GAP_BITS>(ring + warp * SLOT, lane);
        const uint32_t ring_bytes = held((COPY == BULK ? launch.stages : CP_ASYNC_STAGES) * stage_bytes);
        const uint32_t first_barrier = held(filled);
        uint32_t offset = 0, barrier = first_barrier, parity = 0;
        auto advance = [&] {
            offset += stage_bytes;
            barrier += 8;
            if (offset == ring_bytes) offset = 0, barrier = first_barrier, parity ^= 1;
        };
        int stages_left = b.stages;
#pragma unroll 1
        for (int group = warp; group < groups; group += warps) {
            uint32_t address = x_at + 2 * base;
            if (group + warps < groups)
                base = m.bases[((int64_t)m.num_blocks * warps + b.group + group) * SELL_LANES + lane];
            float sum[2] = {};
            int steps = b.steps - (group >= long_groups);
            stages_left -= steps;
#pragma unroll 1
            do {
                if (COPY == BULK) {
                    barrier_wait(barrier, parity);
                } else {
                    asm volatile("cp.async.wait_group %0;" ::"n"(CP_ASYNC_STAGES - 1) : "memory");
                    __syncwarp();
                }
                multiply_step<T, GAP_BITS>(slot, offset, address, sum);
                __syncwarp();
                if (COPY == CP_ASYNC)
                    fetch_own(offset);
                else if (lane == 0)
                    barrier_arrive(barrier + 8 * SELL_MAX_STAGES);
                advance();
            } while (--steps);
            if (chunk < b.chunks) sums[chunk * stride + row] = sum[0] + sum[1];
            chunk += group_chunks;
            row += group_rows;
            if (row >= rows) row -= rows, chunk++;
        }
        if (COPY == BULK) // the ring waits for all warps, so those with less to do go along
#pragma unroll 1
            for (; stages_left > 0; stages_left--) {
                barrier_wait(barrier, parity);
                if (lane == 0) barrier_arrive(barrier + 8 * SELL_MAX_STAGES);
                advance();
            }
        __syncthreads();

#pragma unroll 1
        for (int r = first_row; r - first_row < b.rows; r += threads >> log_lanes) {
            float sum = 0;
            if (r < b.rows)
                for (int c = part; c < b.chunks; c += 1 << log_lanes) sum += sums[c * stride + r];
#pragma unroll 1
            for (int distance = 1 << log_lanes >> 1; distance; distance /= 2)
                sum += __shfl_xor_sync(FULL_WARP, sum, distance);
            if (r < b.rows && part == 0) {
                if (r != first_row) out = m.perm[b.row + r];
                y[out] = from_float<T>(bias ? sum + to_float(bias[out]) : sum);
            }
        }
    }
}

bool is(const char *knob, const char *value) {
    const char *set = getenv(knob);
    return set && !strcmp(set, value);
}

// Lets a kernel ask for all of an SM's shared memory: once for each device, and not in the way of a launch after that.
cudaError_t allow_all_shared(const void *kernel, bool (&allowed)[64]) {
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (error || (device < 64 && allowed[device])) return error;
    int most;
    error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (!error) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - 1024);
    if (!error)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared);
    if (!error && device < 64) allowed[device] = true;
    return error;
}

template <typename T, int GAP_BITS, Copy COPY>
cudaError_t launch_spmv(const sell_matrix &m, const sell_shape &shape, const T *x, const T *bias, T *y, bool chained,
                        cudaStream_t stream) {
    static bool allowed[64];
    const cudaError_t error = allow_all_shared((const void *)spmv<T, GAP_BITS, COPY>, allowed);
    if (error) return error;
    // Stages fetched early take bandwidth from the end of the previous kernel, but cover the way of x to this one. H200,
    // 2 against all of them: 6.27 against 6.89 us with 8 stages a block (4096 x 4096), 13.8 / 14.4 with 22 (11008 x 4096),
    // 20.0 / 19.7 with 32 (8192 x 8192).
    const bool few = m.slots <= (int64_t)24 * m.num_blocks * m.warps;
    const Launch launch = {shape.stages, few ? 2 : shape.stages};
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(m.num_blocks);
    config.blockDim = dim3((m.warps + (COPY == BULK)) * WARP);
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = chained ? 1 : 0;
    return cudaLaunchKernelEx(&config, spmv<T, GAP_BITS, COPY>, m, x, bias, y, launch);
}

// Whether to launch so that this kernel's start may overlap with the end of the one before. Behind an ordinary kernel
// that costs 0.2 us in a CUDA graph (H200), so while a graph is captured it is done only behind a kernel like this one:
// as many threads, and much shared memory. It is right behind any kernel: before its wait a block reads weights only.
bool may_overlap(cudaStream_t stream, unsigned threads) {
    if (is("MACKO_PDL", "0") || is("MACKO_PDL", "1")) return is("MACKO_PDL", "1");
    cudaStreamCaptureStatus status;
    const cudaGraphNode_t *before;
    size_t count;
#if CUDART_VERSION >= 13000
    const cudaGraphEdgeData *edges;
    const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &before, &edges, &count);
#else
    const cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, nullptr, &before, &count);
#endif
    if (!error && status == cudaStreamCaptureStatusNone) return true;
    cudaGraphNodeType type;
    cudaKernelNodeParams kernel;
    const bool known = !error && count == 1 && !cudaGraphNodeGetType(before[0], &type) &&
                       type == cudaGraphNodeTypeKernel && !cudaGraphKernelNodeGetParams(before[0], &kernel);
    cudaGetLastError(); // a kernel that this runtime does not know is no error
    return known && kernel.blockDim.x == threads && kernel.sharedMemBytes >= 64 * 1024;
}

template <typename T, int GAP_BITS>
cudaError_t launch_copy(const sell_matrix &m, const sell_shape &shape, const void *x, const void *bias, void *y,
                        cudaStream_t stream) {
    int device, major;
    cudaError_t error = cudaGetDevice(&device);
    if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error) return error;
    const bool bulk = major >= 9 && !is("MACKO_COPY", "cp_async");
    const auto launch = bulk ? launch_spmv<T, GAP_BITS, BULK> : launch_spmv<T, GAP_BITS, CP_ASYNC>;
    const bool chained = bulk && may_overlap(stream, (m.warps + 1) * WARP);
    return launch(m, shape, (const T *)x, (const T *)bias, (T *)y, chained, stream);
}

template <typename T>
cudaError_t launch_width(const sell_matrix &m, const sell_shape &shape, const void *x, const void *bias, void *y,
                         cudaStream_t stream) {
    switch (m.gap_bits) {
    case 2: return launch_copy<T, 2>(m, shape, x, bias, y, stream);
    case 3: return launch_copy<T, 3>(m, shape, x, bias, y, stream);
    case 4: return launch_copy<T, 4>(m, shape, x, bias, y, stream);
    case 5: return launch_copy<T, 5>(m, shape, x, bias, y, stream);
    case 6: return launch_copy<T, 6>(m, shape, x, bias, y, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace

cudaError_t sell_spmv_cuda(const sell_matrix *s, const void *x, const void *bias, void *y, cudaStream_t stream) {
    if (!s->rows) return cudaSuccess;
    sell_device device;
    const cudaError_t error = sell_device_cuda(&device);
    if (error) return error;
    const sell_shape shape = sell_launch_shape(s->cols, s->gap_bits, s->warps, device);
    if (!shape.stages) return cudaErrorInvalidConfiguration;
    return s->dtype == MACKO_F16 ? launch_width<__half>(*s, shape, x, bias, y, stream)
                                 : launch_width<__nv_bfloat16>(*s, shape, x, bias, y, stream);
}
