// Many tokens (torch/path.h) on CUDA for sparse11: tile's kernel with another codec.
#include "../tile/many_launch.cuh"
#include "codec.cuh"

cudaError_t macko_sparse11_many_plan_cuda(const macko_sparse11_matrix *m, int64_t tokens, macko_tile_many_plan *plan) {
    using namespace macko;
    return m->dtype == MACKO_F16 ? plan_many<sparse11<__half>>(m->rows, m->cols, m->widest, tokens, plan)
                                 : plan_many<sparse11<__nv_bfloat16>>(m->rows, m->cols, m->widest, tokens, plan);
}

cudaError_t macko_sparse11_many_cuda(const macko_sparse11_matrix *m, int64_t tokens, const void *x, int64_t x_stride,
                                     const void *bias, const macko_tile_parts *y, const macko_tile_many_plan *plan,
                                     void *workspace, cudaStream_t stream) {
    using namespace macko;
    const auto run = [&](auto codec) {
        const many_weight<decltype(codec)> weight = {
            m->data, m->offsets, m->rows, m->cols, m->widest, m->units, {{m->table[0], m->table[1]}}};
        return launch_many(weight, tokens, x, x_stride, bias, *y, *plan, workspace, stream);
    };
    return m->dtype == MACKO_F16 ? run(sparse11<__half>()) : run(sparse11<__nv_bfloat16>());
}
