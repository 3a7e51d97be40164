// y = W x on CUDA from EC-CSR: the kernel of the EC-SpMV paper, in one launch and with a fixed order of all sums.
#include <cooperative_groups.h>
#include <stdlib.h>

#include <algorithm>

#include "../../csrc/core/cuda.cuh"
#include "ec.h"

using namespace macko;

namespace {

constexpr int MAX_WARPS = 12; // of a thread block of a tile, two a multiprocessor
constexpr int ROW_WARPS = 24; // of the one thread block a multiprocessor, where rows need no sums
constexpr int MAX_PARTS = 8;  // thread blocks a tile: the largest portable cluster

enum x_place { X_SHARED, X_GLOBAL }; // X_GLOBAL only where x does not fit

// What one warp reads of one set: blocks [block, block_end), which lie one after another in every array.
template <typename T>
struct ec_stretch {
    const T *values;        // the set's
    const uint32_t *deltas; // the set's
    const void *bases;      // the set's
    const int32_t *indptr, *row_indices;
    int block, block_end, column, column_end;
    int delta_bits, lanes, base_bytes;
};

__device__ __forceinline__ int load_base(const void *bases, int base_bytes, int64_t at) {
    return base_bytes == 2 ? __ldg((const uint16_t *)bases + at) : __ldg((const int32_t *)bases + at);
}

template <int BYTES>
__device__ __forceinline__ void copy(void *to, const void *from) {
    copy_async<BYTES>(shared_address(to), from);
}

// N values in the widest loads that their size allows.
template <typename T, int N>
struct ec_values {
    __align__(N * 2 < 16 ? N * 2 : 16) T v[N];
    __device__ __forceinline__ void load(const T *from) {
        if constexpr (N == 1)
            v[0] = *from;
        else if constexpr (N == 4)
            *(uint2 *)v = *(const uint2 *)from;
        else
#pragma unroll
            for (int i = 0; i < N / 8; i++) ((uint4 *)v)[i] = ((const uint4 *)from)[i];
    }
};

// Sums over the lanes of a piece. One row a piece: each of its lanes gets the sum. G rows a warp: each step halves the
// rows that a lane still carries, so lane l ends with row `row_of_lane`; 5 to 16 shuffles in place of 5 G.
template <int G>
__device__ __forceinline__ float reduce(float (&sum)[G], int lanes, int lane) {
#pragma unroll
    for (int step = 0; G >> step > 1; step++) {
        const int n = G >> (step + 1), off = 1 << step;
        const bool upper = lane & off;
#pragma unroll
        for (int i = 0; i < n; i++) {
            const float give = upper ? sum[i] : sum[i + n], keep = upper ? sum[i + n] : sum[i];
            sum[i] = keep + __shfl_xor_sync(FULL_WARP, give, off);
        }
    }
    for (int off = G; off < lanes; off *= 2) sum[0] += __shfl_xor_sync(FULL_WARP, sum[0], off);
    return sum[0];
}

template <int G>
__device__ __forceinline__ int row_of_lane(int lane) {
    int row = 0;
#pragma unroll
    for (int step = 0; G >> step > 1; step++) row += lane >> step & 1 ? G >> (step + 1) : 0;
    return row;
}

// A warp's pipeline of cp.async: stages of STEP chunks, about 4 KB. A stage is | values of its chunks | their deltas |.
constexpr int PIPELINE_BYTES = 4608;
template <int G, int V>
struct ec_pipeline {
    static constexpr int CHUNK = WARP * V;
    static constexpr int STEP = G == 1 ? 4 : G == 2 ? 2 : 1;
    static constexpr bool HOLDS_VALUES = G <= 8; // of 16 rows, which are rare, values are loaded where they are used
    static constexpr int VALUE_BYTES = HOLDS_VALUES ? CHUNK * G * 2 : 0; // of a chunk
    static constexpr int STAGE_BYTES = STEP * (VALUE_BYTES + CHUNK);     // deltas have at most 8 bits
    static constexpr int DEPTH = PIPELINE_BYTES / STAGE_BYTES < 8 ? PIPELINE_BYTES / STAGE_BYTES : 8;
};

// One warp over its stretch of one set. The chunks of all its blocks are one run in memory, so DEPTH steps are always on
// their way, across the blocks' borders too; bases, ends and rows are fetched a block ahead. add(row, sum) is called by
// one lane a row, in the order of the blocks. Its phases are lambdas: with `fetch` a struct's function ptxas 13.0 takes as
// many instructions and registers, but orders them in another way in 4 of 10 kernels.
template <typename T, x_place X, int G, int V, typename Add>
__device__ __forceinline__ void stream(const ec_stretch<T> &s, const T *xs, unsigned char *stages, int lane,
                                       const Add &add) {
    using P = ec_pipeline<G, V>;
    const int chunks = (s.column_end - s.column) / P::CHUNK;
    if (chunks == 0) return;
    const int words = V * s.delta_bits, bit = lane * words; // of a chunk's deltas; of a lane's first
    const bool straddles = (bit & 31) + words > 32;
    const uint32_t mask = (1u << s.delta_bits) - 1;
    const unsigned char *values = (const unsigned char *)(s.values + (int64_t)s.column * G);
    const unsigned char *deltas = (const unsigned char *)(s.deltas + (int64_t)(s.column / 32) * s.delta_bits);

    int fetched = 0;              // chunks asked for
    unsigned char *fill = stages; // the stage of the next
    unsigned char *const stages_end = stages + P::DEPTH * P::STAGE_BYTES;
    auto fetch = [&] {
        const int n = min(P::STEP, chunks - fetched);
        if (n > 0) {
            constexpr int PIECE = V == 1 ? 4 : 16; // bytes a copy
            constexpr int VALUE_PIECES = P::STEP * P::VALUE_BYTES / PIECE;
#pragma unroll
            for (int i = 0; i < VALUE_PIECES; i += WARP)
                if ((i + lane) * PIECE < n * P::VALUE_BYTES)
                    copy<PIECE>(fill + (i + lane) * PIECE, values + (i + lane) * PIECE);
            static_assert(P::STEP * P::CHUNK <= WARP * PIECE, "a warp copies a step's deltas at once");
            if (lane * PIECE < n * words * 4)
                copy<PIECE>(fill + P::STEP * P::VALUE_BYTES + lane * PIECE, deltas + lane * PIECE);
            values += P::STEP * P::CHUNK * G * 2;
            deltas += P::STEP * words * 4;
            fetched += P::STEP;
            fill = fill + P::STAGE_BYTES == stages_end ? stages : fill + P::STAGE_BYTES;
        }
        commit_copies();
    };
    __syncwarp(); // the stages may still be read for the set before
#pragma unroll 1
    for (int d = 0; d < P::DEPTH; d++) fetch();

    const int lanes_log2 = __ffs(s.lanes) - 1, pieces = G == 1 ? WARP >> lanes_log2 : 1;
    const bool writes = G == 1 ? (lane & (s.lanes - 1)) == 0 : lane < G;
    const int32_t *row_at =
        s.row_indices + (int64_t)s.block * pieces * G + (G == 1 ? lane >> lanes_log2 : row_of_lane<G>(lane));
    int block = s.block, end = s.indptr[block + 1], left = (end - s.column) / P::CHUNK;
    unsigned x_at = 2 * load_base(s.bases, s.base_bytes, (int64_t)block * WARP + lane); // bytes into x
    int row = writes ? *row_at : -1;
    int next_end = end, next_base = 0, next_row = -1;
    auto fetch_block = [&] { // what block + 1 begins with
        row_at += pieces * G;
        if (block + 1 >= s.block_end) return;
        next_end = s.indptr[block + 2];
        next_base = load_base(s.bases, s.base_bytes, (int64_t)(block + 1) * WARP + lane);
        if (writes) next_row = *row_at;
    };
    fetch_block();

    float sum[G] = {};
    auto end_block = [&] {
        const float total = reduce<G>(sum, s.lanes, lane);
        if (row >= 0) add(row, total);
        __syncwarp(); // the next block's rows may be these, in other lanes
#pragma unroll
        for (int k = 0; k < G; k++) sum[k] = 0;
        block++;
        left = (next_end - end) / P::CHUNK;
        end = next_end;
        x_at = 2 * next_base;
        row = next_row;
        fetch_block();
    };
    const unsigned char *stage = stages;
    auto add_chunk = [&](int chunk, int q) { // chunk q of the stage
        const uint32_t *word = (const uint32_t *)(stage + P::STEP * P::VALUE_BYTES) + q * words + (bit >> 5);
        uint32_t delta = __funnelshift_r(word[0], straddles ? word[1] : 0, bit);
        const T *value = P::HOLDS_VALUES ? (const T *)(stage + q * P::VALUE_BYTES) + lane * V * G
                                         : s.values + ((int64_t)s.column + (int64_t)chunk * P::CHUNK + lane * V) * G;
        constexpr int TOGETHER = V * G <= 16 ? V : 1; // columns whose values are loaded at once
#pragma unroll 1
        for (int j = 0; j < V; j += TOGETHER) {
            ec_values<T, TOGETHER * G> own;
            own.load(value + j * G);
#pragma unroll
            for (int c = 0; c < TOGETHER; c++) {
                x_at += 2 * (delta & mask);
                delta >>= s.delta_bits;
                const T *at = (const T *)((const char *)xs + x_at);
                const float xv = to_float(X == X_SHARED ? *at : __ldg(at));
#pragma unroll
                for (int k = 0; k < G; k++) sum[k] = fmaf(to_float(own.v[c * G + k]), xv, sum[k]);
            }
        }
    };
    for (int i = 0; i < chunks; i += P::STEP) {
        wait_copies<P::DEPTH - 1>();
        __syncwarp();
        if (P::STEP > 1 && left >= P::STEP) { // no block ends inside: loads of all its chunks at once
#pragma unroll
            for (int q = 0; q < P::STEP; q++) add_chunk(i + q, q);
            left -= P::STEP;
            if (left == 0) end_block();
        } else {
            const int n = min(P::STEP, chunks - i);
#pragma unroll 1
            for (int q = 0; q < n; q++) {
                add_chunk(i + q, q);
                if (--left == 0) end_block();
            }
        }
        stage = stage + P::STAGE_BYTES == stages_end ? stages : stage + P::STAGE_BYTES;
        __syncwarp();
        fetch();
    }
    wait_copies<0>();
}

// x to shared memory, in the order of the blocks' columns.
template <typename T>
__device__ __forceinline__ void load_x(const macko_ec_matrix &m, const T *x, T *xs) {
    if (m.col_order) {
        for (int c = threadIdx.x; c < m.cols; c += blockDim.x) xs[c] = x[macko_ec_column(m.col_order, m.cols, c)];
        return;
    }
    const int wide = (uintptr_t)x % 16 ? 0 : (int)(m.cols / 8);
    for (int i = threadIdx.x; i < wide; i += blockDim.x) ((uint4 *)xs)[i] = __ldg((const uint4 *)x + i);
    for (int c = wide * 8 + threadIdx.x; c < m.cols; c += blockDim.x) xs[c] = x[c];
}

template <typename T>
__device__ __forceinline__ ec_stretch<T> stretch_of(const macko_ec_matrix &m, const macko_ec_set &set, int s,
                                                    int4 share) {
    const int base_bytes = m.cols <= 65536 ? 2 : 4;
    return {(const T *)m.block_values + set.first_value,
            (const uint32_t *)(m.delta_indices + set.first_delta),
            (const char *)m.base_indices + set.first_block * WARP * base_bytes,
            m.block_indptr + set.first_block + s,
            m.row_indices + set.first_row,
            share.x,
            share.y,
            share.z,
            share.w,
            (int)set.delta_bits,
            (int)set.lanes,
            base_bytes};
}

// One set of single rows in which every row is once: a warp owns an equal stretch of all blocks and writes its rows.
template <typename T, x_place X>
__global__ void __launch_bounds__(ROW_WARPS *WARP, 1) spmv_rows(macko_ec_matrix m, const T *x, const T *bias, T *y) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    T *xs = (T *)(shared + warps * PIPELINE_BYTES);
    const macko_ec_set set = m.sets[0];
    const int64_t workers = (int64_t)gridDim.x * warps, worker = (int64_t)blockIdx.x * warps + warp;
    const int block = (int)(m.num_blocks * worker / workers), block_end = (int)(m.num_blocks * (worker + 1) / workers);
    const int4 share = {block, block_end, m.block_indptr[block], m.block_indptr[block_end]};
    if (X == X_SHARED) load_x(m, x, xs);
    __syncthreads();
    stream<T, X, 1, MACKO_EC_VECTOR>(
        stretch_of<T>(m, set, 0, share), X == X_SHARED ? xs : x, shared + warp * PIPELINE_BYTES, lane,
        [&](int row, float sum) { y[row] = from_float<T>(bias ? sum + to_float(bias[row]) : sum); });
}

// A cluster of `parts` thread blocks owns a tile (without clusters: leaves `partials` for `finish`). A warp owns an
// equal stretch of each set's blocks of the tile and one private sum a row; the sums of warps, then of thread blocks,
// are added in their order, so a result depends on the launch shape alone.
template <typename T, x_place X>
__global__ void __launch_bounds__(MAX_WARPS *WARP, 2)
    spmv(macko_ec_matrix m, int parts, const T *x, const T *bias, T *y, float *partials) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int tile = blockIdx.x / parts, part = blockIdx.x % parts;
    const int tile_rows = (int)m.tile_rows, first_row = tile * tile_rows;
    float *sums = (float *)shared;                                           // [warps, tile_rows]
    unsigned char *all_stages = (unsigned char *)(sums + warps * tile_rows); // [warps, PIPELINE_BYTES]
    T *xs = (T *)(all_stages + warps * PIPELINE_BYTES);
    __shared__ macko_ec_set sets[MACKO_EC_MAX_SETS];
    __shared__ int4
        shares[MAX_WARPS][MACKO_EC_MAX_SETS]; // of each warp in each set: first and last block, their columns

    // Lane s finds out what this warp has to do in set s. Stretches start elsewhere in each set, so that sets of fewer
    // blocks than warps do not burden the same warps.
    if (lane < m.num_sets) {
        const int64_t first_block = m.sets[lane].first_block;
        if (warp == 0) sets[lane] = m.sets[lane];
        const int32_t *tile_ptr = m.tile_ptr + lane * (m.tiles + 1) + tile;
        const int begin = tile_ptr[0], num = tile_ptr[1] - begin;
        const int workers = parts * warps, worker = (part * warps + warp + lane * (workers / 2 + 1)) % workers;
        const int block = begin + (int)((int64_t)num * worker / workers);
        const int block_end = begin + (int)((int64_t)num * (worker + 1) / workers);
        const int32_t *indptr = m.block_indptr + first_block + lane;
        shares[warp][lane] = {block, block_end, indptr[block], indptr[block_end]};
    }
    for (int i = threadIdx.x; i < warps * tile_rows; i += blockDim.x) sums[i] = 0;
    if (X == X_SHARED) load_x(m, x, xs);
    __syncthreads();

    const T *source = X == X_SHARED ? xs : x;
    for (int s = 0; s < m.num_sets; s++) {
        const macko_ec_set set = sets[s];
        const ec_stretch<T> todo = stretch_of<T>(m, set, s, shares[warp][s]);
        float *own = sums + warp * tile_rows;
        unsigned char *stages = all_stages + warp * PIPELINE_BYTES;
        const auto add = [=](int row, float sum) { own[row - first_row] += sum; };
        switch (set.vector == 1 ? 0 : set.height) {
        case 0: stream<T, X, 1, 1>(todo, source, stages, lane, add); break;
        case 1: stream<T, X, 1, MACKO_EC_VECTOR>(todo, source, stages, lane, add); break;
        case 2: stream<T, X, 2, MACKO_EC_VECTOR>(todo, source, stages, lane, add); break;
        case 4: stream<T, X, 4, MACKO_EC_VECTOR>(todo, source, stages, lane, add); break;
        case 8: stream<T, X, 8, MACKO_EC_VECTOR>(todo, source, stages, lane, add); break;
        case 16: stream<T, X, 16, MACKO_EC_VECTOR>(todo, source, stages, lane, add); break;
        }
    }

    __syncthreads();
    const int rows = (int)min(m.tile_rows, m.rows - first_row);
    auto put = [&](int row, float total) {
        y[first_row + row] = from_float<T>(bias ? total + to_float(bias[first_row + row]) : total);
    };
    for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        float total = 0;
        for (int w = 0; w < warps; w++) total += sums[w * tile_rows + row];
        if (parts == 1)
            put(row, total);
        else if (partials)
            partials[(int64_t)part * m.rows + first_row + row] = total;
        else
            sums[row] = total;
    }
#if __CUDA_ARCH__ >= 900
    if (parts == 1 || partials) return;
    auto cluster = cooperative_groups::this_cluster();
    cluster.sync();
    for (int row = part * (int)blockDim.x + threadIdx.x; row < rows; row += parts * blockDim.x) {
        float total = 0;
        for (int p = 0; p < parts; p++) total += cluster.map_shared_rank(sums, p)[row];
        put(row, total);
    }
    cluster.sync(); // nobody leaves while its sums are read
#endif
}

// The second launch where there are no clusters: a thread adds the parts of a row.
template <typename T>
__global__ void finish(int64_t rows, int parts, const float *partials, const T *bias, T *y) {
    const int64_t row = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float total = 0;
    for (int p = 0; p < parts; p++) total += partials[p * rows + row];
    y[row] = from_float<T>(bias ? total + to_float(bias[row]) : total);
}

struct ec_shape {
    int parts; // of a tile; 0: spmv_rows
    int blocks, warps, shared_bytes;
    bool clusters;
    x_place place;
};

ec_shape shape_of(const macko_ec_matrix &m, const device_info &device) {
    const int sms = device.num_sms, most_shared = device.shared_bytes;
    ec_shape shape = {};
    if (m.num_sets == 1 && m.num_rows >= m.rows && m.num_rows > m.num_blocks) {
        // One thread block a multiprocessor, so that x is copied once. As many warps as get equal numbers of blocks.
        const int64_t blocks = ceil_div(m.num_blocks, sms);
        shape.warps = (int)ceil_div(blocks, ceil_div(blocks, ROW_WARPS));
        shape.blocks = (int)std::min(ceil_div(m.num_blocks, shape.warps), (int64_t)sms);
        shape.shared_bytes = shape.warps * PIPELINE_BYTES;
    } else {
        // The most warps that are on the GPU all at once; 24 a multiprocessor have registers. Clusters of more than two
        // do not fill it to the last place: a tenth stays free. Too many tiles for that: small blocks, in several waves.
        // Against every choice of 1 to 8 parts and 4, 8, 12 warps on eight shapes (H200, 2026-11): within 9 % of the best.
        shape.clusters = device.major >= 9 && macko_knob_number(MACKO_KNOB_EC_CLUSTER, 1);
        shape.parts = 2;
        shape.warps = 8;
        int64_t most = 0;
        for (int parts = 1; parts <= MAX_PARTS && m.tiles <= 2 * sms; parts *= 2)
            for (int warps = 8; warps <= MAX_WARPS; warps += 4) {
                const int64_t bytes = warps * (m.tile_rows * 4 + PIPELINE_BYTES) + m.cols * 2 + 4096;
                const int64_t fit = std::max<int64_t>(1, std::min<int64_t>(24 / warps, most_shared / bytes)) * sms;
                const int64_t blocks = m.tiles * parts;
                if (blocks <= (parts > 2 ? fit * 9 / 10 : fit) && blocks * warps > most) {
                    most = blocks * warps;
                    shape.parts = parts;
                    shape.warps = warps;
                }
            }
        shape.shared_bytes = shape.warps * ((int)m.tile_rows * 4 + PIPELINE_BYTES);
    }
    shape.place = shape.shared_bytes + (m.cols + 8) * 2 <= most_shared - 4096 ? X_SHARED : X_GLOBAL;
    if (shape.place == X_SHARED) shape.shared_bytes += (int)(m.cols + 8) * 2;
    return shape;
}

template <typename T, x_place X>
cudaError_t launch_tiles(const macko_ec_matrix &m, const device_info &device, const ec_shape &shape, const T *x,
                         const T *bias, T *y, float *partials, cudaStream_t stream) {
    cudaError_t error = allow_all_shared_memory<spmv<T, X>>(device);
    if (error) return error;
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {(unsigned)shape.parts, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(m.tiles * shape.parts));
    config.blockDim = dim3(shape.warps * WARP);
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = shape.clusters && shape.parts > 1;
    if ((error =
             cudaLaunchKernelEx(&config, spmv<T, X>, m, shape.parts, x, bias, y, shape.clusters ? nullptr : partials)))
        return error;
    if (!shape.clusters && shape.parts > 1)
        finish<T><<<ceil_div(m.rows, 128), 128, 0, stream>>>(m.rows, shape.parts, partials, bias, y);
    return cudaGetLastError();
}

template <typename T, x_place X>
cudaError_t launch_rows(const macko_ec_matrix &m, const device_info &device, const ec_shape &shape, const T *x,
                        const T *bias, T *y, cudaStream_t stream) {
    const cudaError_t error = allow_all_shared_memory<spmv_rows<T, X>>(device);
    if (error) return error;
    spmv_rows<T, X><<<shape.blocks, shape.warps * WARP, shape.shared_bytes, stream>>>(m, x, bias, y);
    return cudaGetLastError();
}

template <typename T>
cudaError_t launch(const macko_ec_matrix &m, const void *x_any, const void *bias_any, void *y_any, float *partials,
                   cudaStream_t stream) {
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    const ec_shape shape = shape_of(m, device);
    const T *x = (const T *)x_any, *bias = (const T *)bias_any;
    T *y = (T *)y_any;
    if (shape.parts == 0) {
        const auto run = shape.place == X_SHARED ? launch_rows<T, X_SHARED> : launch_rows<T, X_GLOBAL>;
        return run(m, device, shape, x, bias, y, stream);
    }
    const auto run = shape.place == X_SHARED ? launch_tiles<T, X_SHARED> : launch_tiles<T, X_GLOBAL>;
    return run(m, device, shape, x, bias, y, partials, stream);
}

} // namespace

int64_t macko_ec_spmv_partials(const macko_ec_matrix *m) {
    device_info device;
    if (current_device(&device)) return 0; // the launch says so
    const ec_shape shape = shape_of(*m, device);
    return shape.clusters || shape.parts <= 1 ? 0 : shape.parts * m->rows;
}

cudaError_t macko_ec_spmv_cuda(const macko_ec_matrix *m, const void *x, const void *bias, void *y, float *partials,
                               cudaStream_t stream) {
    if (!m->rows) return cudaSuccess;
    return (m->dtype == MACKO_F16 ? launch<__half> : launch<__nv_bfloat16>)(*m, x, bias, y, partials, stream);
}
