"""What files say of a packed weight, and what they hold where they say nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import codes
from .base import SIZES, PackedWeight
from .bytes import ByteWeight, Macko8Weight
from .canonical import MackoWeight
from .registry import SAVED, format_named


def described(kind: type[PackedWeight], sizes: Mapping[str, int]) -> dict[str, Any]:
    """What a file says of a packed weight: saved_as reads it."""
    about: dict[str, Any] = {"format": kind.format, **sizes}
    if kind is Macko8Weight:
        about["values"] = codes.KINDS[about.pop("kind")]
    return about


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
    if kind.is_layout or kind.saved_dense or issubclass(kind, ByteWeight):
        held = "macko8" if issubclass(kind, ByteWeight) else "the canonical format"
        held = "the dense weight" if kind.saved_dense else held
        raise ValueError(f"{kind.format} is an execution layout, never saved: files hold {held}")
    sizes = {name: size for name, size in about.items() if name != "format"}
    if kind is Macko8Weight and "values" in sizes:
        if sizes["values"] not in codes.KINDS:
            raise ValueError(f"values is {sizes['values']!r}, expected one of {', '.join(codes.KINDS)}")
        sizes["kind"] = codes.KINDS.index(sizes.pop("values"))
    if bad := {name: size for name, size in sizes.items() if type(size) is not int or size not in SIZES}:
        raise ValueError(f"expected integers, whole numbers from 0 to {SIZES[-1]}, got {bad}")
    # What has a default may be left out.
    if other := sorted(set(sizes) ^ {name for name in kind.size_names if name in sizes or not hasattr(kind, name)}):
        raise ValueError(f"{' and '.join(other)}: the format {kind.format} has the sizes {', '.join(kind.size_names)}")
    for reason in filter(None, itertools.starmap(kind.bad_size, sizes.items())):
        raise ValueError(reason)
    return kind, sizes, list(kind.tensor_names)


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
