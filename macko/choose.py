"""format="auto" and "smallest": which format a weight is held in, by time or by bytes."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from . import _library
from .formats import BitmapWeight, EcWeight, MackoWeight, PackedWeight, SellWeight, TileWeight, format_named

#: From this density up a CPU multiplies from a bitmap, below it from the canonical deltas; by vector path, docs/cpu.md.
BITMAP_DENSITY = {"avx512": 0.15, "avx2": 0.45, "scalar": 0.5}
#: Shared memory that the sell kernel wants besides x, in bytes: its ring of stages, partial sums, zeros behind x.
SELL_SHARED_BYTES = 64 * 1024


def choose(weight: MackoWeight, batch: bool = False) -> type[PackedWeight]:
    """The format in which this weight takes the least time on its device, for one token or for a batch of them.

    For one token on a GPU that is sell, at every density measured (docs/performance.md), wherever its kernel runs; ec
    was slower in every measurement (docs/ec.md), so it is never taken. For a batch it is tile.
    """
    if batch and weight.device.type == "cuda":
        return TileWeight
    if SellWeight in layouts(weight):
        return SellWeight
    if weight.device.type == "cpu" and weight.density >= BITMAP_DENSITY[_library.cpu_path]:
        return BitmapWeight
    return MackoWeight


def layouts(weight: MackoWeight) -> list[type[PackedWeight]]:
    """The execution layouts that hold this weight on its device.

    sell's kernel has to have room for x in shared memory, and its base columns have 16 bits.
    """
    if weight.device.type == "cpu":
        return [BitmapWeight]
    if weight.device.type == "cuda" and weight.cols < 2**16:
        shared = torch.cuda.get_device_properties(weight.device).shared_memory_per_block_optin  # type: ignore[attr-defined]
        if 2 * weight.cols + SELL_SHARED_BYTES <= shared:
            return [SellWeight]
    return []


class Auto:
    """Stands where a format's class would: what it makes is of the format chosen for the weight that it is given."""

    format: ClassVar[str] = "auto"
    batch: ClassVar[bool] = False
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    @classmethod
    def from_dense(cls, w: Tensor) -> PackedWeight:
        """Packs w [rows, cols] on its device, with the width of deltas that makes its file smallest."""
        return cls.from_macko(MackoWeight.smallest(w))

    @classmethod
    def from_macko(cls, weight: MackoWeight) -> PackedWeight:
        """The canonical weight in the format chosen for it."""
        kind = choose(weight, cls.batch)
        return weight if kind is MackoWeight else kind.from_macko(weight)


class AutoBatch(Auto):
    """The same for weights that are multiplied by several tokens at a time."""

    batch: ClassVar[bool] = True


class Smallest(Auto):
    """The same for format="smallest": whatever takes the fewest bytes where the weight is, at whatever speed."""

    format: ClassVar[str] = "smallest"

    @classmethod
    def from_dense(cls, w: Tensor) -> PackedWeight:
        """Packs w [rows, cols] on its device in every format that keeps any mask, and takes the one of fewest bytes.

        Where they tie, the canonical format. A layout's file is that of its canonical weight.
        """
        macko = MackoWeight.smallest(w)
        others = [kind.from_macko(macko) for kind in layouts(macko)]
        return min((macko, *others, EcWeight.smallest(w)), key=lambda packed: packed.nbytes)

    @classmethod
    def from_macko(cls, weight: MackoWeight) -> PackedWeight:
        """The canonical weight in the format of fewest bytes."""
        return cls.from_dense(weight.to_dense())


def format_class(name: str) -> type[PackedWeight] | type[Auto]:
    """The dataclass of a format, Auto, or Smallest. ValueError where there is no such format."""
    choices = {choice.format: choice for choice in (Auto, Smallest)}
    return choices[name] if name in choices else format_named(name, *choices)
