// tile_gemm on CUDA (sm_90a): y = x W^T for many tokens, where the tensor cores' time counts.
//
// A block makes DOWN x 64 rows by TOKENS tokens of y. Each of DOWN warpgroups decodes the tiles of its 64 rows into the
// registers of operand A, while its products before run, and multiplies them with the tokens in shared memory (wgmma). Of
// the other warps one fetches tokens, one packed strips, and one stores what the multipliers have put into shared memory.
//
// Two blocks are a cluster. With many output tiles they have neighbouring ones, and each fetches half of the tokens for
// both. With few they share one: each takes half of its strips, and then the sums of half of its tokens from the other.
// Clusters are persistent. Output tiles that fill no whole round of all SMs are cut: each cluster has as many of their
// strips, and their sums meet in memory, in a fixed order.
#include <stdio.h>

#include <algorithm>
#include <atomic>
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
    int row_tiles, token_tiles;                     // of the output
    int clusters, cut;                              // of blocks; the first `cut` tiles are shared by all clusters
    gemm_divisor by_clusters, by_strips, by_groups; // groups: tiles that gemm_place has in one
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
    static constexpr int REGISTERS = DOWN > 2 ? 152 : TOKENS > 128 ? 240 : 208;
    static constexpr int FETCH_REGISTERS = DOWN > 2 ? 56 : TOKENS > 128 ? 24 : 88;
    static_assert(REGISTERS * DOWN + FETCH_REGISTERS <= 65536 / THREADS / 8 * 8 * (DOWN + 1));
    static constexpr int X_BYTES = TOKENS * TILE_COLS * 2; // of a stage
    static constexpr int SUMS = TOKENS / 2;                // of a thread
    // What a block puts out of an output tile: its own share of the tokens.
    static constexpr int OUT_TOKENS = TOKENS / PAIR, OUT_SUMS = SUMS / PAIR, SUMS_BYTES = 128 * OUT_SUMS * 4;
    static constexpr int GATHER_BYTES = SUMS_BYTES < 32768 ? SUMS_BYTES / 2 : 16384; // of sums that come at once
    // The sums of the other block take the ring of tokens, as do those of other clusters; the output takes some stages.
    static constexpr int OUT_BYTES = OUT_TOKENS * TILE_ROWS * 2; // of a warpgroup
    static constexpr int OUT_STAGES = (DOWN * OUT_BYTES + X_BYTES - 1) / X_BYTES;
    static_assert(X_BYTES % OUT_BYTES == 0);
    static_assert(PAIR == 1 || SUMS_BYTES == X_BYTES); // each warpgroup's are a stage
    static constexpr int MIN_X_STAGES = PAIR > 1 ? DOWN : OUT_STAGES;
    static constexpr int X_STAGES = TOKENS > 128 ? 4 : MAX_X_STAGES; // no more
    // A range wants less of the ring at once than its tokens are: so the output of the one in front has left when it ends.
    static_assert(PAIR > 1 || X_STAGES - OUT_STAGES < TILE_STRIP);
    static constexpr int MAX_GATHERED = X_STAGES * X_BYTES / (DOWN * GATHER_BYTES);
    // Clocks that a strip takes of an SM (H200, density 0.5, 2026-11-22).
    static constexpr int STRIP_CLOCKS = TOKENS > 128 ? 4240 : DOWN > 2 ? 4050 : 2700;
    // Offsets in shared memory. The swizzle wants the tokens at multiples of 1024. Behind them are the packed strips.
    static constexpr int X_FULL = 0, X_EMPTY = X_FULL + X_STAGES * 8;
    static constexpr int PACKED_FULL = X_EMPTY + X_STAGES * 8;
    static constexpr int PACKED_EMPTY = PACKED_FULL + DOWN * MAX_PACKED * 8;
    static constexpr int GATHERED = PACKED_EMPTY + DOWN * MAX_PACKED * 8;
    static constexpr int RING_FREE = GATHERED + DOWN * MAX_GATHERED * 8, MAY_SEND = RING_FREE + 16;
    static constexpr int EXCHANGED = MAY_SEND + DOWN * 8;
    static constexpr int X = (EXCHANGED + DOWN * 8 + 1023) / 1024 * 1024;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL // no warnings of what is not used elsewhere

// Of numbers from 0 on.
__device__ __forceinline__ int gemm_divide(int number, const gemm_divisor &by) {
    return (int)(__umulhi((uint32_t)number << 1, by.factor) >> by.shift);
}

struct gemm_ring {
    int slot = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance(int slots) {
        if (++slot == slots) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// Tells the compiler that all lanes have the same: divisions hide it, and rings in ordinary registers cost the products 6 %.
__device__ __forceinline__ int uniform(int value) {
    return __shfl_sync(FULL_WARP, value, 0);
}

// Some strips of an output tile: those of a cluster, and of these the block's own.
struct gemm_range {
    int tile, first, end, own, own_end;
};

// What a cluster works on, strip by strip: first its range of the strips of those output tiles that are cut, then whole
// tiles. The ranges are equal, one a cluster. Of a cut tile the range with its beginning adds up the sums of the others,
// which come behind it and belong to clusters in front: blocks start in the order of their index, so nobody waits for one
// that is not there yet where not all of them fit at once.
template <class SHAPE>
struct gemm_work {
    const gemm_task &task;
    int rank, cluster, cut_begin, cut_strips, strips;
    __device__ __forceinline__ explicit gemm_work(const gemm_task &task) : task(task) {
        rank = blockIdx.x % 2;
        cluster = blockIdx.x / 2;
        cut_begin = uniform(begin(number()));
        cut_strips = uniform(begin(number() + 1)) - cut_begin;
        const int whole = task.row_tiles * task.token_tiles - task.cut;
        strips = cut_strips + uniform(gemm_divide(whole - cluster + task.clusters - 1, task.by_clusters)) * task.strips;
    }
    __device__ __forceinline__ int number() const { // of its range of cut tiles
        return task.clusters - 1 - cluster;
    }
    __device__ __forceinline__ int begin(int number) const {
        return gemm_divide(task.cut * task.strips * number, task.by_clusters);
    }
    // From the cluster's nth strip on.
    __device__ __forceinline__ gemm_range find(int strip) const {
        const bool whole = strip >= cut_strips;
        const int at = whole ? strip - cut_strips : cut_begin + strip, nth = gemm_divide(at, task.by_strips);
        gemm_range r;
        r.tile = whole ? task.cut + nth * task.clusters + cluster : nth;
        r.first = at - nth * task.strips;
        r.end = whole ? task.strips : min(task.strips, r.first + cut_strips - strip);
        const int share = (r.end - r.first + SHAPE::PAIR - 1) / SHAPE::PAIR;
        r.own = min(r.end, r.first + (SHAPE::PAIR > 1 ? rank * share : 0));
        r.own_end = min(r.end, r.own + share);
        return r;
    }
    // The first of a block's row blocks.
    __device__ __forceinline__ int row_block(int row_tile) const {
        return (SHAPE::SIDE > 1 ? row_tile * 2 + rank : row_tile) * SHAPE::DOWN;
    }
    // And of its tokens.
    __device__ __forceinline__ int first_token(int token_tile) const {
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
__device__ __forceinline__ void gemm_place(const gemm_task &task, int tile, int &row_tile, int &token_tile) {
    const int group = gemm_divide(tile, task.by_groups), in_group = tile - group * GROUP * task.token_tiles;
    const int rows = min(GROUP, task.row_tiles - group * GROUP);
    token_tile = rows == GROUP ? in_group / GROUP : in_group / rows;
    row_tile = group * GROUP + in_group - token_tile * rows;
}

// Barriers of threads. Of warpgroups: 1 to DOWN.
enum { ALL_THROUGH = 8, STRIP_BARRIERS, RANGE_DONE /* and the next one, in turn */ };
template <class SHAPE>
constexpr int RANGE_DONE_THREADS = SHAPE::DOWN * 128 + WARP;

// Some mbarriers. Each takes about 40 clocks, whichever lanes make it (H200, by a clock in the kernel).
__device__ __forceinline__ void make_barriers(uint32_t at, int count, int arrivals) {
    for (int i = threadIdx.x % WARP; i < count; i += WARP) sm90::barrier_init(at + i * 8, arrivals);
}

// Behind the making of barriers: copies may use them, and all warps of both blocks that have waited for the cluster.
__device__ __forceinline__ void barriers_made() {
    sm90::fence_barrier_init();
    __syncwarp();
    sm90::cluster_arrive();
}

// A warp: the tokens of all strips, four boxes each.
template <class SHAPE>
__device__ __forceinline__ void gemm_fetch_tokens(const gemm_task &task, uint32_t smem) {
    if (threadIdx.x % WARP == 0) {
        sm90::prefetch_map(&task.x);
        sm90::prefetch_map(&task.last_x);
        sm90::prefetch_map(&task.y);
    }
    make_barriers(smem + SHAPE::X_FULL, task.x_stages, 1);
    make_barriers(smem + SHAPE::X_EMPTY, task.x_stages, SHAPE::DOWN * SHAPE::SIDE);
    barriers_made();
    const gemm_work<SHAPE> work(task);
    bool joined = SHAPE::SIDE > 1; // all barriers of both blocks are there
    if (joined) sm90::cluster_wait();
    // Blocks of the next launch come once all of this one have begun, each where one has ended, as each takes an SM.
    allow_next_launch();
    gemm_ring ring;
    bool begins = true, taken = false; // the ring, by the range in front
    int may_fill = 0;                  // stages of it all the same
    uint32_t waits = 0;
    const auto wait_for_ring = [&] {
        // Two barriers in turn: a range may end before this warp has seen that the one in front has given the ring back,
        // where all its tokens have had room beside what that one took.
        sm90::barrier_wait(smem + SHAPE::RING_FREE + waits % 2 * 8, waits / 2 % 2);
        waits++;
        taken = false;
    };
    for (int strip = 0; strip < work.strips;) {
        const gemm_range range = work.find(strip);
        int row_tile, token_tile;
        gemm_place(task, range.tile, row_tile, token_tile);
        strip += range.end - range.first;
        // What lies behind the last tokens is whatever was there: each token has columns of its own in the output.
        const int tokens = token_tile == task.token_tiles - 1 ? task.last_tokens : SHAPE::TOKENS;
        const int before = SHAPE::SIDE > 1 ? work.rank * SHAPE::BOX : 0, own = min(SHAPE::BOX, tokens - before);
        const CUtensorMap *map = own == SHAPE::BOX ? &task.x : &task.last_x;
        const int bytes = tokens * TILE_COLS * 2, first = token_tile * SHAPE::TOKENS + before;
        for (int k_tile = range.own * TILE_STRIP; k_tile < range.own_end * TILE_STRIP; k_tile++) {
            if (taken && may_fill-- == 0) wait_for_ring();
            sm90::barrier_wait(smem + SHAPE::X_EMPTY + ring.slot * 8, ring.phase ^ 1);
            // All blocks' first stages come before anybody's third: else they come with the last ones.
            if (begins && ring.slot == 2) {
                sm90::barrier_wait(smem + SHAPE::X_FULL, 0);
                begins = false;
            }
            if (threadIdx.x % WARP == 0) {
                const uint32_t full = smem + SHAPE::X_FULL + ring.slot * 8;
                const uint32_t to = smem + SHAPE::X + ring.slot * SHAPE::X_BYTES + before * TILE_COLS * 2;
                sm90::barrier_expect(full, bytes);
                if (SHAPE::SIDE == 1)
                    sm90::copy_box(to, map, k_tile * TILE_COLS, first, full);
                else if (own > 0)
                    sm90::copy_box_to_all(to, map, k_tile * TILE_COLS, first, full, 3);
            }
            __syncwarp();
            ring.advance(task.x_stages);
        }
        if (!joined) { // by now it has
            __syncwarp();
            sm90::cluster_wait();
            joined = true;
        }
        if (taken) wait_for_ring();
        if (SHAPE::PAIR > 1) // stages for the sums from the other block, the next ones to be filled, once they are read
            for (int down = 0; down < SHAPE::DOWN; down++) {
                const int slot = ring.slot + down, wraps = slot >= task.x_stages;
                sm90::barrier_wait(smem + SHAPE::X_EMPTY + (wraps ? slot - task.x_stages : slot) * 8,
                                   ring.phase ^ 1 ^ wraps);
                if (threadIdx.x % WARP == 0)
                    sm90::barrier_arrive_remote(smem + SHAPE::MAY_SEND + down * 8, work.rank ^ 1);
                __syncwarp();
            }
        // Sums take the place of the whole ring, the output that of the stages which come last.
        taken = true;
        may_fill = SHAPE::PAIR > 1 || (range.first == 0 && range.end < task.strips) ? 0
                   : range.first > 0                                                ? task.x_stages
                                                                                    : task.x_stages - SHAPE::OUT_STAGES;
    }
}

// A warp: the packed strips, a lane for each row block.
template <class SHAPE>
__device__ __forceinline__ void gemm_fetch_strips(const gemm_task &task, uint32_t smem) {
    sm90::cluster_arrive();
    const gemm_work<SHAPE> work(task);
    const int lane = threadIdx.x % WARP;
    const uint32_t strips_at = smem + SHAPE::X + task.x_stages * SHAPE::X_BYTES;
    int from = 0, to = 0, next = 0, row = 0;
    gemm_range range{};
    const auto look = [&] { // a strip ahead; false behind the last one
        while (range.own == range.own_end) {
            if (next >= work.strips) return false;
            range = work.find(next);
            next += range.end - range.first;
            int row_tile, token_tile;
            gemm_place(task, range.tile, row_tile, token_tile);
            // Behind the last row block: any rows do, their output is not stored.
            row = min(work.row_block(row_tile) + min(lane, SHAPE::DOWN - 1), task.row_blocks - 1) * task.strips;
        }
        const int strip = row + range.own++;
        // Before the first offsets have come, what lies about where its strip should be begins its way to L2.
        if (to == 0 && task.units && lane < SHAPE::DOWN) {
            constexpr int ABOUT = 32;
            const int begin = max(0, min((int)((float)strip * task.mean), task.units) - ABOUT);
            sm90::prefetch_to_l2(task.data + (int64_t)begin * TILE_UNIT,
                                 min((int)task.mean + 2 * ABOUT, task.units - begin) * TILE_UNIT);
        }
        from = task.offsets[strip];
        to = task.offsets[strip + 1];
        return true;
    };
    bool more = look();
    sync_threads(STRIP_BARRIERS, 2 * WARP);
    gemm_ring ring;
    while (more) {
        if (lane < SHAPE::DOWN) {
            const int slot = ring.slot * SHAPE::DOWN + lane, bytes = (to - from) * TILE_UNIT;
            const uint32_t full = smem + SHAPE::PACKED_FULL + slot * 8;
            sm90::barrier_wait(smem + SHAPE::PACKED_EMPTY + slot * 8, ring.phase ^ 1);
            sm90::barrier_expect(full, bytes);
            sm90::copy_bytes(strips_at + slot * task.slot_bytes, task.data + (int64_t)from * TILE_UNIT, bytes, full);
        }
        __syncwarp();
        more = look();
        ring.advance(task.packed_strips);
    }
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

// Where a warpgroup's output of a tile lies, [token][64 rows] with the swizzle of 128 bytes: in the stages that come last,
// when `slot` is the next one to be filled. Nobody uses them before the output has left.
template <class SHAPE>
__device__ __forceinline__ uint32_t gemm_output(const gemm_task &task, uint32_t smem, int slot, int down) {
    const int back = down * SHAPE::OUT_BYTES / SHAPE::X_BYTES + 1;
    slot = slot < back ? slot - back + task.x_stages : slot - back;
    return smem + SHAPE::X + slot * SHAPE::X_BYTES + down * SHAPE::OUT_BYTES % SHAPE::X_BYTES;
}

// A warp: makes barriers for others, says that this block's sums of a tile of another cluster's are there, and stores the
// output: the multipliers would wait for these.
template <class SHAPE>
__device__ __forceinline__ void gemm_help(const gemm_task &task, uint32_t smem) {
    make_barriers(smem + SHAPE::PACKED_FULL, task.packed_strips * SHAPE::DOWN, 1);
    make_barriers(smem + SHAPE::PACKED_EMPTY, task.packed_strips * SHAPE::DOWN, TILE_PARTS * sm90::WARP_ARRIVALS);
    sm90::fence_barrier_init();
    __syncwarp();
    arrive_threads(STRIP_BARRIERS, 2 * WARP);
    barriers_made();
    const gemm_work<SHAPE> work(task);
    const int lane = threadIdx.x % WARP;
    uint32_t ranges = 0;
    int slot = 0;
    for (int strip = 0; strip < work.strips; ranges++) {
        const gemm_range range = work.find(strip);
        strip += range.end - range.first;
        slot = (slot + (range.own_end - range.own) * TILE_STRIP) % task.x_stages;
        const auto free_ring = [&] {
            if (lane < SHAPE::SIDE)
                sm90::barrier_arrive_remote(smem + SHAPE::RING_FREE + ranges % 2 * 8, work.rank ^ lane);
        };
        const auto wait_for_multipliers = [&] { sync_threads(RANGE_DONE + ranges % 2, RANGE_DONE_THREADS<SHAPE>); };
        if (range.first > 0) {
            uint64_t *given = work.given(work.number(), lane);
            wait_for_multipliers();
            free_ring();
            if (lane < SHAPE::DOWN) store_release(given, task.launch);
            __syncwarp();
            continue;
        }
        int row_tile, token_tile;
        gemm_place(task, range.tile, row_tile, token_tile);
        const int token = work.first_token(token_tile);
        const int64_t row = (int64_t)(work.row_block(row_tile) + lane) * TILE_ROWS;
        const uint32_t output = gemm_output<SHAPE>(task, smem, slot, lane);
        const bool stores = !task.y_plain && lane < SHAPE::DOWN && row < task.rows && token < task.tokens;
        wait_for_multipliers();
        if (stores) {
            sm90::store_box(&task.y, (int)row, token, output);
            sm90::stores_have_read();
        }
        __syncwarp();
        free_ring();
    }
}

// Four sums of this thread and those in shared memory.
__device__ __forceinline__ void gemm_add(float *sums, uint32_t from) {
    const uint4 v = load_shared_16(from);
    sums[0] += __uint_as_float(v.x), sums[1] += __uint_as_float(v.y);
    sums[2] += __uint_as_float(v.z), sums[3] += __uint_as_float(v.w);
}

// A multiplier adds up, range by range, what the others have of its tile. It comes by bulk copies: ordinary loads wait for
// memory each, as there are no registers for many of them.
template <class SHAPE>
__device__ __forceinline__ void gemm_gather(const gemm_task &task, uint32_t smem, const gemm_work<SHAPE> &work,
                                            int tile, int down, float (&sums)[SHAPE::SUMS]) {
    constexpr int GATHER_BYTES = SHAPE::GATHER_BYTES, TURNS = SHAPE::SUMS_BYTES / GATHER_BYTES;
    const int thread = threadIdx.x % 128, first = work.number() + 1;
    const int slots = task.x_stages * SHAPE::X_BYTES / (SHAPE::DOWN * GATHER_BYTES);
    const uint32_t here = smem + SHAPE::X + down * slots * GATHER_BYTES;
    const uint32_t full = smem + SHAPE::GATHERED + down * SHAPE::MAX_GATHERED * 8;
    int others = 0;
    while (work.begin(first + others) < (tile + 1) * task.strips) others++;
    others = uniform(others);
    const int parts = others * TURNS;
    const auto fetch = [&](int nth, int slot) {
        sm90::barrier_expect(full + slot * 8, GATHER_BYTES);
        sm90::copy_bytes(here + slot * GATHER_BYTES,
                         work.sums(first + nth / TURNS, down) + nth % TURNS * (GATHER_BYTES / 16), GATHER_BYTES,
                         full + slot * 8);
    };
    if (thread < WARP) // each lane waits for a piece of its own, and asks for it where there is room
        for (int nth = thread; __any_sync(FULL_WARP, nth < others); nth += WARP) {
            uint64_t *given = work.given(first + nth, down);
            bool waits = nth < others;
            while (__any_sync(FULL_WARP, waits))
                if (waits && load_acquire(given) == task.launch) {
                    *given = 0;                                      // a graph launches this again with the same number
                    asm volatile("fence.proxy.async;" ::: "memory"); // copies read what was stored
                    for (int part = nth * TURNS; part < min(slots, (nth + 1) * TURNS); part++) fetch(part, part);
                    waits = false;
                }
        }
    gemm_ring ring; // new: a block gathers once, at the end of its range of cut tiles
#pragma unroll 1
    for (int other = 0; other < others; other++)
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            sm90::barrier_wait(full + ring.slot * 8, ring.phase);
#pragma unroll
            for (int j = 0; j < GATHER_BYTES / 2048; j++)
                gemm_add(sums + turn * (GATHER_BYTES / 512) + j * 4,
                         here + ring.slot * GATHER_BYTES + j * 2048 + thread * 16);
            sm90::fence_for_copies(); // they are read: the place is free
            sm90::warpgroup_sync(down);
            const int next = other * TURNS + turn + slots;
            if (thread == 0 && next < parts) fetch(next, ring.slot);
            ring.advance(slots);
        }
}

// The two blocks of a cluster have sums of the same output tile. Each sends the other those of the other's tokens, a
// warpgroup to a stage of its ring that is not filled meanwhile; its own are the first then. The rings are at these slots.
template <class SHAPE>
__device__ __forceinline__ void gemm_exchange(const gemm_task &task, uint32_t smem, int rank, int down, uint32_t phase,
                                              int own_slot, int other_slot, float (&sums)[SHAPE::SUMS]) {
    constexpr int OUT_SUMS = SHAPE::OUT_SUMS;
    const int thread = threadIdx.x % 128, other = rank ^ 1;
    const uint32_t may_send = smem + SHAPE::MAY_SEND + down * 8, exchanged = smem + SHAPE::EXCHANGED + down * 8;
    if (thread == 0) sm90::barrier_expect(exchanged, SHAPE::SUMS_BYTES);
    const auto place = [&](int slot) {
        slot += down;
        if (slot >= task.x_stages) slot -= task.x_stages;
        return smem + SHAPE::X + slot * SHAPE::X_BYTES + thread * 16;
    };
    const uint32_t here = place(own_slot), there = sm90::remote_address(place(other_slot), other),
                   full = sm90::remote_address(exchanged, other);
    sm90::barrier_wait(may_send, phase);
#pragma unroll
    for (int j = 0; j < OUT_SUMS; j += 4) {
        float theirs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float &low = sums[j + i], high = sums[SHAPE::SUMS - OUT_SUMS + j + i];
            theirs[i] = rank ? low : high;
            low = rank ? high : low;
        }
        sm90::store_async(there + j * 512, theirs, full);
    }
    sm90::barrier_wait_acquire(exchanged, phase);
#pragma unroll
    for (int j = 0; j < OUT_SUMS; j += 4) gemm_add(sums + j, here + j * 512);
}

// A warpgroup: 64 rows by TOKENS tokens.
template <typename T, class SHAPE>
__device__ __forceinline__ void gemm_multiply(const gemm_task &task, uint32_t smem, const gemm_work<SHAPE> &work,
                                              int down) {
    constexpr int TOKENS = SHAPE::TOKENS, SUMS = SHAPE::SUMS;
    const int thread = threadIdx.x % 128, part = uniform(thread / WARP);
    const uint64_t tokens = sm90::descriptor<128>(smem + SHAPE::X);
    const uint32_t strips_at = smem + SHAPE::X + task.x_stages * SHAPE::X_BYTES;
    gemm_ring ring, packed;
    uint32_t ranges = 0;
    int other_slot = 0; // where the ring of the other block is
    int last_stage = -1;
    // The whole warpgroup is behind a wgmma once one of its warps is, so one lane can hand the stage back for all.
    const auto release = [&] {
        if (last_stage < 0 || thread) return;
        sm90::barrier_arrive(smem + SHAPE::X_EMPTY + last_stage * 8);
        if (SHAPE::SIDE > 1) sm90::barrier_arrive_remote(smem + SHAPE::X_EMPTY + last_stage * 8, work.rank ^ 1);
    };
    for (int strip = 0; strip < work.strips;) {
        gemm_range range = work.find(strip);
        strip += range.end - range.first;
        const int strips = uniform(range.own_end - range.own);
        if (SHAPE::PAIR > 1)
            other_slot = (other_slot + (range.end - range.first - strips) * TILE_STRIP) % task.x_stages;
        float sums[SUMS];
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = 0;
        sm90::settle(sums);
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
        if (strips) {
            wait_for_strip();
            open();
            next.read(mask_at);
            next.count(task.weights);
            next.find(task.weights, streams);
            load(next, 0, 0);
        }
        const auto multiply_tile = [&](int in_strip, bool more) {
            here = next;
            mask_at += TILE_MASK_BYTES;
            if (in_strip == 1) streams.turn();
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
                if (STEP % 2 == 0) sm90::wgmma_wait<1>();
                if (STEP == 2) release(); // all of the tile before have ended
                tile_multiply<T, TOKENS, STEP>(sums, here, values[STEP % 2], a, b);
            };
            multiply(std::integral_constant<int, 0>());
            multiply(std::integral_constant<int, 1>());
            multiply(std::integral_constant<int, 2>());
            multiply(std::integral_constant<int, 3>());
            last_stage = ring.slot;
            ring.advance(task.x_stages);
        };
#pragma unroll 1
        for (int left = strips; left; left--) {
            const int slot = packed.slot;
            // Unrolled, so that what is prepared need not be moved: clearly fewer instructions.
#pragma unroll
            for (int in_strip = 0; in_strip < TILE_STRIP; in_strip++) multiply_tile(in_strip, left > 1);
            // Behind the products, which wait for the values. An arrival right behind the loads can overtake them, it seems:
            // what came next into their place was read, in some of a thousand products (H200).
            __syncwarp();
            if (sm90::WARP_ARRIVALS > 1 || thread % WARP == 0)
                sm90::barrier_arrive(smem + SHAPE::PACKED_EMPTY + (slot * SHAPE::DOWN + down) * 8);
        }
        if (strips) packed.advance(task.packed_strips);
        sm90::wgmma_wait<0>();
        sm90::settle(sums);
        release();
        last_stage = -1;
        sm90::wait_for_previous_launch(); // before anything is written

        const bool gathers = range.first == 0 && range.end < task.strips;
        if (SHAPE::PAIR > 1) {
            gemm_exchange<SHAPE>(task, smem, work.rank, down, ranges & 1, ring.slot, other_slot, sums);
            sm90::fence_for_copies(); // what came is read
        }
        // Another warp tells the owner, and stores the output: this one would wait for it.
        const auto done = [&] { arrive_threads(RANGE_DONE + ranges++ % 2, RANGE_DONE_THREADS<SHAPE>); };
        if (range.first > 0) {
            float4 *to = work.sums(work.number(), down) + thread;
#pragma unroll
            for (int j = 0; j < SHAPE::OUT_SUMS / 4; j++)
                __stcg(to + j * 128, make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
            done();
            continue;
        }
        sync_threads(ALL_THROUGH, SHAPE::DOWN * 128); // with the ring of tokens
        if (gathers) {
            gemm_gather<SHAPE>(task, smem, work, range.tile, down, sums);
            sync_threads(ALL_THROUGH, SHAPE::DOWN * 128);
        }
        // Asked for anew: there are no registers to keep them in while products run.
        const int lane = held(threadIdx.x) % WARP, warp = uniform(held(threadIdx.x) % 128 / WARP);
        int row_tile, token_tile;
        gemm_place(task, range.tile, row_tile, token_tile);
        const int64_t first_row = (int64_t)(work.row_block(row_tile) + down) * TILE_ROWS,
                      row = first_row + warp * 16 + lane / 4;
        float bias[2] = {0, 0};
        if (task.bias && row < task.rows) bias[0] = to_float(((const T *)task.bias)[row]);
        if (task.bias && row + 8 < task.rows) bias[1] = to_float(((const T *)task.bias)[row + 8]);
        const uint32_t output = gemm_output<SHAPE>(task, smem, ring.slot, down);
        const uint32_t to = output + (lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2 ^ lane % 8) << 4);
#pragma unroll
        for (int i = 0; i < SHAPE::OUT_TOKENS / 16; i++) {
            const float *sum = sums + i * 8;
            const uint32_t rounded[4] = {
                from_float2<T>(sum[0] + bias[0], sum[1] + bias[0]), from_float2<T>(sum[2] + bias[1], sum[3] + bias[1]),
                from_float2<T>(sum[4] + bias[0], sum[5] + bias[0]), from_float2<T>(sum[6] + bias[1], sum[7] + bias[1])};
            sm90::store_matrices_transposed(to + i * 16 * 128, rounded);
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
        sm90::fence_for_copies();
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
    if (warpgroup < SHAPE::DOWN) {
        sm90::cluster_arrive();
        const gemm_work<SHAPE> work(task);
        sm90::take_registers<SHAPE::REGISTERS>();
        sm90::cluster_wait(); // all barriers are there
        gemm_multiply<T, SHAPE>(task, smem, work, warpgroup);
    } else {
        sm90::give_registers<SHAPE::FETCH_REGISTERS>();
        if (warp == 0) {
            gemm_fetch_tokens<SHAPE>(task, smem);
        } else if (warp == 1) {
            gemm_fetch_strips<SHAPE>(task, smem);
        } else if (warp == 2) {
            gemm_help<SHAPE>(task, smem);
        } else {
            make_barriers(smem + SHAPE::GATHERED, SHAPE::DOWN * SHAPE::MAX_GATHERED, 1);
            make_barriers(smem + SHAPE::RING_FREE, 2, SHAPE::SIDE);
            make_barriers(smem + SHAPE::MAY_SEND, SHAPE::DOWN * 2, 1); // and EXCHANGED
            barriers_made();
        }
        __syncwarp();
        if (warp) sm90::cluster_wait();
    }
    sm90::cluster_sync(); // no block may leave while its neighbour writes into it
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
    task.rows = m.rows;
    task.tokens = (int)args.tokens;
    task.row_blocks = (int)tile_row_blocks(m.rows);
    task.strips = (int)tile_strips(m.cols);
    task.row_tiles = (int)ceil_div(task.row_blocks, SHAPE::DOWN * SHAPE::SIDE);
    task.token_tiles = (int)ceil_div(args.tokens, SHAPE::TOKENS);
    task.clusters = plan.clusters;
    task.cut = plan.cut;
    task.by_clusters = gemm_divisor(task.clusters);
    task.by_strips = gemm_divisor(task.strips);
    task.by_groups = gemm_divisor(GROUP * (int64_t)task.token_tiles);
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
        return sm90::tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, args.x, m.cols, args.tokens, args.x_stride * 2,
                                TILE_COLS, box);
    };
    cudaError_t error = map_tokens(&task.x, SHAPE::BOX);
    if (!error)
        error = map_tokens(&task.last_x, task.last_tokens % SHAPE::BOX ? task.last_tokens % SHAPE::BOX : SHAPE::BOX);
    if (!error && !task.y_plain)
        error = sm90::tensor_map(&task.y, CU_TENSOR_MAP_DATA_TYPE_UINT16, args.y, m.rows, args.tokens, m.rows * 2,
                                 TILE_ROWS, SHAPE::OUT_TOKENS);
    if (error) return error;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {2, 1, 1};
    attributes[1] = overlap_attribute();
    cudaLaunchConfig_t config{};
    config.gridDim = dim3((unsigned)(plan.clusters * 2));
    config.blockDim = dim3(SHAPE::THREADS);
    config.dynamicSmemBytes =
        SHAPE::X + task.x_stages * SHAPE::X_BYTES + task.packed_strips * SHAPE::DOWN * task.slot_bytes;
    config.stream = args.stream;
    config.attrs = attributes;
    config.numAttrs = may_overlap(args.stream, SHAPE::THREADS) ? 2 : 1;
    return cudaLaunchKernelEx(&config, tile_gemm_kernel<T, SHAPE>, task);
}

// The shapes that there are.
template <class BODY>
void for_gemm_shapes(const BODY &body) {
    body(gemm_shape<256, 2, 1>());
    body(gemm_shape<256, 2, 2>());
    body(gemm_shape<128, 2, 2>());
    body(gemm_shape<128, 3, 2>());
}

// How many clusters run at once. Each block takes an SM.
template <typename T, class SHAPE>
cudaError_t gemm_clusters_at_once(const Device &device, int *clusters) {
    return clusters_at_once<tile_gemm_kernel<T, SHAPE>, 2>(device, 2, SHAPE::THREADS, device.shared_bytes - 1024,
                                                           clusters);
}

// The best way to run a shape, if it takes less than *least. MACKO_TILE_GEMM=128x256x1x2 (rows x tokens x pair x 0: whole
// tiles, 1: some are cut, 2: all are, alike) is taken where it fits.
template <typename T, class SHAPE>
cudaError_t gemm_consider(const tile_matrix &m, int64_t tokens, const Device &device, int64_t *least,
                          tile_gemm_plan *plan) {
    gemm_task rings;
    rings.slot_bytes = gemm_slot_bytes(m);
    if (!gemm_rings<SHAPE>(device, &rings)) return cudaSuccess;
    const int64_t strips = tile_strips(m.cols);
    if (strips < SHAPE::PAIR) return cudaSuccess; // one of them would never have a strip
    int at_once;
    if (const cudaError_t error = gemm_clusters_at_once<T, SHAPE>(device, &at_once)) return error;
    const int64_t tiles =
        ceil_div(tile_row_blocks(m.rows), SHAPE::DOWN * SHAPE::SIDE) * ceil_div(tokens, SHAPE::TOKENS);
    int forced[4] = {};
    if (const char *knob = getenv("MACKO_TILE_GEMM"))
        sscanf(knob, "%dx%dx%dx%d", forced, forced + 1, forced + 2, forced + 3);
    const auto consider = [&](int64_t clusters, int64_t cut) {
        // Clocks of an SM: strips, and what comes behind the products of a range: sums from the other block, sums to or from
        // other clusters, with what one waits for the last of them, and the output. Blocks at different columns find less in
        // L2, the more so where it does not hold the tokens.
        constexpr int64_t SUMS = SHAPE::DOWN * SHAPE::SUMS_BYTES, EXCHANGE = SHAPE::PAIR > 1 ? 1000 + SUMS / 16 : 0;
        const bool alike = cut == tiles && clusters % tiles == 0;
        const auto products = [&](int64_t count) { return ceil_div(count, SHAPE::PAIR) * SHAPE::STRIP_CLOCKS; };
        const int64_t range = cut ? ceil_div(cut * strips, clusters) : 0;
        const int64_t percent = alike ? 100 : tokens * m.cols > (6 << 20) ? 110 : 103;
        int64_t time = ceil_div(tiles - cut, clusters) * (products(strips) + EXCHANGE + 2500);
        if (cut) {
            time +=
                products(range) * percent / 100 + EXCHANGE + 2500 + 3500 + (ceil_div(strips, range) - 1) * SUMS / 45;
            if (!alike) time += EXCHANGE + 2500 + 2000; // what is given, and they end at different times
        }
        const int way = !cut ? 0 : !alike ? 1 : 2;
        if (forced[0] == SHAPE::DOWN * TILE_ROWS && forced[1] == SHAPE::TOKENS && forced[2] == SHAPE::PAIR &&
            forced[3] == way)
            time = -1;
        const int64_t room = cut ? gemm_given_bytes<SHAPE>(clusters) + clusters * 2 * SUMS : 0;
        if (time >= *least) return;
        *least = time;
        *plan = {room, SHAPE::DOWN, SHAPE::TOKENS, SHAPE::PAIR, (int)clusters, (int)cut};
    };
    consider(std::min<int64_t>(tiles, at_once), 0);
    // Cut: what a last round of whole tiles leaves over, or that and a round more, so that no tile is cut often.
    const int64_t left = tiles % at_once;
    for (int64_t cut = left; left && cut <= tiles && cut <= left + at_once; cut += at_once) {
        const int64_t clusters = std::min<int64_t>(at_once, cut * strips);
        if (cut * strips * clusters > INT32_MAX || (clusters < at_once && cut < tiles)) break;
        consider(clusters, cut);
        if (cut == tiles && clusters > tiles) consider(clusters / tiles * tiles, cut); // all cut alike
    }
    return cudaSuccess;
}

template <typename T>
cudaError_t gemm_choose(const tile_matrix &m, int64_t tokens, const Device &device, tile_gemm_plan *plan) {
    cudaError_t error = cudaSuccess;
    int64_t least = INT64_MAX;
    for_gemm_shapes([&](auto shape) {
        using SHAPE = decltype(shape);
        if (!error) error = allow_all_shared_memory<tile_gemm_kernel<T, SHAPE>>(device);
        if (!error) error = gemm_consider<T, SHAPE>(m, tokens, device, &least, plan);
    });
    return !error && least == INT64_MAX ? cudaErrorInvalidValue : error;
}

template <typename T>
cudaError_t gemm_run(const gemm_args &args, const Device &device) {
    cudaError_t error = cudaErrorInvalidValue;
    for_gemm_shapes([&](auto shape) {
        using SHAPE = decltype(shape);
        if (args.plan.row_blocks == SHAPE::DOWN && args.plan.tokens == SHAPE::TOKENS && args.plan.pair == SHAPE::PAIR)
            error = gemm_launch<T, SHAPE>(args, device);
    });
    return error;
}

} // namespace
} // namespace macko

cudaError_t tile_gemm_plan_cuda(const tile_matrix *m, int64_t tokens, tile_gemm_plan *plan) {
    using namespace macko;
    *plan = {-1, 0, 0, 0, 0, 0};
    Device device;
    const cudaError_t error = current_device(&device);
    if (error || tokens <= 64 || tokens > INT32_MAX || !m->rows || !m->cols || device.major != 9 ||
        is("MACKO_COPY", "cp_async"))
        return error;
    return m->dtype == MACKO_F16 ? gemm_choose<__half>(*m, tokens, device, plan)
                                 : gemm_choose<__nv_bfloat16>(*m, tokens, device, plan);
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
