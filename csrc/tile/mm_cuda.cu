// tile_mm on CUDA: y = x W^T, one kernel for up to 128 tokens; for more see gemm_cuda.cu.
//
// A warpgroup decodes a tile into the registers of operand A, 16 columns at a time, and multiplies it with the tokens in
// shared memory (wgmma, fp32 sums) while it decodes the next ones. No x is gathered and no dense tile is written, so the
// cost of a token is the tensor cores' alone. Four warps fill a ring of stages: weights by bulk copies, tokens by tensor
// copies. A block has `down` row blocks and cuts their columns into `parts`, a warpgroup each; a cluster of `splits`
// blocks cuts the columns once more. The sums meet in shared memory, each block of the cluster adding up its share in a
// fixed order.
#include <type_traits>

#include "../core/cuda.cuh"
#include "../core/sm90.cuh"
#include "decode.cuh"
#include "tile.h"
#include "wgmma.cuh"

namespace macko {
namespace {

constexpr int MAX_SPLITS = 8;
constexpr int PRODUCERS = 4; // warps
constexpr int MAX_STAGES = 16;
constexpr int MIN_STAGES = PRODUCERS; // and one is multiplied, one prepared, one waits for its last product

struct tile_task {
    CUtensorMap x; // boxes of TILE_COLS columns and the kernel's number of tokens
    const uint8_t *data;
    const int32_t *offsets;
    const void *bias;
    void *y;
    int64_t rows;
    int tokens, row_blocks, col_blocks;
    int down, parts; // row blocks of a block, and how many k tiles of each a stage has; warpgroups = down * parts
    int groups, token_tiles; // of all blocks' work
    int splits;              // blocks of a cluster
    int stages, run_bytes;   // room for the weights of a row block in a stage
    int sums_in_ring;        // one round only: the sums take the place of the stages
};

template <int TOKENS>
struct tile_shape {
    static constexpr int WARPGROUPS = TOKENS <= 64 ? 4 : 3;
    // The registers of an SM: the producer, a warpgroup for that reason, leaves its own to the others.
    static constexpr int THREADS = (WARPGROUPS + 1) * 128;
    static constexpr int REGISTERS = WARPGROUPS == 4 ? 112 : 152, PRODUCER_REGISTERS = WARPGROUPS == 4 ? 32 : 56;
    static constexpr int TOKEN_BYTES = TOKENS * TILE_COLS * 2; // of a k tile
    static_assert(REGISTERS * WARPGROUPS + PRODUCER_REGISTERS <= 65536 / THREADS / 8 * 8 * (WARPGROUPS + 1));
};

// Where things are in shared memory. The swizzle wants the tokens at multiples of 1024.
struct tile_memory {
    uint32_t tokens, weights, sums, full, empty, sums_full, sums_free, places, no_tile;
};

__host__ __device__ inline int tile_sums_bytes(int tokens, int down, int parts, int splits) {
    if (parts * splits == 1) return 0;
    const int units = down * tokens / 2;
    return (units + splits - 1) / splits * splits * parts * 512;
}

template <int TOKENS>
__host__ __device__ inline tile_memory tile_memory_of(const tile_task &task, uint32_t base) {
    using SHAPE = tile_shape<TOKENS>;
    tile_memory m;
    m.tokens = base;
    m.weights = m.tokens + task.stages * task.parts * SHAPE::TOKEN_BYTES;
    const uint32_t ring_end = m.weights + task.stages * task.down * task.run_bytes;
    m.sums = task.sums_in_ring ? base : ring_end;
    m.full = ring_end + (task.sums_in_ring ? 0 : tile_sums_bytes(TOKENS, task.down, task.parts, task.splits));
    m.empty = m.full + MAX_STAGES * 8;
    m.sums_full = m.empty + MAX_STAGES * 8;
    m.sums_free = m.sums_full + 8;
    m.places = m.sums_free + 8;             // of each warpgroup's tile in each stage
    m.no_tile = m.places + MAX_STAGES * 16; // masks without a bit, for a warpgroup that has none
    return m;
}

struct tile_ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next(int stages) {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

__device__ __forceinline__ void copy_weights(uint32_t to, const void *from, int bytes, uint32_t barrier,
                                             uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}

// Four warps fill the ring, a stage in turn: one alone took longer for a stage than its copies take. A warp's lanes hold
// the offsets of its next four stages, eight each: of every row block the tiles of the stage and the one behind.
template <int TOKENS>
__device__ void tile_produce(const tile_task &task, const tile_memory &memory, int first, int last) {
    using SHAPE = tile_shape<TOKENS>;
    constexpr int AT_ONCE = 4;
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(FULL_WARP, threadIdx.x / WARP % PRODUCERS, 0);
    const int clusters = gridDim.x / task.splits, total = task.groups * task.token_tiles;
    const int first_work = blockIdx.x / task.splits, per_work = last - first, run = task.parts + 1;
    if (per_work <= 0) return;
    const int entry = lane % 8, entry_row = (entry >= run) + (entry >= 2 * run) + (entry >= 3 * run);
    const int entry_tile = entry - entry_row * run;
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    const auto load_offsets = [&](int count) {
        count += lane / 8 * PRODUCERS;
        int work = first_work, stage = count;
        if (count >= per_work) { // a division takes as long as a stage of the ring
            work += count / per_work * clusters;
            stage = count % per_work;
        }
        const int row_block = (task.token_tiles == 1 ? work : work / task.token_tiles) * task.down + entry_row;
        const int tile = min((first + stage) * task.parts + entry_tile, task.col_blocks);
        return work < total && entry_row < task.down && row_block < task.row_blocks
                   ? task.offsets[(int64_t)row_block * task.col_blocks + tile]
                   : 0;
    };
    // Lane r < down: the run of tiles of row block r. Lane w: where warpgroup w finds its tile.
    const int row = lane % task.down, part = min(lane / task.down, task.parts - 1);
    int offsets = 0, next_offsets = load_offsets(warp), slot = warp;
    uint32_t phase = 1;
    int work = first_work, stage = first + warp;
    for (int count = warp;; count += PRODUCERS) {
        while (stage >= last) {
            stage -= per_work;
            work += clusters;
        }
        if (work >= total) break;
        const int turn = count / PRODUCERS % AT_ONCE;
        if (turn == 0) {
            offsets = next_offsets;
            next_offsets = load_offsets(count + AT_ONCE * PRODUCERS);
        }
        const int here = turn * 8 + row * run;
        const int from = __shfl_sync(FULL_WARP, offsets, here), to = __shfl_sync(FULL_WARP, offsets, here + task.parts);
        const int own = __shfl_sync(FULL_WARP, offsets, here + part);
        const int own_end = __shfl_sync(FULL_WARP, offsets, here + part + 1);
        // Copies begin at multiples of 128 bytes: else each line would take two requests.
        const int begin = from & ~7, bytes = lane < task.down && to > from ? (to - begin) * TILE_UNIT : 0;
        const uint32_t weights = memory.weights + (slot * task.down + row) * task.run_bytes;
        const uint32_t place = own_end > own ? weights + (own - begin) * TILE_UNIT : memory.no_tile;
        const int sum = __reduce_add_sync(FULL_WARP, bytes);
        const uint32_t barrier = memory.full + slot * 8;
        sm90::barrier_wait(memory.empty + slot * 8, phase);
        if (lane < SHAPE::WARPGROUPS)
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(memory.places + slot * 16 + lane * 4), "r"(place) : "memory");
        __syncwarp();
        if (lane == 0) sm90::barrier_expect(barrier, sum + task.parts * SHAPE::TOKEN_BYTES);
        __syncwarp();
        if (bytes) copy_weights(weights, task.data + (int64_t)begin * TILE_UNIT, bytes, barrier, policy);
        // Weights may be fetched before the kernel in front is done, tokens not.
        if (count == warp) asm volatile("griddepcontrol.wait;" ::: "memory");
        if (lane < task.parts)
            sm90::copy_box(memory.tokens + (slot * task.parts + lane) * SHAPE::TOKEN_BYTES, &task.x,
                           (stage * task.parts + lane) * TILE_COLS,
                           task.token_tiles == 1 ? 0 : work % task.token_tiles * TOKENS, barrier);
        __syncwarp();
        stage += PRODUCERS;
        slot += PRODUCERS;
        if (slot >= task.stages) {
            slot -= task.stages;
            phase ^= 1;
        }
    }
    allow_next_launch();
}

template <typename T>
__device__ __forceinline__ void tile_store(const tile_task &task, int64_t row, int token, float sum) {
    if (row >= task.rows || token >= task.tokens) return;
    if (task.bias) sum += to_float(((const T *)task.bias)[row]);
    ((T *)task.y)[token * task.rows + row] = from_float<T>(sum);
}

// A warpgroup: one row block, or a part of its columns.
template <typename T, int TOKENS>
__device__ void tile_consume(const tile_task &task, const tile_memory &memory, int rank, int first, int last,
                             int warpgroup) {
    using SHAPE = tile_shape<TOKENS>;
    constexpr int SUMS = TOKENS / 2;
    const int thread = threadIdx.x % 128, lane = thread % WARP, part = __shfl_sync(FULL_WARP, thread / WARP, 0);
    const int down = warpgroup % task.down, across = warpgroup / task.down;
    const int clusters = gridDim.x / task.splits, total = task.groups * task.token_tiles;
    const uint64_t tokens = sm90::descriptor<128>(memory.tokens + across * SHAPE::TOKEN_BYTES);
    const int stage_tokens = task.parts * SHAPE::TOKEN_BYTES >> 4;
    const bool shares = task.parts * task.splits > 1;
    const auto release = [&](int stage) {
        if (stage >= 0 && thread == 0) sm90::barrier_arrive(memory.empty + stage * 8);
    };
    tile_ring ring;
    int round = 0;
    bool waited = false;
    for (int work = blockIdx.x / task.splits; work < total; work += clusters, round++) {
        const int64_t first_row = (int64_t)(work / task.token_tiles) * task.down * TILE_ROWS;
        const int first_token = work % task.token_tiles * TOKENS;
        float sums[SUMS];
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = 0;
        // A tile is prepared while the one before it is multiplied; so are its first values fetched.
        tile_lane here, next;
        uint32_t values[2][2][TILE_QUAD], place;
        const auto find = [&](const tile_ring &at) {
            sm90::barrier_wait(memory.full + at.stage * 8, at.phase);
            sm90::load(place, memory.places + at.stage * 16 + warpgroup * 4);
        };
        int previous = -1;
        tile_ring ahead = ring;
        if (first < last) {
            find(ring);
            next.prepare<0>(place, part, lane);
            next.prepare<1>(place, part, lane);
            next.prepare<2>(place, part, lane);
            next.prepare<3>(place, part, lane);
            next.load(0, values[0][0]);
            next.load(1, values[0][1]);
            ahead.next(task.stages);
        }
#pragma unroll 1
        for (int stage = first; stage < last; stage++) {
            here = next;
            if (stage + 1 < last) find(ahead);
            const uint64_t b = tokens + ring.stage * stage_tokens;
            const auto multiply = [&](auto step) {
                constexpr int STEP = decltype(step)::value;
                if (STEP < 3) {
                    here.load(2 * STEP + 2, values[(STEP + 1) % 2][0]);
                    here.load(2 * STEP + 3, values[(STEP + 1) % 2][1]);
                }
                next.prepare<STEP>(place, part, lane); // behind the last tile: that one again
                if (STEP == 3) {
                    next.load(0, values[0][0]);
                    next.load(1, values[0][1]);
                }
                sm90::wgmma_wait<3>(); // the product that read these registers last
                here.place(2 * STEP, values[STEP % 2][0], a[STEP][0], a[STEP][1]);
                here.place(2 * STEP + 1, values[STEP % 2][1], a[STEP][2], a[STEP][3]);
                sm90::wgmma_begin();
                tile_wgmma<T, TOKENS>::multiply(sums, a[STEP], b + 2 * STEP);
                sm90::wgmma_commit();
            };
            multiply(std::integral_constant<int, 0>());
            multiply(std::integral_constant<int, 1>());
            multiply(std::integral_constant<int, 2>());
            multiply(std::integral_constant<int, 3>());
            release(previous); // its last product was waited for
            previous = ring.stage;
            ring = ahead;
            ahead.next(task.stages);
        }
        sm90::wgmma_wait<0>();
        sm90::settle(sums);
        release(previous);
        if (!waited) asm volatile("griddepcontrol.wait;" ::: "memory"); // before y is written
        if (!shares) {
            waited = true;
            const int64_t row = first_row + down * TILE_ROWS + part * 16 + lane / 4;
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                tile_store<T>(task, row + i / 2 % 2 * 8, first_token + i / 4 * 8 + lane % 4 * 2 + i % 2, sums[i]);
            continue;
        }
        // Unit u: the sums that register u % SUMS of the 128 threads of row block u / SUMS holds. A block adds up those
        // of its share, [units][parts * splits][128].
        if (!waited) asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); // all blocks are there
        if (task.sums_in_ring) sm90::cluster_sync();                             // and done with their stages
        waited = true;
        const int units = task.down * SUMS, addends = task.parts * task.splits;
        const int addend = rank * task.parts + across;
        if (round) sm90::barrier_wait_acquire(memory.sums_free, (round - 1) & 1);
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const int unit = down * SUMS + i, owner = unit * task.splits / units;
            const int local = unit - (owner * units + task.splits - 1) / task.splits;
            sm90::store_remote(memory.sums + (local * addends + addend) * 512 + thread * 4, owner, sums[i]);
        }
        __syncwarp();
        if (lane < task.splits) sm90::barrier_arrive_release(memory.sums_full, lane);
        sm90::barrier_wait_acquire(memory.sums_full, round & 1);
        const int first_unit = (rank * units + task.splits - 1) / task.splits;
        const int last_unit = ((rank + 1) * units + task.splits - 1) / task.splits;
        for (int unit = first_unit + warpgroup; unit < last_unit; unit += SHAPE::WARPGROUPS) {
            const uint32_t from = memory.sums + (unit - first_unit) * addends * 512 + thread * 4;
            float sum = 0;
            for (int i = 0; i < addends; i++) {
                float next;
                sm90::load(next, from + i * 512);
                sum += next;
            }
            const int i = unit % SUMS;
            tile_store<T>(task, first_row + unit / SUMS * TILE_ROWS + part * 16 + lane / 4 + i / 2 % 2 * 8,
                          first_token + i / 4 * 8 + lane % 4 * 2 + i % 2, sum);
        }
        if (work + clusters < total) {
            __syncwarp();
            if (lane < task.splits) sm90::barrier_arrive_release(memory.sums_free, lane);
        }
    }
    if (!waited && shares) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

template <typename T, int TOKENS>
__global__ void __launch_bounds__(tile_shape<TOKENS>::THREADS, 1)
    tile_mm_kernel(const __grid_constant__ tile_task task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using SHAPE = tile_shape<TOKENS>;
    extern __shared__ __align__(1024) uint8_t shared[];
    uint32_t base; // by way of asm, so that it is held and not made again in every loop
    asm volatile("mov.u32 %0, %1;" : "=r"(base) : "r"(sm90::smem_address(shared)));
    const tile_memory memory = tile_memory_of<TOKENS>(task, base);
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0), rank = blockIdx.x % task.splits;
    for (int i = threadIdx.x; i < TILE_VALUES / 4; i += SHAPE::THREADS)
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(memory.no_tile + i * 4), "r"(0) : "memory");
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < task.stages; stage++) {
            sm90::barrier_init(memory.full + stage * 8, 1);
            sm90::barrier_init(memory.empty + stage * 8, SHAPE::WARPGROUPS);
        }
        sm90::barrier_init(memory.sums_full, task.splits * SHAPE::WARPGROUPS * 4);
        sm90::barrier_init(memory.sums_free, task.splits * SHAPE::WARPGROUPS * 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&task.x) : "memory");
    }
    __syncthreads();
    const bool shares = task.parts * task.splits > 1;
    if (shares) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    const int stages = (task.col_blocks + task.parts - 1) / task.parts;
    const int first = stages * rank / task.splits, last = stages * (rank + 1) / task.splits;
    if (warpgroup == SHAPE::WARPGROUPS) {
        sm90::give_registers<SHAPE::PRODUCER_REGISTERS>();
        tile_produce<TOKENS>(task, memory, first, last);
        __syncwarp(); // what follows wants whole warps
        if (shares) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        if (shares && task.sums_in_ring) sm90::cluster_sync();
    } else {
        sm90::take_registers<SHAPE::REGISTERS>();
        tile_consume<T, TOKENS>(task, memory, rank, first, last, warpgroup);
    }
#endif
}

// The same product for GPUs before sm_90: mma.sync, and cp.async by all threads. A block owns a row block and OCTETS x 8
// tokens; four groups of four warps take a k tile each of a stage. Tokens are read through L1.
constexpr int MMA_ACROSS = 4, MMA_THREADS = MMA_ACROSS * TILE_PARTS * WARP;

template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
#define MACKO_TILE_MMA(T, KIND)                                                                                        \
    template <>                                                                                                        \
    __device__ __forceinline__ void mma<T>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {          \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND                                            \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                  \
    }
MACKO_TILE_MMA(__half, "f16")
MACKO_TILE_MMA(__nv_bfloat16, "bf16")

template <typename T, int OCTETS>
__global__ void __launch_bounds__(MMA_THREADS)
    tile_mma_kernel(const __grid_constant__ tile_task task, const uint16_t *x, int64_t x_stride, int cols) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(shared);
    const int lane = threadIdx.x % WARP, part = threadIdx.x / WARP % TILE_PARTS;
    const int across = threadIdx.x / (WARP * TILE_PARTS);
    const int32_t *offsets = task.offsets + (int64_t)blockIdx.x * task.col_blocks;
    const int stages = (task.col_blocks + MMA_ACROSS - 1) / MMA_ACROSS, first_token = blockIdx.y * OCTETS * 8;
    const auto run = [&](int stage, int i) { return offsets[min(stage * MMA_ACROSS + i, task.col_blocks)]; };
    const auto fetch = [&](int stage) {
        if (stage < stages) {
            const int from = run(stage, 0), units = run(stage, MMA_ACROSS) - from;
            for (int i = threadIdx.x; i < units; i += MMA_THREADS)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                 base + stage % task.stages * task.run_bytes + i * TILE_UNIT),
                             "l"(task.data + ((int64_t)from + i) * TILE_UNIT)
                             : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float sums[OCTETS][4] = {};
    for (int stage = 0; stage + 1 < task.stages; stage++) fetch(stage);
    for (int stage = 0; stage < stages; stage++) {
        if (task.stages >= 4)
            asm volatile("cp.async.wait_group 2;" ::: "memory");
        else
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        fetch(stage + task.stages - 1);
        const int k_tile = stage * MMA_ACROSS + across;
        if (k_tile >= task.col_blocks) continue;
        tile_lane tile;
        const uint32_t place =
            base + stage % task.stages * task.run_bytes + (run(stage, across) - run(stage, 0)) * TILE_UNIT;
        tile.prepare<0>(place, part, lane);
        tile.prepare<1>(place, part, lane);
        tile.prepare<2>(place, part, lane);
        tile.prepare<3>(place, part, lane);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t a[4], values[2][TILE_QUAD];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                tile.load(2 * step + half, values[half]);
                tile.place(2 * step + half, values[half], a[2 * half], a[2 * half + 1]);
            }
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++) {
                const int token = first_token + octet * 8 + lane / 4;
                uint32_t b[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int col = k_tile * TILE_COLS + step * 16 + half * 8 + lane % 4 * 2;
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
    if (across) {
#pragma unroll
        for (int i = 0; i < OCTETS * 4; i++)
            others[((across - 1) * OCTETS * 4 + i) * 128 + part * WARP + lane] = sums[i / 4][i % 4];
    }
    __syncthreads();
    if (across) return;
    const int64_t row = (int64_t)blockIdx.x * TILE_ROWS + part * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < OCTETS * 4; i++) {
        float sum = sums[i / 4][i % 4];
        for (int other = 0; other < MMA_ACROSS - 1; other++)
            sum += others[(other * OCTETS * 4 + i) * 128 + part * WARP + lane];
        tile_store<T>(task, row + i / 2 % 2 * 8, first_token + i / 4 * 8 + lane % 4 * 2 + i % 2, sum);
    }
#endif
}

inline tile_task task_of(const tile_matrix &m, int64_t tokens, const void *bias, void *y) {
    tile_task task{};
    task.data = m.data;
    task.offsets = m.offsets;
    task.bias = bias;
    task.y = y;
    task.rows = m.rows;
    task.tokens = (int)tokens;
    task.row_blocks = (int)tile_row_blocks(m.rows);
    task.col_blocks = (int)tile_col_blocks(m.cols);
    return task;
}

template <typename T, int TOKENS>
cudaError_t tile_launch(const tile_matrix &m, int64_t tokens, const void *x, int64_t x_stride, const void *bias,
                        void *y, cudaStream_t stream) {
    using SHAPE = tile_shape<TOKENS>;
    Device device;
    cudaError_t error = current_device(&device);
    if (!error) error = allow_all_shared_memory<tile_mm_kernel<T, TOKENS>>(device);
    if (error) return error;
    cudaLaunchConfig_t config{};
    tile_task task = task_of(m, tokens, bias, y);
    task.token_tiles = (int)ceil_div(tokens, TOKENS);
    const int fixed = MAX_STAGES * 48 + 16 + TILE_VALUES;
    int clusters = 0;
    // Row blocks of a block: as measured on an H200 at density 0.5; as many as can be where tiles are so full that the
    // ring would not fit beside the sums.
    for (int down : {TOKENS <= 8 ? 1 : TOKENS == 128 ? 3 : 2, SHAPE::WARPGROUPS}) {
        const int parts = SHAPE::WARPGROUPS / down, k_stages = (int)ceil_div(task.col_blocks, parts);
        const int groups = (int)ceil_div(task.row_blocks, down), work = groups * task.token_tiles;
        const int run_bytes = (int)ceil_div((int64_t)parts * m.widest * TILE_UNIT + 128 + 16, 128) * 128;
        const int stage_bytes = parts * SHAPE::TOKEN_BYTES + down * run_bytes;
        double least = 1e30;
        for (int splits = 1; splits <= MAX_SPLITS && splits <= std::max(1, k_stages); splits++) {
            int at_once;
            error = clusters_at_once<tile_mm_kernel<T, TOKENS>, MAX_SPLITS>(device, splits, SHAPE::THREADS,
                                                                            device.shared_bytes - 1024, &at_once);
            if (error) return error;
            const int rounds = (int)ceil_div(work, at_once), sums = tile_sums_bytes(TOKENS, down, parts, splits);
            const bool in_ring = rounds == 1 && TOKENS >= 64 && sums <= MIN_STAGES * stage_bytes;
            const int room = device.shared_bytes - fixed - (in_ring ? 0 : sums);
            // The most even way to give the SMs the same work, in stages; the sums take about one.
            const double time = rounds * (ceil_div(k_stages, splits) + (splits > 1 ? 1.0 : 0.5));
            if (room < MIN_STAGES * stage_bytes || time >= least * 0.99) continue;
            least = time;
            clusters = std::min(at_once, work);
            task.down = down;
            task.parts = parts;
            task.groups = groups;
            task.run_bytes = run_bytes;
            task.splits = splits;
            task.sums_in_ring = in_ring;
            task.stages = std::min(room / stage_bytes, MAX_STAGES);
            config.dynamicSmemBytes = device.shared_bytes - room + task.stages * stage_bytes;
        }
        if (clusters) break;
    }
    if (!clusters) return cudaErrorInvalidValue;
    const bool overlaps = may_overlap(stream, SHAPE::THREADS);
    if (m.cols)
        error = sm90::tensor_map(&task.x, CU_TENSOR_MAP_DATA_TYPE_UINT16, x, m.cols, tokens, x_stride * 2, TILE_COLS,
                                 TOKENS);
    if (error) return error;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {(unsigned)task.splits, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)(clusters * task.splits));
    config.blockDim = dim3(SHAPE::THREADS);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = overlaps ? 2 : 1;
    return cudaLaunchKernelEx(&config, tile_mm_kernel<T, TOKENS>, task);
}

template <typename T, int OCTETS>
cudaError_t tile_launch_mma(const tile_matrix &m, int64_t tokens, const void *x, int64_t x_stride, const void *bias,
                            void *y, cudaStream_t stream) {
    Device device;
    cudaError_t error = current_device(&device);
    if (!error) error = allow_all_shared_memory<tile_mma_kernel<T, OCTETS>>(device);
    if (error) return error;
    tile_task task = task_of(m, tokens, bias, y);
    task.run_bytes = std::max(MMA_ACROSS * m.widest * TILE_UNIT, 512) + 128; // what is read behind the last value
    task.stages = device.shared_bytes / task.run_bytes < 4 ? 2 : 4;
    const int sums_bytes = (MMA_ACROSS - 1) * OCTETS * 4 * 128 * 4;
    const int shared_bytes = std::max(task.stages * task.run_bytes, sums_bytes);
    if (shared_bytes > device.shared_bytes) return cudaErrorInvalidValue;
    const dim3 grid((unsigned)tile_row_blocks(m.rows), (unsigned)ceil_div(tokens, OCTETS * 8));
    tile_mma_kernel<T, OCTETS>
        <<<grid, MMA_THREADS, shared_bytes, stream>>>(task, (const uint16_t *)x, x_stride, (int)m.cols);
    return cudaGetLastError();
}

template <typename T>
cudaError_t tile_run(const tile_matrix &m, int64_t tokens, const void *x, int64_t x_stride, const void *bias, void *y,
                     cudaStream_t stream) {
    int index, major = 0;
    cudaError_t error = cudaGetDevice(&index);
    if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    if (error) return error;
    if (major != 9 || is("MACKO_COPY", "cp_async")) { // wgmma is of sm_90 alone
        const auto run = tokens <= 8    ? tile_launch_mma<T, 1>
                         : tokens <= 16 ? tile_launch_mma<T, 2>
                         : tokens <= 32 ? tile_launch_mma<T, 4>
                                        : tile_launch_mma<T, 8>;
        return run(m, tokens, x, x_stride, bias, y, stream);
    }
    if (tokens > 128) return tile_gemm_cuda(&m, tokens, x, x_stride, bias, y, stream);
    const auto run = tokens <= 8    ? tile_launch<T, 8>
                     : tokens <= 16 ? tile_launch<T, 16>
                     : tokens <= 32 ? tile_launch<T, 32>
                     : tokens <= 64 ? tile_launch<T, 64>
                                    : tile_launch<T, 128>;
    return run(m, tokens, x, x_stride, bias, y, stream);
}

} // namespace
} // namespace macko

cudaError_t tile_mm_cuda(const tile_matrix *m, int64_t tokens, const void *x, int64_t x_stride, const void *bias,
                         void *y, cudaStream_t stream) {
    using namespace macko;
    if (!m->rows || !tokens) return cudaSuccess;
    return m->dtype == MACKO_F16 ? tile_run<__half>(*m, tokens, x, x_stride, bias, y, stream)
                                 : tile_run<__nv_bfloat16>(*m, tokens, x, x_stride, bias, y, stream);
}
