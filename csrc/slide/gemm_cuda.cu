// slide_gemm on CUDA: which output tile. Kernel, tensor maps and launch are in gemm_cuda.cuh.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>

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

// For 33 to 256 tokens: the least microseconds, counted from weights that come from memory, and tiles that an SM gets from
// L2, of which the longer one hides most of the other. Constants fitted to an H100 (2026-11-28; 60 lines, int8, dense, 2:4
// and 6:8, eight linears, 64, 128 and 256 tokens), timed before large tiles fetched as they do now. On those same lines the
// plan taken is 0.4 % slower than the best in the mean, 7 % at most; pairs without splits count as assumed, not as timed.
slide_plan counted_plan(const macko_slide_gemm_args &args, int num_sms) {
    constexpr double MEMORY = 2.71e6, SM = 73160;        // bytes a microsecond: of the GPU, of an SM
    constexpr double SPLIT = 1.67, PART = 0.439;         // microseconds: of split-K, of each part of 64 tokens
    constexpr double MULTICAST = 1.2, MULTICASTS = 0.97; // microseconds, and what is left of an SM's time
    constexpr double BUSY = 1.57;                        // times the blocks, one an SM, that memory is busy with: SMs
    constexpr double UNEVEN = 0.239, HALVES = 0.665;     // of small tiles' last round, of a round of halves
    const macko_slide_shape &shape = args.weight.shape;
    const int64_t k_tiles = macko_slide_k_tiles(shape.cols, shape.n, shape.type);
    const double tile_bytes = macko_slide_tile_bytes(shape.n, shape.type);
    const double weights = (double)(macko_slide_row_blocks(shape.rows) * k_tiles) * tile_bytes / MEMORY;
    constexpr slide_cluster CLUSTERS[] = {{1, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 1}, {2, 4}};
    slide_plan best{SLIDE_64x64, {1, 1}};
    double least = 1e30;
    for (const slide_size size : {SLIDE_64x64, SLIDE_128x64, SLIDE_128x128, SLIDE_128x256}) {
        const int rows = slide_size_rows(size), tokens = slide_size_tokens(size), warpgroups = rows / 64;
        if (tokens > 64 && args.tokens <= tokens / 2) break;
        for (const slide_cluster cluster : CLUSTERS) {
            const int multicast = cluster.multicast, splits = cluster.splits,
                      slots = warpgroups == 1 ? 2 * num_sms : num_sms;
            // Pairs multicast many tokens alone, and then of fours.
            if (tokens < 128 ? multicast > 1 : multicast == 1 && splits == 4) continue;
            const int64_t tiles = (shape.rows + rows * multicast - 1) / (rows * multicast) *
                                  ((args.tokens + tokens - 1) / tokens) * splits; // of so many clusters' parts
            const int64_t blocks = tiles * multicast;
            // Clusters do not fill GPCs: with more blocks some would begin when others have ended (6 to 8 us).
            if (splits > 1 && (blocks * 10 > slots * 9 || k_tiles < 8 * splits)) continue;
            double rounds;
            if (warpgroups == 1) {
                const double even = (double)blocks / num_sms;
                rounds = std::max(1.0, even + UNEVEN * (std::ceil(even) - even));
            } else {
                const int64_t at_once = std::max(1, num_sms / multicast);
                const int64_t whole = splits > 1 ? tiles : slide_whole_tiles(tiles, at_once, warpgroups);
                rounds = (double)((whole + at_once - 1) / at_once) + (whole < tiles ? HALVES : 0);
            }
            const double part = (double)((k_tiles / 2 + splits - 1) / splits * 2);
            double sm = rounds * part * (tokens * 128 + warpgroups * tile_bytes) / SM;
            if (multicast > 1 && splits == 1) sm *= MULTICASTS;
            const double memory = weights * std::max(1.0, num_sms / (BUSY * (double)blocks));
            double time = std::cbrt(memory * memory * memory + sm * sm * sm);
            if (splits > 1) time += SPLIT + PART * splits * tokens / 64;
            if (multicast > 1 && splits == 1) time += MULTICAST;
            if (time < least) least = time, best = {size, cluster};
        }
    }
    return best;
}

slide_plan plan_of(slide_kind kind, const macko_slide_gemm_args &args, int num_sms) {
    slide_plan plan{size_of_tile(kind, args, num_sms), {1, 1}};
    const bool says_tile = macko_knob(MACKO_KNOB_SLIDE_TILE) != nullptr;
    const int *said = macko_knob(MACKO_KNOB_SLIDE_CLUSTER);
    if (said) return {plan.size, {said[0], said[1]}};
    if (!says_tile && args.tokens > 32 && args.tokens <= 256) return counted_plan(args, num_sms);
    const int tokens = slide_size_tokens(plan.size), most = tokens >= 128 ? 1 : tokens == 64 ? 2 : 4;
    const macko_slide_shape &shape = args.weight.shape;
    const int64_t k_tiles = macko_slide_k_tiles(shape.cols, shape.n, shape.type), slots = 2 * num_sms;
    const int64_t tiles = macko_slide_row_blocks(shape.rows) * ((args.tokens + tokens - 1) / tokens);
    // Few tiles: split-K, by as many blocks as are on the GPU at once. With short sums left (under 16 stages a block) it
    // pays only up to one block an SM (H200: o of Qwen2.5-7B, 56 tiles of 28 stages, 6.5 -> 5.8 us; qkv, 72, no gain).
    int &splits = plan.cluster.splits;
    while (splits < most && k_tiles >= splits * 16) {
        const int64_t blocks = tiles * splits * 2;
        if (blocks > slots || (blocks > num_sms && k_tiles < splits * 32)) break;
        splits *= 2;
    }
    if (tokens >= 128) plan.cluster.multicast = 2;
    return plan;
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
