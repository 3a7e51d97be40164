"""Every format by its name and number, and the shapes that torch.compile asks for of each.

A class of PackedWeight that says its `format` is here once it is defined. Those of a module of this folder are so when
macko is imported, as the package imports each of its modules; others wherever somebody defines them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .base import PackedWeight

#: Every format that ops take, by name, in the order of their numbers.
FORMATS: dict[str, type[PackedWeight]] = {}
#: What files alone hold, by name.
SAVED: dict[str, type[PackedWeight]] = {}


#: Why experts are not packed, where values would be rounded.
ROUNDED_EXPERTS = "experts are not rounded to 8 bits yet"


def register(kind: type[PackedWeight]) -> None:
    """Makes a format known by its name. TypeError where another class has it."""
    other = FORMATS.get(kind.format) or SAVED.get(kind.format) or kind
    if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        raise TypeError(f"{kind.__qualname__}: the format {kind.format} is {other.__qualname__}")
    (SAVED if kind.of_files or kind.number < 0 else FORMATS)[kind.format] = kind
    for name in sorted(FORMATS, key=lambda name: FORMATS[name].number):
        FORMATS[name] = FORMATS.pop(name)


def format_named(name: str, *others: str) -> type[PackedWeight]:
    """The dataclass of a format; ValueError, which offers `others` too, where there is none of that name."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"format is {name!r}, expected one of {', '.join([*others, *FORMATS])}")
    return FORMATS[name]


def takes_any_weight(format: str) -> bool:
    """Whether a format, or what chooses one, is for weights with zeros or none."""
    return format in FORMATS and FORMATS[format].any_weight


def not_a_stack(format: str) -> str:
    """Why experts are not packed in a format; empty where they are, or it is no format's name."""
    if format not in FORMATS:
        return ""
    if FORMATS[format].stacks:
        return "" if FORMATS[format].lossless else ROUNDED_EXPERTS
    stacking = ", ".join(name for name, kind in FORMATS.items() if kind.stacks)
    return f"{format} holds no stack of experts: {stacking} do"


def is_choosable(name: str) -> bool:
    """Whether it is a format that may be chosen by its time: none is that is opt-in, nor the dense layer."""
    return name in FORMATS and FORMATS[name].handicap < math.inf


def is_lossless_file(format: str) -> bool:
    """Whether files hold what is packed in this format in planes, for layers that are dense elsewhere."""
    return format in FORMATS and FORMATS[format].saved_dense


def with_own_files() -> list[str]:
    """Names of the formats that are no layouts, beside the canonical one: their values or their order are their own."""
    return [name for name, kind in FORMATS.items() if name != "macko" and not kind.is_layout]


def _fake(op: str, number: int, like: Tensor, rows: Any, cols: Any, options: Any) -> tuple[list[Tensor], Tensor]:
    """What op gives of the format of this number, without content."""
    kind = next(kind for kind in (*FORMATS.values(), *SAVED.values()) if kind.number == number)
    try:
        shapes = kind.shapes(rows, cols, options)
    except NotImplementedError:
        raise NotImplementedError(
            f"macko::{op}: nobody wrote down the shapes of the layout {kind.format}, which torch.compile asks for: "
            "pack outside of the compiled function"
        ) from None
    tensors = [like.new_empty(sizes, dtype=dtype or like.dtype) for dtype, *sizes in shapes]
    return tensors, torch.empty(1 + len(kind.size_names) + kind.counts_of_pack, dtype=torch.int64)


@torch.library.register_fake("macko::pack")
def _(w: Tensor, layout: int, options: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    torch._check(w.dim() == 2, lambda: f"macko::pack: w has shape {list(w.shape)}, expected 2 dimension(s)")
    return _fake("pack", layout, w, w.shape[0], w.shape[1], options)


@torch.library.register_fake("macko::lay_out")
def _(packed: Sequence[Tensor], header: Sequence[int], layout: int, options: Any) -> tuple[list[Tensor], Tensor]:
    return _fake("lay_out", layout, packed[0], header[1], header[2], header[3:])
