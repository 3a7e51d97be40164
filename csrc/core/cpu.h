/* What the CPU kernels of every format share: the choice of vector path, and conversions of 16-bit floats. */
#pragma once

#include <stdint.h>
#include <string.h>

#include "knobs.h"
#include "types.h"

typedef enum macko_cpu_path { MACKO_SCALAR = 0, MACKO_AVX2 = 1, MACKO_AVX512 = 2 } macko_cpu_path;

/* A body shared by element types, widths and vector paths: always inlined, with constants in their place. */
#define MACKO_INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define MACKO_X86 1
#include <immintrin.h>
#define MACKO_TARGET_AVX2 __attribute__((target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt")))
#define MACKO_TARGET_AVX512                                                                                            \
    __attribute__((target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,"      \
                          "gfni")))
#if defined(__clang__) && __clang_major__ < 18 /* it knows neither, and every CPU with bmi2 has both */
#define MACKO_HAS_F16C_LZCNT 1
#else
#define MACKO_HAS_F16C_LZCNT (__builtin_cpu_supports("f16c") && __builtin_cpu_supports("lzcnt"))
#endif
#else
#define MACKO_X86 0
#endif

/* The best path of this machine; MACKO_CPU lowers it. */
static inline macko_cpu_path macko_best_cpu_path(void) {
    macko_cpu_path best = MACKO_SCALAR;
#if MACKO_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
        __builtin_cpu_supports("bmi2") && MACKO_HAS_F16C_LZCNT)
        best = MACKO_AVX2;
    if (best == MACKO_AVX2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("gfni"))
        best = MACKO_AVX512;
#endif
    const int most = macko_knob_number(MACKO_KNOB_CPU, best);
    return most < (int)best ? (macko_cpu_path)most : best;
}

static inline float macko_f32_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t macko_bits_from_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float macko_f32_from_bf16(uint16_t h) {
    return macko_f32_from_bits((uint32_t)h << 16);
}

static inline uint16_t macko_bf16_from_f32(float value) {
    uint32_t bits = macko_bits_from_f32(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40); /* NaN stays NaN */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

static inline float macko_f32_from_f16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return macko_f32_from_bits(sign | 0x7f800000u | (rest & 0x3ff) << 13);
    /* Subnormals come right by scaling: bits << 13 is the value times 2^-112. */
    return macko_f32_from_bits(sign | macko_bits_from_f32(macko_f32_from_bits(rest << 13) * 0x1p112f));
}

static inline uint16_t macko_f16_from_f32(float value) {
    const uint32_t bits = macko_bits_from_f32(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00); /* from 65520 on: Inf */
    if (rest < 0x38800000u) /* below 2^-14: adding 0.5 leaves the half's bits, rounded to even, at the bottom */
        return (uint16_t)(sign | (macko_bits_from_f32(macko_f32_from_bits(rest) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((rest + 0xfffu + ((rest >> 13) & 1) - 0x38000000u) >> 13));
}

/* Element i of p, in fp32. */
MACKO_INLINE float macko_load(const void *p, macko_dtype dtype, int64_t i) {
    if (dtype == MACKO_F32) return ((const float *)p)[i];
    const uint16_t bits = ((const uint16_t *)p)[i];
    return dtype == MACKO_F16 ? macko_f32_from_f16(bits) : macko_f32_from_bf16(bits);
}

/*
 * Asks for what lies 8 KB after p. The processor's own prefetching is too slow where x, read beside the values, is larger
 * than half of the first cache: one core of a Zen 5, fp16, 1524 x 11008, one token, 1.5 ms without this, 0.8 with it.
 */
static inline void macko_fetch_ahead(const void *p) {
    __builtin_prefetch((const void *)((uintptr_t)p + (8 << 10)));
}

/* p[i] = value, rounded to nearest even. */
static inline void macko_store(void *p, macko_dtype dtype, int64_t i, float value) {
    if (dtype == MACKO_F32)
        ((float *)p)[i] = value;
    else
        ((uint16_t *)p)[i] = dtype == MACKO_F16 ? macko_f16_from_f32(value) : macko_bf16_from_f32(value);
}

/* to[i] = from[j], bit for bit. */
MACKO_INLINE void macko_copy(void *to, macko_dtype dtype, int64_t i, const void *from, int64_t j) {
    if (dtype == MACKO_F32)
        ((uint32_t *)to)[i] = ((const uint32_t *)from)[j];
    else
        ((uint16_t *)to)[i] = ((const uint16_t *)from)[j];
}

#if MACKO_X86
/* Eight elements from p[i] on, in fp32. */
MACKO_INLINE MACKO_TARGET_AVX2 __m256 macko_load_8(const void *p, macko_dtype dtype, int64_t i) {
    if (dtype == MACKO_F32) return _mm256_loadu_ps((const float *)p + i);
    const __m128i h = _mm_loadu_si128((const __m128i *)((const uint16_t *)p + i));
    if (dtype == MACKO_F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* sums += v * x over 16 elements of a 16-bit type. bf16 is widened as pairs, even ones in sums[0]: no shuffle. */
MACKO_INLINE MACKO_TARGET_AVX2 void macko_fma_16(__m256 sums[2], macko_dtype dtype, __m256i v, __m256i x) {
    __m256 v0, v1, x0, x1;
    if (dtype == MACKO_BF16) {
        const __m256i zero = _mm256_setzero_si256();
        v0 = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)), v1 = _mm256_castsi256_ps(_mm256_blend_epi16(zero, v, 0xaa));
        x0 = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), x1 = _mm256_castsi256_ps(_mm256_blend_epi16(zero, x, 0xaa));
    } else {
        v0 = _mm256_cvtph_ps(_mm256_castsi256_si128(v)), v1 = _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1));
        x0 = _mm256_cvtph_ps(_mm256_castsi256_si128(x)), x1 = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
    }
    sums[0] = _mm256_fmadd_ps(v0, x0, sums[0]);
    sums[1] = _mm256_fmadd_ps(v1, x1, sums[1]);
}

/* Loads a vector to stay in a register: gcc would fold the load into an expansion, whose memory form AMD has in microcode. */
MACKO_INLINE MACKO_TARGET_AVX512 __m512i macko_load_512(const void *p) {
    __m512i v = _mm512_loadu_si512(p);
    __asm__("" : "+v"(v));
    return v;
}

/*
 * 32 elements of a 16-bit type as fp32: bf16 as its even and its odd elements, which needs no shuffle, fp16 as its halves.
 * The odd ones by a masked move from a register: an `and` in its place, or its memory form, makes a loop 2 to 3 times
 * slower on a Zen 5. vdpbf16ps would multiply pairs as they are, but takes subnormal numbers as zero.
 */
MACKO_INLINE MACKO_TARGET_AVX512 void macko_widen_32(__m512 wide[2], macko_dtype dtype, __m512i v) {
    if (dtype == MACKO_BF16) {
        wide[0] = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
        wide[1] = _mm512_castsi512_ps(_mm512_maskz_mov_epi16(0xaaaaaaaa, v));
    } else {
        wide[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(v));
        wide[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v, 1));
    }
}

/* The same from memory; fp16 is converted as it is loaded. */
MACKO_INLINE MACKO_TARGET_AVX512 void macko_load_wide_32(__m512 wide[2], macko_dtype dtype, const uint16_t *p) {
    if (dtype == MACKO_BF16) {
        macko_widen_32(wide, dtype, macko_load_512(p));
    } else {
        wide[0] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
        wide[1] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + 16)));
    }
}

/* The sum of eight, in a fixed order. */
MACKO_INLINE MACKO_TARGET_AVX2 float macko_sum_8(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#endif

/* Elements whose zeros are looked for together. */
enum { MACKO_BLOCK = 64 };

/* Bit i is set where w[start + i] is not a zero of either sign; `count` elements, at most MACKO_BLOCK. */
typedef uint64_t macko_nonzeros(const void *w, macko_dtype dtype, int64_t start, int count);

/* The function for a vector path: one call's worth of work is small, so the path is chosen outside the loop. */
macko_nonzeros *macko_nonzeros_of(macko_cpu_path path);
