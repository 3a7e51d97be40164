"""Folders of transformers from dense to twelve bits a weight, and back, file by file: no model is built, no GPU asked.

Beside the tensors each file keeps, under "crc32" in its metadata, the checksum of each weight that was packed, by which
the way back shows that every bit is there. (SHA-256 would take longer than packing.)
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..files import Checkpoint, FolderWriter, join, version_of
from ..nn.experts import find_experts, projections
from ..nn.find import find_linears
from ..weights import Planes12Weight, saved_as
from .saving import is_own_card
from .transformers import class_of, readable, renamer

#: What a packed layer has in files, the empty weight too.
_PARTS = (*Planes12Weight.tensor_names, "weight")


def float32_weights(source: Path, ignore: Sequence[str]) -> tuple[int, int, int]:
    """How many float32 weights of a folder bfloat16 would round, how many are no bfloat16 numbers, and how many float32
    matrices stay.

    All stay where no layer that is to be packed is float32. Routers always do.
    """
    count = rounded = routers = matrices = 0
    found = False
    with readable(source), Checkpoint(source) as file:
        part_of = _parts_of(_on_meta(source), ignore)
        is_read_rounded = "bfloat16" not in (file.config.get("dtype"), file.config.get("torch_dtype"))
        for name in file:
            tensor = file[name]
            if tensor.dtype != torch.float32:
                continue
            matrices += tensor.dim() > 1
            if (part := part_of(name)) == "router":
                routers += tensor.dim() > 1
                if not is_read_rounded:  # by the config that is written
                    continue
            found |= part == "layer"
            count += tensor.numel()
            rounded += int((tensor.view(torch.int32) & 0xFFFF).count_nonzero())
    return (count, rounded, routers) if found else (0, 0, matrices)


def pack_folder(source: Path, target: Path, ignore: Sequence[str], rounds: bool = False) -> dict[str, Any]:
    """Writes the weights of a dense folder with its linear layers in planes, and config.json.

    At a time it has one layer in memory, and the lists of a file's. With `rounds` what is float32 becomes bfloat16
    first, but for routers. A layer stays dense that is tied, ignored, of another dtype than bfloat16 and float16, or
    would not become smaller; one whose name transformers changes when it loads it, too.

    Experts that the files have one by one are packed so, under the names that they have as modules of their own.

    Returns:
        What config.json says of each packed layer.

    Raises:
        ValueError: transformers does not know the model, or no layer would become smaller.
    """
    layers: dict[str, Any] = {}
    with readable(source), Checkpoint(source) as file:
        model = _on_meta(source)
        experts = _weights_of_experts(model, file, ignore)
        layer_of = {key: key.rpartition(".")[0] for key in _weights_of_layers(model, file, ignore)} | experts
        written, part_of = FolderWriter(target), _parts_of(model, ignore)
        for path, keys in file.by_file():
            sums: dict[str, int] = {}

            def tensors(keys: list[str] = keys, sums: dict[str, int] = sums) -> Iterator[tuple[str, Tensor]]:
                for key in keys:
                    tensor = file[key]
                    if rounds and tensor.dtype == torch.float32 and part_of(key) != "router":
                        tensor = tensor.bfloat16()
                    packed = _planes(tensor, key in experts) if key in layer_of else None
                    if packed is None:
                        yield key, tensor
                        continue
                    layer = layer_of[key]
                    layers[layer], sums[join(layer, "weight")] = packed.about(), checksum(tensor)
                    yield join(layer, "weight"), packed.empty_weight()
                    yield from ((join(layer, name), part) for name, part in packed.tensors().items())

            parts = [join(layer_of[key], name) for key in keys if key in layer_of for name in _PARTS]
            name = path.with_suffix(".safetensors").name.replace("pytorch_model", "model")
            written.add(name, tensors(), [*keys, *parts], sums)
        if not layers:
            raise ValueError(f"{source} has no linear layer that would become smaller in 12 bits a weight")
        about = {"quant_method": "macko", "version": version_of(layers), "layers": layers}
        dtype = {"torch_dtype" if "torch_dtype" in file.config else "dtype": "bfloat16"} if rounds else {}
        written.end({**file.config, **dtype, "quantization_config": about})
    return layers


def unpack_folder(source: Path, target: Path) -> tuple[int, int]:
    """Writes the weights of a packed folder as the dense ones, and config.json.

    Returns:
        How many layers it had packed, and of how many a checksum in the files was that of the weight.

    Raises:
        ValueError: the folder has no packed layer, one of them is damaged, or not the weight that was packed.
    """
    proved = 0
    with Checkpoint(source) as file:
        if not file.layers:
            raise ValueError(f"{source} has no layer that macko packed")
        parts = {join(layer, name): layer for layer, about in file.layers.items() for name in saved_as(about)[2]}
        in_checkpoints = _names_in_checkpoints(source, file.layers)

        def dense_name(layer: str) -> str:
            return in_checkpoints.get(layer, join(layer, "weight"))

        written, done = FolderWriter(target), set[str]()
        for path, keys in file.by_file():

            def tensors(keys: list[str] = keys) -> Iterator[tuple[str, Tensor]]:
                nonlocal proved
                for key in keys:
                    if key not in parts:
                        yield key, file[key]
                    elif (layer := parts[key]) not in done:
                        done.add(layer)
                        weight, wanted = file.packed(layer).to_dense(), file.checksums.get(join(layer, "weight"))
                        if wanted not in (None, checksum(weight)):
                            raise ValueError(f"{source}: layer {layer} is not the weight that was packed: other bits")
                        proved += wanted is not None
                        yield dense_name(layer), weight

            written.add(path.name, tensors(), {dense_name(parts[key]) if key in parts else key for key in keys})
        if lost := sorted(set(file.layers) - done):
            raise ValueError(f"{source}: there are no tensors of layer {lost[0]}")
        written.end({key: value for key, value in file.config.items() if key != "quantization_config"})
    card, before = source / "README.md", source / "README-dense.md"
    if before.is_file():
        (target / "README.md").write_bytes(before.read_bytes())
    elif card.is_file() and not is_own_card(card):
        (target / "README.md").write_bytes(card.read_bytes())
    return len(done), proved


def _names_in_checkpoints(source: Path, layers: Iterable[str]) -> dict[str, str]:
    """Of layers that are one expert by itself the names that a dense checkpoint has for their weights.

    Raises:
        ValueError: it has all experts in one tensor, which is not made of parts here.
    """
    found: dict[str, str] = {}
    if not any(re.search(r"experts\.\d+\.\w+$", layer) for layer in layers):
        return found
    model = _on_meta(source)
    stems, in_files = {layer.rpartition(".")[0].rpartition(".")[0] for layer in layers}, renamer(model, to_files=True)
    for name in (experts.name for experts in find_experts(model, (), None)):
        if in_files(name) in stems:
            if not (keys := _keys_of_experts(model, name)):
                raise ValueError(
                    f"{source}: a dense {type(model).__name__} has the experts of {name} in one tensor, these files "
                    "one by one: load the model, dequantize() it and save it"
                )
            found |= {layer: key for key, layer in keys.items()}
    return found


def checksum(weight: Tensor) -> int:
    """CRC-32 of a weight's bytes, row after row."""
    return zlib.crc32(weight.contiguous().view(torch.uint8).numpy().data)


def _planes(weight: Tensor, is_expert: bool) -> Planes12Weight | None:
    """The weight in planes, where that is smaller, and dense12 holds it too; of an expert always, as of all others."""
    if weight.dtype not in Planes12Weight.dtypes or weight.dim() != 2:
        return None
    packed = Planes12Weight.from_dense(weight)
    return packed if is_expert or (packed.nbytes < weight.nbytes and packed.is_held_packed(True)) else None


def _on_meta(source: Path) -> Any:
    about, kind = class_of(source)
    with torch.device("meta"):
        return kind(about)


def _parts_of(model: Any, ignore: Sequence[str]) -> Callable[[str], str]:
    """Of a name in the files: "layer" for the weight of a linear layer or of experts that the caller does not leave
    out, "router" for what else stands beside experts, or "other"."""
    every, loaded = find_experts(model, (), None), _loads(model)
    layers = {f"{layer.name}.weight" for layer in find_linears(model, ignore, None) if not layer.left_out}
    for experts in find_experts(model, ignore, None):
        layers |= {f"{experts.name}.{key}" for key in projections(experts.module) if not experts.left_out}
    inside = tuple(f"{experts.name}." for experts in every)
    beside = tuple(f"{parent}." for experts in every if (parent := experts.name.rpartition(".")[0]))

    def part_of(key: str) -> str:
        name = loaded(key)[0]
        if name in layers:
            return "layer"
        return "router" if name.startswith(beside) and not name.startswith(inside) else "other"

    return part_of


def _weights_of_layers(model: Any, file: Checkpoint, ignore: Sequence[str]) -> set[str]:
    """Names in the files of weights of linear layers that from_pretrained finds under the very name."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {*ties, *ties.values()}
    found = {layer.name for layer in find_linears(model, ignore, None) if not (layer.left_out or layer.changed)}
    found -= {name.removesuffix(".weight") for name in tied}
    found = {name for name in found if type(model.get_submodule(name)) is nn.Linear}
    loaded, prefix, names = _loads(model), model.base_model_prefix, set()
    for key in file:
        if key.endswith(".weight"):
            there, converts = loaded(key)
            same = there in (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
            if same and converts is None and there.removesuffix(".weight") in found:
                names.add(key)
    return names


def _weights_of_experts(model: Any, file: Checkpoint, ignore: Sequence[str]) -> dict[str, str]:
    """Names in the files of experts' weights, and of the layers that these are by themselves: whole modules of them."""
    found: dict[str, str] = {}
    for experts in find_experts(model, ignore, None):
        keys = {} if experts.left_out else _keys_of_experts(model, experts.name)
        if keys and all(key in file for key in keys):
            found |= keys
    return found


def _keys_of_experts(model: Any, name: str) -> dict[str, str]:
    """Of each expert of a module the names of its weights in a dense checkpoint, and those of layers in a packed one.

    Empty where a checkpoint has all of them in one tensor.
    """
    experts, loaded, found = model.get_submodule(name), _loads(model), {}
    conversions, in_files = get_model_conversion_mapping(model, add_legacy=False), renamer(model, to_files=True)
    for key in projections(experts):
        parts, whole = ("gate_proj", "up_proj") if key == "gate_up_proj" else (key,), f"{name}.{key}"
        for entry in conversions:
            sources, targets = list(entry.source_patterns), list(entry.target_patterns)
            if not isinstance(entry, WeightConverter) or len(sources) != len(parts) or not whole.endswith(targets[0]):
                continue
            for expert in range(experts.num_experts):
                for part, source in zip(parts, sources, strict=True):
                    there = whole.removesuffix(targets[0]) + source.replace("*", str(expert))
                    there = join(in_files(there.removesuffix(".weight")), "weight")
                    if loaded(there) == (whole, source):
                        found[there] = in_files(f"{name}.{expert}.{part}")
    whole_module = experts.num_experts * (3 if experts.has_gate else 2)
    return found if len(found) == whole_module and not experts.has_bias else {}


def _loads(model: Any) -> Callable[[str], tuple[str, str | None]]:
    """What from_pretrained makes of a name in files: the model's own, and the pattern of what it converts."""
    conversions, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    return lambda key: rename_source_key(key, renamings, converters, model.base_model_prefix, state)
