"""How long a layer takes in each format on a GPU or a CPU: measured times, and a model for what nobody measured.

A table is a JSON file. `macko/times/<gpu>.json` are shipped; `$XDG_CACHE_HOME/macko/<gpu>.json` is the user's own, made
by `macko tune` or macko.autotune, and counts first. A CPU's is that of its vector path, "cpu avx512" or "cpu avx2":

    {"version": 1, "gpu": "NVIDIA H200", "bandwidth_gbps": 4917, "slide": {}, "linear": [
        {"rows": 4096, "cols": 4096, "density": 0.5, "dtype": "float16", "tokens": 1, "us": {"dense": 12.6, "sell": 8}}
    ]}

"slide" holds gains of slide's kernels, which macko.slide_choice reads. The model of a format is a + b * bytes, fitted
to the lines of the GPU; for a GPU without lines to those of the first table that is shipped, by the bandwidths' ratio.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import _library
from .layers import packed_share

VERSION = 1
SHIPPED = Path(__file__).parent / "times"
#: A measured line stands for densities this far from its own.
NEAR = 0.05
#: What the names of CPUs' tables begin with; their vector path follows.
CPU = "cpu "
#: Widths of gaps that a format chooses from; others are taken to be as small as sell.
GAP_BITS = {"macko": (2, 4, 8), "ec": (2, 4, 8)}

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Times:
    """What is known of one GPU, or of CPUs with a vector path.

    Attributes:
        gpu: its name, as torch.cuda.get_device_name gives it, or that of CPUs.
        scale: of its bytes' time over that of the GPU that was measured; 1 where it is the same one.
        lines: as in the file; of lines with the same problem the last one counts.
        measured: whether the lines are of this GPU.
    """

    gpu: str
    scale: float
    lines: tuple[Line, ...]
    measured: bool

    @property
    def counts(self) -> list[int]:
        """The numbers of tokens that were measured."""
        return sorted({line["tokens"] for line in self.lines})

    def us(self, rows: int, cols: int, density: float, dtype: torch.dtype, tokens: int = 1) -> dict[str, float]:
        """Microseconds by format, "dense" among them; empty where nothing is known of this number of tokens.

        CPUs take other instructions for each type, and their time grows with the tokens: there only lines of the same
        type count, and the measured number of tokens that is nearest.
        """
        size, lines = dtype.itemsize, self.lines
        if is_cpu(self.gpu):
            lines = tuple(line for line in lines if getattr(torch, line["dtype"]) == dtype)
            if rows * cols < min((line["rows"] * line["cols"] for line in lines), default=0):
                return {}  # in the caches, or no more than a call takes: no line of a larger one says how long
            tokens = min(self.counts, key=lambda count: abs(math.log(count / tokens)), default=tokens)
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
        return modelled


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
                held = held_bytes(format, line["rows"], line["cols"], line["density"], size)
                points.setdefault(format, []).append((held, us))
    fits = {}
    for format, of in points.items():
        w, x, xx = (sum(held**power / us**2 for held, us in of) for power in (0, 1, 2))
        y, xy = (sum(held**power / us for held, us in of) for power in (0, 1))
        determinant = w * xx - x * x
        if determinant > 1e-9 * w * xx:
            a, b = (y * xx - x * xy) / determinant, (w * xy - x * y) / determinant
        else:  # all of one size
            a, b = 0.0, xy / xx
        fits[format] = (a, b) if a > 0 < b else (0.0, xy / xx)
    return fits


def gpu_name(device: torch.device | int | None = None) -> str:
    """What a table of this device is named by."""
    if isinstance(device, torch.device) and device.type == "cpu":
        return f"{CPU}{_library.cpu_path}"
    return torch.cuda.get_device_name(device)


def is_cpu(gpu: str) -> bool:
    """Whether a table of this name is of CPUs."""
    return gpu.startswith(CPU)


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
            sizes = [line[key] for key in ("rows", "cols", "tokens")]
            good = all(type(size) is int and size > 0 for size in sizes) and 0 <= line["density"] <= 1
            good = good and isinstance(getattr(torch, line["dtype"], None), torch.dtype)
            if not good or not line["us"] or not all(us > 0 for us in line["us"].values()):
                raise ValueError(f"not a measurement: {line}")
        if not all(isinstance(patterns, dict) for patterns in table.get("slide", {}).values()):
            raise ValueError('"slide" is no table')
        return {"slide": {}, "bandwidth_gbps": 0, **table}
    except (AttributeError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a table of macko tune: {error}") from None


def own_table(gpu: str) -> dict[str, Any] | None:
    """The user's own table of a GPU; none where its file is broken, with a warning."""
    path = cache_file(gpu)
    try:
        return read(path) if path.exists() else None
    except ValueError as error:
        warnings.warn(f"{error}; it is left out. `macko tune` makes a new one", stacklevel=3)
        return None


@cache
def times(gpu: str, bandwidth: float = 0) -> Times:
    """What is known of a GPU: the user's own lines, those that are shipped, or those of another GPU for the model."""
    tables = []
    if (shipped := SHIPPED / file_name(gpu)).exists():
        tables.append(read(shipped))
    if own := own_table(gpu):
        tables.append(own)
    if tables:
        lines = tuple(_latest(line for table in tables for line in table["linear"]))
        return Times(gpu, 1.0, lines, True)
    for path in () if is_cpu(gpu) else sorted(SHIPPED.glob("*.json")):
        if is_cpu((table := read(path))["gpu"]):
            continue
        scale = table["bandwidth_gbps"] / bandwidth if bandwidth and table["bandwidth_gbps"] else 1.0
        return Times(gpu, scale, tuple(table["linear"]), False)
    return Times(gpu, 1.0, (), False)


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


def _with_slide(before: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Slide's tables (type, pattern, shape, tokens) with the shapes of `new` in place of what was there."""
    table = {name: dict(patterns) for name, patterns in before.items()}
    for name, patterns in new.items():
        for pattern, shapes in patterns.items():
            of_type = table.setdefault(name, {})
            of_type[pattern] = {**of_type.get(pattern, {}), **shapes}
    return table


def write(path: Path, gpu: str, lines: Iterable[Line], slide: dict[str, Any], bandwidth: float) -> None:
    """Writes a table, what was in the file before under what is new. A broken one of the user's own is replaced.

    Raises:
        ValueError: another file of this name is no table.
    """
    held = own_table(gpu) if path == cache_file(gpu) else read(path) if path.exists() else None
    before = held or {"linear": [], "slide": {}}
    table: dict[str, Any] = {
        "version": VERSION,
        "gpu": gpu,
        "bandwidth_gbps": bandwidth,
        "torch": torch.__version__,
        "linear": _latest([*before["linear"], *lines]),
        "slide": _with_slide(before["slide"], slide),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({name: value for name, value in table.items() if name != "linear"})
    text = f'{head[:-1]}, "linear": [\n' + ",\n".join(map(json.dumps, table["linear"])) + "\n]}\n"
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
    times.cache_clear()
