"""Loads the two native libraries. Import never fails for lack of a GPU; a CUDA op that is not there says why on call."""

from __future__ import annotations

from typing import Any

import torch

from . import _C  # noqa: F401  registers the schemas and the CPU implementations

#: Why the CUDA library is not loaded, or None when it is.
cuda_missing: str | None = None

if torch.version.cuda is None:
    cuda_missing = f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
else:
    try:
        from . import _C_cuda  # type: ignore[attr-defined]  # noqa: F401
    except ImportError as error:
        cuda_missing = (
            "macko was built without its CUDA library: put nvcc on PATH and install it again with MACKO_CUDA=1"
            if "cannot import name" in str(error)
            else f"macko's CUDA library does not load: {error}"
        )


def _explain(name: str) -> None:
    def stub(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"macko::{name} was called with CUDA tensors, and there is no kernel for them: {cuda_missing}")

    torch.library.impl(f"macko::{name}", "CUDA", stub)


#: Every op of the library.
op_names: tuple[str, ...] = tuple(
    sorted(name.removeprefix("macko::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("macko::"))
)
if cuda_missing is not None:
    for _name in op_names:
        _explain(_name)
