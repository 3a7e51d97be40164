"""Where a token's time goes on a GPU, dense and sparse: the kernels of one token of generate(), one JSON line each.

    python -m benchmarks.profile_token random:7b --compile max --batch 1 --new-tokens 100 --json bench.jsonl

Takes what `macko bench` takes, and does all that it does; the profiler comes after the times, as it slows down the
launches that follow. "busy" is the GPU's time, which a slow host does not change.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import torch
from torch import Tensor

from macko.cli import parser
from macko.measure.bench import generate, measure_all, run
from macko.measure.runs import Line, Result, Side, busy_us, gpu_events


class OneToken:
    """A streamer that profiles what lies between two tokens."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, -1
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def put(self, tokens: Tensor) -> None:
        self.seen += 1
        torch.cuda.synchronize()
        if self.seen == self.at:
            self.profile.__enter__()
        elif self.seen == self.at + 1:
            self.profile.__exit__(None, None, None)

    def end(self) -> None:
        pass


def profile_token(model: Any, prompts: Tensor, count: int, compiled: str) -> list[Line]:
    """What the GPU does for one of `count` tokens: launches and microseconds by kernel, and how long it is busy.

    Kernels that overlap (chained launches) count with their waiting, so their sum may exceed that.
    """
    generate(model, prompts, count, compiled)
    watch = OneToken(count // 2)
    generate(model, prompts, count, compiled, streamer=watch)
    events = gpu_events(watch.profile)
    kernels: dict[str, list[float]] = {}
    for event in events:
        kernels.setdefault(short(event.name), []).append(event.time_range.end - event.time_range.start)
    rows = [{"kernel": name, "launches": len(times), "us": sum(times)} for name, times in kernels.items()]
    rows.append({"kernel": "busy", "launches": len(events), "us": busy_us(events)})
    return sorted(rows, key=lambda row: -row["us"])  # type: ignore[operator,arg-type]


def short(name: str) -> str:
    """A kernel's name without its types; Triton's without its number, which differs from layer to layer."""
    for word in ("void ", "(anonymous namespace)::", "at::native::", "macko::"):
        name = name.replace(word, "")
    name = name.partition("(")[0].partition("<")[0] if not name.startswith("triton") else name.rstrip("0123456789_")
    return name[:60]


def profile_all(
    side: Side, model: Any, prompts: Tensor, options: argparse.Namespace, lines: list[Line]
) -> list[Result]:
    """What macko bench measures; prints the kernels at each batch size, and adds them to the lines that are written."""
    results = measure_all(side, model, prompts, options, lines)
    for batch in options.batch:
        prompt = prompts[:batch, : options.prompt_tokens[0]]
        rows = profile_token(model, prompt, 1 + options.new_tokens, options.compile)
        lines += [{"what": "profile", **dataclasses.asdict(side), "batch": batch, **row} for row in rows]
        print("\n".join(f"{row['us']:9.1f} us {row['launches']:4} {row['kernel']}" for row in rows), flush=True)
    return results


if __name__ == "__main__":
    options = parser().parse_args(["bench", *sys.argv[1:]])
    run(options, options.source, profile_all)
