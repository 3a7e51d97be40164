// What the ops of dense8 and sparse8 check alike: codes that are packed, and scales.
#pragma once

#include "../../slab/pack.h"
#include "bytes.h"

namespace macko {

// Of codes w [rows, cols]. Options: the kind of codes, and the type of x and y, as macko_dtype numbers it.
template <typename Kind>
Slabs pack_codes(const Tensor &w_any, const Ints &options, typename Kind::Matrix &m) {
    const char *op = "pack";
    check_backend(op, "w", w_any);
    check_dtype(op, "w", w_any, ScalarType::Byte);
    check_extents(op, w_any);
    if (options[0] < 0 || options[0] >= MACKO_BYTE_KINDS)
        fail(op, "options[0] is ", options[0], ", expected 0 (e4m3) or 1 (int8)");
    if (options[1] != MACKO_F16 && options[1] != MACKO_BF16)
        fail(op, "options[1] is ", options[1], ", expected 0 (float16) or 1 (bfloat16)");
    m.kind = macko_byte_kind(options[0]);
    m.dtype = macko_dtype(options[1]);
    const DeviceOf guard(w_any);
    const Tensor w = as_contiguous(w_any);
    m.rows = w.size(0);
    m.cols = w.size(1);
    return pack_slabs<Kind>(op, m, TensorRows<uint8_t>{w});
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

// Scales of 1, which packing gives: codes are numbers then.
inline Tensor scales_of_one(const Tensor &like, int64_t rows) {
    Tensor scales = torch::stable::new_empty(like, {rows}, ScalarType::Float);
    torch::stable::fill_(scales, 1);
    return scales;
}

} // namespace macko
