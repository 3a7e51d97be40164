"""How every benchmark of a GPU times: cold L2, a CUDA graph, medians; and what ran, for the record.

A call is timed as part of a graph of many launches that rotate over copies of its inputs. The copies exceed the L2
cache by far, so each launch reads its weights from memory, as in a model; the graph takes the host's time away.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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


def time_host(call: Callable[[], Any], calls: int = 200, rounds: int = 20) -> float:
    """Microseconds of the host's time that one call takes: the best round, the GPU's queue empty at its start."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return best


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except OSError:
        return ""


def commit() -> str:
    """MACKO_COMMIT, which says what was copied to where this runs; else what git says."""
    return os.environ.get("MACKO_COMMIT") or _output_of("git", "describe", "--always", "--dirty") or "unknown"


def provenance() -> dict[str, Any]:
    """What ran: commit, GPU, driver, clocks, torch."""
    torch.cuda._sleep(1_000_000_000)  # half a second of work, so that the clocks are not those of an idle GPU
    smi = _output_of(
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu",
        "--format=csv,noheader,nounits",
    )
    driver, *clocks = [field.strip() for field in smi.splitlines()[0].split(",")] if smi else ["unknown"]
    names = ["sm_mhz", "memory_mhz", "max_sm_mhz", "power_limit_w", "temperature_c"]
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "commit": commit(),
        "gpu": properties.name,
        "num_sms": properties.multi_processor_count,
        "driver": driver,
        **dict(zip(names, clocks, strict=False)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def append_jsonl(path: str | Path, **fields: Any) -> None:
    """Adds one line to a results file; a Timing becomes its fields."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as out:
        out.write(json.dumps({k: asdict(v) if isinstance(v, Timing) else v for k, v in fields.items()}) + "\n")
