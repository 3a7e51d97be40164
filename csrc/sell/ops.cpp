// The sell layout's ops: check, allocate, guard the device, call. For CUDA alone, so the CPU library has hardly anything of it.
#include "../torch/packed.h"
#ifdef USE_CUDA
#include <algorithm>
#include <vector>

#include "../core/device.h"
#include "../core/knobs.h"
#include "../macko/ops.h"
#include "../torch/dense_rows.h"
#include "sell.h"

namespace macko {

extern const Registered sell_layout;

namespace {

constexpr int BLOCK_FIELDS = sizeof(macko_sell_block) / sizeof(int32_t);
static_assert(BLOCK_FIELDS == 8, "blocks is an int32 tensor [num_blocks, 8]");

// The struct over the four tensors, once they have passed every check that needs no look at their content.
macko_sell_matrix matrix_of(const char *op, const Packed &p) {
    const Tensor &data = p[0], &bases = p[1], &blocks = p[2], &perm = p[3];
    const int64_t cols = p.cols(), gap_bits = p.number(0), warps = p.number(1), head = p.number(2);
    const Wanted all[] = {{"data", data, ScalarType::Undefined, 1, 16}, // what a copy and a load take at once
                          {"bases", bases, ScalarType::Short, 1},
                          {"blocks", blocks, ScalarType::Int, 2, 16},
                          {"perm", perm, ScalarType::Int, 2}};
    const macko_dtype dtype = check_kinds(op, all);
    if (gap_bits < MACKO_SELL_MIN_GAP_BITS || gap_bits > MACKO_SELL_MAX_GAP_BITS)
        fail(op, "gap_bits is ", gap_bits, ", expected ", int(MACKO_SELL_MIN_GAP_BITS), " to ",
             int(MACKO_SELL_MAX_GAP_BITS));
    if (warps < 2 || warps % 2 || warps > MACKO_SELL_MAX_WARPS)
        fail(op, "warps is ", warps, ", expected an even number up to ", int(MACKO_SELL_MAX_WARPS));
    if (head < 0 || head > MACKO_SELL_MAX_HEAD)
        fail(op, "head is ", head, ", expected 0 to ", int(MACKO_SELL_MAX_HEAD));
    if (cols < 0 || cols > MACKO_SELL_MAX_COLS)
        fail(op, "cols is ", cols, ", expected 0 to ", int(MACKO_SELL_MAX_COLS));
    check_sizes(op, p);
    if (perm.size(0) != 2 || perm.size(1) != p.rows())
        fail(op, "perm has shape ", shape_name(perm), ", expected [2, ", p.rows(), "]");
    if (blocks.size(1) != BLOCK_FIELDS)
        fail(op, "blocks has shape ", shape_name(blocks), ", expected [blocks, ", BLOCK_FIELDS, "]");
    if (blocks.size(0) < 1 || blocks.size(0) > INT32_LIMIT)
        fail(op, "blocks has shape ", shape_name(blocks), ", expected at least one block");
    const int64_t num_blocks = blocks.size(0), slot_bytes = macko_sell_slot_bytes(int(gap_bits));
    if (data.numel() * 2 % slot_bytes || data.numel() * 2 < num_blocks * warps * head * slot_bytes)
        fail(op, "data has ", data.numel(), " elements, expected whole slots of ", slot_bytes / 2, ", ",
             num_blocks * warps * head, " at least");
    if (!data.numel() && p.number(3) > 0) fail(op, "data is empty, the header counts ", p.number(3), " entries");
    if (bases.numel() % MACKO_SELL_LANES || bases.numel() < num_blocks * warps * MACKO_SELL_LANES)
        fail(op, "bases has ", bases.numel(), " elements, expected a multiple of ", int(MACKO_SELL_LANES), ", ",
             num_blocks * warps * MACKO_SELL_LANES, " at least");
    check_memory(op, all);
    return {reads<uint8_t>(data),
            int(num_blocks),
            int(gap_bits),
            int(warps),
            int(head),
            dtype,
            reads<uint16_t>(bases),
            reads<macko_sell_block>(blocks),
            reads<int32_t>(perm),
            reads<int32_t>(perm) + perm.size(1),
            perm.size(1),
            cols,
            data.numel() * 2 / slot_bytes};
}

// One token, which can be read 16 bytes at a time.
void check_token(const char *op, const char *name, const Tensor &x, const Tensor &data, int64_t cols) {
    check_tokens(op, x, "data", data, cols, name);
    if (num_tokens(x) != 1) fail(op, name, " has shape ", shape_name(x), ", expected one token");
    if (cols % 8) fail(op, "cols is ", cols, ", expected a multiple of 8");
}

macko_path path_of(const macko_sell_matrix &m, int64_t tokens) {
    device_info device{};
    STD_CUDA_CHECK(current_device(&device));
    const int *limit = macko_knob(MACKO_KNOB_STREAM_TOKENS);
    return macko_sell_path(m.rows, m.cols, m.slots * macko_sell_slot_bytes(m.gap_bits), tokens,
                           {.is_gpu = true,
                            .has_bulk = macko_has_bulk_copies(device.major),
                            .has_limit = !!limit,
                            .limit = limit ? *limit : 0});
}

// y of a shape that holds tokens * m.rows elements = x W^T + bias, all checked; of one token also with a norm.
Tensor multiply(macko_path path, const macko_sell_matrix &m, int64_t tokens, const Tensor &x_any,
                const std::optional<Tensor> &bias_any, const std::vector<int64_t> &shape,
                const macko_sell_norm *norm = nullptr) {
    const Tensor x = as_contiguous(x_any);
    Tensor y = new_tensor(x, shape);
    const void *bias = data_of(bias_any);
    const cudaStream_t stream = current_stream(x);
    STD_CUDA_CHECK(path == MACKO_PATH_SPMV
                       ? macko_sell_spmv_cuda(&m, x.const_data_ptr(), norm, bias, y.mutable_data_ptr(), stream)
                       : macko_sell_spmm_cuda(&m, tokens, x.const_data_ptr(), bias, y.mutable_data_ptr(), stream));
    return y;
}

// What unpacks rows on x's stream.
auto unpacking(const macko_sell_matrix &m, const Tensor &x) {
    return [&m, stream = current_stream(x)](int64_t first, int64_t count, void *w) {
        STD_CUDA_CHECK(macko_sell_unpack_cuda(&m, first, count, w, stream));
    };
}

// options: gap_bits, warps, blocks; 0 for what suits the matrix, or this GPU.
Made lay_out(const Packed &canonical, const Ints &options) {
    const char *op = "lay_out";
    const macko_matrix m = checked_matrix(op, canonical);
    const Tensor &values = canonical[0];
    const int64_t cols = m.cols, warps = options[1], num_blocks = options[2];
    int64_t gap_bits = options[0];
    if (gap_bits && (gap_bits < MACKO_SELL_MIN_GAP_BITS || gap_bits > MACKO_SELL_MAX_GAP_BITS))
        fail(op, "gap_bits is ", gap_bits, ", expected ", int(MACKO_SELL_MIN_GAP_BITS), " to ",
             int(MACKO_SELL_MAX_GAP_BITS), ", or 0 to choose the smallest");
    if (warps < 0 || warps % 2 || warps > MACKO_SELL_MAX_WARPS)
        fail(op, "warps is ", warps, ", expected an even number up to ", int(MACKO_SELL_MAX_WARPS), ", or 0 to choose");
    if (num_blocks < 0 || num_blocks > (1 << 20))
        fail(op, "blocks is ", num_blocks, ", expected 1 to ", 1 << 20, ", or 0 to choose");
    if (cols > MACKO_SELL_MAX_COLS)
        fail(op, "cols is ", cols, ", expected at most ", int(MACKO_SELL_MAX_COLS), ": use the macko format");
    const DeviceOf guard(values);
    const cudaStream_t stream = current_stream(values);
    const int64_t rows = m.rows;

    Tensor totals_tensor = torch::stable::new_empty(values, {int64_t(sizeof(macko_sell_totals) / 8)}, ScalarType::Long);
    auto *device_totals = writes<macko_sell_totals>(totals_tensor);
    macko_sell_totals totals;
    const auto read_totals = [&] { totals = read_back<macko_sell_totals>(totals_tensor); }; // sizes of what comes next
    Tensor counts = torch::stable::new_empty(values, {MACKO_SELL_GAP_WIDTHS, rows}, ScalarType::Int);
    auto *counts_data = writes<int32_t>(counts);
    STD_CUDA_CHECK(macko_sell_count_cuda(&m, counts_data, device_totals, stream));
    read_totals();
    if (totals.faults)
        fail(op, totals.faults, " rows point outside of values or of the ", cols, " columns; macko::check says which");
    if (!gap_bits) {
        gap_bits = MACKO_SELL_MIN_GAP_BITS;
        const auto bytes = [&](int64_t width) {
            return totals.stored[width - MACKO_SELL_MIN_GAP_BITS] * macko_sell_slot_bytes(int(width));
        };
        for (int64_t width = MACKO_SELL_MIN_GAP_BITS + 1; width <= MACKO_SELL_MAX_GAP_BITS; width++)
            if (bytes(width) < bytes(gap_bits)) gap_bits = width;
    }
    const int64_t stored = totals.stored[gap_bits - MACKO_SELL_MIN_GAP_BITS];

    macko_sell_device device;
    STD_CUDA_CHECK(macko_sell_device_cuda(&device));
    macko_sell_shape shape = macko_sell_pack_shape(rows, cols, int(gap_bits), device);
    if (warps) {
        shape.warps = int(warps);
        shape.stages = macko_sell_launch_shape(cols, int(gap_bits), shape.warps, device).stages;
    }
    if (num_blocks) shape.num_blocks = int(num_blocks);
    if (!shape.stages)
        fail(op, "a vector of ", cols, " columns does not fit the ", device.shared_per_block,
             " bytes of shared memory of this GPU: use the macko format");
    Tensor perm = torch::stable::new_empty(values, {2, rows}, ScalarType::Int);
    auto *perm_data = writes<int32_t>(perm);
    Tensor starts = torch::stable::new_empty(values, {rows + 1}, ScalarType::Long);
    Tensor line = torch::stable::new_empty(values, {rows}, ScalarType::Long);
    auto *starts_data = writes<int64_t>(starts);
    const int64_t panel_rows = rows_of_panel(rows, cols, 2);
    const auto cut = [&](int64_t range_rows) {
        Tensor blocks = torch::stable::new_empty(values, {shape.num_blocks, BLOCK_FIELDS}, ScalarType::Int);
        STD_CUDA_CHECK(macko_sell_plan_cuda(counts_data + (gap_bits - MACKO_SELL_MIN_GAP_BITS) * rows, rows, range_rows,
                                            panel_rows, shape.warps, shape.num_blocks, perm_data, perm_data + rows,
                                            starts_data, writes<int64_t>(line), writes<macko_sell_block>(blocks),
                                            device_totals, stream));
        read_totals();
        return blocks;
    };
    const int64_t all_rows = std::max<int64_t>(1, rows);
    Tensor blocks = cut(all_rows);
    while (totals.sums > MACKO_SELL_MAX_SUMS) {
        shape.num_blocks *= 2;
        blocks = cut(all_rows);
    }
    // Rows sorted panel by panel: panels then share few blocks, and unpacking one reads hardly any lines of another.
    if (const int64_t most = totals.slots + totals.slots * 3 / 1000; panel_rows < rows) {
        blocks = cut(panel_rows);
        if (totals.slots > most || totals.sums > MACKO_SELL_MAX_SUMS) blocks = cut(all_rows);
    }

    Tensor data = torch::stable::new_empty(values, {totals.slots * macko_sell_slot_bytes(int(gap_bits)) / 2});
    Tensor bases = torch::stable::new_empty(values, {totals.groups * MACKO_SELL_LANES}, ScalarType::Short);
    Tensor scratch = torch::stable::new_empty(values, {2, stored}, ScalarType::Short);
    auto *scratch_data = writes<uint16_t>(scratch);
    Made packed{{data, bases, blocks, perm},
                {sell_layout.number, rows, cols, gap_bits, shape.warps, totals.head, stored, canonical.number(0)}};
    const macko_sell_matrix s = matrix_of(op, packed);
    STD_CUDA_CHECK(macko_sell_write_cuda(&m, &s, starts_data, scratch_data, scratch_data + stored,
                                         writes<uint8_t>(data), writes<uint16_t>(bases), stream));
    // A kernel launched with PDL reads weights before the launch before it has ended: that must not be the one that writes
    // them, hence this launch between the two.
    STD_CUDA_CHECK(cudaMemsetAsync(device_totals, 0, sizeof totals, stream));
    return packed;
}

Tensor dense(const Packed &p, bool) {
    const macko_sell_matrix m = matrix_of("dense", p);
    const DeviceOf guard(p[0]);
    Tensor w = torch::stable::new_empty(p[0], {m.rows, m.cols});
    unpacking(m, w)(0, m.rows, w.mutable_data_ptr());
    return w;
}

Tensor norm_linear(const Packed &p, const Tensor &x_any, const Tensor &weight_any, double eps,
                   const std::optional<Tensor> &bias_any) {
    const char *op = "norm_linear";
    const macko_sell_matrix m = matrix_of(op, p);
    const Tensor &data = p[0];
    const int64_t cols = m.cols;
    check_token(op, "x", x_any, data, cols);
    check_vector(op, weight_any, "data", data, cols, "weight");
    const DeviceOf guard(data);
    const auto bias = checked_bias(op, bias_any, "data", data, data.scalar_type(), m.rows);
    const Tensor weight = as_aligned(weight_any);
    const macko_sell_norm norm = {weight.const_data_ptr(), float(eps)};
    return multiply(MACKO_PATH_SPMV, m, 1, as_aligned(x_any), bias, with_last(x_any, m.rows), &norm);
}

Tensor linear(const Packed &p, const Tensor &x_any, const std::optional<Tensor> &bias_any) {
    const char *op = "linear";
    const macko_sell_matrix m = matrix_of(op, p);
    const Tensor &data = p[0];
    check_tokens(op, x_any, "data", data, m.cols);
    const DeviceOf guard(data);
    const auto bias = checked_bias(op, bias_any, "data", data, data.scalar_type(), m.rows);
    const int64_t tokens = num_tokens(x_any);
    const macko_path path = path_of(m, tokens);
    if (path != MACKO_PATH_DENSE_ROWS) return multiply(path, m, tokens, x_any, bias, with_last(x_any, m.rows));
    return linear_by_dense_rows(x_any, {&m.rows, 1}, bias, unpacking(m, x_any))[0];
}

std::vector<Tensor> linear_parts(const Packed &p, const Tensor &x, const Ints &part_rows) {
    const char *op = "linear_parts";
    const macko_sell_matrix m = matrix_of(op, p);
    const Tensor &data = p[0];
    check_tokens(op, x, "data", data, m.cols);
    check_parts(op, part_rows, m.rows);
    const DeviceOf guard(data);
    return linear_by_dense_rows(x, part_rows, std::nullopt, unpacking(m, x));
}

} // namespace

const Registered sell_layout({.name = "sell",
                              .number = 2,
                              .tensors = 4,
                              .numbers = 5,
                              .lay_out_options = 3,
                              .lay_out = lay_out,
                              .dense = dense,
                              .linear = linear,
                              .linear_parts = linear_parts,
                              .norm_linear = norm_linear});

} // namespace macko
#else
namespace macko {
const Registered sell_layout({.name = "sell",
                              .number = 2,
                              .tensors = 4,
                              .numbers = 5,
                              .instead = "is for a GPU, on the CPU use the format macko or bitmap"});
}
#endif
