"""transformers on one GPU or several: loading, memory of each, a step of decoding, and continuous batching.

    python -m benchmarks.engines --make FOLDER [--config '{"num_hidden_layers": 8}']
    python -m benchmarks.engines FOLDER/dense FOLDER/sparse --json OUT.jsonl
    torchrun --nproc-per-node 2 -m benchmarks.engines FOLDER/dense FOLDER/sparse --json OUT.jsonl
    python -m benchmarks.engines random:7b --only continuous --json OUT.jsonl

The first makes a Llama of random weights, half of them zero: dense, and packed by macko; the last measures both without
files between. Of several processes (tensor parallelism) each reads its shard. A step of decoding is one CUDA graph of
the whole model: what is measured is the GPU, its kernels and the sums over GPUs, and not Python. On a CPU a step is a
call, and its time says little.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import macko
from macko.measure import runs

PROMPT, STEPS, REPEATS = 128, 32, 5
BATCHES = (1, 4, 8, 16, 32)
REQUESTS = (1, 4, 16, 32)  #: of continuous batching
ON_GPU = torch.cuda.is_available()


def made(source: str, more: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The model of random weights that random: names, dense, pruned to half by magnitude, and then sparse."""
    from transformers import AutoModelForCausalLM

    config = runs.random_config(source)
    config.update(more)
    torch.manual_seed(0)
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16 if ON_GPU else torch.bfloat16).eval()
    macko.prune_(model, 0.5)
    yield "dense", model
    macko.sparsify_(model, tokens=8)
    yield "sparse", model


def models(args: argparse.Namespace) -> Iterator[tuple[str, Any, dict[str, Any] | None]]:
    """Each model to measure: its name, itself, and what loading it took. One is let go before the next is made."""
    for folder in args.folders:
        if folder.startswith("random:"):
            yield from ((name, model, None) for name, model in made(folder, args.config))
        else:
            yield (Path(folder).name + (", converted" if args.convert else ""), *loaded(folder, args.convert))


def loaded(folder: str, converts: bool) -> tuple[Any, dict[str, Any]]:
    """The model, of several processes this one's shard, and what loading took.

    converts: whether a dense folder is packed as it is read.
    """
    from transformers import AutoModelForCausalLM

    where: dict[str, Any] = {"device_map": "cuda" if ON_GPU else "cpu"}
    if dist.is_initialized():
        where = {"tp_plan": "auto"}
    if converts:
        where["quantization_config"] = macko.MackoConfig()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **where).eval()
    wait()
    line: dict[str, Any] = {"what": "load", "ms": (time.perf_counter() - start) * 1e3}
    parts = (getattr(whole, "_local_tensor", whole) for whole in (*model.parameters(), *model.buffers()))
    held = {part.data_ptr(): part.numel() * part.element_size() for part in parts}
    line["held_bytes"] = sum(held.values())
    layers = [m for m in model.modules() if isinstance(m, macko.SparseLinear)]
    line["packed_bytes"], line["packed_layers"] = sum(m.packed.nbytes for m in layers), len(layers)
    line["peak_bytes"] = torch.cuda.max_memory_allocated() if ON_GPU else None
    return model, line


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def tokens_of(model: Any) -> dict[str, Any]:
    """A greedy continuation, and at each of its tokens how far the second logit was: where it is near 0, sums in
    another order may give another token."""
    prompt = torch.arange(16, device=model.device)[None] * 7919 % model.config.vocab_size
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "disable_compile": True}
    found = model.generate(prompt, max_new_tokens=24, output_logits=True, return_dict_in_generate=True, **settings)
    margins = []
    for step in found.logits:
        first, second = step[0].float().topk(2).values.tolist()
        margins.append(round(first - second, 4))
    return {"what": "tokens", "tokens": found.sequences[0, 16:].tolist(), "margins": margins}


def step_of(model: Any, batch: int) -> tuple[Callable[[], Any], Callable[[], None]]:
    """A step of decoding after PROMPT tokens, as a CUDA graph, and what goes back to its place in the sequence."""
    from transformers import StaticCache

    length = PROMPT + STEPS
    cache: Any = StaticCache(config=model.config, max_cache_len=length)
    ids = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    place = torch.full((1, 1), PROMPT, device=model.device)
    mask = torch.ones(batch, 1, 1, length, dtype=torch.bool, device=model.device)

    def call() -> None:
        model(ids, attention_mask=mask, position_ids=place, past_key_values=cache, use_cache=True)

    def back() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(PROMPT)

    if not ON_GPU:
        call()
        return call, back
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
        call()
    return graph.replay, back


def decoding(model: Any) -> Iterator[dict[str, Any]]:
    for batch in BATCHES:
        with torch.no_grad():
            step, back = step_of(model, batch)
            times = []
            for _ in range(1 + REPEATS):
                back()
                wait()
                start = time.perf_counter()
                for _ in range(STEPS):
                    step()
                if ON_GPU:
                    torch.cuda.synchronize()
                times.append((time.perf_counter() - start) / STEPS * 1e3)
        yield {"what": "decode", "batch": batch, "ms": statistics.median(times[1:]), "all_ms": times[1:]}


def continuous(model: Any, graphs: bool) -> Iterator[dict[str, Any]]:
    """generate_batch of requests that come at once: all milliseconds of a call, which first makes its cache, and tokens
    a second from the moment that each request has its first."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model.set_attn_implementation("sdpa")
    config = GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0)
    pages: Any = {"num_blocks": 2 * max(REQUESTS), "max_batch_tokens": max(REQUESTS) * PROMPT, "use_cuda_graph": graphs}
    for at, count in enumerate((REQUESTS[0], *REQUESTS)):
        requests = [[(7 * i + j) % 400 + 3 for j in range(PROMPT)] for i in range(count)]
        wait()
        start = time.perf_counter()
        found = model.generate_batch(requests, config, ContinuousBatchingConfig(**pages), record_timestamps=True)
        ms = (time.perf_counter() - start) * 1e3
        times = [result.timestamps for result in found.values()]
        if [len(each) for each in times] != [STEPS] * count:
            raise RuntimeError(f"generate_batch gave {sum(map(len, times))} tokens, expected {STEPS} x {count}")
        first, last = max(each[0] for each in times), max(each[-1] for each in times)
        speed = sum(moment > first for each in times for moment in each) / (last - first)
        if at:  # the first call of all is slower
            yield {"what": "continuous", "graphs": graphs, "batch": count, "ms": ms, "tokens_per_s": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--make", type=Path, metavar="FOLDER")
    parser.add_argument("--source", default="random:7b", help="of --make: random:7b, random:70b or random:tiny")
    parser.add_argument("--config", type=json.loads, default={}, help="of --make: JSON, in place of its numbers")
    parser.add_argument("--convert", action="store_true", help="pack what is dense in the folders as it is read")
    what = "besides loading; also continuous-graphs"
    parser.add_argument("--only", nargs="*", default=["tokens", "decode", "continuous"], help=what)
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.make:
        for name, model in made(args.source, args.config):
            model.save_pretrained(args.make / name, max_shard_size="4GB")
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    if ON_GPU:
        torch.cuda.set_device(rank)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if ON_GPU else "gloo")
    for name, model, line in models(args):
        about: dict[str, Any] = {"folder": name, "ranks": ranks, "rank": rank}
        about |= {"layers": model.config.num_hidden_layers, "hidden": model.config.hidden_size}
        about |= runs.about_run(args)

        def say(found: dict[str, Any], about: dict[str, Any] = about) -> None:
            if rank == 0 or found["what"] == "load":
                print({key: value for key, value in (about | found).items() if key != "all_ms"}, flush=True)
                runs.append(args.json, [about | found])

        if line:
            say(line)
        if "tokens" in args.only:
            say(tokens_of(model))
        if "decode" in args.only:
            for found in decoding(model):
                say(found)
        for only, graphs in (("continuous", False), ("continuous-graphs", True)):
            if only in args.only and ranks == 1:
                for found in continuous(model, graphs):
                    say(found)
        del model
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
