"""Shards of packed weights: what a process of tensor parallelism holds is what packing its rows or columns gives."""

from __future__ import annotations

import pytest
import torch

from macko import EcWeight, MackoWeight
from macko.formats import PackedWeight, SlideWeight
from macko.shards import sliced
from tests.common import assert_same_bits, device_dtypes, random_weight


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
                assert_same_weight(sliced(whole, 0, start, stop), MackoWeight.from_dense(w[start:stop], bits))
    for start, stop in ((0, 50), (50, 101), (17, 18), (40, 40)):
        assert_same_weight(sliced(whole, 1, start, stop), MackoWeight.from_dense(w[:, start:stop].contiguous(), bits))


def test_the_whole_is_not_copied() -> None:
    whole = MackoWeight.from_dense(random_weight(8, 16, 0.5, torch.float16))
    assert sliced(whole, 0, 0, 8) is whole
    assert sliced(whole, 1, 0, 16) is whole


def test_a_format_that_files_hold_too() -> None:
    w = random_weight(64, 96, 0.2, torch.float16)
    whole = EcWeight.from_dense(w, delta_bits=8, lanes=4)
    assert_same_weight(sliced(whole, 0, 3, 20), EcWeight.from_dense(w[3:20], delta_bits=8, lanes=4))
    assert_same_weight(sliced(whole, 1, 3, 20), EcWeight.from_dense(w[:, 3:20].contiguous(), delta_bits=8, lanes=4))


def test_what_cannot_be_cut_is_refused() -> None:
    w = random_weight(64, 96, 0.2, torch.float16)
    whole = MackoWeight.from_dense(w)
    with pytest.raises(ValueError, match="rows 60 to 65 of a weight that has 64"):
        sliced(whole, 0, 60, 65)
    with pytest.raises(ValueError, match="columns 5 to 4 of a weight that has 96"):
        sliced(whole, 1, 5, 4)
    quantised = SlideWeight.from_dense(w, n=0, element=0)
    for dim, size in enumerate(quantised.shape):
        with pytest.raises(ValueError, match="slide dense int8 cannot be cut"):
            sliced(quantised, dim, 0, 32)
        assert sliced(quantised, dim, 0, size) is quantised
