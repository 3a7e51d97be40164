"""The bound of reference.linear, by which tests and `macko bench` judge: right results pass, wrong ones do not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from macko.measure import reference
from tests.common import (
    CPU_DTYPES,
    HALVES,
    assert_close_library,
    assert_close_spmv,
    device_dtypes,
    random_vector,
    random_weight,
)

ROWS, COLS, TOKENS = 256, 4096, 8

all_dtypes = pytest.mark.parametrize("dtype", CPU_DTYPES)


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """w, x and a bias."""
    w, x = random_weight(ROWS, COLS, 0.5, dtype), random_vector(TOKENS, COLS, dtype=dtype)
    return w, x, random_vector(ROWS, dtype=dtype, seed=2)


def without_columns(w: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    w = w.clone()
    w[:, 5::64] = 0
    return reference.linear(x, w, bias, w.dtype)[0]


def zeros(w: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    return torch.zeros(TOKENS, ROWS)


def without_bias(w: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    return reference.linear(x, w, None, w.dtype)[0]


def swapped_rows(w: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    y = reference.linear(x, w, bias, w.dtype)[0]
    y[:, [7, 8]] = y[:, [8, 7]]
    return y


def swapped_tokens(w: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    return reference.linear(x, w, bias, w.dtype)[0].roll(1, 0)


#: Each with the share of outputs that have to be refused on a CPU, of those that it changes. y is normal of deviation
#: s = 45, and bfloat16 rounds it by eps / 2 |y|, 0.4 % of 36. What a fault changes is normal too: a bound b
#: hides 0.8 b of it by its deviation, 4 % of a column in 64 (s / 8), 0.5 % of all (s), a quarter of a bias (1).
FAULTS = {without_columns: 15 / 16, zeros: 0.99, swapped_rows: 0.99, swapped_tokens: 0.99, without_bias: 0.7}


@pytest.mark.parametrize(("device", "dtype"), device_dtypes())
@pytest.mark.parametrize("fault", FAULTS)
def test_refuses(fault: Callable[..., Tensor], device: str, dtype: torch.dtype) -> None:
    """What is wrong by nothing but the fault, rounded once."""
    w, x, bias = problem(dtype)
    if device == "cuda":
        bias *= 8  # torch's partial sums may be rounded to 16 bits there, of which the bound would hide a bias of 1
    y = fault(w, x, bias).to(dtype)
    for check in (assert_close_spmv, assert_close_library):
        with pytest.raises(AssertionError, match=f"of {ROWS * TOKENS} off"):
            check(y.to(device), w, x, bias)
    if device == "cpu":
        wanted, bound = reference.linear(x, w, bias, dtype)
        refused = (y.double() - wanted).abs() > bound
        refused = refused[:, 7:9] if fault is swapped_rows else refused
        assert refused.double().mean() >= FAULTS[fault]


@pytest.mark.parametrize(("device", "dtype"), device_dtypes())
def test_accepts_torchs_product(device: str, dtype: torch.dtype) -> None:
    """Few rows and many columns, which a GPU's library splits, too."""
    for rows, cols, tokens in ((256, 4096, 8), (2050, 513, 16), (63, 255, 192), (16, 28_672, 3), (64, 8192, 64)):
        w, x = random_weight(rows, cols, 0.5, dtype), random_vector(tokens, cols, dtype=dtype)
        for signed_x, signed_w in ((x, w), (x.abs(), w), (x.abs(), w.abs())):
            on_device, weight = signed_x.to(device), signed_w.to(device)
            assert_close_library(torch.nn.functional.linear(on_device, weight), signed_w, signed_x)
            bias = random_vector(rows, dtype=dtype, seed=2)
            # linear's own bias may be added to a product that was rounded before.
            y = bias.to(device).expand(tokens, rows).clone().addmm_(on_device, weight.t())
            assert_close_library(y, signed_w, signed_x, bias)


def one_by_one(terms: Tensor) -> Tensor:
    """The sums of float32 terms [..., cols], each addition rounded to float32: numpy's cumsum is in order."""
    return torch.from_numpy(terms.numpy().cumsum(-1, dtype="float32")[..., -1])


@all_dtypes
@pytest.mark.parametrize("order", ["as they are", "by value", "by size", "largest first"])
@pytest.mark.slow
def test_accepts_sums_in_any_order(order: str, dtype: torch.dtype) -> None:
    """One chain of 4096 additions is the worst order of all for random signs; sorted terms have the largest sums."""
    w, x, _ = problem(dtype)
    w, x = w[:64], x[:2]
    for signed_w in (w, w.abs(), torch.full_like(w, 0.1)):
        for signed_x in (x, x.abs(), torch.full_like(x, 1.3)):
            terms = signed_x[:, None].float() * signed_w.float()
            if order == "by value":
                terms = terms.sort(-1).values
            elif order != "as they are":
                terms = terms.gather(-1, terms.abs().argsort(-1, descending=order == "largest first"))
            assert_close_spmv(one_by_one(terms).to(dtype), signed_w, signed_x)


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_is_four_times_the_error_at_most(by_torch: bool, dtype: torch.dtype) -> None:
    """Of the sum that is rounded as seldom as possible, the worst of 2048."""
    w, x, bias = problem(dtype)
    wanted, bound = reference.linear(x, w, bias, dtype, by_torch)
    assert ((wanted.to(dtype).double() - wanted).abs() / bound).max() >= 1 / 4


@pytest.mark.slow
def test_float32_is_bounded_by_a_thousandth_of_a_result_and_not_by_less_than_an_order_takes() -> None:
    """Four times the error is not to be had where any order counts: rising values take a sixteenth of it or more."""
    w, x, _ = problem(torch.float32)
    wanted, bound = reference.linear(x, w, None, torch.float32, by_torch=False)
    assert bound.mean() < wanted.square().mean().sqrt() / 1000
    rising = one_by_one((x[:, None] * w).sort(-1).values)
    assert ((rising - wanted).abs() / bound).max() > 1 / 16


def test_sums_that_are_cut_off_have_a_bound_of_their_own() -> None:
    """As float8's tensor cores sum: 32 products and the sum before them, each with 13 bits behind the largest one's."""
    w, x, _ = problem(torch.bfloat16)
    terms = (x[:4, None].double() * w.double()).unflatten(-1, (-1, 32))
    total = torch.zeros(terms.shape[:2], dtype=torch.float64)
    for step in terms.unbind(-2):
        each = torch.cat([step, total[..., None]], -1)
        last = torch.exp2(torch.frexp(each.abs().amax(-1, keepdim=True)).exponent - 14.0)
        total = ((each / last).trunc() * last).sum(-1)
    steps = terms.shape[-2]
    (wanted, bound), (_, narrow) = (
        reference.linear(x[:4], w, None, torch.bfloat16, by_torch=False, cuts=cuts) for cuts in (steps + 1, 0)
    )
    off = (total.to(torch.bfloat16).double() - wanted).abs()
    assert (off <= bound).all()
    assert (off > narrow).any()


@all_dtypes
def test_few_columns_have_the_bound_that_holds_whatever_the_values(dtype: torch.dtype) -> None:
    """n u of the largest partial sum, and the rounding to dtype."""
    w, x, bias = problem(dtype)
    w, x = w[:, :60], x[:, :60]
    wanted, bound = reference.linear(x, w, bias, dtype, by_torch=False)
    terms = torch.cat([x[:, None].double() * w.double(), bias.double()[:, None].expand(TOKENS, ROWS, 1)], -1)
    largest_sum = torch.maximum(terms.clamp(min=0).sum(-1), -terms.clamp(max=0).sum(-1))
    kind, unit = torch.finfo(dtype), 62 * 2.0**-24
    least = largest_sum * unit + wanted.abs() * kind.eps / 2
    assert (bound >= least).all()
    assert (bound <= least * (1 + kind.eps) * (1 + 2 * unit) + kind.smallest_normal).all()
