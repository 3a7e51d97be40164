// tile_mm on CUDA: y = x W^T for any number of tokens, one kernel.
//
// A warpgroup decodes a tile into the registers of operand A, 16 columns at a time, and multiplies it with the tokens in
// shared memory (wgmma, fp32 sums) while it decodes the next ones. No x is gathered and no dense tile is written, so the
// cost of a token is the tensor cores' alone. One warp fills a ring of stages: weights by bulk copies, tokens by tensor
// copies. A block has `down` row blocks and cuts their columns into `parts`, a warpgroup each; a cluster of `splits`
// blocks cuts the columns once more. The sums meet in shared memory, each block of the cluster adding up its share in a
// fixed order.
#include "../core/cuda.cuh"
#include "../core/sm90.cuh"
#include "tile.h"
#include "wgmma.cuh"

namespace macko {
namespace {

constexpr int MAX_SPLITS = 8;
constexpr int MAX_STAGES = 16;

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
    int early;               // stages whose weights are fetched before the kernel in front is done
};

template <int TOKENS>
struct tile_shape {
    static constexpr int WARPGROUPS = TOKENS <= 64 ? 4 : 2;
    static constexpr int THREADS = WARPGROUPS * 128 + (TOKENS == 256 ? 128 : WARP);
    static constexpr int TOKEN_BYTES = TOKENS * TILE_COLS * 2; // of a k tile
    static constexpr bool MOVES_REGISTERS = TOKENS == 256;
};

// Where things are in shared memory. The swizzle wants the tokens at multiples of 1024.
struct tile_memory {
    uint32_t tokens, weights, sums, full, empty, sums_full, sums_free, places;
};

__host__ __device__ inline int tile_sums_bytes(int tokens, int warpgroups, int down, int parts, int splits) {
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
    m.sums = m.weights + task.stages * task.down * task.run_bytes;
    m.full = m.sums + tile_sums_bytes(TOKENS, SHAPE::WARPGROUPS, task.down, task.parts, task.splits);
    m.empty = m.full + MAX_STAGES * 8;
    m.sums_full = m.empty + MAX_STAGES * 8;
    m.sums_free = m.sums_full + 8;
    m.places = m.sums_free + 8; // of each warpgroup's tile in each stage; 0: it has none
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

// A warp: fills the ring. Its lanes hold the offsets of the next stages, 32 / down tiles of each row block.
template <int TOKENS>
__device__ void tile_produce(const tile_task &task, const tile_memory &memory, int rank, int first, int last) {
    using SHAPE = tile_shape<TOKENS>;
    const int lane = threadIdx.x % WARP, lanes = WARP / task.down, per_chunk = (lanes - 1) / task.parts;
    const int clusters = gridDim.x / task.splits, total = task.groups * task.token_tiles;
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    const auto load_offsets = [&](int work, int stage) {
        const int row_block = work / task.token_tiles * task.down + lane / lanes;
        const int tile = min(stage * task.parts + lane % lanes, task.col_blocks);
        return work < total && row_block < task.row_blocks ? task.offsets[(int64_t)row_block * task.col_blocks + tile]
                                                           : 0;
    };
    const auto fetch_tokens = [&](int stage, uint32_t slot, int token) { // by one lane
        for (int i = 0; i < task.parts && stage * task.parts + i < task.col_blocks; i++)
            sm90::copy_box(memory.tokens + (slot * task.parts + i) * SHAPE::TOKEN_BYTES, &task.x,
                           (stage * task.parts + i) * TILE_COLS, token, memory.full + slot * 8);
    };
    tile_ring ring;
    int count = 0;
    int work = blockIdx.x / task.splits;
    int offset = load_offsets(work, first);
    for (; work < total; work += clusters) {
        const int token = work % task.token_tiles * TOKENS;
        for (int chunk = first; chunk < last; chunk += per_chunk) {
            const int here = offset;
            offset =
                chunk + per_chunk < last ? load_offsets(work, chunk + per_chunk) : load_offsets(work + clusters, first);
            for (int stage = chunk; stage < min(chunk + per_chunk, last); stage++, ring.next(task.stages), count++) {
                const uint32_t barrier = memory.full + ring.stage * 8;
                // Lane r < down: the run of tiles of row block r. Copies begin at multiples of 128 bytes of data: else
                // each line would take two requests.
                const int in_chunk = (stage - chunk) * task.parts;
                const int from = __shfl_sync(FULL_WARP, here, lane % task.down * lanes + in_chunk);
                const int to = __shfl_sync(FULL_WARP, here, lane % task.down * lanes + in_chunk + task.parts);
                const int64_t begin = (int64_t)from * TILE_UNIT & ~(int64_t)127;
                const int bytes = lane < task.down && to > from ? int((int64_t)to * TILE_UNIT - begin) : 0;
                const uint32_t slot = memory.weights + ring.stage * task.down * task.run_bytes;
                // Lane w: where warpgroup w finds its tile.
                const int row = lane % task.down, part = lane / task.down;
                const int own = __shfl_sync(FULL_WARP, here, min(row * lanes + in_chunk + part, WARP - 1));
                const int own_end = __shfl_sync(FULL_WARP, here, min(row * lanes + in_chunk + part + 1, WARP - 1));
                const int64_t row_begin = (int64_t)from * TILE_UNIT & ~(int64_t)127;
                const uint32_t place =
                    own_end > own ? slot + row * task.run_bytes + uint32_t((int64_t)own * TILE_UNIT - row_begin) : 0;
                int sum = bytes;
                for (int distance = 1; distance < task.down; distance *= 2)
                    sum += __shfl_xor_sync(FULL_WARP, sum, distance);
                sm90::barrier_wait(memory.empty + ring.stage * 8, ring.phase ^ 1);
                if (lane < SHAPE::WARPGROUPS)
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(memory.places + ring.stage * 16 + lane * 4), "r"(place)
                                 : "memory");
                __syncwarp();
                if (lane == 0)
                    sm90::barrier_expect(barrier, sum + min(task.parts, task.col_blocks - stage * task.parts) *
                                                            SHAPE::TOKEN_BYTES);
                __syncwarp();
                if (bytes) copy_weights(slot + lane * task.run_bytes, task.data + begin, bytes, barrier, policy);
                if (count + 1 == task.early ||
                    (count < task.early && stage + 1 == last && work == (int)blockIdx.x / task.splits)) {
                    asm volatile("griddepcontrol.wait;" ::: "memory");
                    if (lane == 0)
                        for (int i = 0; i <= count; i++) fetch_tokens(first + i, i, token);
                    count = task.early;
                } else if (count >= task.early && lane == 0) {
                    fetch_tokens(stage, ring.stage, token);
                }
            }
        }
    }
    asm volatile("griddepcontrol.launch_dependents;");
}

__device__ __forceinline__ uint32_t load_value(uint32_t at) {
    uint32_t value;
    asm("{ .reg .b16 v;\nld.shared.u16 v, [%1];\ncvt.u32.u16 %0, v; }" : "=r"(value) : "r"(at));
    return value;
}

// prmt itself: __byte_perm would mask the selector first.
__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}

// A lane's part of a tile: its mask and where its values of each group begin.
struct tile_lane {
    uint32_t mask, at[TILE_GROUPS];

    __device__ __forceinline__ void begin(uint32_t place, int part, int lane) {
        uint32_t start;
        sm90::load(mask, place + part * (TILE_LANES * 4) + lane * 4);
        asm volatile("{ .reg .b16 v;\nld.shared.u16 v, [%1];\ncvt.u32.u16 %0, v; }"
                     : "=r"(start)
                     : "r"(place + TILE_STARTS + part * 2)
                     : "memory");
        start += place;
        // Values of each group, a byte each, and their sums over the lanes: at most 128.
        uint32_t own[2], sum[2], total[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t counts = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t bits = mask >> (half * 4 + j) & 0x01010101u;
                counts += __dp4a(bits, 0x01010101u, 0u) << (8 * j);
            }
            own[half] = counts;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) sum[half] = own[half];
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2)
#pragma unroll
            for (int half = 0; half < 2; half++)
                asm volatile("{ .reg .pred p; .reg .u32 r;\n"
                             "  shfl.sync.up.b32 r|p, %0, %1, 0, 0xffffffff;\n"
                             "  @p add.u32 %0, %0, r; }"
                             : "+r"(sum[half])
                             : "r"(distance));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            total[half] = __shfl_sync(FULL_WARP, sum[half], WARP - 1);
            sum[half] -= own[half];
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t base[4] = {start, __dp4a(total[half], 0x00000002u, start),
                                      __dp4a(total[half], 0x00000202u, start), __dp4a(total[half], 0x00020202u, start)};
#pragma unroll
            for (int j = 0; j < 4; j++) at[half * 4 + j] = __dp4a(sum[half], 2u << (8 * j), base[j]);
            start = __dp4a(total[half], 0x02020202u, start);
        }
    }

    __device__ __forceinline__ uint32_t bits(int j) const {
        return mask >> j & 0x01010101u;
    }

    // The values at the lane's place of group j on, one for each element: whether it belongs to it, the mask says.
    __device__ __forceinline__ void load(int j, uint32_t (&values)[TILE_QUAD]) const {
        const uint32_t b = bits(j);
        values[0] = load_value(at[j]);
        values[1] = load_value(__dp4a(b, 0x00000002u, at[j]));
        values[2] = load_value(__dp4a(b, 0x00000202u, at[j]));
        values[3] = load_value(__dp4a(b, 0x00020202u, at[j]));
    }

    // Two registers of the operand. Elements without a value take the zeros above another one's 16 bits.
    __device__ __forceinline__ void place(int j, const uint32_t (&values)[TILE_QUAD], uint32_t &low,
                                          uint32_t &high) const {
        const uint32_t selectors = 0x76327632u - 0x22u * bits(j);
        low = byte_permute(values[0], values[1], selectors);
        high = byte_permute(values[2], values[3], selectors >> 16);
    }
};

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
        int previous = -1;
#pragma unroll 1
        for (int stage = first; stage < last; stage++, ring.next(task.stages)) {
            sm90::barrier_wait(memory.full + ring.stage * 8, ring.phase);
            uint32_t place;
            sm90::load(place, memory.places + ring.stage * 16 + warpgroup * 4);
            if (place) {
                tile_lane tile;
                tile.begin(place, part, lane);
                uint32_t values[2][2][TILE_QUAD];
                tile.load(0, values[0][0]);
                tile.load(1, values[0][1]);
#pragma unroll
                for (int b = 0; b < 4; b++) {
                    if (b < 3) {
                        tile.load(2 * b + 2, values[(b + 1) % 2][0]);
                        tile.load(2 * b + 3, values[(b + 1) % 2][1]);
                    }
                    sm90::wgmma_wait<3>(); // the product that read these registers last
                    tile.place(2 * b, values[b % 2][0], a[b][0], a[b][1]);
                    tile.place(2 * b + 1, values[b % 2][1], a[b][2], a[b][3]);
                    sm90::wgmma_begin();
                    tile_wgmma<T, TOKENS>::multiply(sums, a[b], tokens + ring.stage * stage_tokens + 2 * b);
                    sm90::wgmma_commit();
                }
                release(previous); // its last product was waited for
                previous = ring.stage;
            } else {
                sm90::wgmma_wait<0>();
                sm90::warpgroup_sync(warpgroup); // all its warps have read that they have none
                release(previous);
                release(ring.stage);
                previous = -1;
            }
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
    const tile_memory memory = tile_memory_of<TOKENS>(task, sm90::smem_address(shared));
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0), rank = blockIdx.x % task.splits;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < task.stages; stage++) {
            sm90::barrier_init(memory.full + stage * 8, 1);
            sm90::barrier_init(memory.empty + stage * 8, SHAPE::WARPGROUPS);
        }
        sm90::barrier_init(memory.sums_full, task.splits * SHAPE::WARPGROUPS * 4);
        sm90::barrier_init(memory.sums_free, task.splits * SHAPE::WARPGROUPS * 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        sm90::fence_for_copies();
    }
    __syncthreads();
    const bool shares = task.parts * task.splits > 1;
    if (shares) asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
    const int stages = (task.col_blocks + task.parts - 1) / task.parts;
    const int first = stages * rank / task.splits, last = stages * (rank + 1) / task.splits;
    if (warpgroup == SHAPE::WARPGROUPS) {
        if (SHAPE::MOVES_REGISTERS) sm90::give_registers<24>();
        if (threadIdx.x < SHAPE::WARPGROUPS * 128 + WARP) tile_produce<TOKENS>(task, memory, rank, first, last);
        if (shares) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    } else {
        if (SHAPE::MOVES_REGISTERS) sm90::take_registers<240>();
        tile_consume<T, TOKENS>(task, memory, rank, first, last, warpgroup);
    }
#endif
}

int knob(const char *name, int otherwise) {
    const char *set = getenv(name);
    return set ? atoi(set) : otherwise;
}

// How many clusters of this size run at once.
template <typename T, int TOKENS>
cudaError_t clusters_at_once(const Device &device, int splits, int shared_bytes, int *clusters) {
    static std::mutex mutex;
    static int known[MAX_DEVICES][MAX_SPLITS + 1];
    const std::lock_guard<std::mutex> lock(mutex);
    int &found = known[device.index][splits];
    if (!found) {
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {(unsigned)splits, 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(splits);
        config.blockDim = dim3(tile_shape<TOKENS>::THREADS);
        config.dynamicSmemBytes = shared_bytes;
        config.attrs = &attribute;
        config.numAttrs = 1;
        if (const cudaError_t error = cudaOccupancyMaxActiveClusters(&found, tile_mm_kernel<T, TOKENS>, &config))
            return error;
        found = std::max(found, 1);
    }
    *clusters = found;
    return cudaSuccess;
}

template <typename T, int TOKENS>
cudaError_t tile_launch(const tile_matrix &m, int64_t tokens, const void *x, int64_t x_stride, const void *bias,
                        void *y, cudaStream_t stream) {
    using SHAPE = tile_shape<TOKENS>;
    Device device;
    cudaError_t error = current_device(&device);
    if (!error) error = allow_all_shared_memory<tile_mm_kernel<T, TOKENS>>(device);
    if (error) return error;
    tile_task task{};
    task.data = m.data;
    task.offsets = m.offsets;
    task.bias = bias;
    task.y = y;
    task.rows = m.rows;
    task.tokens = (int)tokens;
    task.row_blocks = (int)tile_row_blocks(m.rows);
    task.col_blocks = (int)tile_col_blocks(m.cols);
    task.down = knob("MACKO_TILE_DOWN", TOKENS <= 8 ? 1 : TOKENS <= 16 ? 2 : SHAPE::WARPGROUPS);
    task.parts = SHAPE::WARPGROUPS / task.down;
    task.groups = (int)ceil_div(task.row_blocks, task.down);
    task.token_tiles = (int)ceil_div(tokens, TOKENS);
    task.run_bytes = (int)ceil_div((int64_t)task.parts * m.widest * TILE_UNIT + 128 + 16, 128) * 128;
    const int k_stages = (int)ceil_div(task.col_blocks, task.parts), work = task.groups * task.token_tiles;

    // The most even way to give the SMs the same work.
    int clusters = 0;
    double least = 1e30;
    for (int splits = 1; splits <= MAX_SPLITS && splits <= std::max(1, k_stages); splits++) {
        int at_once;
        error = clusters_at_once<T, TOKENS>(device, splits, device.shared_bytes - 1024, &at_once);
        if (error) return error;
        const double rounds = (double)ceil_div(work, at_once);
        const double time = rounds * (ceil_div(k_stages, splits) + (splits > 1 ? 1.0 : 0.5));
        if (knob("MACKO_TILE_SPLITS", splits) == splits && time < least * 0.99) {
            least = time;
            task.splits = splits;
            clusters = std::min(at_once, work);
        }
    }
    const int fixed =
        tile_sums_bytes(TOKENS, SHAPE::WARPGROUPS, task.down, task.parts, task.splits) + MAX_STAGES * 32 + 16;
    const int stage_bytes = task.parts * SHAPE::TOKEN_BYTES + task.down * task.run_bytes;
    task.stages =
        std::min({(device.shared_bytes - fixed) / stage_bytes, knob("MACKO_TILE_STAGES", MAX_STAGES), MAX_STAGES});
    if (task.stages < 2) return cudaErrorInvalidValue;
    const int lanes = WARP / task.down;
    const bool overlaps = may_overlap(stream, SHAPE::THREADS);
    task.early = std::min(task.stages, (lanes - 1) / task.parts);
    error =
        sm90::tensor_map(&task.x, CU_TENSOR_MAP_DATA_TYPE_UINT16, x, m.cols, tokens, x_stride * 2, TILE_COLS, TOKENS);
    if (error) return error;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {(unsigned)task.splits, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3((unsigned)(clusters * task.splits));
    config.blockDim = dim3(SHAPE::THREADS);
    config.dynamicSmemBytes = fixed + task.stages * stage_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = overlaps ? 2 : 1;
    return cudaLaunchKernelEx(&config, tile_mm_kernel<T, TOKENS>, task);
}

template <typename T>
cudaError_t tile_run(const tile_matrix &m, int64_t tokens, const void *x, int64_t x_stride, const void *bias, void *y,
                     cudaStream_t stream) {
    const auto run = tokens <= 8     ? tile_launch<T, 8>
                     : tokens <= 16  ? tile_launch<T, 16>
                     : tokens <= 32  ? tile_launch<T, 32>
                     : tokens <= 64  ? tile_launch<T, 64>
                     : tokens <= 128 ? tile_launch<T, 128>
                                     : tile_launch<T, 256>;
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
