/*
 * What stands before a product in a decoder, as kernels that let the product start before they have ended (PDL), so that its
 * weights come meanwhile. The next launch on the stream may fetch what the launch before this one wrote only after its own
 * pdl_wait: every product of macko reads nothing but weights before that.
 */
#ifndef MACKO_INPUT_H
#define MACKO_INPUT_H

#include <cuda_runtime_api.h>

#include "../core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y = silu(gate) * up of `count` elements, a multiple of 8; both the silu and the product are rounded, as modules do it. All
 * begin at a multiple of 16 bytes. */
cudaError_t macko_gate_cuda(macko_dtype dtype, int64_t count, const void *gate, const void *up, void *y,
                            cudaStream_t stream);

/* y [tokens, cols] = x / sqrt(mean(x^2) + eps) * weight [cols], by token; x scaled is rounded, and its product with the weight.
 * cols is a multiple of 8; all begin at a multiple of 16 bytes. */
cudaError_t macko_rms_norm_cuda(macko_dtype dtype, int64_t tokens, int64_t cols, const void *x, const void *weight,
                                float eps, void *y, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
