// The sell layout made from the canonical format on the device.
#include "../core/scan.cuh"
#include "stream.cuh"

using namespace macko;

namespace {

constexpr int WARPS = 8; // of the blocks whose warps own a row each

__device__ __forceinline__ int delta_at(const macko_matrix &m, int64_t entry) {
    const int64_t bit = entry * m.delta_bits;
    return m.deltas[bit >> 3] >> (bit & 7) & ((1 << m.delta_bits) - 1);
}

// A non-zero of the canonical format, as a lane of walk_row sees it.
struct sell_entry {
    bool stored; // false: an explicit zero, or after the row's end
    uint16_t value;
    int col, gap; // columns skipped since the last non-zero of the row, explicit zeros among them
};

// Calls visit(sell_entry) with 32 consecutive entries at a time, one a lane. Returns the columns that the row reaches.
template <typename Visit>
__device__ __forceinline__ int64_t walk_row(const macko_matrix &m, int64_t start, int64_t stop, int lane, Visit visit) {
    const uint16_t *values = (const uint16_t *)m.values;
    int64_t reached = 0; // columns passed by the entries before this batch
    int next = 0;        // column after the last non-zero before this batch
    for (int64_t batch = start; batch < stop; batch += WARP) {
        const bool inside = batch + lane < stop;
        const uint16_t value = inside ? values[batch + lane] : 0;
        const int passed = warp_inclusive_sum(inside ? delta_at(m, batch + lane) + 1 : 0, lane);
        const int col = (int)reached + passed - 1;
        const bool stored = value & 0x7fff;
        const unsigned before = __ballot_sync(FULL_WARP, stored) & ((1u << lane) - 1);
        const int previous = __shfl_sync(FULL_WARP, col, before ? 31 - __clz(before) : 0);
        visit(sell_entry{stored, value, col, col - (before ? previous + 1 : next)});
        const unsigned all = __ballot_sync(FULL_WARP, stored);
        const int last = __shfl_sync(FULL_WARP, col, all ? 31 - __clz(all) : 0);
        if (all) next = last + 1;
        reached += __shfl_sync(FULL_WARP, passed, WARP - 1);
    }
    return reached;
}

// A warp owns a row. The gap widths from 2 bits on, all at once.
__global__ void count_entries(macko_matrix m, int32_t *counts, macko_sell_totals *totals) {
    const int64_t row = blockIdx.x * (int64_t)WARPS + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= m.rows) return;
    const int64_t start = m.row_ptr[row], stop = m.row_ptr[row + 1];
    const bool sound = start >= 0 && start <= stop && stop <= m.capacity && (row > 0 || start == 0);
    int count[MACKO_SELL_GAP_WIDTHS] = {};
    const int64_t reached = walk_row(m, start, sound ? stop : start, lane, [&](sell_entry e) {
        for (int width = 0; width < MACKO_SELL_GAP_WIDTHS; width++)
            if (e.stored) count[width] += 1 + (e.gap >> (MACKO_SELL_MIN_GAP_BITS + width));
    });
    for (int width = 0; width < MACKO_SELL_GAP_WIDTHS; width++) {
        const int total = __reduce_add_sync(FULL_WARP, count[width]);
        if (lane) continue;
        counts[width * m.rows + row] = total;
        atomicAdd((unsigned long long *)&totals->stored[width], (unsigned long long)total);
    }
    if (lane == 0 && (!sound || reached > m.cols)) atomicAdd((unsigned long long *)&totals->faults, 1ull);
}

// A warp owns a row and counts the rows of its range of range_rows that come before it: range_rows compares a row, 0.1 ms at
// 16384 rows, and stable. Most entries first in one range, fewest in the next: rows about its end are alike.
__global__ void rank_rows(const int32_t *counts, int rows, int range_rows, int32_t *perm) {
    const int row = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const int own = counts[row], range = row / range_rows, first = range * range_rows;
    const int stop = first + min(range_rows, rows - first);
    int rank = 0;
    for (int other = first + lane; other < stop; other += WARP) {
        const int count = counts[other];
        rank += count == own ? other < row : (count > own) == (range % 2 == 0);
    }
    rank = __reduce_add_sync(FULL_WARP, rank);
    if (lane == 0) perm[first + rank] = row;
}

__device__ __forceinline__ int steps_of(int count) {
    return (int)ceil_div(count, MACKO_SELL_STEP);
}

/*
 * The cut into blocks of equal work. Rows lie on a line, each as long as its steps (plus a little for writing its
 * result); num_blocks equal lengths of the line are the blocks, rounded to whole rows. A block is padded to its longest
 * row, so where the count changes from one row to the next the line has a gap: as long as a block where it does by 30 %,
 * less where by less. So rows of very different length do not share a block, whatever the matrix. A row longer
 * than a block counts as one block.
 */
struct sell_cut {
    const int32_t *counts, *perm;
    int64_t *line; // [rows] where each row begins
    int64_t rows, extra, target;
    static constexpr int SCALE = 64; // parts of a step, so that small gaps count

    __device__ int count(int64_t row) const {
        return counts[perm[row]];
    }
    __device__ int64_t length(int64_t row) const {
        const int64_t whole = (steps_of(count(row)) + extra) * SCALE;
        return whole < target ? whole : target;
    }
    __device__ int64_t gap_before(int64_t row) const {
        if (row == 0) return 0;
        const float before = steps_of(count(row - 1)) + extra, after = steps_of(count(row)) + extra;
        const float gap = target * fminf(1, 2 * fabsf(log2f(before / after)));
        return (int64_t)gap;
    }
    // The first row of the block that begins at a point of the line.
    __device__ int64_t row_at(int64_t point, int64_t end) const {
        int64_t low = 0, high = rows; // the first row that begins at the point or after it
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (line[middle] < point)
                low = middle + 1;
            else
                high = middle;
        }
        if (low == 0) return 0;
        const int64_t stop = low == rows ? end : line[low] - gap_before(low); // where row low - 1 ends
        if (point >= stop) return low;
        return point - line[low - 1] < stop - point ? low - 1 : low;
    }
};

// One thread block. The rows of the blocks, before move_borders. line: scratch.
__global__ void cut_rows(const int32_t *counts, const int32_t *perm, int64_t rows, int num_blocks, int64_t *line,
                         macko_sell_block *blocks) {
    int64_t steps = 0, total;
    for (int64_t row = threadIdx.x; row < rows; row += SCAN_THREADS) steps += steps_of(counts[row]);
    block_exclusive_sum(steps, &steps);
    sell_cut cut{counts, perm, line, rows, 0, 0};
    cut.extra = 1 + steps / ((int64_t)num_blocks * 1024); // so that no block has more than some 2048 rows
    cut.target = (steps + rows * cut.extra) * sell_cut::SCALE / num_blocks;
    int64_t end = 0;
    for (int64_t batch = 0; batch < rows; batch += SCAN_THREADS) {
        const int64_t row = batch + threadIdx.x;
        const bool inside = row < rows;
        const int64_t gap = inside ? cut.gap_before(row) : 0;
        const int64_t begin = end + block_exclusive_sum(inside ? gap + cut.length(row) : 0, &total) + gap;
        if (inside) line[row] = begin;
        end += total;
    }
    __syncthreads();
    for (int block = threadIdx.x; block < num_blocks; block += SCAN_THREADS) {
        const int64_t begin = cut.row_at(end / num_blocks * block, end);
        const int64_t stop = block + 1 == num_blocks ? rows : cut.row_at(end / num_blocks * (block + 1), end);
        macko_sell_block b = {};
        b.row = (int32_t)begin;
        b.rows = (int32_t)(stop - begin);
        blocks[block] = b;
    }
}

constexpr int BLOCKS_AT_ONCE = 8;     // blocks that move_borders takes at a time
constexpr int SHIFT = 2;              // rows that it moves a border by, at most
constexpr int SHIFTS = 2 * SHIFT + 1; // from -SHIFT to SHIFT rows

struct sell_chunks {
    float cost;
    int chunks;
};

__device__ __forceinline__ macko_sell_block block_of(int row, int rows, int steps, int chunks) {
    macko_sell_block b = {};
    b.row = row;
    b.rows = rows;
    b.chunks = chunks;
    b.steps = chunks ? (steps + chunks - 1) / chunks : 1;
    b.long_chunks = chunks - (b.steps * chunks - steps);
    return b;
}

/*
 * The best number of chunks for `rows` rows of up to `steps` steps; a warp tries all of them, one a lane. INFINITY where
 * none is allowed. The cost is in slots, a mix: of those stored, holes in the first two stages too (the head may hold them),
 * for which the GPU waits; and of warps times the steps of the slowest one, for which the block does, as stages of few slots
 * take their time, too. By the slots alone chunks get long and the last rounds have few warps: much slower (H200, 2026-11).
 * A group's start and end cost 0.3.
 */
__device__ __forceinline__ sell_chunks best_chunks(int rows, int steps, int warps, int lane) {
    if (!rows || !steps) return {0, 0};
    const int least = (steps + MACKO_SELL_MAX_CHUNK - 1) / MACKO_SELL_MAX_CHUNK,
              most = min(steps, MACKO_SELL_MAX_SUMS / (rows | 1));
    sell_chunks best = {INFINITY, least};
    for (int chunks = least + lane; chunks <= most; chunks += WARP) {
        const macko_sell_block b = block_of(0, rows, steps, chunks);
        const int groups = macko_sell_groups(&b), long_groups = macko_sell_long_groups(&b);
        const int rounds = small_quotient(groups + warps - 1, warps);
        const int long_rounds = small_quotient(long_groups + warps - 1, warps);
        // macko_sell_slots_before of all stages, of one and of two: warps go in pairs, so an odd group takes the slots of two.
        const auto in_pairs = [](int of_groups) { return (of_groups + 1) & ~1; };
        const int slots = in_pairs(groups) * (b.steps - 1) + in_pairs(long_groups);
        const int with_two = max(groups - warps, b.steps > 2 ? groups : (b.steps - 1) * long_groups);
        const int one = min(warps, in_pairs(groups)), two = min(warps, in_pairs(with_two));
        const float stored = slots + (warps - one) + 0.5f * (warps - two) + 0.3f * groups;
        const float slowest = rounds * (b.steps - 1) + long_rounds + 0.3f * rounds;
        const float cost = 0.4f * stored + 0.6f * warps * slowest;
        if (cost < best.cost) best = {cost, chunks};
    }
    const unsigned cost = __reduce_min_sync(FULL_WARP, __float_as_uint(best.cost)); // in order, as none is negative
    const int chunks = __float_as_uint(best.cost) == cost ? best.chunks : INT32_MAX;
    return {__uint_as_float(cost), __reduce_min_sync(FULL_WARP, chunks)};
}

/*
 * A thread block owns BLOCKS_AT_ONCE blocks: moves the borders between them by up to SHIFT rows, and chooses all chunks. How well
 * chunks fill the lanes depends on the number of rows (48 rows of 129 steps leave 0.3 % of the slots empty, 47 rows 2.4 %),
 * so of all ways to move the borders it takes the one with the least sum of costs and of their 64th powers: of few slots
 * altogether, and above all in the largest blocks, which end last. All blocks at once would have hardly fewer slots.
 */
__global__ void move_borders(const int32_t *counts, const int32_t *perm, int all_rows, int range_rows, int warps,
                             int num_blocks, macko_sell_block *blocks) {
    // By the shifts of a block's two borders, its first row and the first row after it:
    __shared__ int steps[BLOCKS_AT_ONCE][SHIFTS][SHIFTS]; // of the longest row, -1 where there cannot be such a block
    __shared__ sell_chunks best[BLOCKS_AT_ONCE][SHIFTS][SHIFTS];
    __shared__ int shifts[BLOCKS_AT_ONCE]
                         [SHIFTS];            // best shift of the first row, by that of the first row after the block
    __shared__ int taken[BLOCKS_AT_ONCE + 1]; // shifts of the first rows, and of the first row after all blocks
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, first = blockIdx.x * BLOCKS_AT_ONCE;
    const int count = min(BLOCKS_AT_ONCE, num_blocks - first);
    for (int i = threadIdx.x; i < count * SHIFTS * SHIFTS; i += SCAN_THREADS) {
        const int block = i / (SHIFTS * SHIFTS), from = i / SHIFTS % SHIFTS, to = i % SHIFTS;
        const macko_sell_block b = blocks[first + block];
        const int begin = b.row + from - SHIFT, stop = b.row + b.rows + to - SHIFT;
        // The first border and the last one are those of other thread blocks, too.
        const bool fixed = (block == 0 && from != SHIFT) || (block + 1 == count && to != SHIFT);
        const auto count_at = [&](int row) { return counts[perm[row]]; };
        int longest = 0; // which is at an end of the block or of a range
        if (fixed || begin < 0 || begin > stop || stop > all_rows) {
            longest = -MACKO_SELL_STEP;
        } else if (begin < stop) {
            longest = max(count_at(begin), count_at(stop - 1));
            for (int64_t range = (begin / range_rows + 1) * (int64_t)range_rows; range < stop; range += range_rows)
                longest = max(longest, max(count_at(range - 1), count_at(range)));
        }
        steps[block][from][to] = longest < 0 ? -1 : steps_of(longest);
    }
    __syncthreads();
    // A warp takes one number of rows of a block: once for each number of steps in round, mostly once.
    for (int i = warp; i < count * (2 * SHIFTS - 1); i += SCAN_THREADS / WARP) {
        const int block = i / (2 * SHIFTS - 1), more = i % (2 * SHIFTS - 1) - (SHIFTS - 1);
        const int rows = blocks[first + block].rows + more;
        sell_chunks chunks = {INFINITY, 0};
        int of_steps = -1;
        for (int from = max(0, -more); from < min(SHIFTS, SHIFTS - more); from++) {
            const int own_steps = steps[block][from][from + more];
            if (own_steps != of_steps)
                chunks = own_steps < 0 ? sell_chunks{INFINITY, 0} : best_chunks(rows, own_steps, warps, lane);
            of_steps = own_steps;
            if (lane == 0) best[block][from][from + more] = chunks;
        }
    }
    __syncthreads();
    if (warp) return;
    float most = 0; // costs are shares of it
    for (int block = 0; block < count; block++) most = fmaxf(most, best[block][SHIFT][SHIFT].cost);
    const int to = min(lane, SHIFTS - 1);
    float least = lane == SHIFT ? 0 : INFINITY; // cost of the blocks so far, if the border after them moves by `to`
    for (int block = 0; block < count; block++) {
        float sum = INFINITY;
        int shift = SHIFT; // stays where there is no better one
        for (int i = 0; i < SHIFTS; i++) {
            const int from = (SHIFT + i) % SHIFTS; // the first of equals: no shift
            const float cost = best[block][from][to].cost * (1 / most);
            float power = cost;
            for (int twice = 0; twice < 6; twice++) power *= power;
            const float with = __shfl_sync(FULL_WARP, least, from) + (power + cost);
            if (with < sum) sum = with, shift = from;
        }
        least = sum;
        if (lane < SHIFTS) shifts[block][lane] = shift;
    }
    __syncwarp();
    if (lane == 0) {
        taken[count] = SHIFT;
        for (int block = count - 1; block >= 0; block--) taken[block] = shifts[block][taken[block + 1]];
    }
    __syncwarp();
    if (lane >= count) return;
    const macko_sell_block b = blocks[first + lane];
    const int from = taken[lane], end = taken[lane + 1];
    macko_sell_block moved =
        block_of(b.row + from - SHIFT, b.rows + end - from, steps[lane][from][end], best[lane][from][end].chunks);
    moved.stages = moved.chunks ? macko_sell_steps_of_warp(&moved, warps, 0) : 0;
    blocks[first + lane] = moved;
}

// blockIdx.x is a block, whose rows come into the order of the matrix.
__global__ void order_rows(const macko_sell_block *blocks, const int32_t *perm, int64_t *ordered) {
    const int first = blocks[blockIdx.x].row, rows = blocks[blockIdx.x].rows;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const int row = perm[first + i];
        int rank = 0;
        for (int other = 0; other < rows; other++) rank += perm[first + other] < row;
        ordered[first + rank] = row;
    }
}

// One thread block. starts: first entry of each row of the layout in scratch.
__global__ void place_rows(const int32_t *counts, const int64_t *ordered, int64_t rows, int32_t *perm,
                           int64_t *starts) {
    int64_t entries = 0, total;
    for (int64_t batch = 0; batch < rows; batch += SCAN_THREADS) {
        const int64_t at = batch + threadIdx.x, row = at < rows ? ordered[at] : 0;
        const int64_t first = entries + block_exclusive_sum(at < rows ? counts[row] : 0, &total);
        entries += total;
        if (at >= rows) continue;
        perm[at] = (int32_t)row;
        starts[at] = first;
    }
    if (threadIdx.x == 0) starts[rows] = entries;
}

// A warp owns a row of the layout and counts the rows of the same panel that come before it: rows^2 compares again.
__global__ void order_panels(const int32_t *perm, int rows, int panel_rows, int32_t *order) {
    const int at = blockIdx.x * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (at >= rows) return;
    const int first = perm[at] / panel_rows * panel_rows;
    int rank = 0;
    for (int other = lane; other < at; other += WARP) {
        const int row = perm[other];
        rank += row >= first && row - first < panel_rows;
    }
    rank = __reduce_add_sync(FULL_WARP, rank);
    if (lane == 0) order[first + rank] = at;
}

// One thread block. A stage joins the head if the holes of blocks that do not fill it are at most 1/32 of all slots; the first
// one also if they are at most a quarter of it: where blocks have one or two stages, a product without it takes clearly longer.
__global__ void place_blocks(int warps, int num_blocks, int most_head, macko_sell_block *blocks,
                             macko_sell_totals *totals) {
    int64_t held[MACKO_SELL_MAX_HEAD + 1] = {}, slots = 0; // slots of the first 0..4 stages
    int sums = 0;
    for (int block = threadIdx.x; block < num_blocks; block += SCAN_THREADS) {
        sums = max(sums, blocks[block].chunks * (blocks[block].rows | 1));
        slots += macko_sell_slots_before(&blocks[block], warps, INT32_MAX);
        for (int stages = 1; stages <= MACKO_SELL_MAX_HEAD; stages++)
            held[stages] += macko_sell_slots_before(&blocks[block], warps, stages);
    }
    block_exclusive_sum(slots, &slots);
    if (threadIdx.x == 0) totals->sums = 0;
    __syncthreads();
    if (sums > MACKO_SELL_MAX_SUMS) atomicMax((unsigned long long *)&totals->sums, (unsigned long long)sums);
    int head = 0;
    for (int stages = 1; stages <= MACKO_SELL_MAX_HEAD; stages++) {
        block_exclusive_sum(held[stages], &held[stages]);
        const int64_t fixed = macko_sell_head_slot(0, num_blocks, warps, stages);
        const int64_t spare = max(slots / 32, stages == 1 ? fixed / 4 : 0);
        if (stages <= most_head && fixed - held[stages] <= spare) head = stages;
    }
    int64_t slot = 0, group = 0, total;
    for (int batch = 0; batch < num_blocks; batch += SCAN_THREADS) {
        const int block = batch + threadIdx.x;
        const bool inside = block < num_blocks;
        const macko_sell_block b = blocks[inside ? block : 0];
        const int groups = max(0, macko_sell_groups(&b) - warps);
        const int in_tail = macko_sell_slots_before(&b, warps, INT32_MAX) - macko_sell_slots_before(&b, warps, head);
        const int64_t first_slot = slot + block_exclusive_sum(inside ? in_tail : 0, &total);
        slot += total;
        const int64_t first_group = group + block_exclusive_sum(inside ? groups : 0, &total);
        group += total;
        if (!inside) continue;
        blocks[block].slot = (int32_t)first_slot;
        blocks[block].group = (int32_t)first_group;
    }
    if (threadIdx.x) return;
    totals->slots = macko_sell_head_slot(0, num_blocks, warps, head) + slot;
    totals->groups = macko_sell_first_base(num_blocks, warps, 0) / MACKO_SELL_LANES + group;
    totals->head = head;
}

// A warp owns a row: its entries at this gap width, as values and columns.
__global__ void expand_rows(macko_matrix m, macko_sell_matrix s, const int64_t *starts, uint16_t *values,
                            uint16_t *columns) {
    const int64_t sorted = blockIdx.x * (int64_t)WARPS + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (sorted >= s.rows) return;
    const int row = s.perm[sorted];
    int64_t written = starts[sorted];
    walk_row(m, m.row_ptr[row], m.row_ptr[row + 1], lane, [&](sell_entry e) {
        const int zeros = e.stored ? e.gap >> s.gap_bits : 0, entries = e.stored ? zeros + 1 : 0;
        const int last = warp_inclusive_sum(entries, lane);
        int64_t entry = written + last - entries;
        for (int zero = 1; zero <= zeros; zero++, entry++) {
            values[entry] = 0;
            columns[entry] = (uint16_t)(e.col - e.gap - 1 + (zero << s.gap_bits));
        }
        if (e.stored) {
            values[entry] = e.value;
            columns[entry] = (uint16_t)e.col;
        }
        written += __shfl_sync(FULL_WARP, last, WARP - 1);
    });
}

// Where byte j of the fields and its half of a step lie: entry of field `a` of pair j.
__device__ __forceinline__ int entry_of(int field, int pair) {
    return (field >> 1) * 8 + 2 * pair + (field & 1);
}

__device__ __forceinline__ int nibble_shift(int pair) {
    return 4 * (pair == 1 ? 2 : pair == 2 ? 1 : pair);
}

__device__ __forceinline__ void write_gaps(const int (&gaps)[MACKO_SELL_STEP], int gap_bits, int lane, uint8_t *at) {
    uint32_t fields[4];
    for (int pair = 0; pair < 4; pair++) {
        fields[pair] = 0;
        for (int field = 0; field < 4; field++) fields[pair] |= gaps[entry_of(field, pair)] << (gap_bits * field);
    }
    for (int plane = 0; plane < gap_bits / 2; plane++, at += MACKO_SELL_LANES * 4) {
        uint32_t word = 0;
        for (int pair = 0; pair < 4; pair++) word |= (fields[pair] >> (8 * plane) & 0xff) << (8 * pair);
        ((uint32_t *)at)[lane] = word;
    }
    uint32_t nibbles = 0;
    for (int pair = 0; pair < 4; pair++) nibbles |= (fields[pair] >> (8 * (gap_bits / 2))) << nibble_shift(pair);
    if (gap_bits % 2) ((uint16_t *)at)[lane] = (uint16_t)nibbles;
}

// blockIdx.x is the block of the layout, whose groups are shared by the warps of gridDim.y thread blocks.
__global__ void write_slots(macko_sell_matrix s, const int64_t *starts, const uint16_t *values, const uint16_t *columns,
                            uint8_t *data, uint16_t *bases) {
    const macko_sell_block b = s.blocks[blockIdx.x];
    const int lane = threadIdx.x % WARP, slot_bytes = macko_sell_slot_bytes(s.gap_bits);
    const int groups = max(macko_sell_groups(&b), s.warps), long_groups = macko_sell_long_groups(&b);
    sell_block_slots block_slots;
    block_slots.find(s, b, blockIdx.x);
    for (int group = blockIdx.y * WARPS + threadIdx.x / WARP; group < groups; group += gridDim.y * WARPS) {
        const int task = group * MACKO_SELL_LANES + lane, warp = group % s.warps, round = group / s.warps;
        const bool owned = task < b.rows * b.chunks;
        const int chunk = owned ? task / b.rows : 0, sorted = b.row + (owned ? task - chunk * b.rows : 0);
        // Entries of the chunk: [entry, stop) of the scratch; the row begins at `first`.
        const int64_t first = owned ? starts[sorted] : 0;
        const int64_t entry = first + (int64_t)macko_sell_chunk_start(&b, chunk) * MACKO_SELL_STEP;
        const int64_t chunk_stop = first + (int64_t)macko_sell_chunk_start(&b, chunk + 1) * MACKO_SELL_STEP;
        const int64_t stop = owned ? min(starts[sorted + 1], chunk_stop) : entry;
        int next = entry >= stop ? (int)s.cols : entry > first ? columns[entry - 1] + 1 : 0;
        bases[macko_sell_base(&b, blockIdx.x, s.num_blocks, s.warps, group) + lane] = (uint16_t)next;

        // The stages of this group come after those of the warp's earlier groups.
        const int stage =
            round * (b.steps - 1) + macko_sell_min(round, macko_sell_groups_of_warp(long_groups, s.warps, warp));
        int steps = group < macko_sell_groups(&b) ? b.steps - (group >= long_groups) : 0;
        // The last group of a warp also fills the rest of the head, and of its slots beside the other warp of the pair.
        if (group + s.warps >= groups)
            steps = max(max(s.head, macko_sell_steps_of_warp(&b, s.warps, warp & ~1)) - stage, steps);
        for (int step = 0; step < steps; step++) {
            uint16_t kept[MACKO_SELL_STEP];
            int gaps[MACKO_SELL_STEP];
            for (int i = 0; i < MACKO_SELL_STEP; i++) {
                const int64_t at = entry + step * MACKO_SELL_STEP + i;
                const bool inside = at < stop;
                kept[i] = inside ? values[at] : 0;
                gaps[i] = inside ? columns[at] - next : 0;
                next += gaps[i] + 1;
            }
            uint8_t *slot = data + (uint64_t)block_slots.slot(s, stage + step, warp) * slot_bytes;
            for (int half = 0; half < 2; half++) {
                uint4 packed;
                uint32_t *words = &packed.x;
                for (int i = 0; i < 4; i++)
                    words[i] = kept[half * 8 + 2 * i] | (uint32_t)kept[half * 8 + 2 * i + 1] << 16;
                ((uint4 *)slot)[half * MACKO_SELL_LANES + lane] = packed;
            }
            write_gaps(gaps, s.gap_bits, lane, slot + MACKO_SELL_LANES * MACKO_SELL_STEP * 2);
        }
    }
}

} // namespace

cudaError_t macko_sell_device_cuda(macko_sell_device *device) {
    device_info facts;
    const cudaError_t error = current_device(&facts);
    if (!error) *device = {facts.num_sms, facts.shared_per_sm, facts.shared_bytes};
    return error;
}

cudaError_t macko_sell_count_cuda(const macko_matrix *m, int32_t *counts, macko_sell_totals *totals,
                                  cudaStream_t stream) {
    cudaMemsetAsync(totals, 0, sizeof *totals, stream);
    if (m->rows) count_entries<<<ceil_div(m->rows, WARPS), WARPS * WARP, 0, stream>>>(*m, counts, totals);
    return cudaGetLastError();
}

cudaError_t macko_sell_plan_cuda(const int32_t *counts, int64_t rows, int64_t range_rows, int64_t panel_rows, int warps,
                                 int num_blocks, int32_t *perm, int32_t *order, int64_t *starts, int64_t *line,
                                 macko_sell_block *blocks, macko_sell_totals *totals, cudaStream_t stream) {
    if (rows) rank_rows<<<ceil_div(rows, WARPS), WARPS * WARP, 0, stream>>>(counts, (int)rows, (int)range_rows, perm);
    cut_rows<<<1, SCAN_THREADS, 0, stream>>>(counts, perm, rows, num_blocks, line, blocks);
    move_borders<<<ceil_div(num_blocks, BLOCKS_AT_ONCE), SCAN_THREADS, 0, stream>>>(
        counts, perm, (int)rows, (int)range_rows, warps, num_blocks, blocks);
    order_rows<<<num_blocks, WARPS * WARP, 0, stream>>>(blocks, perm, line);
    place_rows<<<1, SCAN_THREADS, 0, stream>>>(counts, line, rows, perm, starts);
    if (rows) order_panels<<<ceil_div(rows, WARPS), WARPS * WARP, 0, stream>>>(perm, (int)rows, (int)panel_rows, order);
    const int most_head = macko_knob_number(MACKO_KNOB_HEAD, MACKO_SELL_MAX_HEAD);
    place_blocks<<<1, SCAN_THREADS, 0, stream>>>(warps, num_blocks, most_head, blocks, totals);
    return cudaGetLastError();
}

cudaError_t macko_sell_write_cuda(const macko_matrix *m, const macko_sell_matrix *s, const int64_t *starts,
                                  uint16_t *values, uint16_t *columns, uint8_t *data, uint16_t *bases,
                                  cudaStream_t stream) {
    if (s->rows) expand_rows<<<ceil_div(s->rows, WARPS), WARPS * WARP, 0, stream>>>(*m, *s, starts, values, columns);
    write_slots<<<dim3(s->num_blocks, 8), WARPS * WARP, 0, stream>>>(*s, starts, values, columns, data, bases);
    return cudaGetLastError();
}
