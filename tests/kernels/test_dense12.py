"""What dense12 alone has: a table for any range of exponents, and packing from a dense weight as it lies."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.common import HALVES, devices
from tests.kernels.codecs import Dense12, assert_packs

pytestmark = pytest.mark.sm80


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
@given(
    rows=st.integers(0, 140),
    cols=st.integers(0, 600),
    exponents=st.tuples(st.integers(0, 255), st.integers(1, 16)),
    listed=st.sampled_from((0.0, 0.004)),
    seed=st.integers(0, 9),
)
def test_round_trip_of_any_shape_and_range_of_exponents(
    device: str, rows: int, cols: int, exponents: tuple[int, int], listed: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    first, count = exponents
    exponent = (first + torch.randint(count, (rows, cols), generator=random)).clamp(max=255)
    rest = torch.randint(256, (rows, cols), generator=random)
    others = torch.randint(2**16, (rows, cols), generator=random)
    bits = (rest & 128) << 8 | exponent << 7 | rest & 127
    bits = torch.where(torch.rand(rows, cols, generator=random) < listed, others, bits)
    for dtype in HALVES[::-1]:
        if dtype == torch.float16:
            bits = bits << 3 & 0x7FF8 | bits & 0x8000 | torch.where(others < 200, others & 7, 0)
        w = bits.to(torch.int32).to(torch.int16).view(dtype)
        table = reference.dense12_pack(w)[1]
        if table[3] > w.numel() // 100:
            with pytest.raises(ValueError, match=f"lacks {table[3]} of {w.numel()} elements"):
                Dense12(dtype, 0).packed(w, device)
        else:
            assert_packs(Dense12(dtype, 0), w, device)


def test_a_list_that_ends_behind_its_slab_is_read_to_the_slabs_end() -> None:
    """On the CPU, where no bytes crash a product: a slab's list is zeros here, which say that 16 elements are 0."""
    packed = Dense12(torch.bfloat16, 0).packed(torch.ones(64, 256, dtype=torch.bfloat16), "cpu")
    slab = packed.data.flatten().view(torch.int32)
    slab[24576 // 4 : 24640 // 4] = -1 << 16  # all bounds: entries 0 to 65535
    behind = torch.arange(1 << 16, dtype=torch.int32) | 3 << 16  # other elements
    data = torch.cat((slab, behind)).view(packed.data.dtype)[: packed.data.numel()]
    w = replace(packed, data=data.view(packed.data.shape)).to_dense()
    assert w.unique().tolist() == [0, 1]
    assert int((w == 0).sum()) == 16
