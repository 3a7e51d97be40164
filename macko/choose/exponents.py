"""How many elements of a matrix have each pattern of bits, and which of them a table of exponents can hold.

Counted in Python, for reports of matrices that are not packed: what packs them, in csrc, makes its tables itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Elements whose bits are counted at a time: of each torch makes some 20 bytes meanwhile.
COUNTED = 1 << 19


def bit_counts(weight: Tensor) -> Tensor:
    """[65536]: how many elements of 16 bits have each pattern of bits. Those of a matrix' parts add up."""
    counts = torch.zeros(1 << 16, dtype=torch.int64, device=weight.device)
    for bits in weight.detach().contiguous().view(torch.int16).flatten().split(COUNTED):
        counts += (bits.int() & 0xFFFF).bincount(minlength=1 << 16)
    return counts


def have_codes(counts: Tensor, dtype: torch.dtype, signed: bool) -> Tensor:
    """[65536], bool: which patterns of bits have a code in the table of the matrix that counts (bit_counts) are of.

    Args:
        dtype: bfloat16, or float16, of which only what was bfloat16 has a code.
        signed: as sparse11, a table of seven signs and upper exponent bits; zeros have no code. Else as dense12: of
            seven upper exponent bits beside those of zeros.
    """
    bits = torch.arange(1 << 16, device=counts.device)
    coded = bits & 7 == 0 if dtype == torch.float16 else torch.ones_like(bits, dtype=torch.bool)
    high = bits >> 11 if dtype == torch.float16 else bits >> 8
    if signed:
        coded &= bits & 0x7FFF != 0
    else:
        high &= 0xF if dtype == torch.float16 else 0x7F
    by_high = torch.zeros(256, dtype=torch.int64, device=counts.device).index_add_(0, high, counts * coded)
    table = by_high[1:].sort(descending=True, stable=True).indices[:7] + 1
    return coded & torch.isin(high, table if signed else torch.cat([table, table.new_zeros(1)]))


def outside_table(weight: Tensor, signed: bool) -> tuple[int, int]:
    """How many elements have no code (have_codes), and of how many: signed, of those that are not zero."""
    return lacking(bit_counts(weight), weight.dtype, signed)


def lacking(counts: Tensor, dtype: torch.dtype, signed: bool) -> tuple[int, int]:
    """outside_table of the matrix that bit_counts are of."""
    zeros = int(counts[0] + counts[0x8000])
    count = int(counts.sum()) - (zeros if signed else 0)
    return count - int(counts[have_codes(counts, dtype, signed)].sum()), count
