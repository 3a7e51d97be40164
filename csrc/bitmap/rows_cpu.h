/* What the bitmap layout's CPU functions know of a row. */
#pragma once

#include <string.h>

#include "bitmap.h"

static inline uint64_t macko_bitmap_word(const uint8_t *bits, int64_t word) {
    uint64_t mask;
    memcpy(&mask, bits + word * 8, 8);
    return mask;
}

/*
 * Whether the row can be read without a look at its other bits first: it cannot reach past the values whatever they say,
 * and has none after the last column. Whether they are as many as row_ptr says is clear once it has been read.
 */
static inline int macko_bitmap_row_is_safe(const macko_bitmap *m, int64_t row) {
    const int64_t words = macko_bitmap_words(m->cols), start = m->row_ptr[row], used = m->cols % MACKO_BITMAP_WORD;
    if (start < 0 || (row == 0 && start)) return 0;
    if (start + words * MACKO_BITMAP_WORD + MACKO_BITMAP_PAD > m->capacity) return 0;
    return !used || !(macko_bitmap_word(m->bits, row * words + words - 1) >> used);
}
