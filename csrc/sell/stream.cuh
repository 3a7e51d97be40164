// How kernels read the sell layout: slots, gaps into bytes, the barriers of a ring of bulk copies.
#pragma once

#include "../core/cuda.cuh"
#include "../core/sm90.cuh"
#include "sell.h"

namespace macko {

constexpr int VALUE_BYTES = SELL_LANES * SELL_STEP * 2; // of a slot; its gaps follow
constexpr int SUMS_AT_ONCE = 8;                         // that a lane reads from shared memory before it adds

// A value as bits -> float.
template <typename T>
__device__ __forceinline__ float widen(uint16_t bits);
template <>
__device__ __forceinline__ float widen<__half>(uint16_t bits) {
    return __half2float(__ushort_as_half(bits));
}
template <>
__device__ __forceinline__ float widen<__nv_bfloat16>(uint16_t bits) {
    return __uint_as_float((uint32_t)bits << 16);
}

// The four gaps of field 0..3, one in each byte, from the planes of sell.h.
template <int GAP_BITS>
__device__ __forceinline__ uint32_t gap_field(const uint32_t (&planes)[4], int field) {
    constexpr uint32_t ONES = 0x01010101u;
    const int plane = field * GAP_BITS / 8, shift = field * GAP_BITS % 8, here = 8 - shift;
    uint32_t gaps = planes[plane] >> shift;
    if (here < GAP_BITS) { // the rest is in the next plane
        const uint32_t low = ONES * ((1u << here) - 1);
        gaps = (gaps & low) | (planes[plane + 1] << here & ~low);
    }
    return gaps & ONES * ((1u << GAP_BITS) - 1);
}

// From the first x not passed yet to those of eight entries, in columns, a byte each: to_even entries 0, 2, 4, 6, to_odd
// entries 1, 3, 5, 7. even and odd hold their gaps. One multiplication gives the four sums of gaps up to an odd entry (at
// most 8 * 31 + 7 < 256). 6-bit gaps: sums of four entries fit a byte, those of eight do not, so the upper pairs start
// anew behind entry 3.
struct Distances {
    uint32_t to_even, to_odd;
};
template <int GAP_BITS>
__device__ __forceinline__ Distances distances(uint32_t even, uint32_t odd) {
    const uint32_t pairs = even + odd;
    const uint32_t to_odd =
        GAP_BITS < 6 ? pairs * 0x01010101u + 0x07050301u : pairs + (pairs << 8 & 0xff00ff00u) + 0x03010301u;
    return {to_odd - odd - 0x01010101u, to_odd};
}

// Where in a slot a lane's share lies.
struct LaneSlot {
    uint32_t values, planes, nibbles;
};

template <int GAP_BITS>
__device__ __forceinline__ LaneSlot lane_slot(uint32_t slot, int lane) {
    const uint32_t gaps = slot + VALUE_BYTES;
    return {held(slot + lane * 16), held(gaps + lane * 4), held(gaps + GAP_BITS / 2 * SELL_LANES * 4 + lane * 2)};
}

// A lane's share of a slot.
struct Step {
    uint4 values[2];
    uint32_t planes[4];
};

template <int GAP_BITS>
__device__ __forceinline__ Step load_step(LaneSlot at, uint32_t offset) {
    Step step = {};
    for (int plane = 0; plane < GAP_BITS / 2; plane++)
        step.planes[plane] = load_shared_4(at.planes + offset + plane * SELL_LANES * 4);
    if (GAP_BITS % 2) {
        const uint32_t nibbles = load_shared_2(at.nibbles + offset);
        step.planes[GAP_BITS / 2] = nibbles | nibbles << 12; // nibbles 0, 2, 1, 3 are the low halves of bytes 0 to 3
    }
    for (int half = 0; half < 2; half++)
        step.values[half] = load_shared_16(at.values + offset + half * SELL_LANES * 16);
    return step;
}

// The sum of a lane's partial sums in shared memory, one each `bytes`, if it has any: several are on their way together.
// (Arguments by reference: by value ptxas puts the kernels in another order than the one that was timed.)
__device__ __forceinline__ float sum_of(const uint32_t &at, const uint32_t &bytes, bool any, const int &count) {
    float sum = 0;
    uint32_t from = at;
#pragma unroll 1
    for (int left = any ? count : 0; left > 0; left -= SUMS_AT_ONCE, from += SUMS_AT_ONCE * bytes) {
        float some[SUMS_AT_ONCE];
        for (int i = 0; i < SUMS_AT_ONCE; i++)
            some[i] = i < left ? __uint_as_float(load_shared_4(from + i * bytes)) : 0;
        for (int i = 0; i < SUMS_AT_ONCE; i += 4) sum += (some[i] + some[i + 1]) + (some[i + 2] + some[i + 3]);
    }
    return sum;
}

// A barrier's phase ends when all arrivals and all announced bytes are in.
using sm90::barrier_arrive;
using sm90::barrier_init;
using sm90::barrier_wait;

// A warp has read its slot of a stage. Only behind the products of the step: an arrival overtakes loads that are still on
// their way, and the next stage comes into their place (right behind the loads a few products of 2048 x 8192 by 4 tokens
// in thirty thousand were wrong, H200). The compiler may put some products behind it all the same; that all loads from the
// ring have been waited for by then was looked up in the instructions (wait masks, nvcc 13.0, sm_90a, 100, 120).
// One lane arrives for the warp, which is faster (4096 x 4096, chained) than each for itself.
__device__ __forceinline__ void give_back(uint32_t emptied, int lane) {
    if (sm90::WARP_ARRIVALS > 1 || lane == 0) barrier_arrive(emptied);
}
// Announces `bytes` to the barrier and fetches them; all multiples of 16.
__device__ __forceinline__ void fetch_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier,
                                           uint64_t policy) {
    sm90::barrier_arrive_expect_tx(barrier, bytes);
    sm90::bulk_copy(to, from, bytes, barrier, policy);
}

__device__ __forceinline__ sell_block load_block(const sell_block *from) {
    const int4 first = ((const int4 *)from)[0], second = ((const int4 *)from)[1];
    return {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
}

// Slots of a stage, where lane w knows the steps of warp w; see "pairs" in sell.h.
__device__ __forceinline__ int stage_slots(int steps_of_lane, int stage) {
    return 2 * __popc(__ballot_sync(FULL_WARP, steps_of_lane > stage) & 0x55555555u);
}

// a / b for 0 <= a < 2^12 and 0 < b < 2^12: a twentieth of the latency of an integer division.
__device__ __forceinline__ int small_quotient(int a, int b) {
    return (int)__fdividef(a + 0.5f, (float)b);
}

// A ring of stages in shared memory, and how it begins.
struct Ring {
    int stages; // at most SELL_MAX_STAGES
    int early;  // stages to fetch before the previous kernel's end is waited for
    int first;  // stages to fetch before x is waited for, those among them
    int split;  // 16-byte pieces of x that the decoding warps copy; those behind them come through the ring's warp
};

// Where the ring's warp fetches nothing of x.
struct NoRest {
    __device__ void fetch() const {
    }
    __device__ void wait() const {
    }
};

constexpr int NO_SPLIT = INT32_MAX;

inline bool has_few_stages(const sell_matrix &m) {
    return m.slots <= (int64_t)24 * m.num_blocks * m.warps;
}

// Stages fetched early take bandwidth from the end of the previous kernel, but cover the way of x to this one. H200, spmv,
// 2 / 3: 6.0 / 6.4 us with 8 stages a block (4096 x 4096), 13.9 / 14.0 with 22 (11008 x 4096), 19.7 / 19.6 with 32
// (8192 x 8192), 17.4 / 17.1 with 28 (4096 x 14336). All that come before the header are slower at most shapes.
inline Ring ring_of(const sell_matrix &m, int stages, int first) {
    const int early = env_number("MACKO_EARLY", has_few_stages(m) ? 2 : 3);
    return {stages, sell_min(early, stages), sell_min(first, stages), NO_SPLIT};
}

/*
 * The work of the warp that keeps a ring full for the m.warps warps that decode. Barriers in shared memory, one a stage:
 * at `filled` for bytes that come in, at `emptied` for warps that are done. The block is met once, at __syncthreads,
 * when these are ready and the others have put their part of x and the block's header into shared memory. `rest` is the
 * other part: asked for behind the previous kernel's end, and there before the ring begins anew, so what a lane needs later
 * than in its first ring.stages steps it need not wait for.
 *
 * Nothing before that may depend on the header: half a microsecond away, and 1.5 once memory is busy. It comes through
 * shared memory because the compiler takes what depends on a register as far up as it can, above the first fetches.
 */
template <int SLOT, typename Rest>
__device__ __forceinline__ void fill_ring(const sell_matrix &m, int block, const Ring &ring, uint32_t ring_at,
                                          uint32_t filled, uint32_t emptied, const sell_block &header, int lane,
                                          const Rest &rest) {
    const int stage_bytes = m.warps * SLOT, blind = block < m.num_blocks ? min(m.head, ring.first) : 0;
    const auto in_head = [&](int stage) { return m.data + sell_head_slot(block, m.num_blocks, m.warps, stage) * SLOT; };
    const uint64_t once = evict_first(); // the weights do not push x out of L2
    if (lane == 0) {
        const auto begin = [&](int stage, int stop) {
#pragma unroll 1
            for (; stage < stop; stage++) {
                barrier_init(filled + 8 * stage, 1);
                sm90::fence_barrier_init();
                if (stage < blind)
                    fetch_bulk(ring_at + stage * stage_bytes, in_head(stage), stage_bytes, filled + 8 * stage, once);
            }
        };
        begin(0, ring.early);
        sm90::pdl_wait();
        rest.fetch();
        begin(ring.early, ring.stages);
        pdl_launch_dependents();
#pragma unroll 1
        for (int stage = 0; stage < ring.stages; stage++)
            barrier_init(emptied + 8 * stage, m.warps * sm90::WARP_ARRIVALS);
    }
    __syncwarp();
    __syncthreads();
    const sell_block b = load_block(&header);
    const uint8_t *next = m.data + sell_tail_slot(&b, m.num_blocks, m.warps, m.head) * SLOT;
    const int own_steps = lane < m.warps ? sell_steps_of_warp(&b, m.warps, lane) : 0;
    int place = blind % ring.stages;
    uint32_t parity = blind < ring.stages; // of the round before: 0 from the second round on
#pragma unroll 1
    for (int stage = blind; stage < b.stages; stage++) {
        const bool behind = stage >= m.head;
        const int bytes = behind ? stage_slots(own_steps, stage) * SLOT : stage_bytes;
        if (lane == 0) {
            if (stage == ring.stages) rest.wait();
            if (stage >= ring.stages) barrier_wait(emptied + 8 * place, parity);
            fetch_bulk(ring_at + place * stage_bytes, behind ? next : in_head(stage), bytes, filled + 8 * place, once);
        }
        if (behind) next += bytes;
        if (++place == ring.stages) place = 0, parity ^= 1;
    }
    // A block may not end while a copy is under way: x, and the stages of the head that nobody needed.
    if (b.stages <= ring.stages) rest.wait();
#pragma unroll 1
    for (int stage = b.stages; stage < blind; stage++) barrier_wait(filled + 8 * stage, 0);
}

// sell_slot for many steps of one block. Its pairs of warps have three numbers of steps at most, counted once: `most`,
// and, of the pairs behind those, `middle` and `least`.
struct Places {
    uint32_t tail_slot; // where stage 0 would be behind the head; slots of a matrix are less than 2^31
    int block, most, middle, least, num_middle, num_least;

    __device__ void find(const sell_matrix &s, const sell_block &b, int of_block) {
        const int groups = sell_groups(&b), long_groups = sell_long_groups(&b);
        const int turns = small_quotient(groups + s.warps - 1, s.warps);
        const int long_turns = small_quotient(long_groups + s.warps - 1, s.warps);
        // Pairs that have a group in the last turn, and a long one in the last turn of those.
        const int pairs = (groups - (turns - 1) * s.warps + 1) / 2;
        const int long_pairs = (long_groups - (long_turns - 1) * s.warps + 1) / 2;
        block = of_block;
        most = turns * (b.steps - 1) + long_turns;
        middle = most - (pairs < long_pairs ? b.steps - 1 : 1);
        least = most - b.steps;
        num_middle = abs(pairs - long_pairs);
        num_least = s.warps / 2 - max(pairs, long_pairs);
        tail_slot = (uint32_t)sell_tail_slot(&b, s.num_blocks, s.warps, s.head) - before(s, min(s.head, most));
    }
    // Slots of the first stages, as many as there are or fewer.
    __device__ int before(const sell_matrix &s, int stages) const {
        return stages * s.warps - 2 * (num_middle * max(stages - middle, 0) + num_least * max(stages - least, 0));
    }
    __device__ uint32_t slot(const sell_matrix &s, int stage, int warp) const {
        const uint32_t in_head = (uint32_t)(stage * s.num_blocks + block) * s.warps,
                       behind = tail_slot + before(s, stage);
        return (stage < s.head ? in_head : behind) + warp;
    }
};

} // namespace macko
