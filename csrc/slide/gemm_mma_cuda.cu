// slide_gemm for GPUs without the wgmma of sm_90: the same product of the same bytes by mma.sync and mma.sp (sm_80 on;
// float8 sm_89 on). Metadata as slide.h stores them are what a lane gives to either instruction.
#include "../core/cuda.cuh"
#include "gemm_cuda.cuh"

namespace macko {
namespace {

// A block's tile by warps. Operands come from shared memory by ldmatrix: with 64 x 64 a warp a dense stage of a large tile
// reads 64 KB there, with 64 x 32 96 KB (H200, down at 2048 tokens: 510 us instead of 592). Float8 has 64 x 32: where its
// products are made of half-precision ones there are no registers for more.
template <macko_slide_type TYPE, slide_kind KIND, slide_size SIZE>
struct mma_tile {
    static constexpr int ROWS = slide_size_rows(SIZE), TOKENS = slide_size_tokens(SIZE);
    static constexpr int WARP_ROWS = TOKENS == 16 ? 16 : TOKENS == 64 ? 32 : 64;
    static constexpr int WARP_TOKENS = TOKENS == 16 ? 16 : TOKENS == 128 && TYPE != MACKO_SLIDE_E4M3 ? 64 : 32;
    static constexpr int ROW_WARPS = ROWS / WARP_ROWS, THREADS = ROW_WARPS * (TOKENS / WARP_TOKENS) * WARP;
    static constexpr int BLOCKS = ROWS / MACKO_SLIDE_BLOCK_ROWS; // of rows
    static constexpr int TOKEN_BYTES = TOKENS * MACKO_SLIDE_TILE_BYTES;
    static constexpr int VALUE_BYTES = KIND == SLIDE_DENSE ? 2 * MACKO_SLIDE_VALUE_BYTES : MACKO_SLIDE_VALUE_BYTES;
    static constexpr int META_BYTES = KIND == SLIDE_DENSE ? 0 : TYPE <= MACKO_SLIDE_E4M3 ? 1024 : 512;
    static constexpr int TILE_BYTES = VALUE_BYTES + META_BYTES, STAGE_BYTES = TOKEN_BYTES + BLOCKS * TILE_BYTES;
    // 99 KB is what a block of sm_86, 89 and 120 gets.
    static constexpr int STAGES = 99 * 1024 / STAGE_BYTES;
    // A finished tile, through shared memory. Its lines are 16 bytes longer than their numbers: lanes' words then lie in
    // different banks.
    static constexpr int LINE = ROWS * 2 + 16;
    static_assert(STAGES >= 3 && STAGES * STAGE_BYTES >= TOKENS * LINE);
};

struct mma_task {
    slide_task common;
    const uint8_t *lifted;
    uint16_t *out;
    int64_t token_bytes, out_stride;
};

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&to)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at));
}

// Sixteen bytes to shared memory, zeros where there are none.
__device__ __forceinline__ void copy_async_zfill(uint32_t to, const void *from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}

// d (16 rows x 8 tokens) += A * B: a sparse step is 32 bytes of A and 64 of B, a dense one 32 and 32. SELECT: which half
// of the lanes gives the metadata of a 16-bit step.
template <macko_slide_type TYPE, int SELECT, typename D>
__device__ __forceinline__ void mma_sparse(D (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t meta);
template <macko_slide_type TYPE, typename D>
__device__ __forceinline__ void mma_dense(D (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

#define MACKO_MMA(TYPE, D, SHAPE, KIND, C)                                                                             \
    template <>                                                                                                        \
    __device__ __forceinline__ void mma_dense<TYPE, D>(D(&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {   \
        asm("mma.sync.aligned." SHAPE ".row.col." KIND " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "               \
            "{%0, %1, %2, %3};"                                                                                        \
            : "+" C(d[0]), "+" C(d[1]), "+" C(d[2]), "+" C(d[3])                                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                           \
    }
#define MACKO_MMA_SPARSE(TYPE, SELECT, D, SHAPE, KIND, C)                                                              \
    template <>                                                                                                        \
    __device__ __forceinline__ void mma_sparse<TYPE, SELECT, D>(D(&d)[4], const uint32_t (&a)[4],                      \
                                                                const uint32_t (&b)[4], uint32_t meta) {               \
        asm("mma.sp::ordered_metadata.sync.aligned." SHAPE ".row.col." KIND " {%0, %1, %2, %3}, "                      \
            "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, " #SELECT ";"                                \
            : "+" C(d[0]), "+" C(d[1]), "+" C(d[2]), "+" C(d[3])                                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(meta));      \
    }
#define MACKO_MMA_16(TYPE, KIND)                                                                                       \
    MACKO_MMA(TYPE, float, "m16n8k16", KIND, "f")                                                                      \
    MACKO_MMA_SPARSE(TYPE, 0, float, "m16n8k32", KIND, "f")                                                            \
    MACKO_MMA_SPARSE(TYPE, 1, float, "m16n8k32", KIND, "f")
#define MACKO_MMA_8(TYPE, D, KIND, C)                                                                                  \
    MACKO_MMA(TYPE, D, "m16n8k32", KIND, C) MACKO_MMA_SPARSE(TYPE, 0, D, "m16n8k64", KIND, C)
MACKO_MMA_8(MACKO_SLIDE_S8, int32_t, "s32.s8.s8.s32", "r")
MACKO_MMA_16(MACKO_SLIDE_F16, "f32.f16.f16.f32")
MACKO_MMA_16(MACKO_SLIDE_BF16, "f32.bf16.bf16.f32")
MACKO_MMA_8(MACKO_SLIDE_E4M3, float, "f32.e4m3.e4m3.f32", "f")

//     block    an output tile of ROWS x TOKENS; a warp WARP_ROWS x WARP_TOKENS of it, in m16n8 products: slices x octets
//     stage    | tokens, TOKENS x 128 bytes, 128-byte swizzle | weights, BLOCKS tiles as packed |    cp.async by all threads
//     loop     wait for stage k | __syncthreads | fetch stage k + STAGES - 1 into the one just read | ldmatrix, mma of stage k
//     end      scale, round, through shared memory, 16 bytes a thread to out
//
// One function: with the products or the end as functions of their own ptxas makes other code than what was measured.
template <macko_slide_type TYPE, slide_kind KIND, slide_size SIZE>
__global__ void __launch_bounds__(mma_tile<TYPE, KIND, SIZE>::THREADS)
    slide_mma_kernel(const __grid_constant__ mma_task task) {
#if __CUDA_ARCH__ >= 890
    constexpr bool IS_THERE = true;
#elif __CUDA_ARCH__ >= 800
    constexpr bool IS_THERE = TYPE != MACKO_SLIDE_E4M3;
#else
    constexpr bool IS_THERE = false;
#endif
    if constexpr (!IS_THERE) return; // and is not launched
    using TILE = mma_tile<TYPE, KIND, SIZE>;
    constexpr int SLICES = TILE::WARP_ROWS / 16, OCTETS = TILE::WARP_TOKENS / 8;
    constexpr bool IS_16_BIT = TYPE >= MACKO_SLIDE_F16;
    using sum = slide_sum<TYPE>;
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t smem = shared_address(memory);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    // Tiles in groups of a few row tiles, all token tiles of a group together: both operands are found in L2.
    constexpr int GROUP = 8;
    const int group = blockIdx.x / (GROUP * task.common.token_tiles), first_in_group = group * GROUP;
    const int in_group = blockIdx.x - first_in_group * task.common.token_tiles;
    const int group_rows = min(GROUP, task.common.row_tiles - first_in_group);
    const int token_tile = in_group / group_rows, row_tile = first_in_group + in_group % group_rows;
    const int k_tiles = task.common.k_tiles, first_token = token_tile * TILE::TOKENS;

    const auto fetch = [&](int k_tile, uint32_t stage) {
        if (k_tile < k_tiles) {
            const uint32_t to = smem + stage;
#pragma unroll
            for (int i = threadIdx.x; i < TILE::TOKENS * 8; i += TILE::THREADS) {
                const int token = first_token + i / 8, byte = k_tile * MACKO_SLIDE_TILE_BYTES + i % 8 * 16;
                const bool is_there = token < task.common.tokens && byte < task.token_bytes;
                copy_async_zfill(to + i / 8 * 128 + ((i ^ i / 8) % 8 << 4),
                                 is_there ? task.lifted + token * task.token_bytes + byte : task.lifted, is_there);
            }
#pragma unroll
            for (int block = 0; block < TILE::BLOCKS; block++) {
                // Past the last row block: any rows do, their output is not stored.
                const int row_block = min(row_tile * TILE::BLOCKS + block, task.common.row_blocks - 1);
                const uint8_t *from = task.common.packed + ((int64_t)row_block * k_tiles + k_tile) * TILE::TILE_BYTES;
                for (int i = threadIdx.x; i < TILE::TILE_BYTES / 16; i += TILE::THREADS)
                    copy_async<16>(to + TILE::TOKEN_BYTES + block * TILE::TILE_BYTES + i * 16, from + i * 16);
            }
        }
        commit_copies();
    };

    // Addresses of this lane's rows for ldmatrix, in the tokens and in the weights of a stage.
    const int warp_row = warp % TILE::ROW_WARPS * TILE::WARP_ROWS,
              warp_token = warp / TILE::ROW_WARPS * TILE::WARP_TOKENS;
    const uint32_t tokens_at = smem + (warp_token + lane % 8) * 128;
    const uint32_t weights_at = smem + TILE::TOKEN_BYTES + warp_row / 64 * TILE::TILE_BYTES;
    const int lane_row = warp_row % 64 + lane % 16;

    sum sums[SLICES][OCTETS][4] = {};
    for (int k_tile = 0; k_tile < TILE::STAGES - 1; k_tile++) fetch(k_tile, k_tile * TILE::STAGE_BYTES);
    uint32_t stage = 0, free_stage = (TILE::STAGES - 1) * TILE::STAGE_BYTES;
    const auto next = [](uint32_t at) {
        return at == (TILE::STAGES - 1) * TILE::STAGE_BYTES ? 0 : at + TILE::STAGE_BYTES;
    };
    for (int k_tile = 0; k_tile < k_tiles; k_tile++, free_stage = stage, stage = next(stage)) {
        wait_copies<TILE::STAGES - 2>();
        __syncthreads(); // the stage has arrived for all warps, and all have read the one before it
        fetch(k_tile + TILE::STAGES - 1, free_stage);
#pragma unroll(TYPE == MACKO_SLIDE_E4M3 ? 1 : 2)
        for (int half = 0; half < 2; half++) { // 64 bytes of expanded columns
            uint32_t tokens[OCTETS][4];
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++)
                ldmatrix_x4(tokens[octet],
                            tokens_at + stage + octet * 1024 + (((half * 4 + lane / 8) ^ lane % 8) << 4));
#pragma unroll
            for (int slice = 0; slice < SLICES; slice++) {
                const int row = lane_row + slice * 16;
                uint32_t values[4];
                if constexpr (KIND == SLIDE_SPARSE) {
                    const int warp16 = warp_row % 64 / 16 + slice;
                    ldmatrix_x4(values, weights_at + stage + row * 64 + (((half * 2 + lane / 16) ^ row / 2 % 4) << 4));
                    const uint32_t meta = load_shared_4(weights_at + stage + TILE::VALUE_BYTES +
                                                        (IS_16_BIT ? 0 : half * 512) + (warp16 * WARP + lane) * 4);
#pragma unroll
                    for (int octet = 0; octet < OCTETS; octet++) {
                        if (IS_16_BIT && half)
                            mma_sparse<TYPE, IS_16_BIT>(sums[slice][octet], values, tokens[octet], meta);
                        else
                            mma_sparse<TYPE, 0>(sums[slice][octet], values, tokens[octet], meta);
                    }
                } else {
#pragma unroll
                    for (int step = 0; step < 2; step++) {
                        ldmatrix_x4(values, weights_at + stage + row * 128 +
                                                (((half * 4 + step * 2 + lane / 16) ^ row % 8) << 4));
#pragma unroll
                        for (int octet = 0; octet < OCTETS; octet++)
                            mma_dense<TYPE>(sums[slice][octet], values, tokens[octet][2 * step],
                                            tokens[octet][2 * step + 1]);
                    }
                }
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    // Scaled, rounded and, through shared memory, stored so that a token's rows are together.
    const int64_t first_row = (int64_t)row_tile * TILE::ROWS;
    float by_token[OCTETS][2];
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = first_token + warp_token + octet * 8 + lane % 4 * 2 + i;
            by_token[octet][i] =
                task.common.token_scale && token < task.common.tokens ? task.common.token_scale[token] : 1;
        }
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++)
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
            const int in_tile = warp_row + slice * 16 + upper * 8 + lane / 4;
            const int64_t row = first_row + in_tile;
            const float scale = row < task.common.rows ? task.common.scale[row] : 0;
            const float bias = slide_bias(task.common, row);
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++) {
                const sum *two = sums[slice][octet] + 2 * upper;
                const uint32_t rounded =
                    slide_pack2(fmaf(scale, by_token[octet][0] * (float)two[0], bias),
                                fmaf(scale, by_token[octet][1] * (float)two[1], bias), task.common.is_bf16);
                const uint32_t to = smem + (warp_token + octet * 8 + lane % 4 * 2) * TILE::LINE + in_tile * 2;
                store_shared_2(to, (uint16_t)rounded);
                store_shared_2(to + TILE::LINE, (uint16_t)(rounded >> 16));
            }
        }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE::TOKENS * TILE::ROWS / 8; i += TILE::THREADS) {
        const int token = first_token + i / (TILE::ROWS / 8), eight = i % (TILE::ROWS / 8);
        if (token < task.common.tokens && first_row + eight * 8 < task.out_stride)
            *(uint4 *)(task.out + token * task.out_stride + first_row + eight * 8) =
                load_shared_16(smem + i / (TILE::ROWS / 8) * TILE::LINE + eight * 16);
    }
}

template <macko_slide_type TYPE, slide_kind KIND, slide_size SIZE>
cudaError_t mma_launch(const macko_slide_gemm_args &args, const device_info &device, cudaStream_t stream) {
    using TILE = mma_tile<TYPE, KIND, SIZE>;
    const macko_slide_shape &shape = args.weight.shape;
    mma_task task{};
    task.common.packed = args.weight.packed;
    task.common.scale = args.weight.scale;
    task.common.token_scale = args.token_scale;
    task.common.bias = (const uint16_t *)args.bias;
    task.common.rows = shape.rows;
    task.common.tokens = (int)args.tokens;
    task.common.row_blocks = (int)macko_slide_row_blocks(shape.rows);
    task.common.k_tiles = (int)macko_slide_k_tiles(shape.cols, shape.n, TYPE);
    task.common.row_tiles = (int)ceil_div(task.common.row_blocks, TILE::BLOCKS);
    task.common.token_tiles = (int)ceil_div(args.tokens, TILE::TOKENS);
    task.common.is_bf16 = args.out_dtype == MACKO_BF16;
    task.lifted = (const uint8_t *)args.lifted;
    task.out = (uint16_t *)args.out;
    task.token_bytes = args.lifted_cols * macko_slide_element_bytes(TYPE);
    task.out_stride = args.out_stride;
    const int64_t tiles = (int64_t)task.common.row_tiles * task.common.token_tiles;
    if (tiles > INT32_MAX) return cudaErrorInvalidValue;
    if (TYPE == MACKO_SLIDE_E4M3) { // what runs may be compiled for an earlier GPU than this one
        cudaFuncAttributes built;
        if (const cudaError_t status = cudaFuncGetAttributes(&built, slide_mma_kernel<TYPE, KIND, SIZE>)) return status;
        if (built.ptxVersion < 89) return cudaErrorNotSupported;
    }
    if (const cudaError_t status = allow_all_shared_memory<slide_mma_kernel<TYPE, KIND, SIZE>>(device)) return status;
    slide_mma_kernel<TYPE, KIND, SIZE>
        <<<(unsigned)tiles, TILE::THREADS, TILE::STAGES * TILE::STAGE_BYTES, stream>>>(task);
    return cudaGetLastError();
}

template <macko_slide_type TYPE, slide_kind KIND>
cudaError_t mma_run_kind(slide_size size, const macko_slide_gemm_args &args, const device_info &device,
                         cudaStream_t stream) {
    switch (size) {
    case SLIDE_64x16: return mma_launch<TYPE, KIND, SLIDE_64x16>(args, device, stream);
    case SLIDE_64x64: return mma_launch<TYPE, KIND, SLIDE_64x64>(args, device, stream);
    case SLIDE_128x128: return mma_launch<TYPE, KIND, SLIDE_128x128>(args, device, stream);
    default: return cudaErrorInvalidValue;
    }
}

template <macko_slide_type TYPE>
cudaError_t mma_run(slide_kind kind, slide_size size, const macko_slide_gemm_args &args, const device_info &device,
                    cudaStream_t stream) {
    return kind == SLIDE_SPARSE ? mma_run_kind<TYPE, SLIDE_SPARSE>(size, args, device, stream)
                                : mma_run_kind<TYPE, SLIDE_DENSE>(size, args, device, stream);
}

} // namespace

cudaError_t slide_run_mma(slide_kind kind, const macko_slide_gemm_args &args, cudaStream_t stream) {
    device_info device;
    if (const cudaError_t status = current_device(&device)) return status;
    // Not measured on a GPU that needs this: large tiles where they give work to at least half of the SMs.
    const int64_t large = ceil_div(args.weight.shape.rows, 128) * ceil_div(args.tokens, 128);
    const slide_size size = args.tokens <= 16                                 ? SLIDE_64x16
                            : args.tokens <= 64 || 2 * large < device.num_sms ? SLIDE_64x64
                                                                              : SLIDE_128x128;
    switch (args.weight.shape.type) {
    case MACKO_SLIDE_S8: return mma_run<MACKO_SLIDE_S8>(kind, size, args, device, stream);
    case MACKO_SLIDE_E4M3: return mma_run<MACKO_SLIDE_E4M3>(kind, size, args, device, stream);
    case MACKO_SLIDE_F16: return mma_run<MACKO_SLIDE_F16>(kind, size, args, device, stream);
    default: return mma_run<MACKO_SLIDE_BF16>(kind, size, args, device, stream);
    }
}

} // namespace macko
