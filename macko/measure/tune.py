"""autotune: which format is the fastest here, measured for the layers of a model; macko.choose.times has the file."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from .. import ops
from ..choose.auto import layouts
from ..choose.patterns import meant_pattern
from ..choose.times import SLIDE_DTYPES, TIMED, Line, bandwidth_gbps, cache_file, gpu_name, read, write
from ..nn.find import check_model, find_linears
from ..nn.linear import SparseLinear, unsupported
from ..weights import FORMATS, SLIDE_PATTERNS, EcWeight, MackoWeight, PackedWeight, SlideWeight
from .timing import capture, copies, read_gbps, time_calls, time_replays

#: Densities are rounded to this before they are compared.
BUCKET = 0.05
#: Layers with fewer weights take no time that counts.
SMALLEST = 1 << 16
#: What is measured of slide by default: rows and columns of linears of 7B models, and numbers of tokens.
SLIDE_SHAPES = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (12288, 4096), (22016, 4096), (4096, 11008))
SLIDE_TOKENS = (
    *(1, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768),
    *(1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384),
)


def autotune(
    model: nn.Module,
    *,
    tokens: Sequence[int] = (1,),
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Path:
    """Times the formats that can run the model's linear layers here, once for each shape, density and dtype.

    Not sparse11, which stands for tile where it holds a weight. On the GPU where there is one, else on the CPU. What it
    finds goes into the user's table for it, which `sparsify_(format="auto")` reads from then on. Takes about half a
    second a shape, a few on a CPU, and fifteen where slide's kernels are timed too: for weights of an n:m pattern. The
    model is not changed.

    Args:
        model: dense with zeros in its weights, or sparse.
        tokens: numbers of tokens at once to time; the choice of a format looks at 1.
        path: a file instead of the user's table.

    Returns:
        The file.

    Raises:
        TypeError: the model is none.
        ValueError: there is no layer to time.
    """
    check_model(model, "autotune")

    def weights() -> Iterator[tuple[str, Tensor]]:  # one unpacked at a time
        for layer in find_linears(model, (), None):
            module = layer.module
            if isinstance(module, SparseLinear) and module.device.type != "meta":
                yield layer.name, module.weight.as_subclass(Tensor)
            elif type(module) is nn.Linear and module.weight.device.type != "meta":
                yield layer.name, module.weight.detach()

    return tune(weights(), tokens=tokens, path=path, progress=progress)


def tune(
    weights: Iterable[tuple[str, Tensor]],
    *,
    tokens: Sequence[int] = (1,),
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
    device: torch.device | str | None = None,
) -> Path:
    """What autotune does, for (name, dense weight) pairs, on that device; default: the GPU where there is one."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = gpu_name(where)
    target = cache_file(gpu) if path is None else Path(path)
    if path is not None and target.exists():
        read(target)  # before the time is spent: what is no table is not overwritten
    done: dict[tuple[int, int, float, torch.dtype], list[Line]] = {}
    patterns: dict[str, set[tuple[int, int]]] = {}
    with tqdm(weights, disable=not progress, delay=1, unit="layer", leave=False) as bar:
        for name, weight in bar:
            bar.set_description(name, refresh=False)
            w = weight.to(where)
            if w.dim() != 2 or w.numel() < SMALLEST:
                continue
            if unsupported(w.dtype, where):
                w = w.half()
            density = round(round(int(w.count_nonzero()) / w.numel() / BUCKET) * BUCKET, 2)
            key = (*w.shape, density, w.dtype)
            if density in (0.0, 1.0) or key in done:
                continue
            about = {"rows": w.shape[0], "cols": w.shape[1], "density": density}
            about |= {"dtype": str(w.dtype).removeprefix("torch.")}
            done[key] = [{**about, "tokens": count, "us": measure(w, count)} for count in tokens]
            if where.type == "cuda" and SlideWeight.runs(w.device, w.dtype) and (n := meant_pattern(w)):
                patterns.setdefault(f"{2 * n - 2}:{2 * n}", set()).add((w.shape[0], w.shape[1]))
    if not done:
        raise ValueError(
            f"there is no layer with zeros, of {SMALLEST:,} weights or more, to time: macko prune makes zeros; "
            "`macko bench FOLDER --format dense12` times a model that has none"
        )
    slide: list[Line] = []
    for name, shapes in patterns.items():
        slide += measure_slide(patterns=(name,), shapes=sorted(shapes))
    bandwidth = bandwidth_gbps(where) if where.type == "cuda" else round(read_gbps(), 1)
    write(target, gpu, (line for lines in done.values() for line in lines), slide, bandwidth)
    return target


def measure(w: Tensor, tokens: int = 1) -> dict[str, float]:
    """Microseconds of x W^T by format, and "dense", with cold caches.

    On a GPU in a CUDA graph, at whatever clock it keeps up: many never run at their highest one. On a CPU the medians
    of calls by turns, of the formats that "auto" chooses from there.
    """
    x = torch.randn(tokens, w.shape[1], device=w.device).to(w.dtype)
    with torch.no_grad():
        if w.device.type == "cpu":
            took = time_calls(dict(_products(w, x)))
        else:
            took = {name: statistics.median(time_replays(*capture(calls))) for name, calls in _products(w, x)}
    took["dense"] = min(took["dense"], took.pop("mv", math.inf))
    return {name: round(us, 1 if w.device.type == "cpu" else 3) for name, us in took.items()}


def _products(w: Tensor, x: Tensor) -> Iterator[tuple[str, list[partial[Tensor]]]]:
    """By name, x W^T from copies of w in every format, one after the other: they may not all fit on a GPU."""
    dense = [copy for (copy,) in copies([w])]
    yield "dense", [partial(nn.functional.linear, x, copy) for copy in dense]
    if len(x) == 1:
        yield "mv", [partial(torch.mv, copy, x[0]) for copy in dense]
    del dense
    macko = MackoWeight.from_dense(w)
    timed = [FORMATS[name] for name in TIMED if name in FORMATS]
    others = [kind for kind in layouts(macko) if kind in timed]
    kinds: list[type[PackedWeight]] = [MackoWeight, *others, *([EcWeight] if w.is_cuda else [])]
    for kind in kinds:
        try:
            packed = kind.from_macko(macko)
            packed.linear(x)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):
            continue  # the format does not hold this one, or has no kernel for this GPU
        each = (dict(zip(packed.tensors(), of, strict=True)) for of in copies(list(packed.tensors().values())))
        yield kind.format, [partial(type(packed)(**tensors, **packed.sizes()).linear, x) for tensors in each]


def measure_slide(
    device: torch.device | str = "cuda",
    dtypes: Iterable[str] = tuple(SLIDE_DTYPES),
    patterns: Iterable[str] = ("2:4", "4:6", "6:8"),
    shapes: Iterable[tuple[int, int]] = SLIDE_SHAPES,
    tokens: Iterable[int] = SLIDE_TOKENS,
    cold_bytes: int = 100_000_000,
) -> list[Line]:
    """Times slide's dense and pattern kernels on a GPU, in turn, and returns a table's lines of them.

    Weights rotate over copies of `cold_bytes` together, so that they come from memory as in a model. About two minutes.
    Types that the GPU has no kernel for are left out.
    """
    lines: list[Line] = []
    with torch.cuda.device(device):
        there = [name for name in dtypes if SlideWeight.runs(torch.device("cuda"), SLIDE_DTYPES[name])]
        for (rows, cols), name in ((shape, name) for shape in shapes for name in there):
            dtype = SLIDE_DTYPES[name]
            w = torch.randn(rows, cols, device="cuda").bfloat16()
            num_copies = max(2, cold_bytes // (rows * cols) + 1)
            weights: dict[int, list[tuple[Tensor, Tensor]]] = {}
            for n in (0, *(SLIDE_PATTERNS[pattern] for pattern in patterns)):
                packed, scale, _ = ops.slide_pack(w, n, dtype, prune=True)
                weights[n] = [(packed.clone(), scale) for _ in range(num_copies)]
            gains: dict[int, dict[str, float]] = {n: {} for n in weights if n}
            for m in tokens:
                x = torch.randn(m, cols, device="cuda").bfloat16()
                us = dict.fromkeys(weights, math.inf)
                for n in (*weights, *reversed(weights)):
                    calls = [partial(ops.slide_linear, x, p, s, cols, n, dtype) for p, s in weights[n]]
                    launches = 32 if m <= 512 else 4
                    us[n] = min(us[n], *time_replays(*capture(calls[:launches], launches), replays=5, warmup=1))
                for n in gains:
                    gains[n][str(m)] = round(us[0] / us[n], 3)
            about = {"rows": rows, "cols": cols, "dtype": name}
            lines += [{**about, "pattern": f"{2 * n - 2}:{2 * n}", "gain": gain} for n, gain in gains.items()]
    return lines
