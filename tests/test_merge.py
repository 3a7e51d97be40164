"""Siblings merged into one matrix: same outputs, same files, whatever order, input and mode they are called in."""

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import macko
from macko.choose import auto as choose
from macko.choose.options import Options
from macko.nn import merge
from macko.nn.merge import MergedLinear
from macko.weights import MackoWeight, SellWeight, TileWeight, base
from tests.common import Graphs, assert_same_bits, devices, needs_capture, random_weight
from tests.tiny_llama import small_llama


class Attention(nn.Module):
    """q, k and v of one input; k and v have fewer rows."""

    def __init__(self, bias: bool = False, rows: Sequence[int] = (96, 32, 32)) -> None:
        super().__init__()
        for seed, (name, count) in enumerate(zip(("q_proj", "k_proj", "v_proj"), rows, strict=True)):
            layer = nn.Linear(64, count, bias=bias).bfloat16()
            layer.weight = nn.Parameter(random_weight(count, 64, 0.4, torch.bfloat16, seed=seed))
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


NAMES = ("q_proj", "k_proj", "v_proj")


def models(
    device: str = "cpu", format: str = "auto", rows: Sequence[int] = (96, 32, 32), scale: float = 1.0
) -> tuple[Any, Any]:
    """A sparse model, and the same one merged."""
    sparse: Any = nn.Sequential(Attention(rows=rows)).to(device)
    for name in NAMES:
        layer = sparse[0].get_submodule(name)
        layer.weight.data *= scale
        setattr(sparse[0], name, macko.SparseLinear.from_linear(layer, format))
    merged = copy.deepcopy(sparse)
    assert macko.merge_(merged) == [[f"0.{name}" for name in NAMES]]
    return sparse, merged


def test_the_report_names_what_is_one_matrix() -> None:
    report = macko.sparsify_(nn.Sequential(Attention()), merge=True)
    assert [row.merged_with for row in report] == [
        ["0.k_proj", "0.v_proj"], ["0.q_proj", "0.v_proj"], ["0.q_proj", "0.k_proj"]
    ]  # fmt: skip
    assert "one matrix with q_proj, v_proj" in str(report).splitlines()[2]
    assert all(not row.merged_with for row in macko.sparsify_(nn.Sequential(Attention())))


def vector(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def products(model: Any) -> list[int]:
    """Counts the products of the merged matrix from now on."""
    count: list[int] = []
    layer = model[0].q_proj._whole
    plain = layer._parts

    def counted(x: Tensor, part_rows: tuple[int, ...]) -> Any:
        count.append(1)
        return plain(x, part_rows)

    layer._parts = counted
    return count


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("shape", [(64,), (1, 1, 64), (2, 3, 64)])
def test_same_outputs_from_one_product(device: str, shape: tuple[int, ...]) -> None:
    sparse, merged = models(device)
    count = products(merged)
    for seed in range(3):
        x = vector(*shape, device=device, seed=seed)
        if device == "cpu":
            assert_same_bits(merged(x), sparse(x))
        else:  # another matrix is another order of summation
            torch.testing.assert_close(merged(x), sparse(x))
    assert len(count) == 3
    assert merged[0].q_proj._whole._last.eager is None  # nothing is kept alive


def integer_siblings(
    tokens: int, format: str, rows: Sequence[int] = (8000, 704, 300)
) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    """Merged siblings on a GPU, x, and what each of them gives: integers below 2048, so exact."""
    attention, wanted = nn.Module(), {}
    x = torch.ones(tokens, 4096, dtype=torch.float16, device="cuda")
    x[torch.rand(x.shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda") < 0.5] = -1
    for seed, (name, count) in enumerate(zip(("q_proj", "k_proj", "v_proj"), rows, strict=True)):
        layer = nn.Linear(4096, count, bias=False, device="cuda", dtype=torch.float16)
        layer.weight = nn.Parameter(random_weight(count, 4096, 0.4, torch.float16, seed=seed).sign().cuda())
        setattr(attention, name, layer)
        wanted[name] = (x.float() @ layer.weight.detach().float().t()).half()
    macko.sparsify_(attention, format=format, merge=True)
    return attention, x, wanted


@pytest.mark.gpu
@pytest.mark.sm80
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", [(8000, 704, 300), (4096, 512, 512)])
@pytest.mark.parametrize("tokens", [2, 8, 17, 33, 64, 65, 512])
def test_tile_stores_each_part_by_itself(tokens: int, rows: tuple[int, ...], compiled: bool) -> None:
    """Not slices, whose rows are apart; but where a gradient is wanted."""
    attention, x, wanted = integer_siblings(tokens, "tile", rows)

    def all_of_them(x: Tensor) -> list[Tensor]:
        return [getattr(attention, name)(x) for name in wanted]

    run = torch.compile(all_of_them, backend="aot_eager", fullgraph=True, dynamic=True) if compiled else all_of_them
    for grad in (False, True):
        x.requires_grad_(grad)
        for part, y in zip(run(x.view(1, tokens, 4096)), wanted.values(), strict=True):
            assert part.is_contiguous() is not grad
            assert torch.equal(part[0], y)
    assert run(x.detach()[:1])[0].is_contiguous()


@pytest.mark.gpu
@pytest.mark.sm80
def test_parts_that_cut_row_blocks_are_slices() -> None:
    attention, x, wanted = integer_siblings(512, "tile", (8000, 700, 304))
    for name, y in wanted.items():
        part = getattr(attention, name)(x)
        assert not part.is_contiguous()
        assert torch.equal(part, y)


@pytest.mark.gpu
def test_sell_makes_many_tokens_tensors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a GEMM each, where that is worth it. Workspaces cut parts."""
    tokens = 65
    monkeypatch.setattr(base, "OWN_PART", tokens * 300)
    attention, x, wanted = integer_siblings(tokens, "sell")
    for grad in (False, True):
        x.requires_grad_(grad)
        for name, y in wanted.items():
            part = getattr(attention, name)(x.view(1, tokens, 4096))
            assert part.is_contiguous() is not grad
            assert torch.equal(part[0], y)
    few = x.detach()[1:]
    monkeypatch.setattr(base, "OWN_PART", tokens * 300 + 1)
    assert not attention.q_proj(x.detach()).is_contiguous()
    monkeypatch.setattr(base, "OWN_PART", 0)
    assert not attention.q_proj(few).is_contiguous()  # too few


@pytest.mark.parametrize(
    ("device", "weight"),
    [
        *(("cpu", kind) for kind in (MackoWeight, TileWeight)),
        *(pytest.param("cuda", kind, marks=pytest.mark.gpu) for kind in (MackoWeight, SellWeight, TileWeight)),
    ],
)
def test_the_op_of_parts(device: str, weight: type[MackoWeight] | type[SellWeight] | type[TileWeight]) -> None:
    packed = weight.from_dense(random_weight(96, 64, 0.5, torch.float16).to(device))
    op = torch.ops.macko.linear_parts
    x = torch.randn(3, 64, device=device, dtype=torch.float16)
    for rows in ([32, 0, 64], [64, 0, 32]):
        torch.testing.assert_close(torch.cat(op(x, *packed.packed, rows), -1), packed.linear(x))
    for part_rows, words in {
        (32, 32): "part_rows are 64 in all, the matrix has 96 rows",
        (32, 65): "part_rows has 65 after 32 rows, the matrix has 96",
        (-1, 97): "part_rows has -1 after 0 rows",
    }.items():
        with pytest.raises(RuntimeError, match=words):
            op(x, *packed.packed, part_rows)
    with pytest.raises(RuntimeError, match="x has shape"):
        op(x[:, 1:], *packed.packed, [96])
    if device == "cpu" or weight is TileWeight:  # on a GPU the others' product is made of torch's, which have gradients
        with pytest.warns(UserWarning, match="linear_parts: an autograd kernel was not registered"):
            op(x.requires_grad_(), *packed.packed, [96])[0].sum().backward()


@pytest.mark.sm80
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("rows", "own"), [((128, 64, 32), True), ((96, 64, 64), False)])
def test_parts_of_dense12(device: str, rows: tuple[int, ...], own: bool) -> None:
    """Eager and compiled, for a number of tokens that may change or depends on data."""
    single, model = models(device, "dense12", rows)
    graphs = Graphs()

    def some(x: Tensor, keep: Tensor) -> Tensor:
        return model(x[keep])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
        compiled_some = torch.compile(some, backend=graphs, fullgraph=True)
        for tokens in (1, 2, 5, 80):
            x = vector(tokens, 64, device=device, seed=tokens)
            parts = [getattr(model[0], name)(x) for name in NAMES]
            assert all(part.is_contiguous() is (own or tokens == 1) for part in parts)
            for got in (torch.cat(parts, -1), compiled(x)):
                torch.testing.assert_close(got, single(x))
        keep = torch.arange(80, device=device) % 3 == 0
        torch.testing.assert_close(compiled_some(x, keep), single(x[keep]))
    assert graphs.targets("macko") == [["macko.linear"], *[["macko.linear_parts" if own else "macko.linear"]] * 2]


def test_hooks_of_accelerate_leave_merged_layers_where_they_are() -> None:
    """Which is right where all are on one device; elsewhere their products refuse (the next test)."""
    accelerate = pytest.importorskip("accelerate")
    _, model = models()
    x = vector(3, 64)
    wanted = model(x)
    places = {f"0.{name}": "cpu" for name in NAMES}
    hooked = copy.deepcopy(model)
    for name in NAMES:
        hook = accelerate.hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True)
        accelerate.hooks.add_hook_to_module(hooked[0].get_submodule(name), hook)
    for dispatched in (
        hooked,
        accelerate.dispatch_model(copy.deepcopy(model), places, main_device="cpu", force_hooks=True),
    ):
        assert type(dispatched[0].q_proj) is MergedLinear
        for _ in range(2):
            assert_same_bits(dispatched(x), wanted)
    with pytest.raises(ValueError, match=r"0.q_proj is packed by macko, and would stay"):  # tests/test_offload.py
        accelerate.cpu_offload(model, execution_device="cpu")


def test_merged_layers_refuse_an_input_on_another_device_by_name() -> None:
    _, model = models()
    replica = model[0].q_proj._replicate_for_data_parallel()  # as nn.DataParallel has one on each device
    for layer in (replica, model[0].q_proj):
        with pytest.raises(RuntimeError, match=r"merged layers are on cpu, their input is on meta: .*split_\(model\)"):
            layer(vector(3, 64).to("meta"))


def test_any_order_and_repeated_calls() -> None:
    sparse, merged = models()
    a, b = vector(2, 64), vector(2, 64, seed=1)
    for name, x in (("v_proj", a), ("q_proj", a), ("q_proj", b), ("k_proj", a), ("q_proj", a), ("q_proj", a)):
        assert_same_bits(getattr(merged[0], name)(x), getattr(sparse[0], name)(x))


def test_a_sibling_called_twice_gives_two_tensors() -> None:
    """What the caller did to the first in place does not come back with the second."""
    sparse, merged = models()
    x = vector(3, 64)
    wanted = sparse[0].q_proj(x)
    for _ in range(3):
        first = merged[0].q_proj(x)
        assert_same_bits(first, wanted)
        first += 1
    assert_same_bits(merged[0].k_proj(x), sparse[0].k_proj(x))


def test_models_do_not_take_each_others_products() -> None:
    first, second = models()[1], models()[1]
    count = products(first)
    x = vector(2, 64)
    first[0].q_proj(x)
    second(x)
    first[0].k_proj(x)
    first[0].v_proj(x)
    assert len(count) == 1


def test_what_an_exception_left_goes_with_the_next_product_or_the_model() -> None:
    model: Any = nn.Sequential(Attention(), Attention())
    macko.sparsify_(model, merge=True)
    inputs = [vector(2, 64), vector(2, 64, seed=1)]
    left = [weakref.ref(x) for x in inputs]
    model[0].q_proj(inputs[0])
    model[1].q_proj(inputs[1])
    inputs.clear()
    assert [x() is None for x in left] == [True, False]  # at most one a model
    whole = weakref.ref(model[1].q_proj._whole)
    del model
    gc.collect()
    assert left[1]() is whole() is None


def test_a_copy_between_siblings_begins_without_a_product() -> None:
    sparse, merged = models()
    x = vector(2, 64).requires_grad_()
    merged[0].q_proj(x)  # with a graph, of which no copy can be made
    for other in (copy.deepcopy(merged), pickle.loads(pickle.dumps(merged))):
        assert other[0].q_proj._whole._last.eager is None
        assert other[0].q_proj._whole._last is other[0].k_proj._whole._last
        assert_same_bits(other[0].k_proj(x).detach(), sparse[0].k_proj(x).detach())


def test_an_input_changed_in_place_between_siblings() -> None:
    sparse, merged = models()
    x = vector(2, 64)
    merged[0].q_proj(x)
    x.mul_(2)
    assert_same_bits(merged[0].k_proj(x), sparse[0].k_proj(x))
    with torch.inference_mode():
        y = vector(2, 64) * 1
        assert_same_bits(merged[0].k_proj(y), sparse[0].k_proj(y))


def test_autocast_and_inference_mode_end_between_siblings() -> None:
    sparse, merged = models()
    x = vector(2, 64)
    for model in (sparse, merged):
        with torch.autocast("cpu", torch.float16):
            assert model[0].q_proj(x).dtype == torch.float16
        assert model[0].k_proj(x).dtype == x.dtype
    with torch.inference_mode():
        assert merged[0].q_proj(x).is_inference()
    with torch.no_grad():
        assert not merged[0].k_proj(x).is_inference()


def test_gradients_and_no_grad_between_siblings() -> None:
    sparse, merged = models()
    grads = []
    for model in (sparse.float(), merged.float()):
        x = vector(2, 64).float().requires_grad_()
        with torch.no_grad():
            model[0].q_proj(x)
        parts = [getattr(model[0], name)(x).float().square().sum() for name in ("k_proj", "q_proj", "v_proj")]
        torch.stack(parts).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_output_changed_in_place(compiled: bool) -> None:
    """As adapters and activations do it: a sibling's output is a view that autograd lets be changed."""
    sparse, merged = models()
    grads = []
    for model in (sparse.float(), merged.float()):

        def changed(x: Tensor, of: Any = model[0]) -> Tensor:
            y = of.q_proj(x)
            y += 1
            return torch.cat([y, of.k_proj(x), of.v_proj(x)], -1).square()

        x = vector(2, 64).float().requires_grad_()
        (torch.compile(changed, backend="eager", fullgraph=True) if compiled else changed)(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("device", devices())
def test_compiled_in_one_graph(device: str) -> None:
    sparse, merged = models(device)
    graphs = Graphs()
    compiled = torch.compile(merged, backend=graphs, fullgraph=True)
    merged[0].q_proj(vector(1, 64, device=device))  # what an eager call leaves is not traced
    for seed in range(3):
        x = vector(1, 64, device=device, seed=seed)
        torch.testing.assert_close(compiled(x), sparse(x))
    assert [len(targets) for targets in graphs.targets("linear")] == [1]
    assert merged[0].q_proj._whole._last.traced is None


@pytest.mark.gpu
@needs_capture
def test_launches_that_overlap_with_those_of_a_compiler() -> None:
    """Integers are exact, so a kernel that reads x before it is written is seen: in a graph, behind Triton's."""
    pytest.importorskip("triton", reason="torch.compile needs triton")
    inductor = pytest.importorskip("torch._inductor.config")
    if not hasattr(inductor.triton, "enable_pdl"):
        pytest.skip("this torch has no triton.enable_pdl")

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList()
            for seed in range(4):
                block = nn.Module()
                for index, name in enumerate(("gate_proj", "up_proj", "down_proj")):
                    layer = nn.Linear(2048, 2048, bias=False, dtype=torch.float16)
                    weight = random_weight(2048, 2048, 0.5, torch.float16, seed=3 * seed + index).sign()
                    layer.weight = nn.Parameter(weight, requires_grad=False)
                    setattr(block, name, layer)
                self.blocks.append(block)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = (block.gate_proj(x).clamp(-1, 1) * block.up_proj(x).clamp(-1, 1)).clamp(-1, 1)
                x = block.down_proj(x).clamp(-1, 1)
            return x

    model = Chain().cuda()
    dense = copy.deepcopy(model)
    assert len(macko.sparsify_(model, format="sell", merge=True).changed) == 12
    assert model.blocks[0].up_proj.format == "sell"
    compiled = torch.compile(model, options={"triton.cudagraphs": True, "triton.enable_pdl": True})
    with torch.no_grad():
        for seed in range(20):
            x = vector(1, 2048, device="cuda", seed=seed).sign().half()
            assert torch.equal(compiled(x), dense(x))


def test_moves_copies_and_pickles() -> None:
    sparse, merged = models()
    x = vector(2, 64)
    wanted = sparse.to(torch.float16)(x.half())
    for other in (copy.deepcopy(merged), pickle.loads(pickle.dumps(merged))):
        other.to(torch.float16)
        assert other[0].v_proj.dtype == torch.float16
        torch.testing.assert_close(other(x.half()), wanted)
        assert other[0].q_proj._whole is other[0].v_proj._whole is not merged[0].q_proj._whole


def test_saved_as_if_it_were_not_merged(tmp_path: Path) -> None:
    sparse, merged = models()
    state, wanted = merged.state_dict(), sparse.state_dict()
    assert state.keys() == {*wanted} - {name for name in wanted if name.endswith(".bias")}
    macko.save_model(merged, tmp_path / "merged.safetensors")
    macko.save_model(sparse, tmp_path / "sparse.safetensors")
    loaded = [macko.load_model(nn.Sequential(Attention()), tmp_path / f"{n}.safetensors") for n in ("merged", "sparse")]
    for name in ("q_proj", "k_proj", "v_proj"):
        assert_same_bits(getattr(loaded[0][0], name).weight, getattr(loaded[1][0], name).weight)
        assert_same_bits(getattr(merged[0], name).weight, getattr(sparse[0], name).weight)
    macko.split_(merged)
    assert not any(isinstance(module, MergedLinear) for module in merged.modules())
    merged.load_state_dict(wanted)
    x = vector(2, 64)
    assert_same_bits(merged(x), sparse(x))


def test_a_state_that_the_format_does_not_hold_beside_its_siblings_is_refused_with_the_remedy() -> None:
    merged = models(format="dense12")[1]
    state = merged.state_dict()
    q = "0.q_proj.weight"
    with pytest.raises(RuntimeError, match=r"q_proj: .*: split_ them first"):
        merged.load_state_dict({q: state[q] * 2.0**60}, strict=False)
    assert_same_bits(merged[0].q_proj.weight, state[q])


def test_a_state_of_another_dtype_is_converted_and_not_assigned_to_one_of_siblings() -> None:
    sparse, merged = models()
    with pytest.raises(RuntimeError, match=r"q_proj: the state is of torch.float16.*split_ them first"):
        merged.load_state_dict(copy.deepcopy(sparse).half().state_dict(), assign=True)
    for name in NAMES:
        assert_same_bits(getattr(merged[0], name).weight, getattr(sparse[0], name).weight)
    merged.load_state_dict(copy.deepcopy(sparse).float().state_dict())
    for name in NAMES:
        assert_same_bits(getattr(merged[0], name).weight, getattr(sparse[0], name).weight)


@pytest.mark.parametrize("format", ["auto", "sparse8"])
def test_what_to_empty_leaves_of_siblings_is_named_with_the_remedy(format: str) -> None:
    sparse, merged = models(format=format)
    for tensor in merged[0].q_proj._whole.buffers():  # as memory may be that nobody has written
        tensor.view(torch.uint8).fill_(0xFF)
    with pytest.raises(RuntimeError, match=r"q_proj: .*, as to_empty leaves it: split_ the model before that"):
        merged.load_state_dict(sparse.state_dict())


@pytest.mark.parametrize("format", ["auto", "dense12"])
@pytest.mark.parametrize("device", devices())
def test_a_state_is_loaded_into_siblings(device: str, format: str) -> None:
    (first, merged), (other, other_merged) = models(device, format), models(device, format, scale=-2.0)
    for state in (other.state_dict(), other_merged.state_dict()):
        merged = copy.deepcopy(merged)
        assert not any(merged.load_state_dict(state, strict=True))
        for name, tensor in merged.state_dict().items():
            assert_same_bits(tensor, state[name])
        x = vector(3, 64, device=device)
        torch.testing.assert_close(merged(x), other(x))
    only_k = {name: tensor for name, tensor in first.state_dict().items() if "k_proj" in name}
    assert all("k_proj" not in name for name in merged.load_state_dict(only_k, strict=False).missing_keys)
    assert_same_bits(merged[0].q_proj.weight, other[0].q_proj.weight)
    assert_same_bits(merged[0].k_proj.weight, first[0].k_proj.weight)
    with pytest.raises(RuntimeError, match="k_proj: "):
        merged.load_state_dict({name: tensor.flatten()[:-1] for name, tensor in only_k.items()}, strict=False)
    assert_same_bits(merged[0].k_proj.weight, first[0].k_proj.weight)


def test_formats_that_were_chosen_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sparse11 and tile with values="exact"; here a bitmap and the canonical format, by density."""
    model: Any = nn.Sequential(Attention())
    model[0].k_proj.weight.data *= random_weight(32, 64, 0.1, torch.bfloat16) != 0
    monkeypatch.setattr(choose, "expected_us", lambda *_: {})
    monkeypatch.setattr(choose, "BITMAP_DENSITY", dict.fromkeys(choose.BITMAP_DENSITY, 0.3))
    named = copy.deepcopy(model)
    macko.sparsify_(model)
    assert [model[0].get_submodule(name).format for name in ("q_proj", "k_proj")] == ["bitmap", "macko"]
    x, wanted = vector(3, 64), model(vector(3, 64))
    assert len(macko.merge_(model)) == 1
    assert model[0].k_proj.format == "bitmap"
    torch.testing.assert_close(model(x), wanted)
    for name, format in (("q_proj", "bitmap"), ("k_proj", "macko"), ("v_proj", "macko")):
        setattr(named[0], name, macko.SparseLinear.from_linear(named[0].get_submodule(name), format))
    assert macko.merge_(named) == []  # as they were named


@pytest.mark.parametrize("device", devices())
def test_by_default_on_a_gpu(device: str) -> None:
    for how in ({}, {"device": device}):
        model: Any = nn.Sequential(Attention()).to("cpu" if how else device)
        report = macko.sparsify_(model, **how)  # type: ignore[arg-type]
        assert isinstance(model[0].q_proj, MergedLinear) is (device == "cuda")
        assert all(bool(row.merged_with) is (device == "cuda") for row in report)


def test_hooks_and_replaced_forwards_are_kept() -> None:
    calls: list[str] = []
    sparse, merged = models()
    sparse[0].q_proj.register_full_backward_hook(lambda *_: calls.append("backward"))
    assert macko.merge_(sparse) == []
    replaced, _ = models()
    replaced[0].q_proj.forward = torch.zeros_like
    assert macko.merge_(replaced) == []
    handle = merged[0].q_proj.register_forward_hook(lambda *_: calls.append("forward"))
    macko.split_(merged)
    merged(vector(2, 64))
    handle.remove()
    merged(vector(2, 64))
    assert calls == ["forward"]


@pytest.mark.parametrize("format", ["macko", "bitmap"])
def test_split_keeps_the_format_and_every_place(format: str) -> None:
    model = nn.Sequential(Attention())
    macko.sparsify_(model, format=format, merge=True)
    model.append(model[0].q_proj)
    macko.split_(model)
    assert {layer.format for layer in (model[0].q_proj, model[0].k_proj)} == {format}
    assert model[1] is model[0].q_proj
    assert type(model[1]) is macko.SparseLinear
    chosen = nn.Sequential(Attention())
    macko.sparsify_(chosen, tokens=3, merge=True)
    macko.split_(chosen)
    assert chosen[0].q_proj._options == Options(tokens=3)  # chooses again, as the whole would


@pytest.mark.parametrize("format", ["ec", "slide"])
def test_a_format_that_is_asked_of_merged_layers_is_saved_and_split_with_them(format: str) -> None:
    sparse, merged = models()
    merged[0].k_proj.reformat_(format)
    loaded = copy.deepcopy(sparse)
    loaded.load_state_dict(merged.state_dict())
    macko.split_(merged)
    for name in NAMES:
        for model in (loaded, merged):
            layer = getattr(model[0], name)
            assert layer.format == format
            assert_same_bits(layer.weight, getattr(sparse[0], name).weight)


def test_what_moves_one_layer_moves_all() -> None:
    _, merged = models()
    merged[0].k_proj.to(torch.float16)
    assert merged[0].q_proj.dtype == torch.float16
    merged.to("meta")
    assert "q_proj" in repr(merged)
    assert any(name.startswith("0.q_proj.") for name in merged.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("device", [None, "cpu"])
def test_merging_is_all_or_nothing_and_lets_the_layers_go(monkeypatch: pytest.MonkeyPatch, device: str | None) -> None:
    model = nn.Sequential(Attention(), Attention())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain, seen = merge._merge, []

    def failing(layers: Any, *others: Any) -> Any:
        gc.collect()
        seen.append(sum(ref() is not None for ref in refs))
        refs.extend(weakref.ref(layer) for layer in layers)
        if len(seen) == fails_at:
            raise RuntimeError("no memory")
        return plain(layers, *others)

    monkeypatch.setattr(merge, "_merge", failing)
    refs: list[Any] = []
    fails_at = 2
    with pytest.raises(RuntimeError, match="no memory"):
        macko.sparsify_(model, merge=True, device=device)
    assert all(type(layer) is nn.Linear for layer in model.modules() if isinstance(layer, nn.Linear))
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, before[name])
    refs, seen, fails_at = [], [], 0
    macko.sparsify_(model, merge=True, device=device)
    assert isinstance(model[1].q_proj, MergedLinear)
    gc.collect()
    assert not any(ref() for ref in refs)


def test_what_is_not_merged() -> None:
    shared, of_two = nn.Sequential(Attention()), nn.Sequential(Attention(), Attention())
    shared[0].v_proj, of_two[1].q_proj = shared[0].k_proj, of_two[0].q_proj
    models = nn.Sequential(Attention(bias=True)), nn.ModuleDict({"cross_attn": Attention()}), shared, of_two
    for model, ignore in (*((model, ()) for model in models), (nn.Sequential(Attention()), ["k_proj"])):
        macko.sparsify_(model, ignore=ignore)
        assert macko.merge_(model) == []
    assert of_two[1].q_proj is of_two[0].q_proj


def test_a_merged_layer_refuses_a_bias_that_it_would_not_add() -> None:
    _, merged = models()
    bias = nn.Parameter(torch.ones(96).bfloat16())
    with pytest.raises(ValueError, match=r"call macko.split_\(model\)"):
        merged[0].q_proj.bias = bias
    merged[0].q_proj.bias = None
    macko.split_(merged)
    x, without = vector(64), merged[0].q_proj(vector(64))
    merged[0].q_proj.bias = bias
    assert not torch.equal(merged[0].q_proj(x), without)


def test_a_llama_generates_the_same_and_takes_adapters(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")
    model = small_llama()
    macko.prune_(model, 0.5)
    macko.sparsify_(model)
    tokens = torch.arange(8)[None]
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(tokens, **options)
    logits = model(tokens).logits
    assert len(macko.merge_(model)) == 4
    assert torch.equal(model.generate(tokens, **options), wanted)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_bits(loaded(tokens).logits, logits)

    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    adapters = [p for n, p in adapted.named_parameters() if "lora_B" in n]
    assert len(adapters) == 14
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapters)


def test_merged_layers_do_not_leave_the_meta_device_empty() -> None:
    """Their rows are packed with those of the others, so nothing could be loaded into them."""
    _, merged = models()
    held = copy.deepcopy(merged)
    with pytest.raises(RuntimeError, match="split_ the model first"):
        merged.to("meta").to_empty(device="cpu")
    state = {name: tensor.to("meta") for name, tensor in held.state_dict().items()}
    before = [layer.packed.to_dense() for layer in held[0].children()]
    with pytest.raises((RuntimeError, ValueError)):
        held.load_state_dict(state, assign=True)
    for layer, dense in zip(held[0].children(), before, strict=True):
        assert_same_bits(layer.packed.to_dense(), dense)
