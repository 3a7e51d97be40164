// What codecs load of a slab in shared memory, and with what instructions.
#pragma once

#include "../core/cuda.cuh"
#include "slab.h"

namespace macko {

// Words of a slab. Volatile: the compiler keeps them in the order of the program.
__device__ __forceinline__ void read_16(uint32_t &to, uint32_t from) {
    asm volatile("{ .reg .b16 v;\nld.shared.u16 v, [%1];\ncvt.u32.u16 %0, v; }" : "=r"(to) : "r"(from) : "memory");
}
__device__ __forceinline__ void read_32(uint32_t &to, uint32_t from) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to) : "r"(from) : "memory");
}

// 16 bytes: nothing but this keeps them after the pipeline's barrier, where no load before gave their address.
__device__ __forceinline__ void read_128(uint32_t (&to)[4], uint32_t from) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// prmt itself: __byte_perm would mask the selector first.
__device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
    return bytes;
}

// 32 bits of two words from a bit on, mod 32.
__device__ __forceinline__ uint32_t funnel_shift(uint32_t low, uint32_t high, uint32_t bits) {
    uint32_t word;
    asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(low), "r"(high), "r"(bits));
    return word;
}

// A row of columns of bytes (columns_cpu.h), from one of them. Not volatile, as load_value.
template <int ROW>
__device__ __forceinline__ uint32_t load_row(uint32_t at) {
    uint32_t word;
    asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(word) : "r"(at), "n"(ROW * MACKO_SLAB_COLUMNS_ROW_BYTES));
    return word;
}

// A number whose origin the compiler does not know. zero: 0 where it may know that all lanes have the same, for which
// there are registers of their own; else threadIdx.y.
__device__ __forceinline__ uint32_t hidden(uint32_t number, int lane, int zero) {
    return __shfl_sync(FULL_WARP, lane ? 0 : number, zero);
}

// Where a slab that begins with masks, u32 [tile][slice][lane], has a lane's.
__device__ __forceinline__ uint32_t slab_mask_at(uint32_t slab, int tile, int slice, int lane) {
    return slab + tile * MACKO_SLAB_MASK_BYTES + (slice * MACKO_SLAB_LANES + lane) * 4;
}

} // namespace macko
