/*
 * The dense12 layout: a dense matrix of bfloat16, or of float16 numbers that were once bfloat16, in 12 bits an element, bit
 * for bit. This header is its only specification.
 *
 * Trained weights of a matrix lie within few powers of two: seven values of a bfloat16's upper exponent bits, e[7:1],
 * hold all but some in ten thousand. So an element is a sign and a code of three bits, which names e[7:1] by a table, and
 * a byte, e[0] and the mantissa. The other elements stand in a list after each slab. Slabs, tiles, slices, lanes, steps
 * and elements are those of ../../slab/slab.h.
 *
 *   bfloat16     | s | e7 .. e1 | e0 | m6 .. m0 |      the high byte is s and e[7:1], the low one e[0] and the mantissa
 *   float16      | s | e4 .. e1 | e0 | m9 .. m3 | 000 |  is taken as | s | 000 | e4 .. e1 | e0 | m9 .. m3 |, so e[7:1] is
 *                e[4:1]. What has other bits at the end is in the list: released weights were trained as bfloat16, and
 *                have none, but for denormals
 *
 *   bytes of a slab: MACKO_DENSE12_LIST_AT + 64 and more, a multiple of 128, the same for all slabs of a matrix
 *   0                                                         24576                24640
 *   | elements: 1536 bytes for each tile and slice            | bounds             | list            | zeros
 *   | 16 bytes [tile][slice][3][lane]                         | u32 [tile][slice]  | u32 [entries]
 *
 *   elements     of a lane in a slice of a tile, 3 x 16 bytes: low bytes of steps 0 and 1, those of steps 2 and 3, and
 *                a word of codes for each step
 *   low bytes    8 of a step: that of element i is byte i
 *   codes        of a step: bits 4 i .. 4 i + 2 are the code of element i; bit 8 i + 7 is the sign of element i (i < 4),
 *                bit 8 i + 3 that of element 4 + i
 *   table        8 bytes, in the header: code c stands for high bytes whose lower seven bits are table[c]. table[0] is 0.
 *                Then come the seven commonest others of the matrix (of equally common ones the lower), the lower first;
 *                where there are not so many, zeros at the end. An element has the lowest code that stands for it
 *   list         elements of the slab whose e[7:1] the table lacks, Inf and NaN among them: in place they are +0.0.
 *                value << 16 | step << 8 | lane << 3 | i, for each slice of each tile those with the lower step, lane, i
 *                first. Those of a slice of a tile are entries [bounds & 0xffff, bounds >> 16) of the slab
 *   outside of the matrix elements are +0.0
 */
#pragma once

#include "../../core/types.h"
#include "../../slab/slab.h"

MACKO_C_BEGIN

enum {
    MACKO_DENSE12_CHUNK = 16, /* bytes; a lane has three in a slice of a tile */
    MACKO_DENSE12_SLICE_BYTES = 3 * MACKO_DENSE12_CHUNK * MACKO_SLAB_LANES,
    MACKO_DENSE12_BOUNDS_AT = MACKO_SLAB_TILE_SLICES * MACKO_DENSE12_SLICE_BYTES,
    MACKO_DENSE12_LIST_AT = MACKO_DENSE12_BOUNDS_AT + MACKO_SLAB_TILE_SLICES * 4,
    MACKO_DENSE12_MOST_UNITS = MACKO_SLAB_ROWS * MACKO_SLAB_COLS * 2 / MACKO_SLAB_UNIT, /* of a slab: as a dense one */
    MACKO_DENSE12_MOST_LISTED = (MACKO_DENSE12_MOST_UNITS * MACKO_SLAB_UNIT - MACKO_DENSE12_LIST_AT) / 4,
};

typedef struct macko_dense12_matrix {
    const uint8_t *data; /* [MACKO_SLAB_UNIT * slab_units * slabs], 16-byte aligned (fastest: 128) */
    int64_t rows, cols;
    int32_t slab_units; /* of every slab */
    uint32_t table[2];  /* the eight bytes, the first one lowest */
    macko_dtype dtype;  /* MACKO_BF16 or MACKO_F16 */
} macko_dense12_matrix;

/* Units of a slab that lists so many elements. */
MACKO_FN int macko_dense12_units(int listed) {
    return (MACKO_DENSE12_LIST_AT + 4 * listed + MACKO_SLAB_UNIT - 1) / MACKO_SLAB_UNIT;
}

/* An element as the layout takes it apart, and back; of float16 those without lower bits. */
MACKO_FN uint32_t macko_dense12_split(macko_dtype dtype, uint32_t value) {
    return dtype == MACKO_F16 ? (value & 0x8000) | (value & 0x7fff) >> 3 : value;
}
MACKO_FN uint32_t macko_dense12_join(macko_dtype dtype, uint32_t split) {
    return dtype == MACKO_F16 ? (split & 0x8000) | (split & 0xfff) << 3 : split;
}
MACKO_FN int macko_dense12_has_lower_bits(macko_dtype dtype, uint32_t value) {
    return dtype == MACKO_F16 && value & 7;
}

/* With 64 tokens the kernel for few has three stages, and waits for memory where it has many slabs to fetch: up to so many
 * columns it is the faster one. few / many, us: 4096 x 4096 12.0 / 11.7, 4096 x 11008 28.2 / 20.6, 11008 x 4096 29.8 / 21.0,
 * 8192 x 8192 40.0 / 28.9, 28672 x 8192 143 / 93 (H200). */
#define MACKO_DENSE12_FEW_COLS 4096

MACKO_SLAB_CODEC(dense12, uint16_t)
MACKO_SLAB_CODEC_COUNT(dense12, uint16_t) /* there are no offsets: adds to the totals */
MACKO_SLAB_CODEC_HISTOGRAM(dense12, 128)  /* by e[7:1], but for those with lower bits */

/* macko_fault.kind. */
enum {
    MACKO_DENSE12_OK = 0,
    MACKO_DENSE12_TABLE_ORDER, /* the table is not 0, then rising, then zeros, all e[7:1]; found: the byte's place */
    MACKO_DENSE12_BOUNDS,      /* bounds do not follow each other, or end after the slab; found: the tile and slice */
    MACKO_DENSE12_ENTRY, /* an entry is not after the one before it of its slice, or says more than a place; found: it */
    MACKO_DENSE12_LISTED, /* an entry's value has a code, or its place is outside of the matrix or is not +0.0; found: it */
    MACKO_DENSE12_OUTSIDE, /* an element outside of the matrix is not +0.0; found: byte of the slab */
    MACKO_DENSE12_CODE,    /* a code is not the lowest that stands for its e[7:1]; found: byte of the slab */
    MACKO_DENSE12_ZERO,    /* bytes after the list are not zero; found: byte of the slab */
    MACKO_DENSE12_WIDEST,  /* no slab needs so many units; found: how many */
};

MACKO_C_END
