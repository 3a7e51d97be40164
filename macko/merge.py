"""merge_: layers that multiply the same input as one matrix, because a launch has costs of its own.

q, k and v of an attention, gate and up of an MLP: each stays a layer of its own name, with its own weight to look at
and to save, and gives its rows of one product. The first of them that is called computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .choose import Auto
from .formats import MackoWeight, PackedWeight
from .linear import SparseLinear

#: Names of siblings that get the same input in the models of transformers. Nothing else is merged unasked.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Attentions whose k and v look at another sequence than q.
_CROSS = ("cross", "encoder_attn")


class _Shared:
    """One packed matrix, the rows of all siblings, and its last product while somebody may still ask for it."""

    def __init__(self, layer: SparseLinear, count: int) -> None:
        self.layer = layer
        self.count = count
        #: The input (and its version), the product, who has taken his rows.
        self.eager: tuple[Any, ...] | None = None
        #: The same within one traced graph: None at its beginning and end, so that a guard on it holds.
        self.traced: tuple[Any, ...] | None = None

    def product(self, x: Tensor, index: int) -> Tensor:
        """x W^T of all siblings, computed for the first one that asks with this x."""
        key: tuple[Any, ...]
        if torch.compiler.is_compiling():
            key, held = (x, torch.is_grad_enabled()), self.traced
        else:
            version = None if x.is_inference() else x._version
            key, held = (x, torch.is_grad_enabled(), version), self.eager
        if held is None or held[0][0] is not x or held[0][1:] != key[1:] or index in held[2]:
            held = (key, self.layer(x), ())
        taken = (*held[2], index)
        kept = (key, held[1], taken) if len(taken) < self.count else None
        if torch.compiler.is_compiling():
            self.traced = kept
        else:
            self.eager = kept
        return held[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "eager": None, "traced": None}


class MergedLinear(SparseLinear):
    """One of several layers of one input, whose weights are packed as one matrix; see merge_.

    For callers it is the SparseLinear that it was. Its own packed weight is made at every look. What holds the matrix
    is no submodule: `state_dict` has the tensors of each layer by itself, as if they were not merged.
    """

    def __init__(self, shared: _Shared, index: int, rows: slice, auto: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = shared.layer.in_features, rows.stop - rows.start
        self.register_parameter("bias", None)
        self._shared, self._index, self._rows, self._auto = shared, index, rows, auto
        self._format, self._sizes = MackoWeight, {}

    def forward(self, input: Tensor) -> Tensor:
        return self._shared.product(input, self._index)[..., self._rows]

    @property
    def packed(self) -> PackedWeight:
        """This layer's rows, packed anew in the canonical format."""
        return MackoWeight.smallest(self._shared.layer.packed.to_dense()[self._rows])

    @property
    def format(self) -> str:
        return self._shared.layer.format

    @property
    def dtype(self) -> torch.dtype:
        return self._shared.layer.dtype

    @property
    def device(self) -> torch.device:
        return self._shared.layer.device

    def split(self) -> SparseLinear:
        """The layer by itself."""
        packed = self.packed
        packed = Auto.from_macko(packed) if self._auto else packed  # type: ignore[arg-type]
        return SparseLinear.from_packed(packed, auto=self._auto).train(self.training)

    def reformat_(self, format: str = "auto") -> SparseLinear:
        """Holds the matrix of all siblings in another format."""
        self._shared.layer.reformat_(format)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> SparseLinear:
        if self._index == 0:  # once for all
            self._shared.layer._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        SparseLinear.from_packed(self.packed)._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        others[-1].append(
            f"{prefix.removesuffix('.')}: is merged with others; call macko.split_(model) before you load"
        )

    def reset_parameters(self) -> NoReturn:
        raise RuntimeError("MergedLinear: a packed weight has no random start")


def merge_(model: nn.Module, siblings: Sequence[Sequence[str]] = SIBLINGS) -> list[str]:
    """Packs sparse layers of the same input as one matrix, in place, so that a token takes fewer launches.

    Merged are SparseLinear siblings without a bias, of one parent, format and dtype. Outputs, names and what is saved
    stay the same. A sibling that gets another input than the others is right still, but computes the product of all.

    Args:
        model: after sparsify_, or as from_pretrained gave it.
        siblings: names of layers, in the order of their calls, that get the same tensor where one module has them all.

    Returns:
        What was merged, as "model.layers.0.self_attn.{q_proj,k_proj,v_proj}".
    """
    merged = []
    for path, parent in model.named_modules():
        if any(word in path.rpartition(".")[2].lower() for word in _CROSS):
            continue
        for names in siblings:
            found = [getattr(parent, name, None) for name in names]
            layers: list[SparseLinear] = [layer for layer in found if _can_merge(layer)]  # type: ignore[misc]
            if len({id(layer) for layer in layers}) < len(names):
                continue
            kinds = {(layer.format, layer.dtype, layer.device, layer.in_features, layer._auto) for layer in layers}
            if len(kinds) > 1:
                continue
            for name, layer in zip(names, _merge(layers), strict=True):
                setattr(parent, name, layer)
            merged.append(f"{path}.{{{','.join(names)}}}".removeprefix("."))
    return merged


def _can_merge(layer: object) -> bool:
    if type(layer) is not SparseLinear or layer.bias is not None:
        return False
    if not isinstance(layer.packed, MackoWeight) and not layer.packed.is_layout:
        return False  # slide may hold quantised values, and is saved as it is
    return not layer._forward_hooks and not layer._forward_pre_hooks


def _merge(layers: list[SparseLinear]) -> list[MergedLinear]:
    dense = torch.cat([layer.packed.to_dense() for layer in layers])
    first = layers[0]
    packed = MackoWeight.smallest(dense)
    kind = type(first.packed)
    held = Auto.from_macko(packed) if first._auto else kind.from_macko(packed)
    shared = _Shared(SparseLinear.from_packed(held, auto=first._auto).train(first.training), len(layers))
    parts, start = [], 0
    for index, layer in enumerate(layers):
        rows = slice(start, start + layer.out_features)
        parts.append(MergedLinear(shared, index, rows, layer._auto).train(layer.training))
        start = rows.stop
    return parts


def split_(model: nn.Module) -> None:
    """Undoes merge_, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, MergedLinear):
            model.set_submodule(name, module.split())
