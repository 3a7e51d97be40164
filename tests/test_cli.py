"""The command line, end to end on small folders. Checkpoints that others wrote: test_checkpoints.py."""

import argparse
import copy
import dataclasses
import fcntl
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import macko
from macko.choose.patterns import PATTERNS, matching_patterns, pattern_names
from macko.choose.times import packed_share
from macko.cli import main
from macko.files import on_disk
from macko.measure import bench, engines, runs
from macko.nn.report import format_bytes
from macko.pruning.prune import METHODS
from macko.weights.codes import KINDS
from tests.common import assert_same_bits, compressed_config, edited, random_weight
from tests.tiny_llama import TEXT, TinyLlama, needs_transformers, save_tokenizer, small_llama

pytestmark = needs_transformers


@pytest.fixture(scope="module")
def dense_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small dense model and files that are no weights."""
    folder = tmp_path_factory.mktemp("dense")
    small_llama().save_pretrained(folder)
    (folder / "tokenizer_notes.txt").write_text("kept")
    (folder / "README.md").write_text("of the dense one")
    return folder


@pytest.fixture
def dense(dense_once: Path, tmp_path: Path) -> Path:
    """It, of one's own."""
    torch.manual_seed(0)
    return shutil.copytree(dense_once, tmp_path / "dense")


def test_prune_then_convert_then_load(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    pruned, sparse = str(tmp_path / "pruned"), str(tmp_path / "sparse")
    assert main(["prune", str(dense), pruned, "--method", "magnitude", "--pattern", "2:4"]) == 0
    assert main(["convert", pruned, sparse, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "model.layers.0.mlp.up_proj" in printed
    assert "14 of 15 layers changed" in printed
    assert re.search(rf"{sparse}: files of [\d.]+ kB, 0\.\d+ of the [\d.]+ kB of IN\. .* in memory", printed)
    for folder in (pruned, sparse):
        assert (Path(folder) / "tokenizer_notes.txt").read_text() == "kept"
    assert (Path(pruned) / "README.md").read_text() == "of the dense one"
    assert (Path(sparse) / "README-dense.md").read_text() == "of the dense one"
    assert "import macko" in (Path(sparse) / "README.md").read_text()
    tokens = torch.arange(8)[None]
    wanted = AutoModelForCausalLM.from_pretrained(pruned)(tokens).logits
    loaded = AutoModelForCausalLM.from_pretrained(sparse)
    assert sum(isinstance(module, macko.SparseLinear) for module in loaded.modules()) == 14
    assert_same_bits(loaded(tokens).logits, wanted)

    for folder, form in ((pruned, "dense"), (sparse, "macko")):
        assert main(["inspect", folder]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if "layers.0.mlp.up_proj" in line)
        assert all(word in line.split() for word in ("104x48", "0.500", "2:4", form))


def test_what_the_commands_refuse(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    out = tmp_path / "out"
    for line, message in (
        (f"convert {dense} {out}", "no layer that is sparse enough: prune it first"),
        (f"convert {dense} {dense}", "which is IN"),
        (f"convert {dense} {dense} --overwrite", "which is IN"),
        (f"convert {dense} {tmp_path} --overwrite", "which holds IN"),
        (f"prune {dense} {dense}/config.json --method magnitude", "is a file"),
        (f"prune {dense} {other} --method magnitude", "is not empty: name another, or replace it by --o"),
        (f"prune {dense} {other} --method magnitude --overwrite", "--overwrite replaces models only"),
        (f"prune {dense} /proc --method magnitude", "is a mount point"),
        (f"convert {tmp_path}/nowhere {out}", "nowhere: there is no such folder"),
        (f"convert nowhere {out}", "nowhere: there is no such folder"),
        (f"convert {dense} {out} --format elves", ": --format is 'elves'"),
        (f"prune {dense} {out}", "--method wanda needs --calibration FILE"),
        (f"prune {dense} {out} --method magnitude --pattern 4:2", ": --pattern is '4:2'"),
        (f"prune {dense} {other} --sparsity 0.3 --pattern 2:4", "but --sparsity is 0.3"),
        (f"convert {dense} {out} --min-sparsity 2", ": --min-sparsity is 2.0, expected 0"),
        (f"convert in {out} --to dense --format dense12", "--to dense takes no --values and no --format"),
        (f"convert in {out} --to dense --values fp8", "--to dense takes no --values and no --format"),
        (f"inspect {tmp_path}", "has no *.safetensors"),
        ("bench random:elves", "expected a folder, or random:"),
        (f"bench {dense} --engine vllm --sparsity 0.5", "--engine vllm takes a folder that is pruned"),
        ("bench random:tiny --engine vllm --sides elves", "--sides has elves, expected some of dense"),
        ("bench random:tiny --engine vllm --format elves", ": --format is 'elves'"),
        ("bench random:tiny --engine vllm --engine-args {", "--engine-args is '{', expected a JSON"),
        ("bench random:tiny --engine vllm --engine-args [1]", "--engine-args is '[1]', expected a"),
    ):
        refused(line.split(), message, capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "other"]
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


# ---- What a user can cause -------------------------------------------------------------------------------------------


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What the command said on stderr, but for the bars of transformers."""
    lines = [line for line in re.split("[\r\n]", capsys.readouterr().err) if line.startswith("macko ")]
    assert len(lines) == 1
    return lines[0]


def refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert message in one_line(capsys)


MAGNITUDE = ("--method", "magnitude")


@pytest.mark.parametrize("content", ["cut_off", "empty", "random"])
def test_a_broken_file_is_named(content: str, dense: Path, text: str, tmp_path: Path, capsys: Any) -> None:
    file = dense / "model.safetensors"
    random = bytes(torch.randint(256, (500,), dtype=torch.uint8))
    file.write_bytes({"cut_off": file.read_bytes()[:-9], "empty": b"", "random": random}[content])
    small = ["--batch", "1", "--prompt-tokens", "4", "--new-tokens", "2"]
    for arguments in (
        ["convert", str(dense), str(tmp_path / "out")],
        ["prune", str(dense), str(tmp_path / "out"), *MAGNITUDE],
        ["inspect", str(dense)],
        ["inspect", str(file)],
        ["bench", str(dense), *small],
        ["eval", str(dense), "--data", text],
    ):
        refused(arguments, f"{file} is no safetensors file, or was cut off", capsys)
    with pytest.raises(ValueError, match=re.escape(f"{file} is no safetensors file")):
        macko.load_model(torch.nn.Linear(4, 4), dense)
    assert not list(tmp_path.glob("out*"))


def test_devices_that_are_not_there(dense: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command, device in (("prune", "cuda"), ("prune", "gpu"), ("convert", "cuda:7"), ("convert", "meta")):
        more = MAGNITUDE if command == "prune" else ()
        assert main([command, str(dense), str(tmp_path / "out"), "--device", device, *more]) == 1
        assert f"--device is {device!r}, here there is cpu" in one_line(capsys)


def test_eight_bit_floats_are_inspected(dense: Path, tmp_path: Path, capsys: Any) -> None:
    with edited(dense / "model.safetensors") as tensors:
        for name, dtype in (("up_proj", torch.float8_e4m3fn), ("down_proj", torch.float8_e5m2)):
            rows, cols = tensors[f"model.layers.0.mlp.{name}.weight"].shape
            half = torch.tensor([[1.0, -0.0, 2, 0]]).repeat(rows, cols // 4)
            tensors[f"model.layers.0.mlp.{name}.weight"] = half.to(dtype)
    assert main(["inspect", str(dense)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, shape in (("up_proj", "104x48"), ("down_proj", "48x104")):
        cells = next(line for line in lines if f"layers.0.mlp.{name}" in line).split()
        assert cells[1:5] == [shape, "0.500", "(50.0%)", "2:4"]
        assert cells[6:8] == cells[8:10]  # macko packs no such weight
    assert main(["convert", str(dense), str(tmp_path / "out")]) == 0  # as transformers reads them: in 16 bits
    assert "2 of 15 layers changed" in capsys.readouterr().out


@pytest.fixture
def text(dense: Path, tmp_path: Path) -> str:
    """A text to calibrate on, and a tokenizer of letters for it in the dense folder."""
    save_tokenizer(dense)
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return str(file)


def test_pieces_are_as_long_as_the_tokenizer_allows(dense: Path, text: str, tmp_path: Path) -> None:
    """A RoBERTa has fewer positions than its config says: they begin after that of padding, here the rare letter 4."""
    from transformers import AutoTokenizer, RobertaConfig, RobertaModel

    sizes = {"vocab_size": 90, "hidden_size": 48, "intermediate_size": 104, "num_hidden_layers": 1}
    config = RobertaConfig(**sizes, num_attention_heads=4, max_position_embeddings=34, pad_token_id=4)
    RobertaModel(config).save_pretrained(tmp_path / "roberta")
    AutoTokenizer.from_pretrained(dense, model_max_length=29).save_pretrained(tmp_path / "roberta")
    command = ["prune", str(tmp_path / "roberta"), str(tmp_path / "out"), "--calibration", text, "--samples", "2"]
    assert main(command) == 0


def test_calibration_that_cannot_be(
    dense: Path, text: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("macko.cli.prune_", None)  # all of it comes before any work
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)))
    for more, message in (
        (["--calibration", str(binary)], f"--calibration {binary} is no text in UTF-8"),
        (["--calibration", text, "--length", "129"], "--length is 129"),
        (["--calibration", str(tmp_path / "nowhere")], "nowhere"),
    ):
        refused(["prune", str(dense), str(tmp_path / "out"), *more], message, capsys)
    (dense / "tokenizer.json").unlink()
    refused(["prune", str(dense), str(tmp_path / "out"), "--calibration", text], f"{dense} has no tokenizer", capsys)
    assert not list(tmp_path.glob("out*"))


def on_a_model(command: str, model: Path, out: Path, dense: Path, text: str) -> list[str]:
    """Each command on a model, eval also with it as the dense one."""
    data = ["--data", text, "--lengths", "16"]
    return {
        "prune": ["prune", str(model), str(out), *MAGNITUDE],
        "convert": ["convert", str(model), str(out), "--device", "cpu"],
        "eval": ["eval", str(model), *data],
        "against": ["eval", str(dense), "--against", str(model), *data],
        "bench": ["bench", str(model), "--batch", "1", "--prompt-tokens", "4", "--new-tokens", "2"],
    }[command]


def names_of(wrapper: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {f"{wrapper}{name}": tensor for name, tensor in state.items()}


def without(part: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {name: tensor for name, tensor in state.items() if part not in name}


def scaled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a checkpoint of 8 bits whose config.json does not say so: each weight is there, and its scale."""
    return {**state, "model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}


@pytest.mark.parametrize("command", ["prune", "convert", "eval", "against", "bench"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (names_of("module."), "lack model.embed_tokens.weight and .* have module.model.embed_tokens.weight: save the"),
        (names_of("_orig_mod."), "lack model.embed_tokens.weight and .* have _orig_mod.model.embed_tokens.weight: "),
        (without("layers.1"), "lack model.layers.1.self_attn.q_proj.weight and 8 more of the model's weights"),
        (without("norm"), "lack model.layers.0.input_layernorm.weight and 4 more"),
        (without("0.mlp.up_proj"), "lack model.layers.0.mlp.up_proj.weight$"),
        (without("lm_head"), "lack lm_head.weight$"),
        (scaled, "model.layers.0.mlp.up_proj.weight is quantised: its files have .*weight_scale, which"),
    ],
)
def test_a_weight_that_no_file_has_is_not_made_at_random(
    change: Any, said: str, command: str, dense: Path, text: str, tmp_path: Path, capsys: Any
) -> None:
    broken, out = shutil.copytree(dense, tmp_path / "broken"), tmp_path / "out"
    tensors = load_file(broken / "model.safetensors")
    for name in tensors:
        if "layers.0" in name and name.endswith("_proj.weight"):
            tensors[name][::2] = 0  # enough for convert
    save_file(change(tensors), broken / "model.safetensors", metadata={"format": "pt"})
    assert main(on_a_model(command, broken, out, dense, text)) == 1
    line = one_line(capsys)
    assert re.search(said, line), line
    assert str(broken) in line
    assert not list(tmp_path.glob("out*"))


def test_a_tied_head_is_in_no_file_and_is_whole(dense: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(dense)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    assert main(["prune", str(tmp_path / "tied"), str(tmp_path / "out"), "--method", "magnitude"]) == 0
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "packed"), "--device", "cpu"]) == 0


@pytest.mark.parametrize("method", ["gptq", "awq", "torchao", "fp8", None, "sparse-bitmask"])
def test_what_others_quantised_is_named(method: str | None, dense: Path, tmp_path: Path, capsys: Any) -> None:
    """None: bitsandbytes of long ago, without a quant_method."""
    with edited(dense / "config.json") as config, edited(dense / "model.safetensors") as tensors:
        config["quantization_config"] = {"quant_method": method, "bits": 4} if method else {"load_in_4bit": True}
        if method == "sparse-bitmask":
            config["quantization_config"] = compressed_config(method)
        for name in [name for name in tensors if "up_proj" in name]:
            tensors[name.replace("weight", "qweight")] = tensors.pop(name)
    commands = [
        ["prune", str(dense), str(tmp_path / "out"), "--method", "magnitude"],
        ["convert", str(dense), str(tmp_path / "out")],
        ["bench", str(dense)],
        ["tune", str(dense)],
    ]
    for arguments in commands[:1] if method == "sparse-bitmask" else commands:
        refused(arguments, (method or "bitsandbytes in 4 bits"), capsys)
    assert not (tmp_path / "out").exists()
    if method != "sparse-bitmask":
        assert main(["inspect", str(dense)]) == 0
        assert "up_proj.qweight and tensors like it (2) are not in the table" in capsys.readouterr().out


def test_others_may_read_what_is_written(dense: Path, tmp_path: Path) -> None:
    """safetensors makes files that their owner alone can read."""
    before = os.umask(0o022)
    try:
        assert main(["prune", str(dense), str(tmp_path / "out"), "--method", "magnitude"]) == 0
        assert main(["convert", str(tmp_path / "out"), str(tmp_path / "packed"), "--device", "cpu"]) == 0
    finally:
        os.umask(before)
    for folder in ("out", "packed"):
        for file in (tmp_path / folder).iterdir():
            assert file.stat().st_mode & 0o777 == 0o644, file


@pytest.mark.parametrize("command", ["prune", "convert", "eval", "bench", "against"])
@pytest.mark.parametrize("fault", ["no config", "empty"])
def test_a_folder_that_is_no_model_is_named(
    fault: str, command: str, dense: Path, text: str, tmp_path: Path, capsys: Any
) -> None:
    broken = shutil.copytree(dense, tmp_path / "broken")
    for path in list(broken.iterdir()):
        if fault == "empty" or path.name == "config.json":
            path.unlink()
    refused(on_a_model(command, broken, tmp_path / "out", dense, text), f"{broken} has no config.json", capsys)


def test_eval_in_words_beside_its_json(dense: Path, text: str, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(dense, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer.json", "tokenizer_config.json"))
    options = ["--data", text, "--lengths", "16", "--samples", "2"]
    assert main(["eval", str(tmp_path / "bare"), *options]) == 1
    assert "bare has no tokenizer: copy tokenizer* from the model that it was made of" in one_line(capsys)
    assert main(["eval", str(tmp_path / "bare"), "--against", str(dense), *options]) == 0  # whose tokenizer is taken
    said = capsys.readouterr()
    found = json.loads(said.out)["windows"][0]
    words = rf"16 tokens: perplexity {found['perplexity']:.4g}, dense .* \(1\.000x\); the same next token 100\.0%; KL "
    assert re.search(words, said.err)
    assert main(["eval", str(dense), "--data", text, "--lengths", "128", "--samples", "2"]) == 0
    (tmp_path / "short.txt").write_text("a few")
    assert main(["eval", str(dense), "--data", str(tmp_path / "short.txt"), "--lengths", "16"]) == 1
    assert one_line(capsys).endswith("less than one window of 16 (--lengths)")


def test_eval_of_an_encoder_needs_its_dense_one(dense: Path, text: str, tmp_path: Path, capsys: Any) -> None:
    from transformers import BertConfig, BertModel

    model, sizes = tmp_path / "bert", {"hidden_size": 48, "intermediate_size": 104, "num_hidden_layers": 2}
    encoder = BertModel(BertConfig(vocab_size=90, num_attention_heads=4, max_position_embeddings=600, **sizes))
    shutil.copytree(dense, model, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    encoder.save_pretrained(model)
    macko.prune_(encoder, 0.5)
    shutil.copytree(model, tmp_path / "pruned")
    encoder.save_pretrained(tmp_path / "pruned")
    command = ["eval", str(tmp_path / "pruned"), "--data", text, "--samples", "3"]
    refused(command, "is no language model, so there is only --against DENSE to judge it by", capsys)
    for against, is_same in ((tmp_path / "pruned", True), (model, False)):
        assert main([*command, "--against", str(against)]) == 0
        said = capsys.readouterr()
        found = json.loads(said.out)["embeddings"]
        assert (found["worst_cosine"] > 1 - 1e-6) == (found["cosine"] > 1 - 1e-6) == is_same
        assert f"cosine to the dense embeddings {found['cosine']:.4f} in the mean" in said.err


def test_formats_of_convert_are_one_list(dense: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["convert", str(dense), str(tmp_path / "out"), "--format", "elves"]) == 1
    listed = re.search(r"expected one of (.*)$", one_line(capsys))[1]
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f": {listed} --values" in text
    assert "(ec, slide, dense12, dense8 and sparse8 have files of their own, the others the same" in text


def test_what_tune_cannot_time_is_said_by_option(capsys: Any) -> None:
    large, shares = "expected 65,536 weights or more", "expected shares of non-zeros between 0 and 1"
    for options, said in (
        (["--shapes", "0x0"], f"--shapes has '0x0', {large}"),
        (["--shapes", "64x64"], f"--shapes has '64x64', {large}"),
        (["--shapes", "512x512", "--densities", "0.5", "1.5"], f"--densities has 1.5, {shares}"),
        (["--shapes", "512x512", "--densities", "0"], f"--densities has 0, {shares}"),
    ):
        refused(["tune", "--device", "cpu", *options], said, capsys)


def test_inspect_tells_of_this_cpu_first(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("macko._library.cpu_path", "avx512")
    save_file({"a.weight": random_weight(4096, 4096, 0.5, torch.bfloat16)}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^a\.weight +4096x4096 .* \d\.\d\dx bitmap$", said, re.M)
    assert "sparse11" not in said
    assert max(map(len, said.splitlines()[:3])) <= 100
    assert said.endswith('--gpu "NVIDIA H200".\n')
    assert main(["inspect", str(tmp_path), "--gpu", "NVIDIA Foo"]) == 0
    said = capsys.readouterr().out
    assert "as sparse11" in said
    assert "on NVIDIA Foo: time" in said
    assert "nobody measured it: fitted to another GPU's times; measured are NVIDIA H100 80GB HBM3, NVIDIA H200;" in said


def test_nothing_to_do_is_no_success(dense: Path, tmp_path: Path, capsys: Any) -> None:
    pruned, packed, out = (str(tmp_path / name) for name in ("pruned", "packed", "out"))
    assert main(["prune", str(dense), out, *MAGNITUDE, "--pattern", "3:7"]) == 1
    assert "no layer was changed, so nothing is written: its 48 columns are no multiple of 7 (12 of 15)" in one_line(
        capsys
    )
    assert main(["prune", str(dense), pruned, *MAGNITUDE]) == 0
    assert main(["convert", pruned, packed, "--device", "cpu"]) == 0
    capsys.readouterr()
    for arguments in (["prune", packed, out, *MAGNITUDE], ["convert", packed, out]):
        refused(arguments, f"{packed} is packed already (14 layers)", capsys)
    assert not list(tmp_path.glob("out*"))


def test_a_slip_in_ignore_does_not_prune_the_head(dense: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    for command, method in (("prune", MAGNITUDE), ("convert", ())):
        slip = [command, str(dense), str(out), *method, "--ignore", "lm_haed"]
        refused(slip, "ignore has 'lm_haed', which matches no linear layer", capsys)
    assert not out.exists()
    for more, changed in ((["--ignore", "*.mlp.*"], 8), (["--ignore"], 15)):
        capsys.readouterr()
        assert main(["prune", str(dense), str(out), *MAGNITUDE, "--overwrite", *more]) == 0
        assert f"{changed} of 15 layers changed" in capsys.readouterr().out
        head = load_file(out / "model.safetensors")["lm_head.weight"]
        assert (head == 0).any() == (more == ["--ignore"])


def test_sell_is_kept_in_the_config_where_it_does_not_run(dense: Path, tmp_path: Path, capsys: Any) -> None:
    pruned, sell, plain = (tmp_path / name for name in ("pruned", "sell", "plain"))
    assert main(["prune", str(dense), str(pruned), *MAGNITUDE]) == 0
    for folder, form in ((sell, "sell"), (plain, "macko")):
        assert main(["convert", str(pruned), str(folder), "--format", form, "--device", "cpu"]) == 0
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert config["format"] == form
        assert all(layer["format"] == "macko" for layer in config["layers"].values())
    assert "It is to be loaded on another device: sell runs on cuda only" in capsys.readouterr().out
    wanted = load_file(plain / "model.safetensors")
    for name, tensor in load_file(sell / "model.safetensors").items():
        assert torch.equal(tensor, wanted[name])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"macko {macko.__version__}\n")


def test_prune_ends_with_zeros_and_the_next_command(dense: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "aus gäbe"  # the space is quoted
    assert main(["prune", str(dense), str(out), *MAGNITUDE]) == 0
    *_, total, last = capsys.readouterr().out.splitlines()
    tensors = load_file(out / "model.safetensors")
    linear = [tensor for name, tensor in tensors.items() if "proj" in name or "lm_head" in name]
    zeros, size = sum(int((w == 0).sum()) for w in linear), sum(w.numel() for w in linear)
    assert f"({zeros / size:.1%})" in total
    assert f"{zeros:,} of {size:,} weights are zero" in total
    assert "of before" not in total
    assert shlex.split(last.partition("Next: ")[2]) == ["macko", "convert", str(out), f"{out}-packed"]


# ---- Nothing is lost -------------------------------------------------------------------------------------------------


def broken_save(error: BaseException) -> Callable[..., None]:
    """A save_pretrained that is stopped when all but the tokenizer is there, which would look complete."""

    def save(model: Any, folder: Any, **options: Any) -> None:
        Path(folder).mkdir(parents=True)
        model.config.save_pretrained(folder)
        save_file({"a": torch.ones(4)}, Path(folder) / "model.safetensors")
        raise error

    return save


def test_a_full_disk_while_layers_are_packed_is_told(dense: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["prune", str(dense), str(tmp_path / "source"), *MAGNITUDE]) == 0
    calls = []

    def full(tensors: Any, folder: Path) -> Any:
        calls.append(folder)
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("macko.integrations.transformers.on_disk", full)
        assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert said.endswith(f"No space left on device ({tmp_path / 'out'} is not written)\n")
    assert len(calls) == 1  # nothing is packed after that
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "source"}


def test_packed_layers_on_disk_keep_no_file_open(tmp_path: Path) -> None:
    """A process may have 1,024, a model more layers."""
    tensors = {"a": torch.arange(5).bfloat16(), "b": torch.empty(0), "c": torch.ones(3, 4).char()}
    open_before = len(os.listdir("/proc/self/fd"))
    held = [on_disk(tensors, tmp_path) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert not any(tmp_path.iterdir())
    for found in held:
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("values", ["fp8", "int8"])
def test_converted_8_bits_say_their_kind_to_who_loads_by_name(values: str, dense: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert main(["prune", str(dense), str(tmp_path / "in"), *MAGNITUDE]) == 0
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--values", values, "--device", "cpu"]) == 0
    state = load_file(tmp_path / "out/model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype="auto")
    dense_there = [name for name, _ in model.named_modules() if f"{name}.scales" not in state]
    macko.sparsify_(model, ignore=dense_there, progress=False)  # of other values
    model.load_state_dict(state, strict=False)
    found = {m.packed.kind for m in model.modules() if isinstance(m, macko.SparseLinear)}  # type: ignore[attr-defined]
    assert found == {KINDS.index(values)}


def test_a_pattern_of_few_zeros_is_converted(tmp_path: Path, capsys: Any) -> None:
    """8:10 has 20 % of zeros, less than formats that gain by zeros ask for."""
    small_llama(hidden_size=480, intermediate_size=320, num_hidden_layers=1).save_pretrained(tmp_path / "dense")
    assert main(["prune", str(tmp_path / "dense"), str(tmp_path / "in"), *MAGNITUDE, "--pattern", "8:10"]) == 0
    options = ["--format", "slide 8:10", "--values", "int8", "--device", "cpu"]
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), *options]) == 0
    assert "7 of 8 layers changed" in capsys.readouterr().out


@pytest.mark.parametrize("values", ["int8", "fp8"])
def test_layers_that_round_their_input_are_judged_by_the_rounded_one(values: str) -> None:
    model = small_llama(hidden_size=192, intermediate_size=320, num_hidden_layers=1)
    macko.prune_(model, pattern="6:8")
    dense_bits, prompt = bench._bits(model), torch.arange(9)[None]
    macko.sparsify_(model, format="slide", values=values)
    assert all(found["of_bound"] <= 1 for found in bench.check_layers(model, prompt, (1, 9), dense_bits))
    layer = model.model.layers[0].mlp.up_proj
    on_gpu = SimpleNamespace(is_cuda=True)  # where sums of float8 keep 13 bits, of 384 expanded columns here
    assert layer.packed.cuts(on_gpu) == (13 if values == "fp8" else 0)
    assert layer.packed.cuts(prompt) == 0
    layer.register_forward_hook(lambda layer, args, y: y * 1.02)
    (bad,) = bench.check_layers(model, prompt, (9,), dense_bits)
    assert bad["of_bound"] > 1


@pytest.mark.parametrize("command", ["prune", "convert"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (SafetensorError("I/O error: No space left on device"), 1, "No space left on device"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
    ],
    ids=["ctrl_c", "full_disk", "full_disk_of_python"],
)
@pytest.mark.slow
def test_what_stops_the_writing_leaves_no_half_of_it(
    command: str, overwrite: bool, error: BaseException, code: int, said: str, dense: Path, tmp_path: Path, capsys: Any
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    assert main(["prune", str(dense), str(source), *MAGNITUDE]) == 0
    more = MAGNITUDE if command == "prune" else ("--device", "cpu")
    arguments = [command, str(source), str(out), *more]
    if overwrite:
        assert main(arguments) == 0
        (out / "notes.txt").write_text("of the old one")
        arguments.append("--overwrite")
    before = {path.name: path.read_bytes() for path in out.iterdir()} if overwrite else {}
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.save_pretrained", broken_save(error))
        assert main(arguments) == code
    assert one_line(capsys).endswith(f"{said} ({out} is not written)")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["dense", "source", *(["out"] if overwrite else [])]
    )
    assert {path.name: path.read_bytes() for path in out.glob("*")} == before
    assert main(arguments) == 0  # nothing is in its way
    assert (out / "tokenizer_notes.txt").exists()
    assert not (out / "notes.txt").exists()
    assert not list(tmp_path.glob("out[.]*"))


@pytest.mark.slow
def test_leftovers_of_a_killed_run_are_in_nobodys_way(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = "import sys; from macko.cli import main; from transformers import PreTrainedModel; import os, signal\n"
    kill = "PreTrainedModel.save_pretrained = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
    arguments = ["prune", str(dense), str(out), *MAGNITUDE]
    run = subprocess.run([sys.executable, "-c", f"{before}{kill}main({arguments!r})"], capture_output=True)
    assert run.returncode == -signal.SIGKILL
    assert not out.exists()
    (tmp_path / "out.unfinished" / "result").mkdir()
    (tmp_path / "out.unfinished" / "result" / "config.json").write_text("{}")
    assert main(arguments) == 0
    assert (out / "model.safetensors").exists()
    assert not list(tmp_path.glob("out[.]*"))


def test_out_is_known_to_be_writable_and_large_enough_before_anything_is_loaded(
    dense: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned, out = tmp_path / "pruned", str(tmp_path / "out")
    assert main(["prune", str(dense), str(pruned), *MAGNITUDE]) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedModel.from_pretrained", None)
        patch.setattr("macko.integrations.transformers.load_packed", None)
        for command, more in (("prune", MAGNITUDE), ("convert", ())):
            refused([command, str(pruned), str(dense / "config.json" / "out"), *more], "config.json", capsys)
        patch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10))  # type: ignore[attr-defined]
        assert main(["prune", str(pruned), out, *MAGNITUDE]) == 1
        size = (pruned / "model.safetensors").stat().st_size
        assert f"has 10 B left, {out} may take {format_bytes(size)}" in one_line(capsys)
    assert not list(tmp_path.glob("out*"))
    # What is packed takes less, by how much is not known: so it only says so. It is there twice meanwhile.
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10))  # type: ignore[attr-defined]
    assert main(["convert", str(pruned), out, "--device", "cpu"]) == 0
    assert f"has 10 B left, {out} may take {format_bytes(2 * size)}" in one_line(capsys)


def test_a_name_on_the_hub_is_resolved_or_refused_before_any_work(
    dense: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append(name)
        if name == "acme/tiny":
            return str(dense)
        raise FileNotFoundError("offline, and it is not in the cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    pruned, packed = tmp_path / "pruned", tmp_path / "packed"
    assert main(["prune", "acme/tiny", str(pruned), *MAGNITUDE]) == 0
    assert (pruned / "tokenizer_notes.txt").read_text() == "kept"
    assert main(["convert", "acme/tiny", str(packed), "--min-sparsity", "0"]) == 1
    capsys.readouterr()
    for command, more in (("prune", (str(tmp_path / "out"), *MAGNITUDE)), ("convert", (str(tmp_path / "out"),))):
        assert main([command, "acme/tyni", *more]) == 1
        wanted = "acme/tyni: there is no such folder, nor a model of that name on the Hub: offline, and"
        assert wanted in one_line(capsys)
    refused(["prune", "acme/huge", str(pruned), *MAGNITUDE], "is not empty", capsys)
    refused(["inspect", "models/of/acme"], "models/of/acme: there is no such folder", capsys)
    assert asked == ["acme/tiny"] * 2 + ["acme/tyni"] * 2
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.slow
def test_an_interrupted_prune_resumes_to_the_same_bits(
    method: str, dense: Path, text: str, tmp_path: Path, capsys: Any
) -> None:
    whole, out, work = tmp_path / "whole", tmp_path / "out", tmp_path / "out.unfinished"
    options = ["--method", method, "--calibration", text, "--samples", "8", "--length", "32"]
    assert main(["prune", str(dense), str(whole), *options]) == 0
    arguments = ["prune", str(dense), str(out), *options]
    pruned: list[str] = []

    def stopping(at: int | None) -> Callable[..., Tensor]:
        def prune(*given: Any) -> Tensor:
            pruned.append(method)
            if len(pruned) == at:
                raise KeyboardInterrupt
            return METHODS[method](*given)

        return prune

    for at, kept in ((5, 4), (6, 9), (None, 14)):  # in the first block, in the second, and to the end
        pruned.clear()
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("macko.pruning.prune.METHODS", {**METHODS, method: stopping(at)})
            assert main([*arguments, "--resume"]) == (130 if at else 0)
        if at is None:
            break
        said = capsys.readouterr().err.splitlines()[-1]
        assert said == f"macko prune: interrupted ({kept} pruned layers are kept in {work}: run it again with --resume)"
        assert not out.exists()
        for more, message in (
            (["--sparsity", "0.6"], "was begun with --sparsity 0.5, now it is 0.6"),
            (["--length", "16"], "was begun with --length 32, now it is 16"),
            (["--ignore", "o_proj"], "was begun with --ignore ['lm_head'], now it is ['lm_head', 'o_proj']"),
        ):
            refused([*arguments, "--resume", *more], message, capsys)
        assert main(["prune", str(whole), str(out), *options, "--resume"]) == 1
        assert f"was begun with IN {str(dense)!r}, now it is {str(whole)!r}" in one_line(capsys)
    assert len(pruned) == 14 - 9
    assert not work.exists()
    wanted = load_file(whole / "model.safetensors")
    for name, tensor in load_file(out / "model.safetensors").items():
        assert_same_bits(tensor, wanted[name])


@pytest.mark.slow
def test_without_resume_it_starts_anew_and_says_so(
    dense: Path, text: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, work = tmp_path / "out", tmp_path / "out.unfinished"
    arguments = ["prune", str(dense), str(out), "--calibration", text, "--length", "32"]
    with monkeypatch.context() as patch:
        full = SafetensorError("No space left on device")
        patch.setattr("transformers.PreTrainedModel.save_pretrained", broken_save(full))
        refused(arguments, f"No space left on device (14 pruned layers are kept in {work}", capsys)
    assert not (work / "result").exists()
    with open(work / "lock") as lock:  # as a run that is at it
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused([*arguments, "--resume"], f"{work}: another macko is writing there", capsys)
    assert main([*arguments, "--sparsity", "0.6"]) == 0
    assert f"14 layers of an earlier run are removed from {work}" in one_line(capsys)
    assert not work.exists()
    assert main(["prune", str(dense), str(out), *MAGNITUDE, "--overwrite", "--resume"]) == 1
    assert "--resume is for wanda and moe-pruner and sparsegpt" in one_line(capsys)


# ---- The other commands ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # so that logits are the same
    out = tmp_path / "results.jsonl"
    sizes = ["--batch", "1", "2", "--prompt-tokens", "4", "8", "--new-tokens", "2", "--sparsity", "0.7", "0.5"]
    assert main(["bench", "random:tiny", *sizes, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "over dense" in printed
    assert "apart at most" in printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    timed = [(row["model"], row["sparsity"], row["batch"]) for row in rows if row["what"] == "decode"]
    assert timed == [
        (*model, batch) for model in (("dense", 0.0), ("sparse", 0.5), ("sparse", 0.7)) for batch in (1, 2)
    ]
    assert [row["prompt_tokens"] for row in rows if row["what"] == "prefill"] == [4, 8] * 3
    assert all(row["tokens_per_s"] > 0 for row in rows if row["what"] == "prefill")
    assert all(row["ms"] is None or row["ms"] > 0 for row in rows if row["what"] == "decode")  # None: a noisy machine
    logits = [row for row in rows if row["what"] == "logits"]
    assert [(row["sparsity"], row["error"]) for row in logits] == [(0.5, 0.0), (0.7, 0.0)]
    for row in logits:
        assert [found["tokens"] for found in row["layers"]] == [1, 2, 8]
        assert all(0 < found["of_bound"] <= 1 for found in row["layers"])


@pytest.mark.parametrize(("engine", "lengths"), [("transformers", [96, 32, 128]), ("vllm", [95, 32, 127])])
def test_lengths_of_bench_end_with_the_models_positions(
    engine: str, lengths: list[int], dense: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody says them: a length that is asked for and does not fit is an error."""
    monkeypatch.setattr(runs, "PROMPT_TOKENS_ON_CPU", runs.PROMPT_TOKENS)
    seen: list[list[int]] = []

    def measure(*given: Any) -> list[runs.Result]:
        seen.extend(options.prompt_tokens for options in given if hasattr(options, "prompt_tokens"))
        raise ValueError("enough")

    monkeypatch.setattr(bench, "measure_all", measure)
    monkeypatch.setattr(engines, "_forked", measure)
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: name)
    command = ["bench", str(dense), "--engine", engine, *(["--sparsity", "0.5"] if engine == "transformers" else [])]
    refused(command, "enough", capsys)
    for more in (["--prompt-tokens", "16", "129"], ["--prompt-tokens", "97"], ["--new-tokens", "128"]):
        assert main([*command, *more]) == 1
        assert f"--prompt-tokens and --new-tokens take {129 + (engine == 'vllm')} positions" in one_line(capsys)
    assert seen == [lengths]


def no_times(call: Any, on_gpu: bool, calls: int = 3) -> list[float]:
    """Seconds that say nothing: as long with a call more as without. Nothing is run for them."""
    return [2.0, 1.0, 3.0]


def test_weights_of_random_models_may_have_been_bfloat16() -> None:
    def low_bits(weights: Tensor) -> Tensor:
        return weights.view(torch.int16) & 7

    for dtype in (None, "bfloat16"):
        model = bench._load("random:tiny", torch.device("cpu"), torch.float16, dtype)
        drawn = model.lm_head.weight.detach()
        assert model.config.dtype == torch.float16
        assert all(buffer.dtype == torch.float32 for buffer in model.buffers()), "of the positions"
        dummy = torch.empty(64, 64, dtype=torch.float16)
        plugin = mock.Mock()  # vLLM is not here
        with mock.patch.dict(
            sys.modules, {"macko.integrations.vllm": plugin, "macko.integrations.vllm_experts": mock.Mock()}
        ):
            engines._fill_dummies(0.5, getattr(torch, dtype) if dtype else None)
        plugin.convert_weight("a layer", dummy)
        large = drawn[drawn.abs() > 2**-14]  # smaller ones are denormals
        assert drawn.dtype == torch.float16
        assert bool(low_bits(large).any()) == bool(low_bits(dummy).any()) == (dtype is None)
        assert 0.4 < (dummy == 0).float().mean() < 0.6


@pytest.mark.slow
def test_bench_against_fewer_bits_shows_no_figure_that_noise_hides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(runs, "seconds", no_times)
    out = tmp_path / "results.jsonl"
    sizes = ["--batch", "1", "--prompt-tokens", "4", "--new-tokens", "2", "--sparsity", "0.5", "--dtype", "bfloat16"]
    assert main(["bench", "random:tiny", *sizes, "--against", "fp8", "int4", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "fp8, 28 layers, logits: " in printed
    assert "int4, 24 layers, logits: " in printed  # 688 columns are no groups of 128
    assert "dense, decode batch 1 prompt 4: too noisy to tell" in printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    decode = [(row["model"], row["ms"], row["tokens_per_s"]) for row in rows if row["what"] == "decode"]
    assert decode == [(side, None, None) for side in ("dense", "sparse", "fp8", "int4")]
    assert all(row["ms"] == 1000 for row in rows if row["what"] == "prefill")
    cells = [line.split()[-3:] for line in printed.splitlines() if re.match("decode +1 +4 ", line)]
    assert cells == [["-"] * 3] * 4
    assert "outputs of each layer equal to dense but for rounding: yes (worst 0." in printed


def test_bench_measures_again_where_noise_is_as_large_as_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def difference(less: list[list[float]], more: list[list[float]]) -> float | None:
        of_call = {"less": iter(less), "more": iter(more)}
        monkeypatch.setattr(runs, "seconds", lambda call, on_gpu: next(of_call[call]))
        found = runs.difference("more", "less", False)  # type: ignore[arg-type]
        assert not list(of_call["more"])  # as often as expected, not more
        return found

    assert difference([[10, 10.5, 10.2]], [[15, 15.1, 19]]) == 5
    assert difference([[10, 30, 31], [10, 10, 10]], [[15, 15, 16], [15, 15, 15]]) == 5
    assert difference([[16, 17, 18], [10, 10, 10]], [[15, 15, 16], [15, 15, 15]]) is not None  # under zero at first
    assert difference([[1, 9, 9]] * 4, [[2, 9, 9]] * 4) is None
    assert difference([[5, 5, 5]] * 4, [[5, 5, 5]] * 4) is None


def test_a_rank_is_profiled_anew_after_a_call_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Profile:
        busy = 2e6

        def __init__(self, activities: Any) -> None:
            self.start, self.stop = lambda: started.append(self), lambda: None

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(engines.runs, "gpu_events", lambda profile: profile)
    monkeypatch.setattr(engines.runs, "busy_us", lambda profile: profile.busy)
    llm = SimpleNamespace(apply_model=lambda function: [function(nn.Identity())])
    with pytest.raises(ZeroDivisionError):
        engines.gpu_seconds(llm, lambda: 1 / 0)
    assert engines.gpu_seconds(llm, lambda: None) == 2
    assert len(set(map(id, started))) == len(started) == 2


def test_bench_says_loudly_where_outputs_are_wrong() -> None:
    found = [{"tokens": 1, "of_bound": 0.96, "layer": "a"}, {"tokens": 8, "of_bound": 0.5, "layer": "b"}]
    assert bench._verdict(found).endswith("but for rounding: yes (worst 0.96 of the bound, at 1 token, a)")
    found[1]["of_bound"] = float("inf")
    assert bench._verdict(found).endswith("NO, THEY ARE WRONG (worst inf of the bound, at 8 tokens, b)")


def sends_a_line(side: str, folder: str, options: argparse.Namespace, given: Any, pipe: Any) -> None:
    found = runs.result(runs.Side(side, 0.5, None), "decode", 2, 8, 2, 0.5, 3000)
    about = {"vllm": "1", "NVML": os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]}
    pipe.send((None, {"model": side, "ms": None, **about}))
    pipe.send((found, {**dataclasses.asdict(found), **about}))


def cannot_fork(measure: Any, *what: Any) -> None:
    torch.cuda._is_in_bad_fork = lambda: "forkserver" in type(multiprocessing.current_process()).__name__.lower()
    engines._run(measure, *what)


def never_ends(*args: Any) -> None:
    time.sleep(60)


@pytest.mark.slow
def test_each_side_of_an_engine_writes_its_lines_or_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, forks = argparse.Namespace(json=str(tmp_path / "lines")), tmp_path / "forks"
    watched = [forks]
    os.register_at_fork(after_in_child=lambda: [path.write_text("") for path in watched])
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.setattr(engines, "_measure", sends_a_line)
    found = engines._forked("macko", "", options, {})
    assert [(result.model, result.ms) for result in found] == [("macko", 500)]
    assert "macko, decode batch 2 prompt 8:  500.000 ms,      4.0 tokens/s, weights 3.00 kB" in capsys.readouterr().out
    with monkeypatch.context() as patch:  # where vLLM's import touches CUDA a fork of that is of no use either
        patch.setattr(engines, "_run", cannot_fork)
        assert engines._forked("fp8", "", argparse.Namespace(json=None), {})[0].model == "fp8"
    capsys.readouterr()
    monkeypatch.setattr(engines, "_measure", never_ends)
    monkeypatch.setattr(engines, "TIMEOUT", 0.1)
    assert engines._forked("fp8", "", options, {}) == []  # killed: the next side needs its memory
    assert not multiprocessing.active_children()
    assert "fp8: no times" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    said = [(line["model"], line["ms"], line["vllm"], line["NVML"]) for line in lines]
    assert said == [("macko", None, "1", "1"), ("macko", 500, "1", "1")]
    assert not forks.exists()  # this process may have touched CUDA: a fork of it could not
    watched.clear()


def test_bench_refuses_before_it_measures(dense: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "seconds", None)
    load = mock.Mock(wraps=bench._load)
    monkeypatch.setattr(bench, "_load", load)
    for more, message in (
        (["--format", "elves"], ": --format is 'elves'"),
        (["--format", "tile", "--values", "fp8"], "--values is 'fp8', format 'tile' takes exact"),
        (["--values", "int8", "--sparsity", "0.5", "0.6"], "--values int8 rounds the model: give one --sparsity"),
        (["--sparsity", "0.5", "50"], "sparsity is 50"),
        (["--json", str(dense)], "Is a directory"),
        (["--weights-dtype", "bfloat16"], "--weights-dtype is of random: alone, MODEL is "),
        (["--prompt-tokens", "120"], "--prompt-tokens and --new-tokens take 152"),
        (["--sparsity", "0.1", "0.5"], "has no layer to pack: under 25% sparse it would not pay"),
        ([], "has no layer to pack: under 25% sparse it would not pay"),
    ):
        refused(["bench", str(dense), *more], message, capsys)
        loads = "--prompt-tokens" in more or "no layer" in message
        assert load.called == loads, "the model's config says how long a prompt may be"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(["bench", str(dense), "--format", "sell"], "--format sell runs on cuda only", capsys)


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True])
def test_bench_finds_the_layer_that_is_wrong(merge: bool, tiny_llama: TinyLlama) -> None:
    model = copy.deepcopy(tiny_llama.model).half()
    macko.prune_(model, 0.5)
    dense_bits, prompt = bench._bits(model), torch.arange(6)[None]
    macko.sparsify_(model, merge=merge, progress=False)
    good = bench.check_layers(model, prompt, (1, 6, 9), dense_bits)
    assert [found["tokens"] for found in good] == [1, 6]
    assert all(0 < found["of_bound"] <= 1 for found in good)

    name = "model.layers.1.mlp.down_proj"
    down = model.get_submodule(name)
    handle = down.register_forward_hook(lambda layer, args, y: y + 0.1 * (torch.arange(y.shape[-1]) == 7).to(y.dtype))
    bad = bench.check_layers(model, prompt, (1, 6), dense_bits)
    assert all(found["of_bound"] > 1 and found["layer"] == name for found in bad)
    handle.remove()
    dense = down.to_linear()
    dense.weight[3, 5:7] = dense.weight[3, 5:7].flip(0)  # two values change places
    assert dense.weight[3, 5] != dense.weight[3, 6]
    model.set_submodule(name, macko.SparseLinear.from_linear(dense))
    with pytest.raises(ValueError, match=rf"{name}: the packed weight is not the dense one"):
        bench.check_layers(model, prompt, (1,), dense_bits)


def test_doctor_is_python_m_macko(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("macko.measure.doctor.main", lambda: 7)
    assert main(["doctor"]) == 7


def test_patterns_found_in_a_mask() -> None:
    def holds(pattern: str) -> Tensor:
        layer = torch.nn.Linear(240, 8)
        macko.prune_(layer, pattern=pattern)
        return layer.weight

    for pattern in ("2:4", "6:8", "4:6", "1:4", "10:12", "14:16"):
        assert pattern_names(matching_patterns(holds(pattern), PATTERNS)) == [pattern]
    assert pattern_names(matching_patterns(torch.ones(4, 240), PATTERNS)) == []
    assert pattern_names(matching_patterns(torch.zeros(4, 7), PATTERNS)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("density", [0.02, 0.1, 0.5, 0.9])
def test_expected_bytes_are_those_of_a_random_mask(dtype: torch.dtype, density: float) -> None:
    w = random_weight(256, 4096, density, dtype)
    packed = macko.MackoWeight.from_dense(w)
    share = (packed.values.nbytes + packed.deltas.nbytes) / w.nbytes
    assert packed_share(density, 8 * w.element_size()) == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize(
    ("commands", "lie", "message"),
    [
        ("convert prune eval", {"dtype": "dense"}, "no folder that transformers can read: AttributeError"),
        ("convert prune", {"architectures": {"a": 1}}, "no folder that transformers can read: "),  # it says how
        ("convert", {"hidden_size": 2**24, "intermediate_size": 2**24}, "config.json is of a model of "),  # 2**50
    ],
)
def test_a_config_that_transformers_trips_over_is_told_in_one_line(
    commands: str, lie: dict[str, Any], message: str, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = shutil.copytree(dense, tmp_path / "in"), str(tmp_path / "out")
    with edited(folder / "config.json") as config:
        config |= lie
    for command in commands.split():
        options = {"convert": [out], "prune": [out, *MAGNITUDE], "eval": []}[command]
        assert main([command, str(folder), *options]) == 1
        assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "in"}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layers"), [("tiny", 29), ("tiny-mixtral", 13)])  # of experts a row a projection
def test_bench_of_a_dense_model(
    model: str, layers: int, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "seconds", no_times)
    sizes = ["--batch", "1", "--prompt-tokens", "4", "--new-tokens", "2"]
    out = tmp_path / "lines.jsonl"
    assert main(["bench", f"random:{model}", "--format", "dense12", *sizes, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"{layers} of {layers} layers changed" in printed  # lm_head too, and no router
    assert "dense12, outputs of each layer equal to dense but for rounding: yes" in printed
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["model"] for line in lines} == {"dense", "dense12"}
    assert {(line["sparsity"], line["dtype"], line["format"]) for line in lines} == {(0.0, "bfloat16", "dense12")}
    if model == "tiny":
        assert main(["bench", "random:tiny", "--format", "dense12", "--dtype", "float16", *sizes]) == 1
        assert "or bfloat16, whose mantissa has 7 bits, lacks" in capsys.readouterr().err
