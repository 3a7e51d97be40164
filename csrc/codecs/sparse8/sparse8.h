/*
 * The sparse8 layout: a sparse matrix in a bit an element and 8 bits a value, e4m3 or int8, and a float32 scale a row. This
 * header and ../dense8/bytes.h are its only specification.
 *
 * Slabs, tiles, slices, lanes, steps and elements are those of ../../slab/slab.h, scales and products those of
 * ../dense8/dense8.h. Codes that are zero are dropped. Some 0.70 bytes a weight at
 * density 0.5, 0.89 at 0.7.
 *
 *   bytes of a slab
 *   0                       2048              2560                     2688
 *   | masks                 | starts          | slices                 | values
 *   | u32 [tile][slice]     | u8 [slice]      | u32 [slice],           | rows of 128 bytes,
 *   |     [lane]            |    [lane][4]    | then zeros             | slice after slice
 *
 *   masks        bit 4 i + {2, 1, 0, 3}[b]: element i of step b has a value
 *   stream       of a lane in a slice of a slab: its codes, by tile, in it by step, in it those of elements 0, 1, 2, 3, 7,
 *                6, 5, 4. Its head (tiles 0 and 1) and its tail (tiles 2 and 3) lie in columns, as ../../slab/columns_cpu.h has it
 *   starts       of a lane in a slice, as there
 *   slices       the byte of the slab where the slice's values begin. What no value takes is 0
 */
#pragma once

#include "../../core/types.h"
#include "../dense8/bytes.h"

MACKO_C_BEGIN

enum {
    MACKO_SPARSE8_STARTS_AT = MACKO_SLAB_TILES * MACKO_SLAB_MASK_BYTES,
    MACKO_SPARSE8_SLICES_AT = MACKO_SPARSE8_STARTS_AT + MACKO_SLAB_SLICES * MACKO_SLAB_LANES * 4,
    MACKO_SPARSE8_VALUES_AT = MACKO_SPARSE8_SLICES_AT + MACKO_SLAB_UNIT,
    MACKO_SPARSE8_ROW_BYTES = MACKO_SLAB_COLUMNS_ROW_BYTES,
    MACKO_SPARSE8_MOST_ROWS = MACKO_SLAB_COLUMNS_MOST_ROWS, /* of values of a slab */
};

typedef struct macko_sparse8_matrix {
    const uint8_t *data;    /* [MACKO_SLAB_UNIT * offsets[slabs]], 16-byte aligned (fastest: 128) */
    const int32_t *offsets; /* [slabs + 1], in units */
    const float *scales;    /* [rows], above 0 and below MACKO_BYTE_LARGEST_SCALE */
    int64_t rows, cols;
    int32_t widest; /* units of the largest slab; 0 where there are none */
    int64_t units;  /* of all slabs */
    macko_byte_kind kind;
    macko_dtype dtype; /* of x and y, MACKO_BF16 or MACKO_F16 */
} macko_sparse8_matrix;

/* Units of a slab with so many rows of values. */
MACKO_FN int macko_sparse8_units(int value_rows) {
    return (MACKO_SPARSE8_VALUES_AT + value_rows * MACKO_SPARSE8_ROW_BYTES) / MACKO_SLAB_UNIT;
}

/* Bit of a mask, of element i of a step. */
MACKO_FN int macko_sparse8_bit(int step, int i) {
    return 4 * i + (step < 3 ? 2 - step : 3);
}

MACKO_SLAB_CODEC(sparse8, uint8_t)
MACKO_SLAB_CODEC_COUNT(sparse8, uint8_t)

/* macko_fault.kind. */
enum {
    MACKO_SPARSE8_OK = 0,
    MACKO_SPARSE8_SCALE,   /* a scale is not above 0, or too large; found: the row */
    MACKO_SPARSE8_OFFSETS, /* offsets[entry] is not 0 at the start, or no slab's units after the one before; found: it */
    MACKO_SPARSE8_WIDEST,  /* the largest slab has not m->widest units; found: how many */
    MACKO_SPARSE8_END,     /* the last offset is not the size of data; found: the offset */
    MACKO_SPARSE8_OUTSIDE, /* a mask has a bit outside of the matrix; found: byte of the slab */
    MACKO_SPARSE8_COUNT,   /* the slab has another size than its masks say; found: the rows of values that they say */
    MACKO_SPARSE8_START,   /* a start is not what the masks say; found: byte of the slab */
    MACKO_SPARSE8_SLICE,   /* a slice does not begin where it should, or no zeros follow; found: byte of the slab */
    MACKO_SPARSE8_CODE,    /* a stored code is zero or NaN, or not zero where no value is; found: byte of the slab */
};

MACKO_C_END
