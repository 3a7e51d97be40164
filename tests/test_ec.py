"""EC-CSR: what extraction, packing, the checks and the kernels can get wrong. Same tests on the CPU and on a GPU."""

import dataclasses
import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import macko.ops as ops
from benchmarks.formats import BAR_DENSITIES, BARS, PACKED
from macko import EcWeight, _library
from tests.common import (
    CPU_DTYPES,
    HALVES,
    MASKS,
    assert_close_spmv,
    assert_same_bits,
    device_dtypes,
    devices,
    integer_problem,
    mask,
    random_bits,
    random_vector,
    random_weight,
    torch_threads,
)
from tests.layouts import LAYOUTS

#: The paper's layout with both widths and in odd ones, and every way in which ours differs.
OPTIONS: dict[str, dict[str, int]] = {
    "paper4": {"delta_bits": 4},
    "paper8": {"delta_bits": 8},
    "low": {"delta_bits": 5, "max_height": 4, "max_width": 256},
    "wide_blocks": {"delta_bits": 6, "min_width": 256},
    "no_blocks": {"delta_bits": 3, "max_height": 1},
    "blocks_and_few_lanes": {"delta_bits": 7, "lanes": 8},
    "lanes4": {"delta_bits": 0, "lanes": 4, "max_height": 1},
    "lanes16": {"delta_bits": 3, "lanes": 16, "max_height": 1, "tile_rows": 256},
    "slabs": {"delta_bits": 0, "lanes": 1, "max_height": 1, "tile_rows": 1024, "max_slabs": 4},
}
SHAPES = ((0, 0), (0, 5), (5, 0), (1, 1), (3, 7), (127, 129), (130, 513), (300, 64), (2, 5003), (257, 1024))


def alike_rows(rows: int, cols: int, density: float, dtype: torch.dtype) -> Tensor:
    """Groups of 16 rows that share most of their columns: blocks of every height come out of it."""
    groups = mask("uniform", -(-rows // 16), cols, density).repeat_interleave(16, 0)[:rows]
    few = mask("uniform", rows, cols, 0.97, seed=5)
    return random_weight(rows, cols, 1.0, dtype) * (groups & few)


def heights(packed: tuple[Tensor, ...]) -> list[int]:
    return packed[6][:-1, 0].tolist()


def assert_packs(w: Tensor, options: dict[str, int]) -> tuple[Tensor, ...]:
    """Nothing lost, nothing twice, every rule kept."""
    packed = ops.ec_pack(w, **options)
    assert_same_bits(ops.ec_unpack((*packed, *w.shape)), torch.where(w == 0, 0, w))
    assert ops.ec_check((*packed, *w.shape)).tolist() == [0, 0, -1, 0]
    assert int(packed[0].count_nonzero()) == int(w.count_nonzero())
    return packed


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("device", "dtype"), device_dtypes())
def test_every_shape(shape: tuple[int, int], name: str, device: str, dtype: torch.dtype) -> None:
    rows, cols = shape
    for density in (0.0, 0.02, 0.3, 1.0):
        w, x, y = integer_problem(rows, cols, density, dtype)
        packed = assert_packs(w.to(device), OPTIONS[name])
        assert_same_bits(ops.ec_spmv((*packed, rows, cols), x.to(device)).cpu() + 0, y + 0)
        w = random_weight(rows, cols, density, dtype)
        x, bias = random_vector(cols, dtype=dtype), random_vector(rows, dtype=dtype, seed=2)
        packed = ops.ec_pack(w.to(device), **OPTIONS[name])
        assert_close_spmv(ops.ec_linear(x.to(device), (*packed, rows, cols), bias.to(device)), w, x, bias)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("device", devices())
def test_every_mask(kind: str, name: str, device: str) -> None:
    w = random_weight(400, 1500, 0.25, torch.float16, kind=kind)
    packed = assert_packs(w.to(device), OPTIONS[name])
    x = random_vector(1500, dtype=torch.float16)
    assert_close_spmv(ops.ec_spmv((*packed, 400, 1500), x.to(device)), w, x)


@pytest.mark.parametrize("bits", [3, 4, 5, 8])
@pytest.mark.parametrize(("device", "dtype"), device_dtypes())
def test_blocks_of_every_height(bits: int, device: str, dtype: torch.dtype) -> None:
    w = alike_rows(140, 2300, 0.8, dtype)
    packed = assert_packs(w.to(device), {"delta_bits": bits})
    assert heights(packed)[:4] == [16, 8, 4, 2]
    x = random_vector(2300, dtype=dtype)
    assert_close_spmv(ops.ec_spmv((*packed, 140, 2300), x.to(device)), w, x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_bytes_equal_the_cpus(name: str) -> None:
    weights = [random_weight(300, 1111, 0.3, torch.float16, kind=kind) for kind in MASKS]
    weights += [alike_rows(270, 2300, 0.8, torch.bfloat16), random_weight(20, 70_000, 0.05, torch.float16)]
    weights += [random_bits(140, 300, 0.5, dtype, 0) for dtype in HALVES]  # NaN, Inf
    weights += [random_weight(*shape, density, torch.float16) for shape in SHAPES for density in (0.0, 0.1, 1.0)]
    for w in weights:
        for got, wanted in zip(ops.ec_pack(w.cuda(), **OPTIONS[name]), ops.ec_pack(w, **OPTIONS[name]), strict=True):
            assert_same_bits(got, wanted)


@pytest.mark.parametrize("device", devices())
def test_distances_around_the_largest_delta(device: str) -> None:
    for bits, lanes in itertools.product((3, 4, 8), (1, 32)):
        largest = 2**bits - 1
        for gap in (largest - 1, largest, largest + 1, 2 * largest, 2 * largest + 1, 5 * largest + 3):
            w = torch.zeros(5, 40 * gap + 10, dtype=torch.float16)
            w[0, ::gap], w[2, 3::gap], w[4, 9] = 1.5, -2.5, 4
            assert_packs(w.to(device), {"delta_bits": bits, "lanes": lanes, "max_height": 1})


def test_a_zero_of_padding_stands_where_another_block_has_a_value() -> None:
    # Rows 0 and 1 share 256 columns 0, 1, 2...; what is left of row 0 needs explicit zeros among them.
    w = torch.zeros(2, 600, dtype=torch.float16)
    w[:, :256] = 1
    w[0, 300::70] = 2
    w[0, 0] = 3
    packed = assert_packs(w, {"delta_bits": 4})
    assert heights(packed)[0] == 2


@pytest.mark.parametrize("count", [*range(118, 138), 383, 384, 385])
def test_rows_around_a_whole_chunk(count: int) -> None:
    for stride, bits in itertools.product((1, 2, 9), (3, 4, 8)):
        w = torch.zeros(3, count * stride, dtype=torch.float16)
        w[1, ::stride] = 1
        for lanes in (1, 8, 32):
            assert_packs(w, {"delta_bits": bits, "lanes": lanes, "max_height": 1})


@pytest.mark.parametrize("device", devices())
def test_empty_rows_and_columns(device: str) -> None:
    for name in OPTIONS:
        w, x, _ = integer_problem(300, 700, 0.2, torch.float16)
        w[:130] = 0
        w[290:] = 0
        w[:, 100:300] = 0
        packed = assert_packs(w.to(device), OPTIONS[name])
        y = (w.float() @ x.float()).half()
        assert_same_bits(ops.ec_spmv((*packed, 300, 700), x.to(device)).cpu() + 0, y + 0)


@pytest.mark.parametrize("device", devices())
def test_more_columns_than_16_bits_and_than_shared_memory(device: str) -> None:
    for name in ("paper4", "lanes4", "slabs"):
        w, x, y = integer_problem(20, 140_001, 0.05, torch.float16)
        packed = assert_packs(w.to(device), OPTIONS[name])
        assert packed[2].dtype == torch.int32
        assert_same_bits(ops.ec_spmv((*packed, 20, 140_001), x.to(device)).cpu() + 0, y + 0)


def test_any_number_of_threads_gives_the_same_bytes() -> None:
    w = random_weight(1000, 900, 0.4, torch.float16, kind="uneven_rows")
    for name in OPTIONS:
        with torch_threads(1):
            one = ops.ec_pack(w, **OPTIONS[name])
        with torch_threads(3):
            three = ops.ec_pack(w, **OPTIONS[name])
        for got, wanted in zip(three, one, strict=True):
            assert_same_bits(got, wanted)


def test_every_cpu_path_packs_and_multiplies_alike(cpu_path: str) -> None:
    for dtype, name in itertools.product(CPU_DTYPES, OPTIONS):
        w, x, y = integer_problem(200, 777, 0.4, dtype)
        packed = assert_packs(w, OPTIONS[name])
        assert_same_bits(ops.ec_spmv((*packed, 200, 777), x) + 0, y + 0)


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "shape", "layout"), BARS, ids=" ".join)
def test_bytes_a_nonzero(mask: str, shape: str, layout: str) -> None:
    """The sizes that a study of the paper found, and those that ours was to beat them by, on the very same masks."""
    rows, cols = map(int, shape.split("x"))
    for density, most in zip(BAR_DENSITIES, BARS[mask, shape, layout], strict=True):
        w = random_weight(rows, cols, density, torch.float16, kind=mask)
        assert PACKED[layout](w).nbytes / int(w.count_nonzero()) <= most


def test_blocks_where_rows_share_columns() -> None:
    w = alike_rows(512, 2048, 0.7, torch.float16)
    assert EcWeight.smallest(w).max_height == 16
    assert EcWeight.smallest(random_weight(512, 2048, 0.3, torch.float16)).max_height == 1


@pytest.mark.parametrize(
    "kind", ["one full row", "same rows", "full", "empty tile", "few rows", "one row", "uneven", "diagonal", *MASKS]
)
def test_smallest_is_the_smallest_of_what_there_is(kind: str) -> None:
    if kind in MASKS:
        w = random_weight(260, 900, 0.15, torch.float16, kind=kind)
    elif kind == "few rows":
        w = random_weight(3, 65_536, 0.4, torch.float16)
    elif kind == "one row":
        w = random_weight(1, 4096, 0.5, torch.float16)
    elif kind == "same rows":
        w = random_weight(1, 777, 0.5, torch.float16).repeat(300, 1)
    elif kind == "full":
        w = random_weight(130, 260, 1.0, torch.float16)
    elif kind == "diagonal":
        w = torch.eye(400).half()
    else:
        w = random_weight(260, 1000, 0.3, torch.float16)
        if kind == "empty tile":
            w[:128] = 0
        w[{"one full row": slice(1, None), "uneven": slice(3, 250)}.get(kind, slice(0, 0))] = 0
        w[0] += kind == "one full row"
    smallest = EcWeight.smallest(w)
    others = [EcWeight.paper(w, bits) for bits in (4, 8)] + [EcWeight.from_dense(w)]
    others += [EcWeight.from_dense(w, lanes=4, delta_bits=4, max_height=16, min_width=512)]
    others += [EcWeight.from_dense(w, lanes=n, tile_rows=1024, max_slabs=5 - n) for n in (4, 2, 1)]
    assert smallest.nbytes == min(other.nbytes for other in others)
    assert_same_bits(smallest.to_dense(), torch.where(w == 0, 0, w))


def test_auto_takes_the_width_of_fewest_bytes() -> None:
    for density in (0.5, 0.3, 0.1, 0.03):
        w = random_weight(256, 2048, density, torch.float16)
        auto = EcWeight.from_dense(w, delta_bits=0, lanes=4)
        fixed = [EcWeight.from_dense(w, delta_bits=bits, lanes=4).nbytes for bits in range(3, 9)]
        assert auto.nbytes == min(fixed)


@pytest.mark.gpu
def test_without_thread_block_clusters() -> None:
    for name in ("paper4", "paper8", "slabs"):
        w, x, y = integer_problem(700, 3000, 0.4, torch.float16)
        packed = ops.ec_pack(w.cuda(), **OPTIONS[name])
        with _library.plan("ec_cluster=0"):
            assert_same_bits(ops.ec_spmv((*packed, 700, 3000), x.cuda()).cpu() + 0, y + 0)


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
def test_opcheck(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    w = random_weight(40, 300, 0.3, dtype).to(device)
    x = torch.randn(300, dtype=dtype, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.macko.pack, (w, LAYOUTS.index("ec"), [4, 32, 16, 128, 8192, 128, 1]))
    torch.library.opcheck(torch.ops.macko.ec_spmv, (*ops.ec_pack(w), 40, 300, x))


def corrupted(**changes: Any) -> EcWeight:
    """Blocks of two rows and a few single values, and what is to be changed."""
    w = torch.zeros(3, 600, dtype=torch.float16)
    w[:2, :256] = 1
    w[2, [5, 9, 400]] = 2
    return dataclasses.replace(EcWeight.paper(w), **changes)


def changed(tensor: Tensor, index: Any, value: Any) -> Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("sets", (0, 0), 3, r"sets\[0\]"),
        ("sets", (0, 3), 9, r"sets\[0\]"),
        ("sets", (0, 1), 16, r"sets\[0\]"),
        ("sets", (1, 4), 7, r"sets\["),
        ("sets", (2, 6), 0, r"sets\[2\]"),
        ("tile_ptr", (0, 0), 1, r"tile_ptr\[0, 0\] is 1"),
        ("tile_ptr", (0, 1), 9, r"tile_ptr\[0, 1\] is 9"),
        ("block_indptr", 0, 128, "block_indptr of set 0 is 128 at block 0"),
        ("block_indptr", 1, 200, "block_indptr of set 0 is 200 at block 1"),
        ("block_indptr", 1, 512, "is 512 at block 1"),
        ("row_indices", 0, 1, r"row_indices\[1\] is 1"),
        ("row_indices", 0, 3, r"row_indices\[0\] is 3"),
        ("row_indices", 0, -1, r"row_indices\[0\] is -1"),
        ("base_indices", 31, 600, "is at column 600, the matrix has 600 columns"),
        ("base_indices", 1, 0, "is there twice"),
        ("delta_indices", 0, 1, "begins a lane, and its delta is not 0"),
        ("delta_indices", 0, 8, "begins a lane, and its delta is not 0"),
        ("block_values", 0, -0.0, "value 0 of set 0 is -0.0"),
    ],
)
def test_validate_names_what_is_wrong(name: str, index: Any, value: Any, message: str) -> None:
    good = corrupted()
    good.validate()
    tensor = getattr(good, name)
    as_signed = tensor.view(torch.int16) if tensor.dtype == torch.uint16 else tensor
    bad = changed(as_signed, index, value).view(tensor.dtype)
    with pytest.raises(ValueError, match=f"not an ec weight: .*{message}"):
        dataclasses.replace(good, **{name: bad}).validate()


def test_validate_wants_each_row_once_where_lanes_are_few() -> None:
    packed = EcWeight.from_dense(random_weight(40, 300, 0.3, torch.float16), lanes=4)
    rows = packed.row_indices.tolist()
    packed.validate()
    for value in (rows[9], -1):
        with pytest.raises(ValueError, match="row_indices"):
            dataclasses.replace(packed, row_indices=changed(packed.row_indices, 3, value)).validate()


def test_validate_wants_a_permutation_of_the_columns() -> None:
    w = random_weight(1024, 1024, 0.05, torch.float16)
    w[:, ::4] = random_weight(1024, 256, 0.9, torch.float16)
    packed = EcWeight.from_dense(w, **OPTIONS["slabs"])
    packed.validate()
    assert packed.col_order.numel() == 1024
    order = packed.col_order.view(torch.int16)
    twice = changed(order, 5, int(order[6])).view(torch.uint16)
    with pytest.raises(ValueError, match=r"col_order\[6\]"):
        dataclasses.replace(packed, col_order=twice).validate()


@pytest.mark.slow
def test_validate_is_not_led_by_the_shape_that_is_claimed() -> None:
    """No division by a tile of no rows; no bit for each place of a matrix that is mostly claimed."""
    packed = EcWeight.from_dense(random_weight(1000, 70_000, 0.001, torch.float16))
    for rows in (0, 1, 999, 1025, 2**31 - 2):
        if rows != 999:
            with pytest.raises(ValueError, match=f"not an ec weight: .*tile_ptr has shape .* no cut of {rows} rows"):
                dataclasses.replace(packed, rows=rows).validate()
    with pytest.raises(ValueError, match="row_indices"):
        dataclasses.replace(packed, rows=999).validate()
    dataclasses.replace(packed, cols=2**31 - 2).validate()  # columns that are empty
    with pytest.raises(ValueError, match="at most 2\\^31 - 2 rows and columns"):
        dataclasses.replace(packed, cols=2**31 - 1).validate()
    empty = EcWeight.paper(torch.zeros(0, 5))
    with pytest.raises(ValueError, match="tile_ptr has shape"):
        dataclasses.replace(empty, tile_ptr=torch.zeros(0, 9, dtype=torch.int32)).validate()
    with pytest.raises(RuntimeError, match="macko::ec_spmv: tile_ptr has shape"):
        ops.ec_spmv((*packed.tensors().values(), 0, 70_000), torch.zeros(70_000).half())


@pytest.mark.parametrize("cols", [600, 70_000])
def test_validate_finds_a_value_twice_in_dense_and_in_nearly_empty_tiles(cols: int) -> None:
    """A bit for each place of a tile where that is few, else its non-zeros are sorted."""
    w = torch.zeros(300, cols, dtype=torch.float16)
    w[290, ::50] = torch.arange(1, cols // 50 + 1).half()
    w[[7, 133], 5] = 3
    packed = EcWeight.from_dense(w)
    packed.validate()
    blocks = packed.tile_ptr[0, 2] * 32
    bases = packed.base_indices.view(torch.int16 if cols == 600 else torch.int32)
    row = int((packed.row_indices == 290).nonzero()[0]) * packed.lanes
    assert row >= blocks
    again = changed(bases, row + 1, int(bases[row])).view(packed.base_indices.dtype)
    with pytest.raises(ValueError, match=f"of set 0, at column {int(bases[row])}, is there twice"):
        dataclasses.replace(packed, base_indices=again).validate()


@pytest.mark.slow
def test_out_of_memory_is_an_error() -> None:
    """67 MB for the shared columns of a tile of 4 million columns, in a process that has 40."""
    code = """
import resource, torch, macko.ops as ops
torch.set_num_threads(1)
w = torch.zeros(1, 1 << 22, dtype=torch.float16)
ops.ec_pack(w[:, :99])
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (40 << 20),) * 2)
try:
    ops.ec_pack(w)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("macko::pack: out of memory")


def test_pack_names_a_bad_option() -> None:
    bad = {"delta_bits": (2, 9, 0), "lanes": (3, 64), "max_height": (32,), "min_width": (100,), "tile_rows": (256,)}
    for name, value in ((name, value) for name, values in {**bad, "max_slabs": (9,)}.items() for value in values):
        with pytest.raises(RuntimeError, match=f"macko::pack: .*{name} is {value}"):
            ops.ec_pack(torch.ones(4, 4), **{name: value})
    with pytest.raises(RuntimeError, match=r"macko::pack: .*max_width 256"):
        ops.ec_pack(torch.ones(4, 4), min_width=512, max_width=256)


@pytest.mark.parametrize("device", devices())
def test_ops_name_a_bad_argument(device: str) -> None:
    packed: tuple[Any, ...] = (*ops.ec_pack(random_weight(40, 300, 0.3, torch.float16).to(device)), 40, 300)
    x = torch.zeros(300, dtype=torch.float16, device=device)
    for place, bad, message in (
        (0, packed[0].float().double(), "block_values has dtype float64"),
        (1, packed[1].short(), "delta_indices has dtype int16, expected uint8"),
        (2, packed[2][:-1], "block_indptr has"),
        (5, packed[5][0], "tile_ptr has shape"),
        (8, 2000, "tile_ptr has shape"),
        (9, 70_000, "base_indices has dtype"),
    ):
        with pytest.raises(RuntimeError, match=f"macko::ec_spmv: {message}"):
            torch.ops.macko.ec_spmv(*packed[:place], bad, *packed[place + 1 :], x)
    with pytest.raises(RuntimeError, match="x has 299 elements, the matrix has 300 columns"):
        ops.ec_spmv(packed, x[1:])
    with pytest.raises(RuntimeError, match="bias has 39 elements, the matrix has 40 rows"):
        ops.ec_linear(x, packed, x[:39])


hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


@given(st.data())
@settings(max_examples=60)
def test_any_matrix_comes_back(data: st.DataObject) -> None:
    rows, cols = data.draw(st.integers(0, 200)), data.draw(st.integers(0, 700))
    seed, density = data.draw(st.integers(0, 2**31)), data.draw(st.floats(0, 1))
    options = OPTIONS[data.draw(st.sampled_from(sorted(OPTIONS)))]
    dtype = data.draw(st.sampled_from(CPU_DTYPES))
    kind = data.draw(st.sampled_from(("alike", "any bits", *MASKS))) if rows and cols else "uniform"
    if kind == "alike":
        w = alike_rows(rows, cols, density, dtype)
    elif kind == "any bits":  # NaN, Inf
        w = random_bits(rows, cols, density, dtype, seed)
    else:
        w = random_weight(rows, cols, density, dtype, kind=kind, seed=seed)
    assert_packs(w, options)
