/* The sparse11 layout from dense rows, its dense rows, and its checks: the order of sparse11.h. */
#include "../../slab/columns_cpu.h"
#include "sparse11.h"

enum {
    SIGN = 0x8000,
    PLACE_BIT = 16, /* of a word of the list: its place */
    NO_CODE = 255,
};

/* The code of each high byte, or NO_CODE. */
static void find_codes(const uint32_t table[2], uint8_t codes[256]) {
    memset(codes, NO_CODE, 256);
    for (int code = 1; code < MACKO_SLAB_TABLE; code++)
        if (table_byte(table, code)) codes[table_byte(table, code)] = (uint8_t)code;
}

/* 0: it is no value. */
static inline int code_of(macko_dtype dtype, uint16_t value, const uint8_t codes[256]) {
    if (macko_sparse11_has_low_bits(dtype, value)) return NO_CODE;
    return value & (SIGN - 1) ? codes[macko_sparse11_split(dtype, value) >> 8] : 0;
}

/* The codes of a slice of a slab, by tile and place, NO_CODE where a value is listed. */
typedef uint8_t slice_codes[MACKO_SLAB_TILES][TILE_SLICE_PLACES];

static inline int in_stream(int code) {
    return code != 0 && code != NO_CODE;
}

static int values_in(const uint8_t codes[TILE_SLICE_PLACES], int lane) {
    int count = 0;
    for (int n = 0; n < MACKO_SLAB_STEPS * STEP_ELEMENTS; n++) count += in_stream(codes[nth_place(lane, n)]);
    return count;
}

/* What a slice's codes say of its streams. */
static slice_plan plan_slice(slice_codes codes) {
    int counts[MACKO_SLAB_TILES][MACKO_SLAB_LANES];
    for (int tile = 0; tile < MACKO_SLAB_TILES; tile++)
        for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) counts[tile][lane] = values_in(codes[tile], lane);
    return plan_columns(counts);
}

/* The codes of the slice of w, whose first element is at `from`; how many values are listed. */
static int find_slice(const macko_sparse11_matrix *m, const uint16_t *w, origin slab, int slice,
                      const uint8_t codes[256], slice_codes found) {
    int listed = 0;
    for (int tile = 0; tile < MACKO_SLAB_TILES; tile++) {
        const origin tile_slice = tile_slice_origin(slab, tile * MACKO_SLAB_SLICES + slice);
        for (int place = 0; place < TILE_SLICE_PLACES; place++) {
            const origin at = place_of(tile_slice, place);
            found[tile][place] = 0;
            if (at.row < m->rows && at.col < m->cols)
                found[tile][place] = (uint8_t)code_of(m->dtype, w[at.row * m->cols + at.col], codes);
            listed += found[tile][place] == NO_CODE;
        }
    }
    return listed;
}

/* Words of codes of a lane in a tile_slice: of which word and bit of it code bit k of the place is. */
static inline const uint8_t *codes_at(const uint8_t *slab, int tile_slice, int lane, int word) {
    return slab + tile_slice * MACKO_SPARSE11_SLICE_BYTES + (word * MACKO_SLAB_LANES + lane) * 4;
}

static void store_codes(uint8_t *slab, int tile_slice, const uint8_t codes[TILE_SLICE_PLACES]) {
    for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) {
        uint32_t words[MACKO_SPARSE11_WORDS] = {0};
        for (int step = 0; step < MACKO_SLAB_STEPS; step++)
            for (int i = 0; i < STEP_ELEMENTS; i++) {
                const uint32_t code = codes[step * STEP_PLACES + lane * STEP_ELEMENTS + i];
                if (!in_stream((int)code)) continue;
                if (step < MACKO_SPARSE11_WORDS)
                    words[step] |= code << 4 * i;
                else
                    for (int k = 0; k < MACKO_SPARSE11_WORDS; k++) words[k] |= (code >> k & 1) << (4 * i + 3);
            }
        for (int k = 0; k < MACKO_SPARSE11_WORDS; k++)
            store_32((uint8_t *)codes_at(slab, tile_slice, lane, k), words[k]);
    }
}

static void load_codes(const uint8_t *slab, int tile_slice, uint8_t codes[TILE_SLICE_PLACES]) {
    for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) {
        uint32_t words[MACKO_SPARSE11_WORDS];
        for (int k = 0; k < MACKO_SPARSE11_WORDS; k++) words[k] = load_32(codes_at(slab, tile_slice, lane, k));
        for (int step = 0; step < MACKO_SLAB_STEPS; step++)
            for (int i = 0; i < STEP_ELEMENTS; i++) {
                uint32_t code = 0;
                if (step < MACKO_SPARSE11_WORDS)
                    code = words[step] >> 4 * i & 7;
                else
                    for (int k = 0; k < MACKO_SPARSE11_WORDS; k++) code |= (words[k] >> (4 * i + 3) & 1) << k;
                codes[step * STEP_PLACES + lane * STEP_ELEMENTS + i] = (uint8_t)code;
            }
    }
}

void macko_sparse11_histogram_cpu(const macko_sparse11_matrix *m, const uint16_t *w, int64_t counts[256]) {
    for (int64_t i = 0; i < m->rows * m->cols; i++)
        counts[macko_sparse11_split(m->dtype, w[i]) >> 8] +=
            w[i] & (SIGN - 1) && !macko_sparse11_has_low_bits(m->dtype, w[i]);
}

/* Words of a tile_slice's list. */
static int list_words(const uint8_t codes[TILE_SLICE_PLACES]) {
    int listed = 0;
    for (int place = 0; place < TILE_SLICE_PLACES; place++) listed += codes[place] == NO_CODE;
    return macko_sparse11_words(listed);
}

void macko_sparse11_count_cpu(const macko_sparse11_matrix *m, const uint16_t *w, int32_t *offsets,
                              macko_slab_totals *totals) {
    uint8_t codes[256];
    find_codes(m->table, codes);
    for (int64_t slab = 0; slab < macko_slab_count(m->rows, m->cols); slab++) {
        int value_rows = 0, words = 0, listed = 0;
        for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++) {
            slice_codes own;
            listed += find_slice(m, w, slab_origin(m->cols, slab), slice, codes, own);
            const slice_plan plan = plan_slice(own);
            value_rows += plan.rows;
            for (int tile = 0; tile < MACKO_SLAB_TILES; tile++) words += list_words(own[tile]);
            for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) totals->stored += plan.lengths[lane];
        }
        totals->stored += listed;
        totals->listed += listed;
        if (listed > totals->fullest) totals->fullest = listed;
        offsets[slab + 1] = macko_sparse11_units(value_rows, words);
    }
}

void macko_sparse11_write_cpu(const macko_sparse11_matrix *m, const uint16_t *w, uint8_t *data) {
    uint8_t codes[256];
    find_codes(m->table, codes);
    for (int64_t slab = 0; slab < macko_slab_count(m->rows, m->cols); slab++) {
        uint8_t *const begin = data + (int64_t)m->offsets[slab] * MACKO_SLAB_UNIT;
        const origin from = slab_origin(m->cols, slab);
        slice_codes own[MACKO_SLAB_SLICES];
        uint32_t values_at = MACKO_SPARSE11_VALUES_AT, value_begins[MACKO_SLAB_SLICES];
        memset(begin, 0, (size_t)(m->offsets[slab + 1] - m->offsets[slab]) * MACKO_SLAB_UNIT);
        for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++) {
            find_slice(m, w, from, slice, codes, own[slice]);
            const slice_plan plan = plan_slice(own[slice]);
            value_begins[slice] = values_at;
            memcpy(begin + MACKO_SPARSE11_STARTS_AT + slice * sizeof plan.starts, plan.starts, sizeof plan.starts);
            for (int tile = 0; tile < MACKO_SLAB_TILES; tile++) {
                const origin tile_slice = tile_slice_origin(from, tile * MACKO_SLAB_SLICES + slice);
                store_codes(begin, tile * MACKO_SLAB_SLICES + slice, own[slice][tile]);
                for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) {
                    int k = first_in_half(plan.starts[lane], tile);
                    for (int n = 0; n < MACKO_SLAB_STEPS * STEP_ELEMENTS; n++) {
                        const int place = nth_place(lane, n);
                        if (!in_stream(own[slice][tile][place])) continue;
                        const origin at = place_of(tile_slice, place);
                        begin[values_at + (uint32_t)value_at(plan.starts[lane], lane, tile / HALF_TILES, k++)] =
                            (uint8_t)macko_sparse11_split(m->dtype, w[at.row * m->cols + at.col]);
                    }
                }
            }
            values_at += (uint32_t)plan.rows * MACKO_SPARSE11_ROW_BYTES;
        }
        uint32_t list_at = values_at;
        store_32(begin + MACKO_SPARSE11_END_AT, MACKO_SPARSE11_END);
        for (int tile_slice = 0; tile_slice < MACKO_SLAB_TILE_SLICES; tile_slice++) {
            const uint8_t *const tile_codes = own[tile_slice % MACKO_SLAB_SLICES][tile_slice / MACKO_SLAB_SLICES];
            const uint32_t list_begin = list_at;
            for (int place = 0; place < TILE_SLICE_PLACES; place++) {
                if (tile_codes[place] != NO_CODE) continue;
                const origin at = place_of(tile_slice_origin(from, tile_slice), place);
                store_32(begin + list_at, (uint32_t)place << PLACE_BIT | w[at.row * m->cols + at.col]);
                list_at += 4;
            }
            if (list_at > list_begin) {
                store_32(begin + list_at, MACKO_SPARSE11_END);
                list_at += 4;
            }
            store_32(begin + MACKO_SPARSE11_SLICES_AT + tile_slice * 4,
                     value_begins[tile_slice % MACKO_SLAB_SLICES] |
                         (list_at > list_begin ? list_begin : (uint32_t)MACKO_SPARSE11_END_AT) << 16);
        }
    }
}

void macko_sparse11_unpack_cpu(const macko_sparse11_matrix *m, int64_t first, int64_t count, uint16_t *w) {
    const int64_t slabs = macko_slabs_across(m->cols), stop = first + count;
    memset(w, 0, (size_t)(count * m->cols * 2));
    if (!count) return;
    for (int64_t slab = first / MACKO_SLAB_ROWS * slabs; slab < macko_slab_row_blocks(stop) * slabs; slab++) {
        const uint8_t *const begin = m->data + (int64_t)m->offsets[slab] * MACKO_SLAB_UNIT;
        for (int tile_slice = 0; tile_slice < MACKO_SLAB_TILE_SLICES; tile_slice++) {
            const int slice = tile_slice % MACKO_SLAB_SLICES, tile = tile_slice / MACKO_SLAB_SLICES;
            const origin here = tile_slice_origin(slab_origin(m->cols, slab), tile_slice);
            const uint32_t places = load_32(begin + MACKO_SPARSE11_SLICES_AT + tile_slice * 4);
            const uint8_t *const values = begin + (places & 0xffff);
            uint8_t codes[TILE_SLICE_PLACES];
            if (here.row >= stop || here.row + SLICE_ROWS <= first) continue;
            load_codes(begin, tile_slice, codes);
            for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) {
                const uint8_t *const starts = begin + MACKO_SPARSE11_STARTS_AT + (slice * MACKO_SLAB_LANES + lane) * 4;
                int k = first_in_half(starts, tile);
                for (int n = 0; n < MACKO_SLAB_STEPS * STEP_ELEMENTS; n++) {
                    const int place = nth_place(lane, n);
                    if (!codes[place]) continue;
                    const uint8_t low = values[value_at(starts, lane, tile / HALF_TILES, k++)];
                    const origin at = place_of(here, place);
                    if (at.row >= first && at.row < stop)
                        w[(at.row - first) * m->cols + at.col] = (uint16_t)macko_sparse11_join(
                            m->dtype, (uint32_t)table_byte(m->table, codes[place]) << 8 | low);
                }
            }
            for (const uint8_t *entry = begin + (places >> 16); load_32(entry) != MACKO_SPARSE11_END; entry += 4) {
                const origin at = place_of(here, (int)(load_32(entry) >> PLACE_BIT));
                if (at.row >= first && at.row < stop) w[(at.row - first) * m->cols + at.col] = (uint16_t)load_32(entry);
            }
        }
    }
}

/* Of a slab whose bytes are there. found without a fault: its values; *listed: of them those in its list. */
static macko_fault check_slab(const macko_sparse11_matrix *m, int64_t slab, const uint8_t codes[256], int64_t *listed) {
    const int64_t block = slab / macko_slabs_across(m->cols);
    const origin from = slab_origin(m->cols, slab);
    const uint8_t *const begin = m->data + (int64_t)m->offsets[slab] * MACKO_SLAB_UNIT;
    const uint32_t size = (uint32_t)(m->offsets[slab + 1] - m->offsets[slab]) * MACKO_SLAB_UNIT;
    slice_codes own[MACKO_SLAB_SLICES];
    slice_plan plans[MACKO_SLAB_SLICES];
    uint32_t value_begins[MACKO_SLAB_SLICES], at = MACKO_SPARSE11_VALUES_AT;
    int64_t stored = 0;
#define FAULT(kind, byte) ((macko_fault){kind, block, slab, (int64_t)(byte)})
    for (int tile_slice = 0; tile_slice < MACKO_SLAB_TILE_SLICES; tile_slice++) {
        uint8_t *const tile_codes = own[tile_slice % MACKO_SLAB_SLICES][tile_slice / MACKO_SLAB_SLICES];
        load_codes(begin, tile_slice, tile_codes);
        for (int place = 0; place < TILE_SLICE_PLACES; place++) {
            const origin element = place_of(tile_slice_origin(from, tile_slice), place);
            const int code = tile_codes[place], lane = place / STEP_ELEMENTS % MACKO_SLAB_LANES;
            if (code && (element.row >= m->rows || element.col >= m->cols || !table_byte(m->table, code)))
                return FAULT(MACKO_SPARSE11_CODE, codes_at(begin, tile_slice, lane, 0) - begin);
        }
    }
    for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++) {
        plans[slice] = plan_slice(own[slice]);
        value_begins[slice] = at;
        at += (uint32_t)plans[slice].rows * MACKO_SPARSE11_ROW_BYTES;
    }
    if (at > size)
        return FAULT(MACKO_SPARSE11_COUNT, macko_sparse11_units((int)(at - MACKO_SPARSE11_VALUES_AT) / 128, 0));
    const int start = bad_start(begin + MACKO_SPARSE11_STARTS_AT, plans);
    if (start >= 0) return FAULT(MACKO_SPARSE11_START, MACKO_SPARSE11_STARTS_AT + start);
    for (int tile_slice = 0; tile_slice < MACKO_SLAB_TILE_SLICES; tile_slice++) {
        const uint32_t byte = MACKO_SPARSE11_SLICES_AT + (uint32_t)tile_slice * 4, word = load_32(begin + byte);
        const int lists = word >> 16 != MACKO_SPARSE11_END_AT;
        uint8_t *const tile_codes = own[tile_slice % MACKO_SLAB_SLICES][tile_slice / MACKO_SLAB_SLICES];
        int64_t before = -1;
        if ((word & 0xffff) != value_begins[tile_slice % MACKO_SLAB_SLICES] || (lists && word >> 16 != at))
            return FAULT(MACKO_SPARSE11_SLICE, byte);
        if (!lists) continue;
        int count = 0;
        for (; at + 4 <= size && load_32(begin + at) != MACKO_SPARSE11_END; at += 4, count++) {
            const uint32_t entry = load_32(begin + at), place = entry >> PLACE_BIT;
            if (place >= TILE_SLICE_PLACES || place <= before) return FAULT(MACKO_SPARSE11_ENTRY, at);
            const origin element = place_of(tile_slice_origin(from, tile_slice), (int)place);
            const int code = code_of(m->dtype, (uint16_t)entry, codes);
            if (code != NO_CODE || tile_codes[place] || element.row >= m->rows || element.col >= m->cols)
                return FAULT(MACKO_SPARSE11_LISTED, at);
            before = place;
        }
        if (!count || at + 4 > size) return FAULT(MACKO_SPARSE11_ENTRY, at);
        at += 4;
        *listed += count;
        stored += count;
    }
    for (uint32_t byte = MACKO_SPARSE11_END_AT; byte < MACKO_SPARSE11_VALUES_AT; byte++)
        if (begin[byte] != (byte < MACKO_SPARSE11_END_AT + 4 ? 0xff : 0)) return FAULT(MACKO_SPARSE11_SLICE, byte);
    if ((at + MACKO_SLAB_UNIT - 1) / MACKO_SLAB_UNIT * MACKO_SLAB_UNIT != size)
        return FAULT(MACKO_SPARSE11_COUNT, (at + MACKO_SLAB_UNIT - 1) / MACKO_SLAB_UNIT);
    for (; at < size; at++)
        if (begin[at]) return FAULT(MACKO_SPARSE11_ZERO, at);
    for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++)
        for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) {
            const uint8_t *const values = begin + value_begins[slice];
            for (int k = plans[slice].lengths[lane]; k < plans[slice].rows * 4; k++)
                if (values[column_at(lane, k)])
                    return FAULT(MACKO_SPARSE11_ZERO, value_begins[slice] + (uint32_t)column_at(lane, k));
            stored += plans[slice].lengths[lane];
            for (int half = 0; half < 2; half++) {
                int k = 0;
                for (int n = 0; n < HALF_MOST; n++) {
                    const int tile = half * HALF_TILES + n / (MACKO_SLAB_STEPS * STEP_ELEMENTS);
                    const int code = own[slice][tile][nth_place(lane, n % (MACKO_SLAB_STEPS * STEP_ELEMENTS))];
                    if (!code) continue;
                    const int byte = value_at(plans[slice].starts[lane], lane, half, k++);
                    if (!(macko_sparse11_join(m->dtype, (uint32_t)table_byte(m->table, code) << 8 | values[byte]) &
                          (SIGN - 1)))
                        return FAULT(MACKO_SPARSE11_ZERO, value_begins[slice] + (uint32_t)byte);
                }
            }
        }
#undef FAULT
    return (macko_fault){MACKO_SPARSE11_OK, 0, -1, stored};
}

macko_fault macko_sparse11_check_cpu(const macko_sparse11_matrix *m) {
    const int bad = bad_code(m->table, 256 >> macko_sparse11_low_bits(m->dtype));
    if (bad >= 0) return (macko_fault){MACKO_SPARSE11_TABLE_ORDER, 0, -1, bad};
    macko_fault fault = check_offsets(m->offsets, m->rows, m->cols, macko_sparse11_units(0, 0),
                                      MACKO_SPARSE11_MOST_UNITS, m->widest, m->units, MACKO_SPARSE11_OFFSETS);
    int64_t stored = 0, listed = 0;
    uint8_t codes[256];
    find_codes(m->table, codes);
    for (int64_t slab = 0; !fault.kind && slab < macko_slab_count(m->rows, m->cols); slab++) {
        fault = check_slab(m, slab, codes, &listed);
        stored += fault.found;
    }
    return fault.kind ? fault : (macko_fault){MACKO_SPARSE11_OK, 0, listed, stored};
}
