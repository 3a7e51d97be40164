"""What other libraries are told of macko, when and only when they are used."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

#: Importing the key is what makes the value's registrations possible, and due; what does not work without them.
_DUE = {
    "transformers.quantizers.auto": ("macko.integrations.transformers", "MackoConfig, and loading packed folders"),
    "transformers.modeling_utils": ("macko.integrations.saving", "save_pretrained of models with sparse layers"),
    "accelerate.utils.modeling": ("macko.integrations.accelerate", "a device_map for a model with sparse layers"),
    "accelerate.big_modeling": ("macko.integrations.offload", "saying which offload a packed model is not ready for"),
    "diffusers.hooks.group_offloading": (
        "macko.integrations.diffusers_models",
        "saying which offload or cast a packed model is not ready for",
    ),
    "diffusers.quantizers.auto": ("macko.integrations.diffusers", "MackoConfig in diffusers"),
    "diffusers.models.modeling_utils": (
        "macko.integrations.diffusers_models",
        "save_pretrained of packed models, and saying where adapters and projections cannot be fused",
    ),
    "diffusers.loaders.lora_pipeline": ("macko.integrations.diffusers_models", "loading adapters of FLUX"),
    "diffusers.loaders.peft": ("macko.integrations.diffusers_models", "loading adapters without unpacking layers"),
    "peft.utils.other": ("macko.integrations.peft", "training sparse layers that modules_to_save names"),
    "peft.tuners.tuners_utils": ("macko.integrations.peft", "loading adapters without unpacking layers"),
    **dict.fromkeys(
        ("sentence_transformers.base.modules.module", "sentence_transformers.models.Module"),  # before 5.4
        ("macko.integrations.sentence_transformers", "loading packed modules of its own, as Dense"),
    ),
}


class _Watch(importlib.abc.MetaPathFinder):
    """Sees to it that macko is registered as soon as somebody imports a module of _DUE; imports nothing itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in _DUE else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                _register(name)

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def _register(name: str) -> None:
    """Registers what is due; where the library is not as macko knows it, says so and lets it be imported."""
    library = name.partition(".")[0]
    integration, lost = _DUE[name]
    try:
        if library in ("accelerate", "diffusers") or _is_supported(
            getattr(sys.modules.get("transformers"), "__version__", "0")
        ):
            module = importlib.import_module(integration)
            getattr(module, "register", int)()  # of one that is due by several names
    except Exception as error:
        version = getattr(sys.modules[library], "__version__", "(unknown version)")
        reason = f"macko does not work with {library} {version}, which has not what it needs ({error})"
        warnings.warn(f"{reason}. What will not work: {lost}", stacklevel=2)
        if name == "transformers.modeling_utils":
            _refuse_to_save(sys.modules[name], reason)


def _refuse_to_save(module: Any, reason: str) -> None:
    """An error in the place of a save_pretrained that would join or rename packed tensors as if they were dense."""

    def around(save: Any) -> Any:
        def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
            from ..linear import SparseLinear

            adapters_alone = getattr(self, "_hf_peft_config_loaded", False)
            if not adapters_alone and any(isinstance(layer, SparseLinear) for layer in self.modules()):
                raise ValueError(f"save_pretrained: the model has sparse layers, and {reason}: use macko.save_model")
            return save(self, *args, **kwargs)

        return save_pretrained

    if hasattr(module, "PreTrainedModel"):
        wrap(module.PreTrainedModel, "save_pretrained", around)


def wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Puts around(function) in the place of a library's function, method or class method; once, if asked again."""
    found = inspect.getattr_static(owner, name)
    function = getattr(found, "__func__", found)
    if not hasattr(function, "_by_macko"):
        wrapped: Any = functools.wraps(function)(around(function))
        wrapped._by_macko = True
        setattr(owner, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)


def _is_supported(version: str) -> bool:
    """Whether it is a transformers that the integration was written for."""
    return int(version.partition(".")[0]) >= 5


def transformers_version() -> tuple[int, ...]:
    """(5, 24) of transformers 5.24.0, for what its versions do in different ways under the same names."""
    return tuple(map(int, sys.modules["transformers"].__version__.split(".")[:2]))


def require_transformers() -> Any:
    """transformers; ImportError, which names the version, where that is not one that macko works with."""
    try:
        import transformers
    except ImportError:
        raise ImportError("this needs transformers 5: pip install 'transformers>=5'") from None
    if not _is_supported(transformers.__version__):
        found = f"found {transformers.__version__}: pip install 'transformers>=5'"
        raise ImportError(f"macko needs transformers 5 or newer, {found}")
    return transformers


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
