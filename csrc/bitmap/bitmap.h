/*
 * The bitmap layout: how a CPU runs a matrix of the macko format. This header is its only specification.
 *
 * One bit a column says where the non-zeros are; the non-zeros stand row after row, with no alignment between rows. No
 * explicit zeros: they follow from the mask and delta_bits when the macko format is made again. A 16-bit matrix of
 * density d takes d + 1/16 of its dense size. At 50 % sparse that is 10 % less than 4-bit deltas, and a vector of
 * columns is one expansion by a mask register and a contiguous piece of x.
 */
#pragma once

#include "../macko/macko.h"

MACKO_C_BEGIN

enum {
    MACKO_BITMAP_WORD = 64,    /* columns a word: a row has a whole number of words, of 8 bytes each */
    MACKO_BITMAP_TOKENS = 512, /* at most, of one macko_bitmap_spmm_cpu: its sums are on the stack */
    MACKO_BITMAP_PAD = 32,     /* elements after the last value, so that the last expansion may read a whole vector */
};

typedef struct macko_bitmap {
    const void *values;     /* [capacity] of dtype, none of them zero; the last MACKO_BITMAP_PAD are +0.0 */
    const uint8_t *bits;    /* [rows, words * 8]; column c is bit c % 8 of byte c / 8; 0 after the last column */
    const int32_t *row_ptr; /* [rows + 1] first value of each row; row_ptr[0] = 0, row_ptr[rows] = capacity - PAD */
    int64_t rows, cols, capacity;
    macko_dtype dtype;
} macko_bitmap;

static inline int64_t macko_bitmap_words(int64_t cols) {
    return (cols + MACKO_BITMAP_WORD - 1) / MACKO_BITMAP_WORD;
}

/* macko_fault.kind, in the order in which they are looked for; up to COUNT they would make reading unsafe. */
enum {
    MACKO_BITMAP_OK = 0,
    MACKO_BITMAP_ROW_PTR,  /* row_ptr[row] is not 0 (row 0), less than the one before, or more than capacity - PAD */
    MACKO_BITMAP_COUNT,    /* the row has another number of bits than row_ptr says; found: the bits */
    MACKO_BITMAP_COLUMN,   /* a bit is set at a column >= cols; found: the column */
    MACKO_BITMAP_ZERO,     /* values[entry] is a zero */
    MACKO_BITMAP_CAPACITY, /* capacity is not row_ptr[rows] + PAD; found: row_ptr[rows] */
    MACKO_BITMAP_PADDING,  /* values[entry] after the last value is not +0.0 */
};

/* CPU only. Each function does rows [begin, end), as those of macko.h. */

/* Non-zeros of each row of the matrix to counts[begin..end). It has passed macko_check_bounds_cpu. */
void macko_bitmap_count_cpu(const macko_matrix *m, int64_t begin, int64_t end, int64_t *counts);

/* Writes values, but for the padding, and bits of the rows. bits are zero before the call. */
void macko_bitmap_pack_cpu(const macko_matrix *m, int64_t begin, int64_t end, const int32_t *row_ptr, void *values,
                           uint8_t *bits);

/* Entries of each row in the macko format to counts[begin..end). Stops at the first fault of bounds. */
macko_fault macko_bitmap_entries_cpu(const macko_bitmap *m, int delta_bits, int64_t begin, int64_t end,
                                     int64_t *counts);

/* The first fault that makes reading unsafe. */
macko_fault macko_bitmap_check_bounds_cpu(const macko_bitmap *m, int64_t begin, int64_t end);

/* The first fault of any kind. Called with begin == end == rows it looks at the capacity and the padding. */
macko_fault macko_bitmap_check_cpu(const macko_bitmap *m, int64_t begin, int64_t end);

/* Writes the rows densely to w [end - begin, cols]. Stops at the first fault of bounds. */
macko_fault macko_bitmap_expand_cpu(const macko_bitmap *m, int64_t begin, int64_t end, void *w);

/*
 * y = x W^T + bias (bias may be NULL); x [tokens, cols], y [tokens, rows], bias [rows] of dtype. A row is read from
 * memory once for four tokens. Stops at the first fault of bounds.
 *
 * Sums are kept in fp32 and rounded once, at the end. A product goes through at most stored + 2 roundings on the scalar
 * path, cols / 16 + 40 on the others. No number is taken as zero.
 */
macko_fault macko_bitmap_spmv_cpu(const macko_bitmap *m, const void *x, int64_t tokens, const void *bias, int64_t begin,
                                  int64_t end, void *y);

/*
 * The same for up to MACKO_BITMAP_TOKENS tokens, from an x that was turned before; bits of y depend on the number of tokens.
 * The sums of a row are in one order, in fp32, and rounded once, at the end. A product goes through at most stored + 2
 * roundings: adding a zero is exact, so any order will do. With avx512_bf16 subnormal numbers, of bf16 and among the sums,
 * are taken as zero, as torch's own product does there.
 */
macko_fault macko_bitmap_spmm_cpu(const macko_bitmap *m, const void *turned, int64_t tokens, const void *bias,
                                  int64_t begin, int64_t end, void *y);

/* Bytes of the turned x of up to MACKO_BITMAP_TOKENS tokens; 0 on the scalar path, which has no macko_bitmap_spmm_cpu. */
int64_t macko_bitmap_turned_bytes(const macko_bitmap *m, int64_t tokens);

/* Writes the columns of the words [begin, end) of x [tokens, cols] to the turned one, which begins at a multiple of 64. */
void macko_bitmap_turn_cpu(const macko_bitmap *m, const void *x, int64_t tokens, int64_t begin, int64_t end,
                           void *turned);

MACKO_C_END
