"""How the zeros of a matrix lie: the share of non-zeros, and the n:m patterns that hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..weights import sparsest_pattern

#: At most n non-zeros in every m columns, from the first column on; the strictest of each kind first.
PATTERNS = ((1, 4), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12), (12, 14), (14, 16))
#: A weight is taken to be pruned to a pattern if it has this share of the non-zeros that the pattern allows.
PATTERN_FILLED = 0.9


def density_of(weight: Tensor) -> float | None:
    """Non-zeros over all; None for a weight without content."""
    if weight.device.type == "meta":
        return None
    with torch.no_grad():
        return int(countable(weight).count_nonzero()) / max(1, weight.numel())


def countable(weight: Tensor) -> Tensor:
    """The weight, or what stands for it where torch cannot count its zeros: a float of 8 bits."""
    return weight.float() if weight.is_floating_point() and weight.element_size() == 1 else weight


def matching_patterns(weight: Tensor, among: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of the patterns (PATTERNS, in their order) that some rows of a matrix hold, those that follow too."""
    found: list[tuple[int, int]] = []
    for n, m in among:
        if weight.shape[1] % m == 0 and (
            _follows(n, m, found) or int(countable(weight).reshape(-1, m).count_nonzero(1).max()) <= n
        ):
            found.append((n, m))
    return found


def pattern_names(found: Iterable[tuple[int, int]]) -> list[str]:
    """As "2:4", without the patterns that follow from one before them."""
    named: list[tuple[int, int]] = []
    for n, m in found:
        if not _follows(n, m, named):
            named.append((n, m))
    return [f"{n}:{m}" for n, m in named]


def _follows(n: int, m: int, found: Iterable[tuple[int, int]]) -> bool:
    return any(_most(m, *other) <= n for other in found)


def _most(width: int, n: int, m: int) -> int:
    """Non-zeros that a group of `width` columns can hold where n:m holds."""
    starts = range(0, width * m, width)
    return max(sum(min(n, min(s + width, g + m) - max(s, g)) for g in range(s // m * m, s + width, m)) for s in starts)


def meant_pattern(w: Tensor) -> int:
    """n where w [rows, cols] was pruned to the pattern (2n-2):2n; 0 where it was not.

    A mask that holds a pattern by chance has far fewer non-zeros than the pattern allows: 14:16 of 70 % zeros.
    """
    n = sparsest_pattern(w)
    return n if n and is_filled(n, int(w.count_nonzero()), w.numel()) else 0


def is_filled(n: int, nonzeros: int, weights: int) -> bool:
    """Whether so many of so many weights of pattern (2n-2):2n are not zero that it was meant."""
    return nonzeros >= PATTERN_FILLED * weights * (2 * n - 2) / (2 * n)
