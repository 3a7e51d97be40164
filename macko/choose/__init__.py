"""Which format and which layout a weight is packed in, by measured times."""

from .auto import choose, layouts, pack
from .options import Options

__all__ = ["Options", "choose", "layouts", "pack"]
