"""Dense against sparse generation with a model of the Llama family: tokens/s, memory, and the same greedy tokens.

    python -m examples.llama FOLDER [--sparsity 0.5]     a checkpoint; pruned by magnitude only where that is asked for
    python -m examples.llama --random 7b                 Llama-2-7B's configuration, seeded random weights, 50 % sparse

One model is held: it generates dense, is converted in place, and generates sparse. On a GPU the step of one token is
compiled, as generate() does with a static cache: without that the CPU launches kernels more slowly than the GPU runs
them. Exit code 1 when the tokens differ without a tie.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import macko
from macko.nn.report import format_bytes

CONFIGS = {
    "7b": LlamaConfig(max_position_embeddings=4096, rms_norm_eps=1e-5),  # the defaults of LlamaConfig are Llama-2-7B
    "tiny": LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4
    ),
}


@dataclass
class Run:
    """One greedy generation."""

    tokens: Tensor  #: [new tokens]
    logits: Tensor  #: [new tokens, vocabulary], float32, on the CPU
    seconds: float
    peak_bytes: int | None  #: of GPU memory, None on the CPU


def greedy(model: Any, prompt: Tensor, new_tokens: int, compiled: bool) -> Run:
    """Greedy tokens after prompt [1, length]; with `compiled` the first run of a model compiles it."""
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    options |= {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    options |= {"cache_implementation": "static"} if compiled else {"disable_compile": True}
    on_gpu = prompt.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = model.generate(prompt, **options)
    tokens = out.sequences[0, prompt.shape[1] :].cpu()  # waits for the GPU
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return Run(tokens, torch.cat(out.logits).float().cpu(), seconds, peak)


def second_run(model: Any, prompt: Tensor, new_tokens: int, compiled: bool) -> Run:
    """The second of two: the first one compiles."""
    torch.compiler.reset()  # what was compiled for the model before holds memory
    greedy(model, prompt, new_tokens, compiled)
    return greedy(model, prompt, new_tokens, compiled)


def dense_float32(model: nn.Module) -> nn.Module:
    """A copy of the sparse model with dense float32 weights: the same numbers, sums without 16-bit roundings."""
    wide = copy.deepcopy(model)
    for name, module in list(wide.named_modules()):
        if isinstance(module, macko.SparseLinear):
            parent, _, attribute = name.rpartition(".")
            setattr(wide.get_submodule(parent), attribute, module.to_linear().float())
    return nn.Module.float(wide)  # transformers' own refuses models whose weights it takes for quantised


def explain_divergence(model: nn.Module, prompt: Tensor, dense: Run, sparse: Run) -> bool:
    """Prints where the tokens part, and whether the two candidates tie there. True when they do.

    The same prefix, in float32, says how far apart the two tokens are and how far off each 16-bit model is. A gap that
    is not more than what dense rounding alone can move two logits by is a tie.
    """
    step = int((dense.tokens != sparse.tokens).nonzero()[0])
    prefix = torch.cat([prompt[0].cpu(), dense.tokens[:step]])[None].to(prompt.device)
    with torch.no_grad():
        exact = dense_float32(model)(prefix).logits[0, -1].float().cpu()
    gap = (exact[dense.tokens[step]] - exact[sparse.tokens[step]]).abs().item()
    off = {name: (run.logits[step] - exact).abs().max().item() for name, run in (("dense", dense), ("sparse", sparse))}
    tie = gap <= 2 * off["dense"]
    print(
        f"The tokens part at {step}: {int(dense.tokens[step])} and {int(sparse.tokens[step])}. In float32 their logits "
        f"are {gap:.2e} apart; the 16-bit dense model is off by up to {off['dense']:.2e}, the sparse one by "
        f"{off['sparse']:.2e}.\n{'A tie: rounding alone decides.' if tie else 'NOT a tie.'}"
    )
    return tie


def random_llama(config: LlamaConfig, seed: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Seeded random weights."""
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # so that no float32 copy is made first
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def load(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Any]:
    """The dense model, a prompt [1, length], and the tokenizer if there is one."""
    if args.random:
        config = CONFIGS[args.random]
        model = random_llama(config, args.seed, device, dtype)
        return model, torch.randint(config.vocab_size, (1, args.prompt_tokens), device=device), None
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype).eval().to(device)
    return model, tokenizer(args.prompt, return_tensors="pt").input_ids.to(device), tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="a Llama-family checkpoint")
    parser.add_argument("--random", choices=CONFIGS, help="seeded random weights in place of a checkpoint")
    parser.add_argument("--sparsity", type=float, help="prune by magnitude first (default: 0.5 with --random)")
    parser.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), help="default: float16, on a CPU float32"
    )
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--prompt", default="The history of sparse matrices begins with")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="length of the random prompt of --random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="do not compile on a GPU: starts at once, runs slower")
    parser.add_argument("--report", action="store_true", help="print every layer")
    args = parser.parse_args()
    if bool(args.folder) == bool(args.random):
        parser.error("give a checkpoint's folder or --random")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype or ("float16" if device.type == "cuda" else "float32"))

    model, prompt, tokenizer = load(args, device, dtype)
    sparsity = 0.5 if args.random and args.sparsity is None else args.sparsity
    if sparsity is not None:
        macko.prune_(model, sparsity)
    compiled = device.type == "cuda" and not args.eager
    dense = second_run(model, prompt, args.new_tokens, compiled)
    start = time.perf_counter()
    report = macko.sparsify_(model)
    seconds = time.perf_counter() - start
    print(report if args.report else str(report).splitlines()[-1])
    print(f"converted in {seconds:.1f} s")
    if not report.changed:
        print("No layer is sparse enough: prune it first, or with --sparsity 0.5.")
        return 1
    sparse = second_run(model, prompt, args.new_tokens, compiled)

    for name, run in (("dense", dense), ("sparse", sparse)):
        memory = "" if run.peak_bytes is None else f", peak {format_bytes(run.peak_bytes)} of GPU memory"
        print(f"{name:6} {args.new_tokens / run.seconds:8.2f} tokens/s after {prompt.shape[1]} prompt tokens{memory}")
    ratio = dense.seconds / sparse.seconds
    print(f"sparse over dense: {ratio:.2f}x" + (" (slower)" if ratio < 1 else ""))
    if tokenizer is not None:
        print(tokenizer.decode(sparse.tokens))
    if torch.equal(dense.tokens, sparse.tokens):
        print(f"All {args.new_tokens} greedy tokens are the same.")
        return 0
    return 0 if explain_divergence(model, prompt, dense, sparse) else 1


if __name__ == "__main__":
    sys.exit(main())
