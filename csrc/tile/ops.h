// The tile layout's ops, as library.cpp registers them.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "../torch/check.h"

namespace macko {

std::tuple<Tensor, Tensor, int64_t, int64_t> tile_pack(const Tensor &values, const Tensor &deltas,
                                                       const Tensor &row_ptr, int64_t cols, int64_t delta_bits);
Tensor tile_unpack(const Tensor &data, const Tensor &offsets, int64_t rows, int64_t cols, int64_t widest);
Tensor tile_check(const Tensor &data, const Tensor &offsets, int64_t rows, int64_t cols, int64_t widest);
Tensor tile_linear(const Tensor &x, const Tensor &data, const Tensor &offsets, int64_t rows, int64_t cols,
                   int64_t widest, const std::optional<Tensor> &bias);
std::vector<Tensor> tile_linear_parts(const Tensor &x, const Tensor &data, const Tensor &offsets, int64_t rows,
                                      int64_t cols, int64_t widest, const std::vector<int64_t> &part_rows); // CUDA

} // namespace macko
