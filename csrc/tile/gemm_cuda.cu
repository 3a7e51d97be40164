// tile_gemm on CUDA (sm_90a): y = x W^T for many tokens, where the tensor cores' time counts.
//
// A block makes 128 rows by TOKENS tokens of y. Decoders (a warpgroup or more) fetch packed tiles and turn them into dense
// ones in shared memory, swizzled as wgmma reads it. Two warpgroups of multipliers, 64 rows each, do nothing but wgmma
// with both operands in shared memory, and fetch the tokens. So a tile is decoded once for all of the block's tokens while
// the products of those before it run, and nothing of decoding stands between two products.
//
// Blocks are persistent. Many tokens: a cluster of PAIR = 2 blocks has the same rows and neighbouring tokens, each
// decodes half of the tiles and copies them to the other. Output tiles that fill no whole round of all SMs are cut: each
// cluster has as many of their columns, and their sums meet in memory, in a fixed order.
#include <stdio.h>

#include <atomic>
#include <type_traits>

#include "../core/cuda.cuh"
#include "../core/sm90.cuh"
#include "decode.cuh"
#include "tile.h"
#include "wgmma.cuh"

namespace macko {
namespace {

constexpr int DOWN = 2;        // row blocks of a block's tile, and multipliers: a warpgroup each
constexpr int MAX_PACKED = 12; // units of packed tiles
constexpr int DENSE_BYTES = TILE_ROWS * TILE_COLS * 2;
constexpr int GATHER_BYTES = 16384; // of sums that come at once
constexpr int CHUNK = 32;           // tokens whose output is stored at once
constexpr int CHUNK_BYTES = CHUNK * TILE_ROWS * 2;
[[maybe_unused]] constexpr int WINDOW = 3; // units under way at the start

struct gemm_task {
    CUtensorMap x, y; // boxes of TILE_COLS columns by TOKENS tokens, and of TILE_ROWS rows by CHUNK tokens
    const uint8_t *data;
    const int32_t *offsets;
    const void *bias;
    void *y_plain; // where y cannot be stored by boxes, else NULL
    int64_t rows;
    int tokens, row_blocks, col_blocks;
    int row_tiles, token_tiles;   // of the output, in clusters
    int clusters, cut;            // the first `cut` tiles are shared by all clusters
    int packed_units, slot_bytes; // the ring of packed tiles
    float4 *sums;                 // of ranges, for the cluster that adds them up: [range][block][DOWN][SUMS / 4][128]
    uint64_t *given;              // [range][block][DOWN]: `launch` once they are there
    uint64_t launch;              // a number of this launch alone
    tile_weights weights;
};

template <int TOKENS_, int PAIR_>
struct gemm_shape {
    static constexpr int TOKENS = TOKENS_, PAIR = PAIR_;
    // A decoder has two tiles at a time, so that one does not wait for the other's loads: the rows of a stage, or with
    // half of those the same rows of a unit of two stages.
    static constexpr int JOBS = 2, UNIT = PAIR;
    static constexpr int DECODERS = TOKENS > 128 ? 1 : 2; // warpgroups; wgmma of 256 tokens leaves registers for one
    static constexpr int THREADS = (DOWN + DECODERS) * 128;
    static constexpr int X_BYTES = TOKENS * TILE_COLS * 2; // of a stage
    static constexpr int X_STAGES = TOKENS > 128 ? 3 : 4;
    static constexpr int DENSE_UNITS = TOKENS > 128 ? (PAIR == 1 ? 3 : 2) : 5;
    static constexpr int DENSE_STAGES = DENSE_UNITS * UNIT;
    static constexpr int MIN_PACKED = 3 * DECODERS; // units: loaded from, prepared, begun
    // What a stage takes of an SM at 1.98 GHz (H200, density 0.5, 2026-11-21). The library's GEMM takes 1400 for 256 tokens.
    static constexpr int STAGE_CLOCKS = TOKENS > 128 ? (PAIR == 1 ? 1950 : 1640) : 1600;
    // Offsets in shared memory. The swizzle wants the first three at multiples of 1024.
    static constexpr int X = 0, DENSE = X + X_STAGES * X_BYTES;
    static constexpr int STAGING = DENSE + DENSE_STAGES * DOWN * DENSE_BYTES;
    static constexpr int X_FULL = STAGING + DOWN * CHUNK_BYTES, X_EMPTY = X_FULL + X_STAGES * 8;
    static constexpr int DENSE_FULL = X_EMPTY + X_STAGES * 8;
    static constexpr int DENSE_EMPTY = DENSE_FULL + DENSE_STAGES * DOWN * 8;
    static constexpr int PACKED_FULL = DENSE_EMPTY + DENSE_STAGES * DOWN * 8;
    static constexpr int PACKED_EMPTY = PACKED_FULL + MAX_PACKED * 8;
    // A block takes other clusters' sums into the ring of tokens.
    static constexpr int GATHER_SLOTS = X_STAGES * X_BYTES / (DOWN * GATHER_BYTES);
    static constexpr int GATHERED = PACKED_EMPTY + MAX_PACKED * 8;
    static constexpr int PACKED = (GATHERED + DOWN * GATHER_SLOTS * 8 + 127) / 128 * 128;
    static constexpr int SUMS = TOKENS / 2, SUMS_BYTES = 128 * SUMS * 4; // of a thread, of a multiplier
    static_assert(SUMS_BYTES % GATHER_BYTES == 0);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL // no warnings of what is not used elsewhere

struct gemm_ring {
    int slot;
    uint32_t phase = 0;
    __device__ __forceinline__ explicit gemm_ring(int first = 0) : slot(first) {
    }
    __device__ __forceinline__ void advance(int by, int slots) {
        slot += by;
        if (slot >= slots) {
            slot -= slots;
            phase ^= 1;
        }
    }
};

// Tells the compiler that all lanes have the same: divisions hide it, and rings in ordinary registers cost the products 6 %.
__device__ __forceinline__ int uniform(int value) {
    return __shfl_sync(FULL_WARP, value, 0);
}

// What a cluster works on, a stage for each k tile: first its range of the k tiles of those output tiles that are cut, then
// whole tiles. The ranges are equal, one a cluster. Of a cut tile the range with its beginning adds up the sums of the
// others, which come behind it and belong to clusters in front: blocks start in the order of their index, so nobody waits
// for one that is not there yet where not all of them fit at once.
struct gemm_work {
    const gemm_task &task;
    int rank, cluster, cut_begin, cut_stages, stages;
    __device__ __forceinline__ gemm_work(const gemm_task &task, int pair) : task(task) {
        rank = blockIdx.x % pair;
        cluster = blockIdx.x / pair;
        cut_begin = uniform(begin(range()));
        cut_stages = uniform(begin(range() + 1)) - cut_begin;
        const int whole = task.row_tiles * task.token_tiles - task.cut;
        stages = cut_stages + uniform((whole - cluster + task.clusters - 1) / task.clusters) * task.col_blocks;
    }
    __device__ __forceinline__ int range() const {
        return task.clusters - 1 - cluster;
    }
    __device__ __forceinline__ int begin(int range) const {
        return (unsigned)(task.cut * task.col_blocks * range) / (unsigned)task.clusters;
    }
    // The output tile of a stage, and its k tile; up to which one the following stages are of the same tile.
    __device__ __forceinline__ void find(int stage, int &tile, int &k_tile, int &end) const {
        const bool whole = stage >= cut_stages;
        const int at = whole ? stage - cut_stages : cut_begin + stage, nth = at / task.col_blocks;
        tile = whole ? task.cut + nth * task.clusters + cluster : nth;
        k_tile = at - nth * task.col_blocks;
        end = whole ? task.col_blocks : min(task.col_blocks, k_tile + cut_stages - stage);
    }
    // Where the sums of a range lie, and what says that they are there.
    template <class SHAPE>
    __device__ __forceinline__ float4 *sums(int range, int down) const {
        return task.sums + ((int64_t)(range * SHAPE::PAIR + rank) * DOWN + down) * (SHAPE::SUMS_BYTES / 16);
    }
    template <class SHAPE>
    __device__ __forceinline__ uint64_t *given(int range, int down) const {
        return task.given + (range * SHAPE::PAIR + rank) * DOWN + down;
    }
};

// Groups of a few row tiles, all token tiles of a group one after the other: both operands are found in L2.
__device__ __forceinline__ void gemm_place(const gemm_task &task, int tile, int &row_tile, int &token_tile) {
    constexpr int GROUP = 8;
    const int group = tile / (GROUP * task.token_tiles), in_group = tile - group * GROUP * task.token_tiles;
    const int rows = min(GROUP, task.row_tiles - group * GROUP);
    token_tile = in_group / rows;
    row_tile = group * GROUP + in_group - token_tile * rows;
}

__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t *v) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
}

// From shared memory to that of another block of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void copy_to_block(uint32_t at, int bytes, uint32_t barrier, int rank) {
    asm volatile("{\n"
                 ".reg .b32 to, there;\n"
                 "mapa.shared::cluster.u32 to, %0, %3;\n"
                 "mapa.shared::cluster.u32 there, %2, %3;\n"
                 "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [there], %1;\n"
                 "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%0], %1, [there];\n"
                 "}" ::"r"(at),
                 "r"(bytes), "r"(barrier), "r"(rank)
                 : "memory");
}

// A warpgroup: every DECODERS-th unit. Packed tiles become dense ones, a warp 16 rows of each.
template <class SHAPE, class READY>
__device__ void gemm_decode(const gemm_task &task, uint32_t smem, const gemm_work &work, int decoder,
                            const READY &barriers_ready) {
    constexpr int JOBS = SHAPE::JOBS, UNIT = SHAPE::UNIT;
    const int lane = threadIdx.x % WARP, part = __shfl_sync(FULL_WARP, threadIdx.x / WARP % TILE_PARTS, 0);
    const int stages = work.stages, units = (stages + UNIT - 1) / UNIT;
    // Of an odd number of stages the last unit lacks its second: that job does the first one's work and keeps it.
    const auto exists = [&](int unit, int job) { return UNIT == 1 || unit * UNIT + job < stages; };
    // Two of the warps fetch a tile each of a unit, the other two of the next. Lanes hold the offsets of 32 units.
    const int own_job = part % JOBS;
    int from, to, next_from = 0, next_to = 0;
    const auto look_ahead = [&](int unit) {
        const int stage = unit * UNIT + (UNIT > 1 ? own_job : 0);
        if (stage >= stages) return;
        int tile, k_tile, end, row_tile, token_tile;
        work.find(stage, tile, k_tile, end);
        gemm_place(task, tile, row_tile, token_tile);
        // Behind the last row block: any rows do, their output is not stored.
        const int block = min(row_tile * DOWN + (UNIT > 1 ? work.rank : own_job), task.row_blocks - 1);
        const int32_t *at = task.offsets + (int64_t)block * task.col_blocks + k_tile;
        next_from = at[0];
        next_to = at[1];
    };
    int fetched = 0; // units of this decoder
    gemm_ring fetch(decoder);
    const auto fetch_next = [&] {
        const int unit = fetched * SHAPE::DECODERS + decoder;
        if (fetched % WARP == 0) {
            from = next_from;
            to = next_to;
            look_ahead((fetched + WARP + lane) * SHAPE::DECODERS + decoder);
        }
        if (unit < units && part / JOBS == fetched % (TILE_PARTS / JOBS)) {
            const int begin = __shfl_sync(FULL_WARP, from, fetched % WARP);
            const int bytes = (__shfl_sync(FULL_WARP, to, fetched % WARP) - begin) * TILE_UNIT;
            const uint32_t full = smem + SHAPE::PACKED_FULL + fetch.slot * 8;
            sm90::barrier_wait(smem + SHAPE::PACKED_EMPTY + fetch.slot * 8, fetch.phase ^ 1);
            if (lane == 0) {
                const bool comes = exists(unit, own_job);
                sm90::barrier_expect(full, comes ? bytes : 0);
                if (comes)
                    sm90::copy_bytes(smem + SHAPE::PACKED + (fetch.slot * JOBS + own_job) * task.slot_bytes,
                                     task.data + (int64_t)begin * TILE_UNIT, bytes, full);
            }
            __syncwarp();
        }
        fetched++;
        fetch.advance(SHAPE::DECODERS, task.packed_units);
    };
    look_ahead(lane * SHAPE::DECODERS + decoder);
    barriers_ready();
    // Not the whole ring at the start: else the first units of all SMs come among the last.
    int room = task.packed_units / SHAPE::DECODERS - WINDOW;
    for (int i = 0; i < WINDOW; i++) fetch_next();

    // Loads wait long for shared memory, which the products keep busy. So three units are under way: of one the values are
    // loaded, of the next the places of the values found, of the one behind it the masks read.
    mm_lane here[JOBS], next[JOBS], far[JOBS];
    gemm_ring packed(decoder), ahead(decoder), dense(decoder);
    uint32_t place[JOBS];
    const auto find = [&](int unit) {
        if (unit >= units) return; // the last one again
        sm90::barrier_wait(smem + SHAPE::PACKED_FULL + ahead.slot * 8, ahead.phase);
#pragma unroll
        for (int job = 0; job < JOBS; job++)
            place[job] = smem + SHAPE::PACKED + (ahead.slot * JOBS + (exists(unit, job) ? job : 0)) * task.slot_bytes;
        ahead.advance(SHAPE::DECODERS, task.packed_units);
    };
    const auto prepare = [&](auto &tile, auto step) {
#pragma unroll
        for (int job = 0; job < JOBS; job++)
            tile[job].template prepare<decltype(step)::value>(place[job], part, lane, task.weights,
                                                              mm_lane::operands(lane));
    };
    const auto step0 = std::integral_constant<int, 0>();
    const auto step1 = std::integral_constant<int, 1>();
    const auto step2 = std::integral_constant<int, 2>();
    const auto step3 = std::integral_constant<int, 3>();

    // Matrix lane / 8 of the four of a store is rows 8 (lane / 8 % 2) on, columns 8 (lane / 16) on; its row lane % 8.
    const int part_bytes = DENSE_BYTES / TILE_PARTS;
    const uint32_t own_part = smem + SHAPE::DENSE + (UNIT > 1 ? work.rank * DENSE_BYTES : 0) + part * part_bytes;
    const uint32_t own_row = own_part + (lane / 8 % 2 * 8 + lane % 8) * 128 + ((lane / 16 ^ lane % 8) << 4);
    constexpr int JOB_TILES = UNIT > 1 ? DOWN : 1; // dense tiles from one job's to the next
    const auto dense_tile = [&](int slot, int job) { return slot * UNIT * DOWN + job * JOB_TILES; };
    const int first_tile = UNIT > 1 ? work.rank : 0;
    // A unit is handed over while the next one is decoded: until then its stores are through. To another block it goes at
    // once: that takes about as long, and both blocks' products wait for it.
    int stored = -1, stored_unit = 0;
    const auto hand_over = [&] {
        if (stored < 0) return;
        sm90::fence_for_copies(); // the tensor core reads as the copies do
        __syncwarp();
        if (lane < JOBS && exists(stored_unit, lane)) {
            const int tile = dense_tile(stored, lane);
            const uint32_t full = smem + SHAPE::DENSE_FULL + (tile + first_tile) * 8;
            sm90::barrier_arrive(full);
            if (SHAPE::PAIR > 1) copy_to_block(own_part + tile * DENSE_BYTES, part_bytes, full, work.rank ^ 1);
        }
        stored = -1;
        __syncwarp();
    };
    if (decoder < units) {
        find(decoder);
        prepare(next, step0);
        prepare(next, step1);
        find(decoder + SHAPE::DECODERS);
        prepare(far, step0);
        prepare(far, step1);
        prepare(next, step2);
        prepare(next, step3);
    }
#pragma unroll 1
    for (int unit = decoder; unit < units; unit += SHAPE::DECODERS) {
        uint32_t a[JOBS][16];
#pragma unroll
        for (int job = 0; job < JOBS; job++) {
            here[job] = next[job];
            next[job] = far[job];
        }
        find(unit + 2 * SHAPE::DECODERS);
        const auto decode = [&](auto step) {
            constexpr int STEP = decltype(step)::value;
#pragma unroll
            for (int job = 0; job < JOBS; job++) {
                uint32_t values[2][TILE_QUAD];
#pragma unroll
                for (int i = 0; i < 2; i++) here[job].load(STEP * 2 + i, values[i], task.weights);
#pragma unroll
                for (int i = 0; i < 2; i++)
                    here[job].place(STEP * 2 + i, values[i], a[job][STEP * 4 + i * 2], a[job][STEP * 4 + i * 2 + 1]);
            }
        };
        prepare(far, step0);
        decode(step0);
        prepare(next, step2);
        decode(step1);
        prepare(far, step1);
        decode(step2);
        prepare(next, step3);
        decode(step3);
        if (SHAPE::PAIR == 1) hand_over();
#pragma unroll
        for (int job = 0; job < JOBS; job++)
            if (exists(unit, job))
                sm90::barrier_wait(smem + SHAPE::DENSE_EMPTY + (dense_tile(dense.slot, job) + first_tile) * 8,
                                   dense.phase ^ 1);
        const uint32_t at = own_row + dense_tile(dense.slot, 0) * DENSE_BYTES;
#pragma unroll
        for (int job = 0; job < JOBS; job++)
            if (exists(unit, job))
#pragma unroll
                for (int step = 0; step < 4; step++)
                    store_matrices((at + job * JOB_TILES * DENSE_BYTES) ^ step << 5, a[job] + step * 4);
        // Behind the stores, which wait for the values. An arrival right behind the loads can overtake them, it seems: what
        // came next into their place was read, in some of a thousand products of pairs (H200).
        __syncwarp();
        if (sm90::WARP_ARRIVALS > 1 || lane == 0) sm90::barrier_arrive(smem + SHAPE::PACKED_EMPTY + packed.slot * 8);
        packed.advance(SHAPE::DECODERS, task.packed_units);
        stored = dense.slot;
        stored_unit = unit;
        dense.advance(SHAPE::DECODERS, SHAPE::DENSE_UNITS);
        if (SHAPE::PAIR > 1 || unit == decoder) hand_over(); // nobody waits longer than for the first one
#pragma unroll 1
        for (int more = room ? 2 : 1; more; more--) fetch_next();
        if (room) room--;
    }
    if (SHAPE::PAIR == 1) hand_over();
}

// Data for another block, through memory: its number behind it.
__device__ __forceinline__ void store_release(uint64_t *at, uint64_t value) {
    asm volatile("fence.acq_rel.gpu;\nst.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ void wait_for(const uint64_t *at, uint64_t value) {
    uint64_t found;
    do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(at) : "memory");
    while (found != value);
}

// The tokens of all stages, by the first warp of the multipliers: it has nothing to do while products run.
template <class SHAPE>
struct gemm_tokens {
    int stage = 0, k_tile = 0, end = 0, token;
    bool gathers = false, rests = false; // behind a cut tile: sums of other clusters take the ring's place
    gemm_ring ring;

    __device__ __forceinline__ void fetch(const gemm_task &task, uint32_t smem, const gemm_work &work) { // a stage
        if (stage == work.stages || rests) return;
        if (k_tile == end) {
            int tile, row_tile, token_tile;
            work.find(stage, tile, k_tile, end);
            gathers = k_tile == 0 && end < task.col_blocks;
            gemm_place(task, tile, row_tile, token_tile);
            token = (token_tile * SHAPE::PAIR + work.rank) * SHAPE::TOKENS;
        }
        const uint32_t full = smem + SHAPE::X_FULL + ring.slot * 8;
        sm90::barrier_wait(smem + SHAPE::X_EMPTY + ring.slot * 8, ring.phase ^ 1);
        if (threadIdx.x == 0) {
            sm90::barrier_expect(full, SHAPE::X_BYTES);
            sm90::copy_box(smem + SHAPE::X + ring.slot * SHAPE::X_BYTES, &task.x, k_tile * TILE_COLS, token, full);
        }
        __syncwarp();
        ring.advance(1, SHAPE::X_STAGES);
        stage++;
        rests = ++k_tile == end && gathers;
    }
    // What the ring holds in front of the products.
    __device__ __forceinline__ void fill(const gemm_task &task, uint32_t smem, const gemm_work &work) {
        rests = false;
        for (int i = 0; i < SHAPE::X_STAGES - 1; i++) fetch(task, smem, work);
    }
};

// A multiplier adds up, range by range, what the others have of its tile. It comes by bulk copies: ordinary loads wait for
// memory each, as there are no registers for many of them.
template <class SHAPE>
__device__ __forceinline__ void gemm_gather(const gemm_task &task, uint32_t smem, const gemm_work &work, int tile,
                                            int down, gemm_ring &ring, float (&sums)[SHAPE::SUMS]) {
    constexpr int TURNS = SHAPE::SUMS_BYTES / GATHER_BYTES, SLOTS = SHAPE::GATHER_SLOTS;
    const int thread = threadIdx.x % 128, first = work.range() + 1;
    const uint32_t here = smem + SHAPE::X + down * SLOTS * GATHER_BYTES;
    const uint32_t full = smem + SHAPE::GATHERED + down * SLOTS * 8;
    int others = 0;
    while (work.begin(first + others) < (tile + 1) * task.col_blocks) others++;
    others = uniform(others);
    if (thread < WARP) {
        for (int i = thread; i < others; i += WARP) {
            uint64_t *given = work.template given<SHAPE>(first + i, down);
            wait_for(given, task.launch);
            *given = 0; // a graph launches this again with the same number
        }
        __syncwarp();
        asm volatile("fence.proxy.async;" ::: "memory"); // copies read what was stored
    }
    gemm_ring ahead = ring;
    const auto fetch = [&](int nth) {
        if (thread || nth >= others * TURNS) return;
        sm90::barrier_expect(full + ahead.slot * 8, GATHER_BYTES);
        sm90::copy_bytes(here + ahead.slot * GATHER_BYTES,
                         work.template sums<SHAPE>(first + nth / TURNS, down) + nth % TURNS * (GATHER_BYTES / 16),
                         GATHER_BYTES, full + ahead.slot * 8);
        ahead.advance(1, SLOTS);
    };
    for (int nth = 0; nth < SLOTS; nth++) fetch(nth);
#pragma unroll 1
    for (int other = 0; other < others; other++)
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            sm90::barrier_wait(full + ring.slot * 8, ring.phase);
#pragma unroll
            for (int j = 0; j < GATHER_BYTES / 2048; j++) {
                const uint4 v = load_shared_16(here + ring.slot * GATHER_BYTES + j * 2048 + thread * 16);
                float *sum = sums + turn * (GATHER_BYTES / 512) + j * 4;
                sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y);
                sum[2] += __uint_as_float(v.z), sum[3] += __uint_as_float(v.w);
            }
            ring.advance(1, SLOTS);
            sm90::warpgroup_sync(
                down); // the sums have taken the values (looked up in the instructions); the place is free
            fetch(other * TURNS + turn + SLOTS);
        }
}

// A warpgroup: 64 rows by TOKENS tokens.
template <typename T, class SHAPE>
__device__ void gemm_multiply(const gemm_task &task, uint32_t smem, const gemm_work &work, int down) {
    constexpr int TOKENS = SHAPE::TOKENS, SUMS = SHAPE::SUMS, CHUNKS = TOKENS / CHUNK;
    const int thread = threadIdx.x % 128;
    const uint64_t tokens = sm90::descriptor<128>(smem + SHAPE::X);
    const uint64_t weights = sm90::descriptor<128>(smem + SHAPE::DENSE + down * DENSE_BYTES);
    const uint32_t staging = smem + SHAPE::STAGING + down * CHUNK_BYTES;
    const bool fetches = down == 0 && uniform(thread / WARP) == 0;
    sm90::wait_for_previous_launch(); // before tokens are read and y is written
    gemm_tokens<SHAPE> next_tokens;
    if (fetches) next_tokens.fill(task, smem, work);
    gemm_ring ring, dense;
    int last_dense = -1, last_stage = 0;
    // The whole warpgroup is behind a wgmma once one of its warps is, so one lane can hand the stage back for all.
    const auto release = [&] {
        if (last_dense < 0 || thread) return;
        sm90::barrier_arrive(smem + SHAPE::X_EMPTY + last_stage * 8);
        const uint32_t empty = smem + SHAPE::DENSE_EMPTY + (last_dense * DOWN + down) * 8;
        if (SHAPE::PAIR == 1)
            sm90::barrier_arrive(empty);
        else
            sm90::barrier_arrive_remote(empty, down); // who decodes these rows
    };
    gemm_ring gathered;
    for (int stage = 0; stage < work.stages;) {
        int tile, begin, end;
        work.find(stage, tile, begin, end);
        begin = uniform(begin);
        end = uniform(end);
        stage += end - begin;
        float sums[SUMS]; // written, not added to, by the first product
#pragma unroll 1
        for (int k_tile = begin; k_tile < end; k_tile++) {
            sm90::barrier_wait(smem + SHAPE::X_FULL + ring.slot * 8, ring.phase);
            sm90::barrier_wait(smem + SHAPE::DENSE_FULL + (dense.slot * DOWN + down) * 8, dense.phase);
            const uint64_t b = tokens + ring.slot * (SHAPE::X_BYTES >> 4);
            const uint64_t a = weights + dense.slot * (DOWN * DENSE_BYTES >> 4);
            sm90::wgmma_begin();
#pragma unroll
            for (int step = 0; step < 4; step++)
                tile_wgmma_shared<T, TOKENS>::multiply(sums, a + 2 * step, b + 2 * step, step ? 1 : k_tile != begin);
            sm90::wgmma_commit();
            sm90::wgmma_wait<1>();
            release();
            last_stage = ring.slot;
            last_dense = dense.slot;
            ring.advance(1, SHAPE::X_STAGES);
            dense.advance(1, SHAPE::DENSE_STAGES);
            if (fetches) next_tokens.fetch(task, smem, work);
        }
        sm90::wgmma_wait<0>();
        sm90::settle(sums);
        release();
        last_dense = -1;

        if (begin > 0) { // of a tile that another cluster stores
            float4 *to = work.template sums<SHAPE>(work.range(), down) + thread;
#pragma unroll
            for (int j = 0; j < SUMS / 4; j++)
                __stcg(to + j * 128, make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
            sm90::warpgroup_sync(down);
            if (thread == 0) store_release(work.template given<SHAPE>(work.range(), down), task.launch);
            continue;
        }
        if (end < task.col_blocks) {
            sync_threads(8, 256); // both multipliers are through with the ring of tokens
            gemm_gather<SHAPE>(task, smem, work, tile, down, gathered, sums);
            sm90::fence_for_copies();
            sync_threads(8, 256);
            if (fetches) next_tokens.fill(task, smem, work);
        }
        // Asked for anew: there are no registers to keep them in while products run.
        const int lane = held(threadIdx.x) % WARP, warp = uniform(held(threadIdx.x) % 128 / WARP);
        int row_tile, token_tile;
        gemm_place(task, tile, row_tile, token_tile);
        const int first_token = (token_tile * SHAPE::PAIR + work.rank) * TOKENS;
        const int64_t first_row = ((int64_t)row_tile * DOWN + down) * TILE_ROWS, row = first_row + warp * 16 + lane / 4;
        float bias[2] = {0, 0};
        if (task.bias && row < task.rows) bias[0] = to_float(((const T *)task.bias)[row]);
        if (task.bias && row + 8 < task.rows) bias[1] = to_float(((const T *)task.bias)[row + 8]);
        // Sums of 16 tokens, as registers of this thread, to shared memory.
        constexpr int PARTS = CHUNK / 16;
        const auto store_part = [&](int part, const float *sum, uint32_t to) {
            const int token = part * 16 + lane / 16 * 8 + lane % 8, chunk16 = warp * 2 + lane / 8 % 2;
            const uint32_t rounded[4] = {
                from_float2<T>(sum[0] + bias[0], sum[1] + bias[0]), from_float2<T>(sum[2] + bias[1], sum[3] + bias[1]),
                from_float2<T>(sum[4] + bias[0], sum[5] + bias[0]), from_float2<T>(sum[6] + bias[1], sum[7] + bias[1])};
            sm90::store_matrices_transposed(to + token * 128 + ((chunk16 ^ (token & 7)) << 4), rounded);
        };
        const auto store_chunk = [&](int chunk, uint32_t from) { // by all threads
            const int token = first_token + chunk * CHUNK;
            if (!task.y_plain) {
                if (thread == 0 && first_row < task.rows && token < task.tokens)
                    sm90::store_box(&task.y, (int)first_row, token, from);
                return;
            }
            const int own_row = thread % TILE_ROWS;
            if (first_row + own_row >= task.rows) return;
#pragma unroll 1
            for (int i = thread / TILE_ROWS; i < min(CHUNK, task.tokens - token); i += 128 / TILE_ROWS)
                ((uint16_t *)task.y_plain)[(token + i) * task.rows + first_row + own_row] =
                    load_shared_2(from + i * 128 + ((own_row / 8 ^ i % 8) << 4) + own_row % 8 * 2);
        };
        // The last tile's output has all of the ring of tokens to itself.
        const bool last = stage == work.stages;
        const uint32_t room = last ? smem + SHAPE::X + down * CHUNKS * CHUNK_BYTES : staging;
        if (last) sync_threads(8, 256);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            const uint32_t to = room + (last ? chunk : 0) * CHUNK_BYTES;
            if (!last) { // the chunk before has left
                if (thread == 0) sm90::stores_have_read();
                sm90::warpgroup_sync(down);
            }
#pragma unroll
            for (int part = 0; part < PARTS; part++) store_part(part, sums + (chunk * PARTS + part) * 8, to);
            if (last) continue;
            sm90::fence_for_copies();
            sm90::warpgroup_sync(down);
            store_chunk(chunk, to);
        }
        if (!last) continue;
        sm90::fence_for_copies();
        sm90::warpgroup_sync(down);
        for (int chunk = 0; chunk < CHUNKS; chunk++) store_chunk(chunk, room + chunk * CHUNK_BYTES);
    }
    if (thread == 0) sm90::stores_have_read();
    allow_next_launch();
}

#endif

template <typename T, class SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, 1) tile_gemm_kernel(const __grid_constant__ gemm_task task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t smem = held(shared_address(shared));
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        const auto init = [&](int barriers, int count, int arrivals) {
            for (int i = 0; i < count; i++) sm90::barrier_init(smem + barriers + i * 8, arrivals);
        };
        init(SHAPE::X_FULL, SHAPE::X_STAGES, 1);
        init(SHAPE::X_EMPTY, SHAPE::X_STAGES, DOWN);
        init(SHAPE::DENSE_FULL, SHAPE::DENSE_STAGES * DOWN, TILE_PARTS);
        init(SHAPE::DENSE_EMPTY, SHAPE::DENSE_STAGES * DOWN, SHAPE::PAIR);
        init(SHAPE::PACKED_FULL, task.packed_units, SHAPE::JOBS);
        init(SHAPE::PACKED_EMPTY, task.packed_units, TILE_PARTS * sm90::WARP_ARRIVALS);
        init(SHAPE::GATHERED, DOWN * SHAPE::GATHER_SLOTS, 1);
        sm90::fence_barrier_init();
        sm90::fence_for_copies();
        sm90::prefetch_map(&task.x);
        sm90::prefetch_map(&task.y);
    }
    const auto barriers_ready = [] {
        __syncthreads();
        if (SHAPE::PAIR > 1) sm90::cluster_sync();
    };
    const gemm_work work(task, SHAPE::PAIR);
    if (warpgroup < DOWN) {
        barriers_ready();
        gemm_multiply<T, SHAPE>(task, smem, work, warpgroup);
    } else {
        gemm_decode<SHAPE>(task, smem, work, warpgroup - DOWN, barriers_ready);
    }
    __syncwarp();
    if (SHAPE::PAIR > 1) sm90::cluster_sync(); // no block may leave while its neighbour writes into it
#endif
}

// Units of packed tiles that fit beside the rest.
template <class SHAPE>
int gemm_packed_units(const Device &device, int slot_bytes) {
    const int fit = std::min((device.shared_bytes - SHAPE::PACKED) / (slot_bytes * SHAPE::JOBS), MAX_PACKED);
    return fit - fit % SHAPE::DECODERS;
}

int gemm_slot_bytes(const tile_matrix &m) { // a few bytes are read behind the last value
    return (m.widest * TILE_UNIT + 16 + 127) / 128 * 128;
}

// How many clusters run at once. Each block takes an SM.
template <typename T, class SHAPE>
cudaError_t gemm_clusters_at_once(const Device &device, int *clusters) {
    return clusters_at_once<tile_gemm_kernel<T, SHAPE>, SHAPE::PAIR>(device, SHAPE::PAIR, SHAPE::THREADS,
                                                                     device.shared_bytes - 1024, clusters);
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
int64_t gemm_given_bytes(int clusters) {
    return (clusters * SHAPE::PAIR * DOWN * 8 + 127) / 128 * 128;
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
    task.col_blocks = (int)tile_col_blocks(m.cols);
    task.row_tiles = (int)ceil_div(task.row_blocks, DOWN);
    task.token_tiles = (int)ceil_div(args.tokens, SHAPE::TOKENS * SHAPE::PAIR);
    task.clusters = plan.clusters;
    task.cut = plan.cut;
    task.given = (uint64_t *)args.room;
    task.sums = (float4 *)((uint8_t *)args.room + gemm_given_bytes<SHAPE>(plan.clusters));
    task.launch = ++gemm_launches * 0x9e3779b97f4a7c15ull; // what a workspace that nobody has cleared will not hold
    task.slot_bytes = gemm_slot_bytes(m);
    task.packed_units = gemm_packed_units<SHAPE>(device, task.slot_bytes);
    cudaError_t error = sm90::tensor_map(&task.x, CU_TENSOR_MAP_DATA_TYPE_UINT16, args.x, m.cols, args.tokens,
                                         args.x_stride * 2, TILE_COLS, SHAPE::TOKENS);
    if (!error && !task.y_plain)
        error = sm90::tensor_map(&task.y, CU_TENSOR_MAP_DATA_TYPE_UINT16, args.y, m.rows, args.tokens, m.rows * 2,
                                 TILE_ROWS, CHUNK);
    if (error) return error;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {SHAPE::PAIR, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3((unsigned)(plan.clusters * SHAPE::PAIR));
    config.blockDim = dim3(SHAPE::THREADS);
    config.dynamicSmemBytes = SHAPE::PACKED + task.packed_units * SHAPE::JOBS * task.slot_bytes;
    config.stream = args.stream;
    config.attrs = attributes;
    config.numAttrs = 1;
    if (may_overlap(args.stream, SHAPE::THREADS)) attributes[config.numAttrs++] = overlap_attribute();
    return cudaLaunchKernelEx(&config, tile_gemm_kernel<T, SHAPE>, task);
}

// The shapes that there are.
template <class BODY>
void for_gemm_shapes(const BODY &body) {
    body(gemm_shape<256, 1>());
    body(gemm_shape<256, 2>());
    body(gemm_shape<128, 1>());
}

// The best way to run a shape, if it takes less than *least. MACKO_TILE_GEMM=256x1x1 (tokens x pair x whether tiles are cut)
// is taken where it fits.
template <typename T, class SHAPE>
cudaError_t gemm_consider(const tile_matrix &m, int64_t tokens, const Device &device, int64_t *least,
                          tile_gemm_plan *plan) {
    if (gemm_packed_units<SHAPE>(device, gemm_slot_bytes(m)) < SHAPE::MIN_PACKED) return cudaSuccess;
    int at_once;
    if (const cudaError_t error = gemm_clusters_at_once<T, SHAPE>(device, &at_once)) return error;
    const int64_t tiles = ceil_div(tile_row_blocks(m.rows), DOWN) * ceil_div(tokens, SHAPE::TOKENS * SHAPE::PAIR);
    const int64_t k_tiles = tile_col_blocks(m.cols);
    int forced[3] = {};
    if (const char *knob = getenv("MACKO_TILE_GEMM")) sscanf(knob, "%dx%dx%d", forced, forced + 1, forced + 2);
    const auto consider = [&](int64_t clusters, int64_t cut) {
        // Clocks of an SM: stages (5 % more where clusters are at different columns and find less in L2), the end of each
        // output tile, the meeting of sums, and each range that they come from.
        const int64_t range = cut ? ceil_div(cut * k_tiles, clusters) : 0, whole = ceil_div(tiles - cut, clusters);
        int64_t time = (whole * k_tiles * 20 + range * 21) * SHAPE::STAGE_CLOCKS / 20 + whole * 2000;
        if (cut) time += 17000 + ceil_div(k_tiles, range) * 1500;
        if (forced[0] == SHAPE::TOKENS && forced[1] == SHAPE::PAIR && forced[2] == (cut > 0)) time = -1;
        const int64_t room =
            cut ? gemm_given_bytes<SHAPE>(clusters) + clusters * SHAPE::PAIR * DOWN * SHAPE::SUMS_BYTES : 0;
        if (time >= *least) return;
        *least = time;
        *plan = {room, SHAPE::TOKENS, SHAPE::PAIR, (int)clusters, (int)cut};
    };
    consider(std::min<int64_t>(tiles, at_once), 0);
    // Cut: what a last round of whole tiles leaves over, or that and a round more, so that no tile is cut often.
    const int64_t left = tiles % at_once;
    for (int64_t cut = left; left && cut <= tiles && cut <= left + at_once; cut += at_once) {
        const int64_t clusters = std::min<int64_t>(at_once, cut * k_tiles);
        if (cut * k_tiles * clusters > INT32_MAX || (clusters < at_once && cut < tiles)) break;
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
        if (args.plan.tokens == SHAPE::TOKENS && args.plan.pair == SHAPE::PAIR)
            error = gemm_launch<T, SHAPE>(args, device);
    });
    return error;
}

} // namespace
} // namespace macko

cudaError_t tile_gemm_plan_cuda(const tile_matrix *m, int64_t tokens, tile_gemm_plan *plan) {
    using namespace macko;
    *plan = {-1, 0, 0, 0, 0};
    Device device;
    const cudaError_t error = current_device(&device);
    if (error || tokens <= 128 || !m->rows || !m->cols || device.major != 9 || is("MACKO_COPY", "cp_async"))
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
