"""A short run of verify/stress.py on this machine, and that it sees what it is for."""

import itertools

import pytest
import torch

from macko import FORMATS
from tests.common import assert_same_bits
from verify import stress

CPU = torch.device("cpu")


@pytest.mark.parametrize("lean", [False, True])
def test_every_format_has_problems(lean: bool) -> None:
    found = {problem.name.partition(" ")[0] for problem in stress.problems(CPU, True, 0, lean=lean)}
    assert found == {"packing", "experts", "tile"} | {
        name for name, kind in FORMATS.items() if "cpu" in kind.device_types
    }


def test_a_short_run_has_each_layout_and_another_seed_other_sizes() -> None:
    orders = [[problem.name for problem in stress.by_turns(CPU, seed)] for seed in (0, 0, 1)]
    layouts = {name.partition(" ")[0] for name in orders[0]}
    assert {name.partition(" ")[0] for name in orders[0][: len(layouts)]} == layouts
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_rings_wrap_where_six_blocks_multiply_64_tokens_by_dense12() -> None:
    """By the kernel for few tokens, which has up to 4096 columns then (path.h), and three stages; at 40 tokens four."""
    slabs = [-(-rows // 64) * -(-cols // 256) for rows, cols, _ in stress.SMALL.values() if cols <= 4096]
    assert max(slabs) >= 6 * 5


@pytest.mark.slow
def test_each_small_case_is_exact_on_the_cpu() -> None:
    line = stress.stress(CPU, 10, once=True)
    assert line["wrong"] == 0, line["wrong_cases"]
    assert line["problems_left"] == 0
    assert line["products"] > 500


def test_products_again_and_again_on_the_cpu() -> None:
    line = stress.stress(CPU, 0.01, only="bitmap no tile")
    assert line["wrong"] == 0, line["wrong_cases"]
    assert line["by_way"].keys() == {"eager", "two at once"}
    assert line["products"] >= 12


def test_one_wrong_element_and_one_nan_are_counted() -> None:
    """In one of a hundred products."""
    calls = itertools.count(1)

    def product() -> torch.Tensor:
        y = torch.ones(1, 9)
        if next(calls) % 100 == 0:
            y[0, 5] += 1
            y[0, 7] = float("nan")
        return y

    counts = stress.Counts(CPU)
    stress.run_ways([stress.Case("planted", product, torch.ones(1, 9))], 0.05, counts)
    assert counts.wrong == 2 * (counts.products // 100) > 0
    assert set(counts.failures) <= {"planted, eager", "planted, two at once"}


def test_what_surrounds_a_tensor_is_nan() -> None:
    for t in (torch.randn(3, 5).half(), torch.randn(0), torch.zeros(2, 0, 4, dtype=torch.uint8), torch.arange(7)):
        inner = stress.surrounded(t)
        assert_same_bits(inner, t)
        assert inner.is_contiguous()
        around = torch.empty(0, dtype=torch.uint8).set_(inner.untyped_storage())
        edges = torch.cat([around[:4096], around[-4096:]])
        assert edges.view(torch.float16).isnan().all()


@pytest.mark.gpu
@pytest.mark.slow
def test_each_small_case_is_exact_on_a_gpu() -> None:
    line = stress.stress(torch.device("cuda", 0), 5, once=True)
    assert line["wrong"] == 0, line["wrong_cases"]


@pytest.mark.gpu
@pytest.mark.slow
def test_each_way_to_launch_is_exact_on_a_gpu() -> None:
    line = stress.stress(torch.device("cuda", 0), 0.2, only="no tile")
    assert line["wrong"] == 0, line["wrong_cases"]
    assert line["by_way"].keys() == {"eager", "graph", "chained", "two at once"}
