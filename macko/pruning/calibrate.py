"""Calibration: what goes into each linear layer, block after block, for the pruning methods that look at data.

Where the model has one list of blocks (as transformers do), each is fed by the pruned blocks before it: only one block
and the activations of all batches have to be on the device. Layers elsewhere, or in a model that has no such list, are
seen in a pass of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..nn.find import FoundLinear

Call = tuple[tuple[Any, ...], dict[str, Any]]
#: statistic(inputs [tokens, cols], of an expert's layer the weights [tokens] of its router, or None)
Statistic = Callable[[Tensor, "Tensor | None"], Tensor]
#: prune(layer, what was seen of its inputs, whether it is done already)
Prune = Callable[[FoundLinear, "Tensor | None", bool], None]
#: By id, a tensor (so that its id stays its own) and where it was moved to.
Moved = dict[int, tuple[Tensor, Tensor]]


class Fits(Protocol):
    """What is done for each block around its layers (reconstruct.Fitter)."""

    def work(self, block: nn.Module, calls: list[Call]) -> int: ...
    def watch(self, block: nn.Module, layers: list[FoundLinear], calls: list[Call], bar: Any) -> None: ...
    def fit(self, block: nn.Module, layers: list[FoundLinear], calls: list[Call], bar: Any) -> None: ...


def calibrate(
    model: nn.Module,
    layers: list[FoundLinear],
    batches: list[Any],
    statistic: Statistic | None,
    prune: Prune,
    keep: Callable[[FoundLinear], None],
    device: torch.device | str | None,
    done: Container[str],
    bar: tqdm[Any],
    fitter: Fits | None = None,
) -> None:
    """Calls prune(layer, seen, done) for each layer: those of the blocks in order, then what hangs elsewhere.

    Args:
        keep: called with each layer that was not done, as soon as it will not change any more.
        statistic: None: nothing is to be seen.
        fitter: fits each block after its layers. Then a block is done where all of its layers are.
        done: names of layers that prune needs no inputs of. Their blocks run only to feed those after them.
        bar: comes with the work of pruning, in weights, as its total. A batch's way through a module is its weights.
    """
    blocks = blocks_of(model, layers)
    *groups, elsewhere = by_block(blocks, layers)
    new = [[layer for layer in group if layer.name not in done] for group in groups]
    new = [group if some else [] for group, some in zip(groups, new, strict=True)] if fitter else new
    last = max((i for i, group in enumerate(new) if group), default=-1)  # no block after it needs its inputs
    looks = [statistic is not None and bool(group) for group in new]
    rest = [model] if statistic and any(layer.name not in done for layer in elsewhere) else []
    bar.set_description("calibration", refresh=False)
    bar.total += len(batches) * sum(map(weights_in, [*_passes(blocks, looks, last, fitter is not None), *rest]))
    calls = record(model, blocks, batches, device, bar) if last >= 0 else [[] for _ in blocks]
    if calls is None or (fitter and layers and not blocks):
        if fitter:
            raise ValueError("reconstruct needs a model with one list of blocks, each called with the output before it")
        blocks, calls, elsewhere = [], [], layers
        bar.total = bar.n + len(batches) * weights_in(model) + sum(layer.module.weight.numel() for layer in layers)
    if fitter:
        bar.total += sum(fitter.work(block, calls[0]) for block, group in zip(blocks, new, strict=True) if group)
    for i, block in enumerate(blocks):
        with at(block, device):
            bar.set_description(f"inputs of block {i + 1} of {len(blocks)}", refresh=False)
            seen = gather(new[i], statistic, block, calls[i], bar)
            if fitter and i <= last:
                bar.set_description(f"dense outputs of block {i + 1} of {len(blocks)}", refresh=False)
                fitter.watch(block, new[i], calls[i], bar)
            keep_now = (lambda layer: None) if fitter else keep
            _prune(groups[i], seen, {layer.name for layer in new[i]}, prune, keep_now)
            if fitter and new[i]:
                fitter.fit(block, new[i], calls[i], bar)
                for layer in new[i]:
                    keep(layer)
            if i < last:
                bar.set_description(f"outputs of block {i + 1} of {len(blocks)}", refresh=False)
                calls[i + 1] = with_hidden(calls[i + 1], outputs_of(block, calls[i], bar))
        calls[i] = []
    if elsewhere:
        with at(model, device):
            new_ones = [layer for layer in elsewhere if layer.name not in done]
            seen = gather(new_ones, statistic, model, [as_call(model, batch) for batch in batches], bar)
        _prune(elsewhere, seen, {layer.name for layer in new_ones}, prune, keep)


def _prune(
    layers: list[FoundLinear],
    seen: dict[str, Tensor],
    fresh: set[str],
    prune: Prune,
    keep: Callable[[FoundLinear], Any],
) -> None:
    """Each layer; those whose names are fresh are kept."""
    for layer in layers:
        prune(layer, seen.pop(layer.name, None), layer.name not in fresh)
        if layer.name in fresh:
            keep(layer)


def _passes(blocks: list[nn.Module], looks: list[bool], last: int, fitted: bool) -> list[nn.Module]:
    """The blocks as often as a batch runs through each; if fitted the dense one runs too."""
    passes = [block for i, block in enumerate(blocks) for _ in range((i == 0 <= last) + looks[i] + (i < last))]
    return passes + (blocks[: last + 1] if fitted else [])


def weights_in(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def gather(
    layers: list[FoundLinear],
    statistic: Statistic | None,
    module: nn.Module,
    calls: list[Call],
    bar: tqdm[Any],
) -> dict[str, Tensor]:
    """The statistic of each layer's inputs over the calls of the module, by name."""
    seen: dict[str, Tensor] = {}

    def watch(found: FoundLinear, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        if x.numel() and statistic:
            routing = next((vars(parent).get("routing") for parent, _ in found.places), None)
            new, name = statistic(x.reshape(-1, x.shape[-1]).float(), routing), found.name
            seen[name] = seen[name] + new if name in seen else new

    with ExitStack() as hooks:
        for layer in layers:
            hook = partial(watch, layer)
            hooks.enter_context(layer.module.register_forward_pre_hook(hook, with_kwargs=True))
        for args, kwargs in calls if layers and statistic else []:
            module(*args, **kwargs)
            bar.update(weights_in(module))
    return seen


def blocks_of(model: nn.Module, layers: list[FoundLinear]) -> list[nn.Module]:
    """The model's one outermost list of modules that holds such layers, or nothing where there are none or several."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not inner:
            holds = {id(m) for m in module.modules()}
            if any(id(layer.module) in holds for layer in layers):
                found[name] = module
    return list(next(iter(found.values()))) if len(found) == 1 else []


def by_block(blocks: list[nn.Module], layers: list[FoundLinear]) -> list[list[FoundLinear]]:
    """The layers of each block and, at the end, those of none."""
    inside = {id(module): i for i, block in enumerate(blocks) for module in block.modules()}
    places = [inside.get(id(layer.module), len(blocks)) for layer in layers]
    return [[layer for layer, at in zip(layers, places, strict=True) if at == i] for i in range(len(blocks) + 1)]


class Reached(Exception):
    """Ends a pass: what follows is of no interest."""


@contextmanager
def _own_forwards(blocks: list[nn.Module]) -> Iterator[None]:
    """Behind it each block has the forward that it came with."""
    forwards = [vars(block).get("forward") for block in blocks]
    try:
        yield
    finally:
        for block, forward in zip(blocks, forwards, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward  # type: ignore[method-assign]


def record(
    model: nn.Module,
    blocks: list[nn.Module],
    batches: list[Any],
    device: torch.device | str | None,
    bar: tqdm[Any],
) -> list[list[Call]] | None:
    """What each block is called with, [block][batch], without running more than the first block.

    The others get the first one's output, and hand it on: masks and the like come from the model's own code, different
    from block to block as may be, and the true hidden states are put in later. None where the blocks are not a plain
    chain: each called once, in order, with the output of the one before it.
    """
    calls: list[list[Call]] = [[] for _ in blocks]
    first: Any = blocks[0].forward
    output: Any = None
    plain = True
    moved: Moved = {}

    def stand_in(i: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal output, plain
            given = given_hidden((args, kwargs))
            ordered = all(len(c) == len(calls[i]) + (j < i) for j, c in enumerate(calls))
            plain = plain and ordered and isinstance(given, Tensor) and (i == 0 or given is hidden_of(output))
            if not plain:
                raise Reached
            call = _without_cache((args, kwargs))
            calls[i].append(_to(call if i == 0 else _with_hidden(call, None), device, moved))
            if i == 0:
                output = _to(first(*calls[0][-1][0], **calls[0][-1][1]), given.device)
                plain = isinstance(hidden_of(output), Tensor) and hidden_of(output).shape == given.shape
            if i + 1 == len(blocks):
                raise Reached
            return output

        return forward

    with _own_forwards(blocks), at(blocks[0], device):
        for i, block in enumerate(blocks):
            block.forward = stand_in(i)  # type: ignore[method-assign]
        for batch in batches:
            moved.clear()
            args, kwargs = as_call(model, batch)
            try:
                model(*args, **kwargs)
            except Reached:
                pass
            else:
                plain = False
            if not plain:
                return None
            bar.update(weights_in(blocks[0]))
    return calls


def hidden_of(output: Any) -> Any:
    """The hidden states among a block's outputs."""
    return output[0] if isinstance(output, (tuple, list)) else output


def given_hidden(call: Call) -> Any:
    """The hidden states that a block is called with."""
    args, kwargs = call
    return args[0] if args else kwargs.get("hidden_states")


def outputs_of(block: nn.Module, calls: list[Call], bar: tqdm[Any]) -> list[Any]:
    """The hidden states that the block makes of each call."""
    made = []
    for args, kwargs in calls:
        made.append(hidden_of(block(*args, **kwargs)))
        bar.update(weights_in(block))
    return made


def with_hidden(calls: list[Call], hidden: list[Tensor]) -> list[Call]:
    """The calls, with these hidden states."""
    return [_with_hidden(call, given) for call, given in zip(calls, hidden, strict=True)]


def _with_hidden(call: Call, hidden: Tensor | None) -> Call:
    args, kwargs = call
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def _without_cache(call: Call) -> Call:
    """Blocks run more than once on one call: keys and values must not pile up."""
    args, kwargs = call
    return args, {name: None if name.startswith("past_key_value") else value for name, value in kwargs.items()}


def _to(value: Any, device: torch.device | str | None, moved: Moved | None = None) -> Any:
    """The tensors in nested tuples, lists and dicts on a device; each one once, where `moved` remembers them."""
    if device is None:
        return value
    moved = {} if moved is None else moved
    if isinstance(value, Tensor):
        return moved.setdefault(id(value), (value, value.to(device)))[1]
    if type(value) in (tuple, list):
        return type(value)(_to(item, device, moved) for item in value)
    if type(value) is dict:
        return {key: _to(item, device, moved) for key, item in value.items()}
    return value


def as_call(model: nn.Module, batch: Any) -> Call:
    """A batch as the arguments of the model, where the model is."""
    home = next((p.device for p in model.parameters()), None)
    if hasattr(batch, "keys"):
        return (), _to(dict(batch), home)
    return _to(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), home), {}


@contextmanager
def at(module: nn.Module, device: torch.device | str | None) -> Iterator[None]:
    """Within it, the module is on the device."""
    home = next((p.device for p in module.parameters()), None)
    if device is None or home is None or home == torch.device(device):
        yield
        return
    module.to(device)
    try:
        yield
    finally:
        module.to(home)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it, no module is in training mode, and no Hugging Face model keeps keys and values."""
    training = [module for module in model.modules() if module.training]
    configs: dict[int, Any] = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    configs = {key: config for key, config in configs.items() if getattr(config, "use_cache", None) is True}
    try:
        model.eval()
        for config in configs.values():
            config.use_cache = False
        yield
    finally:
        for config in configs.values():
            config.use_cache = True
        for module in training:
            module.training = True
