"""macko: pruned neural networks, smaller and faster, on CPU and CUDA."""

from . import ops
from .convert import sparsify_
from .formats import FORMATS, MackoWeight
from .layers import LayerReport, Report
from .linear import SparseLinear
from .prune import prune_

__version__ = "0.1.0"

__all__ = ["FORMATS", "LayerReport", "MackoWeight", "Report", "SparseLinear", "ops", "prune_", "sparsify_"]
