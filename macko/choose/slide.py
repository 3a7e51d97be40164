"""slide: the pattern's kernel, or the dense one on the same weight, by measured times."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from .. import _library
from ..weights import (
    SLIDE_ELEMENTS,
    SLIDE_PATTERNS,
    PackedWeight,
    SlideWeight,
    fits_pattern,
    sparsest_pattern,
    straddling,
)
from .options import Options
from .patterns import is_filled, meant_pattern
from .times import SLIDE_DTYPES, times

#: The widest pattern, 6:8, that int8 is multiplied as by mma.sp where nobody measured, and from how many tokens on: an
#: H100 gained 1.02 and 1.08 (down, gate_up, 4,096 tokens). 8:10, a fifteenth slower by count, would lose; with 64 and
#: 256 tokens some shapes of an earlier kernel lost.
WIDEST, LEAST_TOKENS = 4, 1024


def slide_gain(w: Tensor | PackedWeight, n: int, dtype: torch.dtype, tokens: int) -> float | None:
    """Dense time over that of pattern n for w's shape on its GPU; None where nobody measured."""
    return times(torch.cuda.get_device_name(w.device)).slide_gain(dtype, n, w.shape, tokens)


def slide_layout(w: Tensor | PackedWeight, n: int, dtype: torch.dtype, tokens: int) -> int:
    """n where the pattern's kernel is the faster one for these tokens, or should be; 0, dense, elsewhere.

    Where nobody measured, a GPU of compute capability 9.0 takes the pattern. Any other takes 2:4, which reads the
    fewest bytes, and wider patterns in int8 up to WIDEST, from LEAST_TOKENS on.
    """
    if not n or w.device.type != "cuda":
        return n
    gain = slide_gain(w, n, dtype, tokens)
    if gain is not None:
        return n if gain >= 1 else 0
    taken = n == 2 or (dtype == torch.int8 and n <= WIDEST and tokens >= LEAST_TOKENS)
    return n if taken or _library.code_capability(w.device) == (9, 0) else 0


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
        at = f"at {options.slide_tokens} tokens on {gpu}"
        return f"nobody measured {pattern} {name} {at}{advice}"
    return f"{pattern} would take {1 / gain:.2f} of dense's time at {options.slide_tokens} tokens"


def _pattern_of(w: Tensor, options: Options) -> int:
    return sparsest_pattern(w) if options.pattern == "auto" else SLIDE_PATTERNS[options.pattern]


def slides(w: Tensor, options: Options) -> bool:
    """Whether "mixed" packs w for the kernel of a pattern: w was pruned to it, and the kernel is there and faster."""
    return _is_faster(w, meant_pattern(w), options)


def _is_faster(w: Tensor, n: int, options: Options) -> bool:
    element = options.slide_element or w.dtype
    has_kernel = n > 0 and SlideWeight.runs(w.device, element)
    return has_kernel and slide_layout(w, n, element, options.slide_tokens) == n


def pack_slide(w: Tensor, options: Options) -> SlideWeight:
    """w packed for slide's kernels; ValueError where it does not fit the pattern, whichever of them is the faster,
    or is to be rounded and has NaN or Inf."""
    element = SLIDE_ELEMENTS.index(options.slide_element) if options.slide_element else -1
    n = _pattern_of(w, options)
    packed = SlideWeight.from_dense(w, n, element).of_finite()
    layout = slide_layout(w, n, SLIDE_ELEMENTS[packed.element], options.slide_tokens)
    return packed if layout == n else SlideWeight.from_dense(w, layout, element)


def for_faster_kernel(packed: PackedWeight, options: Options) -> PackedWeight:
    """A weight of a pattern as that or as dense, whichever is the faster one; any other weight as it is."""
    if not packed.pattern:
        return packed
    slide = cast(SlideWeight, packed)
    return slide.as_pattern(slide_layout(slide, slide.n, SLIDE_ELEMENTS[slide.element], options.slide_tokens))


class Whole:
    """What weights of a checkpoint say of the rows or columns of them that one process holds, stacked.

    By it each process packs its part as a single one would pack all: as the same pattern, with the same codes.
    """

    def __init__(self) -> None:
        self._patterns = set(SLIDE_PATTERNS.values())
        self._nonzeros = self._weights = self._cols = 0
        self._largest: Tensor | None = None

    def add(self, w: Tensor) -> None:
        """One of the stacked weights [rows, cols], whole."""
        self._patterns = {n for n in self._patterns if fits_pattern(w, n)}
        self._nonzeros += int(w.count_nonzero())
        self._weights += w.numel()
        self._cols = w.shape[1]
        self._largest = w.abs().amax(1) if w.numel() else w.new_zeros(len(w))

    def options(self, part: Tensor, options: Options) -> Options:
        """Options that leave no choice to the part.

        Raises:
            ValueError: the weights are not of the pattern that is asked for, or a group of it would be cut.
        """
        if not options.may_slide or not self._weights:
            return options
        sparsest = min(self._patterns, default=0)
        n = sparsest if options.pattern == "auto" else SLIDE_PATTERNS[options.pattern]
        name = f"{2 * n - 2}:{2 * n}"
        if options.format == "mixed":
            is_meant = sparsest > 0 and is_filled(sparsest, self._nonzeros, self._weights)
            if not is_meant or not _is_faster(part, sparsest, options):
                return options.again or options
        if not n:
            return options
        if n not in self._patterns:
            raise ValueError(f"a group of its whole rows does not fit the pattern {name}")
        cuts = range(0, self._cols, part.shape[1] or 1)
        if group := next(filter(None, (straddling(self._cols, at, n) for at in cuts)), ""):
            if options.again:  # "mixed", which has other formats
                return options.again
            raise ValueError(f"{group} straddles two of {len(cuts)} ranks, which have {part.shape[1]} columns each")
        return replace(options, format="slide", pattern=name)

    def packed(self, packed: PackedWeight, w: Tensor) -> PackedWeight:
        """The packed part w, of slide's 8 bits with the codes that it has in the whole."""
        if self._largest is None or self._cols == packed.cols:
            return packed
        return packed.of_columns(w, self._largest.to(w.device))
