"""diffusers: what its models do with weights is right for packed layers, or refused before anything has changed.

fuse_qkv_projections would put dense layers beside packed ones.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.modeling_utils import ModelMixin

from ..files import quant_method
from ..nn.linear import SparseLinear
from ..nn.offload import as_in_files
from . import wrap
from .diffusers_hooks import packed_layer


def _not_fused(fuse: Any) -> Any:
    def fuse_qkv_projections(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (name := packed_layer(self)) is not None:
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


def _as_in_files(save: Any) -> Any:
    """The files of a model that is not packed, whoever packed it: they say nothing of how it was read."""

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        quantizer, config = vars(self).get("hf_quantizer"), self._internal_dict
        own = quantizer is not None and quant_method(quantizer.quantization_config) == "macko"
        if own:
            del self.hf_quantizer
            noted = ("quantization_config", "_pre_quantization_dtype")
            self._internal_dict = type(config)({key: value for key, value in config.items() if key not in noted})
        try:
            with as_in_files():
                return save(self, *args, **kwargs)
        finally:
            if own:
                self.hf_quantizer, self._internal_dict = quantizer, config

    return save_pretrained


def _guard(model_class: type) -> None:
    """Methods that models define each by itself, or have of a mixin."""
    for name, around in (("fuse_qkv_projections", _not_fused), ("fuse_lora", _where_sums_are_held)):
        if hasattr(model_class, name):
            wrap(model_class, name, around)


def _guard_new(cls: type, **kwargs: Any) -> None:
    super(ModelMixin, cls).__init_subclass__(**kwargs)
    _guard(cls)


wrap(ModelMixin, "save_pretrained", _as_in_files)
for known in ModelMixin.__subclasses__():
    _guard(known)
ModelMixin.__init_subclass__ = classmethod(_guard_new)  # type: ignore[assignment, method-assign]
