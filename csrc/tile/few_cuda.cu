// Up to 64 tokens on CUDA: y = x W^T, bound by memory. For more on sm_90a see many_cuda.cu.
//
//     block      warpgroups 0 .. 3   consumers: tile 0 .. 3 of every slab, decoded 16 columns at a time into registers
//                                    of operand A, and multiplied (wgmma, fp32 sums) while the next ones are decoded
//                warpgroup 4         four producer warps, stages 0, 4, 8 ... of the pipeline, 1, 5, 9 ... and so on
//     stage      | slab: one bulk copy | tokens of its tiles: TMA, [tile][token][64 columns], 128-byte swizzle |
//     barriers   full: slab and tokens have come. empty: all four consumer warpgroups have released the stage
//
//     cluster    has row blocks cluster, cluster + clusters, ... Its blocks take as many whole ones each.
//                What is left over is split by columns (split-K):
//     row block  |== share of rank 0 ==|== share of rank 1 ==|       and the sums meet through DSMEM
//
// Nothing of x is gathered and no dense tile is written, so a token costs the tensor cores alone. Sums are added in a
// fixed order, each block adding up those of some threads.
#include <type_traits>

#include "../core/cuda.cuh"
#include "../core/sm90.cuh"
#include "decode.cuh"
#include "multiply.cuh"
#include "tile.h"

namespace macko {
namespace {

constexpr int MAX_CLUSTER = 8;
[[maybe_unused]] constexpr int PRODUCERS = 4; // warps
constexpr int MAX_STAGES = 16;
constexpr int BARRIER_BYTES = 1024; // at the beginning of shared memory
constexpr int MIN_STAGES = 3;       // one is multiplied, one prepared, one waits for its last product
constexpr int WARPGROUP = 128;      // threads; of all warpgroups the same thread has the same sums, each of its tile

// Who has what of a cluster's row blocks: the block of rank r whole ones, r, r + cluster, ..., and perhaps a share of
// one of those that follow, which `ways` blocks split.
struct few_partition {
    int whole, split, ways; // of a block; of the cluster, after cluster * whole; blocks for one of these
    int share, longer;      // slabs of a share; the first `longer` shares have one more
    int chunk_bits;         // log2 of the threads whose sums a block adds up
};

struct few_task {
    CUtensorMap x; // [tile][token][column of it] with boxes of a slab, or [0][token][column] with boxes of a tile
    const uint8_t *data;
    const int32_t *offsets;
    const void *bias;
    void *y;
    int64_t rows;
    int tokens, row_blocks, slabs;
    int boxes; // TMA loads of a stage's tokens
    int units; // of data, and of a slab in the mean, where known: else 0
    float mean;
    int cluster, clusters;              // blocks of a cluster
    int more;                           // clusters that have a row block more than the others
    few_partition partition[2];         // of theirs, and of the others
    int stages, stage_bytes, tokens_at; // of the pipeline; a stage is a slab, and from this byte on its tokens
    int window;                         // stages that are fetched at once at the start
    tile_weights weights;
};

template <int TOKENS>
struct few_shape {
    static constexpr int WARPGROUPS = MACKO_TILE_SLAB_TILES;
    // The registers of an SM: the producers, a warpgroup for that reason, leave theirs to the consumers.
    static constexpr int THREADS = (WARPGROUPS + 1) * 128;
    static constexpr int REGISTERS = 112, PRODUCER_REGISTERS = 32;
    static constexpr int TOKEN_BYTES = TOKENS * MACKO_TILE_COLS * 2; // of a tile
    // Where there are many sums, those of a split row block take the place of the stages, and those of a whole one meet
    // in several passes.
    static constexpr bool MANY_SUMS = TOKENS > 32;
    static constexpr int PASSES = MANY_SUMS ? 8 : 1;
    static_assert(REGISTERS * WARPGROUPS + PRODUCER_REGISTERS <= 65536 / THREADS / 8 * 8 * (WARPGROUPS + 1));
};

// What a block does, in this order: whole row blocks, then its share of a split one.
struct few_work {
    int row_block, step, whole;   // the first one, how far it is to the next one, how many
    int split_block, first, last; // the split one, and the share's slabs [first, last)
    int way, ways;                // which of how many shares that is; 0 ways where there is none

    __device__ __forceinline__ few_work(const few_task &task, int cluster, int rank) {
        const few_partition &partition = task.partition[cluster >= task.more];
        whole = partition.whole;
        step = task.cluster * task.clusters;
        row_block = cluster + rank * task.clusters;
        int nth = 0; // of the cluster's split row blocks
        for (way = rank; way >= partition.ways; way -= partition.ways) nth++;
        ways = nth < partition.split ? partition.ways : 0;
        split_block = cluster + (whole * task.cluster + nth) * task.clusters;
        first = way * partition.share + min(way, partition.longer);
        last = ways ? first + partition.share + (way < partition.longer) : first;
    }
};

// Where things are in shared memory. The swizzle wants the tokens, and so the stages, at multiples of 1024.
struct few_memory {
    // Barriers. `unused` is what the first release of each row block arrives at, when there is no stage to release: so
    // no test is needed.
    uint32_t full, empty, sums_full, may_send, unused;
    uint32_t stages, sums, split_sums; // sums of whole row blocks; of split ones
};

template <int TOKENS>
__host__ __device__ inline few_memory memory_of(const few_task &task, uint32_t base) {
    few_memory m;
    m.full = base;
    m.empty = m.full + MAX_STAGES * 8;
    m.sums_full = m.empty + MAX_STAGES * 8;
    m.may_send = m.sums_full + 8;
    m.unused = m.may_send + 8;
    m.stages = base + BARRIER_BYTES;
    m.sums = m.stages + task.stages * task.stage_bytes;
    m.split_sums = few_shape<TOKENS>::MANY_SUMS ? m.stages : m.sums;
    return m;
}

// Where a consumer is in the pipeline.
struct stage_position {
    uint32_t full, phase; // the stage's barrier
    uint32_t values;      // where the slab's values begin: masks and offsets lie at fixed distances before them
};

// The producers tell the consumers that the barriers have been made.
[[maybe_unused]] __device__ __forceinline__ void barriers_ready(int threads) {
    named_barrier_arrive(1, threads);
}
[[maybe_unused]] __device__ __forceinline__ void wait_for_barriers(int threads) {
    named_barrier_sync(1, threads);
}

// By one lane of each producer warp: the barriers of its stages, and of the sums by that of the first warp.
template <int TOKENS>
__device__ __forceinline__ void make_barriers(const few_task &task, const few_memory &memory, const few_work &work,
                                              int cluster, int warp) {
    using SHAPE = few_shape<TOKENS>;
    for (int stage = warp; stage < task.stages; stage += PRODUCERS) {
        sm90::barrier_init(memory.full + stage * 8, 1);
        sm90::barrier_init(memory.empty + stage * 8, SHAPE::WARPGROUPS);
    }
    if (warp == 0) {
        sm90::barrier_init(memory.unused, SHAPE::WARPGROUPS);
        sm90::barrier_init(memory.sums_full, 1);
        sm90::barrier_init(memory.may_send, max(work.ways, 1));
        const int bits = task.partition[cluster >= task.more].chunk_bits, threads = WARPGROUP - (work.way << bits);
        if (work.ways) // bytes that the other blocks of its row block will send
            sm90::barrier_arrive_expect_tx(memory.sums_full, max(0, min(1 << bits, threads)) * TOKENS * 2 *
                                                                 SHAPE::WARPGROUPS * (work.ways - 1));
    }
    sm90::fence_barrier_init();
}

// A producer warp: every fourth stage. (One warp alone took longer for a stage than its copies take.) Its first lanes
// hold where its next four slabs begin and end. At the start only a window of stages is fetched: else all blocks ask
// for all stages at once, 30 MB, and the first stage comes with the last.
template <int TOKENS>
__device__ __forceinline__ void produce(const few_task &task, const few_memory &memory, int cluster, int rank) {
    using SHAPE = few_shape<TOKENS>;
    constexpr int AT_ONCE = 4, ABOUT = 32;
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(FULL_WARP, threadIdx.x / WARP % PRODUCERS, 0);
    const few_work work(task, cluster, rank);
    // A pipeline of three stages leaves the fourth warp none.
    const int total = warp < task.stages ? work.whole * task.slabs + work.last - work.first : 0;
    // One of the warp's stages; they are looked for in rising order.
    struct position {
        int stage, round, begin; // in the pipeline; stages before this round of it; stages before this row block
        int row_block, left;     // left: whole ones to go, with this one
    };
    const auto next = [&](position &p) { // the warp's next stage
        p.stage += PRODUCERS;
        if (p.stage >= task.stages) {
            p.stage = warp;
            p.round += task.stages;
        }
    };
    const auto find = [&](position &p) { // its slab of the row block
        while (p.left && p.round + p.stage - p.begin >= task.slabs) {
            p.begin += task.slabs;
            p.row_block += work.step;
            if (!--p.left) p.row_block = work.split_block;
        }
        return p.round + p.stage - p.begin + (p.left ? 0 : work.first);
    };
    position load{warp, 0, 0, work.whole ? work.row_block : work.split_block, work.whole}, here = load;
    for (int i = 0; i < lane % AT_ONCE; i++) next(load);
    const auto load_offsets = [&](int &from, int &to) {
        const int slab = find(load);
        from = to = 0;
        if (load.round + load.stage < total) {
            const int32_t *at = task.offsets + (int64_t)load.row_block * task.slabs + slab;
            from = at[0];
            to = at[1];
        }
        for (int i = 0; i < AT_ONCE; i++) next(load);
    };
    // Until the offsets have come, what lies about where the first slabs should be is prefetched to L2 (H200: clearly
    // less time with few tokens).
    if (lane == 0 && task.units && warp < min(task.window, total)) {
        const int slab = find(load), about = (int)(((float)load.row_block * task.slabs + slab) * task.mean);
        const int begin = max(0, min(about, task.units) - ABOUT);
        sm90::bulk_prefetch_l2(task.data + (int64_t)begin * MACKO_TILE_UNIT,
                               min((int)task.mean + 2 * ABOUT, task.units - begin) * MACKO_TILE_UNIT);
    }
    int from = 0, to = 0, next_from, next_to;
    load_offsets(next_from, next_to);
    const uint64_t policy = evict_first();
    if (lane == 0) make_barriers<TOKENS>(task, memory, work, cluster, warp);
    __syncwarp();
    barriers_ready(SHAPE::THREADS);
    // At the start a warp waits for stages of the others, so all of their barriers have to be there.
    named_barrier_sync(3, PRODUCERS * WARP);
    if (task.partition[cluster >= task.more].split) sm90::cluster_arrive_relaxed();
    uint32_t phase = 1;
    // Before a stage is filled anew, all producers have seen those come that they waited for at the start.
    const auto first_round_done = [] { named_barrier_sync(3, PRODUCERS * WARP); };
    for (int count = 0; here.round + here.stage < total; count++) {
        const int slab = find(here), stage = here.stage, fourth = count % AT_ONCE;
        if (fourth == 0) {
            from = next_from;
            to = next_to;
            load_offsets(next_from, next_to);
        }
        const int begin = __shfl_sync(FULL_WARP, from, fourth);
        const int bytes = (__shfl_sync(FULL_WARP, to, fourth) - begin) * MACKO_TILE_UNIT;
        const uint32_t at = memory.stages + stage * task.stage_bytes, barrier = memory.full + stage * 8;
        if (here.round) {
            if (stage == warp && here.round == task.stages) first_round_done();
            sm90::barrier_wait(memory.empty + stage * 8, phase);
        } else if (stage >= task.window) {
            sm90::barrier_wait(memory.full + (stage - task.window) * 8, 0);
        }
        if (lane == 0) {
            sm90::barrier_arrive_expect_tx(barrier, bytes + MACKO_TILE_SLAB_TILES * SHAPE::TOKEN_BYTES);
            sm90::bulk_copy(at, task.data + (int64_t)begin * MACKO_TILE_UNIT, bytes, barrier, policy);
        }
        __syncwarp();
        // Weights may be fetched before the kernel before this one is done (PDL), tokens not.
        if (count == 0) sm90::pdl_wait();
        if (lane < task.boxes)
            sm90::tma_load(at + task.tokens_at + lane * SHAPE::TOKEN_BYTES, &task.x,
                           task.boxes == 1 ? 0 : (slab * MACKO_TILE_SLAB_TILES + lane) * MACKO_TILE_COLS, 0,
                           task.boxes == 1 ? slab * MACKO_TILE_SLAB_TILES : 0, barrier);
        __syncwarp();
        next(here);
        if (here.stage == warp) phase ^= 1;
    }
    if (task.stages + warp >= total) first_round_done();
    pdl_launch_dependents();
}

template <typename T>
__device__ __forceinline__ void store_y(const few_task &task, int64_t row, int token, float sum) {
    if (row >= task.rows || token >= task.tokens) return;
    if (task.bias) sum += to_float(((const T *)task.bias)[row]);
    ((T *)task.y)[token * task.rows + row] = from_float<T>(sum);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL // no warnings of what is not used elsewhere

// A consumer warpgroup: a tile of every slab. In order: the first tile is prepared; stages are multiplied (the main
// loop); the four warpgroups' sums, and with split-K those of other blocks, meet in shared memory and are stored. The
// phases are lambdas and not functions of their own, as ptxas orders the instructions of functions in another way.
template <typename T, int TOKENS>
__device__ __forceinline__ void consume(const few_task &task, const few_memory &memory, int cluster, int rank,
                                        int tile_index) {
    using SHAPE = few_shape<TOKENS>;
    constexpr int SUMS = TOKENS / 2, FOURS = SUMS / 4 / SHAPE::PASSES;
    const uint32_t first_thread = held(threadIdx.x % WARPGROUP); // is 0; unless held it is asked for at every stage
    const int thread = threadIdx.x % 128, lane = thread % WARP, slice = __shfl_sync(FULL_WARP, thread / WARP, 0);
    const few_work work(task, cluster, rank);
    // The upper half of a descriptor is the same for all stages, the lower one has a fixed distance from the slab.
    const uint64_t descriptor =
        sm90::smem_descriptor<128>(memory.stages + task.tokens_at + tile_index * SHAPE::TOKEN_BYTES);
    const stage_position begin{memory.full, 0, memory.stages + MACKO_TILE_VALUES_AT};
    const uint32_t tokens_offset = held((uint32_t)descriptor - (begin.values >> 4));
    // Offsets of a lane's words of its slice, and of this tile.
    const uint32_t words = held((slice * MACKO_TILE_LANES + lane) * 4),
                   tile_words = held(words + tile_index * MACKO_TILE_MASK_BYTES);
    const uint32_t first = held(slice * 2);
    // Warpgroups differ by masks, not by branches, which would take more instructions. A stream begins at the lane's
    // column (tiles 0 and 1, the head) or at its spill offset (tiles 2 and 3, the tail); after the values of the tile
    // before in tiles 1 and 3.
    const bool tail = tile_index >= MACKO_TILE_SLAB_TILES / 2, odd = tile_index % 2;
    const uint32_t spill_mask = held(tail ? ~0u : 0), column = held(tail ? 0 : lane * 4 + ((lane * 4 + 2) << 16));
    const uint32_t words_before = held(odd ? tile_words - MACKO_TILE_MASK_BYTES : tile_words);
    const uint32_t low = held(odd ? MACKO_TILE_STREAM_BITS : 0), high = held(low << 4);
    const uint32_t full_end = memory.full + task.stages * 8;
    const auto release = [&](uint32_t full) {
        if (first_thread == 0) sm90::barrier_arrive(full + (memory.empty - memory.full));
    };
    const auto sync_consumers = [] { named_barrier_sync(2, SHAPE::WARPGROUPS * 128); };
    const bool meets = task.partition[cluster >= task.more].split; // do some blocks of the cluster
    // From here on, the other blocks of its split row block may send their sums here. What they overwrite was only
    // read. By mbarriers: a barrier of the cluster, with some warps waiting and others under way, never ends under
    // compute-sanitizer.
    const auto let_send = [&] {
        sm90::cluster_wait(); // their barriers are there
        sync_consumers();
        if (threadIdx.x < work.ways) sm90::barrier_arrive_remote(memory.may_send, rank - work.way + threadIdx.x);
    };
    wait_for_barriers(SHAPE::THREADS);
    if (meets) sm90::cluster_arrive_relaxed();
    if (!SHAPE::MANY_SUMS && work.ways && !work.whole) let_send();
    // A tile is prepared while the one before it is multiplied, also across row blocks: its mask is read and counted,
    // its values are found, and the first ones loaded.
    tile_lane lanes[2];
    uint32_t values[2][2][MACKO_TILE_QUAD];
    tile_streams streams;
    uint32_t before;
    const auto prepare = [&](auto step, tile_lane &tile, uint32_t slab) {
        constexpr int STEP = decltype(step)::value;
        if (STEP == 0) { // all loads
            read_16(streams.values, slab - MACKO_TILE_VALUES_AT + MACKO_TILE_SLICES_AT + first);
            read_32(streams.spills, slab - MACKO_TILE_VALUES_AT + MACKO_TILE_SPILLS_AT + words);
            read_32(before, slab - MACKO_TILE_VALUES_AT + words_before);
            tile.read(slab - MACKO_TILE_VALUES_AT + tile_words);
        } else if (STEP == 1) {
            streams.values = slab + streams.values * MACKO_TILE_ROW_BYTES;
            streams.spills = (streams.spills & spill_mask) | column;
            streams.spill();
            streams.at[0] += __popc(before & low) * MACKO_TILE_ROW_BYTES;
            streams.at[1] += __popc(before & high) * MACKO_TILE_ROW_BYTES;
        } else if (STEP == 2) {
            tile.count(task.weights);
        } else {
            tile.find(task.weights, streams);
            tile.load(0, values[0][0], task.weights);
            tile.load(1, values[0][1], task.weights);
        }
    };
    constexpr std::integral_constant<int, 0> step0;
    constexpr std::integral_constant<int, 1> step1;
    constexpr std::integral_constant<int, 2> step2;
    constexpr std::integral_constant<int, 3> step3;
    stage_position here = begin, ahead = begin;                         // what is multiplied, and what is prepared
    int stages_left = work.whole * task.slabs + work.last - work.first; // with this one
    if (stages_left) {
        sm90::barrier_wait(here.full, here.phase);
        prepare(step0, lanes[0], here.values);
        prepare(step1, lanes[0], here.values);
        prepare(step2, lanes[0], here.values);
        prepare(step3, lanes[0], here.values);
    }
    for (int round = 0; round < work.whole + (work.ways > 0); round++) {
        const bool whole = round < work.whole;
        const int row_block = whole ? work.row_block + round * work.step : work.split_block;
        const int64_t first_row = (int64_t)row_block * MACKO_TILE_ROWS;
        float sums[SUMS];
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = 0;
        sm90::warpgroup_fence_operand(sums);
        uint32_t previous = memory.unused - (memory.empty - memory.full);
        const auto multiply = [&](tile_lane &tile, tile_lane &next) { // a stage
            // After the last stage it stays there, and prepares it again for nothing. Without a branch: with one, the
            // compiler makes addresses that the loads of both ways share, instead of constant distances.
            const bool more = --stages_left > 0;
            ahead.full += more ? 8 : 0;
            ahead.values += more ? task.stage_bytes : 0;
            if (ahead.full == full_end) {
                ahead.full = begin.full;
                ahead.values = begin.values;
                ahead.phase ^= 1;
            }
            sm90::barrier_wait(ahead.full, ahead.phase);
            const uint64_t b = descriptor >> 32 << 32 | (tokens_offset + (here.values >> 4));
            const auto take = [&](auto step) {
                constexpr int STEP = decltype(step)::value;
                if (STEP < 3) {
                    tile.load(2 * STEP + 2, values[(STEP + 1) % 2][0], task.weights);
                    tile.load(2 * STEP + 3, values[(STEP + 1) % 2][1], task.weights);
                }
                prepare(step, next, ahead.values);
                // Waits for the products that read these registers last. All of the stage before have ended two steps
                // into this one: that stage is released then, not a product later (H200: less time at every shape).
                if (STEP == 0) sm90::warpgroup_wait<1>();
                if (STEP == 1) {
                    sm90::warpgroup_wait<0>();
                    release(previous);
                }
                tile_multiply<T, TOKENS, STEP>(sums, tile, values[STEP % 2], a, b);
            };
            take(step0);
            take(step1);
            take(step2);
            take(step3);
            previous = here.full;
            here = ahead;
        };
        int left = whole ? task.slabs : work.last - work.first;
#pragma unroll 1
        for (; left > 0; left -= 2) { // two at a time, so that nothing is moved from `next` to `tile`
            multiply(lanes[0], lanes[1]);
            if (left == 1) {
                lanes[0] = lanes[1];
                break;
            }
            multiply(lanes[1], lanes[0]);
        }
        sm90::warpgroup_wait<0>();
        sm90::warpgroup_fence_operand(sums);
        release(previous);
        if (!round) sm90::pdl_wait(); // before y is written
        // Sums in shared memory: [addends][fours][chunk] of four floats. A block that has a share of the row block adds
        // up those of a chunk of threads; of a whole row block those of all.
        const int own = whole ? 0 : work.way,
                  addends = whole ? MACKO_TILE_SLAB_TILES : MACKO_TILE_SLAB_TILES * work.ways;
        const int bits = whole ? 7 : task.partition[cluster >= task.more].chunk_bits, chunk = 1 << bits;
        const int my_addend = own * MACKO_TILE_SLAB_TILES + tile_index;
        const uint32_t sums_at = whole ? memory.sums : memory.split_sums;
        const auto add_up = [&](int pass, int fours) { // of each thread's sums pass * fours * 4 on
#pragma unroll 1
            for (int i = threadIdx.x; i < fours << bits; i += SHAPE::WARPGROUPS * 128) {
                const int at = (own << bits) + (i & (chunk - 1)), token = (pass * fours + (i >> bits)) * 8 + at % 4 * 2;
                if (at >= WARPGROUP) continue;
                float sum[4] = {};
#pragma unroll 4
                for (int addend = 0; addend < addends; addend++) {
                    float next[4];
                    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                                 : "=f"(next[0]), "=f"(next[1]), "=f"(next[2]), "=f"(next[3])
                                 : "r"(sums_at + ((addend * fours << bits) + i) * 16)
                                 : "memory");
                    for (int j = 0; j < 4; j++) sum[j] += next[j];
                }
                const int64_t row = first_row + at / WARP * 16 + at % WARP / 4;
                for (int j = 0; j < 4; j++) store_y<T>(task, row + j / 2 * 8, token + j % 2, sum[j]);
            }
        };
        const auto store = [](uint32_t to, const float *v) {
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]),
                         "f"(v[3])
                         : "memory");
        };
        if (whole) {
            const uint32_t to = sums_at + ((my_addend * FOURS << bits) + thread) * 16;
#pragma unroll
            for (int pass = 0; pass < SHAPE::PASSES; pass++) {
                if (round || pass) sync_consumers(); // the sums before are read
#pragma unroll
                for (int i = 0; i < FOURS; i++) store(to + (i * 16 << bits), sums + (pass * FOURS + i) * 4);
                sync_consumers();
                add_up(pass, FOURS);
            }
            if (!SHAPE::MANY_SUMS && work.ways && round == work.whole - 1) let_send();
        } else {
            if (SHAPE::MANY_SUMS) let_send();
            const int owner = thread >> bits;
            const uint32_t to = sums_at + ((my_addend * (SUMS / 4) << bits) + (thread & (chunk - 1))) * 16;
            if (owner == own) {
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++) store(to + (i * 16 << bits), sums + i * 4);
            } else {
                sm90::barrier_wait(memory.may_send, 0);
                const uint32_t there = sm90::dsmem_address(to, rank - own + owner);
                const uint32_t full = sm90::dsmem_address(memory.sums_full, rank - own + owner);
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++)
                    sm90::dsmem_store_async(there + (i * 16 << bits), sums + i * 4, full);
            }
            sync_consumers();
            sm90::barrier_wait(memory.sums_full, 0);
            add_up(0, SUMS / 4);
        }
    }
    if (meets && !work.ways) sm90::cluster_wait();
}

#endif

template <typename T, int TOKENS>
__global__ void __launch_bounds__(few_shape<TOKENS>::THREADS, 1)
    tile_few_kernel(const __grid_constant__ few_task task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using SHAPE = few_shape<TOKENS>;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = held(shared_address(shared));
    const few_memory memory = memory_of<TOKENS>(task, base);
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);
    int cluster, rank; // through shfl, as warpgroup: so the compiler knows that they are the same in all lanes
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    cluster = __shfl_sync(FULL_WARP, cluster, 0);
    rank = __shfl_sync(FULL_WARP, rank, 0);
    if (warpgroup == SHAPE::WARPGROUPS) {
        sm90::warpgroup_reg_dealloc<SHAPE::PRODUCER_REGISTERS>();
        produce<TOKENS>(task, memory, cluster, rank);
        if (task.partition[cluster >= task.more].split) sm90::cluster_wait();
    } else {
        if (threadIdx.x == 0) sm90::prefetch_tensor_map(&task.x);
        sm90::warpgroup_reg_alloc<SHAPE::REGISTERS>();
        consume<T, TOKENS>(task, memory, cluster, rank, warpgroup);
    }
#endif
}

// The same product where there is no wgmma: mma.sync, and cp.async by all threads. A block owns a row block and OCTETS
// x 8 tokens; four groups of four warps take a tile each of a stage, which is a slab. Tokens are read through L1.
constexpr int MMA_THREADS = MACKO_TILE_SLAB_TILES * MACKO_TILE_SLICES * WARP;

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
    tile_mma_kernel(const __grid_constant__ few_task task, const uint16_t *x, int64_t x_stride, int cols) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = shared_address(shared);
    const int lane = threadIdx.x % WARP, slice = threadIdx.x / WARP % MACKO_TILE_SLICES;
    const int tile_index = threadIdx.x / (WARP * MACKO_TILE_SLICES);
    const int32_t *offsets = task.offsets + (int64_t)blockIdx.x * task.slabs;
    const int stages = task.slabs, first_token = blockIdx.y * OCTETS * 8;
    const auto fetch = [&](int stage) {
        if (stage < stages) {
            const int from = offsets[stage], units = offsets[stage + 1] - from;
            for (int i = threadIdx.x; i < units * MACKO_TILE_UNIT / 16; i += MMA_THREADS)
                copy_async<16>(base + stage % task.stages * task.stage_bytes + i * 16,
                               task.data + (int64_t)from * MACKO_TILE_UNIT + i * 16);
        }
        commit_copies();
    };
    float sums[OCTETS][4] = {};
    for (int stage = 0; stage + 1 < task.stages; stage++) fetch(stage);
    for (int stage = 0; stage < stages; stage++) {
        if (task.stages >= 4)
            wait_copies<2>();
        else
            wait_copies<0>();
        __syncthreads();
        fetch(stage + task.stages - 1);
        const int k_tile = stage * MACKO_TILE_SLAB_TILES + tile_index;
        const uint32_t slab = base + stage % task.stages * task.stage_bytes;
        tile_streams streams;
        tile_lane tile, before;
        streams.begin(slab, slice, lane);
        tile.read(tile_lane::mask_at(slab, tile_index, slice, lane));
        if (tile_index >= MACKO_TILE_SLAB_TILES / 2) streams.spill();
        if (tile_index % 2) {
            before.read(tile_lane::mask_at(slab, tile_index - 1, slice, lane));
            streams.skip(before.mask);
        }
        tile.count(task.weights);
        tile.find(task.weights, streams);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t a[4], values[2][MACKO_TILE_QUAD];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                tile.load(2 * step + half, values[half], task.weights);
                tile.place(2 * step + half, values[half], a[2 * half], a[2 * half + 1]);
            }
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++) {
                const int token = first_token + octet * 8 + lane / 4;
                uint32_t b[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int col = k_tile * MACKO_TILE_COLS + step * 16 + half * 8 + lane % 4 * 2;
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
    const int64_t row = (int64_t)blockIdx.x * MACKO_TILE_ROWS + slice * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < OCTETS * 4; i++) {
        float sum = sums[i / 4][i % 4];
        for (int other = 0; other < MACKO_TILE_SLAB_TILES - 1; other++)
            sum += others[(other * OCTETS * 4 + i) * 128 + slice * WARP + lane];
        store_y<T>(task, row + i / 2 % 2 * 8, first_token + i / 4 * 8 + lane % 4 * 2 + i % 2, sum);
    }
#endif
}

inline int bits_of(int number) { // the least for which 1 << bits is not less
    int bits = 0;
    while (1 << bits < number) bits++;
    return bits;
}

// How a cluster of `blocks` shares row blocks of so many slabs.
inline few_partition partition_rows(int row_blocks, int blocks, int slabs) {
    few_partition partition{};
    partition.whole = row_blocks / blocks;
    partition.split = row_blocks % blocks;
    partition.ways = partition.split ? blocks / partition.split : blocks;
    partition.share = slabs / partition.ways;
    partition.longer = slabs % partition.ways;
    partition.chunk_bits = bits_of((int)ceil_div(WARPGROUP, partition.ways));
    return partition;
}

// What the block with the most work takes, in stages: adding up sums takes about one with split-K, else half of one.
inline double partition_time(const few_partition &partition, int slabs) {
    return partition.whole * (slabs + 0.5) + (partition.split ? partition.share + (partition.longer > 0) + 1 : 0);
}

inline few_task task_of(const macko_tile_matrix &m, int64_t tokens, const void *bias, void *y) {
    few_task task{};
    task.data = m.data;
    task.offsets = m.offsets;
    task.bias = bias;
    task.y = y;
    task.rows = m.rows;
    task.units = (int)std::min<int64_t>(m.units, INT32_MAX);
    task.mean = (float)m.units / macko_tile_count(m.rows, m.cols);
    task.tokens = (int)tokens;
    task.row_blocks = (int)macko_tile_row_blocks(m.rows);
    task.slabs = (int)macko_tile_slabs(m.cols);
    return task;
}

template <typename T, int TOKENS>
cudaError_t launch(const macko_tile_matrix &m, int64_t tokens, const void *x, int64_t x_stride, const void *bias,
                   void *y, cudaStream_t stream) {
    using SHAPE = few_shape<TOKENS>;
    device_info device;
    cudaError_t error = current_device(&device);
    if (!error) error = allow_all_shared_memory<tile_few_kernel<T, TOKENS>>(device);
    if (error) return error;
    cudaLaunchConfig_t config{};
    few_task task = task_of(m, tokens, bias, y);
    double least = 1e30;
    const int tokens_at = (int)ceil_div(m.widest * MACKO_TILE_UNIT, 1024) *
                          1024; // after the last value they are read (MACKO_TILE_OVERREAD)
    const int stage_bytes = tokens_at + MACKO_TILE_SLAB_TILES * SHAPE::TOKEN_BYTES;
    for (int blocks = 1; blocks <= MAX_CLUSTER && blocks <= task.slabs; blocks++) {
        int clusters;
        error = max_active_clusters<tile_few_kernel<T, TOKENS>, MAX_CLUSTER>(device, blocks, SHAPE::THREADS,
                                                                             device.shared_bytes - 1024, &clusters);
        if (error) return error;
        clusters = std::min(clusters, task.row_blocks);
        const int each = task.row_blocks / clusters, more = task.row_blocks % clusters;
        const few_partition most = partition_rows(each + (more > 0), blocks, task.slabs);
        const few_partition others = partition_rows(each, blocks, task.slabs);
        int sums = most.whole ? MACKO_TILE_SLAB_TILES * WARPGROUP / SHAPE::PASSES : 0, split_sums = 0;
        for (const few_partition &partition : {most, others})
            if (partition.split)
                split_sums = std::max(split_sums, MACKO_TILE_SLAB_TILES * partition.ways << partition.chunk_bits);
        if (!SHAPE::MANY_SUMS) sums = std::max(sums, split_sums);
        const int room = device.shared_bytes - BARRIER_BYTES - sums * TOKENS * 2; // a thread has TOKENS / 2 floats
        const int stages = std::min(room / stage_bytes, MAX_STAGES);
        const double time = std::max(partition_time(most, task.slabs), partition_time(others, task.slabs));
        if (stages < MIN_STAGES || time >= least * 0.99 || split_sums * TOKENS * 2 > stages * stage_bytes) continue;
        least = time;
        task.cluster = blocks;
        task.clusters = clusters;
        task.more = more;
        task.partition[0] = most;
        task.partition[1] = others;
        task.stages = stages;
        config.dynamicSmemBytes = device.shared_bytes - room + stages * stage_bytes;
    }
    task.stage_bytes = stage_bytes;
    task.tokens_at = tokens_at;
    if (!task.cluster) return cudaErrorInvalidValue;
    // H200: with little to do a block waits longest for its first stage; with many tokens L2 is what is waited for.
    const int each = task.partition[0].whole * task.slabs + task.partition[0].share;
    task.window = each < 12 || TOKENS > 32 ? 2 : TOKENS > 16 ? 3 : 4;
    const bool overlaps = may_use_pdl(stream, SHAPE::THREADS);
    // One TMA load for all tokens of a slab is faster than four (H200, most at 32 tokens), but the last tile has to be
    // whole.
    task.boxes = m.cols % MACKO_TILE_COLS ? MACKO_TILE_SLAB_TILES : 1;
    error = task.boxes == 1 ? sm90::make_tensor_map(&task.x, CU_TENSOR_MAP_DATA_TYPE_UINT16, x,
                                                    {MACKO_TILE_COLS, tokens, m.cols / MACKO_TILE_COLS},
                                                    {x_stride * 2, MACKO_TILE_COLS * 2},
                                                    {MACKO_TILE_COLS, TOKENS, MACKO_TILE_SLAB_TILES})
                            : sm90::make_tensor_map(&task.x, CU_TENSOR_MAP_DATA_TYPE_UINT16, x, {m.cols, tokens, 1},
                                                    {x_stride * 2, x_stride * 2}, {MACKO_TILE_COLS, TOKENS, 1});
    if (error) return error;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {(unsigned)task.cluster, 1, 1};
    attributes[1] = pdl_attribute();
    config.gridDim = dim3((unsigned)(task.clusters * task.cluster));
    config.blockDim = dim3(SHAPE::THREADS);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = overlaps ? 2 : 1;
    return cudaLaunchKernelEx(&config, tile_few_kernel<T, TOKENS>, task);
}

template <typename T, int OCTETS>
cudaError_t launch_mma(const macko_tile_matrix &m, int64_t tokens, const void *x, int64_t x_stride, const void *bias,
                       void *y, cudaStream_t stream) {
    device_info device;
    cudaError_t error = current_device(&device);
    if (!error) error = allow_all_shared_memory<tile_mma_kernel<T, OCTETS>>(device);
    if (error) return error;
    few_task task = task_of(m, tokens, bias, y);
    task.stage_bytes = m.widest * MACKO_TILE_UNIT;
    task.stages = device.shared_bytes / task.stage_bytes < 4 ? 2 : 4;
    const int sums_bytes = (MACKO_TILE_SLAB_TILES - 1) * OCTETS * 4 * 128 * 4;
    const int shared_bytes = std::max(task.stages * task.stage_bytes + MACKO_TILE_OVERREAD, sums_bytes);
    if (shared_bytes > device.shared_bytes) return cudaErrorInvalidValue;
    const dim3 grid((unsigned)macko_tile_row_blocks(m.rows), (unsigned)ceil_div(tokens, OCTETS * 8));
    tile_mma_kernel<T, OCTETS>
        <<<grid, MMA_THREADS, shared_bytes, stream>>>(task, (const uint16_t *)x, x_stride, (int)m.cols);
    return cudaGetLastError();
}

template <typename T>
cudaError_t run(const macko_tile_matrix &m, int64_t tokens, const void *x, int64_t x_stride, const void *bias, void *y,
                cudaStream_t stream) {
    int index, major = 0;
    cudaError_t error = cudaGetDevice(&index);
    if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    if (error) return error;
    if (!has_wgmma(major)) {
        const auto run = tokens <= 8    ? launch_mma<T, 1>
                         : tokens <= 16 ? launch_mma<T, 2>
                         : tokens <= 32 ? launch_mma<T, 4>
                                        : launch_mma<T, 8>;
        return run(m, tokens, x, x_stride, bias, y, stream);
    }
    if (tokens > 64) return cudaErrorInvalidValue; // that is for macko_tile_many_cuda
    const auto run = tokens <= 8    ? launch<T, 8>
                     : tokens <= 16 ? launch<T, 16>
                     : tokens <= 32 ? launch<T, 32>
                                    : launch<T, 64>;
    return run(m, tokens, x, x_stride, bias, y, stream);
}

} // namespace
} // namespace macko

cudaError_t macko_tile_few_cuda(const macko_tile_matrix *m, int64_t tokens, const void *x, int64_t x_stride,
                                const void *bias, void *y, cudaStream_t stream) {
    using namespace macko;
    if (!m->rows || !tokens) return cudaSuccess;
    return m->dtype == MACKO_F16 ? run<__half>(*m, tokens, x, x_stride, bias, y, stream)
                                 : run<__nv_bfloat16>(*m, tokens, x, x_stride, bias, y, stream);
}
