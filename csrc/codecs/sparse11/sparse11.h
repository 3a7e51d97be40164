/*
 * The sparse11 layout: a sparse matrix of bfloat16, or of float16 numbers that were once bfloat16, in 3 bits an element and
 * 8 bits a value, bit for bit. This header is its only specification.
 *
 * Pruned weights lie within few powers of two, fewer than dense ones: seven high bytes of a bfloat16, which are its sign
 * and e[7:1], hold all but some in a thousand. So an element is a code of three bits, which says that it has no value or
 * names the high byte by a table, and a value is the low byte, e[0] and the mantissa. Values that the table lacks stand in
 * a list after each slab's. Zeros of either sign are dropped, NaN and Inf are values. Slabs, tiles, slices, lanes, steps and
 * elements are those of ../../slab/slab.h. It depends on no device and converts back bit for bit. Some 0.95 bytes a weight at density 0.5, 1.14 at 0.7.
 *
 *   bfloat16     | s | e7 .. e1 | e0 | m6 .. m0 |           the high byte is s and e[7:1], the low one e[0] and the mantissa
 *   float16      | s | e4 .. e1 | e0 | m9 .. m3 | 000 |     is taken as | 000 | s | e4 .. e1 | e0 | m9 .. m3 |. What has
 *                other bits at the end is in the list
 *
 *   bytes of a slab
 *   0                       6144              6656                     6784
 *   | codes                 | starts          | slices                 | values             | list         | zeros
 *   | u32 [tile][slice]     | u8 [slice]      | u32 [tile][slice],     | rows of 128 bytes, | u32 [places] |
 *   |     [3][lane]         |    [lane][4]    | an end, then zeros     | slice after slice  |              |
 *
 *   codes        of element i of step b < 3: bits 4 i .. 4 i + 2 of word b. Of element i of step 3: bit k is bit 4 i + 3
 *                of word k. Code 0: no value here, or one that is listed
 *   table        8 bytes, in the header: code c stands for the high byte table[c]. table[0] is 0. Then come the seven
 *                commonest high bytes of the matrix' values but 0 (of equally common ones the lower), the lower first;
 *                where there are not so many, zeros at the end
 *   stream       of a lane in a slice of a slab: the low bytes of its values that have a code, by tile, in it by step, in
 *                it those of elements 0, 1, 2, 3, 7, 6, 5, 4. Its head (tiles 0 and 1) and its tail (tiles 2 and 3) lie in
 *                columns, as ../../slab/columns_cpu.h has it. What no value takes is 0
 *   starts       of a lane in a slice, as there
 *   slices       of a tile and slice: the byte of the slab where the slice's values begin, and << 16 the byte of the slab
 *                where its list begins. The word after them is MACKO_SPARSE11_END, the list of slices
 *                that have none
 *   list         of each slice of a tile with values that have no code: a word each,
 *                step << 24 | lane << 19 | i << 16 | value, the
 *                lower first, then MACKO_SPARSE11_END
 */
#pragma once

#include "../../core/types.h"
#include "../../slab/slab.h"

MACKO_C_BEGIN

#define MACKO_SPARSE11_END 0xffffffffu /* above every place of the list */

enum {
    MACKO_SPARSE11_WORDS = 3, /* of codes, of a lane in a slice of a tile */
    MACKO_SPARSE11_SLICE_BYTES = MACKO_SPARSE11_WORDS * MACKO_SLAB_LANES * 4,
    MACKO_SPARSE11_STARTS_AT = MACKO_SLAB_TILE_SLICES * MACKO_SPARSE11_SLICE_BYTES,
    MACKO_SPARSE11_SLICES_AT = MACKO_SPARSE11_STARTS_AT + MACKO_SLAB_SLICES * MACKO_SLAB_LANES * 4,
    MACKO_SPARSE11_END_AT = MACKO_SPARSE11_SLICES_AT + MACKO_SLAB_TILE_SLICES * 4,
    MACKO_SPARSE11_VALUES_AT = MACKO_SPARSE11_SLICES_AT + MACKO_SLAB_UNIT,
    MACKO_SPARSE11_ROW_BYTES = MACKO_SLAB_COLUMNS_ROW_BYTES,
    MACKO_SPARSE11_MOST_ROWS = MACKO_SLAB_COLUMNS_MOST_ROWS, /* of values of a slab */
    MACKO_SPARSE11_MOST_LISTED = 2048,                       /* of a slab */
    MACKO_SPARSE11_MOST_UNITS = (MACKO_SPARSE11_VALUES_AT + MACKO_SPARSE11_MOST_ROWS * MACKO_SPARSE11_ROW_BYTES +
                                 4 * (MACKO_SPARSE11_MOST_LISTED + MACKO_SLAB_TILE_SLICES) + MACKO_SLAB_UNIT - 1) /
        MACKO_SLAB_UNIT, /* of a slab: bytes of it fit 16 bits */
};

typedef struct macko_sparse11_matrix {
    const uint8_t *data;    /* [MACKO_SLAB_UNIT * offsets[slabs]], 16-byte aligned (fastest: 128) */
    const int32_t *offsets; /* [slabs + 1], in units */
    int64_t rows, cols;
    int32_t widest;    /* units of the largest slab; 0 where there are none */
    uint32_t table[2]; /* the eight bytes, the first one lowest */
    int64_t units;     /* of all slabs */
    macko_dtype dtype; /* MACKO_BF16 or MACKO_F16 */
} macko_sparse11_matrix;

/* Units of a slab with so many rows of values, and words of its list. */
MACKO_FN int macko_sparse11_units(int value_rows, int words) {
    return (MACKO_SPARSE11_VALUES_AT + value_rows * MACKO_SPARSE11_ROW_BYTES + words * 4 + MACKO_SLAB_UNIT - 1) /
           MACKO_SLAB_UNIT;
}

/* Words of the list of a slice of a tile that has so many values in it. */
MACKO_FN int macko_sparse11_words(int listed) {
    return listed ? listed + 1 : 0;
}

/* A value as the layout takes it apart, and back; of float16 those without lower bits. */
MACKO_FN int macko_sparse11_low_bits(macko_dtype dtype) {
    return dtype == MACKO_F16 ? 3 : 0;
}
MACKO_FN uint32_t macko_sparse11_split(macko_dtype dtype, uint32_t value) {
    return value >> macko_sparse11_low_bits(dtype);
}
MACKO_FN uint32_t macko_sparse11_join(macko_dtype dtype, uint32_t split) {
    return split << macko_sparse11_low_bits(dtype);
}
MACKO_FN bool macko_sparse11_has_low_bits(macko_dtype dtype, uint32_t value) {
    return value & ((1u << macko_sparse11_low_bits(dtype)) - 1);
}

MACKO_SLAB_CODEC(sparse11, uint16_t)
MACKO_SLAB_CODEC_COUNT(sparse11, uint16_t)
MACKO_SLAB_CODEC_HISTOGRAM(sparse11, 256)

/* macko_fault.kind. */
enum {
    MACKO_SPARSE11_OK = 0,
    MACKO_SPARSE11_TABLE_ORDER, /* the table is not 0, then rising, then zeros, of float16 under 32; found: the byte's place */
    MACKO_SPARSE11_OFFSETS, /* offsets[entry] is not 0 at the start, or no slab's units after the one before; found: it */
    MACKO_SPARSE11_WIDEST,     /* the largest slab has not m->widest units; found: how many */
    MACKO_SPARSE11_END_OFFSET, /* the last offset is not the size of data; found: the offset */
    MACKO_SPARSE11_CODE,       /* a code of no high byte, or outside of the matrix; found: byte of the slab */
    MACKO_SPARSE11_START,      /* a start is not what the codes say; found: byte of the slab */
    MACKO_SPARSE11_SLICE, /* a slice does not begin where it should, or no zeros follow them; found: byte of the slab */
    MACKO_SPARSE11_ENTRY, /* in the list: not after the one before it, or more than a place; found: byte of the slab */
    MACKO_SPARSE11_LISTED, /* a listed value is zero or has a code, or its place has one or is outside; found: likewise */
    MACKO_SPARSE11_COUNT, /* the slab has another size than its codes and list say; found: the units that they say */
    MACKO_SPARSE11_ZERO,  /* not zero where no value is; found: byte of the slab */
};

MACKO_C_END
