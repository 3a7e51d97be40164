// The ops of layouts of slabs: dense rows, checks, products. What they ask of a codec are a struct, KIND below, and its
// matrix. (What kernels ask of it is in codec.cuh.)
//
//     Matrix            macko_NAME_matrix
//     matrix_of         the Matrix over the tensors, once they have passed every check that needs no look at their content
//     unpack, check     on the CPU: dense rows; what packing cannot have made
//     write, Element    the bytes of slabs, from dense rows of elements (pack.h, which asks for more)
//     slab_units        where all slabs are of one size: its units, by the totals of packing
//     waits             whether the kernel for few waits for memory with 64 tokens (torch/path.h); none: it never does
//
// Unless Matrix has offsets its slabs are all of one size. CUDA: the functions of multiply.h besides.
#pragma once

#include <vector>

#include "../torch/packed.h"
#include "../torch/tensors.h"
#include "slab.h"
#ifdef USE_CUDA
#include "../torch/dense_rows.h"
#include "multiply.h"
#include "ring_plan.h"
#define MACKO_HERE(function) function##_cuda
#else
#include "../torch/rows.h"
#define MACKO_HERE(function) function##_cpu
#endif

namespace macko {

inline macko_dtype check_16_bits(const char *op, const char *name, const Tensor &t) {
    const macko_dtype dtype = check_value_dtype(op, name, t);
    if (dtype == MACKO_F32) fail(op, name, " has dtype float32, expected float16 or bfloat16");
    return dtype;
}

#ifdef USE_CUDA
// Units of the largest slab.
template <typename Kind>
int widest_of(const typename Kind::Matrix &m) {
    if constexpr (requires { m.widest; }) return m.widest;
    if constexpr (requires { m.slab_units; }) return m.slab_units;
    if constexpr (!requires { m.offsets; }) return Kind::slab_units({});
}

template <typename Kind>
macko_path path_of(const typename Kind::Matrix &m, int64_t tokens, bool several_outputs) {
    device_info device{};
    STD_CUDA_CHECK(current_device(&device));
    const int *limit = macko_knob(MACKO_KNOB_TILE_TOKENS);
    const macko_ring_problem problem = {.row_blocks = macko_slab_row_blocks(m.rows),
                                        .slabs = macko_slabs_across(m.cols),
                                        .tokens = tokens,
                                        .widest = widest_of<Kind>(m),
                                        .sms = device.num_sms,
                                        .shared_bytes = ring_shared_bytes(device)};
    macko_ring_shape shape;
    bool waits = false;
    if constexpr (requires { Kind::waits; }) waits = Kind::waits(m);
    const bool has_ring = macko_ring_shape_of(&problem, &shape);
    return macko_slab_path(m.rows, m.cols, macko_few_tokens(m.rows, several_outputs, waits),
                           has_ring ? macko_ring_tokens_of(device.major) : 0, tokens,
                           {.is_gpu = true,
                            .has_wgmma = macko_has_wgmma(device.major),
                            .has_limit = !!limit,
                            .limit = limit ? *limit : 0});
}

// The outputs of a product, as kernels store them; their memory is not known yet. Nothing where kernels cannot: a row block
// would lie in two of them, or they are too many.
inline std::optional<macko_slab_outputs> place_outputs(std::span<const int64_t> output_rows) {
    macko_slab_outputs outputs{};
    int64_t begin = 0;
    int count = 0;
    for (const int64_t rows : output_rows) {
        if (!rows) continue;
        if (begin % MACKO_SLAB_ROWS || count == MACKO_SLAB_MOST_OUTPUTS) return std::nullopt;
        outputs.output[count].rows = rows;
        outputs.begins[count++] = begin;
        begin += rows;
    }
    for (; count < MACKO_SLAB_MOST_OUTPUTS; count++) outputs.begins[count] = INT32_MAX;
    return outputs;
}

// Dense rows [first, first + count). An error where the GPU, or what this library has for it, is older than the kernel.
template <typename Matrix>
void unpack_rows(const char *op, const Matrix &m, int64_t first, int64_t count, void *w, cudaStream_t stream) {
    const cudaError_t error = slab_unpack(m, first, count, w, stream);
    if (error == cudaErrorNoKernelImageForDevice)
        fail(op, "slabs need a GPU of compute capability 8.0 or later, and kernels built for 8.0 or later ",
             "(TORCH_CUDA_ARCH_LIST): this one lacks one of them");
    STD_CUDA_CHECK(error);
}

// A tensor [..., output_rows[i]] for each output of x W^T + bias, in one launch, or through dense rows.
template <typename Kind>
std::vector<Tensor> multiply(const typename Kind::Matrix &m, const Tensor &data, const Tensor &x_any,
                             std::span<const int64_t> output_rows, const std::optional<Tensor> &bias) {
    const DeviceOf guard(data);
    const int64_t tokens = num_tokens(x_any);
    auto placed = place_outputs(output_rows);
    const macko_path path = placed ? path_of<Kind>(m, tokens, placed->output[1].rows) : MACKO_PATH_DENSE_ROWS;
    if (path == MACKO_PATH_DENSE_ROWS)
        return linear_by_dense_rows(x_any, output_rows, bias, [&m, stream = current_stream(data)](auto... rows) {
            unpack_rows("linear", m, rows..., stream);
        });
    std::vector<Tensor> y;
    int next = 0;
    for (const int64_t rows : output_rows) {
        y.push_back(new_tensor(data, with_last(x_any, rows)));
        if (!rows) continue;
        placed->output[next].y = static_cast<uint16_t *>(y.back().mutable_data_ptr()) - placed->begins[next];
        next++;
    }
    const Tokens x = tokens_of(x_any, tokens, m.cols);
    const slab_product product = {tokens, x.x.const_data_ptr(), x.stride, data_of(bias), *placed, current_stream(data)};
    if (path == MACKO_PATH_FEW) {
        STD_CUDA_CHECK(slab_few(m, product));
    } else if (path == MACKO_PATH_RING) {
        device_info device{};
        STD_CUDA_CHECK(current_device(&device));
        Tensor workspace = new_tensor(data, {macko_ring_workspace_bytes(tokens, device.num_sms) / 2});
        STD_CUDA_CHECK(slab_ring(m, product, workspace.mutable_data_ptr()));
    } else {
        macko_slab_many_plan plan;
        STD_CUDA_CHECK(slab_many_plan(m, tokens, &plan));
        Tensor workspace = new_tensor(data, {plan.workspace_bytes / 2});
        STD_CUDA_CHECK(slab_many(m, product, plan, workspace.mutable_data_ptr()));
    }
    return y;
}

template <typename Kind>
std::vector<Tensor> linear_parts(const Packed &p, const Tensor &x, const Ints &output_rows) {
    const char *op = "linear_parts";
    const typename Kind::Matrix m = Kind::matrix_of(op, p);
    check_tokens(op, x, "data", p[0], m.cols);
    check_parts(op, output_rows, m.rows);
    return multiply<Kind>(m, p[0], x, output_rows, std::nullopt);
}
#else
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
    unpack_rows("dense", m, 0, m.rows, w.mutable_data_ptr(), current_stream(data));
#else
    if (check) refuse_bad_content<Kind>("dense", m);
    for_rows(m.rows, m.cols, [&](int64_t begin, int64_t end) {
        Kind::unpack(&m, begin, end - begin, writes<uint16_t>(w) + begin * m.cols);
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

} // namespace macko
#include "experts_ops.h"
namespace macko {

// A codec's row of the table of layouts: what it says itself, and the ops above.
template <typename Kind>
Layout slab_layout(Layout row) {
    row.dense = dense<Kind>;
    row.check = check<Kind>;
    row.linear = linear<Kind>;
    row.linear_experts = linear_experts<Kind>;
#ifdef USE_CUDA
    row.linear_parts = linear_parts<Kind>;
#endif
    return row;
}

} // namespace macko
