// What sm_90 added, as functions: mbarriers, bulk and tensor copies, clusters, the frame of wgmma (its products are with the
// formats that use them).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace macko::sm90 {

// Addresses in shared memory are 32-bit integers throughout (shared_address).
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Behind barrier_init: copies and other blocks may use the barriers, once they know of it.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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

// Arrives `times` at the same barrier of another block of the cluster. No .release: what is handed over is the right to
// overwrite shared memory that only the tensor core and ordinary loads read, and the release costs a fence of the GPU.
__device__ __forceinline__ void barrier_arrive_remote(uint32_t barrier, int rank, int times = 1) {
    asm volatile("{\n"
                 ".reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote], %2;\n"
                 "}" ::"r"(barrier),
                 "r"(rank), "r"(times)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int times) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times) : "memory");
}

// Behind __syncwarp one lane arrives for its warp: __syncwarp puts the reads of all lanes before it. compute-sanitizer does
// not follow that, so for racecheck all of them arrive: NVCC_APPEND_FLAGS=-DMACKO_EVERY_LANE_ARRIVES.
#ifdef MACKO_EVERY_LANE_ARRIVES
[[maybe_unused]] constexpr int WARP_ARRIVALS = WARP;
#else
[[maybe_unused]] constexpr int WARP_ARRIVALS = 1;
#endif

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

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t remote_address(uint32_t address, int rank) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Four numbers to a remote address; the barrier there, a remote address too, counts their bytes. No fence is needed.
__device__ __forceinline__ void store_async(uint32_t to, const float *v, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
        : "memory");
}

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

// In two steps. Relaxed: for what fence_barrier_init has made known.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
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

// policy: evict_first.
__device__ __forceinline__ void copy_bytes(uint32_t to, const void *from, int bytes, uint32_t barrier,
                                           uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, int x, int y, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            to),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// Of three dimensions.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, int x, int y, int z, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
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

// A tensor map with the 128-byte swizzle, the innermost dimension first; strides: bytes of the others, multiples of 16.
template <int RANK>
inline cudaError_t tensor_map(CUtensorMap *map, CUtensorMapDataType type, const void *data,
                              const int64_t (&extents)[RANK], const int64_t (&strides)[RANK - 1],
                              const int (&box)[RANK]) {
    // The driver's function is asked for at run time: nothing is linked against libcuda.
    static const auto encode = [] {
        void *found = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        return (decltype(&cuTensorMapEncodeTiled))found;
    }();
    if (!encode) return cudaErrorSymbolNotFound; // a driver before CUDA 12.0
    cuuint64_t sizes[RANK], ways[RANK - 1];
    cuuint32_t box_sizes[RANK], steps[RANK];
    for (int i = 0; i < RANK; i++) {
        sizes[i] = extents[i];
        if (i) ways[i - 1] = strides[i - 1];
        box_sizes[i] = box[i];
        steps[i] = 1;
    }
    const CUresult result =
        encode(map, type, RANK, const_cast<void *>(data), sizes, ways, box_sizes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t tensor_map(CUtensorMap *map, CUtensorMapDataType type, const void *data, int64_t inner,
                              int64_t outer, int64_t inner_bytes, int box_inner, int box_outer) {
    return tensor_map<2>(map, type, data, {inner, outer}, {inner_bytes}, {box_inner, box_outer});
}

// Constraints of the registers of an accumulator d.
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

} // namespace macko::sm90
