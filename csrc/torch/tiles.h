// A product with a packed matrix through dense tiles of its rows, on CUDA.
#pragma once

#include <algorithm>
#include <array>
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

// x [tokens, cols] W^T + bias by the library's GEMM, as tensors [tokens, rows of a part]: part i begins at row starts[i] of
// W, the last one ends at starts.back(). unpack(first, count, w) writes rows [first, first + count) densely to w.
template <typename Unpack>
std::vector<Tensor> linear_by_tiles(const Tensor &x, const std::vector<int64_t> &starts,
                                    const std::optional<Tensor> &bias, const Unpack &unpack) {
    using torch::stable::detail::from;
    const int64_t rows = starts.back(), tile_rows = rows_of_tile(rows, x.size(1), x.element_size());
    std::vector<Tensor> parts;
    for (size_t i = 0; i + 1 < starts.size(); i++)
        parts.push_back(torch::stable::new_empty(x, {x.size(0), starts[i + 1] - starts[i]}));
    Tensor tile = torch::stable::new_empty(x, {std::min(rows, tile_rows), x.size(1)});
    for (int64_t first = 0; first < rows; first += tile_rows) {
        const int64_t stop = std::min(rows, first + tile_rows);
        unpack(first, stop - first, tile.mutable_data_ptr());
        for (size_t i = 0; i < parts.size(); i++) {
            const int64_t begin = std::max(first, starts[i]), count = std::min(stop, starts[i + 1]) - begin;
            if (count <= 0) continue;
            std::array<StableIValue, 4> stack{from(x), from(narrowed(tile, 0, begin - first, count)),
                                              from(part_of(bias, begin, count)),
                                              from(narrowed(parts[i], 1, begin - starts[i], count))};
            STABLE_TORCH_ERROR_CODE_CHECK(
                torch_call_dispatcher("aten::linear", "out", stack.data(), TORCH_ABI_VERSION));
            torch::stable::detail::to<Tensor>(stack[0]); // takes over the reference that the call gave
        }
    }
    return parts;
}

// All rows as one part, [..., rows] for x [..., cols].
template <typename Unpack>
Tensor linear_by_tiles(const Tensor &x, int64_t rows, const std::optional<Tensor> &bias, const Unpack &unpack) {
    const Tensor tokens = torch::stable::reshape(x, {num_tokens(x), x.size(-1)}); // may have strides: a GEMM takes them
    return torch::stable::reshape(linear_by_tiles(tokens, {0, rows}, bias, unpack)[0], with_last(x, rows));
}

// Parts of part_rows rows of W, one after the other, as tensors [..., rows of a part] for x [..., cols].
template <typename Unpack>
std::vector<Tensor> linear_by_parts(const char *op, const Tensor &x, const std::vector<int64_t> &part_rows,
                                    int64_t rows, const Unpack &unpack) {
    std::vector<int64_t> starts{0};
    for (const int64_t count : part_rows) {
        if (count < 0 || count > rows - starts.back())
            fail(op, "part_rows has ", count, " behind ", starts.back(), " rows, the matrix has ", rows);
        starts.push_back(starts.back() + count);
    }
    if (starts.back() != rows) fail(op, "part_rows are ", starts.back(), " in all, the matrix has ", rows, " rows");
    const Tensor tokens = torch::stable::reshape(x, {num_tokens(x), x.size(-1)});
    std::vector<Tensor> parts = linear_by_tiles(tokens, starts, std::nullopt, unpack);
    for (size_t i = 0; i < parts.size(); i++) parts[i] = torch::stable::reshape(parts[i], with_last(x, part_rows[i]));
    return parts;
}

} // namespace macko
