/* What a value of 8 bits is, in the layouts dense8 and sparse8: a code, times a scale that its row has. */
#pragma once

#include "../../slab/slab.h"

MACKO_C_BEGIN

typedef enum macko_byte_kind {
    MACKO_E4M3 = 0, /* float8_e4m3fn; neither -0.0 nor NaN */
    MACKO_INT8 = 1, /* -128 .. 127 */
    MACKO_BYTE_KINDS
} macko_byte_kind;

/* Scales are below it: a kernel multiplies some by 64. The largest that a weight of 16 bits can want is half of it. */
#define MACKO_BYTE_LARGEST_SCALE 0x1p122f

/*
 * A code as a slab stores it, and back. Of int8 numbers count from 0 up, -128 first. Of e4m3 for bfloat16 the low seven bits
 * are rotated, | s | eeee | mmm | to | s | e0 mmm | e3 e2 e1 |: each part is then a byte of a bfloat16 but for its place.
 */
MACKO_FN uint8_t macko_byte_stored(macko_byte_kind kind, macko_dtype dtype, uint8_t code) {
    if (kind == MACKO_INT8) return (uint8_t)(code ^ 0x80);
    return (uint8_t)(dtype == MACKO_BF16 ? (code & 0x80) | (code << 3 & 0x78) | (code >> 4 & 7) : code);
}
MACKO_FN uint8_t macko_byte_code(macko_byte_kind kind, macko_dtype dtype, uint8_t stored) {
    if (kind == MACKO_INT8) return (uint8_t)(stored ^ 0x80);
    return (uint8_t)(dtype == MACKO_BF16 ? (stored & 0x80) | (stored << 4 & 0x70) | (stored >> 3 & 15) : stored);
}

/* Zero; of e4m3 -0.0 too. */
MACKO_FN bool macko_byte_is_zero(macko_byte_kind kind, uint8_t code) {
    return !(kind == MACKO_INT8 ? code : code & 0x7f);
}

/* Whether packing may give it: what is no number, and -0.0, it does not. */
MACKO_FN bool macko_byte_is_valid(macko_byte_kind kind, uint8_t code) {
    return kind == MACKO_INT8 || ((code & 0x7f) != 0x7f && code != 0x80);
}

/* The number that a code stands for, which every 16-bit type holds. */
MACKO_FN float macko_byte_value(macko_byte_kind kind, uint8_t code) {
    if (kind == MACKO_INT8) return (float)(int8_t)code;
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = exponent ? (float)((8 + mantissa) << exponent) / 1024 : (float)mantissa / 512;
    return code & 0x80 ? -size : size;
}

MACKO_C_END
