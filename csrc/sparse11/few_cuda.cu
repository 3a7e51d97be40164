// Up to 64 tokens on CUDA for sparse11: tile's kernel with another codec.
#include "../tile/few_kernel.cuh"
#include "codec.cuh"

cudaError_t macko_sparse11_few_cuda(const macko_sparse11_matrix *m, int64_t tokens, const void *x, int64_t x_stride,
                                    const void *bias, const macko_tile_parts *y, cudaStream_t stream) {
    using namespace macko;
    if (!m->rows || !tokens) return cudaSuccess;
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    const float mean = (float)m->units / macko_tile_count(m->rows, m->cols);
    const auto run = [&](auto codec) {
        const few_weight<decltype(codec)> weight = {
            m->data, m->offsets, m->rows, m->cols, m->widest, mean, {{m->table[0], m->table[1]}}};
        return few_launch<decltype(codec)>(tokens)(weight, tokens, x, x_stride, bias, *y, device, stream);
    };
    return m->dtype == MACKO_F16 ? run(sparse11<__half>()) : run(sparse11<__nv_bfloat16>());
}
