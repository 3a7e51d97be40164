// The kernel for up to 64 tokens, and by blocks of 64 for some hundreds, on any GPU from compute capability 8.0 on:
// y = x W^T by cp.async, ldmatrix and mma.sync. No mbarrier, bulk copy, wgmma or cluster. few_kernel.cuh is that of 9.0.
//
//     block      16 warps, one block an SM. A warp has a slice (16 rows) of one tile of every slab: one ring of stages,
//                of the whole block. Or, in pairs, of two neighbouring tiles of every other slab: two rings of eight
//                warps, so that what a slab costs a warp is paid once for two tiles. How a tile is decoded is the
//                codec's (codec.cuh). For 64 tokens also eight warps, each with two neighbouring tiles of two row blocks:
//                a stage has a slab of both, and their x is fetched, and read by ldmatrix, once
//     stage      | slabs | x: [token][256 columns], 16-byte chunks at chunk ^ token % 8 |     a group of copies a thread
//     loop       wait for the oldest copies; a barrier of the ring: the stage is there, and the one before it is free;
//                fetch into that; decode step by step into operand A, multiply
//     group      the four warps of a tile, or of two: they have sums of all rows. There are four groups, with two row
//                blocks two, whose sums meet in shared memory, 16 tokens at a time
//     shares     a block's slabs follow each other, over the ends of row blocks (ring_plan.h). Its last row block comes
//                first: if another block ends that one, the sums go to the workspace early, and a flag with the launch's
//                epoch after them. The row block that others began comes last: their sums are added in the order of
//                falling block numbers, so bits do not vary. They have lower numbers, were started earlier, and wait for
//                nobody that starts later
//
// x in halves, where a stage has no room for it: each group fetches the tokens of 32 columns of its own tile, two halves
// in turn, [token][32 columns], chunks at chunk ^ token / 2 % 4.
#pragma once

#include <atomic>
#include <type_traits>

#include "../core/cuda.cuh"
#include "../core/flags.cuh"
#include "codec.cuh"
#include "ring_plan.h"

namespace macko {

// Of all sources' launches: no two have the same epoch.
inline std::atomic<uint64_t> ring_launches;

namespace {

template <class CODEC>
struct ring_task {
    const uint8_t *data;
    const int32_t *offsets; // NULL if all slabs have the size slab_units
    const uint16_t *x;
    int64_t x_stride;
    const void *bias;
    macko_slab_outputs y;
    float4 *partials; // [token block][block][row block of a stage][eight of tokens][128 threads of a group]
    uint64_t *flags;  // [token block][block]
    uint64_t epoch;
    int64_t rows;
    macko_ring_shares shares;
    int tokens, cols, token_blocks, slab_units;
    int stages, stage_bytes, x_at;
    int units;  // of data
    float mean; // of a slab
    typename CODEC::constants weights;
    int slab_bytes, last_row_block; // from a slab of a stage to that of the next row block
};

// With what it takes of a weight.
template <class CODEC>
ring_task<CODEC> ring_task_of(const slab_weight<CODEC> &w) {
    ring_task<CODEC> task{};
    task.data = w.data;
    task.offsets = w.offsets;
    task.rows = w.rows;
    task.cols = (int)w.cols;
    task.slab_units = w.widest;
    task.units = (int)w.units;
    task.mean = (float)w.units / macko_slab_count(w.rows, w.cols);
    task.weights = w.constants;
    return task;
}

template <int TOKENS_, macko_ring_kind KIND>
struct ring_shape {
    static constexpr int TOKENS = TOKENS_, EIGHTS = TOKENS / 8;
    static constexpr bool X_IN_HALVES = KIND == MACKO_RING_HALVES;
    static constexpr int ROW_BLOCKS = KIND == MACKO_RING_TWO_ROWS ? 2 : 1, // of a stage, and of a warp
        TILES = KIND == MACKO_RING_PAIRS || ROW_BLOCKS > 1 ? 2 : 1;        // of a warp in a slab
    static constexpr int RINGS = KIND == MACKO_RING_PAIRS ? 2 : 1, WARPS = MACKO_RING_WARPS / ROW_BLOCKS,
                         THREADS = WARPS * WARP, RING_THREADS = THREADS / RINGS, RING_WARPS = RING_THREADS / WARP,
                         SLAB_THREADS = RING_THREADS / ROW_BLOCKS; // that fetch a slab
    static constexpr int GROUPS = WARPS / MACKO_SLAB_SLICES, GROUP_THREADS = MACKO_SLAB_SLICES * WARP;
    static constexpr int AT_ONCE = EIGHTS < 2 ? 1 : 2; // eights whose sums meet at once
    // Those of them that one group adds, and stores. Of 16 tokens two groups have one each: 4096 x 4096 of tile takes
    // 11.2 us for 11.6 by one group (H100, 2026-11-28).
    static constexpr int OWNED = EIGHTS > 2 ? 2 : 1;
    static constexpr int X_ROW = MACKO_SLAB_COLS * 2; // bytes of a token in a stage
    static constexpr int HALF_ROW = 64, HALF_BYTES = TOKENS * HALF_ROW;
    static_assert(!X_IN_HALVES || EIGHTS > 1);
};

// The slabs of a block in its order: of the last row block first, each from its first slab here on.
struct ring_walk {
    int begin, slabs;     // of the share; of a row block
    int slab, first, end; // where it is, and what the share has of this row block
    int row_block;

    __device__ __forceinline__ ring_walk(int begin, int end, int slabs) : begin(begin), slabs(slabs), end(end) {
        row_block = (end - 1) / slabs;
        first = slab = max(begin, row_block * slabs);
    }
    __device__ __forceinline__ bool is_last() const {
        return first <= begin;
    }
    __device__ __forceinline__ void to_previous_row_block() {
        end = first;
        row_block--;
        first = slab = max(begin, row_block * slabs);
    }
    // false: there is none.
    __device__ __forceinline__ bool advance(int count) {
        slab += count;
        while (slab >= end) {
            if (is_last()) return false;
            const int over = slab - end;
            to_previous_row_block();
            slab += over;
        }
        return true;
    }
    __device__ __forceinline__ int column() const {
        return (slab - row_block * slabs) * MACKO_SLAB_COLS;
    }
};

__device__ __forceinline__ void wait_for_copies(int pending) {
    if (pending >= 2)
        wait_copies<2>();
    else if (pending == 1)
        wait_copies<1>();
    else
        wait_copies<0>();
}

// What a thread fetches: slabs and their tokens, a stage after the other.
template <class CODEC, class SHAPE>
struct ring_fetch {
    const ring_task<CODEC> &task;
    ring_walk ahead;
    bool more;
    uint32_t thread;             // within its ring
    int row_block, slab_at;      // of a stage's, whose slab this thread fetches; where that is in the stage
    uint32_t ring, ring_end, to; // from that slab of the first stage on; to: of the stage
    int from, units;             // of the slab
    const uint16_t *x;           // of the token block
    int tokens;                  // in it
    uint32_t x_to;               // from the slab on, where the thread's first chunk of x goes
    const uint8_t *x_from;

    __device__ __forceinline__ ring_fetch(const ring_task<CODEC> &task, int begin, int end, uint32_t base,
                                          int ring_index, int token_block)
        : task(task), ahead(begin, end, task.shares.slabs) {
        more = ring_index == 0 || ahead.advance(ring_index);
        thread = threadIdx.x % SHAPE::RING_THREADS;
        row_block = thread / SHAPE::SLAB_THREADS;
        slab_at = row_block * task.slab_bytes;
        ring = to = base + ring_index * task.stages * task.stage_bytes + slab_at;
        ring_end = ring + task.stages * task.stage_bytes;
        x = task.x + (int64_t)token_block * MACKO_RING_MOST_TOKENS * task.x_stride;
        tokens = min(SHAPE::TOKENS, task.tokens - token_block * MACKO_RING_MOST_TOKENS);
        look_up();
        prefetch_first();
        const uint32_t chunk = thread % WARP, token = thread / WARP; // a warp copies a token's columns
        x_to = opaque(task.x_at - slab_at + token * SHAPE::X_ROW + ((chunk & ~7u) | ((chunk ^ token) & 7)) * 16);
        x_from = (const uint8_t *)(x + (int64_t)token * task.x_stride + chunk * 8);
        asm volatile("" : "+l"(x_from)); // else it is worked out anew at each stage
    }
    // Of the matrix. The last row block is there twice if their number is odd; its second sums are not stored.
    __device__ __forceinline__ int slab_index() const {
        if (SHAPE::ROW_BLOCKS == 1) return ahead.slab;
        const int of_all = min(ahead.row_block * SHAPE::ROW_BLOCKS + row_block, task.last_row_block);
        return ahead.slab + (of_all - ahead.row_block) * task.shares.slabs;
    }
    __device__ __forceinline__ void look_up() {
        from = 0;
        units = task.slab_units;
        if (CODEC::SAME_SIZE || !more) return;
        const int slab = slab_index();
        from = task.offsets[slab];
        units = task.offsets[slab + 1] - from;
    }
    // What lies about where the first slab should be comes to L2 while that is looked up.
    __device__ __forceinline__ void prefetch_first() const {
        constexpr int ABOUT = 24;
        if (CODEC::SAME_SIZE || !more) return;
        const int own = thread % SHAPE::SLAB_THREADS, unit = max(0, (int)(slab_index() * task.mean) - ABOUT) + own;
        if (own < (int)task.mean + 2 * ABOUT && unit < task.units)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(task.data + (int64_t)unit * MACKO_SLAB_UNIT));
    }
    __device__ __forceinline__ void slab() const {
        constexpr int STEP = SHAPE::SLAB_THREADS * 16, UNROLLED = 4;
        const int64_t unit = CODEC::SAME_SIZE ? (int64_t)slab_index() * task.slab_units : from;
        const uint32_t at = thread % SHAPE::SLAB_THREADS * 16;
        const uint8_t *source = task.data + unit * MACKO_SLAB_UNIT + at;
        const int bytes = units * MACKO_SLAB_UNIT - at;
#pragma unroll 1
        for (int i = 0; i < bytes; i += UNROLLED * STEP)
#pragma unroll
            for (int k = 0; k < UNROLLED; k++)
                if (k == 0 || i + k * STEP < bytes) copy_async_of_line(to + at + i + k * STEP, source + i + k * STEP);
    }
    __device__ __forceinline__ void tokens_of_slab() const {
        const int col = ahead.column();
        if (col + MACKO_SLAB_COLS <= task.cols)
            copy_tokens<true>(col);
        else
            copy_tokens<false>(col);
    }
    // WHOLE: all of the slab's columns are of the matrix.
    template <bool WHOLE>
    __device__ __forceinline__ void copy_tokens(int col) const {
        const int left = tokens - (int)(thread / WARP);
        const int bytes = max(0, min(16, (task.cols - col - (int)(thread % WARP) * 8) * 2));
        const uint8_t *row = WHOLE || bytes ? x_from + col * 2 : (const uint8_t *)task.x;
        const int64_t step = WHOLE || bytes ? task.x_stride * (SHAPE::RING_WARPS * 2) : 0;
        const uint32_t at = to + x_to;
#pragma unroll
        for (int other = 0; other < SHAPE::TOKENS; other += SHAPE::RING_WARPS, row += step)
            if (other < left) {
                if constexpr (WHOLE)
                    copy_async<16>(at + other * SHAPE::X_ROW, row);
                else
                    copy_async_some(at + other * SHAPE::X_ROW, row, bytes);
            }
    }
    // Of a group's tile that begins with column `col`: half 0 or 1.
    __device__ __forceinline__ void tokens_of_half(uint32_t halves, int col, int half) const {
        constexpr int AT_ONCE = SHAPE::GROUP_THREADS / 4;
        const uint32_t chunk = threadIdx.x % 4, token = threadIdx.x % SHAPE::GROUP_THREADS / 4;
        const int first = col + half * 32 + chunk * 8, bytes = max(0, min(16, (task.cols - first) * 2));
        const uint16_t *source = x + (int64_t)token * task.x_stride + (bytes ? first : 0);
        const uint32_t at =
            halves + half * SHAPE::HALF_BYTES + token * SHAPE::HALF_ROW + ((chunk ^ token / 2) & 3) * 16;
#pragma unroll
        for (int other = 0; other < SHAPE::TOKENS; other += AT_ONCE)
            if (other + (int)token < tokens)
                copy_async_some(at + other * SHAPE::HALF_ROW, source + other * task.x_stride, bytes);
    }
    // Tokens that are not there are zeros, once for all stages.
    __device__ __forceinline__ void clear_missing_tokens(uint32_t halves) const {
        const uint4 zeros = make_uint4(0, 0, 0, 0);
        if constexpr (SHAPE::X_IN_HALVES) {
            for (int i = threadIdx.x % SHAPE::GROUP_THREADS; i < 2 * SHAPE::HALF_BYTES / 16; i += SHAPE::GROUP_THREADS)
                if (i * 16 % SHAPE::HALF_BYTES / SHAPE::HALF_ROW >= tokens) store_shared_16(halves + i * 16, zeros);
        } else {
            for (int stage = 0; stage < task.stages; stage++)
                for (int token = tokens + thread / WARP; token < SHAPE::TOKENS; token += SHAPE::RING_WARPS)
                    store_shared_16(ring - slab_at + stage * task.stage_bytes + task.x_at + token * SHAPE::X_ROW +
                                        thread % WARP * 16,
                                    zeros);
        }
    }
    // The slab that `to` has been filled with is followed by the ring's next one.
    __device__ __forceinline__ void advance() {
        more = more && ahead.advance(SHAPE::RINGS);
        to += task.stage_bytes;
        if (to == ring_end) to = ring;
        look_up();
    }
    __device__ __forceinline__ void stage() {
        if (more) {
            slab();
            tokens_of_slab();
        }
        commit_copies();
        advance();
    }
};

// What a warp multiplies: its sums of a row block, or of both of a stage, a stage after the other.
template <class CODEC, class SHAPE>
struct ring_product {
    using T = typename CODEC::T;
    using READER = few_reader_of<CODEC, SHAPE::TILES == 2>;
    static constexpr int ROW_BLOCKS = SHAPE::ROW_BLOCKS;
    const ring_task<CODEC> &task;
    struct row_readers {
        typename READER::type reader[ROW_BLOCKS];
        uint32_t from[ROW_BLOCKS]; // their slabs, from where a stage is said to be
    } rows;
    uint32_t x_lane, halves; // where a lane's row of four matrices is: two steps of 8 tokens, or a step of 16
    // odd: of 8 tokens, whose steps would wait for each other: those of odd steps.
    float sums[ROW_BLOCKS][SHAPE::EIGHTS][4], odd[ROW_BLOCKS][4];
    uint32_t a[ROW_BLOCKS][4][4];

    // Stages are said to be where their slab `slab_at` is.
    __device__ __forceinline__ ring_product(const ring_task<CODEC> &task, int tile, int slice, int lane,
                                            uint32_t halves_, int slab_at = 0)
        : task(task), rows(readers(task, tile, slice, lane, slab_at)) {
        const uint32_t matrix = lane / 8, row = lane % 8;
        const uint32_t token = SHAPE::EIGHTS == 1 ? row : matrix / 2 * 8 + row;
        x_lane = opaque(task.x_at - slab_at + token * SHAPE::X_ROW + tile * (MACKO_SLAB_TILE_COLS * 2) +
                        (((SHAPE::EIGHTS == 1 ? matrix : matrix % 2) ^ row) & 7) * 16);
        halves = opaque(halves_ + token * SHAPE::HALF_ROW + ((matrix % 2 ^ row / 2) & 3) * 16);
    }
    __device__ __forceinline__ static row_readers readers(const ring_task<CODEC> &task, int tile, int slice, int lane,
                                                          int slab_at) {
        if constexpr (ROW_BLOCKS == 1)
            return {{{task.weights, tile, slice, lane}}, {0}};
        else
            return {{{task.weights, tile, slice, lane}, {task.weights, tile, slice, lane}},
                    {opaque(-slab_at), opaque(task.slab_bytes - slab_at)}};
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < ROW_BLOCKS * SHAPE::EIGHTS * 4; i++) (&sums[0][0][0])[i] = 0;
#pragma unroll
        for (int i = 0; i < ROW_BLOCKS * 4; i++) (&odd[0][0])[i] = 0;
    }
    template <int STEP, int TILE>
    __device__ __forceinline__ void multiply_step(uint32_t stage) {
        const uint32_t x = stage + TILE * (MACKO_SLAB_TILE_COLS * 2);
        uint32_t b[4];
        if constexpr (SHAPE::EIGHTS == 1) {
            if constexpr (STEP % 2) {
                ldmatrix_x4(b, x + (x_lane ^ (STEP / 2 * 64)));
#pragma unroll
                for (int r = 0; r < ROW_BLOCKS; r++) {
                    mma<T>(sums[r][0], a[r][STEP - 1], b[0], b[1]);
                    mma<T>(odd[r], a[r][STEP], b[2], b[3]);
                }
            }
        } else {
            const uint32_t at = SHAPE::X_IN_HALVES ? (halves ^ (STEP % 2 * 32)) + STEP / 2 * SHAPE::HALF_BYTES
                                                   : x + (x_lane ^ (STEP * 32));
#pragma unroll
            for (int pair = 0; pair < SHAPE::EIGHTS / 2; pair++) {
                ldmatrix_x4(b, at + pair * 16 * (SHAPE::X_IN_HALVES ? SHAPE::HALF_ROW : SHAPE::X_ROW));
#pragma unroll
                for (int r = 0; r < ROW_BLOCKS; r++) {
                    mma<T>(sums[r][2 * pair], a[r][STEP], b[0], b[1]);
                    mma<T>(sums[r][2 * pair + 1], a[r][STEP], b[2], b[3]);
                }
            }
        }
    }
    // Prepares a tile.
    template <int TILE>
    __device__ __forceinline__ void prepare(uint32_t stage) {
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; r++)
            prepare_tile<TILE>(rows.reader[r], stage + rows.from[r] + CODEC::BASE, task.weights);
    }
    // A step of a tile, while that step of NEXT (-1: none), of the same slab, is prepared.
    template <int STEP, int TILE, int NEXT>
    __device__ __forceinline__ void step(uint32_t stage) {
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; r++) {
            const uint32_t slab = stage + rows.from[r] + CODEC::BASE;
            rows.reader[r].template load_next<STEP, TILE>(slab, task.weights);
            if constexpr (NEXT >= 0) rows.reader[r].template prepare<STEP, NEXT>(slab, task.weights);
            rows.reader[r].template make<STEP, TILE>(a[r], task.weights);
        }
        if constexpr ((STEP + 1) % READER::STEPS == 0) {
            if constexpr (READER::STEPS == 4) multiply_step<STEP - 3, TILE>(stage);
            if constexpr (READER::STEPS == 4) multiply_step<STEP - 2, TILE>(stage);
            if constexpr (READER::STEPS >= 2) multiply_step<STEP - 1, TILE>(stage);
            multiply_step<STEP, TILE>(stage);
        }
    }
    template <int TILE, int NEXT>
    __device__ __forceinline__ void tile(uint32_t stage) {
        step<0, TILE, NEXT>(stage);
        step<1, TILE, NEXT>(stage);
        step<2, TILE, NEXT>(stage);
        step<3, TILE, NEXT>(stage);
    }
    __device__ __forceinline__ void stage(uint32_t at) {
        prepare<0>(at);
        if constexpr (SHAPE::TILES == 2) {
            tile<0, 1>(at);
            tile<1, -1>(at);
        } else {
            tile<0, -1>(at);
        }
    }
    // body(row block of a stage, eight, sums) of those that this group stores.
    template <typename BODY>
    __device__ __forceinline__ void own(int group, int tokens, const BODY &body) {
#pragma unroll
        for (int eight = 0; eight < SHAPE::EIGHTS; eight++)
            if (group == eight / SHAPE::OWNED % SHAPE::GROUPS && eight * 8 < tokens)
#pragma unroll
                for (int r = 0; r < ROW_BLOCKS; r++) body(r, eight, sums[r][eight]);
    }
    // All groups' sums, at the group that stores them; those of each in the order of groups. thread: of a group.
    __device__ __forceinline__ void meet(float4 *at, int group, int thread) {
        constexpr int AT_ONCE = SHAPE::AT_ONCE, OWNED = SHAPE::OWNED, COUNT = ROW_BLOCKS * OWNED,
                      GIVEN = (SHAPE::GROUPS - 1) * COUNT * SHAPE::GROUP_THREADS; // to a group
        if constexpr (SHAPE::EIGHTS == 1)
            for (int r = 0; r < ROW_BLOCKS; r++)
                for (int i = 0; i < 4; i++) sums[r][0][i] += odd[r][i];
#pragma unroll
        for (int pass = 0; pass < SHAPE::EIGHTS / AT_ONCE; pass++) {
            if (pass) __syncthreads(); // the sums before are read
#pragma unroll
            for (int k = 0; k < AT_ONCE; k += OWNED) {
                const int first = pass * AT_ONCE + k, owner = first / OWNED % SHAPE::GROUPS;
                if (group != owner)
#pragma unroll
                    for (int i = 0; i < COUNT; i++) {
                        const float *s = sums[i / OWNED][first + i % OWNED];
                        at[k / OWNED * GIVEN + ((group - (group > owner)) * COUNT + i) * SHAPE::GROUP_THREADS +
                           thread] = make_float4(s[0], s[1], s[2], s[3]);
                    }
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < AT_ONCE; k += OWNED) {
                const int first = pass * AT_ONCE + k;
                if (group == first / OWNED % SHAPE::GROUPS)
#pragma unroll
                    for (int i = 0; i < COUNT; i++)
#pragma unroll
                        for (int other = 0; other < SHAPE::GROUPS - 1; other++)
                            add(sums[i / OWNED][first + i % OWNED],
                                at[k / OWNED * GIVEN + (other * COUNT + i) * SHAPE::GROUP_THREADS + thread]);
            }
        }
    }
    __device__ __forceinline__ static void add(float (&s)[4], float4 v) {
        s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
    }
};

// Sums that blocks exchange through device memory.
template <class CODEC, class SHAPE>
struct ring_exchange {
    const ring_task<CODEC> &task;
    int block;
    uint64_t *flags;
    float4 *partials;

    __device__ __forceinline__ ring_exchange(const ring_task<CODEC> &task, int block, int token_block)
        : task(task), block(block) {
        const int64_t first = (int64_t)token_block * task.shares.blocks;
        flags = task.flags + first;
        partials = task.partials + first * (SHAPE::ROW_BLOCKS * SHAPE::EIGHTS * SHAPE::GROUP_THREADS);
    }
    __device__ __forceinline__ float4 *of(int other, int r, int eight) const {
        return partials + (((int64_t)other * SHAPE::ROW_BLOCKS + r) * SHAPE::EIGHTS + eight) * SHAPE::GROUP_THREADS +
               threadIdx.x % SHAPE::GROUP_THREADS;
    }
    __device__ __forceinline__ void give(ring_product<CODEC, SHAPE> &product, int group, int tokens) const {
        product.own(group, tokens, [&](int r, int eight, const float *s) {
            *of(block, r, eight) = make_float4(s[0], s[1], s[2], s[3]);
        });
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) store_release(flags + block, task.epoch);
    }
    // What the blocks before have of the row block that begins with this slab. By each group before its last stage has
    // come: then it is mostly there, and nothing waits for it.
    __device__ __forceinline__ void take(ring_product<CODEC, SHAPE> &product, int row_begin, int group,
                                         int tokens) const {
        for (int other = block; macko_ring_share_at(&task.shares, other) > row_begin;) {
            other--;
            while (load_acquire(flags + other) != task.epoch) {
            }
            product.own(group, tokens, [&](int r, int eight, float (&s)[4]) { product.add(s, *of(other, r, eight)); });
        }
    }
    // A graph launches this again, with the same epoch. By one thread, when all have taken.
    __device__ __forceinline__ void clear_taken(int row_begin) const {
        for (int other = block; macko_ring_share_at(&task.shares, other) > row_begin;) flags[--other] = 0;
    }
};

// Four sums of a thread of a group: two rows, two tokens. first_token: of the token block's eight.
template <class CODEC>
__device__ __forceinline__ void ring_store(const ring_task<CODEC> &task, int64_t row_block, int first_token, int thread,
                                           const float (&sum)[4]) {
    using T = typename CODEC::T;
    const int64_t row = row_block * MACKO_SLAB_ROWS + thread / WARP * 16 + thread % WARP / 4;
    const int token = first_token + thread % 4 * 2;
    const macko_slab_output &output = task.y.output[macko_slab_output_of(&task.y, row_block * MACKO_SLAB_ROWS)];
    T *y = (T *)output.y + token * output.rows + row;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        if (row + k * 8 >= task.rows) continue;
        const float bias = task.bias ? to_float(((const T *)task.bias)[row + k * 8]) : 0;
        float scale = 1;
        if constexpr (CODEC::SCALED) scale = task.weights.scales[row + k * 8] * CODEC::FOLD;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (token + i < task.tokens)
                y[i * output.rows + k * 8] =
                    from_float<T>(CODEC::SCALED ? sum[2 * k + i] * scale + bias : sum[2 * k + i] + bias);
    }
}

// The stages of a row block: `left` of this ring, of which `here` is the first.
template <class CODEC, class SHAPE, typename TAKE>
__device__ __forceinline__ void ring_stages(ring_fetch<CODEC, SHAPE> &fetch, ring_product<CODEC, SHAPE> &product,
                                            uint32_t &here, int left, int ring_index, const TAKE &take) {
#pragma unroll 1
    for (; left; left--) {
        if (left == 1) take();
        wait_for_copies(fetch.task.stages - 2);
        named_barrier_sync(1 + ring_index, SHAPE::RING_THREADS);
        fetch.stage();
        product.stage(here);
        here += fetch.task.stage_bytes;
        if (here == fetch.ring_end) here = fetch.ring;
    }
}

// The same with x in halves. col: the group's first column of the slab that is here.
template <class CODEC, class SHAPE, typename TAKE>
__device__ __forceinline__ void ring_stages_by_halves(ring_fetch<CODEC, SHAPE> &fetch,
                                                      ring_product<CODEC, SHAPE> &product, uint32_t halves,
                                                      uint32_t &here, int &col, int left, int group, const TAKE &take) {
    const int tile_col = group * MACKO_SLAB_TILE_COLS;
#pragma unroll 1
    for (; left; left--) {
        if (left == 1) take();
        wait_copies<0>();
        named_barrier_sync(1, SHAPE::RING_THREADS);
        fetch.tokens_of_half(halves, col, 1);
        commit_copies();
        const bool goes_on = fetch.more;
        const int next_col = fetch.ahead.column() + tile_col;
        if (goes_on) fetch.slab();
        commit_copies();
        fetch.advance();
        product.template prepare<0>(here);
        product.template step<0, 0, -1>(here);
        product.template step<1, 0, -1>(here);
        wait_copies<1>(); // the second half is there, and of the group the first one free
        named_barrier_sync(2 + group, SHAPE::GROUP_THREADS);
        if (goes_on) fetch.tokens_of_half(halves, next_col, 0);
        commit_copies();
        product.template step<2, 0, -1>(here);
        product.template step<3, 0, -1>(here);
        col = next_col;
        here += fetch.task.stage_bytes;
        if (here == fetch.ring_end) here = fetch.ring;
    }
}

template <class CODEC, class SHAPE>
__global__ void __launch_bounds__(SHAPE::THREADS, 1) slab_ring_kernel(const __grid_constant__ ring_task<CODEC> task) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = __shfl_sync(FULL_WARP, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
    const int group = warp / MACKO_SLAB_SLICES, slice = warp % MACKO_SLAB_SLICES, ring_index = warp / SHAPE::RING_WARPS,
              tile = group * SHAPE::TILES % MACKO_SLAB_TILES, thread = threadIdx.x % SHAPE::GROUP_THREADS;
    // The token blocks of the same slabs side by side: the first brings them to L2.
    const int token_block = blockIdx.x % task.token_blocks, block = blockIdx.x / task.token_blocks;
    const int begin = (int)macko_ring_share_at(&task.shares, block),
              end = (int)macko_ring_share_at(&task.shares, block + 1);
    const uint32_t base = shared_address(shared), after_rings = base + SHAPE::RINGS * task.stages * task.stage_bytes,
                   halves = after_rings + group * 2 * SHAPE::HALF_BYTES;
    auto *const meeting =
        (float4 *)(shared + (after_rings - base) + (SHAPE::X_IN_HALVES ? SHAPE::GROUPS * 2 * SHAPE::HALF_BYTES : 0));
    ring_fetch<CODEC, SHAPE> fetch(task, begin, end, base, ring_index, token_block);
    const int tokens = fetch.tokens;
    if (fetch.more) fetch.slab(); // weights may come before the previous kernel has ended
    fetch.clear_missing_tokens(halves);
    pdl_wait();
    int col = fetch.ahead.column() + tile * MACKO_SLAB_TILE_COLS;
    if constexpr (SHAPE::X_IN_HALVES)
        fetch.tokens_of_half(halves, col, 0);
    else if (fetch.more)
        fetch.tokens_of_slab();
    commit_copies();
    fetch.advance();
    for (int stage = 1; !SHAPE::X_IN_HALVES && stage + 1 < task.stages; stage++) fetch.stage();
    pdl_launch_dependents();

    ring_product<CODEC, SHAPE> product(task, tile, slice, lane, halves, fetch.slab_at);
    const auto exchange = [&] { return ring_exchange<CODEC, SHAPE>(task, block, token_block); }; // not held: registers
    ring_walk here(begin, end, task.shares.slabs);
    uint32_t stage = fetch.ring;
    for (int skip = ring_index;;) { // slabs of the row block that are of the other ring, before this one's first
        product.clear();
        const int row_begin = here.row_block * task.shares.slabs, count = here.end - here.first;
        const bool gives = here.end < row_begin + task.shares.slabs, takes = !gives && here.first > row_begin;
        bool taken = !takes;
        const auto take = [&] {
            if (!taken) exchange().take(product, row_begin, group, tokens);
            taken = true;
        };
        const int left = count > skip ? (count - skip + SHAPE::RINGS - 1) / SHAPE::RINGS : 0;
        skip += left * SHAPE::RINGS - count;
        if constexpr (SHAPE::X_IN_HALVES)
            ring_stages_by_halves(fetch, product, halves, stage, col, left, group, take);
        else
            ring_stages(fetch, product, stage, left, ring_index, take);
        take(); // a ring that has none
#ifdef MACKO_EVERY_LANE_ARRIVES
        // racecheck goes by how many barriers a warp has passed, of whichever number. This one orders nothing between rings.
        if (SHAPE::RINGS > 1 && left < count - left) named_barrier_sync(1 + ring_index, SHAPE::RING_THREADS);
#endif
        product.meet(meeting, group, thread);
        if (gives) {
            exchange().give(product, group, tokens);
        } else {
            product.own(group, tokens, [&](int r, int eight, const float (&s)[4]) {
                ring_store(task, here.row_block * SHAPE::ROW_BLOCKS + r,
                           token_block * MACKO_RING_MOST_TOKENS + eight * 8, thread, s);
            });
            if (takes && threadIdx.x == 0) exchange().clear_taken(row_begin);
        }
        if (here.is_last()) break;
        here.to_previous_row_block();
        __syncthreads(); // the sums before are read
    }
    wait_copies<0>();
#endif
}

} // namespace
} // namespace macko
