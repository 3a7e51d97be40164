"""Reads the sparse checkpoints of compressed-tensors, which no release of 2026 loads any more.

Formats `sparse-bitmask` and `sparse-24-bitmask`: of a weight NAME.weight the file has
    NAME.shape       int64, rows and cols
    NAME.bitmask     uint8 [rows, ceil(cols / 8)], bit c % 8 of byte c / 8 for column c
    NAME.compressed  the values under set bits, row after row; [rows, cols / 2] for 2:4, where a value may be zero
    NAME.row_offsets int64 [rows], where each row begins in it (not for 2:4; not needed)
Up to release 0.8.1 NAME is the parameter's, NAME.weight.bitmask, and every parameter of the model is written so: those
of one dimension have one row.

And those whose weights have 8 bits, symmetric, with a scale a row or one for all (W8A16, W8A8, fp8): codes and scales
are held as they are, tokens at 16 bits. Such codes may be under a mask too: then NAME.compressed has them.
    NAME.weight        int8 or float8_e4m3fn [rows, cols]; or
    NAME.weight_packed int32 [rows, ceil(cols / 4)], four of code + 128, the first lowest, and NAME.weight_shape
    NAME.weight_scale  [rows, 1] or [1]; a row of scale 0 is one of zeros

Of 4 bits (pack-quantized, symmetric) the weights are made of 16 bits:
    NAME.weight_packed int32 [rows, ceil(cols / 8)], eight of code + 8, the first lowest, and NAME.weight_shape
    NAME.weight_scale  [rows, groups], one for each cols / groups columns
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..choose.patterns import countable
from ..files import Checkpoint, FolderWriter, named, open_tensors, version_of
from ..weights import ByteWeight, Dense8Weight, Sparse8Weight, codes
from ..weights.saved import IN_FILES

FORMATS = ("sparse-bitmask", "sparse-24-bitmask")
_KEYS = ("shape", "bitmask", "compressed", "row_offsets")
_HELD = (torch.bfloat16, torch.float16, torch.float32, *codes.TYPES)
#: Elements that are decoded at a time: each takes five bytes meanwhile.
_DECODED = 1 << 21


def _object(about: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What config.json has under this name; nothing where it has not."""
    value = about.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"config.json: {name} is {value!r}, expected a JSON object")
    return value


def sparsity_format(config: Mapping[str, Any]) -> str | None:
    """The format of a checkpoint's config.json, None where it is none of compressed-tensors' sparse ones.

    Raises:
        ValueError: their format is not one of FORMATS.
    """
    for about in (_object(config, "quantization_config"), _object(config, "compression_config"), config):
        if (name := _object(about, "sparsity_config").get("format")) in (None, "dense"):
            continue
        if name not in FORMATS:
            raise ValueError(f"sparsity_config has format {name!r}, macko reads {' and '.join(FORMATS)}")
        _object(about, "config_groups")
        return str(name)
    return None


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether config.json is of a checkpoint whose weights have 8 bits and the scales above.

    Raises:
        ValueError: compressed-tensors has quantised it in another way: names what macko does not hold.
    """
    about = _object(config, "quantization_config")
    if about.get("quant_method") != "compressed-tensors" or not (groups := _object(about, "config_groups")):
        return False
    sparsity_format(config)  # or why not
    if has_four_bits(config):
        return False
    for group in groups:
        weights = _object(_object(groups, group), "weights")
        for key, expected in (
            ("num_bits", (8,)),
            ("type", ("int", "float")),
            ("strategy", ("channel", "tensor")),
            ("symmetric", (True,)),
        ):
            if weights.get(key) not in expected:
                raise ValueError(f"config_groups has weights of {key} {weights.get(key)!r}, macko holds {expected}")
    return True


def has_four_bits(config: Mapping[str, Any]) -> bool:
    """Whether config.json is of a checkpoint whose weights have 4 bits and the scales above.

    Raises:
        ValueError: they have, in another way: names it.
    """
    about = _object(config, "quantization_config")
    groups = _object(about, "config_groups") if about.get("quant_method") == "compressed-tensors" else {}
    kinds = [_object(_object(groups, group), "weights") for group in groups]
    if not any(weights.get("num_bits") == 4 for weights in kinds):
        return False
    if (form := about.get("format")) != "pack-quantized":
        raise ValueError(f"quantization_config has 4 bits a weight in the format {form!r}, macko reads pack-quantized")
    for weights in kinds:
        for key, expected in (
            ("num_bits", (4,)),
            ("type", ("int",)),
            ("strategy", ("channel", "group")),
            ("symmetric", (True, False)),
            ("actorder", (None, "weight")),
        ):
            if weights.get(key) not in expected:
                raise ValueError(f"config_groups has weights of {key} {weights.get(key)!r}, macko reads {expected}")
    return True


def _sizes(shape: Tensor, least: int = 2, most: int = 2) -> list[int]:
    """The sizes that a file says a weight has, rows and columns where nothing else is said."""
    if not least <= shape.numel() <= most or shape.is_floating_point():
        count = "two" if least == most else f"{least} to {most}"
        raise ValueError(f"its shape is {shape.dtype} {list(shape.shape)}, expected {count} whole numbers")
    return shape.flatten().tolist()


_CODES = ("weight", "weight_packed", "compressed")
_SCALES = ("weight_scale", "weight_shape", "weight_zero_point", "input_scale", "input_zero_point")


def quantised(file: Checkpoint, name: str, dtype: torch.dtype) -> ByteWeight:
    """A layer's weight with its own codes and scales, sparse where that is smaller; ValueError names the layer."""
    with named(name, IndexError, RuntimeError, TypeError, ValueError):
        scales = file[f"{name}.weight_scale"].float().flatten()
        if f"{name}.weight_packed" in file:
            rows, cols = _sizes(file[f"{name}.weight_shape"])
            values = (file[f"{name}.weight_packed"].contiguous().view(torch.uint8)[:, :cols] ^ 128).view(torch.int8)
            if values.shape != (rows, cols):
                raise ValueError(f"weight_packed holds {list(values.shape)}, weight_shape says {[rows, cols]}")
        elif f"{name}.bitmask" in file:
            values = Masked(file, name).to_dense()
        else:
            values = file[f"{name}.weight"]
        if f"{name}.weight_zero_point" in file and bool(file[f"{name}.weight_zero_point"].float().any()):
            raise ValueError("weight_zero_point is not zero")
        if scales.numel() == 1 and values.numel():
            scales = scales.expand(len(values)).contiguous()
        if scales.shape == values.shape[:1] and bool((is_zero := scales == 0).any()):
            values.view(torch.uint8)[is_zero] = 0  # as they are times that
            scales = torch.where(is_zero, 1.0, scales)
        packed = [kind.from_codes(values, scales, dtype) for kind in (Dense8Weight, Sparse8Weight)]
    return min(packed, key=lambda weight: weight.nbytes)


def pack_quantised(source: str | os.PathLike[str], target: Path) -> dict[str, Any]:
    """Writes the weights of a checkpoint that is_quantised, packed as they are, and its config.json to a folder.

    Returns:
        What config.json says of each packed layer.

    Raises:
        ValueError: a layer is not as its config says.
    """
    layers: dict[str, Any] = {}
    written = FolderWriter(target)
    with Checkpoint(source) as file:
        about = file.config.get("dtype") or file.config.get("torch_dtype")
        dtype = torch.float16 if about == "float16" else torch.bfloat16
        for name, _, last in (key.rpartition(".") for key in file):
            if last in (*_SCALES[:3], "bitmask") and not any(f"{name}.{key}" in file for key in _CODES):
                raise ValueError(f"{name}: it has {last}, and none of {', '.join(_CODES)}")
        for path in sorted(Path(source).glob("*.safetensors")):
            keys = [key for key in open_tensors(path).keys() if key in file]  # noqa: SIM118  the index may name others

            def tensors(keys: list[str] = keys) -> Iterator[tuple[str, Tensor]]:
                for key in keys:
                    name, _, last = key.rpartition(".")
                    has_scale = f"{name}.weight_scale" in file
                    if has_scale and last in _CODES:
                        saved = quantised(file, name, dtype).to_saved()
                        layers[name] = saved.about()
                        yield f"{name}.weight", saved.empty_weight()
                        yield from ((f"{name}.{field}", tensor) for field, tensor in saved.tensors().items())
                    elif f"{name}.bitmask" in file and last in _KEYS:
                        if last == "compressed":
                            yield f"{name}.weight", Masked(file, name).to_dense()
                    elif not has_scale or last not in _SCALES:
                        tensor = file[key]
                        if last in _CODES and tensor.dtype in (torch.int8, torch.int32, torch.float8_e4m3fn):
                            raise ValueError(f"{name}: it has 8 bits, and no weight_scale")
                        yield key, tensor

            weights = [name for name, _, last in (key.rpartition(".") for key in keys) if last in _CODES]
            parts = [f"{name}.{field}" for name in weights for field in IN_FILES]
            written.add(path.name, tensors(), [*keys, *parts])
        if not layers:
            raise ValueError(f"{source} has no layer of 8 bits, config.json says that it has")
        about = {"quant_method": "macko", "version": version_of(layers), "layers": layers}
        written.end({**file.config, "quantization_config": about})
    return layers


class _Lazy:
    """A tensor that is made when transformers takes it: weight[...]."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self.read = read

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]


def masked(file: Checkpoint) -> dict[str, str]:
    """The parameters that the file has under a mask, each with its NAME there."""
    names = [name.removesuffix(".bitmask") for name in file if name.endswith(".bitmask")]
    whole = any(name.endswith(".weight") for name in names)  # up to release 0.8.1
    return {name if whole else f"{name}.weight": name for name in names}


def lazy_state(file: Checkpoint) -> dict[str, _Lazy]:
    """The state_dict that the checkpoint stands for, one weight at a time."""
    packed = masked(file)
    of_4_bits = [name.removesuffix(".weight_packed") for name in file if name.endswith(".weight_packed")]
    theirs = {f"{name}.{key}" for name in packed.values() for key in _KEYS}
    theirs |= {f"{name}.{key}" for name in of_4_bits for key in (*_CODES, *_SCALES, "weight_g_idx")}
    state = {name: _Lazy(partial(file.__getitem__, name)) for name in file if name not in theirs}
    state |= {f"{name}.weight": _Lazy(partial(_of_4_bits, file, name)) for name in of_4_bits}
    return state | {key: _Lazy(partial(_decoded, file, name)) for key, name in packed.items()}


def _of_4_bits(file: Checkpoint, name: str) -> Tensor:
    """The weight that codes of 4 bits and their scales are, of the scales' dtype, rounded once."""
    with named(name):
        rows, cols = _sizes(file[f"{name}.weight_shape"])
        words, scales = file[f"{name}.weight_packed"], file[f"{name}.weight_scale"]
        if words.dtype != torch.int32 or list(words.shape) != [rows, -(-cols // 8)]:
            raise ValueError(f"weight_packed is {words.dtype} {list(words.shape)}, weight_shape says {[rows, cols]}")
        if scales.dim() != 2 or len(scales) != rows or not scales.shape[1] or cols % scales.shape[1]:
            raise ValueError(f"weight_scale has shape {list(scales.shape)}, weight_shape says {[rows, cols]}")
        if not scales.is_floating_point():
            raise ValueError(f"weight_scale is {scales.dtype}, expected floating point")
        if f"{name}.weight_g_idx" in file:
            raise ValueError("it has an order of columns, which macko does not read")
        points = f"{name}.weight_zero_point"
        zeros = file[points] if points in file else None  # noqa: SIM401  it has no get
        wanted = [-(-rows // 8), scales.shape[1]]
        if zeros is not None and (zeros.dtype != torch.int32 or list(zeros.shape) != wanted):
            raise ValueError(f"weight_zero_point is {zeros.dtype} {list(zeros.shape)}, expected int32 {wanted}")
    codes, columns = _nibbles(words, cols), cols // scales.shape[1]
    if zeros is not None:
        codes -= _nibbles(zeros.t(), rows).t().repeat_interleave(columns, 1)
    return (codes * scales.float().repeat_interleave(columns, 1)).to(scales.dtype)


def _nibbles(words: Tensor, count: int) -> Tensor:
    """Codes of 4 bits from -8 on, so many of each row, eight in a word, the lowest first."""
    return (words[:, :, None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15).flatten(1)[:, :count] - 8


def _decoded(file: Checkpoint, name: str) -> Tensor:
    return Masked(file, name).to_dense()


class Masked:
    """A weight as the file has it, which may be a sixteenth of the dense one.

    Raises:
        ValueError: its tensors do not fit each other; names the layer. What bits say is known once all are decoded.
    """

    def __init__(self, file: Checkpoint, name: str) -> None:
        self.name = name
        with named(self.name, KeyError, ValueError):
            self.tensors = [file[f"{name}.{key}"] for key in _KEYS[:3]]
            self.shape = torch.Size(_shape(*self.tensors))
        _, bitmask, compressed = self.tensors
        self.rows, self.cols = math.prod(self.shape[:-1]), self.shape[-1]
        self.dtype, self.nbytes = compressed.dtype, bitmask.nbytes + compressed.nbytes

    @property
    def density(self) -> float:
        return int(countable(self.tensors[2]).count_nonzero()) / max(1, self.shape.numel())

    def to_dense(self) -> Tensor:
        with named(self.name, KeyError, ValueError):
            return decode(*self.tensors)

    def panels(self, rows: int) -> Iterator[Tensor]:
        """So many rows at a time, dense."""
        with named(self.name, KeyError, ValueError):
            yield from _panels(rows, *self.tensors)


def decode(shape: Tensor, bitmask: Tensor, compressed: Tensor) -> Tensor:
    """The dense weight; ValueError where the three do not fit each other."""
    sizes = _shape(shape, bitmask, compressed)
    rows, cols = math.prod(sizes[:-1]), sizes[-1]
    dense, first = torch.empty(rows, cols, dtype=compressed.dtype), 0
    for panel in _panels(max(1, _DECODED // max(1, cols)), shape, bitmask, compressed):
        dense[first : first + len(panel)] = panel
        first += len(panel)
    return dense.view(sizes)


def _shape(shape: Tensor, bitmask: Tensor, compressed: Tensor) -> list[int]:
    """The weight's sizes, once the types and shapes of all three fit."""
    *rows, cols = sizes = _sizes(shape, 1, 5)  # a norm has one, a convolution up to five
    wanted = [*rows, -(-cols // 8)]
    if bitmask.dtype != torch.uint8 or list(bitmask.shape) != wanted:
        raise ValueError(f"bitmask is {bitmask.dtype} {list(bitmask.shape)}, expected uint8 {wanted}")
    if compressed.dtype not in _HELD:
        raise ValueError(f"compressed is {compressed.dtype}, macko holds {', '.join(str(kind)[6:] for kind in _HELD)}")
    return sizes


def _panels(step: int, shape: Tensor, bitmask: Tensor, compressed: Tensor) -> Iterator[Tensor]:
    """The dense weight, `step` rows at a time; ValueError, if only after the last ones, as of decode."""
    *rows, cols = _shape(shape, bitmask, compressed)
    bits_of = torch.uint8 if compressed.element_size() == 1 else compressed.dtype  # fp8 cannot be indexed
    values, done = compressed.flatten().view(bits_of), 0
    bitmask = bitmask.reshape(math.prod(rows), -(-cols // 8))
    for some in bitmask.split(step if cols else max(1, len(bitmask))):
        bits = (some[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten(1)
        if bits[:, cols:].any():
            raise ValueError(f"bitmask has bits past column {cols}")
        count = int(bits.sum())
        dense = torch.zeros(len(some), cols, dtype=bits_of)
        if done + count <= len(values):
            dense[bits[:, :cols]] = values[done : done + count]
        done += count
        yield dense.view(compressed.dtype)
    if done != len(values):
        raise ValueError(f"bitmask has {done} bits set, compressed has {len(values)} values")
