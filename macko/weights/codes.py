"""Values of 8 bits: codes, e4m3 or int8, times a float32 scale a row. What dense8 and sparse8 hold (bytes.py)."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

#: Kinds of codes by their number in headers, as macko_byte_kind (csrc/codecs/dense8/bytes.h) has them.
KINDS = ("fp8", "int8")
TYPES = (torch.float8_e4m3fn, torch.int8)
#: Scales are below this: a kernel multiplies some by 64. The largest that a weight of 16 bits can want is half of it.
LARGEST_SCALE = 2.0**122
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
#: The largest code, by kind, that a row's largest magnitude gets.
_MOST = (448, 127)
#: Elements that are looked at at a time.
_AT_ONCE = 1 << 24
#: Magnitudes above 0 that a row on a grid can have: int8 has 1 to 128, e4m3 126 others.
_MAGNITUDES = 128
#: Rows that are searched for a grid at a time: 32768 flags each, and some 1000 scales that are tried.
_ROWS_AT_ONCE = 128
#: Bits of a float32's significand that scales which are tried have not.
_SPARE_BITS = 13


def quantised(w: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of w [rows, cols], float16 or bfloat16: the nearest, ties to even, of w / scale in float32.

    The scale of a row is its largest magnitude over that of codes, 448 or 127, and 1 where all is zero. A row that lies
    on a grid already, whose values are all codes times one scale, rounded to w's dtype, keeps its values: another scale
    is taken then, where that one would not give them. It is always found if it has 11 significant bits, as float16
    numbers have (macko.grids) and bfloat16 ones, or is the largest magnitude over a code. The CPU and GPUs give the
    same bits.

    Returns:
        codes [rows, cols], float8_e4m3fn or int8, and scales [rows], float32, above 0.

    Raises:
        ValueError: w has NaN or Inf: names the first row.
    """
    codes = torch.empty_like(w, dtype=TYPES[kind])
    scales = torch.empty(len(w), dtype=torch.float32, device=w.device)
    step = max(1, _AT_ONCE // max(1, w.shape[1]))
    for first in range(0, len(w), step):
        rows = w[first : first + step]
        wide = rows.float()
        most = wide.abs().amax(1) if w.shape[1] else wide.new_zeros(len(wide))
        if not bool(most.isfinite().all()):
            refuse_row(first + int((~most.isfinite()).nonzero()[0]), kind)
        scale = torch.where(most > 0, over(most, _MOST[kind]).clamp(min=_SMALLEST_SCALE), 1)
        nearest = rounded(wide, scale[:, None], kind)
        off = (_values(nearest, scale[:, None], w.dtype) != rows).any(1).nonzero()[:, 0]
        if len(off):
            scale[off] = _on_grid(rows[off], scale[off], kind)
            nearest[off] = rounded(wide[off], scale[off, None], kind)
        codes[first : first + step] = nearest
        scales[first : first + step] = scale
    return codes, scales


def refuse_row(row: int, kind: int) -> NoReturn:
    """ValueError for a row that no scale holds."""
    raise ValueError(f"row {row} of the weight has NaN or Inf, which {KINDS[kind]} with a scale does not hold")


def check(values: Tensor, scales: Tensor) -> None:
    """ValueError where these are no codes [rows, cols] and their scales [rows]."""
    if values.dtype not in TYPES or values.dim() != 2:
        kinds = " or ".join(str(kind).removeprefix("torch.") for kind in TYPES)
        raise ValueError(f"values have dtype {values.dtype}, shape {list(values.shape)}, expected 2 dims of {kinds}")
    if scales.dtype != torch.float32 or scales.shape != values.shape[:1] or scales.device != values.device:
        raise ValueError(
            f"scales have dtype {scales.dtype}, shape {list(scales.shape)} on {scales.device}, expected float32 "
            f"[{len(values)}] on {values.device}"
        )
    if values.dtype == torch.float8_e4m3fn and bool((values.view(torch.uint8) & 127 == 127).any()):
        raise ValueError("values have NaN among them")
    if not bool(((scales > 0) & (scales < LARGEST_SCALE)).all()):
        raise ValueError("scales have numbers that are not above 0 and below 2^122")


def over(values: Tensor, number: float) -> Tensor:
    """values / number, rounded once on every device: by a Python number CUDA multiplies with its rounded reciprocal."""
    return values / torch.full_like(values, number)


def rounded(values: Tensor, scale: Tensor, kind: int) -> Tensor:
    """The codes of float32 values."""
    codes = (values / scale).clamp(-128 if kind else -448, _MOST[kind])
    return codes.round().to(torch.int8) if kind else codes.to(torch.float8_e4m3fn)


def _values(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scale).to(dtype)


def _on_grid(rows: Tensor, scales: Tensor, kind: int) -> Tensor:
    """Scales that give all values of a row again, where there is one among those that are tried; else the given ones.

    A scale s that gives them is found with s / 2 and codes twice as large, while these are codes. So the largest
    magnitude is tried as a code of the upper half alone, by every scale of 11 significant bits that rounds to it.
    """
    scales = scales.clone()
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        magnitudes, counts = _magnitudes(some)
        left = (counts <= _MAGNITUDES).nonzero()[:, 0]
        most = some.abs().amax(1)
        if kind:  # a largest magnitude that is never positive may be -128, and 128 is no code
            negative = left[(some.amax(1) < most)[left]]
            magnitudes[negative, counts[negative] - 1] *= -1
        for candidates in (_by_code, _of_11_bits):
            row, tried = candidates(most[left], kind)
            in_range = (tried >= _SMALLEST_SCALE) & (tried < LARGEST_SCALE)
            row, tried = left[row[in_range]], tried[in_range]
            # By one first, the smallest, which few scales give; and by some of the others.
            for size in (1, 8, _MAGNITUDES):
                places = counts[row, None] * torch.arange(size, device=row.device) // size
                fits = _fits(magnitudes[row[:, None], places], tried, kind)
                row, tried = row[fits], tried[fits]
            found, times = row.unique_consecutive(return_counts=True)
            scales[first + found] = tried[times.cumsum(0) - times]
            left = left[torch.isin(left, found, invert=True)]
    return scales


def _magnitudes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The magnitudes above 0 of each row, rising, in a table with room for those of a grid, and how many there are."""
    bits = rows.view(torch.int16) & 0x7FFF
    there = torch.zeros(len(rows), 1 << 15, dtype=torch.bool, device=rows.device).scatter_(1, bits.long(), True)
    there[:, 0] = False
    row, bit = there.nonzero().unbind(1)
    counts = row.bincount(minlength=len(rows))
    place = torch.arange(len(row), device=rows.device) - (counts.cumsum(0) - counts)[row]
    fits = place < _MAGNITUDES
    table = bits.new_zeros(len(rows), _MAGNITUDES)
    table[row[fits], place[fits]] = bit[fits].to(torch.int16)
    return table.view(rows.dtype), counts


def _fits(values: Tensor, scales: Tensor, kind: int) -> Tensor:
    """Whether codes times scales [n] are all of values [n, m]."""
    each = scales[:, None]
    return (_values(rounded(values.float(), each, kind), each, values.dtype) == values).all(1)


def _upper_codes(kind: int, device: torch.device) -> Tensor:
    """The codes that the largest magnitude of a row is tried as, and 128 for -128, the largest first."""
    if kind:
        return torch.arange(128, 63, -1, dtype=torch.float32, device=device)
    return torch.arange(126, 118, -1, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()  # 448 to 240


def _by_code(most: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Scales that are the largest magnitude over a code, and for each which of `most` [n] it is of, rising."""
    tried = most.float()[:, None] / _upper_codes(kind, most.device)
    return torch.arange(tried.numel(), device=most.device) // tried.shape[1], tried.flatten()


def _of_11_bits(most: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Scales of 11 significant bits by which the largest magnitude is a code, rounded; otherwise as _by_code."""
    codes, wide = _upper_codes(kind, most.device), most.float()
    below, above = (wide - (most.view(torch.int16) + step).view(most.dtype).float() for step in (-1, 1))
    above = torch.where(above.isfinite(), above, -below)
    low, high = ((wide - off / 2)[:, None] / codes for off in (below, above))
    # Positive float32 numbers follow each other as their bits do.
    first, last = (bound.view(torch.int32) >> _SPARE_BITS for bound in (low, high))
    counts = (last - first + 1).flatten()
    which = torch.repeat_interleave(counts)
    bits = first.flatten()[which] + (torch.arange(len(which), device=most.device) - (counts.cumsum(0) - counts)[which])
    return which // len(codes), (bits.int() << _SPARE_BITS).view(torch.float32)
