/* The tile layout from dense rows, its dense rows, and its checks: the order of tile.h. */
#include "../core/cpu.h"
#include "tile.h"

enum {
    SIGN = 0x8000,
    PART_ROWS = TILE_ROWS / TILE_PARTS,
    HALF_GROUPS = TILE_GROUPS / TILE_HALVES,
    HALF_TILES = TILE_STRIP / 2,
    HALF_MOST = HALF_TILES * HALF_GROUPS * TILE_QUAD, /* values of half a stream */
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

static inline int min_int64(int64_t a, int b) {
    return a < b ? (int)a : b;
}

/* Of a part of a strip. */
typedef uint32_t part_masks[TILE_STRIP][TILE_LANES];

/* What a part's masks say of its values: [lane][half]. */
typedef struct part_plan {
    uint16_t turns[TILE_LANES][TILE_HALVES];
    uint8_t lengths[TILE_LANES][TILE_HALVES]; /* of columns */
    int rows;
} part_plan;

/* Byte of the part's values where a column begins. */
static inline int column_at(int lane, int half) {
    return (lane * TILE_HALVES + half) * 2;
}

/* Length of half a stream, the second one or the first. */
static int length_of(part_masks masks, int lane, int half, int second) {
    const uint32_t own = (uint32_t)TILE_HALF_BITS << HALF_GROUPS * half;
    int length = 0;
    for (int tile = 0; tile < HALF_TILES; tile++)
        length += __builtin_popcount(masks[second * HALF_TILES + tile][lane] & own);
    return length;
}

/* Lanes by length, the shortest first, of equal ones the lower lane first. */
static void sort_lanes(const int lengths[TILE_LANES], uint8_t sorted[TILE_LANES]) {
    int places[HALF_MOST + 2] = {0};
    for (int lane = 0; lane < TILE_LANES; lane++) places[lengths[lane] + 1]++;
    for (int length = 0; length < HALF_MOST; length++) places[length + 1] += places[length];
    for (int lane = 0; lane < TILE_LANES; lane++) sorted[places[lengths[lane]]++] = (uint8_t)lane;
}

static part_plan plan_part(part_masks masks) {
    part_plan plan = {.rows = 0};
    for (int half = 0; half < TILE_HALVES; half++) {
        int first[TILE_LANES], missing[TILE_LANES]; /* from the second half */
        uint8_t columns[TILE_LANES], lanes[TILE_LANES];
        for (int lane = 0; lane < TILE_LANES; lane++) {
            first[lane] = length_of(masks, lane, half, 0);
            missing[lane] = HALF_MOST - length_of(masks, lane, half, 1);
        }
        sort_lanes(first, columns);
        sort_lanes(missing, lanes);
        for (int i = 0; i < TILE_LANES; i++) {
            const int column = columns[i], lane = lanes[i], length = first[column] + HALF_MOST - missing[lane];
            plan.turns[lane][half] = (uint16_t)(first[column] * TILE_ROW_BYTES + column_at(column, half));
            plan.lengths[column][half] = (uint8_t)length;
            if (length > plan.rows) plan.rows = length;
        }
    }
    return plan;
}

/* Of half a stream's values, in its order: element of the dense part [PART_ROWS, TILE_STRIP_COLS]. Returns how many. */
static int places_of(part_masks masks, int lane, int half, int second, uint16_t places[HALF_MOST]) {
    int count = 0;
    for (int tile = second * HALF_TILES; tile < (second + 1) * HALF_TILES; tile++)
        for (int j = half * HALF_GROUPS; j < (half + 1) * HALF_GROUPS; j++)
            for (int e = 0; e < TILE_QUAD; e++)
                if (masks[tile][lane] >> (8 * e + j) & 1)
                    places[count++] =
                        (uint16_t)(tile_row(lane, e) * TILE_STRIP_COLS + tile * TILE_COLS + tile_col(lane, j, e));
    return count;
}

/* The masks of the part whose first element is at (row, col). A row has a byte for each e and t: every eighth bit of two. */
static void find_masks(const void *w, int64_t rows, int64_t cols, int64_t row, int64_t col, part_masks masks) {
    macko_nonzeros *const nonzeros = macko_nonzeros_of(macko_best_cpu_path());
    memset(masks, 0, sizeof(part_masks));
    for (int r = 0; r < min_int64(rows - row, PART_ROWS); r++)
        for (int tile = 0; tile < TILE_STRIP && col + tile * TILE_COLS < cols; tile++) {
            const int64_t begin = col + tile * TILE_COLS;
            const uint64_t bits = nonzeros(w, MACKO_F16, (row + r) * cols + begin, min_int64(cols - begin, TILE_COLS));
            for (int pair = 0; pair < 8; pair++) { /* 2 t + e % 2 */
                const uint64_t groups = bits >> pair & 0x0101010101010101u;
                const uint32_t byte = (uint32_t)(groups * 0x0102040810204080u >> 56); /* a bit each, side by side */
                masks[tile][r % 8 * 4 + pair / 2] |= byte << 8 * (r / 8 * 2 + pair % 2);
            }
        }
}

/* The same of a strip. */
static void load_masks(const uint8_t *strip, int part, part_masks masks) {
    for (int tile = 0; tile < TILE_STRIP; tile++)
        memcpy(masks[tile], strip + tile * TILE_MASK_BYTES + part * (TILE_LANES * 4), TILE_LANES * 4);
}

void tile_count_cpu(const void *w, int64_t rows, int64_t cols, int64_t first, int64_t last, int32_t *offsets) {
    const int64_t strips = tile_strips(cols);
    for (int64_t strip = first * strips; strip < last * strips; strip++) {
        int value_rows = 0;
        for (int part = 0; part < TILE_PARTS; part++) {
            part_masks masks;
            find_masks(w, rows, cols, strip / strips * TILE_ROWS + part * PART_ROWS, strip % strips * TILE_STRIP_COLS,
                       masks);
            value_rows += plan_part(masks).rows;
        }
        offsets[strip + 1] = tile_units(value_rows);
    }
}

void tile_write_cpu(const tile_matrix *m, const void *w, uint8_t *data, int64_t first, int64_t last) {
    const int64_t strips = tile_strips(m->cols);
    for (int64_t strip = first * strips; strip < last * strips; strip++) {
        uint8_t *const begin = data + (int64_t)m->offsets[strip] * TILE_UNIT;
        int value_rows = 0;
        memset(begin, 0, (size_t)(m->offsets[strip + 1] - m->offsets[strip]) * TILE_UNIT);
        for (int part = 0; part < TILE_PARTS; part++) {
            const int64_t row = strip / strips * TILE_ROWS + part * PART_ROWS;
            const int64_t col = strip % strips * TILE_STRIP_COLS;
            uint8_t *const values = begin + TILE_VALUES + value_rows * TILE_ROW_BYTES;
            part_masks masks;
            find_masks(w, m->rows, m->cols, row, col, masks);
            const part_plan plan = plan_part(masks);
            for (int tile = 0; tile < TILE_STRIP; tile++)
                memcpy(begin + tile * TILE_MASK_BYTES + part * sizeof masks[tile], masks[tile], sizeof masks[tile]);
            memcpy(begin + TILE_TURNS + part * sizeof plan.turns, plan.turns, sizeof plan.turns);
            store_16(begin + TILE_FIRSTS + part * 2, value_rows);
            for (int i = 0; i < TILE_LANES * TILE_HALVES * 2; i++) {
                const int lane = i / 4, half = i / 2 % 2, second = i % 2;
                uint8_t *to = values + (second ? plan.turns[lane][half] : column_at(lane, half));
                uint16_t places[HALF_MOST];
                const int count = places_of(masks, lane, half, second, places);
                for (int k = 0; k < count; k++, to += TILE_ROW_BYTES) {
                    const int64_t r = row + places[k] / TILE_STRIP_COLS, c = col + places[k] % TILE_STRIP_COLS;
                    store_16(to, ((const uint16_t *)w)[r * m->cols + c]);
                }
            }
            value_rows += plan.rows;
        }
    }
}

void tile_unpack_cpu(const tile_matrix *m, int64_t first, int64_t count, void *w) {
    const int64_t strips = tile_strips(m->cols), stop = first + count;
    memset(w, 0, (size_t)(count * m->cols * 2));
    for (int64_t block = first / TILE_ROWS; block * TILE_ROWS < stop; block++)
        for (int64_t strip = 0; strip < strips; strip++) {
            const uint8_t *const begin = m->data + (int64_t)m->offsets[block * strips + strip] * TILE_UNIT;
            for (int part = 0; part < TILE_PARTS; part++) {
                const int64_t row = block * TILE_ROWS + part * PART_ROWS, col = strip * TILE_STRIP_COLS;
                if (row >= stop || row + PART_ROWS <= first) continue;
                const uint8_t *const values =
                    begin + TILE_VALUES + load_16(begin + TILE_FIRSTS + part * 2) * TILE_ROW_BYTES;
                part_masks masks;
                load_masks(begin, part, masks);
                for (int i = 0; i < TILE_LANES * TILE_HALVES * 2; i++) {
                    const int lane = i / 4, half = i / 2 % 2, second = i % 2;
                    const uint8_t *turn = begin + TILE_TURNS + part * (TILE_LANES * TILE_HALVES * 2);
                    const int at = column_at(lane, half);
                    const uint8_t *from = values + (second ? load_16(turn + at) : at);
                    uint16_t places[HALF_MOST];
                    const int found = places_of(masks, lane, half, second, places);
                    for (int k = 0; k < found; k++, from += TILE_ROW_BYTES) {
                        const int64_t r = row + places[k] / TILE_STRIP_COLS, c = col + places[k] % TILE_STRIP_COLS;
                        if (r >= first && r < stop) memcpy((uint16_t *)w + (r - first) * m->cols + c, from, 2);
                    }
                }
            }
        }
}

/* The elements of the strip at (row, col) that are in the matrix have a bit here. */
static uint32_t inside(const tile_matrix *m, int64_t row, int64_t col, int lane) {
    uint32_t mask = 0;
    for (int bit = 0; bit < 32; bit++)
        if (row + tile_row(lane, bit / 8) < m->rows && col + tile_col(lane, bit % 8, bit / 8) < m->cols)
            mask |= 1u << bit;
    return mask;
}

/* Of a strip whose bytes are there. found without a fault: its values. */
static macko_fault check_strip(const tile_matrix *m, int64_t strip) {
    const int64_t strips = tile_strips(m->cols), block = strip / strips;
    const int64_t row = block * TILE_ROWS, col = strip % strips * TILE_STRIP_COLS;
    const uint8_t *const begin = m->data + (int64_t)m->offsets[strip] * TILE_UNIT;
    part_plan plans[TILE_PARTS];
    int firsts[TILE_UNIT / 2] = {0}, value_rows = 0;
    if (row + TILE_ROWS > m->rows || col + TILE_STRIP_COLS > m->cols)
        for (int word = 0; word < TILE_TURNS / 4; word++) {
            const int lane = word % TILE_LANES, part = word / TILE_LANES % TILE_PARTS;
            const int64_t c = col + word / (TILE_LANES * TILE_PARTS) * TILE_COLS;
            uint32_t mask;
            memcpy(&mask, begin + word * 4, sizeof mask);
            if (mask & ~inside(m, row + part * PART_ROWS, c, lane))
                return (macko_fault){TILE_OUTSIDE, block, strip, word};
        }
    for (int part = 0; part < TILE_PARTS; part++) {
        part_masks masks;
        load_masks(begin, part, masks);
        plans[part] = plan_part(masks);
        firsts[part] = value_rows;
        value_rows += plans[part].rows;
    }
    if (m->offsets[strip + 1] - m->offsets[strip] != tile_units(value_rows))
        return (macko_fault){TILE_COUNT, block, strip, value_rows};
    for (int i = 0; i < TILE_UNIT / 2; i++) {
        const int byte = TILE_FIRSTS + i * 2;
        if (load_16(begin + byte) != firsts[i]) return (macko_fault){TILE_FIRST, block, strip, byte};
    }
    for (int i = 0; i < TILE_PARTS * TILE_LANES * TILE_HALVES; i++) {
        const int part = i / (TILE_LANES * TILE_HALVES), lane = i / TILE_HALVES % TILE_LANES, half = i % TILE_HALVES;
        const int byte = TILE_TURNS + i * 2;
        if (load_16(begin + byte) != plans[part].turns[lane][half]) return (macko_fault){TILE_TURN, block, strip, byte};
    }
    int byte = TILE_VALUES, stored = 0;
    for (int part = 0; part < TILE_PARTS; part++)
        for (int i = 0; i < plans[part].rows * TILE_LANES * TILE_HALVES; i++, byte += 2) {
            const int lane = i / TILE_HALVES % TILE_LANES, half = i % TILE_HALVES;
            const int filled = i / (TILE_LANES * TILE_HALVES) < plans[part].lengths[lane][half];
            const uint16_t value = load_16(begin + byte);
            stored += filled;
            if (filled ? !(value & (SIGN - 1)) : value) return (macko_fault){TILE_ZERO, block, strip, byte};
        }
    return (macko_fault){TILE_OK, 0, -1, stored};
}

macko_fault tile_check_cpu(const tile_matrix *m, int64_t units) {
    const int64_t count = tile_count(m->rows, m->cols), strips = tile_strips(m->cols);
    int64_t widest = 0;
    if (m->offsets[0]) return (macko_fault){TILE_OFFSETS, 0, 0, m->offsets[0]};
    for (int64_t strip = 0; strip < count; strip++) {
        const int64_t here = (int64_t)m->offsets[strip + 1] - m->offsets[strip];
        if (here < tile_units(0) || here > tile_units(TILE_MOST_ROWS))
            return (macko_fault){TILE_OFFSETS, strip / strips, strip + 1, m->offsets[strip + 1]};
        if (here > widest) widest = here;
    }
    if (widest != m->widest) return (macko_fault){TILE_WIDEST, 0, -1, widest};
    if (m->offsets[count] != units) return (macko_fault){TILE_END, 0, count, m->offsets[count]};
    int64_t stored = 0;
    for (int64_t strip = 0; strip < count; strip++) {
        const macko_fault fault = check_strip(m, strip);
        if (fault.kind) return fault;
        stored += fault.found;
    }
    return (macko_fault){TILE_OK, 0, -1, stored};
}
