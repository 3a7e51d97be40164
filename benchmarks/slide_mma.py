"""Slide's kernel for GPUs without wgmma, on one that has it, against cuSPARSELt, `_int_mm` and the kernel with wgmma.

    python -m benchmarks.slide_mma OUT.jsonl [--shapes gate_up,down] [--tokens 64,256,4096] [--patterns 2:4,6:8]

The whole int8 linear, from a bfloat16 x to a bfloat16 y, under load (benchmarks.slide.Sustained): "mma" is ours for
other GPUs (as MACKO_COPY=cp_async), "wgmma" that of Hopper; "cusparselt" is our quantiser, cuSPARSELt's int32 product
by the fastest algorithm of its own search, and one compiled kernel with scales and bias; "_int_mm" the same with
torch's dense product. Besides "mma product" and "cusparselt product", their products alone. cuSPARSELt is found as
torch has loaded it, and called by its C interface: torch's op makes a plan at each call. Its sums are compared with
`_int_mm`'s of the same codes.

    python -m benchmarks.slide_mma OUT.jsonl --rate      times products of int8 in a loop in registers, nothing else
    python -m benchmarks.slide_mma OUT.jsonl --table     writes "slide" of macko/choose/times/<gpu>.json, from "wgmma"
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import macko.choose.times as tables
from benchmarks.slide import COLD_TOKENS, Calls, Sustained, dequantise, int_mm, put_gains
from benchmarks.timing import append_jsonl, copies, provenance
from macko import ops
from macko._library import plan
from macko.weights import SLIDE_PATTERNS

#: Linears of Qwen2.5-7B and of Llama-3.2-3B.
SHAPES = {
    "qkv": (4608, 3584),
    "gate_up": (37888, 3584),
    "down": (3584, 18944),
    "llama_qkv": (5120, 3072),
    "llama_gate_up": (16384, 3072),
    "llama_down": (3072, 8192),
}
ROW, COL, NO, YES = 2, 1, 0, 1  # cuSPARSELt's orders, and whether an operand is transposed
INT8, INT32 = 3, 10  # cudaDataType_t
#: What of an algorithm a search finds: cusparseLtMatmulAlgAttribute_t.
FOUND = {"id": 0, "split_k": 3, "split_k_mode": 4, "split_k_buffers": 5}
#: Most bytes of a workspace that a search may take.
WORKSPACE = 1 << 28
#: Products of one loop in registers, 16 warps an SM: no kernel is faster. SPARSE is put before it.
RATE = """
extern "C" __global__ void __launch_bounds__(512) rate(const unsigned *from, int *to, int turns) {
    unsigned a[4], b[4], meta = 0x44444444;
    int sums[8][4] = {};
    for (int i = 0; i < 4; i++) a[i] = from[i * 512 + threadIdx.x], b[i] = from[(i + 4) * 512 + threadIdx.x];
    for (int turn = 0; turn < turns; turn++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int(&d)[4] = sums[i];
            if (SPARSE)
                asm("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, "
                    "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0;"
                    : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                      "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(meta));
            else
                asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                    "{%0, %1, %2, %3};"
                    : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        }
    int sum = 0;
    for (int i = 0; i < 32; i++) sum += sums[i / 4][i % 4];
    to[blockIdx.x * 512 + threadIdx.x] = sum;
}
"""
#: Turns of the loop, half a millisecond, and columns of a product.
TURNS, RATE_COLS = 4000, {"dense": 32, "2:4": 64}


def opaque() -> ctypes.c_void_p:
    """Memory for one of cuSPARSELt's descriptors: 512 bytes since 0.8, 1024 before, aligned to 16."""
    held = ctypes.create_string_buffer(1024 + 16)
    at = ctypes.c_void_p((ctypes.addressof(held) + 15) // 16 * 16)
    at.held = held  # type: ignore[attr-defined]
    return at


class Cusparselt:
    """cuSPARSELt's int8 product of a 2:4 matrix, from 0.7 on."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcusparseLt.so.0", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        parts = [ctypes.c_int() for _ in range(3)]
        for which, part in enumerate(parts):
            self._call("GetProperty", which, ctypes.byref(part))
        self.version = ".".join(str(part.value) for part in parts)
        self.handle = opaque()
        self._call("Init", self.handle)

    def _call(self, name: str, *args: Any) -> None:
        if status := getattr(self.library, f"cusparseLt{name}")(*args):
            raise RuntimeError(f"cusparseLt{name} has failed with status {status}")

    def _matrix(self, kind: str, rows: int, cols: int, ld: int, type: int, order: int, *more: int) -> ctypes.c_void_p:
        made, sizes = opaque(), map(ctypes.c_int64, (rows, cols, ld))
        self._call(f"{kind}DescriptorInit", self.handle, made, *sizes, 16, type, order, *more)
        return made

    def compressed(self, w: Tensor) -> Tensor:
        """w, int8 [rows, k] of pattern 2:4, as its products take it."""
        matrix = self._matrix("Structured", *w.shape, w.shape[1], INT8, ROW, 0)
        nbytes, scratch = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("SpMMACompressedSize2", self.handle, matrix, ctypes.byref(nbytes), ctypes.byref(scratch))
        made = w.new_empty(nbytes.value)
        buffer = w.new_empty(max(1, scratch.value))
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (w, made, buffer)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._call("SpMMACompress2", self.handle, matrix, 1, NO, *pointers, stream)
        torch.cuda.synchronize()
        return made

    def product(self, rows: int, k: int, tokens: int, weight: Tensor, x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """What multiplies compressed weights and x [tokens, k] into int32 [tokens, rows], by the fastest algorithm."""
        w, t = self._matrix("Structured", rows, k, k, INT8, ROW, 0), self._matrix("Dense", tokens, k, k, INT8, ROW)
        y = self._matrix("Dense", rows, tokens, rows, INT32, COL)
        matmul, selection, made = opaque(), opaque(), opaque()
        self._call("MatmulDescriptorInit", self.handle, matmul, NO, YES, w, t, y, y, 0)
        self._call("MatmulAlgSelectionInit", self.handle, selection, matmul, 0)
        self._call("MatmulPlanInit", self.handle, made, matmul, selection)
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
        out = torch.empty(tokens, rows, dtype=torch.int32, device=x.device)
        kept = (w, t, y, matmul, selection, made, workspace)  # the plan points to them

        def call(name: str, weight: Tensor, x: Tensor, out: Tensor) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            a, b, d, space = (ctypes.c_void_p(each.data_ptr()) for each in (weight, x, out, kept[-1]))
            scalars = ctypes.byref(one), ctypes.byref(zero)
            operands = (scalars[0], a, b, scalars[1], d, d)
            self._call(name, self.handle, made, *operands, space, ctypes.byref(stream), 1)

        call("MatmulSearch", weight, x, out)
        self.found = {}
        for name, which in FOUND.items():
            value = ctypes.c_int()
            self._call("MatmulAlgGetAttribute", self.handle, selection, which, ctypes.byref(value), ctypes.c_size_t(4))
            self.found[name] = value.value

        def multiply(weight: Tensor, x: Tensor) -> Tensor:
            out = torch.empty(tokens, rows, dtype=torch.int32, device=x.device)
            call("Matmul", weight, x, out)
            return out

        return multiply


def under(keys: str, call: Callable[[], Tensor]) -> Tensor:
    with plan(keys):
        return call()


def write_rates(results: str, ms: float) -> None:
    """How many operations a second the loop in registers does, zeros of the pattern counted too."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    held = torch.randint(-(2**31), 2**31, (8, 512)).to(torch.int32).cuda()
    out = torch.empty(blocks * 512, dtype=torch.int32, device="cuda")
    calls: dict[str, Calls] = {}
    for kind in RATE_COLS:
        kernel = torch.cuda._compile_kernel(f"#define SPARSE {int(kind != 'dense')}\n{RATE}", "rate")
        calls[kind] = [partial(kernel, (blocks, 1, 1), (512, 1, 1), [held, out, TURNS])]
    for kind, (us, mhz) in Sustained(calls).run(2, ms, ms).items():
        tops = 2 * 16 * 8 * RATE_COLS[kind] * 8 * TURNS * 16 * blocks / us * 1e-6
        append_jsonl(results, side=f"rate {kind}", us=us, tops=tops, sm_mhz_under_load=mhz, **provenance())
        print(f"products in registers, {kind}: {tops:.0f} TOPS at {mhz} MHz", flush=True)


def of_pattern_2_4(rows: int, k: int) -> Tensor:
    """Codes of Gaussian weights in the pattern 2:4: what slide's expanded weight is like, whatever its pattern."""
    w = torch.randn(rows, k, device="cuda").bfloat16()
    packed, scale, _ = ops.slide_pack(w, 2, torch.int8, prune=True)
    return ops.slide_unpack(packed, scale, k, 2, torch.int8)


def write_table(results: str) -> None:
    """Puts dense / pattern of the kernel that the GPU gets by itself into the package's table."""
    us: dict[tuple[str, str, int], dict[str, float]] = defaultdict(dict)
    for line in map(json.loads, Path(results).read_text().splitlines()):
        kernel, _, pattern = line["side"].partition(" ")
        if kernel == "wgmma":
            us[line["gpu"], line["shape"], line["tokens"]][pattern] = line["us"]
    fresh: dict[str, dict[tuple[str, str], tables.Line]] = defaultdict(dict)
    for (gpu, shape, tokens), times in us.items():
        rows, cols = SHAPES[shape]
        for pattern in times.keys() - {"dense"}:
            line = {"rows": rows, "cols": cols, "dtype": "int8", "pattern": pattern, "gain": {}}
            gain = fresh[gpu].setdefault((pattern, shape), line)["gain"]
            gain[str(tokens)] = round(times["dense"] / times[pattern], 3)
    for gpu, lines in fresh.items():
        put_gains(gpu, "slide", lines.values(), tables.slide_kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="64,256,1024,4096,16384")
    parser.add_argument("--patterns", default="2:4,4:6,6:8,8:10")
    parser.add_argument("--no-cusparselt", action="store_true", help="ours and _int_mm alone")
    parser.add_argument("--ms", type=float, default=15, help="of warming and of timing, each twice")
    parser.add_argument("--rate", action="store_true", help="of products alone")
    parser.add_argument("--table", action="store_true", help="measure nothing, write the table from the results")
    args = parser.parse_args()
    if args.table:
        return write_table(args.results)
    if args.rate:
        return write_rates(args.results, args.ms)
    where, patterns = provenance(), ["dense", *args.patterns.split(",")]
    library = None if args.no_cusparselt else Cusparselt()
    for shape in args.shapes.split(","):
        rows, cols = SHAPES[shape]
        dense = torch.randn(rows, cols, device="cuda").bfloat16()
        scale, bias = torch.rand(rows, device="cuda"), torch.randn(rows, device="cuda").bfloat16()
        weights: dict[str, list[list[Tensor]]] = {}
        for pattern in patterns:
            packed, scale, _ = ops.slide_pack(dense, n := SLIDE_PATTERNS.get(pattern, 0), torch.int8, prune=True)
            weights[pattern] = copies([packed, scale])
            if not n:
                weights["_int_mm"] = copies([ops.slide_unpack(packed, scale, cols, 0, torch.int8)])
            elif library:
                k = ops.slide_quant_fused(dense[:1], n, torch.int8)[0].shape[1]
                expanded = of_pattern_2_4(rows, k)
                weights[f"cusparselt {pattern}"] = copies([library.compressed(expanded)])
                weights[f"expanded {pattern}"] = [[expanded]]
        for tokens in map(int, args.tokens.split(",")):
            x = torch.randn(tokens, cols, device="cuda").bfloat16()
            sides: dict[str, Calls] = {}
            found: dict[str, Any] = {}

            def held(name: str, few: bool = tokens <= COLD_TOKENS) -> list[list[Tensor]]:
                return weights[name] if few else weights[name][:1]  # noqa: B023

            for pattern in patterns:
                n = SLIDE_PATTERNS.get(pattern, 0)
                calls = [partial(ops.slide_linear, x, p, s, cols, n, torch.int8, bias) for p, s in held(pattern)]
                sides[f"wgmma {pattern}"] = calls
                lifted, by_token = ops.slide_quant_fused(x, n, torch.int8)
                alone = [
                    partial(ops.slide_gemm, lifted, by_token, p, s, cols, n, torch.bfloat16, bias)
                    for p, s in held(pattern)
                ]
                for side, its in {"mma": calls, "mma product": alone}.items():
                    sides[f"{side} {pattern}"] = [partial(under, "copy=cp_async", call) for call in its]
                if not n or not library:
                    continue
                (expanded,), compressed = weights[f"expanded {pattern}"][0], held(f"cusparselt {pattern}")
                multiply = library.product(rows, lifted.shape[1], tokens, compressed[0][0], lifted)
                found[f"cusparselt {pattern}"] = library.found
                if not torch.equal(multiply(compressed[0][0], lifted), torch._int_mm(lifted, expanded.t())):
                    raise RuntimeError(
                        f"cuSPARSELt's sums are others than _int_mm's: {shape}, {tokens} tokens, {pattern}"
                    )

                def whole(
                    w: Tensor,
                    multiply: Any = multiply,
                    n: int = n,
                    x: Tensor = x,
                    scale: Tensor = scale,
                    b: Tensor = bias,
                ) -> Tensor:
                    lifted, token_scale = ops.slide_quant_fused(x, n, torch.int8)
                    return dequantise(multiply(w, lifted), token_scale, scale, b)

                sides[f"cusparselt {pattern}"] = [partial(whole, w) for (w,) in compressed]
                sides[f"cusparselt product {pattern}"] = [partial(multiply, w, lifted) for (w,) in compressed]
            sides["_int_mm"] = [partial(int_mm, x, w, scale, bias) for (w,) in held("_int_mm")]
            times = Sustained(sides, graph_ms=3).run(2, args.ms, args.ms)
            for side, (us, mhz) in times.items():
                fields = {"shape": shape, "rows": rows, "cols": cols, "tokens": tokens, "side": side, "us": us}
                more = {"found": found[side]} if side in found else {}
                version = {"cusparselt": library.version} if library else {}
                append_jsonl(args.results, **fields, **more, **version, sm_mhz_under_load=mhz, **where)
            said = "  ".join(f"{side} {us:.1f}" for side, (us, _) in times.items())
            print(f"{shape} {tokens}: {said}", flush=True)
            del sides, x
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
