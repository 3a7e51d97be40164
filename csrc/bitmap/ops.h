// The bitmap layout's ops, as library.cpp registers them. CPU only.
#pragma once

#include <optional>
#include <tuple>

#include "../torch/check.h"

namespace macko {

std::tuple<Tensor, Tensor, Tensor> bitmap_pack(const Tensor &values, const Tensor &deltas, const Tensor &row_ptr,
                                               int64_t cols, int64_t delta_bits);
std::tuple<Tensor, Tensor, Tensor> bitmap_to_macko(const Tensor &values, const Tensor &bits, const Tensor &row_ptr,
                                                   int64_t cols, int64_t delta_bits);
Tensor bitmap_unpack(const Tensor &values, const Tensor &bits, const Tensor &row_ptr, int64_t cols);
Tensor bitmap_check(const Tensor &values, const Tensor &bits, const Tensor &row_ptr, int64_t cols);
Tensor bitmap_spmv(const Tensor &values, const Tensor &bits, const Tensor &row_ptr, int64_t cols, const Tensor &x);
Tensor bitmap_linear(const Tensor &x, const Tensor &values, const Tensor &bits, const Tensor &row_ptr, int64_t cols,
                     const std::optional<Tensor> &bias);

} // namespace macko
