// The tile layout's ops: what slab/ops.h and slab/pack.h ask of it. Compiled once for the CPU and once for CUDA.
#include "../../slab/pack.h"
#include "tile.h"

namespace macko {

extern const Registered tile_layout;

namespace {

struct Tile {
    using Matrix = macko_tile_matrix;
    using Element = uint16_t;
    static constexpr auto check_type = check_16_bits;
    static constexpr auto count = MACKO_HERE(macko_tile_count);
    static constexpr auto write = MACKO_HERE(macko_tile_write);
    static constexpr auto unpack = macko_tile_unpack_cpu;
    static constexpr auto check = macko_tile_check_cpu;
    static bool waits(const Matrix &m) {
        return m.widest * MACKO_SLAB_UNIT > MACKO_TILE_FOUR_STAGES;
    }
    static Matrix matrix_of(const char *op, const Packed &p) {
        const macko_dtype dtype =
            check_slabs(op, p, macko_tile_units(0), macko_tile_units(MACKO_TILE_MOST_ROWS), check_type);
        return {.data = reads<uint8_t>(p[0]),
                .offsets = reads<int32_t>(p[1]),
                .rows = p.rows(),
                .cols = p.cols(),
                .widest = int32_t(p.number(0)),
                .dtype = dtype,
                .units = p[0].numel() * 2 / MACKO_SLAB_UNIT};
    }
};

Made lay_out(const Packed &canonical, const Ints &) {
    macko_tile_matrix m{};
    const Slabs s = lay_out_slabs<Tile>(canonical, m);
    return {{s.data, s.offsets}, {tile_layout.number, m.rows, m.cols, m.widest, s.totals.stored, canonical.number(0)}};
}

} // namespace

const Registered
    tile_layout(slab_layout<Tile>({.name = "tile", .number = 3, .tensors = 2, .numbers = 3, .lay_out = lay_out}));

} // namespace macko
