"""vLLM's quantization method "macko": `vllm serve FOLDER` of a folder that macko packed, or of a pruned dense one with
`--quantization macko`.

vLLM stacks q, k, v and gate, up, and a rank of tensor parallelism has its rows or columns. Two ways in, one product:
    Arriving   a dense checkpoint: vLLM hands over the layer's weight, stacked and cut, when its last shard has come
    Packed     a packed one: the pieces are cut and stacked here
Either way one layer at a time is dense, and a layer is one packed matrix in the end. A layer that vLLM multiplies by
kernels of its own (a mixture's router) is dense in the end: Unpacked, where the folder has it packed.

Imported by vLLM's plugin (macko.integrations.register_vllm) alone. The class of the config is pickled to the processes
of the engine by its name, so it is one of a module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

from ..choose.auto import pack
from ..choose.options import Options
from ..nn.convert import convert_weight
from ..nn.find import matching
from ..ops import multiply
from ..weights import MackoWeight, PackedWeight, saved_as, takes_any_weight
from ..weights.shards import joined
from .config import Settings

logger = init_logger("vllm.macko")  # vLLM shows loggers below its own name only

#: What layouts are chosen for where nobody says how many tokens there will be: in an engine they change at every step.
TOKENS = 8
#: What multiplies by the layer's quantization method. A layer with another forward (GateLinear, DeepSeek's fused QKV-A)
#: reads its weight itself, and has kernels of its own while its method is the unquantised one.
_FORWARDS = {kind.forward for kind in (ColumnParallelLinear, ReplicatedLinear, RowParallelLinear)}


@register_quantization_config("macko")
class MackoConfig(Settings, QuantizationConfig):
    """How a dense checkpoint is packed, and what config.json says of a packed one.

    `hf_overrides={"macko": {...}}` changes format, tokens, ignore, min_sparsity and values of either.

    Args:
        tokens: as in macko.sparsify_, but 8 by default.
        settings: of macko.integrations.config.Settings.
    """

    def __init__(self, tokens: int = TOKENS, **settings: Any) -> None:
        QuantizationConfig.__init__(self)
        self.tokens = tokens
        Settings.__init__(self, **settings)
        self.tied = False

    @classmethod
    def get_name(cls) -> str:
        return "macko"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]  # a float32 layer on a GPU stays dense

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # so that vLLM calls cls() for a dense folder

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MackoConfig:
        return cls(**cls.known(config))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        asked = getattr(hf_config, "macko", None) or {}
        self.__init__(**self.overridden(asked, 'hf_overrides["macko"]'))  # type: ignore[misc]
        self.tied = bool(hf_config is not None and hf_config.get_text_config().tie_word_embeddings)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)
        self.ignore = hf_to_vllm_mapper.apply_list(self.ignore)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        """Packed or Arriving; vLLM's own for what stays dense, and None, which is that too, for all but linear layers.

        Raises:
            ValueError: of layers that vLLM stacks some are packed and some are not, or experts are packed.
        """
        is_head = isinstance(layer, ParallelLMHead)
        if not is_head and not isinstance(layer, LinearBase):
            self._leave_experts(layer, prefix)
            return None
        dense = UnquantizedEmbeddingMethod() if is_head else UnquantizedLinearMethod()
        parent, _, last = prefix.rpartition(".")
        names = [f"{parent}.{name}".removeprefix(".") for name in self.packed_modules_mapping.get(last, [last])]
        has_kernels = not is_head and type(layer).forward not in _FORWARDS
        if self.layers:
            parts = {name: self.layers[name] for name in names if name in self.layers}
            if parts and len(parts) < len(names):
                others = ", ".join(name for name in names if name not in parts)
                raise ValueError(
                    f"{prefix} is one matrix in vLLM, of {', '.join(parts)}, packed, and {others}, dense: pack all of "
                    "them or none (ignore=...), or serve the dense model with --quantization macko"
                )
            if parts:
                return (Unpacked if has_kernels else Packed)(self, prefix, dense, list(parts.values()))
            if not takes_any_weight(self.options.format):
                return dense
        if ignored := matching(self.ignore, (prefix, *names)):
            logger.debug("%s stays dense: ignored by %r", prefix, ignored[0])
            return dense
        if has_kernels:
            logger.debug("%s stays dense: a %s has kernels of its own", prefix, type(layer).__name__)
            return dense
        return dense if is_head and self.tied else Arriving(self, prefix, dense)

    def _leave_experts(self, layer: nn.Module, prefix: str) -> None:
        """ValueError where a mixture's experts are packed; else a line that they stay dense."""
        if not hasattr(layer, "moe_config"):
            return
        if packed := next((name for name in self.layers if name.startswith(f"{prefix}.")), None):
            raise ValueError(f"{packed} is packed, and macko has no kernels for experts in vLLM: leave them dense")
        logger.info("%s stays dense: macko packs linear layers, not experts", prefix)


#: Packed layers of this process by number. Compiled code knows a layer by its number alone, which is an input. Layers
#: of the same shape are then the same code, which vLLM compiles once: of a 7B 3 pieces, in place of 33 that differ in
#: sizes, for which half a minute was not enough on an H200 (dense: 7 s).
_LAYERS: list[weakref.ref[nn.Module]] = []
_OPS = torch.library.Library("macko_vllm", "DEF")
_OPS.define("linear(Tensor x, Tensor number, int rows, Tensor? bias) -> Tensor")


def _linear(x: Tensor, number: Tensor, rows: int, bias: Tensor | None) -> Tensor:
    layer: Any = _LAYERS[int(number)]()
    return layer.quant_method.product(layer, x, bias)


def _as_linear(x: Tensor, number: Tensor, rows: int, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


for _device in ("CPU", "CUDA"):
    _OPS.impl("linear", _linear, _device)
torch.library.register_fake("macko_vllm::linear", _as_linear, lib=_OPS)


class _Method(LinearMethodBase):
    """Holds one layer's weight packed, this rank's part of it, and multiplies."""

    def __init__(self, config: MackoConfig, name: str, dense: LinearMethodBase) -> None:
        self.config, self.name, self.dense = config, name, dense
        self.names: tuple[str, ...] = ()
        self.header: list[int] = []
        self.engine = get_current_vllm_config()

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.macko_vllm.linear(x, layer.macko_number, self.header[1], bias)
        return self.product(layer, x, bias)

    def product(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        packed = [getattr(layer, name) for name in self.names]
        return multiply(x, packed, self.header, bias)

    def dequantize_weight(self, layer: nn.Module) -> Tensor:
        return torch.ops.macko.dense([getattr(layer, name) for name in self.names], self.header)

    def options(self, device: torch.device) -> Options:
        """What the layout is chosen by on the device."""
        options = self.config.options
        if not (reason := options.not_on(device)):
            return options
        logger.warning_once(f"format {reason}, the model is on {device.type}: held as auto")
        return Options(tokens=options.tokens, values=options.values)

    def hold(self, layer: nn.Module, packed: PackedWeight) -> None:
        """Puts the packed tensors into the layer: no parameters, for no loader is to fill them."""
        for name, param in list(layer.named_parameters(recurse=False)):
            if name != "bias" and param.numel() + (name != "weight"):
                delattr(layer, name)
        for name, tensor in packed.tensors().items():
            layer.register_buffer(f"macko_{name}", tensor, persistent=False)
        if not hasattr(layer, "weight"):  # an empty one: vLLM's adapters ask it for the device
            layer.weight = nn.Parameter(torch.empty(0, packed.cols, dtype=packed.dtype, device=packed.device), False)
        layer.register_buffer("macko_number", torch.tensor([len(_LAYERS)], device="cpu"), persistent=False)
        _LAYERS.append(weakref.ref(layer))
        self.names, self.header = tuple(f"macko_{name}" for name in packed.tensors()), packed.header
        self.note(True)
        logger.debug("%s: %s, %d bytes, %s", self.name, list(packed.shape), packed.nbytes, packed.label)
        logger.info_once(f"macko packs linear layers: {packed.label}")

    def note(self, is_packed: bool) -> None:
        """Tells vLLM's caches of compiled code what has become of the layer."""
        if isinstance(self.engine.additional_config, dict):
            self.engine.additional_config.setdefault("macko", {})[self.name] = is_packed


class Arriving(_Method):
    """The weight of a dense checkpoint: on meta until its last shard has come, then packed, or left dense."""

    uses_meta_device = True

    def create_weights(self, layer: nn.Module, *sizes: Any, **extra: Any) -> None:
        with torch.device("meta"):
            self.dense.create_weights(layer, *sizes, **extra)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.header:
            return  # vLLM calls for each layer while it loads, and for all of them at the end
        weight, least = layer.weight.data, self.config.min_sparsity
        row, sparse = convert_weight(self.name, weight, self.options(weight.device), least)
        if sparse is not None:
            self.hold(layer, sparse.packed)
            return
        logger.info("%s stays dense: %s", self.name, row.reason)
        self.note(False)
        layer.quant_method = self.dense  # to which vLLM's call at the end goes


class Packed(_Method):
    """A packed checkpoint: the tensors of each of its layers that are one here, cut and stacked once all have come."""

    def __init__(self, config: MackoConfig, name: str, dense: LinearMethodBase, parts: list[dict[str, Any]]) -> None:
        super().__init__(config, name, dense)
        self.parts = [saved_as(about) for about in parts]
        #: What has come, by vLLM's name of the place in the stack: "q", "k", "v", a number, several, or None for all.
        self.pieces: dict[Any, dict[str, Tensor]] = {}

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        self.cols, self.rows, self.dtype = input_size_per_partition, output_partition_sizes, params_dtype
        # Empty, with loaders of their own: only the files know the sizes. An empty weight is in the files too.
        for name in sorted({"weight"}.union(*(names for _, _, names in self.parts))):
            param = nn.Parameter(torch.empty(0, self.cols, dtype=params_dtype), requires_grad=False)
            param.weight_loader = self._loader(layer, name)  # type: ignore[attr-defined]
            layer.register_parameter(name, param)

    def _loader(self, layer: nn.Module, name: str) -> Callable[..., None]:
        def weight_loader(param: nn.Parameter, loaded: Tensor, shard: Any = None) -> None:
            if name != "weight":
                # A copy: a loader may use its memory again.
                self.pieces.setdefault(shard, {})[name] = loaded.to(param.device, copy=True)
            elif loaded.numel():
                raise ValueError(f"{self.name}: the files hold its weight packed, and a dense one too")
            if not self.header and self._complete():
                try:
                    self._take(layer, param.device)
                except ValueError as error:
                    raise ValueError(f"{self.name}: {error}") from None

        return weight_loader

    def _take(self, layer: nn.Module, device: torch.device) -> None:
        """Puts the weight into the layer, once all pieces of it have come."""
        self.hold(layer, self._stack(layer, device))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if not self.header:
            missing = f"{len(self.pieces)} of {len(self.parts)} packed layers" if self.pieces else "no packed layer"
            raise ValueError(f"{self.name}: the checkpoint has {missing} of it, or one that is not whole")

    def _complete(self) -> bool:
        if len(self.pieces) < len(self.parts):
            return False
        pieces = [self.pieces[shard] for shard in self._shards()]
        return all(piece.keys() >= set(names) for piece, (_, _, names) in zip(pieces, self.parts, strict=True))

    def _shards(self) -> list[Any]:
        """The keys of `pieces` in the order of the stack."""
        return sorted(self.pieces, key=lambda shard: self._places(shard)[0])

    def _places(self, shard: Any) -> list[int]:
        """Which of the stacked matrices vLLM means by a key of `pieces`."""
        if shard is None:
            return list(range(len(self.rows)))
        if isinstance(shard, str):
            return ["qkv".index(shard)]
        return list(shard) if isinstance(shard, tuple) else [shard]

    def _ours(self, layer: Any) -> Iterator[PackedWeight]:
        """This rank's parts of all pieces, which are let go, in the order of the stack."""
        for shard, (kind, sizes, names) in zip(self._shards(), self.parts, strict=True):
            piece = self.pieces.pop(shard)
            whole = kind(**{name: piece[name] for name in names}, **sizes)  # type: ignore[arg-type]
            if whole.dtype != self.dtype:
                whole = whole.to("cpu")  # a GPU has no kernels for float32
            whole.validate()
            yield from self._cut(layer, whole, self._places(shard))

    def _stack(self, layer: Any, device: torch.device) -> PackedWeight:
        """This rank's matrix."""
        cut = [part.to(device, self.dtype) for part in self._ours(layer)]
        options = self.options(device)
        if takes_any_weight(options.format) or options.in_bytes:  # which is for what the files hold dense
            options = Options(tokens=options.tokens)
        if len(cut) == 1 and cut[0].rows == sum(self.rows):
            # ec and slide are what somebody chose
            return pack(cut[0].to_macko(), options) if isinstance(cut[0], MackoWeight) or not options.again else cut[0]
        if (in_bytes := joined(cut, sum(self.rows))) is not None:
            return in_bytes
        dense = torch.cat([part.to_dense() for part in cut])
        return pack(nn.functional.pad(dense, (0, 0, 0, sum(self.rows) - len(dense))), options)

    def _cut(self, layer: Any, whole: PackedWeight, places: list[int]) -> list[PackedWeight]:
        """This rank's parts of what one layer of the checkpoint has for these places of the stack.

        Nothing is unpacked before it has the rows and columns that vLLM wants.
        """
        is_head = isinstance(layer, ParallelLMHead)
        rank, ranks = (0, 1) if is_head else (layer.tp_rank, layer.tp_size)
        if whole.cols not in (self.cols, self.cols * ranks):
            raise ValueError(f"the checkpoint has {whole.cols} columns, vLLM wants {self.cols} for each of {ranks}")
        first = rank * self.cols if whole.cols > self.cols else 0
        rows = self._head_rows(layer, whole) if is_head else self._stack_rows(layer, whole, places)
        part = whole.materialized().cut(1, first, first + self.cols)
        return [part.cut(0, start, stop) for start, stop in rows]

    def _head_rows(self, layer: Any, whole: PackedWeight) -> list[tuple[int, int]]:
        """This rank's rows of a head; behind its last row is padding."""
        start, stop = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
        if whole.rows < stop:
            raise ValueError(f"the checkpoint has {whole.rows} rows, vLLM wants {start} to {stop}")
        return [(start, stop)]

    def _stack_rows(self, layer: Any, whole: PackedWeight, places: list[int]) -> list[tuple[int, int]]:
        """This rank's rows for each of the places, or all of them at once."""
        rank, ranks = layer.tp_rank, layer.tp_size
        rows = [self.rows[place] for place in places]
        if whole.rows == sum(rows):
            return [(0, whole.rows)]
        # Several ranks may share a head of k and v.
        shared = [getattr(layer, "num_kv_head_replicas", 1) if place else 1 for place in places]
        wholes = [count * ranks // by for count, by in zip(rows, shared, strict=True)]
        if whole.rows != sum(wholes):
            raise ValueError(f"the checkpoint has {whole.rows} rows, vLLM wants {sum(rows)} for each of {ranks}")
        starts = [
            stop - size + rank // by * count
            for stop, size, by, count in zip(accumulate(wholes), wholes, shared, rows, strict=True)
        ]
        return [(start, start + count) for start, count in zip(starts, rows, strict=True)]


class Unpacked(Packed, UnquantizedLinearMethod):
    """Of a packed checkpoint what vLLM multiplies by kernels of its own: dense, and for vLLM unquantised."""

    def create_weights(self, layer: Any, *sizes: Any, **extra: Any) -> None:
        super().create_weights(layer, *sizes, **extra)
        self.dense.create_weights(layer, *sizes, **{**extra, "weight_loader": self._loader(layer, "weight")})

    def _take(self, layer: Any, device: torch.device) -> None:
        dense = torch.cat([part.to_dense().to(device, self.dtype) for part in self._ours(layer)])
        layer.weight.data.copy_(dense)
        for name in {name for _, _, names in self.parts for name in names}:
            delattr(layer, name)
        self.header = [0]  # it has come
        self.note(False)
        logger.debug("%s is dense: a %s has kernels of its own", self.name, type(layer).__name__)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        super().process_weights_after_loading(layer)
        self.dense.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.dense.apply(layer, x, bias)

    def dequantize_weight(self, layer: Any) -> Tensor:
        return layer.weight
