"""`macko bench`: a transformers model dense against sparse, in one process, one model held at a time."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .convert import sparsify_
from .layers import format_bytes
from .prune import prune_


@dataclasses.dataclass
class Result:
    """One model at one batch size."""

    model: str  #: "dense" or "sparse"
    batch: int
    prefill_ms: float
    decode_tokens_per_s: float  #: of all sequences together
    peak_bytes: int | None  #: of GPU memory; None on the CPU


def run(options: argparse.Namespace) -> None:
    """Loads, prunes where asked, times dense, converts, times sparse, and prints both."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype or ("float16" if device.type == "cuda" else "bfloat16"))
    model = _load(options.source, device, dtype)
    if options.sparsity is None and options.source.startswith("random:"):
        options.sparsity = 0.5
    if options.sparsity is not None:
        prune_(model, options.sparsity)
    torch.manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (max(options.batch), options.prompt_tokens), device=device)

    dense_logits = _logits(model, prompts[:1])
    results = [measure("dense", model, prompts[:batch], options) for batch in options.batch]
    report = sparsify_(model, format=options.format)
    if not report.changed:
        raise ValueError(f"{options.source} has no layer that is sparse enough: prune it first, or give --sparsity")
    error = (_logits(model, prompts[:1]) - dense_logits).abs().max().item()
    results += [measure("sparse", model, prompts[:batch], options) for batch in options.batch]

    print(str(report).splitlines()[-1])
    print(_table(results))
    largest = dense_logits.abs().max().item()
    print(f"logits: {error:.3g} apart at most, the largest is {largest:.3g} ({dtype}, {options.prompt_tokens} tokens)")
    if options.json:
        about = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "dtype": str(dtype),
            "max_logit_error": error,
            **{
                name: value
                for name, value in vars(options).items()
                if name not in ("batch", "command", "dtype", "json", "run")
            },
        }
        with open(options.json, "a") as file:
            file.writelines(json.dumps({**about, **dataclasses.asdict(result)}) + "\n" for result in results)


def measure(name: str, model: Any, prompts: Tensor, options: argparse.Namespace) -> Result:
    """Prefill is one new token; decode is what more tokens take beyond that. Best of three, behind a warm-up."""
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    if options.compile:
        settings["cache_implementation"] = "static"

    def generate(count: int) -> None:
        model.generate(prompts, max_new_tokens=count, min_new_tokens=count, **settings)

    if prompts.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    first = _best(lambda: generate(1), prompts.is_cuda)
    whole = _best(lambda: generate(1 + options.new_tokens), prompts.is_cuda)
    speed = len(prompts) * options.new_tokens / max(whole - first, 1e-9)
    peak = torch.cuda.max_memory_allocated() if prompts.is_cuda else None
    return Result(name, len(prompts), first * 1e3, speed, peak)


def _best(call: Callable[[], None], on_gpu: bool) -> float:
    """Seconds of the fastest of three calls behind a first one."""
    times = []
    for _ in range(4):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _logits(model: Any, prompt: Tensor) -> Tensor:
    with torch.no_grad():
        return model(prompt).logits.float().cpu()


def _load(source: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A checkpoint, or a Llama of random weights: 7b has the sizes of Llama-2-7B."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if not source.startswith("random:"):
        dense: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        return dense.to(device).eval()
    tiny = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    sizes: dict[str, Any] = {"7b": {"max_position_embeddings": 4096}, "tiny": {**tiny, "num_attention_heads": 4}}
    size = source.removeprefix("random:")
    if size not in sizes:
        raise ValueError(f"MODEL is {source!r}, expected a folder, or random: with one of {', '.join(sizes)}")
    torch.manual_seed(0)
    with device:
        return LlamaForCausalLM._from_config(LlamaConfig(**sizes[size]), dtype=dtype).eval()


def _table(results: list[Result]) -> str:
    import io

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("batch", "model", "prefill ms", "decode tokens/s", "over dense", "peak GPU memory"):
        table.add_column(title, justify="left" if title == "model" else "right", no_wrap=True)
    dense = {result.batch: result for result in results if result.model == "dense"}
    for result in sorted(results, key=lambda result: result.batch):
        ratio = result.decode_tokens_per_s / dense[result.batch].decode_tokens_per_s
        peak = "" if result.peak_bytes is None else format_bytes(result.peak_bytes)
        times = (f"{result.prefill_ms:.2f}", f"{result.decode_tokens_per_s:.1f}", f"{ratio:.2f}x")
        table.add_row(str(result.batch), result.model, *times, peak)
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined]
