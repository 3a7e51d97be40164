"""GPU tests skip, with the reason, where there is no GPU or no CUDA library."""

import pytest
import torch

from macko import _library
from tests.common import cpu_paths
from tests.tiny_llama import TinyLlama, train

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # its tests skip, with the reason
    pass
else:
    # One example may pack on a busy machine: a deadline would fail for the machine's reasons. Same examples every run.
    settings.register_profile(
        "macko", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    settings.load_profile("macko")


@pytest.fixture(params=cpu_paths())
def cpu_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test once on each vector path of the CPU."""
    monkeypatch.setenv("MACKO_CPU", request.param)
    return request.param


@pytest.fixture(scope="session")
def tiny_llama() -> TinyLlama:
    """Do not change it: copy.deepcopy(tiny_llama.model)."""
    return train()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _library.cuda_missing if _library.cuda_missing or torch.cuda.is_available() else "there is no GPU"
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))
