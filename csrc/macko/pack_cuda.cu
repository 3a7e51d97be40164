// pack, unpack and the checks of the macko format on CUDA. A warp owns a row in every kernel but the scan.
#include "../core/scan.cuh"
#include "macko.cuh"

using namespace macko;

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

unsigned blocks_for(int64_t rows) {
    return unsigned(ceil_div(rows, WARPS));
}

__device__ __forceinline__ int64_t row_of_warp() {
    return blockIdx.x * int64_t(WARPS) + threadIdx.x / WARP;
}

// A dense row, seen as aligned chunks of 8 columns: column `-skew` lies at a multiple of 16 bytes. The columns of a
// chunk that lie before or after the row belong to other rows, or to nobody.
struct dense_row {
    const uint16_t *begin;
    int skew;

    __device__ __forceinline__ dense_row(const uint16_t *w, int64_t row, int64_t cols)
        : begin(w + row * cols), skew(int((uintptr_t)begin / 2 % MACKO_CHUNK)) {
    }
};

__device__ __forceinline__ uint4 load_chunk(const dense_row &row, int64_t col, int64_t cols) {
    if (col >= 0 && col + MACKO_CHUNK <= cols) return load_stream((const uint4 *)(row.begin + col));
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < MACKO_CHUNK; k++)
        if (col + k >= 0 && col + k < cols) words[k / 2] |= uint32_t(row.begin[col + k]) << 16 * (k % 2);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ uint16_t value_at(const uint4 &chunk, int k) {
    const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
    return uint16_t(words[k / 2] >> 16 * (k % 2));
}

// Bit k says whether value k of the chunk is not a zero of either sign.
__device__ __forceinline__ uint32_t nonzero_mask(const uint4 &chunk) {
    // Adding 0x7fff carries into a half's top bit unless the half is 0.
    const auto top_bits = [](uint32_t word) { return ((word & 0x7fff7fffu) + 0x7fff7fffu) & 0x80008000u; };
    const uint32_t spread =
        top_bits(chunk.x) >> 15 | top_bits(chunk.y) >> 13 | top_bits(chunk.z) >> 11 | top_bits(chunk.w) >> 9;
    return (spread | spread >> 15) & 0xff;
}

// Where a walk over a row stands: the lane's chunk, its non-zeros, and the column after the last non-zero before it.
struct row_cursor {
    uint4 chunk;
    int64_t col, next;
    uint32_t nonzeros;
};

// Calls body(row_cursor) for every 32 chunks of a row, all lanes together.
template <typename Body>
__device__ __forceinline__ void walk_row(const dense_row &row, int64_t cols, const Body &body) {
    constexpr int AHEAD = 4; // loads in flight a lane
    constexpr int64_t STEP = WARP * MACKO_CHUNK;
    const int lane = threadIdx.x % WARP;
    int64_t next = 0; // the column after the last non-zero so far
    for (int64_t start = -row.skew; start < cols; start += AHEAD * STEP) {
        uint4 chunks[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) chunks[i] = load_chunk(row, start + i * STEP + lane * MACKO_CHUNK, cols);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            row_cursor at = {chunks[i], start + i * STEP + lane * MACKO_CHUNK, next, nonzero_mask(chunks[i])};
            const int64_t own_next = at.col + WARP - __clz(at.nonzeros); // of use where there is a non-zero
            const uint32_t lanes = __ballot_sync(FULL_WARP, at.nonzeros), before = lanes & ((1u << lane) - 1);
            const int64_t their_next = __shfl_sync(FULL_WARP, own_next, WARP - 1 - __clz(before | 1));
            const int64_t last_next = __shfl_sync(FULL_WARP, own_next, WARP - 1 - __clz(lanes | 1));
            if (before) at.next = their_next;
            if (lanes) next = last_next;
            body(at);
        }
    }
}

// Stored entries of the lane's chunk, the explicit zeros of the run before it included.
template <int BITS>
__device__ __forceinline__ int64_t entries_of(const row_cursor &at) {
    if (!at.nonzeros) return 0;
    const int first = __ffs(at.nonzeros) - 1, last = WARP - 1 - __clz(at.nonzeros);
    int64_t entries = __popc(at.nonzeros) + ((at.col + first - at.next) >> BITS);
    if (BITS == 2) { // between two of a chunk fits one explicit zero, in one run of 4 to 6
        const uint32_t zeros = ~at.nonzeros & ((1u << last) - (1u << first));
        entries += (zeros & zeros >> 1 & zeros >> 2 & zeros >> 3) != 0;
    }
    return entries;
}

// Counts for one width of deltas or for several, whose row_ptrs lie one after the other.
template <int... BITS>
__global__ void __launch_bounds__(THREADS) count_rows(const uint16_t *w, int64_t rows, int64_t cols, int64_t *row_ptr) {
    const int64_t row = row_of_warp();
    if (row >= rows) return;
    int64_t counts[sizeof...(BITS)] = {};
    walk_row(dense_row(w, row, cols), cols, [&](const row_cursor &at) {
        int i = 0;
        ((counts[i++] += entries_of<BITS>(at)), ...);
    });
    for (int64_t entries : counts) {
        for (int distance = WARP / 2; distance; distance /= 2) entries += __shfl_xor_sync(FULL_WARP, entries, distance);
        if (threadIdx.x % WARP == 0) row_ptr[row + 1] = entries;
        row_ptr += rows + 1;
    }
}

// One block a row_ptr: counts in row_ptr[1..rows] become their sums. 8 counts a thread and round; 48 us for 36864 rows (H200).
__global__ void __launch_bounds__(SCAN_THREADS) scan_rows(int64_t rows, int64_t *row_ptr, int64_t *stored) {
    constexpr int COUNTS = 8;
    int64_t before_round = 0, total;
    row_ptr += blockIdx.x * (rows + 1);
    if (threadIdx.x == 0) row_ptr[0] = 0;
    for (int64_t round = 1; round <= rows; round += SCAN_THREADS * COUNTS) {
        const int64_t first = round + threadIdx.x * COUNTS;
        int64_t sums[COUNTS], sum = 0;
#pragma unroll
        for (int i = 0; i < COUNTS; i++) sums[i] = first + i <= rows ? row_ptr[first + i] : 0;
#pragma unroll
        for (int i = 0; i < COUNTS; i++) sums[i] = sum += sums[i];
        const int64_t before = before_round + block_exclusive_sum(sum, &total);
        before_round += total;
#pragma unroll
        for (int i = 0; i < COUNTS; i++)
            if (first + i <= rows) row_ptr[first + i] = before + sums[i];
    }
    if (threadIdx.x == 0) stored[blockIdx.x] = before_round;
}

__device__ void or_word(uint32_t *deltas, int64_t word, uint32_t bits, int64_t num_words) {
    if (!bits) return;
    if (word < num_words) {
        atomicOr(&deltas[word], bits);
        return;
    }
    auto *half = (unsigned short *)&deltas[word]; // 2-bit deltas can end with half a word
    for (unsigned short seen = *half, now; (now = atomicCAS(half, seen, seen | bits)) != seen;) seen = now;
}

// Where the entries of a step go: shared memory, from which the warp stores them in order, or, where an earlier run of
// zeros brings more entries than fit there, memory itself. `first_bit` is that of the step's first delta.
struct entry_target {
    uint16_t *values;
    uint32_t *deltas;
    int first_bit;
    int64_t num_words;

    __device__ __forceinline__ void put_deltas(int64_t bit, uint64_t bits) const {
        const int64_t word = (bit + first_bit) >> 5;
        const int shift = (bit + first_bit) & 31;
        or_word(deltas, word, uint32_t(bits << shift), num_words);
        or_word(deltas, word + 1, uint32_t(bits << shift >> 32), num_words);
        if (shift) or_word(deltas, word + 2, uint32_t(bits >> (64 - shift)), num_words);
    }
};

// The lane's entries, `entry` of the step being the first. At most 8 lie within its chunk's columns: their deltas are
// collected in a register.
template <int BITS>
__device__ __forceinline__ void write_entries(const row_cursor &at, int64_t entry, const entry_target &target) {
    constexpr uint32_t MAX = (1 << BITS) - 1;
    const int first = __ffs(at.nonzeros) - 1;
    const int64_t gap = at.col + first - at.next;
    for (int64_t zeros = gap >> BITS; zeros; zeros--, entry++) {
        target.values[entry] = 0;
        target.put_deltas(entry * BITS, MAX);
    }
    uint16_t *values = target.values + entry;
    uint64_t deltas = 0;
    uint32_t skipped = uint32_t(gap) & MAX;
    int shift = 0;
#pragma unroll
    for (int k = 0; k < MACKO_CHUNK; k++) {
        const bool nonzero = at.nonzeros >> k & 1;
        if (!nonzero && (BITS > 2 || k < first || skipped < MAX || at.nonzeros >> k == 0)) {
            skipped += k > first;
            continue;
        }
        *values++ = nonzero ? value_at(at.chunk, k) : 0;
        deltas |= uint64_t(skipped) << shift;
        shift += BITS;
        skipped = 0;
    }
    target.put_deltas(entry * BITS, deltas);
}

template <int BITS>
__global__ void __launch_bounds__(THREADS, 2)
    write_rows(const uint16_t *w, int64_t rows, int64_t cols, const int64_t *row_ptr64, int64_t capacity,
               int32_t *row_ptr, uint16_t *values, uint32_t *deltas) {
    constexpr int BUFFER = WARP * MACKO_CHUNK, BUFFER_WORDS = BUFFER * BITS / 32 + 1;
    __shared__ uint16_t step_values[WARPS][BUFFER];
    __shared__ uint32_t step_deltas[WARPS][BUFFER_WORDS];
    const int64_t row = row_of_warp();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (row > rows) return;
    int64_t entry = row_ptr64[row];
    if (lane == 0) row_ptr[row] = int32_t(entry);
    if (row == rows) { // the padding
        if (entry + lane < capacity) values[entry + lane] = 0;
        return;
    }
    const int64_t num_words = capacity * BITS / 32;
    walk_row(dense_row(w, row, cols), cols, [&](const row_cursor &at) {
        const int64_t own = entries_of<BITS>(at), through = warp_inclusive_sum(own, lane);
        const int64_t entries = __shfl_sync(FULL_WARP, through, WARP - 1), word = entry * BITS >> 5;
        const int first_bit = int(entry * BITS & 31);
        if (entries > BUFFER) {
            const entry_target memory = {values + entry, deltas + word, first_bit, num_words - word};
            if (own) write_entries<BITS>(at, through - own, memory);
        } else {
            for (int i = lane; i < BUFFER_WORDS; i += WARP) step_deltas[warp][i] = 0;
            __syncwarp();
            const entry_target buffer = {step_values[warp], step_deltas[warp], first_bit, BUFFER_WORDS};
            if (own) write_entries<BITS>(at, through - own, buffer);
            __syncwarp();
            for (int i = lane; i < entries; i += WARP) values[entry + i] = step_values[warp][i];
            // The step before, other rows' steps and this one share words.
            const int end_bit = first_bit + int(entries) * BITS;
            for (int i = lane; i * 32 < end_bit; i += WARP) {
                if (i * 32 >= first_bit && i * 32 + 32 <= end_bit)
                    deltas[word + i] = step_deltas[warp][i];
                else
                    or_word(deltas, word + i, step_deltas[warp][i], num_words);
            }
            __syncwarp();
        }
        entry += entries;
    });
}

// What a lane has of a packed row: its chunk, the deltas of other rows zeroed, and where it stands.
template <int BITS>
struct packed_chunk {
    delta_word<BITS> deltas;
    uint4 values;
    int64_t chunk;  // index into the chunks of the matrix
    int begin, end; // entries of the chunk that are the row's
    int64_t next;   // first free column, counted from the chunk's first entry as if it were the row's
};

enum class load_what { DELTAS, ALL };

// Calls body(packed_chunk, next) for every 32 chunks of a row while it returns true; `next` is the first free column
// after them. row_ptr is good. The next 32 chunks are in flight meanwhile.
template <int BITS, typename Body>
__device__ __forceinline__ void walk_packed_row(const macko_matrix &m, int64_t start, int64_t stop, load_what load,
                                                const Body &body) {
    const auto load_chunk = [&](int64_t chunk) {
        packed_chunk<BITS> at = {0, make_uint4(0, 0, 0, 0), chunk, 0, 0, 0};
        if (chunk * MACKO_CHUNK >= stop) return at;
        at.begin = int(max(start - chunk * MACKO_CHUNK, int64_t(0)));
        at.end = int(min(stop - chunk * MACKO_CHUNK, int64_t(MACKO_CHUNK)));
        at.deltas = load_stream((const delta_word<BITS> *)m.deltas + chunk);
        if (load == load_what::ALL) at.values = load_stream((const uint4 *)m.values + chunk);
        return at;
    };
    int64_t next = -(start % MACKO_CHUNK);
    packed_chunk<BITS> ahead = load_chunk(start / MACKO_CHUNK + threadIdx.x % WARP);
    bool more = start < stop;
    for (int64_t entry = start / MACKO_CHUNK * MACKO_CHUNK; more && entry < stop; entry += WARP * MACKO_CHUNK) {
        packed_chunk<BITS> at = ahead;
        ahead = load_chunk(at.chunk + WARP);
        at.deltas = keep_deltas<BITS>(at.deltas, at.begin, at.end);
        const uint32_t own = chunk_offsets<BITS>(at.deltas).sum() + at.end;
        const uint32_t through = warp_inclusive_sum(own);
        at.next = next + through - own;
        next += __shfl_sync(FULL_WARP, through, WARP - 1);
        more = body(at, next);
    }
}

// A row's first fault of bounds, else its first stray zero; the same in every lane.
template <int BITS>
__device__ macko_fault fault_of_row(const macko_matrix &m, int64_t row, bool bounds_only) {
    const int64_t start = m.row_ptr[row], stop = m.row_ptr[row + 1];
    if (row == 0 && start) return {MACKO_ROW_PTR_START, 0, -1, start};
    if (stop < start) return {MACKO_ROW_PTR_FALLS, row + 1, -1, stop};
    if (stop > m.capacity) return {MACKO_ROW_PTR_END, row + 1, -1, stop};
    if (start < 0) return {MACKO_ROW_PTR_FALLS, row, -1, start}; // an earlier row says so too
    macko_fault bounds = {MACKO_OK, 0, -1, 0}, stray = bounds;
    const load_what load = bounds_only ? load_what::DELTAS : load_what::ALL;
    walk_packed_row<BITS>(m, start, stop, load, [&](const packed_chunk<BITS> &at, int64_t) {
        macko_fault own_bounds = {MACKO_OK, 0, -1, 0}, own_stray = own_bounds;
        const uint32_t zeros = bounds_only ? 0 : ~nonzero_mask(at.values);
        int64_t col = at.next - 1;
#pragma unroll
        for (int k = 0; k < MACKO_CHUNK; k++) {
            const int64_t entry = at.chunk * MACKO_CHUNK + k;
            const int delta = delta_at<BITS>(at.deltas, k);
            col += delta + 1;
            if (k < at.begin || k >= at.end) continue;
            if (col >= m.cols && !own_bounds.kind) own_bounds = {MACKO_COLUMN_END, row, entry, col};
            if ((zeros >> k & 1) && !own_stray.kind &&
                (delta != (1 << BITS) - 1 || entry + 1 == stop || value_at(at.values, k)))
                own_stray = {MACKO_STRAY_ZERO, row, entry, delta};
        }
        const auto first_of_lanes = [](macko_fault &found, const macko_fault &own) {
            const uint32_t lanes = __ballot_sync(FULL_WARP, own.kind != 0);
            if (!lanes || found.kind) return;
            const int lane = __ffs(lanes) - 1;
            found = {__shfl_sync(FULL_WARP, own.kind, lane), __shfl_sync(FULL_WARP, own.row, lane),
                     __shfl_sync(FULL_WARP, own.entry, lane), __shfl_sync(FULL_WARP, own.found, lane)};
        };
        first_of_lanes(bounds, own_bounds);
        first_of_lanes(stray, own_stray);
        return bounds.kind == 0;
    });
    return bounds.kind ? bounds : stray;
}

// The lowest faulty row goes to fault->kind, which held ~0.
template <int BITS>
__global__ void __launch_bounds__(THREADS) find_faulty_row(macko_matrix m, bool bounds_only, macko_fault *fault) {
    const int64_t row = row_of_warp();
    if (row >= m.rows) return;
    if (fault_of_row<BITS>(m, row, bounds_only).kind && threadIdx.x % WARP == 0)
        atomicMin((unsigned long long *)&fault->kind, (unsigned long long)row);
}

// One warp: what is wrong with that row, or, where every row is right, with the end of the matrix.
template <int BITS>
__global__ void __launch_bounds__(WARP) describe_fault(macko_matrix m, bool bounds_only, macko_fault *fault) {
    macko_fault found = {MACKO_OK, 0, -1, 0};
    const int64_t row = fault->kind;
    __syncwarp();
    if (row >= 0) {
        found = fault_of_row<BITS>(m, row, bounds_only);
    } else if (!bounds_only) {
        const int64_t stored = m.row_ptr[m.rows];
        if (m.rows == 0 && stored)
            found = {MACKO_ROW_PTR_START, 0, -1, stored};
        else if (m.capacity != ceil_div(stored, MACKO_CHUNK) * MACKO_CHUNK)
            found = {MACKO_ROW_PTR_END, m.rows, -1, stored};
        for (int64_t entry = stored; !found.kind && entry < m.capacity; entry++) {
            const uint32_t value = ((const uint16_t *)m.values)[entry];
            const uint32_t delta =
                delta_at<BITS>(((const delta_word<BITS> *)m.deltas)[entry / MACKO_CHUNK], int(entry % MACKO_CHUNK));
            if (value || delta) found = {MACKO_PADDING, m.rows, entry, value ? value : delta};
        }
    }
    if (threadIdx.x == 0) *fault = found;
}

constexpr int WINDOW = 1024; // columns of a row that a warp assembles in shared memory at a time

// A row is built window by window: zeros, then the entries that fall into it, then 16-byte stores.
template <int BITS>
__global__ void __launch_bounds__(THREADS) unpack_rows(macko_matrix m, uint16_t *w) {
    __shared__ uint4 windows[WARPS][WINDOW / MACKO_CHUNK];
    const int64_t row = row_of_warp();
    if (row >= m.rows) return;
    const int lane = threadIdx.x % WARP;
    uint4 *window = windows[threadIdx.x / WARP];
    const dense_row dense(w, row, m.cols);
    int64_t window_col = -dense.skew;

    const auto clear_window = [&](uint32_t fill) {
        for (int i = lane; i < WINDOW / MACKO_CHUNK; i += WARP) window[i] = make_uint4(fill, fill, fill, fill);
        __syncwarp();
    };
    const auto store_window = [&] {
        __syncwarp();
        for (int i = lane; i < WINDOW / MACKO_CHUNK; i += WARP) {
            const int64_t col = window_col + i * MACKO_CHUNK;
            const uint4 chunk = window[i];
            uint16_t *out = const_cast<uint16_t *>(dense.begin);
            if (col >= 0 && col + MACKO_CHUNK <= m.cols) {
                *(uint4 *)(out + col) = chunk;
            } else {
#pragma unroll
                for (int k = 0; k < MACKO_CHUNK; k++)
                    if (col + k >= 0 && col + k < m.cols) out[col + k] = value_at(chunk, k);
            }
        }
        __syncwarp();
        window_col += WINDOW;
    };

    const int64_t start = m.row_ptr[row], stop = m.row_ptr[row + 1];
    bool good = start >= 0 && start <= stop && stop <= m.capacity;
    clear_window(0);
    if (good)
        walk_packed_row<BITS>(m, start, stop, load_what::ALL, [&](const packed_chunk<BITS> &at, int64_t next) {
            good = next <= m.cols;
            if (!good) return false;
            const chunk_offsets<BITS> offsets(at.deltas);
            while (true) {
                const uint32_t base = uint32_t(at.next - window_col);
#pragma unroll
                for (int k = 0; k < MACKO_CHUNK; k++) {
                    const uint32_t in_window = offsets.at(k, base, 1);
                    if (in_window < WINDOW && at.begin <= k && k < at.end)
                        ((uint16_t *)window)[in_window] = value_at(at.values, k);
                }
                if (next < window_col + WINDOW) return true;
                store_window();
                clear_window(0);
            }
        });
    if (!good) { // all of it is in doubt
        window_col = -dense.skew;
        clear_window(0x7fff7fffu);
    }
    while (window_col < m.cols) {
        store_window();
        if (good && window_col < m.cols) clear_window(0);
    }
}

// launch(width) with the delta width as a constant.
template <typename Launch>
cudaError_t for_delta_bits(int delta_bits, const Launch &launch) {
    return for_constant<2, 4, 8>(delta_bits, [&](auto bits) {
        launch(bits);
        return cudaGetLastError();
    });
}

} // namespace

cudaError_t macko_pack_count_cuda(const void *w, int delta_bits, int64_t rows, int64_t cols, int64_t *row_ptr,
                                  int64_t *stored, cudaStream_t stream) {
    const auto count = [&](auto kernel) {
        if (rows) kernel<<<blocks_for(rows), THREADS, 0, stream>>>((const uint16_t *)w, rows, cols, row_ptr);
        scan_rows<<<delta_bits ? 1 : 3, SCAN_THREADS, 0, stream>>>(rows, row_ptr, stored);
    };
    if (delta_bits) return for_delta_bits(delta_bits, [&](auto bits) { count(count_rows<bits>); });
    count(count_rows<4, 2, 8>);
    return cudaGetLastError();
}

cudaError_t macko_pack_write_cuda(const void *w, int delta_bits, int64_t rows, int64_t cols, const int64_t *row_ptr64,
                                  int64_t capacity, int32_t *row_ptr, void *values, uint8_t *deltas,
                                  cudaStream_t stream) {
    return for_delta_bits(delta_bits, [&](auto bits) {
        if (capacity) cudaMemsetAsync(deltas, 0, capacity * delta_bits / 8, stream);
        write_rows<bits><<<blocks_for(rows + 1), THREADS, 0, stream>>>(
            (const uint16_t *)w, rows, cols, row_ptr64, capacity, row_ptr, (uint16_t *)values, (uint32_t *)deltas);
    });
}

cudaError_t macko_check_cuda(const macko_matrix *m, int bounds_only, macko_fault *fault, cudaStream_t stream) {
    return for_delta_bits(m->delta_bits, [&](auto bits) {
        cudaMemsetAsync(fault, 0xff, sizeof *fault, stream);
        if (m->rows) find_faulty_row<bits><<<blocks_for(m->rows), THREADS, 0, stream>>>(*m, bounds_only, fault);
        describe_fault<bits><<<1, WARP, 0, stream>>>(*m, bounds_only, fault);
    });
}

cudaError_t macko_unpack_cuda(const macko_matrix *m, void *w, cudaStream_t stream) {
    return for_delta_bits(m->delta_bits, [&](auto bits) {
        if (m->rows) unpack_rows<bits><<<blocks_for(m->rows), THREADS, 0, stream>>>(*m, (uint16_t *)w);
    });
}
