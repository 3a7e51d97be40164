"""merge_: layers that multiply the same input as one matrix, because a launch has costs of its own.

q, k and v of an attention, gate and up of an MLP: each stays a layer of its own name, with its own weight to look at
and to save, and gives its rows of one product. The first of them that is called computes it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..choose.auto import pack, repacked
from ..choose.options import Options
from ..weights import MackoWeight, PackedWeight
from ..weights.shards import joined
from .linear import HOOKS, SparseLinear, autocast_dtype, with_hooks

#: Names of siblings that get the same input in the models of transformers. Nothing else is merged unasked.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Attentions whose k and v look at another sequence than q.
_CROSS = ("cross", "encoder_attn")


class _Last:
    """The last product of siblings, while one of them may still ask for it: (whole, input, key, parts, taken by).

    One for all that a call of merge_ has merged: what an exception between siblings, or one that is given another
    input, may leave goes before there is more. Copies of a layer begin without.
    """

    def __init__(self) -> None:
        #: One for eager calls; one within a traced graph, None at its beginning and end, so that a guard on it holds.
        self.eager: tuple[Any, ...] | None = None
        self.traced: tuple[Any, ...] | None = None

    def __reduce__(self) -> Any:
        return type(self), ()


class _Whole(SparseLinear):
    """The matrix of siblings; no submodule of the model."""

    _part_rows: tuple[int, ...]
    _last: _Last

    def part(self, x: Tensor, index: int) -> Tensor:
        """A sibling's part of x W^T, computed for all of them for the first one that asks with this x."""
        last, tracing = self._last, torch.compiler.is_compiling()
        version = None if tracing or x.is_inference() else x._version
        inference = not tracing and torch.is_inference_mode_enabled()
        key = (version, inference, torch.is_grad_enabled(), autocast_dtype(x))
        product = last.traced if tracing else last.eager
        if product is None or product[0] is not self or product[1] is not x or product[2] != key or index in product[4]:
            if not tracing:
                last.eager = product = None  # before there is more
                self._check_device(x)
            product = (self, x, key, self._parts(x, self._part_rows), ())
        taken = (*product[4], index)
        kept = (*product[:4], taken) if len(taken) < len(self._part_rows) else None
        if tracing:
            last.traced = kept
        else:
            last.eager = kept
        return product[3][index]

    def _check_device(self, x: Tensor) -> None:
        """RuntimeError where x is elsewhere: what moves modules tensor by tensor does not see this one."""
        if x.device != (here := next(iter(self._buffers.values())).device):  # type: ignore[union-attr]
            raise RuntimeError(
                f"merged layers are on {here}, their input is on {x.device}: model.to() moves them together, but "
                "nn.DataParallel and accelerate's device maps do not; call macko.split_(model) before those"
            )

    def rows_of(self, index: int) -> PackedWeight:
        """A sibling's rows, packed anew: in the canonical format, or in the whole's where that is not chosen."""
        stop = sum(self._part_rows[: index + 1])
        return self.packed.rows_anew(stop - self._part_rows[index], stop)

    def replace_part(self, index: int, weight: PackedWeight) -> None:
        """Packs the matrix anew, with other rows for a sibling. ValueError: the format does not hold it so."""
        weight = weight.to(self.device, self.dtype)
        siblings = [self.rows_of(i) if i != index else weight for i in range(len(self._part_rows))]
        self._hold(_pack_together(siblings, self._chosen, self.packed))


class MergedLinear(SparseLinear):
    """One of several layers of one input, whose weights are packed as one matrix; see merge_.

    For callers it is the SparseLinear that it was. Its own packed weight is made at every look. What holds the matrix
    is no submodule: `state_dict` has the tensors of each layer by itself, as if they were not merged.
    """

    _whole: _Whole

    def __init__(self, whole: _Whole, index: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, whole._part_rows[index]
        self.register_parameter("bias", None)
        self._index, self._options = index, whole._options
        self._format, self._sizes = MackoWeight, {}
        vars(self)["_whole"] = whole  # no submodule

    def forward(self, input: Tensor) -> Tensor:
        return self._whole.part(input, self._index)

    @property
    def packed(self) -> PackedWeight:
        """This layer's rows, packed anew: in the canonical format, or in the whole's where that is not chosen."""
        return self._whole.rows_of(self._index)

    @property
    def _view(self) -> PackedWeight:
        return self.packed

    @property
    def format(self) -> str:
        return self._whole.format

    @property
    def dtype(self) -> torch.dtype:
        return self._whole.dtype

    @property
    def device(self) -> torch.device:
        return self._whole.device

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "bias" and param is not None:  # forward has none to add
            raise ValueError("a merged layer has no bias: call macko.split_(model) before you set one")
        super().register_parameter(name, param)

    def _unpacks(self) -> Callable[[], Tensor]:
        packed, start = self._whole.packed, sum(self._whole._part_rows[: self._index])
        return lambda: packed.to_dense()[start : start + self.out_features].clone()

    @property
    def _holds_sums(self) -> bool:
        return self._whole._holds_sums

    def _pack_anew(self, dense: Tensor) -> None:
        try:
            self._whole.replace_part(self._index, self._whole._format.from_dense(dense.detach().to(self.device)))
        except ValueError as error:
            raise RuntimeError(
                f"SparseLinear: {self.format} does not hold what its weight is to become: {error}"
            ) from None

    def split(self) -> SparseLinear:
        """The layer by itself, in the format of the whole or one chosen anew, with this layer's hooks."""
        options = self._whole._chosen
        layer = SparseLinear.from_packed(repacked(self.packed, options), options=options).train(self.training)
        return with_hooks(layer, self)

    def reformat_(self, format: str = "auto") -> SparseLinear:
        """Holds the matrix of all siblings in another format."""
        self._whole.reformat_(format)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> SparseLinear:
        """What moves one layer moves all; done again for the others it changes nothing.

        RuntimeError where it leaves the meta device without content, as to_empty does: nothing could be loaded then, as
        a sibling's rows are packed with those of the others.
        """
        if self.device.type == "meta" and fn(torch.empty(0, device="meta")).device.type != "meta":
            raise RuntimeError("a merged layer cannot leave the meta device: split_ the model first")
        self._whole._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        SparseLinear.from_packed(self.packed)._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """As the layer by itself; then its rows of the matrix of all are packed anew."""
        if self.device.type == "meta":
            others[-1].append(f"{prefix.removesuffix('.')}: is merged with others and on meta: load before merge_")
            return
        errors, before = others[-1], len(others[-1])
        try:
            alone = SparseLinear.from_packed(self.packed)
        except (RuntimeError, ValueError) as error:
            errors.append(f"{prefix.removesuffix('.')}: {error}, as to_empty leaves it: split_ the model before that")
            return
        alone._load_from_state_dict(state_dict, prefix, *others)
        if len(errors) > before or not any(key.startswith(prefix) for key in state_dict):
            return
        try:
            if alone.device.type == "meta":
                raise ValueError("the state is on meta, and what it is merged with is not")
            if alone.dtype != self.dtype:  # assigned
                raise ValueError(f"the state is of {alone.dtype}, and what it is merged with of {self.dtype}")
            self._whole.replace_part(self._index, alone.packed)
        except ValueError as error:
            also = "; it is one matrix with others, whose state may still be to come: split_ them first"
            errors.append(f"{prefix.removesuffix('.')}: {error}{also}")


def merge_(model: nn.Module, siblings: Sequence[Sequence[str]] = SIBLINGS) -> list[list[str]]:
    """Packs sparse layers of the same input as one matrix, in place, so that a token takes fewer launches.

    Merged are SparseLinear siblings without a bias, of one parent and dtype, that hang nowhere else. Where their
    formats were chosen, one is chosen for all; named ones have to be the same. Outputs, names and what is saved stay
    the same. A sibling that gets another input than the others is right still, but computes the product of all. All or
    nothing, as sparsify_. Not for a model that changes the input in place between siblings: eager mode sees it by the
    tensor's version, but tensors of inference mode, `.data` and compiled graphs have none.

    Args:
        model: after sparsify_, or as from_pretrained gave it.
        siblings: names of layers, in the order of their calls, that get the same tensor where one module has them all.

    Returns:
        The full names of the layers of each matrix.
    """
    merged: list[list[str]] = []
    last = _Last()
    places = Counter(id(child) for parent in model.modules() for child in parent._modules.values())
    with contextlib.ExitStack() as undo:
        for path, parent in model.named_modules():
            if any(word in path.rpartition(".")[2].lower() for word in _CROSS):
                continue
            for names in siblings:
                found = [getattr(parent, name, None) for name in names]
                layers: list[SparseLinear] = [layer for layer in found if _can_merge(layer)]  # type: ignore[misc]
                if len(layers) < len(names) or any(places[id(layer)] > 1 for layer in layers):
                    continue
                kinds = {(one._chosen, one.dtype, one.device, one.in_features) for one in layers}
                if len(kinds) > 1:
                    continue
                try:
                    together = _merge(layers, last)
                except ValueError:  # the format holds each of them, and not all of them as one
                    continue
                for name, layer in zip(names, together, strict=True):
                    undo.callback(_split_at, parent, name)
                    setattr(parent, name, layer)
                merged.append([f"{path}.{name}".removeprefix(".") for name in names])
        undo.pop_all()  # nothing is to be undone
    return merged


def _split_at(parent: nn.Module, name: str) -> None:
    if isinstance(layer := getattr(parent, name), MergedLinear):
        setattr(parent, name, layer.split())


def _can_merge(layer: object) -> bool:
    if type(layer) is not SparseLinear or layer.bias is not None:
        return False
    if not layer.packed.merges:
        return False
    return "forward" not in vars(layer) and not any(vars(layer)[name] for name in HOOKS)


def _merge(layers: list[SparseLinear], last: _Last) -> list[MergedLinear]:
    first, weights = layers[0], [layer.packed for layer in layers]
    options = first._chosen
    packed = _pack_together(weights, options, weights[0])
    whole = _Whole.from_packed(packed, options=options).train(first.training)
    whole._part_rows, whole._last = tuple(layer.out_features for layer in layers), last
    return [MergedLinear(whole, index).train(layer.training) for index, layer in enumerate(layers)]


def _pack_together(parts: Sequence[PackedWeight], options: Options, like: PackedWeight) -> PackedWeight:
    """One matrix of all rows, of the dtype and on the device of `like`."""
    if (in_bytes := joined(parts, sum(part.rows for part in parts))) is not None:
        return in_bytes
    dense = torch.cat([part.to_dense().to(like.device, like.dtype) for part in parts])
    return pack(like.as_source(dense), options)


def split_(model: nn.Module) -> None:
    """Undoes merge_, in place."""
    for module in list(model.modules()):
        if isinstance(module, MergedLinear):
            layer = module.split()
            for parent in model.modules():
                for place, child in parent._modules.items():
                    if child is module:
                        parent._modules[place] = layer
