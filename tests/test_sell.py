"""The sell layout: bytes by its specification, round trips, spmv on every path, hostile shapes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import macko.ops as ops
from macko import reference
from macko.formats import MackoWeight, SellWeight
from tests.common import (
    HALVES,
    MASKS,
    assert_close_spmv,
    assert_same_bits,
    integer_problem,
    random_vector,
    random_weight,
)

GAPS = (2, 3, 4, 5, 6)
#: How a block fetches, and whether launches may overlap: MACKO_COPY, MACKO_PDL.
PATHS: tuple[dict[str, str], ...] = ({}, {"MACKO_PDL": "0"}, {"MACKO_COPY": "cp_async"})
#: Lane groups that are not full, one row, one column, no row, cols that no bulk copy can end at, more blocks than rows.
SHAPES = ((64, 256), (33, 203), (1, 1), (1, 4096), (500, 1), (7, 30), (600, 64), (0, 16), (5, 0), (40, 1001))


def packed(w: torch.Tensor, gap_bits: int = 0, delta_bits: int = 4) -> SellWeight:
    return SellWeight.from_dense(w.cuda(), delta_bits, gap_bits)


def assert_packs(w: torch.Tensor, gap_bits: int = 0, delta_bits: int = 4) -> SellWeight:
    sell = packed(w, gap_bits, delta_bits)
    wanted = torch.where(w == 0, 0, w)
    assert_same_bits(sell.to_dense(), wanted)
    canonical, back = MackoWeight.from_dense(w, delta_bits), sell.to_macko()
    for name, tensor in canonical.tensors().items():
        assert_same_bits(getattr(back, name), tensor)
    if w.numel() < 50_000:
        assert_same_bits(reference.sell_unpack(*sell._packed), wanted)
    return sell


@pytest.mark.gpu
@pytest.mark.parametrize("gap_bits", GAPS)
@pytest.mark.parametrize("dtype", HALVES)
def test_bytes_and_round_trip_of_every_mask(dtype: torch.dtype, gap_bits: int) -> None:
    for kind in MASKS:
        for density in (0.02, 0.5):
            for delta_bits in (2, 4, 8):
                assert_packs(random_weight(70, 303, density, dtype, kind=kind), gap_bits, delta_bits)


@pytest.mark.gpu
@given(
    rows=st.integers(0, 90),
    cols=st.integers(0, 700),
    density=st.sampled_from((0.0, 0.01, 0.1, 0.5, 0.9, 1.0)),
    gap_bits=st.sampled_from((0, *GAPS)),
    seed=st.integers(0, 9),
)
def test_round_trip_of_any_shape(rows: int, cols: int, density: float, gap_bits: int, seed: int) -> None:
    assert_packs(random_weight(rows, cols, density, torch.float16, seed=seed), gap_bits)


@pytest.mark.gpu
def test_nan_and_inf_keep_their_bits() -> None:
    w = random_weight(40, 200, 0.5, torch.float16)
    w[3, 7], w[4, 9], w[5, 11], w[6, 13] = float("inf"), float("-inf"), float("nan"), -0.0
    w.view(torch.int16)[7, 15] = 0x7D03
    assert_packs(w)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("dtype", HALVES)
def test_spmv_of_every_shape_and_gap(dtype: torch.dtype, path: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in path.items():
        monkeypatch.setenv(name, value)
    for rows, cols in SHAPES:
        w, x = random_weight(rows, cols, 0.4, dtype), random_vector(cols, dtype=dtype)
        bias = random_vector(rows, dtype=dtype, seed=2)
        exact_w, exact_x, exact_y = integer_problem(rows, cols, 0.4, dtype)
        for gap_bits in GAPS:
            sell = packed(w, gap_bits)
            y = sell.spmv(x.cuda(), bias.cuda())
            assert_close_spmv(y, w, x, bias)
            assert_same_bits(sell.spmv(x.cuda(), bias.cuda()), y)
            assert_same_bits(packed(exact_w, gap_bits).spmv(exact_x.cuda()) + 0, exact_y + 0)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize(
    ("rows", "cols", "density"),
    [(4096, 4096, 0.5), (1024, 4096, 0.1), (100, 65535, 0.3), (300, 49152, 0.5), (70_000, 64, 0.3), (2048, 11008, 0.7)],
)
def test_spmv_of_large_shapes(
    rows: int, cols: int, density: float, path: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in path.items():
        monkeypatch.setenv(name, value)
    w, x = random_weight(rows, cols, density, torch.float16), random_vector(cols, dtype=torch.float16)
    sell = assert_packs(w)
    assert_close_spmv(sell.spmv(x.cuda()), w, x)


@pytest.mark.gpu
def test_a_row_50_times_as_long_as_the_mean() -> None:
    w = random_weight(3000, 4096, 0.01, torch.float16)
    w[1234] = random_weight(1, 4096, 1.0, torch.float16)
    w[2000:] = 0
    sell, x = assert_packs(w), random_vector(4096, dtype=torch.float16)
    assert_close_spmv(sell.spmv(x.cuda()), w, x)
    uniform = packed(random_weight(3000, 4096, sell.stored / w.numel(), torch.float16), sell.gap_bits)
    # Padding of the short rows: at most their own bytes again.
    assert sell.nbytes < 2 * uniform.nbytes


@pytest.mark.gpu
def test_all_zero_and_empty_rows() -> None:
    bias = random_vector(300, dtype=torch.float16).cuda()
    zero = packed(torch.zeros(300, 200, dtype=torch.float16))
    assert zero.stored == 0
    assert_same_bits(zero.spmv(random_vector(200, dtype=torch.float16).cuda(), bias), bias)
    w = random_weight(300, 200, 0.5, torch.float16)
    w[:7], w[100:200], w[290:] = 0, 0, 0
    x = random_vector(200, dtype=torch.float16)
    assert_close_spmv(assert_packs(w).spmv(x.cuda()), w, x)


@pytest.mark.gpu
def test_padding_never_reads_an_x() -> None:
    """Padding behind a row's last non-zero must not meet an Inf that the row has a real value for elsewhere."""
    w = torch.zeros(64, 600, dtype=torch.float16)
    w[:, ::3] = 1
    w[::2, 300:] = 0
    x = torch.ones(600, dtype=torch.float16)
    x[0] = float("inf")
    assert packed(w).spmv(x.cuda()).isposinf().all()


@pytest.mark.gpu
def test_x_and_bias_of_any_stride_and_alignment() -> None:
    w = random_weight(130, 512, 0.5, torch.float16)
    sell, long = packed(w), random_vector(2 * 512 + 1, dtype=torch.float16)
    for x in (long[1:513], long[: 2 * 512 : 2]):
        assert_close_spmv(sell.spmv(x.cuda()[:]), w, x)
        on_gpu = long.cuda()
        same = on_gpu[1:513] if x.stride(0) == 1 else on_gpu[: 2 * 512 : 2]
        assert_close_spmv(sell.spmv(same), w, x)
    bias = random_vector(260, dtype=torch.float16)
    x = long[:512]
    assert_close_spmv(sell.spmv(x.cuda(), bias.cuda()[::2]), w, x, bias[::2])


@pytest.mark.gpu
def test_gap_width_is_the_smallest() -> None:
    for density, wanted in ((0.75, 2), (0.5, 3), (0.3, 4), (0.1, 5), (0.04, 6)):
        w = random_weight(512, 4096, density, torch.float16)
        assert packed(w).gap_bits == wanted


@pytest.mark.gpu
def test_memory_held() -> None:
    sell = packed(random_weight(4096, 4096, 0.5, torch.float16))
    assert sell.nbytes <= 2.6 * sell.stored


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [(), (1,), (1, 1), (3,), (2, 5), (0,)])
def test_linear(tokens: tuple[int, ...]) -> None:
    w, bias = random_weight(96, 200, 0.5, torch.float16), random_vector(96, dtype=torch.float16, seed=3)
    x = random_vector(*tokens, 200, dtype=torch.float16)
    y = packed(w).linear(x.cuda(), bias.cuda())
    assert y.shape == (*tokens, 96)
    assert_close_spmv(y, w, x, bias)


@pytest.mark.gpu
def test_gradients_of_x_and_bias() -> None:
    w = random_weight(48, 64, 0.5, torch.float16).cuda()
    sell = SellWeight.from_dense(w)
    for tokens in ((), (3,)):
        x = random_vector(*tokens, 64, dtype=torch.float16).cuda().requires_grad_()
        bias = torch.zeros(48, dtype=torch.float16, device="cuda", requires_grad=True)
        grad = random_vector(*tokens, 48, dtype=torch.float16).cuda()
        (sell.linear(x, bias) * grad).sum().backward()
        torch.testing.assert_close(x.grad, grad @ w)
        torch.testing.assert_close(bias.grad, grad.reshape(-1, 48).sum(0))


@pytest.mark.gpu
def test_opcheck_compile_and_graph_of_32_layers() -> None:
    layers = [packed(random_weight(512, 512, 0.5, torch.float16, seed=i)) for i in range(32)]
    bias = random_vector(512, dtype=torch.float16).cuda()
    x = random_vector(512, dtype=torch.float16).cuda()
    torch.library.opcheck(torch.ops.macko.sell_spmv, (*layers[0]._packed, x, bias))
    torch.library.opcheck(torch.ops.macko.sell_linear, (x[None], *layers[0]._packed, bias))

    def chain(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer.linear(x, bias) * 0.05
        for layer in layers:  # and without a kernel between them
            x = layer.linear(x)
        return x

    eager = chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(x)
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        assert_same_bits(captured, eager)
    compiled = torch.compile(lambda x: layers[0].linear(x, bias), fullgraph=True)
    for tokens in ((1,), (4,), (2, 3)):
        rows = random_vector(*tokens, 512, dtype=torch.float16).cuda()
        torch.testing.assert_close(compiled(rows), layers[0].linear(rows, bias))


@pytest.mark.gpu
def test_side_stream() -> None:
    w, x = random_weight(256, 1024, 0.5, torch.float16), random_vector(1024, dtype=torch.float16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = packed(w).spmv(x.cuda())
    stream.synchronize()
    assert_close_spmv(y, w, x)


@pytest.mark.gpu
def test_validate() -> None:
    sell = packed(random_weight(300, 500, 0.5, torch.float16))
    sell.validate()
    for name, index in (("data", 515), ("bases", 3), ("perm", 5), ("blocks", 3), ("blocks", 8 * 20 + 4)):
        tensors = {key: value.clone() for key, value in sell.tensors().items()}
        tensors[name].view(-1).view(torch.int16)[index] += 1
        with pytest.raises(ValueError, match="not a sell weight"):
            SellWeight(**tensors, **sell.sizes()).validate()


@pytest.mark.gpu
def test_errors_name_the_argument() -> None:
    sell = packed(random_weight(30, 50, 0.5, torch.float16))
    x = random_vector(50, dtype=torch.float16).cuda()
    data, bases, blocks, perm, *sizes = sell._packed
    with pytest.raises(RuntimeError, match="x has 49 elements, the matrix has 50 columns"):
        ops.sell_spmv(data, bases, blocks, perm, *sizes, x[:49])
    with pytest.raises(RuntimeError, match="x has dtype bfloat16, expected float16"):
        ops.sell_spmv(data, bases, blocks, perm, *sizes, x.bfloat16())
    with pytest.raises(RuntimeError, match="bias has 29 elements, the matrix has 30 rows"):
        ops.sell_spmv(data, bases, blocks, perm, *sizes, x, x[:29])
    with pytest.raises(RuntimeError, match="gap_bits is 7"):
        ops.sell_pack(*ops.pack(torch.ones(2, 2).half().cuda()), 2, 4, 7)
    with pytest.raises(RuntimeError, match="cols is 65536, expected at most 65535"):
        packed(torch.zeros(2, 65536, dtype=torch.float16))


def test_cpu_tensors_are_refused_with_the_reason() -> None:
    weight = MackoWeight.from_dense(torch.ones(2, 2).half())
    with pytest.raises(RuntimeError, match="values is on cpu, expected a CUDA device"):
        SellWeight.from_macko(weight)
    with pytest.raises(RuntimeError, match="data is on cpu, expected a CUDA device"):
        ops.sell_linear(torch.ones(2).half(), *[torch.zeros(0)] * 4, 2, 4, 8, 0)
