"""Times with cold caches: GPU work in a CUDA graph, CPU work by turns. For macko.tune and for every benchmark.

A call on a GPU is timed as part of a graph of many launches that rotate over copies of its inputs. The copies exceed
the L2 cache by far, so each launch reads its weights from memory, as in a model; the graph takes the host's time away.
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

#: Bytes that the copies must exceed together: six times the 50 MB of L2 of an H200.
COLD_BYTES = 300_000_000
#: Launches in one graph: the 2-3 us between an event and the first launch are shared by all of them.
MIN_LAUNCHES = 64


def copies(tensors: Sequence[torch.Tensor], cold_bytes: int = COLD_BYTES) -> list[list[torch.Tensor]]:
    """As many copies of a call's weights as exceed cold_bytes together, at least two; the first is the original."""
    nbytes = max(1, sum(t.nbytes for t in tensors))
    count = max(2, cold_bytes // nbytes + 1)
    return [list(tensors)] + [[t.clone() for t in tensors] for _ in range(count - 1)]


def time_calls(
    calls: Mapping[str, Sequence[Callable[[], Any]]], seconds: float = 0.3, rounds: int = 7
) -> dict[str, float]:
    """Median microseconds of a call on the CPU, by name: they take turns, and each its copies (see `copies`) in turn.

    At least `rounds` turns, and as many as fit into `seconds` for each name: what disturbs the machine disturbs all.
    """
    took: dict[str, list[float]] = {name: [] for name in calls}
    for many in calls.values():
        many[-1]()
    stop, turn = time.perf_counter() + seconds * len(calls), 0
    while turn < rounds or (time.perf_counter() < stop and turn < 1000):
        for name, many in calls.items():
            start = time.perf_counter()
            many[turn % len(many)]()
            took[name].append(1e6 * (time.perf_counter() - start))
        turn += 1
    return {name: statistics.median(times) for name, times in took.items()}


def read_gbps(nbytes: int = 1 << 30) -> float:
    """GB/s at which the CPU reads memory with torch's threads: a sum over so many bytes, the best of forty."""
    return nbytes / min(timeit.repeat(torch.ones(nbytes // 4).sum, repeat=40, number=1)) / 1e9


def capture(calls: Sequence[Callable[[], Any]], min_launches: int = MIN_LAUNCHES) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of at least so many launches, and their number. `calls`: the same work on copies of its inputs."""
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
    return graph, rounds * len(calls)


def time_replays(graph: torch.cuda.CUDAGraph, launches: int, replays: int = 15, warmup: int = 3) -> list[float]:
    """Microseconds of a launch, of each replay after the first ones."""
    times = []
    for _ in range(warmup + replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return times[warmup:]
