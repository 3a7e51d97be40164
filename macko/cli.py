"""The command `macko`: prune, convert, inspect, bench, doctor. Each is a few lines over the package."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import __version__
from .choose import Options
from .convert import MIN_SPARSITY
from .files import Checkpoint
from .formats import FORMATS
from .integrations import require_transformers
from .layers import IGNORED, Report, density_of, format_bytes, packed_share, patterns
from .linear import DTYPES
from .prune import METHODS, STATISTICS, asked_for, prune_
from .times import times, times_of

#: What a user, a file, a disk or a network can cause: these are told in one line, without a traceback.
EXPECTED = (
    OSError, ValueError, TypeError, ImportError, RuntimeError, MemoryError, SafetensorError, UserWarning,
)  # fmt: skip
#: Endings of files that hold weights.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
#: What a repository of the Hub holds besides, or a second time, in other formats.
NOT_FETCHED = [*(f"*{ending}" for ending in WEIGHTS[1:]), "*/*"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = _parser().parse_args(arguments)
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
            text, code = " ".join(str(error).split()) or type(error).__name__, 1
    print(f"macko {options.command}: {text}{options.hint}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    """Of every command and its arguments; `run` is the command's function."""
    parser = argparse.ArgumentParser(prog="macko", description="Pruned neural networks, smaller and faster.")
    parser.add_argument("--version", action="version", version=f"macko {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _prune_arguments(_command(commands, prune, "set weights of a checkpoint to zero"))
    _convert_arguments(_command(commands, convert, "pack a pruned checkpoint"))
    _inspect_arguments(_command(commands, inspect, "density, patterns and bytes of every matrix of a checkpoint"))
    _tune_arguments(_command(commands, tune, "time the formats on this GPU or CPU, for format=auto to choose by"))
    _bench_arguments(_command(commands, bench, "time a model dense against sparse"))
    _command(commands, doctor, "what is installed, and a self-test (python -m macko)")
    return parser


def _prune_arguments(command: argparse.ArgumentParser) -> None:
    _in_and_out(command, "folder of a dense checkpoint, or its name on the Hub (organisation/model)")
    command.add_argument("--sparsity", type=float, help="share of zeros (default 0.5, or what the pattern says)")
    command.add_argument("--pattern", help="n:m, at most n non-zeros in every m columns, as 2:4")
    command.add_argument("--method", choices=METHODS, default="wanda")
    command.add_argument("--calibration", metavar="FILE", help="a text to calibrate on (wanda, sparsegpt)")
    command.add_argument("--samples", type=_count, default=128, help="pieces of the text (default 128)")
    command.add_argument("--length", type=_count, help="tokens in a piece (default 2048, or the model's positions)")
    _ignore(command)
    command.add_argument("--device", help="where to prune, one block at a time (default: a GPU if there is one)")
    command.add_argument(
        "--resume", action="store_true",
        help="go on where a run with the same options was stopped (wanda, sparsegpt: OUT.unfinished keeps its layers)",
    )  # fmt: skip


def _convert_arguments(command: argparse.ArgumentParser) -> None:
    _in_and_out(command, "folder with dense weights, or sparse ones of compressed-tensors, or its name on the Hub")
    own_files = " and ".join(name for name, kind in FORMATS.items() if name != "macko" and not kind.is_layout)
    command.add_argument(
        "--format", default="auto",
        help=f"what the weights are held in where the model is loaded (the files are the same but for {own_files}): "
        "auto, smallest, mixed, or one of " + ", ".join(FORMATS),
    )  # fmt: skip
    _ignore(command)
    command.add_argument("--min-sparsity", type=float, default=MIN_SPARSITY, help="leave denser layers as they are")
    command.add_argument("--device", help="where to pack (default: a GPU if there is one)")


def _inspect_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="FOLDER", help="folder or .safetensors file")
    command.add_argument("--gpu", help='name of the GPU to expect gains for, as "NVIDIA H200" (default: the one here)')


def _tune_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="FOLDER", nargs="?", help="a pruned checkpoint, whose shapes and densities")
    command.add_argument("--shapes", nargs="+", default=[], metavar="ROWSxCOLS", help="shapes, without a checkpoint")
    command.add_argument("--densities", nargs="+", type=float, default=[0.5], help="of --shapes (default 0.5)")
    command.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="of --shapes")
    command.add_argument("--device", help="cuda or cpu (default: a GPU if there is one)")
    command.add_argument("--tokens", nargs="+", type=_count, default=[1], help="at once (default 1)")
    command.add_argument("--out", metavar="FILE", help="the table (default: the user's, for this GPU)")


def _bench_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="MODEL", help="folder of a dense checkpoint, or random:7b, random:tiny")
    command.add_argument(
        "--sparsity", type=float, nargs="+", help="prune by magnitude first, to each of these (default 0.5 for random:)"
    )
    command.add_argument("--format", default="auto", help="as of convert")
    command.add_argument("--merge", action=argparse.BooleanOptionalAction, default=True, help="q, k, v as one matrix")
    command.add_argument("--batch", type=_count, nargs="+", default=[1, 8, 32], help="sequences to decode at once")
    command.add_argument(
        "--prompt-tokens",
        type=_count,
        nargs="+",
        default=[128],
        help="lengths to time the prefill of; decode: the first",
    )
    command.add_argument("--new-tokens", type=_count, default=32)
    command.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), help="default: float16, on a CPU bfloat16"
    )
    command.add_argument(
        "--compile", choices=("default", "fast", "max"), nargs="?", const="fast",
        help="a static cache and torch.compile; max takes longer to compile",
    )  # fmt: skip
    command.add_argument(
        "--profile", action="store_true",
        help="the kernels of one token and no times: a profiler slows down each launch behind it",
    )  # fmt: skip
    command.add_argument("--json", metavar="FILE", help="append the results as JSON lines")
    command.add_argument(
        "--engine", choices=("transformers", "vllm"), default="transformers",
        help="what runs the model; with vllm of the options above only --sparsity, --format, --batch, --prompt-tokens, "
        "--new-tokens, --dtype and --json count",
    )  # fmt: skip
    command.add_argument("--sides", nargs="+", default=["dense", "macko", "fp8"], help="of vllm (default: all three)")
    command.add_argument("--engine-args", default="{}", metavar="JSON", help="arguments of vLLM's LLM, for all sides")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _in_and_out(command: argparse.ArgumentParser, source: str) -> None:
    command.add_argument("source", metavar="IN", help=source)
    command.add_argument("target", metavar="OUT", help="folder to write")
    command.add_argument("--overwrite", action="store_true", help="replace the model in OUT, once the new one is whole")


def _ignore(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ignore", nargs="*", metavar="LAYER",
        help=f"layers to leave besides {', '.join(IGNORED)}: full names, last components of names, or globs; "
        "--ignore alone leaves none, not even that",
    )  # fmt: skip


def _ignored(asked: list[str] | None) -> list[str]:
    return [] if asked == [] else list(dict.fromkeys([*IGNORED, *(asked or ())]))


def _command(commands: Any, run: Any, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(run.__name__, help=text, description=text.capitalize() + ".")
    command.set_defaults(run=run)
    return command


def prune(options: argparse.Namespace) -> None:
    """IN to OUT with zeros in it, dense still."""
    transformers = _transformers()
    share, _ = asked_for(options.sparsity, options.method, options.pattern)
    _check_target(options)
    device, source, ignore = _device(options.device), _folder(options.source), _ignored(options.ignore)
    _check_dense(source)
    config = transformers.AutoConfig.from_pretrained(source)
    batches: list[Tensor] | None = None
    begun: dict[str, Any] | None = None
    if options.method in STATISTICS:
        if options.calibration is None:
            raise ValueError(f"--method {options.method} needs --calibration FILE, a text of the kind the model is for")
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        length = options.length or min(2048, positions or 2048)
        if positions and length > positions:
            raise ValueError(f"--length is {length}, {options.source} has {positions} positions")
        text = _text(options.calibration)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ValueError(f"{options.source} has no tokenizer to calibrate with: {error}") from None
        batches = pieces(tokenizer(text, return_tensors="pt").input_ids[0], options.samples, length)
        stats = [(file.name, file.stat()) for file in _weight_files(source)]
        begun = {
            "IN": str(source.resolve()),
            "IN's files (sizes and dates)": _digest(str([(name, s.st_size, s.st_mtime_ns) for name, s in stats])),
            "--sparsity": share, "--method": options.method, "--pattern": options.pattern,
            "--calibration (its text)": _digest(text), "--samples": options.samples, "--length": length,
            "--ignore": ignore, "--device": device, "macko": __version__, "torch": torch.__version__,
        }  # fmt: skip
    elif options.resume:
        raise ValueError(f"--resume is for {' and '.join(STATISTICS)}: {options.method} keeps nothing to go on with")
    with _unfinished(options, source, begun) as work:
        named = (config.architectures or [""])[0]  # the class that was saved, or an encoder would get a new head
        kind = getattr(transformers, named, transformers.AutoModelForCausalLM)
        model = kind.from_pretrained(source, dtype="auto")
        report = prune_(
            model, share, options.method, pattern=options.pattern, calibration=batches, ignore=ignore, device=device,
            done=_Kept(work / "layers") if begun else None,
        )  # fmt: skip
        print(report)
        if not report.changed:
            raise ValueError(_nothing_changed(options.source, report))
        model.save_pretrained(work / "result")
        _copy_others(source, work / "result")
    print(f"{options.target} is written, dense still. Next: macko convert {options.target} {options.target}-packed")


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--calibration {path} is no text in UTF-8: {error}") from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pieces(tokens: Tensor, samples: int, length: int) -> list[Tensor]:
    """Batches [1, length] of a text [tokens], spread evenly over it; fewer where it is short."""
    samples = min(samples, len(tokens) // length)
    if samples < 1:
        raise ValueError(f"the calibration text has {len(tokens)} tokens, less than one piece of {length} (--length)")
    starts = torch.linspace(0, len(tokens) - length, samples).long().tolist()
    return [tokens[None, start : start + length] for start in starts]


def convert(options: argparse.Namespace) -> None:
    """IN to OUT with packed weights."""
    _transformers()
    from .integrations.transformers import MackoConfig, load_packed

    ignore = _ignored(options.ignore)
    config = MackoConfig(format=options.format, ignore=ignore, min_sparsity=options.min_sparsity)
    _check_target(options)
    device, source = _device(options.device), _folder(options.source)
    _check_dense(source)
    device_types = Options(options.format).device_types
    if elsewhere := torch.device(device).type not in device_types:
        config.format = "macko"  # which is what the file of a layout holds
    with _unfinished(options, source) as work:
        model = load_packed(source, config, **({"device_map": device} if device != "cpu" else {}))
        report = model.hf_quantizer.report
        print(report)
        if not report.changed:
            raise ValueError(_nothing_changed(options.source, report))
        config.format = options.format
        model.save_pretrained(work / "result")
        _copy_others(source, work / "result")
        before, after = (sum(f.stat().st_size for f in _weight_files(folder)) for folder in (source, work / "result"))
    print(f"{options.target}: {format_bytes(after)}, {after / max(1, before):.3f} of {format_bytes(before)}")
    if elsewhere:
        print(f"It is to be loaded on {' or '.join(device_types)}, where {options.format} runs")


def inspect(options: argparse.Namespace) -> None:
    """A table of the matrices of a checkpoint."""
    from rich.console import Console
    from rich.table import Table

    known = times(options.gpu) if options.gpu else times_of() if torch.cuda.is_available() else None
    here = f"on {known.gpu}" if known else "on a GPU"
    us = [0.0, 0.0]
    table = Table(box=None, pad_edge=False)
    for title in ("matrix", "shape", "density (sparse)", "n:m", "format", "bytes", "as macko", "decode, at best", here):
        table.add_column(title, justify="left" if title in ("matrix", "n:m", "format") else "right", no_wrap=True)
    total = [0, 0]
    with Checkpoint(_folder(options.source, or_file=True)) as file:
        for name, dense, form, size in _matrices(file):
            density = density_of(dense) or 0.0
            share = min(1.0, packed_share(density, 8 * dense.element_size())) if dense.dtype in DTYPES else 1.0
            after = size if name in file.layers else round(dense.nbytes * share)
            total = [total[0] + size, total[1] + after]
            gain = f"{dense.nbytes / after:.2f}x" if after < dense.nbytes else "-"
            shape = "x".join(map(str, dense.shape))
            row = (shape, f"{density:.3f} ({1 - density:5.1%})", " ".join(patterns(dense)), form, format_bytes(size))
            expected = ""
            if known and "embed" not in name and dense.dtype.itemsize == 2:
                found = known.us(dense.shape[0], dense.shape[1], density, dense.dtype)
                left = 1 - density < MIN_SPARSITY or "lm_head" in name  # as sparsify_ leaves it
                best = "" if not found else "dense" if left else min(found, key=found.__getitem__)
                if best:
                    us = [us[0] + found["dense"], us[1] + found[best]]
                    expected = f"{found['dense'] / found[best]:.2f}x {best}"
            table.add_row(name, *row, format_bytes(after), gain, expected)
    table.add_section()
    expected = f"{us[0] / us[1]:.2f}x" if us[1] else ""
    table.add_row("all", "", "", "", "", format_bytes(total[0]), format_bytes(total[1]), "", expected)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    print("decode, at best: dense bytes over packed bytes, what a layer gains for one token when memory alone decides.")
    if known:
        how = "measured times where there are some, else a model fitted to those"
        how = how if known.measured else "a model fitted to another GPU's times; macko tune measures"
        print(f"on {known.gpu}: time of one token dense over that of the fastest format ({how}).")


def _matrices(file: Checkpoint) -> Iterator[tuple[str, Tensor, str, int]]:
    """Of every matrix its name, itself as dense, and in what format and how many bytes the checkpoint has it."""
    from tqdm.auto import tqdm

    from .integrations.compressed_tensors import lazy_state, sparsity_format

    masked = sparsity_format(file.config) or ""
    names: dict[str, Any] = dict.fromkeys(file.layers)
    if masked:
        names |= {n.removesuffix(".weight"): t for n, t in lazy_state(file).items() if f"{n[:-7]}.bitmask" in file}
    matrices = [n for n in file if n.endswith(".weight") and len(file.shape(n)) == 2]
    for name in tqdm([*names, *matrices], delay=1, leave=False):
        if name in file.layers:
            packed = file.packed(name)
            if packed.rows * packed.cols > 2**27 and packed.density < 2**-10:  # a shape takes no bytes in a file
                raise ValueError(f"{name} holds next to nothing and claims to be {list(packed.shape)}: not unpacked")
            yield name, packed.to_dense(), packed.format, packed.nbytes
        elif name in names:
            size = sum(file[k].nbytes for k in (f"{name}.bitmask", f"{name}.compressed"))
            yield name, names[name][...], masked, size
        else:
            dense = file[name]
            yield name, dense, "dense", dense.nbytes


def tune(options: argparse.Namespace) -> None:
    """Times of this GPU or CPU into its table."""
    device = _device(options.device)
    from .times import read
    from .tune import tune as measure

    if bool(options.source) == bool(options.shapes):
        raise ValueError("give a checkpoint's folder, or --shapes")
    for shape in options.shapes:
        if not all(size.isdecimal() for size in shape.split("x")) or shape.count("x") != 1:
            raise ValueError(f"--shapes has {shape!r}, expected rows x columns, as 4096x11008")

    def weights() -> Iterator[tuple[str, Tensor]]:
        if options.source:
            with Checkpoint(_folder(options.source, or_file=True)) as file:
                names = [n for n in file if n.endswith(".weight") and len(file.shape(n)) == 2 and "embed" not in n]
                yield from ((name, file.packed(name).to_dense()) for name in file.layers)
                yield from ((name, file[name]) for name in names)
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
    _transformers()
    if options.engine == "vllm":
        from .engines import run
    else:
        from .bench import run

    source = options.source
    if not source.startswith("random:"):
        folder = _folder(source)
        _packed_layers(folder)
        source = str(folder)
    run(options, source)


def doctor(options: argparse.Namespace) -> int:
    """python -m macko."""
    from .__main__ import main as check

    return check()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError("this command needs transformers 5: pip install 'transformers>=5'") from None
    require_transformers()
    return transformers


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


def _packed_layers(source: Path) -> int:
    """How many there are. Opens every file on the way: one that was cut off is named here, before any work."""
    if not any(source.glob("*.safetensors")):
        return 0
    with Checkpoint(source) as file:
        return len(file.layers)


def _weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights; others than safetensors only where there are none of those."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix in WEIGHTS]
    return [file for file in files if file.suffix == WEIGHTS[0]] or files


def _nothing_changed(source: str, report: Report) -> str:
    reasons = Counter(layer.reason for layer in report)
    if any(reason.startswith("under ") for reason in reasons):
        return f"{source} has no layer that is sparse enough: prune it first (macko prune)"
    text = "; ".join(f"{reason} ({count} of {len(report)})" for reason, count in reasons.most_common(4))
    return f"{source}: no layer was changed, so nothing is written: {text or 'it has no linear layer'}"


class _Kept(MutableMapping[str, Tensor]):
    """Pruned weights by the layer's name, a file each: what is there is whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        return load_file(self._file(name))["weight"]

    def __contains__(self, name: object) -> bool:
        return self._file(str(name)).exists()

    def __setitem__(self, name: str, weight: Tensor) -> None:
        part = self.folder / "part"
        save_file({"weight": weight.contiguous()}, part)
        part.replace(self._file(name))

    def __delitem__(self, name: str) -> None:
        self._file(name).unlink()

    def __iter__(self) -> Iterator[str]:
        return (file.stem for file in sorted(self.folder.glob("*.safetensors")))

    def __len__(self) -> int:
        return len(list(iter(self)))


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


def _copy_others(source: Path, target: Path) -> None:
    """Tokenizer, chat template, licence: whatever is no weight and was not written. IN's card stays beside ours."""
    for file in sorted(source.iterdir()):
        weights = file.suffix in WEIGHTS or ".index." in file.name
        there = target / file.name
        if there.exists() and file.name == "README.md":
            there = target / "README-dense.md"
        if file.is_file() and not weights and not there.exists():
            shutil.copyfile(file, there)


if __name__ == "__main__":
    sys.exit(main())
