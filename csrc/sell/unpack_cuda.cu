// The dense matrix from the sell layout.
#include "stream.cuh"

using namespace macko;

namespace {

constexpr int WARPS = 8;
constexpr int WINDOW = 2048; // columns of a row that a warp assembles in shared memory at a time

// A lane's share of a slot, and which columns it names: entry e is at `start` + offset(e).
template <int GAP_BITS>
struct Step {
    uint32_t words[8]; // two values each
    uint32_t planes[4];
    uint32_t to_even[2], to_odd[2]; // as in multiply_8 of spmv
    int middle[2], behind[2];       // columns up to entry 4 and to the end of each half

    __device__ void load(const uint8_t *slot, int owner) {
        const uint8_t *gaps = slot + VALUE_BYTES;
        for (int half = 0; half < 2; half++) {
            const uint4 v = __ldg((const uint4 *)slot + half * SELL_LANES + owner);
            words[4 * half] = v.x, words[4 * half + 1] = v.y, words[4 * half + 2] = v.z, words[4 * half + 3] = v.w;
        }
        for (int plane = 0; plane < 4; plane++) planes[plane] = 0;
        for (int plane = 0; plane < GAP_BITS / 2; plane++)
            planes[plane] = __ldg((const uint32_t *)gaps + plane * SELL_LANES + owner);
        if (GAP_BITS % 2) {
            const uint32_t nibbles = __ldg((const uint16_t *)(gaps + GAP_BITS / 2 * SELL_LANES * 4) + owner);
            planes[GAP_BITS / 2] = nibbles | nibbles << 12;
        }
    }
    __device__ void decode() {
        for (int half = 0; half < 2; half++) {
            const uint32_t odd = gap_field<GAP_BITS>(planes, 2 * half + 1);
            const uint32_t pairs = gap_field<GAP_BITS>(planes, 2 * half) + odd;
            to_odd[half] =
                GAP_BITS < 6 ? pairs * 0x01010101u + 0x07050301u : pairs + (pairs << 8 & 0xff00ff00u) + 0x03010301u;
            to_even[half] = to_odd[half] - odd - 0x01010101u;
            middle[half] = GAP_BITS < 6 ? 0 : (to_odd[half] >> 8 & 255) + 1;
            behind[half] = middle[half] + (to_odd[half] >> 24) + 1;
        }
    }
    // Hides that nothing changes between windows: else 32 registers hold what one instruction makes anew, and spill.
    __device__ void touch() {
        for (int i = 0; i < 8; i++) asm volatile("" : "+r"(words[i]));
        for (int half = 0; half < 2; half++) asm volatile("" : "+r"(to_even[half]), "+r"(to_odd[half]));
    }
    __device__ int columns() const {
        return behind[0] + behind[1];
    }
    __device__ int offset(int entry) const {
        const int half = entry / 8, pair = entry % 8 / 2;
        const uint32_t bytes = entry % 2 ? to_odd[half] : to_even[half];
        return (half ? behind[0] : 0) + (pair >= 2 ? middle[half] : 0) + (bytes >> (8 * pair) & 255);
    }
    __device__ uint16_t value(int entry) const {
        return (uint16_t)(words[entry / 2] >> (16 * (entry % 2)));
    }
};

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

/*
 * A warp owns a row, and each lane a step of it at a time: where a step begins is the sum of all gaps before. The lanes
 * scatter into a window of the row in shared memory, which is written coalesced. Rows [first, stop) of the sorted ones;
 * each goes to row_at[row], or next to the one before. What counts is loads under way: the next step is fetched before
 * this one is scattered, and windows, not rows, leave room for three blocks an SM.
 */
template <int GAP_BITS>
__global__ void __launch_bounds__(WARPS *WARP, 3)
    unpack_rows(const sell_matrix s, int64_t first, int64_t stop, const int32_t *row_at, uint16_t *w) {
    __shared__ uint4 windows[WARPS][WINDOW / 8];
    const int lane = threadIdx.x % WARP, cols = (int)s.cols;
    const int64_t sorted = first + blockIdx.x * (int64_t)WARPS + threadIdx.x / WARP;
    if (sorted >= stop) return;
    uint4 *window = windows[threadIdx.x / WARP];
    for (int i = lane; i < WINDOW / 8; i += WARP) window[i] = make_uint4(0, 0, 0, 0);
    uint16_t *out = w + (row_at ? row_at[sorted] : sorted - first) * s.cols;
    const bool aligned = (uintptr_t)out % 16 == 0 && cols % 8 == 0;

    int window_col = 0;
    auto next_window = [&] {
        __syncwarp();
        const int count = min(WINDOW, cols - window_col);
        if (aligned)
#pragma unroll 2
            for (int i = lane; i < count / 8; i += WARP) ((uint4 *)(out + window_col))[i] = window[i];
        else
#pragma unroll 1
            for (int i = lane; i < count; i += WARP) out[window_col + i] = ((const uint16_t *)window)[i];
        __syncwarp();
        for (int i = lane; i < WINDOW / 8; i += WARP) window[i] = make_uint4(0, 0, 0, 0);
        __syncwarp();
        window_col += WINDOW;
    };

    const int block = block_of_row(s, sorted, lane);
    const sell_block b = load_block(s.blocks + block);
    const Places places(s, b, block);
    const int long_groups = sell_long_groups(&b), long_steps = b.long_chunks * b.steps, row = (int)(sorted - b.row);
    const int steps = sell_chunk_start(&b, b.chunks);
    Step<GAP_BITS> fetched;
    auto fetch = [&](int tile) {
        const int at = min(tile + lane, steps - 1);
        const int chunk = at < long_steps ? small_quotient(at, b.steps)
                                          : b.long_chunks + small_quotient(at - long_steps, b.steps - 1);
        const int task = chunk * b.rows + row, group = task / SELL_LANES;
        const int turn = small_quotient(group, s.warps), warp = group - turn * s.warps;
        const int stage = turn * (b.steps - 1) + sell_min(turn, sell_groups_of_warp(long_groups, s.warps, warp)) + at -
                          sell_chunk_start(&b, chunk);
        fetched.load(s.data + sell_slot_bytes(GAP_BITS) * places.slot(stage, warp), task % SELL_LANES);
    };
    if (steps) fetch(0);
    int reached = 0; // columns passed by the steps before this tile
#pragma unroll 1
    for (int tile = 0; tile < steps; tile += WARP) {
        Step<GAP_BITS> step = fetched;
        if (tile + WARP < steps) fetch(tile + WARP);
        step.decode();
        const bool inside = tile + lane < steps;
        const int passed = inside ? step.columns() : 0;
        const int behind = reached + (int)warp_inclusive_sum((uint32_t)passed), start = behind - passed;
        reached = __shfl_sync(FULL_WARP, behind, WARP - 1);
#pragma unroll 1
        while (true) {
            const unsigned room = inside ? min(WINDOW, cols - window_col) : 0;
            step.touch();
            __syncwarp();
#pragma unroll
            for (int entry = 0; entry < SELL_STEP; entry++) {
                const unsigned place = start + step.offset(entry) - window_col;
                const uint16_t value = step.value(entry);
                if (value && place < room) ((uint16_t *)window)[place] = value;
            }
            if (reached <= window_col + WINDOW || window_col + WINDOW >= cols) break;
            next_window();
        }
    }
#pragma unroll 1
    while (window_col < cols) next_window();
}

template <int GAP_BITS>
cudaError_t launch(const sell_matrix *s, int64_t first, int64_t count, const int32_t *row_at, void *w,
                   cudaStream_t stream) {
    unpack_rows<GAP_BITS><<<(unsigned)ceil_div(count, WARPS), WARPS * WARP, 0, stream>>>(*s, first, first + count,
                                                                                         row_at, (uint16_t *)w);
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
