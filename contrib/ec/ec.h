/*
 * EC-CSR, the format of the EC-SpMV paper, and its widening. This header is its only specification.
 *
 * A matrix [rows, cols] is cut into tiles of `tile_rows` neighbouring rows. Its non-zeros lie in block sets; a set holds
 * the tiles' blocks one after another, tile_ptr says where each tile's begin. A block belongs to the 32 lanes of a warp.
 * Its lanes fall into 32 / lanes pieces; a piece is `height` rows with one list of columns, cut evenly among its lanes.
 * So with lanes = 32, as in the paper, a block is one piece: `height` rows that share columns. In a set with fewer lanes
 * every row of the matrix stands exactly once, so that a kernel may write what it has summed.
 *   A lane owns t columns, t a multiple of `vector`; the block then has width 32 t. Numbering, for column c of lane l:
 *     n = (c / vector * 32 + l) * vector + c % vector        counted from the block's first column, block_indptr
 *     delta n       delta_bits bits at bit n * delta_bits of the set's deltas, low bits first: the distance to the
 *                   lane's previous column, 0 for its first, whose column is base_indices[block * 32 + l]
 *     value n, k    at n * height + k: the value of the piece's row k
 *   A distance above 2^delta_bits - 1 stores an explicit zero. A lane with columns to spare repeats its last one
 *   (delta 0), or the last column of its row if it has none, with the value +0.0.
 * Each non-zero is stored once. An explicit zero may stand on a column that another block holds: unpack skips zeros.
 * Zeros of either sign are dropped; NaN and Inf are values and keep their bits.
 *
 * The paper's own layout: heights 16, 8, 4, 2 with vector 4; then single rows, a long part (a multiple of 128 columns,
 * vector 4) and a short one (vector 1), all with 32 lanes; delta_bits 4 or 8; columns in order.
 * Ours besides: delta_bits 3 to 8, fewer lanes a row (one part, no short one), and columns in the order of `col_order`
 * (densest first), cut into slabs, a set a slab, each with its own delta_bits.
 */
#pragma once

#include "../../csrc/core/types.h"

MACKO_C_BEGIN

enum {
    MACKO_EC_WARP = 32,
    MACKO_EC_VECTOR = 4, /* columns of a lane read together; 1 in the paper's short parts */
    MACKO_EC_CHUNK = MACKO_EC_WARP *
        MACKO_EC_VECTOR,      /* 128: what a warp reads together, and the least width of a shared block */
    MACKO_EC_TILE = 128,      /* tile_rows is a multiple; blocks are extracted in tiles of just this many */
    MACKO_EC_MAX_TILE = 1024, /* a kernel keeps one sum a row and warp */
    MACKO_EC_MAX_HEIGHT = 16,
    MACKO_EC_MAX_SETS = 8,
    MACKO_EC_HEIGHT_SETS = 4, /* heights 16, 8, 4, 2; the sets of single rows follow */
    MACKO_EC_MAX_SLABS = MACKO_EC_MAX_SETS - MACKO_EC_HEIGHT_SETS,
};

/* Column number i of an array of base_indices' type, or i itself where there is no array. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int64_t macko_ec_column(const void *array, int64_t cols, int64_t i) {
    if (!array) return i;
    return cols <= 65536 ? ((const uint16_t *)array)[i] : ((const uint32_t *)array)[i];
}

/* A block set; the array `sets` ends with one more entry, whose first_* are the totals. */
typedef struct macko_ec_set {
    int64_t height;      /* rows of a piece: 1, 2, 4, 8, 16 */
    int64_t lanes;       /* lanes of a piece: a power of two to 32; 32 where height > 1 */
    int64_t vector;      /* 4, or 1 with height 1 and 32 lanes */
    int64_t delta_bits;  /* 3 to 8 */
    int64_t first_block; /* of base_indices (times 32); block_indptr of set s begins at first_block + s */
    int64_t first_row;   /* of row_indices */
    int64_t first_value; /* of block_values */
    int64_t first_delta; /* byte of delta_indices */
} macko_ec_set;

typedef struct macko_ec_matrix {
    const void *block_values;     /* [sum of widths * height] of dtype */
    const uint8_t *delta_indices; /* [sum of widths * delta_bits / 8] */
    const void *base_indices;     /* [blocks * 32] uint16 where cols <= 65536, else uint32 */
    const int32_t *block_indptr;  /* [blocks + sets] first column of each block in its set, and each set's end */
    const int32_t *row_indices;   /* [blocks * 32 / lanes * height] row of each piece's row k; -1: no row, all zero */
    const int32_t *tile_ptr;      /* [sets, tiles + 1] first block of each tile in its set */
    const macko_ec_set *sets;     /* [num_sets + 1] */
    const void *col_order; /* [cols] as base_indices; the blocks' column c is the matrix's col_order[c]; NULL: c */
    int64_t rows, cols, tiles, tile_rows, num_sets;
    int64_t num_blocks, num_values, num_rows; /* of all sets: base_indices / 32, block_values, row_indices */
    macko_dtype dtype;
} macko_ec_matrix;

/* rows of a tile, given how many tiles there are: no size is stored twice. At least MACKO_EC_TILE, whatever is claimed. */
static inline int64_t macko_ec_tile_rows(int64_t rows, int64_t tiles) {
    return tiles > 0 && tiles <= rows ? ((rows + tiles - 1) / tiles + MACKO_EC_TILE - 1) / MACKO_EC_TILE * MACKO_EC_TILE
                                      : (int64_t)MACKO_EC_TILE;
}

/* macko_fault.kind; row is the set, entry the index in the array at fault. */
enum {
    MACKO_EC_OK = 0,
    MACKO_EC_SET,      /* an entry of sets is not possible, or disagrees with the length of an array */
    MACKO_EC_TILE_PTR, /* tile_ptr falls or does not span the set's blocks */
    MACKO_EC_INDPTR,   /* block_indptr falls, is not a multiple of 32 * vector, or does not span the set's columns */
    MACKO_EC_ROW, /* a row outside its tile, twice in a block, or missing with a value or in a set that must have it */
    MACKO_EC_COLUMN,    /* a column outside the matrix */
    MACKO_EC_DELTA,     /* a lane's first delta is not 0 */
    MACKO_EC_ZERO,      /* -0.0 */
    MACKO_EC_TWICE,     /* a non-zero stored twice */
    MACKO_EC_COL_ORDER, /* not a permutation of the columns */
    MACKO_EC_NO_MEMORY, /* no fault: there was no memory to look */
};

/* What pack makes of a matrix. */
typedef struct macko_ec_options {
    int delta_bits; /* of every set but the slabs' */
    int lanes;      /* of single rows: 32 is the paper's (long and short part), fewer is one part */
    int max_height; /* 1 extracts nothing */
    int min_width;  /* least columns of a shared block, a multiple of 128 */
    int max_width;  /* a shared block is clipped to this many columns; a multiple of 128 */
    int num_slabs;  /* with lanes < 32: sets of single rows, else 0 */
    int slab_bits[MACKO_EC_MAX_SLABS];
    int64_t slab_begin[MACKO_EC_MAX_SLABS + 1]; /* first column of each slab, a multiple of 64; then cols */
} macko_ec_options;

/* A block found by extraction: `width` columns at `first` of the tile's list. Width 0: given up. */
typedef struct macko_ec_block {
    int32_t height, width;
    int64_t first;
    uint8_t rows[MACKO_EC_MAX_HEIGHT]; /* in the tile */
} macko_ec_block;

/*
 * The work of pack, tile after tile, between its phases. Host or device memory, as the functions it is given to.
 * Blocks of tile i are at columns_at[i] / 128 of `blocks` and `order`, their columns from columns_at[i] of `columns`.
 */
typedef struct macko_ec_plan {
    const void *w;
    macko_dtype dtype;
    int64_t rows, cols, words, tiles, tile_rows; /* words: of 64 columns a row */
    macko_ec_options options;
    const void *col_order; /* or NULL */
    uint64_t *bits;      /* [rows, words] non-zeros, in the order of col_order; after extraction those that are left */
    int32_t *row_counts; /* [rows] non-zeros */
    int64_t *columns_at; /* [tiles + 1] */
    macko_ec_block *blocks;
    int32_t *columns, *order; /* order: the tile's blocks by set, as they will be stored */
    int32_t *num_blocks;      /* [tiles] of `blocks` */
    int32_t
        *single_row; /* [MACKO_EC_MAX_SETS, tiles, tile_rows] single rows of a set as they will be stored; -1: none */
    int32_t *single_width; /* same, columns a lane */
    int32_t *single_skip;  /* same, non-zeros of the row that the long part holds */
    int64_t *counts;       /* [MACKO_EC_MAX_SETS, tiles, 2] blocks and columns */
    uint8_t *scratch;      /* CUDA: what extraction of a tile works on */
} macko_ec_plan;

/*
 * CPU. Phases of pack, each over tiles [begin, end) that may run at the same time:
 * bits, (columns_at from row_counts), extract, arrange, (offsets from counts), write.
 * Those that need scratch memory return 0, or -1 where there is none.
 */
void macko_ec_column_counts_cpu(const void *w, macko_dtype dtype, int64_t rows, int64_t cols, int32_t *counts);
void macko_ec_bits_cpu(const macko_ec_plan *p, int64_t begin, int64_t end);
int macko_ec_extract_cpu(const macko_ec_plan *p, int64_t begin, int64_t end);
int macko_ec_arrange_cpu(const macko_ec_plan *p, int64_t begin, int64_t end);
/* plan_sets[s] is the plan's set behind set s of m. delta_indices is zero before the first call. */
void macko_ec_write_cpu(const macko_ec_plan *p, const macko_ec_matrix *m, const int32_t *plan_sets, int64_t begin,
                        int64_t end);

/* Everything that can be wrong, looked at once; the length of delta_indices is given. What it takes of memory follows from
 * the arrays there are, 16 bytes a value of the largest tile at most, never from the shape that is claimed. */
macko_fault macko_ec_check_cpu(const macko_ec_matrix *m, int64_t num_delta_bytes);

/* Writes rows of the tiles of w [rows, cols]. */
void macko_ec_unpack_cpu(const macko_ec_matrix *m, int64_t begin, int64_t end, void *w);

/* y = W x + bias (bias may be NULL) for the rows of the tiles; x [cols] fp32 in the order of col_order. */
void macko_ec_spmv_cpu(const macko_ec_matrix *m, const float *x, const void *bias, int64_t begin, int64_t end, void *y);

/* x [cols] of dtype as macko_ec_spmv_cpu wants it. */
void macko_ec_order_x_cpu(const macko_ec_matrix *m, const void *x, float *ordered);

#ifdef MACKO_HAVE_CUDA
/* CUDA: the same, over all tiles; the bytes are those of the CPU. Nothing waits or allocates; fp16 and bf16. */
cudaError_t macko_ec_column_counts_cuda(const void *w, int64_t rows, int64_t cols, int32_t *counts,
                                        cudaStream_t stream);
cudaError_t macko_ec_bits_cuda(const macko_ec_plan *p, cudaStream_t stream);
int64_t macko_ec_extract_scratch_bytes(int64_t tiles, int64_t cols);
cudaError_t macko_ec_extract_cuda(const macko_ec_plan *p, cudaStream_t stream);
cudaError_t macko_ec_arrange_cuda(const macko_ec_plan *p, cudaStream_t stream);
cudaError_t macko_ec_write_cuda(const macko_ec_plan *p, const macko_ec_matrix *m, const int32_t *plan_sets,
                                cudaStream_t stream);
cudaError_t macko_ec_unpack_cuda(const macko_ec_matrix *m, void *w, cudaStream_t stream);

/* floats that macko_ec_spmv_cuda needs in `partials` on this device, 0 for none (where thread block clusters exist). */
int64_t macko_ec_spmv_partials(const macko_ec_matrix *m);
/* y = W x + bias. The same bits at every run on one kind of GPU. The content of m is trusted: see macko_ec_check_cpu. */
cudaError_t macko_ec_spmv_cuda(const macko_ec_matrix *m, const void *x, const void *bias, void *y, float *partials,
                               cudaStream_t stream);
#endif

MACKO_C_END
