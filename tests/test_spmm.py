"""A few tokens and many, from sell's stream, and through dense rows."""

from functools import partial

import pytest
import torch

from macko.weights import MackoWeight, PackedWeight, SellWeight
from tests import layouts
from tests.common import (
    HALVES,
    MASKS,
    Plan,
    assert_close_library,
    assert_close_spmv,
    assert_graph_of_layers,
    assert_same_bits,
    each_token,
    integer_problem,
    needs_capture,
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
def test_a_token_does_not_depend_on_the_others() -> None:
    sell, x = packed(random_weight(300, 700, 0.5, torch.float16)), tokens_of(8, 700, torch.float16).cuda()
    alone = layouts.stream(sell, x)
    x[3], x[5, 17] = float("nan"), float("inf")
    kept = [0, 1, 2, 4, 6, 7]
    assert_same_bits(layouts.stream(sell, x)[kept], alone[kept])


@pytest.mark.gpu
def test_padding_never_reads_an_x() -> None:
    w = torch.zeros(64, 600, dtype=torch.float16)
    w[:, ::3] = 1
    w[::2, 300:] = 0
    x = torch.ones(4, 600, dtype=torch.float16)
    x[:, 0] = float("inf")
    assert layouts.stream(packed(w), x.cuda()).isposinf().all()


@pytest.mark.gpu
def test_x_of_any_stride_and_alignment() -> None:
    w = random_weight(130, 512, 0.5, torch.float16)
    sell, long = packed(w), tokens_of(5, 2 * 512 + 2, torch.float16).cuda()
    flat = long.reshape(-1)
    for x in (flat[1 : 1 + 4 * 512].view(4, 512), long[:, :512], long[:, 1:1025:2], long[:4, :512].t().t()):
        assert_close_spmv(layouts.stream(sell, x), w, x)
        assert_close_spmv(sell.linear(x[None]), w, x[None])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [SellWeight, MackoWeight])
def test_many_tokens_of_any_stride(layout: type[PackedWeight]) -> None:
    """Through dense rows: a slice, every other column, columns side by side, one token again and again."""
    w = random_weight(130, 512, 0.5, torch.float16)
    weight, long = layout.from_dense(w.cuda()), tokens_of(80, 2 * 512 + 2, torch.float16).cuda()
    for x in (long[:, 1:513], long[:, 1:1025:2], long[:, :512].t().contiguous().t(), long[:1, :512].expand(80, 512)):
        assert_close_library(weight.linear(x), w.cuda(), x)
        assert_close_library(weight.linear(x[None])[0], w.cuda(), x)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [SellWeight, MackoWeight])
@pytest.mark.parametrize(("rows", "cols"), [(8448, 4096), (2100, 28_672), (130_000, 300)])
def test_dense_tiles_keep_to_the_workspace(layout: type[PackedWeight], rows: int, cols: int) -> None:
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
    assert peak <= WORKSPACE + y.numel() * y.element_size() + (1 << 20)  # the result is not counted
    assert_close_library(y, w, x, bias)
    assert_same_bits(weight.linear(on_gpu, bias_on_gpu), y)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 8, 80])
def test_gradients_of_x_and_bias(tokens: int) -> None:
    w = random_weight(48, 64, 0.5, torch.float16).cuda()
    sell = SellWeight.from_dense(w)
    for call in (sell.linear, partial(layouts.stream, sell)):
        x = tokens_of(tokens, 64, torch.float16).cuda().requires_grad_()
        bias = torch.zeros(48, dtype=torch.float16, device="cuda", requires_grad=True)
        grad = tokens_of(tokens, 48, torch.float16).cuda()
        (call(x, bias) * grad).sum().backward()
        torch.testing.assert_close(x.grad, grad @ w)
        torch.testing.assert_close(bias.grad, grad.sum(0))


@pytest.mark.gpu
@needs_capture
@pytest.mark.parametrize("tokens", [2, 5, 8, 80])
def test_opcheck_and_graph_of_layers(tokens: int) -> None:
    layers = [packed(random_weight(512, 512, 0.5, torch.float16, seed=i)) for i in range(8)]
    x, bias = tokens_of(tokens, 512, torch.float16).cuda(), random_vector(512, dtype=torch.float16).cuda()
    torch.library.opcheck(torch.ops.macko.linear, (x, *layers[0].packed, bias))
    assert_graph_of_layers(layers, x, bias, bare=3)


@pytest.mark.gpu
def test_compiles_once_for_every_number_of_tokens() -> None:
    sell, bias = packed(random_weight(96, 128, 0.5, torch.float16)), random_vector(96, dtype=torch.float16).cuda()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: sell.linear(x, bias), fullgraph=True, dynamic=True, backend=count)
    # Not two first: of tensors that are no module's, torch takes sizes that are equal at first for the same size, and
    # perm has two rows. (Of a module they are constants: tests/test_linear.py.)
    for tokens in (3, 2, 8, 17, 64, 300):
        x = tokens_of(tokens, 128, torch.float16).cuda()
        assert_same_bits(compiled(x), sell.linear(x, bias))
    assert len(graphs) == 1


@pytest.mark.gpu
def test_side_stream() -> None:
    w, x = random_weight(256, 1024, 0.5, torch.float16), tokens_of(4, 1024, torch.float16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = layouts.stream(packed(w), x.cuda())
    stream.synchronize()
    assert_close_spmv(y, w, x)


@pytest.mark.gpu
def test_errors_name_the_argument() -> None:
    sell = packed(random_weight(30, 50, 0.5, torch.float16))
    x = tokens_of(3, 50, torch.float16).cuda()
    with pytest.raises(RuntimeError, match=r"x has shape \[3, 49\], expected \[\.\.\., 50\]"):
        layouts.stream(sell, x[:, :49])
    with pytest.raises(RuntimeError, match="x has dtype bfloat16, expected float16"):
        layouts.stream(sell, x.bfloat16())
    with pytest.raises(RuntimeError, match="bias has 29 elements, the matrix has 30 rows"):
        layouts.stream(sell, x, random_vector(29, dtype=torch.float16).cuda())
