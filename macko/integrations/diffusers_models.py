"""diffusers: what its models and hooks do with weights is right for packed layers, or refused before anything changes.

fuse_qkv_projections would put dense layers beside packed ones; a group of offloading with a stream, or on disk, would
leave packed bytes on the GPU; casting would round the layers before the first packed one, and stop there.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from diffusers.hooks import group_offloading, layerwise_casting
from torch import nn

from ..files import quant_method, version_of
from ..nn.linear import SparseLinear
from ..nn.merge import MergedLinear
from ..nn.offload import as_in_files, check_offloadable
from ..weights.saved import states_without_content, within
from . import wrap


def _packed_layer(model: nn.Module) -> str | None:
    """The name of a packed layer in the model, or None; "" where it is one itself."""
    return next((name for name, module in model.named_modules() if isinstance(module, SparseLinear)), None)


# ---- Hooks -----------------------------------------------------------------------------------------------------------


def _not_cast(apply: Any) -> Any:
    def apply_layerwise_casting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("_prefix") and (name := _packed_layer(module)) is not None:
            raise ValueError(
                f"enable_layerwise_casting: {name or 'the layer'} is packed by macko, and its bytes are no numbers to "
                "cast; nothing has been cast. Cast a model that is not packed, or leave it packed as it is"
            )
        return apply(module, *args, **kwargs)

    return apply_layerwise_casting


def _where_bytes_move(apply: Any) -> Any:
    def apply_group_offloading(module: nn.Module, config: Any) -> Any:
        merged = any(isinstance(layer, MergedLinear) for layer in module.modules())
        if merged or config.stream is not None or config.offload_to_disk_path is not None:
            check_offloadable(module, "group offloading")
        return apply(module, config)

    return apply_group_offloading


# ---- Models ----------------------------------------------------------------------------------------------------------


def _not_fused(fuse: Any) -> Any:
    def fuse_qkv_projections(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (name := _packed_layer(self)) is not None:
            raise ValueError(
                f"fuse_qkv_projections: {name} is packed by macko, and would get a dense layer beside it: fuse the "
                "projections first, then pack the model"
            )
        return fuse(self, *args, **kwargs)

    return fuse_qkv_projections


def _where_sums_are_held(fuse: Any) -> Any:
    def fuse_lora(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, module in self.named_modules():
            base = getattr(module, "base_layer", None)
            if isinstance(base, SparseLinear) and not base._holds_sums:
                raise ValueError(
                    f"fuse_lora: {name} is packed as {base.format}, which does not hold its sum with an adapter: leave "
                    "the adapter unfused, or fuse it before the model is packed"
                )
        return fuse(self, *args, **kwargs)

    return fuse_lora


def _with_packed(save: Any) -> Any:
    """Saves packed layers packed, and says them in config.json; nothing of how the model was read."""
    signature = inspect.signature(save)

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given, config = signature.bind(self, *args, **kwargs).arguments, self._internal_dict
        quantizer = vars(self).get("hf_quantizer")
        by_macko = quantizer is not None and quant_method(quantizer.quantization_config) == "macko"
        if quantizer is not None and not by_macko:
            return save(self, *args, **kwargs)
        noted = ("quantization_config", "_pre_quantization_dtype")
        about = {key: value for key, value in config.items() if key not in noted}
        if given.get("safe_serialization", True) and _packed_layer(self) is not None:
            from .saving import packed_with_empty
            from .transformers import MackoConfig

            state, layers = packed_with_empty(self, None)
            if layers:
                quantization = MackoConfig(version=version_of(layers), layers=layers)
                about["quantization_config"] = quantization.to_dict()
                self.state_dict = lambda *args, **kwargs: state
        if by_macko:
            del self.hf_quantizer
        self._internal_dict = type(config)(about)
        try:
            with as_in_files():
                return save(self, *args, **kwargs)
        finally:
            vars(self).pop("state_dict", None)
            self._internal_dict = config
            if by_macko:
                self.hf_quantizer = quantizer

    return save_pretrained


def _whoever_packed_it(dequantize: Any) -> Any:
    def dequantize_(self: Any) -> Any:
        if vars(self).get("hf_quantizer") is not None or _packed_layer(self) is None:
            return dequantize(self)
        from .transformers import unpacked

        return unpacked(self)

    return dequantize_


def _by_shapes(expand: Any) -> Any:
    """FLUX compares adapters with the weights of a state_dict, which packed layers have not, or unpack for it."""

    def _maybe_expand_lora_state_dict(cls: Any, transformer: Any, lora_state_dict: Any) -> Any:
        shapes = dict(transformer.named_parameters())
        for name, module in transformer.named_modules():
            if isinstance(module, SparseLinear):  # a tensor of one element
                shapes[f"{name}.weight"] = torch.zeros(()).expand(module.out_features, module.in_features)
        before = vars(transformer).get("state_dict")
        transformer.state_dict = lambda: shapes
        try:
            return expand(cls, transformer, lora_state_dict)
        finally:
            del transformer.state_dict
            if before is not None:
                transformer.state_dict = before

    return _maybe_expand_lora_state_dict


def _placed(load: Any) -> Any:
    """With MackoConfig(offload=True): reads the model on the CPU, then puts its parts where a device_map says."""

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(kwargs.get("quantization_config"), "offload", False):
            return load(cls, *args, **kwargs)
        from .placing import AUTOMATIC, PLACING, dispatch
        from .transformers import OFFLOADS

        placing = {name: kwargs.pop(name, None) for name in PLACING}
        with within(OFFLOADS):
            found = load(cls, *args, **kwargs)
        model, places = found[0] if isinstance(found, tuple) else found, placing["device_map"]
        kept = model._get_no_split_modules(places) if places in AUTOMATIC else ()
        dispatch(model, kept, getattr(model, "_skip_keys", None), **placing)
        return found

    return from_pretrained


def _guard(model_class: type) -> None:
    """Methods that models define each by itself, or have of a mixin."""
    for name, around in (("fuse_qkv_projections", _not_fused), ("fuse_lora", _where_sums_are_held)):
        if hasattr(model_class, name):
            wrap(model_class, name, around)


def register() -> None:
    """Guards what is there: hooks are imported before models, and at times without."""
    wrap(layerwise_casting, "_apply_layerwise_casting", _not_cast)
    wrap(group_offloading, "_apply_group_offloading", _where_bytes_move)
    if (adapters := sys.modules.get("diffusers.loaders.peft")) is not None:
        wrap(adapters.PeftAdapterMixin, "load_lora_adapter", states_without_content())
    if (loaders := sys.modules.get("diffusers.loaders.lora_pipeline")) is not None:
        wrap(loaders.FluxLoraLoaderMixin, "_maybe_expand_lora_state_dict", _by_shapes)
    base: Any = getattr(sys.modules.get("diffusers.models.modeling_utils"), "ModelMixin", None)
    if base is None or "__init_subclass__" in vars(base):
        return

    def guard_new(cls: type, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _guard(cls)

    wrap(base, "save_pretrained", _with_packed)
    wrap(base, "from_pretrained", _placed)
    wrap(base, "dequantize", _whoever_packed_it)
    for subclass in base.__subclasses__():
        _guard(subclass)
    base.__init_subclass__ = classmethod(guard_new)
