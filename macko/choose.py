"""format="auto": which format a weight is held in, by where it is, its shape and its density."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from . import _library
from .formats import BitmapWeight, MackoWeight, PackedWeight, SellWeight, TileWeight, format_named

#: From this density up a CPU multiplies from a bitmap, below it from the canonical deltas; by vector path, docs/cpu.md.
BITMAP_DENSITY = {"avx512": 0.15, "avx2": 0.45, "scalar": 0.5}
#: Shared memory that the sell kernel wants besides x, in bytes: its ring of stages, partial sums, zeros behind x.
SELL_SHARED_BYTES = 64 * 1024


def choose(weight: MackoWeight, batch: bool = False) -> type[PackedWeight]:
    """The format in which this weight takes the least time on its device, for one token or for a batch of them.

    For one token on a GPU that is sell, at every density measured (docs/performance.md), where its kernel has room for
    x in shared memory and its 16-bit base columns reach. For a batch it is tile.
    """
    if weight.device.type == "cuda":
        if batch:
            return TileWeight
        shared = torch.cuda.get_device_properties(weight.device).shared_memory_per_block_optin  # type: ignore[attr-defined]
        if weight.cols < 2**16 and 2 * weight.cols + SELL_SHARED_BYTES <= shared:
            return SellWeight
    if weight.device.type == "cpu" and weight.density >= BITMAP_DENSITY[_library.cpu_path]:
        return BitmapWeight
    return MackoWeight


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


def format_class(name: str) -> type[PackedWeight] | type[Auto]:
    """The dataclass of a format, or Auto. ValueError where there is no such format."""
    return Auto if name == Auto.format else format_named(name, Auto.format)
