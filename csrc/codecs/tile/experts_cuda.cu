// The kernels for stacks of experts, of tile.
#include "../../slab/experts_kernel.cuh"
#include "../../slab/experts_many_kernel.cuh"
#include "codec.cuh"

template cudaError_t macko::slab_experts(const macko_tile_matrix &, const slab_experts_product &,
                                         const macko_experts_plan &);
template cudaError_t macko::slab_experts_many(const macko_tile_matrix &, const slab_experts_product &);
