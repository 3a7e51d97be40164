// Up to 64 tokens on CUDA for dense8: tile's kernel with another codec.
#include "../tile/few_kernel.cuh"
#include "codec.cuh"

cudaError_t macko_dense8_few_cuda(const macko_dense8_matrix *m, int64_t tokens, const void *x, int64_t x_stride,
                                  const void *bias, const macko_tile_parts *y, cudaStream_t stream) {
    using namespace macko;
    if (!m->rows || !tokens) return cudaSuccess;
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    return with_codec<dense8>(m->kind, m->dtype, [&](auto codec) {
        const few_weight<decltype(codec)> weight = {
            m->data, nullptr, m->rows, m->cols, MACKO_DENSE8_UNITS, (float)MACKO_DENSE8_UNITS, {m->scales}};
        return few_launch<decltype(codec)>(tokens)(weight, tokens, x, x_stride, bias, *y, device, stream);
    });
}
