"""Which kernel of the slide format: the pattern's, or the dense one on the same weight, by measured times.

A table holds dense time over the pattern's, by GPU, type, pattern, shape and number of tokens. One comes with the
package, `slide_times.json` (`python -m benchmarks.slide RESULTS --table`); `macko tune` measures this GPU's own.
"""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import ops
from .formats import SLIDE_ELEMENTS, SLIDE_PATTERNS, SlideWeight, sparsest_pattern
from .times import own_table
from .timing import time_graph

#: Names of the types that values may be quantised to.
SLIDE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
#: What is measured: rows and columns of linears of 7B models, and numbers of tokens.
SHAPES = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (12288, 4096), (22016, 4096), (4096, 11008))
TOKENS = (
    *(1, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768),
    *(1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384),
)

#: The range of all numbers of tokens.
EVERYWHERE = (0, 2**31 - 1)

#: type -> pattern -> "rows x cols" -> tokens -> gain, of one GPU.
Table = dict[str, dict[str, dict[str, dict[str, float]]]]


@cache
def slide_table(gpu: str) -> Table:
    """What is known of a GPU: what `macko tune` measured here (the part "slide" of its file) before what came along."""
    table = json.loads((Path(__file__).parent / "slide_times.json").read_text()).get(gpu, {})
    for name, patterns in (own_table(gpu) or {"slide": {}})["slide"].items():
        table[name] = {**table.get(name, {}), **patterns}
    return table


def name_of(dtype: torch.dtype) -> str:
    """What the table calls a type of values."""
    return next((name for name, known in SLIDE_DTYPES.items() if known == dtype), "bf16")


def slide_gain(gpu: str, dtype: torch.dtype, n: int, shape: Sequence[int], tokens: int) -> float | None:
    """Dense time over that of pattern n: at the shape measured that is nearest, between the numbers of tokens measured.

    Args:
        gpu: as torch.cuda.get_device_name gives it.
        shape: rows and columns of the weight.

    Returns:
        None where nobody measured.
    """
    measured = slide_table(gpu).get(name_of(dtype), {}).get(f"{2 * n - 2}:{2 * n}")
    if not measured:
        return None

    def distance(name: str) -> float:
        return sum(abs(math.log(int(a) / max(1, b))) for a, b in zip(name.split(" x "), shape, strict=True))

    points = sorted((math.log(int(m)), gain) for m, gain in measured[min(measured, key=distance)].items())
    at = math.log(max(1, tokens))
    place = bisect([x for x, _ in points], at)
    if place in (0, len(points)):
        return points[min(place, len(points) - 1)][1]
    (x0, gain0), (x1, gain1) = points[place - 1 : place + 1]
    return gain0 + (gain1 - gain0) * (at - x0) / (x1 - x0)


def slide_layout(w: Tensor, n: int, dtype: torch.dtype, tokens: int) -> int:
    """n where the pattern's kernel is the faster one for these tokens, or should be; 0, dense, elsewhere.

    Where nobody measured, a GPU of compute capability 9.0 takes the pattern. Any other has the kernel that is not tuned
    (docs/slide.md): there 2:4 is taken, which reads the fewest bytes, and of wider patterns the dense weight.
    """
    if not n or w.device.type != "cuda":
        return n
    gain = slide_gain(torch.cuda.get_device_name(w.device), dtype, n, w.shape, tokens)
    if gain is None:
        return n if n == 2 or torch.cuda.get_device_capability(w.device) == (9, 0) else 0
    return n if gain >= 1 else 0


def sparse_range(gain: Callable[[int], float | None], tokens: int) -> tuple[int, int]:
    """The range of tokens around `tokens` in which the gain is at least 1, or the one nearest to it; (1, 0): none."""
    tried = sorted({round(2 ** (i / 4)) for i in range(4 * 15)} | {max(1, tokens)})
    pays = [gains is None or gains >= 1 for gains in map(gain, tried)]
    runs = []
    for i, good in enumerate(pays):
        if good and (i == 0 or not pays[i - 1]):
            runs.append([i, i])
        elif good:
            runs[-1][1] = i
    if not runs:
        return 1, 0
    here = tried.index(max(1, tokens))
    first, last = min(runs, key=lambda run: max(run[0] - here, here - run[1], 0))
    return (0 if first == 0 else tried[first], EVERYWHERE[1] if last == len(tried) - 1 else tried[last])


def check_shards(cols: int, shards: int, pattern: str) -> None:
    """Whether a weight's columns can be cut into equal shards (as torch.chunk does) without cutting a group.

    A pattern is kept by a shard where its groups are those of the whole weight: slide after sharding.

    Raises:
        ValueError: a group straddles two shards: names them.
    """
    width, size = -(-cols // max(1, shards)), 2 * SLIDE_PATTERNS[pattern]
    for shard in range(1, shards):
        if (start := shard * width) < cols and start % size:
            group = start // size
            raise ValueError(
                f"group {group} of {pattern} (columns {group * size} to {group * size + size - 1}) straddles shards "
                f"{shard - 1} and {shard} of {shards}, which meet at column {start}"
            )


def refused_shards(weight: Tensor, pattern: str) -> str | None:
    """Why a DTensor is no weight to pack, or None for any other tensor."""
    placements, mesh = getattr(weight, "placements", None), getattr(weight, "device_mesh", None)
    if placements is None or mesh is None:
        return None
    for dim, placement in enumerate(placements):
        if placement.is_shard(1) and pattern != "auto":
            try:
                check_shards(weight.shape[1], mesh.size(dim), pattern)
            except ValueError as error:
                return str(error)
    return "its weight is a DTensor: pack the shard, to_local(), in a layer of its own"


@dataclasses.dataclass(frozen=True)
class SlidePacking:
    """What `sparsify_(format="slide")` packs with; stands where a format's class would.

    Attributes:
        pattern: "2:4" to "14:16", or "auto" for the sparsest that a weight fits.
        dtype: "int8", "fp8", or None for the weight's.
        tokens: of a usual call, for which the kernel is chosen.
        keep_dense: whether to hold the dense weight too where the pattern's kernel is the faster one for some numbers
            of tokens only.

    Raises:
        ValueError: there is no such pattern or dtype, or tokens is no number from 1.
    """

    pattern: str
    dtype: str | None
    tokens: int
    keep_dense: bool = False

    format: ClassVar[str] = SlideWeight.format
    device_types: ClassVar[tuple[str, ...]] = SlideWeight.device_types

    def __post_init__(self) -> None:
        if self.pattern != "auto" and self.pattern not in SLIDE_PATTERNS:
            raise ValueError(f"pattern is {self.pattern!r}, expected one of auto, {', '.join(SLIDE_PATTERNS)}")
        if self.dtype is not None and self.dtype not in SLIDE_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(SLIDE_DTYPES)} or None")
        if type(self.tokens) is not int or self.tokens < 1:
            raise ValueError(f"tokens is {self.tokens!r}, expected a whole number from 1")

    def element(self, w: Tensor) -> torch.dtype | None:
        """The type that values of w are packed as, or None where this device has no kernel for it."""
        wanted = SLIDE_DTYPES[self.dtype] if self.dtype else w.dtype
        return wanted if SlideWeight.runs(w.device, wanted) else None

    def from_dense(self, w: Tensor) -> SlideWeight:
        """Packs w [rows, cols]; ValueError where it does not fit the pattern, whichever kernel is the faster one."""
        element = SLIDE_ELEMENTS.index(SLIDE_DTYPES[self.dtype]) if self.dtype else -1
        n = sparsest_pattern(w) if self.pattern == "auto" else SLIDE_PATTERNS[self.pattern]
        packed = SlideWeight.from_dense(w, n, element)
        dtype = SLIDE_ELEMENTS[packed.element]
        if self.keep_dense and n and w.device.type == "cuda":
            gpu = torch.cuda.get_device_name(w.device)
            first, last = sparse_range(lambda tokens: slide_gain(gpu, dtype, n, w.shape, tokens), self.tokens)
            if last and (first, last) != EVERYWHERE:
                return SlideWeight.from_dense(w, n, element, sparse_from=first, sparse_to=last)
        layout = slide_layout(w, n, dtype, self.tokens)
        return packed if layout == n else SlideWeight.from_dense(w, layout, element)

    def note(self, w: Tensor, packed: SlideWeight) -> str:
        """Why w was packed as dense; empty where it was not."""
        if packed.n:
            return ""
        n = sparsest_pattern(w) if self.pattern == "auto" else SLIDE_PATTERNS[self.pattern]
        if not n:
            return "it fits no pattern"
        pattern, dtype = f"{2 * n - 2}:{2 * n}", SLIDE_ELEMENTS[packed.element]
        gpu = torch.cuda.get_device_name(w.device)
        gain = slide_gain(gpu, dtype, n, w.shape, self.tokens)
        if gain is None:
            advice = "; `macko tune` measures it" if dtype in SLIDE_DTYPES.values() else ""
            name = str(dtype).removeprefix("torch.")
            return f"nobody measured {pattern} {name} on {gpu}, whose kernel is not tuned{advice}"
        return f"{pattern} would take {1 / gain:.2f} of dense's time at {self.tokens} tokens"


def _least_us(calls: Sequence[Callable[[], Any]], launches: int) -> float:
    """The least time of one call, from graphs of about so many that go round the first of them."""
    return time_graph(calls[:launches], replays=5, warmup=1, min_launches=launches, rest=False).min_us


def measure(
    device: torch.device | str = "cuda",
    dtypes: Iterable[str] = tuple(SLIDE_DTYPES),
    patterns: Iterable[str] = ("2:4", "4:6", "6:8"),
    shapes: Iterable[tuple[int, int]] = SHAPES,
    tokens: Iterable[int] = TOKENS,
    cold_bytes: int = 100_000_000,
) -> Table:
    """Times dense and pattern kernels on a GPU, in turn, and returns what a table holds of that GPU.

    Weights rotate over copies of `cold_bytes` together, so that they come from memory as in a model. About two minutes.
    Types that the GPU has no kernel for are left out.
    """
    table: Table = {}
    with torch.cuda.device(device):
        there = [name for name in dtypes if SlideWeight.runs(torch.device("cuda"), SLIDE_DTYPES[name])]
        for (rows, cols), name in ((shape, name) for shape in shapes for name in there):
            dtype = SLIDE_DTYPES[name]
            w = torch.randn(rows, cols, device="cuda").bfloat16()
            copies = max(2, cold_bytes // (rows * cols) + 1)
            held: dict[int, list[tuple[Tensor, Tensor]]] = {}
            for n in (0, *(SLIDE_PATTERNS[pattern] for pattern in patterns)):
                packed, scale, _ = ops.slide_pack(w, n, dtype, prune=True)
                held[n] = [(packed.clone(), scale) for _ in range(copies)]
            for m in tokens:
                x = torch.randn(m, cols, device="cuda").bfloat16()
                us = dict.fromkeys(held, math.inf)
                for n in (*held, *reversed(held)):
                    calls = [
                        lambda p=p, s=s, n=n, x=x, dtype=dtype: ops.slide_linear(x, p, s, x.shape[1], n, dtype)
                        for p, s in held[n]
                    ]
                    us[n] = min(us[n], _least_us(calls, 32 if m <= 512 else 4))
                for n in held:
                    if n:
                        of_shape = table.setdefault(name, {}).setdefault(f"{2 * n - 2}:{2 * n}", {})
                        of_shape.setdefault(f"{rows} x {cols}", {})[str(m)] = round(us[0] / us[n], 3)
    return table
