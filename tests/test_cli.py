"""The command line, end to end on small folders, and the import of compressed-tensors checkpoints written by hand."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import macko
from macko import bench
from macko.cli import main, pieces
from macko.files import Checkpoint
from macko.integrations.compressed_tensors import decode, sparsity_format
from macko.layers import packed_share, patterns
from tests.common import assert_same_bits, random_weight, torch_threads
from tests.tiny_llama import TinyLlama, needs_transformers


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A folder with a small dense model and files that are no weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 90, "hidden_size": 48, "intermediate_size": 104, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "tokenizer_notes.txt").write_text("kept")
    return tmp_path / "dense"


@needs_transformers
def test_prune_then_convert_then_load(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    pruned, sparse = str(tmp_path / "pruned"), str(tmp_path / "sparse")
    assert main(["prune", str(dense), pruned, "--method", "magnitude", "--pattern", "2:4"]) == 0
    assert main(["convert", pruned, sparse, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "model.layers.0.mlp.up_proj" in printed
    assert "14 of 15 layers changed" in printed
    for folder in (pruned, sparse):
        assert (Path(folder) / "tokenizer_notes.txt").read_text() == "kept"
    tokens = torch.arange(8)[None]
    wanted = AutoModelForCausalLM.from_pretrained(pruned)(tokens).logits
    loaded = AutoModelForCausalLM.from_pretrained(sparse)
    assert sum(isinstance(module, macko.SparseLinear) for module in loaded.modules()) == 14
    assert_same_bits(loaded(tokens).logits, wanted)

    for folder, form in ((pruned, "dense"), (sparse, "macko")):
        assert main(["inspect", folder]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if "layers.0.mlp.up_proj" in line)
        assert all(word in line.split() for word in ("104x48", "0.500", "2:4", form))


@needs_transformers
def test_what_the_commands_refuse(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["convert", str(dense), str(tmp_path / "out")], "no layer that is sparse enough: prune it first"),
        (["convert", str(dense), str(dense)], "is not empty"),
        (["convert", str(tmp_path / "nowhere"), str(tmp_path / "out")], "nowhere"),
        (["convert", str(dense), str(tmp_path / "out"), "--format", "elves"], "format is 'elves'"),
        (["prune", str(dense), str(tmp_path / "out")], "--method wanda needs --calibration FILE"),
        (["prune", str(dense), str(tmp_path / "out"), "--method", "magnitude", "--pattern", "4:2"], "pattern is '4:2'"),
        (["inspect", str(tmp_path)], "has no *.safetensors"),
        (["bench", "random:elves"], "expected a folder, or random:"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@needs_transformers
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
    assert all(row["tokens_per_s"] > 0 for row in rows if row["what"] != "logits")
    logits = [row for row in rows if row["what"] == "logits"]
    assert [(row["sparsity"], row["error"]) for row in logits] == [(0.5, 0.0), (0.7, 0.0)]
    for row in logits:
        assert [found["tokens"] for found in row["layers"]] == [1, 2, 8]
        assert all(0 < found["of_bound"] <= 1 for found in row["layers"])


@pytest.mark.slow
@needs_transformers
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


def test_bench_holds_a_model_on_a_gpu_as_its_batch_asks_for() -> None:
    options = argparse.Namespace(format="auto", batch=[1, 8, 32])
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert bench._ways(options, gpu) == [(None, [1]), ("batch", [8, 32])]
    assert bench._ways(options, cpu) == [(None, [1, 8, 32])]
    assert bench._ways(argparse.Namespace(format="auto", batch=[8]), gpu) == [("batch", [8])]
    assert bench._ways(argparse.Namespace(format="sell", batch=[1, 8]), gpu) == [(None, [1, 8])]


def test_doctor_is_python_m_macko(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("macko.__main__.main", lambda: 7)
    assert main(["doctor"]) == 7


def test_pieces_of_a_text() -> None:
    tokens = torch.arange(100)
    assert [piece[0, 0].item() for piece in pieces(tokens, 3, 20)] == [0, 40, 80]
    assert len(pieces(tokens, 128, 30)) == 3
    assert pieces(tokens, 1, 100)[0].tolist() == [tokens.tolist()]
    with pytest.raises(ValueError, match="has 100 tokens"):
        pieces(tokens, 4, 101)


def test_patterns_found_in_a_mask() -> None:
    def holds(pattern: str) -> Tensor:
        layer = torch.nn.Linear(240, 8)
        macko.prune_(layer, pattern=pattern)
        return layer.weight

    assert patterns(holds("2:4")) == ["2:4"]
    assert patterns(holds("6:8")) == ["6:8"]
    assert patterns(holds("4:6")) == ["4:6"]
    assert patterns(holds("1:4")) == ["1:4"]
    assert patterns(holds("10:12")) == ["10:12"]
    assert patterns(holds("14:16")) == ["14:16"]
    assert patterns(torch.ones(4, 240)) == []
    assert patterns(torch.zeros(4, 7)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("density", [0.02, 0.1, 0.5, 0.9])
def test_expected_bytes_are_those_of_a_random_mask(dtype: torch.dtype, density: float) -> None:
    w = random_weight(256, 4096, density, dtype)
    packed = macko.MackoWeight.from_dense(w)
    share = (packed.values.nbytes + packed.deltas.nbytes) / w.nbytes
    assert packed_share(density, 8 * w.element_size()) == pytest.approx(share, rel=0.02)


# ---- compressed-tensors ----------------------------------------------------------------------------------------------


def as_bitmask(w: Tensor, two_four: bool) -> dict[str, Tensor]:
    """A weight in the words of the format, bit by bit."""
    rows, cols = w.shape
    bitmask = torch.zeros(rows, (cols + 7) // 8, dtype=torch.uint8)
    values: list[Tensor] = []
    offsets: list[int] = []
    for row in range(rows):
        offsets.append(len(values))
        for col in range(cols):
            group = w[row, col // 4 * 4 : col // 4 * 4 + 4]
            kept = col % 4 in group.abs().topk(2).indices.tolist() if two_four else w[row, col] != 0
            if kept:
                bitmask[row, col // 8] |= 1 << col % 8
                values.append(w[row, col])
    flat = torch.stack(values)
    if two_four:
        return {
            "shape": torch.tensor([[rows], [cols]]), "compressed": flat.view(rows, cols // 2), "bitmask": bitmask,
        }  # fmt: skip
    return {
        "shape": torch.tensor([rows, cols]), "compressed": flat, "bitmask": bitmask,
        "row_offsets": torch.tensor(offsets),
    }  # fmt: skip


def test_decode_a_worked_example() -> None:
    # Row 0 holds columns 0 and 9, row 1 column 2: bit c % 8 of byte c / 8.
    bitmask = torch.tensor([[0b1, 0b10], [0b100, 0]], dtype=torch.uint8)
    w = decode(torch.tensor([2, 10]), bitmask, torch.tensor([1.0, 2, 3], dtype=torch.float16))
    assert w.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0, 0, 2], [0, 0, 3, 0, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("two_four", [False, True])
def test_decode_random_weights(two_four: bool) -> None:
    w = random_weight(9, 44, 0.4, torch.bfloat16)
    if two_four:
        layer = torch.nn.Linear(44, 9, dtype=torch.bfloat16)
        layer.weight.data = w
        macko.prune_(layer, pattern="2:4")
        w = layer.weight.data
        w[:, :8] = 0  # groups whose values are stored zeros
    parts = as_bitmask(w, two_four)
    assert_same_bits(decode(parts["shape"], parts["bitmask"], parts["compressed"]), w)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.update(shape=torch.tensor([9])), "two whole numbers"),
        (lambda p: p.update(shape=torch.tensor([9.0, 44])), "two whole numbers"),
        (lambda p: p.update(shape=torch.tensor([9, 50])), "bitmask is"),
        (lambda p: p.update(shape=torch.tensor([-9, 44])), "bitmask is"),
        (lambda p: p.update(shape=torch.tensor([9, 41])), "bits past column 41"),
        (lambda p: p.update(bitmask=p["bitmask"].view(torch.int8)), "bitmask is"),
        (lambda p: p.update(compressed=p["compressed"][:-1]), "bits set, compressed has"),
        (lambda p: p.update(compressed=p["compressed"].view(torch.int16)), "compressed is"),
    ],
)
def test_decode_refuses_what_does_not_fit(change: Callable[[dict[str, Tensor]], None], message: str) -> None:
    w = torch.ones(9, 44, dtype=torch.bfloat16)
    parts = as_bitmask(w, two_four=False)
    change(parts)
    with pytest.raises(ValueError, match=message):
        decode(parts["shape"], parts["bitmask"], parts["compressed"])


def test_formats_of_compressed_tensors() -> None:
    sparse = {"format": "sparse-bitmask"}
    for config in (
        {"quantization_config": {"quant_method": "compressed-tensors", "sparsity_config": sparse}},
        {"compression_config": {"sparsity_config": sparse}},
        {"sparsity_config": sparse},
    ):
        assert sparsity_format(config) == "sparse-bitmask"
    assert sparsity_format({}) is None
    assert sparsity_format({"quantization_config": None, "sparsity_config": {"format": "dense"}}) is None
    with pytest.raises(ValueError, match="format 'marlin-24'"):
        sparsity_format({"sparsity_config": {"format": "marlin-24"}})
    with pytest.raises(ValueError, match="quantised too"):
        sparsity_format({"quantization_config": {"sparsity_config": sparse, "config_groups": {"group_0": {}}}})


@needs_transformers
@pytest.mark.parametrize("two_four", [False, True])
def test_convert_an_old_checkpoint(dense: Path, tmp_path: Path, two_four: bool, capsys: Any) -> None:
    from transformers import AutoModelForCausalLM

    pruned, old, sparse = tmp_path / "pruned", tmp_path / "old", tmp_path / "sparse"
    options = ["--pattern", "2:4"] if two_four else ["--sparsity", "0.6"]
    assert main(["prune", str(dense), str(pruned), "--method", "magnitude", *options]) == 0
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(pruned / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts = as_bitmask(tensor, two_four)
            tensors |= {f"{name.removesuffix('.weight')}.{key}": part for key, part in parts.items()}
        else:
            tensors[name] = tensor
    old.mkdir()
    save_file(tensors, old / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((pruned / "config.json").read_text())
    about = {
        "format": "sparse-24-bitmask" if two_four else "sparse-bitmask",
        "targets": ["Linear"],
        "ignore": ["lm_head"],
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "sparsity_config": about,
    }  # fmt: skip
    (old / "config.json").write_text(json.dumps(config))

    capsys.readouterr()
    assert main(["inspect", str(old)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "layers.0.mlp.up_proj" in line)
    assert about["format"] in line.split()
    assert main(["convert", str(old), str(sparse), "--device", "cpu"]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(sparse)
    wanted = AutoModelForCausalLM.from_pretrained(pruned)
    assert sum(isinstance(module, macko.SparseLinear) for module in loaded.modules()) == 14
    tokens = torch.arange(8)[None]
    assert_same_bits(loaded(tokens).logits, wanted(tokens).logits)
    with Checkpoint(sparse) as file:
        assert_same_bits(
            file.packed("model.layers.0.mlp.up_proj").to_dense(), wanted.model.layers[0].mlp.up_proj.weight
        )
