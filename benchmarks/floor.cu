// Kernels that only read: the time below which nothing that reads as many bytes can be.
#include <cuda_runtime_api.h>
#include <stdint.h>

// UNROLL 16-byte loads in flight a thread; blocks stride over the whole.
template <int UNROLL>
__global__ void read_all(const uint4 *from, int64_t count, uint32_t *sink) {
    const int64_t stride = (int64_t)gridDim.x * blockDim.x;
    uint32_t sum = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += UNROLL * stride) {
        uint4 v[UNROLL];
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            v[j] = make_uint4(0, 0, 0, 0);
            if (i + j * stride < count)
                asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                             : "l"(from + i + j * stride));
        }
#pragma unroll
        for (int j = 0; j < UNROLL; j++) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (sum == 0x9e3779b9u) *sink = sum; // never, but the compiler cannot know
}

// blocks_per_sm 0: one pass, as many blocks as that takes.
extern "C" int read_bytes(const void *from, int64_t bytes, int unroll, int threads, int blocks_per_sm, int num_sms,
                          void *sink, cudaStream_t stream) {
    const int64_t count = bytes / 16, once = (count + (int64_t)threads * unroll - 1) / ((int64_t)threads * unroll);
    const unsigned blocks = blocks_per_sm ? blocks_per_sm * num_sms : (unsigned)(once > 0 ? once : 1);
    const uint4 *p = (const uint4 *)from;
    uint32_t *out = (uint32_t *)sink;
    if (unroll == 2)
        read_all<2><<<blocks, threads, 0, stream>>>(p, count, out);
    else if (unroll == 4)
        read_all<4><<<blocks, threads, 0, stream>>>(p, count, out);
    else
        read_all<8><<<blocks, threads, 0, stream>>>(p, count, out);
    return cudaGetLastError();
}
