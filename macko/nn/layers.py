"""The linear layers of a model: their names, where they hang, and which ones a caller leaves out."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import fnmatch
import functools
import html
import inspect
import json
import math
import os
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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
    #: Full names of the places behind the first.
    aliases: list[str]
    #: Why the caller leaves it out, or None.
    left_out: str | None
    #: Why no packed weight can take its place, or None: the model's own code changes the weight in place.
    changed: str | None = None


def check_model(model: Any, what: str) -> None:
    """TypeError where what a function was given as its model is none, as a folder's name."""
    if not isinstance(model, nn.Module):
        hint = ""
        if isinstance(model, (str, os.PathLike)):
            hint = ": load the model first, or give the folder to the command (macko prune, macko convert)"
        raise TypeError(f"{what} takes a model, a torch.nn.Module, got a {type(model).__name__}{hint}")


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
    # A new adapter's second matrix is all zeros: pruned or packed it would never be trained. (Names as peft has them.)
    adapters = tuple(
        f"{name}.{part}.".lstrip(".")
        for name, module in model.named_modules()
        for part in getattr(module, "adapter_layer_names", ())
    )
    heads = output_heads(model) if "lm_head" in ignore else set()
    changed = _changed_in_place(model)
    for layer in found.values():
        names = [layer.name, *layer.aliases]
        ignored = matching(ignore, names)
        unmatched -= set(ignored)
        layer.changed = changed.get(id(layer.module))
        if ignored:
            layer.left_out = f"ignored by {ignored[0]!r}"
        elif id(layer.module) in heads:
            layer.left_out = "ignored by 'lm_head': it is an output head"
        elif layer.name.startswith(adapters):
            layer.left_out = "an adapter's"
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


@dataclasses.dataclass
class LayerReport:
    """One linear layer of a Report.

    Attributes:
        name: its full name; "" for a model that is itself the layer.
        shape: rows and columns of its weight.
        density: non-zeros over all, or None where nobody looked.
        format: what its weight is held in now; "dense" for a layer that is left as it was.
        bytes_before, bytes_after: of its weight.
        reason: why it was left as it was; empty for a layer that was changed.
        us_before, us_after: microseconds for one token (or for as many as sparsify_ was told), dense and as it is held
            now: measured on this device, or by a model (macko.times); None where nothing is known.
        merged_with: names of the layers that are one matrix with it (macko.merge_); bytes and times are of the layer by
            itself.
        note: why slide takes its dense kernel for it; of dense12 what share is listed.
        worst: where it is slower than dense: at how many tokens most, and dense time over its time there.
        linear: whether it is an nn.Linear, and no other matrix (experts in one tensor, GPT-2's Conv1D).
    """

    name: str
    shape: tuple[int, ...]
    density: float | None
    format: str
    bytes_before: int
    bytes_after: int
    reason: str = ""
    us_before: float | None = None
    us_after: float | None = None
    merged_with: list[str] = dataclasses.field(default_factory=list)
    note: str = ""
    worst: tuple[int, float] | None = None
    linear: bool = True


@dataclasses.dataclass
class Fit:
    """A submodule whose kept weights were fitted to its dense outputs (prune_'s reconstruct).

    Attributes:
        error_before, error_after: squared error of its outputs over the calibration, over the squares of the dense
            ones; each token's squares are over those of what the dense block makes of it.
    """

    name: str
    error_before: float
    error_after: float


@dataclasses.dataclass
class Report:
    """What was done to each linear layer of a model; prints as a table, as which a notebook shows it too.

    report[0] is its first layer, `for layer in report` gives all, len(report) counts them.

    Attributes:
        layers: a LayerReport each.
        fits: of prune_'s reconstruct.
        notes: what else there is to say of it, a line each.
    """

    layers: list[LayerReport]
    fits: list[Fit] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def bytes_before(self) -> int:
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def gain(self) -> float | None:
        """Expected time in the dense layers over that in the layers as they are now; None: not known."""
        known = [layer for layer in self.layers if layer.us_before and layer.us_after]
        after = sum(layer.us_after or 0 for layer in known)
        return sum(layer.us_before or 0 for layer in known) / after if after else None

    @property
    def changed(self) -> list[LayerReport]:
        """The layers that were changed."""
        return [layer for layer in self.layers if not layer.reason]

    @property
    def zeros(self) -> tuple[int, int]:
        """Zeros, and all weights, of the layers whose density is known; a shared weight counts once."""
        counted = [layer for layer in self.layers if layer.bytes_before]
        known = [(layer.density, math.prod(layer.shape)) for layer in counted if layer.density is not None]
        return sum(round((1 - density) * size) for density, size in known), sum(size for _, size in known)

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @overload
    def __getitem__(self, place: int) -> LayerReport: ...

    @overload
    def __getitem__(self, place: slice) -> list[LayerReport]: ...

    def __getitem__(self, place: int | slice) -> LayerReport | list[LayerReport]:
        return self.layers[place]

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_json(self) -> str:
        """The rows and the totals as JSON."""
        totals = {name: getattr(self, name) for name in ("bytes_before", "bytes_after", "gain")}
        return json.dumps({**dataclasses.asdict(self), **totals, "changed": len(self.changed)})

    def __str__(self) -> str:
        # Where nothing was packed, bytes and formats say nothing: then it counts zeros.
        sized = any(layer.format != "dense" for layer in self.layers)
        sizes = ("format", ">before", ">after", ">gain") if sized else ()
        rows = [("layer", ">shape", ">density (sparse)", *sizes, "note")]
        for layer in self.layers:
            gain = f"{layer.us_before / layer.us_after:.2f}x" if layer.us_before and layer.us_after else ""
            sizes = (layer.format, format_bytes(layer.bytes_before), format_bytes(layer.bytes_after), gain)
            others = ", ".join(name.rpartition(".")[2] for name in layer.merged_with)
            merged = f"one matrix with {others}" if others else ""
            note = layer.reason or ", ".join(filter(None, (layer.note, merged)))
            about = (layer.name or "(the model)", "x".join(map(str, layer.shape)), density_text(layer.density))
            rows.append((*about, *(sizes if sized else ()), note))
        changed = f"{len(self.changed)} of {len(self.layers)} layers changed"
        if sized:
            share = f"{self.bytes_after / self.bytes_before:.3f} of before" if self.bytes_before else ""
            gain = "" if self.gain is None else f"{self.gain:.2f}x"
            rows.append(
                (changed, "", "", "", format_bytes(self.bytes_before), format_bytes(self.bytes_after), gain, share)
            )
        else:
            zeros, weights = self.zeros
            density = density_text(1 - zeros / weights) if weights else ""
            rows.append((changed, "", density, f"{zeros:,} of {weights:,} weights are zero"))
        text, _, total = columns(rows).rpartition("\n")
        if slower := [(layer.worst[1], layer.worst[0]) for layer in self.layers if layer.worst]:
            least, tokens = min(slower)
            many = f"{len(slower)} layers are" if len(slower) > 1 else "1 layer is"
            text += (
                f"\nWith more tokens at once (prompts, encoders) {many} slower than dense: "
                f"{least:.2f}x at {tokens} tokens is the worst by measured times. sparsify_(tokens=...) chooses so."
            )
        if any(layer.us_after for layer in self.changed) and not all(layer.us_after for layer in self.changed):
            text += "\nWhere no gain is given nobody measured a layer like it: small ones are in the caches."
        if left := [layer for layer in self.layers if not layer.linear]:
            few, count = (sum(math.prod(layer.shape) for layer in some) for some in (left, self.layers))
            kinds = {"experts in one tensor" if len(layer.shape) == 3 else "Conv1D" for layer in left}
            kind = " and ".join(sorted(kinds))
            text += f"\n{kind}: {few:,} of {count:,} weights ({few / max(1, count):.0%}) are in no nn.Linear, and left."
        lines = [
            text,
            *(f"{f.name} fitted: error {f.error_before:.4g} before, {f.error_after:.4g} after" for f in self.fits),
        ]
        return "\n".join([*lines, *self.notes, total])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """A table for people. The first row has the titles; one that begins with ">" is of figures, set to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    right = [title.startswith(">") for title in rows[0]]
    lines = []
    for row in ([title.removeprefix(">") for title in rows[0]], *rows[1:]):
        cells = [text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def density_text(density: float | None) -> str:
    """As "0.500 (50.0%)", of what is zero."""
    return "" if density is None else f"{density:.3f} ({1 - density:5.1%})"


#: At most n non-zeros in every m columns, from the first column on; the strictest of each kind first.
PATTERNS = ((1, 4), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12), (12, 14), (14, 16))


def holding(weight: Tensor, among: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of the patterns (PATTERNS, in their order) that some rows of a matrix hold, those that follow too."""
    held: list[tuple[int, int]] = []
    for n, m in among:
        if weight.shape[1] % m == 0 and (
            _follows(n, m, held) or int(countable(weight).reshape(-1, m).count_nonzero(1).max()) <= n
        ):
            held.append((n, m))
    return held


def named(held: Iterable[tuple[int, int]]) -> list[str]:
    """As "2:4", without the patterns that follow from one before them."""
    said: list[tuple[int, int]] = []
    for n, m in held:
        if not _follows(n, m, said):
            said.append((n, m))
    return [f"{n}:{m}" for n, m in said]


def _follows(n: int, m: int, held: Iterable[tuple[int, int]]) -> bool:
    return any(_most(m, *other) <= n for other in held)


def _most(width: int, n: int, m: int) -> int:
    """Non-zeros that a group of `width` columns can hold where n:m holds."""
    starts = range(0, width * m, width)
    return max(sum(min(n, min(s + width, g + m) - max(s, g)) for g in range(s // m * m, s + width, m)) for s in starts)


def unpackable(model: nn.Module) -> list[LayerReport]:
    """Rows of the matrices that no nn.Linear holds and that somebody may look for: GPT-2's Conv1D, fused experts."""
    rows = []
    for name, module in model.named_modules():
        for key, weight in module.named_parameters(recurse=False):
            reason = ""
            if type(weight) is not nn.Parameter:
                continue
            if type(module).__name__ == "Conv1D" and weight.dim() == 2:
                reason = "Conv1D is no nn.Linear: it holds its weight transposed"
            elif weight.dim() == 3 and "expert" in f"{name} {type(module).__name__}".lower():
                reason = f"{type(module).__name__} holds all experts in one tensor, macko packs nn.Linear"
            if reason:
                size = weight.nbytes
                full = name if key == "weight" else f"{name}.{key}"
                about = (tuple(weight.shape), density_of(weight), "dense", size, size, reason)
                rows.append(LayerReport(full, *about, linear=False))
    return rows


def format_bytes(count: int) -> str:
    """A size for people: 1.5 MB is 1,500,000 bytes."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"


def density_of(weight: Tensor) -> float | None:
    """Non-zeros over all; None for a weight without content."""
    if weight.device.type == "meta":
        return None
    with torch.no_grad():
        return int(countable(weight).count_nonzero()) / max(1, weight.numel())


def countable(weight: Tensor) -> Tensor:
    """The weight, or what stands for it where torch cannot count its zeros: a float of 8 bits."""
    return weight.float() if weight.is_floating_point() and weight.element_size() == 1 else weight
