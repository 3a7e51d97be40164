/*
 * The toy16 layout: a dense matrix in 16 bits an element, for tests/test_new_layout.py: the smallest codec of slabs there is,
 * and an example of one. A slab is u16 [tile][slice][step][lane][i] (csrc/slab/slab.h); outside of the matrix it is 0.
 */
#pragma once

#include "../../slab/slab.h"

MACKO_C_BEGIN

enum {
    MACKO_TOY16_STEP_BYTES = MACKO_SLAB_LANES * 8 * 2,
    MACKO_TOY16_SLAB_BYTES = MACKO_SLAB_ROWS * MACKO_SLAB_COLS * 2,
};

typedef struct macko_toy16_matrix {
    const uint8_t *data; /* [MACKO_TOY16_SLAB_BYTES * slabs] */
    int64_t rows, cols;
    macko_dtype dtype;
} macko_toy16_matrix;

MACKO_SLAB_CODEC(toy16, uint16_t)

/* macko_fault.kind: an element outside of the matrix is not 0; found: which of the slab. */
enum { MACKO_TOY16_OUTSIDE = 1 };

MACKO_C_END
