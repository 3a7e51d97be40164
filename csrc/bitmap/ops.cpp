// The bitmap layout's ops: check, allocate, call. For the CPU alone, so the CUDA library has nothing of this file.
#ifndef USE_CUDA
#include "ops.h"

#include <algorithm>
#include <vector>

#include "../macko/ops.h"
#include "../torch/rows.h"
#include "bitmap.h"

namespace macko {
namespace {

int64_t mean_row(const macko_bitmap &m) {
    return m.rows ? m.capacity / m.rows + macko_bitmap_words(m.cols) : 0;
}

[[noreturn]] void fail_for(const char *op, const macko_fault &fault, const macko_bitmap &m) {
    switch (fault.kind) {
    case MACKO_BITMAP_ROW_PTR:
        fail(op, "row_ptr[", fault.row, "] is ", fault.found, ", expected 0 at the start, never to fall and at most ",
             m.capacity - MACKO_BITMAP_PAD);
    case MACKO_BITMAP_COUNT:
        fail(op, "bits has ", fault.found, " set in row ", fault.row, ", row_ptr has ",
             int64_t(m.row_ptr[fault.row + 1]) - m.row_ptr[fault.row], " values there");
    default:
        fail(op, "bits has one at column ", fault.found, " of row ", fault.row, ", the matrix has ", m.cols,
             " columns");
    }
}

// The struct over the three tensors, once they have passed every check that needs no look at their content.
macko_bitmap matrix_of(const char *op, const Tensor &values, const Tensor &bits, const Tensor &row_ptr, int64_t cols) {
    check_backend(op, "values", values);
    check_device(op, "bits", bits, "values", values);
    check_device(op, "row_ptr", row_ptr, "values", values);
    const macko_dtype dtype = check_value_dtype(op, "values", values);
    check_dtype(op, "bits", bits, ScalarType::Byte);
    check_dtype(op, "row_ptr", row_ptr, ScalarType::Int);
    check_dim(op, "values", values, 1);
    check_dim(op, "bits", bits, 2);
    check_dim(op, "row_ptr", row_ptr, 1);
    if (values.numel() < MACKO_BITMAP_PAD)
        fail(op, "values has ", values.numel(), " elements, expected at least ", int(MACKO_BITMAP_PAD));
    if (row_ptr.numel() < 1) fail(op, "row_ptr is empty, expected rows + 1 entries");
    if (cols < 0 || cols > INT32_LIMIT) fail(op, "cols is ", cols, ", expected 0 to ", INT32_LIMIT);
    const int64_t rows = row_ptr.numel() - 1, row_bytes = macko_bitmap_words(cols) * 8;
    if (bits.size(0) != rows || bits.size(1) != row_bytes)
        fail(op, "bits has shape ", shape_name(bits), ", expected [", rows, ", ", row_bytes, "]");
    check_contiguous(op, "values", values);
    check_contiguous(op, "bits", bits);
    check_contiguous(op, "row_ptr", row_ptr);
    return {values.const_data_ptr(),
            static_cast<const uint8_t *>(bits.const_data_ptr()),
            static_cast<const int32_t *>(row_ptr.const_data_ptr()),
            rows,
            cols,
            values.numel(),
            dtype};
}

constexpr int64_t MAX_STORED = INT32_LIMIT - MACKO_BITMAP_PAD; // row_ptr is int32, values are padded

// Up to how many tokens the rows are multiplied with x as it is. Above, turning x pays (Zen 4, all dtypes and both paths).
constexpr int64_t FEW_TOKENS = 4;

// y [tokens, rows] = x W^T + bias, all checked but the content. Chooses the way by the tokens and the vector path.
void multiply(const char *op, const macko_bitmap &m, const Tensor &x, int64_t tokens, const std::optional<Tensor> &bias,
              Tensor &y) {
    const auto rows = [&](const auto &body) {
        const macko_fault fault = first_fault(m.rows, mean_row(m) * tokens, body);
        if (fault.kind) fail_for(op, fault, m);
    };
    if (tokens <= FEW_TOKENS)
        return rows([&](int64_t begin, int64_t end) {
            return macko_bitmap_spmv_cpu(&m, x.const_data_ptr(), tokens, data_of(bias), begin, end,
                                         y.mutable_data_ptr());
        });
    if (!macko_bitmap_turned_bytes(&m, 1)) { // no vectors here: dense rows for the time of one product
        Tensor flat = torch::stable::view(y, {tokens, m.rows});
        const macko_fault fault = linear_by_blocks(
            torch::stable::view(x, {tokens, m.cols}), m.rows, bias, flat,
            [&](int64_t begin, int64_t end, void *w) { return macko_bitmap_expand_cpu(&m, begin, end, w); });
        if (fault.kind) fail_for(op, fault, m);
        return;
    }
    const int64_t most = std::min<int64_t>(tokens, MACKO_BITMAP_TOKENS);
    const Tensor turned = torch::stable::new_empty(x, {macko_bitmap_turned_bytes(&m, most)}, ScalarType::Byte);
    for (int64_t token = 0; token < tokens; token += MACKO_BITMAP_TOKENS) { // sums and turned x do not grow with them
        const int64_t here = std::min<int64_t>(tokens - token, MACKO_BITMAP_TOKENS);
        const auto *from = static_cast<const char *>(x.const_data_ptr()) + token * m.cols * x.element_size();
        auto *to = static_cast<char *>(y.mutable_data_ptr()) + token * m.rows * x.element_size();
        for_rows(macko_bitmap_words(m.cols), MACKO_BITMAP_WORD * here, [&](int64_t begin, int64_t end) {
            macko_bitmap_turn_cpu(&m, from, here, begin, end, turned.mutable_data_ptr());
        });
        rows([&](int64_t begin, int64_t end) {
            return macko_bitmap_spmm_cpu(&m, turned.const_data_ptr(), here, data_of(bias), begin, end, to);
        });
    }
}

} // namespace

std::tuple<Tensor, Tensor, Tensor> bitmap_pack(const Tensor &values_in, const Tensor &deltas, const Tensor &row_ptr_in,
                                               int64_t cols, int64_t delta_bits) {
    check_backend("bitmap_pack", "values", values_in);
    const macko_matrix m = checked_matrix("bitmap_pack", values_in, deltas, row_ptr_in, cols, delta_bits);
    check_content("bitmap_pack", m, values_in);
    const int64_t entries_per_row = m.rows ? m.capacity / m.rows : 0;
    std::vector<int64_t> counts(m.rows);
    for_rows(m.rows, entries_per_row,
             [&](int64_t begin, int64_t end) { macko_bitmap_count_cpu(&m, begin, end, counts.data()); });
    Tensor row_ptr = torch::stable::new_empty(values_in, {m.rows + 1}, ScalarType::Int);
    auto *pointers = static_cast<int32_t *>(row_ptr.mutable_data_ptr());
    const int64_t stored = sum_counts("bitmap_pack", counts, MAX_STORED, pointers);
    Tensor values = torch::stable::new_empty(values_in, {stored + MACKO_BITMAP_PAD});
    clear_from(values, stored);
    Tensor bits = torch::stable::new_zeros(values_in, {m.rows, macko_bitmap_words(cols) * 8}, ScalarType::Byte);
    for_rows(m.rows, entries_per_row, [&](int64_t begin, int64_t end) {
        macko_bitmap_pack_cpu(&m, begin, end, pointers, values.mutable_data_ptr(),
                              static_cast<uint8_t *>(bits.mutable_data_ptr()));
    });
    return {values, bits, row_ptr};
}

std::tuple<Tensor, Tensor, Tensor> bitmap_to_macko(const Tensor &values_in, const Tensor &bits,
                                                   const Tensor &row_ptr_in, int64_t cols, int64_t delta_bits) {
    if (delta_bits != 2 && delta_bits != 4 && delta_bits != 8)
        fail("bitmap_to_macko", "delta_bits is ", delta_bits, ", expected 2, 4 or 8");
    const macko_bitmap m = matrix_of("bitmap_to_macko", values_in, bits, row_ptr_in, cols);
    const int64_t size = values_in.element_size();
    std::vector<int64_t> counts(m.rows);
    const macko_fault fault = first_fault(m.rows, macko_bitmap_words(cols), [&](int64_t begin, int64_t end) {
        return macko_bitmap_entries_cpu(&m, int(delta_bits), begin, end, counts.data());
    });
    if (fault.kind) fail_for("bitmap_to_macko", fault, m);
    Tensor row_ptr = torch::stable::new_empty(values_in, {m.rows + 1}, ScalarType::Int);
    auto *pointers = static_cast<int32_t *>(row_ptr.mutable_data_ptr());
    const int64_t stored = sum_counts("bitmap_to_macko", counts, MAX_STORED, pointers);
    const int64_t capacity = (stored + MACKO_CHUNK - 1) / MACKO_CHUNK * MACKO_CHUNK;
    Tensor values = torch::stable::new_empty(values_in, {capacity});
    clear_from(values, stored);
    Tensor deltas = torch::stable::new_zeros(values_in, {capacity * delta_bits / 8}, ScalarType::Byte);
    // Row by row from one that is dense and in the cache.
    for_rows(m.rows, cols, [&](int64_t begin, int64_t end) {
        std::vector<char> dense(cols * size);
        for (int64_t row = begin; row < end; row++) {
            macko_bitmap_expand_cpu(&m, row, row + 1, dense.data());
            macko_pack_write_cpu(dense.data(), m.dtype, int(delta_bits), cols, 0, 1, pointers + row,
                                 values.mutable_data_ptr(), static_cast<uint8_t *>(deltas.mutable_data_ptr()));
        }
    });
    return {values, deltas, row_ptr};
}

Tensor bitmap_unpack(const Tensor &values, const Tensor &bits, const Tensor &row_ptr, int64_t cols) {
    const macko_bitmap m = matrix_of("bitmap_unpack", values, bits, row_ptr, cols);
    Tensor w = torch::stable::new_empty(values, {m.rows, m.cols});
    auto *const data = static_cast<char *>(w.mutable_data_ptr());
    const macko_fault fault = first_fault(m.rows, m.cols, [&](int64_t begin, int64_t end) {
        return macko_bitmap_expand_cpu(&m, begin, end, data + begin * m.cols * values.element_size());
    });
    if (fault.kind) fail_for("bitmap_unpack", fault, m);
    return w;
}

Tensor bitmap_check(const Tensor &values, const Tensor &bits, const Tensor &row_ptr, int64_t cols) {
    const macko_bitmap m = matrix_of("bitmap_check", values, bits, row_ptr, cols);
    Tensor found = new_fault(values);
    macko_fault *fault = fault_in(found);
    *fault = first_fault(m.rows, mean_row(m),
                         [&](int64_t begin, int64_t end) { return macko_bitmap_check_cpu(&m, begin, end); });
    if (!fault->kind) *fault = macko_bitmap_check_cpu(&m, m.rows, m.rows);
    return found;
}

Tensor bitmap_spmv(const Tensor &values, const Tensor &bits, const Tensor &row_ptr, int64_t cols, const Tensor &x_any) {
    const macko_bitmap m = matrix_of("bitmap_spmv", values, bits, row_ptr, cols);
    check_vector("bitmap_spmv", x_any, "values", values, cols);
    const Tensor x = as_contiguous(x_any);
    Tensor y = torch::stable::new_empty(values, {m.rows});
    multiply("bitmap_spmv", m, x, 1, std::nullopt, y);
    return y;
}

Tensor bitmap_linear(const Tensor &x_any, const Tensor &values, const Tensor &bits, const Tensor &row_ptr, int64_t cols,
                     const std::optional<Tensor> &bias_any) {
    const macko_bitmap m = matrix_of("bitmap_linear", values, bits, row_ptr, cols);
    check_tokens("bitmap_linear", x_any, "values", values, cols);
    const auto bias = checked_bias("bitmap_linear", bias_any, "values", values, values.scalar_type(), m.rows);
    const int64_t tokens = num_tokens(x_any);
    Tensor y = torch::stable::new_empty(values, with_last(x_any, m.rows));
    const Tensor x = as_contiguous(x_any);
    multiply("bitmap_linear", m, x, tokens, bias, y);
    return y;
}

} // namespace macko
#endif
