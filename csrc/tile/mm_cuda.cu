// tile_mm on CUDA: y = x W^T, one kernel for up to 128 tokens; for more see gemm_cuda.cu.
//
// A warpgroup decodes a tile into the registers of operand A, 16 columns at a time, and multiplies it with the tokens in
// shared memory (wgmma, fp32 sums) while it decodes the next ones. No x is gathered and no dense tile is written, so the
// cost of a token is the tensor cores' alone. Four warps fill a ring of stages: weights by bulk copies, tokens by tensor
// copies. A block has `down` row blocks at a time and cuts their columns into `parts`, a warpgroup each. A cluster of
// blocks shares items of such row blocks: each block has as many whole ones as the others, and what is left over is cut
// by columns once more. The sums meet in shared memory, each block adding up its share in a fixed order.
#include <type_traits>

#include "../core/cuda.cuh"
#include "../core/sm90.cuh"
#include "decode.cuh"
#include "tile.h"
#include "wgmma.cuh"

namespace macko {
namespace {

constexpr int MAX_CLUSTER = 8;
constexpr int PRODUCERS = 4; // warps
constexpr int MAX_STAGES = 16;
[[maybe_unused]] constexpr int WINDOW = 2; // stages under way at the start
constexpr int TILE_FIXED = 2048;           // bytes before the ring: barriers and what tile_memory has with them
constexpr int MIN_STAGES = PRODUCERS;      // and one is multiplied, one prepared, one waits for its last product

// Who has what of a cluster's items: the block of rank r the whole ones r, r + cluster, ... and perhaps a piece of one of
// those behind, which `share` blocks have together.
struct tile_deal {
    int whole, cut, share; // of a block; of the cluster, after cluster * whole; blocks for one of these
    int piece, longer;     // stages of a piece; the first `longer` have one more
    int chunk_bits;        // log2 of the places (threads of an item's row blocks) whose sums a block adds up
};

struct tile_task {
    CUtensorMap x; // boxes of TILE_COLS columns and the kernel's number of tokens
    const uint8_t *data;
    const int32_t *offsets;
    const void *bias;
    void *y;
    int64_t rows;
    int tokens, row_blocks, col_blocks;
    int down, parts; // row blocks of an item, and how many k tiles of each a stage has; warpgroups = down * parts
    int k_stages, chunk_bits; // of an item: its stages; as of a deal
    int cluster, clusters;    // blocks of a cluster
    int more;                 // clusters that have an item more than the others
    tile_deal deal[2];        // of theirs, and of the others
    int stages, run_bytes;    // room for the weights of a row block in a stage
    tile_weights weights;
};

template <int TOKENS>
struct tile_shape {
    static constexpr int WARPGROUPS = TOKENS <= 64 ? 4 : 3;
    // The registers of an SM: the producer, a warpgroup for that reason, leaves its own to the others.
    static constexpr int THREADS = (WARPGROUPS + 1) * 128;
    static constexpr int REGISTERS = WARPGROUPS == 4 ? 112 : 152, PRODUCER_REGISTERS = WARPGROUPS == 4 ? 32 : 56;
    static constexpr int TOKEN_BYTES = TOKENS * TILE_COLS * 2; // of a k tile
    // Where there are many sums, those of a piece take the place of the stages, and those of a whole item meet in turn.
    static constexpr bool MANY_SUMS = TOKENS >= 64;
    static constexpr int TURNS = MANY_SUMS ? 4 : 1;
    // The tensor cores add counts up where products leave them time (H200: 128 tokens do not).
    static constexpr bool SCANS = TOKENS <= 64;
    static_assert(REGISTERS * WARPGROUPS + PRODUCER_REGISTERS <= 65536 / THREADS / 8 * 8 * (WARPGROUPS + 1));
};

// What a block does, in this order: whole items, then the piece.
struct tile_work {
    int item, step, whole; // the first item, the way to the next one, how many
    int cut_item, first, last, piece, pieces;

    __device__ __forceinline__ tile_work(const tile_task &task, int cluster, int rank) {
        const tile_deal &deal = task.deal[cluster >= task.more];
        whole = deal.whole;
        step = task.cluster * task.clusters;
        item = cluster + rank * task.clusters;
        int cut = 0;
        for (piece = rank; piece >= deal.share; piece -= deal.share) cut++;
        pieces = cut < deal.cut ? deal.share : 0;
        cut_item = cluster + (whole * task.cluster + cut) * task.clusters;
        first = piece * deal.piece + min(piece, deal.longer);
        last = pieces ? first + deal.piece + (piece < deal.longer) : first;
    }
};

// Where things are in shared memory. The swizzle wants the tokens at multiples of 1024.
struct tile_memory {
    uint32_t tokens, weights;
    uint32_t sums, cut_sums; // of whole items; of pieces
    uint32_t full, empty, sums_full, may_send, places, no_tile;
};

template <int TOKENS>
__host__ __device__ inline tile_memory tile_memory_of(const tile_task &task, uint32_t base) {
    using SHAPE = tile_shape<TOKENS>;
    tile_memory m;
    m.full = base;
    m.empty = m.full + MAX_STAGES * 8;
    m.sums_full = m.empty + MAX_STAGES * 8;
    m.may_send = m.sums_full + 8;
    m.places = m.may_send + 8;              // of each warpgroup's tile in each stage
    m.no_tile = m.places + MAX_STAGES * 16; // masks without a bit, for a warpgroup that has none
    m.tokens = base + TILE_FIXED;
    m.weights = m.tokens + task.stages * task.parts * SHAPE::TOKEN_BYTES;
    m.sums = m.weights + task.stages * task.down * task.run_bytes;
    m.cut_sums = SHAPE::MANY_SUMS ? m.tokens : m.sums;
    return m;
}

// A stage of the ring, as a consumer needs it.
struct tile_ring {
    uint32_t full, tokens, phase; // its barrier; the lower half of its tokens' descriptor
};

// The warps that fill the ring tell the others that the barriers are there.
[[maybe_unused]] __device__ __forceinline__ void barriers_ready(int threads) {
    asm volatile("bar.arrive 1, %0;" ::"r"(threads) : "memory");
}
[[maybe_unused]] __device__ __forceinline__ void wait_for_barriers(int threads) {
    sync_threads(1, threads);
}

// Four warps fill the ring, each its own stages of it: one alone took longer for a stage than its copies take. A warp's
// lanes hold the offsets of its next four stages, eight each: of every row block the tiles of the stage and the one behind.
// At the start only WINDOW stages are under way: else all blocks' rings are filled at once, 30 MB, and the first stage
// comes with the last.
template <int TOKENS>
__device__ __forceinline__ void tile_produce(const tile_task &task, const tile_memory &memory, int cluster, int rank) {
    using SHAPE = tile_shape<TOKENS>;
    constexpr int AT_ONCE = 4;
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(FULL_WARP, threadIdx.x / WARP % PRODUCERS, 0);
    const tile_work work(task, cluster, rank);
    const int total = work.whole * task.k_stages + work.last - work.first, run = task.parts + 1;
    const int entry = lane % 8, entry_row = (entry >= run) + (entry >= 2 * run) + (entry >= 3 * run);
    const int entry_tile = entry - entry_row * run;
    // Where one of the block's stages is; stages are looked for in rising order.
    struct place {
        int slot, round, begin; // of the ring; stages before this round of it; before this item
        int item, left;         // left: whole items
    };
    const auto next = [&](place &p) { // the warp's next stage
        p.slot += PRODUCERS;
        if (p.slot >= task.stages) {
            p.slot = warp;
            p.round += task.stages;
        }
    };
    const auto find = [&](place &p) { // of its item
        while (p.left && p.round + p.slot - p.begin >= task.k_stages) {
            p.begin += task.k_stages;
            p.item += work.step;
            if (!--p.left) p.item = work.cut_item;
        }
        return p.round + p.slot - p.begin + (p.left ? 0 : work.first);
    };
    place load{warp, 0, 0, work.whole ? work.item : work.cut_item, work.whole}, here = load;
    for (int i = 0; i < lane / 8; i++) next(load);
    const auto load_offsets = [&] {
        const int stage = find(load);
        const bool more = load.round + load.slot < total;
        const int row_block = load.item * task.down + entry_row;
        const int tile = min(stage * task.parts + entry_tile, task.col_blocks);
        for (int i = 0; i < AT_ONCE; i++) next(load);
        return more && entry_row < task.down && row_block < task.row_blocks
                   ? task.offsets[(int64_t)row_block * task.col_blocks + tile]
                   : 0;
    };
    int offsets = 0, next_offsets = load_offsets();
    const uint64_t policy = evict_first();
    if (lane == 0) {
        for (int slot = warp; slot < task.stages; slot += PRODUCERS) {
            sm90::barrier_init(memory.full + slot * 8, 1);
            sm90::barrier_init(memory.empty + slot * 8, SHAPE::WARPGROUPS);
        }
        if (warp == 0) {
            sm90::barrier_init(memory.sums_full, 1);
            sm90::barrier_init(memory.may_send, max(work.pieces, 1));
            const int bits = task.deal[cluster >= task.more].chunk_bits,
                      places = task.down * 128 - (work.piece << bits);
            if (work.pieces) // what the blocks that share an item will send
                sm90::barrier_expect(memory.sums_full,
                                     max(0, min(1 << bits, places)) * TOKENS * 2 * task.parts * (work.pieces - 1));
        }
        sm90::fence_barrier_init();
    }
    __syncwarp();
    barriers_ready(SHAPE::THREADS);
    // A warp waits for stages of another's at the start, so all of their barriers have to be there.
    sync_threads(3, PRODUCERS * WARP);
    if (task.deal[cluster >= task.more].cut) sm90::cluster_arrive();
    // Lane r < down: the run of tiles of row block r. Lane w: where warpgroup w finds its tile.
    const int row = lane % task.down, part = min(lane / task.down, task.parts - 1);
    uint32_t phase = 1;
    // Before a stage is filled anew, all warps have seen those come that they waited for at the start.
    const auto first_round_done = [] { sync_threads(3, PRODUCERS * WARP); };
    for (int count = 0; here.round + here.slot < total; count++) {
        const int stage = find(here), slot = here.slot, turn = count % AT_ONCE;
        if (turn == 0) {
            offsets = next_offsets;
            next_offsets = load_offsets();
        }
        const int own_entry = turn * 8 + row * run;
        const int from = __shfl_sync(FULL_WARP, offsets, own_entry);
        const int to = __shfl_sync(FULL_WARP, offsets, own_entry + task.parts);
        const int own = __shfl_sync(FULL_WARP, offsets, own_entry + part);
        const int own_end = __shfl_sync(FULL_WARP, offsets, own_entry + part + 1);
        // Copies begin at multiples of 128 bytes: else each line would take two requests.
        const int begin = from & ~7, bytes = lane < task.down && to > from ? (to - begin) * TILE_UNIT : 0;
        const uint32_t weights = memory.weights + (slot * task.down + row) * task.run_bytes;
        const uint32_t place = own_end > own ? weights + (own - begin) * TILE_UNIT : memory.no_tile;
        const int sum = __reduce_add_sync(FULL_WARP, bytes);
        const uint32_t barrier = memory.full + slot * 8;
        if (here.round) {
            if (slot == warp && here.round == task.stages) first_round_done();
            sm90::barrier_wait(memory.empty + slot * 8, phase);
        } else if (slot >= WINDOW) {
            sm90::barrier_wait(memory.full + (slot - WINDOW) * 8, 0);
        }
        if (lane < SHAPE::WARPGROUPS)
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(memory.places + slot * 16 + lane * 4), "r"(place) : "memory");
        __syncwarp();
        if (lane == 0) sm90::barrier_expect(barrier, sum + task.parts * SHAPE::TOKEN_BYTES);
        __syncwarp();
        if (bytes) sm90::copy_bytes(weights, task.data + (int64_t)begin * TILE_UNIT, bytes, barrier, policy);
        // Weights may be fetched before the kernel in front is done, tokens not.
        if (count == 0) sm90::wait_for_previous_launch();
        if (lane < task.parts)
            sm90::copy_box(memory.tokens + (slot * task.parts + lane) * SHAPE::TOKEN_BYTES, &task.x,
                           (stage * task.parts + lane) * TILE_COLS, 0, barrier);
        __syncwarp();
        next(here);
        if (here.slot == warp) phase ^= 1;
    }
    if (task.stages + warp >= total) first_round_done();
    allow_next_launch();
}

template <typename T>
__device__ __forceinline__ void tile_store(const tile_task &task, int64_t row, int token, float sum) {
    if (row >= task.rows || token >= task.tokens) return;
    if (task.bias) sum += to_float(((const T *)task.bias)[row]);
    ((T *)task.y)[token * task.rows + row] = from_float<T>(sum);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL // no warnings of what is not used elsewhere

// A warpgroup: one row block, or a part of its columns.
template <typename T, int TOKENS>
__device__ __forceinline__ void tile_consume(const tile_task &task, const tile_memory &memory, int cluster, int rank,
                                             int warpgroup) {
    using SHAPE = tile_shape<TOKENS>;
    constexpr int SUMS = TOKENS / 2;
    const uint32_t first_thread = held(threadIdx.x % 128); // 0; else it is asked for at every stage
    const int thread = threadIdx.x % 128, lane = thread % WARP, part = __shfl_sync(FULL_WARP, thread / WARP, 0);
    const int down = warpgroup % task.down, across = warpgroup / task.down;
    const tile_work work(task, cluster, rank);
    // The upper half of a descriptor is the same for all.
    const uint64_t descriptor = sm90::descriptor<128>(memory.tokens + across * SHAPE::TOKEN_BYTES);
    const uint32_t stage_tokens = task.parts * SHAPE::TOKEN_BYTES >> 4, full_end = memory.full + task.stages * 8;
    const tile_ring begin{memory.full, held((uint32_t)descriptor), 0};
    const uint32_t places = memory.places + warpgroup * 4 - 2 * memory.full; // and twice the barrier
    const auto next_stage = [&](tile_ring &ring) {
        ring.full += 8;
        ring.tokens += stage_tokens;
        if (ring.full == full_end) {
            ring.full = begin.full;
            ring.tokens = begin.tokens;
            ring.phase ^= 1;
        }
    };
    const auto release = [&](uint32_t full) {
        if (full && first_thread == 0) sm90::barrier_arrive(full + (memory.empty - memory.full));
    };
    const auto sync_consumers = [] { sync_threads(2, SHAPE::WARPGROUPS * 128); };
    const bool meets = task.deal[cluster >= task.more].cut; // some blocks of the cluster
    // From here on, the other blocks of its item may send their sums here. What they overwrite was only read. Through
    // barriers, as a cluster's own with some warps waiting and others on their way never ends under compute-sanitizer.
    const auto let_send = [&] {
        sm90::cluster_wait(); // their barriers are there
        sync_consumers();
        if (threadIdx.x < work.pieces) sm90::barrier_arrive_remote(memory.may_send, rank - work.piece + threadIdx.x);
    };
    using LANE = std::conditional_t<SHAPE::SCANS, scan_lane, mm_lane>;
    const typename LANE::operands operands(lane);
    wait_for_barriers(SHAPE::THREADS);
    if (meets) sm90::cluster_arrive();
    if (!SHAPE::MANY_SUMS && work.pieces && (!work.whole || task.parts == 1)) let_send();
    tile_ring ring = begin;
    for (int round = 0; round < work.whole + (work.pieces > 0); round++) {
        const bool whole = round < work.whole;
        const int item = whole ? work.item + round * work.step : work.cut_item;
        const int first = whole ? 0 : work.first, last = whole ? task.k_stages : work.last;
        const int64_t first_row = (int64_t)item * task.down * TILE_ROWS;
        float sums[SUMS];
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[i] = 0;
        sm90::settle(sums);
        // A tile is prepared while the one before it is multiplied; so are its first values fetched.
        LANE here, next;
        uint32_t values[2][2][TILE_QUAD], place;
        const auto find = [&](const tile_ring &at) {
            sm90::barrier_wait(at.full, at.phase);
            sm90::load(place, places + 2 * at.full);
        };
        uint32_t previous = 0;
        tile_ring ahead = ring;
        if (first < last) {
            find(ring);
            next.template prepare<0>(place, part, lane, task.weights, operands);
            next.template prepare<1>(place, part, lane, task.weights, operands);
            next.template prepare<2>(place, part, lane, task.weights, operands);
            next.template prepare<3>(place, part, lane, task.weights, operands);
            next.load(0, values[0][0], task.weights);
            next.load(1, values[0][1], task.weights);
            next_stage(ahead);
        }
#pragma unroll 1
        for (int stage = first; stage < last; stage++) {
            here = next;
            if (stage + 1 < last) find(ahead);
            const uint64_t b = descriptor >> 32 << 32 | ring.tokens;
            const auto multiply = [&](auto step) {
                constexpr int STEP = decltype(step)::value;
                if (STEP < 3) {
                    here.load(2 * STEP + 2, values[(STEP + 1) % 2][0], task.weights);
                    here.load(2 * STEP + 3, values[(STEP + 1) % 2][1], task.weights);
                }
                next.template prepare<STEP>(place, part, lane, task.weights,
                                            operands); // behind the last tile: that one again
                if (STEP == 3) {
                    next.load(0, values[0][0], task.weights);
                    next.load(1, values[0][1], task.weights);
                }
                // The products that read these registers last. All of the stage before have ended two steps into this
                // one: that stage goes back then, not a product later (H200: less time at every shape, most at 64 tokens).
                if (STEP == 0) sm90::wgmma_wait<1>();
                if (STEP == 1) {
                    sm90::wgmma_wait<0>();
                    release(previous);
                }
                here.place(2 * STEP, values[STEP % 2][0], a[STEP][0], a[STEP][1]);
                here.place(2 * STEP + 1, values[STEP % 2][1], a[STEP][2], a[STEP][3]);
                if (STEP % 2 == 0) return;
                sm90::wgmma_begin(); // two together: the warps wait for each other every time
                tile_wgmma<T, TOKENS>::multiply(sums, a[STEP & 2], b + 2 * (STEP & 2));
                tile_wgmma<T, TOKENS>::multiply(sums, a[STEP], b + 2 * STEP);
                sm90::wgmma_commit();
            };
            multiply(std::integral_constant<int, 0>());
            multiply(std::integral_constant<int, 1>());
            multiply(std::integral_constant<int, 2>());
            multiply(std::integral_constant<int, 3>());
            previous = ring.full;
            ring = ahead;
            next_stage(ahead);
        }
        sm90::wgmma_wait<0>();
        sm90::settle(sums);
        release(previous);
        if (!round) sm90::wait_for_previous_launch(); // before y is written
        if (whole && task.parts == 1) {
            const int64_t row = first_row + down * TILE_ROWS + part * 16 + lane / 4;
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                tile_store<T>(task, row + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2, sums[i]);
            continue;
        }
        // A place is a thread of one of the item's row blocks. Each block that has a piece of the item adds up the sums
        // of a chunk of places, [addends][SUMS / 4][chunk] of four.
        const int own = whole ? 0 : work.piece, addends = whole ? task.parts : task.parts * work.pieces;
        const int bits = whole ? task.chunk_bits : task.deal[cluster >= task.more].chunk_bits, chunk = 1 << bits;
        const int places = task.down * 128, place_here = down * 128 + thread;
        const uint32_t sums_at = whole ? memory.sums : memory.cut_sums;
        const int my_addend = own * task.parts + across;
        const auto add_up = [&](int turn, int fours) { // of the sums turn * fours * 4 on
#pragma unroll 1
            for (int i = threadIdx.x; i < fours << bits; i += SHAPE::WARPGROUPS * 128) {
                const int at = (own << bits) + (i & (chunk - 1)), token = (turn * fours + (i >> bits)) * 8 + at % 4 * 2;
                if (at >= places) continue;
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
                for (int j = 0; j < 4; j++) tile_store<T>(task, row + j / 2 * 8, token + j % 2, sum[j]);
            }
        };
        const auto store = [](uint32_t to, const float *v) {
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]),
                         "f"(v[3])
                         : "memory");
        };
        if (whole) {
            constexpr int FOURS = SUMS / 4 / SHAPE::TURNS;
            const uint32_t to = sums_at + ((my_addend * FOURS << bits) + place_here) * 16;
#pragma unroll
            for (int turn = 0; turn < SHAPE::TURNS; turn++) {
                if (round || turn) sync_consumers(); // the sums before are read
#pragma unroll
                for (int i = 0; i < FOURS; i++) store(to + (i * 16 << bits), sums + (turn * FOURS + i) * 4);
                sync_consumers();
                add_up(turn, FOURS);
            }
            if (!SHAPE::MANY_SUMS && work.pieces && round == work.whole - 1) let_send();
        } else {
            if (SHAPE::MANY_SUMS) let_send();
            const int owner = place_here >> bits;
            const uint32_t to = sums_at + ((my_addend * (SUMS / 4) << bits) + (place_here & (chunk - 1))) * 16;
            if (owner == own) {
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++) store(to + (i * 16 << bits), sums + i * 4);
            } else {
                sm90::barrier_wait(memory.may_send, 0);
                const uint32_t there = sm90::remote_address(to, rank - own + owner);
                const uint32_t full = sm90::remote_address(memory.sums_full, rank - own + owner);
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++) sm90::store_async(there + (i * 16 << bits), sums + i * 4, full);
            }
            sync_consumers();
            sm90::barrier_wait(memory.sums_full, 0);
            add_up(0, SUMS / 4);
        }
    }
    if (meets && !work.pieces) sm90::cluster_wait();
}

#endif

template <typename T, int TOKENS>
__global__ void __launch_bounds__(tile_shape<TOKENS>::THREADS, 1)
    tile_mm_kernel(const __grid_constant__ tile_task task) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using SHAPE = tile_shape<TOKENS>;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = held(shared_address(shared));
    const tile_memory memory = tile_memory_of<TOKENS>(task, base);
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);
    int cluster, rank; // through shfl, as warpgroup: so the compiler knows that they are the same in all lanes
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    cluster = __shfl_sync(FULL_WARP, cluster, 0);
    rank = __shfl_sync(FULL_WARP, rank, 0);
    if (warpgroup == SHAPE::WARPGROUPS) {
        sm90::give_registers<SHAPE::PRODUCER_REGISTERS>();
        tile_produce<TOKENS>(task, memory, cluster, rank);
        if (task.deal[cluster >= task.more].cut) sm90::cluster_wait();
    } else {
        for (int i = threadIdx.x; i < TILE_VALUES / 4; i += SHAPE::WARPGROUPS * 128)
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(memory.no_tile + i * 4), "r"(0) : "memory");
        if (threadIdx.x == 0) sm90::prefetch_map(&task.x);
        sm90::take_registers<SHAPE::REGISTERS>();
        tile_consume<T, TOKENS>(task, memory, cluster, rank, warpgroup);
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
    const uint32_t base = shared_address(shared);
    const int lane = threadIdx.x % WARP, part = threadIdx.x / WARP % TILE_PARTS;
    const int across = threadIdx.x / (WARP * TILE_PARTS);
    const int32_t *offsets = task.offsets + (int64_t)blockIdx.x * task.col_blocks;
    const int stages = (task.col_blocks + MMA_ACROSS - 1) / MMA_ACROSS, first_token = blockIdx.y * OCTETS * 8;
    const auto run = [&](int stage, int i) { return offsets[min(stage * MMA_ACROSS + i, task.col_blocks)]; };
    const auto fetch = [&](int stage) {
        if (stage < stages) {
            const int from = run(stage, 0), units = run(stage, MMA_ACROSS) - from;
            for (int i = threadIdx.x; i < units; i += MMA_THREADS)
                copy_async<16>(base + stage % task.stages * task.run_bytes + i * TILE_UNIT,
                               task.data + ((int64_t)from + i) * TILE_UNIT);
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

inline int bits_of(int number) { // so that it is at most 1 << bits
    int bits = 0;
    while (1 << bits < number) bits++;
    return bits;
}

// How a cluster of `blocks` shares `items` of so many stages.
inline tile_deal deal_items(int items, int blocks, int k_stages, int down) {
    tile_deal deal{};
    deal.whole = items / blocks;
    deal.cut = items % blocks;
    deal.share = deal.cut ? blocks / deal.cut : blocks;
    deal.piece = k_stages / deal.share;
    deal.longer = k_stages % deal.share;
    deal.chunk_bits = bits_of((int)ceil_div(down * 128, deal.share));
    return deal;
}

// What the block with the most work takes, in stages; a sum of several blocks takes about one, of one's warpgroups half.
inline double deal_time(const tile_deal &deal, int parts, int k_stages) {
    return deal.whole * (k_stages + (parts > 1 ? 0.5 : 0)) + (deal.cut ? deal.piece + (deal.longer > 0) + 1 : 0);
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
    double least = 1e30;
    // Row blocks of an item: up to 16 tokens one, which evens the work best (H200); as many as can be where tiles are so
    // full that the ring would not fit beside the sums. Above, tokens are much of what comes, and several row blocks share
    // them.
    for (int down = TOKENS <= 64 ? 1 : SHAPE::WARPGROUPS; down <= SHAPE::WARPGROUPS; down *= 2) {
        if (TOKENS <= 16 && task.down) break;
        const int parts = SHAPE::WARPGROUPS / down;
        const int k_stages = (int)ceil_div(task.col_blocks, parts);
        const int items = (int)ceil_div(task.row_blocks, down);
        const int run_bytes = (int)ceil_div((int64_t)parts * m.widest * TILE_UNIT + 128 + 16, 128) * 128;
        const int stage_bytes = parts * SHAPE::TOKEN_BYTES + down * run_bytes;
        for (int blocks = 1; blocks <= MAX_CLUSTER && blocks <= std::max(1, k_stages); blocks++) {
            int clusters;
            error = clusters_at_once<tile_mm_kernel<T, TOKENS>, MAX_CLUSTER>(device, blocks, SHAPE::THREADS,
                                                                             device.shared_bytes - 1024, &clusters);
            if (error) return error;
            clusters = std::min(clusters, items);
            const int each = items / clusters;
            const bool more = items % clusters;
            const tile_deal most = deal_items(each + more, blocks, k_stages, down);
            const tile_deal others = deal_items(each, blocks, k_stages, down);
            const int chunk_bits = bits_of(down * 128);
            int sums = parts > 1 && most.whole ? (parts << chunk_bits) / SHAPE::TURNS : 0, cut_sums = 0;
            for (const tile_deal &deal : {most, others})
                if (deal.cut) cut_sums = std::max(cut_sums, parts * deal.share << deal.chunk_bits);
            if (!SHAPE::MANY_SUMS) sums = std::max(sums, cut_sums);
            const int room =
                device.shared_bytes - TILE_FIXED - sums * TOKENS * 2; // a chunk has TOKENS / 2 numbers a place
            const int stages = std::min(room / stage_bytes, MAX_STAGES);
            // With 8 to 32 KB of tokens a stage took 1650 to 1950 clocks at 64 tokens, 1390 to 1590 with 4 to 16 at 32 (H200).
            const double time = std::max(deal_time(most, parts, k_stages), deal_time(others, parts, k_stages)) *
                                (1 + parts * SHAPE::TOKEN_BYTES / 1e5);
            if (stages < MIN_STAGES || time >= least * 0.99 || cut_sums * TOKENS * 2 > stages * stage_bytes) continue;
            least = time;
            task.down = down;
            task.parts = parts;
            task.k_stages = k_stages;
            task.run_bytes = run_bytes;
            task.cluster = blocks;
            task.clusters = clusters;
            task.more = items % clusters;
            task.deal[0] = most;
            task.deal[1] = others;
            task.chunk_bits = chunk_bits;
            task.stages = stages;
            config.dynamicSmemBytes = device.shared_bytes - room + task.stages * stage_bytes;
        }
    }
    if (!task.down) return cudaErrorInvalidValue;
    const bool overlaps = may_overlap(stream, SHAPE::THREADS);
    if (m.cols)
        error = sm90::tensor_map(&task.x, CU_TENSOR_MAP_DATA_TYPE_UINT16, x, m.cols, tokens, x_stride * 2, TILE_COLS,
                                 TOKENS);
    if (error) return error;
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {(unsigned)task.cluster, 1, 1};
    attributes[1] = overlap_attribute();
    config.gridDim = dim3((unsigned)(task.clusters * task.cluster));
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
    if (tokens > 128) return cudaErrorInvalidValue; // tile_gemm_cuda
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
