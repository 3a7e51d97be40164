"""What pruning and rounding cost a language model that is trained here, on one GPU (or, small, on a CPU).

    python -m benchmarks.quality OUT                                     about nine minutes on an H200
    python -m benchmarks.quality OUT --size tiny --train-seconds 10      to try it, on a CPU

Trains a Llama on text that every machine with Python has: the sources of the standard library, and the sources,
documentation and licences of the installed packages. Judged by files of the standard library that were held out.
Then prunes it by every method, rounds it to integers and floats of 8, 4 and 3 bits, and judges each. A line a model
goes to OUT/quality.jsonl as soon as it is known, the trained model to OUT/model: a second call goes on from there, and
leaves out what has a line of this commit.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import itertools
import json
import math
import re
import sysconfig
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import macko
from benchmarks.timing import append_jsonl, commit
from macko.evaluate import language, windows
from macko.grids import Grid, float8, integers, nearest
from macko.layers import IGNORED, find_linears, packed_share
from macko.prune import METHODS, STATISTICS, sparsegpt
from macko.reconstruct import Recipe

#: Of each size: the model, tokens in a piece, pieces in a step, the largest learning rate, megabytes of text.
SIZES: dict[str, dict[str, Any]] = {
    "44m": {
        "config": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12,
                   "num_attention_heads": 8, "num_key_value_heads": 8},
        "length": 512, "batch": 64, "lr": 2e-3, "megabytes": 160,
    },
    "1m": {
        "config": {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
                   "num_attention_heads": 4, "num_key_value_heads": 2},
        "length": 128, "batch": 24, "lr": 4e-3, "megabytes": 12,
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
    model: Any = LlamaForCausalLM(config)
    model = model.to(device)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")
    length, rng = size["length"], torch.Generator().manual_seed(0)
    tokens = tokens.to(device)
    offsets = torch.arange(length, device=device)
    start, steps, over, shown, loss = time.perf_counter(), 0, 0.0, 0.0, torch.zeros(())
    while over < 1:
        lr = (
            size["lr"]
            * min(1, (steps + 1) / 100, over / 0.02 + 0.01)
            * (0.02 + 0.98 * (1 + math.cos(math.pi * over)) / 2)
        )
        for group in optimizer.param_groups:
            group["lr"] = lr
        places = torch.randint(len(tokens) - length, (size["batch"], 1), generator=rng).to(device)
        batch = tokens[places + offsets].long()
        with torch.autocast(device.type, torch.bfloat16):
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


@dataclasses.dataclass
class Variant:
    """One way to make the model smaller."""

    name: str
    #: Of prune_; "" for plain rounding.
    method: str = ""
    sparsity: float | None = None
    pattern: str | None = None
    #: "submodule", "block" or "".
    reconstruct: str = ""
    auto: bool = False
    #: Of rounding: a grid, columns that share a scale, and bits of a value with its share of scales.
    grid: Grid | None = None
    group: int | None = None
    bits: float = 16

    @property
    def bytes(self) -> float:
        """Bytes a weight, packed: as macko's gaps, or 2:4 with two bits a value, or every value."""
        if self.pattern == "2:4":
            return (self.bits + 2) / 16
        density = 1 - (self.sparsity or 0)
        return self.bits / 8 * (packed_share(density, self.bits, (2, 4)) if density < 1 else 1)


#: What says which variant a line is of.
KEYS = ("name", "method", "sparsity", "pattern", "reconstruct", "auto")
#: Bits of a float16 scale, of one and a zero point of 4 bits, to each of 128 columns.
SCALE, WITH_ZERO = 16 / 128, 20 / 128


def variants() -> list[Variant]:
    """In the order of what one wants to know first."""
    bars: list[dict[str, Any]] = [{"sparsity": 0.5}, {"sparsity": 0.7}, {"pattern": "2:4"}]
    more: list[dict[str, Any]] = [{"sparsity": 0.3}]

    def of(cases: list[dict[str, Any]], methods: list[str], unit: str = "") -> list[Variant]:
        fitted = {"": "", "submodule": ", fitted", "block": ", fitted by block"}[unit]
        return [Variant(f"{method}{fitted}", method, reconstruct=unit, **case) for case in cases for method in methods]

    wide, four, three = integers(8), integers(4, offset=True), integers(3, offset=True)
    rounded = [
        Variant("int8", grid=wide, bits=8 + 16 / 512),
        Variant("fp8", grid=float8, bits=8 + 16 / 512),
        Variant("int4 g128", grid=four, group=128, bits=4 + WITH_ZERO),
        Variant("int3 g128", grid=three, group=128, bits=3 + WITH_ZERO),
        Variant("GPTQ int4 g128", "sparsegpt", 0.0, grid=four, group=128, bits=4 + WITH_ZERO),
        Variant("GPTQ int3 g128", "sparsegpt", 0.0, grid=three, group=128, bits=3 + WITH_ZERO),
        Variant("sparsegpt and int8 at once", "sparsegpt", 0.5, grid=wide, group=128, bits=8 + SCALE),
        Variant("sparsegpt and int4 at once", "sparsegpt", 0.5, grid=four, group=128, bits=4 + WITH_ZERO),
        Variant("sparsegpt, fitted, then int8", "sparsegpt", 0.5, None, "block", grid=wide, group=128, bits=8 + SCALE),
        Variant("sparsegpt, fitted, then int4", "sparsegpt", 0.5, None, "block", grid=four, group=128,
                bits=4 + WITH_ZERO),
    ]  # fmt: skip
    everything = ["magnitude", "wanda", "sparsegpt"]
    return [
        *of(bars, everything), *of(bars, ["sparsegpt"], "submodule"), *of(bars, ["sparsegpt"], "block"),
        *rounded[:-2], *of(bars[:1], ["wanda", "magnitude"], "submodule"), *of(bars[:1], ["wanda"], "block"),
        *(Variant("sparsegpt, auto", "sparsegpt", share, auto=True) for share in (0.5, 0.7)), *rounded[-2:],
        *(Variant("sparsegpt, auto, fitted by block", "sparsegpt", share, auto=True, reconstruct="block")
          for share in (0.5, 0.7)),
        *of(more, everything), *of(more, ["sparsegpt"], "block"), *of(bars[1:], ["wanda", "magnitude"], "block"),
    ]  # fmt: skip


def make(model: Any, variant: Variant, batches: list[Tensor], recipe: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A copy of the model made smaller, its weights rounded to float16, and what prune_ said."""
    smaller, about = copy.deepcopy(model), {}
    METHODS["rounded"] = partial(sparsegpt, grid=variant.grid)  # a method is a plain function
    STATISTICS["rounded"] = STATISTICS["sparsegpt"]
    prune = partial(macko.prune_, smaller, calibration=batches, progress=False)
    if variant.method:
        sparsity: Any = f"auto:{variant.sparsity}" if variant.auto else variant.sparsity
        method = "rounded" if variant.grid and not variant.reconstruct else variant.method
        fitted = Recipe(variant.reconstruct, **recipe) if variant.reconstruct else None
        report = prune(sparsity, method, pattern=variant.pattern, reconstruct=fitted)
        zeros, count = report.zeros
        about = {"zeros": zeros, "pruned_weights": count, "fits": [dataclasses.asdict(fit) for fit in report.fits]}
        if variant.grid and variant.reconstruct:
            prune(0.0, "rounded")
    elif variant.grid:
        for layer in find_linears(smaller, IGNORED, None):
            weight = layer.module.weight
            weight.data.copy_(nearest(weight.data, variant.grid, variant.group))
    del METHODS["rounded"], STATISTICS["rounded"]
    for parameter in smaller.parameters():
        parameter.data = parameter.data.half().to(parameter.dtype)
    return smaller, about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the lines and the model")
    parser.add_argument("--size", choices=SIZES, default="44m")
    parser.add_argument("--train-seconds", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=520, help="begin nothing that would end later than this")
    parser.add_argument("--calibration", type=int, default=256, help="pieces of the training text to calibrate on")
    parser.add_argument("--held-out", type=int, default=400, help="pieces of held-out text to judge by, at most")
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--lr", type=float, default=Recipe.lr)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="names of variants, as a regular expression")
    args = parser.parse_args()
    begin, device, size = time.perf_counter(), torch.device(args.device), SIZES[args.size]
    args.out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    about: dict[str, Any] = {"commit": commit(), "device": name, "torch": torch.__version__, "size": args.size}

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begin:6.1f} s  {text}", flush=True)

    texts, held_texts = corpus(size["megabytes"])
    folder, known = args.out / "model", args.out / "model" / "trained.json"
    tokenizer = AutoTokenizer.from_pretrained(folder) if known.exists() else None
    tokenizer = tokenizer or make_tokenizer(texts, size["config"]["vocab_size"])
    tokens, held = tokens_of(tokenizer, texts), tokens_of(tokenizer, held_texts)
    characters, held_characters = sum(map(len, texts)), sum(map(len, held_texts))
    say(f"{characters / 1e6:.1f} MB, {len(tokens)} tokens; held out {held_characters / 1e6:.2f} MB, {len(held)} tokens")
    if known.exists():
        model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = model.to(device).eval()
        trained = json.loads(known.read_text())
    else:
        model, trained = train(size, tokens, args.train_seconds, device)
        trained |= {
            "commit_of_training": about["commit"],
            "characters": characters,
            "train_seconds": args.train_seconds,
        }
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        known.write_text(json.dumps(trained))
    say(f"trained: {trained}")
    model.requires_grad_(False)
    length, recipe = size["length"], {"epochs": args.epochs, "steps": args.steps, "lr": args.lr}
    batches = [torch.cat(group).long() for group in groups(windows(tokens, length, args.calibration), 8)]
    judged = [torch.cat(group).long() for group in groups(windows(held, length, args.held_out), 16)]
    dense, _ = make(model, Variant("dense"), [], recipe)
    about |= {
        "weights": trained["weights"], "trained_tokens": trained["trained_tokens"], "length": length,
        "calibration_tokens": sum(b.numel() for b in batches), "characters_a_token": held_characters / len(held),
    }  # fmt: skip
    longest = dict.fromkeys((False, True), 0.0)  # by whether it is fitted
    lines = args.out / "quality.jsonl"
    there = [json.loads(text) for text in lines.read_text().splitlines()] if lines.exists() else []
    for variant in [Variant("dense"), *variants()]:
        about_it = {key: getattr(variant, key) for key in KEYS}
        judged_already = any(all(line[k] == v for k, v in {**about_it, **about}.items()) for line in there)
        if judged_already or not re.search(args.only, variant.name):
            continue
        left = args.seconds - (time.perf_counter() - begin)
        if left < 1.2 * longest[bool(variant.reconstruct)] or left < 0:
            say(f"left out for lack of time: {variant.name} {variant.pattern or variant.sparsity}")
            continue
        start = time.perf_counter()
        smaller, more = make(model, variant, batches, recipe)
        seconds = time.perf_counter() - start
        found = language(smaller, judged, dense, progress=False)
        longest[bool(variant.reconstruct)] = max(longest[bool(variant.reconstruct)], time.perf_counter() - start)
        line = {"what": "quality", **about_it, "bytes": variant.bytes, "seconds": seconds}
        append_jsonl(lines, **line, **found, **more, **about)
        what = f"{variant.name} {variant.pattern or variant.sparsity or ''}"
        ratio, same = found["perplexity_ratio"], found["agreement"]
        say(f"{what:32} {variant.bytes:5.3f} B  ratio {ratio:.4f}  same token {same:.3f}  in {seconds:.1f} s")


def groups(items: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    """The items in lists of so many; the last may be shorter."""
    return (items[start : start + size] for start in range(0, len(items), size))


if __name__ == "__main__":
    main()
