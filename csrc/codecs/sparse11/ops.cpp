// The sparse11 layout's ops: what slab/ops.h and slab/pack.h ask of it. Compiled once for the CPU and once for CUDA.
#include "../../slab/pack.h"
#include "sparse11.h"

namespace macko {

extern const Registered sparse11_layout;

namespace {

struct Sparse11 {
    using Matrix = macko_sparse11_matrix;
    using Element = uint16_t;
    static constexpr int HIGHS = 256;
    static constexpr auto histogram = MACKO_HERE(macko_sparse11_histogram);
    static constexpr auto count = MACKO_HERE(macko_sparse11_count);
    static constexpr auto write = MACKO_HERE(macko_sparse11_write);
    static constexpr auto unpack = macko_sparse11_unpack_cpu;
    static constexpr auto check = macko_sparse11_check_cpu;
    static macko_dtype check_type(const char *op, const char *name, const Tensor &t) {
        return check_bfloat16(op, name, t, "sparse11");
    }
    static Matrix matrix_of(const char *op, const Packed &p) {
        const macko_dtype dtype = check_slabs(op, p, macko_sparse11_units(0, 0), MACKO_SPARSE11_MOST_UNITS, check_type);
        check_table(op, p, UINT32_MAX);
        return {.data = reads<uint8_t>(p[0]),
                .offsets = reads<int32_t>(p[1]),
                .rows = p.rows(),
                .cols = p.cols(),
                .widest = int32_t(p.number(0)),
                .table = {uint32_t(p.number(1)), uint32_t(p.number(2))},
                .units = p[0].numel() * 2 / MACKO_SLAB_UNIT,
                .dtype = dtype};
    }
    static void refuse(const char *op, const Matrix &, const macko_slab_totals &totals) {
        if (totals.fullest > MACKO_SPARSE11_MOST_LISTED)
            fail(op,
                 "the table of sparse11, seven signs and upper exponent bits, or bfloat16, whose mantissa has 7 bits, "
                 "lacks ",
                 totals.listed, " of ", totals.stored, " values, of one slab of 64 x 256 ", totals.fullest,
                 ", expected at most ", int(MACKO_SPARSE11_MOST_LISTED));
    }
};

Made lay_out(const Packed &canonical, const Ints &) {
    macko_sparse11_matrix m{};
    const Slabs s = lay_out_slabs<Sparse11>(canonical, m);
    return {{s.data, s.offsets},
            {sparse11_layout.number, m.rows, m.cols, m.widest, m.table[0], m.table[1], s.totals.stored, s.totals.listed,
             canonical.number(0)}};
}

} // namespace

const Registered sparse11_layout(
    slab_layout<Sparse11>({.name = "sparse11", .number = 7, .tensors = 2, .numbers = 6, .lay_out = lay_out}));

} // namespace macko
