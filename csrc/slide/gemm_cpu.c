/* slide_gemm on the CPU: a few weight rows are expanded, then every token is multiplied with them. */
#include "codes_cpu.h"

enum {
    ROWS_AT_ONCE = 8, /* expanded rows stay in L2, and a token is converted once for all of them */
    LANES = 16,       /* partial sums of a product */
};

/* The expanded row, `padded` columns: what the tensor core multiplies with the lifted token. */
static void expand_row(const macko_slide_weight *weight, int64_t row, int64_t padded, uint16_t *codes) {
    const macko_slide_shape *shape = &weight->shape;
    const int bytes = macko_slide_element_bytes(shape->type), tile_cols = MACKO_SLIDE_TILE_BYTES / bytes;
    const int64_t k_tiles = macko_slide_k_tiles(shape->cols, shape->n, shape->type);
    const int64_t tile_bytes = macko_slide_tile_bytes(shape->n, shape->type);
    const int in_block = (int)(row % MACKO_SLIDE_BLOCK_ROWS);
    memset(codes, 0, (size_t)padded * sizeof *codes);
    for (int64_t k_tile = 0; k_tile < k_tiles; k_tile++) {
        const uint8_t *tile = weight->packed + (row / MACKO_SLIDE_BLOCK_ROWS * k_tiles + k_tile) * tile_bytes;
        for (int i = 0; i < (shape->n ? tile_cols / 2 : tile_cols); i++) {
            const uint8_t *from = tile + macko_slide_value_offset(shape->n, in_block, i * bytes);
            int col = i;
            if (shape->n) {
                const int pair = tile[macko_slide_meta_offset(shape->type, in_block, i / 2 & ~1)];
                col = i / 2 * 4 + (pair >> (4 * (i / 2 & 1) + 2 * (i & 1)) & 3);
            }
            const uint16_t code = bytes == 2 ? (uint16_t)(from[0] | from[1] << 8) : from[0];
            if (code) codes[k_tile * tile_cols + col] = code;
        }
    }
}

static inline float code_to_f32(uint16_t code, macko_slide_type type) {
    if (type == MACKO_SLIDE_F16) return macko_f32_from_f16(code);
    if (type == MACKO_SLIDE_BF16) return macko_f32_from_bf16(code);
    return type == MACKO_SLIDE_S8 ? (float)(int8_t)code : macko_f32_from_e4m3((uint8_t)code);
}

#define DOT_F32_BODY                                                                                                   \
    float sums[LANES] = {0}, sum = 0;                                                                                  \
    for (int64_t k = 0; k < padded; k += LANES)                                                                        \
        for (int i = 0; i < LANES; i++) sums[i] += a[k + i] * b[k + i];                                                \
    for (int i = 0; i < LANES; i++) sum += sums[i];                                                                    \
    return sum;

#define DOT_S8_BODY                                                                                                    \
    int32_t sum = 0;                                                                                                   \
    for (int64_t k = 0; k < padded; k++) sum += (int32_t)a[k] * b[k];                                                  \
    return sum;

static float dot_f32_scalar(const float *a, const float *b, int64_t padded) {
    DOT_F32_BODY
}

static int32_t dot_s8_scalar(const int8_t *a, const int8_t *b, int64_t padded){DOT_S8_BODY}

#if MACKO_X86
MACKO_TARGET_AVX2 static float dot_f32_avx2(const float *a, const float *b, int64_t padded){DOT_F32_BODY}

MACKO_TARGET_AVX2 static int32_t dot_s8_avx2(const int8_t *a, const int8_t *b, int64_t padded){DOT_S8_BODY}

MACKO_TARGET_AVX512 static float dot_f32_avx512(const float *a, const float *b, int64_t padded) {
    DOT_F32_BODY
}

/* vpdpbusd wants one side unsigned: b + 128, and 128 * sum(a) is taken off at the end. */
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) static int32_t
dot_s8_vnni(const int8_t *a, const int8_t *b, int64_t padded) {
    __m512i products = _mm512_setzero_si512(), extra = _mm512_setzero_si512();
    const __m512i top = _mm512_set1_epi8((char)0x80);
    for (int64_t k = 0; k < padded; k += 64) {
        const __m512i one = _mm512_loadu_si512(a + k), other = _mm512_loadu_si512(b + k);
        products = _mm512_dpbusd_epi32(products, _mm512_xor_si512(other, top), one);
        extra = _mm512_dpbusd_epi32(extra, top, one);
    }
    return _mm512_reduce_add_epi32(_mm512_sub_epi32(products, extra));
}
#endif

typedef float (*dot_f32_fn)(const float *, const float *, int64_t);
typedef int32_t (*dot_s8_fn)(const int8_t *, const int8_t *, int64_t);

static dot_f32_fn choose_dot_f32(void) {
#if MACKO_X86
    if (macko_best_cpu_path() == MACKO_AVX512) return dot_f32_avx512;
    if (macko_best_cpu_path() == MACKO_AVX2) return dot_f32_avx2;
#endif
    return dot_f32_scalar;
}

static dot_s8_fn choose_dot_s8(void) {
#if MACKO_X86
    if (macko_best_cpu_path() == MACKO_AVX512 && __builtin_cpu_supports("avx512vnni")) return dot_s8_vnni;
    if (macko_best_cpu_path() >= MACKO_AVX2) return dot_s8_avx2;
#endif
    return dot_s8_scalar;
}

static float bias_at(const macko_slide_gemm_args *args, int64_t row) {
    return args->bias ? macko_slide_load(args->bias, (macko_slide_source)args->out_dtype, row) : 0.0f;
}

static void store(const macko_slide_gemm_args *args, int64_t i, float value) {
    if (args->out_dtype == MACKO_F32)
        ((float *)args->out)[i] = value;
    else
        ((uint16_t *)args->out)[i] =
            args->out_dtype == MACKO_F16 ? macko_f16_from_f32(value) : macko_bf16_from_f32(value);
}

int macko_slide_gemm_cpu(const macko_slide_gemm_args *args, int64_t begin, int64_t end) {
    const macko_slide_shape *shape = &args->weight.shape;
    const macko_slide_type type = shape->type;
    const int64_t depth = macko_slide_depth(shape->cols, shape->n);
    const int64_t padded =
        macko_slide_k_tiles(shape->cols, shape->n, type) * (MACKO_SLIDE_TILE_BYTES / macko_slide_element_bytes(type));
    const dot_f32_fn dot_f32 = choose_dot_f32();
    const dot_s8_fn dot_s8 = choose_dot_s8();
    const int is_s8 = type == MACKO_SLIDE_S8;
    /* One code row, then ROWS_AT_ONCE expanded rows and one token, in float or int8. */
    char *scratch = calloc((size_t)padded, sizeof(uint16_t) + (ROWS_AT_ONCE + 1) * (is_s8 ? 1 : sizeof(float)));
    if (!scratch) return -1;
    uint16_t *codes = (uint16_t *)scratch;
    int8_t *bytes = (int8_t *)(codes + padded);
    float *floats = (float *)(codes + padded), *token_floats = floats + ROWS_AT_ONCE * padded;
    int8_t *token_bytes = bytes + ROWS_AT_ONCE * padded;
    for (int64_t row = begin; row < end; row += ROWS_AT_ONCE) {
        const int num_rows = end - row < ROWS_AT_ONCE ? (int)(end - row) : ROWS_AT_ONCE;
        for (int r = 0; r < num_rows; r++) {
            expand_row(&args->weight, row + r, padded, codes);
            for (int64_t k = 0; k < padded; k++) {
                if (is_s8)
                    bytes[r * padded + k] = (int8_t)codes[k];
                else
                    floats[r * padded + k] = code_to_f32(codes[k], type);
            }
        }
        for (int64_t token = 0; token < args->tokens; token++) {
            if (is_s8) memcpy(token_bytes, (const int8_t *)args->lifted + token * depth, (size_t)depth);
            for (int64_t k = 0; !is_s8 && k < depth; k++) {
                const int64_t i = token * depth + k;
                token_floats[k] = code_to_f32(type == MACKO_SLIDE_E4M3 ? ((const uint8_t *)args->lifted)[i]
                                                                       : ((const uint16_t *)args->lifted)[i],
                                              type);
            }
            for (int r = 0; r < num_rows; r++) {
                const float sum = is_s8 ? (float)dot_s8(bytes + r * padded, token_bytes, padded)
                                        : dot_f32(floats + r * padded, token_floats, padded);
                const float scaled = (args->token_scale ? args->token_scale[token] : 1.0f) * sum;
                store(args, token * shape->rows + row + r,
                      fmaf(args->weight.scale[row + r], scaled, bias_at(args, row + r)));
            }
        }
    }
    free(scratch);
    return 0;
}
