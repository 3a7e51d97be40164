"""diffusers: what its models do with weights is right for packed layers, or refused before anything has changed.

Without this layerwise casting would round the layers before the first packed one, and fuse_qkv_projections put dense
layers beside packed ones.
"""

from __future__ import annotations

from typing import Any

from diffusers.hooks import layerwise_casting
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from ..nn.linear import SparseLinear
from . import wrap


def _packed_layer(model: nn.Module) -> str | None:
    """The name of a packed layer in the model, or None; "" where it is one itself."""
    return next((name for name, module in model.named_modules() if isinstance(module, SparseLinear)), None)


def _not_cast(apply: Any) -> Any:
    def apply_layerwise_casting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("_prefix") and (name := _packed_layer(module)) is not None:
            raise ValueError(
                f"enable_layerwise_casting: {name or 'the layer'} is packed by macko, and its bytes are no numbers to "
                "cast; nothing has been cast. Cast a model that is not packed, or leave it packed as it is"
            )
        return apply(module, *args, **kwargs)

    return apply_layerwise_casting


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


def _guard(model_class: type) -> None:
    """Methods that models define each by itself, or have of a mixin."""
    for name, around in (("fuse_qkv_projections", _not_fused), ("fuse_lora", _where_sums_are_held)):
        if hasattr(model_class, name):
            wrap(model_class, name, around)


def _guard_new(cls: type, **kwargs: Any) -> None:
    super(ModelMixin, cls).__init_subclass__(**kwargs)
    _guard(cls)


wrap(layerwise_casting, "_apply_layerwise_casting", _not_cast)
for known in ModelMixin.__subclasses__():
    _guard(known)
ModelMixin.__init_subclass__ = classmethod(_guard_new)  # type: ignore[assignment, method-assign]
