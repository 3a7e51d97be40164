// Dense rows of the planes12 format, and its checks, on CUDA.
#include "../codecs/dense12/dense12.h"
#include "../core/cuda.cuh"
#include "planes12.h"

using namespace macko;

namespace {

constexpr int THREADS = 256;
constexpr int CHUNK = 8; // elements of a thread: 16 bytes of the dense row

// Two elements of a word, taken apart by dense12.h, as they were.
__device__ __forceinline__ uint32_t join_pair(macko_dtype dtype, uint32_t split) {
    return dtype == MACKO_F16 ? (split & 0x80008000u) | (split & 0x0fff0fffu) << 3 : split;
}

// Four elements from their low bytes and four nibbles: a byte permutation is the look-up in the table.
__device__ __forceinline__ uint2 join_four(macko_dtype dtype, uint2 table, uint32_t low, uint32_t nibbles) {
    const uint32_t signs =
        (nibbles & 0x8) << 4 | (nibbles & 0x80) << 8 | (nibbles & 0x800) << 12 | (nibbles & 0x8000) << 16;
    const uint32_t high = __byte_perm(table.x, table.y, nibbles & 0x7777) | signs;
    return {join_pair(dtype, __byte_perm(low, high, 0x5140)), join_pair(dtype, __byte_perm(low, high, 0x7362))};
}

__device__ __forceinline__ uint2 table_of(const macko_planes12 &m) {
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int code = 0; code < 8; code++) words[code / 4] |= uint32_t(m.table[code]) << 8 * (code % 4);
    return {words[0], words[1]};
}

// A thread block owns a row: planes first, then the list. What would write elsewhere is left out, and noted.
__global__ void __launch_bounds__(THREADS) unpack_rows(macko_planes12 m, bool by_chunks, uint16_t *w, int64_t *broken) {
    const int64_t row = blockIdx.x, high_bytes = macko_planes12_high_bytes(m.cols);
    const uint8_t *const low = m.low + row * m.cols, *const high = m.high + row * high_bytes;
    uint16_t *const to = w + row * m.cols;
    const uint2 table = table_of(m);
    if (by_chunks) {
        for (int64_t i = threadIdx.x; i < m.cols / CHUNK; i += THREADS) {
            const uint2 lows = ((const uint2 *)low)[i];
            const uint32_t nibbles = ((const uint32_t *)high)[i];
            const uint2 first = join_four(m.dtype, table, lows.x, nibbles);
            const uint2 last = join_four(m.dtype, table, lows.y, nibbles >> 16);
            ((uint4 *)to)[i] = {first.x, first.y, last.x, last.y};
        }
    } else {
        for (int64_t col = threadIdx.x; col < m.cols; col += THREADS)
            to[col] = uint16_t(join_four(m.dtype, table, low[col], high[col / 2] >> 4 * (col % 2) & 15).x);
    }
    __syncthreads();
    const int64_t start = m.row_ptr[row], stop = m.row_ptr[row + 1];
    if (start < 0 || stop < start || stop > m.listed) {
        *broken = 1;
        return;
    }
    for (int64_t i = start + threadIdx.x; i < stop; i += THREADS) {
        const int64_t col = m.columns[i];
        if (col >= 0 && col < m.cols)
            to[col] = m.values[i];
        else
            *broken = 1;
    }
}

__device__ __forceinline__ bool is_table(const macko_planes12 &m) {
    bool good = m.table[0] == 0;
    for (int code = 1; code < 8; code++) {
        const int high = m.table[code], before = m.table[code - 1];
        good = good && high < (m.dtype == MACKO_F16 ? 16 : 128) && (!high || (high > before && (before || code == 1)));
    }
    return good;
}

__device__ __forceinline__ bool has_code(const macko_planes12 &m, uint32_t value) {
    if (macko_dense12_has_lower_bits(m.dtype, value)) return false;
    const uint32_t high = macko_dense12_split(m.dtype, value) >> 8 & 127;
    bool found = false;
    for (int code = 0; code < 8; code++) found = found || m.table[code] == high;
    return found;
}

// A thread owns a row, the first one the table too.
__global__ void __launch_bounds__(THREADS) check_rows(macko_planes12 m, int64_t *broken) {
    const int64_t row = blockIdx.x * int64_t(THREADS) + threadIdx.x, high_bytes = macko_planes12_high_bytes(m.cols);
    bool good = row || (is_table(m) && m.row_ptr[0] == 0 && m.row_ptr[m.rows] == m.listed);
    if (row < m.rows) {
        const int64_t start = m.row_ptr[row], stop = m.row_ptr[row + 1];
        const uint8_t *const low = m.low + row * m.cols, *const high = m.high + row * high_bytes;
        good = good && start >= 0 && start <= stop && stop <= m.listed;
        good = good && !(m.cols % 2 && high[high_bytes - 1] >> 4);
        for (int64_t i = start, before = -1; good && i < stop; i++) {
            const int64_t col = m.columns[i];
            good = col > before && col < m.cols && !has_code(m, m.values[i]) && !low[col] &&
                   !(high[col / 2] >> 4 * (col % 2) & 15);
            before = col;
        }
    }
    if (!good) *broken = 1;
}

} // namespace

cudaError_t macko_planes12_unpack_cuda(const macko_planes12 *m, uint16_t *w, int64_t *broken, cudaStream_t stream) {
    const bool by_chunks = m->cols % CHUNK == 0 && (uintptr_t)m->low % 8 == 0 && (uintptr_t)m->high % 4 == 0;
    if (m->rows) unpack_rows<<<unsigned(m->rows), THREADS, 0, stream>>>(*m, by_chunks, w, broken);
    return cudaGetLastError();
}

cudaError_t macko_planes12_check_cuda(const macko_planes12 *m, int64_t *broken, cudaStream_t stream) {
    check_rows<<<unsigned(m->rows / THREADS + 1), THREADS, 0, stream>>>(*m, broken);
    return cudaGetLastError();
}
