/*
 * The tile layout: a sparse matrix as the tensor cores take it, for any number of tokens. This header is its only
 * specification.
 *
 * A mask has a bit for every element. The values of each lane of a warp lie in that lane's own bank of shared memory,
 * so 32 lanes load 32 values at a time, wherever each of them is, and none has to know how many values the others have.
 * The layout depends on no device, may be held instead of the canonical tensors and converts back bit for bit. Zeros of
 * either sign are dropped, NaN and Inf are values. Some 1.24 bytes a weight at density 0.5, 0.85 at 0.3.
 *
 *   slab           columns 0..63   64..127   128..191   192..255
 *   rows  0..15       tile 0        tile 1     tile 2     tile 3      slice 0: warp 0 of a warpgroup
 *   rows 16..31                                                       slice 1: warp 1
 *   rows 32..47                                                       slice 2: warp 2
 *   rows 48..63                                                       slice 3: warp 3
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
 * Order, from the matrix down:
 *   slab     MACKO_TILE_SLAB_TILES tiles side by side: MACKO_TILE_ROWS x MACKO_TILE_SLAB_COLS elements. Row block
 *            after row block, and in it from the first column to the last. Elements outside the matrix have no values.
 *            Slab i = row_block * macko_tile_slabs(cols) + s is data[128 * offsets[i]] up to data[128 * offsets[i + 1]].
 *   tile     MACKO_TILE_ROWS x MACKO_TILE_COLS elements.
 *   slice    16 rows of a slab or tile, one warp's: 16 slice .. 16 slice + 15. Its rows of `values` go from slice offset
 *            [slice] to the next slice's, or to the end.
 *   group    128 elements of a slice of a tile, 4 a lane. Groups 2 b and 2 b + 1 are columns 16 b .. 16 b + 15 of the tile.
 *   element  of lane l = 4 g + t (g < 8, t < 4) in group j: element e is row g + 8 (e / 2) of the slice and column
 *            16 (j / 2) + 8 (j % 2) + 2 t + e % 2 of the tile. So the elements of groups 2 b and 2 b + 1 are the lane's
 *            registers a0 a1 and a2 a3 of operand A of mma.m16n8k16, and of wgmma, whose four warps have the four slices.
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
#ifndef MACKO_TILE_H
#define MACKO_TILE_H

#include <stdbool.h>

#include "../../core/types.h"

#ifdef __CUDACC__
#define MACKO_TILE_FN static __host__ __device__ __forceinline__
#else
#define MACKO_TILE_FN static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MACKO_TILE_ROWS = 64,
    MACKO_TILE_COLS = 64,
    MACKO_TILE_SLICES = 4,
    MACKO_TILE_LANES = 32,
    MACKO_TILE_GROUPS = 8,
    MACKO_TILE_QUAD = 4,       /* elements of a lane in a group */
    MACKO_TILE_TABLE = 8,      /* codes that an element may have, of layouts that have them */
    MACKO_TILE_SLAB_TILES = 4, /* side by side */
    MACKO_TILE_SLAB_COLS = MACKO_TILE_SLAB_TILES * MACKO_TILE_COLS,
    MACKO_TILE_STREAMS = 2,                                           /* of a lane: columns of values it has */
    MACKO_TILE_STREAM_BITS = 0x0f0f0f0f,                              /* of a mask: groups 0 to 3, stream 0 */
    MACKO_TILE_ROW_BYTES = MACKO_TILE_LANES * MACKO_TILE_STREAMS * 2, /* of values */
    MACKO_TILE_MASK_BYTES = MACKO_TILE_SLICES * MACKO_TILE_LANES * 4, /* of a tile */
    MACKO_TILE_UNIT = 128,                                            /* bytes that offsets count */
    /* Of layouts whose values are bytes in columns (columns_cpu.h): bytes of a row, and rows of a slab at most. */
    MACKO_TILE_COLUMNS_ROW_BYTES = MACKO_TILE_LANES * 4,
    MACKO_TILE_COLUMNS_MOST_ROWS = MACKO_TILE_SLICES * MACKO_TILE_SLAB_TILES * 32 / 4,
    /* Bytes of a slab where its spill offsets, slice offsets and values are. */
    MACKO_TILE_SPILLS_AT = MACKO_TILE_SLAB_TILES * MACKO_TILE_MASK_BYTES,
    MACKO_TILE_SLICES_AT = MACKO_TILE_SPILLS_AT + MACKO_TILE_SLICES * MACKO_TILE_LANES * MACKO_TILE_STREAMS * 2,
    MACKO_TILE_VALUES_AT = MACKO_TILE_SLICES_AT + MACKO_TILE_UNIT,
    /* After a slab in shared memory, so much is read where an element has no value: two rows, which nobody uses. */
    MACKO_TILE_OVERREAD = 2 * MACKO_TILE_ROW_BYTES,
    MACKO_TILE_MOST_ROWS = MACKO_TILE_SLICES * MACKO_TILE_SLAB_TILES * 16, /* of values of a slab: none is zero */
    MACKO_TILE_MOST_PARTS = 3,                                             /* that a product's output has */
};

typedef struct macko_tile_matrix {
    const uint8_t *data;    /* [MACKO_TILE_UNIT * offsets[slabs]], 16-byte aligned (fastest: 128) */
    const int32_t *offsets; /* [slabs + 1], in units */
    int64_t rows, cols;
    int32_t widest;    /* units of the largest slab: what a kernel has to hold; 0 where there are none */
    macko_dtype dtype; /* MACKO_F16 or MACKO_BF16 */
    int64_t units; /* of all slabs: for the pace at which a kernel asks for them, and where it guesses that they are */
} macko_tile_matrix;

MACKO_TILE_FN int64_t macko_tile_row_blocks(int64_t rows) {
    return (rows + MACKO_TILE_ROWS - 1) / MACKO_TILE_ROWS;
}

/* Of a row block. */
MACKO_TILE_FN int64_t macko_tile_slabs(int64_t cols) {
    return (cols + MACKO_TILE_SLAB_COLS - 1) / MACKO_TILE_SLAB_COLS;
}

/* Slabs of a matrix. */
MACKO_TILE_FN int64_t macko_tile_count(int64_t rows, int64_t cols) {
    return macko_tile_row_blocks(rows) * macko_tile_slabs(cols);
}

/* Units of a slab with so many rows of values. */
MACKO_TILE_FN int macko_tile_units(int value_rows) {
    return (MACKO_TILE_VALUES_AT + value_rows * MACKO_TILE_ROW_BYTES) / MACKO_TILE_UNIT;
}

/* Row of a lane's element within its slice, and its column within its tile. */
MACKO_TILE_FN int macko_tile_row(int lane, int e) {
    return lane / 4 + 8 * (e / 2);
}
MACKO_TILE_FN int macko_tile_col(int lane, int j, int e) {
    return 16 * (j / 2) + 8 * (j % 2) + 2 * (lane % 4) + e % 2;
}

/*
 * The bytes by code for a matrix of which counts[h] elements have the high byte h, of `highs`: 0, then the seven commonest
 * others (of equally common ones the lower), the lower first; where there are not so many, zeros at the end.
 */
void macko_tile_table(const int64_t *counts, int highs, uint32_t table[2]);

/*
 * Where a product goes: the rows of a matrix in parts, each of which is a matrix [tokens, rows] of its own. All but the
 * last have a multiple of MACKO_TILE_ROWS, so that a row block lies in one.
 */
typedef struct macko_tile_part {
    void *y; /* where row 0 would be at the first token, had the part the rows before it too: y + token * rows + row */
    int64_t rows; /* 0: there is no such part */
} macko_tile_part;
typedef struct macko_tile_parts {
    macko_tile_part part[MACKO_TILE_MOST_PARTS];
    int64_t begins[MACKO_TILE_MOST_PARTS]; /* its first row; where there is no such part INT32_MAX */
} macko_tile_parts;
/* Which part a row is of. */
MACKO_TILE_FN int macko_tile_part_of(const macko_tile_parts *parts, int64_t row) {
    return (row >= parts->begins[1]) + (row >= parts->begins[2]);
}

/* What packing has to tell the host before it can allocate data. */
typedef struct macko_tile_totals {
    int64_t units;  /* of data; over INT32_MAX the matrix is too large */
    int64_t widest; /* units of the largest slab */
    int64_t stored; /* values */
} macko_tile_totals;

/*
 * CPU, the reference order. Row blocks [first, last) each, so that threads can share the work.
 * count writes offsets[i + 1] = units of slab i, for its slabs; the caller adds them up (offsets[0] = 0).
 */
void macko_tile_count_cpu(const void *w, int64_t rows, int64_t cols, int64_t first, int64_t last, int32_t *offsets);
void macko_tile_write_cpu(const macko_tile_matrix *m, const void *w, uint8_t *data, int64_t first, int64_t last);
/* The dense rows [first, first + count), w [count, cols]; first and count are any. */
void macko_tile_unpack_cpu(const macko_tile_matrix *m, int64_t first, int64_t count, void *w);

/* macko_fault.kind, in the order in which they are looked for. row is the row block, entry the slab. */
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

/* What packing cannot have made, first of all where reading would be unsafe. m->units are those of data. found without a
 * fault: the values of the matrix. */
macko_fault macko_tile_check_cpu(const macko_tile_matrix *m);

#ifdef __CUDACC__
#define MACKO_TILE_CUDA
#elif defined(USE_CUDA)
#define MACKO_TILE_CUDA
#endif
#ifdef MACKO_TILE_CUDA
#include <cuda_runtime_api.h>

/*
 * Everything is enqueued on `stream` of the current device; nothing synchronises or allocates. Pointers are device
 * pointers but for the structs. Packing: count for all rows, piece by piece; scan; the host reads *totals (device
 * memory) and allocates; write for all rows. A piece begins at a row block; its m has the offsets of its first slab on.
 */

/* offsets[i + 1] = units of slab i of the dense w [rows, cols] (16-bit); adds to totals->stored. */
cudaError_t macko_tile_count_cuda(const void *w, int64_t rows, int64_t cols, int32_t *offsets,
                                  macko_tile_totals *totals, cudaStream_t stream);

/* Adds the offsets [slabs + 1] up, and writes the other totals. */
cudaError_t macko_tile_scan_cuda(int64_t slabs, int32_t *offsets, macko_tile_totals *totals, cudaStream_t stream);

/* The slabs of the dense w [m->rows, m->cols] into data, whose begin the offsets count from. */
cudaError_t macko_tile_write_cuda(const macko_tile_matrix *m, const void *w, uint8_t *data, cudaStream_t stream);

/* The dense rows [first, first + count), w [count, cols]; first and count are any. */
cudaError_t macko_tile_unpack_cuda(const macko_tile_matrix *m, int64_t first, int64_t count, void *w,
                                   cudaStream_t stream);

/*
 * The products of macko_NAME_matrix, a layout of slabs:
 *
 *   few        y [tokens, rows] = x [tokens, cols] W^T + bias, in parts; bias [rows] may be NULL. One launch, same bits
 *              every run. With wgmma at most 64 tokens, else cudaErrorInvalidValue (torch/path.h decides). cols > 0.
 *              Rows of x begin every x_stride elements; x is 16-byte aligned and x_stride a multiple of 8 (TMA wants
 *              it). May start before the kernel before it in the stream is done (PDL, programmatic dependent launch):
 *              that one must not write the weight
 *   many       the same for more tokens with wgmma, of at least one row, as the plan says (many_plan.h). workspace:
 *              device memory of plan->workspace_bytes, with any content
 *   many_plan  that plan
 *
 * Without wgmma, which 9.0 alone has, there is tile's `few` alone.
 */
typedef struct macko_tile_many_plan macko_tile_many_plan;
#define MACKO_TILE_PRODUCTS(NAME)                                                                                      \
    cudaError_t macko_##NAME##_few_cuda(const macko_##NAME##_matrix *m, int64_t tokens, const void *x,                 \
                                        int64_t x_stride, const void *bias, const macko_tile_parts *y,                 \
                                        cudaStream_t stream);                                                          \
    cudaError_t macko_##NAME##_many_plan_cuda(const macko_##NAME##_matrix *m, int64_t tokens,                          \
                                              macko_tile_many_plan *plan);                                             \
    cudaError_t macko_##NAME##_many_cuda(const macko_##NAME##_matrix *m, int64_t tokens, const void *x,                \
                                         int64_t x_stride, const void *bias, const macko_tile_parts *y,                \
                                         const macko_tile_many_plan *plan, void *workspace, cudaStream_t stream)
MACKO_TILE_PRODUCTS(tile);
#endif

#ifdef __cplusplus
}
#endif

#endif
