// The kernel for up to 64 tokens (sm_90a), and its launch: y = x W^T, bound by memory. For more see many_kernel.cuh.
//
//     block      warpgroups 0 .. 3   consumers: tile 0 .. 3 of every slab, decoded 16 columns at a time into registers
//                                    of operand A, and multiplied (wgmma, fp32 sums) while the next ones are decoded.
//                                    How is the codec's (codec.cuh)
//                                    To HALVES_TO tokens of a codec: two neighbouring tiles of every other slab,
//                                    warpgroups 0 and 1 of slabs 0, 2 ..., 2 and 3 of slabs 1, 3 ...: what a slab
//                                    costs a warp is paid once for two tiles. To 8 tokens each warp multiplies by
//                                    itself then (mma.sync), as warpgroups wait for their slowest warp at every wgmma
//                warpgroup 4         four producer warps, stages 0, 4, 8 ... of the pipeline, 1, 5, 9 ... and so on
//     stage      | slab: one bulk copy | tokens of its tiles: TMA, [tile][token][64 columns], 128-byte swizzle |
//     barriers   full: slab and tokens have come. empty: all consumers of the stage have released it
//
//     cluster    has row blocks that follow each other. Its blocks take as many whole ones each; the slabs of those that
//                are left over are dealt out evenly (split-K), so a share may end one row block and begin the next:
//     left over  |======= row block a =======|======= row block b =======|
//     shares     |=== rank 0 ===|=== rank 1 ===|=== rank 2 ===|= rank 3 =|      and the sums meet through DSMEM
//
//     pace       stages are asked for no faster than memory can bring them: else all blocks ask for all their stages at
//                the start, 30 MB, the first stage comes with the last, and some SMs get ahead of others by a tenth
//
// Nothing of x is gathered and no dense tile is written, so a token costs the tensor cores alone. Sums are added in a
// fixed order, each block adding up those of some threads.
#pragma once

#include <array>
#include <map>
#include <mutex>
#include <type_traits>

#include "../core/cuda.cuh"
#include "../core/sm90.cuh"
#include "codec.cuh"
#include "few_plan.h"
#include "multiply.h"

namespace macko {
namespace {

constexpr int MAX_CLUSTER = 8;
[[maybe_unused]] constexpr int PRODUCERS = 4; // warps
constexpr int MAX_STAGES = 16;
constexpr int BARRIER_BYTES = 1024; // at the beginning of shared memory
constexpr int MIN_STAGES = 3;       // one is multiplied, one prepared, one waits for its last product
constexpr int MIN_HALVES = 4;       // two of either half of the warpgroups: one is multiplied, one comes
// With fewer than so many stages a tile a warp is faster than halves (H200, tile at density 0.7, 16 tokens, where there are
// four: 28672 x 8192 99.8 us in halves at 350e7c5, 89.7 at 111a810; 11008 x 4096 21.6 and 19.1).
constexpr int GOOD_HALVES = 6;
// Of memory's rate, what a kernel asks for where there is much to do; more than it gets, or it would be missing wherever a
// block is late. Where there is little, the first stage counts. (Chosen on an H200, 4680 of 4814 bytes a ns. On an H100, of
// 3352, with this pace, 3258, and not an H200's, three shapes take 2 to 10 % less time launched alone; back to back
// from 2 % less to 2 % more.)
constexpr double MEMORY_SHARE = 0.972;
constexpr int WARPGROUP =
    MACKO_FEW_WARPGROUP; // threads; of all warpgroups the same thread has the same sums, each of its tile

template <class CODEC>
struct few_task {
    // What the first fetch needs, in 48 bytes: so it is in one line of the constant cache (one more: 0.15 us, H200).
    const int32_t *offsets;
    const uint8_t *data;
    int slabs, each; // of a row block; row blocks of a cluster
    // From a block's first slab to that of the cluster's next block; the first `longer` blocks are one further on. Both
    // in the clusters with a row block more than the others, and in the others.
    int advance[2];
    short more; // clusters that have a row block more
    char longer[2];
    int all_slabs;
    float mean;     // units of a slab in the mean
    int slab_units; // of every slab, if SAME_SIZE

    uint32_t pace[2];                   // ns from a stage's fetch to the next one's, at least; by clusters as above
    int stages, stage_bytes, tokens_at; // of the pipeline; a stage is a slab, and from this byte on its tokens
    int cluster;                        // blocks of a cluster
    few_partition partition[2];         // of the clusters with a row block more, and of the others
    int boxes;                          // TMA loads of a stage's tokens
    int tokens, token_bytes;            // bytes of a tile's tokens, filled up to whole swizzle atoms of eight
    const void *bias;
    macko_slab_outputs y;
    int64_t rows;
    int area; // bytes of a split row block's sums
    typename CODEC::constants weights;
    CUtensorMap x; // [tile][token][column of it] with boxes of a slab, or [0][token][column] with boxes of a tile
};

template <int TOKENS, class CODEC>
struct few_shape {
    static constexpr int WARPGROUPS = MACKO_SLAB_TILES;
    // Whether a warpgroup takes half of every other slab, and not a tile of each (above).
    static constexpr bool HALVES = TOKENS <= CODEC::HALVES_TO;
    // Then, of few tokens, warps multiply by themselves (mma.sync) and wait for no other one.
    static constexpr bool BY_WARPS = HALVES && TOKENS == 8;
    // The registers of an SM: the producers, a warpgroup for that reason, leave theirs to the consumers.
    static constexpr int THREADS = (WARPGROUPS + 1) * 128;
    static constexpr int REGISTERS = 112, PRODUCER_REGISTERS = 32;
    // How often a consumer warpgroup releases a stage: racecheck wants it of every thread (sm90::WARP_ARRIVALS).
    static constexpr int RELEASES = sm90::WARP_ARRIVALS > 1 ? WARPGROUP : BY_WARPS ? WARPGROUP / WARP : 1;
    static constexpr int LEAST_STAGES = HALVES ? MIN_HALVES : MIN_STAGES;
    static constexpr int STAGE_RELEASES = (HALVES ? WARPGROUPS / 2 : WARPGROUPS) * RELEASES;
    // Where there are many sums, those of a whole row block meet in several passes, and those of a split one take the
    // place of the stages.
    static constexpr bool MANY_SUMS = TOKENS > 32;
    static constexpr int PASSES = MANY_SUMS ? 8 : TOKENS > 16 ? 2 : 1;
    static constexpr int SUMS_BYTES = WARPGROUPS * WARPGROUP * TOKENS * 2 / PASSES; // a thread has TOKENS / 2 floats
    // After the last stage's tokens, half of TOKENS at least, wgmma reads on: into the sums.
    static_assert(TOKENS <= 16 || TOKENS / 2 * MACKO_SLAB_TILE_COLS * 2 <= SUMS_BYTES);
    static_assert(REGISTERS * WARPGROUPS + PRODUCER_REGISTERS <= 65536 / THREADS / 8 * 8 * (WARPGROUPS + 1));
};

// Whether there is a plan for slabs of so many bytes, the densest ones, too: a cluster of one block splits no row block, and
// has the stages that it needs.
template <class CODEC>
constexpr bool densest_has_plan(int slab_bytes) {
    using SHAPE = few_shape<CODEC::HALVES_TO, CODEC>;
    const int tokens_bytes = MACKO_SLAB_TILES * CODEC::HALVES_TO * MACKO_SLAB_TILE_COLS * 2;
    return SHAPE::LEAST_STAGES * (ceil_div(slab_bytes, 1024) * 1024 + tokens_bytes) + SHAPE::SUMS_BYTES +
               BARRIER_BYTES <=
           227 * 1024;
}

// Where things are in shared memory. The swizzle wants the tokens, and so the stages, at multiples of 1024.
struct few_memory {
    // Barriers. `unused` is what the first release of each row block arrives at, when there is no stage to release: so
    // no test is needed. Nobody waits for it, so it has no phase to end.
    uint32_t full, empty, sums_full, may_send, unused; // sums_full: of the first and of the second row block of a share
    uint32_t splits;                                   // few_split of both
    uint32_t stages, sums, split_sums;                 // sums: of the warpgroups; of blocks that share a row block
};

template <int TOKENS, class CODEC>
__host__ __device__ inline few_memory memory_of(const few_task<CODEC> &task, uint32_t base) {
    using SHAPE = few_shape<TOKENS, CODEC>;
    few_memory m;
    m.full = base;
    m.empty = m.full + MAX_STAGES * 8;
    m.sums_full = m.empty + MAX_STAGES * 8;
    m.may_send = m.sums_full + 16;
    m.unused = m.may_send + 8;
    m.splits = m.unused + 8;
    m.stages = base + BARRIER_BYTES;
    m.sums = m.stages + task.stages * task.stage_bytes;
    m.split_sums = SHAPE::MANY_SUMS ? m.stages + SHAPE::SUMS_BYTES * SHAPE::PASSES : m.sums + SHAPE::SUMS_BYTES;
    return m;
}

// Where a consumer is in the pipeline.
struct stage_position {
    uint32_t full, phase; // the stage's barrier
    uint32_t slab;        // its byte CODEC::BASE
};

// Named barriers: the producers have made the mbarriers; of the consumers.
enum { BARRIERS_MADE = 1, CONSUMERS_MET };

// Not the SM's clock: with many tokens that falls (power), and memory does not.
[[maybe_unused]] __device__ __forceinline__ uint32_t nanoseconds() {
    uint32_t now;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now));
    return now;
}

// By one lane of each producer warp: the barriers of its stages, and of the sums by that of the first warp.
template <int TOKENS, class CODEC>
__device__ __forceinline__ void make_barriers(const few_task<CODEC> &task, const few_memory &memory, int warp) {
    using SHAPE = few_shape<TOKENS, CODEC>;
    for (int stage = warp; stage < task.stages; stage += PRODUCERS) {
        sm90::barrier_init(memory.full + stage * 8, 1);
        sm90::barrier_init(memory.empty + stage * 8, SHAPE::STAGE_RELEASES);
    }
    if (warp == 0) {
        sm90::barrier_init(memory.unused, sm90::MOST_ARRIVALS);
        sm90::barrier_init(memory.sums_full, 1);
        sm90::barrier_init(memory.sums_full + 8, 1);
        sm90::barrier_init(memory.may_send, task.cluster);
    }
    sm90::fence_barrier_init();
}

// One of a producer warp's stages.
struct produced_stage {
    int stage, round; // in the pipeline; stages before this round of it
};

// A producer warp: every fourth stage. (One warp alone took longer for a stage than its copies take.) Its first lanes
// hold where its next four slabs begin and end.
template <int TOKENS, class CODEC>
__device__ __forceinline__ void produce(const few_task<CODEC> &task, uint32_t base, int cluster, int rank) {
    using SHAPE = few_shape<TOKENS, CODEC>;
    constexpr int AT_ONCE = 4, ABOUT = 32, PREFETCHED = 2;
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(FULL_WARP, threadIdx.x / WARP % PRODUCERS, 0);
    const uint32_t began = nanoseconds();
    // Before anything else a block asks where its first slabs are, and has what lies about where they should be
    // prefetched to L2 until those have come.
    const bool fewer = cluster >= task.more;
    const int first_slab = few_first_slab(task, cluster, rank);
    int from = 0, to = 0, next_from = 0, next_to = 0;
    if (!CODEC::SAME_SIZE && lane < AT_ONCE) { // those after the block's own are not used
        const int32_t *at = task.offsets + min(first_slab + warp + lane * PRODUCERS, task.all_slabs - 1);
        asm volatile("ld.global.s32 %0, [%1];" : "=r"(next_from) : "l"(at));
        asm volatile("ld.global.s32 %0, [%1 + 4];" : "=r"(next_to) : "l"(at));
    }
    if constexpr (!CODEC::SAME_SIZE) // so two more slabs hold what is prefetched
        static_assert(ABOUT * MACKO_SLAB_UNIT < 2 * CODEC::LEAST_BYTES);
    if (!CODEC::SAME_SIZE && lane == 0 && warp < PREFETCHED && first_slab + warp + 3 <= task.all_slabs) {
        const int about = (int)((first_slab + warp) * task.mean), begin = max(0, about - ABOUT);
        sm90::bulk_prefetch_l2(task.data + (int64_t)begin * MACKO_SLAB_UNIT,
                               (about - begin + (int)task.mean + ABOUT) * MACKO_SLAB_UNIT);
    }
    const few_memory memory = memory_of<TOKENS>(task, base);
    if (lane == 0) make_barriers<TOKENS>(task, memory, warp);
    __syncwarp();
    named_barrier_arrive(BARRIERS_MADE, SHAPE::THREADS);
    const few_work work(task, cluster, rank);
    const int whole_stages = work.whole * task.slabs;
    // A pipeline of three stages leaves the fourth warp none.
    const int total = warp < task.stages ? work.whole * task.slabs + work.end - work.start : 0;
    // Stage after stage, the slabs of a block are neighbours, but for one leap.
    const int shares = work.left * task.slabs + work.start - whole_stages, wholes = work.first_row_block * task.slabs;
    const uint64_t policy = evict_first();
    const auto next = [&](produced_stage &p) {
        p.stage += PRODUCERS;
        if (p.stage >= task.stages) {
            p.stage = warp;
            p.round += task.stages;
        }
    };
    produced_stage load{warp, 0}, here = load;
    for (int i = 0; !CODEC::SAME_SIZE && i < lane % AT_ONCE; i++) next(load);
    const auto load_offsets = [&](int &from, int &to, bool asked) {
        const int i = load.round + load.stage;
        if (!(asked && i < task.slabs && !load.round)) {
            from = to = 0;
            if (i < total) {
                const int32_t *at = task.offsets + i + (i < whole_stages ? wholes : shares);
                from = at[0];
                to = at[1];
            }
        }
        for (int k = 0; k < AT_ONCE; k++) next(load);
    };
    if (!CODEC::SAME_SIZE) load_offsets(next_from, next_to, true);
    if (task.cluster > 1) sm90::cluster_arrive_relaxed();
    const uint32_t pace = task.pace[fewer];
    uint32_t phase = 1;
    int row_begin = 0; // the stage with which the row block began, less those of the share that are another block's
    bool in_share = false;
    for (int count = 0; here.round + here.stage < total; count++) {
        const int i = here.round + here.stage, stage = here.stage, fourth = count & (AT_ONCE - 1);
        if (i >= whole_stages && !in_share) row_begin = whole_stages - work.start, in_share = true;
        while (i - row_begin >= task.slabs) row_begin += task.slabs;
        const int slab = i - row_begin;
        if (!CODEC::SAME_SIZE && fourth == 0) {
            from = next_from;
            to = next_to;
            load_offsets(next_from, next_to, false);
        }
        int begin = 0, units = task.slab_units;
        if (CODEC::SAME_SIZE) {
            begin = (i + (i < whole_stages ? wholes : shares)) * units;
        } else {
            begin = __shfl_sync(FULL_WARP, from, fourth);
            units = __shfl_sync(FULL_WARP, to, fourth) - begin;
        }
        const int bytes = units * MACKO_SLAB_UNIT;
        const uint32_t at = memory.stages + stage * task.stage_bytes, barrier = memory.full + stage * 8;
        if (here.round) sm90::barrier_wait(memory.empty + stage * 8, phase);
        while (nanoseconds() - began < i * pace) {
        }
        if (lane == 0) {
            sm90::barrier_arrive_expect_tx(barrier, bytes + MACKO_SLAB_TILES * task.token_bytes);
            sm90::bulk_copy(at, task.data + (int64_t)begin * MACKO_SLAB_UNIT, bytes, barrier, policy);
        }
        __syncwarp();
        // Weights may be fetched before the kernel before this one is done (PDL), tokens not.
        if (count == 0) pdl_wait();
        if (lane < task.boxes)
            sm90::tma_load(at + task.tokens_at + lane * task.token_bytes, &task.x,
                           task.boxes == 1 ? 0 : (slab * MACKO_SLAB_TILES + lane) * MACKO_SLAB_TILE_COLS, 0,
                           task.boxes == 1 ? slab * MACKO_SLAB_TILES : 0, barrier);
        __syncwarp();
        next(here);
        if (here.stage == warp) phase ^= 1;
    }
    pdl_launch_dependents();
}

// Four sums of a thread of a warpgroup: two rows, two tokens.
template <class CODEC, class T = typename CODEC::T>
__device__ __forceinline__ void store_four(const few_task<CODEC> &task, int output, int64_t first_row, int thread,
                                           int four, const float (&sum)[4]) {
    const int64_t row = first_row + thread / WARP * 16 + thread % WARP / 4;
    const int token = four * 8 + thread % 4 * 2;
    const int64_t stride = task.y.output[output].rows;
    T *y = (T *)task.y.output[output].y + token * stride + row;
    float bias[2] = {}, scale[2] = {};
    if (task.bias)
        for (int k = 0; k < 2; k++)
            if (row + k * 8 < task.rows) bias[k] = to_float(((const T *)task.bias)[row + k * 8]);
    if constexpr (CODEC::SCALED)
        for (int k = 0; k < 2; k++)
            if (row + k * 8 < task.rows) scale[k] = task.weights.scales[row + k * 8] * CODEC::FOLD;
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (row + k / 2 * 8 < task.rows && token + k % 2 < task.tokens)
            y[k % 2 * stride + k / 2 * 8] =
                from_float<T>(CODEC::SCALED ? sum[k] * scale[k / 2] + bias[k / 2] : sum[k] + bias[k / 2]);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL // no warnings of what is not used elsewhere

__device__ __forceinline__ void store_sums(uint32_t to, const float *v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}
__device__ __forceinline__ void load_sums(float (&v)[4], uint32_t from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(from)
                 : "memory");
}

// To L2, while the products of these rows run: they are wanted at the end of all.
__device__ __forceinline__ void prefetch_scales(const float *scales, int64_t first_row, int64_t rows) {
    const int64_t row = first_row + threadIdx.x * 32;
    if (threadIdx.x < MACKO_SLAB_ROWS / 32 && row < rows) asm volatile("prefetch.global.L2 [%0];" ::"l"(scales + row));
}

// A consumer warpgroup: a tile of every slab, or half of every other one. In order: the first tile is prepared; stages
// are multiplied (the main loop); the four warpgroups' sums, and with split-K those of other blocks, meet in shared
// memory and are stored. The phases are lambdas and not functions of their own: with functions, whether of a struct or of
// references as lambdas have them, ptxas 13.0 takes the same 96 registers and spills none, but orders instructions and
// chooses uniform registers in another way, and 64 tokens take 8 instructions more (dense8).
template <class CODEC, int TOKENS>
__device__ __forceinline__ void consume(const few_task<CODEC> &task, const few_memory &memory, int cluster, int rank,
                                        int warpgroup) {
    using SHAPE = few_shape<TOKENS, CODEC>;
    constexpr int SUMS = TOKENS / 2, FOURS = SUMS / 4 / SHAPE::PASSES;
    // Is 0; unless held it is asked for at every stage.
    const uint32_t first_thread = opaque(threadIdx.x % (SHAPE::BY_WARPS ? WARP : WARPGROUP));
    const int thread = threadIdx.x % 128, lane = thread % WARP, slice = __shfl_sync(FULL_WARP, thread / WARP, 0);
    const few_work work(task, cluster, rank);
    constexpr bool HALVES = SHAPE::HALVES;
    const int first_tile = HALVES ? warpgroup % 2 * 2 : warpgroup, turn = HALVES ? warpgroup / 2 : 0;
    const auto own_stages = [&](int stages, int before) { // of so many, after so many
        return HALVES ? (stages + !((turn + before) % 2)) / 2 : stages;
    };
    // The upper half of a descriptor is the same for all stages, the lower one has a fixed distance from the slab.
    const uint64_t descriptor =
        sm90::smem_descriptor<128>(memory.stages + task.tokens_at + first_tile * task.token_bytes);
    const stage_position begin{memory.full, 0, memory.stages + CODEC::BASE};
    const uint32_t tokens_offset = opaque((uint32_t)descriptor - (begin.slab >> 4));
    typename few_reader_of<CODEC, HALVES>::type reader(task.weights, first_tile, slice, lane);
    const uint32_t full_end = memory.full + task.stages * 8;
    // In halves a slab is found by its stage's barrier: one multiplication. And where the second tile's tokens are.
    const uint32_t ring_bytes = HALVES ? opaque(task.stages * 8) : 0,
                   slab_factor = HALVES ? opaque(task.stage_bytes / 8) : 0,
                   slab_base = HALVES ? opaque(begin.slab - begin.full * slab_factor) : 0,
                   second_tile = HALVES ? opaque(task.token_bytes >> 4) : 0;
    // By warps: of either tile a lane's row of four matrices (32 columns of x), of columns 0 and 32 on.
    uint32_t x_at[2][2] = {};
    for (int i = 0; SHAPE::BY_WARPS && i < 4; i++)
        x_at[i / 2][i % 2] = opaque(task.tokens_at - CODEC::BASE + (first_tile + i / 2) * task.token_bytes +
                                    lane % 8 * 128 + ((lane / 8 + i % 2 * 4) ^ lane % 8) * 16);
    const auto release = [&](uint32_t full) {
        if (SHAPE::RELEASES == WARPGROUP || first_thread == 0)
            sm90::barrier_arrive(full + (memory.empty - memory.full));
    };
    const auto sync_consumers = [] { named_barrier_sync(CONSUMERS_MET, SHAPE::WARPGROUPS * 128); };
    // Of many sums y is whole: there are no registers for more.
    const auto output_of = [&](int64_t row) { return SHAPE::MANY_SUMS ? 0 : macko_slab_output_of(&task.y, row); };
    named_barrier_sync(BARRIERS_MADE, SHAPE::THREADS);
    if (task.cluster > 1) {
        sm90::cluster_arrive_relaxed();
        sm90::cluster_wait(); // the barriers of the others are there; here nothing waits for it
    }
    // What the end needs, known before it: a line of the constant cache takes 0.15 us (H200).
    asm volatile("" ::"l"(task.bias), "l"(task.y.output[0].y), "l"(task.y.begins[2]), "l"(task.rows), "r"(task.tokens),
                 "r"(task.area));
    // A tile is prepared while the one before it is multiplied, also across row blocks.
    constexpr std::integral_constant<int, 0> step0;
    constexpr std::integral_constant<int, 1> step1;
    constexpr std::integral_constant<int, 2> step2;
    constexpr std::integral_constant<int, 3> step3;
    stage_position here = begin, ahead = begin; // what is multiplied, and what is prepared
    if (turn) here.full += 8, here.slab += task.stage_bytes, ahead = here;
    int stages_left = own_stages(work.whole * task.slabs + work.end - work.start, 0); // with this one
    // The first one of the row blocks that the share is of; how they are split is looked up while the first stage comes.
    int nth = 0;
    while ((nth + 1) * task.slabs <= work.start) nth++;
    auto *splits = (few_split *)__cvta_shared_to_generic(memory.splits);
    if (threadIdx.x < 2 && work.end > work.start)
        splits[threadIdx.x] =
            few_split(task.partition[cluster >= task.more], task.cluster, nth + threadIdx.x, task.slabs);
    if (stages_left) {
        sm90::barrier_wait(here.full, here.phase);
        prepare_tile<0>(reader, here.slab, task.weights);
    }
    // How many slabs of its first and second row block the share has.
    const int in_first = min(work.end, (nth + 1) * task.slabs) - work.start,
              in_second = work.end - work.start - in_first;
    const int rounds = work.whole + (in_first > 0) + (in_second > 0);
    int stages_before = 0;                   // of the rounds before
    const auto go_on = [&] {                 // in halves, to the next stage
        const bool more = --stages_left > 0; // else it stays there, as below
        if (more) ahead.full += 16;
        if (ahead.full >= full_end) {
            ahead.full -= ring_bytes;
            ahead.phase ^= 1;
        }
        ahead.slab = opaque(ahead.full * slab_factor + slab_base);
    };
    for (int round = 0; round < rounds; round++) {
        const bool whole = round<work.whole, second = round> work.whole;
        const int row_block = whole ? work.first_row_block + round : work.left + nth + second;
        const int64_t first_row = (int64_t)row_block * MACKO_SLAB_ROWS;
        if constexpr (CODEC::SCALED) prefetch_scales(task.weights.scales, first_row, task.rows);
        float sums[SUMS];
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = 0;
        sm90::warpgroup_fence_operand(sums);
        uint32_t previous = memory.unused - (memory.empty - memory.full);
        const auto multiply = [&](auto tile, auto next) { // a stage
            constexpr int TILE = decltype(tile)::value, NEXT = decltype(next)::value;
            // After the last stage it stays there, and prepares it again for nothing. Without a branch: with one, the
            // compiler makes addresses that the loads of both ways share, instead of constant distances.
            const bool more = --stages_left > 0;
            ahead.full += more ? 8 : 0;
            ahead.slab += more ? task.stage_bytes : 0;
            if (ahead.full == full_end) {
                ahead.full = begin.full;
                ahead.slab = begin.slab;
                ahead.phase ^= 1;
            }
            sm90::barrier_wait(ahead.full, ahead.phase);
            const uint64_t b = descriptor >> 32 << 32 | (tokens_offset + (here.slab >> 4));
            const auto take = [&](auto step) {
                constexpr int STEP = decltype(step)::value;
                reader.template load_next<STEP, TILE>(here.slab, task.weights);
                reader.template prepare<STEP, NEXT>(ahead.slab, task.weights);
                // Waits for the products that read these registers last. All of the stage before have ended two steps
                // into this one: that stage is released then, not a product later (H200: less time at every shape).
                if (STEP == 0) sm90::warpgroup_wait<1>();
                if (STEP == 1) {
                    sm90::warpgroup_wait<0>();
                    release(previous);
                }
                reader.template make<STEP, TILE>(a, task.weights);
                multiply_pair<typename CODEC::T, TOKENS, STEP>(sums, a, b);
            };
            take(step0);
            take(step1);
            take(step2);
            take(step3);
            previous = here.full;
            here = ahead;
        };
        if constexpr (SHAPE::BY_WARPS) {
            const int stages = whole ? task.slabs : second ? in_second : in_first;
            float odd[SUMS] = {}; // of steps 1 and 3
            const auto multiply_half = [&](auto tile, auto next) {
                constexpr int TILE = decltype(tile)::value, NEXT = decltype(next)::value;
                uint32_t x[2][4];
                for (int i = 0; i < 2; i++) ldmatrix_x4(x[i], here.slab + x_at[TILE][i]);
                const auto take = [&](auto step) {
                    constexpr int STEP = decltype(step)::value;
                    reader.template load_next<STEP, TILE>(here.slab, task.weights);
                    reader.template prepare<STEP, NEXT>(ahead.slab, task.weights);
                    if (STEP == 1 && TILE == 0) {
                        __syncwarp();
                        release(previous);
                    }
                    reader.template make<STEP, TILE>(a, task.weights);
                };
                take(step0);
                take(step1);
                take(step2);
                take(step3);
                for (int i = 0; i < 4; i++)
                    mma<typename CODEC::T>(i % 2 ? odd : sums, a[i], x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
            };
#pragma unroll 1
            for (int left = own_stages(stages, stages_before); left > 0; left--) {
                multiply_half(step0, step1);
                go_on();
                sm90::barrier_wait(ahead.full, ahead.phase);
                multiply_half(step1, step0);
                previous = here.full;
                here = ahead;
            }
            stages_before += stages;
            for (int i = 0; i < SUMS; i++) sums[i] += odd[i];
            __syncwarp();
        } else if constexpr (HALVES) {
            const int stages = whole ? task.slabs : second ? in_second : in_first;
            uint32_t both[2][4][4]; // operand A of either tile
            // Of a stage the first tile, while the second one is prepared, and then that one.
            const auto multiply_half = [&](auto tile, auto next, uint32_t tokens) {
                constexpr int TILE = decltype(tile)::value, NEXT = decltype(next)::value;
                const auto take = [&](auto step) {
                    constexpr int STEP = decltype(step)::value;
                    reader.template load_next<STEP, TILE>(here.slab, task.weights);
                    reader.template prepare<STEP, NEXT>(ahead.slab, task.weights);
                    reader.template make<STEP, TILE>(both[TILE], task.weights);
                };
                take(step0);
                take(step1);
                take(step2);
                take(step3);
                // One batch of products at a time: with two in flight ptxas sees registers that are in use being made, where
                // `make` has no branch, and lets each product wait for the one before it (C7513).
                sm90::warpgroup_wait<0>();
                if (TILE == 0) release(previous);
                multiply_tile<typename CODEC::T, TOKENS>(sums, both[TILE], descriptor >> 32 << 32 | tokens);
            };
#pragma unroll 1
            for (int left = own_stages(stages, stages_before); left > 0; left--) {
                const uint32_t tokens = tokens_offset + (here.slab >> 4);
                multiply_half(step0, step1, tokens);
                go_on();
                sm90::barrier_wait(ahead.full, ahead.phase);
                multiply_half(step1, step0, tokens + second_tile);
                previous = here.full;
                here = ahead;
            }
            stages_before += stages;
        } else {
            int left = whole ? task.slabs : second ? in_second : in_first;
#pragma unroll 1
            for (; left > 0; left -= 2) { // two at a time, so that nothing is moved from `next` to `tile`
                multiply(step0, step1);
                if (left == 1) {
                    reader.move_1_to_0();
                    break;
                }
                multiply(step1, step0);
            }
        }
        if constexpr (!SHAPE::BY_WARPS) {
            sm90::warpgroup_wait<0>();
            sm90::warpgroup_fence_operand(sums);
        }
        release(previous);
        if (!round) pdl_wait(); // before y is written
        // The sums of the four warpgroups, in shared memory: [tile][fours][thread] of four floats. Where the row block
        // is split, what they add up to goes on to the block that adds it to that of the others.
        const int output = output_of(first_row);
        const bool at_once = SHAPE::MANY_SUMS && !whole; // all sums fit: no stage is needed any more
        const uint32_t sums_at = at_once ? memory.stages : memory.sums;
        const auto add_up = [&](int pass, int fours) { // of each thread's sums pass * fours * 4 on
#pragma unroll 1
            for (int i = threadIdx.x; i < fours * WARPGROUP; i += SHAPE::WARPGROUPS * WARPGROUP) {
                float sum[4];
                load_sums(sum, sums_at + i * 16);
#pragma unroll
                for (int tile = 1; tile < SHAPE::WARPGROUPS; tile++) {
                    float next[4];
                    load_sums(next, sums_at + (tile * fours * WARPGROUP + i) * 16);
                    for (int k = 0; k < 4; k++) sum[k] += next[k];
                }
                const int at = (uint32_t)i % WARPGROUP, four = pass * fours + (uint32_t)i / WARPGROUP;
                if (whole) {
                    store_four(task, output, first_row, at, four, sum);
                } else {
                    const few_split split = splits[second];
                    const int owner = split.first + (at >> split.chunk_bits), way = rank - split.first;
                    const bool owners_second =
                        few_work::share_at(task.partition[cluster >= task.more], owner) < (nth + second) * task.slabs;
                    const uint32_t to =
                        memory.split_sums + owners_second * task.area +
                        (((way * (SUMS / 4) + four) << split.chunk_bits) + (at & ((1 << split.chunk_bits) - 1))) * 16;
                    if (owner == rank)
                        store_sums(to, sum);
                    else
                        sm90::dsmem_store_async(sm90::dsmem_address(to, owner), sum,
                                                sm90::dsmem_address(memory.sums_full + owners_second * 8, owner));
                }
            }
        };
        if (at_once) {
            sync_consumers(); // all stages are read: the other blocks may send
            if (threadIdx.x < task.cluster) sm90::barrier_arrive_remote(memory.may_send, threadIdx.x);
#pragma unroll
            for (int i = 0; i < SUMS / 4; i++)
                store_sums(sums_at + ((warpgroup * (SUMS / 4) + i) * WARPGROUP + thread) * 16, sums + i * 4);
            sync_consumers();
            sm90::barrier_wait(memory.may_send, 0);
            add_up(0, SUMS / 4);
        } else {
#pragma unroll
            for (int pass = 0; pass < SHAPE::PASSES; pass++) {
                if (round || pass) sync_consumers(); // the sums before are read
#pragma unroll
                for (int i = 0; i < FOURS; i++)
                    store_sums(sums_at + ((warpgroup * FOURS + i) * WARPGROUP + thread) * 16,
                               sums + (pass * FOURS + i) * 4);
                sync_consumers();
                add_up(pass, FOURS);
            }
        }
    }
    // Split row blocks: what the others have sent.
    if (rounds > work.whole) sync_consumers(); // the block's own sums are there
    for (int round = work.whole; round < rounds; round++) {
        const bool second = round > work.whole;
        const few_split split = splits[second];
        const int way = rank - split.first, chunk = 1 << split.chunk_bits;
        const int own = max(0, min(chunk, WARPGROUP - (way << split.chunk_bits)));
        const uint32_t full = memory.sums_full + second * 8;
        if (threadIdx.x == 0) sm90::barrier_arrive_expect_tx(full, own * (SUMS / 4) * 16 * (split.ways - 1));
        sm90::barrier_wait(full, 0);
        const int64_t first_row = (int64_t)(work.left + nth + second) * MACKO_SLAB_ROWS;
        const int output = output_of(first_row);
#pragma unroll 1
        for (int i = threadIdx.x; i < (SUMS / 4) << split.chunk_bits; i += SHAPE::WARPGROUPS * WARPGROUP) {
            const int at = (way << split.chunk_bits) + (i & (chunk - 1));
            if (at >= WARPGROUP) continue;
            float sum[4] = {};
#pragma unroll 1
            for (int other = 0; other < split.ways; other++) {
                float next[4];
                load_sums(next,
                          memory.split_sums + second * task.area + ((other * (SUMS / 4) << split.chunk_bits) + i) * 16);
                for (int k = 0; k < 4; k++) sum[k] += next[k];
            }
            store_four(task, output, first_row, at, i >> split.chunk_bits, sum);
        }
    }
}

#endif

template <class CODEC, int TOKENS>
__global__ void __launch_bounds__(few_shape<TOKENS, CODEC>::THREADS, 1)
    slab_few_kernel(const __grid_constant__ few_task<CODEC> task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using SHAPE = few_shape<TOKENS, CODEC>;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = opaque(shared_address(shared));
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);
    int cluster, rank; // through shfl, as warpgroup: so the compiler knows that they are the same in all lanes
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    cluster = __shfl_sync(FULL_WARP, cluster, 0);
    rank = __shfl_sync(FULL_WARP, rank, 0);
    if (warpgroup == SHAPE::WARPGROUPS) {
        sm90::warpgroup_reg_dealloc<SHAPE::PRODUCER_REGISTERS>();
        produce<TOKENS>(task, base, cluster, rank);
        if (task.cluster > 1) sm90::cluster_wait();
    } else {
        if (threadIdx.x == 0) sm90::prefetch_tensor_map(&task.x);
        sm90::warpgroup_reg_alloc<SHAPE::REGISTERS>();
        consume<CODEC, TOKENS>(task, memory_of<TOKENS>(task, base), cluster, rank, warpgroup);
    }
#endif
}

// How a matrix is shared by blocks: of a launch all that depends on sizes alone.
struct few_plan {
    int grid, shared_bytes;
    int cluster, each, more, area, stages, stage_bytes, tokens_at;
    few_partition partition[2];
    int advance[2], longer[2], most[2]; // most: stages of a block
    double time;                        // as few_shares counts it
};

template <class CODEC, int TOKENS>
cudaError_t choose_plan(int row_blocks, int slabs, int widest, int token_bytes, const device_info &device,
                        few_plan *plan) {
    using SHAPE = few_shape<TOKENS, CODEC>;
    // Which blocks do what does not depend on the tokens, so that a token's bits do not; how many stages there are does.
    // After the last value (MACKO_SLAB_OVERREAD) is what may be read, and so is after the last token: the sums.
    plan->tokens_at = (int)ceil_div(widest * MACKO_SLAB_UNIT, 1024) * 1024;
    const int least_bytes = plan->tokens_at + MACKO_SLAB_TILES * token_bytes,
              most_bytes = plan->tokens_at + MACKO_SLAB_TILES * TOKENS * MACKO_SLAB_TILE_COLS * 2;
    plan->time = 1e30;
    for (int blocks = 1; blocks <= std::min({MAX_CLUSTER, slabs, device.num_sms}); blocks++) {
        int clusters;
        const cudaError_t error = max_active_clusters<slab_few_kernel<CODEC, TOKENS>, MAX_CLUSTER>(
            device, blocks, SHAPE::THREADS, device.shared_bytes - 1024, &clusters);
        if (error) return error;
        clusters = std::min(clusters, row_blocks);
        const few_shares shares(row_blocks, clusters, blocks, slabs, device.num_sms);
        // Sums of a split row block: at most twice as many as a warpgroup has (few_split).
        const int area = shares.split * (shares.halves ? 1 : 2) * WARPGROUP * TOKENS * 2;
        const int areas = SHAPE::MANY_SUMS ? 0 : area * (1 + shares.crosses);
        const int available = device.shared_bytes - BARRIER_BYTES - SHAPE::SUMS_BYTES - areas;
        // In halves an even number: so a stage belongs to the same warpgroups at every turn. Else one could wait for the
        // next phase of a barrier before the last one has ended, which parity cannot tell from the one after it.
        const auto stages_of = [&](int bytes) {
            const int most = std::min(available / bytes, MAX_STAGES);
            return SHAPE::HALVES ? most / 2 * 2 : most;
        };
        int stages = stages_of(most_bytes), stage_bytes = most_bytes;
        const double time = shares.time * (stages < 5 ? 1.15 : 1); // (H200, 32 tokens)
        // Where they take the place of stages, no share may go on with another row block.
        const auto fits = [&](int bytes) {
            return !SHAPE::MANY_SUMS || !shares.split ||
                   (!shares.crosses && SHAPE::SUMS_BYTES * SHAPE::PASSES + area <= bytes);
        };
        if (!fits(stages * stage_bytes) || stages < SHAPE::LEAST_STAGES || time >= plan->time * 0.99) continue;
        if (const int more = stages_of(least_bytes); fits(more * least_bytes)) {
            stages = more;
            stage_bytes = least_bytes;
        }
        plan->time = time;
        plan->grid = clusters * blocks;
        plan->cluster = blocks;
        plan->each = shares.each;
        plan->more = shares.more;
        plan->area = area;
        for (int i = 0; i < 2; i++) {
            plan->partition[i] = shares.partition[i];
            plan->advance[i] = shares.advance[i];
            plan->longer[i] = shares.longer[i];
            plan->most[i] = shares.stages[i];
        }
        plan->stages = stages;
        plan->stage_bytes = stage_bytes;
        plan->shared_bytes = device.shared_bytes - available + stages * stage_bytes;
    }
    return plan->cluster ? cudaSuccess : cudaErrorInvalidValue;
}

// The plan, kept for the next time: choosing takes longer than a launch, and a model asks for the same ones again and
// again.
template <class CODEC, int TOKENS>
cudaError_t plan_of(int row_blocks, int slabs, int widest, int token_bytes, const device_info &device, few_plan *plan) {
    constexpr size_t MOST = 4096;
    static std::mutex mutex;
    static std::map<std::array<int, 6>, few_plan> plans;
    const std::lock_guard<std::mutex> lock(mutex);
    const std::array<int, 6> key = {device.index, device.num_sms, row_blocks, slabs, widest, token_bytes};
    if (const auto found = plans.find(key); found != plans.end()) {
        *plan = found->second;
        return cudaSuccess;
    }
    *plan = {};
    if (const cudaError_t error = choose_plan<CODEC, TOKENS>(row_blocks, slabs, widest, token_bytes, device, plan))
        return error;
    if (plans.size() >= MOST) plans.clear();
    plans[key] = *plan;
    return cudaSuccess;
}

template <class CODEC, int TOKENS>
cudaError_t launch(const slab_weight<CODEC> &w, const slab_product &p, const device_info &device) {
    using SHAPE = few_shape<TOKENS, CODEC>;
    const int64_t tokens = p.tokens;
    if (tokens > TOKENS || (SHAPE::MANY_SUMS && p.y.output[1].rows))
        return cudaErrorInvalidValue; // for the kernel for many
    const int slabs = (int)macko_slabs_across(w.cols), row_blocks = (int)macko_slab_row_blocks(w.rows);
    // Not all TOKENS: rows of a box that are not in the tensor take long to fill (H200, 33 tokens of 64: by half again).
    const int tokens_8 = (int)ceil_div(tokens, 8) * 8, token_bytes = tokens_8 * MACKO_SLAB_TILE_COLS * 2;
    few_plan plan;
    cudaError_t error = allow_all_shared_memory<slab_few_kernel<CODEC, TOKENS>>(device);
    if (!error) error = plan_of<CODEC, TOKENS>(row_blocks, slabs, w.widest, token_bytes, device, &plan);
    if (error) return error;
    // Of 9 to 16 tokens, which fill as many: so the number of tokens does not matter.
    if constexpr (TOKENS == 16 && TOKENS == CODEC::HALVES_TO)
        if (plan.stages < GOOD_HALVES) return launch<CODEC, 32>(w, p, device);
    few_task<CODEC> task{};
    task.offsets = w.offsets;
    task.data = w.data;
    task.slabs = slabs;
    task.each = plan.each;
    task.more = (short)plan.more;
    task.all_slabs = slabs * row_blocks;
    task.mean = (float)w.units / task.all_slabs;
    task.slab_units = w.widest;
    // All blocks end together: those with more to do go faster.
    const double rate = device.memory_rate ? MEMORY_SHARE * device.memory_rate : 1e30; // unknown: there is no pace
    const double total = (double)w.units * MACKO_SLAB_UNIT / rate * (plan.time < 12 ? 1.09 : 1);
    for (int i = 0; i < 2; i++) {
        task.partition[i] = plan.partition[i];
        task.advance[i] = plan.advance[i];
        task.longer[i] = (char)plan.longer[i];
        task.pace[i] = (uint32_t)(total / plan.most[i]);
    }
    task.stages = plan.stages;
    task.stage_bytes = plan.stage_bytes;
    task.tokens_at = plan.tokens_at;
    task.cluster = plan.cluster;
    task.tokens = (int)tokens;
    task.token_bytes = token_bytes;
    task.bias = p.bias;
    task.y = p.y;
    task.rows = w.rows;
    task.area = plan.area;
    task.weights = w.constants;
    // One TMA load for all tokens of a slab is faster than four (H200, most at 32 tokens), but the last tile has to be
    // whole.
    task.boxes = w.cols % MACKO_SLAB_TILE_COLS ? MACKO_SLAB_TILES : 1;
    error = task.boxes == 1
                ? sm90::make_tensor_map(&task.x, CU_TENSOR_MAP_DATA_TYPE_UINT16, p.x,
                                        {MACKO_SLAB_TILE_COLS, tokens, w.cols / MACKO_SLAB_TILE_COLS},
                                        {p.x_stride * 2, MACKO_SLAB_TILE_COLS * 2},
                                        {MACKO_SLAB_TILE_COLS, tokens_8, MACKO_SLAB_TILES})
                : sm90::make_tensor_map(&task.x, CU_TENSOR_MAP_DATA_TYPE_UINT16, p.x, {w.cols, tokens, 1},
                                        {p.x_stride * 2, p.x_stride * 2}, {MACKO_SLAB_TILE_COLS, tokens_8, 1});
    if (error) return error;
    const bool pdl = may_use_pdl(p.stream, SHAPE::THREADS);
    return launch_kernel(slab_few_kernel<CODEC, TOKENS>,
                         {plan.grid, SHAPE::THREADS, plan.shared_bytes, pdl, task.cluster}, p.stream, task);
}

// By the kernel for as many tokens as are together in a block.
template <class CODEC>
cudaError_t multiply_few(const slab_weight<CODEC> &weight, const slab_product &p) {
    if (!weight.rows || !p.tokens) return cudaSuccess;
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    const auto run = p.tokens <= 8    ? launch<CODEC, 8>
                     : p.tokens <= 16 ? launch<CODEC, 16>
                     : p.tokens <= 32 ? launch<CODEC, 32>
                                      : launch<CODEC, 64>;
    return run(weight, p, device);
}

} // namespace

template <class MATRIX>
cudaError_t slab_few(const MATRIX &m, const slab_product &p) {
    return with_weight(m, [&](const auto &weight) { return multiply_few(weight, p); });
}

} // namespace macko
