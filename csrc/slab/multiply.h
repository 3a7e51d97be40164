// Products of a matrix in slabs on CUDA, and its dense rows. Each codec has these functions for its macko_NAME_matrix, in
// three sources (few_cuda.cu, many_cuda.cu, ring_cuda.cu): the kernels of one take nvcc as long as all the rest.
#pragma once

#include "../core/device.h"
#include "many_plan.h"

namespace macko {

// y [tokens, rows] = x [tokens, cols] W^T + bias; bias [rows] may be NULL, cols > 0. Rows of x begin every x_stride elements;
// x is 16-byte aligned and x_stride a multiple of 8 (TMA wants it).
struct slab_product {
    int64_t tokens;
    const void *x;
    int64_t x_stride;
    const void *bias;
    macko_slab_outputs y;
    cudaStream_t stream;
};

// One launch, same bits every run. With wgmma at most 64 tokens, else cudaErrorInvalidValue (torch/path.h decides). May start
// before the kernel before it in the stream is done (PDL, programmatic dependent launch): that one must not write the weight.
template <class MATRIX>
cudaError_t slab_few(const MATRIX &m, const slab_product &p);

// The same for more tokens with wgmma, of at least one row, as the plan says. workspace: device memory of
// plan.workspace_bytes, with any content.
template <class MATRIX>
cudaError_t slab_many(const MATRIX &m, const slab_product &p, const macko_slab_many_plan &plan, void *workspace);
template <class MATRIX>
cudaError_t slab_many_plan(const MATRIX &m, int64_t tokens, macko_slab_many_plan *plan);

// The same on any GPU from compute capability 8.0 on, fastest to some hundreds of tokens, where macko_ring_shape_of has a
// shape. workspace: device memory of macko_ring_workspace_bytes, with any content (ring_plan.h).
template <class MATRIX>
cudaError_t slab_ring(const MATRIX &m, const slab_product &p, void *workspace);

// The dense rows [first, first + count), w [count, cols], from compute capability 8.0 on; first and count are any. A codec's
// scales are multiplied in.
template <class MATRIX>
cudaError_t slab_unpack(const MATRIX &m, int64_t first, int64_t count, void *w, cudaStream_t stream);

} // namespace macko
