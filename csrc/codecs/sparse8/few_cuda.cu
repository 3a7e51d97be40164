// Up to 64 tokens on CUDA for sparse8: tile's kernel with another codec.
#include "../../slab/few_kernel.cuh"
#include "codec.cuh"

static_assert(macko::densest_has_plan<macko::sparse8<macko_byte_kind(0), __half>>(
    MACKO_SPARSE8_VALUES_AT + MACKO_SPARSE8_MOST_ROWS * MACKO_SPARSE8_ROW_BYTES));

cudaError_t macko_sparse8_few_cuda(const macko_sparse8_matrix *m, int64_t tokens, const void *x, int64_t x_stride,
                                   const void *bias, const macko_slab_outputs *y, cudaStream_t stream) {
    return macko::with_weight(
        *m, [&](const auto &weight) { return macko::multiply_few(weight, tokens, x, x_stride, bias, *y, stream); });
}
