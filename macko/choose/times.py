"""How long a layer takes in each format on a GPU or a CPU: measured times, and a model for what nobody measured.

A table is a JSON file. `macko/choose/times/<gpu>.json` are shipped; `$XDG_CACHE_HOME/macko/<gpu>.json` is the user's
own, made by `macko tune` or macko.autotune, and counts first. A CPU's is that of its vector path, "cpu avx512" or
"cpu avx2":

    {"version": 2, "gpu": "NVIDIA H200", "bandwidth_gbps": 4814, "slide": [
        {"rows": 3584, "cols": 18944, "dtype": "int8", "pattern": "2:4", "gain": {"1": 1.37, "2048": 1.46}}
    ], "codecs": [
        {"rows": 4096, "cols": 4096, "codec": "sparse11", "gain": {"1": 1.06, "64": 1.22}}
    ], "linear": [
        {"rows": 4096, "cols": 4096, "density": 0.5, "dtype": "float16", "tokens": 1, "us": {"dense": 12.6, "sell": 8}}
    ]}

"slide" is of slide's kernels: dense time over the pattern's, by tokens. "codecs" is of codecs that stand for tile where
they hold a weight: tile's time over theirs, of weights with half zeros; a file without it has them under "slide", as
patterns. Each line of "linear" has "dense". The model of a format is a + b * bytes,
fitted to the lines of the GPU; for a number of tokens without lines of the GPU to those of the shipped table whose
memory is as fast most nearly, by the bandwidths' ratio.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import _library

VERSION = 2
SHIPPED = Path(__file__).parent / "times"
#: A measured line stands for densities this far from its own.
NEAR = 0.05
#: What the names of CPUs' tables begin with; their vector path follows.
CPU = "cpu "
#: What is chosen by its times: formats that hold every bit of every weight. Other names in a table are of no account:
#: sparse11 stands for tile where it holds a weight (codec_gain), and 8 bits round.
TIMED = ("dense", "macko", "bitmap", "sell", "tile", "ec")
#: Widths of gaps that a format chooses from; others are taken to be as small as sell.
GAP_BITS = {"macko": (2, 4, 8), "ec": (2, 4, 8)}

#: What slide's lines call the types that values may be quantised to; 16 bits are "bf16".
SLIDE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Times:
    """What is known of one GPU, or of CPUs with a vector path.

    Attributes:
        gpu: its name, as torch.cuda.get_device_name gives it, or that of CPUs.
        scale: of its bytes' time over that of the GPU that was measured; 1 where it is the same one.
        lines: as in the file; of lines with the same problem the last one counts.
        measured: whether the lines are of this GPU.
        slide: lines of slide's kernels on this GPU by dtype and pattern.
        codecs: lines of codecs that stand for tile on this GPU, by name.
        elsewhere: of another GPU, for numbers of tokens that no line has.
    """

    gpu: str
    scale: float
    lines: tuple[Line, ...]
    measured: bool
    slide: Mapping[tuple[str, str], Sequence[Line]] = dataclasses.field(default_factory=dict)
    elsewhere: Times | None = None
    codecs: Mapping[str, Sequence[Line]] = dataclasses.field(default_factory=dict)

    @property
    def counts(self) -> list[int]:
        """The numbers of tokens that were measured."""
        return sorted({line["tokens"] for line in self.lines})

    def at(self, tokens: int) -> Times:
        """What tells of so many tokens: this, or elsewhere."""
        return self.elsewhere if self.elsewhere and tokens not in self.counts else self

    def us(self, rows: int, cols: int, density: float, dtype: torch.dtype, tokens: int = 1) -> dict[str, float]:
        """Microseconds by format, "dense" among them; empty where nothing is known of this number of tokens.

        CPUs take other instructions for each type, and their time grows with the tokens: there only lines of the same
        type count, and the measured number of tokens that is nearest.
        """
        if (other := self.at(tokens)) is not self:
            return other.us(rows, cols, density, dtype, tokens)
        size, lines = dtype.itemsize, self.lines
        if is_cpu(self.gpu):
            lines = tuple(line for line in lines if getattr(torch, line["dtype"]) == dtype)
            counts = sorted({line["tokens"] for line in lines})
            tokens = min(counts, key=lambda count: abs(math.log(count / tokens)), default=tokens)
            sizes = [line["rows"] * line["cols"] for line in lines if line["tokens"] == tokens]
            if rows * cols < min(sizes, default=0):
                return {}  # in the caches, or no more than a call takes: no line of a larger one says how long
        modelled = {}
        for format, (fixed, a_byte) in _fit(lines, tokens).items():
            modelled[format] = fixed + a_byte * self.scale * held_bytes(format, rows, cols, density, size)
        near = [
            line
            for line in lines
            if self.measured
            and (line["rows"], line["cols"], line["tokens"]) == (rows, cols, tokens)
            and getattr(torch, line["dtype"]).itemsize == size
            and abs(line["density"] - density) <= NEAR
        ]
        for line in sorted(near, key=lambda line: -abs(line["density"] - density)):
            for format, us in line["us"].items():
                there = held_bytes(format, rows, cols, line["density"], size)
                modelled[format] = us * held_bytes(format, rows, cols, density, size) / max(1, there)
        return {format: us for format, us in modelled.items() if format in TIMED}

    def slide_gain(self, dtype: torch.dtype, n: int, shape: Sequence[int], tokens: int) -> float | None:
        """Dense time over that of (2n-2):2n: at the shape [rows, cols] measured that is nearest, between the tokens.

        None where nobody measured.
        """
        name = next((name for name, type in SLIDE_DTYPES.items() if type == dtype), "bf16")
        return _gain(self.slide.get((name, f"{2 * n - 2}:{2 * n}"), ()), shape, tokens)

    def codec_gain(self, codec: str, shape: Sequence[int], tokens: int) -> float | None:
        """Time of tile over that of a codec that stands for it, as slide_gain has it."""
        return _gain(self.codecs.get(codec, ()), shape, tokens)


def _gain(lines: Sequence[Line], shape: Sequence[int], tokens: int) -> float | None:
    """The gain of the line whose shape is nearest, between its numbers of tokens; None where there is no line."""
    if not lines:
        return None

    def distance(line: Line) -> float:
        return sum(abs(math.log(line[of] / max(1, size))) for of, size in zip(("rows", "cols"), shape, strict=True))

    tokens_and_gain = sorted((int(count), gain) for count, gain in min(lines, key=distance)["gain"].items())
    counts, gains = zip(*tokens_and_gain, strict=True)
    return float(np.interp(math.log(max(1, tokens)), np.log(counts), gains))


def packed_share(density: float, value_bits: float = 16, gap_bits: Iterable[int] = (4,)) -> float:
    """Bytes of a packed weight over those of the dense one, for non-zeros that lie anywhere (docs/macko.md).

    Of several widths of gaps the one that makes it smallest.
    """

    def share(bits: int) -> float:
        gap = (1 - density) ** 2**bits  # chance of a run too long for one gap
        return (value_bits + bits) / value_bits * density * (1 + gap / (1 - gap))

    return min(share(bits) for bits in gap_bits) if density > 0 else 0.0


def held_bytes(format: str, rows: int, cols: int, density: float, size: int) -> float:
    """About what a weight takes in a format, for non-zeros that lie anywhere."""
    dense = rows * cols * size
    if format == "bitmap":
        return dense * density + rows * cols / 8
    return dense if format == "dense" else dense * packed_share(density, 8 * size, GAP_BITS.get(format, range(2, 7)))


def _fit(lines: tuple[Line, ...], tokens: int) -> dict[str, tuple[float, float]]:
    """(a, b) of a + b * bytes by format: least squares of the relative error."""
    points: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        size = getattr(torch, line["dtype"]).itemsize
        if line["tokens"] == tokens:
            for format, us in line["us"].items():
                nbytes = held_bytes(format, line["rows"], line["cols"], line["density"], size)
                points.setdefault(format, []).append((nbytes, us))
    fits = {}
    for format, of in points.items():
        nbytes, us = np.array(of).T
        a_byte, fixed = np.polyfit(nbytes, us, 1, w=1 / us) if np.ptp(nbytes) else (0.0, 0.0)
        if fixed <= 0 or a_byte <= 0:  # or all of one size
            fixed, a_byte = 0.0, (nbytes / us).sum() / np.square(nbytes / us).sum()
        fits[format] = float(fixed), float(a_byte)
    return fits


def gpu_name(device: torch.device | int | None = None) -> str:
    """What a table of this device is named by."""
    if isinstance(device, torch.device) and device.type == "cpu":
        return f"{CPU}{_library.cpu_path}"
    return torch.cuda.get_device_name(device)


def is_cpu(gpu: str) -> bool:
    """Whether a table of this name is of CPUs."""
    return gpu.startswith(CPU)


def measured_gpus() -> list[str]:
    """GPUs of which a table comes with macko."""
    return sorted(gpu for gpu in (read(path)["gpu"] for path in SHIPPED.glob("*.json")) if not is_cpu(gpu))


def bandwidth_gbps(device: torch.device | int | None = None) -> float:
    """Of the memory, by clock and width; 0 where torch does not say, as of a CPU."""
    if isinstance(device, torch.device) and device.type == "cpu":
        return 0
    gpu = torch.cuda.get_device_properties(device)  # type: ignore[arg-type]
    clock_khz, bits = getattr(gpu, "memory_clock_rate", 0), getattr(gpu, "memory_bus_width", 0)
    return round(2 * clock_khz * bits / 8 / 1e6)


def file_name(gpu: str) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in gpu) + ".json"


def cache_file(gpu: str) -> Path:
    """Where the user's own table of a GPU lies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "macko" / file_name(gpu)


def read(path: Path) -> dict[str, Any]:
    """A table's content; ValueError where it is none."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["version"] != VERSION:
            raise ValueError(f"version is {table['version']!r}, expected {VERSION}")
        for line in table["linear"]:
            good = isinstance(getattr(torch, line["dtype"], None), torch.dtype) and 0 <= line["density"] <= 1
            _check(line, ("rows", "cols", "tokens"), good and "dense" in line["us"], line["us"])
        for line in table["slide"]:
            good = isinstance(line["dtype"], str) and isinstance(line["pattern"], str)
            _check(line, ("rows", "cols"), good and all(int(tokens) > 0 for tokens in line["gain"]), line["gain"])
        by_pattern = [line for line in table["slide"] if ":" in line["pattern"]]
        codecs = [_codec_line(line) for line in table["slide"] if ":" not in line["pattern"]]
        for line in table.get("codecs", []):
            good = isinstance(line["codec"], str) and all(int(tokens) > 0 for tokens in line["gain"])
            _check(line, ("rows", "cols"), good, line["gain"])
            codecs.append(line)
        return {**table, "slide": by_pattern, "codecs": codecs, "bandwidth_gbps": table.get("bandwidth_gbps", 0)}
    except (AttributeError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a table of macko tune: {error}") from None


def _codec_line(line: Line) -> Line:
    """A line of "codecs" from one of "slide", where they were before."""
    return {"rows": line["rows"], "cols": line["cols"], "codec": line["pattern"], "gain": line["gain"]}


def _check(line: Line, sizes: Iterable[str], good: bool, measured: dict[str, float]) -> None:
    """ValueError where a line is no measurement: whole numbers from 1 for its sizes, and more than 0 for each time."""
    good = good and all(type(line[size]) is int and 0 < line[size] < 1 << 31 for size in sizes)
    if not good or not measured or not all(0 < value < 1e12 for value in measured.values()):
        raise ValueError(f"not a measurement: {line}")


def user_table(gpu: str) -> dict[str, Any] | None:
    """The user's own table of a GPU; none where its file is broken, with a warning."""
    path = cache_file(gpu)
    try:
        return read(path) if path.exists() else None
    except ValueError as error:
        warnings.warn(f"{error}; it is left out. `macko tune` makes a new one", stacklevel=3)
        return None


@cache
def times(gpu: str, bandwidth: float | None = None) -> Times:
    """What is known of a GPU: the user's own lines, those that are shipped, and those of another GPU for the model.

    Args:
        gpu: its name.
        bandwidth: of its memory, by which times of another GPU are scaled. 0, where torch does not say, or None where
            nobody asked: times are those of the slowest memory that is shipped, in the first case with a warning.
    """
    tables = []
    if (shipped := SHIPPED / file_name(gpu)).exists():
        tables.append(read(shipped))
    if table := user_table(gpu):
        tables.append(table)
    slide: dict[tuple[str, str], list[Line]] = {}
    codecs: dict[str, list[Line]] = {}
    for table in tables:  # of a pattern or codec that the user has timed, only the user's lines count
        slide |= {kind: list(lines) for kind, lines in groupby(sorted(table["slide"], key=slide_kind), slide_kind)}
        codecs |= {kind: list(lines) for kind, lines in groupby(sorted(table["codecs"], key=codec_kind), codec_kind)}
    lines = _latest(line for table in tables for line in table["linear"])
    elsewhere = None if is_cpu(gpu) else _elsewhere(gpu, bandwidth, any(line["tokens"] == 1 for line in lines))
    if elsewhere and not lines:
        return dataclasses.replace(elsewhere, slide=slide, codecs=codecs)
    return Times(gpu, 1.0, tuple(lines), bool(lines), slide, elsewhere, codecs)


def _elsewhere(gpu: str, bandwidth: float | None, measured: bool) -> Times | None:
    """Lines of another GPU for this one. measured: one token is, which formats are chosen by, so nothing is guessed."""
    shipped = [read(path) for path in sorted(SHIPPED.glob("*.json"))]
    if not (tables := [table for table in shipped if table["linear"] and not is_cpu(table["gpu"])]):
        return None
    if bandwidth and (timed := [table for table in tables if table["bandwidth_gbps"]]):
        # As many times slower or faster as its memory is: the fewer times, the less is guessed.
        table = min(timed, key=lambda table: abs(math.log(table["bandwidth_gbps"] / bandwidth)))
        return Times(gpu, table["bandwidth_gbps"] / bandwidth, tuple(table["linear"]), False)
    table = min(tables, key=lambda table: table["bandwidth_gbps"])  # most GPUs' memory is slower than any of these
    if bandwidth == 0 and not measured:
        warnings.warn(
            f"torch does not say how fast the memory of {gpu} is: its times are taken to be those of "
            f"{table['gpu']}. `macko tune` measures them",
            stacklevel=4,
        )
    return Times(gpu, 1.0, tuple(table["linear"]), False)


def slide_kind(line: Line) -> tuple[str, str]:
    """What slide's lines are grouped by."""
    return line["dtype"], line["pattern"]


def codec_kind(line: Line) -> str:
    """What lines of "codecs" are grouped by."""
    return line["codec"]


def times_of(device: torch.device | int | None = None) -> Times:
    """What is known of the GPU that this is, or of CPUs with this one's vector path."""
    return times(gpu_name(device), bandwidth_gbps(device))


def _latest(lines: Iterable[Line]) -> list[Line]:
    """One line a problem; formats that only the earlier line has are kept."""
    found: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        key = tuple(line[name] for name in ("rows", "cols", "density", "dtype", "tokens"))
        found[key] = {**line, "us": {**found.get(key, {"us": {}})["us"], **line["us"]}}
    return list(found.values())


def write(path: Path, gpu: str, lines: Iterable[Line], slide: Iterable[Line], bandwidth: float) -> None:
    """Writes a table, what was in the file before under what is new. A broken one of the user's own is replaced.

    Raises:
        ValueError: another file of this name is no table.
    """
    held = user_table(gpu) if path == cache_file(gpu) else read(path) if path.exists() else None
    before = held or {"linear": [], "codecs": [], "slide": []}
    by_shape = {(*slide_kind(line), line["rows"], line["cols"]): line for line in (*before["slide"], *slide)}
    table: dict[str, Any] = {
        "version": VERSION,
        "gpu": gpu,
        "bandwidth_gbps": bandwidth,
        "torch": torch.__version__,
        "slide": list(by_shape.values()),
        "codecs": before["codecs"],
        "linear": _latest([*before["linear"], *lines]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path, table)


def save(path: Path, table: Mapping[str, Any]) -> None:
    """Writes a table to its file, a line for each measurement, whole or not at all."""
    several = ("slide", "codecs", "linear")
    parts = [json.dumps({name: value for name, value in table.items() if name not in several})[1:-1]]
    for name in several:
        lines = ",\n".join(map(json.dumps, table[name]))
        parts.append(f'"{name}": [\n{lines}\n]' if lines else f'"{name}": []')
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text("{" + ", ".join(parts) + "}\n", encoding="utf-8")
    unfinished.replace(path)
    times.cache_clear()
