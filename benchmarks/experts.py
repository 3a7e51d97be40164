r"""A stack of experts, packed, against torch's grouped_mm: a projection of a mixture's experts at some sequences.

    python -m benchmarks.experts --out benchmarks/results/h100/experts.jsonl
    python -m benchmarks.experts --models qwen3-30b --batches 1,8

Before it is timed each format is checked: against grouped_mm within roundings, a token alone and among others to the
bit, and a graph that is replayed with another routing to eager's bits. Routings are uniform; a graph takes eight of
them in turn. sparse11 has the smaller half of each row's values zero; `grouped_mm_us` is of the dense weights. A line
has `touched`, experts with tokens in the mean, and GB/s of their bytes.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from torch import Tensor

from macko import ops
from macko.choose.options import Options
from macko.measure.timing import capture, time_replays
from macko.nn.experts import Stack

from .timing import append_jsonl, provenance, results

#: Experts, those of a token, and rows x columns of both projections.
MODELS = {
    "mixtral": (8, 2, ((28672, 4096), (4096, 14336))),
    "qwen3-30b": (128, 8, ((1536, 2048), (2048, 768))),
    "glm-4.5-air": (128, 8, ((2816, 4096), (4096, 1408))),
}
BATCHES = "1,8,32,64,128"
ROUTINGS = 8


def routing(experts: int, top_k: int, batch: int, generator: torch.Generator) -> Tensor:
    """Where the tokens of each expert end: int32 [experts]."""
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(batch)])
    return torch.bincount(ids.flatten(), minlength=experts).cumsum(0).to(torch.int32).cuda()


def packed_product(stack: Stack, x: Tensor, ends: Tensor) -> Tensor:
    return ops.linear_experts(x, *stack.packed.packed, stack.rows, ends)


def check(stack: Stack, w: Tensor, x: Tensor, ends: Tensor, other: Tensor) -> None:
    """AssertionError where the product is not grouped_mm's, or its bits are not always the same."""
    y, wanted = packed_product(stack, x, ends), grouped_product(w, x, ends)
    scale = grouped_product(w.abs(), x.abs(), ends).float()
    bound = wanted.float().abs() * 2.0**-7 + scale * (2 * x.shape[1] * 2.0**-24)
    assert ((y.float() - wanted.float()).abs() <= bound).all(), "farther from grouped_mm than roundings are"
    row = len(x) // 2
    alone = (torch.arange(len(ends), device="cuda") >= int((ends <= row).sum())).to(torch.int32)
    assert torch.equal(packed_product(stack, x[row : row + 1], alone)[0], y[row]), "a token alone has other bits"
    held = ends.clone()
    seen: list[Tensor] = []
    graph, _ = capture([lambda: seen.append(packed_product(stack, x, held))], 1)
    held.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(seen[-1], packed_product(stack, x, other)), "a replayed graph has other bits"


def grouped_product(w: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, w.transpose(1, 2), offs=ends)


def median_us(calls: list[partial[Tensor]]) -> float:
    graph, launches = capture(calls, 2 * len(calls))
    return statistics.median(time_replays(graph, launches))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--batches", default=BATCHES, help="sequences, each of one token")
    parser.add_argument("--out", help="where lines go")
    args = parser.parse_args()
    ran = provenance()
    out = args.out or results("experts.jsonl", torch.cuda.get_device_name())
    for model in args.models.split(","):
        experts, top_k, parts = MODELS[model]
        for rows, cols in parts:
            generator = torch.Generator().manual_seed(0)
            w = torch.randn(experts, rows, cols, device="cuda", dtype=torch.bfloat16) * 0.02
            pruned = w.masked_fill(w.abs() < 0.0135, 0)  # half of them: the median of |x| is 0.6745
            stacks = {"dense12": Stack.from_dense(w, Options("dense12"))}
            stacks["sparse11"] = Stack.from_dense(pruned, Options("sparse11"))
            for batch in map(int, args.batches.split(",")):
                x = torch.randn(batch * top_k, cols, device="cuda", dtype=torch.bfloat16)
                ends = [routing(experts, top_k, batch, generator) for _ in range(ROUTINGS)]
                check(stacks["dense12"], w, x, *ends[:2])
                check(stacks["sparse11"], pruned, x, *ends[:2])
                touched = statistics.mean(int((e.diff(prepend=e.new_zeros(1)) > 0).sum()) for e in ends)
                line = {"model": model, "rows": rows, "cols": cols, "experts": experts, "batch": batch}
                line["grouped_mm_us"] = median_us([partial(grouped_product, w, x, e) for e in ends])
                for name, stack in stacks.items():
                    us = median_us([partial(packed_product, stack, x, e) for e in ends])
                    gbps = stack.packed.nbytes / experts * touched / us / 1e3
                    line |= {f"{name}_us": us, f"{name}_gbps": gbps, f"{name}_gain": line["grouped_mm_us"] / us}
                append_jsonl(out, **line, touched=touched, **ran)
                print(*(f"{k}={round(v, 2) if isinstance(v, float) else v}" for k, v in line.items()), flush=True)
            del w, pruned, stacks, stack


if __name__ == "__main__":
    main()
