// Dense rows of a matrix of any codec, by the readers of products: a block's slabs come through a ring of stages as in
// ring_kernel.cuh, a warp decodes its tile's slice into operand A, the lanes exchange that so that each has neighbours of
// a row, and store 16 bytes at a time.
#pragma once

#include "multiply.h"
#include "ring_kernel.cuh"

namespace macko {
namespace {

using unpack_shape = ring_shape<8, MACKO_RING_WIDE>; // one ring of 16 warps; nothing is multiplied

// Where dense rows [first, stop) of `cols` columns go.
struct unpacked_rows {
    uint16_t *w;
    int64_t first, stop, cols;
    bool aligned; // whether 16 bytes can be stored at a time
};

// Lane 4 g + t has words 0 .. 3 and gives word k to lane 4 g + k, as its word t.
__device__ __forceinline__ void exchange_words(uint32_t (&v)[4], int lane) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & bit) continue;
            const uint32_t other = __shfl_xor_sync(FULL_WARP, lane & bit ? v[i] : v[i | bit], bit);
            if (lane & bit)
                v[i] = other;
            else
                v[i | bit] = other;
        }
}

// Elements of a row from `col` on, to 16 bytes where they can.
__device__ __forceinline__ void store_eight(const unpacked_rows &to, int64_t row, int64_t col, const uint32_t (&v)[4]) {
    if (row < to.first || row >= to.stop) return;
    uint16_t *const out = to.w + (row - to.first) * to.cols + col;
    if (to.aligned && col + 8 <= to.cols) {
        *(uint4 *)out = make_uint4(v[0], v[1], v[2], v[3]);
        return;
    }
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (col + k < to.cols) out[k] = (uint16_t)(v[k / 2] >> k % 2 * 16);
}

// Two elements of operand A with their row's scale.
template <class CODEC>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float scale) {
    using T = typename CODEC::T;
    if constexpr (!CODEC::SCALED) return pair;
    const float2 codes = to_float2<T>(pair);
    return from_float2<T>(codes.x * scale, codes.y * scale);
}

template <class CODEC>
__global__ void __launch_bounds__(unpack_shape::THREADS, 2)
    slab_unpack_kernel(const __grid_constant__ ring_task<CODEC> task, int first_slab, unpacked_rows to) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = __shfl_sync(FULL_WARP, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP,
              tile = warp / MACKO_SLAB_SLICES, slice = warp % MACKO_SLAB_SLICES;
    const int begin = first_slab + (int)macko_ring_share_at(&task.shares, blockIdx.x),
              end = first_slab + (int)macko_ring_share_at(&task.shares, blockIdx.x + 1);
    const uint32_t base = shared_address(shared);
    ring_fetch<CODEC, unpack_shape> fetch(task, begin, end, base, 0, 0);
    const auto fetch_stage = [&] {
        if (fetch.more) fetch.slab();
        commit_copies();
        fetch.advance();
    };
    for (int stage = 0; stage + 1 < task.stages; stage++) fetch_stage();
    typename CODEC::few_reader reader(task.weights, tile, slice, lane);
    uint32_t stage = fetch.ring, a[4][4];
    ring_walk here(begin, end, task.shares.slabs);
    do {
        wait_for_copies(task.stages - 2);
        named_barrier_sync(1, unpack_shape::THREADS);
        fetch_stage();
        const int64_t row = (int64_t)here.row_block * MACKO_SLAB_ROWS + slice * (MACKO_SLAB_ROWS / MACKO_SLAB_SLICES),
                      col = here.column() + tile * MACKO_SLAB_TILE_COLS;
        float scales[2] = {};
        if constexpr (CODEC::SCALED)
            for (int k = 0; k < 2; k++)
                if (row + lane / 4 + k * 8 < task.rows)
                    scales[k] = task.weights.scales[row + lane / 4 + k * 8] * CODEC::FOLD;
        const uint32_t slab = stage + CODEC::BASE;
        const auto step = [&](auto number) {
            constexpr int STEP = decltype(number)::value;
            reader.template load_next<STEP, 0>(slab, task.weights);
            reader.template make<STEP, 0>(a, task.weights);
        };
        prepare_tile<0>(reader, slab, task.weights);
        step(std::integral_constant<int, 0>());
        step(std::integral_constant<int, 1>());
        step(std::integral_constant<int, 2>());
        step(std::integral_constant<int, 3>());
#pragma unroll
        for (int i = 0; i < 4; i++) { // of a row lane / 4, or 8 further on, the tile's columns from 32 (i / 2) on
            uint32_t words[4];
            for (int k = 0; k < 4; k++)
                words[k] = scaled_pair<CODEC>(a[i / 2 * 2 + k / 2][k % 2 * 2 + i % 2], scales[i % 2]);
            exchange_words(words, lane);
            store_eight(to, row + lane / 4 + i % 2 * 8, col + i / 2 * 32 + lane % 4 * 8, words);
        }
        stage += task.stage_bytes;
        if (stage == fetch.ring_end) stage = fetch.ring;
    } while (here.advance(1));
    wait_copies<0>();
#endif
}

// Dense rows [first, first + count) of any codec's matrix, w [count, cols]; first and count are any.
template <class CODEC>
cudaError_t unpack_by_ring(const slab_weight<CODEC> &m, int64_t first, int64_t count, void *w, cudaStream_t stream) {
    if (!count || !m.cols) return cudaSuccess;
    device_info device;
    cudaError_t error = current_device(&device);
    if (!error) error = allow_all_shared_memory<slab_unpack_kernel<CODEC>>(device, 100);
    if (error) return error;
    if (device.major < 8) return cudaErrorNoKernelImageForDevice;
    const int64_t first_block = first / MACKO_SLAB_ROWS,
                  row_blocks = (first + count - 1) / MACKO_SLAB_ROWS - first_block + 1;
    ring_task<CODEC> task = ring_task_of(m);
    task.token_blocks = 1;
    task.x_at = task.stage_bytes = m.widest * MACKO_SLAB_UNIT;
    // Two blocks an SM where two stages of each fit: one decodes and stores while the other waits.
    const auto stages_in = [&](int bytes) {
        return std::min(4, (bytes - MACKO_SLAB_OVERREAD) / std::max(1, task.stage_bytes));
    };
    const int shared_bytes = ring_shared_bytes(device);
    const int half = std::min(shared_bytes, (device.shared_per_sm - device.shared_bytes + shared_bytes) / 2 - 1024);
    const int blocks = stages_in(half) < 2 ? 1 : 2;
    task.stages = stages_in(blocks > 1 ? half : shared_bytes);
    if (task.stages < 2) return cudaErrorInvalidValue; // two of the widest slabs there are fit 99 KB
    task.shares.slabs = (int)macko_slabs_across(m.cols);
    task.shares.all_slabs = row_blocks * task.shares.slabs;
    task.shares.blocks = (int)std::min<int64_t>(device.num_sms * blocks, task.shares.all_slabs);
    const unpacked_rows to = {(uint16_t *)w, first, first + count, m.cols, m.cols % 8 == 0 && (uintptr_t)w % 16 == 0};
    slab_unpack_kernel<CODEC>
        <<<(unsigned)task.shares.blocks, unpack_shape::THREADS, task.stages * task.stage_bytes + MACKO_SLAB_OVERREAD,
           stream>>>(task, (int)first_block * task.shares.slabs, to);
    return cudaGetLastError();
}

} // namespace

template <class MATRIX>
cudaError_t slab_unpack(const MATRIX &m, int64_t first, int64_t count, void *w, cudaStream_t stream) {
    return with_weight(m, [&](const auto &weight) { return unpack_by_ring(weight, first, count, w, stream); });
}

} // namespace macko
