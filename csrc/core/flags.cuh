// Flags in device memory, by which blocks of a launch wait for each other (compute capability 7.0 on).
#pragma once

#include <stdint.h>

namespace macko {

// What this thread has written before is there for whoever acquires the value.
__device__ __forceinline__ void store_release(uint64_t *at, uint64_t value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t *at) {
    uint64_t found;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(at) : "memory");
    return found;
}

// Flags hold anything before a launch, and initcheck would write down each look at one that nobody has set: so the library
// that is made for it clears them.
inline cudaError_t clear_for_initcheck(uint64_t *flags, int64_t bytes, cudaStream_t stream) {
#ifdef MACKO_EVERY_LANE_ARRIVES
    return cudaMemsetAsync(flags, 0, bytes, stream);
#else
    return cudaSuccess;
#endif
}

} // namespace macko
