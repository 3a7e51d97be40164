"""SparseLinear stands in for nn.Linear: shapes, gradients, moves, copies, files, compile; never dense, never wrong."""

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import safetensors.torch as safetensors
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import macko
from macko import FORMATS, MackoWeight, SparseLinear
from macko.choose import auto
from macko.choose.auto import pack
from macko.choose.options import Options
from macko.weights import SAVED, PackedWeight
from tests.common import (
    Graphs,
    assert_close_spmv,
    assert_same_bits,
    device_dtypes,
    devices,
    random_vector,
    random_weight,
)

ROWS, COLS = 48, 200


def dense_layer(
    dtype: torch.dtype = torch.bfloat16, device: str = "cpu", bias: bool = True, density: float = 0.5
) -> nn.Linear:
    layer = nn.Linear(COLS, ROWS, bias=bias, dtype=dtype, device=device)
    with torch.no_grad():
        layer.weight.copy_(random_weight(ROWS, COLS, density, dtype))
        if bias:
            layer.bias.copy_(random_vector(ROWS, dtype=dtype, seed=2))
    return layer


def sparse_layer(*args: Any, **kwargs: Any) -> SparseLinear:
    return SparseLinear.from_linear(dense_layer(*args, **kwargs), format="macko")


def assert_same_layer(got: nn.Module, wanted: SparseLinear) -> None:
    """The same canonical bytes; the same format too, but where the layer may choose its own."""
    assert isinstance(got, SparseLinear)
    assert got._options or got.format == wanted.format
    held, expected = got.packed.to_macko(), wanted.packed.to_macko()
    assert held.sizes() == expected.sizes()
    for name, tensor in expected.tensors().items():
        assert_same_bits(held.tensors()[name], tensor)
    assert (got.bias is None) == (wanted.bias is None)
    if wanted.bias is not None:
        assert_same_bits(got.bias.detach(), wanted.bias.detach())


# What a caller sees of nn.Linear.


@pytest.mark.parametrize(("device", "dtype"), device_dtypes())
def test_looks_like_linear(device: str, dtype: torch.dtype) -> None:
    layer = sparse_layer(dtype, device)
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (COLS, ROWS)
    assert layer.dtype == dtype
    assert layer.device.type == device
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert all(t.is_contiguous() for t in layer.state_dict().values())
    text = repr(layer)
    density = f"density={layer.packed.density:.3f}"
    for part in (f"in_features={COLS}", f"out_features={ROWS}", density, "% sparse", "format=macko", "bytes="):
        assert part in text


@pytest.mark.parametrize(("device", "dtype"), device_dtypes())
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(), (1,), (5,), (1, 1), (2, 3), (0,), (4, 0), (2, 1, 2)])
def test_any_leading_shape(device: str, dtype: torch.dtype, bias: bool, lead: tuple[int, ...]) -> None:
    dense = dense_layer(dtype, device, bias)
    layer = SparseLinear.from_linear(dense)
    x = random_vector(*lead, COLS, dtype=dtype).to(device)
    y = layer(x)
    assert y.shape == (*lead, ROWS)
    assert_close_spmv(y.detach(), dense.weight.detach(), x, None if dense.bias is None else dense.bias.detach())


@pytest.mark.parametrize(("rows", "cols"), [(0, 8), (8, 0), (0, 0), (1, 1)])
def test_empty_weights(rows: int, cols: int) -> None:
    linear = nn.Linear(cols, rows, dtype=torch.float16)
    layer = SparseLinear.from_linear(linear)
    x = torch.ones(3, cols, dtype=torch.float16)
    assert_same_bits(layer(x).detach(), linear(x).detach())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_autocast_gives_its_own_dtype(device: str, compiled: bool) -> None:
    """As of nn.Linear: what stands behind it may not take two types, as torch.cat under autocast."""
    layer = sparse_layer(dtype=torch.float16, device=device)
    x = random_vector(2, COLS, dtype=torch.float32).to(device)
    with torch.autocast(device, torch.bfloat16):
        y = (torch.compile(layer, backend="aot_eager") if compiled else layer)(x)
    assert_same_bits(y.detach(), layer(x.half()).bfloat16().detach())


# The weight: packed, exact, frozen.


def test_autocast_takes_a_bias_of_another_dtype() -> None:
    dense = dense_layer()
    dense.bias = nn.Parameter(dense.bias.detach().float())
    sparse, x = SparseLinear.from_linear(dense, "macko"), random_vector(COLS, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, wanted = sparse(x), dense(x)
    assert y.dtype == wanted.dtype
    torch.testing.assert_close(y, wanted)


@pytest.mark.parametrize(("device", "dtype"), device_dtypes())
def test_to_linear_is_exact(device: str, dtype: torch.dtype) -> None:
    dense = dense_layer(dtype, device)
    back = SparseLinear.from_linear(dense).to_linear()
    assert type(back) is nn.Linear
    assert_same_bits(back.weight.detach(), torch.where(dense.weight == 0, 0, dense.weight).detach())
    assert back.bias is dense.bias


def test_weight_is_made_on_demand_and_never_kept() -> None:
    layer = sparse_layer()
    held = sum(t.nbytes for t in [*layer.parameters(), *layer.buffers()])
    assert layer.weight is not layer.weight
    assert layer.weight.shape == (ROWS, COLS)
    assert not layer.weight.requires_grad
    assert sum(t.nbytes for t in [*layer.parameters(), *layer.buffers()]) == held
    assert layer.state_dict()["weight"].shape == (0, COLS)


def test_what_a_layer_refuses_leaves_it_as_it_was() -> None:
    layer = sparse_layer()
    before = copy.deepcopy(layer)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        *((AttributeError, "packed and cannot be set", partial(setattr, layer, "weight", value))
          for value in (nn.Parameter(torch.zeros(ROWS, COLS)), torch.zeros(ROWS, COLS), None)),
        (RuntimeError, "register scale in the module around it", lambda: layer.register_buffer("scale", torch.ones(3))),
        (RuntimeError, "no random start", layer.reset_parameters),
        (TypeError, "float64", layer.double),
        (TypeError, r"use \.to\(dtype\), not \.type", lambda: layer.type(torch.float16)),
        (TypeError, "float64", lambda: SparseLinear.from_linear(nn.Linear(4, 4, dtype=torch.float64))),
        (TypeError, "float64", lambda: SparseLinear(4, 4, dtype=torch.float64)),
    ]  # fmt: skip
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()
        assert_same_layer(layer, before)


def test_a_new_layer_holds_zeros() -> None:
    layer = SparseLinear(COLS, ROWS, dtype=torch.bfloat16)
    assert layer.packed.stored == 0
    assert not layer(random_vector(2, COLS, dtype=torch.bfloat16)).any()


# Gradients.


def test_frozen_layer_needs_no_graph() -> None:
    layer = sparse_layer(bias=False)
    assert not layer(random_vector(COLS, dtype=torch.bfloat16)).requires_grad


# Moves and copies.


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32])
def test_another_dtype_converts_as_linear_does(source: torch.dtype, target: torch.dtype) -> None:
    dense = dense_layer(source)
    with torch.no_grad():
        # In float16: to zero, to a subnormal, to infinity. A value that becomes zero is no longer stored.
        dense.weight[0, :4] = torch.tensor([1e-30, 3e-8, 2.0**-15, 3e38]).to(source)
    layer = SparseLinear.from_linear(copy.deepcopy(dense)).to(target)
    dense = dense.to(target)
    assert layer.dtype == layer.bias.dtype == target
    assert_same_bits(layer.weight, torch.where(dense.weight == 0, 0, dense.weight).detach())
    layer.packed.validate()


@pytest.mark.gpu
def test_there_and_back() -> None:
    layer = sparse_layer()
    moved = copy.deepcopy(layer).cuda()
    assert moved.device.type == moved.bias.device.type == "cuda"
    x = random_vector(COLS, dtype=torch.bfloat16)
    assert_close_spmv(moved(x.cuda()).detach(), layer.weight, x, layer.bias.detach())
    assert_same_layer(moved.cpu(), layer)


@pytest.mark.gpu
def test_float32_does_not_move_to_cuda() -> None:
    layer = sparse_layer(torch.float32)
    with pytest.raises(TypeError, match="float32, which macko holds on the CPU only"):
        layer.cuda()
    assert layer.device.type == "cpu"
    assert layer.to("cuda", torch.float16).dtype == torch.float16
    assert layer.to("cpu", torch.float32).dtype == torch.float32


def test_deepcopy_and_pickle() -> None:
    layer = sparse_layer().eval()
    for clone in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_layer(clone, layer)
        assert not clone.training
        assert clone.values.data_ptr() != layer.values.data_ptr()


def test_meta() -> None:
    layer = sparse_layer().to("meta")
    assert layer.device.type == layer.weight.device.type == "meta"
    assert layer.weight.shape == (ROWS, COLS)
    assert copy.deepcopy(layer).half().dtype == torch.float16
    assert "format=macko" in repr(layer)
    assert layer(torch.empty(3, COLS, dtype=torch.bfloat16, device="meta")).shape == (3, ROWS)


# Files.


def through_torch(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def through_safetensors(state: dict[str, Any]) -> dict[str, Any]:
    return safetensors.load(safetensors.save(state))


@pytest.mark.parametrize("way", [dict, through_torch, through_safetensors])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_state_dict_into_a_new_layer(way: Any, device: str) -> None:
    layer, other = sparse_layer(), SparseLinear(COLS, ROWS, dtype=torch.bfloat16, device=device)
    assert other.load_state_dict(way(layer.state_dict()), assign=device == "meta").missing_keys == []
    assert_same_layer(other, layer)
    assert other.values.data_ptr() != layer.values.data_ptr() or (way is dict and device == "meta")


def test_state_dict_over_other_content_and_sizes() -> None:
    """Without its extra state too, where the format is the same."""
    layer = sparse_layer(density=0.3)
    state = nn.Sequential(layer).state_dict()
    for bits, left_out in ((2, None), (int(layer.packed.sizes()["delta_bits"]), "0._extra_state")):
        packed = MackoWeight.from_dense(random_weight(ROWS, COLS, 0.8, torch.bfloat16), delta_bits=bits)
        other = SparseLinear.from_packed(packed, torch.zeros(ROWS, dtype=torch.bfloat16))
        nn.Sequential(other).load_state_dict({name: t for name, t in state.items() if name != left_out})
        assert_same_layer(other, layer)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_of_another_dtype(assign: bool) -> None:
    layer = sparse_layer(torch.float32)
    other = SparseLinear(COLS, ROWS, dtype=torch.float16)
    other.load_state_dict(layer.state_dict(), assign=assign)
    assert_same_layer(other, layer if assign else copy.deepcopy(layer).half())


def test_dense_state_dict_is_refused_with_the_reason() -> None:
    layer = sparse_layer()
    before = copy.deepcopy(layer)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="the state has a dense weight"):
            layer.load_state_dict(dense_layer().state_dict(), strict=strict)
    assert_same_layer(before, layer)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("row_ptr", torch.full((ROWS + 1,), 5, dtype=torch.int32), r"row_ptr\[0\] is 5"),
        ("row_ptr", torch.zeros(ROWS, dtype=torch.int32), "not a macko weight"),
        ("deltas", torch.zeros(8, dtype=torch.uint8), "deltas has 8 bytes"),
        ("deltas", [1, 2], "expected tensors"),
        ("values", torch.zeros(8, dtype=torch.int64), "int64"),
        ("_extra_state", torch.zeros(3, dtype=torch.uint8), "_extra_state does not say"),
        ("_extra_state", torch.zeros(3, dtype=torch.uint8, device="meta"), "_extra_state does not say"),
        ("_extra_state", b'{"format": "macko", "rows": 1e9}', "expected integers"),
        ("_extra_state", b'{"format": "elves"}', "format is 'elves'"),
        ("_extra_state", b'{"format": "macko", "rows": 48, "cols": 8, "delta_bits": 4}',
         r"size mismatch: the state has shape \[48, 8\]"),
    ],
)  # fmt: skip
def test_hostile_state_dict(key: str, value: Any, message: str) -> None:
    layer = sparse_layer()
    before = copy.deepcopy(layer)
    value = torch.tensor(list(value), dtype=torch.uint8) if isinstance(value, bytes) else value
    state = {**layer.state_dict(), key: value}
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)
    assert_same_layer(layer, before)


# Execution layouts: made from the canonical format, held in its place, never saved.


@dataclasses.dataclass(frozen=True, eq=False)
class Layout(MackoWeight):
    """A layout for one type of device: the canonical tensors under other names would do as well."""

    format: ClassVar[str] = "layout"
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    is_layout: ClassVar[bool] = True

    @classmethod
    def from_macko(cls, weight: MackoWeight) -> "Layout":
        assert weight.device.type == "cpu"
        return cls(**weight.tensors(), **weight.sizes())

    def to_macko(self) -> MackoWeight:
        return MackoWeight(**self.tensors(), **self.sizes())


del SAVED[Layout.format]  # where a format is that the library has no number for


def laid_out(layer: SparseLinear) -> SparseLinear:
    return SparseLinear.from_packed(Layout.from_macko(layer.packed), layer.bias)


def test_a_layout_is_saved_as_canonical_and_loaded_as_layout() -> None:
    layer = sparse_layer()
    state = laid_out(layer).state_dict()
    assert list(state) == list(layer.state_dict())
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())
    other = laid_out(SparseLinear(COLS, ROWS, dtype=torch.bfloat16))
    other.load_state_dict(state)
    assert_same_layer(other, laid_out(layer))
    SparseLinear(COLS, ROWS, dtype=torch.bfloat16).load_state_dict(state)
    assert (other.half().format, other.dtype) == ("layout", torch.float16)


def of_format(format: str) -> nn.Linear:
    """A dense layer that this format holds."""
    layer = nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(random_weight(128, 256, 1.0 if format == "slide" else 0.5, torch.bfloat16))
        if format == "slide":
            layer.weight.view(-1, 4)[:, 2:] = 0
    return layer


@pytest.mark.parametrize("format", ["ec", "slide", "dense12", "dense8", "sparse8"])
def test_a_format_that_is_not_chosen_stays_in_another_dtype(format: str) -> None:
    layer = SparseLinear.from_linear(of_format(format), format)
    loaded = SparseLinear(256, 128, bias=False, dtype=torch.bfloat16)  # chooses its formats
    if format != "dense12":  # files hold that dense
        loaded.load_state_dict(layer.state_dict())
        assert loaded.half().format == format
        chosen = SparseLinear.from_linear(of_format("macko").half())
        loaded.load_state_dict(chosen.state_dict())
        assert loaded.format == chosen.format
    assert layer.reformat_().half().format == format
    assert copy.deepcopy(layer).to(torch.bfloat16).format == format


def test_mixed_is_chosen_anew_as_from_a_dense_layer() -> None:
    dense = of_format("slide")
    wanted = SparseLinear.from_linear(dense, "mixed")
    assert wanted.format == "slide"
    assert_same_layer(SparseLinear.from_linear(dense).reformat_("mixed"), wanted)


def test_mixed_that_is_chosen_anew_holds_values_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, asked = SparseLinear.from_linear(dense_layer()), []
    layer._options = Options(values="raw")

    def seen(w: MackoWeight, options: Options) -> PackedWeight:
        asked.append(options)
        return pack(w, options)

    monkeypatch.setattr(auto, "pack", seen)
    layer.reformat_("mixed")
    assert asked == [Options("mixed", values="raw"), Options(values="raw")]  # it fits no pattern
    assert layer._options == Options(values="raw")


@pytest.mark.parametrize(
    ("format", "error"), [("sell", "sell runs on cuda only, the weight is on cpu"), ("dense12", "")]
)
def test_a_format_that_does_not_take_the_weight_leaves_the_layer_as_it_was(format: str, error: str) -> None:
    layer = SparseLinear.from_linear(dense_layer(torch.float32))
    before = layer.packed, layer._options
    with pytest.raises(ValueError, match=error):
        layer.reformat_(format)
    assert (layer.packed.tensors().keys(), layer._options) == (before[0].tensors().keys(), before[1])


def test_a_state_that_no_layer_of_this_dtype_holds_is_refused_by_name() -> None:
    state = nn.Sequential(SparseLinear.from_linear(of_format("slide"), "slide")).state_dict()
    with pytest.raises(RuntimeError, match=r"0: a slide weight of 16-bit values cannot become torch\.float32"):
        nn.Sequential(SparseLinear(256, 128, bias=False, dtype=torch.float32)).load_state_dict(state)


@pytest.mark.parametrize("format", ["macko", "ec", "slide", "dense12", "dense8", "sparse8"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_no_packed_weight(format: str, default: torch.dtype) -> None:
    dense = of_format(format)
    wanted = SparseLinear.from_linear(dense, format)
    torch.set_default_dtype(default)
    try:
        layer = SparseLinear.from_linear(dense, format)
        loaded = copy.deepcopy(layer)
        loaded.load_state_dict(wanted.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_layer(layer, wanted)
    assert_same_layer(loaded, wanted)


def test_a_shallow_copy_in_another_format_leaves_the_layer_as_it_was() -> None:
    layer = sparse_layer()
    weight = layer.weight
    assert copy.copy(layer).reformat_("ec").format == "ec"
    assert_same_bits(layer.weight, weight)


@pytest.mark.gpu
def test_a_layout_becomes_canonical_on_another_device() -> None:
    layer = sparse_layer()
    moved = laid_out(layer).cuda()
    assert moved.format == "macko"
    assert_same_layer(moved.cpu(), layer)


@pytest.mark.gpu
def test_state_of_float32_into_a_layer_on_cuda() -> None:
    layer = sparse_layer(torch.float32)
    other = SparseLinear(COLS, ROWS, dtype=torch.float16, device="cuda")
    other.load_state_dict(layer.state_dict())
    assert_same_layer(other.cpu(), layer.half())


# torch.compile, CUDA graphs, streams.


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
def test_compiled_as_one_node_for_every_number_of_tokens(device: str) -> None:
    dense = dense_layer(torch.float16, device)
    dense.weight.data = dense.weight.data.bfloat16().half()  # which dense12 and sparse11 hold, too
    layers = {
        name: SparseLinear.from_linear(dense, name)
        for name, kind in FORMATS.items()
        if kind.runs(torch.device(device), dense.weight.dtype, COLS)
    }
    graphs = Graphs()

    def graphs_of(layer: nn.Module, one_is_special: bool) -> int:
        torch.compiler.reset()
        graphs.clear()
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
        for tokens in (1, 2, 3, 8, 17, 64, 300, 4096):
            x = random_vector(tokens, COLS, dtype=torch.float16).to(device)
            if not one_is_special:
                torch._dynamo.decorators.mark_unbacked(x, 0)
            assert_same_bits(compiled(x).detach(), layer(x).detach())
        return len(graphs)

    of_dense = graphs_of(dense, one_is_special=True)
    for name, layer in layers.items():
        assert graphs_of(layer, one_is_special=False) == 1, name
        assert len(graphs.targets("macko.")[0]) == 1, name
        # torch makes a graph of its own for one token, unless it is told not to: of any layer.
        assert graphs_of(layer, one_is_special=True) == of_dense, name


def test_saving_leaves_the_layer_as_it_is_at_every_moment() -> None:
    """Another thread may be multiplying."""
    layer = SparseLinear.from_linear(nn.Linear(40, 24), "bitmap")
    held = layer._buffers
    assert layer.state_dict().keys() == {"values", "deltas", "row_ptr", "bias", "_extra_state", "weight"}
    assert layer._buffers is held


@pytest.mark.parametrize("trace", ["make_fx", "jit"])
def test_what_is_traced_under_no_grad_has_gradients(trace: str) -> None:
    w, x = random_weight(24, 40, 0.4, torch.float32), random_vector(3, 40, dtype=torch.float32)
    linear = nn.Linear(40, 24, bias=False)
    linear.weight = nn.Parameter(w)
    layer = SparseLinear.from_linear(linear)
    with torch.no_grad():
        traced: Any = make_fx(lambda x: layer(x))(x) if trace == "make_fx" else torch.jit.trace(layer, x)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(traced(x).sum(), x)
    torch.testing.assert_close(grad, w.sum(0).expand(3, 40))


def test_package_names() -> None:
    assert set(macko.__all__) <= set(dir(macko))
