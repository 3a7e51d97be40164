// The macko format's ops: check, allocate, guard the device, call. Compiled once for the CPU and once for CUDA.
#include "ops.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "macko.h"
#ifdef USE_CUDA
#include "../torch/dense_rows.h"
#else
#include "../torch/rows.h"
#endif

namespace macko {
namespace {

constexpr int64_t MAX_STORED = INT32_LIMIT / MACKO_CHUNK * MACKO_CHUNK; // row_ptr is int32

#ifndef USE_CUDA
template <typename Body>
macko_fault first_fault_of(const macko_matrix &m, const Body &body) {
    return first_fault(m.rows, m.rows ? m.capacity / m.rows : 0, body);
}
#endif

[[noreturn]] void fail_for(const char *op, const macko_fault &fault, const macko_matrix &m) {
    switch (fault.kind) {
    case MACKO_ROW_PTR_START: fail(op, "row_ptr[0] is ", fault.found, ", expected 0");
    case MACKO_ROW_PTR_FALLS: fail(op, "row_ptr falls to ", fault.found, " at index ", fault.row);
    case MACKO_ROW_PTR_END:
        fail(op, "row_ptr[", fault.row, "] is ", fault.found, ", values has ", m.capacity, " entries");
    default:
        fail(op, "deltas put entry ", fault.entry, " of row ", fault.row, " at column ", fault.found,
             ", the matrix has ", m.cols, " columns");
    }
}

int64_t round_up_to_chunk(int64_t stored) {
    return (stored + MACKO_CHUNK - 1) / MACKO_CHUNK * MACKO_CHUNK;
}

// Which of the widths of deltas takes the fewest bytes, given how many entries each stores; the first where they tie.
int64_t smallest_width(const int64_t *stored, const std::vector<int> &widths, int64_t value_bytes) {
    int64_t best = 0;
    const auto bits = [&](int64_t i) { return round_up_to_chunk(stored[i]) * (value_bytes * 8 + widths[i]); };
    for (int64_t i = 1; i < int64_t(widths.size()); i++)
        if (bits(i) < bits(best)) best = i;
    if (stored[best] > MAX_STORED)
        fail("pack", "w needs ", stored[best], " stored entries, row_ptr is int32 and holds at most ", MAX_STORED);
    return best;
}

// y [tokens, rows] = x W^T + bias, token by token, all checked but the content.
void spmv_into(const char *op, const macko_matrix &m, int64_t tokens, const Tensor &x, const void *bias, Tensor &y) {
    for (int64_t token = 0; token < tokens; token++) {
        const auto *from = reads<char>(x) + token * m.cols * x.element_size();
        auto *to = writes<char>(y) + token * m.rows * x.element_size();
#ifdef USE_CUDA
        (void)op;
        STD_CUDA_CHECK(macko_spmv_cuda(&m, from, bias, to, current_stream(x)));
#else
        const macko_fault fault = first_fault_of(
            m, [&](int64_t begin, int64_t end) { return macko_spmv_cpu(&m, from, bias, begin, end, to); });
        if (fault.kind) fail_for(op, fault, m);
#endif
    }
}

macko_path path_of(const macko_matrix &m, int64_t tokens) {
#ifdef USE_CUDA
    constexpr bool is_gpu = true;
#else
    constexpr bool is_gpu = false;
#endif
    return macko_canonical_path(m.dtype, m.rows, m.cols, m.capacity, tokens, {.is_gpu = is_gpu});
}

Made pack(const Tensor &w_any, const Ints &options) {
    const int64_t delta_bits = options[0]; // 0: the width of fewest bytes
    if (delta_bits) check_delta_bits("pack", delta_bits);
    check_backend("pack", "w", w_any);
    const macko_dtype dtype = check_value_dtype("pack", "w", w_any);
    check_dim("pack", "w", w_any, 2);
    const int64_t rows = w_any.size(0), cols = w_any.size(1);
    if (rows >= INT32_LIMIT || cols > INT32_LIMIT)
        fail("pack", "w has shape ", shape_name(w_any), ", expected at most 2^31 - 1 rows and columns");
    const DeviceOf guard(w_any);
    const Tensor w = as_contiguous(w_any);
    const std::vector<int> widths = delta_bits ? std::vector<int>{int(delta_bits)} : std::vector<int>{4, 2, 8};
    const int64_t num_widths = int64_t(widths.size());
#ifdef USE_CUDA
    (void)dtype;
    const cudaStream_t stream = current_stream(w);
    Tensor counts = torch::stable::new_empty(w, {num_widths, rows + 1}, ScalarType::Long);
    // The device writes the totals to the host's memory: no copy to wait for.
    const torch::stable::Device host(torch::headeronly::DeviceType::CPU);
    Tensor totals = torch::stable::empty({num_widths}, ScalarType::Long, std::nullopt, host, /*pin_memory=*/true);
    auto *row_ptr64 = writes<int64_t>(counts);
    auto *stored = writes<int64_t>(totals);
    STD_CUDA_CHECK(macko_pack_count_cuda(w.const_data_ptr(), int(delta_bits), rows, cols, row_ptr64, stored, stream));
    Tensor row_ptr = torch::stable::new_empty(w, {rows + 1}, ScalarType::Int); // while the device counts
    STD_CUDA_CHECK(cudaStreamSynchronize(stream));                             // the size of what is allocated next
    const int64_t best = smallest_width(stored, widths, w.element_size());
    const int64_t capacity = round_up_to_chunk(stored[best]);
    Tensor values = torch::stable::new_empty(w, {capacity});
    Tensor deltas = torch::stable::new_empty(w, {capacity * widths[best] / 8}, ScalarType::Byte);
    STD_CUDA_CHECK(macko_pack_write_cuda(w.const_data_ptr(), widths[best], rows, cols, row_ptr64 + best * (rows + 1),
                                         capacity, writes<int32_t>(row_ptr), values.mutable_data_ptr(),
                                         writes<uint8_t>(deltas), stream));
#else
    std::vector<std::vector<int64_t>> counts(num_widths, std::vector<int64_t>(rows));
    std::vector<int64_t> stored;
    for_rows(rows, cols * num_widths, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) // a row stays in the cache for all widths
            for (int64_t i = 0; i < num_widths; i++)
                macko_pack_count_cpu(w.const_data_ptr(), dtype, widths[i], cols, row, row + 1, counts[i].data());
    });
    for (const auto &count : counts) stored.push_back(std::accumulate(count.begin(), count.end(), int64_t(0)));
    const int64_t best = smallest_width(stored.data(), widths, w.element_size());
    const int64_t capacity = round_up_to_chunk(stored[best]);
    Tensor row_ptr = torch::stable::new_empty(w, {rows + 1}, ScalarType::Int);
    auto *pointers = writes<int32_t>(row_ptr);
    sum_counts("pack", counts[best], MAX_STORED, pointers);
    Tensor values = torch::stable::new_empty(w, {capacity});
    Tensor deltas = torch::stable::new_zeros(w, {capacity * widths[best] / 8}, ScalarType::Byte);
    clear_from(values, stored[best]);
    for_rows(rows, cols, [&](int64_t begin, int64_t end) {
        macko_pack_write_cpu(w.const_data_ptr(), dtype, widths[best], cols, begin, end, pointers,
                             values.mutable_data_ptr(), writes<uint8_t>(deltas));
    });
#endif
    return {{values, deltas, row_ptr}, {canonical_layout.number, rows, cols, widths[best]}};
}

Tensor dense(const Packed &p, bool check) {
    const char *op = "dense";
    const macko_matrix m = checked_matrix(op, p);
    const Tensor &values = p[0];
    const DeviceOf guard(values);
#ifdef USE_CUDA
    if (check) check_content(op, m, values); // else faults become NaN
    Tensor w = torch::stable::new_empty(values, {m.rows, m.cols});
    STD_CUDA_CHECK(macko_unpack_cuda(&m, w.mutable_data_ptr(), current_stream(values)));
#else
    (void)check; // nobody waits for it here
    Tensor w = torch::stable::new_empty(values, {m.rows, m.cols});
    auto *const data = writes<char>(w);
    const macko_fault fault = first_fault(m.rows, m.cols, [&](int64_t begin, int64_t end) {
        return macko_unpack_cpu(&m, begin, end, data + begin * m.cols * values.element_size());
    });
    if (fault.kind) fail_for(op, fault, m);
#endif
    return w;
}

Tensor check(const Packed &p) {
    const macko_matrix m = checked_matrix("check", p);
    const DeviceOf guard(p[0]);
    Tensor found = new_fault(p[0]);
    macko_fault *fault = fault_in(found);
#ifdef USE_CUDA
    STD_CUDA_CHECK(macko_check_cuda(&m, 0, fault, current_stream(p[0])));
#else
    *fault = first_fault_of(m, [&](int64_t begin, int64_t end) { return macko_check_cpu(&m, begin, end); });
    if (!fault->kind) *fault = macko_check_cpu(&m, m.rows, m.rows);
#endif
    return found;
}

Tensor linear(const Packed &p, const Tensor &x_any, const std::optional<Tensor> &bias_any) {
    const macko_matrix m = checked_matrix("linear", p);
    const Tensor &values = p[0];
    check_tokens("linear", x_any, "values", values, m.cols);
    const auto bias = checked_bias("linear", bias_any, "values", values, values.scalar_type(), m.rows);
    const DeviceOf guard(values);
    const int64_t tokens = num_tokens(x_any);
    const auto shape = with_last(x_any, m.rows);
    if (path_of(m, tokens) == MACKO_PATH_SPMV) {
        const Tensor x = as_contiguous(x_any);
        Tensor y = new_tensor(values, shape);
        spmv_into("linear", m, tokens, x, data_of(bias), y);
        return y;
    }
#ifdef USE_CUDA
    // More tokens: dense rows for the time of one product, as many as the workspace holds. They cost a read and a write.
    const auto unpack = [&](int64_t first, int64_t count, void *w) {
        macko_matrix part = m;
        part.row_ptr += first;
        part.rows = count;
        STD_CUDA_CHECK(macko_unpack_cuda(&part, w, current_stream(values)));
    };
    return linear_by_dense_rows(x_any, {&m.rows, 1}, bias, unpack)[0];
#else
    const Tensor x = as_tokens(x_any);
    Tensor y = new_tensor(values, {tokens, m.rows});
    const macko_fault fault = linear_by_blocks(
        x, m.rows, bias, y, [&](int64_t begin, int64_t end, void *w) { return macko_unpack_cpu(&m, begin, end, w); });
    if (fault.kind) fail_for("linear", fault, m);
    return torch::stable::reshape(y, shape);
#endif
}

} // namespace

Tensor spmv(const Tensor &values, const Tensor &deltas, const Tensor &row_ptr, int64_t cols, const Tensor &x_any,
            int64_t delta_bits) {
    const Tensor tensors[] = {values, deltas, row_ptr};
    const int64_t header[] = {canonical_layout.number, std::max<int64_t>(0, row_ptr.numel() - 1), cols, delta_bits};
    const macko_matrix m = checked_matrix("spmv", {tensors, header});
    check_vector("spmv", x_any, "values", values, cols);
    const DeviceOf guard(values);
    const Tensor x = as_contiguous(x_any);
    Tensor y = new_tensor(values, {m.rows});
    spmv_into("spmv", m, 1, x, nullptr, y);
    return y;
}

void check_delta_bits(const char *op, int64_t delta_bits) {
    if (delta_bits != 2 && delta_bits != 4 && delta_bits != 8)
        fail(op, "delta_bits is ", delta_bits, ", expected 2, 4 or 8");
}

macko_matrix checked_matrix(const char *op, const Packed &p) {
    const Tensor &values = p[0], &deltas = p[1], &row_ptr = p[2];
    const int64_t cols = p.cols(), delta_bits = p.number(0);
    check_delta_bits(op, delta_bits);
    // As aligned as what a thread loads at once: a chunk's values, and its deltas.
    const Wanted all[] = {{"values", values, ScalarType::Undefined, 1, on_cuda(16)},
                          {"deltas", deltas, ScalarType::Byte, 1, on_cuda(delta_bits)},
                          {"row_ptr", row_ptr, ScalarType::Int, 1}};
    const macko_dtype dtype = check_kinds(op, all);
    const int64_t capacity = values.numel();
    if (capacity % MACKO_CHUNK) fail(op, "values has ", capacity, " entries, expected a multiple of ", MACKO_CHUNK);
    if (deltas.numel() * 8 != capacity * delta_bits)
        fail(op, "deltas has ", deltas.numel(), " bytes, expected ", capacity * delta_bits / 8, " for ", capacity,
             " values");
    check_sizes(op, p);
    check_row_ptr(op, row_ptr, p.rows());
    check_memory(op, all);
    return {values.const_data_ptr(), reads<uint8_t>(deltas), reads<int32_t>(row_ptr), p.rows(), cols, capacity, dtype,
            int(delta_bits)};
}

void check_content(const char *op, const macko_matrix &m, const Tensor &values) {
#ifdef USE_CUDA
    // A captured stream may not be waited for: there a corrupted row becomes NaN, as in spmv.
    cudaStreamCaptureStatus capturing;
    STD_CUDA_CHECK(cudaStreamIsCapturing(current_stream(values), &capturing));
    if (capturing != cudaStreamCaptureStatusNone) return;
    Tensor found = new_fault(values);
    STD_CUDA_CHECK(macko_check_cuda(&m, 1, fault_in(found), current_stream(values)));
    const auto fault = read_back<macko_fault>(found);
#else
    (void)values;
    const macko_fault fault =
        first_fault_of(m, [&](int64_t begin, int64_t end) { return macko_check_bounds_cpu(&m, begin, end); });
#endif
    if (fault.kind) fail_for(op, fault, m);
}

const Registered canonical_layout({.name = "macko",
                                   .number = 0,
                                   .tensors = 3,
                                   .numbers = 1,
                                   .pack_options = 1,
                                   .pack = pack,
                                   .dense = dense,
                                   .check = check,
                                   .linear = linear});

} // namespace macko
