/*
 * How the kernel of experts (experts_kernel.cuh) takes a stack of matrices in slabs: one matrix of
 * [experts * row_blocks * 64, cols], of which the row blocks of expert e follow those of e - 1. By sizes alone, so that a
 * CUDA graph holds for any routing: pure functions, without CUDA.
 */
#pragma once

#include "many_plan.h"
#include "ring_plan.h"

enum {
    MACKO_EXPERTS_LEAST_TOKENS = 16, /* of a tile of tokens: one kind of sums for all sizes, so bits are the same */
    /* Mean tokens of an expert up to which packed weights are multiplied without wgmma; then dense rows, by the library's
     * grouped product. */
    MACKO_EXPERTS_PACKED = 96,
    /* Shared memory of a block from which on an SM has two (9.0 to 11.x), and what it keeps of each besides. */
    MACKO_EXPERTS_FOR_TWO = 200 << 10,
    MACKO_EXPERTS_KEPT = 1 << 10,
    MACKO_EXPERTS_MANY_TOKENS = 256, /* of an item of that kernel, at most */
    MACKO_EXPERTS_MANY_ROW_BLOCKS = 2,
};

typedef struct macko_experts_problem {
    int64_t experts, row_blocks; /* row blocks of an expert */
    int64_t tokens;              /* rows of x, of all experts */
    int widest;                  /* units of the largest slab */
    int sms, shared_bytes;
} macko_experts_problem;

typedef struct macko_experts_plan {
    int tile; /* tokens of an item: 16, 32 or 64 */
    int blocks;
    int stages, x_at, stage_bytes, shared_bytes; /* stages 0: see macko_experts_plan_of_zeros */
} macko_experts_plan;

/* Whether the kernel for many tokens can take a stack of slabs of up to `widest` units. */
static inline bool macko_experts_many_fits(int64_t tokens, int64_t experts, int64_t rows, int64_t cols, int widest,
                                           int shared_bytes) {
    macko_slab_many_stages stages;
    const macko_slab_many_shape shape = {MACKO_EXPERTS_MANY_TOKENS, MACKO_EXPERTS_MANY_ROW_BLOCKS, 1};
    const int64_t items = (tokens / MACKO_EXPERTS_MANY_TOKENS + experts) * macko_slab_row_blocks(rows);
    return rows % 8 == 0 && cols % 8 == 0 && tokens <= INT32_MAX - MACKO_EXPERTS_MANY_TOKENS &&
           items <= INT32_MAX / 2 && macko_slab_many_fit_stages(shape, widest, shared_bytes, &stages);
}

/* And whether it is the faster one (H100, 2026-11-27: shapes of Qwen3-30B, GLM-4.5-Air and Mixtral, 1 to 2048 tokens). This
 * one keeps up with memory for some tokens of long rows in 12 bits; shorter slabs it decodes too slowly, and in short rows it
 * waits at the end of each. Where there are not enough items for two rounds, almost, the other leaves SMs idle, which short
 * slabs are worth (8 experts of 1536 x 2048 in sparse11: 16.8 us for 18.2; of 2048 x 768 in dense12: 11.7 for 10.4). */
static inline bool macko_experts_are_many(const macko_experts_problem *p, int64_t cols) {
    enum { SHORT_SLAB = MACKO_SLAB_ROWS * MACKO_SLAB_COLS * 11 / 8 / MACKO_SLAB_UNIT, SHORT_ROW = 4 };
    const int64_t row_tile = (int64_t)MACKO_EXPERTS_MANY_ROW_BLOCKS * MACKO_SLAB_CLUSTER_BLOCKS,
                  touched = p->tokens < p->experts ? p->tokens : p->experts,
                  items = touched * ((p->row_blocks + row_tile - 1) / row_tile);
    return p->tokens >= 8 * p->experts || (p->widest <= SHORT_SLAB && 10 * items >= 3 * p->sms) ||
           (macko_slabs_across(cols) <= SHORT_ROW && 10 * items >= 9 * p->sms);
}

/* Shared memory besides stages: sums that meet, of each expert two numbers, of each warp one. */
MACKO_FN int64_t macko_experts_besides(int64_t experts) {
    return 3 * 2 * MACKO_RING_SUMS_BYTES + (2 * (experts + 1) + MACKO_RING_WARPS) * 4;
}

/* The plan of a launch that writes nothing but the zeros of rows that are no expert's. */
MACKO_FN macko_experts_plan macko_experts_plan_of_zeros(const macko_experts_problem *p) {
    const macko_experts_plan plan = {
        .tile = MACKO_EXPERTS_LEAST_TOKENS, .blocks = p->sms, .shared_bytes = (int)macko_experts_besides(p->experts)};
    return plan;
}

/* false: two stages do not fit into shared memory. */
MACKO_FN bool macko_experts_plan_of(const macko_experts_problem *p, macko_experts_plan *plan) {
    /* A tile holds what most experts have: half as many again as their mean, of which there are no more than tokens. */
    int64_t wanted = (p->tokens * 3 + 2 * p->experts - 1) / (2 * p->experts);
    if (wanted > p->tokens) wanted = p->tokens;
    int tile = MACKO_EXPERTS_LEAST_TOKENS;
    while (tile < wanted && tile < MACKO_RING_MOST_TOKENS) tile *= 2;
    int64_t items, blocks;
    for (;; tile /= 2) {
        const int64_t besides = macko_experts_besides(p->experts);
        plan->tile = tile;
        plan->x_at = p->widest * MACKO_SLAB_UNIT;
        plan->stage_bytes = plan->x_at + tile * MACKO_SLAB_COLS * 2;
        const int64_t touched = p->tokens < p->experts ? p->tokens : p->experts,
                      fit_two = ((p->shared_bytes - MACKO_EXPERTS_KEPT) / 2 - besides) / plan->stage_bytes;
        items = (touched + p->tokens / tile) * p->row_blocks; /* at most */
        /* A block that is left alone on its SM takes longer than one that has all of it, so two are for one round, or many
         * (8 experts of 2816 x 4096, 352 items, H100: 62 us for 53 to 57). */
        const bool two = tile == MACKO_EXPERTS_LEAST_TOKENS && p->shared_bytes >= MACKO_EXPERTS_FOR_TWO &&
                         fit_two >= 3 && (items <= 2 * (int64_t)p->sms || items >= 8 * (int64_t)p->sms);
        const int64_t fit = two ? fit_two : (p->shared_bytes - besides) / plan->stage_bytes;
        blocks = two ? 2 * (int64_t)p->sms : p->sms;
        plan->stages = fit < MACKO_RING_MOST_STAGES ? (int)fit : (int)MACKO_RING_MOST_STAGES;
        plan->shared_bytes = (int)(plan->stages * plan->stage_bytes + besides);
        if (plan->stages >= 2) break;
        if (tile == MACKO_EXPERTS_LEAST_TOKENS) return false;
    }
    plan->blocks = (int)(items < blocks ? items : blocks);
    return true;
}
