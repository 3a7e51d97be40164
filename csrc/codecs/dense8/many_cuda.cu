// The kernel for many tokens, of dense8.
#include "../../slab/many_launch.cuh"
#include "codec.cuh"

template cudaError_t macko::slab_many_plan(const macko_dense8_matrix &, int64_t, macko_slab_many_plan *);
template cudaError_t macko::slab_many(const macko_dense8_matrix &, const slab_product &, const macko_slab_many_plan &,
                                      void *);
