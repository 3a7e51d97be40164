"""SlideSparse's format: patterns (2n-2):2n for the 2:4 tensor cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from .. import _library, ops
from . import codes
from .base import PackedWeight, Shape, not_held, stacked_codes

#: Types of a slide weight's values, by SlideWeight.element, and of its activations, by SlideWeight.source.
SLIDE_ELEMENTS = ops.SLIDE_ELEMENTS
SLIDE_SOURCES = (torch.float16, torch.bfloat16, torch.float32)
#: Patterns (2n-2):2n by n.
SLIDE_PATTERNS = {f"{2 * n - 2}:{2 * n}": n for n in range(2, 9)}


@dataclasses.dataclass(frozen=True, eq=False)
class SlideWeight(PackedWeight):
    """A weight of pattern (2n-2):2n for 2:4 tensor cores, or a dense one for the same kernel; csrc/slide/slide.h.

    With 8-bit elements activations are quantised token by token, and `to_dense` gives the quantised weight.

    Attributes:
        tiles: [row_blocks, k_tiles, tile_bytes], uint8. scale: [rows], float32.
        dense_tiles: empty, as sparse_from and sparse_to are 0: files have them, of a second weight beside this one.
        rows, cols: shape of the dense weight.
        n: the pattern (2n-2):2n as which it is packed, 0 for dense.
        element: index into SLIDE_ELEMENTS, the type of packed values.
        source: index into SLIDE_SOURCES, the type of activations and outputs.
    """

    format: ClassVar[str] = "slide"
    counts_of_pack: ClassVar[int] = 1  # non-zeros that pruning dropped
    of_dense: ClassVar[bool] = True
    holds_codes: ClassVar[bool] = True
    merges: ClassVar[bool] = False  # its values may be quantised, and files hold it as it is
    values_name: ClassVar[str] = "tiles"
    limits: ClassVar[Mapping[str, Sequence[int]]] = {
        **{"n": (0, *range(2, 9)), "element": range(4), "source": range(3)},
        **{"sparse_from": (0,), "sparse_to": (0,)},
    }

    tiles: Tensor
    scale: Tensor
    dense_tiles: Tensor
    rows: int
    cols: int
    n: int
    element: int
    source: int
    sparse_from: int = 0
    sparse_to: int = 0

    @classmethod
    def runs(cls, device: torch.device, dtype: torch.dtype, cols: int = 0) -> bool:
        """Whether there is a kernel that keeps weights of this dtype as they are: on the CPU and from sm_80 on.

        Not where float8 products are made of half-precision ones: before sm_89, and on sm_100 to 110.
        """
        major, minor = (9, 0) if device.type == "cpu" else _library.code_capability(device)
        has_float8 = (8, 9) <= (major, minor) < (10, 0) or major >= 12
        return major >= 8 and dtype in SLIDE_ELEMENTS and (dtype != torch.float8_e4m3fn or has_float8)

    @classmethod
    def from_dense(
        cls,
        w: Tensor,
        n: int = -1,
        element: int = -1,
        source: int = -1,
        prune: bool = False,
    ) -> Self:
        """Packs w [rows, cols].

        Args:
            n: 2 to 8 for (2n-2):2n; 0 for dense; -1 for the sparsest pattern that w fits, or dense.
            element: index into SLIDE_ELEMENTS; 16-bit ones have to be w's dtype; -1: w's dtype, which loses nothing.
            source: type of activations; -1: w's dtype.
            prune: whether groups with too many non-zeros lose the smallest.

        Raises:
            ValueError: w does not fit the pattern: names the first row, group and count; or has 32 bits and is to stay.
        """
        if element < 0 and w.dtype not in SLIDE_ELEMENTS:
            raise ValueError(f"the slide format holds int8, float8, float16 and bfloat16, the weight is {w.dtype}")
        n = sparsest_pattern(w) if n < 0 else n
        element = SLIDE_ELEMENTS.index(w.dtype) if element < 0 else element
        with not_held("does not fit the pattern"):
            tiles, scale, _ = ops.slide_pack(w, n, SLIDE_ELEMENTS[element], prune)
        source = SLIDE_SOURCES.index(w.dtype) if source < 0 else source
        rows, cols = w.shape
        return cls(tiles, scale, tiles.new_empty(0, 0, 0), rows, cols, n, element, source)

    def of_finite(self) -> Self:
        """This weight; ValueError where it was rounded and a row had NaN or Inf. Waits for the device then."""
        if self.element < 2 and not self.scale.is_meta and len(bad := (~self.scale.isfinite()).nonzero()):
            codes.refuse_row(int(bad[0]), 1 - self.element)
        return self

    @classmethod
    def from_codes(cls, numbers: Tensor, scale: Tensor, n: int, source: int) -> Self:
        """Packs values of a type in SLIDE_ELEMENTS as they are, for rows that have these scales.

        Raises:
            ValueError: they do not fit the pattern, as from_dense says it.
        """
        return cls.from_dense(numbers.contiguous(), n, source=source).replace(scale=scale)

    @classmethod
    def from_columns(cls, w: Tensor, largest: Tensor, n: int, element: int) -> Self:
        """Packs some columns of a weight, w [rows, cols], with the codes and scales that they have in the whole one.

        Args:
            largest: [rows], the largest magnitude of each row of the whole weight.
            n, element: as in from_dense.

        Raises:
            ValueError: a row of the whole weight has NaN or Inf.
        """
        wide = torch.cat([w, largest.to(w)[:, None]], 1)
        return cls.from_dense(wide, 0, element).of_finite().cut(1, 0, w.shape[1]).as_pattern(n)  # type: ignore[attr-defined]

    def of_columns(self, w: Tensor, largest: Tensor) -> Self:
        return self if self.element >= 2 else self.from_columns(w, largest, self.n, self.element)

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        n, element, *_ = options
        size = SLIDE_ELEMENTS[element].itemsize
        k_tiles = (ops.slide_depth(cols, n) * size + 255) // 256 * 2
        tiles = (torch.uint8, (rows + 63) // 64, k_tiles, (4096 + 1024 // size) if n else 8192)
        return [tiles, (torch.float32, rows), (torch.uint8, 0, 0, 0)]

    def to_dense(self) -> Tensor:
        """The dense [rows, cols] weight, as quantised."""
        numbers, scale = self.coded()
        return numbers if self.element >= 2 else (numbers.float() * scale[:, None]).to(self.dtype)

    def multiplied(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.element >= 2:
            return None
        found = ops.slide_quant_fused(x, 0, SLIDE_ELEMENTS[self.element])
        each = [(codes[..., : self.cols].double(), scale.double()) for codes, scale in (found, self.coded())]
        return each[0][0] * each[0][1][..., None], each[1][0] * each[1][1][:, None]

    def cuts(self, x: Tensor) -> int:
        """Of float8 on a GPU one for 32 expanded columns."""
        is_cut = x.is_cuda and SLIDE_ELEMENTS[self.element] == torch.float8_e4m3fn
        return ops.slide_depth(self.cols, self.n) // 32 + 1 if is_cut else 0

    def coded(self) -> tuple[Tensor, Tensor]:
        """Values as packed and their scales, which are 1 where values are not quantised."""
        return super().to_dense(), self.scale

    def of_codes(self, numbers: Tensor, scales: Tensor) -> Self:
        """Of this pattern; where another part of a whole is of a wider one, as the sparsest that all of it fits."""
        n = self.n if not self.n or numbers.is_meta or fits_pattern(numbers, self.n) else -1
        return self.from_codes(numbers, scales, n, self.source)

    def as_pattern(self, n: int) -> Self:
        """The same values packed as pattern (2n-2):2n, or as dense for n = 0."""
        return self if n == self.n else self.from_codes(*self.coded(), n, self.source)

    @classmethod
    def joined(cls, parts: Sequence[Self], rows: int) -> Self:
        """As the pattern of all parts; where they have several, or none, as the sparsest that all of them fit."""
        patterns = {part.n for part in parts}
        n = parts[0].n if len(patterns) == 1 and parts[0].n else -1
        return cls.from_codes(*stacked_codes(parts, rows), n, parts[0].source)

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        """Whether it gives the weight back that it was packed from: of 16-bit values."""
        return self.element >= 2

    @property
    def values_kept_as(self) -> str:
        return f"slide's {self._type}" if self.element < 2 else "16 bits"

    def _options(self) -> dict[str, int]:
        return {"n": self.n, "element": self.element, "source": self.source}

    @property
    def pattern(self) -> str:
        return f"{2 * self.n - 2}:{2 * self.n}" if self.n else ""

    @property
    def label(self) -> str:
        """As "slide 6:8 int8"."""
        return f"slide {self.pattern or 'dense'} {self._type}"

    @property
    def _type(self) -> str:
        return str(SLIDE_ELEMENTS[self.element]).removeprefix("torch.")

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same weight elsewhere. Of an 8-bit one dtype changes the activations only."""
        device = self.device if device is None else torch.device(device)
        if dtype in (None, self.dtype) or self.element < 2:
            source = SLIDE_SOURCES.index(dtype or self.dtype)
            moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
            return self.replace(**moved, source=source)
        element = SLIDE_ELEMENTS.index(dtype) if dtype in SLIDE_ELEMENTS else -1
        if element < 2:
            raise TypeError(f"a slide weight of 16-bit values cannot become {dtype}")
        return self.from_dense(self.to_dense().to(device, dtype), self.n, element)

    def validate(self) -> None:
        """Checks that this is what packing its own values gives.

        Raises:
            ValueError: it is not; names the first tile that differs.
        """
        if reason := self._guarded(self._other):
            self._refuse(reason)

    def _other(self) -> str:
        """What is not as packing its own values gives it, or nothing."""
        numbers = super().to_dense()  # refuses tensors of another dtype or shape
        kind = numbers.dtype
        if self.element >= 2 and kind != self.dtype:
            return f"its values are {kind}, its activations {self.dtype}"
        if numbers.shape != self.shape:
            return f"scale has shape {list(self.scale.shape)}, expected [{self.rows}]"
        if self.element >= 2 and bool((self.scale != 1).any()):
            return "scale is not 1, but its values are not quantised"
        if len(bad := (~(self.scale.isfinite() & (self.scale >= 0))).nonzero()):
            return f"the scale of row {int(bad[0])} is negative, NaN or Inf"
        again = ops.slide_pack(numbers, self.n, kind)[0]
        if not torch.equal(again, self.tiles):
            block, tile = (again != self.tiles).any(2).nonzero()[0].tolist()
            return f"row block {block}, tile {tile} is not what packing its values gives"
        if self.dense_tiles.dtype != torch.uint8 or self.dense_tiles.shape != (0, 0, 0):
            return f"dense_tiles has shape {list(self.dense_tiles.shape)}, expected [0, 0, 0]"
        return ""

    def _cut(self, dim: int, start: int, stop: int) -> PackedWeight:
        if dim == 1:
            for column in (start, stop):
                if group := straddling(self.cols, column, self.n):
                    raise ValueError(f"{group} straddles a cut at column {column}: pack it dense, or cut it elsewhere")
        return super()._cut(dim, start, stop)

    @property
    def dtype(self) -> torch.dtype:
        return SLIDE_SOURCES[self.source]

    @property
    def stored(self) -> int:
        """Values held, zeros that fill windows among them."""
        blocks, k_tiles, _ = self.tiles.shape
        return blocks * k_tiles * (4096 if self.n else 8192) // SLIDE_ELEMENTS[self.element].itemsize

    def _values(self) -> Tensor:
        return super().to_dense().float()


def straddling(cols: int, column: int, n: int) -> str:
    """The group of pattern (2n-2):2n that a cut before a column goes through, with its columns; "" for none."""
    group, within = divmod(column, 2 * n) if n else (0, 0)
    if not within or column == cols:
        return ""
    return f"group {group} of {2 * n - 2}:{2 * n} (columns {group * 2 * n} to {group * 2 * n + 2 * n - 1})"


def sparsest_pattern(w: Tensor) -> int:
    """The smallest n for which w [rows, cols] is of pattern (2n-2):2n, or 0."""
    return next((n for n in SLIDE_PATTERNS.values() if fits_pattern(w, n)), 0)


def fits_pattern(w: Tensor, n: int) -> bool:
    """Whether w [rows, cols] is of pattern (2n-2):2n."""
    nonzero = torch.nn.functional.pad(w != 0, (0, -w.shape[1] % (2 * n)))
    return not w.numel() or int(nonzero.view(w.shape[0], -1, 2 * n).sum(-1).amax()) <= 2 * n - 2
