// EC-CSR's ops, as library.cpp registers them. A packed matrix is eight tensors; ec.h says what they hold.
#pragma once

#include <optional>
#include <tuple>

#include "../torch/check.h"

namespace macko {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
ec_pack(const Tensor &w, int64_t delta_bits, int64_t lanes, int64_t max_height, int64_t min_width, int64_t max_width,
        int64_t tile_rows, int64_t max_slabs);
Tensor ec_unpack(const Tensor &block_values, const Tensor &delta_indices, const Tensor &base_indices,
                 const Tensor &block_indptr, const Tensor &row_indices, const Tensor &tile_ptr, const Tensor &sets,
                 const Tensor &col_order, int64_t rows, int64_t cols);
Tensor ec_check(const Tensor &block_values, const Tensor &delta_indices, const Tensor &base_indices,
                const Tensor &block_indptr, const Tensor &row_indices, const Tensor &tile_ptr, const Tensor &sets,
                const Tensor &col_order, int64_t rows, int64_t cols);
Tensor ec_spmv(const Tensor &block_values, const Tensor &delta_indices, const Tensor &base_indices,
               const Tensor &block_indptr, const Tensor &row_indices, const Tensor &tile_ptr, const Tensor &sets,
               const Tensor &col_order, int64_t rows, int64_t cols, const Tensor &x);
Tensor ec_linear(const Tensor &x, const Tensor &block_values, const Tensor &delta_indices, const Tensor &base_indices,
                 const Tensor &block_indptr, const Tensor &row_indices, const Tensor &tile_ptr, const Tensor &sets,
                 const Tensor &col_order, int64_t rows, int64_t cols, const std::optional<Tensor> &bias);

} // namespace macko
