// The toy16 layout from dense rows, and back, on CUDA.
#include "../../slab/slices.cuh"
#include "toy16.h"

using namespace macko;

namespace {

// Each thread takes a lane's elements of a slice, between a slab and rows [first, stop) of w.
template <bool WRITES>
__global__ void __launch_bounds__(THREADS)
    copy_slabs(const macko_toy16_matrix m, int64_t first, int64_t stop, uint16_t *w, uint16_t *data) {
    slice_of from(m.cols);
    from.row += first / MACKO_SLAB_ROWS * MACKO_SLAB_ROWS;
    const int64_t slab = first / MACKO_SLAB_ROWS * macko_slabs_across(m.cols) + blockIdx.x;
    for (int n = 0; n < MACKO_SLAB_TILES * 4 * STEP_ELEMENTS; n++) {
        const int tile = n / 32, step = n / 8 % 4, i = n % 8, e = i % MACKO_SLAB_QUAD;
        const int64_t row = from.row + macko_slab_row(from.lane, e);
        const int64_t col = from.col + tile * MACKO_SLAB_TILE_COLS + macko_slab_col(from.lane, 2 * step + i / 4, e);
        uint16_t *const place =
            data + slab * (MACKO_TOY16_SLAB_BYTES / 2) + ((tile * 4 + from.slice) * 4 + step) * 256 + from.lane * 8 + i;
        const bool inside = row >= first && row < stop && col < m.cols;
        if (WRITES)
            *place = inside ? w[(row - first) * m.cols + col] : 0;
        else if (inside)
            w[(row - first) * m.cols + col] = *place;
    }
}

} // namespace

cudaError_t macko_toy16_write_cuda(const macko_toy16_matrix *m, const void *w, uint8_t *data, cudaStream_t stream) {
    const int64_t slabs = macko_slab_count(m->rows, m->cols);
    if (slabs)
        copy_slabs<true><<<(unsigned)slabs, THREADS, 0, stream>>>(*m, 0, m->rows, (uint16_t *)w, (uint16_t *)data);
    return cudaGetLastError();
}
