/* What the codecs have in common on the CPU: where in a matrix elements are, and small helpers. */
#ifndef MACKO_SLAB_PLACES_CPU_H
#define MACKO_SLAB_PLACES_CPU_H

#include <string.h>

#include "slab.h"

enum {
    SLICE_ROWS = MACKO_SLAB_ROWS / MACKO_SLAB_SLICES,
    STEP_ELEMENTS = 8, /* of a lane */
    STEPS = MACKO_SLAB_TILE_COLS / 16,
    /* A place of a part, which is a slice of a tile: step << STEP_BITS | lane << LANE_BITS | i. */
    LANE_BITS = 3,
    STEP_BITS = 8,
    PART_PLACES = STEPS << STEP_BITS,
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

/* Where the first element of a slab, or of a part, is in the matrix. */
typedef struct origin {
    int64_t row, col;
} origin;
static inline origin slab_origin(int64_t cols, int64_t slab) {
    const int64_t slabs = macko_slabs_across(cols);
    return (origin){slab / slabs * MACKO_SLAB_ROWS, slab % slabs * MACKO_SLAB_COLS};
}
static inline origin part_origin(origin slab, int part) {
    return (origin){slab.row + part % MACKO_SLAB_SLICES * SLICE_ROWS,
                    slab.col + part / MACKO_SLAB_SLICES * MACKO_SLAB_TILE_COLS};
}

static inline origin place_of(origin part, int place) {
    const int step = place >> STEP_BITS, lane = place >> LANE_BITS & (MACKO_SLAB_LANES - 1), i = place & 7;
    return (origin){part.row + macko_slab_row(lane, i % MACKO_SLAB_QUAD),
                    part.col + macko_slab_col(lane, 2 * step + i / MACKO_SLAB_QUAD, i % MACKO_SLAB_QUAD)};
}

static inline int table_byte(const uint32_t table[2], int code) {
    return table[code / 4] >> 8 * (code % 4) & 255;
}

#endif
