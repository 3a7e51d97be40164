// The map: every op with its schema, and every layout. Compiled once for the CPU and once for CUDA (USE_CUDA). What an op
// does with a layout (checks, memory) is in the ops.cpp of the layout's folder, csrc/macko for the canonical; which kernel
// multiplies is in path.h.
#include <algorithm>
#include <array>

#include "../experts/experts.h"
#include "layouts.h"
#include "packed.h"
#include "rows.h"
#include "tensors.h"
#ifdef USE_CUDA
#include "../input/input.h"
#endif

namespace macko {
namespace {

// By number. Each file with a layout puts it there when the library is loaded.
constinit std::array<const Layout *, MACKO_MOST_LAYOUTS> layouts{};
constinit const char *twice = nullptr; // the name of one that found its number taken

const Layout &layout_numbered(const char *op, int64_t number) {
    if (number >= 0 && number < MACKO_MOST_LAYOUTS && layouts[number]) return *layouts[number];
    const auto there = std::count_if(layouts.begin(), layouts.end(), [](const Layout *layout) { return layout; });
    fail(op, "layout is ", number, ", expected 0 to ", there - 1);
}

// The layout's row of the table, for tensors and a header that are as many as it has.
const Layout &layout_of(const char *op, const Packed &p) {
    if (p.header.size() < 3) fail(op, "header has ", p.header.size(), " numbers, expected a layout, rows and cols");
    const Layout &layout = layout_numbered(op, p.header[0]);
    if (p.tensors.size() != layout.tensors || p.header.size() != 3 + layout.numbers)
        fail(op, "packed has ", p.tensors.size(), " tensors and header ", p.header.size(), " numbers, ", layout.name,
             " has ", layout.tensors, " and ", 3 + layout.numbers);
    return layout;
}

// What the layout does, or why it does not.
template <typename Function>
Function which(const char *op, const Layout &layout, Function function) {
    if (function) return function;
    fail(op, "the ", layout.name, " layout ", layout.instead);
}

void check_options(const char *op, const Ints &options, size_t wanted) {
    if (options.size() != wanted) fail(op, "options has ", options.size(), " numbers, expected ", wanted);
}

using Returned = std::tuple<std::vector<Tensor>, Tensor>;

// A header as a tensor: what an op gives has to be one, for torch.compile.
Returned returned(Made &&made) {
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    Tensor header = torch::stable::empty({int64_t(made.header.size())}, ScalarType::Long, std::nullopt, cpu);
    std::copy(made.header.begin(), made.header.end(), writes<int64_t>(header));
    return {std::move(made.tensors), header};
}

Returned pack(const Tensor &w, int64_t layout_id, const Ints &options) {
    const Layout &layout = layout_numbered("pack", layout_id);
    const auto pack = which("pack", layout, layout.pack);
    check_options("pack", options, layout.pack_options);
    return returned(pack(w, options));
}

Returned lay_out(const std::vector<Tensor> &packed, const Ints &header, int64_t layout_id, const Ints &options) {
    const Packed p{packed, header};
    const Layout &from = layout_of("lay_out", p), &to = layout_numbered("lay_out", layout_id);
    if (&to == &canonical_layout) return returned(which("lay_out", from, from.to_canonical)(p));
    if (&from != &canonical_layout) fail("lay_out", "packed is of the layout ", from.name, ", expected the canonical");
    const auto lay_out = which("lay_out", to, to.lay_out);
    check_options("lay_out", options, to.lay_out_options);
    return returned(lay_out(p, options));
}

Tensor dense(const std::vector<Tensor> &packed, const Ints &header, bool check) {
    const Packed p{packed, header};
    const Layout &layout = layout_of("dense", p);
    return which("dense", layout, layout.dense)(p, check);
}

Tensor check(const std::vector<Tensor> &packed, const Ints &header) {
    const Packed p{packed, header};
    const Layout &layout = layout_of("check", p);
    return which("check", layout, layout.check)(p);
}

Tensor linear(const Tensor &x, const std::vector<Tensor> &packed, const Ints &header,
              const std::optional<Tensor> &bias) {
    const Packed p{packed, header};
    const Layout &layout = layout_of("linear", p);
    return which("linear", layout, layout.linear)(p, x, bias);
}

// What compiled graphs call (macko/fuse.py), and layers under no_grad: linear's gradients are a kernel in Python, 4 us a
// call where none is wanted either. The ops after those have none.
constexpr auto &linear_below_autograd = linear;

std::vector<Tensor> linear_parts(const Tensor &x, const std::vector<Tensor> &packed, const Ints &header,
                                 const Ints &part_rows) {
    const char *op = "linear_parts";
    const Packed p{packed, header};
    const Layout &layout = layout_of(op, p);
    if (layout.linear_parts) return layout.linear_parts(p, x, part_rows);
    check_parts(op, part_rows, p.rows()); // no kernel stores them: copies
    Tensor y = which(op, layout, layout.linear)(p, x, std::nullopt);
    std::vector<Tensor> parts;
    int64_t first = 0;
    for (const int64_t rows : part_rows) {
        parts.push_back(torch::stable::clone(torch::stable::narrow(y, y.dim() - 1, first, rows)));
        first += rows;
    }
    return parts;
}

Tensor experts_product(const Tensor &x, const std::vector<Tensor> &packed, const Ints &header, int64_t rows,
                       const Tensor &ends, const std::optional<Tensor> &order, int64_t top_k, bool gated, bool early) {
    const char *op = "linear_experts";
    const Packed p{packed, header};
    const Layout &layout = layout_of(op, p);
    return which(op, layout, layout.linear_experts)(p, x, rows, ends, order, top_k, gated, early);
}

Tensor linear_experts(const Tensor &x, const std::vector<Tensor> &packed, const Ints &header, int64_t rows,
                      const Tensor &ends, const std::optional<Tensor> &order, int64_t top_k, bool gated) {
    return experts_product(x, packed, header, rows, ends, order, top_k, gated, false);
}

// Of ids [tokens, top_k], each token's experts: the pairs in the order of their experts, the place of each there, and where
// each expert's end (csrc/experts/experts.h).
std::tuple<Tensor, Tensor, Tensor> expert_order(const Tensor &ids_any, int64_t experts) {
    const char *op = "expert_order";
    check_backend(op, "ids", ids_any);
    const ScalarType dtype = ids_any.scalar_type();
    if (dtype != ScalarType::Long && dtype != ScalarType::Int)
        fail(op, "ids has dtype ", dtype_name(dtype), ", expected int64 or int32");
    check_dim(op, "ids", ids_any, 2);
    if (experts < 0 || experts > INT32_LIMIT) fail(op, "experts is ", experts, ", expected 0 to ", INT32_LIMIT);
    if (ids_any.numel() > INT32_LIMIT)
        fail(op, "ids has ", ids_any.numel(), " elements, expected int32's limit at most");
    const DeviceOf guard(ids_any);
    const Tensor ids = as_contiguous(ids_any);
    const int32_t int32 = aoti_torch_dtype_int32();
    Tensor order = new_tensor(ids, {ids.numel()}, int32), places = new_tensor(ids, {ids.size(0), ids.size(1)}, int32),
           ends = new_tensor(ids, {experts}, int32);
    const macko_expert_order p = {.ids = ids.const_data_ptr(),
                                  .id_bytes = int(ids.element_size()),
                                  .pairs = ids.numel(),
                                  .experts = experts,
                                  .order = writes<int32_t>(order),
                                  .places = writes<int32_t>(places),
                                  .ends = writes<int32_t>(ends)};
#ifdef USE_CUDA
    const cudaError_t error = macko_expert_order_cuda(&p, current_stream(ids));
    if (error == cudaErrorInvalidValue) fail(op, "experts is ", experts, ", more than a block counts");
    STD_CUDA_CHECK(error);
#else
    macko_expert_order_cpu(&p);
#endif
    return {order, places, ends};
}

Tensor expert_sum_of(const Tensor &x_any, const Tensor &places_any, const Tensor &weights_any, bool early) {
    const char *op = "expert_sum";
    check_backend(op, "x", x_any);
    const macko_dtype dtype = check_value_dtype(op, "x", x_any);
    check_dim(op, "x", x_any, 2);
    check_device(op, "places", places_any, "x", x_any);
    check_dtype(op, "places", places_any, ScalarType::Int);
    check_dim(op, "places", places_any, 2);
    check_device(op, "weights", weights_any, "x", x_any);
    const bool is_float = weights_any.scalar_type() == ScalarType::Float;
    if (!is_float && weights_any.scalar_type() != x_any.scalar_type())
        fail(op, "weights has dtype ", dtype_name(weights_any.scalar_type()), ", expected float32 or x's, ",
             dtype_name(x_any.scalar_type()));
    if (shape_name(weights_any) != shape_name(places_any))
        fail(op, "weights has shape ", shape_name(weights_any), ", places has ", shape_name(places_any));
    const DeviceOf guard(x_any);
    const Tensor x = as_aligned(x_any), places = as_contiguous(places_any), weights = as_contiguous(weights_any);
    Tensor y = new_tensor(x, {places.size(0), x.size(1)});
    const macko_expert_sum p = {.dtype = dtype,
                                .weights_dtype = is_float ? MACKO_F32 : dtype,
                                .tokens = places.size(0),
                                .top_k = places.size(1),
                                .cols = x.size(1),
                                .rows = x.size(0),
                                .x = x.const_data_ptr(),
                                .places = reads<int32_t>(places),
                                .weights = weights.const_data_ptr(),
                                .early = early && weights_any.is_contiguous(), // else the copy comes right before
                                .y = y.mutable_data_ptr()};
#ifdef USE_CUDA
    STD_CUDA_CHECK(macko_expert_sum_cuda(&p, current_stream(x)));
#else
    for_rows(p.tokens, p.top_k * p.cols, [&](int64_t begin, int64_t end) { macko_expert_sum_cpu(&p, begin, end); });
#endif
    return y;
}

// [tokens, cols]: of each token the sum of the rows of x [pairs, cols] at its places, times weights; both [tokens, top_k].
Tensor expert_sum(const Tensor &x, const Tensor &places, const Tensor &weights) {
    return expert_sum_of(x, places, weights, false);
}

// Of x [tokens, cols] what experts give whose gate is silu: the four ops above in one, as each takes the host microseconds.
Tensor gated_experts(const Tensor &x, const Tensor &ids, const Tensor &weights, int64_t experts,
                     const std::vector<Tensor> &gate_up, const Ints &gate_up_header, int64_t gate_up_rows,
                     const std::vector<Tensor> &down, const Ints &down_header, int64_t down_rows) {
    const char *op = "gated_experts";
    check_dim(op, "x", x, 2);
    check_dim(op, "ids", ids, 2);
    if (ids.size(0) != x.size(0)) fail(op, "ids has ", ids.size(0), " rows, x has ", x.size(0));
    const auto [order, places, ends] = expert_order(ids, experts);
    const Tensor h = linear_experts(x, gate_up, gate_up_header, gate_up_rows, ends, order, ids.size(1), false);
    // Each kernel waits for the one before it before it lets the next one begin, but for the gate's, and there must be no
    // second one like that: so when the second product begins, what came before the first one has ended.
    const Tensor y = experts_product(h, down, down_header, down_rows, ends, std::nullopt, 1, true, true);
    return expert_sum_of(y, places, weights, true);
}

#ifdef USE_CUDA
// What stands before a product: 16-bit x [..., cols] on this library's device, 8 columns at a time.
macko_dtype check_input(const char *op, const char *name, const Tensor &x, int64_t cols) {
    const macko_dtype dtype = check_value_dtype(op, name, x);
    check_last(op, name, x, cols);
    if (cols % 8) fail(op, "cols is ", cols, ", expected a multiple of 8");
    return dtype;
}

void check_like(const char *op, const char *name, const Tensor &t, const char *like_name, const Tensor &like) {
    check_device(op, name, t, like_name, like);
    check_dtype(op, name, t, like.scalar_type());
    if (shape_name(t) != shape_name(like))
        fail(op, name, " has shape ", shape_name(t), ", ", like_name, " has ", shape_name(like));
}

// The norm of x, or of x + other, which goes to sum.
Tensor normed(const char *op, const Tensor &x_any, const std::optional<Tensor> &other_any, const Tensor &weight_any,
              double eps, std::optional<Tensor> *sum = nullptr) {
    const int64_t cols = x_any.dim() ? x_any.size(-1) : 1;
    const macko_dtype dtype = check_input(op, "x", x_any, cols);
    check_vector(op, weight_any, "x", x_any, cols, "weight");
    if (other_any) check_like(op, "other", *other_any, "x", x_any);
    const DeviceOf guard(x_any);
    const Tensor x = as_aligned(x_any), weight = as_aligned(weight_any);
    std::optional<Tensor> other;
    if (other_any) other = as_aligned(*other_any);
    Tensor y = new_tensor(x, with_last(x, cols));
    if (other) *sum = new_tensor(x, with_last(x, cols));
    STD_CUDA_CHECK(macko_rms_norm_cuda(dtype, num_tokens(x), cols, x.const_data_ptr(), data_of(other),
                                       weight.const_data_ptr(), float(eps), y.mutable_data_ptr(),
                                       other ? (*sum)->mutable_data_ptr() : nullptr, current_stream(x)));
    return y;
}
#endif

// [normed x], or [normed x + other, x + other]; in front of a product of any layout.
std::vector<Tensor> rms_norm(const Tensor &x, const Tensor &weight, double eps, const std::optional<Tensor> &other) {
    const char *op = "rms_norm";
#ifdef USE_CUDA
    check_backend(op, "x", x);
    std::optional<Tensor> sum;
    std::vector<Tensor> made{normed(op, x, other, weight, eps, &sum)};
    if (sum) made.push_back(*sum);
    return made;
#else
    (void)x, (void)weight, (void)eps, (void)other;
    fail(op, "is for a GPU");
#endif
}

// A layout whose product makes its own input does that for one token; else a kernel before the product does.
Tensor norm_linear(const Tensor &x_any, const Tensor &weight_any, double eps, const std::vector<Tensor> &packed,
                   const Ints &header, const std::optional<Tensor> &bias) {
    const char *op = "norm_linear";
    const Packed p{packed, header};
    const Layout &layout = layout_of(op, p);
    if (layout.norm_linear && num_tokens(x_any) == 1) return layout.norm_linear(p, x_any, weight_any, eps, bias);
#ifdef USE_CUDA
    const auto linear = which(op, layout, layout.linear);
    check_device(op, "x", x_any, "packed", p[0]);
    check_last(op, "x", x_any, p.cols());
    return linear(p, normed(op, x_any, std::nullopt, weight_any, eps), bias);
#else
    return which(op, layout, layout.norm_linear)(p, x_any, weight_any, eps, bias);
#endif
}

Tensor gated_linear(const Tensor &gate_any, const Tensor &up_any, const std::vector<Tensor> &packed, const Ints &header,
                    const std::optional<Tensor> &bias) {
    const char *op = "gated_linear";
    const Packed p{packed, header};
    const Layout &layout = layout_of(op, p);
#ifdef USE_CUDA
    const auto linear = which(op, layout, layout.linear);
    check_device(op, "gate", gate_any, "packed", p[0]);
    check_device(op, "up", up_any, "packed", p[0]);
    const int64_t cols = p.cols(), tokens = num_tokens(gate_any);
    const macko_dtype dtype = check_input(op, "gate", gate_any, cols);
    check_like(op, "up", up_any, "gate", gate_any);
    const DeviceOf guard(gate_any);
    const Tokens gate = tokens_of(gate_any, tokens, cols), up = tokens_of(up_any, tokens, cols);
    Tensor x = new_tensor(gate_any, with_last(gate_any, cols));
    STD_CUDA_CHECK(macko_gate_cuda(dtype, tokens, cols, gate.x.const_data_ptr(), gate.stride, up.x.const_data_ptr(),
                                   up.stride, x.mutable_data_ptr(), current_stream(gate_any)));
    return linear(p, x, bias);
#else
    (void)gate_any, (void)up_any, (void)bias;
    fail(op, "the ", layout.name, " layout ", layout.instead);
#endif
}

} // namespace

Registered::Registered(const Layout &layout) : Layout(layout) {
    const bool in_table = number >= 0 && number < MACKO_MOST_LAYOUTS;
    if (in_table && !layouts[number])
        layouts[number] = this;
    else
        twice = name;
}

Tensor check_on_cpu(const Packed &p) {
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    std::vector<Tensor> there;
    for (const Tensor &t : p.tensors) there.push_back(torch::stable::to(t, cpu));
    return torch::stable::to(call_op("macko::check", "", there, Ints(p.header.begin(), p.header.end())), p[0].device());
}

} // namespace macko

const char *macko_layout_name(int number) {
    return macko::layouts[number] ? macko::layouts[number]->name : nullptr;
}
const char *macko_layout_twice(void) {
    return macko::twice;
}

// clang-format off
// A packed weight is a list of tensors and a header of whole numbers: packed.h says which. The last four are the papers'.
#define MACKO_OPS(OP) \
    OP(pack, "(Tensor w, int layout, int[] options) -> (Tensor[], Tensor)") \
    OP(lay_out, "(Tensor[] packed, int[] header, int layout, int[] options) -> (Tensor[], Tensor)") \
    OP(dense, "(Tensor[] packed, int[] header, bool check=True) -> Tensor") \
    OP(check, "(Tensor[] packed, int[] header) -> Tensor") \
    OP(linear, "(Tensor x, Tensor[] packed, int[] header, Tensor? bias=None) -> Tensor") \
    OP(linear_below_autograd, "(Tensor x, Tensor[] packed, int[] header, Tensor? bias=None) -> Tensor") \
    OP(linear_parts, "(Tensor x, Tensor[] packed, int[] header, int[] part_rows) -> Tensor[]") \
    OP(linear_experts, "(Tensor x, Tensor[] packed, int[] header, int rows, Tensor ends, Tensor? order=None, int top_k=1, bool gated=False) -> Tensor") \
    OP(expert_order, "(Tensor ids, int experts) -> (Tensor, Tensor, Tensor)") \
    OP(expert_sum, "(Tensor x, Tensor places, Tensor weights) -> Tensor") \
    OP(gated_experts, "(Tensor x, Tensor ids, Tensor weights, int experts, Tensor[] gate_up, int[] gate_up_header, int gate_up_rows, Tensor[] down, int[] down_header, int down_rows) -> Tensor") \
    OP(rms_norm, "(Tensor x, Tensor weight, float eps, Tensor? other=None) -> Tensor[]") \
    OP(norm_linear, "(Tensor x, Tensor weight, float eps, Tensor[] packed, int[] header, Tensor? bias=None) -> Tensor") \
    OP(gated_linear, "(Tensor gate, Tensor up, Tensor[] packed, int[] header, Tensor? bias=None) -> Tensor") \
    OP(spmv, /* MACKO-SpMV */ \
       "(Tensor values, Tensor deltas, Tensor row_ptr, int cols, Tensor x, int delta_bits=4) -> Tensor") \
    OP(ec_spmv, /* EC-SpMV */ \
       "(Tensor block_values, Tensor delta_indices, Tensor base_indices, Tensor block_indptr, Tensor row_indices, Tensor tile_ptr, Tensor sets, Tensor col_order, int rows, int cols, Tensor x) -> Tensor") \
    OP(slide_quant_fused, /* SlideSparse */ \
       "(Tensor x, int n, ScalarType dtype) -> (Tensor, Tensor)") \
    OP(slide_gemm, /* SlideSparse */ \
       "(Tensor lifted, Tensor token_scale, Tensor packed, Tensor scale, int cols, int n, ScalarType out_dtype, Tensor? bias=None) -> Tensor")

#define DEFINE(name, schema) m.def(#name schema);
#define IMPLEMENT(name, schema) m.impl(#name, TORCH_BOX(&macko::name));

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(macko, CUDA, m) { MACKO_OPS(IMPLEMENT) }
#else
STABLE_TORCH_LIBRARY(macko, m) { MACKO_OPS(DEFINE) }
STABLE_TORCH_LIBRARY_IMPL(macko, CPU, m) { MACKO_OPS(IMPLEMENT) }
#endif
