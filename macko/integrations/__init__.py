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
_DUE = {
    "transformers.quantizers.auto": "macko.integrations.transformers",
    "transformers.modeling_utils": "macko.integrations.saving",
}


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
    if _is_supported(_version()):
        importlib.import_module(_DUE[name])


def require_transformers() -> None:
    """ImportError, which names the version, where the installed transformers is not one that macko works with."""
    import transformers  # noqa: F401  an ImportError of its own where there is none

    if not _is_supported(version := _version()):
        raise ImportError(f"macko needs transformers 5 or newer, found {version}: pip install 'transformers>=5'")


def _version() -> str:
    return str(getattr(sys.modules.get("transformers"), "__version__", "0"))


def _is_supported(version: str) -> bool:
    """Whether it is a transformers that the integration was written for."""
    return int(version.partition(".")[0]) >= 5


def register_vllm() -> None:
    """What vLLM's plugin calls, in each of its processes: registers the quantization method "macko".

    Where the installed vLLM has another interface than macko knows it says so and leaves vLLM as it is.
    """
    from vllm.logger import init_logger

    try:
        importlib.import_module(f"{__name__}.vllm")
    except (AttributeError, ImportError) as error:
        from vllm import __version__

        init_logger("vllm.macko").warning(
            "macko was written for vLLM 0.25 to 0.33, this is %s, and has not what it needs (%s): "
            'the quantization method "macko" is not registered',
            __version__,
            error,
        )


def register() -> None:
    """Registers with the libraries that are imported already, and with the others when they are."""
    for name in _DUE:
        if name in sys.modules:
            _register(name)
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
