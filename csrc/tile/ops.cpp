// The tile layout's ops: check, allocate, guard the device, call. Compiled once for the CPU and once for CUDA.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../macko/ops.h"
#include "products.h"

namespace macko {
namespace {

macko_dtype check_half(const char *op, const char *name, const Tensor &t) {
    const macko_dtype dtype = check_value_dtype(op, name, t);
    if (dtype == MACKO_F32) fail(op, name, " has dtype float32, expected float16 or bfloat16");
    return dtype;
}

// The struct over the two tensors, once they have passed every check that needs no look at their content.
macko_tile_matrix matrix_of(const char *op, const Packed &p) {
    const Tensor &data = p[0], &offsets = p[1];
    const int64_t rows = p.rows(), cols = p.cols(), widest = p.own(0);
    const Wanted all[] = {{"data", data, ScalarType::Undefined, 1, 16}, {"offsets", offsets, ScalarType::Int, 1}};
    const macko_dtype dtype = check_kinds(op, all);
    check_half(op, "data", data);
    check_sizes(op, p);
    const int64_t slabs = macko_tile_count(rows, cols);
    if (offsets.numel() != slabs + 1)
        fail(op, "offsets has ", offsets.numel(), " elements, expected ", slabs + 1, " for a matrix of ", rows, " x ",
             cols);
    if (data.numel() * 2 % MACKO_TILE_UNIT || data.numel() * 2 < slabs * macko_tile_units(0) * MACKO_TILE_UNIT)
        fail(op, "data has ", data.numel(), " elements, expected a multiple of ", MACKO_TILE_UNIT / 2, ", at least ",
             slabs * macko_tile_units(0) * MACKO_TILE_UNIT / 2);
    const int least = slabs ? macko_tile_units(0) : 0, most = slabs ? macko_tile_units(MACKO_TILE_MOST_ROWS) : 0;
    if (widest < least || widest > most) fail(op, "widest is ", widest, ", expected ", least, " to ", most);
    check_memory(op, all);
    return {static_cast<const uint8_t *>(data.const_data_ptr()),
            static_cast<const int32_t *>(offsets.const_data_ptr()),
            rows,
            cols,
            int32_t(widest),
            dtype,
            data.numel() * 2 / MACKO_TILE_UNIT,
            true};
}

// The matrix's rows from the row block of `first` on: the offsets of its slabs are those of a whole one.
macko_tile_matrix piece_of(macko_tile_matrix m, int64_t first, int64_t rows) {
    m.offsets += first / MACKO_TILE_ROWS * macko_tile_slabs(m.cols);
    m.units = m.units * macko_tile_row_blocks(rows) / std::max<int64_t>(1, macko_tile_row_blocks(m.rows));
    m.rows = rows;
    m.whole = false;
    return m;
}

// For what tile's slabs have in common (products.h).
struct Tile {
    using Matrix = macko_tile_matrix;
    static constexpr macko_layout_id layout = MACKO_LAYOUT_TILE;
    static constexpr auto matrix_of = macko::matrix_of;
    static constexpr auto piece_of = macko::piece_of;
#ifdef USE_CUDA
    static constexpr auto unpack = macko_tile_unpack_cuda;
    static constexpr auto few = macko_tile_few_cuda;
    static constexpr auto many_plan = macko_tile_many_plan_cuda;
    static constexpr auto many = macko_tile_many_cuda;
#else
    static constexpr auto unpack = macko_tile_unpack_cpu;
    static constexpr auto check = macko_tile_check_cpu;
#endif
};

Made lay_out(const Packed &canonical, const Ints &) {
    const char *op = "lay_out";
    const macko_matrix source = checked_matrix(op, canonical);
    const Tensor &values = canonical[0];
    check_half(op, "values", values);
    const DeviceOf guard(values);
    check_content(op, source, values);
    const int64_t rows = source.rows, cols = source.cols, slabs = macko_tile_count(rows, cols);
    Tensor offsets = torch::stable::new_empty(values, {slabs + 1}, ScalarType::Int);
    auto *offset_data = static_cast<int32_t *>(offsets.mutable_data_ptr());
    const auto check_units = [&](int64_t units) {
        if (units > INT32_MAX)
            fail(op, "the layout takes ", units, " units of ", MACKO_TILE_UNIT, " bytes, expected at most ", INT32_MAX);
    };
    macko_tile_totals totals{};
#ifdef USE_CUDA
    const cudaStream_t stream = current_stream(values);
    Tensor totals_tensor = torch::stable::new_zeros(values, {int64_t(sizeof totals / 8)}, ScalarType::Long);
    auto *device_totals = static_cast<macko_tile_totals *>(totals_tensor.mutable_data_ptr());
    // Twice through dense rows, as many as the workspace holds; where that is all of them, they stay.
    const int64_t most = rows_of_panel(rows, cols, 2),
                  step = most >= rows ? rows : (most + 63) / MACKO_TILE_ROWS * MACKO_TILE_ROWS;
    Tensor dense = torch::stable::new_empty(values, {std::min(rows, step), cols});
    const auto for_pieces = [&](bool unpack, auto body) {
        for (int64_t first = 0; first < rows; first += step) {
            const int64_t count = std::min(step, rows - first);
            macko_matrix piece = source;
            piece.row_ptr += first;
            piece.rows = count;
            if (unpack) STD_CUDA_CHECK(macko_unpack_cuda(&piece, dense.mutable_data_ptr(), stream));
            STD_CUDA_CHECK(body(first, count));
        }
    };
    for_pieces(true, [&](int64_t first, int64_t count) {
        return macko_tile_count_cuda(dense.const_data_ptr(), count, cols,
                                     offset_data + first / MACKO_TILE_ROWS * macko_tile_slabs(cols), device_totals,
                                     stream);
    });
    STD_CUDA_CHECK(macko_tile_scan_cuda(slabs, offset_data, device_totals, stream));
    STD_CUDA_CHECK(cudaMemcpyAsync(&totals, device_totals, sizeof totals, cudaMemcpyDeviceToHost, stream));
    STD_CUDA_CHECK(cudaStreamSynchronize(stream)); // sizes of what is allocated next
    check_units(totals.units);
    Tensor data = torch::stable::new_empty(values, {totals.units * MACKO_TILE_UNIT / 2});
    auto *bytes = static_cast<uint8_t *>(data.mutable_data_ptr());
    const macko_tile_matrix m = {bytes,        offset_data,  rows, cols, int32_t(totals.widest),
                                 source.dtype, totals.units, true};
    for_pieces(step < rows, [&](int64_t first, int64_t count) {
        const macko_tile_matrix piece = piece_of(m, first, count);
        return macko_tile_write_cuda(&piece, dense.const_data_ptr(), bytes, stream);
    });
    // A product may read the weight before the kernel before it has ended (PDL), so that must not be the one that
    // writes it.
    STD_CUDA_CHECK(cudaMemsetAsync(device_totals, 0, sizeof totals, stream));
#else
    const auto for_blocks = [&](auto body) {
        for_rows(macko_tile_row_blocks(rows), cols * MACKO_TILE_ROWS, [&](int64_t begin, int64_t end) {
            std::vector<uint16_t> dense(MACKO_TILE_ROWS * cols);
            for (int64_t block = begin; block < end; block++) {
                const int64_t first = block * MACKO_TILE_ROWS, count = std::min<int64_t>(MACKO_TILE_ROWS, rows - first);
                macko_unpack_cpu(&source, first, first + count, dense.data());
                body(block, count, dense.data());
            }
        });
    };
    for_blocks([&](int64_t block, int64_t count, const void *dense) {
        macko_tile_count_cpu(dense, count, cols, 0, 1, offset_data + block * macko_tile_slabs(cols));
    });
    offset_data[0] = 0;
    for (int64_t slab = 0; slab < slabs; slab++) {
        totals.widest = std::max<int64_t>(totals.widest, offset_data[slab + 1]);
        totals.units += offset_data[slab + 1];
        check_units(totals.units);
        offset_data[slab + 1] = int32_t(totals.units);
    }
    Tensor data = torch::stable::new_empty(values, {totals.units * MACKO_TILE_UNIT / 2});
    auto *bytes = static_cast<uint8_t *>(data.mutable_data_ptr());
    const macko_tile_matrix m = {bytes,        offset_data,  rows, cols, int32_t(totals.widest),
                                 source.dtype, totals.units, true};
    for_blocks([&](int64_t block, int64_t count, const void *dense) {
        const macko_tile_matrix piece = piece_of(m, block * MACKO_TILE_ROWS, count);
        macko_tile_write_cpu(&piece, dense, bytes, 0, 1);
    });
    for (int64_t slab = 0; slab < slabs; slab++)
        for (int byte = 0; byte < MACKO_TILE_SPILLS_AT; byte += 4) {
            uint32_t mask;
            std::memcpy(&mask, bytes + int64_t(offset_data[slab]) * MACKO_TILE_UNIT + byte, 4);
            totals.stored += __builtin_popcount(mask);
        }
#endif
    return {{data, offsets}, {MACKO_LAYOUT_TILE, rows, cols, totals.widest, totals.stored, canonical.own(0)}};
}

} // namespace

const Layout tile_layout = {.name = "tile",
                            .tensors = 2,
                            .own = 3,
                            .lay_out = lay_out,
                            .dense = dense<Tile>,
                            .check = check<Tile>,
                            .linear = linear<Tile>,
#ifdef USE_CUDA
                            .linear_parts = linear_parts<Tile>
#endif
};

} // namespace macko
