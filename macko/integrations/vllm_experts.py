"""Experts of a mixture in vLLM: those that a rank has, all of a projection packed as one stack.

vLLM routes, multiplies by shared experts, and adds up what ranks have. Between, in the place of its fused kernel:

    expert_order        of each token and expert its place, sorted by expert
    linear_experts      with w13, [experts, 2I, hidden]: gate and up
    vLLM's activation
    linear_experts      with w2, [experts, hidden, I]: down
    expert_sum          of each token, by its weights

A launch each, and no host looks at the routing, so CUDA graphs hold for any. (Long prompts are no graphs: of large
experts the host then looks, and launches products of one by one.) Two ways in, as for linear layers (vllm.py):
    ArrivingExperts     a dense checkpoint: on meta until the last expert has come
    PackedExperts       a checkpoint with each expert's matrices packed by themselves: unpacked into that, as they come
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

from ..choose.auto import gains_by_slabs
from ..choose.options import Options
from ..choose.patterns import density_of
from ..nn.experts import PROJECTIONS, PackedStack, Stack, not_stacked
from ..nn.find import matching
from ..nn.linear import unsupported
from ..ops import expert_order, expert_sum
from ..weights import PackedWeight, saved_as
from . import stacked

if TYPE_CHECKING:
    from .vllm import MackoConfig

logger = init_logger("vllm.macko")

#: vLLM's names of what a rank has of gate and up, or up alone, and of down.
WEIGHTS = ("w13_weight", "w2_weight")
#: Activations of a gate that are told by their name alone.
_PLAIN = (MoEActivation.SILU, MoEActivation.GELU, MoEActivation.GELU_TANH)


#: Experts are multiplied one by one from so many tokens an expert in the mean on, where down alone has so many weights:
#: below, linear_experts reads them packed, or unpacks all of them for torch's grouped product.
MANY, LARGE = 128, 1 << 24


class OfLayer:
    """What each method of macko's knows of its layer."""

    def __init__(self, config: MackoConfig, name: str, dense: Any) -> None:
        self.config, self.name, self.dense = config, name, dense
        self.engine = get_current_vllm_config()

    def run_on(self, device: torch.device, options: Options) -> Options:
        """The options, or those of "auto" where their format does not run on the device, with a warning."""
        if not (reason := options.not_on(device)):
            return options
        logger.warning_once(f"format {reason}, the model is on {device.type}: held as auto")
        return Options(tokens=options.tokens, values=options.values)

    def note(self, is_packed: bool) -> None:
        """Tells vLLM's caches of compiled code what has become of the layer."""
        if isinstance(self.engine.additional_config, dict):
            self.engine.additional_config.setdefault(stacked.NAMESPACE, {})[self.name] = is_packed


def _packed_experts(config: MackoConfig, name: str) -> dict[str, dict[str, Any]]:
    """What config.json says of the packed ones of these experts, by number and projection: "3.gate_proj".

    Mixtral's are mlp.experts in transformers, block_sparse_moe.experts in vLLM: a layer has one mixture, whatever its
    name, and the config notes it for the names of tensors.
    """
    layer, _, block = name.removesuffix(".experts").rpartition(".")
    found = {}
    for key, about in config.layers.items():
        if not key.startswith(layer):
            continue
        if of_expert := re.fullmatch(r"\.(\w+)\.experts\.(\d+\.\w+)", key[len(layer) :]):
            found[of_expert[2]] = about
            if of_expert[1] != block:
                config.rename(rf"\.{of_expert[1]}\.experts\.", f".{block}.experts.")
    if found:  # the files have an empty tensor of each stack
        config.rename(rf"\.experts\.({'|'.join(PROJECTIONS)})$", None)
    return found


def method_of(config: MackoConfig, layer: Any, name: str) -> FusedMoEMethodBase | None:
    """ArrivingExperts or PackedExperts; None, which is vLLM's own, for what stays dense, and a line says why.

    Raises:
        ValueError: experts that are to be packed do not go with an option of the engine, or packed ones not with what
            the model does with them.
    """
    packed = _packed_experts(config, name)
    if not packed:
        ignored = matching(config.ignore, (name,))
        reason = f"ignored by {ignored[0]!r}" if ignored else ""
        if config.layers and not config.options.any_zeros:
            reason = "the folder has it dense"
        if reason := reason or _unknown(layer):
            logger.info("%s stays dense: %s", name, reason)
            return None
    elif reason := _unknown(layer):
        raise ValueError(f"{name} is packed, and {reason}, which macko does not do in vLLM: leave it dense")
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    for option, is_on in {
        "--enable-lora": moe.is_lora_enabled,
        "--enable-eplb": parallel.enable_eplb,
        "--data-parallel-size (all2all)": parallel.dp_size > 1 or parallel.use_all2all_kernels,
        "--prefill-context-parallel-size": parallel.pcp_size > 1,
    }.items():
        if is_on:
            raise ValueError(
                f"{name}: packed experts do not go with {option}: serve without it"
                + ("" if packed else ', or leave them dense by "ignore": ["lm_head", "experts"]')
            )
    return PackedExperts(config, name, layer, packed) if packed else ArrivingExperts(config, name, layer)


def _unknown(layer: Any) -> str:
    """What experts do beside products, their activation and a sum by weights; or nothing."""
    if layer.moe_config.has_bias:
        return "its experts have biases"
    if layer.apply_router_weight_on_input:
        return "weights of the routing go to the input"
    if layer.activation not in _PLAIN:
        return f"its activation is {layer.activation.value}"
    return "its gate is clamped" if getattr(layer, "swiglu_limit", None) is not None else ""


class ArrivingExperts(OfLayer, FusedMoEMethodBase):
    """Experts of a dense checkpoint: on meta until all that this rank has have come, then packed, or left dense."""

    uses_meta_device = True

    def __init__(self, config: MackoConfig, name: str, layer: Any) -> None:
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        OfLayer.__init__(self, config, name, UnquantizedFusedMoEMethod(layer.moe_config))
        self.options, self.least = config.options, config.min_sparsity
        #: Each expert's matrices in the stacks, where they are large; empty: none are multiplied by themselves.
        self.large: list[list[PackedWeight]] = []

    def create_weights(self, layer: nn.Module, *sizes: Any, **named: Any) -> None:
        with torch.device("meta"):
            self.dense.create_weights(layer, *sizes, **named)
        initialize_online_processing(layer)

    def maybe_roundup_sizes(self, hidden: int, inner: int, *more: Any) -> tuple[int, int]:
        """As vLLM's own kernel wants them, for what stays dense; what it fills up stays so."""
        rounded = self.dense.maybe_roundup_sizes(hidden, inner, *more)
        self.filled_up = ""
        if rounded != (hidden, inner):
            self.filled_up = f"vLLM's own kernel fills {(hidden, inner)} up to {rounded}"
        return rounded

    def maybe_make_prepare_finalize(self, *args: Any, **named: Any) -> None:
        """None: vLLM 0.25 asks for a kernel to run this method in."""

    def get_fused_moe_quant_config(self, layer: nn.Module) -> Any:
        return self.dense.get_fused_moe_quant_config(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if hasattr(layer, "macko_w13"):
            return  # vLLM calls for each layer while it loads, and for all of them at the end
        weights = {key: getattr(layer, key).data for key in WEIGHTS}
        try:
            if self.filled_up:
                raise ValueError(self.filled_up)
            stacks = {key: self._stack(w) for key, w in weights.items()}
            size, dense = (sum(t.nbytes for t in of) for of in ([s.packed for s in stacks.values()], weights.values()))
            if size >= dense:
                raise ValueError(f"packed it would take {size} bytes, dense {dense}")
        except ValueError as error:
            self.leave_dense(layer, str(error))
            return
        for key, stack in stacks.items():
            _put_weight(layer, key, weights[key].new_empty(0))  # other ranks' experts may still come, and want a loader
            layer.add_module(f"macko_{key.partition('_')[0]}", PackedStack(stack, persistent=False))
            logger.debug("%s.%s: %s, %s", self.name, key, list(stack.shape), stack.packed.label)
        if stack.packed.device.type == "cuda" and stack.rows * stack.packed.cols >= LARGE:
            self.look_at_each(layer)
        self.note(True)
        logger.info_once(f"macko packs experts: {stack.packed.label}")

    def _stack(self, w: Tensor) -> Stack:
        """[experts, rows, cols] packed. ValueError where they stay dense."""
        options = self.run_on(w.device, self.options)
        if reason := unsupported(w.dtype, w.device) or not_stacked(options, w.device):
            raise ValueError(reason)
        return stack_of(w, options, self.least)

    def look_at_each(self, layer: Any) -> None:
        """Lets long prompts multiply by each expert by itself."""
        stacks = layer.macko_w13.stack, layer.macko_w2.stack
        self.large = [[stack.expert(e) for stack in stacks] for e in range(stacks[0].experts)]

    def leave_dense(self, layer: Any, reason: str) -> None:
        """Hands the layer to vLLM's own method, whose call at the end does the rest."""
        whole = ""
        if self.moe.moe_parallel_config.tp_size > 1:
            whole = " (with --enable-expert-parallel a rank has whole experts)"
        logger.info("%s stays dense: %s%s", self.name, reason, whole)
        self.note(False)
        layer.quant_method = self.dense

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *shared: Any, **named: Any
    ) -> Tensor:
        # With expert parallelism another rank's experts are -1, and add nothing.
        ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids]
        order, places, ends = expert_order(ids, layer.local_num_experts)
        # The host may look at the routing where no graph is captured, as of long prompts.
        many = self.large and len(order) >= MANY * layer.local_num_experts
        if many and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            y = one_by_one(layer, self.large, x[order // ids.shape[1]], ends.tolist())
        else:
            y = layer.macko_w2(_gated(layer, layer.macko_w13(x, ends, order, ids.shape[1])), ends)
        return expert_sum(y, places, topk_weights.float())


def stack_of(w: Tensor, options: Options, least: float) -> Stack:
    """[experts, rows, cols] packed. ValueError where the format does not hold them, or zeros are too few for it."""
    density = density_of(w.reshape(-1, w.shape[2]))
    if density is not None and 1 - density < least and not options.any_zeros:
        raise ValueError(f"under {least:.0%} sparse it would not pay")
    return Stack.from_dense(w, options)


def _gains(device: torch.device) -> bool:
    """Whether the device multiplies dense12 faster than dense weights."""
    return device.type == "cuda" and gains_by_slabs(device)


def _put_weight(layer: Any, key: str, weight: Tensor) -> None:
    param = nn.Parameter(weight, requires_grad=False)
    param.weight_loader = layer.weight_loader  # type: ignore[attr-defined]
    setattr(layer, key, param)


def _gated(layer: Any, h: Tensor) -> Tensor:
    """vLLM's activation of gate and up."""
    gated = h.new_empty(len(h), h.shape[1] // 2)
    apply_moe_activation(layer.activation, gated, h)
    return gated


def one_by_one(layer: Any, experts: list[list[PackedWeight]], x: Tensor, ends: list[int]) -> Tensor:
    """Of rows of x [pairs, hidden] sorted by expert what their experts give, each by the kernel for many tokens."""
    inner, hidden = layer.macko_w13.rows, layer.macko_w2.rows
    y = x.new_zeros(len(x), hidden)
    for (first, last), (begin, end) in zip(experts, itertools.pairwise([0, *ends]), strict=True):
        if end > begin:
            gated = _gated(layer, first.linear(x[begin:end])[:, :inner].contiguous())
            y[begin:end] = last.linear(gated)[:, :hidden]
    return y


class PackedExperts(ArrivingExperts):
    """Experts of a packed checkpoint: each matrix is kept as it comes, and once all have they are that dense weight."""

    uses_meta_device = False

    def __init__(self, config: MackoConfig, name: str, layer: Any, packed: dict[str, dict[str, Any]]) -> None:
        super().__init__(config, name, layer)
        self.packed = {key: (about, saved_as(about)[2]) for key, about in packed.items()}
        self.in_planes = all(saved_as(about)[0].stands_for_dense() for about in packed.values())
        self.options, self.least = Options("dense12") if self.in_planes else config.layout_options, 0.0

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        if self.filled_up:
            raise ValueError(f"{self.name} is packed, and {self.filled_up}: choose another --moe-backend")
        keys = {"w1": layer.ckpt_gate_proj_name, "w3": layer.ckpt_up_proj_name, "w2": layer.ckpt_down_proj_name}
        ours = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        if {key.partition(".")[2] for key in self.packed} <= {*ours.values()}:
            # So macko names them, whatever the model's own files do.
            for shard, key in ours.items():
                self.config.rename(rf"\.experts\.(\d+)\.{key}\.", rf".experts.\1.{keys[shard]}.")
            keys = ours
        rank, ranks = self.moe.moe_parallel_config.tp_rank, self.moe.moe_parallel_config.tp_size
        inner = stacked.Share((intermediate_size_per_partition,), hidden_size, rank, ranks)
        outer = stacked.Share((hidden_size,), intermediate_size_per_partition, rank, ranks)
        self.shares = {"w1": inner, "w3": inner, "w2": outer}
        self.experts, self.dtype = num_experts, params_dtype
        #: Names in the files of this rank's matrices, by its number of the expert and vLLM's name of the projection.
        self.names = {
            (local, shard): f"{expert}.{key}"
            for expert in range(layer.global_num_experts)
            if (local := layer._map_global_expert_id_to_local_expert_id(expert)) >= 0
            for shard, key in keys.items()
        }
        self.missing = set()
        for place, name in self.names.items():
            parts = self.packed[name][1] if name in self.packed else []
            self.missing |= {(*place, part) for part in ("weight", *parts)}  # an empty weight, where there are parts
        self.found: dict[tuple[int, str], stacked.Stack | Tensor] = {
            place: stacked.Stack([self.packed[name][0]]) for place, name in self.names.items() if name in self.packed
        }
        for stem in ("w13", "w2"):
            for part in sorted({part for _, _, part in self.missing}):
                # Empty, with loaders of their own: only the files know the sizes.
                param = nn.Parameter(torch.empty(0, dtype=params_dtype), requires_grad=False)
                param.weight_loader = self._loader(layer, part)  # type: ignore[attr-defined]
                layer.register_parameter(f"{stem}_{part}", param)

    def _loader(self, layer: Any, part: str) -> Callable[..., bool]:
        def weight_loader(
            param: nn.Parameter,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool:
            place = (layer._map_global_expert_id_to_local_expert_id(expert_id), shard_id)
            if place not in self.names:
                return False  # another rank's
            try:
                self._add(place, part, loaded_weight, param.device)
            except ValueError as error:
                raise ValueError(f"{self.name}.{self.names[place]}: {error}") from None
            if not self.missing:
                self._take(layer, param.device)
            return True

        return weight_loader

    def _add(self, place: tuple[int, str], part: str, tensor: Tensor, device: torch.device) -> None:
        stack = self.found.get(place)
        if not isinstance(stack, stacked.Stack):
            if part != "weight":
                raise ValueError(f"the files have {part} of it, and config.json has it dense")
            self.found[place] = tensor.to(device, copy=True)
        elif part != "weight":
            stack.add((0,), part, tensor, device)
        elif tensor.numel():
            raise ValueError("the files hold its weight packed, and a dense one too")
        self.missing.discard((*place, part))

    def _take(self, layer: Any, device: torch.device) -> None:
        """Puts this rank's share of all experts into the layer, dense, and packs that."""
        for weight, shards in zip(WEIGHTS, (("w1", "w3"), ("w2",)), strict=True):
            experts = [
                torch.cat([self._dense((local, shard), device) for shard in shards]) for local in range(self.experts)
            ]
            _put_weight(layer, weight, torch.stack(experts))
        if self.in_planes and not _gains(device):
            self.leave_dense(layer, "dense products are faster here")
        else:
            super().process_weights_after_loading(layer)

    def _dense(self, place: tuple[int, str], device: torch.device) -> Tensor:
        found, share = self.found.pop(place), self.shares[place[1]]
        try:
            if isinstance(found, stacked.Stack):
                return found.unpack(share, self.dtype, device)
            return share.cut_dense(found).to(self.dtype)
        except ValueError as error:
            raise ValueError(f"{self.name}.{self.names[place]}: {error}") from None

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.missing:
            place = min(self.missing)
            raise ValueError(f"{self.name}: the checkpoint has no {self.names[place[:2]]}.{place[2]}, or not all of it")
