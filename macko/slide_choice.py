"""Which kernel of the slide format: the pattern's, or the dense one on the same weight, by measured times.

`slide_times.json` holds them by GPU: dense time over the pattern's, the geometric mean over the layers of a model, for
each type, pattern and number of tokens. `python -m benchmarks.slide --table` makes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .formats import SLIDE_ELEMENTS, SLIDE_PATTERNS, SlideWeight, sparsest_pattern

#: Names of the types that values may be quantised to.
SLIDE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@cache
def _table() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    return json.loads((Path(__file__).parent / "slide_times.json").read_text())


def slide_gain(gpu: str, dtype: torch.dtype, n: int, tokens: int) -> float | None:
    """Dense time over that of pattern n on this GPU at the nearest number of tokens measured; None: not measured."""
    name = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(dtype, "bf16")
    measured = _table().get(gpu, {}).get(name, {}).get(f"{2 * n - 2}:{2 * n}")
    if not measured:
        return None
    return measured[min(measured, key=lambda m: abs(torch.tensor(int(m) / max(1, tokens)).log().item()))]


def slide_layout(w: Tensor, n: int, dtype: torch.dtype, tokens: int) -> int:
    """n where the pattern's kernel is the faster one for these tokens, or nobody measured; 0, dense, elsewhere."""
    if not n or w.device.type != "cuda":
        return n
    gain = slide_gain(torch.cuda.get_device_name(w.device), dtype, n, tokens)
    return n if gain is None or gain >= 1 else 0


def slide_packer(pattern: str, dtype: str | None, tokens: int) -> Callable[[Tensor], SlideWeight]:
    """What packs a weight for `sparsify_(format="slide")`.

    Raises:
        ValueError: there is no such pattern or dtype.
    """
    if pattern != "auto" and pattern not in SLIDE_PATTERNS:
        raise ValueError(f"pattern is {pattern!r}, expected one of auto, {', '.join(SLIDE_PATTERNS)}")
    if dtype is not None and dtype not in SLIDE_DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(SLIDE_DTYPES)} or None")

    def pack(w: Tensor) -> SlideWeight:
        element = SLIDE_ELEMENTS.index(SLIDE_DTYPES[dtype]) if dtype else -1
        n = sparsest_pattern(w) if pattern == "auto" else SLIDE_PATTERNS[pattern]
        packed = SlideWeight.from_dense(w, n, element)  # refuses what does not fit, whichever kernel it is for
        layout = slide_layout(w, n, SLIDE_ELEMENTS[packed.element], tokens)
        return packed if layout == n else SlideWeight.from_dense(w, layout, element)

    return pack
