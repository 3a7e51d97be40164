// A product with a packed matrix through dense tiles of its rows, on CUDA.
#pragma once

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

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

// x W^T + bias for x [..., cols] by the library's GEMM, as tensors [..., rows of a part], one for each of part_rows. unpack(
// first, count, w) writes rows [first, first + count) of W densely to w.
template <typename Unpack>
std::vector<Tensor> linear_by_tiles(const Tensor &x_any, const std::vector<int64_t> &part_rows,
                                    const std::optional<Tensor> &bias, const Unpack &unpack) {
    using torch::stable::detail::from;
    Tensor x = torch::stable::reshape(x_any, {num_tokens(x_any), x_any.size(-1)});
    if (x.stride(1) != 1) x = torch::stable::contiguous(x); // once, where each GEMM would
    const int64_t rows = std::accumulate(part_rows.begin(), part_rows.end(), int64_t(0));
    const int64_t tile_rows = rows_of_tile(rows, x.size(1), x.element_size());
    std::vector<Tensor> parts;
    for (const int64_t count : part_rows) parts.push_back(torch::stable::new_empty(x, {x.size(0), count}));
    Tensor tile = torch::stable::new_empty(x, {std::min(rows, tile_rows), x.size(1)});
    for (int64_t first = 0; first < rows; first += tile_rows) {
        const int64_t stop = std::min(rows, first + tile_rows);
        unpack(first, stop - first, tile.mutable_data_ptr());
        int64_t part_first = 0;
        for (const Tensor &part : parts) {
            const int64_t part_stop = part_first + part.size(1);
            const int64_t begin = std::max(first, part_first), count = std::min(stop, part_stop) - begin;
            if (count > 0) {
                std::array<StableIValue, 4> stack{from(x), from(narrowed(tile, 0, begin - first, count)),
                                                  from(part_of(bias, begin, count)),
                                                  from(narrowed(part, 1, begin - part_first, count))};
                STABLE_TORCH_ERROR_CODE_CHECK(
                    torch_call_dispatcher("aten::linear", "out", stack.data(), TORCH_ABI_VERSION));
                torch::stable::detail::to<Tensor>(stack[0]); // takes over the reference that the call gave
            }
            part_first = part_stop;
        }
    }
    for (Tensor &part : parts) part = torch::stable::reshape(part, with_last(x_any, part.size(1)));
    return parts;
}

// part_rows, which come from a caller, have to be the rows of W.
inline void check_parts(const char *op, const std::vector<int64_t> &part_rows, int64_t rows) {
    int64_t sum = 0;
    for (const int64_t count : part_rows) {
        if (count < 0 || count > rows - sum)
            fail(op, "part_rows has ", count, " behind ", sum, " rows, the matrix has ", rows);
        sum += count;
    }
    if (sum != rows) fail(op, "part_rows are ", sum, " in all, the matrix has ", rows, " rows");
}

} // namespace macko
