/* y = W x on the CPU from EC-CSR. */
#include <string.h>

#include "../../csrc/core/cpu.h"
#include "ec.h"

void macko_ec_order_x_cpu(const macko_ec_matrix *m, const void *x, float *ordered) {
    for (int64_t c = 0; c < m->cols; c++)
        ordered[c] = macko_load(x, m->dtype, macko_ec_column(m->col_order, m->cols, c));
}

/*
 * A vector path's two steps over a chunk. gather: x of its columns in the order of its values; moves the lanes' columns
 * on. add: sums[i] += values[i] * gathered[i / height].
 */
typedef struct chunk_steps {
    void (*gather)(const uint8_t *deltas, int delta_bits, int vector, const float *x, int32_t *col, float *gathered);
    void (*add)(const void *values, macko_dtype dtype, const float *gathered, int columns, int height, float *sums);
} chunk_steps;

static void gather_scalar(const uint8_t *deltas, int delta_bits, int vector, const float *x, int32_t *col,
                          float *gathered) {
    uint32_t word = 0;
    int bits = 0;
    for (int lane = 0; lane < MACKO_EC_WARP; lane++)
        for (int j = 0; j < vector; j++) {
            if (bits < delta_bits) {
                word |= (uint32_t)*deltas++ << bits;
                bits += 8;
            }
            col[lane] += (int32_t)(word & ((1u << delta_bits) - 1));
            word >>= delta_bits;
            bits -= delta_bits;
            *gathered++ = x[col[lane]];
        }
}

static void add_scalar(const void *values, macko_dtype dtype, const float *gathered, int columns, int height,
                       float *sums) {
    for (int c = 0; c < columns; c++)
        for (int k = 0; k < height; k++)
            sums[c * height + k] += macko_load(values, dtype, c * height + k) * gathered[c];
}

#if MACKO_X86
/* Eight values of `height` rows need the x of 8 / height columns, each repeated `height` times. */
MACKO_TARGET_AVX2 static void add_avx2(const void *values, macko_dtype dtype, const float *gathered, int columns,
                                       int height, float *sums) {
    if (dtype == MACKO_F32) return add_scalar(values, dtype, gathered, columns, height, sums);
    const int shift = __builtin_ctz((unsigned)height);
    const __m256i repeat = _mm256_srl_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm_cvtsi32_si128(shift));
    for (int i = 0; i < columns * height; i += 8) {
        const __m128i bits = _mm_loadu_si128((const __m128i *)((const uint16_t *)values + i));
        const __m256 value = dtype == MACKO_F16
                                 ? _mm256_cvtph_ps(bits)
                                 : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
        const __m256 x = _mm256_permutevar8x32_ps(_mm256_loadu_ps(gathered + (i >> shift)), repeat);
        _mm256_storeu_ps(sums + i, _mm256_fmadd_ps(value, x, _mm256_loadu_ps(sums + i)));
    }
}

/*
 * Four columns of four lanes at a time, a lane in each 128 bits: one multishift takes the sixteen deltas apart, two shifts
 * within 128 bits sum them up.
 */
MACKO_TARGET_AVX512 static void gather_avx512(const uint8_t *deltas, int delta_bits, int vector, const float *x,
                                              int32_t *col, float *gathered) {
    if (vector != MACKO_EC_VECTOR) return gather_scalar(deltas, delta_bits, vector, x, col, gathered);
    /* Eight deltas are delta_bits bytes: 64 bits hold those from delta 0, or 8, on, and give two of them each. */
    const __m512i place =
        _mm512_mask_add_epi8(_mm512_set1_epi64(0x0706050403020100), 0xffffffff00000000,
                             _mm512_set1_epi64(0x0706050403020100), _mm512_set1_epi8((char)delta_bits));
    const __m512i shifts = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7),
                                              _mm512_set1_epi32(delta_bits));
    const uint8_t *const last =
        deltas + (MACKO_EC_CHUNK / 8) * delta_bits - 16; /* 16 bytes from here are the chunk's */
    const __m512i mask = _mm512_set1_epi32((1 << delta_bits) - 1);
    const __m512i of_lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i lasts = _mm512_setr_epi32(3, 7, 11, 15, 3, 7, 11, 15, 3, 7, 11, 15, 3, 7, 11, 15);
    for (int lane = 0; lane < MACKO_EC_WARP; lane += 4, deltas += 2 * delta_bits) {
        const uint8_t *const at = deltas < last ? deltas : last;
        const __m512i words = _mm512_permutexvar_epi8(_mm512_add_epi8(place, _mm512_set1_epi8((char)(deltas - at))),
                                                      _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)at)));
        __m512i cols = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, words), mask);
        cols = _mm512_add_epi32(cols, _mm512_bslli_epi128(cols, 4));
        cols = _mm512_add_epi32(cols, _mm512_bslli_epi128(cols, 8));
        cols = _mm512_add_epi32(
            cols, _mm512_permutexvar_epi32(of_lane, _mm512_castsi128_si512(_mm_loadu_si128((__m128i *)(col + lane)))));
        _mm_storeu_si128((__m128i *)(col + lane), _mm512_castsi512_si128(_mm512_permutexvar_epi32(lasts, cols)));
        _mm512_storeu_ps(gathered + lane * MACKO_EC_VECTOR, _mm512_i32gather_ps(cols, x, 4));
    }
}

MACKO_TARGET_AVX512 static void add_avx512(const void *values, macko_dtype dtype, const float *gathered, int columns,
                                           int height, float *sums) {
    const int shift = __builtin_ctz((unsigned)height);
    const __m512i repeat = _mm512_srl_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                            _mm_cvtsi32_si128(shift));
    for (int i = 0; i < columns * height; i += 16) {
        __m512 value;
        if (dtype == MACKO_F32) {
            value = _mm512_loadu_ps((const float *)values + i);
        } else {
            const __m256i bits = _mm256_loadu_si256((const __m256i *)((const uint16_t *)values + i));
            value = dtype == MACKO_F16 ? _mm512_cvtph_ps(bits)
                                       : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
        }
        const __m512 x = _mm512_permutexvar_ps(repeat, _mm512_loadu_ps(gathered + (i >> shift)));
        _mm512_storeu_ps(sums + i, _mm512_fmadd_ps(value, x, _mm512_loadu_ps(sums + i)));
    }
}
#endif

static chunk_steps best_steps(void) {
#if MACKO_X86
    const macko_cpu_path path = macko_best_cpu_path();
    if (path == MACKO_AVX512) return (chunk_steps){gather_avx512, add_avx512};
    if (path == MACKO_AVX2) return (chunk_steps){gather_scalar, add_avx2};
#endif
    return (chunk_steps){gather_scalar, add_scalar};
}

void macko_ec_spmv_cpu(const macko_ec_matrix *m, const float *x, const void *bias, int64_t begin, int64_t end,
                       void *y) {
    const chunk_steps steps = best_steps();
    float row_sums[MACKO_EC_MAX_TILE];
    const size_t value_bytes = m->dtype == MACKO_F32 ? 4 : 2;
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t first_row = tile * m->tile_rows;
        memset(row_sums, 0, (size_t)m->tile_rows * sizeof *row_sums);
        for (int64_t s = 0; s < m->num_sets; s++) {
            const macko_ec_set *set = &m->sets[s];
            const int height = (int)set->height, vector = (int)set->vector, chunk = MACKO_EC_WARP * vector;
            const int64_t pieces = MACKO_EC_WARP / set->lanes;
            const int32_t *tile_ptr = m->tile_ptr + s * (m->tiles + 1),
                          *indptr = m->block_indptr + set->first_block + s;
            for (int64_t block = tile_ptr[tile]; block < tile_ptr[tile + 1]; block++) {
                float sums[MACKO_EC_CHUNK * MACKO_EC_MAX_HEIGHT], gathered[MACKO_EC_CHUNK + 16];
                int32_t col[MACKO_EC_WARP];
                memset(sums, 0, (size_t)(chunk * height) * sizeof *sums);
                for (int lane = 0; lane < MACKO_EC_WARP; lane++) {
                    const int64_t at = (set->first_block + block) * MACKO_EC_WARP + lane;
                    col[lane] = (int32_t)macko_ec_column(m->base_indices, m->cols, at);
                }
                for (int64_t n = indptr[block]; n < indptr[block + 1]; n += chunk) {
                    steps.gather(m->delta_indices + set->first_delta + n * set->delta_bits / 8, (int)set->delta_bits,
                                 vector, x, col, gathered);
                    steps.add((const char *)m->block_values + (size_t)(set->first_value + n * height) * value_bytes,
                              m->dtype, gathered, chunk, height, sums);
                }
                for (int64_t piece = 0; piece < pieces; piece++)
                    for (int k = 0; k < height; k++) {
                        const int64_t row = m->row_indices[set->first_row + (block * pieces + piece) * height + k];
                        if (row < 0) continue;
                        float sum = 0;
                        for (int64_t c = piece * (chunk / pieces); c < (piece + 1) * (chunk / pieces); c++)
                            sum += sums[c * height + k];
                        row_sums[row - first_row] += sum;
                    }
            }
        }
        for (int64_t row = first_row; row < first_row + m->tile_rows && row < m->rows; row++) {
            const float sum = row_sums[row - first_row];
            macko_store(y, m->dtype, row, bias ? sum + macko_load(bias, m->dtype, row) : sum);
        }
    }
}
