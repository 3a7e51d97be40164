"""The canonical format: bytes, round trips, spmv, hostile content."""

import pytest
import torch

import macko.ops as ops
from macko import reference
from tests.common import (
    MASKS,
    assert_close_spmv,
    assert_same_bits,
    device_dtypes,
    integer_problem,
    random_vector,
    random_weight,
)

BITS = (2, 4, 8)


def assert_packs(w: torch.Tensor, delta_bits: int = 4, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    packed = ops.pack(w.to(device), delta_bits)
    for got, wanted in zip(packed, reference.pack(w, delta_bits), strict=True):
        assert_same_bits(got, wanted)
    assert_same_bits(ops.unpack(*packed, w.shape[1], delta_bits), torch.where(w == 0, 0, w))
    return packed


@pytest.mark.parametrize(("device", "dtype"), device_dtypes())
@pytest.mark.parametrize("kind", MASKS)
def test_bytes_of_every_mask(device: str, dtype: torch.dtype, kind: str) -> None:
    for bits in BITS:
        for d in (0.02, 0.5):
            assert_packs(random_weight(17, 203, d, dtype, kind=kind), bits, device)


@pytest.mark.parametrize(("device", "dtype"), device_dtypes())
def test_spmv_bound(device: str, dtype: torch.dtype) -> None:
    for bits in BITS:
        w, x = random_weight(65, 1003, 0.4, dtype), random_vector(1003, dtype=dtype)
        y = ops.spmv(*ops.pack(w.to(device), bits), 1003, x.to(device), bits)
        assert_close_spmv(y, w, x)
        w, x, y = integer_problem(65, 1003, 0.4, dtype)
        assert_same_bits(ops.spmv(*ops.pack(w.to(device), bits), 1003, x.to(device), bits) + 0, y + 0)
