// EC-CSR's ops: check, allocate, guard the device, call. Compiled once for the CPU and once for CUDA.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "../../csrc/torch/packed.h"
#include "../../csrc/torch/tensors.h"
#include "ec.h"
#ifndef USE_CUDA
#include "../../csrc/torch/rows.h"
#endif

namespace macko {

extern const Registered ec_layout;

namespace {

#ifndef USE_CUDA
template <typename Body>
void for_tiles(int64_t tiles, const Body &body) {
    torch::stable::parallel_for(0, tiles, 1, body); // a tile is at least some 10 us of work
}
#endif

template <typename T>
T *data(const Tensor &t) {
    return t.numel() ? static_cast<T *>(const_cast<void *>(t.const_data_ptr())) : nullptr;
}

// Small arrays between the host, which lays out, and the device, which fills.
template <typename T>
std::vector<T> to_host(const Tensor &t) {
    std::vector<T> host(t.numel() * t.element_size() / sizeof(T));
    if (host.empty()) return host;
#ifdef USE_CUDA
    STD_CUDA_CHECK(
        cudaMemcpyAsync(host.data(), data<T>(t), host.size() * sizeof(T), cudaMemcpyDeviceToHost, current_stream(t)));
    STD_CUDA_CHECK(cudaStreamSynchronize(current_stream(t)));
#else
    std::memcpy(host.data(), data<T>(t), host.size() * sizeof(T));
#endif
    return host;
}

template <typename T>
Tensor to_device(const Tensor &like, const std::vector<T> &host, std::vector<int64_t> shape, ScalarType dtype) {
    Tensor t = torch::stable::new_empty(like, shape, dtype);
    if (host.empty()) return t;
#ifdef USE_CUDA
    // From pageable memory: the copy has read the vector when the call returns.
    STD_CUDA_CHECK(cudaMemcpyAsync(data<T>(t), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice,
                                   current_stream(like)));
#else
    std::memcpy(data<T>(t), host.data(), host.size() * sizeof(T));
#endif
    return t;
}

int64_t num_tiles(int64_t rows, int64_t tile_rows) {
    return (rows + tile_rows - 1) / tile_rows;
}

// The struct over the tensors, once they have passed every check that needs no look at their content.
macko_ec_matrix matrix_of(const char *op, const Packed &p) {
    const Tensor &block_values = p[0], &delta_indices = p[1], &base_indices = p[2], &block_indptr = p[3],
                 &row_indices = p[4], &tile_ptr = p[5], &sets = p[6], &col_order = p[7];
    const int64_t rows = p.rows(), cols = p.cols();
    if (rows < 0 || rows >= INT32_LIMIT || cols < 0 || cols >= INT32_LIMIT)
        fail(op, "the shape is [", rows, ", ", cols, "], expected at most 2^31 - 2 rows and columns");
    const ScalarType base = cols <= 65536 ? ScalarType::UInt16 : ScalarType::Int;
    const int64_t aligned = on_cuda(16);
    const Wanted all[] = {{"block_values", block_values, ScalarType::Undefined, 1, aligned},
                          {"delta_indices", delta_indices, ScalarType::Byte, 1, aligned},
                          {"base_indices", base_indices, base, 1, aligned},
                          {"block_indptr", block_indptr, ScalarType::Int, 1, aligned},
                          {"row_indices", row_indices, ScalarType::Int, 1, aligned},
                          {"tile_ptr", tile_ptr, ScalarType::Int, 2, aligned},
                          {"sets", sets, ScalarType::Long, 2, aligned},
                          {"col_order", col_order, base, 1, aligned}};
    const macko_dtype dtype = check_kinds(op, all);
    check_memory(op, all);
    const int64_t num_sets = tile_ptr.size(0), tiles = tile_ptr.size(1) - 1,
                  blocks = base_indices.numel() / MACKO_EC_WARP;
    if (sets.size(0) != num_sets + 1 || sets.size(1) != int64_t(sizeof(macko_ec_set) / 8) ||
        num_sets > MACKO_EC_MAX_SETS)
        fail(op, "sets has shape ", shape_name(sets), ", expected [", num_sets + 1, ", ", sizeof(macko_ec_set) / 8,
             "] and at most ", MACKO_EC_MAX_SETS, " sets for the ", num_sets, " of tile_ptr");
    if (base_indices.numel() % MACKO_EC_WARP || block_indptr.numel() != blocks + num_sets)
        fail(op, "block_indptr has ", block_indptr.numel(), " elements, expected ", blocks + num_sets, " for ",
             base_indices.numel(), " base_indices in ", num_sets, " sets");
    // What depends on the content but for this is trusted: check looks at it.
    const auto check_empty_with = [&](const char *name, const Tensor &t, const char *like_name, const Tensor &like) {
        if (!t.numel() && like.numel()) fail(op, name, " is empty, ", like_name, " has ", like.numel(), " elements");
    };
    check_empty_with("block_values", block_values, "delta_indices", delta_indices);
    check_empty_with("delta_indices", delta_indices, "block_values", block_values);
    check_empty_with("row_indices", row_indices, "base_indices", base_indices);
    check_empty_with("base_indices", base_indices, "row_indices", row_indices);
    if (col_order.numel() && col_order.numel() != cols)
        fail(op, "col_order has ", col_order.numel(), " elements, expected ", cols, " or none");
    const int64_t tile_rows = macko_ec_tile_rows(rows, tiles);
    if (tiles < 0 || num_tiles(rows, tile_rows) != tiles || tile_rows > MACKO_EC_MAX_TILE)
        fail(op, "tile_ptr has shape ", shape_name(tile_ptr), ", which is no cut of ", rows, " rows into tiles");
    return {block_values.numel() ? block_values.const_data_ptr() : nullptr,
            data<const uint8_t>(delta_indices),
            data<void>(base_indices),
            data<const int32_t>(block_indptr),
            data<const int32_t>(row_indices),
            data<const int32_t>(tile_ptr),
            data<const macko_ec_set>(sets),
            data<void>(col_order),
            rows,
            cols,
            tiles,
            tile_rows,
            num_sets,
            blocks,
            block_values.numel(),
            row_indices.numel(),
            dtype};
}

// One packing under way: the plan and the tensors that hold its arrays.
struct Packing {
    Tensor w;
    macko_ec_plan plan{};
    Tensor bits, row_counts, columns_at, blocks, columns, order, num_blocks, singles, counts, col_order, scratch;
    std::vector<int64_t> host_counts; // [MACKO_EC_MAX_SETS, tiles, 2]

    Packing(const Tensor &w, macko_dtype dtype, const macko_ec_options &options, int64_t tile_rows,
            const std::vector<int32_t> &columns_in_order)
        : w(w), bits(w), row_counts(w), columns_at(w), blocks(w), columns(w), order(w), num_blocks(w), singles(w),
          counts(w), col_order(w), scratch(w) {
        const auto empty = [&](std::vector<int64_t> shape, ScalarType dtype) {
            return torch::stable::new_empty(this->w, shape, dtype);
        };
        plan.w = w.numel() ? w.const_data_ptr() : nullptr;
        plan.dtype = dtype;
        plan.rows = w.size(0);
        plan.cols = w.size(1);
        plan.words = (plan.cols + 63) / 64;
        plan.tiles = num_tiles(plan.rows, tile_rows);
        plan.tile_rows = macko_ec_tile_rows(plan.rows, plan.tiles);
        plan.options = options;
        const int64_t ordered = int64_t(columns_in_order.size());
        if (plan.cols <= 65536)
            col_order = to_device(w, std::vector<uint16_t>(columns_in_order.begin(), columns_in_order.end()), {ordered},
                                  ScalarType::UInt16);
        else
            col_order = to_device(w, columns_in_order, {ordered}, ScalarType::Int);
        plan.col_order = data<void>(col_order);
        bits = empty({plan.rows, plan.words}, ScalarType::Long);
        plan.bits = data<uint64_t>(bits);
        row_counts = empty({plan.rows}, ScalarType::Int);
        plan.row_counts = data<int32_t>(row_counts);
        num_blocks = empty({plan.tiles}, ScalarType::Int);
        plan.num_blocks = data<int32_t>(num_blocks);
        singles = empty({3, MACKO_EC_MAX_SETS, plan.tiles * plan.tile_rows}, ScalarType::Int);
        plan.single_row = data<int32_t>(singles);
        plan.single_width = plan.single_row + MACKO_EC_MAX_SETS * plan.tiles * plan.tile_rows;
        plan.single_skip = plan.single_width + MACKO_EC_MAX_SETS * plan.tiles * plan.tile_rows;
        counts = empty({MACKO_EC_MAX_SETS, plan.tiles, 2}, ScalarType::Long);
        plan.counts = data<int64_t>(counts);
#ifdef USE_CUDA
        STD_CUDA_CHECK(macko_ec_bits_cuda(&plan, current_stream(w)));
#else
        for_tiles(plan.tiles, [&](int64_t begin, int64_t end) { macko_ec_bits_cpu(&plan, begin, end); });
#endif
        if (options.max_height > 1) extract();
#ifdef USE_CUDA
        STD_CUDA_CHECK(macko_ec_arrange_cuda(&plan, current_stream(w)));
#else
        in_parallel("pack", plan.tiles, 1,
                    [&](int64_t begin, int64_t end) { return macko_ec_arrange_cpu(&plan, begin, end); });
#endif
        host_counts = to_host<int64_t>(counts);
    }

    void extract() {
        // Room for all that extraction can write. A column of a pair stands for two non-zeros; each higher level
        // writes at most as many columns as the one before, from the third on at most half: 1.5 a non-zero in all.
        const std::vector<int32_t> nonzeros = to_host<int32_t>(row_counts);
        std::vector<int64_t> at(plan.tiles + 1, 0);
        for (int64_t row = 0; row < plan.rows; row++) at[row / MACKO_EC_TILE + 1] += nonzeros[row];
        for (int64_t tile = 0; tile < plan.tiles; tile++)
            at[tile + 1] = at[tile] + (at[tile + 1] * 3 / 2 + MACKO_EC_CHUNK - 1) / MACKO_EC_CHUNK * MACKO_EC_CHUNK;
        columns_at = to_device(w, at, {plan.tiles + 1}, ScalarType::Long);
        plan.columns_at = data<int64_t>(columns_at);
        columns = torch::stable::new_empty(w, {at.back()}, ScalarType::Int);
        plan.columns = data<int32_t>(columns);
        blocks = torch::stable::new_empty(w, {at.back() / MACKO_EC_CHUNK * int64_t(sizeof(macko_ec_block))},
                                          ScalarType::Byte);
        plan.blocks = data<macko_ec_block>(blocks);
        order = torch::stable::new_empty(w, {at.back() / MACKO_EC_CHUNK}, ScalarType::Int);
        plan.order = data<int32_t>(order);
#ifdef USE_CUDA
        scratch =
            torch::stable::new_empty(w, {macko_ec_extract_scratch_bytes(plan.tiles, plan.cols)}, ScalarType::Byte);
        plan.scratch = data<uint8_t>(scratch);
        STD_CUDA_CHECK(macko_ec_extract_cuda(&plan, current_stream(w)));
#else
        in_parallel("pack", plan.tiles, 1,
                    [&](int64_t begin, int64_t end) { return macko_ec_extract_cpu(&plan, begin, end); });
#endif
    }

    struct Layout {
        std::vector<int32_t> plan_sets; // of the sets that are not empty
        std::vector<macko_ec_set> sets; // and the end
        std::vector<int32_t> tile_ptr;
        std::vector<int64_t> starts; // as counts: first block, first column
        int64_t bytes = 0;           // of all eight tensors
    };

    Layout layout() const {
        Layout l;
        l.starts.assign(host_counts.size(), 0);
        macko_ec_set next{};
        for (int set = 0; set < MACKO_EC_MAX_SETS; set++) {
            const bool is_slab = set >= MACKO_EC_HEIGHT_SETS && plan.options.num_slabs;
            int64_t blocks = 0, width = 0;
            std::vector<int32_t> tile_ptr;
            for (int64_t tile = 0; tile < plan.tiles; tile++) {
                const int64_t i = (set * plan.tiles + tile) * 2;
                l.starts[i] = blocks;
                l.starts[i + 1] = width;
                tile_ptr.push_back(int32_t(blocks));
                blocks += host_counts[i];
                width += host_counts[i + 1];
            }
            tile_ptr.push_back(int32_t(blocks));
            if (!blocks) continue;
            if (width > INT32_LIMIT)
                fail("pack", "w needs ", width, " columns in one set, block_indptr is int32 and holds at most ",
                     INT32_LIMIT);
            next.height = set < MACKO_EC_HEIGHT_SETS ? MACKO_EC_MAX_HEIGHT >> set : 1;
            next.lanes = is_slab ? plan.options.lanes : MACKO_EC_WARP;
            next.vector = set == MACKO_EC_HEIGHT_SETS + 1 && !is_slab ? 1 : MACKO_EC_VECTOR;
            next.delta_bits = is_slab ? plan.options.slab_bits[set - MACKO_EC_HEIGHT_SETS] : plan.options.delta_bits;
            l.sets.push_back(next);
            l.plan_sets.push_back(set);
            l.tile_ptr.insert(l.tile_ptr.end(), tile_ptr.begin(), tile_ptr.end());
            next.first_block += blocks;
            next.first_row += blocks * (MACKO_EC_WARP / next.lanes) * next.height;
            next.first_value += width * next.height;
            next.first_delta += width * next.delta_bits / 8;
        }
        next.height = next.lanes = next.vector = next.delta_bits = 0;
        l.sets.push_back(next);
        l.bytes = next.first_value * int64_t(w.element_size()) + next.first_delta +
                  next.first_block * (MACKO_EC_WARP * (plan.cols <= 65536 ? 2 : 4) + 4) + next.first_row * 4 +
                  int64_t(l.plan_sets.size()) * 4 + int64_t(l.tile_ptr.size()) * 4 +
                  int64_t(l.sets.size() * sizeof(macko_ec_set)) +
                  (plan.col_order ? plan.cols * (plan.cols <= 65536 ? 2 : 4) : 0);
        return l;
    }

    // `given`: the options, as the header keeps them.
    Made write(const Ints &given) {
        const Layout l = layout();
        const macko_ec_set &end = l.sets.back();
        const int64_t num_sets = int64_t(l.plan_sets.size());
        Tensor values = torch::stable::new_empty(w, {end.first_value});
        Tensor deltas = torch::stable::new_zeros(w, {end.first_delta}, ScalarType::Byte);
        Tensor bases = torch::stable::new_empty(w, {end.first_block * MACKO_EC_WARP},
                                                plan.cols <= 65536 ? ScalarType::UInt16 : ScalarType::Int);
        Tensor indptr = torch::stable::new_empty(w, {end.first_block + num_sets}, ScalarType::Int);
        Tensor rows = torch::stable::new_empty(w, {end.first_row}, ScalarType::Int);
        const Tensor tile_ptr = to_device(w, l.tile_ptr, {num_sets, plan.tiles + 1}, ScalarType::Int);
        const Tensor sets = to_device(w, l.sets, {num_sets + 1, int64_t(sizeof(macko_ec_set) / 8)}, ScalarType::Long);
        counts = to_device(w, l.starts, {MACKO_EC_MAX_SETS, plan.tiles, 2}, ScalarType::Long);
        plan.counts = data<int64_t>(counts);
        Made packed{{values, deltas, bases, indptr, rows, tile_ptr, sets, col_order},
                    {ec_layout.number, plan.rows, plan.cols}};
        packed.header.insert(packed.header.end(), given.begin(), given.end());
        const macko_ec_matrix m = matrix_of("pack", packed);
#ifdef USE_CUDA
        const Tensor plan_sets = to_device(w, l.plan_sets, {num_sets}, ScalarType::Int);
        STD_CUDA_CHECK(macko_ec_write_cuda(&plan, &m, data<int32_t>(plan_sets), current_stream(w)));
#else
        for_tiles(plan.tiles,
                  [&](int64_t begin, int64_t stop) { macko_ec_write_cpu(&plan, &m, l.plan_sets.data(), begin, stop); });
#endif
        return packed;
    }
};

// Bytes that the non-zeros of a column of density p take among columns like it, a non-zero: value, delta and its share
// of the explicit zeros, which stand wherever a geometric distance exceeds the largest delta.
double bytes_a_nonzero(double p, int bits) {
    const double z = std::pow(1 - p, (1 << bits) - 1);
    return (2 + bits / 8.0) / (1 - z);
}

// Cuts columns, densest first, into at most max_slabs slabs of the fewest bytes, each with its best width of deltas.
// Dynamic programming over at most 64 places to cut. A slab costs each row its bases, its row index and half a chunk.
std::vector<int32_t> choose_slabs(const std::vector<int32_t> &counts, int64_t rows, int64_t max_slabs,
                                  macko_ec_options *options) {
    const int64_t cols = int64_t(counts.size());
    std::vector<int32_t> order(cols);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return counts[a] > counts[b]; });
    const int64_t unit = 64 * ((cols + 4095) / 4096), units = (cols + unit - 1) / unit;
    constexpr int MIN_BITS = 3, MAX_BITS = 8;
    std::vector<std::array<double, MAX_BITS + 1>> prefix(units + 1);
    for (int64_t c = 0; c < cols; c++) {
        const int64_t u = c / unit + 1;
        if (c % unit == 0) prefix[u] = prefix[u - 1];
        const double n = counts[order[c]];
        for (int bits = MIN_BITS; n && bits <= MAX_BITS; bits++) prefix[u][bits] += n * bytes_a_nonzero(n / rows, bits);
    }
    struct Best {
        double bytes = 1e300;
        int64_t begin = 0;
        int bits = 0;
    };
    std::vector<std::vector<Best>> best(max_slabs + 1, std::vector<Best>(units + 1));
    best[0][0].bytes = 0;
    for (int64_t s = 1; s <= max_slabs; s++)
        for (int64_t end = 1; end <= units; end++)
            for (int64_t begin = 0; begin < end; begin++)
                for (int bits = MIN_BITS; bits <= MAX_BITS; bits++) {
                    const int lanes = options->lanes;
                    const double overhead = rows * (lanes * MACKO_EC_VECTOR / 2 * (2 + bits / 8.0) + 2 * lanes + 4);
                    const double bytes = best[s - 1][begin].bytes + prefix[end][bits] - prefix[begin][bits] + overhead;
                    if (bytes < best[s][end].bytes) best[s][end] = {bytes, begin, bits};
                }
    int64_t slabs = 1;
    for (int64_t s = 2; s <= max_slabs; s++)
        if (best[s][units].bytes < best[slabs][units].bytes) slabs = s;
    options->num_slabs = int(slabs);
    int64_t end = units;
    options->slab_begin[slabs] = cols;
    for (int64_t s = slabs; s > 0; s--) {
        options->slab_begin[s - 1] = best[s][end].begin * unit;
        options->slab_bits[s - 1] = best[s][end].bits;
        end = best[s][end].begin;
    }
    return order;
}

// The packing of fewest bytes: the columns as they are with one width of deltas, or in slabs by density.
Packing choose_packing(const Tensor &w, macko_dtype dtype, macko_ec_options options, int64_t tile_rows,
                       int64_t max_slabs) {
    Tensor counts_tensor = torch::stable::new_empty(w, {w.size(1)}, ScalarType::Int);
#ifdef USE_CUDA
    STD_CUDA_CHECK(macko_ec_column_counts_cuda(w.const_data_ptr(), w.size(0), w.size(1), data<int32_t>(counts_tensor),
                                               current_stream(w)));
#else
    macko_ec_column_counts_cpu(w.const_data_ptr(), dtype, w.size(0), w.size(1), data<int32_t>(counts_tensor));
#endif
    const std::vector<int32_t> counts = to_host<int32_t>(counts_tensor);
    const double nonzeros = std::accumulate(counts.begin(), counts.end(), 0.0);
    const double density = std::max(nonzeros, 1.0) / double(w.numel());
    // Of even columns the formula is within 0.1 %, of uneven ones it errs; so the two best widths are packed and counted.
    std::vector<int> widths{3, 4, 5, 6, 7, 8};
    std::stable_sort(widths.begin(), widths.end(),
                     [&](int a, int b) { return bytes_a_nonzero(density, a) < bytes_a_nonzero(density, b); });
    options.num_slabs = 1;
    options.slab_begin[1] = w.size(1);
    options.slab_bits[0] = widths[0];
    Packing best(w, dtype, options, tile_rows, {});
    const auto keep_smaller = [&](Packing &&other) {
        if (other.layout().bytes < best.layout().bytes) best = std::move(other);
    };
    options.slab_bits[0] = widths[1];
    keep_smaller(Packing(w, dtype, options, tile_rows, {}));
    if (max_slabs > 1) {
        const std::vector<int32_t> order = choose_slabs(counts, w.size(0), max_slabs, &options);
        if (options.num_slabs > 1) keep_smaller(Packing(w, dtype, options, tile_rows, order));
    }
    return best;
}

// Dense [rows, cols]; the content is trusted.
Tensor unpack(const macko_ec_matrix &m, const Tensor &values) {
    Tensor w = torch::stable::new_empty(values, {m.rows, m.cols});
#ifdef USE_CUDA
    STD_CUDA_CHECK(macko_ec_unpack_cuda(&m, w.mutable_data_ptr(), current_stream(values)));
#else
    for_tiles(m.tiles, [&](int64_t begin, int64_t end) { macko_ec_unpack_cpu(&m, begin, end, w.mutable_data_ptr()); });
#endif
    return w;
}

// y [shape] = W x + bias for one vector.
Tensor spmv(const macko_ec_matrix &m, const Tensor &values, const Tensor &x_any, const void *bias,
            std::vector<int64_t> shape) {
    const Tensor x = as_contiguous(x_any);
    Tensor y = torch::stable::new_empty(values, shape);
    if (!m.rows) return y;
#ifdef USE_CUDA
    Tensor partials = torch::stable::new_empty(values, {macko_ec_spmv_partials(&m)}, ScalarType::Float);
    STD_CUDA_CHECK(macko_ec_spmv_cuda(&m, x.const_data_ptr(), bias, y.mutable_data_ptr(), data<float>(partials),
                                      current_stream(values)));
#else
    Tensor ordered = torch::stable::new_empty(values, {m.cols}, ScalarType::Float);
    macko_ec_order_x_cpu(&m, x.const_data_ptr(), data<float>(ordered));
    for_tiles(m.tiles, [&](int64_t begin, int64_t end) {
        macko_ec_spmv_cpu(&m, data<float>(ordered), bias, begin, end, y.mutable_data_ptr());
    });
#endif
    return y;
}

// options: delta_bits, lanes, max_height, min_width, max_width, tile_rows, max_slabs.
Made pack(const Tensor &w_any, const Ints &given) {
    const int64_t delta_bits = given[0], lanes = given[1], max_height = given[2], min_width = given[3],
                  max_width = given[4], tile_rows = given[5], max_slabs = given[6];
    check_backend("pack", "w", w_any);
    const macko_dtype dtype = check_value_dtype("pack", "w", w_any);
    check_dim("pack", "w", w_any, 2);
    if (w_any.size(0) >= INT32_LIMIT || w_any.size(1) >= INT32_LIMIT)
        fail("pack", "w has shape ", shape_name(w_any), ", expected at most 2^31 - 2 rows and columns");
    const auto power_of_two = [](int64_t v, int64_t most) { return v >= 1 && v <= most && !(v & (v - 1)); };
    if (!power_of_two(lanes, MACKO_EC_WARP)) fail("pack", "lanes is ", lanes, ", expected 1, 2, 4, 8, 16 or 32");
    if (delta_bits && (delta_bits < 3 || delta_bits > 8))
        fail("pack", "delta_bits is ", delta_bits, ", expected 3 to 8, or 0");
    if (!delta_bits && (lanes == MACKO_EC_WARP || max_height > 1))
        fail("pack", "delta_bits is 0, which lets pack choose: expected lanes under 32 and max_height 1, got ", lanes,
             " and ", max_height);
    if (!power_of_two(max_height, MACKO_EC_MAX_HEIGHT))
        fail("pack", "max_height is ", max_height, ", expected 1, 2, 4, 8 or 16");
    if (min_width < MACKO_EC_CHUNK || min_width % MACKO_EC_CHUNK || max_width < min_width || max_width % MACKO_EC_CHUNK)
        fail("pack", "min_width is ", min_width, " and max_width ", max_width, ", expected rising multiples of ",
             MACKO_EC_CHUNK);
    if (tile_rows < MACKO_EC_TILE || tile_rows > MACKO_EC_MAX_TILE || tile_rows % MACKO_EC_TILE ||
        (tile_rows != MACKO_EC_TILE && (max_height > 1 || lanes == MACKO_EC_WARP)))
        fail("pack", "tile_rows is ", tile_rows, ", expected ", MACKO_EC_TILE, ", or a multiple up to ",
             int(MACKO_EC_MAX_TILE), " where lanes < 32 and max_height is 1");
    if (max_slabs < 1 || max_slabs > MACKO_EC_MAX_SLABS)
        fail("pack", "max_slabs is ", max_slabs, ", expected 1 to ", int(MACKO_EC_MAX_SLABS));
    const DeviceOf guard(w_any);
    const Tensor w = as_contiguous(w_any);
    macko_ec_options options{};
    options.delta_bits = int(delta_bits);
    options.lanes = int(lanes);
    options.max_height = int(max_height);
    options.min_width = int(min_width);
    options.max_width = int(std::min<int64_t>(max_width, INT32_LIMIT / MACKO_EC_CHUNK * MACKO_EC_CHUNK));
    if (!delta_bits && w.numel()) return choose_packing(w, dtype, options, tile_rows, max_slabs).write(given);
    if (lanes < MACKO_EC_WARP) {
        options.num_slabs = 1;
        options.slab_bits[0] = delta_bits ? int(delta_bits) : 4;
        options.slab_begin[1] = w.size(1);
    }
    return Packing(w, dtype, options, tile_rows, {}).write(given);
}

Tensor dense(const Packed &p, bool) {
    const macko_ec_matrix m = matrix_of("dense", p);
    const DeviceOf guard(p[0]);
    return unpack(m, p[0]);
}

Tensor check(const Packed &p) {
    const macko_ec_matrix m = matrix_of("check", p);
#ifdef USE_CUDA
    (void)m;
    return check_on_cpu(p);
#else
    Tensor found = new_fault(p[0]);
    const macko_fault fault = macko_ec_check_cpu(&m, p[1].numel());
    if (fault.kind == MACKO_EC_NO_MEMORY) fail("check", "out of memory");
    *fault_in(found) = fault;
    return found;
#endif
}

#ifndef USE_CUDA
// y = x W^T + bias by torch's dense product, over as many tiles as have 4 MB of dense rows, or one, whose memory is used
// again: a matrix may have far fewer values than columns, so a whole dense copy far more bytes than a file.
Tensor linear_by_tiles(const macko_ec_matrix &m, const Tensor &values, const Tensor &x_any,
                       const std::optional<Tensor> &bias) {
    const Tensor x = as_tokens(x_any);
    const int64_t row_bytes = std::max<int64_t>(1, m.cols * values.element_size());
    const int64_t at_once = std::max<int64_t>(1, (4 << 20) / (m.tile_rows * row_bytes));
    Tensor y = torch::stable::new_empty(values, {x.size(0), m.rows});
    Tensor block = torch::stable::new_empty(values, {std::min(m.rows, at_once * m.tile_rows), m.cols});
    for (int64_t tile = 0; tile < m.tiles; tile += at_once) {
        const int64_t row = tile * m.tile_rows, count = std::min(m.rows - row, block.size(0));
        // Where the first row would be: each tile is written to its place.
        const uintptr_t first_row = uintptr_t(block.mutable_data_ptr()) - row * row_bytes;
        for_tiles(std::min(at_once, m.tiles - tile), [&](int64_t begin, int64_t end) {
            macko_ec_unpack_cpu(&m, tile + begin, tile + end, reinterpret_cast<void *>(first_row));
        });
        Tensor to = torch::stable::narrow(y, 1, row, count);
        torch::stable::copy_(
            to, dense_linear(x, torch::stable::narrow(block, 0, 0, count), narrowed_bias(bias, row, count)));
    }
    return torch::stable::reshape(y, with_last(x_any, m.rows));
}
#endif

Tensor linear(const Packed &p, const Tensor &x, const std::optional<Tensor> &bias_any) {
    const char *op = "linear";
    const macko_ec_matrix m = matrix_of(op, p);
    const Tensor &values = p[0];
    check_tokens(op, x, "block_values", values, m.cols);
    const auto bias = checked_bias(op, bias_any, "block_values", values, values.scalar_type(), m.rows);
    const DeviceOf guard(values);
    if (macko_ec_path(num_tokens(x)) == MACKO_PATH_SPMV) return spmv(m, values, x, data_of(bias), with_last(x, m.rows));
    // More tokens: dense rows for the time of one product. They cost a read and a write of the dense bytes.
#ifdef USE_CUDA
    return dense_linear(x, unpack(m, values), bias);
#else
    return linear_by_tiles(m, values, x, bias);
#endif
}

} // namespace

Tensor ec_spmv(const Tensor &block_values, const Tensor &delta_indices, const Tensor &base_indices,
               const Tensor &block_indptr, const Tensor &row_indices, const Tensor &tile_ptr, const Tensor &sets,
               const Tensor &col_order, int64_t rows, int64_t cols, const Tensor &x) {
    const Tensor tensors[] = {block_values, delta_indices, base_indices, block_indptr,
                              row_indices,  tile_ptr,      sets,         col_order};
    const int64_t header[] = {ec_layout.number, rows, cols};
    const macko_ec_matrix m = matrix_of("ec_spmv", {tensors, header});
    check_vector("ec_spmv", x, "block_values", block_values, cols);
    const DeviceOf guard(block_values);
    return spmv(m, block_values, x, nullptr, {rows});
}

const Registered ec_layout({.name = "ec",
                            .number = 4,
                            .tensors = 8,
                            .numbers = 7,
                            .pack_options = 7,
                            .pack = pack,
                            .dense = dense,
                            .check = check,
                            .linear = linear});

} // namespace macko
