// Many tokens (torch/path.h) on CUDA for dense12: tile's kernel with another codec.
#include "../tile/many_launch.cuh"
#include "codec.cuh"

cudaError_t macko_dense12_many_plan_cuda(const macko_dense12_matrix *m, int64_t tokens, macko_tile_many_plan *plan) {
    using namespace macko;
    const auto make = m->dtype == MACKO_F16 ? plan_many<dense12<__half>> : plan_many<dense12<__nv_bfloat16>>;
    return make(m->rows, m->cols, m->slab_units, tokens, plan);
}

cudaError_t macko_dense12_many_cuda(const macko_dense12_matrix *m, int64_t tokens, const void *x, int64_t x_stride,
                                    const void *bias, const macko_tile_parts *y, const macko_tile_many_plan *plan,
                                    void *workspace, cudaStream_t stream) {
    using namespace macko;
    const auto run = [&](auto codec) {
        const many_weight<decltype(codec)> weight = {
            m->data, nullptr, m->rows, m->cols, m->slab_units, 0, {{m->table[0], m->table[1]}}};
        return launch_many(weight, tokens, x, x_stride, bias, *y, *plan, workspace, stream);
    };
    return m->dtype == MACKO_F16 ? run(dense12<__half>()) : run(dense12<__nv_bfloat16>());
}
