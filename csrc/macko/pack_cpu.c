/* pack, unpack and the checks of the macko format on the CPU. */
#include <string.h>

#include "../core/cpu.h"
#include "macko.h"

static inline int is_zero(const void *w, macko_dtype dtype, int64_t i) {
    if (dtype == MACKO_F32) return (((const uint32_t *)w)[i] & 0x7fffffffu) == 0;
    return (((const uint16_t *)w)[i] & 0x7fff) == 0;
}

void macko_pack_count_cpu(const void *w, macko_dtype dtype, int delta_bits, int64_t cols, int64_t begin, int64_t end,
                          int64_t *counts) {
    for (int64_t row = begin; row < end; row++) {
        int64_t count = 0, next = 0; /* next: the column behind the previous entry */
        for (int64_t col = 0; col < cols; col++) {
            if (is_zero(w, dtype, row * cols + col)) continue;
            count += 1 + ((col - next) >> delta_bits);
            next = col + 1;
        }
        counts[row] = count;
    }
}

static inline void put_value(void *values, macko_dtype dtype, int64_t entry, const void *w, int64_t i) {
    if (dtype == MACKO_F32)
        ((uint32_t *)values)[entry] = w ? ((const uint32_t *)w)[i] : 0;
    else
        ((uint16_t *)values)[entry] = w ? ((const uint16_t *)w)[i] : 0;
}

/* Two rows, so two threads, can share a byte: each sets its own bits of the zeroed array. */
static inline void put_delta(uint8_t *deltas, int delta_bits, int64_t entry, int64_t delta) {
    const int64_t bit = entry * delta_bits;
    if (delta) __atomic_fetch_or(&deltas[bit >> 3], (uint8_t)(delta << (bit & 7)), __ATOMIC_RELAXED);
}

void macko_pack_write_cpu(const void *w, macko_dtype dtype, int delta_bits, int64_t cols, int64_t begin, int64_t end,
                          const int32_t *row_ptr, void *values, uint8_t *deltas) {
    const int64_t delta_max = (1 << delta_bits) - 1;
    for (int64_t row = begin; row < end; row++) {
        int64_t entry = row_ptr[row], next = 0;
        for (int64_t col = 0; col < cols; col++) {
            if (is_zero(w, dtype, row * cols + col)) continue;
            for (; col - next > delta_max; next += delta_max + 1, entry++) {
                put_value(values, dtype, entry, NULL, 0);
                put_delta(deltas, delta_bits, entry, delta_max);
            }
            put_value(values, dtype, entry, w, row * cols + col);
            put_delta(deltas, delta_bits, entry, col - next);
            next = col + 1;
            entry++;
        }
    }
}

static inline int delta_at(const macko_matrix *m, int64_t entry) {
    const int64_t bit = entry * m->delta_bits;
    return m->deltas[bit >> 3] >> (bit & 7) & ((1 << m->delta_bits) - 1);
}

static macko_fault check_row_ptr(const macko_matrix *m, int64_t row) {
    const int64_t start = m->row_ptr[row], stop = m->row_ptr[row + 1];
    if (row == 0 && start != 0) return (macko_fault){MACKO_ROW_PTR_START, 0, -1, start};
    if (stop < start) return (macko_fault){MACKO_ROW_PTR_FALLS, row + 1, -1, stop};
    if (stop > m->capacity) return (macko_fault){MACKO_ROW_PTR_END, row + 1, -1, stop};
    return (macko_fault){MACKO_OK, 0, -1, 0};
}

macko_fault macko_check_bounds_cpu(const macko_matrix *m, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const macko_fault fault = check_row_ptr(m, row);
        if (fault.kind) return fault;
        int64_t next = 0;
        for (int64_t entry = m->row_ptr[row]; entry < m->row_ptr[row + 1]; entry++) {
            next += delta_at(m, entry) + 1;
            if (next > m->cols) return (macko_fault){MACKO_COLUMN_END, row, entry, next - 1};
        }
    }
    return (macko_fault){MACKO_OK, 0, -1, 0};
}

macko_fault macko_check_cpu(const macko_matrix *m, int64_t begin, int64_t end) {
    const macko_fault bounds = macko_check_bounds_cpu(m, begin, end);
    if (bounds.kind) return bounds;
    for (int64_t row = begin; row < end; row++) {
        for (int64_t entry = m->row_ptr[row]; entry < m->row_ptr[row + 1]; entry++) {
            if (!is_zero(m->values, m->dtype, entry)) continue;
            const int last = entry + 1 == m->row_ptr[row + 1];
            const int negative = m->dtype == MACKO_F32 ? ((const uint32_t *)m->values)[entry] != 0
                                                       : ((const uint16_t *)m->values)[entry] != 0;
            if (delta_at(m, entry) != (1 << m->delta_bits) - 1 || last || negative)
                return (macko_fault){MACKO_STRAY_ZERO, row, entry, delta_at(m, entry)};
        }
    }
    if (begin == m->rows) {
        const int64_t stored = m->row_ptr[m->rows];
        if (m->capacity != (stored + MACKO_CHUNK - 1) / MACKO_CHUNK * MACKO_CHUNK)
            return (macko_fault){MACKO_ROW_PTR_END, m->rows, -1, stored};
        for (int64_t entry = stored; entry < m->capacity; entry++) {
            const int64_t bits = m->dtype == MACKO_F32 ? ((const uint32_t *)m->values)[entry]
                                                       : ((const uint16_t *)m->values)[entry];
            if (bits || delta_at(m, entry))
                return (macko_fault){MACKO_PADDING, m->rows, entry, bits ? bits : delta_at(m, entry)};
        }
    }
    return bounds;
}

void macko_unpack_cpu(const macko_matrix *m, int64_t begin, int64_t end, void *w) {
    const int64_t size = m->dtype == MACKO_F32 ? 4 : 2;
    memset((char *)w + begin * m->cols * size, 0, (size_t)((end - begin) * m->cols * size));
    for (int64_t row = begin; row < end; row++) {
        int64_t i = row * m->cols - 1;
        for (int64_t entry = m->row_ptr[row]; entry < m->row_ptr[row + 1]; entry++) {
            i += delta_at(m, entry) + 1;
            if (m->dtype == MACKO_F32)
                ((uint32_t *)w)[i] = ((const uint32_t *)m->values)[entry];
            else
                ((uint16_t *)w)[i] = ((const uint16_t *)m->values)[entry];
        }
    }
}
