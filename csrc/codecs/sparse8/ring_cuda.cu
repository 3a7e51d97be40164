// A few tokens on CUDA for sparse8 where there is no wgmma: slab/ring_kernel.cuh.
#include "../../slab/ring_launch.cuh"
#include "../../slab/unpack_kernel.cuh"
#include "codec.cuh"

extern "C" cudaError_t macko_sparse8_ring_cuda(const macko_sparse8_matrix *m, int64_t tokens, const void *x, int64_t x_stride,
                                             const void *bias, const macko_slab_outputs *y, void *workspace,
                                             cudaStream_t stream) {
    return macko::with_weight(*m, [&](const auto &weight) {
        return macko::multiply_ring(weight, tokens, x, x_stride, bias, *y, workspace, stream);
    });
}

extern "C" cudaError_t macko_sparse8_unpack_by_ring(const macko_sparse8_matrix *m, int64_t first, int64_t count, void *w,
                                                cudaStream_t stream) {
    return macko::with_weight(*m, [&](const auto &weight) {
        return macko::unpack_by_ring(weight, first, count, w, stream);
    });
}
