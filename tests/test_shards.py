"""Shards of packed weights: what a process of tensor parallelism holds is what packing its rows or columns gives."""

from pathlib import Path

import pytest
import torch

from macko import EcWeight, MackoWeight
from macko.weights import (
    SLIDE_ELEMENTS,
    BitmapWeight,
    ByteWeight,
    Dense8Weight,
    Dense12Weight,
    PackedWeight,
    SlideWeight,
    Sparse8Weight,
    Sparse11Weight,
    TileWeight,
)
from macko.weights.shards import joined
from tests.common import assert_same_bits, device_dtypes, random_weight, two_processes


def assert_same_weight(got: PackedWeight, wanted: PackedWeight) -> None:
    got.validate()
    assert (got.format, got.sizes()) == (wanted.format, wanted.sizes())
    for name, tensor in wanted.tensors().items():
        assert_same_bits(getattr(got, name), tensor)


@pytest.mark.parametrize(("device", "dtype"), device_dtypes())
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("density", [0.02, 0.5])
def test_a_cut_within_a_byte_and_a_chunk(device: str, dtype: torch.dtype, bits: int, density: float) -> None:
    w = random_weight(61, 101, density, dtype).to(device)
    w[5:9] = 0  # a cut between empty rows
    whole = MackoWeight.from_dense(w, bits)
    ends = whole.row_ptr.tolist()
    assert len({end % 8 for end in ends}) == 8  # every place of a chunk is one where a row begins
    for start in range(62):
        for stop in (start, min(61, start + 1), (start + 61) // 2, 61):
            if start <= stop:
                assert_same_weight(whole.cut(0, start, stop), MackoWeight.from_dense(w[start:stop], bits))
    for start, stop in ((0, 50), (50, 101), (17, 18), (40, 40)):
        assert_same_weight(whole.cut(1, start, stop), MackoWeight.from_dense(w[:, start:stop].contiguous(), bits))


@pytest.mark.parametrize("kind", [TileWeight, Sparse11Weight, BitmapWeight, EcWeight, Dense12Weight])
def test_a_cut_of_every_other_format_is_what_packing_gives(kind: type[PackedWeight]) -> None:
    w = random_weight(70, 300, 0.5, torch.bfloat16)
    for dim, start, stop in ((0, 3, 67), (1, 64, 201)):
        part = w.narrow(dim, start, stop - start).contiguous()
        wanted = kind.from_macko(MackoWeight.smallest(part)) if kind.is_layout else kind.from_dense(part)
        assert_same_weight(kind.from_dense(w).cut(dim, start, stop), wanted)


def test_a_format_that_files_hold_too() -> None:
    w = random_weight(64, 96, 0.2, torch.float16)
    whole = EcWeight.from_dense(w, delta_bits=8, lanes=4)
    assert_same_weight(whole.cut(0, 3, 20), EcWeight.from_dense(w[3:20], delta_bits=8, lanes=4))
    assert_same_weight(whole.cut(1, 3, 20), EcWeight.from_dense(w[:, 3:20].contiguous(), delta_bits=8, lanes=4))


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("density", [0.3, 1.0])
def test_parts_of_8_bits_are_joined_by_their_codes(kind: int, density: float) -> None:
    """Of both formats too: their products with 16 bits would be other ones."""
    dense = [random_weight(rows, 256, density, torch.bfloat16, seed=rows) for rows in (70, 64, 58)]
    mixed: tuple[type[ByteWeight], ...] = (Dense8Weight, Sparse8Weight, Dense8Weight)
    for formats in ((Dense8Weight,) * 3, (Sparse8Weight,) * 3, mixed):
        parts = [made.from_dense(w, kind) for made, w in zip(formats, dense, strict=True)]
        for rows in (192, 200):
            whole = joined(parts, rows)
            assert whole is not None
            whole.validate()
            assert whole.shape == (rows, 256)
            if formats is not mixed:
                assert type(whole) is formats[0]
            elif rows == 192:
                assert type(whole) is (Sparse8Weight if density < 1 else Dense8Weight)
            numbers, scales = whole.coded()
            assert_same_bits(numbers[:192], torch.cat([part.codes() for part in parts]))
            assert_same_bits(scales[:192], torch.cat([part.scales for part in parts]))
            assert not numbers[192:].float().any()


def test_parts_that_hold_values_in_several_ways_are_refused() -> None:
    w = random_weight(64, 256, 0.5, torch.bfloat16)
    parts = [Sparse8Weight.from_dense(w, 0), Dense8Weight.from_dense(w, 1), MackoWeight.from_dense(w)]
    assert joined(parts[2:], 64) is None
    with pytest.raises(ValueError, match="values in fp8 and int8: hold all of them alike"):
        joined(parts[:2], 128)
    with pytest.raises(ValueError, match="values in 16 bits and int8"):
        joined(parts[1:], 128)


GATHERED = """
import os, sys
import pytest, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from macko.weights import Dense8Weight, SlideWeight, Sparse8Weight
from macko.weights.shards import gathered
from tests.common import assert_same_bits, random_weight

store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
for kind in (Dense8Weight, Sparse8Weight):
    w = random_weight(65, 130, 0.5, torch.bfloat16)
    w[:, 100:] *= 8  # the second part has larger values
    for number in (0, 1):
        whole = kind.from_dense(w, number)
        for dim, cut in ((0, 33), (1, 65)):
            ends = [0, cut, w.shape[dim]]
            got = gathered(whole.cut(dim, *ends[rank : rank + 2]), dim, w.shape, mesh)
            got.validate()
            assert_same_bits(got.codes(), whole.codes())
            assert_same_bits(got.scales, whole.scales)
        own = kind.from_dense(w.chunk(2, 1)[rank].contiguous(), number)
        with pytest.raises(ValueError, match="rounded its columns by scales of their own"):
            gathered(own, 1, w.shape, mesh)
w = random_weight(65, 127, 1.0, torch.bfloat16)  # the second part is narrower
w[:, 100:] *= 8
w[:, 6::8] = w[:, 7::8] = 0
for element in range(4):
    if element == 2:
        w = w.half()
    whole = SlideWeight.from_dense(w.bfloat16() if element == 3 else w, 4, element)
    for dim, cut in ((0, 33), (1, 64)):
        ends = [0, cut, w.shape[dim]]
        got = gathered(whole.cut(dim, *ends[rank : rank + 2]), dim, w.shape, mesh)
        got.validate()
        assert got.n == 4
        assert_same_bits(got.tiles, whole.tiles)
        assert_same_bits(got.scale, whole.scale)
w = w.bfloat16()
w[:33, 2::4] = w[:33, 3::4] = 0  # each process has found another pattern
got = gathered(SlideWeight.from_dense(w.chunk(2)[rank], element=0), 0, w.shape, mesh)
assert_same_bits(got.tiles, SlideWeight.from_dense(w, 4, 0).tiles)
dist.barrier()
os._exit(0)  # in some runs the end of gloo's threads aborts a rank that has done all (torch 2.13)
"""


@pytest.mark.slow
def test_gathered_parts_of_8_bits_are_not_rounded_again(tmp_path: Path) -> None:
    two_processes(GATHERED, str(tmp_path / "store"))


def test_what_cannot_be_cut_is_refused() -> None:
    w = random_weight(64, 96, 0.2, torch.float16)
    whole = MackoWeight.from_dense(w)
    assert whole.cut(0, 0, 64) is whole.cut(1, 0, 96) is whole  # nor is the whole copied
    with pytest.raises(ValueError, match="rows 60 to 65 of a weight that has 64"):
        whole.cut(0, 60, 65)
    with pytest.raises(ValueError, match="columns 5 to 4 of a weight that has 96"):
        whole.cut(1, 5, 4)
    w = random_weight(64, 96, 1.0, torch.float16)
    w[:, 4::6] = w[:, 5::6] = 0
    pattern = SlideWeight.from_dense(w, n=3, element=0)
    with pytest.raises(ValueError, match=r"group 5 of 4:6 \(columns 30 to 35\) straddles a cut at column 32"):
        pattern.cut(1, 0, 32)


@pytest.mark.parametrize("element", range(4))
@pytest.mark.parametrize("n", [0, 2, 3, 4])
def test_slide_is_cut_and_joined_by_its_codes(element: int, n: int) -> None:
    """Whose rows keep their scales: a part alone has other ones."""
    dtype = SLIDE_ELEMENTS[element] if element >= 2 else torch.bfloat16
    w = random_weight(70, 96, 1.0, dtype)
    if n:
        w.view(70, -1, 2 * n)[:, :, 2 * n - 2 :] = 0
    w[:, 48:] *= 8  # the second part has larger values
    whole = SlideWeight.from_dense(w, n, element)
    numbers, scales = whole.coded()
    for dim, start, stop in ((0, 3, 67), (0, 0, 64), (1, 0, 48), (1, 48, 96)):
        part = whole.cut(dim, start, stop)
        part.validate()
        assert_same_bits(part.coded()[0], numbers.narrow(dim, start, stop - start))
        assert_same_bits(part.coded()[1], scales[start:stop] if dim == 0 else scales)
        if dim == 1 and element < 2:
            made = SlideWeight.from_columns(w[:, start:stop], w.abs().amax(1), n, element)
            assert_same_weight(made, part)
            alone = SlideWeight.from_dense(w[:, start:stop].contiguous(), n, element)
            assert start == 48 or not torch.equal(alone.scale, scales)
    middle = SlideWeight.from_codes(numbers[3:67], scales[3:67], 0, whole.source)
    again = joined([whole.cut(0, 0, 3), middle, whole.cut(0, 67, 70)], 80)
    assert again is not None
    again.validate()
    assert (again.pattern, again.shape) == (whole.pattern, (80, 96))
    assert_same_bits(again.coded()[0][:70], numbers)
    assert_same_bits(again.coded()[1][:70], scales)
    assert not again.coded()[0][70:].float().any()


@pytest.mark.parametrize(("rows", "cols"), [(3, 0), (0, 0), (0, 5)])
@pytest.mark.parametrize("element", [-1, 0, 1])
def test_parts_without_columns_or_rows_are_joined(element: int, rows: int, cols: int) -> None:
    part = SlideWeight.from_dense(torch.zeros(rows, cols).half(), element=element)
    whole = joined([part, part], 2 * rows + 64)
    assert whole is not None
    whole.validate()
    assert whole.shape == (2 * rows + 64, cols)


def test_slide_beside_other_values() -> None:
    w = random_weight(64, 96, 0.5, torch.bfloat16)
    assert joined([SlideWeight.from_dense(w, 0), MackoWeight.from_dense(w)], 128) is None  # 16 bits both
    for element, other in ((0, MackoWeight.from_dense(w)), (0, Dense8Weight.from_dense(w, 1))):
        with pytest.raises(ValueError, match=r"parts of one matrix have values in .* and slide's int8"):
            joined([SlideWeight.from_dense(w, 0, element), other], 128)
