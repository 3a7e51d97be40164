/*
 * What stands before a product in a decoder, as kernels that let the product start before they have ended (PDL), so that its
 * weights come meanwhile. The next launch on the stream may fetch what the launch before this one wrote only after its own
 * pdl_wait: every product of macko reads nothing but weights before that, and in gated_experts what the launch before that one
 * found complete.
 */
#pragma once

#include <cuda_runtime_api.h>

#include "../core/types.h"

MACKO_C_BEGIN

/* y [tokens, cols] = silu(gate) * up; both the silu and the product are rounded, as modules do it. Rows of gate and up lie
 * gate_stride and up_stride elements apart: they may be halves of one merged product. cols and strides are multiples of 8; all
 * begin at a multiple of 16 bytes. */
cudaError_t macko_gate_cuda(macko_dtype dtype, int64_t tokens, int64_t cols, const void *gate, int64_t gate_stride,
                            const void *up, int64_t up_stride, void *y, cudaStream_t stream);

/* y [tokens, cols] = x / sqrt(mean(x^2) + eps) * weight [cols], by token; x scaled is rounded, and its product with the weight.
 * Where `other` [tokens, cols] is not null x + other, rounded, is what is normed, and goes to `sum`. cols is a multiple of 8;
 * all begin at a multiple of 16 bytes. */
cudaError_t macko_rms_norm_cuda(macko_dtype dtype, int64_t tokens, int64_t cols, const void *x, const void *other,
                                const void *weight, float eps, void *y, void *sum, cudaStream_t stream);

MACKO_C_END
