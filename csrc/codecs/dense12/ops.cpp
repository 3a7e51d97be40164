// The dense12 layout's ops: check, allocate, guard the device, call. Compiled once for the CPU and once for CUDA.
#include <algorithm>
#include <mutex>
#include <vector>

#include "../../slab/products.h"
#include "dense12.h"

namespace macko {
namespace {

// Of a hundred elements at most one is listed: a product puts them in their places one by one.
constexpr int64_t ELEMENTS_A_LISTED = 100;

macko_dtype check_half(const char *op, const char *name, const Tensor &t) {
    if (t.scalar_type() != ScalarType::BFloat16 && t.scalar_type() != ScalarType::Half)
        fail(op, name, " has dtype ", dtype_name(t.scalar_type()), ", dense12 holds bfloat16 and float16");
    return check_value_dtype(op, name, t);
}

// The struct over the tensor, once it has passed every check that needs no look at its content.
macko_dense12_matrix matrix_of(const char *op, const Packed &p) {
    const Tensor &data = p[0];
    const int64_t rows = p.rows(), cols = p.cols(), units = p.own(0);
    const Wanted all[] = {{"data", data, ScalarType::Undefined, 1, 16}};
    check_kinds(op, all);
    const macko_dtype dtype = check_half(op, "data", data);
    check_sizes(op, p);
    const int64_t slabs = macko_slab_count(rows, cols);
    const int least = slabs ? macko_dense12_units(0) : 0, most = slabs ? MACKO_DENSE12_MOST_UNITS : 0;
    if (units < least || units > most) fail(op, "slab_units is ", units, ", expected ", least, " to ", most);
    if (data.numel() * 2 != slabs * units * MACKO_SLAB_UNIT)
        fail(op, "data has ", data.numel(), " elements, expected ", slabs * units * MACKO_SLAB_UNIT / 2,
             " for a matrix of ", rows, " x ", cols, " in slabs of ", units, " units");
    for (const int word : {1, 2})
        if (p.own(word) < 0 || p.own(word) > INT32_LIMIT) // bytes under 128
            fail(op, word == 1 ? "table_low is " : "table_high is ", p.own(word), ", expected 0 to ", INT32_LIMIT);
    check_memory(op, all);
    return {static_cast<const uint8_t *>(data.const_data_ptr()),
            rows,
            cols,
            int32_t(units),
            {uint32_t(p.own(1)), uint32_t(p.own(2))},
            dtype};
}

MACKO_SLAB_KIND(Dense12, dense12, DENSE12);

// A matrix [rows, cols] of which the table is known, and how many elements it lacks; no data yet.
struct Counted {
    macko_dense12_matrix m;
    int64_t fullest, listed; // elements that the fullest slab lists, and all of them
};

#ifdef USE_CUDA
// Numbers that a kernel writes, from zeros on.
struct Numbers {
    Tensor there;
    std::vector<int64_t> here;

    Numbers(const Tensor &like, size_t count)
        : there(torch::stable::new_zeros(like, {int64_t(count)}, ScalarType::Long)), here(count) {
    }
    uint64_t *device() {
        return static_cast<uint64_t *>(there.mutable_data_ptr());
    }
    void fetch(cudaStream_t stream) {
        STD_CUDA_CHECK(cudaMemcpyAsync(here.data(), device(), here.size() * 8, cudaMemcpyDeviceToHost, stream));
        STD_CUDA_CHECK(cudaStreamSynchronize(stream)); // the host makes the table, and allocates, by them
    }
};
#endif

Counted count(const Tensor &w, macko_dtype dtype) {
    Counted c{{nullptr, w.size(0), w.size(1), 0, {}, dtype}, 0, 0};
    macko_dense12_matrix &m = c.m;
#ifdef USE_CUDA
    const cudaStream_t stream = current_stream(w);
    Numbers counts(w, 128), found(w, 2);
    STD_CUDA_CHECK(macko_dense12_count_cuda(&m, w.const_data_ptr(), counts.device(), stream));
    counts.fetch(stream);
    macko_slab_table(counts.here.data(), 128, m.table);
    STD_CUDA_CHECK(macko_dense12_listed_cuda(&m, w.const_data_ptr(), found.device(), stream));
    found.fetch(stream);
    c.fullest = found.here[0], c.listed = found.here[1];
#else
    const auto *dense = static_cast<const uint16_t *>(w.const_data_ptr());
    const int64_t blocks = macko_slab_row_blocks(m.rows);
    std::mutex mutex;
    int64_t counts[128] = {};
    for_rows(blocks, MACKO_SLAB_ROWS * m.cols, [&](int64_t first, int64_t last) {
        int64_t own[128] = {};
        macko_dense12_count_cpu(&m, dense, first, last, own);
        const std::lock_guard<std::mutex> lock(mutex);
        for (int high = 0; high < 128; high++) counts[high] += own[high];
    });
    macko_slab_table(counts, 128, m.table);
    for_rows(blocks, MACKO_SLAB_ROWS * m.cols, [&](int64_t first, int64_t last) {
        int64_t listed = 0;
        const int64_t fullest = macko_dense12_listed_cpu(&m, dense, first, last, &listed);
        const std::lock_guard<std::mutex> lock(mutex);
        c.fullest = std::max(c.fullest, fullest);
        c.listed += listed;
    });
#endif
    return c;
}

Made pack(const Tensor &w_any, const Ints &) {
    const char *op = "pack";
    check_backend(op, "w", w_any);
    const macko_dtype dtype = check_half(op, "w", w_any);
    check_dim(op, "w", w_any, 2);
    const int64_t rows = w_any.size(0), cols = w_any.size(1), slabs = macko_slab_count(rows, cols);
    for (const int64_t size : {rows, cols})
        if (size > INT32_LIMIT)
            fail(op, "w has shape ", shape_name(w_any), ", expected at most ", INT32_LIMIT, " rows and columns");
    const DeviceOf guard(w_any);
    const Tensor w = as_aligned(w_any);
    Counted c = count(w, dtype);
    const int64_t most = rows * cols / ELEMENTS_A_LISTED;
    if (c.listed > most || c.fullest > MACKO_DENSE12_MOST_LISTED)
        fail(op, "the table of dense12, eight values of the upper exponent bits,",
             dtype == MACKO_F16 ? " or bfloat16, whose mantissa has 7 bits," : "", " lacks ", c.listed, " of ",
             rows * cols, " elements, at most ", c.fullest, " in a slab of 64 x 256; expected at most ", most, ", and ",
             int(MACKO_DENSE12_MOST_LISTED), " in a slab");
    c.m.slab_units = slabs ? macko_dense12_units(int(c.fullest)) : 0;
    Tensor data = torch::stable::new_empty(w, {slabs * c.m.slab_units * MACKO_SLAB_UNIT / 2});
    auto *bytes = static_cast<uint8_t *>(data.mutable_data_ptr());
#ifdef USE_CUDA
    const cudaStream_t stream = current_stream(w);
    STD_CUDA_CHECK(macko_dense12_write_cuda(&c.m, w.const_data_ptr(), bytes, stream));
    // A product may read the weight before the kernel before it has ended (PDL), so that must not be the one that
    // writes it.
    const Numbers behind(w, 1);
#else
    for_rows(macko_slab_row_blocks(rows), cols * MACKO_SLAB_ROWS, [&](int64_t first, int64_t last) {
        macko_dense12_write_cpu(&c.m, static_cast<const uint16_t *>(w.const_data_ptr()), bytes, first, last);
    });
#endif
    return {{data}, {MACKO_LAYOUT_DENSE12, rows, cols, c.m.slab_units, c.m.table[0], c.m.table[1], c.listed}};
}

} // namespace

const Layout dense12_layout = {.name = "dense12", .tensors = 1, .own = 4, .pack = pack, MACKO_SLAB_OPS(Dense12)};

} // namespace macko
