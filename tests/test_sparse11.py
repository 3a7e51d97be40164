"""Layers in sparse11, and when it is taken in place of tile. Its bytes and products: kernels/test_slabs.py."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import macko
from macko import SparseLinear
from macko.choose import times
from macko.choose.auto import pack
from macko.choose.options import Options
from macko.weights import Sparse11Weight, TileWeight
from tests.common import HALVES, assert_same_bits
from tests.kernels.codecs import Sparse11

BFLOAT16 = torch.bfloat16


def weight(rows: int, cols: int, density: float = 0.5, listed: float = 0.005, dtype: torch.dtype = BFLOAT16) -> Tensor:
    return Sparse11(dtype, 0).source(rows, cols, density, rare=listed)


def test_a_state_that_it_does_not_hold_is_loaded_as_canonical(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 that was never bfloat16, into a layer that is held so. (On a CPU, as if it ran there.)"""
    monkeypatch.setattr(Sparse11Weight, "device_types", ("cuda", "cpu"))
    linear = nn.Linear(512, 256, bias=False, dtype=torch.float16)
    linear.weight.data = weight(256, 512, dtype=torch.float16, listed=0.0)
    layer = SparseLinear.from_linear(linear, "sparse11")
    other = torch.where(linear.weight.data != 0, torch.randn(256, 512).half(), 0)
    linear.weight.data = other
    assert not layer.load_state_dict(SparseLinear.from_linear(linear, "macko").state_dict()).missing_keys
    assert layer.format == "macko"
    assert_same_bits(layer.weight.as_subclass(Tensor), other)


# What auto takes.

MERGED = ("q_proj", "k_proj", "v_proj")


@pytest.fixture
def tile_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose kernels of slabs gain."""
    monkeypatch.setattr("macko.choose.auto.gains_by_slabs", lambda device: True)
    monkeypatch.setattr("macko.choose.auto.choose", lambda weight, tokens=None: TileWeight)


@pytest.mark.usefixtures("tile_is_chosen")
@pytest.mark.parametrize("dtype", HALVES)
def test_exact_values_take_it_in_place_of_tile_where_few_are_listed(dtype: torch.dtype) -> None:
    w = weight(128, 512, density=0.5, listed=0.0003, dtype=dtype)
    exact, raw = Options(), Options(values="raw")
    assert pack(w, exact).format == pack(w, Options("mixed")).format == "sparse11"
    assert pack(w, raw).format == pack(w, Options("mixed", values="raw")).format == pack(w, Options("tile")).format
    assert pack(w, raw).format == "tile"
    assert pack(weight(128, 512, density=0.3, dtype=dtype), exact).format == "tile"
    assert pack(weight(128, 512, density=0.5, listed=0.005, dtype=dtype), exact).format == "tile"
    assert pack(w.float().to(torch.float16) * 1.001, exact).format == "tile"


@pytest.mark.usefixtures("tile_is_chosen")
def test_the_report_says_what_is_listed_and_why_values_stay() -> None:
    model = nn.ModuleDict({name: nn.Linear(512, 128, bias=False, dtype=BFLOAT16) for name in ("few", "many")})
    for name, layer in model.items():
        layer.weight.data = weight(128, 512, listed=0.0003 if name == "few" else 0.05)
    report = macko.sparsify_(model, progress=False)
    rows = {row.name: row for row in report}
    assert (rows["few"].format, rows["many"].format) == ("sparse11", "tile")
    assert re.fullmatch(r"0\.\d{3}% of its values listed", rows["few"].note)
    assert re.fullmatch(r"values stay at 16 bits: sparse11 would list [45]\.\d% of them", rows["many"].note)
    raw = copy.deepcopy(model)
    for name, layer in raw.items():
        raw[name] = layer.to_linear()
    assert {row.format for row in macko.sparsify_(raw, values="raw", progress=False)} == {"tile"}


@pytest.mark.usefixtures("tile_is_chosen")
def test_exact_values_stay_where_tile_was_measured_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"rows": 128, "cols": 512, "codec": "sparse11", "gain": {"1": 0.98, "64": 1.2, "128": 0.9}},
        {"rows": 4096, "cols": 512, "codec": "sparse11", "gain": {"1": 0.9}},
    ]
    known = times.Times("GPU", 1.0, (), True, codecs={"sparse11": lines})
    monkeypatch.setattr("macko.choose.auto.times_of", lambda device: known)
    w = weight(128, 512, listed=0.0)
    for tokens, wanted in ((None, "sparse11"), (8, "sparse11"), (64, "sparse11"), (128, "tile"), (4096, "tile")):
        assert pack(w, Options(tokens=tokens, values="exact")).format == wanted
    assert pack(weight(3000, 512, listed=0.0), Options(values="exact")).format == "tile"
    model = nn.Sequential(nn.Linear(512, 128, bias=False, dtype=BFLOAT16))
    model[0].weight.data = w
    report = macko.sparsify_(model, tokens=128, values="exact", progress=False)
    assert report.layers[0].note == "values stay at 16 bits: sparse11 takes 1.11 of tile's time at 128 tokens"


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_the_shipped_tables_know_it(gpu: str) -> None:
    known = times.times(gpu)
    assert known.measured
    for shape in ((4096, 4096), (28672, 8192)):
        assert 0.8 < known.codec_gain("sparse11", shape, 1) < 1.5


@pytest.mark.usefixtures("tile_is_chosen")
@pytest.mark.parametrize(("listed", "format"), [(0.05, "tile"), (0.0001, "sparse11")])
def test_siblings_that_differ_become_one_matrix(listed: float, format: str) -> None:
    model: Any = nn.ModuleDict({name: nn.Linear(512, 128, bias=False, dtype=BFLOAT16) for name in MERGED})
    for name, layer in model.items():
        layer.weight.data = weight(128, 512, listed=listed if name == "k_proj" else 0.0003)
    dense = {name: layer.weight.clone() for name, layer in model.items()}
    macko.sparsify_(model, values="exact", progress=False)
    assert [layer.format for layer in model.values()] == ["sparse11", format, "sparse11"]
    assert macko.merge_(model) == [[*MERGED]]
    for name, layer in model.items():
        assert layer.format == format
        assert_same_bits(layer.weight.as_subclass(Tensor), dense[name])
    macko.split_(model)
    assert [layer.format for layer in model.values()] == ["sparse11", format, "sparse11"]


@pytest.mark.usefixtures("tile_is_chosen")
@pytest.mark.parametrize(("scale", "format"), [(1.0, "sparse11"), (2.0**-22, "tile")])
def test_another_dtype_is_another_choice(scale: float, format: str) -> None:
    """Numbers that float16 rounds have no table; tile holds any. It is not canonical, which would be slow."""
    options = Options(values="exact")
    w = weight(128, 512, listed=0.0003).clamp(-2, 2) * scale
    layer = SparseLinear.from_packed(pack(w, options), options=options)
    assert layer.format == "sparse11"
    assert layer.half().format == format
    assert_same_bits(layer.weight.as_subclass(Tensor), torch.where(w.half() == 0, 0, w.half()))
