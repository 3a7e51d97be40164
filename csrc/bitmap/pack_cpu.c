/* The bitmap layout from the macko format, its checks, and its rows as dense ones. */
#include "../core/cpu.h"
#include "../macko/entries_cpu.h"
#include "rows_cpu.h"

void macko_bitmap_count_cpu(const macko_matrix *m, int64_t begin, int64_t end, int64_t *counts) {
    macko_nonzeros *const nonzeros = macko_nonzeros_of(macko_best_cpu_path());
    for (int64_t row = begin; row < end; row++) {
        const int64_t stop = m->row_ptr[row + 1];
        counts[row] = 0;
        for (int64_t entry = m->row_ptr[row]; entry < stop; entry += MACKO_BLOCK) {
            const int count = (int)(stop - entry < MACKO_BLOCK ? stop - entry : MACKO_BLOCK);
            counts[row] += __builtin_popcountll(nonzeros(m->values, m->dtype, entry, count));
        }
    }
}

void macko_bitmap_pack_cpu(const macko_matrix *m, int64_t begin, int64_t end, const int32_t *row_ptr, void *values,
                           uint8_t *bits) {
    macko_nonzeros *const nonzeros = macko_nonzeros_of(macko_best_cpu_path());
    const int64_t row_bytes = macko_bitmap_words(m->cols) * 8;
    for (int64_t row = begin; row < end; row++) {
        const int64_t stop = m->row_ptr[row + 1];
        int64_t to = row_ptr[row], next = 0, at = 0; /* at: the word that is being collected */
        uint64_t word = 0;
        for (int64_t block = m->row_ptr[row]; block < stop; block += MACKO_BLOCK) {
            const int count = (int)(stop - block < MACKO_BLOCK ? stop - block : MACKO_BLOCK);
            const uint64_t kept = nonzeros(m->values, m->dtype, block, count);
            for (int i = 0; i < count; i++) {
                const int64_t col = next + macko_delta_at(m->deltas, m->delta_bits, block + i);
                next = col + 1;
                if (col / MACKO_BITMAP_WORD != at) {
                    memcpy(bits + row * row_bytes + at * 8, &word, 8);
                    at = col / MACKO_BITMAP_WORD;
                    word = 0;
                }
                word |= (kept >> i & 1) << col % MACKO_BITMAP_WORD;
            }
            for (uint64_t left = kept; left; left &= left - 1)
                macko_copy(values, m->dtype, to++, m->values, block + __builtin_ctzll(left));
        }
        if (row_bytes) memcpy(bits + row * row_bytes + at * 8, &word, 8);
    }
}

macko_fault macko_bitmap_entries_cpu(const macko_bitmap *m, int delta_bits, int64_t begin, int64_t end,
                                     int64_t *counts) {
    const int64_t words = macko_bitmap_words(m->cols);
    for (int64_t row = begin; row < end; row++) {
        const macko_fault fault = macko_bitmap_check_bounds_cpu(m, row, row + 1);
        if (fault.kind) return fault;
        int64_t next = 0;
        counts[row] = 0;
        for (int64_t word = 0; word < words; word++)
            counts[row] += macko_block_entries(macko_bitmap_word(m->bits, row * words + word), word * MACKO_BITMAP_WORD,
                                               delta_bits, &next);
    }
    return (macko_fault){MACKO_BITMAP_OK, 0, -1, 0};
}

macko_fault macko_bitmap_check_bounds_cpu(const macko_bitmap *m, int64_t begin, int64_t end) {
    const int64_t words = macko_bitmap_words(m->cols);
    for (int64_t row = begin; row < end; row++) {
        const int64_t start = m->row_ptr[row], stop = m->row_ptr[row + 1];
        if (start < 0 || (row == 0 && start)) return (macko_fault){MACKO_BITMAP_ROW_PTR, row, -1, start};
        if (stop < start || stop > m->capacity - MACKO_BITMAP_PAD)
            return (macko_fault){MACKO_BITMAP_ROW_PTR, row + 1, -1, stop};
        int64_t count = 0;
        for (int64_t word = 0; word < words; word++)
            count += __builtin_popcountll(macko_bitmap_word(m->bits, row * words + word));
        if (count != stop - start) return (macko_fault){MACKO_BITMAP_COUNT, row, -1, count};
        if (m->cols % MACKO_BITMAP_WORD) {
            const uint64_t outside =
                macko_bitmap_word(m->bits, row * words + words - 1) >> (m->cols % MACKO_BITMAP_WORD);
            if (outside) return (macko_fault){MACKO_BITMAP_COLUMN, row, -1, m->cols + __builtin_ctzll(outside)};
        }
    }
    return (macko_fault){MACKO_BITMAP_OK, 0, -1, 0};
}

macko_fault macko_bitmap_check_cpu(const macko_bitmap *m, int64_t begin, int64_t end) {
    macko_nonzeros *const nonzeros = macko_nonzeros_of(macko_best_cpu_path());
    for (int64_t row = begin; row < end; row++) {
        const macko_fault fault = macko_bitmap_check_bounds_cpu(m, row, row + 1);
        if (fault.kind) return fault;
        const int64_t stop = m->row_ptr[row + 1];
        for (int64_t entry = m->row_ptr[row]; entry < stop; entry += MACKO_BLOCK) {
            const int count = (int)(stop - entry < MACKO_BLOCK ? stop - entry : MACKO_BLOCK);
            const uint64_t zeros = ~nonzeros(m->values, m->dtype, entry, count) & ~0ull >> (MACKO_BLOCK - count);
            if (zeros) return (macko_fault){MACKO_BITMAP_ZERO, row, entry + __builtin_ctzll(zeros), 0};
        }
    }
    if (begin == m->rows) {
        const int64_t stored = m->row_ptr[m->rows];
        if (stored < 0 || stored != m->capacity - MACKO_BITMAP_PAD)
            return (macko_fault){MACKO_BITMAP_CAPACITY, m->rows, -1, stored};
        const int64_t size = m->dtype == MACKO_F32 ? 4 : 2;
        for (int64_t byte = stored * size; byte < m->capacity * size; byte++)
            if (((const uint8_t *)m->values)[byte])
                return (macko_fault){MACKO_BITMAP_PADDING, m->rows, byte / size, ((const uint8_t *)m->values)[byte]};
    }
    return (macko_fault){MACKO_BITMAP_OK, 0, -1, 0};
}

/* Columns [col, cols) of a row whose mask starts at bits, into w, from values[at] on. Returns the next `at`. */
static int64_t expand_scalar(const macko_bitmap *m, const uint8_t *bits, int64_t col, int64_t at, void *w) {
    const int64_t size = m->dtype == MACKO_F32 ? 4 : 2;
    memset((char *)w + col * size, 0, (size_t)((m->cols - col) * size));
    for (; col < m->cols; col += MACKO_BITMAP_WORD)
        for (uint64_t mask = macko_bitmap_word(bits, col / MACKO_BITMAP_WORD); mask; mask &= mask - 1)
            macko_copy(w, m->dtype, col + __builtin_ctzll(mask), m->values, at++);
    return at;
}

#if MACKO_X86
static MACKO_TARGET_AVX512 int64_t expand_avx512(const macko_bitmap *m, const uint8_t *bits, int64_t at, void *w) {
    int64_t col = 0;
    for (; col + MACKO_BITMAP_WORD <= m->cols; col += MACKO_BITMAP_WORD) {
        const uint64_t mask = macko_bitmap_word(bits, col / MACKO_BITMAP_WORD);
        if (m->dtype == MACKO_F32) {
            for (int i = 0; i < MACKO_BITMAP_WORD; i += 16) {
                const __m512i v = macko_load_512((const uint32_t *)m->values + at);
                _mm512_storeu_si512((uint32_t *)w + col + i, _mm512_maskz_expand_epi32((__mmask16)(mask >> i), v));
                at += __builtin_popcount((uint16_t)(mask >> i));
            }
        } else {
            for (int i = 0; i < MACKO_BITMAP_WORD; i += 32) {
                const __m512i v = macko_load_512((const uint16_t *)m->values + at);
                _mm512_storeu_si512((uint16_t *)w + col + i, _mm512_maskz_expand_epi16((__mmask32)(mask >> i), v));
                at += __builtin_popcount((uint32_t)(mask >> i));
            }
        }
    }
    return expand_scalar(m, bits, col, at, w);
}
#endif

macko_fault macko_bitmap_expand_cpu(const macko_bitmap *m, int64_t begin, int64_t end, void *w) {
    const macko_cpu_path path = macko_best_cpu_path();
    const int64_t row_bytes = macko_bitmap_words(m->cols) * 8, size = m->dtype == MACKO_F32 ? 4 : 2;
    for (int64_t row = begin; row < end; row++) {
        if (!macko_bitmap_row_is_safe(m, row)) {
            const macko_fault fault = macko_bitmap_check_bounds_cpu(m, row, row + 1);
            if (fault.kind) return fault;
        }
        const uint8_t *bits = m->bits + row * row_bytes;
        void *to = (char *)w + (row - begin) * m->cols * size;
        int64_t end;
#if MACKO_X86
        if (path == MACKO_AVX512)
            end = expand_avx512(m, bits, m->row_ptr[row], to);
        else
#endif
            end = expand_scalar(m, bits, 0, m->row_ptr[row], to);
        (void)path;
        if (end != m->row_ptr[row + 1]) return macko_bitmap_check_bounds_cpu(m, row, row + 1);
    }
    return (macko_fault){MACKO_BITMAP_OK, 0, -1, 0};
}
