"""compress_, and layers in dense12: the dense ones for every caller, and in files. Bytes: kernels/test_slabs.py."""

import copy
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor, nn

import macko
from macko import SparseLinear
from macko.choose.auto import gains_by_slabs
from macko.weights import Dense12Weight
from tests.common import assert_close_library, assert_same_bits, assert_same_model, devices, random_vector
from tests.kernels.codecs import Dense12, bits_of
from tests.tiny_llama import needs_transformers, small_llama

transformers: Any = importlib.import_module("transformers") if importlib.util.find_spec("transformers") else None
DENSE12 = Dense12(torch.bfloat16, 0)


class Mlp(nn.Module):
    """Siblings that multiply the same input, an output head, and one tied to nothing."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width)
        self.lm_head = nn.Linear(width, 300, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)))


def compressed(device: str = "cpu", **options: Any) -> tuple[Mlp, Mlp]:
    """A dense model and the same one with all layers in dense12."""
    torch.manual_seed(0)
    dense = Mlp().to(device)
    dense.up_proj.weight.data[0, :3] = bits_of(0x8000, 0x7FC1, 0x0001)  # -0.0, a NaN's payload, a denormal
    model = copy.deepcopy(dense)
    report = macko.sparsify_(model, format="dense12", ignore=(), progress=False, **{"merge": False, **options})
    assert [row.format for row in report] == ["dense12"] * 4
    return dense, model


def layers_of(model: nn.Module) -> dict[str, SparseLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)}


def assert_same_weights(model: nn.Module, dense: nn.Module, format: str | None = "dense12") -> None:
    assert len(layers_of(model)) == 4
    for name, layer in layers_of(model).items():
        assert format in (None, layer.format)
        assert_same_bits(layer.weight.as_subclass(Tensor), dense.get_submodule(name).weight)


@pytest.mark.sm80
@pytest.mark.parametrize("device", devices())
def test_a_layer_is_the_dense_one_for_every_caller(device: str) -> None:
    dense, model = compressed(device)
    assert_same_weights(model, dense)
    assert "format=dense12" in repr(model.down_proj)
    x = random_vector(2, 3, 256, dtype=torch.bfloat16).to(device)
    y = model.down_proj(model.gate_proj(x))
    assert_close_library(y, dense.down_proj.weight, dense.gate_proj(x), dense.down_proj.bias)
    again = copy.deepcopy(model)
    assert_same_weights(again, dense)
    assert_same_bits(model.up_proj.to_linear().weight, dense.up_proj.weight)
    half = copy.deepcopy(model).half()
    assert_same_weights(half, copy.deepcopy(dense).half(), None)
    assert half.gate_proj.format == "dense12"
    assert half.down_proj(half.gate_proj(x.half())).dtype == torch.float16
    assert_same_weights(again.cpu(), dense.cpu())
    for name, tensor in again.to("meta").state_dict().items():
        assert tensor.is_meta
        assert tensor.shape == dense.state_dict()[name].shape


def test_to_macko_and_back() -> None:
    w = DENSE12.source(96, 300, rare=0.005)
    w[3, 5] = -0.0  # which the canonical format does not keep
    made = DENSE12.packed(w, "cpu")
    canonical = made.to_macko()
    assert_same_bits(canonical.to_dense(), w + 0)
    assert_same_bits(Dense12Weight.from_macko(canonical).to_dense(), w + 0)
    layer = SparseLinear.from_packed(made)
    assert layer.reformat_("auto") is layer
    assert layer.format == "dense12"
    assert layer.reformat_("macko").format == "macko"
    assert layer.reformat_("dense12").format == "dense12"
    assert_same_bits(layer.weight.as_subclass(Tensor), w + 0)


def test_a_state_is_the_dense_models_and_loaded_into_either() -> None:
    dense, model = compressed()
    state = model.state_dict()
    assert state.keys() == dense.state_dict().keys()
    for name, tensor in dense.state_dict().items():
        assert_same_bits(state[name], tensor)
    other = compressed()[1]
    other.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert not other.up_proj.weight.any()
    other.load_state_dict(state, assign=True)
    assert_same_weights(other, dense)
    with pytest.raises(RuntimeError, match=r"up_proj: size mismatch: the state has shape \[2, 256\], the layer \[512"):
        other.load_state_dict({**state, "up_proj.weight": torch.zeros(2, 256).bfloat16()})
    lacking = {name: tensor for name, tensor in state.items() if name != "up_proj.weight"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "up_proj.weight"\.'):
        other.load_state_dict(lacking)
    assert other.load_state_dict(lacking, strict=False).missing_keys == ["up_proj.weight"]
    spread = (2.0 ** torch.randint(-90, 90, (512, 256))).bfloat16()
    with pytest.raises(RuntimeError, match="up_proj: the table of dense12"):
        other.load_state_dict({**state, "up_proj.weight": spread})


def test_a_state_of_other_formats_is_loaded_as_it_is() -> None:
    """And a dense one into layers that files hold packed is refused, as before."""
    dense, model = compressed()
    layer = SparseLinear.from_linear(dense.down_proj, "macko")
    model.down_proj.load_state_dict(layer.state_dict())
    assert model.down_proj.format == "macko"
    assert_same_bits(model.down_proj.weight.as_subclass(Tensor), dense.down_proj.weight)
    with pytest.raises(RuntimeError, match="the state has a dense weight, and this layer is sparse"):
        layer.load_state_dict(dense.down_proj.state_dict())


def test_distributed_checkpoints_have_the_dense_weight() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    dense, model = compressed()
    state = get_model_state_dict(model)
    assert state.keys() == dense.state_dict().keys()
    other = compressed()[1]
    other.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    set_model_state_dict(other, state)
    assert_same_weights(other, dense)


@pytest.mark.sm80
@pytest.mark.parametrize("device", devices())
def test_merged_layers(device: str) -> None:
    dense, model = compressed(device, merge=True)
    assert model.gate_proj._whole is model.up_proj._whole
    assert_same_weights(model, dense)
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, dense.state_dict()[name])
    for tokens in (1, 3, 80):
        x = random_vector(tokens, 256, dtype=torch.bfloat16).to(device)
        for name in ("gate_proj", "down_proj"):
            given_x = x if name == "gate_proj" else torch.cat([x, x], -1)
            layer = dense.get_submodule(name)
            assert_close_library(model.get_submodule(name)(given_x), layer.weight, given_x, layer.bias)
    on_meta = copy.deepcopy(model).to("meta").state_dict()
    assert {name: t.shape for name, t in on_meta.items()} == {name: t.shape for name, t in dense.state_dict().items()}
    macko.split_(model)
    assert type(model.up_proj) is SparseLinear
    assert_same_weights(model, dense)


def test_siblings_whose_exponents_are_far_apart_are_not_merged() -> None:
    """Each has a table that holds it; one for both would lack too many."""
    model = Mlp()
    model.gate_proj.weight.data *= 2.0**-60
    macko.sparsify_(model, format="dense12", ignore=(), merge=True, progress=False)
    assert {type(layer) for layer in layers_of(model).values()} == {SparseLinear}
    model = Mlp()
    model.gate_proj.weight.data *= 2.0**-4
    macko.sparsify_(model, format="dense12", ignore=(), merge=True, progress=False)
    assert len({type(layer) for layer in layers_of(model).values()}) == 2


def test_compiled_with_a_gradient() -> None:
    dense, model = compressed()
    x = random_vector(3, 256, dtype=torch.bfloat16).requires_grad_()
    torch.manual_seed(0)
    for call in (model.down_proj, torch.compile(model.down_proj, fullgraph=True, backend="aot_eager")):
        wide = torch.cat([x, x], -1)
        y, wanted = call(wide), dense.down_proj(wide)
        torch.testing.assert_close(y, wanted)
        (grad,), (wanted_grad,) = (
            torch.autograd.grad((out * out).sum(), [x], retain_graph=True) for out in (y, wanted)
        )
        torch.testing.assert_close(grad, wanted_grad)


def test_a_sum_behind_one_token_is_its_bias() -> None:
    """What macko.fuse does with any layout's product."""
    from tests.test_fuse import compiled

    dense = nn.Linear(96, 96, bias=False).bfloat16()
    layer, x = SparseLinear.from_linear(dense, "dense12"), random_vector(1, 96, dtype=torch.bfloat16)
    y, names = compiled(lambda x: x + layer(x), x)
    assert names == ["linear"]
    assert_close_library(y, dense.weight.detach(), x, x[0])


def gains_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that it is for, of layers of any size but lm_head's."""
    monkeypatch.setattr(
        "macko.nn.convert.not_dense12", lambda weight, device, tokens: "under so many" if len(weight) == 300 else ""
    )


def test_compress_takes_what_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse layers as sparsify_ does, where they are smaller; all others in 12 bits, but for small and tied ones."""
    gains_here(monkeypatch)
    dense = Mlp()
    dense.up_proj.weight.data *= torch.rand(512, 256) < 0.55  # bitmap with every vector path
    dense.gate_proj.weight.data *= torch.rand(512, 256) < 0.7
    dense.head, dense.embed = nn.Linear(256, 400, bias=False).bfloat16(), nn.Embedding(400, 256)
    dense.embed.weight = dense.head.weight
    model = copy.deepcopy(dense)
    report = macko.compress_(model, progress=False)
    rows = {row.name: row for row in report}
    assert {name: row.format for name, row in rows.items()} == {
        "gate_proj": "dense12", "up_proj": "bitmap", "down_proj": "dense12", "lm_head": "dense", "head": "dense"
    }  # fmt: skip
    assert rows["lm_head"].reason == "under so many"
    assert "shared with embed.weight" in rows["head"].reason
    assert (
        rows["down_proj"].note == "0.000% of its weights listed" or "% of its weights listed" in rows["down_proj"].note
    )
    assert rows["down_proj"].bytes_before * 0.75 < rows["down_proj"].bytes_after < rows["down_proj"].bytes_before * 0.77
    assert "of its weights listed" in str(report)
    for name in rows:
        kept = dense.get_submodule(name).weight
        assert_same_bits(model.get_submodule(name).weight.as_subclass(Tensor), kept if name != "up_proj" else kept + 0)
    again = macko.compress_(model, progress=False)
    assert {row.reason for row in again if row.name in ("up_proj", "down_proj")} == {"is sparse already"}


def test_compress_leaves_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    gains_here(monkeypatch)
    model = Mlp()
    report = macko.compress_(model, ignore=["down_proj"], filter_fn=lambda _, name: name != "up_proj", progress=False)
    assert {row.name: row.reason for row in report if row.format == "dense"} == {
        "down_proj": "ignored by 'down_proj'", "up_proj": "left out by filter_fn", "lm_head": "under so many"
    }  # fmt: skip
    model = Mlp()
    model.up_proj.weight.data = (2.0 ** torch.randint(-90, 90, (512, 256))).bfloat16()
    rows = {row.name: row for row in macko.compress_(model, progress=False)}
    assert rows["up_proj"].format == "dense"
    assert "the table of dense12" in rows["up_proj"].reason


def test_compress_where_nothing_gains() -> None:
    for model, reason in (
        (Mlp(), "dense12 is for GPUs of compute capability 8.0 and newer, it is on cpu"),
        (Mlp().float(), "dense12 is for bfloat16 and float16, it is float32"),
    ):
        with pytest.warns(UserWarning, match=f"compress_ changed none of 4 layers, all of them because: {reason}"):
            report = macko.compress_(model, progress=False)
        assert not report.changed
    with pytest.raises(ValueError, match="compress_ replaces layers in a model, this model is one layer"):
        macko.compress_(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="tokens is 0"):
        macko.compress_(Mlp(), tokens=0)


@pytest.mark.sm80
@pytest.mark.gpu
def test_compress_on_this_gpu() -> None:
    if not gains_by_slabs(torch.device("cuda"), "dense12"):
        pytest.skip("dense12 gains nothing on this GPU")
    dense = Mlp(1024).cuda()
    model = copy.deepcopy(dense)
    report = macko.compress_(model, progress=False)
    formats = {row.name: row.format for row in report}
    assert formats == {"gate_proj": "dense12", "up_proj": "dense12", "down_proj": "dense12", "lm_head": "dense"}
    x, w = random_vector(5, 1024, dtype=torch.bfloat16), dense.gate_proj.weight.detach().cpu()
    DENSE12.assert_close(model.gate_proj(x.cuda()).detach(), w, x)
    assert {layer.format for layer in layers_of(model.cpu()).values()} == {"dense12"}


# transformers and PEFT.

IDS = torch.arange(12).view(2, 6)


@pytest.fixture
def gains_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("macko.nn.convert.not_dense12", lambda weight, device, tokens: "")


def llama(tied: bool = False) -> Any:
    sizes = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    return small_llama(**sizes, num_key_value_heads=4, tie_word_embeddings=tied)


@pytest.mark.usefixtures("gains_everywhere")
@needs_transformers
@pytest.mark.parametrize("merge", [False, True])
def test_save_pretrained_writes_planes_which_are_read_as_dense_here(tmp_path: Path, merge: bool) -> None:
    dense = llama()
    model = copy.deepcopy(dense)
    macko.compress_(model, merge=merge, progress=False)
    assert len(layers_of(model)) == 8  # lm_head too
    torch.testing.assert_close(model(IDS).logits, dense(IDS).logits, rtol=0.05, atol=0.05)
    model.save_pretrained(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert {layer["format"] for layer in config.quantization_config["layers"].values()} == {"planes12"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not layers_of(loaded)
    assert_same_model(loaded, dense)
    assert_same_model(macko.load_model(llama(), tmp_path / "model"), dense)
    assert_same_model(model, dense)  # it is as it was
    assert len(layers_of(model)) == 8
    model.dequantize()  # its config says its dtype as a text by now
    assert not layers_of(model)
    assert_same_model(model, dense)


@pytest.mark.usefixtures("gains_everywhere")
@needs_transformers
def test_packed_beside_layers_that_files_hold_packed(tmp_path: Path) -> None:
    dense = llama()
    dense.model.layers[0].mlp.up_proj.weight.data[:, ::3] = 0
    dense.model.layers[0].mlp.up_proj.weight.data[:, 1::3] = 0
    model = copy.deepcopy(dense)
    macko.compress_(model, progress=False)
    assert model.model.layers[0].mlp.up_proj.format != "dense12"
    model.save_pretrained(tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert set(layers_of(loaded)) == {"model.layers.0.mlp.up_proj"}
    for name, parameter in loaded.named_parameters():
        assert_same_bits(parameter, dense.get_parameter(name))
    macko.compress_(loaded, progress=False)
    assert_same_model(loaded, model)


@pytest.mark.usefixtures("gains_everywhere")
@needs_transformers
def test_tied_embeddings_stay_dense() -> None:
    model = llama(tied=True)
    report = macko.compress_(model, progress=False)
    assert {row.name: row.reason for row in report if row.format == "dense"} == {
        "lm_head": "its weight is shared with model.embed_tokens.weight; copy_tied=True packs a copy"
    }
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.usefixtures("gains_everywhere")
@needs_transformers
def test_tied_embeddings_are_copied_when_asked(tmp_path: Path) -> None:
    """The layer reads its own copy, the embedding the dense one; files and what is loaded are as of the dense model."""
    dense = llama(tied=True)
    table, model = dense.model.embed_tokens.weight, copy.deepcopy(dense)
    row = {row.name: row for row in macko.compress_(model, copy_tied=True, progress=False)}["lm_head"]
    assert isinstance(model.lm_head, SparseLinear)
    assert (row.format, row.reason) == ("dense12", "")
    assert row.bytes_after == model.lm_head.packed.nbytes + table.nbytes
    assert row.note.endswith("a copy: the embedding holds it dense")
    assert_same_bits(model.model.embed_tokens.weight, table)
    assert_same_bits(model.lm_head.weight.as_subclass(Tensor), table)
    torch.testing.assert_close(model(IDS).logits, dense(IDS).logits, rtol=0.05, atol=0.05)
    model.save_pretrained(tmp_path / "model")
    with safetensors.safe_open(tmp_path / "model/model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_same_model(loaded, dense)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    macko.save_model(model, tmp_path / "own.safetensors")
    assert_same_model(macko.load_model(llama(tied=True), tmp_path / "own.safetensors"), dense)


@pytest.mark.usefixtures("gains_everywhere")
@needs_transformers
def test_a_copy_of_a_tied_layer_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(tied=True)
    monkeypatch.setattr("macko.nn.convert._move", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        macko.compress_(model, copy_tied=True, progress=False, device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@needs_transformers
def test_layers_that_files_hold_packed_beside_it_are_not_read_as_dense12(tmp_path: Path) -> None:
    """The config says dense12, which one of them could not even be held in."""
    dense = llama()
    up_proj = dense.model.layers[0].mlp.up_proj
    up_proj.weight.data = (2.0 ** torch.randint(-90, 90, (512, 256))).bfloat16() * (torch.rand(512, 256) < 0.3)
    dense.save_pretrained(tmp_path / "dense")
    config = macko.MackoConfig(format="dense12", ignore=[])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    macko.sparsify_(model, progress=False)
    model.save_pretrained(tmp_path / "packed")
    assert model.config.quantization_config.format == "dense12"  # as it was
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert {name: layer.format for name, layer in layers_of(loaded).items()} == {
        "model.layers.0.mlp.up_proj": model.model.layers[0].mlp.up_proj.format
    }
    loaded.dequantize()
    assert_same_model(loaded, dense)


@needs_transformers
def test_an_adapter_trains_on_it() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    dense = llama()
    base = copy.deepcopy(dense)
    macko.sparsify_(base, format="dense12", ignore=(), progress=False)
    models = []
    for whole in (base, dense):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["up_proj", "q_proj"], init_lora_weights=False)
        models.append(peft.get_peft_model(whole, config))
        models[-1](input_ids=IDS, labels=IDS).loss.backward()
    wanted = {name: p.grad for name, p in models[1].named_parameters() if p.requires_grad}
    for name, parameter in models[0].named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=0.1, atol=1e-3)
    merged, wanted_model = (model.merge_and_unload() for model in models)
    assert {layer.format for layer in layers_of(merged).values()} == {"dense12"}
    for name, layer in layers_of(merged).items():
        assert_same_bits(layer.weight.as_subclass(Tensor), wanted_model.get_submodule(name).weight)


@pytest.mark.parametrize("merge", [False, True])
def test_what_a_weight_is_is_asked_without_unpacking(merge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, model = compressed(merge=merge)
    unpacked: list[int] = []
    to_dense = Dense12Weight.to_dense

    def counting(self: Dense12Weight) -> Tensor:
        unpacked.append(1)
        return to_dense(self)

    monkeypatch.setattr(Dense12Weight, "to_dense", counting)
    for name, layer in layers_of(model).items():
        weight, wanted = layer.weight, dense.get_submodule(name).weight
        for look in (
            lambda w: (w.shape, w.dtype, w.device, w.ndim, w.layout, w.is_cuda, w.is_meta, w.nbytes, w.itemsize),
            lambda w: (w.size(), w.size(0), w.dim(), w.numel(), w.stride(), w.element_size(), len(w)),
            lambda w: (w.data.dtype, w.detach().shape, w.requires_grad_(False).device, w.grad, w.is_leaf),
            lambda w: (w.is_floating_point(), w.is_contiguous(), isinstance(w, Tensor)),
        ):
            assert look(weight) == look(wanted)
        assert not unpacked
        assert_same_bits((weight + 0).as_subclass(Tensor), wanted + 0)
        assert_same_bits(weight.t().float().as_subclass(Tensor), wanted.t().float())
        assert unpacked == [1]  # once for all uses of one look
        unpacked.clear()


@pytest.mark.parametrize("merge", [False, True])
def test_a_sum_is_packed_in_place_of_the_weight(merge: bool) -> None:
    dense, model = compressed(merge=merge)
    for name, layer in layers_of(model).items():
        weight = dense.get_submodule(name).weight.data
        delta, before = torch.randn_like(weight), layer.weight
        first = weight.clone()
        layer.weight.data += delta
        weight += delta
        assert_same_bits(layer.weight.as_subclass(Tensor), weight)
        assert_same_bits(before.as_subclass(Tensor), first)  # as it was looked at
        layer.weight.data.sub_(delta, alpha=2)
        weight.sub_(delta, alpha=2)
        layer.weight.data = layer.weight.clone()
        assert_same_bits(layer.weight.as_subclass(Tensor), weight)
        for bad in (weight.float(), weight[1:]):
            with pytest.raises(RuntimeError, match="cannot become"):
                layer.weight.data = bad
        far = torch.exp2(torch.randint(-120, 120, weight.shape).float()).bfloat16()
        with pytest.raises(RuntimeError, match="dense12 does not hold what its weight is to become: "):
            layer.weight.data = far
        with pytest.raises(RuntimeError, match="is packed: this is a dense copy"):
            layer.weight.data.mul_(2)
        assert_same_bits(layer.weight.as_subclass(Tensor), weight)
    assert_same_weights(model, dense, format=None)


def test_a_compiled_look_at_the_dtype() -> None:
    _, model = compressed()

    def forward(x: Tensor, layer: nn.Linear) -> Tensor:
        return layer(x.to(layer.weight.dtype))

    x = torch.randn(3, 256)
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same_bits(compiled(x, model.up_proj), forward(x, model.up_proj))


def test_a_state_without_content() -> None:
    """As of other layers: refused to be copied, taken where it is assigned."""
    layer = SparseLinear.from_linear(nn.Linear(64, 64, bias=False).bfloat16(), "dense12")
    state = {name: tensor.to("meta") for name, tensor in layer.state_dict().items()}
    before = layer.packed.to_dense()
    with pytest.raises(RuntimeError, match="no content to copy"):
        layer.load_state_dict(state)
    assert_same_bits(layer.packed.to_dense(), before)
    for held in (layer, copy.deepcopy(layer).to("meta")):
        held.load_state_dict(state, assign=True)
        assert (held.device.type, held.format) == ("meta", "dense12")
