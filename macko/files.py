"""Models with packed layers in safetensors files: the canonical format, never an execution layout; dense12 as planes.

Beside the tensors a file keeps, as JSON under "macko" in its metadata (in a Hugging Face folder: under
"quantization_config" of config.json), the version of the files and for each packed layer its format and sizes:

    {"version": 1, "layers": {"up": {"format": "macko", "rows": 11008, "cols": 4096, "delta_bits": 4}}, "shared": {}}

The layer's tensors lie under its name and the format's field names: up.values, up.deltas, up.row_ptr. Beside them lies
an empty up.weight, beside experts also an empty stack, at which readers stop that know nothing of macko. A file of
somebody else, as diffusers' or accelerate's, has that state without the JSON: then up._extra_state says the same, or
the names and sizes do. A file that has a layer of dense12 is of version 2.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .choose.auto import gains_by_slabs, held_on
from .choose.options import AUTO, Options
from .nn.experts import PROJECTIONS, saved_by_expert
from .nn.find import check_model, submodule, tied_parameters
from .nn.linear import SparseLinear, as_extra_state, unsupported, with_hooks
from .nn.offload import as_in_files
from .weights import MackoWeight, PackedWeight, saved_as
from .weights.saved import IN_FILES, states_for_files
from .weights.slidesparse import NOTE, Slid

#: The highest version of files; a reader refuses a higher one. A file is of the lowest that has its layers' formats.
VERSION = 2


def save_model(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes all parameters and buffers of a model to one safetensors file, packed weights as they are.

    Args:
        model: any module; its SparseLinear layers are written in the canonical format, those of dense12 as planes.
        path: the file to write. It is replaced only when the new one is complete.

    Raises:
        TypeError: the model is none, or has a state that is no tensor.
    """
    check_model(model, "save_model")
    state, layers = packed_state(model)
    tensors, shared = _without_sharing(state)
    about = {"version": version_of(layers), "layers": layers, "shared": shared}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        save_tensors(tensors, unfinished, {"macko": json.dumps(about)})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """safetensors' save_file, with the permissions of the umask: its files are for their owner alone."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    path.chmod(mode)


def load_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    format: str | None = None,
) -> nn.Module:
    """Reads a file of save_model, or the folder of a sparse model, into a model of that kind.

    Whoever saved it: transformers, or what writes a model's state_dict to safetensors files, as diffusers, accelerate,
    PyTorchModelHubMixin, sentence-transformers (the folder of its Dense). Linear layers whose weight is packed in the
    file become SparseLinear, in place, with no dense weight on the way. What the file holds in 12 bits does so on a GPU
    that gains by them, or where `format` says so; elsewhere it is an nn.Linear with the very weight.
    Every packed weight is validated before it is used.

    Args:
        model: the module that the file is of, dense or sparse. One on the meta device takes the file's dtypes; any
            other keeps its own. Buffers that are not saved stay on the meta device, for the caller to fill.
        path: a file, or a folder of files. Of a folder with a model's file or an index only what these name is read,
            and never adapters and consolidated files.
        device: where the model goes; default: where it is, the CPU for one on the meta device.
        format: what to hold the weights in, as in macko.sparsify_; default: as the model's sparse layers do, and "auto"
            where they are dense.

    Returns:
        The model; a new layer where the model is itself one nn.Linear.

    Raises:
        ValueError: the file is of a newer version, quantised by another library, does not fit the model, or holds a
            packed weight that breaks its format; names the layer. The model is then to be thrown away.
    """
    check_model(model, "load_model")
    if format is not None:
        Options(format)
    with Checkpoint(path, by_names=True) as file:
        if other := file.quantised_by(_own_names(model)):
            raise ValueError(f"{os.fspath(path)}: it is quantised by {other}, which load_model does not read")
        at = torch.device(device) if device is not None else _device_of(model)
        on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        made = _made_there(model, file, at, on_meta, format)
        dense = {name: weight for name, weight in made.items() if isinstance(weight, Tensor)}
        packed = {name: weight for name, weight in made.items() if not isinstance(weight, Tensor)}
        model = put_sparse_layers(model, file, dense, packed)
        ties = {tuple(names) for names in tied_parameters(model).values()}
        theirs = {join(layer, name) for layer in made for name in IN_FILES}
        state = {name: file[name] for name in file if name not in theirs}
        state |= {join(layer, "weight"): weight for layer, weight in dense.items()}
        state |= {alias: state[name] for alias, name in file.shared.items() if name in state}
        state |= {join(k, "_extra_state"): as_extra_state(about) for k, about in file.layers.items() if k not in made}
        for names in ties:  # a folder of transformers holds one of them
            state |= {name: state[there] for there in names if there in state for name in names if name not in state}
        if on_meta and device is not None:
            state = {name: tensor.to(device) for name, tensor in state.items()}
        try:
            found = model.load_state_dict(state, strict=False, assign=on_meta)
        except RuntimeError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None
    there = {join(layer, "weight") for layer in packed}
    missing = [name for name in found.missing_keys if name not in there]
    for keys, what in ((missing, "lacks"), (found.unexpected_keys, "has, and the model has not,")):
        if keys:
            raise ValueError(f"{os.fspath(path)} {what} {', '.join(keys)}")
    for first, *others in ties if on_meta else ():  # each name has been given a Parameter of its own
        for other in others:
            parent, _, last = other.rpartition(".")
            model.get_submodule(parent)._parameters[last] = model.get_parameter(first)
    if device is not None and not on_meta:
        model = model.to(device)
    for name, module in model.named_modules():
        if isinstance(module, SparseLinear) and format is not None:
            with named(f"{os.fspath(path)}: {name or 'the model'}"):
                module.reformat_(format)
    return model


def put_sparse_layers(
    model: nn.Module, file: Checkpoint, but: Collection[str] = (), packed: Mapping[str, PackedWeight] | None = None
) -> nn.Module:
    """Puts a SparseLinear in the place of each linear layer that is packed in a file, but of some; the model.

    It has its weight of `packed`, or is empty.
    """
    for name in (*file.layers, *file.unnamed):
        if name not in but:
            model = _make_sparse(model, name, (packed or {}).get(name))
    return model


def _device_of(model: nn.Module) -> torch.device:
    """Where the model is; the CPU for one on the meta device, or without tensors."""
    tensors = (tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta)
    return next(tensors, torch.device("cpu"))


def _made_there(
    model: nn.Module, file: Checkpoint, device: torch.device, on_meta: bool, format: str | None
) -> dict[str, PackedWeight | Tensor]:
    """Weights that stand in a file for dense ones, of the model's dense layers, as such a device holds them.

    One by one: a model takes the memory that it has in the end, and a layer's more.
    """
    made: dict[str, PackedWeight | Tensor] = {}
    by_slabs = device.type == "cuda" and gains_by_slabs(device)
    for name, about in file.layers.items():
        layer = submodule(model, name)
        if isinstance(layer, SparseLinear) or not isinstance(layer, nn.Linear):
            continue
        if saved_as(about)[0].stands_for_dense():
            weight, dtype = file.packed(name, device if by_slabs else None), None if on_meta else layer.weight.dtype
            with named(f"{file.path}: layer {name}"):
                made[name] = held_on(weight, device, dtype, packs=format not in (None, "auto"))
    return made


def version_of(layers: Mapping[str, Mapping[str, Any]]) -> int:
    """The version of files that have these packed layers."""
    return max((saved_as(about)[0].version for about in layers.values()), default=1)


def _own_names(model: nn.Module) -> set[str]:
    """Names of a model's tensors; but for those of packed layers, which a state_dict would have to make."""
    return {name for name, _ in (*model.named_parameters(), *model.named_buffers())}


def packed_state(
    model: nn.Module, state: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """A state_dict without _extra_state of sparse layers, and what that said: their formats and sizes.

    Args:
        state: of the model, all of it or a part; default: its state_dict().

    Raises:
        ValueError: the state has a sparse layer's tensors without their _extra_state.
    """
    if state is None:
        with as_in_files(), states_for_files():
            state = model.state_dict()
    state = dict(state)
    layers: dict[str, dict[str, Any]] = {}
    names: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if saved_by_expert(name, module):
            raise ValueError(
                f"{name} holds packed experts, which save_pretrained writes: this writes linear layers only"
            )
        if isinstance(module, SparseLinear):
            first = names.setdefault(id(module), name)
            for key in (key for key in state if first != name and key.startswith(join(name, ""))):
                # A layout is made canonical for each of its names: once is enough.
                state[key] = state.get(join(first, key.removeprefix(join(name, ""))), state[key])
            extra = state.pop(join(name, "_extra_state"), None)
            if extra is not None:
                layers[name] = json.loads(bytes(extra.tolist()))
                if "held" in layers[name]:
                    raise ValueError(f"the state has {name} as it is offloaded: let the state be taken from the model")
                if (layers[name]["rows"], layers[name]["cols"]) != (module.out_features, module.in_features):
                    raise ValueError(f"{name} holds one process' part of its weight: save the model by save_pretrained")
            elif any(join(name, key) in state for key in {*IN_FILES, *module._buffers} - {"weight"}):
                raise ValueError(f"the state has tensors of {name}, which is sparse, without {name}._extra_state")
    return state, layers


def check_about(about: Any, where: str) -> None:
    """ValueError for what a file says of itself, where it is of a newer macko or not of the form above."""
    if not isinstance(about, Mapping):
        raise ValueError(f"{where}: expected a JSON object about macko's layers, got {about!r}")
    version = about.get("version")
    if type(version) is not int or version < 1:
        raise ValueError(f"{where}: version is {version!r}, expected a whole number from 1 to {VERSION}")
    if version > VERSION:
        raise ValueError(
            f"{where} is of version {version} of macko's files; this macko reads up to version {VERSION}: "
            "install a newer one"
        )
    layers, shared = ({} if about.get(key) is None else about[key] for key in ("layers", "shared"))
    if not isinstance(layers, dict) or not isinstance(shared, dict):
        raise ValueError(
            f"{where}: layers and shared are {type(layers).__name__} and {type(shared).__name__}, not dicts"
        )
    for name, sizes in layers.items():
        with named(f"{where}: layers[{name!r}]"):
            saved_as(sizes)
    for alias, name in shared.items():
        if not isinstance(name, str):
            raise ValueError(f"{where}: shared[{alias!r}] is {name!r}, expected a name")


def join(layer: str, key: str) -> str:
    """The name of a layer's tensor; the layer "" is the model itself."""
    return f"{layer}.{key}" if layer else key


class _Pickled:
    """A file of torch.save as safetensors.safe_open gives one: tensors alone, mapped where the file can be."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        load = partial(torch.load, path, map_location="cpu", weights_only=True)
        try:
            try:
                state = load(mmap=True)
            except RuntimeError:  # of before torch 1.6: no zip
                state = load()
        except (ArithmeticError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)} is no state_dict of torch.save: {_first_line(error)}") from None
        except pickle.UnpicklingError as error:
            reason = "holds more than tensors" if "weights_only" in str(error) else f"is damaged: {_first_line(error)}"
            raise ValueError(f"{os.fspath(path)} {reason}") from None
        if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
            raise ValueError(f"{os.fspath(path)} is no state_dict: expected tensors by their names")
        self._state = {str(name): tensor for name, tensor in state.items()}

    def keys(self) -> list[str]:
        return list(self._state)

    def metadata(self) -> dict[str, str]:
        return {}

    def get_tensor(self, name: str) -> Tensor:
        return self._state[name].detach().clone(memory_format=torch.contiguous_format)

    def get_slice(self, name: str) -> Any:
        return SimpleNamespace(get_shape=lambda: list(self._state[name].shape))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def open_tensors(path: str | os.PathLike[str]) -> Any:
    """safetensors.safe_open, or the like of a file of torch.save; ValueError with the name of one that is not whole."""
    if Path(path).suffix == ".bin":
        return _Pickled(path)
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)} is no safetensors file, or was cut off: {error}") from None


#: Stems of the files, or of the index, of a whole model; where there is none, what files of a folder are not of it.
_WHOLE = ("model", "diffusion_pytorch_model")
_NO_MODEL = ("adapter_*.safetensors", "consolidated*.safetensors")
#: Ends of the names of tensors that are another library's, and whose.
_OTHERS = {
    "qweight": "gptq or awq", "g_idx": "gptq", "SCB": "bitsandbytes", "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes", "quant_state.bitsandbytes__nf4": "bitsandbytes",
    "quant_state.bitsandbytes__fp4": "bitsandbytes", "weight_format": "bitsandbytes", "_weight_qdata": "torchao",
    "_weight_scale": "torchao", "weight_packed": "compressed-tensors", "compressed": "compressed-tensors",
    "bitmask": "compressed-tensors", "weight_scale_inv": "fp8 in blocks", "weight_scale": "fp8 or int8, with scales",
    "W_q": "hqq", "weight._data": "quanto", "codebooks": "aqlm",
}  # fmt: skip


class Checkpoint:
    """The tensors of a safetensors file or of a folder of them, read when asked for; a context manager.

    Of a folder without any those of its pytorch_model.bin, of which nothing but tensors is loaded.

    The empty weights beside packed ones, which stop readers without macko, are not among them.

    Args:
        by_names: whether packed layers may be told by the names of their tensors alone; `unnamed` are those.

    Attributes:
        layers: of each packed layer its format and sizes.
        unnamed: packed layers of which the files do not say these; a layer of the model's size can read them.
        checksums: CRC-32 of weights that were packed, by the name of the dense one, where the files say them.
        shared: for each name that is not in the file, the name of the tensor that it shares.
        config: config.json of a folder, else {}.
    """

    def __init__(self, path: str | os.PathLike[str], *, by_names: bool = False) -> None:
        self.path = Path(path)
        self.config: dict[str, Any] = {}
        files = [self.path]
        if self.path.is_dir():
            files = _files_of(self.path)
            if (config := self.path / "config.json").exists():
                self.config = _json(config.read_text(encoding="utf-8"), config)
        elif self.path.name.endswith(".index.json"):
            files = _files_of_index(self.path)
        if not files:
            raise FileNotFoundError(f"{self.path} has no *.safetensors, nor a pytorch_model.bin")
        self._slid: Slid | None = None
        note = (self.path if self.path.is_dir() else self.path.parent) / NOTE
        if note.exists() and self.path.is_dir():
            with named(self.path):
                self._slid = Slid(_json(note.read_text(encoding="utf-8"), note), self.config)
        about: dict[str, Any] = {}
        self._files: dict[str, Any] = {}
        self._torchao = False
        self._paths: dict[str, Path] = {}
        self.checksums: dict[str, Any] = {}
        with named(self.path, *_BROKEN):
            for name in files:
                file = open_tensors(name)
                self._files |= dict.fromkeys(file.keys(), file)
                self._paths |= dict.fromkeys(file.keys(), name)
                metadata = file.metadata() or {}
                self._torchao |= any("_type" in text and "Tensor" in text for text in metadata.values())
                if "crc32" in metadata:
                    self.checksums |= _json(metadata["crc32"], name)
                if "macko" in metadata:
                    about = _json(metadata["macko"], name)
        quantization = {} if (given := self.config.get("quantization_config")) is None else given
        if not isinstance(quantization, dict):
            raise ValueError(f"{self.path}: quantization_config is {quantization!r}, expected a JSON object")
        self._method = quant_method(quantization)
        if self._method == "macko":
            about = quantization
        described = self._described()
        if about == described == {} and not by_names and not self.path.is_dir() and self._is_of_sparse_folder():
            raise ValueError(f"{self.path}: what it holds is in config.json beside it: give the folder")
        if about == described == {} and not self.path.is_dir() and note.exists():
            raise ValueError(f"{self.path}: {note.name} beside it says how its weights are slid: give the folder")
        if about != {}:
            check_about(about, str(self.path))
        self.layers: dict[str, dict[str, Any]] = described | dict(about.get("layers") or {})
        self.unnamed = self._undescribed() if by_names else []
        for weight in [join(layer, "weight") for layer in self.layers]:
            if weight in self._files and 0 in self.shape(weight):
                del self._files[weight]
        for stack in [name for name in self._files if name.rpartition(".")[2] in PROJECTIONS]:
            if 0 in self.shape(stack):
                del self._files[stack]
        self.shared: dict[str, str] = dict(about.get("shared") or {})

    def _described(self) -> dict[str, dict[str, Any]]:
        """What the _extra_state of each layer says that has one of macko's."""
        found = {}
        for key in [key for key in self._files if f".{key}".endswith("._extra_state")]:
            layer = key.rpartition(".")[0]
            size = self.shape(key)
            if len(size) != 1 or size[0] > 2**16 or (extra := self[key]).dtype != torch.uint8:
                continue  # of another module
            with contextlib.suppress(RecursionError, ValueError):
                about = json.loads(bytes(extra.tolist()))
                if isinstance(about, dict) and "format" in about:
                    found[layer] = about
                    del self._files[key]
        check_about({"version": VERSION, "layers": found}, str(self.path))
        return found

    def _undescribed(self) -> list[str]:
        """Other layers that have the tensors of a canonical weight, by their names."""
        ends = [key.rpartition(".")[0] for key in sorted(self._files) if f".{key}".endswith(".deltas")]
        return [
            layer
            for layer in ends
            if layer not in self.layers and all(join(layer, name) in self._files for name in MackoWeight.tensor_names)
        ]

    def quantised_by(self, names: Collection[str] = ()) -> str:
        """Which other library's way of quantising the files are in, or nothing; `names`: what the model has."""
        if self._method not in ("", "macko"):
            return self._method
        if self._torchao:
            return "torchao"
        foreign = (name for name in self._files if name not in names)
        return next((_OTHERS[end] for name in foreign for end in _OTHERS if f".{name}".endswith(f".{end}")), "")

    def _is_of_sparse_folder(self) -> bool:
        """Whether a file has the empty weights that stand beside packed ones, and a config.json that is macko's."""
        config = self.path.with_name("config.json")
        if not config.exists() or not any(0 in self.shape(n) for n in self._files if n.endswith("weight")):
            return False
        quantization = _json(config.read_text(encoding="utf-8"), config).get("quantization_config")
        return isinstance(quantization, dict) and quantization.get("quant_method") == "macko"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.clear()  # the last references to the files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise ValueError(f"there is no tensor {name}")
        with named(self.path, *_BROKEN):
            tensor = self._files[name].get_tensor(name)
        if self._slid is None:
            return tensor
        with named(self.path):
            return self._slid.undo(name, tensor)

    @property
    def is_slid(self) -> bool:
        """Whether it is SlideSparse's, whose weights only this reader gives as they were."""
        return self._slid is not None and self._slid.is_slid

    def by_file(self) -> Iterator[tuple[Path, list[str]]]:
        """Each file and the names of its tensors, the layers in the order of their numbers."""
        names: dict[Path, list[str]] = {}
        for name in self:
            names.setdefault(self._paths[name], []).append(name)
        yield from sorted(names.items())

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        found = tuple(self._files[name].get_slice(name).get_shape())
        if self._slid is None:
            return found
        with named(self.path):
            return self._slid.shape(name, found)

    def packed(self, layer: str, device: torch.device | None = None) -> PackedWeight:
        """The validated packed weight of a layer; ValueError with the layer's name where it is none."""
        with named(f"{self.path}: layer {layer}", KeyError, ValueError):
            kind, sizes, names = saved_as(self.layers[layer])
            weight = kind(**{name: self[join(layer, name)] for name in names}, **sizes)  # type: ignore[arg-type]
            weight = weight if device is None else weight.to(device)
            weight.validate()
        return weight


#: Of the types of tensors the names in safetensors files; not of 4 bits, whose shapes files count otherwise.
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.complex64: "C64",
}  # fmt: skip
#: Bytes of a header that safetensors reads.
MOST_HEADER = 100_000_000
#: Bytes that a tensor's entry in the header takes beside its name: 77 but for its shape.
_ENTRY = 160


class FolderWriter:
    """Writes a folder: its files, each a tensor at a time, and then its index and config.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[str, str] = {}
        self.size = 0
        folder.mkdir(exist_ok=True)

    def add(
        self,
        name: str,
        tensors: Iterable[tuple[str, Tensor]],
        may_come: Iterable[str],
        checksums: Mapping[str, int] | None = None,
    ) -> None:
        """Writes a file of tensors as they come, and none where none comes. One is in memory at a time.

        The header comes first in a file and is known last: room is left for it, and what is left of that are spaces.
        Tensors of an odd size follow at the end, so that all are aligned: of a packed layer its list.

        Args:
            may_come: at least the names that will come.
            checksums: CRC-32 by the name of the weight, complete after the last tensor.
        """
        room = 512 + sum(2 * len(json.dumps(key)) + _ENTRY for key in may_come) & ~63
        if room > MOST_HEADER:
            raise ValueError(f"{name}: its header may take {room:,} bytes, of at most {MOST_HEADER:,}: use more files")
        about: dict[str, Any] = {}
        small: list[tuple[str, Tensor]] = []
        with open(self.folder / name, "wb") as file:
            file.seek(8 + room)

            def write(key: str, tensor: Tensor) -> None:
                if (kind := TYPES.get(tensor.dtype)) is None:
                    raise ValueError(f"{key} is {tensor.dtype}, which macko does not write")
                begin = file.tell() - 8 - room
                file.write(_content(tensor).data)
                places = [begin, begin + tensor.nbytes]
                about[key] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": places}

            for key, tensor in tensors:
                if tensor.nbytes % 8:
                    small.append((key, tensor))
                else:
                    write(key, tensor)
            for key, tensor in sorted(small, key=lambda pair: -pair[1].element_size()):
                write(key, tensor)
            size = file.tell() - 8 - room
            noted = {"crc32": json.dumps(checksums)} if checksums else {}
            header = json.dumps({"__metadata__": {"format": "pt", **noted}, **about}, separators=(",", ":")).encode()
            if len(header) > room:
                raise ValueError(f"{file.name}: its header takes {len(header)} bytes, {room} were left for it")
            file.seek(0)
            file.write(room.to_bytes(8, "little") + header.ljust(room))
        if not about:
            (self.folder / name).unlink()
        self.places |= dict.fromkeys(about, name)
        self.size += size

    def end(self, config: dict[str, Any]) -> None:
        if {*self.places.values()} != {"model.safetensors"}:
            about = {"metadata": {"total_size": self.size}, "weight_map": self.places}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(about, indent=2))
        (self.folder / "config.json").write_text(json.dumps(config, indent=2))


def on_disk(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The tensors on the CPU, mapped from one file in a folder, which is gone with the last of them."""
    ends = list(itertools.accumulate((tensor.nbytes + 63 & ~63 for tensor in tensors.values()), initial=64))
    path = folder / "mapped"
    with open(path, "wb") as file:
        for tensor, begin in zip(tensors.values(), ends, strict=False):
            file.seek(begin)
            file.write(_content(tensor).data)
        file.truncate(ends[-1])
    content = torch.from_file(str(path), shared=False, size=ends[-1], dtype=torch.uint8).numpy()  # keeps no file open
    path.unlink()
    return {
        # Each with a storage of its own: what shares one is taken for tied, and copied.
        name: torch.from_numpy(content[begin : begin + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
        for (name, tensor), begin in zip(tensors.items(), ends, strict=False)
    }


def _content(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()  # type: ignore[no-any-return]


def quant_method(about: Any) -> str:
    """Whose way a quantization_config is of, a dict as in config.json or an object; nothing where there is none."""
    get = about.get if isinstance(about, dict) else lambda key: getattr(about, key, None)
    method = get("quant_method")
    bits = next((f"bitsandbytes in {bits} bits" for bits in (4, 8) if get(f"load_in_{bits}bit")), "")
    return str(getattr(method, "value", method) or bits)


def check_whole(model: nn.Module, missing: set[str], unexpected: set[str], where: str | os.PathLike[str]) -> None:
    """ValueError where no file has a weight of a model, or one that a scale goes with: readers only warn of that.

    Args:
        missing: names that the reader left as they were made, at random; tied ones and those that are never saved are
            none.
        unexpected: names of the files that it did not use.
    """
    unused = sorted(unexpected)
    names = [name for tensors in (model.named_parameters(), model.named_buffers()) for name, _ in tensors]
    if missing:
        first = next((name for name in names if name in missing), min(missing))
        others = f" and {len(missing) - 1} more of the model's weights" if len(missing) > 1 else ""
        like = next((name for name in unused if name.endswith(f".{first}")), "")
        hint = f"; they have {like}: save the model without what wraps it" if like else ""
        hint = hint or (f"; they have {unused[0]}, which it has not" if unused else "")
        raise ValueError(f"{os.fspath(where)}: its files lack {first}{others}{hint}")
    weights = {
        *names,
        *(join(name, "weight") for name, module in model.named_modules() if isinstance(module, nn.Linear)),
    }
    for name in unused:
        weight, scale, _ = name.partition("_scale")
        if scale and weight in weights:
            raise ValueError(f"{os.fspath(where)}: {weight} is quantised: its files have {name}, which nobody applies")


def _files_of(folder: Path) -> list[Path]:
    """The files of the model that lies in a folder, beside which there may be adapters, or the same model again."""
    for stem in _WHOLE:
        if (index := folder / f"{stem}.safetensors.index.json").exists():
            return _files_of_index(index)
        if (whole := folder / f"{stem}.safetensors").exists():
            return [whole]
    if len(indexes := list(folder.glob("*.safetensors.index.json"))) == 1:
        return _files_of_index(indexes[0])
    files = sorted(folder.glob("*.safetensors"))
    left = [file for file in files if not any(file.match(pattern) for pattern in _NO_MODEL)]
    if files and not left and all(file.match(_NO_MODEL[0]) for file in files):
        raise FileNotFoundError(f"{folder} holds adapters alone ({files[0].name}), and no model")
    if files:
        return left or files
    if (index := folder / "pytorch_model.bin.index.json").exists():
        return _files_of_index(index)
    return [whole] if (whole := folder / "pytorch_model.bin").exists() else []


def _files_of_index(index: Path) -> list[Path]:
    names = _json(index.read_text(encoding="utf-8"), index).get("weight_map", {})
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index}: weight_map is {names!r}, expected a file's name for each tensor")
    return sorted({index.parent / Path(name).name for name in names.values()})


@contextlib.contextmanager
def named(where: object, *kinds: type[Exception]) -> Iterator[None]:
    """A ValueError, or an error of these kinds instead, as one that says where before its first line."""
    kinds = kinds or (ValueError,)
    try:
        yield
    except kinds as error:
        raise ValueError(f"{where}: {_first_line(error)}") from None


#: What safetensors, or torch about a tensor's shape, says of a broken file.
_BROKEN = (RuntimeError, TypeError, SafetensorError)


def _json(text: str, where: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {value!r}")
    return value


def _make_sparse(model: nn.Module, name: str, packed: PackedWeight | None = None) -> nn.Module:
    """Puts a SparseLinear in the place of the linear layer of this name: empty, or with its weight."""
    if (layer := submodule(model, name)) is None:
        raise ValueError(f"the file has a packed layer {name}, the model has no such module")
    if isinstance(layer, SparseLinear):
        return model
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"the file has a packed layer {name}, in the model it is a {type(layer).__name__}")
    if reason := unsupported(layer.weight.dtype, layer.weight.device):
        raise ValueError(f"the file has a packed layer {name}, which the model cannot hold: {reason}")
    if packed is None:
        packed = MackoWeight.zeros(layer.out_features, layer.in_features, layer.weight.dtype, layer.weight.device)
    elif packed.shape != layer.weight.shape:
        raise ValueError(
            f"the file has a packed layer {name} of shape {list(packed.shape)}, the model {list(layer.weight.shape)}"
        )
    sparse = with_hooks(SparseLinear.from_packed(packed, layer.bias, options=AUTO).train(layer.training), layer)
    if not name:
        return sparse
    for place, module in list(model.named_modules(remove_duplicate=False)):
        if module is layer:
            model.set_submodule(place, sparse)
    return model


def _without_sharing(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Contiguous tensors with memory of their own, and of each name left out the name that has its content."""
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    views: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; safetensors files hold tensors only")
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and view in views:
            shared[name] = views[view]
            continue
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone().contiguous() if storage in storages else tensor.detach().contiguous()
        views[view] = name
        if tensor.numel():
            storages.add(storage)
    return tensors, shared
