// The sparse8 layout from codes, on CUDA. A thread block owns a slab, a warp a slice of it: 16 rows
// and 256 columns, in the order of sparse8.h.
#include "../dense8/bytes_cuda.cuh"
#include "sparse8.h"

using namespace macko;

namespace {

constexpr int TILES = MACKO_SLAB_TILES, STEPS = MACKO_SLAB_STEPS;

// The lane's masks of a slice.
__device__ __forceinline__ void find_masks(const macko_sparse8_matrix &m, const uint8_t *w, const slice_of &from,
                                           uint32_t (&masks)[TILES]) {
    const uint32_t zero = macko_byte_stored(m.kind, m.dtype, 0);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        masks[tile] = 0;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t words[2];
            load_codes(w, m.rows, m.cols, from, tile, step, m.kind, m.dtype, words);
#pragma unroll
            for (int i = 0; i < STEP_ELEMENTS; i++)
                masks[tile] |= (uint32_t)((words[i / 4] >> 8 * (i % 4) & 255) != zero) << macko_sparse8_bit(step, i);
        }
    }
}

__global__ void __launch_bounds__(THREADS)
    count_slabs(const macko_sparse8_matrix m, const uint8_t *w, int32_t *offsets, macko_slab_totals *totals) {
    __shared__ int value_rows, stored;
    if (threadIdx.x == 0) value_rows = stored = 0;
    __syncthreads();
    const slice_of from(m.cols);
    uint32_t masks[TILES];
    find_masks(m, w, from, masks);
    slice_plan plan;
    plan.find(masks, from.lane);
    int own = 0;
    for (const uint32_t mask : masks) own += __popc(mask);
    own = __reduce_add_sync(FULL_WARP, own);
    if (from.lane == 0) {
        atomicAdd(&value_rows, plan.rows);
        atomicAdd(&stored, own);
    }
    __syncthreads();
    if (threadIdx.x) return;
    offsets[blockIdx.x + 1] = macko_sparse8_units(value_rows);
    atomicAdd((unsigned long long *)&totals->stored, (unsigned long long)stored);
}

// A warp puts its slice's values together in shared memory, in which each lane's column has a bank of its own.
__global__ void __launch_bounds__(THREADS) write_slabs(const macko_sparse8_matrix m, const uint8_t *w, uint8_t *data) {
    constexpr int ROW_CHUNKS = MACKO_SPARSE8_ROW_BYTES / 16, MOST_ROWS = MACKO_SPARSE8_MOST_ROWS / MACKO_SLAB_SLICES;
    __shared__ uint4 buffers[MACKO_SLAB_SLICES][MOST_ROWS * ROW_CHUNKS];
    __shared__ int slice_rows[MACKO_SLAB_SLICES];
    const slice_of from(m.cols);
    uint32_t masks[TILES];
    find_masks(m, w, from, masks);
    slice_plan plan;
    plan.find(masks, from.lane);
    if (from.lane == 0) slice_rows[from.slice] = plan.rows;
    uint4 *const buffer = buffers[from.slice];
    for (int i = from.lane; i < plan.rows * ROW_CHUNKS; i += WARP) buffer[i] = uint4{};
    __syncthreads();

    uint8_t *const slab = data + (int64_t)m.offsets[blockIdx.x] * MACKO_SLAB_UNIT;
    int k = 0, column = from.lane;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        if (tile == TILES / 2) k = plan.byte, column = plan.column;
        ((uint32_t *)(slab + tile * MACKO_SLAB_MASK_BYTES))[from.slice * WARP + from.lane] = masks[tile];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t words[2];
            load_codes(w, m.rows, m.cols, from, tile, step, m.kind, m.dtype, words);
#pragma unroll
            for (int n = 0; n < STEP_ELEMENTS; n++) {
                const int i = macko_slab_nth_element(n);
                if (!(masks[tile] >> macko_sparse8_bit(step, i) & 1)) continue;
                ((uint8_t *)buffer)[k / 4 * MACKO_SPARSE8_ROW_BYTES + column * 4 + k % 4] =
                    (uint8_t)(words[i / 4] >> 8 * (i % 4));
                k++;
            }
        }
    }
    ((uint32_t *)(slab + MACKO_SPARSE8_STARTS_AT))[from.slice * WARP + from.lane] =
        plan.byte | plan.column * 4 << 8 | __popc(masks[0]) << 16 | __popc(masks[2]) << 24;
    int values_at = MACKO_SPARSE8_VALUES_AT;
    for (int slice = 0; slice < from.slice; slice++) values_at += slice_rows[slice] * MACKO_SPARSE8_ROW_BYTES;
    uint32_t *const slices = (uint32_t *)(slab + MACKO_SPARSE8_SLICES_AT);
    if (from.lane == 0) slices[from.slice] = values_at;
    if (from.slice == 0 && from.lane >= MACKO_SLAB_SLICES) slices[from.lane] = 0;
    __syncwarp();
    for (int i = from.lane; i < plan.rows * ROW_CHUNKS; i += WARP) ((uint4 *)(slab + values_at))[i] = buffer[i];
}

} // namespace

cudaError_t macko_sparse8_count_cuda(const macko_sparse8_matrix *m, const void *w, int32_t *offsets,
                                     macko_slab_totals *totals, cudaStream_t stream) {
    return launch_slabs(m, stream, count_slabs, *m, (const uint8_t *)w, offsets, totals);
}

cudaError_t macko_sparse8_write_cuda(const macko_sparse8_matrix *m, const void *w, uint8_t *data, cudaStream_t stream) {
    return launch_slabs(m, stream, write_slabs, *m, (const uint8_t *)w, data);
}
