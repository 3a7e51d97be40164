"""What the patterns of slide cost in quality, in 16 bits and in 8, and how unequal 2:4's errors are from row to row.

    python -m benchmarks.slide_quality OUT --size 40m                    six minutes on an H100
    python -m benchmarks.slide_quality OUT --size minilm --device cpu    all-MiniLM-L6-v2, on a CPU, without 8:10

The models, texts and scores of benchmarks.quality; 40m is its Llama with 480 columns, which every pattern divides.
SparseGPT prunes to 2:4, 4:6, 6:8 and 8:10, in one shot and fitted; each model is judged with its values as they are,
and with every linear layer on slide's kernels in int8 and float8, which rounds activations too.

Blocks: of every 64 rows of a layer, at 2:4 and at 6:8, the error of the outputs over the calibration, by SparseGPT on
the dense model. "dense_rows" is the least share of rows that have to stay dense for the rest's 2:4 errors to come to no
more than 6:8's of all: with blocks as they are, and with rows sorted by error before they are cut into blocks. A line
goes to OUT/slide_quality.jsonl as soon as it is known; a second call leaves out what has one.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

import macko
from benchmarks import quality
from benchmarks.timing import append_jsonl
from macko.measure.evaluate import embeddings, language
from macko.nn.find import IGNORED, FoundLinear, find_linears
from macko.pruning.prune import METHODS, STATISTICS, sparsegpt
from macko.weights import SLIDE_ELEMENTS, SLIDE_PATTERNS, SlideWeight

PATTERNS = ("2:4", "4:6", "6:8", "8:10")
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
#: Rows that a kernel takes as one.
BLOCK = 64


def pruned(model: Any) -> list[FoundLinear]:
    """The linear layers that prune_ prunes."""
    return [layer for layer in find_linears(model, IGNORED, None) if not layer.left_out]


def on_slide(model: Any, pattern: str, dtype: torch.dtype) -> Any:
    """A copy of the model whose linear layers are slide's."""
    made = copy.deepcopy(model)
    if model.device.type == "cuda":
        quality.cast(made, torch.float16)  # slide takes no float32 there
    for layer in pruned(made):
        n, element = SLIDE_PATTERNS.get(pattern, 0), SLIDE_ELEMENTS.index(dtype)
        packed = SlideWeight.from_dense(layer.module.weight.detach(), n, element)
        made.set_submodule(layer.name, macko.SparseLinear.from_packed(packed, layer.module.bias))
    return made


def block_errors(model: Any, batches: list[Any]) -> list[dict[str, Tensor]]:
    """Of each layer by pattern the error of each row's outputs, of the layers as they are, by SparseGPT."""
    found: list[dict[str, Tensor]] = []

    def watch(weight: Tensor, share: float, pattern: Any, products: Tensor) -> Tensor:
        errors = {}
        for name, groups in (("2:4", (2, 4)), ("6:8", (6, 8))):
            change = (sparsegpt(weight, 0.0, groups, products) - weight).double()
            errors[name] = (change @ products.double() * change).sum(1).clamp(min=0).cpu()
        found.append(errors)
        return weight

    METHODS["watched"], STATISTICS["watched"] = watch, STATISTICS["sparsegpt"]
    macko.prune_(copy.deepcopy(model), 0.5, "watched", calibration=batches, progress=False)
    del METHODS["watched"], STATISTICS["watched"]
    return found


def dense_share(errors: Tensor, allowed: float) -> float:
    """The least share of blocks that stay dense for the others' errors to sum up to no more than `allowed`."""
    kept = errors.sort().values.cumsum(0)
    return 1 - int((kept <= allowed).sum()) / len(errors)


def blocks_of(rows: Tensor) -> Tensor:
    whole = rows[: len(rows) // BLOCK * BLOCK]
    return whole.view(-1, BLOCK).sum(1)


def spread(found: list[dict[str, Tensor]]) -> dict[str, Any]:
    """How unequal blocks are, and the rows that would stay dense: the mean over the layers, each with its own bar."""
    about: dict[str, Any] = {"layers": len(found), "blocks": sum(len(each["2:4"]) // BLOCK for each in found)}
    ways = {"as_they_are": lambda rows: blocks_of(rows), "sorted": lambda rows: blocks_of(rows.sort().values)}
    for way, cut in ways.items():
        of_2_4 = [cut(each["2:4"]) for each in found]
        shares = [dense_share(b, float(blocks_of(each["6:8"]).sum())) for b, each in zip(of_2_4, found, strict=True)]
        weights = [len(b) for b in of_2_4]
        mean = sum(s * w for s, w in zip(shares, weights, strict=True)) / sum(weights)
        logs = [(b / b.mean()).clamp(min=1e-9).log().std().item() for b in of_2_4 if len(b) > 1]
        about[way] = {
            "dense_rows": mean, "dense_rows_by_layer": [round(share, 3) for share in shares],
            "log_spread": sum(logs) / len(logs),
        }  # fmt: skip
    total = [sum(float(each[name].sum()) for each in found) for name in ("2:4", "6:8")]
    return {**about, "error_6_8_over_2_4": total[1] / total[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quality.add_arguments(parser)
    parser.add_argument(
        "--types", nargs="*", choices=TYPES, default=[*TYPES], help="of values, besides those as they are"
    )
    parser.add_argument("--units", default=",submodule", help="of fits: one shot and by submodule")
    args = parser.parse_args()
    begin, device = time.perf_counter(), torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begin:6.1f} s  {text}", flush=True)

    is_encoder = args.size == "minilm"
    model, (batches, _), judged, about, recipe = quality.given(args, device, say)
    make = partial(quality.make, batches=batches, recipe=recipe)
    dense, _ = make(model, quality.Variant("dense"))
    score = embeddings if is_encoder else language
    lines = args.out / "slide_quality.jsonl"
    write = partial(append_jsonl, lines)

    def there(**keys: Any) -> bool:
        known = map(json.loads, lines.read_text().splitlines() if lines.exists() else ())
        return any(all(line.get(key) == value for key, value in {**about, **keys}.items()) for line in known)

    if not there(what="blocks"):
        found = spread(block_errors(dense, batches))
        write(what="blocks", **found, **about)
        say(f"blocks: {found}")

    def judge(smaller: Any, pattern: str, unit: str, values: str, seconds: float) -> None:
        scores = score(smaller, judged, dense, progress=False)
        write(what="quality", pattern=pattern, reconstruct=unit, values=values, seconds=seconds, **scores, **about)
        numbers = {key: round(v, 4) for key, v in scores.items() if isinstance(v, float)}
        say(f"{pattern:5} {unit or 'one shot':10} {values:5} {numbers}")

    def judge_all(smaller: Any, pattern: str, unit: str, seconds: float) -> None:
        judge(smaller, pattern, unit, "exact", seconds)
        for values in args.types:
            judge(on_slide(smaller, pattern, TYPES[values]), pattern, unit, values, seconds)

    last = (args.types or ["exact"])[-1]
    if not there(pattern="dense", values=last):
        judge_all(dense, "dense", "", 0)
    cols = {layer.module.weight.shape[1] for layer in pruned(dense)}
    for unit in args.units.split(","):
        for pattern in PATTERNS:
            if any(size % int(pattern.split(":")[1]) for size in cols):
                say(f"{pattern}: the model's columns are no multiple of it")
                continue
            if there(pattern=pattern, reconstruct=unit, values=last):
                continue
            if time.perf_counter() - begin > args.seconds:
                say(f"left out for lack of time: {pattern} {unit}")
                continue
            start = time.perf_counter()
            smaller, _ = make(model, quality.Variant("sparsegpt", "sparsegpt", pattern=pattern, reconstruct=unit))
            judge_all(smaller, pattern, unit, time.perf_counter() - start)


if __name__ == "__main__":
    main()
