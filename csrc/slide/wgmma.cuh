// The products of the GEMM: wgmma of sm_90a, dense and 2:4 sparse.
#pragma once

#include "../core/sm90.cuh"
#include "slide.h"

namespace macko::sm90 {

template <macko_slide_type TYPE>
struct accumulator {
    using type = float;
};
template <>
struct accumulator<MACKO_SLIDE_S8> {
    using type = int32_t;
};

// d (64 rows x TOKENS) = A * B, or += where `add`; one step along K is 32 bytes of A and 32 (dense) or 64 bytes of B.
// SELECT: which half of the lanes gives the metadata of a 16-bit step.
template <macko_slide_type TYPE, int TOKENS>
struct wgmma;

// The registers of d as text, %3 to %(TOKENS / 2 + 2): the operands before d have the same numbers for every TOKENS.
#define MACKO_TEN(t) "%" t "0, %" t "1, %" t "2, %" t "3, %" t "4, %" t "5, %" t "6, %" t "7, %" t "8, %" t "9, "
#define MACKO_3_TO_9 "%3, %4, %5, %6, %7, %8, %9, "
#define MACKO_TENS_1_4 MACKO_TEN("1") MACKO_TEN("2") MACKO_TEN("3") MACKO_TEN("4")
#define MACKO_TENS_5_9 MACKO_TEN("5") MACKO_TEN("6") MACKO_TEN("7") MACKO_TEN("8") MACKO_TEN("9")
#define MACKO_NAMES_16 MACKO_3_TO_9 "%10"
#define MACKO_NAMES_32 MACKO_3_TO_9 "%10, %11, %12, %13, %14, %15, %16, %17, %18"
#define MACKO_NAMES_64 MACKO_3_TO_9 MACKO_TEN("1") MACKO_TEN("2") "%30, %31, %32, %33, %34"
#define MACKO_NAMES_128 MACKO_3_TO_9 MACKO_TENS_1_4 MACKO_TEN("5") "%60, %61, %62, %63, %64, %65, %66"
#define MACKO_NAMES_192                                                                                                \
    MACKO_3_TO_9 MACKO_TENS_1_4 MACKO_TEN("5") MACKO_TEN("6") MACKO_TEN("7")                                           \
        MACKO_TEN("8") "%90, %91, %92, %93, %94, %95, %96, %97, %98"
#define MACKO_NAMES_256                                                                                                \
    MACKO_3_TO_9 MACKO_TENS_1_4 MACKO_TENS_5_9 MACKO_TEN("10") MACKO_TEN("11") MACKO_TEN("12") "%130"

// ONE: the immediates after the predicate (signs of A and B; of 16-bit types also "not transposed", twice).
#define MACKO_WGMMA(TYPE, TOKENS, KIND, K_SPARSE, K_DENSE, C, ONE)                                                     \
    template <>                                                                                                        \
    struct wgmma<TYPE, TOKENS> {                                                                                       \
        using acc = accumulator<TYPE>::type;                                                                           \
        static __device__ __forceinline__ void dense(acc (&d)[TOKENS / 2], uint64_t a, uint64_t b, int add) {          \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %2, 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #TOKENS K_DENSE KIND " {" MACKO_NAMES_##TOKENS            \
                         "}, %0, %1, add" ONE ";\n}"                                                                   \
                         : "+l"(a), "+l"(b), "+r"(add), MACKO_OPERANDS_##TOKENS(C));                                   \
        }                                                                                                              \
        template <int SELECT>                                                                                          \
        static __device__ __forceinline__ void sparse(acc (&d)[TOKENS / 2], uint64_t a, uint64_t b, uint32_t meta,     \
                                                      int add) {                                                       \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %2, 0;\n"                                               \
                         "wgmma.mma_async.sp.sync.aligned.m64n" #TOKENS K_SPARSE KIND " {" MACKO_NAMES_##TOKENS        \
                         "}, %0, %1, %" MACKO_META_##TOKENS ", %" MACKO_SELECT_##TOKENS ", add" ONE ";\n}"             \
                         : "+l"(a), "+l"(b), "+r"(add), MACKO_OPERANDS_##TOKENS(C)                                     \
                         : "r"(meta), "n"(SELECT));                                                                    \
        }                                                                                                              \
    };
#define MACKO_META_16 "11"
#define MACKO_META_32 "19"
#define MACKO_META_64 "35"
#define MACKO_META_128 "67"
#define MACKO_META_192 "99"
#define MACKO_META_256 "131"
#define MACKO_SELECT_16 "12"
#define MACKO_SELECT_32 "20"
#define MACKO_SELECT_64 "36"
#define MACKO_SELECT_128 "68"
#define MACKO_SELECT_192 "100"
#define MACKO_SELECT_256 "132"

#define MACKO_WGMMA_TYPE(TYPE, KIND, K_SPARSE, K_DENSE, C, ONE)                                                        \
    MACKO_WGMMA(TYPE, 16, KIND, K_SPARSE, K_DENSE, C, ONE)                                                             \
    MACKO_WGMMA(TYPE, 32, KIND, K_SPARSE, K_DENSE, C, ONE)                                                             \
    MACKO_WGMMA(TYPE, 64, KIND, K_SPARSE, K_DENSE, C, ONE)                                                             \
    MACKO_WGMMA(TYPE, 128, KIND, K_SPARSE, K_DENSE, C, ONE)                                                            \
    MACKO_WGMMA(TYPE, 192, KIND, K_SPARSE, K_DENSE, C, ONE)                                                            \
    MACKO_WGMMA(TYPE, 256, KIND, K_SPARSE, K_DENSE, C, ONE)

MACKO_WGMMA_TYPE(MACKO_SLIDE_S8, ".s32.s8.s8", "k64", "k32", "+r", "")
MACKO_WGMMA_TYPE(MACKO_SLIDE_E4M3, ".f32.e4m3.e4m3", "k64", "k32", "+f", ", 1, 1")
MACKO_WGMMA_TYPE(MACKO_SLIDE_F16, ".f32.f16.f16", "k32", "k16", "+f", ", 1, 1, 0, 0")
MACKO_WGMMA_TYPE(MACKO_SLIDE_BF16, ".f32.bf16.bf16", "k32", "k16", "+f", ", 1, 1, 0, 0")

} // namespace macko::sm90
