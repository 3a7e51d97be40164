/*
 * pack, unpack and the checks of the macko format on the CPU.
 *
 * Everything that looks for zeros does so by 64 elements, as a mask of the non-zeros; only its making differs with the
 * vector path. Packing walks over the mask's bits, or, on avx512 and where no gap needs an explicit zero, compresses
 * values and deltas by it.
 */
#include "entries_cpu.h"

enum { BLOCK = MACKO_BLOCK };

void macko_pack_count_cpu(const void *w, macko_dtype dtype, int delta_bits, int64_t cols, int64_t begin, int64_t end,
                          int64_t *counts) {
    macko_nonzeros *const nonzeros = macko_nonzeros_of(macko_best_cpu_path());
    for (int64_t row = begin; row < end; row++) {
        int64_t count = 0, next = 0; /* next: the column after the previous entry */
        for (int64_t col = 0; col < cols; col += BLOCK) {
            const int here = (int)(cols - col < BLOCK ? cols - col : BLOCK);
            count += macko_block_entries(nonzeros(w, dtype, row * cols + col, here), col, delta_bits, &next);
        }
        counts[row] = count;
    }
}

/*
 * Deltas on their way to memory, from the low bits of `word` up. Two rows, so two threads, can share a byte: each sets
 * its own bits of the zeroed array. Bytes that are one row's alone are written plainly.
 */
typedef struct delta_stream {
    uint8_t *out;
    uint64_t word;
    int bits;   /* of word, less than 64 */
    int shared; /* the first byte of out is also the row's before */
} delta_stream;

static inline void put_bytes(delta_stream *s, int bytes) {
    int done = 0;
    if (s->shared) {
        __atomic_fetch_or(s->out, (uint8_t)s->word, __ATOMIC_RELAXED);
        s->shared = 0;
        done = 1;
    }
    for (; done < bytes; done++) s->out[done] = (uint8_t)(s->word >> (8 * done));
}

static inline void put_deltas(delta_stream *s, uint64_t deltas, int bits) {
    s->word |= deltas << s->bits;
    if (s->bits + bits < 64) {
        s->bits += bits;
        return;
    }
    if (s->shared)
        put_bytes(s, 8);
    else
        memcpy(s->out, &s->word, 8);
    s->out += 8;
    s->word = s->bits ? deltas >> (64 - s->bits) : 0;
    s->bits += bits - 64;
}

static inline void put_rest(delta_stream *s) {
    const int whole = s->bits / 8;
    if (whole) put_bytes(s, whole);
    if (s->bits % 8) __atomic_fetch_or(s->out + whole, (uint8_t)(s->word >> (8 * whole)), __ATOMIC_RELAXED);
}

/* Where a row's packing has come to. */
typedef struct row_writer {
    delta_stream deltas;
    int64_t entry; /* the next one to write */
    int64_t next;  /* the column after the previous entry */
} row_writer;

/* Writes the block of the row at w that starts at column col. */
static inline void write_bits(row_writer *r, const void *w, macko_dtype dtype, int delta_bits, int64_t row_start,
                              int64_t col, uint64_t mask, void *values) {
    static const uint32_t zero = 0;
    const int64_t delta_max = (1 << delta_bits) - 1;
    for (; mask; mask &= mask - 1) {
        const int64_t at = col + __builtin_ctzll(mask);
        for (; at - r->next > delta_max; r->next += delta_max + 1) {
            macko_copy(values, dtype, r->entry++, &zero, 0);
            put_deltas(&r->deltas, (uint64_t)delta_max, delta_bits);
        }
        macko_copy(values, dtype, r->entry++, w, row_start + at);
        put_deltas(&r->deltas, (uint64_t)(at - r->next), delta_bits);
        r->next = at + 1;
    }
}

#if MACKO_X86
/* The same for a whole block in which no delta is over delta_max. (Masked loads of what may not be there cost 12 ns.) */
static MACKO_TARGET_AVX512 void write_compressed(row_writer *r, const void *w, macko_dtype dtype, int delta_bits,
                                                 int64_t row_start, int64_t col, uint64_t mask, void *values) {
    const int count = __builtin_popcountll(mask);
    int64_t entry = r->entry;
    if (dtype == MACKO_F32) {
        for (int i = 0; i < BLOCK; i += 16) {
            const __mmask16 kept = (__mmask16)(mask >> i);
            const __m512i v = _mm512_loadu_si512((const uint32_t *)w + row_start + col + i);
            const int found = __builtin_popcount(kept);
            _mm512_mask_storeu_epi32((uint32_t *)values + entry, (__mmask16)_bzhi_u32(0xffff, (unsigned)found),
                                     _mm512_maskz_compress_epi32(kept, v));
            entry += found;
        }
    } else {
        for (int i = 0; i < BLOCK; i += 32) {
            const __mmask32 kept = (__mmask32)(mask >> i);
            const __m512i v = _mm512_loadu_si512((const uint16_t *)w + row_start + col + i);
            const int found = __builtin_popcount(kept);
            _mm512_mask_storeu_epi16((uint16_t *)values + entry, _bzhi_u32(0xffffffffu, (unsigned)found),
                                     _mm512_maskz_compress_epi16(kept, v));
            entry += found;
        }
    }
    /* Places of the set bits, less the places after the ones before them. */
    static const uint8_t iota[BLOCK] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                        16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                        32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                        48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
    const __m512i places = _mm512_loadu_si512(iota);
    const __m512i at = _mm512_maskz_compress_epi8(mask, places);
    const __m512i after = _mm512_add_epi8(at, _mm512_set1_epi8(1));
    const __m512i before = _mm512_mask_permutexvar_epi8(_mm512_set1_epi8((char)(r->next - col)), ~1ull,
                                                        _mm512_sub_epi8(places, _mm512_set1_epi8(1)), after);
    const __m512i deltas = _mm512_maskz_sub_epi8(_bzhi_u64(~0ull, (unsigned)count), at, before);
    uint64_t words[8] = {0};
    if (delta_bits == 8) {
        _mm512_storeu_si512(words, deltas);
    } else {
        const int pair = delta_bits == 4 ? 0x1001 : 0x0401; /* first + second << delta_bits */
        const __m256i two = _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(deltas, _mm512_set1_epi16((short)pair)));
        if (delta_bits == 4)
            _mm256_storeu_si256((__m256i *)words, two);
        else
            _mm_storeu_si128((__m128i *)words,
                             _mm256_cvtepi16_epi8(_mm256_maddubs_epi16(two, _mm256_set1_epi16(0x1001))));
    }
    const int bits = count * delta_bits;
    for (int done = 0; done < bits; done += 64)
        put_deltas(&r->deltas, words[done / 64], bits - done < 64 ? bits - done : 64);
    r->entry = entry;
    r->next = col + BLOCK - __builtin_clzll(mask);
}
#endif

void macko_pack_write_cpu(const void *w, macko_dtype dtype, int delta_bits, int64_t cols, int64_t begin, int64_t end,
                          const int32_t *row_ptr, void *values, uint8_t *deltas) {
    const macko_cpu_path path = macko_best_cpu_path();
    macko_nonzeros *const nonzeros = macko_nonzeros_of(path);
    for (int64_t row = begin; row < end; row++) {
        const int64_t bit = (int64_t)row_ptr[row] * delta_bits;
        row_writer r = {{deltas + bit / 8, 0, (int)(bit % 8), bit % 8 != 0}, row_ptr[row], 0};
        for (int64_t col = 0; col < cols; col += BLOCK) {
            const int count = (int)(cols - col < BLOCK ? cols - col : BLOCK);
            const uint64_t mask = nonzeros(w, dtype, row * cols + col, count);
            if (!mask) continue;
#if MACKO_X86
            if (path == MACKO_AVX512 && count == BLOCK && (col + __builtin_ctzll(mask) - r.next) >> delta_bits == 0 &&
                !macko_has_long_gap(mask, delta_bits)) {
                write_compressed(&r, w, dtype, delta_bits, row * cols, col, mask, values);
                continue;
            }
#endif
            write_bits(&r, w, dtype, delta_bits, row * cols, col, mask, values);
        }
        put_rest(&r.deltas);
    }
}

/* The sum of a unit's deltas. */
static inline int64_t sum_of_unit(const uint8_t *deltas, int delta_bits) {
    return macko_decode_unit(macko_load_unit(deltas, delta_bits), delta_bits).span;
}

/* The column after the last of the entries [entry, stop). */
MACKO_INLINE int64_t row_span(const uint8_t *deltas, int delta_bits, int64_t entry, int64_t stop) {
    const int unit = MACKO_UNIT_ENTRIES(delta_bits);
    int64_t span = 0;
    for (; entry < stop && entry % (8 / delta_bits); entry++) span += macko_delta_at(deltas, delta_bits, entry) + 1;
    for (; entry + unit <= stop; entry += unit) span += sum_of_unit(deltas + entry * delta_bits / 8, delta_bits);
    for (; entry < stop; entry++) span += macko_delta_at(deltas, delta_bits, entry) + 1;
    return span;
}

macko_fault macko_check_bounds_cpu(const macko_matrix *m, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const macko_fault fault = macko_check_row_ptr(m, row);
        if (fault.kind) return fault;
        const int64_t start = m->row_ptr[row], stop = m->row_ptr[row + 1];
        const int64_t span = m->delta_bits == 4   ? row_span(m->deltas, 4, start, stop)
                             : m->delta_bits == 2 ? row_span(m->deltas, 2, start, stop)
                                                  : row_span(m->deltas, 8, start, stop);
        if (span <= m->cols) continue;
        int64_t next = 0;
        for (int64_t entry = start; entry < stop; entry++) {
            next += macko_delta_at(m->deltas, m->delta_bits, entry) + 1;
            if (next > m->cols) return (macko_fault){MACKO_COLUMN_END, row, entry, next - 1};
        }
    }
    return (macko_fault){MACKO_OK, 0, -1, 0};
}

static inline int64_t value_bits(const macko_matrix *m, int64_t entry) {
    return m->dtype == MACKO_F32 ? ((const uint32_t *)m->values)[entry] : ((const uint16_t *)m->values)[entry];
}

/* The first zero among the entries of the row that is not one of a long run's. */
static macko_fault check_zeros(const macko_matrix *m, int64_t row, macko_nonzeros *nonzeros) {
    const int64_t stop = m->row_ptr[row + 1];
    for (int64_t block = m->row_ptr[row]; block < stop; block += BLOCK) {
        const int count = (int)(stop - block < BLOCK ? stop - block : BLOCK);
        uint64_t zeros = ~nonzeros(m->values, m->dtype, block, count);
        if (count < BLOCK) zeros &= (1ull << count) - 1;
        for (; zeros; zeros &= zeros - 1) {
            const int64_t entry = block + __builtin_ctzll(zeros);
            const int delta = macko_delta_at(m->deltas, m->delta_bits, entry);
            if (delta != (1 << m->delta_bits) - 1 || entry + 1 == stop || value_bits(m, entry))
                return (macko_fault){MACKO_STRAY_ZERO, row, entry, delta};
        }
    }
    return (macko_fault){MACKO_OK, 0, -1, 0};
}

macko_fault macko_check_cpu(const macko_matrix *m, int64_t begin, int64_t end) {
    macko_nonzeros *const nonzeros = macko_nonzeros_of(macko_best_cpu_path());
    for (int64_t row = begin; row < end; row++) {
        macko_fault fault = macko_check_bounds_cpu(m, row, row + 1);
        if (!fault.kind) fault = check_zeros(m, row, nonzeros);
        if (fault.kind) return fault;
    }
    if (begin == m->rows) {
        const int64_t stored = m->row_ptr[m->rows];
        if (m->rows == 0 && stored) return (macko_fault){MACKO_ROW_PTR_START, 0, -1, stored}; /* no row has looked */
        if (m->capacity != (stored + MACKO_CHUNK - 1) / MACKO_CHUNK * MACKO_CHUNK)
            return (macko_fault){MACKO_ROW_PTR_END, m->rows, -1, stored};
        for (int64_t entry = stored; entry < m->capacity; entry++) {
            const int64_t bits = value_bits(m, entry), delta = macko_delta_at(m->deltas, m->delta_bits, entry);
            if (bits || delta) return (macko_fault){MACKO_PADDING, m->rows, entry, bits ? bits : delta};
        }
    }
    return (macko_fault){MACKO_OK, 0, -1, 0};
}

/* Entries [entry, stop), the first of them counted from column `next`, into zeroed columns of the row at w. */
MACKO_INLINE void unpack_entries(const macko_matrix *m, macko_dtype dtype, int delta_bits, int64_t entry, int64_t stop,
                                 int64_t next, void *w) {
    const int unit = MACKO_UNIT_ENTRIES(delta_bits);
    for (; entry < stop && entry % (8 / delta_bits); entry++) {
        next += macko_delta_at(m->deltas, delta_bits, entry) + 1;
        macko_copy(w, dtype, next - 1, m->values, entry);
    }
    for (; entry + unit <= stop; entry += unit) {
        const macko_offsets offsets =
            macko_decode_unit(macko_load_unit(m->deltas + entry * delta_bits / 8, delta_bits), delta_bits);
        for (int k = 0; k < unit; k++)
            macko_copy(w, dtype, next + macko_offset(&offsets, delta_bits, k), m->values, entry + k);
        next += offsets.span;
    }
    for (; entry < stop; entry++) {
        next += macko_delta_at(m->deltas, delta_bits, entry) + 1;
        macko_copy(w, dtype, next - 1, m->values, entry);
    }
}

/* As far as a row's unpacking has come. */
typedef struct row_place {
    int64_t entry; /* the next one to unpack */
    int64_t next;  /* the column after the entry before; all before it are written */
} row_place;

#if MACKO_X86
enum { GROUP = 8, GROUPS = MACKO_BLOCK / GROUP }; /* entries that are expanded together */

/* 64 deltas from the start of a byte on, a byte each. */
MACKO_INLINE MACKO_TARGET_AVX512 __m512i load_deltas(const uint8_t *deltas, int delta_bits) {
    if (delta_bits == 8) return _mm512_loadu_si512(deltas);
    if (delta_bits == 4) {
        const __m512i eights = _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)deltas));
        const __m512i shifts = _mm512_set1_epi64(0x1c1814100c080400);
        return _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, eights), _mm512_set1_epi8(15));
    }
    const __m512i eights = _mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i *)deltas));
    const __m512i shifts = _mm512_set1_epi64(0x0e0c0a0806040200);
    return _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, eights), _mm512_set1_epi8(3));
}

/*
 * For each eight bytes the word of the bits that they name, all different; a byte over 63 names none. Two 8x8 matrices of
 * bits, which byte of the word and which bit of it (from the top) for each of the eight, are turned and multiplied.
 */
MACKO_INLINE MACKO_TARGET_AVX512 __m512i bits_of(__m512i bytes) {
    const __m512i power = _mm512_set4_epi64(0, (int64_t)0x8040201008040201, 0, (int64_t)0x8040201008040201);
    const __m512i falling = _mm512_set1_epi64(0x0102040810204080),
                  unit = _mm512_set1_epi64((int64_t)0x8040201008040201);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 3), _mm512_set1_epi8(15));
    const __m512i byte = _mm512_gf2p8affine_epi64_epi8(unit, _mm512_shuffle_epi8(power, high), 0);
    const __m512i bit = _mm512_gf2p8affine_epi64_epi8(unit, _mm512_shuffle_epi8(falling, bytes), 0);
    return _mm512_gf2p8affine_epi64_epi8(byte, bit, 0);
}

/* Columns of 64 entries: of each eight the mask of their columns, counted from after the eight before, and the last. */
typedef struct groups {
    uint64_t masks[2][GROUPS], last[GROUPS];
} groups;

/* Writes the columns of 64 entries, of each eight of them 32 `parts`. Returns the column after them. */
MACKO_INLINE MACKO_TARGET_AVX512 int64_t put_groups(const groups *g, int parts, const uint16_t *values, uint16_t *w,
                                                    int64_t next) {
    for (int i = 0; i < GROUPS; i++, values += GROUP) {
        const uint16_t *from = values;
        for (int part = 0; part < parts; part++) {
            const uint32_t mask = (uint32_t)(g->masks[part / 2][i] >> 32 * (part % 2));
            const __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)from));
            _mm512_storeu_si512(w + next + 32 * part, _mm512_maskz_expand_epi16(mask, v));
            from += __builtin_popcount(mask);
        }
        next += (int64_t)g->last[i] + 1;
    }
    return next;
}

/*
 * The row's entries by 64, of a 16-bit type, as long as there are so many and none is near its last column. The deltas
 * become the mask of eight entries' columns, which expands their values; the zeros that come after them are overwritten
 * by the next eight. linear, 64 tokens, 4096x4096 bf16, density 0.5, one core of a Zen 5: 7.4 ms, with copies entry by
 * entry 11.3.
 */
MACKO_INLINE MACKO_TARGET_AVX512 row_place unpack_groups(const macko_matrix *m, int delta_bits, int64_t entry,
                                                         int64_t stop, uint16_t *w) {
    const int64_t start = entry + (-entry & (8 / delta_bits - 1));
    row_place at = {entry, 0};
    if (m->cols < 64 || start > stop) return at;
    memset(w, 0, 64 * 2); /* entries before the first whole byte of deltas have at most 16 columns */
    unpack_entries(m, MACKO_F16, delta_bits, entry, start, 0, w);
    for (; at.entry < start; at.entry++) at.next += macko_delta_at(m->deltas, delta_bits, at.entry) + 1;
    /* The last eight may read as many values again. */
    for (; at.entry + MACKO_BLOCK + GROUP <= stop; at.entry += MACKO_BLOCK) {
        __m512i sums = load_deltas(m->deltas + at.entry * delta_bits / 8, delta_bits); /* they stop at 255 */
        sums = _mm512_adds_epu8(sums, _mm512_slli_epi64(sums, 8));
        sums = _mm512_adds_epu8(sums, _mm512_slli_epi64(sums, 16));
        sums = _mm512_adds_epu8(sums, _mm512_slli_epi64(sums, 32));
        sums = _mm512_adds_epu8(sums, _mm512_set1_epi64(0x0706050403020100));
        const __m512i last = _mm512_srli_epi64(sums, 56);
        const int parts = !_mm512_test_epi64_mask(last, _mm512_set1_epi64(~31))   ? 1
                          : !_mm512_test_epi64_mask(last, _mm512_set1_epi64(~63)) ? 2
                                                                                  : 4;
        /* Eight entries of 8-bit deltas may span more. */
        if (delta_bits == 8 && _mm512_test_epi64_mask(last, _mm512_set1_epi64(~127))) break;
        if (at.next + 32 * parts * (GROUPS + 1) > m->cols &&
            at.next + _mm512_reduce_add_epi64(last) + GROUPS + 32 * parts > m->cols)
            break;
        groups g;
        _mm512_storeu_si512(g.masks[0], bits_of(sums));
        if (delta_bits > 2 && parts == 4)
            _mm512_storeu_si512(g.masks[1], bits_of(_mm512_sub_epi8(sums, _mm512_set1_epi8(64))));
        _mm512_storeu_si512(g.last, last);
        __asm__("" : "+m"(g)); /* else gcc takes the masks out of the vectors by shuffles, which is slower */
        const uint16_t *const values = (const uint16_t *)m->values + at.entry;
        macko_fetch_ahead(values);
        macko_fetch_ahead(values + 32);
        if (parts == 1)
            at.next = put_groups(&g, 1, values, w, at.next);
        else if (parts == 2)
            at.next = put_groups(&g, 2, values, w, at.next);
        else
            at.next = put_groups(&g, 4, values, w, at.next);
    }
    return at;
}

#define UNPACK_GROUPS(bits)                                                                                            \
    static MACKO_TARGET_AVX512 row_place unpack_groups_##bits(const macko_matrix *m, int64_t entry, int64_t stop,      \
                                                              uint16_t *w) {                                           \
        return unpack_groups(m, bits, entry, stop, w);                                                                 \
    }
UNPACK_GROUPS(2)
UNPACK_GROUPS(4)
UNPACK_GROUPS(8)
#undef UNPACK_GROUPS
#endif

MACKO_INLINE macko_fault unpack_rows(const macko_matrix *m, macko_dtype dtype, int delta_bits, int64_t begin,
                                     int64_t end, char *w) {
    const int64_t size = dtype == MACKO_F32 ? 4 : 2;
    const macko_cpu_path path = macko_best_cpu_path();
    for (int64_t row = begin; row < end; row++, w += m->cols * size) {
        const macko_fault fault = macko_check_row_ptr(m, row);
        if (fault.kind) return fault;
        const int64_t stop = m->row_ptr[row + 1];
        row_place at = {m->row_ptr[row], 0};
#if MACKO_X86
        if (dtype != MACKO_F32 && path == MACKO_AVX512) {
            if (delta_bits == 2) at = unpack_groups_2(m, at.entry, stop, (uint16_t *)w);
            if (delta_bits == 4) at = unpack_groups_4(m, at.entry, stop, (uint16_t *)w);
            if (delta_bits == 8) at = unpack_groups_8(m, at.entry, stop, (uint16_t *)w);
        }
#endif
        if (at.next + row_span(m->deltas, delta_bits, at.entry, stop) > m->cols)
            return macko_check_bounds_cpu(m, row, row + 1);
        memset(w + at.next * size, 0, (size_t)((m->cols - at.next) * size)); /* just in front: still in L1 */
        unpack_entries(m, dtype, delta_bits, at.entry, stop, at.next, w);
    }
    return (macko_fault){MACKO_OK, 0, -1, 0};
}

macko_fault macko_unpack_cpu(const macko_matrix *m, int64_t begin, int64_t end, void *w) {
    if (m->dtype == MACKO_F32)
        return m->delta_bits == 2   ? unpack_rows(m, MACKO_F32, 2, begin, end, w)
               : m->delta_bits == 4 ? unpack_rows(m, MACKO_F32, 4, begin, end, w)
                                    : unpack_rows(m, MACKO_F32, 8, begin, end, w);
    /* Of the other two only the element's size matters. */
    return m->delta_bits == 2   ? unpack_rows(m, MACKO_F16, 2, begin, end, w)
           : m->delta_bits == 4 ? unpack_rows(m, MACKO_F16, 4, begin, end, w)
                                : unpack_rows(m, MACKO_F16, 8, begin, end, w);
}
