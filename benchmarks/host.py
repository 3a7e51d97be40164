"""Host time of a layer's call on a GPU: python -m benchmarks.host OUT.jsonl

A 64 x 64 matrix under no_grad, where the GPU has next to nothing to do: nn.Linear beside SparseLinear in each layout,
by turns, for one token, eight and 128. Microseconds a call, the best round of each, and its share of nn.Linear's.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.timing import append_jsonl, provenance, time_host
from macko import SparseLinear

LAYOUTS = ("macko", "sell", "tile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    torch.manual_seed(0)
    dense = nn.Linear(64, 64, bias=False, dtype=torch.float16, device="cuda").requires_grad_(False)
    dense.weight[torch.rand_like(dense.weight) < 0.5] = 0
    layers = {"dense": dense, **{name: SparseLinear.from_linear(dense, name) for name in LAYOUTS}}
    with torch.no_grad():
        for tokens in (1, 8, 128):
            x = torch.randn(tokens, 64, dtype=torch.float16, device="cuda")
            best = dict.fromkeys(layers, float("inf"))
            for _ in range(5):
                for name, layer in layers.items():
                    best[name] = min(best[name], time_host(partial(layer, x), rounds=8))
            for name, us in best.items():
                share = us / best["dense"]
                print(f"{tokens} tokens, {name}: {us:.2f} us, {share:.2f} of nn.Linear's")
                append_jsonl(out, **provenance(), tokens=tokens, layer=name, host_us=us, of_dense=share)


if __name__ == "__main__":
    main()
