// pack, unpack and the checks of the macko format on CUDA.
#include "../core/cuda.cuh"
#include "macko.h"

using namespace macko;

namespace {

constexpr int THREADS = 128;

__device__ __forceinline__ int delta_at(const macko_matrix &m, int64_t entry) {
    const int64_t bit = entry * m.delta_bits;
    return m.deltas[bit >> 3] >> (bit & 7) & ((1 << m.delta_bits) - 1);
}

__global__ void count_rows(const uint16_t *w, int delta_bits, int64_t rows, int64_t cols, int64_t *row_ptr) {
    const int64_t row = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (row >= rows) return;
    int64_t count = 0, next = 0;
    for (int64_t col = 0; col < cols; col++) {
        if (!(w[row * cols + col] & 0x7fff)) continue;
        count += 1 + ((col - next) >> delta_bits);
        next = col + 1;
    }
    row_ptr[row + 1] = count;
}

__global__ void scan_rows(int64_t rows, int64_t *row_ptr) {
    int64_t sum = 0;
    row_ptr[0] = 0;
    for (int64_t row = 0; row < rows; row++) row_ptr[row + 1] = sum += row_ptr[row + 1];
}

__global__ void write_rows(const uint16_t *w, int delta_bits, int64_t rows, int64_t cols, const int64_t *row_ptr64,
                           int32_t *row_ptr, uint16_t *values, uint32_t *deltas) {
    const int64_t row = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (row > rows) return;
    const int delta_max = (1 << delta_bits) - 1;
    int64_t entry = row_ptr64[row], next = 0;
    row_ptr[row] = (int32_t)entry;
    if (row == rows) return;
    for (int64_t col = 0; col < cols; col++) {
        const uint16_t value = w[row * cols + col];
        if (!(value & 0x7fff)) continue;
        for (; col - next > delta_max; next += delta_max + 1, entry++) {
            values[entry] = 0;
            atomicOr(&deltas[entry * delta_bits >> 5], (uint32_t)delta_max << (entry * delta_bits & 31));
        }
        values[entry] = value;
        atomicOr(&deltas[entry * delta_bits >> 5], (uint32_t)(col - next) << (entry * delta_bits & 31));
        next = col + 1;
        entry++;
    }
}

__global__ void check_rows(macko_matrix m, int bounds_only, macko_fault *fault) {
    macko_fault found = {MACKO_OK, 0, -1, 0};
    const uint16_t *values = (const uint16_t *)m.values;
    for (int64_t row = 0; row < m.rows && !found.kind; row++) {
        const int64_t start = m.row_ptr[row], stop = m.row_ptr[row + 1];
        if (row == 0 && start) found = {MACKO_ROW_PTR_START, 0, -1, start};
        else if (stop < start) found = {MACKO_ROW_PTR_FALLS, row + 1, -1, stop};
        else if (stop > m.capacity) found = {MACKO_ROW_PTR_END, row + 1, -1, stop};
        int64_t next = 0;
        for (int64_t entry = start; !found.kind && entry < stop; entry++) {
            const int delta = delta_at(m, entry);
            next += delta + 1;
            if (next > m.cols) found = {MACKO_COLUMN_END, row, entry, next - 1};
            else if (!bounds_only && !(values[entry] & 0x7fff) &&
                     (delta != (1 << m.delta_bits) - 1 || entry + 1 == stop || values[entry]))
                found = {MACKO_STRAY_ZERO, row, entry, delta};
        }
    }
    if (!found.kind && !bounds_only) {
        const int64_t stored = m.row_ptr[m.rows];
        if (m.capacity != (stored + MACKO_CHUNK - 1) / MACKO_CHUNK * MACKO_CHUNK)
            found = {MACKO_ROW_PTR_END, m.rows, -1, stored};
        for (int64_t entry = stored; !found.kind && entry < m.capacity; entry++)
            if (values[entry] || delta_at(m, entry))
                found = {MACKO_PADDING, m.rows, entry, values[entry] ? values[entry] : delta_at(m, entry)};
    }
    *fault = found;
}

__global__ void unpack_rows(macko_matrix m, uint16_t *w) {
    const int64_t row = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (row >= m.rows) return;
    const int64_t start = m.row_ptr[row], stop = m.row_ptr[row + 1];
    bool good = start >= 0 && stop >= start && stop <= m.capacity;
    for (int64_t col = 0; col < m.cols; col++) w[row * m.cols + col] = 0;
    int64_t col = -1;
    for (int64_t entry = start; good && entry < stop; entry++) {
        col += delta_at(m, entry) + 1;
        if (col >= m.cols) good = false;
        else w[row * m.cols + col] = ((const uint16_t *)m.values)[entry];
    }
    for (int64_t col = 0; !good && col < m.cols; col++) w[row * m.cols + col] = 0x7fff;
}

}  // namespace

cudaError_t macko_pack_count_cuda(const void *w, int delta_bits, int64_t rows, int64_t cols, int64_t *row_ptr,
                                  cudaStream_t stream) {
    if (rows) count_rows<<<ceil_div(rows, THREADS), THREADS, 0, stream>>>((const uint16_t *)w, delta_bits, rows, cols, row_ptr);
    scan_rows<<<1, 1, 0, stream>>>(rows, row_ptr);
    return cudaGetLastError();
}

cudaError_t macko_pack_write_cuda(const void *w, int delta_bits, int64_t rows, int64_t cols, const int64_t *row_ptr64, int64_t capacity,
                                  int32_t *row_ptr, void *values, uint8_t *deltas, cudaStream_t stream) {
    cudaMemsetAsync(values, 0, capacity * 2, stream);
    cudaMemsetAsync(deltas, 0, capacity * delta_bits / 8, stream);
    write_rows<<<ceil_div(rows + 1, THREADS), THREADS, 0, stream>>>((const uint16_t *)w, delta_bits, rows, cols, row_ptr64, row_ptr,
                                                                    (uint16_t *)values, (uint32_t *)deltas);
    return cudaGetLastError();
}

cudaError_t macko_check_cuda(const macko_matrix *m, int bounds_only, macko_fault *fault, cudaStream_t stream) {
    check_rows<<<1, 1, 0, stream>>>(*m, bounds_only, fault);
    return cudaGetLastError();
}

cudaError_t macko_unpack_cuda(const macko_matrix *m, void *w, cudaStream_t stream) {
    if (m->rows) unpack_rows<<<ceil_div(m->rows, THREADS), THREADS, 0, stream>>>(*m, (uint16_t *)w);
    return cudaGetLastError();
}
