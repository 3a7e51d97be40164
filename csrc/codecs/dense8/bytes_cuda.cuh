// What packing on CUDA does with single bytes (bytes.h).
#pragma once

#include "../../slab/slices.cuh"
#include "bytes.h"

namespace macko {

// The code of w [rows, cols] as a layout holds it; of zeros, and outside of the matrix, that of 0.
__device__ __forceinline__ uint32_t load_code(const uint8_t *w, int64_t rows, int64_t cols, int64_t row, int64_t col,
                                              macko_byte_kind kind, macko_dtype dtype) {
    const uint8_t code = row < rows && col < cols ? w[row * cols + col] : 0;
    return macko_byte_stored(kind, dtype, macko_byte_is_zero(kind, code) ? 0 : code);
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

} // namespace macko
