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


def sell_unpack(
    data: Tensor, bases: Tensor, blocks: Tensor, perm: Tensor, cols: int, gap_bits: int, warps: int, head: int
) -> Tensor:
    """The dense [rows, cols] matrix, read as csrc/sell/sell.h says; asserts that padding is where it has to be."""
    slots = data.cpu().view(torch.int16).view(-1, 512 + 32 * gap_bits)
    columns = bases.cpu().view(-1, 32).long() & 0xFFFF
    lane = torch.arange(32)
    w = torch.zeros(perm.shape[0], cols, dtype=torch.int16)
    for block, (slot, group_at, row, rows, chunks, long_chunks, steps, _) in enumerate(blocks.tolist()):
        groups, long_groups = -(-rows * chunks // 32), -(-rows * long_chunks // 32)
        order = [list(range(warp, groups, warps)) for warp in range(warps)]
        lengths = [sum(steps - (g >= long_groups) for g in mine) for mine in order]
        lengths[1::2] = lengths[::2]  # a pair of warps has the slots of its first one
        tail = len(blocks) * head * warps + slot
        for group in range(groups):
            warp, task = group % warps, group * 32 + lane
            chunk, sorted_row = task // rows, row + task % rows
            start = group_at + group - warps + len(blocks) * warps if group >= warps else block * warps + group
            at = columns[start].clone() - 1
            first = sum(steps - (g >= long_groups) for g in order[warp] if g < group)
            for step in range(steps - (group >= long_groups)):
                stage = first + step
                place = (block * head + stage) * warps + warp
                if stage >= head:
                    place = tail + warp + sum(min(length, stage) - min(length, head) for length in lengths)
                values = slots[place, :512].view(2, 32, 8)
                gaps = _sell_gaps(slots[place, 512:], gap_bits)
                for entry in range(16):
                    at += gaps[:, entry] + 1
                    value = values[entry // 8, :, entry % 8]
                    kept = (value & 0x7FFF) != 0
                    assert (kept <= (chunk < chunks)).all()
                    assert (at[kept] < cols).all()
                    w[perm.cpu().long()[sorted_row[kept]], at[kept]] = value[kept]
    return w.view(data.dtype)


def _sell_gaps(words: Tensor, gap_bits: int) -> Tensor:
    """Gaps [32 lanes, 16] of a slot's int16 words behind its values."""
    planes = words[: gap_bits // 2 * 64].reshape(-1, 32, 2).view(torch.uint8).view(gap_bits // 2, 32, 4).long()
    fields = (planes << 8 * torch.arange(gap_bits // 2)[:, None, None]).sum(0)  # [lane, pair]
    if gap_bits % 2:
        nibbles = words[gap_bits // 2 * 64 :].long()[:, None] >> 4 * torch.tensor([0, 2, 1, 3]) & 15
        fields |= nibbles << 8 * (gap_bits // 2)
    four = fields[:, :, None] >> gap_bits * torch.arange(4) & 2**gap_bits - 1  # [lane, pair, field]
    return four.view(32, 4, 2, 2).transpose(1, 2).reshape(32, 16)


def bitmap_pack(
    values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """The bitmap layout (csrc/bitmap/bitmap.h) of a macko matrix."""
    w = unpack(values, deltas, row_ptr, cols, delta_bits)
    kept = torch.nn.functional.pad(w != 0, (0, -cols % 64)).view(w.shape[0], -(-cols // 64) * 8, 8)
    bits = (kept * 2 ** torch.arange(8)).sum(2).to(torch.uint8)
    pointers = torch.nn.functional.pad((w != 0).sum(1).cumsum(0), (1, 0)).int()
    return torch.cat([w[w != 0], w.new_zeros(32)]), bits, pointers
