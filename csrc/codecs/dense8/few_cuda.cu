// Up to 64 tokens on CUDA for dense8: tile's kernel with another codec.
#include "../../slab/few_kernel.cuh"
#include "codec.cuh"

cudaError_t macko_dense8_few_cuda(const macko_dense8_matrix *m, int64_t tokens, const void *x, int64_t x_stride,
                                  const void *bias, const macko_slab_outputs *y, cudaStream_t stream) {
    return macko::with_weight(
        *m, [&](const auto &weight) { return macko::multiply_few(weight, tokens, x, x_stride, bias, *y, stream); });
}
