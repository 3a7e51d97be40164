r"""A few tokens and many times a pruned matrix on the GPU, from one packed weight: against F.linear of the dense one.

    python -m benchmarks.spmm --gpu                     # sell and tile: eight shapes, 1 to 4096 tokens, two densities
    python -m benchmarks.spmm --gpu --kernels stream,stream_alone,tiles --tokens 1,2,4,8,16
    python -m benchmarks.spmm --gpu --kernels tile,tile_128x256x1x1,tile_128x256x2x2 --tokens 128,256,512
    python -m benchmarks.spmm --gpu --kernels tile_rings,sparse11_rings --dtype bfloat16 --mask magnitude  # other GPUs
    python -m benchmarks.spmm --gpu --kernels dense12,dense12_alone --dtype bfloat16 --densities 1
    python -m benchmarks.spmm --gpu --kernels tile,sparse11 --dtype bfloat16 --mask magnitude
    python -m benchmarks.spmm --gpu --kernels tile,sparse11 --dtype bfloat16 --mask magnitude --densities 0.5 \
        --tokens 1,8 --listed 0,0.001,0.002,0.005 --out listed.jsonl      # with values that the table has no code for
    python -m benchmarks.spmm --gpu --kernels dense12,fp8,fp8_quant,fp8_rows,fp8_rows_quant,int4 --dtype bfloat16 \
        --densities 1 --tokens 1,8,16,64                # against what rounds the weights (benchmarks/rivals.py)
    python -m benchmarks.spmm --gpu --kernels dense8_fp8,sparse8_fp8,sparse8_int8 --densities 0.5
    python -m benchmarks.spmm --table  # measure nothing, write sparse11 against tile into macko/choose/times

Kernels: dense (F.linear; torch.mv too at one token), of the matrix before it was pruned; zeros, the same of the
pruned one, whose zeros take less power; sell, tile, dense12 and sparse11 (not for the mask uniform, nor for float16),
what a layer of that format does; dense8 and sparse8 of a kind of values (as dense8_fp8), checked against what they
round to; the two ways that sell may choose: stream (sell's packed stream), tiles (dense rows in a workspace, then the
library's product); the latter of tile, dense12 and sparse11 (tile_rows ...); ways to run tile with more than 32
tokens (tile_ROWSxTOKENSxPAIRxCUT); and torch's products of 8 and 4 bits. Launches may overlap, as in a model of such
layers, but for those that end in _alone, and torch's, which cannot. Each is checked before it is timed: poisoned
output, signed random data, the bound of float64. Times as in benchmarks/spmv.py: cold copies, CUDA graphs, medians.
Lines go to benchmarks/results/<gpu>/spmm.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from macko import _library
from macko.choose.times import codec_kind
from macko.weights import (
    ByteWeight,
    Dense8Weight,
    Dense12Weight,
    PackedWeight,
    SellWeight,
    SlabWeight,
    Sparse8Weight,
    Sparse11Weight,
    TileWeight,
    codes,
)

from .rivals import NAMES, Rival, product
from .slide import put_gains
from .spmv import DTYPES, EIGHT, make_mask, packed_copies
from .timing import Timing, append_jsonl, copies, provenance, results, time_graph

#: Kernel: format (None: dense), knobs, the numbers of tokens.
VARIANTS: dict[str, tuple[type[PackedWeight] | None, str, range]] = {
    "zeros": (None, "", range(1, 1 << 30)),
    "sell": (SellWeight, "", range(1, 1 << 30)),
    "tile": (TileWeight, "", range(1, 1 << 30)),
    "tile_alone": (TileWeight, "pdl=0", range(1, 1 << 30)),
    "dense12": (Dense12Weight, "", range(1, 1 << 30)),
    "dense12_alone": (Dense12Weight, "pdl=0", range(1, 1 << 30)),
    "sparse11": (Sparse11Weight, "", range(1, 1 << 30)),
    "sparse11_alone": (Sparse11Weight, "pdl=0", range(1, 1 << 30)),
    "stream": (SellWeight, "stream_tokens=16", range(1, 17)),
    "stream_alone": (SellWeight, "stream_tokens=16,pdl=0", range(1, 9)),
    "tiles": (SellWeight, "stream_tokens=1", range(2, 1 << 30)),
}
#: Through dense rows in a workspace and the library's product, however many tokens.
VARIANTS |= {
    f"{kind.format}_rows": (kind, "tile_tokens=0", range(2, 1 << 30))
    for kind in (TileWeight, Dense12Weight, Sparse11Weight)
}
#: Those of 8 bits a value, by their kind.
VARIANTS |= {
    f"{kind.format}_{values}{alone}": (kind, "pdl=0" if alone else "", range(1, 1 << 30))
    for kind in (Dense8Weight, Sparse8Weight)
    for values in codes.KINDS
    for alone in ("", "_alone")
}
#: As on a GPU without wgmma (MACKO_COPY=cp_async).
VARIANTS |= {
    f"{name}_rings": (kind, "copy=cp_async", tokens)
    for name, (kind, knobs, tokens) in VARIANTS.items()
    if kind is not None and issubclass(kind, SlabWeight) and not knobs
}
#: Rows and tokens of a block for many tokens, and blocks that share an output tile: all of csrc/slab/many_plan.h.
GEMM_SIZES = (
    *("128x320x1", "128x320x2", "128x256x1", "128x256x2", "128x192x1", "128x192x2"),
    *("192x192x1", "192x192x2", "128x160x2", "128x128x2", "192x128x2", "128x64x2", "192x64x2"),
    *("128x192x4", "128x128x4"),
)
#: Each way to run many tokens, where it fits (else as the plan chooses).
VARIANTS |= {
    f"{kind.format}_{size}x{split}": (kind, f"tile_gemm={size}x{split}", range(33, 1 << 30))
    for kind in (TileWeight, Dense12Weight, Sparse11Weight)
    for size in GEMM_SIZES
    for split in range(4)
}


def check(name: str, call: Callable[[], Tensor], w: Tensor, x: Tensor, exact_sum: bool) -> None:
    """Runs a call on poisoned memory, twice; looks at no more than 64 tokens."""
    some = slice(0, 64)
    wide = x[some].double()
    wanted = torch.cat([wide @ part.double().t() for part in w.split(4096)], 1)
    size = torch.cat([wide.abs() @ part.double().abs().t() for part in w.split(4096)], 1)
    error = size * (w.shape[1] + 4) * 2.0**-24
    error += (wanted.abs() + error) * torch.finfo(x.dtype).eps / 2 + 2.0**-24
    if not exact_sum:  # the library may keep partial sums in 16 bits
        error += wanted.abs().mean() * 0.05
    results = []
    for _ in range(2):
        poison = torch.full((x.shape[0], w.shape[0]), float("nan"), dtype=x.dtype, device=w.device)
        del poison  # the allocator hands the same memory to the call's output
        results.append(call()[some].clone())
    wrong = ~((results[0].double() - wanted).abs() <= error)
    if bool(wrong.any()):
        raise SystemExit(f"{name}: {int(wrong.sum())} of {wrong.numel()} results are wrong")
    if exact_sum and not torch.equal(results[0].view(torch.int16), results[1].view(torch.int16)):
        raise SystemExit(f"{name}: two runs gave different bits")


def time_calls(calls: Sequence[Callable[[], Tensor]], tokens: int) -> Timing:
    return time_graph(calls) if tokens <= 64 else time_graph(calls, replays=5, warmup=1, min_launches=8)


class Kernel:
    """A pruned matrix as a kernel of VARIANTS reads it, in more copies than the cache can keep; as rivals.Rival."""

    def __init__(self, name: str, w: Tensor) -> None:
        self.name = name
        self.kind, self.knobs, self.sizes = VARIANTS[name]
        self.rotated, self.nbytes = [], w.nbytes
        self.exactly = w  # what is multiplied
        if self.kind:
            if issubclass(self.kind, ByteWeight):
                packed: PackedWeight = self.kind.from_dense(w, codes.KINDS.index(name.split("_")[1]))
            else:
                packed = self.kind.from_dense(w)
            self.exactly = packed.unrounded() if isinstance(packed, ByteWeight) else w
            self.rotated, self.nbytes = packed_copies(packed), packed.nbytes
            self.products: list[Callable[[Tensor], Tensor]] = [c.linear for c in self.rotated]
        else:
            self.products = [partial(F.linear, weight=c) for (c,) in copies([w])]

    def calls(self, x: Tensor) -> list[Callable[[], Tensor]]:
        return [partial(product, x) for product in self.products]

    def check(self, call: Callable[[], Tensor], w: Tensor, x: Tensor) -> float:
        by_rows = self.name.endswith("_rows") or (self.name.endswith("_rings") and len(x) > 192)
        exact_sum = not by_rows and self.name not in ("tiles", "zeros") and (self.name != "sell" or len(x) == 1)
        check(self.name, call, self.rotated[0].to_dense() if by_rows else self.exactly, x, exact_sum)
        if self.exactly is w:
            return 0.0
        wanted = product(x, w)
        return float((call().double() - wanted).norm() / wanted.norm())

    def time_unpack(self, w: Tensor) -> Timing:
        """The whole dense matrix, which has to be w, or what it was rounded to."""
        if not torch.equal(self.rotated[0].to_dense(), self.exactly.to(w.dtype)):
            raise SystemExit(f"{self.name}: unpacking gives another matrix")
        return time_graph([c.to_dense for c in self.rotated], replays=5, warmup=1, min_launches=8)


class Shape:
    """Dense products of a matrix's shape, timed; and what is measured against them."""

    def __init__(self, shape: str, numbers: list[int], dtype: torch.dtype, out: Path, what: dict[str, Any]) -> None:
        rows, cols = map(int, shape.split("x"))
        self.name, self.out = shape, out
        self.about = {"rows": rows, "cols": cols, "dtype": str(dtype).removeprefix("torch."), **what}
        self.generator = torch.Generator(device="cuda").manual_seed(rows * 7 + cols)
        self.dense = torch.randn(rows, cols, device="cuda", dtype=dtype, generator=self.generator)
        self.inputs = {n: torch.randn(n, cols, device="cuda", dtype=dtype, generator=self.generator) for n in numbers}

    def time_dense(self) -> None:
        """F.linear, and for one token torch.mv where that is faster; and a copy of the matrix."""
        weights = [tensors[0] for tensors in copies([self.dense])]
        self.clone_us = time_graph([w.clone for w in weights], replays=5, warmup=1, min_launches=8).median_us
        self.dense_us = {}
        for n, x in self.inputs.items():
            timing = time_calls([partial(F.linear, x, c) for c in weights], n)
            if n == 1:
                other = time_calls([partial(torch.mv, c, x[0]) for c in weights], n)
                timing = min(timing, other, key=lambda t: t.median_us)
            self.dense_us[n] = timing.median_us
            self.write(timing, kernel="dense", tokens=n, density=1.0)

    def write(self, timing: Timing, **more: Any) -> None:
        append_jsonl(self.out, **more, **timing.rounded(), **self.about)

    def time(self, kernel: str, w: Tensor, density: float, mask: str) -> dict[int, float]:
        """A kernel's speed-up over dense by tokens; prints it, and writes the lines."""
        held = Rival(kernel, w) if kernel in NAMES else Kernel(kernel, w)
        speedups, shown, about = {}, [], {"density": density, "mask": mask}
        if isinstance(held, Kernel) and held.kind and kernel.removesuffix("_fp8") == held.kind.format:
            timing, moved = held.time_unpack(w), held.nbytes + w.nbytes
            rate = moved / timing.median_us / 1e6
            share = rate / (2 * w.nbytes / self.clone_us / 1e6)
            shown.append(f"unpack: {timing.median_us:.2f} ({rate:.2f} TB/s, {share:.2f} of a copy's)")
            facts = {"moved_bytes": moved, "clone_us": round(self.clone_us, 3)}
            self.write(timing, kernel=f"{kernel}_unpack", tokens=0, **facts, **about)
        for n, x in self.inputs.items():
            if n not in held.sizes:
                continue
            with _library.plan(held.knobs):
                try:
                    calls = held.calls(x)
                    error = held.check(calls[0], w, x)
                except RuntimeError as refused:  # torch's kernels do not take every shape
                    if isinstance(held, Kernel):
                        raise
                    shown.append(f"{n}: {str(refused).splitlines()[0][:70]}")
                    continue
                timing = time_calls(calls, n)
            speedups[n] = self.dense_us[n] / timing.median_us
            facts = {"dense_us": round(self.dense_us[n], 3), "held_bytes": held.nbytes, "error": round(error, 5)}
            self.write(timing, kernel=kernel, tokens=n, **facts, **about)
            shown.append(f"{n}: {timing.median_us:.2f} ({speedups[n]:.2f}x)")
        print(f"{self.name} {density} {mask} {kernel:6} us (x over dense)  {'  '.join(shown)}", flush=True)
        return speedups


def write_table(path: Path) -> None:
    """Puts time of tile / sparse11, of half zeros and launches that may overlap, into the package's table."""
    us: dict[tuple[int, int, int], dict[str, float]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if line["dtype"] == "bfloat16" and line.get("mask") == "magnitude" and line["density"] == 0.5:
            us.setdefault((line["rows"], line["cols"], line["tokens"]), {})[line["kernel"]] = line["median_us"]
            gpu = line["gpu"]
    lines: dict[tuple[int, int], dict[str, Any]] = {}
    for (rows, cols, tokens), by in sorted(us.items()):
        if tokens and {"tile", "sparse11"} <= {*by}:
            about = {"rows": rows, "cols": cols, "codec": "sparse11", "gain": {}}
            lines.setdefault((rows, cols), about)["gain"][str(tokens)] = round(by["tile"] / by["sparse11"], 3)
    put_gains(gpu, "codecs", lines.values(), codec_kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="what is timed; there is no other yet")
    parser.add_argument("--table", action="store_true", help="write the table from the lines of --out")
    parser.add_argument("--shapes", default=EIGHT, help="ROWSxCOLS,...")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,256,1024,4096", help="comma separated")
    parser.add_argument("--densities", default="0.5,0.3", help="comma separated")
    parser.add_argument("--dtype", default="float16", choices=list(DTYPES))
    parser.add_argument("--mask", default="uniform", choices=["uniform", "magnitude", "sgpt"])
    parser.add_argument("--listed", default="0", help="comma separated shares of values too small for sparse11's table")
    parser.add_argument("--kernels", default="sell,tile", help=f"of {', '.join([*VARIANTS, *NAMES])}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further shape after this time")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>/spmm.jsonl")
    args = parser.parse_args()
    if args.table:
        return write_table(args.out or Path(__file__).parent / "results/h200/spmm.jsonl")
    if not args.gpu:
        parser.error("say --gpu: there is nothing else to time on yet")
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    kernels = args.kernels.split(",")
    if {*kernels} & {*NAMES} and args.dtype != "bfloat16":
        parser.error(f"{', '.join(NAMES)} go with --dtype bfloat16")
    what = provenance()
    out = args.out or results("spmm.jsonl", what["gpu"])
    begin = time.monotonic()
    logs: dict[tuple[float, int, str], list[float]] = {}
    for name in args.shapes.split(","):
        if time.monotonic() - begin > args.seconds:
            print(f"stopped before {name}: over {args.seconds} s")
            break
        shape = Shape(name, [int(n) for n in args.tokens.split(",")], DTYPES[args.dtype], out, what)
        if "dense12" in args.kernels:  # in float16 it stores what was bfloat16
            shape.dense = shape.dense.bfloat16().to(DTYPES[args.dtype])
        shape.time_dense()
        for density in map(float, args.densities.split(",")):
            kept = make_mask(args.mask, shape.dense, density, shape.generator)
            for listed in map(float, args.listed.split(",")):
                w = torch.where(kept, shape.dense, torch.zeros_like(shape.dense))
                w[torch.rand(w.shape, device="cuda", generator=shape.generator) < listed] *= 2.0**-60
                mask = f"{args.mask}, {listed:.2%} listed" if listed else args.mask
                for kernel in kernels:
                    for n, speedup in shape.time(kernel, w, density, mask).items():
                        logs.setdefault((density, n, f"{kernel}, {mask}"), []).append(math.log(speedup))
                del w
            del kept
        del shape
    for (density, n, kernel), values in sorted(logs.items()):
        mean, worst = math.exp(sum(values) / len(values)), math.exp(min(values))
        print(f"density {density} tokens {n:5} {kernel:24} geomean {mean:.3f}x over {len(values)}, least {worst:.3f}x")


if __name__ == "__main__":
    main()
