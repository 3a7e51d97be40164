// Many tokens (torch/path.h) on CUDA for dense12: tile's kernel with another codec.
#include "../../slab/many_launch.cuh"
#include "codec.cuh"

cudaError_t macko_dense12_many_plan_cuda(const macko_dense12_matrix *m, int64_t tokens, macko_slab_many_plan *plan) {
    return macko::with_weight(*m, [&](const auto &weight) { return macko::plan_many(weight, tokens, plan); });
}

cudaError_t macko_dense12_many_cuda(const macko_dense12_matrix *m, int64_t tokens, const void *x, int64_t x_stride,
                                    const void *bias, const macko_slab_outputs *y, const macko_slab_many_plan *plan,
                                    void *workspace, cudaStream_t stream) {
    return macko::with_weight(*m, [&](const auto &weight) {
        return macko::multiply_many(weight, tokens, x, x_stride, bias, *y, *plan, workspace, stream);
    });
}
