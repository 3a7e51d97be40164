"""Times with cold caches: GPU work in a CUDA graph, CPU work by turns. For macko.tune and for every benchmark.

A call on a GPU is timed as part of a graph of many launches that rotate over copies of its inputs. The copies exceed
the L2 cache by far, so each launch reads its weights from memory, as in a model; the graph takes the host's time away.
"""

from __future__ import annotations

import ctypes
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
    #: SM clock behind the last replay; 0 where the driver does not say. Under the highest one: power limit.
    clock_mhz: int = 0


@cache
def _nvml() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """The driver's library and its handle of the current GPU."""
    handle = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
    failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
    return None if failed else (library, handle)


def sm_clocks() -> tuple[int, int]:
    """MHz of the SMs now and at most, or zeros."""
    found = _nvml()
    if not found:
        return 0, 0
    library, handle = found
    now, most = ctypes.c_uint(), ctypes.c_uint()
    library.nvmlDeviceGetClockInfo(handle, 1, ctypes.byref(now))
    library.nvmlDeviceGetMaxClockInfo(handle, 1, ctypes.byref(most))
    return now.value, most.value


def copies(tensors: Sequence[torch.Tensor], cold_bytes: int = COLD_BYTES) -> list[list[torch.Tensor]]:
    """As many copies of a call's weights as exceed cold_bytes together, at least two; the first is the original."""
    nbytes = max(1, sum(t.numel() * t.element_size() for t in tensors))
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


def time_graph(
    calls: Sequence[Callable[[], Any]],
    replays: int = 15,
    warmup: int = 3,
    min_launches: int = MIN_LAUNCHES,
    rest: bool = True,
) -> Timing:
    """Time of one call where `calls` are the same work on different copies of its inputs (see `copies`).

    rest: where the GPU has lowered its clock meanwhile (power limit: half a second of work of what came before counts),
    wait for a second and measure again, twice at most.
    """
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
    for attempt in range(3):
        times = []
        for replay in range(warmup + replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= warmup:
                times.append(start.elapsed_time(end) * 1000 / launches)
        clock, most = sm_clocks()
        if not rest or clock >= 0.97 * most or attempt == 2:
            break
        time.sleep(1)
    return Timing(statistics.median(times), min(times), max(times), launches, replays, clock)
