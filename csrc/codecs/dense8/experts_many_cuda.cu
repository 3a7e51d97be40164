// The kernel for stacks of experts by many tokens each, of dense8.
#include "../../slab/experts_many_kernel.cuh"
#include "codec.cuh"

template cudaError_t macko::slab_experts_many(const macko_dense8_matrix &, const slab_experts_product &);
