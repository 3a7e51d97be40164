// Eight columns at a time of what comes before a product: shared by the kernels here and the norm in sell's product.
#pragma once

#include "../core/cuda.cuh"

namespace macko {

// Once pdl_wait has passed: from L2, where the previous kernel wrote it.
__device__ __forceinline__ uint4 load_vector(const uint4 *from) {
    return __ldcg(from);
}

template <typename T>
__device__ __forceinline__ float sum_of_squares(uint4 vector, float sum) {
    for (const uint32_t word : {vector.x, vector.y, vector.z, vector.w}) {
        const float2 x = to_float2<T>(word);
        sum = fmaf(x.y, x.y, fmaf(x.x, x.x, sum));
    }
    return sum;
}

// The vectors of a token's row that a thread has, every threads-th; the first KEPT stay in registers from one pass to the
// next, where the kernel has loaded them.
template <typename T, int KEPT>
struct row_walk {
    const uint4 *from;
    int vectors, threads;
    uint4 kept[KEPT] = {};

    // The sum of squares of the warp's vectors, in every lane.
    __device__ __forceinline__ float squares() const {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < KEPT; k++) sum = sum_of_squares<T>(kept[k], sum);
#pragma unroll 1
        for (int i = threadIdx.x + KEPT * threads; i < vectors; i += threads)
            sum = sum_of_squares<T>(load_vector(from + i), sum);
        return warp_sum(sum);
    }

    // body(i, vector, k); k is KEPT of those that are not kept.
    template <typename Body>
    __device__ __forceinline__ void for_each(const Body &body) const {
#pragma unroll
        for (int k = 0; k < KEPT; k++)
            if (const int i = threadIdx.x + k * threads; i < vectors) body(i, kept[k], k);
#pragma unroll 1
        for (int i = threadIdx.x + KEPT * threads; i < vectors; i += threads) body(i, load_vector(from + i), KEPT);
    }
};

// Rounded twice, as modules do it: x scaled, and its product with the weight.
template <typename T>
__device__ __forceinline__ uint4 normalised(uint4 vector, uint4 weight, float scale) {
    const auto two = [scale](uint32_t x, uint32_t w) {
        const float2 v = to_float2<T>(x), factor = to_float2<T>(w);
        const float2 scaled = to_float2<T>(from_float2<T>(v.x * scale, v.y * scale));
        return from_float2<T>(scaled.x * factor.x, scaled.y * factor.y);
    };
    return make_uint4(two(vector.x, weight.x), two(vector.y, weight.y), two(vector.z, weight.z),
                      two(vector.w, weight.w));
}

} // namespace macko
