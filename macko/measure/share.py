"""`macko tune --share`: times of this GPU in one small file, for others: of the GPU, and nothing of its user."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from .. import FORMATS, __version__, _library
from ..choose.times import bandwidth_gbps, file_name
from .timing import capture, copies, time_replays

#: Rows and columns of linears of 7B and larger models.
SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (8192, 8192))
TOKENS = (1, 8, 16, 32, 64, 128, 512)
#: Formats that a layer is multiplied from; half of the values are zero, by magnitude.
TIMED = ("macko", "sell", "tile", "sparse11", "dense12", "dense8", "sparse8")
#: Where the file is to go.
WHERE = "a new issue of macko, by the form 'Times of a GPU' (.github/ISSUE_TEMPLATE/times.yml)"


def about_gpu(device: torch.device) -> dict[str, Any]:
    """What tells GPUs apart. Of drivers nvidia-smi is asked, if it is there: no serial number, no host, no process."""
    gpu = torch.cuda.get_device_properties(device)
    asked = ("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")
    driver: dict[str, str] = {}
    if smi := shutil.which("nvidia-smi"):
        # torch has a UUID without the beginning that nvidia-smi asks for.
        command = [smi, f"--id=GPU-{gpu.uuid}" if hasattr(gpu, "uuid") else "--id=0", "--format=csv,noheader,nounits"]
        ran = subprocess.run([*command, f"--query-gpu={','.join(asked)}"], capture_output=True, text=True)
        if ran.returncode == 0:
            driver = dict(zip(asked, map(str.strip, ran.stdout.split(",")), strict=False))
    return {
        "gpu": gpu.name,
        "capability": f"{gpu.major}.{gpu.minor}",
        "sms": gpu.multi_processor_count,
        "memory_gb": round(gpu.total_memory / 1e9, 1),
        "bandwidth_gbps": bandwidth_gbps(device),
        **driver,
        "torch": torch.__version__,
        "macko": __version__,
        "compiled_for": list(_library.cuda_arches),
        "slab_kernels": _library.slab_kernels(device)[0],
    }


def measure(
    rows: int, cols: int, tokens: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """A line for each number of tokens: microseconds by format, "dense" among them."""
    w = torch.randn(rows, cols, device=device).to(dtype)
    w[w.abs() < w[:64].abs().float().median()] = 0
    xs = {count: torch.randn(count, cols, device=device).to(dtype) for count in tokens}
    about = {"rows": rows, "cols": cols, "dtype": str(dtype).removeprefix("torch."), "density": 0.5}
    lines: list[dict[str, Any]] = [{**about, "tokens": count, "us": {}} for count in tokens]

    def add(name: str, calls: Any) -> None:
        for line in lines:
            some = [partial(call, xs[line["tokens"]]) for call in calls]
            line["us"][name] = round(statistics.median(time_replays(*capture(some), replays=7)), 3)

    with torch.no_grad():
        add("dense", [partial(lambda w, x: nn.functional.linear(x, w), copy) for (copy,) in copies([w])])
        for kind in (FORMATS[name] for name in TIMED):
            if not kind.runs(device, dtype, cols):
                continue
            packed = kind.from_dense(w)
            each = [dict(zip(packed.tensors(), of, strict=True)) for of in copies(list(packed.tensors().values()))]
            add(packed.format, [type(packed)(**tensors, **packed.sizes()).linear for tensors in each])
    return lines


def share(
    path: Path | None = None, device: torch.device | str = "cuda", progress: bool = True, shapes: Any = SHAPES
) -> Path:
    """Times all formats on a GPU, some minutes, and writes the file; default: macko-<gpu>.json in this folder."""
    where = torch.device(device)
    with torch.cuda.device(where):
        about = about_gpu(where)
        target = path or Path(f"macko-{file_name(about['gpu'])}")
        target.parent.mkdir(parents=True, exist_ok=True)  # before the time is spent
        dtype = torch.float16 if torch.cuda.get_device_capability(where) < (8, 0) else torch.bfloat16
        lines = [
            line
            for rows, cols in tqdm(shapes, disable=not progress, unit="shape", leave=False)
            for line in measure(rows, cols, TOKENS, where, dtype)
        ]
    text = ",\n".join(map(json.dumps, lines))
    target.write_text(f'{json.dumps(about)[:-1]}, "linear": [\n{text}\n]}}\n', encoding="utf-8")
    return target
