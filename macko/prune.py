"""prune_: zeros into the linear layers of a model, in place, one function a method."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from .layers import Filter, LayerReport, Report, density_of, find_linears
from .linear import DTYPES, SparseLinear


def magnitude(weight: Tensor, sparsity: float) -> Tensor:
    """The smallest |w| of every row: a bool mask [rows, cols] of what to prune, round(sparsity * cols) a row.

    Of equal |w| those of lower column go first; NaN and Inf go last. Zeros that are there count.
    """
    count = round(sparsity * weight.shape[1])
    if count == 0:
        return torch.zeros_like(weight, dtype=torch.bool)
    size = weight.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    limit = size.kthvalue(count, dim=1, keepdim=True).values
    smaller, equal = size < limit, size == limit
    left = count - smaller.sum(1, keepdim=True)
    return smaller | (equal & (equal.cumsum(1, dtype=torch.int32) <= left))


#: By name: method(weight [rows, cols], sparsity) -> bool mask of what to prune.
METHODS: dict[str, Callable[[Tensor, float], Tensor]] = {"magnitude": magnitude}


def prune_(
    model: nn.Module,
    sparsity: float = 0.5,
    method: str = "magnitude",
    *,
    ignore: Iterable[str] = ("lm_head",),
    filter_fn: Filter | None = None,
    progress: bool = True,
) -> Report:
    """Sets a share of every row of every linear layer's weight to zero, in place.

    Args:
        model: any module; a single nn.Linear too.
        sparsity: share of zeros in each row: round(sparsity * in_features) of them.
        method: a name in macko.prune.METHODS. "magnitude": the smallest values of the row.
        ignore: layers to leave: full names, last components of names, or globs over full names.
        filter_fn: filter_fn(module, full name) says whether to prune a layer that ignore does not match.
        progress: show a bar when it takes more than a second.

    Returns:
        A Report of every nn.Linear with the density it has now, and why it was left. A weight that several layers share
        is pruned once.

    Raises:
        ValueError: sparsity is not in [0, 1), or there is no such method; nothing has been changed then.
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity is {sparsity}, expected 0 <= sparsity < 1 (0.5 sets half of every row to zero)")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, expected one of {', '.join(METHODS)}")
    rows: list[LayerReport] = []
    pruned: dict[int, str] = {}
    with tqdm(find_linears(model, ignore, filter_fn), disable=not progress, delay=1, unit="layer", leave=False) as bar:
        for layer in bar:
            bar.set_description(layer.name, refresh=False)
            module, shape = layer.module, (layer.module.out_features, layer.module.in_features)
            reason = layer.left_out or _why_not(module)
            if reason:
                rows.append(LayerReport(layer.name, shape, None, getattr(module, "format", "dense"), 0, 0, reason))
                continue
            weight = module.weight.detach()
            size = weight.numel() * weight.element_size()
            if (first := pruned.setdefault(id(module.weight), layer.name)) != layer.name:
                reason = f"shares the weight of {first}"
            else:
                weight.masked_fill_(METHODS[method](weight, sparsity), 0)
            rows.append(LayerReport(layer.name, shape, density_of(weight), "dense", size, size, reason))
    return Report(rows)


def _why_not(module: nn.Linear) -> str:
    if isinstance(module, SparseLinear):
        return "is sparse already"
    if "weight" not in module._parameters:
        return "its weight is made from other tensors"
    if module.weight.device.type == "meta":
        return "its weight is on the meta device"
    if type(module.weight) is not nn.Parameter or module.weight.dtype not in (*DTYPES, torch.float64):
        return f"its weight is a {type(module.weight).__name__} of {module.weight.dtype}"
    return ""
