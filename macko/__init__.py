"""macko: pruned neural networks, smaller and faster, on CPU and CUDA."""

from . import ops

__all__ = ["ops"]
