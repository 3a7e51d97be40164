"""How every benchmark of a GPU times (macko.measure.timing), and what ran, for the record."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from macko.measure.timing import COLD_BYTES, MIN_LAUNCHES, capture, copies, time_replays

__all__ = ["COLD_BYTES", "MIN_LAUNCHES", "Timing", "append_jsonl", "copies", "provenance", "time_graph", "time_host"]


@dataclass(frozen=True)
class Timing:
    """Time of one call in microseconds over the replays of a graph."""

    median_us: float
    min_us: float
    max_us: float
    launches: int
    replays: int
    #: SM clock after the last replay; 0 where the driver does not report it. Below the maximum: power limit.
    clock_mhz: int = 0

    def rounded(self) -> dict[str, float]:
        """Its fields, to a nanosecond."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


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


#: Each SM writes how many cycles it has counted.
_READ_CYCLES = """.version 7.0
.target sm_75
.address_size 64
.visible .entry read_cycles(.param .u64 places)
{
    .reg .b32 %sm;
    .reg .b64 %place, %offset, %cycles;
    mov.u32 %sm, %smid;
    ld.param.u64 %place, [places];
    mul.wide.u32 %offset, %sm, 8;
    add.u64 %place, %place, %offset;
    mov.u64 %cycles, %clock64;
    st.global.u64 [%place], %cycles;
    ret;
}
"""


@cache
def _read_cycles() -> Callable[..., None]:
    return torch.cuda._utils._cuda_load_module(_READ_CYCLES, ["read_cycles"])["read_cycles"]  # type: ignore


class Cycles:
    """Cycles of the SMs between two places in the stream, so a mean clock; the driver says that of a moment."""

    def __init__(self) -> None:
        self.counts = torch.zeros(2, 1024, dtype=torch.int64, device="cuda")
        self.blocks = 4 * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count

    def read(self, at: int) -> None:
        """at: 0 or 1, which of the two places this is. Two of these blocks fill an SM, so every SM has some."""
        _read_cycles()((self.blocks, 1, 1), (1024, 1, 1), [self.counts[at]])

    def between(self) -> float:
        begin, end = self.counts
        return float((end - begin)[begin > 0].double().median())


def power_now() -> float:
    """Watts that the GPU takes, or 0."""
    found = _nvml()
    watts = ctypes.c_uint()
    if found:
        found[0].nvmlDeviceGetPowerUsage(found[1], ctypes.byref(watts))
    return watts.value / 1000


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
    graph, launches = capture(calls, min_launches)
    for attempt in range(3):
        times = time_replays(graph, launches, replays, warmup)
        clock, most = sm_clocks()
        if not rest or clock >= 0.97 * most or attempt == 2:
            break
        time.sleep(1)
    return Timing(statistics.median(times), min(times), max(times), launches, replays, clock)


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


def time_dense(w: Tensor, x: Tensor, **options: Any) -> tuple[Timing, Timing]:
    """One token by F.linear and by torch.mv, over cold copies of the weight; options are those of time_graph."""
    weights = [tensors[0] for tensors in copies([w])]
    linear = time_graph([partial(F.linear, x, c) for c in weights], **options)
    return linear, time_graph([partial(torch.mv, c, x) for c in weights], **options)


def time_waiting(call: Callable[[], Any], rounds: int) -> float:
    """Seconds of a call that waits for the GPU: the median."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[rounds // 2]


def results(name: str, gpu: str) -> Path:
    """Where lines of a GPU go that are not told where."""
    folder = gpu.lower().removeprefix("nvidia ").replace(" ", "-")
    return Path(__file__).parent / "results" / folder / name


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
