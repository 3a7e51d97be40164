"""The layout sell: how a GPU with much bandwidth per SM multiplies one token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from .base import PackedWeight, Shape, any_size
from .canonical import MackoWeight

#: Shared memory that the kernel wants at least besides x, in bytes: four stages of four warps with gaps of 6 bits,
#: zeros after x, partial sums, barriers (csrc/sell/sell.h). GPUs of 7.5 have 64 KB.
_SHARED_BYTES = 35 * 1024


@dataclasses.dataclass(frozen=True, eq=False)
class SellWeight(PackedWeight):
    """How a GPU with much bandwidth per SM runs a macko weight; csrc/sell/sell.h specifies the bytes. CUDA only.

    Made on the device for its number of SMs, held instead of the canonical tensors, never saved: `to_macko` gives what
    is. Runs on another GPU too, but best on one like that which it was made on.

    Attributes:
        data: [slots * slot size], float16 or bfloat16: values, and gaps among them.
        bases: [groups * 32], int16. blocks: [blocks, 8], int32. perm: [2, rows], int32: perm and order.
        rows, cols: shape of the dense weight, at most 65535 columns.
        gap_bits: 2 to 6. warps, head: of a block. entries: non-zeros and explicit zeros held.
        delta_bits: of the canonical weight that it was made from.
    """

    format: ClassVar[str] = "sell"
    device_types: ClassVar[tuple[str, ...]] = ("cuda",)
    is_layout: ClassVar[bool] = True
    #: It is taken up to 1.05 times the least time: only its products can have norms and gates in them (macko.fuse),
    #: which saves launches of a microsecond or two.
    handicap: ClassVar[float] = 1 / 1.05
    values_name: ClassVar[str] = "data"
    overlaps: ClassVar[bool] = True
    makes_norm: ClassVar[bool] = True
    parts_from: ClassVar[int | None] = 65  # more than macko_stream_tokens (csrc/torch/path.h) can say
    limits: ClassVar[Mapping[str, Sequence[int]]] = {
        **PackedWeight.limits, "cols": range(2**16), "gap_bits": range(2, 7), "warps": range(2, 13, 2), "head": range(5)
    }  # fmt: skip

    data: Tensor
    bases: Tensor
    blocks: Tensor
    perm: Tensor
    rows: int
    cols: int
    gap_bits: int
    warps: int
    head: int
    entries: int
    delta_bits: int = 4

    @classmethod
    def from_macko(cls, weight: MackoWeight, gap_bits: int = 0, warps: int = 0, blocks: int = 0) -> Self:
        """Lays out a macko weight that is on a GPU.

        Args:
            gap_bits: 2 to 6, the width of a gap; 0 takes the smallest layout.
            warps, blocks: that decode in a block, and blocks; 0 takes what suits this GPU.

        Raises:
            RuntimeError: wrong device or dtype, content that points outside the matrix, or a vector of `cols` elements
                does not fit this GPU's shared memory.
        """
        return cls._laid_out(weight, gap_bits, warps, blocks)

    @classmethod
    def runs(cls, device: torch.device, dtype: torch.dtype, cols: int = 0) -> bool:
        """Also whether its kernel has shared memory for x, and its base columns of 16 bits reach."""
        if not super().runs(device, dtype):
            return False
        shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
        return cols < 2**16 and 2 * cols + _SHARED_BYTES <= shared

    @classmethod
    def from_dense(cls, w: Tensor, delta_bits: int = 4, gap_bits: int = 0) -> Self:
        """Packs w [rows, cols], which is on a GPU."""
        return cls.from_macko(MackoWeight.from_dense(w, delta_bits), gap_bits)

    @classmethod
    def shapes(cls, rows: Any, cols: Any, options: Sequence[int]) -> list[Shape]:
        return [
            (None, any_size() * 32),
            (torch.int16, any_size() * 32),
            (torch.int32, any_size(), 8),
            (torch.int32, 2, rows),
        ]

    def validate(self) -> None:
        """Checks that this is what packing its own matrix gives, for as many blocks and warps as it has.

        Raises:
            ValueError: it is not; names the first thing that differs.
        """
        if reason := self._guarded(self._misplaced):
            self._refuse(reason)
        blocks = self.blocks.shape[0]
        again = self._guarded(lambda: self.from_macko(self.to_macko(), self.gap_bits, self.warps, blocks))
        for name, size in again.sizes().items():
            if size != getattr(self, name):
                self._refuse(f"{name} is {getattr(self, name)}, packing its matrix gives {size}")
        for name, tensor in again.tensors().items():
            if not torch.equal(tensor.view(torch.int16), getattr(self, name).view(torch.int16)):
                self._refuse(f"{name} is not what packing its matrix gives")

    def _misplaced(self) -> str:
        """Why reading it would be unsafe, or nothing."""
        for name, dtypes, dim in (
            ("data", (torch.float16, torch.bfloat16), 1),
            ("bases", (torch.int16,), 1),
            ("blocks", (torch.int32,), 2),
            ("perm", (torch.int32,), 2),
        ):
            tensor = getattr(self, name)
            if tensor.dtype not in dtypes or tensor.dim() != dim or not tensor.is_contiguous():
                wanted = f"{' or '.join(map(str, dtypes))}, {dim} dimension(s), contiguous"
                return f"{name} has dtype {tensor.dtype} and shape {list(tensor.shape)}, expected {wanted}"
        if self.blocks.shape[1] != 8 or not len(self.blocks):
            return f"blocks has shape {list(self.blocks.shape)}, expected [blocks, 8]"
        if self.perm.shape != (2, self.rows):
            return f"perm has shape {list(self.perm.shape)}, expected [2, {self.rows}]"
        slot, group, row, rows, chunks, long_chunks, steps, stages = self.blocks.cpu().long().unbind(1)
        before = lambda sizes: sizes.cumsum(0) - sizes  # noqa: E731
        bad_steps = (steps < 1) | (long_chunks > chunks) | ((long_chunks < chunks) & (steps < 2)) | (steps > 128)
        if bool((self.blocks < 0).any()):
            return "blocks has negative sizes"
        if int(rows.sum()) != self.rows or not torch.equal(row, before(rows)):
            return "rows of blocks do not add up"
        if bool(bad_steps.any() or (chunks * (rows | 1) > 2176).any()):  # from here on no number is large
            return "a block's chunks do not add up"
        groups, long_groups = -(-rows * chunks // 32), -(-rows * long_chunks // 32)
        warp = torch.arange(self.warps)
        count = lambda of: (of[:, None] + self.warps - 1 - warp) // self.warps  # noqa: E731  groups of each warp
        lengths = count(groups) * (steps - 1)[:, None] + count(long_groups)
        lengths[:, 1::2] = lengths[:, ::2]  # warps go in pairs
        after = (lengths - lengths.clamp(max=self.head)).sum(1)
        others = (groups - self.warps).clamp(min=0)
        heads = len(rows) * self.warps
        slots = (heads * self.head + int(after.sum())) * (512 + 32 * self.gap_bits)
        checks = {
            "a block's stages are not those of its first warp": not torch.equal(stages, lengths[:, 0]),
            "blocks do not follow each other in data": not torch.equal(slot, before(after)),
            "blocks do not follow each other in bases": not torch.equal(group, before(others)),
            f"data has {self.data.numel()} elements, expected {slots}": self.data.numel() != slots,
            f"bases has {self.bases.numel()} elements": self.bases.numel() != (heads + int(others.sum())) * 32,
            "perm is not a permutation": not torch.equal(
                self.perm.sort().values, torch.arange(self.rows, device=self.device, dtype=torch.int32).expand(2, -1)
            ),
        }
        return next((reason for reason, wrong in checks.items() if wrong), "")

    def _values(self) -> Tensor:
        return self.data.view(-1, 512 + 32 * self.gap_bits)[:, :512]
