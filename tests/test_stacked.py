"""Layers that an engine stacks into one and cuts for its ranks; without an engine."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from macko.choose.options import Options
from macko.choose.slide import Whole
from macko.integrations import stacked
from macko.integrations.config import Settings
from macko.integrations.stacked import Share, Stack
from macko.weights import EcWeight, MackoWeight, PackedWeight, SlideWeight, Sparse8Weight
from tests.common import assert_same_bits, random_weight

CPU, F16, BF16 = torch.device("cpu"), torch.float16, torch.bfloat16
QKV = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def about(weight: PackedWeight) -> dict[str, Any]:
    about = weight.about()
    assert about is not None
    return about


def stack_of(*weights: PackedWeight, keys: Sequence[Any] = ()) -> Stack:
    """Whose tensors have come, the last layer's first."""
    stack = Stack([about(weight) for weight in weights])
    for key, weight in reversed(list(zip(keys or range(len(weights)), weights, strict=True))):
        for name, tensor in weight.tensors().items():
            assert not stack.is_complete
            stack.add(stacked.places_of(key, len(weights)), name, tensor, CPU)
    assert stack.is_complete
    return stack


def test_names_and_places_are_what_an_engine_calls_them() -> None:
    assert stacked.names_of("a.0.qkv_proj", QKV) == ["a.0.q_proj", "a.0.k_proj", "a.0.v_proj"]
    assert stacked.names_of("a.o_proj", QKV) == ["a.o_proj"]
    assert stacked.names_of("qkv_proj", QKV) == QKV["qkv_proj"]
    keys = (None, "q", "v", 1, (0, 1))
    assert [stacked.places_of(key, 3) for key in keys] == [(0, 1, 2), (0,), (2,), (1,), (0, 1)]


def test_siblings_of_which_some_are_packed_are_refused_by_name() -> None:
    layers = {"a.q_proj": {"q": 1}, "a.k_proj": {"k": 1}, "a.v_proj": {"v": 1}}
    names = stacked.names_of("a.qkv_proj", QKV)
    assert stacked.packed_of("a.qkv_proj", names, layers) == [{"q": 1}, {"k": 1}, {"v": 1}]
    assert stacked.packed_of("a.qkv_proj", names, {}) == []
    del layers["a.k_proj"]
    with pytest.raises(
        ValueError, match=r"a\.qkv_proj is one matrix .* a\.q_proj, a\.v_proj, packed, and a\.k_proj, d"
    ):
        stacked.packed_of("a.qkv_proj", names, layers)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("saved", ["apart", "together"])
def test_each_rank_has_its_share_of_a_stack_and_ranks_share_heads(ranks: int, saved: str) -> None:
    sizes, head = [64, 16, 16], 8  # 8 heads, 2 of k and v: 4 ranks share them
    whole = random_weight(sum(sizes), 48, 0.5, F16)
    q, k, v = whole.split(sizes)
    same = max(1, ranks // 2)
    for rank in range(ranks):
        rows = (64 // ranks, *[16 * same // ranks] * 2)
        share = Share(rows, 48, rank, ranks, (1, same, same))
        wanted = [q.chunk(ranks)[rank], *(t.split(16 * same // ranks)[rank // same] for t in (k, v))]
        assert wanted[1].shape[0] % head == 0
        parts = (q, k, v) if saved == "apart" else (whole,)
        layers = [MackoWeight.from_dense(part.contiguous()) for part in parts]
        stack = Stack([about(layer) for layer in layers])
        for key, layer in zip("qkv" if saved == "apart" else [None], layers, strict=True):
            for name, tensor in layer.tensors().items():
                stack.add(stacked.places_of(key, 3), name, tensor, CPU)
        assert_same_bits(stack.pack(share, F16, CPU, Options("macko")).to_dense(), torch.cat(wanted))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_has_its_columns(ranks: int) -> None:
    w = random_weight(40, 96, 0.5, F16)
    for rank, wanted in enumerate(w.chunk(ranks, 1)):
        share = Share((40,), 96 // ranks, rank, ranks)
        packed = stack_of(MackoWeight.from_dense(w)).pack(share, F16, CPU, Options())
        assert_same_bits(packed.to_dense(), wanted)
        whole = stack_of(MackoWeight.from_dense(wanted.contiguous()))  # a folder that is cut for the ranks already
        assert_same_bits(whole.unpack(share, F16, CPU), wanted)


def test_after_the_last_row_of_a_head_are_zeros() -> None:
    w = random_weight(100, 48, 0.5, F16)
    for window in ((0, 64), (64, 100)):
        share = Share((64,), 48, window=window)
        packed = stack_of(MackoWeight.from_dense(w)).pack(share, F16, CPU, Options())
        wanted = torch.zeros(64, 48, dtype=F16)
        wanted[: window[1] - window[0]] = w[slice(*window)]
        assert_same_bits(packed.to_dense(), wanted)
    share = Share((64,), 48, window=(64, 128))
    with pytest.raises(ValueError, match="the checkpoint has 100 rows, expected rows 64 to 128"):
        stack_of(MackoWeight.from_dense(w)).pack(share, F16, CPU, Options())


def test_a_layer_of_another_shape_is_refused() -> None:
    for rows, cols, text in (
        (65, 48, "the checkpoint has 65 rows, expected 32 for each of 2 ranks"),
        (64, 47, "the checkpoint has 47 columns, expected 48 for each of 2 ranks"),
    ):
        stack = stack_of(MackoWeight.from_dense(random_weight(rows, cols, 0.5, F16)))
        with pytest.raises(ValueError, match=text):
            stack.pack(Share((32,), 48, 1, 2), F16, CPU, Options())


def test_what_files_hold_in_8_bits_is_unpacked_once_its_shape_is_known() -> None:
    saved = Sparse8Weight.from_dense(random_weight(64, 48, 0.5, BF16)).to_saved()
    share = Share((64,), 48)
    (part,) = share.cut(saved, (0,))
    assert part.format == "sparse8"
    large: Any = dataclasses.replace(saved, cols=2**31 - 1)  # type: ignore[type-var]
    large.validate()  # nothing in it is wrong
    with pytest.raises(ValueError, match="the checkpoint has 2147483647 columns, expected 48 for each of 1"):
        share.cut(large, (0,))


def test_codes_of_8_bits_are_stacked_as_they_are_and_not_beside_16() -> None:
    whole = [Sparse8Weight.from_dense(random_weight(64, 48, 0.5, BF16)) for _ in range(2)]
    share = Share((64, 64), 48)
    packed = stack_of(*(weight.to_saved() for weight in whole)).pack(share, BF16, CPU, Options())
    assert packed.format == "sparse8"
    assert_same_bits(packed.to_dense(), torch.cat([weight.to_dense() for weight in whole]))
    mixed = stack_of(whole[0].to_saved(), MackoWeight.from_dense(random_weight(64, 48, 0.5, BF16)))
    with pytest.raises(ValueError, match="parts of one matrix have values in 16 bits and fp8"):
        mixed.pack(share, BF16, CPU, Options())


@pytest.mark.parametrize("element", range(4))
def test_slides_layers_are_one_matrix_with_their_codes_on_every_rank(element: int) -> None:
    """Of which k is packed as dense: kernels are chosen by a layer's shape, here by that of the stack."""
    dtype = F16 if element == 2 else BF16
    dense = [random_weight(rows, 96, 1.0, dtype, seed=rows) for rows in (128, 64, 64)]
    for w in dense:
        w[:, 6::8] = w[:, 7::8] = 0
    q, k, v = (SlideWeight.from_dense(w, 4, element) for w in dense)
    numbers, scales = ([each.coded()[i] for each in (q, k, v)] for i in range(2))
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        share = Share(tuple(rows // ranks for rows in (128, 64, 64)), 96, rank, ranks)
        packed = stack_of(q, k.as_pattern(0), v).pack(share, dtype, CPU, Settings("slide").layout_options)
        packed.validate()
        assert packed.label == q.label
        assert_same_bits(packed.coded()[0], torch.cat([part.chunk(ranks)[rank] for part in numbers]))
        assert_same_bits(packed.coded()[1], torch.cat([part.chunk(ranks)[rank] for part in scales]))
        down = stack_of(q).pack(Share((128,), 96 // ranks, rank, ranks), dtype, CPU, Options())
        assert_same_bits(down.coded()[0], numbers[0].chunk(ranks, 1)[rank])
        assert_same_bits(down.coded()[1], scales[0])


def test_columns_that_cut_a_group_are_refused_or_held_in_another_format() -> None:
    w = torch.randn(64, 160, generator=torch.Generator().manual_seed(0)).half()
    w[:, 4::6] = w[:, 5::6] = 0
    whole = Whole()
    whole.add(w)
    part = w[:, :80]
    with pytest.raises(ValueError, match=r"group 13 of 4:6 \(columns 78 to 83\) straddles two of 2 ranks"):
        whole.options(part, Options("slide 4:6"))
    assert whole.options(part, Options("mixed")) == Options("auto")
    assert whole.options(w, Options("mixed")) == Options("slide 4:6")


def test_what_somebody_chose_stays() -> None:
    w = random_weight(64, 48, 0.2, F16)
    packed = stack_of(EcWeight.from_dense(w)).pack(Share((64,), 48), F16, CPU, Options())
    assert packed.format == "ec"
    assert_same_bits(packed.to_dense(), w)


def test_exact_layers_of_a_folder_with_8_bits_stay_exact() -> None:
    """8 bits are not made of what the files hold exactly; raw is what it is."""
    w = random_weight(64, 64, 0.5, BF16)
    for values, format in itertools.product(("fp8", "int8", "raw"), ("auto", "mixed")):
        settings = Settings(format, values=values)
        packed = stack_of(MackoWeight.from_dense(w)).pack(Share((64,), 64), BF16, CPU, settings.layout_options)
        assert_same_bits(packed.to_dense(), w)
        assert settings.layout_options.values == ("raw" if values == "raw" else "exact")
    assert Settings("dense12").layout_options == Options()


def test_damaged_and_missing_tensors_are_told() -> None:
    good = MackoWeight.from_dense(random_weight(64, 48, 0.5, F16))
    stack = Stack([about(good)] * 2)
    assert stack.missing() == "the checkpoint has no packed layer of it, or one that is not whole"
    stack.add((1,), "values", good.values, CPU)
    assert stack.missing() == "the checkpoint has 1 of 2 packed layers of it, or one that is not whole"
    broken = dataclasses.replace(good, row_ptr=good.row_ptr.flip(0))
    with pytest.raises(ValueError, match="row_ptr"):
        stack_of(broken).pack(Share((64,), 48), F16, CPU, Options())


def test_a_stack_keeps_no_memory_of_its_reader_and_lets_layers_go() -> None:
    good = MackoWeight.from_dense(w := random_weight(64, 48, 0.5, F16))
    stack = Stack([about(good)])
    for name, tensor in good.tensors().items():
        buffer = tensor.clone()
        stack.add((0,), name, buffer, CPU)
        buffer.zero_()
    assert_same_bits(stack.unpack(Share((64,), 48), F16, CPU), w)
    assert not stack.is_complete


@pytest.mark.parametrize("has_weight", [False, True])
def test_a_module_holds_the_packed_weight_and_an_empty_one(has_weight: bool) -> None:
    module: Any = nn.Module()
    module.bias = nn.Parameter(torch.randn(64).half())
    packed = MackoWeight.from_dense(w := random_weight(64, 96, 0.4, F16))
    if has_weight:
        module.weight = nn.Parameter(w)
    module.row_ptr = nn.Parameter(torch.empty(0))  # an engine's, for a loader
    assert not stacked.holds(module)
    stacked.hold(module, packed)
    assert stacked.holds(module)
    assert {name: list(p.shape) for name, p in module.named_parameters()} == {"bias": [64], "weight": [0, 96]}
    assert not module.state_dict().keys() - {"bias", "weight"}
    x = torch.randn(3, 96).half()
    assert_same_bits(stacked.linear(module, x, module.bias), packed.linear(x, module.bias))
    assert_same_bits(stacked.dense(module), w)


def test_layers_of_a_shape_are_the_same_code_whatever_they_hold() -> None:
    """Else an engine compiles each of them."""
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.append((graph.code, [(tensor.device, tensor.dtype, tensor.shape) for tensor in inputs]))
        return graph.forward

    x = torch.randn(3, 96, dtype=BF16)
    for density in (0.2, 0.6):
        module, packed = nn.Module(), MackoWeight.smallest(random_weight(64, 96, density, BF16))
        stacked.hold(module, packed)
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(lambda module=module: stacked.linear(module, x, None), backend=backend)
            assert_same_bits(compiled(), packed.linear(x))
    assert len(seen) == 2
    assert seen[0] == seen[1]
