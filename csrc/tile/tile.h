/*
 * The tile layout: a sparse matrix as the tensor cores take it, for any number of tokens. This header is its only
 * specification.
 *
 * A bit for every column says whether a value stands there, and the values follow without gaps: 2 bytes a value and
 * 1/8 byte a column (1.125 bytes a weight at density 0.5). It depends on no device, may be held instead of the canonical
 * tensors and converts back bit for bit. Zeros of either sign are dropped, NaN and Inf are values.
 *
 * Order, from the matrix down:
 *   tile     TILE_ROWS x TILE_COLS elements. Row block after row block, and in it from the first column to the last.
 *            Rows and columns behind the matrix have no values. Tile i = row_block * tile_col_blocks(cols) + col_block
 *            is data[16 * offsets[i]] up to data[16 * offsets[i + 1]]:
 *                masks    uint32 [TILE_PARTS][TILE_LANES]
 *                starts   uint16 [TILE_PARTS], where the values of each part begin, in bytes from the tile's start
 *                values   uint16, of part 0, then 1, 2 and 3
 *                zeros    up to a multiple of 16 bytes
 *   part     16 rows of the tile, one warp's: rows 16 part .. 16 part + 15.
 *   group    128 elements of the part, 4 a lane. Groups 2 b and 2 b + 1 are columns 16 b .. 16 b + 15 of the tile.
 *            The values of a part go by group, in it by lane, in it by element.
 *   element  of lane l = 4 g + t (g < 8, t < 4) in group j: element e is row g + 8 (e / 2) of the part and column
 *            16 (j / 2) + 8 (j % 2) + 2 t + e % 2 of the tile. So the elements of groups 2 b and 2 b + 1 are the lane's
 *            registers a0 a1 and a2 a3 of operand A of mma.m16n8k16, and of wgmma, whose four warps have the four parts.
 *   mask     bit 8 e + j of the lane's word: element e of group j has a value. (mask >> j) & 0x01010101 has an element
 *            in each byte: dp4a with weights 2, 0x0202 and 0x020202 makes the places of the values behind the first.
 */
#ifndef MACKO_TILE_H
#define MACKO_TILE_H

#include "../core/types.h"

#ifdef __CUDACC__
#define TILE_FN static __host__ __device__ inline
#else
#define TILE_FN static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TILE_ROWS = 64,
    TILE_COLS = 64,
    TILE_PARTS = 4,
    TILE_LANES = 32,
    TILE_GROUPS = 8,
    TILE_QUAD = 4,                              /* elements of a lane in a group */
    TILE_UNIT = 16,                             /* bytes that offsets count */
    TILE_STARTS = TILE_PARTS * TILE_LANES * 4,  /* byte of a tile where its starts are */
    TILE_VALUES = TILE_STARTS + TILE_PARTS * 2, /* and its values */
};

typedef struct tile_matrix {
    const uint8_t *data;    /* [TILE_UNIT * offsets[tiles]], 16-byte aligned (fastest: 128) */
    const int32_t *offsets; /* [tiles + 1], in units */
    int64_t rows, cols;
    int32_t widest;    /* units of the largest tile: what a kernel has to make room for; 0 where there are no tiles */
    macko_dtype dtype; /* MACKO_F16 or MACKO_BF16 */
} tile_matrix;

TILE_FN int64_t tile_row_blocks(int64_t rows) {
    return (rows + TILE_ROWS - 1) / TILE_ROWS;
}

TILE_FN int64_t tile_col_blocks(int64_t cols) {
    return (cols + TILE_COLS - 1) / TILE_COLS;
}

TILE_FN int64_t tile_count(int64_t rows, int64_t cols) {
    return tile_row_blocks(rows) * tile_col_blocks(cols);
}

/* Units of a tile of so many values. */
TILE_FN int tile_units(int values) {
    return (TILE_VALUES + 2 * values + TILE_UNIT - 1) / TILE_UNIT;
}

/* Row of a lane's element within its part, and its column within the tile. */
TILE_FN int tile_row(int lane, int e) {
    return lane / 4 + 8 * (e / 2);
}
TILE_FN int tile_col(int lane, int j, int e) {
    return 16 * (j / 2) + 8 * (j % 2) + 2 * (lane % 4) + e % 2;
}

/* What packing has to tell the host before it can allocate data. */
typedef struct tile_totals {
    int64_t units;  /* of data; over INT32_MAX the matrix is too large */
    int64_t widest; /* units of the largest tile */
    int64_t stored; /* values */
} tile_totals;

/*
 * CPU, the reference order. Row blocks [first, last) each, so that threads can share the work.
 * count writes offsets[i + 1] = units of tile i, for its tiles; the caller adds them up (offsets[0] = 0).
 */
void tile_count_cpu(const void *w, int64_t rows, int64_t cols, int64_t first, int64_t last, int32_t *offsets);
void tile_write_cpu(const tile_matrix *m, const void *w, uint8_t *data, int64_t first, int64_t last);
/* The dense rows [first, first + count), w [count, cols]; first and count are any. */
void tile_unpack_cpu(const tile_matrix *m, int64_t first, int64_t count, void *w);

/* macko_fault.kind, in the order in which they are looked for. row is the row block, entry the tile. */
enum {
    TILE_OK = 0,
    TILE_OFFSETS, /* offsets[entry] is not 0 at the start, or not 33 to 545 more than the one before; found: itself */
    TILE_WIDEST,  /* the largest tile has not m->widest units; found: how many */
    TILE_END,     /* the last offset is not the size of data; found: the offset */
    TILE_COUNT,   /* the tile has another size than its masks say; found: the values that they say */
    TILE_START,   /* a part's values do not begin behind those before; found: where they begin */
    TILE_OUTSIDE, /* a value behind the last row or column; found: the part */
    TILE_ZERO,    /* a zero is stored, or one is not +0.0 behind the values; found: byte of the tile */
};

/* What packing cannot have made, first of all where reading would be unsafe. units: those of data. */
macko_fault tile_check_cpu(const tile_matrix *m, int64_t units);

#ifdef __CUDACC__
#define TILE_HAVE_CUDA
#elif defined(USE_CUDA)
#define TILE_HAVE_CUDA
#endif
#ifdef TILE_HAVE_CUDA
#include <cuda_runtime_api.h>

/*
 * Everything is enqueued on `stream` of the current device; nothing synchronises or allocates. Pointers are device
 * pointers but for the structs. Packing: count for all rows, piece by piece; scan; the host reads *totals (device memory)
 * and allocates; write for all rows. A piece begins at a row block; its m has the offsets of its first tile on.
 */

/* offsets[i + 1] = units of tile i of the dense w [rows, cols] (16-bit); adds to totals->stored. */
cudaError_t tile_count_cuda(const void *w, int64_t rows, int64_t cols, int32_t *offsets, tile_totals *totals,
                            cudaStream_t stream);

/* Adds the offsets [tiles + 1] up, and writes the other totals. */
cudaError_t tile_scan_cuda(int64_t tiles, int32_t *offsets, tile_totals *totals, cudaStream_t stream);

/* The tiles of the dense w [m->rows, m->cols] into data, whose begin the offsets count from. */
cudaError_t tile_write_cuda(const tile_matrix *m, const void *w, uint8_t *data, cudaStream_t stream);

/* The dense rows [first, first + count), w [count, cols]; first and count are any. */
cudaError_t tile_unpack_cuda(const tile_matrix *m, int64_t first, int64_t count, void *w, cudaStream_t stream);

/*
 * y [tokens, rows] = x [tokens, cols] W^T + bias; bias [rows] may be NULL. One launch, same bits every run. On
 * sm_90 at most 128 tokens, else cudaErrorInvalidValue: ask tile_gemm_plan_cuda first. cols > 0. Rows of x begin every
 * x_stride elements; x is 16-byte aligned and x_stride a multiple of 8 (tensor copies want it).
 * May start before the kernel in front of it in the stream is done (programmatic dependent launch): that one must not
 * write the weight.
 */
cudaError_t tile_mm_cuda(const tile_matrix *m, int64_t tokens, const void *x, int64_t x_stride, const void *bias,
                         void *y, cudaStream_t stream);
/*
 * The same for more than 128 tokens on sm_90, in the way that the plan says. room: device memory of plan->room_bytes,
 * with any content, for the sums of output tiles that blocks share.
 */
typedef struct tile_gemm_plan {
    int64_t room_bytes; /* -1 where it is tile_mm_cuda that multiplies */
    int tokens, pair;   /* of a block; blocks that share decoding */
    int clusters, cut;  /* of blocks; output tiles that all of them share */
} tile_gemm_plan;
cudaError_t tile_gemm_plan_cuda(const tile_matrix *m, int64_t tokens, tile_gemm_plan *plan);
cudaError_t tile_gemm_cuda(const tile_matrix *m, int64_t tokens, const void *x, int64_t x_stride, const void *bias,
                           void *y, const tile_gemm_plan *plan, void *room, cudaStream_t stream);
#endif

#ifdef __cplusplus
}
#endif

#endif
