// The map: every op, the files of csrc/ that do its work, and its schema. The op itself (checks, memory, which path) is the
// function of its name in its folder's ops.cpp. Compiled once for the CPU and once for CUDA (USE_CUDA).
#include "../bitmap/ops.h"
#include "../ec/ops.h"
#include "../macko/ops.h"
#include "../sell/ops.h"
#include "../slide/ops.h"
#include "../tile/ops.h"

// clang-format off
#define MACKO_OPS(OP) \
    /* csrc/macko: the canonical format */ \
    OP(pack, /* macko/pack_{cpu.c,cuda.cu} */ \
       "(Tensor w, int delta_bits=4) -> (Tensor, Tensor, Tensor)") \
    OP(unpack, /* macko/pack_{cpu.c,cuda.cu} */ \
       "(Tensor values, Tensor deltas, Tensor row_ptr, int cols, int delta_bits=4, bool check=True) -> Tensor") \
    OP(check, /* macko/pack_{cpu.c,cuda.cu} */ \
       "(Tensor values, Tensor deltas, Tensor row_ptr, int cols, int delta_bits=4) -> Tensor") \
    OP(spmv, /* macko/spmv_{cpu.c,cuda.cu} */ \
       "(Tensor values, Tensor deltas, Tensor row_ptr, int cols, Tensor x, int delta_bits=4) -> Tensor") \
    OP(linear, /* a token: spmv; more: unpack, by torch/rows.h or torch/dense_rows.h */ \
       "(Tensor x, Tensor values, Tensor deltas, Tensor row_ptr, int cols, Tensor? bias=None, int delta_bits=4) -> Tensor") \
    /* csrc/tile: the execution layout of a GPU for batches; the CPU packs and unpacks it */ \
    OP(tile_pack, /* tile/pack_{cpu.c,cuda.cu} */ \
       "(Tensor values, Tensor deltas, Tensor row_ptr, int cols, int delta_bits=4) -> (Tensor, Tensor, int, int)") \
    OP(tile_unpack, /* tile/pack_{cpu.c,cuda.cu} */ \
       "(Tensor data, Tensor offsets, int rows, int cols, int widest) -> Tensor") \
    OP(tile_check, /* tile/pack_cpu.c, for both */ \
       "(Tensor data, Tensor offsets, int rows, int cols, int widest) -> Tensor") \
    OP(tile_linear, /* tile/{mm,gemm}_cuda.cu; else unpack, by torch/rows.h or torch/dense_rows.h */ \
       "(Tensor x, Tensor data, Tensor offsets, int rows, int cols, int widest, Tensor? bias=None) -> Tensor") \
    /* csrc/ec: EC-CSR */ \
    OP(ec_pack, /* ec/{extract,pack}_cpu.c, ec/pack_cuda.cu */ \
       "(Tensor w, int delta_bits=4, int lanes=32, int max_height=16, int min_width=128, int max_width=8192, int tile_rows=128, int max_slabs=1) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)") \
    OP(ec_unpack, /* ec/pack_{cpu.c,cuda.cu} */ \
       "(Tensor block_values, Tensor delta_indices, Tensor base_indices, Tensor block_indptr, Tensor row_indices, Tensor tile_ptr, Tensor sets, Tensor col_order, int rows, int cols) -> Tensor") \
    OP(ec_check, /* ec/pack_cpu.c, for both */ \
       "(Tensor block_values, Tensor delta_indices, Tensor base_indices, Tensor block_indptr, Tensor row_indices, Tensor tile_ptr, Tensor sets, Tensor col_order, int rows, int cols) -> Tensor") \
    OP(ec_spmv, /* ec/spmv_{cpu.c,cuda.cu} */ \
       "(Tensor block_values, Tensor delta_indices, Tensor base_indices, Tensor block_indptr, Tensor row_indices, Tensor tile_ptr, Tensor sets, Tensor col_order, int rows, int cols, Tensor x) -> Tensor") \
    OP(ec_linear, /* a token: ec_spmv; more: ec_unpack, the whole weight */ \
       "(Tensor x, Tensor block_values, Tensor delta_indices, Tensor base_indices, Tensor block_indptr, Tensor row_indices, Tensor tile_ptr, Tensor sets, Tensor col_order, int rows, int cols, Tensor? bias=None) -> Tensor") \
    /* csrc/slide: (2n-2):2n patterns on 2:4 tensor cores, and their dense twin (n = 0) */ \
    OP(slide_pack, /* slide/pack_{cpu.c,cuda.cu} */ \
       "(Tensor w, int n, ScalarType dtype, bool prune=False) -> (Tensor, Tensor, Tensor)") \
    OP(slide_unpack, /* slide/pack_{cpu.c,cuda.cu} */ \
       "(Tensor packed, Tensor scale, int cols, int n, ScalarType dtype) -> Tensor") \
    OP(slide_quant_fused, /* slide/quant_{cpu.c,cuda.cu} */ \
       "(Tensor x, int n, ScalarType dtype) -> (Tensor, Tensor)") \
    OP(slide_gemm, /* slide/gemm_cpu.c, slide/gemm_cuda.cuh (sm_90), slide/gemm_mma_cuda.cu */ \
       "(Tensor lifted, Tensor token_scale, Tensor packed, Tensor scale, int cols, int n, ScalarType out_dtype, Tensor? bias=None) -> Tensor") \
    OP(slide_linear, /* slide_quant_fused, slide_gemm */ \
       "(Tensor x, Tensor packed, Tensor scale, int cols, int n, ScalarType dtype, Tensor? bias=None, Tensor? dense=None, int sparse_from=0, int sparse_to=0) -> Tensor")

#define MACKO_CPU_OPS(OP) \
    /* csrc/bitmap: the execution layout of a CPU */ \
    OP(bitmap_pack, /* bitmap/pack_cpu.c */ \
       "(Tensor values, Tensor deltas, Tensor row_ptr, int cols, int delta_bits=4) -> (Tensor, Tensor, Tensor)") \
    OP(bitmap_to_macko, /* bitmap/pack_cpu.c */ \
       "(Tensor values, Tensor bits, Tensor row_ptr, int cols, int delta_bits=4) -> (Tensor, Tensor, Tensor)") \
    OP(bitmap_unpack, /* bitmap/pack_cpu.c */ \
       "(Tensor values, Tensor bits, Tensor row_ptr, int cols) -> Tensor") \
    OP(bitmap_check, /* bitmap/pack_cpu.c */ \
       "(Tensor values, Tensor bits, Tensor row_ptr, int cols) -> Tensor") \
    OP(bitmap_spmv, /* bitmap/spmv_cpu.c */ \
       "(Tensor values, Tensor bits, Tensor row_ptr, int cols, Tensor x) -> Tensor") \
    OP(bitmap_linear, /* few tokens: bitmap/spmv_cpu.c; more: bitmap/spmm_cpu.c */ \
       "(Tensor x, Tensor values, Tensor bits, Tensor row_ptr, int cols, Tensor? bias=None) -> Tensor")

#define MACKO_CUDA_OPS(OP) \
    /* csrc/sell: the execution layout of a GPU for one token and few */ \
    OP(sell_pack, /* sell/pack_cuda.cu */ \
       "(Tensor values, Tensor deltas, Tensor row_ptr, int cols, int delta_bits=4, int gap_bits=0, int warps=0, int blocks=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int, int)") \
    OP(sell_unpack, /* sell/unpack_cuda.cu */ \
       "(Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head) -> Tensor") \
    OP(sell_spmv, /* sell/spmv_cuda.cu */ \
       "(Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head, Tensor x, Tensor? bias=None) -> Tensor") \
    OP(sell_spmm, /* sell/spmm_cuda.cu */ \
       "(Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head, Tensor x, Tensor? bias=None) -> Tensor") \
    OP(sell_norm_linear, /* sell/spmv_cuda.cu */ \
       "(Tensor x, Tensor weight, float eps, Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head, Tensor? bias=None) -> Tensor") \
    OP(sell_gated_linear, /* sell/spmv_cuda.cu */ \
       "(Tensor gate, Tensor up, Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head, Tensor? bias=None) -> Tensor") \
    OP(sell_linear, /* few tokens: sell_spmv, sell_spmm; more: sell_unpack, by torch/dense_rows.h */ \
       "(Tensor x, Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head, Tensor? bias=None) -> Tensor") \
    OP(sell_linear_parts, /* sell_unpack, by torch/dense_rows.h */ \
       "(Tensor x, Tensor data, Tensor bases, Tensor blocks, Tensor perm, int cols, int gap_bits, int warps, int head, int[] part_rows) -> Tensor[]") \
    /* csrc/tile */ \
    OP(tile_linear_parts, /* as tile_linear, a product for each part */ \
       "(Tensor x, Tensor data, Tensor offsets, int rows, int cols, int widest, int[] part_rows) -> Tensor[]")

#define DEFINE(name, schema) m.def(#name schema);
#define IMPLEMENT(name, schema) m.impl(#name, TORCH_BOX(&macko::name));

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(macko, CUDA, m) { MACKO_OPS(IMPLEMENT) MACKO_CUDA_OPS(IMPLEMENT) }
#else
STABLE_TORCH_LIBRARY(macko, m) { MACKO_OPS(DEFINE) MACKO_CPU_OPS(DEFINE) MACKO_CUDA_OPS(DEFINE) }
STABLE_TORCH_LIBRARY_IMPL(macko, CPU, m) { MACKO_OPS(IMPLEMENT) MACKO_CPU_OPS(IMPLEMENT) }
#endif
