// Many tokens (torch/path.h) on CUDA for sparse11: tile's kernel with another codec.
#include "../tile/many_launch.cuh"
#include "codec.cuh"

cudaError_t macko_sparse11_many_plan_cuda(const macko_sparse11_matrix *m, int64_t tokens, macko_tile_many_plan *plan) {
    return macko::plan_many<macko::sparse11>(m->rows, m->cols, m->widest, tokens, plan);
}

cudaError_t macko_sparse11_many_cuda(const macko_sparse11_matrix *m, int64_t tokens, const void *x, int64_t x_stride,
                                     const void *bias, void *y, const macko_tile_many_plan *plan, void *workspace,
                                     cudaStream_t stream) {
    using namespace macko;
    const many_weight<sparse11> weight = {
        m->data, m->offsets, m->rows, m->cols, m->widest, m->whole ? m->units : 0, {{m->table[0], m->table[1]}}};
    return launch_many(weight, tokens, x, x_stride, bias, y, *plan, workspace, stream);
}
