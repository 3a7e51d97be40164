"""Parts of packed weights, the rows or columns that a process of tensor parallelism holds, and wholes of parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import codes
from .formats import ByteWeight, Dense8Weight, MackoWeight, PackedWeight, SlideWeight, Sparse8Weight

#: The canonical capacity is a multiple of so many entries (MACKO_CHUNK in csrc/macko/macko.h).
_CHUNK = 8


def sliced(weight: PackedWeight, dim: int, start: int, stop: int) -> PackedWeight:
    """Rows (dim 0) or columns (1) start to stop of a weight, in its format: what packing them would give.

    Of rows of a canonical weight the entries are copied and nothing is unpacked; anything else is packed anew.

    Raises:
        ValueError: the weight has no such rows or columns, or is quantised: its codes would not be those of the whole.
    """
    size = weight.shape[dim]
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{('rows', 'columns')[dim]} {start} to {stop} of a weight that has {size}")
    if (start, stop) == (0, size):
        return weight
    if isinstance(weight, SlideWeight):
        raise ValueError(f"a weight of format {weight.label} cannot be cut: pack each shard of the dense one")
    if isinstance(weight, ByteWeight):
        return weight.part(dim, start, stop)
    if isinstance(weight, MackoWeight) and dim == 0:
        return _canonical_rows(weight, start, stop)
    return _packed_as(weight, weight.to_dense().narrow(dim, start, stop - start))


def joined(parts: Sequence[PackedWeight], rows: int) -> ByteWeight | None:
    """Parts that hold values in 8 bits as one weight with their codes and scales; zeros up to so many rows.

    In their format, or of two in that of fewer bytes. None where no part holds values so.

    Raises:
        ValueError: parts hold values in several ways, and those of some would be rounded again.
    """
    in_bytes = [part for part in parts if isinstance(part, ByteWeight)]
    ways = {codes.KINDS[part.kind] for part in in_bytes} | ({"16 bits"} if len(in_bytes) < len(parts) else set())
    if not in_bytes:
        return None
    if len(ways) > 1:
        raise ValueError(f"parts of one matrix have values in {' and '.join(sorted(ways))}: pack all of them alike")
    kinds = {type(part) for part in in_bytes}
    wholes = [kind.joined(in_bytes, rows) for kind in (Dense8Weight, Sparse8Weight) if kind in kinds]
    return min(wholes, key=lambda whole: whole.nbytes)


def _canonical_rows(weight: MackoWeight, start: int, stop: int) -> MackoWeight:
    first, last = weight.row_ptr[[start, stop]].tolist()
    capacity = -(-(last - first) // _CHUNK) * _CHUNK
    values = weight.values.new_zeros(capacity)
    values[: last - first] = weight.values[first:last]
    in_byte = 8 // weight.delta_bits
    shifts = torch.arange(0, 8, weight.delta_bits, dtype=torch.uint8, device=weight.device)
    codes = weight.deltas[first // in_byte : -(-last // in_byte), None] >> shifts & (1 << weight.delta_bits) - 1
    deltas = weight.deltas.new_zeros(capacity)
    deltas[: last - first] = codes.flatten()[first % in_byte :][: last - first]
    deltas = (deltas.view(-1, in_byte) << shifts).sum(1, dtype=torch.uint8)
    row_ptr = weight.row_ptr[start : stop + 1] - first
    return dataclasses.replace(weight, values=values, deltas=deltas, row_ptr=row_ptr, rows=stop - start)


def gathered(weight: PackedWeight, dim: int, shape: tuple[int, int], mesh: Any) -> PackedWeight:
    """The whole of a weight [shape] on the CPU, of which each process of a DeviceMesh has rows (dim 0) or columns (1).

    In the format that files hold. All processes have to call; each of them needs room for the dense weight meanwhile.
    """
    from torch.distributed.tensor import DTensor, Shard

    size, stride = torch.Size(shape), (shape[1], 1)
    part = DTensor.from_local(weight.to_dense(), mesh, [Shard(dim)], run_check=False, shape=size, stride=stride)
    dense = part.full_tensor()
    if weight.is_layout or isinstance(weight, MackoWeight):  # parts may have chosen other widths of deltas
        return MackoWeight.smallest(dense).to("cpu")
    return _packed_as(weight, dense).to("cpu")


def _packed_as(weight: PackedWeight, dense: Tensor) -> PackedWeight:
    return weight.from_dense(dense.contiguous(), **weight._options())
