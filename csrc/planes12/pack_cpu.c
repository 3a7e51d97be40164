/* The planes12 format from dense rows, its dense rows, and its checks. */
#include "planes12.h"

#include "../codecs/dense12/dense12.h"
#include "../core/cpu.h"

enum {
    CODES = 8,
    NO_CODE = 255,
    BLOCK = 32, /* elements that the vector path takes at a time */
};

/* The lowest code of each e[7:1], or NO_CODE. */
static void find_codes(const uint8_t table[CODES], uint8_t codes[128]) {
    memset(codes, NO_CODE, 128);
    for (int code = CODES - 1; code >= 0; code--) codes[table[code] & 127] = (uint8_t)code;
}

static inline int code_of(const uint8_t codes[128], macko_dtype dtype, uint16_t value) {
    if (macko_dense12_has_lower_bits(dtype, value)) return NO_CODE;
    return codes[macko_dense12_split(dtype, value) >> 8 & 127];
}

void macko_planes12_histogram_cpu(const macko_planes12 *m, const uint16_t *w, int64_t begin, int64_t end,
                                  int64_t counts[128]) {
    int64_t here[4][256] = {{0}}; /* four, so that no count waits for the one before it */
    const int64_t stop = end * m->cols;
    int64_t i = begin * m->cols;
    if (m->dtype == MACKO_BF16)
        for (; i + 4 <= stop; i += 4)
            for (int k = 0; k < 4; k++) here[k][w[i + k] >> 8]++;
    for (; i < stop; i++)
        if (!macko_dense12_has_lower_bits(m->dtype, w[i])) here[0][macko_dense12_split(m->dtype, w[i]) >> 8 & 127]++;
    for (int k = 0; k < 4; k++)
        for (int high = 0; high < 256; high++) counts[high & 127] += here[k][high];
}

#if MACKO_X86
/* What BLOCK elements are taken apart into: their low bytes, their nibbles, and a bit for each that is listed. */
typedef struct block {
    __m256i low, nibbles;
    uint32_t listed;
} block;

MACKO_TARGET_AVX2 MACKO_INLINE block split_block(const uint16_t *w, const uint8_t table[CODES], macko_dtype dtype) {
    const __m256i bytes = _mm256_set1_epi16(255), zero = _mm256_setzero_si256();
    __m256i half[2] = {_mm256_loadu_si256((const __m256i *)w), _mm256_loadu_si256((const __m256i *)(w + 16))};
    __m256i lower = zero; /* not zero where a float16 has lower bits */
    if (dtype == MACKO_F16) {
        const __m256i sign = _mm256_set1_epi16((int16_t)0x8000), rest = _mm256_set1_epi16(7);
        lower = _mm256_packus_epi16(_mm256_and_si256(half[0], rest), _mm256_and_si256(half[1], rest));
        for (int i = 0; i < 2; i++)
            half[i] = _mm256_or_si256(_mm256_and_si256(half[i], sign),
                                      _mm256_srli_epi16(_mm256_andnot_si256(sign, half[i]), 3));
    }
    /* Packing takes 128 bits of each in turn: put in order at the end. */
    const __m256i low = _mm256_packus_epi16(_mm256_and_si256(half[0], bytes), _mm256_and_si256(half[1], bytes));
    const __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(half[0], 8), _mm256_srli_epi16(half[1], 8));
    const __m256i upper = _mm256_and_si256(high, _mm256_set1_epi8(127));
    __m256i code = zero, held = _mm256_cmpeq_epi8(upper, zero);
    for (int c = 1; c < CODES && table[c]; c++) {
        const __m256i is = _mm256_cmpeq_epi8(upper, _mm256_set1_epi8((char)table[c]));
        code = _mm256_or_si256(code, _mm256_and_si256(is, _mm256_set1_epi8((char)c)));
        held = _mm256_or_si256(held, is);
    }
    held = _mm256_and_si256(held, _mm256_cmpeq_epi8(lower, zero));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(high, 4), _mm256_set1_epi8(8));
    return (block){_mm256_permute4x64_epi64(low, 0xd8), _mm256_permute4x64_epi64(_mm256_or_si256(code, sign), 0xd8),
                   ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(held, 0xd8))};
}

/* Elements of a row that are listed among its whole blocks. */
MACKO_TARGET_AVX2 static int64_t count_blocks(const macko_planes12 *m, const uint16_t *row) {
    int64_t listed = 0;
    for (int64_t col = 0; col + BLOCK <= m->cols; col += BLOCK)
        listed += __builtin_popcount(split_block(row + col, m->table, m->dtype).listed);
    return listed;
}

/* The whole blocks of a row, the listed elements as +0.0; listed gets a bit for each of them. */
MACKO_TARGET_AVX2 static void write_blocks(const macko_planes12 *m, const uint16_t *row, uint8_t *low, uint8_t *high,
                                           uint32_t *listed) {
    const __m256i spread = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0),
                  each = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    for (int64_t col = 0; col + BLOCK <= m->cols; col += BLOCK) {
        block b = split_block(row + col, m->table, m->dtype);
        listed[col / BLOCK] = b.listed;
        if (b.listed) {
            const __m256i bits = _mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)b.listed), spread);
            const __m256i held = _mm256_cmpeq_epi8(_mm256_and_si256(bits, each), _mm256_setzero_si256());
            b.low = _mm256_and_si256(b.low, held);
            b.nibbles = _mm256_and_si256(b.nibbles, held);
        }
        _mm256_storeu_si256((__m256i *)(low + col), b.low);
        /* even + 16 odd */
        const __m256i pairs = _mm256_maddubs_epi16(b.nibbles, _mm256_set1_epi16(0x1001));
        _mm_storeu_si128((__m128i *)(high + col / 2),
                         _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
    }
}

MACKO_TARGET_AVX2 static void unpack_blocks(const macko_planes12 *m, const uint8_t *low, const uint8_t *high,
                                            const uint8_t bytes[16], uint16_t *row) {
    const __m128i table = _mm_loadu_si128((const __m128i *)bytes), four = _mm_set1_epi8(15);
    for (int64_t col = 0; col + BLOCK <= m->cols; col += BLOCK) {
        const __m128i pairs = _mm_loadu_si128((const __m128i *)(high + col / 2));
        const __m128i even = _mm_and_si128(pairs, four), odd = _mm_and_si128(_mm_srli_epi16(pairs, 4), four);
        const __m128i nibbles[2] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
        for (int i = 0; i < 2; i++) {
            const __m128i upper = _mm_shuffle_epi8(table, nibbles[i]),
                          lower = _mm_loadu_si128((const __m128i *)(low + col + 16 * i));
            __m256i value = _mm256_set_m128i(_mm_unpackhi_epi8(lower, upper), _mm_unpacklo_epi8(lower, upper));
            if (m->dtype == MACKO_F16) {
                const __m256i sign = _mm256_set1_epi16((int16_t)0x8000), rest = _mm256_set1_epi16(0xfff);
                value =
                    _mm256_or_si256(_mm256_and_si256(value, sign), _mm256_slli_epi16(_mm256_and_si256(value, rest), 3));
            }
            _mm256_storeu_si256((__m256i *)(row + col + 16 * i), value);
        }
    }
}
#endif

/* Columns that the vector path takes: whole blocks. */
static inline int64_t vector_cols(const macko_planes12 *m) {
#if MACKO_X86
    if (macko_best_cpu_path() != MACKO_SCALAR) return m->cols / BLOCK * BLOCK;
#endif
    (void)m;
    return 0;
}

void macko_planes12_count_cpu(const macko_planes12 *m, const uint16_t *w, int64_t begin, int64_t end, int64_t *counts) {
    const int64_t first = vector_cols(m);
    uint8_t codes[128];
    find_codes(m->table, codes);
    for (int64_t row = begin; row < end; row++) {
        const uint16_t *const from = w + row * m->cols;
        counts[row] = 0;
#if MACKO_X86
        if (first) counts[row] = count_blocks(m, from);
#endif
        for (int64_t col = first; col < m->cols; col++) counts[row] += code_of(codes, m->dtype, from[col]) == NO_CODE;
    }
}

void macko_planes12_write_cpu(const macko_planes12 *m, const uint16_t *w, int64_t begin, int64_t end, uint8_t *low,
                              uint8_t *high, int32_t *columns, uint16_t *values) {
    const int64_t first = vector_cols(m), high_bytes = macko_planes12_high_bytes(m->cols);
    uint8_t codes[128];
    find_codes(m->table, codes);
    for (int64_t row = begin; row < end; row++) {
        const uint16_t *const from = w + row * m->cols;
        uint8_t *const lows = low + row * m->cols, *const highs = high + row * high_bytes;
        int64_t next = m->row_ptr[row];
#if MACKO_X86
        uint32_t listed[64];
        for (int64_t col = 0; col < first; col += (int64_t)(sizeof listed / sizeof *listed) * BLOCK) {
            macko_planes12 part = *m;
            const int64_t left = first - col, most = (int64_t)(sizeof listed / sizeof *listed) * BLOCK;
            part.cols = left < most ? left : most;
            write_blocks(&part, from + col, lows + col, highs + col / 2, listed);
            for (int64_t block = 0; block < part.cols / BLOCK; block++)
                for (uint32_t bits = listed[block]; bits; bits &= bits - 1) {
                    const int64_t at = col + block * BLOCK + __builtin_ctz(bits);
                    columns[next] = (int32_t)at;
                    values[next++] = from[at];
                }
        }
#endif
        for (int64_t col = first; col < m->cols; col++) {
            int code = code_of(codes, m->dtype, from[col]);
            uint32_t split = macko_dense12_split(m->dtype, from[col]);
            if (code == NO_CODE) {
                columns[next] = (int32_t)col;
                values[next++] = from[col];
                code = 0;
                split = 0;
            }
            const int nibble = (int)(split >> 15) << 3 | code;
            lows[col] = (uint8_t)split;
            highs[col / 2] = (uint8_t)(col % 2 ? highs[col / 2] | nibble << 4 : nibble);
        }
    }
}

macko_fault macko_planes12_unpack_cpu(const macko_planes12 *m, int64_t begin, int64_t end, uint16_t *w) {
    const int64_t first = vector_cols(m), high_bytes = macko_planes12_high_bytes(m->cols);
    uint8_t bytes[2 * CODES]; /* the high byte of each nibble */
    for (int nibble = 0; nibble < 2 * CODES; nibble++)
        bytes[nibble] = (uint8_t)((nibble / CODES) << 7 | m->table[nibble % CODES]);
    for (int64_t row = begin; row < end; row++) {
        const uint8_t *const lows = m->low + row * m->cols, *const highs = m->high + row * high_bytes;
        uint16_t *const to = w + row * m->cols;
#if MACKO_X86
        if (first) unpack_blocks(m, lows, highs, bytes, to);
#endif
        for (int64_t col = first; col < m->cols; col++) {
            const uint32_t split = (uint32_t)bytes[highs[col / 2] >> 4 * (col % 2) & 15] << 8 | lows[col];
            to[col] = (uint16_t)macko_dense12_join(m->dtype, split);
        }
        const int64_t start = m->row_ptr[row], stop = m->row_ptr[row + 1];
        if (start < 0 || stop < start || stop > m->listed)
            return (macko_fault){MACKO_PLANES12_ROW_PTR, row + 1, -1, stop};
        for (int64_t i = start; i < stop; i++) {
            if (m->columns[i] < 0 || m->columns[i] >= m->cols)
                return (macko_fault){MACKO_PLANES12_COLUMN, row, i, m->columns[i]};
            to[m->columns[i]] = m->values[i];
        }
    }
    return (macko_fault){MACKO_PLANES12_OK, 0, -1, 0};
}

static macko_fault check_row(const macko_planes12 *m, int64_t row, const uint8_t codes[128]) {
    const int64_t high_bytes = macko_planes12_high_bytes(m->cols), start = m->row_ptr[row], stop = m->row_ptr[row + 1];
    const uint8_t *const lows = m->low + row * m->cols, *const highs = m->high + row * high_bytes;
    if (start < 0 || stop < start || stop > m->listed) return (macko_fault){MACKO_PLANES12_ROW_PTR, row + 1, -1, stop};
    for (int64_t i = start; i < stop; i++) {
        const int32_t col = m->columns[i];
        if (col <= (i > start ? m->columns[i - 1] : -1) || col >= m->cols)
            return (macko_fault){MACKO_PLANES12_COLUMN, row, i, col};
    }
    for (int64_t i = start; i < stop; i++) {
        const int32_t col = m->columns[i];
        if (code_of(codes, m->dtype, m->values[i]) != NO_CODE || lows[col] || highs[col / 2] >> 4 * (col % 2) & 15)
            return (macko_fault){MACKO_PLANES12_LISTED, row, i, col};
    }
    if (m->cols % 2 && highs[high_bytes - 1] >> 4)
        return (macko_fault){MACKO_PLANES12_PADDING, row, -1, highs[high_bytes - 1] >> 4};
    return (macko_fault){MACKO_PLANES12_OK, row, -1, 0};
}

macko_fault macko_planes12_check_cpu(const macko_planes12 *m, int64_t begin, int64_t end) {
    const int highs = m->dtype == MACKO_F16 ? 16 : 128;
    uint8_t codes[128];
    for (int code = 0; code < CODES; code++) {
        const int high = m->table[code], before = code ? m->table[code - 1] : 0;
        if (high >= highs || (code ? high && (high <= before || (code > 1 && !before)) : high))
            return (macko_fault){MACKO_PLANES12_TABLE, 0, -1, code};
    }
    if (m->row_ptr[0] || m->row_ptr[m->rows] != m->listed)
        return (macko_fault){MACKO_PLANES12_ROW_PTR, m->row_ptr[0] ? 0 : m->rows, -1,
                             m->row_ptr[m->row_ptr[0] ? 0 : m->rows]};
    find_codes(m->table, codes);
    for (int64_t row = begin; row < end; row++) {
        const macko_fault fault = check_row(m, row, codes);
        if (fault.kind) return fault;
    }
    return (macko_fault){MACKO_PLANES12_OK, 0, -1, m->listed};
}
