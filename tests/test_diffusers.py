"""Packed layers in diffusers' models: LoRA, what is refused, files, and pipelines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import macko
from macko import SparseLinear
from macko.weights import Dense12Weight
from tests.common import assert_same_bits
from tests.tiny_diffusion import MODELS, make, needs_diffusers, run

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
    monkeypatch.setattr(Dense12Weight, "to_dense", lambda self: counted.append(1) or to_dense(self))
    return counted


@pytest.mark.parametrize("kind", MODELS)
def test_a_packed_model_says_the_same(kind: str) -> None:
    dense, model = packed(kind)
    assert_same_bits(run(model, kind), run(dense, kind))
    float32 = {name for name, parameter in dense.named_parameters() if parameter.dtype == torch.float32}
    assert bool(float32) == (kind == "wan")
    assert not any(f"{name}.weight" in float32 for name in packed_layers(model))


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
