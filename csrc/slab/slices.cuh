// What packing has in common on CUDA, for every codec: a thread block owns a slab, a warp a slice
// of it, 16 rows and 256 columns.
#pragma once

#include "../core/cuda.cuh"
#include "slab.h"

namespace macko {

constexpr int SLICE_ROWS = MACKO_SLAB_ROWS / MACKO_SLAB_SLICES;
constexpr int THREADS = MACKO_SLAB_SLICES * WARP;
constexpr int STEP_ELEMENTS = 8; // of a lane
constexpr int COUNT_THREADS = 512;

// A warp's slice of the thread block's slab of the dense w.
struct slice_of {
    int64_t row, col; // its first
    int slice, lane;

    __device__ __forceinline__ explicit slice_of(int64_t cols) : slice(threadIdx.x / WARP), lane(threadIdx.x % WARP) {
        const int64_t slabs = macko_slabs_across(cols);
        row = blockIdx.x / slabs * MACKO_SLAB_ROWS + slice * SLICE_ROWS;
        col = blockIdx.x % slabs * MACKO_SLAB_COLS;
    }
    // Whether pairs of it can be read without a look at where they are.
    __device__ __forceinline__ bool is_whole(int64_t rows, int64_t cols) const {
        return row + SLICE_ROWS <= rows && col + MACKO_SLAB_COLS <= cols && cols % 2 == 0;
    }
};

// A thread block a slab.
template <typename MATRIX, typename... PARAMETERS, typename... ARGUMENTS>
cudaError_t launch_slabs(const MATRIX *m, cudaStream_t stream, void (*kernel)(PARAMETERS...), ARGUMENTS... arguments) {
    const int64_t slabs = macko_slab_count(m->rows, m->cols);
    if (slabs) kernel<<<(unsigned)slabs, THREADS, 0, stream>>>(arguments...);
    return cudaGetLastError();
}

// Neighbours of w [rows, cols], the left one lower; +0.0 outside of the matrix.
__device__ __forceinline__ uint32_t load_pair(const uint16_t *w, int64_t rows, int64_t cols, int64_t r, int64_t c,
                                              bool whole) {
    const uint16_t *element = w + r * cols + c;
    uint32_t pair = 0;
    if (whole) {
        pair = *(const uint32_t *)element;
    } else if (r < rows) {
        if (c < cols) pair = element[0];
        if (c + 1 < cols) pair |= (uint32_t)element[1] << 16;
    }
    return pair;
}

// A lane's elements of a step, pairs of neighbours; +0.0 outside of the matrix.
struct step_elements {
    uint32_t pairs[STEP_ELEMENTS / 2];

    __device__ __forceinline__ void load(const uint16_t *w, int64_t rows, int64_t cols, const slice_of &from, int tile,
                                         int step) {
        const bool whole = from.is_whole(rows, cols);
#pragma unroll
        for (int k = 0; k < STEP_ELEMENTS / 2; k++) {
            const int e = 2 * k % MACKO_SLAB_QUAD, j = 2 * step + 2 * k / MACKO_SLAB_QUAD;
            pairs[k] = load_pair(w, rows, cols, from.row + macko_slab_row(from.lane, e),
                                 from.col + tile * MACKO_SLAB_TILE_COLS + macko_slab_col(from.lane, j, e), whole);
        }
    }
    __device__ __forceinline__ uint32_t operator[](int i) const {
        return pairs[i / 2] >> 16 * (i % 2) & 0xffff;
    }
};

// A lane's place among the lanes by `key` (below 2 * HIGHEST, a power of two), of equal ones the lower lane first.
template <uint32_t HIGHEST>
__device__ __forceinline__ int place_among_lanes(uint32_t key, int lane) {
    uint32_t equal = FULL_WARP, below = 0;
#pragma unroll
    for (uint32_t bit = HIGHEST; bit; bit /= 2) {
        const uint32_t set = __ballot_sync(FULL_WARP, key & bit);
        if (key & bit) below |= equal & ~set;
        equal &= key & bit ? set : ~set;
    }
    return __popc(below | (equal & ((1u << lane) - 1)));
}

// Which lane has this number; each lane has another one of 0 .. 31.
__device__ __forceinline__ int lane_with(int own, int wanted) {
    uint32_t lanes = FULL_WARP;
#pragma unroll
    for (int bit = 1; bit < WARP; bit *= 2) {
        const uint32_t set = __ballot_sync(FULL_WARP, own & bit);
        lanes &= wanted & bit ? set : ~set;
    }
    return __ffs(lanes) - 1;
}

// Of streams of bytes in columns (columns_cpu.h), by masks of what is in them: where a lane's tail begins, and how many rows
// the slice's values take.
struct slice_plan {
    int byte, column, rows;

    __device__ __forceinline__ void find(const uint32_t (&stream)[MACKO_SLAB_TILES], int lane) {
        constexpr int HALF_MOST = MACKO_SLAB_TILES / 2 * 32;
        const int head = __popc(stream[0]) + __popc(stream[1]), tail = __popc(stream[2]) + __popc(stream[3]);
        column = lane_with(place_among_lanes<64>(head, lane), place_among_lanes<64>(HALF_MOST - tail, lane));
        byte = __shfl_sync(FULL_WARP, head, column);
        rows = __reduce_max_sync(FULL_WARP, (byte + tail + 3) / 4);
    }
};

// Of the elements of a step that lanes have in their masks: how many the lower lanes have, and the warp.
struct listed_ranks {
    uint32_t before = 0, all = 0;

    __device__ __forceinline__ listed_ranks(uint32_t mask, int lane) {
#pragma unroll
        for (int i = 0; i < STEP_ELEMENTS; i++) {
            const uint32_t lanes = __ballot_sync(FULL_WARP, mask >> i & 1);
            before += __popc(lanes & ((1u << lane) - 1));
            all += __popc(lanes);
        }
    }
};

// A warp writes the list of a slice of a tile of w from `next` on, by step, lane and element: entry(place, value) of each
// element that has bit 8 step + i in its lane's `listed`. Gives where the list ends.
template <class ENTRY>
__device__ __forceinline__ uint32_t *write_list(const uint16_t *w, int64_t cols, const slice_of &from, int tile,
                                                uint32_t listed, uint32_t *next, const ENTRY &entry) {
    for (int step = 0; step < MACKO_SLAB_GROUPS / 2; step++) {
        const uint32_t mask = listed >> STEP_ELEMENTS * step & 255;
        const listed_ranks ranks(mask, from.lane);
        uint32_t *to = next + ranks.before;
        for (int i = 0; mask >> i; i++) { // few lanes have any
            if (!(mask >> i & 1)) continue;
            const int e = i % MACKO_SLAB_QUAD, j = 2 * step + i / MACKO_SLAB_QUAD;
            const int64_t row = from.row + macko_slab_row(from.lane, e);
            const int64_t col = from.col + tile * MACKO_SLAB_TILE_COLS + macko_slab_col(from.lane, j, e);
            *to++ = entry((uint32_t)(step << 8 | from.lane << 3 | i), (uint32_t)w[row * cols + col]);
        }
        next += ranks.all;
    }
    return next;
}

// counts[h] += elements of which find(element, count) calls count(h); for a thread block of COUNT_THREADS. Each lane has a
// column of counters, so no two of a warp count in one bank.
template <int HIGHS, class FIND>
__device__ __forceinline__ void count_elements(const uint16_t *w, int64_t elements, uint64_t *counts,
                                               const FIND &find) {
    __shared__ uint32_t own[HIGHS][WARP];
    const int lane = threadIdx.x % WARP;
    for (int i = threadIdx.x; i < HIGHS * WARP; i += COUNT_THREADS) own[i / WARP][i % WARP] = 0;
    __syncthreads();
    const int64_t first = (int64_t)blockIdx.x * COUNT_THREADS + threadIdx.x,
                  stride = (int64_t)gridDim.x * COUNT_THREADS;
    const auto add = [&](uint32_t value) { find(value, [&](int high) { atomicAdd(&own[high][lane], 1u); }); };
    for (int64_t i = first; i < elements / 8; i += stride) {
        const uint4 eight = load_stream((const uint4 *)w + i);
        for (const uint32_t pair : {eight.x, eight.y, eight.z, eight.w}) {
            add(pair & 0xffff);
            add(pair >> 16);
        }
    }
    if (first < elements % 8) add(w[elements / 8 * 8 + first]);
    __syncthreads();
    if (threadIdx.x >= HIGHS) return;
    uint64_t sum = 0;
    for (int i = 0; i < WARP; i++) sum += own[threadIdx.x][(i + threadIdx.x) % WARP];
    if (sum) atomicAdd((unsigned long long *)&counts[threadIdx.x], (unsigned long long)sum);
}

// Thread blocks for that.
inline unsigned count_blocks(int64_t elements) {
    const int64_t blocks = ceil_div(elements, COUNT_THREADS * 64), most = 1024;
    return (unsigned)(blocks < most ? blocks : most);
}

} // namespace macko
