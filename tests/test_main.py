"""`python -m macko`: environment and self-test."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


def test_a_gpu_without_the_cuda_library_is_promised_no_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = SimpleNamespace(name="A GPU", major=9, minor=0, multi_processor_count=132, total_memory=80e9)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(_library, "cuda_missing", "put nvcc on PATH")
    monkeypatch.setattr(main, "kernels_of", lambda device: "wgmma kernels")
    assert main.main() == 1
    said = capsys.readouterr().out
    assert "GPU 0: A GPU, 9.0, 132 SMs" in said
    assert "CUDA library: put nvcc on PATH" in said
    assert "wgmma kernels" not in said
