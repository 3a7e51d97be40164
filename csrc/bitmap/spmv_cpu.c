/*
 * y = W x from the bitmap layout, for up to four tokens at a time. A row is one thread's, and its sum has one order for
 * each vector path: the same bits every run.
 *
 * avx512 expands 32 values (16 of fp32) by a mask register and multiplies them with as many columns of x. avx2 moves
 * eight values to their columns by a shuffle that a table has for each byte of the mask.
 */
#include "../core/cpu.h"
#include "rows_cpu.h"

enum { TOKENS_MAX = 4 };

/* The sums of one row for the kernel's number of tokens, x [tokens] of [cols]; values from `at` on. Returns the next `at`. */
typedef int64_t row_sums(const macko_bitmap *m, const uint8_t *bits, int64_t at, const void *const *x, float *sums);

/* Adds the columns [col, cols). A row that has come here has no bit after the last column. */
MACKO_INLINE int64_t add_scalar(const macko_bitmap *m, macko_dtype dtype, int tokens, const uint8_t *bits, int64_t col,
                                int64_t at, const void *const *x, float *sums) {
    for (; col < m->cols; col = (col / MACKO_BITMAP_WORD + 1) * MACKO_BITMAP_WORD) {
        uint64_t mask = macko_bitmap_word(bits, col / MACKO_BITMAP_WORD) >> (col % MACKO_BITMAP_WORD);
        for (; mask; mask &= mask - 1, at++) {
            const int64_t where = col + __builtin_ctzll(mask);
            const float value = macko_load(m->values, dtype, at);
            for (int t = 0; t < tokens; t++) sums[t] += value * macko_load(x[t], dtype, where);
        }
    }
    return at;
}

MACKO_INLINE int64_t row_scalar(const macko_bitmap *m, macko_dtype dtype, int tokens, const uint8_t *bits, int64_t at,
                                const void *const *x, float *sums) {
    for (int t = 0; t < tokens; t++) sums[t] = 0;
    return add_scalar(m, dtype, tokens, bits, 0, at, x, sums);
}

#if MACKO_X86
/* For each byte of a mask, the shuffle that takes the 16-bit values in a row to the columns of its bits, 0 elsewhere. */
static _Alignas(16) uint8_t shuffle_of[256][16];

static __attribute__((constructor)) void fill_shuffles(void) {
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0, i = 0; bit < 8; bit++) {
            const int kept = byte >> bit & 1;
            shuffle_of[byte][2 * bit] = (uint8_t)(kept ? 2 * i : 0x80);
            shuffle_of[byte][2 * bit + 1] = (uint8_t)(kept ? 2 * i + 1 : 0x80);
            i += kept;
        }
}

/* The fp32 values of eight columns, at their columns, the others 0. */
MACKO_INLINE MACKO_TARGET_AVX2 __m256 expand_8(const float *values, unsigned mask) {
    const __m256i from =
        _mm256_cvtepi16_epi32(_mm_load_si128((const __m128i *)shuffle_of[mask])); /* 2 i, or negative */
    const __m256 v = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values), _mm256_srli_epi32(from, 1));
    return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_srai_epi32(from, 31)), v);
}

/* The 16-bit values of eight columns, at their columns, the others 0. */
MACKO_INLINE MACKO_TARGET_AVX2 __m128i expand_8_halves(const uint16_t *values, unsigned mask) {
    return _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)values),
                            _mm_load_si128((const __m128i *)shuffle_of[mask]));
}

MACKO_INLINE MACKO_TARGET_AVX2 int64_t row_avx2(const macko_bitmap *m, macko_dtype dtype, int tokens,
                                                const uint8_t *bits, int64_t at, const void *const *x, float *sums) {
    const int sets = tokens > 2 ? 1 : 2; /* of two sums a token: an fma takes four cycles */
    __m256 lanes[TOKENS_MAX][4];
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < 4; i++) lanes[t][i] = _mm256_setzero_ps();
    int64_t col = 0;
    for (; col + 32 <= m->cols; col += 32) {
        macko_fetch_ahead((const char *)m->values + at * (dtype == MACKO_F32 ? 4 : 2));
        for (int half = 0; half < 2; half++) {
            const unsigned low = bits[col / 8 + 2 * half], high = bits[col / 8 + 2 * half + 1];
            const int64_t middle = at + __builtin_popcount(low), from = col + 16 * half;
            const int set = 2 * (half % sets);
            if (dtype == MACKO_F32) {
                const float *const values = (const float *)m->values;
                const __m256 v0 = expand_8(values + at, low), v1 = expand_8(values + middle, high);
                for (int t = 0; t < tokens; t++) {
                    lanes[t][set] = _mm256_fmadd_ps(v0, macko_load_8(x[t], dtype, from), lanes[t][set]);
                    lanes[t][set + 1] = _mm256_fmadd_ps(v1, macko_load_8(x[t], dtype, from + 8), lanes[t][set + 1]);
                }
            } else {
                const uint16_t *const values = (const uint16_t *)m->values;
                const __m256i v =
                    _mm256_set_m128i(expand_8_halves(values + middle, high), expand_8_halves(values + at, low));
                for (int t = 0; t < tokens; t++)
                    macko_fma_16(lanes[t] + set, dtype, v,
                                 _mm256_loadu_si256((const __m256i *)((const uint16_t *)x[t] + from)));
            }
            at = middle + __builtin_popcount(high);
        }
    }
    for (int t = 0; t < tokens; t++)
        sums[t] = macko_sum_8(
            _mm256_add_ps(_mm256_add_ps(lanes[t][0], lanes[t][1]), _mm256_add_ps(lanes[t][2], lanes[t][3])));
    return add_scalar(m, dtype, tokens, bits, col, at, x, sums);
}

/*
 * Adds 64 columns from col on, of which `there` exist. All values are loaded and expanded before the first is multiplied;
 * one vector after the other takes twice (fp32) to three times (fp16) as long on a Zen 5.
 */
MACKO_INLINE MACKO_TARGET_AVX512 int64_t add_64(const macko_bitmap *m, macko_dtype dtype, int tokens, uint64_t mask,
                                                uint64_t there, int64_t col, int64_t at, const void *const *x,
                                                __m512 sums[TOKENS_MAX][4]) {
    if (dtype == MACKO_F32) {
        const float *values = (const float *)m->values + at;
        macko_fetch_ahead(values);
        macko_fetch_ahead(values + 16);
        __m512 v[4];
        for (int i = 0; i < 4; i++)
            v[i] = _mm512_loadu_ps(values + (i ? __builtin_popcountll(mask << (64 - 16 * i)) : 0));
        __asm__("" : "+v"(v[0]), "+v"(v[1]), "+v"(v[2]), "+v"(v[3])); /* see macko_load_512 */
        for (int i = 0; i < 4; i++) v[i] = _mm512_maskz_expand_ps((__mmask16)(mask >> (16 * i)), v[i]);
        for (int t = 0; t < tokens; t++) {
            for (int i = 0; i < 4; i++) {
                const float *from = (const float *)x[t] + col + 16 * i;
                const __m512 columns = there == ~0ull ? _mm512_loadu_ps(from)
                                                      : _mm512_maskz_loadu_ps((__mmask16)(there >> (16 * i)), from);
                sums[t][i] = _mm512_fmadd_ps(v[i], columns, sums[t][i]);
            }
        }
    } else {
        const uint16_t *values = (const uint16_t *)m->values + at;
        macko_fetch_ahead(values);
        __m512i packed[2];
        packed[0] = _mm512_loadu_si512(values);
        packed[1] = _mm512_loadu_si512(values + __builtin_popcount((uint32_t)mask));
        __asm__("" : "+v"(packed[0]), "+v"(packed[1]));
        packed[0] = _mm512_maskz_expand_epi16((__mmask32)mask, packed[0]);
        packed[1] = _mm512_maskz_expand_epi16((__mmask32)(mask >> 32), packed[1]);
        for (int i = 0; i < 2; i++) {
            __m512 v[2], columns[2];
            macko_widen_32(v, dtype, packed[i]);
            for (int t = 0; t < tokens; t++) {
                const uint16_t *from = (const uint16_t *)x[t] + col + 32 * i;
                if (there == ~0ull)
                    macko_load_wide_32(columns, dtype, from);
                else
                    macko_widen_32(columns, dtype, _mm512_maskz_loadu_epi16((__mmask32)(there >> (32 * i)), from));
                __m512 *const to = sums[t] + 2 * i;
                to[0] = _mm512_fmadd_ps(v[0], columns[0], to[0]);
                to[1] = _mm512_fmadd_ps(v[1], columns[1], to[1]);
            }
        }
    }
    return at + __builtin_popcountll(mask);
}

MACKO_INLINE MACKO_TARGET_AVX512 int64_t row_avx512(const macko_bitmap *m, macko_dtype dtype, int tokens,
                                                    const uint8_t *bits, int64_t at, const void *const *x,
                                                    float *sums) {
    __m512 lanes[TOKENS_MAX][4];
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < 4; i++) lanes[t][i] = _mm512_setzero_ps();
    int64_t col = 0;
    for (; col + 64 <= m->cols; col += 64)
        at = add_64(m, dtype, tokens, macko_bitmap_word(bits, col / 64), ~0ull, col, at, x, lanes);
    if (col < m->cols)
        at = add_64(m, dtype, tokens, macko_bitmap_word(bits, col / 64), _bzhi_u64(~0ull, (unsigned)(m->cols - col)),
                    col, at, x, lanes);
    for (int t = 0; t < tokens; t++)
        sums[t] = _mm512_reduce_add_ps(
            _mm512_add_ps(_mm512_add_ps(lanes[t][0], lanes[t][1]), _mm512_add_ps(lanes[t][2], lanes[t][3])));
    return at;
}
#endif

#define ROW(path, target, dtype, tokens)                                                                               \
    static target int64_t row_##path##_##dtype##_##tokens(const macko_bitmap *m, const uint8_t *bits, int64_t at,      \
                                                          const void *const *x, float *sums) {                         \
        return row_##path(m, MACKO_##dtype, tokens, bits, at, x, sums);                                                \
    }
#define ROWS_OF_DTYPE(path, target, dtype)                                                                             \
    ROW(path, target, dtype, 1)                                                                                        \
    ROW(path, target, dtype, 2)                                                                                        \
    ROW(path, target, dtype, 4)
#define ROWS(path, target)                                                                                             \
    ROWS_OF_DTYPE(path, target, F16)                                                                                   \
    ROWS_OF_DTYPE(path, target, BF16)                                                                                  \
    ROWS_OF_DTYPE(path, target, F32)
ROWS(scalar, )
#if MACKO_X86
ROWS(avx2, MACKO_TARGET_AVX2)
ROWS(avx512, MACKO_TARGET_AVX512)
#endif

#define TOKENS(path, dtype) {row_##path##_##dtype##_1, row_##path##_##dtype##_2, row_##path##_##dtype##_4}
static row_sums *const rows_of[][3][3] = {
    [MACKO_SCALAR] = {TOKENS(scalar, F16), TOKENS(scalar, BF16), TOKENS(scalar, F32)},
#if MACKO_X86
    [MACKO_AVX2] = {TOKENS(avx2, F16), TOKENS(avx2, BF16), TOKENS(avx2, F32)},
    [MACKO_AVX512] = {TOKENS(avx512, F16), TOKENS(avx512, BF16), TOKENS(avx512, F32)},
#endif
};

macko_fault macko_bitmap_spmv_cpu(const macko_bitmap *m, const void *x, int64_t tokens, const void *bias, int64_t begin,
                                  int64_t end, void *y) {
    row_sums *const *const kernels = rows_of[macko_best_cpu_path()][m->dtype];
    const int64_t words = macko_bitmap_words(m->cols), size = m->dtype == MACKO_F32 ? 4 : 2;
    for (int64_t row = begin; row < end; row++) {
        if (!macko_bitmap_row_is_safe(m, row)) {
            const macko_fault fault = macko_bitmap_check_bounds_cpu(m, row, row + 1);
            if (fault.kind) return fault;
        }
        const uint8_t *bits = m->bits + row * words * 8;
        for (int64_t token = 0; token < tokens; token += TOKENS_MAX) {
            const int count = (int)(tokens - token < TOKENS_MAX ? tokens - token : TOKENS_MAX);
            const int which = count > 2 ? 2 : count - 1;
            const void *from[TOKENS_MAX]; /* the last token once more in the place of those that do not exist */
            for (int t = 0; t < TOKENS_MAX; t++)
                from[t] = (const char *)x + (token + (t < count ? t : count - 1)) * m->cols * size;
            float sums[TOKENS_MAX];
            const int64_t end = kernels[which](m, bits, m->row_ptr[row], from, sums);
            if (end != m->row_ptr[row + 1]) return macko_bitmap_check_bounds_cpu(m, row, row + 1);
            for (int t = 0; t < count; t++)
                macko_store(y, m->dtype, (token + t) * m->rows + row,
                            bias ? sums[t] + macko_load(bias, m->dtype, row) : sums[t]);
        }
    }
    return (macko_fault){MACKO_BITMAP_OK, 0, -1, 0};
}
