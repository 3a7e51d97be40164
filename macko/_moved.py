"""The modules of before the subpackages, importable by their old names until 0.3."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

MOVED = {
    "formats": "weights",
    "codes": "weights.codes",
    "shards": "weights.shards",
    "times": "choose.times",
    "layers": "nn.layers",
    "linear": "nn.linear",
    "merge": "nn.merge",
    "convert": "nn.convert",
    "allocate": "pruning.allocate",
    "calibrate": "pruning.calibrate",
    "grids": "pruning.grids",
    "prune": "pruning.prune",
    "reconstruct": "pruning.reconstruct",
    "bench": "measure.bench",
    "engines": "measure.engines",
    "tune": "measure.tune",
    "evaluate": "measure.evaluate",
    "doctor": "measure.doctor",
    "rivals": "measure.rivals",
    "reference": "measure.reference",
    "timing": "measure.timing",
}


class _Moved(ModuleType):
    """A module under its old name: imports the new one when it is asked for something, and says so once a place."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        old = self.__name__.rpartition(".")[2]
        found = getattr(import_module(f"macko.{MOVED[old]}"), name)
        text = f"{self.__name__} is macko.{MOVED[old]} now; the old name goes in macko 0.3"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return found


def register() -> None:
    for old in MOVED:
        module = sys.modules.setdefault(f"macko.{old}", _Moved(f"macko.{old}"))
        setattr(sys.modules["macko"], old, module)
