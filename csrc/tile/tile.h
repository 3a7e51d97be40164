/*
 * The tile layout: a sparse matrix as the tensor cores take it, for any number of tokens. This header is its only
 * specification.
 *
 * A bit for every column says whether a value stands there. The values of each lane of a warp lie in that lane's own bank
 * of shared memory, so that 32 lanes load 32 values at a time, whichever place each is at, and no lane has to know how many
 * the others have. It depends on no device, may be held instead of the canonical tensors and converts back bit for bit.
 * Zeros of either sign are dropped, NaN and Inf are values. Some 1.24 bytes a weight at density 0.5, 0.85 at 0.3.
 *
 * Order, from the matrix down:
 *   strip    TILE_STRIP tiles side by side: TILE_ROWS x TILE_STRIP_COLS elements. Row block after row block, and in it from
 *            the first column to the last. Rows and columns behind the matrix have no values. Strip i = row_block *
 *            tile_strips(cols) + s is data[128 * offsets[i]] up to data[128 * offsets[i + 1]]:
 *                masks    uint32 [TILE_STRIP][TILE_PARTS][TILE_LANES]
 *                turns    uint16 [TILE_PARTS][TILE_LANES][2], where each stream's second half begins: see below
 *                firsts   uint16 [TILE_PARTS], the row of `values` where each part begins; and zeros up to 128 bytes
 *                values   uint16 [rows][TILE_LANES][2]: rows of 128 bytes, a 32-bit word for each lane
 *   tile     TILE_ROWS x TILE_COLS elements.
 *   part     16 rows of a tile, one warp's: rows 16 part .. 16 part + 15. Its rows of `values` are those from firsts[part]
 *            up to the next part's, or to the end.
 *   group    128 elements of a part of a tile, 4 a lane. Groups 2 b and 2 b + 1 are columns 16 b .. 16 b + 15 of the tile.
 *   element  of lane l = 4 g + t (g < 8, t < 4) in group j: element e is row g + 8 (e / 2) of the part and column
 *            16 (j / 2) + 8 (j % 2) + 2 t + e % 2 of the tile. So the elements of groups 2 b and 2 b + 1 are the lane's
 *            registers a0 a1 and a2 a3 of operand A of mma.m16n8k16, and of wgmma, whose four warps have the four parts.
 *   mask     bit 8 e + j of the lane's word: element e of group j has a value. (mask >> j) & 0x01010101 has an element
 *            in each byte: dp4a with weights 128, 0x8080 and 0x808080 makes the places of the values behind the first.
 *   stream   of a lane and half h (0 or 1), in a part of a strip: its values of groups 4 h .. 4 h + 3, by tile, in it by
 *            group, in it by element. Its column of `values` is its lane's half of a word, [.][lane][h]. The first half,
 *            tiles 0 and 1, stands from the top of this column down. The second half, tiles 2 and 3, stands in some column
 *            of the same h, behind the first half that is there: from byte turns[part][lane][h] of the part's values on.
 *   turns    Long second halves go where first halves are short, so that columns end alike. For each part and h: lanes by
 *            the length of their second half, the longest first, are given the columns by the length of their first half,
 *            the shortest first; of equal ones that of the lower lane first. A part has as many rows as its longest column.
 *            What no value takes is +0.0.
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
    TILE_QUAD = 4,  /* elements of a lane in a group */
    TILE_STRIP = 4, /* tiles */
    TILE_STRIP_COLS = TILE_STRIP * TILE_COLS,
    TILE_HALVES = 2,                               /* columns of values a lane has, and halves of a stream */
    TILE_HALF_BITS = 0x0f0f0f0f,                   /* of a mask: groups 0 to 3, the column of half 0 */
    TILE_ROW_BYTES = TILE_LANES * TILE_HALVES * 2, /* of values */
    TILE_MASK_BYTES = TILE_PARTS * TILE_LANES * 4, /* of a tile */
    TILE_UNIT = 128,                               /* bytes that offsets count */
    TILE_TURNS = TILE_STRIP * TILE_MASK_BYTES,     /* byte of a strip where its turns are, */
    TILE_FIRSTS = TILE_TURNS + TILE_PARTS * TILE_LANES * TILE_HALVES * 2, /* its firsts, */
    TILE_VALUES = TILE_FIRSTS + TILE_UNIT,                                /* and its values */
    TILE_MOST_CLUSTERS = 72,                       /* that share output tiles: of two blocks, each with an SM */
    TILE_MOST_ROWS = TILE_PARTS * TILE_STRIP * 16, /* of values of a strip: none is zero */
};

typedef struct tile_matrix {
    const uint8_t *data;    /* [TILE_UNIT * offsets[strips]], 16-byte aligned (fastest: 128) */
    const int32_t *offsets; /* [strips + 1], in units */
    int64_t rows, cols;
    int32_t widest;    /* units of the largest strip: what a kernel has to make room for; 0 where there are none */
    macko_dtype dtype; /* MACKO_F16 or MACKO_BF16 */
    int64_t units;     /* of data, for a kernel to guess where strips are; may be 0 */
} tile_matrix;

TILE_FN int64_t tile_row_blocks(int64_t rows) {
    return (rows + TILE_ROWS - 1) / TILE_ROWS;
}

/* Of a row block. */
TILE_FN int64_t tile_strips(int64_t cols) {
    return (cols + TILE_STRIP_COLS - 1) / TILE_STRIP_COLS;
}

/* Strips of a matrix. */
TILE_FN int64_t tile_count(int64_t rows, int64_t cols) {
    return tile_row_blocks(rows) * tile_strips(cols);
}

/* Units of a strip with so many rows of values. */
TILE_FN int tile_units(int value_rows) {
    return (TILE_VALUES + value_rows * TILE_ROW_BYTES) / TILE_UNIT;
}

/* Row of a lane's element within its part, and its column within its tile. */
TILE_FN int tile_row(int lane, int e) {
    return lane / 4 + 8 * (e / 2);
}
TILE_FN int tile_col(int lane, int j, int e) {
    return 16 * (j / 2) + 8 * (j % 2) + 2 * (lane % 4) + e % 2;
}

/* What packing has to tell the host before it can allocate data. */
typedef struct tile_totals {
    int64_t units;  /* of data; over INT32_MAX the matrix is too large */
    int64_t widest; /* units of the largest strip */
    int64_t stored; /* values */
} tile_totals;

/*
 * CPU, the reference order. Row blocks [first, last) each, so that threads can share the work.
 * count writes offsets[i + 1] = units of strip i, for its strips; the caller adds them up (offsets[0] = 0).
 */
void tile_count_cpu(const void *w, int64_t rows, int64_t cols, int64_t first, int64_t last, int32_t *offsets);
void tile_write_cpu(const tile_matrix *m, const void *w, uint8_t *data, int64_t first, int64_t last);
/* The dense rows [first, first + count), w [count, cols]; first and count are any. */
void tile_unpack_cpu(const tile_matrix *m, int64_t first, int64_t count, void *w);

/* macko_fault.kind, in the order in which they are looked for. row is the row block, entry the strip. */
enum {
    TILE_OK = 0,
    TILE_OFFSETS, /* offsets[entry] is not 0 at the start, or no strip's units more than the one before; found: itself */
    TILE_WIDEST,  /* the largest strip has not m->widest units; found: how many */
    TILE_END,     /* the last offset is not the size of data; found: the offset */
    TILE_OUTSIDE, /* a mask has a bit behind the last row or column; found: word of masks */
    TILE_COUNT,   /* the strip has another size than its masks say; found: the rows of values that they say */
    TILE_FIRST,   /* firsts are not those that the masks say, or zeros behind them; found: byte of the strip */
    TILE_TURN,    /* turns are not those that the masks say; found: byte of the strip */
    TILE_ZERO,    /* a zero is stored, or one is not +0.0 where no value is; found: byte of the strip */
};

/* What packing cannot have made, first of all where reading would be unsafe. units: those of data. found without a fault:
 * the values of the matrix. */
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
 * and allocates; write for all rows. A piece begins at a row block; its m has the offsets of its first strip on.
 */

/* offsets[i + 1] = units of strip i of the dense w [rows, cols] (16-bit); adds to totals->stored. */
cudaError_t tile_count_cuda(const void *w, int64_t rows, int64_t cols, int32_t *offsets, tile_totals *totals,
                            cudaStream_t stream);

/* Adds the offsets [strips + 1] up, and writes the other totals. */
cudaError_t tile_scan_cuda(int64_t strips, int32_t *offsets, tile_totals *totals, cudaStream_t stream);

/* The strips of the dense w [m->rows, m->cols] into data, whose begin the offsets count from. */
cudaError_t tile_write_cuda(const tile_matrix *m, const void *w, uint8_t *data, cudaStream_t stream);

/* The dense rows [first, first + count), w [count, cols]; first and count are any. */
cudaError_t tile_unpack_cuda(const tile_matrix *m, int64_t first, int64_t count, void *w, cudaStream_t stream);

/*
 * y [tokens, rows] = x [tokens, cols] W^T + bias; bias [rows] may be NULL. One launch, same bits every run. On
 * sm_90 (but with MACKO_COPY=cp_async) at most 64 tokens, else cudaErrorInvalidValue: ask tile_gemm_plan_cuda first.
 * cols > 0. Rows of x begin every x_stride elements; x is 16-byte aligned and x_stride a multiple of 8 (tensor copies
 * want it).
 * May start before the kernel in front of it in the stream is done (programmatic dependent launch): that one must not
 * write the weight.
 */
cudaError_t tile_mm_cuda(const tile_matrix *m, int64_t tokens, const void *x, int64_t x_stride, const void *bias,
                         void *y, cudaStream_t stream);
/*
 * The same for more tokens on sm_90, in the way that the plan says. room: device memory of plan->room_bytes, with any
 * content, for the sums of output tiles that blocks share.
 */
typedef struct tile_gemm_plan {
    int64_t room_bytes;                       /* -1 where it is tile_mm_cuda that multiplies */
    int row_blocks, tokens, pair;             /* of an output tile; blocks that share it */
    int clusters, cut;                        /* of two blocks; output tiles that all of them share */
    int begins[TILE_MOST_CLUSTERS + 1];       /* of what each has of those, in halves of strips */
    int first_strips[TILE_MOST_CLUSTERS * 2]; /* that each block works on; -1: none */
} tile_gemm_plan;
cudaError_t tile_gemm_plan_cuda(const tile_matrix *m, int64_t tokens, tile_gemm_plan *plan);
cudaError_t tile_gemm_cuda(const tile_matrix *m, int64_t tokens, const void *x, int64_t x_stride, const void *bias,
                           void *y, const tile_gemm_plan *plan, void *room, cudaStream_t stream);
#endif

#ifdef __cplusplus
}
#endif

#endif
