/*
 * What stands around the products of a mixture's experts: which rows of x an expert multiplies, and the sum of what a
 * token's experts give. A launch each, whatever the routing is; no host looks at it.
 *
 *     pair       a token and one of its top_k experts, number token * top_k + slot
 *     place      of a pair: its row in what linear_experts gives, where pairs are sorted by expert, and by number
 *     ends[e]    the first place behind those of expert e
 */
#pragma once

#include <stdbool.h>

#include "../core/types.h"

MACKO_C_BEGIN

/* ids [pairs], int64 or int32. One of another process, below 0 or from `experts` on, comes last, and its place is -1. */
typedef struct macko_expert_order {
    const void *ids;
    int id_bytes;
    int64_t pairs, experts;
    int32_t *order;  /* [pairs] the pair at each place */
    int32_t *places; /* [pairs] */
    int32_t *ends;   /* [experts] */
} macko_expert_order;

/* y [tokens, cols] = for each token the sum over slots, from the first, of x[place] * weight; a place that x has no row for
 * adds nothing. Products are rounded to the type that torch would give them: float32 where weights are, else x's type, which
 * is the weights' too. Their sum is kept in fp32. */
typedef struct macko_expert_sum {
    macko_dtype dtype, weights_dtype;  /* of x and y; of weights */
    int64_t tokens, top_k, cols, rows; /* rows: of x */
    const void *x;
    const int32_t *places; /* [tokens, top_k] */
    const void *weights;   /* [tokens, top_k] */
    bool early;            /* places and weights were there before the kernel that comes before this one began */
    void *y;
} macko_expert_sum;

void macko_expert_order_cpu(const macko_expert_order *p);
/* Tokens [begin, end). */
void macko_expert_sum_cpu(const macko_expert_sum *p, int64_t begin, int64_t end);

#ifdef MACKO_HAVE_CUDA
/* cudaErrorInvalidValue: more experts than shared memory counts, some 6,000. */
cudaError_t macko_expert_order_cuda(const macko_expert_order *p, cudaStream_t stream);
cudaError_t macko_expert_sum_cuda(const macko_expert_sum *p, cudaStream_t stream);
/* y [count, cols] = row order[i] / top_k of x, 16 bits an element; cols is a multiple of 8, all begin at one of 16 bytes. */
cudaError_t macko_expert_rows_cuda(const int32_t *order, int64_t count, int64_t top_k, const void *x, int64_t x_rows,
                                   int64_t cols, void *y, cudaStream_t stream);
#endif

MACKO_C_END
