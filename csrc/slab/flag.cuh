// A flag in device memory, of what a block leaves to another one: the launch's own number, after anything else.
#pragma once

#include <stdint.h>

namespace macko {

// What this thread has written before is there for who acquires the value.
__device__ __forceinline__ void store_release(uint64_t *at, uint64_t value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t *at) {
    uint64_t found;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(at) : "memory");
    return found;
}
// Waits until somebody has stored the value.
__device__ __forceinline__ void wait_for_flag(const uint64_t *at, uint64_t value) {
    while (load_acquire(at) != value) {
#ifdef MACKO_EVERY_LANE_ARRIVES
        __nanosleep(1 << 19); // initcheck writes down each look at a flag that nobody has set
#endif
    }
}

} // namespace macko
