// The macko format's ops, as library.cpp registers them.
#pragma once

#include <optional>
#include <tuple>

#include "../torch/check.h"
#include "macko.h"

namespace macko {

std::tuple<Tensor, Tensor, Tensor> pack(const Tensor &w, int64_t delta_bits);
Tensor unpack(const Tensor &values, const Tensor &deltas, const Tensor &row_ptr, int64_t cols, int64_t delta_bits,
              bool check);
Tensor check(const Tensor &values, const Tensor &deltas, const Tensor &row_ptr, int64_t cols, int64_t delta_bits);
Tensor spmv(const Tensor &values, const Tensor &deltas, const Tensor &row_ptr, int64_t cols, const Tensor &x,
            int64_t delta_bits);
Tensor linear(const Tensor &x, const Tensor &values, const Tensor &deltas, const Tensor &row_ptr, int64_t cols,
              const std::optional<Tensor> &bias, int64_t delta_bits);

// The struct over the three tensors, once they have passed every check that needs no look at their content.
macko_matrix checked_matrix(const char *op, const Tensor &values, const Tensor &deltas, const Tensor &row_ptr,
                            int64_t cols, int64_t delta_bits);

// An error for content that cannot be read; waits for the device.
void check_content(const char *op, const macko_matrix &m, const Tensor &values);

} // namespace macko
