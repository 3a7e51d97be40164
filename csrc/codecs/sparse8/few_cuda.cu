// The kernel for few tokens, of sparse8.
#include "../../slab/few_kernel.cuh"
#include "codec.cuh"

static_assert(macko::densest_has_plan<macko::sparse8<macko_byte_kind(0), __half>>(
    MACKO_SPARSE8_VALUES_AT + MACKO_SPARSE8_MOST_ROWS * MACKO_SPARSE8_ROW_BYTES));

template cudaError_t macko::slab_few(const macko_sparse8_matrix &, const slab_product &);
