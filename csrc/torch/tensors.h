// What the ops of all formats do with tensors once they are checked: devices, shapes, torch's own product.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "check.h"
#ifdef USE_CUDA
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/accelerator.h>
#endif

namespace macko {

// While it lives, the device of a Tensor is the current one.
struct DeviceOf {
#ifdef USE_CUDA
    explicit DeviceOf(const Tensor &t) : guard(t.get_device_index()) {
    }
    const torch::stable::accelerator::DeviceGuard guard;
#else
    explicit DeviceOf(const Tensor &) {
    }
#endif
};

// torch::stable::new_empty for a call's results: as that goes by the dispatcher's boxed arguments, 1.5 us of the host more.
inline Tensor new_tensor(const Tensor &like, torch::headeronly::IntHeaderOnlyArrayRef sizes, int32_t dtype) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(1, sizes[i]);
    int32_t device_type, device_index;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
    AtenTensorHandle made;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(), dtype,
                                                           device_type, device_index, &made));
    return Tensor(made);
}

// Of the same dtype.
inline Tensor new_tensor(const Tensor &like, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
    int32_t dtype;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
    return new_tensor(like, sizes, dtype);
}

inline Tensor as_contiguous(const Tensor &t) {
    return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// And beginning at a multiple of 16 bytes, as tensors do that are no views.
inline Tensor as_aligned(const Tensor &t_any) {
    const Tensor t = as_contiguous(t_any);
    return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 ? torch::stable::clone(t) : t;
}

inline int64_t num_tokens(const Tensor &x) {
    int64_t tokens = 1;
    for (int64_t i = 0; i + 1 < x.dim(); i++) tokens *= x.size(i);
    return tokens;
}

// The shape of x [..., cols] with another last extent.
inline std::vector<int64_t> with_last(const Tensor &x, int64_t last) {
    std::vector<int64_t> shape;
    for (int64_t i = 0; i + 1 < x.dim(); i++) shape.push_back(x.size(i));
    shape.push_back(last);
    return shape;
}

// x as [tokens, cols].
inline Tensor as_tokens(const Tensor &x) {
    return torch::stable::contiguous(torch::stable::reshape(x, {num_tokens(x), x.size(-1)}));
}

// A bias [rows], once checked, in memory of its own order.
inline std::optional<Tensor> checked_bias(const char *op, const std::optional<Tensor> &bias, const char *like_name,
                                          const Tensor &like, ScalarType dtype, int64_t rows) {
    if (!bias) return std::nullopt;
    check_device(op, "bias", *bias, like_name, like);
    check_dtype(op, "bias", *bias, dtype);
    check_dim(op, "bias", *bias, 1);
    if (bias->numel() != rows) fail(op, "bias has ", bias->numel(), " elements, the matrix has ", rows, " rows");
    return as_contiguous(*bias);
}

// Calls an op of torch that gives a Tensor.
template <typename... Arguments>
Tensor call_op(const char *name, const char *overload, const Arguments &...arguments) {
    std::array<StableIValue, sizeof...(arguments)> stack{torch::stable::detail::from(arguments)...};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
}

#ifdef USE_CUDA
// What a tensor holds, once the kernels before have written it: waits for them.
template <typename T>
T read_back(const Tensor &t) {
    T here;
    const cudaStream_t stream = current_stream(t);
    STD_CUDA_CHECK(cudaMemcpyAsync(&here, t.const_data_ptr(), sizeof here, cudaMemcpyDeviceToHost, stream));
    STD_CUDA_CHECK(cudaStreamSynchronize(stream));
    return here;
}
#endif

inline const void *data_of(const std::optional<Tensor> &t) {
    return t ? t->const_data_ptr() : nullptr;
}

// [begin, begin + count) of a dimension; a call of torch less where that is all of it.
inline Tensor narrowed(const Tensor &t, int64_t dim, int64_t begin, int64_t count) {
    if (count == t.size(dim)) return t;
    Tensor whole = t;
    return torch::stable::narrow(whole, dim, begin, count);
}

inline std::optional<Tensor> narrowed_bias(const std::optional<Tensor> &bias, int64_t begin, int64_t count) {
    if (!bias) return std::nullopt;
    return narrowed(*bias, 0, begin, count);
}

// A tensor for what a check finds, to be written as a macko_fault.
inline Tensor new_fault(const Tensor &like) {
    static_assert(sizeof(macko_fault) == 32, "int64 [4] to Python");
    return torch::stable::new_empty(like, {int64_t(sizeof(macko_fault) / 8)}, ScalarType::Long);
}

inline macko_fault *fault_in(Tensor &t) {
    return writes<macko_fault>(t);
}

#ifdef USE_CUDA
// x as TMA takes it, and kernels that load 16 bytes at a time: rows of 16-byte chunks, stride elements apart.
struct Tokens {
    Tensor x;
    int64_t stride;
};
inline Tokens tokens_of(const Tensor &x_any, int64_t tokens, int64_t cols) {
    const int64_t padding = (8 - cols % 8) % 8;
    const auto is_aligned = [](const Tensor &t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0; };
    if (!padding && x_any.is_contiguous() && is_aligned(x_any))
        return {x_any, cols}; // each reshape is 1 us of the host
    const auto fits = [&](const Tensor &t) {
        return t.stride(1) == 1 && (tokens == 1 || t.stride(0) % 8 == 0) && is_aligned(t) && (tokens > 1 || !padding);
    };
    Tensor x = torch::stable::reshape(x_any, {tokens, cols});
    if (!fits(x)) x = padding ? torch::stable::pad(x, {0, padding}) : torch::stable::contiguous(x);
    if (!padding && !fits(x)) x = torch::stable::clone(x); // contiguous as it came, but not aligned as TMA wants it
    return {x, tokens == 1 ? cols + padding : x.stride(0)};
}

// y [tokens, rows] = x W^T + bias by the library's GEMM, of a dense W; y's rows may lie apart: then y begins as the bias, to
// which the GEMM adds its float32 sums. Where they do not, cuBLASLt's epilogue adds it (of small products cuBLAS splits the
// columns, and may add up the parts in 16 bits if they are to be added to something).
inline void linear_into(Tensor y, const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias) {
    if (bias && !y.is_contiguous()) {
        torch::stable::copy_(y, *bias);
        Tensor turned = w;
        turned = torch::stable::transpose(turned, 0, 1);
        // The dispatcher's stable interface has no way to pass beta and alpha, which are Scalars.
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(y.get(), y.get(), x.get(), turned.get(), 1, 1));
        return;
    }
    call_op("aten::linear", "out", x, w, bias, y);
}
#endif

// x W^T + bias by torch, of a dense W.
inline Tensor dense_linear(const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias) {
#ifdef USE_CUDA
    const Tensor y = torch::stable::new_empty(x, {num_tokens(x), w.size(0)});
    linear_into(y, torch::stable::reshape(x, {num_tokens(x), x.size(-1)}), w, bias);
    return torch::stable::reshape(y, with_last(x, w.size(0)));
#else
    return call_op("aten::linear", "", x, w, bias);
#endif
}

} // namespace macko
