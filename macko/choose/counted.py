"""How long slabs take beside dense on a GPU that nobody timed them on: counted, from what the GPU is.

In clocks of an SM for a slab, 64 x 256 elements: what memory takes for its bytes, what the kernel of GPUs without wgmma
takes for decoding it (measured), and what tensor cores take for its products; the largest of the three.
"""

from __future__ import annotations

import torch

from .times import bandwidth_gbps, held_bytes

ELEMENTS = 64 * 256
#: By codec, for up to so many tokens at once: clocks for a slab where they are more than memory's. Of tile an H200's
#: (benchmarks/results/h200/rings.jsonl), of dense12 an H100's: F.linear's time of the same run stands for the bytes of
#: dense at 18.4 and 12.8 bytes a clock, at density 0.5, geometric means of five shapes.
CLOCKS = {
    "tile": {8: 1300, 16: 1440, 32: 1750, 64: 2600, 128: 4260},
    "dense12": {8: 1910, 16: 1930, 32: 2100, 64: 2430, 128: 4130},
}
#: Multiply-adds of 16-bit numbers with float32 sums, a clock and SM: an A100's, and a GeForce's, which have the fewest.
A100_PRODUCTS, GEFORCE_PRODUCTS = 1024, 256
#: Of these what products with weights in registers are to reach, a library's and this kernel's with over 64 tokens.
LIBRARY_SHARE, BLOCKS_SHARE = 0.85, 0.7
#: Bytes a clock and SM where torch does not say a GPU's clocks: those of a B200, which has the most, and of an H100.
BYTES_OF_10, BYTES_ELSEWHERE = 29.2, 12.8


def bytes_a_clock(device: torch.device) -> float:
    """What memory brings to an SM."""
    gpu = torch.cuda.get_device_properties(device)
    kilohertz, gbps = getattr(gpu, "clock_rate", 0), bandwidth_gbps(device)
    if kilohertz and gbps:
        return gbps / (gpu.multi_processor_count * kilohertz / 1e6)
    return BYTES_OF_10 if gpu.major == 10 else BYTES_ELSEWHERE


def clocks(format: str, density: float, tokens: int, device: torch.device) -> float:
    """Of a slab in "dense", "tile" or "dense12"."""
    share = {"dense": 1.0, "dense12": 0.754}.get(format, density + 1 / 8)
    memory = ELEMENTS * 2 * share / bytes_a_clock(device)
    capability = torch.cuda.get_device_capability(device)
    products = A100_PRODUCTS if capability == (8, 0) or capability[0] in (9, 10) else GEFORCE_PRODUCTS
    counts, decoding = CLOCKS.get(format), 0.0
    reached = BLOCKS_SHARE if counts and tokens > 64 else LIBRARY_SHARE
    if counts:
        most = max(counts)
        decoding = counts[min(n for n in counts if n >= tokens)] if tokens <= most else counts[most] * tokens / most
    return max(memory, decoding, ELEMENTS * tokens / products / reached)


def gain(format: str, density: float, tokens: int, device: torch.device) -> float:
    """Dense time over that of "tile" or "dense12"."""
    return clocks("dense", density, tokens, device) / clocks(format, density, tokens, device)


def us(dense: float, density: float, tokens: int, device: torch.device) -> dict[str, float]:
    """Microseconds of what auto chooses by such times, given those of dense."""
    return {"tile": dense / gain("tile", density, tokens, device)}


def us_without_slabs(one: float, dense: float, density: float, tokens: int) -> dict[str, float]:
    """The same on a GPU without kernels for slabs, of several tokens, as csrc/torch/path.h counts them.

    By dense rows; from sell's stream in a pass for each, where that takes less.

    Args:
        one, dense: microseconds of the dense product of one token, and of all.
    """
    share = held_bytes("sell", 1, 1, density, 2) / 2  # of the dense bytes
    by_rows = dense + one * (1 + share)
    return {"macko": by_rows, "sell": min(by_rows, one * tokens * (0.1 + share))}
