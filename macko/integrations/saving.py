"""save_pretrained of any transformers model that holds sparse layers, whoever put them there, and from_pretrained.

Beside the weights of each packed layer lies an empty tensor NAME.weight, beside experts one of each stack. A reader
that knows nothing of macko wants a weight of another size there and stops, where it would else start the layer at
random.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from torch import Tensor, nn
from transformers import modeling_utils
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import PreTrainedModel

from ..choose.options import Options
from ..files import join, packed_state, quant_method, version_of
from ..nn.experts import SparseExperts, UnfoldedExperts, saved_by_expert, unfolded
from ..nn.linear import SparseLinear
from ..nn.report import format_bytes
from ..weights import saved_as
from ..weights.saved import said, within
from . import tensor_parallel, wrap
from .placing import PLACING, dispatch
from .transformers import IGNORES_SIZES, OFFLOADS, MackoConfig, renamer

#: Parts of names that wrappers put between a model's own, by whose names from_pretrained would find nothing.
_WRAPPERS = {"base_layer": "PEFT's adapters", "_orig_mod": "torch.compile"}


def _as_packed(save: Any) -> Any:
    signature = inspect.signature(save)

    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        given = call.arguments
        if getattr(self, "_hf_peft_config_loaded", False):  # saves the adapters alone
            return save(*call.args, **call.kwargs)
        tensor_parallel.check_experts(self)
        with unfolded(self, saved_by_expert), _as_it_is(self, given.get("state_dict")) as (state, layers):
            if state is not None:
                given["state_dict"] = state
            result = save(*call.args, **call.kwargs)
            writes = getattr(self, "should_save_on_this_rank", bool)  # not in every transformers 5
            if layers and writes(given.get("is_main_process", True)):
                _write_card(self, Path(given["save_directory"]), layers)
        return result

    return save_pretrained


@contextlib.contextmanager
def _as_it_is(model: Any, state: dict[str, Tensor] | None) -> Iterator[tuple[dict[str, Tensor] | None, dict[str, Any]]]:
    """The state to save and, of each packed layer, its format and sizes, which the model's config says meanwhile."""
    quantizer = vars(model).get("hf_quantizer")
    before = [(c, vars(c)["quantization_config"]) for c in _configs(model.config) if "quantization_config" in vars(c)]
    about: Any = getattr(quantizer, "quantization_config", None)
    methods = {quant_method(about), *(quant_method(said) for _, said in before)}
    layers: dict[str, Any] = {}
    if any(isinstance(module, (SparseExperts, SparseLinear)) for module in model.modules()):
        if others := sorted(methods - {"macko", ""}):
            raise ValueError(
                f"save_pretrained: the model is quantized by {', '.join(others)} and has sparse layers of macko too, "
                "while config.json can name one method only: use macko.save_model"
            )
        if state is not None and (model._tp_size or 1) > 1:
            raise ValueError("save_pretrained: each process has a part of the model, so its state cannot be given")
        with tensor_parallel.all_whole(model):
            state, layers = _found_again(model, state)
    elif "macko" not in methods:
        yield state, layers
        return
    if quant_method(about) != "macko":  # then it says so for as long as the model is saved
        noted = getattr(model.config, "quantization_config", None)
        about = copy.copy(noted) if isinstance(noted, MackoConfig) else MackoConfig()
    if Options(about.format).any_zeros:
        about = copy.copy(about)  # what the files hold packed is not to be held so
        about.format = "auto"
    before_saving = about.layers, about.version
    try:
        for config, _ in before:  # what the config of a part says, that of the whole model has to say
            del config.quantization_config
        if layers:
            about.layers, about.version = _as_in_files(model, layers), version_of(layers)
            model.config.quantization_config = about
        model.hf_quantizer = None  # it would put the model's own state in the place of the one that is given
        yield state, layers
    except BaseException:
        about.layers, about.version = before_saving
        raise
    finally:
        del model.hf_quantizer
        if quantizer is not None:
            model.hf_quantizer = quantizer
        vars(model.config).pop("quantization_config", None)
        for config, kept in before:
            config.quantization_config = kept


def _as_in_files(model: Any, layers: dict[str, Any]) -> dict[str, Any]:
    """Experts by the names that their tensors get: Mixtral's mlp.experts are block_sparse_moe.experts there."""
    by_expert = {name for name, module in model.named_modules() if isinstance(module, UnfoldedExperts)}
    there = renamer(model, to_files=True) if by_expert else str
    return {there(name) if name.rsplit(".", 2)[0] in by_expert else name: about for name, about in layers.items()}


def _found_again(model: Any, state: dict[str, Tensor] | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """packed_with_empty, of which from_pretrained finds each layer; what a state_dict has dense stays so where it else
    would not.

    Raises:
        ValueError: it would not find one of the others. Nothing is written then.
    """
    try:
        packed = packed_with_empty(model, state)
        _own_names(model, packed[0])
    except ValueError:
        packed = packed_with_empty(model, model.state_dict() if state is None else state)
        _own_names(model, packed[0])
    return packed


def packed_with_empty(model: Any, state: dict[str, Tensor] | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """packed_state, with an empty weight of each packed layer."""
    state, layers = packed_state(model, state)
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if source in state and isinstance(model.get_submodule(name.rpartition(".")[0]), SparseLinear):
            state.pop(name, None)  # a packed copy of what is read from the other's place
            layer = name.rpartition(".")[0]
            if layer in layers and saved_as(layers[layer])[0].stands_for_dense():
                for part in saved_as(layers.pop(layer))[2]:
                    del state[join(layer, part)]
    for name, about in layers.items():
        if wrapper := next((part for part in name.split(".") if part in _WRAPPERS), None):
            raise ValueError(
                f"save_pretrained: {name} is inside of a wrapper of {_WRAPPERS[wrapper]}, and from_pretrained would "
                "not find it by that name: save the adapter by itself, or the model without the wrapper"
            )
        # The layer's own has two dimensions too, since transformers may cut or join it as the weight of that name.
        state.setdefault(join(name, "weight"), torch.empty(0, about["cols"], dtype=model.get_submodule(name).dtype))
    # Experts one by one may have names there that a reader without macko does not look for: it wants these then.
    return state | {name: torch.empty(0, 0, 0, dtype=model.dtype) for name in _stacks(model)}, layers


def _stacks(model: Any) -> set[str]:
    """Names that the stacked weights of experts had, which are layers of their own now; where transformers would make a
    stack of these layers' weights, none."""
    unfolded = {name: m for name, m in model.named_modules() if isinstance(m, UnfoldedExperts) and m.num_experts}
    conversions = get_model_conversion_mapping(model, add_legacy=False) if unfolded else []
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    keys = {
        join(name, key): [f"{name}.0.{part}.weight" for part in m.parts(key)]
        for name, m in unfolded.items()
        for key in m.rows
    }
    return {key for key, parts in keys.items() if not any(rename_source_key(p, [], converters)[1] for p in parts)}


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A model's config and those of its parts."""
    yield config
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            yield from _configs(part)


# ---- The model card --------------------------------------------------------------------------------------------------

_CARD = """
# {name}

The weights of {count} linear layers of this model are packed by macko: zeros are not stored, and in planes12 twelve of
the sixteen bits of a weight are, from which each is read bit for bit.

| packed layers | their weights | density | format | files |
|---|---|---|---|---|
| {count} | {weights:,} | {density:.3f} ({sparsity:.1%} sparse) | {formats} | {size} |

To load it, macko {version} or newer and `pip install "transformers>=5"` are needed, and `import macko` comes first.
Without it transformers knows nothing of packed layers, and stops with an error about the sizes of weights.

```python
import macko
from transformers import {kind}

model = {kind}.from_pretrained("{name}"{options})
```
"""
_SIGN = re.compile(r"\n<!-- macko wrote this card and keeps what has been edited: ([0-9a-f]{64}) -->\n")


def _write_card(model: nn.Module, folder: Path, layers: dict[str, Any]) -> None:
    """README.md of a packed folder; one that is not as macko wrote it is somebody's, and stays."""
    from .. import __version__

    card = folder / "README.md"
    if not (folder / "config.json").is_file() or (card.exists() and not is_own_card(card)):
        return
    modules: list[Any] = [model.get_submodule(name) for name in layers]
    # Layers that are merged have one matrix.
    densities = {id(whole): whole.packed.density for whole in {vars(m).get("_whole", m) for m in modules}}
    numels = [module.out_features * module.in_features for module in modules]
    counts = [densities[id(vars(m).get("_whole", m))] * numel for m, numel in zip(modules, numels, strict=True)]
    density = sum(counts) / max(1, sum(numels))
    theirs = type(model).__module__.startswith("transformers.")
    about = ModelCardData(library_name="transformers", tags=["macko", "sparse", "pruned"])
    text = f"---\n{about.to_yaml()}\n---\n" + _CARD.format(
        name=folder.resolve().name, count=len(layers), weights=sum(numels), density=density, sparsity=1 - density,
        formats=", ".join(sorted({layer["format"] for layer in layers.values()})), version=__version__,
        size=format_bytes(sum(file.stat().st_size for file in folder.glob("*.safetensors"))),
        kind=type(model).__name__ if theirs else "AutoModel", options="" if theirs else ", trust_remote_code=True",
    )  # fmt: skip
    sign = f"\n<!-- macko wrote this card and keeps what has been edited: {_digest(text)} -->\n"
    card.write_text(text + sign, encoding="utf-8")


def is_own_card(card: Path) -> bool:
    """Whether macko wrote it, and nobody has edited it."""
    text = card.read_text(encoding="utf-8")
    sign = _SIGN.search(text)
    return sign is not None and sign[1] == _digest(text.replace(sign[0], ""))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# ---- transformers' own names of files' tensors -----------------------------------------------------------------------


def _but_packed(revert: Any) -> Any:
    def revert_weight_conversion(model: Any, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Names, cuts and joins a state as files have it; what is packed is neither cut nor joined.

        Where transformers would join packed layers (as q, k and v of a fused matrix), the state keeps the model's own
        names, which from_pretrained finds too; but for what it would convert again, which has to be as files have it.
        """
        stacks = _stacks(model)
        kept = {key: tensor for key, tensor in state_dict.items() if key in stacks}
        rest = {key: tensor for key, tensor in state_dict.items() if key not in stacks}
        names = _own_names(model, rest) or set()
        kept |= {key: tensor for key, tensor in rest.items() if key in names}
        rest = {key: tensor for key, tensor in rest.items() if key not in names}
        return kept | revert(model, rest) if rest else kept

    return revert_weight_conversion


def _own_names(model: Any, state: dict[str, Tensor]) -> set[str] | None:
    """The tensors to save under the model's own names; None where no packed layer is in transformers' way.

    Raises:
        ValueError: from_pretrained would not find a packed layer by its own name.
    """
    conversions = getattr(model, "_weight_conversions", None)  # what was done as it was loaded
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    backwards = [conversion.reverse_transform() for conversion in conversions[::-1]]
    joining = [entry for entry in backwards if isinstance(entry, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for key in state if joining else ():
        name, pattern = rename_source_key(key, [], joining)
        if pattern is not None:
            groups.setdefault(name, []).append(key)
    packed = {name for name, module in model.named_modules() if isinstance(module, SparseLinear)}
    if not any(key.rpartition(".")[0] in packed for group in groups.values() for key in group):
        return None
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]

    def is_found(key: str) -> bool:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        return name not in state or (name == key and pattern is None)  # what it knows no name of it takes by its own

    names = set(filter(is_found, state))
    for group in groups.values():
        if not names.issuperset(group):
            names.difference_update(group)
    for key in state:
        layer, _, tensor = key.rpartition(".")
        if key not in names and layer in packed and tensor != "bias":
            raise ValueError(
                f"save_pretrained: transformers would not find the packed {layer} again, since it converts what has "
                "such a name while it loads: leave the layer dense (ignore), or use macko.save_model"
            )
    return names


# ---- from_pretrained -------------------------------------------------------------------------------------------------


def _from_packed(load: Any) -> Any:
    signature = inspect.signature(load)

    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(cls, *args, **kwargs)
        given = {**call.arguments, **call.arguments.get("kwargs", {})}
        folder, config = given["pretrained_model_name_or_path"], given.get("config")
        _check_quantization_config(folder, config)
        if isinstance(config, PreTrainedConfig) and not quant_method(getattr(config, "quantization_config", None)):
            kwargs["config"] = config = _with_layers(config, folder)
        if layer := _packed_layer(given.get("state_dict") or {}, getattr(config, "quantization_config", None)):
            raise ValueError(
                f"from_pretrained: state_dict has {layer} packed by macko, which is read from a folder only: give the "
                "folder of save_pretrained, or load the state into a model after sparsify_"
            )
        offloads = bool(getattr(given.get("quantization_config"), "offload", False))
        placing = {name: kwargs.pop(name, None) for name in PLACING} if offloads else {}
        with within(IGNORES_SIZES, bool(given.get("ignore_mismatched_sizes"))), within(OFFLOADS, offloads):
            found = load(cls, *args, **kwargs)
        if offloads:
            model: Any = found[0] if isinstance(found, tuple) else found
            kept = list(getattr(model, "_no_split_modules", None) or ())
            dispatch(model, kept, model._skip_keys_device_placement, **placing)
        return found

    return from_pretrained


def _check_quantization_config(folder: Any, given: Any) -> None:
    """ValueError with its name where a folder's is no object, which transformers takes for one, or not macko's."""
    file = Path(folder or "") / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if folder and file.is_file() else None
    except ValueError:
        return  # which transformers says
    about = config.get("quantization_config") if isinstance(config, dict) else None
    if about is not None and not isinstance(about, dict):
        raise ValueError(f"{file}: quantization_config is {about!r}, expected an object")
    about = getattr(given, "quantization_config", None) if isinstance(given, PreTrainedConfig) else about
    if isinstance(about, dict) and quant_method(about) == "macko":
        try:
            MackoConfig.from_dict(about)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None


def _with_layers(config: PreTrainedConfig, folder: Any) -> PreTrainedConfig:
    """The config, which says nothing of packed layers, with what the config.json of a packed folder says of them."""
    file = Path(folder or "") / "config.json"
    about = json.loads(file.read_text(encoding="utf-8")).get("quantization_config") if file.is_file() else None
    if folder is None or quant_method(about) != "macko":
        return config
    config = copy.deepcopy(config)
    config.quantization_config = about  # type: ignore[attr-defined]
    return config


def _packed_layer(state: dict[str, Any], about: Any) -> str | None:
    """A layer that is packed in a state, but of which a config says nothing; None where there is none."""
    layers = (about.get("layers") if about else None) or {}
    for key, tensor in state.items():
        layer, _, name = key.rpartition(".")
        empty = name == "weight" and join(layer, "values") in state
        if (name == "_extra_state" and _is_packed(tensor)) or (empty and not layers):
            return layer
    return None


def _is_packed(extra: Any) -> bool:
    """Whether it is what SparseLinear.get_extra_state gives."""
    try:
        said(extra, saved_as)
    except ValueError:
        return False
    return True


wrap(modeling_utils, "revert_weight_conversion", _but_packed)
wrap(PreTrainedModel, "from_pretrained", _from_packed)
wrap(PreTrainedModel, "save_pretrained", _as_packed)
