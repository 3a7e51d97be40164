// The products of few_cuda.cu and many_kernel.cuh: wgmma of sm_90a with operand A in registers.
#pragma once

#include "../core/cuda.cuh"
#include "../core/sm90.cuh"
#include "decode.cuh"

namespace macko {

// d (64 rows x TOKENS) += A * B, 16 columns of A in registers, B in shared memory.
template <typename T, int TOKENS>
struct tile_wgmma;

#define MACKO_TILE_TEN(t) "%" t "0, %" t "1, %" t "2, %" t "3, %" t "4, %" t "5, %" t "6, %" t "7, %" t "8, %" t "9, "
#define MACKO_TILE_TEN_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
#define MACKO_TILE_TENS_0_2 MACKO_TILE_TEN_0 MACKO_TILE_TEN("1") MACKO_TILE_TEN("2")
#define MACKO_TILE_TENS_0_5 MACKO_TILE_TENS_0_2 MACKO_TILE_TEN("3") MACKO_TILE_TEN("4") MACKO_TILE_TEN("5")
#define MACKO_TILE_TENS_6_11                                                                                           \
    MACKO_TILE_TEN("6")                                                                                                \
    MACKO_TILE_TEN("7") MACKO_TILE_TEN("8") MACKO_TILE_TEN("9") MACKO_TILE_TEN("10") MACKO_TILE_TEN("11")
#define MACKO_TILE_NAMES_8 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8"
#define MACKO_TILE_NAMES_16 "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12"
#define MACKO_TILE_NAMES_32 "{" MACKO_TILE_TEN_0 "%10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20"
#define MACKO_TILE_NAMES_64 "{" MACKO_TILE_TENS_0_2 "%30, %31}, {%32, %33, %34, %35}, %36"
#define MACKO_TILE_NAMES_128 "{" MACKO_TILE_TENS_0_5 "%60, %61, %62, %63}, {%64, %65, %66, %67}, %68"
#define MACKO_TILE_NAMES_192                                                                                           \
    "{" MACKO_TILE_TENS_0_5 MACKO_TILE_TEN("6") MACKO_TILE_TEN("7")                                                    \
        MACKO_TILE_TEN("8") "%90, %91, %92, %93, %94, %95}, {%96, %97, %98, %99}, %100"
#define MACKO_TILE_NAMES_256                                                                                           \
    "{" MACKO_TILE_TENS_0_5 MACKO_TILE_TENS_6_11                                                                       \
    "%120, %121, %122, %123, %124, %125, %126, %127}, {%128, %129, %130, %131}, %132"
#define MACKO_OPERANDS_8(c) c(d[0]), c(d[1]), c(d[2]), c(d[3])

#define MACKO_TILE_WGMMA(T, KIND, TOKENS)                                                                              \
    template <>                                                                                                        \
    struct tile_wgmma<T, TOKENS> {                                                                                     \
        static __device__ __forceinline__ void multiply(float (&d)[TOKENS / 2], const uint32_t (&a)[4], uint64_t b) {  \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"                                                \
                         "wgmma.mma_async.sync.aligned.m64n" #TOKENS "k16.f32." KIND "." KIND                          \
                         " " MACKO_TILE_NAMES_##TOKENS ", add, 1, 1, 0;\n}"                                            \
                         : MACKO_OPERANDS_##TOKENS("+f")                                                               \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
        }                                                                                                              \
    };
#define MACKO_TILE_WGMMA_TYPE(T, KIND)                                                                                 \
    MACKO_TILE_WGMMA(T, KIND, 8)                                                                                       \
    MACKO_TILE_WGMMA(T, KIND, 16)                                                                                      \
    MACKO_TILE_WGMMA(T, KIND, 32)                                                                                      \
    MACKO_TILE_WGMMA(T, KIND, 64)                                                                                      \
    MACKO_TILE_WGMMA(T, KIND, 128)                                                                                     \
    MACKO_TILE_WGMMA(T, KIND, 192)                                                                                     \
    MACKO_TILE_WGMMA(T, KIND, 256)
MACKO_TILE_WGMMA_TYPE(__half, "f16")
MACKO_TILE_WGMMA_TYPE(__nv_bfloat16, "bf16")

// Columns 16 STEP .. 16 STEP + 15 of a tile into operand A; after every second step the products of both with the
// tile's tokens at b. Two together, as the warps of a warpgroup wait for each other at every wgmma.
template <typename T, int TOKENS, int STEP>
__device__ __forceinline__ void tile_multiply(float (&sums)[TOKENS / 2], const tile_lane &tile,
                                              const uint32_t (&values)[2][MACKO_TILE_QUAD], uint32_t (&a)[4][4],
                                              uint64_t b) {
    tile.place(2 * STEP, values[0], a[STEP][0], a[STEP][1]);
    tile.place(2 * STEP + 1, values[1], a[STEP][2], a[STEP][3]);
    if (STEP % 2 == 0) return;
    sm90::warpgroup_arrive();
    tile_wgmma<T, TOKENS>::multiply(sums, a[STEP & 2], b + 2 * (STEP & 2));
    tile_wgmma<T, TOKENS>::multiply(sums, a[STEP], b + 2 * STEP);
    sm90::warpgroup_commit_batch();
}

} // namespace macko
