/* y = W x on the CPU. */
#include "../core/cpu.h"
#include "macko.h"

static inline float load(const void *p, macko_dtype dtype, int64_t i) {
    if (dtype == MACKO_F32) return ((const float *)p)[i];
    const uint16_t bits = ((const uint16_t *)p)[i];
    return dtype == MACKO_F16 ? macko_f32_from_f16(bits) : macko_f32_from_bf16(bits);
}

static inline void store(void *p, macko_dtype dtype, int64_t i, float value) {
    if (dtype == MACKO_F32)
        ((float *)p)[i] = value;
    else
        ((uint16_t *)p)[i] = dtype == MACKO_F16 ? macko_f16_from_f32(value) : macko_bf16_from_f32(value);
}

macko_fault macko_spmv_cpu(const macko_matrix *m, const void *x, const void *bias, int64_t begin, int64_t end, void *y) {
    const macko_fault fault = macko_check_bounds_cpu(m, begin, end);
    if (fault.kind) return fault;
    for (int64_t row = begin; row < end; row++) {
        float sum = 0;
        int64_t col = -1;
        for (int64_t entry = m->row_ptr[row]; entry < m->row_ptr[row + 1]; entry++) {
            const int64_t bit = entry * m->delta_bits;
            col += (m->deltas[bit >> 3] >> (bit & 7) & ((1 << m->delta_bits) - 1)) + 1;
            sum += load(m->values, m->dtype, entry) * load(x, m->dtype, col);
        }
        store(y, m->dtype, row, bias ? sum + load(bias, m->dtype, row) : sum);
    }
    return fault;
}
