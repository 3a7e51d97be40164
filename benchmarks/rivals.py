"""The alternatives to macko's formats: torch's dense products of 8 and of 4 bits. For benchmarks.spmm.

fp8: e4m3 and `torch._scaled_mm`, with one scale for the matrix and one for all tokens, or (fp8_rows) one a row and one
a token. x is quantised before it is timed; with `_quant` each time: by one compiled kernel where its scale is known
from calibration, by row by macko's quantiser, the fastest there is. int4: groups of 128 and
`torch.ops.aten._weight_int4pack_mm`. All round the weights, so a line also says by how much a product is off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from macko import ops
from macko.measure.rivals import E4M3, GROUP, LARGEST, fp8_pack, int4_pack

from .timing import copies

NAMES = ("fp8", "fp8_quant", "fp8_rows", "fp8_rows_quant", "int4")


@torch.compile(dynamic=True)
def cast(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def scaled_mm(q: Tensor, token_scale: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return torch._scaled_mm(q, w.t(), scale_a=token_scale, scale_b=scale, out_dtype=torch.bfloat16)


class Rival:
    """A dense weight of bfloat16 as one of NAMES stores it, in as many copies as the cache cannot keep.

    Attributes:
        nbytes: of one copy.
        held: the weight that this stands for, float32 [rows, cols].
        sizes: how many tokens it can take.
        knobs: of MACKO_PLAN, none.
    """

    sizes, knobs = range(1, 1 << 30), ""

    def __init__(self, name: str, w: Tensor) -> None:
        self.name, self.by_row = name, name.startswith("fp8_rows")
        if name == "int4":
            *tensors, self.held = int4_pack(w)
        else:
            codes, scale = fp8_pack(w, self.by_row)
            tensors, self.held = [codes, scale.t().contiguous()], codes.float() * scale
        self.nbytes = sum(t.numel() * t.element_size() for t in tensors)
        self.rotated = copies(tensors)

    def quantised(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes of x [tokens, cols], and their scale: of each token [tokens, 1], or of all, where it may be known."""
        if self.by_row:
            q, token_scale = ops.slide_quant_fused(x, 0, E4M3)
            return q[:, : x.shape[1]], token_scale[:, None]
        scale = x.abs().amax().float() / LARGEST if scale is None else scale
        return cast(x, scale), scale

    def calls(self, x: Tensor) -> list[Callable[[], Tensor]]:
        """The product of x [tokens, cols] by each copy."""
        if self.name == "int4":
            product = torch.ops.aten._weight_int4pack_mm
            return [partial(product, x, packed, GROUP, scales) for packed, scales in self.rotated]
        scale = x.abs().amax().float() / LARGEST  # as calibration knows it
        if self.name.endswith("quant"):
            return [partial(self._quantise_and_multiply, x, scale, *held) for held in self.rotated]
        return [partial(scaled_mm, *self.quantised(x), *held) for held in self.rotated]

    def _quantise_and_multiply(self, x: Tensor, scale: Tensor, *held: Tensor) -> Tensor:
        return scaled_mm(*self.quantised(x, scale), *held)

    def check(self, call: Callable[[], Tensor], w: Tensor, x: Tensor) -> float:
        """How far the call's results are from those of w, as a share of their norm; SystemExit where they are wrong.

        Wrong: further from the product of what w and x were rounded to than rounding results explains, and that the
        tensor cores keep 14 bits of a sum of float8, at each 32 columns.
        """
        codes, scale = (x, 1) if self.name == "int4" else self.quantised(x)
        wanted, rounded, found = product(x, w), product(codes.float() * scale, self.held), call().double()
        apart = float((found - rounded).norm() / rounded.norm())
        if not apart <= 2.0**-8 + x.shape[1] / 32 * 2.0**-14:
            raise SystemExit(f"{self.name}: results are {apart:.3g} of their norm from those of the rounded weight")
        return float((found - wanted).norm() / wanted.norm())


def product(x: Tensor, w: Tensor, rows: int = 4096) -> Tensor:
    """x W^T in float64, some rows at a time."""
    return torch.cat([x.double() @ part.double().t() for part in w.split(rows)], 1)
