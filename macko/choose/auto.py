"""Which format and which layout a weight is packed in where its Options leave that open, by measured times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from .. import _library
from ..weights import (
    FORMATS,
    BitmapWeight,
    ByteWeight,
    Dense8Weight,
    Dense12Weight,
    EcWeight,
    MackoWeight,
    PackedWeight,
    Sparse8Weight,
    Sparse11Weight,
    TileWeight,
    codes,
)
from ..weights.registry import is_choosable
from . import counted, exponents
from .options import AUTO, Options
from .slide import pack_slide, slides
from .times import times_of

_Kind = TypeVar("_Kind", bound=PackedWeight)

#: Where no table knows it: from this density up a CPU multiplies from a bitmap, below it from the canonical deltas.
BITMAP_DENSITY = {"avx512": 0.15, "avx2": 0.45, "scalar": 0.5}
#: A report says where a layer is slower than dense by more than times vary.
WORTH_SAYING = 0.95
#: Weights of a layer from which on it gains as dense12: below, a product's fixed costs outweigh the bytes.
DENSE12_WEIGHTS = 1024 * 1024
#: Bytes of dense12 over those of dense, but for lists: what a sparse layer has to be below to be held as sparse.
DENSE12_SHARE = 0.75
#: Where auto takes sparse11 in place of tile: from this density up, where they are level and it begins to be smaller
#: (H100, three shapes, 1, 8 and 32 tokens: 0.99 to 1.03 times as fast there, 1.06 to 1.12 at 0.3), and up to this share
#: of values in lists (H200, three shapes, one token: 5 % faster than tile with 0.16 %, 1 % slower with 0.3 %); and
#: where tile's measured time over its is no less than this, as times vary by two per cent and it is smaller.
SPARSE11_DENSITY, SPARSE11_LISTED, SPARSE11_GAIN = 0.2, 0.002, 0.98
#: A layout is taken up to so many times the canonical bytes, or of the dense ones: it fills up matrices of few rows or
#: columns to whole blocks. (On an H200 sell holds 2048 x 2048 at density 0.5 in more than 1.05 times, and is worth it.)
#: Of fewer rows than the 64 of a tile only the first counts: most of a block may be filling.
LAYOUT_BYTES, LAYOUT_SHARE, FEW_ROWS = 1.05, 0.75, 64


def pack(w: Tensor | MackoWeight, options: Options) -> PackedWeight:
    """The weight, dense [rows, cols] or canonical, in the format of the options or the one chosen by them, where it is.

    A canonical weight that is laid out anew keeps its width of deltas; a dense one gets the width that makes its file
    smallest, but in a format by name.

    Raises:
        ValueError: the format does not hold every weight, and not this one.
    """
    kind = FORMATS.get(options.format)
    if options.in_bytes:
        return _in_bytes(w if isinstance(w, Tensor) else w.to_dense(), options)
    if kind is not None and not options.may_slide:
        return kind.from_dense(w) if isinstance(w, Tensor) else kind.from_macko(w)
    if options.format == "auto":
        return _fastest(MackoWeight.smallest(w) if isinstance(w, Tensor) else w, options)
    dense = w if isinstance(w, Tensor) else w.to_dense()
    if options.format == "smallest":
        return _smallest(dense)
    if kind is not None:
        return pack_slide(dense, options)
    if slides(dense, options) and (packed := pack_slide(dense, options)).nbytes < dense.nbytes:
        return packed  # else its tiles fill up a small weight
    return pack(w, options.again or AUTO)


def repacked(packed: PackedWeight, options: Options) -> PackedWeight:
    """A packed weight in the format of the options, or the one chosen by them; itself where it is, or stays, so.

    Codes of 8 bits are never rounded again, but where they are to be packed for another pattern.
    """
    is_so = packed.format == options.format and options.pattern in ("auto", packed.pattern)
    if packed.keeps_format if options.again else is_so:
        return packed
    converted = packed.converted(FORMATS[options.format]) if options.format in FORMATS else None
    return pack(packed.to_pack(), options) if converted is None else converted


def _fastest(weight: MackoWeight, options: Options) -> PackedWeight:
    """The weight in the format chosen for it; itself where that one would be mostly padding."""
    tokens = options.layout_tokens
    kind = choose(weight, tokens)
    packed, is_tile = kind.from_macko(weight), kind is TileWeight
    if is_tile and (shorter := _sparse11(weight, options)) and not too_many_listed(shorter):
        packed = shorter
    dense = weight.rows * weight.cols * weight.dtype.itemsize
    # Several tokens are worth tile's masks at any density.
    many = tokens != 1 and (is_tile or tokens is not None)
    share = 0 if weight.rows < FEW_ROWS else 1 if many else LAYOUT_SHARE
    return packed if packed.nbytes <= max(LAYOUT_BYTES * weight.nbytes, share * dense) else weight


def _in_bytes(w: Tensor, options: Options) -> ByteWeight:
    """w in 8 bits a value, of the kind that is asked for: in the format of that name, or the smaller one."""
    number = codes.KINDS.index(options.values)
    if options.format in FORMATS:
        return FORMATS[options.format].from_dense(w, number)  # type: ignore[return-value]
    rows, cols = w.shape
    dense_bytes = -(-rows // 64) * -(-cols // 256) * 64 * 256 + 4 * rows
    if int(w.count_nonzero()) > dense_bytes:
        return Dense8Weight.from_dense(w, number)
    packed = Sparse8Weight.from_dense(w, number)
    if packed.nbytes <= dense_bytes:
        return packed
    return Dense8Weight.from_codes(packed.codes(), packed.scales, w.dtype)


def sparse11_of(weight: MackoWeight) -> Sparse11Weight | None:
    """The weight in sparse11 where that may be faster than tile, if lists are short (too_many_listed)."""
    if weight.dtype not in Sparse11Weight.dtypes or weight.density < SPARSE11_DENSITY:
        return None
    if weight.dtype == torch.float16:  # most of it was never bfloat16
        some = weight.values[: 1 << 16].view(torch.int16) & 7
        if int(some.count_nonzero()) > SPARSE11_LISTED * some.numel():
            return None
    return _held(Sparse11Weight, weight)


def _sparse11(weight: MackoWeight, options: Options) -> Sparse11Weight | None:
    """The weight in sparse11, if that is what auto may take in place of tile."""
    if options.values != "exact" or not gains_by_slabs(weight.device):
        return None
    gain = sparse11_gain((weight.rows, weight.cols), weight.device, options.layout_tokens or 1)
    return sparse11_of(weight) if (gain or 1) >= SPARSE11_GAIN else None


def us_of(packed: PackedWeight, us: Mapping[str, float], options: Options) -> float | None:
    """The time of a packed weight, given those by format (expected_us); sparse11's by its gain over tile.

    That was measured at density 0.5; at SPARSE11_DENSITY there is none.
    """
    time = us.get(packed.timed_as)
    if time is None or not isinstance(packed, Sparse11Weight):
        return time
    gain = sparse11_gain(packed.shape, packed.device, options.layout_tokens or 1) or 1
    share = (min(packed.density, 0.5) - SPARSE11_DENSITY) / (0.5 - SPARSE11_DENSITY)
    return time / (1 + (gain - 1) * max(0.0, share))


def sparse11_gain(shape: Sequence[int], device: torch.device, tokens: int) -> float | None:
    """Time of tile over that of sparse11 on this GPU; None where nobody measured."""
    return times_of(device).codec_gain(Sparse11Weight.format, shape, tokens)


def too_many_listed(packed: Sparse11Weight) -> bool:
    """Whether tile is the faster one."""
    return packed.listed > SPARSE11_LISTED * packed.entries


def sparse11_note(packed: PackedWeight, options: Options) -> str:
    """What a report says of how auto holds values, if anything."""
    if options.values != "exact" or not isinstance(packed, TileWeight) or packed.density < SPARSE11_DENSITY:
        return ""
    tokens = options.layout_tokens or 1
    if (gain := sparse11_gain(packed.shape, packed.device, tokens) or 1) < SPARSE11_GAIN:
        return f"values stay at 16 bits: sparse11 takes {1 / gain:.2f} of tile's time at {tokens} tokens"
    listed, entries = exponents.outside_table(packed.to_macko().values, signed=True)
    if listed <= SPARSE11_LISTED * entries:
        return ""
    return f"values stay at 16 bits: sparse11 would list {listed / entries:.1%} of them"


def _smallest(w: Tensor) -> PackedWeight:
    """w in the format of fewest bytes, at whatever speed. Where they tie, the canonical one.

    A layout's file is that of its canonical weight.
    """
    macko = MackoWeight.smallest(w)
    others = [packed for kind in layouts(macko) if (packed := _held(kind, macko)) is not None]
    return min((macko, *others, EcWeight.smallest(w)), key=lambda packed: packed.nbytes)


def _held(kind: type[_Kind], weight: MackoWeight) -> _Kind | None:
    """The weight in this format, where that holds every value of it."""
    try:
        return kind.from_macko(weight)
    except ValueError:
        return None


def expected_us(
    rows: int, cols: int, density: float, dtype: torch.dtype, device: torch.device, tokens: int | None = None
) -> dict[str, float]:
    """Microseconds of a layer by format, "dense" among them (choose.times): of the formats that hold it on that device.

    By default of one token. Where nobody timed slabs on a GPU, and its kernel for them is not the one of the tables,
    tile's time is counted; where it has none, several tokens of sell and the canonical format.

    Empty where nothing is known: of a type that the device has no kernels for, and on a CPU of a layer smaller than
    those that were measured.
    """
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and dtype.itemsize != 2):
        return {}
    tokens, table = tokens or 1, times_of(device)
    us = table.us(rows, cols, density, dtype, tokens)
    us = {name: time for name, time in us.items() if name not in FORMATS or FORMATS[name].runs(device, dtype, cols)}
    kernels = _library.slab_kernels(device)[0] if device.type == "cuda" else "wgmma"
    if kernels == "wgmma" or table.at(tokens).measured or (kernels == "none" and tokens == 1):
        return us
    one = table.us(rows, cols, density, dtype).get("dense")
    if "dense" not in us and one:
        us["dense"] = one / counted.clocks("dense", density, 1, device)
        us["dense"] *= counted.clocks("dense", density, tokens, device)
    if "dense" not in us:
        return us
    if kernels == "mma.sync":
        return us | counted.us(us["dense"], density, tokens, device)
    others = counted.us_without_slabs(one or us["dense"], us["dense"], density, tokens)
    return us | {name: time for name, time in others.items() if FORMATS[name].runs(device, dtype, cols)}


def worst_of(
    rows: int, cols: int, density: float, dtype: torch.dtype, device: torch.device, format: str
) -> tuple[int, float] | None:
    """The number of tokens at which a layer in this format is slowest beside the dense one, and dense time over its.

    None where nothing is known, or nothing is lost: under WORTH_SAYING.
    """
    counts = times_of(device).counts if device.type == "cpu" else ()
    every = {tokens: expected_us(rows, cols, density, dtype, device, tokens) for tokens in counts}
    found = {tokens: us["dense"] / us[format] for tokens, us in every.items() if format in us}
    worst = min(found.items(), key=lambda item: item[1], default=None)
    return worst if worst and worst[1] < WORTH_SAYING else None


def counted_note(device: torch.device, times: Iterable[float | None]) -> list[str]:
    """What a report says of the times in it, if they are counted."""
    if device.type != "cuda" or times_of(device).measured or not any(times):
        return []
    if (kernels := _library.slab_kernels(device)[0]) == "wgmma":
        return []
    which = "no kernels for slabs" if kernels == "none" else "mma.sync kernels"
    name = torch.cuda.get_device_name(device)
    return [f"Nobody has measured {name} ({which}): times are counted. `macko tune --share` measures them."]


def choosable(us: Mapping[str, float]) -> dict[str, float]:
    """Of times by format those of the formats that may be chosen: of none that is opt-in, nor of the dense layer."""
    return {name: us[name] for name in us if is_choosable(name)}


def choose(weight: MackoWeight, tokens: int | None = None) -> type[PackedWeight]:
    """The format in which this weight takes the least time on its device, for so many tokens at a time: by times.

    The user's own count first, then those that are shipped, then what is counted (expected_us). On a GPU, for any
    number of tokens, it is tile, whose time hardly grows with them (docs/performance.md), unless that is slower than
    dense for one; for several also where nothing is known.
    """
    us = expected_us(weight.rows, weight.cols, weight.density, weight.dtype, weight.device, tokens)
    if weight.device.type == "cuda" and tokens != 1:
        if not us and _library.slab_kernels(weight.device)[0] != "none":
            return TileWeight
        if tokens is None and us.get(TileWeight.format, math.inf) < us.get("dense", math.inf):
            return TileWeight
    if us := choosable(us):
        return FORMATS[min(us, key=lambda name: us[name] * FORMATS[name].handicap)]
    if weight.device.type == "cpu" and weight.density >= BITMAP_DENSITY[_library.cpu_path]:
        return BitmapWeight
    return MackoWeight


def not_dense12(weight: Tensor, device: torch.device | None, tokens: int | None = None) -> str:
    """Why a dense weight would not gain on this device as dense12, for so many tokens at once, or nothing.

    Args:
        device: None for a GPU that the weight is yet to move to.
    """
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda")
    if weight.dtype not in Dense12Weight.dtypes:
        return f"dense12 is for bfloat16 and float16, it is {str(weight.dtype).removeprefix('torch.')}"
    if device is not None and device.type != "cuda":
        return f"dense12 is for GPUs of compute capability 8.0 and newer, it is on {device}"
    if device is not None and (reason := slower_by_count(device, Dense12Weight.format, tokens)):
        return reason
    if weight.numel() < DENSE12_WEIGHTS:
        return f"under {DENSE12_WEIGHTS} weights dense12 would not pay"
    return ""


def is_held_packed(weight: PackedWeight, device: torch.device) -> bool:
    """Whether a layer whose weight a file holds so is held packed on this device, and not dense."""
    return weight.is_held_packed(device.type == "cuda" and gains_by_slabs(device))


def held_on(
    weight: PackedWeight, device: torch.device, dtype: torch.dtype | None = None, packs: bool = False
) -> PackedWeight | Tensor:
    """A weight of a file that stands for a dense one as a device holds it: packed where that gains, or dense.

    Args:
        weight: validated; on the device where that multiplies from slabs.
        dtype: of the model; default: of the weight.
        packs: it is packed anywhere.

    Raises:
        ValueError: `packs`, and dense12 does not hold it.
    """
    dtype = dtype or weight.dtype
    if dtype != weight.dtype and dtype in weight.dtypes:
        weight = weight.to(dtype=dtype)
    if dtype == weight.dtype and (packs or is_held_packed(weight, device)):
        return weight.materialized(device)
    return weight.to_dense().to(device, dtype)


def layouts(weight: MackoWeight) -> list[type[PackedWeight]]:
    """The execution layouts that hold this weight on its device."""
    kinds = (kind for kind in FORMATS.values() if kind.is_layout)
    return [kind for kind in kinds if kind.runs(weight.device, weight.dtype, weight.cols)]


def gains_by_slabs(device: torch.device, format: str = TileWeight.format, tokens: int | None = None) -> bool:
    """Whether a GPU multiplies from slabs faster than the library the dense matrix, half of it zeros where it is tile.

    With wgmma as measured, elsewhere by count (choose.counted).
    """
    kernels, _ = _library.slab_kernels(device)
    return kernels == "wgmma" or (kernels != "none" and counted.gain(format, 0.5, tokens or 1, device) >= 1)


def slower_by_count(device: torch.device, format: str = TileWeight.format, tokens: int | None = None) -> str:
    """Why weights in slabs would not gain on a GPU, or nothing."""
    if device.type != "cuda" or gains_by_slabs(device, format, tokens):
        return ""
    if _library.slab_kernels(device)[0] == "none":
        gpu = torch.cuda.get_device_name(device)
        return f"{format} is for GPUs of compute capability 8.0 and newer, it is on {gpu}"
    many = f"{tokens} tokens" if tokens else "a token"
    return f"{format} is slower than dense on {torch.cuda.get_device_name(device)} by count, {many} at once"


def multiplies_codes(device: torch.device, tokens: int) -> bool:
    """Whether a product of so many tokens is one with codes, not with rows that were rounded before it."""
    return tokens <= _library.slab_kernels(device)[1]
