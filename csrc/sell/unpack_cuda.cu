// The dense matrix from the sell layout.
#include "stream.cuh"

using namespace macko;

namespace {

constexpr int THREADS = 128;
constexpr int MOST_ROWS = 8; // of a thread block at once
#ifndef AHEAD_N
#define AHEAD_N 4
#endif
constexpr int AHEAD = AHEAD_N;     // steps that a lane has under way

// A lane's share of a slot.
template <int GAP_BITS>
struct Step {
    uint4 low, high; // values of entries 0..7 and 8..15
    uint32_t words[GAP_BITS / 2];
    uint16_t nibbles;

    // From where the shares of a lane lie, `at` bytes on.
    __device__ void load(const uint8_t *values, const uint8_t *planes, const uint8_t *last, int64_t at) {
        low = load_stream((const uint4 *)(values + at));
        high = load_stream((const uint4 *)(values + at) + SELL_LANES);
        for (int plane = 0; plane < GAP_BITS / 2; plane++)
            words[plane] = load_stream((const uint32_t *)(planes + at) + plane * SELL_LANES);
        if (GAP_BITS % 2) nibbles = load_stream((const uint16_t *)(last + at));
    }

    // Scatters its 16 values to 2-byte places of shared memory from `at` on. Returns the columns passed.
    __device__ int scatter(uint32_t at) const {
        uint32_t planes[4] = {};
        for (int plane = 0; plane < GAP_BITS / 2; plane++) planes[plane] = words[plane];
        if (GAP_BITS % 2) planes[GAP_BITS / 2] = nibbles | (uint32_t)nibbles << 12;
        const uint32_t values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        int passed = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // As in multiply_8 of spmv: distances to the even and odd entries of a half.
            const uint32_t odd = gap_field<GAP_BITS>(planes, 2 * half + 1);
            const uint32_t pairs = gap_field<GAP_BITS>(planes, 2 * half) + odd;
            const uint32_t to_odd =
                GAP_BITS < 6 ? pairs * 0x01010101u + 0x07050301u : pairs + (pairs << 8 & 0xff00ff00u) + 0x03010301u;
            const uint32_t to_even = to_odd - odd - 0x01010101u;
            const int middle = GAP_BITS < 6 ? 0 : (to_odd >> 8 & 255) + 1; // columns up to entry 4
#pragma unroll
            for (int entry = 0; entry < 8; entry++) {
                const uint32_t from = at + (GAP_BITS == 6 && entry >= 4 ? 2 * middle : 0);
                const uint32_t value = values[4 * half + entry / 2] >> (16 * (entry % 2));
                store_shared_2(__dp4a(entry % 2 ? to_odd : to_even, 2u << (entry / 2 * 8), from), (uint16_t)value);
            }
            const int behind = middle + (to_odd >> 24) + 1;
            passed += behind;
            at += 2 * behind;
        }
        return passed;
    }
};

// Where the slots of a block lie: Places, made for a few steps of many short-lived thread blocks.
struct Slots {
    int head, first, tail; // stages of the head; slot of stage 0 there; where stage 0 would be behind it
    int warps, stride;     // slots from stage to stage behind the head, and in it
    int least_steps;       // up to here every warp has a slot
    const int *pair_steps; // [warps / 2] in shared memory

    __device__ int before(int stage) const {
        if (stage <= least_steps) return stage * warps;
        int slots = 0;
#pragma unroll 1
        for (int pair = 0; pair < warps / 2; pair++) slots += 2 * min(pair_steps[pair], stage);
        return slots;
    }
    __device__ int of(int stage, int warp) const {
        return warp + (stage < head ? first + stage * stride : tail + before(stage));
    }
};

/*
 * A thread block owns some rows of a block of the layout, up to `most_rows` of those in [first, stop) of the matrix,
 * which lie side by side there; a lane one chunk of one of them. Where a chunk begins is known, so a lane goes through
 * it alone, and puts what it finds into whole dense rows in shared memory, from where they are written.
 */
template <int GAP_BITS>
__global__ void __launch_bounds__(THREADS, 3)
    unpack_rows(const sell_matrix s, int first, int stop, uint16_t *w, int most_rows, int row_bytes) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ int pair_steps[SELL_MAX_WARPS / 2];
    const uint32_t rows_at = shared_address(shared);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int block = blockIdx.x % s.num_blocks;
    const sell_block b = load_block(s.blocks + block);
    const auto clear = [&] {
        for (int i = threadIdx.x; i < most_rows * row_bytes / 16; i += blockDim.x)
            store_shared_16(rows_at + i * 16, make_uint4(0, 0, 0, 0));
    };
    clear();
    int before = 0, inside = b.rows; // rows of the block that come before those to write, and how many are to write
    if (first > 0 || stop < s.rows) {
        inside = 0;
        for (int i = lane; i < b.rows; i += WARP) {
            const int row = s.perm[b.row + i];
            before += row < first;
            inside += row >= first && row < stop;
        }
        before = __reduce_add_sync(FULL_WARP, before);
        inside = __reduce_add_sync(FULL_WARP, inside);
    }
    if (threadIdx.x < s.warps / 2) pair_steps[threadIdx.x] = sell_steps_of_warp(&b, s.warps, 2 * threadIdx.x);
    __syncthreads();
    const int long_groups = sell_long_groups(&b);
    Slots slots{s.head, block * s.warps, s.num_blocks * s.warps * s.head + b.slot,
                s.warps, s.num_blocks * s.warps, pair_steps[s.warps / 2 - 1], pair_steps};
    slots.tail -= slots.before(s.head);
    const int parts = (inside + most_rows - 1) / most_rows, part_rows = (inside + parts - 1) / max(parts, 1);
    for (int part = blockIdx.x / s.num_blocks; part < parts; part += gridDim.x / s.num_blocks) {
        const int begin = before + part * part_rows, rows = min(part_rows, before + inside - begin);
        const int32_t *perm = s.perm + b.row + begin;
        for (int own = threadIdx.x; own < rows * b.chunks; own += blockDim.x) {
            const int chunk = small_quotient(own, rows), row = own - chunk * rows;
            const int task = chunk * b.rows + begin + row, group = task / SELL_LANES, share = task % SELL_LANES;
            const int turn = small_quotient(group, s.warps), owner = group - turn * s.warps;
            const int long_turns = small_quotient(long_groups + s.warps - 1 - owner, s.warps);
            const int stage = turn * (b.steps - 1) + min(turn, long_turns);
            const int steps = b.steps - (chunk >= b.long_chunks);
            const uint8_t *values = s.data + share * 16, *planes = s.data + VALUE_BYTES + share * 4;
            const uint8_t *last = s.data + VALUE_BYTES + GAP_BITS / 2 * SELL_LANES * 4 + share * 2;
            Step<GAP_BITS> ahead[AHEAD];
            const auto fetch = [&](Step<GAP_BITS> &to, int step) {
                to.load(values, planes, last, (int64_t)sell_slot_bytes(GAP_BITS) * slots.of(stage + step, owner));
            };
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (i < steps) fetch(ahead[i], i);
            const uint16_t *out = w + (int64_t)(perm[row] - first) * s.cols;
            const uint32_t row_at = rows_at + row * row_bytes + (uint32_t)(uintptr_t)out % 16;
            int col = s.bases[sell_base(&b, block, s.num_blocks, s.warps, group) + share];
#pragma unroll 1
            for (int step = 0; step < steps; step += AHEAD) {
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    if (step + i >= steps) break;
                    col += ahead[i].scatter(row_at + col * 2);
                    col = min(col, (int)s.cols); // padding passes it by a step at most
                    if (step + i + AHEAD < steps) fetch(ahead[i], step + i + AHEAD);
                }
            }
        }
        __syncthreads();
        for (int row = warp; row < rows; row += warps) {
            uint16_t *out = w + (int64_t)(perm[row] - first) * s.cols;
            const int skew = (int)((uintptr_t)out / 2 % 8), end = skew + (int)s.cols;
            const uint32_t row_at = rows_at + row * row_bytes;
            if (skew == 0 && s.cols % 8 == 0) {
#pragma unroll 4
                for (int at = lane * 8; at < end; at += WARP * 8) *(uint4 *)(out + at) = load_shared_16(row_at + at * 2);
            } else {
#pragma unroll 1
                for (int at = skew + lane; at < end; at += WARP) out[at - skew] = load_shared_2(row_at + at * 2);
            }
        }
        if (part + (int)(gridDim.x / s.num_blocks) >= parts) break;
        __syncthreads();
        clear();
        __syncthreads();
    }
}

template <int GAP_BITS>
cudaError_t launch(const sell_matrix *s, int64_t first, int64_t count, void *w, cudaStream_t stream) {
    Device device;
    cudaError_t error = current_device(&device);
    if (!error) error = allow_all_shared_memory<unpack_rows<GAP_BITS>>(device);
    if (error) return error;
    // A row, up to 7 columns before it for alignment, a step of padding behind it.
    const int row_bytes = (int)ceil_div((s->cols + 7 + SELL_STEP) * 2, 16) * 16;
    const int fit = device.shared_bytes / number("MACKO_FIT", 3) / row_bytes;
    const int rows = std::max(1, std::min(fit, number("MACKO_ROWS", MOST_ROWS)));
    const int64_t mean = ceil_div(count, s->num_blocks), parts = ceil_div(mean + mean / 4 + 1, rows);
    unpack_rows<GAP_BITS><<<(unsigned)(parts * s->num_blocks), number("MACKO_THREADS", THREADS), rows * row_bytes, stream>>>(
        *s, (int)first, (int)(first + count), (uint16_t *)w, rows, row_bytes);
    return cudaGetLastError();
}

} // namespace

cudaError_t sell_unpack_cuda(const sell_matrix *s, int64_t first, int64_t count, void *w, cudaStream_t stream) {
    if (!count || !s->cols) return cudaSuccess;
    switch (s->gap_bits) {
    case 2: return launch<2>(s, first, count, w, stream);
    case 3: return launch<3>(s, first, count, w, stream);
    case 4: return launch<4>(s, first, count, w, stream);
    case 5: return launch<5>(s, first, count, w, stream);
    case 6: return launch<6>(s, first, count, w, stream);
    default: return cudaErrorInvalidValue;
    }
}
