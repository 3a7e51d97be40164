"""Packed layers in diffusers' models: LoRA, what is refused, files, and pipelines."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import macko
from macko import SparseLinear
from macko.choose import auto
from macko.nn.offload import OffloadableLinear
from macko.weights import Dense12Weight
from tests.common import assert_same_bits
from tests.tiny_diffusion import DTYPE, MODELS, make, needs_diffusers, run

pytestmark = needs_diffusers


def packed_layers(model: nn.Module) -> dict[str, SparseLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)}


def packed(kind: str) -> tuple[Any, Any]:
    """A dense model, and the same packed."""
    dense = make(kind)
    model = copy.deepcopy(dense)
    report = macko.sparsify_(model, format="dense12", ignore=(), progress=False)
    assert len(packed_layers(model)) == len(report.changed) > 10
    return dense, model


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each weight that is unpacked."""
    counted: list[int] = []
    to_dense = Dense12Weight.to_dense

    def counting(self: Dense12Weight) -> Tensor:
        counted.append(1)
        return to_dense(self)

    monkeypatch.setattr(Dense12Weight, "to_dense", counting)
    return counted


# ---- LoRA ------------------------------------------------------------------------------------------------------------


def add_lora(*models: Any) -> None:
    from peft import LoraConfig

    for model in models:
        torch.manual_seed(1)
        targets = ["to_q", "to_k", "to_v"]
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False), "a")


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("safe", [False, True])
def test_an_adapter_is_fused_and_unfused_as_in_a_dense_model(kind: str, safe: bool) -> None:
    dense, model = packed(kind)
    add_lora(dense, model)
    assert_same_bits(run(model, kind), run(dense, kind))
    for change in (lambda m: m.fuse_lora(safe_fusing=safe), lambda m: m.unfuse_lora(), lambda m: m.unload_lora()):
        change(dense)
        change(model)
        assert_same_bits(run(model, kind), run(dense, kind))
        for name, layer in packed_layers(model).items():
            assert layer.format == "dense12"
            assert_same_bits(layer.weight.as_subclass(Tensor), dense.get_submodule(name).weight)


def test_an_adapter_is_not_fused_where_a_format_does_not_hold_the_sum() -> None:
    dense, model = packed("flux")
    name = next(name for name in reversed(packed_layers(model)) if name.endswith("to_v"))
    model.set_submodule(name, SparseLinear.from_linear(dense.get_submodule(name), "macko"))
    add_lora(model)
    before = run(model, "flux")
    with pytest.raises(ValueError, match=f"fuse_lora: {name} is packed as macko, which does not hold its sum"):
        model.fuse_lora()
    assert_same_bits(run(model, "flux"), before)


def test_no_layer_is_unpacked_to_look_whether_an_adapter_fits(unpacked: list[int]) -> None:
    from diffusers import FluxPipeline

    _, model = packed("flux")
    unpacked.clear()
    name = "transformer_blocks.0.attn.to_q"
    lora = {f"{name}.lora_A.weight": torch.zeros(4, 256), f"{name}.lora_B.weight": torch.zeros(256, 4)}
    FluxPipeline._maybe_expand_transformer_param_shape_or_error_(model, lora_state_dict=lora)
    assert not unpacked


def test_t5_looks_at_the_dtype_of_weights(unpacked: list[int]) -> None:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(d_model=256, d_kv=64, num_heads=4, d_ff=512, num_layers=1, feed_forward_proj="gated-gelu")
    dense = T5EncoderModel(config).bfloat16().eval()
    model = copy.deepcopy(dense)
    macko.sparsify_(model, format="dense12", ignore=(), progress=False)
    unpacked.clear()
    with torch.no_grad():
        got, wanted = (m(torch.arange(8)[None]).last_hidden_state for m in (model, dense))
    assert_same_bits(got, wanted)
    assert not unpacked


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flux", "unet"])
def test_casting_by_layer_is_refused_before_anything_is_cast(kind: str) -> None:
    from diffusers.hooks import apply_layerwise_casting

    _, model = packed(kind)
    before = run(model, kind)
    with pytest.raises(ValueError, match=r"enable_layerwise_casting: \S+ is packed by macko.*nothing has been cast"):
        model.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    with pytest.raises(ValueError, match="is packed by macko"):
        apply_layerwise_casting(model, torch.float8_e4m3fn, torch.bfloat16)
    assert_same_bits(run(model, kind), before)
    make(kind).enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)


@pytest.mark.parametrize("kind", ["flux", "unet"])  # of a mixin, and of the model's own
def test_fused_projections_are_refused_before_one_is_made(kind: str) -> None:
    _, model = packed(kind)
    modules = dict(model.named_modules()).keys()
    with pytest.raises(ValueError, match=r"fuse_qkv_projections: \S+ is packed by macko"):
        model.fuse_qkv_projections()
    assert dict(model.named_modules()).keys() == modules
    make(kind).fuse_qkv_projections()


# ---- Packed as it is read, saved, read again -------------------------------------------------------------------------


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor).contiguous().view(-1).view(torch.uint8)


def assert_same_files(one: Path, other: Path) -> None:
    a, b = (
        {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()} for folder in (one, other)
    )
    assert a.keys() == b.keys()
    assert all(torch.equal(bytes_of(a[name]), bytes_of(b[name])) for name in a)


def config() -> Any:
    return macko.MackoConfig(format="dense12", ignore=[])


@pytest.mark.parametrize("kind", MODELS)
def test_packed_as_it_is_read_and_saved_in_shards(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(kind).save_pretrained(tmp_path / "a", max_shard_size="1MB")
    load = type(make(kind)).from_pretrained
    dense = load(tmp_path / "a", torch_dtype=torch.bfloat16)
    model = load(tmp_path / "a", torch_dtype=torch.bfloat16, quantization_config=config())
    assert len(packed_layers(model)) == len(model.hf_quantizer.report.changed) > 10
    assert {type(layer) for layer in packed_layers(model).values()} == {SparseLinear}
    assert_same_bits(run(model, kind), run(dense, kind))
    if kind == "wan":  # which the class keeps
        kept = [row for row in model.hf_quantizer.report if row.reason == "the model keeps it in float32"]
        assert kept
        assert all(model.get_submodule(row.name).weight.dtype == torch.float32 for row in kept)
    macko.offloadable_(model)
    model.save_pretrained(tmp_path / "b", max_shard_size="1MB")
    files = list((tmp_path / "b").glob("*.safetensors"))
    assert len(files) > 1
    about = json.loads((tmp_path / "b/config.json").read_text())["quantization_config"]
    assert about["layers"].keys() == packed_layers(model).keys()
    assert {layer["format"] for layer in about["layers"].values()} == {"planes12"}
    assert {name for file in files for name in load_file(file)} >= {f"{name}.low" for name in about["layers"]}
    for packs in (False, True):
        monkeypatch.setattr(auto, "is_held_packed", lambda weight, device, packs=packs: packs)
        again = load(tmp_path / "b", torch_dtype=torch.bfloat16)
        assert packed_layers(again).keys() == (packed_layers(model).keys() if packs else set())
        assert {type(layer) for layer in packed_layers(again).values()} <= {SparseLinear}
        assert again.state_dict().keys() == dense.state_dict().keys()
        for name, tensor in dense.state_dict().items():
            assert torch.equal(bytes_of(again.state_dict()[name]), bytes_of(tensor)), name
        assert_same_bits(run(again, kind), run(dense, kind))
    again.save_pretrained(tmp_path / "c", max_shard_size="1MB")
    assert_same_files(tmp_path / "b", tmp_path / "c")
    for one in (model, again):
        one.dequantize()
        assert not packed_layers(one)
        assert_same_bits(run(one, kind), run(dense, kind))
    again.save_pretrained(tmp_path / "d", max_shard_size="1MB")
    assert_same_files(tmp_path / "a", tmp_path / "d")


def test_a_model_that_was_packed_in_memory_is_saved_packed_and_sparse_layers_too(tmp_path: Path) -> None:
    dense, model = packed("flux")
    name, other = list(packed_layers(model))[:2]
    dense.get_submodule(name).weight[:, ::2] = 0
    model.set_submodule(name, SparseLinear.from_linear(dense.get_submodule(name), "macko"))
    model.save_pretrained(tmp_path / "a")
    assert "hf_quantizer" not in vars(model)
    assert "quantization_config" not in model.config
    again = type(model).from_pretrained(tmp_path / "a", torch_dtype=torch.bfloat16)
    assert packed_layers(again).keys() == {name}  # what has zeros is packed on a CPU too
    assert_same_bits(run(again, "flux"), run(dense, "flux"))
    half = type(model).from_pretrained(tmp_path / "a", torch_dtype=torch.float16)
    assert_same_bits(half.get_submodule(other).weight, dense.get_submodule(other).weight.half())
    assert_same_bits(half.get_submodule(name).weight.as_subclass(Tensor), dense.get_submodule(name).weight.half())
    model.set_submodule(name, SparseLinear.from_linear(dense.get_submodule(name), "dense12"))
    model.save_pretrained(tmp_path / "b", safe_serialization=False)  # what torch.save writes is dense
    plain = type(model).from_pretrained(tmp_path / "b", torch_dtype=torch.bfloat16, use_safetensors=False)
    assert_same_bits(run(plain, "flux"), run(dense, "flux"))
    add_lora(model)
    with pytest.raises(ValueError, match=r"to_q\.base_layer is inside of a wrapper of PEFT's adapters"):
        model.save_pretrained(tmp_path / "c")
    assert "state_dict" not in vars(model)
    model.unload_lora()
    assert not packed_layers(model.dequantize())
    assert_same_bits(run(model, "flux"), run(dense, "flux"))


def test_files_that_do_not_fit_are_refused_by_the_layers_name(tmp_path: Path) -> None:
    _, model = packed("flux")
    model.save_pretrained(tmp_path)
    name = next(iter(packed_layers(model)))
    file, about = tmp_path / "diffusion_pytorch_model.safetensors", tmp_path / "config.json"
    tensors, config = load_file(file), json.loads(about.read_text())

    def assert_refused(match: str, but: str = "", layers: Any = None, **changed: Tensor) -> None:
        changed = {f"{name}.{key}": tensor for key, tensor in changed.items()}
        save_file({k: t for k, t in (tensors | changed).items() if k != f"{name}.{but}"}, file, {"format": "pt"})
        quantization = config["quantization_config"] | {
            "layers": config["quantization_config"]["layers"] | (layers or {})
        }
        about.write_text(json.dumps(config | {"quantization_config": quantization}))
        with pytest.raises(ValueError, match=match):
            type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)

    assert_refused(f"{name}: not a planes12 weight: byte 0 of its table", table=tensors[f"{name}.table"] + 1)
    assert_refused(f"the files have no {name}.columns", but="columns")
    sizes = config["quantization_config"]["layers"][name]
    assert_refused("packed layer other, the model has no such module", layers={"other": sizes})
    assert_refused(f"{name}: the checkpoint has shape", layers={name: sizes | {"rows": sizes["rows"] + 1}})
    assert_refused("dtype is 'float32'", layers={name: sizes | {"dtype": "float32"}})


def test_no_dense_weight_is_unpacked_while_others_are_read(tmp_path: Path, unpacked: list[int]) -> None:
    make("flux").save_pretrained(tmp_path, max_shard_size="1MB")
    type(make("flux")).from_pretrained(tmp_path, torch_dtype=torch.bfloat16, quantization_config=config())
    assert not unpacked


def test_a_map_that_offloads_is_refused() -> None:
    from macko.integrations.diffusers import MackoDiffusersQuantizer

    with pytest.raises(ValueError, match=r"MackoConfig\(\.\.\., offload=True\)"):
        MackoDiffusersQuantizer(config()).validate_environment(device_map={"a": 0, "b": "cpu"})


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("places", ["cpu", "auto", {"": "cpu", "transformer_blocks": "disk"}])
def test_a_map_with_cpu_and_disk(tmp_path: Path, packed: bool, places: Any) -> None:
    dense = make("flux")
    dense.save_pretrained(tmp_path / "a")
    offloading, wanted = config(), run(dense, "flux")
    if packed:
        model = type(dense).from_pretrained(tmp_path / "a", torch_dtype=DTYPE, quantization_config=config())
        model.save_pretrained(tmp_path / "b")
        offloading = macko.MackoConfig()
    offloading.offload = True
    asked = {"device_map": places, "offload_folder": tmp_path / "c", "quantization_config": offloading}
    if places == "auto":  # what the CPU has no room for
        asked["max_memory"] = {"cpu": 4_500_000}
    folder = tmp_path / ("b" if packed else "a")
    model = type(dense).from_pretrained(folder, torch_dtype=DTYPE, **asked)
    found = [layer for layer in model.modules() if isinstance(layer, SparseLinear)]
    assert {type(layer) for layer in found} == {OffloadableLinear}
    assert len(found) > 20
    assert any(layer.device.type == "meta" for layer in found) == (places != "cpu")
    for _ in range(2):
        assert_same_bits(run(model, "flux"), wanted)


# ---- A pipeline ------------------------------------------------------------------------------------------------------


def pipeline() -> Any:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    transformer = make("flux")
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(32,), latent_channels=16, norm_num_groups=8, sample_size=32,
        shift_factor=0.1, scaling_factor=0.3,
    )  # fmt: skip
    clip = CLIPTextConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, vocab_size=100,
        projection_dim=256,
    )  # fmt: skip
    t5 = T5Config(
        d_model=256, d_kv=64, num_heads=4, d_ff=512, num_layers=1, feed_forward_proj="gated-gelu", vocab_size=128
    )
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, text_encoder=CLIPTextModel(clip), tokenizer=None,
        text_encoder_2=T5EncoderModel(t5), tokenizer_2=None, transformer=transformer,
    ).to(torch.bfloat16)  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe: Any) -> Tensor:
    return pipe(
        prompt_embeds=torch.ones(1, 8, 256).bfloat16(), pooled_prompt_embeds=torch.ones(1, 256).bfloat16(), height=32,
        width=32, num_inference_steps=2, output_type="pt", generator=torch.Generator().manual_seed(0),
    ).images  # fmt: skip


def test_a_whole_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import FluxPipeline, PipelineQuantizationConfig

    pipe = pipeline()
    wanted = image(pipe)
    pipe.save_pretrained(tmp_path / "a")
    monkeypatch.setattr(auto, "DENSE12_WEIGHTS", 256 * 256)  # such layers are too small to gain
    reports = macko.compress_(pipe, offload=True, progress=False)
    assert reports.keys() == {"transformer", "text_encoder", "text_encoder_2"}
    for name, report in reports.items():
        assert len(packed_layers(getattr(pipe, name))) == len(report.changed) > 5
    assert_same_bits(image(pipe), wanted)
    pipe.save_pretrained(tmp_path / "b")
    a, b = ((tmp_path / folder / "transformer/diffusion_pytorch_model.safetensors").stat().st_size for folder in "ab")
    assert b < 0.8 * a
    nothing = {"tokenizer": None, "tokenizer_2": None}
    read = FluxPipeline.from_pretrained(tmp_path / "b", torch_dtype=torch.bfloat16, **nothing)
    read.set_progress_bar_config(disable=True)
    assert_same_bits(image(read), wanted)
    for quantization in (
        PipelineQuantizationConfig(quant_mapping={"transformer": config(), "text_encoder_2": config()}),
        PipelineQuantizationConfig(
            quant_backend="macko", quant_kwargs={"format": "dense12", "ignore": []},
            components_to_quantize=["transformer", "text_encoder_2"],
        ),
    ):  # fmt: skip
        options = {"quantization_config": quantization, **nothing}
        read = FluxPipeline.from_pretrained(tmp_path / "a", torch_dtype=torch.bfloat16, **options)
        read.set_progress_bar_config(disable=True)
        counts = {name: len(packed_layers(getattr(read, name))) for name in reports}
        assert counts["transformer"] > 5 < counts["text_encoder_2"]
        assert counts["text_encoder"] == 0
        assert_same_bits(image(read), wanted)


@pytest.mark.parametrize("offload", [False, True])
def test_adapters_of_a_pipeline_are_loaded(
    offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unpacked: list[int]
) -> None:
    from diffusers import FluxPipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    wanted = pipeline()
    adapter = LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k"], init_lora_weights=False)
    wanted.transformer.add_adapter(adapter)
    layers = get_peft_model_state_dict(wanted.transformer)
    FluxPipeline.save_lora_weights(tmp_path, transformer_lora_layers=layers)
    pipe = pipeline()
    before = image(pipe)
    macko.sparsify_(pipe.transformer, format="dense12", ignore=(), progress=False)
    if offload:
        macko.offloadable_(pipe.transformer)
    unpacked.clear()
    pipe.load_lora_weights(tmp_path)
    assert not unpacked  # diffusers and peft look at the names of a state_dict
    assert_same_bits(image(pipe), image(wanted))
    pipe.unload_lora_weights()
    assert_same_bits(image(pipe), before)


def test_what_has_nothing_to_pack_is_named() -> None:
    from diffusers import DDPMPipeline, DDPMScheduler

    with pytest.raises(ValueError, match="the DDPMPipeline has no transformer, unet, text_encoder to pack"):
        macko.compress_(DDPMPipeline(unet=None, scheduler=DDPMScheduler()))


def test_sizes_are_those_of_packed_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import diffusion

    dense = make("flux")
    monkeypatch.setattr(diffusion, "DENSE12_WEIGHTS", 256 * 256)
    monkeypatch.setattr(auto, "DENSE12_WEIGHTS", 256 * 256)
    size = diffusion.size_of(dense)
    assert size.dense == sum(parameter.nbytes for parameter in dense.parameters())
    macko.compress_(dense, offload=True, progress=False)
    told = macko.offloadable_(dense)
    assert (size.layers, size.packed, size.pinned_packed) == told
