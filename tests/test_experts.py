"""Stacks of experts: the op linear_experts, and SparseExperts in the place of transformers' experts modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from macko import ops
from macko.weights import FORMATS, PackedWeight

CODECS = [name for name, kind in FORMATS.items() if kind.stacks]
ROW_BLOCK = 64


def stacked(w: Tensor, format: str) -> PackedWeight:
    """[experts, rows, cols] as one packed matrix."""
    filled = torch.nn.functional.pad(w, (0, 0, 0, -w.shape[1] % ROW_BLOCK))
    return FORMATS[format].from_dense(filled.reshape(-1, w.shape[2]).contiguous())


def small(*sizes: int, zeros: float = 0.5) -> Tensor:
    """Small whole numbers, whose products bfloat16 and float16 add up exactly."""
    w = torch.randint(1, 3, sizes) * (1 - 2 * torch.randint(0, 2, sizes))
    return (w * (torch.rand(sizes) >= zeros)).to(torch.bfloat16)


def expected(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """The definition, in float64: of rows ends[e - 1] up to ends[e] the products with expert e."""
    y, begin = torch.zeros(len(x), w.shape[1], dtype=torch.float64), 0
    for e, end in enumerate(ends.tolist()):
        y[begin:end] = x[begin:end].double() @ w[e].double().t()
        begin = end
    return y


def product(x: Tensor, packed: PackedWeight, rows: int, counts: list[int]) -> Tensor:
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ops.linear_experts(x, *packed.packed, rows, ends)


#: By hazard: experts' tokens, those behind the last end, rows and columns of an expert.
ROUTINGS = {
    "one_token_each": ([1, 1, 1, 1], 0, 64, 256),
    "an_expert_without_tokens": ([0, 3, 0, 2], 0, 64, 256),
    "all_tokens_for_one_expert": ([0, 0, 9, 0], 0, 128, 256),
    "no_tokens_at_all": ([0, 0], 0, 64, 256),
    "tokens_of_no_expert": ([2, 1], 4, 64, 256),
    "one_expert": ([5], 0, 64, 256),
    "rows_not_of_64": ([2, 3, 1], 0, 80, 64),
    "columns_not_of_256": ([2, 0, 3], 1, 64, 328),
    "more_tokens_than_a_tile": ([70, 1, 130], 2, 64, 64),
}


@pytest.mark.parametrize("hazard", ROUTINGS)
@pytest.mark.parametrize("format", CODECS)
def test_experts_products_are_exact(format: str, hazard: str) -> None:
    counts, behind, rows, cols = ROUTINGS[hazard]
    w, x = small(len(counts), rows, cols), small(sum(counts) + behind, cols, zeros=0.9)
    packed = stacked(w, format)
    held = packed.to_dense().view(len(counts), -1, cols)[:, :rows]  # 8 bits: what the codes stand for
    ends = torch.tensor(counts).cumsum(0)
    y = product(x, packed, rows, counts)
    if packed.lossless:
        assert torch.equal(y.double(), expected(x, w, ends))
    else:
        wanted, bound = expected(x, held, ends), expected(x.abs(), held.abs(), ends)
        assert ((y.double() - wanted).abs() <= bound * (cols * 2.0**-24 + 2.0**-8)).all()
    assert y.shape == (len(x), rows) and not y[sum(counts) :].any()


def test_random_experts_within_the_bound() -> None:
    torch.manual_seed(0)
    w, x, counts = torch.randn(5, 96, 300).bfloat16() * 0.05, torch.randn(40, 300).bfloat16(), [7, 0, 20, 1, 12]
    ends = torch.tensor(counts).cumsum(0)
    y = product(x, stacked(w, "dense12"), 96, counts)
    bound = expected(x.abs(), w.abs(), ends) * 300 * 2.0**-24 + expected(x, w, ends).abs() * 2.0**-8
    assert ((y.double() - expected(x, w, ends)).abs() <= bound).all()


@pytest.mark.parametrize("counts", [[3, -1], [2, 9]])
def test_ends_that_fall_or_pass_the_tokens_are_refused(counts: list[int]) -> None:
    w = small(2, 64, 64)
    with pytest.raises(RuntimeError, match=r"macko::linear_experts: ends\[1\] is"):
        product(small(5, 64), stacked(w, "dense12"), 64, counts)


def test_what_the_op_refuses_it_names() -> None:
    w, x, ends = small(2, 64, 64), small(3, 64), torch.tensor([1, 3], dtype=torch.int32)
    tensors, header = stacked(w, "dense12").packed
    with pytest.raises(RuntimeError, match="the stack has 128 rows, expected 256: 2 experts, as many as ends, of 65"):
        ops.linear_experts(x, tensors, header, 65, ends)
    with pytest.raises(RuntimeError, match="ends has dtype int64, expected int32"):
        ops.linear_experts(x, tensors, header, 64, ends.long())
    with pytest.raises(RuntimeError, match=r"x has shape \[1, 3, 64\], expected 2 dimension"):
        ops.linear_experts(x[None], tensors, header, 64, ends)
    with pytest.raises(RuntimeError, match="x has dtype float16"):
        ops.linear_experts(x.half(), tensors, header, 64, ends)
    with pytest.raises(RuntimeError, match="the macko layout has no such kernel here"):
        ops.linear_experts(x, *FORMATS["macko"].from_dense(w.view(128, 64)).packed, 64, ends)


def test_gradient_in_x_is_that_of_the_dense_products() -> None:
    w, counts = small(3, 72, 64), [2, 0, 3]
    x = small(6, 64).requires_grad_()  # the last row is of no expert
    grad = small(6, 72)
    product(x, stacked(w, "dense12"), 72, counts).backward(grad)
    wanted = expected(grad, w.transpose(1, 2), torch.tensor(counts).cumsum(0))
    assert torch.equal(x.grad.double(), wanted)


@pytest.mark.parametrize("format", ["dense12", "sparse11"])
def test_op_checks(format: str) -> None:
    w, x = small(2, 64, 64), small(5, 64)
    args = (x, *stacked(w, format).packed, 64, torch.tensor([2, 4], dtype=torch.int32))
    torch.library.opcheck(torch.ops.macko.linear_experts, args, test_utils=("test_schema", "test_faketensor"))
