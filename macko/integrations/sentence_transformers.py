"""sentence-transformers: modules with weights of their own, as Dense, come back with the layers that were packed."""

from __future__ import annotations

import inspect
from typing import Any

from ..files import Checkpoint, put_sparse_layers
from . import wrap

try:
    from sentence_transformers.base.modules.module import Module
except ImportError:  # before 5.4
    from sentence_transformers.models.Module import Module  # type: ignore[no-redef]


def _into_sparse_layers(load: Any) -> Any:
    signature = inspect.signature(load)

    def load_torch_weights(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(cls, *args, **kwargs).arguments
        if (model := given.get("model")) is not None:
            where = {name: value for name, value in given.items() if name not in ("cls", "model", "model_name_or_path")}
            path = cls.load_file_path(given["model_name_or_path"], filename="model.safetensors", **where)
            if path is not None:
                with Checkpoint(path, by_names=True) as file:
                    put_sparse_layers(model, file)
        return load(cls, *args, **kwargs)

    return load_torch_weights


wrap(Module, "load_torch_weights", _into_sparse_layers)
