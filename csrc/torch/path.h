/*
 * Every layout, and the one room that decides which kernel multiplies: a pure function of what a header and a device say
 * and of the number of tokens (tests/test_path.py lists its answers). Decided elsewhere: the sizes of a kernel's own
 * tiles, in its launch or plan (many_plan.h); whether a merged layer's parts are outputs of one op, in Python, before
 * there is an op (gives_parts); and that one token's norm is in sell's product, by which functions a Layout has.
 */
#ifndef MACKO_TORCH_PATH_H
#define MACKO_TORCH_PATH_H

#include <stdbool.h>

#include "../core/types.h"

/*
 * A row a layout: its name, and its functions (packed.h). Its number here stands first in a header, and is `number` of
 * its class in macko/weights/formats.py; no file has it.
 */
#define MACKO_LAYOUTS(LAYOUT)                                                                                          \
    LAYOUT(CANONICAL, canonical_layout)                                                                                \
    LAYOUT(BITMAP, bitmap_layout)                                                                                      \
    LAYOUT(SELL, sell_layout)                                                                                          \
    LAYOUT(TILE, tile_layout)                                                                                          \
    LAYOUT(EC, ec_layout)                                                                                              \
    LAYOUT(SLIDE, slide_layout)                                                                                        \
    LAYOUT(DENSE12, dense12_layout)                                                                                    \
    LAYOUT(SPARSE11, sparse11_layout)                                                                                  \
    LAYOUT(DENSE8, dense8_layout)                                                                                      \
    LAYOUT(SPARSE8, sparse8_layout)

#define MACKO_LAYOUT_ID(id, layout) MACKO_LAYOUT_##id,
typedef enum macko_layout_id { MACKO_LAYOUTS(MACKO_LAYOUT_ID) MACKO_NUM_LAYOUTS } macko_layout_id;
#undef MACKO_LAYOUT_ID

typedef enum macko_path {
    MACKO_PATH_SPMV,       /* from packed bytes, for one token (bitmap: a few): FMAs, memory bound */
    MACKO_PATH_SPMM,       /* the same for several */
    MACKO_PATH_FEW,        /* tile and its codecs: tensor cores, memory bound */
    MACKO_PATH_MANY,       /* tile and its codecs: tensor cores, compute bound */
    MACKO_PATH_DENSE_ROWS, /* unpacked, then the library's product */
} macko_path;

/* What the choice depends on; what a layout does not look at is 0. */
typedef struct macko_path_weight {
    macko_layout_id layout;
    macko_dtype dtype;
    int64_t rows, cols;
    int64_t held;  /* canonical: entries, with padding. sell: bytes of its slots. tile: of its largest slab */
    bool in_parts; /* tile and its codecs: the result's rows go to several matrices */
} macko_path_weight;
typedef struct macko_path_device {
    bool is_gpu, has_wgmma, has_vectors; /* has_vectors: AVX2, of a CPU */
    bool has_limit;                      /* a knob says up to how many tokens packed bytes are multiplied */
    int64_t limit;
} macko_path_device;

/*
 * Canonical, on a CPU: up to how many tokens it does each by itself; above, blocks of dense rows are faster. One core of a
 * Zen 5, 4096x4096, density 0.5 (0.1), ms: bf16 1.3 (0.63) a token, by blocks 3.3 (3.0); fp32 2.5 (0.67), by blocks 10
 * (6.5). fp16 1.4, by blocks 1.5 and nearly as much a token again, because torch 2.13's product takes 1.3.
 */
static inline double macko_single_tokens(macko_path_weight w) {
    const double columns_an_entry = (double)w.rows * (double)w.cols / (double)(w.held > 0 ? w.held : 1);
    return w.dtype == MACKO_F16 ? 20 : w.dtype == MACKO_BF16 ? 2 + 0.3 * columns_an_entry : 3 + 0.67 * columns_an_entry;
}

/*
 * sell: up to how many tokens run from the packed stream; more go through dense rows and the library's GEMM. In units of
 * the time of the dense product, with h bytes held a byte of dense: a pass of 8 tokens takes 0.25 + 2.1 h (its start, and
 * the reads of x from shared memory), 4 h where x fits for two tokens only; dense rows take 2.5 + 2.6 h, but 2 + 0.4 h
 * where they stay in L2. Measured on an H200, at density 0.5 / 0.3 / 0.1: a pass 53 / 36 / 19 us, dense rows 135 / 116 /
 * 103, one dense product 35 (8192 x 8192); 17 / 13 / 9, 30 / 26 / 27, 13 (4096 x 4096).
 */
static inline int64_t macko_stream_tokens(macko_path_weight w) {
    const double dense = (double)w.rows * w.cols * 2, h = (double)w.held / (dense > 0 ? dense : 1);
    const double pass = w.cols <= 24576 ? 0.25 + 2.1 * h : 0.01 + 4 * h;
    const double passes = (dense <= 32 << 20 ? 2 + 0.4 * h : 2.5 + 2.6 * h) / pass;
    return 8 * (passes < 1 ? 1 : passes > 8 ? 8 : (int64_t)passes);
}

enum {
    MACKO_BITMAP_FEW_TOKENS = 4, /* multiplied with x as it is; above, turning x pays (Zen 4, all dtypes, both paths) */
    MACKO_TILE_MMA_TOKENS = 512, /* without wgmma more go through dense rows */
    MACKO_FEW_SLAB = 22 << 10,   /* bytes of a slab of which four fit an SM with 64 tokens (few_kernel.cuh) */
};

/*
 * tile and its codecs with wgmma: up to how many tokens the kernel for few multiplies; at most 64, in parts
 * 32, as it has no registers for them. Above 32 each block of it reads more of x than of the weight, and the other one
 * shares x among the rows of two or three row blocks and two blocks.
 * 64 tokens, few / many, us (H200, tile at density 0.5): 4096 x 4096 10.1 / 10.9, 4096 x 11008 19.8 / 19.3 (alone 20.8 /
 * 21.8), 11008 x 4096 21.9 / 19.7, 8192 x 8192 26.8 / 25.9, 28672 x 8192 107 / 85. With three stages of denser slabs
 * it waits for memory: at density 0.7 4096 x 4096 12.7 / 11.4, 4096 x 11008 29.9 / 22.6 (350e7c5, 111a810). dense12,
 * always with three: 12.0 / 11.7, 28.2 / 20.6, 29.8 / 21.0, 40.0 / 28.9, 143 / 93. Not so sparse11, whose kernel for many
 * takes longer to decode.
 */
static inline int64_t macko_few_tokens(macko_path_weight w) {
    const bool waits =
        w.layout == MACKO_LAYOUT_DENSE12 ? w.cols > 4096 : w.layout == MACKO_LAYOUT_TILE && w.held > MACKO_FEW_SLAB;
    return !w.in_parts && w.rows <= 4096 && !waits ? 64 : 32;
}

static inline macko_path macko_path_of(macko_path_weight w, int64_t tokens, macko_path_device d) {
    switch (w.layout) {
    case MACKO_LAYOUT_CANONICAL:
        if (tokens == 1 || (!d.is_gpu && tokens <= macko_single_tokens(w))) return MACKO_PATH_SPMV;
        return MACKO_PATH_DENSE_ROWS;
    case MACKO_LAYOUT_BITMAP:
        if (tokens <= MACKO_BITMAP_FEW_TOKENS) return MACKO_PATH_SPMV;
        return d.has_vectors && w.cols ? MACKO_PATH_SPMM : MACKO_PATH_DENSE_ROWS;
    case MACKO_LAYOUT_SELL:
        if (tokens == 1) return MACKO_PATH_SPMV;
        return tokens <= (d.has_limit ? d.limit : macko_stream_tokens(w)) ? MACKO_PATH_SPMM : MACKO_PATH_DENSE_ROWS;
    case MACKO_LAYOUT_TILE:
        if (!d.is_gpu || !w.cols || (d.has_limit && tokens > d.limit)) return MACKO_PATH_DENSE_ROWS;
        if (d.has_wgmma && w.rows && tokens > macko_few_tokens(w) && tokens <= INT32_MAX) return MACKO_PATH_MANY;
        return d.has_limit || tokens <= MACKO_TILE_MMA_TOKENS ? MACKO_PATH_FEW : MACKO_PATH_DENSE_ROWS;
    case MACKO_LAYOUT_DENSE12:
    case MACKO_LAYOUT_SPARSE11:
    case MACKO_LAYOUT_DENSE8:
    case MACKO_LAYOUT_SPARSE8:
        if (!d.has_wgmma || !w.cols || tokens > (d.has_limit ? d.limit : INT32_MAX)) return MACKO_PATH_DENSE_ROWS;
        return tokens <= macko_few_tokens(w) || !w.rows ? MACKO_PATH_FEW : MACKO_PATH_MANY;
    case MACKO_LAYOUT_EC: return tokens == 1 ? MACKO_PATH_SPMV : MACKO_PATH_DENSE_ROWS;
    default: return MACKO_PATH_DENSE_ROWS; /* a layout that has one way only need not ask */
    }
}

#endif
