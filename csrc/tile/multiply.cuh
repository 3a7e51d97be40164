// From a decoded tile to the products of few_cuda.cu and many_kernel.cuh.
#pragma once

#include "../core/cuda.cuh"
#include "../core/wgmma.cuh"
#include "decode.cuh"

namespace macko {

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
    sm90::wgmma<T, TOKENS>::registers(sums, a[STEP & 2], b + 2 * (STEP & 2));
    sm90::wgmma<T, TOKENS>::registers(sums, a[STEP], b + 2 * STEP);
    sm90::warpgroup_commit_batch();
}

} // namespace macko
