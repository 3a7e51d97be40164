// The map: every op with its schema, and every layout. Compiled once for the CPU and once for CUDA (USE_CUDA). What an op
// does with a layout (checks, memory, which kernel) is in the ops.cpp of the layout's folder, csrc/macko for the canonical.
#include <algorithm>
#include <array>

#include "packed.h"
#include "tensors.h"

namespace macko {
namespace {

#define ADDRESS(id, layout) &layout,
constexpr std::array<const Layout *, NUM_LAYOUTS> LAYOUTS = {MACKO_LAYOUTS(ADDRESS)};
#undef ADDRESS

const Layout &layout_numbered(const char *op, int64_t id) {
    if (id < 0 || id >= NUM_LAYOUTS) fail(op, "layout is ", id, ", expected 0 to ", NUM_LAYOUTS - 1);
    return *LAYOUTS[id];
}

// The layout's row of the table, for tensors and a header that are as many as it has.
const Layout &layout_of(const char *op, const Packed &p) {
    if (p.header.size() < 3) fail(op, "header has ", p.header.size(), " numbers, expected a layout, rows and cols");
    const Layout &layout = layout_numbered(op, p.header[0]);
    if (p.tensors.size() != layout.tensors || p.header.size() != 3 + layout.own)
        fail(op, "packed has ", p.tensors.size(), " tensors and header ", p.header.size(), " numbers, ", layout.name,
             " has ", layout.tensors, " and ", 3 + layout.own);
    return layout;
}

// What the layout does, or why it does not.
template <typename Function>
Function which(const char *op, const Layout &layout, Function function) {
    if (function) return function;
#ifdef USE_CUDA
    if (&layout == &bitmap_layout)
        fail(op, "the bitmap layout is for the CPU, on a GPU use the format macko, sell or tile");
#else
    if (&layout == &sell_layout) fail(op, "the sell layout is for a GPU, on the CPU use the format macko or bitmap");
#endif
    fail(op, "the ", layout.name, " layout has no such kernel here");
}

void check_options(const char *op, const Ints &options, size_t wanted) {
    if (options.size() != wanted) fail(op, "options has ", options.size(), " numbers, expected ", wanted);
}

using Made = std::tuple<std::vector<Tensor>, Tensor>;

// A header as a tensor: what an op gives has to be one, for torch.compile.
Made made_of(const Packed &p) {
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    Tensor header = torch::stable::empty({int64_t(p.header.size())}, ScalarType::Long, std::nullopt, cpu);
    std::copy(p.header.begin(), p.header.end(), static_cast<int64_t *>(header.mutable_data_ptr()));
    return {p.tensors, header};
}

Made pack(const Tensor &w, int64_t layout_id, const Ints &options) {
    const Layout &layout = layout_numbered("pack", layout_id);
    const auto pack = which("pack", layout, layout.pack);
    check_options("pack", options, layout.pack_options);
    return made_of(pack(w, options));
}

Made lay_out(const std::vector<Tensor> &packed, const Ints &header, int64_t layout_id, const Ints &options) {
    const Packed p{packed, header};
    const Layout &from = layout_of("lay_out", p), &to = layout_numbered("lay_out", layout_id);
    if (&to == &canonical_layout) return made_of(which("lay_out", from, from.to_canonical)(p));
    if (&from != &canonical_layout) fail("lay_out", "packed is of the layout ", from.name, ", expected the canonical");
    const auto lay_out = which("lay_out", to, to.lay_out);
    check_options("lay_out", options, to.lay_out_options);
    return made_of(lay_out(p, options));
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

std::vector<Tensor> linear_parts(const Tensor &x, const std::vector<Tensor> &packed, const Ints &header,
                                 const Ints &part_rows) {
    const Packed p{packed, header};
    const Layout &layout = layout_of("linear_parts", p);
    return which("linear_parts", layout, layout.linear_parts)(p, x, part_rows);
}

Tensor norm_linear(const Tensor &x, const Tensor &weight, double eps, const std::vector<Tensor> &packed,
                   const Ints &header, const std::optional<Tensor> &bias) {
    const Packed p{packed, header};
    const Layout &layout = layout_of("norm_linear", p);
    return which("norm_linear", layout, layout.norm_linear)(p, x, weight, eps, bias);
}

Tensor gated_linear(const Tensor &gate, const Tensor &up, const std::vector<Tensor> &packed, const Ints &header,
                    const std::optional<Tensor> &bias) {
    const Packed p{packed, header};
    const Layout &layout = layout_of("gated_linear", p);
    return which("gated_linear", layout, layout.gated_linear)(p, gate, up, bias);
}

} // namespace

Tensor check_on_cpu(const Packed &p) {
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    std::vector<Tensor> there;
    for (const Tensor &t : p.tensors) there.push_back(torch::stable::to(t, cpu));
    using torch::stable::detail::from;
    std::array<StableIValue, 2> stack{from(there), from(p.header)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("macko::check", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::to(torch::stable::detail::to<Tensor>(stack[0]), p[0].device());
}

} // namespace macko

// clang-format off
// A packed weight is a list of tensors and a header of whole numbers: packed.h says which. The last four are the papers'.
#define MACKO_OPS(OP) \
    OP(pack, "(Tensor w, int layout, int[] options) -> (Tensor[], Tensor)") \
    OP(lay_out, "(Tensor[] packed, int[] header, int layout, int[] options) -> (Tensor[], Tensor)") \
    OP(dense, "(Tensor[] packed, int[] header, bool check=True) -> Tensor") \
    OP(check, "(Tensor[] packed, int[] header) -> Tensor") \
    OP(linear, "(Tensor x, Tensor[] packed, int[] header, Tensor? bias=None) -> Tensor") \
    OP(linear_parts, "(Tensor x, Tensor[] packed, int[] header, int[] part_rows) -> Tensor[]") \
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
