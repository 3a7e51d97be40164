/* The dense8 layout from codes, its dense rows, and its checks: the order of dense8.h. */
#include <math.h>

#include "../../core/cpu.h"
#include "../../slab/places_cpu.h"
#include "dense8.h"

/* Byte of the slab where a place (places_cpu.h) of a tile_slice is. */
static inline int byte_at(int tile_slice, int place) {
    const int step = place >> STEP_BITS, lane = place >> LANE_BITS & (MACKO_SLAB_LANES - 1);
    return tile_slice * MACKO_DENSE8_SLICE_BYTES + (step / 2 * MACKO_SLAB_LANES + lane) * MACKO_DENSE8_CHUNK +
           step % 2 * STEP_ELEMENTS + place % STEP_ELEMENTS;
}

void macko_dense8_write_cpu(const macko_dense8_matrix *m, const uint8_t *w, uint8_t *data) {
    for (int64_t slab = 0; slab < macko_slab_count(m->rows, m->cols); slab++)
        for (int tile_slice = 0; tile_slice < MACKO_SLAB_TILE_SLICES; tile_slice++) {
            const origin here = tile_slice_origin(slab_origin(m->cols, slab), tile_slice);
            for (int place = 0; place < TILE_SLICE_PLACES; place++) {
                const origin at = place_of(here, place);
                const bool inside = at.row < m->rows && at.col < m->cols;
                const uint8_t code = inside ? w[at.row * m->cols + at.col] : 0;
                data[slab * MACKO_DENSE8_SLAB_BYTES + byte_at(tile_slice, place)] =
                    macko_byte_stored(m->kind, m->dtype, macko_byte_is_zero(m->kind, code) ? 0 : code);
            }
        }
}

void macko_dense8_unpack_cpu(const macko_dense8_matrix *m, int64_t first, int64_t count, uint16_t *w) {
    const int64_t slabs = macko_slabs_across(m->cols), stop = first + count;
    if (!count) return;
    for (int64_t slab = first / MACKO_SLAB_ROWS * slabs; slab < macko_slab_row_blocks(stop) * slabs; slab++)
        for (int tile_slice = 0; tile_slice < MACKO_SLAB_TILE_SLICES; tile_slice++) {
            const origin here = tile_slice_origin(slab_origin(m->cols, slab), tile_slice);
            if (here.row >= stop || here.row + SLICE_ROWS <= first) continue;
            for (int place = 0; place < TILE_SLICE_PLACES; place++) {
                const origin at = place_of(here, place);
                if (at.row < first || at.row >= stop || at.col >= m->cols) continue;
                const uint8_t stored = m->data[slab * MACKO_DENSE8_SLAB_BYTES + byte_at(tile_slice, place)];
                macko_store(w, m->dtype, (at.row - first) * m->cols + at.col,
                            macko_byte_value(m->kind, macko_byte_code(m->kind, m->dtype, stored)) * m->scales[at.row]);
            }
        }
}

int64_t macko_bad_scale_cpu(const float *scales, int64_t rows) {
    for (int64_t row = 0; row < rows; row++)
        if (!(scales[row] > 0 && scales[row] < MACKO_BYTE_LARGEST_SCALE)) return row;
    return -1;
}

macko_fault macko_dense8_check_cpu(const macko_dense8_matrix *m) {
    const int64_t slabs = macko_slabs_across(m->cols), row = macko_bad_scale_cpu(m->scales, m->rows);
    if (row >= 0) return (macko_fault){MACKO_DENSE8_SCALE, row / MACKO_SLAB_ROWS, -1, row};
    for (int64_t slab = 0; slab < macko_slab_count(m->rows, m->cols); slab++)
        for (int tile_slice = 0; tile_slice < MACKO_SLAB_TILE_SLICES; tile_slice++) {
            const origin here = tile_slice_origin(slab_origin(m->cols, slab), tile_slice);
            for (int place = 0; place < TILE_SLICE_PLACES; place++) {
                const int byte = byte_at(tile_slice, place);
                const origin at = place_of(here, place);
                const uint8_t code = macko_byte_code(m->kind, m->dtype, m->data[slab * MACKO_DENSE8_SLAB_BYTES + byte]);
                const bool outside = at.row >= m->rows || at.col >= m->cols;
                if (outside ? code : !macko_byte_is_valid(m->kind, code))
                    return (macko_fault){outside ? MACKO_DENSE8_OUTSIDE : MACKO_DENSE8_CODE, slab / slabs, slab, byte};
            }
        }
    return (macko_fault){MACKO_DENSE8_OK, 0, -1, 0};
}
