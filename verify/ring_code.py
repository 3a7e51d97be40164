"""The kernel for GPUs without wgmma by codec, shape and architecture: registers, spills, stages, instructions a slab.

    python -m verify.ring_code                                  # all codecs, sm_80 86 89 100 120: some minutes a source
    python -m verify.ring_code --codecs tile --arches 89 --out OUT.jsonl

A line a kernel: what ptxas says of it; where that GPU takes this shape for slabs of density 0.5, in how many stages
(csrc/slab/ring_plan.h); and what all warps of a block together issue for such a slab, in clocks of an SM with four
issue slots: the main loop's instructions, those of its copying loop as often as it runs, less what adds other blocks'
sums, what walks a list of values that the table has no code for, and the fetch of tokens at the matrix's right edge.
That count is a reader's, good to a tenth.
Fails where a kernel for 1 to 32 tokens spills. Needs nvcc and cuobjdump, no GPU. Lines that are kept:
benchmarks/results/code.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
#: KB that a block may have.
SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
#: Units of the largest slab at density 0.5, and whether the codec prefers pairs (CODEC::HALVES_TO).
CODECS = {
    "tile": (160, True),
    "dense12": (193, False),
    "sparse11": (121, True),
    "dense8": (128, False),
    "sparse8": (91, True),
}
STAGES = """
#include "ring_plan.h"
/* Stages; 0 where another shape is taken. kind: a macko_ring_kind. */
int stages(int tokens, int widest, int shared_bytes, bool prefers_pairs, int kind) {
    const macko_ring_problem p = {448, 32, tokens, widest, 128, shared_bytes, prefers_pairs};
    macko_ring_shape shape;
    const bool fits = macko_ring_shape_of(&p, &shape);
    return fits && kind == (int)shape.kind ? shape.stages : 0;
}
"""
KINDS = ("pairs", "two row blocks", "wide", "x in halves")
UNIT_BYTES = 128
WARPS, ISSUED = 16, 4  #: of a block; instructions a clock of an SM
#: Copies of 16 bytes that a thread makes in one turn of the loop that copies a slab.
COPIES = 4


def planned(folder: Path) -> Any:
    """The function of STAGES."""
    command = ["cc", "-O1", "-shared", "-fPIC", f"-I{ROOT / 'csrc/slab'}", "-x", "c", "-", "-o", "stages.so"]
    subprocess.run(command, cwd=folder, input=STAGES, text=True, check=True)
    function = ctypes.CDLL(str(folder / "stages.so")).stages
    function.argtypes = [ctypes.c_int] * 3 + [ctypes.c_bool, ctypes.c_int]
    return function


def body_of(code: list[tuple[int, str]]) -> tuple[list[tuple[int, str]], list[tuple[int, int]]]:
    """The main loop of a kernel, addresses and instructions, and all loops by first and last address."""
    loops = []
    for at, text in code:
        if (found := re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)) and int(found[1], 16) < at:
            loops.append((int(found[1], 16), at))
    bodies = [[line for line in code if first <= line[0] <= last] for first, last in loops]
    return min((body for body in bodies if any("HMMA" in text for _, text in body)), key=len), loops


def clocks_of(code: list[tuple[int, str]], kind: str, slab_bytes: int) -> float:
    """What a slab takes of an SM's issue slots."""
    body, loops = body_of(code)
    begin, end = body[0][0], body[-1][0]
    if takes := [at for at, text in body if "STRONG.GPU" in text or "CCTL" in text]:
        begin = min(at for at, text in body if at > max(takes) and "DEPBAR" in text)
    two_rows = kind == KINDS[1]
    warps = WARPS // 2 if kind in KINDS[:2] else WARPS
    turns = max(1, -(-slab_bytes // (warps // (1 + two_rows) * 32 * 16 * COPIES)))
    edges = [
        (at, int(found[1], 16))
        for at, text in body
        if (found := re.match(r"BRA\b.*?0x([0-9a-f]+)", text))
        and any("ZFILL" in other for place, other in body if at < place < int(found[1], 16))
    ]
    count = 0
    for at, _ in body:
        times = 0 if any(first < at < last for first, last in edges) else 1
        for first, last in loops:
            if begin <= first <= at <= last < end:
                inside = [text for place, text in body if first <= place <= last]
                copies, multiplies = (any(name in text for text in inside) for name in ("LDGSTS", "HMMA"))
                times = turns if copies else times if multiplies else 0
        count += times if at >= begin else 0
    return count * warps / ISSUED / (1 + two_rows)


def kernels(said: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What `ptxas -v` says of each kernel of rings: its name; dtype, tokens, kind, registers, spilled bytes."""
    each = re.compile(
        r"Compiling entry function '(?P<name>\S+)'.*?(?P<stores>\d+) bytes spill stores.*?Used (?P<registers>\d+) reg",
        re.DOTALL,
    )
    for found in each.finditer(said):
        shape = re.search(r"slab_ring_kernel.*ring_shapeILi(\d+)EL\w*macko_ring_kind(\d)E", found["name"])
        if not shape:
            continue
        values = re.search(r"macko_byte_kind(\d)E", found["name"])
        yield (
            found["name"],
            {
                "dtype": "float16" if "6__half" in found["name"] else "bfloat16",
                **({"values": ("fp8", "int8")[int(values[1])]} if values else {}),
                "tokens": int(shape[1]),
                "kind": KINDS[int(shape[2])],
                "registers": int(found["registers"]),
                "spilled_bytes": int(found["stores"]),
            },
        )


def main(arguments: list[str] | None = None) -> int:
    """0, or 1 where a kernel for 1 to 32 tokens spills."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=CODECS)
    parser.add_argument("--arches", nargs="+", type=int, default=[80, 86, 89, 100, 120], choices=SHARED_KB)
    parser.add_argument("--out", type=Path, help="lines are appended to it (default: printed alone)")
    options = parser.parse_args(arguments)
    spills = False
    with tempfile.TemporaryDirectory() as folder:
        stages = planned(Path(folder))
        for codec in options.codecs:
            widest, prefers_pairs = CODECS[codec]
            for arch in options.arches:
                source = ROOT / "csrc/codecs" / codec / "ring_cuda.cu"
                command = ["nvcc", "-std=c++17", "-O3", f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v", str(source)]
                ran = subprocess.run([*command, "-o", f"{folder}/code"], capture_output=True, text=True, check=True)
                dump = ["cuobjdump", "-sass", f"{folder}/code"]
                sass = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
                code = {
                    name.strip(): [
                        (int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)
                    ]
                    for name, _, text in (part.partition("\n") for part in sass.split("Function : ")[1:])
                }
                for name, kernel in kernels(ran.stdout + ran.stderr):
                    kernel["issue_clocks"] = clocks_of(code[name], kernel["kind"], widest * UNIT_BYTES)
                    shared, kind = SHARED_KB[arch] * 1024, KINDS.index(kernel["kind"])
                    held = stages(kernel["tokens"], widest, shared, prefers_pairs, kind)
                    text = json.dumps({"codec": codec, "arch": f"sm_{arch}", **kernel, "stages": held or None})
                    print(text, flush=True)
                    spills |= kernel["spilled_bytes"] > 0 and kernel["tokens"] <= 32
                    if options.out:
                        with options.out.open("a", encoding="utf-8") as file:
                            file.write(text + "\n")
    return int(spills)


if __name__ == "__main__":
    sys.exit(main())
