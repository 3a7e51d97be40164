"""Prefill and decoding in vLLM with 8-bit linears: vLLM's own dense int8 and fp8, and macko's, dense and by pattern.

    python -m benchmarks.slide_vllm OUT.jsonl --model qwen2.5-7b --folder DIR [--layers 8] [--sides bf16 "int8 2:4" ...]

Weights are random, of the model's shapes, pruned to 2:4, which every wider pattern holds too. DIR gets the folders of
them that the sides read, unless it has them: bf16, and for vLLM int8 and fp8 by compressed-tensors, with the codes and
scales that macko makes of the bf16 one as it loads it. So all sides of a type multiply the same numbers. macko's sides
have the kernel that they are named by in every layer; with --chosen those that macko takes by itself.

Each side is a process with vLLM in it. Prefill: prompts of 1,024 tokens or fewer that come at once, one token each; at
most STEP tokens are one step. Decoding: so many sequences after prompts of 64 tokens, by the difference of two calls.
"ms" is the fastest of three calls; "gpu_ms" is how long kernels ran in one more, by torch's profiler, without the
engine's own time, which counts for more where the model has fewer blocks; with --tp a GPU's wait for the others is in
it. Lines name the kernels by vLLM's log, and have a few greedy tokens: int8 sides of macko have to agree in them, or it
is said so. After --seconds the side that runs is stopped; what it has measured is kept.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import append_jsonl, provenance
from macko import ops
from macko.choose import slide as choice
from macko.measure import engines, runs
from macko.weights import SLIDE_PATTERNS

#: Of transformers' configs: the class, what differs from its defaults.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-7b": (
        "Qwen2",
        {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768,
        },
    ),
    "llama-3.2-3b": (
        "Llama",
        {
            "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
            "num_attention_heads": 24, "num_key_value_heads": 8, "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "tiny": (
        "Qwen2",
        {
            "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        },
    ),
}  # fmt: skip
#: By type its dtype, and what compressed-tensors calls it and a folder of it.
TYPES = {"int8": (torch.int8, "int", "int-quantized"), "fp8": (torch.float8_e4m3fn, "float", "float-quantized")}
PATTERNS = ("dense", "2:4", "4:6", "6:8", "8:10")
SIDES = ("bf16", "vllm int8", "vllm fp8", *(f"{name} {pattern}" for name in TYPES for pattern in PATTERNS))
#: In an order that has what matters first.
DEFAULT = ("vllm int8", "int8 2:4", "bf16", "int8 dense", "int8 6:8", "vllm fp8", "int8 4:6", "int8 8:10")
#: Most tokens of a step, of a prompt that is prefilled, and of a prompt before decoding; tokens that are decoded.
STEP, PROMPT, SHORT, NEW = 32768, 1024, 64, 16


def make(folder: Path, name: str, layers: int, types: list[str]) -> None:
    """Writes the folder bf16 of the model, and of these types; what is no linear layer of a block is one file for all.

    Weights are the same whatever the types are.
    """
    import transformers
    from safetensors.torch import save_file

    kind, numbers = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**numbers, "num_hidden_layers": layers})
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    kept: dict[str, dict[str, Tensor]] = {"bf16": {}, **{of: {} for of in types}}
    rest: dict[str, Tensor] = {}
    for key, meta in model.named_parameters():
        if meta.dim() == 1 and key.endswith("weight"):
            rest[key] = torch.ones(meta.shape, dtype=torch.bfloat16)
            continue
        w = torch.empty(meta.shape, device=device).normal_(0, 0.02).bfloat16()
        if not key.endswith("proj.weight"):
            rest[key] = w.cpu()
            continue
        largest_first = w.abs().view(-1, 4).argsort(1, descending=True)
        w.view(-1, 4).scatter_(1, largest_first[:, 2:], 0)
        kept["bf16"][key] = w.cpu()
        for of in types:
            dtype = TYPES[of][0]
            packed, scale, _ = ops.slide_pack(w, 0, dtype)
            kept[of][key] = ops.slide_unpack(packed, scale, w.shape[1], 0, dtype).cpu()
            kept[of][f"{key}_scale"] = scale[:, None].cpu()
    common = {"architectures": [f"{kind}ForCausalLM"], "dtype": "bfloat16"}
    for of, tensors in kept.items():
        (folder / of).mkdir(parents=True, exist_ok=True)
        config.update({**common, **({"quantization_config": quantization(of)} if of in TYPES else {})})
        save_file(tensors, folder / of / "linears.safetensors")
        if of == "bf16":
            save_file(rest, folder / of / "rest.safetensors")
        else:
            (link := folder / of / "rest.safetensors").unlink(missing_ok=True)
            os.link(folder / "bf16" / "rest.safetensors", link)
        (folder / of / "config.json").write_text(config.to_json_string(use_diff=False))


def quantization(of: str) -> dict[str, Any]:
    """What config.json says of codes with a scale a row, and of activations with one a token."""
    eight = {"num_bits": 8, "type": TYPES[of][1], "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }
    about = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {**about, "format": TYPES[of][2], "config_groups": {"group_0": group}}


#: What vLLM and macko have logged of the kernels that they take, on this rank.
_said: list[str] = []


def listen() -> None:
    """Keeps that from here on, on ranks too, which are forks."""
    make = logging.getLogRecordFactory()

    def record(*args: Any, **more: Any) -> logging.LogRecord:
        made = make(*args, **more)
        text = made.getMessage() if made.name.startswith("vllm") else ""
        if re.search("Selected |macko packs|stays dense|attention backend", text) and text not in _said:
            _said.append(text)
        return made

    logging.setLogRecordFactory(record)


def said(_model: torch.nn.Module) -> list[str]:
    return _said


def measure(side: str, args: argparse.Namespace, pipe: Any) -> None:
    """Sends a line for each time that is measured of the side, and at the end its tokens."""
    import vllm

    listen()
    of, _, pattern = side.partition(" ")
    ours = of in TYPES
    if ours and not args.chosen:
        choice.slide_layout = lambda w, n, *_: SLIDE_PATTERNS.get(pattern, 0)  # type: ignore[assignment]
    engine: dict[str, Any] = {
        "dtype": "bfloat16", "skip_tokenizer_init": True, "enable_prefix_caching": False, "seed": 0,
        "max_model_len": PROMPT + 2 * NEW, "max_num_seqs": max((*args.decode, 64)), "max_num_batched_tokens": args.step,
        "compilation_config": {"cudagraph_capture_sizes": sorted({1, 8, *args.decode})},
        "tensor_parallel_size": args.tp, **args.engine_args,
    }  # fmt: skip
    if ours:
        packed = {"format": "slide", "values": of, "pattern": "2:4" if pattern == "dense" else pattern}
        # vLLM finds compiled code again by the config, where "dense" would be 2:4's.
        engine |= {"quantization": "macko", "hf_overrides": {"macko": packed, "macko_side": side}}
    start = time.perf_counter()
    llm = vllm.LLM(str(Path(args.folder, "bf16" if ours else side.split()[-1])), **engine)
    about: dict[str, Any] = {"model": args.model, "layers": args.layers, "side": side, "chosen": ours and args.chosen}
    about |= {"tp": args.tp, "engine_args": args.engine_args}
    about |= {"vllm": vllm.__version__, "start_s": round(time.perf_counter() - start, 1)}
    about |= {"step": args.step, "bytes": max(size for size, _ in llm.apply_model(engines.bytes_and_seconds))}
    on_gpu = torch.cuda.is_available()

    def run(prompts: int, length: int, new: int) -> Callable[[], None]:
        return lambda: engines.generate(llm, prompts, length, new)

    def heard() -> list[str]:
        return list(dict.fromkeys(text for texts in llm.apply_model(said) for text in texts))

    def send(what: str, count: int, seconds: float | None, gpu: float | None) -> None:
        ms, gpu_ms = (None if each is None else each * 1e3 for each in (seconds, gpu))
        pipe.send({"what": what, "tokens": count, "ms": ms, "gpu_ms": gpu_ms, "said": heard(), **about})

    for tokens in args.prefill:
        call = run(max(1, tokens // PROMPT), min(tokens, PROMPT), 1)
        send("prefill", tokens, min(runs.seconds(call, on_gpu)), engines.gpu_seconds(llm, call))
    for count in args.decode:
        longer, shorter = run(count, SHORT, 1 + NEW), run(count, SHORT, 1)
        seconds = runs.difference(longer, shorter, on_gpu)
        gpu = engines.gpu_difference(llm, longer, shorter)
        send("decode", count, None if seconds is None else seconds / NEW, None if gpu is None else gpu / NEW)
    found = engines.generate(llm, 4, SHORT, NEW)
    ids = [list(each.outputs[0].token_ids) for each in found]
    pipe.send({"what": "tokens", "token_ids": ids, "said": heard(), **about})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-7b")
    parser.add_argument("--folder", required=True, type=Path, help="for weights: 5 bytes each, quickest in memory")
    parser.add_argument("--layers", type=int, help="blocks (default: all)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=DEFAULT)
    sizes = [512 << i for i in range(8)]
    parser.add_argument("--prefill", nargs="*", type=int, default=sizes, help="tokens (default: 512 to 65536)")
    parser.add_argument("--decode", nargs="*", type=int, default=[64, 128, 256, 512], help="sequences")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share each layer (default: %(default)s)")
    parser.add_argument("--step", type=int, default=STEP, help="most tokens of a step (default: %(default)s)")
    parser.add_argument(
        "--chosen", action="store_true", help="macko's sides take the pattern's kernel or the dense one"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of it (default: %(default)s)")
    parser.add_argument("--engine-args", type=engines.engine_args, default={}, help="of vLLM's LLM, JSON")
    args = parser.parse_args()
    began = time.monotonic()
    args.layers = args.layers or MODELS[args.model][1]["num_hidden_layers"]
    args.folder = args.folder / f"{args.model}-{args.layers}"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")  # which says kernels
    os.environ.update({name: os.environ.get(name, value) for name, value in engines.ENVIRONMENT.items()})
    engines.import_early()
    types = [of for of in TYPES if f"vllm {of}" in args.sides]
    if not all((args.folder / of / "config.json").exists() for of in ("bf16", *types)):
        make(args.folder, args.model, args.layers, types)
        torch.cuda.empty_cache()  # vLLM wants nearly all of it
        print(f"{args.folder.name} made in {time.monotonic() - began:.0f} s", flush=True)
    where = provenance() if torch.cuda.is_available() else {"gpu": "cpu"}
    first: dict[str, Any] = {}
    base: dict[Any, float] = {}
    for side in args.sides:
        if (left := args.seconds - (time.monotonic() - began)) <= 0:
            print(f"{side:12} is left out: no time is left", flush=True)
            continue
        line: dict[str, Any] = {}
        for line in engines.in_a_process(measure, side, args, seconds=left):
            append_jsonl(args.results, **line, **where)
            if line["what"] == "tokens":
                kind = "macko int8" if side.startswith("int8") else side
                agrees = first.setdefault(kind, line["token_ids"]) == line["token_ids"]
                print(f"{side:12} started in {line['start_s']} s; {'; '.join(line['said'])}")
                print("" if agrees else f"{side:12} GIVES OTHER TOKENS than the first of {kind}", flush=True)
                continue
            times = []
            for field in ("ms", "gpu_ms"):
                ms, of = line[field], (line["what"], line["tokens"], field)
                over = "" if ms is None else f", {base.setdefault(of, ms) / ms:.2f} of {args.sides[0]}"
                times.append(f"{field} {'-' if ms is None else f'{ms:.3f}'}{over}")
            print(f"{side:12} {line['what']} {line['tokens']:6}: {'; '.join(times)}", flush=True)
        if line.get("what") != "tokens":
            print(f"{side:12} FAILED, or was stopped, after {line.get('what', 'no time')}", flush=True)


if __name__ == "__main__":
    main()
