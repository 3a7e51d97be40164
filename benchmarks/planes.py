"""dense12 as files hold it, on one CPU core: python -m benchmarks.planes OUT.jsonl

A bfloat16 matrix of a 7B's shape, scales by row and column, to planes and to dense again, in memory that is there: so
glibc is told to keep it, or every call would pay a page fault for 4 KB. CPU time of this process, the best of several
rounds, in GB of bfloat16 a second; and the seconds that a 7B's linear layers take by that.
"""

from __future__ import annotations

import argparse
import ctypes
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu import machine
from benchmarks.timing import append_jsonl
from macko import _library
from macko.weights import Planes12Weight

ROWS, COLS = 11008, 4096
BYTES_7B = 13.48e9
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def gbps(work: Callable[[], Any], size: int, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return size / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    w = torch.randn(ROWS, COLS) * torch.exp(0.5 * torch.randn(ROWS, 1)) * torch.exp(0.3 * torch.randn(1, COLS))
    w = (w * 0.02).bfloat16()
    packed = Planes12Weight.from_dense(w)
    assert torch.equal(packed.to_dense().view(torch.int16), w.view(torch.int16))
    place = torch.empty_like(w)
    numbers = w.view(torch.uint8).numpy()
    for path in ("scalar", "avx2"):
        with _library.plan(f"cpu={path}"):
            for step, work in (
                ("pack", lambda: Planes12Weight.from_dense(w)),
                ("dense", packed.to_dense),
                ("check", packed.validate),
                ("checksum", lambda: zlib.crc32(numbers.data)),
                ("copy", lambda: place.copy_(w)),
            ):
                rate = gbps(work, w.nbytes, options.rounds)
                share = {"bytes_share": packed.nbytes / w.nbytes, "listed_share": packed.listed / w.numel()}
                print(f"{path} {step}: {rate:.2f} GB/s, a 7B {BYTES_7B / rate / 1e9:.1f} s")
                about = {"rows": ROWS, "cols": COLS, "dtype": "bfloat16", "cpu_path": path, "step": step}
                append_jsonl(options.out, **machine("cpu"), **about, **share, gbps=rate, s_7b=BYTES_7B / rate / 1e9)


if __name__ == "__main__":
    main()
