"""The command `macko`: prune, convert, inspect, tune, bench, eval, doctor. Each is a few lines over the package."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm

from . import __version__, codes
from .choose import (
    CHOICES,
    DENSE12_SHARE,
    DENSE12_WEIGHTS,
    SPARSE11_LISTED,
    VALUES,
    Options,
    bit_counts,
    have_codes,
    lacking,
    sparse11_of,
)
from .convert import MIN_SPARSITY
from .evaluate import windows
from .files import Checkpoint, check_whole, quant_method
from .formats import (
    FORMATS,
    Dense12Weight,
    EcWeight,
    Macko8Weight,
    MackoWeight,
    PackedWeight,
    Sparse11Weight,
    TileWeight,
)
from .integrations import require_transformers
from .integrations.compressed_tensors import Masked, masked, sparsity_format
from .layers import (
    IGNORED,
    PATTERNS,
    Report,
    columns,
    countable,
    density_text,
    format_bytes,
    holding,
    named,
    packed_share,
)
from .linear import DTYPES
from .prune import METHODS, STATISTICS, asked_for, prune_
from .reconstruct import RECIPES
from .rivals import RIVALS
from .shards import sliced
from .times import SHIPPED, is_cpu, read, times, times_of

#: What a user, a file, a disk or a network can cause: these are told in one line, without a traceback.
EXPECTED = (
    OSError, ValueError, TypeError, ImportError, RuntimeError, MemoryError, SafetensorError, UserWarning,
)  # fmt: skip
_DTYPES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
#: Layers' outputs are compared on so many tokens of a text, so that all of them fit.
LAYER_TOKENS = 256
#: A matrix is looked at by so many elements at a time, or one row block of tile; and not at all where it has more
#: elements than these and so many a byte of its file: a shape takes no bytes, and a look up to 20 ns an element.
PANEL, ELEMENTS_A_BYTE = 2**20, 64
#: Columns of a panel at most: a multiple of tile's 256 and of the columns of every pattern.
PANEL_COLS = math.lcm(256, *(m for _, m in PATTERNS))
#: Bytes that a look at a matrix may take: so many a byte of its file, and these.
BYTES_A_BYTE, MORE_BYTES = 4, 2**25
#: Endings of files that hold weights.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
#: Files of which a tokenizer has one.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
#: What a repository of the Hub holds besides, or a second time, in other formats.
NOT_FETCHED = [*(f"*{ending}" for ending in WEIGHTS[1:]), "*/*"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = parser().parse_args(arguments)
    options.hint = ""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ignore has")  # a layer that was to be left would be pruned
        warnings.filterwarnings("ignore", "prune_ stopped")  # nobody keeps that model
        warnings.filterwarnings("ignore", ".* changed no")  # told as the command's error
        try:
            return options.run(options) or 0
        except KeyboardInterrupt:
            text, code = "interrupted", 130
        except EXPECTED as error:
            text, code = _as_options(" ".join(str(error).split()), options) or type(error).__name__, 1
    print(f"macko {options.command}: {text}{options.hint}", file=sys.stderr)
    return code


def _as_options(text: str, options: argparse.Namespace) -> str:
    """A message of the package that begins with an argument's name, with the options by their names here."""
    names = "|".join(vars(options).keys() - {"command", "run", "hint", "source", "target"})
    if not re.match(rf"({names}) ", text):
        return text
    return re.sub(
        rf"(?<![\w-])({names})(?= is | has | needs | auto| \d)", lambda m: f"--{m[1].replace('_', '-')}", text
    )


def parser() -> argparse.ArgumentParser:
    """Of every command and its arguments; `run` is the command's function."""
    parser = argparse.ArgumentParser(prog="macko", description="Pruned neural networks, smaller and faster.")
    parser.add_argument("--version", action="version", version=f"macko {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for run, text, arguments in (
        (prune, "set weights of a checkpoint to zero", _prune_arguments),
        (convert, "pack a pruned checkpoint", _convert_arguments),
        (inspect, "density, patterns and bytes of every matrix of a checkpoint", _inspect_arguments),
        (tune, "time the formats on this GPU or CPU, for format=auto to choose by", _tune_arguments),
        (bench, "time a model dense against sparse", _bench_arguments),
        (eval, "perplexity of a model, and how far it is from the dense one", _eval_arguments),
        (doctor, "what is installed, and a self-test (python -m macko)", lambda add: None),
    ):
        command = commands.add_parser(run.__name__, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(run=run)
        arguments(command.add_argument)
    return parser


def _in_and_out(add: Any, source: str) -> None:
    add("source", metavar="IN", help=source)
    add("target", metavar="OUT", help="folder to write")
    add("--overwrite", action="store_true", help="replace the model in OUT, once the new one is whole")
    ignored = f"layers to leave besides {', '.join(IGNORED)}: full names, last components of names, or globs; "
    add("--ignore", nargs="*", metavar="LAYER", help=ignored + "--ignore alone leaves none, not even that")


def _prune_arguments(add: Any) -> None:
    _in_and_out(add, "folder of a dense checkpoint, or its name on the Hub (organisation/model)")
    share = "share of zeros (default 0.5, or what the pattern says); auto:0.5: more where they hurt less"
    add("--sparsity", type=_sparsity, help=share)
    add("--pattern", help="n:m, at most n non-zeros in every m columns, as 2:4")
    add("--method", choices=METHODS, default="wanda", help="default: wanda (of prune_: magnitude)")
    fitted = "fit what is left of attention and MLP (or of each block) to the dense outputs: loses less; for a GPU"
    add("--reconstruct", choices=RECIPES, nargs="?", const="submodule", help=fitted)
    add("--calibration", metavar="FILE", help="a text to calibrate on (all but plain magnitude)")
    add("--samples", type=_count, default=128, help="pieces of the text (default 128)")
    add("--length", type=_count, help="tokens in a piece (default 2048, or the model's positions)")
    add("--device", help="where to prune, one block at a time (default: a GPU if there is one)")
    resume = "go on where a run with the same options was stopped"
    add("--resume", action="store_true", help=f"{resume} (wanda, sparsegpt: OUT.unfinished keeps its layers)")


def _convert_arguments(add: Any) -> None:
    _in_and_out(add, "folder with dense weights, or sparse ones of compressed-tensors, or its name on the Hub")
    kinds = {name: kind for name, kind in FORMATS.items() if not kind.saved_dense}
    *some, last = (name for name, kind in kinds.items() if name != "macko" and not kind.is_layout)
    held = f"what the weights are held in where the model is loaded ({', '.join(some)} and {last} have files of their "
    add("--format", default="auto", help=f"{held}own, the others the same): {', '.join(CHOICES)}, {', '.join(kinds)}")
    add("--values", choices=codes.KINDS, help="round to 8 bits a value, with a scale a row (default: no)")
    add("--min-sparsity", type=float, default=MIN_SPARSITY, help="leave denser layers as they are")
    add("--device", help="where to pack (default: a GPU if there is one)")


def _inspect_arguments(add: Any) -> None:
    add("source", metavar="FOLDER", help="folder or .safetensors file")
    add("--gpu", help='name of the GPU to expect gains for, as "NVIDIA H200" (default: the one here, or the CPU)')


def _tune_arguments(add: Any) -> None:
    add("source", metavar="FOLDER", nargs="?", help="a pruned checkpoint, whose shapes and densities")
    add("--shapes", nargs="+", default=[], metavar="ROWSxCOLS", help="shapes, without a checkpoint")
    add("--densities", nargs="+", type=float, default=[0.5], help="of --shapes (default 0.5)")
    add("--dtype", choices=_DTYPES, default="float16", help="of --shapes")
    add("--device", help="cuda or cpu (default: a GPU if there is one)")
    add("--tokens", nargs="+", type=_count, default=[1], help="at once (default 1)")
    add("--out", metavar="FILE", help="the table (default: the user's, for this GPU)")


def _bench_arguments(add: Any) -> None:
    add("source", metavar="MODEL", help="folder of a dense checkpoint, or random:7b, random:70b, random:tiny")
    pruned = "prune by magnitude first, to each of these (default 0.5 for random:)"
    add("--sparsity", type=float, nargs="+", help=pruned)
    add("--format", default="auto", help="as of convert, or dense12: bfloat16 weights with zeros or none, lm_head too")
    add("--values", choices=VALUES, help="how values are held, of format auto; dense8 and sparse8 take fp8 and int8")
    add("--merge", action=argparse.BooleanOptionalAction, help="q, k, v as one matrix (default: on a GPU)")
    add("--batch", type=_count, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="sequences to decode at once")
    lengths = "lengths to time the prefill of; decode: the first (default 128 32 512 2048, or the model's positions)"
    add("--prompt-tokens", type=_count, nargs="+", help=lengths)
    add("--new-tokens", type=_count, default=32)
    add("--dtype", choices=_DTYPES, help="default: float16, on a CPU and for dense12 bfloat16")
    drawn = (
        "of random: alone: what weights were before --dtype; float16 that was bfloat16, as Llama 2's, is held in less"
    )
    add("--weights-dtype", choices=("bfloat16",), help=drawn)
    add("--tokens", type=_count, help="as of sparsify_: how many a layer gets at a time, if you know")
    compiled = "a static cache and torch.compile, as generate() does by itself (default, but on a CPU), or at its best"
    add("--compile", choices=("no", "default", "fast", "max"), nargs="?", const="fast", help=compiled)
    add("--json", metavar="FILE", help="append the results as JSON lines")
    against = "also time torch's own dense products of 8 and 4 bits, of the weights before they are pruned"
    add("--against", choices=RIVALS, nargs="+", default=[], help=against)
    counts = "--sparsity, --format, --batch, --prompt-tokens, --new-tokens, --dtype, --weights-dtype and --json"
    engine = f"what runs the model; with vllm of the options above only {counts} count"
    add("--engine", choices=("transformers", "vllm"), default="transformers", help=engine)
    sides = "of vllm: also fp8-w8a16 and, of random: alone, int4, int4-marlin (default: %(default)s)"
    add("--sides", nargs="+", default=["dense", "macko", "fp8"], help=sides)
    add("--engine-args", default="{}", metavar="JSON", help="arguments of vLLM's LLM, for all sides")


def _sparsity(text: str) -> float | str:
    with contextlib.suppress(ValueError):
        return text if text.startswith("auto") else float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number, and no auto:NUMBER")


def _eval_arguments(add: Any) -> None:
    add("source", metavar="MODEL", help="folder, dense or packed, or its name on the Hub")
    add("--data", metavar="FILE", help="a text (default: Python's reference, which pydoc comes with)")
    add("--against", metavar="DENSE", help="folder of the model to compare with")
    lengths = "tokens in a window (default 2048 and the model's positions, where that is at most 8192)"
    add("--lengths", type=_count, nargs="+", help=lengths)
    add("--samples", type=_count, help="windows, or lines for embeddings, at most (default all)")
    add("--device", help="cuda or cpu (default: a GPU if there is one)")
    add("--json", metavar="FILE", help="append the result as a JSON line too")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _ignored(asked: list[str] | None) -> list[str]:
    return [] if asked == [] else list(dict.fromkeys([*IGNORED, *(asked or ())]))


def prune(options: argparse.Namespace) -> None:
    """IN to OUT with zeros in it, dense still."""
    transformers = require_transformers()
    share, _, auto = asked_for(options.sparsity, options.method, options.pattern)
    _check_target(options)
    device, source, ignore = _device(options.device), _folder(options.source), _ignored(options.ignore)
    _check_dense(source)
    _check_not_quantised(source)
    config = _config(transformers, source)
    batches: list[Tensor] | None = None
    begun: dict[str, Any] | None = None
    if options.method in STATISTICS or auto or options.reconstruct:
        if options.calibration is None:
            what = "--reconstruct" if options.reconstruct else f"--sparsity {options.sparsity}"
            what = f"--method {options.method}" if options.method in STATISTICS else what
            raise ValueError(f"{what} needs --calibration FILE, a text of the kind the model is for")
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        length = options.length or min(2048, positions or 2048)
        if positions and length > positions:
            raise ValueError(f"--length is {length}, {options.source} has {positions} positions")
        text = _text(options.calibration)
        tokenizer = _tokenizer(transformers, source, options)
        batches = _windows(tokenizer(text, return_tensors="pt").input_ids[0], length, options.samples, "--length")
        stats = [(file.name, file.stat()) for file in _weight_files(source)]
        begun = {
            "IN": str(source.resolve()),
            "IN's files (sizes and dates)": _digest(str([(name, s.st_size, s.st_mtime_ns) for name, s in stats])),
            "--sparsity": options.sparsity if auto else share, "--method": options.method, "--pattern": options.pattern,
            "--reconstruct": options.reconstruct,
            "--calibration (its text)": _digest(text), "--samples": options.samples, "--length": length,
            "--ignore": ignore, "--device": device, "macko": __version__, "torch": torch.__version__,
        }  # fmt: skip
    elif options.resume:
        raise ValueError(f"--resume is for {' and '.join(STATISTICS)}: {options.method} keeps nothing to go on with")
    with _unfinished(options, source, begun) as work:
        model = _model(transformers, source)
        report = prune_(
            model, options.sparsity, options.method, pattern=options.pattern, calibration=batches, ignore=ignore,
            device=device, reconstruct=options.reconstruct,
            done=_Kept(work / "layers") if begun else None,  # type: ignore[arg-type]
        )  # fmt: skip
        _save(model, report, options, source, work / "result")
    following = shlex.join(["macko", "convert", options.target, f"{options.target}-packed"])
    print(f"{options.target} is written, dense still. Next: {following}")


def _windows(tokens: Tensor, length: int, most: int | None, option: str) -> list[Tensor]:
    try:
        return windows(tokens, length, most)
    except ValueError as error:
        raise ValueError(f"{error} ({option})") from None


def _text(path: str, option: str = "--calibration") -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path} is no text in UTF-8: {error}") from None
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {error.strerror}") from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def convert(options: argparse.Namespace) -> None:
    """IN to OUT with packed weights."""
    require_transformers()
    from .integrations.transformers import MackoConfig, load_packed

    ignore = _ignored(options.ignore)
    values = options.values or "exact"
    known = [*CHOICES, *(name for name, kind in FORMATS.items() if not kind.saved_dense)]
    if options.format not in (*known, *FORMATS):
        raise ValueError(f"--format is {options.format!r}, expected one of {', '.join(known)}")
    config = MackoConfig(format=options.format, ignore=ignore, min_sparsity=options.min_sparsity, values=values)
    if options.format in FORMATS and FORMATS[options.format].saved_dense:
        raise ValueError(f"--format {options.format}: its file is the dense model, IN; macko.compress_ makes it there")
    _check_target(options)
    device, source = _device(options.device), _folder(options.source)
    _check_dense(source)
    if _quantised_by(source) != "compressed-tensors":
        _check_not_quantised(source)
    if _convert_quantised(options, source):
        return
    if elsewhere := Options(options.format).not_on(torch.device(device)):
        config.format = "macko"  # which is what the file of a layout holds
    with _unfinished(options, source) as work:
        model = load_packed(source, config, **({"device_map": device} if device != "cpu" else {}))
        config.format = options.format
        _save(model, model.hf_quantizer.report, options, source, work / "result")
        before, after = (sum(f.stat().st_size for f in _weight_files(folder)) for folder in (source, work / "result"))
    share = f"{after / max(1, before):.3f} of the {format_bytes(before)} of IN"
    print(f"{options.target}: files of {format_bytes(after)}, {share}. The table says what the layers hold in memory.")
    if elsewhere:
        print(f"It is to be loaded on another device: {elsewhere}")


def _convert_quantised(options: argparse.Namespace, source: Path) -> bool:
    """Whether IN is of 8 bits already; then OUT has its codes and scales."""
    from .integrations.compressed_tensors import is_quantised, pack_quantised

    with Checkpoint(source) as file:
        if not is_quantised(file.config):
            return False
    if options.values or options.format != "auto":
        raise ValueError(
            f"{source} is quantised already: its values are packed as they are, without --values or --format"
        )
    with _unfinished(options, source) as work:
        result = work / "result"
        result.mkdir()
        layers = pack_quantised(source, result)
        _copy_others(source, result)
    held = ", ".join(sorted({about["values"] for about in layers.values()}))
    print(f"{options.target}: {len(layers)} layers of {held}, with the codes and scales of {options.source}.")
    return True


def inspect(options: argparse.Namespace) -> None:
    """A table of the matrices of a checkpoint: what they would take and gain here, or on the GPU that is named."""
    on_gpu = bool(options.gpu) or torch.cuda.is_available()
    known = times(options.gpu) if options.gpu else times_of(None if on_gpu else torch.device("cpu"))
    us = [0.0, 0.0]
    titles = ("matrix", ">shape", ">density (sparse)", "n:m", "format", ">bytes", ">as macko", f">on {known.gpu}")
    table: list[tuple[str, ...]] = [(*titles, *((">decode, at best", *_Memory.titles) if on_gpu else ()))]
    total, memory = [0, 0], _Memory()
    source = _folder(options.source, or_file=True)
    method = _quantised_by(source)
    with Checkpoint(source) as file:
        others = [name for name in file if method and not name.endswith((".weight", ".bias"))]
        for name, weight, form, size in _matrices(file):
            seen = _Seen(weight, size)
            density, dense_bytes = seen.density, math.prod(weight.shape) * weight.dtype.itemsize
            share = min(1.0, packed_share(density, 8 * weight.dtype.itemsize)) if weight.dtype in DTYPES else 1.0
            after = size if name in file.layers else round(dense_bytes * share)
            total = [total[0] + size, total[1] + after]
            gain = f"{dense_bytes / after:.2f}x" if 0 < after < dense_bytes else "-"
            shape = "x".join(map(str, weight.shape))
            row = (shape, density_text(density), " ".join(seen.patterns), form, format_bytes(size))
            expected = ""
            if "embed" not in name and weight.dtype in DTYPES and (weight.dtype.itemsize == 2 or not on_gpu):
                found = known.us(weight.shape[0], weight.shape[1], density, weight.dtype)
                found.pop(EcWeight.format, None)  # which nothing chooses
                left = 1 - density < MIN_SPARSITY or "lm_head" in name  # as sparsify_ leaves it
                best = "" if not found else "dense" if left else min(found, key=found.__getitem__)
                if best:
                    us = [us[0] + found["dense"], us[1] + found[best]]
                    expected = f"{found['dense'] / found[best]:.2f}x {best}"
            more = (gain, *memory.add(name, seen)) if on_gpu else ()
            table.append((name, *row, format_bytes(after), expected, *more))
    expected = f"{us[0] / us[1]:.2f}x" if us[1] else ""
    all_of = ("all", "", "", "", "", format_bytes(total[0]), format_bytes(total[1]), expected)
    table.append((*all_of, *[""] * (len(table[0]) - len(all_of))))
    # Of the columns behind the bytes those that say something.
    said = [i for i in range(len(table[0])) if i < 7 or any(row[i] not in ("", "-") for row in table[1:])]
    print(columns([[row[i] for i in said] for row in table]))
    if others:
        print(f"It is quantised by {method}: {others[0]} and tensors like it ({len(others)}) are not in the table.")
    print(memory, end="")
    if on_gpu:
        print("decode, at best: dense over packed bytes, what a layer gains for one token when memory alone decides.")
    how = "measured times where there are some, else a model fitted to those"
    if not known.at(1).measured:
        others = sorted(gpu for gpu in (read(path)["gpu"] for path in SHIPPED.glob("*.json")) if not is_cpu(gpu))
        how = (
            f"nobody measured it: fitted to another GPU's times; measured are {', '.join(others)}; macko tune measures"
        )
    if us[1]:
        print(f"on {known.gpu}: time of one token dense over that of the fastest format ({how}).")
    if not on_gpu:
        print('What it would take and gain on a GPU: --gpu "NVIDIA H200".')


class _Seen:
    """What a look at a matrix says, which is taken by panels of rows: whole as dense, it may be many times its file.

    Attributes:
        density: non-zeros over all.
        patterns: n:m patterns that it holds.
        counts: of its bits (bit_counts), where it has 16; None also where nobody looked.
    """

    def __init__(self, weight: Tensor | PackedWeight | Masked, file_bytes: int) -> None:
        self.weight, self.file_bytes = weight, file_bytes
        self.shape, self.elements = weight.shape, math.prod(weight.shape)
        self.counts: Tensor | None = None
        self.patterns: list[str] = []
        if not isinstance(weight, Tensor) and not _is_worth_it(weight, file_bytes):
            self.density = weight.density
            return
        held, nonzeros = list(PATTERNS) if self.elements else [], 0
        counts = torch.zeros(1 << 16, dtype=torch.int64) if weight.dtype in Dense12Weight.dtypes else None
        for panel in self._panels():
            held = holding(panel, held)
            if counts is None:
                nonzeros += int(countable(panel).count_nonzero())
            else:
                counts += bit_counts(panel)
        if counts is not None:
            nonzeros = int(counts.sum() - counts[0] - counts[0x8000])
        self.counts, self.patterns, self.density = counts, named(held), nonzeros / max(1, self.elements)

    def _panels(self) -> Iterator[Tensor]:
        """Dense pieces of whole row blocks of tile; of wide rows whole slabs and groups of every pattern."""
        for rows in self._rows():
            yield from (panel.contiguous() for panel in rows.split(PANEL_COLS, 1))

    def _rows(self) -> Iterator[Tensor]:
        (rows, cols), weight = self.shape, self.weight
        step = max(1, PANEL // max(256, cols) // 64) * 64
        if isinstance(weight, Masked):
            yield from weight.panels(step)
            return
        for first in range(0, rows if cols else 0, step):
            stop = min(rows, first + step)
            yield weight[first:stop] if isinstance(weight, Tensor) else sliced(weight, 0, first, stop).to_dense()

    def tile_bytes(self) -> int:
        slabs = TileWeight.num_slabs(*self.shape)
        panels = (TileWeight.from_macko(MackoWeight.from_dense(panel)) for panel in self._panels())
        return sum(panel.data.nbytes for panel in panels) + 4 * (slabs + 1)

    def sparse11_bytes(self) -> int | None:
        """None where auto would not take it. It is packed whole: from density 0.4 up that is in proportion."""
        if not _within(2 * Sparse11Weight.num_slabs(*self.shape) * 64 * 256, self.file_bytes):
            return None  # of few rows, which it fills up to 64
        weight = self.weight.to_dense() if isinstance(self.weight, Masked) else self.weight
        if isinstance(weight, Tensor):
            weight = MackoWeight.from_dense(weight)
        assert isinstance(weight, MackoWeight)
        packed = sparse11_of(weight)
        return packed.nbytes if packed else None

    def dense12_bytes(self, listed: int) -> int | None:
        """None where it does not hold the matrix, of which its table lacks so many."""
        assert self.counts is not None
        rows, cols = self.shape
        fullest, slabs = 0, -(-cols // 256)
        if 0 < listed <= self.elements // 100:
            lacks = ~have_codes(self.counts, self.weight.dtype, signed=False)
            for panel in self._panels():
                row, col = lacks[panel.view(torch.int16).int() & 0xFFFF].nonzero().unbind(1)
                fullest = max(fullest, int((row // 64 * slabs + col // 256).bincount(minlength=1).max()))
        return Dense12Weight.bytes_of(rows, cols, listed, fullest)


def _is_worth_it(weight: Tensor | PackedWeight | Masked, file_bytes: int) -> bool:
    """Whether a look takes memory and time in proportion to the file; one at what the file has dense always does."""
    if not isinstance(weight, (MackoWeight, Masked)):
        return isinstance(weight, Tensor)  # the rows of other formats cannot be had by themselves
    # Rows can be had by whole ones only, so dense ones of a row block have to fit; with what decoding takes besides.
    least = min(64, weight.rows) * weight.cols * (6 if isinstance(weight, Masked) else 2)
    few = weight.rows * weight.cols <= PANEL + ELEMENTS_A_BYTE * file_bytes
    return few and _within(least, file_bytes)


def _within(count: int, file_bytes: int) -> bool:
    """Whether so many bytes may be taken for a look at what takes file_bytes in its file."""
    return count <= BYTES_A_BYTE * file_bytes + MORE_BYTES


class _Memory:
    """What matrices of 16 bits would take in the memory of a GPU of compute capability 9.0; nothing of others."""

    titles = (">as tile", ">as sparse11 (outside)", ">as dense12 (listed)")

    def __init__(self) -> None:
        self.dense = self.raw = self.exact = self.compressed = 0

    def add(self, name: str, seen: _Seen) -> tuple[str, str, str]:
        """Counts one matrix; gives its cells: bytes, and the share of weights that the format's table lacks."""
        if seen.counts is None or "embed" in name:
            return "", "", ""
        size = raw = exact = 2 * seen.elements
        tile = sparse11 = ""
        if 1 - seen.density >= MIN_SPARSITY:
            raw = exact = min(size, seen.tile_bytes())
            tile = format_bytes(raw)
            lacks, count = lacking(seen.counts, seen.weight.dtype, signed=True)
            shorter = seen.sparse11_bytes() if lacks <= SPARSE11_LISTED * count else None
            exact = raw if shorter is None else shorter
            sparse11 = f"{'-' if shorter is None else format_bytes(shorter)} ({lacks / max(1, count):.4%})"
        listed, _ = lacking(seen.counts, seen.weight.dtype, signed=False)
        compressed, dense12 = exact, seen.dense12_bytes(listed)
        if exact >= DENSE12_SHARE * size and seen.elements >= DENSE12_WEIGHTS and dense12:
            compressed = min(exact, dense12)
        left = name.rpartition(".")[0].endswith(IGNORED)  # as sparsify_ leaves it
        self.dense, self.compressed = self.dense + size, self.compressed + compressed
        self.raw, self.exact = self.raw + (size if left else raw), self.exact + (size if left else exact)
        if dense12 is None:
            return tile, sparse11, "-"
        return tile, sparse11, f"{format_bytes(dense12)} ({listed / max(1, seen.elements):.4%})"

    def __str__(self) -> str:
        if not self.dense:
            return ""
        ways = {'sparsify_(values="raw")': self.raw, "sparsify_": self.exact, "compress_": self.compressed}
        text = ", ".join(f"{way} {format_bytes(size)}" for way, size in ways.items())
        return f"in memory on a GPU of compute capability 9.0, of {format_bytes(self.dense)}: {text}.\n"


def _matrices(file: Checkpoint) -> Iterator[tuple[str, Tensor | PackedWeight | Masked, str, int]]:
    """Of every matrix its name, itself, and in what format and how many bytes the checkpoint has it.

    Itself: dense, or canonical where its file is sparse; or as it is where that would be much more than its file.
    """
    weight: Tensor | PackedWeight | Masked
    form = sparsity_format(file.config) or ""
    under_masks = {key.removesuffix(".weight"): name for key, name in masked(file).items()} if form else {}
    matrices = [n for n in file if n.endswith(".weight") and len(file.shape(n)) == 2]
    for name in tqdm([*file.layers, *under_masks, *matrices], delay=1, leave=False):
        if name in file.layers:
            weight = packed = file.packed(name)
            if isinstance(packed, Macko8Weight):
                weight = packed.scaled()
            elif not isinstance(packed, MackoWeight):  # whose rows can be had by themselves
                dense_bytes = packed.rows * packed.cols * packed.dtype.itemsize
                weight = packed.to_dense() if _within(dense_bytes, packed.nbytes) else packed
            yield name, weight, packed.format, packed.nbytes
        elif name in under_masks:
            weight = Masked(file, under_masks[name])
            if len(weight.shape) == 2:
                yield name, weight, form, weight.nbytes
        else:
            dense = file[name]
            known = dense.is_floating_point() or dense.dtype == torch.int8
            yield name, dense, "dense" if known else str(dense.dtype).removeprefix("torch."), dense.nbytes


def tune(options: argparse.Namespace) -> None:
    """Times of this GPU or CPU into its table."""
    device = _device(options.device)
    from .tune import SMALLEST
    from .tune import tune as measure

    if bool(options.source) == bool(options.shapes):
        raise ValueError("give a checkpoint's folder, or --shapes")
    for shape in options.shapes:
        if not all(size.isdecimal() for size in shape.split("x")) or shape.count("x") != 1:
            raise ValueError(f"--shapes has {shape!r}, expected rows x columns, as 4096x11008")
        if math.prod(map(int, shape.split("x"))) < SMALLEST:
            raise ValueError(f"--shapes has {shape!r}, expected {SMALLEST:,} weights or more: fewer take no time")
    for density in options.densities:
        if not 0 < density < 1:
            raise ValueError(f"--densities has {density:g}, expected shares of non-zeros between 0 and 1")

    source = _folder(options.source, or_file=True) if options.source else Path()
    if (method := _quantised_by(source)) not in ("", "compressed-tensors"):
        raise ValueError(f"{source} is quantised by {method}, whose products macko does not time")

    def weights() -> Iterator[tuple[str, Tensor]]:
        if options.source:
            with Checkpoint(source) as file:
                for name, weight, _, size in _matrices(file):
                    if "embed" not in name and _is_worth_it(weight, size):
                        yield name, weight if isinstance(weight, Tensor) else weight.to_dense()
        for shape in options.shapes:
            rows, _, cols = shape.partition("x")
            for density in options.densities:
                w = torch.randn(int(rows), int(cols), device=device, dtype=getattr(torch, options.dtype))
                yield f"{shape} {density}", w * (torch.rand(w.shape, device=w.device) < density)

    path = measure(weights(), tokens=options.tokens, path=options.out, device=device)
    for line in read(path)["linear"]:
        about = f"{line['rows']}x{line['cols']} density {line['density']:.2f} {line['dtype']} tokens {line['tokens']}"
        print(f"{about}: " + "  ".join(f"{name} {us:.2f} us" for name, us in line["us"].items()))
    print(path)


def bench(options: argparse.Namespace) -> None:
    """Dense against sparse, prefill and decode."""
    require_transformers()
    if options.engine == "vllm":
        from .engines import run
    else:
        from .bench import run

    source = options.source
    if not source.startswith("random:"):
        folder = _folder(source)
        _packed_layers(folder)
        _check_not_quantised(folder)
        source = str(folder)
    run(options, source)


def eval(options: argparse.Namespace) -> None:  # the command's name
    """Perplexity, and what differs from another model, as JSON."""
    transformers = require_transformers()
    from .bench import append
    from .evaluate import embeddings, language, layer_errors

    device, source = _device(options.device), _folder(options.source)
    against = None if options.against is None else _folder(options.against)
    for folder in (source, *([against] if against else [])):
        _packed_layers(folder)
    config = _config(transformers, source)
    text = _text(options.data, "--data") if options.data else _reference()
    tokenizer = _tokenizer(transformers, source, options, against)
    append(options.json, [])  # or it would be found out behind all the work
    model = _model(transformers, source).to(device)
    dense = None if against is None else _model(transformers, against).to(device)
    found: dict[str, Any] = {"model": options.source, "against": options.against, "data": options.data or "pydoc"}
    if getattr(model, "get_output_embeddings", lambda: None)() is not None and "CausalLM" in type(model).__name__:
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 2048
        lengths = options.lengths or sorted({min(2048, positions), *([positions] if positions <= 8192 else [])})
        if min(lengths) < 2:
            raise ValueError("--lengths has 1, expected 2 or more: the first token of a window is not predicted")
        if max(lengths) > positions:
            raise ValueError(f"--lengths has {max(lengths)}, {options.source} has {positions} positions")
        ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        cut = {length: _windows(ids, length, options.samples, "--lengths") for length in lengths}
        found["windows"] = [{"length": n, **language(model, batches, dense)} for n, batches in cut.items()]
        if dense is not None:
            found["layer_errors"] = layer_errors(model, [ids[:, :LAYER_TOKENS] for ids in cut[lengths[0]][:4]], dense)
    elif dense is None:
        raise ValueError(f"{options.source} is no language model, so there is only --against DENSE to judge it by")
    else:
        lines = [line for line in text.splitlines() if line.strip()][: options.samples or 1000]
        batches = [
            dict(tokenizer(lines[i : i + 32], padding=True, truncation=True, return_tensors="pt"))
            for i in range(0, len(lines), 32)
        ]
        found["embeddings"] = embeddings(model, batches, dense)
        found["layer_errors"] = layer_errors(model, batches[:4], dense)
    print(json.dumps(found, indent=2))
    print(_in_words(found), file=sys.stderr)
    append(options.json, [found])


def _in_words(found: dict[str, Any]) -> str:
    """What eval found, for people."""
    if "embeddings" in found:
        about = found["embeddings"]
        return f"cosine to the dense embeddings {about['cosine']:.4f} in the mean, {about['worst_cosine']:.4f} at worst"
    lines = []
    for about in found["windows"]:
        text = f"{about['length']} tokens: perplexity {about['perplexity']:.4g}"
        if "kl" in about:
            text += f", dense {about['against_perplexity']:.4g} ({about['perplexity_ratio']:.3f}x); "
            text += f"the same next token {about['agreement']:.1%}; KL divergence {about['kl']:.3g} nats"
        lines.append(text)
    return "\n".join(lines)


def _config(transformers: Any, folder: Path) -> Any:
    from .integrations.transformers import readable

    with readable(folder):
        return transformers.AutoConfig.from_pretrained(folder)


def _model(transformers: Any, folder: Path) -> Any:
    """The model of a folder as the class that was saved, or an encoder would get a new head.

    ValueError where a weight of it is in no file.
    """
    from .integrations.transformers import readable

    _check_not_masked(folder)
    with readable(folder):
        named = (transformers.AutoConfig.from_pretrained(folder).architectures or [""])[0]
        kind = getattr(transformers, named, transformers.AutoModelForCausalLM)
        try:
            model, loaded = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
        except NameError as error:  # of a quantiser whose package is not installed
            raise ValueError(f"{folder} cannot be read by transformers here: {error}") from None
    check_whole(model, loaded["missing_keys"], loaded["unexpected_keys"], folder)
    return model


def _tokenizer(transformers: Any, folder: Path, options: argparse.Namespace, other: Path | None = None) -> Any:
    """The folder's, or that of the model that it is compared with."""
    for place in (folder, *([other] if other else [])):
        if not any(any(place.glob(pattern)) for pattern in ("*token*.json", "*vocab*", "*.model", "*.spm")):
            continue  # of nothing transformers 5.0 makes an empty tokenizer
        try:
            return transformers.AutoTokenizer.from_pretrained(place)
        except (ImportError, OSError, ValueError) as error:  # the first of 5.0 to 5.8, where files are missing
            if any((place / name).exists() for name in TOKENIZERS):
                raise ValueError(f"{place}: its tokenizer cannot be read: {error}") from None
    raise ValueError(f"{options.source} has no tokenizer: copy tokenizer* from the model that it was made of")


def _reference() -> str:
    """A text that every Python has: its language reference."""
    from pydoc_data.topics import topics

    return "\n".join(text for _, text in sorted(topics.items()))


def doctor(options: argparse.Namespace) -> int:
    """What is installed, and whether each kernel is right here."""
    from . import doctor as checks

    return checks.main()


def _device(asked: str | None) -> str:
    """A device that is there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))]
    if asked is not None and asked not in there:
        why = " (this torch is built without CUDA)" if torch.version.cuda is None else ""
        raise ValueError(f"--device is {asked!r}, here there is {', '.join(there)}{why}")
    return asked or ("cuda" if count else "cpu")


def _folder(source: str, or_file: bool = False) -> Path:
    """IN as a folder; one of the Hub's cache for a name there, fetched where that is allowed (HF_HUB_OFFLINE)."""
    path = Path(source)
    if path.is_dir() or (or_file and path.is_file()):
        return path
    if path.exists():
        raise ValueError(f"{source} is a file, expected a folder with a model")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        raise ValueError(f"{source}: there is no such folder")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(f"{source}: there is no such folder, and no huggingface_hub to fetch a model with") from None
    try:
        return Path(snapshot_download(source, ignore_patterns=NOT_FETCHED))
    except Exception as error:  # of a dozen kinds, some of them the network library's
        raise ValueError(f"{source}: there is no such folder, nor a model of that name on the Hub: {error}") from None


def _check_dense(source: Path) -> None:
    if layers := _packed_layers(source):
        raise ValueError(f"{source} is packed already ({layers} layers): take the folder it was made of")


def _about(source: Path) -> dict[str, Any]:
    """config.json; of what is none whoever opens the model says so."""
    try:
        about = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _quantised_by(source: Path) -> str:
    """The quant_method of a folder, where it is not macko's."""
    about = _about(source).get("quantization_config")
    if not isinstance(about, dict) or not about:
        return ""
    method = quant_method(about) or "a method without a name"
    return "" if method == "macko" else method


def _check_not_quantised(source: Path) -> None:
    """ValueError where others hold the weights, quantised or sparse; names them."""
    _check_not_masked(source)
    if method := _quantised_by(source):
        wanted = "the folder it was made of, with 16 or 32 bits a weight"
        raise ValueError(f"{source} is quantised by {method}: take {wanted}")


def _check_not_masked(source: Path) -> None:
    if form := sparsity_format(_about(source)):
        raise ValueError(f"{source} is {form} of compressed-tensors: macko convert makes a folder of macko's of it")


def _packed_layers(source: Path) -> int:
    """How many there are. Opens every file on the way: one that was cut off is named here, before any work."""
    if not (source / "config.json").exists():
        raise ValueError(f"{source} has no config.json, which a folder with a model has")
    if not any(source.glob("*.safetensors")):
        return 0
    with Checkpoint(source) as file:
        return len(file.layers)


def _weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights; others than safetensors only where there are none of those."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix in WEIGHTS]
    return [file for file in files if file.suffix == WEIGHTS[0]] or files


def _save(model: Any, report: Report, options: argparse.Namespace, source: Path, folder: Path) -> None:
    """Prints the report and writes the model, and what lies beside it; ValueError where it is as it was."""
    if not sys.stderr.isatty():
        print(file=sys.stderr, flush=True)  # in a log the table would begin behind a bar, on its line
    print(report)
    if not report.changed:
        reasons = Counter(layer.reason for layer in report)
        if any(reason.startswith("under ") for reason in reasons):
            raise ValueError(f"{options.source} has no layer that is sparse enough: prune it first (macko prune)")
        text = "; ".join(f"{reason} ({count} of {len(report)})" for reason, count in reasons.most_common(4))
        text = text or "it has no linear layer"
        raise ValueError(f"{options.source}: no layer was changed, so nothing is written: {text}")
    model.save_pretrained(folder)
    _copy_others(source, folder)


def _copy_others(source: Path, folder: Path) -> None:
    """Tokenizer, chat template, licence: whatever is no weight and was not written. IN's card stays beside ours."""
    for file in sorted(source.iterdir()):
        weights = file.suffix in WEIGHTS or ".index." in file.name
        there = folder / file.name
        if there.exists() and file.name == "README.md":
            there = folder / "README-dense.md"
        if file.is_file() and not weights and not there.exists():
            shutil.copyfile(file, there)


class _Kept:
    """Pruned weights by the layer's name, a file each: what is there is whole. As much of a dict as prune_ asks for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def __contains__(self, name: str) -> bool:
        return self._file(name).exists()

    def __getitem__(self, name: str) -> Tensor:
        return load_file(self._file(name))["weight"]

    def __setitem__(self, name: str, weight: Tensor) -> None:
        part = self.folder / "part"
        save_file({"weight": weight.contiguous()}, part)
        part.replace(self._file(name))


@contextlib.contextmanager
def _unfinished(options: argparse.Namespace, source: Path, begun: dict[str, Any] | None = None) -> Iterator[Path]:
    """OUT.unfinished, beside OUT. What is written to its result/ becomes OUT in the end, all at once.

    Made before there is anything to lose: it shows that OUT can be written. Whatever stops the work removes it, but for
    a kill, whose leftovers the next run removes.

    Args:
        begun: what a run has to have in common with the one that it resumes. With it the folder stays when the work is
            stopped and there is something in its layers/.
    """
    target = Path(options.target).resolve()
    work = target.with_name(f"{target.name}.unfinished")
    work.mkdir(parents=True, exist_ok=True)
    about, layers, result = work / "begun.json", work / "layers", work / "result"
    resumes = begun is not None and options.resume and about.exists()
    with open(work / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{work}: another macko is writing there") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):  # a file system without locks
                raise
        if resumes:
            _check_same(json.loads(about.read_text()), json.loads(json.dumps(begun)), work)
        elif kept := len(list(layers.glob("*.safetensors"))):
            print(f"macko {options.command}: {kept} layers of an earlier run are removed from {work}", file=sys.stderr)
        elif begun is not None and options.resume:
            print(f"macko {options.command}: there is nothing to resume in {work}, so it starts anew", file=sys.stderr)
        for leftover in (result, *([] if resumes else [layers])):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            if begun is not None:
                part = work / "part"
                part.write_text(json.dumps(begun))
                part.replace(about)
            _check_space(options, source, work, 1 if begun is None else 2)
            yield work
            _share(result)
            _put(result, target)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, OSError, SafetensorError)):
                options.hint = f" ({options.target} is not written)"
            if kept := len(list(layers.glob("*.safetensors"))):
                shutil.rmtree(result, ignore_errors=True)
                options.hint = f" ({kept} pruned layers are kept in {work}: run it again with --resume)"
            else:
                shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work)


def _check_target(options: argparse.Namespace) -> None:
    target, source = Path(options.target).resolve(), Path(options.source).resolve()
    if target == source or target in source.parents:
        raise ValueError(f"OUT is {options.target}, which {'is' if target == source else 'holds'} IN: name another")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{options.target} is a file, expected a folder to write")
    if target.is_mount():
        raise ValueError(f"{options.target} is a mount point, which no other folder can replace: name one within it")
    if target.is_dir() and any(target.iterdir()):
        if not options.overwrite:
            raise ValueError(f"{options.target} is not empty: name another, or replace it by --overwrite")
        if not (target / "config.json").exists():
            raise ValueError(f"{options.target} is not empty and no model's: --overwrite replaces models only")


def _check_same(begun: dict[str, Any], now: dict[str, Any], work: Path) -> None:
    other = [f"{key} {begun.get(key)!r}, now it is {now[key]!r}" for key in now if begun.get(key) != now[key]]
    if other:
        raise ValueError(f"{work} was begun with {'; with '.join(other)}: it starts anew without --resume")


def _check_space(options: argparse.Namespace, source: Path, work: Path, copies: int) -> None:
    """OUT takes what IN takes, and its layers once more where they are kept until OUT is there; less where packed."""
    size, free = sum(file.stat().st_size for file in _weight_files(source)), shutil.disk_usage(work).free
    needed = size * copies - sum(file.stat().st_size for file in work.glob("layers/*.safetensors"))
    if free >= needed:
        return
    text = f"{work.parent} has {format_bytes(free)} left, {options.target} may take {format_bytes(needed)}"
    if options.run is not convert:
        raise ValueError(text)
    print(f"macko convert: {text}, as much as {options.source}; the more zeros, the less", file=sys.stderr)


def _share(folder: Path) -> None:
    """Gives files the mode that others get here: safetensors makes its own for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o666 & ~mask)


def _put(new: Path, target: Path) -> None:
    """Renames a folder; what has that name now is removed behind it."""
    old = target.with_name(f"{target.name}.replaced-{os.getpid()}")
    replaces = target.exists()
    try:
        if replaces:
            target.rename(old)
        new.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    if replaces:
        shutil.rmtree(old)


if __name__ == "__main__":
    sys.exit(main())
