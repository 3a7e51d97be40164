/*
 * y = W x from the bitmap layout, for one to four tokens at a time. A row is one thread's, and its sum has one order for
 * each vector path: the same bits every run.
 *
 * avx512 expands 32 values (16 of fp32) by a mask register and multiplies them with as many columns of x. avx2 moves
 * eight values, widened to fp32, to their columns by a permutation that pdep makes of the mask.
 */
#include "../core/cpu.h"
#include "rows_cpu.h"

enum { TOKENS_MAX = 4 };

/* The sums of one row for the kernel's number of tokens, x [tokens, cols]; values from `at` on. Returns the next `at`. */
typedef int64_t row_sums(const macko_bitmap *m, const uint8_t *bits, int64_t at, const void *x, float *sums);

/* Adds the columns [col, cols). A row that has come here has no bit behind the last column. */
MACKO_INLINE int64_t add_scalar(const macko_bitmap *m, macko_dtype dtype, int tokens, const uint8_t *bits, int64_t col,
                                int64_t at, const void *x, float *sums) {
    for (; col < m->cols; col = (col / MACKO_BITMAP_WORD + 1) * MACKO_BITMAP_WORD) {
        uint64_t mask = macko_bitmap_word(bits, col / MACKO_BITMAP_WORD) >> (col % MACKO_BITMAP_WORD);
        for (; mask; mask &= mask - 1, at++) {
            const int64_t where = col + __builtin_ctzll(mask);
            const float value = macko_load(m->values, dtype, at);
            for (int t = 0; t < tokens; t++) sums[t] += value * macko_load(x, dtype, t * m->cols + where);
        }
    }
    return at;
}

MACKO_INLINE int64_t row_scalar(const macko_bitmap *m, macko_dtype dtype, int tokens, const uint8_t *bits, int64_t at,
                                const void *x, float *sums) {
    for (int t = 0; t < tokens; t++) sums[t] = 0;
    return add_scalar(m, dtype, tokens, bits, 0, at, x, sums);
}

#if MACKO_X86
MACKO_INLINE MACKO_TARGET_AVX2 __m256 load_8(const void *p, macko_dtype dtype, int64_t i) {
    if (dtype == MACKO_F32) return _mm256_loadu_ps((const float *)p + i);
    const __m128i h = _mm_loadu_si128((const __m128i *)((const uint16_t *)p + i));
    if (dtype == MACKO_F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* The values of eight columns, at their columns, the others 0. */
MACKO_INLINE MACKO_TARGET_AVX2 __m256 expand_8(const macko_bitmap *m, macko_dtype dtype, unsigned mask, int64_t at) {
    const uint64_t kept = _pdep_u64(mask, 0x0101010101010101ull) * 0xff; /* a byte a column */
    const __m256i from = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)_pdep_u64(0x0706050403020100ull, kept)));
    const __m256i lanes = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)kept));
    const __m256 v = _mm256_permutevar8x32_ps(load_8(m->values, dtype, at), from);
    return _mm256_and_ps(v, _mm256_castsi256_ps(lanes));
}

MACKO_INLINE MACKO_TARGET_AVX2 int64_t row_avx2(const macko_bitmap *m, macko_dtype dtype, int tokens,
                                                const uint8_t *bits, int64_t at, const void *x, float *sums) {
    __m256 lanes[TOKENS_MAX][2];
    for (int t = 0; t < tokens; t++) lanes[t][0] = lanes[t][1] = _mm256_setzero_ps();
    int64_t col = 0;
    for (; col + 16 <= m->cols; col += 16) {
        for (int half = 0; half < 2; half++) {
            const unsigned mask = bits[col / 8 + half];
            const __m256 v = expand_8(m, dtype, mask, at);
            at += __builtin_popcount(mask);
            for (int t = 0; t < tokens; t++)
                lanes[t][half] = _mm256_fmadd_ps(v, load_8(x, dtype, t * m->cols + col + 8 * half), lanes[t][half]);
        }
    }
    for (int t = 0; t < tokens; t++) sums[t] = macko_sum_8(_mm256_add_ps(lanes[t][0], lanes[t][1]));
    return add_scalar(m, dtype, tokens, bits, col, at, x, sums);
}

/*
 * Adds 64 columns from col on, of which `there` exist. All values are loaded and expanded before the first is multiplied;
 * one vector after the other takes twice (fp32) to three times (fp16) as long on a Zen 5.
 */
MACKO_INLINE MACKO_TARGET_AVX512 int64_t add_64(const macko_bitmap *m, macko_dtype dtype, int tokens, uint64_t mask,
                                                uint64_t there, int64_t col, int64_t at, const void *x,
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
                const float *from = (const float *)x + t * m->cols + col + 16 * i;
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
                const uint16_t *from = (const uint16_t *)x + t * m->cols + col + 32 * i;
                if (there == ~0ull)
                    macko_load_wide_32(columns, dtype, from);
                else
                    macko_widen_32(columns, dtype, _mm512_maskz_loadu_epi16((__mmask32)(there >> (32 * i)), from));
                sums[t][2 * i] = _mm512_fmadd_ps(v[0], columns[0], sums[t][2 * i]);
                sums[t][2 * i + 1] = _mm512_fmadd_ps(v[1], columns[1], sums[t][2 * i + 1]);
            }
        }
    }
    return at + __builtin_popcountll(mask);
}

MACKO_INLINE MACKO_TARGET_AVX512 int64_t row_avx512(const macko_bitmap *m, macko_dtype dtype, int tokens,
                                                    const uint8_t *bits, int64_t at, const void *x, float *sums) {
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
                                                          const void *x, float *sums) {                                \
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
        for (int64_t token = 0; token < tokens;) {
            const int which = tokens - token >= 4 ? 2 : tokens - token >= 2 ? 1 : 0;
            float sums[TOKENS_MAX];
            const int64_t behind =
                kernels[which](m, bits, m->row_ptr[row], (const char *)x + token * m->cols * size, sums);
            if (behind != m->row_ptr[row + 1]) return macko_bitmap_check_bounds_cpu(m, row, row + 1);
            for (int t = 0; t < 1 << which; t++)
                macko_store(y, m->dtype, (token + t) * m->rows + row,
                            bias ? sums[t] + macko_load(bias, m->dtype, row) : sums[t]);
            token += 1 << which;
        }
    }
    return (macko_fault){MACKO_BITMAP_OK, 0, -1, 0};
}
