"""The built libraries: stable ABIs only, the right names to load, and plain words where something is missing."""

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import macko
from macko import _library

PACKAGE = Path(macko.__file__).parent
LIBRARIES = sorted(PACKAGE.glob("_C*.so"))
#: Leaves a process no other macko: neither that of this folder, nor one on its path, nor an editable install's.
ALONE = (
    "import os, sys; sys.path[:] = [p for p in sys.path if p and not os.path.exists(p + '/macko')]; "
    "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]"
)
#: Of CPython's limited API of 3.10, what csrc/torch/module.c uses. Look up in its documentation what you add.
PYTHON_SYMBOLS = {
    *("PyModule_Create2", "PyModule_AddStringConstant", "PyUnicode_AsUTF8AndSize", "PyUnicode_FromString"),
    *("PyErr_SetString", "PyErr_Format", "PyErr_Occurred", "PyExc_ValueError", "PyExc_ImportError"),
    *("PyModule_AddObjectRef", "PyDict_New", "PyDict_SetItemString", "PyLong_FromLong", "_Py_Dealloc"),
    *("PyLong_AsLong", "Py_BuildValue"),
}


def each_library() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)


def dynamic(library: Path) -> tuple[set[str], set[str]]:
    """The undefined symbols of a library, and the libraries it names as needed."""
    elffile = pytest.importorskip("elftools.elf.elffile")
    with library.open("rb") as file:
        elf = elffile.ELFFile(file)
        symbols = elf.get_section_by_name(".dynsym").iter_symbols()
        undefined = {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name}
        return undefined, {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        env={**os.environ, **environment},
    )


def test_names_are_of_the_stable_abi() -> None:
    wanted = ["_C.abi3.so", "_C_cuda.abi3.so"] if _library.cuda_arches else ["_C.abi3.so"]
    assert [path.name for path in LIBRARIES if path.name in wanted] == wanted


@each_library()
def test_undefined_symbols(library: Path) -> None:
    """None of its own, as when nvcc does not see a declaration and gives the function a C++ name: seen only where a GPU
    loads it. No C++ symbol of torch. Of Python the limited API's."""
    undefined, _ = dynamic(library)
    assert [name for name in undefined if "macko" in name] == []
    of_torch = re.compile(r"N[rVK]*(2at|3c10|5torch)\d")  # a nested name that begins with at::, c10:: or torch::
    assert of_torch.search("_ZN2at6native3addERKNS_6TensorE")
    assert of_torch.search("_ZTIN3c105ErrorE")
    assert not of_torch.search("_ZNKSt6vectorIlSaIlEE2atEm")
    assert [name for name in undefined if of_torch.search(name)] == []
    assert {name for name in undefined if name.startswith(("Py", "_Py"))} <= PYTHON_SYMBOLS


@each_library()
def test_needed_libraries(library: Path) -> None:
    _, needed = dynamic(library)
    assert "libtorch_cpu.so" in needed
    assert ("libtorch_cuda.so" in needed) == (library.name == "_C_cuda.abi3.so")
    assert not {
        name for name in needed if name.startswith(("libpython", "libcudart", "libcuda.", "libc10", "libtorch."))
    }


@pytest.mark.slow
def test_imports_where_no_gpu_is_visible() -> None:
    ran = python("import macko; print(macko.MackoWeight.__name__)", CUDA_VISIBLE_DEVICES="")
    assert ran.stdout == "MackoWeight\n", ran.stderr


def test_cuda_op_without_the_cuda_library_says_what_to_do() -> None:
    if _library.cuda_missing is None:
        pytest.skip("the CUDA library is loaded")
    # A CPU torch has no CUDA tensors: the call enters the dispatcher where they would.
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match=r"macko::pack got CUDA tensors, and there is no kernel .*install") as error:
        torch.ops.macko.pack.default.redispatch(cuda, torch.zeros(2, 2, device="meta"), 0, [4])
    assert _library.cuda_missing in str(error.value)


@pytest.mark.gpu
def test_cuda_library_that_does_not_load() -> None:
    ran = python(
        "import sys, torch; sys.modules['macko._C_cuda'] = None\n"
        "import macko; macko.ops.pack(torch.zeros(2, 2, device='cuda').half())"
    )
    assert "macko::pack got CUDA tensors" in ran.stderr
    assert "CUDA library does not load" in ran.stderr


@pytest.mark.slow
def test_a_library_that_is_not_there_or_does_not_load(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "macko", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    ran = python(f"{ALONE}; sys.path.insert(0, {str(tmp_path)!r}); import macko")
    assert "macko's library is not built. In the source folder run `make build`" in ran.stderr
    (tmp_path / "macko" / "_C.abi3.so").write_bytes(b"not a library")
    ran = python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import macko")
    assert f"does not load under torch {torch.__version__}" in ran.stderr


def clone_and_installed(build: ModuleType, folder: Path) -> tuple[Path, Path]:
    """A clone named as git names it, not built, and what `pip install .` in it puts beside torch."""
    clone, installed = folder / "macko", folder / "site-packages"
    sources = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("macko", "examples"):
        shutil.copytree(PACKAGE.parent / name, clone / name, ignore=sources)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(PACKAGE.parent / name, clone)
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder), "build_py"]
    subprocess.run([*command, "--build-lib", str(installed)], check=True, cwd=clone, capture_output=True)
    for library in LIBRARIES:
        shutil.copy(library, installed / "macko")
    return clone, installed


def in_clone(clone: Path, installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=clone, env=environment)


@pytest.mark.slow
def test_readme_in_its_own_folder(build: ModuleType, tmp_path: Path) -> None:
    """`pip install .`, and then its first snippet and the commands that it names, where one stands: in the clone."""
    clone, installed = clone_and_installed(build, tmp_path)
    snippet = re.search(r"```python\n(.*?)^```$", (clone / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    (clone / "snippet.py").write_text(snippet.replace("4096", "128").replace("11008", "344"))
    for arguments in (["snippet.py"], ["-c", snippet.replace("4096", "128").replace("11008", "344")]):
        ran = in_clone(clone, installed, *arguments)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert "2 of 2 layers changed" in ran.stdout
        assert "largest difference: " in ran.stdout
    where = "import macko; from macko import _library; print(macko.__file__, _library._C.__file__)"
    assert in_clone(clone, installed, "-c", where).stdout.split() == [
        str(clone / "macko" / "__init__.py"),
        str(installed / "macko" / LIBRARIES[0].name),
    ]
    ran = in_clone(clone, installed, "-m", "macko.cli", "--version")
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.slow
def test_a_clone_hides_an_installed_macko_of_other_sources(build: ModuleType, tmp_path: Path) -> None:
    clone, installed = clone_and_installed(build, tmp_path)
    with (clone / "macko" / "layers.py").open("a") as file:
        file.write("# changed\n")
    ran = in_clone(clone, installed, "-c", "import macko")
    wanted = f"{clone}/macko is not built, and hides the macko that is installed in {installed}, of other sources: "
    assert wanted in ran.stderr.splitlines()[-1]
    shutil.rmtree(installed)
    ran = in_clone(clone, installed, "-c", f"{ALONE}; sys.path.insert(0, {str(clone)!r}); import macko")
    assert "macko's library is not built." in ran.stderr


def test_every_data_file_is_packaged() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib is in Python 3.11 and newer")
    folder = Path(macko.__file__).parent
    pyproject = folder.parent / "pyproject.toml"
    if not pyproject.exists():
        pytest.skip("macko is installed, its source is not here")
    settings = tomllib.loads(pyproject.read_text())["tool"]["setuptools"]
    folders = {p.parent.relative_to(folder.parent) for suffix in ("py", "json") for p in folder.rglob(f"*.{suffix}")}
    assert folders == {Path(*name.split(".")) for name in settings["packages"]}
    kept = {
        path
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for path in folder.parent.joinpath(*package.split(".")).glob(pattern)
    }
    data = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".so")}
    assert data == kept


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module that builds nothing by itself, with no word from the environment."""
    setuptools = pytest.importorskip("setuptools")
    path = PACKAGE.parent / "setup.py"
    if not path.exists():
        pytest.skip("macko is installed, its source is not here")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    for name in ("MACKO_CUDA", "TORCH_CUDA_ARCH_LIST", "V"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("macko_setup", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_build_warns_of_nothing(build: ModuleType, tmp_path: Path) -> None:
    """What setuptools has to say of packages, data and MANIFEST.in, pip shows as if the build had failed."""
    command = [sys.executable, "-W", "error", "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    command += ["build_py", "--build-lib", str(tmp_path / "lib")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, env=environment)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")
    tables = tmp_path / "lib/macko/choose/times"
    assert {path.name for path in tables.iterdir()} >= {"NVIDIA_H200.json", "cpu_avx2.json"}


def test_a_header_or_a_flag_that_changed_compiles_again_and_nothing_else(build: ModuleType, tmp_path: Path) -> None:
    """In a path with a space: compilers write a space of a dependency's path as backslash and space."""
    folder = tmp_path / "macko clone" / "macko"
    folder.mkdir(parents=True)
    (folder / "a b.h").touch()
    (folder / "a.c").write_text('#include "a b.h"\nint main(void) { return 0; }\n')
    target = folder / "a.o"
    outputs = ["-MMD", "-MF", f"{target}.d", "-c", str(folder / "a.c"), "-o", str(target)]
    step = build.Step("a.c", ["cc", *outputs], folder / "a.cmd")
    assert not step.is_fresh()
    step.run(itertools.count(1), 1)
    assert step.is_fresh()
    assert not build.Step("a.c", [*step.command, "-O3"], step.stamp).is_fresh()
    later = target.stat().st_mtime + 1
    os.utime(folder / "a b.h", (later, later))
    assert not step.is_fresh()


def test_what_says_nothing_for_long_shows_that_it_lives(build: ModuleType) -> None:
    script = "import time; print('one'); time.sleep(0.5); print('two'); raise SystemExit(3)"
    alive = "import sys; from verify import alive; alive.SECONDS = 0.1; sys.argv[1:]"
    ran = python(f"{alive} = {[sys.executable, '-c', script]}; sys.exit(alive.main())")
    assert ran.returncode == 3
    assert re.fullmatch(r"one\n\.{2,}\ntwo\n", ran.stdout.lstrip(".\n")), ran.stdout


NO_CUDA, CUDA_13, CUDA_12 = "cuda: Optional[str] = None", "cuda: Optional[str] = '13.0'", 'cuda: str | None = "12.8"'


@pytest.mark.parametrize(
    "case",
    [
        (CUDA_13, True, None, None),
        (CUDA_12, True, None, None),
        (CUDA_13, False, None, "there is no nvcc; put it on PATH"),
        (CUDA_13, True, "0", "MACKO_CUDA=0"),
        (NO_CUDA, True, None, r"torch 2\.13\.0\+x has no CUDA; MACKO_CUDA=1 builds it all the same"),
        (NO_CUDA, True, "1", None),
    ],
)
def test_cuda_is_compiled_where_torch_can_load_it_or_on_demand(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, bool, str | None, str | None]
) -> None:
    of_torch, nvcc, wanted, left_out = case
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0+x'\ndebug = False\n{of_torch}\nhip = None\n")
    monkeypatch.setattr(build, "find_torch", lambda: tmp_path)
    monkeypatch.setattr(build, "find_nvcc", lambda: tmp_path / "nvcc" if nvcc else None)
    if wanted:
        monkeypatch.setenv("MACKO_CUDA", wanted)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0+PTX;9.0")
    if left_out:
        assert re.match(left_out, build.why_no_cuda())
        assert build.arches() == []
    else:
        assert build.why_no_cuda() is None
        assert build.arches() == ["8.0+PTX", "9.0a"]


def test_cuda_on_demand_without_nvcc_stops(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setenv("MACKO_CUDA", "1")
    with pytest.raises(SystemExit, match="MACKO_CUDA=1, but there is no nvcc"):
        build.why_no_cuda()


def test_a_line_of_the_build_is_short_until_it_fails(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import sys; open(sys.argv[2], 'w').close(); print('a warning', file=sys.stderr); "
    command = [sys.executable, "-c", f"{script}sys.exit(len(sys.argv) > 3)", "-o", str(tmp_path / "made" / "x.o")]
    count = itertools.count(7)
    build.Step("csrc/x.cu (9.0a)", command, tmp_path / "x.cmd").run(count, 9)
    assert capfd.readouterr().out == "[7/9] csrc/x.cu (9.0a)\ncsrc/x.cu (9.0a):\na warning\n"
    with pytest.raises(SystemExit, match=r"(?s)-o .*/made/x\.o fail\na warning\nmacko: the build stopped at csrc/x"):
        build.Step("csrc/x.cu (9.0a)", [*command, "fail"], tmp_path / "x.cmd").run(count, 9)
    assert capfd.readouterr().out == "[8/9] csrc/x.cu (9.0a)\n"
    monkeypatch.setenv("V", "1")
    build.Step("csrc/x.cu (9.0a)", command, tmp_path / "x.cmd").run(count, 9)
    assert f" -o {tmp_path}/made/x.o\n" in capfd.readouterr().out
