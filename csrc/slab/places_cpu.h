/* What the codecs have in common on the CPU: where in a matrix elements are, and small helpers. */
#pragma once

#include <string.h>

#include "slab.h"

enum {
    SLICE_ROWS = MACKO_SLAB_ROWS / MACKO_SLAB_SLICES,
    STEP_ELEMENTS = 8, /* of a lane */
    STEPS = MACKO_SLAB_STEPS,
    /* A place of a tile_slice, which is a slice of a tile: step << STEP_BITS | lane << LANE_BITS | i. */
    LANE_BITS = 3,
    STEP_BITS = 8,
    TILE_SLICE_PLACES = STEPS << STEP_BITS,
};

static inline uint32_t load_32(const uint8_t *p) {
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static inline void store_32(uint8_t *p, uint32_t value) {
    memcpy(p, &value, sizeof value);
}

static inline int64_t min_int64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Where the first element of a slab, or of a tile_slice, is in the matrix. */
typedef struct origin {
    int64_t row, col;
} origin;
static inline origin slab_origin(int64_t cols, int64_t slab) {
    const int64_t slabs = macko_slabs_across(cols);
    return (origin){slab / slabs * MACKO_SLAB_ROWS, slab % slabs * MACKO_SLAB_COLS};
}
static inline origin tile_slice_origin(origin slab, int tile_slice) {
    return (origin){slab.row + tile_slice % MACKO_SLAB_SLICES * SLICE_ROWS,
                    slab.col + tile_slice / MACKO_SLAB_SLICES * MACKO_SLAB_TILE_COLS};
}

static inline origin place_of(origin tile_slice, int place) {
    const int step = place >> STEP_BITS, lane = place >> LANE_BITS & (MACKO_SLAB_LANES - 1), i = place & 7;
    return (origin){tile_slice.row + macko_slab_row(lane, i % MACKO_SLAB_QUAD),
                    tile_slice.col + macko_slab_col(lane, 2 * step + i / MACKO_SLAB_QUAD, i % MACKO_SLAB_QUAD)};
}

static inline int table_byte(const uint32_t table[2], int code) {
    return table[code / 4] >> 8 * (code % 4) & 255;
}

/* The code of which a table's byte is out of order: it is not 0 at first, then rising, then 0, and below `highs`; or -1. */
static inline int bad_code(const uint32_t table[2], int highs) {
    for (int code = 0; code < MACKO_SLAB_TABLE; code++) {
        const int high = table_byte(table, code), before = code ? table_byte(table, code - 1) : 0;
        if (high >= highs || (code ? high && (high <= before || (code > 1 && !before)) : high)) return code;
    }
    return -1;
}

/* Where slabs of `fewest` to `most` units do not lie one after another (kind), the largest has not `widest` units (kind + 1),
 * or they do not end with all `units` (kind + 2). */
static inline macko_fault check_offsets(const int32_t *offsets, int64_t rows, int64_t cols, int fewest, int most,
                                        int64_t widest, int64_t units, int kind) {
    const int64_t count = macko_slab_count(rows, cols), across = macko_slabs_across(cols);
    int64_t largest = 0;
    if (offsets[0]) return (macko_fault){kind, 0, 0, offsets[0]};
    for (int64_t slab = 0; slab < count; slab++) {
        const int64_t here = (int64_t)offsets[slab + 1] - offsets[slab];
        if (here < fewest || here > most) return (macko_fault){kind, slab / across, slab + 1, offsets[slab + 1]};
        if (here > largest) largest = here;
    }
    if (largest != widest) return (macko_fault){kind + 1, 0, -1, largest};
    if (offsets[count] != units) return (macko_fault){kind + 2, 0, count, offsets[count]};
    return (macko_fault){0, 0, -1, 0};
}

/* Lanes by length, which is at most `most`, the shortest first, of equal ones the lower lane first. */
static inline void sort_lanes(const int lengths[MACKO_SLAB_LANES], int most, uint8_t sorted[MACKO_SLAB_LANES]) {
    int places[66] = {0};
    for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) places[lengths[lane] + 1]++;
    for (int length = 0; length < most; length++) places[length + 1] += places[length];
    for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) sorted[places[lengths[lane]]++] = (uint8_t)lane;
}
