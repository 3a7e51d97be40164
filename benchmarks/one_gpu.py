"""Mixtral-8x7B's shapes, 93 GB in bfloat16, on one GPU of 80 GB: packed in 12 bits layer by layer, bit for bit.

    python -m benchmarks.one_gpu                    # all 32 layers; lines go to benchmarks/results/<gpu>/one_gpu.jsonl
    python -m benchmarks.one_gpu --source random:tiny-mixtral --batches 1 --prompt 8 --out LINES.jsonl

Random weights, made on the GPU one decoder layer at a time: each is packed, unpacked again and compared with what was
made, before the next one is. Then `generate` without options writes some tokens for each batch.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from macko import sparsify_
from macko.measure import runs
from macko.measure.bench import generate
from macko.nn.experts import is_experts

from .timing import append_jsonl, provenance, results


def fill(tensor: Tensor, seed: int) -> Tensor:
    """The same values for the same seed, of a norm's weight ones."""
    if tensor.dim() == 1:
        return tensor.fill_(1)
    generator = torch.Generator(tensor.device).manual_seed(seed)
    return tensor.normal_(0, 0.02, generator=generator)


def packed(layer: nn.Module, device: str) -> tuple[nn.Module, int]:
    """A module on the meta device with random weights, packed; SystemExit where a weight is not what it was."""
    holder = nn.ModuleDict({"layer": layer.to_empty(device=device)})
    shapes = {name: p.shape for name, p in holder.named_parameters()}
    for seed, p in enumerate(holder.parameters()):
        fill(p, seed)
    names = [name for name, m in holder.named_modules() if isinstance(m, nn.Linear) or is_experts(m)]
    report = sparsify_(holder, format="dense12", ignore=(), progress=False)
    if [row.name for row in report if row.format == "dense" and "." in row.name.removeprefix("layer")]:
        raise SystemExit(f"not all is packed: {report}")
    for seed, (name, shape) in enumerate(shapes.items()):
        owner, _, key = name.rpartition(".")
        now = getattr(holder.get_submodule(owner), key)
        if not torch.equal(fill(torch.empty(shape, dtype=now.dtype, device=device), seed), now):
            raise SystemExit(f"{name} is not the weight that was packed")
    return holder["layer"], len(names)


def made(source: str, device: str, **more: Any) -> tuple[Any, int]:
    """The model, and how many modules of it are packed."""
    from transformers import AutoModelForCausalLM

    config = runs.random_config(source, **more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    count = 0
    base = model.model
    for i in range(len(base.layers)):
        base.layers[i], here = packed(base.layers[i], device)
        count += here
    model.lm_head, here = packed(model.lm_head, device)
    with torch.device(device):
        base.rotary_emb = type(base.rotary_emb)(config)
    for module in (base.embed_tokens, base.norm):
        fill(module.to_empty(device=device).weight.data, 0)
    return model, count + here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="random:mixtral", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batches", default="1,8", help="comma separated")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>/one_gpu.jsonl")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    about = provenance() if on_gpu else {"gpu": "cpu"}
    out = options.out or results("one_gpu.jsonl", about["gpu"])
    start = time.perf_counter()
    with torch.no_grad():
        model, count = made(options.source, "cuda" if on_gpu else "cpu", num_hidden_layers=options.layers)
    line: dict[str, Any] = {"source": options.source, "layers": options.layers, "packed": count, "equal": True}
    line["dense_bytes"] = 2 * dense_weights(model.config)
    line["bytes"] = sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    line["seconds_to_make_and_pack"] = round(time.perf_counter() - start, 1)
    for batch in map(int, options.batches.split(",")):
        tokens = torch.arange(batch * options.prompt, device=model.device).view(batch, -1) * 7919
        prompts = tokens % model.config.vocab_size
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        longer, shorter = (partial(generate, model, prompts, n, "no") for n in (1 + options.new_tokens, 1))
        seconds = runs.difference(longer, shorter, on_gpu)
        ms = None if seconds is None else round(seconds * 1e3 / options.new_tokens, 3)
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        append_jsonl(out, **line, batch=batch, prompt=options.prompt, ms=ms, peak_bytes=peak, **about)
        print(line | {"batch": batch, "ms": ms, "peak_bytes": peak}, flush=True)


def dense_weights(config: Any) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


if __name__ == "__main__":
    main()
