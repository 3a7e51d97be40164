// The slide format's ops: check, allocate, guard the device, call. Compiled once for the CPU and once for CUDA.
#include <algorithm>
#include <mutex>
#include <vector>

#include "../torch/packed.h"
#include "../torch/tensors.h"
#include "slide.h"
#ifdef USE_CUDA
#include "../core/device.h"
#else
#include "../torch/rows.h"
#endif

namespace macko {

extern const Registered slide_layout;

namespace {

void check_n(const char *op, int64_t n) {
    if (n != 0 && (n < 2 || n > MACKO_SLIDE_MAX_N))
        fail(op, "n is ", n, ", expected 2 to ", int(MACKO_SLIDE_MAX_N), " for the pattern (2n-2):2n, or 0 for dense");
}

void check_cols(const char *op, int64_t cols) {
    if (cols < 0 || cols > MACKO_SLIDE_MAX_COLS)
        fail(op, "cols is ", cols, ", expected 0 to ", int(MACKO_SLIDE_MAX_COLS));
}

macko_slide_type type_of(const char *op, ScalarType dtype) {
    switch (dtype) {
    case ScalarType::Char: return MACKO_SLIDE_S8;
    case ScalarType::Float8_e4m3fn: return MACKO_SLIDE_E4M3;
    case ScalarType::Half: return MACKO_SLIDE_F16;
    case ScalarType::BFloat16: return MACKO_SLIDE_BF16;
    default: fail(op, "dtype is ", dtype_name(dtype), ", expected int8, float8_e4m3fn, float16 or bfloat16");
    }
}

// The type of packed values by its number in a header, which is that of macko_slide_type.
ScalarType element_of(const char *op, int64_t element) {
    constexpr ScalarType ELEMENTS[] = {ScalarType::Char, ScalarType::Float8_e4m3fn, ScalarType::Half,
                                       ScalarType::BFloat16};
    if (element < 0 || element > 3) fail(op, "element is ", element, ", expected 0 to 3");
    return ELEMENTS[element];
}

macko_dtype out_type_of(const char *op, ScalarType dtype) {
    switch (dtype) {
    case ScalarType::Half: return MACKO_F16;
    case ScalarType::BFloat16: return MACKO_BF16;
#ifndef USE_CUDA
    case ScalarType::Float: return MACKO_F32;
#endif
    default: fail(op, "out_dtype is ", dtype_name(dtype), ", expected float16 or bfloat16 (float32 on the CPU)");
    }
}

bool is_8_bit(macko_slide_type type) {
    return macko_slide_element_bytes(type) == 1;
}

// The pattern as people write it: 6:8, or dense.
std::string pattern_name(int64_t n) {
    return n ? std::to_string(2 * n - 2) + ":" + std::to_string(2 * n) : "dense";
}

// The packed weight, once it has passed every check that needs no look at its content. Any content is safe to run.
macko_slide_weight weight_of(const char *op, const Tensor &packed, const Tensor &scale, int64_t cols, int64_t n,
                             ScalarType dtype) {
    check_n(op, n);
    check_cols(op, cols);
    const macko_slide_type type = type_of(op, dtype);
    check_backend(op, "packed", packed);
    check_device(op, "scale", scale, "packed", packed);
    check_dtype(op, "packed", packed, ScalarType::Byte);
    check_dtype(op, "scale", scale, ScalarType::Float);
    check_dim(op, "packed", packed, 3);
    check_dim(op, "scale", scale, 1);
    const int64_t rows = scale.numel(), blocks = macko_slide_row_blocks(rows);
    const int64_t k_tiles = macko_slide_k_tiles(cols, int(n), type), bytes = macko_slide_tile_bytes(int(n), type);
    if (packed.size(0) != blocks || packed.size(1) != k_tiles || packed.size(2) != bytes)
        fail(op, "packed has shape ", shape_name(packed), ", expected [", blocks, ", ", k_tiles, ", ", bytes, "] for ",
             rows, " rows (elements of scale) and ", cols, " columns of ", dtype_name(dtype), ", ", pattern_name(n));
    check_contiguous(op, "packed", packed);
    check_contiguous(op, "scale", scale);
#ifdef USE_CUDA
    check_aligned(op, "packed", packed, 16); // what a bulk copy takes
#endif
    return {{rows, cols, int(n), type}, reads<uint8_t>(packed), reads<float>(scale)};
}

// p[2] is empty and p.number(3), p.number(4) are 0: files have them, of a second weight beside this one.
macko_slide_weight weight_in(const char *op, const Packed &p) {
    const Tensor &tiles = p[0], &scale = p[1];
    if (scale.dim() != 1 || scale.numel() != p.rows())
        fail(op, "scale has shape ", shape_name(scale), ", expected [", p.rows(), "]");
    return weight_of(op, tiles, scale, p.cols(), p.number(0), element_of(op, p.number(1)));
}

#ifdef USE_CUDA
// Compiled for 7.5 the kernels are empty.
void check_gpu(const char *op, const Tensor &on) {
    device_info device{};
    STD_CUDA_CHECK(current_device(&device));
    if (device.major < 8)
        fail(op, "slide needs a GPU of compute capability 8.0 or later, and kernels built for 8.0 or later ",
             "(TORCH_CUDA_ARCH_LIST): ", device_name(on), " lacks one of them");
}
#endif

// Into new tensors lifted [..., depth] and scale [...]. x is contiguous and checked.
std::tuple<Tensor, Tensor> quantise(const char *op, const Tensor &x, macko_dtype dtype, int64_t n, ScalarType to) {
    const macko_slide_type type = type_of(op, to);
    const int64_t cols = x.size(-1), tokens = num_tokens(x);
    const auto shape = with_last(x, macko_slide_depth(cols, int(n)));
    Tensor lifted = torch::stable::new_empty(x, shape, to);
    const std::vector<int64_t> leading(shape.begin(), shape.end() - 1);
    Tensor scale = torch::stable::new_empty(x, leading, ScalarType::Float);
    auto *scales = writes<float>(scale);
#ifdef USE_CUDA
    check_gpu(op, x);
    const cudaError_t status = macko_slide_quant_cuda(x.const_data_ptr(), dtype, tokens, cols, int(n), type,
                                                      lifted.mutable_data_ptr(), scales, current_stream(x));
    if (status == cudaErrorInvalidValue) // a token's codes lie in shared memory
        fail(op, "x has ", cols, " columns, expected no more than fit a block's shared memory on ", device_name(x));
    STD_CUDA_CHECK(status);
#else
    in_parallel(op, tokens, (1 << 15) / std::max<int64_t>(1, cols), [&](int64_t begin, int64_t end) {
        return macko_slide_quant_cpu(x.const_data_ptr(), dtype, cols, int(n), type, begin, end,
                                     lifted.mutable_data_ptr(), scales);
    });
#endif
    return {lifted, scale};
}

// out [..., rows] for the shape of tokens, like x but for the dtype.
Tensor multiply(const char *op, macko_slide_gemm_args args, const Tensor &x, ScalarType dtype) {
    const int64_t rows = args.weight.shape.rows;
    Tensor out = torch::stable::new_empty(x, with_last(x, rows), dtype);
    if (!args.tokens || !rows) return out;
#ifdef USE_CUDA
    check_gpu(op, x);
    // The kernel stores by TMA, 16 bytes aligned: other outputs are cut out of a wider one.
    constexpr int64_t ALIGNED = 8;
    args.out_stride = (rows + ALIGNED - 1) / ALIGNED * ALIGNED;
    const bool cut = args.out_stride != rows;
    if (cut) out = torch::stable::new_empty(x, with_last(x, args.out_stride), dtype);
    args.out = out.mutable_data_ptr();
    int64_t bytes = 0;
    STD_CUDA_CHECK(macko_slide_gemm_workspace(&args, &bytes));
    std::optional<Tensor> workspace;
    if (bytes) {
        workspace = torch::stable::new_empty(out, {bytes}, ScalarType::Byte);
        args.workspace = workspace->mutable_data_ptr();
    }
    const cudaError_t status = macko_slide_gemm_cuda(&args, current_stream(out));
    if (status == cudaErrorNotSupported)
        fail(op, "float8 needs a GPU of compute capability 8.9 or later, and kernels built for 8.9 or later ",
             "(TORCH_CUDA_ARCH_LIST): ", device_name(out), " lacks one of them");
    if (status == cudaErrorSymbolNotFound)
        fail(op, "the kernel needs a driver of CUDA 12.0 or later: this one has no cuTensorMapEncodeTiled");
    STD_CUDA_CHECK(status);
    if (cut) out = torch::stable::contiguous(torch::stable::narrow(out, out.dim() - 1, 0, rows));
#else
    args.out = out.mutable_data_ptr();
    in_parallel(op, rows, 8, [&](int64_t begin, int64_t end) { return macko_slide_gemm_cpu(&args, begin, end); });
#endif
    return out;
}

macko_slide_source source_of(const char *op, const Tensor &w, ScalarType dtype) {
    const bool same = w.scalar_type() == dtype;
    if (same && dtype == ScalarType::Char) return MACKO_SLIDE_FROM_S8;
    if (same && dtype == ScalarType::Float8_e4m3fn) return MACKO_SLIDE_FROM_E4M3;
    const auto source = static_cast<macko_slide_source>(check_value_dtype(op, "w", w));
    if (!same && !is_8_bit(type_of(op, dtype)))
        fail(op, "w has dtype ", dtype_name(w.scalar_type()), ", expected ", dtype_name(dtype),
             ", which is to be kept");
    return source;
}

// options: n, element, source, prune. The header has one number more, of the values that pruning dropped.
Made pack(const Tensor &w_any, const Ints &options) {
    const char *op = "pack";
    const int64_t n = options[0], source_dtype = options[2];
    const ScalarType dtype = element_of(op, options[1]);
    const bool prune = options[3];
    check_n(op, n);
    const macko_slide_type type = type_of(op, dtype);
    check_backend(op, "w", w_any);
    const macko_slide_source source = source_of(op, w_any, dtype);
    check_dim(op, "w", w_any, 2);
    const int64_t rows = w_any.size(0), cols = w_any.size(1);
    check_cols(op, cols);
    if (rows > INT32_LIMIT - MACKO_SLIDE_BLOCK_ROWS) fail(op, "w has ", rows, " rows, expected less than 2^31 - 64");
    const DeviceOf guard(w_any);
    const Tensor w = as_contiguous(w_any);
    const macko_slide_shape shape{rows, cols, int(n), type};
    Tensor packed = torch::stable::new_empty(
        w,
        {macko_slide_row_blocks(rows), macko_slide_k_tiles(cols, int(n), type), macko_slide_tile_bytes(int(n), type)},
        ScalarType::Byte);
    Tensor scale = torch::stable::new_empty(w, {rows}, ScalarType::Float);
    int64_t dropped = 0;
    auto *bytes = writes<uint8_t>(packed);
    auto *scales = writes<float>(scale);
    macko_slide_found first{-1, -1, 0, 0};
#ifdef USE_CUDA
    Tensor counts = torch::stable::new_zeros(w, {2}, ScalarType::Long);
    STD_CUDA_CHECK(macko_slide_pack_cuda(&shape, w.const_data_ptr(), source, prune, bytes, scales,
                                         writes<int64_t>(counts), current_stream(w)));
    const auto found = read_back<std::array<int64_t, 2>>(counts); // whether w fits its pattern decides the outcome
    const int64_t groups = n ? macko_slide_groups(cols, int(n)) : 0;
    const int64_t key = INT64_MAX - found[1];
    dropped = found[0];
    if (found[1]) first = {(key >> 8) / groups, (key >> 8) % groups, key & 255, found[0]};
#else
    std::mutex mutex;
    in_parallel(op, macko_slide_row_blocks(rows), 1, [&](int64_t begin, int64_t end) {
        macko_slide_found found;
        const int64_t last = std::min(rows, end * MACKO_SLIDE_BLOCK_ROWS);
        if (macko_slide_pack_cpu(&shape, w.const_data_ptr(), source, prune, begin * MACKO_SLIDE_BLOCK_ROWS, last, bytes,
                                 scales, &found))
            return -1;
        const std::lock_guard<std::mutex> lock(mutex);
        dropped += found.dropped;
        if (found.row >= 0 && (first.row < 0 || found.row < first.row)) first = found;
        return 0;
    });
#endif
    if (first.row >= 0 && !prune)
        fail(op, "w does not fit the pattern ", pattern_name(n), ": row ", first.row, ", group ", first.group,
             " (columns ", first.group * 2 * n, " to ", first.group * 2 * n + 2 * n - 1, ") has ", first.count,
             " non-zeros, expected at most ", 2 * n - 2);
    return {{packed, scale, torch::stable::new_empty(packed, {0, 0, 0})},
            {slide_layout.number, rows, cols, n, options[1], source_dtype, 0, 0, dropped}};
}

// The codes: the weight itself for 16-bit types, the weight over scale for 8-bit ones.
Tensor dense(const Packed &p, bool) {
    const char *op = "dense";
    const Tensor &packed = p[0];
    const int64_t cols = p.cols();
    const ScalarType dtype = element_of(op, p.number(1));
    const macko_slide_weight weight = weight_in(op, p);
    const int64_t rows = weight.shape.rows;
    const DeviceOf guard(packed);
    Tensor codes = torch::stable::new_empty(packed, {rows, cols}, dtype);
#ifdef USE_CUDA
    STD_CUDA_CHECK(macko_slide_unpack_cuda(&weight, codes.mutable_data_ptr(), current_stream(packed)));
#else
    in_parallel(op, rows, (1 << 15) / std::max<int64_t>(1, cols), [&](int64_t begin, int64_t end) {
        macko_slide_unpack_cpu(&weight, begin, end, codes.mutable_data_ptr());
        return 0;
    });
#endif
    return codes;
}

Tensor linear(const Packed &p, const Tensor &x_any, const std::optional<Tensor> &bias_any) {
    const Tensor &packed = p[0];
    const char *op = "linear";
    const int64_t cols = p.cols(), n = p.number(0);
    const ScalarType dtype = element_of(op, p.number(1));
    const int64_t tokens = num_tokens(x_any);
    const macko_slide_weight weight = weight_in(op, p);
    check_device(op, "x", x_any, "tiles", packed);
    const macko_dtype from = check_value_dtype(op, "x", x_any);
    if (!is_8_bit(weight.shape.type)) check_dtype(op, "x", x_any, dtype);
    check_last(op, "x", x_any, cols);
    if (tokens > INT32_LIMIT) fail(op, "x has ", tokens, " tokens, expected less than 2^31");
    const auto bias = checked_bias(op, bias_any, "tiles", packed, x_any.scalar_type(), weight.shape.rows);
    const DeviceOf guard(packed);
    const Tensor x = as_contiguous(x_any);
    macko_slide_gemm_args args{weight, x.const_data_ptr(), nullptr, data_of(bias), nullptr, tokens, from, cols, 0, 0,
                               nullptr};
    // Plain 2:4 and dense 16-bit weights take x as it is, where its rows are what the kernel can read.
    const bool as_is = !is_8_bit(weight.shape.type) && (n == 0 || n == 2) &&
                       (cols == macko_slide_depth(cols, int(n)) || (x.is_cuda() && cols >= 8 && cols % 8 == 0)) &&
                       reinterpret_cast<uintptr_t>(args.lifted) % 16 == 0;
    std::optional<std::tuple<Tensor, Tensor>> lifted;
    if (!as_is) {
        lifted = quantise(op, x, from, n, dtype);
        args.lifted = std::get<0>(*lifted).const_data_ptr();
        args.token_scale = reads<float>(std::get<1>(*lifted));
        args.lifted_cols = macko_slide_depth(cols, int(n));
        args.follows_quantiser = tokens > 0;
    }
    return multiply(op, args, x, x.scalar_type());
}

} // namespace

std::tuple<Tensor, Tensor> slide_quant_fused(const Tensor &x_any, int64_t n, ScalarType dtype) {
    const char *op = "slide_quant_fused";
    check_n(op, n);
    const macko_slide_type type = type_of(op, dtype);
    check_backend(op, "x", x_any);
    const macko_dtype from = check_value_dtype(op, "x", x_any);
    if (!is_8_bit(type)) check_dtype(op, "x", x_any, dtype);
    if (x_any.dim() < 1) fail(op, "x has shape [], expected [..., cols]");
    check_cols(op, x_any.size(-1));
    const DeviceOf guard(x_any);
    return quantise(op, as_contiguous(x_any), from, n, dtype);
}

Tensor slide_gemm(const Tensor &lifted_any, const Tensor &token_scale_any, const Tensor &packed, const Tensor &scale,
                  int64_t cols, int64_t n, ScalarType out_dtype, const std::optional<Tensor> &bias_any) {
    const char *op = "slide_gemm";
    const macko_slide_weight weight = weight_of(op, packed, scale, cols, n, lifted_any.scalar_type());
    const int64_t depth = macko_slide_depth(cols, int(n));
    check_device(op, "lifted", lifted_any, "packed", packed);
    check_device(op, "token_scale", token_scale_any, "packed", packed);
    check_dtype(op, "token_scale", token_scale_any, ScalarType::Float);
    check_last(op, "lifted", lifted_any, depth);
    const int64_t tokens = num_tokens(lifted_any);
    if (token_scale_any.numel() != tokens)
        fail(op, "token_scale has ", token_scale_any.numel(), " elements, lifted has ", tokens, " tokens");
    if (tokens > INT32_LIMIT) fail(op, "lifted has ", tokens, " tokens, expected less than 2^31");
    const macko_dtype to = out_type_of(op, out_dtype);
    const auto bias = checked_bias(op, bias_any, "packed", packed, out_dtype, weight.shape.rows);
    const DeviceOf guard(packed);
    const Tensor lifted = as_contiguous(lifted_any), token_scale = as_contiguous(token_scale_any);
    return multiply(op,
                    {weight, lifted.const_data_ptr(), reads<float>(token_scale), data_of(bias), nullptr, tokens, to,
                     depth, 0, 0, nullptr},
                    lifted, out_dtype);
}

const Registered slide_layout({.name = "slide",
                               .number = 5,
                               .tensors = 3,
                               .numbers = 5,
                               .pack_options = 4,
                               .pack = pack,
                               .dense = dense,
                               .linear = linear});

} // namespace macko
