"""What only a GPU can get wrong: many warps at once, alignment, streams, graphs, devices, unchecked content."""

import itertools

import pytest
import torch
from torch import Tensor

import macko.ops as ops
from macko import FORMATS
from tests.common import (
    CAN_CAPTURE,
    HALVES,
    assert_close_spmv,
    assert_same_bits,
    cuda_chain,
    integer_problem,
    random_vector,
    random_weight,
)

pytestmark = pytest.mark.gpu

BITS = (2, 4, 8)
# Rows shorter and longer than a step of 512 entries and a window of 1024 columns; x that shared memory does not hold;
# more rows than warps in flight.
SHAPES = (
    *((0, 0), (0, 5), (5, 0), (1, 1), (3, 7), (9, 8), (300, 1), (2, 20_011), (11, 130_001), (70, 1024), (33, 5_003)),
    (9_001, 130),
)


Packed = tuple[Tensor, Tensor, Tensor]


def cuda_pack(w: Tensor, delta_bits: int = 4) -> Packed:
    return ops.pack(w.cuda(), delta_bits)


def assert_same_as_cpu(w: Tensor, delta_bits: int) -> None:
    """Same bytes from both packers, and back again."""
    packed = cuda_pack(w, delta_bits)
    for got, wanted in zip(packed, ops.pack(w, delta_bits), strict=True):
        assert_same_bits(got, wanted)
    assert_same_bits(ops.unpack(*packed, w.shape[1], delta_bits), torch.where(w == 0, 0, w))
    assert ops.check(*packed, w.shape[1], delta_bits).tolist()[0] == 0


@pytest.mark.parametrize("delta_bits", BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_equal_the_cpus(shape: tuple[int, int], delta_bits: int) -> None:
    for density, dtype in itertools.product((0.0, 0.003, 0.1, 0.5, 1.0), HALVES):
        assert_same_as_cpu(random_weight(*shape, density, dtype), delta_bits)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("delta_bits", BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_spmv_of_every_shape(shape: tuple[int, int], delta_bits: int, dtype: torch.dtype) -> None:
    rows, cols = shape
    for density in (0.01, 0.5, 1.0):
        w, x, y = integer_problem(rows, cols, density, dtype)
        packed = cuda_pack(w, delta_bits)
        assert_same_bits(ops.spmv(*packed, cols, x.cuda(), delta_bits) + 0, y + 0)
        w, bias = random_weight(rows, cols, density, dtype), random_vector(rows, dtype=dtype, seed=2)
        x = random_vector(cols, dtype=dtype)
        packed = cuda_pack(w, delta_bits)
        y = ops.linear(x.cuda(), *packed, cols, bias.cuda(), delta_bits)
        assert_close_spmv(y, w, x, bias, chain=cuda_chain(packed[2]))


def test_rows_of_very_different_lengths() -> None:
    w, x, y = integer_problem(2_000, 6_000, 0.02, torch.float16)
    w[::7] = 0
    w[5], w[1999] = 1, -1
    y = w.float() @ x.float()
    assert_same_bits(ops.spmv(*cuda_pack(w), 6_000, x.cuda()) + 0, y.half() + 0)


def test_values_at_an_odd_address_are_refused() -> None:
    values, deltas, row_ptr = cuda_pack(random_weight(8, 64, 0.5, torch.float16))
    shifted = torch.cat([values[:1], values])[1:]
    with pytest.raises(RuntimeError, match="values begins 2 bytes past a multiple of 16"):
        ops.spmv(shifted, deltas, row_ptr, 64, torch.zeros(64, dtype=torch.float16, device="cuda"))


CORRUPTIONS = (
    ("row_ptr", 0, 5),
    ("row_ptr", 7, -3),
    ("row_ptr", 7, -(2**31)),
    ("row_ptr", 12, 1),
    ("row_ptr", 12, 2**31 - 1),
    ("row_ptr", -1, 2**31 - 1),
    ("row_ptr", -1, 0),
    ("row_ptr", -1, 40),
    ("deltas", slice(100, 104), 255),
    ("deltas", slice(None), 255),
    ("values", 33, 0),
    ("values", 33, -0.0),
    ("values", slice(None), 0),
)


@pytest.mark.parametrize("delta_bits", BITS)
@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=str)
def test_corrupted_content(corruption: tuple, delta_bits: int) -> None:
    name, where, what = corruption
    rows, cols = 50, 90
    w, x = random_weight(rows, cols, 0.5, torch.float16), random_vector(cols, dtype=torch.float16)
    good = ops.pack(w, delta_bits)
    packed = dict(zip(("values", "deltas", "row_ptr"), (t.clone() for t in good), strict=True))
    packed[name][where] = what
    on_cpu: Packed = (packed["values"], packed["deltas"], packed["row_ptr"])
    on_gpu: Packed = (on_cpu[0].cuda(), on_cpu[1].cuda(), on_cpu[2].cuda())
    kind = int(ops.check(*on_cpu, cols, delta_bits)[0])
    assert ops.check(*on_gpu, cols, delta_bits).tolist() == ops.check(*on_cpu, cols, delta_bits).tolist()

    y = ops.spmv(*on_gpu, cols, x.cuda(), delta_bits).cpu()
    # Two tokens go through a dense copy, which may not look at the content first: its columns show the copy.
    units = torch.eye(cols, dtype=torch.float16, device="cuda")
    dense = ops.linear(units, *on_gpu, cols, None, delta_bits).t().cpu()
    if CAN_CAPTURE:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # nor may unpack in a capture
            captured = ops.unpack(*on_gpu, cols, delta_bits)
        captured.fill_(1)
        graph.replay()
        dense = captured.cpu()

    # A row is in doubt where row_ptr or a column of it is outside; every other row comes out as it stands.
    bits = packed["deltas"].long()[:, None] >> torch.arange(0, 8, delta_bits) & 2**delta_bits - 1
    skips, capacity = bits.flatten(), packed["values"].numel()
    for row, (start, stop) in enumerate(itertools.pairwise(packed["row_ptr"].tolist())):
        at = (skips[max(start, 0) : max(stop, 0)] + 1).cumsum(0) - 1
        if start < 0 or stop < start or stop > capacity or (at >= cols).any():
            assert y[row].isnan()
            assert dense[row].isnan().all()
            assert kind
        else:
            wanted = torch.zeros(cols, dtype=torch.float16)
            wanted[at] = packed["values"][start:stop]
            assert_same_bits(dense[row] + 0, wanted + 0)  # the product knows no -0.0
            assert_close_spmv(y[row : row + 1], wanted[None], x)
    if kind in (1, 2, 3, 4):
        with pytest.raises(RuntimeError, match="macko::dense: "):
            ops.unpack(*on_gpu, cols, delta_bits)
    # The device is none the worse for it.
    assert_close_spmv(ops.spmv(*cuda_pack(w, delta_bits), cols, x.cuda(), delta_bits), w, x)


def test_gradient_of_corrupted_content_is_nan() -> None:
    """The backward pass does not wait for the device to look at the content, as the forward pass does not."""
    values, deltas, row_ptr = cuda_pack(random_weight(50, 90, 0.5, torch.float16))
    row_ptr[7] = -3
    for tokens in ((), (3,)):
        x = random_vector(*tokens, 90, dtype=torch.float16).cuda().requires_grad_()
        y = ops.linear(x, values, deltas, row_ptr, 90) if tokens else ops.spmv(values, deltas, row_ptr, 90, x)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.isnan().all()


def test_the_lowest_faulty_row_is_named() -> None:
    w = random_weight(3_000, 256, 0.5, torch.float16)
    values, deltas, row_ptr = cuda_pack(w)
    starts = row_ptr.tolist()
    for row in (2_999, 1_500, 700, 31):
        entry = (starts[row] + 1) // 2 * 2 + 10
        deltas[entry // 2 : entry // 2 + 40] = 255
        kind, found_row, found_entry, _ = ops.check(values, deltas, row_ptr, 256).tolist()
        assert (kind, found_row) == (4, row)
        assert starts[row] <= found_entry < starts[row + 1]


def test_more_than_2_31_elements() -> None:
    rows, cols = 65_536, 32_776
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    w = torch.zeros(rows, cols, dtype=torch.float16, device="cuda")
    at = torch.randint(rows * cols, (rows * 40,), generator=generator, device="cuda")
    w.view(-1)[at] = torch.randint(1, 5, at.shape, generator=generator, device="cuda").half()
    w[-1, -1] = 3
    packed = ops.pack(w, 8)
    assert torch.equal(ops.unpack(*packed, cols, 8), w)
    x = torch.randint(-2, 3, (cols,), generator=generator, device="cuda").half()
    y = ops.spmv(*packed, cols, x, 8)
    for some in (slice(0, 4_096), slice(-4_096, None)):
        assert torch.equal(y[some], (w[some].float() @ x.float()).half())


@pytest.mark.parametrize(("rows", "tokens"), [(131_072, 17_000), (3_000_000, 720)])
@pytest.mark.parametrize("format", ["macko", "sell", "tile", "ec", "dense12", "sparse11", "dense8", "sparse8"])
def test_products_of_more_than_2_31_numbers(format: str, rows: int, tokens: int) -> None:
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of free GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    dtype = FORMATS[format].dtypes[0]
    w = torch.randint(-2, 3, (rows, 64), generator=generator, device="cuda").to(dtype)
    x = torch.randint(-2, 3, (tokens, 64), generator=generator, device="cuda").to(dtype)
    y = FORMATS[format].from_dense(w).linear(x)
    for token in (0, tokens // 2, tokens - 1):
        assert torch.equal(y[token], (w.float() @ x[token].float()).to(dtype))
    for row in (0, rows // 2, rows - 1):
        assert torch.equal(y[:, row], (x.float() @ w[row].float()).to(dtype))
