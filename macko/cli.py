"""The command `macko`: prune, convert, inspect, tune, bench, eval, doctor. Each is a few lines over the package."""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import math
import re
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from . import __version__
from .choose.options import CHOICES, VALUES, Options
from .choose.times import read
from .files import Checkpoint, check_whole
from .integrations import require_transformers
from .measure.evaluate import windows
from .measure.rivals import RIVALS
from .nn.convert import MIN_SPARSITY
from .nn.find import IGNORED
from .nn.linear import DTYPES
from .nn.report import Report, format_bytes
from .pruning.prune import METHODS, STATISTICS, asked_for, prune_
from .pruning.reconstruct import RECIPES
from .weights import FORMATS, codes, with_own_files
from .weights.registry import is_lossless_file
from .workdir import (
    KeptLayers,
    check_dense,
    check_not_masked,
    check_not_quantised,
    check_target,
    copy_others,
    find_folder,
    packed_layers,
    quantised_by,
    read_config,
    unfinished,
    weight_files,
)

#: What a user, a file, a disk or a network can cause: these are told in one line, without a traceback.
EXPECTED = (
    OSError, ValueError, TypeError, ImportError, RuntimeError, MemoryError, SafetensorError, UserWarning,
)  # fmt: skip
_DTYPES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
#: Layers' outputs are compared on so many tokens of a text, so that all of them fit.
LAYER_TOKENS = 256
#: Files of which a tokenizer has one.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = parser().parse_args(arguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ignore has")  # a layer that was to be left would be pruned
        warnings.filterwarnings("ignore", "prune_ stopped")  # nobody keeps that model
        warnings.filterwarnings("ignore", ".* changed no")  # told as the command's error
        stopped: BaseException
        try:
            return options.run(options) or 0
        except KeyboardInterrupt as error:
            text, code, stopped = "interrupted", 130, error
        except EXPECTED as error:
            text, code, stopped = _as_options(" ".join(str(error).split()), options) or type(error).__name__, 1, error
    _say(options, text + getattr(stopped, "hint", ""))
    return code


def _say(options: argparse.Namespace, text: str) -> None:
    print(f"macko {options.command}: {text}", file=sys.stderr)


def _as_options(text: str, options: argparse.Namespace) -> str:
    """A message of the package that begins with an argument's name, with the options by their names here."""
    names = "|".join(vars(options).keys() - {"command", "run", "source", "target"})
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
    add("--ignore", nargs="*", metavar="LAYER", help=ignored + "--ignore without a name leaves no layer out")


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
    add("--length", type=_count, help="tokens in a piece (default 2048, or what the model takes)")
    add("--device", help="where to prune, one block at a time (default: a GPU if there is one)")
    resume = "go on where a run with the same options was stopped"
    add("--resume", action="store_true", help=f"{resume} (wanda, sparsegpt: OUT.unfinished keeps its layers)")


def _convert_arguments(add: Any) -> None:
    _in_and_out(add, "folder with dense weights, or sparse ones of compressed-tensors, or its name on the Hub")
    *some, last = with_own_files()
    about = f"what the weights are held in where the model is loaded ({', '.join(some)} and {last} have files of their "
    about += "own, the others the same; dense12: any bfloat16 model in 12 bits a weight, bit for bit)"
    add("--format", default="auto", help=f"{about}: {', '.join((*CHOICES, *FORMATS))}")
    add("--values", choices=codes.KINDS, help="round to 8 bits a value, with a scale a row (default: no)")
    add("--dtype", choices=("bfloat16",), help="round float32 weights to it (default: no, but where none changes)")
    least = f"leave denser layers as they are (default {MIN_SPARSITY}, of slide 0)"
    add("--min-sparsity", type=float, help=least)
    add("--to", choices=("dense",), help="from a folder that macko packed: the dense weights, each bit of them")
    add("--device", help="where to pack (default: a GPU if there is one)")


def _inspect_arguments(add: Any) -> None:
    add("source", metavar="FOLDER", help="folder or .safetensors file")
    add("--gpu", help='name of the GPU to expect gains for, as "NVIDIA H200" (default: the one here, or the CPU)')


def _tune_arguments(add: Any) -> None:
    add("source", metavar="FOLDER", nargs="?", help="a pruned checkpoint, whose shapes and densities")
    add("--shapes", nargs="+", default=[], metavar="ROWSxCOLS", help="without a checkpoint (default: a 7B Llama's)")
    add("--densities", nargs="+", type=float, default=[0.5], help="of --shapes (default 0.5)")
    add("--dtype", choices=_DTYPES, default="float16", help="of --shapes")
    add("--device", help="cuda or cpu (default: a GPU if there is one)")
    add("--tokens", nargs="+", type=_count, default=[1], help="at once (default 1)")
    add("--out", metavar="FILE", help="the table (default: the user's, for this GPU)")
    add("--share", action="store_true", help="instead, a file of this GPU's times that others can have; some minutes")


def _bench_arguments(add: Any) -> None:
    sizes = "7b, 70b, mixtral (half of its layers), qwen3-30b, tiny or tiny-mixtral"
    add("source", metavar="MODEL", help=f"folder of a dense checkpoint, or random: with {sizes}")
    pruned = "prune by magnitude first, to each of these (default 0.5 for random:)"
    add("--sparsity", type=float, nargs="+", help=pruned)
    add("--format", default="auto", help="as of convert, or dense12: bfloat16 weights with zeros or none, lm_head too")
    add("--values", choices=VALUES, help="how values are held, of format auto; dense8 and sparse8 take fp8 and int8")
    add("--merge", action=argparse.BooleanOptionalAction, help="q, k, v as one matrix (default: on a GPU)")
    add("--batch", type=_count, nargs="+", help="sequences to decode at once (default 1 2 4 8 16 32 64, on a CPU 1 4)")
    lengths = "prefills to time; decoding is after the first (default 128 32 512 2048 or the model's most, on a CPU 32)"
    add("--prompt-tokens", type=_count, nargs="+", help=lengths)
    add("--new-tokens", type=_count, default=32)
    add("--dtype", choices=_DTYPES, help="default: float16, on a CPU and for dense12 bfloat16")
    drawn = "for random:, the type of weights before --dtype; float16 that was bfloat16, as Llama 2's, packs smaller"
    add("--weights-dtype", choices=("bfloat16",), help=drawn)
    add("--tokens", type=_count, help="as of sparsify_: how many a layer gets at a time, if you know")
    compiled = "a static cache and torch.compile, as generate() does by itself (default, but on a CPU), or at its best"
    add("--compile", choices=("no", "default", "fast", "max"), nargs="?", const="fast", help=compiled)
    add("--json", metavar="FILE", help="append the results as JSON lines")
    against = "also time torch's own dense products of 8 and 4 bits, of the weights before they are pruned"
    add("--against", choices=RIVALS, nargs="+", default=[], help=against)
    counts = "--sparsity, --format, --values, --batch, --prompt-tokens, --new-tokens, --dtype, --weights-dtype, --json"
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
    check_target(options.target, options.source, options.overwrite)
    device, source, ignore = _device(options.device), find_folder(options.source), _ignored(options.ignore)
    check_dense(source)
    check_not_quantised(source)
    config = _config(transformers, source)
    batches: list[Tensor] | None = None
    begun: dict[str, Any] | None = None
    if options.method in STATISTICS or auto or options.reconstruct:
        if options.calibration is None:
            what = "--reconstruct" if options.reconstruct else f"--sparsity {options.sparsity}"
            what = f"--method {options.method}" if options.method in STATISTICS else what
            raise ValueError(f"{what} needs --calibration FILE, a text of the kind the model is for")
        tokenizer = _tokenizer(transformers, source, options)
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        # A RoBERTa's first two positions stand for padding: its tokenizer knows how many are left.
        length = options.length or min(2048, positions or 2048, tokenizer.model_max_length)
        if positions and length > positions:
            raise ValueError(f"--length is {length}, {options.source} has {positions} positions")
        text = _text(options.calibration)
        batches = _windows(tokenizer(text, return_tensors="pt").input_ids[0], length, options.samples, "--length")
        stats = [(file.name, file.stat()) for file in weight_files(source)]
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
    with unfinished(options.target, source, partial(_say, options), begun, options.resume) as work:
        model = _model(transformers, source)
        report = prune_(
            model, options.sparsity, options.method, pattern=options.pattern, calibration=batches, ignore=ignore,
            device=device, reconstruct=options.reconstruct,
            done=KeptLayers(work / "layers") if begun else None,  # type: ignore[arg-type]
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
    formats, name = [*CHOICES, *FORMATS], options.format.partition(" ")[0]  # a pattern may follow
    if name not in formats:
        raise ValueError(f"--format is {options.format!r}, expected one of {', '.join(formats)}")
    config = MackoConfig(format=options.format, ignore=ignore, min_sparsity=options.min_sparsity, values=values)
    check_target(options.target, options.source, options.overwrite)
    if options.to:
        if options.values or options.format != "auto":
            raise ValueError("--to dense takes no --values and no --format: the weights are those that were packed")
        _convert_to_dense(options)
        return
    device, source = _device(options.device), find_folder(options.source)
    check_dense(source)
    if quantised_by(read_config(source)) != "compressed-tensors":
        check_not_quantised(source)
    if _convert_quantised(options, source):
        return
    if is_lossless_file(name):
        _convert_lossless(options, source)
        return
    if elsewhere := Options(options.format).not_on(torch.device(device)):
        config.format = "macko"  # which is what the file of a layout holds
    with unfinished(options.target, source, partial(_say, options), shrinks=True, copies=2) as work:
        more = {"dtype": torch.bfloat16} if _to_bfloat16(options, source) else {}
        model = load_packed(source, config, device, work, **more)
        config.format = options.format
        _save(model, model.hf_quantizer.report, options, source, work / "result")
        sizes = _sizes(source, work / "result")
        del model
        gc.collect()  # on NFS files that it maps are there until then, and keep the folder
    print(f"{options.target}: {sizes}. The table says what the layers hold in memory.")
    if elsewhere:
        print(f"It is to be loaded on another device: {elsewhere}")


def _sizes(source: Path, target: Path) -> str:
    """What OUT takes, and of IN."""
    before, after = (sum(file.stat().st_size for file in weight_files(folder)) for folder in (source, target))
    return f"files of {format_bytes(after)}, {after / max(1, before):.3f} of the {format_bytes(before)} of IN"


def _to_bfloat16(options: argparse.Namespace, source: Path) -> bool:
    """Whether the weights of IN, which are float32, become bfloat16: none is rounded by that, or it is asked for."""
    from .integrations.folders import float32_weights

    if quantised_by(read_config(source)):
        return False
    count, rounded, others = float32_weights(source, options.ignore or ())
    lossless = Options(options.format).any_zeros
    if others and lossless:
        _say(options, f"{others} float32 matrices of {options.source} stay as they are")
    if not count:
        return False
    share = f"{rounded / count:.1%} of the float32 weights of {options.source} are no bfloat16 numbers"
    if not rounded:
        _say(options, f"the float32 weights of {options.source} are bfloat16 numbers, and are packed as such")
    elif options.dtype:
        _say(options, f"{share}: they are rounded")
    elif lossless:
        raise ValueError(f"{share}, and 12 bits hold these alone: --dtype bfloat16 rounds them")
    return not rounded or bool(options.dtype)


def _convert_lossless(options: argparse.Namespace, source: Path) -> None:
    """IN to OUT in twelve bits a weight, file by file."""
    from .integrations.folders import pack_folder

    check_not_quantised(source)
    with unfinished(options.target, source, partial(_say, options), shrinks=True) as work:
        result = work / "result"
        layers = pack_folder(source, result, options.ignore or (), _to_bfloat16(options, source))
        copy_others(source, result)
        sizes = _sizes(source, result)
    print(f"{options.target}: {len(layers)} layers in 12 bits a weight, every bit of it; {sizes}.")


def _convert_to_dense(options: argparse.Namespace) -> None:
    """IN, which macko packed, to the dense OUT."""
    from .integrations.folders import unpack_folder

    source = find_folder(options.source)
    with unfinished(options.target, source, partial(_say, options)) as work:
        result = work / "result"
        count, proved = unpack_folder(source, result)
        copy_others(source, result, cards=False)
    proof = f"{proved if proved < count else 'each'} with the checksum of the weight that was packed"
    print(f"{options.target}: {count} layers are dense again, {proof}.")


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
    with unfinished(options.target, source, partial(_say, options), shrinks=True) as work:
        result = work / "result"
        result.mkdir()
        layers = pack_quantised(source, result)
        copy_others(source, result)
    kinds = ", ".join(sorted({about["values"] for about in layers.values()}))
    print(f"{options.target}: {len(layers)} layers of {kinds}, with the codes and scales of {options.source}.")
    return True


def inspect(options: argparse.Namespace) -> None:
    """A table of the matrices of a checkpoint: what they would take and gain here, or on the GPU that is named."""
    from .measure.inspect import describe

    print(describe(find_folder(options.source, or_file=True), options.gpu))


def _share(options: argparse.Namespace, device: str) -> None:
    """Times of this GPU into a file for others."""
    from .measure import share

    if options.source or options.shapes:
        raise ValueError("--share has shapes of its own: give neither a folder nor --shapes")
    if device == "cpu":
        raise ValueError("--share is of a GPU, and there is none here, or --device says cpu")
    path = share.share(Path(options.out) if options.out else None, device)
    print(
        f"{path}: please attach it to {share.WHERE}. It has the GPU, its driver and clocks, and times; nothing of you."
    )


def tune(options: argparse.Namespace) -> None:
    """Times of this GPU or CPU into its table."""
    device = _device(options.device)
    if options.share:
        _share(options, device)
        return
    from .measure.inspect import is_worth_it, matrices
    from .measure.tune import SMALLEST
    from .measure.tune import tune as measure

    if options.source and options.shapes:
        raise ValueError("give a checkpoint's folder or --shapes, not both")
    shapes = options.shapes or ([] if options.source else ["4096x4096", "11008x4096", "4096x11008"])
    for shape in shapes:
        if not all(size.isdecimal() for size in shape.split("x")) or shape.count("x") != 1:
            raise ValueError(f"--shapes has {shape!r}, expected rows x columns, as 4096x11008")
        if math.prod(map(int, shape.split("x"))) < SMALLEST:
            raise ValueError(f"--shapes has {shape!r}, expected {SMALLEST:,} weights or more: fewer take no time")
    for density in options.densities:
        if not 0 < density < 1:
            raise ValueError(f"--densities has {density:g}, expected shares of non-zeros between 0 and 1")

    source = find_folder(options.source, or_file=True) if options.source else Path()
    if (method := quantised_by(read_config(source))) not in ("", "compressed-tensors"):
        raise ValueError(f"{source} is quantised by {method}, whose products macko does not time")

    def weights() -> Iterator[tuple[str, Tensor]]:
        if options.source:
            with Checkpoint(source) as file:
                for name, weight, _, size in matrices(file):
                    if "embed" not in name and is_worth_it(weight, size):
                        yield name, weight if isinstance(weight, Tensor) else weight.to_dense()
        for shape in shapes:
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
        from .measure.engines import run
    else:
        from .measure.bench import run

    source = options.source
    if not source.startswith("random:"):
        folder = find_folder(source)
        packed_layers(folder)
        check_not_quantised(folder)
        source = str(folder)
    run(options, source)


def eval(options: argparse.Namespace) -> None:  # the command's name
    """Perplexity, and what differs from another model, as JSON."""
    transformers = require_transformers()
    from .measure.evaluate import embeddings, language, layer_errors
    from .measure.runs import append

    device, source = _device(options.device), find_folder(options.source)
    against = None if options.against is None else find_folder(options.against)
    for folder in (source, *([against] if against else [])):
        packed_layers(folder)
    config = _config(transformers, source)
    text = _text(options.data, "--data") if options.data else _reference()
    tokenizer = _tokenizer(transformers, source, options, against)
    append(options.json, [])  # or it would be found out after all the work
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

    check_not_masked(folder)
    with readable(folder):
        name = (transformers.AutoConfig.from_pretrained(folder).architectures or [""])[0]
        kind = getattr(transformers, name, transformers.AutoModelForCausalLM)
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
    from .measure import doctor as checks

    return checks.main()


def _device(asked: str | None) -> str:
    """A device that is there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))]
    if asked is not None and asked not in there:
        why = " (this torch is built without CUDA)" if torch.version.cuda is None else ""
        raise ValueError(f"--device is {asked!r}, here there is {', '.join(there)}{why}")
    return asked or ("cuda" if count else "cpu")


def _save(model: Any, report: Report, options: argparse.Namespace, source: Path, folder: Path) -> None:
    """Prints the report and writes the model, and what lies beside it; ValueError where it is as it was."""
    if not sys.stderr.isatty():
        print(file=sys.stderr, flush=True)  # in a log the table would begin after a bar, on its line
    print(report)
    if not report.changed:
        reasons = Counter(layer.reason for layer in report)
        if any(reason.startswith("under ") for reason in reasons):
            raise ValueError(f"{options.source} has no layer that is sparse enough: prune it first (macko prune)")
        text = "; ".join(f"{reason} ({count} of {len(report)})" for reason, count in reasons.most_common(4))
        text = text or "it has no linear layer"
        raise ValueError(f"{options.source}: no layer was changed, so nothing is written: {text}")
    model.save_pretrained(folder)
    copy_others(source, folder)


if __name__ == "__main__":
    sys.exit(main())
