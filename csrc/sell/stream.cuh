// How kernels read the sell layout: a lane's share of a slot, gaps to distances in columns, and the pipeline of stages that a
// producer warp fills by bulk copies.
#pragma once

#include "../core/cuda.cuh"
#include "../core/sm90.cuh"
#include "sell.h"

namespace macko {

constexpr int VALUE_BYTES = MACKO_SELL_LANES * MACKO_SELL_STEP * 2; // of a slot; its gaps follow
constexpr int SUMS_AT_ONCE = 8; // that a lane reads from shared memory before it adds

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

// How many columns eight entries lie after the first column that the lane has not passed, a byte each: to_even of entries
// 0, 2, 4, 6, to_odd of entries 1, 3, 5, 7. even and odd hold their gaps. One multiplication gives the four sums of gaps up to
// an odd entry (at most 8 * 31 + 7 < 256). 6-bit gaps: sums of four entries fit a byte, those of eight do not, so those of
// entries 4 to 7 count from the column after entry 3.
struct sell_distances {
    uint32_t to_even, to_odd;
};
template <int GAP_BITS>
__device__ __forceinline__ sell_distances distances(uint32_t even, uint32_t odd) {
    const uint32_t pairs = even + odd;
    const uint32_t to_odd =
        GAP_BITS < 6 ? pairs * 0x01010101u + 0x07050301u : pairs + (pairs << 8 & 0xff00ff00u) + 0x03010301u;
    return {to_odd - odd - 0x01010101u, to_odd};
}

// Where in a slot a lane's share lies.
struct sell_lane_slot {
    uint32_t values, planes, nibbles;
};

template <int GAP_BITS>
__device__ __forceinline__ sell_lane_slot lane_slot(uint32_t slot, int lane) {
    const uint32_t gaps = slot + VALUE_BYTES;
    return {opaque(slot + lane * 16), opaque(gaps + lane * 4),
            opaque(gaps + GAP_BITS / 2 * MACKO_SELL_LANES * 4 + lane * 2)};
}

// A lane's share of a slot.
struct sell_step {
    uint4 values[2];
    uint32_t planes[4];
};

template <int GAP_BITS>
__device__ __forceinline__ sell_step load_step(sell_lane_slot at, uint32_t offset) {
    sell_step step = {};
    for (int plane = 0; plane < GAP_BITS / 2; plane++)
        step.planes[plane] = load_shared_4(at.planes + offset + plane * MACKO_SELL_LANES * 4);
    if (GAP_BITS % 2) {
        const uint32_t nibbles = load_shared_2(at.nibbles + offset);
        step.planes[GAP_BITS / 2] = nibbles | nibbles << 12; // nibbles 0, 2, 1, 3 are the low halves of bytes 0 to 3
    }
    for (int half = 0; half < 2; half++)
        step.values[half] = load_shared_16(at.values + offset + half * MACKO_SELL_LANES * 16);
    return step;
}

// The sum of a lane's partial sums in shared memory, `bytes` apart, if it has any: SUMS_AT_ONCE loads are in flight together.
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

// The phase of an mbarrier ends when all arrivals and all announced bytes are in.
using sm90::barrier_arrive;
using sm90::barrier_init;
using sm90::barrier_wait;

// A consumer warp has read its slot of a stage: arrives at the stage's empty barrier. Call it after the products of the step,
// not right after its loads: an arrival can overtake loads that are still in flight, and the next stage would be written over
// what they read (a few products of 2048 x 8192 by 4 tokens in thirty thousand were wrong, H200). The compiler may still move
// some products after the arrival. That it moves no wait for a load from the stage was looked up in the instructions (wait
// masks; nvcc 13.0; sm_90a, 100, 120). One lane arrives for the warp: faster (4096 x 4096, with PDL) than each for itself.
__device__ __forceinline__ void release_stage(uint32_t empty, int lane) {
    if (sm90::WARP_ARRIVALS > 1 || lane == 0) barrier_arrive(empty);
}
// A bulk copy of `bytes`, announced to the full barrier; addresses and bytes are multiples of 16.
__device__ __forceinline__ void fetch_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier,
                                           uint64_t policy) {
    sm90::barrier_arrive_expect_tx(barrier, bytes);
    sm90::bulk_copy(to, from, bytes, barrier, policy);
}

__device__ __forceinline__ macko_sell_block load_block(const macko_sell_block *from) {
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

// A pipeline of stages in shared memory, and how it starts.
struct sell_pipeline {
    int stages;          // at most MACKO_SELL_MAX_STAGES
    int before_pdl_wait; // stages to fetch before the previous kernel's end is waited for
    int before_x;        // stages to fetch before x is waited for, those among them
    int x_split;         // 16-byte vectors of x that the consumers copy; the producer fetches those after them
};

// Where the producer fetches nothing of x.
struct sell_no_late_x {
    __device__ void fetch() const {
    }
    __device__ void wait() const {
    }
};

constexpr int NO_SPLIT = INT32_MAX;

inline bool has_few_stages(const macko_sell_matrix &m) {
    return m.slots <= (int64_t)24 * m.num_blocks * m.warps;
}

// Stages fetched early take bandwidth from the end of the previous kernel, but hide the latency of x in this one. H200, spmv,
// 2 / 3: 6.0 / 6.4 us with 8 stages a block (4096 x 4096), 13.9 / 14.0 with 22 (11008 x 4096), 19.7 / 19.6 with 32
// (8192 x 8192), 17.4 / 17.1 with 28 (4096 x 14336). All that come before the header are slower at most shapes.
inline sell_pipeline pipeline_of(const macko_sell_matrix &m, int stages, int before_x) {
    const int before_pdl_wait = macko_knob_number(MACKO_KNOB_EARLY, has_few_stages(m) ? 2 : 3);
    return {stages, macko_sell_min(before_pdl_wait, stages), macko_sell_min(before_x, stages), NO_SPLIT};
}

// The named barriers of the consumers of each group.
enum { CONSUMERS = 1 };

/*
 * The producer warp: keeps the pipeline full for the m.warps consumer warps.
 *
 *     producer    first stages | pdl_wait | late_x, stages up to before_x  | __syncthreads | wait empty, fetch, ...
 *     consumers   header, bases, zeros after x | pdl_wait | first part of x | __syncthreads | wait full, decode, release, ...
 *                 weights only                           | may be written by the previous kernel
 *
 * Each stage has two mbarriers: full[stage] counts the bytes of its copy, empty[stage] the warps that released it. The two
 * sides meet once, at one instruction (synccheck ends a kernel whose warps come to a barrier of the block from several):
 * then all barriers are initialised, and the block's header and x (but for late_x) lie in shared memory. late_x, the
 * second part of x, is waited for before any stage is filled a second time: so a consumer waits for it only where a lane
 * may need it within the first pipeline.stages steps.
 *
 * Before they meet nothing may depend on the header, which takes half a microsecond to arrive, and 1.5 once memory is
 * busy: the stages fetched there are those of the head, at fixed places. The header comes through shared memory, as the
 * compiler would move what depends on a register up, above the first fetches.
 */
template <int SLOT, typename LateX>
struct sell_producer {
    const macko_sell_matrix &m;
    const sell_pipeline &pipeline;
    int block;
    uint32_t stages_at, full, empty;
    const LateX &late_x;

    __device__ int prefetched() const {
        return block < m.num_blocks ? min(m.head, pipeline.before_x) : 0;
    }
    __device__ const uint8_t *in_head(int stage) const {
        return m.data + macko_sell_head_slot(block, m.num_blocks, m.warps, stage) * SLOT;
    }
    // The first stages, and all barriers: one lane's part, before the two sides meet.
    __device__ __forceinline__ void begin() const {
        const int stage_bytes = m.warps * SLOT, early = prefetched();
        const uint64_t once = evict_first(); // the weights do not push x out of L2
        const auto fetch = [&](int stage, int stop) {
#pragma unroll 1
            for (; stage < stop; stage++) {
                barrier_init(full + 8 * stage, 1);
                sm90::fence_barrier_init();
                if (stage < early)
                    fetch_bulk(stages_at + stage * stage_bytes, in_head(stage), stage_bytes, full + 8 * stage, once);
            }
        };
        fetch(0, pipeline.before_pdl_wait);
        pdl_wait();
        late_x.fetch();
        fetch(pipeline.before_pdl_wait, pipeline.stages);
        pdl_launch_dependents();
#pragma unroll 1
        for (int stage = 0; stage < pipeline.stages; stage++)
            barrier_init(empty + 8 * stage, m.warps * sm90::WARP_ARRIVALS);
    }
    // The other stages: the warp's part, after they have met.
    __device__ __forceinline__ void run(const macko_sell_block &b, int lane) const {
        const int stage_bytes = m.warps * SLOT, early = prefetched();
        const uint64_t once = evict_first();
        const uint8_t *next = m.data + macko_sell_tail_slot(&b, m.num_blocks, m.warps, m.head) * SLOT;
        const int own_steps = lane < m.warps ? macko_sell_steps_of_warp(&b, m.warps, lane) : 0;
        int index = early % pipeline.stages;
        uint32_t phase = early < pipeline.stages; // of the empty barriers: 0 in the second round, the first that waits
#pragma unroll 1
        for (int stage = early; stage < b.stages; stage++) {
            const bool in_tail = stage >= m.head;
            const int bytes = in_tail ? stage_slots(own_steps, stage) * SLOT : stage_bytes;
            if (lane == 0) {
                if (stage == pipeline.stages) late_x.wait();
                if (stage >= pipeline.stages) barrier_wait(empty + 8 * index, phase);
                fetch_bulk(stages_at + index * stage_bytes, in_tail ? next : in_head(stage), bytes, full + 8 * index,
                           once);
            }
            if (in_tail) next += bytes;
            if (++index == pipeline.stages) index = 0, phase ^= 1;
        }
        // A block may not end while a copy is under way: x, and the stages of the head that nobody needed.
        if (b.stages <= pipeline.stages) late_x.wait();
#pragma unroll 1
        for (int stage = b.stages; stage < early; stage++) barrier_wait(full + 8 * stage, 0);
    }
};

// Where a consumer warp is in the pipeline.
struct sell_position {
    uint32_t pipeline_bytes, first_barrier; // that is `full` of stage 0
    uint32_t offset, barrier, phase;
    int stages_left; // of the block that this warp has not come to

    __device__ __forceinline__ sell_position(const uint32_t &bytes, const uint32_t &full, int stages)
        : pipeline_bytes(opaque(bytes)), first_barrier(opaque(full)), offset(0), barrier(first_barrier), phase(0),
          stages_left(stages) {
    }
    __device__ __forceinline__ void advance(const int &stage_bytes) {
        offset += stage_bytes;
        barrier += 8;
        if (offset == pipeline_bytes) offset = 0, barrier = first_barrier, phase ^= 1;
    }
    // The producer waits for every warp, so one with fewer steps releases the other stages, too.
    __device__ __forceinline__ void release_rest(const int &stage_bytes, const int &lane) {
#pragma unroll 1
        for (; stages_left > 0; stages_left--) {
            barrier_wait(barrier, phase);
            release_stage(barrier + 8 * MACKO_SELL_MAX_STAGES, lane);
            advance(stage_bytes);
        }
    }
};

// The slots of many steps of one block. Its pairs of warps have at most three different numbers of steps, found once:
// `most` of the first pairs, `middle` of the num_middle after them, `least` of the num_least last ones.
struct sell_block_slots {
    uint32_t tail_slot; // where stage 0 would be if the tail began with it; slots of a matrix are less than 2^31
    int block, most, middle, least, num_middle, num_least;

    __device__ void find(const macko_sell_matrix &s, const macko_sell_block &b, int of_block) {
        const int groups = macko_sell_groups(&b), long_groups = macko_sell_long_groups(&b);
        const int rounds = small_quotient(groups + s.warps - 1, s.warps);
        const int long_rounds = small_quotient(long_groups + s.warps - 1, s.warps);
        // Pairs that have a group in the last round, and a long group in the last round that has any.
        const int pairs = (groups - (rounds - 1) * s.warps + 1) / 2;
        const int long_pairs = (long_groups - (long_rounds - 1) * s.warps + 1) / 2;
        block = of_block;
        most = rounds * (b.steps - 1) + long_rounds;
        middle = most - (pairs < long_pairs ? b.steps - 1 : 1);
        least = most - b.steps;
        num_middle = abs(pairs - long_pairs);
        num_least = s.warps / 2 - max(pairs, long_pairs);
        tail_slot = (uint32_t)macko_sell_tail_slot(&b, s.num_blocks, s.warps, s.head) - before(s, min(s.head, most));
    }
    // Slots of the first stages, as many as there are or fewer.
    __device__ int before(const macko_sell_matrix &s, int stages) const {
        return stages * s.warps - 2 * (num_middle * max(stages - middle, 0) + num_least * max(stages - least, 0));
    }
    __device__ uint32_t slot(const macko_sell_matrix &s, int stage, int warp) const {
        const uint32_t in_head = (uint32_t)(stage * s.num_blocks + block) * s.warps,
                       in_tail = tail_slot + before(s, stage);
        return (stage < s.head ? in_head : in_tail) + warp;
    }
};

} // namespace macko
