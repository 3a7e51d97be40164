"""verify.exact: random weights through formats and files, bit for bit; and that it sees a bit that is another one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from macko.weights import Sparse11Weight
from verify import exact


def test_random_matrices(tmp_path: Path) -> None:
    assert exact.main(["--cases", "120", "--out", str(tmp_path / "exact.jsonl")]) == 0
    line = json.loads((tmp_path / "exact.jsonl").read_text())
    assert line["dense12, refused"]
    assert line["sparse11, refused"]
    assert line["dense12, held"] + line["dense12, refused"] == line["tile, held"] == line["planes12, held"] == 120
    assert line["sparse11, listed"]


@pytest.mark.gpu
@pytest.mark.sm80
def test_random_matrices_on_this_gpu() -> None:
    assert exact.main(["--cases", "120", "--device", "cuda"]) == 0


def test_one_bit_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real, hit = Sparse11Weight.to_dense, []

    def wrong(self: Sparse11Weight) -> Any:
        w = real(self)
        w.view(torch.int16).view(-1)[:1] ^= 1
        hit.append(w.numel() > 0)
        return w

    monkeypatch.setattr(Sparse11Weight, "to_dense", wrong)
    assert exact.main(["--cases", "5"]) == 1
    line = json.loads(capsys.readouterr().out)
    assert line["failed"] == sum(hit) > 0
    assert line["failures"][0].startswith("sparse11, case ")
    assert line["failures"][0].endswith(": AssertionError: unpacking gives other bits")
