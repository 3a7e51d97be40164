"""The command `macko`: prune, convert, inspect, bench, doctor. Each is a few lines over the package."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .convert import MIN_SPARSITY
from .files import Checkpoint
from .layers import format_bytes, packed_share, patterns
from .prune import METHODS, STATISTICS, prune_
from .times import times, times_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="macko", description="Pruned neural networks, smaller and faster.")
    commands = parser.add_subparsers(dest="command", required=True)

    command = _command(commands, prune, "set weights of a checkpoint to zero")
    command.add_argument("source", metavar="IN", help="folder of a dense checkpoint")
    command.add_argument("target", metavar="OUT", help="folder to write")
    command.add_argument("--sparsity", type=float, help="share of zeros (default 0.5, or what the pattern says)")
    command.add_argument("--pattern", help="n:m, at most n non-zeros in every m columns, as 2:4")
    command.add_argument("--method", choices=METHODS, default="wanda")
    command.add_argument("--calibration", metavar="FILE", help="a text to calibrate on (wanda, sparsegpt)")
    command.add_argument("--samples", type=_count, default=128, help="pieces of the text (default 128)")
    command.add_argument("--length", type=_count, default=2048, help="tokens in a piece (default 2048)")
    command.add_argument("--ignore", nargs="*", default=["lm_head"], help="layers to leave (default lm_head)")
    command.add_argument("--device", help="where to prune, one block at a time (default: a GPU if there is one)")

    command = _command(commands, convert, "pack a pruned checkpoint")
    command.add_argument("source", metavar="IN", help="folder with dense weights, or sparse ones of compressed-tensors")
    command.add_argument("target", metavar="OUT", help="folder to write")
    command.add_argument("--format", default="auto")
    command.add_argument("--ignore", nargs="*", default=["lm_head"], help="layers to leave dense (default lm_head)")
    command.add_argument("--min-sparsity", type=float, default=MIN_SPARSITY, help="leave denser layers as they are")
    command.add_argument("--device", help="where to pack (default: a GPU if there is one)")

    command = _command(commands, inspect, "density, patterns and bytes of every matrix of a checkpoint")
    command.add_argument("source", metavar="FOLDER", help="folder or .safetensors file")
    command.add_argument("--gpu", help='name of the GPU to expect gains for, as "NVIDIA H200" (default: the one here)')

    command = _command(commands, tune, "time the formats on this GPU, for format=auto to choose by")
    command.add_argument("source", metavar="FOLDER", nargs="?", help="a pruned checkpoint, whose shapes and densities")
    command.add_argument("--shapes", nargs="+", default=[], metavar="ROWSxCOLS", help="shapes, without a checkpoint")
    command.add_argument("--densities", nargs="+", type=float, default=[0.5], help="of --shapes (default 0.5)")
    command.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="of --shapes")
    command.add_argument("--tokens", nargs="+", type=_count, default=[1], help="at once (default 1)")
    command.add_argument("--out", metavar="FILE", help="the table (default: the user's, for this GPU)")

    command = _command(commands, bench, "time a model dense against sparse")
    command.add_argument("source", metavar="MODEL", help="folder of a dense checkpoint, or random:7b, random:tiny")
    command.add_argument(
        "--sparsity", type=float, nargs="+", help="prune by magnitude first, to each of these (default 0.5 for random:)"
    )
    command.add_argument("--format", default="auto")
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

    _command(commands, doctor, "what is installed, and a self-test (python -m macko)")

    options = parser.parse_args(arguments)
    try:
        return options.run(options) or 0
    except (OSError, ValueError, TypeError, ImportError) as error:
        print(f"macko {options.command}: {error}", file=sys.stderr)
        return 1


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _command(commands: Any, run: Any, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(run.__name__, help=text, description=text.capitalize() + ".")
    command.set_defaults(run=run)
    return command


def prune(options: argparse.Namespace) -> None:
    """IN to OUT with zeros in it, dense still."""
    transformers = _transformers()
    _is_new(options.target)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.source, dtype="auto")
    batches: list[Tensor] | None = None
    if options.method in STATISTICS:
        if options.calibration is None:
            raise ValueError(f"--method {options.method} needs --calibration FILE, a text of the kind the model is for")
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.source)
        tokens = tokenizer(Path(options.calibration).read_text(), return_tensors="pt").input_ids[0]
        batches = pieces(tokens, options.samples, options.length)
    report = prune_(
        model, options.sparsity, options.method, pattern=options.pattern, calibration=batches, ignore=options.ignore,
        device=_device(options.device),
    )  # fmt: skip
    print(report)
    model.save_pretrained(options.target)
    _copy_others(options.source, options.target)


def pieces(tokens: Tensor, samples: int, length: int) -> list[Tensor]:
    """Batches [1, length] of a text [tokens], spread evenly over it; fewer where it is short."""
    samples = min(samples, len(tokens) // length)
    if samples < 1:
        raise ValueError(f"the calibration text has {len(tokens)} tokens, less than one piece of {length}")
    starts = torch.linspace(0, len(tokens) - length, samples).long().tolist()
    return [tokens[None, start : start + length] for start in starts]


def convert(options: argparse.Namespace) -> None:
    """IN to OUT with packed weights."""
    _transformers()
    from .integrations.transformers import MackoConfig, load_packed

    _is_new(options.target)
    config = MackoConfig(format=options.format, ignore=options.ignore, min_sparsity=options.min_sparsity)
    device = _device(options.device)
    model = load_packed(options.source, config, **({"device_map": device} if device != "cpu" else {}))
    report = model.hf_quantizer.report
    print(report)
    if not report.changed:
        raise ValueError(f"{options.source} has no layer that is sparse enough: prune it first (macko prune)")
    model.save_pretrained(options.target)
    _copy_others(options.source, options.target)
    before, after = (sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
                     for folder in (options.source, options.target))  # fmt: skip
    print(f"{options.target}: {format_bytes(after)}, {after / max(1, before):.3f} of {format_bytes(before)}")


def inspect(options: argparse.Namespace) -> None:
    """A table of the matrices of a checkpoint."""
    from rich.console import Console
    from rich.table import Table
    from tqdm.auto import tqdm

    from .integrations.compressed_tensors import lazy_state, sparsity_format

    known = times(options.gpu) if options.gpu else times_of() if torch.cuda.is_available() else None
    here = f"on {known.gpu}" if known else "on a GPU"
    us = [0.0, 0.0]
    table = Table(box=None, pad_edge=False)
    for title in ("matrix", "shape", "density (sparse)", "n:m", "format", "bytes", "as macko", "decode, at best", here):
        table.add_column(title, justify="left" if title in ("matrix", "n:m", "format") else "right", no_wrap=True)
    total = [0, 0]
    form: str | None
    with Checkpoint(options.source) as file:
        masked = sparsity_format(file.config)
        names: dict[str, Any] = dict.fromkeys(file.layers)
        if masked:
            names |= {n.removesuffix(".weight"): t for n, t in lazy_state(file).items() if f"{n[:-7]}.bitmask" in file}
        matrices = [n for n in file if n.endswith(".weight") and len(file.shape(n)) == 2]
        for name in tqdm([*names, *matrices], delay=1, leave=False):
            if name in file.layers:
                packed = file.packed(name)
                if packed.rows * packed.cols > 2**27 and packed.density < 2**-10:  # a shape takes no bytes in a file
                    raise ValueError(
                        f"{name} holds next to nothing and claims to be {list(packed.shape)}: not unpacked"
                    )
                dense, form, size = packed.to_dense(), packed.format, packed.nbytes
            elif name in names:
                dense, form = names[name][...], masked
                size = sum(file[k].nbytes for k in (f"{name}.bitmask", f"{name}.compressed"))
            else:
                dense, form = file[name], "dense"
                size = dense.nbytes
            density = int(dense.count_nonzero()) / max(1, dense.numel())
            share = min(1.0, packed_share(density, 8 * dense.element_size()))
            after = size if name in file.layers else round(dense.nbytes * share)
            total = [total[0] + size, total[1] + after]
            gain = f"{dense.nbytes / after:.2f}x" if after < dense.nbytes else "-"
            shape = "x".join(map(str, dense.shape))
            row = (
                shape,
                f"{density:.3f} ({1 - density:5.1%})",
                " ".join(patterns(dense)),
                str(form),
                format_bytes(size),
            )
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


def tune(options: argparse.Namespace) -> None:
    """Times of this GPU into its table."""
    from .times import read
    from .tune import tune as measure

    if bool(options.source) == bool(options.shapes):
        raise ValueError("give a checkpoint's folder, or --shapes")
    for shape in options.shapes:
        if not all(size.isdecimal() for size in shape.split("x")) or shape.count("x") != 1:
            raise ValueError(f"--shapes has {shape!r}, expected rows x columns, as 4096x11008")

    def weights() -> Iterator[tuple[str, Tensor]]:
        if options.source:
            with Checkpoint(options.source) as file:
                names = [n for n in file if n.endswith(".weight") and len(file.shape(n)) == 2 and "embed" not in n]
                yield from ((name, file.packed(name).to_dense()) for name in file.layers)
                yield from ((name, file[name]) for name in names)
        for shape in options.shapes:
            rows, _, cols = shape.partition("x")
            for density in options.densities:
                w = torch.randn(int(rows), int(cols), device=_device(None), dtype=getattr(torch, options.dtype))
                yield f"{shape} {density}", w * (torch.rand(w.shape, device=w.device) < density)

    path = measure(weights(), tokens=options.tokens, path=options.out)
    for line in read(path)["linear"]:
        about = f"{line['rows']}x{line['cols']} density {line['density']:.2f} {line['dtype']} tokens {line['tokens']}"
        print(f"{about}: " + "  ".join(f"{name} {us:.2f} us" for name, us in line["us"].items()))
    print(path)


def bench(options: argparse.Namespace) -> None:
    """Dense against sparse, prefill and decode."""
    _transformers()
    from .bench import run

    run(options)


def doctor(options: argparse.Namespace) -> int:
    """python -m macko."""
    from .__main__ import main as check

    return check()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError("this command needs transformers 5: pip install 'transformers>=5'") from None
    return transformers


def _device(asked: str | None) -> str:
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def _is_new(target: str) -> None:
    folder = Path(target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{target} is not empty")


def _copy_others(source: str, target: str) -> None:
    """Tokenizer, chat template, licence: whatever is no weight and was not written."""
    for file in sorted(Path(source).iterdir()):
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or ".index." in file.name
        if file.is_file() and not weights and not (Path(target) / file.name).exists():
            shutil.copyfile(file, Path(target) / file.name)


if __name__ == "__main__":
    sys.exit(main())
