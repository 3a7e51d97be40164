"""slide: the pattern's kernel, or the dense one on the same weight, by measured times."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from ..weights.formats import SLIDE_ELEMENTS, SLIDE_PATTERNS, PackedWeight, SlideWeight, sparsest_pattern
from .options import Options
from .patterns import meant_pattern
from .times import SLIDE_DTYPES, times

#: The range of all numbers of tokens.
EVERYWHERE = (0, 2**31 - 1)


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


def pack_slide(w: Tensor, options: Options) -> SlideWeight:
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
