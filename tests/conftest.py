"""Tests skip, with the reason, where there is no GPU, no CUDA library, or a package is missing."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from macko import _library
from macko.pruning import prune
from macko.weights import FORMATS, SlabWeight, SlideWeight
from tests.common import Plan, cpu_paths
from tests.tiny_llama import TinyLlama, train

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    # Stands in for it while test files are imported, so that the other tests of a file run.
    stub = mock.MagicMock()
    stub.given = lambda *_, **__: pytest.mark.skip(reason="hypothesis is not installed")
    stub.settings = stub.example = lambda *_, **__: lambda test: test
    sys.modules["hypothesis"] = stub
else:
    # One example may pack on a busy machine: a deadline would fail for the machine's reasons. Same examples every run.
    settings.register_profile(
        "macko", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    # For hours: other examples each time (`pytest tests/test_sequences.py --hypothesis-profile=long`).
    settings.register_profile("long", settings.get_profile("macko"), derandomize=False, max_examples=20_000)
    settings.load_profile("macko")


# Matrices here are so small that threads only wait for each other; tests that need several say how many.
torch.set_num_threads(1)


@pytest.fixture
def plan() -> Iterator[Plan]:
    """Says keys of MACKO_PLAN until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda keys: stack.enter_context(_library.plan(keys))


@pytest.fixture(params=cpu_paths())
def cpu_path(request: pytest.FixtureRequest, plan: Plan) -> str:
    """Runs a test once on each vector path of the CPU."""
    plan(f"cpu={request.param}")
    return request.param


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The bars of prune_, each as it is made."""
    made: list[Any] = []
    tqdm = prune.tqdm

    def recorded(**options: Any) -> Any:
        made.append(tqdm(**options))
        return made[-1]

    monkeypatch.setattr(prune, "tqdm", recorded)
    return made


@pytest.fixture(scope="session")
def tiny_llama() -> TinyLlama:
    """Do not change it: copy.deepcopy(tiny_llama.model)."""
    return train()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: none where there is a GPU, of which each would want all memory and quiet."""
    return 0 if torch.cuda.is_available() else min(4, len(os.sched_getaffinity(0)))


def pytest_collection_modifyitems() -> None:
    if isinstance(sys.modules.get("hypothesis"), mock.MagicMock):
        del sys.modules["hypothesis"]


#: Why tests marked gpu cannot run here, or None.
NO_GPU = _library.cuda_missing if torch.cuda.is_available() else f"torch {torch.__version__} sees none"
#: Formats that GPUs have kernels for from compute capability 8.0 on.
OF_NEWER_GPUS = {name for name, kind in FORMATS.items() if issubclass(kind, (SlabWeight, SlideWeight))}


def needs_newer_gpu(item: pytest.Item) -> bool:
    """Whether it is marked so, or a parameter is, or is of, such a format."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    named = (value if isinstance(value, str) else getattr(value, "format", None) for value in values)
    return bool(item.get_closest_marker("sm80")) or any(name in OF_NEWER_GPUS for name in named if type(name) is str)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if NO_GPU and item.get_closest_marker("gpu"):
        pytest.skip(f"needs a GPU: {NO_GPU}")  # from one place, so that pytest reports them all in one line
    if item.get_closest_marker("gpu") and _library.code_capability() < (8, 0) and needs_newer_gpu(item):
        pytest.skip("needs code for a GPU of compute capability 8.0")
