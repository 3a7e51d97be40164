// slide_gemm on CUDA: which output tile. Kernel, tensor maps and launch are in gemm_cuda.cuh.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "../core/cuda.cuh"
#include "gemm_cuda.cuh"

namespace macko {

extern template cudaError_t slide_run<MACKO_SLIDE_S8>(slide_kind, slide_plan, const macko_slide_gemm_args &, int,
                                                      cudaStream_t);
extern template cudaError_t slide_run<MACKO_SLIDE_E4M3>(slide_kind, slide_plan, const macko_slide_gemm_args &, int,
                                                        cudaStream_t);
extern template cudaError_t slide_run<MACKO_SLIDE_F16>(slide_kind, slide_plan, const macko_slide_gemm_args &, int,
                                                       cudaStream_t);
extern template cudaError_t slide_run<MACKO_SLIDE_BF16>(slide_kind, slide_plan, const macko_slide_gemm_args &, int,
                                                        cudaStream_t);

// The same for GPUs without wgmma; cudaErrorNotSupported where the type needs a later one. asked: where not NULL it only
// says how many bytes of workspace that wants.
cudaError_t slide_run_mma(slide_kind kind, const macko_slide_gemm_args &args, cudaStream_t stream, int64_t *asked);

namespace {

// Size of the output tile. Up to 64 tokens the weights' bytes are the time: the smallest tile that holds all tokens. Above, the
// least time by what a wave of tiles takes, in per cent of the largest ones' (H200, 2026-11-21: of 88 cases, four linears,
// float8, dense and 2:4, 72 to 1024 tokens, the best tile is taken in all but one to 2.5 %).
slide_size size_of_tile(slide_kind kind, const macko_slide_gemm_args &args, int num_sms) {
    if (const int *said = macko_knob(MACKO_KNOB_SLIDE_TILE)) return slide_size(said[0] << 16 | said[1]);
    const macko_slide_shape &shape = args.weight.shape;
    const int64_t tokens = args.tokens, k_tiles = macko_slide_k_tiles(shape.cols, shape.n, shape.type);
    if (tokens <= 64) return tokens <= 16 ? SLIDE_64x16 : tokens <= 32 ? SLIDE_64x32 : SLIDE_64x64;
    // By kind (dense, sparse): time of a whole wave; `last` of small tiles, which run two an SM, the least time, of large ones
    // the time of a last wave of halves.
    const struct {
        slide_size size;
        int round[2], last[2];
    } tiles[] = {{SLIDE_64x64, {23, 27}, {39, 46}},
                 {SLIDE_128x128, {54, 60}, {42, 46}},
                 {SLIDE_128x192, {78, 80}, {52, 66}},
                 {SLIDE_128x256, {100, 100}, {66, 72}}};
    slide_size best = SLIDE_128x256;
    int64_t least = INT64_MAX;
    for (const auto &tile : tiles) {
        const int warpgroups = slide_size_rows(tile.size) / 64, cluster = warpgroups; // large tiles run in pairs
        const int tile_rows = slide_size_rows(tile.size) * cluster, tile_tokens = slide_size_tokens(tile.size);
        const int64_t count = (shape.rows + tile_rows - 1) / tile_rows * ((tokens + tile_tokens - 1) / tile_tokens);
        const int64_t clusters = num_sms / cluster, whole = slide_whole_tiles(count, clusters, warpgroups);
        int64_t time = (whole + clusters - 1) / clusters * tile.round[kind];
        if (warpgroups == 1 && time < tile.last[kind]) time = tile.last[kind];
        if (whole < count) time += tile.last[kind];
        // A single wave that leaves SMs idle has fewer weights in flight.
        const int64_t idle = num_sms - (2 * count - whole) * cluster;
        time = time * k_tiles + (idle > 0 ? 5 * idle : 0);
        if (time < least) least = time, best = tile.size;
    }
    return best;
}

// Large tiles whose k tiles four blocks, or pairs, share: 33 to 256 tokens, a long sum, and clusters that all find room at
// once, which do not fill GPCs. Down of Qwen2.5-7B, 6:8, 64, 128 and 256 tokens: 39.7 -> 32.5, 42.7 -> 36.5, 62.2 -> 46.5 us;
// of Llama-3.2-3B, dense, at 256 tokens, 64 k tiles: 24.2 -> 25.5 us, so it is left as it is (H100, 2026-11-28).
bool splits_large(const macko_slide_gemm_args &args, int num_sms, slide_plan &plan) {
    if (args.tokens <= 32 || args.tokens > 256) return false;
    const macko_slide_shape &shape = args.weight.shape;
    const int64_t k_tiles = macko_slide_k_tiles(shape.cols, shape.n, shape.type);
    const slide_size size = args.tokens <= 64 ? SLIDE_128x64 : args.tokens <= 128 ? SLIDE_128x128 : SLIDE_128x256;
    const int multicast = args.tokens <= 64 ? 1 : 2, rows = 128 * multicast;
    const int64_t blocks = (shape.rows + rows - 1) / rows * multicast * 4;
    if (k_tiles < (args.tokens <= 128 ? 64 : 96) || blocks * 10 > num_sms * 9) return false;
    plan = {size, {multicast, 4}};
    return true;
}

slide_plan chosen_plan(slide_kind kind, const macko_slide_gemm_args &args, int num_sms) {
    slide_plan plan{size_of_tile(kind, args, num_sms), {1, 1}};
    const bool says_tile = macko_knob(MACKO_KNOB_SLIDE_TILE) != nullptr;
    const int *said = macko_knob(MACKO_KNOB_SLIDE_CLUSTER);
    if (said) return {plan.size, {said[0], said[1]}};
    if (!says_tile && splits_large(args, num_sms, plan)) return plan;
    const int tokens = slide_size_tokens(plan.size), most = tokens >= 128 ? 1 : tokens == 64 ? 2 : 4;
    const macko_slide_shape &shape = args.weight.shape;
    const int64_t k_tiles = macko_slide_k_tiles(shape.cols, shape.n, shape.type), slots = 2 * num_sms;
    const int64_t tiles = macko_slide_row_blocks(shape.rows) * ((args.tokens + tokens - 1) / tokens);
    // Few tiles: split-K, by as many blocks as are on the GPU at once. With short sums left (under 16 stages a block) it
    // pays only up to one block an SM (H200: o of Qwen2.5-7B, 56 tiles of 28 stages, 6.5 -> 5.8 us; qkv, 72, no gain); with 33
    // to 256 tokens under 32 (H100: qkv of Qwen2.5-7B, 6:8, 64 tokens 14.4 -> 12.7 us without; o, 128 tokens, 14.7 -> 12.7).
    int &splits = plan.cluster.splits;
    const bool few = args.tokens > 32 && args.tokens <= 256;
    while (splits < most && k_tiles >= splits * 16) {
        const int64_t blocks = tiles * splits * 2;
        if (blocks > slots || (blocks > num_sms && k_tiles < splits * (few ? 64 : 32))) break;
        splits *= 2;
    }
    if (tokens >= 128) plan.cluster.multicast = 2;
    return plan;
}

// Where all blocks finish a tile there are two with k tiles of their own: a block has room for half of the outputs. So what a
// knob says of a short sum is done by the tile without splits that is nearest.
slide_plan plan_of(slide_kind kind, const macko_slide_gemm_args &args, int num_sms) {
    const slide_plan plan = chosen_plan(kind, args, num_sms);
    const macko_slide_shape &shape = args.weight.shape;
    const int64_t k_tiles = macko_slide_k_tiles(shape.cols, shape.n, shape.type);
    if (slide_finish_of(plan) != SLIDE_ALL_FINISH || (plan.cluster.splits > 1 && k_tiles >= 4)) return plan;
    if (plan.size == SLIDE_128x64) return {SLIDE_64x64, {1, 1}};
    return {plan.size, {2, 1}};
}

} // namespace
} // namespace macko

cudaError_t macko_slide_gemm_workspace(const macko_slide_gemm_args *args, int64_t *bytes) {
    using namespace macko;
    *bytes = 0;
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    if (macko_has_wgmma(device.major)) return cudaSuccess;
    return slide_run_mma(args->weight.shape.n ? SLIDE_SPARSE : SLIDE_DENSE, *args, nullptr, bytes);
}

cudaError_t macko_slide_gemm_cuda(const macko_slide_gemm_args *args, cudaStream_t stream) {
    using namespace macko;
    device_info device;
    if (const cudaError_t error = current_device(&device)) return error;
    const slide_kind kind = args->weight.shape.n ? SLIDE_SPARSE : SLIDE_DENSE;
    if (!macko_has_wgmma(device.major)) return slide_run_mma(kind, *args, stream, nullptr);
    const slide_plan plan = plan_of(kind, *args, device.num_sms);
    switch (args->weight.shape.type) {
    case MACKO_SLIDE_S8: return slide_run<MACKO_SLIDE_S8>(kind, plan, *args, device.num_sms, stream);
    case MACKO_SLIDE_E4M3: return slide_run<MACKO_SLIDE_E4M3>(kind, plan, *args, device.num_sms, stream);
    case MACKO_SLIDE_F16: return slide_run<MACKO_SLIDE_F16>(kind, plan, *args, device.num_sms, stream);
    default: return slide_run<MACKO_SLIDE_BF16>(kind, plan, *args, device.num_sms, stream);
    }
}
