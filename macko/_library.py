"""Loads the two native libraries. Import never fails for lack of a GPU; a CUDA op that is missing says why on call."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).parent


def _elsewhere() -> list[Path]:
    """Built mackos that this folder's hides, as a clone's does after `pip install .`; none where this one is built."""
    found = find_spec("macko._C")
    if found and found.origin and Path(found.origin).parent.samefile(_PACKAGE):
        return []
    specs = [PathFinder.find_spec("macko._C", [os.path.join(p, "macko") for p in sys.path]), found]
    return [Path(spec.origin).parent for spec in specs if spec and spec.origin]


def _sources(package: Path) -> dict[str, bytes]:
    return {str(file.relative_to(package)): file.read_bytes() for file in package.rglob("*.py")}


if _hidden := _elsewhere():
    _same = [package for package in _hidden if _sources(package) == _sources(_PACKAGE)]
    if not _same:
        raise ImportError(
            f"{_PACKAGE} is not built, and hides the macko that is installed in {_hidden[0].parent}, of other sources: "
            "go to another folder, or run `make build` or `pip install .` in this one"
        )
    sys.modules["macko"].__path__.append(str(_same[0]))  # whose libraries are of these sources
try:
    from . import _C  # registers the schemas and the CPU implementations
except ImportError as error:
    if find_spec("macko._C") is not None:
        raise ImportError(
            f"macko's library {find_spec('macko._C').origin} does not load under torch {torch.__version__}: {error}. "  # type: ignore[union-attr]
            "It needs torch >= 2.10; after a change of torch or machine install macko again."
        ) from error
    raise ImportError(
        "macko's library is not built. In the source folder run `make build`, or install it with `pip install .`"
    ) from None

#: Architectures that the CUDA library was compiled for; empty where macko was built without it.
cuda_arches: tuple[str, ...] = tuple(_C.cuda_arches.split())

#: The number of each layout in headers, by name.
layouts: dict[str, int] = _C.layouts

#: The libraries that are loaded.
_libraries: list[Any] = [_C]

#: Why the CUDA library is not loaded, or None when it is.
cuda_missing: str | None = None

if torch.version.cuda is None:
    cuda_missing = f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
    cuda_missing += "" if cuda_arches else ", then macko again"
elif not cuda_arches:
    cuda_missing = "macko was built without its CUDA library: put nvcc on PATH and install it again"
else:
    try:
        from . import _C_cuda

        if _C_cuda.layouts != _C.layouts:
            raise ImportError(f"its layouts are {_C_cuda.layouts}, the CPU library's {_C.layouts}: build both again")
        _libraries.append(_C_cuda)
    except ImportError as error:
        cuda_missing = f"macko's CUDA library does not load under torch {torch.__version__}: {error}"


def _codes(gpu: tuple[int, int]) -> list[tuple[int, int]]:
    """The compute capabilities of which the library has code that runs on a GPU of this one."""
    codes = []
    for arch in cuda_arches:
        major, minor, only, ptx = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch).groups()  # type: ignore[union-attr]
        code = int(major), int(minor)
        if code == gpu or (only != "a" and code < gpu and (code[0] == gpu[0] or (ptx and not only))):
            codes.append(code)
    return codes


def code_capability(device: torch.device | int | None = None) -> tuple[int, int]:
    """The compute capability that a GPU's code was compiled for: its own, or the newest older one that runs there."""
    gpu = torch.cuda.get_device_capability(device)
    return max(_codes(gpu), default=gpu)


def missing_code(device: torch.device | int | None = None) -> str:
    """Why no kernel of the library runs on a GPU, or nothing."""
    gpu = torch.cuda.get_device_capability(device)
    if not cuda_arches or _codes(gpu):
        return ""
    name, own = torch.cuda.get_device_name(device), f"{gpu[0]}.{gpu[1]}"
    oldest = "macko is for 7.5 and newer" if gpu < (7, 5) else f"install macko again, with TORCH_CUDA_ARCH_LIST={own}"
    return f"it is on {name}, {own}, and macko is compiled for {', '.join(cuda_arches)}: {oldest}"


def slab_kernels(device: torch.device | int | None = None) -> tuple[str, int]:
    """What multiplies slabs on a GPU, "wgmma", "mma.sync" or "none", and up to how many tokens; more by dense rows."""
    return _C.slab_kernels(code_capability(device)[0])


def _said(text: str) -> str:
    """Has every library take a plan; the vector path of the CPU kernels that it leads to."""
    path = ""
    for library in _libraries:
        path = library.plan(text)
    return path


# The environment is read once, here.
_plan = ",".join(
    start + value
    for name, start in (("MACKO_CPU", "cpu="), ("MACKO_COPY", "copy="), ("MACKO_PLAN", ""))
    if (value := os.environ.get(name))
)
try:
    #: Vector path of the CPU kernels: scalar, avx2 or avx512. MACKO_CPU lowers it.
    cpu_path: str = _said(_plan)
except ValueError as error:
    raise ValueError(f"MACKO_CPU, MACKO_COPY and MACKO_PLAN say '{_plan}': {error}") from None


@contextlib.contextmanager
def plan(keys: str) -> Iterator[None]:
    """For tests and measurements: within, the kernels also follow these keys of MACKO_PLAN, as `tile_tokens=0,pdl=1`.

    docs/build.md has the keys; MACKO_CPU and MACKO_COPY are the keys cpu and copy. It holds for the whole process, and
    no other thread may run kernels when it begins or ends.

    Raises:
        ValueError: a key or a value that there is not.
    """
    global _plan
    before = _plan
    _said(f"{before},{keys}")
    _plan = f"{before},{keys}"
    try:
        yield
    finally:
        _plan = before
        _said(before)


def _explain(name: str, device: str, reason: str) -> None:
    def stub(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"macko::{name} got {device} tensors, and there is no kernel for them: {reason}")

    torch.library.impl(f"macko::{name}", device, stub)


#: Every op of the library.
op_names: tuple[str, ...] = tuple(
    sorted(name.removeprefix("macko::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("macko::"))
)
if cuda_missing is not None:
    for _name in op_names:
        _explain(_name, "CUDA", cuda_missing)
