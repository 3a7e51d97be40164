"""evaluate: how well a model does, and how far it is from the dense one: the numbers that papers on pruning give.

A language model: perplexity over windows of a text, KL divergence from the dense model's next tokens, how often both
hold the same token for the likeliest. A model of embeddings: cosine to the dense one's, and whether pairs of texts
are as near to each other (Spearman's rank correlation). Of both, how far each linear layer's output is off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..pruning.calibrate import as_call, evaluating, hidden_of

#: Logits of so many tokens are held in float32 at once.
TOKENS = 512


def windows(tokens: Tensor, length: int, most: int | None = None) -> list[Tensor]:
    """Batches [1, length]: a text [tokens] cut one after the other, as the papers do; a rest is left out.

    most: at most so many, spread evenly over the text.

    Raises:
        ValueError: the text is shorter than one.
    """
    count = len(tokens) // length
    if count < 1:
        raise ValueError(f"the text has {len(tokens)} tokens, less than one window of {length}")
    most = min(count, most or count)
    places = [i * count // most for i in range(most)]
    return [tokens[None, i * length : (i + 1) * length] for i in places]


@torch.no_grad()
def language(
    model: nn.Module, batches: Iterable[Tensor], against: nn.Module | None = None, progress: bool = True
) -> dict[str, Any]:
    """Of a causal language model, over batches [texts, tokens] of ids.

    Args:
        against: the dense model.

    Returns:
        loss (mean cross entropy of the next token, in nats), perplexity, tokens; against another model also kl (mean
        of KL(its next token || this one's), in nats), agreement (share of tokens whose likeliest one is the same),
        and its loss and perplexity as against_loss and against_perplexity.
    """
    total, count = torch.zeros(4, dtype=torch.float64), 0
    models = [model] if against is None else [model, against]
    home = next(model.parameters()).device
    with evaluating(model), evaluating(models[-1]):
        for ids in tqdm(batches, desc="windows", disable=not progress, delay=1, leave=False):
            logits = [_logits(each, ids)[:, :-1].flatten(0, 1) for each in models]
            wanted = ids[:, 1:].flatten().to(home)
            for start in range(0, len(wanted), TOKENS):
                part = slice(start, start + TOKENS)
                says = [each[part].to(home, torch.float32).log_softmax(-1) for each in logits]
                loss = [-each.gather(1, wanted[part, None]).sum() for each in says]
                ours, other = says[0], says[-1]
                kl = (other.exp() * (other - ours)).sum()
                same = (ours.argmax(-1) == other.argmax(-1)).sum()
                total += torch.stack([loss[0], loss[-1], kl, same]).double().cpu()
            count += len(wanted)
    loss, other_loss, kl, same = (total / max(1, count)).tolist()
    found: dict[str, Any] = {"tokens": count, "loss": loss, "perplexity": _exp(loss)}
    if against is not None:
        found |= {
            "kl": kl, "agreement": same, "against_loss": other_loss, "against_perplexity": _exp(other_loss),
            "perplexity_ratio": _exp(loss - other_loss),
        }  # fmt: skip
    return found


@torch.no_grad()
def embeddings(
    model: nn.Module, batches: Iterable[dict[str, Tensor]], against: nn.Module, progress: bool = True
) -> dict[str, float]:
    """Of an encoder, over batches of a tokenizer: texts' embeddings are means over their tokens.

    Returns:
        texts, cosine (mean over texts, to `against`), worst_cosine, and rank_correlation: Spearman's, over all pairs
        of texts, of how near they are in the one model and in the other.
    """
    found: list[list[Tensor]] = [[], []]
    with evaluating(model), evaluating(against):
        for batch in tqdm(batches, desc="texts", disable=not progress, delay=1, leave=False):
            for each, rows in zip((model, against), found, strict=True):
                _, given = as_call(each, batch)
                hidden = hidden_of(tuple(each(**given).values())).cpu().double()
                mask = batch["attention_mask"].cpu().double()[..., None]
                rows.append(nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
    ours, other = (torch.cat(rows) for rows in found)
    cosine = (ours * other).sum(1)
    pairs = torch.triu_indices(len(ours), len(ours), 1)
    near = [(rows @ rows.t())[pairs[0], pairs[1]] for rows in (ours, other)]
    return {
        "texts": len(ours), "cosine": float(cosine.mean()), "worst_cosine": float(cosine.min()),
        "rank_correlation": rank_correlation(*near),
    }  # fmt: skip


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's: the correlation of the ranks of two vectors; equal values share the mean of theirs."""

    def ranks(values: Tensor) -> Tensor:
        _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
        ends = counts.cumsum(0).double()
        return (ends - (counts.double() + 1) / 2)[inverse]

    both = torch.stack([ranks(x), ranks(y)])
    return float(torch.corrcoef(both)[0, 1]) if len(x) > 1 else math.nan


@torch.no_grad()
def layer_errors(model: nn.Module, batches: Iterable[Any], against: nn.Module) -> dict[str, float]:
    """How far each linear layer's output is from the dense model's: squared difference over squares of the dense.

    Each model sees its own inputs, so what earlier layers lost counts. Layers are paired by name; those that only one
    model has, or that make other shapes, are left out.

    Args:
        batches: for model(batch), model(*batch) or model(**batch) by their type. The outputs of all layers are held for
            one of them.
    """
    ours = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    others = {name: module for name, module in against.named_modules() if isinstance(module, nn.Linear)}
    outputs: list[dict[str, Tensor]] = [{}, {}]

    def watch(side: int, name: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs[side][name] = output.detach()

    sums: dict[str, list[float]] = {}
    names = [name for name in others if name in ours]
    with ExitStack() as within:
        for side, layers in enumerate((ours, others)):
            for name in names:
                within.enter_context(layers[name].register_forward_hook(partial(watch, side, name)))
        within.enter_context(evaluating(model))
        within.enter_context(evaluating(against))
        for batch in batches:
            for each in (model, against):
                args, kwargs = as_call(each, batch)
                each(*args, **kwargs)
            for name in names:
                a, b = (side.pop(name, None) for side in outputs)
                if a is not None and b is not None and a.shape == b.shape:
                    a, b = a.float(), b.to(a.device).float()
                    more = float((a - b).square().sum()), float(b.square().sum())
                    sums[name] = [x + y for x, y in zip(sums.get(name, (0.0, 0.0)), more, strict=True)]
    return {name: lost / of if of else 0.0 for name, (lost, of) in sums.items()}


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids.to(next(model.parameters()).device)).logits


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
