"""How every benchmark of a GPU times (macko.timing), and what ran, for the record."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from macko.timing import COLD_BYTES, MIN_LAUNCHES, Timing, copies, time_graph

__all__ = ["COLD_BYTES", "MIN_LAUNCHES", "Timing", "append_jsonl", "copies", "provenance", "time_graph", "time_host"]


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


def append_jsonl(path: str | Path, /, **fields: Any) -> None:
    """Adds one line to a results file; a Timing becomes its fields."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as out:
        out.write(json.dumps({k: asdict(v) if isinstance(v, Timing) else v for k, v in fields.items()}) + "\n")
