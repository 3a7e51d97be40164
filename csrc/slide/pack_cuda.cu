// slide_pack and slide_unpack on CUDA. A block owns a row; its numbers lie in shared memory, 16 bits each.
#include "../core/cuda.cuh"
#include "quant_cuda.cuh"
#include "windows.h"

using namespace macko;

namespace {

constexpr int THREADS = 128;

// Orders numbers as |value| does, Inf above them, NaN above Inf.
__device__ __forceinline__ int magnitude(uint16_t bits, macko_slide_source source) {
    if (source == MACKO_SLIDE_FROM_S8) return abs((int)(int8_t)bits);
    return bits & (source == MACKO_SLIDE_FROM_E4M3 ? 0x7f : 0x7fff);
}

// Zeroes the smallest of a group, of equals the last, until `allowed` non-zeros are left.
__device__ void prune_group(uint16_t *group, int width, int count, int allowed, macko_slide_source source) {
    for (; count > allowed; count--) {
        int drop = -1;
        for (int i = 0; i < width; i++) {
            const int size = magnitude(group[i], source);
            if (size && (drop < 0 || size <= magnitude(group[drop], source))) drop = i;
        }
        group[drop] = 0;
    }
}

__global__ void pack_rows(macko_slide_shape shape, const void *w, macko_slide_source source, int prune, int keeps_bits,
                          int padded, uint8_t *packed, float *scale, unsigned long long *found) {
    extern __shared__ uint16_t line[];
    __shared__ int absmax;
    const int64_t row = blockIdx.x, cols = shape.cols, groups = shape.n ? macko_slide_groups(cols, shape.n) : 0;
    const bool narrow = source == MACKO_SLIDE_FROM_S8 || source == MACKO_SLIDE_FROM_E4M3;
    if (threadIdx.x == 0) absmax = 0;
    __syncthreads();
    int most = 0;
    for (int col = threadIdx.x; col < padded; col += THREADS) {
        uint16_t bits = 0;
        if (row < shape.rows && col < cols)
            bits = narrow ? ((const uint8_t *)w)[row * cols + col] : ((const uint16_t *)w)[row * cols + col];
        const int size = magnitude(bits, source);
        line[col] = size ? bits : 0;
        most = max(most, size);
    }
    atomicMax(&absmax, most);
    __syncthreads();

    const float largest = source == MACKO_SLIDE_FROM_F16 ? __half2float(__ushort_as_half((unsigned short)absmax))
                                                         : __uint_as_float((unsigned)absmax << 16);
    const macko_slide_quantiser by = macko_slide_quantiser_of(largest, shape.type);
    if (threadIdx.x == 0 && row < shape.rows) scale[row] = keeps_bits ? 1.0f : by.scale;
    for (int group = threadIdx.x; group < groups; group += THREADS) {
        uint16_t *start = line + group * 2 * shape.n;
        int count = 0;
        for (int i = 0; i < 2 * shape.n; i++) count += start[i] != 0;
        if (count <= 2 * shape.n - 2) continue;
        atomicMax(found + 1, (unsigned long long)(INT64_MAX - ((row * groups + group) * 256 + count)));
        if (!prune) continue;
        atomicAdd(found, (unsigned long long)(count - (2 * shape.n - 2)));
        prune_group(start, 2 * shape.n, count, 2 * shape.n - 2, source);
    }
    __syncthreads();

    for (int col = threadIdx.x; col < cols && !keeps_bits; col += THREADS) {
        const uint16_t bits = line[col];
        const float value = source == MACKO_SLIDE_FROM_F16 ? __half2float(__ushort_as_half(bits))
                                                           : __uint_as_float((unsigned)bits << 16);
        line[col] = bits ? slide_code(value * by.before * by.factor, shape.type) : 0;
    }
    __syncthreads();

    const int64_t k_tiles = macko_slide_k_tiles(cols, shape.n, shape.type);
    const int64_t tile_bytes = macko_slide_tile_bytes(shape.n, shape.type);
    uint8_t *tiles = packed + row / MACKO_SLIDE_BLOCK_ROWS * k_tiles * tile_bytes;
    for (int64_t k_tile = threadIdx.x; k_tile < k_tiles; k_tile += THREADS)
        macko_slide_fill_tile(line, cols, shape.n, shape.type, (int)(row % MACKO_SLIDE_BLOCK_ROWS), k_tile,
                              tiles + k_tile * tile_bytes);
}

__global__ void unpack_rows(macko_slide_weight weight, uint8_t *codes) {
    const macko_slide_shape shape = weight.shape;
    const int64_t row = blockIdx.x, k_tiles = macko_slide_k_tiles(shape.cols, shape.n, shape.type);
    const int64_t row_bytes = shape.cols * macko_slide_element_bytes(shape.type);
    const int64_t tile_bytes = macko_slide_tile_bytes(shape.n, shape.type);
    const uint8_t *tiles = weight.packed + row / MACKO_SLIDE_BLOCK_ROWS * k_tiles * tile_bytes;
    uint8_t *line = codes + row * row_bytes;
    for (int64_t i = threadIdx.x; i < row_bytes; i += THREADS) line[i] = 0;
    __syncthreads();
    for (int64_t k_tile = threadIdx.x; k_tile < k_tiles; k_tile += THREADS)
        macko_slide_read_tile(tiles + k_tile * tile_bytes, shape.cols, shape.n, shape.type,
                              (int)(row % MACKO_SLIDE_BLOCK_ROWS), k_tile, line);
}

} // namespace

cudaError_t macko_slide_pack_cuda(const macko_slide_shape *shape, const void *w, macko_slide_source source, int prune,
                                  uint8_t *packed, float *scale, int64_t found[2], cudaStream_t stream) {
    if (!shape->rows) return cudaSuccess;
    const int keeps_bits =
        source == MACKO_SLIDE_FROM_S8 || source == MACKO_SLIDE_FROM_E4M3 || macko_slide_element_bytes(shape->type) == 2;
    const int padded = (int)shape->cols + 2 * MACKO_SLIDE_MAX_N; /* zeros up to a whole group */
    const cudaError_t status = cudaFuncSetAttribute(pack_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, padded * 2);
    if (status != cudaSuccess) return status;
    const unsigned blocks = (unsigned)(macko_slide_row_blocks(shape->rows) * MACKO_SLIDE_BLOCK_ROWS);
    pack_rows<<<blocks, THREADS, padded * 2, stream>>>(*shape, w, source, prune, keeps_bits, padded, packed, scale,
                                                       (unsigned long long *)found);
    return cudaGetLastError();
}

cudaError_t macko_slide_unpack_cuda(const macko_slide_weight *weight, void *codes, cudaStream_t stream) {
    if (!weight->shape.rows || !weight->shape.cols) return cudaSuccess;
    unpack_rows<<<(unsigned)weight->shape.rows, THREADS, 0, stream>>>(*weight, (uint8_t *)codes);
    return cudaGetLastError();
}
