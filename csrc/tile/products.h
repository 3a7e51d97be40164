// The ops that layouts of tile's slabs have in common: rows as dense ones, checks, and products. A Kind
// says whose they are: its matrix and its layout, how the ops' arguments become a matrix, a piece of one, the kernels.
#pragma once

#include <vector>

#include "../torch/packed.h"
#include "../torch/tensors.h"
#include "tile.h"
#ifdef USE_CUDA
#include "../core/device.h"
#include "../torch/dense_rows.h"
#include "many_plan.h"
#else
#include "../torch/rows.h"
#endif

namespace macko {

inline macko_dtype check_16_bits(const char *op, const char *name, const Tensor &t) {
    const macko_dtype dtype = check_value_dtype(op, name, t);
    if (dtype == MACKO_F32) fail(op, name, " has dtype float32, expected float16 or bfloat16");
    return dtype;
}

#ifdef USE_CUDA
template <typename Kind>
macko_path path_of(const typename Kind::Matrix &m, int64_t tokens) {
    device_info device{};
    STD_CUDA_CHECK(current_device(&device));
    const int *limit = macko_knob(MACKO_KNOB_TILE_TOKENS);
    return macko_path_of(
        {.layout = Kind::layout, .rows = m.rows, .cols = m.cols}, tokens,
        {.is_gpu = true, .has_wgmma = has_wgmma(device.major), .has_limit = !!limit, .limit = limit ? *limit : 0});
}

// y, of tokens * m.rows elements, = x W^T + bias.
template <typename Kind>
void multiply(macko_path path, const typename Kind::Matrix &m, int64_t tokens, const Tokens &given,
              const std::optional<Tensor> &bias, Tensor &y) {
    const void *x = given.x.const_data_ptr();
    const cudaStream_t stream = current_stream(y);
    if (path == MACKO_PATH_FEW) {
        STD_CUDA_CHECK(Kind::few(&m, tokens, x, given.stride, data_of(bias), y.mutable_data_ptr(), stream));
    } else {
        macko_tile_many_plan plan;
        STD_CUDA_CHECK(Kind::many_plan(&m, tokens, &plan));
        Tensor workspace = torch::stable::new_empty(y, {plan.workspace_bytes / 2});
        STD_CUDA_CHECK(Kind::many(&m, tokens, x, given.stride, data_of(bias), y.mutable_data_ptr(), &plan,
                                  workspace.mutable_data_ptr(), stream));
    }
}

// What unpacks rows on the stream of data's device.
template <typename Kind>
auto unpacking(const typename Kind::Matrix &m, const Tensor &data) {
    return [&m, stream = current_stream(data)](int64_t first, int64_t count, void *w) {
        STD_CUDA_CHECK(Kind::unpack(&m, first, count, w, stream));
    };
}
#endif

template <typename Kind>
Tensor dense(const Packed &p, bool) {
    const typename Kind::Matrix m = Kind::matrix_of("dense", p);
    const Tensor &data = p[0];
    const DeviceOf guard(data);
    Tensor w = torch::stable::new_empty(data, {m.rows, m.cols});
#ifdef USE_CUDA
    STD_CUDA_CHECK(Kind::unpack(&m, 0, m.rows, w.mutable_data_ptr(), current_stream(data)));
#else
    for_rows(m.rows, m.cols, [&](int64_t begin, int64_t end) {
        Kind::unpack(&m, begin, end - begin, static_cast<uint16_t *>(w.mutable_data_ptr()) + begin * m.cols);
    });
#endif
    return w;
}

template <typename Kind>
Tensor check(const Packed &p) {
    [[maybe_unused]] const typename Kind::Matrix m = Kind::matrix_of("check", p);
#ifdef USE_CUDA
    return check_on_cpu(p);
#else
    Tensor found = new_fault(p[0]);
    *fault_in(found) = Kind::check(&m);
    return found;
#endif
}

template <typename Kind>
Tensor linear(const Packed &p, const Tensor &x_any, const std::optional<Tensor> &bias_any) {
    const char *op = "linear";
    const typename Kind::Matrix m = Kind::matrix_of(op, p);
    const Tensor &data = p[0];
    const int64_t rows = m.rows, cols = m.cols;
    check_tokens(op, x_any, "data", data, cols);
    const auto bias = checked_bias(op, bias_any, "data", data, data.scalar_type(), rows);
    const DeviceOf guard(data);
    const int64_t tokens = num_tokens(x_any);
#ifdef USE_CUDA
    const macko_path path = path_of<Kind>(m, tokens);
    if (path == MACKO_PATH_DENSE_ROWS) return linear_by_dense_rows(x_any, {rows}, bias, unpacking<Kind>(m, data))[0];
    Tensor y = torch::stable::new_empty(data, with_last(x_any, rows));
    multiply<Kind>(path, m, tokens, tokens_of(x_any, tokens, cols), bias, y);
    return y;
#else
    Tensor y = torch::stable::new_empty(data, {tokens, rows});
    linear_by_blocks(torch::stable::reshape(x_any, {tokens, cols}), rows, bias, y,
                     [&](int64_t begin, int64_t end, void *w) {
                         Kind::unpack(&m, begin, end - begin, static_cast<uint16_t *>(w));
                         return macko_fault{};
                     });
    return torch::stable::reshape(y, with_last(x_any, rows));
#endif
}

#ifdef USE_CUDA
template <typename Kind>
std::vector<Tensor> linear_parts(const Packed &p, const Tensor &x, const Ints &part_rows) {
    const char *op = "linear_parts";
    const typename Kind::Matrix m = Kind::matrix_of(op, p);
    const Tensor &data = p[0];
    const int64_t rows = m.rows, cols = m.cols;
    check_tokens(op, x, "data", data, cols);
    check_parts(op, part_rows, rows);
    const DeviceOf guard(data);
    const int64_t tokens = num_tokens(x);
    std::vector<typename Kind::Matrix> pieces;
    std::vector<macko_path> paths;
    int64_t first = 0;
    for (const int64_t count : part_rows) {
        pieces.push_back(Kind::piece_of(m, first, count));
        paths.push_back(path_of<Kind>(pieces.back(), tokens));
        // Parts that do not begin where a row block does go through dense rows, which can be cut anywhere.
        if (count && (first % MACKO_TILE_ROWS || paths.back() == MACKO_PATH_DENSE_ROWS))
            return linear_by_dense_rows(x, part_rows, std::nullopt, unpacking<Kind>(m, data));
        first += count;
    }
    const Tokens prepared = tokens_of(x, tokens, cols);
    std::vector<Tensor> parts;
    for (size_t i = 0; i < pieces.size(); i++) {
        parts.push_back(torch::stable::new_empty(data, with_last(x, part_rows[i])));
        if (part_rows[i]) multiply<Kind>(paths[i], pieces[i], tokens, prepared, std::nullopt, parts.back());
    }
    return parts;
}
#endif

} // namespace macko
