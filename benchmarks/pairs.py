"""Row pairs as lanes of the sell layout against sell itself, on a GPU of sm_90.

    python -m benchmarks.pairs [results.jsonl]

Rows are paired inside tiles of 128, those that share most columns first. Columns that both rows of a pair have stand
once, for both; the rest in single rows. Both parts are cut and laid out as sell is. Every sum is checked.
"""

# ruff: noqa: B023
from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.canonical import pruned
from benchmarks.timing import Timing, append_jsonl, copies, provenance, time_graph
from macko.formats import SellWeight
from tests.common import assert_close_spmv, random_weight

PROBLEMS = [
    (kind, *shape, density)
    for kind, shape in (
        ("uniform", (4096, 4096)),
        ("uneven_rows", (4096, 4096)),
        ("uniform", (11008, 4096)),
        ("uniform", (8192, 8192)),
        ("uniform", (8192, 28672)),
    )
    for density in (0.7, 0.5, 0.3)
]


class Part(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("data", "bases", "blocks", "perm", "out")]
    _fields_ += [("num_blocks", ctypes.c_int32), ("head", ctypes.c_int32)]

    @classmethod
    def of(cls, weight: SellWeight, data: Tensor, out: Tensor) -> Part:
        pointers = [t.data_ptr() for t in (data, weight.bases, weight.blocks, weight.perm, out)]
        return cls(*pointers, weight.blocks.shape[0], weight.head)


@cache
def library() -> ctypes.CDLL:
    target = Path(__file__).with_name("libpairs.so")
    if target.exists():
        return ctypes.CDLL(str(target))
    target = Path(tempfile.mkdtemp()) / "pairs.so"
    flags = ["-O3", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run(["nvcc", *flags, Path(__file__).with_suffix(".cu"), "-o", target], check=True)
    return ctypes.CDLL(str(target))


def paired(kept: Tensor, tile: int = 128) -> Tensor:
    """[rows / 2, 2] rows of each pair."""
    rows, cols = kept.shape
    of_tile = kept.view(rows // tile, tile, cols).half()
    shared = (of_tile @ of_tile.mT).float()
    shared.diagonal(dim1=1, dim2=2).fill_(-1)
    tiles, pairs = torch.arange(len(shared), device=kept.device), []
    for _ in range(tile // 2):
        best = shared.flatten(1).argmax(1)
        pair = torch.stack([best // tile, best % tile], 1)
        for row in pair.T:
            shared[tiles, row] = -1
            shared[tiles, :, row] = -1
        pairs.append(pair + tiles[:, None] * tile)
    return torch.cat(pairs)


def smallest(of_width: dict[int, SellWeight], value_bytes: int) -> tuple[int, SellWeight]:
    def nbytes(gap_bits: int) -> int:
        return of_width[gap_bits].data.numel() // (16 + gap_bits) * (16 * value_bytes // 2 + gap_bits)

    gap_bits = min(of_width, key=nbytes)
    return gap_bits, of_width[gap_bits]


def main() -> None:
    results = sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/h200/pairs.jsonl"
    ran_on = provenance()
    for kind, rows, cols, density in PROBLEMS:
        if sys.argv[2:] and f"{rows}x{cols}" not in sys.argv[2:]:
            continue
        if kind == "uniform":
            w = pruned(rows, cols, density, torch.float16)
        else:
            w = random_weight(rows, cols, density, torch.float16, kind=kind).cuda()
        x = torch.randn(cols, dtype=torch.float16, device="cuda")
        nnz = int(w.count_nonzero())
        first, second = paired(w != 0).T
        both = (w[first] != 0) & (w[second] != 0)
        common = [torch.where(both, w[row], 0) for row in (first, second)]
        rest = w.clone()
        rest[first] *= ~both
        rest[second] *= ~both
        pair_bits, upper = smallest({g: SellWeight.from_dense(common[0], gap_bits=g) for g in (3, 4, 5)}, 4)
        lower = SellWeight.from_dense(common[1], gap_bits=pair_bits)
        assert torch.equal(upper.perm, lower.perm)
        single_bits, single = smallest({g: SellWeight.from_dense(rest, gap_bits=g) for g in (3, 4, 5)}, 2)
        slots = [part.data.view(-1, 512 + 32 * pair_bits) for part in (upper, lower)]
        data = torch.cat([slots[0][:, :512], slots[1][:, :512], slots[0][:, 512:]], 1).flatten()
        sums = torch.zeros(rows, device="cuda"), torch.zeros(rows, device="cuda")
        assert upper.warps == single.warps

        def launch(stages: int, chained: int, pair_data: Tensor, single_data: Tensor) -> None:
            parts = Part.of(upper, pair_data, sums[0]), Part.of(single, single_data, sums[1])
            error = library().spmv_pairs_launch(
                ctypes.byref(parts[0]),
                pair_bits,
                ctypes.byref(parts[1]),
                single_bits,
                upper.warps,
                stages,
                cols,
                ctypes.c_void_p(x.data_ptr()),
                chained,
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
            if error:
                raise RuntimeError(f"CUDA error {error}")

        # As many stages of the ring as fit, and one less.
        taken = (cols + 2048) * 2 + 128 + 2 * 2176 * 4 + 512
        stage = upper.warps * (2048 + 64 * pair_bits)
        two, one = (
            (113 * 1024 - taken) // stage,
            (227 * 1024 - taken) // stage,
        )  # with two thread blocks an SM, with one
        most = min(6, two if upper.warps <= 8 and two >= 3 else one)
        for s in sums:
            s.fill_(float("nan"))
        launch(most, 0, data, single.data)
        y = sums[1].clone()
        y[first] += sums[0][::2]
        y[second] += sums[0][1::2]
        assert_close_spmv(y[:512], w[:512].float(), x.float(), chain=cols + 3)

        best: dict[str, Timing] = {}
        held = copies([data, single.data])
        whole = SellWeight.from_dense(w)
        held_whole = copies([whole.data])
        for chained in (0, 1):
            os.environ["MACKO_PDL"] = str(chained)
            name = "chained" if chained else "alone"
            times = [
                time_graph([lambda d=d, s=s: launch(s, chained, *d) for d in held])  # type: ignore[misc]
                for s in (most - 1, most)
            ]
            best["pairs " + name] = min(times, key=lambda t: t.median_us)
            calls = [
                lambda d=d: torch.ops.macko.sell_spmv(d, *whole._packed[1:], x, None)  # type: ignore[misc]
                for (d,) in held_whole
            ]
            best["sell " + name] = time_graph(calls)
        sizes = {
            "pairs": sum(t.nbytes for t in (data, single.data, upper.bases, single.bases, upper.perm, single.perm)),
            "sell": whole.nbytes,
        }
        gathers = {"pairs": 1 - int(both.sum()) / nnz, "sell": 1.0}
        for name, time in best.items():
            layout = name.split()[0]
            append_jsonl(
                results,
                **ran_on,
                mask=kind,
                rows=rows,
                cols=cols,
                density=density,
                variant=name,
                bytes_a_nonzero=sizes[layout] / nnz,
                gathers_a_nonzero=gathers[layout],
                gap_bits=[pair_bits, single_bits] if layout == "pairs" else whole.gap_bits,
                time=time,
            )
        print(
            f"{kind} {rows}x{cols} density {density}: "
            + ", ".join(f"{n} {t.median_us:.2f} us" for n, t in best.items())
            + f", {sizes['pairs'] / nnz:.3f} / {sizes['sell'] / nnz:.3f} B, {gathers['pairs']:.2f} gathers",
            flush=True,
        )


if __name__ == "__main__":
    main()
