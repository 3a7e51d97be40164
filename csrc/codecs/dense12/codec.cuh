// From a slab of dense12 to the registers of operand A (dense12.h; slab/codec.cuh says what the kernels ask).
#pragma once

#include "../../slab/codec.cuh"
#include "dense12.h"

namespace macko {

// What a lane has of a tile, but for the low bytes.
template <typename T>
struct dense12_lane {
    uint32_t codes[MACKO_SLAB_STEPS];
    // The warp's bounds of the list: the next entry, or NONE, where it stands and where the bounds ends.
    uint32_t entry, entry_at, list_end;
    static constexpr uint32_t NONE = ~0u; // of no step

    __device__ __forceinline__ void find_list(uint32_t slab, uint32_t bounds) {
        entry_at = slab + MACKO_DENSE12_LIST_AT + (bounds & 0xffff) * 4;
        list_end = slab + MACKO_DENSE12_LIST_AT + (bounds >> 16) * 4;
        load_entry();
    }
    __device__ __forceinline__ void load_entry() {
        entry = NONE;
        if (entry_at < list_end) read_32(entry, entry_at);
    }
    // Step STEP of the tile, whose low bytes are given.
    template <int STEP>
    __device__ __forceinline__ void make(uint32_t (&a)[4], uint32_t low0, uint32_t low1, const uint32_t (&table)[2],
                                         int lane) {
        const uint32_t word = codes[STEP], code = word & 0x77777777u;
        // Of float16 the sign stands after e[4:1] until the zeros at the end move it to its place.
        constexpr bool HALF = std::is_same_v<T, __half>;
        constexpr uint32_t SIGNS = HALF ? 0x10101010u : 0x80808080u;
        constexpr int ZEROS = HALF ? 3 : 0;
        const uint32_t high0 = byte_permute(table[0], table[1], code) | (word >> ZEROS & SIGNS);
        const uint32_t high1 = byte_permute(table[0], table[1], code >> 16) | (word << (4 - ZEROS) & SIGNS);
        a[0] = byte_permute(low0, high0, 0x5140) << ZEROS;
        a[1] = byte_permute(low0, high0, 0x7362) << ZEROS;
        a[2] = byte_permute(low1, high1, 0x5140) << ZEROS;
        a[3] = byte_permute(low1, high1, 0x7362) << ZEROS;
        // Elements of the list: one in some thousand, so most warps have none in most steps.
        while ((entry >> 8 & 0xff) == STEP) {
            const uint32_t element = (entry & 0xff) - lane * 8, half = entry & 1 ? 0x7610 : 0x3276; // upper or lower
#pragma unroll
            for (int i = 0; i < 4; i++) // asm: an index that is not known would put `a` into local memory
                asm("{ .reg .pred p;\nsetp.eq.u32 p, %1, %4;\n@p prmt.b32 %0, %0, %2, %3; }"
                    : "+r"(a[i])
                    : "r"(element & ~1u), "r"(entry), "r"(half), "r"(2 * i));
            entry_at += 4;
            load_entry();
        }
    }
};

template <typename VALUE>
struct dense12 {
    using T = VALUE;
    struct constants {
        uint32_t table[2];
    };
    static constexpr bool SAME_SIZE = true, SCALED = false, READS_AHEAD = true;
    static constexpr int STEPS = 1;
    static constexpr int BASE = 0, HALVES_TO = 0;
    static constexpr bool takes(macko_slab_many_shape shape) {
        return !macko_slab_few_registers(shape);
    }
    static constexpr int TILE_BYTES = MACKO_SLAB_SLICES * MACKO_DENSE12_SLICE_BYTES,
                         CHUNK = MACKO_SLAB_LANES * MACKO_DENSE12_CHUNK; // of a warp

    // Of a tile the codes and the low bytes of its first two steps are loaded while the one before is multiplied.
    struct few_reader {
        uint32_t own, bounds_at; // offsets in a slab: of the lane's bytes, of the warp's word for the list
        uint32_t table[2];
        int lane;
        dense12_lane<T> lanes[2];
        uint32_t low[2][4], bounds;

        __device__ __forceinline__ few_reader(const constants &weights, int tile, int slice, int lane) : lane(lane) {
            for (int i = 0; i < 2; i++) table[i] = opaque(weights.table[i]); // else they are loaded at every use
            own = opaque(tile * TILE_BYTES + slice * MACKO_DENSE12_SLICE_BYTES + lane * MACKO_DENSE12_CHUNK);
            bounds_at = opaque(MACKO_DENSE12_BOUNDS_AT + (tile * MACKO_SLAB_SLICES + slice) * 4);
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void prepare(uint32_t slab, const constants &) {
            if (STEP == 0) read_32(bounds, slab + bounds_at);
            if (STEP == 1) read_128(lanes[TILE].codes, slab + own + 2 * CHUNK);
            if (STEP == 2) read_128(low[0], slab + own); // the tile before has used its own
            if (STEP == 3) lanes[TILE].find_list(slab, bounds);
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void load_next(uint32_t slab, const constants &) {
            if (STEP == 0) read_128(low[1], slab + own + CHUNK);
        }
        template <int STEP, int TILE>
        __device__ __forceinline__ void make(uint32_t (&a)[4][4], const constants &) {
            lanes[TILE].template make<STEP>(a[STEP], low[STEP / 2][STEP % 2 * 2], low[STEP / 2][STEP % 2 * 2 + 1],
                                            table, lane);
        }
        __device__ __forceinline__ void move_1_to_0() {
            lanes[0] = lanes[1];
        }
    };

    struct many_reader {
        uint32_t slab, tile_at, bounds_at; // the tile that is prepared: the lane's bytes, the warp's word for the list
        uint32_t table[2];
        int lane;
        dense12_lane<T> here, next;
        uint32_t here_at, low[2][4], bounds;

        __device__ __forceinline__ explicit many_reader(const constants &weights) {
            for (int i = 0; i < 2; i++) table[i] = hidden(weights.table[i], threadIdx.x % WARP, 0);
        }
        __device__ __forceinline__ void open(uint32_t at, int slice, int own_lane) {
            slab = at;
            tile_at = at + slice * MACKO_DENSE12_SLICE_BYTES + own_lane * MACKO_DENSE12_CHUNK;
            bounds_at = at + MACKO_DENSE12_BOUNDS_AT + slice * 4;
            lane = own_lane;
        }
        __device__ __forceinline__ void skip_half() {
            tile_at += MACKO_SLAB_TILES / 2 * TILE_BYTES;
            bounds_at += MACKO_SLAB_TILES / 2 * MACKO_SLAB_SLICES * 4;
        }
        __device__ __forceinline__ void advance(bool) {
            here = next;
            here_at = tile_at;
            tile_at += TILE_BYTES;
            bounds_at += MACKO_SLAB_SLICES * 4;
        }
        template <int STEP>
        __device__ __forceinline__ void prepare(const constants &) {
            if (STEP == 0) read_32(bounds, bounds_at);
            if (STEP == 1) read_128(next.codes, tile_at + 2 * CHUNK);
            if (STEP == 2) read_128(low[0], tile_at); // the tile before has used its own
            if (STEP == 3) next.find_list(slab, bounds);
        }
        template <int STEP>
        __device__ __forceinline__ void load_next(const constants &) {
            if (STEP == 0) read_128(low[1], here_at + CHUNK);
        }
        template <int STEP>
        __device__ __forceinline__ void make(uint32_t (&a)[4][4], const constants &) {
            here.template make<STEP>(a[STEP], low[STEP / 2][STEP % 2 * 2], low[STEP / 2][STEP % 2 * 2 + 1], table,
                                     lane);
        }
    };

    // Codes are loaded two tiles ahead, low bytes once those of the tile before are used.
    struct ahead_reader {
        uint32_t slab, own_at, half_at, bounds_at; // the lane's bytes in the slab, and in the half that is multiplied
        uint32_t table[2];
        int lane;
        dense12_lane<T> both[2];
        uint32_t low[2][4], bounds[2];

        __device__ __forceinline__ explicit ahead_reader(const constants &weights) {
            for (int i = 0; i < 2; i++) table[i] = hidden(weights.table[i], threadIdx.x % WARP, 0);
        }
        template <int PARITY>
        __device__ __forceinline__ void read(int tile) {
            read_32(bounds[PARITY], bounds_at + tile * MACKO_SLAB_SLICES * 4);
            read_128(both[PARITY].codes, own_at + tile * TILE_BYTES + 2 * CHUNK);
        }
        __device__ __forceinline__ void open(uint32_t at, int slice, int own_lane) {
            slab = at;
            own_at = at + slice * MACKO_DENSE12_SLICE_BYTES + own_lane * MACKO_DENSE12_CHUNK;
            bounds_at = at + MACKO_DENSE12_BOUNDS_AT + slice * 4;
            lane = own_lane;
            read<0>(0);
        }
        __device__ __forceinline__ void start(bool inside) {
            const int tile = inside ? MACKO_SLAB_HALF_TILES : 0;
            if (inside) read<0>(tile);
            read<1>(tile + 1);
            both[0].find_list(slab, bounds[0]);
            half_at = own_at + tile * TILE_BYTES;
            read_128(low[0], half_at);
            read_128(low[1], half_at + CHUNK);
        }
        template <int TILE>
        __device__ __forceinline__ void read_ahead() {
            read<TILE % 2>((TILE + 2) % MACKO_SLAB_TILES);
        }
        template <int STEP, int NEXT>
        __device__ __forceinline__ void load_next() {
            if (STEP == 0) both[NEXT % 2].find_list(slab, bounds[NEXT % 2]);
            if (STEP == 0 && NEXT % 2 == 0) half_at = own_at + NEXT * TILE_BYTES;
            if (STEP == 1) read_128(low[0], half_at + NEXT % 2 * TILE_BYTES);
            if (STEP == 3) read_128(low[1], half_at + NEXT % 2 * TILE_BYTES + CHUNK);
        }
        template <int STEP, int PARITY>
        __device__ __forceinline__ void make(uint32_t (&a)[4][4], const constants &) {
            both[PARITY].template make<STEP>(a[STEP], low[STEP / 2][STEP % 2 * 2], low[STEP / 2][STEP % 2 * 2 + 1],
                                             table, lane);
        }
    };
};

template <typename RUN>
cudaError_t with_weight(const macko_dense12_matrix &m, const RUN &run) {
    const int64_t units = macko_slab_count(m.rows, m.cols) * m.slab_units;
    const auto of = [&](auto codec) {
        return run(slab_weight<decltype(codec)>{
            m.data, nullptr, m.rows, m.cols, m.slab_units, units, {{m.table[0], m.table[1]}}});
    };
    return m.dtype == MACKO_F16 ? of(dense12<__half>()) : of(dense12<__nv_bfloat16>());
}

} // namespace macko
