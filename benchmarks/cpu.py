"""Times the CPU kernels against torch: python -m benchmarks.cpu [--sizes 4096 8192] [--tokens 1 4 64] [--host].

Every result is compared with float64 before it is timed. Weights rotate over copies of more than 300 MB in all, so
that no cache holds them (--warm: a call is timed right after the same one, so that a cache may). The calls take turns;
the minimum of the rounds counts, because a shared machine only ever adds time. --clock cpu counts the CPU time of one
thread, which is what remains true on a machine that is busy with other work. Torch's time is the better of F.linear
and torch.mv (F.linear for more tokens). Rows are appended to --out as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import append_jsonl, commit, copies
from macko import EcWeight, SparseLinear, _library, ops
from tests import layouts
from tests.common import assert_close_spmv, assert_same_bits, cpu_paths, random_vector, random_weight

Calls = dict[str, Callable[[int], object]]


def copy_of(ec: EcWeight, tensors: list[Tensor]) -> EcWeight:
    return dataclasses.replace(ec, **dict(zip(ec.tensors(), tensors, strict=True)))


def seconds(calls: Calls, rounds: int, clock: Callable[[], float], warm: bool = False) -> dict[str, float]:
    """The least time of each call(round); the calls take turns. warm: right after the same call."""
    best = dict.fromkeys(calls, float("inf"))
    for i in range(rounds):
        for name, call in calls.items():
            if warm:
                call(i)
            start = clock()
            call(i)
            best[name] = min(best[name], clock() - start)
    return best


def on_path(path: str, call: Callable[[int], object], i: int) -> object:
    with _library.plan(f"cpu={path}"):
        return call(i)


def machine(clock: str) -> dict[str, object]:
    info = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if line.startswith(("model name", "cpu family"))]
    return {
        "commit": commit(),
        "cpu": " family ".join(reversed(names[:2])) if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "clock": clock,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192], help="square matrices")
    parser.add_argument("--rows", type=int, help="of each matrix, where it is to be no square")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.7, 0.5, 0.3, 0.1])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--delta-bits", type=int, nargs="+", default=[4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--paths", nargs="+", default=cpu_paths())
    parser.add_argument("--formats", nargs="+", default=["macko", "bitmap", "ec", "ec_paper"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--warm", action="store_true", help="time each call right after the same one")
    parser.add_argument("--host", action="store_true", help="what a call of a 64x64 matrix takes, and no more")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu/kernels.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1 if args.clock == "cpu" else args.threads)
    clock = time.thread_time if args.clock == "cpu" else time.perf_counter

    def report(**row: object) -> None:
        append_jsonl(args.out, **machine(args.clock), **row)
        print("  ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)

    if args.host:
        for mode in ("no_grad", "inference_mode"):
            host(mode, args.rounds, clock, report)
        return
    for size in args.sizes:
        for dtype in (getattr(torch, name) for name in args.dtypes):
            for density in args.densities:
                w = random_weight(args.rows or size, size, density, dtype)
                for bits in args.delta_bits:
                    bench(w, density, bits, args, clock, report)


def host(mode: str, rounds: int, clock: Callable[[], float], report: Callable[..., None]) -> None:
    """Microseconds of a call of a 64x64 bf16 matrix, one vector: nearly all of it torch's and Python's."""
    w, x = random_weight(64, 64, 0.5, torch.bfloat16), random_vector(64, dtype=torch.bfloat16)
    packed = ops.pack(w)
    dense = torch.nn.Linear(64, 64, bias=False, dtype=w.dtype)
    sparse = SparseLinear.from_linear(dense, format="macko")
    each: dict[str, Callable[[], object]] = {
        "linear_us": lambda: F.linear(x, w),
        "op_us": lambda: torch.ops.macko.spmv(*packed, 64, x),
        "ops_us": lambda: ops.spmv(*packed, 64, x),
        "nn_linear_us": lambda: dense(x),
        "sparse_linear_us": lambda: sparse(x),
    }
    count = 50  # calls between two looks at the clock
    many = {name: partial(lambda call, i: [call() for _ in range(count)], call) for name, call in each.items()}
    with getattr(torch, mode)():
        times = seconds(many, rounds * 20, clock)
    us = {name: time / count * 1e6 for name, time in times.items()}
    report(op="host", mode=mode, **us, ratio=us["ops_us"] / us["linear_us"])


def bench(
    w: Tensor,
    density: float,
    bits: int,
    args: argparse.Namespace,
    clock: Callable[[], float],
    report: Callable[..., None],
) -> None:
    """One weight: every multiplication on every path, then the conversions."""
    rows, cols = w.shape
    shared = {"rows": rows, "cols": cols, "dtype": str(w.dtype).removeprefix("torch."), "density": density}
    shared |= {"warm": True} if args.warm else {}
    packed = ops.pack(w, bits)
    bitmap = layouts.bitmap_pack(*packed, cols, bits)
    assert_same_bits(layouts.bitmap_unpack(*bitmap, cols), w)
    dense, macko, maps = copies([w]), copies(packed), copies(bitmap)
    ecs = {"ec": EcWeight.from_dense(w), "ec_paper": EcWeight.paper(w, bits)} if bits in (4, 8) else {}
    size = {"macko": sum(t.nbytes for t in packed), "bitmap": sum(t.nbytes for t in bitmap)}
    size |= {name: ec.nbytes for name, ec in ecs.items()}
    held = {name: [copy_of(ec, tensors) for tensors in copies([*ec.tensors().values()])] for name, ec in ecs.items()}
    for tokens in args.tokens:
        x = random_vector(*([tokens] if tokens > 1 else []), cols, dtype=w.dtype)
        formats: Calls = {
            "macko": lambda i, x=x: ops.linear(x, *macko[i % len(macko)], cols, None, bits),  # type: ignore[misc]
            "bitmap": lambda i, x=x: layouts.bitmap_linear(x, *maps[i % len(maps)], cols),  # type: ignore[misc]
        }
        for name, all in held.items():
            formats[name] = lambda i, x=x, all=all: all[i % len(all)].linear(x)  # type: ignore[misc]
        formats = {name: call for name, call in formats.items() if name in args.formats}
        calls: Calls = {f"{f} {path}": partial(on_path, path, c) for f, c in formats.items() for path in args.paths}
        for call in calls.values():
            assert_close_spmv(call(0)[..., :256], w[:256], x)  # type: ignore[index]
        calls["linear"] = lambda i, x=x: F.linear(x, dense[i % len(dense)][0])
        if tokens == 1:
            calls["mv"] = lambda i, x=x: torch.mv(dense[i % len(dense)][0], x)
        times = seconds(calls, args.rounds, clock, args.warm)
        best = min(times["linear"], times.get("mv", float("inf")))
        for name in calls:
            kind, _, path = name.partition(" ")
            if path:
                report(
                    op="linear", format=kind, path=path, tokens=tokens,
                    delta_bits=bits if kind in ("macko", "ec_paper") else None, **shared,
                    ms=times[name] * 1e3, torch_linear_ms=times["linear"] * 1e3,
                    torch_mv_ms=times.get("mv", float("nan")) * 1e3, speedup=best / times[name],
                    packed_gbps=size[kind] / times[name] / 1e9, size=size[kind] / w.nbytes,
                )  # fmt: skip
    conversions: Calls = {
        "pack": lambda i: ops.pack(dense[i % len(dense)][0], bits),
        "unpack": lambda i: ops.unpack(*macko[i % len(macko)], cols, bits),
        "check": lambda i: ops.check(*macko[i % len(macko)], cols, bits),
        "bitmap_pack": lambda i: layouts.bitmap_pack(*macko[i % len(macko)], cols, bits),
        "bitmap_unpack": lambda i: layouts.bitmap_unpack(*maps[i % len(maps)], cols),
    }
    calls = {f"{op} {path}": partial(on_path, path, c) for op, c in conversions.items() for path in args.paths}
    for name, best in seconds(calls, 3, clock).items():
        op, _, path = name.partition(" ")
        report(op=op, path=path, delta_bits=bits, **shared, ms=best * 1e3, dense_gbps=w.nbytes / best / 1e9)


if __name__ == "__main__":
    main()
