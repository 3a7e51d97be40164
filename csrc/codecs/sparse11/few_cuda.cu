// The kernel for few tokens, of sparse11.
#include "../../slab/few_kernel.cuh"
#include "codec.cuh"

static_assert(macko::densest_has_plan<macko::sparse11<__half>>(MACKO_SPARSE11_MOST_UNITS *MACKO_SLAB_UNIT));

template cudaError_t macko::slab_few(const macko_sparse11_matrix &, const slab_product &);
