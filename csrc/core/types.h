/* What every format shares: element types and the layout-free notion of a fault in packed data. */
#pragma once

#include <stdint.h>

/* Functions that C and C++ call stand between the two. */
#ifdef __cplusplus
#define MACKO_C_BEGIN extern "C" {
#define MACKO_C_END }
#else
#define MACKO_C_BEGIN
#define MACKO_C_END
#endif

/* Functions of the host, which kernels call too. */
#ifdef __CUDACC__
#define MACKO_FN static __host__ __device__ __forceinline__
#else
#define MACKO_FN static inline
#endif

/* Functions of the CUDA library are declared where it is compiled. */
#if defined(__CUDACC__) || defined(USE_CUDA)
#define MACKO_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

/* Element type of the stored values, of x and of y. Sums are always kept in fp32. */
typedef enum macko_dtype {
    MACKO_F16 = 0,
    MACKO_BF16 = 1,
    MACKO_F32 = 2, /* CPU only */
} macko_dtype;

/* Where packed data breaks its format's rules. `kind` is the format's own enum, 0 for "no fault". */
typedef struct macko_fault {
    int64_t kind;
    int64_t row;   /* row of the matrix, or of row_ptr */
    int64_t entry; /* index into the stored entries, -1 where none is meant */
    int64_t found; /* the offending number */
} macko_fault;
