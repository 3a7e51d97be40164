// The kernel for many tokens, of toy16.
#include "../../slab/many_launch.cuh"
#include "codec.cuh"

template cudaError_t macko::slab_many_plan(const macko_toy16_matrix &, int64_t, macko_slab_many_plan *);
template cudaError_t macko::slab_many(const macko_toy16_matrix &, const slab_product &, const macko_slab_many_plan &,
                                      void *);
