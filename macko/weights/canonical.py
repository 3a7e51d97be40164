"""The canonical format, which files hold and execution layouts are made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from .base import PackedWeight, Shape, any_size

#: The capacity is a multiple of so many entries (MACKO_CHUNK in csrc/macko/macko.h).
_CHUNK = 8


@dataclasses.dataclass(frozen=True, eq=False)
class MackoWeight(PackedWeight):
    """The canonical format of the MACKO-SpMV paper; csrc/macko/macko.h specifies the bytes.

    Attributes:
        values: [capacity], float16, bfloat16 or (CPU) float32.
        deltas: [capacity * delta_bits / 8], uint8.
        row_ptr: [rows + 1], int32.
        rows, cols: shape of the dense weight.
        delta_bits: 2, 4 or 8.
    """

    format: ClassVar[str] = "macko"
    faults: ClassVar[Mapping[int, str]] = {
        1: "row_ptr[0] is {found}, expected 0",
        2: "row_ptr falls to {found} at index {place}",
        3: "row_ptr[{place}] is {found}, values has {of.values.shape[0]} entries",
        4: "row {place}, entry {entry}: the deltas put it at column {found}, the matrix has {of.cols} columns",
        5: "row {place}, entry {entry}: a zero that is not +0.0 in the middle of its row after the largest delta of "
        "{of.delta_bits} bits, its delta is {found}",
        6: "entry {entry}, after the last one of the last row, is not zero",
    }

    values: Tensor
    deltas: Tensor
    row_ptr: Tensor
    rows: int
    cols: int
    delta_bits: int = 4

    @classmethod
    def from_dense(cls, w: Tensor, delta_bits: int = 4) -> Self:
        """Packs w [rows, cols]."""
        tensors, header = torch.ops.macko.pack(w, cls.number, [delta_bits])
        return cls(*tensors, *header.tolist()[1:])

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        chunks, delta_bits = any_size(), options[0]
        delta_bytes = chunks * delta_bits if delta_bits else any_size()
        return [(None, chunks * 8), (torch.uint8, delta_bytes), (torch.int32, rows + 1)]

    @classmethod
    def smallest(cls, w: Tensor) -> Self:
        """Packs w with the width of deltas that takes the fewest bytes; 4 bits where widths tie."""
        return cls.from_dense(w, delta_bits=0)

    @classmethod
    def zeros(cls, rows: int, cols: int, dtype: torch.dtype, device: torch.device | str | None = None) -> Self:
        """A weight without a non-zero; on the meta device too."""
        return cls(
            values=torch.empty(0, dtype=dtype, device=device),
            deltas=torch.empty(0, dtype=torch.uint8, device=device),
            row_ptr=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            rows=rows,
            cols=cols,
        )

    @classmethod
    def from_macko(cls, weight: MackoWeight) -> Self:
        return cls(weight.values, weight.deltas, weight.row_ptr, weight.rows, weight.cols, weight.delta_bits)

    def to_macko(self) -> MackoWeight:
        return self

    def by_rows(self) -> MackoWeight:
        return self

    @property
    def keeps_format(self) -> bool:
        return False

    def _cut(self, dim: int, start: int, stop: int) -> PackedWeight:
        return self._rows(start, stop) if dim == 0 else super()._cut(dim, start, stop)

    def _rows(self, start: int, stop: int) -> MackoWeight:
        """Rows start to stop; the entries are copied."""
        first, last = self.row_ptr[[start, stop]].tolist()
        capacity = -(-(last - first) // _CHUNK) * _CHUNK
        values = self.values.new_zeros(capacity)
        values[: last - first] = self.values[first:last]
        in_byte = 8 // self.delta_bits
        shifts = torch.arange(0, 8, self.delta_bits, dtype=torch.uint8, device=self.device)
        codes = self.deltas[first // in_byte : -(-last // in_byte), None] >> shifts & (1 << self.delta_bits) - 1
        deltas = self.deltas.new_zeros(capacity)
        deltas[: last - first] = codes.flatten()[first % in_byte :][: last - first]
        deltas = (deltas.view(-1, in_byte) << shifts).sum(1, dtype=torch.uint8)
        row_ptr = self.row_ptr[start : stop + 1] - first
        return self.replace(values=values, deltas=deltas, row_ptr=row_ptr, rows=stop - start)
