"""Values of 8 bits: codes and scales, and layers and files of them. Bytes and products: kernels/test_slabs.py."""

import copy
import dataclasses
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import macko
from macko.choose.auto import pack
from macko.choose.options import Options
from macko.pruning import grids
from macko.weights import ByteWeight, Dense8Weight, Macko8Weight, MackoWeight, Sparse8Weight, codes, saved_as
from tests.common import HALVES, assert_same_bits, devices, mask, random_vector
from tests.kernels.codecs import DESCRIPTORS

pytestmark = pytest.mark.sm80

KINDS = (0, 1)
FORMATS = (Dense8Weight, Sparse8Weight)
each_format = pytest.mark.parametrize("format", FORMATS)
each_dtype = pytest.mark.parametrize("dtype", HALVES)
each_kind = pytest.mark.parametrize("kind", KINDS)


def made_of(format: type[ByteWeight], rows: int, cols: int, *, kind: int, dtype: torch.dtype) -> Any:
    codec = DESCRIPTORS[format.format](dtype, kind)
    return codec.packed(codec.source(rows, cols), "cpu")


@each_format
def test_negative_zeros_are_zeros(format: type[ByteWeight]) -> None:
    held = torch.tensor([[0x80, 0x38, 0], [0xB8, 0x80, 0x80]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    made = format.from_codes(held, torch.ones(2), torch.float16)
    made.validate()
    assert_same_bits(made.to_dense(), torch.tensor([[0, 1, 0], [-1, 0, 0]], dtype=torch.float16))
    assert made.density == 2 / 6


# Codes.


@each_dtype
@each_kind
def test_codes_are_the_nearest(dtype: torch.dtype, kind: int) -> None:
    w = (torch.randn(50, 2000, generator=torch.Generator().manual_seed(0)) / 30).to(dtype)
    found, scales = codes.quantised(w, kind)
    most = (448, 127)[kind]
    assert_same_bits(scales, w.float().abs().amax(1) / most)
    every = torch.arange(256, dtype=torch.uint8).view(codes.TYPES[kind]).double()
    every = every[every.isfinite() & (every.abs() <= most)].unique()
    off = (w.double() - found.double() * scales.double()[:, None]).abs()
    for row in range(0, 50, 7):
        nearest = (w[row].double()[:, None] - every * scales[row].double()).abs().amin(1)
        assert bool((off[row] <= nearest + w[row].double().abs() * 2**-23).all())  # w / scale is rounded


def test_ties_go_to_the_even_code() -> None:
    w = torch.tensor([[127, 0.5, 1.5, -2.5, 3.5]])
    assert codes.rounded(w, torch.ones(1, 1), 1).tolist() == [[127, 0, 2, -2, 4]]
    w = torch.tensor([[17.0, 19.0, 0.0009765625, 0.0029296875, -1000]])  # between 16, 18 and 20; 0, 1 and 2 of 2^-9
    assert codes.rounded(w, torch.ones(1, 1), 0).float().tolist() == [[16, 20, 0, 2**-8, -448]]


def test_rows_of_zeros_and_of_little() -> None:
    w = torch.zeros(4, 70, dtype=torch.bfloat16)
    w[1, 3], w[2, 5], w[3] = 1e-38, 3e38, -1e-40
    for kind in KINDS:
        found, scales = codes.quantised(w, kind)
        assert scales[0] == 1
        assert not found[0].float().any()
        assert bool(((scales > 0) & scales.isfinite()).all())
        assert float(found[2, 5].float() * scales[2]) == float(w[2, 5])
    assert [len(t) for t in codes.quantised(torch.zeros(3, 0, dtype=torch.float16), 0)] == [3, 3]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@each_format
def test_nan_and_inf_are_refused(format: type[ByteWeight], wrong: float) -> None:
    w = torch.ones(9, 40, dtype=torch.bfloat16)
    w[7, 3] = wrong
    with pytest.raises(ValueError, match="row 7 of the weight has NaN or Inf, which int8 with a scale does not hold"):
        format.from_dense(w, 1)


@each_format
def test_other_arguments_are_refused(format: type[ByteWeight]) -> None:
    with pytest.raises(ValueError, match=f"the {format.format} format holds bfloat16 and float16, the weight is f"):
        format.from_dense(torch.ones(2, 2))
    ones, eight = torch.ones(2), torch.ones(2, 3).to(torch.int8)
    for match, *arguments in (
        ("values have dtype torch.int16", eight.short(), ones, torch.float16),
        (r"shape \[3\]", eight[0], ones, torch.float16),
        ("dtype is torch.float32, expected bfloat16 or float16", eight, ones, torch.float32),
        (r"scales have dtype torch.float32, shape \[3\]", eight, torch.ones(3), torch.float16),
        ("scales have dtype torch.float16", eight, ones.half(), torch.float16),
        ("values have NaN", torch.full((2, 3), float("nan")).to(torch.float8_e4m3fn), ones, torch.float16),
        ("scales have numbers", eight, torch.tensor([1.0, 0.0]), torch.float16),
        ("scales have numbers", eight, torch.tensor([1.0, float("inf")]), torch.float16),
    ):
        with pytest.raises(ValueError, match=match):
            format.from_codes(*arguments)  # type: ignore[arg-type]
    for options, message in (([2, 0], r"options\[0\] is 2"), ([0, 2], r"options\[1\] is 2"), ([0], "1 numbers")):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.macko.pack(eight.view(torch.uint8), format.number, options)
    with pytest.raises(RuntimeError, match="w has dtype float16, expected uint8"):
        torch.ops.macko.pack(torch.ones(2, 2).half(), format.number, [0, 0])


@pytest.mark.parametrize("device", devices())
@each_format
@each_dtype
@pytest.mark.parametrize("cols", [70, 1500])
def test_what_is_on_a_grid_keeps_its_values(
    device: str, format: type[ByteWeight], dtype: torch.dtype, cols: int
) -> None:
    """Those of macko.grids, which have float16 scales; and of any scale where the largest code is not there."""
    w = (torch.randn(70, cols, generator=torch.Generator().manual_seed(0)) / 30).to(dtype)
    w = torch.where(mask("uniform", 70, cols, 0.5), w, 0)
    for kind, grid in ((0, grids.float8), (1, grids.integers(8))):
        on_grid = grids.nearest(w, grid)
        made = format.from_dense(on_grid.to(device), kind)
        assert_same_bits(made.to_dense(), on_grid + 0)
        assert_same_bits(format.from_dense(made.to_dense(), kind).to_dense(), on_grid + 0)
    whole = torch.randint(-3, 4, (70, cols), generator=torch.Generator().manual_seed(1)).to(dtype)
    for kind in KINDS:
        assert_same_bits(format.from_dense(whole.to(device), kind).to_dense(), whole)


def on_grids(kind: int, dtype: torch.dtype, cols: int, seed: int, scale_bits: tuple[int, int] = (1, 0x7C00)) -> Tensor:
    """Rows on grids of every largest code there is, -128 too, several times, by scales of random float16 bits."""
    random = torch.Generator().manual_seed(seed)
    if kind:
        every = torch.arange(1, 129).float()
    else:
        every = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    largest = torch.arange(len(every)).repeat(4)[:, None]
    powers = torch.tensor([0.2, 1, 3, 9]).repeat_interleave(len(every))[:, None]
    among = torch.rand(len(largest), cols, generator=random) ** powers
    held = every[torch.minimum((among * (largest + 1)).long(), largest)]
    held[:, -1] = every[largest[:, 0]]
    held *= torch.randint(0, 2, held.shape, generator=random) * 2 - 1
    held[:, :-1] *= torch.rand(len(held), cols - 1, generator=random) < 0.7
    if kind:
        held[held == 128] = -128
    scale = torch.randint(*scale_bits, (len(held), 1), generator=random).short().view(torch.float16)
    w = (held * scale.float()).to(dtype)
    return w[w.isfinite().all(1)]


@pytest.mark.parametrize("device", devices())
@each_dtype
@each_kind
def test_a_row_on_a_grid_keeps_its_values_whatever_its_largest_code(device: str, dtype: torch.dtype, kind: int) -> None:
    for seed, cols in enumerate((2, 3, 20, 200)):
        for scale_bits in ((1, 0x7C00), (1, 300), (0x2BFC, 0x2C04)):  # any float16, subnormal ones, those around 2^-4
            w = on_grids(kind, dtype, cols, seed, scale_bits).to(device)
            held, scales = codes.quantised(w, kind)
            codes.check(held, scales)
            lost = (held.float() * scales[:, None]).to(dtype) != w
            assert not int(lost.any(1).sum()), f"{cols} columns, scales {scale_bits}: row {lost.any(1).nonzero()[0]}"


@each_kind
def test_scales_of_bfloat16_below_those_of_float16_are_found_too(kind: int) -> None:
    small = on_grids(kind, torch.bfloat16, 50, 0, (0x2C00, 0x2C01))  # 2^-4, times what bfloat16 has
    for scale in (1.0078125 * 2.0**-30, 1.9921875 * 2.0**-100):
        w = (small.double() * scale).to(torch.bfloat16)
        held, scales = codes.quantised(w, kind)
        assert torch.equal((held.float() * scales[:, None]).to(torch.bfloat16), w)


class NoTensorOverANumber(TorchFunctionMode):
    """By a Python number CUDA multiplies with its rounded reciprocal, the CPU divides: exact both, by powers of two."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("div", "div_") and not isinstance(args[1], Tensor):
            assert math.frexp(args[1])[0] == 0.5, f"{func.__name__} by {args[1]}"
        return func(*args, **kwargs or {})


def test_nothing_is_divided_by_a_python_number() -> None:
    w = (torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) / 30).bfloat16()
    with NoTensorOverANumber():
        for grid in (grids.float8, grids.integers(8), grids.integers(4, offset=True)):
            on_grid = grids.nearest(w, grid)
            for kind in KINDS:
                codes.quantised(on_grid, kind)


@pytest.mark.gpu
@each_dtype
@each_kind
def test_a_gpu_rounds_to_the_bytes_of_the_cpu(dtype: torch.dtype, kind: int) -> None:
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        rows, cols = (int(torch.randint(1, most, (), generator=random)) for most in (3000, 1500))
        # Rows of all sizes; float16 holds 2^-14 to 2^15 and subnormal numbers.
        w = torch.randn(rows, cols, generator=random) * 2.0 ** torch.randint(-20, 10, (rows, 1), generator=random)
        w = w.to(dtype)
        weights = [w, torch.where(mask("uniform", rows, cols, 0.5, seed), w, 0), on_grids(kind, dtype, 30, seed)]
        for grid in (grids.float8, grids.integers(8), grids.integers(4, offset=True)):
            weights.append(grids.nearest(w, grid))
            assert_same_bits(grids.nearest(w.cuda(), grid), weights[-1])
        for weight in weights:
            for got, wanted in zip(codes.quantised(weight.cuda(), kind), codes.quantised(weight, kind), strict=True):
                assert_same_bits(got, wanted)


@pytest.mark.parametrize("device", devices())
@each_format
@each_dtype
def test_an_empty_row_is_zero_and_scales_are_of_their_rows(
    device: str, format: type[ByteWeight], dtype: torch.dtype
) -> None:
    for kind in KINDS:
        held = torch.ones(200, 600).to(codes.TYPES[kind])
        held[::3] = 0
        scales = 2.0 ** (torch.arange(200) % 7)
        made = format.from_codes(held.to(device), scales.to(device), dtype)
        x = torch.zeros(600, dtype=dtype)
        x[::100] = 1
        for tokens in (1, 9, 64, 65, 300):
            y = made.linear(x.expand(tokens, -1).to(device)).cpu().float()
            assert not y[:, ::3].any()
            assert torch.equal(y, (held[:, ::100].float().sum(1) * scales).expand(tokens, -1))


@pytest.mark.gpu
@each_format
def test_sums_of_the_largest_and_smallest_codes(format: type[ByteWeight]) -> None:
    """Next to each other; subnormal e4m3 too. A row has one of each, so nothing is rounded."""
    for kind, pair in ((0, (448.0, -(2.0**-9))), (1, (-128.0, 1.0))):
        held = torch.zeros(64, 256)
        held[:, 5], held[:, 6] = pair
        for dtype in HALVES:
            made = format.from_codes(held.to(codes.TYPES[kind]).cuda(), torch.ones(64).cuda(), dtype)
            x = torch.zeros(2, 256, dtype=dtype)
            x[0, 5] = x[1, 6] = 1
            assert made.linear(x.cuda()).float().cpu().tolist() == [[pair[0]] * 64, [pair[1]] * 64]


# Moving, cutting, files.


@each_format
@each_kind
def test_another_dtype_keeps_codes_and_scales(format: type[ByteWeight], kind: int) -> None:
    made = made_of(format, 70, 300, kind=kind, dtype=torch.bfloat16)
    half = made.to(dtype=torch.float16)
    assert isinstance(half, format)
    half.validate()
    assert half.dtype == torch.float16
    assert_same_bits(half.codes(), made.codes())
    assert_same_bits(half.scales, made.scales)
    wide = made.to(dtype=torch.float32)
    assert wide.format == "macko"
    assert_same_bits(wide.to_dense(), made.codes().float() * made.scales[:, None])


def tower(dtype: torch.dtype = torch.bfloat16, zeros: bool = True) -> Any:
    model: Any = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 512, bias=False)).to(dtype)
    with torch.no_grad():
        for index in (0, 2):
            weight = model[index].weight
            weight.copy_(random_vector(*weight.shape, dtype=dtype, seed=index))
            weight *= mask("uniform", *weight.shape, 0.5 if zeros else 1.0)
    return model


@pytest.mark.parametrize("device", devices())
@each_dtype
@pytest.mark.parametrize("values", codes.KINDS)
@pytest.mark.parametrize("zeros", [True, False])
def test_models_are_saved_and_loaded_with_the_same_codes(
    device: str, dtype: torch.dtype, values: str, zeros: bool, tmp_path: Path
) -> None:
    model = tower(dtype, zeros).to(device)
    report = (macko.sparsify_ if zeros else macko.compress_)(model, values=values, progress=False)
    assert {row.format for row in report} == {f"{'sparse8' if zeros else 'dense8'} {values}"}
    x = random_vector(3, 512, dtype=dtype).to(device)
    y, file = model(x), tmp_path / "model.safetensors"
    macko.save_model(model, file)
    with safe_open(file, framework="pt") as saved:
        about = json.loads(saved.metadata()["macko"])["layers"]
        assert {layer["format"] for layer in about.values()} == {"macko8"}
        assert {layer["values"] for layer in about.values()} == {values}
        assert saved.get_tensor("0.values").dtype == torch.uint8
        assert saved.get_tensor("0.scales").dtype == torch.float32
        assert (about["0"]["delta_bits"] == 0) == (not zeros)
    with torch.device("meta"):
        blank = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 512, bias=False))
    for other in (tower(dtype).to(device), copy.deepcopy(model), blank):
        loaded = macko.load_model(other, file, device=device)
        assert loaded[0].format == model[0].format
        assert_same_bits(loaded(x).detach(), y.detach())
    again = pickle.loads(pickle.dumps(model))
    assert_same_bits(again(x).detach(), y.detach())
    again.load_state_dict(model.state_dict())
    assert_same_bits(again(x).detach(), y.detach())
    moved = copy.deepcopy(model).to("cpu").to(torch.float16)
    assert moved[0].packed.scales.dtype == torch.float32
    assert_same_bits(moved[0].packed.codes(), model[0].packed.codes())


@pytest.mark.parametrize("values", codes.KINDS)
@pytest.mark.parametrize("zeros", [True, False])
def test_a_layer_on_meta_knows_how_it_holds_values(values: str, zeros: bool) -> None:
    model = tower(zeros=zeros)
    (macko.sparsify_ if zeros else macko.compress_)(model, values=values, progress=False)
    packed: Any = model[0].packed
    state = model.state_dict()
    nowhere = {name: tensor if "extra" in name else tensor.to("meta") for name, tensor in state.items()}
    blank = copy.deepcopy(model).to("meta")
    for about in (blank.state_dict(), nowhere):
        assert values in bytes(about["0._extra_state"].tolist()).decode()
        for other in (blank, copy.deepcopy(model)):
            other.load_state_dict(about, assign=True)
            assert other[0].device.type == "meta"
            assert other[0].packed.label == packed.label
            assert other(torch.empty(3, 512, dtype=torch.bfloat16, device="meta")).shape == (3, 512)
            other.load_state_dict(state, assign=True)
            assert_same_bits(other[0].packed.codes(), packed.codes())
            other.to("meta")
    with pytest.raises(RuntimeError, match="0: the state is on the meta device and has no content to copy"):
        model.load_state_dict(nowhere)
    assert_same_bits(model[0].packed.codes(), packed.codes())


def test_merged_layers_on_meta_know_how_they_hold_values() -> None:
    names = ("q_proj", "k_proj", "v_proj")
    model: Any = nn.ModuleDict({name: nn.Linear(128, 128, bias=False) for name in names}).bfloat16()
    macko.sparsify_(model, values="int8", merge=True, min_sparsity=0, progress=False)
    nowhere = copy.deepcopy(model).to("meta").state_dict()
    assert '"int8"' in bytes(nowhere["k_proj._extra_state"].tolist()).decode()
    with pytest.raises(RuntimeError, match="k_proj: the state is on meta, and what it is merged with is not"):
        model.load_state_dict(nowhere, assign=True)


def test_files_are_checked() -> None:
    sparse = made_of(Sparse8Weight, 70, 300, kind=0, dtype=torch.bfloat16).to_saved()
    dense = made_of(Dense8Weight, 70, 300, kind=0, dtype=torch.bfloat16).to_saved()
    assert isinstance(sparse, Macko8Weight)
    assert isinstance(dense, Macko8Weight)
    sparse.validate()
    dense.validate()
    replace = dataclasses.replace
    for made, message in (
        (replace(sparse, values=sparse.values[:-8]), "deltas has"),
        (replace(sparse, values=sparse.values.index_fill(0, torch.tensor([0]), 127)), "NaN"),
        (replace(sparse, values=sparse.values.float()), "values has dtype torch.float32"),
        (replace(sparse, cols=20), "the deltas put it at column"),
        (replace(sparse, scales=sparse.scales[1:]), r"scales have dtype torch.float32, shape \[69\]"),
        (replace(sparse, scales=-sparse.scales), "scales have numbers that are not above 0"),
        (replace(sparse, delta_bits=3), "delta_bits is 3, expected 0, 2, 4, 8"),
        (replace(sparse, source=2), "source is 2, expected 0, 1"),
        (replace(dense, values=dense.values[1:]), "values has 20999 elements, expected 21000"),
        (replace(dense, deltas=sparse.deltas), "a dense weight has neither deltas nor row_ptr"),
    ):
        with pytest.raises(ValueError, match=f"not a macko8 weight: .*{message}"):
            made.validate()
    about = {"format": "macko8", "rows": 70, "cols": 300, "delta_bits": 2, "values": "fp8", "source": 1}
    assert saved_as(about)[1]["kind"] == 0
    with pytest.raises(ValueError, match="values is 'fp4', expected one of fp8, int8"):
        saved_as({**about, "values": "fp4"})


@pytest.mark.parametrize("values", codes.KINDS)
def test_merged_layers_keep_their_codes(values: str) -> None:
    attention: Any = nn.ModuleDict(
        {f"{name}_proj": nn.Linear(512, rows, bias=False) for name, rows in zip("qkv", (128, 64, 70), strict=True)}
    )
    for index, layer in enumerate(attention.values()):
        layer.weight.data *= mask("uniform", *layer.weight.shape, 0.5, index)
    model: Any = nn.ModuleDict({"attention": attention}).bfloat16()
    alone = copy.deepcopy(model)
    macko.sparsify_(alone, values=values, progress=False)
    report = macko.sparsify_(model, values=values, merge=True, progress=False)
    assert all(row.merged_with for row in report)
    x = random_vector(3, 512, dtype=torch.bfloat16)
    for name, layer in alone["attention"].items():
        merged = model["attention"][name]
        assert_same_bits(merged.packed.codes(), layer.packed.codes())
        assert_same_bits(merged(x), layer(x))
        assert merged(x).is_contiguous()
    for name, tensor in alone.state_dict().items():
        assert_same_bits(model.state_dict()[name], tensor)
    macko.split_(model)
    assert_same_bits(model["attention"]["k_proj"].packed.data, alone["attention"]["k_proj"].packed.data)


# Who asks.


def test_no_default_rounds() -> None:
    w = tower()[0].weight.detach()
    for options in (Options(), Options("smallest"), Options("mixed"), Options(values="exact")):
        assert not isinstance(pack(w, options), ByteWeight)


def test_values_are_of_auto_and_of_the_formats_that_hold_them() -> None:
    w = tower()[0].weight.detach()
    for kind, values in enumerate(codes.KINDS):
        assert pack(w, Options(values=values)).label == f"sparse8 {values}"
        assert pack(w, Options("dense8", values=values)).label == f"dense8 {values}"
        assert pack(MackoWeight.from_dense(w), Options("sparse8", values=values)).label == f"sparse8 {values}"
        assert_same_bits(pack(w, Options(values=values)).to_dense(), Sparse8Weight.from_dense(w, kind).to_dense())
        full = random_vector(*w.shape, dtype=w.dtype)
        assert pack(full, Options(values=values)).label == f"dense8 {values}"
        with pytest.raises(ValueError, match=f"values is '{values}', format 'tile' takes exact"):
            Options("tile", values=values)
        assert not isinstance(pack(w, Options("mixed", values=values)), ByteWeight)  # slide's own 8 bits, if it fits
    assert pack(w, Options("sparse8")).label == "sparse8 fp8"
    with pytest.raises(ValueError, match="values is 'raw', expected one of exact, fp8, int8"):
        macko.compress_(tower(), values="raw")


def test_a_layer_keeps_its_codes() -> None:
    """Wherever it moves, nothing is chosen or rounded anew; other formats hold what it multiplies with."""
    model = tower()
    macko.sparsify_(model, values="int8", progress=False)
    layer, before = model[0], model[0].packed.codes()
    assert layer._options is None  # which would choose where it moves to another kind of device
    layer.reformat_("auto")
    assert layer.format == "sparse8"
    layer.half().bfloat16()
    assert_same_bits(layer.packed.codes(), before)
    assert "format=sparse8" in repr(layer)
    assert layer.reformat_("dense8").packed.label == "dense8 int8"
    assert_same_bits(layer.packed.codes(), before)
    dense = layer.to_linear()
    layer.reformat_("macko")
    assert_same_bits(layer.packed.to_dense(), dense.weight.detach())


def test_what_is_interrupted_has_its_weights_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tower()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("macko.nn.convert.merge_", fails)
    with pytest.raises(KeyboardInterrupt):
        macko.sparsify_(model, values="fp8", merge=True, progress=False)
    for parameter, wanted in zip(model.parameters(), before, strict=True):
        assert_same_bits(parameter.detach(), wanted)


def test_merged_layers_take_states_of_their_kind_only() -> None:
    def siblings(values: str, merge: bool) -> Any:
        model: Any = nn.ModuleDict({name: nn.Linear(128, 128, bias=False) for name in ("q_proj", "k_proj", "v_proj")})
        for number, layer in enumerate(model.values()):
            layer.weight.data = random_vector(128, 128, dtype=torch.float32, seed=number) * mask(
                "uniform", 128, 128, 0.5
            )
        macko.sparsify_(model.bfloat16(), values=values, merge=merge, progress=False)
        return model

    merged = siblings("int8", True)
    assert type(merged["q_proj"]).__name__ == "MergedLinear"
    before = [layer.packed.codes() for layer in merged.values()]
    merged.load_state_dict(siblings("int8", False).state_dict())
    for values, ways in (("fp8", "fp8 and int8"), ("exact", "16 bits and int8")):
        with pytest.raises(RuntimeError, match=f"q_proj: .* have values in {ways}: .* split_ them first"):
            merged.load_state_dict(siblings(values, False).state_dict())
    for layer, wanted in zip(merged.values(), before, strict=True):
        assert_same_bits(layer.packed.codes(), wanted)
