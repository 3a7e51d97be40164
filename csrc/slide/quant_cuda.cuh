// Codes of scaled numbers on CUDA: what weights and activations share.
#pragma once

#include <cuda_fp8.h>

#include "slide.h"

namespace macko {

// Four int8 or e4m3 codes, lowest first. NaN becomes 0 in int8; |value| exceeds Q by a rounding at most.
template <macko_slide_type TYPE>
__device__ __forceinline__ uint32_t slide_codes4(float a, float b, float c, float d) {
    if (TYPE == MACKO_SLIDE_E4M3) {
        const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
        return low | (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3) << 16;
    }
    const uint32_t low = __byte_perm(__float2int_rn(a), __float2int_rn(b), 0x0040);
    return __byte_perm(low, __byte_perm(__float2int_rn(c), __float2int_rn(d), 0x0040), 0x5410);
}

// The same of numbers that are finite and at most Q, but for a rounding. Adding 1.5 * 2^23 rounds to an integer, which
// is then in the low bits: float-to-integer instructions run at a fraction of the rate.
template <macko_slide_type TYPE>
__device__ __forceinline__ uint32_t slide_codes4_finite(float a, float b, float c, float d) {
    if (TYPE != MACKO_SLIDE_S8) return slide_codes4<TYPE>(a, b, c, d);
    const auto bits = [](float v) { return __float_as_uint(__fadd_rn(v, 0x1.8p23f)); };
    const uint32_t low = __byte_perm(bits(a), bits(b), 0x0040);
    return __byte_perm(low, __byte_perm(bits(c), bits(d), 0x0040), 0x5410);
}

__device__ __forceinline__ uint8_t slide_code(float value, macko_slide_type type) {
    return (uint8_t)(type == MACKO_SLIDE_S8 ? slide_codes4<MACKO_SLIDE_S8>(value, 0, 0, 0)
                                            : slide_codes4<MACKO_SLIDE_E4M3>(value, 0, 0, 0));
}

} // namespace macko
