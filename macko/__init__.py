"""macko: pruned neural networks, smaller and faster, on CPU and CUDA."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _moved, integrations, ops
from .files import load_model, save_model
from .measure.tune import autotune
from .nn.convert import compress_, sparsify_
from .nn.linear import SparseLinear
from .nn.merge import merge_, split_
from .nn.offload import offloadable_
from .nn.report import LayerReport, Report
from .pruning.prune import prune_
from .weights import FORMATS, EcWeight, MackoWeight

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import fuse as fuse
    from .integrations.transformers import MackoConfig as MackoConfig

__all__ = [
    "FORMATS",
    "EcWeight",
    "LayerReport",
    "MackoWeight",
    "Report",
    "SparseLinear",
    "autotune",
    "compress_",
    "load_model",
    "merge_",
    "offloadable_",
    "ops",
    "prune_",
    "save_model",
    "sparsify_",
    "split_",
]

integrations.register()
_moved.register()


def _fuse_by_default() -> None:
    from .fuse import use_by_default

    use_by_default()


ops.TRACED.append(_fuse_by_default)


def __getattr__(name: str) -> Any:
    if name == "MackoConfig":  # not in __all__ either: it needs transformers, which takes seconds to import
        integrations.require_transformers()
        from .integrations.transformers import MackoConfig

        return MackoConfig
    if name == "fuse":  # imports Inductor, which takes a second
        return import_module(".fuse", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
