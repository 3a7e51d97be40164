/* How the CPU code walks over packed entries: deltas to columns, sixteen at a time, and the check of row_ptr. */
#pragma once

#include "../core/cpu.h"
#include "macko.h"

static inline int macko_delta_at(const uint8_t *deltas, int delta_bits, int64_t entry) {
    const int64_t bit = entry * delta_bits;
    return deltas[bit >> 3] >> (bit & 7) & ((1 << delta_bits) - 1);
}

/* Whether a gap between two set bits of the mask is longer than delta_max. */
static inline int macko_has_long_gap(uint64_t mask, int delta_bits) {
    /* The bits between the first and the last one set that are not; a run of n + 1 survives n shifts. */
    const uint64_t first = mask & -mask, last = 1ull << (63 - __builtin_clzll(mask));
    uint64_t runs = ~mask & (last - 1) & ~(first - 1);
    for (int width = 1; width < (1 << delta_bits) && width < MACKO_BLOCK; width *= 2) runs &= runs >> width;
    return runs != 0;
}

/*
 * Entries, explicit zeros among them, of the 64 columns from col on, whose non-zeros are the bits of the mask. *next is
 * the column after the entry before, and then after the last one.
 */
static inline int64_t macko_block_entries(uint64_t mask, int64_t col, int delta_bits, int64_t *next) {
    if (!mask) return 0;
    const int64_t before = *next;
    *next = col + 64 - __builtin_clzll(mask);
    if (!macko_has_long_gap(mask, delta_bits))
        return __builtin_popcountll(mask) + ((col + __builtin_ctzll(mask) - before) >> delta_bits);
    int64_t entries = 0, begin = before;
    for (; mask; mask &= mask - 1) {
        const int64_t at = col + __builtin_ctzll(mask);
        entries += 1 + ((at - begin) >> delta_bits);
        begin = at + 1;
    }
    return entries;
}

/* row_ptr at row and row + 1. Each row looks at both ends: another thread may have the row before. */
static inline macko_fault macko_check_row_ptr(const macko_matrix *m, int64_t row) {
    const int64_t start = m->row_ptr[row], stop = m->row_ptr[row + 1];
    if (row == 0 && start != 0) return (macko_fault){MACKO_ROW_PTR_START, 0, -1, start};
    if (start < 0) return (macko_fault){MACKO_ROW_PTR_FALLS, row, -1, start};
    if (stop < start) return (macko_fault){MACKO_ROW_PTR_FALLS, row + 1, -1, stop};
    if (stop > m->capacity) return (macko_fault){MACKO_ROW_PTR_END, row + 1, -1, stop};
    return (macko_fault){MACKO_OK, 0, -1, 0};
}

/*
 * The deltas of sixteen entries (eight where a delta has 8 bits) are decoded together, in a 64-bit word of fields:
 * 8 fields of a byte, 4 of 16 bits. A field holds a pair of entries; the sums of pairs are summed up by one multiplication.
 */
#define MACKO_UNIT_ENTRIES(delta_bits) ((delta_bits) == 8 ? 8 : 16)
#define MACKO_UNIT_BYTES(delta_bits) ((delta_bits) == 2 ? 4 : 8)

/* Columns of a unit's entries after the column where it starts: of entries 0, 2, 4... and of entries 1, 3, 5... */
typedef struct macko_offsets {
    uint64_t even, odd;
    int64_t span; /* columns that the whole unit covers */
} macko_offsets;

/* The unit's deltas in fields of half a field of macko_offsets: nibbles, or bytes. */
static inline uint64_t macko_load_unit(const uint8_t *deltas, int delta_bits) {
    uint64_t word = 0;
    memcpy(&word, deltas, MACKO_UNIT_BYTES(delta_bits));
    if (delta_bits == 2) { /* pairs of bits to nibbles */
        word = (word | word << 16) & 0x0000ffff0000ffffull;
        word = (word | word << 8) & 0x00ff00ff00ff00ffull;
        word = (word | word << 4) & 0x0f0f0f0f0f0f0f0full;
        word = (word | word << 2) & 0x3333333333333333ull;
    }
    return word;
}

static inline macko_offsets macko_decode_unit(uint64_t word, int delta_bits) {
    const int field = delta_bits == 8 ? 16 : 8;
    const uint64_t low = delta_bits == 8 ? 0x00ff00ff00ff00ffull : 0x0f0f0f0f0f0f0f0full;
    const uint64_t ones = delta_bits == 8 ? 0x0001000100010001ull : 0x0101010101010101ull;
    const uint64_t odd_places = delta_bits == 8 ? 0x0007000500030001ull : 0x0f0d0b0907050301ull;
    const uint64_t even_deltas = word & low, odd_deltas = word >> (field / 2) & low;
    /* At most 16 * 15 + 15 = 255 and 8 * 255 + 7 = 2047: no field overflows. */
    const uint64_t odd = (even_deltas + odd_deltas) * ones + odd_places;
    return (macko_offsets){odd - odd_deltas - ones, odd, (int64_t)(odd >> (64 - field)) + 1};
}

static inline int64_t macko_offset(const macko_offsets *offsets, int delta_bits, int k) {
    const int field = delta_bits == 8 ? 16 : 8;
    return (k & 1 ? offsets->odd : offsets->even) >> (field * (k >> 1)) & ((1 << field) - 1);
}
