"""Typed functions over the ops `torch.ops.macko.*`, with their shape functions and gradients.

A packed matrix is three tensors, `values, deltas, row_ptr`; csrc/macko/macko.h says what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _library


def _call(product: Callable[..., Tensor], *args: Any) -> Tensor:
    """product(*args), under no_grad without torch's Python kernel for gradients: 3 of 7 us at 64x64 (Zen 5)."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return product(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return product(*args)


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
    return torch.ops.macko.pack(w, delta_bits)


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
    return torch.ops.macko.unpack(values, deltas, row_ptr, cols, delta_bits, check)


def check(values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4) -> Tensor:
    """The first place where the packed data breaks the format: int64 [4] of kind (0: none), row, entry, found."""
    return torch.ops.macko.check(values, deltas, row_ptr, cols, delta_bits)


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
    return _call(torch.ops.macko.spmv, values, deltas, row_ptr, cols, x, delta_bits)


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
    return _call(torch.ops.macko.linear, x, values, deltas, row_ptr, cols, bias, delta_bits)


#: data, bases, blocks, perm, cols, gap_bits, warps, head of a matrix in the sell layout.
SellMatrix = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int, int]


def sell_pack(
    values: Tensor,
    deltas: Tensor,
    row_ptr: Tensor,
    cols: int,
    delta_bits: int = 4,
    gap_bits: int = 0,
    warps: int = 0,
    blocks: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int, int]:
    """The layout in which this GPU runs a macko matrix; csrc/sell/sell.h says what the tensors hold. CUDA only.

    Args:
        values, deltas, row_ptr, cols, delta_bits: the packed matrix [rows, cols], at most 65535 columns.
        gap_bits: 2 to 6, the width of a gap; 0 takes the smallest layout.
        warps, blocks: that decode in a block, and blocks; 0 takes what suits this GPU.

    Returns:
        data of values' dtype, bases int16, blocks [blocks, 8] int32, perm [2, rows] int32; gap_bits, warps, head, and
        the number of entries, explicit zeros among them.

    Raises:
        RuntimeError: wrong device, dtype or shape, content that points outside the matrix, or a vector of `cols`
            elements does not fit this GPU's shared memory.
    """
    return torch.ops.macko.sell_pack(values, deltas, row_ptr, cols, delta_bits, gap_bits, warps, blocks)


def sell_unpack(packed: SellMatrix) -> Tensor:
    """The dense [rows, cols] matrix, bit for bit what was packed. Does not wait for the device."""
    return torch.ops.macko.sell_unpack(*packed)


def sell_spmv(packed: SellMatrix, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = W x + bias for one vector, in one launch; differentiable in x and bias.

    Args:
        packed: what sell_pack gave; trusted.
        x: [cols], of data's dtype and device.
        bias: [rows] or None.

    Returns:
        y [rows] of the same dtype, summed in float32; the same bits at every run.
    """
    return _call(torch.ops.macko.sell_spmv, *packed, x, bias)


def sell_spmm(packed: SellMatrix, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias for x [tokens, cols], up to 8 tokens a launch; differentiable in x and bias.

    Returns:
        [tokens, rows], each token with the guarantees of sell_spmv; of the same number of tokens its bits do not depend
        on the others.
    """
    return _call(torch.ops.macko.sell_spmm, *packed, x, bias)


def sell_linear(x: Tensor, packed: SellMatrix, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias for x [..., cols], as `linear`.

    One token runs as sell_spmv, a few as sell_spmm, more through dense rows in a workspace of at most 64 MB.
    """
    return _call(torch.ops.macko.sell_linear, x, *packed, bias)


def sell_linear_parts(x: Tensor, packed: SellMatrix, part_rows: Sequence[int]) -> list[Tensor]:
    """x W^T for x [..., cols], cut into tensors of its own memory for so many rows each: what siblings are given.

    As `sell_linear(x, packed).split(part_rows, -1)`, but always through dense rows, and each part is contiguous, which
    torch's elementwise kernels like better than a slice. Without gradients.

    Raises:
        RuntimeError: part_rows do not add up to the rows of W; or as sell_linear.
    """
    return torch.ops.macko.sell_linear_parts(x, *packed, part_rows)


def sell_norm_linear(x: Tensor, weight: Tensor, eps: float, packed: SellMatrix, bias: Tensor | None = None) -> Tensor:
    """sell_linear(x / sqrt(mean(x^2) + eps) * weight, packed, bias) for one token, in one launch; without gradients.

    Args:
        x: [..., cols] of one token, of data's dtype and device; cols a multiple of 8.
        weight: [cols], of the same dtype. The norm is rounded as a module does it: x scaled, then its product.
    """
    return _call(torch.ops.macko.sell_norm_linear, x, weight, eps, *packed, bias)


def sell_gated_linear(gate: Tensor, up: Tensor, packed: SellMatrix, bias: Tensor | None = None) -> Tensor:
    """sell_linear(silu(gate) * up, packed, bias) for one token, two launches that overlap; without gradients.

    Args:
        gate, up: [..., cols] of one token, of data's dtype and device; cols a multiple of 8. Both the silu and the
            product are rounded, as modules do it.
    """
    return _call(torch.ops.macko.sell_gated_linear, gate, up, *packed, bias)


#: data, offsets, rows, cols, widest of a matrix in the tile layout.
TileMatrix = tuple[Tensor, Tensor, int, int, int]


def tile_pack(
    values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4
) -> tuple[Tensor, Tensor, int, int]:
    """The layout in which a GPU multiplies a macko matrix by many tokens; csrc/tile/tile.h says what the tensors hold.

    Args:
        values, deltas, row_ptr, cols, delta_bits: the packed matrix [rows, cols], float16 or bfloat16.

    Returns:
        data of values' dtype, offsets [slabs + 1] int32, the size of the largest slab, the number of non-zeros. The
        CPU's and CUDA's are the same bytes.

    Raises:
        RuntimeError: wrong device, dtype or shape, or content that points outside the matrix.
    """
    return torch.ops.macko.tile_pack(values, deltas, row_ptr, cols, delta_bits)


def tile_unpack(packed: TileMatrix) -> Tensor:
    """The dense [rows, cols] matrix, bit for bit what was packed. Trusts the content, does not wait for the device."""
    return torch.ops.macko.tile_unpack(*packed)


def tile_check(packed: TileMatrix) -> Tensor:
    """The first place where the packed data breaks the layout: int64 [4] of kind (0: none), row block, slab, found.

    What comes from outside is checked once; the other ops trust the content. Runs on the CPU. Where there is none,
    found is the number of values.
    """
    return torch.ops.macko.tile_check(*packed)


def tile_linear(x: Tensor, packed: TileMatrix, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias for x [..., cols], as `linear`; differentiable in x and bias.

    On a GPU one launch, the same bits at every run; above 512 tokens that takes sm_90, other GPUs go through dense rows
    in a workspace of at most 64 MB. On the CPU always through dense rows.
    """
    return _call(torch.ops.macko.tile_linear, x, *packed, bias)


def tile_linear_parts(x: Tensor, packed: TileMatrix, part_rows: Sequence[int]) -> list[Tensor]:
    """As sell_linear_parts. CUDA only."""
    return torch.ops.macko.tile_linear_parts(x, *packed, part_rows)


def bitmap_pack(
    values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """The layout in which a CPU runs a macko matrix; csrc/bitmap/bitmap.h says what the tensors hold. CPU only.

    Args:
        values, deltas, row_ptr, cols, delta_bits: the packed matrix [rows, cols].

    Returns:
        values of the same dtype, non-zeros only; bits [rows, ceil(cols / 64) * 8] uint8; row_ptr [rows + 1] int32.

    Raises:
        RuntimeError: wrong device, dtype or shape, or content that points outside the matrix.
    """
    return torch.ops.macko.bitmap_pack(values, deltas, row_ptr, cols, delta_bits)


def bitmap_to_macko(
    values: Tensor, bits: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """The values, deltas and row_ptr of the macko format, bit for bit those that bitmap_pack was given.

    Without a dense matrix on the way: so a model is saved in the memory that it has.

    Raises:
        RuntimeError: wrong device, dtype or shape, or content that points outside the matrix.
    """
    return torch.ops.macko.bitmap_to_macko(values, bits, row_ptr, cols, delta_bits)


def bitmap_unpack(values: Tensor, bits: Tensor, row_ptr: Tensor, cols: int) -> Tensor:
    """The dense [rows, cols] matrix, bit for bit but for the sign of zeros.

    Raises:
        RuntimeError: wrong device, dtype or shape, or content that points outside the matrix.
    """
    return torch.ops.macko.bitmap_unpack(values, bits, row_ptr, cols)


def bitmap_check(values: Tensor, bits: Tensor, row_ptr: Tensor, cols: int) -> Tensor:
    """The first place where the packed data breaks the layout: int64 [4] of kind (0: none), row, entry, found."""
    return torch.ops.macko.bitmap_check(values, bits, row_ptr, cols)


def bitmap_spmv(values: Tensor, bits: Tensor, row_ptr: Tensor, cols: int, x: Tensor) -> Tensor:
    """y = W x for one vector x [cols], as `spmv`; differentiable in x.

    Raises:
        RuntimeError: wrong device, dtype or shape, or content that points outside the matrix.
    """
    return _call(torch.ops.macko.bitmap_spmv, values, bits, row_ptr, cols, x)


def bitmap_linear(
    x: Tensor, values: Tensor, bits: Tensor, row_ptr: Tensor, cols: int, bias: Tensor | None = None
) -> Tensor:
    """x W^T + bias for x [..., cols], as `linear`; differentiable in x and bias.

    Few tokens are multiplied from the packed weight, four at a time; many by torch's dense product, from blocks of rows
    that are written densely for its time.
    """
    return _call(torch.ops.macko.bitmap_linear, x, values, bits, row_ptr, cols, bias)


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
        The eight tensors that csrc/ec/ec.h describes, on w's device; the CPU's and CUDA's are the same bytes.

    Raises:
        RuntimeError: wrong device, dtype, shape or option, or more than 2^31 - 1 columns stored in one set.
    """
    return torch.ops.macko.ec_pack(w, delta_bits, lanes, max_height, min_width, max_width, tile_rows, max_slabs)


def ec_unpack(packed: EcMatrix) -> Tensor:
    """The dense [rows, cols] matrix, bit for bit but for the sign of zeros. The content is trusted: see ec_check."""
    return torch.ops.macko.ec_unpack(*packed)


def ec_check(packed: EcMatrix) -> Tensor:
    """The first place where the packed data breaks the format: int64 [4] of kind (0: none), set, entry, found.

    A matrix that comes from outside is checked once; the other ops trust its content. Runs on the CPU.
    """
    return torch.ops.macko.ec_check(*packed)


def ec_spmv(packed: EcMatrix, x: Tensor) -> Tensor:
    """y = W x for one vector x [cols]; differentiable in x. The same bits at every run. See ec_check for the content.

    Raises:
        RuntimeError: wrong device, dtype or shape.
    """
    return _call(torch.ops.macko.ec_spmv, *packed, x)


def ec_linear(x: Tensor, packed: EcMatrix, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias for x [..., cols]; differentiable in x and bias. More than one token: by a temporary dense copy."""
    return _call(torch.ops.macko.ec_linear, x, *packed, bias)


def slide_pack(w: Tensor, n: int, dtype: torch.dtype, prune: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Packs a weight of pattern (2n-2):2n for the 2:4 tensor cores, or a dense one for the same kernel (SlideSparse).

    Args:
        w: [rows, cols], float16 or bfloat16 (float32 too on the CPU), or codes that are of `dtype` already.
        n: 2 to 8 for at most 2n-2 non-zeros in each 2n consecutive columns; 0 for a dense weight.
        dtype: int8 or float8_e4m3fn (quantised per row by its largest magnitude), or w's own 16-bit type.
        prune: whether a group with too many non-zeros loses its smallest, instead of being an error.

    Returns:
        packed uint8 [row_blocks, k_tiles, tile_bytes] (csrc/slide/slide.h), scale float32 [rows] (1 where nothing was
        quantised), and how many non-zeros pruning dropped, int64 [1].

    Raises:
        RuntimeError: wrong device, dtype or shape, or a group that does not fit: named by row, group and count.
    """
    return torch.ops.macko.slide_pack(w, n, dtype, prune)


def slide_unpack(packed: Tensor, scale: Tensor, cols: int, n: int, dtype: torch.dtype) -> Tensor:
    """The codes [rows, cols] of dtype: the weight itself for 16-bit types, weight / scale rounded for 8-bit ones."""
    return torch.ops.macko.slide_unpack(packed, scale, cols, n, dtype)


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
    dense: Tensor | None = None,
    sparse_from: int = 0,
    sparse_to: int = 0,
) -> Tensor:
    """x W^T + bias with the packed W: quantise and lift, then one GEMM; differentiable in x and bias.

    Args:
        x: [..., cols], float16 or bfloat16 (float32 too on the CPU); of dtype where that has 16 bits.
        packed, scale, cols, n, dtype: the packed weight.
        bias: [rows] of x's dtype, or None.
        dense: the same weight packed with n = 0, which runs for fewer than sparse_from or more than sparse_to tokens.

    Returns:
        [..., rows] of x's dtype. The gradient in x is that of the dequantised weight.
    """
    return _call(torch.ops.macko.slide_linear, x, packed, scale, cols, n, dtype, bias, dense, sparse_from, sparse_to)


@torch.library.register_fake("macko::pack")
def _(w: Tensor, delta_bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    torch._check(w.dim() == 2, lambda: f"macko::pack: w has shape {list(w.shape)}, expected 2 dimension(s)")
    context = torch.library.get_ctx()
    chunks = context.new_dynamic_size()
    return (
        w.new_empty(chunks * 8),
        w.new_empty(chunks * delta_bits if delta_bits else context.new_dynamic_size(), dtype=torch.uint8),
        w.new_empty(w.shape[0] + 1, dtype=torch.int32),
    )


@torch.library.register_fake("macko::sell_pack")
def _(
    values: Tensor,
    deltas: Tensor,
    row_ptr: Tensor,
    cols: int,
    delta_bits: int = 4,
    gap_bits: int = 0,
    warps: int = 0,
    blocks: int = 0,
) -> tuple[Any, ...]:
    slots, groups, num_blocks, *sizes = (torch.library.get_ctx().new_dynamic_size() for _ in range(7))
    return (
        values.new_empty(slots * 32),
        values.new_empty(groups * 32, dtype=torch.int16),
        values.new_empty(num_blocks, 8, dtype=torch.int32),
        values.new_empty(2, row_ptr.shape[0] - 1, dtype=torch.int32),
        *sizes,
    )


@torch.library.register_fake("macko::tile_pack")
def _(values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4) -> tuple[Any, ...]:
    units, *sizes = (torch.library.get_ctx().new_dynamic_size() for _ in range(3))
    slabs = (row_ptr.shape[0] + 62) // 64 * ((cols + 255) // 256)
    return values.new_empty(units * 64), values.new_empty(slabs + 1, dtype=torch.int32), *sizes


@torch.library.register_fake("macko::bitmap_pack")
def _(values: Tensor, deltas: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return (
        values.new_empty(torch.library.get_ctx().new_dynamic_size()),
        values.new_empty(row_ptr.shape[0] - 1, (cols + 63) // 64 * 8, dtype=torch.uint8),
        torch.empty_like(row_ptr),
    )


@torch.library.register_fake("macko::bitmap_to_macko")
def _(values: Tensor, bits: Tensor, row_ptr: Tensor, cols: int, delta_bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    chunks = torch.library.get_ctx().new_dynamic_size()
    return (
        values.new_empty(chunks * 8),
        values.new_empty(chunks * delta_bits, dtype=torch.uint8),
        torch.empty_like(row_ptr),
    )


@torch.library.register_fake("macko::ec_pack")
def _(
    w: Tensor,
    delta_bits: int = 4,
    lanes: int = 32,
    max_height: int = 16,
    min_width: int = 128,
    max_width: int = 8192,
    tile_rows: int = 128,
    max_slabs: int = 1,
) -> EcTensors:
    torch._check(w.dim() == 2, lambda: f"macko::ec_pack: w has shape {list(w.shape)}, expected 2 dimension(s)")
    context = torch.library.get_ctx()
    values, deltas, bases, indptr, rows, sets, order = (context.new_dynamic_size() for _ in range(7))
    index = torch.uint16 if w.shape[1] <= 65536 else torch.int32
    tiles = (w.shape[0] + tile_rows - 1) // tile_rows
    return (
        w.new_empty(values),
        w.new_empty(deltas, dtype=torch.uint8),
        w.new_empty(bases, dtype=index),
        w.new_empty(indptr, dtype=torch.int32),
        w.new_empty(rows, dtype=torch.int32),
        w.new_empty(sets, tiles + 1, dtype=torch.int32),
        w.new_empty(sets + 1, 8, dtype=torch.int64),
        w.new_empty(order, dtype=index),
    )


def _slide_depth(cols: Any, n: int) -> Any:
    expanded = (cols + 2 * n - 1) // (2 * n) * 4 * (n - 1) if n else cols
    return max(expanded + 127, 128) // 128 * 128


@torch.library.register_fake("macko::slide_pack")
def _(w: Tensor, n: int, dtype: torch.dtype, prune: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    torch._check(w.dim() == 2, lambda: f"macko::slide_pack: w has shape {list(w.shape)}, expected 2 dimension(s)")
    k_tiles = (_slide_depth(w.shape[1], n) * dtype.itemsize + 255) // 256 * 2
    tile_bytes = (4096 + 1024 // dtype.itemsize) if n else 8192
    return (
        w.new_empty((w.shape[0] + 63) // 64, k_tiles, tile_bytes, dtype=torch.uint8),
        w.new_empty(w.shape[0], dtype=torch.float32),
        w.new_empty(1, dtype=torch.int64),
    )


@torch.library.register_fake("macko::slide_quant_fused")
def _(x: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(*x.shape[:-1], _slide_depth(x.shape[-1], n), dtype=dtype),
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
    return lifted.new_empty(*lifted.shape[:-1], scale.shape[0], dtype=out_dtype)


# The other ops have a packed matrix, x and a bias under these names in their schemas: shape functions and gradients of
# all formats are made from those.

#: Shape of x by the last word of an op's name.
_SHAPES = {"spmv": "[cols]", "spmm": "[tokens, cols]", "linear": "[..., cols]"}


def _binder(name: str) -> Callable[..., dict[str, Any]]:
    """What gives a call's arguments by name, with those that torch leaves out: trailing ones that have the default."""
    arguments = getattr(torch.ops.macko, name).default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}

    def bind(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}

    return bind


def _rows(given: dict[str, Any]) -> Any:
    """Rows of the packed matrix among an op's arguments."""
    if "row_ptr" in given:
        return given["row_ptr"].shape[0] - 1
    return given["rows"] if "rows" in given else given["perm" if "perm" in given else "scale"].shape[-1]


def _unpack_of(format: str) -> Any:
    return getattr(torch.ops.macko, f"{format}_unpack" if format else "unpack").default


def _times(grad: Tensor, format: str, packed: dict[str, Any]) -> Tensor:
    """grad W for grad [..., rows] and what unpack takes of the packed W."""
    w = _unpack_of(format)(**packed) if format else torch.ops.macko.unpack(**packed, check=False)
    if format == "slide":
        grad, w = (grad * packed["scale"]).to(grad.dtype), w.to(grad.dtype)
    return grad @ w


def _check_x(name: str, kind: str, x: Tensor, cols: Any) -> None:
    torch._check(
        x.dim() >= 1 and x.dim() == {"spmv": 1, "spmm": 2}.get(kind, x.dim()) and x.shape[-1] == cols,
        lambda: f"macko::{name}: x has shape {list(x.shape)}, expected {_SHAPES[kind].replace('cols', str(cols))}",
    )


def _register_product(name: str) -> None:
    """The shape function of y = x W^T + bias and its gradients in x and bias."""
    format, _, kind = name.rpartition("_")
    format, _, fused = format.partition("_")  # "norm" or "gated": what is done to x before
    bind = _binder(name)
    names = list(bind((), {}))
    packed_names = [argument.name for argument in _unpack_of(format)._schema.arguments if argument.name in names]

    def fake(*args: Any, **kwargs: Any) -> Tensor:
        given = bind(args, kwargs)
        x = given["gate" if fused == "gated" else "x"]
        _check_x(name, kind, x, given["cols"])
        return x.new_empty(*x.shape[:-1], _rows(given))

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        given = bind(inputs, {})
        tensors = {name: given[name] for name in packed_names if isinstance(given[name], Tensor)}
        ctx.save_for_backward(*tensors.values())
        ctx.tensor_names, ctx.sizes = list(tensors), {name: given[name] for name in packed_names if name not in tensors}

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if fused:
            raise NotImplementedError(f"macko::{name} has no gradients: make its input before {format}_linear")
        wanted = dict(zip(names, ctx.needs_input_grad, strict=False))
        gradients: dict[str, Tensor | None] = dict.fromkeys(names)
        if wanted["x"]:
            packed = {**dict(zip(ctx.tensor_names, ctx.saved_tensors, strict=True)), **ctx.sizes}
            gradients["x"] = _times(grad, format, packed)
        if wanted.get("bias"):
            gradients["bias"] = grad.sum_to_size(grad.shape[-1])
        return tuple(gradients.values())

    torch.library.register_fake(f"macko::{name}", fake)
    torch.library.register_autograd(f"macko::{name}", backward, setup_context=save)


def _register_parts(name: str) -> None:
    """The shape function of x W^T in parts; its gradient is an error, as its users take the whole product for that."""
    bind = _binder(name)

    def fake(*args: Any, **kwargs: Any) -> list[Tensor]:
        given = bind(args, kwargs)
        x = given["x"]
        _check_x(name, "linear", x, given["cols"])
        return [x.new_empty(*x.shape[:-1], rows) for rows in given["part_rows"]]

    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(f"macko::{name} has no gradients: split what {name.removesuffix('_parts')} gives")

    torch.library.register_fake(f"macko::{name}", fake)
    torch.library.register_autograd(f"macko::{name}", backward)


def _register_unpack(name: str) -> None:
    """The shape function of the dense [rows, cols] matrix, of the first tensor's dtype or the one asked for."""
    bind = _binder(name)

    def fake(*args: Any, **kwargs: Any) -> Tensor:
        given = bind(args, kwargs)
        first = next(iter(given.values()))
        return first.new_empty(_rows(given), given["cols"], dtype=given.get("dtype", first.dtype))

    torch.library.register_fake(f"macko::{name}", fake)


def _fault(*args: Any, **kwargs: Any) -> Tensor:
    return args[0].new_empty(4, dtype=torch.int64)


for _name in _library.op_names:
    if _name.rpartition("_")[2] in _SHAPES:
        _register_product(_name)
    elif _name.endswith("_parts"):
        _register_parts(_name)
    elif _name.endswith("unpack"):
        _register_unpack(_name)
    elif _name.endswith("check"):
        torch.library.register_fake(f"macko::{_name}", _fault)
