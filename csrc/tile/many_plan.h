/*
 * How to multiply many tokens: which shape of block, and which output tiles are split (schedule.h). Pure functions of
 * sizes, without CUDA; tests/test_tile.py calls them on the host.
 */
#ifndef MACKO_TILE_MANY_PLAN_H
#define MACKO_TILE_MANY_PLAN_H

#include "schedule.h"

#ifdef __cplusplus
extern "C" {
#define TILE_SHAPE_FN constexpr inline
#else
#define TILE_SHAPE_FN static inline
#endif

/* The shapes that are compiled: tokens, row blocks, split_k. */
#define TILE_MANY_SHAPES(X) X(256, 2, 1) X(256, 2, 2) X(192, 2, 1) X(192, 2, 2) X(128, 2, 2) X(128, 3, 2)
enum { TILE_MANY_NUM_SHAPES = 6 };

/* Shared memory of a block: barriers, the stages of the tokens' pipeline, and those of the slabs', a slab of each row
 * block a stage. */
enum {
    TILE_MANY_BARRIER_BYTES = 1024, /* the swizzle wants the tokens at multiples of this */
    TILE_MANY_MIN_SLAB_STAGES = 2,
    TILE_MANY_MAX_SLAB_STAGES = 4,
    TILE_WARPGROUP = 128, /* threads */
};
/* A stage of the tokens: those of a tile's columns. */
TILE_SHAPE_FN int tile_x_stage_bytes(tile_many_shape shape) {
    return shape.tokens * TILE_COLS * 2;
}
TILE_SHAPE_FN int tile_max_x_stages(tile_many_shape shape) {
    return shape.tokens > 192 ? 4 : shape.tokens > 128 ? 5 : 8;
}
/* A warpgroup waits for one of so many stages at least: had it missed more than a round, it would take one phase of a
 * barrier for another. */
TILE_SHAPE_FN int tile_min_x_stages(tile_many_shape shape) {
    return shape.row_blocks;
}
/* fp32 sums of a warpgroup, of the tokens that its block stores. */
TILE_SHAPE_FN int tile_partial_bytes(tile_many_shape shape) {
    return TILE_ROWS * (shape.tokens / shape.split_k) * 4;
}

typedef struct tile_many_stages {
    int x, slabs;
    int slab_bytes; /* kept for a slab */
} tile_many_stages;
/* How many stages a block of a device has room for, with slabs of up to `widest` units; false where it is too few. */
bool macko_tile_many_stages(tile_many_shape shape, int widest, int shared_bytes, tile_many_stages *stages);
TILE_SHAPE_FN int tile_many_shared_bytes(tile_many_shape shape, tile_many_stages stages) {
    return TILE_MANY_BARRIER_BYTES + stages.x * tile_x_stage_bytes(shape) +
           stages.slabs * shape.row_blocks * stages.slab_bytes;
}

typedef struct tile_many_problem {
    int64_t rows, cols, tokens;
    int clusters[TILE_MANY_NUM_SHAPES]; /* of each shape that the device runs at once; 0 where the shape does not fit */
} tile_many_problem;

enum { TILE_SPLIT_NONE, TILE_SPLIT_SOME, TILE_SPLIT_EVENLY /* all output tiles, each alike */ };
/* One way to do it, for tests and benchmarks: a shape, its rows instead of row blocks, and which tiles are split. */
typedef struct tile_many_way {
    int rows, tokens, split_k, split;
} tile_many_way;
/* From text like 128x256x1x2; false where it is none. */
bool macko_tile_many_way(const char *text, tile_many_way *way);

struct tile_many_plan {
    /* Of device memory, with any content: flags [share][2][row block], uint64, then partial sums [share][2][row block]
     * of tile_partial_bytes. -1 where macko_tile_few_cuda multiplies. */
    int64_t workspace_bytes;
    tile_many_shape shape;
    tile_schedule schedule;
};
typedef struct tile_many_plan tile_many_plan;
/* The fastest plan, or the one that goes this way if `way` is not NULL. False where there is none; rows, cols, tokens >
 * 0. */
bool macko_tile_many_plan(const tile_many_problem *problem, const tile_many_way *way, tile_many_plan *plan);

TILE_FN int64_t tile_many_flag_bytes(tile_many_shape shape, int shares) {
    return (shares * TILE_CLUSTER_BLOCKS * shape.row_blocks * 8 + 127) / 128 * 128;
}
/* What a plan depends on besides the numbers of tiles: whether L2 does not hold the tokens beside the rest. */
TILE_FN bool tile_tokens_exceed_l2(int64_t tokens, int64_t cols) {
    return tokens * cols > 6 << 20;
}

#ifdef __cplusplus
}
#endif

#endif
