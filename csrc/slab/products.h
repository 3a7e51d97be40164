// The ops that layouts of slabs have in common: rows as dense ones, checks, and products. A Kind says whose they
// are: its matrix and its layout, how the ops' arguments become a matrix, the kernels.
#pragma once

#include <vector>

#include "../torch/packed.h"
#include "../torch/tensors.h"
#include "slab.h"
#ifdef USE_CUDA
#include "../core/device.h"
#include "../torch/dense_rows.h"
#include "many_plan.h"
#else
#include "../torch/rows.h"
#endif

// A Kind, by the names that all layouts of slabs have, behind its matrix_of; and what the ops below are of its row of the table
// of layouts.
#ifdef USE_CUDA
#define MACKO_SLAB_KERNELS(name)                                                                                       \
    static constexpr auto unpack = macko_##name##_unpack_cuda;                                                         \
    static constexpr auto few = macko_##name##_few_cuda;                                                               \
    static constexpr auto many_plan = macko_##name##_many_plan_cuda;                                                   \
    static constexpr auto many = macko_##name##_many_cuda;
#define MACKO_SLAB_OPS(Kind)                                                                                           \
    .dense = dense<Kind>, .check = check<Kind>, .linear = linear<Kind>, .linear_parts = linear_parts<Kind>
#else
#define MACKO_SLAB_KERNELS(name)                                                                                       \
    static constexpr auto unpack = macko_##name##_unpack_cpu;                                                          \
    static constexpr auto check = macko_##name##_check_cpu;
#define MACKO_SLAB_OPS(Kind) .dense = dense<Kind>, .check = check<Kind>, .linear = linear<Kind>
#endif
#define MACKO_SLAB_KIND(Kind, name, NAME)                                                                              \
    struct Kind {                                                                                                      \
        using Matrix = macko_##name##_matrix;                                                                          \
        static constexpr macko_layout_id layout = MACKO_LAYOUT_##NAME;                                                 \
        static constexpr auto matrix_of = macko::matrix_of;                                                            \
        MACKO_SLAB_KERNELS(name)                                                                                       \
    }

namespace macko {

inline macko_dtype check_16_bits(const char *op, const char *name, const Tensor &t) {
    const macko_dtype dtype = check_value_dtype(op, name, t);
    if (dtype == MACKO_F32) fail(op, name, " has dtype float32, expected float16 or bfloat16");
    return dtype;
}

#ifdef USE_CUDA
template <typename Kind>
macko_path path_of(const typename Kind::Matrix &m, int64_t tokens, bool in_parts) {
    device_info device{};
    STD_CUDA_CHECK(current_device(&device));
    const int *limit = macko_knob(MACKO_KNOB_TILE_TOKENS);
    int64_t widest = 0;
    if constexpr (requires { m.widest; }) widest = int64_t(m.widest) * MACKO_SLAB_UNIT;
    return macko_path_of(
        {.layout = Kind::layout, .rows = m.rows, .cols = m.cols, .held = widest, .in_parts = in_parts}, tokens,
        {.is_gpu = true, .has_wgmma = has_wgmma(device.major), .has_limit = !!limit, .limit = limit ? *limit : 0});
}

// The parts of a product's rows, as kernels store them; their memory is not known yet. Nothing where kernels cannot: a row
// block would lie in two of them, or they are too many.
inline std::optional<macko_slab_outputs> place_parts(std::span<const int64_t> part_rows) {
    macko_slab_outputs parts{};
    int64_t begin = 0;
    int count = 0;
    for (const int64_t rows : part_rows) {
        if (!rows) continue;
        if (begin % MACKO_SLAB_ROWS || count == MACKO_SLAB_MOST_OUTPUTS) return std::nullopt;
        parts.output[count].rows = rows;
        parts.begins[count++] = begin;
        begin += rows;
    }
    for (; count < MACKO_SLAB_MOST_OUTPUTS; count++) parts.begins[count] = INT32_MAX;
    return parts;
}

// A tensor [..., part_rows[i]] for each part of x W^T + bias, in one launch, or through dense rows.
template <typename Kind>
std::vector<Tensor> multiply(const typename Kind::Matrix &m, const Tensor &data, const Tensor &x_any,
                             std::span<const int64_t> part_rows, const std::optional<Tensor> &bias) {
    const DeviceOf guard(data);
    const int64_t tokens = num_tokens(x_any);
    auto placed = place_parts(part_rows);
    const macko_path path = placed ? path_of<Kind>(m, tokens, placed->output[1].rows) : MACKO_PATH_DENSE_ROWS;
    if (path == MACKO_PATH_DENSE_ROWS)
        return linear_by_dense_rows(x_any, part_rows, bias, [&m, stream = current_stream(data)](auto... rows) {
            STD_CUDA_CHECK(Kind::unpack(&m, rows..., stream));
        });
    std::vector<Tensor> y;
    int next = 0;
    for (const int64_t rows : part_rows) {
        y.push_back(new_tensor(data, with_last(x_any, rows)));
        if (!rows) continue;
        placed->output[next].y = static_cast<uint16_t *>(y.back().mutable_data_ptr()) - placed->begins[next];
        next++;
    }
    const Tokens given = tokens_of(x_any, tokens, m.cols);
    const void *x = given.x.const_data_ptr();
    const cudaStream_t stream = current_stream(data);
    if (path == MACKO_PATH_FEW) {
        STD_CUDA_CHECK(Kind::few(&m, tokens, x, given.stride, data_of(bias), &*placed, stream));
    } else {
        macko_slab_many_plan plan;
        STD_CUDA_CHECK(Kind::many_plan(&m, tokens, &plan));
        Tensor workspace = new_tensor(data, {plan.workspace_bytes / 2});
        STD_CUDA_CHECK(Kind::many(&m, tokens, x, given.stride, data_of(bias), &*placed, &plan,
                                  workspace.mutable_data_ptr(), stream));
    }
    return y;
}
#endif

#ifndef USE_CUDA
// Slabs of any size are found by content, so it is looked at before anything is read by it. Where all have one size, nothing
// lies outside, whatever the content.
template <typename Kind>
void refuse_bad_content(const char *op, const typename Kind::Matrix &m) {
    if constexpr (requires { m.offsets; }) {
        const macko_fault found = Kind::check(&m);
        if (found.kind)
            fail(op, "the content breaks the format's rule ", found.kind, " at row block ", found.row, ", entry ",
                 found.entry, ": ", found.found);
    }
}
#endif

template <typename Kind>
Tensor dense(const Packed &p, [[maybe_unused]] bool check) {
    const typename Kind::Matrix m = Kind::matrix_of("dense", p);
    const Tensor &data = p[0];
    const DeviceOf guard(data);
    Tensor w = torch::stable::new_empty(data, {m.rows, m.cols});
#ifdef USE_CUDA
    STD_CUDA_CHECK(Kind::unpack(&m, 0, m.rows, w.mutable_data_ptr(), current_stream(data)));
#else
    if (check) refuse_bad_content<Kind>("dense", m);
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
#ifdef USE_CUDA
    return multiply<Kind>(m, data, x_any, {&rows, 1}, bias)[0];
#else
    refuse_bad_content<Kind>(op, m);
    const int64_t tokens = num_tokens(x_any);
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
    check_tokens(op, x, "data", p[0], m.cols);
    check_parts(op, part_rows, m.rows);
    return multiply<Kind>(m, p[0], x, part_rows, std::nullopt);
}
#endif

} // namespace macko
