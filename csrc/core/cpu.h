/* What the CPU kernels of every format share: the choice of vector path, and conversions of 16-bit floats. */
#ifndef MACKO_CORE_CPU_H
#define MACKO_CORE_CPU_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef enum macko_cpu_path { MACKO_SCALAR = 0, MACKO_AVX2 = 1, MACKO_AVX512 = 2 } macko_cpu_path;

/* A body shared by element types, widths and vector paths: always inlined, with constants in their place. */
#define MACKO_INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#define MACKO_X86 1
#include <immintrin.h>
#define MACKO_TARGET_AVX2 __attribute__((target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt")))
#define MACKO_TARGET_AVX512                                                                                            \
    __attribute__((target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2")))
#else
#define MACKO_X86 0
#endif

/* The best path of this machine. MACKO_CPU=scalar|avx2|avx512 lowers it; read at each call so that a test can set it. */
static inline macko_cpu_path macko_best_cpu_path(void) {
    macko_cpu_path best = MACKO_SCALAR;
#if MACKO_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt"))
        best = MACKO_AVX2;
    if (best == MACKO_AVX2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2"))
        best = MACKO_AVX512;
#endif
    const char *forced = getenv("MACKO_CPU");
    if (forced && !strcmp(forced, "scalar")) best = MACKO_SCALAR;
    if (forced && !strcmp(forced, "avx2") && best > MACKO_AVX2) best = MACKO_AVX2;
    return best;
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

#endif
