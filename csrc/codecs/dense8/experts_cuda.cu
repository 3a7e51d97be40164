// The kernel for stacks of experts, of dense8.
#include "../../slab/experts_kernel.cuh"
#include "codec.cuh"

template cudaError_t macko::slab_experts(const macko_dense8_matrix &, const slab_experts_product &,
                                         const macko_experts_plan &, void *);
