/*
 * The dense8 layout: a dense matrix in 8 bits an element, e4m3 or int8, and a float32 scale a row. This header and bytes.h
 * are its only specification.
 *
 * Slabs, tiles, slices, lanes, steps and elements are those of ../../slab/slab.h. An element is its code (bytes.h) times scales[row]. The product is the sum of codes times x, in float32,
 * times the scale, plus the bias; a GPU rounds both at once.
 *
 *   bytes of a slab: 16384, [tile][slice][2][lane][16]
 *   16 bytes of a lane: steps 0 and 1 of a slice of a tile, then those of steps 2 and 3
 *   element  i of step b is byte 8 (b % 2) + i
 *   outside of the matrix codes are 0
 */
#pragma once

#include "../../core/types.h"
#include "bytes.h"

MACKO_C_BEGIN

enum {
    MACKO_DENSE8_CHUNK = 16, /* bytes; a lane has two in a slice of a tile */
    MACKO_DENSE8_SLICE_BYTES = 2 * MACKO_DENSE8_CHUNK * MACKO_SLAB_LANES,
    MACKO_DENSE8_SLAB_BYTES = MACKO_SLAB_TILE_SLICES * MACKO_DENSE8_SLICE_BYTES,
    MACKO_DENSE8_UNITS = MACKO_DENSE8_SLAB_BYTES / MACKO_SLAB_UNIT, /* of every slab */
};

typedef struct macko_dense8_matrix {
    const uint8_t *data; /* [MACKO_DENSE8_SLAB_BYTES * slabs], 16-byte aligned (fastest: 128) */
    const float *scales; /* [rows], above 0 and below MACKO_BYTE_LARGEST_SCALE */
    int64_t rows, cols;
    macko_byte_kind kind;
    macko_dtype dtype; /* of x and y, MACKO_BF16 or MACKO_F16 */
} macko_dense8_matrix;

MACKO_SLAB_CODEC(dense8, uint8_t)

/* macko_fault.kind. */
enum {
    MACKO_DENSE8_OK = 0,
    MACKO_DENSE8_SCALE,   /* a scale is not above 0, or too large; found: the row */
    MACKO_DENSE8_OUTSIDE, /* an element outside of the matrix is not 0; found: byte of the slab */
    MACKO_DENSE8_CODE,    /* a code is NaN or -0.0; found: byte of the slab */
};

/* A row of which the scale is not above 0 or is too large, or -1. */
int64_t macko_bad_scale_cpu(const float *scales, int64_t rows);

MACKO_C_END
