"""How a layer's weight is read: from what files say of it, or by the names of its tensors where they say nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import codes
from .base import SIZES, PackedWeight
from .bytes import ByteWeight, Macko8Weight
from .canonical import MackoWeight
from .planes import Planes12Weight
from .registry import FORMATS, SAVED, format_named, not_a_stack
from .slide import SlideWeight

_Result = TypeVar("_Result")


def saved_as(about: Any) -> tuple[type[PackedWeight], dict[str, int], list[str]]:
    """What a file says of a packed weight, as {"format": "macko", "rows": 72, ...}: class, sizes, names of the tensors.

    Raises:
        ValueError: there is no such format, it is never saved, or the sizes are not those of the format, or none that
            they can be there.
    """
    if not isinstance(about, Mapping):
        raise ValueError(f"expected a format and its sizes, which are whole numbers, got {about!r}")
    format = about.get("format")
    kind = SAVED.get(format) if isinstance(format, str) else None
    kind = kind or format_named(format)  # type: ignore[arg-type]
    if instead := kind.instead_in_files():
        raise ValueError(f"{kind.format} is an execution layout, never saved: files hold {instead}")
    sizes = kind.sizes_of(about)
    if bad := {name: size for name, size in sizes.items() if type(size) is not int or size not in SIZES}:
        raise ValueError(f"expected integers, whole numbers from 0 to {SIZES[-1]}, got {bad}")
    _check_sizes(kind, sizes)
    return kind, sizes, list(kind.tensor_names)


def is_slide(about: Mapping[str, Any]) -> bool:
    """Whether a file says of a packed weight that it is slide's, which is for a prompt's tokens."""
    return about["format"] == SlideWeight.format


def stack_as(about: Any) -> tuple[type[PackedWeight], dict[str, int], int, int]:
    """What a state says of a stack of experts: class, sizes, how many experts, and how many rows each has.

    Raises:
        ValueError: as saved_as, but a state has layouts too; or experts are not packed in this format.
    """
    if not isinstance(about, Mapping):
        raise ValueError(f"expected a format and its sizes, got {about!r}")
    own = {name: about.get(name) for name in ("experts", "expert_rows")}
    kind = format_named(about.get("format"))  # type: ignore[arg-type]
    if reason := not_a_stack(kind.format):
        raise ValueError(reason)
    sizes = kind.sizes_of({name: size for name, size in about.items() if name not in own})
    _check_sizes(kind, sizes)
    for reason in filter(None, itertools.starmap(kind.bad_size, own.items())):
        raise ValueError(reason)
    return kind, sizes, *own.values()  # type: ignore[return-value]


def _check_sizes(kind: type[PackedWeight], sizes: Mapping[str, Any]) -> None:
    # What has a default may be left out.
    if other := sorted(set(sizes) ^ {name for name in kind.size_names if name in sizes or not hasattr(kind, name)}):
        raise ValueError(f"{' and '.join(other)}: the format {kind.format} has the sizes {', '.join(kind.size_names)}")
    for reason in filter(None, itertools.starmap(kind.bad_size, sizes.items())):
        raise ValueError(reason)


def said(extra: Any, read: Callable[[Any], _Result]) -> _Result:
    """What `read`, saved_as or stack_as, makes of a state's _extra_state; ValueError where that says nothing of it."""
    try:
        return read(json.loads(bytes(extra.reshape(-1).tolist())))
    except (AttributeError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"_extra_state does not say what the packed weight is: {error}") from None


def check_tensors(tensors: Mapping[str, Any]) -> None:
    """TypeError where what a state has for a weight's tensors is none."""
    if bad := {name: type(t).__name__ for name, t in tensors.items() if not isinstance(t, Tensor)}:
        raise TypeError(f"expected tensors, got {bad}")


def saved_by_names(
    tensors: Mapping[str, Tensor], cols: int, like: PackedWeight
) -> tuple[type[PackedWeight], dict[str, int], list[str]]:
    """What saved_as gives, of tensors by the names that files have, some of which may be missing.

    Args:
        tensors: values, deltas, row_ptr, perhaps scales, and the empty weight [0, cols] beside them.
        cols: of the weight, where no empty one says it.
        like: a weight of the model: its dtype, and the kind of its values where they have 8 bits and no empty weight
            says it, are taken.

    Raises:
        ValueError: the values have 8 bits, and nothing says of which kind.
    """
    values, deltas, row_ptr, empty = (tensors.get(name) for name in ("values", "deltas", "row_ptr", "weight"))
    if empty is not None and empty.dim() == 2 and not empty.shape[0]:
        cols = empty.shape[1]
    rows = 0 if row_ptr is None else max(0, row_ptr.numel() - 1)
    bits = 4
    if values is not None and values.numel() and deltas is not None:
        bits = deltas.numel() * 8 // values.numel()
    if values is None or values.dtype != torch.uint8 or "scales" not in tensors:
        return MackoWeight, {"rows": rows, "cols": cols, "delta_bits": bits}, list(MackoWeight.tensor_names)
    kinds = [empty.dtype] if empty is not None and empty.dtype in codes.TYPES else []
    kinds += [codes.TYPES[like.kind]] if isinstance(like, ByteWeight) else []
    if not kinds:
        raise ValueError("its values have 8 bits, and nothing beside them says of which kind: fp8 or int8")
    sizes = {"rows": tensors["scales"].numel(), "cols": cols, "delta_bits": bits if row_ptr.numel() else 0}  # type: ignore[union-attr]
    sizes |= {"kind": codes.TYPES.index(kinds[0]), "source": int(like.dtype != torch.float16)}
    return Macko8Weight, sizes, list(Macko8Weight.tensor_names)


#: Names that states may have of a layer, besides its bias, whichever format it is in now.
IN_FILES = tuple(dict.fromkeys((*Macko8Weight.tensor_names, *Planes12Weight.tensor_names, "weight")))
_FOR_A_FILE: ContextVar[bool] = ContextVar("_FOR_A_FILE", default=False)
_WITHOUT_CONTENT: ContextVar[bool] = ContextVar("_WITHOUT_CONTENT", default=False)


@contextlib.contextmanager
def within(variable: ContextVar[Any], value: Any = True) -> Iterator[None]:
    """Within it the variable has the value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


#: Within it a layer's state_dict is what macko's own files hold of it: dense12 as planes, and not as dense.
states_for_files = partial(within, _FOR_A_FILE)
#: Within it state_dicts have packed weights on the meta device: for who looks at names and shapes alone.
states_without_content = partial(within, _WITHOUT_CONTENT)


def in_state(weight: PackedWeight) -> PackedWeight | Tensor:
    """The weight as a state_dict has it, packed or dense."""
    weight = weight.empty_like("meta") if _WITHOUT_CONTENT.get() else weight
    return weight.to_file() if _FOR_A_FILE.get() else weight.to_saved()


_State = Mapping[str, Any]


def state_of(state_dict: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What a state_dict has of a layer's weight, by the names within the layer."""
    kinds = (*FORMATS.values(), *SAVED.values())
    names = {"_extra_state", "weight", *itertools.chain.from_iterable(kind.tensor_names for kind in kinds)}
    return {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}


def dense_in(state: _State, like: PackedWeight) -> Tensor | None:
    """The dense weight in the state of a layer that holds `like`; None where it has none.

    Raises:
        ValueError: it has one, and files hold the layer's weight packed.
    """
    weight, is_dense = state.get("weight"), like.about() is None
    is_packed = any(name in state for name in ("_extra_state", *MackoWeight.tensor_names))
    if not isinstance(weight, Tensor) or not (weight.numel() or (is_dense and not is_packed)):
        return None
    if not is_dense:
        raise ValueError("the state has a dense weight, and this layer is sparse: load it before sparsify_")
    return weight


def packed_in(state: _State, like: PackedWeight, shape: tuple[int, int]) -> PackedWeight | None:
    """The validated packed weight [shape] in the state of a layer that holds `like`; None where it has nothing of one.

    Raises:
        TypeError: what it has is no tensor.
        ValueError: a part of it is missing, or it is none that the layer holds.
    """
    kind, sizes, names = _said(state, like, shape[1])
    tensors = {name: state[name] for name in names if name in state}
    if missing := [name for name in names if name not in tensors]:
        if any(name in state for name in (*names, *like.tensor_names)):  # or they went in as they are
            raise ValueError(f"the state has no {', '.join(missing)} of its {kind.format} weight")
        if "weight" in state:
            raise ValueError(f"the state has an empty weight, and none of the tensors that {like.format} has")
        return None
    check_tensors(tensors)
    packed = kind(**tensors, **sizes)
    if packed.shape != shape:
        raise ValueError(f"size mismatch: the state has shape {list(packed.shape)}, the layer {list(shape)}")
    if any(tensor.device.type != "meta" for tensor in tensors.values()):
        packed.validate()
    return packed


def _said(state: _State, like: PackedWeight, cols: int) -> tuple[type[PackedWeight], dict[str, int], list[str]]:
    """What the packed weight of a state is: its format, sizes, and names of tensors.

    By its _extra_state, or else, whatever the layer holds now, by the names of files; or as the layer itself.
    """
    extra = state.get("_extra_state")
    # torch.distributed.checkpoint puts a placeholder where a file has none.
    if extra is not None and type(extra).__name__ != "_EXTRA_STATE":
        return said(extra, saved_as)
    for kind in FORMATS.values():  # whose sizes do not follow from the tensors
        of_its_own = not kind.instead_in_files() and kind not in (MackoWeight, type(like))
        if of_its_own and all(name in state for name in kind.tensor_names):
            raise ValueError(
                f"the state has a weight of format {kind.format} without the _extra_state that says its sizes, and "
                f"this layer holds {like.format}: load it with macko.load_model or from_pretrained"
            )
    there = {name: tensor for name in IN_FILES if isinstance(tensor := state.get(name), Tensor)}
    files, names = MackoWeight.tensor_names, like.tensor_names
    of_a_file = all(name in there for name in files)
    if any(name in there for name in files) and (of_a_file or any(name not in state for name in names)):
        return saved_by_names(there, cols, like)
    return type(like), like.sizes(), list(names)
