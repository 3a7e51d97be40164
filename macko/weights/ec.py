"""EC-CSR, the format of the EC-SpMV paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from .. import ops
from .base import PackedWeight, Shape, any_size


@dataclasses.dataclass(frozen=True, eq=False)
class EcWeight(PackedWeight):
    """EC-CSR, the format of the EC-SpMV paper, and its widening; contrib/ec/ec.h specifies the bytes.

    The tensors are as ops.ec_pack returns them; the ints besides rows and cols are its options.
    """

    format: ClassVar[str] = "ec"
    of_dense: ClassVar[bool] = True
    merges: ClassVar[bool] = False
    values_name: ClassVar[str] = "block_values"
    faults: ClassVar[Mapping[int, str]] = {
        1: "sets[{place}] is no possible set, or not as long as its arrays",
        2: "tile_ptr[{place}, {entry}] is {found}",
        3: "block_indptr of set {place} is {found} at block {entry}",
        4: "row_indices[{entry}] is {found}: outside its tile, twice in its block, or none for a value",
        5: "value {entry} of set {place} is at column {found}, the matrix has {of.cols} columns",
        6: "column {entry} of set {place} begins a lane, and its delta is not 0",
        7: "value {entry} of set {place} is -0.0",
        8: "value {entry} of set {place}, at column {found}, is there twice",
        9: "col_order[{entry}] is {found}, which is no column or there twice",
    }
    limits: ClassVar[Mapping[str, Sequence[int]]] = {}  # ops.ec_pack knows them

    block_values: Tensor
    delta_indices: Tensor
    base_indices: Tensor
    block_indptr: Tensor
    row_indices: Tensor
    tile_ptr: Tensor
    sets: Tensor
    col_order: Tensor
    rows: int
    cols: int
    delta_bits: int = 0
    lanes: int = 8
    max_height: int = 1
    min_width: int = 128
    max_width: int = 8192
    tile_rows: int = 128
    max_slabs: int = 1

    @classmethod
    def from_dense(cls, w: Tensor, **options: int) -> Self:  # type: ignore[override]
        """Packs w [rows, cols]. The options are those of ops.ec_pack; by default what was fastest on an H200.

        That is 8 lanes a row, no shared blocks, and the width of deltas of fewest bytes.
        """
        options = {name: getattr(cls, name) for name in cls.size_names[2:]} | options
        return cls(*ops.ec_pack(w, **options), w.shape[0], w.shape[1], *options.values())

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        index, sets = torch.uint16 if cols <= 65536 else torch.int32, any_size()
        tiles = (rows + options[5] - 1) // options[5]
        values, deltas, bases = (None, any_size()), (torch.uint8, any_size()), (index, any_size())
        block_indptr, row_indices, col_order = (torch.int32, any_size()), (torch.int32, any_size()), (index, any_size())
        tile_ptr, held_sets = (torch.int32, sets, tiles + 1), (torch.int64, sets + 1, 8)
        return [values, deltas, bases, block_indptr, row_indices, tile_ptr, held_sets, col_order]

    @classmethod
    def paper(cls, w: Tensor, delta_bits: int = 4) -> Self:
        """Packs w as the paper does: blocks of up to 16 rows, then single rows on 32 lanes; deltas of 4 or 8 bits."""
        return cls.from_dense(w, delta_bits=delta_bits, lanes=32, max_height=16)

    @classmethod
    def smallest(cls, w: Tensor) -> Self:
        """Packs w in the fewest bytes of seven ways to do it, each of which is tried.

        They are 8, 4, 2 and 1 lanes a row, with columns by density and widths of deltas by size; 4 lanes with shared
        blocks of at least 512 columns; and the paper's, with both of its widths. More lanes find less padding where
        rows are uneven, fewer where they are short; blocks pay where rows share most of their columns, and the paper's
        single rows where a tile has few rows that are not empty. Slower than the default.
        """
        options: list[dict[str, int]] = [{"lanes": 8}]
        options += [{"lanes": lanes, "tile_rows": 1024, "max_slabs": 5 - lanes} for lanes in (4, 2, 1)]
        options += [{"lanes": 4, "delta_bits": 4, "max_height": 16, "min_width": 512}]
        options += [{"lanes": 32, "delta_bits": bits, "max_height": 16} for bits in (4, 8)]
        return min((cls.from_dense(w, **tried) for tried in options), key=lambda packed: packed.nbytes)

    def _bad_field(self) -> str:
        if reason := super()._bad_field():
            return reason
        try:  # options that pack refuses
            self.from_dense(torch.empty(0, 0, dtype=torch.float32, device="cpu"), **self._options())
        except RuntimeError as error:
            return str(error)
        return ""

    @property
    def stored(self) -> int:
        """Entries held, non-zeros and explicit zeros."""
        return self.block_values.numel()
