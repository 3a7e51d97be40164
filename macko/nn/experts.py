"""SparseExperts: the experts of a mixture, all of a projection packed as one stack of matrices."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..choose.auto import slower_by_count, sparse11_of, too_many_listed
from ..choose.options import Options
from ..ops import expert_order, expert_sum, gated_experts, linear_experts
from ..weights import FORMATS, MackoWeight, PackedWeight, TileWeight
from ..weights.registry import ROUNDED_EXPERTS, not_a_stack
from ..weights.saved import check_tensors, said, stack_as
from ..weights.slab import SlabWeight
from .find import Filter, OwnExperts, matching
from .linear import NO_CONTENT, SparseLinear, as_extra_state, autocast_dtype, unsupported, with_hooks
from .report import LayerReport

#: What an experts module of transformers holds in three dimensions, in the order in which they are multiplied.
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
#: What transformers' use_experts_implementation notes on a module: then these say all that has to be known of it.
FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_INTERFACE = "transformers.integrations.moe"
NOT_OFFLOADED = "offloaders cannot move packed experts yet"
#: An expert begins at a row block of slabs.
ROW_BLOCK = 64


def is_experts(module: nn.Module) -> bool:
    """Whether transformers 5 runs this dense module by its experts interface, whatever model it is of."""
    flags = all(isinstance(getattr(module, name, None), bool) for name in FLAGS)
    runs_it = getattr(type(module).forward, "__globals__", {}).get("__name__") == _INTERFACE  # no subclass's own
    return (
        flags
        and runs_it
        and hasattr(module, "num_experts")
        and all(name in module._parameters for name in projections(module))
    )


def projections(experts: nn.Module) -> tuple[str, str]:
    """The names of an experts module's weights."""
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


@dataclasses.dataclass
class FoundExperts:
    """An experts module of a model that is dense, and why the caller leaves it out, or None."""

    name: str
    module: nn.Module
    left_out: str | None


def find_experts(model: nn.Module, ignore: Iterable[str], filter_fn: Filter | None) -> list[FoundExperts]:
    """Every dense experts module of the model; ignore and filter_fn as in find_linears."""
    ignore, found = (ignore,) if isinstance(ignore, str) else tuple(ignore), []
    for name, module in model.named_modules():
        if name and is_experts(module):
            ignored = matching(ignore, [name, *(f"{name}.{key}" for key in projections(module))])
            left_out = f"ignored by {ignored[0]!r}" if ignored else None
            if not ignored and filter_fn is not None and not filter_fn(module, name):
                left_out = "left out by filter_fn"
            if is_adapted(name):
                left_out = left_out or "an adapter of peft changes its weights: merge_and_unload() first"
            found.append(FoundExperts(name, module, left_out))
    return found


def is_adapted(name: str) -> bool:
    """Whether experts of this name are those that an adapter of peft changes."""
    return name.endswith(".base_layer")


def oriented(experts: nn.Module, name: str) -> Tensor:
    """[experts, out, in] of a projection, whichever way the dense module holds it."""
    return turned(experts, experts._parameters[name].detach())  # type: ignore[union-attr]


def turned(experts: nn.Module, weight: Tensor) -> Tensor:
    """A weight as the dense module holds it as [experts, out, in], or the other way round."""
    return weight.transpose(1, 2) if experts.is_transposed else weight


# ---- One packed matrix of all experts --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices [experts, rows, cols] as one packed matrix, each with its rows filled up to whole row blocks.

    Attributes:
        packed: [experts * filled rows, cols], in a format whose bytes are slabs.
    """

    packed: PackedWeight
    experts: int
    rows: int

    @classmethod
    def from_dense(cls, w: Tensor, options: Options) -> Stack:
        """Packs w [experts, rows, cols] where it is.

        Raises:
            ValueError: the format is for single matrices, or does not hold these.
        """
        experts, rows, cols = w.shape
        filled = nn.functional.pad(w, (0, 0, 0, -rows % ROW_BLOCK)).reshape(-1, cols)
        return cls(_pack(filled, options), experts, rows)

    @property
    def filled_rows(self) -> int:
        return self.packed.rows // max(1, self.experts)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.experts, self.rows, self.packed.cols

    def expert(self, e: int) -> PackedWeight:
        """Expert e's matrix, its rows filled up: its slabs where they are. Counts of entries stay the stack's.

        Waits for the device.
        """
        data, rows = self.packed.tensors()["data"], self.filled_rows
        offsets = self.packed.tensors().get("offsets")
        if offsets is None:
            return self.packed.replace(data=data.view(self.experts, -1)[e], rows=rows)
        slabs = SlabWeight.num_slabs(rows, self.packed.cols)
        own = offsets[e * slabs : (e + 1) * slabs + 1]
        begin, end, widest = torch.stack((own[0], own[-1], own.diff().max())).tolist()
        own_data = data[begin * 64 : end * 64]
        return self.packed.replace(data=own_data, offsets=own - begin, rows=rows, widest=widest)

    def to_dense(self) -> Tensor:
        return self.packed.to_dense().view(self.experts, self.filled_rows, self.packed.cols)[:, : self.rows]


def not_stacked(options: Options, device: torch.device | None = None) -> str:
    """Why experts are not packed in this format, or by "auto" not on this device, or nothing."""
    reason = ROUNDED_EXPERTS if options.in_bytes else not_a_stack(options.format)
    return reason or (slower_by_count(device) if device and options.again else "")


def _pack(w: Tensor, options: Options) -> PackedWeight:
    if reason := not_stacked(options):
        raise ValueError(reason)
    kind = FORMATS.get(options.format)
    try:
        if kind is not None:
            return kind.from_dense(w)
        TileWeight._check_dtype(w.dtype)
        canonical = MackoWeight.smallest(w)
    except RuntimeError as error:  # more entries than int32 counts
        if "macko::" not in str(error):
            raise
        raise ValueError(str(error)) from None
    shorter = sparse11_of(canonical) if options.values == "exact" else None
    return TileWeight.from_macko(canonical) if shorter is None or too_many_listed(shorter) else shorter


class PackedStack(nn.Module):
    """The tensors of a Stack, so that the experts' module moves, copies and saves them as any.

    They are persistent buffers, though not every file has them: when from_pretrained is done it puts empty memory in
    the place of all others. vLLM fills persistent buffers with random numbers, so for it they
    are not persistent.
    """

    def __init__(self, stack: Stack, persistent: bool = True) -> None:
        super().__init__()
        self.persistent = persistent
        self._hold(stack)

    def _hold(self, stack: Stack) -> None:
        self._buffers.clear()
        for name, tensor in stack.packed.tensors().items():
            self.register_buffer(name, tensor, persistent=self.persistent)
        self.kind, self.sizes = type(stack.packed), stack.packed.sizes()
        self.experts, self.rows, self.header = stack.experts, stack.rows, tuple(stack.packed.header)

    @property
    def stack(self) -> Stack:
        return Stack(self.kind(**self._buffers, **self.sizes), self.experts, self.rows)  # type: ignore[arg-type]

    def forward(
        self, x: Tensor, ends: Tensor, order: Tensor | None = None, top_k: int = 1, gated: bool = False
    ) -> Tensor:
        """The products of macko.ops.linear_experts."""
        return linear_experts(x, *self.packed, ends, order, top_k, gated)

    @property
    def is_watched(self) -> bool:
        """Whether somebody has to see the product made here: a hook, or a forward of accelerate's."""
        return bool(self._forward_hooks or self._forward_pre_hooks or "forward" in vars(self))

    @property
    def packed(self) -> tuple[list[Tensor], tuple[int, ...], int]:
        """What ops take of it: tensors, header, rows of an expert."""
        return list(self._buffers.values()), self.header, self.rows  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.packed.dtype

    @property
    def is_saved_dense(self) -> bool:
        """Whether files and states hold the dense weight in its place."""
        return self.kind.saved_dense

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedStack:
        packed = self.stack.packed
        target = fn(torch.empty(0, dtype=packed.dtype, device=packed.device))
        if reason := unsupported(target.dtype, target.device):
            raise TypeError(f"SparseExperts: the weights cannot move: {reason}")
        if target.dtype != packed.dtype:
            if target.dtype not in packed.dtypes:
                raise TypeError(f"SparseExperts: {packed.format} does not hold {target.dtype}: dequantize first")
            self._hold(Stack(_converted(packed, target.device, target.dtype), self.experts, self.rows))
        return super()._apply(fn, recurse)

    def get_extra_state(self) -> Tensor:
        about = {"format": self.kind.format, **self.sizes, "experts": self.experts, "expert_rows": self.rows}
        return as_extra_state(about)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing: _load_from_state_dict has read it."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not self.is_saved_dense:  # else the experts' module saves the dense weight
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        local, strict, missing, unexpected, errors = args
        names = [prefix + name for name in (*self._buffers, "_extra_state")]
        if self.is_saved_dense:
            return
        try:
            if any(name in state_dict for name in names):
                stack = self._loaded(state_dict, prefix, local.get("assign_to_params_buffers", False))
                state_dict |= {prefix + name: tensor for name, tensor in stack.packed.tensors().items()}
                self._hold(dataclasses.replace(stack, packed=stack.packed.empty_like(self.stack.packed.device)))
        except (TypeError, ValueError) as error:
            errors.append(f"{prefix.removesuffix('.')}: {error}")
            return
        super()._load_from_state_dict(state_dict, prefix, local, strict, missing, unexpected, errors)

    def _loaded(self, state: dict[str, Any], prefix: str, assigned: bool) -> Stack:
        """The stack of a state, once its content is looked at, as the module can hold it."""
        now = self.stack
        if (extra := state.get(f"{prefix}_extra_state")) is None:
            raise ValueError(f"the state has no _extra_state of its {now.packed.format} weight")
        kind, sizes, experts, rows = said(extra, stack_as)
        if missing := [name for name in kind.tensor_names if prefix + name not in state]:
            raise ValueError(f"the state has no {', '.join(missing)} of its {kind.format} weight")
        tensors = {name: state[prefix + name] for name in kind.tensor_names}
        check_tensors(tensors)
        packed = kind(**tensors, **sizes)
        if (experts, rows, packed.shape) != (now.experts, now.rows, now.packed.shape):
            came, here = ([s.experts, s.rows, s.packed.cols] for s in (Stack(packed, experts, rows), now))
            raise ValueError(f"size mismatch: the state has {came} in {packed.rows} rows, the module {here}")
        if any(tensor.device.type != "meta" for tensor in tensors.values()):
            packed.validate()
            if packed.dtype != now.packed.dtype and not assigned:
                packed = _converted(packed, packed.device, now.packed.dtype)
        elif not assigned and now.packed.device.type != "meta":
            raise ValueError(NO_CONTENT)
        return Stack(packed, experts, rows)


def _converted(packed: PackedWeight, device: torch.device, dtype: torch.dtype) -> PackedWeight:
    return type(packed).from_dense(packed.to_dense().to(device, dtype))


# ---- The module ------------------------------------------------------------------------------------------------------


class SparseExperts(OwnExperts):
    """What experts(hidden_states, top_k_index, top_k_weights) of transformers gives, from packed weights.

    It takes the place of a module that transformers 5 runs by its experts interface. All but the weights is that
    module's: attributes, biases, norm and, unbound, its class's `_apply_gate`, which may clamp, scale or take every
    other column; no model is known here by its name. The bits are those of grouped_mm where the products' are, as on a
    CPU. The weights are frozen: gradients go through to the input, never to them.

    `gate_up_proj`, `up_proj` and `down_proj` are dense copies, made at every look. In dense12 its state_dict is that of
    the dense module.
    """

    def __init__(self, dense: nn.Module, stacks: dict[str, Stack]) -> None:
        super().__init__()
        self.experts_class: Any = type(dense)
        _take_over(self, dense)
        self._is_hf_initialized = True  # or transformers would give it random weights
        for name, stack in stacks.items():
            self.hold(name, stack)

    def hold(self, name: str, stack: Stack) -> None:
        self.add_module(f"{name}_packed", PackedStack(stack))

    def _part(self, name: str) -> PackedStack:
        return self._modules[f"{name}_packed"]  # type: ignore[return-value]

    def stack(self, name: str) -> Stack:
        """The stack of a projection, a view of its buffers."""
        return self._part(name).stack

    def packed_stacks(self) -> dict[str, Stack]:
        """The stacks by projection: both, but while a checkpoint is read."""
        return {name: self.stack(name) for name in PROJECTIONS if f"{name}_packed" in self._modules}

    def to_dense(self) -> nn.Module:
        """The dense module, with the very weights that were packed; not trainable until asked to be."""
        dense = self.experts_class.__new__(self.experts_class)
        nn.Module.__init__(dense)
        _take_over(dense, self)
        for name in PROJECTIONS:
            dense._modules.pop(f"{name}_packed", None)
        dense._parameters.update({name: p for name, p in self._parameters.items() if name in PROJECTIONS})
        for name in self.packed_stacks():
            dense.register_parameter(name, nn.Parameter(getattr(self, name), requires_grad=False))
        return dense

    def __getattr__(self, name: str) -> Any:
        if name in PROJECTIONS and f"{name}_packed" in self._modules:
            return turned(self, self.stack(name).to_dense()).contiguous()
        return super().__getattr__(name)

    def _gates_by_silu(self) -> bool:
        """Whether the gate is the one that linear_experts has: transformers' own, and silu."""
        gate = getattr(self.experts_class, "_apply_gate", None)
        own = getattr(gate, "__module__", "") != _INTERFACE
        return not own and self.has_gate and type(self.act_fn).__name__ in ("SiLU", "SiLUActivation")

    def _biased(self, name: str, y: Tensor, ids: Tensor, order: Tensor) -> Tensor:
        """y rounded, and its sum with the bias, as transformers does it."""
        if not self.has_bias:
            return y
        return y + getattr(self, f"{name}_bias")[ids.flatten()[order].clamp(max=self.num_experts - 1)]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[tokens, hidden] for hidden_states [tokens, hidden], and of each token its experts and their weights [tokens,
        top_k]. No host looks at the routing. An id of num_experts and more is another process' expert: it adds nothing.
        """
        names = projections(self)
        first, last = map(self._part, names)
        x = hidden_states if autocast_dtype(hidden_states) is None else hidden_states.to(first.dtype)
        if top_k_weights.dtype not in (x.dtype, torch.float32):
            top_k_weights = top_k_weights.float()
        gated, normed = self._gates_by_silu(), getattr(self, "has_post_expert_norm", False)
        at_once = not (self.has_bias or normed or torch.is_grad_enabled() or first.is_watched or last.is_watched)
        if gated and at_once:
            y = gated_experts(x, top_k_index, top_k_weights, self.num_experts, first.packed, last.packed)
            return y.to(hidden_states.dtype)
        order, places, ends = expert_order(top_k_index, self.num_experts)
        h = self._biased(names[0], first(x, ends, order, top_k_index.shape[1]), top_k_index, order)
        if not gated:
            h = self.experts_class._apply_gate(self, h) if self.has_gate else self.act_fn(h)
        y = self._biased(names[1], last(h, ends, None, 1, gated), top_k_index, order)
        if normed:
            y = self.post_expert_norm(y)
        return expert_sum(y, places, top_k_weights).to(hidden_states.dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.packed_stacks():
            if self._part(name).is_saved_dense:
                destination[prefix + name] = getattr(self, name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        local, _, missing, unexpected, errors = args
        for name in self.packed_stacks():
            dense, part = state_dict.get(prefix + name), self._part(name)
            if dense is None and part.is_saved_dense:
                missing.append(prefix + name)
            elif dense is not None:
                unexpected[:] = [key for key in unexpected if key != prefix + name]
                try:
                    part._hold(self._packed_again(dense, part, local.get("assign_to_params_buffers", False)))
                except (TypeError, ValueError) as error:
                    errors.append(f"{prefix}{name}: {error}")

    def _packed_again(self, dense: Tensor, part: PackedStack, assigned: bool) -> Stack:
        """The stack of a state's dense weight, where files hold it so."""
        now = part.stack
        on_meta = now.packed.device.type == "meta"
        check_tensors({"weight": dense})
        if not part.is_saved_dense:
            raise ValueError("the state has a dense weight, and these experts are sparse: load it before sparsify_")
        w = turned(self, dense.detach()) if dense.dim() == 3 else dense
        if tuple(w.shape) != now.shape:
            raise ValueError(f"size mismatch: the state has {list(w.shape)}, the experts {list(now.shape)}")
        if w.device.type == "meta" and not assigned and not on_meta:
            raise ValueError(NO_CONTENT)
        if w.device.type == "meta" or (on_meta and not assigned):
            return dataclasses.replace(now, packed=now.packed.empty_like("meta"))
        w = w.to(w.device if on_meta else now.packed.device, w.dtype if assigned else now.packed.dtype)
        return Stack.from_dense(w, Options(now.packed.format))

    def extra_repr(self) -> str:
        held = self.packed_stacks().items()
        sizes = (f"{n}: {' x '.join(map(str, s.shape))} {s.packed.label}, {s.packed.nbytes} bytes" for n, s in held)
        return ", ".join(sizes)


def _take_over(module: nn.Module, other: nn.Module) -> None:
    """Gives a module all that another has but its stacked weights."""
    for name, value in vars(other).items():
        if name not in ("_parameters", "_buffers", "_modules", "experts_class"):
            module.__dict__[name] = value
    module._buffers.update(other._buffers)
    module._modules.update(other._modules)
    module._parameters.update({name: p for name, p in other._parameters.items() if name not in PROJECTIONS})
    with_hooks(module, other)


# ---- One by one ------------------------------------------------------------------------------------------------------


class UnfoldedExperts(OwnExperts):
    """The same experts as modules "0", "1", ... of gate_proj, up_proj and down_proj, each nn.Linear or SparseLinear.

    So pruning, calibration and files take them as any layer: an expert sees its own tokens alone. Weights of nn.Linear
    are views of the dense module's: what is pruned here is pruned there.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.of: tuple[Any] = (experts,)  # in a tuple, so that it is no submodule
        self.num_experts = experts.num_experts
        self._modules.update({name: m for name, m in experts._modules.items() if not isinstance(m, PackedStack)})
        self._is_hf_initialized = True
        packed = experts.packed_stacks() if isinstance(experts, SparseExperts) else {}
        whole = {key: packed[key].to_dense() if packed else oriented(experts, key) for key in projections(experts)}
        self.rows = {key: w.shape[1] for key, w in whole.items()}
        for e in range(experts.num_experts):  # type: ignore[arg-type]
            one = nn.Module()
            for key, w in whole.items():
                bias = experts._parameters.get(f"{key}_bias")
                for name, rows in self.parts(key).items():
                    # A copy: savers take every other element of one memory for two tied tensors, and stop.
                    part = None if bias is None else nn.Parameter(bias.detach()[e][rows].clone(), requires_grad=False)
                    one.add_module(name, _layer(w[e][rows], part, bool(packed)))
            self.add_module(str(e), one)

    def parts(self, key: str) -> dict[str, slice]:
        """The layers that a projection is made of, and their rows of it."""
        if key != "gate_up_proj":
            return {key: slice(None)}
        if not self.of[0].is_concatenated:
            return {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        half = self.rows[key] // 2
        return {"gate_proj": slice(0, half), "up_proj": slice(half, 2 * half)}

    def stacked(self) -> dict[str, list[nn.Module]]:
        ones: list[Any] = [self._modules[str(e)] for e in range(self.of[0].num_experts)]
        return {key: [getattr(one, name) for one in ones for name in self.parts(key)] for key in self.rows}

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        experts = self.of[0]
        final = torch.zeros_like(hidden_states)
        for e in top_k_index.unique().tolist():
            if e >= experts.num_experts:
                continue
            token, slot = torch.where(top_k_index == e)
            one: Any = self._modules[str(e)]
            x, one.routing = hidden_states[token], top_k_weights[token, slot]  # which calibration may look at
            if experts.has_gate:
                both = (one.gate_proj(x), one.up_proj(x))
                h = torch.cat(both, -1) if experts.is_concatenated else torch.stack(both, -1).flatten(-2)
                h = getattr(experts, "experts_class", type(experts))._apply_gate(experts, h)
            else:
                h = experts.act_fn(one.up_proj(x))
            y = one.down_proj(h)
            routing = vars(one).pop("routing")
            if getattr(experts, "has_post_expert_norm", False):
                y = experts.post_expert_norm(y)
            final.index_add_(0, token, (y * routing.unsqueeze(-1)).to(final.dtype))
        return final

    def fold(self, options: Options) -> nn.Module:
        """Of what these layers hold by now the module that they were made of, dense, or SparseExperts.

        In the format that all have, if it is one of stacks, as 12 bits are; else as the options say.
        """
        experts = self.of[0]
        ones: list[Any] = [self._modules[str(e)] for e in range(experts.num_experts)]
        layers = [layer for one in ones for layer in one.children()]
        packed = [layer.packed for layer in layers if isinstance(layer, SparseLinear)]
        formats = sorted({weight.format for weight in packed})
        if len(formats) == 1 and not not_a_stack(formats[0]):
            options = Options(formats[0])
        stacks: dict[str, Stack] = {}
        for key in projections(experts):
            parts = [[getattr(one, name) for name in self.parts(key)] for one in ones]
            w = torch.stack([self._joined([_dense_weight(layer) for layer in of_one]) for of_one in parts])
            with contextlib.suppress(ValueError):  # which no stack holds
                if len(packed) == len(layers):
                    stacks[key] = Stack.from_dense(w, options)
            if key not in stacks:
                experts._parameters[key] = nn.Parameter(turned(experts, w).contiguous(), requires_grad=False)
            if experts.has_bias:
                bias = torch.stack([self._joined([layer.bias.detach() for layer in of_one]) for of_one in parts])
                experts._parameters[f"{key}_bias"] = nn.Parameter(bias, requires_grad=False)
        if len(stacks) == len(projections(experts)):
            return SparseExperts(experts, stacks)
        for key, stack in stacks.items():  # all of it is packed, or nothing
            w = turned(experts, stack.to_dense()).contiguous()
            experts._parameters[key] = nn.Parameter(w, requires_grad=False)
        return experts

    def _joined(self, parts: list[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if self.of[0].is_concatenated else torch.stack(parts, 1).flatten(0, 1)


def _dense_weight(layer: nn.Linear) -> Tensor:
    return layer.packed.to_dense() if isinstance(layer, SparseLinear) else layer.weight.detach()


def _layer(weight: Tensor, bias: nn.Parameter | None, is_packed: bool) -> nn.Linear:
    if is_packed:
        return SparseLinear.from_packed(MackoWeight.smallest(weight.contiguous()), bias)
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.out_features, layer.in_features = weight.shape
    layer.bias = bias  # type: ignore[assignment]
    return layer


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def replace(model: nn.Module, new: dict[nn.Module, nn.Module]) -> None:
    """Puts modules in the places of others, wherever these hang."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in new:
                setattr(parent, name, new[child])


def packed_rows(model: nn.Module) -> list[LayerReport]:
    """Rows of the experts that are packed already."""
    rows = []
    for name, module in model.named_modules():
        for key, stack in module.packed_stacks().items() if isinstance(module, SparseExperts) else ():
            size, about = stack.packed.nbytes, "is sparse already"
            rows.append(LayerReport(f"{name}.{key}", stack.shape, None, stack.packed.label, size, size, about))
    return rows


def unfold_(model: nn.Module, which: Callable[[str, nn.Module], bool]) -> list[str]:
    """Puts UnfoldedExperts in the place of experts modules, dense or packed; their names."""
    both = [(n, m) for n, m in model.named_modules() if n and (is_experts(m) or isinstance(m, SparseExperts))]
    found = {name: module for name, module in both if which(name, module)}
    replace(model, {module: UnfoldedExperts(module) for module in found.values()})
    return list(found)


def fold_(model: nn.Module, names: Iterable[str], options: Options) -> None:
    for name in names:
        one: Any = model.get_submodule(name)
        replace(model, {one: one.fold(options)})


@contextlib.contextmanager
def unfolded(model: nn.Module, which: Callable[[str, nn.Module], bool] = lambda name, module: True) -> Iterator[None]:
    """Within it experts are modules of their own, for whoever takes layer after layer; then they are as they were."""
    names = unfold_(model, which)
    try:
        yield
    finally:
        ones: Any = [model.get_submodule(name) for name in names]
        replace(model, {one: one.of[0] for one in ones})


def saved_by_expert(name: str, module: nn.Module) -> bool:
    """Whether files hold these experts one by one: those that are packed and not saved dense."""
    if not isinstance(module, SparseExperts):
        return False
    return not all(part.is_saved_dense for part in module.modules() if isinstance(part, PackedStack))
