/*
 * The planes12 format: how files hold a dense matrix of bfloat16 or float16 in 12 bits an element, bit for bit. This header
 * is its only specification. On a GPU such a weight is held as dense12 (../codecs/dense12/dense12.h), which takes elements
 * apart in the same way and has the same table; here they are in the order of rows, so that rows and columns can be cut
 * without unpacking, and no kernel's layout is in a file.
 *
 *   low      u8 [rows, cols]               the low byte of each element as dense12.h splits it: e[0] and the mantissa
 *   high     u8 [rows, (cols + 1) / 2]     a nibble an element, sign << 3 | code, that of the even column lower; after an
 *                                          odd number of columns 0
 *   table    u8 [8]                        code -> e[7:1]: 0, then rising bytes under 128 (float16: 16), then zeros
 *   row_ptr  i32 [rows + 1]                where each row's part of the list begins, and the list's end
 *   columns  i32 [listed]                  of elements that the table lacks, rising within a row
 *   values   16 bits [listed]              those elements; in the planes they are +0.0
 */
#pragma once

#include "../core/types.h"
#include "../slab/slab.h"

MACKO_C_BEGIN

typedef struct macko_planes12 {
    const uint8_t *low, *high, *table; /* table [8] */
    const int32_t *row_ptr, *columns;
    const uint16_t *values;
    int64_t rows, cols, listed;
    macko_dtype dtype; /* MACKO_BF16 or MACKO_F16 */
} macko_planes12;

MACKO_FN int64_t macko_planes12_high_bytes(int64_t cols) {
    return (cols + 1) / 2;
}

/*
 * CPU, rows [begin, end) each. Packing: histogram, the table by it (macko_slab_table); count; row_ptr by it; write. w is the
 * dense matrix [rows, cols], not a part of it.
 */

/* counts[e[7:1]] += elements, but for those that are listed whatever the table is. */
void macko_planes12_histogram_cpu(const macko_planes12 *m, const uint16_t *w, int64_t begin, int64_t end,
                                  int64_t counts[128]);
/* counts[row] = elements of each row that the table lacks. */
void macko_planes12_count_cpu(const macko_planes12 *m, const uint16_t *w, int64_t begin, int64_t end, int64_t *counts);
/* Planes and list; row_ptr is known. */
void macko_planes12_write_cpu(const macko_planes12 *m, const uint16_t *w, int64_t begin, int64_t end, uint8_t *low,
                              uint8_t *high, int32_t *columns, uint16_t *values);

/* macko_fault.kind, in the order in which they are looked for. */
enum {
    MACKO_PLANES12_OK = 0,
    MACKO_PLANES12_TABLE,   /* the table is not as above; found: the byte's place */
    MACKO_PLANES12_ROW_PTR, /* row_ptr does not begin with 0, falls, or does not end with the list; found: it */
    MACKO_PLANES12_COLUMN,  /* a column is not after the one before it, or outside of the matrix; found: it */
    MACKO_PLANES12_LISTED,  /* a listed value has a code, or in the planes its element is not +0.0; found: its column */
    MACKO_PLANES12_PADDING, /* the nibble after an odd number of columns is not 0; found: it */
};

/* The dense rows [begin, end) to w [rows, cols]; of faults what would write elsewhere: ROW_PTR and COLUMN. */
macko_fault macko_planes12_unpack_cpu(const macko_planes12 *m, int64_t begin, int64_t end, uint16_t *w);
/* Rows [begin, end); of all rows the table too. */
macko_fault macko_planes12_check_cpu(const macko_planes12 *m, int64_t begin, int64_t end);

#ifdef MACKO_HAVE_CUDA
/*
 * CUDA, all rows, on `stream` of the current device; pointers are device pointers but for the struct. *broken becomes 1, and
 * stays as it is where nothing is wrong: what is, the CPU says.
 */
cudaError_t macko_planes12_unpack_cuda(const macko_planes12 *m, uint16_t *w, int64_t *broken, cudaStream_t stream);
cudaError_t macko_planes12_check_cuda(const macko_planes12 *m, int64_t *broken, cudaStream_t stream);
#endif

MACKO_C_END
