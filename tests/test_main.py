"""`python -m macko`: environment and self-test."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from macko import MackoWeight, _library
from macko.measure import doctor as main


@pytest.mark.slow
def test_runs_and_is_well() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "macko"], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"torch {torch.__version__}" in ran.stdout
    assert "self-test cpu float32: ok" in ran.stdout
    assert ran.stdout.endswith("all well\n")


def test_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    monkeypatch.setattr(main, "self_test", lambda device, dtype: shown.append(capsys.readouterr().out))
    main.main()
    assert shown[0].endswith("\nself-test cpu float16: ")


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(MackoWeight, "linear", lambda self, x, bias: torch.nn.functional.linear(x, self.to_dense()))
    assert main.main() == 1
    assert "FAILED: macko: linear of [200] is off" in capsys.readouterr().out


def test_an_op_that_is_not_tested_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_library, "op_names", (*_library.op_names, "new_op"))
    assert main.main() == 1
    assert "not called: new_op\n" in capsys.readouterr().out
