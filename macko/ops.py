"""Typed functions over the ops `torch.ops.macko.*`, with their gradients and shapes (a layout's own: macko.weights).

The ops take a packed weight of any layout as two lists: its tensors, and a header of whole numbers, [layout, rows,
cols, ...], which csrc/torch/packed.h describes; `PackedWeight` (macko.weights) has both. The functions of this module
that are named after a paper's format take what the paper's reader would expect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _library  # noqa: F401  registers the ops

__all__ = [
    "EcMatrix",
    "check",
    "ec_check",
    "ec_linear",
    "ec_pack",
    "ec_spmv",
    "ec_unpack",
    "expert_order",
    "expert_sum",
    "linear",
    "linear_experts",
    "pack",
    "slide_depth",
    "slide_gemm",
    "slide_linear",
    "slide_pack",
    "slide_quant_fused",
    "slide_unpack",
    "spmv",
    "unpack",
]

#: Numbers of the papers' layouts in a header, which are `number` of their classes in macko.weights.
_CANONICAL, _EC, _SLIDE = 0, 4, 5
#: Types of a slide weight's values by their number in a header.
SLIDE_ELEMENTS = (torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16)

#: Tensors and header of a packed weight.
Packed = tuple[Sequence[Tensor], Sequence[int]]


def call(product: Callable[..., Any], *args: Any) -> Any:
    """product(*args), under no_grad without torch's Python kernel for gradients: 3 of 7 us at 64x64 (Zen 5)."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return product(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return product(*args)


#: With gradients and without: overloads, which take 0.2 us less than what chooses one.
_LINEAR, _BELOW_AUTOGRAD = torch.ops.macko.linear.default, torch.ops.macko.linear_below_autograd.default
_MAKE_FX = torch._C._TorchDispatchModeKey.PROXY


def multiply(x: Tensor, tensors: Sequence[Tensor | None], header: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """x W^T + bias with a packed weight of any layout; under no_grad by the op that has no gradients, not while traced.

    Raises:
        NotImplementedError: x has a tangent, of forward-mode differentiation, which would be lost.
    """
    if torch.compiler.is_compiling():
        return _LINEAR(x, tensors, header, bias)
    if has_tangent(x):
        raise NotImplementedError("macko::linear has no forward-mode derivatives: use reverse mode")
    recorded = torch.is_grad_enabled() or torch._C._is_tracing() or torch._C._get_dispatch_mode(_MAKE_FX) is not None
    if not recorded:
        return _BELOW_AUTOGRAD(x, tensors, header, bias)
    y = _LINEAR(x, tensors, header, bias)
    # Kernels may give it its shape by a view, and of a view that an op's graph holds torch refuses changes in place.
    return torch.ops.aten._unsafe_view(y, y.shape) if y.requires_grad and y._is_view() else y


def linear_experts(
    x: Tensor,
    tensors: Sequence[Tensor],
    header: Sequence[int],
    rows: int,
    ends: Tensor,
    order: Tensor | None = None,
    top_k: int = 1,
    gated: bool = False,
) -> Tensor:
    """Of rows ends[e - 1] up to ends[e] of x the products with expert e: torch's grouped_mm with packed weights.

    Args:
        x: [tokens, cols], sorted by expert; with an order as they come.
        tensors, header: experts' matrices as one packed weight of slabs, [experts * filled rows, cols].
        rows: of an expert, which the weight holds filled up with zeros to a multiple of 64.
        ends: int32 [experts], where x is: the first row after each expert's.
        order, top_k: int32 [pairs], of expert_order: the rows are order[i] // top_k of x. On a GPU nobody looks whether
            x has them.
        gated: multiplies silu(gate) * up, both rounded, for x [tokens, 2 * cols] of which gate is the first half.

    Returns:
        [tokens, rows], with an order [pairs, rows]; zeros in the rows after the last end. Differentiable in x. On a
        GPU no host waits. A token's bits depend on no other one but by how many tokens there are in all; where that
        takes dense rows (without wgmma, more than 96 tokens an expert), they are as torch's product has them.

    Raises:
        RuntimeError: wrong device, dtype or shape; a layout that is not of slabs; on the CPU ends that fall.
    """
    return call(torch.ops.macko.linear_experts.default, x, tensors, header, rows, ends, order, top_k, gated)


def gated_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: int,
    gate_up: tuple[Sequence[Tensor], Sequence[int], int],
    down: tuple[Sequence[Tensor], Sequence[int], int],
) -> Tensor:
    """What a module of experts gives whose gate is silu: expert_order, both products and expert_sum in one op, as each
    op takes the host microseconds.

    Args:
        x: [tokens, cols]. ids, weights: [tokens, top_k], of expert_order and expert_sum.
        gate_up, down: tensors, header and rows of linear_experts.

    Returns:
        [tokens, rows of down].

    Raises:
        RuntimeError: as of the ops; ids has other tokens than x.
        NotImplementedError: x or weights want a gradient.
    """
    refuse_gradients("gated_experts", x, weights)
    op = torch.ops.macko.gated_experts.default
    return call(op, x, ids, weights, experts, *gate_up, *down)  # type: ignore[no-any-return]


def expert_order(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of a token and one of its experts, sorted by expert: in one launch, which no host waits for.

    Args:
        ids: int64 or int32 [tokens, top_k], the experts of each token. Those below 0 or from `experts` on are another
            process': they come last.

    Returns:
        order int32 [tokens * top_k]: the pair, token * top_k + slot, at each place; of an expert by rising number.
        places int32 [tokens, top_k]: the place of each pair, -1 where it is another process'.
        ends int32 [experts]: the first place behind each expert's.

    Raises:
        RuntimeError: wrong dtype or shape, or experts is under 0 or, on a GPU, some 6,000.
    """
    return call(torch.ops.macko.expert_order.default, ids, experts)  # type: ignore[no-any-return]


def expert_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Of each token the sum of the rows of x at its places, times weights: without atomics, always in the same order.

    Args:
        x: [pairs, cols], of 16 bits, on the CPU float32 too.
        places: int32 [tokens, top_k], of expert_order. Where x has no such row nothing is added.
        weights: [tokens, top_k], float32 or of x's dtype. Products are rounded as torch does it: to float32, or to
            x's dtype where weights have that too.

    Returns:
        [tokens, cols], of x's dtype, rounded once more from a float32 sum. Differentiable in x and weights.

    Raises:
        RuntimeError: wrong device, dtype or shape.
    """
    return call(torch.ops.macko.expert_sum.default, x, places, weights)  # type: ignore[no-any-return]


def has_tangent(x: Tensor) -> bool:
    """Whether forward-mode differentiation goes through x."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def refuse_gradients(op: str, *tensors: Tensor | None) -> None:
    """NotImplementedError where one of these wants a gradient, which torch would only warn of, in backward."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise NotImplementedError(f"macko::{op} has no gradients: make its input before linear, or call it in no_grad")


def pack(w: Tensor, delta_bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Packs a dense matrix into the macko format of the MACKO-SpMV paper.

    Args:
        w: [rows, cols], float16 or bfloat16 (float32 too on the CPU); any strides.
        delta_bits: 2, 4 or 8, the width of a delta; 0 takes the one of fewest bytes, 4 where they tie.

    Returns:
        values [capacity] of w's dtype, deltas [capacity * delta_bits / 8] uint8, row_ptr [rows + 1] int32, where w is.

    Raises:
        RuntimeError: wrong device, dtype or shape, or more than 2^31 - 1 stored entries.
    """
    values, deltas, row_ptr = torch.ops.macko.pack(w, _CANONICAL, [delta_bits])[0]
    return values, deltas, row_ptr


def _canonical(values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, delta_bits: int) -> Packed:
    return [values, deltas, row_ptr], [_CANONICAL, max(0, row_ptr.numel() - 1), cols, delta_bits]


def unpack(
    values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4, check: bool = True
) -> Tensor:
    """The dense [rows, cols] matrix: `unpack(*pack(w), w.shape[1])` is w bit for bit, but for the sign of zeros.

    Args:
        values, deltas, row_ptr, cols, delta_bits: the packed matrix.
        check: False does not wait for a GPU to look at the content: rows that point outside the matrix are NaN.

    Raises:
        RuntimeError: wrong device, dtype or shape, or content that points outside the matrix.
    """
    return torch.ops.macko.dense(*_canonical(values, deltas, row_ptr, cols, delta_bits), check)


def check(values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4) -> Tensor:
    """The first place where the packed data breaks the format: int64 [4] of kind (0: none), row, entry, found."""
    return torch.ops.macko.check(*_canonical(values, deltas, row_ptr, cols, delta_bits))


def spmv(values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, x: Tensor, delta_bits: int = 4) -> Tensor:
    """y = W x for one vector; differentiable in x.

    Args:
        values, deltas, row_ptr, cols: the packed matrix [rows, cols].
        x: [cols], of values' dtype and device.

    Returns:
        y [rows] of the same dtype, summed in float32; the same bits at every run.

    Raises:
        RuntimeError: wrong device, dtype or shape; on the CPU also content that points outside the matrix. On CUDA,
            where the content cannot be looked at without a wait, such rows of y are NaN.
    """
    return call(torch.ops.macko.spmv, values, deltas, row_ptr, cols, x, delta_bits)


def linear(
    x: Tensor,
    values: Tensor,
    deltas: Tensor,
    row_ptr: Tensor,
    cols: int,
    bias: Tensor | None = None,
    delta_bits: int = 4,
) -> Tensor:
    """x W^T + bias, as torch.nn.functional.linear with the packed W; differentiable in x and bias.

    Args:
        x: [..., cols], of values' dtype and device. One token runs as spmv, more (on CUDA)
            through dense rows in a workspace of at most 64 MB.
        values, deltas, row_ptr, cols: the packed matrix [rows, cols].
        bias: [rows] or None.

    Returns:
        [..., rows] of the same dtype.
    """
    return multiply(x, *_canonical(values, deltas, row_ptr, cols, delta_bits), bias)


#: block_values, delta_indices, base_indices, block_indptr, row_indices, tile_ptr, sets, col_order of an EC-CSR matrix.
EcTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
#: The same, then rows and cols.
EcMatrix = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int]


def ec_pack(
    w: Tensor,
    delta_bits: int = 4,
    lanes: int = 32,
    max_height: int = 16,
    min_width: int = 128,
    max_width: int = 8192,
    tile_rows: int = 128,
    max_slabs: int = 1,
) -> EcTensors:
    """Packs a dense matrix into EC-CSR, the format of the EC-SpMV paper. The defaults are the paper's layout.

    Args:
        w: [rows, cols], float16 or bfloat16 (float32 too on the CPU); any strides.
        delta_bits: 3 to 8, the width of a delta; 4 and 8 in the paper. 0 (with lanes < 32 and max_height 1) takes the
            width of fewest bytes, for each slab its own.
        lanes: 1 to 32, a power of two: lanes that share a single row. 32 is the paper's long and short part.
        max_height: 1 to 16, a power of two: most rows of a block; 1 extracts no blocks.
        min_width, max_width: columns of a block of several rows, multiples of 128.
        tile_rows: rows among which rows of like size are grouped, a multiple of 128 up to 1024; 128 for the paper's.
        max_slabs: up to 4; with delta_bits 0, into how many sets the columns, sorted by density, may be cut.

    Returns:
        The eight tensors that contrib/ec/ec.h describes, on w's device; the CPU's and CUDA's are the same bytes.

    Raises:
        RuntimeError: wrong device, dtype, shape or option, or more than 2^31 - 1 columns stored in one set.
    """
    options = [delta_bits, lanes, max_height, min_width, max_width, tile_rows, max_slabs]
    return tuple(torch.ops.macko.pack(w, _EC, options)[0])


def _ec(packed: EcMatrix) -> Packed:
    return packed[:8], [_EC, *packed[8:], 0, 8, 1, 128, 8192, 128, 1]  # options say nothing of content


def ec_unpack(packed: EcMatrix) -> Tensor:
    """The dense [rows, cols] matrix, bit for bit but for the sign of zeros. The content is trusted: see ec_check."""
    return torch.ops.macko.dense(*_ec(packed))


def ec_check(packed: EcMatrix) -> Tensor:
    """The first place where the packed data breaks the format: int64 [4] of kind (0: none), set, entry, found.

    A matrix that comes from outside is checked once; the other ops trust its content. Runs on the CPU.
    """
    return torch.ops.macko.check(*_ec(packed))


def ec_spmv(packed: EcMatrix, x: Tensor) -> Tensor:
    """y = W x for one vector x [cols]; differentiable in x. The same bits at every run. See ec_check for the content.

    Raises:
        RuntimeError: wrong device, dtype or shape.
    """
    return call(torch.ops.macko.ec_spmv, *packed, x)


def ec_linear(x: Tensor, packed: EcMatrix, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias for x [..., cols]; differentiable in x and bias. More than one token: by a temporary dense copy."""
    return multiply(x, *_ec(packed), bias)


def slide_pack(w: Tensor, n: int, dtype: torch.dtype, prune: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Packs a weight of pattern (2n-2):2n for the 2:4 tensor cores, or a dense one for the same kernel (SlideSparse).

    Args:
        w: [rows, cols], float16 or bfloat16 (float32 too on the CPU), or codes that are of `dtype` already.
        n: 2 to 8 for at most 2n-2 non-zeros in each 2n consecutive columns; 0 for a dense weight.
        dtype: int8 or float8_e4m3fn (quantised per row by its largest magnitude), or w's own 16-bit type.
        prune: whether a group with too many non-zeros loses its smallest, instead of being an error.

    Returns:
        packed uint8 [row_blocks, k_tiles, tile_bytes] (csrc/slide/slide.h), scale float32 [rows] (1 where nothing was
        quantised), and how many non-zeros pruning dropped, int64 [1] on the CPU.

    Raises:
        RuntimeError: wrong device, dtype or shape, or a group that does not fit: named by row, group and count.
    """
    if dtype not in SLIDE_ELEMENTS:
        name = str(dtype).removeprefix("torch.")
        raise RuntimeError(f"macko::pack: dtype is {name}, expected int8, float8_e4m3fn, float16 or bfloat16")
    options = [n, SLIDE_ELEMENTS.index(dtype), 0, int(prune)]
    (tiles, scale, _), header = torch.ops.macko.pack(w, _SLIDE, options)
    return tiles, scale, header[-1:]


def _slide(packed: Tensor, scale: Tensor, cols: int, n: int, dtype: torch.dtype) -> Packed:
    element = SLIDE_ELEMENTS.index(dtype) if dtype in SLIDE_ELEMENTS else -1
    return [packed, scale, packed], [_SLIDE, scale.numel(), cols, n, element, 0, 0, 0]


def slide_unpack(packed: Tensor, scale: Tensor, cols: int, n: int, dtype: torch.dtype) -> Tensor:
    """The codes [rows, cols] of dtype: the weight itself for 16-bit types, weight / scale rounded for 8-bit ones."""
    return torch.ops.macko.dense(*_slide(packed, scale, cols, n, dtype))


def slide_quant_fused(x: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantises each token by its largest magnitude and lifts it to the expanded columns of pattern n, in one launch.

    Args:
        x: [..., cols], float16 or bfloat16 (float32 too on the CPU); x's own dtype only lifts.
        n, dtype: as in slide_pack.

    Returns:
        lifted [..., depth] of dtype and scale float32 [...]; a token with NaN or Inf has scale NaN or Inf.
    """
    return torch.ops.macko.slide_quant_fused(x, n, dtype)


def slide_gemm(
    lifted: Tensor,
    token_scale: Tensor,
    packed: Tensor,
    scale: Tensor,
    cols: int,
    n: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """One launch: out = scale * (token_scale * (lifted W^T)) + bias, from the unrounded sum, as out_dtype.

    Args:
        lifted, token_scale: what slide_quant_fused gives.
        packed, scale, cols, n: the packed weight.
        out_dtype: float16 or bfloat16 (float32 too on the CPU), bias's too.
        bias: [rows] or None.

    Returns:
        [..., rows]. For int8 the sums are exact, for the others kept in float32 (float8 on the GPU: what its tensor
        cores keep).
    """
    return torch.ops.macko.slide_gemm(lifted, token_scale, packed, scale, cols, n, out_dtype, bias)


def slide_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    cols: int,
    n: int,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """x W^T + bias with the packed W: quantise and lift, then one GEMM; differentiable in x and bias.

    Args:
        x: [..., cols], float16 or bfloat16 (float32 too on the CPU); of dtype where that has 16 bits.
        packed, scale, cols, n, dtype: the packed weight.
        bias: [rows] of x's dtype, or None.

    Returns:
        [..., rows] of x's dtype. The gradient in x is that of the dequantised weight.
    """
    return multiply(x, *_slide(packed, scale, cols, n, dtype), bias)


def slide_depth(cols: Any, n: int) -> Any:
    """Columns of a weight of so many columns and pattern n, expanded and filled up to whole tiles."""
    expanded = (cols + 2 * n - 1) // (2 * n) * 4 * (n - 1) if n else cols
    return max(expanded + 127, 128) // 128 * 128


@torch.library.register_fake("macko::slide_quant_fused")
def _(x: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch._check(x.dim() >= 1, lambda: "macko::slide_quant_fused: x has shape [], expected [..., cols]")
    return (
        x.new_empty(*x.shape[:-1], slide_depth(x.shape[-1], n), dtype=dtype),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
    )


@torch.library.register_fake("macko::slide_gemm")
def _(
    lifted: Tensor,
    token_scale: Tensor,
    packed: Tensor,
    scale: Tensor,
    cols: int,
    n: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    return lifted.new_empty(*lifted.shape[:-1], scale.numel(), dtype=out_dtype)


@torch.library.register_fake("macko::dense")
def _(packed: Sequence[Tensor], header: Sequence[int], check: bool = True) -> Tensor:
    is_slide = header[0] == _SLIDE
    return packed[0].new_empty(header[1:3], dtype=SLIDE_ELEMENTS[header[4]] if is_slide else packed[0].dtype)


@torch.library.register_fake("macko::check")
def _(packed: Sequence[Tensor], header: Sequence[int]) -> Tensor:
    return packed[0].new_empty(4, dtype=torch.int64)


#: What a product calls when it is traced: macko puts its pass for Inductor here, which takes a second to import, so not
#: at import.
TRACED: list[Callable[[], None]] = []


def _product(op: str, sizes: Callable[..., tuple[Tensor, Any, Any]], *args: Any) -> Tensor:
    for hook in TRACED:
        hook()
    x, rows, cols = sizes(*args)
    wanted = x.dim() >= 1 and x.shape[-1] == cols
    torch._check(wanted, lambda: f"macko::{op}: x has shape {list(x.shape)}, expected [..., {cols}]")
    return x.new_empty(*x.shape[:-1], rows)


#: By op, of its arguments: x, and rows and cols of the matrix.
_PRODUCTS: dict[str, Callable[..., tuple[Tensor, Any, Any]]] = {
    "linear": lambda x, packed, header, bias=None: (x, *header[1:3]),
    "linear_below_autograd": lambda x, packed, header, bias=None: (x, *header[1:3]),
    "norm_linear": lambda x, weight, eps, packed, header, bias=None: (x, *header[1:3]),
    "gated_linear": lambda gate, up, packed, header, bias=None: (gate, *header[1:3]),
    "spmv": lambda values, deltas, row_ptr, cols, x, delta_bits=4: (x, row_ptr.numel() - 1, cols),
    "ec_spmv": lambda *args: (args[10], *args[8:10]),
}
for _op, _sizes in _PRODUCTS.items():
    torch.library.register_fake(f"macko::{_op}", partial(_product, _op, _sizes))


@torch.library.register_fake("macko::rms_norm")
def _(x: Tensor, weight: Tensor, eps: float, other: Tensor | None = None) -> list[Tensor]:
    return [x.new_empty(x.shape) for _ in range(1 if other is None else 2)]


@torch.library.register_fake("macko::linear_parts")
def _(x: Tensor, packed: Sequence[Tensor], header: Sequence[int], part_rows: Sequence[int]) -> list[Tensor]:
    y = _product("linear_parts", _PRODUCTS["linear"], x, packed, header)
    return [y.new_empty(*x.shape[:-1], rows) for rows in part_rows]


def _times(grad: Tensor, tensors: Sequence[Tensor], header: Sequence[int]) -> Tensor:
    """grad W for grad [..., rows]."""
    w = torch.ops.macko.dense(tensors, header, False)
    if header[0] == _SLIDE:
        grad, w = (grad * tensors[1]).to(grad.dtype), w.to(grad.dtype)
    return grad @ w


@torch.library.register_fake("macko::linear_experts")
def _(
    x: Tensor,
    packed: Sequence[Tensor],
    header: Sequence[int],
    rows: int,
    ends: Tensor,
    order: Tensor | None = None,
    top_k: int = 1,
    gated: bool = False,
) -> Tensor:
    y = _product("linear_experts", lambda *sizes: sizes, x, rows, header[2] * (1 + gated))  # type: ignore[arg-type, return-value]
    return y if order is None else y.new_empty(order.shape[0], rows)


@torch.library.register_fake("macko::expert_order")
def _(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(ids.new_empty(shape, dtype=torch.int32) for shape in ((ids.numel(),), ids.shape, (experts,)))  # type: ignore[return-value, call-overload]


@torch.library.register_fake("macko::expert_sum")
def _(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return x.new_empty(places.shape[0], x.shape[1])


@torch.library.register_fake("macko::gated_experts")
def _(x: Tensor, ids: Tensor, weights: Tensor, experts: int, *packed: Any) -> Tensor:
    return x.new_empty(ids.shape[0], packed[-1])


def _experts_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *tensors, ends, order, x = ctx.saved_tensors
    # Of trailing arguments that have their default torch asks none.
    nothing = ([None] * len(tensors), *[None] * (len(ctx.needs_input_grad) - 2))
    if not ctx.needs_input_grad[0]:
        return (None, *nothing)
    w = torch.ops.macko.dense(tensors, ctx.header, False)
    w = w.view(len(ends), -1, w.shape[1])[:, : ctx.rows]
    rows = torch.arange(len(grad), device=grad.device).unsqueeze(1)
    grad_x = torch._grouped_mm(grad.contiguous(), w, offs=ends)  # of rows after the last end it writes nothing
    grad_x = grad_x.masked_fill(rows >= ends[-1:], 0)
    if order is not None:
        grad_x = grad_x.new_zeros(ctx.x_rows, grad_x.shape[1]).index_add_(0, order // ctx.top_k, grad_x)
    if x is not None:
        gate, up = x.float().chunk(2, -1)
        share, wide = gate.sigmoid(), grad_x.float()
        of_gate = wide * up * share * (1 + gate * (1 - share))
        grad_x = torch.cat([of_gate, wide * gate * share], -1).to(x.dtype)
    return (grad_x, *nothing)


def _experts_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, tensors, ctx.header, ctx.rows, ends, order, ctx.top_k, gated = inputs
    ctx.x_rows = x.shape[0]
    ctx.save_for_backward(*tensors, ends, order, x if gated else None)


torch.library.register_autograd("macko::linear_experts", _experts_backward, setup_context=_experts_context)


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    x, places, weights = ctx.saved_tensors
    is_here = (places >= 0).unsqueeze(-1)
    at, grad = places.clamp(min=0).long(), grad.unsqueeze(1)
    grad_x = grad_weights = None
    if ctx.needs_input_grad[0]:
        terms = (grad * weights.unsqueeze(-1) * is_here).to(x.dtype)
        grad_x = torch.zeros_like(x).index_add_(0, at.flatten(), terms.flatten(0, 1))
    if ctx.needs_input_grad[2]:
        grad_weights = (x[at].float() * grad.float() * is_here).sum(-1).to(weights.dtype)
    return grad_x, None, grad_weights


def _sum_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


torch.library.register_autograd("macko::expert_sum", _sum_backward, setup_context=_sum_context)


def _differentiable(name: str, packed: Callable[..., Packed], x: int, bias: int | None = None) -> None:
    """Gives an op gradients in the arguments at x and bias. packed: the weight, of all arguments."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        tensors, ctx.header = packed(*inputs)
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wants = ctx.needs_input_grad  # of trailing arguments that have their default torch asks none
        grads: list[Any] = [[None] * len(want) if isinstance(want, Sequence) else None for want in wants]
        if wants[x]:
            grads[x] = _times(grad, ctx.saved_tensors, ctx.header)
        if bias is not None and len(wants) > bias and wants[bias]:
            grads[bias] = grad.sum_to_size(grad.shape[-1])
        return tuple(grads)

    torch.library.register_autograd(f"macko::{name}", backward, setup_context=save)


_differentiable("linear", lambda x, tensors, header, bias=None: (tensors, header), x=0, bias=3)
_differentiable("spmv", lambda *args: _canonical(*args[:4], *args[5:]), x=4)
_differentiable("ec_spmv", lambda *args: _ec(args[:10]), x=10)
