"""reconstruct= and sparsity="auto:": less is lost, and not one zero is in another place than it should be."""

import copy
import dataclasses
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import macko
from macko.nn.find import find_linears
from macko.pruning.allocate import BOUND, Curve, between, least
from macko.pruning.grids import integers, nearest
from macko.pruning.prune import METHODS
from macko.pruning.reconstruct import Recipe
from tests.common import CPU_DTYPES, assert_same_bits, random_vector
from tests.test_prune import Blocks, Stop, StopsAt, in_block
from tests.tiny_llama import TinyLlama, needs_transformers

QUICK = Recipe(epochs=1, steps=12, tokens=1024)


def batches(count: int = 4) -> list[Tensor]:
    return [random_vector(24, 12, dtype=torch.float32, seed=seed) for seed in range(count)]


def lost(model: nn.Module, dense: nn.Module) -> float:
    with torch.no_grad():
        return sum(float((model(x) - dense(x)).square().sum()) for x in batches())


def masks(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight != 0 for name, weight in model.state_dict().items() if weight.dim() == 2}


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize(("method", "pattern"), [("wanda", None), ("sparsegpt", "2:4")])
def test_a_language_model_loses_less_with_the_same_zeros(
    tiny_llama: TinyLlama, method: str, pattern: str | None
) -> None:
    first = [batch[:4] for batch in tiny_llama.calibration]
    plain, fitted = copy.deepcopy(tiny_llama.model), copy.deepcopy(tiny_llama.model)
    macko.prune_(plain, method=method, pattern=pattern, calibration=first)
    report = macko.prune_(fitted, method=method, pattern=pattern, calibration=first, reconstruct=QUICK)
    assert tiny_llama.loss(fitted) < tiny_llama.loss(plain)
    assert [fit.name for fit in report.fits] == [f"model.layers.{i}.{x}" for i in (0, 1) for x in ("self_attn", "mlp")]
    assert all(fit.error_after < fit.error_before for fit in report.fits)
    for row in report.changed:
        weight = fitted.get_submodule(row.name).weight
        assert int((weight == 0).sum()) == weight.numel() // 2
        if pattern:
            assert (weight.view(-1, 4).count_nonzero(1) == 2).all()
    first_block = [name for name in masks(plain) if "layers.0.self_attn" in name]
    for name in first_block:  # nothing was fitted before these were chosen
        assert torch.equal(masks(fitted)[name], masks(plain)[name])
    for name, tensor in tiny_llama.model.state_dict().items():  # norms, embeddings
        if tensor.dim() != 2 or "proj" not in name:
            assert_same_bits(fitted.state_dict()[name], tensor)
    assert "model.layers.1.mlp fitted: error" in str(report)


@pytest.mark.parametrize("unit", ["submodule", "block"])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_same_bits_again_and_the_callers_settings_stay(dtype: torch.dtype, unit: str) -> None:
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # of no consequence
        model = Blocks().to(dtype)
        model.stem.weight.requires_grad_(False)
        given = [batch.to(dtype) for batch in batches()]
        recipe = dataclasses.replace(QUICK, unit=unit)
        report = macko.prune_(model, 0.5, calibration=given, ignore=["stem"], reconstruct=recipe)
        assert len(report.fits) == {"submodule": 6, "block": 3}[unit]
        assert all(fit.error_after < fit.error_before for fit in report.fits)
        assert not torch.are_deterministic_algorithms_enabled()
        assert all(p.grad is None for p in model.parameters())
        assert [p.requires_grad for p in model.stem.parameters()] == [False, True]
        made.append(model.state_dict())
    for name, tensor in made[0].items():
        assert_same_bits(made[1][name], tensor)


@pytest.mark.slow
def test_targets_are_the_dense_models_and_inputs_the_pruned_ones() -> None:
    """So what the first blocks lost is made up for: the last error is less than where each is fitted to itself."""
    dense, model, alone = Blocks(), Blocks(), Blocks()
    x, recipe = batches(), Recipe(epochs=1, steps=60, tokens=1024)
    macko.prune_(model, 0.7, calibration=x, ignore=["stem"], reconstruct=recipe)
    for i in range(3):  # each block in a call of its own, where the blocks before it count as dense
        macko.prune_(
            alone, 0.7, calibration=x, filter_fn=partial(in_block, i), reconstruct=recipe
        )  # fmt: skip

    assert lost(model, dense) < lost(alone, dense)


@pytest.mark.parametrize("unit", ["submodule", "block"])
def test_a_token_a_thousand_times_as_long_is_one_of_many(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models have such tokens; a plain sum of squares would be about them alone."""
    given = batches()
    for batch in given:
        batch[0] *= 1000
    lost = []
    for even in (False, True):
        if even:
            monkeypatch.setattr(
                "macko.pruning.reconstruct._shares", lambda hidden: hidden.new_ones(hidden[..., 0].numel())
            )
        dense, model = Blocks(), Blocks()
        recipe = dataclasses.replace(QUICK, unit=unit, steps=40)
        report = macko.prune_(model, 0.5, calibration=given, ignore=["stem"], reconstruct=recipe)
        assert all(fit.error_after < fit.error_before for fit in report.fits)
        with torch.no_grad():
            lost.append(sum(float((model(x) - dense(x))[1:].square().sum()) for x in given))
    assert lost[0] < 0.5 * lost[1]


def test_a_feature_a_thousand_times_as_large_does_not_throw_a_fit_off() -> None:
    errors = []
    for times in (1, 1000):
        model = Blocks()
        with torch.no_grad():
            for layer in model.layers:  # which changes nothing
                layer.up.weight[0] *= times
                layer.up.bias[0] *= times
                layer.down.weight[:, 0] /= times
        options: dict[str, Any] = {"calibration": batches(), "filter_fn": lambda _, name: name.endswith("down")}
        report = macko.prune_(model, 0.5, "wanda", **options, reconstruct=dataclasses.replace(QUICK, steps=60))
        errors.append([fit.error_after / fit.error_before for fit in report.fits])
    assert errors[1] == pytest.approx(errors[0], rel=0.1)


def test_a_kept_weight_that_rounds_to_zero_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Blocks()
    tiny = torch.finfo(torch.float32).smallest_normal
    with torch.no_grad():
        model.layers[0].up.weight[0] = tiny

    class ToZero(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step()
            with torch.no_grad():
                self.param_groups[0]["params"][0][0] = 0

    monkeypatch.setattr(torch.optim, "Adam", ToZero)
    macko.prune_(model, 0.5, calibration=batches(), ignore=["stem"], reconstruct=QUICK)
    assert int((model.layers[0].up.weight[0] == tiny).sum()) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fit_on_a_grid_ends_on_it_and_beats_rounding_behind_it(dtype: torch.dtype) -> None:
    """Zeros stay, a row and group has as many values as the grid, and the error counted is that of the rounded."""
    grid, given = integers(3, offset=True), [batch.to(dtype) for batch in batches()]
    recipe = dataclasses.replace(QUICK, steps=40, unit="block", grid=grid, group=8)
    fitted, behind = Blocks().to(dtype), Blocks().to(dtype)
    options: dict[str, Any] = {"calibration": given, "ignore": ["stem"]}
    report = macko.prune_(fitted, 0.5, **options, reconstruct=recipe)
    macko.prune_(behind, 0.5, **options, reconstruct=dataclasses.replace(recipe, grid=None))
    assert all(fit.error_after < fit.error_before for fit in report.fits)
    for layer in find_linears(behind, ["stem"], None):
        if layer.left_out:
            continue
        weight, new = layer.module.weight.data, fitted.get_submodule(layer.name).weight
        assert not new[weight == 0].any()
        assert all(len(row.unique()) <= 8 for group in new.split(8, dim=1) for row in group)
        weight.copy_(nearest(weight, grid, 8))
    dense = Blocks().to(dtype)
    lost = [sum(float((model(x) - dense(x)).detach().float().norm()) for x in given) for model in (fitted, behind)]
    assert lost[0] < lost[1]


def test_what_fits_worse_is_not_taken() -> None:
    plain, model = Blocks(), Blocks()
    macko.prune_(plain, 0.5, calibration=batches(), ignore=["stem"])
    wild = Recipe(epochs=1, steps=3, lr=1e6)
    report = macko.prune_(model, 0.5, calibration=batches(), ignore=["stem"], reconstruct=wild)
    assert all(fit.error_after == fit.error_before for fit in report.fits)
    for name, tensor in plain.state_dict().items():
        assert_same_bits(model.state_dict()[name], tensor)


def other_models() -> dict[str, tuple[str, dict[str, Any], list[str]]]:
    """By their name in transformers: the class, a small configuration, and what of a block is fitted by itself."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    wide = {**sizes, "intermediate_size": 64}
    opt = {**sizes, "ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 0}
    mixtral = {**wide, "num_key_value_heads": 2, "num_local_experts": 2}
    return {
        "OPT": ("OPTForCausalLM", opt, ["self_attn", "fc1", "fc2"]),
        "GPTNeoX": ("GPTNeoXForCausalLM", wide, ["attention", "mlp"]),
        "Mixtral": ("MixtralForCausalLM", mixtral, ["self_attn", "mlp"]),
        "Falcon": ("FalconForCausalLM", {**sizes, "new_decoder_architecture": True}, ["self_attention", "mlp"]),
        "Bert": ("BertModel", wide, ["attention", "intermediate", "output"]),
    }


@needs_transformers
@pytest.mark.filterwarnings("ignore:ignore has")
@pytest.mark.parametrize("name", ["OPT", "GPTNeoX", "Mixtral", "Falcon", "Bert"])
def test_submodules_are_found_whatever_they_are_called(name: str) -> None:
    import transformers

    kind, options, parts = other_models()[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**options))
    ids = [torch.randint(1, 50, (4, 16), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    report = macko.prune_(
        model, 0.5, "wanda", calibration=ids, ignore=["lm_head", "embed_out", "pooler.*"], reconstruct=QUICK
    )
    assert [fit.name.rpartition(".")[2] for fit in report.fits] == parts * 2
    assert all(fit.error_after < fit.error_before for fit in report.fits)
    assert all(row.density == 0.5 for row in report.changed)


@pytest.mark.parametrize("options", [{"reconstruct": "submodule"}, {"sparsity": "auto:0.5"}])
def test_nothing_to_prune_is_nothing_to_fit(options: dict[str, Any]) -> None:
    report = macko.prune_(nn.ModuleDict({"lm_head": nn.Linear(8, 4)}), calibration=batches(), **options)
    assert not report.changed
    assert not report.fits


def with_blocks_that(forward: Callable[[Any, Tensor], Tensor]) -> Blocks:
    """Whose blocks call their children in another way."""
    model = Blocks()
    for layer in model.layers:
        layer.forward = lambda hidden_states, scale, layer=layer: (hidden_states + forward(layer, hidden_states),)
    return model


def test_a_submodule_that_is_called_twice_is_fitted_with_its_block() -> None:
    model = with_blocks_that(lambda block, x: block.down(block.up(x).relu()) + block.down(block.up(-x)))
    report = macko.prune_(model, 0.5, calibration=batches(), ignore=["stem"], reconstruct=QUICK)
    assert [fit.name for fit in report.fits] == ["layers.0", "layers.1", "layers.2"]
    assert all(fit.error_after < fit.error_before for fit in report.fits)


def test_a_layer_that_is_called_by_keyword_is_fitted() -> None:
    model = with_blocks_that(lambda block, x: block.down(input=block.up(input=x).relu()))
    report = macko.prune_(model, 0.5, "wanda", calibration=batches(), ignore=["stem"], reconstruct=QUICK)
    assert len(report.changed) == len(report.fits) == 6
    assert all(fit.error_after < fit.error_before for fit in report.fits)


def test_blocks_that_are_layers_themselves_are_fitted() -> None:
    model = Blocks()
    model.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
    model.forward = nn.Sequential(*model.layers).forward  # type: ignore[method-assign]
    rng = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 16, 12, generator=rng) for _ in range(4)]
    report = macko.prune_(model, 0.5, calibration=given, ignore=["stem"], reconstruct=QUICK)
    assert [fit.name for fit in report.fits] == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("options", [{"reconstruct": "submodule"}, {"sparsity": "auto:0.5"}])
def test_without_a_chain_of_blocks_nothing_is_changed(options: dict[str, Any]) -> None:
    for model in (Blocks(between=torch.tanh), nn.Sequential(nn.Linear(12, 8))):
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match="needs a model with one list of blocks"):
            macko.prune_(model, calibration=batches(), **options)
        for name, tensor in before.items():
            assert_same_bits(model.state_dict()[name], tensor)


def test_refuses_what_it_does_not_know() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"reconstruct": "submodule"}, "reconstruct needs calibration"),
        ({"reconstruct": "elves", "calibration": batches()}, "reconstruct is 'elves', expected 'submodule' or 'block'"),
        ({"sparsity": "auto:0.5"}, "sparsity 'auto:0.5' needs calibration"),
        ({"sparsity": "0.5"}, "sparsity is '0.5', expected a number, or auto:0.5"),
        ({"sparsity": "auto:50"}, "sparsity is 'auto:50', expected"),
        ({"sparsity": "auto:0.0", "calibration": batches()}, "sparsity is 'auto:0.0', expected"),
        ({"sparsity": "auto:0.5", "pattern": "2:4"}, "pattern 2:4 has the same share in every layer"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            macko.prune_(Blocks(), **options)


@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_resumed_to_the_same_bits(count: int) -> None:
    """Between two layers of a block too, which is then fitted again."""
    wanted, done = Blocks(), StopsAt(count)
    options: dict[str, Any] = {"calibration": batches(), "ignore": ["stem"], "reconstruct": QUICK}
    macko.prune_(wanted, 0.5, "wanda", **options)
    with pytest.raises(Stop):
        macko.prune_(Blocks(), 0.5, "wanda", done=done, **options)
    assert len(done) == count
    done.count, resumed = 0, Blocks()
    report = macko.prune_(resumed, 0.5, "wanda", done=done, **options)
    assert len(report.fits) == 2 * (3 - count // 2)
    for name, weight in wanted.state_dict().items():
        assert_same_bits(resumed.state_dict()[name], weight)


@pytest.mark.parametrize("options", [{"reconstruct": QUICK}, {"sparsity": "auto:0.5"}])
@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_the_bar_ends_where_it_said(method: str, options: dict[str, Any], bars: list[Any]) -> None:
    macko.prune_(Blocks(), method=method, calibration=batches(), **options)
    assert [bar.n for bar in bars] == [bar.total for bar in bars]


def test_an_allocation_by_hand() -> None:
    curves = {
        "flat": Curve(100, [0.4, 0.5, 0.6], [0.1, 0.11, 0.12]),
        "steep": Curve(200, [0.4, 0.5, 0.6], [0.1, 0.5, 2.0]),
        "bent": Curve(100, [0.4, 0.5, 0.6], [0.1, 0.9, 0.11]),  # its hull leads past the middle
    }
    assert curves["bent"].hull() == [(0.4, 0.1), (0.6, 0.11)]
    full = least(curves, 200)
    assert full == {"flat": 60, "bent": 60, "steep": 80}
    assert between(curves, 200, full, 0.0) == {"flat": 50, "steep": 100, "bent": 50}
    assert between(curves, 200, full, 1.0) == full
    for zeros in range(160, 241):  # all that lies between the bounds
        for strength in (0.0, 0.5, 1.0):
            assert sum(between(curves, zeros, least(curves, zeros), strength).values()) == zeros


@pytest.mark.parametrize("method", METHODS)
def test_auto_has_as_many_zeros_within_bounds_and_a_smaller_error(method: str) -> None:
    dense, even, model = Blocks(), Blocks(), Blocks()
    with torch.no_grad():
        for each in (dense, even, model):  # a layer that should be spared
            each.layers[0].down.weight *= 30
    macko.prune_(even, 0.6, method, calibration=batches(), ignore=["stem"])
    report = macko.prune_(model, "auto:0.6", method, calibration=batches(), ignore=["stem"])
    zeros = {row.name: round((1 - (row.density or 0)) * math.prod(row.shape)) for row in report.changed}
    assert sum(zeros.values()) == round(0.6 * 6 * 512)
    assert all(abs(count / 512 - 0.6) <= BOUND + 1 / 512 for count in zeros.values())
    assert zeros["layers.0.down"] < 0.6 * 512

    assert lost(model, dense) < lost(even, dense)
    assert re.search(r"^auto: uneven shares are taken: they lose 0\.\d+ of what even ones do", str(report), re.M)


@pytest.mark.gpu
def test_one_block_at_a_time_on_the_gpu_and_the_same_bits_again() -> None:
    made = []
    for _ in range(2):
        model, most = Blocks(), []
        for block in model.layers:
            block.up.register_forward_hook(lambda *_: most.append(sum(p.is_cuda for p in model.parameters())))  # noqa: B023
        macko.prune_(
            model, "auto:0.5", "wanda", calibration=batches(), ignore=["stem"], device="cuda", reconstruct=QUICK
        )
        assert max(most) <= len(list(model.layers[0].parameters()))
        assert not any(p.is_cuda for p in model.parameters())
        made.append(model.state_dict())
    for name, tensor in made[0].items():
        assert_same_bits(made[1][name], tensor)
