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
template <int STEPS>
constexpr int PLANE_BYTES = ROWS * STEPS * 4; // of gaps, after the values
template <int GAP_BITS, int STEPS>
constexpr int NIBBLES = STAGE_VALUES<STEPS> + GAP_BITS / 2 * PLANE_BYTES<STEPS>; // where they begin
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

// What a thread fetches of each stage: a step of a row.
template <int GAP_BITS, int STEPS>
struct sell_step_fetch {
    static constexpr int PLANES = GAP_BITS / 2, SLOT = MACKO_SELL_LANES * (MACKO_SELL_STEP * 2 + GAP_BITS * 2);
    const macko_sell_matrix &s;
    const sell_row_steps (&row_steps)[ROWS];
    const uint32_t &stage_at;
    int row, step;
    float per_warp;
    uint32_t to_values, to_gaps, to_nibbles; // where nibbles go once they have arrived; 0: there are none
    int next;                                // stage that is fetched next
    uint16_t nibbles;

    __device__ __forceinline__ sell_step_fetch(const macko_sell_matrix &s, const sell_row_steps (&row_steps)[ROWS],
                                               const uint32_t &stage_at)
        : s(s), row_steps(row_steps), stage_at(stage_at), row(threadIdx.x % ROWS), step(threadIdx.x / ROWS),
          per_warp(1.0f / s.warps), to_values(stage_at + values_at(step, row)), to_gaps(gaps_at<STEPS>(step, row)),
          to_nibbles(0), next(0), nibbles(0) {
    }
    __device__ __forceinline__ void store_nibbles() {
        if (GAP_BITS % 2 && to_nibbles) store_shared_2(to_nibbles, nibbles);
        to_nibbles = 0;
    }
    __device__ __forceinline__ void fetch(int first_step, const int &stages) {
        const int at = row_steps[row].begin + first_step + step;
        if (at < row_steps[row].stop) {
            uint32_t owner;
            const uint32_t number = row_steps[row].slot(s, per_warp, at, &owner);
            const uint8_t *slot = s.data + (uint64_t)number * SLOT, *values = slot + owner * 16;
            const uint8_t *gaps = slot + VALUE_BYTES + owner * 4;
            const uint32_t stage = next * stage_bytes<STEPS>(GAP_BITS);
            for (int half = 0; half < 2; half++) // the blocks of neighbouring rows find the rest of a line
                copy_async_of_line(to_values + stage + half * (STAGE_VALUES<STEPS> / 2),
                                   values + half * (MACKO_SELL_LANES * 16));
            for (int plane = 0; plane < PLANES; plane++)
                copy_async<4>(stage_at + stage + STAGE_VALUES<STEPS> + plane * PLANE_BYTES<STEPS> + to_gaps * 4,
                              gaps + plane * MACKO_SELL_LANES * 4);
            if (GAP_BITS % 2) {
                nibbles = __ldg((const uint16_t *)(gaps + PLANES * MACKO_SELL_LANES * 4 - owner * 2));
                to_nibbles = stage_at + stage + NIBBLES<GAP_BITS, STEPS> + to_gaps * 2;
            }
        }
        commit_copies();
        if (++next == stages) next = 0;
    }
};

// A lane's step: 16 entries, and how many columns each lies after the first one that the lane has not passed.
template <int GAP_BITS, int STEPS>
struct sell_entries {
    uint32_t words[8]; // values, two a word
    uint32_t to_even[2], to_odd[2];
    int middle[2], span[2]; // columns of each half: up to entry 4, and all

    __device__ __forceinline__ void load(uint32_t (&planes)[4], const uint32_t &from, const int &step, const int &row) {
        constexpr int PLANES = GAP_BITS / 2;
        for (int half = 0; half < 2; half++) {
            const uint4 v = load_shared_16(from + half * (STAGE_VALUES<STEPS> / 2) + values_at(step, row));
            words[4 * half] = v.x, words[4 * half + 1] = v.y, words[4 * half + 2] = v.z, words[4 * half + 3] = v.w;
        }
        for (int plane = 0; plane < PLANES; plane++)
            planes[plane] =
                load_shared_4(from + STAGE_VALUES<STEPS> + plane * PLANE_BYTES<STEPS> + gaps_at<STEPS>(step, row) * 4);
        if (GAP_BITS % 2) {
            const uint32_t four = load_shared_2(from + NIBBLES<GAP_BITS, STEPS> + gaps_at<STEPS>(step, row) * 2);
            planes[PLANES] = four | four << 12;
        }
    }
    __device__ __forceinline__ void decode(const uint32_t (&planes)[4]) {
        for (int half = 0; half < 2; half++) {
            const uint32_t odd = gap_field<GAP_BITS>(planes, 2 * half + 1);
            const sell_distances to = distances<GAP_BITS>(gap_field<GAP_BITS>(planes, 2 * half), odd);
            to_odd[half] = to.to_odd;
            to_even[half] = to.to_even;
            middle[half] = GAP_BITS < 6 ? 0 : (to_odd[half] >> 8 & 255) + 1;
            span[half] = middle[half] + (to_odd[half] >> 24) + 1;
        }
    }
    // base and the bytes from the lane's first column to an entry's.
    __device__ __forceinline__ uint32_t offset_of(int entry, uint32_t base) const {
        const int half = entry / 8, pair = entry % 8 / 2;
        if (half) base += 2 * span[0];
        if (GAP_BITS == 6 && pair >= 2) base += 2 * middle[half];
        return __dp4a(entry % 2 ? to_odd[half] : to_even[half], 2u << (8 * pair), base);
    }
    __device__ __forceinline__ uint16_t value(int entry) const {
        return (uint16_t)(words[entry / 2] >> (16 * (entry % 2)));
    }
};

// A row on its way out: its ring holds RING columns from `window` on, counted from the 16-byte boundary at or before the
// first column, at `skew`. The row ends at `end`.
template <int STEPS>
struct sell_ring {
    const uint32_t &ring_at;
    const int &own_step, &skew, &end;
    int window;
    uint16_t *out; // this lane's 16 bytes of the segment at `window`

    __device__ __forceinline__ void write_segment() {
        const uint32_t from = (2 * window & (RING_BYTES<STEPS> - 1)) + ring_at + own_step * 16;
        const uint4 vector = load_shared_16(from);
        store_shared_16(from, make_uint4(0, 0, 0, 0));
        if ((window || !skew) && window + SEGMENT<STEPS> <= end) {
            *(uint4 *)out = vector;
        } else {
            const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
            const int at = window + own_step * 8;
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (at + i >= skew && at + i < end) out[i] = (uint16_t)(words[i / 2] >> (16 * (i % 2)));
        }
        window += SEGMENT<STEPS>;
        out += SEGMENT<STEPS>;
    }
    // Segments that neither begin before the row nor end after it.
    __device__ __forceinline__ void write_whole(const int &before) {
#pragma unroll 1
        for (const int whole = min(before, end); window + SEGMENT<STEPS> <= whole;
             window += SEGMENT<STEPS>, out += SEGMENT<STEPS>) {
            const uint32_t from = (2 * window & (RING_BYTES<STEPS> - 1)) + ring_at + own_step * 16;
            *(uint4 *)out = load_shared_16(from);
            store_shared_16(from, make_uint4(0, 0, 0, 0));
        }
    }
};

/*
 * A thread block owns ROWS of the rows [first, stop) of the matrix, a panel or all of them. These are [first, stop) of s.order
 * as well, so the rows of a thread block are neighbours in the layout. Of each row it does split blockIdx.y of gridDim.y.
 *
 *     fetch     all threads, cp.async: the next STEPS steps of all 8 rows, as what lies side by side is read at once
 *     decode    STEPS lanes own a row, a step each; it begins at `start`, the sum of all gaps of the steps before it
 *     scatter   16 values a lane, into the ring buffer of the row's columns, which holds zeros elsewhere
 *     write     16 bytes a lane, once no later step can reach them: a segment of the row; zeros take its place
 */
template <int GAP_BITS, int STEPS>
__global__ void __launch_bounds__(THREADS<STEPS>, 1024 / THREADS<STEPS>)
    unpack_rows(const macko_sell_matrix s, int64_t first, int64_t stop, uint16_t *w, int stages) {
    extern __shared__ __align__(ALIGNMENT) uint8_t shared[];
    __shared__ sell_row_steps row_steps[ROWS];
    constexpr int RING = ::RING<STEPS>, RING_BYTES = ::RING_BYTES<STEPS>, SEGMENT = ::SEGMENT<STEPS>;
    constexpr int STAGE_BYTES = stage_bytes<STEPS>(GAP_BITS);
    const int lane = threadIdx.x % WARP, own_row = threadIdx.x / STEPS, own_step = threadIdx.x % STEPS;
    const int64_t position = first + blockIdx.x * (int64_t)ROWS + own_row;
    const bool owns = position < stop;
    const int sorted = s.order[min(position, stop - 1)]; // the row of the layout
    const uint32_t shared_at = shared_address(shared), rings_at = (shared_at + RING_BYTES - 1) & -(uint32_t)RING_BYTES;
    const uint32_t stage_at = rings_at + ROWS * RING_BYTES, ring_at = opaque(rings_at + own_row * RING_BYTES);
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

    sell_step_fetch<GAP_BITS, STEPS> fetch(s, row_steps, stage_at);
    const int row = s.perm[sorted];
    for (int stage = 0; stage + 1 < stages; stage++) {
        fetch.store_nibbles();
        fetch.fetch(stage * STEPS, stages);
    }
    uint16_t *const out = w + (row - first) * s.cols + first_col;
    const int skew = (int)((uintptr_t)out / 2 % 8), end = owns ? skew + last_col - first_col : 0;
    sell_ring<STEPS> ring = {ring_at, own_step, skew, end, 0, out + (own_step * 8 - skew)};

    int reached = skew; // columns passed by the steps before these
    uint32_t from = stage_at;
#pragma unroll 1
    for (int first_step = 0; first_step < steps; first_step += STEPS) {
        fetch.store_nibbles();
        if (stages == 2)
            wait_copies<0>();
        else
            wait_copies<2>();
        __syncthreads();
        fetch.fetch(first_step + (stages - 1) * STEPS, stages);

        sell_entries<GAP_BITS, STEPS> entries;
        uint32_t planes[4] = {};
        entries.load(planes, from, own_step, own_row);
        from += STAGE_BYTES;
        if (from == stage_at + stages * STAGE_BYTES) from = stage_at;

        entries.decode(planes);
        if (first_step + STEPS > own_steps &&
            first_step + own_step >= own_steps) { // after the row: values 0 that span nothing
            entries = {};
        }
        const int passed = entries.span[0] + entries.span[1], before = reached;
        const int start = before + (int)warp_inclusive_sum<STEPS>((uint32_t)passed) - passed;
        reached = __shfl_sync(FULL_WARP, start + passed, STEPS - 1, STEPS);
        __syncwarp();
        if (ring.window == 0 && skew && SEGMENT <= before) ring.write_segment();
        ring.write_whole(before);
#pragma unroll 1
        while (ring.window + SEGMENT <= before) ring.write_segment(); // padding after the row
        __syncwarp();
        if (__all_sync(FULL_WARP, reached < ring.window + RING)) {
#pragma unroll
            for (int entry = 0; entry < MACKO_SELL_STEP; entry++)
                store_shared_2((entries.offset_of(entry, 2 * start) & (RING_BYTES - 1)) | ring_at,
                               entries.value(entry));
            continue;
        }
#pragma unroll 1
        while (true) { // the steps span more columns than the ring
#pragma unroll
            for (int entry = 0; entry < MACKO_SELL_STEP; entry++) {
                const uint32_t at = entries.offset_of(entry, 2 * (start - ring.window));
                if (at < RING_BYTES)
                    store_shared_2(((at + 2 * ring.window) & (RING_BYTES - 1)) | ring_at, entries.value(entry));
            }
            const bool more = reached >= ring.window + RING && ring.window + RING < end;
            if (!__any_sync(FULL_WARP, more)) break;
            __syncwarp();
#pragma unroll 1
            for (int segment = 0; more && segment < RING / SEGMENT; segment++) ring.write_segment();
            __syncwarp();
        }
    }
    __syncwarp();
#pragma unroll 1
    while (ring.window < end) ring.write_segment();
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
