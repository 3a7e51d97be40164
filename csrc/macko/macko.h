/*
 * The macko format: the canonical one, the one that is saved. This header is its only specification.
 *
 * A matrix [rows, cols] is stored row after row, with no alignment between rows. An entry is a value and a delta.
 *   delta = columns skipped since the previous entry of the row (since the row's start for its first entry).
 * A delta has delta_bits = 2, 4 or 8 bits and is at most delta_max = 2^delta_bits - 1. A longer run of zeros stores an
 * explicit zero value (+0.0, delta delta_max) at every 2^delta_bits-th column of the run. Nothing is stored after a
 * row's last non-zero. Zeros of either sign are dropped; NaN and Inf are values and keep their bits.
 *
 * Size of a 16-bit matrix of density d over its dense size, z = (1 - d)^(2^delta_bits):
 * (1 + delta_bits / 16) d (1 + z / (1 - z)). 4 bits are the smallest from about density 0.07 to 0.35, and near it
 * everywhere; they are the default. Source: the MACKO-SpMV paper and its appendix.
 */
#pragma once

#include "../core/types.h"

MACKO_C_BEGIN

enum {
    MACKO_CHUNK = 8, /* entries fetched together: 16 B of fp16, delta_bits bytes of deltas */
};

/* A packed matrix. `capacity` is the stored count, row_ptr[rows], rounded up to MACKO_CHUNK. */
typedef struct macko_matrix {
    const void *values;     /* [capacity] of dtype; +0.0 after the last entry */
    const uint8_t *deltas;  /* [capacity * delta_bits / 8], low bits first; 0 after the last entry */
    const int32_t *row_ptr; /* [rows + 1] first entry of each row; row_ptr[0] = 0 */
    int64_t rows, cols, capacity;
    macko_dtype dtype;
    int delta_bits;
} macko_matrix;

/* macko_fault.kind, in the order in which they are looked for. */
enum {
    MACKO_OK = 0,
    MACKO_ROW_PTR_START, /* row_ptr[0] is not 0 */
    MACKO_ROW_PTR_FALLS, /* row_ptr[row + 1] < row_ptr[row] */
    MACKO_ROW_PTR_END,   /* row_ptr[row + 1] > capacity, or capacity is not row_ptr[rows] rounded up */
    MACKO_COLUMN_END,    /* an entry lies at a column >= cols */
    MACKO_STRAY_ZERO,    /* a zero value whose delta is not delta_max, or that ends its row, or that is -0.0 */
    MACKO_PADDING,       /* a value or delta after the last entry is not 0 */
};

/*
 * CPU. Each function does rows [begin, end) so that the caller owns the threads; ranges may run at the same time.
 * The vector path (scalar, avx2, avx512) is the best the machine has; MACKO_CPU=<path> in the environment forces one.
 */

/* Stored entries of each row of w [rows, cols], contiguous, to counts[begin..end). */
void macko_pack_count_cpu(const void *w, macko_dtype dtype, int delta_bits, int64_t cols, int64_t begin, int64_t end,
                          int64_t *counts);

/* Writes values and deltas of the rows. deltas must be zero before the first call: rows share bytes. */
void macko_pack_write_cpu(const void *w, macko_dtype dtype, int delta_bits, int64_t cols, int64_t begin, int64_t end,
                          const int32_t *row_ptr, void *values, uint8_t *deltas);

/* The first fault that makes reading unsafe: row_ptr, columns. What spmv and unpack look for too. */
macko_fault macko_check_bounds_cpu(const macko_matrix *m, int64_t begin, int64_t end);

/* The first fault of any kind. Called with begin == end == rows it looks at the capacity and the padding. */
macko_fault macko_check_cpu(const macko_matrix *m, int64_t begin, int64_t end);

/* Writes the rows densely to w [end - begin, cols]. Stops at the first fault of bounds. */
macko_fault macko_unpack_cpu(const macko_matrix *m, int64_t begin, int64_t end, void *w);

/*
 * y = W x + bias (bias may be NULL); x [cols], bias and y [rows] of dtype. Stops at the first fault of bounds.
 * Sums are kept in fp32. A product goes through at most stored + 2 roundings on the scalar path, stored / 16 + 22 on the
 * others, `stored` of its row. No number is flushed to zero.
 */
macko_fault macko_spmv_cpu(const macko_matrix *m, const void *x, const void *bias, int64_t begin, int64_t end, void *y);

#ifdef MACKO_HAVE_CUDA
/*
 * CUDA. Everything is enqueued on `stream` of the current device; nothing synchronises or allocates.
 * Every pointer is a device pointer; fp16 and bf16 only. values lies at a multiple of 16 bytes, deltas at one of
 * delta_bits bytes; w, x, bias and y lie anywhere.
 */

/*
 * counts -> row_ptr [rows + 1] int64, by an inclusive scan in the same call; the last one goes to *stored too, which may
 * be pinned memory of the host. With delta_bits 0 for widths 4, 2 and 8: row_ptr [3][rows + 1], stored [3].
 */
cudaError_t macko_pack_count_cuda(const void *w, int delta_bits, int64_t rows, int64_t cols, int64_t *row_ptr,
                                  int64_t *stored, cudaStream_t stream);

/* Writes row_ptr as int32, and all of values and deltas, padding included. */
cudaError_t macko_pack_write_cuda(const void *w, int delta_bits, int64_t rows, int64_t cols, const int64_t *row_ptr64,
                                  int64_t capacity, int32_t *row_ptr, void *values, uint8_t *deltas,
                                  cudaStream_t stream);

/* Writes the fault of the lowest row to *fault (device memory); `bounds_only` as macko_check_bounds_cpu. */
cudaError_t macko_check_cuda(const macko_matrix *m, int bounds_only, macko_fault *fault, cudaStream_t stream);

/* Writes w [rows, cols]. Corrupted rows come out as NaN; nothing is read or written out of bounds. */
cudaError_t macko_unpack_cuda(const macko_matrix *m, void *w, cudaStream_t stream);

/* y = W x + bias. Corrupted rows come out as NaN; nothing is read out of bounds. Same bits every run. */
cudaError_t macko_spmv_cuda(const macko_matrix *m, const void *x, const void *bias, void *y, cudaStream_t stream);
#endif

MACKO_C_END
