// What packing and unpacking on CUDA do with single bytes (bytes.h).
#pragma once

#include "../../slab/slices.cuh"
#include "bytes.h"

namespace macko {

// The code of w [rows, cols] as a layout holds it; of zeros, and outside of the matrix, that of 0.
__device__ __forceinline__ uint32_t load_code(const uint8_t *w, int64_t rows, int64_t cols, int64_t row, int64_t col,
                                              macko_byte_kind kind, macko_dtype dtype) {
    const uint8_t code = row < rows && col < cols ? w[row * cols + col] : 0;
    return macko_byte_held(kind, dtype, macko_byte_is_zero(kind, code) ? 0 : code);
}

// A lane's codes of a step of a slice, four a word.
__device__ __forceinline__ void load_codes(const uint8_t *w, int64_t rows, int64_t cols, const slice_of &from, int tile,
                                           int step, macko_byte_kind kind, macko_dtype dtype, uint32_t (&words)[2]) {
    words[0] = words[1] = 0;
    for (int i = 0; i < STEP_ELEMENTS; i++) {
        const int e = i % MACKO_SLAB_QUAD, j = 2 * step + i / MACKO_SLAB_QUAD;
        const int64_t row = from.row + macko_slab_row(from.lane, e),
                      col = from.col + tile * MACKO_SLAB_TILE_COLS + macko_slab_col(from.lane, j, e);
        words[i / 4] |= load_code(w, rows, cols, row, col, kind, dtype) << 8 * (i % 4);
    }
}

// Puts element i of a step of a lane, as the layout holds it, into dense rows of a slice of a tile.
__device__ __forceinline__ void put_code(uint16_t *room, const slice_of &from, int step, int i, uint32_t held,
                                         const float (&scales)[2], macko_byte_kind kind, macko_dtype dtype) {
    const int e = i % MACKO_SLAB_QUAD, j = 2 * step + i / MACKO_SLAB_QUAD;
    const float value = macko_byte_value(kind, macko_byte_code(kind, dtype, (uint8_t)held)) * scales[e / 2];
    uint16_t *const to = room + macko_slab_row(from.lane, e) * DENSE_STRIDE + macko_slab_col(from.lane, j, e);
    *to = dtype == MACKO_F16 ? __half_as_ushort(__float2half_rn(value))
                             : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

// Scales of the rows of which a lane has elements; 0 outside of the matrix.
__device__ __forceinline__ void load_scales(const float *scales, int64_t rows, const slice_of &from, float (&own)[2]) {
    for (int k = 0; k < 2; k++) {
        const int64_t row = from.row + macko_slab_row(from.lane, 2 * k);
        own[k] = row < rows ? scales[row] : 0;
    }
}

} // namespace macko
