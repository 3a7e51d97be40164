"""`macko inspect`: the matrices of a checkpoint: how they lie in it, and what they would take and gain packed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..choose.auto import DENSE12_SHARE, DENSE12_WEIGHTS, SPARSE11_LISTED, choosable, sparse11_of
from ..choose.exponents import bit_counts, have_codes, lacking
from ..choose.patterns import PATTERNS, countable, matching_patterns, pattern_names
from ..choose.times import Times, measured_gpus, packed_share, times, times_of
from ..files import Checkpoint
from ..integrations.compressed_tensors import Masked, masked, sparsity_format
from ..nn.convert import MIN_SPARSITY
from ..nn.find import IGNORED
from ..nn.linear import DTYPES
from ..nn.report import density_text, format_bytes, format_table
from ..weights import Dense12Weight, MackoWeight, PackedWeight, Sparse11Weight, TileWeight
from ..workdir import quantised_by

#: A matrix is looked at by so many elements at a time, or one row block of tile; and not at all where it has more
#: elements than these and so many a byte of its file: a shape takes no bytes, and a look up to 20 ns an element.
PANEL, ELEMENTS_A_BYTE = 2**20, 64
#: Columns of a panel at most: a multiple of tile's 256 and of the columns of every pattern.
PANEL_COLS = math.lcm(256, *(m for _, m in PATTERNS))
#: Bytes that a look at a matrix may take: so many a byte of its file, and these.
BYTES_A_BYTE, MORE_BYTES = 4, 2**25
#: The name of a matrix of one expert; and what gate's and up's are called, which are packed as one.
_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(\w+)(?:\.weight)?$")
_GATE_UP = ("gate_proj", "up_proj", "w1", "w3", "gate_up_proj")


def describe(source: Path, gpu: str | None = None) -> str:
    """A table of the matrices of a checkpoint: what they would take and gain here, or on the GPU that is named."""
    on_gpu = bool(gpu) or torch.cuda.is_available()
    expected = times(gpu) if gpu else times_of(None if on_gpu else torch.device("cpu"))
    table = _Table(expected, on_gpu)
    with Checkpoint(source) as file:
        method = quantised_by(file.config)
        others = [name for name in file if method and not name.endswith((".weight", ".bias"))]
        for name, weight, form, size in chain(matrices(file), single_experts(file)):
            table.add(name, Seen(weight, size), form, size if name in file.layers else None)
        table.end()
    lines = [str(table)]
    if others:
        lines.append(
            f"It is quantised by {method}: {others[0]} and tensors like it ({len(others)}) are not in the table."
        )
    lines += table.notes()
    if not on_gpu:
        lines.append('What it would take and gain on a GPU: --gpu "NVIDIA H200".')
    return "\n".join(lines)


class _Table:
    """The table of describe: a row a matrix, and sums.

    Args:
        times: of the GPU or CPU for which gains are expected.
    """

    def __init__(self, times: Times, on_gpu: bool) -> None:
        self.times, self.on_gpu = times, on_gpu
        self.us, self.total, self.memory = [0.0, 0.0], [0, 0], Memory()
        self.experts: dict[str, Experts] = {}
        titles = ("matrix", ">shape", ">density (sparse)", "n:m", "format", ">bytes", ">as macko", f">on {times.gpu}")
        self.rows: list[tuple[str, ...]] = [(*titles, *((">decode, at best", *Memory.titles) if on_gpu else ()))]

    def add(self, name: str, seen: Seen, form: str, packed_bytes: int | None) -> None:
        """A row; packed_bytes: of a matrix that the checkpoint has packed."""
        dtype, density = seen.weight.dtype, seen.density
        dense_bytes = seen.elements * dtype.itemsize
        share = min(1.0, packed_share(density, 8 * dtype.itemsize)) if dtype in DTYPES else 1.0
        after = round(dense_bytes * share) if packed_bytes is None else packed_bytes
        self.total = [self.total[0] + seen.file_bytes, self.total[1] + after]
        if match := _EXPERT.match(name):
            stack = f"{match[1]}.*.{'gate_up' if match[3] in _GATE_UP else match[3]}"
            self.experts.setdefault(stack, Experts()).add(name, seen, form, after)
            self.memory.add(name, seen, is_expert=True)
            return
        gain = f"{dense_bytes / after:.2f}x" if 0 < after < dense_bytes else "-"
        shape = "x".join(map(str, seen.shape))
        row = (shape, density_text(density), " ".join(seen.patterns), form, format_bytes(seen.file_bytes))
        more = (gain, *self.memory.add(name, seen)) if self.on_gpu else ()
        self.rows.append((name, *row, format_bytes(after), self._expected(name, seen), *more))

    def end(self) -> None:
        """A row for each projection of experts: there may be tens of thousands of matrices."""
        for name, experts in self.experts.items():
            row = (experts.shape, density_text(experts.density), "", experts.form, format_bytes(experts.file_bytes))
            listed = f"({experts.listed[0] / max(1, experts.elements):.4%})" if self.on_gpu else ""
            more = ("", "", "", listed) if self.on_gpu else ()
            self.rows.append((name, *row, format_bytes(experts.after), "", *more))

    def _expected(self, name: str, seen: Seen) -> str:
        """As "1.52x tile": the gain for one token in the fastest format; empty where nothing is known."""
        dtype, (rows, cols) = seen.weight.dtype, seen.shape
        if "embed" in name or dtype not in DTYPES or (dtype.itemsize != 2 and self.on_gpu):
            return ""
        found = self.times.us(rows, cols, seen.density, dtype)
        if not found:
            return ""
        found = {"dense": found["dense"], **choosable(found)}
        left = 1 - seen.density < MIN_SPARSITY or "lm_head" in name  # as sparsify_ leaves it
        best = "dense" if left else min(found, key=found.__getitem__)
        self.us = [self.us[0] + found["dense"], self.us[1] + found[best]]
        return f"{found['dense'] / found[best]:.2f}x {best}"

    def __str__(self) -> str:
        expected = f"{self.us[0] / self.us[1]:.2f}x" if self.us[1] else ""
        sums = ("all", "", "", "", "", *map(format_bytes, self.total), expected)
        table = [*self.rows, (*sums, *[""] * (len(self.rows[0]) - len(sums)))]
        # Of the columns after the bytes those that say something.
        columns = [i for i in range(len(table[0])) if i < 7 or any(row[i] not in ("", "-") for row in table[1:])]
        return format_table([[row[i] for i in columns] for row in table])

    def notes(self) -> list[str]:
        """What the columns are, a line each."""
        lines = [self.memory.note(), experts_note(self.experts.values())]
        if self.on_gpu:
            lines.append(
                "decode, at best: dense over packed bytes, what a layer gains for one token when memory alone decides."
            )
        how = "measured times where there are some, else a model fitted to those"
        if not self.times.at(1).measured:
            how = f"nobody measured it: fitted to another GPU's times; measured are {', '.join(measured_gpus())}"
            how += "; macko tune measures"
        if self.us[1]:
            lines.append(f"on {self.times.gpu}: time of one token dense over that of the fastest format ({how}).")
        return [line for line in lines if line]


class Seen:
    """What a look at a matrix says, which is taken by panels of rows: whole as dense, it may be many times its file.

    Attributes:
        density: non-zeros over all.
        patterns: n:m patterns that it holds.
        counts: of its bits (bit_counts), where it has 16; None also where nobody looked.
    """

    def __init__(self, weight: Tensor | PackedWeight | Masked, file_bytes: int) -> None:
        self.weight, self.file_bytes = weight, file_bytes
        self.shape, self.elements = weight.shape, math.prod(weight.shape)
        self.counts: Tensor | None = None
        self.patterns: list[str] = []
        if not isinstance(weight, Tensor) and not is_worth_it(weight, file_bytes):
            self.density = weight.density
            return
        patterns, nonzeros = list(PATTERNS) if self.elements else [], 0
        counts = torch.zeros(1 << 16, dtype=torch.int64) if weight.dtype in Dense12Weight.dtypes else None
        for panel in self._panels():
            patterns = matching_patterns(panel, patterns)
            if counts is None:
                nonzeros += int(countable(panel).count_nonzero())
            else:
                counts += bit_counts(panel)
        if counts is not None:
            nonzeros = int(counts.sum() - counts[0] - counts[0x8000])
        self.counts, self.patterns, self.density = counts, pattern_names(patterns), nonzeros / max(1, self.elements)

    def _panels(self) -> Iterator[Tensor]:
        """Dense pieces of whole row blocks of tile; of wide rows whole slabs and groups of every pattern."""
        for rows in self._rows():
            yield from (panel.contiguous() for panel in rows.split(PANEL_COLS, 1))

    def _rows(self) -> Iterator[Tensor]:
        (rows, cols), weight = self.shape, self.weight
        step = max(1, PANEL // max(256, cols) // 64) * 64
        if isinstance(weight, Masked):
            yield from weight.panels(step)
            return
        for first in range(0, rows if cols else 0, step):
            stop = min(rows, first + step)
            yield weight[first:stop] if isinstance(weight, Tensor) else weight.cut(0, first, stop).to_dense()

    def tile_bytes(self) -> int:
        slabs = TileWeight.num_slabs(*self.shape)
        panels = (TileWeight.from_macko(MackoWeight.from_dense(panel)) for panel in self._panels())
        return sum(panel.data.nbytes for panel in panels) + 4 * (slabs + 1)

    def sparse11_bytes(self) -> int | None:
        """None where auto would not take it. It is packed whole: from density 0.2 up that is in proportion."""
        if not _within(2 * Sparse11Weight.num_slabs(*self.shape) * 64 * 256, self.file_bytes):
            return None  # of few rows, which it fills up to 64
        weight = self.weight.to_dense() if isinstance(self.weight, Masked) else self.weight
        packed = sparse11_of(MackoWeight.from_dense(weight) if isinstance(weight, Tensor) else weight.to_macko())
        return packed.nbytes if packed else None

    def dense12_bytes(self, listed: int) -> int | None:
        """None where it does not hold the matrix, of which its table lacks so many."""
        assert self.counts is not None
        rows, cols = self.shape
        fullest, slabs = 0, -(-cols // 256)
        if 0 < listed <= self.elements // 100:
            lacks = ~have_codes(self.counts, self.weight.dtype, signed=False)
            for panel in self._panels():
                row, col = lacks[panel.view(torch.int16).int() & 0xFFFF].nonzero().unbind(1)
                fullest = max(fullest, int((row // 64 * slabs + col // 256).bincount(minlength=1).max()))
        return Dense12Weight.bytes_of(rows, cols, listed, fullest)


class Experts:
    """The matrices of a projection of all experts of a module, gate's and up's together, as they are packed.

    Attributes:
        listed: how many of their elements dense12's table lacks, where it is one for all, and one for each matrix.
        worst: the largest share that a matrix' own table lacks, and its name.
    """

    def __init__(self) -> None:
        self.matrices = self.elements = self.file_bytes = self.after = 0
        self.nonzeros, self.form, self.worst = 0.0, "", (0.0, "")
        self.sizes: tuple[int, ...] = ()
        self.counts: Tensor | None = None
        self.dtype, self.listed_each = torch.bfloat16, 0

    def add(self, name: str, seen: Seen, form: str, after: int) -> None:
        self.matrices, self.elements = self.matrices + 1, self.elements + seen.elements
        self.file_bytes, self.after = self.file_bytes + seen.file_bytes, self.after + after
        self.nonzeros += seen.density * seen.elements
        self.form, self.sizes = form, tuple(seen.shape)
        if seen.counts is not None:
            self.dtype = seen.weight.dtype
            self.counts = seen.counts if self.counts is None else self.counts + seen.counts
            listed, _ = lacking(seen.counts, self.dtype, signed=False)
            self.listed_each += listed
            self.worst = max(self.worst, (listed / max(1, seen.elements), name))

    @property
    def shape(self) -> str:
        return f"{self.matrices} x {'x'.join(map(str, self.sizes))}"

    @property
    def density(self) -> float:
        return self.nonzeros / max(1, self.elements)

    @property
    def listed(self) -> tuple[int, int]:
        of_all = 0 if self.counts is None else lacking(self.counts, self.dtype, signed=False)[0]
        return of_all, self.listed_each


def experts_note(all_experts: Iterable[Experts]) -> str:
    """What tables of their own would bring, as a line, or nothing."""
    found = [experts for experts in all_experts if experts.counts is not None]
    if not found:
        return ""
    elements, one, each = (sum(n) for n in zip(*((e.elements, *e.listed) for e in found), strict=True))
    share, name = max(experts.worst for experts in found)
    return (
        f"experts: dense12 lists {one / elements:.4%} of their weights with one table for all of a projection, as "
        f"macko packs them, and would list {each / elements:.4%} with one for each matrix"
        + (f", at most {share:.4%}, of {name}." if share else ".")
    )


def is_worth_it(weight: Tensor | PackedWeight | Masked, file_bytes: int) -> bool:
    """Whether a look takes memory and time in proportion to the file; one at what the file has dense always does."""
    if isinstance(weight, Tensor) or (isinstance(weight, PackedWeight) and weight.by_rows() is None):
        return isinstance(weight, Tensor)  # the rows of some formats cannot be had by themselves
    # Rows can be had by whole ones only, so dense ones of a row block have to fit; with what decoding takes besides.
    least = min(64, weight.rows) * weight.cols * (6 if isinstance(weight, Masked) else 2)
    few = weight.rows * weight.cols <= PANEL + ELEMENTS_A_BYTE * file_bytes
    return few and _within(least, file_bytes)


def _within(count: int, file_bytes: int) -> bool:
    """Whether so many bytes may be taken for a look at what takes file_bytes in its file."""
    return count <= BYTES_A_BYTE * file_bytes + MORE_BYTES


class Memory:
    """What matrices of 16 bits would take in the memory of a GPU of compute capability 9.0; nothing of others."""

    titles = (">as tile", ">as sparse11 (outside)", ">as dense12 (listed)")

    def __init__(self) -> None:
        self.dense = self.raw = self.exact = self.compressed = 0

    def add(self, name: str, seen: Seen, is_expert: bool = False) -> tuple[str, str, str]:
        """Counts one matrix; gives its cells: bytes, and the share of weights that the format's table lacks.

        is_expert: it is a part of a stack, whose weights say whether compress_ takes dense12.
        """
        if seen.counts is None or "embed" in name:
            return "", "", ""
        size = raw = exact = 2 * seen.elements
        tile = sparse11 = ""
        if 1 - seen.density >= MIN_SPARSITY:
            raw = exact = min(size, seen.tile_bytes())
            tile = format_bytes(raw)
            lacks, count = lacking(seen.counts, seen.weight.dtype, signed=True)
            shorter = seen.sparse11_bytes() if lacks <= SPARSE11_LISTED * count else None
            exact = raw if shorter is None else shorter
            sparse11 = f"{'-' if shorter is None else format_bytes(shorter)} ({lacks / max(1, count):.4%})"
        listed, _ = lacking(seen.counts, seen.weight.dtype, signed=False)
        compressed, dense12 = exact, seen.dense12_bytes(listed)
        if exact >= DENSE12_SHARE * size and (is_expert or seen.elements >= DENSE12_WEIGHTS) and dense12:
            compressed = min(exact, dense12)
        left = name.rpartition(".")[0].endswith(IGNORED)  # as sparsify_ leaves it
        self.dense, self.compressed = self.dense + size, self.compressed + compressed
        self.raw, self.exact = self.raw + (size if left else raw), self.exact + (size if left else exact)
        if dense12 is None:
            return tile, sparse11, "-"
        return tile, sparse11, f"{format_bytes(dense12)} ({listed / max(1, seen.elements):.4%})"

    def note(self) -> str:
        if not self.dense:
            return ""
        ways = {'sparsify_(values="raw")': self.raw, "sparsify_": self.exact, "compress_": self.compressed}
        text = ", ".join(f"{way} {format_bytes(size)}" for way, size in ways.items())
        return f"in memory on a GPU of compute capability 9.0, of {format_bytes(self.dense)}: {text}."


def single_experts(file: Checkpoint) -> Iterator[tuple[str, Tensor, str, int]]:
    """What matrices gives, of each expert of those that a checkpoint has in one tensor [experts, rows, cols]."""
    for name in file:
        stem, _, last = name.removesuffix(".weight").rpartition(".")
        if len(file.shape(name)) == 3 and stem.endswith("experts"):
            whole = file[name]
            for expert, weight in enumerate(whole if whole.dtype in DTYPES else ()):
                yield f"{stem}.{expert}.{last}.weight", weight, "dense", weight.nbytes


def matrices(file: Checkpoint) -> Iterator[tuple[str, Tensor | PackedWeight | Masked, str, int]]:
    """Of every matrix its name, itself, and in what format and how many bytes the checkpoint has it.

    Itself: dense, or canonical where its file is sparse; or as it is where that would be much more than its file.
    """
    weight: Tensor | PackedWeight | Masked
    form = sparsity_format(file.config) or ""
    under_masks = {key.removesuffix(".weight"): name for key, name in masked(file).items()} if form else {}
    matrices = [n for n in file if n.endswith(".weight") and len(file.shape(n)) == 2]
    for name in tqdm([*file.layers, *under_masks, *matrices], delay=1, leave=False):
        if name in file.layers:
            packed = file.packed(name)
            if (by_rows := packed.by_rows()) is not None:
                weight = by_rows
            else:
                dense_bytes = packed.rows * packed.cols * packed.dtype.itemsize
                weight = packed.to_dense() if _within(dense_bytes, packed.nbytes) else packed
            yield name, weight, packed.format, packed.nbytes
        elif name in under_masks:
            weight = Masked(file, under_masks[name])
            if len(weight.shape) == 2:
                yield name, weight, form, weight.nbytes
        else:
            dense = file[name]
            is_value = dense.is_floating_point() or dense.dtype == torch.int8
            yield name, dense, "dense" if is_value else str(dense.dtype).removeprefix("torch."), dense.nbytes
