"""prune_: zeros into the linear layers of a model, in place, one function a method.

A method is a plain function (weight, share, pattern, seen) -> the pruned weight. `share` is the share of zeros,
`pattern` None or (n, m) for at most n non-zeros in every m columns that follow each other, and `seen` what STATISTICS
gathered of the layer's inputs.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..choose.auto import SPARSE11_LISTED
from ..choose.exponents import outside_table
from ..choose.patterns import density_of
from ..nn.experts import find_experts, is_adapted, is_experts, oriented, packed_rows, projections, unfolded
from ..nn.find import IGNORED, Filter, FoundLinear, check_model, find_linears, unpackable
from ..nn.linear import DTYPES, SparseLinear
from ..nn.report import LayerReport, Report
from .allocate import STRENGTHS, STRENGTHS_FITTED, allocate
from .calibrate import Statistic, calibrate, evaluating
from .grids import Grid
from .reconstruct import Fitter, Recipe, recipe_of

Pattern = tuple[int, int]

#: SparseGPT chooses the weights to prune in so many columns at once, and updates those after them once a block.
SPARSEGPT_BLOCK = 128
#: SparseGPT adds this share of the Hessian's mean diagonal to its diagonal.
SPARSEGPT_DAMPING = 0.01


def magnitude(weight: Tensor, share: float, pattern: Pattern | None, seen: Tensor | None) -> Tensor:
    """Prunes the smallest |w| of every row."""
    return weight.masked_fill(lowest(weight.abs(), share, pattern), 0)


def wanda(weight: Tensor, share: float, pattern: Pattern | None, seen: Tensor) -> Tensor:
    """Prunes the smallest |w| times the norm of its input, row by row (Sun et al., 2023, arXiv 2306.11695).

    seen: [cols], sums of the squares of the inputs.
    """
    return weight.masked_fill(lowest(weight.abs().float() * seen.sqrt(), share, pattern), 0)


def sparsegpt(weight: Tensor, share: float, pattern: Pattern | None, seen: Tensor, grid: Grid | None = None) -> Tensor:
    """Prunes column by column and corrects the columns after for it (Frantar and Alistarh, 2023, arXiv 2301.00774).

    What goes is chosen in blocks of columns over all rows, so rows keep different numbers of weights.

    Args:
        seen: [cols, cols], the inputs' sums of products.
        grid: rounds what is kept in the same pass (macko.grids), so that the columns after make up for that too; with
            share 0 that is GPTQ, and zeros that are there stay. The result is the rounded weights, as numbers.
    """
    w = weight.to(torch.float32, copy=True)
    rows, cols = w.shape
    factor, unused = _inverse_factor(seen), seen.diagonal() == 0
    width = SPARSEGPT_BLOCK if pattern is None else max(1, SPARSEGPT_BLOCK // pattern[1]) * pattern[1]
    for start in range(0, cols, width):
        stop = min(start + width, cols)
        block, corner = w[:, start:stop].clone(), factor[start:stop, start:stop]
        diagonal, idle = corner.diagonal(), unused[start:stop]
        if pattern is None:
            count = round(rows * stop * share) - round(rows * start * share)
            mask = _lowest_of_row(_loss(block, diagonal, idle).reshape(1, -1), count).view(block.shape)
            mask |= (weight[:, start:stop] == 0) & (share == 0)
        else:
            mask = torch.zeros_like(block, dtype=torch.bool)
        errors = torch.zeros_like(block)
        rounded = None if grid is None else grid(block.masked_fill(mask, 0))
        for col in range(stop - start):
            if pattern is not None and col % pattern[1] == 0:
                group = slice(col, col + pattern[1])
                mask[:, group] = lowest(_loss(block[:, group], diagonal[group], idle[group]), share, pattern)
            left = block[:, col].masked_fill(mask[:, col], 0)
            if rounded is not None:
                left = rounded(left).masked_fill_(mask[:, col], 0)
            errors[:, col] = (block[:, col] - left) / diagonal[col]
            block[:, col:] -= errors[:, col, None] * corner[col, col:]
            block[:, col] = left
        w[:, start:stop] = block.masked_fill_(mask, 0)
        w[:, stop:] -= errors @ factor[start:stop, stop:]
    return w.to(weight.dtype)


def _loss(block: Tensor, diagonal: Tensor, idle: Tensor) -> Tensor:
    """What it costs to prune each weight of the block; nothing after an input that was never seen."""
    return (block / diagonal).square().masked_fill_(idle, 0)


def _inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped gram matrix."""
    damping = SPARSEGPT_DAMPING * gram.diagonal().mean()
    for _ in range(6):
        damped = gram + damping * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        root, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(root), upper=True)
            if not failed:
                return factor
        damping *= 10  # too few calibration tokens for float32: the matrix is singular to rounding
    raise ValueError("the layer's inputs hold NaN or Inf: its Hessian has no inverse")


def lowest(score: Tensor, share: float, pattern: Pattern | None = None) -> Tensor:
    """A bool mask of the lowest scores of every row of [rows, cols]; of equal ones those of lower column go first.

    A row's count is rounded such that the whole comes nearest to `share`. NaN and Inf go last.
    """
    rows, cols = score.shape
    score = score.nan_to_num(nan=torch.inf, posinf=torch.inf)
    if pattern is not None:
        n, m = pattern
        order = score.reshape(-1, m).argsort(dim=1, stable=True)
        return torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, : m - n], True).view(rows, cols)
    ends = (torch.arange(rows + 1, dtype=torch.float64) * cols * share).round().long()
    counts = ends.diff()
    mask = torch.zeros_like(score, dtype=torch.bool)
    for count in counts.unique().tolist():  # two at most
        chosen = (counts == count).nonzero().flatten().to(score.device)
        mask[chosen] = _lowest_of_row(score[chosen], count)
    return mask


def _lowest_of_row(score: Tensor, count: int) -> Tensor:
    if count == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    limit = score.kthvalue(count, dim=1, keepdim=True).values
    smaller, equal = score < limit, score == limit
    left = count - smaller.sum(1, keepdim=True)
    return smaller | (equal & (equal.cumsum(1, dtype=torch.int32) <= left))


def _squares(x: Tensor, routing: Tensor | None) -> Tensor:
    return x.square().sum(0)


def _routed_squares(x: Tensor, routing: Tensor | None) -> Tensor:
    return _squares(x if routing is None else x * routing.unsqueeze(-1), None)


def _products(x: Tensor, routing: Tensor | None) -> Tensor:
    return x.t() @ x


#: By name: method(weight [rows, cols], share of zeros, pattern, what was seen) -> pruned weight.
METHODS: dict[str, Callable[..., Tensor]] = {
    "magnitude": magnitude,
    "wanda": wanda,
    "moe-pruner": wanda,
    "sparsegpt": sparsegpt,
}
#: What a method sums over the inputs [tokens, cols] of a layer; a method that is not here needs no calibration.
STATISTICS: dict[str, Statistic] = {"wanda": _squares, "moe-pruner": _routed_squares, "sparsegpt": _products}


def prune_(
    model: nn.Module,
    sparsity: float | str | None = None,
    method: str = "magnitude",
    *,
    pattern: str | None = None,
    calibration: Iterable[Any] | None = None,
    ignore: Iterable[str] = IGNORED,
    filter_fn: Filter | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    done: MutableMapping[str, Tensor] | None = None,
    reconstruct: str | Recipe | None = None,
) -> Report:
    """Sets a share of every linear layer's weight to zero, in place.

    "wanda" and "sparsegpt" look at what goes into each layer (macko.calibrate). The same batches give the same bits.

    Args:
        model: any module; a single nn.Linear too.
        sparsity: share of zeros, 0.5 without a pattern. "magnitude" and "wanda" set as many in every row. "auto:0.5":
            as many in all, but more in layers whose output changes little by it (macko.allocate), which takes
            calibration, and one pass of it more.
        method: "magnitude": the smallest values of a row, which takes no calibration and is the default here (the
            command's is wanda); "wanda" (Sun et al., 2023, arXiv 2306.11695): the smallest of value times norm of its
            input; "moe-pruner" (Xie et al., 2024, arXiv 2410.12013): the same, but the input of an expert counts as its
            router weighs it; "sparsegpt" (Frantar and Alistarh, 2023, arXiv 2301.00774): what changes the layer's
            output least, and the other weights are corrected for it.
        pattern: "n:m", at most n non-zeros in every m columns that follow each other ("2:4", "6:8"); says the sparsity.
        calibration: batches for model(batch), model(*batch) or model(**batch) by their type: a few dozen real texts.
        ignore, filter_fn, progress: as in macko.sparsify_.
        device: where to calibrate and prune, block by block; default: where the model is.
        done: pruned weights [rows, cols] by the layer's name, a dict or something that writes to disk. Each is put in
            as soon as it is pruned, and those in it are taken from there: a call that was interrupted goes on, of the
            model as it was before, the same arguments and the same `done`, to the same bits in the end.
        reconstruct: "submodule", "block", or a macko.reconstruct.Recipe: after each block's masks its kept weights are
            fitted, attention and MLP each by itself or the block as a whole, such that they make of the pruned model's
            inputs what they made in the dense one. Takes calibration and a model with one list of blocks. With `done` a
            block counts once all of it is fitted.

    Returns:
        A Report of every nn.Linear with the density it has now, why it was left, and what was fitted. A shared weight
        is pruned once; what looks like a layer and is none (GPT-2's Conv1D) is named too. Experts of a mixture that
        transformers holds in one tensor are pruned one by one, as layers NAME.experts.3.gate_proj of their own tokens;
        a line names those that no token of the calibration reached. Routers beside these stay.

    Example:
        >>> macko.prune_(model, 0.5, "wanda", calibration=[tokenizer(text, return_tensors="pt") for text in texts])

    Raises:
        ValueError: sparsity, method, pattern or reconstruct is none or does not fit, or calibration is missing.
        TypeError: calibration is no list of batches, or the model is none. Nothing has been changed then, nor by a
            ValueError.

    Whatever else stops it (a batch that the model does not take, a KeyboardInterrupt) leaves a model whose first layers
    are pruned and whose others are as they were. A note on the exception says which (before Python 3.11: a warning).
    """
    check_model(model, "prune_")
    if is_experts(model):
        raise ValueError(
            "prune_ replaces modules in a model for a while, this model is one of experts: give it what holds them"
        )
    if any(is_experts(module) for module in model.modules()):
        # Each expert as layers of its own, which see its own tokens alone; their weights are views of the stack.
        with unfolded(model, lambda name, module: is_experts(module) and not is_adapted(name)):
            return _prune(
                model, sparsity, method, pattern, calibration, ignore, filter_fn, device, progress, done, reconstruct
            )
    return _prune(model, sparsity, method, pattern, calibration, ignore, filter_fn, device, progress, done, reconstruct)


def _prune(
    model: nn.Module,
    sparsity: float | str | None,
    method: str,
    pattern: str | None,
    calibration: Iterable[Any] | None,
    ignore: Iterable[str],
    filter_fn: Filter | None,
    device: torch.device | str | None,
    progress: bool,
    done: MutableMapping[str, Tensor] | None,
    reconstruct: str | Recipe | None,
) -> Report:
    """prune_ of a model whose matrices are all layers."""
    share, groups, auto = asked_for(sparsity, method, pattern)
    fitter = None if reconstruct is None else Fitter(recipe_of(reconstruct))
    wants = {f"method {method!r}": method in STATISTICS, "reconstruct": fitter, f"sparsity {sparsity!r}": auto}
    batches = _batches(calibration, [what for what, needs in wants.items() if needs])
    found = find_linears(model, ignore, filter_fn)
    reasons = _reasons(found, groups)
    todo = [layer for layer in found if not reasons[layer.name]]
    pruning = _Pruning(method, share, groups, device, done, fitter, auto)
    with torch.no_grad():
        pruning.run(model, todo, batches, progress)
    rows = [*(_row(layer, reasons[layer.name]) for layer in found), *packed_rows(model), *_adapted(model)]
    rows += unpackable(model, is_experts)
    notes = [*pruning.notes, *pruning.unreached(), *_exponents(todo)]
    return Report(rows, fitter.fits if fitter else [], notes)


@dataclasses.dataclass
class _Pruning:
    """What a call of prune_ was asked for, and how far it has come."""

    method: str
    share: float
    pattern: Pattern | None
    device: torch.device | str | None
    done: MutableMapping[str, Tensor] | None
    fitter: Fitter | None = None
    auto: bool = False
    #: Zeros of layers that have a share of their own, by name.
    zeros: dict[str, int] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    pruned: list[str] = dataclasses.field(default_factory=list)
    #: Layers that no input reached in calibration.
    unseen: list[str] = dataclasses.field(default_factory=list)

    def run(self, model: nn.Module, todo: list[FoundLinear], batches: list[Any], progress: bool) -> None:
        """All layers; how far it came is noted on whatever stops it."""
        with tqdm(
            total=sum(layer.module.weight.numel() for layer in todo), disable=not progress, delay=1, leave=False,
            smoothing=0, miniters=1, bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
        ) as bar:  # fmt: skip

            def prune(layer: FoundLinear, seen: Tensor | None, kept: bool) -> None:
                bar.set_description(layer.name, refresh=False)
                self.layer(layer, seen, kept)
                bar.update(layer.module.weight.numel())

            try:
                done: Container[str] = self.done or {}
                if self.auto and todo:
                    self.allocate(model, todo, batches, bar)
                if self.method in STATISTICS or self.fitter:
                    statistic = STATISTICS.get(self.method)
                    with evaluating(model):
                        calibrate(
                            model, todo, batches, statistic, prune, self.keep, self.device, done, bar, self.fitter
                        )
                else:
                    for layer in todo:
                        kept = layer.name in done
                        prune(layer, None, kept)
                        if not kept:
                            self.keep(layer)
            except BaseException as error:
                state = f"up to {self.pruned[-1]} they are pruned, the others" if self.pruned else "all"
                text = f"prune_ stopped after {len(self.pruned)} of {len(todo)} layers: {state} are as they were"
                _note(error, text)
                raise

    def allocate(self, model: nn.Module, todo: list[FoundLinear], batches: list[Any], bar: tqdm[Any]) -> None:
        """The zeros of each layer. What is left out of a layer's curve is taken by magnitude or by Wanda."""
        data = self.method != "magnitude"

        def prune(weight: Tensor, share: float, seen: Tensor | None) -> Tensor:
            return wanda(weight, share, None, seen) if seen is not None else magnitude(weight, share, None, None)

        with evaluating(model):
            statistic = None if not data else _routed_squares if self.method == "moe-pruner" else _squares
            self.zeros, errors = allocate(
                model, todo, batches, self.share, statistic, prune, self.device, bar,
                STRENGTHS_FITTED if self.fitter else STRENGTHS,
            )  # fmt: skip
        even, least = errors[0.0], min(errors.values())
        gain = (
            f"are taken: they lose {least / even:.2f} of what even ones do"
            if least < even
            else "lose no less than even"
        )
        self.notes.append(f"auto: uneven shares {gain}, by the error after the last block")

    def layer(self, layer: FoundLinear, seen: Tensor | None, kept: bool) -> None:
        """One layer, of which STATISTICS gathered `seen`."""
        new = self._kept(layer) if kept else self._new(layer, seen)
        self.pruned.append(layer.name)  # a KeyboardInterrupt comes after copy_, not within it
        layer.module.weight.copy_(new)

    def unreached(self) -> list[str]:
        """Which layers were pruned without data, as a line."""
        if not (names := self.unseen):
            return []
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return [f"By magnitude, as no input reached them in calibration: {', '.join(names[:4])}{more}."]

    def keep(self, layer: FoundLinear) -> None:
        """Puts a layer that will not change any more into `done`."""
        if self.done is not None:
            self.done[layer.name] = layer.module.weight.detach().to("cpu", copy=True)

    def _kept(self, layer: FoundLinear) -> Tensor:
        assert self.done is not None
        new, weight = self.done[layer.name], layer.module.weight
        if (new.shape, new.dtype) != (weight.shape, weight.dtype):
            came, wanted = (f"{list(w.shape)} of {w.dtype}" for w in (new, weight))
            raise ValueError(f"done[{layer.name!r}] is {came}, the layer's weight {wanted}")
        return new

    def _new(self, layer: FoundLinear, seen: Tensor | None) -> Tensor:
        weight, use = layer.module.weight, METHODS[self.method]
        if self.method in STATISTICS and (seen is None or not seen.any()):
            warnings.warn(f"{layer.name}: no input reached it in calibration; pruned by magnitude", stacklevel=3)
            use = magnitude
            self.unseen.append(layer.name)
        share = self.zeros[layer.name] / weight.numel() if layer.name in self.zeros else self.share
        try:
            return use(weight if self.device is None else weight.to(self.device), share, self.pattern, seen)
        except ValueError as error:
            raise ValueError(f"{layer.name}: {error}") from None


def _exponents(layers: list[FoundLinear]) -> list[str]:
    """Whether sparse11 can hold the weights that are left, as a line."""
    found = [outside_table(layer.module.weight.detach().to(torch.bfloat16), signed=True) for layer in layers]
    fits = [lacks <= SPARSE11_LISTED * count for lacks, count in found if count]
    if not fits:
        return []
    which = f"{sum(fits)} of {len(fits)} layers" if not all(fits) else "all of them" if len(fits) > 1 else "it"
    return [f"On a GPU, in bfloat16, 11 bits a weight can hold {which}, bit for bit (sparse11)."]


def _reasons(found: list[FoundLinear], pattern: Pattern | None) -> dict[str, str]:
    """Why each layer is left, by its name; nothing where it is to be pruned."""
    reasons = {layer.name: layer.left_out or _why_not(layer.module, pattern) for layer in found}
    first: dict[int, str] = {}
    for layer in found:
        if not reasons[layer.name] and (same := first.setdefault(id(layer.module.weight), layer.name)) != layer.name:
            reasons[layer.name] = f"shares the weight of {same}"
    return reasons


def asked_for(sparsity: float | str | None, method: str, pattern: str | None) -> tuple[float, Pattern | None, bool]:
    """The share of zeros and the pattern that these arguments of prune_ mean, and whether layers' shares differ.

    ValueError where they mean none.
    """
    groups = _parse(pattern)
    auto = isinstance(sparsity, str)
    if isinstance(sparsity, str):
        if groups is not None:
            raise ValueError(f"sparsity is {sparsity!r}, but pattern {pattern} has the same share in every layer")
        if not re.fullmatch(r"auto:0?\.\d*[1-9]\d*", sparsity):
            raise ValueError(f"sparsity is {sparsity!r}, expected a number, or auto:0.5 (half of the weights in all)")
        sparsity = float(sparsity[len("auto:") :])
    if groups is not None:
        implied = 1 - groups[0] / groups[1]
        if sparsity is not None and abs(sparsity - implied) > 1e-6:
            raise ValueError(f"pattern {pattern} is {implied:.1%} sparse, but sparsity is {sparsity}; leave one out")
        sparsity = implied
    sparsity = 0.5 if sparsity is None else sparsity
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity is {sparsity}, expected 0 <= sparsity < 1 (0.5 sets half of every row to zero)")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, expected one of {', '.join(METHODS)}")
    return sparsity, groups, auto


def _batches(calibration: Any, needs: list[str]) -> list[Any]:
    """The batches as a list; TypeError for what only looks like one: a tensor's rows, a dict's keys, texts.

    needs: what cannot do without, ValueError then.
    """
    calibration = () if calibration is None else calibration
    wanted = "expected a list of batches, each for model(batch), model(*batch) or model(**batch)"
    if isinstance(calibration, (Tensor, str, bytes)) or hasattr(calibration, "keys"):
        raise TypeError(f"calibration is one {type(calibration).__name__}, {wanted}: [it] for a single one")
    if not isinstance(calibration, Iterable):
        raise TypeError(f"calibration is a {type(calibration).__name__}, {wanted}")
    batches = list(calibration)
    for i, batch in enumerate(batches):
        inputs = batch if isinstance(batch, (tuple, list)) else [batch]
        if any(isinstance(given, (str, bytes)) for given in inputs):
            raise TypeError(f"calibration[{i}] is text, {wanted}: tokenize it first, tokenizer(text).input_ids")
        if not isinstance(batch, Mapping) and all(isinstance(given, (int, float)) for given in inputs):
            raise TypeError(f"calibration[{i}] has numbers, {wanted}: make a tensor of them, [1, tokens] for a text")
    if needs and not batches:
        raise ValueError(f"{needs[0]} needs calibration=: batches of inputs for the model")
    return batches


def _note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        warnings.warn(text, stacklevel=4)  # at the caller of prune_


def _parse(pattern: str | None) -> Pattern | None:
    if pattern is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", pattern)
    if not match or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(f"pattern is {pattern!r}, expected n:m with 0 < n < m, as 2:4 (two non-zeros in four columns)")
    return int(match[1]), int(match[2])


def _why_not(module: nn.Linear, pattern: Pattern | None) -> str:
    if isinstance(module, SparseLinear):
        return "is sparse already"
    if "weight" not in module._parameters:
        return "its weight is made from other tensors"
    if module.weight.device.type == "meta":
        return "its weight is on the meta device"
    if type(module.weight) is not nn.Parameter or module.weight.dtype not in (*DTYPES, torch.float64):
        return f"its weight is a {type(module.weight).__name__} of {module.weight.dtype}"
    if pattern is not None and module.weight.shape[1] % pattern[1]:
        return f"its {module.weight.shape[1]} columns are no multiple of {pattern[1]}"
    return ""


def _adapted(model: nn.Module) -> list[LayerReport]:
    """Rows of the experts that an adapter changes, while all others are layers of their own."""
    rows = []
    for experts in find_experts(model, (), None):
        for key in projections(experts.module):
            w = oriented(experts.module, key)
            about = (tuple(w.shape), density_of(w), "dense", w.nbytes, w.nbytes, experts.left_out or "")
            rows.append(LayerReport(f"{experts.name}.{key}", *about, linear=False))
    return rows


def _row(layer: FoundLinear, reason: str) -> LayerReport:
    module, shape = layer.module, (layer.module.out_features, layer.module.in_features)
    if isinstance(module, SparseLinear) or type(module._parameters.get("weight")) is not nn.Parameter:
        return LayerReport(layer.name, shape, None, getattr(module, "format", "dense"), 0, 0, reason)
    size = 0 if reason.startswith("shares") else module.weight.nbytes
    return LayerReport(layer.name, shape, density_of(module.weight), "dense", size, size, reason)
