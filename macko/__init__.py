"""macko: pruned neural networks, smaller and faster, on CPU and CUDA."""

from typing import TYPE_CHECKING, Any

from . import integrations, ops
from .convert import sparsify_
from .files import load_model, save_model
from .formats import FORMATS, MackoWeight
from .layers import LayerReport, Report
from .linear import SparseLinear
from .prune import prune_

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .integrations.transformers import MackoConfig as MackoConfig

__all__ = [
    "FORMATS",
    "LayerReport",
    "MackoWeight",
    "Report",
    "SparseLinear",
    "load_model",
    "ops",
    "prune_",
    "save_model",
    "sparsify_",
]

integrations.register()


def __getattr__(name: str) -> Any:
    if name == "MackoConfig":  # not in __all__ either: it needs transformers, which takes seconds to import
        from .integrations.transformers import MackoConfig

        return MackoConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
