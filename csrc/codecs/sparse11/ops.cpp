// The sparse11 layout's ops: check, allocate, guard the device, call. Compiled once for the CPU and once for CUDA.
#include <mutex>

#include "../../slab/laid_out.h"
#include "sparse11.h"

namespace macko {
namespace {

macko_dtype check_type(const char *op, const char *name, const Tensor &t) {
    if (t.scalar_type() == ScalarType::BFloat16) return MACKO_BF16;
    if (t.scalar_type() != ScalarType::Half)
        fail(op, name, " has dtype ", dtype_name(t.scalar_type()), ", sparse11 holds bfloat16 and float16");
    return MACKO_F16;
}

// The struct over the two tensors, once they have passed every check that needs no look at their content.
macko_sparse11_matrix matrix_of(const char *op, const Packed &p) {
    const Tensor &data = p[0], &offsets = p[1];
    const macko_dtype dtype = check_slabs(op, p, macko_sparse11_units(0, 0), MACKO_SPARSE11_MOST_UNITS, check_type);
    for (const int word : {1, 2})
        if (p.own(word) < 0 || p.own(word) > UINT32_MAX)
            fail(op, word == 1 ? "table_low is " : "table_high is ", p.own(word), ", expected 0 to ", UINT32_MAX);
    return {static_cast<const uint8_t *>(data.const_data_ptr()),
            static_cast<const int32_t *>(offsets.const_data_ptr()),
            p.rows(),
            p.cols(),
            int32_t(p.own(0)),
            {uint32_t(p.own(1)), uint32_t(p.own(2))},
            data.numel() * 2 / MACKO_SLAB_UNIT,
            dtype};
}

MACKO_SLAB_KIND(Sparse11, sparse11, SPARSE11);

void check_listed(const macko_sparse11_totals &totals) {
    if (totals.fullest > MACKO_SPARSE11_MOST_LISTED)
        fail("lay_out",
             "the table of sparse11, seven signs and upper exponent bits, or bfloat16, whose mantissa has 7 bits, "
             "lacks ",
             totals.listed, " of ", totals.stored, " values, of one slab of 64 x 256 ", totals.fullest,
             ", expected at most ", int(MACKO_SPARSE11_MOST_LISTED));
    check_units("lay_out", totals.units);
}

Made lay_out(const Packed &canonical, const Ints &) {
    const char *op = "lay_out";
    const macko_matrix source = checked_matrix(op, canonical);
    const Tensor &values = canonical[0];
    check_type(op, "values", values);
    const DeviceOf guard(values);
    check_content(op, source, values);
    const int64_t rows = source.rows, cols = source.cols, slabs = macko_slab_count(rows, cols);
    Tensor offsets = torch::stable::new_empty(values, {slabs + 1}, ScalarType::Int);
    auto *offset_data = static_cast<int32_t *>(offsets.mutable_data_ptr());
    macko_sparse11_matrix m = {nullptr, offset_data, rows, cols, 0, {}, 0, source.dtype};
    macko_sparse11_totals totals{};
#ifdef USE_CUDA
    const cudaStream_t stream = current_stream(values);
    constexpr int64_t HIGHS = 256;
    Tensor numbers = torch::stable::new_zeros(values, {HIGHS + int64_t(sizeof totals / 8)}, ScalarType::Long);
    auto *device_counts = static_cast<uint64_t *>(numbers.mutable_data_ptr());
    auto *device_totals = reinterpret_cast<macko_sparse11_totals *>(device_counts + HIGHS);
    dense_pieces pieces(source, values); // gone through three times
    const auto fetch = [&](void *to, const void *from, size_t bytes) {
        STD_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
        STD_CUDA_CHECK(cudaStreamSynchronize(stream)); // the host makes the table, and allocates, by them
    };
    pieces.for_each([&](int64_t first, int64_t count, const void *dense) {
        const macko_sparse11_matrix piece = piece_by_offsets(m, first, count);
        return macko_sparse11_histogram_cuda(&piece, dense, device_counts, stream);
    });
    int64_t counts[HIGHS];
    fetch(counts, device_counts, sizeof counts);
    macko_slab_table(counts, 256, m.table);
    pieces.for_each([&](int64_t first, int64_t count, const void *dense) {
        const macko_sparse11_matrix piece = piece_by_offsets(m, first, count);
        return macko_sparse11_count_cuda(
            &piece, dense, offset_data + first / MACKO_SLAB_ROWS * macko_slabs_across(cols), device_totals, stream);
    });
    macko_slab_totals scanned;
    STD_CUDA_CHECK(
        macko_slab_scan_cuda(slabs, offset_data, reinterpret_cast<macko_slab_totals *>(device_counts), stream));
    fetch(&scanned, device_counts, sizeof scanned);
    fetch(&totals, device_totals, sizeof totals);
    totals.units = scanned.units;
    totals.widest = scanned.widest;
#else
    std::mutex mutex;
    int64_t counts[256] = {};
    for_dense_blocks(source, [&](int64_t block, int64_t count, const uint16_t *dense) {
        const macko_sparse11_matrix piece = piece_by_offsets(m, block * MACKO_SLAB_ROWS, count);
        int64_t own[256] = {};
        macko_sparse11_histogram_cpu(&piece, dense, 0, 1, own);
        const std::lock_guard<std::mutex> lock(mutex);
        for (int high = 0; high < 256; high++) counts[high] += own[high];
    });
    macko_slab_table(counts, 256, m.table);
    for_dense_blocks(source, [&](int64_t block, int64_t count, const uint16_t *dense) {
        const macko_sparse11_matrix piece = piece_by_offsets(m, block * MACKO_SLAB_ROWS, count);
        macko_sparse11_totals own{};
        macko_sparse11_count_cpu(&piece, dense, 0, 1, offset_data + block * macko_slabs_across(cols), &own);
        const std::lock_guard<std::mutex> lock(mutex);
        totals.stored += own.stored;
        totals.listed += own.listed;
        totals.fullest = std::max(totals.fullest, own.fullest);
    });
    add_up_slabs(op, slabs, offset_data, totals);
#endif
    check_listed(totals);
    Tensor data = torch::stable::new_empty(values, {totals.units * MACKO_SLAB_UNIT / 2});
    auto *bytes = static_cast<uint8_t *>(data.mutable_data_ptr());
    m.data = bytes;
    m.widest = int32_t(totals.widest);
    m.units = totals.units;
#ifdef USE_CUDA
    pieces.for_each([&](int64_t first, int64_t count, const void *dense) {
        const macko_sparse11_matrix piece = piece_by_offsets(m, first, count);
        return macko_sparse11_write_cuda(&piece, dense, bytes, stream);
    });
    // A product may read the weight before the kernel before it has ended (PDL), so that must not be the one that
    // writes it.
    STD_CUDA_CHECK(cudaMemsetAsync(device_totals, 0, sizeof totals, stream));
#else
    for_dense_blocks(source, [&](int64_t block, int64_t count, const uint16_t *dense) {
        const macko_sparse11_matrix piece = piece_by_offsets(m, block * MACKO_SLAB_ROWS, count);
        macko_sparse11_write_cpu(&piece, dense, bytes, 0, 1);
    });
#endif
    return {{data, offsets},
            {MACKO_LAYOUT_SPARSE11, rows, cols, totals.widest, m.table[0], m.table[1], totals.stored, totals.listed,
             canonical.own(0)}};
}

} // namespace

const Layout sparse11_layout = {
    .name = "sparse11", .tensors = 2, .own = 6, .lay_out = lay_out, MACKO_SLAB_OPS(Sparse11)};

} // namespace macko
