"""diffusers' hooks: group offloading and layerwise casting are right for packed layers, or refused before they begin.

A group with a stream, or on disk, would leave packed bytes on the GPU; casting would round the layers before the first
packed one, and stop there.
"""

from __future__ import annotations

from typing import Any

from diffusers.hooks import group_offloading, layerwise_casting
from torch import nn

from ..nn.linear import SparseLinear
from ..nn.merge import MergedLinear
from ..nn.offload import check_offloadable
from . import wrap


def packed_layer(model: nn.Module) -> str | None:
    """The name of a packed layer in the model, or None; "" where it is one itself."""
    return next((name for name, module in model.named_modules() if isinstance(module, SparseLinear)), None)


def _not_cast(apply: Any) -> Any:
    def apply_layerwise_casting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("_prefix") and (name := packed_layer(module)) is not None:
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


wrap(layerwise_casting, "_apply_layerwise_casting", _not_cast)
wrap(group_offloading, "_apply_group_offloading", _where_bytes_move)
