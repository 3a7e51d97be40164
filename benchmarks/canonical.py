"""The macko format on a GPU: spmv against dense, packing, unpacking, host time of a call.

    python -m benchmarks.canonical [results.jsonl] [--only pack host]

Prints a table and adds a line per measurement to the file. Every output is checked before it is timed.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import macko.ops as ops
from benchmarks import EIGHT
from benchmarks.timing import append_jsonl, copies, provenance, time_dense, time_graph, time_host, time_waiting
from tests.common import assert_close_spmv, assert_same_bits, cuda_chain


def pruned(rows: int, cols: int, density: float, dtype: torch.dtype, row_spread: float = 0.0) -> Tensor:
    """Normal weights, each kept with probability density; row_spread > 0 makes rows of uneven length."""
    generator = torch.Generator("cuda").manual_seed(0)
    w = torch.randn(rows, cols, generator=generator, device="cuda").to(dtype)
    spread = torch.exp(row_spread * torch.randn(rows, 1, generator=generator, device="cuda"))
    kept = torch.rand(rows, cols, generator=generator, device="cuda") < density * spread / spread.mean()
    return w * kept


def spmv(
    rows: int, cols: int, density: float, dtype: torch.dtype, delta_bits: int = 4, row_spread: float = 0.0
) -> dict:
    """Times of spmv and of the better dense call; the result is checked on 512 rows."""
    w = pruned(rows, cols, density, dtype, row_spread)
    x = torch.randn(cols, dtype=dtype, device="cuda")
    packed = ops.pack(w, delta_bits)
    y = ops.spmv(*packed, cols, x, delta_bits)
    some = torch.randperm(rows, device="cuda")[:512]
    assert_close_spmv(y[some], w[some], x, chain=cuda_chain(packed[2]))
    linear_us, mv_us = time_dense(w, x)
    del w
    calls = [partial(torch.ops.macko.spmv, *p, cols, x, delta_bits) for p in copies(packed)]
    ours = time_graph(calls)
    best_us = min(linear_us.median_us, mv_us.median_us)
    return {
        "what": "spmv",
        "rows": rows,
        "cols": cols,
        "density": density,
        "row_spread": row_spread,
        "dtype": str(dtype).removeprefix("torch."),
        "delta_bits": delta_bits,
        "bytes": sum(t.nbytes for t in packed),
        "linear": linear_us,
        "mv": mv_us,
        "spmv": ours,
        "speedup": best_us / ours.median_us,
    }


def packing(rows: int, cols: int, density: float, delta_bits: int = 4) -> dict:
    """GB/s of dense fp16 through pack (the wait for the size included), unpack and check."""
    w = pruned(rows, cols, density, torch.float16)
    packed = ops.pack(w, delta_bits)
    assert_same_bits(ops.unpack(*packed, cols, delta_bits), w + 0)
    gbps = {}
    for name, call in (
        ("pack", lambda: ops.pack(w, delta_bits)),
        ("unpack_checked", lambda: ops.unpack(*packed, cols, delta_bits)),
        ("check", lambda: ops.check(*packed, cols, delta_bits)),
    ):
        gbps[f"{name}_gbps"] = w.nbytes / time_waiting(call, 10) / 1e9
    unpack = time_graph([partial(ops.unpack, v, d, r, cols, delta_bits) for v, d, r in copies(packed)])
    gbps["unpack_gbps"] = w.nbytes / unpack.median_us / 1e3
    return {"what": "pack", "rows": rows, "cols": cols, "density": density, "delta_bits": delta_bits, **gbps}


def host(mode: str) -> dict:
    """Host time of a call on a 64x64 matrix, under inference_mode or no_grad."""
    w = torch.randn(64, 64, dtype=torch.float16, device="cuda")
    packed = ops.pack(w)
    with getattr(torch, mode)():
        x = torch.randn(64, dtype=torch.float16, device="cuda")
        times = {
            "linear_us": time_host(lambda: F.linear(x, w)),
            "spmv_us": time_host(lambda: torch.ops.macko.spmv(*packed, 64, x)),
            "ops_spmv_us": time_host(lambda: ops.spmv(*packed, 64, x)),
            "ops_linear_us": time_host(lambda: ops.linear(x, *packed, 64)),
        }
    return {"what": "host", "mode": mode, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", default="benchmarks/results/canonical.jsonl")
    parser.add_argument("--only", nargs="+", choices=("spmv", "pack", "host"), default=("spmv", "pack", "host"))
    options = parser.parse_args()
    ran_on = provenance()

    def record(line: dict) -> None:
        append_jsonl(options.results, **ran_on, **line)
        shown = {k: v.median_us if hasattr(v, "median_us") else v for k, v in line.items()}
        print("  ".join(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in shown.items()), flush=True)

    if "spmv" in options.only:
        for dtype in (torch.float16, torch.bfloat16):
            for rows, cols in EIGHT:
                record(spmv(rows, cols, 0.5, dtype))
        for density in (0.7, 0.3, 0.1, 0.05):
            record(spmv(4096, 4096, density, torch.float16))
            record(spmv(8192, 8192, density, torch.float16))
        for delta_bits, density in ((2, 0.5), (8, 0.5), (8, 0.05)):
            record(spmv(8192, 8192, density, torch.float16, delta_bits))
        record(spmv(1024, 4096, 0.5, torch.float16))
        record(spmv(8192, 8192, 0.3, torch.float16, row_spread=0.5))
        record(spmv(4096, 131072, 0.5, torch.float16))  # x does not fit shared memory
    if "pack" in options.only:
        for rows, cols in EIGHT:
            record(packing(rows, cols, 0.5))
    if "host" in options.only:
        for mode in ("inference_mode", "no_grad"):
            record(host(mode))


if __name__ == "__main__":
    main()
