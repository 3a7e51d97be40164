/*
 * Slabs: a matrix in pieces of 64 x 256, in the order in which tensor cores take it, for any number of tokens. The codecs
 * (../codecs) say how the values of a slab are written as bytes; what is said here holds of all of them, so the same
 * kernels multiply them.
 *
 *   slab           columns 0..63   64..127   128..191   192..255
 *   rows  0..15       tile 0        tile 1     tile 2     tile 3      slice 0: warp 0 of a warpgroup
 *   rows 16..31                                                       slice 1: warp 1
 *   rows 32..47                                                       slice 2: warp 2
 *   rows 48..63                                                       slice 3: warp 3
 *
 * Order, from the matrix down:
 *   slab     MACKO_SLAB_TILES tiles side by side: MACKO_SLAB_ROWS x MACKO_SLAB_COLS elements. Row block after row block,
 *            and in it from the first column to the last. Elements outside the matrix are zeros. Slab
 *            i = row_block * macko_slabs_across(cols) + s is data[128 * offsets[i]] up to data[128 * offsets[i + 1]]; of
 *            a codec whose slabs are all of one size there are no offsets.
 *   tile     MACKO_SLAB_ROWS x MACKO_SLAB_TILE_COLS elements.
 *   slice    16 rows of a slab or tile, one warp's: 16 slice .. 16 slice + 15.
 *   group    128 elements of a slice of a tile, 4 a lane. Groups 2 b and 2 b + 1 are columns 16 b .. 16 b + 15 of the tile.
 *   element  of lane l = 4 g + t (g < 8, t < 4) in group j: element e is row g + 8 (e / 2) of the slice and column
 *            16 (j / 2) + 8 (j % 2) + 2 t + e % 2 of the tile. So the elements of groups 2 b and 2 b + 1 are the lane's
 *            registers a0 a1 and a2 a3 of operand A of mma.m16n8k16, and of wgmma, whose four warps have the four slices.
 *   step     groups 2 b and 2 b + 1, 16 columns: element i of step b of a lane is element i % 4 of group 2 b + i / 4,
 *            half i % 2 of register a(i / 2).
 */
#pragma once

#include <stdbool.h>

#include "../core/types.h"

MACKO_C_BEGIN

enum {
    MACKO_SLAB_ROWS = 64,
    MACKO_SLAB_TILE_COLS = 64,
    MACKO_SLAB_SLICES = 4,
    MACKO_SLAB_LANES = 32,
    MACKO_SLAB_GROUPS = 8,
    MACKO_SLAB_STEPS = 4, /* of a tile */
    MACKO_SLAB_QUAD = 4,  /* elements of a lane in a group */
    MACKO_SLAB_TABLE = 8, /* codes that an element may have, of codecs that have them */
    MACKO_SLAB_TILES = 4, /* side by side */
    MACKO_SLAB_COLS = MACKO_SLAB_TILES * MACKO_SLAB_TILE_COLS,
    MACKO_SLAB_TILE_SLICES = MACKO_SLAB_TILES * MACKO_SLAB_SLICES,    /* slices of tiles, [tile][slice] */
    MACKO_SLAB_MASK_BYTES = MACKO_SLAB_SLICES * MACKO_SLAB_LANES * 4, /* of a tile, where each element has a bit */
    MACKO_SLAB_UNIT = 128,                                            /* bytes that offsets count */
    /* Of codecs whose values are bytes in columns (columns_cpu.h): bytes of a row, and rows of a slab at most. */
    MACKO_SLAB_COLUMNS_ROW_BYTES = MACKO_SLAB_LANES * 4,
    MACKO_SLAB_COLUMNS_MOST_ROWS = MACKO_SLAB_SLICES * MACKO_SLAB_TILES * 32 / 4,
    /* After a slab in shared memory, so much may be read, which nobody uses: where an element has no value. */
    MACKO_SLAB_OVERREAD = 256,
    MACKO_SLAB_MOST_OUTPUTS = 3, /* of a product */
};

MACKO_FN int64_t macko_slab_row_blocks(int64_t rows) {
    return (rows + MACKO_SLAB_ROWS - 1) / MACKO_SLAB_ROWS;
}

/* Of a row block. */
MACKO_FN int64_t macko_slabs_across(int64_t cols) {
    return (cols + MACKO_SLAB_COLS - 1) / MACKO_SLAB_COLS;
}

/* Of a matrix. */
MACKO_FN int64_t macko_slab_count(int64_t rows, int64_t cols) {
    return macko_slab_row_blocks(rows) * macko_slabs_across(cols);
}

/* Row of a lane's element within its slice, and its column within its tile. */
MACKO_FN int macko_slab_row(int lane, int e) {
    return lane / 4 + 8 * (e / 2);
}
MACKO_FN int macko_slab_col(int lane, int j, int e) {
    return 16 * (j / 2) + 8 * (j % 2) + 2 * (lane % 4) + e % 2;
}

/* Element of a step that is the nth in a stream of bytes in columns (columns_cpu.h): 0, 1, 2, 3, 7, 6, 5, 4. */
MACKO_FN int macko_slab_nth_element(int n) {
    return n < 4 ? n : 11 - n;
}

/*
 * The bytes by code for a matrix of which counts[h] elements have the high byte h, of `highs`: 0, then the seven commonest
 * others (of equally common ones the lower), the lower first; where there are not so many, zeros at the end.
 */
void macko_slab_table(const int64_t *counts, int highs, uint32_t table[2]);

/*
 * Where a product goes: the rows of a matrix in several outputs, each of which is a matrix [tokens, rows] of its own. All
 * but the last have a multiple of MACKO_SLAB_ROWS, so that a row block lies in one.
 */
typedef struct macko_slab_output {
    void *y;      /* where row 0 would be at the first token, had it the rows before it too: y + token * rows + row */
    int64_t rows; /* 0: there is no such output */
} macko_slab_output;
typedef struct macko_slab_outputs {
    macko_slab_output output[MACKO_SLAB_MOST_OUTPUTS];
    int64_t begins[MACKO_SLAB_MOST_OUTPUTS]; /* its first row; where there is no such output INT32_MAX */
} macko_slab_outputs;
/* Which output a row is of. */
MACKO_FN int macko_slab_output_of(const macko_slab_outputs *outputs, int64_t row) {
    return (row >= outputs->begins[1]) + (row >= outputs->begins[2]);
}

/* What packing has to tell the host before it can allocate data. */
typedef struct macko_slab_totals {
    int64_t units;   /* of data; over INT32_MAX the matrix is too large */
    int64_t widest;  /* units of the largest slab */
    int64_t stored;  /* values */
    int64_t listed;  /* of codecs with lists, the elements in them */
    int64_t fullest; /* of these in the list of a slab, at most */
} macko_slab_totals;

/*
 * The functions of a codec, each in its pack_cpu.c and pack_cuda.cu. Its header declares by the macros below those that it
 * has. m is a piece of a matrix, of whole row blocks, with the offsets from its first slab on; w are its dense rows
 * [m->rows, m->cols], or their codes.
 *
 *   histogram  of codecs with a table, which the host then makes: counts[h] += values with the high byte h
 *   count      of codecs whose slabs differ: offsets[i + 1] = units of slab i, where there are offsets; adds to the totals.
 *              The caller adds the offsets up (macko_slab_scan_cuda) and allocates
 *   write      all of the slabs; data begins where the offsets count from, of slabs of one size with the first slab of m
 *   unpack     the dense rows [first, first + count) of m, any, to w [count, cols]; with scales, values times scales
 *   check      what packing cannot have made, first of all where reading would be unsafe: macko_fault.kind is the codec's
 *              enum, in the order in which faults are looked for, row the row block, entry the slab unless it says else.
 *              m->units are those of data. found without a fault: the values of the matrix (with a list, entry those that
 *              are in it; dense12: found)
 *
 * On the CPU is the reference. Those of CUDA are enqueued on `stream` of the current device, and neither synchronise nor
 * allocate; pointers are device pointers but for the struct.
 */
#define MACKO_SLAB_CODEC(name, element)                                                                                \
    void macko_##name##_write_cpu(const macko_##name##_matrix *m, const element *w, uint8_t *data);                    \
    void macko_##name##_unpack_cpu(const macko_##name##_matrix *m, int64_t first, int64_t count, uint16_t *w);         \
    macko_fault macko_##name##_check_cpu(const macko_##name##_matrix *m);                                              \
    MACKO_CUDA_FUNCTION(                                                                                               \
        macko_##name##_write_cuda(const macko_##name##_matrix *m, const void *w, uint8_t *data, cudaStream_t stream))
#define MACKO_SLAB_CODEC_COUNT(name, element)                                                                          \
    void macko_##name##_count_cpu(const macko_##name##_matrix *m, const element *w, int32_t *offsets,                  \
                                  macko_slab_totals *totals);                                                          \
    MACKO_CUDA_FUNCTION(macko_##name##_count_cuda(const macko_##name##_matrix *m, const void *w, int32_t *offsets,     \
                                                  macko_slab_totals *totals, cudaStream_t stream))
#define MACKO_SLAB_CODEC_HISTOGRAM(name, highs)                                                                        \
    void macko_##name##_histogram_cpu(const macko_##name##_matrix *m, const uint16_t *w, int64_t counts[highs]);       \
    MACKO_CUDA_FUNCTION(macko_##name##_histogram_cuda(const macko_##name##_matrix *m, const void *w,                   \
                                                      int64_t counts[highs], cudaStream_t stream))
#ifdef MACKO_HAVE_CUDA
#define MACKO_CUDA_FUNCTION(function) cudaError_t function;
/* Adds the offsets [slabs + 1] up, each of which is the units of a slab, and writes the other totals. */
MACKO_CUDA_FUNCTION(macko_slab_scan_cuda(int64_t slabs, int32_t *offsets, macko_slab_totals *totals,
                                         cudaStream_t stream))
#else
#define MACKO_CUDA_FUNCTION(function)
#endif

MACKO_C_END
