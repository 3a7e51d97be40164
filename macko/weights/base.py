"""PackedWeight: what every packed weight is, tensors and sizes, and what it does.

A format is one frozen dataclass below it, in a module of this folder: its fields are its tensors, then its sizes, which
are the numbers of its header in their order. Callers ask a weight for what they want of it, not which format it is.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from .. import _library, ops
from .registry import FORMATS, register

if TYPE_CHECKING:
    from .canonical import MackoWeight

#: Elements of a part of a product from which on it is a tensor of its own, where that makes it a GEMM by itself.
#: Kernels of torch that read slices take longer: worth it for gate and up of 11008 rows from 1024 tokens on, not at
#: 512, and not for q, k and v of 4096 at 2048 (H200).
OWN_PART = 10 << 20
#: What kernels of slabs store as tensors of their own, in the product's launch (csrc/slab/slab.h): so many parts, all
#: of whole row blocks but for the last.
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
#: By an int field what files call it, and the words that stand there for 0, 1 and so on.
Words = Mapping[str, tuple[str, Sequence[str]]]


def any_size() -> Any:
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
def not_held(words: str) -> Iterator[None]:
    """ValueError in place of an op's error that has these words: the format does not hold this weight."""
    try:
        yield
    except RuntimeError as error:
        if words not in str(error):
            raise
        raise ValueError(str(error).partition(": ")[2]) from None


class PackedWeight:
    """What every format's dataclass has and, after `to_macko`, shares. A class that says its `format` is registered."""

    format: ClassVar[str]
    #: Its number in headers, as the library's layout of this name has it; -1 where no op takes it.
    number: ClassVar[int]
    #: Types of device that run it.
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    #: An execution layout is made from the canonical format, held in its place, and never saved.
    is_layout: ClassVar[bool] = False
    #: Dtypes of the weights it holds.
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32)
    #: No product takes it: files alone hold it.
    of_files: ClassVar[bool] = False
    #: The version of macko's files from which on they may have it.
    version: ClassVar[int] = 1
    #: Made where it is loaded; in a state_dict the dense weight, NAME.weight.
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
    #: The format by whose measured times its own are told; "": its own.
    timed_by: ClassVar[str] = ""
    #: What its time is multiplied by where the fastest format is chosen; infinite: it is opt-in.
    handicap: ClassVar[float] = 1.0
    #: Whether the op linear_experts takes it.
    stacks: ClassVar[bool] = False
    #: Layers that hold it may be merged: rows of several weights are packed together.
    merges: ClassVar[bool] = True
    #: Whether values are codes times a scale a row (`coded`), which a part of the weight keeps as they are.
    holds_codes: ClassVar[bool] = False
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
    #: Int fields that files have in words.
    in_words: ClassVar[Words] = {}
    #: Numbers that the op `pack` gives after the header.
    counts_of_pack: ClassVar[int] = 0
    rows: int
    cols: int

    def __init_subclass__(cls, **options: Any) -> None:
        """Registers a format, and notes its fields: each is a Tensor or a size."""
        super().__init_subclass__(**options)
        formats = [kind for kind in reversed(cls.__mro__) if kind is cls or "__dataclass_fields__" in vars(kind)]
        fields: dict[str, Any] = {}
        for kind in formats:
            fields |= inspect.get_annotations(kind, eval_str=True)
        cls.tensor_names = tuple(name for name, type in fields.items() if type is Tensor)
        cls.size_names = tuple(name for name, type in fields.items() if type is int)
        if "format" in vars(cls):
            cls.number = _library.layouts.get(cls.format, -1)
            register(cls)

    @classmethod
    def from_dense(cls, w: Tensor, delta_bits: int = 4) -> Self:
        """Packs w [rows, cols], which is on a device that runs the format."""
        return cls.from_macko(_canonical().from_dense(w, delta_bits))

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

    @classmethod
    def holds_any_exactly(cls) -> bool:
        """Whether another weight may take this one's place in the same format, as where an adapter is merged."""
        return cls.any_weight and cls.lossless

    @property
    def header(self) -> list[int]:
        """What ops are told of the weight besides its tensors: layout, rows, cols, and what the layout has besides."""
        return [self.number, *(getattr(self, name) for name in self.size_names)]

    @property
    def packed(self) -> ops.Packed:
        """The tensors and the header, as ops take them."""
        return [getattr(self, name) for name in self.tensor_names], self.header

    def replace(self, **fields: Any) -> Self:
        """The weight with other tensors or sizes."""
        return type(self)(**(self.tensors() | self.sizes() | fields))

    @classmethod
    def runs(cls, device: torch.device, dtype: torch.dtype, cols: int = 0) -> bool:
        """Whether there are kernels on this device for weights of this dtype with so many columns."""
        return device.type in cls.device_types and dtype in cls.dtypes

    def empty_like(self, device: torch.device | str) -> Self:
        """A weight of the same sizes, without content."""
        return self.replace(**{name: torch.empty_like(t, device=device) for name, t in self.tensors().items()})

    def to_dense(self) -> Tensor:
        """The dense [rows, cols] weight."""
        return torch.ops.macko.dense(*self.packed)

    def unrounded(self) -> Tensor:
        """The weight that a GPU multiplies with, where it has kernels; of values in 8 bits before they are rounded."""
        return self.to_dense()

    def multiplied(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """x and the weight as products round both, if they do, in float64."""
        return None

    def cuts(self, x: Tensor) -> int:
        """Additions of a product with x that keep less than float32 does (measure.reference.linear)."""
        return 0

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
        """Checks every rule of the format, once, where the tensors are.

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

    @property
    def known_density(self) -> float | None:
        """The density where it takes no unpacking, else None."""
        return None if self.device.type == "meta" else self.density

    @property
    def note(self) -> str:
        """What a report says of how this weight is held, if anything."""
        return ""

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

    @classmethod
    def _check_dtype(cls, dtype: torch.dtype) -> None:
        """ValueError where the format, which is one of 16 bits, does not hold weights of it."""
        if dtype not in cls.dtypes:
            name = str(dtype).removeprefix("torch.")
            raise ValueError(f"the {cls.format} format holds bfloat16 and float16, the weight is {name}")

    def _refuse(self, reason: str) -> NoReturn:
        raise ValueError(f"not {'an' if self.format[0] in 'aeiou' else 'a'} {self.format} weight: {reason}") from None

    # ---- In files ----

    def materialized(self, device: torch.device | None = None) -> PackedWeight:
        """The same weight in a format that products take, made on the device, where this one is of files alone.

        Raises:
            ValueError: a rule of that one is broken.
        """
        return self

    def to_saved(self) -> PackedWeight | Tensor:
        """The same weight as files hold it, packed or dense; what is converted for that is on the CPU.

        Of one on the meta device without content.
        """
        if not self.is_layout:
            return self
        on_meta = self.device.type == "meta"
        return _canonical().zeros(self.rows, self.cols, self.dtype, "meta") if on_meta else self.to_macko().to("cpu")

    def to_file(self) -> PackedWeight | Tensor:
        """As to_saved, for files of macko's own: what a state_dict has dense may be packed there."""
        return self.to_saved()

    @classmethod
    def stands_for_dense(cls) -> bool:
        """Whether files hold so what a state_dict has dense, and a layer where no kernel gains by it."""
        return False

    def is_held_packed(self, by_slabs: bool) -> bool:
        """Whether a layer that is read from a file holds this weight packed, and not dense.

        Args:
            by_slabs: whether kernels there multiply slabs faster than the dense weight.
        """
        return True

    def of_columns(self, w: Tensor, largest: Tensor) -> PackedWeight:
        """This weight, of some columns w of another one, as it is packed within that.

        Args:
            largest: [rows], the largest magnitude of each row of the whole weight, by which 8 bits are scaled.
        """
        return self

    def parted(self) -> PackedWeight:
        """The same weight in a format of which rows and columns can be cut."""
        return self.materialized()

    def about(self) -> dict[str, Any] | None:
        """What a file says of a weight beside its tensors (`saved_as` reads it); None: nothing, it holds it dense."""
        sizes = self.sizes()
        words = {there: of[sizes.pop(name)] for name, (there, of) in self.in_words.items()}
        return {"format": self.format, **sizes, **words}

    @classmethod
    def sizes_of(cls, about: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes among what `about` gave. ValueError where a word is none of the format's."""
        sizes = {name: size for name, size in about.items() if name != "format"}
        for name, (there, words) in cls.in_words.items():
            if there in sizes:
                if (word := sizes.pop(there)) not in words:
                    raise ValueError(f"{there} is {word!r}, expected one of {', '.join(words)}")
                sizes[name] = words.index(word)
        return sizes

    @classmethod
    def instead_in_files(cls) -> str:
        """What files hold in place of this format; nothing where they hold itself."""
        return "the canonical format" if cls.is_layout else ""

    @property
    def names_in_files(self) -> tuple[str, ...]:
        """What a state that lacks the weight lacks: its tensors, or the dense weight."""
        return self.tensor_names

    def by_rows(self) -> MackoWeight | Tensor | None:
        """The weight to look at some rows at a time, in few bytes beside its own; None where it has to be unpacked."""
        return None

    def empty_weight(self) -> Tensor:
        """NAME.weight [0, cols], which lies beside the packed tensors of a layer NAME wherever they are saved.

        Who knows nothing of macko wants a weight of another size there and stops, where it would else go on with the
        one that the model was made with. Of values in 8 bits its dtype is that of their codes.
        """
        return with_address(torch.empty(0, self.cols, dtype=self._dtype_in_files, device=self.device))

    @property
    def _dtype_in_files(self) -> torch.dtype:
        return self.dtype

    # ---- In another format ----

    @property
    def keeps_format(self) -> bool:
        """Whether it stays in its format where one is chosen: it was asked for, or its values are the format's own.

        So ec, slide, dense12 and values in 8 bits; the others hold the canonical weight, each in its way.
        """
        return not self.is_layout

    def converted(self, kind: type[PackedWeight]) -> PackedWeight | None:
        """The same values in another format that holds them as this one does; None where they are to be packed."""
        return None

    def to_pack(self) -> Tensor | MackoWeight:
        """What the weight is packed from anew: the dense one where that is smaller, else the canonical one."""
        return self.to_dense() if self.any_weight else self.to_macko()

    @classmethod
    def as_source(cls, dense: Tensor) -> Tensor | MackoWeight:
        """What a weight of this format is packed from, given the dense one: that, or the canonical one."""
        return dense if cls.any_weight else _canonical().smallest(dense)

    @classmethod
    def laid_out_again(cls, weight: PackedWeight) -> PackedWeight:
        """What a layer in this format has loaded, canonical, in this layout; itself where this is none, or cannot."""
        if cls.is_layout and weight.device.type in cls.device_types:
            with contextlib.suppress(ValueError):  # sparse11 does not hold every weight
                return cls.from_macko(weight)  # type: ignore[arg-type]
        return weight

    # ---- Rows and columns ----

    def cut(self, dim: int, start: int, stop: int) -> PackedWeight:
        """Rows (dim 0) or columns (1) start to stop, in its format: what packing them would give.

        Of rows of a canonical weight the entries are copied and nothing is unpacked; codes of 8 bits stay with their
        scales; anything else is packed anew.

        Raises:
            ValueError: the weight has no such rows or columns, or is quantised so that a part has other codes.
        """
        size = self.shape[dim]
        if not 0 <= start <= stop <= size:
            raise ValueError(f"{('rows', 'columns')[dim]} {start} to {stop} of a weight that has {size}")
        return self if (start, stop) == (0, size) else self._cut(dim, start, stop)

    def _cut(self, dim: int, start: int, stop: int) -> PackedWeight:
        if not self.holds_codes:
            return self.packed_alike(self.to_dense().narrow(dim, start, stop - start))
        numbers, scales = self.coded()
        scales = scales[start:stop].clone() if dim == 0 else scales  # savers refuse parts of a memory
        return self.of_codes(numbers.narrow(dim, start, stop - start), scales)

    def packed_alike(self, dense: Tensor) -> PackedWeight:
        """Another weight in this format, with the same options."""
        if self.is_layout:
            return self.from_macko(_canonical().smallest(dense.contiguous()))
        return self.from_dense(dense.contiguous(), **self._options())

    def rows_anew(self, start: int, stop: int) -> PackedWeight:
        """Rows start to stop, packed anew: in the canonical format, or in this one where it is not a choice.

        Of a weight on the meta device one without content.
        """
        if self.device.type == "meta":
            return _canonical().zeros(stop - start, self.cols, self.dtype, "meta")
        rows = self.to_dense()[start:stop]
        return self.from_dense(rows, **self._options()) if self.keeps_format else _canonical().smallest(rows)

    @property
    def values_kept_as(self) -> str:
        """How values are held: parts that hold them in several ways are no one weight."""
        return "16 bits"

    def coded(self) -> tuple[Tensor, Tensor]:
        """Codes [rows, cols] and float32 scales [rows]: of a format that `holds_codes`."""
        raise NotImplementedError

    def of_codes(self, numbers: Tensor, scales: Tensor) -> Self:
        """Another weight in this format, with the same options, of codes and scales as `coded` gives them."""
        raise NotImplementedError

    @classmethod
    def joined(cls, parts: Sequence[Self], rows: int) -> Self:
        """Rows of all parts, which hold values alike, with their codes and scales; zeros up to so many rows."""
        raise NotImplementedError

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
    def timed_as(self) -> str:
        """The format of the measured times that say how long its products take."""
        return self.timed_by or self.format

    @property
    def pattern(self) -> str:
        """The pattern that its kernel is for, as "6:8", if any."""
        return ""

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
            assert isinstance(moved, _canonical())
            with contextlib.suppress(ValueError):
                return self.from_macko(moved) if runs else moved
            return moved
        dense = self.to_dense().to(device, dtype)
        try:
            return self.from_dense(dense, **self._options())
        except ValueError:
            return _canonical().smallest(dense)

    def _options(self) -> dict[str, int]:
        """The sizes that from_dense takes."""
        return {name: size for name, size in self.sizes().items() if name not in ("rows", "cols")}

    def to_macko(self) -> MackoWeight:
        """The same weight in the canonical format, which is what files hold. Takes memory for one dense copy meanwhile.

        Bit for bit that which a layout was made from.
        """
        return _canonical().from_dense(self.to_dense(), **({"delta_bits": self.delta_bits} if self.is_layout else {}))  # type: ignore[attr-defined]


def stacked_codes(parts: Sequence[PackedWeight], rows: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of parts of one kind below each other; up to so many rows zeros, of scale 1."""
    coded = [part.coded() for part in parts]
    dtype = coded[0][0].dtype
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16  # of float8 torch neither joins nor fills
    numbers = torch.cat([codes.view(bits) for codes, _ in coded])
    more = rows - len(numbers)
    numbers = torch.nn.functional.pad(numbers, (0, 0, 0, more)).view(dtype)
    scales = [scales for _, scales in coded]
    return numbers, torch.cat([*scales, scales[0].new_ones(more)])


def with_address(empty: Tensor) -> Tensor:
    """An empty tensor on the CPU with an address of its own: savers take those at 0 for one and the same."""
    if empty.device.type != "cpu":
        return empty
    nowhere = torch.from_numpy(np.empty(0, np.uint8)).untyped_storage()
    return torch.empty_like(empty).set_(nowhere, 0, empty.shape, empty.stride())


def _canonical() -> type[MackoWeight]:
    """The canonical format's class, which is a subclass of what is defined here."""
    return FORMATS["macko"]  # type: ignore[return-value]
