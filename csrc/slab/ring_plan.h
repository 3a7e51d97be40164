/*
 * How the kernel of rings (ring_kernel.cuh) shares a matrix among blocks, by sizes alone: pure functions, without CUDA;
 * tests/kernels/test_ring.py calls them on the host.
 */
#pragma once

#include <stdbool.h>

#include "slab.h"

enum {
    MACKO_RING_WARPS = 16,       /* of a block, one block an SM */
    MACKO_RING_MOST_TOKENS = 64, /* of a block */
    MACKO_RING_MOST_STAGES = 4,  /* of a ring: more fill more slowly, and are no faster (H100, 4096 x 4096: 15.8 us with
                                     seven, 14.1 with four) */
    MACKO_RING_SUMS_BYTES = 2048, /* sums of a group of four warps: 64 rows, eight tokens */
};

typedef struct macko_ring_problem {
    int64_t row_blocks, slabs; /* of a row block */
    int64_t tokens;
    int widest; /* units of the largest slab */
    int sms, shared_bytes;
    bool prefers_pairs; /* of the codec, where either fits */
} macko_ring_problem;

/* In the order in which they are tried. */
typedef enum macko_ring_kind {
    MACKO_RING_PAIRS,    /* two rings, of eight warps that take two tiles each */
    MACKO_RING_TWO_ROWS, /* eight warps that take two tiles each of two row blocks, which share a stage's tokens */
    MACKO_RING_WIDE,     /* one ring of sixteen warps that take a tile each */
    MACKO_RING_HALVES, /* the same, but a stage has no tokens: groups of four warps fetch them, 32 columns of their tile
                            at a time */
} macko_ring_kind;

/* What a block does, and where its shared memory goes: rings, halves of x, sums. */
typedef struct macko_ring_shape {
    macko_ring_kind kind;
    int tokens; /* of a block, filled up: 8, 16, 32 or 64 */
    int stages; /* of a ring */
    int x_at, stage_bytes, shared_bytes;
} macko_ring_shape;

/* Which slabs a block has, of those of all row blocks, or twos of them, in their order. */
typedef struct macko_ring_shares {
    int slabs; /* of a row block */
    int blocks;
    int ways; /* blocks of a row block, of which the last one adds the sums up; 0: slabs are dealt out evenly */
    int give; /* slabs of each of those but the last */
    int64_t all_slabs;
} macko_ring_shares;

/* The first slab of a block; of the block after the last one their number. */
MACKO_FN int64_t macko_ring_share_at(const macko_ring_shares *s, int block) {
    if (s->ways) return (int64_t)(block / s->ways) * s->slabs + (int64_t)(block % s->ways) * s->give;
    return block * s->all_slabs / s->blocks;
}

/*
 * Up to how many tokens this kernel is taken, by blocks of 64: more go through dense rows and the library's product; 0: it
 * is not there. 512 by count, which gives 420 to 600 for an A100 and a 3090, and more for a 4090, 5090 and L40S
 * (docs/kernels.md). GPUs of 9 and 10 feed mma.sync at half of their tensor cores' rate: on an H100 128 tokens take 1.6
 * times F.linear's time by this kernel, and 512 take twice F.linear's by dense rows.
 */
MACKO_FN int64_t macko_ring_tokens_of(int major) {
    return major < 8 ? 0 : major == 9 || major == 10 ? 192 : 512;
}

MACKO_FN int macko_ring_tokens(int64_t tokens) {
    return tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : MACKO_RING_MOST_TOKENS;
}

MACKO_FN int64_t macko_ring_token_blocks(int64_t tokens) {
    return (tokens + MACKO_RING_MOST_TOKENS - 1) / MACKO_RING_MOST_TOKENS;
}

/* Of a stage. */
MACKO_FN int macko_ring_row_blocks(macko_ring_kind kind) {
    return kind == MACKO_RING_TWO_ROWS ? 2 : 1;
}

/* How many blocks there may be of each block of tokens. */
MACKO_FN int64_t macko_ring_most_blocks(const macko_ring_problem *p) {
    const int64_t blocks = p->sms / macko_ring_token_blocks(p->tokens);
    return blocks ? blocks : 1;
}

/*
 * Of a ring. Speed of F.linear on an H100 (2026-11-28). Pairs for up to 16 tokens have a third stage where each block has
 * slabs enough to make up for filling it: 16 tokens of tile, 8192 x 8192, 1.51 for 1.43; 4096 x 4096, eight slabs a block,
 * 1.47 for 1.51. Sixteen warps for 16 tokens fill three of large slabs sooner than four: dense12, five shapes, 1.315 for
 * 1.306; slabs of 16 KB were not measured.
 */
MACKO_FN int macko_ring_most_stages(const macko_ring_problem *p, const macko_ring_shape *shape) {
    if (shape->kind == MACKO_RING_HALVES) return 2;
    if (shape->kind == MACKO_RING_PAIRS)
        return shape->tokens <= 16 && p->row_blocks * p->slabs >= 16 * macko_ring_most_blocks(p) ? 3 : 2;
    return shape->tokens == 16 && shape->x_at >= 20 * 1024 ? 3 : MACKO_RING_MOST_STAGES;
}

/* Fits a shape into shared memory; false where it does not. */
MACKO_FN bool macko_ring_fits(const macko_ring_problem *p, macko_ring_shape *shape) {
    const bool x_in_halves = shape->kind == MACKO_RING_HALVES;
    const int rings = shape->kind == MACKO_RING_PAIRS ? 2 : 1, row_blocks = macko_ring_row_blocks(shape->kind),
              groups = 4 / row_blocks;
    const int at_once = shape->tokens < 16 ? 1 : 2; /* eights of tokens whose sums meet at once */
    const int x_bytes = shape->tokens * MACKO_SLAB_COLS * 2;
    /* One unit of a matrix without slabs, which has no stages. */
    shape->x_at = row_blocks * (p->widest ? p->widest : 1) * MACKO_SLAB_UNIT;
    shape->stage_bytes = shape->x_at + (x_in_halves ? 0 : x_bytes);
    /* Reads go on for MACKO_SLAB_OVERREAD bytes after a slab: into the next one, its tokens, or the halves. */
    const int besides = (groups - 1) * row_blocks * at_once * MACKO_RING_SUMS_BYTES + (x_in_halves ? x_bytes : 0);
    const int64_t fit = (p->shared_bytes - besides) / shape->stage_bytes / rings;
    const int most = macko_ring_most_stages(p, shape);
    shape->stages = fit < most ? (int)fit : most;
    shape->shared_bytes = rings * shape->stages * shape->stage_bytes + besides;
    return shape->stages >= 2;
}

/*
 * Whether two row blocks share their tokens, where pairs do not fit: 28672 x 8192 of tile by 64 tokens took 141 us for 174
 * (H100). With few stages a block, waiting for the others' sums takes more than it brings: 4096 x 4096, 21 us for 17.
 */
MACKO_FN bool macko_ring_two_rows_pay(const macko_ring_problem *p) {
    const int64_t stages = (p->row_blocks + 1) / 2 * p->slabs;
    return p->tokens > 32 && stages >= 8 * macko_ring_most_blocks(p);
}

/*
 * The shape for so many tokens. false: no two stages fit (slabs of over 27 KB in 99 KB, from 33 tokens on), and products go
 * by dense rows. Up to 64 tokens, those that fill the same shape have the same bits, however many there are; above, blocks
 * of 64 tokens share the SMs, and bits depend on how many blocks there are.
 */
MACKO_FN bool macko_ring_shape_of(const macko_ring_problem *p, macko_ring_shape *shape) {
    const macko_ring_shape tried = {.tokens = macko_ring_tokens(p->tokens)};
    *shape = tried;
    for (int kind = p->prefers_pairs ? MACKO_RING_PAIRS : MACKO_RING_WIDE; kind <= MACKO_RING_HALVES; kind++) {
        shape->kind = (macko_ring_kind)kind;
        if (kind == MACKO_RING_TWO_ROWS && !macko_ring_two_rows_pay(p)) continue;
        if (kind == MACKO_RING_HALVES && shape->tokens < 16)
            break; /* not compiled: more tokens fit where these do not */
        if (macko_ring_fits(p, shape)) return true;
    }
    return false;
}

/* The shares of each block of tokens. */
MACKO_FN macko_ring_shares macko_ring_shares_of(const macko_ring_problem *p, const macko_ring_shape *shape) {
    const int together = macko_ring_row_blocks(shape->kind);
    const int64_t row_blocks = (p->row_blocks + together - 1) / together, all = row_blocks * p->slabs;
    int64_t blocks = macko_ring_most_blocks(p), ways;
    /* As many blocks a row block as there are, where that leaves few SMs idle; the last has some slabs more, so that it
     * finds the sums of the others there (4096 x 4096, 8 tokens: 14.7 us evenly, 13.0 with two ways; H100). */
    ways = blocks / row_blocks;
    if (ways > p->slabs) ways = p->slabs;
    if (ways * row_blocks * 5 < blocks * 4) ways = 0;
    const int extra = shape->kind == MACKO_RING_PAIRS ? 4 : 2;
    int64_t give = ways > 1 ? (p->slabs - extra) / ways : p->slabs;
    if (give < 1) give = 1;
    if (ways) blocks = ways * row_blocks;
    if (blocks > all) blocks = all;
    const macko_ring_shares shares = {(int)p->slabs, (int)blocks, (int)ways, (int)give, all};
    return shares;
}

/* Of the row blocks of a stage. */
MACKO_FN int macko_ring_sums_bytes(const macko_ring_shape *shape) {
    return macko_ring_row_blocks(shape->kind) * shape->tokens * MACKO_SLAB_ROWS * 4;
}

/* Device memory for any shape, with any content: of each block sums, and a flag. */
MACKO_FN int64_t macko_ring_workspace_bytes(int64_t tokens, int sms) {
    const int64_t token_blocks = macko_ring_token_blocks(tokens), blocks = sms > token_blocks ? sms : token_blocks;
    const macko_ring_shape largest = {.kind = tokens > 32 ? MACKO_RING_TWO_ROWS : MACKO_RING_WIDE,
                                      .tokens = macko_ring_tokens(tokens)};
    return blocks * (macko_ring_sums_bytes(&largest) + 8);
}
