"""SparseExperts in the place of every experts class of transformers 5, made tiny, and in models."""

import copy
import functools
import gc
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import macko
from macko.choose.exponents import outside_table
from macko.choose.options import Options
from macko.cli import main
from macko.measure import bench
from macko.nn.experts import (
    SparseExperts,
    Stack,
    UnfoldedExperts,
    fold_,
    is_experts,
    oriented,
    projections,
    unfold_,
)
from tests.common import assert_same_bits, edited, two_processes

transformers = pytest.importorskip("transformers", minversion="5.19")
EXPERTS, HIDDEN, INNER, TOP_K = 4, 64, 80, 3


class AnyConfig:
    """Whatever an experts class asks of its config, by the name it asks for."""

    _experts_implementation = "grouped_mm"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "act" in name.split("_") or name.endswith(("_act", "activation")):
            return "silu"
        if name in ("hidden_size", "moe_hidden_size", "moe_latent_size", "expert_hidden_size"):
            return HIDDEN
        if "inter" in name or "ffn" in name:
            return INNER
        if "expert" in name or "routed" in name:
            return EXPERTS
        return {"limit": 0.5, "alpha": 1.702, "cap": 3.0, "softcap": 3.0, "beta": 1.0}.get(
            name.rpartition("_")[2], 1e-5
        )


@functools.cache
def classes() -> dict[str, str]:
    """Module of each class that transformers runs by its experts interface."""
    root = Path(transformers.__file__).parent / "models"
    pattern = re.compile(r"^@use_experts_implementation[^\n]*\nclass (\w+)\(", re.M)
    files = sorted(root.glob("*/modeling_*.py"))
    found = {name: file for file in files for name in pattern.findall(file.read_text(encoding="utf-8"))}
    return {name: f"transformers.models.{file.parent.name}.{file.stem}" for name, file in found.items()}


def tiny(name: str, zeros: float = 0.0) -> nn.Module:
    kind, torch_seed = getattr(importlib.import_module(classes()[name]), name), 0
    for arguments in ((AnyConfig(),), (AnyConfig(), EXPERTS), (AnyConfig(), EXPERTS, INNER), (AnyConfig(), INNER)):
        try:
            experts = kind(*arguments)
            break
        except TypeError:
            continue
    else:
        raise AssertionError(f"{name} wants other arguments")
    torch.manual_seed(torch_seed)
    experts = experts.bfloat16().eval()
    with torch.no_grad():
        for p in experts.parameters():
            p.normal_(0, 0.1)
            if p.dim() == 3:
                p.mul_(torch.rand(p.shape) >= zeros)
    return experts


def packed(dense: nn.Module, format: str) -> SparseExperts:
    names = projections(dense)
    return SparseExperts(dense, {name: Stack.from_dense(oriented(dense, name), Options(format)) for name in names})


def routed(dense: nn.Module, tokens: int = 21) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    width = dense.down_proj.shape[2 if dense.is_transposed else 1]
    x = torch.randn(tokens, width).bfloat16()
    weights, index = torch.rand(tokens, dense.num_experts).topk(TOP_K)  # type: ignore[call-overload]
    return x, index, weights


def bound(sparse: SparseExperts, x: Tensor, index: Tensor, weights: Tensor, products: float = 0.0) -> Tensor:
    """What roundings of a token's terms and of their sums come to; products: of a term, relative."""
    terms = [sparse(x, index[:, [i]], weights[:, [i]]).double().abs() for i in range(index.shape[1])]
    u = torch.finfo(x.dtype).eps / 2
    return ((2 * index.shape[1] + 4) * u + products) * torch.stack(terms).sum(0) + 1e-30


#: Classes that differ by flags; the others are slow tests, as there are so many.
QUICK = ("MixtralExperts", "GptOssExperts", "NemotronHExperts")


@torch.no_grad()
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in classes()])
def test_every_experts_class_gives_what_grouped_mm_gives(name: str) -> None:
    dense = tiny(name)
    assert is_experts(dense)
    args = routed(dense)
    wanted = dense(*args)
    sparse = packed(dense, "dense12")
    assert not any(p.dim() == 3 for p in sparse.parameters())
    off = (sparse(*args).double() - wanted.double()).abs()
    assert (off <= bound(sparse, *args)).all()
    again = sparse.to_dense()
    assert type(again) is type(dense)
    for key in projections(dense):
        assert torch.equal(getattr(again, key), getattr(dense, key)), key
    assert torch.equal(again(*args), wanted)


def test_there_are_as_many_classes_as_the_page_says() -> None:
    assert len(classes()) >= 60


# ---- Whole models ----------------------------------------------------------------------------------------------------

COMMON = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"moe_intermediate_size": 256, "intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 4,
                  "head_dim": 32},
    "gpt_oss": {"intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    "deepseek_v3": {"moe_intermediate_size": 256, "intermediate_size": 96, "n_routed_experts": 8, "n_group": 2,
                    "num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32,
                    "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
                    "num_key_value_heads": 4},
}  # fmt: skip


def model_of(kind: str, zeros: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**COMMON, "hidden_size": 256, **MODELS[kind]})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        for module in model.modules():
            if is_experts(module):
                for p in module.parameters(recurse=False):
                    p.normal_(0, 0.05)
                    p.mul_(torch.rand(p.shape) >= zeros if p.dim() == 3 else 1)
    return model.eval()


@torch.no_grad()
def logits(model: Any, tokens: int = 11) -> Tensor:
    torch.manual_seed(2)
    return model(torch.randint(3, 256, (3, tokens)), use_cache=False).logits


def sparse_of(model: nn.Module) -> list[SparseExperts]:
    return [module for module in model.modules() if isinstance(module, SparseExperts)]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("format", "zeros"), [("dense12", 0.0), ("auto", 0.6)])
def test_models_give_the_logits_of_dense(kind: str, format: str, zeros: float) -> None:
    model = model_of(kind, zeros)
    model.set_experts_implementation("grouped_mm")
    wanted = logits(model)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    report = macko.sparsify_(
        model, format=format, filter_fn=lambda module, name: name.endswith("mlp.experts"), progress=False
    )
    packed = sparse_of(model)
    assert packed
    assert not any(is_experts(module) for module in model.modules())
    assert sum(row.format != "dense" for row in report) == 2 * len(packed)
    assert all(len(row.shape) == 3 and row.bytes_after < row.bytes_before for row in report if row.format != "dense")
    got = logits(model)
    if kind == "gpt_oss":  # whose matrices lie the other way round: torch's product of them has other bits
        assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()
    else:  # the CPU's products are those of grouped_mm bit for bit, which no wrong route could give
        assert torch.equal(got, wanted)
    assert torch.equal(logits(copy.deepcopy(model)), got)
    macko.integrations.transformers.MackoHfQuantizer(macko.MackoConfig())._dequantize(model)
    assert not sparse_of(model)
    assert all(torch.equal(before[key] + 0.0, tensor + 0.0) for key, tensor in model.state_dict().items())
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_bench_judges_experts_too(kind: str) -> None:
    """With and without the op that makes a module at once, which no hook sees into."""
    model, prompt = model_of(kind), torch.arange(3, 14)[None]
    dense_bits = bench._bits(model)
    macko.sparsify_(model, format="dense12", filter_fn=lambda module, name: "experts" in name, progress=False)
    good = bench.check_layers(model, prompt, (1, 11), dense_bits)
    assert [found["tokens"] for found in good] == [1, 11]
    assert all(found["of_bound"] <= 1 and "experts" in found["layer"] for found in good)
    assert "yes" in bench._verdict(good)
    part = sparse_of(model)[1].gate_up_proj_packed
    handle = part.register_forward_hook(lambda part, args, y: y * 1.1)
    bad = bench.check_layers(model, prompt, (11,), dense_bits)
    assert bad[0]["of_bound"] > 1
    assert bad[0]["layer"].endswith("layers.1.mlp.experts.gate_up_proj_packed")
    handle.remove()
    assert "NOT KNOWN" in bench._verdict([{"tokens": 1, "of_bound": 0.0}])


@pytest.mark.parametrize("held", [True, False])
def test_what_is_interrupted_has_its_experts_again(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense ones that somebody holds, or such as they were."""
    model = model_of("mixtral", 0.6)
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    kept = [module for module in model.modules() if is_experts(module)] if held else []

    def stops(*_: object) -> None:
        assert len(sparse_of(model)) == 2
        gc.collect()
        raise KeyboardInterrupt

    monkeypatch.setattr("macko.nn.convert.merge_", stops)
    with pytest.raises(KeyboardInterrupt):
        macko.sparsify_(model, merge=True, progress=False)
    again = [module for module in model.modules() if is_experts(module)]
    assert again == kept if held else len(again) == 2
    assert {name: p.requires_grad for name, p in model.named_parameters()} == {n: r for n, (_, r) in before.items()}
    assert all(torch.equal(p + 0.0, before[name][0] + 0.0) for name, p in model.named_parameters())


def test_an_adapter_on_the_other_layers_trains_as_on_the_dense_model() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    grads, tokens = [], torch.randint(3, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    for packs in (False, True):
        model = model_of("qwen3_moe")
        if packs:
            macko.sparsify_(model, format="dense12", progress=False)
            assert len(sparse_of(model)) == 2
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config).train()
        adapted(tokens, labels=tokens).loss.backward()
        grads.append({name: p.grad for name, p in adapted.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() != set()
    assert all("lora" in name for name in grads[1])
    for name, grad in grads[0].items():
        assert (grads[1][name] - grad).abs().max() <= 0.03 * grad.abs().max(), name


def test_an_adapter_of_packed_experts_finds_no_parameter() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = model_of("qwen3_moe")
    macko.sparsify_(model, format="dense12", progress=False)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.warns(RuntimeWarning, match=r"mlp.experts.gate_up_proj'\} were set but no parameter was matched"):
        peft.get_peft_model(model, config)


def test_a_bad_layer_leaves_experts_as_they_were() -> None:
    model = model_of("mixtral")
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    experts = [name for name, module in model.named_modules() if is_experts(module)]

    def stop(module: nn.Module, name: str) -> bool:
        return name != experts[1] or 1 / 0 > 0

    with pytest.raises(ZeroDivisionError):
        macko.sparsify_(model, format="dense12", filter_fn=stop, progress=False)
    assert not sparse_of(model)
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "reason", "packed"),
    [
        ({}, "dense12", 0),  # of compress_: on a CPU it is no faster; elsewhere experts whose zeros are few take it
        ({"values": "int8"}, "experts are not rounded to 8 bits yet", 0),
        ({"format": "dense12", "ignore": ["*.layers.0.mlp.experts", "lm_head"]}, "'*.layers.0.mlp.experts'", 1),
    ],
)
def test_experts_stay_dense_by_name(options: dict[str, Any], reason: str, packed: int) -> None:
    convert = macko.sparsify_ if "format" in options else macko.compress_
    report = convert(model := model_of("mixtral"), **options, progress=False)
    left = [row for row in report if "experts" in row.name and row.format == "dense"]
    assert len(left) == 4 - 2 * packed
    assert all(reason in row.reason for row in left), left
    assert len(sparse_of(model)) == packed


def test_auto_leaves_experts_dense_where_slabs_are_slower_by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("macko.nn.experts.slower_by_count", lambda device: "slower by count")
    for format, left in (("auto", 4), ("tile", 0)):
        report = macko.sparsify_(model_of("mixtral", zeros=0.6), format=format)
        assert sum("slower by count" in row.reason for row in report) == left


def test_experts_of_float32_and_those_packed_already_have_rows_that_say_so() -> None:
    model = model_of("mixtral", 0.6).float()
    with pytest.warns(UserWarning, match="changed none"):
        report = macko.sparsify_(model, progress=False)
    assert all("the weight is float32" in row.reason for row in report if "experts" in row.name)
    macko.sparsify_(model.bfloat16(), progress=False)
    for report in (macko.sparsify_(model, progress=False), macko.prune_(model, progress=False)):
        assert [row.reason for row in report if "experts" in row.name] == ["is sparse already"] * 4


def test_a_module_of_experts_in_two_places_is_packed_in_both() -> None:
    model = model_of("mixtral", 0.6)
    layers = model.model.layers
    layers[1].mlp.experts = layers[0].mlp.experts
    model.set_experts_implementation("grouped_mm")
    wanted = logits(model)
    fold_(model, unfold_(model, lambda name, module: True), Options("sparse11"))
    assert layers[1].mlp.experts is layers[0].mlp.experts
    assert is_experts(layers[0].mlp.experts)
    macko.sparsify_(model, progress=False)
    assert isinstance(layers[0].mlp.experts, SparseExperts)
    assert layers[1].mlp.experts is layers[0].mlp.experts
    assert torch.equal(logits(model), wanted)


def test_experts_alone_are_no_model() -> None:
    for convert in (macko.sparsify_, macko.compress_, macko.prune_):
        with pytest.raises(ValueError, match="this model is one of experts"):
            convert(tiny("MixtralExperts"))


def test_experts_that_an_adapter_changes_or_an_offloader_moves_stay_dense_by_name(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = model_of("mixtral", 0.6)
    model.save_pretrained(tmp_path)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.warns(UserWarning, match="changed none"):
        report = macko.sparsify_(adapted := peft.get_peft_model(model, config), progress=False)
    tokens = torch.randint(3, 256, (2, 16))
    pruned = macko.prune_(adapted, 0.5, "wanda", calibration=[tokens], progress=False)
    with pytest.warns(UserWarning, match="changed none"):
        read = load(tmp_path, quantization_config=macko.MackoConfig(offload=True))
    adapter, offloader = "an adapter of peft changes", "offloaders cannot move"
    for rows, reason in ((report, adapter), (pruned, adapter), (read.hf_quantizer.report, offloader)):
        assert sum(reason in row.reason for row in rows if row.name.endswith(("gate_up_proj", "down_proj"))) == 4


def test_a_class_of_experts_with_a_forward_of_its_own_is_left() -> None:
    kind = type(dense := tiny("MixtralExperts"))
    dense.__class__ = type("Own", (kind,), {"forward": lambda self, *args: kind.forward(self, *args) * 2})
    assert not is_experts(dense)
    dense.__class__ = type("Own", (kind,), {})
    assert is_experts(dense)


def test_routers_are_never_packed_with_their_experts() -> None:
    model = model_of("qwen3_moe", 0.6)
    macko.sparsify_(model, progress=False)
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    assert gates
    assert all(type(gate.weight) is nn.Parameter for gate in gates)


@pytest.mark.parametrize(
    ("kind", "name"), [("phimoe", "router"), ("hunyuan_v1_moe", "gate.wg"), ("qwen2_moe", "shared_expert_gate")]
)
def test_routers_that_are_linear_layers_keep_every_bit(kind: str, name: str, tmp_path: Path) -> None:
    sizes = {
        **COMMON,
        **MODELS["qwen3_moe"],
        "num_local_experts": 8,
        "moe_topk": 4,
        "shared_expert_intermediate_size": 8,
    }
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    routers = [f"model.layers.{i}.mlp.{name}" for i in range(2)]
    before = [model.get_submodule(router).weight.clone() for router in routers]
    report = macko.prune_(model, 0.6, progress=False)
    assert sum("chooses experts" in row.reason for row in report) == 2
    model.save_pretrained(tmp_path)
    read = load(tmp_path, quantization_config=macko.MackoConfig())
    assert len(sparse_of(read)) == 2
    macko.compress_(read, values="int8", progress=False)
    for router, weight in zip(routers, before, strict=True):
        assert type(read.get_submodule(router).weight) is nn.Parameter
        assert read.get_submodule(router).weight.dtype == weight.dtype
        assert torch.equal(read.get_submodule(router).weight, weight)


def test_routers_beside_experts_that_are_modules_or_count_more_are_left() -> None:
    """Of Switch and NLLB experts are a dictionary of layers; of LongCat one stack counts experts without weights; of
    DBRX they are a level below."""
    from transformers.models.dbrx import modeling_dbrx as dbrx
    from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashConfig, LongcatFlashMoE
    from transformers.models.switch_transformers import modeling_switch_transformers as switch

    longcat = LongcatFlashConfig(
        hidden_size=32, expert_ffn_hidden_size=16, n_routed_experts=6, zero_expert_num=2, num_experts_per_tok=2
    )
    several = switch.SwitchTransformersConfig(d_model=32, d_ff=48, num_experts=4)
    of_dbrx = dbrx.DbrxConfig(ffn_config={"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4})
    blocks = {
        "a": LongcatFlashMoE(longcat),
        "b": switch.SwitchTransformersSparseMLP(several),
        "c": dbrx.DbrxFFN(of_dbrx),
    }
    model = nn.ModuleDict(blocks).bfloat16()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    rows = {row.name: row.reason for row in macko.prune_(model, 0.5, progress=False)}
    for router in ("a.router.classifier", "b.router.classifier", "c.router.layer"):
        assert "chooses experts" in rows[router]
        assert bool(model.get_submodule(router).weight.all())
    assert not rows["b.experts.expert_0.wi"]


def test_what_an_expert_is_called_alone_makes_no_router() -> None:
    """A convolution's weight has three dimensions as a stack has, and so has a table of positions."""
    block = nn.Module()
    block.expert_experts = nn.Conv1d(64, 32, 3)
    block.expert_layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
    block.proj, block.value = nn.Linear(96, 32), nn.Linear(64, 12)
    block.action_experts = nn.Module()
    block.action_experts.positions = nn.Parameter(torch.randn(1, 7, 64))
    model = nn.ModuleDict({"block": block})
    left = [row.name for row in macko.prune_(model, 0.5, progress=False) if "chooses experts" in row.reason]
    assert left == []


def test_layers_as_narrow_as_a_router_are_none_in_other_places() -> None:
    block = nn.Module()
    block.experts = model_of("mixtral").model.layers[0].mlp.experts  # 4 of 256 columns
    block.gate, block.gating = nn.Linear(256, 4), nn.Sequential(nn.Linear(256, 4))
    block.mixer = nn.Sequential(nn.Linear(256, 4), nn.Linear(4, 256), nn.Linear(256, 1))
    model = nn.Module()
    model.add_module("layer", block)
    model.head = nn.Linear(256, 1)
    for whole, routers in ((model, ["layer.gate", "layer.gating.0"]), (block, [])):
        report = macko.prune_(whole, 0.5, progress=False)
        assert [row.name for row in report if "chooses experts" in row.reason] == routers


@pytest.mark.parametrize(("format", "zeros"), [("dense12", 0.0), ("sparse11", 0.6)])
def test_state_of_packed_experts_loads_into_others(format: str, zeros: float) -> None:
    one, other = packed(tiny("MixtralExperts", zeros), format), packed(tiny("MixtralExperts", 0.7), format)
    state = one.state_dict()
    assert ("gate_up_proj" in state) == (format == "dense12")
    assert not other.load_state_dict(state).missing_keys
    args = routed(one.to_dense())
    assert torch.equal(one(*args), other(*args))


def said_of_experts(**about: Any) -> dict[str, Tensor]:
    """A state's _extra_state that says something else."""
    sizes = {"rows": 256, "cols": 80, "widest": 1, "table_low": 0, "table_high": 0, "entries": 0, "listed": 0}
    text = json.dumps({"format": "sparse11", **sizes, "experts": 4, "expert_rows": 64, **about})
    return {"down_proj_packed._extra_state": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("format", "given", "message"),
    [
        ("dense12", {"down_proj": torch.zeros(4, 64, 72).bfloat16()}, "size mismatch"),
        ("sparse11", {"down_proj": torch.zeros(4, 64, 80).bfloat16()}, "a dense weight, and these experts are sparse"),
        ("sparse11", {"down_proj_packed.data": None}, "the state has no data of its sparse11 weight"),
        ("sparse11", {"down_proj_packed._extra_state": None}, "the state has no _extra_state"),
        ("sparse11", {"down_proj_packed.data": "x"}, "expected tensors, got {'data': 'str'}"),
        ("sparse11", {"down_proj_packed._extra_state": "x"}, "_extra_state does not say"),
        ("sparse11", {"down_proj_packed._extra_state": torch.empty(9, device="meta")}, "_extra_state does not say"),
        ("sparse11", said_of_experts(rows="q"), "rows is 'q', expected 0 to"),
        ("sparse11", said_of_experts(experts="4"), "experts is '4', expected 0 to"),
        ("sparse11", said_of_experts(format="slide"), "slide holds no stack of experts"),
        ("sparse11", said_of_experts(cols=72), re.escape("has [4, 64, 72] in 256 rows, the module [4, 64, 80]")),
        ("dense12", {"down_proj": "x"}, "expected tensors, got {'weight': 'str'}"),
        ("dense12", {"down_proj": torch.zeros(4, 64, 80, device="meta").bfloat16()}, "has no content to copy"),
    ],
)
def test_state_that_is_not_these_experts_is_refused(format: str, given: dict[str, Any], message: str) -> None:
    one = packed(tiny("MixtralExperts", 0.6), format)
    before, state = (
        one.down_proj,
        {key: value for key, value in (one.state_dict() | given).items() if value is not None},
    )
    with pytest.raises(RuntimeError, match=message):
        one.load_state_dict(state, strict=False)
    assert torch.equal(one.down_proj, before)


@pytest.mark.parametrize("format", ["dense12", "sparse11"])
def test_state_is_taken_in_the_dtype_of_the_experts_or_assigned(format: str) -> None:
    one = packed(tiny("MixtralExperts", 0.6), format)
    half, empty = copy.deepcopy(one).half(), copy.deepcopy(one).to("meta")
    empty.load_state_dict(half.state_dict(), assign=True)
    one.load_state_dict(half.state_dict())
    assert torch.equal(empty.down_proj, half.down_proj)
    assert torch.equal(one.down_proj, half.down_proj.bfloat16())


def test_half_of_packed_experts_is_half_of_the_weights() -> None:
    sparse = packed(tiny("MixtralExperts"), "dense12")
    wanted = sparse.gate_up_proj.half()
    kept = wanted.bfloat16() == sparse.gate_up_proj
    if kept.all():
        assert torch.equal(sparse.half().gate_up_proj, wanted)
    with pytest.raises(TypeError, match="float32"):
        packed(tiny("MixtralExperts"), "dense12").float()


def test_two_halves_of_expert_parallel_add_up() -> None:
    dense = tiny("Qwen3MoeExperts")
    x, index, weights = routed(dense)
    whole, parts, n = packed(dense, "dense12")(x, index, weights), [], EXPERTS // 2
    for rank in range(2):
        half = copy.deepcopy(dense)
        for name, p in list(half._parameters.items()):
            half._parameters[name] = nn.Parameter(p.detach()[rank * n : (rank + 1) * n].clone(), requires_grad=False)
        half.num_experts, half._is_expert_parallel = n, True  # type: ignore[assignment]
        off = index // n != rank
        parts.append(packed(half, "dense12")(x, torch.where(off, n, index % n), weights.masked_fill(off, 0)))
    off_by = (parts[0].double() + parts[1].double() - whole.double()).abs()
    assert (off_by <= 2 * bound(packed(dense, "dense12"), x, index, weights)).all()


def test_compiled_in_one_graph_with_eagers_bits() -> None:
    sparse = packed(tiny("MixtralExperts"), "dense12")
    args = routed(sparse.to_dense())
    torch._dynamo.reset()
    with torch.no_grad():
        fast = torch.compile(sparse, fullgraph=True, backend="aot_eager")
        assert torch.equal(fast(*args), sparse(*args))


@pytest.mark.parametrize("name", ["MixtralExperts", "Qwen3MoeExperts"])
def test_one_op_has_the_bits_of_the_four_that_have_gradients(name: str) -> None:
    sparse = packed(tiny(name), "dense12")
    x, index, weights = routed(sparse.to_dense())
    index[0, 0] = sparse.num_experts  # another process'
    with torch.no_grad():
        at_once = sparse(x, index, weights)
    assert torch.equal(at_once, sparse(x, index, weights))


def test_gradients_go_through_to_the_input() -> None:
    dense = tiny("MixtralExperts").requires_grad_(False)
    x, index, weights = routed(dense)
    grads = []
    for experts in (dense, packed(dense, "dense12")):
        x = x.detach().requires_grad_()
        experts(x, index, weights).float().square().sum().backward()
        grads.append(x.grad.double())
    assert (grads[0] - grads[1]).abs().max() <= 0.02 * grads[0].abs().max()


@torch.no_grad()
@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts", "NemotronHExperts"])
def test_unfolded_experts_compute_the_same(name: str) -> None:
    dense = tiny(name)
    args = routed(dense)
    one = UnfoldedExperts(dense)(*args)
    sparse = packed(dense, "dense12")
    assert ((one.double() - dense(*args).double()).abs() <= bound(sparse, *args, products=0.02)).all()


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_pruned_experts_have_their_share_of_zeros_each(kind: str, method: str) -> None:
    model = model_of(kind)
    tokens = torch.randint(3, 256, (2, 48), generator=torch.Generator().manual_seed(0))
    batches = None if method == "magnitude" else [tokens]
    report = macko.prune_(model, 0.5, method, calibration=batches, progress=False)
    dense = [module for module in model.modules() if is_experts(module)]
    assert len(dense) == 2  # as it was: no expert is a module of its own any more
    for experts in dense:
        for key in projections(experts):
            rows = (oriented(experts, key) != 0).sum(-1)
            rows = rows.sum(-1) // rows.shape[-1] if method == "sparsegpt" else rows  # whose rows differ
            assert (rows == oriented(experts, key).shape[-1] // 2).all()
    names = [row.name for row in report if ".experts.3." in row.name]
    assert len(names) == 6
    assert all(name.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj") for name in names)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_pruning_ignores_experts_by_the_names_of_their_stacks(kind: str) -> None:
    model = model_of(kind)
    ignore = ["lm_head", "*.layers.0.mlp.experts", "down_proj"]
    report = macko.prune_(model, pattern="2:4", ignore=ignore, progress=False)
    zeros = [
        (oriented(m, key) == 0).double().mean() for m in model.modules() if is_experts(m) for key in projections(m)
    ]
    assert zeros == [0, 0, 0.5, 0]
    assert {row.reason for row in report if "layers.0.mlp.experts.3." in row.name} == {f"ignored by {ignore[1]!r}"}


def test_an_expert_without_tokens_is_said() -> None:
    model = model_of("qwen3_moe")
    with pytest.warns(UserWarning, match="experts"):
        report = macko.prune_(model, 0.5, "wanda", calibration=[torch.tensor([[5]])], progress=False)
    # Of eight experts in two layers one token reaches four each; the other four have three layers each.
    assert re.search(
        r"no input reached them in calibration: model\S+experts.\d.\w+_proj, .* and 20 more\.", str(report)
    )


class Alone(nn.Module):
    """Experts as a model."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *args: Tensor) -> Tensor:
        return self.experts(*args)


def test_moe_pruner_weighs_an_experts_inputs_as_its_router_does() -> None:
    """Of one expert, half of the columns are of inputs that are larger, but that the router hardly counts."""
    model, half = Alone(tiny("MixtralExperts").float()), HIDDEN // 2
    with torch.no_grad():
        model.experts.gate_up_proj.fill_(1.0)  # type: ignore[union-attr, operator]
    x = torch.zeros(8, HIDDEN)
    x[:4, :half], x[4:, half:] = 3.0, 2.0
    batch = (x, torch.zeros(8, 1, dtype=torch.long), torch.tensor([[0.1]] * 4 + [[0.9]] * 4))
    zeros = {}
    for method in ("wanda", "moe-pruner"):
        pruned = copy.deepcopy(model)
        with pytest.warns(UserWarning, match="no input reached"):  # the other experts
            macko.prune_(pruned, 0.5, method, calibration=[batch], progress=False)
        zeros[method] = (pruned.experts.gate_up_proj[0] == 0).all(0)  # type: ignore[union-attr, index]
    assert zeros["wanda"].nonzero().flatten().tolist() == list(range(half, HIDDEN))
    assert zeros["moe-pruner"].nonzero().flatten().tolist() == list(range(half))


@torch.no_grad()
def test_an_expert_alone_is_calibrated_by_its_own_tokens() -> None:
    dense = tiny("MixtralExperts")
    seen: dict[str, int] = {}
    x, index, weights = routed(dense)
    one = UnfoldedExperts(dense)
    for name, layer in one.named_modules():
        if name.endswith("down_proj"):
            layer.register_forward_hook(lambda m, i, o, name=name: seen.update({name: len(i[0])}))
    one(x, index, weights)
    assert seen == {f"{e}.down_proj": int((index == e).sum()) for e in range(EXPERTS)}


# ---- Files -----------------------------------------------------------------------------------------------------------


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}


def load(folder: Path, **options: Any) -> Any:
    kinds = transformers.AutoModelForCausalLM
    return kinds.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager", **options).eval()


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_dense12_experts_are_saved_as_the_dense_models_files(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    model.save_pretrained(tmp_path / "dense")
    macko.sparsify_(model, format="dense12", filter_fn=lambda module, name: name.endswith(".experts"), progress=False)
    wanted = logits(model)
    model.save_pretrained(tmp_path / "packed")
    one, two = tensors_of(tmp_path / "dense"), tensors_of(tmp_path / "packed")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert sparse_of(model)  # as it was
    loaded = load(tmp_path / "dense", quantization_config=macko.MackoConfig(format="dense12"))
    assert len(sparse_of(loaded)) == len(sparse_of(model))
    assert torch.equal(logits(loaded), wanted)
    assert sum(len(row.shape) == 3 and row.format == "dense12" for row in loaded.hf_quantizer.report) == 2 * len(
        sparse_of(loaded)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_sparse_experts_are_saved_one_by_one_and_read_again(kind: str, tmp_path: Path) -> None:
    model = model_of(kind, 0.6)
    model.save_pretrained(tmp_path / "dense")
    read = load(tmp_path / "dense", quantization_config=macko.MackoConfig())
    wanted = logits(read)
    read.save_pretrained(tmp_path / "packed")
    keys = tensors_of(tmp_path / "packed")
    assert any(key.endswith(".experts.3.gate_proj.values") for key in keys)
    again = load(tmp_path / "packed")
    assert len(sparse_of(again)) == len(sparse_of(read)) > 0
    assert not any(isinstance(module, UnfoldedExperts) for module in (*again.modules(), *read.modules()))
    assert torch.equal(logits(again), wanted)
    again.save_pretrained(tmp_path / "once_more")
    more = tensors_of(tmp_path / "once_more")
    assert keys.keys() == more.keys()
    assert all(torch.equal(keys[key], more[key]) for key in keys)


@pytest.mark.parametrize(
    "kind", ["mixtral", "deepseek_v3", pytest.param("qwen3_moe", marks=pytest.mark.slow)]
)  # one with a router in float32
@pytest.mark.parametrize("format", ["auto", "dense12"])
def test_converted_there_and_back(
    format: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(kind, 0.6 if format == "auto" else 0.0)
    model.save_pretrained(tmp_path / "dense")
    model.set_experts_implementation("grouped_mm")
    wanted = logits(model)
    dense, packed, back = (str(tmp_path / name) for name in ("dense", "packed", "back"))
    assert main(["convert", dense, packed, "--format", format]) == 0
    before = tensors_of(tmp_path / "dense")
    keys = tensors_of(tmp_path / "packed")
    block = "block_sparse_moe" if kind == "mixtral" else "mlp"  # as in the model's own files
    layers = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["layers"]
    layer = f"model.layers.1.{block}.experts.3.gate_proj"
    assert layer in layers
    assert any(key.startswith(f"{layer}.") for key in keys)
    assert not any(key in keys for key in before if ".experts." in key and keys.get(key, torch.ones(1)).numel())
    read = load(tmp_path / "packed")
    assert torch.equal(logits(read), wanted)
    modules = sum(is_experts(module) for module in model.modules())
    assert len(sparse_of(read)) == (modules if format == "auto" else 0)  # dense12 is for GPUs, and this is a CPU
    monkeypatch.setattr("macko.integrations.transformers.is_held_packed", lambda weight, device: True)
    on_gpus = load(tmp_path / "packed")
    assert len(sparse_of(on_gpus)) == modules
    held = {stack.packed.format for module in sparse_of(on_gpus) for stack in module.packed_stacks().values()}
    assert held == {"dense12"} if format == "dense12" else held <= {"tile", "sparse11"}
    assert torch.equal(logits(on_gpus), wanted)
    assert main(["convert", packed, back, "--to", "dense"]) == 0
    after = tensors_of(tmp_path / "back")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key] + 0.0) for key in before)
    assert "dense again" in capsys.readouterr().out


@pytest.mark.parametrize("layers", [False, True])
def test_float32_layers_of_a_bfloat16_mixture_are_rounded_where_it_is_asked_for_and_its_router_never(
    layers: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_of("mixtral").save_pretrained(tmp_path / "dense")
    dense, packed = str(tmp_path / "dense"), str(tmp_path / "packed")
    before = tensors_of(tmp_path / "dense")
    parts = ["block_sparse_moe.gate", *(["self_attn.q_proj"] if layers else [])]
    names = [f"model.layers.{i}.{part}.weight" for i in range(2) for part in parts]
    before |= {name: before[name].float() * 1.001 for name in names}
    save_file(before, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    if layers:
        assert main(["convert", dense, packed, "--format", "dense12"]) == 1
        assert "--dtype bfloat16 rounds them" in capsys.readouterr().err
    assert main(["convert", dense, packed, "--format", "dense12", *(["--dtype", "bfloat16"] if layers else [])]) == 0
    assert "2 float32 matrices of" in capsys.readouterr().err
    assert main(["convert", packed, str(tmp_path / "back"), "--to", "dense"]) == 0
    after = tensors_of(tmp_path / "back")
    for name in before:
        assert_same_bits(after[name], before[name].bfloat16() if name.endswith("q_proj.weight") else before[name])


def test_an_expert_that_is_lost_from_a_folder_is_missed(tmp_path: Path) -> None:
    model = model_of("mixtral", 0.6)
    macko.sparsify_(model, progress=False)
    model.save_pretrained(tmp_path)
    lost = "model.layers.1.block_sparse_moe.experts.2.up_proj"
    with edited(tmp_path / "config.json") as config, edited(tmp_path / "model.safetensors") as tensors:
        del config["quantization_config"]["layers"][lost]
        for name in [name for name in tensors if name.startswith(lost)]:
            del tensors[name]
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts.2.up_proj is not packed, while others of these"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])  # whose files have other names than the layers
def test_a_reader_that_knows_nothing_of_packed_experts_stops(kind: str, tmp_path: Path) -> None:
    model = model_of(kind, 0.6)
    macko.sparsify_(model, progress=False)
    assert not any(isinstance(module, macko.SparseLinear) for module in model.modules())
    model.save_pretrained(tmp_path)
    with edited(tmp_path / "config.json") as config:
        del config["quantization_config"]
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(tmp_path)


def test_back_to_one_tensor_of_all_experts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of("gpt_oss", 0.6)
    macko.sparsify_(model, progress=False)
    model.save_pretrained(tmp_path / "packed")
    assert main(["convert", str(tmp_path / "packed"), str(tmp_path / "back"), "--to", "dense"]) == 1
    assert "a dense GptOssForCausalLM has the experts of model.layers.0.mlp.experts in one" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_experts_that_lack_zeros_stay_dense_as_they_are_read(tmp_path: Path) -> None:
    model = model_of("mixtral")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                p.mul_(torch.rand(p.shape) >= 0.7)  # one projection would pay, the other would not
    model.save_pretrained(tmp_path)
    wanted = logits(model)
    read = load(tmp_path, quantization_config=macko.MackoConfig(min_sparsity=0.3))
    assert not sparse_of(read)
    assert sum(is_experts(module) for module in read.modules()) == 2
    assert torch.equal(logits(read), wanted)
    rows = [row for row in read.hf_quantizer.report if ".experts." in row.name]
    assert len(rows) == 4
    assert all(row.format == "dense" and row.reason for row in rows)


def test_save_model_refuses_sparse_experts_by_name(tmp_path: Path) -> None:
    model = model_of("mixtral", 0.6)
    macko.sparsify_(model, progress=False)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.experts holds packed experts, which save_pretrained"):
        macko.save_model(model, tmp_path / "file.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])  # of matrices one by one, and of one tensor
def test_inspect_counts_what_one_table_lists_and_what_one_a_matrix(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(kind)
    stacks, elements, one, each = [], 0, 0, 0
    with torch.no_grad():
        for experts in filter(is_experts, model.modules()):
            for key in projections(experts):
                w = oriented(experts, key)
                w *= 2.0 ** (torch.arange(len(w)) * -4)[:, None, None]  # experts of other sizes than each other
                stacks.append(w)
                one, elements = one + outside_table(w, signed=False)[0], elements + w.numel()
                of_one = w.chunk(2, 1) if key == "gate_up_proj" and kind == "mixtral" else [w]
                each += sum(outside_table(m, signed=False)[0] for part in of_one for m in part)
    model.save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path), "--gpu", "NVIDIA H200"]) == 0
    said = capsys.readouterr().out
    assert one > 2 * each > 0
    assert f"dense12 lists {one / elements:.4%} of their weights with one table for all of a projection" in said
    assert f"would list {each / elements:.4%} with one for each matrix, at most" in said
    rows = [line for line in said.splitlines() if ".experts.*." in line]
    assert len(rows) == 4
    assert sum(" x " in row for row in rows) == 4


# ---- Several processes -----------------------------------------------------------------------------------------------

PARALLEL = """
import os, sys
import pytest, torch
import torch.distributed as dist
import macko
from macko.nn.experts import SparseExperts
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

dense, by_expert, store, rank = *sys.argv[1:4], int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def load(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager", **options)
    return model.eval()

def logits(model):
    with torch.no_grad():
        return model(torch.arange(3, 36).view(3, 11), use_cache=False).logits

config = {"quantization_config": macko.MackoConfig(format="dense12", ignore=("lm_head", "q_proj", "o_proj"))}
whole = load(dense).model.layers[1].mlp.experts
for how in ({"tp_size": 2}, {"tp_size": 2, "ep_size": 2}):
    asked = {"distributed_config": DistributedConfig(**how)}
    wanted = logits(load(dense, **asked))
    model = load(dense, **asked, **config)
    found = [module for module in model.modules() if isinstance(module, SparseExperts)]
    assert len(found) == 2, how
    assert torch.equal(logits(model), wanted), how  # the same sums in the same order, of the same products
    gate, up = whole.gate_up_proj.chunk(2, 1)
    if "ep_size" in how:
        own, down = (part.chunk(2)[rank] for part in (whole.gate_up_proj, whole.down_proj))
    else:
        own = torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1)
        down = whole.down_proj.chunk(2, 2)[rank]
    assert torch.equal(found[1].gate_up_proj, own) and torch.equal(found[1].down_proj, down), how
    out = model.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert out.shape == (1, 10)
    with pytest.raises(ValueError, match="layers.0.mlp.experts holds one process' part of packed experts"):
        model.save_pretrained(f"{store}.saved")
    with pytest.raises(ValueError, match="hold its experts packed one by one, of which no process gets a part yet"):
        load(by_expert, **asked)
    ignore = ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")
    report = macko.sparsify_(load(dense, **asked), format="dense12", ignore=ignore, progress=False)
    reasons = {row.reason for row in report if row.name.endswith("gate_up_proj")}
    assert "its weight is a DTensor: load the model with a macko.MackoConfig" in " ".join(reasons)
    dist.barrier()
os._exit(0)  # in some runs the end of gloo's threads aborts a rank that has done all (torch 2.13)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23), reason="of transformers before 5.23"
)
def test_two_processes_have_parts_of_experts_and_whole_ones(tmp_path: Path) -> None:
    """Tensor parallelism cuts each expert, expert parallelism gives a process half of them: dense's logits."""
    torch.manual_seed(0)
    sizes = {**COMMON, "hidden_size": 256, **MODELS["mixtral"], "intermediate_size": 512}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("mixtral", **sizes), dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "dense")
    macko.prune_(model, 0.6, progress=False)
    macko.sparsify_(model, progress=False)
    model.save_pretrained(tmp_path / "by expert")
    two_processes(PARALLEL, str(tmp_path / "dense"), str(tmp_path / "by expert"), str(tmp_path / "store"))
