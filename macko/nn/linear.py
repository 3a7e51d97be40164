"""SparseLinear: torch.nn.Linear over a packed weight."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from typing_extensions import Self

from .. import _library
from ..choose.auto import pack, repacked
from ..choose.options import AUTO, Options
from ..ops import multiply
from ..weights import MackoWeight, PackedWeight, slices
from ..weights.base import with_address
from ..weights.saved import IN_FILES, dense_in, in_state, packed_in, state_of

_Module = TypeVar("_Module", bound=nn.Module)
#: Element types of a packed weight's values.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

#: What nn.Module keeps of hooks on calls. The dicts themselves go with the layer: a hook's handle still removes it.
HOOKS = tuple(name for name in vars(nn.Module()) if "forward_" in name or "backward_" in name)


def with_hooks(layer: _Module, other: nn.Module) -> _Module:
    """The layer with the hooks of the one in whose place it is put."""
    vars(layer).update({name: vars(other)[name] for name in HOOKS})
    return layer


def unsupported(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no format holds this dtype on this device, or None."""
    if device.type not in ("cpu", "cuda", "meta"):
        return f"it is on {device}; macko has kernels for cpu and cuda"
    if dtype not in DTYPES:
        return f"it is {str(dtype).removeprefix('torch.')}; macko holds float16, bfloat16 and, on the CPU, float32"
    if dtype == torch.float32 and device.type == "cuda":
        return "it is float32, which macko holds on the CPU only; convert to float16 or bfloat16 first"
    if device.type == "cuda" and torch.cuda.is_available():
        return _library.missing_code(device) or None
    return None


def as_extra_state(about: Mapping[str, Any]) -> Tensor:
    """What SparseLinear's state_dict keeps under _extra_state: a format and its sizes, as the bytes of a JSON text."""
    return torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)


#: The tensors that a state_dict has of a layout, and no module has as attributes.
_SAVED = SimpleNamespace(**dict.fromkeys(IN_FILES))
NO_CONTENT = "the state is on the meta device and has no content to copy"


def autocast_dtype(input: Tensor) -> torch.dtype | None:
    """What nn.Linear would give for it under autocast; None where there is none."""
    kind = "cuda" if input.is_cuda else "cpu"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


_IS_PACKED = (
    "the weight of a SparseLinear is packed: this is a dense copy, and its change would be lost. To merge an adapter "
    "or to edit weights, change the layer that to_linear() gives, prune it again, and pack it with "
    "SparseLinear.from_linear"
)


class UnpackedWeight(Tensor):
    """A dense copy of a packed weight. Who changes it means to change the layer (as an adapter's merge): refused."""

    # __set__ is that of .data and .grad; the others stand behind operators where there is no method of that name.
    _IN_PLACE = (
        "__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
        "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
    )  # fmt: skip
    #: transformers' own initialisation passes over it.
    _is_hf_initialized = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(changed, cls) for changed in cls._changed(func, args, kwargs)):
            raise RuntimeError(_IS_PACKED)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            memory = {a.untyped_storage()._cdata for a in args if isinstance(a, cls)}
            return cls._views(result, memory)

    @classmethod
    def _changed(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """What a call changes in place."""
        name, changed = func.__name__, [kwargs.get("out")]
        method = name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "detach_")
        if name == "__set__" and func.__self__.__name__ == "requires_grad" and not args[1]:
            method = False  # it has none
        elif method or name in cls._IN_PLACE or kwargs.get("inplace"):
            # torch.nn.init hands on what it is given by keywords alone.
            changed += args[:1] or [kwargs.get(key) for key in ("tensor", "input", "self")]
        return [one for of in changed for one in (of if isinstance(of, (list, tuple)) else [of])]

    @classmethod
    def _views(cls, result: Any, memory: set[int]) -> Any:
        """The result of a call, where it is in the memory of a copy as a copy."""
        if type(result) in (list, tuple):
            return type(result)(cls._views(one, memory) for one in result)
        if type(result) is Tensor and result.layout == torch.strided and result.untyped_storage()._cdata in memory:
            return result.as_subclass(cls)
        return result

    def __deepcopy__(self, memo: Any) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


class LazyWeight(Tensor):
    """A packed weight that is unpacked, into an UnpackedWeight, when its elements are asked for: not for its shape.

    T5 looks at the dtype of a weight at each call, loaders of adapters at the shape of every one in a model. Sums that
    are written into it, as adapters are merged, are packed anew where the format holds them.
    """

    _is_hf_initialized = True
    #: What the tensor answers without elements: attributes, and methods.
    _ATTRIBUTES = (
        "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "grad", "grad_fn",
        "is_leaf", "is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_nested", "_version",
    )  # fmt: skip
    _METHODS = (
        "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device", "__len__",
        "is_contiguous", "is_floating_point", "is_complex", "is_inference",
    )  # fmt: skip
    _SUMS: ClassVar[dict[str, str]] = {"__iadd__": "add_", "add_": "add_", "__isub__": "sub_", "sub_": "sub_"}
    _layer: SparseLinear
    _unpack: Callable[[], Tensor]
    _dense: UnpackedWeight | None

    @staticmethod
    def __new__(cls, layer: SparseLinear) -> LazyWeight:
        shape = (layer.out_features, layer.in_features)
        weight = Tensor._make_wrapper_subclass(cls, shape, dtype=layer.dtype, device=layer.device)  # type: ignore[attr-defined]
        weight._layer, weight._unpack, weight._dense = layer, layer._unpacks(), None
        return weight

    def opened(self) -> UnpackedWeight:
        """The dense weight, as it was when the layer was asked for it."""
        if self._dense is None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self._dense = self._unpack().as_subclass(UnpackedWeight)
        return self._dense

    def _become(self, dense: Tensor) -> None:
        """Makes it the layer's weight. RuntimeError, and no change, where the layer's format does not hold it."""
        if (dense.shape, dense.dtype) != (self.shape, self.dtype):
            raise RuntimeError(
                f"the weight of a SparseLinear is {self.dtype} {list(self.shape)}, and cannot become {dense.dtype} "
                f"{list(dense.shape)}"
            )
        self._layer._pack_anew(dense)
        self._unpack, self._dense = self._layer._unpacks(), None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs, self = func.__name__, kwargs or {}, args[0] if args else None
        if isinstance(self, cls):
            attribute = (
                getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
            )
            if name == "detach" or (name, attribute) == ("__get__", "data"):
                return self
            if attribute == "requires_grad" and name == "__set__" and not args[1]:
                return None
            if name == "requires_grad_" and not (args[1:] or tuple(kwargs.values()) or (True,))[0]:
                return self
            if (attribute in cls._ATTRIBUTES and name == "__get__") or name in cls._METHODS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if (name, attribute) == ("__set__", "data") and self._layer._holds_sums:
                if args[1] is not self:  # it is, where `weight.data += delta` sets what has been packed
                    self._become(_opened(args[1]))
                return None
            if name in cls._SUMS and self._layer._holds_sums:
                with torch.no_grad():
                    total = self._unpack()
                    getattr(total, cls._SUMS[name])(*tree_map(_opened, args[1:]), **tree_map(_opened, kwargs))
                    self._become(total)
                return self
        return func(*tree_map(_opened, args), **tree_map(_opened, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What C++ asks of it, behind __torch_function__."""
        if func._schema.is_mutable and any(isinstance(arg, cls) for arg in args):
            raise RuntimeError(_IS_PACKED)
        with torch._C.DisableTorchFunctionSubclass():
            plain = [tree_map(_opened, tree) for tree in (args, kwargs or {})]
            return func(*plain[0], **plain[1])

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.opened(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.opened().__reduce_ex__(protocol)


def _opened(value: Any) -> Any:
    return value.opened() if isinstance(value, LazyWeight) else value


def _version(tensor: Tensor) -> int:
    """How often torch has seen the tensor changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def _sum_of_bytes(tensor: Tensor) -> int:
    return int(tensor.flatten().view(torch.uint8).sum())


class SparseLinear(nn.Linear):
    """y = x W^T + bias with a packed W: an nn.Linear for every caller, frozen, never dense.

    The packed tensors are its buffers, under the names of the format's fields, so it moves, copies, pickles and saves
    as any module. Its state_dict holds them, the bias, the format's name and sizes as JSON bytes (`_extra_state`), and
    an empty `weight`, at which a dense layer stops. What is loaded is validated first, and may have another number of
    entries, or another format, than it had; the names of files (`values`, `deltas`, `row_ptr`) say what they are
    without `_extra_state` too. In the format dense12 its state_dict is that of the nn.Linear, and a dense weight can be
    loaded.

    Nobody but the layer may write into its buffers: a copy that others wrote into, as averages of models do
    (AveragedModel with use_buffers=True), raises a RuntimeError when it is used or saved.

    Moving to another dtype converts as nn.Linear would: `layer.half().weight` equals `weight.half()`, but where values
    have 8 bits (docs/eight.md). A format that was chosen is chosen again. Types which macko has no kernels for are
    refused with a TypeError.

    Args:
        in_features, out_features, bias, device, dtype: as in nn.Linear. Without a dtype torch's default is taken.

    A new one has a weight of zeros, which takes no memory, to load a state_dict into. `from_linear` converts.
    """

    in_features: int
    out_features: int
    _format: type[PackedWeight]
    _sizes: dict[str, int]
    _header: tuple[int, ...]  # what ops are told of the weight besides its tensors; one guard of a compiled model
    _options: Options | None  # choose the layout, again where the layer moves to another kind of device
    #: Of a copy's buffers: which object, its version, and the sum of its bytes when it was whole.
    _copied: list[tuple[int, int, int]] | None = None
    #: Whether its state_dict has the empty weight.
    _saves_empty_weight: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        packed = MackoWeight.zeros(out_features, in_features, dtype or torch.get_default_dtype(), device)
        self._options = AUTO
        self._setup(packed, torch.zeros(out_features, dtype=packed.dtype, device=packed.device) if bias else None)

    def _setup(self, packed: PackedWeight, bias: Tensor | None) -> None:
        nn.Module.__init__(self)  # not nn.Linear's: that one makes a dense weight
        if reason := unsupported(packed.dtype, packed.device):
            raise TypeError(f"SparseLinear: a weight cannot be packed as {reason}")
        self.in_features, self.out_features = packed.cols, packed.rows
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias)
        self.register_parameter("bias", bias)
        self._hold(packed)

    def _hold(self, packed: PackedWeight) -> None:
        self._buffers = {}  # a copy.copy of the layer has the one before
        for name, tensor in packed.tensors().items():
            super().register_buffer(name, tensor)
        self._format, self._sizes, self._header = type(packed), packed.sizes(), tuple(packed.header)
        if self._copied is not None:
            self._note_content()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy, which is looked at when it is used: who keeps averages of a model copies it first."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(vars(self), memo))
        copied._note_content()
        return copied

    def _note_content(self) -> None:
        tensors = [tensor for tensor in self._buffers.values() if tensor is not None]
        on_meta = any(tensor.is_meta for tensor in tensors)
        self._copied = None if on_meta else [(id(t), _version(t), _sum_of_bytes(t)) for t in tensors]

    def _check_content(self) -> None:
        """RuntimeError where somebody has changed the buffers of a copy."""
        buffers, noted = self._buffers.items(), self._copied or []
        now = [(id(tensor), _version(tensor)) for _, tensor in buffers if tensor is not None]
        if now == [(which, version) for which, version, _ in noted]:
            return
        for (name, tensor), (*_, total) in zip(buffers, noted, strict=False):
            if tensor is not None and not tensor.is_meta and _sum_of_bytes(tensor) != total:
                raise RuntimeError(
                    f"SparseLinear [{self.out_features}, {self.in_features}]: somebody has written into {name} of this "
                    f"copy, which is packed ({self.format}) and no numbers to average. Averages of models are of "
                    "parameters: AveragedModel(use_buffers=False); the packed weight does not change while one trains"
                )
        self._copied = [(*new, total) for new, (*_, total) in zip(now, noted, strict=False)]

    @classmethod
    def from_packed(cls, packed: PackedWeight, bias: Tensor | None = None, *, options: Options | None = None) -> Self:
        """A layer around a packed weight (not copied) and a bias [rows]; a Parameter is kept as it is.

        Where `options` chose its layout they choose anew when the layer moves to another kind of device.
        """
        layer = cls.__new__(cls)
        layer._setup(packed, bias)
        layer._options = options and options.again
        layer._options = layer._rechooses
        return layer

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: str = "auto") -> SparseLinear:
        """Packs a layer's weight on its device. The bias is shared with it; hooks are not taken over.

        Raises:
            ValueError: there is no such format.
            TypeError: there is no kernel for the weight's dtype on its device.
        """
        weight = linear.weight.detach()
        if reason := unsupported(weight.dtype, weight.device):
            raise TypeError(f"SparseLinear: the weight cannot be packed: {reason}")
        options = Options(format)
        layer = cls.from_packed(pack(weight, options), linear.bias, options=options)
        return layer.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """The dense layer with the very weight that was packed (its zeros +0.0); not trainable until asked to be."""
        dense = nn.Linear(self.in_features, self.out_features, bias=False, device="meta", dtype=self.dtype)
        dense.weight = nn.Parameter(self.packed.to_dense(), requires_grad=False)
        dense.bias = self.bias
        return dense.train(self.training)

    def reformat_(self, format: str = "auto") -> SparseLinear:
        """Holds the same weight in another format, in place; nothing where it is held so already.

        "auto" chooses for as many tokens as sparsify_ was told; it leaves ec, slide, dense12 and 8 bits as they are.

        Raises:
            ValueError: there is no such format, it does not run on the weight's device, or does not hold the weight.
                The layer is then as it was.
        """
        wanted, packed = Options(format), self.packed
        if packed.device.type != "meta" and (reason := wanted.not_on(packed.device, packed.dtype)):
            raise ValueError(f"format {reason}, the weight is on {packed.device}")
        options = wanted.again and (self._options or wanted.again)
        choice = replace(wanted, values=options.values) if options and wanted.may_slide else options or wanted
        if (again := repacked(packed, choice)) is not packed:
            self._hold(again)
        self._options = options
        return self

    @property
    def _rechooses(self) -> Options | None:
        """What chooses the format of what the layer holds anew; None where that stays as it is."""
        return None if self._view.keeps_format else self._options

    @property
    def _chosen(self) -> Options:
        """What packs the weight anew: what its format was chosen by, or its format."""
        return self._rechooses or Options(self.format)

    @property
    def packed(self) -> PackedWeight:
        """The packed weight: a view of the buffers."""
        if self._copied is not None:
            self._check_content()
        return self._view

    @property
    def _view(self) -> PackedWeight:
        return self._format(**self._held(), **self._sizes)  # type: ignore[arg-type]

    def _held(self) -> dict[str, Any]:
        """The packed tensors by name."""
        return self._buffers

    @property
    def format(self) -> str:
        return self._format.format

    @property
    def dtype(self) -> torch.dtype:
        return self._view.dtype

    @property
    def device(self) -> torch.device:
        return self._view.device

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense [out_features, in_features] weight, without a gradient: made where its elements are used, not for
        its shape or dtype, and kept no longer than it is.

        In a format that holds any weight exactly (dense12) `weight.data = ...`, and `+=` and `-=` on it, pack the layer
        anew, as adapters are merged; any other change is a RuntimeError.
        """
        if self.device.type != "meta":
            return self._unpacks()() if torch.compiler.is_compiling() else LazyWeight(self)
        shape = (self.out_features, self.in_features)
        dense = torch.empty(shape, dtype=self.dtype, device="meta")
        return dense if torch.compiler.is_compiling() else dense.as_subclass(UnpackedWeight)

    def _unpacks(self) -> Callable[[], Tensor]:
        """What makes the dense weight that the layer has now."""
        return self.packed.to_dense

    @property
    def _holds_sums(self) -> bool:
        """Whether another dense weight can be packed in place of this one, exactly."""
        return self._format.holds_any_exactly()

    def _pack_anew(self, dense: Tensor) -> None:
        """Holds this dense weight in the same format. RuntimeError, and no change, where that does not hold it."""
        try:
            self._hold(self._format.from_dense(dense.detach().to(self.device)))
        except ValueError as error:
            raise RuntimeError(
                f"SparseLinear: {self.format} does not hold what its weight is to become: {error}"
            ) from None

    def forward(self, input: Tensor) -> Tensor:
        """[..., out_features] for input [..., in_features] of the layer's dtype. Under autocast, which leaves the
        weight as it is, input and bias are cast to that, and the output to autocast's dtype.
        """
        if self._copied is not None and not torch.compiler.is_compiling():
            self._check_content()
        tensors, parameters = list(self._held().values()), self._parameters
        # Less 0.4 us of nn.Module; FSDP and parametrizations take it out of there.
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        if (dtype := autocast_dtype(input)) is None:
            try:
                return multiply(input, tensors, self._header, bias)
            except RuntimeError as error:
                self._explain(error, input)
                raise
        added = None if bias is None else bias.to(self.dtype)
        return multiply(input.to(self.dtype), tensors, self._header, added).to(dtype)

    def _parts(self, input: Tensor, part_rows: Sequence[int]) -> Sequence[Tensor]:
        """forward(input) in parts of so many out_features, without a bias: tensors of their own, or slices."""
        if self._copied is not None and not torch.compiler.is_compiling():
            self._check_content()
        if not self._format.gives_parts(input, part_rows):
            return slices(self.forward(input), part_rows)
        tensors = list(self._held().values())
        if (dtype := autocast_dtype(input)) is None:
            try:
                return torch.ops.macko.linear_parts(input, tensors, self._header, part_rows)
            except RuntimeError as error:
                self._explain(error, input)
                raise
        parts = torch.ops.macko.linear_parts(input.to(self.dtype), tensors, self._header, part_rows)
        return [part.to(dtype) for part in parts]

    def _explain(self, error: RuntimeError, input: Tensor) -> None:
        """RuntimeError that says what to do, where the input is of another dtype than the layer."""
        if input.is_floating_point() and input.dtype != self.dtype:
            dtype = str(self.dtype)
            raise RuntimeError(
                f"{error}. The layers around it compute in another type (as after peft's "
                f"prepare_model_for_kbit_training): run the model in torch.autocast({input.device.type!r}, {dtype}), "
                f"or give the layer x.to({dtype})"
            ) from None

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        packed = self._view
        if (density := packed.known_density) is not None:
            text += f", density={density:.3f} ({1 - density:.1%} sparse)"
        return f"{text}, format={packed.format}, dtype={packed.dtype}, bytes={packed.nbytes}"

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight":
            self._refuse_distribution()
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if name not in self._buffers:
            raise RuntimeError(
                f"{type(self).__name__}: its buffers are the packed weight's: register {name} in the module around it"
            )
        super().register_buffer(name, tensor, persistent)

    def _refuse_distribution(self) -> NoReturn:
        raise RuntimeError(
            "SparseLinear: a packed weight cannot be distributed by torch.distributed.tensor (parallelize_module, "
            "distribute_module) yet: leave the sparse layers out of the plan"
        )

    def reset_parameters(self) -> NoReturn:
        raise RuntimeError(f"{type(self).__name__}: a packed weight has no random start; load one, or use from_linear")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(
                "SparseLinear: weight is packed and cannot be set; change to_linear().weight and use from_linear()"
            )
        if name == "_distribute_module_applied":
            self._refuse_distribution()
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseLinear:
        """What .to(), .half(), .cuda() and their like call: another dtype is another packing."""
        packed = self.packed
        target = fn(torch.empty(0, dtype=packed.dtype, device=packed.device))
        for name, tensor in packed.tensors().items():
            probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if not tensor.is_floating_point() and probe.dtype != tensor.dtype:
                raise TypeError(
                    f"SparseLinear: {name} is {tensor.dtype} and cannot be cast; use .to(dtype), not .type()"
                )
        if (target.dtype, target.device) != (packed.dtype, packed.device):
            if reason := unsupported(target.dtype, target.device):
                raise TypeError(f"SparseLinear: the weight cannot move: {reason}")
            elsewhere = target.dtype != packed.dtype or target.device.type not in packed.device_types
            rechosen = self._rechooses and (target.dtype, target.device.type) != (packed.dtype, packed.device.type)
            if (elsewhere or rechosen) and "meta" not in (target.device.type, packed.device.type):
                moved = packed.to_macko() if rechosen else packed
                self._hold(moved.to(target.device, target.dtype))
                if self._rechooses:
                    self.reformat_()
        scales = {name: tensor for name, tensor in self.packed.tensors().items() if tensor.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, scale in scales.items() if self.dtype != torch.float32 else ():  # which no other type holds
            if (there := self._buffers[name]) is not None and there.dtype != torch.float32:
                self._buffers[name] = scale.to(there.device)
        if self._copied is not None:
            self._note_content()  # fn may have written, as to_empty; the layer may be there under another name, too
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """As any module; an execution layout goes as the canonical format, on the CPU to spare the device.

        What is saved dense goes as nn.Linear's weight, there too.
        """
        if isinstance(in_file := in_state(self.packed), Tensor):
            destination[f"{prefix}weight"] = in_file
            if self.bias is not None:
                destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()
            return
        saved = copy.copy(self)  # and not the layer itself: another thread may be multiplying
        saved._hold(in_file)
        super(SparseLinear, saved)._save_to_state_dict(destination, prefix, keep_vars)
        for key in [prefix + name for name in saved._buffers]:
            if not destination[key].numel():
                destination[key] = with_address(destination[key])
        if self._saves_empty_weight:
            destination[f"{prefix}weight"] = in_file.empty_weight()

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint, which looks up each name of a state_dict: those that are no buffers now."""
        hidden = [name for name in vars(_SAVED) if name not in self._held()]
        return dict.fromkeys(hidden, "_saved")

    @property
    def _saved(self) -> SimpleNamespace:
        return _SAVED

    def get_extra_state(self) -> Tensor:
        """The format's name and sizes, as the bytes of a JSON text: a tensor, so that every file format takes it."""
        return as_extra_state(self._view.about() or {})

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing: _load_from_state_dict has read it, before the tensors."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Validates what comes, then makes buffers of its sizes, for nn.Module to copy or assign to."""
        before, assigned = self._view, bool(local_metadata.get("assign_to_params_buffers"))
        buffers, extra = [prefix + name for name in self._buffers], f"{prefix}_extra_state"
        try:
            packed, changed = self._loaded(state_of(state_dict, prefix), assigned)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{prefix.removesuffix('.') or 'SparseLinear'}: {error}")
            return
        if packed is not None:
            if changed:
                state_dict |= {prefix + name: tensor for name, tensor in packed.tensors().items()}
            self._hold(packed.empty_like(self.device))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if extra in missing_keys:  # the layer's sizes do, where a file keeps none
            missing_keys.remove(extra)
        if packed is None:  # what the state lacks is what files hold
            pairs = zip(before.tensor_names, before.names_in_files, strict=True)
            names = {prefix + name: prefix + in_file for name, in_file in pairs}
            missing_keys[:] = [names.get(key, key) for key in missing_keys]
        else:
            # The empty weight of a packed folder, and the layout's own tensors, which torch.distributed.checkpoint adds
            expected = {*buffers, *(prefix + name for name in IN_FILES)}
            unexpected_keys[:] = [key for key in unexpected_keys if key not in expected]
        if self._copied is not None:
            self._note_content()
        if isinstance(loaded := self._view, MackoWeight) and loaded.device.type != "meta":
            if self._options is not None:
                self.reformat_()
            elif (again := before.laid_out_again(loaded)) is not loaded:
                self._hold(again)

    def _loaded(self, state: dict[str, Any], assigned: bool) -> tuple[PackedWeight | None, bool]:
        """The weight of a state as the layer can hold it, None where it has none; and whether other tensors are its."""
        like = self._view
        if (dense := dense_in(state, like)) is not None:
            return self._pack_loaded(dense, assigned), True
        found = packed_in(state, like, (self.out_features, self.in_features))
        if found is None:
            return None, False
        on_meta = "meta" in (self.device.type, found.device.type)
        packed = found.materialized(None if on_meta else self.device)
        if not assigned and packed.device.type == "meta" != self.device.type:
            raise ValueError(NO_CONTENT)
        elsewhere = self.device.type not in packed.device_types
        if not on_meta and (elsewhere or (not assigned and packed.dtype != self.dtype)):
            packed = packed.to(self.device, self.dtype)
        return packed, packed is not found

    def _pack_loaded(self, dense: Tensor, assigned: bool) -> PackedWeight:
        """The dense weight of a state_dict as this layer holds it, where files hold it dense."""
        if dense.shape != (self.out_features, self.in_features):
            wanted = [self.out_features, self.in_features]
            raise ValueError(f"size mismatch: the state has shape {list(dense.shape)}, the layer {wanted}")
        if dense.device.type == "meta":  # as a packed state there: without content
            if not assigned and self.device.type != "meta":
                raise ValueError(NO_CONTENT)
            return self._view.empty_like("meta")
        target = dense.device if self.device.type == "meta" else self.device
        return self._format.from_dense(dense.detach().to(target, dense.dtype if assigned else self.dtype))
