// slide_gemm on CUDA: which tile, tensor maps, launch. The kernel is in gemm_cuda.cuh.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "gemm_cuda.cuh"

namespace macko {

extern template cudaError_t slide_run<MACKO_SLIDE_S8>(slide_kind, int, const macko_slide_gemm_args &, int,
                                                      cudaStream_t);
extern template cudaError_t slide_run<MACKO_SLIDE_E4M3>(slide_kind, int, const macko_slide_gemm_args &, int,
                                                        cudaStream_t);
extern template cudaError_t slide_run<MACKO_SLIDE_F16>(slide_kind, int, const macko_slide_gemm_args &, int,
                                                       cudaStream_t);
extern template cudaError_t slide_run<MACKO_SLIDE_BF16>(slide_kind, int, const macko_slide_gemm_args &, int,
                                                        cudaStream_t);

cudaError_t slide_map(CUtensorMap *map, CUtensorMapDataType type, const void *data, int64_t inner, int64_t outer,
                      int64_t inner_bytes, int box_inner, int box_outer) {
    // The driver's function is asked for at run time: nothing is linked against libcuda.
    static const auto encode = [] {
        void *found = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        return (decltype(&cuTensorMapEncodeTiled))found;
    }();
    if (!encode) return cudaErrorNotSupported;
    const cuuint64_t extents[2] = {(cuuint64_t)inner, (cuuint64_t)outer}, strides[1] = {(cuuint64_t)inner_bytes};
    const cuuint32_t box[2] = {(cuuint32_t)box_inner, (cuuint32_t)box_outer}, steps[2] = {1, 1};
    const CUresult result =
        encode(map, type, 2, const_cast<void *>(data), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

namespace {

// Tokens of a tile. Up to 64 tokens the weights' bytes are the time: the smallest tile that holds all tokens. Above, the
// least rounds times the time of a round, in per cent of the largest tile's (H200, 2026-11-21, 28 to 222 stages).
// MACKO_SLIDE_TILE forces one.
int tokens_of_tile(slide_kind kind, int64_t tokens, int64_t rows, int num_sms) {
    if (const char *forced = getenv("MACKO_SLIDE_TILE")) return atoi(forced);
    if (tokens <= 64) return tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64;
    const struct {
        int tokens, rows, per_sm, time[2];
    } tiles[] = {{64, 64, 2, {45, 54}}, {128, 128, 1, {59, 66}}, {192, 128, 1, {78, 80}}, {256, 128, 1, {100, 100}}};
    int best = 0;
    int64_t least = INT64_MAX;
    for (const auto &tile : tiles) {
        const int64_t count = (rows + tile.rows - 1) / tile.rows * ((tokens + tile.tokens - 1) / tile.tokens);
        const int64_t slots = (int64_t)num_sms * tile.per_sm, time = (count + slots - 1) / slots * tile.time[kind];
        if (time < least) least = time, best = tile.tokens;
    }
    return best;
}

} // namespace
} // namespace macko

cudaError_t macko_slide_gemm_cuda(const macko_slide_gemm_args *args, cudaStream_t stream) {
    using namespace macko;
    int device = 0, major = 0, minor = 0, num_sms = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return status;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (major != 9 || minor != 0) return cudaErrorNotSupported;
    const slide_kind kind = args->weight.shape.n ? SLIDE_SPARSE : SLIDE_DENSE;
    const int tokens = tokens_of_tile(kind, args->tokens, args->weight.shape.rows, num_sms);
    switch (args->weight.shape.type) {
    case MACKO_SLIDE_S8: return slide_run<MACKO_SLIDE_S8>(kind, tokens, *args, num_sms, stream);
    case MACKO_SLIDE_E4M3: return slide_run<MACKO_SLIDE_E4M3>(kind, tokens, *args, num_sms, stream);
    case MACKO_SLIDE_F16: return slide_run<MACKO_SLIDE_F16>(kind, tokens, *args, num_sms, stream);
    default: return slide_run<MACKO_SLIDE_BF16>(kind, tokens, *args, num_sms, stream);
    }
}
