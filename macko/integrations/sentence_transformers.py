"""sentence-transformers: modules with weights of their own, as Dense, come back with the layers that were packed."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from sentence_transformers.base.modules.module import Module

from ..files import Checkpoint, make_room


def _wrap(load: Any) -> Any:
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_torch_weights(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(cls, *args, **kwargs).arguments
        if (model := given.get("model")) is not None:
            where = {name: value for name, value in given.items() if name not in ("cls", "model", "model_name_or_path")}
            path = cls.load_file_path(given["model_name_or_path"], filename="model.safetensors", **where)
            if path is not None:
                with Checkpoint(path, by_names=True) as file:
                    make_room(model, file)
        return load(cls, *args, **kwargs)

    load_torch_weights._by_macko = True  # type: ignore[attr-defined]
    return load_torch_weights


if not hasattr(Module.load_torch_weights, "_by_macko"):
    wrapped: Any = classmethod(_wrap(vars(Module)["load_torch_weights"].__func__))
    Module.load_torch_weights = wrapped  # type: ignore[method-assign]
