// The kernel for few tokens, of toy16.
#include "../../slab/few_kernel.cuh"
#include "codec.cuh"

template cudaError_t macko::slab_few(const macko_toy16_matrix &, const slab_product &);
