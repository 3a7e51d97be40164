/*
 * Which kernel multiplies: of each layout, and of all codecs of slabs, a pure function of what a header and a device say
 * and of the number of tokens (tests/test_path.py lists the answers). Decided elsewhere: the sizes of a kernel's own
 * tiles, in its plan (csrc/slab: few_plan.h, many_plan.h, ring_plan.h); up to how many tokens there is a kernel for slabs
 * without wgmma, in ring_plan.h; whether a merged layer's outputs are those of one op, in Python, before there is an op
 * (gives_parts); and that one token's norm is in sell's product, by which functions a Layout has.
 */
#pragma once

#include <stdbool.h>

#include "../core/types.h"

typedef enum macko_path {
    MACKO_PATH_SPMV,       /* from packed bytes, for one token (bitmap: a few): FMAs, memory bound */
    MACKO_PATH_SPMM,       /* the same for several */
    MACKO_PATH_FEW,        /* slabs: tensor cores, memory bound; wgmma */
    MACKO_PATH_MANY,       /* the same, compute bound */
    MACKO_PATH_RING,       /* slabs, without wgmma: mma.sync */
    MACKO_PATH_DENSE_ROWS, /* unpacked, then the library's product */
} macko_path;

typedef struct macko_path_device {
    bool is_gpu, has_wgmma, has_vectors; /* has_vectors: AVX2, of a CPU */
    bool has_bulk;                       /* bulk copies, of GPUs from 9.0 on */
    bool has_limit;                      /* a knob says up to how many tokens packed bytes are multiplied */
    int64_t limit;
} macko_path_device;

/*
 * Canonical, on a CPU: up to how many tokens it does each by itself; above, blocks of dense rows are faster. One core of a
 * Zen 5, 4096x4096, density 0.5 (0.1), ms: bf16 1.3 (0.63) a token, by blocks 3.3 (3.0); fp32 2.5 (0.67), by blocks 10
 * (6.5). fp16 1.4, by blocks 1.5 and nearly as much a token again, because torch 2.13's product takes 1.3.
 */
static inline double macko_single_tokens(macko_dtype dtype, int64_t rows, int64_t cols, int64_t entries) {
    const double columns_an_entry = (double)rows * (double)cols / (double)(entries > 0 ? entries : 1);
    return dtype == MACKO_F16 ? 20 : dtype == MACKO_BF16 ? 2 + 0.3 * columns_an_entry : 3 + 0.67 * columns_an_entry;
}
/* entries: with padding. */
static inline macko_path macko_canonical_path(macko_dtype dtype, int64_t rows, int64_t cols, int64_t entries,
                                              int64_t tokens, macko_path_device d) {
    const bool single = tokens == 1 || (!d.is_gpu && tokens <= macko_single_tokens(dtype, rows, cols, entries));
    return single ? MACKO_PATH_SPMV : MACKO_PATH_DENSE_ROWS;
}

enum { MACKO_BITMAP_FEW_TOKENS = 4 }; /* multiplied with x as it is; above, turning x pays (Zen 4, all dtypes) */
static inline macko_path macko_bitmap_path(int64_t cols, int64_t tokens, macko_path_device d) {
    if (tokens <= MACKO_BITMAP_FEW_TOKENS) return MACKO_PATH_SPMV;
    return d.has_vectors && cols ? MACKO_PATH_SPMM : MACKO_PATH_DENSE_ROWS;
}

/*
 * sell: up to how many tokens run from the packed stream; more go through dense rows and the library's GEMM. In units of
 * the time of the dense product, with h bytes a byte of dense: a pass of 8 tokens takes 0.25 + 2.1 h (its start, and
 * the reads of x from shared memory), 4 h where x fits for two tokens only; dense rows take 2.5 + 2.6 h, but 2 + 0.4 h
 * where they stay in L2. Measured on an H200, at density 0.5 / 0.3 / 0.1: a pass 53 / 36 / 19 us, dense rows 135 / 116 /
 * 103, one dense product 35 (8192 x 8192); 17 / 13 / 9, 30 / 26 / 27, 13 (4096 x 4096). Without bulk copies each token is
 * a pass: by count 0.1 + h, where dense rows take 2 + h.
 */
static inline int64_t macko_stream_tokens(int64_t rows, int64_t cols, int64_t slot_bytes, bool has_bulk) {
    const double dense = (double)rows * cols * 2, h = (double)slot_bytes / (dense > 0 ? dense : 1);
    if (!has_bulk) return (int64_t)((2 + h) / (0.1 + h));
    const double pass = cols <= 24576 ? 0.25 + 2.1 * h : 0.01 + 4 * h;
    const double passes = (dense <= 32 << 20 ? 2 + 0.4 * h : 2.5 + 2.6 * h) / pass;
    return 8 * (passes < 1 ? 1 : passes > 8 ? 8 : (int64_t)passes);
}
static inline macko_path macko_sell_path(int64_t rows, int64_t cols, int64_t slot_bytes, int64_t tokens,
                                         macko_path_device d) {
    if (tokens == 1) return MACKO_PATH_SPMV;
    const int64_t most = d.has_limit ? d.limit : macko_stream_tokens(rows, cols, slot_bytes, d.has_bulk);
    return tokens <= most ? MACKO_PATH_SPMM : MACKO_PATH_DENSE_ROWS;
}

/*
 * Slabs, with wgmma: up to how many tokens the kernel for few multiplies; at most 64, of several outputs 32, as it has no
 * registers for them. Above 32 each block of it reads more of x than of the weight, and the other one shares x among the
 * rows of two or three row blocks and two blocks. `waits`: the codec's kernel waits for memory with 64 tokens.
 * 64 tokens, few / many, us (H200, tile at density 0.5): 4096 x 4096 10.1 / 10.9, 4096 x 11008 19.8 / 19.3 (alone 20.8 /
 * 21.8), 11008 x 4096 21.9 / 19.7, 8192 x 8192 26.8 / 25.9, 28672 x 8192 107 / 85.
 */
static inline int64_t macko_few_tokens(int64_t rows, bool several_outputs, bool waits) {
    return !several_outputs && rows <= 4096 && !waits ? 64 : 32;
}
/* few_tokens: that. ring_tokens: up to how many tokens there is a kernel without wgmma; 0: none. */
static inline macko_path macko_slab_path(int64_t rows, int64_t cols, int64_t few_tokens, int64_t ring_tokens,
                                         int64_t tokens, macko_path_device d) {
    if (!d.is_gpu || !cols || tokens > (d.has_limit ? d.limit : INT32_MAX)) return MACKO_PATH_DENSE_ROWS;
    if (d.has_wgmma) return tokens <= few_tokens || !rows ? MACKO_PATH_FEW : MACKO_PATH_MANY;
    return ring_tokens && (d.has_limit || tokens <= ring_tokens) ? MACKO_PATH_RING : MACKO_PATH_DENSE_ROWS;
}

static inline macko_path macko_ec_path(int64_t tokens) {
    return tokens == 1 ? MACKO_PATH_SPMV : MACKO_PATH_DENSE_ROWS;
}
