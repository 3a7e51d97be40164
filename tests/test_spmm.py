"""A few tokens and many, from sell's stream, and through dense rows."""

import pytest
import torch

from macko.weights import MackoWeight, PackedWeight, SellWeight, TileWeight
from tests import layouts
from tests.common import (
    HALVES,
    MASKS,
    Plan,
    assert_close_library,
    assert_close_spmv,
    assert_same_bits,
    each_token,
    integer_problem,
    random_vector,
    random_weight,
)

WORKSPACE = 64 << 20
#: One row, one column, no row, no column, no whole group, a team without a block, two teams, rows that share no block.
SHAPES = ((1, 1), (1, 4096), (500, 1), (0, 16), (5, 0), (7, 30), (33, 203), (201, 512), (600, 64), (40, 1001))


def packed(w: torch.Tensor, gap_bits: int = 0) -> SellWeight:
    return SellWeight.from_dense(w.cuda(), 4, gap_bits)


def tokens_of(count: int, cols: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return random_vector(count, cols, dtype=dtype, seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "cols"), [(130, 500), (301, 203)])
def test_every_number_of_tokens_up_to_70(rows: int, cols: int, dtype: torch.dtype) -> None:
    w, x, bias = random_weight(rows, cols, 0.5, dtype), tokens_of(70, cols, dtype), random_vector(rows, dtype=dtype)
    exact_w, exact_x, exact_y = integer_problem(rows, cols, 0.4, dtype)
    sell, exact = packed(w), packed(exact_w)
    many = layouts.stream(sell, x.cuda(), bias.cuda())
    assert_close_spmv(many, w, x, bias)
    for count in range(1, 71):
        assert_close_spmv(layouts.stream(sell, x[:count].cuda(), bias.cuda()), w, x[:count], bias)
        assert_close_library(sell.linear(x[:count].cuda(), bias.cuda()), w, x[:count], bias)
        xs, ys = each_token(exact_x, exact_y, count)
        for y in (layouts.stream(exact, xs.cuda()), exact.linear(xs.cuda())):
            assert_same_bits(y + 0, ys)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_every_shape_and_gap(dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        w, x, bias = random_weight(rows, cols, 0.4, dtype), tokens_of(9, cols, dtype), random_vector(rows, dtype=dtype)
        for gap_bits in (2, 3, 4, 5, 6):
            sell = packed(w, gap_bits)
            for count in (0, 2, 3, 4, 6, 9):
                y = layouts.stream(sell, x[:count].cuda(), bias.cuda())
                assert_close_spmv(y, w, x[:count], bias)
                assert_same_bits(layouts.stream(sell, x[:count].cuda(), bias.cuda()), y)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MASKS)
def test_uneven_masks(kind: str) -> None:
    for density in (0.03, 0.3, 0.7):
        w, x = random_weight(900, 1500, density, torch.float16, kind=kind), tokens_of(8, 1500, torch.float16)
        assert_close_spmv(layouts.stream(packed(w), x.cuda()), w, x)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(300, 9000), (300, 15000), (300, 28672), (100, 65535), (2048, 4096)])
def test_x_that_fits_shared_memory_for_fewer_tokens_only(rows: int, cols: int) -> None:
    w, x = random_weight(rows, cols, 0.5, torch.float16), tokens_of(8, cols, torch.float16)
    sell = packed(w)
    for count in (2, 4, 8):
        assert_close_spmv(layouts.stream(sell, x[:count].cuda()), w, x[:count])


@pytest.mark.gpu
@pytest.mark.parametrize("keys", ["pdl=0", "copy=cp_async"])
def test_every_path(keys: str, plan: Plan) -> None:
    plan(keys)
    w, x = random_weight(700, 1024, 0.5, torch.float16), tokens_of(7, 1024, torch.float16)
    bias = random_vector(700, dtype=torch.float16)
    assert_close_spmv(layouts.stream(packed(w), x.cuda(), bias.cuda()), w, x, bias)


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "results"), [(SellWeight, 1), (MackoWeight, 1), (TileWeight, 2)])
@pytest.mark.parametrize(("rows", "cols"), [(8448, 4096), (2100, 28_672), (130_000, 300)])
def test_dense_rows_keep_to_the_workspace(
    layout: type[PackedWeight], results: int, rows: int, cols: int, plan: Plan
) -> None:
    plan("tile_tokens=0")
    w, x = random_weight(rows, cols, 0.3, torch.float16), tokens_of(80, cols, torch.float16)
    w[:: rows // 7] = random_weight(8, cols, 1.0, torch.float16)[: len(w[:: rows // 7])]  # long rows in each workspace
    w[1 :: rows // 7] = 0
    bias = random_vector(rows, dtype=torch.float16)
    weight = layout.from_dense(w.cuda())
    on_gpu, bias_on_gpu = x.cuda(), bias.cuda()
    weight.linear(on_gpu, bias_on_gpu)  # the library's own workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = weight.linear(on_gpu, bias_on_gpu)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= WORKSPACE + results * y.numel() * y.element_size() + (1 << 20)  # these are not counted
    assert_close_library(y, w, x, bias)
    assert_same_bits(weight.linear(on_gpu, bias_on_gpu), y)
