"""Reads the sparse checkpoints of compressed-tensors, which no release of 2026 loads any more.

Formats `sparse-bitmask` and `sparse-24-bitmask`: of a weight NAME.weight the file has
    NAME.shape       int64, rows and cols
    NAME.bitmask     uint8 [rows, ceil(cols / 8)], bit c % 8 of byte c / 8 for column c
    NAME.compressed  the values under set bits, row after row; [rows, cols / 2] for 2:4, where a value may be zero
    NAME.row_offsets int64 [rows], where each row begins in it (not for 2:4; not needed)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..files import Checkpoint

FORMATS = ("sparse-bitmask", "sparse-24-bitmask")
_KEYS = ("shape", "bitmask", "compressed", "row_offsets")


def sparsity_format(config: Mapping[str, Any]) -> str | None:
    """The format of a checkpoint's config.json, None where it is none of compressed-tensors' sparse ones.

    Raises:
        ValueError: the weights are quantised besides, or their format is not one of FORMATS.
    """
    for about in (config.get("quantization_config"), config.get("compression_config"), config):
        sparsity = (about or {}).get("sparsity_config") or {}
        if (name := sparsity.get("format")) in (None, "dense"):
            continue
        if name not in FORMATS:
            raise ValueError(f"sparsity_config has format {name!r}, macko reads {' and '.join(FORMATS)}")
        if groups := (about or {}).get("config_groups"):
            raise ValueError(
                f"the weights are quantised too ({', '.join(groups)}), macko holds 16- and 32-bit floats only"
            )
        return str(name)
    return None


class _Lazy:
    """A tensor that is made when transformers takes it: weight[...]."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self.read = read

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]


def lazy_state(file: Checkpoint) -> dict[str, _Lazy]:
    """The state_dict that the checkpoint stands for, one weight at a time."""
    packed = [name.removesuffix(".bitmask") for name in file if name.endswith(".bitmask")]
    theirs = {f"{name}.{key}" for name in packed for key in _KEYS}
    state = {name: _Lazy(partial(file.__getitem__, name)) for name in file if name not in theirs}
    return state | {f"{name}.weight": _Lazy(partial(_decoded, file, name)) for name in packed}


def _decoded(file: Checkpoint, name: str) -> Tensor:
    try:
        return decode(*(file[f"{name}.{key}"] for key in _KEYS[:3]))
    except (KeyError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def decode(shape: Tensor, bitmask: Tensor, compressed: Tensor) -> Tensor:
    """The dense weight; ValueError where the three do not fit each other."""
    if shape.numel() != 2 or shape.is_floating_point():
        raise ValueError(f"shape is {shape.tolist()}, expected two whole numbers")
    rows, cols = shape.flatten().tolist()
    if bitmask.dtype != torch.uint8 or list(bitmask.shape) != [rows, -(-cols // 8)]:
        raise ValueError(f"bitmask is {bitmask.dtype} {list(bitmask.shape)}, expected uint8 {[rows, -(-cols // 8)]}")
    if not compressed.is_floating_point() or compressed.element_size() < 2:
        raise ValueError(f"compressed is {compressed.dtype}, macko holds 16- and 32-bit floats only")
    bits = (bitmask[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten(1)
    count = int(bits.sum())
    if bits[:, cols:].any():
        raise ValueError(f"bitmask has bits past column {cols}")
    if count != compressed.numel():
        raise ValueError(f"bitmask has {count} bits set, compressed has {compressed.numel()} values")
    dense = torch.zeros(rows, cols, dtype=compressed.dtype)
    dense[bits[:, :cols]] = compressed.flatten()
    return dense
