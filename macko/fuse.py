"""What stands before and after a sparse layer, in its kernel or in one that overlaps with it: a pass of Inductor's.

A decoder's step for a few tokens has kernels of some microseconds between its products, which wait for them. The sum of
a layer's output and the residual, the root mean square norm after it and silu(gate) * up become kernels that let the
product after them fetch its weights meanwhile, or are in the product: in sell's one token's norm, in every layout its
sum, as a bias. Dense layers have the like from Inductor.

Inductor takes the pass by itself from the first graph with a sparse layer on, where its
`torch._inductor.config.post_grad_custom_pre_pass` is not set; graphs without sparse layers stay what they are.
`macko.fuse.BY_DEFAULT = False` before that leaves it out. To set it next to others, or for one call:

    torch.compile(model, options={"post_grad_custom_pre_pass": macko.fuse.Fuse()})
"""

from __future__ import annotations

import math
import operator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import MULTIPLE, CallFunction, KeywordArg, Match
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from . import ops, weights
from .weights import FORMATS

aten, prims, macko = torch.ops.aten, torch.ops.prims, torch.ops.macko

#: Numbers of the layouts whose product of one token makes a norm itself; and of those whose products, on this type of
#: device, fetch weights while what makes their input runs. In front of others Inductor's own kernels stay.
_MAKE_NORM = {kind.number for kind in FORMATS.values() if kind.makes_norm}
_OVERLAP = {kind.number for kind in FORMATS.values() if kind.overlaps}
_DEVICE = "cuda"
#: Whether Inductor gets the pass when the first sparse layer is traced.
BY_DEFAULT = True
#: Of more tokens products wait for the tensor cores, and what is before them is small.
_MOST_TOKENS = 64

_x = CallFunction(prims.convert_element_type.default, KeywordArg("x"), torch.float32, _users=MULTIPLE)
_mean = CallFunction(aten.mean.dim, CallFunction(aten.pow.Tensor_Scalar, _x, 2), [-1], True)
_root = CallFunction(aten.rsqrt.default, CallFunction(aten.add.Tensor, _mean, KeywordArg("eps")))
_scaled = CallFunction(
    prims.convert_element_type.default, CallFunction(aten.mul.Tensor, _x, _root), KeywordArg("dtype")
)
_below = CallFunction(aten.add.Tensor, CallFunction(aten.exp.default, CallFunction(aten.neg.default, _x)), 1)
_silu = CallFunction(prims.convert_element_type.default, CallFunction(aten.div.Tensor, _x, _below), KeywordArg("dtype"))


def _product(a: Any, b: Any) -> tuple[CallFunction, CallFunction]:
    """a * b and b * a."""
    return CallFunction(aten.mul.Tensor, a, b, _users=MULTIPLE), CallFunction(aten.mul.Tensor, b, a, _users=MULTIPLE)


#: weight * (x.float() / sqrt(mean(x^2) + eps)).to(dtype), as LlamaRMSNorm and its many copies have it.
_NORM = _product(KeywordArg("weight"), _scaled)
#: silu(x) * other, as a decoder's MLP has it.
_GATE = _product(_silu, KeywordArg("other"))


class Fuse(CustomGraphPass):
    """For Inductor's option `post_grad_custom_pre_pass`: products of 1 to 64 tokens take their neighbours in.

    Of one token sums with the output, by every layout; norms and gates before, and of more tokens sums before norms, on
    a GPU where the layout's product overlaps with what makes its input. Results are rounded to the dtype where modules
    round them, but for one token's sums, once; in float32 between, the norm's sum has another order, and silu a faster
    exp. Graphs of more tokens at once, or of a number that depends on data, and without sparse layers stay as they are.
    Where it may change later, as of a batch, its first value counts, and kernels take any. `linear` becomes the op
    without gradients, of which a graph has no more need.
    """

    def __call__(self, graph: fx.Graph) -> None:
        products = (macko.linear.default, macko.linear_parts.default)
        nodes = [node for op in products for node in graph.find_nodes(op="call_function", target=op)]
        for node in nodes:
            x = _value(node.args[0])
            if node.kwargs or x is None or not 0 < (tokens := math.prod(map(_size, x.shape[:-1]))) <= _MOST_TOKENS:
                continue
            layout, whole = node.args[2][0], node.target is macko.linear.default
            one = whole and all(isinstance(size, int) for size in x.shape) and tokens == 1
            linear = _take_sum(node) if one else node
            if layout not in _OVERLAP or x.device.type != _DEVICE:
                continue
            if norm := _matched(_NORM, linear.args[0]):
                _take_norm(linear, norm, one and layout in _MAKE_NORM)
            elif (
                whole and (gate := _matched(_GATE, linear.args[0])) and _alike(_value(gate["other"]), _value(gate["x"]))
            ):
                _insert(linear, macko.gated_linear.default, gate["x"], gate["other"], *linear.args[1:])
        if nodes:
            graph.eliminate_dead_code()
        for node in graph.find_nodes(op="call_function", target=macko.linear.default):
            node.target = macko.linear_below_autograd.default

    def uuid(self) -> Any:
        return get_hash_for_files(
            (__file__, ops.__file__, *map(str, sorted(Path(weights.__file__).parent.glob("*.py"))))
        )


#: Inductor's config is of a context, as each thread has one. What somebody sets there later stays.
_GIVEN: ContextVar[bool] = ContextVar("macko_fuse_given", default=False)


def use_by_default() -> None:
    """Gives Inductor the pass, once a context, unless it has one or BY_DEFAULT says no."""
    if _GIVEN.get():
        return
    _GIVEN.set(True)
    if BY_DEFAULT and config.post_grad_custom_pre_pass is None:
        config.post_grad_custom_pre_pass = Fuse()


def _value(node: Any) -> Tensor | None:
    """What stands for the tensor of a graph's node while it is compiled; None where sizes depend on data."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) and not free_unbacked_symbols(value) else None


def _size(size: Any) -> int:
    """A size, or of one that may change what it is while the graph is compiled; 0 where nobody says."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or (a.dim(), a.dtype, a.device) != (b.dim(), b.dtype, b.device):
        return False
    return all(statically_known_true(of_a == of_b) for of_a, of_b in zip(a.shape, b.shape, strict=True))


def _take_sum(linear: fx.Node) -> fx.Node:
    """linear(x) + other -> linear(x, bias=other)."""
    x_and_packed, bias = linear.args[:3], linear.args[3:]
    add = next(iter(linear.users), linear)
    if any(bias) or len(linear.users) > 1 or add.target is not aten.add.Tensor or add.kwargs:
        return linear
    other = add.args[1] if add.args[0] is linear else add.args[0]
    value = _value(other)
    if other is linear or value is None or not _alike(value, _value(linear)):
        return linear
    with linear.graph.inserting_before(add):
        flat = linear.graph.call_function(aten.reshape.default, (other, [value.numel()]))
    flat.meta["val"] = value.reshape(-1)
    whole = _insert(add, linear.target, *x_and_packed, flat)
    linear.graph.erase_node(add)
    linear.graph.erase_node(linear)
    return whole


def _matched(patterns: tuple[CallFunction, ...], node: Any) -> dict[str, Any] | None:
    """What the patterns call x and the others, where one is the node's and kernels can read it; else None."""
    for pattern in patterns if isinstance(node, fx.Node) else ():
        if isinstance(match := pattern.match(node), Match):
            found = match.kwargs
            x = _value(found["x"])
            return (
                found
                if x is not None and x.dtype == found["dtype"] and statically_known_true(x.shape[-1] % 8 == 0)
                else None
            )
    return None


def _take_norm(linear: fx.Node, found: dict[str, Any], in_product: bool) -> None:
    """linear(norm(x, weight)) -> norm_linear(x, weight, eps), or linear(rms_norm(x, weight, eps)[0]).

    The latter for all who use the norm; where x is a sum, rms_norm(a, weight, eps, b) gives both.
    """
    x, weight, eps = found["x"], found["weight"], found["eps"]
    value = _value(x)
    if value is None or not _alike(_value(weight), value.new_empty(value.shape[-1])) or not isinstance(eps, float):
        return
    if in_product:
        _insert(linear, macko.norm_linear.default, x, weight, eps, *linear.args[1:])
        return
    # The kernel reads its weight before it waits for the kernel before it, which must not be the one that makes it. And
    # it lets the next kernel start before it waits itself: with enable_pdl that may be one of Triton's, which waits for
    # the kernel right before it alone (core/cuda.cuh). A weight that is no argument may be made after the sum.
    if weight.op not in ("placeholder", "get_attr") or config.triton.enable_pdl:
        return
    source = linear.args[0]
    assert isinstance(source, fx.Node)
    first, *others = x.args[:2] if _is_sum(x) and weight.op == "placeholder" else (x,)
    graph = linear.graph
    with graph.inserting_before(x if others else source):
        made = graph.call_function(macko.rms_norm.default, (first, weight, eps, *others))
        made.meta["val"] = [torch.empty_like(value) for _ in (source, *others)]
        parts = [graph.call_function(operator.getitem, (made, index)) for index in range(1 + len(others))]
    for part, whole in zip(parts, (source, x), strict=False):
        part.meta["val"] = whole.meta["val"]
        whole.replace_all_uses_with(part)


def _is_sum(node: fx.Node) -> bool:
    """Whether it is a + b of tensors that are alike."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    return all(_alike(_value(term), _value(node)) for term in node.args)


def _insert(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call of target in the node's place; dead code is left for later."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args)
    new.meta.update(node.meta)
    new.meta.pop("eager_input_vals", None)  # of the arguments there were; they hold no layout that the kernel needs
    node.replace_all_uses_with(new)
    return new
