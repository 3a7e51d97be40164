"""transformers' tensor parallelism (`tp_plan="auto"`): a process holds the rows or columns that the plan gives a layer.

transformers wraps the forward of each layer of its plan: "colwise" leaves a layer this process' share of the outputs,
"rowwise" its share of the inputs, and sums the products. What it wraps is asked for `_hf_quantized_needs_local_tp`: a
layer that holds a slice that is no DTensor. in_features and out_features stay those of the whole layer.

Experts are cut as they are read, by the rows and columns of each ("packed_colwise", "rowwise") or by expert
("grouped_gemm"); then what transformers has wrapped around the dense module is wrapped around the packed one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch.distributed
from torch import nn

from ..files import named
from ..nn.convert import group_between
from ..nn.experts import SparseExperts
from ..nn.linear import SparseLinear
from ..weights import SLIDE_PATTERNS, PackedWeight
from ..weights.shards import gathered, gathered_as
from . import transformers_version


def check(model: Any) -> None:
    """Looks at how transformers spreads the model over processes.

    Raises:
        ValueError: in another way than by tensor parallelism, or by a transformers that does not ask layers.
    """
    asked = getattr(model.config, "distributed_config", None)
    sizes = {key: getattr(asked, key, None) or 1 for key in ("ep_size", "pp_size", "dp_size")}
    if sizes["ep_size"] > 1 and (kinds := _styles()) and "ep_dispatch_experts" in kinds.ALL_PARALLEL_STYLES:
        del sizes["ep_size"]
    sizes["dp_size"] = max(sizes["dp_size"], getattr(asked, "fsdp_size", None) or 1)  # all there is before 5.23
    more = [f"{key}={size}" for key, size in sizes.items() if size > 1]
    if _is_parallel(model) and _styles() is None:
        more.append("tp_size, which transformers before 5.19 does in another way")
    if more:
        raise ValueError(
            "macko's layers do not support this distributed loading of transformers yet; asked for was "
            f"{', '.join(more)}, by distributed_config or tp_plan. Load without it: tp_plan='auto', for experts "
            "ep_size from transformers 5.23 on, and device_map='auto' take several GPUs, and DDP and fully_shard work "
            "on the loaded model"
        )


def is_asked(model: Any) -> bool:
    """Whether tensor parallelism is asked for, which begins while the model is loaded."""
    return (getattr(getattr(model.config, "distributed_config", None), "tp_size", None) or 1) > 1 or _is_parallel(model)


def _is_parallel(model: Any) -> bool:
    return (getattr(model, "_tp_size", None) or 1) > 1


def _styles() -> Any:
    """The module of transformers that wraps layers, or None: before 5.19 it does so in other ways."""
    if transformers_version() < (5, 19):
        return None
    from transformers.distributed import tensor_parallel

    return tensor_parallel


def _style(model: Any, name: str) -> Any:
    """What the plan does with a layer, or None."""
    generic = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
    plan = (model.tp_plan or {}) if _is_parallel(model) and _styles() else {}
    return _styles().ALL_PARALLEL_STYLES[plan[generic]] if generic in plan else None


def cut_dim(model: Any, name: str) -> int | None:
    """0 where the plan gives each process rows of a layer's weight, 1 for columns, None for all of it.

    Raises:
        ValueError: it cuts the weight in another way.
    """
    if (style := _style(model, name)) is None:
        return None
    kinds = _styles()
    if isinstance(style, (kinds.ColwiseParallel, kinds.RowwiseParallel)):
        return 0 if isinstance(style, kinds.ColwiseParallel) else 1
    if type(style).shard_param is not kinds.TensorParallelLayer.shard_param:
        raise ValueError(
            f"{name}: the plan cuts it as {type(style).__name__}, which packed layers cannot: leave it dense"
        )
    return None


def holders(model: Any, name: str) -> int:
    """How many processes hold a layer's weight together."""
    return 1 if cut_dim(model, name) is None else _mesh(model).size()


def cut_group(model: Any, name: str, cols: int, pattern: str) -> str:
    """The group of a pattern that lies in the columns of two processes, if there is one."""
    if pattern in SLIDE_PATTERNS and cut_dim(model, name) == 1:
        return group_between(cols, holders(model, name), pattern)
    return ""


def cut(model: Any, name: str, layer: SparseLinear) -> None:
    """Leaves a layer, which holds the whole weight and which transformers has wrapped, this process' part of it."""
    if (dim := cut_dim(model, name)) is None:
        return
    mesh, whole = _mesh(model), layer.packed
    size = whole.shape[dim]
    width = -(-size // mesh.size())  # as torch.chunk and DTensor cut
    start = min(mesh.get_local_rank() * width, size)
    layer._hold(whole.cut(dim, start, min(start + width, size)))
    layer._hf_quantized_needs_local_tp = True


def wrap(model: Any, name: str, layer: SparseLinear, in_features: int, out_features: int) -> None:
    """Lets a layer that holds this process' part take the place of one that transformers has wrapped."""
    layer.in_features, layer.out_features = in_features, out_features
    if (style := _style(model, name)) is not None:
        layer._hf_quantized_needs_local_tp = True
        style.install_forward(layer, _mesh(model))
        layer._is_hooked = True


def wrap_experts(model: Any, name: str, experts: SparseExperts) -> None:
    """Lets packed experts that hold this process' part take the place of those that transformers has wrapped."""
    if vars(experts).pop("forward", None) is None:  # the dense module's own, wrapped
        return
    asked, generic = model.config.distributed_config, re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
    styles = _styles().ALL_PARALLEL_STYLES
    if (asked.ep_size or 1) > 1 and generic in (model.ep_plan or {}):
        meshes = {f"{key}_mesh": model._mesh_manager.get_mesh(key) for key in ("ep", "tp")}
        styles[model.ep_plan[generic]].install_forward(experts, **meshes, ep_implementation=asked.ep_implementation)
    else:
        styles[model.tp_plan[generic]].install_forward(experts, _mesh(model))
    experts._is_hooked = True  # type: ignore[assignment]


def check_experts(model: nn.Module) -> None:
    """ValueError where packed experts are a process' part of them."""
    for name, module in model.named_modules():
        if isinstance(module, SparseExperts) and "forward" in vars(module):
            raise ValueError(
                f"{name} holds one process' part of packed experts, which cannot be put together again: save the model "
                "that was loaded, or one that one process has packed"
            )


def _mesh(model: Any) -> Any:
    return model._device_mesh["tp"]


def _check_same(model: Any, packed: dict[str, PackedWeight]) -> None:
    """ValueError, in all processes, where layers are not packed alike in all: each chooses by its own part."""
    if not _is_parallel(model):
        return
    mine = [(name, gathered_as(weight)) for name, weight in packed.items()]
    every: list[Any] = [None] * _mesh(model).size()
    torch.distributed.all_gather_object(every, mine, group=_mesh(model).get_group())
    if other := sorted(set().union(*every) - set.intersection(*map(set, every))):
        raise ValueError(
            f"{other[0][0]} is packed by some processes, and by others not, or in another way, as each found its part "
            "to be: convert the dense model without tensor parallelism, and load what that gives with it"
        )


@contextlib.contextmanager
def all_whole(model: Any) -> Iterator[None]:
    """Within it each layer of which processes hold parts holds its whole weight, on the CPU. All have to call."""
    parts: list[tuple[SparseLinear, PackedWeight]] = []
    found = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, SparseLinear)]
    _check_same(model, {name: layer.packed for name, layer in found})
    try:
        for name, layer in found:
            if (dim := cut_dim(model, name)) is not None:
                parts.append((layer, part := layer.packed))
                with named(name):
                    layer._hold(gathered(part, dim, (layer.out_features, layer.in_features), _mesh(model)))
        yield
    finally:
        for layer, part in parts:
            layer._hold(part)
