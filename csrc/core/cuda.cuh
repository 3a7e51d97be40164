// What the CUDA kernels of every format share: conversions, streaming loads, warp collectives, device facts. No format
// is known here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <mutex>

namespace macko {

constexpr int WARP = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;

__device__ __forceinline__ float to_float(__half v) {
    return __half2float(v);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 v) {
    return __bfloat162float(v);
}

// The two values of a 32-bit word, the one at the lower address first.
template <typename T>
__device__ __forceinline__ float2 to_float2(uint32_t word);
template <>
__device__ __forceinline__ float2 to_float2<__half>(uint32_t word) {
    return __half22float2(*reinterpret_cast<const __half2 *>(&word));
}
template <>
__device__ __forceinline__ float2 to_float2<__nv_bfloat16>(uint32_t word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
    return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
    return __float2bfloat16_rn(v);
}
// Two of them, the first one low.
template <typename T>
__device__ __forceinline__ uint32_t from_float2(float low, float high);
template <>
__device__ __forceinline__ uint32_t from_float2<__half>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
template <>
__device__ __forceinline__ uint32_t from_float2<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

// Loads of data that is read once: they leave L1 to what is read again.
__device__ __forceinline__ uint4 load_stream(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
__device__ __forceinline__ uint64_t load_stream(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ uint32_t load_stream(const uint32_t *p) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ uint16_t load_stream(const uint16_t *p) {
    uint16_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

// How loads and copies of data that is read once leave L2 to what is read again.
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Hides how a register was made, so that a loop holds it instead of making it again.
__device__ __forceinline__ uint32_t held(uint32_t value) {
    uint32_t same;
    asm volatile("mov.u32 %0, %1;" : "=r"(same) : "r"(value));
    return same;
}

// Shared memory by 32-bit address.
__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

__device__ __forceinline__ uint16_t load_shared_2(uint32_t at) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}

// Asynchronous copies to shared memory of 4, 8 or 16 bytes; those of 16 pass L1 by.
template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t to, const void *from) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void store_shared_16(uint32_t at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ void store_shared_2(uint32_t at, uint16_t value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(value) : "memory");
}

// A barrier of some threads of a block; 0 is __syncthreads'.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// One step of a sum over the lanes, of each LANES by themselves. The predicate of shfl itself says whether there is a lane
// to add: two instructions.
template <int LANES = WARP>
__device__ __forceinline__ void add_from_below(uint32_t &sum, int distance) {
    asm volatile("{ .reg .pred p; .reg .u32 r;\n"
                 "  shfl.sync.up.b32 r|p, %0, %1, %2, 0xffffffff;\n"
                 "  @p add.u32 %0, %0, r; }"
                 : "+r"(sum)
                 : "r"(distance), "n"((WARP - LANES) << 8));
}

// Sum over the lanes up to this one, of each LANES by themselves.
template <int LANES = WARP>
__device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t v) {
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) add_from_below<LANES>(v, distance);
    return v;
}

// Sum over the warp, in every lane, in an order that does not change.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int distance = WARP / 2; distance; distance /= 2) v += __shfl_xor_sync(FULL_WARP, v, distance);
    return v;
}

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

struct Device {
    int index;
    int major; // of its compute capability
    int num_sms;
    int shared_bytes; // what a block may have at most, having asked for it
};

constexpr int MAX_DEVICES = 64;

// The current device. Asked once: the driver takes microseconds to answer.
inline cudaError_t current_device(Device *device) {
    static Device devices[MAX_DEVICES];
    static std::once_flag asked[MAX_DEVICES];
    int index = 0;
    if (const cudaError_t error = cudaGetDevice(&index)) return error;
    if (index >= MAX_DEVICES) return cudaErrorInvalidDevice;
    std::call_once(asked[index], [index] {
        Device &d = devices[index];
        d.index = index;
        cudaDeviceGetAttribute(&d.major, cudaDevAttrComputeCapabilityMajor, index);
        cudaDeviceGetAttribute(&d.num_sms, cudaDevAttrMultiProcessorCount, index);
        cudaDeviceGetAttribute(&d.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    });
    *device = devices[index];
    return cudaSuccess;
}

// Lets KERNEL have as much shared memory as the device gives: once a device, and again after a failure. carveout: how
// much of an SM's L1 becomes shared memory; a kernel of which two blocks shall share an SM has to ask for it.
template <auto KERNEL>
cudaError_t allow_all_shared_memory(const Device &device, int carveout = cudaSharedmemCarveoutDefault) {
    static std::atomic<bool> allowed[MAX_DEVICES];
    if (allowed[device.index]) return cudaSuccess;
    cudaFuncAttributes own;
    cudaError_t error = cudaFuncGetAttributes(&own, KERNEL);
    if (!error)
        error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     device.shared_bytes - int(own.sharedSizeBytes));
    if (!error) error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributePreferredSharedMemoryCarveout, carveout);
    allowed[device.index] = !error;
    return error;
}

// How many clusters of so many blocks of KERNEL run at once, at least 1: asked once, for the shared memory asked first. MOST:
// blocks of a cluster.
template <auto KERNEL, int MOST>
cudaError_t clusters_at_once(const Device &device, int blocks, int threads, int shared_bytes, int *clusters) {
    static std::mutex mutex;
    static int known[MAX_DEVICES][MOST + 1];
    const std::lock_guard<std::mutex> lock(mutex);
    int &found = known[device.index][blocks];
    if (!found) {
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {(unsigned)blocks, 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(blocks);
        config.blockDim = dim3(threads);
        config.dynamicSmemBytes = shared_bytes;
        config.attrs = &attribute;
        config.numAttrs = 1;
        if (const cudaError_t error = cudaOccupancyMaxActiveClusters(&found, KERNEL, &config)) return error;
        found = std::max(found, 1);
    }
    *clusters = found;
    return cudaSuccess;
}

// Lets the next kernel of a chain start. Behind the wait for the one before, never earlier: a kernel of torch.compile with
// triton.enable_pdl waits for its neighbour only, and takes for granted that whatever lies before that has ended.
__device__ __forceinline__ void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Whether an environment knob has this value.
inline bool is(const char *knob, const char *value) {
    const char *set = getenv(knob);
    return set && !strcmp(set, value);
}

// The number that an environment knob has, where it is set.
inline int number(const char *knob, int otherwise) {
    const char *set = getenv(knob);
    return set ? atoi(set) : otherwise;
}

// Whether a kernel in a graph was itself launched to overlap with the one before it, as Triton's are with
// torch._inductor.config.triton.enable_pdl. Such a kernel lets the next one start early.
inline bool overlaps(cudaGraphNode_t node) {
    cudaGraphNode_t before;
    cudaGraphEdgeData edge;
    size_t count = 1;
#if CUDART_VERSION >= 13000
    const cudaError_t error = cudaGraphNodeGetDependencies(node, &before, &edge, &count);
#elif CUDART_VERSION >= 12030
    const cudaError_t error = cudaGraphNodeGetDependencies_v2(node, &before, &edge, &count);
#else
    const cudaError_t error = cudaErrorNotSupported;
#endif
    return !error && count == 1 && edge.type == cudaGraphDependencyTypeProgrammatic;
}

// The attribute of a launch that may overlap with the end of the kernel before.
inline cudaLaunchAttribute overlap_attribute() {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return attribute;
}

// Whether to launch so that this kernel's start may overlap with the end of the one before. Behind an ordinary kernel
// that costs 0.2 us in a CUDA graph (H200), so while a graph is captured it is done only behind a kernel that lets it:
// one like this one (as many threads, and much shared memory), or one that overlaps itself. It is right behind any
// kernel: before its wait a block reads weights only.
inline bool may_overlap(cudaStream_t stream, unsigned threads) {
    if (is("MACKO_PDL", "0") || is("MACKO_PDL", "1")) return is("MACKO_PDL", "1");
    cudaStreamCaptureStatus status;
    const cudaGraphNode_t *before;
    size_t count;
#if CUDART_VERSION >= 13000
    const cudaGraphEdgeData *edges;
    const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &before, &edges, &count);
#else
    const cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, nullptr, &before, &count);
#endif
    if (!error && status == cudaStreamCaptureStatusNone) return true;
    cudaGraphNodeType type;
    cudaKernelNodeParams kernel;
    const bool one = !error && count == 1 && !cudaGraphNodeGetType(before[0], &type) && type == cudaGraphNodeTypeKernel;
    const bool alike = one && !cudaGraphKernelNodeGetParams(before[0], &kernel) && kernel.blockDim.x == threads &&
                       kernel.sharedMemBytes >= 64 * 1024;
    const bool chained = alike || (one && overlaps(before[0]));
    cudaGetLastError(); // a kernel that this runtime does not know is no error
    return chained;
}

} // namespace macko
