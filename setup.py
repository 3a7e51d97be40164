"""Builds macko/_C.abi3.so (schemas, CPU) and macko/_C_cuda.abi3.so, by driving cc, c++ and nvcc.

The second one where torch has CUDA and nvcc is there, or MACKO_CUDA=1 says so. Metadata is in pyproject.toml. What the
environment can say is in docs/build.md. Objects and their dependency files lie in build/objects; a source is compiled
again only when it, a header it includes or its command has changed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 10)
# The stable ABI of torch 2.10: what the libraries may use, so that they load under that torch and every later one.
TORCH_TARGET_VERSION = "0x020a000000000000"
DEFAULT_ARCHES = "7.5 8.0 8.6 8.9 9.0a 10.0 12.0+PTX"
#: About what a source takes one core, in seconds (Zen 4): for the word at the start. CUDA: for each architecture.
SECONDS = {".c": 0.7, ".cpp": 2.5, ".cu": 8.0}
COMMON = ["-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-g1"]


def torch_says(folder: Path, name: str) -> str | None:
    """What torch/version.py says. Read, not imported: pip's isolated build cannot import it."""
    match = re.search(rf"""^{name}\b[^=\n]*= *['"]([^'"]+)""", (folder / "version.py").read_text(), re.MULTILINE)
    return match[1] if match else None


@functools.cache
def find_torch() -> Path:
    """The folder of the torch to build against. pip's isolated build hides it from sys.path, not from sysconfig."""
    spec = importlib.util.find_spec("torch")
    candidates = [Path(spec.origin).parent] if spec and spec.origin else []
    folders = [sysconfig.get_path("platlib"), *site.getsitepackages([sys.prefix, sys.base_prefix])]
    candidates += [Path(folder) / "torch" for folder in [*folders, site.getusersitepackages()]]
    for folder in candidates:
        if (folder / "version.py").exists():
            version = torch_says(folder, "__version__") or ""
            match = re.match(r"(\d+)\.(\d+)", version)
            if match and (int(match[1]), int(match[2])) < OLDEST_TORCH:
                raise SystemExit(f"macko needs torch >= 2.10, found {version} in {folder}.")
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
    """nvcc: that of CUDA_HOME, else on PATH, else in /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    found = found or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return Path(found) if found else None


@functools.cache
def why_no_cuda() -> str | None:
    """Why the CUDA library is left out, and how to get it; None where it is built."""
    wanted = os.environ.get("MACKO_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"MACKO_CUDA must be 0 or 1, got {wanted!r}.")
    if wanted == "0":
        return "MACKO_CUDA=0"
    if wanted == "" and torch_says(find_torch(), "cuda") is None:
        version = torch_says(find_torch(), "__version__")
        return f"torch {version} has no CUDA; MACKO_CUDA=1 builds it all the same, with nvcc"
    if find_nvcc() is None and wanted == "1":
        raise SystemExit("MACKO_CUDA=1, but there is no nvcc: put it on PATH or set CUDA_HOME.")
    return None if find_nvcc() else "there is no nvcc; put it on PATH or set CUDA_HOME, and build again"


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
    """What to compile CUDA for, [] for nothing: TORCH_CUDA_ARCH_LIST, else the visible GPUs, else DEFAULT_ARCHES."""
    if why_no_cuda():
        return []
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not listed and (smi := shutil.which("nvidia-smi")):
        asked = subprocess.run(
            [smi, "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True
        )
        if asked.returncode == 0:
            listed = sorted(set(asked.stdout.split()))
    if not listed:
        listed = DEFAULT_ARCHES.split()
        known = subprocess.run([find_nvcc(), "--list-gpu-arch"], capture_output=True, text=True)  # type: ignore[list-item]
        if not known.returncode and "compute_75" not in known.stdout:  # a later toolkit
            listed.remove("7.5")
    for arch in listed:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST: expected entries like 9.0a or 12.0+PTX, got {arch!r}.")
    # 9.0a, the target of bulk copies and wgmma, runs wherever 9.0 does.
    return [arch.replace("9.0a", "9.0").replace("9.0", "9.0a") for arch in listed]


def arch_flags() -> list[str]:
    """The -gencode flags of arches()."""
    flags = []
    for arch in arches():
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of a compiler."""

    label: str
    command: list[str]
    stamp: Path  #: holds the command that made the target
    seconds: float = 0  #: about what it takes one core

    @property
    def target(self) -> Path:
        return Path(self.command[self.command.index("-o") + 1])

    def is_fresh(self) -> bool:
        """Whether the target was made by this very command, and nothing that it was made from is newer."""
        target = self.target
        if not (target.exists() and self.stamp.exists() and self.stamp.read_text() == shlex.join(self.command)):
            return False
        depfile = Path(f"{target}.d")
        if depfile.exists():
            inputs = shlex.split(depfile.read_text().replace("\\\n", " ").partition(": ")[2])  # "\\ " is a space
        else:
            inputs = [argument for argument in self.command if argument.endswith(".o")]
        return all(os.path.exists(name) and os.path.getmtime(name) <= target.stat().st_mtime for name in inputs)

    def run(self, count: Iterator[int], total: int) -> None:
        """SystemExit, with the command, where it fails."""
        spelled = shlex.join(self.command)
        print(f"[{next(count)}/{total}] {spelled if os.environ.get('V') else self.label}", flush=True)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        ran = subprocess.run(self.command, capture_output=True, text=True, errors="replace")
        said = ran.stdout + ran.stderr
        if ran.returncode:
            raise SystemExit(f"{spelled}\n{said}macko: the build stopped at {self.label}; the command is above.")
        if not os.environ.get("V"):  # some bytes of a few kernels, known; for who works on them
            said = re.sub(r"^ptxas warning : Registers are spilled .*\n?", "", said, flags=re.MULTILINE)
        if said:
            print(f"{self.label}:\n{said}", end="", flush=True)
        self.stamp.parent.mkdir(parents=True, exist_ok=True)
        self.stamp.write_text(shlex.join(self.command))


class Build(build_ext):
    """build_ext whose compiler calls are spelled out: three languages, two libraries, one list of sources each."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_temp = "build/objects"  # an editable install's would be a temporary folder

    def run(self) -> None:
        if reason := why_no_cuda():
            print(f"macko: no CUDA library: {reason}", flush=True)
            name = self.get_ext_filename(CUDA.name)
            for folder in [self.build_lib, *([ROOT] if self.inplace else [])]:  # what an older build left goes too
                Path(folder, name).unlink(missing_ok=True)
            self.extensions = [CPU]
        super().run()

    def build_extensions(self) -> None:
        compiles: list[Step] = []
        links: list[Step] = []
        for ext in self.extensions:
            folder = Path(self.build_temp) / ext.name.rpartition(".")[2]
            mine = [self.compile_step(source, folder, ext is CUDA) for source in ext.sources]
            compiles += mine
            links += self.link_steps([str(step.target) for step in mine], ext, folder)
        stale = [step for step in compiles if self.force or not step.is_fresh()]
        changed = {str(step.target) for step in stale}
        links = [step for step in links if self.force or changed & {*step.command} or not step.is_fresh()]
        jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
        seconds = sum(step.seconds for step in stale) / jobs
        if seconds > 5:
            wait = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
            print(f"macko: compiling {len(stale)} sources, about {wait} with {jobs} at a time", flush=True)
        count, total = itertools.count(1), len(stale) + len(links)
        with ThreadPoolExecutor(jobs) as pool:
            runs = [pool.submit(step.run, count, total) for step in stale]
            try:
                for run in as_completed(runs):
                    run.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        for step in links:
            step.run(count, total)

    def step(self, label: str, command: list[str], seconds: float = 0) -> Step:
        target = Path(command[command.index("-o") + 1])
        stamp = Path(self.build_temp) / f"{target.parent.name}_{target.name}.cmd"
        return Step(label, command, stamp, seconds)

    def compile_step(self, source: str, folder: Path, cuda: bool) -> Step:
        torch, target = find_torch(), folder / (source.replace("/", "_") + ".o")
        includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        torch_flags = [*includes, f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", "-Wno-unused-parameter"]
        outputs = ["-MMD", "-MF", f"{target}.d", "-c", str(ROOT / source), "-o", str(target)]
        seconds = SECONDS[Path(source).suffix]
        if source.endswith(".cu"):
            warnings = ["-Xptxas", "--warn-on-spills", "-lineinfo"]
            host = ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"]
            command = [str(find_nvcc()), "-std=c++17", "-O3", *arch_flags(), *warnings, *host, *outputs]
            return self.step(f"{source} ({' '.join(arches())})", command, seconds * len(arches()))
        if source.endswith(".cpp"):
            cxx, defines = shlex.split(os.environ.get("CXX", "c++")), [*torch_flags, "-Wno-missing-field-initializers"]
            if cuda:
                defines = [*defines, "-DUSE_CUDA", f"-I{cuda_home() / 'include'}"]
            command = [*cxx, "-std=c++20", *COMMON, *defines, *outputs]
            return self.step(f"{source} (for CUDA)" if cuda else source, command, seconds)
        defines = []
        if source.endswith("module.c"):
            defines = [f"-DMACKO_MODULE={'_C_cuda' if cuda else '_C'}", f'-DMACKO_CUDA_ARCHES="{" ".join(arches())}"']
            defines.append(f"-I{sysconfig.get_path('include')}")
        command = [*shlex.split(os.environ.get("CC", "cc")), "-std=c17", "-D_GNU_SOURCE", *COMMON, *defines, *outputs]
        return self.step(source, command, seconds)

    def link_steps(self, objects: list[str], ext: Extension, folder: Path) -> list[Step]:
        torch, target = find_torch(), Path(self.get_ext_fullpath(ext.name))
        command = [*shlex.split(os.environ.get("CXX", "c++")), "-shared", *objects, "-o", str(target)]
        command += [f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-Wl,--as-needed"]
        steps = []
        if ext is CUDA:
            home = cuda_home()
            if not (torch / "lib/libtorch_cuda.so").exists():
                # A CPU torch has no libtorch_cuda.so to link against, but the name has to be asked for at load.
                stub = folder / "libtorch_cuda.so"
                empty = ["cc", "-shared", "-x", "c", os.devnull, "-Wl,-soname,libtorch_cuda.so", "-o", str(stub)]
                steps.append(self.step(stub.name, empty))
                command.append(f"-L{folder}")
            command += ["-Wl,--no-as-needed", "-ltorch_cuda", "-Wl,--as-needed"]
            command += [f"-L{home / 'lib64'}", f"-L{home / 'lib'}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        return [*steps, self.step(f"macko/{target.name}", command)]


def sources(*suffixes: str) -> list[str]:
    found = (path for folder in ("csrc", "contrib") for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return sorted(str(path.relative_to(ROOT)) for path in found)


CPU = Extension("macko._C", sources(".c", ".cpp"), py_limited_api=True)
# What both libraries have of C: the module, the knobs, a plan and a table: pure arithmetic, which a CPU can test.
C_OF_BOTH = ["csrc/torch/module.c", "csrc/core/knobs.c", "csrc/slab/many_plan.c", "csrc/slab/table.c"]
CUDA_SOURCES = [*C_OF_BOTH, *sources(".cpp", ".cu")]
CUDA = Extension("macko._C_cuda", CUDA_SOURCES, py_limited_api=True)
if sys.platform != "linux":
    raise SystemExit(f"macko builds on Linux, this is {sys.platform}.")
if "dist_info" in sys.argv:
    find_torch()  # pip asks for metadata first: without torch it stops here, before it downloads one as a dependency
setup(ext_modules=[CPU, CUDA], cmdclass={"build_ext": Build}, options={"bdist_wheel": {"py_limited_api": "cp310"}})
