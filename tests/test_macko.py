"""The canonical format: its bytes, round trips, spmv and linear, hostile content, the ops' manners."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from macko import MackoWeight, _library, ops
from tests import reference
from tests.common import (
    CPU_DTYPES,
    MASKS,
    assert_close_spmv,
    assert_same_bits,
    cpu_paths,
    device_dtypes,
    devices,
    integer_problem,
    random_bits,
    random_vector,
    random_weight,
    torch_threads,
)

BITS = (2, 4, 8)
Packed = tuple[Tensor, Tensor, Tensor]

on_devices = pytest.mark.parametrize("device", devices())
on_device_dtypes = pytest.mark.parametrize(("device", "dtype"), device_dtypes())
all_bits = pytest.mark.parametrize("bits", BITS)


def assert_packs(w: Tensor, bits: int = 4, device: str = "cpu") -> Packed:
    """pack gives the reference's bytes, and unpack gives w back, all zeros positive."""
    packed = ops.pack(w.to(device), bits)
    for got, wanted in zip(packed, reference.pack(w, bits), strict=True):
        assert_same_bits(got, wanted)
    assert_same_bits(ops.unpack(*packed, w.shape[1], bits), torch.where(w == 0, torch.zeros_like(w), w))
    assert ops.check(*packed, w.shape[1], bits)[0] == 0
    return packed


def chain(w: Tensor, bits: int, device: str) -> int | None:
    """Roundings after a product: what macko.h promises for the CPU, any order of summation on CUDA."""
    if device != "cpu":
        return None
    longest = int(reference.pack(w, bits)[2].diff().max()) if w.shape[0] else 0
    return longest + 2 if cpu_paths()[-1] == "scalar" else longest // 16 + 22


def assert_spmv(w: Tensor, bits: int = 4, device: str = "cpu") -> None:
    x = random_vector(w.shape[1], dtype=w.dtype)
    y = ops.spmv(*ops.pack(w.to(device), bits), w.shape[1], x.to(device), bits)
    assert_close_spmv(y, w, x, chain=chain(w, bits, device))


def at_columns(cols: int, *columns: int, dtype: torch.dtype = torch.float16, rows: int = 1) -> Tensor:
    """Rows of zeros but for 1, 2, 3... at the columns."""
    w = torch.zeros(rows, cols, dtype=dtype)
    w[:, list(columns)] = torch.arange(1, len(columns) + 1, dtype=dtype)
    return w


# The bytes


@on_devices
def test_papers_example(device: str) -> None:
    """Figure 3 of the MACKO-SpMV paper: values 1 2 3 4 at columns 2 5 12 13, both counted from 1, 2-bit deltas."""
    w = at_columns(13, 1, 4, 11, 12)
    values, deltas, row_ptr = ops.pack(w.to(device), 2)
    assert values.tolist() == [1, 2, 0, 3, 4, 0, 0, 0]  # padded to 8
    assert deltas.tolist() == [1 | 2 << 2 | 3 << 4 | 2 << 6, 0]  # the paper's 2 3 4 3 1, less one each
    assert row_ptr.tolist() == [0, 5]


@on_devices
def test_bytes_by_hand(device: str) -> None:
    w = torch.tensor([[0, 0, 5, -1], [0, 0, 0, 0], [2, 0, 0, 0]], dtype=torch.bfloat16)
    values, deltas, row_ptr = ops.pack(w.to(device))
    assert values.tolist() == [5, -1, 2, 0, 0, 0, 0, 0]
    assert deltas.tolist() == [2 | 0 << 4, 0, 0, 0]
    assert row_ptr.tolist() == [0, 2, 2, 3]


@all_bits
@on_device_dtypes
@pytest.mark.parametrize("kind", MASKS)
def test_bytes_of_every_kind_of_mask(device: str, dtype: torch.dtype, kind: str, bits: int) -> None:
    for density in (0.02, 0.1, 0.5, 0.9):
        assert_packs(random_weight(13, 203, density, dtype, kind=kind), bits, device)


@all_bits
@on_devices
def test_runs_of_zeros_about_delta_max(device: str, bits: int) -> None:
    step = 2**bits
    for zeros in (step - 2, step - 1, step, step + 1, 2 * step - 1, 2 * step, 2 * step + 1, 5 * step + 3):
        for before in range(3):  # the run starts on every place of a byte
            columns = [*range(before), before + zeros, before + zeros + 1]
            w = at_columns(before + zeros + 40, *columns, rows=2)
            packed = assert_packs(w, bits, device)
            assert packed[2][1] == len(columns) + zeros // step
            assert_spmv(w, bits, device)


@on_device_dtypes
def test_width_of_fewest_bytes(device: str, dtype: torch.dtype) -> None:
    chosen = set()
    for density in (0.0, 0.01, 0.1, 0.3, 0.5, 1.0):
        for rows, cols in ((40, 300), (5, 0), (0, 5), (1, 1)):
            w = random_weight(rows, cols, density, dtype).to(device)
            widths = {bits: ops.pack(w, bits) for bits in (4, 2, 8)}
            bits = min(widths, key=lambda bits: sum(t.nbytes for t in widths[bits]))
            for got, wanted in zip(ops.pack(w, 0), widths[bits], strict=True):
                assert_same_bits(got, wanted)
            assert MackoWeight.smallest(w).delta_bits == bits
            chosen.add(bits)
    assert chosen == {2, 4, 8}


@all_bits
@on_device_dtypes
def test_empty_rows_and_matrices(device: str, dtype: torch.dtype, bits: int) -> None:
    w = random_weight(9, 77, 0.4, dtype)
    for rows in ([0, 1], [7, 8], [3, 4, 5], list(range(9))):
        emptied = w.clone()
        emptied[rows] = 0
        assert_packs(emptied, bits, device)
        assert_spmv(emptied, bits, device)
    for shape in ((0, 5), (5, 0), (0, 0), (1, 1), (1, 300), (300, 1)):
        assert_packs(torch.ones(shape, dtype=dtype), bits, device)
        assert_packs(torch.zeros(shape, dtype=dtype), bits, device)
        assert_spmv(torch.ones(shape, dtype=dtype), bits, device)


@all_bits
@on_device_dtypes
def test_nan_inf_and_subnormals_keep_their_bits(device: str, dtype: torch.dtype, bits: int) -> None:
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    all_bits_of_16 = torch.arange(-(2**15), 2**15).view(64, 1024)
    w = (all_bits_of_16 << (16 if dtype == torch.float32 else 0)).to(integer).view(dtype)  # -0.0, which is a zero, too
    assert_packs(w, bits, device)


@on_device_dtypes
def test_input_that_is_not_contiguous(device: str, dtype: torch.dtype) -> None:
    w = random_weight(48, 100, 0.4, dtype)
    for view in (w[::2], w[5].unsqueeze(1).expand(-1, 4), torch.ones((), dtype=dtype).expand(3, 4)):
        assert_packs(view, 4, device)
    packed, x = ops.pack(w.to(device)), random_vector(200, dtype=dtype)
    assert_same_bits(ops.spmv(*packed, 100, x.to(device)[::2]), ops.spmv(*packed, 100, x[::2].contiguous().to(device)))
    with torch.inference_mode():
        assert_packs(w, 4, device)


@given(
    rows=st.integers(0, 12),
    cols=st.integers(0, 400),
    density=st.sampled_from([0.0, 0.005, 0.05, 0.3, 0.7, 1.0]),
    dtype=st.sampled_from(CPU_DTYPES),
    bits=st.sampled_from(BITS),
    seed=st.integers(0, 2**32 - 1),
    path=st.sampled_from(cpu_paths()),
)
def test_any_matrix_packs_to_the_references_bytes(
    rows: int, cols: int, density: float, dtype: torch.dtype, bits: int, seed: int, path: str
) -> None:
    with _library.plan(f"cpu={path}"):
        assert_packs(random_bits(rows, cols, density, dtype, seed), bits)


@all_bits
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_runs_of_zeros_among_dense_columns(cpu_path: str, dtype: torch.dtype, bits: int) -> None:
    """Eight entries that span from 8 to all columns, in rows that end anywhere: what unpack takes together."""
    for cols in (63, 64, 95, 96, 97, 128, 200, 333, 1000):
        for run in (0, 20, 26, 60, 130, 300):
            w = random_weight(9, cols, 0.8, dtype)
            for row in range(9):
                w[row, 30 * row : 30 * row + run] = 0
                w[row, 400 + 7 * row : 400 + 7 * row + run] = 0
            assert_packs(w, bits)


# spmv and linear


@pytest.mark.slow
@all_bits
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_every_cpu_path(cpu_path: str, dtype: torch.dtype, bits: int) -> None:
    for density, kind in zip((0.01, 0.1, 0.25, 0.5, 0.95, 1.0), (*MASKS, "uniform", "uniform"), strict=True):
        for cols in (5, 8, 31, 64, 257, 1003, 4096):
            w = random_weight(19, cols, density, dtype, kind=kind)
            packed, x = assert_packs(w, bits), random_vector(cols, dtype=dtype)
            longest = int(packed[2].diff().max())
            y = ops.spmv(*packed, cols, x, bits)
            assert_close_spmv(y, w, x, chain=longest + 2 if cpu_path == "scalar" else longest // 16 + 22)
            w, x, y = integer_problem(19, cols, density, dtype)
            assert_same_bits(ops.spmv(*assert_packs(w, bits), cols, x, bits), y)


@on_device_dtypes
def test_an_inf_of_x_reaches_only_rows_that_have_its_column(device: str, dtype: torch.dtype) -> None:
    """Also where vectors of entries reach into the next row or after the last column."""
    w = torch.ones(70, 70, dtype=dtype).tril()
    x = torch.zeros(70, dtype=dtype)
    x[50] = float("inf")
    y = ops.spmv(*ops.pack(w.to(device)), 70, x.to(device)).cpu()
    assert y[:50].eq(0).all()
    assert y[50:].isinf().all()


@on_device_dtypes
def test_results_too_large_or_small_for_the_type(device: str, dtype: torch.dtype) -> None:
    huge, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    w = torch.tensor([[huge, huge], [-huge, -huge], [tiny, 0], [tiny / 2, tiny / 2], [0, 0]], dtype=dtype)
    for x in (torch.ones(2, dtype=dtype), torch.full((2,), 0.25, dtype=dtype)):
        y = ops.spmv(*ops.pack(w.to(device)), 2, x.to(device)).cpu()
        assert_same_bits(y, (w.double() @ x.double()).to(dtype))


# Hostile content


def corrupt(part: str, index: int, value: int, packed: Packed) -> Packed:
    changed = {name: t.clone() for name, t in zip(("values", "deltas", "row_ptr"), packed, strict=True)}
    changed[part][index] = value
    return changed["values"], changed["deltas"], changed["row_ptr"]


@pytest.mark.parametrize("threads", [1, 2])
def test_corrupted_content_is_refused(cpu_path: str, threads: int) -> None:
    """Each fault of its kind, by every op, whatever the thread that meets it; each message names the argument."""
    rows, cols = 200, 500
    w = random_weight(rows, cols, 0.5, torch.float16)
    w[:, -1] = 1  # the last entry of each row is at the last column, so one column more is past the end
    for bits in BITS:
        packed, x = ops.pack(w, bits), random_vector(cols, dtype=torch.float16)
        row_ptr = packed[2]
        first = int(row_ptr[150]) * bits // 8 + 1  # a byte of row 150's deltas
        cases = [
            ("row_ptr", 0, 1, r"row_ptr\[0\] is 1, expected 0"),
            ("row_ptr", 0, -1, r"row_ptr\[0\] is -1, expected 0"),
            ("row_ptr", 100, int(row_ptr[99]) - 1, "row_ptr falls to .* at index 100"),
            ("row_ptr", 100, -5, "row_ptr falls to -5 at index 100"),
            ("row_ptr", 100, -(2**31), "row_ptr falls to .* at index 100"),
            ("row_ptr", 101, 2**31 - 1, r"row_ptr\[101\] is 2147483647, values has"),
            ("row_ptr", rows, packed[0].numel() + 1, rf"row_ptr\[{rows}\] is .*, values has"),
            ("row_ptr", 150, int(row_ptr[151]), "deltas put entry .* of row 149 at column .*, the matrix has 500"),
            ("deltas", first, 255, "deltas put entry .* of row 150 at column .*, the matrix has 500 columns"),
        ]
        with torch_threads(threads):
            for part, index, value, message in cases:
                if part == "deltas" and packed[1][index] == value:
                    continue
                broken = corrupt(part, index, value, packed)
                with pytest.raises(RuntimeError, match="macko::spmv: " + message):
                    ops.spmv(*broken, cols, x, bits)
                with pytest.raises(RuntimeError, match="macko::dense: " + message):
                    ops.unpack(*broken, cols, bits)
                with pytest.raises(RuntimeError, match="macko::linear: " + message):
                    ops.linear(x, *broken, cols, None, bits)
                for tokens in (3, 40):  # each by itself, and blocks of dense rows
                    with pytest.raises(RuntimeError, match="macko::linear: " + message):
                        ops.linear(x.expand(tokens, cols), *broken, cols, None, bits)
                assert ops.check(*broken, cols, bits)[0] != 0


@all_bits
def test_one_column_less_than_there_are_entries_for(cpu_path: str, bits: int) -> None:
    """Past the end by a single column, in vectors of any fill: x after its end is not read for it."""
    for dtype in CPU_DTYPES:
        for cols in (1, 8, 15, 16, 17, 31, 32, 33, 47, 48, 64, 65, 96, 300, 4096):
            for density in (0.5, 1.0):
                w = random_weight(3, cols, density, dtype)
                w[:, -1] = 1
                packed, message = ops.pack(w, bits), f"at column {cols - 1}, the matrix has {cols - 1} columns"
                for x in (torch.ones(cols - 1, dtype=dtype), torch.ones(2, cols - 1, dtype=dtype)):
                    with pytest.raises(RuntimeError, match=message):
                        ops.linear(x, *packed, cols - 1, None, bits)
                with pytest.raises(RuntimeError, match=message):
                    ops.unpack(*packed, cols - 1, bits)
                assert ops.check(*packed, cols - 1, bits)[0] == 4


def test_every_path_finds_the_same_fault(cpu_path: str) -> None:
    """Row, entry and column of each possible single fault of a small matrix, as a plain loop finds them."""
    w = random_weight(3, 90, 0.6, torch.bfloat16)
    w[:, -1] = 1
    for bits in (2, 4):
        values, deltas, row_ptr = ops.pack(w, bits)
        for byte in range(deltas.numel()):
            broken = corrupt("deltas", byte, 255, (values, deltas, row_ptr))
            flat = (broken[1].long()[:, None] >> torch.arange(0, 8, bits) & 2**bits - 1).flatten() + 1
            expected = None
            for row in range(3):
                columns = flat[row_ptr[row] : row_ptr[row + 1]].cumsum(0) - 1
                if (columns >= 90).any() and expected is None:
                    entry = int((columns >= 90).nonzero()[0, 0])
                    expected = f"entry {int(row_ptr[row]) + entry} of row {row} at column {int(columns[entry])},"
            if expected is None:
                continue
            for call in (
                partial(ops.spmv, *broken, 90, torch.ones(90).bfloat16(), bits),
                partial(ops.unpack, *broken, 90, bits),
            ):
                with pytest.raises(RuntimeError, match=expected):
                    call()


@on_devices
def test_check_finds_what_breaks_the_format_but_not_the_reading(device: str) -> None:
    w = torch.zeros(2, 100, dtype=torch.float16)
    w[0, [3, 50]] = 1  # entries: 1 at 3, 0 at 19, 0 at 35, 1 at 50
    w[1, 5] = 1
    packed = ops.pack(w.to(device))
    stray, padding = 5, 6  # MACKO_STRAY_ZERO, MACKO_PADDING
    for part, index, value, wanted in (
        ("values", 0, 0, [stray, 0, 0, 3]),
        ("values", 3, 0, [stray, 0, 3, 14]),
        ("values", 1, -0.0, [stray, 0, 1, 15]),
        ("values", 4, 0, [stray, 1, 4, 5]),
        ("values", 6, 1, [padding, 2, 6, 0x3C00]),
        ("deltas", 3, 0x10, [padding, 2, 7, 1]),
    ):
        assert ops.check(*corrupt(part, index, value, packed), 100).tolist() == wanted
    longer = [torch.cat([tensor, tensor.new_zeros(more)]) for tensor, more in zip(packed, (8, 4, 0), strict=True)]
    assert ops.check(*longer, 100).tolist() == [3, 2, -1, 5]  # MACKO_ROW_PTR_END: too much capacity
    assert ops.check(*packed, 51).tolist() == [0, 0, -1, 0]
    assert ops.check(*packed, 50).tolist() == [4, 0, 3, 50]  # MACKO_COLUMN_END


@on_devices
def test_wrong_arguments_are_named(device: str) -> None:
    w = random_weight(16, 40, 0.5, torch.float16).to(device)
    values, deltas, row_ptr = ops.pack(w)
    x = torch.ones(40, dtype=torch.float16, device=device)
    for message, call in (
        ("w has dtype int32", lambda: ops.pack(w.int())),
        ("macko::pack.*w", lambda: MackoWeight.from_dense(None)),  # type: ignore[arg-type]
        (r"w has shape \[40\], expected 2", lambda: ops.pack(w[0])),
        ("delta_bits is 3, expected 2, 4 or 8", lambda: ops.pack(w, 3)),
        ("delta_bits is 5", lambda: ops.spmv(values, deltas, row_ptr, 40, x, 5)),
        ("values has dtype float64", lambda: ops.spmv(values.double(), deltas, row_ptr, 40, x)),
        ("values has .* entries, expected a multiple of 8", lambda: ops.spmv(values[1:], deltas, row_ptr, 40, x)),
        ("deltas has .* bytes, expected", lambda: ops.spmv(values, deltas[1:], row_ptr, 40, x)),
        ("deltas has dtype int8, expected uint8", lambda: ops.spmv(values, deltas.view(torch.int8), row_ptr, 40, x)),
        ("row_ptr has dtype int64, expected int32", lambda: ops.spmv(values, deltas, row_ptr.long(), 40, x)),
        ("row_ptr is empty", lambda: ops.unpack(values, deltas, row_ptr[:0], 40)),
        ("cols is -1", lambda: ops.unpack(values, deltas, row_ptr, -1)),
        ("x has 39 elements, the matrix has 40 columns", lambda: ops.spmv(values, deltas, row_ptr, 40, x[1:])),
        ("x has dtype bfloat16, expected float16", lambda: ops.spmv(values, deltas, row_ptr, 40, x.bfloat16())),
        (r"x has shape \[1, 40\], expected 1", lambda: ops.spmv(values, deltas, row_ptr, 40, x[None])),
        ("bias has dtype float32", lambda: ops.linear(x, values, deltas, row_ptr, 40, x.float()[:16])),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    with pytest.raises(RuntimeError, match="values"):
        ops.spmv(None, deltas, row_ptr, 40, x)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_tensors_on_two_devices_are_named() -> None:
    values, deltas, row_ptr = ops.pack(torch.ones(4, 8, dtype=torch.float16, device="cuda"))
    with pytest.raises(RuntimeError, match="x is on cpu, values is on cuda:0"):
        ops.spmv(values, deltas, row_ptr, 8, torch.ones(8, dtype=torch.float16))


# The ops' manners: fakes, gradients, compilation


@pytest.mark.slow
@on_devices
def test_opcheck(device: str) -> None:
    w = random_weight(12, 40, 0.4, torch.float16).to(device)
    x = random_vector(40, dtype=torch.float16).to(device)
    macko = torch.ops.macko
    torch.library.opcheck(macko.pack, (w, 0, [0]))
    for bits in BITS:
        torch.library.opcheck(macko.pack, (w, 0, [bits]))
        for grad in (False, True):
            torch.library.opcheck(macko.spmv, (*ops.pack(w, bits), 40, x.clone().requires_grad_(grad), bits))


@on_devices
def test_the_gradient_of_spmv(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    w = random_weight(24, 40, 0.4, dtype).to(device)
    x = random_vector(40, dtype=dtype).to(device).requires_grad_()
    grad = random_vector(24, dtype=dtype, seed=2).to(device)
    for y in (ops.spmv(*ops.pack(w), 40, x), ops.ec_spmv((*ops.ec_pack(w), 24, 40), x)):
        (found_x,) = torch.autograd.grad(y, x, grad)
        assert_close_spmv(found_x, w.t(), grad)


@on_devices
def test_no_grad_gives_the_same_without_a_gradient(device: str) -> None:
    packed = ops.pack(random_weight(24, 40, 0.4, torch.float16).to(device))
    x = random_vector(3, 40, dtype=torch.float16).to(device).requires_grad_()
    y = ops.linear(x, *packed, 40)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            same = ops.linear(x, *packed, 40)
            assert_same_bits(ops.spmv(*packed, 40, x[0]), y[0].detach())
        assert_same_bits(same, y.detach())
        assert y.requires_grad
        assert not same.requires_grad


@on_devices
def test_packing_is_compiled_whole(device: str) -> None:
    packed = ops.pack(random_weight(24, 40, 0.4, torch.float16).to(device))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def repack(values: Tensor, deltas: Tensor, row_ptr: Tensor) -> Packed:
        return ops.pack(ops.unpack(values, deltas, row_ptr, 40))

    for got, wanted in zip(repack(*packed), packed, strict=True):
        assert_same_bits(got, wanted)
