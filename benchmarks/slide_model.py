"""Prefill of a whole 7B model on a GPU: quantised linears of ours, dense and by pattern, against torch's dense paths.

    python -m benchmarks.slide_model [results.jsonl] [--models qwen2.5-7b,llama-2-7b] [--tokens 2048,8192] [--layers 4]

Weights are random; every linear of the blocks is replaced, embeddings and head stay bfloat16, and only the last token's
logits are made. A side is a model whose linears are bfloat16 (`F.linear`), torch's (`_int_mm` with scales, `_scaled_mm`
by row, as in benchmarks.slide, with our quantiser) or ours. Each prefill is a CUDA graph; sides take turns under load.
With --layers fewer blocks are built, and the lines say so.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from benchmarks.slide import PATTERNS, TYPES, int_mm, scaled_mm
from benchmarks.timing import append_jsonl, provenance, sm_clocks
from macko import SparseLinear, ops
from macko.weights import SLIDE_ELEMENTS, SlideWeight

MODELS: dict[str, Any] = {
    "qwen2.5-7b": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32768,
    ),
    "llama-2-7b": LlamaConfig(max_position_embeddings=32768),  # its defaults are Llama-2-7B
}
#: Milliseconds that a side runs before it is timed, and at least while it is.
WARM_MS, TIMED_MS = 100, 150


class TorchLinear(nn.Module):
    """torch's dense product of quantised numbers, for a linear of the model."""

    def __init__(self, linear: nn.Linear, name: str) -> None:
        super().__init__()
        packed, self.scale, _ = ops.slide_pack(linear.weight.detach(), 0, TYPES[name])
        self.codes = ops.slide_unpack(packed, self.scale, linear.in_features, 0, TYPES[name])
        self.multiply = int_mm if name == "int8" else scaled_mm
        zero = linear.weight.new_zeros(linear.out_features)
        self.bias = zero if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        y = self.multiply(x.reshape(-1, x.shape[-1]), self.codes, self.scale, self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])


def sparse(linear: nn.Linear, name: str, n: int) -> SparseLinear:
    packed = SlideWeight.from_dense(linear.weight.detach(), n, SLIDE_ELEMENTS.index(TYPES[name]), prune=True)
    return SparseLinear.from_packed(packed, linear.bias)


def makers() -> dict[str, Callable[[nn.Linear], nn.Module] | None]:
    """How each side makes its linears; None: as they are."""
    made: dict[str, Callable[[nn.Linear], nn.Module] | None] = {"bf16": None}
    for name in ("int8", "fp8"):
        made[f"{name} torch"] = partial(TorchLinear, name=name)
        for pattern, n in PATTERNS.items():
            made[f"{name} {pattern}"] = partial(sparse, name=name, n=n)
    return made


def replace(blocks: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Puts made linears in place; returns what puts the old ones back."""
    old = [
        (parent, name, child)
        for parent in blocks.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in old:
        setattr(parent, name, make(child))
    return old


def capture(model: Any, ids: Tensor, pool: Any) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            model(ids, use_cache=False, logits_to_keep=1)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        model(ids, use_cache=False, logits_to_keep=1)
    return graph


def replay(graph: torch.cuda.CUDAGraph, least_ms: float) -> float:
    """Milliseconds of one replay, from as many as take least_ms."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    spent, count = 0.0, 0
    while spent < least_ms:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent += start.elapsed_time(end)
        count += 1
    return spent / count


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", default="benchmarks/results/slide_model.jsonl")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="2048,8192")
    parser.add_argument("--layers", type=int, help="blocks to build (default: all)")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    where = provenance()
    for name in args.models.split(","):
        config = MODELS[name]
        config.num_hidden_layers = min(config.num_hidden_layers, args.layers or config.num_hidden_layers)
        with torch.device("cuda"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        counts = list(map(int, args.tokens.split(",")))
        inputs = {count: torch.randint(config.vocab_size, (1, count), device="cuda") for count in counts}
        graphs: dict[tuple[int, str], torch.cuda.CUDAGraph] = {}
        sides, held, pool = makers(), [], torch.cuda.graph_pool_handle()
        for side, make in sides.items():
            old = replace(model.model.layers, make) if make else []
            for count, ids in inputs.items():
                graphs[count, side] = capture(model, ids, pool)
            held += [getattr(parent, attribute) for parent, attribute, _ in old]  # the graphs read their memory
            for parent, attribute, child in old:
                setattr(parent, attribute, child)
        for count in counts:
            times: dict[str, list[float]] = {side: [] for side in sides}
            clocks: dict[str, list[int]] = {side: [] for side in sides}
            for turn in range(args.rounds):
                for side in sorted(sides, reverse=turn % 2 == 1):
                    replay(graphs[count, side], WARM_MS)
                    times[side].append(replay(graphs[count, side], TIMED_MS))
                    clocks[side].append(sm_clocks()[0])
            for side in sides:
                ms = statistics.median(times[side])
                layers = config.num_hidden_layers
                about = {"model": name, "layers": layers, "tokens": count, "side": side, "ms": ms}
                append_jsonl(args.results, **about, sm_mhz_under_load=round(statistics.median(clocks[side])), **where)
                gain = statistics.median(times["bf16"]) / ms
                print(f"{name} {layers} blocks {count:6} tokens {side:12} {ms:8.2f} ms, {gain:.2f} of bf16", flush=True)
        del model, graphs, held, inputs
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
