// Checks at the border, in the order device, dtype, shape, layout; each names the argument, what was wanted and what came.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <span>
#include <sstream>
#include <stdexcept>
#include <string>

#include "../core/types.h"
#ifdef USE_CUDA
#include <cuda_runtime_api.h>
#endif

// Newer headers have this name for it, those of torch 2.10 and 2.11 have not.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace macko {

constexpr int64_t INT32_LIMIT = INT32_MAX;

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] void fail(const char *op, const Parts &...parts) {
    std::ostringstream message;
    message << "macko::" << op << ": ";
    (message << ... << parts);
    throw std::runtime_error(message.str());
}

// What a tensor holds, its dtype checked or chosen: to be read, and to be written.
template <typename T>
const T *reads(const Tensor &t) {
    return static_cast<const T *>(t.const_data_ptr());
}
template <typename T>
T *writes(Tensor &t) {
    return static_cast<T *>(t.mutable_data_ptr());
}

inline const char *dtype_name(ScalarType dtype) {
    switch (dtype) {
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    default: return "an unsupported dtype";
    }
}

inline std::string device_name(const Tensor &t) {
    if (t.is_cpu()) return "cpu";
    if (t.is_cuda()) return "cuda:" + std::to_string(t.get_device_index());
    return "another device";
}

inline void check_given(const char *op, const char *name, const Tensor &t) {
    if (!t.defined()) fail(op, name, " is None, expected a Tensor");
}

inline std::string shape_name(const Tensor &t) {
    std::ostringstream out;
    out << '[';
    for (int64_t i = 0; i < t.dim(); i++) out << (i ? ", " : "") << t.size(i);
    out << ']';
    return out.str();
}

inline void check_device(const char *op, const char *name, const Tensor &t, const char *like_name, const Tensor &like) {
    check_given(op, name, t);
    const bool same = t.is_cuda() == like.is_cuda() && t.is_cpu() == like.is_cpu() &&
                      (!t.is_cuda() || t.get_device_index() == like.get_device_index());
    if (!same) fail(op, name, " is on ", device_name(t), ", ", like_name, " is on ", device_name(like));
}

// This library's device: a Tensor of another one can reach a kernel only beside one of ours.
inline void check_backend(const char *op, const char *name, const Tensor &t) {
    check_given(op, name, t);
#ifdef USE_CUDA
    if (!t.is_cuda()) fail(op, name, " is on ", device_name(t), ", expected a CUDA device");
#else
    if (!t.is_cpu()) fail(op, name, " is on ", device_name(t), ", expected the CPU");
#endif
}

inline void check_dtype(const char *op, const char *name, const Tensor &t, ScalarType wanted) {
    if (t.scalar_type() != wanted)
        fail(op, name, " has dtype ", dtype_name(t.scalar_type()), ", expected ", dtype_name(wanted));
}

inline void check_dim(const char *op, const char *name, const Tensor &t, int64_t wanted) {
    if (t.dim() != wanted) fail(op, name, " has shape ", shape_name(t), ", expected ", wanted, " dimension(s)");
}

inline void check_contiguous(const char *op, const char *name, const Tensor &t) {
    if (!t.is_contiguous()) fail(op, name, " of shape ", shape_name(t), " is not contiguous");
}

inline void check_aligned(const char *op, const char *name, const Tensor &t, int64_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(t.const_data_ptr());
    if (address % bytes) fail(op, name, " begins ", address % bytes, " bytes past a multiple of ", bytes);
}

inline void check_last(const char *op, const char *name, const Tensor &t, int64_t cols) {
    if (t.dim() < 1 || t.size(-1) != cols) fail(op, name, " has shape ", shape_name(t), ", expected [..., ", cols, "]");
}

// x [..., cols] for a matrix of which `like` holds the values.
inline void check_tokens(const char *op, const Tensor &x, const char *like_name, const Tensor &like, int64_t cols,
                         const char *name = "x") {
    check_device(op, name, x, like_name, like);
    check_dtype(op, name, x, like.scalar_type());
    check_last(op, name, x, cols);
}

// x [cols] for such a matrix.
inline void check_vector(const char *op, const Tensor &x, const char *like_name, const Tensor &like, int64_t cols,
                         const char *name = "x") {
    check_device(op, name, x, like_name, like);
    check_dtype(op, name, x, like.scalar_type());
    check_dim(op, name, x, 1);
    if (x.numel() != cols) fail(op, name, " has ", x.numel(), " elements, the matrix has ", cols, " columns");
}

// The element type of values, or an error: fp16 and bf16 everywhere, fp32 on the CPU.
inline macko_dtype check_value_dtype(const char *op, const char *name, const Tensor &t) {
    switch (t.scalar_type()) {
    case ScalarType::Half: return MACKO_F16;
    case ScalarType::BFloat16: return MACKO_BF16;
#ifndef USE_CUDA
    case ScalarType::Float: return MACKO_F32;
    default: fail(op, name, " has dtype ", dtype_name(t.scalar_type()), ", expected float16, bfloat16 or float32");
#else
    default: fail(op, name, " has dtype ", dtype_name(t.scalar_type()), ", expected float16 or bfloat16 on CUDA");
#endif
    }
}

// An alignment that kernels on CUDA alone want.
constexpr int64_t on_cuda(int64_t bytes) {
#ifdef USE_CUDA
    return bytes;
#else
    return 1;
#endif
}

// A tensor of a packed weight, and what it has to be; it begins at a multiple of `aligned` bytes.
struct Wanted {
    const char *name;
    const Tensor &t;
    ScalarType dtype; // Undefined: that of values, of which the first tensor is
    int64_t dim, aligned = 1;
};

// All tensors of a packed weight, of which the first is on this library's device. Returns the type of its values.
inline macko_dtype check_kinds(const char *op, std::span<const Wanted> all) {
    check_backend(op, all[0].name, all[0].t);
    for (const Wanted &w : all) check_device(op, w.name, w.t, all[0].name, all[0].t);
    const macko_dtype dtype = check_value_dtype(op, all[0].name, all[0].t);
    for (const Wanted &w : all.subspan(1)) check_dtype(op, w.name, w.t, w.dtype);
    for (const Wanted &w : all) check_dim(op, w.name, w.t, w.dim);
    return dtype;
}

// How they lie in memory, once they have the shapes that they should have.
inline void check_memory(const char *op, std::span<const Wanted> all) {
    for (const Wanted &w : all) check_contiguous(op, w.name, w.t);
    for (const Wanted &w : all)
        if (w.t.numel()) check_aligned(op, w.name, w.t, w.aligned);
}

#ifdef USE_CUDA
inline cudaStream_t current_stream(const Tensor &t) {
    void *stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
    return static_cast<cudaStream_t>(stream);
}
#endif

} // namespace macko
