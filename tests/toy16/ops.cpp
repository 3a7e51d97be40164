// The toy16 layout's ops: what slab/ops.h and slab/pack.h ask of it.
#include "../../slab/pack.h"
#include "toy16.h"

namespace macko {

extern const Registered toy16_layout;

namespace {

struct Toy16 {
    using Matrix = macko_toy16_matrix;
    using Element = uint16_t;
    static constexpr auto write = MACKO_HERE(macko_toy16_write);
    static constexpr auto unpack = macko_toy16_unpack_cpu;
    static constexpr auto check = macko_toy16_check_cpu;
    static int slab_units(const macko_slab_totals &) {
        return MACKO_TOY16_SLAB_BYTES / MACKO_SLAB_UNIT;
    }
    static Matrix matrix_of(const char *op, const Packed &p) {
        const Wanted all[] = {{"data", p[0], ScalarType::Undefined, 1, 16}};
        check_kinds(op, all);
        const macko_dtype dtype = check_16_bits(op, "data", p[0]);
        check_sizes(op, p);
        const int64_t wanted = macko_slab_count(p.rows(), p.cols()) * MACKO_TOY16_SLAB_BYTES / 2;
        if (p[0].numel() != wanted) fail(op, "data has ", p[0].numel(), " elements, expected ", wanted);
        check_memory(op, all);
        return {reads<uint8_t>(p[0]), p.rows(), p.cols(), dtype};
    }
};

Made pack(const Tensor &w_any, const Ints &) {
    const char *op = "pack";
    check_backend(op, "w", w_any);
    macko_toy16_matrix m{};
    m.dtype = check_16_bits(op, "w", w_any);
    check_extents(op, w_any);
    const DeviceOf guard(w_any);
    const Tensor w = as_contiguous(w_any);
    m.rows = w.size(0);
    m.cols = w.size(1);
    const Slabs s = pack_slabs<Toy16>(op, m, TensorRows<uint16_t>{w});
    return {{s.data}, {toy16_layout.number, m.rows, m.cols}};
}

} // namespace

const Registered
    toy16_layout(slab_layout<Toy16>({.name = "toy16", .number = 63, .tensors = 1, .numbers = 0, .pack = pack}));

} // namespace macko
