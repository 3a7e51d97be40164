"""The definition of the formats and ops: slow, obvious PyTorch, bit exact for bytes and float64 for sums.

Tests and documents refer to this file; nothing in the package calls it. Signatures are those of macko.ops.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def pack(w: Tensor, delta_bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """The macko format (csrc/macko/macko.h) of w [rows, cols]. Integers all the way, so that a NaN keeps its bits."""
    bits = w.cpu().contiguous().view(torch.int16 if w.element_size() == 2 else torch.int32)
    values, deltas, row_ptr = [], [], [0]
    for row, kept in zip(bits.tolist(), (bits & torch.iinfo(bits.dtype).max != 0).tolist(), strict=True):
        skipped = 0
        last = max((col for col, keep in enumerate(kept) if keep), default=-1)
        for value, keep in zip(row[: last + 1], kept, strict=False):
            if keep or skipped == 2**delta_bits - 1:
                values.append(value if keep else 0)
                deltas.append(skipped)
                skipped = 0
            else:
                skipped += 1
        row_ptr.append(len(values))
    padding = [0] * (-len(values) % 8)
    shifts = torch.arange(0, 8, delta_bits)
    packed = (torch.tensor(deltas + padding, dtype=torch.int64).view(-1, len(shifts)) << shifts).sum(1)
    stored = torch.tensor(values + padding, dtype=bits.dtype).view(w.dtype)
    return stored, packed.to(torch.uint8), torch.tensor(row_ptr, dtype=torch.int32)


def unpack(values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4) -> Tensor:
    """The dense [rows, cols] matrix of values' dtype."""
    unpacked = deltas.cpu().long()[:, None] >> torch.arange(0, 8, delta_bits) & 2**delta_bits - 1
    stops = row_ptr.tolist()
    w = torch.zeros(len(stops) - 1, cols, dtype=values.dtype)
    for row, (start, stop) in enumerate(pairwise(stops)):
        w[row, (unpacked.flatten()[start:stop] + 1).cumsum(0) - 1] = values.cpu()[start:stop]
    return w


def spmv(values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, x: Tensor, delta_bits: int = 4) -> Tensor:
    """y = W x in float64."""
    return unpack(values, deltas, row_ptr, cols, delta_bits).double() @ x.cpu().double()
