"""The definition of the formats: slow, obvious PyTorch, bit exact for bytes and float64 for sums."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from macko.weights import SellWeight


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


def sell_unpack(sell: SellWeight) -> Tensor:
    """The dense [rows, cols] matrix, read as csrc/sell/sell.h says; asserts that padding is where it has to be."""
    data, bases, blocks, perm = sell.tensors().values()
    cols, gap_bits, warps, head = sell.cols, sell.gap_bits, sell.warps, sell.head
    slots = data.cpu().view(torch.int16).view(-1, 512 + 32 * gap_bits)
    columns = bases.cpu().view(-1, 32).long() & 0xFFFF
    lane = torch.arange(32)
    w = torch.zeros(perm.shape[1], cols, dtype=torch.int16)
    for block, (slot, group_at, row, rows, chunks, long_chunks, steps, _) in enumerate(blocks.tolist()):
        groups, long_groups = -(-rows * chunks // 32), -(-rows * long_chunks // 32)
        order = [list(range(warp, groups, warps)) for warp in range(warps)]
        lengths = [sum(steps - (g >= long_groups) for g in mine) for mine in order]
        lengths[1::2] = lengths[::2]  # a pair of warps has the slots of its first one
        tail = len(blocks) * head * warps + slot
        for group in range(groups):
            warp, task = group % warps, group * 32 + lane
            chunk, own_row = task // rows, row + task % rows
            start = group_at + group - warps + len(blocks) * warps if group >= warps else block * warps + group
            at = columns[start].clone() - 1
            first = sum(steps - (g >= long_groups) for g in order[warp] if g < group)
            for step in range(steps - (group >= long_groups)):
                stage = first + step
                place = (stage * len(blocks) + block) * warps + warp
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
                    w[perm[0].cpu().long()[own_row[kept]], at[kept]] = value[kept]
    return w.view(data.dtype)


def _sell_gaps(words: Tensor, gap_bits: int) -> Tensor:
    """Gaps [32 lanes, 16] of a slot's int16 words after its values."""
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


def tile_pack(w: Tensor) -> tuple[Tensor, Tensor]:
    """data and offsets of the tile layout (csrc/codecs/tile/tile.h) of a dense 16-bit matrix."""
    blocks, slabs = -(-w.shape[0] // 64), -(-w.shape[1] // 256)
    full = torch.zeros(blocks * 64, slabs * 256, dtype=torch.int16)
    full[: w.shape[0], : w.shape[1]] = torch.where(w == 0, 0, w).cpu().view(torch.int16)
    # [row block, slice, e / 2, lane / 4, slab, tile, stream, j / 2 % 2, j % 2, lane % 4, e % 2]
    elements = full.view(blocks, 4, 2, 8, slabs, 4, 2, 2, 2, 4, 2).permute(0, 4, 1, 3, 9, 6, 5, 7, 8, 2, 10)
    elements = elements.reshape(blocks * slabs, 4, 32, 2, 4, 4, 4)  # [slab, slice, lane, stream, tile, j % 4, e]
    places = 8 * torch.arange(4) + torch.arange(8).view(2, 1, 4, 1)
    masks = ((elements != 0).long() << places).sum((3, 5, 6)).permute(0, 3, 1, 2)
    pieces, offsets = [torch.zeros(0, dtype=torch.int16)], [0]
    for slab, mask in zip(elements, masks, strict=True):
        spills, slice_offsets = torch.zeros(4, 32, 2, dtype=torch.int16), [0] * 64
        values = torch.zeros(0, 32, 2, dtype=torch.int16)
        for slice_ in range(4):
            columns = {}
            for stream in range(2):
                heads, tails = ([own[own != 0] for own in slab[slice_, :, stream, tiles]] for tiles in ([0, 1], [2, 3]))
                shortest = sorted(range(32), key=[len(own) for own in heads].__getitem__)
                longest = sorted(range(32), key=[-len(own) for own in tails].__getitem__)
                for lane, column in zip(longest, shortest, strict=True):
                    spills[slice_, lane, stream] = len(heads[column]) * 128 + column * 4 + stream * 2
                    columns[column, stream] = torch.cat([heads[column], tails[lane]])
            slice_offsets[slice_] = len(values)
            lanes = torch.nn.utils.rnn.pad_sequence(
                [columns[lane, stream] for lane in range(32) for stream in range(2)]
            )
            values = torch.cat([values, lanes.view(-1, 32, 2)])
        head = [
            mask.flatten().int().view(torch.int16),
            spills.flatten(),
            torch.tensor(slice_offsets, dtype=torch.int16),
        ]
        pieces.append(torch.cat([*head, values.flatten()]))
        offsets.append(offsets[-1] + len(pieces[-1]) // 64)
    return torch.cat(pieces).view(w.dtype), torch.tensor(offsets, dtype=torch.int32)


def dense12_pack(w: Tensor) -> tuple[Tensor, list[int]]:
    """Data and sizes (slab_units, the table's halves, listed) of the dense12 layout (dense12.h) of w."""
    (rows, cols), bits = w.shape, w.cpu().contiguous().view(torch.int16).long() & 0xFFFF
    half = w.dtype == torch.float16

    def split(bits: Tensor) -> Tensor:
        return (bits & 0x8000 | (bits & 0x7FFF) >> 3) if half else bits

    coded = bits[bits & 7 == 0] if half else bits
    counts = (split(coded) >> 8 & 127).flatten().bincount(minlength=128).tolist()
    commonest = sorted((high for high in range(1, 128) if counts[high]), key=lambda high: (-counts[high], high))
    table = torch.tensor([0, *sorted(commonest[:7]), *[0] * (7 - len(commonest))], dtype=torch.uint8)
    blocks, slabs = -(-rows // 64), -(-cols // 256)
    full = torch.zeros(blocks * 64, slabs * 256, dtype=torch.int64)
    full[:rows, :cols] = bits
    # [row block, slice, i / 2 % 2, lane / 4, slab, tile, step, i / 4, lane % 4, i % 2]
    full = full.view(blocks, 4, 2, 8, slabs, 4, 4, 2, 4, 2).permute(0, 4, 5, 1, 6, 3, 8, 7, 2, 9)
    elements = full.reshape(blocks * slabs, 16, 4, 32, 8)  # [slab, part of the list, step, lane, i]
    same = (split(elements) >> 8 & 127)[..., None] == table
    listed = ~same.any(-1) | half & (elements & 7 != 0)
    codes = torch.where(listed, 0, same.int().argmax(-1))  # the first of several
    placed = torch.where(listed, 0, split(elements))
    words = (codes << 4 * torch.arange(8) | placed >> 15 << torch.tensor([7, 15, 23, 31, 3, 11, 19, 27])).sum(-1)
    lows = (placed & 255).to(torch.uint8).view(-1, 16, 2, 2, 32, 8).transpose(3, 4).reshape(len(words), 16, 1024)
    words = words.transpose(2, 3).reshape(len(words), 16, 128).to(torch.uint32).view(torch.uint8)
    most = int(listed.sum((1, 2, 3, 4)).max()) if len(listed) else 0
    size = -(-(24640 + 4 * most) // 128) * 128 if len(listed) else 0
    data = torch.zeros(blocks * slabs, size, dtype=torch.uint8)
    for slab, own in enumerate(listed):
        ends = own.sum((1, 2, 3)).cumsum(0)
        parts = ends << 16 | torch.cat([ends.new_zeros(1), ends[:-1]])
        entries = (elements[slab] << 16 | torch.arange(1024).view(4, 32, 8))[own]
        tail = torch.cat([parts, entries]).to(torch.uint32).view(torch.uint8)
        data[slab, :24576] = torch.cat([lows[slab], words[slab]], 1).flatten()
        data[slab, 24576 : 24576 + len(tail)] = tail
    return data.flatten().view(w.dtype), [size // 128, *table.view(torch.int32).tolist(), int(listed.sum())]


def _streams(held: Tensor, has: Tensor) -> tuple[Tensor, Tensor]:
    """Of a slice's bytes [tile, step, lane, i], those that it has: where lanes start, and the streams, both flat."""
    held, has = (t.transpose(1, 2)[..., [0, 1, 2, 3, 7, 6, 5, 4]].flatten(2) for t in (held, has))
    counts = has.sum(-1)  # [tile, lane]
    heads, tails = ((counts[at] + counts[at + 1]).tolist() for at in (0, 2))
    starts, streams = torch.zeros(32, 4, dtype=torch.uint8), [held.new_zeros(0)] * 32
    in_order = sorted(range(32), key=lambda lane: -tails[lane]), sorted(range(32), key=heads.__getitem__)
    for lane, column in zip(*in_order, strict=True):  # the longest tail after the shortest head
        starts[lane] = torch.tensor([heads[column], column * 4, counts[0, lane], counts[2, lane]])
        streams[column] = torch.cat([held[:2, column][has[:2, column]], held[2:, lane][has[2:, lane]]])
    padded = torch.nn.utils.rnn.pad_sequence(streams, batch_first=True).to(torch.uint8)
    padded = torch.nn.functional.pad(padded, (0, -padded.shape[1] % 4))
    return starts.flatten(), padded.view(32, -1, 4).transpose(0, 1).flatten()


def sparse11_pack(w: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Data, offsets and sizes (widest, the table's halves, entries, listed) of sparse11 (sparse11.h)."""
    (rows, cols), bits = w.shape, w.cpu().contiguous().view(torch.int16).long() & 0xFFFF
    bits = torch.where(bits & 0x7FFF == 0, 0, bits)
    half = w.dtype == torch.float16
    coded = bits[(bits != 0) & (bits & 7 == 0)] >> 3 if half else bits[bits != 0]
    counts = (coded >> 8).bincount(minlength=256).tolist()
    commonest = sorted((high for high in range(1, 256) if counts[high]), key=lambda high: (-counts[high], high))
    table = [0, *sorted(commonest[:7]), *[0] * (7 - len(commonest))]
    blocks, slabs = -(-rows // 64), -(-cols // 256)
    full = torch.zeros(blocks * 64, slabs * 256, dtype=torch.int64)
    full[:rows, :cols] = bits
    # [row block, slice, i / 2 % 2, lane / 4, slab, tile, step, i / 4, lane % 4, i % 2]
    full = full.view(blocks, 4, 2, 8, slabs, 4, 4, 2, 4, 2).permute(0, 4, 5, 1, 6, 3, 8, 7, 2, 9)
    elements = full.reshape(blocks * slabs, 4, 4, 4, 32, 8)  # [slab, tile, slice, step, lane, i]
    split = elements >> 3 if half else elements
    codes = ((split >> 8)[..., None] == torch.tensor(table)) & (torch.tensor(table) != 0)
    codes = codes.int().argmax(-1)  # 0 where there is none
    codes = torch.where(elements & 7 != 0, 0, codes) if half else codes
    listed = (codes == 0) & (elements != 0)
    places = torch.arange(1024).view(4, 32, 8)
    pieces, offsets = [], [0]
    for held, low, code, lists in zip(elements, split & 255, codes, listed, strict=True):
        words = (code[:, :, :3] << 4 * torch.arange(8)).sum(-1)
        words += ((code[:, :, 3:] >> torch.arange(3).view(3, 1, 1) & 1) << 4 * torch.arange(8) + 3).sum(-1)
        starts, streams = zip(*(_streams(low[:, at], (code != 0)[:, at]) for at in range(4)), strict=True)
        begins = [6784 + sum(t.numel() for t in streams[:at]) for at in range(5)]
        parts: list[int] = []
        entries: list[int] = []
        for tile in range(4):
            for slice_ in range(4):
                lacking = (places << 16 | held[tile, slice_])[lists[tile, slice_]].tolist()
                parts.append(begins[slice_] | (begins[4] + 4 * len(entries) if lacking else 6720) << 16)
                entries += [*lacking, 2**32 - 1] if lacking else []
        head = [*parts, 2**32 - 1, *[0] * 15]
        as_bytes = [torch.tensor(t, dtype=torch.int64).to(torch.uint32).view(torch.uint8) for t in (head, entries)]
        piece = torch.cat([words.flatten().to(torch.uint32).view(torch.uint8), *starts, as_bytes[0]])
        piece = torch.cat([piece, *streams, as_bytes[1]])
        pieces.append(torch.nn.functional.pad(piece, (0, -len(piece) % 128)))
        offsets.append(offsets[-1] + len(pieces[-1]) // 128)
    data = torch.cat([torch.zeros(0, dtype=torch.uint8), *pieces])
    widest = max(torch.tensor(offsets).diff().tolist(), default=0)
    halves = torch.tensor(table, dtype=torch.uint8).view(torch.uint32).tolist()
    sizes = [widest, *halves, int((bits != 0).sum()), int(listed.sum())]
    return data.view(w.dtype), torch.tensor(offsets, dtype=torch.int32), sizes


def _places(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of codes as dense8 and sparse8 hold them, [slab, tile, slice, step, lane, i] (bytes.h)."""
    (rows, cols), flip = codes.shape, 0x80 if codes.dtype == torch.int8 else 0
    held = codes.cpu().contiguous().view(torch.uint8)
    held = torch.where(codes.cpu().float() == 0, 0, held) ^ flip
    if not flip and dtype == torch.bfloat16:
        held = held & 0x80 | held << 3 & 0x78 | held >> 4 & 7
    blocks, slabs = -(-rows // 64), -(-cols // 256)
    full = torch.full((blocks * 64, slabs * 256), flip, dtype=torch.uint8)
    full[:rows, :cols] = held
    # [row block, slice, i / 2 % 2, lane / 4, slab, tile, step, i / 4, lane % 4, i % 2]
    full = full.view(blocks, 4, 2, 8, slabs, 4, 4, 2, 4, 2).permute(0, 4, 5, 1, 6, 3, 8, 7, 2, 9)
    return full.reshape(blocks * slabs, 4, 4, 4, 32, 8)


def dense8_pack(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Data of the dense8 layout (csrc/codecs/dense8/dense8.h) of codes [rows, cols]."""
    pairs = _places(codes, dtype).unflatten(3, (2, 2))  # steps 0 and 1, 2 and 3
    return pairs.transpose(4, 5).flatten().view(dtype)


def sparse8_pack(codes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[int]]:
    """Data, offsets and sizes (widest, kind, entries) of the sparse8 layout (sparse8.h) of codes."""
    held, zero = _places(codes, dtype), 0x80 if codes.dtype == torch.int8 else 0
    bits = 4 * torch.arange(8) + torch.tensor([2, 1, 0, 3])[:, None]
    pieces, offsets = [], [0]
    for slab in held:
        masks = ((slab != zero).long() << bits[:, None]).sum((2, 4))
        starts, streams = zip(*(_streams(slab[:, at], slab[:, at] != zero) for at in range(4)), strict=True)
        begins = [2688 + sum(t.numel() for t in streams[:at]) for at in range(4)]
        words = [masks.flatten().to(torch.uint32), torch.tensor([*begins, *[0] * 28], dtype=torch.uint32)]
        masks_, slices = (t.view(torch.uint8) for t in words)
        pieces.append(torch.cat([masks_, *starts, slices, *streams]))
        offsets.append(offsets[-1] + len(pieces[-1]) // 128)
    data = torch.cat([torch.zeros(0, dtype=torch.uint8), *pieces]).view(dtype)
    widest = max(torch.tensor(offsets).diff().tolist(), default=0)
    entries = int((codes.float() != 0).sum())
    return data, torch.tensor(offsets, dtype=torch.int32), [widest, int(codes.dtype == torch.int8), entries]


def slide_column(window: int, n: int) -> int:
    """First column of window v of a row: n - 1 windows a group of 2n columns, two columns apart."""
    group, place = divmod(window, n - 1)
    return group * 2 * n + 2 * place


def slide_depth(cols: int, n: int) -> int:
    """Expanded columns of a weight with that many columns: n = 0 is dense, else the pattern (2n-2):2n."""
    expanded = -(-cols // (2 * n)) * 4 * (n - 1) if n else cols
    return max(1, -(-expanded // 128)) * 128


def slide_expand(w: Tensor, n: int) -> Tensor:
    """The 2:4 weight [rows, depth]: each window takes the first two non-zeros of its four columns not yet taken."""
    rows, cols = w.shape
    left = torch.zeros(rows, cols + 2 * n)
    left[:, :cols] = w
    expanded = torch.zeros(rows, slide_depth(cols, n))
    if not n:
        expanded[:, :cols] = left
        return expanded.to(w.dtype)
    for window in range(-(-cols // (2 * n)) * (n - 1)):
        here = left[:, slide_column(window, n) :][:, :4]
        nonzero = here != 0
        taken = nonzero & (nonzero.cumsum(1) <= 2)
        expanded[:, 4 * window : 4 * window + 4][taken] = here[taken]
        here[taken] = 0
    assert not left.any(), f"w does not fit the pattern {2 * n - 2}:{2 * n}"
    return expanded.to(w.dtype)


def slide_lift(x: Tensor, n: int) -> Tensor:
    """x [..., cols] in expanded columns: lifted[4 v + d] = x[slide_column(v) + d], zeros after."""
    bits = x.cpu().contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
    padded = torch.nn.functional.pad(bits, (0, 2 * n))
    lifted = bits.new_zeros(*x.shape[:-1], slide_depth(x.shape[-1], n))
    if not n:
        lifted[..., : x.shape[-1]] = bits
        return lifted.view(x.dtype)
    for window in range(-(-x.shape[-1] // (2 * n)) * (n - 1)):
        start = slide_column(window, n)
        lifted[..., 4 * window : 4 * window + 4] = padded[..., start : start + 4]
    return lifted.view(x.dtype)


def slide_quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [..., cols] and float32 scales [...]: scale = absmax / Q, code = round(x * (Q / absmax))."""
    most = 127.0 if dtype == torch.int8 else 448.0
    wide = x.cpu().float()
    absmax = wide.abs().amax(-1, keepdim=True) if x.shape[-1] else wide.new_zeros(*x.shape[:-1], 1)
    before = torch.where(absmax < 2.0**-64, 2.0**64, 1.0)
    factor = torch.where(absmax == 0, 0.0, torch.tensor(most) / (absmax * before))  # a float / tensor is no division
    scaled = (wide * before * factor).clamp(-most, most)
    codes = scaled.nan_to_num().round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
    return codes, (absmax / most).squeeze(-1)


def slide_pack(codes: Tensor, n: int) -> Tensor:
    """The packed bytes (csrc/slide/slide.h) of a weight [rows, cols] that is of its final type."""
    size = codes.element_size()
    expanded = slide_expand(codes, n)
    tile_cols = 128 // size
    blocks, k_tiles = -(-codes.shape[0] // 64), -(-expanded.shape[1] // (2 * tile_cols)) * 2
    full = torch.zeros(blocks * 64, k_tiles * tile_cols, dtype=codes.dtype)
    full[: expanded.shape[0], : expanded.shape[1]] = expanded
    tiles = full.view(blocks, 64, k_tiles, tile_cols).transpose(1, 2)
    row = torch.arange(64)[:, None]
    if not n:
        chunks = tiles.contiguous().view(torch.uint8).view(blocks, k_tiles, 64, 8, 16)
        return chunks[:, :, row, torch.arange(8) ^ row % 8].reshape(blocks, k_tiles, -1)
    windows = tiles.reshape(*tiles.shape[:3], -1, 4)
    values = torch.zeros(*windows.shape[:-1], 2, dtype=codes.dtype)
    places = torch.zeros(*windows.shape[:-1], dtype=torch.int64)
    for index in torch.cartesian_prod(*map(torch.arange, windows.shape[:-1])).tolist():
        window = windows[tuple(index)]
        kept = window.float().nonzero().flatten().tolist()
        pair = kept if len(kept) == 2 else [0, 3] if kept == [3] else [*kept, 3] if kept else [0, 1]
        values[tuple(index)] = window[pair]
        places[tuple(index)] = pair[0] | pair[1] << 2
    chunks = values.view(torch.uint8).view(blocks, k_tiles, 64, 4, 16)
    chunks = chunks[:, :, row, torch.arange(4) ^ row // 2 % 4].reshape(blocks, k_tiles, -1)
    # [.., warp, row + 8, row, window] -> the order of the 32-bit words that threads hold
    if size == 1:
        places = places.view(blocks, k_tiles, 4, 2, 8, 2, 2, 8).permute(0, 1, 5, 2, 4, 6, 3, 7)
    else:
        places = places.view(blocks, k_tiles, 4, 2, 8, 2, 2, 4).permute(0, 1, 2, 4, 5, 6, 3, 7)
    nibbles = places.reshape(blocks, k_tiles, -1, 2)
    return torch.cat([chunks, (nibbles[..., 0] | nibbles[..., 1] << 4).to(torch.uint8)], -1)


def slide_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """In float64: quantise x as codes is, multiply, scale by token and by row, add the bias."""
    q, token_scale = (
        (x.cpu(), torch.ones(x.shape[:-1])) if codes.element_size() == 2 else slide_quantise(x, codes.dtype)
    )
    y = (q.double() @ codes.cpu().double().t()) * token_scale.double()[..., None] * scale.cpu().double()
    return y if bias is None else y + bias.cpu().double()


def planes12_to_dense(packed: Any) -> Tensor:
    """docs/lossless.md has it as a reader without macko writes it."""
    low, high, table, row_ptr, columns, values = (t.numpy() for t in packed.tensors().values())
    nibble = np.empty((len(high), 2 * high.shape[1]), np.uint8)
    nibble[:, 0::2], nibble[:, 1::2] = high & 15, high >> 4
    bits = np.concatenate([table, table | 128])[nibble[:, : low.shape[1]]].astype(np.uint16) << 8 | low
    if packed.dtype == torch.float16:
        bits = bits & 0x8000 | (bits & 0xFFF) << 3
    bits[np.repeat(np.arange(len(low)), np.diff(row_ptr)), columns] = values.view(np.uint16)
    return torch.from_numpy(bits.view(np.int16)).view(packed.dtype)
