// slide_gemm on CUDA: which output tile. Kernel, tensor maps and launch are in gemm_cuda.cuh.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "../core/cuda.cuh"
#include "gemm_cuda.cuh"

namespace macko {

extern template cudaError_t slide_run<MACKO_SLIDE_S8>(slide_kind, slide_size, const macko_slide_gemm_args &, int,
                                                      cudaStream_t);
extern template cudaError_t slide_run<MACKO_SLIDE_E4M3>(slide_kind, slide_size, const macko_slide_gemm_args &, int,
                                                        cudaStream_t);
extern template cudaError_t slide_run<MACKO_SLIDE_F16>(slide_kind, slide_size, const macko_slide_gemm_args &, int,
                                                       cudaStream_t);
extern template cudaError_t slide_run<MACKO_SLIDE_BF16>(slide_kind, slide_size, const macko_slide_gemm_args &, int,
                                                        cudaStream_t);

// The same for GPUs without wgmma; cudaErrorNotSupported where the type needs a later one.
cudaError_t slide_run_mma(slide_kind kind, const macko_slide_gemm_args &args, cudaStream_t stream);

namespace {

slide_size size_of_tile(slide_kind kind, const macko_slide_gemm_args &args, int num_sms) {
    if (const int *said = macko_knob(MACKO_KNOB_SLIDE_TILE)) return slide_size(said[0] << 16 | said[1]);
    const macko_slide_shape &shape = args.weight.shape;
    const macko_slide_plan plan = macko_slide_plan_of(
        shape.rows, args.tokens, macko_slide_k_tiles(shape.cols, shape.n, shape.type), kind == SLIDE_SPARSE, num_sms);
    return slide_size(plan.tile_rows << 16 | plan.tile_tokens);
}

} // namespace
} // namespace macko

cudaError_t macko_slide_gemm_cuda(const macko_slide_gemm_args *args, cudaStream_t stream) {
    using namespace macko;
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    const slide_kind kind = args->weight.shape.n ? SLIDE_SPARSE : SLIDE_DENSE;
    if (!has_wgmma(device.major)) return slide_run_mma(kind, *args, stream);
    const slide_size size = size_of_tile(kind, *args, device.num_sms);
    switch (args->weight.shape.type) {
    case MACKO_SLIDE_S8: return slide_run<MACKO_SLIDE_S8>(kind, size, *args, device.num_sms, stream);
    case MACKO_SLIDE_E4M3: return slide_run<MACKO_SLIDE_E4M3>(kind, size, *args, device.num_sms, stream);
    case MACKO_SLIDE_F16: return slide_run<MACKO_SLIDE_F16>(kind, size, *args, device.num_sms, stream);
    default: return slide_run<MACKO_SLIDE_BF16>(kind, size, *args, device.num_sms, stream);
    }
}
