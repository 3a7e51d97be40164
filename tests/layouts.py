"""The ops of single layouts as functions of their tensors, for tests that change these one by one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from macko import _library
from macko.weights import FORMATS, SellWeight

#: Names by number.
LAYOUTS = tuple(FORMATS)
Three = tuple[Tensor, Tensor, Tensor]


def _lay_out(layout: str, tensors: Sequence[Tensor], cols: int, delta_bits: int, *options: int) -> Any:
    header = [0, max(0, tensors[2].numel() - 1), cols, delta_bits]
    return torch.ops.macko.lay_out(tensors, header, LAYOUTS.index(layout), options)


def _bitmap(values: Tensor, bits: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4) -> tuple[Any, list[int]]:
    return [values, bits, row_ptr], [LAYOUTS.index("bitmap"), max(0, row_ptr.shape[0] - 1), cols, delta_bits]


def bitmap_pack(values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4) -> Three:
    return tuple(_lay_out("bitmap", [values, deltas, row_ptr], cols, delta_bits)[0])  # type: ignore[return-value]


def bitmap_to_macko(values: Tensor, bits: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4) -> Three:
    return tuple(torch.ops.macko.lay_out(*_bitmap(values, bits, row_ptr, cols, delta_bits), 0, [])[0])  # type: ignore[return-value]


def bitmap_unpack(values: Tensor, bits: Tensor, row_ptr: Tensor, cols: int) -> Tensor:
    return torch.ops.macko.dense(*_bitmap(values, bits, row_ptr, cols))


def bitmap_check(values: Tensor, bits: Tensor, row_ptr: Tensor, cols: int) -> Tensor:
    return torch.ops.macko.check(*_bitmap(values, bits, row_ptr, cols))


def bitmap_linear(
    x: Tensor, values: Tensor, bits: Tensor, row_ptr: Tensor, cols: int, bias: Tensor | None = None
) -> Tensor:
    return torch.ops.macko.linear(x, *_bitmap(values, bits, row_ptr, cols), bias)


def bitmap_spmv(values: Tensor, bits: Tensor, row_ptr: Tensor, cols: int, x: Tensor) -> Tensor:
    return torch.ops.macko.linear(x, *_bitmap(values, bits, row_ptr, cols))


def sell_pack(values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, delta_bits: int, *options: int) -> Any:
    return _lay_out("sell", [values, deltas, row_ptr], cols, delta_bits, *options, *[0] * (3 - len(options)))


def stream(sell: SellWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias from the packed stream, whatever the number of tokens."""
    with _library.plan("stream_tokens=1000000"):
        return sell.linear(x, bias)


def tile_pack(values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4) -> Any:
    return _lay_out("tile", [values, deltas, row_ptr], cols, delta_bits)
