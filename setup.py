"""Builds macko/_C.abi3.so (schemas, CPU) and, where nvcc is, macko/_C_cuda.abi3.so, by driving cc, c++ and nvcc.

Metadata is in pyproject.toml. What the environment can say: MACKO_CUDA=0|1 (default: whether nvcc is found),
CUDA_HOME, TORCH_CUDA_ARCH_LIST, MAX_JOBS, CC, CXX. Objects and their dependency files lie in build/; a source is
compiled again only when it, a header it includes or its command has changed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 10)
# The stable ABI of torch 2.10: what the libraries may use, so that they load under that torch and every later one.
TORCH_TARGET_VERSION = "0x020a000000000000"
DEFAULT_ARCHES = "8.0 8.6 8.9 9.0a 10.0 12.0+PTX"
COMMON = ["-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-g1"]


@functools.cache
def find_torch() -> Path:
    """The folder of the torch to build against. pip's isolated build hides it from sys.path, not from sysconfig."""
    spec = importlib.util.find_spec("torch")
    candidates = [Path(spec.origin).parent] if spec and spec.origin else []
    folders = [sysconfig.get_path("platlib"), *site.getsitepackages([sys.prefix, sys.base_prefix])]
    candidates += [Path(folder) / "torch" for folder in [*folders, site.getusersitepackages()]]
    for folder in candidates:
        if (folder / "version.py").exists():
            match = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", (folder / "version.py").read_text())
            if match and (int(match[2]), int(match[3])) < OLDEST_TORCH:
                raise SystemExit(f"macko needs torch >= 2.10, found {match[1]} in {folder}.")
            return folder
    raise SystemExit(
        f"macko is compiled against the torch that is installed, and there is none for {sys.executable}.\n"
        "Install one first, for example\n"
        "    pip install torch\n"
        "and run this again. (A tool that builds in an environment of its own, as uv does, hides the torch\n"
        "that is there: give it --no-build-isolation.)"
    )


@functools.cache
def find_nvcc() -> Path | None:
    """nvcc, or None where there is none or MACKO_CUDA=0; MACKO_CUDA=1 without one is an error."""
    wanted = os.environ.get("MACKO_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"MACKO_CUDA must be 0 or 1, got {wanted!r}.")
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    if found is None:
        found = shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None and wanted == "1":
        raise SystemExit("MACKO_CUDA=1, but there is no nvcc: put it on PATH or set CUDA_HOME.")
    return Path(found) if found else None


@functools.cache
def cuda_home() -> Path:
    """The toolkit's folder. nvcc on PATH may be a link or a wrapper, so nvcc itself is asked."""
    nvcc = find_nvcc()
    assert nvcc is not None
    if home := os.environ.get("CUDA_HOME"):
        return Path(home)
    dry = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True).stderr
    match = re.search(r"^#\$ TOP=(.+)$", dry, re.MULTILINE)
    return Path(match[1]).resolve() if match else nvcc.resolve().parent.parent


@functools.cache
def arches() -> list[str]:
    """What to compile CUDA for: TORCH_CUDA_ARCH_LIST, else the visible GPUs, else DEFAULT_ARCHES; [] without nvcc."""
    if find_nvcc() is None:
        return []
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not listed and (smi := shutil.which("nvidia-smi")):
        asked = subprocess.run(
            [smi, "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True
        )
        if asked.returncode == 0:
            listed = sorted(set(asked.stdout.split()))
    listed = listed or DEFAULT_ARCHES.split()
    for arch in listed:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST: expected entries like 9.0a or 12.0+PTX, got {arch!r}.")
    # 9.0a, the target of bulk copies and wgmma, runs wherever 9.0 does.
    listed = [arch.replace("9.0a", "9.0").replace("9.0", "9.0a") for arch in listed]
    # PTX from before 9.0 lacks what the kernels of 9.0 and later do, and a later GPU would run it as if it were there.
    listed = [arch.removesuffix("+PTX") if arch[0] in "78" else arch for arch in listed]
    return listed


def arch_flags() -> list[str]:
    """The -gencode flags of arches()."""
    flags = []
    for arch in arches():
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def is_fresh(target: Path, stamp: Path, command: list[str]) -> bool:
    """Whether target was made by this very command, and nothing that it was made from is newer."""
    if not (target.exists() and stamp.exists() and stamp.read_text() == shlex.join(command)):
        return False
    depfile = Path(f"{target}.d")
    if depfile.exists():
        inputs = depfile.read_text().replace("\\\n", " ").partition(":")[2].split()
    else:
        inputs = [argument for argument in command if argument.endswith(".o")]
    return all(os.path.exists(name) and os.path.getmtime(name) <= target.stat().st_mtime for name in inputs)


class Build(build_ext):
    """build_ext whose compiler calls are spelled out: three languages, two libraries, one list of sources each."""

    def build_extension(self, ext: Extension) -> None:
        cuda = ext.name.endswith("_cuda")
        folder = Path(self.build_temp) / ext.name.rpartition(".")[2]
        torch = find_torch()
        commands = {source: self.compile_command(source, folder, torch, cuda) for source in ext.sources}
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        with ThreadPoolExecutor(jobs) as pool:
            for done in [pool.submit(self.make, command) for command in commands.values()]:
                done.result()
        target = Path(self.get_ext_fullpath(ext.name))
        objects = [command[command.index("-o") + 1] for command in commands.values()]
        self.make(self.link_command(objects, target, folder, torch, cuda))

    def make(self, command: list[str]) -> None:
        target = Path(command[command.index("-o") + 1])
        stamp = Path(self.build_temp) / f"{target.parent.name}_{target.name}.cmd"
        if is_fresh(target, stamp, command) and not self.force:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        print(shlex.join(command), flush=True)
        if subprocess.run(command).returncode:
            raise SystemExit(f"macko: the build stopped at {target}; the command is above.")
        stamp.write_text(shlex.join(command))

    def compile_command(self, source: str, folder: Path, torch: Path, cuda: bool) -> list[str]:
        target = folder / (source.replace("/", "_") + ".o")
        includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        torch_flags = [*includes, f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", "-Wno-unused-parameter"]
        outputs = ["-MMD", "-MF", f"{target}.d", "-c", str(ROOT / source), "-o", str(target)]
        if source.endswith(".cu"):
            warnings = ["-Xptxas", "--warn-on-spills", "-lineinfo"]
            host = ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"]
            return [str(find_nvcc()), "-std=c++17", "-O3", *arch_flags(), *warnings, *host, *outputs]
        if source.endswith(".cpp"):
            cuda_flags = ["-DUSE_CUDA", f"-I{cuda_home() / 'include'}"] if cuda else []
            return [
                *shlex.split(os.environ.get("CXX", "c++")),
                "-std=c++17",
                *COMMON,
                *torch_flags,
                *cuda_flags,
                *outputs,
            ]
        define = []
        if source.endswith("module.c"):
            define = [f"-DMACKO_MODULE={'_C_cuda' if cuda else '_C'}", f'-DMACKO_CUDA_ARCHES="{" ".join(arches())}"']
            define.append(f"-I{sysconfig.get_path('include')}")
        return [*shlex.split(os.environ.get("CC", "cc")), "-std=c17", "-D_GNU_SOURCE", *COMMON, *define, *outputs]

    def link_command(self, objects: list[str], target: Path, folder: Path, torch: Path, cuda: bool) -> list[str]:
        command = [*shlex.split(os.environ.get("CXX", "c++")), "-shared", *objects, "-o", str(target)]
        command += [f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-Wl,--as-needed"]
        if cuda:
            home = cuda_home()
            if not (torch / "lib/libtorch_cuda.so").exists():
                # A CPU torch has no libtorch_cuda.so to link against, but the name has to be asked for at load.
                stub = folder / "libtorch_cuda.so"
                self.make(["cc", "-shared", "-x", "c", os.devnull, "-Wl,-soname,libtorch_cuda.so", "-o", str(stub)])
                command.append(f"-L{folder}")
            command += ["-Wl,--no-as-needed", "-ltorch_cuda", "-Wl,--as-needed"]
            command += [f"-L{home / 'lib64'}", f"-L{home / 'lib'}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        return command


def sources(*suffixes: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in suffixes)


def extensions() -> list[Extension]:
    found = [Extension("macko._C", sources(".c", ".cpp"), py_limited_api=True)]
    if find_nvcc():
        # What both libraries have of C: the module, and a plan that is pure arithmetic, so that a CPU can test it.
        cuda_sources = ["csrc/torch/module.c", "csrc/tile/many_plan.c", *sources(".cpp", ".cu")]
        found.append(Extension("macko._C_cuda", cuda_sources, py_limited_api=True))
    return found


if sys.platform != "linux":
    raise SystemExit(f"macko builds on Linux, this is {sys.platform}.")
if "dist_info" in sys.argv:
    find_torch()  # pip asks for metadata first: without torch it stops here, before it downloads one as a dependency
setup(ext_modules=extensions(), cmdclass={"build_ext": Build}, options={"bdist_wheel": {"py_limited_api": "cp310"}})
