"""The linear layers of a model: their names, where they hang, and which ones a caller leaves out."""

from __future__ import annotations

import dataclasses
import fnmatch
import io
import json
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

#: filter_fn(module, full name) -> whether to take the layer.
Filter = Callable[[nn.Module, str], bool]


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


def find_linears(model: nn.Module, ignore: Iterable[str], filter_fn: Filter | None) -> list[FoundLinear]:
    """Every nn.Linear of the model, in the model's order, subclasses too.

    Args:
        ignore: full names, last components of names, or globs over full names.
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
    for layer in found.values():
        names = [layer.name, *layer.aliases]
        matching = [p for p in ignore for n in names if p in (n, n.rpartition(".")[2]) or fnmatch.fnmatchcase(n, p)]
        if matching:
            layer.left_out = f"ignored by {matching[0]!r}"
        elif filter_fn is not None and not filter_fn(layer.module, layer.name):
            layer.left_out = "left out by filter_fn"
    return list(found.values())


def tied_parameters(model: nn.Module) -> dict[int, list[str]]:
    """For each parameter that several modules hold, or that shares its memory: names of all, by id(parameter)."""
    holders: dict[tuple[object, ...], dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        there = parameter.device.type != "meta" and parameter.numel() > 0
        key = (parameter.device, parameter.data_ptr()) if there else (id(parameter),)
        holders.setdefault(key, {})[name] = parameter
    return {id(p): list(group) for group in holders.values() if len(group) > 1 for p in group.values()}


@dataclasses.dataclass
class LayerReport:
    """One linear layer of a Report; bytes are those of its weight."""

    name: str
    shape: tuple[int, ...]
    #: Non-zeros over all, or None where nobody looked.
    density: float | None
    #: The format it is held in now; "dense" for a layer that is left as it was.
    format: str
    bytes_before: int
    bytes_after: int
    #: Why it was left as it was; empty for a layer that was changed.
    reason: str = ""


@dataclasses.dataclass
class Report:
    """What was done to each linear layer of a model; prints as a table."""

    layers: list[LayerReport]

    @property
    def bytes_before(self) -> int:
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def changed(self) -> list[LayerReport]:
        """The layers that were changed."""
        return [layer for layer in self.layers if not layer.reason]

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def to_json(self) -> str:
        """The rows and the totals as JSON."""
        totals = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after, "changed": len(self.changed)}
        return json.dumps({**dataclasses.asdict(self), **totals})

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for title in ("layer", "shape", "density (sparse)", "format", "before", "after", "why not"):
            numeric = title in ("shape", "density (sparse)", "before", "after")
            table.add_column(title, justify="right" if numeric else "left", no_wrap=True)
        for layer in self.layers:
            density = "" if layer.density is None else f"{layer.density:.3f} ({1 - layer.density:5.1%})"
            shape = "x".join(map(str, layer.shape))
            sizes = (format_bytes(layer.bytes_before), format_bytes(layer.bytes_after))
            table.add_row(layer.name or "(the model)", shape, density, layer.format, *sizes, layer.reason)
        share = f"{self.bytes_after / self.bytes_before:.3f} of before" if self.bytes_before else ""
        sizes = (format_bytes(self.bytes_before), format_bytes(self.bytes_after))
        table.add_section()
        table.add_row(f"{len(self.changed)} of {len(self.layers)} layers changed", "", "", "", *sizes, share)
        console = Console(file=io.StringIO(), width=10_000, color_system=None, markup=False, highlight=False)
        console.print(table)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


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
        return int(weight.count_nonzero()) / max(1, weight.numel())
