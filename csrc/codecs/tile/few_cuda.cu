// The kernel for few tokens, of tile.
#include "../../slab/few_kernel.cuh"
#include "codec.cuh"

namespace macko {
namespace {

static_assert(densest_has_plan<sparse16<__half>>(MACKO_TILE_VALUES_AT + MACKO_TILE_MOST_ROWS * MACKO_TILE_ROW_BYTES));

// With 64 tokens, where no row block is split.
constexpr int stages_of_64(int slab_bytes) {
    const int tokens_bytes = MACKO_SLAB_TILES * 64 * MACKO_SLAB_TILE_COLS * 2;
    return (227 * 1024 - BARRIER_BYTES - few_shape<64, sparse16<__half>>::SUMS_BYTES) /
           ((int)ceil_div(slab_bytes, 1024) * 1024 + tokens_bytes);
}
static_assert(stages_of_64(MACKO_TILE_FOUR_STAGES) == 4 && stages_of_64(MACKO_TILE_FOUR_STAGES + 1) == 3);

} // namespace
} // namespace macko

template cudaError_t macko::slab_few(const macko_tile_matrix &, const slab_product &);
