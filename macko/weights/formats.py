"""The packed weights: one frozen dataclass a format, tensors and sizes, all with the same methods.

Fields are tensors and plain ints. The ints besides rows and cols are the options of from_dense. SparseLinear,
conversion and files know no more of a format than PackedWeight has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from .. import ops
from . import codes

#: Elements of a part of a product from which on it is a tensor of its own, where that makes it a GEMM by itself.
#: Kernels of torch that read slices take longer: worth it for gate and up of 11008 rows from 1024 tokens on, not at
#: 512, and not for q, k and v of 4096 at 2048 (H200).
OWN_PART = 10 << 20
#: What kernels of tile's slabs store as tensors of their own, in the product's launch (csrc/tile/tile.h): so many
#: parts, all of whole row blocks but for the last.
MOST_PARTS, PART_ROWS = 3, 64
#: What a size can be at all: rows, columns and counts are int32 where they are stored.
SIZES = range(2**31)
#: Types of tensors that torch passes to an op of its stable interface; of others, as float4, it says so in C++.
_PASSED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64),
)

_Result = TypeVar("_Result")
#: Dtype and sizes of a tensor.
Shape = tuple[Any, ...]


def _any() -> Any:
    """A size that depends on the content."""
    return torch.library.get_ctx().new_dynamic_size()


def slices(y: Tensor, part_rows: Sequence[int]) -> Sequence[Tensor]:
    """y [..., rows] in parts. By split, in 2 us less of the host, without gradients only: its outputs may not be
    changed in place where one is wanted."""
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return torch.split_with_sizes(y, part_rows, -1)  # type: ignore[arg-type]
    stops = itertools.accumulate(part_rows)
    return [y[..., stop - rows : stop] for rows, stop in zip(part_rows, stops, strict=True)]


@contextlib.contextmanager
def _not_held(words: str) -> Iterator[None]:
    """ValueError in place of an op's error that has these words: the format does not hold this weight."""
    try:
        yield
    except RuntimeError as error:
        if words not in str(error):
            raise
        raise ValueError(str(error).partition(": ")[2]) from None


class PackedWeight:
    """What every format's dataclass has and, behind `shape`, shares."""

    format: ClassVar[str]
    #: Its number in headers: its place in FORMATS.
    number: ClassVar[int]
    #: Types of device that run it.
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    #: An execution layout is made from the canonical format, held in its place, and never saved.
    is_layout: ClassVar[bool] = False
    #: Dtypes of the weights it holds.
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32)
    #: Made where it is loaded; saved as the dense weight, NAME.weight.
    saved_dense: ClassVar[bool] = False
    #: Whether it gives every weight of its dtypes back as it was.
    lossless: ClassVar[bool] = True
    #: Its fields in their order, which torch.compile could not ask a dataclass for.
    tensor_names: ClassVar[tuple[str, ...]] = ()
    size_names: ClassVar[tuple[str, ...]] = ()
    #: Packed from the dense weight; else laid out from the canonical one.
    of_dense: ClassVar[bool] = False
    #: Made from any weight, zeros or none.
    any_weight: ClassVar[bool] = False
    #: The field that holds the values.
    values_name: ClassVar[str] = "values"
    #: What macko.fuse asks: whether its products on a GPU fetch weights before their input is there (PDL), and whether
    #: that of one token makes a norm itself.
    overlaps: ClassVar[bool] = False
    makes_norm: ClassVar[bool] = False
    #: Whether kernels store parts of a product as tensors of their own; else from how many tokens on a GPU may make
    #: them so, each by a GEMM.
    stores_parts: ClassVar[bool] = False
    parts_from: ClassVar[int | None] = None
    #: What is wrong with a weight, by the kind of fault that the op `check` gives (the format's header has them).
    faults: ClassVar[Mapping[int, str]] = {}
    #: What an int field may be, where that is less than SIZES.
    limits: ClassVar[Mapping[str, Sequence[int]]] = {"delta_bits": (2, 4, 8)}
    rows: int
    cols: int

    @classmethod
    def from_dense(cls, w: Tensor, delta_bits: int = 4) -> Self:
        """Packs w [rows, cols], which is on a device that runs the format."""
        return cls.from_macko(MackoWeight.from_dense(w, delta_bits))

    @classmethod
    def from_macko(cls, weight: MackoWeight) -> Self:
        """A canonical weight in this format. On a GPU tile goes by dense rows of at most 64 MB at a time."""
        return cls.from_dense(weight.to_dense()) if cls.of_dense else cls._laid_out(weight)

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        """Dtype (None: the weight's) and sizes of each tensor, as the ops make them: what torch.compile asks for.

        Args:
            rows, cols: whole numbers, or torch's symbols for them.
            options: as the op `pack` takes them; of a layout none.
        """
        raise NotImplementedError

    @classmethod
    def _laid_out(cls, weight: PackedWeight, *options: int) -> Self:
        tensors, header = torch.ops.macko.lay_out(*weight.packed, cls.number, options)
        return cls(*tensors, *header.tolist()[1:])

    @property
    def header(self) -> list[int]:
        """What ops are told of the weight besides its tensors: layout, rows, cols, and what the layout has besides."""
        return [self.number, *(getattr(self, name) for name in self.size_names)]

    @property
    def packed(self) -> ops.Packed:
        """The tensors and the header, as ops take them."""
        return [getattr(self, name) for name in self.tensor_names], self.header

    def blank(self, device: torch.device | str) -> Self:
        """A weight of the same sizes, without content."""
        blank = {name: torch.empty_like(tensor, device=device) for name, tensor in self.tensors().items()}
        return type(self)(**blank, **self.sizes())

    def to_dense(self) -> Tensor:
        """The dense [rows, cols] weight."""
        return torch.ops.macko.dense(*self.packed)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias for x [..., cols], as torch.nn.functional.linear; differentiable in x and bias.

        Returns:
            [..., rows] of x's dtype, summed in float32; the same bits at every run.

        Raises:
            RuntimeError: wrong device, dtype or shape; on the CPU, but for ec, content that points outside the matrix.
        """
        return ops.multiply(x, *self.packed, bias)

    def norm_linear(self, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        """linear(x / sqrt(mean(x^2) + eps) * weight, bias), without gradients; on a GPU.

        In one launch where the layout is sell and x one token; else in two that overlap.

        Args:
            x: [..., cols], of the values' dtype and device; cols a multiple of 8.
            weight: [cols], of the same dtype. The norm is rounded as a module does it: x scaled, then its product.
        """
        ops.refuse_gradients("norm_linear", x, weight, bias)
        return torch.ops.macko.norm_linear(x, weight, eps, *self.packed, bias)

    def gated_linear(self, gate: Tensor, up: Tensor, bias: Tensor | None = None) -> Tensor:
        """linear(silu(gate) * up, bias), two launches that overlap, without gradients; on a GPU.

        Args:
            gate, up: [..., cols], of the values' dtype and device; cols a multiple of 8. They may be halves of one
                product. Both the silu and the product are rounded, as modules do it.
        """
        ops.refuse_gradients("gated_linear", gate, up, bias)
        return torch.ops.macko.gated_linear(gate, up, *self.packed, bias)

    def linear_parts(self, x: Tensor, part_rows: Sequence[int]) -> Sequence[Tensor]:
        """x W^T for x [..., cols], in parts [..., rows of a part]: contiguous where `gives_parts`, else slices."""
        return self._own_parts(x, part_rows) if self.gives_parts(x, part_rows) else slices(self.linear(x), part_rows)

    @classmethod
    def gives_parts(cls, x: Tensor, part_rows: Sequence[int]) -> bool:
        """Whether parts of the product are tensors of their own: never where x wants a gradient, or is one token."""
        compiling = torch.compiler.is_compiling()
        if (torch.is_grad_enabled() and x.requires_grad) or (not compiling and ops.has_tangent(x)):
            return False
        if cls.stores_parts:
            if len(part_rows) > MOST_PARTS or any(rows % PART_ROWS for rows in part_rows[:-1]):
                return False
            one_token = x.numel() == x.shape[-1]
            if compiling:  # what it is may depend on data
                from torch.fx.experimental.symbolic_shapes import statically_known_true

                one_token = statically_known_true(one_token)
            return not one_token
        if cls.parts_from is None or compiling or not x.is_cuda:
            return False
        tokens = x.shape[:-1].numel()
        return tokens >= cls.parts_from and tokens * min(part_rows) >= OWN_PART

    def _own_parts(self, x: Tensor, part_rows: Sequence[int]) -> Sequence[Tensor]:
        return torch.ops.macko.linear_parts(x, *self.packed, part_rows)

    def validate(self) -> None:
        """Checks every rule of the format, once: a layout of a GPU on the CPU, what runs on both where it is.

        Raises:
            ValueError: a rule is broken; names the place and what is wrong with it.
        """
        kind, place, entry, found = self._guarded(lambda: torch.ops.macko.check(*self.packed).tolist())
        if kind:
            text = self.faults.get(kind, "at {place}, entry {entry}: fault {kind}, found {found}")
            self._refuse(text.format(kind=kind, place=place, entry=entry, found=found, of=self))
        self._check_sizes(found, entry)

    def _check_sizes(self, found: int, entry: int) -> None:
        """ValueError where a size is not what the content says; found and entry: what the check counted."""

    @property
    def stored(self) -> int:
        """Entries held, non-zeros and explicit zeros. May wait for the device."""
        entries = getattr(self, "entries", None)
        return int(self.row_ptr[-1]) if entries is None else entries  # type: ignore[attr-defined]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(self, self.values_name).dtype

    @property
    def device(self) -> torch.device:
        return getattr(self, self.values_name).device

    @property
    def density(self) -> float:
        """Non-zeros over all; waits for the device."""
        return int(self._values().count_nonzero()) / max(1, self.rows * self.cols)

    def _values(self) -> Tensor:
        """The values, with nothing among them that is not zero in the dense weight."""
        return getattr(self, self.values_name)

    def _guarded(self, look: Callable[[], _Result]) -> _Result:
        """look(), once each field is what it can be in the format. ValueError where one is not, or an op refuses it."""
        if reason := self._bad_field():
            self._refuse(reason)
        try:
            return look()
        except RuntimeError as error:
            if "macko::" not in str(error):
                raise
            self._refuse(str(error))

    @classmethod
    def bad_size(cls, name: str, value: Any) -> str:
        """What is wrong with an int field, or nothing."""
        allowed = cls.limits.get(name, SIZES)
        if type(value) is int and value in allowed:
            return ""
        wanted = f"{allowed[0]} to {allowed[-1]}" if len(allowed) > 8 else ", ".join(map(str, allowed))
        return f"{name} is {value!r}, expected {wanted}"

    def _bad_field(self) -> str:
        """What is wrong with a field by itself, or nothing. Before any content is looked at, or anything allocated."""
        for name, value in self.sizes().items():
            if reason := self.bad_size(name, value):
                return reason
        for name, tensor in self.tensors().items():
            if not isinstance(tensor, Tensor):
                return f"{name} is {tensor!r}, expected a Tensor"
            if tensor.layout != torch.strided or tensor.is_nested:
                return f"{name} is a sparse or nested tensor, expected a strided one"
            if tensor.dtype not in _PASSED:
                return f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}, which no format holds"
            if tensor.data_ptr() % tensor.element_size():
                return (
                    f"{name} begins at an address that is no multiple of its {tensor.element_size()} bytes an element"
                )
        devices = {str(tensor.device) for tensor in self.tensors().values()}
        if len(devices) > 1 or "meta" in devices:
            return f"its tensors are on {' and '.join(sorted(devices))}"
        return ""

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"not {'an' if self.format[0] in 'aeiou' else 'a'} {self.format} weight: {reason}") from None

    def held(self) -> PackedWeight:
        """The same weight in a format that products take, where this one is of files alone.

        Raises:
            ValueError: a rule of that one is broken.
        """
        return self

    def to_saved(self) -> PackedWeight:
        """The same weight as files hold it; of an execution layout on the CPU, to spare the device."""
        return self.to_macko().to("cpu") if self.is_layout else self

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name, in order."""
        return {name: getattr(self, name) for name in self.tensor_names}

    def sizes(self) -> dict[str, int]:
        """The int fields by name: what a checkpoint keeps besides the tensors."""
        return {name: getattr(self, name) for name in self.size_names}

    @property
    def shape(self) -> torch.Size:
        """[rows, cols] of the dense weight."""
        return torch.Size((self.rows, self.cols))

    @property
    def label(self) -> str:
        """The format, and what of its options a reader of a report wants to know."""
        return self.format

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors().values())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> PackedWeight:
        """The same weight elsewhere, or the dense weight's conversion to dtype packed anew.

        A value may round to zero, and a zero is not stored: so another dtype means another packing, made on `device`.
        A layout that does not run there becomes the canonical weight, as does what the format does not hold.
        """
        device = self.device if device is None else torch.device(device)
        runs = device.type in (*self.device_types, "meta")
        if runs and dtype in (None, self.dtype):
            return type(self)(**{name: t.to(device) for name, t in self.tensors().items()}, **self.sizes())
        if self.is_layout:
            moved = self.to_macko().to(device, dtype)
            assert isinstance(moved, MackoWeight)
            with contextlib.suppress(ValueError):
                return self.from_macko(moved) if runs else moved
            return moved
        dense = self.to_dense().to(device, dtype)
        try:
            return self.from_dense(dense, **self._options())
        except ValueError:
            return MackoWeight.smallest(dense)

    def _options(self) -> dict[str, int]:
        """The sizes that from_dense takes."""
        return {name: size for name, size in self.sizes().items() if name not in ("rows", "cols")}

    def to_macko(self) -> MackoWeight:
        """The same weight in the canonical format, which is what files hold. Needs room for one dense copy meanwhile.

        Bit for bit that which a layout was made from.
        """
        return MackoWeight.from_dense(self.to_dense(), **({"delta_bits": self.delta_bits} if self.is_layout else {}))  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, eq=False)
class MackoWeight(PackedWeight):
    """The canonical format of the MACKO-SpMV paper; csrc/macko/macko.h specifies the bytes.

    Attributes:
        values: [capacity], float16, bfloat16 or (CPU) float32.
        deltas: [capacity * delta_bits / 8], uint8.
        row_ptr: [rows + 1], int32.
        rows, cols: shape of the dense weight.
        delta_bits: 2, 4 or 8.
    """

    format: ClassVar[str] = "macko"
    faults: ClassVar[Mapping[int, str]] = {
        1: "row_ptr[0] is {found}, expected 0",
        2: "row_ptr falls to {found} at index {place}",
        3: "row_ptr[{place}] is {found}, values has {of.values.shape[0]} entries",
        4: "row {place}, entry {entry}: the deltas put it at column {found}, the matrix has {of.cols} columns",
        5: "row {place}, entry {entry}: a zero that is not +0.0 in the middle of its row behind the largest delta of "
        "{of.delta_bits} bits, its delta is {found}",
        6: "entry {entry}, behind the last one of the last row, is not zero",
    }

    values: Tensor
    deltas: Tensor
    row_ptr: Tensor
    rows: int
    cols: int
    delta_bits: int = 4

    @classmethod
    def from_dense(cls, w: Tensor, delta_bits: int = 4) -> Self:
        """Packs w [rows, cols]."""
        tensors, header = torch.ops.macko.pack(w, cls.number, [delta_bits])
        return cls(*tensors, *header.tolist()[1:])

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        chunks, delta_bits = _any(), options[0]
        delta_bytes = chunks * delta_bits if delta_bits else _any()
        return [(None, chunks * 8), (torch.uint8, delta_bytes), (torch.int32, rows + 1)]

    @classmethod
    def smallest(cls, w: Tensor) -> Self:
        """Packs w with the width of deltas that takes the fewest bytes; 4 bits where widths tie."""
        return cls.from_dense(w, delta_bits=0)

    @classmethod
    def zeros(cls, rows: int, cols: int, dtype: torch.dtype, device: torch.device | str | None = None) -> Self:
        """A weight without a non-zero; on the meta device too."""
        return cls(
            values=torch.empty(0, dtype=dtype, device=device),
            deltas=torch.empty(0, dtype=torch.uint8, device=device),
            row_ptr=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            rows=rows,
            cols=cols,
        )

    @classmethod
    def from_macko(cls, weight: MackoWeight) -> Self:
        return cls(weight.values, weight.deltas, weight.row_ptr, weight.rows, weight.cols, weight.delta_bits)

    def to_macko(self) -> MackoWeight:
        return self


@dataclasses.dataclass(frozen=True, eq=False)
class SellWeight(PackedWeight):
    """How a GPU with much bandwidth per SM runs a macko weight; csrc/sell/sell.h specifies the bytes. CUDA only.

    Made on the device for its number of SMs, held instead of the canonical tensors, never saved: `to_macko` gives what
    is. Runs on another GPU too, but best on one like that which it was made on.

    Attributes:
        data: [slots * slot size], float16 or bfloat16: values, and gaps among them.
        bases: [groups * 32], int16. blocks: [blocks, 8], int32. perm: [2, rows], int32: perm and order.
        rows, cols: shape of the dense weight, at most 65535 columns.
        gap_bits: 2 to 6. warps, head: of a block. entries: non-zeros and explicit zeros held.
        delta_bits: of the canonical weight that it was made from.
    """

    format: ClassVar[str] = "sell"
    device_types: ClassVar[tuple[str, ...]] = ("cuda",)
    is_layout: ClassVar[bool] = True
    values_name: ClassVar[str] = "data"
    overlaps: ClassVar[bool] = True
    makes_norm: ClassVar[bool] = True
    parts_from: ClassVar[int | None] = 65  # more than macko_stream_tokens (csrc/torch/path.h) can say
    limits: ClassVar[Mapping[str, Sequence[int]]] = {
        **PackedWeight.limits, "cols": range(2**16), "gap_bits": range(2, 7), "warps": range(2, 13, 2), "head": range(5)
    }  # fmt: skip

    data: Tensor
    bases: Tensor
    blocks: Tensor
    perm: Tensor
    rows: int
    cols: int
    gap_bits: int
    warps: int
    head: int
    entries: int
    delta_bits: int = 4

    @classmethod
    def from_macko(cls, weight: MackoWeight, gap_bits: int = 0, warps: int = 0, blocks: int = 0) -> Self:
        """Lays out a macko weight that is on a GPU.

        Args:
            gap_bits: 2 to 6, the width of a gap; 0 takes the smallest layout.
            warps, blocks: that decode in a block, and blocks; 0 takes what suits this GPU.

        Raises:
            RuntimeError: wrong device or dtype, content that points outside the matrix, or a vector of `cols` elements
                does not fit this GPU's shared memory.
        """
        return cls._laid_out(weight, gap_bits, warps, blocks)

    @classmethod
    def from_dense(cls, w: Tensor, delta_bits: int = 4, gap_bits: int = 0) -> Self:
        """Packs w [rows, cols], which is on a GPU."""
        return cls.from_macko(MackoWeight.from_dense(w, delta_bits), gap_bits)

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        return [(None, _any() * 32), (torch.int16, _any() * 32), (torch.int32, _any(), 8), (torch.int32, 2, rows)]

    def validate(self) -> None:
        """Checks that this is what packing its own matrix gives, for as many blocks and warps as it has.

        Raises:
            ValueError: it is not; names the first thing that differs.
        """
        if reason := self._guarded(self._misplaced):
            self._refuse(reason)
        blocks = self.blocks.shape[0]
        again = self._guarded(lambda: self.from_macko(self.to_macko(), self.gap_bits, self.warps, blocks))
        for name, size in again.sizes().items():
            if size != getattr(self, name):
                self._refuse(f"{name} is {getattr(self, name)}, packing its matrix gives {size}")
        for name, tensor in again.tensors().items():
            if not torch.equal(tensor.view(torch.int16), getattr(self, name).view(torch.int16)):
                self._refuse(f"{name} is not what packing its matrix gives")

    def _misplaced(self) -> str:
        """Why reading it would be unsafe, or nothing."""
        for name, dtypes, dim in (
            ("data", (torch.float16, torch.bfloat16), 1),
            ("bases", (torch.int16,), 1),
            ("blocks", (torch.int32,), 2),
            ("perm", (torch.int32,), 2),
        ):
            tensor = getattr(self, name)
            if tensor.dtype not in dtypes or tensor.dim() != dim or not tensor.is_contiguous():
                wanted = f"{' or '.join(map(str, dtypes))}, {dim} dimension(s), contiguous"
                return f"{name} has dtype {tensor.dtype} and shape {list(tensor.shape)}, expected {wanted}"
        if self.blocks.shape[1] != 8 or not len(self.blocks):
            return f"blocks has shape {list(self.blocks.shape)}, expected [blocks, 8]"
        if self.perm.shape != (2, self.rows):
            return f"perm has shape {list(self.perm.shape)}, expected [2, {self.rows}]"
        slot, group, row, rows, chunks, long_chunks, steps, stages = self.blocks.cpu().long().unbind(1)
        before = lambda sizes: sizes.cumsum(0) - sizes  # noqa: E731
        bad_steps = (steps < 1) | (long_chunks > chunks) | ((long_chunks < chunks) & (steps < 2)) | (steps > 128)
        if bool((self.blocks < 0).any()):
            return "blocks has negative sizes"
        if int(rows.sum()) != self.rows or not torch.equal(row, before(rows)):
            return "rows of blocks do not add up"
        if bool(bad_steps.any() or (chunks * (rows | 1) > 2176).any()):  # from here on no number is large
            return "a block's chunks do not add up"
        groups, long_groups = -(-rows * chunks // 32), -(-rows * long_chunks // 32)
        warp = torch.arange(self.warps)
        count = lambda of: (of[:, None] + self.warps - 1 - warp) // self.warps  # noqa: E731  groups of each warp
        lengths = count(groups) * (steps - 1)[:, None] + count(long_groups)
        lengths[:, 1::2] = lengths[:, ::2]  # warps go in pairs
        behind = (lengths - lengths.clamp(max=self.head)).sum(1)
        others = (groups - self.warps).clamp(min=0)
        heads = len(rows) * self.warps
        slots = (heads * self.head + int(behind.sum())) * (512 + 32 * self.gap_bits)
        checks = {
            "a block's stages are not those of its first warp": not torch.equal(stages, lengths[:, 0]),
            "blocks do not follow each other in data": not torch.equal(slot, before(behind)),
            "blocks do not follow each other in bases": not torch.equal(group, before(others)),
            f"data has {self.data.numel()} elements, expected {slots}": self.data.numel() != slots,
            f"bases has {self.bases.numel()} elements": self.bases.numel() != (heads + int(others.sum())) * 32,
            "perm is not a permutation": not torch.equal(
                self.perm.sort().values, torch.arange(self.rows, device=self.device, dtype=torch.int32).expand(2, -1)
            ),
        }
        return next((reason for reason, wrong in checks.items() if wrong), "")

    def _values(self) -> Tensor:
        return self.data.view(-1, 512 + 32 * self.gap_bits)[:, :512]


#: Where a fault of a slab is.
_AT = "slab {entry} of row block {place}"


class SlabWeight(PackedWeight):
    """What tile and the layouts of slabs like its own (csrc/tile/tile.h) have in common."""

    values_name: ClassVar[str] = "data"
    overlaps: ClassVar[bool] = True
    stores_parts: ClassVar[bool] = True
    #: Sizes that the op `check` counts.
    counted: ClassVar[tuple[str, ...]] = ("entries",)

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        shapes = {"data": (None, _any() * 64), "offsets": (torch.int32, cls.num_slabs(rows, cols) + 1)}
        return [shapes[name] for name in cls.tensor_names]

    @staticmethod
    def num_slabs(rows: Any, cols: Any) -> Any:
        return (rows + 63) // 64 * ((cols + 255) // 256)

    @classmethod
    def _check_dtype(cls, dtype: torch.dtype) -> None:
        """ValueError where the format does not hold weights of it."""
        if dtype not in cls.dtypes:
            name = str(dtype).removeprefix("torch.")
            raise ValueError(f"the {cls.format} format holds bfloat16 and float16, the weight is {name}")

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
    """How a GPU multiplies a macko weight by several tokens at a time; csrc/tile/tile.h specifies the bytes.

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
        4: f"{_AT}: word {{found}} of its masks has a value outside of the matrix",
        5: f"{_AT} has another size than the {{found}} rows of values that its masks say",
        6: f"{_AT}, byte {{found}}: not the row where a slice's values begin, or not zero after the last slice's",
        7: f"{_AT}, byte {{found}}: not the spill offset of these values",
        8: f"{_AT}, byte {{found}}: a zero is stored, or what is no value is not zero",
    }

    data: Tensor
    offsets: Tensor
    rows: int
    cols: int
    widest: int
    entries: int
    delta_bits: int = 4


@dataclasses.dataclass(frozen=True, eq=False)
class BitmapWeight(PackedWeight):
    """How a CPU runs a macko weight; csrc/bitmap/bitmap.h specifies the bytes. CPU only.

    Held instead of the canonical tensors, never saved: `to_macko` gives what is.

    Attributes:
        values: [non-zeros + 32], float16, bfloat16 or float32.
        bits: [rows, ceil(cols / 64) * 8], uint8.
        row_ptr: [rows + 1], int32.
        rows, cols: shape of the dense weight.
        delta_bits: of the canonical weight that it was made from.
    """

    format: ClassVar[str] = "bitmap"
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    is_layout: ClassVar[bool] = True
    faults: ClassVar[Mapping[int, str]] = {
        1: "row_ptr[{place}] is {found}: it starts at 0 and never falls; values has {of.values.shape[0]} elements",
        2: "row {place} has {found} bits set, row_ptr has another number of values",
        3: "row {place} has a bit set at column {found}, the matrix has {of.cols} columns",
        4: "row {place}, entry {entry}: a zero is stored",
        5: "row_ptr[{place}] is {found}, values has {of.values.shape[0]} elements, expected 32 more",
        6: "entry {entry}, behind the last one of the last row, is not zero",
    }

    values: Tensor
    bits: Tensor
    row_ptr: Tensor
    rows: int
    cols: int
    delta_bits: int = 4

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        return [(None, _any()), (torch.uint8, rows, (cols + 63) // 64 * 8), (torch.int32, rows + 1)]

    def to_macko(self) -> MackoWeight:
        """The canonical weight that this one was made from, bit for bit, without a dense one on the way."""
        return MackoWeight._laid_out(self)


@dataclasses.dataclass(frozen=True, eq=False)
class EcWeight(PackedWeight):
    """EC-CSR, the format of the EC-SpMV paper, and its widening; contrib/ec/ec.h specifies the bytes.

    The tensors are as ops.ec_pack returns them; the ints besides rows and cols are its options.
    """

    format: ClassVar[str] = "ec"
    of_dense: ClassVar[bool] = True
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
        index, sets = torch.uint16 if cols <= 65536 else torch.int32, _any()
        tiles = (rows + options[5] - 1) // options[5]
        values, deltas, bases = (None, _any()), (torch.uint8, _any()), (index, _any())
        block_indptr, row_indices, col_order = (torch.int32, _any()), (torch.int32, _any()), (index, _any())
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
    of_dense: ClassVar[bool] = True
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

    @staticmethod
    def runs(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether there is a kernel that keeps weights of this dtype as they are: on the CPU and from sm_80 on.

        Not where float8 products are made of half-precision ones: before sm_89, and on sm_100 to 110.
        """
        major, minor = (9, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)
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
        with _not_held("does not fit the pattern"):
            tiles, scale, _ = ops.slide_pack(w, n, SLIDE_ELEMENTS[element], prune)
        source = SLIDE_SOURCES.index(w.dtype) if source < 0 else source
        rows, cols = w.shape
        return cls(tiles, scale, tiles.new_empty(0, 0, 0), rows, cols, n, element, source)

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        n, element, *_ = options
        size = SLIDE_ELEMENTS[element].itemsize
        k_tiles = (ops.slide_depth(cols, n) * size + 255) // 256 * 2
        tiles = (torch.uint8, (rows + 63) // 64, k_tiles, (4096 + 1024 // size) if n else 8192)
        return [tiles, (torch.float32, rows), (torch.uint8, 0, 0, 0)]

    def to_dense(self) -> Tensor:
        """The dense [rows, cols] weight, as quantised."""
        codes = super().to_dense()
        return codes if self.element >= 2 else (codes.float() * self.scale[:, None]).to(self.dtype)

    @property
    def label(self) -> str:
        """As "slide 6:8 int8"."""
        pattern = f"{2 * self.n - 2}:{2 * self.n}" if self.n else "dense"
        return f"slide {pattern} {str(SLIDE_ELEMENTS[self.element]).removeprefix('torch.')}"

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same weight elsewhere. Of an 8-bit one dtype changes the activations only."""
        device = self.device if device is None else torch.device(device)
        if dtype in (None, self.dtype) or self.element < 2:
            source = SLIDE_SOURCES.index(dtype or self.dtype)
            moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
            return dataclasses.replace(self, **moved, source=source)  # type: ignore[arg-type]
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
        codes = super().to_dense()  # refuses tensors of another dtype or shape
        kind = codes.dtype
        if self.element >= 2 and kind != self.dtype:
            return f"its values are {kind}, its activations {self.dtype}"
        if codes.shape != self.shape:
            return f"scale has shape {list(self.scale.shape)}, expected [{self.rows}]"
        if self.element >= 2 and bool((self.scale != 1).any()):
            return "scale is not 1, but its values are not quantised"
        if bool((self.scale < 0).any()):
            return f"the scale of row {int((self.scale < 0).nonzero()[0])} is negative"
        again = ops.slide_pack(codes, self.n, kind)[0]
        if not torch.equal(again, self.tiles):
            block, tile = (again != self.tiles).any(2).nonzero()[0].tolist()
            return f"row block {block}, tile {tile} is not what packing its values gives"
        if self.dense_tiles.dtype != torch.uint8 or self.dense_tiles.shape != (0, 0, 0):
            return f"dense_tiles has shape {list(self.dense_tiles.shape)}, expected [0, 0, 0]"
        return ""

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


@dataclasses.dataclass(frozen=True, eq=False)
class Dense12Weight(SlabWeight):
    """A dense weight in 12 bits an element, bit for bit; csrc/dense12/dense12.h specifies the bytes.

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
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    saved_dense: ClassVar[bool] = True
    any_weight: ClassVar[bool] = True
    counted: ClassVar[tuple[str, ...]] = ("listed",)
    faults: ClassVar[Mapping[int, str]] = {
        1: "byte {found} of its table: expected 0, then rising bytes under 128 (float16: 16), then zeros",
        2: f"{_AT}: part {{found}} of its list does not begin where the one before it ends, or ends behind the slab",
        3: f"{_AT}: entry {{found}} of its list is not behind the one before it, or is of no place",
        4: f"{_AT}: entry {{found}} of its list has a code, is outside of the matrix, or what stands there is not +0.0",
        5: f"{_AT}, byte {{found}}: an element outside of the matrix is not +0.0",
        6: f"{_AT}, byte {{found}}: a code is not the lowest of its exponent",
        7: f"{_AT}, byte {{found}}: not zero behind the list",
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
        with _not_held("the table of dense12"):
            tensors, header = torch.ops.macko.pack(w, cls.number, [])
        return cls(*tensors, *header.tolist()[1:])

    @classmethod
    def bytes_of(cls, rows: int, cols: int, listed: int, fullest: int) -> int | None:
        """Bytes of a weight whose table lacks so many elements, `fullest` of them in one slab; None: it is not held."""
        units, most = -(-(24640 + 4 * fullest) // 128), 64 * 256 * 2 // 128  # as csrc/dense12/dense12.h has it
        return None if units > most or listed > rows * cols // 100 else cls.num_slabs(rows, cols) * units * 128

    def _options(self) -> dict[str, int]:
        return {}  # its sizes follow from the weight

    def _values(self) -> Tensor:
        return self.to_dense()


@dataclasses.dataclass(frozen=True, eq=False)
class Sparse11Weight(SlabWeight):
    """As tile, in 3 bits an element and 8 a value; csrc/sparse11/sparse11.h specifies the bytes.

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
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    counted: ClassVar[tuple[str, ...]] = ("entries", "listed")
    limits: ClassVar[Mapping[str, Sequence[int]]] = {
        **PackedWeight.limits, "table_low": range(2**32), "table_high": range(2**32)
    }  # fmt: skip
    faults: ClassVar[Mapping[int, str]] = {
        1: "byte {found} of its table: expected 0, then rising bytes (float16: under 32), then zeros",
        2: "offsets[{entry}] is {found}, expected 0 at the start and 53 to 246 more than the one before",
        3: "widest is {of.widest}, the largest slab has {found}",
        4: "offsets ends with {found}, data has {of.data.shape[0]} elements, 64 a unit",
        5: f"{_AT}, byte {{found}}: a code of no high byte, or of an element outside of the matrix",
        6: f"{_AT}, byte {{found}}: not the start of these values",
        7: f"{_AT}, byte {{found}}: not where a part's values or its places in the list begin, or not zero behind them",
        8: f"{_AT}, byte {{found}}: not behind the place before it in the list, or of no place",
        9: f"{_AT}, byte {{found}}: a listed value is zero or has a code, or its place has one or is outside",
        10: f"{_AT} has another size than the {{found}} units that its codes and its list say",
        11: f"{_AT}, byte {{found}}: a zero is stored, or what is no value is not zero",
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
        with _not_held("the table of sparse11"):
            return cls._laid_out(weight)


class ByteWeight(SlabWeight):
    """What the formats of 8 bits a value, dense8 and sparse8, have in common: codes times a scale a row.

    A weight is rounded once, where it is packed; nothing after that changes a code. Files hold them as Macko8Weight.
    """

    of_dense: ClassVar[bool] = True
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
        numbers = dataclasses.replace(self, scales=torch.ones_like(self.scales)).to_dense()  # type: ignore[type-var]
        return numbers.to(codes.TYPES[self.kind])

    def unrounded(self) -> Tensor:
        """Codes times scales, [rows, cols], float64: what a GPU of compute capability 9.0 multiplies.

        Elsewhere products are by dense rows, those of to_dense, which are rounded to dtype.
        """
        return self.codes().double() * self.scales.double()[:, None]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> PackedWeight:
        """The same codes and scales elsewhere, for activations of dtype; of float32 the canonical weight."""
        if dtype in (None, self.dtype):
            return super().to(device)
        device = self.device if device is None else torch.device(device)
        if self.device.type == "meta":
            return dataclasses.replace(self, data=self.data.to(dtype))  # type: ignore[type-var]
        numbers, scales = self.codes().to(device), self.scales.to(device)
        if dtype in self.dtypes:
            return self.from_codes(numbers, scales, dtype)
        return MackoWeight.smallest((numbers.float() * scales[:, None]).to(dtype))

    @classmethod
    def joined(cls, parts: Sequence[ByteWeight], rows: int) -> Self:
        """Rows of all parts, which are of one kind and dtype, with their codes and scales; zeros up to so many."""
        numbers, scales = torch.cat([part.codes().view(torch.uint8) for part in parts]), [part.scales for part in parts]
        more = rows - len(numbers)
        numbers = torch.nn.functional.pad(numbers, (0, 0, 0, more)).view(codes.TYPES[parts[0].kind])
        return cls.from_codes(numbers, torch.cat([*scales, scales[0].new_ones(more)]), parts[0].dtype)

    def part(self, dim: int, start: int, stop: int) -> Self:
        """Rows (dim 0) or columns (1) start to stop: the same codes and scales."""
        scales = self.scales[start:stop].clone() if dim == 0 else self.scales  # savers refuse parts of a memory
        return self.from_codes(self.codes().narrow(dim, start, stop - start), scales, self.dtype)

    def to_saved(self) -> PackedWeight:
        return Macko8Weight.from_bytes(self)

    def _options(self) -> dict[str, int]:
        return {"kind": self.kind}

    @property
    def label(self) -> str:
        """As "sparse8 int8"."""
        return f"{self.format} {codes.KINDS[self.kind]}"


@dataclasses.dataclass(frozen=True, eq=False)
class Dense8Weight(ByteWeight):
    """A dense weight in 8 bits an element and a scale a row; csrc/dense8/dense8.h specifies the bytes.

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
        2: f"{_AT}, byte {{found}}: an element outside of the matrix is not 0",
        3: f"{_AT}, byte {{found}}: NaN or -0.0",
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
    """A sparse weight in a bit an element, 8 a value and a scale a row; csrc/sparse8/sparse8.h specifies the bytes.

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
        5: f"{_AT}, byte {{found}}: a mask has a value outside of the matrix",
        6: f"{_AT} has another size than the {{found}} rows of values that its masks say",
        7: f"{_AT}, byte {{found}}: not the start of these values",
        8: f"{_AT}, byte {{found}}: not where a slice's values begin, or not zero behind them",
        9: f"{_AT}, byte {{found}}: zero or NaN is stored, or what is no value is not zero",
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
        return [(cls.dtypes[1 - options[1]], _any() * 64), offsets, (torch.float32, rows)]


@dataclasses.dataclass(frozen=True, eq=False)
class Macko8Weight(PackedWeight):
    """How files hold dense8 and sparse8: the canonical format with codes for values, or all codes in their order.

    No product takes it: `held` gives what does.

    Attributes:
        values: [capacity], or of a dense weight [rows * cols], uint8: codes of the kind, 0 where an entry is filled in.
        deltas, row_ptr: as of MackoWeight; of a dense weight empty.
        scales: [rows], float32.
        rows, cols: shape of the dense weight.
        delta_bits: 2, 4 or 8; 0: a dense weight.
        kind: 0 for fp8, 1 for int8. source: the type of x and y, 0 for float16, 1 for bfloat16.
    """

    format: ClassVar[str] = "macko8"
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

    def held(self) -> ByteWeight:
        if self.device.type == "meta":
            kind = Sparse8Weight if self.delta_bits else Dense8Weight
            return kind.on_meta(self.rows, self.cols, self.kind, self.dtype)
        self.validate()
        if not self.delta_bits:
            return Dense8Weight.from_codes(self._numbers.view(self.rows, self.cols), self.scales, self.dtype)
        numbers = self._canonical().to_dense().to(codes.TYPES[self.kind])
        return Sparse8Weight.from_codes(numbers, self.scales, self.dtype)

    @property
    def _numbers(self) -> Tensor:
        return self.values.view(codes.TYPES[self.kind])

    def scaled(self) -> MackoWeight | Tensor:
        """The weight to look at, canonical or dense as its codes are, in few bytes beside its own.

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
        """What is wrong with dtypes and shapes that nothing behind this looks at."""
        if self.values.dtype != torch.uint8 or self.values.dim() != 1:
            return f"values has dtype {self.values.dtype} and shape {list(self.values.shape)}, expected uint8 [entries]"
        if not self.delta_bits and self.values.numel() != self.rows * self.cols:
            return f"values has {self.values.numel()} elements, expected {self.rows * self.cols}"
        if not self.delta_bits and (self.deltas.numel() or self.row_ptr.numel()):
            return "a dense weight has neither deltas nor row_ptr"
        return ""

    def to_dense(self) -> Tensor:
        return self.held().to_dense()

    @property
    def dtype(self) -> torch.dtype:
        return ByteWeight.dtypes[1 - self.source]


def sparsest_pattern(w: Tensor) -> int:
    """The smallest n for which w [rows, cols] is of pattern (2n-2):2n, or 0."""
    for n in SLIDE_PATTERNS.values():
        nonzero = torch.nn.functional.pad(w != 0, (0, -w.shape[1] % (2 * n)))
        if not w.numel() or int(nonzero.view(w.shape[0], -1, 2 * n).sum(-1).amax()) <= 2 * n - 2:
            return n
    return 0


#: Every format by name, in the order of csrc/torch/packed.h.
FORMATS: dict[str, type[PackedWeight]] = {
    kind.format: kind
    for kind in (
        *(MackoWeight, BitmapWeight, SellWeight, TileWeight, EcWeight, SlideWeight, Dense12Weight, Sparse11Weight),
        *(Dense8Weight, Sparse8Weight),
    )
}
#: What files alone hold, by name.
SAVED: dict[str, type[PackedWeight]] = {Macko8Weight.format: Macko8Weight}
for _number, _kind in enumerate((*FORMATS.values(), *SAVED.values())):
    _kind.number = _number  # which no layout of the library has where files alone hold it
    _types = {field.name: field.type for field in dataclasses.fields(_kind)}  # type: ignore[arg-type]
    _kind.tensor_names = tuple(name for name in _types if _types[name] == "Tensor")
    _kind.size_names = tuple(name for name in _types if _types[name] == "int")


def _fake(op: str, layout: int, like: Tensor, rows: Any, cols: Any, options: Any) -> tuple[list[Tensor], Tensor]:
    """What op gives of this layout, without content."""
    kind = list(FORMATS.values())[layout]
    try:
        shapes = kind.shapes(rows, cols, options)
    except NotImplementedError:
        raise NotImplementedError(
            f"macko::{op}: nobody wrote down the shapes of the layout {kind.format}, which torch.compile asks for: "
            "pack outside of the compiled function"
        ) from None
    tensors = [like.new_empty(sizes, dtype=dtype or like.dtype) for dtype, *sizes in shapes]
    numbers = 1 + len(kind.size_names) + (kind is SlideWeight)  # and how many non-zeros pruning dropped
    return tensors, torch.empty(numbers, dtype=torch.int64)


@torch.library.register_fake("macko::pack")
def _(w: Tensor, layout: int, options: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    torch._check(w.dim() == 2, lambda: f"macko::pack: w has shape {list(w.shape)}, expected 2 dimension(s)")
    return _fake("pack", layout, w, w.shape[0], w.shape[1], options)


@torch.library.register_fake("macko::lay_out")
def _(packed: Sequence[Tensor], header: Sequence[int], layout: int, options: Any) -> tuple[list[Tensor], Tensor]:
    return _fake("lay_out", layout, packed[0], header[1], header[2], header[3:])


def format_named(name: str, *others: str) -> type[PackedWeight]:
    """The dataclass of a format; ValueError, which offers `others` too, where there is none of that name."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"format is {name!r}, expected one of {', '.join([*others, *FORMATS])}")
    return FORMATS[name]


def takes_any_weight(format: str) -> bool:
    """Whether a format, or what chooses one, is for weights with zeros or none."""
    return format in FORMATS and FORMATS[format].any_weight


def described(kind: type[PackedWeight], sizes: Mapping[str, int]) -> dict[str, Any]:
    """What a file says of a packed weight: saved_as reads it."""
    about: dict[str, Any] = {"format": kind.format, **sizes}
    if kind is Macko8Weight:
        about["values"] = codes.KINDS[about.pop("kind")]
    return about


def saved_as(about: Any) -> tuple[type[PackedWeight], dict[str, int], list[str]]:
    """What a file says of a packed weight, as {"format": "macko", "rows": 72, ...}: class, sizes, names of the tensors.

    Raises:
        ValueError: there is no such format, it is never saved, or the sizes are not those of the format, or none that
            they can be there.
    """
    if not isinstance(about, Mapping):
        raise ValueError(f"expected a format and its sizes, which are whole numbers, got {about!r}")
    format = about.get("format")
    kind = SAVED.get(format) if isinstance(format, str) else None
    kind = kind or format_named(format)  # type: ignore[arg-type]
    if kind.is_layout or kind.saved_dense or issubclass(kind, ByteWeight):
        held = "macko8" if issubclass(kind, ByteWeight) else "the canonical format"
        held = "the dense weight" if kind.saved_dense else held
        raise ValueError(f"{kind.format} is an execution layout, never saved: files hold {held}")
    sizes = {name: size for name, size in about.items() if name != "format"}
    if kind is Macko8Weight and "values" in sizes:
        if sizes["values"] not in codes.KINDS:
            raise ValueError(f"values is {sizes['values']!r}, expected one of {', '.join(codes.KINDS)}")
        sizes["kind"] = codes.KINDS.index(sizes.pop("values"))
    if bad := {name: size for name, size in sizes.items() if type(size) is not int or size not in SIZES}:
        raise ValueError(f"expected integers, whole numbers from 0 to {SIZES[-1]}, got {bad}")
    # What has a default may be left out.
    if other := sorted(set(sizes) ^ {name for name in kind.size_names if name in sizes or not hasattr(kind, name)}):
        raise ValueError(f"{' and '.join(other)}: the format {kind.format} has the sizes {', '.join(kind.size_names)}")
    for reason in filter(None, itertools.starmap(kind.bad_size, sizes.items())):
        raise ValueError(reason)
    return kind, sizes, list(kind.tensor_names)


def saved_by_names(
    tensors: Mapping[str, Tensor], cols: int, like: PackedWeight
) -> tuple[type[PackedWeight], dict[str, int], list[str]]:
    """What saved_as gives, of tensors by the names that files have, some of which may be missing.

    Args:
        tensors: values, deltas, row_ptr, perhaps scales, and the empty weight [0, cols] beside them.
        cols: of the weight, where no empty one says it.
        like: a weight of the model: its dtype, and the kind of its values where they have 8 bits and no empty weight
            says it, are taken.

    Raises:
        ValueError: the values have 8 bits, and nothing says of which kind.
    """
    values, deltas, row_ptr, empty = (tensors.get(name) for name in ("values", "deltas", "row_ptr", "weight"))
    if empty is not None and empty.dim() == 2 and not empty.shape[0]:
        cols = empty.shape[1]
    rows = 0 if row_ptr is None else max(0, row_ptr.numel() - 1)
    bits = 4
    if values is not None and values.numel() and deltas is not None:
        bits = deltas.numel() * 8 // values.numel()
    if values is None or values.dtype != torch.uint8 or "scales" not in tensors:
        return MackoWeight, {"rows": rows, "cols": cols, "delta_bits": bits}, list(MackoWeight.tensor_names)
    kinds = [empty.dtype] if empty is not None and empty.dtype in codes.TYPES else []
    kinds += [codes.TYPES[like.kind]] if isinstance(like, ByteWeight) else []
    if not kinds:
        raise ValueError("its values have 8 bits, and nothing beside them says of which kind: fp8 or int8")
    sizes = {"rows": tensors["scales"].numel(), "cols": cols, "delta_bits": bits if row_ptr.numel() else 0}  # type: ignore[union-attr]
    sizes |= {"kind": codes.TYPES.index(kinds[0]), "source": int(like.dtype != torch.float16)}
    return Macko8Weight, sizes, list(Macko8Weight.tensor_names)
