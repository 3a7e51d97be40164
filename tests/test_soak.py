"""A few cycles of verify/soak.py with a tiny model, and that it sees what it is for."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_llama import needs_transformers
from verify import soak

pytestmark = [pytest.mark.slow, needs_transformers]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "BATCHES", (1, 3))


def test_cycles_give_the_same_tokens_and_no_memory_grows(tmp_path: Path) -> None:
    line = soak.soak(tmp_path, "tiny", CPU, 0, 4, 0)
    assert line["cycles"] == 3
    assert line["differ"] == {}
    assert not line["grew"]
    assert line["distinct"] == line["scenarios"]  # an adapter changes what it should


def test_a_token_that_differs_and_memory_that_grows_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, grown = soak.decode, iter(range(1, 100))

    def decode(model: Any, scenario: soak.Scenario, *rest: Any) -> Tensor:
        tokens = right(model, scenario, *rest)
        if next(calls) == 6:
            tokens[0, -1] += 1
        return tokens

    calls = iter(range(1000))
    monkeypatch.setattr(soak, "decode", decode)
    monkeypatch.setattr(soak, "held", lambda device: (next(grown), 0))
    line = soak.soak(tmp_path, "tiny", CPU, 0, 4, 0)
    assert sum(line["differ"].values()) == 1
    assert line["grew"]


@pytest.mark.gpu
def test_cycles_on_a_gpu(tmp_path: Path) -> None:
    line = soak.soak(tmp_path, "tiny", torch.device("cuda", 0), 0, 8, 0)
    assert line["differ"] == {}
    assert line["gpu_bytes"][0] == line["gpu_bytes"][1]


@pytest.mark.gpu
def test_what_the_allocator_did_not_cut_is_no_growth() -> None:
    gc.collect()  # else what earlier tests have left may be given back meanwhile
    device, size = torch.device("cuda", 0), (21 << 20) + (1 << 19)  # its block is one of 22 MB
    before, _ = soak.held(device)
    whole = torch.cuda.memory_allocated()
    tensor = torch.empty(size, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_allocated() - whole == 22 << 20
    assert soak.held(device)[0] - before == tensor.numel()
