// tile_gemm on CUDA (sm_90a): y = x W^T for many tokens, where the tensor cores' time counts.
//
// A block makes DOWN x 64 rows by TOKENS tokens of y. Each of DOWN warpgroups decodes the tiles of its 64 rows into the
// registers of operand A, while its products before run, and multiplies them with the tokens in shared memory (wgmma). The
// other four warps fetch tokens, packed strips, and sums of other blocks, and store what the multipliers have put into
// shared memory.
//
// Two blocks are a cluster. With many output tiles they have neighbouring ones, and each fetches half of the tokens for
// both. With few they share one: each takes half of its strips, and then the sums of half of its tokens from the other.
// Clusters are persistent. Output tiles that fill no whole round of all SMs are cut: each cluster has some of their strips,
// so that all end at about the same time, and the sums meet in memory and are added in a fixed order.
#include <stdio.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <type_traits>

#include "../core/cuda.cuh"
#include "../core/sm90.cuh"
#include "decode.cuh"
#include "tile.h"
#include "wgmma.cuh"

namespace macko {
namespace {

constexpr int MAX_PACKED = 4, MIN_PACKED = 2; // strips of a row block in shared memory
constexpr int MAX_X_STAGES = 8;
constexpr int GROUP = 8; // row tiles that come one after the other
// What output tiles are cut into, and what clusters count: half a strip, two tiles of TILE_COLS columns.
constexpr int HALF_TILES = TILE_STRIP / 2, HALF_COLS = HALF_TILES * TILE_COLS;

// For gemm_divide.
struct gemm_divisor {
    uint32_t factor;
    int shift;
    gemm_divisor() = default;
    explicit gemm_divisor(int64_t by) : shift(0) {
        while (1ll << shift < by) shift++;
        factor = (uint32_t)ceil_div(1ll << (31 + shift), by);
    }
};

struct gemm_task {
    CUtensorMap x, last_x; // boxes of TILE_COLS columns by BOX tokens, and by those that the last tile has of one
    CUtensorMap y;         // boxes of TILE_ROWS rows by OUT_TOKENS tokens
    const uint8_t *data;
    const int32_t *offsets;
    const void *bias;
    void *y_plain; // where y cannot be stored by boxes, else NULL
    int64_t rows;
    int tokens, last_tokens, row_blocks, strips;
    int halves;                                     // of strips, but those behind the last column
    int row_tiles, token_tiles;                     // of the output
    int clusters, cut;                              // of blocks; the first `cut` tiles are shared by all clusters
    int begins[TILE_MOST_CLUSTERS + 1];             // of ranges: halves of the cut tiles, one tile after the other
    int first_strips[TILE_MOST_CLUSTERS * 2];       // of the blocks' first warpgroups; -1: none
    gemm_divisor by_clusters, by_halves, by_groups; // groups: tiles that gemm_place has in one
    int units;                                      // of data, where known; else 0
    float mean;                                     // of them in a strip
    int x_stages, packed_strips, slot_bytes;
    float4 *sums;    // of ranges, for the cluster that adds them up: [range][2][DOWN][OUT_SUMS / 4][128]
    uint64_t *given; // [range][2][DOWN]: `launch` once they are there
    uint64_t launch; // a number of this launch alone
    tile_weights weights;
};

template <int TOKENS_, int DOWN_, int PAIR_>
struct gemm_shape {
    static constexpr int TOKENS = TOKENS_, DOWN = DOWN_; // of a block; its row blocks, a warpgroup each
    // A cluster is two blocks. Either they share an output tile, or have one each, neighbours in the rows, and the tokens
    // together: then each fetches half of them for both.
    static constexpr int PAIR = PAIR_, SIDE = 2 / PAIR, BOX = TOKENS / SIDE;
    // The registers of an SM: the warpgroup that fetches leaves its own to the others.
    static constexpr int THREADS = (DOWN + 1) * 128;
    static constexpr int REGISTERS = DOWN > 2 ? 152 : TOKENS > 128 ? 232 : 208;
    static constexpr int FETCH_REGISTERS = DOWN > 2 ? 56 : TOKENS > 128 ? 40 : 88;
    static_assert(REGISTERS * DOWN + FETCH_REGISTERS <= 65536 / THREADS / 8 * 8 * (DOWN + 1));
    static constexpr int X_BYTES = TOKENS * TILE_COLS * 2; // of a stage
    static constexpr int SUMS = TOKENS / 2;                // of a thread
    // What a block puts out of an output tile: its own share of the tokens.
    static constexpr int OUT_TOKENS = TOKENS / PAIR, OUT_SUMS = SUMS / PAIR, SUMS_BYTES = 128 * OUT_SUMS * 4;
    // Behind its tokens a range takes more stages of their ring: one for each warpgroup's sums of the other block, some for
    // sums of other clusters, each with some of every warpgroup, and one for each warpgroup's output.
    static constexpr int GATHER_BYTES = DOWN > 2 ? X_BYTES / 4 : X_BYTES / DOWN, TURNS = SUMS_BYTES / GATHER_BYTES;
    static_assert(TURNS * GATHER_BYTES == SUMS_BYTES && DOWN * GATHER_BYTES <= X_BYTES);
    static_assert(PAIR == 1 || SUMS_BYTES == X_BYTES);
    static_assert(OUT_TOKENS * TILE_ROWS * 2 <= X_BYTES); // output of a warpgroup
    // A warpgroup waits for one of so many stages at least: more than a round behind it would take one phase for another.
    static constexpr int MIN_X_STAGES = DOWN;
    static constexpr int X_STAGES = TOKENS > 192 ? 4 : TOKENS > 128 ? 5 : MAX_X_STAGES; // no more
    // Barriers of the exchange are two in turn: when the one after the next range's is used, this range's stage is free. For
    // that next range is not given away, and each block has a half of it at least (gemm_consider).
    static_assert(PAIR == 1 || 3 * DOWN + HALF_TILES >= X_STAGES);
    // So many tiles before its end a range's second warpgroup lets the first one go ahead: then one exchanges sums, gives
    // them away or puts them out while the other multiplies.
    static constexpr int LAG = DOWN != 2 ? 0 : TOKENS > 128 ? 3 : 2;
    // Offsets in shared memory. The swizzle wants the tokens at multiples of 1024. Behind them are the packed strips.
    static constexpr int X_FULL = 0, X_EMPTY = X_FULL + X_STAGES * 8;
    static constexpr int PACKED_FULL = X_EMPTY + X_STAGES * 8;
    static constexpr int PACKED_EMPTY = PACKED_FULL + DOWN * MAX_PACKED * 8;
    static constexpr int MAY_SEND = PACKED_EMPTY + DOWN * MAX_PACKED * 8, EXCHANGED = MAY_SEND + 2 * DOWN * 8;
    static constexpr int BARRIERS_END = EXCHANGED + 2 * DOWN * 8, X = (BARRIERS_END + 1023) / 1024 * 1024;
};

// Of numbers from 0 on.
__host__ __device__ __forceinline__ int gemm_divide(int number, const gemm_divisor &by) {
    return (int)((uint64_t)((uint32_t)number << 1) * by.factor >> 32 >> by.shift);
}

// Tells the compiler that all lanes have the same: divisions hide it, and rings in ordinary registers cost the products 6 %.
__host__ __device__ __forceinline__ int uniform(int value) {
#ifdef __CUDA_ARCH__
    return __shfl_sync(FULL_WARP, value, 0);
#else
    return value;
#endif
}

// Some halves of the strips of an output tile: those of a cluster, and of these the block's own.
struct gemm_range {
    int tile, first, end, own, own_end;
    bool gathers; // adds up what others have of the tile
    // In this order: the second half of a strip, if the range begins there, the first half of one, if it ends there, and
    // whole strips.
    __host__ __device__ __forceinline__ int count() const {
        return own_end - own;
    }
    __host__ __device__ __forceinline__ int second() const {
        return own < own_end ? own % 2 : 0;
    }
    __host__ __device__ __forceinline__ int singles() const {
        return own < own_end ? own % 2 + own_end % 2 : 0;
    }
    __host__ __device__ __forceinline__ int nth(int i) const {
        return i < second() ? own : i < singles() ? own_end - 1 : own + i - singles() + second();
    }
};

// What a cluster works on, in halves of strips: its range of those output tiles that are cut, and whole tiles. Of a cut
// tile the range with its beginning adds up the sums of the others, which come behind it and belong to clusters in front:
// blocks start in the order of their index, so nobody waits for one that is not there yet where not all of them fit at
// once. What is given is given first, what has to be waited for comes last.
template <class SHAPE>
struct gemm_work {
    const gemm_task &task;
    int rank, cluster, cut_begin, given_halves, whole_halves, halves;
    __host__ __device__ __forceinline__ gemm_work(const gemm_task &task, uint32_t block)
        : task(task), rank(block % 2), cluster(block / 2) {
        cut_begin = uniform(task.begins[number()]);
        const int end = uniform(task.begins[number() + 1]),
                  of_last = end - gemm_divide(end, task.by_halves) * task.halves;
        given_halves = uniform(end - cut_begin < of_last ? end - cut_begin : end - cut_begin - of_last);
        const int whole = task.row_tiles * task.token_tiles - task.cut;
        whole_halves = uniform(gemm_divide(whole - cluster + task.clusters - 1, task.by_clusters)) * task.halves;
        halves = end - cut_begin + whole_halves;
    }
    __host__ __device__ __forceinline__ int number() const { // of its range of cut tiles
        return task.clusters - 1 - cluster;
    }
    // From the cluster's nth half on.
    __host__ __device__ __forceinline__ gemm_range find(int half) const {
        const int behind = half - given_halves;
        const bool whole = behind >= 0 && behind < whole_halves;
        const int at = whole ? behind : cut_begin + (behind < 0 ? half : half - whole_halves);
        const int nth = gemm_divide(at, task.by_halves);
        gemm_range r;
        r.tile = whole ? task.cut + nth * task.clusters + cluster : nth;
        r.first = at - nth * task.halves;
        r.end = whole ? task.halves : min(task.halves, r.first + (behind < 0 ? -behind : halves - half));
        r.gathers = r.first == 0 && r.end < task.halves;
        const int share = (r.end - r.first + SHAPE::PAIR - 1) / SHAPE::PAIR;
        r.own = min(r.end, r.first + (SHAPE::PAIR > 1 ? rank * share : 0));
        r.own_end = min(r.end, r.own + share);
        return r;
    }
    // How many others have sums of a tile that this cluster gathers.
    __host__ __device__ __forceinline__ int others(int tile) const {
        int count = 0;
        while (task.begins[number() + 1 + count] < (tile + 1) * task.halves) count++;
        return uniform(count);
    }
    // What a range takes of the ring of tokens: for these and sums of the other block, and, behind sums of other clusters,
    // for output.
    __host__ __device__ __forceinline__ int stages_in_front(const gemm_range &r) const {
        return r.count() * HALF_TILES + (SHAPE::PAIR > 1 ? SHAPE::DOWN : 0);
    }
    __host__ __device__ __forceinline__ int stages_behind(const gemm_range &r) const {
        return r.first > 0 ? 0 : SHAPE::DOWN;
    }
    // The first of a block's row blocks.
    __host__ __device__ __forceinline__ int row_block(int row_tile) const {
        return (SHAPE::SIDE > 1 ? row_tile * 2 + rank : row_tile) * SHAPE::DOWN;
    }
    // And of its tokens.
    __host__ __device__ __forceinline__ int first_token(int token_tile) const {
        return token_tile * SHAPE::TOKENS + (SHAPE::PAIR > 1 ? rank * SHAPE::OUT_TOKENS : 0);
    }
    // Where the sums of a range lie, and what says that they are there.
    __device__ __forceinline__ int place(int number, int down) const {
        return (number * 2 + rank) * SHAPE::DOWN + down;
    }
    __device__ __forceinline__ float4 *sums(int number, int down) const {
        return task.sums + (int64_t)place(number, down) * (SHAPE::SUMS_BYTES / 16);
    }
    __device__ __forceinline__ uint64_t *given(int number, int down) const {
        return task.given + place(number, down);
    }
};

// Groups of a few row tiles, all token tiles of a group one after the other: both operands are found in L2.
__host__ __device__ __forceinline__ void gemm_place(const gemm_task &task, int tile, int &row_tile, int &token_tile) {
    const int group = gemm_divide(tile, task.by_groups), in_group = tile - group * GROUP * task.token_tiles;
    const int rows = min(GROUP, task.row_tiles - group * GROUP);
    token_tile = rows == GROUP ? in_group / GROUP : in_group / rows;
    row_tile = group * GROUP + in_group - token_tile * rows;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL // no warnings of what is not used elsewhere

// At most a round on.
__device__ __forceinline__ int gemm_slot(int slot, int slots) {
    return slot < slots ? slot : slot - slots;
}

struct gemm_ring {
    int slot = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ gemm_ring ahead(int by, int slots) const {
        return {gemm_slot(slot + by, slots), phase ^ (slot + by >= slots)};
    }
    __device__ __forceinline__ void advance(int slots) {
        if (++slot == slots) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// How often a warpgroup says that a stage is free: racecheck wants it of every thread (sm90::WARP_ARRIVALS).
constexpr int RELEASES = sm90::WARP_ARRIVALS > 1 ? 128 : 1;

// Barriers of threads. Of warpgroups: 1 to DOWN.
enum { TOKENS_FETCHED = 4, FIRST_THROUGH, DONE /* three in turn of each warpgroup */ };
constexpr int DONE_THREADS = 128 + WARP;
// A warpgroup may be two ranges on before the helper has seen one: of a range that is given, no stage waits for the helper.
__device__ __forceinline__ int gemm_done(int down, uint32_t ranges) {
    return DONE + down * 3 + ranges % 3;
}

// The start of both blocks: a warp arrives, and waits before it uses a barrier. racecheck does not get on where some warps
// wait and others do something else meanwhile, so in its build all wait at once.
__device__ __forceinline__ void start_arrive() {
    sm90::cluster_arrive_relaxed();
#ifdef MACKO_EVERY_LANE_ARRIVES
    sm90::cluster_wait();
#endif
}
__device__ __forceinline__ void start_wait() {
#ifndef MACKO_EVERY_LANE_ARRIVES
    sm90::cluster_wait();
#endif
}

// All mbarriers, some by each warp but the last two: one takes a warp about 40 clocks, whichever lane makes it (H200, by a
// clock in the kernel).
template <class SHAPE>
__device__ __forceinline__ void gemm_make_barriers(uint32_t smem) {
    const int at = (threadIdx.x / WARP + threadIdx.x % WARP * (SHAPE::THREADS / WARP - 2)) * 8;
    if (at < SHAPE::BARRIERS_END)
        sm90::barrier_init(smem + at,
                           at >= SHAPE::X_EMPTY && at < SHAPE::PACKED_FULL     ? SHAPE::DOWN * SHAPE::SIDE * RELEASES
                           : at >= SHAPE::PACKED_EMPTY && at < SHAPE::MAY_SEND ? TILE_PARTS * sm90::WARP_ARRIVALS
                                                                               : 1);
    sm90::fence_barrier_init(); // copies may use them, and all warps of both blocks that have waited
    __syncwarp();
}

// Data for another block, through memory: its number behind it.
__device__ __forceinline__ void store_release(uint64_t *at, uint64_t value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t *at) {
    uint64_t found;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(at) : "memory");
    return found;
}

// Hands the next stage over to a warpgroup.
template <class SHAPE>
__device__ __forceinline__ void gemm_hand_over(const gemm_task &task, uint32_t smem, gemm_ring &ring) {
    sm90::barrier_wait(smem + SHAPE::X_EMPTY + ring.slot * 8, ring.phase ^ 1);
    if (threadIdx.x % WARP == 0) sm90::barrier_arrive(smem + SHAPE::X_FULL + ring.slot * 8);
    __syncwarp();
    ring.advance(task.x_stages);
}

// The end of the ring. No block may leave while its neighbour writes into it: all has come once all stages are free again.
// (A barrier of the cluster would have to order what all threads have written, in the whole GPU.) Blocks that share a tile
// fill their stages by themselves; what each sends the other is waited for at every exchange.
template <class SHAPE>
__device__ __forceinline__ void gemm_drain(const gemm_task &task, uint32_t smem, gemm_ring ring) {
    for (int i = 0; SHAPE::SIDE > 1 && i < task.x_stages; i++) {
        sm90::barrier_wait(smem + SHAPE::X_EMPTY + ring.slot * 8, ring.phase ^ 1);
        ring.advance(task.x_stages);
    }
}

// A warp: the sums that other clusters have of the tile that this one ends with, range by range, into the ring of tokens. By
// bulk copies: the multipliers have no registers for many loads at once. They begin while the last products run.
template <class SHAPE>
__device__ __forceinline__ void gemm_fetch_sums(const gemm_task &task, uint32_t smem) {
    const gemm_work<SHAPE> work(task, blockIdx.x);
    start_wait();
    gemm_range range{};
    int before = 0; // stages in front of the sums
    for (int half = 0; half < work.halves; half += range.end - range.first) {
        if (half) before += work.stages_behind(range);
        range = work.find(half);
        before += work.stages_in_front(range);
    }
    if (!range.gathers) return;
    sm90::pdl_wait();
    const int lane = threadIdx.x % WARP, others = work.others(range.tile);
    gemm_ring ring = {before % task.x_stages, (uint32_t)(before / task.x_stages % 2)};
    bool tokens_fetched = false;
    for (int other = work.number() + 1; other <= work.number() + others; other++) {
        if (lane < SHAPE::DOWN) { // a lane for each warpgroup's
            uint64_t *given = work.given(other, lane);
            while (load_acquire(given) != task.launch) {
            }
            *given = 0;                                      // a graph launches this again with the same number
            asm volatile("fence.proxy.async;" ::: "memory"); // copies read what was stored
        }
        __syncwarp();
        // Behind the last tokens: before, the barrier of a stage may be more than a round behind.
        if (!tokens_fetched) named_barrier_sync(TOKENS_FETCHED, 2 * WARP);
        tokens_fetched = true;
        for (int turn = 0; turn < SHAPE::TURNS; turn++) {
            const uint32_t full = smem + SHAPE::X_FULL + ring.slot * 8;
            sm90::barrier_wait(smem + SHAPE::X_EMPTY + ring.slot * 8, ring.phase ^ 1);
            if (lane == 0) sm90::barrier_arrive_expect_tx(full, SHAPE::DOWN * SHAPE::GATHER_BYTES);
            __syncwarp();
            if (lane < SHAPE::DOWN)
                sm90::bulk_copy(smem + SHAPE::X + ring.slot * SHAPE::X_BYTES + lane * SHAPE::GATHER_BYTES,
                                work.sums(other, lane) + turn * (SHAPE::GATHER_BYTES / 16), SHAPE::GATHER_BYTES, full);
            __syncwarp();
            ring.advance(task.x_stages);
        }
    }
    for (int down = 0; down < SHAPE::DOWN; down++) gemm_hand_over<SHAPE>(task, smem, ring); // for the output
    gemm_drain<SHAPE>(task, smem, ring);
}

// A warp: the tokens of all strips, a box a tile, and what else comes into their ring.
template <class SHAPE>
__device__ __forceinline__ void gemm_fetch_tokens(const gemm_task &task, uint32_t smem) {
    const gemm_work<SHAPE> work(task, blockIdx.x);
    const int lane = threadIdx.x % WARP;
    gemm_ring ring;
    // Waits for what has to be there before the first tokens are asked for, once all else is known: all barriers of both
    // blocks, and the launch before. Then the next one may begin. Its blocks come once all of this one have begun, each
    // where one has ended, as each takes an SM.
    bool begun = false;
    const auto begin = [&] {
        if (!begun) {
            start_wait();
            pdl_launch_dependents();
        }
        begun = true;
    };
    int ranges = 0;
    for (int half = 0; half < work.halves; ranges++) {
        const gemm_range range = work.find(half);
        int row_tile, token_tile;
        gemm_place(task, range.tile, row_tile, token_tile);
        const bool first_range = half == 0;
        half += range.end - range.first;
        // What lies behind the last tokens is whatever was there: each token has columns of its own in the output.
        const int tokens = token_tile == task.token_tiles - 1 ? task.last_tokens : SHAPE::TOKENS;
        const int before = SHAPE::SIDE > 1 ? work.rank * SHAPE::BOX : 0, own = min(SHAPE::BOX, tokens - before);
        const CUtensorMap *map = own == SHAPE::BOX ? &task.x : &task.last_x;
        const int bytes = tokens * TILE_COLS * 2, first = token_tile * SHAPE::TOKENS + before;
        for (int i = 0; i < range.count() * HALF_TILES; i++) {
            const int k_tile = range.nth(i / HALF_TILES) * HALF_TILES + i % HALF_TILES;
            begin();
            sm90::barrier_wait(smem + SHAPE::X_EMPTY + ring.slot * 8, ring.phase ^ 1);
            // All blocks' first stages come before anybody's third: else they come with the last ones.
            if (first_range && i == 2) sm90::barrier_wait(smem + SHAPE::X_FULL, 0);
            if (lane == 0) {
                const uint32_t full = smem + SHAPE::X_FULL + ring.slot * 8;
                const uint32_t to = smem + SHAPE::X + ring.slot * SHAPE::X_BYTES + before * TILE_COLS * 2;
                sm90::barrier_arrive_expect_tx(full, bytes);
                if (SHAPE::SIDE == 1)
                    sm90::tma_load(to, map, k_tile * TILE_COLS, first, full);
                else if (own > 0)
                    sm90::tma_load_multicast(to, map, k_tile * TILE_COLS, first, full, 3);
            }
            __syncwarp();
            ring.advance(task.x_stages);
        }
        begin();
        if (SHAPE::PAIR > 1) // stages for the sums from the other block
            for (int down = 0; down < SHAPE::DOWN; down++) {
                gemm_hand_over<SHAPE>(task, smem, ring);
                if (lane == 0)
                    sm90::barrier_arrive_remote(smem + SHAPE::MAY_SEND + (ranges % 2 * SHAPE::DOWN + down) * 8,
                                                work.rank ^ 1);
                __syncwarp();
            }
        if (range.gathers) { // the last one: another warp goes on
            named_barrier_arrive(TOKENS_FETCHED, 2 * WARP);
            return;
        }
        for (int i = 0; i < work.stages_behind(range); i++) gemm_hand_over<SHAPE>(task, smem, ring);
    }
    begin();
    gemm_drain<SHAPE>(task, smem, ring);
}

// A warp: the packed strips, a lane for each row block. It asks for the first offsets, which the plan knows the place of,
// before all else.
template <class SHAPE>
__device__ __forceinline__ void gemm_fetch_strips(const gemm_task &task, uint32_t smem) {
    const int lane = threadIdx.x % WARP, of_row = min(lane, SHAPE::DOWN - 1) * task.strips;
    int from = 0, to = 0;
    // Behind the last row block: any rows do, their output is not stored.
    const auto in_matrix = [&](int strip) {
        int at = strip + of_row;
        while (at >= task.row_blocks * task.strips) at -= task.strips;
        return at;
    };
    const auto ask = [&](int strip) {
        from = task.offsets[in_matrix(strip)];
        to = task.offsets[in_matrix(strip) + 1];
    };
    const int first_strip = task.first_strips[blockIdx.x];
    if (first_strip >= 0) {
        const int strip = in_matrix(first_strip);
        // Before the offsets have come, what lies about where the first strip should be begins its way to L2.
        if (task.units && lane < SHAPE::DOWN) {
            constexpr int ABOUT = 32;
            const int begin = max(0, min((int)((float)strip * task.mean), task.units) - ABOUT);
            sm90::bulk_prefetch_l2(task.data + (int64_t)begin * TILE_UNIT,
                                   min((int)task.mean + 2 * ABOUT, task.units - begin) * TILE_UNIT);
        }
        ask(first_strip);
    }
    __syncwarp();
    start_arrive();
    const uint32_t strips_at = smem + SHAPE::X + task.x_stages * SHAPE::X_BYTES;
    const uint64_t policy = evict_first();
    gemm_ring ring;
    const auto fetch = [&] {
        if (lane < SHAPE::DOWN) {
            const int slot = ring.slot * SHAPE::DOWN + lane, bytes = (to - from) * TILE_UNIT;
            const uint32_t full = smem + SHAPE::PACKED_FULL + slot * 8;
            sm90::barrier_wait(smem + SHAPE::PACKED_EMPTY + slot * 8, ring.phase ^ 1);
            sm90::barrier_arrive_expect_tx(full, bytes);
            sm90::bulk_copy(strips_at + slot * task.slot_bytes, task.data + (int64_t)from * TILE_UNIT, bytes, full,
                            policy);
        }
        __syncwarp();
        ring.advance(task.packed_strips);
    };
    start_wait();
    if (first_strip < 0) return;
    fetch();
    const gemm_work<SHAPE> work(task, blockIdx.x);
    bool first = true;
    for (int half = 0; half < work.halves;) {
        const gemm_range range = work.find(half);
        half += range.end - range.first;
        int row_tile, token_tile;
        gemm_place(task, range.tile, row_tile, token_tile);
        const int row = work.row_block(row_tile) * task.strips;
        for (int i = 0; i < range.count(); i += i < range.singles() ? 1 : 2) {
            if (!first) {
                ask(row + range.nth(i) / 2);
                fetch();
            }
            first = false;
        }
    }
}

// A warp: says that this block's sums of a tile of another cluster's are there, and stores the output: the multipliers would
// wait for these.
template <class SHAPE>
__device__ __forceinline__ void gemm_help(const gemm_task &task, uint32_t smem) {
    const gemm_work<SHAPE> work(task, blockIdx.x);
    start_wait();
    const int lane = threadIdx.x % WARP;
    uint32_t ranges = 0;
    int behind = 0; // stages up to the end of a range
    for (int half = 0; half < work.halves; ranges++) {
        const gemm_range range = work.find(half);
        half += range.end - range.first;
        behind += work.stages_in_front(range) + (range.gathers ? work.others(range.tile) * SHAPE::TURNS : 0) +
                  work.stages_behind(range);
        int row_tile, token_tile;
        gemm_place(task, range.tile, row_tile, token_tile);
        const int token = work.first_token(token_tile);
        for (int down = 0; down < SHAPE::DOWN; down++) {
            const int slot = (behind - SHAPE::DOWN + down) % task.x_stages;
            const int64_t row = (int64_t)(work.row_block(row_tile) + down) * TILE_ROWS;
            named_barrier_sync(gemm_done(down, ranges), DONE_THREADS);
            if (range.first > 0) {
                if (lane == 0) store_release(work.given(work.number(), down), task.launch);
            } else {
                if (lane == 0 && !task.y_plain && row < task.rows && token < task.tokens) {
                    sm90::tma_store(&task.y, (int)row, token, smem + SHAPE::X + slot * SHAPE::X_BYTES);
                    sm90::tma_store_wait_read();
                }
                __syncwarp();
                // For each warpgroup by itself, in both blocks at once: no barrier gets more than it still waits for, whatever
                // else arrives.
                const uint32_t empty = smem + SHAPE::X_EMPTY + slot * 8;
                if (SHAPE::SIDE == 1 && lane < SHAPE::DOWN) sm90::barrier_arrive(empty, RELEASES);
                if (SHAPE::SIDE > 1 && lane < SHAPE::DOWN * SHAPE::SIDE)
                    sm90::barrier_arrive_remote(empty, work.rank ^ lane / SHAPE::DOWN, RELEASES);
            }
            __syncwarp();
        }
    }
}

// Four sums of this thread and those in shared memory.
__device__ __forceinline__ void gemm_add(float *sums, uint32_t from) {
    const uint4 v = load_shared_16(from);
    sums[0] += __uint_as_float(v.x), sums[1] += __uint_as_float(v.y);
    sums[2] += __uint_as_float(v.z), sums[3] += __uint_as_float(v.w);
}

// A multiplier adds up, range by range, what the others have of its tile.
template <class SHAPE, class RELEASE>
__device__ __forceinline__ void gemm_gather(const gemm_task &task, uint32_t smem, int others, int down, gemm_ring &ring,
                                            float (&sums)[SHAPE::SUMS], const RELEASE &release) {
    constexpr int GATHER_BYTES = SHAPE::GATHER_BYTES;
#pragma unroll 1
    for (int other = 0; other < others; other++)
#pragma unroll
        for (int turn = 0; turn < SHAPE::TURNS; turn++) {
            const uint32_t from = smem + SHAPE::X + ring.slot * SHAPE::X_BYTES + down * GATHER_BYTES;
            sm90::barrier_wait(smem + SHAPE::X_FULL + ring.slot * 8, ring.phase);
#pragma unroll
            for (int j = 0; j < GATHER_BYTES / 2048; j++)
                gemm_add(sums + turn * (GATHER_BYTES / 512) + j * 4, from + j * 2048 + threadIdx.x % 128 * 16);
            sm90::fence_proxy_async();
            sm90::warpgroup_sync(down); // they are read: the place is free
            release(ring.slot);
            ring.advance(task.x_stages);
        }
}

// The two blocks of a cluster have sums of the same output tile. Each sends the other those of the other's tokens, a
// warpgroup to a stage of its ring; its own are the first then. The ring of the other is `ahead` of this one.
template <class SHAPE, class RELEASE>
__device__ __forceinline__ void gemm_exchange(const gemm_task &task, uint32_t smem, int rank, int down, uint32_t ranges,
                                              gemm_ring &ring, int ahead, float (&sums)[SHAPE::SUMS],
                                              const RELEASE &release) {
    constexpr int OUT_SUMS = SHAPE::OUT_SUMS;
    const int thread = threadIdx.x % 128, other = rank ^ 1, slots = task.x_stages;
    const int own_slot = gemm_slot(ring.slot + down, slots), other_slot = gemm_slot(own_slot + ahead, slots);
    const auto place = [&](int slot) { return smem + SHAPE::X + slot * SHAPE::X_BYTES + thread * 16; };
    const uint32_t barriers = smem + (ranges % 2 * SHAPE::DOWN + down) * 8, phase = ranges / 2 % 2;
    const uint32_t exchanged = barriers + SHAPE::EXCHANGED;
    if (thread == 0) sm90::barrier_arrive_expect_tx(exchanged, SHAPE::SUMS_BYTES);
    const uint32_t here = place(own_slot), there = sm90::dsmem_address(place(other_slot), other),
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
    for (int j = 0; j < OUT_SUMS; j += 4) gemm_add(sums + j, here + j * 512);
    sm90::fence_proxy_async();
    sm90::warpgroup_sync(down); // they are read: the place is free
    release(own_slot, SHAPE::DOWN);
    ring = ring.ahead(SHAPE::DOWN, slots);
}

// A warpgroup: 64 rows by TOKENS tokens.
template <typename T, class SHAPE>
__device__ __forceinline__ void gemm_multiply(const gemm_task &task, uint32_t smem, const gemm_work<SHAPE> &work,
                                              int down) {
    constexpr int TOKENS = SHAPE::TOKENS, SUMS = SHAPE::SUMS;
    const int thread = threadIdx.x % 128, part = uniform(thread / WARP);
    const uint64_t tokens = sm90::smem_descriptor<128>(smem + SHAPE::X);
    const uint32_t strips_at = smem + SHAPE::X + task.x_stages * SHAPE::X_BYTES;
    gemm_ring ring, packed;
    uint32_t ranges = 0;
    int ahead = 0; // of this ring is that of the other block
    int last_stage = -1;
    // The whole warpgroup is behind a wgmma once one of its warps is, so one lane can hand the stage back for all.
    const auto release = [&](int stage, int times = 1) {
        if (stage < 0 || (RELEASES == 1 && thread)) return;
        sm90::barrier_arrive(smem + SHAPE::X_EMPTY + stage * 8, times);
        if (SHAPE::SIDE > 1) sm90::barrier_arrive_remote(smem + SHAPE::X_EMPTY + stage * 8, work.rank ^ 1, times);
    };
    for (int begin = 0; begin < work.halves;) {
        const gemm_range range = work.find(begin);
        begin += range.end - range.first;
        const int halves = uniform(range.count()), singles = uniform(range.singles());
        if (SHAPE::PAIR > 1) {
            ahead += (range.end - range.first - 2 * halves) * HALF_TILES;
            ahead = ahead < 0 ? ahead + task.x_stages : gemm_slot(ahead, task.x_stages);
        }
        float sums[SUMS];
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = 0;
        sm90::warpgroup_fence_operand(sums);
        // A tile is prepared while the one before it is multiplied; so are its first values fetched.
        tile_lane here, next;
        tile_streams streams;
        uint32_t values[2][2][TILE_QUAD], mask_at;
        const auto open = [&] {
            const uint32_t at = strips_at + (packed.slot * SHAPE::DOWN + down) * task.slot_bytes;
            streams.begin(at, part, thread % WARP);
            mask_at = tile_lane::mask_at(at, 0, part, thread % WARP);
        };
        const auto wait_for_strip = [&] {
            sm90::barrier_wait(smem + SHAPE::PACKED_FULL + (packed.slot * SHAPE::DOWN + down) * 8, packed.phase);
        };
        const auto load = [&](tile_lane &lane, int j, int set) {
#pragma unroll
            for (int i = 0; i < 2; i++) lane.load(j + i, values[set][i], task.weights);
        };
        if (halves) {
            wait_for_strip();
            open();
            if (range.second()) {
                mask_at += HALF_TILES * TILE_MASK_BYTES;
                streams.turn();
            }
            next.read(mask_at);
            next.count(task.weights);
            next.find(task.weights, streams);
            load(next, 0, 0);
        }
        const auto multiply_tile = [&](int in_strip, bool more) {
            here = next;
            mask_at += TILE_MASK_BYTES;
            if (in_strip == HALF_TILES - 1) streams.turn();
            if (in_strip == TILE_STRIP - 1) open();
            const uint64_t b = tokens + ring.slot * (SHAPE::X_BYTES >> 4);
            const auto multiply = [&](auto step) {
                constexpr int STEP = decltype(step)::value;
                if (STEP < 3) load(here, 2 * STEP + 2, (STEP + 1) % 2);
                if (STEP == 0) {
                    next.read(mask_at);
                    sm90::barrier_wait(smem + SHAPE::X_FULL + ring.slot * 8, ring.phase);
                }
                if (STEP == 1 && in_strip == TILE_STRIP - 2 && more) { // behind the last strip: that one again
                    packed.advance(task.packed_strips);
                    wait_for_strip();
                }
                if (STEP == 1) next.count(task.weights);
                if (STEP == 2) next.find(task.weights, streams);
                if (STEP == 3) load(next, 0, 0);
                // The products that read these registers last.
                if (STEP % 2 == 0) sm90::warpgroup_wait<1>();
                if (STEP == 2) release(last_stage); // all of the tile before have ended
                tile_multiply<T, TOKENS, STEP>(sums, here, values[STEP % 2], a, b);
            };
            multiply(std::integral_constant<int, 0>());
            multiply(std::integral_constant<int, 1>());
            multiply(std::integral_constant<int, 2>());
            multiply(std::integral_constant<int, 3>());
            last_stage = ring.slot;
            ring.advance(task.x_stages);
        };
        // Behind the products, which wait for the values. An arrival right behind the loads can overtake them, it seems:
        // what came next into their place was read, in some of a thousand products (H200).
        const auto give_back = [&](int slot) {
            __syncwarp();
            if (sm90::WARP_ARRIVALS > 1 || thread % WARP == 0)
                sm90::barrier_arrive(smem + SHAPE::PACKED_EMPTY + (slot * SHAPE::DOWN + down) * 8);
        };
        // Unrolled, so that what is prepared need not be moved: clearly fewer instructions. Halves by themselves have a copy
        // of the code, as a strip with a way into its middle takes longer, and come first, so that what is behind the
        // products lies behind them.
        int left = halves;
#pragma unroll 1
        for (; left > halves - singles; left--) {
            const int slot = packed.slot;
            multiply_tile(TILE_STRIP - 2, left > 1);
            multiply_tile(TILE_STRIP - 1, true);
            give_back(slot);
        }
        const bool lags = SHAPE::LAG && left && task.x_stages > SHAPE::LAG;
        const int waits_at = lags && down ? 2 : 0;
#pragma unroll 1
        for (; left > 0; left -= 2) {
            const int slot = packed.slot;
#pragma unroll
            for (int in_strip = 0; in_strip < TILE_STRIP; in_strip++) {
                if (SHAPE::LAG && in_strip == TILE_STRIP - SHAPE::LAG && left == waits_at)
                    named_barrier_sync(FIRST_THROUGH, 256);
                multiply_tile(in_strip, left > 2);
            }
            give_back(slot);
        }
        if (lags && down == 0) named_barrier_arrive(FIRST_THROUGH, 256);
        if (halves) packed.advance(task.packed_strips);
        sm90::warpgroup_wait<0>();
        sm90::warpgroup_fence_operand(sums);
        release(last_stage);
        last_stage = -1;
        sm90::pdl_wait(); // before anything is written

        if (SHAPE::PAIR > 1) gemm_exchange<SHAPE>(task, smem, work.rank, down, ranges, ring, ahead, sums, release);
        // Another warp tells the owner, and stores the output: this one would wait for it.
        const auto done = [&] { named_barrier_arrive(gemm_done(down, ranges++), DONE_THREADS); };
        if (range.first > 0) {
            float4 *to = work.sums(work.number(), down) + thread;
#pragma unroll
            for (int j = 0; j < SHAPE::OUT_SUMS / 4; j++)
                __stcg(to + j * 128, make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
            done();
            continue;
        }
        if (range.gathers) gemm_gather<SHAPE>(task, smem, work.others(range.tile), down, ring, sums, release);
        // Asked for anew: there are no registers to keep them in while products run.
        const int lane = held(threadIdx.x) % WARP, warp = uniform(held(threadIdx.x) % 128 / WARP);
        int row_tile, token_tile;
        gemm_place(task, range.tile, row_tile, token_tile);
        const int64_t first_row = (int64_t)(work.row_block(row_tile) + down) * TILE_ROWS,
                      row = first_row + warp * 16 + lane / 4;
        float bias[2] = {0, 0};
        if (task.bias && row < task.rows) bias[0] = to_float(((const T *)task.bias)[row]);
        if (task.bias && row + 8 < task.rows) bias[1] = to_float(((const T *)task.bias)[row + 8]);
        const gemm_ring own = ring.ahead(down, task.x_stages);
        sm90::barrier_wait(smem + SHAPE::X_FULL + own.slot * 8, own.phase);
        ring = ring.ahead(SHAPE::DOWN, task.x_stages);
        const uint32_t output = smem + SHAPE::X + own.slot * SHAPE::X_BYTES; // [token][64 rows], swizzled by 128 bytes
        const uint32_t to = output + (lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2 ^ lane % 8) << 4);
#pragma unroll
        for (int i = 0; i < SHAPE::OUT_TOKENS / 16; i++) {
            const float *sum = sums + i * 8;
            const uint32_t rounded[4] = {
                from_float2<T>(sum[0] + bias[0], sum[1] + bias[0]), from_float2<T>(sum[2] + bias[1], sum[3] + bias[1]),
                from_float2<T>(sum[4] + bias[0], sum[5] + bias[0]), from_float2<T>(sum[6] + bias[1], sum[7] + bias[1])};
            sm90::stmatrix_x4_trans(to + i * 16 * 128, rounded);
        }
        if (task.y_plain) {
            sm90::warpgroup_sync(down);
            const int own = thread % TILE_ROWS, first = work.first_token(token_tile);
            if (first_row + own < task.rows)
#pragma unroll 1
                for (int i = thread / TILE_ROWS; i < min(SHAPE::OUT_TOKENS, task.tokens - first); i += 128 / TILE_ROWS)
                    ((uint16_t *)task.y_plain)[(int64_t)(first + i) * task.rows + first_row + own] =
                        load_shared_2(output + i * 128 + ((own / 8 ^ i % 8) << 4) + own % 8 * 2);
        }
        sm90::fence_proxy_async();
        done();
    }
}

#endif

template <typename T, class SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, 1) tile_gemm_kernel(const __grid_constant__ gemm_task task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t smem = held(shared_address(shared));
    const int warpgroup = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / WARP % 4);
    // An SM fetches the task line by line, each when it is first read: here all at once.
    const uint32_t line = threadIdx.x / WARP + threadIdx.x % 4 * (SHAPE::THREADS / WARP);
    uint32_t word = 0;
    if (line * 64 < sizeof task) word = ((const uint32_t *)&task)[line * 16];
    asm volatile("" ::"r"(word));
    if (warpgroup < SHAPE::DOWN) {
        gemm_make_barriers<SHAPE>(smem);
        start_arrive();
        const gemm_work<SHAPE> work(task, blockIdx.x);
        sm90::warpgroup_reg_alloc<SHAPE::REGISTERS>();
        start_wait();
        gemm_multiply<T, SHAPE>(task, smem, work, warpgroup);
        return;
    }
    sm90::warpgroup_reg_dealloc<SHAPE::FETCH_REGISTERS>();
    if (warp == 3) return gemm_fetch_strips<SHAPE>(task, smem);
    if (warp < 2) {
        if (warp == 0 && threadIdx.x % WARP == 0) {
            sm90::prefetch_tensor_map(&task.x);
            sm90::prefetch_tensor_map(&task.last_x);
            sm90::prefetch_tensor_map(&task.y);
        }
        gemm_make_barriers<SHAPE>(smem);
    }
    start_arrive();
    if (warp == 0)
        gemm_help<SHAPE>(task, smem);
    else if (warp == 1)
        gemm_fetch_sums<SHAPE>(task, smem);
    else
        gemm_fetch_tokens<SHAPE>(task, smem);
#endif
}

// How much of shared memory each ring has; false where it does not fit.
template <class SHAPE>
bool gemm_rings(const Device &device, gemm_task *task) {
    const int room = device.shared_bytes - SHAPE::X, strip_bytes = SHAPE::DOWN * task->slot_bytes;
    task->x_stages = std::min((room - MIN_PACKED * strip_bytes) / SHAPE::X_BYTES, SHAPE::X_STAGES);
    if (room < MIN_PACKED * strip_bytes || task->x_stages < SHAPE::MIN_X_STAGES) return false;
    task->packed_strips = std::min((room - task->x_stages * SHAPE::X_BYTES) / strip_bytes, MAX_PACKED);
    return true;
}

int gemm_slot_bytes(const tile_matrix &m) {
    return (m.widest * TILE_UNIT + TILE_BEHIND + 127) / 128 * 128;
}

template <class SHAPE>
bool gemm_fits(const tile_matrix &m, const Device &device) {
    gemm_task rings;
    rings.slot_bytes = gemm_slot_bytes(m);
    return gemm_rings<SHAPE>(device, &rings);
}

struct gemm_args {
    const tile_matrix &m;
    int64_t tokens;
    const void *x;
    int64_t x_stride;
    const void *bias;
    void *y;
    const tile_gemm_plan &plan;
    void *room;
    cudaStream_t stream;
};

// What a plan and a shape say.
template <class SHAPE>
void gemm_lay_out(const tile_matrix &m, int64_t tokens, const tile_gemm_plan &plan, gemm_task *task) {
    task->rows = m.rows;
    task->tokens = (int)tokens;
    task->row_blocks = (int)tile_row_blocks(m.rows);
    task->strips = (int)tile_strips(m.cols);
    task->halves = (int)ceil_div(m.cols, HALF_COLS);
    task->row_tiles = (int)ceil_div(task->row_blocks, SHAPE::DOWN * SHAPE::SIDE);
    task->token_tiles = (int)ceil_div(tokens, SHAPE::TOKENS);
    task->clusters = plan.clusters;
    task->cut = plan.cut;
    task->by_clusters = gemm_divisor(task->clusters);
    task->by_halves = gemm_divisor(task->halves);
    task->by_groups = gemm_divisor(GROUP * (int64_t)task->token_tiles);
    std::copy(std::begin(plan.begins), std::end(plan.begins), task->begins);
    std::copy(std::begin(plan.first_strips), std::end(plan.first_strips), task->first_strips);
}

// By the same rules as the kernel, so that it need not work them out before it asks for anything.
template <class SHAPE>
void gemm_find_first_strips(const tile_matrix &m, int64_t tokens, tile_gemm_plan *plan) {
    gemm_task task{};
    gemm_lay_out<SHAPE>(m, tokens, *plan, &task);
    for (int block = 0; block < plan->clusters * 2; block++) {
        const gemm_work<SHAPE> work(task, block);
        plan->first_strips[block] = -1;
        for (int half = 0; half < work.halves && plan->first_strips[block] < 0;) {
            const gemm_range range = work.find(half);
            half += range.end - range.first;
            if (!range.count()) continue;
            int row_tile, token_tile;
            gemm_place(task, range.tile, row_tile, token_tile);
            plan->first_strips[block] = work.row_block(row_tile) * task.strips + range.nth(0) / 2;
        }
    }
}

template <class SHAPE>
int64_t gemm_given_bytes(int ranges) {
    return (ranges * 2 * SHAPE::DOWN * 8 + 127) / 128 * 128;
}

std::atomic<uint64_t> gemm_launches;

template <typename T, class SHAPE>
cudaError_t gemm_launch(const gemm_args &args, const Device &device) {
    const tile_matrix &m = args.m;
    const tile_gemm_plan &plan = args.plan;
    gemm_task task{};
    task.data = m.data;
    task.offsets = m.offsets;
    task.bias = args.bias;
    task.y_plain = m.rows % 8 || (uintptr_t)args.y % 16 ? args.y : nullptr;
    gemm_lay_out<SHAPE>(m, args.tokens, plan, &task);
    task.units = (int)std::min<int64_t>(m.units, INT32_MAX);
    task.mean = (float)m.units / tile_count(m.rows, m.cols);
    task.given = (uint64_t *)args.room;
    task.sums = (float4 *)((uint8_t *)args.room + gemm_given_bytes<SHAPE>(plan.clusters));
    task.launch = ++gemm_launches * 0x9e3779b97f4a7c15ull; // what a workspace that nobody has cleared will not hold
    task.slot_bytes = gemm_slot_bytes(m);
    if (!gemm_rings<SHAPE>(device, &task)) return cudaErrorInvalidValue;
    // A box that reaches behind the tokens takes longer, so the last ones have another (H200: clearly).
    task.last_tokens = (int)(args.tokens - (task.token_tiles - 1) * (int64_t)SHAPE::TOKENS);
    const auto map_tokens = [&](CUtensorMap *map, int box) {
        return sm90::make_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, args.x, m.cols, args.tokens,
                                     args.x_stride * 2, TILE_COLS, box);
    };
    cudaError_t error = map_tokens(&task.x, SHAPE::BOX);
    task.last_x = task.x;
    if (const int last_box = task.last_tokens % SHAPE::BOX; !error && last_box)
        error = map_tokens(&task.last_x, last_box);
    if (!error && !task.y_plain)
        error = sm90::make_tensor_map(&task.y, CU_TENSOR_MAP_DATA_TYPE_UINT16, args.y, m.rows, args.tokens, m.rows * 2,
                                      TILE_ROWS, SHAPE::OUT_TOKENS);
    if (error) return error;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {2, 1, 1};
    attributes[1] = pdl_attribute();
    cudaLaunchConfig_t config{};
    config.gridDim = dim3((unsigned)(plan.clusters * 2));
    config.blockDim = dim3(SHAPE::THREADS);
    config.dynamicSmemBytes =
        SHAPE::X + task.x_stages * SHAPE::X_BYTES + task.packed_strips * SHAPE::DOWN * task.slot_bytes;
    config.stream = args.stream;
    config.attrs = attributes;
    config.numAttrs = may_use_pdl(args.stream, SHAPE::THREADS) ? 2 : 1;
    return cudaLaunchKernelEx(&config, tile_gemm_kernel<T, SHAPE>, task);
}

// The shapes that there are.
template <class BODY>
void for_gemm_shapes(const BODY &body) {
    body(gemm_shape<256, 2, 1>());
    body(gemm_shape<256, 2, 2>());
    body(gemm_shape<192, 2, 1>());
    body(gemm_shape<192, 2, 2>());
    body(gemm_shape<128, 2, 2>());
    body(gemm_shape<128, 3, 2>());
}

template <class SHAPE>
bool gemm_is(const tile_gemm_plan &plan) {
    return plan.row_blocks == SHAPE::DOWN && plan.tokens == SHAPE::TOKENS && plan.pair == SHAPE::PAIR;
}

// How many clusters run at once. Each block takes an SM.
template <typename T, class SHAPE>
cudaError_t gemm_clusters_at_once(const Device &device, int *clusters) {
    return max_active_clusters<tile_gemm_kernel<T, SHAPE>, 2>(device, 2, SHAPE::THREADS, device.shared_bytes - 1024,
                                                              clusters);
}

// What takes how many clocks of an SM: fitted to the times of all ways at 35 shapes and numbers of tokens (H200, density 0.5,
// 2026-11-22). While one warpgroup does these things the other multiplies, so most are less than a clock in the kernel says.
struct gemm_clocks {
    int64_t half;     // products of half a strip
    int64_t exchange; // sums with the other block
    int64_t give;     // sums to memory: an SM writes 27 bytes a clock
    int64_t reach;    // until another SM has them
    int64_t add;      // what has come while products ran; what comes later takes twice as long
    int64_t out;      // the output, and until the next products
};

template <class SHAPE>
gemm_clocks gemm_clocks_of() {
    constexpr int STRIP = SHAPE::TOKENS > 192 ? 4240 : SHAPE::TOKENS > 128 ? 3550 : SHAPE::DOWN > 2 ? 4090 : 2730;
    constexpr int SUMS = SHAPE::DOWN * SHAPE::SUMS_BYTES;
    return {STRIP / 2 / SHAPE::PAIR, SHAPE::PAIR > 1 ? 960 + SUMS / 21 : 0, SUMS / 27, 3800, SUMS / 100,
            2300 + SUMS / 150};
}

// Clocks until the last cluster ends: each has `whole` tiles, and from begins[number] on of the cut ones, in halves. Or some
// number from `least` on, where it is not less.
int64_t gemm_time(const int *begins, int clusters, int halves, int whole, const gemm_clocks &clocks, int64_t least) {
    int64_t given[TILE_MOST_CLUSTERS], last = 0;
    for (int i = clusters - 1; i >= 0 && last < least; i--) {
        int at = begins[i];
        const int end = begins[i + 1], in_tile = at % halves;
        int64_t time = 0;
        if (in_tile && at < end) {
            const int count = std::min(end - at, halves - in_tile);
            time = count * clocks.half + clocks.exchange + clocks.give;
            given[i] = time + clocks.reach;
            at += count;
        }
        time += ((end - at) / halves + whole) * (halves * clocks.half + clocks.exchange + clocks.out);
        if (const int head = (end - at) % halves) {
            time += head * clocks.half + clocks.exchange;
            for (int k = i + 1; begins[k] < end - head + halves; k++)
                time = std::max(time, given[k]) + clocks.add * (k > i + 1 ? 2 : 1);
            time += clocks.out;
        }
        last = std::max(last, time);
    }
    return last;
}

// Deals the halves of cut tiles out so that the last cluster ends soonest; returns when. Clusters that begin a tile have as
// many each, those that end another one before fewer, and those that only give still fewer: what they give has to be there
// when others end. alike: each tile as the others. The last clusters may have nothing.
int64_t gemm_deal(int *begins, int clusters, int cut, int halves, int whole, bool alike, const gemm_clocks &clocks) {
    const int total = cut * halves, mean = total / clusters, give = (int)(clocks.give / clocks.half);
    int64_t least = INT64_MAX;
    int tried[TILE_MOST_CLUSTERS + 1];
    const auto deal = [&](int most, int both, int only, int shortest) {
        for (int i = 0, at = 0, left = 0; i <= clusters; i++) { // left: of the tile that has begun
            tried[i] = at;
            int count = left ? both : most;
            if (left && (count < left + shortest || alike)) count = std::min(left, only);
            count = std::min(total - at, std::max(1, count));
            at += count;
            left = (left + (count + halves - 1 - left) / halves * halves - count);
        }
        if (tried[clusters] < total) return;
        const int64_t time = gemm_time(tried, clusters, halves, whole, clocks, least);
        if (time >= least) return;
        least = time;
        std::copy(tried, tried + clusters + 1, begins);
    };
    for (int most = mean; most <= mean + 8; most++) {
        if (least <= (whole * halves + most) * clocks.half) break; // the first cluster alone takes longer
        for (int only = most; only >= std::max(1, most - 6); only--)
            for (int both = most - give + 1; both >= most - give - 1; both--)
                for (int shortest : {1, 5}) deal(most, both, only, shortest);
    }
    return least;
}

// Tokens that L2 does not hold beside the rest.
bool gemm_is_far(const tile_matrix &m, int64_t tokens) {
    return tokens * m.cols > 6 << 20;
}

// The best way to run a shape, if it takes less than *least; with cut tiles, or without. MACKO_TILE_GEMM=128x256x1x2 (rows x
// tokens x pair x 0: whole tiles, 1: some are cut, 2: all are, alike) is taken where it fits.
template <typename T, class SHAPE>
cudaError_t gemm_consider(const tile_matrix &m, int64_t tokens, const Device &device, const char *forced, bool cuts,
                          int64_t *least, tile_gemm_plan *plan) {
    if (!gemm_fits<SHAPE>(m, device)) return cudaSuccess;
    const int64_t halves = ceil_div(m.cols, HALF_COLS);
    if (halves < SHAPE::PAIR) return cudaSuccess; // one of the two would never have any
    int at_once;
    if (const cudaError_t error = gemm_clusters_at_once<T, SHAPE>(device, &at_once)) return error;
    at_once = std::min<int>(at_once, TILE_MOST_CLUSTERS);
    const int64_t tiles =
        ceil_div(tile_row_blocks(m.rows), SHAPE::DOWN * SHAPE::SIDE) * ceil_div(tokens, SHAPE::TOKENS);
    const auto consider = [&](int64_t clusters, int64_t cut) {
        gemm_clocks clocks = gemm_clocks_of<SHAPE>();
        const bool alike = cut == tiles && clusters % tiles == 0;
        const int64_t whole = ceil_div(tiles - cut, clusters);
        char way[64];
        snprintf(way, sizeof way, "%dx%dx%dx%d", SHAPE::DOWN * TILE_ROWS, SHAPE::TOKENS, SHAPE::PAIR,
                 cut ? 1 + alike : 0);
        const bool wanted = forced && !strcmp(way, forced);
        if (!wanted && (whole * halves + cut * halves / clusters) * clocks.half >= *least) return;
        tile_gemm_plan found = {0, SHAPE::DOWN, SHAPE::TOKENS, SHAPE::PAIR, (int)clusters, (int)cut, {}, {}};
        int64_t time = whole * (halves * clocks.half + clocks.exchange + clocks.out);
        if (cut) {
            // Blocks at different columns find less in L2, the more so where it does not hold the tokens.
            if (!alike) clocks.half = clocks.half * (gemm_is_far(m, tokens) ? 105 : 102) / 100;
            time = gemm_deal(found.begins, (int)clusters, (int)cut, (int)halves, (int)whole, alike, clocks);
            if (time == INT64_MAX) return;
            while (!whole && found.begins[found.clusters - 1] == cut * halves) found.clusters--;
            found.room_bytes =
                gemm_given_bytes<SHAPE>(found.clusters) + (int64_t)found.clusters * 2 * SHAPE::DOWN * SHAPE::SUMS_BYTES;
        }
        if (wanted) time = -1;
        if (time >= *least) return;
        *least = time;
        *plan = found;
    };
    if (!cuts) {
        consider(std::min<int64_t>(tiles, at_once), 0);
        return cudaSuccess;
    }
    // What a last round of whole tiles leaves over, or that and a round more, so that no tile is cut often.
    const int64_t left = tiles % at_once;
    for (int64_t cut = left; left && cut <= tiles && cut <= left + at_once; cut += at_once) {
        const int64_t clusters = std::min<int64_t>(at_once, cut * halves);
        if (cut * halves > INT32_MAX / 2 || (clusters < at_once && cut < tiles)) break;
        consider(clusters, cut);
        if (cut == tiles && clusters > tiles) consider(clusters / tiles * tiles, cut); // all cut alike
    }
    return cudaSuccess;
}

template <typename T>
cudaError_t gemm_choose(const tile_matrix &m, int64_t tokens, const Device &device, const char *forced,
                        tile_gemm_plan *plan) {
    cudaError_t error = cudaSuccess;
    int64_t least = INT64_MAX;
    for (const bool cuts : {false, true}) // what takes long to consider comes last, and most of it is seen to be slower
        for_gemm_shapes([&](auto shape) {
            using SHAPE = decltype(shape);
            if (!error) error = allow_all_shared_memory<tile_gemm_kernel<T, SHAPE>>(device);
            if (!error) error = gemm_consider<T, SHAPE>(m, tokens, device, forced, cuts, &least, plan);
        });
    for_gemm_shapes([&](auto shape) {
        using SHAPE = decltype(shape);
        if (gemm_is<SHAPE>(*plan)) gemm_find_first_strips<SHAPE>(m, tokens, plan);
    });
    return !error && least == INT64_MAX ? cudaErrorInvalidValue : error;
}

template <typename T>
cudaError_t gemm_run(const gemm_args &args, const Device &device) {
    cudaError_t error = cudaErrorInvalidValue;
    for_gemm_shapes([&](auto shape) {
        using SHAPE = decltype(shape);
        if (gemm_is<SHAPE>(args.plan)) error = gemm_launch<T, SHAPE>(args, device);
    });
    return error;
}

} // namespace
} // namespace macko

cudaError_t tile_gemm_plan_cuda(const tile_matrix *m, int64_t tokens, tile_gemm_plan *plan) {
    using namespace macko;
    *plan = {-1, 0, 0, 0, 0, 0, {}, {}};
    Device device;
    const cudaError_t error = current_device(&device);
    if (error || tokens <= 64 || tokens > INT32_MAX || !m->rows || !m->cols || device.major != 9 ||
        env_is("MACKO_COPY", "cp_async"))
        return error;
    // A plan takes longer than a launch, so plans are kept: a model asks for the same ones again and again.
    constexpr size_t MOST = 4096;
    static std::mutex mutex;
    static std::map<std::array<int64_t, 7>, tile_gemm_plan> known;
    int64_t fits = 0; // which shapes: all that it depends on of the largest strip
    for_gemm_shapes([&](auto shape) { fits = fits * 2 + gemm_fits<decltype(shape)>(*m, device); });
    // What it depends on: of the tokens, how many tiles they fill, which follows from those of 64.
    const std::array<int64_t, 7> key = {
        device.index, m->dtype, tile_row_blocks(m->rows), m->cols, fits, ceil_div(tokens, 64), gemm_is_far(*m, tokens)};
    const char *forced = getenv("MACKO_TILE_GEMM");
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = known.find(key); !forced && found != known.end()) {
        *plan = found->second;
        return cudaSuccess;
    }
    if (const cudaError_t failed = m->dtype == MACKO_F16 ? gemm_choose<__half>(*m, tokens, device, forced, plan)
                                                         : gemm_choose<__nv_bfloat16>(*m, tokens, device, forced, plan))
        return failed;
    if (known.size() >= MOST) known.clear();
    if (!forced) known[key] = *plan;
    return cudaSuccess;
}

cudaError_t tile_gemm_cuda(const tile_matrix *m, int64_t tokens, const void *x, int64_t x_stride, const void *bias,
                           void *y, const tile_gemm_plan *plan, void *room, cudaStream_t stream) {
    using namespace macko;
    if (!m->rows || !tokens) return cudaSuccess;
    Device device;
    if (const cudaError_t error = current_device(&device)) return error;
    const gemm_args args = {*m, tokens, x, x_stride, bias, y, *plan, room, stream};
    return m->dtype == MACKO_F16 ? gemm_run<__half>(args, device) : gemm_run<__nv_bfloat16>(args, device);
}
