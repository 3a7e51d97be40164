// Many tokens on CUDA (sm_90a): the plan for a device, kept for the next time, and the launch, of any codec.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>

#include "many_kernel.cuh"
#include "multiply.h"

namespace macko {

// Of all sources' launches: no two have the same epoch.
inline std::atomic<uint64_t> many_launches;

namespace {

// body(index, shape) for each shape that is compiled for a codec; its index is that of MACKO_SLAB_MANY_SHAPES.
template <class CODEC, class BODY>
void for_shapes(const BODY &body) {
    int index = 0;
#define MACKO_SLAB_SHAPE(tokens, row_blocks, split_k)                                                                  \
    if constexpr (CODEC::takes({tokens, row_blocks, split_k})) body(index, many_shape<tokens, row_blocks, split_k>()); \
    index++;
    MACKO_SLAB_MANY_SHAPES(MACKO_SLAB_SHAPE)
#undef MACKO_SLAB_SHAPE
}

inline bool fits(macko_slab_many_shape shape, int widest, const device_info &device) {
    macko_slab_many_stages stages;
    return macko_slab_many_fit_stages(shape, widest, device.shared_bytes, &stages);
}

// How many clusters of each shape run at once. Each block takes an SM.
template <class CODEC>
cudaError_t find_clusters(int widest, const device_info &device, macko_slab_many_problem *problem) {
    cudaError_t error = cudaSuccess;
    for_shapes<CODEC>([&](int index, auto shape) {
        using SHAPE = decltype(shape);
        constexpr auto KERNEL = slab_many_kernel<CODEC, SHAPE>;
        if (!error) error = allow_all_shared_memory<KERNEL>(device);
        if (!error && fits(SHAPE::plain(), widest, device))
            error = max_active_clusters<KERNEL, SHAPE::CLUSTER>(device, SHAPE::CLUSTER, SHAPE::THREADS,
                                                                device.shared_bytes - 1024, &problem->clusters[index]);
    });
    return error;
}

template <class CODEC>
struct many_args {
    const slab_weight<CODEC> &weight;
    const slab_product &product;
    const macko_slab_many_plan &plan;
    void *workspace;
};

template <class CODEC, class SHAPE>
cudaError_t launch(const many_args<CODEC> &args, const device_info &device) {
    const slab_weight<CODEC> &m = args.weight;
    const macko_slab_many_plan &plan = args.plan;
    const slab_product &p = args.product;
    many_task<CODEC> task{};
    task.data = m.data;
    task.offsets = m.offsets;
    task.bias = p.bias;
    task.outputs = p.y;
    for (const macko_slab_output &output : p.y.output) task.plain |= output.rows % 8 || (uintptr_t)output.y % 16;
    task.rows = m.rows;
    task.tokens = (int)p.tokens;
    task.schedule = plan.schedule;
    task.units = (int)std::min<int64_t>(m.units, INT32_MAX);
    task.mean = (float)m.units / macko_slab_count(m.rows, m.cols);
    task.slab_units = m.widest;
    task.weights = m.constants;
    const int64_t flag_bytes = macko_slab_many_flag_bytes(SHAPE::plain(), plan.schedule.clusters);
    task.flags = (uint64_t *)args.workspace;
    task.partials = (float4 *)((uint8_t *)args.workspace + flag_bytes);
    // What a workspace that nobody has cleared will not hold.
    task.epoch = ++many_launches * 0x9e3779b97f4a7c15ull;
    if (!macko_slab_many_fit_stages(SHAPE::plain(), m.widest, device.shared_bytes, &task.stages))
        return cudaErrorInvalidValue;
    // A box that reaches beyond the last token takes longer, so the last ones have another (H200: clearly).
    task.last_tokens = (int)(p.tokens - (plan.schedule.token_tiles - 1) * (int64_t)SHAPE::TOKENS);
    const auto map_tokens = [&](CUtensorMap *map, int box) {
        return sm90::make_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, p.x, m.cols, p.tokens, p.x_stride * 2,
                                     MACKO_SLAB_TILE_COLS, box);
    };
    cudaError_t error = map_tokens(&task.x, SHAPE::BOX);
    task.last_x = task.x;
    if (const int last_box = task.last_tokens % SHAPE::BOX; !error && last_box)
        error = map_tokens(&task.last_x, last_box);
    for (int i = 0; i < MACKO_SLAB_MOST_OUTPUTS && p.y.output[i].rows && !task.plain && !error; i++) {
        const macko_slab_output &output = p.y.output[i];
        error = sm90::make_tensor_map(&task.y[i], CU_TENSOR_MAP_DATA_TYPE_UINT16, (uint16_t *)output.y + p.y.begins[i],
                                      output.rows, p.tokens, output.rows * 2, MACKO_SLAB_ROWS, SHAPE::OUT_BOX);
    }
    if (!error && plan.workspace_bytes) error = clear_for_initcheck(task.flags, flag_bytes, p.stream);
    if (error) return error;
    return launch_clusters<SHAPE>(slab_many_kernel<CODEC, SHAPE>, task, plan.schedule.clusters, task.stages, p.stream);
}

template <class CODEC>
cudaError_t run(const many_args<CODEC> &args, const device_info &device) {
    cudaError_t error = cudaErrorInvalidValue;
    const macko_slab_many_shape wanted = args.plan.shape;
    for_shapes<CODEC>([&](int, auto shape) {
        using SHAPE = decltype(shape);
        if (wanted.tokens == SHAPE::TOKENS && wanted.row_blocks == SHAPE::ROW_BLOCKS &&
            wanted.split_k == SHAPE::SPLIT_K)
            error = launch<CODEC, SHAPE>(args, device);
    });
    return error;
}

template <class CODEC>
cudaError_t plan_many(const slab_weight<CODEC> &weight, int64_t tokens, macko_slab_many_plan *plan) {
    const int64_t rows = weight.rows, cols = weight.cols;
    const int widest = weight.widest;
    *plan = {};
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    const int *forced = macko_knob(MACKO_KNOB_TILE_GEMM); // taken where it can be
    // A plan takes longer than a launch, so plans are kept: a model asks for the same ones again and again.
    constexpr size_t MOST = 4096;
    constexpr int UNIT = MACKO_SLAB_MANY_TOKENS_UNIT;
    static std::mutex mutex;
    static std::map<std::array<int64_t, 6>, macko_slab_many_plan> plans;
    int64_t fitting = 0; // which shapes: all that a plan depends on of the largest slab
    for_shapes<CODEC>([&](int, auto shape) { fitting = fitting * 2 + fits(decltype(shape)::plain(), widest, device); });
    // What it depends on: of the tokens, how many units they fill.
    const std::array<int64_t, 6> key = {device.index, device.num_sms, macko_slab_row_blocks(rows),
                                        cols,         fitting,        ceil_div(tokens, UNIT)};
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = plans.find(key); !forced && found != plans.end()) {
        *plan = found->second;
        return cudaSuccess;
    }
    macko_slab_many_problem problem = {rows, cols, tokens, {}, CODEC::READS_AHEAD};
    if (const cudaError_t failed = find_clusters<CODEC>(widest, device, &problem)) return failed;
    if (forced) {
        const macko_slab_many_way way = {forced[0], forced[1], forced[2], forced[3]};
        if (macko_slab_many_choose(&problem, &way, plan)) return cudaSuccess;
    }
    if (!macko_slab_many_choose(&problem, nullptr, plan)) return cudaErrorInvalidValue;
    if (plans.size() >= MOST) plans.clear();
    plans[key] = *plan;
    return cudaSuccess;
}

} // namespace

template <class MATRIX>
cudaError_t slab_many_plan(const MATRIX &m, int64_t tokens, macko_slab_many_plan *plan) {
    return with_weight(m, [&](const auto &weight) { return plan_many(weight, tokens, plan); });
}

template <class MATRIX>
cudaError_t slab_many(const MATRIX &m, const slab_product &p, const macko_slab_many_plan &plan, void *workspace) {
    if (!m.rows || !p.tokens) return cudaSuccess;
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    return with_weight(m, [&](const auto &weight) {
        return run(many_args<typename std::decay_t<decltype(weight)>::codec>{weight, p, plan, workspace}, device);
    });
}

} // namespace macko
