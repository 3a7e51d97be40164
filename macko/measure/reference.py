"""What tests and `macko bench` want of a product: x W^T + bias in float64, and how far roundings may take it.

A sum of the terms t_j (products, exact in float32 for 16-bit types, and the bias) in float32, u = 2^-24, is off by
the sum of what its n = cols + 2 roundings are off, each by u of the partial sum it rounds. In any order that is at
most m, the larger of the sum of the positive and of the negative terms. So, but for a factor 1 + n u:

- n u m, whatever the values are (Higham, Accuracy and Stability of Numerical Algorithms, 4.2);
- lambda sqrt(n) u m for roundings that are zero on average, given those before them, by Azuma's inequality (Higham
  and Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41, 2019; for partial sums
  Hallman and Ipsen, Precision-aware deterministic and probabilistic error bounds for floating point summation,
  2023). lambda is such that any of the outputs exceeds it with a probability of 1e-12. Roundings of equal terms
  are alike; so n u |sum| comes on top, which is the first bound again where all terms have one sign. What can be
  right and outside is thousands of equal terms that equal ones of the other sign cancel, added one by one.

The smaller one counts: for random signs the second from some 150 columns on, at 4096 a fifth of the first. With
`chain` neither does: a product goes through that many roundings then, which is chain u of sum |t_j| for all.

By torch's product, in addition: values below bfloat16's normal range may be taken as zero, as VDPBF16PS does.
Assumed are torch's defaults, with which nothing on a CPU is in 16 bits. On CUDA

- with a bias the product may be rounded to `dtype` before it is added, eps / 2 of it (odd sizes);
- tensor cores align 16 products and the sum before them to the largest and cut them off at 2 u of it: 17 errors a
  step that are u on average, toward zero. Those of products cancel as their signs do; that of the sum may not. Some
  64 partial sums are added at the end;
- partial sums p_i over columns (split-K) may be rounded to 16 bits, which
  torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction allows: eps / 2 of sum |p_i|, at most of
  sum |t_j|; for random signs, lambda sqrt(sum t_j^2) by Hoeffding's inequality, for one sign |sum|, counted both. Of
  three parts the sum of the first two may be rounded too, which is no more: counted twice. (Once was not enough for a
  row with one large term, which all these roundings are of: 1.09 of the bound, 1000 tokens, 1001 columns, H100.)

Then the result is rounded to `dtype`, which for 16-bit types is most of the bound. float32's is that of the sums
alone, and of the order nothing is assumed: at 4096 columns, of normal values, products of torch and of macko are
off by less than 1/500 of it, a sum from left to right by 1/170, one by rising value by 1/9. An order that does not
follow from the values has partial sums of some sqrt(sum t_j^2) where signs are random, but of m where they are
not, as in a row of positive and then negative weights, whose product is as right. So the bound could only be
narrowed by assuming random signs, or the blocks and accumulators of each library. It is narrow enough for what it
is for: 0.07 % of a typical result, of which a column in 64 is 12 %.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    by_torch: bool = True,
    *,
    chain: int | None = None,
    flush: float = 0.0,
    cuts: int = 0,
) -> tuple[Tensor, Tensor]:
    """x W^T + bias in float64 on x's device, and how far from it a result of `dtype` may be for its roundings.

    The derivation is the module's.

    Args:
        x: [..., cols]; w: dense [rows, cols]; bias: [rows] or None.
        by_torch: torch's product may have done the sums, else a kernel of macko's, with one rounding to `dtype`.
        chain: additions after a product plus one for the product; default: any order of summation.
        flush: values below it may be taken as zero (an instruction that knows no subnormals).
        cuts: additions that keep no more than 13 bits behind the largest term, as those of float8's tensor cores.

    Returns:
        Both float64 [..., rows].
    """
    wide_x, wide_w = x.double(), w.to(x.device).double()
    product, size = wide_x @ wide_w.t(), wide_x.abs() @ wide_w.abs().t()
    wanted = product
    if bias is not None:
        wide_bias = bias.to(x.device).double()
        wanted, size = product + wide_bias, size + wide_bias.abs()

    cols, unit, deviations = w.shape[1], 2.0**-24, math.sqrt(2 * math.log(4 * max(1, wanted.numel()) / 1e-12))
    if x.is_cuda:
        steps = -(-cols // 16)
        always, random = 2 * 17 * steps + 64, deviations * math.sqrt(17 * steps + 64) + steps
    else:
        always, random = cols + 2, deviations * math.sqrt(cols + 2)
    largest_sum = (size + wanted.abs()) / 2
    error = torch.minimum(always * largest_sum, random * largest_sum + always * wanted.abs())
    if chain is not None:
        always, error = chain, chain * size
    # A product or sum below float32's normal range is off by half its smallest number, 2^-149, at most.
    error = error * unit / (1 - always * unit) + cols * 2.0**-149 + cuts * 2.0**-13 * size

    kind = torch.finfo(dtype)
    half, smallest = kind.eps / 2, kind.smallest_normal * kind.eps / 2  # of a rounding to dtype
    if by_torch:
        flush = torch.finfo(torch.bfloat16).smallest_normal
        if x.is_cuda and dtype.itemsize == 2:
            random_signs = deviations * (wide_x.square() @ wide_w.square().t()).sqrt()
            error += 2 * torch.minimum(size, product.abs() + random_signs) * half
        if bias is not None and x.is_cuda:
            error += (product.abs() + error) * half + smallest
    error += flush * (wide_x.abs().sum(-1, keepdim=True) + wide_w.abs().sum(-1) + cols)
    return wanted, error + (wanted.abs() + error) * half + smallest
