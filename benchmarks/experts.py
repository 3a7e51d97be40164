"""Experts of mixtures on the GPU, from one packed stack: against torch's grouped product of the dense ones.

    python -m benchmarks.experts                    # Mixtral-8x7B, Qwen3-30B-A3B, GLM-4.5-Air; 1 to 128 sequences
    python -m benchmarks.experts --models qwen3-30b --batches 1,8 --out experts.jsonl

Random weights of the models' shapes. Each token goes to experts drawn evenly, another routing at each of four calls in
turn, so that what one brought to L2 the next one seldom finds. Each product is checked against float64 before it is
timed. Times as in benchmarks/spmv.py: CUDA graphs, medians. Lines go to benchmarks/results/<gpu>/experts.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

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


def routing(experts: int, top_k: int, batch: int) -> Tensor:
    """Where each expert's tokens end, int32 [experts] on the GPU."""
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(batch)]).flatten()
    return torch.bincount(ids, minlength=experts).cumsum(0).to(torch.int32).cuda()


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


def measure(model: str, rows: int, cols: int, batches: list[int], out: Path, about: dict[str, object]) -> None:
    experts, top_k, _ = MODELS[model]
    w = torch.randn(experts, rows, cols, device="cuda", dtype=torch.bfloat16) * 0.02
    weights, packed = {"grouped_mm": w}, {}
    for name, halved in FORMATS_TIMED.items():
        # By magnitude, as pruning does: small values are what sparse11's table has no code for.
        kept = w if not halved else w * (w.abs() >= w.abs().float().median(dim=2, keepdim=True).values)
        filled = F.pad(kept, (0, 0, 0, -rows % 64)).reshape(-1, cols)
        weights[name], packed[name] = kept, FORMATS[name].from_dense(filled).packed
    for batch in batches:
        torch.manual_seed(batch)
        routings = [routing(experts, top_k, batch) for _ in range(ROUTINGS)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma separated")
    parser.add_argument("--batches", default="1,8,32,64,128", help="comma separated")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>/experts.jsonl")
    options = parser.parse_args()
    about = provenance()
    out = options.out or results("experts.jsonl", about["gpu"])
    with torch.no_grad():
        for model in options.models.split(","):
            for rows, cols in MODELS[model][2]:
                measure(model, rows, cols, [int(batch) for batch in options.batches.split(",")], out, about)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
