"""The layout bitmap: how a CPU multiplies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import PackedWeight, Shape, any_size
from .canonical import MackoWeight


@dataclasses.dataclass(frozen=True, eq=False)
class BitmapWeight(PackedWeight):
    """How a CPU runs a macko weight; csrc/bitmap/bitmap.h specifies the bytes. CPU only.

    Held instead of the canonical tensors, never saved: `to_macko` gives what is.

    Attributes:
        values: [non-zeros + 32], float16, bfloat16 or float32.
        bits: [rows, ceil(cols / 64) * 8], uint8.
        row_ptr: [rows + 1], int32.
        rows, cols: shape of the dense weight.
        delta_bits: of the canonical weight that it was made from.
    """

    format: ClassVar[str] = "bitmap"
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    is_layout: ClassVar[bool] = True
    faults: ClassVar[Mapping[int, str]] = {
        1: "row_ptr[{place}] is {found}: it starts at 0 and never falls; values has {of.values.shape[0]} elements",
        2: "row {place} has {found} bits set, row_ptr has another number of values",
        3: "row {place} has a bit set at column {found}, the matrix has {of.cols} columns",
        4: "row {place}, entry {entry}: a zero is stored",
        5: "row_ptr[{place}] is {found}, values has {of.values.shape[0]} elements, expected 32 more",
        6: "entry {entry}, after the last one of the last row, is not zero",
    }

    values: Tensor
    bits: Tensor
    row_ptr: Tensor
    rows: int
    cols: int
    delta_bits: int = 4

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        return [(None, any_size()), (torch.uint8, rows, (cols + 63) // 64 * 8), (torch.int32, rows + 1)]

    def to_macko(self) -> MackoWeight:
        """The canonical weight that this one was made from, bit for bit, without a dense one on the way."""
        return MackoWeight._laid_out(self)
