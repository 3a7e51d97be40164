"""Loads the two native libraries. Import never fails for lack of a GPU; a CUDA op that is missing says why on call."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

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

#: Vector path of the CPU kernels: scalar, avx2 or avx512. MACKO_CPU lowers it.
cpu_path: str = _C.cpu_path

#: Why the CUDA library is not loaded, or None when it is.
cuda_missing: str | None = None

if torch.version.cuda is None:
    cuda_missing = f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
    cuda_missing += "" if cuda_arches else ", then macko again"
elif not cuda_arches:
    cuda_missing = "macko was built without its CUDA library: put nvcc on PATH and install it again"
else:
    try:
        from . import _C_cuda  # noqa: F401
    except ImportError as error:
        cuda_missing = f"macko's CUDA library does not load under torch {torch.__version__}: {error}"


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
