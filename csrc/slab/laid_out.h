// What layouts have in common whose slabs are laid out from the canonical format and differ in size (tile, sparse11): the
// checks of data and offsets, pieces of a matrix, and dense rows piece by piece.
#pragma once

#include <algorithm>
#include <vector>

#include "../macko/ops.h"
#include "products.h"

namespace macko {

// data and offsets [slabs + 1] of a matrix in slabs of so many units, once they have passed every check that needs no look at
// their content; check_type says which types of values there are.
template <typename CheckType>
macko_dtype check_slabs(const char *op, const Packed &p, int fewest, int most, const CheckType &check_type) {
    const Tensor &data = p[0], &offsets = p[1];
    const Wanted all[] = {{"data", data, ScalarType::Undefined, 1, 16}, {"offsets", offsets, ScalarType::Int, 1}};
    check_kinds(op, all);
    const macko_dtype dtype = check_type(op, "data", data);
    check_sizes(op, p);
    const int64_t slabs = macko_slab_count(p.rows(), p.cols()), widest = p.own(0);
    if (offsets.numel() != slabs + 1)
        fail(op, "offsets has ", offsets.numel(), " elements, expected ", slabs + 1, " for a matrix of ", p.rows(),
             " x ", p.cols());
    if (data.numel() * 2 % MACKO_SLAB_UNIT || data.numel() * 2 < slabs * fewest * MACKO_SLAB_UNIT)
        fail(op, "data has ", data.numel(), " elements, expected a multiple of ", MACKO_SLAB_UNIT / 2, ", at least ",
             slabs * fewest * MACKO_SLAB_UNIT / 2);
    const int least = slabs ? fewest : 0, largest = slabs ? most : 0;
    if (widest < least || widest > largest) fail(op, "widest is ", widest, ", expected ", least, " to ", largest);
    check_memory(op, all);
    return dtype;
}

// The matrix's rows from the row block of `first` on: the offsets of its slabs are those of a whole one.
template <typename Matrix>
Matrix piece_by_offsets(Matrix m, int64_t first, int64_t rows) {
    m.offsets += first / MACKO_SLAB_ROWS * macko_slabs_across(m.cols);
    m.rows = rows;
    return m;
}

inline void check_units(const char *op, int64_t units) {
    if (units > INT32_MAX)
        fail(op, "the layout takes ", units, " units of ", MACKO_SLAB_UNIT, " bytes, expected at most ", INT32_MAX);
}

#ifdef USE_CUDA
// Dense rows of a canonical matrix, as many as the workspace holds; where that is all of them, they stay.
struct dense_pieces {
    const macko_matrix &source;
    const cudaStream_t stream;
    const int64_t step;
    Tensor dense;
    bool unpacked = false; // all rows, and they stay

    dense_pieces(const macko_matrix &source, const Tensor &values)
        : source(source), stream(current_stream(values)), step(step_of(source)),
          dense(torch::stable::new_empty(values, {std::min(source.rows, step), source.cols})) {
    }
    static int64_t step_of(const macko_matrix &m) {
        const int64_t most = rows_of_panel(m.rows, m.cols, 2);
        return most >= m.rows ? m.rows : (most + MACKO_SLAB_ROWS - 1) / MACKO_SLAB_ROWS * MACKO_SLAB_ROWS;
    }
    // body(first row, rows, dense rows), piece after piece.
    template <typename Body>
    void for_each(const Body &body) {
        for (int64_t first = 0; first < source.rows; first += step) {
            macko_matrix piece = source;
            piece.row_ptr += first;
            piece.rows = std::min(step, source.rows - first);
            if (!unpacked) STD_CUDA_CHECK(macko_unpack_cuda(&piece, dense.mutable_data_ptr(), stream));
            STD_CUDA_CHECK(body(first, piece.rows, dense.const_data_ptr()));
        }
        unpacked = step >= source.rows;
    }
};
#else
// body(row block, rows, dense rows) for each row block, which threads share out.
template <typename Body>
void for_dense_blocks(const macko_matrix &source, const Body &body) {
    const int64_t rows = source.rows, cols = source.cols;
    for_rows(macko_slab_row_blocks(rows), cols * MACKO_SLAB_ROWS, [&](int64_t begin, int64_t end) {
        std::vector<uint16_t> dense(MACKO_SLAB_ROWS * cols);
        for (int64_t block = begin; block < end; block++) {
            const int64_t first = block * MACKO_SLAB_ROWS, count = std::min<int64_t>(MACKO_SLAB_ROWS, rows - first);
            macko_unpack_cpu(&source, first, first + count, dense.data());
            body(block, count, dense.data());
        }
    });
}

// Units of slabs in offsets[1 .. slabs] become their sums, and the totals say what they are together.
template <typename Totals>
void add_up_slabs(const char *op, int64_t slabs, int32_t *offsets, Totals &totals) {
    offsets[0] = 0;
    for (int64_t slab = 0; slab < slabs; slab++) {
        totals.widest = std::max<int64_t>(totals.widest, offsets[slab + 1]);
        totals.units += offsets[slab + 1];
        check_units(op, totals.units);
        offsets[slab + 1] = int32_t(totals.units);
    }
}
#endif

} // namespace macko
