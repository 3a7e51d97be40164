// A product with a packed matrix through a dense workspace, on CUDA: a panel of rows is unpacked, the library's GEMM
// multiplies it, then the next panel takes its place.
#pragma once

#include <algorithm>
#include <numeric>
#include <span>
#include <vector>

#include "tensors.h"

namespace macko {

constexpr int64_t WORKSPACE_BYTES = 64 << 20; // of dense rows: the most that a product takes beside its result

// Rows of a panel: no more than fit the workspace. Where 1024 fit, a multiple of 1024, as a GEMM of some other numbers of
// rows takes longer a row; where fewer do, of the 128 rows of a GEMM's block.
inline int64_t rows_of_panel(int64_t rows, int64_t cols, int64_t element_bytes) {
    const int64_t most = std::max<int64_t>(1, WORKSPACE_BYTES / std::max<int64_t>(1, cols * element_bytes));
    if (most >= rows) return std::max<int64_t>(1, rows);
    const int64_t panels = (rows + most - 1) / most, even = (rows + panels - 1) / panels;
    const int64_t gemm_rows = most < 1024 ? 128 : 1024;
    return most < gemm_rows ? even : std::min(most / gemm_rows, (even + gemm_rows - 1) / gemm_rows) * gemm_rows;
}

// x W^T + bias for x [..., cols] by the library's GEMM. A merged layer has several outputs: output_rows are the rows of
// each, and the result is a tensor [..., output_rows[i]] for each. unpack(first, count, w) writes rows
// [first, first + count) of W densely to w; a panel may reach over the end of a output.
template <typename Unpack>
std::vector<Tensor> linear_by_dense_rows(const Tensor &x_any, std::span<const int64_t> output_rows,
                                         const std::optional<Tensor> &bias, const Unpack &unpack) {
    Tensor x = torch::stable::reshape(x_any, {num_tokens(x_any), x_any.size(-1)});
    if (x.stride(1) != 1) x = torch::stable::contiguous(x); // once, where each GEMM would
    const int64_t rows = std::accumulate(output_rows.begin(), output_rows.end(), int64_t(0));
    const int64_t panel_rows = rows_of_panel(rows, x.size(1), x.element_size());
    std::vector<Tensor> outputs;
    for (const int64_t count : output_rows) outputs.push_back(new_tensor(x, {x.size(0), count}));
    Tensor panel = new_tensor(x, {std::min(rows, panel_rows), x.size(1)});
    for (int64_t first = 0; first < rows; first += panel_rows) {
        const int64_t stop = std::min(rows, first + panel_rows);
        unpack(first, stop - first, panel.mutable_data_ptr());
        int64_t output_first = 0;
        for (const Tensor &output : outputs) {
            const int64_t output_stop = output_first + output.size(1);
            const int64_t begin = std::max(first, output_first), count = std::min(stop, output_stop) - begin;
            if (count > 0)
                linear_into(narrowed(output, 1, begin - output_first, count), x,
                            narrowed(panel, 0, begin - first, count), narrowed_bias(bias, begin, count));
            output_first = output_stop;
        }
    }
    for (Tensor &output : outputs) output = torch::stable::reshape(output, with_last(x_any, output.size(1)));
    return outputs;
}

} // namespace macko
