"""accelerate: load_checkpoint_in_model and load_checkpoint_and_dispatch with a device_map, into sparse models.

With one, accelerate sets tensor by tensor what a module has under the same name and in the same size, which packed
tensors have not: the checkpoint is read by macko.load_model then, and its parts are moved where they shall be.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import modeling

from ..files import load_model
from ..nn.linear import SparseLinear
from . import wrap


def _by_load_model(load: Any) -> Any:
    signature = inspect.signature(load)

    def load_checkpoint_in_model(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        model, checkpoint, places = given["model"], given["checkpoint"], given.get("device_map")
        sparse = [module for module in model.modules() if isinstance(module, SparseLinear)]
        on_meta = any(module.device.type == "meta" for module in sparse)
        if not sparse or (places is None and not on_meta) or not _is_safetensors(checkpoint):
            return load(*args, **kwargs)
        if "disk" in (places or {}).values():
            raise ValueError("load_checkpoint_in_model: the model has sparse layers, which are not offloaded to disk")
        load_model(model, checkpoint)
        for name, place in (places or {}).items():
            part = model.get_submodule(name)
            part.to(torch.device(place), given.get("dtype"))
        return None

    return load_checkpoint_in_model


def _is_safetensors(checkpoint: str | os.PathLike[str]) -> bool:
    path = Path(checkpoint)
    return any(path.glob("*.safetensors")) if path.is_dir() else ".safetensors" in path.name


wrap(modeling, "load_checkpoint_in_model", _by_load_model)
