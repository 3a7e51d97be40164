"""sparsity="auto:0.5": more zeros where they change a block's output little, fewer where much, as many in all.

Measured, not guessed from weights: each layer is pruned by itself to a few shares, and what that does to its block's
output is its error curve. The zeros go where the curves are flattest. Curves do not know of each other, so in the end
the whole chain of blocks is pruned so, half-way so, and evenly, and the allocation with the least error after the
last block is taken: even shares where nothing is better.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.find import FoundLinear
from .calibrate import Call, Statistic, at, blocks_of, by_block, gather, outputs_of, record, weights_in, with_hidden

#: A layer's share of zeros is at most so far from that of the whole.
BOUND = 0.15
#: Shares between the bounds at which each layer's error is measured, the middle one that of the whole.
POINTS = 5
#: Batches that are looked at, at most.
BATCHES = 16
#: How far from even shares to the least sum of errors the allocations lie that are tried in the end.
STRENGTHS = (0.0, 0.5, 1.0)
#: The same where what is left will be fitted, which makes up for much of what the errors are: over even shares, all the
#: way lost 1.05 of the perplexity then, half-way 0.95 (half zero, fitted by block, a Llama of 0.9 million weights).
STRENGTHS_FITTED = STRENGTHS[:2]

#: (weight, share, what was seen of its inputs) -> pruned weight.
Prune = Callable[[Tensor, float, "Tensor | None"], Tensor]


@dataclasses.dataclass
class Curve:
    """What pruning a layer of so many weights does to its block's output, at some shares in rising order."""

    size: int
    shares: list[float]
    errors: list[float]

    def hull(self) -> list[tuple[float, float]]:
        """The lower convex hull: a zero more never costs less than the one before."""
        points: list[tuple[float, float]] = []
        for x, y in zip(self.shares, self.errors, strict=True):
            while len(points) > 1:
                (x0, y0), (x1, y1) = points[-2:]
                if (y1 - y0) * (x - x1) < (y - y1) * (x1 - x0):
                    break
                points.pop()
            points.append((x, y))
        return points


def shares_around(share: float) -> list[float]:
    """Where to measure: from one bound to the other."""
    reach = min(BOUND, share, (1 - share) / 2)
    return [share + reach * (2 * i / (POINTS - 1) - 1) for i in range(POINTS)]


def least(curves: dict[str, Curve], zeros: int) -> dict[str, int]:
    """Zeros of each layer, so many in all, such that the sum of the errors is the least between the bounds."""
    found = {name: round(curve.size * curve.shares[0]) for name, curve in curves.items()}
    steps: list[tuple[float, int, str, int]] = []
    for name, curve in curves.items():
        hull = curve.hull()
        for (x0, y0), (x1, y1) in pairwise(hull):
            steps.append(((y1 - y0) / (x1 - x0) / curve.size, len(steps), name, round(curve.size * x1)))
    left = zeros - sum(found.values())
    for _, _, name, end in sorted(steps):
        more = min(left, end - found[name])
        found[name], left = found[name] + more, left - more
    return found


def between(curves: dict[str, Curve], zeros: int, full: dict[str, int], strength: float) -> dict[str, int]:
    """From even shares (0) to `full` (1), exactly so many zeros in all."""
    total = sum(curve.size for curve in curves.values())
    found, exact, before = {}, 0.0, 0
    for name, curve in curves.items():
        exact += (1 - strength) * curve.size * zeros / total + strength * full[name]
        found[name], before = round(exact) - before, round(exact)
    return found


@torch.no_grad()
def allocate(
    model: nn.Module,
    layers: list[FoundLinear],
    batches: list[Any],
    share: float,
    statistic: Statistic | None,
    prune: Prune,
    device: torch.device | str | None,
    bar: Any,
    strengths: tuple[float, ...] = STRENGTHS,
) -> tuple[dict[str, int], dict[float, float]]:
    """Zeros of each layer in the blocks by name, and the error after the last block by the strengths tried.

    The model is as it was in the end.

    Raises:
        ValueError: the model has no one list of blocks.
    """
    blocks = blocks_of(model, layers)
    of_block = by_block(blocks, layers)[:-1]
    batches = batches[:BATCHES]
    passes = [
        (i == 0) + bool(statistic and group) + POINTS * len(group) + 2 + len(strengths)
        for i, group in enumerate(of_block)
    ]
    bar.total += len(batches) * sum(n * weights_in(block) for n, block in zip(passes, blocks, strict=True))
    bar.set_description("allocation", refresh=False)
    calls = record(model, blocks, batches, device, bar) if blocks else None
    if calls is None:
        raise ValueError("sparsity auto needs a model with one list of blocks, each called with the output before it")
    start = calls[0]
    curves: dict[str, Curve] = {}
    seen: dict[str, Tensor] = {}

    streams: dict[float, list[Call]] = dict.fromkeys(strengths, start)
    given = start
    for i, block in enumerate(blocks):
        with at(block, device):
            seen |= gather(of_block[i], statistic, block, given, bar)
            dense = outputs_of(block, given, bar)
            for layer in of_block[i]:
                if statistic is None or (layer.name in seen and seen[layer.name].any()):
                    curves[layer.name] = _curve(layer, lambda: outputs_of(block, given, bar), dense, share, prune, seen)  # noqa: B023
        given = with_hidden(calls[i + 1], dense) if i + 1 < len(blocks) else []
    zeros = round(share * sum(curve.size for curve in curves.values()))
    full = least(curves, zeros)
    found = {strength: between(curves, zeros, full, strength) for strength in strengths}
    given = start
    for i, block in enumerate(blocks):
        with at(block, device):
            dense = outputs_of(block, given, bar)
            outputs = {}
            for strength, counts in found.items():
                with _pruned(of_block[i], counts, prune, seen):
                    outputs[strength] = outputs_of(block, streams[strength], bar)
        if i + 1 < len(blocks):
            given = with_hidden(calls[i + 1], dense)
            streams = {strength: with_hidden(calls[i + 1], made) for strength, made in outputs.items()}
    errors = {strength: error_of(made, dense) for strength, made in outputs.items()}
    return found[min(errors, key=errors.__getitem__)], errors


def error_of(made: list[Tensor], dense: list[Tensor]) -> float:
    """Squared difference over the dense squares, token by token; the mean, so that no outlier among them decides."""
    parts = []
    for a, b in zip(made, dense, strict=True):
        lost, whole = (a.float() - b.float()).square().sum(-1), b.float().square().sum(-1)
        parts.append((lost / whole.clamp(min=torch.finfo(torch.float32).tiny)).flatten())
    return float(torch.cat(parts).mean(dtype=torch.float64))


def _curve(
    layer: FoundLinear,
    run: Callable[[], list[Tensor]],
    dense: list[Tensor],
    share: float,
    prune: Prune,
    seen: dict[str, Tensor],
) -> Curve:
    """Of one layer; dense: what its block makes while no layer is pruned."""
    shares, errors = shares_around(share), []
    size = layer.module.weight.numel()
    for each in shares:
        with _pruned([layer], {layer.name: round(each * size)}, prune, seen):
            errors.append(error_of(run(), dense))
    return Curve(size, shares, errors)


@contextmanager
def _pruned(layers: list[FoundLinear], zeros: dict[str, int], prune: Prune, seen: dict[str, Tensor]) -> Iterator[None]:
    """Within it, the layers have so many zeros."""
    dense = {layer.name: layer.module.weight.clone() for layer in layers if layer.name in zeros}
    changed = [layer for layer in layers if layer.name in dense]
    try:
        for layer in changed:
            weight = layer.module.weight
            weight.copy_(prune(weight, zeros[layer.name] / weight.numel(), seen.get(layer.name)))
        yield
    finally:
        for layer in changed:
            layer.module.weight.copy_(dense[layer.name])
