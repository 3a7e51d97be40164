// y = W x on CUDA, from the canonical format.
#include "../core/cuda.cuh"
#include "macko.h"

using namespace macko;

namespace {

constexpr int THREADS = 128;

// A thread owns a row.
template <typename T>
__global__ void spmv(macko_matrix m, const T *x, const T *bias, T *y) {
    const int64_t row = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (row >= m.rows) return;
    const int64_t start = m.row_ptr[row], stop = m.row_ptr[row + 1];
    float sum = 0;
    if (start < 0 || stop < start || stop > m.capacity) sum = NAN;
    int64_t col = -1;
    for (int64_t entry = start; sum == sum && entry < stop; entry++) {
        const int64_t bit = entry * m.delta_bits;
        col += (m.deltas[bit >> 3] >> (bit & 7) & ((1 << m.delta_bits) - 1)) + 1;
        sum = col < m.cols ? fmaf(to_float(((const T *)m.values)[entry]), to_float(x[col]), sum) : NAN;
    }
    y[row] = from_float<T>(bias ? sum + to_float(bias[row]) : sum);
}

}  // namespace

cudaError_t macko_spmv_cuda(const macko_matrix *m, const void *x, const void *bias, void *y, cudaStream_t stream) {
    if (!m->rows) return cudaSuccess;
    const unsigned blocks = ceil_div(m->rows, THREADS);
    if (m->dtype == MACKO_F16)
        spmv<<<blocks, THREADS, 0, stream>>>(*m, (const __half *)x, (const __half *)bias, (__half *)y);
    else
        spmv<<<blocks, THREADS, 0, stream>>>(*m, (const __nv_bfloat16 *)x, (const __nv_bfloat16 *)bias,
                                             (__nv_bfloat16 *)y);
    return cudaGetLastError();
}
