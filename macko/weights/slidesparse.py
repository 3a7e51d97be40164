"""SlideSparse's checkpoints: weights that were slid to 2:4 come back to the model's columns, each with its bits.

Of a folder's slidesparse_config.json Z zeros in L columns, which are N = L / 2 pairs: a group of L columns is slid to
4 (N - 1), window w of it the columns from 2 w on:

    columns      0 1 2 3 4 5 6 7         L = 8
    window 0     0 1 2 3
    window 1         2 3 4 5
    window 2             4 5 6 7

A value stands in one of the windows over its column. The last group is filled up with zeros, and so are the slid
columns, to 16 or 32. How many columns a weight had is in no file: by its name it is in config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NOTE = "slidesparse_config.json"
#: What of the model a layer's columns are, by the last part of its name.
_COLUMNS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"), "hidden_size"),
    "o_proj": "heads",
    "down_proj": "intermediate_size",
}
#: Their script slides whatever has one of these in its name.
_SLID = (*_COLUMNS, "wqkv", "w13", "w2", "wo")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Slid:
    """What a folder's note and config.json say of its slid weights; `is_slid` is false where that step was skipped.

    Raises:
        ValueError: what the note says is not held here; names it.
    """

    def __init__(self, note: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        zeros, length, extra = note.get("Z"), note.get("L"), note.get("extra") or {}
        if zeros != 2 or not isinstance(length, int) or length < 4 or length % 2:
            raise ValueError(f"{NOTE}: Z:L is {zeros!r}:{length!r}, expected 2 and an even number from 4 on")
        if not isinstance(extra, Mapping):
            raise ValueError(f"{NOTE}: extra is {extra!r}, expected a JSON object")
        self.length, self.is_slid, self._config = length, not extra.get("skip_slide"), config

    def shape(self, name: str, found: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor as the model has it, by the one in the file; ValueError where it is not slid so."""
        low = name.lower()
        is_weight = "weight" in low and "scale" not in low and "zero" not in low
        if not self.is_slid or not is_weight or not any(part in low for part in _SLID):
            return found
        layer, _, last = name.rpartition(".")
        part = layer.rpartition(".")[2]
        if part not in _COLUMNS or last != "weight":
            raise ValueError(f"{NOTE}: {name} may be slid, and config.json does not say from how many columns")
        cols = self._columns(_COLUMNS[part], name)
        slid = -(-cols // self.length) * (2 * self.length - 4)
        if len(found) != 2 or found[1] not in (-(-slid // 16) * 16, -(-slid // 32) * 32):
            raise ValueError(
                f"{name} has shape {list(found)}: {cols} columns slid by L = {self.length} are {slid}, filled up to "
                "16 or 32 (what was compressed for cuSPARSELt too is not read: slide without that step)"
            )
        return found[0], cols

    def undo(self, name: str, weight: Tensor) -> Tensor:
        """The weight as it was; ValueError where no weight slides to it."""
        rows, *others = shape = self.shape(name, tuple(weight.shape))
        if shape == weight.shape:
            return weight
        (cols,), wide = others, 2 * self.length - 4
        groups = -(-cols // self.length)
        bits = weight.contiguous().view(_BITS[weight.element_size()])
        windows = bits[:, : groups * wide].reshape(rows, groups, wide // 4, 4)
        dense, taken = (torch.zeros(rows, groups, self.length, dtype=kind) for kind in (bits.dtype, torch.uint8))
        for window in range(windows.shape[2]):
            place = slice(2 * window, 2 * window + 4)
            dense[:, :, place] |= windows[:, :, window]
            taken[:, :, place] += windows[:, :, window] != 0
        dense = dense.flatten(1)
        if bits[:, groups * wide :].any() or dense[:, cols:].any():
            raise ValueError(f"{name}: there are values behind its {cols} columns")
        if (taken > 1).any():
            raise ValueError(f"{name}: a column has values in two windows")
        return dense[:, :cols].contiguous().view(weight.dtype)

    def _columns(self, key: str, name: str) -> int:
        config, hidden = self._config, self._config.get("hidden_size")
        found = config.get(key)
        if key == "heads":
            heads, size = config.get("num_attention_heads"), config.get("head_dim")
            found = heads * size if isinstance(heads, int) and isinstance(size, int) else hidden
        if not isinstance(found, int) or found < 1:
            key = "hidden_size, or num_attention_heads and head_dim," if key == "heads" else key
            raise ValueError(f"config.json says of {key} {found!r}: how many columns {name} had is not known")
        return found
