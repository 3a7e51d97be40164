"""The formats of slabs whose values have 16 bits: tile, dense12, sparse11. Those of 8 bits are in bytes.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from .. import _library
from .base import PackedWeight, Shape, any_size, not_held
from .canonical import MackoWeight
from .registry import SAVED

#: Where a fault of a slab is.
AT = "slab {entry} of row block {place}"


class SlabWeight(PackedWeight):
    """What tile and the layouts of slabs like its own (csrc/slab/slab.h) have in common."""

    values_name: ClassVar[str] = "data"
    overlaps: ClassVar[bool] = True
    stores_parts: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    #: Sizes that the op `check` counts.
    counted: ClassVar[tuple[str, ...]] = ("entries",)

    @classmethod
    def runs(cls, device: torch.device, dtype: torch.dtype, cols: int = 0) -> bool:
        return super().runs(device, dtype) and (device.type != "cuda" or _library.slab_kernels(device)[0] != "none")

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        shapes = {"data": (None, any_size() * 64), "offsets": (torch.int32, cls.num_slabs(rows, cols) + 1)}
        return [shapes[name] for name in cls.tensor_names]

    @staticmethod
    def num_slabs(rows: Any, cols: Any) -> Any:
        return (rows + 63) // 64 * ((cols + 255) // 256)

    def _check_sizes(self, found: int, entry: int) -> None:
        for name, count in zip(self.counted, (found, entry), strict=False):
            if count != getattr(self, name):
                self._refuse(f"{name} is {getattr(self, name)}, it has {count}")

    @property
    def stored(self) -> int:
        """Non-zeros held; of a dense weight all elements."""
        return getattr(self, "entries", self.rows * self.cols)

    @property
    def density(self) -> float:
        """Non-zeros over all; waits for the device where the weight is held dense."""
        return self.stored / max(1, self.rows * self.cols) if "entries" in self.size_names else super().density


@dataclasses.dataclass(frozen=True, eq=False)
class TileWeight(SlabWeight):
    """How a GPU multiplies a macko weight by several tokens at a time; csrc/codecs/tile/tile.h specifies the bytes.

    Held instead of the canonical tensors, never saved: `to_macko` gives what is. The same bytes on every device; the
    ops run on the CPU too, where a weight is better held as canonical or bitmap.

    Attributes:
        data: [units * 64], float16 or bfloat16: masks and values, slab after slab.
        offsets: [slabs + 1], int32, in units of 128 bytes.
        rows, cols: shape of the dense weight.
        widest: units of the largest slab. entries: non-zeros held.
        delta_bits: of the canonical weight that it was made from.
    """

    format: ClassVar[str] = "tile"
    device_types: ClassVar[tuple[str, ...]] = ("cuda",)
    is_layout: ClassVar[bool] = True
    faults: ClassVar[Mapping[int, str]] = {
        1: "offsets[{entry}] is {found}, expected 0 at the start and 21 to 277 more than the one before",
        2: "widest is {of.widest}, the largest slab has {found}",
        3: "offsets ends with {found}, data has {of.data.shape[0]} elements, 64 a unit",
        4: f"{AT}: word {{found}} of its masks has a value outside of the matrix",
        5: f"{AT} has another size than the {{found}} rows of values that its masks say",
        6: f"{AT}, byte {{found}}: not the row where a slice's values begin, or not zero after the last slice's",
        7: f"{AT}, byte {{found}}: not the spill offset of these values",
        8: f"{AT}, byte {{found}}: a zero is stored, or what is no value is not zero",
    }

    data: Tensor
    offsets: Tensor
    rows: int
    cols: int
    widest: int
    entries: int
    delta_bits: int = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Dense12Weight(SlabWeight):
    """A dense weight in 12 bits an element, bit for bit; csrc/codecs/dense12/dense12.h specifies the bytes.

    It is made from any bfloat16 weight whose exponents lie close enough, or such a one that was converted to float16,
    and saved as that dense weight. The same bytes on every device; a CPU multiplies it too, more slowly than the dense.

    Attributes:
        data: [slabs * slab_units * 64], of w's dtype: bytes and codes of elements, and those listed, slab after slab.
        rows, cols: shape of the dense weight.
        slab_units: of 128 bytes, of each slab. table_low, table_high: upper exponent bits by code, a byte each.
        listed: elements that the table lacks.
    """

    format: ClassVar[str] = "dense12"
    of_dense: ClassVar[bool] = True
    saved_dense: ClassVar[bool] = True
    any_weight: ClassVar[bool] = True
    counted: ClassVar[tuple[str, ...]] = ("listed",)
    faults: ClassVar[Mapping[int, str]] = {
        1: "byte {found} of its table: expected 0, then rising bytes under 128 (float16: 16), then zeros",
        2: f"{AT}: part {{found}} of its list does not begin where the one before it ends, or ends after the slab",
        3: f"{AT}: entry {{found}} of its list is not after the one before it, or is of no place",
        4: f"{AT}: entry {{found}} of its list has a code, is outside of the matrix, or what stands there is not +0.0",
        5: f"{AT}, byte {{found}}: an element outside of the matrix is not +0.0",
        6: f"{AT}, byte {{found}}: a code is not the lowest of its exponent",
        7: f"{AT}, byte {{found}}: not zero after the list",
        8: "slab_units is {of.slab_units}, the fullest slab needs {found}",
    }

    data: Tensor
    rows: int
    cols: int
    slab_units: int
    table_low: int
    table_high: int
    listed: int

    @classmethod
    def from_dense(cls, w: Tensor) -> Self:  # type: ignore[override]
        """Packs w [rows, cols].

        Raises:
            ValueError: w has another dtype, or its exponents are too far apart, or it is float16 and was never
                bfloat16: says how many elements the table lacks.
        """
        cls._check_dtype(w.dtype)
        with not_held("the table of dense12"):
            tensors, header = torch.ops.macko.pack(w, cls.number, [])
        return cls(*tensors, *header.tolist()[1:])

    @classmethod
    def bytes_of(cls, rows: int, cols: int, listed: int, fullest: int) -> int | None:
        """Bytes of a weight whose table lacks so many elements, `fullest` of them in one slab; None: it is not held."""
        units, most = -(-(24640 + 4 * fullest) // 128), 64 * 256 * 2 // 128  # as csrc/codecs/dense12/dense12.h has it
        return None if units > most or listed > rows * cols // 100 else cls.num_slabs(rows, cols) * units * 128

    def to_saved(self) -> Tensor:
        on_meta = self.device.type == "meta"
        return torch.empty(self.shape, dtype=self.dtype, device="meta") if on_meta else self.to_dense().cpu()

    def to_file(self) -> PackedWeight:
        """In planes, on the CPU."""
        planes: Any = SAVED[self.instead_in_files()]
        if self.device.type == "meta":
            return planes.on_meta(self.rows, self.cols, self.dtype)
        return planes.from_dense(self.to_dense())

    def about(self) -> None:
        return None

    @classmethod
    def instead_in_files(cls) -> str:
        return "planes12"

    @property
    def names_in_files(self) -> tuple[str, ...]:
        return ("weight",)

    def rows_anew(self, start: int, stop: int) -> PackedWeight:
        return self.replace(rows=stop - start) if self.device.type == "meta" else super().rows_anew(start, stop)

    @property
    def known_density(self) -> None:
        return None  # it would have to be unpacked

    @property
    def note(self) -> str:
        return f"{self.listed / max(1, self.rows * self.cols):.3%} of its weights listed"

    def _options(self) -> dict[str, int]:
        return {}  # its sizes follow from the weight

    def _values(self) -> Tensor:
        return self.to_dense()


@dataclasses.dataclass(frozen=True, eq=False)
class Sparse11Weight(SlabWeight):
    """As tile, in 3 bits an element and 8 a value; csrc/codecs/sparse11/sparse11.h specifies the bytes.

    For bfloat16, and float16 that was converted from it. Lossless: `to_macko` gives what it was made from. Held instead
    of the canonical tensors, never saved. The same bytes on every device; a CPU multiplies it too, more slowly than
    canonical or bitmap.

    Attributes:
        data: [units * 64], of the weight's dtype: codes and low bytes, and values that are listed, slab after slab.
        offsets: [slabs + 1], int32, in units of 128 bytes.
        rows, cols: shape of the dense weight.
        widest: units of the largest slab. table_low, table_high: high bytes by code.
        entries: non-zeros held. listed: of them those that the table lacks.
        delta_bits: of the canonical weight that it was made from.
    """

    format: ClassVar[str] = "sparse11"
    device_types: ClassVar[tuple[str, ...]] = ("cuda",)
    is_layout: ClassVar[bool] = True
    timed_by: ClassVar[str] = "tile"
    counted: ClassVar[tuple[str, ...]] = ("entries", "listed")
    limits: ClassVar[Mapping[str, Sequence[int]]] = {
        **PackedWeight.limits, "table_low": range(2**32), "table_high": range(2**32)
    }  # fmt: skip
    faults: ClassVar[Mapping[int, str]] = {
        1: "byte {found} of its table: expected 0, then rising bytes (float16: under 32), then zeros",
        2: "offsets[{entry}] is {found}, expected 0 at the start and 53 to 246 more than the one before",
        3: "widest is {of.widest}, the largest slab has {found}",
        4: "offsets ends with {found}, data has {of.data.shape[0]} elements, 64 a unit",
        5: f"{AT}, byte {{found}}: a code of no high byte, or of an element outside of the matrix",
        6: f"{AT}, byte {{found}}: not the start of these values",
        7: f"{AT}, byte {{found}}: not where a part's values or its places in the list begin, or not zero after them",
        8: f"{AT}, byte {{found}}: not after the place before it in the list, or of no place",
        9: f"{AT}, byte {{found}}: a listed value is zero or has a code, or its place has one or is outside",
        10: f"{AT} has another size than the {{found}} units that its codes and its list say",
        11: f"{AT}, byte {{found}}: a zero is stored, or what is no value is not zero",
    }

    data: Tensor
    offsets: Tensor
    rows: int
    cols: int
    widest: int
    table_low: int
    table_high: int
    entries: int
    listed: int
    delta_bits: int = 4

    @classmethod
    def from_macko(cls, weight: MackoWeight) -> Self:
        """Lays out a macko weight.

        Raises:
            ValueError: it has another dtype, or its exponents are too far apart, or it is float16 and was never
                bfloat16: says how many values the table lacks.
        """
        cls._check_dtype(weight.dtype)
        with not_held("the table of sparse11"):
            return cls._laid_out(weight)

    @property
    def note(self) -> str:
        return f"{self.listed / max(1, self.entries):.3%} of its values listed"
