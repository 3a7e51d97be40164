"""diffusers: `quantization_config=macko.MackoConfig(...)` packs a model's layers as they are read; packed files.

diffusers has no decorator to register a quantizer: its two tables get an entry each. MackoConfig is that of
transformers, so one PipelineQuantizationConfig serves transformer and text encoders.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from torch import Tensor, nn

from ..choose.auto import held_on
from ..choose.options import AUTO
from ..files import named
from ..nn.convert import convert_weight, warn_if_unchanged
from ..nn.find import FoundLinear, find_linears, submodule, unpackable
from ..nn.linear import SparseLinear, with_hooks
from ..nn.report import LayerReport, Report
from .transformers import OFFLOADS, MackoConfig, tensor_shapes, unpacked, without_content


class _Read(SparseLinear):
    """A packed layer while the rest of its model is read: diffusers looks at the model's state_dict for each file."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        shape = (self.out_features, self.in_features)
        destination[f"{prefix}weight"] = torch.empty(shape, dtype=self.dtype, device="meta")
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.detach()


class _Arriving(SparseLinear):
    """A layer whose packed tensors are being read: they may lie in several files."""

    get_extra_state = nn.Module.get_extra_state  # type: ignore[assignment]
    _save_to_state_dict = nn.Module._save_to_state_dict  # type: ignore[assignment]


class MackoDiffusersQuantizer(DiffusersQuantizer):
    """Packs each linear layer when its weight is read, or puts what files hold packed in its place.

    Attributes:
        report: what became of each linear layer that was packed.
    """

    quantization_config: MackoConfig
    #: Else diffusers casts what a model keeps in float32 (Wan's time embedding), in silence.
    use_keep_in_fp32_modules = True
    supports_parallel_loading = False  # type: ignore[assignment]
    is_serializable = True  # type: ignore[assignment]
    is_trainable = True  # type: ignore[assignment]  # adapters on it
    is_compileable = True  # type: ignore[assignment]

    def __init__(self, quantization_config: MackoConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.report = Report([])
        self._found: dict[str, FoundLinear] = {}
        #: Shape and dtype of the files' tensors, where they are packed; and what is still to come of each layer.
        self._shapes: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {}
        self._missing: dict[str, set[str]] = {}

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ValueError(
                "device_map puts layers on the CPU or disk to fetch them when they are needed: ask for that by "
                "quantization_config=macko.MackoConfig(..., offload=True), or use a device_map of GPUs"
            )

    def _is_empty_weight(self, key: str) -> bool:
        """Whether it is what stands beside a layer's packed tensors, where a reader without macko stops."""
        return key.rpartition(".")[2] == "weight" and key.rpartition(".")[0] in self.quantization_config.layers

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        if self.quantization_config.layers:
            self._shapes = tensor_shapes(list(map(str, checkpoint_files)))
        return [key for key in loaded_keys if not self._is_empty_weight(key)]

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {key: tensor for key, tensor in state_dict.items() if not self._is_empty_weight(key)}

    def _process_model_before_weight_loading(self, model: Any, keep_in_fp32_modules: Any = (), **kwargs: Any) -> None:
        for name, about in self.quantization_config.layers.items():
            self._place(model, name, about)
        if self.pre_quantized:
            return
        for layer in find_linears(model, self.quantization_config.ignore, None):
            kept = set(layer.name.split(".")) & set(keep_in_fp32_modules or ())
            reason = layer.left_out or layer.changed or ("the model keeps it in float32" if kept else "")
            if not reason and type(layer.module) is not nn.Linear:
                reason = f"{type(layer.module).__name__} is a subclass of nn.Linear and may do something else"
            if not reason:
                self._found[layer.name] = layer
                continue
            shape, size = tuple(layer.module.weight.shape), layer.module.weight.nbytes
            self.report.layers.append(LayerReport(layer.name, shape, None, "dense", size, size, reason))

    def _place(self, model: Any, name: str, about: Any) -> None:
        """Puts a layer without content in the place of one that the files hold packed."""
        if (linear := submodule(model, name)) is None:
            raise ValueError(f"the files have a packed layer {name}, the model has no such module")
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"{name} is a packed layer, in the model it is a {type(linear).__name__}")
        packed = without_content(name, about, self._shapes, linear.weight.dtype)
        if packed.shape != linear.weight.shape:
            shapes = f"{list(packed.shape)}, the model {list(linear.weight.shape)}"
            raise ValueError(f"{name}: the checkpoint has shape {shapes}")
        self._missing[name] = set(packed.tensor_names)
        layer = _Arriving.from_packed(packed, linear.bias).train(linear.training)
        model.set_submodule(name, with_hooks(layer, linear))

    def check_if_quantized_param(
        self, model: Any, param_value: Tensor, param_name: str, *args: Any, **kwargs: Any
    ) -> bool:
        name, _, key = param_name.rpartition(".")
        return key in self._missing[name] if name in self._missing else key == "weight" and name in self._found

    def create_quantized_param(  # type: ignore[override]
        self, model: Any, param_value: Tensor, param_name: str, target_device: Any, *args: Any, **kwargs: Any
    ) -> None:
        name, _, key = param_name.rpartition(".")
        if name in self._missing:
            module = model.get_submodule(name)
            module._buffers[key] = param_value.to(target_device)
            self._missing[name].remove(key)
            if not self._missing[name]:
                del self._missing[name]
                self._arrived(model, name, module, torch.device(target_device), kwargs.get("dtype"))
            return
        layer, config = self._found.pop(name), self.quantization_config
        module, weight = layer.module, param_value.to(target_device)
        row, sparse = convert_weight(name, weight, config.options, config.min_sparsity)
        self.report.layers.append(row)
        if sparse is None:
            module.weight = nn.Parameter(weight, requires_grad=False)
            return
        sparse.bias = module.bias  # may still be to come
        sparse.__class__ = _Read
        for parent, attribute in layer.places:
            setattr(parent, attribute, with_hooks(sparse.train(module.training), module))

    def _arrived(self, model: Any, name: str, module: Any, device: torch.device, dtype: torch.dtype | None) -> None:
        """Puts the layer as the device holds it in the place of one whose tensors are all there."""
        with named(name, TypeError, ValueError):
            packed = module.packed
            packed.validate()
            weight = (
                held_on(packed, device, dtype, packs=OFFLOADS.get())
                if packed.stands_for_dense()
                else packed.to(device, dtype)
            )
        layer: nn.Linear
        if isinstance(weight, Tensor):
            layer = nn.Linear(module.in_features, module.out_features, bias=False, device="meta", dtype=weight.dtype)
            layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), module.bias
        else:
            layer = SparseLinear.from_packed(weight, module.bias, options=AUTO)
            if not packed.stands_for_dense():
                layer.reformat_()
            layer.__class__ = _Read
        model.set_submodule(name, with_hooks(layer.train(module.training), module))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for module in model.modules():
            if type(module) is _Read:
                module.__class__ = SparseLinear  # type: ignore[assignment]
        lost = [f"{name}.{min(keys)}" for name, keys in self._missing.items()] + [
            f"{name}.weight" for name in self._found
        ]
        if lost:
            raise ValueError(f"the files have no {lost[0]}: the layer would be random")
        if self.pre_quantized:
            model.is_quantized = any(isinstance(module, SparseLinear) for module in model.modules())
            return model
        self.report.layers += unpackable(model)
        warn_if_unchanged(self.report, "from_pretrained with a MackoConfig")
        return model

    def _dequantize(self, model: Any) -> Any:
        return unpacked(model)


auto.AUTO_QUANTIZER_MAPPING["macko"] = MackoDiffusersQuantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING["macko"] = MackoConfig
