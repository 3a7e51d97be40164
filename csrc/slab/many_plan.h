/*
 * How to multiply many tokens: which shape of block, and which output tiles are split (schedule.h). Pure functions of
 * sizes, without CUDA; tests/kernels/test_tile.py calls them on the host.
 */
#pragma once

#include "schedule.h"

MACKO_C_BEGIN

/* The shapes that are compiled: tokens, row blocks, split_k. Not of every codec (`takes`, codec.cuh). */
#define MACKO_SLAB_MANY_SHAPES(X)                                                                                      \
    X(320, 2, 1)                                                                                                       \
    X(320, 2, 2)                                                                                                       \
    X(256, 2, 1)                                                                                                       \
    X(256, 2, 2)                                                                                                       \
    X(192, 2, 1)                                                                                                       \
    X(192, 2, 2)                                                                                                       \
    X(192, 3, 1) X(192, 3, 2) X(160, 2, 2) X(128, 2, 2) X(128, 3, 2) X(64, 2, 2) X(64, 3, 2) X(192, 2, 4) X(128, 2, 4)
enum {
    MACKO_SLAB_MANY_NUM_SHAPES = 15,
    MACKO_SLAB_MANY_TOKENS_UNIT = 32, /* those of every shape are a multiple */
};

/* Shared memory of a block: barriers, the stages of the tokens' pipeline, and those of the slabs', a slab of each row
 * block a stage. */
enum {
    MACKO_SLAB_MANY_BARRIER_BYTES = 1024, /* the swizzle wants the tokens at multiples of this */
    MACKO_SLAB_MANY_MIN_SLAB_STAGES = 2,
    MACKO_SLAB_MANY_MAX_SLAB_STAGES = 4,
    MACKO_SLAB_WARPGROUP = 128, /* threads */
};
/* A stage of the tokens: those of a tile's columns. */
MACKO_SLAB_SHAPE_FN int macko_slab_x_stage_bytes(macko_slab_many_shape shape) {
    return shape.tokens * MACKO_SLAB_TILE_COLS * 2;
}
MACKO_SLAB_SHAPE_FN int macko_slab_max_x_stages(macko_slab_many_shape shape) {
    return shape.tokens > 192 ? 4 : shape.tokens > 128 ? 5 : 8;
}
/* A warpgroup waits for one of so many stages at least: had it missed more than a round, it would take one phase of a
 * barrier for another. */
MACKO_SLAB_SHAPE_FN int macko_slab_min_x_stages(macko_slab_many_shape shape) {
    return shape.split_k > 2 ? 2 * shape.row_blocks : shape.row_blocks; /* four blocks' sums take two each */
}
/* Whether a thread has registers for operand A of two tiles, beside its sums and all that is read of a tile. */
MACKO_SLAB_SHAPE_FN bool macko_slab_reads_ahead(macko_slab_many_shape shape) {
    return shape.row_blocks > 2 ? shape.tokens == 128 : shape.tokens <= 192;
}
/* Whether it has fewer than most codecs want to load ahead. */
MACKO_SLAB_SHAPE_FN bool macko_slab_few_registers(macko_slab_many_shape shape) {
    return shape.row_blocks > 2 && shape.tokens > 128;
}
/* fp32 sums of a warpgroup, of the tokens that its block stores. */
MACKO_SLAB_SHAPE_FN int macko_slab_partial_bytes(macko_slab_many_shape shape) {
    return MACKO_SLAB_ROWS * (shape.tokens / shape.split_k) * 4;
}

typedef struct macko_slab_many_stages {
    int x, slabs;
    int slab_bytes; /* kept for a slab */
} macko_slab_many_stages;
/* How many stages fit a block of a device, with slabs of up to `widest` units; false where it is too few. */
bool macko_slab_many_fit_stages(macko_slab_many_shape shape, int widest, int shared_bytes,
                                macko_slab_many_stages *stages);
MACKO_SLAB_SHAPE_FN int macko_slab_many_shared_bytes(macko_slab_many_shape shape, macko_slab_many_stages stages) {
    return MACKO_SLAB_MANY_BARRIER_BYTES + stages.x * macko_slab_x_stage_bytes(shape) +
           stages.slabs * shape.row_blocks * stages.slab_bytes;
}

typedef struct macko_slab_many_problem {
    int64_t rows, cols, tokens;
    int clusters
        [MACKO_SLAB_MANY_NUM_SHAPES]; /* of each shape that the device runs at once; 0 where the shape does not fit */
    bool reads_ahead;                 /* the codec does, where macko_slab_reads_ahead */
} macko_slab_many_problem;

enum {
    MACKO_SLAB_SPLIT_NONE,
    MACKO_SLAB_SPLIT_SOME,
    MACKO_SLAB_SPLIT_EVENLY, /* each split tile alike */
    MACKO_SLAB_SPLIT_ENDS,   /* all but the ends of split tiles by a cluster each, several ends by one */
};
/* One way to do it, the knob tile_gemm: a shape, its rows instead of row blocks, and which tiles are split. */
typedef struct macko_slab_many_way {
    int rows, tokens, split_k, split;
} macko_slab_many_way;

typedef struct macko_slab_many_plan {
    /* Of device memory, with any content: flags [share][2][row block], uint64, then partial sums [share][2][row block]
     * of macko_slab_partial_bytes. */
    int64_t workspace_bytes;
    macko_slab_many_shape shape;
    macko_slab_schedule schedule;
} macko_slab_many_plan;
/* The plan that should be fastest under load, or the one that goes this way if `way` is not NULL. False where there is
 * none; rows, cols, tokens > 0. */
bool macko_slab_many_choose(const macko_slab_many_problem *problem, const macko_slab_many_way *way,
                            macko_slab_many_plan *plan);

MACKO_FN int64_t macko_slab_many_flag_bytes(macko_slab_many_shape shape, int shares) {
    return (shares * macko_slab_cluster_blocks(shape) * shape.row_blocks * 8 + 127) / 128 * 128;
}

MACKO_C_END
