/* What both packers share, so that both write the same bytes: pruning a group, sliding a row, filling its tiles. */
#pragma once

#include "slide.h"

MACKO_FN int macko_slide_is_zero(uint16_t code, macko_slide_type type) {
    const uint16_t no_sign = type == MACKO_SLIDE_S8 ? 0xff : type == MACKO_SLIDE_E4M3 ? 0x7f : 0x7fff;
    return !(code & no_sign);
}

/* Which two of its four columns a window keeps, and which of the two hold a value. `there`: its four non-zero bits. */
typedef struct macko_slide_taken {
    int index[2];
    int used[2];
} macko_slide_taken;

MACKO_FN macko_slide_taken macko_slide_take(unsigned there) {
    int index[4], count = 0;
    for (int i = 0; i < 4; i++)
        if (there >> i & 1) index[count++] = i;
    macko_slide_taken taken = {{0, 1}, {0, 0}};
    if (count >= 2) {
        taken.index[0] = index[0], taken.index[1] = index[1];
        taken.used[0] = taken.used[1] = 1;
    } else if (count == 1 && index[0] == 3) {
        taken.index[1] = 3;
        taken.used[1] = 1;
    } else if (count == 1) {
        taken.index[0] = index[0], taken.index[1] = 3;
        taken.used[0] = 1;
    }
    return taken;
}

MACKO_FN unsigned macko_slide_nonzeros(const uint16_t *group, int n, macko_slide_type type) {
    unsigned mask = 0;
    for (int i = 0; i < 2 * n; i++) mask |= (unsigned)!macko_slide_is_zero(group[i], type) << i;
    return mask;
}

MACKO_FN void macko_slide_put(uint8_t *tile, int offset, uint16_t code, int bytes) {
    tile[offset] = (uint8_t)code;
    if (bytes == 2) tile[offset + 1] = (uint8_t)(code >> 8);
}

/* Writes row `row` of tile `k_tile` from the codes of the row, which are zero up to a whole number of groups. */
MACKO_FN void macko_slide_fill_tile(const uint16_t *codes, int64_t cols, int n, macko_slide_type type, int row,
                                    int64_t k_tile, uint8_t *tile) {
    const int bytes = macko_slide_element_bytes(type), tile_cols = MACKO_SLIDE_TILE_BYTES / bytes;
    if (!n) {
        for (int i = 0; i < tile_cols; i++) {
            const int64_t col = k_tile * tile_cols + i;
            const uint16_t code = col < cols && !macko_slide_is_zero(codes[col], type) ? codes[col] : 0;
            macko_slide_put(tile, macko_slide_value_offset(n, row, i * bytes), code, bytes);
        }
        return;
    }
    const int64_t windows = macko_slide_groups(cols, n) * (n - 1), first = k_tile * (tile_cols / 4);
    const int64_t start = first / (n - 1) * (n - 1); /* of its group: what earlier windows took has to be known */
    unsigned left = 0, pair = 0;
    for (int64_t v = start; v < first + tile_cols / 4; v++) {
        const int w = (int)(v % (n - 1));
        if (w == 0) left = v < windows ? macko_slide_nonzeros(codes + macko_slide_column(v, n), n, type) : 0;
        const macko_slide_taken taken = macko_slide_take(left >> 2 * w & 15);
        for (int i = 0; i < 2; i++)
            if (taken.used[i]) left &= ~(1u << (2 * w + taken.index[i]));
        if (v < first) continue;
        const int in_tile = (int)(v - first);
        for (int i = 0; i < 2; i++) {
            const uint16_t code = taken.used[i] ? codes[macko_slide_column(v, n) + taken.index[i]] : 0;
            macko_slide_put(tile, macko_slide_value_offset(n, row, (2 * in_tile + i) * bytes), code, bytes);
        }
        pair |= (unsigned)(taken.index[0] | taken.index[1] << 2) << 4 * (in_tile & 1);
        if (in_tile & 1) {
            tile[macko_slide_meta_offset(type, row, in_tile - 1)] = (uint8_t)pair;
            pair = 0;
        }
    }
}

/* The inverse: codes of one row from one of its tiles, each non-zero to its column where that lies inside the matrix. */
MACKO_FN void macko_slide_read_tile(const uint8_t *tile, int64_t cols, int n, macko_slide_type type, int row,
                                    int64_t k_tile, void *codes) {
    const int bytes = macko_slide_element_bytes(type), tile_cols = MACKO_SLIDE_TILE_BYTES / bytes;
    for (int i = 0; i < (n ? tile_cols / 2 : tile_cols); i++) {
        const uint8_t *from = tile + macko_slide_value_offset(n, row, i * bytes);
        const uint16_t code = bytes == 2 ? (uint16_t)(from[0] | from[1] << 8) : from[0];
        int64_t col = k_tile * tile_cols + i;
        if (n) {
            const int window = i / 2;
            const int pair = tile[macko_slide_meta_offset(type, row, window & ~1)];
            col = macko_slide_column(k_tile * (tile_cols / 4) + window, n) +
                  (pair >> (4 * (window & 1) + 2 * (i & 1)) & 3);
        }
        if (col >= cols || macko_slide_is_zero(code, type)) continue;
        if (bytes == 2)
            ((uint16_t *)codes)[col] = code;
        else
            ((uint8_t *)codes)[col] = (uint8_t)code;
    }
}
