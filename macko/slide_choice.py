"""Which kernel of the slide format: the pattern's, or the dense one on the same weight, by measured times.

`slide_times.json` holds them by GPU: dense time over the pattern's, the geometric mean over the layers of a model, for
each type, pattern and number of tokens. `python -m benchmarks.slide --table` makes it.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import ClassVar

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


@dataclasses.dataclass(frozen=True)
class SlidePacking:
    """What `sparsify_(format="slide")` packs with; stands where a format's class would.

    Attributes:
        pattern: "2:4" to "14:16", or "auto" for the sparsest that a weight fits.
        dtype: "int8", "fp8", or None for the weight's.
        tokens: of a usual call, for which the kernel is chosen.

    Raises:
        ValueError: there is no such pattern or dtype.
    """

    pattern: str
    dtype: str | None
    tokens: int

    format: ClassVar[str] = SlideWeight.format
    device_types: ClassVar[tuple[str, ...]] = SlideWeight.device_types

    def __post_init__(self) -> None:
        if self.pattern != "auto" and self.pattern not in SLIDE_PATTERNS:
            raise ValueError(f"pattern is {self.pattern!r}, expected one of auto, {', '.join(SLIDE_PATTERNS)}")
        if self.dtype is not None and self.dtype not in SLIDE_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(SLIDE_DTYPES)} or None")

    def element(self, w: Tensor) -> torch.dtype | None:
        """The type that values of w are packed as, or None where this device has no kernel for it."""
        wanted = SLIDE_DTYPES[self.dtype] if self.dtype else w.dtype
        return wanted if SlideWeight.runs(w.device, wanted) else None

    def from_dense(self, w: Tensor) -> SlideWeight:
        """Packs w [rows, cols]; ValueError where it does not fit the pattern, whichever kernel is the faster one."""
        element = SLIDE_ELEMENTS.index(SLIDE_DTYPES[self.dtype]) if self.dtype else -1
        n = sparsest_pattern(w) if self.pattern == "auto" else SLIDE_PATTERNS[self.pattern]
        packed = SlideWeight.from_dense(w, n, element)
        layout = slide_layout(w, n, SLIDE_ELEMENTS[packed.element], self.tokens)
        return packed if layout == n else SlideWeight.from_dense(w, layout, element)
