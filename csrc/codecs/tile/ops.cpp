// The tile layout's ops: check, allocate, guard the device, call. Compiled once for the CPU and once for CUDA.
#include <cstring>

#include "../../slab/laid_out.h"
#include "tile.h"

namespace macko {
namespace {

// The struct over the two tensors, once they have passed every check that needs no look at their content.
macko_tile_matrix matrix_of(const char *op, const Packed &p) {
    const Tensor &data = p[0], &offsets = p[1];
    const macko_dtype dtype =
        check_slabs(op, p, macko_tile_units(0), macko_tile_units(MACKO_TILE_MOST_ROWS), check_16_bits);
    return {static_cast<const uint8_t *>(data.const_data_ptr()),
            static_cast<const int32_t *>(offsets.const_data_ptr()),
            p.rows(),
            p.cols(),
            int32_t(p.own(0)),
            dtype,
            data.numel() * 2 / MACKO_SLAB_UNIT};
}

MACKO_SLAB_KIND(Tile, tile, TILE);

Made lay_out(const Packed &canonical, const Ints &) {
    const char *op = "lay_out";
    const macko_matrix source = checked_matrix(op, canonical);
    const Tensor &values = canonical[0];
    check_16_bits(op, "values", values);
    const DeviceOf guard(values);
    check_content(op, source, values);
    const int64_t rows = source.rows, cols = source.cols, slabs = macko_slab_count(rows, cols);
    Tensor offsets = torch::stable::new_empty(values, {slabs + 1}, ScalarType::Int);
    auto *offset_data = static_cast<int32_t *>(offsets.mutable_data_ptr());
    macko_slab_totals totals{};
#ifdef USE_CUDA
    const cudaStream_t stream = current_stream(values);
    Tensor totals_tensor = torch::stable::new_zeros(values, {int64_t(sizeof totals / 8)}, ScalarType::Long);
    auto *device_totals = static_cast<macko_slab_totals *>(totals_tensor.mutable_data_ptr());
    dense_pieces pieces(source, values); // gone through twice
    pieces.for_each([&](int64_t first, int64_t count, const void *dense) {
        return macko_tile_count_cuda(dense, count, cols,
                                     offset_data + first / MACKO_SLAB_ROWS * macko_slabs_across(cols), device_totals,
                                     stream);
    });
    STD_CUDA_CHECK(macko_slab_scan_cuda(slabs, offset_data, device_totals, stream));
    STD_CUDA_CHECK(cudaMemcpyAsync(&totals, device_totals, sizeof totals, cudaMemcpyDeviceToHost, stream));
    STD_CUDA_CHECK(cudaStreamSynchronize(stream)); // sizes of what is allocated next
    check_units(op, totals.units);
    Tensor data = torch::stable::new_empty(values, {totals.units * MACKO_SLAB_UNIT / 2});
    auto *bytes = static_cast<uint8_t *>(data.mutable_data_ptr());
    const macko_tile_matrix m = {bytes, offset_data, rows, cols, int32_t(totals.widest), source.dtype, totals.units};
    pieces.for_each([&](int64_t first, int64_t count, const void *dense) {
        const macko_tile_matrix piece = piece_by_offsets(m, first, count);
        return macko_tile_write_cuda(&piece, dense, bytes, stream);
    });
    // A product may read the weight before the kernel before it has ended (PDL), so that must not be the one that
    // writes it.
    STD_CUDA_CHECK(cudaMemsetAsync(device_totals, 0, sizeof totals, stream));
#else
    for_dense_blocks(source, [&](int64_t block, int64_t count, const void *dense) {
        macko_tile_count_cpu(dense, count, cols, 0, 1, offset_data + block * macko_slabs_across(cols));
    });
    add_up_slabs(op, slabs, offset_data, totals);
    Tensor data = torch::stable::new_empty(values, {totals.units * MACKO_SLAB_UNIT / 2});
    auto *bytes = static_cast<uint8_t *>(data.mutable_data_ptr());
    const macko_tile_matrix m = {bytes, offset_data, rows, cols, int32_t(totals.widest), source.dtype, totals.units};
    for_dense_blocks(source, [&](int64_t block, int64_t count, const void *dense) {
        const macko_tile_matrix piece = piece_by_offsets(m, block * MACKO_SLAB_ROWS, count);
        macko_tile_write_cpu(&piece, dense, bytes, 0, 1);
    });
    for (int64_t slab = 0; slab < slabs; slab++)
        for (int byte = 0; byte < MACKO_TILE_SPILLS_AT; byte += 4) {
            uint32_t mask;
            std::memcpy(&mask, bytes + int64_t(offset_data[slab]) * MACKO_SLAB_UNIT + byte, 4);
            totals.stored += __builtin_popcount(mask);
        }
#endif
    return {{data, offsets}, {MACKO_LAYOUT_TILE, rows, cols, totals.widest, totals.stored, canonical.own(0)}};
}

} // namespace

const Layout tile_layout = {.name = "tile", .tensors = 2, .own = 3, .lay_out = lay_out, MACKO_SLAB_OPS(Tile)};

} // namespace macko
