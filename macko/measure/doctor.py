"""`macko doctor`: what is installed, and a self-test of every op on every device. Exit code 0 or 1."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import FORMATS, __version__, _library, ops
from ..choose.times import gpu_name, measured_gpus, times_of
from ..nn.linear import DTYPES
from ..weights import SellWeight, SlideWeight, TileWeight


class _Called(TorchDispatchMode):
    """Collects the names of the macko ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "macko":
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def _test_experts(w: Tensor, x: Tensor) -> None:
    """linear_experts of two experts, w and -w, and what stands around it: the first token is the second one's."""
    rows, ids = len(w), torch.tensor([[1]] + [[0]] * (len(x) - 1), device=w.device)

    def stacked(w: Tensor) -> TileWeight:
        filled = torch.nn.functional.pad(w, (0, 0, 0, -rows % 64))
        return TileWeight.from_dense(torch.cat([filled, -filled]))

    stack, down, weights = stacked(w), stacked(w[:, : rows // 2]), torch.full_like(x[:, :1], 0.5)
    order, places, ends = ops.expert_order(ids, 2)
    y = ops.linear_experts(x, *stack.packed, rows, ends, order)
    wanted = x.double() @ w.double().t()
    assert torch.equal(y.double(), torch.cat([wanted[1:], -wanted[:1]])), "linear_experts is off"
    total = ops.expert_sum(y, places, weights).double()
    assert torch.equal(total, torch.cat([-wanted[:1], wanted[1:]]) / 2), "expert_sum is off"
    total = ops.expert_sum(ops.linear_experts(y, *down.packed, rows, ends, gated=True), places, weights)
    at_once = ops.gated_experts(x, ids, weights, 2, (*stack.packed, rows), (*down.packed, rows))
    assert torch.equal(at_once, total), "gated_experts is off"


def self_test(device: torch.device, dtype: torch.dtype) -> None:
    """Every format and op on small integers, whose sums every dtype holds exactly. AssertionError where one is off."""
    generator = torch.Generator().manual_seed(0)
    rows, cols = 96, 200
    wide = torch.randint(-1, 2, (rows, cols), generator=generator).double()
    x = torch.randint(-1, 2, (3, cols), generator=generator).double()
    bias = torch.randint(-9, 10, (rows,), generator=generator).double()
    w = wide.to(device, dtype)
    papers = {"macko": torch.ops.macko.spmv.default, "ec": torch.ops.macko.ec_spmv.default}
    for name, format in FORMATS.items():
        if not format.runs(device, dtype, cols):
            continue
        packed = format.from_dense(w)
        packed.validate()
        assert torch.equal(packed.to_dense(), w), f"{name}: to_dense differs"
        assert torch.equal(packed.to_macko().to_dense(), w), f"{name}: to_macko differs"
        for tokens in (x[0], x):
            wanted = tokens @ wide.t() + bias
            got = packed.linear(tokens.to(device, dtype), bias.to(device, dtype))
            assert torch.equal(got.cpu().double(), wanted), f"{name}: linear of {list(tokens.shape)} is off"
        for part_rows in ((rows // 3, 0, rows - rows // 3), (rows // 3 * 2, rows // 3)):  # by copies, and by kernels
            y = torch.cat([*packed._own_parts(x.to(device, dtype), part_rows)], -1)
            assert torch.equal(y.cpu().double(), x @ wide.t()), f"{name}: linear_parts is off"
        if op := papers.get(name):
            fields = {a.name: getattr(packed, a.name) for a in op._schema.arguments if hasattr(packed, a.name)}
            y = op(**fields, x=x[0].to(device, dtype))
            assert torch.equal(y.cpu().double(), x[0] @ wide.t()), f"{op} is off"
    if dtype != torch.float32 and (device.type == "cpu" or TileWeight.runs(device, dtype, cols)):
        _test_experts(w, x.to(device, dtype))
    if SlideWeight.runs(device, dtype):
        packed = SlideWeight.from_dense(w)
        lifted = ops.slide_quant_fused(x.to(device, dtype), packed.n, dtype)
        y = ops.slide_gemm(*lifted, packed.tiles, packed.scale, cols, packed.n, dtype)
        assert torch.equal(y.cpu().double(), x @ wide.t()), "slide_gemm is off"
    if device.type in SellWeight.device_types:
        sell = SellWeight.from_dense(w)
        sign, weight = torch.where(x[:1] < 0, -1.0, 1.0), x[1]  # the root mean square of signs is 1
        y = sell.norm_linear(sign.to(device, dtype), weight.to(device, dtype), 0.0, bias.to(device, dtype))
        assert torch.equal(y.cpu().double(), (sign * weight) @ wide.t() + bias), "norm_linear is off"
        y, total = torch.ops.macko.rms_norm(*(t.to(device, dtype) for t in (sign, weight)), 0.0, w[:1] - w[:1])
        assert torch.equal(y.cpu().double(), sign * weight), "rms_norm is off"
        assert torch.equal(total.cpu().double(), sign), "the sum of rms_norm is off"
        gate = torch.full_like(x[0], 64)  # and silu(64) is 64
        y = sell.gated_linear(gate.to(device, dtype), x[0].to(device, dtype))
        assert torch.equal(y.cpu().double(), 64 * (x[0] @ wide.t())), "gated_linear is off"


def kernels_of(device: torch.device) -> str:
    """Which kernels a GPU gets for slabs, and who has measured them there."""
    if reason := _library.missing_code(device):
        return f"no kernel runs: {reason}"
    kernels, most = _library.slab_kernels(device)
    slabs = "tile, sparse11, dense12, dense8 and sparse8"
    if kernels == "none":
        what = f"no kernels for {slabs}; macko and sell for one token"
    else:
        what = f"{kernels} kernels for {slabs}" + ("" if kernels == "wgmma" else f" up to {most} tokens")
    name, times = gpu_name(device), times_of(device)
    if name in measured_gpus():
        who = "times of this GPU come with macko"
    elif times.measured:
        who = "times by your own `macko tune`"
    else:
        who = "nobody has measured this GPU, its times are counted: please run `macko tune --share`"
    return f"{what}; {who}"


def main() -> int:
    """Prints the report; 0 when all is well."""
    print(f"macko {__version__} in {Path(__file__).parent.parent}")
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, CUDA of torch: {torch.version.cuda or 'none'}")
    print(f"CPU library: loaded, vector path {_library.cpu_path}, {torch.get_num_threads()} threads")
    print(f"CUDA library: {_library.cuda_missing or 'loaded'}")
    if _library.cuda_arches:
        print(f"compiled for: {', '.join(_library.cuda_arches)}")
    gpus = torch.cuda.device_count()
    for index in range(gpus):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 1e9:.0f} GB"
        print(f"GPU {index}: {gpu.name}, {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} SMs, {memory}")
        if not _library.cuda_missing:
            print(f"GPU {index}: {kernels_of(torch.device('cuda', index))}")
    if not gpus:
        print("GPU: none")

    well = not (gpus and _library.cuda_missing)
    tested = [(torch.device("cpu"), dtype) for dtype in DTYPES]
    if not _library.cuda_missing:
        halves = (torch.float16, torch.bfloat16)
        tested += [(torch.device("cuda", index), dtype) for index in range(gpus) for dtype in halves]
    called = _Called()
    for device, dtype in tested:
        start = time.perf_counter()
        # The first takes seconds: imports, threads.
        print(f"self-test {device} {str(dtype).removeprefix('torch.')}: ", end="", flush=True)
        try:
            with called, torch.no_grad():
                self_test(device, dtype)
            outcome = f"ok, {time.perf_counter() - start:.2f} s"
        except (AssertionError, RuntimeError, ValueError) as error:
            outcome, well = f"FAILED: {error}", False
        print(outcome, flush=True)
    called.names.add("linear")  # the same kernels as of linear_below_autograd, which no_grad takes
    # What is made for GPUs alone has nothing to run on elsewhere.
    elsewhere = {"rms_norm", "norm_linear", "gated_linear"} if len(tested) == len(DTYPES) else set()
    if untested := sorted({*_library.op_names} - called.names - elsewhere):
        print(f"self-test: FAILED: not called: {', '.join(untested)}")
        well = False
    print("all well" if well else "not well")
    return 0 if well else 1
