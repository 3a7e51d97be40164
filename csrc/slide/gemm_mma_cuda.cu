// slide_gemm for GPUs without the wgmma of sm_90: which tiles, how many stages, and the launch. The kernel is in
// gemm_mma_cuda.cuh.
#include "gemm_mma_cuda.cuh"

namespace macko {
namespace {

constexpr int MAX_SPLITS = 8;

// Blocks that share the k tiles of a tile, each of them 8 k tiles at least, two of them 16, where half of the GPU's slots, or
// fewer, would be busy else; short sums of tiles that more than half of the SMs get stay whole (H100: qkv of 3B, 6:8, 64
// tokens 17.3 -> 16.1 us, of 7B 18.1 -> 17.6).
int num_splits(int64_t tiles, int k_tiles, int most, int64_t slots, int num_sms) {
    int splits = 1;
    if (2 * tiles > num_sms && k_tiles < 64) return splits;
    while (splits < most && 2 * splits * tiles <= slots && k_tiles >= std::max(32, 16 * splits)) splits *= 2;
    return splits;
}

// The same for large tiles, `tiles` of them in the last wave, by a count in times of a k tile: a part's sums are stored, and
// added by a second launch.
int best_splits(int64_t tiles, int k_tiles, int most, int64_t slots) {
    const auto cost = [&](int splits) {
        const int64_t waves = ceil_div(tiles * splits, slots), part = ceil_div(k_tiles, splits);
        return splits == 1 ? waves * part : waves * (part + 1) + 3 + tiles * splits / 10;
    };
    int best = 1;
    for (int splits = 2; splits <= std::min(most, k_tiles / 2); splits++)
        if (cost(splits) < cost(best)) best = splits;
    return best;
}

// asked: where not NULL nothing is launched, and it is set to the bytes of the workspace that the launch wants.
template <macko_slide_type TYPE, slide_kind KIND, slide_size SIZE>
cudaError_t mma_launch(const macko_slide_gemm_args &args, const device_info &device, cudaStream_t stream,
                       int64_t *asked) {
    using TILE = mma_tile<TYPE, KIND, SIZE>;
    constexpr auto KERNEL = slide_mma_kernel<TYPE, KIND, SIZE>;
    const macko_slide_shape &shape = args.weight.shape;
    mma_task task{};
    slide_task &common = task.common = slide_task_of(args);
    common.row_tiles = (int)ceil_div(common.row_blocks, TILE::BLOCKS);
    common.token_tiles = (int)ceil_div(args.tokens, TILE::TOKENS);
    task.lifted = (const uint8_t *)args.lifted;
    task.out = (uint16_t *)args.out;
    task.out_stride = args.out_stride;
    task.token_bytes = (uint32_t)(args.lifted_cols * macko_slide_element_bytes(TYPE));
    task.row_bytes = macko_slide_k_tiles(shape.cols, shape.n, TYPE) * TILE::TILE_BYTES;
    common.k_tiles =
        (int)ceil_div(task.token_bytes, MACKO_SLIDE_TILE_BYTES); // packed is one more in some cases, of zeros
    const int64_t tiles = (int64_t)common.row_tiles * common.token_tiles;
    // As many stages as leave an SM its blocks; a kilobyte of each is the driver's.
    const int most = ring_shared_bytes(device), per_sm = std::min(device.shared_per_sm, most + 1024);
    const int shared = std::min(most, per_sm / TILE::BLOCKS_PER_SM - 1024);
    static_assert(TILE::bytes(2) <= 99 << 10 || (TILE::ROWS == 256 && KIND == SLIDE_DENSE));
    static_assert(TILE::ROWS != 256 || TILE::bytes(4) <= 227 << 10);
    const bool early = mma_arrives_early<TILE>(device.major);
    task.stages = std::clamp((shared - TILE::bytes(0)) / TILE::STAGE_BYTES, 2, early ? 5 : 4);
    const int bytes = TILE::bytes(task.stages);
    const int blocks_per_sm = std::clamp(per_sm / (bytes + 1024), 1, TILE::BLOCKS_PER_SM);
    const int64_t slots = (int64_t)device.num_sms * blocks_per_sm;
    // Of the last wave; not for few tokens, where the weights' bytes are the time, whichever block reads them.
    const int64_t last = TILE::TOKENS > 64 || tiles < slots ? tiles % slots : 0;
    common.splits = TILE::TOKENS > 64 ? best_splits(last, common.k_tiles, MAX_SPLITS, slots)
                                      : num_splits(last, common.k_tiles, MAX_SPLITS, slots, device.num_sms);
    constexpr int64_t TILE_SUMS = (int64_t)TILE::ROWS * TILE::TOKENS;
    if (asked) {
        *asked = common.splits > 1 ? common.splits * last * TILE_SUMS * (int64_t)sizeof(slide_sum<TYPE>) : 0;
        return cudaSuccess;
    }
    if (!args.workspace) common.splits = 1;
    task.partial = args.workspace;
    if (tiles + MAX_SPLITS * slots > INT32_MAX) return cudaErrorInvalidValue;
    task.split = common.splits > 1 ? (int)last : 0, task.whole = (int)tiles - task.split;
    common.num_tiles = task.whole + task.split * common.splits;
    if (TYPE == MACKO_SLIDE_E4M3) { // what runs may be compiled for an earlier GPU than this one
        cudaFuncAttributes built;
        if (const cudaError_t status = cudaFuncGetAttributes(&built, KERNEL)) return status;
        if (built.ptxVersion < 89) return cudaErrorNotSupported;
    }
    if (const cudaError_t status = allow_all_shared_memory<KERNEL>(device, cudaSharedmemCarveoutMaxShared))
        return status;
    KERNEL<<<(unsigned)std::min<int64_t>(slots, common.num_tiles), TILE::THREADS, bytes, stream>>>(task);
    if (const cudaError_t status = cudaGetLastError()) return status;
    if (!task.split) return cudaSuccess;
    constexpr int THREADS = 256;
    const dim3 grid((unsigned)task.split, (unsigned)(TILE_SUMS / THREADS));
    slide_mma_add_splits<slide_sum<TYPE>, TILE><<<grid, THREADS, 0, stream>>>(task);
    return cudaGetLastError();
}

template <macko_slide_type TYPE, slide_kind KIND>
cudaError_t mma_run_kind(slide_size size, const macko_slide_gemm_args &args, const device_info &device,
                         cudaStream_t stream, int64_t *asked) {
    switch (size) {
    case SLIDE_64x16: return mma_launch<TYPE, KIND, SLIDE_64x16>(args, device, stream, asked);
    case SLIDE_64x64: return mma_launch<TYPE, KIND, SLIDE_64x64>(args, device, stream, asked);
    case SLIDE_256x128:
        if constexpr (TYPE != MACKO_SLIDE_E4M3) {
            using TILE = mma_tile<TYPE, KIND, SLIDE_256x128>;
            const int stages = mma_arrives_early<TILE>(device.major) ? 4 : 2;
            if (TILE::bytes(stages) <= ring_shared_bytes(device)) // two of a dense one are too large for 99 KB
                return mma_launch<TYPE, KIND, SLIDE_256x128>(args, device, stream, asked);
        }
        [[fallthrough]];
    default: return mma_launch<TYPE, KIND, SLIDE_128x128>(args, device, stream, asked);
    }
}

template <macko_slide_type TYPE>
cudaError_t mma_run(slide_kind kind, slide_size size, const macko_slide_gemm_args &args, const device_info &device,
                    cudaStream_t stream, int64_t *asked) {
    return kind == SLIDE_SPARSE ? mma_run_kind<TYPE, SLIDE_SPARSE>(size, args, device, stream, asked)
                                : mma_run_kind<TYPE, SLIDE_DENSE>(size, args, device, stream, asked);
}

// The largest tiles where they, or parts of their k tiles, give work to at least half of the SMs.
slide_size mma_size(const macko_slide_gemm_args &args, int num_sms) {
    if (const int *said = macko_knob(MACKO_KNOB_SLIDE_TILE)) return slide_size(said[0] << 16 | said[1]);
    if (args.tokens <= 64) return args.tokens <= 16 ? SLIDE_64x16 : SLIDE_64x64;
    const macko_slide_shape &shape = args.weight.shape;
    const auto enough = [&](int rows, int tokens, int splits) {
        return 2 * splits * ceil_div(shape.rows, rows) * ceil_div(args.tokens, tokens) >= num_sms;
    };
    const int most = std::clamp((int)macko_slide_k_tiles(shape.cols, shape.n, shape.type) / 8, 1, 4);
    return enough(256, 128, 1) ? SLIDE_256x128 : enough(128, 128, most) ? SLIDE_128x128 : SLIDE_64x64;
}

} // namespace

cudaError_t slide_run_mma(slide_kind kind, const macko_slide_gemm_args &args, cudaStream_t stream, int64_t *asked) {
    device_info device;
    if (const cudaError_t status = current_device(&device)) return status;
    const slide_size size = mma_size(args, device.num_sms);
    switch (args.weight.shape.type) {
    case MACKO_SLIDE_S8: return mma_run<MACKO_SLIDE_S8>(kind, size, args, device, stream, asked);
    case MACKO_SLIDE_E4M3: return mma_run<MACKO_SLIDE_E4M3>(kind, size, args, device, stream, asked);
    case MACKO_SLIDE_F16: return mma_run<MACKO_SLIDE_F16>(kind, size, args, device, stream, asked);
    default: return mma_run<MACKO_SLIDE_BF16>(kind, size, args, device, stream, asked);
    }
}

} // namespace macko
