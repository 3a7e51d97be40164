// Row pairs as lanes of the sell layout, to be measured against it: what two rows share stands once, with one gap and one
// load of x for two values; what is left stands in single rows. fp16, sm_90. A thread block owns block i of the pairs,
// then block i of the single rows, through one ring. The sums of the two parts come out apart: the last addition is left
// out, so that the time is less than it would be.
#include "../csrc/sell/stream.cuh"

using namespace macko;

struct Part {
    const uint8_t *data;
    const uint16_t *bases;
    const sell_block *blocks;
    const int32_t *perm;
    float *out; // [rows of the part, rows a lane]
    int32_t num_blocks, head;
};

namespace {

__host__ __device__ constexpr int slot_bytes(int rows, int gap_bits) {
    return SELL_LANES * (SELL_STEP * 2 * rows + gap_bits * 2);
}

struct Ring {
    uint32_t at, slot_bytes, filled, emptied;
    int stages, place;
    uint32_t parity;
    __device__ void advance() {
        if (++place == stages) place = 0, parity ^= 1;
    }
};

template <int ROWS, int GAP_BITS>
__device__ __forceinline__ void fetch_part(const Part &m, const sell_block &b, int block, int warps, Ring &ring,
                                           int &fetched, uint64_t policy, int lane) {
    constexpr int SLOT = slot_bytes(ROWS, GAP_BITS);
    const int own_steps = lane < warps ? sell_steps_of_warp(&b, warps, lane) : 0;
    const uint8_t *head = m.data + (int64_t)block * m.head * warps * SLOT;
    const uint8_t *next = m.data + ((int64_t)m.num_blocks * m.head * warps + b.slot) * SLOT;
    for (int stage = 0; stage < b.stages; stage++) {
        const bool in_head = stage < m.head;
        const int bytes = in_head ? warps * SLOT : stage_slots(own_steps, stage) * SLOT;
        if (lane == 0) {
            if (fetched >= ring.stages) barrier_wait(ring.emptied + 8 * ring.place, ring.parity ^ 1);
            fetch_bulk(ring.at + ring.place * ring.slot_bytes, in_head ? head + stage * warps * SLOT : next, bytes,
                       ring.filled + 8 * ring.place, policy);
        }
        fetched++;
        if (!in_head) next += bytes;
        ring.advance();
    }
}

template <int ROWS, int GAP_BITS>
__device__ __forceinline__ void multiply_8(const uint4 (&values)[ROWS], uint32_t even, uint32_t odd, uint32_t &address,
                                           float (&sum)[ROWS][2]) {
    const uint32_t to_odd = (even + odd) * 0x01010101u + 0x07050301u, to_even = to_odd - odd - 0x01010101u;
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        const uint32_t pick = 2u << (8 * pair);
        const float x0 = widen<__half>(load_shared_2(__dp4a(to_even, pick, address)));
        const uint32_t last = __dp4a(to_odd, pick, address);
        const float x1 = widen<__half>(load_shared_2(last));
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const uint32_t words[4] = {values[k].x, values[k].y, values[k].z, values[k].w};
            const float2 w = widen2<__half>(words[pair]);
            sum[k][0] = fmaf(w.x, x0, sum[k][0]);
            sum[k][1] = fmaf(w.y, x1, sum[k][1]);
        }
        if (pair == 3) address = last + 2;
    }
}

template <int ROWS, int GAP_BITS>
__device__ __forceinline__ void multiply_part(const Part &m, const sell_block &b, int block, int warps, Ring &ring,
                                              uint32_t x_at, uint32_t base, float *sums) {
    constexpr int SLOT = slot_bytes(ROWS, GAP_BITS);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, threads = warps * WARP;
    const int rows = max(b.rows, 1), group_chunks = small_quotient(threads, rows);
    const int group_rows = threads - group_chunks * rows, stride = b.rows | 1, part_sums = b.chunks * stride;
    const int groups = sell_groups(&b), long_groups = sell_long_groups(&b);
    const uint32_t own = held(ring.at + warp * SLOT + lane * 16), own_gaps = held(ring.at + warp * SLOT + ROWS * VALUE_BYTES);
    int chunk = small_quotient(threadIdx.x, rows), row = (int)threadIdx.x - chunk * rows, stages_left = b.stages;
#pragma unroll 1
    for (int group = warp; group < groups; group += warps) {
        uint32_t address = x_at + 2 * base;
        if (group + warps < groups)
            base = m.bases[((int64_t)m.num_blocks * warps + b.group + group) * SELL_LANES + lane];
        float sum[ROWS][2] = {};
        int steps = b.steps - (group >= long_groups);
        stages_left -= steps;
#pragma unroll 1
        do {
            const uint32_t offset = ring.place * ring.slot_bytes;
            barrier_wait(ring.filled + 8 * ring.place, ring.parity);
            uint32_t planes[4] = {};
#pragma unroll
            for (int plane = 0; plane < GAP_BITS / 2; plane++)
                planes[plane] = load_shared_4(own_gaps + offset + plane * SELL_LANES * 4 + lane * 4);
            if (GAP_BITS % 2) {
                const uint32_t nibbles = load_shared_2(own_gaps + offset + GAP_BITS / 2 * SELL_LANES * 4 + lane * 2);
                planes[GAP_BITS / 2] = nibbles | nibbles << 12;
            }
            uint4 values[2][ROWS];
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int k = 0; k < ROWS; k++)
                    values[half][k] = load_shared_16(own + offset + (2 * k + half) * SELL_LANES * 16);
#pragma unroll
            for (int half = 0; half < 2; half++)
                multiply_8<ROWS, GAP_BITS>(values[half], gap_field<GAP_BITS>(planes, 2 * half),
                                           gap_field<GAP_BITS>(planes, 2 * half + 1), address, sum);
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.emptied + 8 * ring.place);
            ring.advance();
        } while (--steps);
        if (chunk < b.chunks)
#pragma unroll
            for (int k = 0; k < ROWS; k++) sums[k * part_sums + chunk * stride + row] = sum[k][0] + sum[k][1];
        chunk += group_chunks;
        row += group_rows;
        if (row >= rows) row -= rows, chunk++;
    }
    for (; stages_left > 0; stages_left--) {
        barrier_wait(ring.filled + 8 * ring.place, ring.parity);
        if (lane == 0) barrier_arrive(ring.emptied + 8 * ring.place);
        ring.advance();
    }
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
    const int outputs = max(b.rows * ROWS, 1), each = small_quotient(threads, outputs);
    const int log_lanes = each ? min(31 - __clz(each), 5) : 0, part = threadIdx.x & ((1 << log_lanes) - 1);
    const int first = threadIdx.x >> log_lanes;
    for (int i = first; i - first < b.rows * ROWS; i += threads >> log_lanes) {
        const int k = i % ROWS, r = i / ROWS;
        float sum = 0;
        if (r < b.rows)
            for (int c = part; c < b.chunks; c += 1 << log_lanes) sum += sums[k * part_sums + c * stride + r];
        for (int distance = 1 << log_lanes >> 1; distance; distance /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
        if (r < b.rows && part == 0) m.out[(int64_t)m.perm[b.row + r] * ROWS + k] = sum;
    }
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

template <int PAIR_BITS, int SINGLE_BITS>
__global__ void __launch_bounds__((SELL_MAX_WARPS + 1) * WARP, 2)
    spmv_pairs(const Part pairs, const Part singles, int warps, int stages, int cols, const __half *x) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ __align__(8) uint64_t barriers[2 * SELL_MAX_STAGES];
    const int block = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, threads = warps * WARP;
    const sell_block none = {}, first = block < pairs.num_blocks ? load_block(pairs.blocks + block) : none,
                     second = block < singles.num_blocks ? load_block(singles.blocks + block) : none;
    const uint32_t x_at = shared_address(shared), sums_at = sell_x_bytes(cols);
    Ring ring = {x_at + sums_at + 2 * SELL_MAX_SUMS * 4, (uint32_t)(warps * slot_bytes(2, PAIR_BITS)),
                 shared_address(barriers), shared_address(barriers) + 8 * SELL_MAX_STAGES, stages, 0, 0};
    if (warp == warps) {
        uint64_t policy;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        if (lane == 0) {
            for (int stage = 0; stage < stages; stage++) {
                barrier_init(ring.filled + 8 * stage, 1);
                barrier_init(ring.emptied + 8 * stage, warps);
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
        asm volatile("griddepcontrol.launch_dependents;");
        asm volatile("bar.arrive 2, %0;" ::"r"(threads + WARP) : "memory");
        int fetched = 0;
        fetch_part<2, PAIR_BITS>(pairs, first, block, warps, ring, fetched, policy, lane);
        fetch_part<1, SINGLE_BITS>(singles, second, block, warps, ring, fetched, policy, lane);
        return;
    }
    const uint32_t first_base = pairs.bases[((int64_t)min(block, pairs.num_blocks - 1) * warps + warp) * SELL_LANES + lane];
    const uint32_t second_base = singles.bases[((int64_t)min(block, singles.num_blocks - 1) * warps + warp) * SELL_LANES + lane];
    for (int i = cols / 8 + threadIdx.x; i < sell_x_bytes(cols) / 16; i += threads)
        ((uint4 *)shared)[i] = make_uint4(0, 0, 0, 0);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = threadIdx.x; i < cols / 8; i += threads)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(x_at + i * 16), "l"(x + i * 8) : "memory");
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
    asm volatile("bar.sync 2, %0;" ::"r"(threads + WARP) : "memory");
    float *sums = (float *)(shared + sums_at);
    multiply_part<2, PAIR_BITS>(pairs, first, block, warps, ring, x_at, first_base, sums);
    multiply_part<1, SINGLE_BITS>(singles, second, block, warps, ring, x_at, second_base, sums);
}

template <int PAIR_BITS, int SINGLE_BITS>
cudaError_t launch(const Part &pairs, const Part &singles, int warps, int stages, int cols, const void *x, int chained,
                   cudaStream_t stream) {
    const auto kernel = spmv_pairs<PAIR_BITS, SINGLE_BITS>;
    const int bytes = sell_x_bytes(cols) + 2 * SELL_MAX_SUMS * 4 + stages * warps * slot_bytes(2, PAIR_BITS);
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (!error)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error) return error;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(max(pairs.num_blocks, singles.num_blocks));
    config.blockDim = dim3((warps + 1) * WARP);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = chained;
    return cudaLaunchKernelEx(&config, kernel, pairs, singles, warps, stages, cols, (const __half *)x);
}

template <int PAIR_BITS>
cudaError_t launch_single(int single_bits, const Part &pairs, const Part &singles, int warps, int stages, int cols,
                          const void *x, int chained, cudaStream_t stream) {
    switch (single_bits) {
    case 3: return launch<PAIR_BITS, 3>(pairs, singles, warps, stages, cols, x, chained, stream);
    case 4: return launch<PAIR_BITS, 4>(pairs, singles, warps, stages, cols, x, chained, stream);
    case 5: return launch<PAIR_BITS, 5>(pairs, singles, warps, stages, cols, x, chained, stream);
    }
    return cudaErrorInvalidValue;
}

} // namespace

extern "C" int spmv_pairs_launch(const Part *pairs, int pair_bits, const Part *singles, int single_bits, int warps,
                                 int stages, int cols, const void *x, int chained, void *stream) {
    const auto s = (cudaStream_t)stream;
    switch (pair_bits) {
    case 3: return launch_single<3>(single_bits, *pairs, *singles, warps, stages, cols, x, chained, s);
    case 4: return launch_single<4>(single_bits, *pairs, *singles, warps, stages, cols, x, chained, s);
    case 5: return launch_single<5>(single_bits, *pairs, *singles, warps, stages, cols, x, chained, s);
    }
    return cudaErrorInvalidValue;
}
