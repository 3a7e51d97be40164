"""The class of the codec: goes to macko/weights."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from .slab import AT, SlabWeight


@dataclasses.dataclass(frozen=True, eq=False)
class Toy16Weight(SlabWeight):
    format: ClassVar[str] = "toy16"
    of_dense: ClassVar[bool] = True
    saved_dense: ClassVar[bool] = True
    any_weight: ClassVar[bool] = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    counted: ClassVar[tuple[str, ...]] = ()
    faults: ClassVar[Mapping[int, str]] = {1: f"{AT}: element {{found}} is outside of the matrix and not 0"}
    data: Tensor
    rows: int
    cols: int

    @classmethod
    def from_dense(cls, w: Tensor) -> Self:
        cls._check_dtype(w.dtype)
        tensors, header = torch.ops.macko.pack(w, cls.number, [])
        return cls(*tensors, *header.tolist()[1:])

    def _options(self) -> dict[str, int]:
        return {}

    def _values(self) -> Tensor:
        return self.to_dense()
