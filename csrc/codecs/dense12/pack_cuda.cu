// The dense12 layout from dense rows, on CUDA. A thread block owns a slab, a warp a slice of it: 16 rows and
// 256 columns, in the order of dense12.h.
#include "../../slab/slices.cuh"
#include "dense12.h"

using namespace macko;

namespace {

constexpr int HIGHS = 128;       // values of e[7:1]
constexpr uint8_t NO_CODE = 255; // of an element that is listed

struct dense12_table {
    uint32_t words[2];
};

dense12_table table_of(const macko_dense12_matrix *m) {
    return {m->table[0], m->table[1]};
}

__device__ __forceinline__ int high_of(uint32_t split) {
    return split >> 8 & (HIGHS - 1);
}

// NO_CODE of an element that is listed.
__device__ __forceinline__ uint32_t code_of(const uint8_t *codes, macko_dtype dtype, uint32_t value) {
    return macko_dense12_has_lower_bits(dtype, value) ? NO_CODE : codes[high_of(macko_dense12_split(dtype, value))];
}

// The lowest code of each e[7:1]; a thread each.
__device__ __forceinline__ void find_codes(dense12_table table, uint8_t *codes) {
    static_assert(THREADS == HIGHS, "a thread each");
    int code = NO_CODE;
#pragma unroll
    for (int i = MACKO_SLAB_TABLE - 1; i >= 0; i--)
        if ((table.words[i / 4] >> 8 * (i % 4) & 255) == threadIdx.x) code = i;
    codes[threadIdx.x] = (uint8_t)code;
    __syncthreads();
}

// Bit i: element i is listed.
__device__ __forceinline__ uint32_t listed_in(const step_elements &elements, const uint8_t *codes, macko_dtype dtype) {
    uint32_t mask = 0;
#pragma unroll
    for (int i = 0; i < STEP_ELEMENTS; i++) mask |= (uint32_t)(code_of(codes, dtype, elements[i]) == NO_CODE) << i;
    return mask;
}

__global__ void __launch_bounds__(COUNT_THREADS)
    count_highs(const uint16_t *w, int64_t elements, macko_dtype dtype, uint64_t *counts) {
    count_elements<HIGHS>(w, elements, counts, [&](uint32_t value, const auto &count) {
        if (!macko_dense12_has_lower_bits(dtype, value)) count(high_of(macko_dense12_split(dtype, value)));
    });
}

__global__ void __launch_bounds__(THREADS)
    count_listed(const uint16_t *w, int64_t rows, int64_t cols, macko_dtype dtype, dense12_table table,
                 macko_slab_totals *totals) {
    __shared__ uint8_t codes[HIGHS];
    __shared__ int listed;
    if (threadIdx.x == 0) listed = 0;
    find_codes(table, codes);
    const slice_of from(cols);
    int own = 0;
    for (int tile = 0; tile < MACKO_SLAB_TILES; tile++)
#pragma unroll
        for (int step = 0; step < MACKO_SLAB_STEPS; step++) {
            step_elements elements;
            elements.load(w, rows, cols, from, tile, step);
            own += __popc(listed_in(elements, codes, dtype));
        }
    own = __reduce_add_sync(FULL_WARP, own);
    if (from.lane == 0 && own) atomicAdd(&listed, own);
    __syncthreads();
    if (threadIdx.x || !listed) return;
    atomicMax((unsigned long long *)&totals->fullest, (unsigned long long)listed);
    atomicAdd((unsigned long long *)&totals->listed, (unsigned long long)listed);
}

// Writes a lane's elements of a slice of a tile; gives bit 8 step + i of those that are listed.
__device__ __forceinline__ uint32_t write_elements(const uint16_t *w, int64_t rows, int64_t cols, const slice_of &from,
                                                   int tile, macko_dtype dtype, const uint8_t *codes, uint8_t *slab) {
    uint32_t listed = 0, lows[MACKO_SLAB_STEPS][2], words[MACKO_SLAB_STEPS];
#pragma unroll
    for (int step = 0; step < MACKO_SLAB_STEPS; step++) {
        step_elements elements;
        elements.load(w, rows, cols, from, tile, step);
        lows[step][0] = lows[step][1] = words[step] = 0;
#pragma unroll
        for (int i = 0; i < STEP_ELEMENTS; i++) {
            const uint32_t value = elements[i], code = code_of(codes, dtype, value);
            if (code == NO_CODE) {
                listed |= 1u << (8 * step + i);
                continue;
            }
            lows[step][i / 4] |= (macko_dense12_split(dtype, value) & 255) << 8 * (i % 4);
            words[step] |= code << 4 * i | value >> 15 << (i < 4 ? 8 * i + 7 : 8 * (i - 4) + 3);
        }
    }
    uint4 *const to = (uint4 *)(slab + (tile * MACKO_SLAB_SLICES + from.slice) * MACKO_DENSE12_SLICE_BYTES) + from.lane;
    to[0] = {lows[0][0], lows[0][1], lows[1][0], lows[1][1]};
    to[WARP] = {lows[2][0], lows[2][1], lows[3][0], lows[3][1]};
    to[2 * WARP] = {words[0], words[1], words[2], words[3]};
    return listed;
}

__global__ void __launch_bounds__(THREADS) write_slabs(const uint16_t *w, int64_t rows, int64_t cols, macko_dtype dtype,
                                                       dense12_table table, int slab_units, uint8_t *data) {
    __shared__ uint8_t codes[HIGHS];
    __shared__ uint32_t ends[MACKO_SLAB_TILE_SLICES]; // counts, then where the lists of slices of tiles end
    find_codes(table, codes);
    const slice_of from(cols);
    uint8_t *const slab = data + (int64_t)blockIdx.x * slab_units * MACKO_SLAB_UNIT;
    uint32_t listed[MACKO_SLAB_TILES];
#pragma unroll
    for (int tile = 0; tile < MACKO_SLAB_TILES; tile++) {
        listed[tile] = write_elements(w, rows, cols, from, tile, dtype, codes, slab);
        const uint32_t count = __reduce_add_sync(FULL_WARP, __popc(listed[tile]));
        if (from.lane == 0) ends[tile * MACKO_SLAB_SLICES + from.slice] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (int tile_slice = 1; tile_slice < MACKO_SLAB_TILE_SLICES; tile_slice++)
            ends[tile_slice] += ends[tile_slice - 1];
    __syncthreads();
    const auto begin_of = [&](int tile_slice) { return tile_slice ? ends[tile_slice - 1] : 0; };
    if (threadIdx.x < MACKO_SLAB_TILE_SLICES)
        ((uint32_t *)(slab + MACKO_DENSE12_BOUNDS_AT))[threadIdx.x] = ends[threadIdx.x] << 16 | begin_of(threadIdx.x);
    uint32_t *const list = (uint32_t *)(slab + MACKO_DENSE12_LIST_AT);
    const int most = (slab_units * MACKO_SLAB_UNIT - MACKO_DENSE12_LIST_AT) / 4;
    for (int i = ends[MACKO_SLAB_TILE_SLICES - 1] + threadIdx.x; i < most; i += THREADS) list[i] = 0;
#pragma unroll
    for (int tile = 0; tile < MACKO_SLAB_TILES; tile++) {
        if (!__any_sync(FULL_WARP, listed[tile])) continue;
        write_list(w, cols, from, tile, listed[tile], list + begin_of(tile * MACKO_SLAB_SLICES + from.slice),
                   [](uint32_t place, uint32_t value) { return value << 16 | place; });
    }
}

} // namespace

cudaError_t macko_dense12_histogram_cuda(const macko_dense12_matrix *m, const void *w, int64_t counts[128],
                                         cudaStream_t stream) {
    const int64_t elements = m->rows * m->cols;
    if (elements)
        count_highs<<<count_blocks(elements), COUNT_THREADS, 0, stream>>>((const uint16_t *)w, elements, m->dtype,
                                                                          (uint64_t *)counts);
    return cudaGetLastError();
}

cudaError_t macko_dense12_count_cuda(const macko_dense12_matrix *m, const void *w, int32_t *, macko_slab_totals *totals,
                                     cudaStream_t stream) {
    return launch_slabs(m, stream, count_listed, (const uint16_t *)w, m->rows, m->cols, m->dtype, table_of(m), totals);
}

cudaError_t macko_dense12_write_cuda(const macko_dense12_matrix *m, const void *w, uint8_t *data, cudaStream_t stream) {
    return launch_slabs(m, stream, write_slabs, (const uint16_t *)w, m->rows, m->cols, m->dtype, table_of(m),
                        m->slab_units, data);
}
