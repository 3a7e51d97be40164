"""EC-SpMV on a GPU: y = W x of its variants against dense, cuSPARSE's CSR and sell; packing.

    python -m benchmarks.ec [results.jsonl]
    python -m benchmarks.ec results.jsonl --folder PRUNED     a matrix of each shape of a pruned model

Prints a table and adds a line per measurement to the file. Every output is checked before it is timed.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import macko.ops as ops
from benchmarks import EIGHT, timing
from benchmarks.canonical import pruned
from benchmarks.formats import folder
from benchmarks.spmv import packed_copies
from benchmarks.timing import Timing, append_jsonl, copies, provenance, time_dense, time_waiting
from macko.weights import SellWeight
from tests.common import assert_close_spmv

#: The paper's layout with both widths; the same without blocks; fewer lanes a row; what is smallest on most masks.
VARIANTS: dict[str, dict[str, int]] = {
    "paper, 4 bits": {"delta_bits": 4},
    "paper, 8 bits": {"delta_bits": 8},
    "no blocks, 4 bits": {"delta_bits": 4, "max_height": 1},
    "16 lanes": {"delta_bits": 0, "max_height": 1, "lanes": 16},
    "8 lanes": {"delta_bits": 0, "max_height": 1, "lanes": 8},
    "4 lanes": {"delta_bits": 0, "max_height": 1, "lanes": 4},
    "1 lane": {"delta_bits": 0, "max_height": 1, "lanes": 1, "tile_rows": 1024, "max_slabs": 4},
}


#: Of these the packing of a whole model is timed too.
PACKED_ALL = ("paper, 4 bits", "8 lanes")


#: Fewer replays than elsewhere: there are 160 measurements, and half of them spread by under 0.5 %.
time_graph = partial(timing.time_graph, replays=7, warmup=2)


def time_csr(w: Tensor, x: Tensor) -> Timing:
    """torch.mv on a CSR tensor with 32-bit indices, which is cuSPARSE's SpMV."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR support is in beta
        csr = w.to_sparse_csr()
        parts = [csr.crow_indices().int(), csr.col_indices().int(), csr.values()]
        held = [
            torch.sparse_csr_tensor(row_ptr, columns, values, size=w.shape, check_invariants=False)
            for row_ptr, columns, values in copies(parts)
        ]
        return time_graph([partial(torch.mv, m, x) for m in held])


def spmv(w: Tensor, density: float) -> Iterator[dict[str, Any]]:
    """A line for each baseline and variant; outputs are checked on 256 rows."""
    (rows, cols), dtype = w.shape, w.dtype
    x = torch.randn(cols, dtype=dtype, device="cuda")
    some = torch.randperm(rows, device="cuda")[:256]
    nnz = int(w.count_nonzero())
    common = {
        "what": "spmv",
        "rows": rows,
        "cols": cols,
        "density": density,
        "dtype": str(dtype).removeprefix("torch."),
    }
    csr = time_csr(w, x)
    dense = min(time_dense(w, x, replays=7, warmup=2), key=lambda t: t.median_us)
    yield {**common, "variant": "dense", "bytes": w.nbytes, "time": dense}
    yield {**common, "variant": "CSR", "bytes": nnz * 6 + rows * 4 + 4, "time": csr}
    sell = SellWeight.from_dense(w)
    held = packed_copies(sell)
    calls = [partial(c.linear, x) for c in held]
    yield {**common, "variant": "sell", "bytes": sell.nbytes, "time": time_graph(calls)}
    del sell, held, calls
    for name, options in VARIANTS.items():
        packed = ops.ec_pack(w, **options)
        y = ops.ec_spmv((*packed, rows, cols), x)
        assert_close_spmv(y[some], w[some], x)
        calls = [partial(torch.ops.macko.ec_spmv, *p, rows, cols, x) for p in copies(packed)]
        nbytes = sum(t.nbytes for t in packed)
        yield {**common, "variant": name, "bytes": nbytes, "bytes_a_nonzero": nbytes / nnz, "time": time_graph(calls)}
        del packed, calls


def packing(rows: int, cols: int, density: float, **options: int) -> dict[str, Any]:
    """Milliseconds of ec_pack, its waits included: the median of five."""
    w = pruned(rows, cols, density, torch.float16)
    ops.ec_pack(w, **options)
    seconds = time_waiting(partial(ops.ec_pack, w, **options), 5)
    return {"what": "pack", "rows": rows, "cols": cols, "density": density, **options, "ms": seconds * 1e3}


def packing_llama(density: float, **options: int) -> dict[str, Any]:
    """Seconds of ec_pack for all 224 matrices of Llama-2-7B; every layer is packed, its weights are the same."""
    layer = [
        pruned(*shape, density, torch.float16) for shape in [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
    ]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(32):
        for w in layer:
            ops.ec_pack(w, **options)
    torch.cuda.synchronize()
    return {"what": "pack 224 matrices", "density": density, **options, "s": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", default="benchmarks/results/ec.jsonl")
    parser.add_argument("--folder", type=Path, help="a pruned model in place of random masks")
    args = parser.parse_args()
    results, ran_on = args.results, provenance()
    if args.folder:
        shapes = {tuple(w.shape): w for _, w in folder(args.folder)}
        for w in shapes.values():
            density = int(w.count_nonzero()) / w.numel()
            products(results, {**ran_on, "mask": args.folder.name}, w.cuda(), round(density, 2))
        return
    for variant, options in VARIANTS.items():
        lines = [packing(4096, 4096, 0.3, **options)]
        if variant in PACKED_ALL:
            lines.append(packing_llama(0.3, **options))
        for line in lines:
            append_jsonl(results, **ran_on, variant=variant, **line)
            print(variant, line, flush=True)
    for rows, cols in EIGHT:
        for density in (0.3, 0.2):
            products(results, ran_on, pruned(rows, cols, density, torch.float16), density)


def products(results: str, ran_on: dict[str, Any], w: Tensor, density: float) -> None:
    """Prints and writes the lines of one matrix."""
    best: dict[str, float] = {}
    for line in spmv(w, density):
        append_jsonl(results, **ran_on, **line)
        us = best[line["variant"]] = line["time"].median_us
        gbps = line["bytes"] / us / 1e3
        print(
            f"{w.shape[0]}x{w.shape[1]} density {density} {line['variant']:18} {us:7.2f} us {gbps:6.0f} GB/s "
            f"{best['dense'] / us:5.2f}x dense {best.get('CSR', us) / us:5.2f}x CSR",
            flush=True,
        )


if __name__ == "__main__":
    main()
