// The tile layout from dense rows, and back, on CUDA. A warp owns a part: 16 rows and 64 columns, in the order of tile.h.
#include "../core/cuda.cuh"
#include "tile.h"

using namespace macko;

namespace {

constexpr int PART_ROWS = TILE_ROWS / TILE_PARTS;
constexpr int THREADS = TILE_PARTS * WARP; // a thread block owns a tile at a time
constexpr int ROUND = 8;                   // tiles of a row block that one unpacks: the next one's masks come meanwhile
constexpr int SCAN_THREADS = 1024;

// A lane's elements of a part of the dense w, and which are values.
struct Elements {
    uint16_t values[TILE_GROUPS][TILE_QUAD];
    uint32_t mask;

    __device__ void load(const uint16_t *w, int64_t rows, int64_t cols, int64_t row, int64_t col, int lane) {
        mask = 0;
#pragma unroll
        for (int j = 0; j < TILE_GROUPS; j++)
#pragma unroll
            for (int e = 0; e < TILE_QUAD; e++) {
                const int64_t r = row + tile_row(lane, e), c = col + tile_col(lane, j, e);
                values[j][e] = r < rows && c < cols ? w[r * cols + c] : 0;
                mask |= (uint32_t)((values[j][e] & 0x7fff) != 0) << (8 * e + j);
            }
    }
};

// Values of a lane's masks in each group, as bytes: groups 0 to 3 and 4 to 7.
struct Counts {
    uint32_t low, high;

    __device__ explicit Counts(uint32_t mask) : low(0), high(0) {
        for (int j = 0; j < TILE_GROUPS / 2; j++) {
            low |= __popc(mask >> j & 0x01010101u) << (8 * j);
            high |= __popc(mask >> (j + 4) & 0x01010101u) << (8 * j);
        }
    }
    __device__ int of(int j) const {
        return (j < 4 ? low : high) >> (8 * (j % 4)) & 255;
    }
};

// Where a lane's values of each group begin, in values from the part's first; a group has 128 at most, which a byte holds.
struct Places {
    int at[TILE_GROUPS], total;

    __device__ explicit Places(uint32_t mask) {
        const Counts own(mask);
        Counts through = own;
        through.low = warp_inclusive_sum(own.low);
        through.high = warp_inclusive_sum(own.high);
        Counts all = own;
        all.low = __shfl_sync(FULL_WARP, through.low, WARP - 1);
        all.high = __shfl_sync(FULL_WARP, through.high, WARP - 1);
        total = 0;
#pragma unroll
        for (int j = 0; j < TILE_GROUPS; j++) {
            at[j] = total + through.of(j) - own.of(j);
            total += all.of(j);
        }
    }
};

__global__ void __launch_bounds__(THREADS)
    count_tiles(const uint16_t *w, int64_t rows, int64_t cols, int32_t *offsets, tile_totals *totals) {
    __shared__ int counts[TILE_PARTS];
    const int part = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t col_blocks = tile_col_blocks(cols), tile = blockIdx.x;
    Elements own;
    own.load(w, rows, cols, tile / col_blocks * TILE_ROWS + part * PART_ROWS, tile % col_blocks * TILE_COLS, lane);
    const int count = __reduce_add_sync(FULL_WARP, __popc(own.mask));
    if (lane == 0) counts[part] = count;
    __syncthreads();
    if (threadIdx.x) return;
    const int values = counts[0] + counts[1] + counts[2] + counts[3];
    offsets[tile + 1] = tile_units(values);
    atomicAdd((unsigned long long *)&totals->stored, (unsigned long long)values);
}

// One block: units in offsets[1..tiles] become their sums.
__global__ void __launch_bounds__(SCAN_THREADS) scan_tiles(int64_t tiles, int32_t *offsets, tile_totals *totals) {
    __shared__ int64_t sums[SCAN_THREADS / WARP];
    __shared__ int widest;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) offsets[0] = widest = 0;
    int64_t before = 0;
    int own_widest = 0;
    for (int64_t tile = threadIdx.x + 1; tile - threadIdx.x <= tiles; tile += SCAN_THREADS) {
        const int units = tile <= tiles ? offsets[tile] : 0;
        own_widest = max(own_widest, units);
        const uint32_t through = warp_inclusive_sum((uint32_t)units);
        __syncthreads(); // the last round's reads are done
        if (lane == WARP - 1) sums[warp] = through;
        __syncthreads();
        int64_t offset = before + through;
        for (int other = 0; other < SCAN_THREADS / WARP; other++) {
            if (other < warp) offset += sums[other];
            before += sums[other];
        }
        if (tile <= tiles) offsets[tile] = (int32_t)offset;
    }
    __syncthreads();
    atomicMax(&widest, own_widest);
    __syncthreads();
    if (threadIdx.x) return;
    totals->units = before;
    totals->widest = widest;
}

__global__ void __launch_bounds__(THREADS)
    write_tiles(const int32_t *offsets, int64_t rows, int64_t cols, const uint16_t *w, uint8_t *data) {
    __shared__ int counts[TILE_PARTS];
    const int part = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t col_blocks = tile_col_blocks(cols), tile = blockIdx.x;
    Elements own;
    own.load(w, rows, cols, tile / col_blocks * TILE_ROWS + part * PART_ROWS, tile % col_blocks * TILE_COLS, lane);
    const Places places(own.mask);
    if (lane == 0) counts[part] = places.total;
    __syncthreads();
    uint8_t *begin = data + (int64_t)offsets[tile] * TILE_UNIT, *end = data + (int64_t)offsets[tile + 1] * TILE_UNIT;
    int start = TILE_VALUES;
    for (int other = 0; other < part; other++) start += 2 * counts[other];
    ((uint32_t *)begin)[part * TILE_LANES + lane] = own.mask;
    if (lane == 0) *(uint16_t *)(begin + TILE_STARTS + part * 2) = (uint16_t)start;
    uint16_t *values = (uint16_t *)(begin + start);
#pragma unroll
    for (int j = 0; j < TILE_GROUPS; j++) {
        int at = places.at[j];
#pragma unroll
        for (int e = 0; e < TILE_QUAD; e++)
            if (own.mask >> (8 * e + j) & 1) values[at++] = own.values[j][e];
    }
    uint16_t *behind = values + places.total + lane;
    if (part == TILE_PARTS - 1 && (uint8_t *)behind < end) *behind = 0;
}

/*
 * A thread block owns ROUND tiles of a row block, a warp one part of each. A lane's values come straight from memory,
 * those of a group side by side with its neighbours'; the dense rows are put together in shared memory, where a row has
 * room for 8 elements more, so that neither the pairs that are written nor the 16 bytes that are read meet in a bank.
 */
__global__ void __launch_bounds__(THREADS, 8)
    unpack_tiles(const tile_matrix m, int64_t first, int64_t stop, uint16_t *w) {
    constexpr int STRIDE = TILE_COLS + 8;
    __shared__ __align__(16) uint16_t dense[TILE_PARTS][PART_ROWS * STRIDE];
    const int part = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t col_blocks = tile_col_blocks(m.cols), rounds = ceil_div(col_blocks, ROUND);
    const int64_t block = first / TILE_ROWS + blockIdx.x / rounds, row = block * TILE_ROWS + part * PART_ROWS;
    const int64_t first_col = blockIdx.x % rounds * ROUND;
    const int round = (int)min((int64_t)ROUND, col_blocks - first_col);
    if (row >= stop || row + PART_ROWS <= first) return;
    const int32_t *offsets = m.offsets + block * col_blocks + first_col;
    uint16_t *own = dense[part];
    const bool aligned = m.cols % 8 == 0 && (uintptr_t)w % 16 == 0;

    const auto load_offset = [&](int i) { return i < round ? offsets[i] : 0; };
    const auto load_mask = [&](const uint8_t *tile, int i) {
        return i < round ? load_stream((const uint32_t *)tile + part * TILE_LANES + lane) : 0;
    };
    const auto load_start = [&](const uint8_t *tile, int i) {
        return i < round ? load_stream((const uint16_t *)(tile + TILE_STARTS) + part) : 0;
    };
    int64_t ahead = load_offset(1);
    const uint8_t *next = m.data + (int64_t)load_offset(0) * TILE_UNIT;
    uint32_t next_mask = load_mask(next, 0);
    int next_start = load_start(next, 0);
#pragma unroll 1
    for (int i = 0; i < round; i++) {
        const uint32_t mask = next_mask;
        const uint16_t *values = (const uint16_t *)(next + next_start);
        next = m.data + ahead * TILE_UNIT;
        next_mask = load_mask(next, i + 1);
        next_start = load_start(next, i + 1);
        ahead = load_offset(i + 2);
        const Places places(mask);
        uint32_t pairs[TILE_GROUPS][2];
#pragma unroll
        for (int j = 0; j < TILE_GROUPS; j++) {
            const uint16_t *at = values + places.at[j];
#pragma unroll
            for (int pair = 0; pair < 2; pair++) {
                const bool low = mask >> (16 * pair + j) & 1, high = mask >> (16 * pair + 8 + j) & 1;
                uint32_t word = low ? (uint32_t)__ldg(at) : 0;
                at += low;
                if (high) word |= (uint32_t)__ldg(at) << 16;
                at += high;
                pairs[j][pair] = word;
            }
        }
#pragma unroll
        for (int j = 0; j < TILE_GROUPS; j++)
#pragma unroll
            for (int pair = 0; pair < 2; pair++)
                *(uint32_t *)(own + tile_row(lane, 2 * pair) * STRIDE + tile_col(lane, j, 0)) = pairs[j][pair];
        __syncwarp();
        const int64_t col = (first_col + i) * TILE_COLS + lane % 8 * 8;
#pragma unroll
        for (int four = 0; four < PART_ROWS; four += 4) {
            const int r = four + lane / 8;
            const uint4 chunk = *(const uint4 *)(own + r * STRIDE + lane % 8 * 8);
            if (row + r < first || row + r >= stop) continue;
            uint16_t *out = w + (row + r - first) * m.cols + col;
            if (aligned && col + 8 <= m.cols) {
                *(uint4 *)out = chunk;
            } else {
                const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
                for (int k = 0; k < 8; k++)
                    if (col + k < m.cols) out[k] = (uint16_t)(words[k / 2] >> (16 * (k % 2)));
            }
        }
        __syncwarp();
    }
}

} // namespace

cudaError_t tile_count_cuda(const void *w, int64_t rows, int64_t cols, int32_t *offsets, tile_totals *totals,
                            cudaStream_t stream) {
    const int64_t tiles = tile_count(rows, cols);
    if (tiles)
        count_tiles<<<(unsigned)tiles, THREADS, 0, stream>>>((const uint16_t *)w, rows, cols, offsets, totals);
    return cudaGetLastError();
}

cudaError_t tile_scan_cuda(int64_t tiles, int32_t *offsets, tile_totals *totals, cudaStream_t stream) {
    scan_tiles<<<1, SCAN_THREADS, 0, stream>>>(tiles, offsets, totals);
    return cudaGetLastError();
}

cudaError_t tile_write_cuda(const tile_matrix *m, const void *w, uint8_t *data, cudaStream_t stream) {
    const int64_t tiles = tile_count(m->rows, m->cols);
    if (tiles)
        write_tiles<<<(unsigned)tiles, THREADS, 0, stream>>>(m->offsets, m->rows, m->cols, (const uint16_t *)w, data);
    return cudaGetLastError();
}

cudaError_t tile_unpack_cuda(const tile_matrix *m, int64_t first, int64_t count, void *w, cudaStream_t stream) {
    if (!count || !m->cols) return cudaSuccess;
    const int64_t blocks = (first + count - 1) / TILE_ROWS - first / TILE_ROWS + 1;
    const int64_t rounds = ceil_div(tile_col_blocks(m->cols), ROUND);
    unpack_tiles<<<(unsigned)(blocks * rounds), THREADS, 0, stream>>>(*m, first, first + count, (uint16_t *)w);
    return cudaGetLastError();
}
