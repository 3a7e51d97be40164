// A packed weight as the ops get it, and what each layout does with one.
#pragma once

#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "check.h"
#include "path.h"

namespace macko {

using Ints = std::vector<int64_t>;

// Tensors in the order of the layout's own header file; the first has the dense matrix's dtype, but for slide's. header:
// layout, rows, cols, then what the layout has besides. A view: an op's own arguments come after it.
struct Packed {
    std::span<const Tensor> tensors;
    std::span<const int64_t> header;

    const Tensor &operator[](size_t i) const {
        return tensors[i];
    }
    int64_t rows() const {
        return header[1];
    }
    int64_t cols() const {
        return header[2];
    }
    int64_t number(size_t i) const {
        return header[3 + i];
    }
};

// What packing gives, where it lives.
struct Made {
    std::vector<Tensor> tensors;
    Ints header;

    operator Packed() const & {
        return {tensors, header};
    }
    operator Packed() && = delete; // a view of what is about to go
};

// What is null, a layout does not do on this device.
struct Layout {
    const char *name;
    int number;                                      // stands first in a header, in no file
    size_t tensors, numbers;                         // how many, and how many numbers besides rows and cols
    const char *instead = "has no such kernel here"; // why something is null, and what to use instead
    size_t pack_options = 0, lay_out_options = 0;    // how many
    Made (*pack)(const Tensor &w, const Ints &options) = nullptr;
    Made (*lay_out)(const Packed &canonical, const Ints &options) = nullptr;
    Made (*to_canonical)(const Packed &p) = nullptr; // without a dense matrix on the way
    Tensor (*dense)(const Packed &p, bool check) = nullptr;
    Tensor (*check)(const Packed &p) = nullptr;
    Tensor (*linear)(const Packed &p, const Tensor &x, const std::optional<Tensor> &bias) = nullptr;
    std::vector<Tensor> (*linear_parts)(const Packed &p, const Tensor &x, const Ints &part_rows) = nullptr;
    // Of a stack of experts, `rows` of each; ends: where the rows of each expert end, which are rows order[i] / top_k of x; or of
    // silu(gate) * up, of which x has both. early: ends were there before the kernel that comes before this one began.
    Tensor (*linear_experts)(const Packed &p, const Tensor &x, int64_t rows, const Tensor &ends,
                             const std::optional<Tensor> &order, int64_t top_k, bool gated, bool early) = nullptr;
    // Of one token, where the product's kernel makes its own input.
    Tensor (*norm_linear)(const Packed &p, const Tensor &x, const Tensor &weight, double eps,
                          const std::optional<Tensor> &bias) = nullptr;
};

// A layout that is in the table: a file with one is all that the library has to know of it. Where two have one number, the
// library cannot be imported.
struct Registered : Layout {
    explicit Registered(const Layout &layout);
    Registered(const Registered &) = delete;
};

extern const Registered canonical_layout;

// What the op `check` of the CPU finds: content is looked at once, when it comes from a file.
Tensor check_on_cpu(const Packed &p);

// rows and cols of a header, as int32 holds them.
inline void check_sizes(const char *op, const Packed &p) {
    if (p.rows() < 0 || p.rows() > INT32_LIMIT) fail(op, "rows is ", p.rows(), ", expected 0 to ", INT32_LIMIT);
    if (p.cols() < 0 || p.cols() > INT32_LIMIT) fail(op, "cols is ", p.cols(), ", expected 0 to ", INT32_LIMIT);
}

// part_rows, which come from a caller, have to be the rows of W.
inline void check_parts(const char *op, std::span<const int64_t> part_rows, int64_t rows) {
    int64_t sum = 0;
    for (const int64_t count : part_rows) {
        if (count < 0 || count > rows - sum)
            fail(op, "part_rows has ", count, " after ", sum, " rows, the matrix has ", rows);
        sum += count;
    }
    if (sum != rows) fail(op, "part_rows are ", sum, " in all, the matrix has ", rows, " rows");
}

// row_ptr of so many rows.
inline void check_row_ptr(const char *op, const Tensor &row_ptr, int64_t rows) {
    if (row_ptr.numel() < 1) fail(op, "row_ptr is empty, expected rows + 1 entries");
    if (row_ptr.numel() != rows + 1)
        fail(op, "row_ptr has ", row_ptr.numel(), " entries, expected ", rows + 1, " for ", rows, " rows");
}

// The papers' own ops, as library.cpp registers them.
Tensor spmv(const Tensor &values, const Tensor &deltas, const Tensor &row_ptr, int64_t cols, const Tensor &x,
            int64_t delta_bits);
Tensor ec_spmv(const Tensor &block_values, const Tensor &delta_indices, const Tensor &base_indices,
               const Tensor &block_indptr, const Tensor &row_indices, const Tensor &tile_ptr, const Tensor &sets,
               const Tensor &col_order, int64_t rows, int64_t cols, const Tensor &x);
std::tuple<Tensor, Tensor> slide_quant_fused(const Tensor &x, int64_t n, ScalarType dtype);
Tensor slide_gemm(const Tensor &lifted, const Tensor &token_scale, const Tensor &packed, const Tensor &scale,
                  int64_t cols, int64_t n, ScalarType out_dtype, const std::optional<Tensor> &bias);

} // namespace macko
