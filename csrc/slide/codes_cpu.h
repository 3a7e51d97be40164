/* Numbers of the slide format on the CPU: e4m3, and a dense element of any source type. */
#pragma once

#include <math.h>

#include "../core/cpu.h"
#include "slide.h"

/* e4m3: 4 exponent bits of bias 7, 3 mantissa bits, no Inf, NaN 0x7f; the largest number is 448, 0x7e. */
static inline uint8_t macko_e4m3_from_f32(float value) {
    const uint32_t bits = macko_bits_from_f32(value), sign = bits >> 24 & 0x80, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return 0x7f;
    if (rest >= 0x43e00000u) return (uint8_t)(sign | 0x7e); /* from 448 on */
    if (rest < 0x3c800000u) /* below 2^-6, steps of 2^-9: adding 2^14 leaves them, rounded to even, at the bottom */
        return (uint8_t)(sign | (macko_bits_from_f32(macko_f32_from_bits(rest) + 16384.0f) - 0x46800000u));
    return (uint8_t)(sign | ((rest + 0x7ffffu + (rest >> 20 & 1) - 0x3c000000u) >> 20));
}

static inline float macko_f32_from_e4m3(uint8_t code) {
    const uint32_t sign = (uint32_t)(code & 0x80) << 24, rest = code & 0x7f;
    if (rest == 0x7f) return NAN;
    return macko_f32_from_bits(sign | macko_bits_from_f32(macko_f32_from_bits(rest << 20) * 0x1p120f));
}

static inline float macko_slide_load(const void *from, macko_slide_source source, int64_t i) {
    switch (source) {
    case MACKO_SLIDE_FROM_F16: return macko_f32_from_f16(((const uint16_t *)from)[i]);
    case MACKO_SLIDE_FROM_BF16: return macko_f32_from_bf16(((const uint16_t *)from)[i]);
    case MACKO_SLIDE_FROM_F32: return ((const float *)from)[i];
    case MACKO_SLIDE_FROM_S8: return ((const int8_t *)from)[i];
    default: return macko_f32_from_e4m3(((const uint8_t *)from)[i]);
    }
}

static inline float macko_slide_absmax(const float *values, int64_t count) {
    uint32_t most = 0; /* of bits: NaN is larger than Inf, Inf than any number */
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = macko_bits_from_f32(values[i]) & 0x7fffffffu;
        if (bits > most) most = bits;
    }
    return macko_f32_from_bits(most);
}

static inline uint8_t macko_slide_quantise(float value, macko_slide_quantiser by, macko_slide_type type) {
    const float scaled = value * by.before * by.factor;
    if (type == MACKO_SLIDE_E4M3) return macko_e4m3_from_f32(scaled);
    if (!(scaled == scaled)) return 0;
    return (uint8_t)(int8_t)rintf(scaled > 127.0f ? 127.0f : scaled < -127.0f ? -127.0f : scaled);
}
