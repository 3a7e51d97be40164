// A product with a packed matrix through dense tiles of its rows, on CUDA.
#pragma once

#include <algorithm>
#include <array>

#include "tensors.h"

namespace macko {

constexpr int64_t TILE_BYTES = 64 << 20; // of dense rows at a time, the most that a product takes beside its result

// Rows of a tile: no more than fit; multiples of 1024 where so many do, as a GEMM of some other numbers takes longer a
// row, else of what its block takes.
inline int64_t rows_of_tile(int64_t rows, int64_t cols, int64_t element_bytes) {
    const int64_t most = std::max<int64_t>(1, TILE_BYTES / std::max<int64_t>(1, cols * element_bytes));
    if (most >= rows) return std::max<int64_t>(1, rows);
    const int64_t tiles = (rows + most - 1) / most, even = (rows + tiles - 1) / tiles;
    const int64_t gemm_rows = most < 1024 ? 128 : 1024;
    return most < gemm_rows ? even : std::min(most / gemm_rows, (even + gemm_rows - 1) / gemm_rows) * gemm_rows;
}

// y [tokens, rows] = x [tokens, cols] W^T + bias by the library's GEMM. unpack(first, count, w) writes rows
// [first, first + count) densely to w.
template <typename Unpack>
void linear_by_tiles(const Tensor &x, int64_t rows, const std::optional<Tensor> &bias, Tensor &y,
                     const Unpack &unpack) {
    const int64_t tile_rows = rows_of_tile(rows, x.size(1), x.element_size());
    Tensor tile = torch::stable::new_empty(x, {std::min(rows, tile_rows), x.size(1)});
    for (int64_t first = 0; first < rows; first += tile_rows) {
        const int64_t count = std::min(tile_rows, rows - first);
        unpack(first, count, tile.mutable_data_ptr());
        std::array<StableIValue, 4> stack{torch::stable::detail::from(x),
                                          torch::stable::detail::from(torch::stable::narrow(tile, 0, 0, count)),
                                          torch::stable::detail::from(part_of(bias, first, count)),
                                          torch::stable::detail::from(torch::stable::narrow(y, 1, first, count))};
        STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "out", stack.data(), TORCH_ABI_VERSION));
        torch::stable::detail::to<Tensor>(stack[0]); // takes over the reference that the call gave
    }
}

} // namespace macko
