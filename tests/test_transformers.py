"""transformers and PEFT: a model converts as it loads, saves packed, comes back bit for bit, and takes adapters."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import macko
from macko import formats
from tests.common import assert_same_bits, torch_threads
from tests.tiny_llama import TinyLlama

transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model only waits for the other threads."""
    with torch_threads(1):
        yield


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 90, "hidden_size": 48, "intermediate_size": 104, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **{**sizes, **options}, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128
    )
    return transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


@pytest.fixture
def pruned(tmp_path: Path) -> tuple[Any, Path]:
    """A dense pruned model, and the folder it is saved in."""
    model = llama(attention_bias=True)
    macko.prune_(model, 0.5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "dense")
    return model, tmp_path / "dense"


TOKENS = torch.arange(12).view(2, 6)


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def assert_same_model(got: nn.Module, wanted: nn.Module) -> None:
    state, other = got.state_dict(), wanted.state_dict()
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        assert_same_bits(tensor, other[name])


def sparse_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, macko.SparseLinear)}


@pytest.mark.slow
def test_importing_macko_does_not_import_transformers() -> None:
    code = """
import sys
import macko
assert "transformers" not in sys.modules
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as configs
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as quantizers
assert "macko" in quantizers and configs["macko"] is macko.MackoConfig
macko.integrations.register()  # twice does no harm
del configs["macko"], quantizers["macko"], sys.modules["macko.integrations.transformers"]
macko.integrations.register()  # as where transformers was imported first
assert "macko" in configs and "macko" in quantizers
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_converts_while_it_loads(pruned: tuple[Any, Path]) -> None:
    dense, folder = pruned
    model = load(folder, quantization_config=macko.MackoConfig())
    assert len(sparse_names(model)) == 14
    report = {row.name: row for row in model.hf_quantizer.report}
    assert report["lm_head"].reason == "ignored by 'lm_head'"
    assert report["model.layers.0.mlp.up_proj"].density == 0.5
    assert_same_bits(model(TOKENS).logits, dense(TOKENS).logits)
    reference = copy.deepcopy(dense)
    macko.sparsify_(reference)
    assert_same_model(model, reference)


@pytest.mark.slow
def test_dense_weights_are_gone_one_by_one(pruned: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[int] = []
    alive: list[int] = []
    pack = formats.MackoWeight.smallest.__func__  # type: ignore[attr-defined]

    def watched(cls: Any, w: torch.Tensor) -> Any:
        import gc

        alive.append(
            sum(t.data_ptr() in weights for t in gc.get_objects() if type(t) is nn.Parameter and not t.is_meta)
        )
        weights.append(w.data_ptr())
        return pack(cls, w)

    monkeypatch.setattr(formats.MackoWeight, "smallest", classmethod(watched))
    load(pruned[1], quantization_config=macko.MackoConfig())
    assert max(alive) <= 1  # an address may be used again by the next weight


def test_options_of_the_conversion(pruned: tuple[Any, Path]) -> None:
    _, folder = pruned
    model = load(folder, quantization_config=macko.MackoConfig(ignore=["*.mlp.*", "lm_head"]))
    assert not any("mlp" in name for name in sparse_names(model))
    model = load(folder, quantization_config=macko.MackoConfig(min_sparsity=0.6))
    assert sparse_names(model) == set()
    assert {row.reason for row in model.hf_quantizer.report} >= {"under 60% sparse it would not pay"}


def test_an_unpruned_model_stays_as_it_is(tmp_path: Path) -> None:
    dense = llama()
    dense.save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=macko.MackoConfig())
    assert_same_model(model, dense)
    model.save_pretrained(tmp_path / "again")
    assert_same_model(load(tmp_path / "again"), dense)


@pytest.mark.parametrize("how", ["from_pretrained", "sparsify_"])
@pytest.mark.parametrize("shard", ["50GB", "15KB"])
def test_round_trip(pruned: tuple[Any, Path], tmp_path: Path, how: str, shard: str) -> None:
    dense, folder = pruned
    if how == "sparsify_":
        model = load(folder)
        macko.sparsify_(model)
    else:
        model = load(folder, quantization_config=macko.MackoConfig())
    model.save_pretrained(tmp_path / "sparse", max_shard_size=shard)
    loaded = load(tmp_path / "sparse")
    assert_same_model(loaded, model)
    assert len(sparse_names(loaded)) == 14
    assert_same_bits(loaded(TOKENS).logits, dense(TOKENS).logits)
    assert all(p.requires_grad for p in loaded.parameters())
    assert (len(list((tmp_path / "sparse").glob("*.safetensors"))) > 1) == (shard == "15KB")
    loaded.save_pretrained(tmp_path / "again")
    assert_same_model(load(tmp_path / "again"), model)


def test_saved_folder_is_smaller_and_holds_no_dense_weight(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    load(pruned[1], quantization_config=macko.MackoConfig()).save_pretrained(tmp_path / "sparse")
    tensors = load_file(tmp_path / "sparse" / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.values" in tensors
    assert not [name for name in tensors if name.endswith(("_proj.weight", "_extra_state"))]
    config = json.loads((tmp_path / "sparse" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "macko"
    assert config["layers"]["model.layers.1.mlp.down_proj"] == {
        "format": "macko", "rows": 48, "cols": 104, "delta_bits": 2,
    }  # fmt: skip


def test_no_dense_weight_on_the_way_back(
    pruned: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(pruned[1], quantization_config=macko.MackoConfig()).save_pretrained(tmp_path / "sparse")
    for name in ("from_dense", "to_dense"):
        monkeypatch.setattr(formats.MackoWeight, name, lambda *_, **__: pytest.fail("made a dense weight"))
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
    dense = llama(tie_word_embeddings=True)
    macko.prune_(dense, 0.6, ignore=[])  # the embedding too
    dense.save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=macko.MackoConfig(ignore=[]))
    assert {row.name: row.reason for row in model.hf_quantizer.report}["lm_head"] == "its weight is tied"
    model.save_pretrained(tmp_path / "sparse")
    loaded = load(tmp_path / "sparse")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_bits(loaded(TOKENS).logits, dense(TOKENS).logits)
    assert_same_bits(macko.load_model(llama(tie_word_embeddings=True), tmp_path / "sparse")(TOKENS).logits,
                     dense(TOKENS).logits)  # fmt: skip


def test_experts_in_one_tensor_and_conv1d_are_named(tmp_path: Path) -> None:
    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    mixture = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, num_key_value_heads=2, intermediate_size=48, num_local_experts=4)
    )
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=90, n_embd=32, n_layer=1, n_head=2))
    for model, name, reason in (
        (mixture, "model.layers.0.mlp.experts.down_proj", "holds all experts in one tensor"),
        (gpt, "transformer.h.0.attn.c_attn", "Conv1D is no nn.Linear"),
    ):
        for report in (macko.prune_(model, 0.5), macko.sparsify_(model)):
            assert reason in {row.name: row.reason for row in report}[name]
        model.save_pretrained(tmp_path / name)
        loaded = load(tmp_path / name)
        assert_same_model(loaded, model)
        assert sparse_names(loaded) == sparse_names(model)


def test_greedy_tokens_of_a_trained_model(tiny_llama: TinyLlama, tmp_path: Path) -> None:
    dense = copy.deepcopy(tiny_llama.model)
    macko.prune_(dense, 0.5, "sparsegpt", calibration=tiny_llama.calibration)
    dense.save_pretrained(tmp_path)
    sparse = load(tmp_path, quantization_config=macko.MackoConfig())
    prompt = tiny_llama.held[:1, :20]
    options = {"max_new_tokens": 100, "min_new_tokens": 100, "do_sample": False, "pad_token_id": 0}
    wanted = dense.generate(prompt, **options)
    assert wanted.shape == (1, 120)
    assert torch.equal(sparse.generate(prompt, **options), wanted)


@pytest.mark.parametrize("how", ["sparsify_", "from_pretrained"])
def test_formats_mixed_by_the_masks_that_are_found(tmp_path: Path, how: str) -> None:
    dense = llama(hidden_size=128, intermediate_size=256)
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


def test_eight_bits_only_where_they_are_asked_for() -> None:
    model = llama(hidden_size=128, intermediate_size=256)
    macko.prune_(model, pattern="2:4")
    macko.sparsify_(model, format="mixed", dtype="int8")
    assert model.model.layers[0].mlp.up_proj.packed.label == "slide 2:4 int8"


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

LAYER = "model.layers.0.mlp.up_proj"


def saved(pruned: tuple[Any, Path], folder: Path) -> Path:
    load(pruned[1], quantization_config=macko.MackoConfig()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_an_unknown_version_is_refused(pruned: tuple[Any, Path], tmp_path: Path, version: Any) -> None:
    folder = saved(pruned, tmp_path / "sparse")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["version"] = version
    (folder / "config.json").write_text(json.dumps(config))
    wanted = "of version 2 of macko's files.* install a newer one" if version == 2 else "version is"
    with pytest.raises(ValueError, match=wanted):
        load(folder)


def test_a_damaged_tensor_is_refused_by_name(pruned: tuple[Any, Path], tmp_path: Path) -> None:
    folder = saved(pruned, tmp_path / "sparse")
    tensors = load_file(folder / "model.safetensors")
    for key, damage in (("row_ptr", lambda t: t.flip(0)), ("deltas", lambda t: t | 0xF), ("values", lambda t: t[:-8])):
        changed = {**tensors, f"{LAYER}.{key}": damage(tensors[f"{LAYER}.{key}"]).contiguous()}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"{LAYER}: not a macko weight"):
            load(folder)
    changed = {name: t for name, t in tensors.items() if name != f"{LAYER}.deltas"}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{LAYER}: the checkpoint has no deltas"):
        load(folder)


@pytest.mark.parametrize(
    ("about", "wanted"),
    [
        ({"format": "macko", "rows": 104, "cols": 47, "delta_bits": 4}, "has shape \\[104, 47\\]"),
        ({"format": "macko", "rows": 104, "cols": 48, "delta_bits": 3}, "not a macko weight"),
        ({"format": "elves", "rows": 104, "cols": 48}, "format is 'elves'"),
        ({"format": "macko", "rows": 104, "cols": 48, "delta_bits": 4, "elves": 3}, "elves"),
        ({"format": "macko", "rows": "104", "cols": 48, "delta_bits": 4}, "whole numbers"),
        ("macko", "whole numbers"),
    ],
)
def test_a_damaged_config_is_refused_by_name(pruned: tuple[Any, Path], tmp_path: Path, about: Any, wanted: str) -> None:
    folder = saved(pruned, tmp_path / "sparse")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["layers"][LAYER] = about
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, TypeError), match=LAYER) as error:
        load(folder)
    error.match(wanted)


def test_config_is_json_and_back() -> None:
    config = macko.MackoConfig(ignore=["a", "b"], min_sparsity=0.4)
    again = macko.MackoConfig.from_dict(json.loads(config.to_json_string()))
    assert again.to_dict() == config.to_dict()
    assert macko.MackoConfig.from_dict({**config.to_dict(), "note": "of somebody else"}).to_dict() == config.to_dict()
    for options in ({"format": "elves"}, {"min_sparsity": 3}, {"ignore": [3]}, {"layers": {"a": {"rows": 1.5}}}):
        with pytest.raises((TypeError, ValueError)):
            macko.MackoConfig(**options)


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


def test_gradients_of_an_adapter_are_those_on_the_dense_base(pruned: tuple[Any, Path]) -> None:
    sparse = with_adapter(load(pruned[1], quantization_config=macko.MackoConfig(), dtype=torch.float32))
    dense = with_adapter(load(pruned[1], dtype=torch.float32))
    for model in (sparse, dense):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    wanted = {name: p.grad for name, p in dense.named_parameters() if p.requires_grad}
    for name, parameter in sparse.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, wanted[name])


@pytest.mark.parametrize("options", [{}, {"safe_merge": True}])
def test_merging_an_adapter_is_refused_with_the_reason(pruned: tuple[Any, Path], options: Any) -> None:
    model = with_adapter(load(pruned[1], quantization_config=macko.MackoConfig()))
    before = model(TOKENS).logits
    with pytest.raises(RuntimeError, match="the weight of a SparseLinear is packed"):
        model.merge_and_unload(**options)
    assert_same_bits(model(TOKENS).logits, before)


def test_an_initialisation_that_edits_the_base_is_refused(pruned: tuple[Any, Path]) -> None:
    with pytest.raises(RuntimeError, match="the weight of a SparseLinear is packed"):
        with_adapter(
            load(pruned[1], quantization_config=macko.MackoConfig(), dtype=torch.float32), init_lora_weights="pissa"
        )
