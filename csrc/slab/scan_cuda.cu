// Where slabs begin, on CUDA.
#include "../core/scan.cuh"
#include "slab.h"

using namespace macko;

namespace {

// One block: units in offsets[1..slabs] become their sums.
__global__ void __launch_bounds__(SCAN_THREADS) scan_slabs(int64_t slabs, int32_t *offsets, macko_slab_totals *totals) {
    __shared__ int widest;
    if (threadIdx.x == 0) offsets[0] = widest = 0;
    int64_t before = 0, total;
    int own_widest = 0;
    for (int64_t slab = threadIdx.x + 1; slab - threadIdx.x <= slabs; slab += SCAN_THREADS) {
        const int units = slab <= slabs ? offsets[slab] : 0;
        own_widest = max(own_widest, units);
        const int64_t offset = before + units + block_exclusive_sum(units, &total);
        before += total;
        if (slab <= slabs) offsets[slab] = (int32_t)offset;
    }
    __syncthreads();
    atomicMax(&widest, own_widest);
    __syncthreads();
    if (threadIdx.x) return;
    totals->units = before;
    totals->widest = widest;
}

} // namespace

cudaError_t macko_slab_scan_cuda(int64_t slabs, int32_t *offsets, macko_slab_totals *totals, cudaStream_t stream) {
    scan_slabs<<<1, SCAN_THREADS, 0, stream>>>(slabs, offsets, totals);
    return cudaGetLastError();
}
