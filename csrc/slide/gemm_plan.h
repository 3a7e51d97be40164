/*
 * Which output tile the GEMM of sm_90a takes, and how the last wave of tiles is shared: plain C, so that a host without a GPU
 * can ask (tests/test_slide.py).
 *
 *     clusters of large tiles, of 66        | wave 0 | wave 1 | wave 2 | 26 tiles are left: 52 halves |
 *     down, 4096 tokens: 14 x 16 tiles      |  1.00  |  1.00  |  1.00  |      0.60 by tokens, 0.72 by rows      |
 */
#ifndef MACKO_SLIDE_GEMM_PLAN_H
#define MACKO_SLIDE_GEMM_PLAN_H

#include <stdint.h>

/* Of a tile in the last wave: half of its rows, which one warpgroup of each block does; or half of its tokens. */
enum { MACKO_SLIDE_ROW_HALVES, MACKO_SLIDE_TOKEN_HALVES };

typedef struct macko_slide_plan {
    int tile_rows, tile_tokens; /* of a block; blocks of 128 rows run in pairs */
    int halves;                 /* what tiles after `whole` are cut into */
    int64_t tiles, whole;       /* of a cluster */
} macko_slide_plan;

/*
 * How many tiles are done whole by so many clusters at once. Where the last wave would occupy at most half of the clusters,
 * its tiles are cut into halves: float8 at 4096 tokens, by rows, 96.8 -> 88.6 us for o, 475 -> 432 us for down (3.4 rounds;
 * H200, under load).
 */
static inline int64_t macko_slide_whole_tiles(int64_t tiles, int64_t clusters, int tile_rows) {
    return tile_rows > 64 && tiles % clusters * 2 <= clusters ? tiles / clusters * clusters : tiles;
}

/*
 * How tiles of so many tokens are cut: half of 256 tokens keeps both warpgroups of a block at work, of fewer it would be a
 * product that reads as much of the weights for less.
 */
static inline int macko_slide_halves_of(int tile_tokens) {
    return tile_tokens == 256 ? MACKO_SLIDE_TOKEN_HALVES : MACKO_SLIDE_ROW_HALVES;
}

/*
 * Up to 64 tokens the weights' bytes are the time: the smallest tile that holds all tokens. Above, the least time by what a
 * wave of tiles takes, in per cent of the largest ones' (H200, 2026-11-21: of 88 cases, four linears, float8, dense and 2:4,
 * 72 to 1024 tokens, the best tile is taken in all but one to 2.5 %).
 */
static inline macko_slide_plan macko_slide_plan_of(int64_t rows, int64_t tokens, int64_t k_tiles, int is_sparse,
                                                   int num_sms) {
    /* By kind (dense, sparse): time of a whole wave; `last` of small tiles, which run two an SM, the least time, of large ones
       the time of a last wave of halves. That of 256 tokens is derived: half the tokens are a wave of 128x128. By rows it
       was measured as 66 and 72. */
    static const struct {
        int rows, tokens, round[2], last[2];
    } sizes[] = {{64, 64, {23, 27}, {39, 46}},
                 {128, 128, {54, 60}, {42, 46}},
                 {128, 192, {78, 80}, {52, 66}},
                 {128, 256, {100, 100}, {54, 60}}};
    macko_slide_plan best = {64, tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64, MACKO_SLIDE_ROW_HALVES, 0, 0};
    if (tokens <= 64) {
        best.tiles = best.whole = (rows + 63) / 64;
        return best;
    }
    int64_t least = INT64_MAX;
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const int cluster = sizes[i].rows / 64, tile_rows = sizes[i].rows * cluster; /* large tiles run in pairs */
        const int64_t tiles = (rows + tile_rows - 1) / tile_rows * ((tokens + sizes[i].tokens - 1) / sizes[i].tokens);
        const int64_t clusters = num_sms / cluster, whole = macko_slide_whole_tiles(tiles, clusters, sizes[i].rows);
        int64_t time = (whole + clusters - 1) / clusters * sizes[i].round[is_sparse];
        if (cluster == 1 && time < sizes[i].last[is_sparse]) time = sizes[i].last[is_sparse];
        if (whole < tiles) time += sizes[i].last[is_sparse];
        /* A single wave that leaves SMs idle has fewer weights in flight. */
        const int64_t idle = num_sms - (2 * tiles - whole) * cluster;
        time = time * k_tiles + (idle > 0 ? 5 * idle : 0);
        if (time >= least) continue;
        least = time;
        const macko_slide_plan found = {sizes[i].rows, sizes[i].tokens, macko_slide_halves_of(sizes[i].tokens), tiles,
                                        whole};
        best = found;
    }
    return best;
}

#endif
