// The dense matrix from the sell layout.
#include "stream.cuh"

using namespace macko;

namespace {

constexpr int ROWS = 8;      // sorted rows of a thread block, a warp each
constexpr int RING = 2048;   // columns of a row that lie in shared memory: twice what 32 steps span at density 0.5
constexpr int SEGMENT = 256; // columns that a warp writes at once, 16 bytes a lane
constexpr int STEPS = WARP;  // of each row that are fetched together
constexpr int STAGE_VALUES = ROWS * STEPS * SELL_STEP * 2;

__host__ __device__ constexpr int stage_bytes(int gap_bits) {
    return STAGE_VALUES + ROWS * STEPS * gap_bits * 2;
}

constexpr int shared_bytes(int gap_bits, int stages) {
    return ROWS * RING * 2 + stages * stage_bytes(gap_bits);
}

__device__ __forceinline__ void copy_async_16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_4(uint32_t to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void store_shared_2(uint32_t at, uint16_t value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(value) : "memory");
}

// The last block whose first row is not behind `row`: 32 candidates at a time, as each look costs the latency of a load.
__device__ __forceinline__ int block_of_row(const sell_matrix &s, int64_t row, int lane) {
    int block = 0;
    for (int left = s.num_blocks; left > 1;) {
        const int stride = (left + WARP - 1) / WARP, candidate = lane * stride;
        const bool before = candidate < left && s.blocks[block + candidate].row <= row;
        const int last = __popc(__ballot_sync(FULL_WARP, before)) - 1;
        block += last * stride;
        left = min(stride, left - last * stride);
    }
    return block;
}

// Where the steps of one row of a block lie in data.
struct RowSteps {
    Places places;
    int rows, row, steps, long_steps, long_chunks, long_groups;

    __device__ RowSteps(const sell_matrix &s, const sell_block &b, int block, int row)
        : places(s, b, block), rows(b.rows), row(row), steps(b.steps), long_steps(b.long_chunks * b.steps),
          long_chunks(b.long_chunks), long_groups(sell_long_groups(&b)) {
    }
    // The slot of a step, and in *lane whose share of it the step is.
    __device__ int64_t slot(int at, int *lane) const {
        const bool is_long = at < long_steps;
        const int length = steps - !is_long, behind = is_long ? at : at - long_steps;
        const int passed = small_quotient(behind, length), chunk = is_long ? passed : long_chunks + passed;
        const int task = chunk * rows + row, group = task / SELL_LANES;
        const int turn = small_quotient(group, places.warps), warp = group - turn * places.warps;
        const int long_turns = small_quotient(long_groups + places.warps - 1 - warp, places.warps);
        *lane = task % SELL_LANES;
        return places.slot(turn * (steps - 1) + min(turn, long_turns) + behind - passed * length, warp);
    }
};

/*
 * Where a row's share of a step lies in a stage of shared memory: 32 steps x 8 rows, first half of the values, second
 * half, planes, nibbles. Rows of a step lie in memory side by side, as they are fetched; a lane reads one row's. So that
 * neither meets in a bank, rows change places from step to step.
 */
__device__ __forceinline__ uint32_t values_at(int step, int row) {
    return (step * ROWS + (row ^ step % ROWS)) * 16;
}
__device__ __forceinline__ uint32_t gaps_at(int step, int row) {
    return step * ROWS + (row + step / 4) % ROWS;
}

/*
 * A thread block owns ROWS consecutive sorted rows of [first, stop), a warp one of them; each goes to row_at[row], or
 * next to the one before. All threads fetch the next steps of all rows, so that what lies side by side is read at once.
 * Then a lane takes one step of its warp's row: where it begins is the sum of all gaps before. The lanes scatter into a
 * ring of the row's columns, from which whole lines are written.
 */
template <int GAP_BITS>
__global__ void __launch_bounds__(ROWS *WARP, 4)
    unpack_rows(const sell_matrix s, int64_t first, int64_t stop, const int32_t *row_at, uint16_t *w, int stages) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int block_of[ROWS], steps_of[ROWS];
    constexpr int PLANES = GAP_BITS / 2, PLANE_BYTES = ROWS * STEPS * 4, NIBBLES = STAGE_VALUES + PLANES * PLANE_BYTES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t begin = first + blockIdx.x * (int64_t)ROWS, sorted = begin + warp;
    uint4 *ring = (uint4 *)(shared + warp * RING * 2);
    const uint32_t ring_at = shared_address(ring), stage_at = shared_address(shared) + ROWS * RING * 2;
    for (int i = lane; i < RING / 8; i += WARP) ring[i] = make_uint4(0, 0, 0, 0);
    const int block = block_of_row(s, min(sorted, stop - 1), lane);
    if (lane == 0) block_of[warp] = block;
    __syncthreads();

    const int their_row = threadIdx.x % ROWS, their_step = threadIdx.x / ROWS; // what this thread fetches
    const sell_block b = load_block(s.blocks + block_of[their_row]);
    const RowSteps fetched(s, b, block_of[their_row], (int)(min(begin + their_row, stop - 1) - b.row));
    const int their_steps = begin + their_row < stop ? sell_chunk_start(&b, b.chunks) : 0;
    if (their_step == 0) steps_of[their_row] = their_steps;
    __syncthreads();
    int steps = 0; // of the longest row
    for (int row = 0; row < ROWS; row++) steps = max(steps, steps_of[row]);
    const int own_steps = steps_of[warp];

    const uint32_t to_values = stage_at + values_at(their_step, their_row);
    const uint32_t to_gaps = gaps_at(their_step, their_row);
    int place = 0; // of the stage that is fetched next
    uint16_t nibbles = 0;
    uint32_t to_nibbles = 0; // where they go once they have come; 0: there are none
    auto settle = [&] {
        if (GAP_BITS % 2 && to_nibbles) store_shared_2(to_nibbles, nibbles);
        to_nibbles = 0;
    };
    auto fetch = [&](int tile) {
        const int at = tile + their_step;
        if (at < their_steps) {
            int owner;
            const uint8_t *slot = s.data + sell_slot_bytes(GAP_BITS) * fetched.slot(at, &owner);
            const uint32_t stage = place * stage_bytes(GAP_BITS);
            for (int half = 0; half < 2; half++)
                copy_async_16(to_values + stage + half * (STAGE_VALUES / 2), slot + (half * SELL_LANES + owner) * 16);
            for (int plane = 0; plane < PLANES; plane++)
                copy_async_4(stage_at + stage + STAGE_VALUES + plane * PLANE_BYTES + to_gaps * 4,
                             slot + VALUE_BYTES + (plane * SELL_LANES + owner) * 4);
            if (GAP_BITS % 2) {
                nibbles = __ldg((const uint16_t *)(slot + VALUE_BYTES + PLANES * SELL_LANES * 4) + owner);
                to_nibbles = stage_at + stage + NIBBLES + to_gaps * 2;
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (++place == stages) place = 0;
    };

    // The ring holds the columns from `window` on, counted from the 16-byte boundary at or before the row's begin.
    uint16_t *out = w + (row_at ? row_at[min(sorted, stop - 1)] : sorted - first) * s.cols;
    const int skew = (int)((uintptr_t)out / 2 % 8), end = sorted < stop ? skew + (int)s.cols : 0;
    out -= skew;
    int window = 0;
    auto write_segment = [&] {
        uint4 *from = ring + window % RING / 8 + lane;
        const uint4 chunk = *from;
        *from = make_uint4(0, 0, 0, 0);
        const int at = window + lane * 8;
        if (at >= skew && at + 8 <= end) {
            *(uint4 *)(out + at) = chunk;
        } else {
            const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (at + i >= skew && at + i < end) out[at + i] = (uint16_t)(words[i / 2] >> (16 * (i % 2)));
        }
        window += SEGMENT;
    };

    for (int stage = 0; stage + 1 < stages; stage++) {
        settle();
        fetch(stage * STEPS);
    }
    int reached = skew; // columns passed by the steps before this tile
    uint32_t from = stage_at;
#pragma unroll 1
    for (int tile = 0; tile < steps; tile += STEPS) {
        settle();
        if (stages == 2)
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        else
            asm volatile("cp.async.wait_group 2;" ::: "memory");
        __syncthreads();
        fetch(tile + (stages - 1) * STEPS);

        uint32_t words[8], planes[4] = {};
        for (int half = 0; half < 2; half++) {
            const uint4 v = load_shared_16(from + half * (STAGE_VALUES / 2) + values_at(lane, warp));
            words[4 * half] = v.x, words[4 * half + 1] = v.y, words[4 * half + 2] = v.z, words[4 * half + 3] = v.w;
        }
        for (int plane = 0; plane < PLANES; plane++)
            planes[plane] = load_shared_4(from + STAGE_VALUES + plane * PLANE_BYTES + gaps_at(lane, warp) * 4);
        if (GAP_BITS % 2) {
            const uint32_t four = load_shared_2(from + NIBBLES + gaps_at(lane, warp) * 2);
            planes[PLANES] = four | four << 12;
        }
        from += stage_bytes(GAP_BITS);
        if (from == stage_at + stages * stage_bytes(GAP_BITS)) from = stage_at;

        // As in multiply_8 of spmv: distances to the even and odd entries of each half.
        uint32_t to_even[2], to_odd[2];
        int middle[2], behind[2]; // columns up to entry 4 and to the end of each half
        for (int half = 0; half < 2; half++) {
            const uint32_t odd = gap_field<GAP_BITS>(planes, 2 * half + 1);
            const uint32_t pairs = gap_field<GAP_BITS>(planes, 2 * half) + odd;
            to_odd[half] =
                GAP_BITS < 6 ? pairs * 0x01010101u + 0x07050301u : pairs + (pairs << 8 & 0xff00ff00u) + 0x03010301u;
            to_even[half] = to_odd[half] - odd - 0x01010101u;
            middle[half] = GAP_BITS < 6 ? 0 : (to_odd[half] >> 8 & 255) + 1;
            behind[half] = middle[half] + (to_odd[half] >> 24) + 1;
        }
        const bool inside = tile + lane < own_steps;
        const int passed = inside ? behind[0] + behind[1] : 0;
        const int before = reached;
        const int start = before + (int)warp_inclusive_sum((uint32_t)passed) - passed;
        reached = __shfl_sync(FULL_WARP, start + passed, WARP - 1);
        __syncwarp();
#pragma unroll 1
        while (window + SEGMENT <= before) write_segment();
        const uint32_t room = inside ? 2 * RING : 0;
#pragma unroll 1
        while (true) {
            __syncwarp();
            const uint32_t base = 2 * (start - window), turn = 2 * window;
#pragma unroll
            for (int entry = 0; entry < SELL_STEP; entry++) {
                const int half = entry / 8, pair = entry % 8 / 2;
                const uint32_t first_byte = base + 2 * ((half ? behind[0] : 0) + (pair >= 2 ? middle[half] : 0));
                const uint32_t byte = __dp4a(entry % 2 ? to_odd[half] : to_even[half], 2u << (8 * pair), first_byte);
                const uint16_t value = (uint16_t)(words[entry / 2] >> (16 * (entry % 2)));
                if (value && byte < room) store_shared_2(((byte + turn) & (2 * RING - 1)) + ring_at, value);
            }
            if (reached <= window + RING || window + RING >= end) break;
            __syncwarp();
#pragma unroll 1
            for (int segment = 0; segment < RING / SEGMENT; segment++) write_segment();
        }
    }
    __syncwarp();
#pragma unroll 1
    while (window < end) write_segment();
}

template <int GAP_BITS>
cudaError_t launch(const sell_matrix *s, int64_t first, int64_t count, const int32_t *row_at, void *w,
                   cudaStream_t stream) {
    Device device;
    cudaError_t error = current_device(&device);
    if (!error) error = allow_all_shared_memory<unpack_rows<GAP_BITS>>(device);
    if (error) return error;
    // Four blocks an SM hide the way from memory; where there are fewer, they fetch further ahead.
    const int64_t blocks = ceil_div(count, ROWS);
    const int stages = blocks > 2 * device.num_sms || device.shared_bytes < 128 * 1024 ? 2 : 4;
    unpack_rows<GAP_BITS><<<(unsigned)blocks, ROWS * WARP, shared_bytes(GAP_BITS, stages), stream>>>(
        *s, first, first + count, row_at, (uint16_t *)w, stages);
    return cudaGetLastError();
}

cudaError_t unpack(const sell_matrix *s, int64_t first, int64_t count, const int32_t *row_at, void *w,
                   cudaStream_t stream) {
    if (!count || !s->cols) return cudaSuccess;
    switch (s->gap_bits) {
    case 2: return launch<2>(s, first, count, row_at, w, stream);
    case 3: return launch<3>(s, first, count, row_at, w, stream);
    case 4: return launch<4>(s, first, count, row_at, w, stream);
    case 5: return launch<5>(s, first, count, row_at, w, stream);
    case 6: return launch<6>(s, first, count, row_at, w, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace

cudaError_t sell_unpack_cuda(const sell_matrix *s, void *w, cudaStream_t stream) {
    return unpack(s, 0, s->rows, s->perm, w, stream);
}

cudaError_t sell_unpack_sorted_cuda(const sell_matrix *s, int64_t first, int64_t count, void *w, cudaStream_t stream) {
    return unpack(s, first, count, NULL, w, stream);
}
