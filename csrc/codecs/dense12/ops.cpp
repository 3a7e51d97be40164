// The dense12 layout's ops: what slab/ops.h and slab/pack.h ask of it. Compiled once for the CPU and once for CUDA.
#include "../../slab/pack.h"
#include "dense12.h"

namespace macko {

extern const Registered dense12_layout;

namespace {

// Of a hundred elements at most one is listed: a product puts them in their places one by one.
constexpr int64_t ELEMENTS_A_LISTED = 100;

struct Dense12 {
    using Matrix = macko_dense12_matrix;
    using Element = uint16_t;
    static constexpr int HIGHS = 128;
    static constexpr auto histogram = MACKO_HERE(macko_dense12_histogram);
    static constexpr auto count = MACKO_HERE(macko_dense12_count);
    static constexpr auto write = MACKO_HERE(macko_dense12_write);
    static constexpr auto unpack = macko_dense12_unpack_cpu;
    static constexpr auto check = macko_dense12_check_cpu;
    static bool waits(const Matrix &m) {
        return m.cols > MACKO_DENSE12_FEW_COLS;
    }
    static int slab_units(const macko_slab_totals &totals) {
        return macko_dense12_units(int(totals.fullest));
    }
    static Matrix matrix_of(const char *op, const Packed &p) {
        const Tensor &data = p[0];
        const int64_t rows = p.rows(), cols = p.cols(), units = p.number(0);
        const Wanted all[] = {{"data", data, ScalarType::Undefined, 1, 16}};
        check_kinds(op, all);
        const macko_dtype dtype = check_bfloat16(op, "data", data, "dense12");
        check_sizes(op, p);
        const int64_t slabs = macko_slab_count(rows, cols);
        const int least = slabs ? macko_dense12_units(0) : 0, most = slabs ? MACKO_DENSE12_MOST_UNITS : 0;
        if (units < least || units > most) fail(op, "slab_units is ", units, ", expected ", least, " to ", most);
        if (data.numel() * 2 != slabs * units * MACKO_SLAB_UNIT)
            fail(op, "data has ", data.numel(), " elements, expected ", slabs * units * MACKO_SLAB_UNIT / 2,
                 " for a matrix of ", rows, " x ", cols, " in slabs of ", units, " units");
        check_table(op, p, INT32_LIMIT); // bytes under 128
        check_memory(op, all);
        return {.data = reads<uint8_t>(data),
                .rows = rows,
                .cols = cols,
                .slab_units = int32_t(units),
                .table = {uint32_t(p.number(1)), uint32_t(p.number(2))},
                .dtype = dtype};
    }
    static void refuse(const char *op, const Matrix &m, const macko_slab_totals &totals) {
        const int64_t most = m.rows * m.cols / ELEMENTS_A_LISTED;
        if (totals.listed > most || totals.fullest > MACKO_DENSE12_MOST_LISTED)
            fail(op, "the table of dense12, eight values of the upper exponent bits,",
                 m.dtype == MACKO_F16 ? " or bfloat16, whose mantissa has 7 bits," : "", " lacks ", totals.listed,
                 " of ", m.rows * m.cols, " elements, at most ", totals.fullest,
                 " in a slab of 64 x 256; expected at most ", most, ", and ", int(MACKO_DENSE12_MOST_LISTED),
                 " in a slab");
    }
};

Made pack(const Tensor &w_any, const Ints &) {
    const char *op = "pack";
    check_backend(op, "w", w_any);
    macko_dense12_matrix m{};
    m.dtype = check_bfloat16(op, "w", w_any, "dense12");
    check_extents(op, w_any);
    const DeviceOf guard(w_any);
    const Tensor w = as_aligned(w_any);
    m.rows = w.size(0);
    m.cols = w.size(1);
    const Slabs s = pack_slabs<Dense12>(op, m, TensorRows<uint16_t>{w});
    return {{s.data}, {dense12_layout.number, m.rows, m.cols, m.slab_units, m.table[0], m.table[1], s.totals.listed}};
}

} // namespace

const Registered
    dense12_layout(slab_layout<Dense12>({.name = "dense12", .number = 6, .tensors = 1, .numbers = 4, .pack = pack}));

} // namespace macko
