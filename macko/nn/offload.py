"""offloadable_: packed layers that offloaders move between a GPU, the CPU and disk, as accelerate's and diffusers' do.

Offloaders move Parameters, and what a state_dict has under a module's own names. So such a layer has its packed tensors
as frozen Parameters of bytes, and a state_dict of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..weights import FORMATS, PackedWeight
from ..weights.saved import state_of, within
from .experts import PackedStack
from .find import check_model
from .linear import SparseLinear, as_extra_state, unsupported
from .merge import split_

#: Within as_in_files state_dicts have of each layer what files have, as before offloadable_, and not what it holds.
_AS_IN_FILES: ContextVar[bool] = ContextVar("_AS_IN_FILES", default=False)
as_in_files = partial(within, _AS_IN_FILES)
#: What products want of the addresses of a weight's tensors.
_ALIGNMENT = 16


class OffloadableLinear(SparseLinear):
    """A SparseLinear after offloadable_: its packed tensors are frozen Parameters of uint8, under the same names.

    It keeps its format wherever it is moved. Its state_dict has these bytes, and how to read them (`_extra_state`);
    that of any other SparseLinear can be loaded too. A product on the CPU unpacks, and is slow.
    """

    _types: dict[str, torch.dtype]  # of the packed tensors

    def _hold(self, packed: PackedWeight) -> None:
        tensors = packed.tensors()
        self._format, self._sizes, self._header = type(packed), packed.sizes(), tuple(packed.header)
        self._types, self._buffers = {name: tensor.dtype for name, tensor in tensors.items()}, {}
        for name in [name for name in self._parameters if name != "bias" and name not in tensors]:
            del self._parameters[name]
        for name, tensor in tensors.items():
            held, content = self._parameters.get(name), tensor.detach().contiguous().view(torch.uint8)
            if held is not None and held.device.type == content.device.type != "meta":
                held.data = content  # offloaders know the Parameter
            else:
                self.register_parameter(name, nn.Parameter(content, requires_grad=False))

    def _held(self) -> dict[str, Tensor]:
        held = {}
        for name, dtype in self._types.items():
            content = self._parameters[name]
            assert content is not None
            if not torch.compiler.is_compiling() and content.device.type == "cpu" and content.data_ptr() % _ALIGNMENT:
                content = content.clone()  # type: ignore[assignment]  # as safetensors maps it
            held[name] = content.view(dtype)
        return held

    def _note_content(self) -> None:
        self._copied = None

    @property
    def _rechooses(self) -> None:
        return None

    def _pack_anew(self, dense: Tensor) -> None:
        raise RuntimeError(
            "SparseLinear: its weight cannot change after macko.offloadable_, as offloaders keep copies of it: fuse "
            "adapters before that call"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseLinear:
        if fn(torch.empty(0, dtype=torch.uint8, device=self.device)).dtype != torch.uint8:
            raise TypeError("SparseLinear: packed bytes cannot be cast; use .to(dtype), not .type()")
        target = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if target.dtype != self.dtype:
            if reason := unsupported(target.dtype, target.device):
                raise TypeError(f"SparseLinear: the weight cannot move: {reason}")
            if self.device.type == "meta":
                raise RuntimeError(
                    "SparseLinear: the weight is offloaded, and cannot be cast: cast the model before that"
                )
            self._hold(self.packed.to(dtype=target.dtype))
        return nn.Module._apply(self, fn, recurse)  # type: ignore[return-value]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not _AS_IN_FILES.get():
            nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
            return
        if self.device.type == "meta":
            raise RuntimeError(
                f"{prefix.removesuffix('.')}: its weight is offloaded: take the offloader's hooks away before the "
                "model is saved (accelerate.hooks.remove_hook_from_module(model, recurse=True))"
            )
        SparseLinear.from_packed(self.packed, self.bias)._save_to_state_dict(destination, prefix, keep_vars)

    def get_extra_state(self) -> Tensor:
        """How to read the held bytes, as those of a JSON text."""
        types = {name: str(dtype).removeprefix("torch.") for name, dtype in self._types.items()}
        return as_extra_state({"held": self.format, "types": types, **self._sizes})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Takes what such a layer holds, or any state that a SparseLinear takes."""
        own = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        assigned = bool(local_metadata.get("assign_to_params_buffers"))
        try:
            packed = self._of_held(own, prefix) or self._loaded(state_of(state_dict, prefix), assigned)[0]
            if packed is not None and self.device.type != "meta":
                packed = packed.to(self.device, None if assigned else self.dtype)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{prefix.removesuffix('.') or 'SparseLinear'}: {error}")
            return
        known = {*state_of(state_dict, prefix), *self._types, "bias"}
        missing: list[str] = []
        bias = {key: value for key, value in own.items() if key == f"{prefix}bias"}
        nn.Module._load_from_state_dict(self, bias, prefix, local_metadata, strict, missing, [], error_msgs)
        missing_keys += [key for key in missing if key == f"{prefix}bias"]
        if packed is None:
            missing_keys += [prefix + name for name in self._view.names_in_files]
        else:
            copied = {name: t if assigned else t.clone() for name, t in packed.tensors().items()}
            self._hold(packed.replace(**copied))
        if strict:
            unexpected_keys += [key for key in own if key.removeprefix(prefix) not in known]

    @staticmethod
    def _of_held(own: dict[str, Any], prefix: str) -> PackedWeight | None:
        """The weight of a state of such a layer; None where it is another's. ValueError: it is not whole, or broken."""
        try:
            about = json.loads(bytes(own[f"{prefix}_extra_state"].tolist()))
            kind = FORMATS[about.pop("held")]
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        types = about.pop("types")
        if missing := [name for name in kind.tensor_names if prefix + name not in own]:
            raise ValueError(f"the state has no {', '.join(missing)} of its {kind.format} weight")
        tensors = {name: own[prefix + name].detach().contiguous() for name in kind.tensor_names}
        try:
            packed = kind(**{name: t.view(getattr(torch, types[name])) for name, t in tensors.items()}, **about)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"_extra_state does not say what the held weight is: {error}") from None
        if packed.device.type != "meta":
            packed.validate()
        return packed


class Offloadable(NamedTuple):
    """What offloadable_ tells of the whole model.

    Attributes:
        layers: packed layers in it.
        nbytes: of all its parameters and buffers.
        pinned: what these take in pinned memory, one by one: torch rounds each up to a power of two, unless
            PYTORCH_ALLOC_CONF says pinned_max_round_threshold_mb.
    """

    layers: int
    nbytes: int
    pinned: int


def offloadable_(model: nn.Module) -> Offloadable:
    """Makes the packed layers of a model such that offloaders move them, in place.

    For cpu_offload, disk_offload and dispatch_model of accelerate, and of diffusers enable_sequential_cpu_offload and
    group offloading with streams or to disk, which refuse packed layers before this call. Call it once the model is
    packed and adapters are fused, before the offloader. Merged layers are split; formats stay as they are from then on.

    Raises:
        TypeError: the model is none.
        ValueError: an offloader has the model already, or it has packed stacks of experts; nothing has changed.
    """
    check_model(model, "offloadable_")
    for name, module in model.named_modules():
        hooks = vars(module).get("_diffusers_hook")
        moved = isinstance(module, SparseLinear) and "_hf_hook" in vars(module)
        if moved or (hooks is not None and hooks.get_hook("group_offloading") is not None):
            raise ValueError(
                f"offloadable_: an offloader has {name or 'the model'} already: call offloadable_ before it"
            )
        if isinstance(module, PackedStack):
            raise ValueError(f"offloadable_: {name} is a packed stack of experts, which offloaders cannot move yet")
    split_(model)
    layers = {id(module): module for module in model.modules() if isinstance(module, SparseLinear)}
    for layer in layers.values():
        if type(layer) is SparseLinear:
            packed = layer.packed
            layer.__class__ = OffloadableLinear
            layer._copied = layer._options = None
            layer._hold(packed)
    sizes = [tensor.nbytes for tensor in (*model.parameters(), *model.buffers())]
    return Offloadable(len(layers), sum(sizes), sum(1 << (size - 1).bit_length() for size in sizes if size))


def check_offloadable(model: nn.Module, what: str) -> None:
    """ValueError, of an offload as which `what` names it, where the model has packed layers that it would not move."""
    for name, module in model.named_modules():
        if isinstance(module, (PackedStack, SparseLinear)) and not isinstance(module, OffloadableLinear):
            raise ValueError(
                f"{what}: {name or 'the layer'} is packed by macko, and would stay where it is: call "
                "macko.offloadable_(model) first, or macko.compress_(model, offload=True)"
            )
