// The GEMM kernels of int8: a file for each type, so that they compile side by side.
#include "gemm_cuda.cuh"

template cudaError_t macko::slide_run<MACKO_SLIDE_S8>(slide_kind, slide_plan, const macko_slide_gemm_args &, int,
                                                      cudaStream_t);
