// The products of sm_90a: wgmma of a warpgroup, as one struct for each type T and number of columns N of d. d, 64 x N in
// registers, is A * B, or has it added where `add`. A step along K is 32 bytes of A and, where A is 2:4 sparse, 64 of B:
//
//     wgmma<T, N>::dense      A and B in shared memory, by descriptors
//     wgmma<T, N>::sparse     the same; A is 2:4 sparse, SELECT: which half of the lanes gives the metadata of a 16-bit step
//     wgmma<T, N>::registers  A in registers, of 16-bit types, always added
//
// asm needs all of its text and operands as literals, so there is a macro for every size of d, and the table of sizes
// also has the numbers of the operands that follow d.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "sm90.cuh"

namespace macko::sm90 {

// The registers of d: constraints (C: "+f" or "+r"), and names, %0 to %(N / 2 - 1).
#define MACKO_D4(C, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define MACKO_D8(C, i) MACKO_D4(C, i), MACKO_D4(C, i + 4)
#define MACKO_D16(C, i) MACKO_D8(C, i), MACKO_D8(C, i + 8)
#define MACKO_D32(C, i) MACKO_D16(C, i), MACKO_D16(C, i + 16)
#define MACKO_D64(C, i) MACKO_D32(C, i), MACKO_D32(C, i + 32)
#define MACKO_D_8(C) MACKO_D4(C, 0)
#define MACKO_D_16(C) MACKO_D8(C, 0)
#define MACKO_D_32(C) MACKO_D16(C, 0)
#define MACKO_D_64(C) MACKO_D32(C, 0)
#define MACKO_D_128(C) MACKO_D64(C, 0)
#define MACKO_D_160(C) MACKO_D64(C, 0), MACKO_D16(C, 64)
#define MACKO_D_192(C) MACKO_D64(C, 0), MACKO_D32(C, 64)
#define MACKO_D_256(C) MACKO_D64(C, 0), MACKO_D64(C, 64)

#define MACKO_TEN(t) "%" t "0, %" t "1, %" t "2, %" t "3, %" t "4, %" t "5, %" t "6, %" t "7, %" t "8, %" t "9, "
#define MACKO_30 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " MACKO_TEN("1") MACKO_TEN("2")
#define MACKO_60 MACKO_30 MACKO_TEN("3") MACKO_TEN("4") MACKO_TEN("5")
#define MACKO_90 MACKO_60 MACKO_TEN("6") MACKO_TEN("7") MACKO_TEN("8")
#define MACKO_120 MACKO_90 MACKO_TEN("9") MACKO_TEN("10") MACKO_TEN("11")
#define MACKO_NAMES_8 "{%0, %1, %2, %3}"
#define MACKO_NAMES_16 "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define MACKO_NAMES_32 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define MACKO_NAMES_64 "{" MACKO_30 "%30, %31}"
#define MACKO_NAMES_128 "{" MACKO_60 "%60, %61, %62, %63}"
#define MACKO_NAMES_160 "{" MACKO_60 MACKO_TEN("6") "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79}"
#define MACKO_NAMES_192 "{" MACKO_90 "%90, %91, %92, %93, %94, %95}"
#define MACKO_NAMES_256 "{" MACKO_120 "%120, %121, %122, %123, %124, %125, %126, %127}"

// X(N, the five operands after d, ...)
#define MACKO_WGMMA_SIZES(X, ...)                                                                                      \
    X(8, "%4", "%5", "%6", "%7", "%8", __VA_ARGS__)                                                                    \
    X(16, "%8", "%9", "%10", "%11", "%12", __VA_ARGS__)                                                                \
    X(32, "%16", "%17", "%18", "%19", "%20", __VA_ARGS__)                                                              \
    X(64, "%32", "%33", "%34", "%35", "%36", __VA_ARGS__)                                                              \
    X(128, "%64", "%65", "%66", "%67", "%68", __VA_ARGS__)                                                             \
    X(160, "%80", "%81", "%82", "%83", "%84", __VA_ARGS__)                                                             \
    X(192, "%96", "%97", "%98", "%99", "%100", __VA_ARGS__)                                                            \
    X(256, "%128", "%129", "%130", "%131", "%132", __VA_ARGS__)

template <typename T, int N>
struct wgmma;

#define MACKO_WGMMA_SHARED(N, P0, P1, P2, P3, P4, D, C, KIND, K, K_SPARSE, SIGNS, PLAIN)                               \
    static __device__ __forceinline__ void dense(D(&d)[N / 2], uint64_t a, uint64_t b, int add) {                      \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " P2 ", 0;\n"                                               \
                     "wgmma.mma_async.sync.aligned.m64n" #N K KIND " " MACKO_NAMES_##N                                 \
                     ", " P0 ", " P1 ", add" SIGNS PLAIN PLAIN ";\n}"                                                  \
                     : MACKO_D_##N(C)                                                                                  \
                     : "l"(a), "l"(b), "r"(add));                                                                      \
    }                                                                                                                  \
    template <int SELECT>                                                                                              \
    static __device__ __forceinline__ void sparse(D(&d)[N / 2], uint64_t a, uint64_t b, uint32_t meta, int add) {      \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " P2 ", 0;\n"                                               \
                     "wgmma.mma_async.sp.sync.aligned.m64n" #N K_SPARSE KIND " " MACKO_NAMES_##N                       \
                     ", " P0 ", " P1 ", " P3 ", " P4 ", add" SIGNS PLAIN PLAIN ";\n}"                                  \
                     : MACKO_D_##N(C)                                                                                  \
                     : "l"(a), "l"(b), "r"(add), "r"(meta), "n"(SELECT));                                              \
    }
#define MACKO_WGMMA_8_BIT(N, P0, P1, P2, P3, P4, T, D, C, KIND, SIGNS)                                                 \
    template <>                                                                                                        \
    struct wgmma<T, N> {                                                                                               \
        MACKO_WGMMA_SHARED(N, P0, P1, P2, P3, P4, D, C, KIND, "k32", "k64", SIGNS, "")                                 \
    };
#define MACKO_WGMMA_16_BIT(N, P0, P1, P2, P3, P4, T, KIND)                                                             \
    template <>                                                                                                        \
    struct wgmma<T, N> {                                                                                               \
        MACKO_WGMMA_SHARED(N, P0, P1, P2, P3, P4, float, "+f", KIND, "k16", "k32", ", 1, 1", ", 0")                    \
        static __device__ __forceinline__ void registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {      \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"                                                \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16" KIND " " MACKO_NAMES_##N                         \
                         ", {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", add, 1, 1, 0;\n}"                                \
                         : MACKO_D_##N("+f")                                                                           \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
        }                                                                                                              \
    };
MACKO_WGMMA_SIZES(MACKO_WGMMA_8_BIT, int8_t, int32_t, "+r", ".s32.s8.s8", "")
MACKO_WGMMA_SIZES(MACKO_WGMMA_8_BIT, __nv_fp8_e4m3, float, "+f", ".f32.e4m3.e4m3", ", 1, 1")
MACKO_WGMMA_SIZES(MACKO_WGMMA_16_BIT, __half, ".f32.f16.f16")
MACKO_WGMMA_SIZES(MACKO_WGMMA_16_BIT, __nv_bfloat16, ".f32.bf16.bf16")

} // namespace macko::sm90
