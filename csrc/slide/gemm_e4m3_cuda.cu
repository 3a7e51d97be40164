// The GEMM kernels of float8 e4m3: a file for each type, so that they compile side by side.
#include "gemm_cuda.cuh"

template cudaError_t macko::slide_run<MACKO_SLIDE_E4M3>(slide_kind, slide_plan, const macko_slide_gemm_args &, int,
                                                        cudaStream_t);
