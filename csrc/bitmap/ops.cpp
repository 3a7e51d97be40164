// The bitmap layout's ops: check, allocate, call. For the CPU alone, so the CUDA library has hardly anything of this file.
#ifdef USE_CUDA
#include "../torch/packed.h"
namespace macko {
const Registered bitmap_layout({.name = "bitmap",
                                .number = 1,
                                .tensors = 3,
                                .numbers = 1,
                                .instead = "is for the CPU, on a GPU use the format macko, sell or tile"});
}
#else
#include <algorithm>
#include <vector>

#include "../core/cpu.h"
#include "../macko/ops.h"
#include "../torch/rows.h"
#include "bitmap.h"

namespace macko {

extern const Registered bitmap_layout;

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
macko_bitmap matrix_of(const char *op, const Packed &p) {
    const Tensor &values = p[0], &bits = p[1], &row_ptr = p[2];
    const Wanted all[] = {{"values", values, ScalarType::Undefined, 1},
                          {"bits", bits, ScalarType::Byte, 2},
                          {"row_ptr", row_ptr, ScalarType::Int, 1}};
    const macko_dtype dtype = check_kinds(op, all);
    if (values.numel() < MACKO_BITMAP_PAD)
        fail(op, "values has ", values.numel(), " elements, expected at least ", int(MACKO_BITMAP_PAD));
    check_sizes(op, p);
    const int64_t rows = p.rows(), cols = p.cols(), row_bytes = macko_bitmap_words(cols) * 8;
    check_row_ptr(op, row_ptr, rows);
    if (bits.size(0) != rows || bits.size(1) != row_bytes)
        fail(op, "bits has shape ", shape_name(bits), ", expected [", rows, ", ", row_bytes, "]");
    check_memory(op, all);
    return {values.const_data_ptr(), reads<uint8_t>(bits), reads<int32_t>(row_ptr), rows, cols, values.numel(), dtype};
}

constexpr int64_t MAX_STORED = INT32_LIMIT - MACKO_BITMAP_PAD; // row_ptr is int32, values are padded

// y [tokens, rows] = x W^T + bias, all checked but the content.
void multiply(const char *op, const macko_bitmap &m, const Tensor &x, int64_t tokens, const std::optional<Tensor> &bias,
              Tensor &y) {
    const auto rows = [&](const auto &body) {
        const macko_fault fault = first_fault(m.rows, mean_row(m) * tokens, body);
        if (fault.kind) fail_for(op, fault, m);
    };
    const macko_path path = macko_bitmap_path(m.cols, tokens, {.has_vectors = macko_best_cpu_path() != MACKO_SCALAR});
    if (path == MACKO_PATH_SPMV)
        return rows([&](int64_t begin, int64_t end) {
            return macko_bitmap_spmv_cpu(&m, x.const_data_ptr(), tokens, data_of(bias), begin, end,
                                         y.mutable_data_ptr());
        });
    if (path == MACKO_PATH_DENSE_ROWS) { // no vectors here: dense rows for the time of one product
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
        const auto *from = reads<char>(x) + token * m.cols * x.element_size();
        auto *to = writes<char>(y) + token * m.rows * x.element_size();
        for_rows(macko_bitmap_words(m.cols), MACKO_BITMAP_WORD * here, [&](int64_t begin, int64_t end) {
            macko_bitmap_turn_cpu(&m, from, here, begin, end, turned.mutable_data_ptr());
        });
        rows([&](int64_t begin, int64_t end) {
            return macko_bitmap_spmm_cpu(&m, turned.const_data_ptr(), here, data_of(bias), begin, end, to);
        });
    }
}

Made lay_out(const Packed &canonical, const Ints &) {
    const char *op = "lay_out";
    const macko_matrix m = checked_matrix(op, canonical);
    const Tensor &values_in = canonical[0];
    check_content(op, m, values_in);
    const int64_t entries_per_row = m.rows ? m.capacity / m.rows : 0;
    std::vector<int64_t> counts(m.rows);
    for_rows(m.rows, entries_per_row,
             [&](int64_t begin, int64_t end) { macko_bitmap_count_cpu(&m, begin, end, counts.data()); });
    Tensor row_ptr = torch::stable::new_empty(values_in, {m.rows + 1}, ScalarType::Int);
    auto *pointers = writes<int32_t>(row_ptr);
    const int64_t stored = sum_counts(op, counts, MAX_STORED, pointers);
    Tensor values = torch::stable::new_empty(values_in, {stored + MACKO_BITMAP_PAD});
    clear_from(values, stored);
    Tensor bits = torch::stable::new_zeros(values_in, {m.rows, macko_bitmap_words(m.cols) * 8}, ScalarType::Byte);
    for_rows(m.rows, entries_per_row, [&](int64_t begin, int64_t end) {
        macko_bitmap_pack_cpu(&m, begin, end, pointers, values.mutable_data_ptr(), writes<uint8_t>(bits));
    });
    return {{values, bits, row_ptr}, {bitmap_layout.number, m.rows, m.cols, canonical.number(0)}};
}

Made to_canonical(const Packed &p) {
    const char *op = "lay_out";
    const Tensor &values_in = p[0];
    const int64_t delta_bits = p.number(0);
    check_delta_bits(op, delta_bits);
    const macko_bitmap m = matrix_of(op, p);
    const int64_t size = values_in.element_size();
    std::vector<int64_t> counts(m.rows);
    const macko_fault fault = first_fault(m.rows, macko_bitmap_words(m.cols), [&](int64_t begin, int64_t end) {
        return macko_bitmap_entries_cpu(&m, int(delta_bits), begin, end, counts.data());
    });
    if (fault.kind) fail_for(op, fault, m);
    Tensor row_ptr = torch::stable::new_empty(values_in, {m.rows + 1}, ScalarType::Int);
    auto *pointers = writes<int32_t>(row_ptr);
    const int64_t stored = sum_counts(op, counts, MAX_STORED, pointers);
    const int64_t capacity = (stored + MACKO_CHUNK - 1) / MACKO_CHUNK * MACKO_CHUNK;
    Tensor values = torch::stable::new_empty(values_in, {capacity});
    clear_from(values, stored);
    Tensor deltas = torch::stable::new_zeros(values_in, {capacity * delta_bits / 8}, ScalarType::Byte);
    // Row by row from one that is dense and in the cache.
    for_rows(m.rows, m.cols, [&](int64_t begin, int64_t end) {
        std::vector<char> dense(m.cols * size);
        for (int64_t row = begin; row < end; row++) {
            macko_bitmap_expand_cpu(&m, row, row + 1, dense.data());
            macko_pack_write_cpu(dense.data(), m.dtype, int(delta_bits), m.cols, 0, 1, pointers + row,
                                 values.mutable_data_ptr(), writes<uint8_t>(deltas));
        }
    });
    return {{values, deltas, row_ptr}, {canonical_layout.number, m.rows, m.cols, delta_bits}};
}

Tensor dense(const Packed &p, bool) { // nobody waits for a look at the content here
    const macko_bitmap m = matrix_of("dense", p);
    const Tensor &values = p[0];
    Tensor w = torch::stable::new_empty(values, {m.rows, m.cols});
    auto *const data = writes<char>(w);
    const macko_fault fault = first_fault(m.rows, m.cols, [&](int64_t begin, int64_t end) {
        return macko_bitmap_expand_cpu(&m, begin, end, data + begin * m.cols * values.element_size());
    });
    if (fault.kind) fail_for("dense", fault, m);
    return w;
}

Tensor check(const Packed &p) {
    const macko_bitmap m = matrix_of("check", p);
    Tensor found = new_fault(p[0]);
    macko_fault *fault = fault_in(found);
    *fault = first_fault(m.rows, mean_row(m),
                         [&](int64_t begin, int64_t end) { return macko_bitmap_check_cpu(&m, begin, end); });
    if (!fault->kind) *fault = macko_bitmap_check_cpu(&m, m.rows, m.rows);
    return found;
}

Tensor linear(const Packed &p, const Tensor &x_any, const std::optional<Tensor> &bias_any) {
    const char *op = "linear";
    const macko_bitmap m = matrix_of(op, p);
    const Tensor &values = p[0];
    check_tokens(op, x_any, "values", values, m.cols);
    const auto bias = checked_bias(op, bias_any, "values", values, values.scalar_type(), m.rows);
    const int64_t tokens = num_tokens(x_any);
    Tensor y = new_tensor(values, with_last(x_any, m.rows));
    const Tensor x = as_contiguous(x_any);
    multiply(op, m, x, tokens, bias, y);
    return y;
}

} // namespace

const Registered bitmap_layout({.name = "bitmap",
                                .number = 1,
                                .tensors = 3,
                                .numbers = 1,
                                .lay_out = lay_out,
                                .to_canonical = to_canonical,
                                .dense = dense,
                                .check = check,
                                .linear = linear});

} // namespace macko
#endif
