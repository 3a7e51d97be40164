// The kernels for GPUs without wgmma, and of dense rows for all, of toy16.
#include "../../slab/ring_launch.cuh"
#include "../../slab/unpack_kernel.cuh"
#include "codec.cuh"

template cudaError_t macko::slab_ring(const macko_toy16_matrix &, const slab_product &, void *);
template cudaError_t macko::slab_unpack(const macko_toy16_matrix &, int64_t, int64_t, void *, cudaStream_t);
