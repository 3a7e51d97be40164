// The sparse11 layout from dense rows, on CUDA. A thread block owns a slab, a warp a slice of it: 16 rows and
// 256 columns, in the order of sparse11.h.
#include "../../slab/slices.cuh"
#include "sparse11.h"

using namespace macko;

namespace {

constexpr int TILES = MACKO_SLAB_TILES, STEPS = MACKO_SLAB_STEPS, WORDS = MACKO_SPARSE11_WORDS;
constexpr int HIGHS = 256;
constexpr uint32_t NO_CODE = 255; // of a value that is listed

// The code of each high byte; two a thread.
__device__ __forceinline__ void find_codes(const macko_sparse11_matrix &m, uint8_t *codes) {
    for (int high = threadIdx.x; high < HIGHS; high += THREADS) {
        uint32_t code = NO_CODE;
#pragma unroll
        for (int i = 1; i < MACKO_SLAB_TABLE; i++)
            if (high && (m.table[i / 4] >> 8 * (i % 4) & 255) == high) code = i;
        codes[high] = (uint8_t)code;
    }
    __syncthreads();
}

// A lane's elements of a tile.
struct tile_elements {
    step_elements steps[STEPS];

    __device__ __forceinline__ void load(const macko_sparse11_matrix &m, const uint16_t *w, const slice_of &from,
                                         int tile) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) steps[step].load(w, m.rows, m.cols, from, tile, step);
    }
    // 0: it is no value.
    __device__ __forceinline__ uint32_t code(macko_dtype dtype, int step, int i, const uint8_t *codes) const {
        const uint32_t own = steps[step][i];
        if (macko_sparse11_has_low_bits(dtype, own)) return NO_CODE;
        return own & 0x7fff ? codes[macko_sparse11_split(dtype, own) >> 8] : 0;
    }
};

// What a lane has of a slice: which elements are in its stream, and which are listed; bit 8 step + i.
struct slice_masks {
    uint32_t stream[TILES], listed[TILES];

    __device__ __forceinline__ void find(const macko_sparse11_matrix &m, const uint16_t *w, const slice_of &from,
                                         const uint8_t *codes) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            tile_elements elements;
            elements.load(m, w, from, tile);
            stream[tile] = listed[tile] = 0;
#pragma unroll
            for (int bit = 0; bit < STEPS * STEP_ELEMENTS; bit++) {
                const uint32_t code = elements.code(m.dtype, bit / STEP_ELEMENTS, bit % STEP_ELEMENTS, codes);
                stream[tile] |= (uint32_t)(code && code != NO_CODE) << bit;
                listed[tile] |= (uint32_t)(code == NO_CODE) << bit;
            }
        }
    }
};

__global__ void __launch_bounds__(COUNT_THREADS)
    count_highs(const macko_sparse11_matrix m, const uint16_t *w, uint64_t *counts) {
    count_elements<HIGHS>(w, m.rows * m.cols, counts, [&](uint32_t value, const auto &count) {
        if (value & 0x7fff && !macko_sparse11_has_low_bits(m.dtype, value))
            count(macko_sparse11_split(m.dtype, value) >> 8);
    });
}

__global__ void __launch_bounds__(THREADS)
    count_slabs(const macko_sparse11_matrix m, const uint16_t *w, int32_t *offsets, macko_slab_totals *totals) {
    __shared__ uint8_t codes[HIGHS];
    __shared__ int value_rows, words, stored, listed;
    if (threadIdx.x == 0) value_rows = words = stored = listed = 0;
    find_codes(m, codes);
    const slice_of from(m.cols);
    slice_masks own;
    own.find(m, w, from, codes);
    slice_plan plan;
    plan.find(own.stream, from.lane);
    int own_words = 0, own_stored = 0, own_listed = 0;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int count = __reduce_add_sync(FULL_WARP, __popc(own.listed[tile]));
        own_words += macko_sparse11_words(count);
        own_listed += count;
        own_stored += __popc(own.stream[tile]);
    }
    own_stored = __reduce_add_sync(FULL_WARP, own_stored) + own_listed;
    if (from.lane == 0) {
        atomicAdd(&value_rows, plan.rows);
        atomicAdd(&words, own_words);
        atomicAdd(&stored, own_stored);
        atomicAdd(&listed, own_listed);
    }
    __syncthreads();
    if (threadIdx.x) return;
    offsets[blockIdx.x + 1] = macko_sparse11_units(value_rows, words);
    atomicAdd((unsigned long long *)&totals->stored, (unsigned long long)stored);
    if (!listed) return;
    atomicAdd((unsigned long long *)&totals->listed, (unsigned long long)listed);
    atomicMax((unsigned long long *)&totals->fullest, (unsigned long long)listed);
}

// A warp puts its slice's values together in shared memory, in which each lane's column has a bank of its own.
__global__ void __launch_bounds__(THREADS)
    write_slabs(const macko_sparse11_matrix m, const uint16_t *w, uint8_t *data) {
    constexpr int ROW_CHUNKS = MACKO_SPARSE11_ROW_BYTES / 16, MOST_ROWS = MACKO_SPARSE11_MOST_ROWS / MACKO_SLAB_SLICES;
    __shared__ uint4 buffers[MACKO_SLAB_SLICES][MOST_ROWS * ROW_CHUNKS];
    __shared__ uint8_t codes[HIGHS];
    __shared__ int slice_rows[MACKO_SLAB_SLICES], listed[MACKO_SLAB_TILE_SLICES];
    find_codes(m, codes);
    const slice_of from(m.cols);
    slice_masks own;
    own.find(m, w, from, codes);
    slice_plan plan;
    plan.find(own.stream, from.lane);
    if (from.lane == 0) slice_rows[from.slice] = plan.rows;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int count = __reduce_add_sync(FULL_WARP, __popc(own.listed[tile]));
        if (from.lane == 0) listed[tile * MACKO_SLAB_SLICES + from.slice] = count;
    }
    uint4 *const buffer = buffers[from.slice];
    for (int i = from.lane; i < plan.rows * ROW_CHUNKS; i += WARP) buffer[i] = uint4{};
    __syncthreads();

    const int32_t *const offset = m.offsets + blockIdx.x;
    uint8_t *const slab = data + (int64_t)offset[0] * MACKO_SLAB_UNIT;
    int place = 0, column = from.lane;
    for (int tile = 0; tile < TILES; tile++) {
        if (tile == TILES / 2) place = plan.byte, column = plan.column;
        tile_elements elements;
        elements.load(m, w, from, tile);
        uint32_t words[WORDS] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int n = 0; n < STEP_ELEMENTS; n++) {
                const int i = macko_slab_nth_element(n);
                uint32_t code = elements.code(m.dtype, step, i, codes);
                if (code == NO_CODE) code = 0;
                if (step < WORDS)
                    words[step % WORDS] |= code << 4 * i;
                else
                    for (int k = 0; k < WORDS; k++) words[k] |= (code >> k & 1) << (4 * i + 3);
                if (code) {
                    ((uint8_t *)buffer)[place / 4 * MACKO_SPARSE11_ROW_BYTES + column * 4 + place % 4] =
                        (uint8_t)macko_sparse11_split(m.dtype, elements.steps[step][i]);
                    place++;
                }
            }
        uint32_t *const to =
            (uint32_t *)(slab + (tile * MACKO_SLAB_SLICES + from.slice) * MACKO_SPARSE11_SLICE_BYTES) + from.lane;
        for (int k = 0; k < WORDS; k++) to[k * WARP] = words[k];
    }
    ((uint32_t *)(slab + MACKO_SPARSE11_STARTS_AT))[from.slice * WARP + from.lane] =
        plan.byte | plan.column * 4 << 8 | __popc(own.stream[0]) << 16 | __popc(own.stream[2]) << 24;
    int values_at = MACKO_SPARSE11_VALUES_AT, list_at = values_at;
    for (int slice = 0; slice < MACKO_SLAB_SLICES; slice++) {
        if (slice < from.slice) values_at += slice_rows[slice] * MACKO_SPARSE11_ROW_BYTES;
        list_at += slice_rows[slice] * MACKO_SPARSE11_ROW_BYTES;
    }
    __syncwarp();
    for (int i = from.lane; i < plan.rows * ROW_CHUNKS; i += WARP) ((uint4 *)(slab + values_at))[i] = buffer[i];

    // The list. A thread for each tile_slice's word; then each warp the places of its own words_at.
    const auto list_of = [&](int tile_slice) { // where its places begin
        int at = list_at;
        for (int other = 0; other < tile_slice; other++) at += macko_sparse11_words(listed[other]) * 4;
        return at;
    };
    uint32_t *const words_at = (uint32_t *)(slab + MACKO_SPARSE11_SLICES_AT);
    if (from.lane < TILES) {
        const int tile_slice = from.lane * MACKO_SLAB_SLICES + from.slice;
        words_at[tile_slice] = values_at | (listed[tile_slice] ? list_of(tile_slice) : (int)MACKO_SPARSE11_END_AT)
                                               << 16;
    }
    if (from.slice == 0 && from.lane >= MACKO_SLAB_TILE_SLICES)
        words_at[from.lane] = from.lane == MACKO_SLAB_TILE_SLICES ? MACKO_SPARSE11_END : 0;
    const int end = (offset[1] - offset[0]) * MACKO_SLAB_UNIT;
    if (from.slice == 1)
        for (int at = list_of(MACKO_SLAB_TILE_SLICES) + from.lane * 4; at < end; at += WARP * 4)
            *(uint32_t *)(slab + at) = 0;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int tile_slice = tile * MACKO_SLAB_SLICES + from.slice;
        if (!listed[tile_slice]) continue;
        uint32_t *const next =
            write_list(w, m.cols, from, tile, own.listed[tile], (uint32_t *)(slab + list_of(tile_slice)),
                       [](uint32_t place, uint32_t value) { return place << 16 | value; });
        if (from.lane == 0) *next = MACKO_SPARSE11_END;
    }
}

} // namespace

cudaError_t macko_sparse11_histogram_cuda(const macko_sparse11_matrix *m, const void *w, int64_t counts[256],
                                          cudaStream_t stream) {
    const int64_t elements = m->rows * m->cols;
    if (elements)
        count_highs<<<count_blocks(elements), COUNT_THREADS, 0, stream>>>(*m, (const uint16_t *)w, (uint64_t *)counts);
    return cudaGetLastError();
}

cudaError_t macko_sparse11_count_cuda(const macko_sparse11_matrix *m, const void *w, int32_t *offsets,
                                      macko_slab_totals *totals, cudaStream_t stream) {
    return launch_slabs(m, stream, count_slabs, *m, (const uint16_t *)w, offsets, totals);
}

cudaError_t macko_sparse11_write_cuda(const macko_sparse11_matrix *m, const void *w, uint8_t *data,
                                      cudaStream_t stream) {
    return launch_slabs(m, stream, write_slabs, *m, (const uint16_t *)w, data);
}
