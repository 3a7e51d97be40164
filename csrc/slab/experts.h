// Products of a stack of experts' matrices in slabs, on CUDA. Each codec has these functions for its macko_NAME_matrix, in
// experts_cuda.cu.
#pragma once

#include "../core/device.h"
#include "experts_plan.h"

namespace macko {

// Of rows ends[e - 1] up to ends[e] of x [tokens, cols] the products with expert e, y [tokens, rows]; rows behind the last
// end are zeros. With an order [tokens] row i of these is row order[i] / top_k of x [x_rows, cols]. Expert e has the rows
// [64 row_blocks e, + rows) of the matrix. ends [experts] is int32 and rises; what does not gives other sums, and nothing
// outside of y is written. x as in slab_product.
struct slab_experts_product {
    int64_t tokens, experts, rows;
    const void *x;
    int64_t x_stride;
    const int32_t *ends, *order; // order: or NULL
    int64_t top_k, x_rows;
    void *y;
    bool early; // the ends were there before the kernel that comes before this one began
    cudaStream_t stream;
};

// One launch, the same bits at every run; those of a token depend on no other one.
template <class MATRIX>
cudaError_t slab_experts(const MATRIX &m, const slab_experts_product &p, const macko_experts_plan &plan);

// The same with wgmma for many tokens an expert, where macko_experts_many_fits: x has them in order (order is NULL), rows is
// a multiple of 8.
template <class MATRIX>
cudaError_t slab_experts_many(const MATRIX &m, const slab_experts_product &p);

} // namespace macko
