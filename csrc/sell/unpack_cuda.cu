// The dense matrix from the sell layout.
#include "stream.cuh"

using namespace macko;

namespace {

constexpr int THREADS = 128;
constexpr int MOST_ROWS = 8; // of a thread block at once
constexpr int AHEAD = 4;     // steps that a lane has under way

// A lane's share of a slot.
template <int GAP_BITS>
struct Step {
    uint4 low, high; // values of entries 0..7 and 8..15
    uint32_t words[GAP_BITS / 2];
    uint16_t nibbles;

    __device__ void load(const uint8_t *slot, int lane) {
        low = load_stream((const uint4 *)slot + lane);
        high = load_stream((const uint4 *)slot + SELL_LANES + lane);
        const uint32_t *planes = (const uint32_t *)(slot + VALUE_BYTES);
        for (int plane = 0; plane < GAP_BITS / 2; plane++) words[plane] = load_stream(planes + plane * SELL_LANES + lane);
        if (GAP_BITS % 2) nibbles = load_stream((const uint16_t *)(planes + GAP_BITS / 2 * SELL_LANES) + lane);
    }

    // Scatters its 16 values to 2-byte places of shared memory from `at` on. Returns the columns passed.
    __device__ int scatter(uint32_t at) const {
        uint32_t planes[4] = {};
        for (int plane = 0; plane < GAP_BITS / 2; plane++) planes[plane] = words[plane];
        if (GAP_BITS % 2) planes[GAP_BITS / 2] = nibbles | (uint32_t)nibbles << 12;
        const uint32_t values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        int passed = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // As in multiply_8 of spmv: distances to the even and odd entries of a half.
            const uint32_t odd = gap_field<GAP_BITS>(planes, 2 * half + 1);
            const uint32_t pairs = gap_field<GAP_BITS>(planes, 2 * half) + odd;
            const uint32_t to_odd =
                GAP_BITS < 6 ? pairs * 0x01010101u + 0x07050301u : pairs + (pairs << 8 & 0xff00ff00u) + 0x03010301u;
            const uint32_t to_even = to_odd - odd - 0x01010101u;
            const int middle = GAP_BITS < 6 ? 0 : (to_odd >> 8 & 255) + 1; // columns up to entry 4
#pragma unroll
            for (int entry = 0; entry < 8; entry++) {
                const uint32_t from = at + (GAP_BITS == 6 && entry >= 4 ? 2 * middle : 0);
                const uint32_t value = values[4 * half + entry / 2] >> (16 * (entry % 2));
                store_shared_2(__dp4a(entry % 2 ? to_odd : to_even, 2u << (entry / 2 * 8), from), (uint16_t)value);
            }
            const int behind = middle + (to_odd >> 24) + 1;
            passed += behind;
            at += 2 * behind;
        }
        return passed;
    }
};

// Writes 16 bytes of a row, or those of its 2-byte parts that are in [begin, end).
__device__ __forceinline__ void write_part(uint16_t *to, uint4 part, int at, int begin, int end) {
    if (at >= begin && at + 8 <= end) {
        *(uint4 *)to = part;
        return;
    }
    const uint32_t words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (at + i >= begin && at + i < end) to[i] = (uint16_t)(words[i / 2] >> (16 * (i % 2)));
}

/*
 * A thread block owns some rows of a block of the layout, up to `most_rows` of those in [first, stop) of the matrix,
 * which lie side by side there; a lane one chunk of one of them. Where a chunk begins is known, so a lane goes through
 * it alone, and puts what it finds into whole dense rows in shared memory, from where they are written.
 */
template <int GAP_BITS>
__global__ void __launch_bounds__(THREADS, 3)
    unpack_rows(const sell_matrix s, int first, int stop, uint16_t *w, int most_rows, int row_bytes) {
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t rows_at = shared_address(shared);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int block = blockIdx.x % s.num_blocks;
    const sell_block b = load_block(s.blocks + block);
    int before = 0, inside = b.rows; // rows of the block that come before those to write, and how many are to write
    if (first > 0 || stop < s.rows) {
        inside = 0;
        for (int i = lane; i < b.rows; i += WARP) {
            const int row = s.perm[b.row + i];
            before += row < first;
            inside += row >= first && row < stop;
        }
        before = __reduce_add_sync(FULL_WARP, before);
        inside = __reduce_add_sync(FULL_WARP, inside);
    }
    const int parts = (inside + most_rows - 1) / most_rows;
    Places places;
    places.find(s, b, block);
    const int long_groups = sell_long_groups(&b);
    for (int part = blockIdx.x / s.num_blocks; part < parts; part += gridDim.x / s.num_blocks) {
        const int begin = inside * part / parts, rows = inside * (part + 1) / parts - begin;
        const int32_t *perm = s.perm + b.row + before + begin;
        for (int i = threadIdx.x; i < rows * row_bytes / 16; i += blockDim.x)
            store_shared_16(rows_at + i * 16, make_uint4(0, 0, 0, 0));
        __syncthreads();
        for (int own = threadIdx.x; own < rows * b.chunks; own += blockDim.x) {
            const int chunk = small_quotient(own, rows), row = own - chunk * rows;
            const int task = chunk * b.rows + before + begin + row, group = task / SELL_LANES, share = task % SELL_LANES;
            const int turn = small_quotient(group, s.warps), owner = group - turn * s.warps;
            const int stage =
                turn * (b.steps - 1) + min(turn, sell_groups_of_warp(long_groups, s.warps, owner));
            const int steps = b.steps - (chunk >= b.long_chunks);
            const auto slot = [&](int step) {
                return s.data + sell_slot_bytes(GAP_BITS) * places.slot(s, stage + step, owner);
            };
            Step<GAP_BITS> ahead[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (i < steps) ahead[i].load(slot(i), share);
            const uint16_t *row_out = w + (int64_t)(perm[row] - first) * s.cols;
            const int skew = (int)((uintptr_t)row_out / 2 % 8);
            const uint32_t row_at = rows_at + row * row_bytes + skew * 2;
            int col = s.bases[sell_base(&b, block, s.num_blocks, s.warps, group) + share];
#pragma unroll 1
            for (int step = 0; step < steps; step += AHEAD) {
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    if (step + i >= steps) break;
                    const Step<GAP_BITS> now = ahead[i];
                    if (step + i + AHEAD < steps) ahead[i].load(slot(step + i + AHEAD), share);
                    col += now.scatter(row_at + col * 2);
                    col = min(col, (int)s.cols); // padding passes it by a step at most
                }
            }
        }
        __syncthreads();
        for (int row = warp; row < rows; row += warps) {
            uint16_t *out = w + (int64_t)(perm[row] - first) * s.cols;
            const int skew = (int)((uintptr_t)out / 2 % 8), end = skew + (int)s.cols;
            const uint32_t row_at = rows_at + row * row_bytes;
#pragma unroll 4
            for (int at = lane * 8; at < end; at += WARP * 8)
                write_part(out - skew + at, load_shared_16(row_at + at * 2), at, skew, end);
        }
        __syncthreads();
    }
}

template <int GAP_BITS>
cudaError_t launch(const sell_matrix *s, int64_t first, int64_t count, void *w, cudaStream_t stream) {
    Device device;
    cudaError_t error = current_device(&device);
    if (!error) error = allow_all_shared_memory<unpack_rows<GAP_BITS>>(device);
    if (error) return error;
    // A row, up to 7 columns before it for alignment, a step of padding behind it.
    const int row_bytes = (int)ceil_div((s->cols + 7 + SELL_STEP) * 2, 16) * 16;
    const int fit = device.shared_bytes / number("MACKO_FIT", 3) / row_bytes;
    const int rows = std::max(1, std::min(fit, number("MACKO_ROWS", MOST_ROWS)));
    const int64_t mean = ceil_div(count, s->num_blocks), parts = ceil_div(mean + mean / 4 + 1, rows);
    unpack_rows<GAP_BITS><<<(unsigned)(parts * s->num_blocks), number("MACKO_THREADS", THREADS), rows * row_bytes, stream>>>(
        *s, (int)first, (int)(first + count), (uint16_t *)w, rows, row_bytes);
    return cudaGetLastError();
}

} // namespace

cudaError_t sell_unpack_cuda(const sell_matrix *s, int64_t first, int64_t count, void *w, cudaStream_t stream) {
    if (!count || !s->cols) return cudaSuccess;
    switch (s->gap_bits) {
    case 2: return launch<2>(s, first, count, w, stream);
    case 3: return launch<3>(s, first, count, w, stream);
    case 4: return launch<4>(s, first, count, w, stream);
    case 5: return launch<5>(s, first, count, w, stream);
    case 6: return launch<6>(s, first, count, w, stream);
    default: return cudaErrorInvalidValue;
    }
}
