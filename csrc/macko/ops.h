// The macko format's ops, as library.cpp registers them.
#pragma once

#include <optional>
#include <tuple>

#include "../torch/check.h"

namespace macko {

std::tuple<Tensor, Tensor, Tensor> pack(const Tensor &w);
Tensor unpack(const Tensor &values, const Tensor &deltas, const Tensor &row_ptr, int64_t cols);
Tensor check(const Tensor &values, const Tensor &deltas, const Tensor &row_ptr, int64_t cols);
Tensor spmv(const Tensor &values, const Tensor &deltas, const Tensor &row_ptr, int64_t cols, const Tensor &x);
Tensor linear(const Tensor &x, const Tensor &values, const Tensor &deltas, const Tensor &row_ptr, int64_t cols,
              const std::optional<Tensor> &bias);

}  // namespace macko
