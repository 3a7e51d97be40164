// The toy16 layout from dense rows, and back, on CUDA.
#include "../../slab/slices.cuh"
#include "toy16.h"

using namespace macko;

namespace {

// Each thread takes a lane's elements of a slice.
__global__ void __launch_bounds__(THREADS) write_slabs(const macko_toy16_matrix m, const uint16_t *w, uint16_t *data) {
    const slice_of from(m.cols);
    for (int n = 0; n < MACKO_SLAB_TILES * 4 * STEP_ELEMENTS; n++) {
        const int tile = n / 32, step = n / 8 % 4, i = n % 8, e = i % MACKO_SLAB_QUAD;
        const int64_t row = from.row + macko_slab_row(from.lane, e);
        const int64_t col = from.col + tile * MACKO_SLAB_TILE_COLS + macko_slab_col(from.lane, 2 * step + i / 4, e);
        uint16_t *const slab = data + (int64_t)blockIdx.x * (MACKO_TOY16_SLAB_BYTES / 2);
        slab[((tile * 4 + from.slice) * 4 + step) * 256 + from.lane * 8 + i] =
            row < m.rows && col < m.cols ? w[row * m.cols + col] : 0;
    }
}

} // namespace

cudaError_t macko_toy16_write_cuda(const macko_toy16_matrix *m, const void *w, uint8_t *data, cudaStream_t stream) {
    return launch_slabs(m, stream, write_slabs, *m, (const uint16_t *)w, (uint16_t *)data);
}
