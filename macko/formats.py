"""The packed weights: one frozen dataclass a format, tensors and sizes, all with the same methods.

What a format's class has, and all that SparseLinear, conversion and files know of it:
    format               its name in `sparsify_(format=...)`
    from_dense(w, ...)   packs a dense [rows, cols] tensor on its device; to_dense() gives it back exactly
    linear(x, bias)      x W^T + bias for any leading shape, one op
    validate()           ValueError for content that breaks the format; called once on what comes from a file
    rows, cols           shape of the dense weight
    dtype, device        of the values
    stored, density      entries held (non-zeros and explicit zeros); non-zeros over all
Its fields are tensors and plain ints. The ints besides rows and cols are the options of from_dense.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from . import ops


class PackedWeight:
    """What every format's dataclass has and, behind `shape`, shares."""

    format: ClassVar[str]
    rows: int
    cols: int

    @classmethod
    def from_dense(cls, w: Tensor) -> Self:
        raise NotImplementedError

    def to_dense(self) -> Tensor:
        raise NotImplementedError

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def validate(self) -> None:
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    @property
    def stored(self) -> int:
        raise NotImplementedError

    @property
    def density(self) -> float:
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name, in order."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def sizes(self) -> dict[str, int]:
        """The int fields by name: what a checkpoint keeps besides the tensors."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}

    @property
    def shape(self) -> torch.Size:
        """[rows, cols] of the dense weight."""
        return torch.Size((self.rows, self.cols))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same weight elsewhere, or the dense weight's conversion to dtype packed anew.

        A value may round to zero, and a zero is not stored: so another dtype means another packing, made on `device`.
        """
        device = self.device if device is None else torch.device(device)
        if dtype not in (None, self.dtype):
            options = {name: size for name, size in self.sizes().items() if name not in ("rows", "cols")}
            return self.from_dense(self.to_dense().to(device, dtype), **options)
        return type(self)(**{name: t.to(device) for name, t in self.tensors().items()}, **self.sizes())


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

    values: Tensor
    deltas: Tensor
    row_ptr: Tensor
    rows: int
    cols: int
    delta_bits: int = 4

    @classmethod
    def from_dense(cls, w: Tensor, delta_bits: int = 4) -> Self:
        """Packs w [rows, cols]."""
        return cls(*ops.pack(w, delta_bits), rows=w.shape[0], cols=w.shape[1], delta_bits=delta_bits)

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

    def to_dense(self) -> Tensor:
        """The dense [rows, cols] weight."""
        return ops.unpack(self.values, self.deltas, self.row_ptr, self.cols, self.delta_bits)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias for x [..., cols]."""
        return ops.linear(x, self.values, self.deltas, self.row_ptr, self.cols, bias, self.delta_bits)

    def validate(self) -> None:
        """Checks every rule of the format, once, on the device.

        Raises:
            ValueError: a rule is broken; names the row, the entry and what is wrong with it.
        """
        try:
            fault = ops.check(self.values, self.deltas, self.row_ptr, self.cols, self.delta_bits)
        except RuntimeError as error:
            if "macko::" not in str(error):
                raise
            raise ValueError(f"not a macko weight: {error}") from None
        if self.row_ptr.shape[0] != self.rows + 1:
            raise ValueError(
                f"not a macko weight: row_ptr has {self.row_ptr.shape[0]} entries, expected {self.rows + 1} "
                f"for {self.rows} rows"
            )
        kind, row, entry, found = fault.tolist()
        wrong = {
            0: "",
            1: f"row_ptr[0] is {found}, expected 0",
            2: f"row_ptr falls to {found} at index {row}",
            3: f"row_ptr[{row}] is {found}, values has {self.values.shape[0]} entries",
            4: f"row {row}, entry {entry}: the deltas put it at column {found}, the matrix has {self.cols} columns",
            5: f"row {row}, entry {entry}: a zero that is not +0.0 in the middle of its row behind a delta of "
            f"{2**self.delta_bits - 1}, its delta is {found}",
            6: f"entry {entry}, behind the last one of the last row, is not zero",
        }.get(kind, f"row {row}, entry {entry}: fault {kind}, found {found}")
        if wrong:
            raise ValueError(f"not a macko weight: {wrong}")

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def stored(self) -> int:
        """Entries held, non-zeros and explicit zeros; waits for the device."""
        return int(self.row_ptr[-1])

    @property
    def density(self) -> float:
        """Non-zeros over all; waits for the device."""
        return int(self.values.count_nonzero()) / max(1, self.rows * self.cols)


#: Every format by name.
FORMATS: dict[str, type[PackedWeight]] = {MackoWeight.format: MackoWeight}
