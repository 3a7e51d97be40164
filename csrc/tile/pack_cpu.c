/* The tile layout from dense rows, its dense rows, and its checks: the order of tile.h, element by element. */
#include "../core/cpu.h"
#include "tile.h"

enum { SIGN = 0x8000 };

static inline uint16_t load_16(const uint8_t *p) {
    uint16_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static inline uint32_t load_32(const uint8_t *p) {
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static inline int min_int64(int64_t a, int b) {
    return a < b ? (int)a : b;
}

void tile_count_cpu(const void *w, int64_t rows, int64_t cols, int64_t first, int64_t last, int32_t *offsets) {
    macko_nonzeros *const nonzeros = macko_nonzeros_of(macko_best_cpu_path());
    const int64_t col_blocks = tile_col_blocks(cols);
    for (int64_t tile = first * col_blocks; tile < last * col_blocks; tile++) {
        const int64_t row = tile / col_blocks * TILE_ROWS, col = tile % col_blocks * TILE_COLS;
        int values = 0;
        for (int r = 0; r < min_int64(rows - row, TILE_ROWS); r++)
            values +=
                __builtin_popcountll(nonzeros(w, MACKO_F16, (row + r) * cols + col, min_int64(cols - col, TILE_COLS)));
        offsets[tile + 1] = tile_units(values);
    }
}

void tile_write_cpu(const tile_matrix *m, const void *w, uint8_t *data, int64_t first, int64_t last) {
    const int64_t col_blocks = tile_col_blocks(m->cols);
    for (int64_t tile = first * col_blocks; tile < last * col_blocks; tile++) {
        uint8_t *const begin = data + (int64_t)m->offsets[tile] * TILE_UNIT;
        uint8_t *const end = data + (int64_t)m->offsets[tile + 1] * TILE_UNIT;
        uint8_t *to = begin + TILE_VALUES;
        for (int part = 0; part < TILE_PARTS; part++) {
            const int64_t row = tile / col_blocks * TILE_ROWS + part * (TILE_ROWS / TILE_PARTS);
            const int64_t col = tile % col_blocks * TILE_COLS;
            uint32_t masks[TILE_LANES] = {0};
            const uint16_t start = (uint16_t)(to - begin);
            memcpy(begin + TILE_STARTS + part * 2, &start, 2);
            for (int j = 0; j < TILE_GROUPS; j++)
                for (int lane = 0; lane < TILE_LANES; lane++)
                    for (int e = 0; e < TILE_QUAD; e++) {
                        const int64_t r = row + tile_row(lane, e), c = col + tile_col(lane, j, e);
                        if (r >= m->rows || c >= m->cols) continue;
                        const uint16_t value = ((const uint16_t *)w)[r * m->cols + c];
                        if (!(value & (SIGN - 1))) continue;
                        masks[lane] |= 1u << (8 * e + j);
                        memcpy(to, &value, 2);
                        to += 2;
                    }
            memcpy(begin + part * sizeof masks, masks, sizeof masks);
        }
        memset(to, 0, (size_t)(end - to));
    }
}

void tile_unpack_cpu(const tile_matrix *m, int64_t first, int64_t count, void *w) {
    const int64_t col_blocks = tile_col_blocks(m->cols), stop = first + count;
    memset(w, 0, (size_t)(count * m->cols * 2));
    for (int64_t block = first / TILE_ROWS; block * TILE_ROWS < stop; block++)
        for (int64_t col_block = 0; col_block < col_blocks; col_block++) {
            const uint8_t *const begin = m->data + (int64_t)m->offsets[block * col_blocks + col_block] * TILE_UNIT;
            for (int part = 0; part < TILE_PARTS; part++) {
                const int64_t row = block * TILE_ROWS + part * (TILE_ROWS / TILE_PARTS);
                if (row >= stop || row + TILE_ROWS / TILE_PARTS <= first) continue;
                const uint8_t *from = begin + load_16(begin + TILE_STARTS + part * 2);
                uint32_t masks[TILE_LANES];
                memcpy(masks, begin + part * sizeof masks, sizeof masks);
                for (int j = 0; j < TILE_GROUPS; j++)
                    for (int lane = 0; lane < TILE_LANES; lane++)
                        for (int e = 0; e < TILE_QUAD; e++) {
                            if (!(masks[lane] >> (8 * e + j) & 1)) continue;
                            const int64_t r = row + tile_row(lane, e);
                            const int64_t c = col_block * TILE_COLS + tile_col(lane, j, e);
                            if (r >= first && r < stop) memcpy((uint16_t *)w + (r - first) * m->cols + c, from, 2);
                            from += 2;
                        }
            }
        }
}

/* Of a tile whose bytes are there. */
static macko_fault check_tile(const tile_matrix *m, int64_t tile) {
    const int64_t col_blocks = tile_col_blocks(m->cols), block = tile / col_blocks;
    const uint8_t *const begin = m->data + (int64_t)m->offsets[tile] * TILE_UNIT;
    const int units = m->offsets[tile + 1] - m->offsets[tile];
    int values = 0, before = TILE_VALUES;
    for (int word = 0; word < TILE_PARTS * TILE_LANES; word++) values += __builtin_popcount(load_32(begin + word * 4));
    if (units != tile_units(values)) return (macko_fault){TILE_COUNT, block, tile, values};
    for (int part = 0; part < TILE_PARTS; part++) {
        const int start = load_16(begin + TILE_STARTS + part * 2);
        if (start != before) return (macko_fault){TILE_START, block, tile, start};
        for (int lane = 0; lane < TILE_LANES; lane++) {
            const uint32_t mask = load_32(begin + (part * TILE_LANES + lane) * 4);
            before += 2 * __builtin_popcount(mask);
            for (int bit = 0; bit < 32; bit++) {
                const int64_t row = block * TILE_ROWS + part * (TILE_ROWS / TILE_PARTS) + tile_row(lane, bit / 8);
                const int64_t col = tile % col_blocks * TILE_COLS + tile_col(lane, bit % 8, bit / 8);
                if ((mask >> bit & 1) && (row >= m->rows || col >= m->cols))
                    return (macko_fault){TILE_OUTSIDE, block, tile, part};
            }
        }
    }
    for (int byte = TILE_VALUES; byte < units * TILE_UNIT; byte += 2) {
        const uint16_t value = load_16(begin + byte);
        if (byte < before ? !(value & (SIGN - 1)) : value) return (macko_fault){TILE_ZERO, block, tile, byte};
    }
    return (macko_fault){TILE_OK, 0, -1, 0};
}

macko_fault tile_check_cpu(const tile_matrix *m, int64_t units) {
    const int64_t tiles = tile_count(m->rows, m->cols), per_block = tile_col_blocks(m->cols);
    int64_t widest = 0;
    if (m->offsets[0]) return (macko_fault){TILE_OFFSETS, 0, 0, m->offsets[0]};
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t here = (int64_t)m->offsets[tile + 1] - m->offsets[tile];
        if (here < tile_units(0) || here > tile_units(TILE_ROWS * TILE_COLS))
            return (macko_fault){TILE_OFFSETS, tile / per_block, tile + 1, m->offsets[tile + 1]};
        if (here > widest) widest = here;
    }
    if (widest != m->widest) return (macko_fault){TILE_WIDEST, 0, -1, widest};
    if (m->offsets[tiles] != units) return (macko_fault){TILE_END, 0, tiles, m->offsets[tiles]};
    for (int64_t tile = 0; tile < tiles; tile++) {
        const macko_fault fault = check_tile(m, tile);
        if (fault.kind) return fault;
    }
    return (macko_fault){TILE_OK, 0, -1, 0};
}
