"""transformers and PEFT: a model converts as it loads, saves packed, comes back bit for bit, and takes adapters."""

import copy
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import macko
from macko import MackoWeight, cli
from macko.files import Checkpoint
from macko.integrations import _DUE, tensor_parallel
from tests.common import assert_same_bits, assert_same_model, edited, two_processes
from tests.tiny_llama import TinyLlama, small_llama

transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))


@pytest.fixture(scope="module")
def pruned_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model, folder = small_llama(attention_bias=True), tmp_path_factory.mktemp("dense")
    macko.prune_(model, 0.5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture
def pruned(pruned_once: tuple[Any, Path], tmp_path: Path) -> tuple[Any, Path]:
    """A dense pruned model, and the folder it is saved in, of one's own."""
    torch.manual_seed(0)
    return copy.deepcopy(pruned_once[0]), shutil.copytree(pruned_once[1], tmp_path / "dense")


TOKENS = torch.arange(12).view(2, 6)


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def sparse_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, macko.SparseLinear)}


@pytest.mark.slow
def test_a_transformers_that_lacks_a_name_is_told_in_a_warning(tmp_path: Path) -> None:
    """And what would be saved wrongly without the hooks is refused."""
    script = """
import sys
import warnings
import pytest
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, core_model_loading
theirs = core_model_loading.rename_source_key
del core_model_loading.rename_source_key  # as if this transformers had no such thing
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import macko
core_model_loading.rename_source_key = theirs  # for its own use
(text,) = (str(warning.message) for warning in caught if "macko" in str(warning.message))
assert f"does not work with transformers {transformers.__version__}" in text and "rename_source_key" in text, text
assert "What will not work: save_pretrained of models with sparse layers" in text, text
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
macko.prune_(model, 0.6)
model.save_pretrained(sys.argv[1] + "/dense")
macko.sparsify_(model, progress=False)
with pytest.raises(ValueError, match=r"save_pretrained: .*sparse layers.* use macko.save_model"):
    model.save_pretrained(sys.argv[1] + "/sparse")
macko.save_model(model, sys.argv[1] + "/sparse.safetensors")
packed = LlamaForCausalLM.from_pretrained(sys.argv[1] + "/dense", quantization_config=macko.MackoConfig())
assert any(isinstance(module, macko.SparseLinear) for module in packed.modules())
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert [path.name for path in tmp_path.iterdir() if "sparse" in path.name] == ["sparse.safetensors"]


@pytest.mark.parametrize(
    "names",
    [
        [name for name in _DUE if not name.startswith("sentence_")],
        pytest.param([name for name in _DUE if name.startswith("sentence_")], marks=pytest.mark.slow),
    ],
)
def test_a_registration_that_fails_lets_libraries_be_imported(names: list[str]) -> None:
    script = """
import importlib, sys, warnings
from macko.integrations import _DUE
for integration, _ in _DUE.values():
    sys.modules[integration] = None  # an ImportError for whoever imports it
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for name in sys.argv[1:]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert name.startswith(error.name), error  # not installed, or of another version
texts = [str(warning.message) for warning in caught]
for name in set(sys.argv[1:]) & sys.modules.keys():
    library, lost = name.partition(".")[0], _DUE[name][1]
    start = f"macko does not work with {library} {sys.modules[library].__version__}"
    assert any(text.startswith(start) and text.endswith(lost) for text in texts), (name, texts)
"""
    subprocess.run([sys.executable, "-c", script, *names], check=True)


@pytest.mark.slow
def test_importing_macko_does_not_import_transformers() -> None:
    code = """
import sys
import macko
assert "transformers" not in sys.modules
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as configs
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as quantizers
assert "macko" in quantizers and configs["macko"] is macko.MackoConfig
from transformers import PreTrainedModel
wrapped = PreTrainedModel.save_pretrained
macko.integrations.register()  # twice does no harm
del configs["macko"], quantizers["macko"], sys.modules["macko.integrations.transformers"]
del sys.modules["macko.integrations.saving"]
macko.integrations.register()  # as where transformers was imported first
assert "macko" in configs and "macko" in quantizers
assert PreTrainedModel.save_pretrained is wrapped and not hasattr(wrapped.__wrapped__, "__wrapped__")
PreTrainedModel.save_pretrained = wrapped.__wrapped__
del configs["macko"], quantizers["macko"], sys.modules["macko.integrations.transformers"]
del sys.modules["macko.integrations.saving"]
macko.integrations.register()
assert PreTrainedModel.save_pretrained.__wrapped__ is wrapped.__wrapped__
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("shard", ["50GB", "15KB"])
def test_converts_while_it_loads_and_comes_back(pruned: tuple[Any, Path], tmp_path: Path, shard: str) -> None:
    dense, folder = pruned
    model = load(folder, quantization_config=macko.MackoConfig())
    report = {row.name: row for row in model.hf_quantizer.report}
    assert report["lm_head"].reason == "ignored by 'lm_head'"
    assert report["model.layers.0.mlp.up_proj"].density == 0.5
    reference = copy.deepcopy(dense)
    macko.sparsify_(reference)
    assert_same_model(model, reference)
    model.save_pretrained(tmp_path / "sparse", max_shard_size=shard)
    loaded = load(tmp_path / "sparse")
    assert_same_model(loaded, model)
    assert len(sparse_names(loaded)) == len(sparse_names(model)) == 14
    for each in (model, loaded):
        assert_same_bits(each(TOKENS).logits, dense(TOKENS).logits)
    assert all(p.requires_grad for p in loaded.parameters())
    assert (len(list((tmp_path / "sparse").glob("*.safetensors"))) > 1) == (shard == "15KB")
    loaded.save_pretrained(tmp_path / "again")
    assert_same_model(load(tmp_path / "again"), model)


@pytest.mark.slow
def test_dense_weights_are_gone_one_by_one(pruned: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[int] = []
    alive: list[int] = []
    pack = MackoWeight.smallest.__func__  # type: ignore[attr-defined]

    def watched(cls: Any, w: torch.Tensor) -> Any:
        import gc

        alive.append(
            sum(t.data_ptr() in weights for t in gc.get_objects() if type(t) is nn.Parameter and not t.is_meta)
        )
        weights.append(w.data_ptr())
        return pack(cls, w)

    monkeypatch.setattr(MackoWeight, "smallest", classmethod(watched))
    load(pruned[1], quantization_config=macko.MackoConfig())
    assert max(alive) <= 1  # an address may be used again by the next weight


def test_options_of_the_conversion(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    dense, folder = pruned
    model = load(folder, quantization_config=macko.MackoConfig(ignore=["*.mlp.*", "lm_head"]))
    assert not any("mlp" in name for name in sparse_names(model))
    model = load(folder, quantization_config=macko.MackoConfig(min_sparsity=0.6))
    assert {row.reason for row in model.hf_quantizer.report} >= {"under 60% sparse it would not pay"}
    model.save_pretrained(tmp_path / "again")
    for each in (model, load(tmp_path / "again")):
        assert sparse_names(each) == set()
        assert_same_model(each, dense)


def test_dequantize_gives_the_dtype_and_the_places_that_layers_have(pruned: tuple[Any, Path]) -> None:
    model = copy.deepcopy(pruned[0])
    block = model.model.layers[0].mlp
    block.again = block.up_proj
    macko.sparsify_(model)
    other = torch.float16 if model.dtype == torch.bfloat16 else torch.bfloat16
    model.to(other).dequantize()
    assert not sparse_names(model)
    assert block.again is block.up_proj
    assert {parameter.dtype for parameter in model.parameters()} == {other}


def test_saved_folder_holds_no_dense_weight_nor_is_one_made_on_the_way_back(
    pruned: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(pruned[1], quantization_config=macko.MackoConfig()).save_pretrained(tmp_path / "sparse")
    tensors = load_file(tmp_path / "sparse" / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.values" in tensors
    assert not [name for name in tensors if name.endswith("_extra_state")]
    assert {tuple(t.shape) for name, t in tensors.items() if name.endswith("_proj.weight")} == {(0, 48), (0, 104)}
    config = json.loads((tmp_path / "sparse" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "macko"
    assert config["layers"]["model.layers.1.mlp.down_proj"] == {
        "format": "macko", "rows": 48, "cols": 104, "delta_bits": 2,
    }  # fmt: skip
    for name in ("from_dense", "to_dense"):
        monkeypatch.setattr(MackoWeight, name, lambda *_, **__: pytest.fail("made a dense weight"))
    load(tmp_path / "sparse").save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_device_maps(pruned: tuple[Any, Path], tmp_path: Path, device_map: Any) -> None:
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    first = load(pruned[1], quantization_config=macko.MackoConfig(), device_map=device_map)
    first.save_pretrained(tmp_path / "sparse")
    second = load(tmp_path / "sparse", device_map=device_map)
    assert_same_model(second, first)
    assert second.model.layers[0].mlp.up_proj.weight.device == second.device


def test_offloading_is_refused(pruned: tuple[Any, Path]) -> None:
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    with pytest.raises(ValueError, match="puts layers on cpu and disk"):
        load(pruned[1], quantization_config=macko.MackoConfig(), device_map={"model": "disk", "lm_head": "cpu"})


def test_another_dtype(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    dense, folder = pruned
    load(folder, quantization_config=macko.MackoConfig()).save_pretrained(tmp_path / "sparse")
    for source, options in ((folder, {"quantization_config": macko.MackoConfig()}), (tmp_path / "sparse", {})):
        model = load(source, dtype=torch.float16, **options)
        assert model.model.layers[0].mlp.up_proj.dtype == torch.float16
        assert_same_bits(model.model.layers[0].mlp.up_proj.weight, dense.model.layers[0].mlp.up_proj.weight.half())


@pytest.mark.gpu
def test_a_packed_folder_of_float32_on_a_gpu(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    dense, folder = pruned
    load(folder, quantization_config=macko.MackoConfig(), dtype=torch.float32).save_pretrained(tmp_path / "sparse")
    with pytest.raises(ValueError, match="the weight cannot be loaded: it is float32, which macko holds on the CPU"):
        load(tmp_path / "sparse", dtype=torch.float32, device_map="cuda")
    model = load(tmp_path / "sparse", dtype=torch.bfloat16, device_map="cuda")
    assert_same_bits(model.model.layers[0].mlp.up_proj.weight.cpu(), dense.model.layers[0].mlp.up_proj.weight)


def test_a_model_without_its_head(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    dense, folder = pruned
    load(folder, quantization_config=macko.MackoConfig()).save_pretrained(tmp_path / "sparse")
    base = transformers.AutoModel.from_pretrained(tmp_path / "sparse")
    assert len(sparse_names(base)) == 14
    assert_same_bits(base(TOKENS).last_hidden_state, dense.model(TOKENS).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    again = load(tmp_path / "base")
    assert sparse_names(again) == {f"model.{name}" for name in sparse_names(base)}
    assert_same_model(again.model, base)


def test_tied_embeddings(tmp_path: Path) -> None:
    dense = small_llama(tie_word_embeddings=True)
    macko.prune_(dense, 0.6, ignore=[])  # the embedding too
    dense.save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=macko.MackoConfig(ignore=[]))
    assert {row.name: row.reason for row in model.hf_quantizer.report}["lm_head"] == "its weight is tied"
    model.save_pretrained(tmp_path / "sparse")
    loaded = load(tmp_path / "sparse")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_bits(loaded(TOKENS).logits, dense(TOKENS).logits)
    assert_same_bits(macko.load_model(small_llama(tie_word_embeddings=True), tmp_path / "sparse")(TOKENS).logits,
                     dense(TOKENS).logits)  # fmt: skip


def test_experts_in_one_tensor_and_conv1d_are_named(tmp_path: Path) -> None:
    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    mixture = transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(**sizes, num_key_value_heads=2, intermediate_size=48, num_local_experts=4)
    )
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=90, n_embd=32, n_layer=1, n_head=2))
    for model, name, reason in (
        (mixture, "model.layers.0.feed_forward.experts.down_proj", "holds all experts in one tensor"),
        (gpt, "transformer.h.0.attn.c_attn", "Conv1D is no nn.Linear"),
    ):
        left = "Conv1D" if model is gpt else "experts in one tensor"
        for report in (macko.prune_(model, 0.5), macko.sparsify_(model)):
            assert reason in {row.name: row.reason for row in report}[name]
            assert re.search(rf"^{left}: [\d,]+ of [\d,]+ weights \(\d+%\)", str(report), re.M)
        model.save_pretrained(tmp_path / name)
        loaded = load(tmp_path / name)
        assert_same_model(loaded, model)
        assert sparse_names(loaded) == sparse_names(model)


@pytest.mark.parametrize("how", ["sparsify_", "from_pretrained"])
def test_formats_mixed_by_the_masks_that_are_found(tmp_path: Path, how: str) -> None:
    dense = small_llama(hidden_size=128, intermediate_size=256)
    macko.prune_(dense, pattern="2:4", ignore=["lm_head", "*self_attn*"])
    macko.prune_(dense, 0.8, ignore=["lm_head", "*mlp*"])
    dense.save_pretrained(tmp_path / "dense")
    if how == "sparsify_":
        model = load(tmp_path / "dense")
        report = macko.sparsify_(model, format="mixed")
    else:
        model = load(tmp_path / "dense", quantization_config=macko.MackoConfig(format="mixed"))
        report = model.hf_quantizer.report
    kinds = {row.name.split(".")[3]: row.format for row in report if row.name != "lm_head"}
    assert kinds["mlp"] == "slide 2:4 bfloat16"
    assert kinds["self_attn"] in ("macko", "bitmap")
    block = model.model.layers[0]
    assert_same_bits(block.mlp.up_proj.weight, dense.model.layers[0].mlp.up_proj.weight + 0.0)  # lossless
    logits = model(TOKENS).logits
    torch.testing.assert_close(logits, dense(TOKENS).logits)
    model.save_pretrained(tmp_path / "sparse")
    loaded = load(tmp_path / "sparse")
    assert [loaded.model.layers[1].mlp.up_proj.format, loaded.model.layers[1].self_attn.q_proj.format] == [
        "slide", block.self_attn.q_proj.format
    ]  # fmt: skip
    assert_same_bits(loaded(TOKENS).logits, logits)
    assert len(macko.merge_(loaded)) == 2  # q, k and v; slide's layers stay apart
    assert loaded.model.layers[0].mlp.up_proj.format == "slide"


@pytest.mark.gpu
def test_execution_layouts_are_not_saved(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    model = load(
        pruned[1], quantization_config=macko.MackoConfig(format="macko"), device_map="cuda", dtype=torch.float16
    )
    model.hf_quantizer.quantization_config.format = "sell"  # asked for at once, it would leave layers this small dense
    for module in model.modules():
        if isinstance(module, macko.SparseLinear):
            module.reformat_("sell")
    model.save_pretrained(tmp_path / "sparse")
    assert "model.layers.0.mlp.up_proj.values" in load_file(tmp_path / "sparse" / "model.safetensors")
    loaded = load(tmp_path / "sparse", device_map="cuda")
    assert loaded.model.layers[0].mlp.up_proj.format == "sell"  # config.json remembers it
    assert_same_model(loaded, model)


# ---- Untrusted folders -----------------------------------------------------------------------------------------------

LAYER, PT = "model.layers.0.mlp.up_proj", {"format": "pt"}


def test_a_layout_that_does_not_run_here_is_held_as_auto(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    sparse = load(pruned[1], quantization_config=macko.MackoConfig())
    sparse.save_pretrained(tmp_path)
    with edited(tmp_path / "config.json") as config:
        config["quantization_config"]["format"] = "sell"
    with pytest.warns(UserWarning, match='format sell runs on cuda only, the model is on cpu: held as "auto"'):
        assert_same_model(load(tmp_path), sparse)


def test_a_format_that_does_not_hold_the_dtype_is_held_as_auto(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    sparse = load(pruned[1], quantization_config=macko.MackoConfig(values="int8"), dtype=torch.bfloat16)
    sparse.save_pretrained(tmp_path)
    with edited(tmp_path / "config.json") as config:
        config["quantization_config"]["format"] = "sparse8"
    layer = load(tmp_path, dtype=torch.bfloat16).get_submodule(LAYER)
    with pytest.warns(UserWarning, match=r'format sparse8 does not hold torch.float32: held as "auto"'):
        wide = load(tmp_path, dtype=torch.float32).get_submodule(LAYER)
    assert (layer.format, wide.dtype) == ("sparse8", torch.float32)
    assert torch.equal(wide.weight.bfloat16(), layer.weight)


def test_a_file_of_a_packed_folder_is_refused_by_itself(pruned: tuple[Any, Path], tmp_path: Path, capsys: Any) -> None:
    load(pruned[1], quantization_config=macko.MackoConfig()).save_pretrained(tmp_path)
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert "0 B" not in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "model.safetensors")]) == 1
    assert "is in config.json beside it: give the folder" in capsys.readouterr().err
    assert cli.main(["inspect", str(pruned[1] / "model.safetensors")]) == 0


def test_a_dense_weight_of_another_shape_is_not_packed(pruned: tuple[Any, Path]) -> None:
    with edited(pruned[1] / "model.safetensors") as tensors:
        tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"][:8]
    with pytest.raises((RuntimeError, ValueError), match=r"ignore_mismatched_sizes|up_proj.weight: the checkpoint has"):
        load(pruned[1], quantization_config=macko.MackoConfig())  # transformers says so, or before 5.23 macko


def saved(pruned: tuple[Any, Path], folder: Path) -> Path:
    load(pruned[1], quantization_config=macko.MackoConfig()).save_pretrained(folder)
    return folder


def test_a_packed_folder_keeps_how_values_are_held(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    load(pruned[1], quantization_config=macko.MackoConfig(values="raw")).save_pretrained(tmp_path / "raw")
    model = load(tmp_path / "raw")
    layers = [module for module in model.modules() if isinstance(module, macko.SparseLinear)]
    assert {layer._options.values for layer in layers} == {"raw"}
    assert model.config.quantization_config.values == "raw"


@pytest.mark.parametrize("version", [3, 0, "1", None])
def test_an_unknown_version_is_refused(pruned: tuple[Any, Path], tmp_path: Path, version: Any) -> None:
    folder = saved(pruned, tmp_path / "sparse")
    with edited(folder / "config.json") as config:
        config["quantization_config"]["version"] = version
    wanted = "of version 3 of macko's files.* install a newer one" if version == 3 else "version is"
    with pytest.raises(ValueError, match=wanted):
        load(folder)


def test_a_folder_with_two_patterns_is_refused_by_name(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    folder = saved(pruned, tmp_path / "sparse")
    with edited(folder / "config.json") as config:
        config["quantization_config"] |= {"format": "slide 6:8", "pattern": "2:4"}
    with pytest.raises(ValueError, match=r"sparse.config\.json: format has the pattern 6:8, and pattern is '2:4'"):
        load(folder)


def test_a_damaged_tensor_is_refused_by_name(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    folder = saved(pruned, tmp_path / "sparse")
    tensors = load_file(folder / "model.safetensors")
    for key, damage, wanted in (
        ("row_ptr", lambda t: t.flip(0), "not a macko weight"),
        ("deltas", lambda t: t | 0xF, "not a macko weight"),
        ("values", lambda t: t[:-8], "not a macko weight"),
        ("values", lambda t: t.to(torch.int8), ".* is int8"),
        ("deltas", lambda t: None, "the checkpoint has no deltas"),
        ("weight", lambda t: torch.ones(104, 48), "the files hold its weight packed, and another one"),
    ):
        changed = {**tensors, f"{LAYER}.{key}": damage(tensors[f"{LAYER}.{key}"].clone())}
        save_file({name: t for name, t in changed.items() if t is not None}, folder / "model.safetensors", PT)
        with pytest.raises(ValueError, match=f"{LAYER}: {wanted}"):
            load(folder)


@pytest.mark.parametrize(
    ("about", "wanted"),
    [
        ({"format": "macko", "rows": 104, "cols": 47, "delta_bits": 4}, "has shape \\[104, 47\\]"),
        ({"format": "macko", "rows": 104, "cols": 48, "delta_bits": 3}, "delta_bits is 3"),
        (
            {"format": "macko8", "rows": 104, "cols": 48, "delta_bits": 2, "values": "fp8", "source": 7},
            "source is 7, expected 0, 1",
        ),
        ({"format": "elves", "rows": 104, "cols": 48}, "format is 'elves'"),
        ({"format": "macko", "rows": 104, "cols": 48, "delta_bits": 4, "elves": 3}, "elves"),
        ({"format": "macko", "rows": "104", "cols": 48, "delta_bits": 4}, "whole numbers"),
        ("macko", "whole numbers"),
    ],
)
def test_a_damaged_config_is_refused_by_name(pruned: tuple[Any, Path], tmp_path: Path, about: Any, wanted: str) -> None:
    folder = saved(pruned, tmp_path / "sparse")
    with edited(folder / "config.json") as config:
        config["quantization_config"]["layers"][LAYER] = about
    with pytest.raises(ValueError, match=LAYER) as error:
        load(folder)
    error.match(wanted)


def test_config_is_json_and_back() -> None:
    config = macko.MackoConfig(ignore=["a", "b"], min_sparsity=0.4)
    again = macko.MackoConfig.from_dict(json.loads(config.to_json_string()))
    assert again.to_dict() == config.to_dict()
    assert macko.MackoConfig.from_dict({**config.to_dict(), "note": "of somebody else"}).to_dict() == config.to_dict()
    with pytest.raises(TypeError, match="formt"):
        macko.MackoConfig(formt="sell")  # type: ignore[call-arg]
    for options in ({"format": "elves"}, {"min_sparsity": 3}, {"ignore": [3]}, {"layers": {"a": {"rows": 1.5}}}):
        with pytest.raises((TypeError, ValueError)):
            macko.MackoConfig(**options)


# ---- Whatever is saved comes back ------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """As a trainer or SentenceTransformer holds a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.m = inner


def by_hand(model: nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            model.set_submodule(name, macko.SparseLinear.from_linear(module))


FLOWS: dict[str, tuple[Any, Any]] = {  # what is converted, what is saved
    "all of it": (macko.sparsify_, lambda m: m),
    "a part is converted": (lambda m: macko.sparsify_(m.model), lambda m: m),
    "a part is saved": (macko.sparsify_, lambda m: m.model),
    "layers made by hand": (by_hand, lambda m: m),
    "a wrapper is converted": (lambda m: macko.sparsify_(Wrapped(m)), lambda m: m),
    "a part is converted and saved": (lambda m: macko.sparsify_(Wrapped(m.model)), lambda m: m.model),
    "one layer is converted": (lambda m: macko.sparsify_(m.model.layers[1].mlp), lambda m: m),
    "merged": (lambda m: macko.sparsify_(m, merge=True), lambda m: m),
    "merged in a part": (lambda m: macko.sparsify_(m.model, merge=True), lambda m: m),
    "split again": (lambda m: macko.sparsify_(m.model, merge=True) and macko.split_(m), lambda m: m),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("shard", ["50GB", "15KB"])
def test_whoever_made_it_sparse_it_is_saved_packed(tmp_path: Path, flow: str, shard: str) -> None:
    dense = small_llama()
    macko.prune_(dense, 0.5)
    convert, part = FLOWS[flow]
    model = copy.deepcopy(dense)
    convert(model)
    saved = part(model)
    before = (vars(saved).keys(), saved.config.to_dict())
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    assert vars(saved).keys() == before[0]
    loaded, info = type(saved).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert sparse_names(loaded) == sparse_names(saved) != set()
    assert_same_model(loaded, saved)
    for reference in (saved, part(dense)):
        assert_same_bits(loaded(TOKENS)[0], reference(TOKENS)[0])
    assert_same_model(macko.load_model(part(copy.deepcopy(dense)), tmp_path), loaded)


@pytest.mark.slow
def test_a_sentence_transformer_comes_back(tmp_path: Path) -> None:
    package = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from sentence_transformers.models import Pooling, Transformer

    bert = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    )
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghi"]))
    bert.save_pretrained(tmp_path)
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    model = package.SentenceTransformer(modules=[Transformer(str(tmp_path)), Pooling(32)], device="cpu")
    macko.prune_(model, 0.6)
    wanted = model.encode(["a b c", "d e f g"])
    macko.sparsify_(model)
    assert sparse_names(model)
    sparse = model.encode(["a b c", "d e f g"])
    model.save_pretrained(str(tmp_path / "sparse"))
    loaded = package.SentenceTransformer(str(tmp_path / "sparse"), device="cpu")
    assert sparse_names(loaded) == sparse_names(model)
    assert_same_bits(torch.from_numpy(loaded.encode(["a b c", "d e f g"])), torch.from_numpy(sparse))
    torch.testing.assert_close(torch.from_numpy(sparse), torch.from_numpy(wanted))


def test_the_language_model_of_several_modes_is_converted_alone(tmp_path: Path) -> None:
    text = transformers.LlamaConfig(
        vocab_size=90, hidden_size=48, intermediate_size=104, num_hidden_layers=2, num_attention_heads=4
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=89)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    macko.prune_(model, 0.6)
    macko.sparsify_(model.model.language_model)
    model.save_pretrained(tmp_path)  # under the names of the original files
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert sparse_names(loaded) == sparse_names(model) != set()
    assert_same_model(loaded, model)
    assert model.model.language_model.hf_quantizer.quantization_config.quant_method == "macko"


def test_a_model_that_is_dense_again_is_saved_as_one(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    model = load(pruned[1], quantization_config=macko.MackoConfig())
    for name in sparse_names(model):
        model.set_submodule(name, model.get_submodule(name).to_linear())
    model.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    assert not (tmp_path / "dense" / "README.md").exists()
    assert_same_model(load(tmp_path / "dense"), model)
    assert model.config.quantization_config is model.hf_quantizer.quantization_config  # for whoever goes on with it
    name = "model.layers.0.mlp.up_proj"
    model.set_submodule(name, macko.SparseLinear.from_linear(model.get_submodule(name)))
    model.save_pretrained(tmp_path / "one")
    loaded = load(tmp_path / "one")
    assert sparse_names(loaded) == {name}
    assert_same_model(loaded, model)


@pytest.mark.parametrize("convert", [macko.sparsify_, by_hand])
def test_a_save_that_fails_leaves_the_model_as_it_was(
    pruned: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, convert: Any
) -> None:
    model = load(pruned[1])
    convert(model)

    def state() -> Any:
        theirs = {"dtype", "architectures"}  # set by transformers before it writes
        return dict(vars(model)), {k: v for k, v in model.config.to_dict().items() if k not in theirs}

    before = state()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", fail)
        with pytest.raises(OSError, match="disk full"):
            model.save_pretrained(tmp_path / "sparse")
    assert state() == before
    assert not (tmp_path / "sparse" / "README.md").exists()
    model.save_pretrained(tmp_path / "sparse")
    assert_same_model(load(tmp_path / "sparse"), model)


def test_a_state_that_is_given_is_what_is_saved(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    model = load(pruned[1])
    macko.sparsify_(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.norm.weight"] += 1
    kept = set(state)
    model.save_pretrained(tmp_path / "sparse", state_dict=state)
    assert set(state) == kept
    loaded = load(tmp_path / "sparse")
    for name, tensor in loaded.state_dict().items():
        assert_same_bits(tensor, state[name])
    del state[f"{LAYER}._extra_state"]
    with pytest.raises(ValueError, match=f"{LAYER}, which is sparse, without"):
        model.save_pretrained(tmp_path / "other", state_dict=state)


def test_what_another_method_has_quantized_is_not_saved_as_macko(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    model = load(pruned[1])
    model.config.quantization_config = {"quant_method": "fp8"}
    macko.sparsify_(model)
    assert model.config.quantization_config == {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="quantized by fp8 and has sparse layers"):
        model.save_pretrained(tmp_path / "sparse")


def test_layers_inside_of_an_adapter_are_not_saved_under_its_names(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    model = with_adapter(load(pruned[1], quantization_config=macko.MackoConfig()))
    with pytest.raises(ValueError, match="inside of a wrapper of PEFT"):
        model.get_base_model().save_pretrained(tmp_path / "sparse")
    assert not (tmp_path / "sparse").exists()
    base = model.unload()
    base.save_pretrained(tmp_path / "sparse")
    assert_same_model(load(tmp_path / "sparse"), base)


# ---- Readers without macko -------------------------------------------------------------------------------------------


#: What transformers alone says of each folder, as a list of JSON: the last line of an error, or nothing.
PLAIN = """
import json, sys
from transformers import AutoModelForCausalLM
said = []
for folder in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(folder)
    except Exception as error:
        said.append(str(error).splitlines()[-1])
    else:
        said.append("")
assert not any(name.startswith("macko") for name in sys.modules)
print(json.dumps(said))
"""


def without_tripwire(folder: Path) -> Path:
    """The folder as earlier versions wrote it."""
    with edited(folder / "model.safetensors") as tensors:
        for name in [name for name, tensor in tensors.items() if not tensor.numel()]:
            del tensors[name]
    return folder


@pytest.mark.slow
def test_a_reader_without_macko_stops(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    model = load(pruned[1])
    macko.sparsify_(model.model.layers[1].mlp)  # three layers are enough
    for shard in ("50GB", "15KB"):
        model.save_pretrained(tmp_path / shard, max_shard_size=shard)
    command = [sys.executable, "-c", PLAIN, *map(str, (tmp_path / "50GB", tmp_path / "15KB", pruned[1]))]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    *packed, dense = json.loads(result.stdout.splitlines()[-1])
    assert all("ignore_mismatched_sizes" in said for said in packed)
    assert dense == ""  # it is not something else


@pytest.mark.parametrize("change", [lambda folder: folder, without_tripwire], ids=["now", "earlier"])
def test_with_macko_nobody_hears_of_the_tripwire(
    pruned: tuple[Any, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], change: Any
) -> None:
    folder = change(saved(pruned, tmp_path / "sparse"))
    wanted = load(pruned[1], quantization_config=macko.MackoConfig())
    capfd.readouterr()
    transformers.logging.disable_progress_bar()
    for model, part in ((transformers.AutoModelForCausalLM, wanted), (transformers.AutoModel, wanted.model)):
        loaded, info = model.from_pretrained(folder, output_loading_info=True)
        assert {name for name in info["unexpected_keys"] if name != "lm_head.weight"} == set()
        assert not info["missing_keys"]
        assert not info["mismatched_keys"]
        assert_same_model(loaded, part)
    assert "weight" not in capfd.readouterr().err.replace("lm_head.weight", "")
    transformers.logging.enable_progress_bar()
    assert_same_model(macko.load_model(small_llama(attention_bias=True), folder), wanted)
    with Checkpoint(folder) as file:
        assert f"{LAYER}.weight" not in file
        assert f"{LAYER}.values" in file
        assert file.packed(LAYER).shape == (104, 48)
    assert cli.main(["inspect", str(folder)]) == 0
    assert f"{LAYER}.weight" not in capfd.readouterr().out


@pytest.mark.parametrize("version", ["4.57.1", "3.0"])
def test_an_older_transformers_is_refused_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=f"macko needs transformers 5 or newer, found {version}: pip install"):
        macko.MackoConfig()
    for command in ("prune", "convert", "bench"):
        assert cli.main([command, str(tmp_path), *([] if command == "bench" else [str(tmp_path / "out")])]) == 1
        assert f"found {version}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(VERSION < (5, 20), reason="transformers before 5.20 has no such ContinuousBatchingConfig")
def test_continuous_batching_gives_the_tokens_of_the_dense_model(tiny_llama: TinyLlama) -> None:
    wanted = copy.deepcopy(tiny_llama.model)
    macko.prune_(wanted, 0.5)
    sparse = copy.deepcopy(wanted)
    macko.sparsify_(sparse)
    assert sparse_names(sparse)
    requests = [row[: 3 + 7 * i].tolist() for i, row in enumerate(tiny_llama.held[:4])]
    config = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=64)
    tokens = []
    for model in (wanted, sparse):
        model.set_attn_implementation("sdpa")
        found = model.generate_batch(requests, config, pages)
        tokens.append([list(found[key].generated_tokens) for key in sorted(found)])
    assert tokens[0] == tokens[1]
    assert [len(row) for row in tokens[1]] == [12] * 4


# ---- Several processes -----------------------------------------------------------------------------------------------

DISTRIBUTED = """
import sys
import pytest, torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import macko
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

dense, sparse, store, rank = *sys.argv[1:4], int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
load = AutoModelForCausalLM.from_pretrained

with pytest.raises(ValueError, match="do not support this distributed loading.* asked for was dp_size=2"):
    load(sparse, distributed_config=DistributedConfig(fsdp_size=2))

model = load(dense, distributed_config=DistributedConfig(tp_size=2))  # no fault of the two processes
with pytest.warns(UserWarning, match="none of 15 layers, 14 of them because: its weight is a DTensor"):
    macko.sparsify_(model)

model = load(sparse)
mesh = init_device_mesh("cpu", (2,))
for style in (RowwiseParallel(), ColwiseParallel()):
    mlp = load(sparse).model.layers[0].mlp
    with pytest.raises(RuntimeError, match="SparseLinear: a packed weight cannot be distributed"):
        parallelize_module(mlp, mesh, {"up_proj": style})

dcp.save(get_model_state_dict(model), checkpoint_id=f"{store}.dcp")
fresh = load(sparse)
for buffer in (buffer for name, buffer in fresh.named_buffers() if name.endswith("values")):
    buffer.zero_()
state = get_model_state_dict(fresh)
dcp.load(state, checkpoint_id=f"{store}.dcp")
set_model_state_dict(fresh, state)
assert all(torch.equal(t, fresh.state_dict()[name]) for name, t in model.state_dict().items())
dist.barrier()
dist.destroy_process_group()
"""

SHARDED_ADAPTER = """
import sys
import peft, torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
import macko
from transformers import AutoModelForCausalLM

sparse, store, rank = *sys.argv[1:3], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
batches = torch.arange(24).view(2, 2, 6) * 7 % 90

def adapted():
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(sparse, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)

def trained(model, own):
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.05)  # whose steps are as large as gradients are
    losses = []
    for _ in range(3):
        loss = sum(model(input_ids=batch, labels=batch).loss for batch in own) / len(own)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return params

def sharded(model):
    for layer in (*model.base_model.model.model.layers, model):
        fully_shard(layer, mesh=mesh)

wanted = trained(adapted(), batches)  # in one process, of the batches of both
model = adapted()
held = {name: t.data_ptr() for name, t in model.named_buffers()}
sharded(model)
got = trained(model, batches[rank : rank + 1])
assert all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in got)
for part, whole in zip(got, wanted, strict=True):
    torch.testing.assert_close(part.full_tensor(), whole)
packed = [m for m in model.modules() if isinstance(m, macko.SparseLinear)]
assert len(packed) == 14
assert {name: t.data_ptr() for name, t in model.named_buffers()} == held  # whole on each process, and not moved

dcp.save(get_model_state_dict(model), checkpoint_id=f"{store}.dcp")
fresh = adapted()
with torch.no_grad():
    for p in fresh.parameters():
        p.zero_()
    for name, buffer in fresh.named_buffers():
        if name.endswith("values"):
            buffer.zero_()
sharded(fresh)
state = get_model_state_dict(fresh)
dcp.load(state, checkpoint_id=f"{store}.dcp")
set_model_state_dict(fresh, state)
for part, whole in zip(fresh.parameters(), model.parameters(), strict=True):
    assert torch.equal(part.full_tensor(), whole.full_tensor())
assert all(torch.equal(buffer, model.get_buffer(name)) for name, buffer in fresh.named_buffers())
dist.destroy_process_group()
"""

TENSOR_PARALLEL = """
import copy, os, sys
import pytest, torch
import torch.distributed as dist
import macko
from macko.weights import MackoWeight
from macko.integrations import tensor_parallel
from transformers import AutoModelForCausalLM, modeling_utils
from transformers.distributed import DistributedConfig
from tests.common import assert_close_spmv, assert_same_bits

dense, sparse, store, rank = *sys.argv[1:4], int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)

def tokens(model):
    prompt = torch.arange(6)[None]
    return model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)

whole = load(sparse)
layers = {name: layer for name, layer in whole.named_modules() if isinstance(layer, macko.SparseLinear)}
config = {"quantization_config": macko.MackoConfig(ignore=())}
two = {"distributed_config": DistributedConfig(tp_size=2)}
wanted = tokens(load(dense, **two))

whole_at_once = []
cut = tensor_parallel.cut

def counting(model, name, layer):
    others = [m for m in model.modules() if isinstance(m, macko.SparseLinear) and m.device.type != "meta"]
    whole_at_once.append(sum(m.packed.shape == (m.out_features, m.in_features) for m in others))
    assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "1"  # or all of the file would be read ahead
    cut(model, name, layer)

reserved = []

def reserving(model, places, quantizer):
    on_gpu = dict.fromkeys(places, torch.device("cuda"))
    reserved.append(sum(modeling_utils.get_total_byte_count(model, on_gpu, quantizer).values()))

modeling_utils.caching_allocator_warmup = reserving
tensor_parallel.cut = counting
for folder, options in ((sparse, two), (dense, config | two), (sparse, {"tp_plan": "auto"})):
    model = load(folder, **options)
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
    assert torch.equal(tokens(model), wanted)
    bytes = 0
    for name, layer in layers.items():
        part = model.get_submodule(name)
        assert isinstance(part, macko.SparseLinear), name
        w, dim = layer.weight, 1 if name.endswith(("o_proj", "down_proj")) else 0
        w = w.as_subclass(torch.Tensor)
        own = w.chunk(2, dim)[rank].contiguous()
        assert_same_bits(part.packed.to_dense(), own)
        bytes += part.packed.nbytes
        x = torch.randn(3, w.shape[1], generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            y = part(x.chunk(2, 1)[rank] if dim else x)
        bias = layer.bias
        gathered = dim or name == "lm_head"
        if bias is not None and not gathered:
            bias = bias.chunk(2)[rank]
        assert_close_spmv(y, w if gathered else own, x, bias, chain=w.shape[1] + 3)
    assert bytes < 0.6 * sum(layer.packed.nbytes for layer in layers.values())
    with pytest.raises(ValueError, match="q_proj holds one process' part of its weight: save the model by save_p"):
        macko.save_model(model, f"{store}.model")
    x = torch.randn(1, 4, 48, generator=torch.Generator().manual_seed(2), requires_grad=True)
    grads = []  # an adapter below a layer trains as on the whole one
    for other in (whole, model):
        mlp = other.model.layers[0].mlp
        grads += torch.autograd.grad(mlp(x).square().sum(), x)
    torch.testing.assert_close(*grads)
    model.save_pretrained(f"{store}.saved")
    again = load(f"{store}.saved").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.state_dict().items())
    dist.barrier()
assert whole_at_once == [1] * 2 * len(layers)  # of a packed folder one layer at a time is read before it is cut
most = 0.6 * sum(tensor.nbytes for tensor in whole.state_dict().values())
assert len(reserved) == 3
assert all(0.4 / 0.6 * most < one < most for one in reserved), (reserved, most)
dist.destroy_process_group()
"""

#: Programs and their arguments, one after the other.
IN_TURN = """
import json, sys
rank = sys.argv[-1]
for number, (program, arguments) in enumerate(json.loads(sys.argv[1])):
    sys.argv[1:] = [*arguments, rank]
    exec(compile(program, f"program {number}", "exec"), {"__name__": "__main__"})
"""


@pytest.mark.slow
@pytest.mark.skipif(VERSION < (5, 20), reason="transformers before 5.19 is refused, and 5.19 reserves the whole model")
def test_two_processes(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    """Distributed checkpoints; an adapter sharded on a sparse base trains as in one process, and is saved; each holds
    a part in tensor parallelism. In one pair of processes, as most of their time goes into imports."""
    sparse = str(saved(pruned, tmp_path / "sparse"))
    size = 89 if VERSION >= (5, 23) else 90  # an odd head
    model = small_llama(attention_bias=True, mlp_bias=True, vocab_size=size, tie_word_embeddings=False).float()
    macko.prune_(model, 0.5, ignore=())
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "odd")
    macko.sparsify_(model, ignore=())
    model.save_pretrained(tmp_path / "odd sparse")
    programs: list[tuple[str, list[str]]] = [(DISTRIBUTED, [str(pruned[1]), sparse])]
    if importlib.util.find_spec("peft"):
        programs.append((SHARDED_ADAPTER, [sparse]))
    programs.append((TENSOR_PARALLEL, [str(tmp_path / "odd"), str(tmp_path / "odd sparse")]))
    given = [(program, [*folders, str(tmp_path / f"store {at}")]) for at, (program, folders) in enumerate(programs)]
    two_processes(IN_TURN, json.dumps(given))


def test_a_group_that_two_processes_would_have_stays_dense(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one whose part begins with the group would find its pattern, the other one not. "mixed" has other formats."""
    small_llama().save_pretrained(tmp_path)
    monkeypatch.setattr(tensor_parallel, "cut_dim", lambda model, name: 1 if "down_proj" in name else None)
    monkeypatch.setattr(tensor_parallel, "holders", lambda model, name: 2)
    for format, reason in (("slide 4:6", "group 8 of 4:6 (columns 48 to 53) straddles"), ("mixed 4:6", "under 25% ")):
        config = macko.MackoConfig(format=format)
        with pytest.warns(UserWarning, match="changed none"):
            model = type(small_llama()).from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=config)
        down = [row.reason for row in model.hf_quantizer.report if "down_proj" in row.name]
        assert len(down) == 2
        assert all(row.startswith(reason) for row in down), down


def test_parts_that_processes_hold_in_several_ways_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one would wait for what the others do not send."""
    macko.prune_(model := small_llama(), 0.5)
    macko.sparsify_(model)
    mesh = SimpleNamespace(size=lambda: 2, get_group=lambda: None)
    monkeypatch.setattr(tensor_parallel, "_is_parallel", lambda model: True)
    monkeypatch.setattr(tensor_parallel, "_mesh", lambda model: mesh)
    monkeypatch.setattr(tensor_parallel, "cut_dim", lambda model, name: None)

    def gather(every: list[Any], mine: list[Any], group: Any) -> None:
        every[:] = [mine, [one for one in mine if "layers.1.mlp.up" not in one[0]]]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with (
        pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj is packed by some processes, and by others not"),
        tensor_parallel.all_whole(model),
    ):
        pass


def test_tensor_parallelism_of_transformers_before_5_19_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "transformers_version", lambda: (5, 18))
    monkeypatch.setattr(model := small_llama(), "_tp_size", 2, raising=False)
    with pytest.raises(ValueError, match=r"asked for was tp_size, which transformers before 5.19 does in another way"):
        tensor_parallel.check(model)


# ---- The model card --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_packed_folder_says_how_it_is_loaded(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    folder = saved(pruned, tmp_path / "sparse")
    card = hub.ModelCard.load(folder / "README.md")
    assert card.data.library_name == "transformers"
    assert "macko" in card.data.tags
    for words in ("14 linear layers", "| 0.500 (50.0% sparse) |", "transformers>=5", "| macko |"):
        assert words in card.text
    snippet = card.text.partition("```python\n")[2].partition("```")[0]
    assert snippet.startswith("import macko\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(macko.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", snippet], cwd=folder.parent, check=True, env=environment)


def test_a_card_is_written_anew_unless_somebody_edited_it(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    folder = saved(pruned, tmp_path / "sparse")
    card = folder / "README.md"
    first = card.read_text()
    model = load(folder)
    model.set_submodule(LAYER, model.get_submodule(LAYER).to_linear())
    model.save_pretrained(folder)
    assert "13 linear layers" in card.read_text() != first
    for text in (first.replace("zeros are not stored", "zeros are not stored, says Alice"), "# Mine", ""):
        card.write_text(text)
        model.save_pretrained(folder)
        assert card.read_text() == text


@pytest.mark.parametrize("merge", [False, True])
def test_the_card_counts_merged_layers_once(tmp_path: Path, merge: bool) -> None:
    model = small_llama()
    macko.prune_(model, 0.7)
    macko.sparsify_(model, merge=merge)
    model.save_pretrained(tmp_path)
    nonzero = [module.weight.count_nonzero() for module in model.modules() if isinstance(module, macko.SparseLinear)]
    weights = 2 * (2 * 48 * 48 + 2 * 24 * 48 + 3 * 48 * 104)
    assert f"| 14 | {weights:,} | {sum(nonzero) / weights:.3f} (" in (tmp_path / "README.md").read_text()


# ---- Adapters --------------------------------------------------------------------------------------------------------


def with_adapter(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up_proj", "q_proj"], **options))


def test_an_adapter_trains_on_a_sparse_base(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    base = load(pruned[1], quantization_config=macko.MackoConfig())
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = with_adapter(base, lora_alpha=32)
    adapters = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert adapters
    assert all("lora" in name for name in adapters)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(10):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = model.get_base_model().state_dict()
    for name, tensor in before.items():
        at = name if name in after else "{}.base_layer.{}".format(*name.rsplit(".", 1))
        assert_same_bits(after[at], tensor)
    model.save_pretrained(tmp_path / "adapter")
    fresh = load(pruned[1], quantization_config=macko.MackoConfig())
    again = pytest.importorskip("peft").PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    assert_same_bits(again(TOKENS).logits, model(TOKENS).logits)


def test_a_new_adapter_is_neither_pruned_nor_packed(pruned: tuple[Any, Path]) -> None:
    """Its second matrix is all zeros until it has been trained."""
    model = with_adapter(load(pruned[1]))
    trained = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    macko.prune_(model, 0.6)
    report = macko.sparsify_(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(trained)
    for name, parameter in trained.items():
        assert_same_bits(model.get_parameter(name), parameter)
    assert "an adapter's" in str(report)
    bases = [module for name, module in model.named_modules() if name.endswith("base_layer")]
    assert bases
    assert all(isinstance(module, macko.SparseLinear) for module in bases)


def test_what_edits_the_base_of_an_adapter_is_refused_with_the_reason(pruned: tuple[Any, Path]) -> None:
    base = load(pruned[1], quantization_config=macko.MackoConfig(), dtype=torch.float32)
    model = with_adapter(copy.deepcopy(base))
    before = model(TOKENS).logits
    edits = (model.merge_and_unload, partial(model.merge_and_unload, safe_merge=True))
    for edit in (*edits, partial(with_adapter, base, init_lora_weights="pissa")):
        with pytest.raises(RuntimeError, match="the weight of a SparseLinear is packed"):
            edit()
    assert_same_bits(model(TOKENS).logits, before)


@pytest.mark.parametrize("values", ["fp8", "int8"])
def test_8_bits_are_saved_and_loaded(values: str, tmp_path: Path) -> None:
    """By who asks for them, with the codes and scales of the model that was saved, in any type."""
    model = small_llama(hidden_size=256, intermediate_size=256)
    macko.prune_(model.model.layers[0], 0.5, progress=False)
    model.save_pretrained(tmp_path / "dense")
    report = macko.compress_(model, values=values, ignore=("lm_head",), progress=False)
    assert {row.format for row in report if row.name != "lm_head"} == {f"dense8 {values}", f"sparse8 {values}"}
    wanted = model(TOKENS).logits
    model.save_pretrained(tmp_path / "packed")
    layers = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]["layers"]
    assert {(layer["format"], layer["values"]) for layer in layers.values()} == {("macko8", values)}
    again = load(tmp_path / "packed", dtype="auto")
    assert_same_bits(again(TOKENS).logits, wanted)
    half = load(tmp_path / "packed", dtype=torch.float16)
    for name in sparse_names(model):
        there, here = (one.get_submodule(name).packed for one in (half, model))
        assert there.dtype == torch.float16
        assert_same_bits(there.codes(), here.codes())
        assert_same_bits(there.scales, here.scales)
    config = macko.MackoConfig(values=values, min_sparsity=0)
    loaded = load(tmp_path / "dense", quantization_config=config, dtype="auto")
    assert_same_bits(loaded(TOKENS).logits, wanted)


# ---- What transformers makes of files, and of layers -----------------------------------------------------------------


def with_zeros(model: Any) -> Any:
    """Other zeros, and another count of them, in every linear layer."""
    chance = torch.Generator().manual_seed(0)
    for index, layer in enumerate(module for module in model.modules() if type(module) is nn.Linear):
        with torch.no_grad():
            layer.weight *= torch.rand(layer.weight.shape, generator=chance) > 0.6 + 0.03 * (index % 7)
    return model.eval()


def made(kind: str, model_class: str = "", **options: Any) -> Any:
    """A small model of transformers in float32, pruned."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    known = {"vocab_size": 99, "pad_token_id": 0, **sizes}
    config = transformers.CONFIG_MAPPING[kind](**{**known, **options})
    model_class_found = getattr(transformers, model_class) if model_class else transformers.MODEL_MAPPING[type(config)]
    return with_zeros(model_class_found._from_config(config, dtype=torch.float32))


def assert_same_weights(model: nn.Module, dense: nn.Module) -> None:
    """Of every linear layer, packed or not, and its bias."""
    for name, layer in dense.named_modules():
        if isinstance(layer, nn.Linear):
            other = model.get_submodule(name)
            packed = isinstance(other, macko.SparseLinear)
            assert torch.equal(other.packed.to_dense() if packed else other.weight, layer.weight), name
            assert layer.bias is None or torch.equal(other.bias, layer.bias), name


@pytest.mark.parametrize("kind", ["nomic_bert", pytest.param("gte", marks=pytest.mark.slow)])
def test_layers_that_files_hold_as_one_tensor(kind: str, tmp_path: Path) -> None:
    """q, k and v of nomic_bert, up and gate of gte too: read from the fused matrix, and saved packed."""
    dense = made(kind)
    dense.save_pretrained(tmp_path / "dense")
    names = load_file(tmp_path / "dense/model.safetensors").keys()
    assert any("qkv" in key.lower() for key in names)
    sparse = copy.deepcopy(dense)
    macko.sparsify_(sparse, progress=False)
    loaded = type(dense).from_pretrained(tmp_path / "dense", quantization_config=macko.MackoConfig())
    assert sparse_names(loaded) == sparse_names(sparse) != set()
    assert_same_weights(loaded, dense)
    for index, model in enumerate((sparse, loaded)):
        model.save_pretrained(tmp_path / f"{index}")
        again = type(dense).from_pretrained(tmp_path / f"{index}")
        assert sparse_names(again) == sparse_names(sparse)
        assert_same_weights(again, dense)
    assert_same_weights(macko.load_model(copy.deepcopy(dense), tmp_path / "0"), dense)
    again.dequantize()
    again.save_pretrained(tmp_path / "last")
    assert_same_weights(type(dense).from_pretrained(tmp_path / "last"), dense)
    if VERSION >= (5, 24):  # older ones keep the names of the files that a model came from
        assert load_file(tmp_path / "last/model.safetensors").keys() == names


@pytest.mark.parametrize("left", ["q_proj", "k_proj", "v_proj"])
def test_one_of_the_layers_that_files_hold_as_one_is_left_dense(left: str, tmp_path: Path) -> None:
    dense = made("nomic_bert")
    dense.save_pretrained(tmp_path / "dense")
    loaded = type(dense).from_pretrained(tmp_path / "dense", quantization_config=macko.MackoConfig(ignore=[left]))
    sparse = copy.deepcopy(dense)
    macko.sparsify_(sparse, ignore=[left], progress=False)
    sparse.save_pretrained(tmp_path / "packed")
    again = type(dense).from_pretrained(tmp_path / "packed")
    for model in (loaded, again):
        assert sparse_names(model) == sparse_names(sparse)
        assert not any(left in name for name in sparse_names(model))
        assert_same_weights(model, dense)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"save_original_format": False}, {"max_shard_size": "20KB"}])
def test_such_a_model_with_and_without_its_head(options: dict[str, Any], tmp_path: Path) -> None:
    dense = made("nomic_bert", "NomicBertForMaskedLM")
    macko.sparsify_(sparse := copy.deepcopy(dense), progress=False)
    sparse.save_pretrained(tmp_path / "packed", **options)
    assert_same_weights(type(dense).from_pretrained(tmp_path / "packed"), dense)
    body = transformers.NomicBertModel.from_pretrained(tmp_path / "packed")
    assert_same_weights(body, dense.base_model)
    body.save_pretrained(tmp_path / "body")
    again = type(dense).from_pretrained(tmp_path / "body")
    assert sparse_names(again.base_model) == sparse_names(sparse.base_model) != set()
    assert_same_weights(again.base_model, dense.base_model)


def test_a_packed_layer_that_transformers_would_convert_again_is_refused(tmp_path: Path) -> None:
    """By a name that is the same before and after: q_proj, whose rows it turns as it loads."""
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    class TurnedConfig(transformers.LlamaConfig):  # type: ignore[name-defined]
        model_type = "turned"

    class Turned(transformers.LlamaForCausalLM):  # type: ignore[name-defined]
        config_class = TurnedConfig

    turn = [WeightConverter("self_attn.q_proj", "self_attn.q_proj", operations=[Transpose(0, 1)])]
    register_checkpoint_conversion_mapping("turned", turn, overwrite=True)
    options = small_llama(hidden_size=64, intermediate_size=64).config.to_dict()
    model = Turned(TurnedConfig(**{**options, "model_type": "turned"}))
    model = with_zeros(model.to(torch.float32))
    macko.sparsify_(model, progress=False)
    before = model.state_dict()
    with pytest.raises(ValueError, match=r"would not find the packed model.layers.0.self_attn.q_proj again"):
        model.save_pretrained(tmp_path / "packed")
    assert not list((tmp_path).glob("packed/*.safetensors"))
    assert not list((tmp_path).glob("packed/config.json"))
    assert model.state_dict().keys() == before.keys()


def siglip(**options: Any) -> Any:
    return made("siglip_vision_model", "SiglipVisionModel", image_size=16, patch_size=8, **options)


@pytest.mark.parametrize("how", ["packed", "MackoConfig"])
def test_a_model_that_starts_its_childrens_weights_while_it_loads(how: str, tmp_path: Path) -> None:
    """Siglip's attention has no weights of its own, so transformers starts those of q_proj."""
    dense = siglip()
    model = copy.deepcopy(dense)
    if how == "packed":
        macko.sparsify_(model, progress=False)
    model.save_pretrained(tmp_path)
    options = {} if how == "packed" else {"quantization_config": macko.MackoConfig()}
    loaded = type(dense).from_pretrained(tmp_path, **options)
    assert sparse_names(loaded)
    assert_same_weights(loaded, dense)


class Rescaling(nn.Module):
    """Halves weights in place when it first runs, as RWKV does for inference."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.block.out, self.block.value = nn.Linear(64, 64), nn.Linear(64, 64)
        self.value = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.block.out.weight.div_(2)
        self.block.value.weight.data *= 0.5
        x *= self.value.weight[0]
        return self.block.value(self.block.out(x))


def test_a_weight_that_the_models_code_changes_is_left_by_name() -> None:
    model = with_zeros(Rescaling())
    report = {row.name: row.reason for row in macko.sparsify_(model, progress=False)}
    changed = "Rescaling's code changes its weight in place"
    assert {name for name, reason in report.items() if reason == changed} == {"block.out", "block.value"}
    assert sparse_names(model) == {"block.0", "block.1", "value"}


def test_rwkv_divides_its_weights_by_itself(tmp_path: Path) -> None:
    sizes = {"context_length": 32, "num_hidden_layers": 3, "attention_hidden_size": 64, "rescale_every": 1}
    dense = made("rwkv", **sizes)
    dense.save_pretrained(tmp_path / "dense")
    loaded = type(dense).from_pretrained(tmp_path / "dense", quantization_config=macko.MackoConfig())
    assert len(sparse_names(loaded)) == 15
    assert not any(name.endswith(("attention.output", "feed_forward.value")) for name in sparse_names(loaded))
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS)[0], dense(TOKENS)[0])


T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}


@pytest.mark.skipif(VERSION >= (5, 4), reason="transformers before 5.4 is refused, this is newer")
def test_float32_that_transformers_before_5_4_keeps_is_refused(tmp_path: Path) -> None:
    dense = made("t5", **T5).half()
    macko.sparsify_(dense, progress=False)
    dense.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"wo.weight: wo is kept in torch.float32.* before 5.4 casts packed integers"):
        type(dense).from_pretrained(tmp_path, dtype=torch.float16)


@pytest.mark.skipif(VERSION < (5, 4), reason="transformers before 5.4 is refused, see above")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, "auto"])
@pytest.mark.parametrize("kind", ["t5", pytest.param("umt5", marks=pytest.mark.slow)])
def test_float32_that_transformers_keeps(kind: str, dtype: Any, tmp_path: Path) -> None:
    dense = made(kind, **T5).half()
    dense.save_pretrained(tmp_path / "dense")
    dense = type(dense).from_pretrained(tmp_path / "dense", dtype=dtype)
    wanted = {name: parameter.dtype for name, parameter in dense.named_parameters()}
    assert wanted["encoder.block.0.layer.1.DenseReluDense.wo.weight"] == (
        torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    )
    sparse = copy.deepcopy(dense)
    macko.sparsify_(sparse, progress=False)
    sparse.save_pretrained(tmp_path / "packed")
    models = [
        type(dense).from_pretrained(tmp_path / "packed", dtype=dtype),
        type(dense).from_pretrained(tmp_path / "dense", dtype=dtype, quantization_config=macko.MackoConfig()),
        macko.load_model(copy.deepcopy(dense), tmp_path / "packed"),
    ]
    for model in models:
        assert sparse_names(model) == sparse_names(sparse)
        assert {name: model.get_submodule(name).dtype for name in sparse_names(model)} == {
            name: wanted[f"{name}.weight"] for name in sparse_names(model)
        }
        assert_same_weights(model, dense)


@pytest.mark.skipif(VERSION < (5, 4), reason="transformers before 5.4 is refused, see above")
def test_float32_that_transformers_keeps_is_dense_where_no_kernel_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    dense = made("t5", **T5).half()
    dense.save_pretrained(tmp_path / "dense")
    dense = type(dense).from_pretrained(tmp_path / "dense", dtype=torch.float16)
    macko.sparsify_(sparse := copy.deepcopy(dense), progress=False)
    sparse.save_pretrained(tmp_path / "packed")
    refused = "macko.integrations.transformers.unsupported"
    monkeypatch.setattr(refused, lambda dtype, device: "no" if dtype == torch.float32 else None)
    with pytest.warns(UserWarning, match=r"\d layers: dense, as transformers keeps float32"):
        model = type(dense).from_pretrained(tmp_path / "packed", dtype=torch.float16)
    assert sparse_names(sparse) - sparse_names(model) == {name for name in sparse_names(sparse) if name.endswith("wo")}
    assert_same_weights(model, dense)
    with pytest.raises(ValueError, match="the weight cannot be loaded: no"):
        type(dense).from_pretrained(tmp_path / "packed", dtype=torch.float32)


# ---- Options of from_pretrained --------------------------------------------------------------------------------------


def test_the_config_of_a_model_in_memory(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    """What the files are is in the config.json beside them, whatever the config says that is given."""
    model, dense = pruned
    macko.sparsify_(sparse := copy.deepcopy(model), progress=False)
    unsaved = copy.deepcopy(sparse.config)
    sparse.save_pretrained(tmp_path / "packed")
    loaded = load(tmp_path / "packed")
    for config in (unsaved, sparse.config, loaded.config):
        for folder in (dense, tmp_path / "packed"):
            again = load(folder, config=config)
            assert sparse_names(again) == sparse_names(sparse)
            assert_same_bits(again(TOKENS).logits, loaded(TOKENS).logits)
    for options in ({}, {"ignore_mismatched_sizes": True}):
        again = load(tmp_path / "packed", config=model.config, **options)  # of a dense model
        assert sparse_names(again) == sparse_names(sparse)
        assert_same_bits(again(TOKENS).logits, loaded(TOKENS).logits)


@pytest.mark.skipif(VERSION < (5, 23), reason="transformers before 5.23 is refused, see below")
@pytest.mark.parametrize("option", [{"vocab_size": 120}, {"intermediate_size": 128}])
def test_other_sizes_that_may_be_ignored(option: dict[str, int], pruned: tuple[Any, Path], tmp_path: Path) -> None:
    macko.sparsify_(sparse := with_zeros(copy.deepcopy(pruned[0])), ignore=(), progress=False)
    sparse.save_pretrained(tmp_path / "packed")
    with pytest.raises(ValueError, match=r"the checkpoint has shape \[\d+, \d+\], the model \[\d+, \d+\]"):
        load(tmp_path / "packed", **option)
    loaded = load(tmp_path / "packed", **option, ignore_mismatched_sizes=True)
    other = "lm_head" if "vocab_size" in option else ".mlp."
    assert sparse_names(loaded) == {name for name in sparse_names(sparse) if other not in name} != sparse_names(sparse)
    assert {type(loaded.get_submodule(name)) for name in sparse_names(sparse) - sparse_names(loaded)} == {nn.Linear}
    for name in sparse_names(loaded):
        assert_same_bits(loaded.get_submodule(name).packed.to_dense(), sparse.get_submodule(name).packed.to_dense())


@pytest.mark.skipif(VERSION >= (5, 23), reason="transformers before 5.23 is refused, this is newer")
def test_a_layer_of_another_size_is_refused_by_transformers_before_5_23(tmp_path: Path) -> None:
    dense = made("bert", "BertForSequenceClassification", num_labels=3)
    macko.sparsify_(dense, progress=False)
    dense.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"classifier.\w+: the checkpoint has .* this transformers does not start it"):
        type(dense).from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)


def test_a_packed_state_without_a_folder_is_refused(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    macko.sparsify_(sparse := copy.deepcopy(pruned[0]), progress=False)
    for config in (pruned[0].config, sparse.config):
        with pytest.raises(ValueError, match=r"state_dict has model.layers.0.self_attn.q_proj packed by macko"):
            type(sparse).from_pretrained(None, config=config, state_dict=sparse.state_dict())
    again = type(sparse).from_pretrained(None, config=pruned[0].config, state_dict=pruned[0].state_dict())
    assert_same_model(again, pruned[0])
    sparse.save_pretrained(tmp_path)  # and so is what its file holds, but with what its config.json says
    state = load_file(tmp_path / "model.safetensors")
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(ValueError, match=r"state_dict has model.layers.\d.\w+.\w+_proj packed by macko"):
            type(sparse).from_pretrained(None, config=pruned[0].config, state_dict=state, **options)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    if VERSION < (5, 4):
        with pytest.raises(ValueError, match=r"state_dict: transformers before 5.4 casts packed integers too"):
            type(sparse).from_pretrained(None, config=config, state_dict=state)
        return
    again = type(sparse).from_pretrained(None, config=config, state_dict=state)
    assert sparse_names(again) == sparse_names(sparse)
    assert_same_weights(again, pruned[0])


@pytest.mark.parametrize("how", ["packed", "MackoConfig", "state_dict"])
@pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"])
def test_a_layer_that_no_file_has_is_refused(how: str, lost: str, pruned: tuple[Any, Path], tmp_path: Path) -> None:
    model = copy.deepcopy(pruned[0])
    if how == "packed":
        macko.sparsify_(model, progress=False)
    model.save_pretrained(tmp_path)
    with edited(tmp_path / "model.safetensors") as state:
        for name in [name for name in state if name.startswith(lost) and "bias" not in name]:
            del state[name]
    options: dict[str, Any] = {} if how == "packed" else {"quantization_config": macko.MackoConfig()}
    folder: Any = tmp_path
    if how == "state_dict":
        folder, options = None, {**options, "config": model.config, "state_dict": state}
    with pytest.raises(ValueError, match=re.escape(lost)):
        type(model).from_pretrained(folder, **options)


def test_a_head_that_no_file_has_starts_anew(tmp_path: Path) -> None:
    """As in every dense model of transformers: of another task, or a pooler."""
    body = made("bert", "BertForMaskedLM")
    body.save_pretrained(tmp_path)
    config = macko.MackoConfig()
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path, quantization_config=config)
    assert len(sparse_names(model)) == 12
    assert not isinstance(model.bert.pooler.dense, macko.SparseLinear)


# ---- Heads -----------------------------------------------------------------------------------------------------------

HEADS = [
    ("llama", "LlamaForCausalLM", {"lm_head"}),
    ("llama", "LlamaForSequenceClassification", {"score"}),
    ("bert", "BertForTokenClassification", {"classifier"}),
    ("bert", "BertForQuestionAnswering", {"qa_outputs"}),
    ("roberta", "RobertaForSequenceClassification", {"classifier.dense", "classifier.out_proj"}),
    ("distilbert", "DistilBertForSequenceClassification", {"pre_classifier", "classifier"}),
    ("rwkv", "RwkvForCausalLM", {"head"}),
    ("siglip_vision_model", "SiglipForImageClassification", {"classifier"}),
]


@pytest.mark.parametrize(("kind", "model_class", "heads"), HEADS)
def test_output_heads_stay_dense_and_unpruned(kind: str, model_class: str, heads: set[str]) -> None:
    if kind == "siglip_vision_model":
        parts = {"vision_config": siglip().config}
        config = transformers.SiglipConfig(**parts)
        model = with_zeros(transformers.SiglipForImageClassification(config))
    else:
        sizes = {"dim": 64, "hidden_dim": 128, "n_layers": 1, "n_heads": 4} if kind == "distilbert" else {}
        model = made(kind, model_class, **sizes)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
    pruned = macko.prune_(model, 0.5, progress=False)
    packed = macko.sparsify_(model, progress=False)
    for report in (pruned, packed):
        assert {row.name for row in report if "lm_head" in row.reason} == heads
    assert all(model.get_submodule(name).weight.all() for name in heads)
    assert sparse_names(model)
    everything = copy.deepcopy(model)
    macko.prune_(everything, 0.5, ignore=(), progress=False)
    assert not any(everything.get_submodule(name).weight.all() for name in heads)


@pytest.mark.parametrize("names", [["down_proj"], ["mlp", "lm_head"], ["score"]])
def test_what_an_adapter_is_to_save_is_trained(names: list[str], tmp_path: Path) -> None:
    """As on the dense base, packed or not; the packed layer is what runs without the adapter."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    sizes = {"num_key_value_heads": 2, "num_labels": 3}
    dense = made("llama", "LlamaForSequenceClassification" if "score" in names else "LlamaForCausalLM", **sizes)
    macko.sparsify_(sparse := copy.deepcopy(dense), ignore=(), progress=False)
    untouched = copy.deepcopy(sparse)
    labels = torch.tensor([0, 2]) if "score" in names else TOKENS
    task = "SEQ_CLS" if "score" in names else "CAUSAL_LM"
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=names, task_type=task)
    trained = []
    for base in (dense, sparse):
        torch.manual_seed(1)
        model = peft.get_peft_model(base, copy.deepcopy(config))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=TOKENS, labels=labels).loss.backward()
            optimizer.step()
        trained.append(model.eval())
    ours = {name: p for name, p in trained[1].named_parameters() if "modules_to_save" in name}
    assert ours
    assert all(p.requires_grad for p in ours.values())
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, trained[0].get_parameter(name))
    with torch.no_grad():
        torch.testing.assert_close(trained[1](TOKENS).logits, trained[0](TOKENS).logits)
        with trained[1].disable_adapter():
            torch.testing.assert_close(trained[1](TOKENS).logits, untouched(TOKENS).logits)
        trained[1].save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(untouched, tmp_path)
        assert_same_bits(again(TOKENS).logits, trained[1](TOKENS).logits)
