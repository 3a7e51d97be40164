"""Quantised and structured-sparse linears on a GPU: the whole linear, from a 16-bit x to a 16-bit y.

    python -m benchmarks.slide [results.jsonl] [--shapes qkv,o,gate_up,down] [--tokens 1,16,...] [--types int8,fp8,bf16]
    python -m benchmarks.slide results.jsonl --tokens=    the quantiser alone
    python -m benchmarks.slide results.jsonl --table      writes "slide" of macko/choose/times/<gpu>.json
    python -m benchmarks.slide results.jsonl --judge      what is lost by that table at tokens that nobody measured
    python -m benchmarks.slide results.jsonl --twin       the dense GEMM alone, where CUTLASS's was measured (TWIN)

Ours: `slide_linear` (quantise, lift, GEMM with scales and bias) on a dense weight and on the patterns 2:4, 4:6, 6:8.
Torch's, for int8: our quantiser (faster than any torch has), `_int_mm` (fewer than 17 tokens, which it refuses, are
padded to 32), and one compiled kernel that scales and casts; for float8: our quantiser and `_scaled_mm` by row (padded
to 64 where cuBLAS has no kernel); for both: bfloat16 F.linear. Two modes, the sides in turn in both. "burst": a graph
over rotating copies of the weights (up to 512 tokens, so that they come from memory), after a rest. "sustained", from
2048 tokens on: each side at least 60 ms under load before it is timed, since the power limit sets the clock. Ours is
compared with bfloat16 before it is timed. Rows below 1.0 are printed too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import macko.choose.times as tables
import macko.ops as ops
from benchmarks.floor import floor
from benchmarks.timing import append_jsonl, copies, provenance, sm_clocks, time_graph

#: Linears of Qwen2.5-7B (q, k and v as one, gate and up as one) and of Llama-2-7B.
SHAPES = {
    "qkv": (4608, 3584),
    "o": (3584, 3584),
    "gate_up": (37888, 3584),
    "down": (3584, 18944),
    "llama_qkv": (12288, 4096),
    "llama_o": (4096, 4096),
    "llama_gate_up": (22016, 4096),
    "llama_down": (4096, 11008),
}
PATTERNS = {"dense": 0, "2:4": 2, "4:6": 3, "6:8": 4}
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
#: The dense GEMM alone, microseconds under load on an H200: the best of CUTLASS 4.2's kernels with the same epilogue,
#: int8 and float8, found by trying its tiles and clusters at each number of tokens. Ours is to be no slower by 3 %.
TWIN = {
    ("qkv", 16): (8.2, 8.2),
    ("qkv", 128): (10.0, 10.0),
    ("qkv", 2048): (52.7, 61.1),
    ("qkv", 8192): (206.0, 228.0),
    ("o", 512): (14.3, 14.5),
    ("o", 2048): (44.9, 49.8),
    ("o", 16384): (320.0, 346.0),
    ("gate_up", 16): (36.2, 36.2),
    ("gate_up", 512): (114.0, 122.0),
    ("gate_up", 8192): (1679.0, 1876.0),
    ("down", 16): (20.7, 20.7),
    ("down", 64): (24.4, 24.4),
    ("down", 2048): (214.0, 238.0),
    ("down", 16384): (1609.0, 1727.0),
}
#: Most tokens whose time depends on where the weights are.
COLD_TOKENS = 512
#: Fewest tokens that are timed under load too, and most that are timed in bursts.
SUSTAINED_TOKENS, BURST_TOKENS = 2048, 8192

Calls = Sequence[Callable[[], Tensor]]


@torch.compile(dynamic=True)
def dequantise(sums: Tensor, token_scale: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return (sums * token_scale[:, None] * scale + bias).to(torch.bfloat16)


def int_mm(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    q, token_scale = ops.slide_quant_fused(x, 0, torch.int8)
    q = q[:, : x.shape[1]]
    if x.shape[0] <= 16:
        q = F.pad(q, (0, 0, 0, 32 - x.shape[0]))
    return dequantise(torch._int_mm(q, w.t())[: x.shape[0]], token_scale, scale, bias)


def scaled_mm(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor, least: int = 0) -> Tensor:
    """For `least` tokens or more: cuBLAS has no kernel for 32 or fewer of some long columns (18944: down)."""
    q, token_scale = ops.slide_quant_fused(x, 0, torch.float8_e4m3fn)
    q = q[:, : x.shape[1]]
    if x.shape[0] < least:
        q, token_scale = (F.pad(t, (0,) * (2 * t.dim() - 1) + (least - x.shape[0],)) for t in (q, token_scale))
    args: dict[str, Any] = {"bias": bias, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return torch._scaled_mm(q, w.t(), token_scale[:, None], scale[None], **args)[: x.shape[0]]


class Sustained:
    """Times sides in turn under load: each is run for warm_ms, then timed; medians over the rounds."""

    def __init__(self, sides: dict[str, Calls], graph_ms: float = 5.0) -> None:
        self.graphs, self.launches, self.graph_ms = {}, {}, graph_ms
        for name, calls in sides.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            calls[0]()
            start.record()
            calls[-1]()
            end.record()
            end.synchronize()
            self.launches[name] = max(1, int(graph_ms / max(start.elapsed_time(end), 0.01)))
            self.graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[name]):
                for i in range(self.launches[name]):
                    calls[i % len(calls)]()

    def run(self, rounds: int, warm_ms: float, timed_ms: float) -> dict[str, tuple[float, int]]:
        times: dict[str, list[float]] = {name: [] for name in self.graphs}
        clocks: dict[str, list[int]] = {name: [] for name in self.graphs}
        for turn in range(rounds):
            for name in sorted(self.graphs, reverse=turn % 2 == 1):
                warm, timed = (max(1, int(ms / self.graph_ms)) for ms in (warm_ms, timed_ms))
                events = [torch.cuda.Event(enable_timing=True) for _ in range(timed + 1)]
                for _ in range(warm):
                    self.graphs[name].replay()
                events[0].record()
                for event in events[1:]:
                    self.graphs[name].replay()
                    event.record()
                events[timed // 2].synchronize()
                clocks[name].append(sm_clocks()[0])
                events[-1].synchronize()
                times[name] += [a.elapsed_time(b) / self.launches[name] * 1e3 for a, b in pairwise(events)]
        return {name: (statistics.median(times[name]), round(statistics.median(clocks[name]))) for name in times}


def sides_of(name: str, weights: dict[str, Any], x: Tensor, bias: Tensor, ours: bool) -> dict[str, Calls]:
    """What is timed at these tokens: name -> the same call on different copies of the weight. `ours`: no other's."""
    dtype, tokens, cols = TYPES[name], *x.shape
    cold = tokens <= COLD_TOKENS
    sides: dict[str, Calls] = {}
    for pattern, n in PATTERNS.items():
        held = weights[pattern] if cold else weights[pattern][:1]
        sides[pattern] = [partial(ops.slide_linear, x, p, s, cols, n, dtype, bias) for p, s in held]
    if ours:
        return sides
    held = weights["torch"] if cold else weights["torch"][:1]
    if name == "int8":
        sides["torch"] = [partial(int_mm, x, w, s, bias) for w, s in held]
    elif name == "fp8":
        least = 0
        try:
            scaled_mm(x, held[0][0], held[0][1], bias)
        except RuntimeError as error:
            print(f"_scaled_mm refuses {tokens} x {cols}, padded to 64: {str(error).splitlines()[0][:70]}")
            least = 64
        sides["torch"] = [partial(scaled_mm, x, w, s, bias, least) for w, s in held]
    held = weights["bf16"] if cold else weights["bf16"][:1]
    sides["bf16"] = [partial(F.linear, x, w, bias) for (w,) in held]
    return sides


def burst(sides: dict[str, Calls], tokens: int) -> dict[str, tuple[float, int]]:
    """Medians of a graph's replays, the better one of two turns in opposite order; the clock is not asked for."""
    launches = 64 if tokens <= COLD_TOKENS else 4
    best = dict.fromkeys(sides, float("inf"))
    for turn in range(2):
        for side in sorted(sides, reverse=turn == 1):
            if tokens > COLD_TOKENS:
                torch.cuda.synchronize()
                time.sleep(0.02)
            timing = time_graph(sides[side], replays=5, warmup=1, min_launches=launches)
            best[side] = min(best[side], timing.median_us)
    return {side: (us, 0) for side, us in best.items()}


def weights_of(name: str, rows: int, cols: int) -> dict[str, Any]:
    """Packed and plain weights, in as many copies as exceed L2."""
    dense = torch.randn(rows, cols, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    weights: dict[str, Any] = {"bf16": copies([dense])}
    for pattern, n in PATTERNS.items():
        packed, scale, _ = ops.slide_pack(dense, n, TYPES[name], prune=True)
        weights[pattern] = copies([packed, scale])
        if pattern == "dense":
            weights["torch"] = copies([ops.slide_unpack(packed, scale, cols, 0, TYPES[name]), scale])
    return weights


def check(y: Tensor, plain: Tensor, name: str) -> None:
    """Ours on the dense weight against bfloat16, in the norm: rounding alone, and the steps of the quantised numbers.

    A step is absmax / 127 of int8, absmax being some 5 deviations; float8's is 2^-3 of the number. Errors of the two
    sides are independent, and each is at most half a step.
    """
    wanted = plain.float()
    off = ((y.float() - wanted).norm() / wanted.norm()).item()
    allowed = 2**0.5 * {"int8": 5 / 127 / 2, "fp8": 2.0**-4, "bf16": 0}[name] + 2.0**-8
    assert off < allowed, f"dense {name} is off by {off:.3g}, at most {allowed:.3g} is due to quantising"


def time_quantiser(name: str, cols: int, tokens: int, results: str, where: dict[str, Any]) -> None:
    """The quantiser alone, with the bytes that it has to read and write and the time of only reading as many."""
    x = torch.randn(tokens, cols, device="cuda").bfloat16()
    inputs = [c[0] for c in copies([x])] if tokens > COLD_TOKENS else [x]
    for pattern, n in PATTERNS.items():
        lifted, _ = ops.slide_quant_fused(x, n, TYPES[name])
        nbytes = x.numel() * 2 + lifted.numel() * lifted.element_size()
        calls = [lambda v=v, n=n: torch.ops.macko.slide_quant_fused(v, n, TYPES[name]) for v in inputs]
        us = time_graph(calls).median_us
        side = f"quantise {pattern}"
        floor_us = floor(nbytes).median_us
        about = {"type": name, "cols": cols, "tokens": tokens, "side": side, "us": us, "bytes": nbytes}
        append_jsonl(results, **about, floor_us=floor_us, **where)
        print(f"{name:5}{cols:15}{tokens:7} {side:14}{us:9.1f} us, {floor_us / us:.2f} of floor", flush=True)


def time_twin(name: str, results: str, where: dict[str, Any], args: argparse.Namespace) -> None:
    """The dense GEMM alone, under load, beside torch's of float8."""
    for shape in dict.fromkeys(shape for shape, _ in TWIN):
        rows, cols = SHAPES[shape]
        weights = weights_of(name, rows, cols)
        bias = torch.randn(rows, device="cuda").bfloat16()
        for tokens in (tokens for of, tokens in TWIN if of == shape):
            x = torch.randn(tokens, cols, device="cuda").bfloat16()
            q, token_scale = ops.slide_quant_fused(x, 0, TYPES[name])
            held = weights["dense"] if tokens <= COLD_TOKENS else weights["dense"][:1]
            calls = [
                lambda p=p, s=s, q=q, t=token_scale, cols=cols, bias=bias: ops.slide_gemm(
                    q, t, p, s, cols, 0, torch.bfloat16, bias
                )
                for p, s in held
            ]
            us, mhz = Sustained({"dense": calls}).run(args.rounds, args.warm_ms, args.timed_ms)["dense"]
            twin = TWIN[shape, tokens][name == "fp8"]
            fields = {"type": name, "shape": shape, "rows": rows, "cols": cols, "tokens": tokens, "side": "dense"}
            append_jsonl(results, **fields, mode="twin", us=us, cutlass_us=twin, sm_mhz_under_load=mhz, **where)
            print(f"{name:5}{shape:15}{tokens:7}{us:9.1f} us, CUTLASS {twin:.1f} ({twin / us:.2f})", flush=True)
        del weights
        torch.cuda.empty_cache()


def read(results: str) -> dict[tuple[str, str, str, int], dict[str, float]]:
    """Times by (gpu, type, shape, tokens), then by side; under load where that was measured."""
    times: dict[tuple[str, str, str, int], dict[str, float]] = defaultdict(dict)
    for line in sorted(map(json.loads, Path(results).read_text().splitlines()), key=lambda r: r.get("mode", "")):
        if "shape" in line and line.get("mode") != "twin":  # "burst" sorts before "sustained", which replaces it
            times[line["gpu"], line["type"], line["shape"], line["tokens"]][line["side"]] = line["us"]
    return times


def write_table(results: str) -> None:
    """Puts dense / pattern, for each shape and number of tokens, into the package's tables, for what they had of it."""
    fresh: dict[str, dict[tuple[str, str, int, int], tables.Line]] = defaultdict(dict)
    for (gpu, name, shape, tokens), sides in sorted(read(results).items()):
        rows, cols = SHAPES[shape]
        for pattern in list(PATTERNS)[1:]:
            line = {"rows": rows, "cols": cols, "dtype": name, "pattern": pattern, "gain": {}}
            gain = fresh[gpu].setdefault((name, pattern, rows, cols), line)["gain"]
            gain[str(tokens)] = round(sides["dense"] / sides[pattern], 3)
    for gpu, lines in fresh.items():
        put_gains(gpu, "slide", lines.values(), tables.slide_kind)


def put_gains(gpu: str, part: str, lines: Collection[tables.Line], kind: Callable[[tables.Line], Any]) -> None:
    """Puts lines into a part of the package's table of a GPU, for what it had of their kinds."""
    path = tables.SHIPPED / tables.file_name(gpu)
    head = {"version": tables.VERSION, "gpu": gpu, "bandwidth_gbps": 0, "slide": [], "codecs": [], "linear": []}
    table: dict[str, Any] = tables.read(path) if path.exists() else head
    kinds = set(map(kind, lines))
    kept = [line for line in table[part] if kind(line) not in kinds]
    tables.save(path, {**table, part: sorted([*kept, *lines], key=kind)})


def judge(results: str) -> None:
    """Prints what the choice loses at numbers of tokens that nobody measured: each is left out of the table in turn.

    The better kernel's time over the chosen one's: how often under 0.98, the least, and where.
    """
    losses: dict[tuple[str, str], list[tuple[float, str, int]]] = defaultdict(list)
    for (gpu, name, shape, tokens), sides in read(results).items():
        for pattern, n in list(PATTERNS.items())[1:]:
            known = tables.times(gpu)
            of_shape = next(
                line["gain"] for line in known.slide[name, pattern] if (line["rows"], line["cols"]) == SHAPES[shape]
            )
            left_out = of_shape.pop(str(tokens))
            gain = known.slide_gain(TYPES[name], n, SHAPES[shape], tokens)
            of_shape[str(tokens)] = left_out
            took = sides[pattern] if gain is None or gain >= 1 else sides["dense"]
            losses[name, pattern].append((min(sides[pattern], sides["dense"]) / took, shape, tokens))
    for (name, pattern), found in losses.items():
        under = sum(share < 0.98 for share, *_ in found)
        share, shape, tokens = min(found)
        print(f"{name:5} {pattern}: {under} of {len(found)} under 0.98; least {share:.3f}, {shape} at {tokens} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", default="benchmarks/results/slide.jsonl")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,16,32,64,96,128,192,256,384,512,1024,2048,4096,8192,16384")
    parser.add_argument("--types", default="int8,fp8")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm-ms", type=float, default=60)
    parser.add_argument("--timed-ms", type=float, default=40)
    parser.add_argument("--table", action="store_true", help="measure nothing, write the table from the results")
    parser.add_argument("--ours", action="store_true", help="only our kernels: more numbers of tokens for the table")
    parser.add_argument("--twin", action="store_true", help="the dense GEMM alone, where CUTLASS's was measured")
    parser.add_argument("--judge", action="store_true", help="measure nothing, judge the choice by the results")
    args = parser.parse_args()
    if args.table or args.judge:
        return write_table(args.results) if args.table else judge(args.results)
    where = provenance()
    counts = [int(count) for count in args.tokens.split(",") if count]
    if args.twin:
        for name in args.types.split(","):
            time_twin(name, args.results, where, args)
        return
    columns = [*PATTERNS, "torch", "bf16"]
    print(f"{where['gpu']}, torch {where['torch']}; us a linear, in brackets dense / it\n")
    print(f"{'type':5}{'shape':15}{'tokens':>7} " + "".join(f"{c:>16}" for c in columns))
    for name in args.types.split(","):
        for shape in args.shapes.split(","):
            rows, cols = SHAPES[shape]
            weights = weights_of(name, rows, cols) if counts else {}
            bias = torch.randn(rows, device="cuda").bfloat16()
            for tokens in counts:
                x = torch.randn(tokens, cols, device="cuda").bfloat16()
                sides = sides_of(name, weights, x, bias, args.ours)
                check(sides["dense"][0](), F.linear(x, weights["bf16"][0][0], bias), name)
                measured = {"burst": burst(sides, tokens)} if tokens <= BURST_TOKENS else {}
                if tokens >= SUSTAINED_TOKENS:
                    measured["sustained"] = Sustained(sides).run(args.rounds, args.warm_ms, args.timed_ms)
                for mode, times in measured.items():
                    for side, (us, mhz) in times.items():
                        fields = {"type": name, "shape": shape, "rows": rows, "cols": cols, "tokens": tokens}
                        fields |= {"side": side, "mode": mode, "us": us, "sm_mhz_under_load": mhz}
                        append_jsonl(args.results, **fields, **where)
                    dense_us = times["dense"][0]
                    cells = [
                        f"{times[c][0]:9.1f} ({dense_us / times[c][0]:4.2f})" if c in times else "-" for c in columns
                    ]
                    print(f"{name:5}{shape:15}{tokens:7} " + "".join(f"{c:>16}" for c in cells), mode, flush=True)
                del sides, x
            del weights
            torch.cuda.empty_cache()
        if args.ours:
            continue
        for cols, tokens in product(dict.fromkeys(SHAPES[shape][1] for shape in args.shapes.split(",")), (16, 8192)):
            time_quantiser(name, cols, tokens, args.results, where)


if __name__ == "__main__":
    main()
