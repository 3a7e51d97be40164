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
