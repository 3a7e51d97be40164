"""What stands before and behind a sparse layer, done in its kernel: a pass for torch.compile.

    torch.compile(model, options={"post_grad_custom_pre_pass": macko.fuse.Fuse()})

A decoder's step for one token has kernels of some microseconds between its products, which wait for them. The root
mean square norm of a layer's input is made where the kernel puts x into shared memory; the sum of its output and the
residual is a bias to it; silu(gate) * up lets the product behind it fetch weights meanwhile. Dense layers have the like
from Inductor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import MULTIPLE, CallFunction, KeywordArg, Match

from .formats import FORMATS

aten, prims = torch.ops.aten, torch.ops.prims

#: Numbers of the layouts whose product makes its input itself. In front of others Inductor's own kernels stay.
_MAKE_INPUT = {kind.number for kind in FORMATS.values() if kind.makes_input}

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


#: What a sparse layer's input is made by, and the op that makes it itself.
_INPUTS = (
    # weight * (x.float() / sqrt(mean(x^2) + eps)).to(dtype), as LlamaRMSNorm and its many copies have it
    (_product(KeywordArg("weight"), _scaled), torch.ops.macko.norm_linear.default),
    # silu(x) * other, as a decoder's MLP has it
    (_product(_silu, KeywordArg("other")), torch.ops.macko.gated_linear.default),
)


class Fuse(CustomGraphPass):
    """For Inductor's option `post_grad_custom_pre_pass`: macko::linear takes its neighbours in.

    Sums by every layout, norms and gates where the layout's product makes them. Results are rounded to the dtype where
    modules round them, but for sums, once; in float32 between, the norm's sum has another order, and silu a faster exp.
    Graphs of more tokens at once, or of a number that is not known when they are compiled, and without sparse layers
    stay as they are.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.macko.linear.default):
            y = _value(node)
            if y is not None and y.shape[:-1].numel() == 1:  # one token
                _take_input(_take_sum(node))
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _value(node: Any) -> Tensor | None:
    """What stands for the tensor of a graph's node while it is compiled; None where sizes are not known yet."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) and all(isinstance(size, int) for size in value.shape) else None


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _take_sum(linear: fx.Node) -> fx.Node:
    """linear(x) + other -> linear(x, bias=other)."""
    x_and_packed, bias = linear.args[:3], linear.args[3:]
    add = next(iter(linear.users), linear)
    if any(bias) or linear.kwargs or len(linear.users) > 1 or add.target is not aten.add.Tensor or add.kwargs:
        return linear
    other = add.args[1] if add.args[0] is linear else add.args[0]
    value = _value(other)
    if other is linear or value is None or not _alike(value, _value(linear)):
        return linear
    with linear.graph.inserting_before(add):
        flat = linear.graph.call_function(aten.reshape.default, (other, [value.numel()]))
        flat.meta["val"] = value.reshape(-1)
        whole = _replace(add, linear.target, (*x_and_packed, flat))
    linear.graph.erase_node(add)
    linear.graph.erase_node(linear)
    return whole


def _take_input(linear: fx.Node) -> fx.Node:
    """linear(norm(x, weight)) -> norm_linear(x, weight, eps), linear(silu(gate) * up) -> gated_linear(gate, up)."""
    source, tensors, header, *bias = linear.args
    if not isinstance(source, fx.Node) or linear.kwargs or int(header[0]) not in _MAKE_INPUT:  # type: ignore
        return linear
    for patterns, op in _INPUTS:
        for pattern in patterns:
            match = pattern.match(source)
            if isinstance(match, Match) and (args := _arguments(match.kwargs)):
                with linear.graph.inserting_before(linear):
                    return _replace(linear, op, (*args, tensors, header, *bias))
    return linear


def _arguments(found: dict[str, Any]) -> tuple[Any, ...]:
    """Of the op that makes its input itself, but for the packed weight; empty where it would not be the same."""
    x = _value(found["x"])
    if x is None or x.dtype != found["dtype"] or x.shape[-1] % 8:
        return ()
    if "weight" in found:
        args = (found["x"], found["weight"], found["eps"])
        return args if _alike(_value(args[1]), x.reshape(-1)) and isinstance(args[2], float) else ()
    return (found["x"], found["other"]) if _alike(_value(found["other"]), x) else ()


def _replace(node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A call of target in the node's place; dead code is left for later."""
    new = node.graph.call_function(target, args)
    new.meta.update(node.meta)
    new.meta.pop("eager_input_vals", None)  # of the arguments there were; they hold no layout that the kernel needs
    node.replace_all_uses_with(new)
    return new
