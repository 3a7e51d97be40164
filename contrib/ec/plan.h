/*
 * What the packers of CPU and CUDA must do alike, bit by bit, so that their bytes are identical: bit sets of rows, the
 * choice of a pair's common columns, the filling of lanes, the order of blocks. Included by pack_cpu.c and pack_cuda.cu.
 */
#pragma once

#include "ec.h"

#ifdef __CUDACC__
#define MACKO_EC_FN __host__ __device__ static inline
#else
#define MACKO_EC_FN static inline
#endif

MACKO_EC_FN int macko_ec_ctz(uint64_t word) {
#ifdef __CUDA_ARCH__
    return __ffsll((long long)word) - 1;
#else
    return __builtin_ctzll(word);
#endif
}

/* Walks the columns of a & b (or of a alone, b NULL) in words [word, end). */
typedef struct macko_ec_walk {
    const uint64_t *a, *b;
    int64_t word, end;
    uint64_t left;
} macko_ec_walk;

MACKO_EC_FN macko_ec_walk macko_ec_walk_from(const uint64_t *a, const uint64_t *b, int64_t word, int64_t end) {
    const macko_ec_walk walk = {a, b, word - 1, end, 0};
    return walk;
}

/* The next column, or -1. */
MACKO_EC_FN int32_t macko_ec_next(macko_ec_walk *walk) {
    while (!walk->left) {
        if (++walk->word >= walk->end) return -1;
        walk->left = walk->a[walk->word] & (walk->b ? walk->b[walk->word] : ~(uint64_t)0);
    }
    const int bit = macko_ec_ctz(walk->left);
    walk->left &= walk->left - 1;
    return (int32_t)(walk->word * 64 + bit);
}

/* Slots of the histogram that macko_ec_shared_width needs. */
MACKO_EC_FN int64_t macko_ec_histogram_slots(int64_t words) {
    return words * 64 / MACKO_EC_CHUNK + 2;
}

/*
 * The largest width w = 32 t, t a multiple of 4, for which the walk's columns hold 32 runs of t columns with no distance
 * above delta_max; at most max_width, 0 below min_width. Runs come from the segments between longer distances: a segment
 * of s columns gives s / t of them. fits[i] counts those of t = 4 i.
 */
MACKO_EC_FN int32_t macko_ec_shared_width(macko_ec_walk walk, int32_t delta_max, int32_t min_width, int32_t max_width,
                                          int32_t *fits) {
    int32_t limit = (int32_t)((walk.end - walk.word - 1) * 64 / MACKO_EC_CHUNK);
    if (limit > max_width / MACKO_EC_CHUNK) limit = max_width / MACKO_EC_CHUNK;
    for (int32_t i = 0; i <= limit; i++) fits[i] = 0;
    int32_t previous = -1, segment = 0;
    for (;;) {
        const int32_t col = macko_ec_next(&walk);
        if (segment && (col < 0 || col - previous > delta_max)) {
            for (int32_t i = 1; i <= limit && i * MACKO_EC_VECTOR <= segment; i++)
                fits[i] += segment / (i * MACKO_EC_VECTOR);
            segment = 0;
        }
        if (col < 0) break;
        segment++;
        previous = col;
    }
    while (limit > 0 && fits[limit] < MACKO_EC_WARP) limit--;
    return limit * MACKO_EC_CHUNK < min_width ? 0 : limit * MACKO_EC_CHUNK;
}

/* Writes the first `width` columns that such runs take. */
MACKO_EC_FN void macko_ec_take(macko_ec_walk walk, int32_t delta_max, int32_t width, int32_t *columns) {
    const int32_t run = width / MACKO_EC_WARP;
    int32_t taken = 0, in_run = 0, previous = -1;
    while (taken < width) {
        const int32_t col = macko_ec_next(&walk);
        if (in_run && col - previous > delta_max) taken -= in_run, in_run = 0;
        columns[taken++] = previous = col;
        if (++in_run == run) in_run = 0;
    }
}

MACKO_EC_FN void macko_ec_clear(uint64_t *bits, const int32_t *columns, int32_t width) {
    for (int32_t i = 0; i < width; i++) bits[columns[i] >> 6] &= ~((uint64_t)1 << (columns[i] & 63));
}

/* Where the entries of one single row go: lanes [lane, lane + lanes) of a block, t columns each. */
typedef struct macko_ec_sink {
    const void *w; /* the row of the dense matrix */
    const void *col_order;
    int64_t cols;
    void *values, *bases; /* of the block */
    uint32_t *deltas;     /* of the block, which begins at a 4-byte boundary */
    int32_t lane, vector, delta_bits;
    int32_t value_bytes;
} macko_ec_sink;

MACKO_EC_FN void macko_ec_put_value(const macko_ec_sink *s, int64_t index, int32_t col) {
    const int64_t from = macko_ec_column(s->col_order, s->cols, col);
    if (s->value_bytes == 2)
        ((uint16_t *)s->values)[index] = ((const uint16_t *)s->w)[from];
    else
        ((uint32_t *)s->values)[index] = ((const uint32_t *)s->w)[from];
}

MACKO_EC_FN void macko_ec_put_zero(const macko_ec_sink *s, int64_t index) {
    if (s->value_bytes == 2)
        ((uint16_t *)s->values)[index] = 0;
    else
        ((uint32_t *)s->values)[index] = 0;
}

MACKO_EC_FN void macko_ec_put_base(const macko_ec_sink *s, int32_t lane, int32_t col) {
    if (s->cols <= 65536)
        ((uint16_t *)s->bases)[lane] = (uint16_t)col;
    else
        ((uint32_t *)s->bases)[lane] = (uint32_t)col;
}

MACKO_EC_FN void macko_ec_or(uint32_t *word, uint32_t bits) {
#ifdef __CUDA_ARCH__
    atomicOr(word, bits); /* the rows of a block are written by different threads */
#else
    *word |= bits;
#endif
}

MACKO_EC_FN void macko_ec_put_delta(uint32_t *deltas, int32_t delta_bits, int64_t n, uint32_t delta) {
    const int64_t bit = n * delta_bits;
    if (!delta) return;
    macko_ec_or(&deltas[bit >> 5], delta << (bit & 31));
    if ((bit & 31) + delta_bits > 32) macko_ec_or(&deltas[(bit >> 5) + 1], delta >> (32 - (bit & 31)));
}

/* Number of column c of a lane in its block; vector is MACKO_EC_VECTOR or 1. */
MACKO_EC_FN int64_t macko_ec_number(int32_t lane, int64_t c, int32_t vector) {
    return vector == 1 ? c * MACKO_EC_WARP + lane
                       : (c / MACKO_EC_VECTOR * MACKO_EC_WARP + lane) * MACKO_EC_VECTOR + c % MACKO_EC_VECTOR;
}

MACKO_EC_FN void macko_ec_put(const macko_ec_sink *s, int32_t piece_lane, int32_t c, int32_t col, int32_t delta,
                              int is_value) {
    const int32_t lane = s->lane + piece_lane;
    const int64_t n = macko_ec_number(lane, c, s->vector);
    if (c == 0) macko_ec_put_base(s, lane, col);
    macko_ec_put_delta(s->deltas, s->delta_bits, n, (uint32_t)delta);
    if (is_value)
        macko_ec_put_value(s, n, col);
    else
        macko_ec_put_zero(s, n);
}

/* What filling lanes came to. */
typedef struct macko_ec_filled {
    int32_t entries;  /* columns used, explicit zeros included; at most lanes * t */
    int32_t nonzeros; /* of the walk, that found a place */
    int32_t more;     /* whether the walk had another one */
} macko_ec_filled;

/*
 * Fills lanes of t columns with the walk's columns, explicit zeros where a distance inside a lane is above delta_max.
 * A lane may begin anywhere. sink NULL: only counts. Else the rest of the lanes repeats the last column.
 */
MACKO_EC_FN macko_ec_filled macko_ec_fill(macko_ec_walk walk, int32_t skip, int32_t lanes, int32_t t, int32_t delta_max,
                                          const macko_ec_sink *sink) {
    macko_ec_filled filled = {0, 0, 0};
    int32_t lane = 0, c = 0, previous = 0; /* the place of the next entry, and the column before it */
    while (skip-- > 0) previous = macko_ec_next(&walk);
    for (;;) {
        const int32_t col = macko_ec_next(&walk);
        if (col < 0) break;
        while (c && col - previous > delta_max) {
            previous += delta_max;
            if (sink) macko_ec_put(sink, lane, c, previous, delta_max, 0);
            if (++c == t) c = 0, lane++;
        }
        if (lane == lanes) {
            filled.more = 1;
            break;
        }
        if (sink) macko_ec_put(sink, lane, c, col, c ? col - previous : 0, 1);
        filled.nonzeros++;
        previous = col;
        if (++c == t) c = 0, lane++;
    }
    filled.entries = lane * t + c;
    for (; sink && lane < lanes; lane++, c = 0)
        for (; c < t; c++) macko_ec_put(sink, lane, c, previous, 0, 0);
    return filled;
}

/* Entries of the walk as one endless lane: what it needs at most. */
MACKO_EC_FN int32_t macko_ec_entries(macko_ec_walk walk, int32_t delta_max) {
    int32_t entries = 0, previous = -1, col;
    while ((col = macko_ec_next(&walk)) >= 0) {
        entries += entries ? 1 + (col - previous - 1) / delta_max : 1;
        previous = col;
    }
    return entries;
}

/* The paper's two parts of a single row. */
typedef struct macko_ec_parts {
    int32_t width[2]; /* columns a lane of the long part, a multiple of 4, and of the short one */
    int32_t skip;     /* non-zeros in the long part */
} macko_ec_parts;

/*
 * The long part is the largest that the row fills to the last entry, the short one the smallest for what is left. A rest
 * that would need 4 columns a lane goes to the long part, padded: as many bytes, but for a second set of bases.
 */
MACKO_EC_FN macko_ec_parts macko_ec_split_row(macko_ec_walk walk, int32_t delta_max) {
    macko_ec_parts parts = {{0, 0}, 0};
    macko_ec_filled filled = {0, 0, 1};
    int32_t t = macko_ec_entries(walk, delta_max) / MACKO_EC_CHUNK * MACKO_EC_VECTOR;
    for (; t > 0; t -= MACKO_EC_VECTOR) {
        filled = macko_ec_fill(walk, 0, MACKO_EC_WARP, t, delta_max, 0);
        if (filled.entries == MACKO_EC_WARP * t) break;
    }
    parts.width[0] = t;
    parts.skip = t > 0 ? filled.nonzeros : 0;
    if (t > 0 && !filled.more) return parts;
    macko_ec_filled rest = {0, 0, 1};
    while (rest.more) rest = macko_ec_fill(walk, parts.skip, MACKO_EC_WARP, ++parts.width[1], delta_max, 0);
    if (!rest.nonzeros) parts.width[1] = 0;
    if (parts.width[1] == MACKO_EC_VECTOR &&
        !macko_ec_fill(walk, 0, MACKO_EC_WARP, t + MACKO_EC_VECTOR, delta_max, 0).more) {
        parts.width[0] += MACKO_EC_VECTOR;
        parts.width[1] = 0;
    }
    return parts;
}

/*
 * The order in which n blocks sorted by falling size are stored: place i takes the (i)th number below n of the sequence
 * that counts with its bits reversed. Any stretch of places then holds large and small alike, so that a kernel can give
 * each warp a stretch of equal length, found without a search.
 */
MACKO_EC_FN uint32_t macko_ec_reverse(uint32_t v, int bits) {
    uint32_t reversed = 0;
    for (int i = 0; i < bits; i++) reversed |= (v >> i & 1) << (bits - 1 - i);
    return reversed;
}

MACKO_EC_FN int macko_ec_log2_up(uint32_t n) {
    int bits = 0;
    while (((uint32_t)1 << bits) < n) bits++;
    return bits;
}

MACKO_EC_FN int macko_ec_height_set(int32_t height) {
    return height == 16 ? 0 : height == 8 ? 1 : height == 4 ? 2 : 3;
}
