"""What other libraries are told of macko, when and only when they are used."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

#: Importing the key is what makes the value's registrations possible, and due.
_DUE = {"transformers.quantizers.auto": "macko.integrations.transformers"}


class _Registering(importlib.abc.Loader):
    """A module's own loader, and our registration behind it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _register(module.__name__)


class _Watch(importlib.abc.MetaPathFinder):
    """Sees to it that macko is registered as soon as somebody imports a module of _DUE; imports nothing itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _DUE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


def _register(name: str) -> None:
    if _is_supported(name.partition(".")[0]):
        importlib.import_module(_DUE[name])


def _is_supported(package: str) -> bool:
    """Whether the library is one that the integration was written for: transformers 5."""
    version = getattr(sys.modules.get(package), "__version__", "0")
    return int(version.partition(".")[0]) >= 5


def register() -> None:
    """Registers with the libraries that are imported already, and with the others when they are."""
    for name in _DUE:
        if name in sys.modules:
            _register(name)
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
