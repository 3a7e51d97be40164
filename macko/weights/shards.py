"""Parts of packed weights, the rows or columns that a process of tensor parallelism holds, and wholes of parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .base import PackedWeight
from .canonical import MackoWeight
from .planes import Planes12Weight
from .slab import Dense12Weight

#: What macko.shards had until PackedWeight did; it goes in macko 0.3.
sliced = PackedWeight.cut


def joined(parts: Sequence[PackedWeight], rows: int) -> PackedWeight | None:
    """Parts whose values are codes as one weight with their codes and scales; zeros up to so many rows.

    In their format, or of two in that of fewer bytes. None where a part is of a format without codes.

    Raises:
        ValueError: parts hold values in several ways, and those of some would be rounded again.
    """
    ways = {part.values_kept_as for part in parts}
    if len(ways) > 1:
        every = " and ".join(sorted(ways))
        raise ValueError(f"parts of one matrix have values in {every}: hold all of them alike, or split_ them first")
    kinds = dict.fromkeys(type(part) for part in parts)
    if not all(kind.holds_codes for kind in kinds):
        return None
    return min((kind.joined(parts, rows) for kind in kinds), key=lambda whole: whole.nbytes)


def joined_planes(parts: Sequence[PackedWeight], dense: Tensor) -> PackedWeight | Tensor | None:
    """Of parts of which some are planes the whole in dense12; dense, as it is given, where that does not hold it.

    None where none is.
    """
    if not any(isinstance(part, Planes12Weight) for part in parts):
        return None
    try:
        return Dense12Weight.from_dense(dense)
    except ValueError:
        return dense


def gathered_as(weight: PackedWeight) -> str:
    """What `gathered` takes of a part: that of all parts has to be the same."""
    return f"codes of {weight.values_kept_as}" if weight.holds_codes else "dense rows"


def gathered(weight: PackedWeight, dim: int, shape: tuple[int, int], mesh: Any) -> PackedWeight:
    """The whole of a weight [shape] on the CPU, of which each process of a DeviceMesh has rows (dim 0) or columns (1).

    In the format that files hold; codes and scales are those of the parts. All processes have to call; each of them
    takes memory for the dense weight meanwhile.

    Raises:
        ValueError: parts of columns have scales of their own, which no weight holds together.
    """
    if weight.holds_codes:
        return _gathered_codes(weight, dim, shape, mesh)
    dense = _whole(weight.to_dense(), dim, shape, mesh)
    if not weight.keeps_format:  # parts may have chosen other widths of deltas
        return MackoWeight.smallest(dense).to("cpu")
    return weight.packed_alike(dense).to("cpu")


def _gathered_codes(weight: PackedWeight, dim: int, shape: tuple[int, int], mesh: Any) -> PackedWeight:
    codes, part_scales = weight.coded()
    # Of an element's bytes none is cut off.
    numbers = codes.view(torch.uint8).unflatten(1, (codes.shape[1], codes.itemsize))
    numbers = _whole(numbers, dim, (*shape, codes.itemsize), mesh).flatten(1).view(codes.dtype)
    if dim == 0:
        scales = _whole(part_scales, 0, shape[:1], mesh)
    else:
        of_parts = _whole(part_scales[None], 0, (mesh.size(), len(part_scales)), mesh)
        scales = of_parts[0]
        if not torch.equal(of_parts, scales.expand_as(of_parts)):
            raise ValueError(
                "each process has rounded its columns by scales of their own, and a file holds one scale a row: "
                "convert the dense model without tensor parallelism, and load what that gives with it"
            )
    return weight.of_codes(numbers.cpu(), scales.cpu())


def _whole(part: Tensor, dim: int, shape: Sequence[int], mesh: Any) -> Tensor:
    """The tensor [shape] of which each process of a DeviceMesh has a part along a dimension."""
    from torch.distributed.tensor import DTensor, Shard

    size, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=size, stride=stride).full_tensor()
