"""diffusers: `quantization_config=macko.MackoConfig(...)` packs a model's layers as they are read.

diffusers has no decorator to register a quantizer: its two tables get an entry each. MackoConfig is that of
transformers, so one PipelineQuantizationConfig serves transformer and text encoders.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from torch import Tensor, nn

from ..nn.convert import convert_weight, warn_if_unchanged
from ..nn.find import FoundLinear, find_linears, unpackable
from ..nn.linear import SparseLinear, with_hooks
from ..nn.report import LayerReport, Report
from .transformers import MackoConfig


class _Read(SparseLinear):
    """A packed layer while the rest of its model is read: diffusers looks at the model's state_dict for each file."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        shape = (self.out_features, self.in_features)
        destination[f"{prefix}weight"] = torch.empty(shape, dtype=self.dtype, device="meta")
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.detach()


class MackoDiffusersQuantizer(DiffusersQuantizer):
    """Packs each linear layer when its weight is read.

    Attributes:
        report: what became of each linear layer.
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
        if quantization_config.layers:
            raise ValueError(
                "from_pretrained: the folder's layers are packed, which diffusers does not read: load it with "
                "macko.load_model into a model of its config"
            )

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ValueError(
                "device_map puts layers on the CPU or disk to fetch them when they are needed, while they are still "
                "being packed: load the model without, then macko.offloadable_(model) and an offloader"
            )

    def _process_model_before_weight_loading(self, model: Any, keep_in_fp32_modules: Any = (), **kwargs: Any) -> None:
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

    def check_if_quantized_param(
        self, model: Any, param_value: Tensor, param_name: str, *args: Any, **kwargs: Any
    ) -> bool:
        name, _, key = param_name.rpartition(".")
        return key == "weight" and name in self._found

    def create_quantized_param(  # type: ignore[override]
        self, model: Any, param_value: Tensor, param_name: str, target_device: Any, *args: Any, **kwargs: Any
    ) -> None:
        name = param_name.rpartition(".")[0]
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

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for module in model.modules():
            if type(module) is _Read:
                module.__class__ = SparseLinear  # type: ignore[assignment]
        if self._found:
            raise ValueError(f"the files have no {next(iter(self._found))}.weight: the layer would be random")
        self.report.layers += unpackable(model)
        warn_if_unchanged(self.report, "from_pretrained with a MackoConfig")
        return model

    def _dequantize(self, model: Any) -> Any:
        for name, module in list(model.named_modules()):
            if isinstance(module, SparseLinear):
                model.set_submodule(name, with_hooks(module.to_linear(), module))
        return model


auto.AUTO_QUANTIZER_MAPPING["macko"] = MackoDiffusersQuantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING["macko"] = MackoConfig
