"""How files hold dense12: planes in the order of rows, and a list."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import Self

from .base import PackedWeight
from .slab import Dense12Weight

#: Elements that torch's ops unpack at a time: each takes some ten bytes meanwhile.
_AT_ONCE = 1 << 24
_DTYPES = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True, eq=False)
class Planes12Weight(PackedWeight):
    """A dense weight in 12 bits an element, bit for bit, as files hold it; csrc/planes12/planes12.h has the bytes.

    No product takes it: `materialized` gives dense12, `to_dense` the dense weight. Rows and columns are cut without
    unpacking. It holds any weight; one that lists more than LISTED of its elements is not worth it.

    Attributes:
        low: [rows, cols], uint8. high: [rows, (cols + 1) / 2], uint8: a sign and a code an element, two a byte.
        table: [8], uint8: upper exponent bits by code.
        row_ptr: [rows + 1], columns: [listed], int32: where the elements are that the table lacks.
        values: [listed], int16: the bits of these.
        rows, cols: shape of the dense weight. source: its type, 0 for float16, 1 for bfloat16.
    """

    format: ClassVar[str] = "planes12"
    of_files: ClassVar[bool] = True
    version: ClassVar[int] = 2
    any_weight: ClassVar[bool] = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = Dense12Weight.dtypes
    values_name: ClassVar[str] = "low"
    limits: ClassVar[Mapping[str, Sequence[int]]] = {"source": range(2)}
    faults: ClassVar[Mapping[int, str]] = {
        1: "byte {found} of its table: expected 0, then rising bytes under 128 (float16: 16), then zeros",
        2: "row_ptr[{place}] is {found}, expected 0 at the start, never to fall, and the list's length at the end",
        3: "row {place}, entry {entry}: column {found} is not after the one before it, or outside of the matrix",
        4: "row {place}, entry {entry}: what is listed at column {found} has a code, or stands in the planes too",
        5: "row {place}: the nibble after its last column is {found}, expected 0",
    }

    low: Tensor
    high: Tensor
    table: Tensor
    row_ptr: Tensor
    columns: Tensor
    values: Tensor
    rows: int
    cols: int
    source: int

    @classmethod
    def from_dense(cls, w: Tensor) -> Self:  # type: ignore[override]
        """Packs w [rows, cols], on the CPU. ValueError where it is neither bfloat16 nor float16."""
        if w.dtype not in cls.dtypes:
            name = str(w.dtype).removeprefix("torch.")
            raise ValueError(f"the {cls.format} format holds bfloat16 and float16, the weight is {name}")
        tensors, header = torch.ops.macko.pack(w.cpu(), cls.number, [])
        return cls(*tensors, *header.tolist()[1:])

    @classmethod
    def on_meta(cls, rows: int, cols: int, dtype: torch.dtype) -> Self:
        """A weight without content."""
        u8, i32, i16 = (torch.empty(0, dtype=type, device="meta") for type in (torch.uint8, torch.int32, torch.int16))
        return cls(u8, u8, u8, i32, i32, i16, rows, cols, _DTYPES.index(dtype))

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.source]

    @property
    def listed(self) -> int:
        """Elements that the table lacks."""
        return self.columns.numel()

    @property
    def stored(self) -> int:
        return self.rows * self.cols

    @property
    def known_density(self) -> None:
        return None  # it would have to be unpacked

    def _values(self) -> Tensor:
        return self.to_dense()

    def about(self) -> dict[str, Any]:
        return {"format": self.format, "rows": self.rows, "cols": self.cols, "dtype": str(self.dtype)[6:]}

    @classmethod
    def sizes_of(cls, about: Mapping[str, Any]) -> dict[str, Any]:
        sizes = super().sizes_of(about)
        if "dtype" in sizes:
            names = [str(dtype)[6:] for dtype in _DTYPES]
            if (name := sizes.pop("dtype")) not in names:
                raise ValueError(f"dtype is {name!r}, expected {' or '.join(names)}")
            sizes["source"] = names.index(name)
        return sizes

    def materialized(self, device: torch.device | None = None) -> Dense12Weight:
        """In dense12, packed on the device. ValueError where that does not hold it: too many elements are listed."""
        if self.device.type == "meta":
            sizes = dict.fromkeys(Dense12Weight.size_names, 0) | {"rows": self.rows, "cols": self.cols}
            return Dense12Weight(torch.empty(0, dtype=self.dtype, device="meta"), **sizes)
        moved = self if device is None or device.type == "meta" else self.to(device)
        moved.validate()
        return Dense12Weight.from_dense(moved.to_dense())

    def parted(self) -> Self:
        return self

    @classmethod
    def stands_for_dense(cls) -> bool:
        return True

    def is_held_packed(self, by_slabs: bool) -> bool:
        if not by_slabs or self.device.type == "meta":
            return by_slabs
        slabs = Dense12Weight.num_slabs(64, self.cols)
        slab = self._listed_rows() // 64 * slabs + self.columns.long() // 256
        fullest = int(slab.bincount().max()) if self.listed else 0
        return Dense12Weight.bytes_of(self.rows, self.cols, self.listed, fullest) is not None

    def to_dense(self) -> Tensor:
        if self.device.type == "cpu":
            return super().to_dense()
        dense = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        step = max(1, _AT_ONCE // max(1, self.cols))
        for first in range(0, self.rows, step):
            dense.view(torch.int16)[first : first + step] = self._bits(first, min(self.rows, first + step))
        if self.listed:
            dense.view(torch.int16)[self._listed_rows(), self.columns.long()] = self.values
        return dense

    def _bits(self, first: int, stop: int) -> Tensor:
        """The bits of rows first to stop, int16, but for the list; by torch's ops, on any device."""
        upper = torch.cat([self.table, self.table | 128]).to(torch.int16) << 8
        bits = upper[self._nibbles(first, stop).int()] | self.low[first:stop]
        return bits & -0x8000 | (bits & 0xFFF) << 3 if self.dtype == torch.float16 else bits

    def _nibbles(self, first: int, stop: int) -> Tensor:
        high = self.high[first:stop]
        return torch.stack([high & 15, high >> 4], -1).flatten(1)[:, : self.cols]

    def _listed_rows(self) -> Tensor:
        """The row of each listed element."""
        return torch.repeat_interleave(self.row_ptr.diff(), output_size=self.listed)

    def validate(self) -> None:
        if self._bad_field() or self.device.type == "cpu" or not self._is_whole():
            moved = {name: t.cpu() for name, t in self.tensors().items()} if not self._bad_field() else {}
            PackedWeight.validate(self.replace(**moved))

    def _is_whole(self) -> bool:
        """Whether every rule holds, by torch's ops where the tensors are: a GPU's need not come back for that."""
        wanted = {
            "low": (torch.uint8, [self.rows, self.cols]),
            "high": (torch.uint8, [self.rows, (self.cols + 1) // 2]),
            "table": (torch.uint8, [8]),
            "row_ptr": (torch.int32, [self.rows + 1]),
            "columns": (torch.int32, [self.listed]),
            "values": (torch.int16, [self.listed]),
        }
        if any((t.dtype, list(t.shape)) != wanted[name] for name, t in self.tensors().items()):
            return False
        table, ends = self.table.tolist(), self.row_ptr[[0, -1]].tolist()
        rising = sorted({0, *table})
        is_table = (
            table == rising + [0] * (8 - len(rising)) and table[0] == 0 and max(table) < (128, 16)[not self.source]
        )
        if not is_table or ends != [0, self.listed] or bool((self.row_ptr.diff() < 0).any()):
            return False
        rows, columns = self._listed_rows(), self.columns.long()
        follows = (rows.diff() > 0) | (columns.diff() > 0)
        if not bool(((columns >= 0) & (columns < self.cols)).all() & follows.all()):
            return False
        nibbles = self.high[rows, columns // 2] >> (4 * (columns % 2)).to(torch.uint8) & 15
        is_free = (self.low[rows, columns] | nibbles) == 0
        split = self.values.int() & 0x7FFF
        lower = split & 7 if self.dtype == torch.float16 else torch.zeros_like(split)
        upper = split >> (11 if self.dtype == torch.float16 else 8)
        has_code = torch.isin(upper, self.table.int()) & (lower == 0)
        padding = self.high[:, -1:] >> 4 if self.cols % 2 else self.high[:, :0]
        return bool(is_free.all() & ~has_code.any() & ~padding.any())

    # ---- Rows and columns ----

    def _cut(self, dim: int, start: int, stop: int) -> Self:
        """Of the planes a part, of the list what is in it: the table stays."""
        if dim == 0:
            first, last = self.row_ptr[[start, stop]].tolist()
            return self.replace(
                low=self.low[start:stop].clone(), high=self.high[start:stop].clone(),
                row_ptr=self.row_ptr[start : stop + 1] - self.row_ptr[start],
                columns=self.columns[first:last].clone(), values=self.values[first:last].clone(), rows=stop - start,
            )  # fmt: skip
        high = self.high[:, start // 2 : (stop + 1) // 2].clone()
        if start % 2:
            nibbles = pad(self._nibbles(0, self.rows)[:, start:stop], (0, (stop - start) % 2))
            high = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        elif stop % 2:
            high[:, -1] &= 15
        kept = (self.columns >= start) & (self.columns < stop)
        counts = torch.bincount(self._listed_rows()[kept], minlength=self.rows)
        return self.replace(
            low=self.low[:, start:stop].clone(), high=high, row_ptr=pad(counts.cumsum(0), (1, 0)).int(),
            columns=self.columns[kept] - start, values=self.values[kept], cols=stop - start,
        )  # fmt: skip

    def _options(self) -> dict[str, int]:
        return {}
