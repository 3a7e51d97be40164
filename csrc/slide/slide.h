/*
 * The slide format: weights of pattern (2n-2):2n as 2:4 windows, and dense ones for the same kernel. This header is the
 * only specification of the bytes.
 *
 * Sliding. Columns go in groups of 2n, the last one filled up with zeros; a group holds at most 2n-2 non-zeros. Window w
 * of a group, 0 <= w < n-1, covers columns 2w .. 2w+3 and takes the first two non-zeros there that no window before it
 * took: every non-zero is taken, once. Window v of a row, v = group * (n-1) + w, is columns 4v .. 4v+3 of the expanded
 * row, in which at most two of four are non-zero. n = 2 is the plain 2:4 pattern. n = 0 is a dense weight: no windows,
 * expanded columns = columns. Activations are lifted to the same expanded columns: lifted[4v + d] = x[column(v) + d].
 * Source: the SlideSparse paper.
 *
 * Depth. Expanded columns rounded up to 128: the width of lifted activations. Zero after the last window.
 *
 * Packed weight: [row_blocks][k_tiles][tile_bytes], a tile being 64 rows x 128 bytes of expanded columns (128 columns of
 * 8 bits, 64 of 16), laid out as the tensor core of sm_90 reads it from shared memory.
 *   sparse: 64 rows x 64 bytes of values, two a window, 16-byte chunk c of row r at c ^ (r / 2 % 4) (the 64-byte
 *           swizzle); after them 4 bits of metadata a window: the indices i0 | i1 << 2 of its two values, i0 < i1.
 *           One value at 3: (0, v) with indices 0, 3; one elsewhere: (v, 0) with i1 = 3; none: zeros with 0, 1.
 *           Metadata are in the order of the 128 threads that give them to the instruction, see macko_slide_meta_offset.
 *   dense:  64 rows x 128 bytes, 16-byte chunk c of row r at c ^ r % 8 (the 128-byte swizzle).
 * Rows after the last and tiles' columns past the depth are zeros (indices 0, 1).
 *
 * Quantising, of weights by row and of activations by token: scale = absmax / Q in fp32, Q = 127 (int8) or 448 (e4m3);
 * q = x * (Q / absmax), both steps in fp32, rounded to nearest even. Below absmax 2^-64 x and absmax are first multiplied
 * by 2^64, so that Q / absmax stays finite. A row of zeros has scale 0. A row with NaN or Inf has scale NaN or Inf and
 * comes out as NaN: its codes are 0 or NaN. 16-bit types are kept as they are with scale 1, and so are 8-bit weights.
 */
#pragma once

#include "../core/types.h"

MACKO_C_BEGIN

enum {
    MACKO_SLIDE_MAX_N = 8,          /* 14:16 */
    MACKO_SLIDE_BLOCK_ROWS = 64,    /* rows of a tile: one instruction's */
    MACKO_SLIDE_TILE_BYTES = 128,   /* of expanded columns: one row of the 128-byte swizzle */
    MACKO_SLIDE_DEPTH_UNIT = 128,   /* columns: lifted rows begin at whole lines of L2 */
    MACKO_SLIDE_VALUE_BYTES = 4096, /* of a sparse tile, metadata after them */
    MACKO_SLIDE_MAX_COLS = 114688,  /* a row of 16-bit numbers has to fit into shared memory */
};

/* Type of packed values and lifted activations. */
typedef enum macko_slide_type {
    MACKO_SLIDE_S8 = 0,
    MACKO_SLIDE_E4M3 = 1,
    MACKO_SLIDE_F16 = 2,
    MACKO_SLIDE_BF16 = 3,
} macko_slide_type;

/* Type of a dense matrix that is packed or quantised. */
typedef enum macko_slide_source {
    MACKO_SLIDE_FROM_F16 = MACKO_F16,
    MACKO_SLIDE_FROM_BF16 = MACKO_BF16,
    MACKO_SLIDE_FROM_F32 = MACKO_F32, /* CPU only */
    MACKO_SLIDE_FROM_S8 = 3,          /* weights that are quantised already */
    MACKO_SLIDE_FROM_E4M3 = 4,
} macko_slide_source;

typedef struct macko_slide_shape {
    int64_t rows, cols;
    int n; /* 2 .. MACKO_SLIDE_MAX_N: (2n-2):2n; 0: dense */
    macko_slide_type type;
} macko_slide_shape;

MACKO_FN int macko_slide_element_bytes(macko_slide_type type) {
    return type <= MACKO_SLIDE_E4M3 ? 1 : 2;
}

MACKO_FN int64_t macko_slide_groups(int64_t cols, int n) {
    return (cols + 2 * n - 1) / (2 * n);
}

MACKO_FN int64_t macko_slide_depth(int64_t cols, int n) {
    const int64_t expanded = n ? macko_slide_groups(cols, n) * 4 * (n - 1) : cols;
    const int64_t units = (expanded + MACKO_SLIDE_DEPTH_UNIT - 1) / MACKO_SLIDE_DEPTH_UNIT;
    return (units ? units : 1) * MACKO_SLIDE_DEPTH_UNIT;
}

/* Even: the kernel keeps the metadata of two tiles in different registers, and takes them in pairs. */
MACKO_FN int64_t macko_slide_k_tiles(int64_t cols, int n, macko_slide_type type) {
    const int64_t bytes = macko_slide_depth(cols, n) * macko_slide_element_bytes(type);
    return (bytes + 2 * MACKO_SLIDE_TILE_BYTES - 1) / (2 * MACKO_SLIDE_TILE_BYTES) * 2;
}

MACKO_FN int64_t macko_slide_row_blocks(int64_t rows) {
    return (rows + MACKO_SLIDE_BLOCK_ROWS - 1) / MACKO_SLIDE_BLOCK_ROWS;
}

/* 128 threads give two words of metadata each to 8-bit tiles and one to 16-bit ones, which hold half the windows. */
MACKO_FN int macko_slide_tile_bytes(int n, macko_slide_type type) {
    if (!n) return 2 * MACKO_SLIDE_VALUE_BYTES;
    return MACKO_SLIDE_VALUE_BYTES + 128 * (macko_slide_element_bytes(type) == 1 ? 8 : 4);
}

/* First column of window v of a row: windows of a group start two columns apart, groups 2n. */
MACKO_FN int64_t macko_slide_column(int64_t window, int n) {
    return 2 * (window + window / (n - 1));
}

/* Offset in a tile of byte `byte` of row `row`'s values: 64 bytes a row in a sparse tile, 128 in a dense one. */
MACKO_FN int macko_slide_value_offset(int n, int row, int byte) {
    return n ? row * 64 + (((byte >> 4) ^ (row >> 1 & 3)) << 4) + (byte & 15)
             : row * 128 + (((byte >> 4) ^ (row & 7)) << 4) + (byte & 15);
}

/*
 * Offset in a tile of the byte that holds the metadata of windows `window` (even, low 4 bits) and `window` + 1 (high) of
 * row `row`. Words of 128 threads, 512 bytes together; thread 32 * (row / 16) + lane gives them to the instruction:
 *   8 bits:  words window / 16; lane = 4 (row % 8) + 2 (window / 8 % 2) + row / 8 % 2; 8 windows of one row a word
 *   16 bits: one word; lane = 4 (row % 8) + window / 4; 4 windows of row % 16 < 8 in its low half, of row + 8 in its high
 */
MACKO_FN int macko_slide_meta_offset(macko_slide_type type, int row, int window) {
    const int first_lane = row / 16 * 32 + row % 8 * 4, upper = row / 8 % 2;
    if (macko_slide_element_bytes(type) == 1)
        return MACKO_SLIDE_VALUE_BYTES + window / 16 * 512 + (first_lane + window / 8 % 2 * 2 + upper) * 4 +
               window % 8 / 2;
    return MACKO_SLIDE_VALUE_BYTES + (first_lane + window / 4) * 4 + upper * 2 + window % 4 / 2;
}

/* What quantising a row or a token takes: q = round(x * before * factor). */
typedef struct macko_slide_quantiser {
    float before, factor, scale;
} macko_slide_quantiser;

MACKO_FN macko_slide_quantiser macko_slide_quantiser_of(float absmax, macko_slide_type type) {
    const float most = type == MACKO_SLIDE_S8 ? 127.0f : 448.0f;
    const float before = absmax < 0x1p-64f ? 0x1p64f : 1.0f; /* false for NaN */
    const macko_slide_quantiser made = {before, absmax == 0 ? 0.0f : most / (absmax * before), absmax / most};
    return made;
}

/*
 * CPU. Each function does rows or tokens [begin, end) so that the caller owns the threads; ranges may run at the same
 * time. Those that need scratch memory return 0, or -1 where there is none.
 */

typedef struct macko_slide_weight {
    macko_slide_shape shape;
    const uint8_t *packed; /* [row_blocks][k_tiles][tile_bytes] */
    const float *scale;    /* [rows] */
} macko_slide_weight;

/* What packing found: the first group with more non-zeros than its pattern allows, and all that pruning dropped. */
typedef struct macko_slide_found {
    int64_t row, group, count; /* row -1: none */
    int64_t dropped;
} macko_slide_found;

/*
 * Packs rows of w [rows, cols], contiguous. Row blocks are written whole by the range that holds their first row, so
 * begin must be a multiple of 64. `prune`: a group with too many non-zeros loses the smallest (of equals the last).
 */
int macko_slide_pack_cpu(const macko_slide_shape *shape, const void *w, macko_slide_source source, int prune,
                         int64_t begin, int64_t end, uint8_t *packed, float *scale, macko_slide_found *found);

/* The codes of the weight, dense [rows, cols] of shape.type. Any bytes are safe. */
void macko_slide_unpack_cpu(const macko_slide_weight *weight, int64_t begin, int64_t end, void *codes);

/* Quantises and lifts tokens of x [tokens, cols] to lifted [tokens, depth] and scale [tokens] (of 16-bit types: 1). */
int macko_slide_quant_cpu(const void *x, macko_dtype dtype, int64_t cols, int n, macko_slide_type type, int64_t begin,
                          int64_t end, void *lifted, float *scale);

/*
 * out [tokens, rows] of out_dtype: fma(scale[row], token_scale[token] * sum, bias[row]) for rows [begin, end), the sum
 * exact in int32 for int8 and in fp32 otherwise, rounded once more to out_dtype. token_scale NULL: 1. bias may be NULL.
 */
typedef struct macko_slide_gemm_args {
    macko_slide_weight weight;
    const void *lifted; /* [tokens, depth] of weight.shape.type */
    const float *token_scale;
    const void *bias; /* [rows] of out_dtype */
    void *out;
    int64_t tokens;
    macko_dtype out_dtype;
    /* CUDA: columns of a row of `lifted`, at most depth (the rest counts as zeros), and from token to token of out. */
    int64_t lifted_cols, out_stride;
    /* CUDA: the launch before it on the stream is macko_slide_quant_cuda, which made `lifted` and token_scale: the GEMM
       may be launched with PDL, to start with what does not need them. */
    int follows_quantiser;
    /* CUDA: of macko_slide_gemm_workspace bytes, or NULL, with which no k tiles are shared by blocks. */
    void *workspace;
} macko_slide_gemm_args;

int macko_slide_gemm_cpu(const macko_slide_gemm_args *args, int64_t begin, int64_t end);

#ifdef MACKO_HAVE_CUDA
/*
 * CUDA. Everything is enqueued on `stream` of the current device; nothing synchronises or allocates. Every pointer is a
 * device pointer, that of args excepted; fp16 and bf16 only beside the types of slide.
 */

/*
 * Adds to found, which is zero before: found[0] non-zeros that pruning dropped; found[1] = INT64_MAX - key of the first
 * bad group where there is one, key = (row * groups + group) * 256 + count.
 */
cudaError_t macko_slide_pack_cuda(const macko_slide_shape *shape, const void *w, macko_slide_source source, int prune,
                                  uint8_t *packed, float *scale, int64_t found[2], cudaStream_t stream);

cudaError_t macko_slide_unpack_cuda(const macko_slide_weight *weight, void *codes, cudaStream_t stream);

cudaError_t macko_slide_quant_cuda(const void *x, macko_dtype dtype, int64_t tokens, int64_t cols, int n,
                                   macko_slide_type type, void *lifted, float *scale, cudaStream_t stream);

/* cudaErrorNotSupported for e4m3 where the device, or what was built for it, is older than compute capability 8.9;
   cudaErrorSymbolNotFound where a device of 9.0 has a driver older than CUDA 12.0. `lifted`, out and their rows: 16-byte
   aligned. */
cudaError_t macko_slide_gemm_cuda(const macko_slide_gemm_args *args, cudaStream_t stream);

/* Bytes of the workspace that a call with these arguments wants, 0 for none. */
cudaError_t macko_slide_gemm_workspace(const macko_slide_gemm_args *args, int64_t *bytes);
#endif

MACKO_C_END
