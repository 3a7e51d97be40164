// Dense rows from the sell layout: all of the matrix, or a panel for a product through the dense workspace.
#include <algorithm>

#include "stream.cuh"

using namespace macko;

namespace {

constexpr int ROWS = 8; // of a thread block

// STEPS of each row are fetched together: a warp's lanes are those of one row, or of two.
template <int STEPS>
constexpr int THREADS = ROWS * STEPS;
template <int STEPS>
constexpr int RING = 64 * STEPS; // columns of a row's ring buffer: twice what its steps span at density 0.5
template <int STEPS>
constexpr int RING_BYTES = RING<STEPS> * 2; // and what a ring is aligned to: an address in it takes one instruction
template <int STEPS>
constexpr int SEGMENT = 8 * STEPS; // columns that are written at once, 16 bytes a lane
template <int STEPS>
constexpr int STAGE_VALUES = ROWS * STEPS * MACKO_SELL_STEP * 2;
constexpr int ALIGNMENT = 1024;

template <int STEPS>
__host__ __device__ constexpr int stage_bytes(int gap_bits) {
    return STAGE_VALUES<STEPS> + ROWS * STEPS * gap_bits * 2;
}

template <int STEPS>
constexpr int shared_bytes(int gap_bits, int stages) {
    return ROWS * RING_BYTES<STEPS> + stages * stage_bytes<STEPS>(gap_bits) + RING_BYTES<STEPS> - ALIGNMENT;
}

// The block that owns `row`, the last one whose first row is not after it: 32 candidates at a time, as each look costs the
// latency of a load. Those around `guess` come first: they are loaded before the row is known, and bring the header along.
__device__ __forceinline__ int block_of_row(const macko_sell_matrix &s, int row, int guess, int lane) {
    int block = max(0, min(guess - WARP / 2, s.num_blocks - WARP));
    const bool not_after = block + lane < s.num_blocks && s.blocks[block + lane].row <= row;
    const int found = __popc(__ballot_sync(FULL_WARP, not_after));
    if (found && (found < WARP || block + WARP == s.num_blocks)) return block + found - 1;
    block = 0;
    for (int left = s.num_blocks; left > 1;) {
        const int stride = (left + WARP - 1) / WARP, candidate = lane * stride;
        const bool before = candidate < left && s.blocks[block + candidate].row <= row;
        const int last = __popc(__ballot_sync(FULL_WARP, before)) - 1;
        block += last * stride;
        left = min(stride, left - last * stride);
    }
    return block;
}

// Where the steps of one row of a block lie in data, or of some of its chunks. Held in shared memory: each fetch reads what
// it needs of it, and no register holds it.
struct alignas(16) sell_row_steps {
    sell_block_slots block_slots;
    int begin, stop; // steps of the row
    int rows, row, steps, long_steps, long_chunks, long_groups;
    float per_step, per_short_step; // one over the steps of a chunk
    int apart[3];                   // eight of these lie in different banks

    // Split `split` of `splits`: whole chunks, and the columns from where the first one begins.
    __device__ void find(const macko_sell_matrix &s, int block, int sorted, int split, int splits, int *first_col,
                         int *last_col) {
        const macko_sell_block b = load_block(s.blocks + block);
        block_slots.find(s, b, block);
        const int first = b.chunks * split / splits, last = b.chunks * (split + 1) / splits;
        begin = macko_sell_chunk_start(&b, first), stop = macko_sell_chunk_start(&b, last);
        rows = b.rows, row = sorted - b.row, steps = b.steps;
        auto column_of = [&](int chunk) {
            const int task = chunk * rows + row, group = task / MACKO_SELL_LANES;
            const int column =
                s.bases[macko_sell_base(&b, block, s.num_blocks, s.warps, group) + task % MACKO_SELL_LANES];
            return min(column, (int)s.cols);
        };
        *first_col = first ? column_of(first) : 0;
        *last_col = split + 1 == splits ? (int)s.cols : last ? column_of(last) : 0;
        long_steps = b.long_chunks * b.steps, long_chunks = b.long_chunks, long_groups = macko_sell_long_groups(&b);
        per_step = __fdividef(1, b.steps), per_short_step = __fdividef(1, b.steps - 1);
    }
    // The slot of a step, and in *lane the lane of it that has the step. Quotients as in small_quotient.
    __device__ uint32_t slot(const macko_sell_matrix &s, float per_warp, int at, uint32_t *lane) const {
        const bool is_long = at < long_steps;
        const int alike = is_long ? at : at - long_steps, length = steps - !is_long; // steps before it in chunks alike
        const int passed = (int)((alike + 0.5f) * (is_long ? per_step : per_short_step));
        const uint32_t task = (passed + (is_long ? 0 : long_chunks)) * rows + row;
        const int group = task / MACKO_SELL_LANES, round = (int)((group + 0.5f) * per_warp),
                  warp = group - round * s.warps;
        const int long_rounds = (int)((long_groups + s.warps - 1 - warp + 0.5f) * per_warp);
        const int stage = round * (steps - 1) + min(round, long_rounds) + alike - passed * length;
        *lane = task % MACKO_SELL_LANES;
        return block_slots.slot(s, stage, warp);
    }
};

static_assert(sizeof(sell_row_steps) == 80);

/*
 * Where a row's part of a step lies in a stage of shared memory. A stage is [STEPS][ROWS] of values 0..7, then the same of
 * values 8..15, gap planes, nibbles. The rows of a step are fetched together, the steps of a row are read together: so that
 * neither has two in a bank, the order of the rows changes from step to step (a swizzle).
 */
__device__ __forceinline__ uint32_t values_at(int step, int row) {
    return (step * ROWS + (row ^ step % ROWS)) * 16;
}
template <int STEPS>
__device__ __forceinline__ uint32_t gaps_at(int step, int row) {
    return step * ROWS + (row + step / 4 * (WARP / STEPS)) % ROWS;
}

// As copy_async<16>, and brings the rest of the 128 bytes to L2, where the blocks of neighbouring rows find it.
__device__ __forceinline__ void copy_async_of_line(uint32_t to, const void *from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
    copy_async<16>(to, from);
#endif
}

/*
 * A thread block owns ROWS of the rows [first, stop) of the matrix, a panel or all of them. These are [first, stop) of s.order
 * as well, so the rows of a thread block are neighbours in the layout. Of each row it does split blockIdx.y of gridDim.y.
 *
 *     fetch     all threads, cp.async: the next STEPS steps of all 8 rows, as what lies side by side is read at once
 *     decode    STEPS lanes own a row, a step each; it begins at `start`, the sum of all gaps of the steps before it
 *     scatter   16 values a lane, into the ring buffer of the row's columns, which holds zeros elsewhere
 *     write     16 bytes a lane, once no later step can reach them: a segment of the row; zeros take its place
 *
 * One function: its phases share most of its registers, which functions of their own would take as a dozen arguments.
 */
template <int GAP_BITS, int STEPS>
__global__ void __launch_bounds__(THREADS<STEPS>, 1024 / THREADS<STEPS>)
    unpack_rows(const macko_sell_matrix s, int64_t first, int64_t stop, uint16_t *w, int stages) {
    extern __shared__ __align__(ALIGNMENT) uint8_t shared[];
    __shared__ sell_row_steps row_steps[ROWS];
    constexpr int RING = ::RING<STEPS>, RING_BYTES = ::RING_BYTES<STEPS>, SEGMENT = ::SEGMENT<STEPS>;
    constexpr int STAGE_VALUES = ::STAGE_VALUES<STEPS>, STAGE_BYTES = stage_bytes<STEPS>(GAP_BITS);
    constexpr int PLANES = GAP_BITS / 2, PLANE_BYTES = ROWS * STEPS * 4, NIBBLES = STAGE_VALUES + PLANES * PLANE_BYTES;
    constexpr int SLOT = MACKO_SELL_LANES * (MACKO_SELL_STEP * 2 + GAP_BITS * 2);
    const int lane = threadIdx.x % WARP, own_row = threadIdx.x / STEPS, own_step = threadIdx.x % STEPS;
    const int64_t position = first + blockIdx.x * (int64_t)ROWS + own_row;
    const bool owns = position < stop;
    const int sorted = s.order[min(position, stop - 1)]; // the row of the layout
    const uint32_t shared_at = shared_address(shared), rings_at = (shared_at + RING_BYTES - 1) & -(uint32_t)RING_BYTES;
    const uint32_t stage_at = rings_at + ROWS * RING_BYTES, ring_at = held(rings_at + own_row * RING_BYTES);
    for (int i = own_step; i < RING / 8; i += STEPS) store_shared_16(ring_at + i * 16, make_uint4(0, 0, 0, 0));
    const int guess = (int)((float)position / s.rows * s.num_blocks); // if blocks have as many rows as others
    int block = 0;
    for (int row = 0; row < WARP; row += STEPS) { // each row of the warp
        const int found = block_of_row(s, __shfl_sync(FULL_WARP, sorted, row), __shfl_sync(FULL_WARP, guess, 0), lane);
        if (lane / STEPS == row / STEPS) block = found;
    }
    sell_row_steps own;
    int first_col, last_col;
    own.find(s, block, sorted, blockIdx.y, gridDim.y, &first_col, &last_col);
    if (!owns) own.stop = own.begin;
    if (own_step == 0) row_steps[own_row] = own;
    __syncthreads();
    int steps = 0; // of the longest row
    for (int each = 0; each < ROWS; each++) steps = max(steps, row_steps[each].stop - row_steps[each].begin);
    const int own_steps = own.stop - own.begin;

    const int their_row = threadIdx.x % ROWS, their_step = threadIdx.x / ROWS; // what this thread fetches
    const float per_warp = 1.0f / s.warps;
    const uint32_t to_values = stage_at + values_at(their_step, their_row);
    const uint32_t to_gaps = gaps_at<STEPS>(their_step, their_row);
    int next = 0; // stage that is fetched next
    uint16_t nibbles = 0;
    uint32_t to_nibbles = 0; // where they go once they have arrived; 0: there are none
    auto store_nibbles = [&] {
        if (GAP_BITS % 2 && to_nibbles) store_shared_2(to_nibbles, nibbles);
        to_nibbles = 0;
    };
    auto fetch = [&](int first_step) {
        const int at = row_steps[their_row].begin + first_step + their_step;
        if (at < row_steps[their_row].stop) {
            uint32_t owner;
            const uint32_t number = row_steps[their_row].slot(s, per_warp, at, &owner);
            const uint8_t *slot = s.data + (uint64_t)number * SLOT, *values = slot + owner * 16;
            const uint8_t *gaps = slot + VALUE_BYTES + owner * 4;
            const uint32_t stage = next * STAGE_BYTES;
            for (int half = 0; half < 2; half++)
                copy_async_of_line(to_values + stage + half * (STAGE_VALUES / 2),
                                   values + half * (MACKO_SELL_LANES * 16));
            for (int plane = 0; plane < PLANES; plane++)
                copy_async<4>(stage_at + stage + STAGE_VALUES + plane * PLANE_BYTES + to_gaps * 4,
                              gaps + plane * MACKO_SELL_LANES * 4);
            if (GAP_BITS % 2) {
                nibbles = __ldg((const uint16_t *)(gaps + PLANES * MACKO_SELL_LANES * 4 - owner * 2));
                to_nibbles = stage_at + stage + NIBBLES + to_gaps * 2;
            }
        }
        commit_copies();
        if (++next == stages) next = 0;
    };

    const int row = s.perm[sorted];
    for (int stage = 0; stage + 1 < stages; stage++) {
        store_nibbles();
        fetch(stage * STEPS);
    }
    // The ring holds RING columns from `window` on, counted from the 16-byte boundary at or before the first column.
    uint16_t *out = w + (row - first) * s.cols + first_col;
    const int skew = (int)((uintptr_t)out / 2 % 8), end = owns ? skew + last_col - first_col : 0;
    out += own_step * 8 - skew; // this lane's 16 bytes of the segment at `window`
    int window = 0;
    auto write_segment = [&] {
        const uint32_t from = (2 * window & (RING_BYTES - 1)) + ring_at + own_step * 16;
        const uint4 vector = load_shared_16(from);
        store_shared_16(from, make_uint4(0, 0, 0, 0));
        if ((window || !skew) && window + SEGMENT <= end) {
            *(uint4 *)out = vector;
        } else {
            const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
            const int at = window + own_step * 8;
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (at + i >= skew && at + i < end) out[i] = (uint16_t)(words[i / 2] >> (16 * (i % 2)));
        }
        window += SEGMENT;
        out += SEGMENT;
    };

    int reached = skew; // columns passed by the steps before these
    uint32_t from = stage_at;
#pragma unroll 1
    for (int first_step = 0; first_step < steps; first_step += STEPS) {
        store_nibbles();
        if (stages == 2)
            wait_copies<0>();
        else
            wait_copies<2>();
        __syncthreads();
        fetch(first_step + (stages - 1) * STEPS);

        uint32_t words[8], planes[4] = {};
        for (int half = 0; half < 2; half++) {
            const uint4 v = load_shared_16(from + half * (STAGE_VALUES / 2) + values_at(own_step, own_row));
            words[4 * half] = v.x, words[4 * half + 1] = v.y, words[4 * half + 2] = v.z, words[4 * half + 3] = v.w;
        }
        for (int plane = 0; plane < PLANES; plane++)
            planes[plane] =
                load_shared_4(from + STAGE_VALUES + plane * PLANE_BYTES + gaps_at<STEPS>(own_step, own_row) * 4);
        if (GAP_BITS % 2) {
            const uint32_t four = load_shared_2(from + NIBBLES + gaps_at<STEPS>(own_step, own_row) * 2);
            planes[PLANES] = four | four << 12;
        }
        from += STAGE_BYTES;
        if (from == stage_at + stages * STAGE_BYTES) from = stage_at;

        uint32_t to_even[2], to_odd[2];
        int middle[2], span[2]; // columns of each half: up to entry 4, and all
        for (int half = 0; half < 2; half++) {
            const uint32_t odd = gap_field<GAP_BITS>(planes, 2 * half + 1);
            const sell_distances to = distances<GAP_BITS>(gap_field<GAP_BITS>(planes, 2 * half), odd);
            to_odd[half] = to.to_odd;
            to_even[half] = to.to_even;
            middle[half] = GAP_BITS < 6 ? 0 : (to_odd[half] >> 8 & 255) + 1;
            span[half] = middle[half] + (to_odd[half] >> 24) + 1;
        }
        if (first_step + STEPS > own_steps &&
            first_step + own_step >= own_steps) { // after the row: values 0 that span nothing
            for (int i = 0; i < 8; i++) words[i] = 0;
            for (int half = 0; half < 2; half++) to_even[half] = to_odd[half] = middle[half] = span[half] = 0;
        }
        const int passed = span[0] + span[1], before = reached;
        const int start = before + (int)warp_inclusive_sum<STEPS>((uint32_t)passed) - passed;
        reached = __shfl_sync(FULL_WARP, start + passed, STEPS - 1, STEPS);
        __syncwarp();
        if (window == 0 && skew && SEGMENT <= before) write_segment();
#pragma unroll 1
        for (const int whole = min(before, end); window + SEGMENT <= whole; window += SEGMENT, out += SEGMENT) {
            const uint32_t from = (2 * window & (RING_BYTES - 1)) + ring_at + own_step * 16;
            *(uint4 *)out = load_shared_16(from);
            store_shared_16(from, make_uint4(0, 0, 0, 0));
        }
#pragma unroll 1
        while (window + SEGMENT <= before) write_segment(); // padding after the row
        __syncwarp();
        // base and the bytes from the lane's first column to an entry's.
        auto offset_of = [&](int entry, uint32_t base) {
            const int half = entry / 8, pair = entry % 8 / 2;
            if (half) base += 2 * span[0];
            if (GAP_BITS == 6 && pair >= 2) base += 2 * middle[half];
            return __dp4a(entry % 2 ? to_odd[half] : to_even[half], 2u << (8 * pair), base);
        };
        auto value = [&](int entry) { return (uint16_t)(words[entry / 2] >> (16 * (entry % 2))); };
        if (__all_sync(FULL_WARP, reached < window + RING)) {
#pragma unroll
            for (int entry = 0; entry < MACKO_SELL_STEP; entry++)
                store_shared_2((offset_of(entry, 2 * start) & (RING_BYTES - 1)) | ring_at, value(entry));
            continue;
        }
#pragma unroll 1
        while (true) { // the steps span more columns than the ring
#pragma unroll
            for (int entry = 0; entry < MACKO_SELL_STEP; entry++) {
                const uint32_t at = offset_of(entry, 2 * (start - window));
                if (at < RING_BYTES) store_shared_2(((at + 2 * window) & (RING_BYTES - 1)) | ring_at, value(entry));
            }
            const bool more = reached >= window + RING && window + RING < end;
            if (!__any_sync(FULL_WARP, more)) break;
            __syncwarp();
#pragma unroll 1
            for (int segment = 0; more && segment < RING / SEGMENT; segment++) write_segment();
            __syncwarp();
        }
    }
    __syncwarp();
#pragma unroll 1
    while (window < end) write_segment();
}

template <int GAP_BITS, int STEPS>
cudaError_t launch(const device_info &device, const macko_sell_matrix *s, int64_t first, int64_t count, void *w,
                   int splits, int stages, cudaStream_t stream) {
    if (const cudaError_t error = allow_all_shared_memory<unpack_rows<GAP_BITS, STEPS>>(device)) return error;
    unpack_rows<GAP_BITS, STEPS>
        <<<dim3((unsigned)ceil_div(count, ROWS), splits), THREADS<STEPS>, shared_bytes<STEPS>(GAP_BITS, stages),
           stream>>>(*s, first, first + count, (uint16_t *)w, stages);
    return cudaGetLastError();
}

/*
 * Four thread blocks of 32 steps an SM hide the latency of memory; fewer of them fetch further ahead, in more stages. Of more
 * than four an SM the last wave takes as long as a full one, however few blocks it has: so blocks of 16 steps are taken if all
 * of those run at once (faster at 12288 x 4096 and, at density 0.5, 22016 x 4096; slower where not all of them do, density
 * 0.3, and where all of 32 steps do, 4096 x 11008; H200, 2026-11). Where there is less than one block an SM, long rows
 * (8192 x 28672, in panels of 1024) are split in two or more.
 */
template <int GAP_BITS>
cudaError_t launch(const macko_sell_matrix *s, int64_t first, int64_t count, void *w, cudaStream_t stream) {
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    const int64_t blocks = ceil_div(count, ROWS);
    constexpr int RESERVED = 1024;                                        // by CUDA, of each block
    constexpr int HALF = shared_bytes<16>(GAP_BITS, 2) + 1024 + RESERVED; // row_steps are less than 1024
    if (blocks > 4 * device.num_sms && blocks <= (device.shared_bytes + RESERVED) / HALF * device.num_sms)
        return launch<GAP_BITS, 16>(device, s, first, count, w, 1, 2, stream);
    constexpr int LONG = 8192; // eight iterations of the loop at density 0.5
    const int splits = s->cols > LONG ? (int)std::clamp<int64_t>(2 * device.num_sms / blocks, 1, 4) : 1;
    const bool further = splits == 1 && blocks <= 2 * device.num_sms && device.shared_bytes >= 128 * 1024;
    return launch<GAP_BITS, 32>(device, s, first, count, w, splits, further ? 4 : 2, stream);
}

} // namespace

cudaError_t macko_sell_unpack_cuda(const macko_sell_matrix *s, int64_t first, int64_t count, void *w,
                                   cudaStream_t stream) {
    if (!count || !s->cols) return cudaSuccess;
    return for_constant<2, 3, 4, 5, 6>(s->gap_bits,
                                       [&](auto bits) { return launch<bits>(s, first, count, w, stream); });
}
