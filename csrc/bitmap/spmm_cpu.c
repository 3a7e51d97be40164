/*
 * y = x W^T from the bitmap layout, for several tokens: the lanes of a vector are tokens. x is turned first, so that the
 * tokens of a column lie side by side. A panel of rows then passes one block of columns after the other.
 *
 * FLOATS  in fp32. The places of the columns of a row's non-zeros are listed, and each non-zero is broadcast and multiplied
 *         with the tokens of its column. The zeros cost nothing: at density 0.5 this is half of a dense product's work.
 * PAIRS   for bf16 where there is avx512_bf16, whose products of pairs do twice the work of an fma. The block of columns
 *         is written densely, and a group of rows times a group of tokens stays in registers.
 *
 *     turned x   a block for each group of tokens; in it one for each block of columns;
 *     FLOATS     in it a row of zeros, then for each column a row of its tokens
 *     PAIRS      in it for each pair of columns a row of its tokens' pairs
 */
#include "../core/cpu.h"
#include "rows_cpu.h"

enum {
    BLOCK_BYTES = 24 << 10,         /* of x in a block of columns: three quarters of a first cache of 32 KB */
    FLOATS_LANES = 32,              /* at most */
    FLOATS_COLS = BLOCK_BYTES / 32, /* of the widest block, that of 8 tokens */
    PAIRS_LANES = 48,               /* at most */
    PAIRS_COLS = 1024,              /* its x, 96 KB for 48 tokens, comes from the second cache as fast as it is used */
    PAIRS_STRIDE = PAIRS_COLS + 32, /* of a row in the block: rows 2 KB apart would share the sets of the first cache */
    EXPAND_AHEAD = 1024,            /* bytes: where the row's values of the next block are at density 0.5 */
    PANEL_ROWS = 64,                /* at most; a multiple of the rows of a group */
    PANEL_BYTES = 256 << 10,        /* of values, about: the second cache holds a panel and the next */
};

/* How the next tokens are turned. */
typedef struct layout {
    int pairs;     /* PAIRS or FLOATS */
    int64_t lanes; /* tokens of a group; those that do not exist are 0 */
    int64_t cols;  /* of a block of columns: a multiple of MACKO_BITMAP_WORD */
} layout;

static int has_pairs(macko_dtype dtype) {
#if MACKO_X86
    return dtype == MACKO_BF16 && macko_best_cpu_path() == MACKO_AVX512 && __builtin_cpu_supports("avx512bf16");
#else
    (void)dtype;
    return 0;
#endif
}

/* Where `tokens` are left. */
static layout layout_of(int pairs, int64_t tokens) {
    if (pairs) { /* few lanes leave the registers idle: not 48 and 16 but 32 and 32 */
        const int64_t lanes = tokens > PAIRS_LANES + 16 ? PAIRS_LANES
                              : tokens > PAIRS_LANES    ? 32
                                                        : (tokens + 7) / 8 * 8;
        return (layout){1, lanes, PAIRS_COLS};
    }
    const int64_t lanes = tokens > 16 ? 32 : tokens > 8 ? 16 : 8;
    return (layout){0, lanes, BLOCK_BYTES / (lanes * 4)};
}

/* Bytes of the columns before `cols`; of whole blocks, or with the part of one. */
static int64_t turned_bytes(layout l, int64_t cols) {
    if (l.pairs) return macko_bitmap_words(cols) * MACKO_BITMAP_WORD * l.lanes * 2;
    return (cols + (cols + l.cols - 1) / l.cols) * l.lanes * 4;
}

int64_t macko_bitmap_turned_bytes(const macko_bitmap *m, int64_t tokens) {
    const int pairs = has_pairs(m->dtype);
    if (macko_best_cpu_path() == MACKO_SCALAR) return 0;
    int64_t bytes = 0;
    while (tokens > 0) {
        const layout l = layout_of(pairs, tokens);
        bytes += turned_bytes(l, m->cols);
        tokens -= l.lanes;
    }
    return bytes;
}

#if MACKO_X86
#define MACKO_TARGET_AVX512_BF16                                                                                       \
    __attribute__((target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,"      \
                          "gfni,avx512bf16")))

/* v[i][j] = v[j][i] */
MACKO_INLINE MACKO_TARGET_AVX2 void transpose(__m256 v[8]) {
    __m256 w[8];
    for (int i = 0; i < 8; i += 2) {
        w[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        w[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm256_shuffle_ps(w[i + j], w[i + j + 2], 0x44);
            v[i + 2 * j + 1] = _mm256_shuffle_ps(w[i + j], w[i + j + 2], 0xee);
        }
    }
    for (int i = 0; i < 4; i++) {
        w[i] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x20);
        w[i + 4] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) v[i] = w[i];
}

/* The word of columns from col on, for one group of tokens, x [tokens, m->cols]. Eight tokens times eight elements. */
static MACKO_TARGET_AVX2 void turn_word(const macko_bitmap *m, layout l, const void *x, int64_t tokens, int64_t col,
                                        char *group) {
    const int64_t there = m->cols - col < MACKO_BITMAP_WORD ? m->cols - col : MACKO_BITMAP_WORD;
    const int64_t size = m->dtype == MACKO_F32 ? 4 : 2, cols = l.pairs ? 2 : 1; /* of an element of four bytes */
    const int64_t count = l.pairs ? MACKO_BITMAP_WORD / 2 : there;
    float *to = (float *)(group + turned_bytes(l, col));
    if (!l.pairs && col % l.cols == 0) { /* the row of zeros of a block */
        memset(to, 0, (size_t)l.lanes * 4);
        to += l.lanes;
    }
    for (int64_t t = 0; t < l.lanes; t += 8) {
        for (int64_t e = 0; e < count; e += 8) {
            const int64_t left = there - e * cols; /* columns that exist, of eight elements */
            __m256 v[8];
            for (int64_t i = 0; i < 8; i++) {
                _Alignas(32) char some[32] = {0};
                const char *from = (const char *)x + ((t + i) * m->cols + col + e * cols) * size;
                if (t + i >= tokens)
                    from = some;
                else if (left < 8 * cols)
                    from = memcpy(some, from, (size_t)((left > 0 ? left : 0) * size));
                if (l.pairs)
                    v[i] = _mm256_loadu_ps((const float *)from);
                else
                    v[i] = m->dtype == MACKO_F32   ? macko_load_8(from, MACKO_F32, 0)
                           : m->dtype == MACKO_F16 ? macko_load_8(from, MACKO_F16, 0)
                                                   : macko_load_8(from, MACKO_BF16, 0);
            }
            transpose(v);
            for (int64_t j = 0; j < 8 && e + j < count; j++) _mm256_storeu_ps(to + (e + j) * l.lanes + t, v[j]);
        }
    }
}

void macko_bitmap_turn_cpu(const macko_bitmap *m, const void *x, int64_t tokens, int64_t begin, int64_t end,
                           void *turned) {
    const int64_t token_bytes = m->cols * (m->dtype == MACKO_F32 ? 4 : 2);
    char *group = turned;
    for (int64_t token = 0; token < tokens;) {
        const layout l = layout_of(has_pairs(m->dtype), tokens - token);
        const int64_t here = tokens - token < l.lanes ? tokens - token : l.lanes;
        for (int64_t word = begin; word < end; word++)
            turn_word(m, l, (const char *)x + token * token_bytes, here, word * MACKO_BITMAP_WORD, group);
        group += turned_bytes(l, m->cols);
        token += here;
    }
}

/*
 * Asks for what is wanted later, into the second cache. It has to be spread over the work: many at once fill the queue of
 * misses, and everything waits for it. And in the order of memory, which is twice as fast as in that of use.
 */
MACKO_INLINE void fetch(uintptr_t at) {
    __builtin_prefetch((const void *)at, 0, 2);
}

/*
 * Adds a piece of a row, `words` words whose values begin at `at`, to sums [lanes]; x: the block of columns. Meanwhile asks
 * for as many bytes from `ahead` on. Returns how many values there were.
 */
typedef int64_t piece(const macko_bitmap *m, const uint8_t *bits, int64_t words, int64_t at, uintptr_t ahead,
                      const char *x, float *sums);

/* The columns of the bits of a byte, in order. */
static uint8_t columns_of[256][8];

static __attribute__((constructor)) void fill_columns(void) {
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0, i = 0; bit < 8; bit++)
            if (byte >> bit & 1) columns_of[byte][i++] = (uint8_t)bit;
}

/*
 * Where the columns of a piece's non-zeros lie, in bytes from the start of the block of columns, 1 << shift a column;
 * after them some times the row of zeros. Returns how many there are.
 */
MACKO_INLINE MACKO_TARGET_AVX2 int64_t find_avx2(int shift, const uint8_t *bits, int64_t words, uint16_t *places) {
    int64_t count = 0;
    __m128i base = _mm_set1_epi16(1);
    for (int64_t byte = 0; byte < words * 8; byte++) {
        const __m128i cols = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)columns_of[bits[byte]]));
        _mm_storeu_si128((__m128i *)(places + count), _mm_slli_epi16(_mm_add_epi16(cols, base), shift));
        count += __builtin_popcount(bits[byte]);
        base = _mm_add_epi16(base, _mm_set1_epi16(8));
    }
    _mm_storeu_si128((__m128i *)(places + count), _mm_setzero_si128());
    return count;
}

MACKO_INLINE MACKO_TARGET_AVX512 int64_t find_avx512(int shift, const uint8_t *bits, int64_t words, uint16_t *places) {
    int64_t count = 0;
    __m512i cols = _mm512_set_epi16(32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12,
                                    11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1);
    cols = _mm512_slli_epi16(cols, (unsigned)shift);
    for (int64_t half = 0; half < words * 2; half++) {
        uint32_t mask;
        memcpy(&mask, bits + half * 4, 4);
        _mm512_storeu_si512(places + count, _mm512_maskz_compress_epi16(mask, cols));
        cols = _mm512_add_epi16(cols, _mm512_set1_epi16((short)(32 << shift)));
        count += __builtin_popcount(mask);
    }
    _mm_storeu_si128((__m128i *)(places + count), _mm_setzero_si128());
    return count;
}

/*
 * The values from `at` on in fp32: those of whole groups of eight where the return value says, widened to `wide` if they
 * have to be; the rest, and zeros, in last [8].
 */
MACKO_INLINE MACKO_TARGET_AVX2 const float *widened(const macko_bitmap *m, macko_dtype dtype, int64_t at, int64_t count,
                                                    float *wide, float *last) {
    const int64_t whole = count & -8;
    const __m256i there =
        _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(count - whole)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    _mm256_store_ps(last, _mm256_and_ps(macko_load_8(m->values, dtype, at + whole), _mm256_castsi256_ps(there)));
    if (dtype == MACKO_F32) return (const float *)m->values + at;
    for (int64_t i = 0; i < whole; i += 8) _mm256_store_ps(wide + i, macko_load_8(m->values, dtype, at + i));
    return wide;
}

/* sums [lanes] += the values times the tokens at their places. Eight accumulators: an fma takes four cycles or more. */
#define ADD_TOKENS(name, target, vector, ops)                                                                          \
    MACKO_INLINE target void name(int lanes, const float *values, const float *last, const uint16_t *places,           \
                                  int64_t count, uintptr_t ahead, int size, const char *x, float *sums) {              \
        const int width = (int)(sizeof(vector) / sizeof(float)), vectors = lanes / width, sets = 8 / vectors;          \
        vector acc[8];                                                                                                 \
        for (int i = 0; i < 8; i++) acc[i] = ops##_setzero_ps();                                                       \
        for (int64_t i = 0; i < count; i += 8) {                                                                       \
            const float *const from = i + 8 > count ? last : values + i;                                               \
            fetch(ahead + (uintptr_t)(i * size));                                                                      \
            for (int k = 0; k < 8; k++) {                                                                              \
                const vector *const tokens = (const vector *)(x + places[i + k]);                                      \
                const vector v = ops##_set1_ps(from[k]);                                                               \
                for (int j = 0; j < vectors; j++)                                                                      \
                    acc[k % sets * vectors + j] = ops##_fmadd_ps(v, tokens[j], acc[k % sets * vectors + j]);           \
            }                                                                                                          \
        }                                                                                                              \
        for (int half = 4; half >= vectors; half /= 2)                                                                 \
            for (int i = 0; i < half; i++) acc[i] = ops##_add_ps(acc[i], acc[i + half]);                               \
        for (int j = 0; j < vectors; j++)                                                                              \
            ops##_storeu_ps(sums + width * j, ops##_add_ps(ops##_loadu_ps(sums + width * j), acc[j]));                 \
    }
ADD_TOKENS(add_by_8, MACKO_TARGET_AVX2, __m256, _mm256)
ADD_TOKENS(add_by_16, MACKO_TARGET_AVX512, __m512, _mm512)

MACKO_INLINE MACKO_TARGET_AVX2 int64_t piece_avx2(const macko_bitmap *m, macko_dtype dtype, int lanes,
                                                  const uint8_t *bits, int64_t words, int64_t at, uintptr_t ahead,
                                                  const char *x, float *sums) {
    _Alignas(64) uint16_t places[FLOATS_COLS + 32];
    _Alignas(64) float wide[FLOATS_COLS + 32], last[8];
    const int64_t count = find_avx2(lanes == 8 ? 5 : lanes == 16 ? 6 : 7, bits, words, places);
    const float *const values = widened(m, dtype, at, count, wide, last);
    add_by_8(lanes, values, last, places, count, ahead, dtype == MACKO_F32 ? 4 : 2, x, sums);
    return count;
}

MACKO_INLINE MACKO_TARGET_AVX512 int64_t piece_avx512(const macko_bitmap *m, macko_dtype dtype, int lanes,
                                                      const uint8_t *bits, int64_t words, int64_t at, uintptr_t ahead,
                                                      const char *x, float *sums) {
    _Alignas(64) uint16_t places[FLOATS_COLS + 32];
    _Alignas(64) float wide[FLOATS_COLS + 32], last[8];
    const int64_t count = find_avx512(lanes == 8 ? 5 : lanes == 16 ? 6 : 7, bits, words, places);
    const float *const values = widened(m, dtype, at, count, wide, last);
    if (lanes == 8)
        add_by_8(lanes, values, last, places, count, ahead, dtype == MACKO_F32 ? 4 : 2, x, sums);
    else
        add_by_16(lanes, values, last, places, count, ahead, dtype == MACKO_F32 ? 4 : 2, x, sums);
    return count;
}

#define PIECE(path, target, dtype, lanes)                                                                              \
    static target int64_t piece_##path##_##dtype##_##lanes(const macko_bitmap *m, const uint8_t *bits, int64_t words,  \
                                                           int64_t at, uintptr_t ahead, const char *x, float *sums) {  \
        return piece_##path(m, MACKO_##dtype, lanes, bits, words, at, ahead, x, sums);                                 \
    }
#define PIECES_OF_DTYPE(path, target, dtype)                                                                           \
    PIECE(path, target, dtype, 8)                                                                                      \
    PIECE(path, target, dtype, 16)                                                                                     \
    PIECE(path, target, dtype, 32)
#define PIECES(path, target)                                                                                           \
    PIECES_OF_DTYPE(path, target, F16)                                                                                 \
    PIECES_OF_DTYPE(path, target, BF16)                                                                                \
    PIECES_OF_DTYPE(path, target, F32)
PIECES(avx2, MACKO_TARGET_AVX2)
PIECES(avx512, MACKO_TARGET_AVX512)

#define PIECES_OF(path, dtype) {piece_##path##_##dtype##_8, piece_##path##_##dtype##_16, piece_##path##_##dtype##_32}
static piece *const pieces[][3][3] = {
    [MACKO_AVX2] = {PIECES_OF(avx2, F16), PIECES_OF(avx2, BF16), PIECES_OF(avx2, F32)},
    [MACKO_AVX512] = {PIECES_OF(avx512, F16), PIECES_OF(avx512, BF16), PIECES_OF(avx512, F32)},
};

/* Eight numbers, rounded to dtype, to element i of y. */
MACKO_INLINE MACKO_TARGET_AVX2 void store_8(void *y, macko_dtype dtype, int64_t i, __m256 v) {
    if (dtype == MACKO_F32) {
        _mm256_storeu_ps((float *)y + i, v);
        return;
    }
    __m128i to;
    if (dtype == MACKO_F16) {
        to = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
    } else {
        const __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
        const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        up = _mm256_srli_epi32(up, 16);
        const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40)); /* NaN stays NaN */
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        const __m256i all = _mm256_blendv_epi8(up, quiet, nan);
        to = _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    }
    _mm_storeu_si128((__m128i *)((uint16_t *)y + i), to);
}

/* y [tokens, m->rows] from sums [rows, lanes] of the rows from `first` on. Eight rows times eight tokens. */
static MACKO_TARGET_AVX2 void store_sums(const macko_bitmap *m, const void *bias, int64_t first, int64_t rows,
                                         int64_t lanes, int64_t tokens, const float *sums, char *y) {
    const int64_t size = m->dtype == MACKO_F32 ? 4 : 2;
    for (int64_t r = 0; r < rows; r += 8) {
        const int64_t count = rows - r < 8 ? rows - r : 8;
        for (int64_t t = 0; t < tokens; t += 8) {
            __m256 v[8];
            for (int64_t i = 0; i < 8; i++) {
                v[i] = i < count ? _mm256_loadu_ps(sums + (r + i) * lanes + t) : _mm256_setzero_ps();
                if (bias && i < count)
                    v[i] = _mm256_add_ps(v[i], _mm256_set1_ps(macko_load(bias, m->dtype, first + r + i)));
            }
            transpose(v);
            for (int64_t j = 0; j < 8 && t + j < tokens; j++) {
                char *const to = y + ((t + j) * m->rows + first + r) * size;
                char some[32];
                void *const eight = count < 8 ? some : to;
                if (m->dtype == MACKO_F32)
                    store_8(eight, MACKO_F32, 0, v[j]);
                else if (m->dtype == MACKO_F16)
                    store_8(eight, MACKO_F16, 0, v[j]);
                else
                    store_8(eight, MACKO_BF16, 0, v[j]);
                if (count < 8) memcpy(to, some, (size_t)(count * size));
            }
        }
    }
}

/* What of memory a panel asks for meanwhile: the values and bits of the next one. */
typedef struct later {
    uintptr_t values, bits;
} later;

static later later_after(const macko_bitmap *m, int64_t row) {
    const int64_t size = m->dtype == MACKO_F32 ? 4 : 2;
    return (later){(uintptr_t)m->values + (uintptr_t)(m->row_ptr[row] * size),
                   (uintptr_t)m->bits + (uintptr_t)(row * macko_bitmap_words(m->cols) * 8)};
}

/* FLOATS: y of the rows [first, first + rows). They are safe; false where a row's bits are not as many as its values. */
static int floats_panel(const macko_bitmap *m, int64_t first, int64_t rows, const char *x, int64_t tokens,
                        const void *bias, void *y) {
    const int64_t words = macko_bitmap_words(m->cols), size = m->dtype == MACKO_F32 ? 4 : 2;
    _Alignas(64) float sums[PANEL_ROWS * FLOATS_LANES];
    int64_t at[PANEL_ROWS];
    for (int64_t token = 0; token < tokens;) {
        const layout l = layout_of(0, tokens - token);
        const int64_t here = tokens - token < l.lanes ? tokens - token : l.lanes;
        const int64_t block_words = l.cols / MACKO_BITMAP_WORD, block_bytes = turned_bytes(l, l.cols);
        const int64_t x_share = (block_bytes / rows + 63) / 64 * 64;
        piece *const add = pieces[macko_best_cpu_path()][m->dtype][l.lanes == 8 ? 0 : l.lanes == 16 ? 1 : 2];
        later ahead = later_after(m, first + rows);
        memset(sums, 0, (size_t)(rows * l.lanes) * sizeof *sums);
        for (int64_t r = 0; r < rows; r++) at[r] = m->row_ptr[first + r];
        for (int64_t word = 0; word < words; word += block_words) {
            const char *const block = x + word / block_words * block_bytes;
            const int64_t count = words - word < block_words ? words - word : block_words;
            for (int64_t r = 0; r < rows; r++) {
                for (int64_t byte = 0; byte < count * 8; byte += 64) fetch(ahead.bits + (uintptr_t)byte);
                for (int64_t byte = 0; byte < x_share; byte += 64)
                    fetch((uintptr_t)block + (uintptr_t)(block_bytes + r * x_share + byte));
                const uint8_t *const bits = m->bits + ((first + r) * words + word) * 8;
                const int64_t found = add(m, bits, count, at[r], ahead.values, block, sums + r * l.lanes);
                at[r] += found;
                ahead.values += (uintptr_t)(found * size);
                ahead.bits += (uintptr_t)(count * 8);
            }
        }
        for (int64_t r = 0; r < rows; r++)
            if (at[r] != m->row_ptr[first + r + 1]) return 0;
        store_sums(m, bias, first, rows, l.lanes, here, sums, (char *)y + token * m->rows * size);
        x += turned_bytes(l, m->cols);
        token += here;
    }
    return 1;
}

/*
 * sums [rows of the group, lanes] += w [rows, PAIRS_COLS] x, `pairs` pairs of columns. The accumulators and a row of x stay
 * in registers: at most 24 vectors and 3.
 */
typedef void group(const uint16_t *w, const char *x, int64_t pairs, float *sums);

#define GROUP(lanes, rows)                                                                                             \
    static MACKO_TARGET_AVX512_BF16 void group_##lanes(const uint16_t *w, const char *x, int64_t pairs, float *sums) { \
        enum { WHOLE = lanes / 16, HALF = lanes % 16 / 8 };                                                            \
        __m512 acc[rows][WHOLE + 1];                                                                                   \
        __m256 half[rows];                                                                                             \
        for (int r = 0; r < rows; r++) {                                                                               \
            for (int j = 0; j < WHOLE; j++) acc[r][j] = _mm512_loadu_ps(sums + r * lanes + 16 * j);                    \
            if (HALF) half[r] = _mm256_loadu_ps(sums + r * lanes + 16 * WHOLE);                                        \
        }                                                                                                              \
        for (int64_t p = 0; p < pairs; p++, x += lanes * 4) {                                                          \
            __m512bh tokens[WHOLE + 1];                                                                                \
            for (int j = 0; j < WHOLE; j++) tokens[j] = (__m512bh)_mm512_loadu_si512(x + 64 * j);                      \
            const __m256bh last = (__m256bh)_mm256_loadu_si256((const __m256i *)(x + (HALF ? 64 * WHOLE : 0)));        \
            for (int r = 0; r < rows; r++) {                                                                           \
                uint32_t pair;                                                                                         \
                memcpy(&pair, w + r * PAIRS_STRIDE + 2 * p, 4);                                                        \
                const __m512i v = _mm512_set1_epi32((int)pair);                                                        \
                for (int j = 0; j < WHOLE; j++) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], tokens[j], (__m512bh)v);       \
                if (HALF) half[r] = _mm256_dpbf16_ps(half[r], last, (__m256bh)_mm512_castsi512_si256(v));              \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < rows; r++) {                                                                               \
            for (int j = 0; j < WHOLE; j++) _mm512_storeu_ps(sums + r * lanes + 16 * j, acc[r][j]);                    \
            if (HALF) _mm256_storeu_ps(sums + r * lanes + 16 * WHOLE, half[r]);                                        \
        }                                                                                                              \
    }
GROUP(8, 16)
GROUP(16, 16)
GROUP(24, 8)
GROUP(32, 8)
GROUP(40, 8)
GROUP(48, 8)
static group *const groups[] = {group_8, group_16, group_24, group_32, group_40, group_48};

/* Writes a piece of a row densely to w, and returns how many values there were. */
static MACKO_TARGET_AVX512 int64_t expand(const uint8_t *bits, int64_t words, const uint16_t *values, uint16_t *w) {
    int64_t count = 0;
    for (int64_t half = 0; half < words * 2; half++) {
        uint32_t mask;
        memcpy(&mask, bits + half * 4, 4);
        fetch((uintptr_t)(values + count) + EXPAND_AHEAD);
        _mm512_store_si512(w + half * 32, _mm512_maskz_expand_epi16(mask, macko_load_512(values + count)));
        count += __builtin_popcount(mask);
    }
    return count;
}

/* PAIRS: the same. */
static int pairs_panel(const macko_bitmap *m, int64_t first, int64_t rows, const char *x, int64_t tokens,
                       const void *bias, void *y) {
    const int64_t words = macko_bitmap_words(m->cols), block_words = PAIRS_COLS / MACKO_BITMAP_WORD;
    _Alignas(64) uint16_t w[PANEL_ROWS * PAIRS_STRIDE];
    _Alignas(64) float sums[PANEL_ROWS * MACKO_BITMAP_TOKENS];
    int64_t at[PANEL_ROWS];
    const int64_t groups_rows = (rows + 15) / 16 * 16; /* rows that do not exist are 0 */
    memset(sums, 0, (size_t)(PANEL_ROWS * ((tokens + 7) / 8 * 8)) * sizeof *sums);
    memset(w + rows * PAIRS_STRIDE, 0, (size_t)((groups_rows - rows) * PAIRS_STRIDE) * sizeof *w);
    for (int64_t r = 0; r < rows; r++) at[r] = m->row_ptr[first + r];
    for (int64_t word = 0; word < words; word += block_words) {
        const int64_t count = words - word < block_words ? words - word : block_words;
        const int64_t pairs = count * MACKO_BITMAP_WORD / 2;
        for (int64_t r = 0; r < rows; r++)
            at[r] += expand(m->bits + ((first + r) * words + word) * 8, count, (const uint16_t *)m->values + at[r],
                            w + r * PAIRS_STRIDE);
        const char *turned = x;
        float *to = sums;
        for (int64_t token = 0; token < tokens;) {
            const layout l = layout_of(1, tokens - token);
            const int64_t step = l.lanes > 16 ? 8 : 16;
            const char *const block = turned + turned_bytes(l, word * MACKO_BITMAP_WORD);
            for (int64_t r = 0; r < groups_rows; r += step)
                groups[l.lanes / 8 - 1](w + r * PAIRS_STRIDE, block, pairs, to + r * l.lanes);
            to += PANEL_ROWS * l.lanes;
            turned += turned_bytes(l, m->cols);
            token += l.lanes;
        }
    }
    for (int64_t r = 0; r < rows; r++)
        if (at[r] != m->row_ptr[first + r + 1]) return 0;
    float *from = sums;
    for (int64_t token = 0; token < tokens;) {
        const layout l = layout_of(1, tokens - token);
        const int64_t here = tokens - token < l.lanes ? tokens - token : l.lanes;
        store_sums(m, bias, first, rows, l.lanes, here, from, (char *)y + token * m->rows * 2);
        from += PANEL_ROWS * l.lanes;
        token += here;
    }
    return 1;
}

macko_fault macko_bitmap_spmm_cpu(const macko_bitmap *m, const void *turned, int64_t tokens, const void *bias,
                                  int64_t begin, int64_t end, void *y) {
    const int64_t size = m->dtype == MACKO_F32 ? 4 : 2, mean_row = m->capacity / (m->rows ? m->rows : 1) * size;
    const int64_t fitting = PANEL_BYTES / (mean_row ? mean_row : 1) / 16 * 16;
    const int64_t panel = fitting < 16 ? 16 : fitting < PANEL_ROWS ? fitting : PANEL_ROWS;
    const int pairs = has_pairs(m->dtype);
    for (int64_t first = begin; first < end; first += panel) {
        const int64_t rows = end - first < panel ? end - first : panel;
        int sound = 1;
        for (int64_t row = first; row < first + rows; row++)
            if (!macko_bitmap_row_is_safe(m, row))
                sound = sound && !macko_bitmap_check_bounds_cpu(m, row, row + 1).kind;
        if (sound) sound = (pairs ? pairs_panel : floats_panel)(m, first, rows, turned, tokens, bias, y);
        if (!sound) return macko_bitmap_check_bounds_cpu(m, first, first + rows);
    }
    return (macko_fault){MACKO_BITMAP_OK, 0, -1, 0};
}
#else /* never called: macko_bitmap_turned_bytes is 0 */
void macko_bitmap_turn_cpu(const macko_bitmap *m, const void *x, int64_t tokens, int64_t begin, int64_t end,
                           void *turned) {
    (void)m, (void)x, (void)tokens, (void)begin, (void)end, (void)turned;
}

macko_fault macko_bitmap_spmm_cpu(const macko_bitmap *m, const void *turned, int64_t tokens, const void *bias,
                                  int64_t begin, int64_t end, void *y) {
    (void)turned, (void)tokens, (void)bias, (void)end, (void)y;
    return macko_bitmap_check_bounds_cpu(m, begin, begin);
}
#endif
