"""What stands before and behind a sparse layer, done in its kernel: a pass for torch.compile.

    torch.compile(model, options={"post_grad_custom_pre_pass": macko.fuse.Fuse()})

A decoder's step for one token has some thirty kernels of microseconds between its products. Two kinds of them need no
launch of their own: the root mean square norm of a layer's input, which the kernel makes where it puts x into shared
memory, and the sum of its output and the residual, which is a bias to it. Dense layers have the same from Inductor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import MULTIPLE, CallFunction, KeywordArg, Match

aten, prims = torch.ops.aten, torch.ops.prims

_x = CallFunction(prims.convert_element_type.default, KeywordArg("x"), torch.float32, _users=MULTIPLE)
_mean = CallFunction(aten.mean.dim, CallFunction(aten.pow.Tensor_Scalar, _x, 2), [-1], True)
_root = CallFunction(aten.rsqrt.default, CallFunction(aten.add.Tensor, _mean, KeywordArg("eps")))
_scaled = CallFunction(
    prims.convert_element_type.default, CallFunction(aten.mul.Tensor, _x, _root), KeywordArg("dtype")
)
#: weight * (x.float() / sqrt(mean(x^2) + eps)).to(dtype), as LlamaRMSNorm and its many copies have it.
_NORMS = (
    CallFunction(aten.mul.Tensor, KeywordArg("weight"), _scaled, _users=MULTIPLE),
    CallFunction(aten.mul.Tensor, _scaled, KeywordArg("weight"), _users=MULTIPLE),
)


class Fuse(CustomGraphPass):
    """For Inductor's option `post_grad_custom_pre_pass`: macko::sell_linear of one token takes its neighbours in.

    Sums are rounded once where two kernels round twice; all else has the same roundings. Graphs of more tokens at once,
    of other formats and without sparse layers stay as they are.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.macko.sell_linear.default):
            y = _value(node)
            if y is not None and y.shape.numel() == y.shape[-1]:  # one token
                _take_norm(_take_sum(node))
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _value(node: Any) -> Tensor | None:
    """What stands for the tensor of a graph's node while it is compiled."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _take_sum(linear: fx.Node) -> fx.Node:
    """linear(x) + other -> linear(x, bias=other)."""
    x_and_packed, bias = linear.args[:9], linear.args[9:]
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
        return _replace(add, linear.target, (*x_and_packed, flat))


def _take_norm(linear: fx.Node) -> fx.Node:
    """linear(norm(x, weight)) -> norm_linear(x, weight, eps)."""
    source, *packed = linear.args
    matches = [pattern.match(source) for pattern in _NORMS] if isinstance(source, fx.Node) and not linear.kwargs else []
    found = next((match.kwargs for match in matches if isinstance(match, Match)), None)
    if found is None or not _alike(_value(found["x"]), _value(source)) or not isinstance(found["eps"], float):
        return linear
    x, weight = _value(found["x"]), _value(found["weight"])
    if not _alike(x.reshape(-1), weight) or found["dtype"] != x.dtype or x.shape[-1] % 8:  # type: ignore[union-attr]
        return linear
    args = (found["x"], found["weight"], found["eps"], *packed)
    with linear.graph.inserting_before(linear):
        return _replace(linear, torch.ops.macko.sell_norm_linear.default, args)


def _replace(node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A call of target in the node's place; dead code is left for later."""
    new = node.graph.call_function(target, args)
    new.meta.update(node.meta)
    new.meta.pop("eager_input_vals", None)  # of the arguments there were; they hold no layout that the kernel needs
    node.replace_all_uses_with(new)
    return new
