"""The modules of before the subpackages, importable by their old names until 0.3."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

#: Where names of each are now: in the first of these modules that has them.
MOVED = {
    "formats": "weights",
    "codes": "weights.codes",
    "shards": "weights.shards",
    "times": "choose.times",
    "layers": "nn.find nn.report choose.patterns choose.times",
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
        for new in MOVED[old].split():
            if hasattr(module := import_module(f"macko.{new}"), name):
                text = f"{self.__name__} is macko.{new} now; the old name goes in macko 0.3"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def register() -> None:
    for old in MOVED:
        module = sys.modules.setdefault(f"macko.{old}", _Moved(f"macko.{old}"))
        setattr(sys.modules["macko"], old, module)
