"""One vector times a pruned matrix on the GPU: macko's kernels against the dense product, cuSPARSE and the floor.

    python -m benchmarks.spmv --gpu                       # eight shapes at density 0.5, half a minute
    python -m benchmarks.spmv --gpu --shapes paper        # the 31 shapes of the MACKO paper's appendix
    python -m benchmarks.spmv --gpu --densities 0.1,0.3,0.5,0.7,1.0 --masks uniform,magnitude --kernels dense,sell,macko
    python -m benchmarks.spmv --gpu --variants            # other cuts and rings than the chosen ones, to variants.jsonl

Every kernel is checked before it is timed: signed random data, output memory poisoned with NaN, the bound of float64.
Times are medians over replays of CUDA graphs that rotate over cold copies (benchmarks/timing.py). Both sides read and
write the same types. The floor is the best of nine kernels that only read as many bytes as format and vectors have.
Lines go to benchmarks/results/<gpu>/spmv.jsonl; `make report` turns them into the tables and plots of docs and README.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from macko import _library, ops
from macko.weights import MackoWeight, PackedWeight, SellWeight

from . import EIGHT as SHAPES
from .floor import floor
from .timing import COLD_BYTES, MIN_LAUNCHES, Timing, append_jsonl, copies, provenance, results, time_graph

EIGHT = ",".join(f"{rows}x{cols}" for rows, cols in SHAPES)
#: Every linear layer that the MACKO paper's appendix measures.
PAPER = (
    "4096x4096,8192x8192,8192x29568,32000x5120,32000x8192,28672x8192,5120x5120,5120x13824,3584x20480,4096x11008,"
    "13824x5120,18944x3584,14336x4096,4096x14336,8192x28672,11008x4096,32000x4096,20480x3584,3584x18944,21504x7168,"
    "7168x7168,28672x7168,7168x28672,27648x9216,9216x9216,36864x9216,9216x36864,36864x12288,12288x12288,49152x12288,"
    "12288x49152"
)
Packed = TypeVar("Packed", bound=PackedWeight)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
MASKS = ("uniform", "magnitude", "sgpt")
KERNELS = ("dense", "sell", "sell_gap4", "sell_cp_async", "sell_behind", "macko", "cusparse", "compiled")
VARIANT_SHAPES = "4096x4096,4096x11008,8192x8192,28672x8192"
#: What the chosen layout and launch could be instead: options of packing (blocks in units of SMs), knobs.
#: A ring is that of a chain; other launches have a stage less, but not less than four.
VARIANTS: dict[str, tuple[dict[str, int], str]] = {
    "as chosen": ({}, ""),
    "2-bit gaps": ({"gap_bits": 2}, ""),
    "4-bit gaps": ({"gap_bits": 4}, ""),
    "4 warps a block": ({"warps": 4}, ""),
    "12 warps, one block an SM": ({"warps": 12, "blocks": 1}, ""),
    "one block an SM": ({"blocks": 1}, ""),
    "two waves of blocks": ({"blocks": 4}, ""),
    "no stage at a fixed place": ({}, "head=0"),
    "two stages at a fixed place": ({}, "head=2"),
    "ring of 3 stages": ({}, "stages=3"),
    "ring of 4": ({}, "stages=4"),
    "ring of 5": ({}, "stages=5"),
    "ring of 6": ({}, "stages=6"),
    "1 stage before x": ({}, "first=1"),
    "2 stages before x": ({}, "first=2"),
    "4 stages before x": ({}, "first=4"),
    "chained: 2 stages early": ({}, "early=2"),
    "chained: the whole ring early": ({}, "early=8"),
    "no bulk copies": ({}, "copy=cp_async"),
}


def make_mask(kind: str, w: Tensor, density: float, generator: torch.Generator) -> Tensor:
    """A bool mask like w. magnitude: one threshold over lognormal rows and heavy-tailed columns. sgpt: lognormal rows
    and columns, one threshold per 128 columns."""
    rows, cols = w.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=w.device, generator=generator)

    if kind == "uniform":
        return torch.rand(rows, cols, device=w.device, generator=generator) < density
    if kind == "magnitude":
        student = normal(1, cols) / (normal(4, cols).square().mean(0, keepdim=True)).sqrt()
        score = w.abs().float() * (0.5 + 0.5 * student.abs()) * (0.3 * normal(rows, 1)).exp()
        return score > _cut(score, density)
    score = w.abs().float() * (0.2 * normal(1, cols)).exp() * (0.2 * normal(rows, 1)).exp()
    return torch.cat([part > _cut(part, density) for part in score.split(128, 1)], 1)


def _cut(score: Tensor, density: float) -> Tensor:
    sample = score.flatten()[:: max(1, score.numel() // 4_000_000)]
    return sample.kthvalue(max(1, int((1 - density) * sample.numel()))).values


class Problem:
    """A pruned matrix and a vector, and the result in float64 with the bound that a float32 sum keeps."""

    def __init__(self, rows: int, cols: int, density: float, dtype: torch.dtype, mask: str) -> None:
        generator = torch.Generator(device="cuda").manual_seed(rows * 7 + cols)
        w = torch.randn(rows, cols, device="cuda", dtype=dtype, generator=generator)
        kept = make_mask(mask, w, density, generator) & (w != 0)
        self.w = torch.where(kept, w, torch.zeros((), device="cuda", dtype=dtype))
        self.x = torch.randn(cols, device="cuda", dtype=dtype, generator=generator)
        self.nnz = int(kept.sum())
        wide_x = self.x.double()
        self.wanted = torch.cat([part.double() @ wide_x for part in self.w.split(4096)])
        size = torch.cat([part.double().abs() @ wide_x.abs() for part in self.w.split(4096)])
        roundings = (cols + 2) * 2.0**-24
        error = size * roundings / (1 - roundings)
        self.bound = error + (self.wanted.abs() + error) * torch.finfo(dtype).eps / 2 + 2.0**-24

    def check(self, name: str, call: Callable[[], Tensor], exact_sum: bool = True) -> None:
        """Runs a call on poisoned memory, twice. exact_sum: it sums in float32 and gives the same bits every time."""
        results = []
        for _ in range(2):
            poison = torch.full_like(self.wanted, float("nan"), dtype=self.w.dtype)
            del poison  # the allocator hands the same memory to the call's output
            results.append(call().reshape(-1).clone())
        off = (results[0].double() - self.wanted).abs()
        # cuBLAS may keep partial sums in 16 bits, so the others only have to be near.
        limit = self.bound if exact_sum else self.bound + self.wanted.abs().mean() * 0.05
        if not bool((off <= limit).all()):
            raise SystemExit(
                f"{name}: {int((~(off <= limit)).sum())} of {off.numel()} rows are wrong, worst {off.max()}"
            )
        if exact_sum and not torch.equal(results[0].view(torch.int16), results[1].view(torch.int16)):
            raise SystemExit(f"{name}: two runs gave different bits")


def packed_copies(weight: Packed) -> list[Packed]:
    """As many copies of a packed weight as exceed the cache."""
    count = max(2, COLD_BYTES // weight.nbytes + 1)
    others = [{name: t.clone() for name, t in weight.tensors().items()} for _ in range(count - 1)]
    return [weight] + [dataclasses.replace(weight, **tensors) for tensors in others]  # type: ignore[type-var]


def measure(problem: Problem, kernels: set[str], record: Callable[..., None]) -> None:
    """Times the asked kernels on one problem; each goes to record(kernel, time, bytes, ...)."""
    w, x = problem.w, problem.x
    vectors = (w.shape[0] + w.shape[1]) * w.element_size()

    if "dense" in kernels:
        weights = [tensors[0] for tensors in copies([w])]
        dense_bytes = w.numel() * w.element_size() + vectors
        problem.check("F.linear", lambda: F.linear(x, w), exact_sum=False)
        record("dense_linear", time_graph([partial(F.linear, x, c) for c in weights]), dense_bytes)
        record("dense_mv", time_graph([partial(torch.mv, c, x) for c in weights]), dense_bytes)
        if "compiled" in kernels:
            compiled = torch.compile(F.linear, mode="max-autotune-no-cudagraphs")
            problem.check("compiled", lambda: compiled(x[None], w), exact_sum=False)
            record("dense_compiled", time_graph([partial(compiled, x[None], c) for c in weights]), dense_bytes)
        del weights

    canonical = MackoWeight.from_dense(w)
    if "macko" in kernels:
        rotated = packed_copies(canonical)
        calls = [partial(ops.spmv, c.values, c.deltas, c.row_ptr, c.cols, x) for c in rotated]
        problem.check("macko", calls[0])
        record("macko", time_graph(calls), canonical.nbytes + vectors, stored=canonical.stored)
        del rotated, calls

    if "cusparse" in kernels:
        csr = w.to_sparse_csr()
        csr = torch.sparse_csr_tensor(csr.crow_indices().int(), csr.col_indices().int(), csr.values(), size=w.shape)
        problem.check("cusparse", lambda: torch.mv(csr, x), exact_sum=False)
        csr_bytes = sum(t.numel() * t.element_size() for t in (csr.crow_indices(), csr.col_indices(), csr.values()))
        count = max(2, COLD_BYTES // csr_bytes + 1)
        rotated_csr = [csr] + [csr.clone() for _ in range(count - 1)]
        record("cusparse", time_graph([partial(torch.mv, c, x) for c in rotated_csr]), csr_bytes + vectors)
        del rotated_csr, csr

    measure_sell(problem, canonical, kernels, record)


def measure_sell(problem: Problem, canonical: MackoWeight, kernels: set[str], record: Callable[..., None]) -> None:
    """Sell as asked for: plain and chained, and after a kernel without PDL."""
    x = problem.x
    vectors = sum(problem.w.shape) * x.element_size()
    for gap_bits, name in ((0, "sell"), (4, "sell_gap4")):
        if name not in kernels:
            continue
        pack_us = []
        for _ in range(4):  # the first one allocates
            torch.cuda.synchronize()
            start = time.perf_counter()
            sell = SellWeight.from_macko(canonical, gap_bits)
            torch.cuda.synchronize()
            pack_us.append(round((time.perf_counter() - start) * 1e6, 1))
        rotated_sell = packed_copies(sell)
        nbytes = sell.nbytes + vectors
        facts = {
            "stored": sell.stored,
            "held_bytes": sell.nbytes,
            "gap_bits": sell.gap_bits,
            "pack_us": statistics.median(pack_us[1:]),
            "floor_us": round(floor(nbytes).median_us, 3),
        }
        calls = [partial(c.linear, x) for c in rotated_sell]
        variants = {name: "pdl=0", f"{name}_chain": ""}
        if gap_bits == 0 and "sell_cp_async" in kernels:
            variants["sell_cp_async"] = "copy=cp_async"
        for variant, knobs in variants.items():
            with _library.plan(knobs):
                problem.check(variant, calls[0])
                record(variant, time_graph(calls), nbytes, **facts)
        if gap_bits == 0 and "sell_behind" in kernels:

            def behind(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
                return lambda: (x.mul_(1), call())[1]

            for variant, knobs in (("sell_behind_plain", "pdl=0"), ("sell_behind_pdl", "")):
                with _library.plan(knobs):
                    record(variant, time_graph([behind(call) for call in calls]), nbytes)
        del rotated_sell, calls


def measure_variants(problem: Problem, record: Callable[..., None]) -> None:
    """Times VARIANTS of sell, plain and chained, and what a second of work without a rest does to sell and dense."""
    w, x = problem.w, problem.x
    vectors = (w.shape[0] + w.shape[1]) * w.element_size()
    canonical = MackoWeight.from_dense(w)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    floors: dict[int, float] = {}

    def sustained(calls: Sequence[Callable[[], Any]], once_us: float) -> Timing:
        replays = max(20, int(1_000_000 / (once_us * -(-MIN_LAUNCHES // len(calls)) * len(calls))))
        time_graph(calls, replays, rest=False)
        return time_graph(calls, replays // 4, rest=False)

    for name, (options, knobs) in VARIANTS.items():
        cut = {key: value * num_sms if key == "blocks" else value for key, value in options.items()}
        with _library.plan(knobs):
            sell = SellWeight.from_macko(canonical, **cut)
            rotated = packed_copies(sell)
            calls = [partial(c.linear, x) for c in rotated]
            nbytes = sell.nbytes + vectors
            if nbytes not in floors:
                floors[nbytes] = round(floor(nbytes).median_us, 3)
            facts = {"held_bytes": sell.nbytes, "stored": sell.stored, "floor_us": floors[nbytes]}
            for way in ("plain", "chained"):
                with _library.plan("pdl=0" if way == "plain" else ""):
                    problem.check(name, calls[0])
                    timing = time_graph(calls)
                    record(f"sell_{way}", timing, nbytes, variant=name, **facts)
                    if name == "as chosen" and way == "plain":
                        record(
                            "sell_sustained", sustained(calls, timing.median_us), nbytes, variant="sustained", **facts
                        )
        del rotated, calls
    calls = [partial(F.linear, x, c) for (c,) in copies([w])]
    dense = time_graph(calls)
    nbytes = w.numel() * w.element_size() + vectors
    record("dense_linear", dense, nbytes, variant="dense")
    record("dense_sustained", sustained(calls, dense.median_us), nbytes, variant="sustained")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", required=True, help="what is timed; there is no other yet")
    parser.add_argument("--shapes", help="eight (the default), paper, or ROWSxCOLS,...")
    parser.add_argument(
        "--variants", action="store_true", help="time other cuts and rings of sell than the chosen ones"
    )
    parser.add_argument("--densities", default="0.5", help="comma separated")
    parser.add_argument("--masks", default="uniform", help=f"of {', '.join(MASKS)}")
    parser.add_argument("--dtypes", default="float16", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--kernels", default="dense,sell", help=f"of {', '.join(KERNELS)}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further problem after this time")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>/spmv.jsonl or variants.jsonl")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    asked = args.shapes or (VARIANT_SHAPES if args.variants else "eight")
    shapes = {"eight": EIGHT, "paper": PAPER}.get(asked, asked)
    what = provenance()
    out = args.out or results("variants.jsonl" if args.variants else "spmv.jsonl", what["gpu"])
    begin = time.monotonic()
    for dtype in args.dtypes.split(","):
        for mask in args.masks.split(","):
            for density in map(float, args.densities.split(",")):
                for shape in shapes.split(","):
                    if time.monotonic() - begin > args.seconds:
                        print(f"stopped before {shape} at density {density}: over {args.seconds} s")
                        return
                    rows, cols = map(int, shape.split("x"))
                    problem = Problem(rows, cols, density, DTYPES[dtype], mask)
                    best = [float("inf")]

                    def record(
                        kernel: str,
                        timing: Timing,
                        nbytes: int,
                        *,
                        shown: str = f"{shape:12} {density:.2f} {mask} {dtype}",
                        about: dict[str, Any] = dict(  # noqa: B006, C408
                            rows=rows, cols=cols, density=density, mask=mask, dtype=dtype, nnz=problem.nnz
                        ),
                        best: list[float] = best,
                        **facts: Any,
                    ) -> None:
                        if kernel.startswith("dense"):
                            best[0] = min(best[0], timing.median_us)
                        share = f"{facts['floor_us'] / timing.median_us:.2f} of floor" if "floor_us" in facts else ""
                        label = f"{kernel} {facts.get('variant', '')}"
                        print(
                            f"{shown} {label:40} {timing.median_us:8.2f} us {best[0] / timing.median_us:5.2f}x {share}"
                        )
                        append_jsonl(out, kernel=kernel, **about, bytes=nbytes, **timing.rounded(), **facts, **what)

                    if args.variants:
                        measure_variants(problem, record)
                    else:
                        measure(problem, set(args.kernels.split(",")), record)
                    del problem


if __name__ == "__main__":
    main()
