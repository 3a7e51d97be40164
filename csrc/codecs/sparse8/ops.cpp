// The sparse8 layout's ops: check, allocate, guard the device, call. Compiled once for the CPU and once for CUDA.
#include <atomic>

#include "../../slab/laid_out.h"
#include "../dense8/bytes_ops.h"
#include "sparse8.h"

namespace macko {
namespace {

// The struct over the tensors, once they have passed every check that needs no look at their content.
macko_sparse8_matrix matrix_of(const char *op, const Packed &p) {
    const Tensor &data = p[0], &offsets = p[1];
    const macko_dtype dtype =
        check_slabs(op, p, macko_sparse8_units(0), macko_sparse8_units(MACKO_SPARSE8_MOST_ROWS), check_16_bits);
    return {static_cast<const uint8_t *>(data.const_data_ptr()),
            static_cast<const int32_t *>(offsets.const_data_ptr()),
            check_scales(op, p[2], data, p.rows()),
            p.rows(),
            p.cols(),
            int32_t(p.own(0)),
            data.numel() * 2 / MACKO_SLAB_UNIT,
            check_kind(op, p.own(1)),
            dtype};
}

MACKO_SLAB_KIND(Sparse8, sparse8, SPARSE8);

Made pack(const Tensor &w_any, const Ints &options) {
    const char *op = "pack";
    const ByteOptions wanted = check_codes(op, w_any, options);
    const int64_t rows = w_any.size(0), cols = w_any.size(1), slabs = macko_slab_count(rows, cols);
    const DeviceOf guard(w_any);
    const Tensor w = as_contiguous(w_any);
    Tensor offsets = torch::stable::new_empty(w, {slabs + 1}, ScalarType::Int);
    auto *offset_data = static_cast<int32_t *>(offsets.mutable_data_ptr());
    macko_sparse8_matrix m = {nullptr, offset_data, nullptr, rows, cols, 0, 0, wanted.kind, wanted.dtype};
    macko_slab_totals totals{};
#ifdef USE_CUDA
    const cudaStream_t stream = current_stream(w);
    Tensor totals_tensor = torch::stable::new_zeros(w, {int64_t(sizeof totals / 8)}, ScalarType::Long);
    auto *device_totals = static_cast<macko_slab_totals *>(totals_tensor.mutable_data_ptr());
    STD_CUDA_CHECK(macko_sparse8_count_cuda(&m, w.const_data_ptr(), offset_data, device_totals, stream));
    STD_CUDA_CHECK(macko_slab_scan_cuda(slabs, offset_data, device_totals, stream));
    STD_CUDA_CHECK(cudaMemcpyAsync(&totals, device_totals, sizeof totals, cudaMemcpyDeviceToHost, stream));
    STD_CUDA_CHECK(cudaStreamSynchronize(stream)); // sizes of what is allocated next
    check_units(op, totals.units);
#else
    const auto *codes = static_cast<const uint8_t *>(w.const_data_ptr());
    std::atomic<int64_t> stored{0};
    for_rows(macko_slab_row_blocks(rows), cols * MACKO_SLAB_ROWS, [&](int64_t first, int64_t last) {
        stored += macko_sparse8_count_cpu(&m, codes, first, last, offset_data);
    });
    totals.stored = stored;
    add_up_slabs(op, slabs, offset_data, totals);
#endif
    Tensor data = torch::stable::new_empty(w, {totals.units * MACKO_SLAB_UNIT / 2}, wanted.type);
    auto *bytes = static_cast<uint8_t *>(data.mutable_data_ptr());
#ifdef USE_CUDA
    STD_CUDA_CHECK(macko_sparse8_write_cuda(&m, w.const_data_ptr(), bytes, stream));
#else
    for_rows(macko_slab_row_blocks(rows), cols * MACKO_SLAB_ROWS,
             [&](int64_t first, int64_t last) { macko_sparse8_write_cpu(&m, codes, bytes, first, last); });
#endif
    return {{data, offsets, scales_of_one(w, rows)},
            {MACKO_LAYOUT_SPARSE8, rows, cols, totals.widest, wanted.kind, totals.stored}};
}

} // namespace

const Layout sparse8_layout = {
    .name = "sparse8", .tensors = 3, .own = 3, .pack_options = 2, .pack = pack, MACKO_SLAB_OPS(Sparse8)};

} // namespace macko
