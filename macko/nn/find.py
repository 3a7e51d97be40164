"""The linear layers of a model: their names, where they hang, and which ones a caller leaves out."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import fnmatch
import functools
import inspect
import os
import re
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..choose.patterns import density_of
from .report import LayerReport

#: filter_fn(module, full name) -> whether to take the layer.
Filter = Callable[[nn.Module, str], bool]
#: What everybody leaves: a model's output heads, whatever their names are. There is not one in every model.
IGNORED = ("lm_head",)

#: Models of transformers for a task: all that stands beside their base model is the head, which is trained anew.
_OF_A_TASK = re.compile(r"For\w*(Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|XVector)")
#: Names of heads beside the base model of any model of transformers.
_HEADS = ("lm_head", "classifier", "classification_head", "qa_outputs", "score")

#: Methods of tensors that change what they hold.
_WRITES = re.compile(r"(?!_|requires_grad_|detach_|share_memory_|retain_grad)\w+(?<!_)_")


@dataclasses.dataclass
class FoundLinear:
    """A linear layer. A module that hangs in several places of the model is found once."""

    name: str
    module: nn.Linear
    #: (parent, attribute) of every place; empty for a model that is itself the layer.
    places: list[tuple[nn.Module, str]]
    #: Full names of the places after the first.
    aliases: list[str]
    #: Why the caller leaves it out, or None.
    left_out: str | None
    #: Why no packed weight can take its place, or None: the model's own code changes the weight in place.
    changed: str | None = None


class OwnExperts(nn.Module):
    """What macko puts in the place of a mixture's experts."""

    def stacked(self) -> dict[str, list[nn.Module]]:
        """The layers, if any, that each projection is made of."""
        return {}


def check_model(model: Any, what: str) -> None:
    """TypeError where what a function was given as its model is none, as a folder's name."""
    if not isinstance(model, nn.Module):
        hint = ""
        if isinstance(model, (str, os.PathLike)):
            hint = ": load the model first, or give the folder to the command (macko prune, macko convert)"
        raise TypeError(f"{what} takes a model, a torch.nn.Module, got a {type(model).__name__}{hint}")


def submodule(model: nn.Module, name: str) -> nn.Module | None:
    """The module of this name; None where the model has none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def find_linears(model: nn.Module, ignore: Iterable[str], filter_fn: Filter | None) -> list[FoundLinear]:
    """Every nn.Linear of the model, in the model's order, subclasses too; those of a peft adapter are left out.

    Args:
        ignore: full names, last components of names, or globs over full names; "lm_head" stands for the output heads
            too (output_heads). A UserWarning names what matches no layer: a slip of the pen would be found too late.
        filter_fn: called with what ignore does not match.
    """
    ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    found: dict[int, FoundLinear] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, nn.Linear):
            continue
        parent, _, last = name.rpartition(".")
        place = [(model.get_submodule(parent), last)] if name else []
        if (earlier := found.get(id(module))) is not None:
            earlier.places += place
            earlier.aliases.append(name)
        else:
            found[id(module)] = FoundLinear(name, module, place, [], None)
    unmatched = set(ignore) - set(IGNORED)
    stacked = [(name, module) for name, module in model.named_modules() if hasattr(module, "num_experts")]
    unmatched -= set(
        matching(ignore, [f"{name}{key}" for name, m in stacked for key in ("", *(f".{k}" for k in m._parameters))])
    )
    # A new adapter's second matrix is all zeros: pruned or packed it would never be trained. (Names as peft has them.)
    adapters = tuple(
        f"{name}.{part}.".lstrip(".")
        for name, module in model.named_modules()
        for part in getattr(module, "adapter_layer_names", ())
    )
    heads = output_heads(model) if "lm_head" in ignore else set()
    # Of experts that are layers for a while (UnfoldedExperts): what the stacks that they are of are called.
    stacks = {
        id(layer): [name, f"{name}.{key}"]
        for name, module in model.named_modules()
        if isinstance(module, OwnExperts)
        for key, layers in module.stacked().items()
        for layer in layers
    }
    changed, routers = _changed_in_place(model), _routers(model)
    for layer in found.values():
        names = [layer.name, *layer.aliases, *stacks.get(id(layer.module), [])]
        ignored = matching(ignore, names)
        unmatched -= set(ignored)
        layer.changed = changed.get(id(layer.module))
        if ignored:
            layer.left_out = f"ignored by {ignored[0]!r}"
        elif id(layer.module) in heads:
            layer.left_out = "ignored by 'lm_head': it is an output head"
        elif layer.name.startswith(adapters):
            layer.left_out = "an adapter's"
        elif id(layer.module) in routers:
            layer.left_out = "it chooses experts, or weighs shared ones"
        elif filter_fn is not None and not filter_fn(layer.module, layer.name):
            layer.left_out = "left out by filter_fn"
    if unmatched:
        without = ", ".join(map(repr, sorted(unmatched)))
        some = f"; layers are named as {next(iter(found.values())).name!r}" if found else ""
        warnings.warn(f"ignore has {without}, which matches no linear layer{some}", stacklevel=3)
    return list(found.values())


def matching(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """Those of the patterns (full names, last components of names, or globs over full names) that a name is of."""

    def fits(p: str, n: str) -> bool:
        return p in (n, n.rpartition(".")[2]) or fnmatch.fnmatchcase(n, p)

    return [pattern for pattern in patterns if any(fits(pattern, name) for name in names)]


def output_heads(model: nn.Module) -> set[int]:
    """ids of the linear layers that give the outputs of a model of transformers, or of those within a module.

    That of get_output_embeddings(); of a classifier, and of others for a task, all that is beside the base model: what
    is trained anew for another task, peft's `modules_to_save`.
    """
    heads: list[Any] = []
    for module in model.modules():
        if not isinstance(prefix := getattr(module, "base_model_prefix", None), str):
            continue  # no model of transformers
        with contextlib.suppress(AttributeError, NotImplementedError):
            heads.append(module.get_output_embeddings())  # type: ignore[operator]
        of_a_task = _OF_A_TASK.search(type(module).__name__)
        for name, child in module.named_children():
            whole = name == prefix or hasattr(child, "base_model_prefix")
            if name in _HEADS or (of_a_task and not whole):
                heads.append(child)
    parts = [part for head in heads if isinstance(head, nn.Module) for part in head.modules()]
    return {id(part) for part in parts if isinstance(part, nn.Linear)}


def _routers(model: nn.Module) -> set[int]:
    """ids of linear layers that give a number for each of a mixture's experts, or one, beside these in their block, and
    no other layer beside them takes that, as one of a shared expert does; or in a module there that has no other layer.

    Most models have no nn.Linear there. A model whose own child the experts are is no block: it may have heads there.
    """
    routers: set[int] = set()
    for name, module in model.named_modules():
        block, _, own = name.rpartition(".")
        held = () if isinstance(module, nn.modules.conv._ConvNd) else module._parameters.values()
        stacks = {p.shape[0] for p in held if p is not None and not is_lazy(p) and p.dim() == 3} - {1}
        is_named = own.endswith("experts")
        count = getattr(module, "num_experts", None)
        counts = {count} if isinstance(count, int) else set()
        if is_named:  # a stack may count experts that compute nothing too (LongCat)
            counts |= stacks | ({len(module)} if isinstance(module, (nn.ModuleList, nn.ModuleDict)) else set())
        if block and counts and (is_named or stacks or isinstance(module, OwnExperts)):
            beside = [child for child in model.get_submodule(block).children() if child is not module]
            alone = [[m for m in child.modules() if isinstance(m, nn.Linear)] for child in beside]
            direct = [child for child in beside if isinstance(child, nn.Linear)]
            for layers in (direct, *(found for found in alone if len(found) == 1 and found[0] not in direct)):
                taken = {layer.in_features for layer in layers}
                routers |= {id(m) for m in layers if m.out_features in {1, *counts} - taken}
    return routers


def _changed_in_place(model: nn.Module) -> dict[int, str]:
    """Linear layers whose weight the model's code changes in place as it runs, as RWKV's does, and what says so."""
    found = {}
    for module in model.modules():
        for kind in type(module).__mro__:
            if paths := tuple(f".{path}" for path in _written_paths(kind)):
                for name, child in module.named_modules():
                    if isinstance(child, nn.Linear) and f".{name}".endswith(paths):
                        found[id(child)] = f"{kind.__name__}'s code changes its weight in place"
    return found


@functools.cache
def _written_paths(kind: type) -> frozenset[str]:
    """The "x.y" of each `x.y.weight.div_(2)`, `x.y.weight.data *= 2` or alike in a class's methods that run a model."""
    paths = set()
    for method in vars(kind).values() if not kind.__module__.startswith("torch.") else ():
        code = getattr(inspect.unwrap(method), "__code__", None) if isinstance(method, types.FunctionType) else None
        if code is None or "weight" not in code.co_names or re.search(r"init|reset|tie_|resize", code.co_name):
            continue
        path: list[str] = []  # of attributes, as they are looked up one after the other
        target: list[str] = []  # the one before the attribute that `x.y *= 2` sets
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                path.append(str(step.argval))
                if _WRITES.fullmatch(path[-1]):
                    paths.add(_owner_of_weight(path[:-1]))
            elif step.opname in ("COPY", "DUP_TOP"):
                target = path.copy()
            elif step.opname.startswith(("INPLACE_", "BINARY_OP")):
                path = target if step.opname != "BINARY_OP" or step.argrepr.endswith("=") else []
            elif step.opname == "STORE_ATTR" and target and path is target:
                paths.add(_owner_of_weight([*target, str(step.argval)]))
            elif step.opname.startswith(("LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME", "STORE_")):
                path = []
    return frozenset(paths - {""})


def _owner_of_weight(path: list[str]) -> str:
    """ "x.y" of the attributes [x, y, "weight"] or [x, y, "weight", "data"]; else ""."""
    owner = path[:-1] if path[-1:] == ["data"] else path
    return ".".join(owner[:-1]) if owner[-1:] == ["weight"] else ""


def tied_parameters(model: nn.Module) -> dict[int, list[str]]:
    """For each parameter that several modules hold, or that shares its memory: names of all, by id(parameter)."""
    holders: dict[tuple[object, ...], dict[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or is_lazy(parameter):
                continue
            there = parameter.device.type != "meta" and parameter.numel() > 0
            key = (parameter.device, parameter.data_ptr()) if there else (id(parameter),)
            holders.setdefault(key, {})[f"{prefix}.{name}".removeprefix(".")] = parameter
    return {id(p): list(group) for group in holders.values() if len(group) > 1 for p in group.values()}


def unpackable(model: nn.Module, is_reported: Callable[[nn.Module], bool] = lambda module: False) -> list[LayerReport]:
    """Rows of the matrices that no nn.Linear holds and that somebody may look for: GPT-2's Conv1D, fused experts.

    is_reported: modules of which the caller has rows.
    """
    rows = []
    for name, module in model.named_modules():
        if is_reported(module):
            continue
        for key, weight in module.named_parameters(recurse=False):
            reason = ""
            if type(weight) is not nn.Parameter:
                continue
            if type(module).__name__ == "Conv1D" and weight.dim() == 2:
                reason = "Conv1D is no nn.Linear: it holds its weight transposed"
            elif weight.dim() == 3 and "expert" in f"{name} {type(module).__name__}".lower():
                reason = f"{type(module).__name__} holds all experts in one tensor, in no way that macko knows"
            if reason:
                size = weight.nbytes
                full = name if key == "weight" else f"{name}.{key}"
                about = (tuple(weight.shape), density_of(weight), "dense", size, size, reason)
                rows.append(LayerReport(full, *about, linear=False))
    return rows
