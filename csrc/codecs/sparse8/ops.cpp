// The sparse8 layout's ops: what slab/ops.h and slab/pack.h ask of it. Compiled once for the CPU and once for CUDA.
#include "../dense8/bytes_ops.h"
#include "sparse8.h"

namespace macko {

extern const Registered sparse8_layout;

namespace {

struct Sparse8 {
    using Matrix = macko_sparse8_matrix;
    using Element = uint8_t;
    static constexpr auto count = MACKO_HERE(macko_sparse8_count);
    static constexpr auto write = MACKO_HERE(macko_sparse8_write);
    static constexpr auto unpack = macko_sparse8_unpack_cpu;
    static constexpr auto check = macko_sparse8_check_cpu;
    static Matrix matrix_of(const char *op, const Packed &p) {
        const macko_dtype dtype =
            check_slabs(op, p, macko_sparse8_units(0), macko_sparse8_units(MACKO_SPARSE8_MOST_ROWS), check_16_bits);
        return {.data = reads<uint8_t>(p[0]),
                .offsets = reads<int32_t>(p[1]),
                .scales = check_scales(op, p[2], p[0], p.rows()),
                .rows = p.rows(),
                .cols = p.cols(),
                .widest = int32_t(p.number(0)),
                .units = p[0].numel() * 2 / MACKO_SLAB_UNIT,
                .kind = check_kind(op, p.number(1)),
                .dtype = dtype};
    }
};

Made pack(const Tensor &w, const Ints &options) {
    macko_sparse8_matrix m{};
    const Slabs s = pack_codes<Sparse8>(w, options, m);
    return {{s.data, s.offsets, scales_of_one(w, m.rows)},
            {sparse8_layout.number, m.rows, m.cols, m.widest, m.kind, s.totals.stored}};
}

} // namespace

const Registered sparse8_layout(slab_layout<Sparse8>(
    {.name = "sparse8", .number = 9, .tensors = 3, .numbers = 3, .pack_options = 2, .pack = pack}));

} // namespace macko
