// Packing and unpacking of EC-CSR on CUDA. The bytes are those of pack_cpu.c: what decides them is shared, in plan.h.
// A packing runs once a weight, so the kernels are as plain as the time allows: a thread walks a row or a pair of rows.
#include "../../csrc/core/cuda.cuh"
#include "plan.h"

using namespace macko;

namespace {

constexpr int THREADS = 256;
constexpr int MAX_PAIRS = MACKO_EC_TILE / 2;

__global__ void count_columns(const uint16_t *w, int64_t rows, int64_t cols, int rows_a_block, int32_t *counts) {
    const int64_t col = blockIdx.x * (int64_t)THREADS + threadIdx.x, first = blockIdx.y * (int64_t)rows_a_block;
    if (col >= cols) return;
    int count = 0;
    for (int64_t row = first; row < min(rows, first + rows_a_block); row++)
        count += (w[row * cols + col] & 0x7fff) != 0;
    atomicAdd(&counts[col], count);
}

// A thread block owns a row, a warp 64 columns of it at a time.
__global__ void find_bits(macko_ec_plan p) {
    const int64_t row = blockIdx.x;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const uint16_t *w = (const uint16_t *)p.w + row * p.cols;
    int count = 0;
    for (int64_t word = warp; word < p.words; word += THREADS / WARP) {
        uint32_t half[2];
        for (int i = 0; i < 2; i++) {
            const int64_t col = word * 64 + i * WARP + lane;
            half[i] = __ballot_sync(FULL_WARP, col < p.cols && w[macko_ec_column(p.col_order, p.cols, col)] & 0x7fff);
            count += __popc(half[i]);
        }
        if (lane == 0) p.bits[row * p.words + word] = half[0] | (uint64_t)half[1] << 32;
    }
    if (lane == 0) atomicAdd(&p.row_counts[row], count);
}

// What extraction of a tile works on, in p.scratch.
struct extract_scratch {
    uint64_t *level_bits;   // [MACKO_EC_TILE, words]
    int32_t *fits;          // [MAX_PAIRS, histogram slots]
    macko_ec_block *copies; // [MACKO_EC_TILE]
    __host__ __device__ static int64_t bytes(int64_t words) {
        return MACKO_EC_TILE * words * 8 + (MAX_PAIRS * macko_ec_histogram_slots(words) * 4 + 15) / 16 * 16 +
               MACKO_EC_TILE * sizeof(macko_ec_block);
    }
    __device__ extract_scratch(const macko_ec_plan &p, int64_t tile) {
        uint8_t *at = p.scratch + tile * bytes(p.words);
        level_bits = (uint64_t *)at;
        fits = (int32_t *)(level_bits + MACKO_EC_TILE * p.words);
        copies =
            (macko_ec_block *)((uint8_t *)fits + (MAX_PAIRS * macko_ec_histogram_slots(p.words) * 4 + 15) / 16 * 16);
    }
};

struct row_pair {
    int a, b, width, block;
    int64_t first;
};

struct tile_matching {
    row_pair pairs[MAX_PAIRS];
    int num_pairs, num_blocks, begin, end, next, num_members;
    int64_t num_columns, gained, nonzeros;
    int source[MACKO_EC_TILE];
    uint8_t matched[MACKO_EC_TILE], changed[MACKO_EC_TILE];
    uint32_t slab[MACKO_EC_TILE][17]; // a stretch of 16 half words of every member; 17: rows start in different banks
    uint16_t shared_columns[MACKO_EC_TILE][MACKO_EC_TILE];
};

// shared_columns of all members, 16 half words at a time through shared memory; a thread counts 8 x 8 pairs.
__device__ void count_shared(tile_matching &t, const uint64_t *members, int64_t words) {
    constexpr int SIDE = 16, EACH = MACKO_EC_TILE / SIDE; // threads a side, pairs a side of a thread
    const int i0 = threadIdx.x / SIDE, j0 = threadIdx.x % SIDE;
    const uint32_t *halves = (const uint32_t *)members;
    int counts[EACH][EACH] = {};
    for (int64_t first = 0; first < words * 2; first += 16) {
        __syncthreads();
        for (int i = threadIdx.x; i < MACKO_EC_TILE * 16; i += THREADS) {
            const int member = i / 16;
            const int64_t half = first + i % 16;
            t.slab[member][i % 16] = member < t.num_members && half < words * 2 ? halves[member * words * 2 + half] : 0;
        }
        __syncthreads();
        for (int h = 0; h < 16; h++) {
            uint32_t a[EACH], b[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                a[i] = t.slab[i0 + i * SIDE][h];
                b[i] = t.slab[j0 + i * SIDE][h];
            }
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++) counts[i][j] += __popc(a[i] & b[j]);
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++)
            t.shared_columns[i0 + i * SIDE][j0 + j * SIDE] = (uint16_t)min(counts[i][j], 0xffff);
    __syncthreads();
}

// The paper's greedy matching by one warp: each member, those of most columns first, takes the free one that shares most.
__device__ void match(tile_matching &t, const uint64_t *members, const macko_ec_plan &p) {
    __shared__ int counts[MACKO_EC_TILE], sorted[MACKO_EC_TILE];
    const int lane = threadIdx.x % WARP;
    if (threadIdx.x < t.num_members) {
        int count = 0;
        for (int64_t k = 0; k < p.words; k++) count += __popcll(members[threadIdx.x * p.words + k]);
        counts[threadIdx.x] = count;
        t.matched[threadIdx.x] = 0;
    }
    __syncthreads();
    if (threadIdx.x < t.num_members) {
        int rank = 0;
        for (int i = 0; i < t.num_members; i++)
            rank += counts[i] > counts[threadIdx.x] || (counts[i] == counts[threadIdx.x] && i < (int)threadIdx.x);
        sorted[rank] = threadIdx.x;
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        int num_pairs = 0;
        for (int i = 0; i < t.num_members; i++) {
            const int row = sorted[i];
            if (t.matched[row]) continue;
            int best = 0; // columns shared, then the earlier place
            for (int j = i + 1 + lane; j < t.num_members; j += WARP)
                if (!t.matched[sorted[j]]) best = max(best, t.shared_columns[row][sorted[j]] << 8 | (255 - j));
            best = __reduce_max_sync(FULL_WARP, best);
            if ((best >> 8) < p.options.min_width) continue;
            const int other = sorted[255 - (best & 255)];
            __syncwarp();
            if (lane == 0) {
                t.matched[row] = t.matched[other] = 1;
                t.pairs[num_pairs] = {row, other, 0, 0, 0};
            }
            __syncwarp();
            num_pairs++;
        }
        if (lane == 0) t.num_pairs = num_pairs;
    }
    __syncthreads();
}

__device__ void append(tile_matching &t, const macko_ec_plan &p, int64_t tile, const macko_ec_block &a,
                       const macko_ec_block *b, int height, int width, int block, int64_t first, macko_ec_walk walk,
                       int delta_max) {
    macko_ec_block made = a;
    made.height = height;
    made.width = width;
    made.first = first;
    for (int k = 0; b && k < height / 2; k++) made.rows[height / 2 + k] = b->rows[k];
    p.blocks[p.columns_at[tile] / MACKO_EC_CHUNK + block] = made;
    macko_ec_take(walk, delta_max, width, p.columns + p.columns_at[tile] + first);
}

__device__ void pair_rounds(tile_matching &t, const macko_ec_plan &p, int64_t tile, const extract_scratch &scratch,
                            uint64_t *members, int height) {
    const int delta_max = (1 << p.options.delta_bits) - 1;
    for (;;) {
        count_shared(t, members, p.words);
        match(t, members, p);
        const int num_pairs = t.num_pairs;
        row_pair *pair = threadIdx.x < num_pairs ? &t.pairs[threadIdx.x] : nullptr;
        macko_ec_walk walk = {};
        if (pair) {
            walk = macko_ec_walk_from(members + pair->a * p.words, members + pair->b * p.words, 0, p.words);
            pair->width = macko_ec_shared_width(walk, delta_max, p.options.min_width, p.options.max_width,
                                                scratch.fits + threadIdx.x * macko_ec_histogram_slots(p.words));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            t.gained = 0;
            for (int i = 0; i < num_pairs; i++) {
                row_pair &placed = t.pairs[i];
                placed.first = t.num_columns;
                placed.block = t.num_blocks;
                t.num_columns += placed.width;
                t.num_blocks += placed.width > 0;
                t.gained += (int64_t)placed.width * 2 * height;
            }
        }
        __syncthreads();
        if (pair && pair->width) {
            append(t, p, tile, scratch.copies[pair->a], &scratch.copies[pair->b], 2 * height, pair->width, pair->block,
                   pair->first, walk, delta_max);
            const int32_t *taken = p.columns + p.columns_at[tile] + pair->first;
            macko_ec_clear(members + pair->a * p.words, taken, pair->width);
            macko_ec_clear(members + pair->b * p.words, taken, pair->width);
            t.changed[pair->a] = t.changed[pair->b] = 1;
        }
        __syncthreads();
        if (t.gained * 200 < t.nonzeros || !t.gained) return;
    }
}

// One thread: what is left of the blocks that higher ones were cut from. Rare but in matrices of many equal rows.
__device__ void split_rests(tile_matching &t, const macko_ec_plan &p, int64_t tile, const extract_scratch &scratch,
                            uint64_t *tile_bits) {
    const int delta_max = (1 << p.options.delta_bits) - 1;
    macko_ec_block *blocks = p.blocks + p.columns_at[tile] / MACKO_EC_CHUNK;
    for (int i = 0; i < t.num_members; i++) {
        if (!t.changed[i]) continue;
        const macko_ec_block id = scratch.copies[i];
        uint64_t *rest = scratch.level_bits + i * p.words;
        blocks[t.source[i]].width = 0;
        const macko_ec_walk walk = macko_ec_walk_from(rest, nullptr, 0, p.words);
        while (const int width =
                   macko_ec_shared_width(walk, delta_max, p.options.min_width, p.options.max_width, scratch.fits)) {
            append(t, p, tile, id, nullptr, id.height, width, t.num_blocks++, t.num_columns, walk, delta_max);
            macko_ec_clear(rest, p.columns + p.columns_at[tile] + t.num_columns, width);
            t.num_columns += width;
        }
        for (int k = 0; k < id.height; k++)
            for (int64_t word = 0; word < p.words; word++) tile_bits[id.rows[k] * p.words + word] |= rest[word];
    }
}

// A thread block owns a tile through all levels.
__global__ void __launch_bounds__(THREADS) extract(macko_ec_plan p) {
    __shared__ tile_matching t;
    const int64_t tile = blockIdx.x;
    const extract_scratch scratch(p, tile);
    const int num_rows = (int)min((int64_t)MACKO_EC_TILE, p.rows - tile * MACKO_EC_TILE);
    uint64_t *tile_bits = p.bits + tile * MACKO_EC_TILE * p.words;
    const macko_ec_block *blocks = p.blocks + p.columns_at[tile] / MACKO_EC_CHUNK;
    if (threadIdx.x == 0) {
        t.num_members = num_rows;
        t.num_blocks = t.begin = 0;
        t.num_columns = t.nonzeros = 0;
        for (int i = 0; i < num_rows; i++) t.nonzeros += p.row_counts[tile * MACKO_EC_TILE + i];
    }
    if (threadIdx.x < num_rows) {
        macko_ec_block single = {};
        single.height = 1;
        single.rows[0] = (uint8_t)threadIdx.x;
        scratch.copies[threadIdx.x] = single;
    }
    __syncthreads();
    pair_rounds(t, p, tile, scratch, tile_bits, 1);
    for (int height = 2; height < p.options.max_height && t.begin < t.num_blocks; height *= 2) {
        __syncthreads();
        if (threadIdx.x == 0) {
            t.end = t.num_blocks;
            t.next = t.begin;
        }
        __syncthreads();
        while (t.next < t.end) {
            __syncthreads();
            if (threadIdx.x == 0) {
                t.num_members = 0;
                for (; t.next < t.end && t.num_members < MACKO_EC_TILE; t.next++)
                    if (blocks[t.next].height == height) t.source[t.num_members++] = t.next;
            }
            __syncthreads();
            for (int64_t i = threadIdx.x; i < t.num_members * p.words; i += THREADS) scratch.level_bits[i] = 0;
            __syncthreads();
            if (threadIdx.x < t.num_members) {
                const macko_ec_block block = blocks[t.source[threadIdx.x]];
                uint64_t *bits = scratch.level_bits + threadIdx.x * p.words;
                scratch.copies[threadIdx.x] = block;
                t.changed[threadIdx.x] = 0;
                for (int c = 0; c < block.width; c++) {
                    const int32_t col = p.columns[p.columns_at[tile] + block.first + c];
                    bits[col >> 6] |= (uint64_t)1 << (col & 63);
                }
            }
            __syncthreads();
            pair_rounds(t, p, tile, scratch, scratch.level_bits, height);
            if (threadIdx.x == 0) split_rests(t, p, tile, scratch, tile_bits);
            __syncthreads();
        }
        if (threadIdx.x == 0) t.begin = t.end;
        __syncthreads();
    }
    if (threadIdx.x == 0) p.num_blocks[tile] = t.num_blocks;
}

// Where the block of rank `rank` of n, by falling size, is stored: see macko_ec_reverse.
__device__ int place_of(int rank, int n) {
    const int bits = macko_ec_log2_up(n);
    const uint32_t v = macko_ec_reverse(rank, bits);
    int place = 0;
    for (uint32_t before = 0; before < v; before++) place += macko_ec_reverse(before, bits) < (uint32_t)n;
    return place;
}

__device__ int64_t *counts_of(const macko_ec_plan &p, int set, int64_t tile) {
    return p.counts + (set * p.tiles + tile) * 2;
}

__device__ void arrange_heights(const macko_ec_plan &p, int64_t tile) {
    __shared__ int num[MACKO_EC_HEIGHT_SETS];
    const int64_t at = p.columns_at[tile] / MACKO_EC_CHUNK;
    const macko_ec_block *blocks = p.blocks + at;
    if (threadIdx.x < MACKO_EC_HEIGHT_SETS) num[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < p.num_blocks[tile]; i += THREADS)
        if (blocks[i].width) atomicAdd(&num[macko_ec_height_set(blocks[i].height)], 1);
    __syncthreads();
    for (int i = threadIdx.x; i < p.num_blocks[tile]; i += THREADS) {
        const macko_ec_block mine = blocks[i];
        if (!mine.width) continue;
        int rank = 0;
        for (int j = 0; j < p.num_blocks[tile]; j++)
            rank += blocks[j].height == mine.height &&
                    (blocks[j].width > mine.width || (blocks[j].width == mine.width && j < i));
        const int set = macko_ec_height_set(mine.height);
        int place = place_of(rank, num[set]);
        for (int before = 0; before < set; before++) place += num[before];
        p.order[at + place] = i;
        atomicAdd((unsigned long long *)counts_of(p, set, tile), 1ull);
        atomicAdd((unsigned long long *)counts_of(p, set, tile) + 1, (unsigned long long)mine.width);
    }
}

__device__ int64_t single_at(const macko_ec_plan &p, int set, int64_t tile) {
    return (set * p.tiles + tile) * p.tile_rows;
}

__device__ void arrange_parts(const macko_ec_plan &p, int64_t tile, int num_rows) {
    __shared__ macko_ec_parts parts[MACKO_EC_TILE];
    __shared__ int num[2];
    const int row = threadIdx.x;
    if (threadIdx.x < 2) num[threadIdx.x] = 0;
    if (row < num_rows)
        parts[row] =
            macko_ec_split_row(macko_ec_walk_from(p.bits + (tile * MACKO_EC_TILE + row) * p.words, nullptr, 0, p.words),
                               (1 << p.options.delta_bits) - 1);
    __syncthreads();
    for (int part = 0; part < 2; part++)
        if (row < num_rows && parts[row].width[part]) atomicAdd(&num[part], 1);
    __syncthreads();
    for (int part = 0; part < 2; part++) {
        const int width = row < num_rows ? parts[row].width[part] : 0, set = MACKO_EC_HEIGHT_SETS + part;
        if (!width) continue;
        int rank = 0;
        for (int i = 0; i < num_rows; i++)
            rank += parts[i].width[part] > width || (parts[i].width[part] == width && i < row);
        const int64_t at = single_at(p, set, tile) + place_of(rank, num[part]);
        p.single_row[at] = row;
        p.single_width[at] = width;
        p.single_skip[at] = part ? parts[row].skip : 0;
        atomicAdd((unsigned long long *)counts_of(p, set, tile), 1ull);
        atomicAdd((unsigned long long *)counts_of(p, set, tile) + 1, (unsigned long long)width * MACKO_EC_WARP);
    }
}

__device__ void arrange_slab(const macko_ec_plan &p, int slab, int64_t tile, int num_rows) {
    __shared__ int keys[MACKO_EC_MAX_TILE], sorted[MACKO_EC_MAX_TILE];
    const int set = MACKO_EC_HEIGHT_SETS + slab, lanes = p.options.lanes, pieces = MACKO_EC_WARP / lanes;
    const int delta_max = (1 << p.options.slab_bits[slab]) - 1, lane = threadIdx.x % WARP;
    const int64_t word = p.options.slab_begin[slab] / 64, end = (p.options.slab_begin[slab + 1] + 63) / 64;
    const int64_t at = single_at(p, set, tile);
    const uint64_t *bits = p.bits + tile * p.tile_rows * p.words;
    __syncthreads();
    for (int row = threadIdx.x; row < num_rows; row += THREADS)
        keys[row] = macko_ec_entries(macko_ec_walk_from(bits + row * p.words, nullptr, word, end), delta_max);
    __syncthreads();
    for (int row = threadIdx.x; row < num_rows; row += THREADS) {
        int rank = 0;
        for (int i = 0; i < num_rows; i++) rank += keys[i] > keys[row] || (keys[i] == keys[row] && i < row);
        sorted[rank] = row;
    }
    __syncthreads();
    for (int first = threadIdx.x / WARP * pieces; p.cols && first < num_rows; first += THREADS / WARP * pieces) {
        const int mine = lane < pieces && first + lane < num_rows ? sorted[first + lane] : -1;
        int t = max(MACKO_EC_VECTOR,
                    (keys[sorted[first]] + lanes * MACKO_EC_VECTOR - 1) / (lanes * MACKO_EC_VECTOR) * MACKO_EC_VECTOR);
        while (t > MACKO_EC_VECTOR) {
            bool fits = true;
            if (mine >= 0)
                fits = !macko_ec_fill(macko_ec_walk_from(bits + mine * p.words, nullptr, word, end), 0, lanes,
                                      t - MACKO_EC_VECTOR, delta_max, 0)
                            .more;
            if (!__all_sync(FULL_WARP, fits)) break;
            t -= MACKO_EC_VECTOR;
        }
        if (lane < pieces) {
            p.single_row[at + first + lane] = mine;
            p.single_width[at + first + lane] = t;
        }
        if (lane == 0) {
            atomicAdd((unsigned long long *)counts_of(p, set, tile), 1ull);
            atomicAdd((unsigned long long *)counts_of(p, set, tile) + 1, (unsigned long long)t * MACKO_EC_WARP);
        }
    }
}

__global__ void __launch_bounds__(THREADS, 4) arrange(macko_ec_plan p) {
    const int64_t tile = blockIdx.x;
    const int num_rows = (int)min(p.tile_rows, p.rows - tile * p.tile_rows);
    if (p.options.max_height > 1) arrange_heights(p, tile);
    if (!p.options.num_slabs) arrange_parts(p, tile, num_rows);
    for (int slab = 0; slab < p.options.num_slabs; slab++) arrange_slab(p, slab, tile, num_rows);
}

__device__ macko_ec_sink sink_of(const macko_ec_plan &p, const macko_ec_matrix &m, const macko_ec_set &set,
                                 int64_t block, int64_t column) {
    macko_ec_sink sink = {};
    sink.col_order = p.col_order;
    sink.cols = p.cols;
    sink.values = (uint16_t *)m.block_values + set.first_value + column * set.height;
    sink.bases = (char *)m.base_indices + (set.first_block + block) * MACKO_EC_WARP * (p.cols <= 65536 ? 2 : 4);
    sink.deltas = (uint32_t *)(m.delta_indices + set.first_delta + column * set.delta_bits / 8);
    sink.vector = (int)set.vector;
    sink.delta_bits = (int)set.delta_bits;
    sink.value_bytes = 2;
    return sink;
}

// A thread block owns a tile in a set. First the blocks' columns begin; then a warp writes a shared block, a thread a
// piece of single rows.
__global__ void __launch_bounds__(THREADS, 3)
    write_blocks(macko_ec_plan p, macko_ec_matrix m, const int32_t *plan_sets) {
    const int64_t tile = blockIdx.x;
    const int s = blockIdx.y, plan_set = plan_sets[s], lane = threadIdx.x % WARP;
    const macko_ec_set set = m.sets[s];
    const int32_t *tile_ptr = m.tile_ptr + s * (m.tiles + 1) + tile;
    const int first_block = tile_ptr[0], num = tile_ptr[1] - first_block;
    int32_t *indptr = (int32_t *)m.block_indptr + set.first_block + s + first_block;
    const bool is_shared = plan_set < MACKO_EC_HEIGHT_SETS;
    const int pieces = MACKO_EC_WARP / (int)set.lanes;
    const int64_t singles = is_shared ? 0 : single_at(p, plan_set, tile);
    const macko_ec_block *blocks = nullptr;
    const int32_t *order = nullptr;
    if (is_shared) {
        blocks = p.blocks + p.columns_at[tile] / MACKO_EC_CHUNK;
        order = p.order + p.columns_at[tile] / MACKO_EC_CHUNK;
        for (int before = 0; before < s; before++)
            order += m.tile_ptr[before * (m.tiles + 1) + tile + 1] - m.tile_ptr[before * (m.tiles + 1) + tile];
    }
    if (threadIdx.x < WARP) {
        int column = (int)counts_of(p, plan_set, tile)[1];
        for (int first = 0; first < num; first += WARP) {
            const int i = first + lane;
            int width = i >= num    ? 0
                        : is_shared ? blocks[order[i]].width
                                    : p.single_width[singles + (int64_t)i * pieces] * MACKO_EC_WARP;
            const int sum = (int)warp_inclusive_sum((uint32_t)width);
            if (i < num) indptr[i] = column + sum - width;
            column += __shfl_sync(FULL_WARP, sum, WARP - 1);
        }
        if (lane == 0 && tile + 1 == m.tiles) indptr[num] = column;
    }
    __syncthreads();
    int32_t *row_indices = (int32_t *)m.row_indices + set.first_row + first_block * pieces * set.height;
    if (is_shared) {
        for (int i = threadIdx.x / WARP; i < num; i += THREADS / WARP) {
            const macko_ec_block block = blocks[order[i]];
            const int32_t *columns = p.columns + p.columns_at[tile] + block.first;
            const int t = block.width / MACKO_EC_WARP;
            macko_ec_sink sink = sink_of(p, m, set, first_block + i, indptr[i]);
            if (lane < block.height)
                row_indices[i * block.height + lane] = (int32_t)(tile * MACKO_EC_TILE + block.rows[lane]);
            for (int c = lane; c < block.width; c += WARP) {
                const int64_t n = macko_ec_number(c / t, c % t, MACKO_EC_VECTOR);
                for (int k = 0; k < block.height; k++) {
                    sink.w = (const uint16_t *)p.w + (tile * MACKO_EC_TILE + block.rows[k]) * p.cols;
                    macko_ec_put_value(&sink, n * block.height + k, columns[c]);
                }
                if (c % t == 0)
                    macko_ec_put_base(&sink, c / t, columns[c]);
                else
                    macko_ec_put_delta(sink.deltas, sink.delta_bits, n, (uint32_t)(columns[c] - columns[c - 1]));
            }
        }
        return;
    }
    const int slab = p.options.num_slabs ? plan_set - MACKO_EC_HEIGHT_SETS : -1;
    const int64_t word = slab < 0 ? 0 : p.options.slab_begin[slab] / 64;
    const int64_t end = slab < 0 ? p.words : (p.options.slab_begin[slab + 1] + 63) / 64;
    for (int i = threadIdx.x; i < num * pieces; i += THREADS) {
        const int64_t at = singles + i;
        const int local = p.single_row[at];
        const int64_t row = tile * p.tile_rows + local;
        macko_ec_sink sink = sink_of(p, m, set, first_block + i / pieces, indptr[i / pieces]);
        row_indices[i] = local < 0 ? -1 : (int32_t)row;
        sink.lane = i % pieces * (int)set.lanes;
        sink.w = local < 0 ? nullptr : (const uint16_t *)p.w + row * p.cols;
        const macko_ec_walk walk =
            macko_ec_walk_from(local < 0 ? nullptr : p.bits + row * p.words, nullptr, word, local < 0 ? word : end);
        macko_ec_fill(walk, slab < 0 ? p.single_skip[at] : 0, (int)set.lanes, p.single_width[at],
                      (1 << set.delta_bits) - 1, &sink);
    }
}

// A warp owns a block, a lane its columns.
__global__ void __launch_bounds__(THREADS) unpack_blocks(macko_ec_matrix m, uint16_t *w) {
    const int64_t index = (blockIdx.x * (int64_t)THREADS + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (index >= m.num_blocks) return;
    int s = 0;
    while (index >= m.sets[s + 1].first_block) s++;
    const macko_ec_set set = m.sets[s];
    const int64_t block = index - set.first_block;
    const int32_t *indptr = m.block_indptr + set.first_block + s + block;
    const int vector = (int)set.vector, height = (int)set.height, t = (indptr[1] - indptr[0]) / MACKO_EC_WARP;
    const int32_t *rows =
        m.row_indices + set.first_row + (block * (MACKO_EC_WARP / set.lanes) + lane / set.lanes) * height;
    const uint8_t *deltas = m.delta_indices + set.first_delta;
    int64_t col = macko_ec_column(m.base_indices, m.cols, index * MACKO_EC_WARP + lane);
    for (int c = 0; c < t; c++) {
        const int64_t n = indptr[0] + macko_ec_number(lane, c, vector), bit = n * set.delta_bits;
        uint32_t word = deltas[bit >> 3];
        if ((bit & 7) + set.delta_bits > 8) word |= (uint32_t)deltas[(bit >> 3) + 1] << 8;
        col += word >> (bit & 7) & ((1u << set.delta_bits) - 1);
        for (int k = 0; k < height; k++) {
            const uint16_t value = ((const uint16_t *)m.block_values)[set.first_value + n * height + k];
            if (value & 0x7fff && rows[k] >= 0) w[rows[k] * m.cols + macko_ec_column(m.col_order, m.cols, col)] = value;
        }
    }
}

} // namespace

cudaError_t macko_ec_column_counts_cuda(const void *w, int64_t rows, int64_t cols, int32_t *counts,
                                        cudaStream_t stream) {
    constexpr int ROWS_A_BLOCK = 128;
    cudaMemsetAsync(counts, 0, cols * sizeof *counts, stream);
    const dim3 grid((unsigned)ceil_div(cols, THREADS), (unsigned)ceil_div(rows, ROWS_A_BLOCK));
    if (rows && cols)
        count_columns<<<grid, THREADS, 0, stream>>>((const uint16_t *)w, rows, cols, ROWS_A_BLOCK, counts);
    return cudaGetLastError();
}

cudaError_t macko_ec_bits_cuda(const macko_ec_plan *p, cudaStream_t stream) {
    cudaMemsetAsync(p->row_counts, 0, p->rows * sizeof *p->row_counts, stream);
    if (p->rows && p->cols) find_bits<<<(unsigned)p->rows, THREADS, 0, stream>>>(*p);
    return cudaGetLastError();
}

int64_t macko_ec_extract_scratch_bytes(int64_t tiles, int64_t cols) {
    return tiles * extract_scratch::bytes((cols + 63) / 64);
}

cudaError_t macko_ec_extract_cuda(const macko_ec_plan *p, cudaStream_t stream) {
    if (p->tiles) extract<<<(unsigned)p->tiles, THREADS, 0, stream>>>(*p);
    return cudaGetLastError();
}

cudaError_t macko_ec_arrange_cuda(const macko_ec_plan *p, cudaStream_t stream) {
    cudaMemsetAsync(p->counts, 0, MACKO_EC_MAX_SETS * p->tiles * 2 * sizeof *p->counts, stream);
    if (p->tiles) arrange<<<(unsigned)p->tiles, THREADS, 0, stream>>>(*p);
    return cudaGetLastError();
}

cudaError_t macko_ec_write_cuda(const macko_ec_plan *p, const macko_ec_matrix *m, const int32_t *plan_sets,
                                cudaStream_t stream) {
    const dim3 grid((unsigned)p->tiles, (unsigned)m->num_sets);
    if (p->tiles && m->num_sets) write_blocks<<<grid, THREADS, 0, stream>>>(*p, *m, plan_sets);
    return cudaGetLastError();
}

cudaError_t macko_ec_unpack_cuda(const macko_ec_matrix *m, void *w, cudaStream_t stream) {
    cudaMemsetAsync(w, 0, m->rows * m->cols * 2, stream);
    const int64_t blocks = ceil_div(m->num_blocks * WARP, THREADS);
    if (blocks) unpack_blocks<<<(unsigned)blocks, THREADS, 0, stream>>>(*m, (uint16_t *)w);
    return cudaGetLastError();
}
