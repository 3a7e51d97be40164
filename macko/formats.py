"""The packed weights: one frozen dataclass a format, tensors and sizes, all with the same methods.

What a format's class has, and all that SparseLinear, conversion and files know of it:
    format             its name in `sparsify_(format=...)`
    from_dense(w, ...) packs a dense [rows, cols] tensor on its device; to_dense() gives it back exactly
    linear(x, bias)    x W^T + bias for any leading shape, one op
    validate()         ValueError for content that breaks the format; called once on what comes from a file
    rows, cols, dtype, device, stored (non-zeros and explicit zeros held), nbytes (of all its tensors)
Its fields are tensors and plain ints; `tensors()` and `sizes()` split them.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from . import ops


class PackedWeight:
    """What every format's dataclass shares: views of its own fields."""

    format: ClassVar[str]
    rows: int
    cols: int

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name, in order."""
        return {f.name: v for f in dataclasses.fields(self) if isinstance(v := getattr(self, f.name), Tensor)}  # type: ignore[arg-type]

    def sizes(self) -> dict[str, int]:
        """The int fields by name: what a checkpoint keeps in its config."""
        return {f.name: v for f in dataclasses.fields(self) if isinstance(v := getattr(self, f.name), int)}  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


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
    def from_dense(cls, w: Tensor, delta_bits: int = 4) -> MackoWeight:
        """Packs w [rows, cols]."""
        return cls(*ops.pack(w, delta_bits), rows=w.shape[0], cols=w.shape[1], delta_bits=delta_bits)

    def to_dense(self) -> Tensor:
        """The dense [rows, cols] weight."""
        return ops.unpack(self.values, self.deltas, self.row_ptr, self.cols, self.delta_bits)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias for x [..., cols]."""
        return ops.linear(x, self.values, self.deltas, self.row_ptr, self.cols, bias, self.delta_bits)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device


FORMATS: dict[str, type[MackoWeight]] = {MackoWeight.format: MackoWeight}
