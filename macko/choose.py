"""format="auto", "mixed" and "smallest": which format a weight is held in, by time or by bytes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from . import _library
from .formats import (
    FORMATS,
    BitmapWeight,
    EcWeight,
    MackoWeight,
    PackedWeight,
    SellWeight,
    TileWeight,
    format_named,
    sparsest_pattern,
)
from .slide_choice import SlidePacking, slide_layout
from .times import times_of

#: Where no table knows it: from this density up a CPU multiplies from a bitmap, below it from the canonical deltas.
BITMAP_DENSITY = {"avx512": 0.15, "avx2": 0.45, "scalar": 0.5}
#: What tokens="batch" is taken for.
BATCH = 8
#: Shared memory that the sell kernel wants besides x, in bytes: its stages, partial sums, zeros after x.
SELL_SHARED_BYTES = 64 * 1024
#: A weight is taken to be pruned to a pattern if it has this share of the non-zeros that the pattern allows.
PATTERN_FILLED = 0.9
#: Sell is taken up to so many times the least time: only its products can have norms and gates in them (macko.fuse).
#: That saves launches of a microsecond or two.
SELL_WITHIN = 1.05
#: A report says where a layer is slower than dense by more than times vary.
WORTH_SAYING = 0.95
#: A layout is taken up to so many times the canonical bytes, or of the dense ones: it fills up matrices of few rows or
#: columns to whole blocks. (On an H200 sell holds 2048 x 2048 at density 0.5 in more than 1.05 times, and is worth it.)
LAYOUT_BYTES, LAYOUT_SHARE = 1.05, 0.75


def expected_us(
    rows: int, cols: int, density: float, dtype: torch.dtype, device: torch.device, tokens: int = 1
) -> dict[str, float]:
    """Microseconds of a layer by format, "dense" among them (macko.times): of the formats that hold it on that device.

    Empty where nothing is known: of a type that the device has no kernels for, and on a CPU of a layer smaller than
    those that were measured.
    """
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and dtype.itemsize != 2):
        return {}
    us = times_of(device).us(rows, cols, density, dtype, tokens)
    if device.type == "cuda" and not _sell_runs(cols, device):
        us.pop(SellWeight.format, None)
    return {name: time for name, time in us.items() if name == "dense" or name in FORMATS}


def worst_of(
    rows: int, cols: int, density: float, dtype: torch.dtype, device: torch.device, format: str
) -> tuple[int, float] | None:
    """The number of tokens at which a layer in this format is slowest beside the dense one, and dense time over its.

    None where nothing is known, or nothing is lost: under WORTH_SAYING.
    """
    counts = times_of(device).counts if device.type == "cpu" else ()
    found = {}
    for tokens in counts:
        us = expected_us(rows, cols, density, dtype, device, tokens)
        if format in us:
            found[tokens] = us["dense"] / us[format]
    worst = min(found.items(), key=lambda item: item[1], default=None)
    return worst if worst and worst[1] < WORTH_SAYING else None


def choose(weight: MackoWeight, tokens: int = 1) -> type[PackedWeight]:
    """The format in which this weight takes the least time on its device, for so many tokens at a time.

    For several on a GPU that is tile, whose time hardly grows with the tokens (docs/performance.md).
    """
    if weight.device.type == "cuda" and tokens > 1:
        return TileWeight
    us = expected_us(weight.rows, weight.cols, weight.density, weight.dtype, weight.device, tokens)
    us.pop("dense", None)
    if SellWeight.format in us:
        us[SellWeight.format] /= SELL_WITHIN
    if us:
        return FORMATS[min(us, key=us.__getitem__)]
    if weight.device.type == "cpu" and weight.density >= BITMAP_DENSITY[_library.cpu_path]:
        return BitmapWeight
    return MackoWeight


def layouts(weight: MackoWeight) -> list[type[PackedWeight]]:
    """The execution layouts that hold this weight on its device."""
    if weight.device.type == "cpu":
        return [BitmapWeight]
    if weight.device.type == "cuda":
        return [SellWeight, TileWeight] if _sell_runs(weight.cols, weight.device) else [TileWeight]
    return []


def _sell_runs(cols: int, device: torch.device) -> bool:
    """Whether sell's kernel has room for x in shared memory, and its base columns of 16 bits reach."""
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return cols < 2**16 and 2 * cols + SELL_SHARED_BYTES <= shared


@dataclasses.dataclass(frozen=True)
class Auto:
    """Stands where a format's class would: what it makes is of the format chosen for the weight that it is given."""

    tokens: int = 1  #: that a layer is given at a time, as far as the caller knows

    format: ClassVar[str] = "auto"
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def from_dense(self, w: Tensor) -> PackedWeight:
        """Packs w [rows, cols] on its device, with the width of deltas that makes its file smallest."""
        return self.from_macko(MackoWeight.smallest(w))

    def from_macko(self, weight: MackoWeight) -> PackedWeight:
        """The canonical weight in the format chosen for it; itself where that one would be mostly padding."""
        kind = choose(weight, self.tokens)
        if kind is MackoWeight:
            return weight
        packed = kind.from_macko(weight)
        dense = weight.rows * weight.cols * weight.dtype.itemsize
        # Several tokens are worth tile's masks at any density.
        most = dense if self.tokens > 1 else max(LAYOUT_BYTES * weight.nbytes, LAYOUT_SHARE * dense)
        return packed if packed.nbytes <= most else weight


class Smallest(Auto):
    """The same for format="smallest": whatever takes the fewest bytes where the weight is, at whatever speed."""

    format: ClassVar[str] = "smallest"

    def from_dense(self, w: Tensor) -> PackedWeight:
        """Packs w [rows, cols] on its device in every format that keeps any mask, and takes the one of fewest bytes.

        Where they tie, the canonical format. A layout's file is that of its canonical weight.
        """
        macko = MackoWeight.smallest(w)
        others = [kind.from_macko(macko) for kind in layouts(macko)]
        return min((macko, *others, EcWeight.smallest(w)), key=lambda packed: packed.nbytes)

    def from_macko(self, weight: MackoWeight) -> PackedWeight:
        """The canonical weight in the format of fewest bytes."""
        return self.from_dense(weight.to_dense())


def meant_pattern(w: Tensor) -> int:
    """n where w [rows, cols] was pruned to the pattern (2n-2):2n; 0 where it was not.

    A mask that holds a pattern by chance has far fewer non-zeros than the pattern allows: 14:16 of 70 % zeros.
    """
    n = sparsest_pattern(w)
    return n if n and int(w.count_nonzero()) >= PATTERN_FILLED * w.numel() * (2 * n - 2) / (2 * n) else 0


@dataclasses.dataclass(frozen=True)
class Mixed:
    """As Auto, but a weight of an n:m pattern whose slide kernel is the faster one is packed as slide."""

    slide: SlidePacking

    format: ClassVar[str] = "mixed"
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def from_dense(self, w: Tensor) -> PackedWeight:
        """Packs w [rows, cols] on its device."""
        element = self.slide.element(w)
        n = 0 if element is None else meant_pattern(w)
        if n and element is not None and slide_layout(w, n, element, self.slide.tokens) == n:
            packed = self.slide.from_dense(w)
            if packed.nbytes < w.nbytes:  # its tiles fill up small weights
                return packed
        return Auto().from_dense(w)


def chooser(packed_as: object) -> Auto | None:
    """What chooses again when a weight that was packed as this moves, if anything."""
    if isinstance(packed_as, Mixed):
        return Auto()
    return packed_as if type(packed_as) is Auto else None


def format_class(name: str) -> type[PackedWeight] | Auto | Mixed:
    """The dataclass of a format, or what chooses one. ValueError where there is no such format."""
    choices: dict[str, Auto | Mixed] = {choice.format: choice for choice in (Auto(), Smallest())}
    choices[Mixed.format] = Mixed(SlidePacking("auto", None, 2048))
    return choices[name] if isinstance(name, str) and name in choices else format_named(name, *choices)
