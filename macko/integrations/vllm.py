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

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

from ..choose.slide import Whole
from ..nn.convert import convert_weight
from ..nn.find import matching
from ..weights import PackedWeight
from . import stacked, vllm_experts
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

    `hf_overrides={"macko": {...}}` changes format, pattern, tokens, ignore, min_sparsity and values of either.

    Args:
        tokens: as in macko.sparsify_, but 8 by default; where layers are slide, or may be, a prompt's, 2048.
        settings: of macko.integrations.config.Settings.
    """

    def __init__(self, tokens: int | None = None, **settings: Any) -> None:
        QuantizationConfig.__init__(self)
        self.tokens = tokens
        Settings.__init__(self, **settings)
        if tokens is None and not self.slides:
            self.tokens = TOKENS
        self.tied = False
        self.renamed: dict[re.Pattern[str], str | None] = {}

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
        return cls(**cls.arguments(config))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        asked = getattr(hf_config, "macko", None) or {}
        self.__init__(**self.overridden(asked, 'hf_overrides["macko"]'))  # type: ignore[misc]
        self.tied = bool(hf_config is not None and hf_config.get_text_config().tie_word_embeddings)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)
        self.ignore = hf_to_vllm_mapper.apply_list(self.ignore)

    def get_cache_scale_mapper(self) -> Any:
        """vLLM asks for it when it loads, and gives tensors of files the names that it says."""
        from vllm.model_executor.models.utils import WeightsMapper

        return super().get_cache_scale_mapper() | WeightsMapper(orig_to_new_regex=self.renamed)

    def rename(self, pattern: str, name: str | None) -> None:
        """Notes that vLLM has another name for what files name so, or none."""
        self.renamed[re.compile(pattern)] = name

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Packed or Arriving, of experts likewise; vLLM's own for what stays dense, or None, which is that too.

        Raises:
            ValueError: of layers that vLLM stacks some are packed and some are not, or packed experts do not go with
                what is asked of the engine.
        """
        is_head = isinstance(layer, ParallelLMHead)
        if isinstance(layer, RoutedExperts):
            return vllm_experts.method_of(self, layer, prefix)
        if not is_head and not isinstance(layer, LinearBase):
            return None
        dense = UnquantizedEmbeddingMethod() if is_head else UnquantizedLinearMethod()
        names = stacked.names_of(prefix, self.packed_modules_mapping)
        has_kernels = not is_head and type(layer).forward not in _FORWARDS
        if self.layers:
            if layers := stacked.packed_of(prefix, names, self.layers):
                return (Unpacked if has_kernels else Packed)(self, prefix, dense, layers)
            if not self.options.any_zeros:
                return dense
        if ignored := matching(self.ignore, (prefix, *names)):
            logger.debug("%s stays dense: ignored by %r", prefix, ignored[0])
            return dense
        if has_kernels:
            logger.debug("%s stays dense: a %s has kernels of its own", prefix, type(layer).__name__)
            return dense
        return dense if is_head and self.tied else Arriving(self, prefix, dense)


class _Method(vllm_experts.OfLayer, LinearMethodBase):
    """Holds one layer's weight packed, this rank's part of it, and multiplies."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return stacked.linear(layer, x, bias)

    def dequantize_weight(self, layer: nn.Module) -> Tensor:
        return stacked.dense(layer)

    def hold(self, layer: nn.Module, packed: PackedWeight) -> None:
        """Puts the packed weight into the layer, and says so."""
        stacked.hold(layer, packed)
        self.note(True)
        logger.debug("%s: %s, %d bytes, %s", self.name, list(packed.shape), packed.nbytes, packed.label)
        logger.info_once(f"macko packs linear layers: {packed.label}")


class Arriving(_Method):
    """The weight of a dense checkpoint: on meta until its last shard has come, then packed, or left dense."""

    uses_meta_device = True

    def create_weights(self, layer: nn.Module, *sizes: Any, **extra: Any) -> None:
        self.whole = Whole()
        if self.config.options.may_slide:
            extra["weight_loader"] = self._looking(extra["weight_loader"])
        with torch.device("meta"):
            self.dense.create_weights(layer, *sizes, **extra)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if stacked.holds(layer):
            return  # vLLM calls for each layer while it loads, and for all of them at the end
        weight, least = layer.weight.data, self.config.min_sparsity
        try:
            options = self.whole.options(weight, self.run_on(weight.device, self.config.options))
            row, sparse = convert_weight(self.name, weight, options, least)
            reason = row.reason
        except ValueError as error:
            reason, sparse = str(error), None
        if sparse is not None:
            self.hold(layer, self.whole.packed(sparse.packed, weight))
            return
        logger.info("%s stays dense: %s", self.name, reason)
        self.note(False)
        layer.quant_method = self.dense  # to which vLLM's call at the end goes

    def _looking(self, loader: Callable[..., None]) -> Callable[..., None]:
        """A loader that looks at what it gets, the whole weight, before vLLM's takes this rank's part of it."""

        @functools.wraps(loader)
        def weight_loader(param: nn.Parameter, loaded: Tensor, *args: Any, **named: Any) -> None:
            if not param.is_meta:  # else vLLM only counts
                self.whole.add(loaded.to(param))
            return loader(param, loaded, *args, **named)

        return weight_loader


class Packed(_Method):
    """A packed checkpoint: the tensors of each of its layers that are one here, cut and stacked once all have come."""

    def __init__(self, config: MackoConfig, name: str, dense: LinearMethodBase, layers: list[dict[str, Any]]) -> None:
        super().__init__(config, name, dense)
        self.stack = stacked.Stack(layers)
        self.is_loaded = False

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
        self.rows, self.cols, self.dtype = output_partition_sizes, input_size_per_partition, params_dtype
        # Empty, with loaders of their own: only the files know the sizes. An empty weight is in the files too.
        for name in sorted({"weight"} | self.stack.names):
            param = nn.Parameter(torch.empty(0, self.cols, dtype=params_dtype), requires_grad=False)
            param.weight_loader = self._loader(layer, name)  # type: ignore[attr-defined]
            layer.register_parameter(name, param)

    def _loader(self, layer: nn.Module, name: str) -> Callable[..., None]:
        def weight_loader(param: nn.Parameter, loaded: Tensor, shard: Any = None) -> None:
            if name != "weight":
                self.stack.add(stacked.places_of(shard, len(self.rows)), name, loaded, param.device)
            elif loaded.numel():
                raise ValueError(f"{self.name}: the files hold its weight packed, and a dense one too")
            if not self.is_loaded and self.stack.is_complete:
                try:
                    self._take(layer, param.device)
                except ValueError as error:
                    raise ValueError(f"{self.name}: {error}") from None
                self.is_loaded = True

        return weight_loader

    def _take(self, layer: nn.Module, device: torch.device) -> None:
        """Puts the weight into the layer, once all of it has come."""
        options = self.run_on(device, self.config.layout_options)
        packed = self.stack.pack(self._share(layer), self.dtype, device, options)
        if isinstance(packed, PackedWeight):
            self.hold(layer, packed)
            return
        for name in self.stack.names:
            delattr(layer, name)
        layer.weight = nn.Parameter(packed, requires_grad=False)
        # The files have an empty weight, too, which may come last.
        layer.weight.weight_loader = self._loader(layer, "weight")  # type: ignore[attr-defined]
        layer.quant_method = self.dense  # to which vLLM's call at the end goes
        self.note(False)
        logger.info_once("macko unpacks linear layers here: dense products are faster")

    def _share(self, layer: Any) -> stacked.Share:
        """What this rank holds of the layer."""
        rows = tuple(self.rows)
        if isinstance(layer, ParallelLMHead):
            indices = layer.shard_indices
            return stacked.Share(rows, self.cols, window=(indices.org_vocab_start_index, indices.org_vocab_end_index))
        same = getattr(layer, "num_kv_head_replicas", 1)  # heads of k and v that several ranks share
        return stacked.Share(rows, self.cols, layer.tp_rank, layer.tp_size, (1, *[same] * (len(rows) - 1)))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if not self.is_loaded:
            raise ValueError(f"{self.name}: {self.stack.missing()}")


class Unpacked(Packed, UnquantizedLinearMethod):
    """Of a packed checkpoint what vLLM multiplies by kernels of its own: dense, and for vLLM unquantised."""

    def create_weights(self, layer: Any, *sizes: Any, **extra: Any) -> None:
        super().create_weights(layer, *sizes, **extra)
        self.dense.create_weights(layer, *sizes, **{**extra, "weight_loader": self._loader(layer, "weight")})

    def _take(self, layer: Any, device: torch.device) -> None:
        layer.weight.data.copy_(self.stack.unpack(self._share(layer), self.dtype, device))
        for name in self.stack.names:
            delattr(layer, name)
        self.note(False)
        logger.debug("%s is dense: a %s has kernels of its own", self.name, type(layer).__name__)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        super().process_weights_after_loading(layer)
        self.dense.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.dense.apply(layer, x, bias)

    def dequantize_weight(self, layer: Any) -> Tensor:
        return layer.weight
