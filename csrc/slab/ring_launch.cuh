// The launch of the kernel of rings (ring_kernel.cuh), of any codec.
#pragma once

#include "multiply.h"
#include "ring_kernel.cuh"

namespace macko {
namespace {

template <class CODEC, class SHAPE>
cudaError_t launch_ring(ring_task<CODEC> &task, const macko_ring_shape &shape, const device_info &device,
                        cudaStream_t stream) {
    if (const cudaError_t error = allow_all_shared_memory<slab_ring_kernel<CODEC, SHAPE>>(device, 100)) return error;
    const bool pdl = device.major >= 9 && may_use_pdl(stream, SHAPE::THREADS);
    return launch_kernel(slab_ring_kernel<CODEC, SHAPE>,
                         {task.shares.blocks * task.token_blocks, SHAPE::THREADS, shape.shared_bytes, pdl}, stream,
                         task);
}

template <macko_ring_kind KIND>
using ring_constant = std::integral_constant<macko_ring_kind, KIND>;

template <class CODEC, int TOKENS>
cudaError_t launch_ring_of(ring_task<CODEC> &task, const macko_ring_shape &shape, const device_info &device,
                           cudaStream_t stream) {
    const auto launch = [&](auto kind) {
        return launch_ring<CODEC, ring_shape<TOKENS, decltype(kind)::value>>(task, shape, device, stream);
    };
    if constexpr (CODEC::HALVES_TO > 0 && TOKENS == MACKO_RING_MOST_TOKENS)
        if (shape.kind == MACKO_RING_TWO_ROWS) return launch(ring_constant<MACKO_RING_TWO_ROWS>());
    if constexpr (CODEC::HALVES_TO > 0)
        if (shape.kind == MACKO_RING_PAIRS) return launch(ring_constant<MACKO_RING_PAIRS>());
    if constexpr (TOKENS > 8)
        if (shape.kind == MACKO_RING_HALVES) return launch(ring_constant<MACKO_RING_HALVES>());
    return launch(ring_constant<MACKO_RING_WIDE>());
}

template <class CODEC>
cudaError_t multiply_ring(const slab_weight<CODEC> &w, const slab_product &p, void *workspace) {
    if (!w.rows || !p.tokens) return cudaSuccess;
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    const int64_t row_blocks = macko_slab_row_blocks(w.rows), slabs = macko_slabs_across(w.cols);
    const macko_ring_problem problem = {
        row_blocks, slabs, p.tokens, w.widest, device.num_sms, ring_shared_bytes(device), CODEC::HALVES_TO > 0};
    macko_ring_shape shape;
    if (!macko_ring_shape_of(&problem, &shape)) return cudaErrorInvalidValue;
    ring_task<CODEC> task = ring_task_of(w);
    task.x = (const uint16_t *)p.x;
    task.x_stride = p.x_stride;
    task.bias = p.bias;
    task.y = p.y;
    task.token_blocks = (int)macko_ring_token_blocks(p.tokens);
    task.shares = macko_ring_shares_of(&problem, &shape);
    const int64_t blocks = (int64_t)task.shares.blocks * task.token_blocks;
    task.partials = (float4 *)workspace;
    task.flags = (uint64_t *)((uint8_t *)workspace + blocks * macko_ring_sums_bytes(&shape));
    task.epoch = ++ring_launches * 0x9e3779b97f4a7c15ull; // what a workspace that nobody has cleared will not hold
    task.tokens = (int)p.tokens;
    task.stages = shape.stages;
    task.stage_bytes = shape.stage_bytes;
    task.x_at = shape.x_at;
    task.slab_bytes = shape.x_at / macko_ring_row_blocks(shape.kind);
    task.last_row_block = (int)row_blocks - 1;
    if (const cudaError_t error = clear_for_initcheck(task.flags, blocks * 8, p.stream)) return error;
    return for_constant<8, 16, 32, 64>(
        shape.tokens, [&](auto tokens) { return launch_ring_of<CODEC, tokens>(task, shape, device, p.stream); });
}

} // namespace

template <class MATRIX>
cudaError_t slab_ring(const MATRIX &m, const slab_product &p, void *workspace) {
    return with_weight(m, [&](const auto &weight) { return multiply_ring(weight, p, workspace); });
}

} // namespace macko
