// The instructions of sm_90a that the GEMM is made of: wgmma (dense and 2:4 sparse), bulk copies, mbarriers.
#pragma once

#include <cuda.h>
#include <stdint.h>

#include "slide.h"

namespace macko::sm90 {

// Addresses in shared memory are 32-bit integers throughout.
__device__ __forceinline__ uint32_t smem_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra passed;\n"
                 "bra again;\n"
                 "passed:\n"
                 "}" ::"r"(barrier),
                 "r"(phase)
                 : "memory");
}

// Arrives once and announces `bytes` that copies will bring.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the same barrier of another block of the cluster. No .release: what is handed over is the right to
// overwrite shared memory that only the tensor core and ordinary loads read, and the release costs a fence of the GPU.
__device__ __forceinline__ void barrier_arrive_remote(uint32_t barrier, int rank) {
    asm volatile("{\n"
                 ".reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
                 "}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Ordinary data from block to block: a write into another block's shared memory, and a barrier there that orders it.
// (No casts between float and integer here or in load: they cost moves of all sums at every product.)
#define MACKO_STORE_REMOTE(T, KIND, C)                                                                                 \
    __device__ __forceinline__ void store_remote(uint32_t to, int rank, T value) {                                     \
        asm volatile("{\n"                                                                                             \
                     ".reg .b32 remote;\n"                                                                             \
                     "mapa.shared::cluster.u32 remote, %0, %1;\n"                                                      \
                     "st.shared::cluster" KIND " [remote], %2;\n"                                                      \
                     "}" ::"r"(to),                                                                                    \
                     "r"(rank), C(value)                                                                               \
                     : "memory");                                                                                      \
    }
MACKO_STORE_REMOTE(int32_t, ".s32", "r")
MACKO_STORE_REMOTE(float, ".f32", "f")

__device__ __forceinline__ void barrier_arrive_release(uint32_t barrier, int rank) {
    asm volatile("{\n"
                 ".reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
                 "}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait_acquire(uint32_t barrier, uint32_t phase) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra passed;\n"
                 "bra again;\n"
                 "passed:\n"
                 "}" ::"r"(barrier),
                 "r"(phase)
                 : "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Barrier of the 128 threads of a warpgroup; 0 is __syncthreads'.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// Waits until the launch before this one is through and its writes are visible; at once where it need not be awaited.
__device__ __forceinline__ void wait_for_previous_launch() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void prefetch_to_l2(const void *from, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void copy_bytes(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, int x, int y, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            to),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// To the same place, and the same barrier, of every block of the cluster in `ranks`.
__device__ __forceinline__ void copy_box_to_all(uint32_t to, const CUtensorMap *map, int x, int y, uint32_t barrier,
                                                uint16_t ranks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(ranks)
                 : "memory");
}

__device__ __forceinline__ void store_box(const CUtensorMap *map, int x, int y, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
                 "cp.async.bulk.commit_group;" ::"l"(map),
                 "r"(x), "r"(y), "r"(from)
                 : "memory");
}

// Waits until this thread's stores have read shared memory.
__device__ __forceinline__ void stores_have_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void stores_are_done() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Makes ordinary writes to shared memory visible to the bulk copies.
__device__ __forceinline__ void fence_for_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Four 8x8 matrices of 16-bit numbers, transposed; each lane gives the address of a row of 16 bytes.
__device__ __forceinline__ void store_matrices_transposed(uint32_t to, const uint32_t (&v)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]),
                 "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ void wgmma_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define MACKO_LOAD(T, KIND, C)                                                                                         \
    __device__ __forceinline__ void load(T &to, uint32_t from) {                                                       \
        asm volatile("ld.shared" KIND " %0, [%1];" : C(to) : "r"(from) : "memory");                                    \
    }
MACKO_LOAD(uint32_t, ".u32", "=r")
MACKO_LOAD(int32_t, ".s32", "=r")
MACKO_LOAD(float, ".f32", "=f")

// Keeps the compiler from moving uses of the sums in front of this place, among the products.
template <int COUNT>
__device__ __forceinline__ void settle(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

template <int COUNT>
__device__ __forceinline__ void settle(int32_t (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(sums[i])::"memory");
}

// Descriptor of a K-major operand: rows of SWIZZLE bytes, eight rows together. Add (bytes >> 4) to move along K.
template <int SWIZZLE>
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    static_assert(SWIZZLE == 64 || SWIZZLE == 128);
    return (uint64_t)((address & 0x3ffff) >> 4) | 1ull << 16 | (uint64_t)(SWIZZLE * 8 >> 4) << 32 |
           (SWIZZLE == 128 ? 1ull : 2ull) << 62;
}

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

#define MACKO_REGISTERS_8(c, i)                                                                                        \
    c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define MACKO_REGISTERS_16(c, i) MACKO_REGISTERS_8(c, i), MACKO_REGISTERS_8(c, i + 8)
#define MACKO_REGISTERS_32(c, i) MACKO_REGISTERS_16(c, i), MACKO_REGISTERS_16(c, i + 16)
#define MACKO_REGISTERS_64(c, i) MACKO_REGISTERS_32(c, i), MACKO_REGISTERS_32(c, i + 32)
#define MACKO_OPERANDS_16(c) MACKO_REGISTERS_8(c, 0)
#define MACKO_OPERANDS_32(c) MACKO_REGISTERS_16(c, 0)
#define MACKO_OPERANDS_64(c) MACKO_REGISTERS_32(c, 0)
#define MACKO_OPERANDS_128(c) MACKO_REGISTERS_64(c, 0)
#define MACKO_OPERANDS_192(c) MACKO_REGISTERS_64(c, 0), MACKO_REGISTERS_32(c, 64)
#define MACKO_OPERANDS_256(c) MACKO_REGISTERS_64(c, 0), MACKO_REGISTERS_64(c, 64)

// ONE: the immediates behind the predicate (signs of A and B; of 16-bit types also "not transposed", twice).
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
