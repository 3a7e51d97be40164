"""A whole model on one GPU: pruning, loading, converting, saving. Time, peak memory and bytes, one JSON line a step.

    python -m benchmarks.models [--size 7b] [--folder /dev/shm/macko] [--out benchmarks/results/gpu/models.jsonl]

Weights are random, which changes nothing of what is measured here. Peak is torch.cuda.max_memory_allocated, by which
transformers' own reservation counts too.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import time
from collections.abc import Iterator
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
    parser.add_argument("--blocks", type=int, default=2, help="blocks to prune by wanda and sparsegpt")
    parser.add_argument("--tokens", type=int, default=16384, help="calibration tokens, in pieces of 2048")
    args = parser.parse_args()
    folder = Path(args.folder)
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

    def load(path: Path, **options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16, device_map="cuda", **options)

    def bytes_of(path: Path) -> int:
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))

    torch.manual_seed(0)
    try:
        with torch.device("cuda"):
            model: Any = LlamaForCausalLM._from_config(LlamaConfig(**SIZES[args.size]), dtype=torch.float16).eval()
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

        shutil.rmtree(folder / "sparse")
        dense = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float16)
        batches = list(torch.randint(dense.config.vocab_size, (args.tokens // 2048, 1, 2048)))
        first = tuple(f"model.layers.{i}." for i in range(args.blocks))
        ways = ((0.6, "wanda", None), (0.6, "sparsegpt", None), (0.7, "wanda", "submodule"), (0.8, "wanda", "block"))
        for share, method, fitted in ways:  # each has something to prune
            name = f"{method}, fitted by {fitted}" if fitted else method
            with step(f"{name}, {args.blocks} blocks, from the CPU", tokens=args.tokens):
                cut = dense.model.layers
                dense.model.layers = cut[: args.blocks]
                macko.prune_(
                    dense, share, method, calibration=batches, device="cuda", progress=False, reconstruct=fitted,
                    filter_fn=lambda module, name: name.startswith(first),
                )  # fmt: skip
                dense.model.layers = cut
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
