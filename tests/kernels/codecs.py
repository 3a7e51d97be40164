"""The slab codecs as test_slabs.py sees them: for each what it holds, its bytes by reference.py, and faults by message.

A source is what a codec packs: a dense weight, or codes with a scale a row. Who adds a codec adds a class here. At the
end the formats of rows, of which test_products.py asks what it asks of codecs.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from macko import _library
from macko.weights import FORMATS, SlabWeight, TileWeight, codes
from tests import reference
from tests.common import (
    CPU_DTYPES,
    HALVES,
    assert_close_library,
    assert_close_spmv,
    assert_same_bits,
    integer_problem,
    mask,
    random_vector,
    random_weight,
)
from verify import exact

#: Source of a weight, what tensors and sizes its bytes are, and a fault: a regular expression and the weight.
Source = Any
Bytes = tuple[dict[str, Tensor], dict[str, int]]
Faults = Iterator[tuple[str, SlabWeight]]


def chain(cols: int) -> int:
    """Roundings after a product, in units of 2^-24.

    Tensor cores align the 16 products of a step and the sum before it to the largest of them and cut them off at 2^-23
    of that: 17 times two units a step. Some 64 partial sums are added at the end.
    """
    return 2 * 17 * -(-cols // 16) + 64


def bits_of(*values: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(torch.int16).view(dtype)


def changed(
    made: Any, index: int | slice, value: int, kind: torch.dtype = torch.uint8, name: str = "data"
) -> SlabWeight:
    """With another value in a tensor that is seen as of this type."""
    tensor = getattr(made, name).clone()
    tensor.view(torch.uint8).view(kind)[index] = torch.tensor(value).to(kind)
    return dataclasses.replace(made, **{name: tensor})


def replaced(made: Any, **fields: Any) -> SlabWeight:
    return dataclasses.replace(made, **fields)


def longer(made: Any) -> Tensor:
    """Its data and 128 bytes more."""
    return torch.cat([made.data, torch.zeros_like(made.data[:64])])


def shifted(made: Any) -> SlabWeight:
    """Its data, two bytes past a multiple of 16."""
    return dataclasses.replace(made, data=torch.cat([made.data[:1], made.data])[1:])


def by_rows(tokens: int) -> bool:
    """Whether the GPU multiplies so many tokens by dense rows: without wgmma, as with MACKO_COPY=cp_async."""
    return tokens > _library.slab_kernels()[1]


def exceeds_shared(weight: TileWeight) -> bool:
    """Whether it does so from 33 tokens on, as two of the largest slabs do not fit beside 44 KB of tokens and sums into
    a block's shared memory (csrc/slab/ring_plan.h)."""
    said = re.search(r"shared_kb=(\d+)", os.environ.get("MACKO_PLAN", ""))
    shared = torch.cuda.get_device_properties("cuda").shared_memory_per_block_optin  # type: ignore[attr-defined]
    shared = min(shared, int(said[1]) << 10) if said else shared
    return _library.slab_kernels()[0] == "mma.sync" and 2 * 128 * weight.widest + (44 << 10) > shared


class Codec:
    """A codec for weights of one dtype; of bytes, with codes of one kind."""

    format: ClassVar[str]
    kinds: ClassVar[tuple[int, ...]] = (0,)
    #: Keys of MACKO_PLAN for its products.
    keys: ClassVar[str] = ""
    #: Whether it stores non-zeros alone, and whether a list has what its table of exponents lacks.
    is_sparse: ClassVar[bool] = True
    has_table: ClassVar[bool] = False
    #: Units of 128 bytes of a slab without values, and of one row more of values in each slice.
    head: ClassVar[int]
    #: Of how many elements reference.py packs a matrix quickly.
    quick: ClassVar[int] = 100_000
    #: (density, bytes a weight at least, and at most) of large ones.
    sizes: ClassVar[tuple[tuple[float, float, float], ...]]

    def __init__(self, dtype: torch.dtype, kind: int) -> None:
        self.dtype, self.kind, self.weight_type = dtype, kind, FORMATS[self.format]

    def __repr__(self) -> str:
        return f"{self.format}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def devices(self) -> tuple[str, ...]:
        return "cpu", "cuda"

    def source(
        self, rows: int, cols: int, density: float = 0.5, *, rare: float = 0.0, kind: str = "uniform", seed: int = 0
    ) -> Source:
        """Random, under a mask of this kind; rare: the share of values that a table may lack, NaN not among them."""
        return random_weight(rows, cols, density, self.dtype, kind=kind, seed=seed)

    def for_products(self, rows: int, cols: int, density: float = 0.5, *, rare: float = 0.005, seed: int = 0) -> Source:
        """The same without what overflows, and without denormals."""
        w = self.source(rows, cols, density, rare=rare, seed=seed).clamp(-4, 4)
        return torch.where(w.abs() < torch.finfo(w.dtype).tiny, 0, w) if self.is_sparse else w

    def exact(
        self, rows: int, cols: int, lacks: str = "none", density: float = 0.5, seed: int = 0
    ) -> tuple[Source, Tensor, Tensor]:
        """A source, x and y = W x in small integers; lacks: which of them a table lacks, "none", "some" or "all"."""
        return integer_problem(rows, cols, density, self.dtype, seed=seed)

    def packed(self, source: Source, device: str = "cuda", **options: int) -> Any:
        return self.weight_type.from_dense(source.to(device), **options)

    def dense(self, source: Source) -> Tensor:
        """What it gives back: of what is sparse no zero is negative."""
        return torch.where(source == 0, 0, source) if self.is_sparse else source

    def unrounded(self, source: Source) -> Tensor:
        """What products multiply with."""
        return source

    def where(self, kept: Tensor, source: Source) -> Source:
        """Zeros where it is not kept."""
        return torch.where(kept, source, 0)

    def rows(self, source: Source, stop: int) -> Source:
        """The first ones."""
        return source[:stop]

    def listed(self, source: Source) -> int:
        return exact.listed(self.weight_type, source)[0] if self.has_table else 0

    def bytes_of(self, source: Source) -> Bytes:
        raise NotImplementedError

    def again(self, made: Any) -> SlabWeight:
        """What is in a weight, packed anew, on the CPU."""
        return self.packed(made.to_dense(), "cpu")

    def faults(self, device: str) -> Faults:
        """What `validate` says of broken weights."""
        raise NotImplementedError

    def refused(self, made: Any) -> Faults:
        """What products say of broken weights, beside what x and bias may be."""
        yield "data begins 2 bytes past a multiple of 16", shifted(made)

    def x(self, *shape: int, seed: int = 1) -> Tensor:
        return random_vector(*shape, dtype=self.dtype, seed=seed)

    def assert_close(self, y: Tensor, source: Source, x: Tensor, bias: Tensor | None = None) -> None:
        """y against x W^T + bias, as the tensor cores round it, and by dense rows as the library does."""
        tokens = x.shape[:-1].numel()
        # Only slabs of tile are so large.
        too_large = y.is_cuda and tokens > 32 and self.format == "tile" and exceeds_shared(self.packed(source, "cpu"))
        if y.is_cuda and x.shape[-1] and not by_rows(tokens) and not too_large:
            # Of codes there is a product with the scale after the sums, and one addition.
            roundings = chain(x.shape[-1]) + 2 * (len(self.kinds) > 1)
            assert_close_spmv(y, self.unrounded(source), x, bias, chain=roundings)
        else:
            assert_close_library(y, self.dense(source), x, bias)


class Tile(Codec):
    format = "tile"
    head, quick = 21, 300_000
    sizes = ((0.1, 0, 0.44), (0.3, 0, 0.85), (0.5, 0, 1.25), (0.7, 0, 1.63))

    def bytes_of(self, source: Tensor) -> Bytes:
        data, offsets = reference.tile_pack(source)
        widest = max(offsets.diff().tolist(), default=0)
        return {"data": data, "offsets": offsets}, {"widest": widest, "entries": int(source.count_nonzero())}

    def faults(self, device: str) -> Faults:
        w = random_weight(65, 300, 0.5, self.dtype, seed=3)
        w[0, :8] = 1
        tile = self.packed(w, device)  # four slabs: 64 x 256, 64 x 44, 1 x 256, 1 x 44
        last, second = 64 * int(tile.offsets[3]), int(tile.offsets[1])
        unused = int((tile.data[1344 : 64 * second] == 0).nonzero()[-1]) + 1344

        def offset(index: int, value: int) -> SlabWeight:
            return changed(tile, index, value, torch.int32, "offsets")

        def data(index: int | slice, value: int) -> SlabWeight:
            return changed(tile, index, value, torch.int16)

        yield r"offsets\[0\] is 1", offset(0, 1)
        yield r"offsets\[1\] is -5", offset(1, -5)
        yield r"offsets\[2\] is 2147483647", offset(2, 2**31 - 1)
        yield r"offsets\[1\] is 20", offset(1, 20)
        yield rf"offsets\[1\] is {second + 278}", offset(1, second + 278)
        yield "widest is 277", replaced(tile, widest=277)
        yield "offsets ends with", replaced(tile, data=longer(tile))
        yield "slab 3 of row block 1: word 0 of its masks has a value outside", data(last + 1, 1)
        yield "slab 3 of row block 1: word 128 of its masks has a value outside", data(last + 256, 1)
        yield "slab 0 of row block 0 has another size than the 0 rows", data(slice(0, 1024), 0)
        yield "slab 0 of row block 0, byte 2562: not the row", data(1281, 7)
        yield "slab 0 of row block 0, byte 2686: not the row", data(1343, 1)
        yield "slab 3 of row block 1, byte 2052: not the spill offset", data(last + 1026, 3)
        yield "slab 0 of row block 0, byte 2688: a zero is stored", data(1344, -(2**15))
        yield rf"byte {2 * unused}: .*, or what is no value is not zero", data(unused, -(2**15))
        yield "entries is 7", replaced(tile, entries=7)
        yield "offsets has 5 elements, expected 7", replaced(tile, cols=600)
        yield "offsets has 5 elements, expected 3", replaced(tile, rows=64)
        yield "rows is -65", replaced(tile, rows=-65)
        yield "cols is 4611686018427387904", replaced(tile, cols=2**62)
        yield "data has 9 elements", replaced(tile, data=tile.data[:9])
        yield "offsets has dtype int64", replaced(tile, offsets=tile.offsets.long())
        yield "data has dtype float32, expected float16 or bfloat16", replaced(tile, data=tile.data.float())

    def refused(self, made: Any) -> Faults:
        yield from super().refused(made)
        yield "widest is 278, expected 21 to 277", replaced(made, widest=278)


class Sparse11(Codec):
    format = "sparse11"
    has_table = True
    head = 53
    sizes = tuple((density, density, (3 + 0.4) / 8 + density * 1.12) for density in (0.3, 0.5, 0.7))
    #: High bytes of a table; those of float16 are of its upper 13 bits.
    highs: ClassVar = {
        torch.bfloat16: (0x3A, 0x3B, 0x3C, 0x3D, 0xBB, 0xBC, 0xBD),
        torch.float16: (0x02, 0x03, 0x04, 0x05, 0x13, 0x14, 0x15),
    }
    #: Where the parts of a slab begin, in bytes; docs of the bytes are in sparse11.h.
    starts_at, parts_at, end_at = 6144, 6656, 6720

    def numbers(self, high: Tensor, low: Tensor) -> Tensor:
        return ((high << 8 | low) << (3 if self.dtype == torch.float16 else 0)).to(torch.int16).view(self.dtype)

    def source(
        self, rows: int, cols: int, density: float = 0.5, *, rare: float = 0.0, kind: str = "uniform", seed: int = 0
    ) -> Tensor:
        """Values of seven high bytes, and so large a share of any others, small and large."""
        random, shape, highs = torch.Generator().manual_seed(seed), (rows, cols), torch.tensor(self.highs[self.dtype])
        high = highs[torch.randint(len(highs), shape, generator=random)]
        w = self.numbers(high, torch.randint(1, 256, shape, generator=random))
        others = torch.randint(2**16, shape, generator=random).to(torch.int16).view(self.dtype)
        w = torch.where(torch.rand(shape, generator=random) < rare, others, w).nan_to_num(1, 1, -1)
        return torch.where(mask(kind, rows, cols, density, seed), w, 0)

    def exact(
        self, rows: int, cols: int, lacks: str = "none", density: float = 0.5, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Columns where x is zero have seven high bytes so often that those of integers are not among the commonest
        ("all"), or six and that of 1 ("some")."""
        w, x, y = integer_problem(rows, cols, density, self.dtype, seed=seed)
        if lacks != "none":
            one = 0x3F if self.dtype == torch.bfloat16 else 0x07
            highs = [*self.highs[self.dtype][: 7 if lacks == "all" else 6], *([one] if lacks == "some" else [])]
            filling = torch.tensor(highs)[
                torch.randint(len(highs), w.shape, generator=torch.Generator().manual_seed(2))
            ]
            w = torch.where(x != 0, w, self.numbers(filling, torch.tensor(0x80)))
        return w, x, y

    def bytes_of(self, source: Tensor) -> Bytes:
        data, offsets, sizes = reference.sparse11_pack(source)
        names = ("widest", "table_low", "table_high", "entries", "listed")
        return {"data": data, "offsets": offsets}, dict(zip(names, sizes, strict=True))

    def faults(self, device: str) -> Faults:
        w = self.source(65, 300)  # four slabs: 64 x 256, 64 x 44, 1 x 256, 1 x 44
        w[1, :6] = (2.0 ** torch.arange(-60.0, -54.0)).bfloat16()
        w[2, 10], w[2, 12], w[0, 0] = float("inf"), float("nan"), 0
        made = self.packed(w, device)
        assert made.listed == 8
        words = made.data.view(torch.uint8).view(torch.int32)
        list_at = int(words[self.parts_at // 4]) >> 16
        last, end = int(made.offsets[3]) * 128, int(made.offsets[1]) * 128
        at, entry = "slab 0 of row block 0", int(words[list_at // 4])
        offsets, one_less = made.offsets, torch.tensor([1, 1, 0, 1, 1], dtype=torch.int32, device=device)
        start = int(made.data.view(torch.uint8)[self.starts_at])

        def word(index: int, value: int) -> SlabWeight:
            return changed(made, index // 4, value, torch.int32)

        yield "byte 0 of its table", replaced(made, table_low=made.table_low + 1)
        yield "byte 7 of its table", replaced(made, table_high=made.table_high & 0xFFFFFF | 1 << 24)
        yield r"offsets\[0\] is 1, expected 0 at the start", replaced(made, offsets=offsets + 1)
        yield r"offsets\[2\] is 0, expected .* 53 to", replaced(made, offsets=offsets * one_less)
        yield "widest is 90, the largest slab has", replaced(made, widest=90)
        yield "offsets ends with .*, data has", replaced(made, data=longer(made))
        ones = self.packed(torch.ones(64, 256, dtype=self.dtype), device)
        yield f"{at}, byte 0: a code of no high byte", changed(ones, 0, 7)
        yield "slab 3 of row block 1, byte 16: a code", changed(made, last + 16, 1)
        yield f"{at}, byte {self.starts_at}: not the start", changed(made, self.starts_at, start + 1)
        part = int(words[self.parts_at // 4])
        yield f"{at}, byte {self.parts_at}: not where a part", word(self.parts_at, part + 128)
        yield f"{at}, byte {self.end_at}: not where a part", word(self.end_at, 0)
        yield f"{at}, byte {self.end_at + 4}: not where a part", word(self.end_at + 4, 1)
        yield f"{at}, byte {list_at + 4}: not after the place before", word(list_at + 4, entry)
        yield f"{at}, byte {list_at}: not after the place before", word(list_at, -1)
        yield f"{at}, byte {list_at}: a listed value is zero", word(list_at, entry & ~0x7FFF)
        yield f"{at}, byte {end - 1}: a zero is stored, or what", changed(made, end - 1, 1)
        wide = torch.cat([made.data[: end // 2], torch.zeros_like(made.data[:64]), made.data[end // 2 :]])
        behind = offsets + (torch.arange(5, dtype=torch.int32, device=device) > 0)
        yield f"{at} has another size than the", replaced(made, data=wide, offsets=behind, widest=made.widest + 1)
        yield "entries is 7, it has", replaced(made, entries=7)
        yield "table_low is -1, expected 0 to", replaced(made, table_low=-1)
        yield "widest is 52, expected 53 to", replaced(made, widest=52)
        yield "data has dtype float32, (sparse11 holds|expected)", replaced(made, data=made.data.float())
        yield "data begins 2 bytes past a multiple of 16", shifted(made)

    def refused(self, made: Any) -> Faults:
        yield from super().refused(made)
        yield "offsets has 2 elements, expected 3", replaced(made, cols=300)


class Dense12(Codec):
    format = "dense12"
    is_sparse, has_table = False, True
    head, quick = 193, 300_000
    sizes = ((1.0, 1.5, 1.52),)  # 1.5, and a slab's list: its parts and the longest list, filled up to 128 bytes
    #: Where each part of a slab begins, in bytes; docs of the bytes are in dense12.h.
    parts_at, list_at = 24576, 24640

    def source(
        self, rows: int, cols: int, density: float = 1.0, *, rare: float = 0.0, kind: str = "uniform", seed: int = 0
    ) -> Tensor:
        """Normal values, and so large a share of others, small and large, of which the table lacks most.

        In float16, where eight values are half of all exponents there are, also some with lower bits than bfloat16 has.
        """
        random = torch.Generator().manual_seed(seed)
        w = torch.randn(rows, cols, generator=random) / 30
        others = w.sign() * 2.0 ** torch.randint(-60, 9, w.shape, generator=random)
        chosen = torch.rand(w.shape, generator=random) < rare
        w = torch.where(chosen, others, w).bfloat16().to(self.dtype)
        if self.dtype == torch.float16:
            w = torch.where(w.abs() < 2.0**-14, 0.25, w)  # no denormals: their lower bits are anything
            w.view(torch.int16)[chosen] |= 5
        return torch.where(w == 0, 1, w)

    def exact(
        self, rows: int, cols: int, lacks: str = "none", density: float = 1.0, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Columns where x is zero have seven exponents so often that those of integers are not among the commonest
        ("all"), or six and that of 1 ("some")."""
        # Few columns have an x in bfloat16: for both dtypes, as a table may lack one of a hundred.
        w, x, y = (t.to(self.dtype) for t in integer_problem(rows, cols, 1.0, torch.bfloat16, seed=seed))
        if lacks != "none":
            half = self.dtype == torch.float16
            highs = [*((1, 2, 3, 4, 5, 6, 9) if half else range(20, 62, 6))][: 7 if lacks == "all" else 6]
            highs += [7 if half else 63] if lacks == "some" else []
            filling = torch.tensor(highs)[
                torch.randint(len(highs), w.shape, generator=torch.Generator().manual_seed(2))
            ]
            filling = filling << 11 if half else filling << 8 | 0x80
            w = torch.where(x != 0, w, filling.to(torch.int16).view(self.dtype))
        return w, x, y

    def bytes_of(self, source: Tensor) -> Bytes:
        data, sizes = reference.dense12_pack(source)
        return {"data": data}, dict(zip(("slab_units", "table_low", "table_high", "listed"), sizes, strict=True))

    def faults(self, device: str) -> Faults:
        w = torch.full((65, 300), 1.5).bfloat16()  # four slabs: 64 x 256, 64 x 44, 1 x 256, 1 x 44
        w[:, ::2] = -0.01
        w[1, :50] = (2.0 ** torch.arange(-100.0, -50.0, 10)).repeat(10).bfloat16()  # with the others seven exponents
        w[2, :10] = (2.0 ** torch.tensor([-50.0, -40.0])).repeat(5).bfloat16()
        w[2, 10], w[2, 12] = float("inf"), float("nan")
        made = self.packed(w, device)
        assert made.listed == 12
        slab, table = made.slab_units * 128, made.table_low
        first, at = int(made.data.view(torch.uint8).view(torch.int32)[self.list_at // 4]), "slab 0 of row block 0"

        def word(index: int, value: int) -> SlabWeight:
            return changed(made, index, value, torch.int32)

        part, entry = self.parts_at // 4, self.list_at // 4
        yield "byte 0 of its table", replaced(made, table_low=table + 1)
        yield "byte 2 of its table", replaced(made, table_low=table & 0xFF00FFFF | (table & 0xFF00) << 8)
        yield "byte 7 of its table", replaced(made, table_high=made.table_high & 0xFF00FFFF)
        yield f"{at}: part 0 of its list", word(part, 1)
        yield f"{at}: part 1 of its list", word(part + 1, 0)
        yield f"{at}: part 15 of its list", word(part + 15, 2000 << 16 | 12)
        yield f"{at}: entry 1 of its list is not after", word(entry + 1, first)
        yield f"{at}: entry 0 of its list is not after", word(entry, first | 1 << 10)
        yield f"{at}: entry 0 of its list has a code", word(entry, first & 0xFFFF | 0x3FC0 << 16)
        yield "slab 3 of row block 1, byte 2: an element outside", changed(made, 3 * slab + 2, 1)
        yield "slab 3 of row block 1, byte 1088: an element outside", changed(made, 3 * slab + 1088, 0x80)  # -0.0
        yield f"{at}, byte {slab - 1}: not zero after the list", changed(made, slab - 1, 1)
        yield "listed is 7, it has 12", replaced(made, listed=7)
        for units in (0, 192, 257):
            yield f"slab_units is {units}, expected 193 to 256", replaced(made, slab_units=units)
        yield "data has .* elements, expected .* in slabs of 194 units", replaced(made, slab_units=194)
        yield "data has dtype float32, (dense12 holds|expected)", replaced(made, data=made.data.float())
        half = replaced(made, data=made.data.view(torch.float16))
        yield "byte 2 of its table: .* under 128 .float16: 16", half
        yield "data begins 2 bytes past a multiple of 16", shifted(made)
        zero = self.packed(torch.zeros(64, 256, dtype=self.dtype), device)
        yield "byte 1024: a code is not the lowest", changed(zero, 1024, 1)
        wide = torch.nn.functional.pad(made.data.view(4, -1), (0, 64)).reshape(-1)
        yield "slab_units is 194, the fullest slab needs 193", replaced(made, data=wide, slab_units=194)
        others = (changed(made, i, 1) for i in range(self.list_at))  # another low byte, where that is the list's fault
        listed = next(other for other in others if int(torch.ops.macko.check(*other.packed)[0]) == 4)
        yield f"{at}: entry .* what stands there is not", listed

    def refused(self, made: Any) -> Faults:
        yield from super().refused(made)
        yield "table_low is -1, expected 0 to", replaced(made, table_low=-1)
        yield "data has .* elements, expected", replaced(made, cols=300)


class OfCodes(Codec):
    """Sources are codes [rows, cols] and scales [rows]."""

    kinds = (0, 1)

    def __repr__(self) -> str:
        return f"{super().__repr__()}-{codes.KINDS[self.kind]}"

    def source(
        self, rows: int, cols: int, density: float = 0.5, *, rare: float = 0.0, kind: str = "uniform", seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Codes of every value but -0.0 and NaN."""
        random = torch.Generator().manual_seed(seed)
        bytes_ = torch.randint(0, 256, (rows, cols), generator=random, dtype=torch.uint8)
        if not self.kind:
            bytes_ = torch.where(bytes_ & 127 == 127, 1, torch.where(bytes_ == 128, 0, bytes_))
        held = torch.where(mask(kind, rows, cols, density, seed), bytes_, 0).view(codes.TYPES[self.kind])
        return held, torch.rand(rows, generator=torch.Generator().manual_seed(seed)) / 100 + 0.001

    def for_products(
        self, rows: int, cols: int, density: float = 0.5, *, rare: float = 0.005, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        return self.source(rows, cols, density, seed=seed)

    def exact(
        self, rows: int, cols: int, lacks: str = "none", density: float = 0.5, seed: int = 0
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """Rows have powers of two for scales: exact in every order of summation."""
        w, x, y = integer_problem(rows, cols, density if self.is_sparse else 1.0, self.dtype, seed=seed)
        scales = 2.0 ** torch.randint(-3, 4, (rows,), generator=torch.Generator().manual_seed(3))
        return (w.float().to(codes.TYPES[self.kind]), scales), x, (y.float() * scales).to(self.dtype)

    def packed(self, source: tuple[Tensor, Tensor], device: str = "cuda", **options: int) -> Any:
        held, scales = source
        return self.weight_type.from_codes(held.to(device), scales.to(device), self.dtype)  # type: ignore[attr-defined]

    def dense(self, source: tuple[Tensor, Tensor]) -> Tensor:
        return (source[0].float() * source[1][:, None]).to(self.dtype)

    def unrounded(self, source: tuple[Tensor, Tensor]) -> Tensor:
        return source[0].double() * source[1].double()[:, None]

    def where(self, kept: Tensor, source: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.where(kept, source[0].view(torch.uint8), 0).view(source[0].dtype), source[1]

    def rows(self, source: tuple[Tensor, Tensor], stop: int) -> tuple[Tensor, Tensor]:
        return source[0][:stop], source[1][:stop]

    def again(self, made: Any) -> SlabWeight:
        return self.packed((made.codes(), made.scales), "cpu")

    def scale_faults(self, made: Any) -> Faults:
        for value in (0.0, -1.0, 2.0**122, float("inf")):
            scales = made.scales.index_fill(0, torch.tensor([64], device=made.device), value)
            yield "the scale of row 64 is not above 0 and below 2.122", replaced(made, scales=scales)
        yield "scales has 64 elements, the matrix has 65 rows", replaced(made, scales=made.scales[1:])
        yield "scales has dtype float16, expected float32", replaced(made, scales=made.scales.half())
        yield "kind is 2, expected 0, 1", replaced(made, kind=2)


class Dense8(OfCodes):
    format = "dense8"
    is_sparse = False
    sizes = ((1.0, 1 + 4 / 1024, 1 + 4 / 1024),)

    def bytes_of(self, source: tuple[Tensor, Tensor]) -> Bytes:
        return {"data": reference.dense8_pack(source[0], self.dtype), "scales": source[1]}, {"kind": self.kind}

    def faults(self, device: str) -> Faults:
        made = self.packed(self.source(65, 300), device)
        yield from self.scale_faults(made)
        if not self.kind:
            yield "slab 0 of row block 0, byte 0: NaN or -0.0", changed(made, 0, 0x7F)
            yield "slab 0 of row block 0, byte 9: NaN or -0.0", changed(made, 9, 0x80)
        yield "slab 2 of row block 1, byte 2047: an element outside", changed(made, 2 * 16384 + 2047, 3)
        yield "data has 32760 elements, expected 32768 for a matrix of 65 x 300", replaced(made, data=made.data[:-8])


class Sparse8(OfCodes):
    format = "sparse8"
    head = 21
    sizes = ((0.5, 0.69, 0.71),)

    def bytes_of(self, source: tuple[Tensor, Tensor]) -> Bytes:
        data, offsets, sizes = reference.sparse8_pack(source[0], self.dtype)
        tensors = {"data": data, "offsets": offsets, "scales": source[1]}
        return tensors, dict(zip(("widest", "kind", "entries"), sizes, strict=True))

    def faults(self, device: str) -> Faults:
        made, at = self.packed(self.source(65, 300), device), "slab 0 of row block 0"
        yield from self.scale_faults(made)
        end, start = int(made.offsets[1]) * 128, int(made.data.view(torch.uint8)[2048])
        yield r"offsets\[0\] is 1, expected 0 at the start", replaced(made, offsets=made.offsets + 1)
        yield "widest is 90, the largest slab has", replaced(made, widest=90)
        yield "widest is 20, expected 21 to 149", replaced(made, widest=20)
        yield "entries is 7, it has", replaced(made, entries=7)
        yield "offsets ends with .*, data has", replaced(made, data=longer(made))
        yield "slab 1 of row block 0, byte 1020: a mask has a value outside", changed(made, end + 1023, 255)
        yield f"{at}, byte 2048: not the start of these values", changed(made, 2048, start + 1)
        yield f"{at}, byte 2560: not where a slice's values begin", changed(made, 2560, 1)
        yield f"{at}, byte 2576: not where a slice's values begin", changed(made, 2576, 1)
        for code in (0x80,) if self.kind else (0, 0x7F):  # int8 is held with its sign bit turned
            yield f"{at}, byte 2688: zero or NaN is stored", changed(made, 2688, code)


#: Every codec, dtype and kind of codes; and of each codec one dtype.
DESCRIPTORS = {kind.format: kind for kind in (Tile, Sparse11, Dense12, Dense8, Sparse8)}
EVERY = tuple(kind(dtype, of) for kind in DESCRIPTORS.values() for dtype in HALVES for of in kind.kinds)
CODECS = tuple(codec for codec in EVERY if (codec.dtype == torch.float16) == (codec.format == "tile"))


class Rows(Codec):
    """Whose sums are in float32 for one token, and for more perhaps torch's."""

    @property
    def devices(self) -> tuple[str, ...]:
        kinds = self.weight_type.device_types
        return tuple(kind for kind in kinds if kind == "cpu" or self.dtype != torch.float32)

    def refused(self, made: Any) -> Faults:
        yield from ()

    def assert_close(self, y: Tensor, source: Source, x: Tensor, bias: Tensor | None = None) -> None:
        close = assert_close_spmv if self.keys or x.shape[:-1].numel() == 1 else assert_close_library
        close(y, source, x, bias)


class Macko(Rows):
    """Kinds are the bits of its deltas."""

    format = "macko"
    kinds = (2, 4, 8)

    def __repr__(self) -> str:
        return f"{super().__repr__()}-{self.kind}"

    def packed(self, source: Tensor, device: str = "cuda", **options: int) -> Any:
        return super().packed(source, device, delta_bits=self.kind)


class Bitmap(Rows):
    format = "bitmap"


class Ec(Rows):
    format = "ec"


class Sell(Rows):
    format = "sell"


class Stream(Sell):
    """Of several tokens from the packed stream too, however many there are."""

    keys = "stream_tokens=1000000"

    def __repr__(self) -> str:
        return f"{super().__repr__()}-stream"


#: Each of them in every dtype; and in one.
EVERY_ROWS = tuple(
    kind(dtype, of)
    for kind in (Macko, Bitmap, Ec, Sell, Stream)
    for dtype in CPU_DTYPES
    for of in kind.kinds
    if dtype in FORMATS[kind.format].dtypes
)
ROWS = tuple(codec for codec in EVERY_ROWS if codec.dtype == torch.float16 and codec.kind in (0, 4))


@functools.lru_cache(maxsize=64)
def exact_problem(codec: Codec, *arguments: Any, **options: Any) -> tuple[Source, Tensor, Tensor]:
    """codec.exact, made once: nobody changes it."""
    return codec.exact(*arguments, **options)


def assert_packs(codec: Codec, source: Source, device: str, **options: int) -> Any:
    """Bit for bit there and back; of few elements also the bytes, of many those of the CPU."""
    made = codec.packed(source, device, **options)
    dense = codec.dense(source)
    assert_same_bits(made.to_dense(), dense)
    made.validate()
    if codec.weight_type.is_layout:
        canonical = made.to_macko()
        for name, tensor in type(canonical).from_dense(dense, **options).tensors().items():
            assert_same_bits(getattr(canonical, name), tensor)
    if isinstance(codec, OfCodes):
        assert_same_bits(made.codes(), source[0])
    if dense.numel() < codec.quick:
        tensors, sizes = codec.bytes_of(source)
        for name, tensor in tensors.items():
            assert_same_bits(getattr(made, name), tensor)
        assert sizes == {name: getattr(made, name) for name in sizes}
    elif device != "cpu":
        assert_same_bytes(made, codec.packed(source, "cpu", **options))
    return made


def assert_same_bytes(got: SlabWeight, wanted: SlabWeight) -> None:
    assert got.header == wanted.header
    for name, tensor in wanted.tensors().items():
        assert_same_bits(getattr(got, name), tensor)
