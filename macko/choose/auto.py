"""How a weight is packed: Options say it, pack() does it, and chooses the layout where they leave that open."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from .. import _library
from ..weights import (
    FORMATS,
    SLIDE_ELEMENTS,
    SLIDE_PATTERNS,
    BitmapWeight,
    ByteWeight,
    Dense8Weight,
    Dense12Weight,
    EcWeight,
    MackoWeight,
    PackedWeight,
    SlideWeight,
    Sparse8Weight,
    Sparse11Weight,
    TileWeight,
    codes,
    format_named,
    sparsest_pattern,
    takes_any_weight,
)
from .times import SLIDE_DTYPES, times, times_of

_Kind = TypeVar("_Kind", bound=PackedWeight)

#: Formats that leave the layout of each weight to be chosen.
CHOICES = ("auto", "smallest", "mixed")
#: How "auto" may hold values: in fewer bits, every one of them exactly; as they are; or rounded to 8 bits.
VALUES = ("exact", "raw", *codes.KINDS)
#: Tokens that slide's kernels are chosen for where nobody says how many there will be: a prompt's.
SLIDE_TOKENS = 2048
#: The range of all numbers of tokens.
EVERYWHERE = (0, 2**31 - 1)
#: Where no table knows it: from this density up a CPU multiplies from a bitmap, below it from the canonical deltas.
BITMAP_DENSITY = {"avx512": 0.15, "avx2": 0.45, "scalar": 0.5}
#: A weight is taken to be pruned to a pattern if it has this share of the non-zeros that the pattern allows.
PATTERN_FILLED = 0.9
#: Elements whose bits are counted at a time: of each torch makes some 20 bytes meanwhile.
COUNTED = 1 << 19
#: A report says where a layer is slower than dense by more than times vary.
WORTH_SAYING = 0.95
#: Weights of a layer from which on it gains as dense12: below, a product's fixed costs outweigh the bytes.
DENSE12_WEIGHTS = 1024 * 1024
#: Bytes of dense12 over those of dense, but for lists: what a sparse layer has to be below to be held as sparse.
DENSE12_SHARE = 0.75
#: Where auto takes sparse11 in place of tile: from this density up, as below tile decodes faster, and up to this share
#: of values in lists (H200, three shapes, one token: 5 % faster than tile with 0.16 %, 1 % slower with 0.3 %); and
#: where tile's measured time over its is no less than this, as times vary by two per cent and it is smaller.
SPARSE11_DENSITY, SPARSE11_LISTED, SPARSE11_GAIN = 0.4, 0.002, 0.98
#: A layout is taken up to so many times the canonical bytes, or of the dense ones: it fills up matrices of few rows or
#: columns to whole blocks. (On an H200 sell holds 2048 x 2048 at density 0.5 in more than 1.05 times, and is worth it.)
#: Of fewer rows than the 64 of a tile only the first counts: most of a block may be filling.
LAYOUT_BYTES, LAYOUT_SHARE, FEW_ROWS = 1.05, 0.75, 64


@dataclasses.dataclass(frozen=True)
class Options:
    """How weights are packed: the arguments of sparsify_ of these names.

    Attributes:
        format: a name in FORMATS or CHOICES.
        tokens: given to a layer at a time, if the caller knows. "auto" chooses by it, and a report's times are of so
            many, or of one. On a GPU of compute capability 9.0 the choice is tile, whose time hardly grows with them,
            unless the caller says 1: then it is what is fastest for one, sell in most cases, with which a prompt takes
            longer. On other GPUs it is tile from 2 on. By it "slide" and "mixed" take a pattern's kernel or the dense
            one; default: 2048.
        pattern: of formats "slide" and "mixed", as dtype and keep_dense: "2:4" to "14:16", or "auto" for the sparsest
            that a weight fits. With "slide" a layer that does not fit stays dense.
        dtype: "int8", "fp8", or None for the weight's.
        values: of "auto": "exact" may hold values in fewer bits, each of them exactly (sparse11, in place of tile where
            that is no slower at these tokens, or nobody measured); "raw" holds them as they are; "fp8" and "int8" round
            them to 8 bits with a scale a row: sparse8, or dense8 where that is smaller. Of formats "dense8" and
            "sparse8": "fp8", which is their default, or "int8".
        keep_dense: a layer holds one weight, for the kernel that was picked; with this the dense one too where the
            pattern's kernel is faster for a range of tokens only: the report says which range.

    Raises:
        ValueError: there is no such format, pattern, dtype or values, tokens is no number from 1, or the format has no
            pattern, or says itself how it holds values.
    """

    format: str = "auto"
    tokens: int | None = None
    pattern: str = "auto"
    dtype: str | None = None
    keep_dense: bool = False
    values: str = "exact"

    def __post_init__(self) -> None:
        if self.format not in CHOICES:
            format_named(self.format, *CHOICES)
        if not self.may_slide and (self.pattern, self.dtype, self.keep_dense) != ("auto", None, False):
            only = 'pattern, dtype and keep_dense are of formats "slide" and "mixed"'
            raise ValueError(f"{only}, the format is {self.format!r}")
        if self.pattern != "auto" and self.pattern not in SLIDE_PATTERNS:
            raise ValueError(f"pattern is {self.pattern!r}, expected one of auto, {', '.join(SLIDE_PATTERNS)}")
        if self.dtype is not None and self.dtype not in SLIDE_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(SLIDE_DTYPES)} or None")
        if self.values not in VALUES:
            raise ValueError(f"values is {self.values!r}, expected one of {', '.join(VALUES)}")
        of_bytes = self.in_bytes and self.format in (Dense8Weight.format, Sparse8Weight.format)
        if self.values != "exact" and self.format not in ("auto", "mixed") and not of_bytes:
            raise ValueError(f'values is of formats "auto" and "mixed", the format is {self.format!r}')
        if self.in_bytes and self.format == "mixed":
            raise ValueError(f'values={self.values!r} is of format "auto"; slide\'s 8 bits are dtype={self.values!r}')
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise ValueError(f"tokens is {self.tokens!r}, expected a number from 1")

    @property
    def may_slide(self) -> bool:
        """Whether weights of a pattern are packed for its kernel, which is chosen for `slide_tokens`."""
        return self.format in (SlideWeight.format, "mixed")

    @property
    def any_zeros(self) -> bool:
        """Whether the format is for weights with zeros or none; others gain by zeros."""
        return takes_any_weight(self.format)

    @property
    def in_bytes(self) -> bool:
        """Whether values are rounded to 8 bits, by who asks for that."""
        return self.values in codes.KINDS

    @property
    def slide_tokens(self) -> int:
        return self.tokens or SLIDE_TOKENS

    @property
    def layout_tokens(self) -> int | None:
        """Tokens that layouts of any mask are chosen for, if known; `tokens` may be said of slide's kernels."""
        return None if self.may_slide else self.tokens

    def not_on(self, device: torch.device) -> str:
        """Why the format does not run on a device; nothing where it does, or one is chosen that does."""
        types = FORMATS[self.format].device_types if self.format in FORMATS else PackedWeight.device_types
        return "" if device.type in types else f"{self.format} runs on {' and '.join(types)} only"

    @property
    def again(self) -> Options | None:
        """What chooses again where a weight that was packed so moves to another kind of device, if anything."""
        return Options(tokens=self.layout_tokens, values=self.values) if self.format in ("auto", "mixed") else None


#: What is chosen by where nobody says anything.
AUTO = Options()


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
        return _slide(dense, options)
    if slides(dense, options) and (packed := _slide(dense, options)).nbytes < dense.nbytes:
        return packed  # else its tiles fill up a small weight
    return pack(w, options.again or AUTO)


def repacked(packed: PackedWeight, options: Options) -> PackedWeight:
    """A packed weight in the format of the options, or the one chosen by them; itself where it is, or stays, so.

    Codes of 8 bits are never rounded again.
    """
    if packed.keeps_format if options.again else packed.format == options.format:
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
    if options.values != "exact" or not _runs_wgmma(weight.device):
        return None
    gain = sparse11_gain((weight.rows, weight.cols), weight.device, options.layout_tokens or 1)
    return sparse11_of(weight) if (gain or 1) >= SPARSE11_GAIN else None


def us_of(packed: PackedWeight, us: Mapping[str, float], options: Options) -> float | None:
    """The time of a packed weight, given those by format (expected_us); sparse11's by its gain over tile."""
    time = us.get(packed.timed_as)
    if time is None or not isinstance(packed, Sparse11Weight):
        return time
    return time / (sparse11_gain(packed.shape, packed.device, options.layout_tokens or 1) or 1)


def sparse11_gain(shape: Sequence[int], device: torch.device, tokens: int) -> float | None:
    """Time of tile over that of sparse11 on this GPU; None where nobody measured."""
    return times_of(device).sparse11_gain(shape, tokens)


def bit_counts(weight: Tensor) -> Tensor:
    """[65536]: how many elements of 16 bits have each pattern of bits. Those of a matrix' parts add up."""
    counts = torch.zeros(1 << 16, dtype=torch.int64, device=weight.device)
    for bits in weight.detach().contiguous().view(torch.int16).flatten().split(COUNTED):
        counts += (bits.int() & 0xFFFF).bincount(minlength=1 << 16)
    return counts


def have_codes(counts: Tensor, dtype: torch.dtype, signed: bool) -> Tensor:
    """[65536], bool: which patterns of bits have a code in the table of the matrix that counts (bit_counts) are of.

    Args:
        dtype: bfloat16, or float16, of which only what was bfloat16 has a code.
        signed: as sparse11, a table of seven signs and upper exponent bits; zeros have no code. Else as dense12: of
            seven upper exponent bits beside those of zeros.
    """
    bits = torch.arange(1 << 16, device=counts.device)
    coded = bits & 7 == 0 if dtype == torch.float16 else torch.ones_like(bits, dtype=torch.bool)
    high = bits >> 11 if dtype == torch.float16 else bits >> 8
    if signed:
        coded &= bits & 0x7FFF != 0
    else:
        high &= 0xF if dtype == torch.float16 else 0x7F
    by_high = torch.zeros(256, dtype=torch.int64, device=counts.device).index_add_(0, high, counts * coded)
    table = by_high[1:].sort(descending=True, stable=True).indices[:7] + 1
    return coded & torch.isin(high, table if signed else torch.cat([table, table.new_zeros(1)]))


def outside_table(weight: Tensor, signed: bool) -> tuple[int, int]:
    """How many elements have no code (have_codes), and of how many: signed, of those that are not zero."""
    return lacking(bit_counts(weight), weight.dtype, signed)


def lacking(counts: Tensor, dtype: torch.dtype, signed: bool) -> tuple[int, int]:
    """outside_table of the matrix that bit_counts are of."""
    zeros = int(counts[0] + counts[0x8000])
    count = int(counts.sum()) - (zeros if signed else 0)
    return count - int(counts[have_codes(counts, dtype, signed)].sum()), count


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
    shorter = _sparse11(packed.to_macko(), options)
    if shorter is None or not too_many_listed(shorter):
        return ""
    return f"values stay at 16 bits: sparse11 would list {shorter.listed / shorter.entries:.1%} of them"


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
    """Microseconds of a layer by format, "dense" among them (macko.times): of the formats that hold it on that device.

    By default of one token.

    Empty where nothing is known: of a type that the device has no kernels for, and on a CPU of a layer smaller than
    those that were measured.
    """
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and dtype.itemsize != 2):
        return {}
    known = times_of(device).at(tokens or 1)
    us = known.us(rows, cols, density, dtype, tokens or 1)
    us = {name: time for name, time in us.items() if name not in FORMATS or FORMATS[name].runs(device, dtype, cols)}
    if device.type == "cuda" and not known.measured and not _runs_wgmma(device):
        us.pop(TileWeight.format, None)  # the lines of another GPU are of another kernel
    return us


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


def choosable(us: Mapping[str, float]) -> dict[str, float]:
    """Of times by format those of the formats that may be chosen: of none that is opt-in, nor of the dense layer."""
    return {name: us[name] for name in us if name in FORMATS and FORMATS[name].handicap < math.inf}


def choose(weight: MackoWeight, tokens: int | None = None) -> type[PackedWeight]:
    """The format in which this weight takes the least time on its device, for so many tokens at a time, if known.

    On a GPU, but for one token, that is tile, whose time hardly grows with the tokens (docs/performance.md). Where its
    kernel is another one, which was not measured, only for several.
    """
    if weight.device.type == "cuda" and tokens != 1 and (tokens or _runs_wgmma(weight.device)):
        return TileWeight
    us = expected_us(weight.rows, weight.cols, weight.density, weight.dtype, weight.device, tokens)
    if us := choosable(us):
        return FORMATS[min(us, key=lambda name: us[name] * FORMATS[name].handicap)]
    if weight.device.type == "cpu" and weight.density >= BITMAP_DENSITY[_library.cpu_path]:
        return BitmapWeight
    return MackoWeight


def not_dense12(weight: Tensor, device: torch.device) -> str:
    """Why a dense weight would not gain on this device as dense12, or nothing."""
    if weight.dtype not in Dense12Weight.dtypes:
        return f"dense12 is for bfloat16 and float16, it is {str(weight.dtype).removeprefix('torch.')}"
    if device.type != "cuda" or not _runs_wgmma(device):
        return f"dense12 gains on a GPU of compute capability 9.0 only, it is on {device}"
    if weight.numel() < DENSE12_WEIGHTS:
        return f"under {DENSE12_WEIGHTS} weights dense12 would not pay"
    return ""


def layouts(weight: MackoWeight) -> list[type[PackedWeight]]:
    """The execution layouts that hold this weight on its device."""
    kinds = (kind for kind in FORMATS.values() if kind.is_layout)
    return [kind for kind in kinds if kind.runs(weight.device, weight.dtype, weight.cols)]


def _runs_wgmma(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


# slide: the pattern's kernel, or the dense one on the same weight, by measured times.


def meant_pattern(w: Tensor) -> int:
    """n where w [rows, cols] was pruned to the pattern (2n-2):2n; 0 where it was not.

    A mask that holds a pattern by chance has far fewer non-zeros than the pattern allows: 14:16 of 70 % zeros.
    """
    n = sparsest_pattern(w)
    return n if n and int(w.count_nonzero()) >= PATTERN_FILLED * w.numel() * (2 * n - 2) / (2 * n) else 0


def slide_gain(w: Tensor, n: int, dtype: torch.dtype, tokens: int) -> float | None:
    """Dense time over that of pattern n for w's shape on its GPU; None where nobody measured."""
    return times(torch.cuda.get_device_name(w.device)).slide_gain(dtype, n, w.shape, tokens)


def slide_layout(w: Tensor, n: int, dtype: torch.dtype, tokens: int) -> int:
    """n where the pattern's kernel is the faster one for these tokens, or should be; 0, dense, elsewhere.

    Where nobody measured, a GPU of compute capability 9.0 takes the pattern. Any other has the kernel that is not tuned
    (docs/slide.md): there 2:4 is taken, which reads the fewest bytes, and of wider patterns the dense weight.
    """
    if not n or w.device.type != "cuda":
        return n
    gain = slide_gain(w, n, dtype, tokens)
    if gain is None:
        return n if n == 2 or torch.cuda.get_device_capability(w.device) == (9, 0) else 0
    return n if gain >= 1 else 0


def slide_note(w: Tensor, packed: PackedWeight, options: Options) -> str:
    """Why slide holds w as dense; empty where it does not."""
    if not isinstance(packed, SlideWeight) or packed.n:
        return ""
    n = _pattern_of(w, options)
    if not n:
        return "it fits no pattern"
    pattern, dtype = f"{2 * n - 2}:{2 * n}", SLIDE_ELEMENTS[packed.element]
    gain = slide_gain(w, n, dtype, options.slide_tokens)
    if gain is None:
        advice = "; `macko tune` measures it" if dtype in SLIDE_DTYPES.values() else ""
        gpu, name = torch.cuda.get_device_name(w.device), str(dtype).removeprefix("torch.")
        return f"nobody measured {pattern} {name} on {gpu}, whose kernel is not tuned{advice}"
    return f"{pattern} would take {1 / gain:.2f} of dense's time at {options.slide_tokens} tokens"


def sparse_range(gain: Callable[[int], float | None], tokens: int) -> tuple[int, int]:
    """The range of tokens around `tokens` in which the gain is at least 1, or the one nearest to it; (1, 0): none."""
    tried = sorted({round(2 ** (i / 4)) for i in range(4 * 15)} | {max(1, tokens)})
    pays = [gains is None or gains >= 1 for gains in map(gain, tried)]
    runs = [[i for i, _ in run] for good, run in groupby(enumerate(pays), key=lambda pair: pair[1]) if good]
    if not runs:
        return 1, 0
    here = tried.index(max(1, tokens))
    run = min(runs, key=lambda run: max(run[0] - here, here - run[-1], 0))
    first, last = tried[run[0]], tried[run[-1]]
    return (0 if first == tried[0] else first, EVERYWHERE[1] if last == tried[-1] else last)


def _pattern_of(w: Tensor, options: Options) -> int:
    return sparsest_pattern(w) if options.pattern == "auto" else SLIDE_PATTERNS[options.pattern]


def slides(w: Tensor, options: Options) -> bool:
    """Whether "mixed" packs w for the kernel of a pattern: w was pruned to it, and the kernel is there and faster."""
    element = SLIDE_DTYPES[options.dtype] if options.dtype else w.dtype
    n = meant_pattern(w) if SlideWeight.runs(w.device, element) else 0
    return n > 0 and slide_layout(w, n, element, options.slide_tokens) == n


def _slide(w: Tensor, options: Options) -> SlideWeight:
    """w packed for slide's kernels; ValueError where it does not fit the pattern, whichever of them is the faster."""
    element = SLIDE_ELEMENTS.index(SLIDE_DTYPES[options.dtype]) if options.dtype else -1
    n = _pattern_of(w, options)
    packed = SlideWeight.from_dense(w, n, element)
    dtype = SLIDE_ELEMENTS[packed.element]
    if options.keep_dense and n and w.device.type == "cuda":
        first, last = sparse_range(lambda tokens: slide_gain(w, n, dtype, tokens), options.slide_tokens)
        if last and (first, last) != EVERYWHERE:
            return SlideWeight.from_dense(w, n, element, sparse_from=first, sparse_to=last)
    layout = slide_layout(w, n, dtype, options.slide_tokens)
    return packed if layout == n else SlideWeight.from_dense(w, layout, element)
