"""What dense12 alone has: lists that lie. Any range of exponents: test_exact.py."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.codecs import Dense12

pytestmark = pytest.mark.sm80


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
