// The dense8 layout from codes, and back to dense rows, on CUDA. A thread block owns a slab, a warp a slice of it: 16 rows and
// 256 columns, in the order of dense8.h.
#include "bytes_cuda.cuh"
#include "dense8.h"

using namespace macko;

namespace {

__global__ void __launch_bounds__(THREADS) write_slabs(const macko_dense8_matrix m, const uint8_t *w, uint8_t *data) {
    const slice_of from(m.cols);
    uint8_t *const slab = data + (int64_t)blockIdx.x * MACKO_DENSE8_SLAB_BYTES;
    for (int tile = 0; tile < MACKO_SLAB_TILES; tile++)
#pragma unroll
        for (int two = 0; two < MACKO_DENSE8_STEPS / 2; two++) {
            uint32_t words[2][2];
            for (int k = 0; k < 2; k++)
                load_codes(w, m.rows, m.cols, from, tile, 2 * two + k, m.kind, m.dtype, words[k]);
            uint8_t *const tile_slice = slab + (tile * MACKO_SLAB_SLICES + from.slice) * MACKO_DENSE8_SLICE_BYTES;
            ((uint4 *)tile_slice)[two * WARP + from.lane] = {words[0][0], words[0][1], words[1][0], words[1][1]};
        }
}

// A warp decodes tile after tile of its slice to shared memory, and stores rows.
__global__ void __launch_bounds__(THREADS)
    unpack_slabs(const macko_dense8_matrix m, int64_t first, int64_t stop, uint16_t *w) {
    __shared__ __align__(16) uint16_t rooms[MACKO_SLAB_SLICES][SLICE_ROWS * DENSE_STRIDE];
    slice_of from(m.cols);
    from.row += first / MACKO_SLAB_ROWS * MACKO_SLAB_ROWS;
    if (from.row >= stop || from.row + SLICE_ROWS <= first) return;
    const int64_t slab_index = first / MACKO_SLAB_ROWS * macko_slabs_across(m.cols) + blockIdx.x;
    const uint8_t *const slab = m.data + slab_index * MACKO_DENSE8_SLAB_BYTES;
    uint16_t *const room = rooms[from.slice];
    const bool aligned = m.cols % 8 == 0 && (uintptr_t)w % 16 == 0;
    const bool whole = aligned && from.row >= first && from.row + SLICE_ROWS <= stop;
    float scales[2];
    load_scales(m.scales, m.rows, from, scales);
    for (int tile = 0; tile < MACKO_SLAB_TILES; tile++) {
        const int64_t begin_col = from.col + tile * MACKO_SLAB_TILE_COLS;
        if (begin_col >= m.cols) return;
        const uint4 *const chunks =
            (const uint4 *)(slab + (tile * MACKO_SLAB_SLICES + from.slice) * MACKO_DENSE8_SLICE_BYTES) + from.lane;
#pragma unroll
        for (int two = 0; two < MACKO_DENSE8_STEPS / 2; two++) {
            const uint4 chunk = load_stream(chunks + two * WARP);
            const uint32_t words[] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
            for (int n = 0; n < 2 * STEP_ELEMENTS; n++)
                put_code(room, from, 2 * two + n / STEP_ELEMENTS, n % STEP_ELEMENTS, words[n / 4] >> 8 * (n % 4) & 255,
                         scales, m.kind, m.dtype);
        }
        __syncwarp();
        store_dense(room, from, begin_col, first, stop, m.cols, whole, w);
        __syncwarp();
    }
}

} // namespace

cudaError_t macko_dense8_write_cuda(const macko_dense8_matrix *m, const void *w, uint8_t *data, cudaStream_t stream) {
    const int64_t slabs = macko_slab_count(m->rows, m->cols);
    if (slabs) write_slabs<<<(unsigned)slabs, THREADS, 0, stream>>>(*m, (const uint8_t *)w, data);
    return cudaGetLastError();
}

cudaError_t macko_dense8_unpack_cuda(const macko_dense8_matrix *m, int64_t first, int64_t count, void *w,
                                     cudaStream_t stream) {
    return launch_unpack(unpack_slabs, *m, first, count, w, stream);
}
