"""Times pack, unpack and spmv on the CPU against torch: python -m benchmarks.cpu [--sizes 4096 8192].

Every result is compared with float64 before it is timed. Weights rotate over copies of more than 300 MB in all, so
that no cache holds them. Calls of macko and torch take turns; the minimum of the rounds counts, because a shared
machine only ever adds time. Torch's time is the better of F.linear and torch.mv. Rows are appended to --out as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from macko import ops
from tests.common import assert_close_spmv, assert_same_bits, cpu_paths, random_vector, random_weight

ROTATED_BYTES = 300e6


def seconds(calls: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """The least time of each call(i), i counting rounds; the calls take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for i in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call(i)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def copies(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The tensors and as many clones of them as make ROTATED_BYTES."""
    count = 1 + int(ROTATED_BYTES / sum(t.nbytes for t in tensors))
    return [tensors, *(tuple(t.clone() for t in tensors) for _ in range(count - 1))]


def machine() -> dict[str, object]:
    info = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit,
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "best_path": cpu_paths()[-1],
    }


def bench_spmv(w: Tensor, packed: tuple[Tensor, ...], bits: int, paths: list[str], rounds: int) -> dict[str, float]:
    """Times of torch's linear and mv and of spmv on each path."""
    x = random_vector(w.shape[1], dtype=w.dtype)
    dense, sparse = copies(w), copies(*packed)

    def spmv(path: str) -> Callable[[int], object]:
        def call(i: int) -> Tensor:
            os.environ["MACKO_CPU"] = path
            return ops.spmv(*sparse[i % len(sparse)], w.shape[1], x, bits)  # type: ignore[misc]

        assert_close_spmv(call(0)[:256], w[:256], x)
        return call

    calls: dict[str, Callable[[int], object]] = {path: spmv(path) for path in paths}
    calls["linear"] = lambda i: F.linear(x, dense[i % len(dense)][0])
    calls["mv"] = lambda i: torch.mv(dense[i % len(dense)][0], x)
    return seconds(calls, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192], help="square matrices")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.7, 0.5, 0.3, 0.1])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--delta-bits", type=int, nargs="+", default=[4])
    parser.add_argument("--paths", nargs="+", default=cpu_paths())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu/canonical.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    about = machine()

    def report(**row: object) -> None:
        with args.out.open("a") as out:
            out.write(json.dumps({**about, **row}) + "\n")
        print("  ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)

    for size in args.sizes:
        for dtype_name in args.dtypes:
            dtype = getattr(torch, dtype_name)
            for density in args.densities:
                w = random_weight(size, size, density, dtype)
                for bits in args.delta_bits:
                    shared = {"rows": size, "cols": size, "dtype": dtype_name, "density": density, "delta_bits": bits}
                    packed = ops.pack(w, bits)
                    packed_bytes = sum(t.nbytes for t in packed)
                    times = bench_spmv(w, packed, bits, args.paths, args.rounds)
                    torch_best = min(times["linear"], times["mv"])
                    for path in args.paths:
                        os.environ["MACKO_CPU"] = path
                        report(
                            op="spmv",
                            path=path,
                            **shared,
                            ms=times[path] * 1e3,
                            torch_linear_ms=times["linear"] * 1e3,
                            torch_mv_ms=times["mv"] * 1e3,
                            speedup=torch_best / times[path],
                            gbps=packed_bytes / times[path] / 1e9,
                        )
                        assert_same_bits(ops.unpack(*packed, size, bits), w)  # type: ignore[misc]
                        calls: dict[str, Callable[[int], object]] = {
                            "pack": lambda i, w=w, bits=bits: ops.pack(w, bits),
                            "unpack": lambda i, p=packed, bits=bits, cols=size: ops.unpack(*p, cols, bits),
                            "check": lambda i, p=packed, bits=bits, cols=size: ops.check(*p, cols, bits),
                        }
                        for op, best in seconds(calls, 3).items():
                            report(op=op, path=path, **shared, ms=best * 1e3, dense_gbps=w.nbytes / best / 1e9)
                    os.environ.pop("MACKO_CPU")


if __name__ == "__main__":
    main()
