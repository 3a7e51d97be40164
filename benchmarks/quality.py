"""What pruning and rounding cost a language model that is trained here, on one GPU (or, small, on a CPU).

    python -m benchmarks.quality OUT                                     about nine minutes on an H200
    python -m benchmarks.quality OUT --size tiny --train-seconds 10      to try it, on a CPU

Trains a Llama on text that every machine with Python has: the sources of the standard library, and the sources,
documentation and licences of the installed packages. Judged by files of the standard library that were held out.
Then prunes it by every method, rounds it to integers and floats of 8, 4 and 3 bits, and judges each. A line a model
goes to OUT/quality.jsonl as soon as it is known, the trained model to OUT/model: a second call goes on from there.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import macko
from benchmarks.timing import append_jsonl, commit
from macko.layers import IGNORED, find_linears

#: Of each size: the model, tokens in a piece, pieces in a step, the largest learning rate, megabytes of text.
SIZES: dict[str, dict[str, Any]] = {
    "44m": {
        "config": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12,
                   "num_attention_heads": 8, "num_key_value_heads": 8},
        "length": 512, "batch": 64, "lr": 2e-3, "megabytes": 160,
    },
    "3m": {
        "config": {"vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
                   "num_attention_heads": 4, "num_key_value_heads": 2},
        "length": 256, "batch": 16, "lr": 3e-3, "megabytes": 30,
    },
    "tiny": {
        "config": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                   "num_attention_heads": 4, "num_key_value_heads": 2},
        "length": 64, "batch": 8, "lr": 5e-3, "megabytes": 1,
    },
}  # fmt: skip
#: One file of the standard library in so many is held out.
HELD_OUT = 20


def corpus(megabytes: float) -> tuple[list[str], list[str]]:
    """Texts to train on and texts to judge by: files of this machine, each once, in an order by their contents."""
    paths = sysconfig.get_paths()
    library, packages = Path(paths["stdlib"]), Path(paths["purelib"])
    own = [path for path in sorted(library.rglob("*.py")) if not {"site-packages", "test"} & {*path.parts}]
    others = [
        path for path in sorted(packages.rglob("*"))
        if path.suffix in (".py", ".md", ".rst") or path.name.startswith(("LICENSE", "METADATA"))
    ]  # fmt: skip
    seen: set[str] = set()

    def read(files: list[Path]) -> dict[str, str]:
        texts = {}
        for path in files:
            if path.is_file() and 200 < path.stat().st_size < 400_000:
                text = path.read_text(encoding="utf-8", errors="ignore")
                digest = hashlib.sha256(text.encode()).hexdigest()
                if digest not in seen:
                    seen.add(digest)
                    texts[digest] = text
        return texts

    texts = read(own)
    held = [text for digest, text in sorted(texts.items()) if int(digest[-8:], 16) % HELD_OUT == 0]
    train = [text for digest, text in sorted(texts.items()) if int(digest[-8:], 16) % HELD_OUT]
    left = megabytes * 1e6 - sum(map(len, train))
    for _, text in sorted(read(others).items() if left > 0 else ()):
        if (left := left - len(text)) < 0:
            break
        train.append(text)
    # In an order by their contents, or the last steps would see one package.
    train.sort(key=lambda text: hashlib.sha256(text[:1000].encode()).digest())
    total = itertools.accumulate(map(len, train))
    return [text for text, end in zip(train, total, strict=True) if end < megabytes * 1e6] or train[:1], held


def make_tokenizer(texts: list[str], vocabulary: int) -> Any:
    """A byte-pair tokenizer made of up to 20 MB of the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    ends = itertools.accumulate(map(len, texts))
    tokenizer.train_from_iterator((t for t, end in zip(texts, ends, strict=True) if end < 20e6), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def tokens_of(tokenizer: Any, texts: list[str]) -> Tensor:
    """All texts behind each other, an <end> behind each."""
    ids: list[int] = []
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts[start : start + 256]):
            ids += [*encoding.ids, tokenizer.eos_token_id]
    return torch.tensor(ids, dtype=torch.int32)


def train(size: dict[str, Any], tokens: Tensor, seconds: float, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """A Llama after so many seconds of AdamW, and what the training was.

    The learning rate goes by the share of the time that is over, so that a slow machine ends as low as a fast one.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        **size["config"], max_position_embeddings=size["length"], bos_token_id=None, eos_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).to(device)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")
    length, rng = size["length"], torch.Generator().manual_seed(0)
    tokens = tokens.to(device)
    offsets = torch.arange(length, device=device)
    half = True
    start, steps, over, shown, loss = time.perf_counter(), 0, 0.0, 0.0, torch.zeros(())
    while over < 1:
        lr = size["lr"] * min(1, (steps + 1) / 100, over / 0.02 + 0.01) * (0.02 + 0.98 * (1 + math.cos(math.pi * over)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = lr
        places = torch.randint(len(tokens) - length, (size["batch"], 1), generator=rng).to(device)
        batch = tokens[places + offsets].long()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 20 == 0 or device.type == "cpu":
            loss.item()  # the queue is empty: the clock says what was done
            over = (time.perf_counter() - start) / seconds
            if over - shown > 0.05:
                shown = over
                print(f"{over:4.0%} of the training, step {steps}, loss {loss.item():.3f}", flush=True)
    count = sum(p.numel() for p in model.parameters())
    about = {"weights": count, "steps": steps, "trained_tokens": steps * size["batch"] * length, "loss": loss.item()}
    return model.eval(), about
