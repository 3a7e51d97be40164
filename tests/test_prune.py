"""Pruning: exact counts in every row, the same ones every time, and nothing else touched."""

import pytest
import torch
from torch import nn

import macko
from macko.prune import magnitude
from tests.common import CPU_DTYPES, assert_same_bits, devices, random_vector


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("sparsity", [0, 0.1, 0.5, 0.77, 0.99])
def test_exact_count_of_the_smallest_in_every_row(device: str, dtype: torch.dtype, sparsity: float) -> None:
    w = random_vector(17, 203, dtype=dtype).to(device)
    mask = magnitude(w, sparsity)
    assert (mask.sum(1) == round(sparsity * 203)).all()
    for row, pruned in zip(w.abs().cpu(), mask.cpu(), strict=True):
        if pruned.any():
            assert row[pruned].max() <= row[~pruned].min()


@pytest.mark.parametrize("device", devices())
def test_ties_go_by_column(device: str) -> None:
    w = torch.tensor([[1, -1, 1, 1], [0, -0.0, 2, 0], [5, 3, 3, 3]], device=device)
    wanted = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]
    assert magnitude(w, 0.5).int().tolist() == wanted


def test_nan_and_inf_go_last() -> None:
    w = torch.tensor([[torch.nan, torch.inf, 1, 2], [torch.nan, -torch.inf, torch.inf, 3]])
    assert magnitude(w, 0.5).tolist() == [[False, False, True, True], [True, False, False, True]]


def test_no_columns_and_no_rows() -> None:
    for shape in ((3, 0), (0, 3), (0, 0)):
        assert magnitude(torch.zeros(shape), 0.5).shape == shape


def test_ignored_and_filtered_layers_stay() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4), "lm_head": nn.Linear(8, 4)})
    report = macko.prune_(model, 0.5, filter_fn=lambda module, name: name != "b")
    assert {row.name: row.reason for row in report} == {
        "a": "", "b": "left out by filter_fn", "lm_head": "ignored by 'lm_head'",
    }  # fmt: skip
    assert [int(layer.weight.count_nonzero()) for layer in model.values()] == [16, 32, 32]
    assert next(iter(report)).density == 0.5


def test_a_tied_weight_is_pruned_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 4, bias=False), "b": nn.Linear(8, 4, bias=False)})
    model["b"].weight = model["a"].weight
    report = macko.prune_(model, 0.25)
    assert [row.reason for row in report] == ["", "shares the weight of a"]
    assert (model["a"].weight.count_nonzero(dim=1) == 6).all()


def test_pruning_twice_changes_nothing() -> None:
    model = nn.Linear(100, 10)
    macko.prune_(model, 0.5)
    before = model.weight.detach().clone()
    macko.prune_(model, 0.5)
    assert_same_bits(model.weight.detach(), before)


def test_gradients_and_identity_stay() -> None:
    model = nn.Linear(100, 10)
    weight = model.weight
    macko.prune_(model, 0.5)
    assert model.weight is weight
    assert weight.requires_grad


def test_refuses_before_it_changes() -> None:
    model = nn.Linear(8, 4)
    for sparsity in (-0.1, 1.0, 50):
        with pytest.raises(ValueError, match="sparsity is"):
            macko.prune_(model, sparsity)
    with pytest.raises(ValueError, match="method is 'elves', expected one of magnitude"):
        macko.prune_(model, method="elves")
    assert model.weight.count_nonzero() == 32


def test_what_cannot_be_pruned_says_why() -> None:
    model = nn.Sequential(nn.Linear(8, 4, device="meta"), nn.Linear(8, 4), nn.Linear(8, 4))
    model[1] = macko.SparseLinear.from_linear(model[1])
    nn.utils.parametrizations.weight_norm(model[2])
    reasons = [row.reason for row in macko.prune_(model, 0.5)]
    assert reasons == ["its weight is on the meta device", "is sparse already", "its weight is made from other tensors"]
