"""How files hold dense12: planes in the order of rows, and a list."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import Self

from .base import PackedWeight, Words
from .slab import Dense12Weight

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
    in_words: ClassVar[Words] = {"source": ("dtype", ("float16", "bfloat16"))}
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
        cls._check_dtype(w.dtype)
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

    def materialized(self, device: torch.device | None = None) -> Dense12Weight:
        """In dense12, packed on the device. ValueError where that does not hold it: too many elements are listed.

        The weight has been validated.
        """
        if self.device.type == "meta":
            sizes = dict.fromkeys(Dense12Weight.size_names, 0) | {"rows": self.rows, "cols": self.cols}
            return Dense12Weight(torch.empty(0, dtype=self.dtype, device="meta"), **sizes)
        moved = self if device is None or device.type == "meta" else self.to(device)
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

    def _nibbles(self) -> Tensor:
        return torch.stack([self.high & 15, self.high >> 4], -1).flatten(1)[:, : self.cols]

    def _listed_rows(self) -> Tensor:
        """The row of each listed element."""
        return torch.repeat_interleave(self.row_ptr.diff(), output_size=self.listed)

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
            nibbles = pad(self._nibbles()[:, start:stop], (0, (stop - start) % 2))
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
