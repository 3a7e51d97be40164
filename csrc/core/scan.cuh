// Prefix sums of the packing kernels.
#pragma once

#include "cuda.cuh"

namespace macko {

constexpr int SCAN_THREADS = 1024;

// Sum over the lanes up to this one, of any type.
template <typename N>
__device__ __forceinline__ N warp_inclusive_sum(N value, int lane) {
    for (int distance = 1; distance < WARP; distance *= 2) {
        const N below = __shfl_up_sync(FULL_WARP, value, distance);
        if (lane >= distance) value += below;
    }
    return value;
}

// Exclusive sum over the threads of a block of SCAN_THREADS; the sum of all to *total.
inline __device__ int64_t block_exclusive_sum(int64_t value, int64_t *total) {
    __shared__ int64_t sums[SCAN_THREADS / WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64_t inclusive = warp_inclusive_sum(value, lane);
    __syncthreads(); // the last call's reads are done
    if (lane == WARP - 1) sums[warp] = inclusive;
    __syncthreads();
    const int64_t below = warp_inclusive_sum(sums[lane], lane);
    *total = __shfl_sync(FULL_WARP, below, WARP - 1);
    const int64_t offset = __shfl_sync(FULL_WARP, below, warp ? warp - 1 : 0);
    return inclusive - value + (warp ? offset : 0);
}

} // namespace macko
