"""Grids of few values to round weights to, for `sparsegpt(..., grid=...)`, and rounding to nearest beside it.

A grid is a function of some columns [rows, group] that says how to round others [..., rows]. The rounded weights come
as numbers, not as codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..weights.codes import over

#: grid(columns [rows, group]) -> round(values [..., rows]) -> the nearest values of the grid.
Grid = Callable[[Tensor], Callable[[Tensor], Tensor]]


def integers(bits: int, offset: bool = False) -> Grid:
    """Whole numbers of so many bits times a float16 scale a row and group.

    offset: from the least to the largest of a group (0 within), as GPTQ and AWQ have it; else the same both ways.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"bits is {bits}, expected 2 to 8")
    most = 2**bits - 1 if offset else 2 ** (bits - 1) - 1

    def grid(columns: Tensor) -> Callable[[Tensor], Tensor]:
        low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
        scale = _scale(high - low if offset else torch.maximum(high, -low), most)
        zero = (-low / scale).round() if offset else torch.zeros_like(scale)
        least = 0 if offset else -most - 1
        return lambda column: ((column / scale + zero).round().clamp(least, most) - zero) * scale

    return grid


def float8(columns: Tensor) -> Callable[[Tensor], Tensor]:
    """A grid: float8_e4m3fn times a float16 scale a row and group."""
    most = torch.finfo(torch.float8_e4m3fn).max
    scale = _scale(columns.abs().amax(1), most)
    # Clamped, as devices and versions of torch differ in what they make of more than 448: that or NaN.
    return lambda column: (column / scale).clamp(-most, most).to(torch.float8_e4m3fn).to(column.dtype) * scale


def _scale(range_: Tensor, steps: float) -> Tensor:
    scale = over(range_, steps).half().to(range_.dtype)
    return torch.where(scale > 0, scale, torch.ones_like(scale))  # a row of zeros, or of less than float16 holds


def nearest(weight: Tensor, grid: Grid, group: int | None = None) -> Tensor:
    """A weight [rows, cols], rounded to the nearest values of a grid; group: columns of a scale, default all."""
    rows, cols = weight.shape
    group = min(group or cols, cols) or 1
    groups = nn.functional.pad(weight.float(), (0, -cols % group)).view(-1, group)  # zeros are on every grid
    rounded = grid(groups)(groups.t()).t().reshape(rows, -1)
    return rounded[:, :cols].to(weight.dtype)
