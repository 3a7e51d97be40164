"""The formats of 8 bits a value, codes times a scale a row: dense8 and sparse8, and macko8, which files hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from . import codes
from .base import PackedWeight, Shape, Words, any_size, stacked_codes
from .canonical import MackoWeight
from .slab import AT, SlabWeight


class ByteWeight(SlabWeight):
    """What the formats of 8 bits a value, dense8 and sparse8, have in common: codes times a scale a row.

    A weight is rounded once, where it is packed; nothing after that changes a code. Files hold them as Macko8Weight.
    """

    of_dense: ClassVar[bool] = True
    holds_codes: ClassVar[bool] = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    lossless: ClassVar[bool] = False
    limits: ClassVar[Mapping[str, Sequence[int]]] = {"kind": range(len(codes.KINDS))}
    data: Tensor
    scales: Tensor
    kind: int

    @classmethod
    def from_dense(cls, w: Tensor, kind: int = 0) -> Self:  # type: ignore[override]
        """Quantises w [rows, cols]: what is on a grid of codes already keeps its values (macko.codes.quantised).

        Args:
            kind: 0 for fp8 (float8_e4m3fn), 1 for int8.

        Raises:
            ValueError: w has another dtype than bfloat16 and float16, or NaN or Inf in it.
        """
        cls._check_dtype(w.dtype)
        return cls.from_codes(*codes.quantised(w, kind), w.dtype)

    @classmethod
    def from_codes(cls, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Self:
        """Packs values that are quantised already, as they are.

        Args:
            values: [rows, cols], float8_e4m3fn or int8.
            scales: [rows], float32, above 0.
            dtype: of x and y, bfloat16 or float16.

        Raises:
            ValueError: another dtype or shape; a code that is NaN; a scale that is not above 0 or not finite.
        """
        if dtype not in cls.dtypes:
            raise ValueError(f"dtype is {dtype}, expected bfloat16 or float16")
        codes.check(values, scales)
        options = [codes.TYPES.index(values.dtype), cls.dtypes[::-1].index(dtype)]
        tensors, header = torch.ops.macko.pack(values.view(torch.uint8), cls.number, options)
        return cls(*tensors[:-1], scales.contiguous(), *header.tolist()[1:])  # type: ignore[call-arg]

    @classmethod
    def on_meta(cls, rows: int, cols: int, kind: int, dtype: torch.dtype) -> Self:
        """A weight without content."""
        types = {"data": dtype, "offsets": torch.int32, "scales": torch.float32}
        sizes = {"data": 0, "offsets": 0, "scales": rows}
        tensors = {name: torch.empty(sizes[name], dtype=types[name], device="meta") for name in cls.tensor_names}
        return cls(**tensors, **(dict.fromkeys(cls.size_names, 0) | {"rows": rows, "cols": cols, "kind": kind}))

    def codes(self) -> Tensor:
        """The values without scales, [rows, cols], float8_e4m3fn or int8."""
        numbers = self.replace(scales=torch.ones_like(self.scales)).to_dense()
        return numbers.to(codes.TYPES[self.kind])

    def unrounded(self) -> Tensor:
        """Codes times scales, [rows, cols], float64: what a GPU multiplies with, from compute capability 8.0 on.

        On a CPU, and on a GPU for more tokens than its kernels take (512 at most without wgmma), products are by dense
        rows, those of to_dense, which are rounded to dtype.
        """
        return self.codes().double() * self.scales.double()[:, None]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> PackedWeight:
        """The same codes and scales elsewhere, for activations of dtype; of float32 the canonical weight."""
        if dtype in (None, self.dtype):
            return super().to(device)
        device = self.device if device is None else torch.device(device)
        if self.device.type == "meta":
            return self.replace(data=self.data.to(dtype))
        numbers, scales = self.codes().to(device), self.scales.to(device)
        if dtype in self.dtypes:
            return self.from_codes(numbers, scales, dtype)
        return MackoWeight.smallest((numbers.float() * scales[:, None]).to(dtype))

    @property
    def values_kept_as(self) -> str:
        return codes.KINDS[self.kind]

    def coded(self) -> tuple[Tensor, Tensor]:
        return self.codes(), self.scales

    def of_codes(self, numbers: Tensor, scales: Tensor) -> Self:
        return self.from_codes(numbers, scales, self.dtype)

    @classmethod
    def joined(cls, parts: Sequence[ByteWeight], rows: int) -> Self:
        return cls.from_codes(*stacked_codes(parts, rows), parts[0].dtype)

    def converted(self, kind: type[PackedWeight]) -> PackedWeight | None:
        if not issubclass(kind, ByteWeight):
            return None
        return kind.from_codes(self.codes(), self.scales, self.dtype)

    def rows_anew(self, start: int, stop: int) -> PackedWeight:
        on_meta = self.device.type == "meta"
        return self.on_meta(stop - start, self.cols, self.kind, self.dtype) if on_meta else self.cut(0, start, stop)

    def to_saved(self) -> Macko8Weight:
        return Macko8Weight.from_bytes(self)

    @classmethod
    def instead_in_files(cls) -> str:
        return Macko8Weight.format

    def _options(self) -> dict[str, int]:
        return {"kind": self.kind}

    @property
    def label(self) -> str:
        """As "sparse8 int8"."""
        return f"{self.format} {codes.KINDS[self.kind]}"


@dataclasses.dataclass(frozen=True, eq=False)
class Dense8Weight(ByteWeight):
    """A dense weight in 8 bits an element and a scale a row; csrc/codecs/dense8/dense8.h specifies the bytes.

    The same bytes on every device; a CPU multiplies it too, by dense rows.

    Attributes:
        data: [slabs * 8192], of the type of x and y: bytes of elements, slab after slab.
        scales: [rows], float32.
        rows, cols: shape of the dense weight.
        kind: 0 for fp8, 1 for int8.
    """

    format: ClassVar[str] = "dense8"
    any_weight: ClassVar[bool] = True
    counted: ClassVar[tuple[str, ...]] = ()
    faults: ClassVar[Mapping[int, str]] = {
        1: "the scale of row {found} is not above 0 and below 2^122",
        2: f"{AT}, byte {{found}}: an element outside of the matrix is not 0",
        3: f"{AT}, byte {{found}}: NaN or -0.0",
    }

    data: Tensor
    scales: Tensor
    rows: int
    cols: int
    kind: int = 0

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        return [(cls.dtypes[1 - options[1]], cls.num_slabs(rows, cols) * 8192), (torch.float32, rows)]

    def _values(self) -> Tensor:
        return self.codes().float()


@dataclasses.dataclass(frozen=True, eq=False)
class Sparse8Weight(ByteWeight):
    """A sparse weight in a bit an element, 8 a value and a scale a row; csrc/codecs/sparse8/sparse8.h has the bytes.

    What rounds to zero is dropped. The same bytes on every device; a CPU multiplies it too, by dense rows.

    Attributes:
        data: [units * 64], of the type of x and y: masks and bytes of values, slab after slab.
        offsets: [slabs + 1], int32, in units of 128 bytes.
        scales: [rows], float32.
        rows, cols: shape of the dense weight.
        widest: units of the largest slab. kind: 0 for fp8, 1 for int8. entries: values held.
    """

    format: ClassVar[str] = "sparse8"
    faults: ClassVar[Mapping[int, str]] = {
        1: "the scale of row {found} is not above 0 and below 2^122",
        2: "offsets[{entry}] is {found}, expected 0 at the start and 21 to 149 more than the one before",
        3: "widest is {of.widest}, the largest slab has {found}",
        4: "offsets ends with {found}, data has {of.data.shape[0]} elements, 64 a unit",
        5: f"{AT}, byte {{found}}: a mask has a value outside of the matrix",
        6: f"{AT} has another size than the {{found}} rows of values that its masks say",
        7: f"{AT}, byte {{found}}: not the start of these values",
        8: f"{AT}, byte {{found}}: not where a slice's values begin, or not zero after them",
        9: f"{AT}, byte {{found}}: zero or NaN is stored, or what is no value is not zero",
    }

    data: Tensor
    offsets: Tensor
    scales: Tensor
    rows: int
    cols: int
    widest: int
    kind: int
    entries: int

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        offsets = (torch.int32, cls.num_slabs(rows, cols) + 1)
        return [(cls.dtypes[1 - options[1]], any_size() * 64), offsets, (torch.float32, rows)]


@dataclasses.dataclass(frozen=True, eq=False)
class Macko8Weight(PackedWeight):
    """How files hold dense8 and sparse8: the canonical format with codes for values, or all codes in their order.

    No product takes it: `materialized` gives what does.

    Attributes:
        values: [capacity], or of a dense weight [rows * cols], uint8: codes of the kind, 0 where an entry is filled in.
        deltas, row_ptr: as of MackoWeight; of a dense weight empty.
        scales: [rows], float32.
        rows, cols: shape of the dense weight.
        delta_bits: 2, 4 or 8; 0: a dense weight.
        kind: 0 for fp8, 1 for int8. source: the type of x and y, 0 for float16, 1 for bfloat16.
    """

    format: ClassVar[str] = "macko8"
    of_files: ClassVar[bool] = True
    in_words: ClassVar[Words] = {"kind": ("values", codes.KINDS)}
    limits: ClassVar[Mapping[str, Sequence[int]]] = {
        **ByteWeight.limits,
        "delta_bits": (0, 2, 4, 8),
        "source": range(2),
    }

    values: Tensor
    deltas: Tensor
    row_ptr: Tensor
    scales: Tensor
    rows: int
    cols: int
    delta_bits: int
    kind: int
    source: int

    @property
    def _dtype_in_files(self) -> torch.dtype:
        return codes.TYPES[self.kind]

    @classmethod
    def from_bytes(cls, weight: ByteWeight) -> Macko8Weight:
        """What files hold of a weight, on the CPU; of one on meta nothing."""
        on_meta, is_dense = weight.device.type == "meta", isinstance(weight, Dense8Weight)
        scales = weight.scales if on_meta else weight.scales.cpu()
        about = (scales, weight.rows, weight.cols)
        more = (weight.kind, ByteWeight.dtypes[::-1].index(weight.dtype))
        empty = torch.empty(0, dtype=torch.uint8, device=scales.device)
        if on_meta:
            return cls(empty, empty, empty.int(), *about, 0 if is_dense else 4, *more)
        numbers = weight.codes().cpu()
        if is_dense:
            return cls(numbers.view(torch.uint8).flatten(), empty, empty.int(), *about, 0, *more)
        packed = MackoWeight.smallest(numbers.to(torch.bfloat16))
        values = packed.values.to(codes.TYPES[weight.kind]).view(torch.uint8)
        return cls(values, packed.deltas, packed.row_ptr, *about, packed.delta_bits, *more)

    def materialized(self, device: torch.device | None = None) -> ByteWeight:
        if self.device.type == "meta":
            kind = Sparse8Weight if self.delta_bits else Dense8Weight
            return kind.on_meta(self.rows, self.cols, self.kind, self.dtype)
        if device not in (None, self.device) and device.type != "meta":
            moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
            return self.replace(**moved).materialized()
        self.validate()
        if not self.delta_bits:
            return Dense8Weight.from_codes(self._numbers.view(self.rows, self.cols), self.scales, self.dtype)
        numbers = self._canonical().to_dense().to(codes.TYPES[self.kind])
        return Sparse8Weight.from_codes(numbers, self.scales, self.dtype)

    @property
    def _numbers(self) -> Tensor:
        return self.values.view(codes.TYPES[self.kind])

    def by_rows(self) -> MackoWeight | Tensor:
        return self.scaled()

    def scaled(self) -> MackoWeight | Tensor:
        """The weight to look at, canonical or dense as its codes are.

        A code whose product with its scale rounds to zero is an entry still, which no canonical weight has.
        """
        values = self._numbers.to(self.dtype)
        if not self.delta_bits:
            return values.view(self.rows, self.cols).mul_(self.scales[:, None])
        for first in range(0, self.rows, 256):
            ends = self.row_ptr[first : first + 257]
            values[ends[0] : ends[-1]] *= self.scales[first : first + 256].repeat_interleave(ends.diff())
        return MackoWeight(values, self.deltas, self.row_ptr, self.rows, self.cols, self.delta_bits)

    def _canonical(self) -> MackoWeight:
        """The codes as numbers."""
        numbers = self._numbers.to(torch.bfloat16)
        return MackoWeight(numbers, self.deltas, self.row_ptr, self.rows, self.cols, self.delta_bits)

    def validate(self) -> None:
        if reason := self._bad_field() or self._misfit():
            self._refuse(reason)
        try:
            codes.check(self._numbers[None], torch.ones(1, dtype=torch.float32, device=self.values.device))
            codes.check(self._numbers.new_empty(self.rows, 0), self.scales)
            if self.delta_bits:
                self._canonical().validate()
        except ValueError as error:
            self._refuse(str(error).removeprefix("not a macko weight: "))

    def _misfit(self) -> str:
        """What is wrong with dtypes and shapes that nothing after this looks at."""
        if self.values.dtype != torch.uint8 or self.values.dim() != 1:
            return f"values has dtype {self.values.dtype} and shape {list(self.values.shape)}, expected uint8 [entries]"
        if not self.delta_bits and self.values.numel() != self.rows * self.cols:
            return f"values has {self.values.numel()} elements, expected {self.rows * self.cols}"
        if not self.delta_bits and (self.deltas.numel() or self.row_ptr.numel()):
            return "a dense weight has neither deltas nor row_ptr"
        return ""

    def to_dense(self) -> Tensor:
        return self.materialized().to_dense()

    @property
    def dtype(self) -> torch.dtype:
        return ByteWeight.dtypes[1 - self.source]
