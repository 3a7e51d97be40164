"""slide: the pattern's kernel, or the dense one on the same weight, by measured times."""

from __future__ import annotations

import torch
from torch import Tensor

from ..weights import SLIDE_ELEMENTS, SLIDE_PATTERNS, PackedWeight, SlideWeight, sparsest_pattern
from .options import Options
from .patterns import meant_pattern
from .times import SLIDE_DTYPES, times


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


def _pattern_of(w: Tensor, options: Options) -> int:
    return sparsest_pattern(w) if options.pattern == "auto" else SLIDE_PATTERNS[options.pattern]


def slides(w: Tensor, options: Options) -> bool:
    """Whether "mixed" packs w for the kernel of a pattern: w was pruned to it, and the kernel is there and faster."""
    element = options.slide_element or w.dtype
    n = meant_pattern(w) if SlideWeight.runs(w.device, element) else 0
    return n > 0 and slide_layout(w, n, element, options.slide_tokens) == n


def pack_slide(w: Tensor, options: Options) -> SlideWeight:
    """w packed for slide's kernels; ValueError where it does not fit the pattern, whichever of them is the faster."""
    element = SLIDE_ELEMENTS.index(options.slide_element) if options.slide_element else -1
    n = _pattern_of(w, options)
    packed = SlideWeight.from_dense(w, n, element)
    layout = slide_layout(w, n, SLIDE_ELEMENTS[packed.element], options.slide_tokens)
    return packed if layout == n else SlideWeight.from_dense(w, layout, element)
