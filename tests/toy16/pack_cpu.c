/* The toy16 layout from dense rows, its dense rows, and its check. */
#include "../../slab/places_cpu.h"
#include "toy16.h"

enum { PLACES = MACKO_SLAB_ROWS * MACKO_SLAB_COLS };

/* Where the nth element of a slab is in the matrix. */
static origin place_of_nth(const macko_toy16_matrix *m, int64_t slab, int n) {
    return place_of(tile_slice_origin(slab_origin(m->cols, slab), n / TILE_SLICE_PLACES), n % TILE_SLICE_PLACES);
}

void macko_toy16_write_cpu(const macko_toy16_matrix *m, const uint16_t *w, uint8_t *data) {
    for (int64_t i = 0; i < macko_slab_count(m->rows, m->cols) * PLACES; i++) {
        const origin at = place_of_nth(m, i / PLACES, (int)(i % PLACES));
        const uint16_t value = at.row < m->rows && at.col < m->cols ? w[at.row * m->cols + at.col] : 0;
        memcpy(data + i * 2, &value, 2);
    }
}

void macko_toy16_unpack_cpu(const macko_toy16_matrix *m, int64_t first, int64_t count, uint16_t *w) {
    for (int64_t i = 0; i < macko_slab_count(m->rows, m->cols) * PLACES; i++) {
        const origin at = place_of_nth(m, i / PLACES, (int)(i % PLACES));
        if (at.row >= first && at.row < first + count && at.col < m->cols)
            memcpy(&w[(at.row - first) * m->cols + at.col], m->data + i * 2, 2);
    }
}

macko_fault macko_toy16_check_cpu(const macko_toy16_matrix *m) {
    const int64_t across = macko_slabs_across(m->cols);
    for (int64_t i = 0; i < macko_slab_count(m->rows, m->cols) * PLACES; i++) {
        const origin at = place_of_nth(m, i / PLACES, (int)(i % PLACES));
        if ((at.row >= m->rows || at.col >= m->cols) && (m->data[2 * i] || m->data[2 * i + 1]))
            return (macko_fault){MACKO_TOY16_OUTSIDE, i / PLACES / across, i / PLACES, i % PLACES};
    }
    return (macko_fault){0, 0, -1, 0};
}
