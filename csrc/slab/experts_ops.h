// The op linear_experts of layouts of slabs; ops.h includes it and says what it asks of a codec.
#pragma once

#ifdef USE_CUDA
#include "experts.h"
#endif

namespace macko {

#ifdef USE_CUDA
// grouped product of torch with the dense rows of all experts: for many tokens each. w [experts, rows, cols].
inline Tensor grouped_product(const Tensor &x, const Tensor &w, const Tensor &ends) {
    using torch::stable::detail::from;
    Tensor turned = w;
    turned = torch::stable::transpose(turned, 1, 2);
    std::array<StableIValue, 5> stack{from(x), from(turned), from(std::optional<Tensor>(ends)),
                                      from(std::optional<Tensor>()), from(std::optional<ScalarType>())};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_grouped_mm", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
}
#endif

// Of rows ends[e - 1] .. ends[e] of x the products with rows [e * padded, e * padded + rows) of the matrix, where padded is
// rows up to a multiple of 64; rows of x behind the last end give zeros.
template <typename Kind>
Tensor linear_experts(const Packed &p, const Tensor &x_any, int64_t rows, const Tensor &ends_any) {
    const char *op = "linear_experts";
    const typename Kind::Matrix m = Kind::matrix_of(op, p);
    const Tensor &data = p[0];
    check_tokens(op, x_any, "data", data, m.cols);
    check_dim(op, "x", x_any, 2);
    check_device(op, "ends", ends_any, "data", data);
    check_dtype(op, "ends", ends_any, ScalarType::Int);
    check_dim(op, "ends", ends_any, 1);
    const int64_t tokens = x_any.size(0), experts = ends_any.numel();
    if (rows < 0 || rows > INT32_LIMIT) fail(op, "rows is ", rows, ", expected 0 to ", INT32_LIMIT);
    const int64_t padded = macko_slab_row_blocks(rows) * MACKO_SLAB_ROWS;
    if (experts * padded != m.rows)
        fail(op, "the stack has ", m.rows, " rows, expected ", experts * padded, ": ", experts,
             " experts, as many as ends, of ", rows, " rows, each filled up to ", padded);
    const DeviceOf guard(data);
    const Tensor ends = as_contiguous(ends_any);
    Tensor y = new_tensor(data, {tokens, rows});
    if (!y.numel()) return y;
    if (!m.cols || !experts) return torch::stable::zero_(y);
#ifdef USE_CUDA
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
    const bool grouped = data.scalar_type() == ScalarType::BFloat16 && rows % 8 == 0 && m.cols % 8 == 0;
    if (!fits && !grouped) fail(op, "no kernel for ", experts, " experts of ", rows, " x ", m.cols, " on this GPU");
    Tokens x{};
    if (grouped && (!fits || tokens > experts * MACKO_EXPERTS_MANY)) {
        Tensor w = torch::stable::new_empty(data, {experts, padded, m.cols});
        STD_CUDA_CHECK(slab_unpack(m, 0, m.rows, w.mutable_data_ptr(), current_stream(data)));
        y = grouped_product(as_aligned(x_any), narrowed(w, 1, 0, rows), ends);
        plan = macko_experts_plan_of_zeros(&problem); // of rows that are no expert's it writes nothing
    } else {
        x = tokens_of(x_any, tokens, m.cols);
    }
    STD_CUDA_CHECK(slab_experts(m,
                                {.tokens = tokens,
                                 .experts = experts,
                                 .rows = rows,
                                 .x = x.stride ? x.x.const_data_ptr() : nullptr,
                                 .x_stride = x.stride,
                                 .ends = reads<int32_t>(ends),
                                 .y = y.mutable_data_ptr(),
                                 .stream = current_stream(data)},
                                plan));
#else
    refuse_bad_content<Kind>(op, m);
    int64_t begin = 0;
    for (int64_t e = 0; e < experts; e++) {
        const int64_t end = reads<int32_t>(ends)[e];
        if (end < begin || end > tokens)
            fail(op, "ends[", e, "] is ", end, ", expected ", begin, " to ", tokens, ": the first row behind expert ",
                 e);
        if (end == begin) continue;
        Tensor of_expert = narrowed(y, 0, begin, end - begin);
        linear_by_blocks(narrowed(x_any, 0, begin, end - begin), rows, std::nullopt, of_expert,
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
