// The dense8 layout's ops: check, allocate, guard the device, call. Compiled once for the CPU and once for CUDA.
#include "../../slab/products.h"
#include "bytes_ops.h"
#include "dense8.h"

namespace macko {
namespace {

// The struct over the tensors, once they have passed every check that needs no look at their content.
macko_dense8_matrix matrix_of(const char *op, const Packed &p) {
    const Tensor &data = p[0];
    const int64_t rows = p.rows(), cols = p.cols();
    const Wanted all[] = {{"data", data, ScalarType::Undefined, 1, 16}};
    check_kinds(op, all);
    const macko_dtype dtype = check_16_bits(op, "data", data);
    check_sizes(op, p);
    const macko_byte_kind kind = check_kind(op, p.own(0));
    const int64_t wanted = macko_slab_count(rows, cols) * MACKO_DENSE8_SLAB_BYTES / 2;
    if (data.numel() != wanted)
        fail(op, "data has ", data.numel(), " elements, expected ", wanted, " for a matrix of ", rows, " x ", cols);
    check_memory(op, all);
    return {static_cast<const uint8_t *>(data.const_data_ptr()),
            check_scales(op, p[1], data, rows),
            rows,
            cols,
            kind,
            dtype};
}

MACKO_SLAB_KIND(Dense8, dense8, DENSE8);

Made pack(const Tensor &w_any, const Ints &options) {
    const ByteOptions wanted = check_codes("pack", w_any, options);
    const int64_t rows = w_any.size(0), cols = w_any.size(1), slabs = macko_slab_count(rows, cols);
    const DeviceOf guard(w_any);
    const Tensor w = as_contiguous(w_any);
    Tensor data = torch::stable::new_empty(w, {slabs * MACKO_DENSE8_SLAB_BYTES / 2}, wanted.type);
    auto *bytes = static_cast<uint8_t *>(data.mutable_data_ptr());
    const macko_dense8_matrix m = {bytes, nullptr, rows, cols, wanted.kind, wanted.dtype};
#ifdef USE_CUDA
    STD_CUDA_CHECK(macko_dense8_write_cuda(&m, w.const_data_ptr(), bytes, current_stream(w)));
#else
    for_rows(macko_slab_row_blocks(rows), cols * MACKO_SLAB_ROWS, [&](int64_t first, int64_t last) {
        macko_dense8_write_cpu(&m, static_cast<const uint8_t *>(w.const_data_ptr()), bytes, first, last);
    });
#endif
    return {{data, scales_of_one(w, rows)}, {MACKO_LAYOUT_DENSE8, rows, cols, wanted.kind}};
}

} // namespace

const Layout dense8_layout = {
    .name = "dense8", .tensors = 2, .own = 1, .pack_options = 2, .pack = pack, MACKO_SLAB_OPS(Dense8)};

} // namespace macko
