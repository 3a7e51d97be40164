"""A sparse model that decodes for as long as it is let: the same tokens each time, and no byte more.

    python -m verify.soak --minutes 20            # Llama-2-7B's sizes, random weights, on a GPU; peft for adapters
    python -m verify.soak --size tiny --device cpu --minutes 0.2

A cycle decodes in every scenario, in another order each time: batches of 1 to 33, eagerly, on a stream of its own, or
by a CUDA graph captured anew, with and without an adapter. Then the model is dropped and read again from its files.
What the first cycle gave is what each later one has to give, token by token; the memory held once the model is read
must not grow from the second cycle on. It stops after --minutes, but not before the third cycle. Ends with a JSON line,
which is appended to --out. Exit status 1: a token differed, or memory grew.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import itertools
import json
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import macko
from benchmarks.timing import append_jsonl, commit

SIZES: dict[str, dict[str, Any]] = {
    "7b": {"max_position_embeddings": 4096},  # LlamaConfig's defaults are Llama-2-7B
    "tiny": {
        "vocab_size": 500,
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
}
BATCHES = (1, 2, 5, 8, 33)
PROMPT_TOKENS = 12
#: What a process may hold on the host besides, as allocators keep and cut what they were given.
HOST_BYTES = 256 << 20


class Scenario(NamedTuple):
    batch: int
    way: str  #: "eager", "stream" or "graph"
    adapter: bool


def build(folder: Path, size: str, device: torch.device, dtype: torch.dtype) -> None:
    """A pruned and packed model of random weights, in files."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    with device:
        model: Any = LlamaForCausalLM._from_config(LlamaConfig(**SIZES[size]), dtype=dtype).eval()
    macko.prune_(model, 0.5, progress=False)
    macko.sparsify_(model, progress=False)
    model.save_pretrained(folder)


def load(folder: Path, device: torch.device, dtype: torch.dtype, adapter: bool) -> Any:
    """The model; an adapter's weights are the same each time, and none is zero."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device).eval()
    model.generation_config.eos_token_id = None  # each sequence has all its tokens
    if adapter:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        config = LoraConfig(r=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    return model


def graph_tokens(model: Any, prompts: Tensor, count: int, stream: torch.cuda.Stream) -> Tensor:
    """Each token from the one before it alone: a step is captured, with products of as many tokens as the batch has."""
    ids = prompts[:, -1:].clone()

    def step() -> None:
        ids.copy_(model(ids, use_cache=False).logits[:, -1:].argmax(-1))

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what first calls set up cannot be captured
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    ids.copy_(prompts[:, -1:])
    found = []
    for _ in range(count):
        graph.replay()
        found.append(ids.clone())
    return torch.cat(found, 1)


@torch.no_grad()
def decode(model: Any, scenario: Scenario, prompts: Tensor, count: int, stream: Any) -> Tensor:
    """The tokens [batch, count], on the CPU. stream: one for all, as torch keeps a workspace for each there was."""
    is_off = hasattr(model, "disable_adapter") and not scenario.adapter
    with model.disable_adapter() if is_off else contextlib.nullcontext():
        if scenario.way == "graph":
            return graph_tokens(model, prompts, count, stream).cpu()
        if scenario.way == "eager":
            return model.generate(prompts, max_new_tokens=count, do_sample=False)[:, PROMPT_TOKENS:].cpu()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            tokens = model.generate(prompts, max_new_tokens=count, do_sample=False)[:, PROMPT_TOKENS:].cpu()
        torch.cuda.current_stream().wait_stream(stream)
        return tokens


def held(device: torch.device) -> tuple[int, int]:
    """Bytes that were asked for on the GPU, and that the process holds on the host.

    Not memory_allocated(): that counts whole blocks, up to 1 MB larger than what was asked for, and how much larger
    depends on the blocks that lay free when the files were read again.
    """
    gc.collect()
    on_gpu = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        on_gpu = torch.cuda.memory_stats()["requested_bytes.all.current"]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return on_gpu, pages * 4096


def soak(folder: Path, size: str, device: torch.device, minutes: float, tokens: int, seed: int) -> dict[str, Any]:
    """What happened, as the line has it. Two whole cycles and the start of a third, however few the minutes."""
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    adapters = importlib.util.find_spec("peft") is not None
    ways = ("eager", "stream", "graph") if device.type == "cuda" else ("eager",)
    scenarios = list(itertools.starmap(Scenario, itertools.product(BATCHES, ways, (False, True)[: 1 + adapters])))
    order, begun = random.Random(seed), time.monotonic()
    build(folder, size, device, dtype)
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    draw = torch.Generator().manual_seed(seed)
    prompts: dict[int, Tensor] = {}
    first: dict[Scenario, Tensor] = {}
    differ: dict[str, int] = {}
    memory: list[tuple[int, int]] = []
    decoded, compared = 0, 0

    def is_over(cycle: int) -> bool:
        return cycle >= 2 and time.monotonic() - begun > minutes * 60

    for cycle in itertools.count():
        model = load(folder, device, dtype, adapters)
        memory.append(held(device))
        order.shuffle(scenarios)
        print(f"cycle {cycle}, after {time.monotonic() - begun:.0f} s: {memory[-1]} bytes", file=sys.stderr, flush=True)
        for scenario in scenarios:
            batch = scenario.batch
            if batch not in prompts:
                prompts[batch] = torch.randint(model.config.vocab_size, (batch, PROMPT_TOKENS), generator=draw)
            found = decode(model, scenario, prompts[batch].to(device), tokens, stream)
            decoded += found.numel()
            compared += scenario in first
            wrong = int((found != first.setdefault(scenario, found)).sum())
            if wrong:
                name = f"cycle {cycle}, {scenario}"
                differ[name] = wrong
                print(f"{name}: {wrong} of {found.numel()} tokens differ", flush=True)
            if is_over(cycle):
                break
        del model
        if is_over(cycle):
            break
    on_gpu, on_host = zip(*memory[1:], strict=True)
    return {
        "what": "soak",
        "commit": commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "size": size,
        "seed": seed,
        "adapters": adapters,
        "seconds": round(time.monotonic() - begun),
        "cycles": cycle + 1,
        "scenarios": len(scenarios),
        "compared": compared,
        "tokens": decoded,
        "differ": differ,
        "distinct": len({tuple(t.flatten().tolist()) for t in first.values()}),
        "gpu_bytes": [on_gpu[0], on_gpu[-1]],
        "host_bytes": [on_host[0], on_host[-1]],
        "grew": max(on_gpu) > on_gpu[0] or on_host[-1] > on_host[0] + HOST_BYTES,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20, help="at least two cycles and a scenario run")
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=24, help="that each scenario decodes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where the model's files go and are removed again; default: a temporary one")
    parser.add_argument("--out", help="where the line is appended; default: benchmarks/results/<device>/soak.jsonl")
    args = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message=".*generation flags.*")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
        line = soak(Path(folder), args.size, device, args.minutes, args.tokens, args.seed)
    print(json.dumps(line))
    if args.out != "":
        name = line["device"].lower().removeprefix("nvidia ").replace(" ", "-")
        append_jsonl(args.out or Path("benchmarks/results", name, "soak.jsonl"), **line)
    return 1 if line["differ"] or line["grew"] else 0


if __name__ == "__main__":
    sys.exit(main())
