"""Exact products, again and again, with every kernel in every way to launch it: a race gives one wrong in thousands.

    python -m verify.stress                      # ten minutes on each GPU; --minutes, --gpus, --jobs, --only tile
    python -m verify.stress --device cpu --minutes 0.1
    python -m verify.stress --once               # each small case once: what verify/sanitize.py runs under a tool

Weights and tokens are small integers, so every order of summation gives the same bits. All that a product reads has NaN
around it, and what it writes held NaN before. Results are compared on the device, element by element, which is never
waited for between two products, and counted there. A line of counts a device is appended to --out. Exit status 1: an
element was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import itertools
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import macko
from benchmarks.timing import append_jsonl, commit
from macko import FORMATS, EcWeight, MackoWeight, _library, ops
from macko.weights import (
    ByteWeight,
    Dense12Weight,
    PackedWeight,
    SellWeight,
    SlideWeight,
    TileWeight,
)
from macko.weights.base import PART_ROWS
from macko.weights.codes import KINDS, TYPES

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
#: Rows, columns and density. Of eight columns, for norms and gates; rings of stages that wrap several times, by columns
#: and by rows; the same of the kernel for few tokens with 64, which over 4096 columns dense12 has another for; odd
#: everywhere; less than a tile and a chunk; a weight that L2 holds, so that copies are fast; one that it does not. The
#: first come first where time is short.
SMALL = {
    "of eight": (136, 520, 0.9), "wide": (72, 9000, 0.5), "medium": (72, 4000, 0.5), "odd": (200, 1001, 0.3),
    "no tile": (63, 255, 0.5),
}  # fmt: skip
#: Of SMALL, what fills no tile, and a wide one, once in each type: for a tool that takes seconds a product. Of the wide
#: one tile's kernels, which take a time that grows with the columns there (40 s a product), get so many.
LEAN, LEAN_COLS = (("of eight", torch.float16), ("wide", torch.bfloat16)), 2600
OTHER_KERNELS = ("macko", "sell", "ec", "slide")
LARGE = {"tall": (20_011, 264, 0.5), "in L2": (4096, 4096, 0.5), "beyond L2": (11_008, 8192, 0.4)}
#: Products of a GPU between two looks at the clock, and of one graph.
BATCH = 64
OLD_COPIES = "copy=cp_async"
#: The kernel of GPUs without wgmma, for any number of tokens, with as much shared memory as those GPUs have.
RINGS = tuple(f"{OLD_COPIES},tile_tokens=1000000{more}" for more in ("", ",sms=2", ",shared_kb=163", ",shared_kb=99"))
GEMM_WAYS = ("128x320x1x1", "128x256x1x3", "128x160x2x1", "128x192x1x1", "192x128x2x1")
#: Of tile, which has blocks of 192 x 192, too; and clusters of four.
TILE_WAYS = (*GEMM_WAYS, "192x192x1x1", "192x192x2x1", "128x128x4x0", "128x192x4x0")
#: Of dense12 and sparse11.
OTHER_WAYS = (*GEMM_WAYS, "128x320x2x1", "128x256x1x1", "128x128x4x0")
#: Few blocks do all: with small matrices, too, rings of stages wrap, a block goes from tile to tile, tiles are split.
FEW_SMS = ("sms=2", "sms=6")
#: Keys of MACKO_PLAN that choose other kernels, or how many blocks there are.
KNOBS: dict[str, Sequence[str]] = {
    "sell": ("", *FEW_SMS, OLD_COPIES, "stream_tokens=1000000"),
    "tile": ("", *FEW_SMS, OLD_COPIES, *RINGS, *(f"tile_tokens=1000000,tile_gemm={way}" for way in TILE_WAYS)),
    "slide": ("", *FEW_SMS, OLD_COPIES, "slide_tile=128x64,slide_cluster=1x3", "slide_tile=128x128,slide_cluster=2x4"),
    "experts": ("", "tile_tokens=0,sms=2", "tile_tokens=1000,sms=2", "tile_tokens=1000,shared_kb=99"),
    **dict.fromkeys(("dense12", "sparse11"), ("", *FEW_SMS, *RINGS, *(f"tile_gemm={way}" for way in OTHER_WAYS))),
    **dict.fromkeys(("dense8", "sparse8"), ("", *FEW_SMS, *RINGS, *(f"tile_gemm={way}" for way in GEMM_WAYS))),
}
TOKENS = {
    "macko": (1, 3, 33),
    "bitmap": (1, 3, 7, 20),
    "sell": (1, 2, 4, 7, 19, 300),
    "tile": (1, 12, 20, 30, 40, 64, 65, 200, 700),
    "ec": (1, 33),
    "slide": (1, 40, 300),
    "dense12": (1, 12, 20, 30, 40, 64, 65, 200, 700),
    **dict.fromkeys(("sparse11", "dense8", "sparse8"), (1, 12, 20, 30, 40, 64, 65, 200, 700)),
}


class Case(NamedTuple):
    name: str
    call: Callable[[], Tensor]
    wanted: Tensor
    captures: bool = True  #: False: it waits for the device


class Problem(NamedTuple):
    name: str
    plan: str  #: keys of MACKO_PLAN with which its cases run
    cases: Callable[[], list[Case]]


#: Number of the next problem, each number once, also among processes.
Turn = Callable[[], int]


class Counts:
    """Products, elements and wrong elements; the latter on the device until they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.products, self.elements, self.wrong = device, 0, 0, 0
        self.problems, self.left = 0, 0  # done; of the first round, those not done
        self.failures: Counter[str] = Counter()
        self.by_way: Counter[str] = Counter()
        self.by_layout: Counter[str] = Counter()

    def add(self, name: str, way: str, products: int, elements: int, wrong: Sequence[Tensor]) -> None:
        """Waits for the device."""
        bad = sum(int(count) for count in wrong)
        self.products, self.elements, self.wrong = self.products + products, self.elements + elements, self.wrong + bad
        self.by_way[way] += products
        self.by_layout[name.partition(" ")[0]] += products
        if bad:
            self.failures[f"{name}, {way}"] += bad


def surrounded(t: Tensor) -> Tensor:
    """The same values in memory of which the bytes before and after are NaN, or -1, and are not t's."""
    count, around = t.numel() * t.element_size(), 4096
    buffer = torch.full((count + 2 * around,), 255, dtype=torch.uint8, device=t.device)
    inner = buffer[around : around + count]
    inner.copy_(t.contiguous().view(-1).view(torch.uint8))
    return inner.view(t.dtype).view(t.shape)


def integers(shape: Sequence[int], low: int, high: int, density: float, random: torch.Generator) -> Tensor:
    """int64, of the device of `random`."""
    t = torch.randint(low, high + 1, shape, device=random.device, generator=random)
    return t * (torch.rand(*shape, device=random.device, generator=random) < density)


def exact(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """x W^T + bias, of integers below 2^24, rounded once."""
    return (x.double() @ w.double().t() + bias.double()).to(w.dtype)


def packings(w: Tensor, small: bool) -> dict[str, Callable[[], PackedWeight]]:
    """Every layout of w that its device runs, with every width of what a decoder reads; slide's are in SLIDES."""
    made: dict[str, Callable[[], PackedWeight]] = {
        f"macko {bits} bits": partial(MackoWeight.from_dense, w, bits) for bits in (2, 4, 8)
    }
    if w.is_cuda:
        for bits in (0, *range(2, 7)) if small else (0,):
            made[f"sell {bits or 'chosen'} bits"] = partial(SellWeight.from_dense, w, gap_bits=bits)
    for kind in FORMATS.values():
        runs = kind.runs(w.device, w.dtype, w.shape[1]) or (kind is TileWeight and not w.is_cuda)  # by dense rows there
        if not runs or kind in (MackoWeight, SellWeight, SlideWeight):
            continue
        if issubclass(kind, ByteWeight):  # scales of 1: with others sums are rounded, and not as integers are
            for name, codes in zip(KINDS, TYPES, strict=True):
                ones = torch.ones(len(w), device=w.device)
                made[f"{kind.format} {name}"] = partial(kind.from_codes, w.to(codes), ones, w.dtype)
        else:
            made[kind.format] = partial(kind.from_dense, w)
    made["ec paper 4 bits"] = partial(EcWeight.paper, w)
    made["ec 1 lane, slabs"] = partial(EcWeight.from_dense, w, lanes=1, tile_rows=1024, max_slabs=4)
    return made


#: Patterns, elements, and the largest magnitude, which scales by one; 0: no scale.
SLIDES = {
    "slide 2:4": (2, 2, 0),
    "slide 6:8": (4, 2, 0),
    "slide dense": (0, 2, 0),
    "slide 6:8 int8": (4, 0, 127),
    "slide 2:4 float8": (2, 1, 448),
}


def slide(w: Tensor, n: int, element: int, largest: int, device: torch.device) -> SlideWeight:
    """A slide weight of a w without its pattern's zeros."""
    w = w.clone()
    if n:  # the pattern (2n-2):2n
        w[:, 1 :: 2 * n] = w[:, 3 :: 2 * n] = 0
    w[:, 0], w[:, 1] = largest, 0
    return SlideWeight.from_dense(w.to(device), n, 3 if element == 2 and w.dtype == torch.bfloat16 else element)


def with_list(w: Tensor, random: torch.Generator, device: torch.device) -> Dense12Weight:
    """A dense12 weight with w's signs. It has powers of 4, seven of them so often that the eighth, 1, is listed."""
    powers = 4 ** torch.randint(1, 8, w.shape, device=w.device, generator=random)
    rare = torch.rand(*w.shape, device=w.device, generator=random) < 0.005
    return Dense12Weight.from_dense((w.sign() * torch.where(rare, 1, powers)).to(w.dtype).to(device))


def packed_bytes(kind: type[PackedWeight], w: Tensor) -> Tensor:
    return bytes_of(kind.from_dense(w))


def bytes_of(packed: PackedWeight) -> Tensor:
    return torch.cat([t.reshape(-1).view(torch.uint8) for t in packed.tensors().values()])


def in_parts(packed: PackedWeight, x: Tensor, part_rows: tuple[int, ...]) -> Tensor:
    """The product stored as several matrices, put together again."""
    return torch.cat(list(packed._own_parts(x, part_rows)), -1)


def cases_of(
    name: str,
    packed: PackedWeight,
    w: Tensor,
    random: torch.Generator,
    largest: int,
    counts: Sequence[int],
    lean: bool,
    placed: Callable[[Tensor], Tensor],
) -> Iterator[Case]:
    """The products of one weight with `counts` of tokens, and what else its layout can do here. placed: puts a tensor
    where it is read.

    Numbers are made, and products are exact, where `random` and w are. lean: none without a bias, and norms and gates,
    which are kernels in front of the same products, with the first two numbers of tokens only.
    """
    dtype, (rows, cols) = w.dtype, w.shape
    bias, none = integers((rows,), -3, 3, 1, random).to(dtype), torch.zeros(rows, dtype=dtype, device=w.device)
    there = placed(bias)

    def case(about: str, call: Callable[[], Tensor], wanted: Tensor) -> Case:
        return Case(f"{name}, {about}", call, wanted.to(there.device))

    for nth, count in enumerate(counts):
        x = integers((count, cols), -1, 1, 1, random)
        if largest:
            x[:, 0], x[:, 1] = 0, largest
        x = x.to(dtype)
        if not lean:
            yield case(f"{count} tokens", partial(packed.linear, placed(x)), exact(x, w, none))
        yield case(f"{count} tokens, bias", partial(packed.linear, placed(x), there), exact(x, w, bias))
        if packed.stores_parts and not lean:
            third = rows // 3 // PART_ROWS * PART_ROWS
            parts = partial(in_parts, packed, placed(x), (third, third, rows - 2 * third))
            yield case(f"{count} tokens, parts", parts, exact(x, w, none))
        if there.is_cuda and cols % 8 == 0 and not largest and not (lean and nth > 1):
            # x of 1 and -1 is its own norm; silu(16) is 16 in 16 bits, and silu(0) 0.
            x = integers((count, cols), 0, 1, 1, random).mul(2).sub(1).to(dtype)
            scale = integers((cols,), 1, 2, 1, random).to(dtype)
            normed = partial(packed.norm_linear, placed(x), placed(scale), 0.0, there)
            yield case(f"{count} tokens, norm", normed, exact(x * scale, w, bias))
            gate = integers((count, cols), 0, 1, 1, random).mul(16).to(dtype)
            gated = partial(packed.gated_linear, placed(gate), placed(x), there)
            yield case(f"{count} tokens, gate", gated, exact(gate * x, w, bias))
    if rows == cols and not largest and "list" not in name:  # the second waits for what the first one writes
        x = integers((1, cols), -1, 1, 0.1, random).to(dtype)
        first = placed(x)
        yield case("1 token, twice", lambda: packed.linear(packed.linear(first)), exact(exact(x, w, none), w, none))
    if not isinstance(packed, SlideWeight) or packed.element > 1:
        yield case("dense", packed.to_dense, w)


#: Experts, and tokens of each: none, some, and more than a tile.
EXPERTS, ROUTINGS = 4, ((1, 0, 2, 5), (0, 70, 0, 30))


def expert_cases(
    name: str, make: Callable[[], PackedWeight], w: Tensor, random: torch.Generator, placed: Callable[[Tensor], Tensor]
) -> list[Case]:
    """Products with w [experts, rows, cols], which make() packs as one matrix; two tokens are of no expert."""
    packed, cases = make(), []
    packed = dataclasses.replace(packed, **{k: placed(t) for k, t in packed.tensors().items()})  # type: ignore[type-var]
    for counts in ROUTINGS:
        x = integers((sum(counts) + 2, w.shape[2]), -1, 1, 1, random).to(w.dtype)
        parts = [part.double() @ each.double().t() for part, each in zip(x.split([*counts, 2]), w, strict=False)]
        wanted = torch.cat([*parts, parts[0].new_zeros(2, w.shape[1])]).to(w.dtype)
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(packed.device)
        call = partial(ops.linear_experts, placed(x), *packed.packed, w.shape[1], placed(ends))
        cases.append(Case(f"{name}, {sum(counts)} tokens", call, wanted.to(packed.device)))
    return cases


def packing_cases(w: Tensor, name: str, device: torch.device) -> list[Case]:
    """Packed on both devices; what lies on one only, as a large w does, is compared with itself."""
    there = w.to(device)
    kinds = [kind for kind in FORMATS.values() if "cuda" in kind.device_types and w.dtype in kind.dtypes]
    kinds = [kind for kind in kinds if kind not in (SellWeight, SlideWeight)]
    if there.is_cuda:
        kinds = [kind for kind in kinds if kind.runs(device, w.dtype)]
    packs = [(kind, bytes_of(kind.from_dense(w)).to(device)) for kind in kinds]
    if there.is_cuda:
        packs.append((SellWeight, bytes_of(SellWeight.from_dense(there))))
    return [
        Case(f"{kind.format} packing {name}", partial(packed_bytes, kind, there), wanted, captures=False)
        for kind, wanted in packs
    ]


def problems(
    device: torch.device,
    small: bool,
    seed: int,
    placed: Callable[[Tensor], Tensor] = surrounded,
    lean: bool = False,
) -> Iterator[Problem]:
    """A problem's cases are made when its turn comes. placed: gives a tensor of the device another place there.

    What small ones need beside macko's kernels is computed on the CPU: a tool has to follow all that the GPU does.
    """
    random = torch.Generator("cpu" if small else device).manual_seed(seed)

    def put(t: Tensor) -> Tensor:
        return placed(t.to(device))

    def cases(full: str, keys: str, make: Callable[[], PackedWeight], w: Tensor | None, largest: int) -> list[Case]:
        packed = make()
        w = packed.to_dense().to(random.device) if w is None else w
        packed = dataclasses.replace(packed, **{k: placed(t) for k, t in packed.tensors().items()})  # type: ignore[type-var]
        counts: Sequence[int] = TOKENS.get(packed.format, TOKENS["tile"])
        if lean and "tile_gemm" in keys:  # fewer go another way, which others run
            counts = [count for count in counts if count > 64]
        return list(cases_of(full, packed, w, random, largest, counts, lean, put))

    for (shape, (rows, cols, density)), dtype in itertools.product(
        (SMALL if small else LARGE).items(), (torch.float16, torch.bfloat16)
    ):
        if lean and (shape, dtype) not in LEAN:
            continue
        w = integers((rows, cols), -2, 2, density, random).to(dtype)
        about = f"{shape} {rows}x{cols} {str(dtype).removeprefix('torch.')}"
        made: list[tuple[str, Callable[[], PackedWeight], Tensor | None, int]]
        made = [(name, make, w, 0) for name, make in packings(w.to(device), small).items()]
        for name, (n, element, largest) in SLIDES.items():
            if SlideWeight.runs(device, torch.float8_e4m3fn if element == 1 else dtype):
                made.append((name, partial(slide, w, n, element, largest, device), None, largest))
        if Dense12Weight.runs(device, dtype):
            made.append(("dense12 with a list", partial(with_list, w, random, device), None, 0))
        if lean and cols > LEAN_COLS:
            narrow = w[:, :LEAN_COLS].contiguous()
            made = [each for each in made if each[0].startswith(OTHER_KERNELS)]
            wide = packings(narrow.to(device), small).items()
            made += [(name, make, narrow, 0) for name, make in wide if not name.startswith(OTHER_KERNELS)]
            if Dense12Weight.runs(device, dtype):
                made.append(("dense12 with a list", partial(with_list, narrow, random, device), None, 0))
        for name, make, dense, largest in made:
            varied = device.type == "cuda" and ("sell" not in name or "chosen" in name)
            for keys in KNOBS.get(name.partition(" ")[0], ("",)) if varied else ("",):
                if keys in FEW_SMS and not small:
                    continue  # those wrap by themselves
                full = f"{name} {about} {keys}".rstrip()
                yield Problem(full, keys, partial(cases, full, keys, make, dense, largest))
        yield Problem(f"packing {about}", "", partial(packing_cases, w, about, device))
        if lean and cols > LEAN_COLS:
            continue
        stack = w[: rows // EXPERTS * EXPERTS].view(EXPERTS, -1, cols)
        filled = torch.nn.functional.pad(stack, (0, 0, 0, -stack.shape[1] % PART_ROWS)).view(-1, cols)
        for name, make in packings(filled.to(device), small).items():
            if FORMATS[name.partition(" ")[0]].stacks:
                for keys in KNOBS["experts"] if device.type == "cuda" else ("",):
                    full = f"experts {name} {about} {keys}".rstrip()
                    yield Problem(full, keys, partial(expert_cases, full, make, stack, random, put))


def compared(case: Case, wrong: Tensor) -> Tensor:
    """One product in memory that was NaN, compared where `wrong` is: NaN is wrong too. Gives what it made."""
    if case.captures and wrong.device == case.wanted.device:
        torch.full_like(case.wanted, float("nan"))  # freed at once: the product takes the same memory
    y, wanted = case.call().to(wrong.device), case.wanted.to(wrong.device)
    wrong += (y != wanted).sum() if case.captures or y.shape == wanted.shape else wanted.numel()
    return y


def eagerly(case: Case, until: float, wrong: Tensor) -> int:
    batch = BATCH if case.captures and wrong.is_cuda else 4  # a CPU takes longer, and so does packing
    for products in itertools.count(batch, batch):
        for _ in range(batch):
            compared(case, wrong)
        synchronize(wrong.device)
        if time.monotonic() > until:
            return products
    raise AssertionError


def replayed(case: Case, until: float, wrong: Tensor, chained: bool) -> int:
    """A graph's replays. Chained: its products follow each other without a kernel between, so each starts early."""
    compared(case, wrong)  # what a first call sets up cannot be captured
    torch.cuda.synchronize()
    count = max(2, min(BATCH, (1 << 28) // max(1, case.wanted.numel() * case.wanted.element_size())))
    graph, inner = torch.cuda.CUDAGraph(), torch.zeros_like(wrong)
    with torch.cuda.graph(graph):
        made = []
        for _ in range(count):
            y = case.call()
            if chained:
                made.append(y)
            else:
                inner += (y != case.wanted).sum()
                y.fill_(float("nan"))
        for y in made:
            inner += (y != case.wanted).sum()
            y.fill_(float("nan"))
    products = 1
    while True:
        for _ in range(4):
            graph.replay()
        products += 4 * count
        torch.cuda.synchronize()
        if time.monotonic() > until:
            wrong += inner
            return products


def side_by_side(cases: Sequence[Case], until: float, wrong: Tensor) -> int:
    """Two products at once, on streams of their own."""
    streams, counts = [torch.cuda.Stream() for _ in cases], [torch.zeros_like(wrong) for _ in cases]
    torch.cuda.synchronize()
    products = 0
    while not products or time.monotonic() < until:
        for _ in range(BATCH // 2):
            for case, stream, count in zip(cases, streams, counts, strict=True):
                with torch.cuda.stream(stream):
                    compared(case, count)
        products += BATCH // 2 * len(cases)
        torch.cuda.synchronize()
    for count in counts:
        wrong += count
    return products


def in_threads(cases: Sequence[Case], until: float, wrong: Tensor) -> int:
    """Two products at once, from Python threads."""
    counts, products = [torch.zeros_like(wrong) for _ in cases], [0] * len(cases)

    def work(i: int) -> None:
        products[i] = eagerly(cases[i], until, counts[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for count in counts:
        wrong += count
    return sum(products)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_ways(cases: Sequence[Case], seconds: float, counts: Counts, end: float = float("inf")) -> None:
    """Each case in each way to launch it, for so many seconds each; none that would begin after `end`."""
    for case, other in zip(cases, [*cases[1:], *cases[:1]], strict=True):
        ways: dict[str, Callable[[float, Tensor], int]] = {"eager": partial(eagerly, case)}
        if counts.device.type == "cuda" and case.captures:
            ways["graph"] = partial(replayed, case, chained=False)
            ways["chained"] = partial(replayed, case, chained=True)
        if case.captures and other.captures:
            together = side_by_side if counts.device.type == "cuda" else in_threads
            ways["two at once"] = partial(together, (case, other))
        for way, run in ways.items():
            if time.monotonic() > end:
                return
            wrong = torch.zeros((), dtype=torch.int64, device=counts.device)
            products = run(time.monotonic() + seconds, wrong)
            counts.add(case.name, way, products, products * case.wanted.numel(), [wrong])


def turn_of(path: Path) -> Turn:
    """Counts calls of all processes that count in this file."""
    path.touch()

    def turn() -> int:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            number = int(file.read() or 0)
            file.seek(0)
            file.write(str(number + 1))
        return number

    return turn


def named(all_problems: Iterator[Problem], only: str) -> list[Problem]:
    found = [problem for problem in all_problems if only in problem.name]
    if not found:
        raise SystemExit(f"no problem has {only!r} in its name")
    return found


def by_turns(device: torch.device, seed: int) -> Iterator[Problem]:
    """Small and large problems, of a CPU small ones, in an order of the seed's: one of each layout and plan, then
    another of each, and so on. So a short run has all kernels, and one of another seed other sizes first.
    """
    sizes = (True, False) if device.type == "cuda" else (True,)
    found = [problem for small in sizes for problem in problems(device, small, seed)]
    Random(seed).shuffle(found)
    kinds: dict[tuple[str, str], list[Problem]] = {}
    for problem in found:
        kinds.setdefault((problem.name.partition(" ")[0], problem.plan), []).append(problem)
    for one_of_each in itertools.zip_longest(*kinds.values()):
        yield from filter(None, one_of_each)


def run_for(device: torch.device, minutes: float, seed: int, only: str, turn: Turn, counts: Counts) -> None:
    """Round by round, with another seed each, until the time is over.

    A way to launch a case takes a slice of which a round has some 20,000 on a GPU; at least one batch of products.
    """
    end = time.monotonic() + minutes * 60
    slice_s = minutes * 60 / 40_000 if device.type == "cuda" else 0.0
    todo, round_, number = named(by_turns(device, seed), only), 0, turn()
    counts.left = len(todo)
    while time.monotonic() < end:
        if number // len(todo) > round_:
            round_ = number // len(todo)
            todo = named(by_turns(device, seed + round_), only)
        problem = todo[number % len(todo)]
        with _library.plan(problem.plan):
            run_ways(problem.cases(), slice_s, counts, end)
        counts.problems += time.monotonic() < end  # else it is not whole
        number = turn()
    counts.left = max(0, counts.left - counts.problems)


def run_once(
    device: torch.device, minutes: float, only: str, turn: Turn, counts: Counts, lean: bool, said: Callable[[], None]
) -> None:
    """Each case of the small problems once, eagerly, while there is time; said() after each problem.

    Tensors have nothing around: so a tool sees their ends.
    """
    end = time.monotonic() + minutes * 60
    todo = named(problems(device, True, 0, torch.Tensor.contiguous, lean), only)
    counts.left = len(todo)
    while time.monotonic() < end and (number := turn()) < len(todo):
        problem = todo[number]
        with _library.plan(problem.plan):
            for case in problem.cases():
                print(case.name, file=sys.stderr, flush=True)  # the last one, where it hangs
                wrong = torch.zeros((), dtype=torch.int64, device="cpu" if lean else device)
                compared(case, wrong)
                counts.add(case.name, "eager", 1, case.wanted.numel(), [wrong])
        counts.problems += 1
        counts.left -= 1
        said()


@contextlib.contextmanager
def whole_sums() -> Iterator[None]:
    """The library's partial sums stay in float32, as exact products need it."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = before


def stress(
    device: torch.device,
    minutes: float,
    seed: int = 0,
    only: str = "",
    once: bool = False,
    lean: bool = False,
    turn: Turn | None = None,
    tell: Callable[[dict[str, Any]], None] = lambda line: None,
) -> dict[str, Any]:
    """What was run on the device, as the line has it. turn: numbers of problems, where other processes have some.

    once: the small problems once; lean: LEAN of them; tell: gets the line after each of them, too.
    """
    counts, begun = Counts(device), time.monotonic()
    turn = turn or itertools.count().__next__

    def line() -> dict[str, Any]:
        return {
            "what": "stress",
            "commit": commit(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "seconds": round(time.monotonic() - begun, 1),
            "seed": seed,
            "only": only,
            "jobs": 1,
            "problems": counts.problems,
            "problems_left": counts.left,
            "products": counts.products,
            "elements": counts.elements,
            "wrong": counts.wrong,
            "by_way": dict(counts.by_way),
            "by_layout": dict(counts.by_layout),
            "wrong_cases": dict(counts.failures.most_common(20)),
        }

    with whole_sums(), torch.no_grad():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if once:
            run_once(device, minutes, only, turn, counts, lean, lambda: tell(line()))
        else:
            run_for(device, minutes, seed, only, turn, counts)
    return line()


def together(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One line of processes that took turns at the same problems."""
    line = dict(lines[0])
    for key in ("jobs", "problems", "products", "elements", "wrong"):
        line[key] = sum(each[key] for each in lines)
    for key in ("by_way", "by_layout", "wrong_cases"):
        line[key] = dict(sum((Counter(each[key]) for each in lines), Counter()))
    line["seconds"] = max(each["seconds"] for each in lines)
    first_round = max(each["problems"] + each["problems_left"] for each in lines)
    line["problems_left"] = max(0, first_round - line["problems"])
    return line


def _on_gpu(index: int, options: argparse.Namespace, turns: Path, results: Any) -> None:
    device = torch.device("cuda", index)
    torch.set_num_threads(1)
    results.put((index, stress(device, options.minutes, options.seed, options.only, turn=turn_of(turns))))


def on_gpus(gpus: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A line each, of --jobs processes."""
    spawn = torch.multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            spawn.Process(target=_on_gpu, args=(i, options, Path(folder, str(i)), results))
            for i in range(gpus)
            for _ in range(options.jobs)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit(f"exit statuses {[worker.exitcode for worker in workers]}")
    found = [results.get() for _ in workers]
    return [together([line for on, line in found if on == i]) for i in range(gpus)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verify.stress", description="Exact products by the ten thousand.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpus", type=int, default=0, help="at once; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes a GPU, that share the problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="TEXT", help="problems that have it in their name")
    parser.add_argument("--once", action="store_true", help="the small problems once, in one process")
    parser.add_argument("--lean", action="store_true", help="with --once: of them one size a type, with a bias only")
    parser.add_argument("--turns", type=Path, metavar="FILE", help="with --once: who counts there shares the problems")
    parser.add_argument("--out", help="where lines are appended; default: benchmarks/results/<device>/stress.jsonl")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and macko._library.cuda_missing:
        parser.error(macko._library.cuda_missing)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if options.once:
        turn = turn_of(options.turns) if options.turns else None
        # A line after each problem: a tool may be stopped, or end its process.
        tell = lambda line: print(json.dumps(line), flush=True)  # noqa: E731
        lines = [stress(device, options.minutes, 0, options.only, True, options.lean, turn, tell)]
    elif options.device == "cpu":
        lines = [stress(device, options.minutes, options.seed, options.only)]
    else:
        lines = on_gpus(options.gpus or torch.cuda.device_count(), options)
    for line in lines:
        print(json.dumps(line))
        folder = line["device"].lower().removeprefix("nvidia ").replace(" ", "-")
        if options.out != "" and not options.once:
            append_jsonl(options.out or RESULTS / folder / "stress.jsonl", **line)
    return 1 if any(line["wrong"] or not (line["products"] or options.once) for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
