// The op linear_experts of layouts of slabs; ops.h includes it and says what it asks of a codec.
#pragma once

#include "../experts/experts.h"
#ifdef USE_CUDA
#include "../input/input.h"
#include "experts.h"
#endif

namespace macko {

// Row order[i] / top_k of x for each i: what a product wants that cannot read them from there.
inline Tensor rows_in_order(const char *op, const Tensor &x_any, const Tensor &order, int64_t top_k) {
    const Tensor x = as_aligned(x_any);
    Tensor rows = new_tensor(x, {order.numel(), x.size(1)});
#ifdef USE_CUDA
    (void)op;
    STD_CUDA_CHECK(macko_expert_rows_cuda(reads<int32_t>(order), order.numel(), top_k, x.const_data_ptr(), x.size(0),
                                          x.size(1), rows.mutable_data_ptr(), current_stream(x)));
#else
    const int64_t bytes = x.size(1) * x.element_size();
    for (int64_t i = 0; i < order.numel(); i++) {
        const int64_t pair = reads<int32_t>(order)[i];
        if (pair < 0 || pair / top_k >= x.size(0))
            fail(op, "order[", i, "] is ", pair, ", expected 0 to ", x.size(0) * top_k - 1, ": x has ", x.size(0),
                 " rows, top_k is ", top_k);
        std::copy_n(reads<char>(x) + pair / top_k * bytes, bytes, writes<char>(rows) + i * bytes);
    }
#endif
    return rows;
}

#ifdef USE_CUDA
// grouped product of torch with the dense rows of all experts: for many tokens each. w [experts, rows, cols].
inline Tensor grouped_product(const Tensor &x, const Tensor &w, const Tensor &ends) {
    Tensor turned = w;
    turned = torch::stable::transpose(turned, 1, 2);
    return call_op("aten::_grouped_mm", "", x, turned, std::optional(ends), std::optional<Tensor>(),
                   std::optional<ScalarType>());
}
#endif

// silu(gate) * up of x [tokens, 2 cols], both rounded; the first columns are the gate's.
inline Tensor gated(const Tensor &x_any, int64_t cols) {
#ifdef USE_CUDA
    if (cols % 8 == 0) {
        const Tokens x = tokens_of(x_any, x_any.size(0), 2 * cols);
        Tensor y = new_tensor(x_any, {x_any.size(0), cols});
        const auto *gate = reads<uint16_t>(x.x);
        STD_CUDA_CHECK(macko_gate_cuda(x_any.scalar_type() == ScalarType::Half ? MACKO_F16 : MACKO_BF16, x_any.size(0),
                                       cols, gate, x.stride, gate + cols, x.stride, y.mutable_data_ptr(),
                                       current_stream(x_any)));
        return y;
    }
#endif
    return call_op("aten::mul", "Tensor", call_op("aten::silu", "", narrowed(x_any, 1, 0, cols)),
                   narrowed(x_any, 1, cols, cols));
}

#ifdef USE_CUDA
// y of linear_experts, whose arguments are checked.
template <typename Kind>
void multiply_experts(const char *op, const typename Kind::Matrix &m, const Tensor &x_any, int64_t rows,
                      const Tensor &ends, const std::optional<Tensor> &order, int64_t top_k, bool early, Tensor &y) {
    const int64_t tokens = y.size(0), experts = ends.numel(), padded = m.rows / experts;
    device_info device{};
    STD_CUDA_CHECK(current_device(&device));
    const macko_experts_problem problem = {.experts = experts,
                                           .row_blocks = padded / MACKO_SLAB_ROWS,
                                           .tokens = tokens,
                                           .widest = widest_of<Kind>(m),
                                           .sms = device.num_sms,
                                           .shared_bytes = ring_shared_bytes(device)};
    macko_experts_plan plan;
    const bool fits = device.major >= 8 && tokens <= INT32_LIMIT && macko_experts_plan_of(&problem, &plan);
    const bool many = macko_has_wgmma(device.major) &&
                      macko_experts_many_fits(tokens, experts, rows, m.cols, problem.widest, device.shared_bytes);
    const bool grouped = y.scalar_type() == ScalarType::BFloat16 && rows % 8 == 0 && m.cols % 8 == 0;
    if (!fits && !many && !grouped)
        fail(op, "no kernel for ", experts, " experts of ", rows, " x ", m.cols, " on this GPU");
    slab_experts_product product = {.tokens = tokens,
                                    .experts = experts,
                                    .rows = rows,
                                    .x = nullptr,
                                    .x_stride = 0,
                                    .ends = reads<int32_t>(ends),
                                    .order = nullptr,
                                    .top_k = top_k,
                                    .x_rows = x_any.size(0),
                                    .y = y.mutable_data_ptr(),
                                    .early = early,
                                    .stream = current_stream(y)};
    Tokens x{};
    const int *limit = macko_knob(MACKO_KNOB_TILE_TOKENS);
    const bool more = tokens > experts * (limit ? *limit : MACKO_EXPERTS_PACKED),
               by_many = !fits || (many && !limit ? macko_experts_are_many(&problem, m.cols) : more);
    if (by_many && (many || grouped)) {
        const Tensor sorted = order ? rows_in_order(op, x_any, *order, top_k) : x_any;
        if (many) {
            x = tokens_of(sorted, tokens, m.cols);
            product.x = x.x.const_data_ptr();
            product.x_stride = x.stride;
            STD_CUDA_CHECK(slab_experts_many(m, product));
            return;
        }
        Tensor w = torch::stable::new_empty(y, {experts, padded, m.cols});
        unpack_rows(op, m, 0, m.rows, w.mutable_data_ptr(), current_stream(y));
        y = grouped_product(as_aligned(sorted), narrowed(w, 1, 0, rows), ends);
        product.y = y.mutable_data_ptr();
        plan = macko_experts_plan_of_zeros(&problem); // of rows that are no expert's it writes nothing
    } else {
        x = tokens_of(x_any, x_any.size(0), m.cols);
        product.x = x.x.const_data_ptr();
        product.x_stride = x.stride;
        if (order) product.order = reads<int32_t>(*order);
    }
    STD_CUDA_CHECK(slab_experts(m, product, plan));
}
#endif

// Of rows ends[e - 1] .. ends[e] of x the products with rows [e * padded, e * padded + rows) of the matrix, where padded is
// rows up to a multiple of 64; rows of x behind the last end give zeros. With an order [tokens] they are rows order[i] / top_k
// of x. is_gated: not x [tokens, 2 cols] is multiplied, but what gated makes of it.
template <typename Kind>
Tensor linear_experts(const Packed &p, const Tensor &x_given, int64_t rows, const Tensor &ends_any,
                      const std::optional<Tensor> &order_any, int64_t top_k, bool is_gated,
                      [[maybe_unused]] bool early) {
    const char *op = "linear_experts";
    const typename Kind::Matrix m = Kind::matrix_of(op, p);
    const Tensor &data = p[0];
    check_tokens(op, x_given, "data", data, is_gated ? 2 * m.cols : m.cols);
    check_dim(op, "x", x_given, 2);
    check_device(op, "ends", ends_any, "data", data);
    check_dtype(op, "ends", ends_any, ScalarType::Int);
    check_dim(op, "ends", ends_any, 1);
    if (top_k < 1 || top_k > INT32_LIMIT) fail(op, "top_k is ", top_k, ", expected 1 and more");
    if (order_any) {
        check_device(op, "order", *order_any, "data", data);
        check_dtype(op, "order", *order_any, ScalarType::Int);
        check_dim(op, "order", *order_any, 1);
        if (!x_given.size(0) && order_any->numel()) fail(op, "order has ", order_any->numel(), " elements, x no rows");
    }
    const int64_t tokens = order_any ? order_any->numel() : x_given.size(0), experts = ends_any.numel();
    if (rows < 0 || rows > INT32_LIMIT) fail(op, "rows is ", rows, ", expected 0 to ", INT32_LIMIT);
    const int64_t padded = macko_slab_row_blocks(rows) * MACKO_SLAB_ROWS;
    if (experts * padded != m.rows)
        fail(op, "the stack has ", m.rows, " rows, expected ", experts * padded, ": ", experts,
             " experts, as many as ends, of ", rows, " rows, each filled up to ", padded);
    const DeviceOf guard(data);
    const Tensor ends = as_contiguous(ends_any);
    std::optional<Tensor> order;
    if (order_any) order = as_contiguous(*order_any);
    Tensor y = new_tensor(data, {tokens, rows});
    if (!y.numel()) return y;
    if (!m.cols || !experts) return torch::stable::zero_(y);
    const Tensor x_any = is_gated ? gated(x_given, m.cols) : x_given;
#ifdef USE_CUDA
    multiply_experts<Kind>(op, m, x_any, rows, ends, order, top_k, early, y);
#else
    refuse_bad_content<Kind>(op, m);
    const Tensor x = order ? rows_in_order(op, x_any, *order, top_k) : x_any;
    int64_t begin = 0;
    for (int64_t e = 0; e < experts; e++) {
        const int64_t end = reads<int32_t>(ends)[e];
        if (end < begin || end > tokens)
            fail(op, "ends[", e, "] is ", end, ", expected ", begin, " to ", tokens, ": the first row behind expert ",
                 e);
        if (end == begin) continue;
        Tensor of_expert = narrowed(y, 0, begin, end - begin);
        linear_by_blocks(narrowed(x, 0, begin, end - begin), rows, std::nullopt, of_expert,
                         [&](int64_t from, int64_t to, void *w) {
                             Kind::unpack(&m, e * padded + from, to - from, static_cast<uint16_t *>(w));
                             return macko_fault{};
                         });
        begin = end;
    }
    if (begin < tokens) {
        Tensor behind = narrowed(y, 0, begin, tokens - begin);
        torch::stable::zero_(behind);
    }
#endif
    return y;
}

} // namespace macko
