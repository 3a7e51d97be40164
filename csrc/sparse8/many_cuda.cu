// Many tokens (torch/path.h) on CUDA for sparse8: tile's kernel with another codec.
#include "../tile/many_launch.cuh"
#include "codec.cuh"

cudaError_t macko_sparse8_many_plan_cuda(const macko_sparse8_matrix *m, int64_t tokens, macko_tile_many_plan *plan) {
    using namespace macko;
    return with_codec<sparse8>(m->kind, m->dtype, [&](auto codec) {
        return plan_many<decltype(codec)>(m->rows, m->cols, m->widest, tokens, plan);
    });
}

cudaError_t macko_sparse8_many_cuda(const macko_sparse8_matrix *m, int64_t tokens, const void *x, int64_t x_stride,
                                    const void *bias, const macko_tile_parts *y, const macko_tile_many_plan *plan,
                                    void *workspace, cudaStream_t stream) {
    using namespace macko;
    return with_codec<sparse8>(m->kind, m->dtype, [&](auto codec) {
        const many_weight<decltype(codec)> weight = {m->data,   m->offsets, m->rows,    m->cols,
                                                     m->widest, m->units,   {m->scales}};
        return launch_many(weight, tokens, x, x_stride, bias, *y, *plan, workspace, stream);
    });
}
