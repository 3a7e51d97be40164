"""A linear layer of an engine: layers of the checkpoint stacked into one matrix, of which a rank holds a share.

    checkpoint             one matrix       rank 1 of 2 holds
    q_proj  8 heads of rows    q            heads 4 to 7 of q
    k_proj  2 heads            k            head 1 of k
    v_proj  2 heads            v            head 1 of v

A layer whose columns are cut (o_proj, down_proj) is a stack of one. Nothing here knows an engine: it says what it
stacks (names_of, places_of) and what the rank holds (Share), hands over the tensors of its files as they come (Stack),
and puts the packed weight into its module (hold, linear).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..choose.auto import is_held_packed, pack, repacked
from ..choose.options import Options
from ..choose.slide import for_faster_kernel
from ..ops import multiply
from ..weights import PackedWeight, saved_as
from ..weights.shards import joined, joined_planes


def names_of(layer: str, stacks: Mapping[str, Sequence[str]]) -> list[str]:
    """Names in the checkpoint of what an engine's layer is made of.

    Args:
        layer: its full name in the engine.
        stacks: last components of names by that of the stack: {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    """
    parent, _, last = layer.rpartition(".")
    return [f"{parent}.{name}".removeprefix(".") for name in stacks.get(last, [last])]


def places_of(key: Any, count: int) -> tuple[int, ...]:
    """Which of `count` stacked layers an engine's loader means: by "q", "k" or "v", by number or numbers; None: all."""
    if key is None:
        return tuple(range(count))
    if isinstance(key, str):
        return ("qkv".index(key),)
    return tuple(key) if isinstance(key, tuple) else (key,)


def packed_of(layer: str, names: Sequence[str], layers: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What a checkpoint's config says of the layers that are stacked into one; empty where all of them are dense.

    Raises:
        ValueError: some are packed and some are not.
    """
    packed = [name for name in names if name in layers]
    if packed and len(packed) < len(names):
        others = ", ".join(name for name in names if name not in layers)
        raise ValueError(
            f"{layer} is one matrix in this engine, of {', '.join(packed)}, packed, and {others}, dense: pack all of "
            "them or none (ignore=...), or serve the dense model with --quantization macko"
        )
    return [layers[name] for name in packed]


@dataclasses.dataclass(frozen=True)
class Share:
    """What a rank holds of a stack.

    Attributes:
        rows: of each of the stacked layers, on this rank.
        cols: on this rank.
        rank, ranks: of tensor parallelism.
        replicas: for each of the stacked layers how many ranks hold the same rows: of k and v, where there are fewer
            heads than ranks.
        window: of a head: which rows of the whole this rank holds, start and stop; up to its rows zeros follow.
    """

    rows: tuple[int, ...]
    cols: int
    rank: int = 0
    ranks: int = 1
    replicas: tuple[int, ...] = ()
    window: tuple[int, int] | None = None

    def cut(self, whole: PackedWeight, places: Sequence[int]) -> list[PackedWeight]:
        """This rank's share of what the checkpoint has for these places of the stack, in their order.

        Nothing is unpacked before it has the rows and columns that are wanted.

        Raises:
            ValueError: the checkpoint's layer has another shape.
        """
        first = self._first_column(whole.cols)
        rows = self._rows_of(whole.rows, places)
        columns = whole.parted().cut(1, first, first + self.cols)
        return [columns.cut(0, start, stop) for start, stop in rows]

    def cut_dense(self, whole: Tensor) -> Tensor:
        """This rank's share of a stack of one that the checkpoint has dense.

        Raises:
            ValueError: it has another shape.
        """
        first = self._first_column(whole.shape[1])
        ((start, stop),) = self._rows_of(whole.shape[0], (0,))
        return whole[start:stop, first : first + self.cols]

    def _first_column(self, count: int) -> int:
        if count not in (self.cols, self.cols * self.ranks):
            raise ValueError(f"the checkpoint has {count} columns, expected {self.cols} for each of {self.ranks} ranks")
        return self.rank * self.cols if count > self.cols else 0

    def _rows_of(self, count: int, places: Sequence[int]) -> list[tuple[int, int]]:
        """This rank's rows, start and stop, of a layer with so many: for each of the places, or all of them at once."""
        if self.window is not None:
            start, stop = self.window
            if count < stop:
                raise ValueError(f"the checkpoint has {count} rows, expected rows {start} to {stop}")
            return [self.window]
        rows = [self.rows[place] for place in places]
        if count == sum(rows):
            return [(0, count)]
        replicas = [self.replicas[place] if self.replicas else 1 for place in places]
        wholes = [size * self.ranks // same for size, same in zip(rows, replicas, strict=True)]
        if count != sum(wholes):
            raise ValueError(f"the checkpoint has {count} rows, expected {sum(rows)} for each of {self.ranks} ranks")
        starts = [
            stop - whole + self.rank // same * size
            for stop, whole, same, size in zip(accumulate(wholes), wholes, replicas, rows, strict=True)
        ]
        return [(start, start + size) for start, size in zip(starts, rows, strict=True)]


class Stack:
    """The packed layers of a checkpoint that are one of an engine's, tensor by tensor as its files are read.

    Args:
        layers: what the checkpoint's config says of each, in the order of the stack (macko.files).
    """

    def __init__(self, layers: Sequence[dict[str, Any]]) -> None:
        self._kinds = [saved_as(about) for about in layers]
        #: What has come, by places in the stack: of a checkpoint whose layer is stacked as the engine's all of them.
        self._found: dict[tuple[int, ...], dict[str, Tensor]] = {}

    @property
    def names(self) -> set[str]:
        """Of the tensors that the layers have."""
        return {name for _, _, names in self._kinds for name in names}

    def add(self, places: tuple[int, ...], name: str, tensor: Tensor, device: torch.device) -> None:
        """Takes a tensor of the layer that has these places; a copy, for a reader may use its memory again."""
        self._found.setdefault(places, {})[name] = tensor.to(device, copy=True)

    @property
    def is_complete(self) -> bool:
        if len(self._found) < len(self._kinds):
            return False
        tensors = [self._found[places] for places in sorted(self._found)]
        return all(found.keys() >= set(names) for found, (_, _, names) in zip(tensors, self._kinds, strict=True))

    def missing(self) -> str:
        """What to say of a stack that is not complete once all files have been read."""
        found = f"{len(self._found)} of {len(self._kinds)} packed layers" if self._found else "no packed layer"
        return f"the checkpoint has {found} of it, or one that is not whole"

    def shares(self, share: Share, dtype: torch.dtype) -> Iterator[PackedWeight]:
        """This rank's share of each layer in the order of the stack. The layers are let go one by one.

        Raises:
            ValueError: what the files hold is damaged, or of another shape.
        """
        for places, (kind, sizes, names) in zip(sorted(self._found), self._kinds, strict=True):
            found = self._found.pop(places)
            whole = kind(**{name: found[name] for name in names}, **sizes)  # type: ignore[arg-type]
            if whole.dtype != dtype:
                whole = whole.to("cpu")  # a GPU has no kernels for float32
            whole.validate()
            yield from share.cut(whole, places)

    def pack(self, share: Share, dtype: torch.dtype, device: torch.device, options: Options) -> PackedWeight | Tensor:
        """This rank's matrix, whose layout is chosen by the options; what the files hold rounded keeps its codes.

        Dense where the files hold it in planes, and the device does not multiply these faster.
        """
        parts, rows = [part.to(device, dtype) for part in self.shares(share, dtype)], sum(share.rows)
        are_packed = all(is_held_packed(part, device) for part in parts)
        if are_packed and len(parts) == 1 and parts[0].rows == rows:
            return repacked(parts[0].materialized(), options)
        if are_packed and (of_codes := joined(parts, rows)) is not None:
            return for_faster_kernel(of_codes, options)
        dense = torch.cat([part.to_dense() for part in parts])
        dense = nn.functional.pad(dense, (0, 0, 0, rows - len(dense)))
        if not are_packed:
            return dense
        lossless = joined_planes(parts, dense)
        return pack(dense, options) if lossless is None else lossless

    def unpack(self, share: Share, dtype: torch.dtype, device: torch.device) -> Tensor:
        """This rank's matrix, dense."""
        return torch.cat([part.to_dense().to(device, dtype) for part in self.shares(share, dtype)])


# ---- The packed weight in an engine's module -------------------------------------------------------------------------

#: Modules of this process that hold a packed weight, by number. Compiled code knows a layer by its number alone, which
#: is an input. Layers of the same shape are then the same code, which an engine compiles once: of a 7B 3 pieces, in
#: place of 33 that differ in sizes, for which half a minute was not enough on an H200 (dense: 7 s).
_MODULES: list[weakref.ref[nn.Module]] = []
#: Where the op of compiled code is; part of what an engine's cache of it has to depend on.
NAMESPACE = "macko_engine"
_OPS = torch.library.Library(NAMESPACE, "DEF")
_OPS.define("linear(Tensor x, Tensor number, int rows, Tensor? bias) -> Tensor")


def hold(module: Any, packed: PackedWeight) -> None:
    """Puts a packed weight into an engine's module, as buffers, in place of its parameters but the bias.

    As no parameters, for no loader is to fill them. An empty `weight` [0, cols] stays: adapters ask it for the device.
    """
    for name, param in list(module.named_parameters(recurse=False)):
        if name != "bias" and param.numel() + (name != "weight"):
            delattr(module, name)
    for name, tensor in packed.tensors().items():
        module.register_buffer(f"macko_{name}", tensor, persistent=False)
    if not hasattr(module, "weight"):
        module.weight = nn.Parameter(torch.empty(0, packed.cols, dtype=packed.dtype, device=packed.device), False)
    module.register_buffer("macko_number", torch.tensor([len(_MODULES)], device="cpu"), persistent=False)
    _MODULES.append(weakref.ref(module))
    module.macko_header = packed.header
    module.macko_names = [f"macko_{name}" for name in packed.tensors()]


def holds(module: nn.Module) -> bool:
    """Whether the module has a packed weight."""
    return hasattr(module, "macko_header")


def linear(module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """x times the module's packed weight, transposed, plus a bias; traced as one op for all layers of a shape."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops, NAMESPACE).linear(x, module.macko_number, module.macko_header[1], bias)
    return multiply(x, [getattr(module, name) for name in module.macko_names], module.macko_header, bias)


def dense(module: Any) -> Tensor:
    """The module's weight [rows, cols], unpacked."""
    return torch.ops.macko.dense([getattr(module, name) for name in module.macko_names], module.macko_header)


def _linear(x: Tensor, number: Tensor, rows: int, bias: Tensor | None) -> Tensor:
    module: Any = _MODULES[int(number)]()
    return multiply(x, [getattr(module, name) for name in module.macko_names], module.macko_header, bias)


def _as_linear(x: Tensor, number: Tensor, rows: int, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


for _device in ("CPU", "CUDA"):
    _OPS.impl("linear", _linear, _device)
torch.library.register_fake(f"{NAMESPACE}::linear", _as_linear, lib=_OPS)
