// How CUDA kernels read the macko format: a lane loads and decodes a chunk of 8 entries at once.
#pragma once

#include <type_traits>

#include "../core/cuda.cuh"
#include "macko.h"

namespace macko {

// The deltas of a chunk as they lie in memory, the first entry's in the lowest bits.
template <int BITS>
using delta_word = std::conditional_t<BITS == 2, uint16_t, std::conditional_t<BITS == 4, uint32_t, uint64_t>>;

template <int BITS>
__device__ __forceinline__ uint32_t delta_at(delta_word<BITS> word, int entry) {
    return uint32_t(word >> entry * BITS) & ((1 << BITS) - 1);
}

// `word` with the deltas of entries outside [begin, end) zeroed; 0 <= begin, end <= 8.
template <int BITS>
__device__ __forceinline__ delta_word<BITS> keep_deltas(delta_word<BITS> word, int begin, int end) {
    const uint64_t below_begin = (uint64_t(1) << begin * BITS % 64) - 1;
    const uint64_t below_end = end * BITS == 64 ? ~uint64_t(0) : (uint64_t(1) << end * BITS) - 1;
    return begin < end ? delta_word<BITS>(word & below_end & ~below_begin) : delta_word<BITS>(0);
}

// Where the entries of a chunk lie: entry k is at(k) columns after the chunk's first free column, the one after the entry
// before the chunk. All 8 prefix sums come from one multiplication, about 6 instructions a chunk.
template <int BITS>
struct chunk_offsets {
    uint32_t even, odd; // bytes: entries 0, 2, 4, 6 and 1, 3, 5, 7; at most 8 * 15 + 7

    __device__ __forceinline__ explicit chunk_offsets(delta_word<BITS> word) {
        uint32_t nibbles = word;
        if (BITS == 2) {
            nibbles = (nibbles | nibbles << 8) & 0x00ff00ffu;
            nibbles = (nibbles | nibbles << 4) & 0x0f0f0f0fu;
            nibbles = (nibbles | nibbles << 2) & 0x33333333u;
        }
        const uint32_t low = nibbles & 0x0f0f0f0fu, high = nibbles >> 4 & 0x0f0f0f0fu;
        odd = (low + high) * 0x01010101u + 0x07050301u;
        even = odd - high - 0x01010101u;
    }

    // Columns that the chunk skips: from the first free one past the last entry, less the 8 of the entries themselves.
    __device__ __forceinline__ uint32_t sum() const {
        return (odd >> 24) - 7;
    }

    // base + scale * (offset of entry k), one instruction where k and scale are constants.
    __device__ __forceinline__ uint32_t at(int k, uint32_t base, uint32_t scale) const {
        return __dp4a(k & 1 ? odd : even, scale << 8 * (k / 2), base);
    }
};

// 8-bit deltas add up to 2047: halves instead of bytes. They are made where they are used, or they would take too many
// registers.
template <>
struct chunk_offsets<8> {
    uint32_t low4, high4; // deltas of entries 0..3 and 4..7

    __device__ __forceinline__ explicit chunk_offsets(uint64_t word)
        : low4(uint32_t(word)), high4(uint32_t(word >> 32)) {
    }

    __device__ __forceinline__ uint32_t sum() const {
        return __dp4a(low4, 0x01010101u, __dp4a(high4, 0x01010101u, 0u));
    }

    __device__ __forceinline__ uint32_t at(int k, uint32_t base, uint32_t scale) const {
        const uint32_t bytes = k < 4 ? low4 : high4, before = k < 4 ? 0 : __dp4a(low4, 0x01010101u, 4u);
        const uint32_t even = bytes & 0x00ff00ffu, odd = bytes >> 8 & 0x00ff00ffu;
        const uint32_t through = (even + odd + before) * 0x00010001u + 0x00030001u; // entries 1, 3 or 5, 7
        return __dp2a_lo(k & 1 ? through : through - odd - 0x00010001u, scale << 8 * (k / 2 % 2), base);
    }
};

} // namespace macko
