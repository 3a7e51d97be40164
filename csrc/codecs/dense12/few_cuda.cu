// The kernel for few tokens, of dense12.
#include "../../slab/few_kernel.cuh"
#include "codec.cuh"

template cudaError_t macko::slab_few(const macko_dense12_matrix &, const slab_product &);
