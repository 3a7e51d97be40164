"""A whole model on one GPU: pruning, loading, converting, saving. Time, peak memory and bytes, one JSON line a step.

    python -m benchmarks.models [--size 7b] [--folder /dev/shm/macko] [--out benchmarks/results/gpu/models.jsonl]

Weights are random, which changes nothing of what is measured here. Peak is torch.cuda.max_memory_allocated, by which
transformers' reservation counts too.
"""

from __future__ import annotations

import argparse
import gc
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import macko
from benchmarks.timing import append_jsonl, provenance

SIZES: dict[str, dict[str, Any]] = {
    "7b": {"max_position_embeddings": 4096},  # LlamaConfig's defaults are Llama-2-7B
    "1b": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 22, "num_attention_heads": 16},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--folder", default="/dev/shm/macko", help="where the checkpoints go and are removed again")
    parser.add_argument("--out", default="benchmarks/results/gpu/models.jsonl")
    parser.add_argument("--blocks", type=int, default=2, help="blocks to prune with calibration")
    parser.add_argument("--tokens", type=int, default=262144, help="calibration tokens, in pieces of 2048")
    parser.add_argument("--only-prune", action="store_true", help="no checkpoints, only pruning with calibration")
    parser.add_argument("--only", default="", help="a regular expression of the methods with calibration")
    args = parser.parse_args()
    about = {**provenance(), "size": args.size}

    @contextmanager
    def step(name: str, **more: Any) -> Iterator[dict[str, Any]]:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        yield more
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        memory = {"peak_bytes": torch.cuda.max_memory_allocated(), "held_bytes": torch.cuda.memory_allocated()}
        append_jsonl(args.out, step=name, seconds=seconds, **memory, **more, **about)
        sizes = "  ".join(f"{key} {value / 1e9:6.2f} GB" for key, value in memory.items())
        print(f"{name:32} {seconds:7.2f} s  {sizes}  {more or ''}", flush=True)

    torch.manual_seed(0)
    if not args.only_prune:
        try:
            files(SIZES[args.size], Path(args.folder), step)
        finally:
            shutil.rmtree(args.folder, ignore_errors=True)
    prune_some(SIZES[args.size], args.blocks, args.tokens, args.only, step)


def files(size: dict[str, Any], folder: Path, step: Callable[..., Any]) -> None:
    """Saving, loading and converting the whole model."""

    def load(path: Path, **options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16, device_map="cuda", **options)

    def bytes_of(path: Path) -> int:
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))

    with torch.device("cuda"):
        model: Any = LlamaForCausalLM._from_config(LlamaConfig(**size), dtype=torch.float16).eval()
    with step("prune by magnitude, on the GPU"):
        macko.prune_(model, 0.5, progress=False)
    tokens = torch.randint(model.config.vocab_size, (1, 64), device="cuda")
    with torch.no_grad():
        wanted = model(tokens).logits
    with step("save dense", bytes=0) as more:
        model.save_pretrained(folder / "dense")
        more["bytes"] = bytes_of(folder / "dense")
    del model
    for again in ("", ", again"):
        with step(f"load dense{again}"):
            model = load(folder / "dense")
        del model
    for again in ("", ", again"):
        model = None
        with step(f"load dense and convert{again}"):
            model = load(folder / "dense", quantization_config=macko.MackoConfig())
    with torch.no_grad():
        error = (model(tokens).logits - wanted).abs().max().item()
    with step("save sparse", bytes=0, logit_error=error, largest_logit=wanted.abs().max().item()) as more:
        model.save_pretrained(folder / "sparse")
        more["bytes"] = bytes_of(folder / "sparse")
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    del model
    for again in ("", ", again"):
        model = None
        with step(f"load sparse{again}"):
            model = load(folder / "sparse")
    same = all(torch.equal(tensor.cpu(), state[name]) for name, tensor in model.state_dict().items())
    print("bit-equal after the round trip:", same, flush=True)
    if not same:
        raise SystemExit("the round trip changed a weight")
    del model, state


def prune_some(size: dict[str, Any], blocks: int, tokens: int, only: str, step: Callable[..., Any]) -> None:
    """Half of the weights of so many blocks, each method on dense ones; the model waits on the CPU."""
    config = LlamaConfig(**{**size, "num_hidden_layers": blocks})
    batches = list(torch.randint(config.vocab_size, (tokens // 2048, 1, 2048)))
    of = LlamaConfig(**size).num_hidden_layers
    for method, fitted in (("wanda", None), ("sparsegpt", None), ("sparsegpt", "submodule"), ("sparsegpt", "block")):
        name = f"{method}, fitted by {fitted}" if fitted else method
        if not re.search(only, name):
            continue
        with torch.device("cuda"):
            model: Any = LlamaForCausalLM._from_config(config, dtype=torch.float16).eval()
        model = model.cpu()
        with step(f"{name}, {blocks} blocks, from the CPU", tokens=tokens, blocks=blocks, of_blocks=of):
            macko.prune_(model, 0.5, method, calibration=batches, device="cuda", progress=False, reconstruct=fitted)


if __name__ == "__main__":
    main()
