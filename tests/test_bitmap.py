"""The CPU's execution layout: from the macko format and back, multiplication, hostile content, the ops' manners."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from macko import _library, ops
from macko.weights import BitmapWeight
from tests import reference
from tests.common import (
    CPU_DTYPES,
    assert_close_library,
    assert_close_spmv,
    assert_same_bits,
    cpu_paths,
    integer_problem,
    random_bits,
    random_vector,
    random_weight,
    torch_threads,
)
from tests.layouts import bitmap_check, bitmap_linear, bitmap_pack, bitmap_spmv, bitmap_to_macko, bitmap_unpack

Packed = tuple[Tensor, Tensor, Tensor]

all_dtypes = pytest.mark.parametrize("dtype", CPU_DTYPES)
COLS = (1, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 100, 127, 128, 200, 1003)


def laid_out(w: Tensor, bits: int = 4) -> Packed:
    """The layout of w, which is the reference's and goes back to the same bytes of the macko format."""
    packed = ops.pack(w, bits)
    layout = bitmap_pack(*packed, w.shape[1], bits)
    for got, wanted in zip(layout, reference.bitmap_pack(*packed, w.shape[1], bits), strict=True):
        assert_same_bits(got, wanted)
    for got, wanted in zip(bitmap_to_macko(*layout, w.shape[1], bits), packed, strict=True):
        assert_same_bits(got, wanted)
    assert_same_bits(bitmap_unpack(*layout, w.shape[1]), torch.where(w == 0, torch.zeros_like(w), w))
    assert bitmap_check(*layout, w.shape[1]).tolist() == [0, 0, -1, 0]
    return layout


#: Up to so many tokens the rows are multiplied with x as it is; above, with a turned x, or on the scalar path by torch.
FEW_TOKENS = 4


def assert_in_bound(y: Tensor, w: Tensor, x: Tensor, bias: Tensor | None, path: str) -> None:
    """y [..., rows] within the bound that bitmap.h promises for its way, and one rounding for the bias."""
    tokens = x.shape[:-1].numel()
    longest = int(w.count_nonzero(1).max()) if w.numel() else 0
    if tokens <= FEW_TOKENS and path != "scalar":
        assert_close_spmv(y, w, x, bias, chain=1 + w.shape[1] // 16 + 40)
    elif tokens <= FEW_TOKENS:
        assert_close_spmv(y, w, x, bias, chain=1 + longest + 2)
    elif path == "scalar":
        assert_close_library(y, w, x, bias)
    else:
        flush = torch.finfo(torch.bfloat16).smallest_normal if w.dtype == torch.bfloat16 else 0.0
        assert_close_spmv(y, w, x, bias, chain=1 + longest + 2, flush=flush)


def test_bytes_by_hand() -> None:
    w = torch.zeros(3, 70, dtype=torch.bfloat16)
    w[0, 0], w[0, 9], w[2, 69] = 1, -2, 3
    values, bits, row_ptr = bitmap_pack(*ops.pack(w), 70)
    assert values.tolist() == [1, -2, 3] + [0] * 32
    assert bits.tolist() == [[1, 2] + [0] * 14, [0] * 16, [0] * 8 + [1 << 5] + [0] * 7]
    assert row_ptr.tolist() == [0, 2, 2, 3]


@all_dtypes
def test_empty_rows_and_matrices(cpu_path: str, dtype: torch.dtype) -> None:
    w = random_weight(6, 70, 0.4, dtype)
    w[[0, 1, 3, 5]] = 0
    cases = [w, *(torch.zeros(shape, dtype=dtype) for shape in ((0, 5), (5, 0), (0, 0), (3, 100)))]
    for w in cases:
        layout, x = laid_out(w), random_vector(w.shape[1], dtype=dtype)
        assert_in_bound(bitmap_spmv(*layout, w.shape[1], x), w, x, None, cpu_path)
        for tokens in (0, 3, 7, 12, 40):
            x = random_vector(tokens, w.shape[1], dtype=dtype)
            assert_in_bound(bitmap_linear(x, *layout, w.shape[1]), w, x, None, cpu_path)


@given(
    rows=st.integers(0, 8),
    cols=st.integers(0, 300),
    density=st.sampled_from([0.0, 0.005, 0.05, 0.3, 0.7, 1.0]),
    dtype=st.sampled_from(CPU_DTYPES),
    bits=st.sampled_from((2, 4, 8)),
    seed=st.integers(0, 2**32 - 1),
    path=st.sampled_from(cpu_paths()),
)
def test_any_bits_survive(
    rows: int, cols: int, density: float, dtype: torch.dtype, bits: int, seed: int, path: str
) -> None:
    """NaN, Inf and subnormal numbers among them."""
    with _library.plan(f"cpu={path}"):
        laid_out(random_bits(rows, cols, density, dtype, seed), bits)


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
@all_dtypes
def test_few_and_many_tokens_within_the_bound(cpu_path: str, dtype: torch.dtype, density: float) -> None:
    for cols in COLS:
        w, bias = random_weight(11, cols, density, dtype), random_vector(11, dtype=dtype, seed=5)
        layout = laid_out(w)
        for tokens in (1, 2, 3, 4, 5, 9, 17, 33):
            x = random_vector(tokens, cols, dtype=dtype)
            assert_in_bound(bitmap_linear(x, *layout, cols, bias), w, x, bias, cpu_path)
            y = bitmap_linear(x, *layout, cols)
            assert_in_bound(y, w, x, None, cpu_path)
            if tokens <= 2:
                assert_same_bits(y[0], bitmap_spmv(*layout, cols, x[0]))


@all_dtypes
def test_every_number_of_tokens_up_to_70(cpu_path: str, dtype: torch.dtype) -> None:
    """Integers are exact: a token in another's lane, or a lane of one that does not exist, cannot give y."""
    rows, cols = 37, 1003
    w, x, y = integer_problem(rows, cols, 0.4, dtype)
    layout = laid_out(w)
    factors = torch.tensor([1, -1, 0, 2, -2], dtype=dtype)
    for tokens in (*range(1, 71), 96, 129, 200, 512, 513, 560):
        factor = factors[torch.arange(tokens) % 5, None]
        assert_same_bits(bitmap_linear(x * factor, *layout, cols) + 0, y * factor + 0)


@all_dtypes
def test_subnormal_numbers_count(cpu_path: str, dtype: torch.dtype) -> None:
    """No path takes them as zero, as the instruction for bf16 pairs would."""
    kind = torch.finfo(dtype)
    w = torch.full((3, 130), kind.smallest_normal / 4, dtype=dtype)
    x = torch.full((130,), 64.0, dtype=dtype)
    wanted = (w.double() @ x.double()).to(dtype)
    assert (wanted > 0).all()
    assert_same_bits(bitmap_spmv(*laid_out(w), 130, x), wanted)
    assert_same_bits(ops.spmv(*ops.pack(w), 130, x), wanted)


def corrupt(layout: Packed, tensor: Tensor, index: tuple[int, ...], value: int) -> Packed:
    """The layout with one element of one of its tensors changed."""
    changed = tensor.clone()
    changed[index] = value
    values, bits, row_ptr = (changed if t is tensor else t for t in layout)
    return values, bits, row_ptr


@pytest.mark.parametrize("threads", [1, 2])
def test_corrupted_content_is_refused(cpu_path: str, threads: int) -> None:
    rows, cols = 200, 500
    values, bits, row_ptr = laid_out(random_weight(rows, cols, 0.5, torch.bfloat16))
    x = random_vector(cols, dtype=torch.bfloat16)
    cases: list[tuple[Tensor, tuple[int, ...], int, str]] = [
        (row_ptr, (0,), 1, r"row_ptr\[0\] is 1|row_ptr has"),
        (row_ptr, (0,), -1, r"row_ptr\[0\] is -1|row_ptr has"),
        (row_ptr, (100,), -5, r"row_ptr\[100\] is -5"),
        (row_ptr, (100,), -(2**31), r"row_ptr\[100\] is -2147483648"),
        (row_ptr, (100,), 2**31 - 1, r"row_ptr\[100\] is 2147483647"),
        (row_ptr, (rows,), values.numel(), rf"row_ptr\[{rows}\] is"),
        (row_ptr, (100,), int(row_ptr[101]), "bits has .* set in row 99, row_ptr has"),
        (row_ptr, (100,), int(row_ptr[100]) + 1, "bits has .* set in row 99, row_ptr has"),
        (bits, (150, 3), int(bits[150, 3]) ^ 16, "bits has .* set in row 150, row_ptr has"),
        (bits, (rows - 1, 62), int(bits[rows - 1, 62]) ^ 8, "bits has .* set in row 199, row_ptr has"),
        (bits, (77, 63), 128, "bits has .* set in row 77, row_ptr has"),
    ]
    with torch_threads(threads):
        for tensor, index, value, message in cases:
            broken = corrupt((values, bits, row_ptr), tensor, index, value)
            for call in (
                partial(bitmap_spmv, *broken, cols, x),
                partial(bitmap_linear, x, *broken, cols),
                partial(bitmap_linear, x.expand(6, cols), *broken, cols),
                partial(bitmap_linear, x.expand(12, cols), *broken, cols),
                partial(bitmap_linear, x.expand(100, cols), *broken, cols),
                partial(bitmap_unpack, *broken, cols),
                partial(bitmap_to_macko, *broken, cols),
            ):
                with pytest.raises(RuntimeError, match=f"macko::(linear|dense|lay_out): ({message})"):
                    call()
            with pytest.raises(ValueError, match="not a bitmap weight: "):
                BitmapWeight(*broken, rows=rows, cols=cols).validate()  # type: ignore[misc]
        # A bit after the last column in the place of another: as many as row_ptr says.
        moved = bits.clone()
        moved[77, 63] = 128
        moved[77, 0] ^= int(moved[77, 0]) & -int(moved[77, 0])
        if moved[77, 0] != bits[77, 0]:
            with pytest.raises(RuntimeError, match="bits has one at column 511 of row 77, the matrix has 500 columns"):
                bitmap_spmv(values, moved, row_ptr, cols, x)
    packed = ops.pack(torch.ones(4, 64, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="macko::lay_out: deltas put entry"):
        bitmap_pack(packed[0], packed[1] | 1, packed[2], 64)


def test_validate_finds_what_does_not_stop_the_reading() -> None:
    weight = BitmapWeight.from_dense(random_weight(7, 90, 0.5, torch.float16))
    weight.validate()
    for index, value, message in (
        (3, 0.0, "entry 3: a zero is stored"),
        (-32, 1.0, "after the last one of the last row, is not zero"),
        (-1, -0.0, "after the last one of the last row, is not zero"),
    ):
        values = weight.values.clone()
        values[index] = value
        with pytest.raises(ValueError, match=message):
            BitmapWeight(values, weight.bits, weight.row_ptr, 7, 90).validate()
    with pytest.raises(ValueError, match="expected 32 more"):
        BitmapWeight(torch.cat([weight.values, weight.values[-8:]]), weight.bits, weight.row_ptr, 7, 90).validate()
    with pytest.raises(ValueError, match="row_ptr has 8 entries, expected 9"):
        BitmapWeight(weight.values, weight.bits, weight.row_ptr, 8, 90).validate()


@pytest.mark.gpu
def test_on_cuda_it_says_that_it_is_for_the_cpu() -> None:
    values, bits, row_ptr = (t.cuda() for t in laid_out(random_weight(16, 40, 0.5, torch.float16)))
    with pytest.raises(RuntimeError, match="macko::linear: the bitmap layout is for the CPU"):
        bitmap_spmv(values, bits, row_ptr, 40, torch.ones(40, dtype=torch.float16, device="cuda"))
