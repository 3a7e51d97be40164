// The dense8 layout's ops: what slab/ops.h and slab/pack.h ask of it. Compiled once for the CPU and once for CUDA.
#include "bytes_ops.h"
#include "dense8.h"

namespace macko {

extern const Registered dense8_layout;

namespace {

struct Dense8 {
    using Matrix = macko_dense8_matrix;
    using Element = uint8_t;
    static constexpr auto write = MACKO_HERE(macko_dense8_write);
    static constexpr auto unpack = macko_dense8_unpack_cpu;
    static constexpr auto check = macko_dense8_check_cpu;
    static int slab_units(const macko_slab_totals &) {
        return MACKO_DENSE8_UNITS;
    }
    static Matrix matrix_of(const char *op, const Packed &p) {
        const Tensor &data = p[0];
        const int64_t rows = p.rows(), cols = p.cols();
        const Wanted all[] = {{"data", data, ScalarType::Undefined, 1, 16}};
        check_kinds(op, all);
        const macko_dtype dtype = check_16_bits(op, "data", data);
        check_sizes(op, p);
        const macko_byte_kind kind = check_kind(op, p.number(0));
        const int64_t wanted = macko_slab_count(rows, cols) * MACKO_DENSE8_SLAB_BYTES / 2;
        if (data.numel() != wanted)
            fail(op, "data has ", data.numel(), " elements, expected ", wanted, " for a matrix of ", rows, " x ", cols);
        check_memory(op, all);
        return {.data = reads<uint8_t>(data),
                .scales = check_scales(op, p[1], data, rows),
                .rows = rows,
                .cols = cols,
                .kind = kind,
                .dtype = dtype};
    }
};

Made pack(const Tensor &w, const Ints &options) {
    macko_dense8_matrix m{};
    const Slabs s = pack_codes<Dense8>(w, options, m);
    return {{s.data, scales_of_one(w, m.rows)}, {dense8_layout.number, m.rows, m.cols, m.kind}};
}

} // namespace

const Registered dense8_layout(
    slab_layout<Dense8>({.name = "dense8", .number = 8, .tensors = 2, .numbers = 1, .pack_options = 2, .pack = pack}));

} // namespace macko
