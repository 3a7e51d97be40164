// The dense8 layout from codes, on CUDA. A thread block owns a slab, a warp a slice of it: 16 rows and
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
        for (int two = 0; two < MACKO_SLAB_STEPS / 2; two++) {
            uint32_t words[2][2];
            for (int k = 0; k < 2; k++)
                load_codes(w, m.rows, m.cols, from, tile, 2 * two + k, m.kind, m.dtype, words[k]);
            uint8_t *const tile_slice = slab + (tile * MACKO_SLAB_SLICES + from.slice) * MACKO_DENSE8_SLICE_BYTES;
            ((uint4 *)tile_slice)[two * WARP + from.lane] = {words[0][0], words[0][1], words[1][0], words[1][1]};
        }
}

} // namespace

cudaError_t macko_dense8_write_cuda(const macko_dense8_matrix *m, const void *w, uint8_t *data, cudaStream_t stream) {
    return launch_slabs(m, stream, write_slabs, *m, (const uint8_t *)w, data);
}
