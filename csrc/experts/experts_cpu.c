/* The order of pairs by expert, and the weighted sum: experts.h says what they give. */
#include "experts.h"

#include "../core/cpu.h"

static int64_t expert_of(const macko_expert_order *p, int64_t pair) {
    const int64_t id = p->id_bytes == 8 ? ((const int64_t *)p->ids)[pair] : ((const int32_t *)p->ids)[pair];
    return id < 0 || id > p->experts ? p->experts : id;
}

void macko_expert_order_cpu(const macko_expert_order *p) {
    for (int64_t e = 0; e < p->experts; e++) p->ends[e] = 0;
    for (int64_t pair = 0; pair < p->pairs; pair++)
        if (expert_of(p, pair) < p->experts) p->ends[expert_of(p, pair)]++;
    int32_t others = 0; /* where the next pair of no expert goes */
    for (int64_t e = 0; e < p->experts; e++) {
        const int32_t count = p->ends[e];
        p->ends[e] = others; /* where the next pair of this one goes, its end once all are there */
        others += count;
    }
    for (int64_t pair = 0; pair < p->pairs; pair++) {
        const int64_t expert = expert_of(p, pair);
        const int32_t place = expert < p->experts ? p->ends[expert]++ : others++;
        p->order[place] = (int32_t)pair;
        p->places[pair] = expert < p->experts ? place : -1;
    }
}

void macko_expert_sum_cpu(const macko_expert_sum *p, int64_t begin, int64_t end) {
    const macko_dtype product = p->weights_dtype;
    for (int64_t token = begin; token < end; token++)
        for (int64_t col = 0; col < p->cols; col++) {
            float sum = 0;
            for (int64_t pair = token * p->top_k; pair < (token + 1) * p->top_k; pair++) {
                const int32_t place = p->places[pair];
                if (place < 0 || place >= p->rows) continue;
                float term = macko_load(p->x, p->dtype, place * p->cols + col) * macko_load(p->weights, product, pair);
                if (product != MACKO_F32) macko_store(&term, product, 0, term), term = macko_load(&term, product, 0);
                sum += term;
            }
            macko_store(p->y, p->dtype, token * p->cols + col, sum);
        }
}
