"""macko in vLLM: the tokens and log-probabilities of the dense model, whichever way its layers came to be packed.

`make test-vllm` makes an environment with a vLLM for CPUs and runs this there: each run of vLLM takes half a minute.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import macko
from macko.formats import MackoWeight
from tests.common import assert_same_bits, random_weight

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"),
]

#: Where tokens are equal, sums of 24 log-probabilities in bfloat16 may differ by so much: each by a rounding of logits,
#: which are below 16, at each of them.
NEAR = 24 * 16 * 2**-8
ENGINE = {"dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 8, "skip_tokenizer_init": True, "seed": 0}


def generate(folder: str, options: dict[str, Any], adapter: str | None, out: str) -> None:
    """Runs vLLM, in a process of its own, and writes tokens and their log-probabilities as JSON."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(folder, **{"enforce_eager": True, **ENGINE, **options})
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8, 9, 10], list(range(20, 60)), [3])]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, detokenize=False)
    asked = {"lora_request": LoRARequest("adapter", 1, adapter)} if adapter else {}
    outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False, **asked)]
    tokens = [list(o.token_ids) for o in outputs]
    logprobs = [[step[t].logprob for t, step in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs]
    Path(out).write_text(json.dumps({"tokens": tokens, "logprobs": logprobs}))


if __name__ == "__main__":
    generate(**json.loads(sys.argv[1]))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dense, half of its weights zero, and packed, its head too: with grouped queries and biases."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("vllm")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=32, vocab_size=500, max_position_embeddings=256, tie_word_embeddings=False, attention_bias=True,
        mlp_bias=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(4)  # so that the most likely token is clearly so
            elif name.endswith("bias"):
                weight.normal_(0, 0.1)
    macko.prune_(model, 0.5)
    model.save_pretrained(folder / "dense")
    macko.sparsify_(model, ignore=())
    model.save_pretrained(folder / "packed")
    return folder


@pytest.fixture(scope="session")
def run(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """run(folder, adapter=None, **options of vLLM): what generate writes, and what vLLM logged; the same run once only."""
    done: dict[str, Any] = {}
    cache = tmp_path_factory.mktemp("cache")

    def run(folder: str, adapter: Path | None = None, fails: bool = False, **options: Any) -> Any:
        key = json.dumps([folder, str(adapter), options], sort_keys=True)
        if key in done:
            return done[key]
        out = tmp_path_factory.mktemp("run") / "out.json"
        call = {"folder": str(folders / folder), "options": options, "adapter": adapter and str(adapter), "out": str(out)}
        env = {
            **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CACHE_ROOT": str(cache),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.test_vllm", json.dumps(call)]
        process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
        log = process.stdout + process.stderr
        assert (process.returncode != 0) == fails, log
        result = SimpleNamespace(log=log, **({} if fails else json.loads(out.read_text())))
        done[key] = result
        return result

    return run


def assert_same(got: Any, wanted: Any, rounding: bool = False) -> None:
    """The same tokens and nearly the same log-probabilities; with other rounding, only until sequences part."""
    for tokens, logprobs, right, right_logprobs in zip(
        got.tokens, got.logprobs, wanted.tokens, wanted.logprobs, strict=True
    ):
        parted = next((i for i, (a, b) in enumerate(zip(tokens, right, strict=True)) if a != b), None)
        assert rounding or parted is None
        # Where they part each took its own likeliest token: those have to be nearly as likely.
        stop = None if parted is None else parted + 1
        assert abs(sum(logprobs[:stop]) - sum(right_logprobs[:stop])) < NEAR


def test_a_dense_folder_is_packed_as_it_arrives(run: Callable[..., Any]) -> None:
    got = run("dense", quantization="macko")
    assert_same(got, run("dense"))
    assert "macko packs linear layers" in got.log


def test_a_packed_folder_needs_no_option(run: Callable[..., Any]) -> None:
    assert_same(run("packed"), run("dense"))
