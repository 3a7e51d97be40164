"""sparsify_: in place, all or nothing, and it says what it left dense and why."""

import copy
import gc
import json
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import macko
from macko import SparseLinear, compress_, sparsify_
from macko.choose.options import Options
from macko.nn.convert import _compress_layer, convert_layer
from macko.nn.find import FoundLinear
from tests.common import assert_close_spmv, assert_same_bits, devices, random_vector, random_weight


def linear(cols: int = 64, rows: int = 32, density: float = 0.4, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    layer = nn.Linear(cols, rows, dtype=dtype)
    layer.weight.data = random_weight(rows, cols, density, dtype)
    return layer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(64, 128), linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def reasons(report: macko.Report) -> dict[str, str]:
    return {row.name: row.reason for row in report}


def kinds(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def test_replaces_and_reports() -> None:
    model = Model().eval()
    before = {name: module.weight.detach().clone() for name, module in model.named_modules() if name in kinds(model)}
    report = sparsify_(model)
    names = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "lm_head"]
    assert [row.name for row in report] == names
    assert [row.name for row in report.changed] == names[:-1]
    for row in report.changed:
        layer = model.get_submodule(row.name)
        assert isinstance(layer, SparseLinear)
        assert not layer.training
        assert_same_bits(layer.weight, before[row.name])
        assert row.shape == tuple(before[row.name].shape)
        assert row.density == int(before[row.name].count_nonzero()) / before[row.name].numel()
        assert row.bytes_before == before[row.name].nbytes
        assert row.bytes_after == layer.packed.nbytes < row.bytes_before
        assert row.format == layer.format
    assert type(model.lm_head) is nn.Linear
    assert report.bytes_after < report.bytes_before == sum(w.nbytes for w in before.values())


@pytest.mark.parametrize("device", devices())
def test_smallest_takes_the_fewest_bytes(device: str) -> None:
    weights = [random_weight(512, 1024, density, torch.bfloat16).to(device) for density in (0.6, 0.3, 0.2, 0.1)]
    model = nn.Sequential(*(nn.Linear(1024, 512, bias=False) for _ in weights))
    for layer, w in zip(model, weights, strict=True):
        layer.weight = nn.Parameter(w)
    report = sparsify_(model, format="smallest", ignore=())
    others = ("ec", "slide", "dense12", "dense8", "sparse8")
    kinds = [
        kind
        for kind in macko.FORMATS.values()
        if kind.runs(torch.device(device), torch.bfloat16) and kind.format not in others
    ]
    for row, layer, w in zip(report, model, weights, strict=True):
        canonical = macko.MackoWeight.smallest(w)
        packed = [*(kind.from_macko(canonical) for kind in kinds), macko.EcWeight.smallest(w)]
        sizes = {p.format: p.nbytes for p in packed}
        assert row.bytes_after == sizes[row.format] == layer.packed.nbytes == min(sizes.values())
        assert_same_bits(layer.weight, w)
        x = random_vector(1024, dtype=torch.bfloat16).to(device)
        assert_close_spmv(layer(x), w, x)
    if device == "cpu":
        assert [row.format for row in report] == ["bitmap", "bitmap", "macko", "ec"]
    held = SparseLinear.from_packed(macko.MackoWeight.smallest(weights[0]))
    assert held.reformat_("smallest").packed.nbytes == report.layers[0].bytes_after


def test_twice_changes_nothing_the_second_time() -> None:
    model = Model()
    first = sparsify_(model)
    layers = dict(model.named_modules())
    second = sparsify_(model)
    assert all(layers[name] is module for name, module in model.named_modules())
    assert not second.changed
    assert reasons(second)["blocks.0.up"] == "is sparse already"
    assert second.bytes_before == second.bytes_after == first.bytes_after


def test_a_model_that_stays_dense_is_warned_of() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64)))
    with pytest.warns(UserWarning, match="changed none of 3 layers, all of them because: under 25% sparse"):
        sparsify_(model)
    with pytest.warns(UserWarning, match="changed none of 3 layers, 2 of them because: ignored by"):
        sparsify_(model, ignore=["0"])
    with pytest.warns(UserWarning, match="the model has no linear layer"):
        assert "0 of 0 layers changed" in str(sparsify_(nn.ReLU()))
    with torch.no_grad():
        model[0].weight[:, :40] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify_(model)
        sparsify_(model)  # what is sparse already is no reason to warn


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ((), []),
        (("blocks.0.up",), ["blocks.0.up"]),
        (("up",), ["blocks.0.up", "blocks.1.up"]),
        ("up", ["blocks.0.up", "blocks.1.up"]),
        (("blocks.1.*",), ["blocks.1.up", "blocks.1.down"]),
        (("*.down", "lm_head"), ["blocks.0.down", "blocks.1.down", "lm_head"]),
        (("blocks.0", "u", "p"), []),
    ],
)
def test_ignore_takes_names_last_components_and_globs(ignore: Any, left: list[str]) -> None:
    model = Model()
    report = sparsify_(model, ignore=ignore)
    assert sorted(row.name for row in report if row.reason.startswith("ignored by")) == sorted(left)
    assert sorted(name for name, kind in kinds(model).items() if kind is nn.Linear) == sorted(left)


def test_filter_fn_sees_module_and_name() -> None:
    seen = []

    def wide(module: nn.Module, name: str) -> bool:
        seen.append(name)
        return isinstance(module, nn.Linear) and module.in_features > 64

    model = Model()
    report = sparsify_(model, filter_fn=wide)
    assert [row.name for row in report.changed] == ["blocks.0.down", "blocks.1.down"]
    assert reasons(report)["blocks.0.up"] == "left out by filter_fn"
    assert "lm_head" not in seen


# What stays dense, and why.


def test_too_dense_to_pay() -> None:
    model = nn.Sequential(linear(density=0.78), linear(density=0.95), linear(density=0.0), linear(0, 5))
    report = sparsify_(model)
    assert list(reasons(report).values()) == ["under 25% sparse it would not pay"] * 2 + [
        "",
        "as macko it would take 24 bytes, dense 0",
    ]
    assert kinds(model)["2"] is SparseLinear
    report = sparsify_(model, min_sparsity=0)
    assert reasons(report)["0"] == ""
    assert reasons(report)["1"].startswith("as ")


def test_tied_weights() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(32, 64), "a": linear(), "b": linear(), "c": linear()})
    model["embed"].weight = model["a"].weight
    model["c"].weight = nn.Parameter(model["b"].weight.detach())  # another Parameter over the same memory
    report = sparsify_(model)
    assert reasons(report) == {
        "a": "its weight is shared with embed.weight",
        "b": "its weight is shared with c.weight",
        "c": "its weight is shared with b.weight",
    }


def test_one_module_in_two_places() -> None:
    model = Model()
    model.blocks[1].up = model.blocks[0].up
    report = sparsify_(model)
    assert isinstance(model.blocks[0].up, SparseLinear)
    assert model.blocks[1].up is model.blocks[0].up
    assert reasons(report)["blocks.0.up"] == ""
    assert reasons(report)["blocks.1.up"] == "is blocks.0.up"
    model = Model()
    model.blocks[1].up = model.blocks[0].up
    assert reasons(sparsify_(model, ignore=["blocks.1.up"]))["blocks.0.up"] == "ignored by 'blocks.1.up'"


def test_experts_held_as_modules_are_packed_each() -> None:
    experts = nn.ModuleList([linear() for _ in range(3)])
    dense = copy.deepcopy(experts)
    model = nn.ModuleDict({"router": linear(), "experts": experts})
    report = sparsify_(model, ignore=["router"])
    assert [row.name for row in report.changed] == ["experts.0", "experts.1", "experts.2"]
    x = torch.randn(2, 64).to(torch.bfloat16)
    for sparse, expert in zip(experts, dense, strict=True):
        assert torch.equal(sparse.weight, expert.weight + 0.0)
        torch.testing.assert_close(sparse(x.to(sparse.dtype)), expert(x.to(expert.weight.dtype)))


def test_attributes_of_a_model_of_ones_own_are_not_asked() -> None:
    for name in ("stacked", "packed_stacks"):
        model = Model()
        setattr(model, name, True)
        model.blocks[0].up.num_experts, model.blocks[0].up.__dict__[name] = 96, True
        model.blocks[0].gate = linear(64, 96)
        assert len(macko.prune_(model, 0.7, progress=False).changed) == 5
        assert len(sparsify_(model).changed) == 5


def test_weights_that_others_make_or_read() -> None:
    model = nn.ModuleDict(
        {
            "parametrized": parametrizations.weight_norm(linear()),
            "pruned": prune.l1_unstructured(linear(), "weight", 0.5),
            "attention": nn.MultiheadAttention(64, 4, dtype=torch.bfloat16),
            "encoder": nn.TransformerEncoderLayer(64, 4, dim_feedforward=32, dtype=torch.bfloat16),
            "lazy": nn.LazyLinear(4),
            "replaced": linear(),
        }
    )
    model["replaced"].forward = lambda x: x  # type: ignore[method-assign,assignment]
    for name, parameter in model.named_parameters():
        if name.startswith(("attention", "encoder")):
            parameter.data.zero_()
    report = reasons(sparsify_(model))
    assert "remove_parametrizations" in report["parametrized"]
    assert "prune.remove" in report["pruned"]
    assert report["attention.out_proj"].startswith("NonDynamicallyQuantizableLinear is a subclass")
    assert report["encoder.linear1"] == "TransformerEncoderLayer reads its weight itself"
    assert report["lazy"].startswith("LazyLinear is a subclass")
    assert report["replaced"] == "its forward has been replaced"
    assert SparseLinear not in kinds(model).values()


def test_what_others_have_given_back_is_converted() -> None:
    """As accelerate's remove_hook_from_module leaves a forward; and pruning that was made permanent."""
    pruned = prune.remove(prune.l1_unstructured(linear(density=1.0), "weight", 0.5), "weight")
    model = nn.Sequential(linear(), pruned)
    model[0].forward = model[0].forward  # type: ignore[method-assign]
    assert len(sparsify_(model).changed) == 2


def test_dtypes_and_devices_without_kernels() -> None:
    model = nn.Sequential(linear(dtype=torch.float64), linear().to("meta"), linear(dtype=torch.float32))
    report = reasons(sparsify_(model))
    assert "it is float64" in report["0"]
    assert "meta" in report["1"]
    assert report["2"] == ""


@pytest.mark.parametrize("options", [Options(), Options("macko"), Options("mixed"), Options(values="int8")])
def test_float32_on_a_gpu_stays_dense_before_anything_is_moved(options: Options) -> None:
    layer = linear(dtype=torch.float32)
    cuda = torch.device("cuda")  # asked for what nothing is: there may be none
    for row, sparse in (
        convert_layer(FoundLinear("a", layer, [], [], None), options, 0.0, cuda, {}),
        _compress_layer(FoundLinear("a", layer, [], [], None), options, cuda, {}, set(), False),
    ):
        assert sparse is None
        assert "it is float32, which macko holds on the CPU only; convert to float16 or bfloat16 first" in row.reason


@pytest.mark.gpu
def test_a_float32_model_on_a_gpu_stays_as_it_is() -> None:
    model = nn.Sequential(linear(dtype=torch.float32), linear(dtype=torch.float32)).cuda()
    weights = [layer.weight for layer in model]
    for convert in (sparsify_, compress_):
        for values in ("exact", "fp8"):
            with pytest.warns(UserWarning, match="because: it is float32"):
                assert not convert(model, values=values).changed
    assert all(layer.weight is weight for layer, weight in zip(model, weights, strict=True))
    with pytest.raises(TypeError, match="it is float32, which macko holds on the CPU only"):
        SparseLinear.from_linear(model[0])


def test_frozen_or_not_biases_and_hooks_stay() -> None:
    layer = linear()
    model = nn.Sequential(layer)
    calls: list[str] = []
    handle = layer.register_forward_hook(lambda *_: calls.append("after"))
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    bias = layer.bias
    sparsify_(model)
    assert model[0].bias is bias
    assert bias.requires_grad
    x = random_vector(64, dtype=torch.bfloat16)
    model(x)
    assert calls == ["before", "after"]
    handle.remove()
    model(x)
    assert calls == ["before", "after", "before"]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu:0"])
def test_a_bias_of_two_layers_stays_one_on_a_device_without_its_number(device: str) -> None:
    model = nn.Sequential(linear(), linear()).to(device)
    model[1].bias = model[0].bias
    sparsify_(model, device=device)
    assert model[1].bias is model[0].bias


def test_arguments_are_refused_before_anything_changes() -> None:
    model = Model()
    with pytest.raises(ValueError, match="format is 'elves', expected one of auto, smallest, mixed, macko"):
        sparsify_(model, format="elves")
    with pytest.raises(ValueError, match="min_sparsity is 30"):
        sparsify_(model, min_sparsity=30)
    with pytest.raises(ValueError, match=r"this model is one layer: use SparseLinear\.from_linear"):
        sparsify_(linear())
    assert set(kinds(model).values()) == {nn.Linear}


# All or nothing, with one dense layer more at the peak.


class Stop(BaseException):
    """As KeyboardInterrupt: not an Exception."""


def fail_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    original = SparseLinear.from_packed
    calls = iter(range(1000))

    def from_packed(*args: Any, **options: Any) -> SparseLinear:
        if next(calls) == count:
            raise Stop
        return original(*args, **options)

    monkeypatch.setattr(SparseLinear, "from_packed", from_packed)


@pytest.mark.parametrize("held", ["nothing", "parameters", "modules"])
def test_failure_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch, held: str) -> None:
    model = Model()
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[1].down.train(False)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    training = {name: m.training for name, m in model.named_modules()}
    keep: Any = {"nothing": dict, "parameters": model.named_parameters, "modules": model.named_modules}
    kept = dict(keep[held]())
    fail_at(monkeypatch, 3)
    with pytest.raises(Stop):
        sparsify_(model)
    assert set(kinds(model).values()) == {nn.Linear}
    assert list(model.state_dict()) == list(state)
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, state[name])
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert {name: m.training for name, m in model.named_modules()} == training
    for name, parameter in model.named_parameters():
        assert held != "parameters" or parameter is kept[name]
    for name, module in model.named_modules():
        assert held != "modules" or module is kept[name]


def test_dense_weights_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    weights = [
        weakref.ref(p) for name, p in model.named_parameters() if name.endswith("weight") and "lm_head" not in name
    ]
    alive = []
    original = SparseLinear.from_packed

    def from_packed(*args: Any, **options: Any) -> SparseLinear:
        alive.append(sum(w() is not None for w in weights))
        return original(*args, **options)

    monkeypatch.setattr(SparseLinear, "from_packed", from_packed)
    gc.disable()  # freed by the last reference, not by the collector
    try:
        sparsify_(model)
        assert alive == [4, 3, 2, 1]
        assert not any(w() is not None for w in weights)
    finally:
        gc.enable()


@pytest.mark.gpu
def test_device_takes_the_whole_model_there() -> None:
    model = nn.Sequential(linear(), nn.LayerNorm(32, dtype=torch.bfloat16), linear(32, 8, density=1.0))
    sparsify_(model, device="cuda")
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cuda"}
    assert isinstance(model[0], SparseLinear)
    assert type(model[2]) is nn.Linear


@pytest.mark.gpu
def test_failure_on_the_way_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(linear(), nn.LayerNorm(32, dtype=torch.bfloat16))
    state = {name: t.clone() for name, t in model.state_dict().items()}
    monkeypatch.setattr(nn.LayerNorm, "_apply", lambda *_: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        sparsify_(model, device="cuda")
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == "cpu"
        assert_same_bits(tensor, state[name])


# The report.


def test_report_as_table_and_json() -> None:
    inner: nn.Module = linear()
    name = "a_very_long_name_of_a_module"
    for _ in range(8):
        inner = nn.ModuleDict({name: inner})
    full = ".".join([name] * 8)
    report = sparsify_(inner)
    text = str(report)
    assert full in text
    assert "0.381 (61.9%)" in text
    assert "(" in text.splitlines()[1]
    assert "1 of 1 layers changed" in text.splitlines()[-1]
    data = json.loads(report.to_json())
    assert data["layers"][0]["name"] == full
    assert data["layers"][0]["shape"] == [32, 64]
    assert data["bytes_after"] == report.bytes_after
    assert (data["changed"], len(report)) == (1, 1)


def test_progress_is_quiet_when_it_is_quick(capfd: pytest.CaptureFixture[str]) -> None:
    sparsify_(Model())
    assert capfd.readouterr().err == ""
