/*
 * The toy16 layout: a dense matrix in 16 bits an element, for tests/test_new_layout.py: the smallest codec of slabs there is,
 * and an example of one. A slab is u16 [tile][slice][step][lane][i] (csrc/slab/slab.h); outside of the matrix it is 0.
 */
#ifndef MACKO_TOY16_H
#define MACKO_TOY16_H

#include "../../slab/slab.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MACKO_TOY16_STEP_BYTES = MACKO_SLAB_LANES * 8 * 2,
    MACKO_TOY16_SLAB_BYTES = MACKO_SLAB_ROWS * MACKO_SLAB_COLS * 2,
};

typedef struct macko_toy16_matrix {
    const uint8_t *data; /* [MACKO_TOY16_SLAB_BYTES * slabs] */
    int64_t rows, cols;
    macko_dtype dtype;
} macko_toy16_matrix;

void macko_toy16_write_cpu(const macko_toy16_matrix *m, const uint16_t *w, uint8_t *data);
void macko_toy16_unpack_cpu(const macko_toy16_matrix *m, int64_t first, int64_t count, uint16_t *w);

/* macko_fault.kind: an element outside of the matrix is not 0; found: which of the slab. */
enum { MACKO_TOY16_OUTSIDE = 1 };
macko_fault macko_toy16_check_cpu(const macko_toy16_matrix *m);

#ifdef MACKO_SLAB_CUDA
cudaError_t macko_toy16_write_cuda(const macko_toy16_matrix *m, const void *w, uint8_t *data, cudaStream_t stream);
#endif

#ifdef __cplusplus
}
#endif

#endif
