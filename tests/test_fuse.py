"""Norms and sums in the kernel of a sparse layer: what the pass for torch.compile replaces, and that kernel."""

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import product as product_of
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

import macko
from macko.fuse import Fuse
from macko.weights import Dense12Weight, EcWeight, MackoWeight, PackedWeight, SellWeight, Sparse11Weight, TileWeight
from tests.common import HALVES, Plan, assert_same_bits, integer_problem, needs_capture, random_vector, random_weight
from tests.layouts import LAYOUTS
from tests.tiny_llama import needs_transformers, small_llama

EPS = 1e-5


class Watched(Fuse):
    """With the names of macko's ops and of sums in the graphs after it, since an object was made."""

    seen: ClassVar[list[str]] = []  # options are copied

    def __init__(self) -> None:
        self.seen.clear()

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        graph.lint()
        targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        names = [name.split(".")[1] for name in targets if name.startswith(("macko", "aten.add"))]
        assert "linear" not in names, "the op with gradients"
        self.seen.extend(name.removesuffix("_below_autograd") for name in names)


class Norm(nn.Module):
    """As transformers' LlamaRMSNorm computes it."""

    def __init__(self, cols: int, dtype: torch.dtype, eps: float = EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + random_vector(cols, dtype=dtype, seed=5) / 4, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def norm_linear(x: Tensor, weight: Tensor, eps: float, packed: list[Tensor], *others: Any) -> Tensor:
    norm = Norm(len(weight), weight.dtype, eps)
    norm.weight.data = weight
    return linear(norm(x), packed, *others)


def rms_norm(x: Tensor, weight: Tensor, eps: float, other: Tensor | None = None) -> list[Tensor]:
    norm = Norm(len(weight), weight.dtype, eps)
    norm.weight.data = weight
    return [norm(x)] if other is None else [norm(x + other), x + other]


def gated_linear(gate: Tensor, up: Tensor, packed: list[Tensor], *others: Any) -> Tensor:
    return linear(nn.functional.silu(gate) * up, packed, *others)


def linear(x: Tensor, packed: list[Tensor], header: list[int], bias: Tensor | None = None) -> Tensor:
    """With a dense weight in the place of the packed one."""
    return nn.functional.linear(x, packed[0], bias)


def linear_parts(x: Tensor, packed: list[Tensor], header: list[int], part_rows: list[int]) -> list[Tensor]:
    return [part.clone() for part in linear(x, packed, header).split(part_rows, -1)]


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ops of a GPU's layouts for CPU tensors, as the functions above."""
    monkeypatch.setattr(macko.fuse, "_DEVICE", "cpu")
    with torch.library._scoped_library("macko", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one already, which says why there is none
        for op in (linear, linear_parts, rms_norm, norm_linear, gated_linear):
            implement(library, op)
        yield


def implement(library: Any, op: Callable[..., Any]) -> None:
    for name in ("linear", "linear_below_autograd") if op is linear else (op.__name__,):
        library.impl(name, op, "CPU", allow_override=True)


def packed(w: Tensor, layout: str) -> tuple[list[Tensor], list[int]]:
    return [w] * 4, [LAYOUTS.index(layout), *w.shape, 3, 8, 4, 0, 4]


def product(x: Tensor, w: Tensor, bias: Tensor | None = None, layout: str = "sell") -> Tensor:
    return torch.ops.macko.linear(x, *packed(w, layout), bias)


def compiled(model: Any, *inputs: Tensor) -> tuple[Tensor, list[str]]:
    """What the graph that Inductor would compile gives after the pass, and the names of its ops of macko and sums."""
    watched = Watched()

    def run(graph: torch.fx.GraphModule, _: Any) -> Any:
        watched(graph.graph)
        graph.recompile()
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=run, decompositions=select_decomp_table())
    with torch.no_grad():
        return torch.compile(model, backend=backend, fullgraph=True)(*inputs), list(watched.seen)


class Block(nn.Module):
    """A decoder's, without the attention between: q and k of one norm, gate and up as one matrix or two."""

    def __init__(self, dtype: torch.dtype, layout: str, merged: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(64, dtype) for _ in range(3))
        shapes = [(64, 64), (64, 64), (64, 64), (160, 64), (64, 80)]
        self.w = [random_weight(*shape, 0.5, dtype, seed=seed) for seed, shape in enumerate(shapes)]
        self.merged, self.layout = merged, layout

    def forward(self, x: Tensor) -> Tensor:
        q, k, o, gate_up, down = self.w
        normed = self.norms[0](x)
        h = x + self.product(self.product(normed, q) + self.product(normed, k), o)
        normed = self.norms[1](h)
        if self.merged and self.in_parts(x):
            gate, up = torch.ops.macko.linear_parts(normed, *packed(gate_up, self.layout), (80, 80))
        elif self.merged:
            both = self.product(normed, gate_up)
            gate, up = both[..., :80], both[..., 80:]
        else:
            gate, up = self.product(normed, gate_up[:80]), self.product(normed, gate_up[80:])
        h = h + self.product(nn.functional.silu(gate) * up, down)
        return self.norms[2](h)  # which a dense layer uses

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        return product(x, w, layout=self.layout)

    def in_parts(self, x: Tensor) -> bool:
        return self.layout != "sell" and x.shape[0] > 1


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(
    ("layout", "tokens", "merged"),
    [*product_of(("sell", "tile"), (1, 2, 64), (True, False)), ("dense12", 2, True), ("sparse11", 1, False)],
)
def test_a_block(layout: str, tokens: int, merged: bool) -> None:
    """One norm for all who use it, with the sum in front of it; of one token sums are biases. To the bits of modules,
    but for these."""
    block, x = Block(torch.bfloat16, layout, merged), random_vector(tokens, 1, 64, dtype=torch.bfloat16)
    y, names = compiled(block, x)
    both = 1 if merged else 2
    if tokens > 1:
        qk = ["rms_norm", "linear", "linear", "add", "linear"]
        gate_up = ["linear_parts"] if merged and block.in_parts(x) else ["linear"] * both
        assert names == [*qk, "rms_norm", *gate_up, "gated_linear", "add", "add"]
        assert_same_bits(y, block(x))
        return
    if layout == "sell":
        assert names == ["norm_linear", "norm_linear", "linear", *["norm_linear"] * both, "gated_linear", "add"]
    else:
        assert names == ["rms_norm", *["linear"] * 3, "rms_norm", *["linear"] * both, "gated_linear", "add"]
    # Of its norms' input, up to 4 times as large as what they give, up to three roundings differ.
    assert_near(y, block(x).double(), torch.bfloat16)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_batch_that_may_change() -> None:
    """As for the number that it was compiled with, where sums are no biases. Not for one of many tokens."""
    block, x = Block(torch.bfloat16, "tile", True), random_vector(3, 1, 64, dtype=torch.bfloat16)
    torch._dynamo.mark_dynamic(x, 0)
    y, names = compiled(block, x)
    assert names == [
        "rms_norm", *["linear"] * 2, "add", "linear", "rms_norm", "linear_parts", "gated_linear", "add", "add",
    ]  # fmt: skip
    assert_same_bits(y, block(x))
    many = random_vector(65, 1, 64, dtype=torch.bfloat16)
    torch._dynamo.mark_dynamic(many, 0)
    assert {*compiled(block, many)[1]} == {"linear", "linear_parts", "add"}


def test_on_a_cpu_norms_and_gates_stay() -> None:
    """No kernel of macko's makes them there."""
    block, x = Block(torch.bfloat16, "tile", True), torch.zeros(2, 64, dtype=torch.bfloat16)
    with torch.library._scoped_library("macko", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        implement(library, linear)
        implement(library, linear_parts)
        assert {*compiled(block, x)[1]} == {"linear", "linear_parts", "add"}


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_as_an_option_of_torch_compile() -> None:
    """Inductor takes the pass, and the op that it puts there."""
    w, norm = random_weight(64, 64, 0.5, torch.bfloat16), Norm(64, torch.bfloat16)
    x = random_vector(1, 64, dtype=torch.bfloat16)

    def block(x: Tensor) -> Tensor:
        return x + product(norm(x), w)

    torch._dynamo.reset()
    with torch.no_grad():
        options: dict[str, Any] = {"post_grad_custom_pre_pass": (watched := Watched()), "fx_graph_cache": False}
        y = torch.compile(block, fullgraph=True, options=options)(x)
    assert watched.seen == ["norm_linear"]
    assert_near(y, block(x).double(), torch.bfloat16)
    assert Fuse().uuid() == Fuse().uuid()


def assert_near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Sums of up to three roundings to dtype of numbers up to twice the largest."""
    assert (got.double() - wanted).abs().max() <= 6 * wanted.abs().max() * torch.finfo(dtype).eps


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_what_stays() -> None:
    """More tokens, a bias that is there, other shapes, another norm: each node is what it was."""
    w, square = random_weight(40, 64, 0.5, torch.float16), random_weight(64, 64, 0.5, torch.float16)
    norm, x, y = Norm(64, torch.float16), random_vector(1, 64, dtype=torch.float16), torch.ones(1, 40).half()

    def kept(model: Any, *inputs: Tensor) -> list[str]:
        y, names = compiled(model, *inputs)
        assert_same_bits(y, model(*inputs))
        return names

    many = random_vector(65, 64, dtype=torch.float16)
    assert kept(lambda x: product(norm(x), w), many) == ["add", "linear"]
    assert kept(lambda x: product(norm(x), w, layout="macko"), x) == ["add", "linear"]
    assert kept(lambda x, y: product(x, w) + y, many[:2], y.expand(2, 40)) == ["linear", "add"]
    assert kept(lambda x, y: product(x, w, y[0]) + y, x, y) == ["linear", "add"]
    assert kept(lambda x: product(x, w) + 1, x) == ["linear", "add"]
    assert kept(lambda x, y: product(x, w) + y, x, torch.ones(3, 40).half()) == ["linear", "add"]
    assert kept(lambda x, y: product(x, w) + y, x, y.float()) == ["linear", "add"]
    assert kept(lambda x, y: torch.add(product(x, w), y, alpha=2), x, y) == ["linear", "add"]
    assert kept(lambda x, y: (lambda z: (z + y) * z)(product(x, w)), x, y) == ["linear", "add"]
    assert kept(lambda x: (lambda z: z + z)(product(x, square)), x) == ["linear", "add"]
    assert kept(lambda x: product(norm.weight * x, w), x) == ["linear"]
    assert kept(lambda x: product(norm(x) * 1.5, w), x) == ["add", "linear"]
    narrow, of_60 = random_weight(8, 60, 0.5, torch.float16), Norm(60, torch.float16)
    assert kept(lambda x: product(of_60(x), narrow), x[:, :60].contiguous()) == ["add", "linear"]


@pytest.mark.usefixtures("on_the_cpu")
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)  # monkeypatch would delete it in the end
def test_sizes_that_depend_on_data() -> None:
    """As many tokens, or as long a residual, as a mask says: such graphs compile, and stay."""
    w, x = random_weight(40, 64, 0.5, torch.float16), random_vector(4, 64, dtype=torch.float16)
    one, mask, others = x[:1], torch.tensor([True, False, False, False]), torch.ones(4, 40).half()

    def some_tokens(x: Tensor, mask: Tensor) -> Tensor:
        return product(x[mask.nonzero().squeeze(1)], w)

    def some_residual(x: Tensor, mask: Tensor) -> Tensor:
        return product(x, w) + others[mask.nonzero().squeeze(1)]

    for model, tokens, wanted in ((some_tokens, x, ["linear"]), (some_residual, one, ["linear", "add"])):
        y, names = compiled(model, tokens, mask)
        assert names == wanted
        assert_same_bits(y, model(tokens, mask))


@pytest.mark.usefixtures("on_the_cpu")
def test_a_gate_of_one_product() -> None:
    """Both halves of one matrix, in either order, as merge_ has them; not another activation or another shape."""
    both, down = random_weight(160, 64, 0.5, torch.float16), random_weight(64, 80, 0.5, torch.float16)
    x, silu = random_vector(1, 1, 64, dtype=torch.float16), nn.functional.silu

    def mlp(x: Tensor) -> Tensor:
        y = product(x, both)
        return product(silu(y[..., :80]) * y[..., 80:], down)

    def swapped(x: Tensor) -> Tensor:
        y = product(x, both)
        return product(y[..., 80:] * silu(y[..., :80]), down) + x

    for model, wanted in ((mlp, mlp(x)), (swapped, swapped(x))):
        y, names = compiled(model, x)
        assert names == ["linear", "gated_linear"]
        assert_near(y, wanted.double(), torch.float16)
    for other in (
        lambda x: product(torch.sigmoid(x) * x, both),
        lambda x: product(silu(x) * 2.0, both),
        lambda x: product(silu(x) * x[..., :1], both),
        lambda x: product(silu(x), both),
    ):
        y, names = compiled(other, x)
        assert names[-1] == "linear"
        assert_near(y, other(x).double(), torch.float16)


@pytest.mark.usefixtures("on_the_cpu")
def test_either_order_and_a_norm_that_others_need() -> None:
    w, norm = random_weight(40, 64, 0.5, torch.float16), Norm(64, torch.float16)
    x = random_vector(1, 64, dtype=torch.float16)

    def shared(x: Tensor) -> Tensor:
        normed = norm(x)
        return product(normed, w) + normed[:, :40]

    y, names = compiled(shared, x)
    assert names == ["add", "norm_linear"]
    assert_near(y, norm(x).double() @ w.double().T + norm(x)[:, :40].double(), torch.float16)

    def swapped(x: Tensor) -> Tensor:
        wide = x.float()
        return product((wide * torch.rsqrt(wide.square().mean(-1, True) + EPS)).half() * norm.weight, w)

    y, names = compiled(swapped, x)
    assert names == ["norm_linear"]
    assert_same_bits(y, swapped(x))


def twice(op: Callable[..., Tensor], *args: Any) -> Tensor:
    """What the op gives, which has the same bits at both runs."""
    y = op(*args)
    assert_same_bits(op(*args), y)
    return y


#: Columns that fill a round of no thread, of some, what they hold at once, and more.
COLS = (8, 64, 2048, 4104, 8192, 11008, 24576)


@pytest.mark.gpu
@pytest.mark.parametrize("copy", ["bulk", "cp_async"])
@pytest.mark.parametrize("dtype", HALVES)
def test_norm_linear(dtype: torch.dtype, copy: str, plan: Plan) -> None:
    plan(f"copy={copy}")
    for cols in COLS:
        w, bias = random_weight(200, cols, 0.5, dtype), random_vector(200, dtype=dtype, seed=3)
        x, weight = 3 * random_vector(1, 1, cols, dtype=dtype), 1 + random_vector(cols, dtype=dtype, seed=4) / 2
        sell = SellWeight.from_dense(w.cuda())
        y = twice(sell.norm_linear, x.cuda(), weight.cuda(), EPS, bias.cuda())
        assert_close_norm_linear(y[0, 0], w, x[0, 0], weight, bias)


def assert_close_norm_linear(y: Tensor, w: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """The scale is off by half of what its mean is, cols + 3 roundings to float32, and by an rsqrt of two units; then x
    is rounded to dtype, and its product with the weight."""
    kind, unit = torch.finfo(y.dtype), 2.0**-24
    wide = x.double()
    exact = wide / (wide.pow(2).mean() + EPS).sqrt() * weight.double()
    relative = (1 + (w.shape[1] + 3) * unit / 2 + 4 * unit) * (1 + unit) * (1 + kind.eps / 2) ** 2 - 1
    off_by = relative * exact.abs() + kind.smallest_normal * kind.eps * (1 + weight.double().abs())
    assert_within(y, w, exact, off_by, bias)


def assert_within(y: Tensor, w: Tensor, exact: Tensor, off_by: Tensor, bias: Tensor) -> None:
    """y against W exact + bias in float64, where the kernel's x is the exact one but for off_by; and spmv's bound."""
    kind, roundings = torch.finfo(y.dtype), (w.shape[1] + 2) * 2.0**-24
    size = w.double().abs()
    wanted = w.double() @ exact + bias.double()
    bound = size @ off_by + (size @ (exact.abs() + off_by) + bias.double().abs()) * roundings / (1 - roundings)
    bound += (wanted.abs() + bound) * kind.eps / 2 + kind.smallest_normal * kind.eps
    bad = ~((y.cpu().double() - wanted).abs() <= bound)
    assert not bad.any(), f"{bad.sum()} of {len(y)} off"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_norm_linear_exact(dtype: torch.dtype) -> None:
    """x of one size, whose norm is a sign: what is left is a sum of integers, with another weight for each column."""
    for cols in COLS:
        w, weight, _ = integer_problem(300, cols, 0.5, dtype)
        sign = torch.where(random_vector(cols, dtype=dtype) < 0, -1, 1).to(dtype)
        wanted = (w.double() @ (weight * sign).double()).to(dtype)
        sell = SellWeight.from_dense(w.cuda())
        for size in (1, 0.25, 16):
            got = sell.norm_linear((sign * size).cuda(), weight.cuda(), 0.0)
            assert_same_bits(got + 0, wanted + 0)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("weight", [MackoWeight, SellWeight, TileWeight, EcWeight, Dense12Weight, Sparse11Weight])
def test_norm_and_gate_before_every_layout(weight: type[PackedWeight], tokens: int) -> None:
    """Exact: the root mean square of signs is 1, and silu(64) is 64."""
    dtype = weight.dtypes[0]
    for cols in (64, 1000, 20000):
        w, _, _ = integer_problem(70, cols, 0.4, dtype)
        signs = torch.where(torch.rand(2, tokens, cols) < 0.5, -1.0, 1.0)
        factor = torch.arange(cols) % 3.0
        packed = weight.from_dense(w.cuda())
        normed = packed.norm_linear(4 * signs[:1].to(dtype).cuda(), factor.to(dtype).cuda(), 0.0)
        assert_same_bits(normed + 0, ((signs[:1] * factor).double() @ w.double().T).to(dtype) + 0)
        gate, up = torch.full((2, tokens, cols), 64.0), signs / 64
        bias, wanted = torch.ones(70).to(dtype).cuda(), (signs.double() @ w.double().T + 1).to(dtype) + 0
        gated = packed.gated_linear(gate.to(dtype).cuda(), up.to(dtype).cuda(), bias)
        assert_same_bits(gated + 0, wanted)
        both = torch.cat([gate, up], -1).to(dtype).cuda()  # halves of one product
        assert_same_bits(packed.gated_linear(both[..., :cols], both[..., cols:], bias) + 0, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_rms_norm(dtype: torch.dtype) -> None:
    """Of signs exact, alone and as the sum of two; of others the sum has the bits of torch's, and the norm those of the
    norm of that."""
    op = torch.ops.macko.rms_norm
    for cols in COLS:
        for tokens in (1, 5, 64):
            signs = torch.where(torch.rand(tokens, 1, cols) < 0.5, -1, 1).to(dtype).cuda()
            weight = (torch.arange(cols) % 5).to(dtype).cuda()
            assert_same_bits(op(4 * signs, weight, 0.0)[0] + 0, signs * weight + 0)
            part = torch.randint(-3, 4, signs.shape).to(dtype).cuda()
            normed, total = op(signs - part, weight, 0.0, part)
            assert_same_bits(total, signs)
            assert_same_bits(normed + 0, signs * weight + 0)
            a, b = (random_vector(tokens, cols, dtype=dtype, seed=seed).cuda() for seed in (1, 2))
            normed, total = op(a, weight, EPS, b)
            assert_same_bits(total, a + b)
            assert_same_bits(normed, op(total, weight, EPS)[0])


@pytest.mark.gpu
def test_rms_norm_errors_opcheck_and_views() -> None:
    op = torch.ops.macko.rms_norm
    x, weight = random_vector(3, 256, dtype=torch.float16).cuda(), torch.ones(256).half().cuda()
    torch.library.opcheck(op, (x, weight, EPS))
    torch.library.opcheck(op, (x, weight, EPS, x + 1))
    assert_same_bits(op(x.expand(2, 3, 256), weight, EPS)[0][1], op(x, weight, EPS)[0])
    shifted = torch.cat([weight[:3], x.flatten()])[3:].view(3, 256)
    assert_same_bits(op(shifted, weight, EPS, x)[0], op(x, weight, EPS, shifted)[0])
    for message, arguments in (
        ("weight has 255 elements, the matrix has 256 columns", (x, weight[1:], EPS)),
        (r"other has shape \[2, 256\], x has \[3, 256\]", (x, weight, EPS, x[:2])),
        ("other has dtype bfloat16, expected float16", (x, weight, EPS, x.bfloat16())),
        ("other is on cpu, x is on cuda:0", (x, weight, EPS, x.cpu())),
        ("cols is 255, expected a multiple of 8", (x[:, 1:], weight[1:], EPS)),
        ("x has dtype float32, expected float16 or bfloat16", (x.float(), weight.float(), EPS)),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*arguments)


@pytest.mark.gpu
def test_norm_linear_of_zeros_nan_and_views() -> None:
    w, weight = random_weight(64, 256, 0.5, torch.float16), torch.ones(256).half()
    packed = SellWeight.from_dense(w.cuda())
    x = random_vector(256, dtype=torch.float16)
    y = packed.norm_linear(x.cuda(), weight.cuda(), EPS)
    shifted = torch.cat([torch.zeros(3).half(), x]).cuda()[3:]  # begins 6 bytes past a multiple of 16
    assert_same_bits(packed.norm_linear(shifted, weight.cuda(), EPS), y)
    assert_same_bits(packed.norm_linear(x.cuda().repeat_interleave(2)[::2], weight.cuda(), EPS), y)
    assert not packed.norm_linear(torch.zeros(256).half().cuda(), weight.cuda(), EPS).any()
    x[7] = float("nan")
    assert packed.norm_linear(x.cuda(), weight.cuda(), EPS).isnan().all()


@pytest.mark.gpu
def test_norm_linear_errors_opcheck_and_graph() -> None:
    w = random_weight(64, 256, 0.5, torch.float16)
    packed, weight = SellWeight.from_dense(w.cuda()), torch.ones(256, device="cuda").half()
    x = random_vector(1, 256, dtype=torch.float16).cuda()
    torch.library.opcheck(torch.ops.macko.norm_linear, (x, weight, EPS, *packed.packed))
    narrow = SellWeight.from_dense(w[:, :255].contiguous().cuda())
    for message, matrix, given_x, given_weight in (
        (r"x has shape \[2, 255\], expected \[\.\.\., 256\]", packed, x.expand(2, 256)[:, 1:], weight),
        ("weight has 255 elements, the matrix has 256 columns", packed, x, weight[:255]),
        ("weight has dtype float32, expected float16", packed, x, weight.float()),
        ("cols is 255, expected a multiple of 8", narrow, x[:, :255], weight[:255]),
    ):
        with pytest.raises(RuntimeError, match=message):
            matrix.norm_linear(given_x, given_weight, EPS)
    with pytest.raises(NotImplementedError, match="no gradients"):
        packed.norm_linear(x.clone().requires_grad_(), weight, EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("copy", ["bulk", "cp_async"])
@pytest.mark.parametrize("dtype", HALVES)
def test_gated_linear(dtype: torch.dtype, copy: str, plan: Plan) -> None:
    """The input is torch's, to a rounding of each of its two steps."""
    plan(f"copy={copy}")
    for cols in COLS:
        w, bias = random_weight(200, cols, 0.5, dtype), random_vector(200, dtype=dtype, seed=3)
        gate, up = 4 * random_vector(1, cols, dtype=dtype, seed=4), random_vector(1, cols, dtype=dtype, seed=5)
        gate[0, 0], gate[0, 1] = -60000 if dtype == torch.float16 else -1e30, 500
        packed = SellWeight.from_dense(w.cuda())
        y = twice(packed.gated_linear, gate.cuda(), up.cuda(), bias.cuda())
        exact = nn.functional.silu(gate[0].double()) * up[0].double()
        kind = torch.finfo(dtype)
        # Two roundings to dtype; and of the silu, which is x / (1 + e^-x) in float32, those of e^-x, whose exponent is
        # rounded (2^-23 of it, |x| log2(e)), the sum, the quotient of two units.
        relative = (1 + kind.eps / 2) ** 2 * (1 + (gate[0].double().abs().clamp(max=100) * 2 + 8) * 2.0**-23) - 1
        off_by = relative * exact.abs() + kind.smallest_normal * kind.eps * (1 + up[0].double().abs())
        assert_within(y[0], w, exact, off_by, bias)


@pytest.mark.gpu
def test_gated_linear_errors_and_opcheck() -> None:
    w, gate = random_weight(64, 256, 0.5, torch.float16), random_vector(1, 256, dtype=torch.float16).cuda()
    packed = SellWeight.from_dense(w.cuda())
    torch.library.opcheck(torch.ops.macko.gated_linear, (gate, gate, *packed.packed))
    for message, given, up in (
        (r"up has shape \[2, 256\], gate has \[1, 256\]", gate, gate.expand(2, 256)),
        (r"gate has shape \[1, 255\], expected \[\.\.\., 256\]", gate[:, :255], gate),
        ("up is on cpu, packed is on cuda:0", gate, gate.cpu()),
    ):
        with pytest.raises(RuntimeError, match=message):
            packed.gated_linear(given, up)
    with pytest.raises(NotImplementedError, match="no gradients"):
        packed.gated_linear(gate.clone().requires_grad_(), gate)
    shifted = torch.cat([gate[0, :3], gate[0]])[3:]
    assert_same_bits(packed.gated_linear(shifted, gate[0]), packed.gated_linear(gate[0], gate[0]))


@pytest.mark.gpu
@needs_capture
def test_a_chain_many_times() -> None:
    """Launches that begin early read what the one before has written, and only then."""
    w = [random_weight(2048, 2048, 0.5, torch.float16, seed=i).cuda() / 32 for i in range(8)]
    layers = [SellWeight.from_dense(one) for one in w]
    weight, x = torch.ones(2048, device="cuda").half(), random_vector(1, 2048, dtype=torch.float16).cuda()

    def chain(x: Tensor) -> Tensor:
        for packed in layers:
            y = packed.norm_linear(x, weight, EPS, x.view(-1))
            x = packed.gated_linear(y, weight[None], x.view(-1))
        return x

    wanted = chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x)
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(2000):
        graph.replay()
        wrong += (got != wanted).sum()
    assert int(wrong) == 0


@pytest.mark.gpu
@needs_capture
@needs_transformers
@pytest.mark.parametrize(("compile", "merge"), [("default", True), ("fast", True), ("fast", False)])
@pytest.mark.parametrize(("format", "batch"), [("sell", 1), ("tile", 1), ("tile", 3)])
def test_generate_compiled(format: str, batch: int, compile: str, merge: bool) -> None:
    """A Llama whose step of a token is compiled with the pass, by default and as an option: with its kernels, and the
    tokens of eager mode."""
    from transformers import CompileConfig

    from macko.measure.bench import COMPILED, FOR_SPARSE

    sizes = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    model = small_llama(torch.float16, **sizes, num_key_value_heads=8, bos_token_id=None, eos_token_id=None).cuda()
    macko.prune_(model, 0.5)
    assert len(macko.sparsify_(model, format=format, merge=merge).changed) == 14
    prompt = torch.arange(8, device="cuda").expand(batch, 8)
    more = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    eager = model.generate(prompt, **more)
    torch._dynamo.reset()
    watched = Watched()
    default: dict[str, Any] = {"fx_graph_cache": False}
    settings: dict[str, Any] = {"cache_implementation": "static", **more}
    if compile == "fast":
        options = {"triton.cudagraphs": True, **COMPILED["fast"], **FOR_SPARSE, "post_grad_custom_pre_pass": watched}
        settings["compile_config"] = CompileConfig(mode=None, options=options)  # type: ignore[arg-type]
    else:
        default["post_grad_custom_pre_pass"] = watched
    with torch._inductor.config.patch(default):
        assert torch.equal(model.generate(prompt, **settings), eager)
    in_product = format == "sell"
    whole = "linear" if batch == 1 else "linear_parts"
    qkv, both = [whole] if merge else ["linear"] * 3, [whole] if merge else ["linear"] * 2
    if in_product:
        layer = [*("norm_" + name for name in qkv), "linear", *("norm_" + name for name in both), "gated_linear"]
    else:
        norm = [] if compile == "fast" else ["rms_norm"]  # with enable_pdl norms stay Inductor's
        layer = [*norm, *qkv, "linear", *norm, *both, "gated_linear"]
    assert [name for name in watched.seen if name.endswith(("linear", "parts", "norm"))] == layer * 2


@pytest.mark.slow
def test_by_default() -> None:
    """In a process of its own: the pass is there once a sparse layer is compiled, not for import, and not where it is
    unwanted or there is another."""
    code = """
import contextvars
from concurrent.futures import ThreadPoolExecutor
import torch, macko
from torch._inductor import config

def left_in_a_context(mine, wanted):
    if not wanted:
        from macko import fuse
        fuse.BY_DEFAULT = False
    config.post_grad_custom_pre_pass = mine
    layer, x = macko.SparseLinear(64, 64), torch.ones(1, 64)
    with torch.no_grad():
        layer(x)
        assert config.post_grad_custom_pre_pass is mine
        with ThreadPoolExecutor() as pool:  # whose config is its own
            pool.submit(torch.compile(layer, backend="eager"), x).result()
        torch._dynamo.reset()
        torch.compile(layer, backend="eager")(x)
    return type(config.post_grad_custom_pre_pass).__name__

for given in ((None, True), (object(), True), (None, False)):
    torch._dynamo.reset()
    print(contextvars.copy_context().run(left_in_a_context, *given))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["Fuse", "object", "NoneType"], ran.stderr


@needs_transformers
def test_options_of_macko_bench() -> None:
    """A sparse model is compiled with the pass, a dense one without."""
    from macko.measure import bench

    given: list[dict[str, Any]] = []

    class Model(nn.Sequential):
        def generate(self, prompts: Tensor, **settings: Any) -> None:
            given.append(settings)

    w = random_weight(64, 64, 0.5, torch.float32)
    dense = nn.Linear(64, 64, bias=False)
    dense.weight.data = w
    for layer in (dense, macko.SparseLinear.from_linear(dense)):
        for compiled in ("default", "max"):
            bench.generate(Model(layer), torch.zeros(1, 1), 1, compiled)
    default, on_dense, sparse_default, on_sparse = given
    assert "compile_config" not in default
    assert "compile_config" not in sparse_default
    wanted = {"triton.cudagraphs": True, **bench.COMPILED["max"]}
    assert on_dense["compile_config"].options == wanted
    assert on_sparse["compile_config"].options == {**wanted, **bench.FOR_SPARSE}
