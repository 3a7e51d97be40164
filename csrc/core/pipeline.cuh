// A pipeline of stages in shared memory. Each stage has two mbarriers, of 8 bytes side by side with those of the others:
// full, which waits for the bytes of its copies, and empty, which waits until all consumers have released it.
//
//     producer    producer_acquire | barrier_arrive_expect_tx, copies that arrive at full | advance
//     consumer    consumer_wait | read | advance | arrive at empty
//
// Each side has a pipeline_state of its own. Names are those of CUTLASS.
#pragma once

#include "sm90.cuh"

namespace macko::sm90 {

// A stage at most a round further than there are.
__device__ __forceinline__ int wrapped(int stage, int stages) {
    return stage < stages ? stage : stage - stages;
}

// Where a warp is. phase: parity of the round.
struct pipeline_state {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ pipeline_state ahead(int by, int stages) const {
        return {wrapped(stage + by, stages), phase ^ (stage + by >= stages)};
    }
    __device__ __forceinline__ void advance(int stages) {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Waits until the stage is empty; in the first round it is.
__device__ __forceinline__ void producer_acquire(uint32_t empty, pipeline_state state) {
    barrier_wait(empty + state.stage * 8, state.phase ^ 1);
}

// Waits until the stage is full.
__device__ __forceinline__ void consumer_wait(uint32_t full, pipeline_state state) {
    barrier_wait(full + state.stage * 8, state.phase);
}

} // namespace macko::sm90
