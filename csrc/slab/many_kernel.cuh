// The kernel for many tokens (sm_90a): y = x W^T, bound by the tensor cores.
//
//     output tile of a block: ROW_BLOCKS x 64 rows by TOKENS tokens, fp32 sums in registers
//
//     warpgroups 0 .. ROW_BLOCKS - 1   consumers, 64 rows each: decode a tile of the weight into registers of operand A
//                                      while the tile before is multiplied (wgmma) with the tokens in shared memory
//     last warpgroup, warp 0           store warp: output by TMA, flags of partial sums
//                      warp 1          producer of other clusters' partial sums, by bulk copies
//                      warp 2          producer of tokens, by TMA
//                      warp 3          producer of slabs, by bulk copies
//
//     shared memory    | barriers | x: stages of TOKENS x 64 columns | slabs: stages of a slab for each row block |
//     x pipeline       tokens of a segment; then for split-K a stage for each warpgroup's sums from the other block;
//                      partial sums of other clusters; a stage for each warpgroup's output; and the next segment
//     barriers         full: what the producer asked for has come. empty: all consumers have released the stage
//
// Two blocks are a cluster. With SPLIT_K = 1 they have neighbouring rows, and each fetches half of the tokens for both
// (multicast). With SPLIT_K = 2 they have the same output tile: each takes half of the slabs, then gets the sums of
// half of the tokens from the other (DSMEM); so do four with SPLIT_K = 4. Who multiplies what is in schedule.h; a task
// is what a launch says.
#pragma once

#include <type_traits>

#include "../core/cuda.cuh"
#include "../core/flags.cuh"
#include "../core/pipeline.cuh"
#include "codec.cuh"
#include "many_plan.h"

namespace macko {
namespace {

template <class CODEC>
struct many_task {
    using T = typename CODEC::T;
    CUtensorMap x, last_x; // boxes of MACKO_SLAB_TILE_COLS columns by BOX tokens, and by what is left of all tokens
    CUtensorMap y[MACKO_SLAB_MOST_OUTPUTS]; // boxes of MACKO_SLAB_ROWS rows by OUT_BOX tokens
    const uint8_t *data;
    const int32_t *offsets;
    const void *bias;
    macko_slab_outputs outputs; // of y
    bool plain;                 // y cannot be stored by TMA
    int64_t rows;
    int tokens, last_tokens; // last: of the last token tile
    macko_slab_schedule schedule;
    int units;      // of data, unless SAME_SIZE
    float mean;     // of them in a slab
    int slab_units; // of every slab, if SAME_SIZE
    macko_slab_many_stages stages;
    float4 *partials; // [share][2][ROW_BLOCKS][OUT_SUMS / 4][128]: of tiles that another cluster fixes up
    uint64_t *flags;  // [share][2][ROW_BLOCKS]: `epoch` once they are there
    uint64_t epoch;   // a number of this launch alone, so no flag has to be cleared before
    typename CODEC::constants weights;
};

template <int TOKENS_, int ROW_BLOCKS_, int SPLIT_K_>
struct many_shape {
    static constexpr int TOKENS = TOKENS_, ROW_BLOCKS = ROW_BLOCKS_, SPLIT_K = SPLIT_K_;
    static_assert(TOKENS % MACKO_SLAB_MANY_TOKENS_UNIT == 0);
    static __host__ __device__ constexpr macko_slab_many_shape plain() {
        return {TOKENS, ROW_BLOCKS, SPLIT_K};
    }
    // Blocks that multicast tokens to each other, the tokens that each fetches, and those of a box, 256 at most.
    static constexpr int CLUSTER = macko_slab_cluster_blocks({TOKENS, ROW_BLOCKS, SPLIT_K});
    static constexpr int MULTICAST = CLUSTER / SPLIT_K, FETCHED = TOKENS / MULTICAST;
    static constexpr int BOX = FETCHED > 256 ? FETCHED / 2 : FETCHED;
    // The registers of an SM: the producers, a warpgroup for that reason, leave theirs to the consumers.
    static constexpr int THREADS = (ROW_BLOCKS + 1) * MACKO_SLAB_WARPGROUP;
    // With 232 for 320 tokens sparse11 had over forty spills in the loop; with 240 it has one, and producers have a few.
    static constexpr int REGISTERS = ROW_BLOCKS > 2 ? (TOKENS > 128 ? 160 : 152)
                                     : TOKENS > 256 ? 240
                                     : TOKENS > 128 ? 232
                                                    : 208;
    static constexpr int PRODUCER_REGISTERS = ROW_BLOCKS > 2 ? (TOKENS > 128 ? 32 : 56)
                                              : TOKENS > 256 ? 24
                                              : TOKENS > 128 ? 40
                                                             : 88;
    static_assert(REGISTERS * ROW_BLOCKS + PRODUCER_REGISTERS <= 65536 / THREADS / 8 * 8 * (ROW_BLOCKS + 1));
    static constexpr int STAGE_BYTES = macko_slab_x_stage_bytes({TOKENS, ROW_BLOCKS, SPLIT_K});
    static constexpr int MAX_STAGES = macko_slab_max_x_stages({TOKENS, ROW_BLOCKS, SPLIT_K});
    static constexpr int SUMS = TOKENS / 2; // of a thread
    static constexpr bool READS_AHEAD = macko_slab_reads_ahead({TOKENS, ROW_BLOCKS, SPLIT_K});
    // What a block stores of an output tile: with split-K, its own half of the tokens.
    static constexpr int OUT_TOKENS = TOKENS / SPLIT_K, OUT_SUMS = SUMS / SPLIT_K;
    static constexpr int OUT_BOX = OUT_TOKENS > 256 ? OUT_TOKENS / 2 : OUT_TOKENS;
    static constexpr int PARTIAL_BYTES = macko_slab_partial_bytes({TOKENS, ROW_BLOCKS, SPLIT_K});
    static_assert(PARTIAL_BYTES == MACKO_SLAB_WARPGROUP * OUT_SUMS * 4);
    // Stages that take a warpgroup's sums of the other blocks.
    static constexpr int EXCHANGE_STAGES = ((SPLIT_K - 1) * PARTIAL_BYTES + STAGE_BYTES - 1) / STAGE_BYTES;
    static_assert(SPLIT_K == 1 || STAGE_BYTES % PARTIAL_BYTES == 0);
    static_assert(OUT_TOKENS * MACKO_SLAB_ROWS * 2 <= STAGE_BYTES); // a stage takes a warpgroup's output
    // Another cluster's partial sums come in several stages, each with some of every warpgroup.
    static constexpr int FIX_UP_BYTES = ROW_BLOCKS > 2 || SPLIT_K > 2 ? STAGE_BYTES / 4 : STAGE_BYTES / ROW_BLOCKS;
    static constexpr int FIX_UP_STAGES = PARTIAL_BYTES / FIX_UP_BYTES;
    static_assert(FIX_UP_STAGES * FIX_UP_BYTES == PARTIAL_BYTES && ROW_BLOCKS * FIX_UP_BYTES <= STAGE_BYTES);
    static_assert(FIX_UP_BYTES % (MACKO_SLAB_WARPGROUP * 16) == 0); // 16 bytes a thread at a time
    // TMA's limit, the swizzle's 1024 bytes, and what stmatrix stores at once.
    static_assert(BOX <= 256 && OUT_BOX <= 256 && BOX % 8 == 0 && OUT_BOX % 8 == 0 && OUT_TOKENS % 16 == 0);
    // Barriers of the exchange are two, used alternately. When the next one but one is used, this segment's stage is
    // free: of the three one is not given away, so it has stages for its output, and each block has a half slab of the
    // two after it at least (deal, many_plan.c).
    static_assert(SPLIT_K != 2 || 3 * ROW_BLOCKS + MACKO_SLAB_HALF_TILES >= MAX_STAGES);
    // So many tiles before the end of a segment its second warpgroup lets the first one go ahead: then one exchanges,
    // gives or stores its sums while the other multiplies.
    static constexpr int LAG = ROW_BLOCKS != 2 ? 0 : TOKENS > 128 ? 3 : 2;
    // Offsets of barriers in shared memory, 8 bytes each; the tokens' stages follow at X.
    static constexpr int X_FULL = 0, X_EMPTY = X_FULL + MAX_STAGES * 8;
    static constexpr int SLAB_FULL = X_EMPTY + MAX_STAGES * 8;
    static constexpr int SLAB_EMPTY = SLAB_FULL + ROW_BLOCKS * MACKO_SLAB_MANY_MAX_SLAB_STAGES * 8;
    static constexpr int MAY_SEND = SLAB_EMPTY + ROW_BLOCKS * MACKO_SLAB_MANY_MAX_SLAB_STAGES * 8;
    static constexpr int EXCHANGED = MAY_SEND + 2 * ROW_BLOCKS * 8;
    static constexpr int BARRIERS_END = EXCHANGED + 2 * ROW_BLOCKS * 8, X = MACKO_SLAB_MANY_BARRIER_BYTES;
    static_assert(BARRIERS_END <= X);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL // no warnings of what is not used elsewhere

// What a segment takes of the x pipeline: for its tokens and the sums of the other block; and, after the partial sums
// of other clusters, for its output.
template <class SHAPE>
__device__ __forceinline__ int stages_before_fix_up(const macko_slab_segment &segment) {
    return macko_slab_own_count(&segment) * MACKO_SLAB_HALF_TILES + SHAPE::EXCHANGE_STAGES * SHAPE::ROW_BLOCKS;
}
template <class SHAPE>
__device__ __forceinline__ int stages_of_output(const macko_slab_segment &segment) {
    return segment.first > 0 ? 0 : SHAPE::ROW_BLOCKS;
}

// Where the partial sums of a share's first segment are, by warpgroup, and their flag.
template <class SHAPE>
__device__ __forceinline__ int partials_index(const macko_slab_share &share, int index, int warpgroup) {
    return (index * SHAPE::CLUSTER + share.rank) * SHAPE::ROW_BLOCKS + warpgroup;
}
template <class SHAPE, class CODEC>
__device__ __forceinline__ float4 *partials_of(const many_task<CODEC> &task, const macko_slab_share &share, int index,
                                               int warpgroup) {
    return task.partials + (int64_t)partials_index<SHAPE>(share, index, warpgroup) * (SHAPE::PARTIAL_BYTES / 16);
}
template <class SHAPE, class CODEC>
__device__ __forceinline__ uint64_t *flag_of(const many_task<CODEC> &task, const macko_slab_share &share, int index,
                                             int warpgroup) {
    return task.flags + partials_index<SHAPE>(share, index, warpgroup);
}

// The first of a block's row blocks, and of the tokens that it stores. (macko_slab_first_row_block says the same to the
// host. Of constants that are no template's the compiler makes other code.)
template <class SHAPE>
__device__ __forceinline__ int first_row_block(const macko_slab_share &share, int row_tile) {
    return (SHAPE::MULTICAST > 1 ? row_tile * 2 + share.rank : row_tile) * SHAPE::ROW_BLOCKS;
}
template <class SHAPE>
__device__ __forceinline__ int first_token(const macko_slab_share &share, int token_tile) {
    return token_tile * SHAPE::TOKENS + (SHAPE::SPLIT_K > 1 ? share.rank * SHAPE::OUT_TOKENS : 0);
}

// How often a consumer warpgroup releases a stage: racecheck wants it of every thread (sm90::WARP_ARRIVALS).
constexpr int RELEASES = sm90::WARP_ARRIVALS > 1 ? MACKO_SLAB_WARPGROUP : 1;

// Named barriers of threads. 1 to ROW_BLOCKS are the warpgroups' own.
enum { TOKENS_FETCHED = 4, FIRST_THROUGH, SUMS_READY /* three of each warpgroup, in rotation */ };
constexpr int SUMS_READY_THREADS = MACKO_SLAB_WARPGROUP + WARP;
// A warpgroup may be two segments further before the store warp has seen one: no stage of a segment that is given away
// waits for the store warp.
__device__ __forceinline__ int sums_ready(int warpgroup, uint32_t segments) {
    return SUMS_READY + warpgroup * 3 + segments % 3;
}

// All mbarriers. Every warp but the last two makes some: one takes a warp about 40 clocks, whichever lane makes it
// (H200, by a clock in the kernel).
template <class SHAPE>
__device__ __forceinline__ void make_barriers(uint32_t smem) {
    const int at = (threadIdx.x / WARP + threadIdx.x % WARP * (SHAPE::THREADS / WARP - 2)) * 8;
    if (at < SHAPE::BARRIERS_END)
        sm90::barrier_init(
            smem + at, at >= SHAPE::X_EMPTY && at < SHAPE::SLAB_FULL ? SHAPE::ROW_BLOCKS * SHAPE::MULTICAST * RELEASES
                       : at >= SHAPE::SLAB_EMPTY && at < SHAPE::MAY_SEND ? MACKO_SLAB_SLICES * sm90::WARP_ARRIVALS
                       : at >= SHAPE::MAY_SEND && at < SHAPE::EXCHANGED  ? (SHAPE::SPLIT_K > 2 ? SHAPE::SPLIT_K - 1 : 1)
                                                                         : 1);
    sm90::fence_barrier_init(); // copies may use them, and all warps of both blocks that have waited
    __syncwarp();
}

// ---- Producers: a warp each ----

// Gives a consumer warpgroup the next stage as scratch memory, for sums or output: full without a copy.
template <class SHAPE, class CODEC>
__device__ __forceinline__ void scratch_stage(const many_task<CODEC> &task, uint32_t smem, sm90::pipeline_state &x) {
    sm90::producer_acquire(smem + SHAPE::X_EMPTY, x);
    if (threadIdx.x % WARP == 0) {
        const uint32_t full = smem + SHAPE::X_FULL + x.stage * 8;
        sm90::barrier_arrive(full);
        sm90::barrier_wait(full, x.phase); // at once; who exchanges sums does not, and synccheck wants to see it
    }
    __syncwarp();
    x.advance(task.stages.x);
}

// The end of the x pipeline. No block may leave while its neighbour multicasts to it: all has come once all stages have
// been released. (A barrier of the cluster would have to order what all threads have written, in the whole GPU.) With
// split-K blocks fetch for themselves, and what each sends the other is waited for at every exchange.
template <class SHAPE, class CODEC>
__device__ __forceinline__ void producer_tail(const many_task<CODEC> &task, uint32_t smem, sm90::pipeline_state x) {
    for (int i = 0; SHAPE::MULTICAST > 1 && i < task.stages.x; i++) {
        sm90::producer_acquire(smem + SHAPE::X_EMPTY, x);
        x.advance(task.stages.x);
    }
}

// Partial sums that other clusters have of the tile that this one fixes up, share by share, into the x pipeline. By
// bulk copies: consumers have no registers for many loads at once. They begin while the last products run.
template <class SHAPE, class CODEC>
__device__ __forceinline__ void fetch_partials(const many_task<CODEC> &task, uint32_t smem) {
    const macko_slab_share share = macko_slab_share_of(&task.schedule, SHAPE::plain(), blockIdx.x);
    sm90::cluster_wait();
    macko_slab_segment segment{};
    int before = 0; // stages that come before the partial sums
    for (int next = 0; next < share.half_slabs; next += macko_slab_length(&segment)) {
        if (next) before += stages_of_output<SHAPE>(segment);
        segment = macko_slab_segment_at(&share, next);
        before += stages_before_fix_up<SHAPE>(segment);
    }
    if (!segment.fixes_up) return;
    pdl_wait();
    const int lane = threadIdx.x % WARP, others = macko_slab_contributors(&share, segment.tile);
    sm90::pipeline_state x = {before % task.stages.x, (uint32_t)(before / task.stages.x % 2)};
    bool tokens_fetched = false;
    for (int other = macko_slab_share_index(&share) + 1; other <= macko_slab_share_index(&share) + others; other++) {
        if (lane < SHAPE::ROW_BLOCKS) { // a lane for each warpgroup's
            uint64_t *flag = flag_of<SHAPE>(task, share, other, lane);
            while (load_acquire(flag) != task.epoch) {
            }
            *flag = 0;                                       // a graph launches this again with the same epoch
            asm volatile("fence.proxy.async;" ::: "memory"); // bulk copies read what was stored
        }
        __syncwarp();
        // Not before the last tokens: until then the barrier of a stage may be more than a round back.
        if (!tokens_fetched) named_barrier_sync(TOKENS_FETCHED, 2 * WARP);
        tokens_fetched = true;
        for (int i = 0; i < SHAPE::FIX_UP_STAGES; i++) {
            const uint32_t full = smem + SHAPE::X_FULL + x.stage * 8;
            sm90::producer_acquire(smem + SHAPE::X_EMPTY, x);
            if (lane == 0) sm90::barrier_arrive_expect_tx(full, SHAPE::ROW_BLOCKS * SHAPE::FIX_UP_BYTES);
            __syncwarp();
            if (lane < SHAPE::ROW_BLOCKS)
                sm90::bulk_copy(smem + SHAPE::X + x.stage * SHAPE::STAGE_BYTES + lane * SHAPE::FIX_UP_BYTES,
                                partials_of<SHAPE>(task, share, other, lane) + i * (SHAPE::FIX_UP_BYTES / 16),
                                SHAPE::FIX_UP_BYTES, full);
            __syncwarp();
            x.advance(task.stages.x);
        }
    }
    for (int i = 0; i < SHAPE::ROW_BLOCKS; i++) scratch_stage<SHAPE>(task, smem, x); // for the output
    producer_tail<SHAPE>(task, smem, x);
}

// Tokens of all slabs, a box or two a tile, and the other stages of the x pipeline up to the fix-up.
template <class SHAPE, class CODEC>
__device__ __forceinline__ void fetch_tokens(const many_task<CODEC> &task, uint32_t smem) {
    const macko_slab_share share = macko_slab_share_of(&task.schedule, SHAPE::plain(), blockIdx.x);
    const int lane = threadIdx.x % WARP;
    sm90::pipeline_state x;
    // Before the first tokens are asked for, once all else is known: waits for all barriers of both blocks and for the
    // launch before (PDL). Then the next launch may begin. Its blocks come once all of this one have begun, each where
    // one has ended, as each takes an SM.
    bool begun = false;
    const auto begin = [&] {
        if (!begun) {
            sm90::cluster_wait();
            pdl_launch_dependents();
        }
        begun = true;
    };
    int segments = 0;
    for (int next = 0; next < share.half_slabs; segments++) {
        const macko_slab_segment segment = macko_slab_segment_at(&share, next);
        const bool first_segment = next == 0;
        const macko_slab_place place = macko_slab_place_of(&task.schedule, segment.tile);
        next += macko_slab_length(&segment);
        // What follows the last tokens in shared memory is whatever was there: each token has its own rows of y.
        const int tokens = place.token_tile == task.schedule.token_tiles - 1 ? task.last_tokens : SHAPE::TOKENS;
        const int before = SHAPE::MULTICAST > 1 ? share.rank * SHAPE::FETCHED : 0,
                  own = min(SHAPE::FETCHED, tokens - before);
        const int bytes = tokens * MACKO_SLAB_TILE_COLS * 2, first = place.token_tile * SHAPE::TOKENS + before;
        for (int i = 0; i < macko_slab_own_count(&segment) * MACKO_SLAB_HALF_TILES; i++) {
            const int k_tile =
                macko_slab_nth(&segment, i / MACKO_SLAB_HALF_TILES) * MACKO_SLAB_HALF_TILES + i % MACKO_SLAB_HALF_TILES;
            begin();
            sm90::producer_acquire(smem + SHAPE::X_EMPTY, x);
            // All blocks' first stages come before anybody's third: else they come with the last ones.
            if (first_segment && i == 2) sm90::barrier_wait(smem + SHAPE::X_FULL, 0);
            if (lane == 0) {
                const uint32_t full = smem + SHAPE::X_FULL + x.stage * 8;
                const uint32_t to = smem + SHAPE::X + x.stage * SHAPE::STAGE_BYTES + before * MACKO_SLAB_TILE_COLS * 2;
                sm90::barrier_arrive_expect_tx(full, bytes);
#pragma unroll
                for (int box = 0; box < SHAPE::FETCHED; box += SHAPE::BOX) {
                    const CUtensorMap *map = own - box >= SHAPE::BOX ? &task.x : &task.last_x;
                    const uint32_t at = to + box * MACKO_SLAB_TILE_COLS * 2;
                    if (SHAPE::MULTICAST == 1 && (box == 0 || own > box))
                        sm90::tma_load(at, map, k_tile * MACKO_SLAB_TILE_COLS, first + box, full);
                    else if (SHAPE::MULTICAST > 1 && own > box)
                        sm90::tma_load_multicast(at, map, k_tile * MACKO_SLAB_TILE_COLS, first + box, full, 3);
                }
            }
            __syncwarp();
            x.advance(task.stages.x);
        }
        begin();
        if (SHAPE::SPLIT_K > 1) // stages for the sums from the other blocks
            for (int i = 0; i < SHAPE::ROW_BLOCKS; i++) {
                for (int j = 0; j < SHAPE::EXCHANGE_STAGES; j++) scratch_stage<SHAPE>(task, smem, x);
                if (lane < SHAPE::SPLIT_K - 1)
                    sm90::barrier_arrive_remote(smem + SHAPE::MAY_SEND + (segments % 2 * SHAPE::ROW_BLOCKS + i) * 8,
                                                share.rank ^ (SHAPE::SPLIT_K > 2 ? lane + 1 : 1));
                __syncwarp();
            }
        if (segment.fixes_up) { // the last one: fetch_partials goes on
            named_barrier_arrive(TOKENS_FETCHED, 2 * WARP);
            return;
        }
        for (int i = 0; i < stages_of_output<SHAPE>(segment); i++) scratch_stage<SHAPE>(task, smem, x);
    }
    begin();
    producer_tail<SHAPE>(task, smem, x);
}

// To the next stage a slab for each row block, by as many lanes: units `from` to `to` of the data, of each lane its own.
// A lane waits for its own slab's place. racecheck takes no notice where some lanes of a warp wait, together or one after
// another, and named what they copied next (H200, 512ba27), so in its build all wait for all of them.
// once: the L2 policy of what is read once; 0: none. Not evict_normal, which is said to be the same as none: with it
// 6336 x 8192 by 512 tokens took 247,600 cycles for 239,800 (dense12 in blocks of 192 x 128, four token tiles, H200).
template <class SHAPE, typename UNIT>
__device__ __forceinline__ void copy_slabs(uint32_t smem, uint32_t slabs_at, const macko_slab_many_stages &stages,
                                           sm90::pipeline_state &slabs, const uint8_t *data, UNIT from, UNIT to,
                                           uint64_t once) {
    constexpr bool ALL_WAIT = sm90::WARP_ARRIVALS > 1;
    const uint32_t empty = smem + SHAPE::SLAB_EMPTY, lane = threadIdx.x % WARP;
    for (int i = 0; ALL_WAIT && i < SHAPE::ROW_BLOCKS; i++)
        sm90::barrier_wait(empty + (slabs.stage * SHAPE::ROW_BLOCKS + i) * 8, slabs.phase ^ 1);
    if (lane < SHAPE::ROW_BLOCKS) {
        const int place = slabs.stage * SHAPE::ROW_BLOCKS + lane, bytes = int(to - from) * MACKO_SLAB_UNIT;
        const uint32_t full = smem + SHAPE::SLAB_FULL + place * 8;
        if (!ALL_WAIT) sm90::barrier_wait(empty + place * 8, slabs.phase ^ 1);
        sm90::barrier_arrive_expect_tx(full, bytes);
        const uint32_t at = slabs_at + place * stages.slab_bytes;
        const uint8_t *slab = data + (int64_t)from * MACKO_SLAB_UNIT;
        if (once)
            sm90::bulk_copy(at, slab, bytes, full, once);
        else
            sm90::bulk_copy(at, slab, bytes, full);
    }
    __syncwarp();
    slabs.advance(stages.slabs);
}

// Slabs, a lane for each row block. The first offsets, whose place the plan knows, are asked for before all else.
template <class SHAPE, class CODEC>
__device__ __forceinline__ void fetch_slabs(const many_task<CODEC> &task, uint32_t smem) {
    const macko_slab_schedule &schedule = task.schedule;
    const int lane = threadIdx.x % WARP, of_row = min(lane, SHAPE::ROW_BLOCKS - 1) * schedule.slabs;
    int from = 0, to = 0;
    // After the last row block any other one will do: its output is not stored.
    const auto in_matrix = [&](int slab) {
        int at = slab + of_row;
        while (at >= schedule.row_blocks * schedule.slabs) at -= schedule.slabs;
        return at;
    };
    const auto ask = [&](int slab) {
        if (CODEC::SAME_SIZE) {
            from = in_matrix(slab) * task.slab_units;
            to = from + task.slab_units;
        } else {
            from = task.offsets[in_matrix(slab)];
            to = task.offsets[in_matrix(slab) + 1];
        }
    };
    const int first_slab = schedule.first_slabs[blockIdx.x];
    if (first_slab >= 0) {
        const int slab = in_matrix(first_slab);
        // Until the offsets have come, what lies about where the first slab should be is prefetched to L2.
        if (!CODEC::SAME_SIZE && lane < SHAPE::ROW_BLOCKS) {
            constexpr int ABOUT = 32;
            const int begin = max(0, min((int)((float)slab * task.mean), task.units) - ABOUT);
            sm90::bulk_prefetch_l2(task.data + (int64_t)begin * MACKO_SLAB_UNIT,
                                   min((int)task.mean + 2 * ABOUT, task.units - begin) * MACKO_SLAB_UNIT);
        }
        ask(first_slab);
    }
    __syncwarp();
    sm90::cluster_arrive_relaxed();
    const uint32_t slabs_at = smem + SHAPE::X + task.stages.x * SHAPE::STAGE_BYTES;
    // Slabs that many token tiles want are to be found in L2: where they leave first 8192 x 28672 by 8192 tokens reads 9.1 GB
    // from memory, else 7.2 (with evict_normal, H100, dense12, ncu, 2026-11-26), and 8192 x 8192 by 8192 takes 2.6 % longer,
    // in as many cycles (H200). Two token tiles read them at about the same time: 8192 x 8192 by 640 takes 178,200 cycles
    // where they leave first, else 182,300 (H200).
    const uint64_t once = schedule.token_tiles > 2 ? 0 : evict_first();
    sm90::pipeline_state slabs;
    const auto fetch = [&] { copy_slabs<SHAPE>(smem, slabs_at, task.stages, slabs, task.data, from, to, once); };
    sm90::cluster_wait();
    if (first_slab < 0) return;
    fetch();
    const macko_slab_share share = macko_slab_share_of(&schedule, SHAPE::plain(), blockIdx.x);
    bool first = true;
    for (int next = 0; next < share.half_slabs;) {
        const macko_slab_segment segment = macko_slab_segment_at(&share, next);
        next += macko_slab_length(&segment);
        const macko_slab_place place = macko_slab_place_of(&schedule, segment.tile);
        const int row = first_row_block<SHAPE>(share, place.row_tile) * schedule.slabs;
        for (int i = 0; i < macko_slab_own_count(&segment); i += i < macko_slab_singles(&segment) ? 1 : 2) {
            if (!first) {
                ask(row + macko_slab_nth(&segment, i) / 2);
                fetch();
            }
            first = false;
        }
    }
}

// ---- The store warp: consumers would wait for their stores ----

// Raises the flags of this block's partial sums, and stores the output.
template <class SHAPE, class CODEC>
__device__ __forceinline__ void store_outputs(const many_task<CODEC> &task, uint32_t smem) {
    const macko_slab_share share = macko_slab_share_of(&task.schedule, SHAPE::plain(), blockIdx.x);
    sm90::cluster_wait();
    const int lane = threadIdx.x % WARP;
    uint32_t segments = 0;
    int stages = 0; // of the x pipeline up to the end of the segment
    for (int next = 0; next < share.half_slabs; segments++) {
        const macko_slab_segment segment = macko_slab_segment_at(&share, next);
        next += macko_slab_length(&segment);
        stages += stages_before_fix_up<SHAPE>(segment) +
                  (segment.fixes_up ? macko_slab_contributors(&share, segment.tile) * SHAPE::FIX_UP_STAGES : 0) +
                  stages_of_output<SHAPE>(segment);
        const macko_slab_place place = macko_slab_place_of(&task.schedule, segment.tile);
        const int token = first_token<SHAPE>(share, place.token_tile);
        for (int warpgroup = 0; warpgroup < SHAPE::ROW_BLOCKS; warpgroup++) {
            const int stage = (stages - SHAPE::ROW_BLOCKS + warpgroup) % task.stages.x;
            const int64_t row = (int64_t)(first_row_block<SHAPE>(share, place.row_tile) + warpgroup) * MACKO_SLAB_ROWS;
            named_barrier_sync(sums_ready(warpgroup, segments), SUMS_READY_THREADS);
            if (segment.first > 0) {
                if (lane == 0)
                    store_release(flag_of<SHAPE>(task, share, macko_slab_given(&share, segment.tile), warpgroup),
                                  task.epoch);
            } else {
                if (lane == 0 && !task.plain && row < task.rows && token < task.tokens) {
                    const int output = macko_slab_output_of(&task.outputs, row);
#pragma unroll
                    for (int box = 0; box < SHAPE::OUT_TOKENS; box += SHAPE::OUT_BOX)
                        if (box == 0 || token + box < task.tokens)
                            sm90::tma_store(&task.y[output], (int)(row - task.outputs.begins[output]), token + box,
                                            smem + SHAPE::X + stage * SHAPE::STAGE_BYTES + box * MACKO_SLAB_ROWS * 2);
                    sm90::tma_store_wait_read();
                }
                __syncwarp();
                // Releases the stage, for each warpgroup by itself, in both blocks at once: no barrier gets more than
                // it still waits for, whatever else arrives.
                const uint32_t empty = smem + SHAPE::X_EMPTY + stage * 8;
                if (SHAPE::MULTICAST == 1 && lane < SHAPE::ROW_BLOCKS) sm90::barrier_arrive(empty, RELEASES);
                if (SHAPE::MULTICAST > 1 && lane < SHAPE::ROW_BLOCKS * SHAPE::MULTICAST)
                    sm90::barrier_arrive_remote(empty, share.rank ^ lane / SHAPE::ROW_BLOCKS, RELEASES);
            }
            __syncwarp();
        }
    }
}

// ---- Consumers: a warpgroup each ----

// A consumer warpgroup on its way through the pipelines: tiles of 64 rows, each decoded while the one before it is
// multiplied. (ptxas gives out registers by the order of members, and of what stands beside them in a kernel.)
template <class SHAPE, class TASK>
struct tile_consumer {
    const TASK &task;
    const uint32_t smem;
    const int rank, warpgroup, thread, slice; // of the block in its cluster; in the block; of the warpgroup
    const uint64_t tokens;                    // the descriptor of the first stage's
    const uint32_t slabs_at;
    sm90::pipeline_state slabs, x;
    int last_stage = -1; // read by the last products, not released; -1: none

    __device__ __forceinline__ tile_consumer(const TASK &task, uint32_t smem, int rank, int warpgroup)
        : task(task), smem(smem), rank(rank), warpgroup(warpgroup), thread(threadIdx.x % MACKO_SLAB_WARPGROUP),
          slice(macko_slab_uniform(thread / WARP)), tokens(sm90::smem_descriptor<128>(smem + SHAPE::X)),
          slabs_at(smem + SHAPE::X + task.stages.x * SHAPE::STAGE_BYTES) {
    }

    // The whole warpgroup is through with a wgmma once one of its warps is, so one lane can release the stage for all.
    __device__ __forceinline__ void release(int stage, int times = 1) const {
        if (stage < 0 || (RELEASES == 1 && thread)) return;
        sm90::barrier_arrive(smem + SHAPE::X_EMPTY + stage * 8, times);
        if (SHAPE::MULTICAST > 1) sm90::barrier_arrive_remote(smem + SHAPE::X_EMPTY + stage * 8, rank ^ 1, times);
    }
    // After the products, which wait for the values. An arrival right after the loads can overtake them, it seems:
    // what came next into their place was read, in some of a thousand products (H200).
    __device__ __forceinline__ void release_slab(int stage) const {
        __syncwarp();
        if (sm90::WARP_ARRIVALS > 1 || thread % WARP == 0)
            sm90::barrier_arrive(smem + SHAPE::SLAB_EMPTY + (stage * SHAPE::ROW_BLOCKS + warpgroup) * 8);
    }
    __device__ __forceinline__ void wait_for_slab() const {
        sm90::barrier_wait(smem + SHAPE::SLAB_FULL + (slabs.stage * SHAPE::ROW_BLOCKS + warpgroup) * 8, slabs.phase);
    }
    template <class READER>
    __device__ __forceinline__ void open_slab(READER &reader) const {
        reader.open(slabs_at + (slabs.stage * SHAPE::ROW_BLOCKS + warpgroup) * task.stages.slab_bytes, slice,
                    thread % WARP);
    }
    // Tile `in_slab` of a slab, which the reader has prepared; more: another slab follows.
    template <int TOKENS, class READER>
    __device__ __forceinline__ void multiply_tile(READER &reader, float (&sums)[TOKENS / 2], uint32_t (&a)[4][4],
                                                  int in_slab, bool more) {
        reader.advance(in_slab == MACKO_SLAB_HALF_TILES - 1);
        if (in_slab == MACKO_SLAB_TILES - 1) open_slab(reader);
        const uint64_t b = tokens + x.stage * (SHAPE::STAGE_BYTES >> 4);
        const auto multiply = [&](auto step) {
            constexpr int STEP = decltype(step)::value;
            reader.template load_next<STEP>(task.weights);
            if (STEP == 0) {
                reader.template prepare<STEP>(task.weights);
                sm90::consumer_wait(smem + SHAPE::X_FULL, x);
            }
            if (STEP == 1 && in_slab == MACKO_SLAB_TILES - 2 && more) { // after the last slab it is opened again
                slabs.advance(task.stages.slabs);
                wait_for_slab();
            }
            if (STEP > 0) reader.template prepare<STEP>(task.weights);
            // The products that read these registers last.
            if (STEP % 2 == 0) sm90::warpgroup_wait<1>();
            if (STEP == 2) release(last_stage); // all products of the tile before have ended
            reader.template make<STEP>(a, task.weights);
            multiply_pair<typename TASK::T, TOKENS, STEP>(sums, a, b);
        };
        multiply(std::integral_constant<int, 0>());
        multiply(std::integral_constant<int, 1>());
        multiply(std::integral_constant<int, 2>());
        multiply(std::integral_constant<int, 3>());
        last_stage = x.stage;
        x.advance(task.stages.x);
    }
    // The same with operand A of two tiles, `both`: of the next tile all is loaded while this one is multiplied, and
    // products are waited for once a tile. 1.03 to 1.07 times as fast with 128 tokens of dense12, 1.01 to 1.04 with 192,
    // 0.96 to 1.01 of tile, where shared memory is the limit (cycles of whole products, H100, 2026-11-28).
    template <int TOKENS, int IN_SLAB, class READER>
    __device__ __forceinline__ void multiply_tile_ahead(READER &reader, float (&sums)[TOKENS / 2],
                                                        uint32_t (&both)[2][4][4], bool more) {
        constexpr int NEXT = (IN_SLAB + 1) % MACKO_SLAB_TILES, PARITY = IN_SLAB % 2;
        uint32_t (&a)[4][4] = both[PARITY];
        const uint64_t b = tokens + x.stage * (SHAPE::STAGE_BYTES >> 4);
        const auto multiply = [&](auto first) {
            constexpr int FIRST = decltype(first)::value;
            reader.template make<FIRST, PARITY>(a, task.weights);
            reader.template make<FIRST + 1, PARITY>(a, task.weights);
            if (FIRST == 0) sm90::consumer_wait(smem + SHAPE::X_FULL, x);
            // As in multiply_tile of codec.cuh.
#pragma unroll
            for (int i = 0; i < 8; i++) asm volatile("" : "+r"(a[FIRST + i / 4][i % 4]));
            multiply_pair<typename TASK::T, TOKENS, FIRST + 1>(sums, a, b);
            reader.template load_next<FIRST, NEXT>();
            reader.template load_next<FIRST + 1, NEXT>();
        };
        multiply(std::integral_constant<int, 0>());
        multiply(std::integral_constant<int, 2>());
        if (IN_SLAB == MACKO_SLAB_TILES - 2) {
            if (more) { // after the last slab it is opened again
                slabs.advance(task.stages.slabs);
                wait_for_slab();
            }
            open_slab(reader);
        } else {
            reader.template read_ahead<IN_SLAB>();
        }
        sm90::warpgroup_wait<2>(); // all products of the tile before have ended
        release(last_stage);
        last_stage = x.stage;
        x.advance(task.stages.x);
    }
};

// many_reader, or ahead_reader.
template <class CODEC, bool AHEAD>
struct many_reader_of {
    using type = typename CODEC::many_reader;
};
template <class CODEC>
struct many_reader_of<CODEC, true> {
    using type = typename CODEC::ahead_reader;
};

// Four sums of this thread and those in shared memory.
__device__ __forceinline__ void add_sums(float *sums, uint32_t from) {
    const uint4 v = load_shared_16(from);
    sums[0] += __uint_as_float(v.x), sums[1] += __uint_as_float(v.y);
    sums[2] += __uint_as_float(v.z), sums[3] += __uint_as_float(v.w);
}

// Fix-up: adds what the other shares have of the tile, in their order.
template <class SHAPE, class CODEC, class RELEASE>
__device__ __forceinline__ void fix_up(const many_task<CODEC> &task, uint32_t smem, int others, int warpgroup,
                                       sm90::pipeline_state &x, float (&sums)[SHAPE::SUMS], const RELEASE &release) {
    constexpr int FIX_UP_BYTES = SHAPE::FIX_UP_BYTES;
#pragma unroll 1
    for (int other = 0; other < others; other++)
#pragma unroll
        for (int i = 0; i < SHAPE::FIX_UP_STAGES; i++) {
            const uint32_t from = smem + SHAPE::X + x.stage * SHAPE::STAGE_BYTES + warpgroup * FIX_UP_BYTES;
            sm90::consumer_wait(smem + SHAPE::X_FULL, x);
#pragma unroll
            for (int j = 0; j < FIX_UP_BYTES / 2048; j++)
                add_sums(sums + i * (FIX_UP_BYTES / 512) + j * 4,
                         from + j * 2048 + threadIdx.x % MACKO_SLAB_WARPGROUP * 16);
            sm90::fence_proxy_async();
            sm90::warpgroup_sync(warpgroup); // all have read
            release(x.stage);
            x.advance(task.stages.x);
        }
}

// Split-K: the two blocks of a cluster have sums of the same output tile. Each sends the other those of the other's
// tokens, a warpgroup's to a stage of the other's x pipeline; its own are the first then. The other's pipeline is
// `ahead` of this one.
template <class SHAPE, class CODEC, class RELEASE>
__device__ __forceinline__ void exchange_partials(const many_task<CODEC> &task, uint32_t smem, int rank, int warpgroup,
                                                  uint32_t segments, sm90::pipeline_state &x, int ahead,
                                                  float (&sums)[SHAPE::SUMS], const RELEASE &release) {
    constexpr int OUT_SUMS = SHAPE::OUT_SUMS;
    const int thread = threadIdx.x % MACKO_SLAB_WARPGROUP, other = rank ^ 1, stages = task.stages.x;
    const int own_stage = sm90::wrapped(x.stage + warpgroup, stages),
              other_stage = sm90::wrapped(own_stage + ahead, stages);
    const auto place = [&](int stage) { return smem + SHAPE::X + stage * SHAPE::STAGE_BYTES + thread * 16; };
    const uint32_t barriers = smem + (segments % 2 * SHAPE::ROW_BLOCKS + warpgroup) * 8, phase = segments / 2 % 2;
    const uint32_t exchanged = barriers + SHAPE::EXCHANGED;
    if (thread == 0) sm90::barrier_arrive_expect_tx(exchanged, SHAPE::PARTIAL_BYTES);
    const uint32_t here = place(own_stage), there = sm90::dsmem_address(place(other_stage), other),
                   full = sm90::dsmem_address(exchanged, other);
    sm90::barrier_wait(barriers + SHAPE::MAY_SEND, phase);
#pragma unroll
    for (int j = 0; j < OUT_SUMS; j += 4) {
        float theirs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float &low = sums[j + i], high = sums[SHAPE::SUMS - OUT_SUMS + j + i];
            theirs[i] = rank ? low : high;
            low = rank ? high : low;
        }
        sm90::dsmem_store_async(there + j * 512, theirs, full);
    }
    sm90::barrier_wait_acquire(exchanged, phase);
#pragma unroll
    for (int j = 0; j < OUT_SUMS; j += 4) add_sums(sums + j, here + j * 512);
    sm90::fence_proxy_async();
    sm90::warpgroup_sync(warpgroup); // all have read
    release(own_stage, SHAPE::ROW_BLOCKS);
    x = x.ahead(SHAPE::ROW_BLOCKS, stages);
}

// The same of a cluster of four, whose one output tile this is: each block sends the three others those of their
// tokens, and adds what it gets in the order of the blocks. For few tiles: 3072 x 3072 by 128 tokens took 22,300 cycles
// with tiles split over all clusters, and takes 18,200 so (tile, H100, 2026-11-28).
template <class SHAPE, class CODEC, class RELEASE>
__device__ __forceinline__ void exchange_among_all(const many_task<CODEC> &task, uint32_t smem, int rank, int warpgroup,
                                                   const macko_slab_segment &segment, sm90::pipeline_state &x,
                                                   float (&sums)[SHAPE::SUMS], const RELEASE &release) {
    constexpr int OUT_SUMS = SHAPE::OUT_SUMS, SPLIT_K = SHAPE::SPLIT_K;
    constexpr int SLOTS = SHAPE::STAGE_BYTES / SHAPE::PARTIAL_BYTES; // of a stage
    const int thread = threadIdx.x % MACKO_SLAB_WARPGROUP, stages = task.stages.x;
    const int length = macko_slab_length(&segment), each = (length + SPLIT_K - 1) / SPLIT_K;
    const auto place = [&](int block, int slot) {
        const int before = max(0, min(each, length - block * each)) * MACKO_SLAB_HALF_TILES;
        const int stage = (before + warpgroup * SHAPE::EXCHANGE_STAGES + slot / SLOTS) % stages;
        return smem + SHAPE::X + stage * SHAPE::STAGE_BYTES + slot % SLOTS * SHAPE::PARTIAL_BYTES + thread * 16;
    };
    const uint32_t exchanged = smem + SHAPE::EXCHANGED + warpgroup * 8;
    if (thread == 0) sm90::barrier_arrive_expect_tx(exchanged, (SPLIT_K - 1) * SHAPE::PARTIAL_BYTES);
    sm90::barrier_wait(smem + SHAPE::MAY_SEND + warpgroup * 8, 0);
#pragma unroll
    for (int block = 0; block < SPLIT_K; block++) {
        if (block == rank) continue;
        const uint32_t there = sm90::dsmem_address(place(block, rank - (rank > block)), block),
                       full = sm90::dsmem_address(exchanged, block);
#pragma unroll
        for (int j = 0; j < OUT_SUMS; j += 4)
            sm90::dsmem_store_async(there + j * 512, sums + block * OUT_SUMS + j, full);
    }
#pragma unroll
    for (int block = 1; block < SPLIT_K; block++)
        if (block == rank)
#pragma unroll
            for (int j = 0; j < OUT_SUMS; j++) sums[j] = sums[block * OUT_SUMS + j];
    sm90::barrier_wait_acquire(exchanged, 0);
#pragma unroll
    for (int slot = 0; slot < SPLIT_K - 1; slot++) {
        const uint32_t here = place(rank, slot);
#pragma unroll
        for (int j = 0; j < OUT_SUMS; j += 4) add_sums(sums + j, here + j * 512);
    }
    sm90::fence_proxy_async();
    sm90::warpgroup_sync(warpgroup); // all have read
    for (int i = 0; i < SHAPE::EXCHANGE_STAGES; i++)
        release(sm90::wrapped(x.stage + warpgroup * SHAPE::EXCHANGE_STAGES + i, stages), SHAPE::ROW_BLOCKS);
    x = x.ahead(SHAPE::EXCHANGE_STAGES * SHAPE::ROW_BLOCKS, stages);
}

// The epilogue: bias, rounding, and by stmatrix into the scratch stage of the x pipeline, as [token][64
// rows], swizzled by 128 bytes. The store warp goes on from there. Where y cannot be stored by TMA, plain stores follow
// at once.
template <class SHAPE, class CODEC>
__device__ __forceinline__ void epilogue(const many_task<CODEC> &task, uint32_t smem, const macko_slab_share &share,
                                         int tile, int warpgroup, int thread, sm90::pipeline_state &x,
                                         const float (&sums)[SHAPE::SUMS]) {
    using T = typename CODEC::T;
    // Asked for anew: there are no registers to keep them in while products run.
    const int lane = opaque(threadIdx.x) % WARP,
              warp = macko_slab_uniform(opaque(threadIdx.x) % MACKO_SLAB_WARPGROUP / WARP);
    const macko_slab_place place = macko_slab_place_of(&task.schedule, tile);
    const int64_t first_row = (int64_t)(first_row_block<SHAPE>(share, place.row_tile) + warpgroup) * MACKO_SLAB_ROWS,
                  row = first_row + warp * 16 + lane / 4;
    float bias[2] = {0, 0};
    if (task.bias && row < task.rows) bias[0] = to_float(((const T *)task.bias)[row]);
    if (task.bias && row + 8 < task.rows) bias[1] = to_float(((const T *)task.bias)[row + 8]);
    [[maybe_unused]] float scale[2] = {0, 0};
    if constexpr (CODEC::SCALED) {
        if (row < task.rows) scale[0] = task.weights.scales[row] * CODEC::FOLD;
        if (row + 8 < task.rows) scale[1] = task.weights.scales[row + 8] * CODEC::FOLD;
    }
    const sm90::pipeline_state scratch = x.ahead(warpgroup, task.stages.x);
    sm90::consumer_wait(smem + SHAPE::X_FULL, scratch);
    x = x.ahead(SHAPE::ROW_BLOCKS, task.stages.x);
    const uint32_t staged = smem + SHAPE::X + scratch.stage * SHAPE::STAGE_BYTES;
    const uint32_t to = staged + (lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2 ^ lane % 8) << 4);
#pragma unroll
    for (int i = 0; i < SHAPE::OUT_TOKENS / 16; i++) {
        const float *sum = sums + i * 8;
        [[maybe_unused]] float scaled[8];
        if constexpr (CODEC::SCALED) {
            for (int k = 0; k < 8; k++) scaled[k] = sum[k] * scale[k / 2 % 2];
            sum = scaled;
        }
        const uint32_t rounded[4] = {
            from_float2<T>(sum[0] + bias[0], sum[1] + bias[0]), from_float2<T>(sum[2] + bias[1], sum[3] + bias[1]),
            from_float2<T>(sum[4] + bias[0], sum[5] + bias[0]), from_float2<T>(sum[6] + bias[1], sum[7] + bias[1])};
        sm90::stmatrix_x4_trans(to + i * 16 * 128, rounded);
    }
    if (task.plain) {
        sm90::warpgroup_sync(warpgroup);
        const macko_slab_output &output = task.outputs.output[macko_slab_output_of(&task.outputs, first_row)];
        const int own = thread % MACKO_SLAB_ROWS, first = first_token<SHAPE>(share, place.token_tile);
        if (first_row + own < task.rows)
#pragma unroll 1
            for (int i = thread / MACKO_SLAB_ROWS; i < min(SHAPE::OUT_TOKENS, task.tokens - first);
                 i += MACKO_SLAB_WARPGROUP / MACKO_SLAB_ROWS)
                ((uint16_t *)output.y)[(first + i) * output.rows + first_row + own] =
                    load_shared_2(staged + i * 128 + ((own / 8 ^ i % 8) << 4) + own % 8 * 2);
    }
    sm90::fence_proxy_async();
}

// A consumer warpgroup: 64 rows by TOKENS tokens of each segment. In order: the first tile is prepared; single half
// slabs, then whole slabs are multiplied (the main loop); sums are exchanged (split-K), given away or fixed up
// (Stream-K), put out. The main loop and what gives away are no functions of their own: ptxas orders their instructions
// in another way then.
template <class SHAPE, class CODEC>
__device__ __forceinline__ void consume(const many_task<CODEC> &task, uint32_t smem, const macko_slab_share &share,
                                        int warpgroup) {
    constexpr int TOKENS = SHAPE::TOKENS, SUMS = SHAPE::SUMS;
    constexpr bool AHEAD = CODEC::READS_AHEAD && SHAPE::READS_AHEAD;
    uint32_t segments = 0;
    int position = 0; // `next` of the producers
    int ahead = 0;    // so many stages the other block's x pipeline is ahead of this one's
    tile_consumer<SHAPE, many_task<CODEC>> own(task, smem, share.rank, warpgroup);
    sm90::pipeline_state &x = own.x, &slabs = own.slabs;
    const int thread = own.thread;
    const auto release = [&](int stage, int times = 1) { own.release(stage, times); };
    while (position < share.half_slabs) {
        const macko_slab_segment segment = macko_slab_segment_at(&share, position);
        position += macko_slab_length(&segment);
        const int half_slabs = macko_slab_uniform(macko_slab_own_count(&segment)),
                  singles = macko_slab_uniform(macko_slab_singles(&segment));
        if (SHAPE::SPLIT_K == 2) {
            ahead += (macko_slab_length(&segment) - 2 * half_slabs) * MACKO_SLAB_HALF_TILES;
            ahead = ahead < 0 ? ahead + task.stages.x : sm90::wrapped(ahead, task.stages.x);
        }
        float sums[SUMS];
        [[maybe_unused]] uint32_t a[4][4], both[2][4][4]; // both: if AHEAD
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = 0;
        sm90::warpgroup_fence_operand(sums);
        typename many_reader_of<CODEC, AHEAD>::type reader(task.weights);
        if (half_slabs) {
            own.wait_for_slab();
            own.open_slab(reader);
            if constexpr (AHEAD) {
                reader.start(macko_slab_begins_inside(&segment));
            } else {
                if (macko_slab_begins_inside(&segment)) reader.skip_half();
                prepare_tile(reader, task.weights);
            }
        }
        const auto multiply_tile = [&](int in_slab, bool more) {
            if constexpr (AHEAD) {
                if (in_slab == 0) own.template multiply_tile_ahead<TOKENS, 0>(reader, sums, both, more);
                if (in_slab == 1) own.template multiply_tile_ahead<TOKENS, 1>(reader, sums, both, more);
                if (in_slab == 2) own.template multiply_tile_ahead<TOKENS, 2>(reader, sums, both, more);
                if (in_slab == 3) own.template multiply_tile_ahead<TOKENS, 3>(reader, sums, both, more);
            } else {
                own.template multiply_tile<TOKENS>(reader, sums, a, in_slab, more);
            }
        };
        // Unrolled, so that `next` need not be moved to `here`: clearly fewer instructions. Single half slabs have a
        // copy of the code, as one that can also begin inside a slab takes longer. They come first, so that the code
        // after the loops follows the longer one in memory.
        int left = half_slabs;
#pragma unroll 1
        for (; left > half_slabs - singles; left--) {
            const int stage = slabs.stage;
            multiply_tile(MACKO_SLAB_TILES - 2, left > 1);
            multiply_tile(MACKO_SLAB_TILES - 1, true);
            own.release_slab(stage);
        }
        const bool lags = SHAPE::LAG && left && task.stages.x > SHAPE::LAG;
        const int waits_at = lags && warpgroup ? 2 : 0;
#pragma unroll 1
        for (; left > 0; left -= 2) {
            const int stage = slabs.stage;
#pragma unroll
            for (int in_slab = 0; in_slab < MACKO_SLAB_TILES; in_slab++) {
                if (SHAPE::LAG && in_slab == MACKO_SLAB_TILES - SHAPE::LAG && left == waits_at)
                    named_barrier_sync(FIRST_THROUGH, 256);
                multiply_tile(in_slab, left > 2);
            }
            own.release_slab(stage);
        }
        if (lags && warpgroup == 0) named_barrier_arrive(FIRST_THROUGH, 256);
        if (half_slabs) slabs.advance(task.stages.slabs);
        sm90::warpgroup_wait<0>();
        sm90::warpgroup_fence_operand(sums);
        own.release(own.last_stage);
        own.last_stage = -1;
        pdl_wait(); // before anything is written

        if constexpr (SHAPE::SPLIT_K > 2)
            exchange_among_all<SHAPE>(task, smem, share.rank, warpgroup, segment, x, sums, release);
        else if (SHAPE::SPLIT_K > 1)
            exchange_partials<SHAPE>(task, smem, share.rank, warpgroup, segments, x, ahead, sums, release);
        // The store warp goes on: it raises the flag, or stores the output.
        const auto done = [&] { named_barrier_arrive(sums_ready(warpgroup, segments++), SUMS_READY_THREADS); };
        if (segment.first > 0) {
            float4 *to = partials_of<SHAPE>(task, share, macko_slab_given(&share, segment.tile), warpgroup) + thread;
#pragma unroll
            for (int j = 0; j < SHAPE::OUT_SUMS / 4; j++)
                __stcg(to + j * MACKO_SLAB_WARPGROUP,
                       make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
            if (task.schedule.kept < task.schedule.half_slabs) // several ends: nothing else waits for the store warp
                named_barrier_sync(sums_ready(warpgroup, segments++), SUMS_READY_THREADS);
            else
                done();
            continue;
        }
        if (segment.fixes_up)
            fix_up<SHAPE>(task, smem, macko_slab_contributors(&share, segment.tile), warpgroup, x, sums, release);
        epilogue<SHAPE>(task, smem, share, segment.tile, warpgroup, thread, x, sums);
        done();
    }
}

#endif

template <class CODEC, class SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, 1) slab_many_kernel(const __grid_constant__ many_task<CODEC> task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t smem = opaque(shared_address(shared));
    const int warpgroup = macko_slab_uniform(threadIdx.x / MACKO_SLAB_WARPGROUP),
              warp = macko_slab_uniform(threadIdx.x / WARP % 4);
    // An SM fetches the task line by line, each when it is first read: here all at once.
    const uint32_t line = threadIdx.x / WARP + threadIdx.x % 4 * (SHAPE::THREADS / WARP);
    uint32_t word = 0;
    if (line * 64 < sizeof task) word = ((const uint32_t *)&task)[line * 16];
    asm volatile("" ::"r"(word));
    if (warpgroup < SHAPE::ROW_BLOCKS) {
        make_barriers<SHAPE>(smem);
        sm90::cluster_arrive_relaxed();
        const macko_slab_share share = macko_slab_share_of(&task.schedule, SHAPE::plain(), blockIdx.x);
        sm90::warpgroup_reg_alloc<SHAPE::REGISTERS>();
        sm90::cluster_wait();
        consume<SHAPE>(task, smem, share, warpgroup);
        return;
    }
    sm90::warpgroup_reg_dealloc<SHAPE::PRODUCER_REGISTERS>();
    if (warp == 3) return fetch_slabs<SHAPE>(task, smem);
    if (warp < 2) {
        if (warp == 0 && threadIdx.x % WARP == 0) {
            sm90::prefetch_tensor_map(&task.x);
            sm90::prefetch_tensor_map(&task.last_x);
            for (int output = 0; output < MACKO_SLAB_MOST_OUTPUTS; output++) sm90::prefetch_tensor_map(&task.y[output]);
        }
        make_barriers<SHAPE>(smem);
    }
    sm90::cluster_arrive_relaxed();
    if (warp == 0)
        store_outputs<SHAPE>(task, smem);
    else if (warp == 1)
        fetch_partials<SHAPE>(task, smem);
    else
        fetch_tokens<SHAPE>(task, smem);
#endif
}

// Launches so many clusters of a kernel of this shape, whose task is its one argument.
template <class SHAPE, class TASK>
cudaError_t launch_clusters(void (*kernel)(TASK), const TASK &task, int64_t clusters, macko_slab_many_stages stages,
                            cudaStream_t stream) {
    return launch_kernel(kernel,
                         {clusters * SHAPE::CLUSTER, SHAPE::THREADS,
                          macko_slab_many_shared_bytes(SHAPE::plain(), stages), may_use_pdl(stream, SHAPE::THREADS),
                          SHAPE::CLUSTER},
                         stream, task);
}

} // namespace
} // namespace macko
