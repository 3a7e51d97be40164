"""Values of 8 bits: codes, e4m3 or int8, times a float32 scale a row. What dense8 and sparse8 hold (macko.formats)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Kinds of codes by their number in headers, as macko_byte_kind (csrc/dense8/bytes.h) has them.
KINDS = ("fp8", "int8")
TYPES = (torch.float8_e4m3fn, torch.int8)
#: Scales are below this: a kernel multiplies some by 64. The largest that a weight of 16 bits can want is half of it.
LARGEST_SCALE = 2.0**122
#: The largest code, by kind, that a row's largest magnitude gets.
_MOST = (448, 127)
#: Elements that are looked at at a time.
_AT_ONCE = 1 << 24
#: Magnitudes that a row on a grid can have: int8 has 1 to 128, e4m3 126 others.
_MAGNITUDES = 128


def quantised(w: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of w [rows, cols], float16 or bfloat16: the nearest, ties to even, of w / scale in float32.

    The scale of a row is its largest magnitude over that of codes, 448 or 127, and 1 where all is zero. A row that lies
    on a grid already, whose values are all codes times one scale, keeps its values: another scale is taken then, where
    that one would not give them. It is found if it is a float16 number, as macko.grids has them, or the largest
    magnitude over a code.

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
            row = first + int((~most.isfinite()).nonzero()[0])
            raise ValueError(f"row {row} of the weight has NaN or Inf, which {KINDS[kind]} with a scale does not hold")
        scale = torch.where(most > 0, (most / _MOST[kind]).clamp(min=torch.finfo(torch.float32).tiny), 1)
        off = (_values(rounded(wide, scale[:, None], kind), scale[:, None], w.dtype) != rows).any(1).nonzero()[:, 0]
        if len(off):
            scale[off] = _on_grid(rows[off], scale[off], kind)
        codes[first : first + step] = rounded(wide, scale[:, None], kind)
        scales[first : first + step] = scale
    return codes, scales


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


def rounded(values: Tensor, scale: Tensor, kind: int) -> Tensor:
    """The codes of float32 values."""
    codes = (values / scale).clamp(-128 if kind else -448, _MOST[kind])
    return codes.round().to(torch.int8) if kind else codes.to(torch.float8_e4m3fn)


def _values(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scale).to(dtype)


def _on_grid(rows: Tensor, scales: Tensor, kind: int) -> Tensor:
    """Scales that give all values of a row again, where there is one; else those that are given."""
    if rows.shape[1] < 2:
        return scales
    largest_first, _ = rows.abs().sort(1, descending=True)
    negative = (rows.amax(1) < largest_first[:, 0]) & bool(kind)  # then it may be -128, and 128 is no code
    place = (largest_first.diff(dim=1) != 0).cumsum(1)
    few = (place[:, -1] < _MAGNITUDES + 1).nonzero()[:, 0]
    scales = scales.clone()
    for some in few.to(rows.device).split(64):
        magnitudes = rows.new_zeros(len(some), _MAGNITUDES + 1)
        magnitudes[:, 0] = torch.where(negative[some], -largest_first[some, 0], largest_first[some, 0])
        magnitudes.scatter_(1, place[some], largest_first[some, 1:])
        # Some of them first, of which few scales give all.
        sample = magnitudes.gather(1, place[some, -1:] * torch.arange(1, 9, device=rows.device) // 8)
        left = torch.arange(len(some), device=rows.device)
        for tried in _candidates(magnitudes[:, 0].abs().float(), kind):
            tried = tried[left]
            most, choice = _fits(sample[left], tried, kind).int().topk(min(8, tried.shape[1]), 1)
            tried = tried.gather(1, choice)
            fits = most.bool() & _fits(magnitudes[left], tried, kind)
            best = tried.gather(1, fits.int().argmax(1)[:, None])[:, 0]
            found = fits.any(1)
            scales[some[left[found]]] = best[found]
            left = left[~found]
            if not len(left):
                break
    return scales


def _fits(values: Tensor, scales: Tensor, kind: int) -> Tensor:
    """Whether codes times each of scales [rows, tried] are all of values [rows, n]."""
    wide, each = values.float()[:, None], scales[..., None]
    return (_values(rounded(wide, each, kind), each, values.dtype) == values[:, None]).all(2)


def _candidates(most: Tensor, kind: int) -> Iterator[Tensor]:
    """Scales [rows, tried] by which the largest magnitude of a row is a code, those of the largest code first."""
    if kind:
        codes = torch.arange(128, 0, -1, dtype=torch.float32, device=most.device)
    else:
        bits = torch.arange(126, 0, -1, dtype=torch.uint8, device=most.device)
        codes = bits.view(torch.float8_e4m3fn).float()
    near = torch.arange(-5, 6, dtype=torch.int16, device=most.device)
    for some in (codes[:2], *codes[2:].split(32)):
        exact = most[:, None] / some
        halves = exact.half()
        # Positive halves follow each other as their bits do.
        around = (halves.view(torch.int16)[..., None] + near).clamp(1, 0x7BFF).view(torch.float16).float()
        tried = torch.cat([exact[..., None], around], 2).flatten(1)
        yield torch.where(tried.isfinite() & (tried > torch.finfo(torch.float32).tiny), tried, 1)
