/*
 * y = W x on the CPU. A row is one thread's, and its sum has one order for each vector path: the same bits every run.
 *
 * avx512 looks x up in registers: vpermi2w picks 32 of 64 neighbouring columns, and 32 entries at 50 % sparse span about
 * 64. With two of them and a blend an entry costs 0.09 ns on one core of a Zen 5 (2026-11), against 0.27 with scalar
 * loads put together, 0.36 with gathers of either width, 0.48 scalar. avx2 puts scalar loads together, on either kind of
 * core; it serves fp32 and 8-bit deltas on avx512 machines too.
 */
#include "entries_cpu.h"

/* Columns that one lookup may touch. The last ones are copied in front of as many zeros, so that none reads past x. */
enum { REACH = 256, UNIT_MAX = 16 };

typedef struct context {
    const macko_matrix *m;
    const void *x;
    uint16_t tail[2 * REACH + UNIT_MAX]; /* avx512 only */
} context;

/* The sum of the row's entries [entry, stop); 0 when a delta leads past the last column, which is then not read. */
typedef int row_dot(const context *c, int64_t entry, int64_t stop, float *sum);

/* Adds entries [entry, stop), the first of them counted from column `next`. Returns the column after the last, or -1. */
MACKO_INLINE int64_t add_scalar(const context *c, macko_dtype dtype, int delta_bits, int64_t entry, int64_t stop,
                                int64_t next, float *sum) {
    for (; entry < stop; entry++) {
        next += macko_delta_at(c->m->deltas, delta_bits, entry) + 1;
        if (next > c->m->cols) return -1;
        *sum += macko_load(c->m->values, dtype, entry) * macko_load(c->x, dtype, next - 1);
    }
    return next;
}

MACKO_INLINE int dot_scalar(const context *c, macko_dtype dtype, int delta_bits, int64_t entry, int64_t stop,
                            float *sum) {
    *sum = 0;
    return add_scalar(c, dtype, delta_bits, entry, stop, 0, sum) >= 0;
}

/* The first entry from `entry` on whose delta starts a byte, or stop. */
static inline int64_t byte_start(int64_t entry, int64_t stop, int delta_bits) {
    const int64_t start = entry + (-entry & (8 / delta_bits - 1));
    return start < stop ? start : stop;
}

#if MACKO_X86
MACKO_INLINE MACKO_TARGET_AVX2 int dot_avx2(const context *c, macko_dtype dtype, int delta_bits, int64_t entry,
                                            int64_t stop, float *sum) {
    const macko_matrix *m = c->m;
    const int64_t start = byte_start(entry, stop, delta_bits);
    float ends = 0; /* entries before the first whole unit and after the last */
    int64_t next = add_scalar(c, dtype, delta_bits, entry, start, 0, &ends);
    if (next < 0) return 0;
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (entry = start; entry + 16 <= stop; entry += 16) {
        const uint8_t *deltas = m->deltas + entry * delta_bits / 8;
        macko_offsets unit[2];
        unit[0] = macko_decode_unit(macko_load_unit(deltas, delta_bits), delta_bits);
        if (delta_bits == 8) unit[1] = macko_decode_unit(macko_load_unit(deltas + 8, delta_bits), delta_bits);
        const int64_t base = next, second = next + unit[0].span;
        next = delta_bits == 8 ? second + unit[1].span : second;
        if (next > m->cols) return 0;
/* Place of entry k after `base`, or after `second` for the second unit, and x there. */
#define X(k)                                                                                                           \
    (delta_bits == 8 && (k) >= 8 ? x[1][macko_offset(&unit[1], 8, (k) - 8)]                                            \
                                 : x[0][macko_offset(&unit[0], delta_bits, (k))])
        if (dtype == MACKO_F32) {
            const float *const x[2] = {(const float *)c->x + base, (const float *)c->x + second};
            const float *v = (const float *)m->values + entry;
            macko_fetch_ahead(v);
            sums[0] = _mm256_fmadd_ps(_mm256_loadu_ps(v),
                                      _mm256_setr_ps(X(0), X(1), X(2), X(3), X(4), X(5), X(6), X(7)), sums[0]);
            sums[1] = _mm256_fmadd_ps(_mm256_loadu_ps(v + 8),
                                      _mm256_setr_ps(X(8), X(9), X(10), X(11), X(12), X(13), X(14), X(15)), sums[1]);
        } else {
            const int16_t *const x[2] = {(const int16_t *)c->x + base, (const int16_t *)c->x + second};
            const __m256i v = _mm256_loadu_si256((const __m256i *)((const uint16_t *)m->values + entry));
            const __m128i x0 = _mm_setr_epi16(X(0), X(1), X(2), X(3), X(4), X(5), X(6), X(7));
            const __m128i x1 = _mm_setr_epi16(X(8), X(9), X(10), X(11), X(12), X(13), X(14), X(15));
            macko_fma_16(sums, dtype, v, _mm256_set_m128i(x1, x0));
        }
#undef X
    }
    if (add_scalar(c, dtype, delta_bits, entry, stop, next, &ends) < 0) return 0;
    *sum = ends + macko_sum_8(_mm256_add_ps(sums[0], sums[1]));
    return 1;
}

/* x from column `next` on, REACH of them readable; `next` may lie up to UNIT_MAX after the last column. */
static inline const uint16_t *window_at(const context *c, int64_t next) {
    const int64_t cols = c->m->cols;
    return next + REACH <= cols ? (const uint16_t *)c->x + next : c->tail + (next - (cols > REACH ? cols - REACH : 0));
}

/* The 64 columns from `window` on, looked up at places & 63. */
MACKO_INLINE MACKO_TARGET_AVX512 __m512i pick_64(const uint16_t *window, __m512i places) {
    return _mm512_permutex2var_epi16(_mm512_loadu_si512(window), places, _mm512_loadu_si512(window + 32));
}

/* The 128 columns from `window` on, looked up at places & 127. */
MACKO_INLINE MACKO_TARGET_AVX512 __m512i pick_128(const uint16_t *window, __m512i places) {
    const __mmask32 far = _mm512_test_epi16_mask(places, _mm512_set1_epi16(64));
    return _mm512_mask_blend_epi16(far, pick_64(window, places), pick_64(window + 64, places));
}

/* x of the unit's sixteen entries, wherever they are: they span at most 256 columns. */
MACKO_INLINE MACKO_TARGET_AVX512 __m256i pick_unit(const uint16_t *window, macko_offsets unit) {
    const __m128i even = _mm_cvtsi64_si128((int64_t)unit.even), odd = _mm_cvtsi64_si128((int64_t)unit.odd);
    const __m512i places = _mm512_castsi256_si512(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(even, odd)));
    const __mmask32 far = _mm512_test_epi16_mask(places, _mm512_set1_epi16(128));
    return _mm512_castsi512_si256(
        _mm512_mask_blend_epi16(far, pick_128(window, places), pick_128(window + 128, places)));
}

/* Adds the `count` entries, at most 32, from `entry` on, whose delta starts a byte. Returns the next column, or -1. */
MACKO_INLINE MACKO_TARGET_AVX512 int64_t add_32(const context *c, macko_dtype dtype, int delta_bits, int64_t entry,
                                                int count, int64_t next, __m512 sums[2]) {
    const macko_matrix *m = c->m;
    const uint8_t *deltas = m->deltas + entry * delta_bits / 8;
    const __mmask32 kept = _bzhi_u32(0xffffffffu, (unsigned)count);
    uint64_t word[2];
    if (count == 32) {
        word[0] = macko_load_unit(deltas, delta_bits);
        word[1] = macko_load_unit(deltas + MACKO_UNIT_BYTES(delta_bits), delta_bits);
    } else {
        uint8_t bytes[16];
        const __mmask16 readable = (__mmask16)_bzhi_u32(0xffffu, (unsigned)(count * delta_bits + 7) / 8);
        _mm_storeu_si128((__m128i *)bytes, _mm_maskz_loadu_epi8(readable, deltas));
        /* What belongs to the next row counts as delta 0. */
        word[0] = _bzhi_u64(macko_load_unit(bytes, delta_bits), 4 * (unsigned)count);
        word[1] = _bzhi_u64(macko_load_unit(bytes + MACKO_UNIT_BYTES(delta_bits), delta_bits),
                            count > 16 ? 4 * (unsigned)(count - 16) : 0);
    }
    const macko_offsets near = macko_decode_unit(word[0], delta_bits), far = macko_decode_unit(word[1], delta_bits);
    const int64_t end = next + near.span + far.span - (32 - count);
    if (end > m->cols) return -1;
    __m512i x;
    if (near.span + far.span <= 128) {
        const uint64_t shift = 0x0101010101010101ull * (uint64_t)near.span;
        const __m128i even = _mm_set_epi64x((int64_t)(far.even + shift), (int64_t)near.even);
        const __m128i odd = _mm_set_epi64x((int64_t)(far.odd + shift), (int64_t)near.odd);
        const __m256i places = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
        x = pick_128(window_at(c, next), _mm512_cvtepu8_epi16(places));
    } else {
        x = _mm512_inserti64x4(_mm512_castsi256_si512(pick_unit(window_at(c, next), near)),
                               pick_unit(window_at(c, next + near.span), far), 1);
    }
    const uint16_t *values = (const uint16_t *)m->values + entry;
    macko_fetch_ahead(values);
    const __m512i v = count == 32 ? macko_load_512(values) : _mm512_maskz_loadu_epi16(kept, values);
    if (count < 32) x = _mm512_maskz_mov_epi16(kept, x); /* 0 times an Inf that is not the row's would be NaN */
    __m512 wide_v[2], wide_x[2];
    macko_widen_32(wide_v, dtype, v);
    macko_widen_32(wide_x, dtype, x);
    sums[0] = _mm512_fmadd_ps(wide_v[0], wide_x[0], sums[0]);
    sums[1] = _mm512_fmadd_ps(wide_v[1], wide_x[1], sums[1]);
    return end;
}

/* 16-bit types, 2- and 4-bit deltas. */
MACKO_INLINE MACKO_TARGET_AVX512 int dot_avx512(const context *c, macko_dtype dtype, int delta_bits, int64_t entry,
                                                int64_t stop, float *sum) {
    const int64_t start = byte_start(entry, stop, delta_bits);
    float ends = 0;
    int64_t next = add_scalar(c, dtype, delta_bits, entry, start, 0, &ends);
    if (next < 0) return 0;
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (entry = start; entry + 32 <= stop; entry += 32)
        if ((next = add_32(c, dtype, delta_bits, entry, 32, next, sums)) < 0) return 0;
    if (entry < stop && add_32(c, dtype, delta_bits, entry, (int)(stop - entry), next, sums) < 0) return 0;
    *sum = ends + _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
    return 1;
}

static void fill_tail(context *c) {
    const int64_t cols = c->m->cols, copied = cols < REACH ? cols : REACH;
    if (copied) memcpy(c->tail, (const uint16_t *)c->x + (cols - copied), (size_t)copied * 2);
    memset(c->tail + copied, 0, sizeof c->tail - (size_t)copied * 2);
}
#endif

#define DOT(path, target, dtype, bits)                                                                                 \
    static target int dot_##path##_##dtype##_##bits(const context *c, int64_t entry, int64_t stop, float *sum) {       \
        return dot_##path(c, MACKO_##dtype, bits, entry, stop, sum);                                                   \
    }
#define DOTS(path, target, dtype)                                                                                      \
    DOT(path, target, dtype, 2)                                                                                        \
    DOT(path, target, dtype, 4)                                                                                        \
    DOT(path, target, dtype, 8)
DOTS(scalar, , F16)
DOTS(scalar, , BF16)
DOTS(scalar, , F32)
#if MACKO_X86
DOTS(avx2, MACKO_TARGET_AVX2, F16)
DOTS(avx2, MACKO_TARGET_AVX2, BF16)
DOTS(avx2, MACKO_TARGET_AVX2, F32)
DOT(avx512, MACKO_TARGET_AVX512, F16, 2)
DOT(avx512, MACKO_TARGET_AVX512, F16, 4)
DOT(avx512, MACKO_TARGET_AVX512, BF16, 2)
DOT(avx512, MACKO_TARGET_AVX512, BF16, 4)
#endif

#define WIDTHS(path, dtype) {dot_##path##_##dtype##_2, dot_##path##_##dtype##_4, dot_##path##_##dtype##_8}
static row_dot *const dots[][3][3] = {
    [MACKO_SCALAR] = {WIDTHS(scalar, F16), WIDTHS(scalar, BF16), WIDTHS(scalar, F32)},
#if MACKO_X86
    [MACKO_AVX2] = {WIDTHS(avx2, F16), WIDTHS(avx2, BF16), WIDTHS(avx2, F32)},
    [MACKO_AVX512] = {{dot_avx512_F16_2, dot_avx512_F16_4, dot_avx2_F16_8},
                      {dot_avx512_BF16_2, dot_avx512_BF16_4, dot_avx2_BF16_8},
                      WIDTHS(avx2, F32)},
#endif
};

macko_fault macko_spmv_cpu(const macko_matrix *m, const void *x, const void *bias, int64_t begin, int64_t end,
                           void *y) {
    const macko_cpu_path path = macko_best_cpu_path();
    row_dot *const dot = dots[path][m->dtype][m->delta_bits / 4];
    context c;
    c.m = m;
    c.x = x;
#if MACKO_X86
    if (path == MACKO_AVX512 && m->dtype != MACKO_F32) fill_tail(&c);
#endif
    for (int64_t row = begin; row < end; row++) {
        const macko_fault fault = macko_check_row_ptr(m, row);
        if (fault.kind) return fault;
        float sum;
        if (!dot(&c, m->row_ptr[row], m->row_ptr[row + 1], &sum)) return macko_check_bounds_cpu(m, row, row + 1);
        macko_store(y, m->dtype, row, bias ? sum + macko_load(bias, m->dtype, row) : sum);
    }
    return (macko_fault){MACKO_OK, 0, -1, 0};
}
