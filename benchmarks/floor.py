"""The floor: time of the best of several kernels that only read a number of bytes from cold memory."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from .timing import COLD_BYTES, Timing, time_graph

#: (16-byte loads in flight a thread, threads a block, blocks an SM; 0: one pass over the data).
KERNELS = (
    (8, 1024, 1),
    (8, 512, 2),
    (4, 1024, 2),
    (4, 512, 4),
    (4, 1024, 1),
    (4, 256, 0),
    (8, 256, 0),
    (2, 512, 0),
    (8, 128, 0),
)


@cache
def _library() -> ctypes.CDLL:
    source = Path(__file__).with_suffix(".cu")
    target = Path(tempfile.mkdtemp()) / "floor.so"
    major, minor = torch.cuda.get_device_capability()
    arch = f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"
    subprocess.run(["nvcc", "-O3", arch, "-shared", "-Xcompiler", "-fPIC", source, "-o", target], check=True)
    library = ctypes.CDLL(str(target))
    library.read_bytes.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        *[ctypes.c_int] * 4,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    return library


def floor(nbytes: int) -> Timing:
    """Time to read nbytes (rounded down to 16) once, by the best kernel of KERNELS."""
    nbytes = max(16, nbytes // 16 * 16)
    library, num_sms = _library(), torch.cuda.get_device_properties(0).multi_processor_count
    sink = torch.zeros(4, dtype=torch.int32, device="cuda")
    count = max(2, COLD_BYTES // nbytes + 1)
    buffers = list(torch.empty(count, nbytes, dtype=torch.uint8, device="cuda").random_(0, 256))

    def read(buffer: torch.Tensor, kernel: tuple[int, int, int]) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        error = library.read_bytes(buffer.data_ptr(), nbytes, *kernel, num_sms, sink.data_ptr(), stream)
        if error:
            raise RuntimeError(f"the floor kernel failed with CUDA error {error}")

    times = [time_graph([lambda b=b, k=k: read(b, k) for b in buffers], replays=7, warmup=1) for k in KERNELS]  # type: ignore[misc]
    return min(times, key=lambda t: t.median_us)
