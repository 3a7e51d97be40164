// The tile layout from dense rows, on CUDA. A warp owns a slice of a slab: 16 rows and 256 columns, in the
// order of tile.h.
#include "../../slab/slices.cuh"
#include "decode.cuh"

using namespace macko;

namespace {

// What a lane has of a slice of the dense w: pairs of neighbours, a word each, and masks of which elements are values.
struct slice_elements {
    uint32_t pairs[MACKO_SLAB_TILES][MACKO_SLAB_GROUPS][MACKO_SLAB_QUAD / 2];
    uint32_t masks[MACKO_SLAB_TILES];

    __device__ __forceinline__ void load(const uint16_t *w, int64_t rows, int64_t cols, const slice_of &from) {
        const bool whole = from.is_whole(rows, cols);
#pragma unroll
        for (int tile = 0; tile < MACKO_SLAB_TILES; tile++) {
            masks[tile] = 0;
#pragma unroll
            for (int j = 0; j < MACKO_SLAB_GROUPS; j++)
#pragma unroll
                for (int e = 0; e < MACKO_SLAB_QUAD; e += 2) {
                    const uint32_t pair =
                        load_pair(w, rows, cols, from.row + macko_slab_row(from.lane, e),
                                  from.col + tile * MACKO_SLAB_TILE_COLS + macko_slab_col(from.lane, j, e), whole);
                    pairs[tile][j][e / 2] = pair;
                    masks[tile] |= (uint32_t)((pair & 0x7fff) != 0) << (8 * e + j);
                    masks[tile] |= (uint32_t)((pair & 0x7fff0000) != 0) << (8 * (e + 1) + j);
                }
        }
    }
};

// What a slice's masks say of its values: the spill offsets of the lane's tails, and the rows that they take.
struct slice_plan {
    uint32_t spills[MACKO_TILE_STREAMS];
    int rows;

    __device__ __forceinline__ void find(const uint32_t (&masks)[MACKO_SLAB_TILES], int lane) {
        rows = 0;
#pragma unroll
        for (int stream = 0; stream < MACKO_TILE_STREAMS; stream++) {
            const uint32_t bits = (uint32_t)MACKO_TILE_STREAM_BITS << 4 * stream;
            const int head = __popc(masks[0] & bits) + __popc(masks[1] & bits);
            const int tail = __popc(masks[2] & bits) + __popc(masks[3] & bits);
            const int column = lane_with(place_among_lanes<32>(head, lane), place_among_lanes<32>(32 - tail, lane));
            const int above = __shfl_sync(FULL_WARP, head, column);
            spills[stream] = above * MACKO_TILE_ROW_BYTES + column * 4 + stream * 2;
            rows = max(rows, above + tail);
        }
        rows = __reduce_max_sync(FULL_WARP, rows);
    }
};

__global__ void __launch_bounds__(THREADS)
    count_slabs(const uint16_t *w, int64_t rows, int64_t cols, int32_t *offsets, macko_slab_totals *totals) {
    __shared__ int value_rows, stored;
    const slice_of from(cols);
    const int lane = from.lane;
    slice_elements own;
    own.load(w, rows, cols, from);
    slice_plan plan;
    plan.find(own.masks, lane);
    int count = 0;
    for (const uint32_t mask : own.masks) count += __popc(mask);
    count = __reduce_add_sync(FULL_WARP, count);
    if (threadIdx.x == 0) value_rows = stored = 0;
    __syncthreads();
    if (lane == 0) {
        atomicAdd(&value_rows, plan.rows);
        atomicAdd(&stored, count);
    }
    __syncthreads();
    if (threadIdx.x) return;
    offsets[blockIdx.x + 1] = macko_tile_units(value_rows);
    atomicAdd((unsigned long long *)&totals->stored, (unsigned long long)stored);
}

// A warp puts its slice together in shared memory, in which each lane's values have a bank of their own.
__global__ void __launch_bounds__(THREADS, 4)
    write_slabs(const int32_t *offsets, int64_t rows, int64_t cols, const uint16_t *w, uint8_t *data) {
    constexpr int MOST_ROWS = MACKO_TILE_MOST_ROWS / MACKO_SLAB_SLICES;
    __shared__ uint4 buffers[MACKO_SLAB_SLICES][MOST_ROWS * MACKO_TILE_ROW_BYTES / 16];
    __shared__ int value_rows[MACKO_SLAB_SLICES];
    const slice_of from(cols);
    const int slice = from.slice, lane = from.lane;
    slice_elements own;
    own.load(w, rows, cols, from);
    slice_plan plan;
    plan.find(own.masks, lane);
    if (lane == 0) value_rows[slice] = plan.rows;
    uint4 *const buffer = buffers[slice];
    for (int i = lane; i < plan.rows * (MACKO_TILE_ROW_BYTES / 16); i += WARP) buffer[i] = uint4{};
    __syncthreads();
    const uint32_t values = shared_address(buffer);
#pragma unroll
    for (int stream = 0; stream < MACKO_TILE_STREAMS; stream++) {
        uint32_t next = values + lane * 4 + stream * 2;
#pragma unroll
        for (int tile = 0; tile < MACKO_SLAB_TILES; tile++) {
            if (tile == MACKO_SLAB_TILES / 2) next = values + plan.spills[stream];
#pragma unroll
            for (int j = stream * MACKO_SLAB_GROUPS / 2; j < (stream + 1) * MACKO_SLAB_GROUPS / 2; j++)
#pragma unroll
                for (const uint32_t both : own.pairs[tile][j]) {
                    // No address is counted up in its register: the next one would wait until the store has read it.
                    const bool low = both & 0x7fff, high = both & 0x7fff0000;
                    const uint32_t to = next, to_high = to + low * MACKO_TILE_ROW_BYTES;
                    next = to_high + high * MACKO_TILE_ROW_BYTES;
                    if (low) store_shared_2(to, (uint16_t)both);
                    if (high) store_shared_2(to_high, (uint16_t)(both >> 16));
                }
        }
    }
    __syncwarp();
    uint8_t *const slab = data + (int64_t)offsets[blockIdx.x] * MACKO_SLAB_UNIT;
    int first = 0;
    for (int other = 0; other < slice; other++) first += value_rows[other];
#pragma unroll
    for (int tile = 0; tile < MACKO_SLAB_TILES; tile++)
        *(uint32_t *)(slab + slab_mask_at(0, tile, slice, lane)) = own.masks[tile];
    *(uint32_t *)(slab + MACKO_TILE_SPILLS_AT + (slice * MACKO_SLAB_LANES + lane) * 4) = plan.spills[0] | plan.spills[1]
                                                                                                              << 16;
    if (lane == 0) ((uint16_t *)(slab + MACKO_TILE_SLICES_AT))[slice] = (uint16_t)first;
    if (slice == 0 && lane >= 2) ((uint32_t *)(slab + MACKO_TILE_SLICES_AT))[lane] = 0; // after the four offsets
    uint4 *const to = (uint4 *)(slab + MACKO_TILE_VALUES_AT + first * MACKO_TILE_ROW_BYTES);
    for (int i = lane; i < plan.rows * (MACKO_TILE_ROW_BYTES / 16); i += WARP) to[i] = buffer[i];
}

} // namespace

cudaError_t macko_tile_count_cuda(const macko_tile_matrix *m, const void *w, int32_t *offsets,
                                  macko_slab_totals *totals, cudaStream_t stream) {
    return launch_slabs(m, stream, count_slabs, (const uint16_t *)w, m->rows, m->cols, offsets, totals);
}

cudaError_t macko_tile_write_cuda(const macko_tile_matrix *m, const void *w, uint8_t *data, cudaStream_t stream) {
    return launch_slabs(m, stream, write_slabs, m->offsets, m->rows, m->cols, (const uint16_t *)w, data);
}
