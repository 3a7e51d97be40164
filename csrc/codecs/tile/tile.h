/*
 * The tile layout: a sparse matrix in a bit an element and 16 bits a value. This header is its only specification; slabs,
 * tiles, slices, lanes, groups and elements are those of ../../slab/slab.h.
 *
 * A mask has a bit for every element. The values of each lane of a warp lie in that lane's own bank of shared memory,
 * so 32 lanes load 32 values at a time, wherever each of them is, and none has to know how many values the others have.
 * The layout depends on no device, may be held instead of the canonical tensors and converts back bit for bit. Zeros of
 * either sign are dropped, NaN and Inf are values. Some 1.24 bytes a weight at density 0.5, 0.85 at 0.3.
 *
 *   bytes of a slab
 *   0                      2048                     2560                2688
 *   | masks                | spill offsets          | slice offsets     | values
 *   | u32 [tile][slice]    | u16 [slice][lane]      | u16 [slice], then | rows of 128 bytes, slice after slice:
 *   |     [lane]           |     [stream]           | zeros             | u16 [row][lane][stream]
 *
 *   values of a slice: a 32-bit word of a row is a lane's, so is a bank; two streams, 0 and 1, share the word
 *                 lane 0    lane 1     ...   lane 31
 *   row  0        H0        H1               H31         H: head of a lane's stream, tiles 0 and 1, from the top down
 *   row 12        H0        H1               T7          T: tail of some lane's stream, tiles 2 and 3, after a head:
 *   row 20        T31       H1               T7             its spill offset [slice][lane][stream] says where
 *   row 34        T31       T0               T7
 *
 *   slice    its rows of `values` go from slice offset [slice] to the next slice's, or to the end.
 *   mask     bit 8 e + j of the lane's word: element e of group j has a value. (mask >> j) & 0x01010101 has an element
 *            in each byte: dp4a with weights 128, 0x8080 and 0x808080 adds up how far the values lie from the first one.
 *   stream   of a lane, 0 or 1, in a slice of a slab: its values of groups 4 stream .. 4 stream + 3, by tile, in it by
 *            group, in it by element. Its column of `values` is [.][lane][stream]. The head (tiles 0 and 1) begins at the
 *            top of this column. The tail (tiles 2 and 3) begins after the head in a column of the same stream, this
 *            lane's or another's: at byte spill_offsets[slice][lane][stream] of the slice's values.
 *   spill    Long tails go where heads are short, so that columns end alike. For each slice and stream: lanes by the
 *            length of their tail, the longest first, are given the columns by the length of their head, the shortest
 *            first; of equal ones that of the lower lane first. A slice has as many rows as its longest column. What no
 *            value takes is +0.0.
 */
#pragma once

#include "../../slab/slab.h"

MACKO_C_BEGIN

enum {
    MACKO_TILE_STREAMS = 2,                                           /* of a lane: columns of values it has */
    MACKO_TILE_STREAM_BITS = 0x0f0f0f0f,                              /* of a mask: groups 0 to 3, stream 0 */
    MACKO_TILE_ROW_BYTES = MACKO_SLAB_LANES * MACKO_TILE_STREAMS * 2, /* of values */
    /* Bytes of a slab where its spill offsets, slice offsets and values are. */
    MACKO_TILE_SPILLS_AT = MACKO_SLAB_TILES * MACKO_SLAB_MASK_BYTES,
    MACKO_TILE_SLICES_AT = MACKO_TILE_SPILLS_AT + MACKO_SLAB_SLICES * MACKO_SLAB_LANES * MACKO_TILE_STREAMS * 2,
    MACKO_TILE_VALUES_AT = MACKO_TILE_SLICES_AT + MACKO_SLAB_UNIT,
    MACKO_TILE_MOST_ROWS = MACKO_SLAB_SLICES * MACKO_SLAB_TILES * 16, /* of values of a slab: none is zero */
};

typedef struct macko_tile_matrix {
    const uint8_t *data;    /* [MACKO_SLAB_UNIT * offsets[slabs]], 16-byte aligned (fastest: 128) */
    const int32_t *offsets; /* [slabs + 1], in units */
    int64_t rows, cols;
    int32_t widest;    /* units of the largest slab: what a kernel has to hold; 0 where there are none */
    macko_dtype dtype; /* MACKO_F16 or MACKO_BF16 */
    int64_t units; /* of all slabs: for the pace at which a kernel asks for them, and where it guesses that they are */
} macko_tile_matrix;

/* Units of a slab with so many rows of values. */
MACKO_FN int macko_tile_units(int value_rows) {
    return (MACKO_TILE_VALUES_AT + value_rows * MACKO_TILE_ROW_BYTES) / MACKO_SLAB_UNIT;
}

/* 64 tokens: up to how large a slab four stages of the kernel for few fit an SM (few_cuda.cu). With three it waits for memory:
 * at density 0.7 few / many, us: 4096 x 4096 12.7 / 11.4, 4096 x 11008 29.9 / 22.6 (H200, 350e7c5, 111a810). */
#define MACKO_TILE_FOUR_STAGES (22 << 10)

MACKO_SLAB_CODEC(tile, uint16_t)
MACKO_SLAB_CODEC_COUNT(tile, uint16_t)

/* macko_fault.kind. */
enum {
    MACKO_TILE_OK = 0,
    MACKO_TILE_OFFSETS, /* offsets[entry] is not 0 at the start, or no slab's units after the one before; found: it */
    MACKO_TILE_WIDEST,  /* the largest slab has not m->widest units; found: how many */
    MACKO_TILE_END,     /* the last offset is not the size of data; found: the offset */
    MACKO_TILE_OUTSIDE, /* a mask has a bit outside the matrix; found: word of masks */
    MACKO_TILE_COUNT,   /* the slab has another size than its masks say; found: the rows of values that they say */
    MACKO_TILE_SLICE,   /* a slice offset is not what the masks say, or no zero follows them; found: byte of the slab */
    MACKO_TILE_SPILL,   /* a spill offset is not what the masks say; found: byte of the slab */
    MACKO_TILE_ZERO,    /* a zero is stored, or one is not +0.0 where no value is; found: byte of the slab */
};

MACKO_C_END
