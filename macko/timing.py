"""Times of GPU work: cold L2, a CUDA graph, medians. For macko.tune and for every benchmark.

A call is timed as part of a graph of many launches that rotate over copies of its inputs. The copies exceed the L2
cache by far, so each launch reads its weights from memory, as in a model; the graph takes the host's time away.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: Bytes that the copies must exceed together: six times the 50 MB of L2 of an H200.
COLD_BYTES = 300_000_000
#: Launches in one graph: the 2-3 us between an event and the first launch are shared by all of them.
MIN_LAUNCHES = 64


@dataclass(frozen=True)
class Timing:
    """Time of one call in microseconds over the replays of a graph."""

    median_us: float
    min_us: float
    max_us: float
    launches: int
    replays: int


def copies(tensors: Sequence[torch.Tensor], cold_bytes: int = COLD_BYTES) -> list[list[torch.Tensor]]:
    """As many copies of a call's weights as exceed cold_bytes together, at least two; the first is the original."""
    nbytes = max(1, sum(t.numel() * t.element_size() for t in tensors))
    count = max(2, cold_bytes // nbytes + 1)
    return [list(tensors)] + [[t.clone() for t in tensors] for _ in range(count - 1)]


def time_graph(
    calls: Sequence[Callable[[], Any]], replays: int = 15, warmup: int = 3, min_launches: int = MIN_LAUNCHES
) -> Timing:
    """Time of one call where `calls` are the same work on different copies of its inputs (see `copies`)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()  # lazy initialisation happens outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    rounds = -(-min_launches // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    launches = rounds * len(calls)
    times = []
    for replay in range(warmup + replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= warmup:
            times.append(start.elapsed_time(end) * 1000 / launches)
    return Timing(statistics.median(times), min(times), max(times), launches, replays)
