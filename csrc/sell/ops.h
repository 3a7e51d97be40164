// The sell layout's ops, as library.cpp registers them.
#pragma once

#include <tuple>
#include <vector>

#include "../torch/check.h"

namespace macko {

std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, int64_t, int64_t>
sell_pack(const Tensor &values, const Tensor &deltas, const Tensor &row_ptr, int64_t cols, int64_t delta_bits,
          int64_t gap_bits, int64_t warps, int64_t blocks);
Tensor sell_unpack(const Tensor &data, const Tensor &bases, const Tensor &blocks, const Tensor &perm, int64_t cols,
                   int64_t gap_bits, int64_t warps, int64_t head);
Tensor sell_spmv(const Tensor &data, const Tensor &bases, const Tensor &blocks, const Tensor &perm, int64_t cols,
                 int64_t gap_bits, int64_t warps, int64_t head, const Tensor &x, const std::optional<Tensor> &bias);
Tensor sell_spmm(const Tensor &data, const Tensor &bases, const Tensor &blocks, const Tensor &perm, int64_t cols,
                 int64_t gap_bits, int64_t warps, int64_t head, const Tensor &x, const std::optional<Tensor> &bias);
Tensor sell_norm_linear(const Tensor &x, const Tensor &weight, double eps, const Tensor &data, const Tensor &bases,
                        const Tensor &blocks, const Tensor &perm, int64_t cols, int64_t gap_bits, int64_t warps,
                        int64_t head, const std::optional<Tensor> &bias);
Tensor sell_gated_linear(const Tensor &gate, const Tensor &up, const Tensor &data, const Tensor &bases,
                         const Tensor &blocks, const Tensor &perm, int64_t cols, int64_t gap_bits, int64_t warps,
                         int64_t head, const std::optional<Tensor> &bias);
Tensor sell_linear(const Tensor &x, const Tensor &data, const Tensor &bases, const Tensor &blocks, const Tensor &perm,
                   int64_t cols, int64_t gap_bits, int64_t warps, int64_t head, const std::optional<Tensor> &bias);
std::vector<Tensor> sell_linear_parts(const Tensor &x, const Tensor &data, const Tensor &bases, const Tensor &blocks,
                                      const Tensor &perm, int64_t cols, int64_t gap_bits, int64_t warps, int64_t head,
                                      const std::vector<int64_t> &part_rows);

} // namespace macko
