/*
 * Streams of bytes in columns, on the CPU: what sparse11 and sparse8 have in common, and its only specification.
 *
 *   column       of lane l: its byte k is byte k % 4 of word l of row k / 4 of the slice's values, rows of 128 bytes
 *   head, tail   a lane's stream of tiles 0 and 1, which begins with the lane's own column; that of tiles 2 and 3, which
 *                comes after the head in a column, this lane's or another's
 *   spill        lanes by the length of their tail, the longest first, are given the columns by the length of their head,
 *                the shortest first; of equal ones that of the lower lane first. A slice has as many rows as its longest
 *                column takes
 *   starts       four bytes of a lane in a slice: the byte of the column where the tail begins; 4 * the lane whose column it
 *                is; values of the stream in tile 0; and in tile 2
 */
#pragma once

#include "places_cpu.h"

enum {
    HALF_TILES = MACKO_SLAB_TILES / 2,
    HALF_MOST = HALF_TILES * STEPS * STEP_ELEMENTS, /* values of half a stream */
    STEP_PLACES = MACKO_SLAB_LANES * STEP_ELEMENTS,
};

typedef struct slice_plan {
    uint8_t starts[MACKO_SLAB_LANES][4];
    uint8_t heads[MACKO_SLAB_LANES], tails[MACKO_SLAB_LANES]; /* lengths */
    uint8_t lengths[MACKO_SLAB_LANES];                        /* of columns */
    int rows;
} slice_plan;

/* Of a slice whose lanes have so many values in each tile. */
static inline slice_plan plan_columns(int counts[MACKO_SLAB_TILES][MACKO_SLAB_LANES]) {
    slice_plan plan = {.rows = 0};
    int heads[MACKO_SLAB_LANES], missing[MACKO_SLAB_LANES]; /* from the tail */
    uint8_t columns[MACKO_SLAB_LANES], lanes[MACKO_SLAB_LANES];
    for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) {
        heads[lane] = counts[0][lane] + counts[1][lane];
        missing[lane] = HALF_MOST - counts[2][lane] - counts[3][lane];
        plan.starts[lane][2] = (uint8_t)counts[0][lane];
        plan.starts[lane][3] = (uint8_t)counts[2][lane];
        plan.heads[lane] = (uint8_t)heads[lane];
        plan.tails[lane] = (uint8_t)(counts[2][lane] + counts[3][lane]);
    }
    sort_lanes(heads, HALF_MOST, columns);
    sort_lanes(missing, HALF_MOST, lanes);
    for (int i = 0; i < MACKO_SLAB_LANES; i++) {
        const int column = columns[i], lane = lanes[i], length = heads[column] + plan.tails[lane];
        plan.starts[lane][0] = (uint8_t)heads[column];
        plan.starts[lane][1] = (uint8_t)(column * 4);
        plan.lengths[column] = (uint8_t)length;
        if (length > plan.rows * 4) plan.rows = (length + 3) / 4;
    }
    return plan;
}

/* The place of the nth element of a lane's stream in a tile. */
static inline int nth_place(int lane, int n) {
    return n / STEP_ELEMENTS * STEP_PLACES + lane * STEP_ELEMENTS + macko_slab_nth_element(n % STEP_ELEMENTS);
}

/* The first byte of a slab's starts, of all slices, that is not what the plans say, or -1. */
static inline int bad_start(const uint8_t *starts, const slice_plan plans[MACKO_SLAB_SLICES]) {
    for (int i = 0; i < MACKO_SLAB_SLICES * MACKO_SLAB_LANES * 4; i++)
        if (starts[i] != plans[i / (MACKO_SLAB_LANES * 4)].starts[i / 4 % MACKO_SLAB_LANES][i % 4]) return i;
    return -1;
}

/* Byte of the slice's values where byte k of a column is. */
static inline int column_at(int column, int k) {
    return k / 4 * MACKO_SLAB_COLUMNS_ROW_BYTES + column * 4 + k % 4;
}

/* Byte of the slice's values where the kth value of a lane's head (half 0) or tail (half 1) is. */
static inline int value_at(const uint8_t starts[4], int lane, int half, int k) {
    return half ? column_at(starts[1] / 4, starts[0] + k) : column_at(lane, k);
}

/* Which value of its half a tile's first one is. */
static inline int first_in_half(const uint8_t starts[4], int tile) {
    return tile % HALF_TILES ? starts[2 + tile / HALF_TILES] : 0;
}
