"""Experts of mixtures on the GPU, from one packed stack: against torch's grouped product of the dense ones.

    python -m benchmarks.experts                    # Mixtral-8x7B, Qwen3-30B-A3B, GLM-4.5-Air; 1 to 2048 tokens
    python -m benchmarks.experts --models qwen3-30b --batches 1,8 --out experts.jsonl

Random weights of the models' shapes. Each token goes to experts drawn evenly, another routing at each of four calls in
turn, so that what one brought to L2 the next one seldom finds. Each product is checked against float64 before it is
timed. Then whole: the order by expert, both products, the gate and the weighted sum, as transformers does that by
default for prompts and for decoding, as SparseExperts, and by vLLM's Triton kernels where vLLM is installed. Times as
in benchmarks/spmv.py: CUDA graphs, medians. Lines go to benchmarks/results/<gpu>/experts.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from macko.choose.options import Options
from macko.nn.experts import SparseExperts, Stack
from macko.ops import linear_experts
from macko.weights import FORMATS

from .timing import append_jsonl, provenance, results, time_graph

#: Experts, those that a token goes to, and [rows, cols] of an expert's matrices: gate and up in one, down.
MODELS = {
    "mixtral": (8, 2, ((28672, 4096), (4096, 14336))),
    "qwen3-30b": (128, 8, ((1536, 2048), (2048, 768))),
    "glm-4.5-air": (128, 8, ((2816, 4096), (4096, 1408))),
}
FORMATS_TIMED = {"dense12": False, "sparse11": True}  # whether half of the values are zeros
ROUTINGS = 4


#: Bytes of weights that transformers' way to decode copies at most, as it gathers those of each token.
GATHERED = 8e9


def routed(experts: int, top_k: int, batch: int) -> Tensor:
    """Each token's experts, [batch, top_k]."""
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(batch)])


def ends_of(ids: Tensor, experts: int) -> Tensor:
    """Where each expert's tokens end, int32 [experts] on the GPU."""
    return torch.bincount(ids.flatten(), minlength=experts).cumsum(0).to(torch.int32).cuda()


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, w.transpose(1, 2), offs=ends)


def check(name: str, product: Callable[[Tensor], Tensor], x: Tensor, w: Tensor, ends: Tensor) -> None:
    """SystemExit where a result is further from float64 than rounding and the order of sums allow."""
    y, begin = product(ends), 0
    for e, end in enumerate(ends.tolist()):
        some = x[begin : min(end, begin + 8)].double()  # of each expert
        if len(some):
            wanted, size = some @ w[e].double().t(), some.abs() @ w[e].double().abs().t()
            error = size * (w.shape[2] + 4) * 2.0**-24
            error += (wanted.abs() + error) * torch.finfo(x.dtype).eps / 2
            wrong = ~((y[begin : begin + len(some)].double() - wanted).abs() <= error)
            if bool(wrong.any()):
                raise SystemExit(f"{name}: {int(wrong.sum())} of {wrong.numel()} results of expert {e} are wrong")
        begin = end


def halved(w: Tensor) -> Tensor:
    """Half of each row as zeros: by magnitude, as pruning does, since small values are what sparse11's table lacks."""
    return w * (w.abs() >= w.abs().float().median(dim=2, keepdim=True).values)


def measure(model: str, rows: int, cols: int, batches: list[int], out: Path, about: dict[str, object]) -> None:
    experts, top_k, _ = MODELS[model]
    w = torch.randn(experts, rows, cols, device="cuda", dtype=torch.bfloat16) * 0.02
    weights, packed = {"grouped_mm": w}, {}
    for name, is_halved in FORMATS_TIMED.items():
        kept = halved(w) if is_halved else w
        filled = F.pad(kept, (0, 0, 0, -rows % 64)).reshape(-1, cols)
        weights[name], packed[name] = kept, FORMATS[name].from_dense(filled).packed
    for batch in batches:
        torch.manual_seed(batch)
        routings = [ends_of(routed(experts, top_k, batch), experts) for _ in range(ROUTINGS)]
        x = torch.randn(batch * top_k, cols, device="cuda").bfloat16()
        products: dict[str, Callable[[Tensor], Tensor]] = {"grouped_mm": partial(grouped_mm, x, w)}
        products |= {name: partial(linear_experts, x, *made, rows) for name, made in packed.items()}
        touched = sum(int((ends.diff(prepend=ends[:1] * 0) > 0).sum()) for ends in routings) / ROUTINGS
        for name, product in products.items():
            check(f"{model} {rows}x{cols} by {batch}, {name}", product, x, weights[name], routings[0])
            timing = time_graph([partial(product, ends) for ends in routings])
            line = {"model": model, "rows": rows, "cols": cols, "batch": batch, "kernel": name, "experts": experts}
            append_jsonl(out, **line, top_k=top_k, touched=touched, **timing.rounded(), **about)
            print(f"{model} {rows}x{cols} batch {batch:4} {name:10} {timing.median_us:9.1f} us", flush=True)


def dense_experts(model: str) -> Any:
    """The experts module of transformers with a model's sizes and random weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    experts, _, ((rows, cols), _) = MODELS[model]
    config = MixtralConfig(hidden_size=cols, intermediate_size=rows // 2, num_local_experts=experts)
    with torch.device("cuda"):
        module = MixtralExperts(config).bfloat16()
    for weight in module.parameters():
        weight.requires_grad_(False).normal_(0, 0.02)
    return module


def sparse_experts(dense: Any, format: str) -> SparseExperts:
    weights = {name: getattr(dense, name) for name in ("gate_up_proj", "down_proj")}
    if FORMATS_TIMED[format]:
        weights = {name: halved(w) for name, w in weights.items()}
    return SparseExperts(dense, {name: Stack.from_dense(w, Options(format)) for name, w in weights.items()})


def whole(model: str, batches: list[int], out: Path, about: dict[str, object]) -> None:
    """Times of an experts module of a model: all of it, by everybody."""
    dense = dense_experts(model)
    experts, top_k, _ = MODELS[model]
    packed = {name: sparse_experts(dense, name) for name in FORMATS_TIMED}
    a_token = top_k * sum(getattr(dense, name)[0].nbytes for name in ("gate_up_proj", "down_proj"))

    def of_transformers(name: str, *args: Tensor) -> Tensor:
        dense.config._experts_implementation = name
        return dense(*args)

    for batch in batches:
        torch.manual_seed(batch)
        x = torch.randn(batch, dense.gate_up_proj.shape[2], device="cuda").bfloat16()
        ids = [routed(experts, top_k, batch).cuda() for _ in range(ROUTINGS)]
        weights = torch.rand(batch, top_k, device="cuda").softmax(-1)
        ways: dict[str, Callable[..., Tensor]] = {"grouped_mm": partial(of_transformers, "grouped_mm"), **packed}
        if batch * a_token <= GATHERED:
            ways["batched_mm"] = partial(of_transformers, "batched_mm")
        try:
            from vllm.model_executor.layers.fused_moe import fused_experts
        except ImportError:
            pass
        else:
            ways["vllm"] = lambda x, ids, weights: fused_experts(x, dense.gate_up_proj, dense.down_proj, weights, ids)
        wanted = ways["grouped_mm"](x, ids[0], weights)
        for name, way in ways.items():
            # Of three roundings in 16 bits: the products themselves are checked exactly above.
            off = (way(x, ids[0], weights) - wanted).abs().max() / wanted.abs().max()
            if not FORMATS_TIMED.get(name) and not off <= 0.03:
                raise SystemExit(f"{model} by {batch}, {name}: {off:.3f} of the largest result apart")
            timing = time_graph([partial(way, x, each, weights) for each in ids])
            line = {"what": "whole", "model": model, "batch": batch, "kernel": name, "experts": experts}
            append_jsonl(out, **line, top_k=top_k, **timing.rounded(), **about)
            print(f"{model} whole batch {batch:4} {name:10} {timing.median_us:9.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma separated")
    parser.add_argument("--batches", default="1,8,32,64,128,2048", help="tokens, comma separated")
    parser.add_argument("--only", choices=("products", "whole"), help="default: both")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>/experts.jsonl")
    options = parser.parse_args()
    about = provenance()
    out = options.out or results("experts.jsonl", about["gpu"])
    batches = [int(batch) for batch in options.batches.split(",")]
    with torch.no_grad():
        for model in options.models.split(","):
            for rows, cols in MODELS[model][2] if options.only != "whole" else ():
                measure(model, rows, cols, batches, out, about)
                torch.cuda.empty_cache()
            if options.only != "products":
                whole(model, batches, out, about)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
