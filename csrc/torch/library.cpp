// The map: every op, its schema and who implements it. Compiled once for the CPU and once for CUDA (USE_CUDA).
#include "../bitmap/ops.h"
#include "../ec/ops.h"
#include "../macko/ops.h"
#include "../sell/ops.h"
#include "../slide/ops.h"
#include "../tile/ops.h"

// clang-format off
#define MACKO_OPS(OP) \
    /* csrc/macko: the canonical format */ \
    OP(pack, "(Tensor w, int delta_bits=4) -> (Tensor, Tensor, Tensor)") \
    OP(unpack, "(Tensor values, Tensor deltas, Tensor row_ptr, int cols, int delta_bits=4, bool check=True) -> Tensor") \
    OP(check, "(Tensor values, Tensor deltas, Tensor row_ptr, int cols, int delta_bits=4) -> Tensor") \
    OP(spmv, "(Tensor values, Tensor deltas, Tensor row_ptr, int cols, Tensor x, int delta_bits=4) -> Tensor") \
    OP(linear, "(Tensor x, Tensor values, Tensor deltas, Tensor row_ptr, int cols, Tensor? bias=None, int delta_bits=4) -> Tensor") \
    /* csrc/tile: the layout of a GPU for batches */ \
    OP(tile_pack, "(Tensor values, Tensor deltas, Tensor row_ptr, int cols, int delta_bits=4) -> (Tensor, Tensor, int, int)") \
    OP(tile_unpack, "(Tensor data, Tensor offsets, int rows, int cols, int widest) -> Tensor") \
    OP(tile_check, "(Tensor data, Tensor offsets, int rows, int cols, int widest) -> Tensor") \
    OP(tile_linear, "(Tensor x, Tensor data, Tensor offsets, int rows, int cols, int widest, Tensor? bias=None) -> Tensor") \
    /* csrc/ec: EC-CSR */ \
    OP(ec_pack, "(Tensor w, int delta_bits=4, int lanes=32, int max_height=16, int min_width=128, int max_width=8192, int tile_rows=128, int max_slabs=1) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)") \
    OP(ec_unpack, "(Tensor block_values, Tensor delta_indices, Tensor base_indices, Tensor block_indptr, Tensor row_indices, Tensor tile_ptr, Tensor sets, Tensor col_order, int rows, int cols) -> Tensor") \
    OP(ec_check, "(Tensor block_values, Tensor delta_indices, Tensor base_indices, Tensor block_indptr, Tensor row_indices, Tensor tile_ptr, Tensor sets, Tensor col_order, int rows, int cols) -> Tensor") \
    OP(ec_spmv, "(Tensor block_values, Tensor delta_indices, Tensor base_indices, Tensor block_indptr, Tensor row_indices, Tensor tile_ptr, Tensor sets, Tensor col_order, int rows, int cols, Tensor x) -> Tensor") \
    OP(ec_linear, "(Tensor x, Tensor block_values, Tensor delta_indices, Tensor base_indices, Tensor block_indptr, Tensor row_indices, Tensor tile_ptr, Tensor sets, Tensor col_order, int rows, int cols, Tensor? bias=None) -> Tensor") \
    /* csrc/slide: (2n-2):2n patterns on 2:4 tensor cores, and their dense twin (n = 0) */ \
    OP(slide_pack, "(Tensor w, int n, ScalarType dtype, bool prune=False) -> (Tensor, Tensor, Tensor)") \
    OP(slide_unpack, "(Tensor packed, Tensor scale, int cols, int n, ScalarType dtype) -> Tensor") \
    OP(slide_quant_fused, "(Tensor x, int n, ScalarType dtype) -> (Tensor, Tensor)") \
    OP(slide_gemm, "(Tensor lifted, Tensor token_scale, Tensor packed, Tensor scale, int cols, int n, ScalarType out_dtype, Tensor? bias=None) -> Tensor") \
    OP(slide_linear, "(Tensor x, Tensor packed, Tensor scale, int cols, int n, ScalarType dtype, Tensor? bias=None, Tensor? dense=None, int sparse_from=0, int sparse_to=0) -> Tensor")

#define MACKO_CPU_OPS(OP) \
    /* csrc/bitmap: the execution layout of a CPU */ \
    OP(bitmap_pack, "(Tensor values, Tensor deltas, Tensor row_ptr, int cols, int delta_bits=4) -> (Tensor, Tensor, Tensor)") \
    OP(bitmap_unpack, "(Tensor values, Tensor bits, Tensor row_ptr, int cols) -> Tensor") \
    OP(bitmap_check, "(Tensor values, Tensor bits, Tensor row_ptr, int cols) -> Tensor") \
    OP(bitmap_spmv, "(Tensor values, Tensor bits, Tensor row_ptr, int cols, Tensor x) -> Tensor") \
    OP(bitmap_linear, "(Tensor x, Tensor values, Tensor bits, Tensor row_ptr, int cols, Tensor? bias=None) -> Tensor")

#define MACKO_CUDA_OPS(OP) \
    /* csrc/sell: the execution layout of a GPU */ \
    OP(sell_pack, "(Tensor values, Tensor deltas, Tensor row_ptr, int cols, int delta_bits=4, int gap_bits=0, int warps=0, int blocks=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int, int)") \
    OP(sell_unpack, "(Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head) -> Tensor") \
    OP(sell_spmv, "(Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head, Tensor x, Tensor? bias=None) -> Tensor") \
    OP(sell_spmm, "(Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head, Tensor x, Tensor? bias=None) -> Tensor") \
    OP(sell_norm_linear, "(Tensor x, Tensor weight, float eps, Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head, Tensor? bias=None) -> Tensor") \
    OP(sell_gated_linear, "(Tensor gate, Tensor up, Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head, Tensor? bias=None) -> Tensor") \
    OP(sell_linear, "(Tensor x, Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head, Tensor? bias=None) -> Tensor") \
    OP(sell_linear_parts, "(Tensor x, Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head, int[] part_rows) -> Tensor[]") \
    OP(tile_linear_parts, "(Tensor x, Tensor data, Tensor offsets, int rows, int cols, int widest, int[] part_rows) -> Tensor[]")

#define DEFINE(name, schema) m.def(#name schema);
#define IMPLEMENT(name, schema) m.impl(#name, TORCH_BOX(&macko::name));

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(macko, CUDA, m) { MACKO_OPS(IMPLEMENT) MACKO_CUDA_OPS(IMPLEMENT) }
#else
STABLE_TORCH_LIBRARY(macko, m) { MACKO_OPS(DEFINE) MACKO_CPU_OPS(DEFINE) MACKO_CUDA_OPS(DEFINE) }
STABLE_TORCH_LIBRARY_IMPL(macko, CPU, m) { MACKO_OPS(IMPLEMENT) MACKO_CPU_OPS(IMPLEMENT) }
#endif
