"""Stacks of experts: the op linear_experts, and SparseExperts in the place of transformers' experts modules."""

import pytest
import torch
from torch import Tensor

from macko import ops
from macko.choose.options import Options
from macko.nn.experts import Stack
from macko.weights import FORMATS, PackedWeight
from tests.common import HALVES, Plan, devices

pytestmark = pytest.mark.sm80

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


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def product(x: Tensor, packed: PackedWeight, rows: int, counts: list[int]) -> Tensor:
    return ops.linear_experts(x, *packed.packed, rows, ends_of(counts).to(x.device))


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


#: Of GPUs alone: more experts than a block has threads, more work than blocks, and
#: means from which the kernel for many tokens takes over, whose tiles are of 64 to 256.
LARGE = {
    "more_experts_than_threads": ([1, 0, 2] * 200, 3, 64, 64),
    "more_work_than_blocks": ([3] * 16, 0, 320, 4096),
    "experts_of_many_tokens": ([300, 0, 200, 400], 10, 128, 256),
    "a_tile_of_each_width": ([64, 65, 128, 129, 192, 193, 256, 257], 0, 192, 512),
    "thousands_for_one_expert": ([0, 4000, 0, 1], 0, 320, 768),
    "more_experts_than_a_warp_has_lanes": ([0] * 40 + [33] + [0] * 40 + [511], 3, 448, 1024),
}

#: Where, with which keys of MACKO_PLAN, which of them. On a GPU by the kernel for few tokens and by that for many.
ROUTED = [
    *(("cpu", "", hazard) for hazard in ROUTINGS),
    *(
        pytest.param("cuda", f"tile_tokens={tokens}", hazard, marks=pytest.mark.gpu)
        for tokens in (10**6, 0)
        for hazard in (*ROUTINGS, *LARGE)
    ),
]


@pytest.mark.parametrize(("device", "keys", "hazard"), ROUTED)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("format", CODECS)
def test_experts_products_are_exact(
    format: str, dtype: torch.dtype, device: str, keys: str, hazard: str, plan: Plan
) -> None:
    plan(keys)
    counts, behind, rows, cols = (ROUTINGS | LARGE)[hazard]
    torch.manual_seed(len(counts))
    w = small(len(counts), rows, cols).to(device, dtype)
    x = small(sum(counts) + behind, cols, zeros=0.9).to(device, dtype)
    packed = stacked(w, format)
    held = packed.to_dense().view(len(counts), -1, cols)[:, :rows]  # 8 bits: what the codes stand for
    y = product(x, packed, rows, counts).double().cpu()
    wanted = expected(x.cpu(), held.cpu(), ends_of(counts))
    if packed.lossless:
        assert torch.equal(held, w)
        assert torch.equal(y, wanted)
    else:
        bound = expected(x.abs().cpu(), held.abs().cpu(), ends_of(counts))
        assert ((y - wanted).abs() <= bound * (cols * 2.0**-24 + 2.0**-8)).all()
    assert y.shape == (len(x), rows)
    assert not y[sum(counts) :].any()


#: By hazard: tokens, experts a token, experts; ids below 0 and from `experts` on are another process'.
PAIRS = {
    "one_token": (1, 2, 8),
    "no_tokens": (0, 2, 8),
    "one_expert": (40, 1, 1),
    "more_pairs_than_a_block_has_threads": (700, 3, 128),
    "more_experts_than_warps_can_count": (50, 4, 1000),
    "more_slots_than_are_loaded_at_once": (5, 19, 40),
}


def routed(hazard: str, dtype: torch.dtype = torch.int64) -> tuple[Tensor, int]:
    tokens, top_k, experts = PAIRS[hazard]
    torch.manual_seed(tokens)
    return torch.randint(-1, experts + 2, (tokens, top_k), dtype=dtype), experts


def expected_order(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: a stable sort."""
    flat = torch.where((ids < 0) | (ids > experts), experts, ids).flatten()
    ranked, order = flat.sort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    places[flat == experts] = -1
    ends = torch.bincount(ranked, minlength=experts + 1).cumsum(0)[:experts]
    return order.int(), places.int().view(ids.shape), ends.int()


def expected_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The definition, by torch's own products and their types."""
    terms = (x[places.clamp(min=0).long()] * weights.unsqueeze(-1)).float() * (places >= 0).unsqueeze(-1)
    total = torch.zeros(len(places), x.shape[1], device=x.device)
    for slot in range(places.shape[1]):
        total = total + terms[:, slot]
    return total.to(x.dtype)


@pytest.mark.parametrize("device", devices())
def test_random_experts_within_the_bound(device: str) -> None:
    torch.manual_seed(0)
    counts, cols = [7, 0, 20, 1, 112], 300
    w, x = torch.randn(5, 96, cols).bfloat16() * 0.05, torch.randn(sum(counts), cols).bfloat16()
    y, wanted = product(x.to(device), stacked(w.to(device), "dense12"), 96, counts), expected(x, w, ends_of(counts))
    bound = expected(x.abs(), w.abs(), ends_of(counts)) * cols * 2.0**-24 + wanted.abs() * 2.0**-8
    assert ((y.double().cpu() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("hazard", PAIRS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("device", devices())
def test_pairs_are_sorted_by_expert(device: str, dtype: torch.dtype, hazard: str) -> None:
    ids, experts = routed(hazard, dtype)
    for got, wanted in zip(ops.expert_order(ids.to(device), experts), expected_order(ids, experts), strict=True):
        assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("hazard", PAIRS)
@pytest.mark.parametrize("kinds", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")], ids=str)
@pytest.mark.parametrize("device", devices())
def test_a_tokens_experts_add_up_with_torchs_roundings(device: str, kinds: tuple[str, str], hazard: str) -> None:
    ids, experts = routed(hazard)
    _, places, _ = ops.expert_order(ids.to(device), experts)
    for cols in (24, 1537, 2048):
        x = torch.randn(ids.numel(), cols).to(device, getattr(torch, kinds[0]))
        weights = torch.rand(ids.shape).to(device, getattr(torch, kinds[1]))
        assert torch.equal(ops.expert_sum(x, places, weights), expected_sum(x, places, weights))


def test_gradients_of_a_tokens_sum() -> None:
    ids, experts = torch.tensor([[0, 2], [1, 3], [2, 0]]), 3
    _, places, _ = ops.expert_order(ids, experts)
    x, weights = torch.randn(6, 8, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    grad, wanted = torch.randn(3, 8), []
    for total in (ops.expert_sum, expected_sum):
        wanted.append(torch.autograd.grad(total(x, places, weights), (x, weights), grad))
    assert all((a - b).abs().max() <= 1e-5 for a, b in zip(*wanted, strict=True))


@pytest.mark.parametrize("tokens", [3, 40, 600])  # on a GPU a tile of 16 tokens, of more, and the kernel for many
@pytest.mark.parametrize("format", ["dense12", "sparse11"])
@pytest.mark.parametrize("device", devices())
def test_an_order_takes_rows_of_x_where_they_are(device: str, format: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    tensors, header = stacked(small(4, 128, 320).to(device), format).packed
    x, ids = small(tokens, 320, zeros=0.9).to(device), torch.randint(0, 5, (tokens, 3)).to(device)
    order, _, ends = ops.expert_order(ids, 4)
    x.requires_grad_(device == "cpu")
    y = ops.linear_experts(x, tensors, header, 128, ends, order, 3)
    sorted_y = ops.linear_experts(x[order // 3], tensors, header, 128, ends)
    assert torch.equal(y, sorted_y)
    if x.requires_grad:
        grad = small(len(order), 128, zeros=0.98)
        assert torch.equal(*(torch.autograd.grad(out, x, grad)[0] for out in (y, sorted_y)))


def test_gated_rows_are_torchs_and_their_gradients() -> None:
    torch.manual_seed(0)
    w, x, ends = small(2, 64, 72), torch.randn(5, 144).bfloat16().requires_grad_(), torch.tensor([2, 4]).int()
    tensors, header = stacked(w, "dense12").packed
    y = ops.linear_experts(x, tensors, header, 64, ends, gated=True)
    gate, up = x.chunk(2, -1)
    wanted = ops.linear_experts(torch.nn.functional.silu(gate) * up, tensors, header, 64, ends)
    assert torch.equal(y, wanted)
    grads = [torch.autograd.grad(out, x, torch.ones_like(out))[0].float() for out in (y, wanted)]
    assert (grads[0] - grads[1]).abs().max() <= 2.0**-7 * grads[1].abs().max()  # torch rounds silu's gradient between


def test_what_the_ops_refuse_they_name() -> None:
    order = torch.tensor([5], dtype=torch.int32)
    tensors, header = stacked(small(1, 64, 64), "dense12").packed
    one, places = torch.ones(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    w, x, ends = small(2, 64, 64), small(3, 64), torch.tensor([1, 3], dtype=torch.int32)
    two, canonical = stacked(w, "dense12").packed, FORMATS["macko"].from_dense(w.view(128, 64)).packed
    more = "the stack has 128 rows, expected 256: 2 experts, as many as ends, of 65"
    for message, op, *arguments in (
        (r"order\[0\] is 5, expected 0 to 3: x has 2 rows, top_k is 2",
         ops.linear_experts, small(2, 64), tensors, header, 64, one, order, 2),
        ("top_k is 0, expected 1", ops.linear_experts, small(2, 64), tensors, header, 64, one, order, 0),
        ("macko::expert_order: ids has dtype float32, expected int64 or int32", ops.expert_order, torch.zeros(2, 2), 4),
        (r"macko::expert_sum: weights has shape \[1, 1\], places has \[1, 2\]",
         ops.expert_sum, small(2, 8), places, torch.ones(1, 1)),
        ("weights has dtype float16, expected float32 or x's, bfloat16",
         ops.expert_sum, small(2, 8), places, torch.ones(1, 2).half()),
        (more, ops.linear_experts, x, *two, 65, ends),
        ("ends has dtype int64, expected int32", ops.linear_experts, x, *two, 64, ends.long()),
        (r"x has shape \[1, 3, 64\], expected 2 dimension", ops.linear_experts, x[None], *two, 64, ends),
        ("x has dtype float16", ops.linear_experts, x.half(), *two, 64, ends),
        ("the macko layout has no such kernel here", ops.linear_experts, x, *canonical, 64, ends),
        (r"macko::linear_experts: ends\[1\] is", ops.linear_experts, x, *two, 64, ends_of([3, -1])),
        (r"macko::linear_experts: ends\[1\] is", ops.linear_experts, x, *two, 64, ends_of([2, 9])),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            op(*arguments)


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
    order, places, ends = ops.expert_order(torch.tensor([[0, 1], [1, 2]]), 2)
    more = (torch.cat([x, x], 1), *args[1:4], ends, order, 2, True)
    torch.library.opcheck(torch.ops.macko.linear_experts, more, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(torch.ops.macko.expert_order, (places, 2))
    torch.library.opcheck(torch.ops.macko.expert_sum, (x[:4].clone(), places, torch.rand(2, 2)))
    two = (*stacked(small(2, 96, 64), "dense12").packed, 96, *stacked(small(2, 64, 48), "dense12").packed, 64)
    at_once = (small(2, 64), places, torch.rand(2, 2), 2, *two)
    torch.library.opcheck(torch.ops.macko.gated_experts, at_once, test_utils=("test_schema", "test_faketensor"))


def test_ids_of_other_tokens_and_gradients_are_refused_at_once() -> None:
    two = (*stacked(small(2, 96, 64), "dense12").packed, 96), (*stacked(small(2, 64, 48), "dense12").packed, 64)
    x, ids, weights = small(5, 64), torch.tensor([[0, 1]] * 5), torch.rand(5, 2)
    assert ops.gated_experts(x, ids, weights, 2, *two).shape == (5, 64)
    for other in (ids[:3], torch.cat([ids, ids])):
        with pytest.raises(RuntimeError, match=f"gated_experts: ids has {len(other)} rows, x has 5"):
            ops.gated_experts(x, other, torch.rand(len(other), 2), 2, *two)
    with pytest.raises(NotImplementedError, match="gated_experts has no gradients"):
        ops.gated_experts(x.requires_grad_(), ids, weights, 2, *two)


@pytest.mark.parametrize("format", ["auto", "dense12", "sparse11", "tile"])
def test_an_expert_of_a_stack_is_a_weight_of_its_own(format: str) -> None:
    w = small(3, 80, 300)
    w[1] *= torch.rand(80, 300) < 0.3  # its slabs are smaller than the others'
    stack, x = Stack.from_dense(w, Options(format)), small(5, 300, zeros=0.9)
    for e in range(3):
        expert = stack.expert(e)
        assert torch.equal(expert.to_dense()[:80], w[e])
        assert torch.equal(expert.linear(x)[:, :80].double(), x.double() @ w[e].double().t())
