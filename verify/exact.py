"""Weights of every shape, density and exponent, through the formats that take bfloat16 apart: bit for bit, or refused.

    python -m verify.exact --cases 100000            # a quarter of an hour on one core; --device cuda on a GPU
    python -m verify.exact --cases 100000 --formats planes12

A case is a random matrix in dense12, sparse11, tile and planes12: packed, validated, unpacked, converted to the
canonical format and back, and in some cases written to a file (dense12 as planes12) and read. What a format lists, and
whether it refuses, is counted here anew. The line of counts says how many of the 2^16 patterns of a bfloat16 each
format has held.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import macko
from benchmarks.timing import append_jsonl, commit
from macko import SparseLinear
from macko.weights import Dense12Weight, MackoWeight, PackedWeight, Planes12Weight, Sparse11Weight, TileWeight

RESULTS = Path(__file__).parents[1] / "benchmarks/results/cpu/exact.jsonl"
KINDS: tuple[type[PackedWeight], ...] = (Dense12Weight, Sparse11Weight, TileWeight, Planes12Weight)
#: Rows and columns of a slab, and how many of its weights a list has room for; of dense12 also a share of them all.
SLAB = (64, 256)
MOST_LISTED = {Dense12Weight: 2032, Sparse11Weight: 2048}
LISTED_OF = 100
#: A case of so many goes through a file.
A_FILE = 20
DENSITIES = (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)


def size(random: torch.Generator) -> int:
    """Rows or columns: few, about those of a slab, or any up to two and a half of them."""
    kind, small, any_, near = (int(torch.randint(most, (), generator=random)) for most in (4, 9, 641, 7))
    return (small, near - 3 + 64, near - 3 + 256, any_)[kind]


def matrix(random: torch.Generator) -> Tensor:
    """A bfloat16 or float16 matrix [rows, cols] of some density and some range of exponents."""
    shape = size(random), size(random)
    kind, center, width, share, dtype = (int(torch.randint(most, (), generator=random)) for most in (4, 256, 9, 8, 4))
    bits = torch.randint(2**16, shape, generator=random)
    if kind == 0:  # numbers as they are trained, of any scale
        scale = 2.0 ** (center / 2 - 64)
        bits = (torch.randn(shape, generator=random) * scale).bfloat16().view(torch.int16).long() & 0xFFFF
    elif kind < 3:  # a few neighbouring powers of two, of either sign; of the last kind some others too
        high = center + torch.randint(1 + width, shape, generator=random)
        near = bits & 0x807F | high << 7 & 0x7F80
        far = torch.rand(shape, generator=random) < (0.0, 0.004)[kind - 1]
        bits = torch.where(far, bits, near)
    w = bits.to(torch.int16).view(torch.bfloat16)
    if dtype == 0:  # most was bfloat16 once
        w = w.half()
    elif dtype == 1 and kind:  # with exponents of five bits
        w = (
            (bits & 0xFFF8 | (bits & 7) * (torch.rand(shape, generator=random) < 0.002))
            .to(torch.int16)
            .view(torch.half)
        )
    kept = torch.rand(shape, generator=random) < DENSITIES[share]
    return torch.where(kept, w, torch.zeros((), dtype=w.dtype))


def bits_of(w: Tensor) -> Tensor:
    return w.cpu().contiguous().view(torch.int16).long() & 0xFFFF


def without_negative_zeros(w: Tensor) -> Tensor:
    return torch.where(w == 0, torch.zeros((), dtype=w.dtype), w)


def listed(kind: type[PackedWeight], w: Tensor) -> tuple[int, bool]:
    """How many weights the format's table lacks, and whether its lists have no room for them."""
    bits, half = bits_of(w), w.dtype == torch.float16
    whole = bits & 7 == 0 if half else torch.ones_like(bits, dtype=torch.bool)
    signed = kind is Sparse11Weight
    high = bits >> (11 if half else 8) & (0xFF if signed else 0x0F if half else 0x7F)
    held = bits & 0x7FFF != 0 if signed else torch.ones_like(whole)
    counts = high[held & whole & (high > 0)].bincount(minlength=256)
    order = sorted(range(1, 256), key=lambda one: (-int(counts[one]), one)) if counts.any() else []
    coded = torch.isin(high, torch.tensor(order[:7], dtype=torch.int64))
    lacks = held & ~(whole & (coded | ((high == 0) & (not signed))))
    rows, cols = w.shape
    padded = torch.nn.functional.pad(lacks, (0, -cols % SLAB[1], 0, -rows % SLAB[0]))
    slabs = padded.view(-(-rows // SLAB[0]), SLAB[0], -(-cols // SLAB[1]), SLAB[1]).sum((1, 3))
    fullest, total = int(slabs.max()) if slabs.numel() else 0, int(lacks.sum())
    too_many = kind is Dense12Weight and total > w.numel() // LISTED_OF
    return total, too_many or fullest > MOST_LISTED.get(kind, w.numel())


def same(kind: type[PackedWeight], found: Tensor, w: Tensor, what: str) -> None:
    wanted = w if kind.any_weight else without_negative_zeros(w)
    if found.dtype != w.dtype or not torch.equal(bits_of(found), bits_of(wanted)):
        raise AssertionError(f"{what} gives other bits")


def packed_bytes(packed: PackedWeight) -> list[bytes]:
    return [bytes(t.cpu().reshape(-1).view(torch.uint8).numpy()) for t in packed.tensors().values()]


def through_a_file(packed: PackedWeight, folder: Path) -> PackedWeight:
    """The weight that a layer has after save_model and load_model."""
    path, dense = folder / "model.safetensors", nn.Linear(packed.cols, packed.rows, bias=False, dtype=packed.dtype)
    model = nn.Sequential(SparseLinear.from_packed(packed))
    macko.save_model(model, path)
    again = SparseLinear.from_packed(packed) if packed.saved_dense else dense
    if packed.device.type in packed.device_types:
        loaded: Any = macko.load_model(nn.Sequential(again), path, device=packed.device, format=packed.format)
        return loaded[0].packed
    loaded = macko.load_model(nn.Sequential(again), path, format="macko")
    return type(packed).from_macko(loaded[0].packed)


def run(w: Tensor, kind: type[PackedWeight], device: torch.device, folder: Path | None) -> PackedWeight | None:
    """The weight in a format, everything about it compared; None where it has to be refused, and was."""
    total, refused = listed(kind, w) if kind is not TileWeight else (0, False)
    canonical = MackoWeight.from_dense(w.to(device)) if kind.is_layout else None
    try:
        packed = kind.from_macko(canonical) if canonical else kind.from_dense(w.to(device)).to(device)
    except ValueError as error:
        if not refused or f"lacks {total} of" not in str(error):
            raise
        return None
    if refused:
        raise AssertionError(f"it lists {total} and should be refused")
    if kind is not TileWeight and packed.listed != total:
        raise AssertionError(f"it says that it lists {packed.listed}, but {total} are")
    packed.validate()
    same(kind, packed.to_dense(), w, "unpacking")
    back = packed.to_macko()
    same(TileWeight, back.to_dense(), w, "the canonical weight")
    if canonical:
        if packed_bytes(back) != packed_bytes(canonical):
            raise AssertionError("the canonical weight has other bytes than what it was made from")
        if packed_bytes(kind.from_macko(back)) != packed_bytes(packed):
            raise AssertionError("packed again it has other bytes")
    if device.type == "cuda" and not kind.of_files and packed_bytes(kind.from_dense(w)) != packed_bytes(packed):
        raise AssertionError("a CPU packs other bytes")
    if folder is not None and w.numel() and not kind.of_files:
        again = through_a_file(packed, folder)
        same(kind, again.to_dense(), w, "a file")
        if packed_bytes(again) != packed_bytes(packed):
            raise AssertionError("after a file it has other bytes")
    return packed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verify.exact", description="Formats bit for bit, at random.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next ones count up from it")
    parser.add_argument("--formats", default=",".join(kind.format for kind in KINDS), help="comma separated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", metavar="FILE", help=f"where the line is appended; {RESULTS.name} has those of a CPU")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device, begun = torch.device(options.device), time.monotonic()
    kinds = [kind for kind in KINDS if kind.format in options.formats.split(",")]
    held: dict[str, Tensor] = {kind.format: torch.zeros(2**16, dtype=torch.bool) for kind in kinds}
    counts: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seed, options.seed + options.cases):
            w = matrix(torch.Generator().manual_seed(seed))
            for kind in kinds:
                name = kind.format
                try:
                    packed = run(w, kind, device, None if seed % A_FILE else Path(folder))
                except Exception as error:  # each is counted, and named by its seed
                    failures.append(f"{name}, case {seed}: {type(error).__name__}: {str(error)[:200]}")
                    continue
                counts[f"{name}, {'held' if packed else 'refused'}"] += 1
                counts["elements"] += w.numel() if packed else 0
                counts[f"{name}, listed"] += getattr(packed, "listed", 0)
                if packed is not None and w.dtype == torch.bfloat16:
                    held[name][bits_of(packed.to_dense()).flatten()] = True
    line = {
        "what": "exact", "commit": commit(), "device": options.device, "seconds": round(time.monotonic() - begun, 1),
        "cases": options.cases, "seed": options.seed, **counts,
        "files": options.cases // A_FILE * sum(not kind.of_files for kind in kinds),
        "patterns": {name: int(seen.sum()) for name, seen in held.items()},
        "failed": len(failures), "failures": failures[:20],
    }  # fmt: skip
    print(json.dumps(line))
    if options.out:
        append_jsonl(options.out, **line)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
