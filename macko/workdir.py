"""Folders of the commands: IN as it is found, and OUT, which is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .files import Checkpoint, quant_method
from .integrations.compressed_tensors import sparsity_format
from .nn.report import format_bytes
from .weights.slidesparse import NOTE

#: Endings of files that hold weights.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
#: What a repository of the Hub holds besides, or a second time, in other formats.
NOT_FETCHED = [*(f"*{ending}" for ending in WEIGHTS[1:]), "*/*"]


# ---- IN --------------------------------------------------------------------------------------------------------------


def find_folder(source: str, or_file: bool = False) -> Path:
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
        folder = Path(snapshot_download(source, ignore_patterns=NOT_FETCHED))
        if not any(folder.glob("*.safetensors")):  # an older repository
            snapshot_download(source, allow_patterns=["pytorch_model*.bin"])
        return folder
    except Exception as error:  # of a dozen kinds, some of them the network library's
        raise ValueError(f"{source}: there is no such folder, nor a model of that name on the Hub: {error}") from None


def read_config(source: Path) -> dict[str, Any]:
    """config.json; of what is none whoever opens the model says so."""
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def quantised_by(config: dict[str, Any]) -> str:
    """The quant_method of a config.json, where it is not macko's."""
    about = config.get("quantization_config")
    if not isinstance(about, dict) or not about:
        return ""
    method = quant_method(about) or "a method without a name"
    return "" if method == "macko" else method


def check_dense(source: Path) -> None:
    if layers := packed_layers(source):
        raise ValueError(f"{source} is packed already ({layers} layers): take the folder it was made of")


def check_not_quantised(source: Path) -> None:
    """ValueError where others hold the weights, quantised or sparse; names them."""
    check_not_masked(source)
    if method := quantised_by(read_config(source)):
        wanted = "the folder it was made of, with 16 or 32 bits a weight"
        raise ValueError(f"{source} is quantised by {method}: take {wanted}")


def check_not_masked(source: Path) -> None:
    if form := sparsity_format(read_config(source)):
        raise ValueError(f"{source} is {form} of compressed-tensors: macko convert makes a folder of macko's of it")


def packed_layers(source: Path) -> int:
    """How many there are. Opens every file on the way: one that was cut off is named here, before any work."""
    if not (source / "config.json").exists():
        raise ValueError(f"{source} has no config.json, which a folder with a model has")
    if not any(source.glob("*.safetensors")):
        return 0
    with Checkpoint(source) as file:
        return len(file.layers)


def weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights; others than safetensors only where there are none of those."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix in WEIGHTS]
    return [file for file in files if file.suffix == WEIGHTS[0]] or files


# ---- OUT -------------------------------------------------------------------------------------------------------------


def check_target(target: str, source: str, overwrite: bool) -> None:
    """ValueError where OUT cannot be written, or would replace what is no model."""
    out, given = Path(target).resolve(), Path(source).resolve()
    if out == given or out in given.parents:
        raise ValueError(f"OUT is {target}, which {'is' if out == given else 'holds'} IN: name another")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{target} is a file, expected a folder to write")
    if out.is_mount():
        raise ValueError(f"{target} is a mount point, which no other folder can replace: name one within it")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise ValueError(f"{target} is not empty: name another, or replace it by --overwrite")
        if not (out / "config.json").exists():
            raise ValueError(f"{target} is not empty and no model's: --overwrite replaces models only")


@contextlib.contextmanager
def unfinished(
    target: str,
    source: Path,
    say: Callable[[str], None],
    begun: dict[str, Any] | None = None,
    resume: bool = False,
    shrinks: bool = False,
    copies: int = 1,
) -> Iterator[Path]:
    """OUT.unfinished, beside OUT. What is written to its result/ becomes OUT in the end, all at once.

    Made before there is anything to lose: it shows that OUT can be written. Whatever stops the work removes it, but for
    a kill, whose leftovers the next run removes. What stops the work gets an attribute `hint`: what has become of OUT.

    Args:
        say: prints a line for the user.
        begun: what a run has to have in common with the one that it resumes. With it the folder stays when the work is
            stopped and there is something in its layers/.
        resume: whether to go on where a run with the same `begun` was stopped.
        shrinks: whether OUT may be smaller than IN; then too little space is no error.
        copies: what is written besides and kept until the end, and OUT, in sizes of IN.

    Raises:
        ValueError: another process writes there, the run to resume was another one, or there is too little space.
    """
    out = Path(target).resolve()
    work = out.with_name(f"{out.name}.unfinished")
    work.mkdir(parents=True, exist_ok=True)
    about, layers, result = work / "begun.json", work / "layers", work / "result"
    resumes = begun is not None and resume and about.exists()
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
            say(f"{kept} layers of an earlier run are removed from {work}")
        elif begun is not None and resume:
            say(f"there is nothing to resume in {work}, so it starts anew")
        for leftover in (result, *([] if resumes else [layers])):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            if begun is not None:
                _write_whole(about, json.dumps(begun))
            if missing := _missing_space(target, source, work, copies if begun is None else 2):
                if not shrinks:
                    raise ValueError(missing)
                say(f"{missing}; the more zeros, the less")
            yield work
            _share(result)
            _put(result, out)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, OSError, SafetensorError)):
                error.hint = f" ({target} is not written)"  # type: ignore[union-attr]
            if kept := len(list(layers.glob("*.safetensors"))):
                shutil.rmtree(result, ignore_errors=True)
                error.hint = f" ({kept} pruned layers are kept in {work}: run it again with --resume)"  # type: ignore[attr-defined]
            else:
                shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work)


def copy_others(source: Path, folder: Path, cards: bool = True) -> None:
    """Tokenizer, chat template, licence: whatever is no weight and was not written. IN's card stays beside ours."""
    for file in sorted(source.iterdir()):
        weights = file.suffix in WEIGHTS or ".index." in file.name or file.name == NOTE
        there = folder / file.name
        if there.exists() and file.name == "README.md":
            there = folder / "README-dense.md"
        is_card = file.name in ("README.md", "README-dense.md")
        if file.is_file() and (cards or not is_card) and not weights and not there.exists():
            shutil.copyfile(file, there)


class KeptLayers:
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
        unfinished = self.folder / "unfinished"
        save_file({"weight": weight.contiguous()}, unfinished)
        unfinished.replace(self._file(name))


def _write_whole(path: Path, text: str) -> None:
    new = path.with_name("unfinished")
    new.write_text(text)
    new.replace(path)


def _check_same(begun: dict[str, Any], now: dict[str, Any], work: Path) -> None:
    other = [f"{key} {begun.get(key)!r}, now it is {now[key]!r}" for key in now if begun.get(key) != now[key]]
    if other:
        raise ValueError(f"{work} was begun with {'; with '.join(other)}: it starts anew without --resume")


def _missing_space(target: str, source: Path, work: Path, copies: int) -> str:
    """What to say where OUT may not fit: it takes what IN takes, and its layers once more where they are kept."""
    size, free = sum(file.stat().st_size for file in weight_files(source)), shutil.disk_usage(work).free
    needed = size * copies - sum(file.stat().st_size for file in work.glob("layers/*.safetensors"))
    if free >= needed:
        return ""
    return f"{work.parent} has {format_bytes(free)} left, {target} may take {format_bytes(needed)}"


def _share(folder: Path) -> None:
    """Gives files the mode that others get here: safetensors makes its own for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o666 & ~mask)


def _put(new: Path, target: Path) -> None:
    """Renames a folder; what has that name now is removed after it."""
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
