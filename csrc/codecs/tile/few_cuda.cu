// Up to 64 tokens on CUDA for the tile layout: few_kernel.cuh, and the same product where there is no wgmma.
#include "../../slab/few_kernel.cuh"
#include "codec.cuh"

namespace macko {
namespace {

static_assert(densest_has_plan<sparse16<__half>>(MACKO_TILE_VALUES_AT + MACKO_TILE_MOST_ROWS * MACKO_TILE_ROW_BYTES));

// With 64 tokens, where no row block is split.
constexpr int stages_of_64(int slab_bytes) {
    const int tokens_bytes = MACKO_SLAB_TILES * 64 * MACKO_SLAB_TILE_COLS * 2;
    return (227 * 1024 - BARRIER_BYTES - few_shape<64, sparse16<__half>>::SUMS_BYTES) /
           ((int)ceil_div(slab_bytes, 1024) * 1024 + tokens_bytes);
}
static_assert(stages_of_64(MACKO_TILE_FOUR_STAGES) == 4 && stages_of_64(MACKO_TILE_FOUR_STAGES + 1) == 3);

// The same product where there is no wgmma: mma.sync, and cp.async by all threads. A block owns a row block and OCTETS
// x 8 tokens; four groups of four warps take a tile each of a stage, which is a slab. Tokens are read through L1.
constexpr int MMA_THREADS = MACKO_SLAB_TILES * MACKO_SLAB_SLICES * WARP;

template <typename T, int OCTETS>
__global__ void __launch_bounds__(MMA_THREADS)
    tile_mma_kernel(const __grid_constant__ few_task<sparse16<T>> task, const uint16_t *x, int64_t x_stride, int cols) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = shared_address(shared);
    const int lane = threadIdx.x % WARP, slice = threadIdx.x / WARP % MACKO_SLAB_SLICES;
    const int tile_index = threadIdx.x / (WARP * MACKO_SLAB_SLICES);
    const int32_t *offsets = task.offsets + (int64_t)blockIdx.x * task.slabs;
    const int stages = task.slabs, first_token = blockIdx.y * OCTETS * 8;
    const auto fetch = [&](int stage) {
        if (stage < stages) {
            const int from = offsets[stage], units = offsets[stage + 1] - from;
            for (int i = threadIdx.x; i < units * MACKO_SLAB_UNIT / 16; i += MMA_THREADS)
                copy_async<16>(base + stage % task.stages * task.stage_bytes + i * 16,
                               task.data + (int64_t)from * MACKO_SLAB_UNIT + i * 16);
        }
        commit_copies();
    };
    const tile_numbers numbers(lane);
    float sums[OCTETS][4] = {};
    for (int stage = 0; stage + 1 < task.stages; stage++) fetch(stage);
    for (int stage = 0; stage < stages; stage++) {
        if (task.stages >= 4)
            wait_copies<2>();
        else
            wait_copies<0>();
        __syncthreads();
        fetch(stage + task.stages - 1);
        const int k_tile = stage * MACKO_SLAB_TILES + tile_index;
        const uint32_t slab = base + stage % task.stages * task.stage_bytes;
        tile_streams streams;
        tile_lane tile, before;
        streams.begin(slab, slice, lane);
        tile.read(slab_mask_at(slab, tile_index, slice, lane));
        if (tile_index >= MACKO_SLAB_TILES / 2) streams.spill(task.weights);
        if (tile_index % 2) {
            before.read(slab_mask_at(slab, tile_index - 1, slice, lane));
            streams.skip(before.mask);
        }
        tile.begin(streams.at);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t a[4], values[2][MACKO_SLAB_QUAD];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                tile.load(2 * step + half, values[half], task.weights);
                tile.place(2 * step + half, values[half], a[2 * half], a[2 * half + 1], numbers, task.weights);
            }
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++) {
                const int token = first_token + octet * 8 + lane / 4;
                uint32_t b[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int col = k_tile * MACKO_SLAB_TILE_COLS + step * 16 + half * 8 + lane % 4 * 2;
                    b[half] = 0;
                    if (token < task.tokens && col < cols) b[half] = *(const uint32_t *)(x + token * x_stride + col);
                    if (col + 1 == cols) b[half] &= 0xffff;
                }
                mma<T>(sums[octet], a, b[0], b[1]);
            }
        }
    }
    // The groups' sums, added in order by the first.
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    float *others = (float *)shared;
    if (tile_index) {
#pragma unroll
        for (int i = 0; i < OCTETS * 4; i++)
            others[((tile_index - 1) * OCTETS * 4 + i) * 128 + slice * WARP + lane] = sums[i / 4][i % 4];
    }
    __syncthreads();
    if (tile_index) return;
    const int64_t first_row = (int64_t)blockIdx.x * MACKO_SLAB_ROWS;
    const int output = macko_slab_output_of(&task.y, first_row);
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            for (int other = 0; other < MACKO_SLAB_TILES - 1; other++)
                sums[octet][i] += others[((other * OCTETS + octet) * 4 + i) * 128 + slice * WARP + lane];
        store_four(task, output, first_row, slice * WARP + lane, first_token / 8 + octet, sums[octet]);
    }
#endif
}

template <typename T, int OCTETS>
cudaError_t launch_mma(const macko_tile_matrix &m, const slab_product &p, const device_info &device) {
    if (const cudaError_t error = allow_all_shared_memory<tile_mma_kernel<T, OCTETS>>(device)) return error;
    few_task<sparse16<T>> task{};
    task.data = m.data;
    task.offsets = m.offsets;
    task.bias = p.bias;
    task.y = p.y;
    task.rows = m.rows;
    task.tokens = (int)p.tokens;
    task.slabs = (int)macko_slabs_across(m.cols);
    task.stage_bytes = m.widest * MACKO_SLAB_UNIT;
    task.stages = device.shared_bytes / task.stage_bytes < 4 ? 2 : 4;
    const int sums_bytes = (MACKO_SLAB_TILES - 1) * OCTETS * 4 * 128 * 4;
    const int shared_bytes = std::max(task.stages * task.stage_bytes + MACKO_SLAB_OVERREAD, sums_bytes);
    if (shared_bytes > device.shared_bytes) return cudaErrorInvalidValue;
    const dim3 grid((unsigned)macko_slab_row_blocks(m.rows), (unsigned)ceil_div(p.tokens, OCTETS * 8));
    tile_mma_kernel<T, OCTETS>
        <<<grid, MMA_THREADS, shared_bytes, p.stream>>>(task, (const uint16_t *)p.x, p.x_stride, (int)m.cols);
    return cudaGetLastError();
}

} // namespace

template <>
cudaError_t slab_few(const macko_tile_matrix &m, const slab_product &p) {
    if (!m.rows || !p.tokens) return cudaSuccess;
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    return with_weight(m, [&](const auto &weight) {
        using T = typename std::decay_t<decltype(weight)>::T;
        if (has_wgmma(device.major)) return multiply_few(weight, p);
        const auto mma = p.tokens <= 8    ? launch_mma<T, 1>
                         : p.tokens <= 16 ? launch_mma<T, 2>
                         : p.tokens <= 32 ? launch_mma<T, 4>
                                          : launch_mma<T, 8>;
        return mma(m, p, device);
    });
}

} // namespace macko
