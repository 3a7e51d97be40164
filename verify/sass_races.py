"""Finds arrivals at a barrier that may overtake loads of shared memory.

    python -m verify.sass_races                        # all of csrc
    python -m verify.sass_races --only csrc/sell/spmv_cuda.cu --arch sm_90a

A consumer that arrives says that the memory it has read may be written again. A load is over when its result is in a
register, which only an instruction that waits for the load's scoreboard knows: an arrival before that lets the next
stage be written over what is still read, which gives a few wrong products in thirty thousand and is seen by no
sanitizer. So on every path of a kernel's machine code, from each LDS and LDSM to each arrival (SYNCS.ARRIVE, BAR.ARV,
UCGABAR_ARV), some instruction has to wait for the load, or be a fence. A load without is printed, with its source
lines.

Loads by TMA, bulk copies and tensor cores have barriers and waits of their own, which this does not follow. Needs nvcc,
nvdisasm (of the toolkit, or in the package triton) and pyelftools, no GPU. Exit status 1: a load is in flight at an
arrival and is not in KNOWN.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from verify.sass_diff import INSTRUCTION_BYTES, cubins, demangled, kernels

ROOT = Path(__file__).resolve().parent.parent


class Known(NamedTuple):
    """A load that may be in flight at an arrival, by what the lines of both have in them, and why it may."""

    load: str
    arrival: str
    why: str


KNOWN = (
    Known("multiply_8<", "release_stage(", "sell: x lies beside the stages and is not written again"),
    Known("delta = __funnelshift_r(", "cluster.sync()", "ec: stages are a warp's own, the blocks meet for their sums"),
    Known("reader.template load_next<STEP, TILE>(", "release(previous)", "few: of the stage after the released one"),
    Known("reader.template prepare<", "release(previous)", "few: of the stage after the released one"),
    Known("ldmatrix_x4(", "release(previous)", "few: of the stage after the released one"),
    Known("reader.template prepare<", "memory.may_send", "few: after the last stage it is prepared for nothing"),
    Known("read_32(next, at + 4)", "", "sparse11 reads on after a list's end, which nobody uses"),
    # In nine kernels of dense12 and sparse11 loads have the line of what stands before them, which loads nothing. They
    # are of the slab after the released one: nothing reads their registers before the arrival (SASS of nvcc 13.0).
    Known("high1 = byte_permute(table[0]", "release_slab(stage)", "many: of the slab after the released one"),
    Known("if (STEP == 2) release(last_stage)", "release_slab(stage)", "many: of the slab after the released one"),
    Known("reader.", "X_EMPTY + stage * 8", "many: they are of slabs, what is released are tokens"),
    Known("multiply_tile(", "release(own.last_stage)", "many: the stage had tokens, which tensor cores alone read"),
    Known("reader.template prepare<STEP>(", "release_slab(stage)", "many: of the slab after the released one"),
    Known("reader.", "named_barrier_arrive(", "many: a warpgroup waits for the other, or a store for sums"),
    Known("reader.", "barrier_arrive_expect_tx(exchanged", "many: that announces bytes for a stage of tokens"),
)
ARRIVALS = ("SYNCS.ARRIVE", "BAR.ARV", "UCGABAR_ARV")
LOADS = ("LDS", "LDSM")
#: What comes before them in memory's order has ended for what comes after them.
FENCES = ("FENCE.VIEW.ASYNC", "MEMBAR")
NO_SCOREBOARD = 7


class Instruction(NamedTuple):
    address: int
    text: str  #: without its guard
    waits: int  #: mask of the scoreboards that it waits for
    scoreboard: int  #: set until its result is there; NO_SCOREBOARD: none
    lines: tuple[tuple[str, int], ...]  #: of the source, the innermost function first

    @property
    def opcode(self) -> str:
        return self.text.partition(" ")[0]

    @property
    def operand(self) -> str:
        return self.text.split()[1].rstrip(",")

    @property
    def is_conditional(self) -> bool:
        """By a guard, or a branch's own predicate."""
        return self.text.endswith("?") or re.match(r"BRA\S* !?U?P\d,", self.text) is not None

    def is_a(self, names: Sequence[str]) -> bool:
        return any(self.opcode == name or self.opcode.startswith(name + ".") for name in names)


class Overtaken(NamedTuple):
    """Of one kernel: a load that may be in flight at an arrival."""

    load: Instruction
    arrival: Instruction


def control(code: bytes, address: int) -> tuple[int, int]:
    """Mask of scoreboards waited for, and the scoreboard of the result: bits 116 to 121 and 110 to 112 since Volta."""
    high = int.from_bytes(code[address + 8 : address + INSTRUCTION_BYTES], "little")
    return high >> 52 & 63, high >> 46 & 7


def parse(sass: str, codes: Mapping[str, bytes]) -> dict[str, tuple[list[Instruction], dict[str, int]]]:
    """By kernel: instructions that can be executed, and the address after each label."""
    found: dict[str, tuple[list[Instruction], dict[str, int]]] = {}
    name, lines, fresh, pending = "", [], True, []  # type: str, list[tuple[str, int]], bool, list[str]
    for line in sass.splitlines():
        if section := re.match(r"\.text\.(\S+):", line):
            name, lines, pending = section[1], [], []
            found[name] = ([], {})
        elif place := re.match(r'\s*//## File "([^"]+)", line (\d+)', line):
            lines = [*([] if fresh else lines), (place[1], int(place[2]))]
            fresh = "inlined at" not in line
        elif label := re.match(r"(\.L_\S+|\$\S+):", line):
            pending.append(label[1])
        elif name and (match := re.match(r"\s+/\*([0-9a-f]+)\*/\s+(.*?)\s*;", line)):
            address, text = int(match[1], 16), match[2]
            instructions, labels = found[name]
            labels.update(dict.fromkeys(pending, address))
            pending, fresh = [], True
            guard = re.match(r"@(!?U?P\w+)\s+", text)
            if guard and guard[1] in ("!PT", "!UPT"):
                text = "NOP"
            elif guard:
                text = f"{text[guard.end() :]} ?"  # may not be executed: the next one follows, too
            instructions.append(Instruction(address, text, *control(codes[name], address), tuple(lines)))
    return found


class State(NamedTuple):
    """What may be before an instruction."""

    #: Loads in flight, by index, and masks of the scoreboards that each is over with: its own, and those of later ones,
    #: as shared memory answers a warp in order. (Of a row of loads ptxas gives only some a scoreboard.)
    loads: dict[int, int]
    #: Where diverged lanes meet: indices, by the register that BSSY has set.
    joins: dict[str, frozenset[int]]

    def merged(self, other: State) -> State:
        every = 2**NO_SCOREBOARD - 1
        loads = {
            i: self.loads.get(i, every) & other.loads.get(i, every) for i in self.loads.keys() | other.loads.keys()
        }
        none: frozenset[int] = frozenset()
        names = self.joins.keys() | other.joins.keys()
        return State(loads, {name: self.joins.get(name, none) | other.joins.get(name, none) for name in names})


def after(instruction: Instruction, index: int, before: State, target: Sequence[int]) -> State:
    """The state after an instruction; target: indices of the label that it names."""
    waits, joins = instruction.waits, before.joins
    if depbar := re.match(r"DEPBAR\.LE SB(\d), 0x0", instruction.text):
        waits |= 1 << int(depbar[1])
    loads = {load: over for load, over in before.loads.items() if not over & waits}
    if instruction.is_a(FENCES) and not instruction.is_conditional:
        loads = {}
    if instruction.is_a(LOADS):
        scoreboard = 1 << instruction.scoreboard & 2**NO_SCOREBOARD - 1
        if not instruction.is_conditional:
            loads = {load: over | scoreboard for load, over in loads.items()}
        loads[index] = scoreboard
    if instruction.is_a(["BSSY"]):
        joins = {**joins, instruction.operand: frozenset(target)}
    return State(loads, joins)


def overtaken(instructions: Sequence[Instruction], labels: Mapping[str, int]) -> list[Overtaken]:
    """Each load and arrival between which there is a path without a wait for the load."""
    at = {instruction.address: i for i, instruction in enumerate(instructions)}
    named = [re.search(r"`\((\S+?)\)", instruction.text) for instruction in instructions]
    targets = [[at[labels[name[1]]]] if name and name[1] in labels else [] for name in named]
    anywhere = [at[address] for address in labels.values() if address in at]
    before: dict[int, State] = {0: State({}, {})}
    todo = {0}
    while todo:
        i = min(todo)
        todo.remove(i)
        instruction = instructions[i]
        state = after(instruction, i, before[i], targets[i])
        nexts = [i + 1]
        if instruction.is_a(["EXIT", "RET", "KILL"]):
            nexts = nexts if instruction.is_conditional else []
        elif instruction.is_a(["BRA"]):
            certain = not instruction.is_conditional and instruction.opcode in ("BRA", "BRA.U")
            nexts = targets[i] + ([] if certain else nexts)
        elif instruction.is_a(["BSYNC"]):
            nexts = [*state.joins.get(instruction.operand, nexts)] + (nexts if instruction.is_conditional else [])
        elif instruction.is_a(["BRX"]):
            nexts = anywhere
        elif instruction.is_a(["CALL", "WARPSYNC.COLLECTIVE"]):
            nexts = targets[i] + nexts
        for next_ in nexts:
            merged = before[next_].merged(state) if next_ in before else state
            if next_ < len(instructions) and merged != before.get(next_):
                before[next_] = merged
                todo.add(next_)
    found = []
    for i, state in sorted(before.items()):
        if instructions[i].is_a(ARRIVALS):
            waits = instructions[i].waits
            found += [(load, i) for load, over in state.loads.items() if not over & waits]
    return [Overtaken(instructions[load], instructions[arrival]) for load, arrival in sorted(found)]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name)


def source_of(instruction: Instruction) -> str:
    """Its lines, the innermost function first, as they are in the source."""
    lines = []
    for file, number in instruction.lines:
        path = Path(file).resolve()
        text = path.read_text().splitlines()[number - 1].strip() if path.exists() else "?"
        lines.append(f"{shown(path)}:{number}: {text}")
    return "\n        ".join(lines) or "no line"


def reason_for(both: Overtaken) -> str:
    """Why it is none to mend, or nothing."""
    load, arrival = source_of(both.load), source_of(both.arrival)
    return next((known.why for known in KNOWN if known.load in load and known.arrival in arrival), "")


def find_nvdisasm() -> str:
    """On PATH, beside nvcc, or in the package triton."""
    spec = importlib.util.find_spec("triton")
    folders = [Path(nvcc).resolve().parent] if (nvcc := shutil.which("nvcc")) else []
    folders += [Path("/usr/local/cuda/bin")]
    folders += [Path(spec.origin).parent / "backends/nvidia/bin"] if spec and spec.origin else []
    found = shutil.which("nvdisasm") or next((str(f / "nvdisasm") for f in folders if (f / "nvdisasm").exists()), None)
    if not found:
        sys.exit("there is no nvdisasm: it is in the CUDA toolkit, and in the package triton; or say --nvdisasm PATH")
    return found


def races(cubin: Path, nvdisasm: str) -> dict[str, tuple[int, list[Overtaken]]]:
    """By kernel: how many arrivals it has, and what they may overtake."""
    sass = subprocess.run([nvdisasm, "-c", "-gi", cubin], check=True, capture_output=True, text=True).stdout
    codes = {name: instructions for name, (_, instructions, _) in kernels(cubin).items()}
    return {
        name: (sum(i.is_a(ARRIVALS) for i in instructions), overtaken(instructions, labels))
        for name, (instructions, labels) in parse(sass, codes).items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["csrc"], help="folders or .cu files; default: csrc")
    parser.add_argument("--arch", default="sm_90a", help="default: sm_90a")
    parser.add_argument("--nvcc", default=shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    parser.add_argument("--nvdisasm", help="default: on PATH, beside nvcc, or in the package triton")
    args = parser.parse_args()
    nvdisasm = args.nvdisasm or find_nvdisasm()
    counts = {"kernels": 0, "arrivals": 0, "overtaken": 0, "known": 0}
    with tempfile.TemporaryDirectory() as folder:
        for source, cubin in cubins(ROOT, args.only, args.arch, args.nvcc, Path(folder), "-lineinfo"):
            for name, (arrivals, found) in races(cubin, nvdisasm).items():
                new = [both for both in found if not reason_for(both)]
                counts["kernels"] += 1
                counts["arrivals"] += arrivals
                counts["overtaken"] += len(new)
                counts["known"] += len(found) - len(new)
                if new:
                    print(f"{shown(source)}: {demangled(name)}")
                for load, arrival in new:
                    print(f"    {load.address:#x} {load.text}\n        {source_of(load)}")
                    print(f"      overtaken by {arrival.address:#x} {arrival.text}\n        {source_of(arrival)}")
    print(f"{args.arch}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    return 1 if counts["overtaken"] else 0


if __name__ == "__main__":
    sys.exit(main())
