// The tile layout from dense rows, and back, on CUDA. A warp owns a part: 16 rows and 64 columns, in the order of tile.h.
#include "../core/cuda.cuh"
#include "decode.cuh"
#include "tile.h"

using namespace macko;

namespace {

constexpr int PART_ROWS = TILE_ROWS / TILE_PARTS;
constexpr int THREADS = TILE_PARTS * WARP; // a thread block owns a tile at a time
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

// Where a lane's values of each group begin, for values of the part from `start` on; start then is where they end.
__device__ __forceinline__ tile_lane places_of(uint32_t mask, uint32_t start) {
    tile_lane own;
    own.mask = mask;
    own.start = start;
    own.prepare<1>(0, 0, 0);
    own.prepare<2>(0, 0, 0);
    own.prepare<3>(0, 0, 0);
    return own;
}

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
    __shared__ int bytes[TILE_PARTS]; // of each part's values
    const int part = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t col_blocks = tile_col_blocks(cols), tile = blockIdx.x;
    Elements own;
    own.load(w, rows, cols, tile / col_blocks * TILE_ROWS + part * PART_ROWS, tile % col_blocks * TILE_COLS, lane);
    const tile_lane places = places_of(own.mask, 0);
    if (lane == 0) bytes[part] = places.start;
    __syncthreads();
    uint8_t *begin = data + (int64_t)offsets[tile] * TILE_UNIT, *end = data + (int64_t)offsets[tile + 1] * TILE_UNIT;
    int start = TILE_VALUES;
    for (int other = 0; other < part; other++) start += bytes[other];
    ((uint32_t *)begin)[part * TILE_LANES + lane] = own.mask;
    if (lane == 0) *(uint16_t *)(begin + TILE_STARTS + part * 2) = (uint16_t)start;
#pragma unroll
    for (int j = 0; j < TILE_GROUPS; j++) {
        uint16_t *to = (uint16_t *)(begin + start + places.at[j]);
#pragma unroll
        for (int e = 0; e < TILE_QUAD; e++)
            if (own.mask >> (8 * e + j) & 1) *to++ = own.values[j][e];
    }
    uint8_t *behind = begin + start + places.start + 2 * lane;
    if (part == TILE_PARTS - 1 && behind < end) *(uint16_t *)behind = 0;
}

// What unpack_tiles has to know of a part to fetch it: where its values begin and end, in bytes from the tile's start.
struct PartHead {
    const uint8_t *tile;
    int begin, end;
};

// A warp's room in shared memory: what it fetches, twice, and dense rows of a part. These have 8 elements more than they
// need, so that neither the pairs that are written nor the 16 bytes that are read meet in a bank.
struct PartRoom {
    static constexpr int STRIDE = TILE_COLS + 8, VALUE_ROOM = PART_ROWS * TILE_COLS * 2 + 2 * TILE_UNIT;
    uint4 masks[2][TILE_LANES * 4 / 16];
    uint4 values[2][VALUE_ROOM / 16];
    uint4 dense[PART_ROWS * STRIDE / 8];
};

/*
 * A thread block owns `round` tiles of a row block, a warp one part of each: the next one is on its way meanwhile.
 */
__global__ void __launch_bounds__(THREADS, 8)
    unpack_tiles(const tile_matrix m, int64_t first, int64_t stop, int round, uint16_t *w) {
    __shared__ PartRoom rooms[TILE_PARTS];
    const int part = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t col_blocks = tile_col_blocks(m.cols), rounds = ceil_div(col_blocks, round);
    const int64_t block = first / TILE_ROWS + blockIdx.x / rounds, row = block * TILE_ROWS + part * PART_ROWS;
    const int first_col = (int)(blockIdx.x % rounds) * round, tiles = min(round, (int)col_blocks - first_col);
    if (row >= stop || row + PART_ROWS <= first) return;
    const int32_t *offsets = m.offsets + block * col_blocks + first_col;
    PartRoom &room = rooms[part];
    const uint32_t masks_at = shared_address(room.masks), values_at = shared_address(room.values);
    uint16_t *dense = (uint16_t *)room.dense + lane / 4 * PartRoom::STRIDE + lane % 4 * 2;

    auto head_of = [&](int i) {
        PartHead head{};
        if (i >= tiles) return head;
        const int begin = __ldg(offsets + i), end = __ldg(offsets + i + 1);
        head.tile = m.data + (int64_t)begin * TILE_UNIT;
        const uint16_t *starts = (const uint16_t *)(head.tile + TILE_STARTS) + part;
        head.begin = __ldg(starts);
        head.end = part + 1 < TILE_PARTS ? __ldg(starts + 1) : (end - begin) * TILE_UNIT;
        return head;
    };
    auto fetch = [&](const PartHead &head, int stage) {
        const int from = head.begin / TILE_UNIT * TILE_UNIT, bytes = head.end - from;
        const uint8_t *masks = head.tile + part * (TILE_LANES * 4) + lane * 16, *values = head.tile + from + lane * 16;
        const uint32_t to = values_at + stage * sizeof room.values[0] + lane * 16;
        if (head.tile && lane < TILE_LANES * 4 / 16)
            copy_async<16>(masks_at + stage * sizeof room.masks[0] + lane * 16, masks);
#pragma unroll
        for (int at = 0; at < PartRoom::VALUE_ROOM; at += WARP * 16)
            if (lane * 16 + at < bytes) copy_async<16>(to + at, values + at);
        commit_copies();
    };
    PartHead here = head_of(0), next = head_of(1);
    fetch(here, 0);
    const bool aligned = m.cols % 8 == 0 && (uintptr_t)w % 16 == 0;
    const bool whole = aligned && row >= first && row + PART_ROWS <= stop;
    uint16_t *out = w + (row + lane / 8 - first) * m.cols + (int64_t)first_col * TILE_COLS + lane % 8 * 8;
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        const int stage = i % 2, start = here.begin % TILE_UNIT;
        fetch(next, !stage);
        here = next;
        next = head_of(i + 2);
        wait_copies<1>();
        __syncwarp();
        const tile_lane own =
            places_of(((const uint32_t *)room.masks[stage])[lane], values_at + stage * sizeof room.values[0] + start);
#pragma unroll
        for (int j = 0; j < TILE_GROUPS; j++) {
            uint32_t values[TILE_QUAD], low, high;
            own.load(j, values);
            own.place(j, values, low, high);
            *(uint32_t *)(dense + 8 * j) = low;
            *(uint32_t *)(dense + 8 * j + 8 * PartRoom::STRIDE) = high;
        }
        __syncwarp();
        const int64_t col = (int64_t)(first_col + i) * TILE_COLS + lane % 8 * 8;
        const uint4 *rows = room.dense + lane / 8 * (PartRoom::STRIDE / 8) + lane % 8;
        if (whole && (first_col + i + 1) * TILE_COLS <= m.cols) {
#pragma unroll
            for (int four = 0; four < PART_ROWS; four += 4)
                *(uint4 *)(out + four * m.cols) = rows[four * (PartRoom::STRIDE / 8)];
        } else {
#pragma unroll 1
            for (int four = 0; four < PART_ROWS; four += 4) {
                const int64_t r = row + four + lane / 8;
                const uint16_t *from = (const uint16_t *)(rows + four * (PartRoom::STRIDE / 8));
                for (int k = 0; k < 8; k++)
                    if (r >= first && r < stop && col + k < m.cols) out[four * m.cols + k] = from[k];
            }
        }
        out += TILE_COLS;
        __syncwarp();
    }
}

} // namespace

cudaError_t tile_count_cuda(const void *w, int64_t rows, int64_t cols, int32_t *offsets, tile_totals *totals,
                            cudaStream_t stream) {
    const int64_t tiles = tile_count(rows, cols);
    if (tiles) count_tiles<<<(unsigned)tiles, THREADS, 0, stream>>>((const uint16_t *)w, rows, cols, offsets, totals);
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
    Device device;
    if (const cudaError_t error = current_device(&device)) return error;
    // As many tiles a thread block as make one wave of them: it fetches one while it unpacks another.
    const int64_t blocks = (first + count - 1) / TILE_ROWS - first / TILE_ROWS + 1,
                  col_blocks = tile_col_blocks(m->cols);
    const int round =
        (int)std::min(std::max<int64_t>(ceil_div(blocks * col_blocks, 8 * device.num_sms), 2), col_blocks);
    unpack_tiles<<<(unsigned)(blocks * ceil_div(col_blocks, round)), THREADS, 0, stream>>>(*m, first, first + count,
                                                                                           round, (uint16_t *)w);
    return cudaGetLastError();
}
