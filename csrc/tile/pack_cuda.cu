// The tile layout from dense rows, and back, on CUDA. A warp owns a part of a strip: 16 rows and 256 columns, in the order
// of tile.h.
#include "../core/cuda.cuh"
#include "decode.cuh"
#include "tile.h"

using namespace macko;

namespace {

constexpr int PART_ROWS = TILE_ROWS / TILE_PARTS;
constexpr int THREADS = TILE_PARTS * WARP; // a thread block owns a strip
constexpr int SCAN_THREADS = 1024;

// The first of a part's rows and columns.
struct Place {
    int64_t row, col;
};
__device__ __forceinline__ Place place_of(int64_t cols, int part) {
    const int64_t strips = tile_strips(cols);
    return {blockIdx.x / strips * TILE_ROWS + part * PART_ROWS, blockIdx.x % strips * TILE_STRIP_COLS};
}

// A lane's elements of a part of a strip of the dense w, two neighbours a word, and which are values.
struct Elements {
    uint32_t pairs[TILE_STRIP][TILE_GROUPS][TILE_QUAD / 2];
    uint32_t masks[TILE_STRIP];

    __device__ __forceinline__ void load(const uint16_t *w, int64_t rows, int64_t cols, Place from, int lane) {
        const bool whole = from.row + PART_ROWS <= rows && from.col + TILE_STRIP_COLS <= cols && cols % 2 == 0;
#pragma unroll
        for (int tile = 0; tile < TILE_STRIP; tile++) {
            masks[tile] = 0;
#pragma unroll
            for (int j = 0; j < TILE_GROUPS; j++)
#pragma unroll
                for (int e = 0; e < TILE_QUAD; e += 2) {
                    const int64_t r = from.row + tile_row(lane, e);
                    const int64_t c = from.col + tile * TILE_COLS + tile_col(lane, j, e);
                    const uint16_t *element = w + r * cols + c;
                    uint32_t pair = 0;
                    if (whole) {
                        pair = *(const uint32_t *)element;
                    } else if (r < rows) {
                        if (c < cols) pair = element[0];
                        if (c + 1 < cols) pair |= (uint32_t)element[1] << 16;
                    }
                    pairs[tile][j][e / 2] = pair;
                    masks[tile] |= (uint32_t)((pair & 0x7fff) != 0) << (8 * e + j);
                    masks[tile] |= (uint32_t)((pair & 0x7fff0000) != 0) << (8 * (e + 1) + j);
                }
        }
    }
};

// A lane's place among the lanes by `key` (up to 63), of equal ones the lower lane first.
__device__ __forceinline__ int place_among_lanes(uint32_t key, int lane) {
    uint32_t equal = FULL_WARP, below = 0;
#pragma unroll
    for (uint32_t bit = 32; bit; bit /= 2) {
        const uint32_t set = __ballot_sync(FULL_WARP, key & bit);
        if (key & bit) below |= equal & ~set;
        equal &= key & bit ? set : ~set;
    }
    return __popc(below | (equal & ((1u << lane) - 1)));
}

// Which lane has this number; each lane has another one of 0 .. 31.
__device__ __forceinline__ int lane_with(int own, int wanted) {
    uint32_t lanes = FULL_WARP;
#pragma unroll
    for (int bit = 1; bit < WARP; bit *= 2) {
        const uint32_t set = __ballot_sync(FULL_WARP, own & bit);
        lanes &= wanted & bit ? set : ~set;
    }
    return __ffs(lanes) - 1;
}

// What a part's masks say of its values: where the lane's second halves begin, in bytes, and the rows that they take.
struct Plan {
    uint32_t turns[TILE_HALVES];
    int rows;

    __device__ __forceinline__ void find(const uint32_t (&masks)[TILE_STRIP], int lane) {
        rows = 0;
#pragma unroll
        for (int half = 0; half < TILE_HALVES; half++) {
            const uint32_t bits = (uint32_t)TILE_HALF_BITS << 4 * half;
            const int first = __popc(masks[0] & bits) + __popc(masks[1] & bits);
            const int second = __popc(masks[2] & bits) + __popc(masks[3] & bits);
            const int column = lane_with(place_among_lanes(first, lane), place_among_lanes(32 - second, lane));
            const int above = __shfl_sync(FULL_WARP, first, column);
            turns[half] = above * TILE_ROW_BYTES + column * 4 + half * 2;
            rows = max(rows, above + second);
        }
        rows = __reduce_max_sync(FULL_WARP, rows);
    }
};

__global__ void __launch_bounds__(THREADS)
    count_strips(const uint16_t *w, int64_t rows, int64_t cols, int32_t *offsets, tile_totals *totals) {
    __shared__ int value_rows, stored;
    const int lane = threadIdx.x % WARP;
    Elements own;
    own.load(w, rows, cols, place_of(cols, threadIdx.x / WARP), lane);
    Plan plan;
    plan.find(own.masks, lane);
    int count = 0;
    for (const uint32_t mask : own.masks) count += __popc(mask);
    count = __reduce_add_sync(FULL_WARP, count);
    if (threadIdx.x == 0) value_rows = stored = 0;
    __syncthreads();
    if (lane == 0) {
        atomicAdd(&value_rows, plan.rows);
        atomicAdd(&stored, count);
    }
    __syncthreads();
    if (threadIdx.x) return;
    offsets[blockIdx.x + 1] = tile_units(value_rows);
    atomicAdd((unsigned long long *)&totals->stored, (unsigned long long)stored);
}

// One block: units in offsets[1..strips] become their sums.
__global__ void __launch_bounds__(SCAN_THREADS) scan_strips(int64_t strips, int32_t *offsets, tile_totals *totals) {
    __shared__ int64_t sums[SCAN_THREADS / WARP];
    __shared__ int widest;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) offsets[0] = widest = 0;
    int64_t before = 0;
    int own_widest = 0;
    for (int64_t strip = threadIdx.x + 1; strip - threadIdx.x <= strips; strip += SCAN_THREADS) {
        const int units = strip <= strips ? offsets[strip] : 0;
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
        if (strip <= strips) offsets[strip] = (int32_t)offset;
    }
    __syncthreads();
    atomicMax(&widest, own_widest);
    __syncthreads();
    if (threadIdx.x) return;
    totals->units = before;
    totals->widest = widest;
}

// A warp puts its part together in shared memory, in which each lane's values have a bank of their own.
__global__ void __launch_bounds__(THREADS, 4)
    write_strips(const int32_t *offsets, int64_t rows, int64_t cols, const uint16_t *w, uint8_t *data) {
    constexpr int MOST_ROWS = TILE_MOST_ROWS / TILE_PARTS;
    __shared__ uint4 rooms[TILE_PARTS][MOST_ROWS * TILE_ROW_BYTES / 16];
    __shared__ int value_rows[TILE_PARTS];
    const int part = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Elements own;
    own.load(w, rows, cols, place_of(cols, part), lane);
    Plan plan;
    plan.find(own.masks, lane);
    if (lane == 0) value_rows[part] = plan.rows;
    uint4 *const room = rooms[part];
    for (int i = lane; i < plan.rows * (TILE_ROW_BYTES / 16); i += WARP) room[i] = uint4{};
    __syncthreads();
    const uint32_t values = shared_address(room);
#pragma unroll
    for (int half = 0; half < TILE_HALVES; half++) {
        uint32_t next = values + lane * 4 + half * 2;
#pragma unroll
        for (int tile = 0; tile < TILE_STRIP; tile++) {
            if (tile == TILE_STRIP / 2) next = values + plan.turns[half];
#pragma unroll
            for (int j = half * TILE_GROUPS / 2; j < (half + 1) * TILE_GROUPS / 2; j++)
#pragma unroll
                for (const uint32_t both : own.pairs[tile][j]) {
                    // No address is counted up in its register: the next one would wait until the store has read it.
                    const bool low = both & 0x7fff, high = both & 0x7fff0000;
                    const uint32_t to = next, to_high = to + low * TILE_ROW_BYTES;
                    next = to_high + high * TILE_ROW_BYTES;
                    if (low) store_shared_2(to, (uint16_t)both);
                    if (high) store_shared_2(to_high, (uint16_t)(both >> 16));
                }
        }
    }
    __syncwarp();
    uint8_t *const strip = data + (int64_t)offsets[blockIdx.x] * TILE_UNIT;
    int first = 0;
    for (int other = 0; other < part; other++) first += value_rows[other];
#pragma unroll
    for (int tile = 0; tile < TILE_STRIP; tile++)
        *(uint32_t *)(strip + tile_lane::mask_at(0, tile, part, lane)) = own.masks[tile];
    *(uint32_t *)(strip + TILE_TURNS + (part * TILE_LANES + lane) * 4) = plan.turns[0] | plan.turns[1] << 16;
    if (lane == 0) ((uint16_t *)(strip + TILE_FIRSTS))[part] = (uint16_t)first;
    if (part == 0 && lane >= 2) ((uint32_t *)(strip + TILE_FIRSTS))[lane] = 0; // behind the four firsts
    uint4 *const to = (uint4 *)(strip + TILE_VALUES + first * TILE_ROW_BYTES);
    for (int i = lane; i < plan.rows * (TILE_ROW_BYTES / 16); i += WARP) to[i] = room[i];
}

// Dense rows of a part of a tile in shared memory, 8 elements more than they need: so neither the pairs that are written
// nor the 16 bytes that are read meet in a bank.
constexpr int DENSE_STRIDE = TILE_COLS + 8;
constexpr int DENSE_BYTES = PART_ROWS * DENSE_STRIDE * 2;

// A thread block fetches a strip as it lies, and each warp unpacks a part; others of the SM fetch or unpack meanwhile.
__global__ void __launch_bounds__(THREADS, 8)
    unpack_strips(const tile_matrix m, int64_t first, int64_t stop, const tile_weights weights, uint16_t *w) {
    extern __shared__ __align__(128) uint8_t room[];
    const int part = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t strips = tile_strips(m.cols), block = first / TILE_ROWS + blockIdx.x / strips;
    const int64_t row = block * TILE_ROWS + part * PART_ROWS, col = blockIdx.x % strips * TILE_STRIP_COLS;
    const int32_t *offsets = m.offsets + block * strips + blockIdx.x % strips;
    const int begin = __ldg(offsets), units = __ldg(offsets + 1) - begin;
    const uint8_t *data = m.data + (int64_t)begin * TILE_UNIT;
    const uint32_t strip = shared_address(room);
    for (int at = threadIdx.x * 16; at < units * TILE_UNIT; at += THREADS * 16) copy_async<16>(strip + at, data + at);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    if (row >= stop || row + PART_ROWS <= first) return;

    uint16_t *const part_dense = (uint16_t *)(room + m.widest * TILE_UNIT + TILE_BEHIND + part * DENSE_BYTES);
    uint16_t *const dense = part_dense + lane / 4 * DENSE_STRIDE + lane % 4 * 2;
    const bool aligned = m.cols % 8 == 0 && (uintptr_t)w % 16 == 0;
    const bool whole = aligned && row >= first && row + PART_ROWS <= stop;
    uint16_t *const out = w + (row + lane / 8 - first) * m.cols + col + lane % 8 * 8;
    tile_streams streams;
    streams.begin(strip, part, lane);
#pragma unroll
    for (int tile = 0; tile < TILE_STRIP; tile++) {
        if (tile == TILE_STRIP / 2) streams.turn();
        tile_lane own;
        own.read(tile_lane::mask_at(strip, tile, part, lane));
        own.count(weights);
        own.find(weights, streams);
#pragma unroll
        for (int j = 0; j < TILE_GROUPS; j++) {
            uint32_t values[TILE_QUAD], low, high;
            own.load(j, values, weights);
            own.place(j, values, low, high);
            *(uint32_t *)(dense + 8 * j) = low;
            *(uint32_t *)(dense + 8 * j + 8 * DENSE_STRIDE) = high;
        }
        __syncwarp();
        const int64_t begin_col = col + tile * TILE_COLS;
        const uint4 *rows = (const uint4 *)part_dense + lane / 8 * (DENSE_STRIDE / 8) + lane % 8;
        if (whole && begin_col + TILE_COLS <= m.cols) {
#pragma unroll
            for (int four = 0; four < PART_ROWS; four += 4)
                *(uint4 *)(out + tile * TILE_COLS + four * m.cols) = rows[four * (DENSE_STRIDE / 8)];
        } else {
#pragma unroll 1
            for (int four = 0; four < PART_ROWS; four += 4) {
                const int64_t r = row + four + lane / 8, c = begin_col + lane % 8 * 8;
                const uint16_t *from = (const uint16_t *)(rows + four * (DENSE_STRIDE / 8));
                for (int k = 0; k < 8; k++)
                    if (r >= first && r < stop && c + k < m.cols) out[tile * TILE_COLS + four * m.cols + k] = from[k];
            }
        }
        __syncwarp();
    }
}

} // namespace

cudaError_t tile_count_cuda(const void *w, int64_t rows, int64_t cols, int32_t *offsets, tile_totals *totals,
                            cudaStream_t stream) {
    const int64_t strips = tile_count(rows, cols);
    if (strips)
        count_strips<<<(unsigned)strips, THREADS, 0, stream>>>((const uint16_t *)w, rows, cols, offsets, totals);
    return cudaGetLastError();
}

cudaError_t tile_scan_cuda(int64_t strips, int32_t *offsets, tile_totals *totals, cudaStream_t stream) {
    scan_strips<<<1, SCAN_THREADS, 0, stream>>>(strips, offsets, totals);
    return cudaGetLastError();
}

cudaError_t tile_write_cuda(const tile_matrix *m, const void *w, uint8_t *data, cudaStream_t stream) {
    const int64_t strips = tile_count(m->rows, m->cols);
    if (strips)
        write_strips<<<(unsigned)strips, THREADS, 0, stream>>>(m->offsets, m->rows, m->cols, (const uint16_t *)w, data);
    return cudaGetLastError();
}

cudaError_t tile_unpack_cuda(const tile_matrix *m, int64_t first, int64_t count, void *w, cudaStream_t stream) {
    if (!count || !m->cols) return cudaSuccess;
    Device device;
    if (const cudaError_t error = current_device(&device)) return error;
    if (const cudaError_t error = allow_all_shared_memory<unpack_strips>(device, cudaSharedmemCarveoutMaxShared))
        return error;
    const int64_t blocks = (first + count - 1) / TILE_ROWS - first / TILE_ROWS + 1;
    const int bytes = m->widest * TILE_UNIT + TILE_BEHIND + TILE_PARTS * DENSE_BYTES;
    unpack_strips<<<(unsigned)(blocks * tile_strips(m->cols)), THREADS, bytes, stream>>>(*m, first, first + count,
                                                                                         tile_weights(), (uint16_t *)w);
    return cudaGetLastError();
}
