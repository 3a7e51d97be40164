/* y = W x on the CPU from EC-CSR. */
#include <stdlib.h>
#include <string.h>

#include "../core/cpu.h"
#include "ec.h"

static inline float load(const void *p, macko_dtype dtype, int64_t i) {
    if (dtype == MACKO_F32) return ((const float *)p)[i];
    const uint16_t bits = ((const uint16_t *)p)[i];
    return dtype == MACKO_F16 ? macko_f32_from_f16(bits) : macko_f32_from_bf16(bits);
}

static inline void store(void *p, macko_dtype dtype, int64_t i, float value) {
    if (dtype == MACKO_F32)
        ((float *)p)[i] = value;
    else
        ((uint16_t *)p)[i] = dtype == MACKO_F16 ? macko_f16_from_f32(value) : macko_bf16_from_f32(value);
}

void ec_order_x_cpu(const ec_matrix *m, const void *x, float *ordered) {
    for (int64_t c = 0; c < m->cols; c++) ordered[c] = load(x, m->dtype, ec_column(m->col_order, m->cols, c));
}

/* sums[i] += values[i] * gathered[i / height] for a chunk of `columns` columns, with the best instructions there are. */
typedef void chunk_add(const void *values, macko_dtype dtype, const float *gathered, int columns, int height,
                       float *sums);

static void add_scalar(const void *values, macko_dtype dtype, const float *gathered, int columns, int height,
                       float *sums) {
    for (int c = 0; c < columns; c++)
        for (int k = 0; k < height; k++) sums[c * height + k] += load(values, dtype, c * height + k) * gathered[c];
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
#endif

static chunk_add *best_add(void) {
#if MACKO_X86
    if (macko_best_cpu_path() != MACKO_SCALAR) return add_avx2;
#endif
    return add_scalar;
}

/* x of the columns of one chunk, in the order of its values; moves the lanes' columns on. */
static void gather(const uint8_t *deltas, int delta_bits, int vector, const float *x, int64_t *col, float *gathered) {
    const uint32_t mask = (1u << delta_bits) - 1;
    for (int lane = 0; lane < EC_WARP; lane++) {
        const int bit = lane * vector * delta_bits;
        uint64_t word = 0;
        memcpy(&word, deltas + (bit >> 3), (size_t)(((bit & 7) + vector * delta_bits + 7) >> 3));
        word >>= bit & 7;
        for (int j = 0; j < vector; j++, word >>= delta_bits) {
            col[lane] += word & mask;
            gathered[lane * vector + j] = x[col[lane]];
        }
    }
}

void ec_spmv_cpu(const ec_matrix *m, const float *x, const void *bias, int64_t begin, int64_t end, void *y) {
    chunk_add *add = best_add();
    float *row_sums = malloc((size_t)m->tile_rows * sizeof *row_sums);
    const size_t value_bytes = m->dtype == MACKO_F32 ? 4 : 2;
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t first_row = tile * m->tile_rows;
        memset(row_sums, 0, (size_t)m->tile_rows * sizeof *row_sums);
        for (int64_t s = 0; s < m->num_sets; s++) {
            const ec_set *set = &m->sets[s];
            const int height = (int)set->height, vector = (int)set->vector, chunk = EC_WARP * vector;
            const int64_t pieces = EC_WARP / set->lanes;
            const int32_t *tile_ptr = m->tile_ptr + s * (m->tiles + 1),
                          *indptr = m->block_indptr + set->first_block + s;
            for (int64_t block = tile_ptr[tile]; block < tile_ptr[tile + 1]; block++) {
                float sums[EC_CHUNK * EC_MAX_HEIGHT], gathered[EC_CHUNK + 8];
                int64_t col[EC_WARP];
                memset(sums, 0, (size_t)(chunk * height) * sizeof *sums);
                for (int lane = 0; lane < EC_WARP; lane++) {
                    const int64_t at = (set->first_block + block) * EC_WARP + lane;
                    col[lane] = ec_column(m->base_indices, m->cols, at);
                }
                for (int64_t n = indptr[block]; n < indptr[block + 1]; n += chunk) {
                    gather(m->delta_indices + set->first_delta + n * set->delta_bits / 8, (int)set->delta_bits, vector,
                           x, col, gathered);
                    add((const char *)m->block_values + (size_t)(set->first_value + n * height) * value_bytes, m->dtype,
                        gathered, chunk, height, sums);
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
            store(y, m->dtype, row, bias ? sum + load(bias, m->dtype, row) : sum);
        }
    }
    free(row_sums);
}
