"""What one would take in place of macko's formats: layers on torch's own dense products of 8 and of 4 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..nn.find import IGNORED, find_linears

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
#: Columns that share a scale in int4.
GROUP = 128


def fp8_pack(w: Tensor, by_row: bool = False) -> tuple[Tensor, Tensor]:
    """Codes [rows, cols] of w and their scale: one, or of each row [rows, 1]."""
    largest = w.abs().amax(1, keepdim=True) if by_row else w.abs().amax()
    scale = largest.float().clamp(min=1e-12) / LARGEST
    return (w.float() / scale).to(E4M3), scale


def int4_pack(w: Tensor, inner_tiles: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """What aten's int4 product takes of w, symmetric by groups of a row; and the weight that this is, in float32."""
    rows, cols = w.shape
    groups = w.float().view(rows, -1, GROUP)
    scale = (groups.abs().amax(2, keepdim=True).clamp(min=1e-12) / 7.5).bfloat16()
    codes = (groups / scale).round().clamp(-8, 7)
    rounded = (codes * scale.float()).bfloat16().float().view(rows, cols)
    codes = (codes + 8).to(torch.uint8).view(rows, cols)
    scales = torch.cat((scale, torch.zeros_like(scale)), 2).transpose(0, 1).contiguous()
    if w.is_cuda:
        packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], inner_tiles)
    else:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), inner_tiles)
    return packed, scales, rounded


class _Rounded(nn.Module):
    """A linear layer that multiplies `product(x [tokens, cols])`, in x's dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x.flatten(0, -2)).to(x.dtype).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Fp8Linear(_Rounded):
    """e4m3 weights and tokens (`torch._scaled_mm`), a scale for each of the two: the fastest that torch has."""

    codes: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        codes, scale = fp8_pack(linear.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)

    def product(self, x: Tensor) -> Tensor:
        scale = x.abs().amax().float().clamp(min=1e-12) / LARGEST
        q = (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)
        return torch._scaled_mm(q, self.codes.t(), scale_a=scale, scale_b=self.scale, out_dtype=torch.bfloat16)


class Int4Linear(_Rounded):
    """int4 weights in groups of 128 columns (`aten::_weight_int4pack_mm`)."""

    packed: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        packed, scales, _ = int4_pack(linear.weight.detach())
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)

    def product(self, x: Tensor) -> Tensor:
        name = "_weight_int4pack_mm" if x.is_cuda else "_weight_int4pack_mm_for_cpu"
        return getattr(torch.ops.aten, name)(x.bfloat16(), self.packed, GROUP, self.scales)


#: By name: the layer, and what columns and rows have to be multiples of.
RIVALS: dict[str, tuple[type[_Rounded], int, int]] = {"fp8": (Fp8Linear, 16, 16), "int4": (Int4Linear, GROUP, 16)}


def replace_(model: nn.Module, name: str) -> int:
    """Puts a rival in the place of every linear layer that it can hold, but lm_head; returns of how many."""
    kind, cols, rows = RIVALS[name]
    count = 0
    for layer in find_linears(model, IGNORED, None):
        linear = layer.module
        if not layer.left_out and not linear.in_features % cols and not linear.out_features % rows:
            rival = kind(linear)
            for parent, attribute in layer.places:
                setattr(parent, attribute, rival)
            count += 1
    return count
