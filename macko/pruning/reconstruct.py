"""reconstruct=: the weights that pruning left, fitted until attention and MLP say again what they said when dense.

Block after block, after the choice of its masks. Each submodule gets the inputs that the pruned and fitted modules
before it make, and is fitted to what it made in the dense model: so it also makes up for what was lost before it. That
is far more than a matrix by itself can win back (arXiv 2510.14444), and it hardly matters then what chose the masks.

Submodules are found by structure, not by name: the children of a block that hold pruned layers, in the order in which
the block calls them. Where one of them is not called once, or gives no tensor, the block is fitted as a whole. "block"
does that everywhere: what reaches the next block is fitted then, with the sum that goes past the submodules.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..nn.find import FoundLinear
from ..nn.report import Fit
from .calibrate import Call, Reached, given_hidden, hidden_of, outputs_of, weights_in, with_hidden
from .grids import Grid, nearest


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How each submodule is fitted: Adam on the kept weights, in float32, the rate falling to nothing by a cosine."""

    #: What is fitted by itself: "submodule" or "block".
    unit: str = "submodule"
    #: Times that each batch is seen, but at least `steps` steps in all.
    epochs: int = 8
    steps: int = 200
    #: The largest rate of a layer, over the root mean square of its kept weights.
    lr: float = 0.03
    #: Tokens in a step: as many batches as make that many.
    tokens: int = 4096
    #: Of the order of the batches.
    seed: int = 0
    #: Rounds what is kept (macko.grids) in the second half of the steps, so that the weights make up for that too.
    grid: Grid | None = None
    #: Columns of a row that share a scale of the grid; None: all.
    group: int | None = None

    def __post_init__(self) -> None:
        if self.unit not in ("submodule", "block"):
            raise ValueError(f"unit is {self.unit!r}, expected 'submodule' or 'block'")

    def rounded(self, weight: Tensor) -> Tensor:
        return weight if self.grid is None else nearest(weight, self.grid, self.group)

    def order(self, count: int, tokens: int) -> list[list[int]]:
        """Which of `count` batches of so many tokens go into each step."""
        group = min(count, max(1, self.tokens // max(1, tokens)))
        rng = torch.Generator().manual_seed(self.seed)
        needed = max(self.epochs * count, self.steps * group)
        batches = [i for _ in range(-(-needed // count)) for i in torch.randperm(count, generator=rng).tolist()]
        return [batches[start : start + group] for start in range(0, needed - group + 1, group)]


#: By the name that prune_'s reconstruct takes.
RECIPES = {unit: Recipe(unit) for unit in ("submodule", "block")}


def recipe_of(asked: str | Recipe) -> Recipe:
    """The recipe that prune_'s reconstruct means; ValueError where it means none."""
    if isinstance(asked, Recipe):
        return asked
    if asked not in RECIPES:
        raise ValueError(f"reconstruct is {asked!r}, expected {' or '.join(map(repr, RECIPES))} or a Recipe")
    return RECIPES[asked]


class Fitter:
    """Fits the blocks of one model, in their order."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.fits: list[Fit] = []
        self._units: list[tuple[str, nn.Module]] = []
        self._targets: list[list[Tensor]] = []
        self._shares: list[Tensor] = []
        self._hidden: list[Tensor] | None = None

    def work(self, block: nn.Module, calls: list[Call]) -> int:
        """What fit takes, in weights that meet a batch: a gradient is two passes more."""
        return 3 * weights_in(block) * sum(map(len, self._order(calls)))

    def _order(self, calls: list[Call]) -> list[list[int]]:
        hidden = given_hidden(calls[0])
        return self.recipe.order(len(calls), hidden.numel() // hidden.shape[-1])

    def watch(self, block: nn.Module, layers: list[FoundLinear], calls: list[Call], bar: Any) -> None:
        """The block while it is dense, on the dense model's hidden states: what it makes, and its submodules.

        layers: those that will be pruned and fitted; none: the block was pruned before.
        calls: of the pruned model, which differ from the dense one's in the hidden states alone.
        """
        fitted = {id(layer.module) for layer in layers}
        parts = () if self.recipe.unit == "block" else block.named_children()
        units = [(name, module) for name, module in parts if any(id(part) in fitted for part in module.modules())]
        if self._hidden is None:
            self._hidden = [given_hidden(call) for call in calls]
        outputs: dict[str, list[Any]] = {name: [] for name, _ in units}
        order: list[str] = []

        def watch(name: str, module: nn.Module, args: Any, output: Any) -> None:
            outputs[name].append(hidden_of(output))
            order.append(name)

        with ExitStack() as hooks:
            for name, module in units:
                hooks.enter_context(module.register_forward_hook(partial(watch, name)))
            made = outputs_of(block, with_hidden(calls, self._hidden), bar)
        first = order[: len(units)]
        plain = order == first * len(calls) and all(isinstance(o, Tensor) for group in outputs.values() for o in group)
        if plain and units:  # none: a block may be a layer itself
            self._units = [(name, dict(units)[name]) for name in first]
            self._targets = [outputs[name] for name in first]
        else:
            self._units, self._targets = [("", block)], [made]
        self._hidden = made
        self._shares = [_shares(hidden) for hidden in made]

    def fit(self, block: nn.Module, layers: list[FoundLinear], calls: list[Call], bar: Any) -> None:
        """Fits the pruned layers of the block, submodule after submodule, in place."""
        order, end = self._order(calls), bar.n + self.work(block, calls)
        inner = next(name for name, part in block.named_modules() if part is layers[0].module)
        prefix = layers[0].name.removesuffix(inner).rstrip(".")
        for (name, unit), targets in zip(self._units, self._targets, strict=True):
            full = f"{prefix}.{name}".strip(".")
            bar.set_description(f"fitting {full}", refresh=False)
            names = {id(part): part_name for part_name, part in unit.named_modules()}
            modules = [layer.module for layer in layers if id(layer.module) in names]
            weights = {f"{names[id(module)]}.weight".removeprefix("."): module.weight for module in modules}
            inputs = calls if unit is block else _inputs(block, unit, calls)
            step = (end - bar.n) // len(order) // len(self._units)
            with _deterministic():
                fit = _Fit(unit, weights, inputs, targets, self._shares, self.recipe)
                errors = fit.run(order, partial(bar.update, step))
            self.fits.append(Fit(full, *errors))
        bar.update(end - bar.n)
        self._units, self._targets, self._shares = [], [], []


def _inputs(block: nn.Module, unit: nn.Module, calls: list[Call]) -> list[Call]:
    """What the block calls its submodule with."""
    found: list[Call] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args, kwargs))
        raise Reached

    with unit.register_forward_pre_hook(hook, with_kwargs=True):
        for args, kwargs in calls:
            with suppress(Reached):
                block(*args, **kwargs)
    return found


def _shares(hidden: Tensor) -> Tensor:
    """What a squared error of each token counts: the next block divides each by its length.

    Without it the fit is about the few tokens that are a thousand times as long as others. None counts 10^4 times as
    much as it would in the mean: padding may have no length at all.
    """
    squares = hidden.float().square().sum(-1).flatten()
    return 1 / torch.maximum(squares, 1e-4 * squares.mean())


@dataclasses.dataclass
class _Fit:
    """A submodule whose weights are fitted, by their names in it: what it is called with and what it is to make."""

    unit: nn.Module
    weights: dict[str, Tensor]
    calls: list[Call]
    targets: list[Tensor]
    #: [tokens] of each call: what a token's squared error counts.
    shares: list[Tensor]
    recipe: Recipe

    def run(self, order: list[list[int]], stepped: Callable[[], Any]) -> tuple[float, float]:
        """Fits the weights; the relative squared error before and after.

        What is zero stays zero, what is not stays that, unless a grid rounds it to zero. Where the error over all calls
        is no smaller in the end, the weights are as they were, or the nearest on the grid.
        """
        weights, recipe = self.weights, self.recipe
        kept = {name: weight.detach() != 0 for name, weight in weights.items()}
        pruned = {name: weight.detach().clone() for name, weight in weights.items()}
        start = {name: recipe.rounded(weight) for name, weight in pruned.items()}
        for name, weight in weights.items():
            weight.copy_(start[name])
        # Where it makes other than a vector a token, all count the same.
        pairs = zip(self.shares, self.targets, strict=True)
        self.shares = [s if s.numel() == t[..., 0].numel() else s.new_ones(()) for s, t in pairs]
        energy = sum(float(_weighed(t, share)) for t, share in zip(self.targets, self.shares, strict=True))
        if not energy > 0 or not math.isfinite(energy):
            return 0.0, 0.0
        with _input_squares(self.unit, weights) as squares:
            before = self._whole() / energy
        sizes = {name: float(weight.float().square().sum() / kept[name].sum()) for name, weight in pruned.items()}
        # A step of Adam is as long for every weight, and changes as much as the weight's input is large. Columns of
        # more than the median take shorter ones: with a thousand times the others' inputs a fit does not settle.
        paces = {name: (of[of > 0].median() / of).sqrt().nan_to_num(1).clamp(1e-4, 1) for name, of in squares.items()}
        masters = {name: (weight.float() / paces[name]).requires_grad_() for name, weight in pruned.items()}
        factors = {name: mask * paces[name] for name, mask in kept.items()}
        groups = [{"params": [masters[name]], "scale": math.sqrt(size)} for name, size in sizes.items() if size > 0]
        if not groups:
            return before, before
        self._descend(masters, factors, groups, order, stepped)
        for name, weight in weights.items():
            new = recipe.rounded(masters[name].detach() * factors[name]).to(weight.dtype)
            # A kept weight that would round to zero stays what it was: masks are exact.
            weight.copy_(torch.where(kept[name] & (new == 0), start[name], new) if recipe.grid is None else new)
        if (after := self._whole() / energy) < before:
            return before, after
        for name, weight in weights.items():
            weight.copy_(start[name])
        return before, before

    def _descend(
        self,
        masters: dict[str, Tensor],
        factors: dict[str, Tensor],
        groups: list[dict[str, Any]],
        order: list[list[int]],
        stepped: Callable[[], Any],
    ) -> None:
        """Adam on masters, of which a weight is one times its factor."""
        recipe = self.recipe
        optimizer = torch.optim.Adam(groups, lr=recipe.lr, betas=(0.9, 0.99), fused=True)
        # Adam asks for no scale; float16 does: the gradients of a product are to be neither too small for it nor too
        # large.
        size = sum(float(_weighed(t, share.square())) for t, share in zip(self.targets, self.shares, strict=True))
        scale = math.sqrt(self.targets[0].shape[-1] * len(self.calls) / size)
        for step, batch in enumerate(order):
            rate = recipe.lr * min(1, (step + 1) / 10) * (1 + math.cos(math.pi * step / len(order))) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"]
            on_grid = recipe.grid is not None and 2 * step >= len(order)
            with torch.enable_grad():
                for i in batch:
                    used = {name: master * factors[name] for name, master in masters.items()}
                    if on_grid:  # the rounded weight, with the gradient of the one that is not
                        used = {name: w + (recipe.rounded(w.detach()) - w.detach()) for name, w in used.items()}
                    given = {name: w.to(self.weights[name].dtype) for name, w in used.items()}
                    (self._error(given, i) * (scale / len(batch))).backward(inputs=[*masters.values()])
            optimizer.step()
            optimizer.zero_grad()
            stepped()

    def _whole(self) -> float:
        """The squared error over all calls."""
        return sum(float(self._error({}, i)) for i in range(len(self.calls)))

    def _error(self, given: dict[str, Tensor], i: int) -> Tensor:
        """The squared error of what the submodule makes of a call with the weights given."""
        made = hidden_of(functional_call(self.unit, given, *self.calls[i]))
        return _weighed(made.float() - self.targets[i].float(), self.shares[i])


@contextmanager
def _input_squares(unit: nn.Module, weights: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Sums of the squares of what goes into the layers of these weights within it: [cols] by the weight's name."""
    squares: dict[str, Tensor] = {}

    def watch(name: str, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        squares[name] = squares[name] + x.float().square().flatten(0, -2).sum(0)

    with ExitStack() as hooks:
        for name, weight in weights.items():
            layer = unit.get_submodule(name.rpartition(".")[0])
            squares[name] = torch.zeros_like(weight[0], dtype=torch.float32)
            hooks.enter_context(layer.register_forward_pre_hook(partial(watch, name), with_kwargs=True))
        yield squares


def _weighed(x: Tensor, share: Tensor) -> Tensor:
    """The sum of its squares, those of a token so often."""
    return (x.float().square().sum(-1).flatten() * share).sum()


@contextmanager
def _deterministic() -> Iterator[None]:
    """Within it, the same work gives the same bits where torch has a way to that.

    Of the attention kernels, the one that saves memory has none: its gradients are summed in any order.
    """
    was, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with warnings.catch_warnings(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            warnings.filterwarnings("ignore", ".*deterministic.*")
            torch.use_deterministic_algorithms(True, warn_only=True)
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warns)
