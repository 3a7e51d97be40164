// The planes12 format's ops: check, allocate, guard the device, call. Compiled once for the CPU and once for CUDA, where a
// weight is only read: files are written by the CPU.
#include <array>
#include <vector>

#include "../slab/pack.h"
#include "planes12.h"
#ifndef USE_CUDA
#include "../torch/rows.h"
#endif

namespace macko {

extern const Registered planes12_layout;

namespace {

constexpr size_t TABLE_BYTES = 8;

// The struct over the six tensors, once they have passed every check that needs no look at their content.
macko_planes12 matrix_of(const char *op, const Packed &p) {
    const Wanted all[] = {{"low", p[0], ScalarType::Byte, 2},       {"high", p[1], ScalarType::Byte, 2},
                          {"table", p[2], ScalarType::Byte, 1},     {"row_ptr", p[3], ScalarType::Int, 1, 4},
                          {"columns", p[4], ScalarType::Int, 1, 4}, {"values", p[5], ScalarType::Short, 1, 2}};
    check_backend(op, "low", p[0]);
    for (const Wanted &w : all) check_device(op, w.name, w.t, "low", p[0]);
    for (const Wanted &w : all) check_dtype(op, w.name, w.t, w.dtype);
    for (const Wanted &w : all) check_dim(op, w.name, w.t, w.dim);
    check_sizes(op, p);
    const int64_t rows = p.rows(), cols = p.cols(), source = p.number(0), listed = p[4].numel();
    if (source != MACKO_F16 && source != MACKO_BF16) fail(op, "source is ", source, ", expected 0 or 1");
    const auto check_shape = [&](const Wanted &w, int64_t wanted_cols) {
        if (w.t.size(0) != rows || w.t.size(1) != wanted_cols)
            fail(op, w.name, " has shape ", shape_name(w.t), ", expected [", rows, ", ", wanted_cols, "]");
    };
    check_shape(all[0], cols);
    check_shape(all[1], macko_planes12_high_bytes(cols));
    if (p[2].numel() != int64_t(TABLE_BYTES)) fail(op, "table has ", p[2].numel(), " bytes, expected ", TABLE_BYTES);
    check_row_ptr(op, p[3], rows);
    if (p[5].numel() != listed) fail(op, "values has ", p[5].numel(), " elements, columns has ", listed);
    check_memory(op, all);
    return {.low = reads<uint8_t>(p[0]),
            .high = reads<uint8_t>(p[1]),
            .table = reads<uint8_t>(p[2]),
            .row_ptr = reads<int32_t>(p[3]),
            .columns = reads<int32_t>(p[4]),
            .values = reinterpret_cast<const uint16_t *>(reads<int16_t>(p[5])),
            .rows = rows,
            .cols = cols,
            .listed = listed,
            .dtype = macko_dtype(source)};
}

#ifdef USE_CUDA
// A flag that kernels set.
Tensor new_flag(const Tensor &like) {
    return torch::stable::new_zeros(like, {1}, ScalarType::Long);
}
#else
Made pack(const Tensor &w_any, const Ints &) {
    const char *op = "pack";
    check_backend(op, "w", w_any);
    macko_planes12 m{.dtype = check_bfloat16(op, "w", w_any, "planes12")};
    check_extents(op, w_any);
    const Tensor w = as_contiguous(w_any);
    const auto *const from = reads<uint16_t>(w);
    m.rows = w.size(0);
    m.cols = w.size(1);
    Sums<std::array<int64_t, 128>> counts(w);
    for_rows(m.rows, m.cols, [&](int64_t begin, int64_t end) {
        counts.add([&](auto *here) { macko_planes12_histogram_cpu(&m, from, begin, end, here->data()); });
    });
    uint32_t words[2];
    macko_slab_table(counts.get().data(), 128, words);
    const auto made = [&](std::vector<int64_t> sizes, ScalarType type) {
        return torch::stable::new_empty(w, sizes, type);
    };
    Tensor table = made({int64_t(TABLE_BYTES)}, ScalarType::Byte), row_ptr = made({m.rows + 1}, ScalarType::Int);
    for (size_t code = 0; code < TABLE_BYTES; code++)
        writes<uint8_t>(table)[code] = uint8_t(words[code / 4] >> 8 * (code % 4));
    m.table = reads<uint8_t>(table);
    std::vector<int64_t> listed(m.rows);
    for_rows(m.rows, m.cols,
             [&](int64_t begin, int64_t end) { macko_planes12_count_cpu(&m, from, begin, end, listed.data()); });
    m.listed = sum_counts(op, listed, INT32_LIMIT, writes<int32_t>(row_ptr));
    m.row_ptr = reads<int32_t>(row_ptr);
    Tensor low = made({m.rows, m.cols}, ScalarType::Byte);
    Tensor high = made({m.rows, macko_planes12_high_bytes(m.cols)}, ScalarType::Byte);
    Tensor columns = made({m.listed}, ScalarType::Int), values = made({m.listed}, ScalarType::Short);
    for_rows(m.rows, m.cols, [&](int64_t begin, int64_t end) {
        macko_planes12_write_cpu(&m, from, begin, end, writes<uint8_t>(low), writes<uint8_t>(high),
                                 writes<int32_t>(columns), reinterpret_cast<uint16_t *>(writes<int16_t>(values)));
    });
    return {{low, high, table, row_ptr, columns, values}, {planes12_layout.number, m.rows, m.cols, m.dtype}};
}

#endif

// The list is looked at on the way.
Tensor dense(const Packed &p, [[maybe_unused]] bool check) {
    const macko_planes12 m = matrix_of("dense", p);
    const DeviceOf guard(p[0]);
    Tensor w = torch::stable::new_empty(p[0], {m.rows, m.cols},
                                        m.dtype == MACKO_F16 ? ScalarType::Half : ScalarType::BFloat16);
#ifdef USE_CUDA
    Tensor broken = new_flag(w);
    STD_CUDA_CHECK(macko_planes12_unpack_cuda(&m, writes<uint16_t>(w), writes<int64_t>(broken), current_stream(w)));
    if (check && read_back<int64_t>(broken)) fail("dense", "row_ptr or columns point outside of the matrix");
#else
    const macko_fault fault = first_fault(m.rows, m.cols, [&](int64_t begin, int64_t end) {
        return macko_planes12_unpack_cpu(&m, begin, end, writes<uint16_t>(w));
    });
    if (fault.kind == MACKO_PLANES12_ROW_PTR)
        fail("dense", "row_ptr[", fault.row, "] is ", fault.found, ", expected never to fall and at most ", m.listed);
    if (fault.kind)
        fail("dense", "columns[", fault.entry, "] is ", fault.found, ", the matrix has ", m.cols, " columns");
#endif
    return w;
}

Tensor check(const Packed &p) {
    const macko_planes12 m = matrix_of("check", p);
#ifdef USE_CUDA
    const DeviceOf guard(p[0]);
    Tensor broken = new_flag(p[0]);
    STD_CUDA_CHECK(macko_planes12_check_cuda(&m, writes<int64_t>(broken), current_stream(p[0])));
    if (read_back<int64_t>(broken)) return check_on_cpu(p); // which says what is wrong, and where
    return torch::stable::new_zeros(p[0], {int64_t(sizeof(macko_fault) / 8)}, ScalarType::Long);
#else
    Tensor found = new_fault(p[3]);
    macko_fault *const fault = fault_in(found);
    *fault = macko_planes12_check_cpu(&m, 0, 0);
    const macko_fault of_rows =
        first_fault(fault->kind ? 0 : m.rows, m.rows ? m.listed / m.rows : 0,
                    [&](int64_t begin, int64_t end) { return macko_planes12_check_cpu(&m, begin, end); });
    if (of_rows.kind) *fault = of_rows;
    return found;
#endif
}

} // namespace

const Registered planes12_layout({.name = "planes12",
                                  .number = 10,
                                  .tensors = 6,
                                  .numbers = 1,
                                  .instead = "is for files: materialized() gives what is multiplied",
#ifndef USE_CUDA
                                  .pack = pack,
#endif
                                  .dense = dense,
                                  .check = check});

} // namespace macko
