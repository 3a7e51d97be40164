"""What was done to each linear layer of a model, as a table for people and as JSON."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Iterator, Sequence
from typing import overload


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
        timed = [layer for layer in self.layers if layer.us_before and layer.us_after]
        after = sum(layer.us_after or 0 for layer in timed)
        return sum(layer.us_before or 0 for layer in timed) / after if after else None

    @property
    def changed(self) -> list[LayerReport]:
        """The layers that were changed."""
        return [layer for layer in self.layers if not layer.reason]

    @property
    def zeros(self) -> tuple[int, int]:
        """Zeros, and all weights, of the layers whose density is known; a shared weight counts once."""
        counted = [layer for layer in self.layers if layer.bytes_before]
        sizes = [(layer.density, math.prod(layer.shape)) for layer in counted if layer.density is not None]
        return sum(round((1 - density) * size) for density, size in sizes), sum(size for _, size in sizes)

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
        text, _, total = format_table(rows).rpartition("\n")
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


def format_table(rows: Sequence[Sequence[str]]) -> str:
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


def format_bytes(count: int) -> str:
    """A size for people: 1.5 MB is 1,500,000 bytes."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"
