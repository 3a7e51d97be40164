/* The dense12 layout from dense rows, its dense rows, and its checks: the order of dense12.h. */
#include "../../slab/places_cpu.h"
#include "dense12.h"

enum {
    NO_CODE = 255,
};

/* Bytes of the slab where the place has its low byte, and its step's codes. */
static inline int low_at(int tile_slice, int place) {
    const int step = place >> STEP_BITS, lane = place >> LANE_BITS & (MACKO_SLAB_LANES - 1), i = place & 7;
    return tile_slice * MACKO_DENSE12_SLICE_BYTES + (step / 2 * MACKO_SLAB_LANES + lane) * MACKO_DENSE12_CHUNK +
           step % 2 * STEP_ELEMENTS + i;
}
static inline int codes_at(int tile_slice, int place) {
    const int step = place >> STEP_BITS, lane = place >> LANE_BITS & (MACKO_SLAB_LANES - 1);
    return tile_slice * MACKO_DENSE12_SLICE_BYTES + (2 * MACKO_SLAB_LANES + lane) * MACKO_DENSE12_CHUNK + step * 4;
}

/* Bits of a word of codes. */
static inline int code_bit(int i) {
    return 4 * i;
}
static inline int sign_bit(int i) {
    return i < 4 ? 8 * i + 7 : 8 * (i - 4) + 3;
}

static inline int high_of(uint32_t split) {
    return split >> 8 & 127;
}
/* The lowest code of each high byte, or NO_CODE. */
static void find_codes(const uint32_t table[2], uint8_t codes[128]) {
    memset(codes, NO_CODE, 128);
    for (int code = MACKO_SLAB_TABLE - 1; code >= 0; code--) codes[table_byte(table, code) & 127] = (uint8_t)code;
}

static inline int code_of(const uint8_t codes[128], macko_dtype dtype, uint16_t value) {
    return macko_dense12_has_lower_bits(dtype, value) ? NO_CODE : codes[high_of(macko_dense12_split(dtype, value))];
}

void macko_dense12_histogram_cpu(const macko_dense12_matrix *m, const uint16_t *w, int64_t counts[128]) {
    for (int64_t i = 0; i < m->rows * m->cols; i++)
        if (!macko_dense12_has_lower_bits(m->dtype, w[i])) counts[high_of(macko_dense12_split(m->dtype, w[i]))]++;
}

void macko_dense12_count_cpu(const macko_dense12_matrix *m, const uint16_t *w, int32_t *offsets,
                             macko_slab_totals *totals) {
    uint8_t codes[128];
    find_codes(m->table, codes);
    (void)offsets;
    for (int64_t slab = 0; slab < macko_slab_count(m->rows, m->cols); slab++) {
        const origin from = slab_origin(m->cols, slab);
        const int64_t row_end = min_int64(m->rows, from.row + MACKO_SLAB_ROWS);
        const int64_t col_end = min_int64(m->cols, from.col + MACKO_SLAB_COLS);
        int64_t listed = 0;
        for (int64_t row = from.row; row < row_end; row++)
            for (int64_t col = from.col; col < col_end; col++)
                listed += code_of(codes, m->dtype, w[row * m->cols + col]) == NO_CODE;
        if (listed > totals->fullest) totals->fullest = listed;
        totals->listed += listed;
    }
}

/* A tile_slice, whose slab is zeros, but for what its list says; gives how many entries the list has now. */
static uint32_t write_tile_slice(const macko_dense12_matrix *m, const uint16_t *w, const uint8_t codes[128],
                                 int64_t slab, int tile_slice, uint32_t listed, uint8_t *begin) {
    const origin here = tile_slice_origin(slab_origin(m->cols, slab), tile_slice);
    for (int first = 0; first < TILE_SLICE_PLACES; first += STEP_ELEMENTS) {
        uint32_t word = 0;
        for (int i = 0; i < STEP_ELEMENTS; i++) {
            const origin at = place_of(here, first + i);
            if (at.row >= m->rows || at.col >= m->cols) continue;
            const uint16_t value = w[at.row * m->cols + at.col];
            const uint32_t code = (uint32_t)code_of(codes, m->dtype, value);
            if (code == NO_CODE) {
                const uint32_t entry = (uint32_t)value << 16 | (uint32_t)(first + i);
                store_32(begin + MACKO_DENSE12_LIST_AT + 4 * listed++, entry);
                continue;
            }
            begin[low_at(tile_slice, first + i)] = (uint8_t)macko_dense12_split(m->dtype, value);
            word |= code << code_bit(i) | (uint32_t)(value >> 15) << sign_bit(i);
        }
        store_32(begin + codes_at(tile_slice, first), word);
    }
    return listed;
}

void macko_dense12_write_cpu(const macko_dense12_matrix *m, const uint16_t *w, uint8_t *data) {
    const int64_t size = (int64_t)m->slab_units * MACKO_SLAB_UNIT;
    uint8_t codes[128];
    find_codes(m->table, codes);
    for (int64_t slab = 0; slab < macko_slab_count(m->rows, m->cols); slab++) {
        uint8_t *const begin = data + slab * size;
        uint32_t listed = 0;
        memset(begin, 0, (size_t)size);
        for (int tile_slice = 0; tile_slice < MACKO_SLAB_TILE_SLICES; tile_slice++) {
            const uint32_t list_first = listed;
            listed = write_tile_slice(m, w, codes, slab, tile_slice, listed, begin);
            store_32(begin + MACKO_DENSE12_BOUNDS_AT + 4 * tile_slice, listed << 16 | list_first);
        }
    }
}

/* What stands in a place, and not in the list. */
static uint16_t load_place(const macko_dense12_matrix *m, const uint8_t *slab, int tile_slice, int place) {
    const uint32_t word = load_32(slab + codes_at(tile_slice, place));
    const int i = place & 7, high = table_byte(m->table, word >> code_bit(i) & 7);
    const uint32_t split = (word >> sign_bit(i) & 1) << 15 | (uint32_t)high << 8 | slab[low_at(tile_slice, place)];
    return (uint16_t)macko_dense12_join(m->dtype, split);
}

void macko_dense12_unpack_cpu(const macko_dense12_matrix *m, int64_t first, int64_t count, uint16_t *w) {
    const int64_t slabs = macko_slabs_across(m->cols), stop = first + count,
                  size = (int64_t)m->slab_units * MACKO_SLAB_UNIT;
    if (!count) return;
    for (int64_t slab = first / MACKO_SLAB_ROWS * slabs; slab < macko_slab_row_blocks(stop) * slabs; slab++) {
        const uint8_t *const begin = m->data + slab * size;
        for (int tile_slice = 0; tile_slice < MACKO_SLAB_TILE_SLICES; tile_slice++) {
            const origin here = tile_slice_origin(slab_origin(m->cols, slab), tile_slice);
            if (here.row >= stop || here.row + SLICE_ROWS <= first) continue;
            for (int place = 0; place < TILE_SLICE_PLACES; place++) {
                const origin at = place_of(here, place);
                if (at.row >= first && at.row < stop && at.col < m->cols)
                    w[(at.row - first) * m->cols + at.col] = load_place(m, begin, tile_slice, place);
            }
            const uint32_t bounds = load_32(begin + MACKO_DENSE12_BOUNDS_AT + 4 * tile_slice);
            /* Nobody need have checked the bytes: an end behind the slab's is not followed. */
            const uint32_t end = (uint32_t)min_int64(bounds >> 16, (size - MACKO_DENSE12_LIST_AT) / 4);
            for (uint32_t k = bounds & 0xffff; k < end; k++) {
                const uint32_t entry = load_32(begin + MACKO_DENSE12_LIST_AT + 4 * k);
                const origin at = place_of(here, entry & (TILE_SLICE_PLACES - 1));
                if (at.row >= first && at.row < stop && at.col < m->cols)
                    w[(at.row - first) * m->cols + at.col] = (uint16_t)(entry >> 16);
            }
        }
    }
}

/* Of a slab whose bytes are there: its list. found without a fault: its entries. */
static macko_fault check_list(const macko_dense12_matrix *m, int64_t slab, const uint8_t codes[128]) {
    const int64_t block = slab / macko_slabs_across(m->cols);
    const uint8_t *const begin = m->data + slab * m->slab_units * MACKO_SLAB_UNIT;
    const uint32_t most = (uint32_t)(m->slab_units * MACKO_SLAB_UNIT - MACKO_DENSE12_LIST_AT) / 4;
    uint32_t end = 0;
    for (int tile_slice = 0; tile_slice < MACKO_SLAB_TILE_SLICES; tile_slice++) {
        const uint32_t bounds = load_32(begin + MACKO_DENSE12_BOUNDS_AT + 4 * tile_slice);
        if ((bounds & 0xffff) != end || bounds >> 16 < end || bounds >> 16 > most)
            return (macko_fault){MACKO_DENSE12_BOUNDS, block, slab, tile_slice};
        end = bounds >> 16;
    }
    for (int kind = MACKO_DENSE12_ENTRY; kind <= MACKO_DENSE12_LISTED; kind++)
        for (int tile_slice = 0; tile_slice < MACKO_SLAB_TILE_SLICES; tile_slice++) {
            const uint32_t bounds = load_32(begin + MACKO_DENSE12_BOUNDS_AT + 4 * tile_slice);
            const origin here = tile_slice_origin(slab_origin(m->cols, slab), tile_slice);
            int before = -1;
            for (uint32_t k = bounds & 0xffff; k < bounds >> 16; k++) {
                const uint32_t entry = load_32(begin + MACKO_DENSE12_LIST_AT + 4 * k);
                const int place = entry & 0xffff;
                int bad = place <= before || place >= TILE_SLICE_PLACES;
                if (kind == MACKO_DENSE12_LISTED) {
                    const origin at = place_of(here, place);
                    bad = code_of(codes, m->dtype, (uint16_t)(entry >> 16)) != NO_CODE || at.row >= m->rows ||
                          at.col >= m->cols || load_place(m, begin, tile_slice, place);
                }
                if (bad) return (macko_fault){kind, block, slab, k};
                before = place;
            }
        }
    return (macko_fault){MACKO_DENSE12_OK, block, slab, end};
}

/* Of a slab whose list is whole: its elements, and what is after the list. */
static macko_fault check_elements(const macko_dense12_matrix *m, int64_t slab, int64_t listed) {
    const int64_t block = slab / macko_slabs_across(m->cols);
    const origin from = slab_origin(m->cols, slab);
    const uint8_t *const begin = m->data + slab * m->slab_units * MACKO_SLAB_UNIT;
    if (from.row + MACKO_SLAB_ROWS > m->rows || from.col + MACKO_SLAB_COLS > m->cols)
        for (int i = 0; i < MACKO_SLAB_TILE_SLICES * TILE_SLICE_PLACES; i++) {
            const int tile_slice = i / TILE_SLICE_PLACES, place = i % TILE_SLICE_PLACES,
                      low = low_at(tile_slice, place);
            const origin at = place_of(tile_slice_origin(from, tile_slice), place);
            if ((at.row >= m->rows || at.col >= m->cols) && load_place(m, begin, tile_slice, place))
                return (macko_fault){MACKO_DENSE12_OUTSIDE, block, slab,
                                     begin[low] ? low : codes_at(tile_slice, place)};
        }
    for (int i = 0; i < MACKO_SLAB_TILE_SLICES * TILE_SLICE_PLACES; i++) {
        const int tile_slice = i / TILE_SLICE_PLACES, place = i % TILE_SLICE_PLACES, byte = codes_at(tile_slice, place);
        const int code = load_32(begin + byte) >> code_bit(place & 7) & 7;
        if (code && !table_byte(m->table, code)) return (macko_fault){MACKO_DENSE12_CODE, block, slab, byte};
    }
    for (int64_t byte = MACKO_DENSE12_LIST_AT + 4 * listed; byte < (int64_t)m->slab_units * MACKO_SLAB_UNIT; byte++)
        if (begin[byte]) return (macko_fault){MACKO_DENSE12_ZERO, block, slab, byte};
    return (macko_fault){MACKO_DENSE12_OK, block, slab, listed};
}

macko_fault macko_dense12_check_cpu(const macko_dense12_matrix *m) {
    const int64_t count = macko_slab_count(m->rows, m->cols);
    const int bad = bad_code(m->table, m->dtype == MACKO_F16 ? 16 : 128);
    int64_t listed = 0, most = 0;
    uint8_t codes[128];
    if (bad >= 0) return (macko_fault){MACKO_DENSE12_TABLE_ORDER, 0, -1, bad};
    find_codes(m->table, codes);
    for (int64_t slab = 0; slab < count; slab++) {
        macko_fault fault = check_list(m, slab, codes);
        if (!fault.kind) fault = check_elements(m, slab, fault.found);
        if (fault.kind) return fault;
        listed += fault.found;
        if (fault.found > most) most = fault.found;
    }
    if (count && macko_dense12_units((int)most) != m->slab_units)
        return (macko_fault){MACKO_DENSE12_WIDEST, 0, -1, macko_dense12_units((int)most)};
    return (macko_fault){MACKO_DENSE12_OK, 0, -1, listed};
}
