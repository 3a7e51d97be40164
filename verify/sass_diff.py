"""Says which CUDA kernels two versions of the sources compile to different machine code for.

    python -m verify.sass_diff HEAD~3 --only csrc/tile    # a revision against the working tree
    python -m verify.sass_diff HEAD~3 HEAD --arch sm_80    # or against another one, all of csrc and contrib

A change that only renames or moves code must leave none: then what was measured before still holds. The bytes of the
instructions are compared, and the registers and constants of a kernel. Kernels are matched by these, not by name, so
names, files and the order in a file may change. Needs nvcc and pyelftools, no GPU. Exit status: 0 where all are alike,
1 where one is not.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTION_BYTES = 16
# Section .nv.info is records of format, attribute, 16 bits; where the format is SIZED, these say how many bytes follow.
SIZED, REGCOUNT = 4, 0x2F  # of REGCOUNT: index of the kernel's symbol, registers of a thread at launch

#: Registers, instructions, constants.
Code = tuple[int, bytes, bytes]


def registers_of(info: bytes) -> dict[int, int]:
    """By index of the kernel's symbol."""
    found, at = {}, 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if (form, attribute) == (SIZED, REGCOUNT):
            symbol, count = struct.unpack_from("<II", info, at + 4)
            found[symbol] = count
        at += 4 + (size if form == SIZED else 0)
    return found


def kernels(cubin: Path) -> dict[str, Code]:
    """Each kernel's name, as it is mangled, and its code."""
    with cubin.open("rb") as file:
        sections = {section.name: section for section in ELFFile(file).iter_sections()}
        symbols = sections[".symtab"]
        assert isinstance(symbols, SymbolTableSection)
        registers = {
            symbols.get_symbol(index).name: count for index, count in registers_of(sections[".nv.info"].data()).items()
        }
        found = {}
        for name, section in sections.items():
            if name.startswith(".text."):
                kernel = name.removeprefix(".text.")
                # Bank 0 has the arguments, which are not known yet; the others have what the compiler put there.
                constants = [
                    sections[other].data()
                    for other in sorted(sections)
                    if re.fullmatch(rf"\.nv\.constant[1-9]\d*\.{re.escape(kernel)}", other)
                ]
                found[kernel] = (registers[kernel], section.data(), b"".join(constants))
        return found


def cubins(root: Path, only: list[str], arch: str, nvcc: str, target: Path, *flags: str) -> Iterator[tuple[Path, Path]]:
    """Each CUDA source under root, and what it was compiled to, in `target`."""
    places = [root / start for start in only]
    sources = sorted(source for place in places for source in ([place] if place.is_file() else place.rglob("*.cu")))
    for i, source in enumerate(sources):
        cubin = target / f"{i}.cubin"
        command = [nvcc, "-std=c++17", "-O3", "-w", "-cubin", f"-arch={arch}", *flags, str(source), "-o", str(cubin)]
        subprocess.run(command, check=True)
        yield source, cubin


def compile_all(root: Path, only: list[str], arch: str, nvcc: str, target: Path) -> dict[Code, list[str]]:
    """The code of every kernel under root, and the names of the kernels that have it."""
    found: dict[Code, list[str]] = defaultdict(list)
    # No -lineinfo: line numbers are of the source, not of the code.
    for source, cubin in cubins(root, only, arch, nvcc, target):
        for name, code in kernels(cubin).items():
            found[code].append(f"{source.relative_to(root)}: {demangled(name)}")
    if not found:
        sys.exit(f"{root}: no kernels in {' '.join(only)}")
    return found


def demangled(name: str) -> str:
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if tool is None:
        return name
    plain = subprocess.run([tool, name], capture_output=True, text=True, check=True).stdout.strip()
    return plain.replace("(anonymous namespace)::", "").partition("(")[0]


def tree_of(version: str, folder: Path) -> Path:
    """A folder as it is, or the tree of a git revision, put into `folder`."""
    if Path(version).is_dir():
        return Path(version).resolve()
    archive = subprocess.run(["git", "-C", ROOT, "archive", version], capture_output=True)
    if archive.returncode:
        sys.exit(f"{version} is neither a folder nor a revision: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="git revision, or a folder that has csrc/")
    parser.add_argument("new", nargs="?", default=str(ROOT), help="the same; default: the working tree")
    where = ["csrc", "contrib"]
    parser.add_argument("--only", nargs="+", default=where, help="folders or .cu files; default: csrc contrib")
    parser.add_argument("--arch", default="sm_90a", help="default: sm_90a")
    parser.add_argument("--nvcc", default=shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sides = []
        for side, version in (("old", args.old), ("new", args.new)):
            (target := Path(folder, side)).mkdir()
            sides.append(compile_all(tree_of(version, target), args.only, args.arch, args.nvcc, target))
    old, new = sides
    differ = 0
    for mark, own, other in (("-", old, new), ("+", new, old)):
        for code, names in own.items():
            if len(names) != len(other.get(code, [])):
                differ += 1
                registers, instructions, _ = code
                size = f"{len(instructions) // INSTRUCTION_BYTES} instructions, {registers} registers"
                print(f"{mark} {', '.join(names)}: {size}")
    count = sum(map(len, new.values()))
    print(f"{args.arch}: {count} kernels, " + (f"{differ} have no counterpart" if differ else "all alike"))
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()
