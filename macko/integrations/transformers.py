"""transformers 5: `quantization_config=macko.MackoConfig()`, save_pretrained and from_pretrained of sparse models."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..choose.auto import is_held_packed
from ..choose.options import Options
from ..choose.patterns import countable
from ..choose.times import packed_share
from ..files import TYPES, Checkpoint, check_whole, join, named, on_disk, open_tensors
from ..nn.convert import CONVERTED, convert_weight, stack_of, warn_if_unchanged
from ..nn.experts import (
    NOT_OFFLOADED,
    PROJECTIONS,
    SparseExperts,
    Stack,
    UnfoldedExperts,
    find_experts,
    fold_,
    is_experts,
    not_stacked,
    projections,
    put,
    replace,
    saved_by_expert,
    turned,
    unfold_,
)
from ..nn.find import FoundLinear, find_linears, submodule, unpackable
from ..nn.linear import SparseLinear, unsupported, with_hooks
from ..nn.report import LayerReport, Report
from ..weights import FORMATS, PackedWeight, saved_as
from ..weights.saved import in_state, states_for_files, within
from . import tensor_parallel, transformers_version
from .compressed_tensors import has_four_bits, lazy_state, sparsity_format
from .config import Settings

#: Whether the from_pretrained that runs was told ignore_mismatched_sizes (macko.integrations.saving sets it).
IGNORES_SIZES: ContextVar[bool] = ContextVar("IGNORES_SIZES", default=False)
#: Whether an offloader is to have the model that it gives, which holds packed what files hold so, on a CPU too.
OFFLOADS: ContextVar[bool] = ContextVar("OFFLOADS", default=False)
#: Whether its caller looks at the keys that no file has, all of them (load_packed).
_LOOKS_AT_KEYS: ContextVar[bool] = ContextVar("_LOOKS_AT_KEYS", default=False)
#: In the environment: transformers reads a tensor when its turn has come. Else threads read ahead, in the time that a
#: layer takes to be cut all that there is: an H200 held the whole of a 7B, of which half was its part.
_NO_ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"


@dataclasses.dataclass
class _Packing:
    """Where load_packed packs layers, the folder in which they lie from then on, and what stopped that."""

    device: torch.device
    folder: Path
    error: OSError | None = None

    def on_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        try:
            return on_disk(tensors, self.folder)
        except OSError as error:  # transformers goes on with the next layer, and says that there was something
            self.error = error
            raise


_PACKING: ContextVar[_Packing | None] = ContextVar("_PACKING", default=None)


@register_quantization_config("macko")
class MackoConfig(Settings, QuantizationConfigMixin):
    """How from_pretrained packs a pruned checkpoint, and what config.json keeps of a packed one.

    Its arguments and errors are those of macko.integrations.config.Settings.

    Attributes:
        offload: whether the model is read on the CPU, made such that offloaders move it (macko.offloadable_), and then
            put where from_pretrained's device_map says, "cpu" and "disk" beside GPUs among it; not in files.
    """

    def __init__(self, *args: Any, offload: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.offload = offload

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_dict().items() if name != "offload"}

    def get(self, key: str, default: Any = None) -> Any:
        """An option, or the default: transformers asks the config that a model has as it does the one of a file."""
        return getattr(self, key, default)

    def to_diff_dict(self) -> dict[str, Any]:
        """What repr shows; not every config of transformers before 5.4 has it."""
        return self.to_dict()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The config of a config.json, without what others, or a later macko, have noted there too."""
        return super().from_dict(cls.arguments(config_dict), return_unused_kwargs, **kwargs)


@register_quantizer("macko")
class MackoHfQuantizer(HfQuantizer):
    """Packs each linear layer as it is read, or puts what was packed in its place.

    Attributes:
        report: what became of each linear layer in the last from_pretrained that converted.
    """

    requires_calibration = False
    quantization_config: MackoConfig
    is_trainable = True  # adapters on it: a packed weight hands gradients through and has none itself
    is_compileable = True

    def __init__(self, quantization_config: MackoConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.report = Report([])
        self._found: dict[str, FoundLinear] = {}
        #: Targets of each of transformers' converters that makes several weights of what files hold.
        self._split: list[list[str]] = []
        self._packed_names: set[str] = set()
        #: Experts to pack as they are read, by the name of each weight; and modules of which files have each expert.
        self._experts: dict[str, str] = {}
        self._unfolded: list[str] = []
        #: What the caller of from_pretrained wants, of each packed layer.
        self._dtypes: dict[str, torch.dtype] = {}
        #: Bytes of a packed weight over those of the dense one, as far as known before it is read.
        self._share = 1.0
        self._async: str | None = None
        #: What the caller of from_pretrained wants of the model.
        self._dtype: torch.dtype | None = None
        #: Of each parameter, before anything is read.
        self._shapes: dict[str, torch.Size] = {}

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        places = set(device_map.values()) if isinstance(device_map, dict) else set()
        offloaded = {str(place) for place in places if str(place) in ("cpu", "disk")}
        if "disk" in offloaded or (offloaded and len(places) > 1):
            raise ValueError(
                f"device_map puts layers on {' and '.join(sorted(offloaded))} to fetch them when they are needed: ask "
                "for that by quantization_config=macko.MackoConfig(..., offload=True), or use a device_map of GPUs "
                "alone, or of the CPU alone"
            )

    # ---- Before loading ----

    def preprocess_model(self, model: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        self._dtype = dtype
        super().preprocess_model(model, dtype=dtype, **kwargs)

    def _process_model_before_weight_loading(  # type: ignore[override]
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        tensor_parallel.check(model)
        self._believe_files(checkpoint_files or [])
        if self.pre_quantized:
            names = self._packed_by_expert(model)
            if names and tensor_parallel.is_asked(model):
                raise ValueError(
                    f"{min(names)}: the files hold its experts packed one by one, of which no process gets a part yet: "
                    "load the dense model with quantization_config=macko.MackoConfig(), which packs what each gets"
                )
            self._unfolded = unfold_(model, lambda name, module: name in names)
            self._place_packed(model, checkpoint_files or [])
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        if self.pre_quantized:
            if tensor_parallel.is_asked(model):
                self._async = os.environ.get(_NO_ASYNC)
                os.environ[_NO_ASYNC] = "1"
            return
        tied = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())
        for layer in find_linears(model, self.quantization_config.ignore, None):
            reason = layer.left_out or layer.changed or ("its weight is tied" if f"{layer.name}.weight" in tied else "")
            reason = reason or self._kept_wider(layer.module.weight)
            if not reason and type(layer.module) is nn.Linear:
                self._found[layer.name] = layer
            else:
                shape = tuple(layer.module.weight.shape)
                size = layer.module.weight.nbytes
                kind = f"{type(layer.module).__name__} is a subclass of nn.Linear and may do something else"
                self.report.layers.append(LayerReport(layer.name, shape, None, "dense", size, size, reason or kind))
        for found in find_experts(model, self.quantization_config.ignore, None):
            weight: Any = found.module._parameters["down_proj"]
            left_out = found.left_out or (NOT_OFFLOADED if OFFLOADS.get() else "") or self._kept_wider(weight)
            for key in projections(found.module):
                if left_out:
                    self._leave(found.module, f"{found.name}.{key}", left_out)
                else:
                    self._experts[f"{found.name}.{key}"] = found.name
        conversions = get_model_conversion_mapping(model)
        self._split = [list(c.target_patterns) for c in conversions if len(c.target_patterns) > 1]
        self._share = _expected_share(checkpoint_files or [], self._found)

    def _kept_wider(self, weight: Tensor) -> str:
        """Why a weight that the model makes in another dtype than its own, as a router, is left, or nothing.

        transformers would read what is to be packed in the model's dtype.
        """
        if self._dtype in (None, weight.dtype):
            return ""
        return f"the model keeps it in {str(weight.dtype).removeprefix('torch.')}"

    def _packed_by_expert(self, model: Any) -> set[str]:
        """Names of modules of experts that the files have packed, one by one."""
        renamed, prefix = renamer(model), f"{model.base_model_prefix}."
        stems = {renamed(saved).rpartition(".")[0].rpartition(".")[0] for saved in self.quantization_config.layers}
        stems |= {f"{prefix}{stem}" for stem in stems} | {stem.removeprefix(prefix) for stem in stems}
        return {name for name, module in model.named_modules() if name in stems and is_experts(module)}

    def _leave(self, experts: nn.Module, name: str, reason: str) -> None:
        """Notes that a projection of experts stays dense."""
        weight = experts._parameters[name.rpartition(".")[2]]
        size = weight.nbytes  # type: ignore[union-attr]
        row = LayerReport(name, tuple(weight.shape), None, "dense", size, size, reason, linear=False)  # type: ignore[union-attr]
        self.report.layers.append(row)

    def _believe_files(self, checkpoint_files: list[str]) -> None:
        """Takes what the config.json beside the files says of them for the config that the caller gave.

        That may be of a model that was packed in memory, or of another folder than this.
        """
        beside = Path(checkpoint_files[0]).with_name("config.json") if checkpoint_files else None
        if not self.pre_quantized or beside is None or not beside.is_file():
            return
        about = json.loads(beside.read_text(encoding="utf-8"))
        parts = [about, *(part for part in about.values() if isinstance(part, dict))]
        packed = [part["quantization_config"] for part in parts if part.get("quantization_config")]
        self.pre_quantized = bool(packed)
        if packed and packed[0].get("quant_method") == "macko":
            self.quantization_config.layers = MackoConfig.from_dict(packed[0]).layers

    def _place_packed(self, model: Any, checkpoint_files: list[str]) -> None:
        """Empty sparse layers on the meta device, of the sizes that the files have."""
        if self.quantization_config.layers and not checkpoint_files and (casts := _casts_integers()):
            raise ValueError(f"state_dict: {casts}")
        shapes = tensor_shapes(checkpoint_files)
        tripwires: set[str] = set()
        prefix, renamed = f"{model.base_model_prefix}.", renamer(model)
        for saved, about in self.quantization_config.layers.items():
            # A model with a head reads the checkpoint of one without, and the other way round.
            names = (saved, f"{prefix}{saved}", saved.removeprefix(prefix), renamed(saved))
            name = next((n for n in names if submodule(model, n) is not None), None)
            shape, _ = shapes.get(join(saved, "weight"), ((0,), None))
            if 0 not in shape:
                raise ValueError(f"{saved}: the files hold its weight packed, and another one of shape {list(shape)}")
            # One pattern for all blocks and experts: there may be tens of thousands of layers.
            tripwires |= {re.sub(r"\d+", r"\\d+", re.escape(join(n, "weight"))) for n in (name or saved, saved)}
            if name is None:
                continue  # transformers reports the tensors as unexpected
            linear = submodule(model, name)
            if not isinstance(linear, nn.Linear):
                raise ValueError(f"{saved} is a packed layer, in the model it is a {type(linear).__name__}")
            packed = without_content(saved, about, shapes, linear.weight.dtype)
            if packed.shape != linear.weight.shape:
                if IGNORES_SIZES.get():
                    continue  # transformers meets the empty weight, of yet another size, and starts the layer anew
                raise ValueError(
                    f"{saved}: the checkpoint has shape {list(packed.shape)}, the model {list(linear.weight.shape)}"
                )
            with named(saved, TypeError):  # of the values' dtype, which the file has
                sparse = _Loading.from_packed(packed, linear.bias)
            sparse._is_hf_initialized = True  # or transformers would give it random weights
            model.set_submodule(name, sparse)
            sparse.when_whole = partial(_cut, model, name)
            self._dtypes[name] = _planned(model, join(name, "weight"), linear.weight.dtype, self._dtype)
            self._packed_names |= {join(name, key) for key in packed.tensor_names}
        # Empty weights of experts too, which transformers would merge.
        merged = [rf"\.({'|'.join(PROJECTIONS)})$", r"\.experts\.\d+\.\w+\.weight$"] if self._unfolded else []
        _ignore_unexpected(model, [f"^{pattern}$" for pattern in tripwires] + merged)

    # ---- While loading ----

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        layer, _, key = param_name.rpartition(".")
        packed = param_name in self._packed_names or (key == "weight" and layer in self._found)
        packed = packed or param_name in self._experts
        return packed or (key == "weight" and self._starts_a_group(param_name))

    def _starts_a_group(self, name: str) -> bool:
        """Whether transformers makes weights that are to be packed together with the one of this name, its first."""
        return any(
            first in name and name.replace(first, other, 1).rpartition(".")[0] in self._found
            for first, *others in self._split
            for other in others
        )

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes an element to plan with: transformers reserves so much of a GPU before it loads."""
        size = param.element_size()
        if not self.param_needs_quantization(model, param_name):
            return size
        if not self.pre_quantized:
            return size * self._share
        return size / tensor_parallel.holders(model, param_name.rpartition(".")[0])

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        # A value may round to zero in another type, and a zero is not stored: so packed tensors come as they are.
        if converter.target_patterns[0] in self._packed_names:
            return None
        return super().get_new_dtype(converter, param, dtype)

    def get_quantize_ops(self) -> Any:
        from transformers.core_model_loading import ConversionOps

        quantizer = self

        class Pack(ConversionOps):
            """Dense weights of layers into SparseLinears in their places, or back as they are where it would not pay.

            It is given all that transformers makes of what files hold as one: q, k and v of a fused matrix.
            """

            def convert(  # type: ignore[override]
                self, input_dict: Any, model: Any = None, missing_keys: Any = None, **kwargs: Any
            ) -> dict[str, Tensor]:
                kept = {}
                for name, value in input_dict.items():
                    value = value[0] if isinstance(value, list) else value
                    layer, _, key = name.rpartition(".")
                    if name in quantizer._experts:
                        is_packed = quantizer._pack_experts(model, name, value)
                        if not is_packed:
                            kept[name] = value
                        elif missing_keys is not None:
                            missing_keys.discard(name)
                    elif key != "weight" or layer not in quantizer._found or not quantizer._pack(model, layer, value):
                        kept[name] = value
                    elif missing_keys is not None:
                        missing_keys.discard(name)
                return kept

        return Pack()

    def _pack(self, model: Any, name: str, weight: Tensor) -> bool:
        layer = self._found.pop(name)  # or it would keep the dense weight
        module = layer.module
        expected = getattr(module.weight, "_local_tensor", module.weight)  # of a DTensor this process' part
        if weight.shape != expected.shape:
            return False  # transformers then says that the checkpoint is of another size
        config = self.quantization_config
        packing = _PACKING.get()
        if packing and packing.error:
            return False
        options, device = config.options, packing.device if packing else None
        cut = tensor_parallel.cut_group(model, name, module.in_features, options.pattern)
        if cut and options.again:  # "mixed", which has other formats
            options, cut = options.again, ""
        row, sparse = convert_weight(name, weight, options, config.min_sparsity, device, cut)
        self.report.layers.append(row)
        if sparse is None:
            return False
        if packing:
            _put_on_disk(sparse, packing)
        sparse.bias = module.bias  # may still be to come
        sparse._is_hf_initialized = True
        for parent, attribute in layer.places:
            setattr(parent, attribute, sparse)
        tensor_parallel.wrap(model, name, sparse, module.in_features, module.out_features)
        return True

    def _pack_experts(self, model: Any, name: str, weight: Tensor) -> bool:
        """Packs a projection of experts, which transformers has merged; if it stays dense, so does the other one."""
        layer, key = self._experts.pop(name), name.rpartition(".")[2]
        module, config = model.get_submodule(layer), self.quantization_config
        expected = module._parameters[key]
        if weight.shape != getattr(expected, "_local_tensor", expected).shape:  # of a DTensor this process' part
            return False  # transformers then says that the checkpoint is of another size
        packing = _PACKING.get()
        if packing and packing.error:
            return False
        w = turned(module, weight)
        row = LayerReport(name, tuple(w.shape), None, "dense", w.nbytes, w.nbytes, linear=False)
        self.report.layers.append(row)
        left = next((r for r in self.report.layers if r.name.rpartition(".")[0] == layer and r.reason), None)
        options = config.options
        row.reason = (left.reason if left else "") or not_stacked(options)
        w = w if row.reason or packing is None else w.to(packing.device)
        row.reason = (
            row.reason
            or not_stacked(options, w.device)
            or unsupported(w.dtype, w.device)
            or options.not_on(w.device, w.dtype)
        )
        stack: Stack | None = None if row.reason else stack_of(w, row, options, config.min_sparsity)
        if stack is not None and packing is not None:
            mapped = packing.on_disk(stack.packed.tensors())
            stack = dataclasses.replace(stack, packed=stack.packed.replace(**mapped))
        if stack is None:
            if isinstance(module, SparseExperts):
                self._unpack_experts(model, layer, row.reason)
            return False
        if not isinstance(module, SparseExperts):
            dense, module = module, SparseExperts(module, {})
            module._parameters.update({k: p for k, p in dense._parameters.items() if k not in module._parameters})
            put(model, layer, module)
            tensor_parallel.wrap_experts(model, layer, module)
        module._parameters.pop(key)
        module.hold(key, stack)
        for tensor in module.buffers():
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        return True

    def _unpack_experts(self, model: Any, layer: str, reason: str) -> None:
        """Makes dense again what was packed before it was known that the module's other projection is not."""
        sparse = model.get_submodule(layer)
        if "forward" in vars(sparse):
            raise ValueError(f"{layer}: of this process' part only one projection can be packed ({reason}): ignore it")
        put(model, layer, sparse.to_dense())
        for row in self.report.layers:
            if row.name.rpartition(".")[0] == layer:
                row.format, row.bytes_after, row.note, row.linear = "dense", row.bytes_before, "", False
                row.reason = row.reason or reason

    # ---- After loading ----

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        tensor_parallel.check(model)
        if self.pre_quantized and tensor_parallel.is_asked(model):
            del os.environ[_NO_ASYNC]
            os.environ |= {_NO_ASYNC: self._async} if self._async is not None else {}
        self._check_shapes(model)
        for name in self._unfolded:
            for one, module in model.get_submodule(name).named_modules():
                if type(module) is nn.Linear:
                    raise ValueError(
                        f"{name}.{one} is not packed, while others of these experts are: it would be random"
                    )
        kept_dense: list[str] = []
        wanted = OFFLOADS.get() or Options(self.quantization_config.format).any_zeros
        for name, module in model.named_modules():
            if type(module) is _Loading:
                if missing := module.missing():
                    raise ValueError(f"{name}: the checkpoint has no {missing[0]}")
                module.__class__ = SparseLinear  # type: ignore[assignment]
                packed, home, dtype = module.packed, module.device, self._dtypes[name]
                if reason := unsupported(dtype, home):
                    if dtype == torch.float32 != self._dtype:  # which only transformers wants: as sparsify_ leaves it
                        kept_dense.append(name)
                        continue
                    raise ValueError(f"{name}: the weight cannot be loaded: {reason}")
                if not wanted and tensor_parallel.cut_dim(model, name) is None and not is_held_packed(packed, home):
                    self._make_dense(model, name)
                    continue
                with named(name, TypeError, ValueError):
                    if packed.dtype != dtype:
                        packed = packed.to("cpu")  # a GPU has no kernels for float32
                    packed.validate()
                    module._hold(packed.materialized().to(home, dtype))
                module.to(dtype)  # its bias
                if self.quantization_config.values == "raw":  # 8 bits are not made of what the files hold exactly
                    module._options = Options(values="raw")
                module.reformat_(self._format_on(module.device, dtype))
        for name in kept_dense:
            self._make_dense(model, name)
        if kept_dense:
            many = f"{len(kept_dense)} layers" if len(kept_dense) > 1 else kept_dense[0]
            warnings.warn(
                f"{many}: dense, as transformers keeps float32, which macko holds on the CPU only", stacklevel=2
            )
        if self._unfolded:
            fold_(model, self._unfolded, self.quantization_config.layout_options)
            self._unfolded = []
        if self._experts and not _LOOKS_AT_KEYS.get():
            raise ValueError(f"the checkpoint has no {next(iter(self._experts))}: the experts would be random")
        self._experts.clear()
        if packing := _PACKING.get():
            if packing.error:
                raise packing.error
            for name in [n for n, module in model.named_modules() if saved_by_expert(n, module)]:
                _unfold_on_disk(model, name, packing)
        missing = [name for name in self._found if not _starts_anew(model, name)]
        if missing and not _LOOKS_AT_KEYS.get():
            more = f", nor of {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"the checkpoint has no {join(missing[0], 'weight')}{more}: the layer would be random")
        self._found.clear()
        if not self.pre_quantized:
            self.report.layers += unpackable(model, is_experts)
            warn_if_unchanged(self.report, "from_pretrained with a MackoConfig")
        return model

    def _check_shapes(self, model: Any) -> None:
        """ValueError where a weight has come in another size than the model's.

        Of a model that a quantizer loads, transformers before 5.23 does not look at that.
        """
        for name, parameter in model.named_parameters():
            if parameter.shape != (shape := self._shapes.get(name, parameter.shape)):
                anew = ", and this transformers does not start it anew" if IGNORES_SIZES.get() else ""
                raise ValueError(
                    f"{name}: the checkpoint has shape {list(parameter.shape)}, the model {list(shape)}{anew}"
                )
        self._shapes.clear()

    def _make_dense(self, model: Any, name: str) -> None:
        """Puts the dense layer in the place of a packed one that is read, in its dtype and on its device."""
        module, dtype = model.get_submodule(name), self._dtypes[name]
        with named(name, TypeError, ValueError):
            packed = module.packed if module.packed.dtype == dtype else module.packed.to("cpu")
            packed.validate()
            weight = packed.to_dense().to(module.device, dtype)
        dense = nn.Linear(module.in_features, module.out_features, bias=False, device="meta", dtype=dtype)
        dense.weight, dense.bias = nn.Parameter(weight, requires_grad=False), module.bias
        model.set_submodule(name, with_hooks(dense.train(module.training).to(dtype), module))

    def _format_on(self, device: torch.device, dtype: torch.dtype) -> str:
        """The format that the config asks for, or "auto", with a warning, where that does not run on the device or does
        not hold the dtype."""
        format = self.quantization_config.format
        if format in FORMATS and dtype not in FORMATS[format].dtypes:
            warnings.warn(f'format {format} does not hold {dtype}: held as "auto"', stacklevel=2)
            return "auto"
        if device.type == "meta" or not (reason := Options(format).not_on(device, dtype)):
            return format
        warnings.warn(f'format {reason}, the model is on {device}: held as "auto"', stacklevel=2)
        return "auto"

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """By default of the dtype that layers have: the config has the one that they were loaded with."""
        model = self._dequantize(model, dtype)
        self.remove_quantization_config(model)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        for module in list(model.modules()):
            if isinstance(module, SparseExperts):
                replace(model, {module: module.to_dense().to(dtype)})
        return unpacked(model, dtype)


def unpacked(model: Any, dtype: torch.dtype | None = None) -> Any:
    """The model, with dense layers in the places of packed ones."""
    dense: dict[nn.Module, nn.Linear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, SparseLinear):
            if module not in dense:
                dense[module] = with_hooks(module.to_linear().to(dtype), module)
            model.set_submodule(name, dense[module])
    return model


class _Loading(SparseLinear):
    """A SparseLinear whose sizes come from config.json: it asks for no _extra_state in the file."""

    get_extra_state = nn.Module.get_extra_state  # type: ignore[assignment]
    set_extra_state = nn.Module.set_extra_state
    _saves_empty_weight = False  # transformers would look for it

    #: Called with the layer once, when transformers has set the last of its tensors.
    when_whole: Callable[[SparseLinear], None] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, Tensor) and self.when_whole is not None and not self.missing():
            self.__dict__.pop("when_whole")(self)

    def missing(self) -> list[str]:
        """The tensors that are still to come."""
        tensors = (*self.named_buffers(), *self.named_parameters())
        return [name for name, tensor in tensors if not getattr(tensor, "_is_hf_initialized", False)]


def renamer(model: Any, to_files: bool = False) -> Callable[[str], str]:
    """Makes of a layer's name in files the model's own, or the other way round, by what transformers renames."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    renamings: list[Any] = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    if to_files:
        renamings = [entry.reverse_transform() for entry in renamings[::-1]]

    def renamed(name: str) -> str:
        key = join(name, "weight")
        for renaming in renamings:
            key, _ = renaming.rename_source_key(key)
        return key.removesuffix(".weight")

    return renamed


def _starts_anew(model: Any, name: str) -> bool:
    """Whether a model of transformers may have a layer that files lack: a head, a pooler; none of a numbered block."""
    base = f"{model.base_model_prefix}."
    if hasattr(model, model.base_model_prefix) and not name.startswith(base):
        return True
    ignored = model._keys_to_ignore_on_load_missing or ()
    return not re.search(r"\.\d+\.", f".{name}.") or any(re.search(p, join(name, "weight")) for p in ignored)


def _cut(model: Any, name: str, layer: SparseLinear) -> None:
    """Leaves a layer that is read this process' part of it, before the next one is, where it shall have a part."""
    if tensor_parallel.cut_dim(model, name) is None:
        return
    with named(name):
        layer.packed.validate()
        layer._hold(layer.packed.parted())
        tensor_parallel.cut(model, name, layer)
    for tensor in layer.buffers():
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def _put_on_disk(module: nn.Module, packing: _Packing) -> None:
    """Has the sparse layers in a module hold what files do, mapped from a file."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, SparseLinear)}
    with states_for_files():
        weights: dict[str, Any] = {name: in_state(layer.packed) for name, layer in layers.items()}
    mapped = packing.on_disk({join(n, key): t for n, weight in weights.items() for key, t in weight.tensors().items()})
    for name, layer in layers.items():
        layer._hold(weights[name].replace(**{key: mapped[join(name, key)] for key in weights[name].tensor_names}))


def _unfold_on_disk(model: Any, name: str, packing: _Packing) -> None:
    """Puts packed experts into the model one by one, as files have them, on disk."""
    experts = model.get_submodule(name)
    unfolded = UnfoldedExperts(experts.to(packing.device))
    for key in experts.packed_stacks():
        del experts._modules[f"{key}_packed"]
    _put_on_disk(unfolded, packing)
    put(model, name, unfolded)


def _mark(model: nn.Module) -> None:
    """Lets transformers know that a model of its own is packed now, for dequantize()."""
    from transformers.modeling_utils import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or getattr(model, "hf_quantizer", None) is not None:
        return
    if getattr(model.config, "quantization_config", None) is not None:
        return  # of another method, or of a model that this one is a part of
    if not any(isinstance(module, (SparseExperts, SparseLinear)) for module in model.modules()):
        return
    quantizer = MackoHfQuantizer(MackoConfig())
    any_model: Any = model
    any_model.hf_quantizer = quantizer
    any_model.config.quantization_config = quantizer.quantization_config


CONVERTED["transformers"] = _mark


def load_packed(
    source: str | os.PathLike[str], config: MackoConfig, device: torch.device | str, folder: Path, **options: Any
) -> Any:
    """The model of a dense or compressed-tensors folder, packed as it is read, to be saved; its class is the saved one.

    In memory there is one layer at a time, or one module of experts. All that is packed lies, as files hold it, in
    files of a folder that are gone with the model; all else in those of the source, but for what changes its dtype and
    for experts that stay dense, which transformers joins.

    Args:
        device: where each layer is packed; the model is on the CPU.

    Raises:
        ValueError: a file of the source is not as another says, no file has a weight of the model, or transformers has
            no such model.
    """
    source, before = os.fspath(source), os.environ.get(_NO_ASYNC)
    packing = _Packing(torch.device(device), folder)
    os.environ[_NO_ASYNC] = "1"
    try:
        with within(_PACKING, packing), readable(source), Checkpoint(source) as file:
            about, kind = class_of(source)
            options |= {"quantization_config": config, "output_loading_info": True}
            if has_four_bits(file.config):
                warnings.warn(f"{source}: its weights have 4 bits, and are unpacked to 16 to be packed", stacklevel=2)
            elif sparsity_format(file.config) is None and not file.is_slid:
                return _whole(source, kind, source, **{"dtype": "auto", **options})
            for name in ("quantization_config", "compression_config", "sparsity_config"):
                if hasattr(about, name):
                    delattr(about, name)
            stored = (file[name].dtype for name in file if name.endswith(".compressed"))
            dtype = options.pop("dtype", about.dtype) or next(stored, None)
            state = lazy_state(file)
            return _whole(source, kind, None, config=about, state_dict=state, dtype=dtype, **options)
    except RuntimeError as error:
        if packing.error is not None:
            raise packing.error from error
        raise
    finally:
        del os.environ[_NO_ASYNC]
        os.environ |= {_NO_ASYNC: before} if before is not None else {}


def class_of(folder: str | os.PathLike[str]) -> tuple[Any, Any]:
    """The config of a folder's model, and its class.

    Raises:
        ValueError: transformers has none of that name, or the files are too small for the model that config.json says.
    """
    import transformers

    about = transformers.AutoConfig.from_pretrained(folder)
    if not about.architectures:
        raise ValueError(f"{folder}/config.json does not name an architecture")
    kind = getattr(transformers, about.architectures[0], None)
    if kind is None:
        raise ValueError(f"transformers {transformers.__version__} has no {about.architectures[0]}")
    _check_size(os.fspath(folder), kind, about)
    return about, kind


def _whole(folder: str, kind: Any, *args: Any, **options: Any) -> Any:
    """What from_pretrained gives; ValueError where it has weights that no file has."""
    with within(_LOOKS_AT_KEYS):
        model, loaded = kind.from_pretrained(*args, **options)
    check_whole(model, loaded["missing_keys"], loaded["unexpected_keys"], folder)
    return model


@contextlib.contextmanager
def readable(folder: str | os.PathLike[str]) -> Iterator[None]:
    """ValueError with the folder's name for what transformers trips over where a file lies."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, StrictDataclassError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{folder} is no folder that transformers can read: {reason}") from error


def _check_size(folder: str, kind: Any, about: Any) -> None:
    """ValueError where config.json is of a model that the files are too small for: it would be made at random."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(copy.deepcopy(about)).parameters())
    size = sum(file.stat().st_size for file in Path(folder).iterdir())
    if count > 8 * size:  # the least that a file holds is a bit of a mask
        raise ValueError(f"{folder}: config.json is of a model of {count} weights, its files have {size} bytes")


_DTYPES = {name: dtype for dtype, name in TYPES.items()}


def without_content(
    layer: str, about: Any, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype | None]], dtype: torch.dtype
) -> PackedWeight:
    """A layer's packed weight on the meta device, by what files say of it and by the shapes of their tensors.

    Raises:
        ValueError: they say it wrong; names the layer.
    """
    with named(layer):
        kind, sizes, keys = saved_as(about)
        tensors = {}
        for key in keys:
            # What is not found has another name in the file; transformers puts what it loads in its place.
            shape, stored = shapes.get(join(layer, key), ((0,), None))
            tensors[key] = torch.empty(shape, dtype=stored or dtype, device="meta")
        return kind(**tensors, **sizes)  # type: ignore[arg-type]


def tensor_shapes(files: list[str]) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Shape and dtype of every tensor of safetensors files."""
    found = {}
    for name in files:
        if name.endswith(".safetensors"):
            with open_tensors(name) as file:
                for key in file.keys():  # noqa: SIM118  it has no __iter__
                    tensor = file.get_slice(key)
                    found[key] = (tuple(tensor.get_shape()), _DTYPES.get(tensor.get_dtype()))
    return found


def _expected_share(files: list[str], layers: Iterable[str]) -> float:
    """Packed over dense bytes, by the density of a few rows of some layers: for planning where layers go."""
    wanted = tuple(f"{layer}.weight" for layer in layers)
    nonzero = total = 0
    for name in files:
        if name.endswith(".safetensors"):
            # Not the meta device of the caller, who is about to build the model there.
            with torch.device("cpu"), open_tensors(name) as file:
                matrices = [key for key in file.keys() if key.endswith(wanted)]  # noqa: SIM118
                for key in matrices[:: max(1, len(matrices) // 8)]:
                    rows = file.get_slice(key)[:16]
                    nonzero += int(countable(rows).count_nonzero())
                    total += rows.numel()
    return min(1.0, packed_share(nonzero / total)) if total else 1.0


# ---- What differs between versions of transformers 5 -----------------------------------------------------------------


def _ignore_unexpected(model: Any, patterns: list[str]) -> None:
    """Adds to the patterns of keys that files may have and the model has not: a list or None, later a set."""
    ignored = model._keys_to_ignore_on_load_unexpected
    ignored = [] if ignored is None else ignored
    model._keys_to_ignore_on_load_unexpected = type(ignored)([*ignored, *patterns])


def _casts_integers() -> str:
    """Why packed tensors cannot be loaded where transformers wants another dtype than files have; "" since 5.4."""
    return "" if transformers_version() >= (5, 4) else "transformers before 5.4 casts packed integers too"


def _planned(model: Any, name: str, dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype that transformers loads a weight in: that of its layer, or float32 where it keeps that.

    Raises:
        ValueError: it keeps float32, and makes that of packed integers too.
    """
    has_plan = hasattr(model, "_get_dtype_plan")  # not in 5.0
    for pattern, kept in (model._get_dtype_plan(asked or dtype) if has_plan else model.dtype_plan).items():
        if re.search(pattern.replace("*", ".*"), name):
            if casts := _casts_integers():
                raise ValueError(f"{name}: {pattern} is kept in {kept}, while {casts}")
            return kept
    return dtype
