r"""Many tokens under load: a layer's product again and again, as in a prompt, where power decides the clock.

    python -m benchmarks.load --dtype bfloat16 --kernels zeros,dense12,sparse11,tile
    python -m benchmarks.load --shapes 4096x11008 --tokens 4096,8192 --kernels zeros,dense12,tile_128x256x1x0
    ncu --clock-control none --cache-control none -k 'regex:tile_many|nvjet' --csv --log-file l2.csv --metrics METRICS \
        python -m benchmarks.load --once --shapes 4096x11008 --tokens 4096 --kernels tile_128x256x1x0,tile_128x256x1x1

METRICS, with commas between them: dram__bytes_read.sum lts__t_sector_hit_rate.pct sm__cycles_elapsed.max
sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed.

benchmarks/spmm.py times cold launches of a GPU that has rested; this times what it sustains. Kernels are those of
benchmarks/spmm.py, and F.linear of the matrix before it was pruned. They take turns of --seconds, of which the second
half counts, in an order drawn anew each round. A line has the median of --rounds turns, and of each the mean clock, by
the cycles that the SMs counted, and the power that the driver reported; best_dense_us is that of the faster of dense
and zeros, for dense12 and dense8 of dense, as their matrix has no zeros. Each is checked before it is timed, as there.
Lines go to benchmarks/results/<gpu>/load.jsonl.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from macko import _library
from macko.measure.timing import capture, copies, time_replays

from .spmm import DTYPES, Kernel, make_mask
from .timing import Cycles, append_jsonl, power_now, provenance, results

#: Rows x columns: of the Llamas and Mistral, of Qwen2.5-7B (down), of FLUX.1's transformer (from 3072x3072 on).
SHAPES = (
    "4096x4096,11008x4096,4096x11008,8192x8192,12288x12288,28672x8192,8192x28672,36864x12288,5120x5120,6144x4096,"
    "14336x4096,4096x14336,3584x18944,3072x3072,9216x3072,12288x3072,18432x3072,3072x12288,3072x15360"
)
TOKENS = "1024,2048,4096,8192,16384"


class Turn:
    """A kernel's launches in a graph, of a few milliseconds, and its times by round."""

    def __init__(self, calls: Sequence[Callable[[], Tensor]], seconds: float) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        calls[0]()
        torch.cuda.synchronize()
        once = max(1e-5, time.perf_counter() - start)
        self.calls = calls  # the graph keeps no tensor alive
        self.graph, self.launches = capture(calls, max(2, min(256, int(0.01 / once))))
        self.seconds = seconds
        self.us: list[float] = []
        self.clocks: list[int] = []
        self.watts: list[float] = []
        self.replay_seconds = time_replays(self.graph, 1, replays=1, warmup=0)[0] / 1e6

    def warm_up(self, seconds: float) -> None:
        time_replays(self.graph, 1, replays=math.ceil(seconds / self.replay_seconds), warmup=0)

    def take(self) -> None:
        replays = max(1, math.ceil(self.seconds / 2 / self.replay_seconds))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        cycles = Cycles()
        events[0].record()
        for at, event in enumerate(events[1:]):
            for _ in range(replays):
                self.graph.replay()
            cycles.read(at)
            event.record()
        events[1].synchronize()
        time.sleep(0.6 * events[0].elapsed_time(events[1]) / 1e3)  # the second half is under way
        self.watts.append(power_now())
        events[2].synchronize()
        us = events[1].elapsed_time(events[2]) * 1e3
        self.us.append(us / replays / self.launches)
        self.clocks.append(round(cycles.between() / us))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="ROWSxCOLS,...")
    parser.add_argument("--tokens", default=TOKENS, help="comma separated")
    parser.add_argument("--density", type=float, default=0.5, help="of what is not dense12 or dense8")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--kernels", default="zeros,dense12,sparse11,tile", help="as of benchmarks.spmm")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", action="store_true", help="each once, dense first, for a profiler; no line")
    parser.add_argument("--stop", type=float, default=float("inf"), help="begin no further shape after these seconds")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>/load.jsonl")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    what = provenance()
    out = args.out or results("load.jsonl", what["gpu"])
    dtype, begin = DTYPES[args.dtype], time.monotonic()
    logs: dict[tuple[str, int], list[float]] = {}
    for shape in args.shapes.split(","):
        if time.monotonic() - begin > args.stop:
            print(f"stopped before {shape}: over {args.stop} s")
            break
        rows, cols = map(int, shape.split("x"))
        generator = torch.Generator(device="cuda").manual_seed(rows * 7 + cols)
        dense = torch.randn(rows, cols, device="cuda", generator=generator).bfloat16().to(dtype)
        pruned = torch.where(make_mask("magnitude", dense, args.density, generator), dense, torch.zeros_like(dense))
        weights = {name: dense if name.startswith(("dense", "fp8")) else pruned for name in args.kernels.split(",")}
        kernels = {name: Kernel(name, w) for name, w in weights.items()}
        for tokens in map(int, args.tokens.split(",")):
            x = torch.randn(tokens, cols, device="cuda", dtype=dtype, generator=generator)
            if args.once:
                F.linear(x, dense)
                for kernel in kernels.values():
                    with _library.plan(kernel.knobs):
                        kernel.calls(x)[0]()
                torch.cuda.synchronize()
                continue
            turns = {"dense": Turn([partial(F.linear, x, c) for (c,) in copies([dense])], args.seconds)}
            for name, kernel in kernels.items():
                with _library.plan(kernel.knobs):
                    calls = kernel.calls(x)
                    kernel.check(calls[0], weights[name], x)
                    turns[name] = Turn(calls, args.seconds)
            turns["dense"].warm_up(5 * args.seconds)
            order = list(turns.values())
            for _ in range(args.rounds):
                random.shuffle(order)
                for turn in order:
                    turn.take()
            us = {name: statistics.median(turn.us) for name, turn in turns.items()}
            shown = []
            for name, turn in turns.items():
                own = weights.get(name, dense) is dense
                best = us["dense"] if own else min(us["dense"], us.get("zeros", math.inf))
                about: dict[str, Any] = {"kernel": name, "rows": rows, "cols": cols, "tokens": tokens}
                about |= {"median_us": round(us[name], 2), "all_us": [round(t, 2) for t in turn.us]}
                about |= {"dense_us": round(us["dense"], 2), "best_dense_us": round(best, 2)}
                about |= {"clock_mhz": turn.clocks, "watts": turn.watts, "dtype": args.dtype}
                about |= {"density": 1.0 if own else args.density}
                append_jsonl(out, **about, **what)
                shown.append(f"{name} {us[name]:.0f} ({best / us[name]:.3f}) {statistics.median(turn.clocks):.0f}MHz")
                logs.setdefault((name, tokens), []).append(math.log(best / us[name]))
            print(f"{shape:>12} {tokens:5}  {'  '.join(shown)}", flush=True)
            del turns, x
        del kernels, weights, dense, pruned
        torch.cuda.empty_cache()
    for (name, tokens), values in sorted(logs.items()):
        mean, least = math.exp(statistics.fmean(values)), math.exp(min(values))
        print(f"{name:12} {tokens:5} tokens, over dense: geomean {mean:.3f}, least {least:.3f}, of {len(values)}")


if __name__ == "__main__":
    main()
