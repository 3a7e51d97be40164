// What the ops of dense8 and sparse8 check alike: codes that are packed, and scales.
#pragma once

#include "../../torch/packed.h"
#include "../../torch/tensors.h"
#include "bytes.h"

namespace macko {

// Options of pack: the kind of codes, and the type of x and y, as macko_dtype numbers it.
struct ByteOptions {
    macko_byte_kind kind;
    macko_dtype dtype;
    ScalarType type;
};

inline ByteOptions check_codes(const char *op, const Tensor &w, const Ints &options) {
    check_backend(op, "w", w);
    check_dtype(op, "w", w, ScalarType::Byte);
    check_dim(op, "w", w, 2);
    for (const int64_t size : {w.size(0), w.size(1)})
        if (size > INT32_LIMIT)
            fail(op, "w has shape ", shape_name(w), ", expected at most ", INT32_LIMIT, " rows and columns");
    if (options[0] < 0 || options[0] >= MACKO_BYTE_KINDS)
        fail(op, "options[0] is ", options[0], ", expected 0 (e4m3) or 1 (int8)");
    if (options[1] != MACKO_F16 && options[1] != MACKO_BF16)
        fail(op, "options[1] is ", options[1], ", expected 0 (float16) or 1 (bfloat16)");
    return {macko_byte_kind(options[0]), macko_dtype(options[1]),
            options[1] == MACKO_F16 ? ScalarType::Half : ScalarType::BFloat16};
}

inline macko_byte_kind check_kind(const char *op, int64_t kind) {
    if (kind < 0 || kind >= MACKO_BYTE_KINDS) fail(op, "kind is ", kind, ", expected 0 (e4m3) or 1 (int8)");
    return macko_byte_kind(kind);
}

inline const float *check_scales(const char *op, const Tensor &scales, const Tensor &data, int64_t rows) {
    const Wanted all[] = {{"scales", scales, ScalarType::Float, 1, 4}};
    check_device(op, "scales", scales, "data", data);
    check_dtype(op, "scales", scales, ScalarType::Float);
    check_dim(op, "scales", scales, 1);
    if (scales.numel() != rows) fail(op, "scales has ", scales.numel(), " elements, the matrix has ", rows, " rows");
    check_memory(op, all);
    return static_cast<const float *>(scales.const_data_ptr());
}

// Scales of 1, which packing gives: codes are numbers then. On CUDA they are also the kernel behind that which writes the
// weight: a product may read it before the kernel before it has ended (PDL).
inline Tensor scales_of_one(const Tensor &like, int64_t rows) {
    Tensor scales = torch::stable::new_empty(like, {rows}, ScalarType::Float);
    torch::stable::fill_(scales, 1);
    return scales;
}

} // namespace macko
