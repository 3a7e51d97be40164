/* The tile layout from dense rows, its dense rows, and its checks: the order of tile.h. */
#include "../../core/cpu.h"
#include "../../slab/places_cpu.h"
#include "tile.h"

enum {
    SIGN = 0x8000,
    STREAM_GROUPS = MACKO_SLAB_GROUPS / MACKO_TILE_STREAMS,
    HALF_TILES = MACKO_SLAB_TILES / 2,
    HALF_MOST = HALF_TILES * STREAM_GROUPS * MACKO_SLAB_QUAD, /* values of half a stream */
};

static inline uint16_t load_16(const uint8_t *p) {
    uint16_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static inline void store_16(uint8_t *p, int value) {
    const uint16_t bits = (uint16_t)value;
    memcpy(p, &bits, sizeof bits);
}

/* Of a slice of a slab. */
typedef uint32_t slice_masks[MACKO_SLAB_TILES][MACKO_SLAB_LANES];

/* What a slice's masks say of its values: [lane][stream]. */
typedef struct slice_plan {
    uint16_t spills[MACKO_SLAB_LANES][MACKO_TILE_STREAMS];
    uint8_t lengths[MACKO_SLAB_LANES][MACKO_TILE_STREAMS]; /* of columns */
    int rows;
} slice_plan;

/* Byte of the slice's values where a column begins. */
static inline int column_at(int lane, int stream) {
    return (lane * MACKO_TILE_STREAMS + stream) * 2;
}

/* Length of the head or the tail of a stream. */
static int length_of(slice_masks masks, int lane, int stream, int tail) {
    const uint32_t own = (uint32_t)MACKO_TILE_STREAM_BITS << STREAM_GROUPS * stream;
    int length = 0;
    for (int tile = 0; tile < HALF_TILES; tile++)
        length += __builtin_popcount(masks[tail * HALF_TILES + tile][lane] & own);
    return length;
}

static slice_plan plan_slice(slice_masks masks) {
    slice_plan plan = {.rows = 0};
    for (int stream = 0; stream < MACKO_TILE_STREAMS; stream++) {
        int first[MACKO_SLAB_LANES], missing[MACKO_SLAB_LANES]; /* from the tail */
        uint8_t columns[MACKO_SLAB_LANES], lanes[MACKO_SLAB_LANES];
        for (int lane = 0; lane < MACKO_SLAB_LANES; lane++) {
            first[lane] = length_of(masks, lane, stream, 0);
            missing[lane] = HALF_MOST - length_of(masks, lane, stream, 1);
        }
        sort_lanes(first, HALF_MOST, columns);
        sort_lanes(missing, HALF_MOST, lanes);
        for (int i = 0; i < MACKO_SLAB_LANES; i++) {
            const int column = columns[i], lane = lanes[i], length = first[column] + HALF_MOST - missing[lane];
            plan.spills[lane][stream] = (uint16_t)(first[column] * MACKO_TILE_ROW_BYTES + column_at(column, stream));
            plan.lengths[column][stream] = (uint8_t)length;
            if (length > plan.rows) plan.rows = length;
        }
    }
    return plan;
}

/* The elements of the dense slice [SLICE_ROWS, MACKO_SLAB_COLS] that are the values of a head or a tail, in its
 * order; how many. */
static int elements_of(slice_masks masks, int lane, int stream, int tail, uint16_t places[HALF_MOST]) {
    int count = 0;
    for (int tile = tail * HALF_TILES; tile < (tail + 1) * HALF_TILES; tile++)
        for (int j = stream * STREAM_GROUPS; j < (stream + 1) * STREAM_GROUPS; j++)
            for (int e = 0; e < MACKO_SLAB_QUAD; e++)
                if (masks[tile][lane] >> (8 * e + j) & 1)
                    places[count++] = (uint16_t)(macko_slab_row(lane, e) * MACKO_SLAB_COLS +
                                                 tile * MACKO_SLAB_TILE_COLS + macko_slab_col(lane, j, e));
    return count;
}

/* The masks of the slice whose first element is at (row, col). A row has a byte for each e and t: every eighth bit of
 * two. */
static void find_masks(const macko_tile_matrix *m, const void *w, int64_t row, int64_t col, slice_masks masks) {
    const int64_t rows = m->rows, cols = m->cols;
    macko_nonzeros *const nonzeros = macko_nonzeros_of(macko_best_cpu_path());
    memset(masks, 0, sizeof(slice_masks));
    for (int r = 0; r < min_int64(rows - row, SLICE_ROWS); r++)
        for (int tile = 0; tile < MACKO_SLAB_TILES && col + tile * MACKO_SLAB_TILE_COLS < cols; tile++) {
            const int64_t begin = col + tile * MACKO_SLAB_TILE_COLS;
            const uint64_t bits =
                nonzeros(w, MACKO_F16, (row + r) * cols + begin, min_int64(cols - begin, MACKO_SLAB_TILE_COLS));
            for (int pair = 0; pair < 8; pair++) { /* 2 t + e % 2 */
                const uint64_t groups = bits >> pair & 0x0101010101010101u;
                const uint32_t byte = (uint32_t)(groups * 0x0102040810204080u >> 56); /* a bit each, side by side */
                masks[tile][r % 8 * 4 + pair / 2] |= byte << 8 * (r / 8 * 2 + pair % 2);
            }
        }
}

/* The same, as the slab has them. */
static void load_masks(const uint8_t *slab, int slice, slice_masks masks) {
    for (int tile = 0; tile < MACKO_SLAB_TILES; tile++)
        memcpy(masks[tile], slab + tile * MACKO_SLAB_MASK_BYTES + slice * (MACKO_SLAB_LANES * 4), MACKO_SLAB_LANES * 4);
}

void macko_tile_count_cpu(const macko_tile_matrix *m, const uint16_t *w, int32_t *offsets, macko_slab_totals *totals) {
    for (int64_t slab = 0; slab < macko_slab_count(m->rows, m->cols); slab++) {
        const origin from = slab_origin(m->cols, slab);
        int value_rows = 0;
        for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++) {
            slice_masks masks;
            find_masks(m, w, from.row + slice * SLICE_ROWS, from.col, masks);
            value_rows += plan_slice(masks).rows;
            for (int i = 0; i < MACKO_SLAB_TILES * MACKO_SLAB_LANES; i++)
                totals->stored += __builtin_popcount(masks[i / MACKO_SLAB_LANES][i % MACKO_SLAB_LANES]);
        }
        offsets[slab + 1] = macko_tile_units(value_rows);
    }
}

void macko_tile_write_cpu(const macko_tile_matrix *m, const uint16_t *w, uint8_t *data) {
    for (int64_t slab = 0; slab < macko_slab_count(m->rows, m->cols); slab++) {
        const origin from = slab_origin(m->cols, slab);
        uint8_t *const begin = data + (int64_t)m->offsets[slab] * MACKO_SLAB_UNIT;
        int value_rows = 0;
        memset(begin, 0, (size_t)(m->offsets[slab + 1] - m->offsets[slab]) * MACKO_SLAB_UNIT);
        for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++) {
            const int64_t row = from.row + slice * SLICE_ROWS, col = from.col;
            uint8_t *const values = begin + MACKO_TILE_VALUES_AT + value_rows * MACKO_TILE_ROW_BYTES;
            slice_masks masks;
            find_masks(m, w, row, col, masks);
            const slice_plan plan = plan_slice(masks);
            for (int tile = 0; tile < MACKO_SLAB_TILES; tile++)
                memcpy(begin + tile * MACKO_SLAB_MASK_BYTES + slice * sizeof masks[tile], masks[tile],
                       sizeof masks[tile]);
            memcpy(begin + MACKO_TILE_SPILLS_AT + slice * sizeof plan.spills, plan.spills, sizeof plan.spills);
            store_16(begin + MACKO_TILE_SLICES_AT + slice * 2, value_rows);
            for (int i = 0; i < MACKO_SLAB_LANES * MACKO_TILE_STREAMS * 2; i++) {
                const int lane = i / 4, stream = i / 2 % 2, tail = i % 2;
                uint8_t *to = values + (tail ? plan.spills[lane][stream] : column_at(lane, stream));
                uint16_t places[HALF_MOST];
                const int count = elements_of(masks, lane, stream, tail, places);
                for (int k = 0; k < count; k++, to += MACKO_TILE_ROW_BYTES) {
                    const int64_t r = row + places[k] / MACKO_SLAB_COLS, c = col + places[k] % MACKO_SLAB_COLS;
                    store_16(to, w[r * m->cols + c]);
                }
            }
            value_rows += plan.rows;
        }
    }
}

void macko_tile_unpack_cpu(const macko_tile_matrix *m, int64_t first, int64_t count, uint16_t *w) {
    const int64_t slabs = macko_slabs_across(m->cols), stop = first + count;
    memset(w, 0, (size_t)(count * m->cols * 2));
    for (int64_t block = first / MACKO_SLAB_ROWS; block * MACKO_SLAB_ROWS < stop; block++)
        for (int64_t slab = 0; slab < slabs; slab++) {
            const uint8_t *const begin = m->data + (int64_t)m->offsets[block * slabs + slab] * MACKO_SLAB_UNIT;
            for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++) {
                const int64_t row = block * MACKO_SLAB_ROWS + slice * SLICE_ROWS, col = slab * MACKO_SLAB_COLS;
                if (row >= stop || row + SLICE_ROWS <= first) continue;
                const uint8_t *const values = begin + MACKO_TILE_VALUES_AT +
                                              load_16(begin + MACKO_TILE_SLICES_AT + slice * 2) * MACKO_TILE_ROW_BYTES;
                slice_masks masks;
                load_masks(begin, slice, masks);
                for (int i = 0; i < MACKO_SLAB_LANES * MACKO_TILE_STREAMS * 2; i++) {
                    const int lane = i / 4, stream = i / 2 % 2, tail = i % 2;
                    const uint8_t *spills =
                        begin + MACKO_TILE_SPILLS_AT + slice * (MACKO_SLAB_LANES * MACKO_TILE_STREAMS * 2);
                    const int at = column_at(lane, stream);
                    const uint8_t *from = values + (tail ? load_16(spills + at) : at);
                    uint16_t places[HALF_MOST];
                    const int found = elements_of(masks, lane, stream, tail, places);
                    for (int k = 0; k < found; k++, from += MACKO_TILE_ROW_BYTES) {
                        const int64_t r = row + places[k] / MACKO_SLAB_COLS, c = col + places[k] % MACKO_SLAB_COLS;
                        if (r >= first && r < stop) memcpy(w + (r - first) * m->cols + c, from, 2);
                    }
                }
            }
        }
}

/* The elements of the slab at (row, col) that are in the matrix have a bit here. */
static uint32_t inside(const macko_tile_matrix *m, int64_t row, int64_t col, int lane) {
    uint32_t mask = 0;
    for (int bit = 0; bit < 32; bit++)
        if (row + macko_slab_row(lane, bit / 8) < m->rows && col + macko_slab_col(lane, bit % 8, bit / 8) < m->cols)
            mask |= 1u << bit;
    return mask;
}

/* Of a slab whose bytes are there. found without a fault: its values. */
static macko_fault check_slab(const macko_tile_matrix *m, int64_t slab) {
    const int64_t slabs = macko_slabs_across(m->cols), block = slab / slabs;
    const int64_t row = block * MACKO_SLAB_ROWS, col = slab % slabs * MACKO_SLAB_COLS;
    const uint8_t *const begin = m->data + (int64_t)m->offsets[slab] * MACKO_SLAB_UNIT;
    slice_plan plans[MACKO_SLAB_SLICES];
    int slice_offsets[MACKO_SLAB_UNIT / 2] = {0}, value_rows = 0;
    if (row + MACKO_SLAB_ROWS > m->rows || col + MACKO_SLAB_COLS > m->cols)
        for (int word = 0; word < MACKO_TILE_SPILLS_AT / 4; word++) {
            const int lane = word % MACKO_SLAB_LANES, slice = word / MACKO_SLAB_LANES % MACKO_SLAB_SLICES;
            const int64_t c = col + word / (MACKO_SLAB_LANES * MACKO_SLAB_SLICES) * MACKO_SLAB_TILE_COLS;
            uint32_t mask;
            memcpy(&mask, begin + word * 4, sizeof mask);
            if (mask & ~inside(m, row + slice * SLICE_ROWS, c, lane))
                return (macko_fault){MACKO_TILE_OUTSIDE, block, slab, word};
        }
    for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++) {
        slice_masks masks;
        load_masks(begin, slice, masks);
        plans[slice] = plan_slice(masks);
        slice_offsets[slice] = value_rows;
        value_rows += plans[slice].rows;
    }
    if (m->offsets[slab + 1] - m->offsets[slab] != macko_tile_units(value_rows))
        return (macko_fault){MACKO_TILE_COUNT, block, slab, value_rows};
    for (int i = 0; i < MACKO_SLAB_UNIT / 2; i++) {
        const int byte = MACKO_TILE_SLICES_AT + i * 2;
        if (load_16(begin + byte) != slice_offsets[i]) return (macko_fault){MACKO_TILE_SLICE, block, slab, byte};
    }
    for (int i = 0; i < MACKO_SLAB_SLICES * MACKO_SLAB_LANES * MACKO_TILE_STREAMS; i++) {
        const int slice = i / (MACKO_SLAB_LANES * MACKO_TILE_STREAMS), lane = i / MACKO_TILE_STREAMS % MACKO_SLAB_LANES,
                  stream = i % MACKO_TILE_STREAMS;
        const int byte = MACKO_TILE_SPILLS_AT + i * 2;
        if (load_16(begin + byte) != plans[slice].spills[lane][stream])
            return (macko_fault){MACKO_TILE_SPILL, block, slab, byte};
    }
    int byte = MACKO_TILE_VALUES_AT, stored = 0;
    for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++)
        for (int i = 0; i < plans[slice].rows * MACKO_SLAB_LANES * MACKO_TILE_STREAMS; i++, byte += 2) {
            const int lane = i / MACKO_TILE_STREAMS % MACKO_SLAB_LANES, stream = i % MACKO_TILE_STREAMS;
            const int filled = i / (MACKO_SLAB_LANES * MACKO_TILE_STREAMS) < plans[slice].lengths[lane][stream];
            const uint16_t value = load_16(begin + byte);
            stored += filled;
            if (filled ? !(value & (SIGN - 1)) : value) return (macko_fault){MACKO_TILE_ZERO, block, slab, byte};
        }
    return (macko_fault){MACKO_TILE_OK, 0, -1, stored};
}

macko_fault macko_tile_check_cpu(const macko_tile_matrix *m) {
    macko_fault fault = check_offsets(m->offsets, m->rows, m->cols, macko_tile_units(0),
                                      macko_tile_units(MACKO_TILE_MOST_ROWS), m->widest, m->units, MACKO_TILE_OFFSETS);
    int64_t stored = 0;
    for (int64_t slab = 0; !fault.kind && slab < macko_slab_count(m->rows, m->cols); slab++) {
        fault = check_slab(m, slab);
        stored += fault.found;
    }
    return fault.kind ? fault : (macko_fault){MACKO_TILE_OK, 0, -1, stored};
}
