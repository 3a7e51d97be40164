// The slide format's ops, as library.cpp registers them.
#pragma once

#include <optional>
#include <tuple>

#include "../torch/check.h"

namespace macko {

std::tuple<Tensor, Tensor, Tensor> slide_pack(const Tensor &w, int64_t n, ScalarType dtype, bool prune);
Tensor slide_unpack(const Tensor &packed, const Tensor &scale, int64_t cols, int64_t n, ScalarType dtype);
std::tuple<Tensor, Tensor> slide_quant_fused(const Tensor &x, int64_t n, ScalarType dtype);
Tensor slide_gemm(const Tensor &lifted, const Tensor &token_scale, const Tensor &packed, const Tensor &scale,
                  int64_t cols, int64_t n, ScalarType out_dtype, const std::optional<Tensor> &bias);
Tensor slide_linear(const Tensor &x, const Tensor &packed, const Tensor &scale, int64_t cols, int64_t n,
                    ScalarType dtype, const std::optional<Tensor> &bias, const std::optional<Tensor> &dense,
                    int64_t sparse_from, int64_t sparse_to);

} // namespace macko
