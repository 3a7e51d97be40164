// From bytes to the registers of operand A, and what the kernels know of a matrix of them besides (bytes.h).
#pragma once

#include "../../slab/codec.cuh"
#include "bytes.h"

namespace macko {

// What a launch tells of a weight of bytes: a scale a row, with which the kernels multiply sums.
struct byte_weights {
    const float *scales;
};

// Four bytes as a layout holds them, the first two of register a0.
template <macko_byte_kind KIND, typename T>
struct four_bytes {
    static constexpr bool HALF = std::is_same_v<T, __half>;
    // Registers hold codes times this power of two, which the scale makes good.
    static constexpr float FOLD = KIND == MACKO_INT8 && !HALF ? 64 : 1;
    static constexpr uint32_t ZEROS = KIND == MACKO_INT8 ? 0x80808080u : 0; // four elements that are 0

    __device__ __forceinline__ static void make(uint32_t four, uint32_t &a0, uint32_t &a1) {
        if constexpr (KIND == MACKO_E4M3 && HALF) {
#if __CUDA_ARCH__ < 890
            // No cvt of e4m3: its exponent at the end of a half's is 2^-8 of the number, also where it is subnormal.
            expand(four, 0x1404, a0);
            expand(four, 0x3424, a1);
#else
            asm("{ .reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
                "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high; }"
                : "=r"(a0), "=r"(a1)
                : "r"(four));
#endif
        } else if constexpr (KIND == MACKO_E4M3) {
            // With its exponent at the end of a bfloat16's it is 2^-120 of the number, also where it is subnormal.
            const uint32_t low = four << 1 & 0xf0f0f0f0, high = four & 0x87878787;
            multiply(a0, byte_permute(low, high, 0x5140), 0x7b807b80);
            multiply(a1, byte_permute(low, high, 0x7362), 0x7b807b80);
        } else if constexpr (HALF) {
            // 0x6400 is 1024, in steps of 1.
            add(a0, byte_permute(four, 0x64646464, 0x4140), 0xe480e480); // -1024 - 128
            add(a1, byte_permute(four, 0x64646464, 0x4342), 0xe480e480);
        } else {
            // Up to 255 a bfloat16's last bits are a subnormal number, or one as near to 0, in steps of 2^-133. Times
            // 2^127, less 128 steps.
            multiply_add(a0, byte_permute(four, 0, 0x4140), 0x7f007f00, 0xc000c000);
            multiply_add(a1, byte_permute(four, 0, 0x4342), 0x7f007f00, 0xc000c000);
        }
    }

  private:
    // Two e4m3, which `selector` puts into upper halves of registers' halves, as float16.
    __device__ __forceinline__ static void expand(uint32_t four, uint32_t selector, uint32_t &to) {
        const uint32_t upper = byte_permute(four, 0, selector);
        const uint32_t scaled = (upper >> 1 & 0x3f803f80) | (upper & 0x80008000);
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(to) : "r"(scaled), "r"(0x5c005c00)); // 256
    }
    __device__ __forceinline__ static void multiply(uint32_t &to, uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ < 900 // -0.0 is added, which changes nothing: there is no mul
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(to) : "r"(a), "r"(b), "r"(0x80008000));
#else
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(to) : "r"(a), "r"(b));
#endif
    }
    __device__ __forceinline__ static void multiply_add(uint32_t &to, uint32_t a, uint32_t b, uint32_t c) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(to) : "r"(a), "r"(b), "r"(c));
    }
    __device__ __forceinline__ static void add(uint32_t &to, uint32_t a, uint32_t b) {
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(to) : "r"(a), "r"(b));
    }
};

// Calls run(codec) with the codec of a kind and a type.
template <template <macko_byte_kind, typename> class CODEC, typename RUN>
cudaError_t with_codec(macko_byte_kind kind, macko_dtype dtype, const RUN &run) {
    if (kind == MACKO_INT8)
        return dtype == MACKO_F16 ? run(CODEC<MACKO_INT8, __half>()) : run(CODEC<MACKO_INT8, __nv_bfloat16>());
    return dtype == MACKO_F16 ? run(CODEC<MACKO_E4M3, __half>()) : run(CODEC<MACKO_E4M3, __nv_bfloat16>());
}

} // namespace macko
