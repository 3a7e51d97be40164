"""What a run of `macko bench` is told and what it finds, whatever runs the model: its lines, its table, its times."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import timeit
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ..choose.options import Options
from ..nn.report import format_bytes, format_table
from ..pruning.prune import asked_for
from ..weights.codes import KINDS

#: Sequences that decode at once, and lengths of prompts, where they are not given; decoding is after the first length.
BATCHES, PROMPT_TOKENS = (1, 2, 4, 8, 16, 32, 64), (128, 32, 512, 2048)
#: The same on a CPU, where more take hours.
BATCHES_ON_CPU, PROMPT_TOKENS_ON_CPU = (1, 4), (32,)
#: Where noise is as large as what is measured, it is measured so often again.
RETRIES = 3


#: What --json writes.
Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Side:
    """A model as it is compared."""

    model: str  #: "dense", "sparse", or "dense12", which has no zeros to tell; a rival; of an engine the side
    sparsity: float  #: share of zeros in its layers
    tokens: int | None  #: what sparsify_ was told

    def __str__(self) -> str:
        if self.model != "sparse":
            return self.model
        return f"{self.sparsity:.0%} sparse{f', tokens={self.tokens}' if self.tokens else ''}"


@dataclasses.dataclass(frozen=True)
class Result(Side):
    """One measurement of it."""

    what: str  #: "prefill" or "decode"
    batch: int
    prompt_tokens: int  #: of each sequence
    ms: float | None  #: of the prefill, or of one token of all sequences; None where noise hides it
    tokens_per_s: float | None  #: of all sequences together
    peak_bytes: int | None  #: of GPU memory; None on the CPU. Of an engine, which takes what there is, of all weights


def check(options: argparse.Namespace) -> None:
    """ValueError or OSError for what would else be found out after the first times."""
    Options(options.format, options.tokens, values=options.values or "exact")
    for sparsity in options.sparsity or ():
        asked_for(sparsity, "magnitude", None)
    if options.values in KINDS and len(options.sparsity or ()) > 1:
        raise ValueError(f"--values {options.values} rounds the model: give one --sparsity")
    if options.weights_dtype and not options.source.startswith("random:"):
        raise ValueError(f"--weights-dtype is of random: alone, MODEL is {options.source!r}")
    append(options.json, ())


def append(path: str | None, lines: Iterable[Line]) -> None:
    """Writes JSON lines after what a file has, if there is one to write to."""
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def longest(options: argparse.Namespace) -> int:
    """Tokens of the longest run, prompt and new ones."""
    return max(options.prompt_tokens[0] + options.new_tokens, *options.prompt_tokens)


def set_lengths(options: argparse.Namespace, positions: int | None, more: int = 0) -> None:
    """--batch and --prompt-tokens, where they are not given, these cut to the model's positions; ValueError where
    positions are too few.

    more: positions that a run takes besides.
    """
    most, on_gpu = (positions or sys.maxsize) - more, torch.cuda.is_available()
    options.batch = options.batch or [*(BATCHES if on_gpu else BATCHES_ON_CPU)]
    if not options.prompt_tokens:
        first, *others = PROMPT_TOKENS if on_gpu else PROMPT_TOKENS_ON_CPU
        lengths = [max(1, min(first, most - options.new_tokens)), *(min(length, most) for length in others)]
        options.prompt_tokens = list(dict.fromkeys(lengths))
    if longest(options) > most:
        taken = longest(options) + more
        raise ValueError(f"--prompt-tokens and --new-tokens take {taken} positions, {options.source} has {positions}")


#: Of random: the family of transformers and its sizes, which are those of Llama 2, Mixtral-8x7B and Qwen3-30B-A3B; of
#: Mixtral's 32 layers half, so that a GPU of 80 GB holds them in 16 bits.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "7b": ("llama", {"max_position_embeddings": 4096}),
    "70b": (
        "llama",
        {"max_position_embeddings": 4096, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "num_hidden_layers": 80},
    ),
    "mixtral": ("mixtral", {"num_hidden_layers": 16, "max_position_embeddings": 32768}),
    "qwen3-30b": (
        "qwen3_moe",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32}
        | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
        | {"norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 40960},
    ),
    "tiny": (
        "llama",
        {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
        | {"num_attention_heads": 4},
    ),
    "tiny-mixtral": (
        "mixtral",
        {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
}


def random_config(source: str, **more: Any) -> Any:
    """The config of a model of random weights, of one of SIZES."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    size = source.removeprefix("random:")
    if size not in SIZES:
        raise ValueError(f"MODEL is {source!r}, expected a folder, or random: with one of {', '.join(SIZES)}")
    kind, sizes = SIZES[size]
    return AutoConfig.for_model(kind, architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]], **{**sizes, **more})


def about_run(options: argparse.Namespace, *names: str) -> Line:
    """What each line says of the run; names: of options."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "commit": os.environ.get("MACKO_COMMIT", "unknown"),
        **{name: vars(options)[name] for name in names},
        # Of a folder its name: where it lies is the machine's business.
        **({"source": Path(options.source).name} if "source" in names and Path(options.source).exists() else {}),
    }


def result(
    side: Side, what: str, batch: int, prompt_tokens: int, tokens: int, seconds: float | None, nbytes: int | None
) -> Result:
    """Of so many tokens in these seconds, None where noise hides them."""
    ms, speed = (None, None) if seconds is None else (seconds * 1e3, tokens / seconds)
    return Result(side.model, side.sparsity, side.tokens, what, batch, prompt_tokens, ms, speed, nbytes)


def show(results: Iterable[Result], memory: str = "peak") -> None:
    """Prints a line for each; memory: what peak_bytes are."""
    for result in results:
        peak = "" if result.peak_bytes is None else f", {memory} {format_bytes(result.peak_bytes)}"
        speed = f"too noisy to tell{peak}"
        if result.ms is not None:
            speed = f"{result.ms:8.3f} ms, {result.tokens_per_s:8.1f} tokens/s{peak}"
        print(f"{result}, {result.what} batch {result.batch} prompt {result.prompt_tokens}: {speed}", flush=True)


def table(results: list[Result], memory: str = "peak GPU memory") -> str:
    rows = [("what", ">batch", ">prompt", "model", ">ms", ">tokens/s", ">over dense", f">{memory}")]
    dense = {(r.what, r.batch, r.prompt_tokens): r for r in results if r.model == "dense"}
    for result in sorted(results, key=lambda r: (r.what, r.batch, r.prompt_tokens, r.sparsity, r.tokens or 0)):
        speed, key = result.tokens_per_s, (result.what, result.batch, result.prompt_tokens)
        base = dense[key].tokens_per_s if key in dense else None
        peak = "" if result.peak_bytes is None else format_bytes(result.peak_bytes)
        ratio = f"{speed / base:.2f}x" if speed and base else "-"
        times = (f"{result.ms:.3f}", f"{speed:.1f}", ratio) if speed else ("-", "-", "-")
        rows.append((result.what, str(result.batch), str(result.prompt_tokens), str(result), *times, peak))
    return format_table(rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows])


def difference(longer: Callable[[], Any], shorter: Callable[[], Any], on_gpu: bool) -> float | None:
    """Seconds that one call takes beyond another: of the fastest of each. None where noise is as large as that.

    Noise is how far the median of a call's times is from their fastest, of both together; where it is too large there
    are more calls, RETRIES times.
    """
    of_both: tuple[list[float], list[float]] = ([], [])
    for _ in range(1 + RETRIES):
        for call, found in zip((shorter, longer), of_both, strict=True):
            found += seconds(call, on_gpu)
        less, more = map(min, of_both)
        noise = sum(statistics.median(found) - min(found) for found in of_both)
        if more - less > noise:
            return more - less
    return None


def seconds(call: Callable[[], Any], on_gpu: bool, calls: int = 3) -> list[float]:
    """Seconds of some calls after a first one, without garbage collection: a compiler leaves millions of objects."""
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    gc.collect()
    return timeit.repeat(lambda: (call(), wait()), wait, repeat=1 + calls, number=1)[1:]


def gpu_events(profile: Any) -> list[Any]:
    """The kernels and copies of a profile."""
    return [event for event in profile.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]


def busy_us(events: Iterable[Any]) -> float:
    """Microseconds in which any of these ran."""
    busy = end = 0.0
    for start, stop in sorted((event.time_range.start, event.time_range.end) for event in events):
        busy += max(0.0, stop - max(end, start))
        end = max(end, stop)
    return busy
