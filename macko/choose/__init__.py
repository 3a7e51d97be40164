"""Which format and which layout a weight is packed in, by measured times."""

from .auto import Options, choose, layouts, pack

__all__ = ["Options", "choose", "layouts", "pack"]
