/* The sparse8 layout from codes, its dense rows, and its checks: the order of sparse8.h. */
#include "../../core/cpu.h"
#include "../../slab/columns_cpu.h"
#include "../dense8/dense8.h"
#include "sparse8.h"

enum { LANE_VALUES = STEPS * STEP_ELEMENTS };

/* The masks of a slice of a slab, by tile and lane. */
typedef uint32_t slice_masks[MACKO_SLAB_TILES][MACKO_SLAB_LANES];

static inline int mask_at(int tile, int slice, int lane) {
    return tile * MACKO_SLAB_MASK_BYTES + (slice * MACKO_SLAB_LANES + lane) * 4;
}

/* Of the nth element of a lane's stream in a tile the bit of the mask, and where it is in the matrix. */
static inline int nth_bit(int n) {
    return macko_sparse8_bit(n / STEP_ELEMENTS, macko_slab_nth_element(n % STEP_ELEMENTS));
}
static inline origin nth_element(origin tile_slice, int lane, int n) {
    return place_of(tile_slice, nth_place(lane, n));
}

static slice_plan plan_slice(slice_masks masks) {
    int counts[MACKO_SLAB_TILES][MACKO_SLAB_LANES];
    for (int tile = 0; tile < MACKO_SLAB_TILES; tile++)
        for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) counts[tile][lane] = __builtin_popcount(masks[tile][lane]);
    return plan_columns(counts);
}

static void find_masks(const macko_sparse8_matrix *m, const uint8_t *w, origin slab, int slice, slice_masks masks) {
    for (int tile = 0; tile < MACKO_SLAB_TILES; tile++) {
        const origin tile_slice = tile_slice_origin(slab, tile * MACKO_SLAB_SLICES + slice);
        for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) {
            masks[tile][lane] = 0;
            for (int n = 0; n < LANE_VALUES; n++) {
                const origin at = nth_element(tile_slice, lane, n);
                if (at.row < m->rows && at.col < m->cols && !macko_byte_is_zero(m->kind, w[at.row * m->cols + at.col]))
                    masks[tile][lane] |= 1u << nth_bit(n);
            }
        }
    }
}

static void load_masks(const uint8_t *slab, int slice, slice_masks masks) {
    for (int tile = 0; tile < MACKO_SLAB_TILES; tile++)
        for (int lane = 0; lane < MACKO_SLAB_LANES; lane++)
            masks[tile][lane] = load_32(slab + mask_at(tile, slice, lane));
}

void macko_sparse8_count_cpu(const macko_sparse8_matrix *m, const uint8_t *w, int32_t *offsets,
                             macko_slab_totals *totals) {
    for (int64_t slab = 0; slab < macko_slab_count(m->rows, m->cols); slab++) {
        int value_rows = 0;
        for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++) {
            slice_masks masks;
            find_masks(m, w, slab_origin(m->cols, slab), slice, masks);
            const slice_plan plan = plan_slice(masks);
            value_rows += plan.rows;
            for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) totals->stored += plan.lengths[lane];
        }
        offsets[slab + 1] = macko_sparse8_units(value_rows);
    }
}

void macko_sparse8_write_cpu(const macko_sparse8_matrix *m, const uint8_t *w, uint8_t *data) {
    for (int64_t slab = 0; slab < macko_slab_count(m->rows, m->cols); slab++) {
        uint8_t *const begin = data + (int64_t)m->offsets[slab] * MACKO_SLAB_UNIT;
        const origin from = slab_origin(m->cols, slab);
        uint32_t values_at = MACKO_SPARSE8_VALUES_AT;
        memset(begin, 0, (size_t)(m->offsets[slab + 1] - m->offsets[slab]) * MACKO_SLAB_UNIT);
        for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++) {
            slice_masks masks;
            find_masks(m, w, from, slice, masks);
            const slice_plan plan = plan_slice(masks);
            store_32(begin + MACKO_SPARSE8_SLICES_AT + slice * 4, values_at);
            memcpy(begin + MACKO_SPARSE8_STARTS_AT + slice * sizeof plan.starts, plan.starts, sizeof plan.starts);
            for (int tile = 0; tile < MACKO_SLAB_TILES; tile++) {
                const origin tile_slice = tile_slice_origin(from, tile * MACKO_SLAB_SLICES + slice);
                for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) {
                    int k = first_in_half(plan.starts[lane], tile);
                    store_32(begin + mask_at(tile, slice, lane), masks[tile][lane]);
                    for (int n = 0; n < LANE_VALUES; n++) {
                        if (!(masks[tile][lane] >> nth_bit(n) & 1)) continue;
                        const origin at = nth_element(tile_slice, lane, n);
                        begin[values_at + (uint32_t)value_at(plan.starts[lane], lane, tile / HALF_TILES, k++)] =
                            macko_byte_stored(m->kind, m->dtype, w[at.row * m->cols + at.col]);
                    }
                }
            }
            values_at += (uint32_t)plan.rows * MACKO_SPARSE8_ROW_BYTES;
        }
    }
}

void macko_sparse8_unpack_cpu(const macko_sparse8_matrix *m, int64_t first, int64_t count, uint16_t *w) {
    const int64_t slabs = macko_slabs_across(m->cols), stop = first + count;
    memset(w, 0, (size_t)(count * m->cols * 2));
    if (!count) return;
    for (int64_t slab = first / MACKO_SLAB_ROWS * slabs; slab < macko_slab_row_blocks(stop) * slabs; slab++) {
        const uint8_t *const begin = m->data + (int64_t)m->offsets[slab] * MACKO_SLAB_UNIT;
        for (int tile_slice = 0; tile_slice < MACKO_SLAB_TILE_SLICES; tile_slice++) {
            const int slice = tile_slice % MACKO_SLAB_SLICES, tile = tile_slice / MACKO_SLAB_SLICES;
            const origin here = tile_slice_origin(slab_origin(m->cols, slab), tile_slice);
            const uint8_t *const values = begin + load_32(begin + MACKO_SPARSE8_SLICES_AT + slice * 4);
            if (here.row >= stop || here.row + SLICE_ROWS <= first) continue;
            for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) {
                const uint8_t *const starts = begin + MACKO_SPARSE8_STARTS_AT + (slice * MACKO_SLAB_LANES + lane) * 4;
                const uint32_t mask = load_32(begin + mask_at(tile, slice, lane));
                int k = first_in_half(starts, tile);
                for (int n = 0; n < LANE_VALUES; n++) {
                    if (!(mask >> nth_bit(n) & 1)) continue;
                    const uint8_t stored = values[value_at(starts, lane, tile / HALF_TILES, k++)];
                    const origin at = nth_element(here, lane, n);
                    if (at.row >= first && at.row < stop)
                        macko_store(w, m->dtype, (at.row - first) * m->cols + at.col,
                                    macko_byte_value(m->kind, macko_byte_code(m->kind, m->dtype, stored)) *
                                        m->scales[at.row]);
                }
            }
        }
    }
}

/* Of a slab whose bytes are there. found without a fault: its values. */
static macko_fault check_slab(const macko_sparse8_matrix *m, int64_t slab) {
    const int64_t block = slab / macko_slabs_across(m->cols);
    const origin from = slab_origin(m->cols, slab);
    const uint8_t *const begin = m->data + (int64_t)m->offsets[slab] * MACKO_SLAB_UNIT;
    const int64_t units = m->offsets[slab + 1] - m->offsets[slab];
    slice_masks masks[MACKO_SLAB_SLICES];
    slice_plan plans[MACKO_SLAB_SLICES];
    int value_rows = 0;
    int64_t stored = 0;
#define FAULT(kind, byte) ((macko_fault){kind, block, slab, (int64_t)(byte)})
    for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++) {
        load_masks(begin, slice, masks[slice]);
        for (int i = 0; i < MACKO_SLAB_TILES * MACKO_SLAB_LANES * LANE_VALUES; i++) {
            const int n = i % LANE_VALUES, lane = i / LANE_VALUES % MACKO_SLAB_LANES, tile = i / LANE_VALUES / 32;
            const origin at = nth_element(tile_slice_origin(from, tile * MACKO_SLAB_SLICES + slice), lane, n);
            if (masks[slice][tile][lane] >> nth_bit(n) & 1 && (at.row >= m->rows || at.col >= m->cols))
                return FAULT(MACKO_SPARSE8_OUTSIDE, mask_at(tile, slice, lane));
        }
        plans[slice] = plan_slice(masks[slice]);
        value_rows += plans[slice].rows;
    }
    if (macko_sparse8_units(value_rows) != units) return FAULT(MACKO_SPARSE8_COUNT, value_rows);
    const int start = bad_start(begin + MACKO_SPARSE8_STARTS_AT, plans);
    if (start >= 0) return FAULT(MACKO_SPARSE8_START, MACKO_SPARSE8_STARTS_AT + start);
    uint32_t values_at = MACKO_SPARSE8_VALUES_AT;
    for (int word = 0; word < MACKO_SLAB_UNIT / 4; word++) {
        const int byte = MACKO_SPARSE8_SLICES_AT + word * 4;
        if (load_32(begin + byte) != (word < MACKO_SLAB_SLICES ? values_at : 0))
            return FAULT(MACKO_SPARSE8_SLICE, byte);
        if (word < MACKO_SLAB_SLICES) values_at += (uint32_t)plans[word].rows * MACKO_SPARSE8_ROW_BYTES;
    }
    for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++) {
        values_at = load_32(begin + MACKO_SPARSE8_SLICES_AT + slice * 4);
        for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) {
            const int length = plans[slice].lengths[lane];
            for (int k = 0; k < plans[slice].rows * 4; k++) {
                const int byte = (int)values_at + column_at(lane, k);
                const uint8_t code = macko_byte_code(m->kind, m->dtype, begin[byte]);
                const bool good = !macko_byte_is_zero(m->kind, code) && macko_byte_is_valid(m->kind, code);
                if (k < length ? !good : begin[byte]) return FAULT(MACKO_SPARSE8_CODE, byte);
            }
            stored += length;
        }
    }
#undef FAULT
    return (macko_fault){MACKO_SPARSE8_OK, 0, -1, stored};
}

macko_fault macko_sparse8_check_cpu(const macko_sparse8_matrix *m) {
    const int64_t row = macko_bad_scale_cpu(m->scales, m->rows);
    if (row >= 0) return (macko_fault){MACKO_SPARSE8_SCALE, row / MACKO_SLAB_ROWS, -1, row};
    macko_fault fault =
        check_offsets(m->offsets, m->rows, m->cols, macko_sparse8_units(0),
                      macko_sparse8_units(MACKO_SPARSE8_MOST_ROWS), m->widest, m->units, MACKO_SPARSE8_OFFSETS);
    int64_t stored = 0;
    for (int64_t slab = 0; !fault.kind && slab < macko_slab_count(m->rows, m->cols); slab++) {
        fault = check_slab(m, slab);
        stored += fault.found;
    }
    return fault.kind ? fault : (macko_fault){MACKO_SPARSE8_OK, 0, -1, stored};
}
