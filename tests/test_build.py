"""The built libraries: stable ABIs only, the right names to load, and plain words where something is missing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import macko
from macko import _library

PACKAGE = Path(macko.__file__).parent
LIBRARIES = sorted(PACKAGE.glob("_C*.so"))
#: Of CPython's limited API of 3.10, what csrc/torch/module.c uses. Look up in its documentation what you add.
PYTHON_SYMBOLS = {"PyModule_Create2", "PyModule_AddStringConstant"}


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
def test_no_cpp_symbol_of_torch(library: Path) -> None:
    undefined, _ = dynamic(library)
    of_torch = re.compile(r"N[rVK]*(2at|3c10|5torch)\d")  # a nested name that begins with at::, c10:: or torch::
    assert of_torch.search("_ZN2at6native3addERKNS_6TensorE")
    assert of_torch.search("_ZTIN3c105ErrorE")
    assert not of_torch.search("_ZNKSt6vectorIlSaIlEE2atEm")
    assert [name for name in undefined if of_torch.search(name)] == []


@each_library()
def test_no_python_symbol_outside_the_limited_api(library: Path) -> None:
    undefined, _ = dynamic(library)
    assert {name for name in undefined if name.startswith(("Py", "_Py"))} <= PYTHON_SYMBOLS


@each_library()
def test_needed_libraries(library: Path) -> None:
    _, needed = dynamic(library)
    assert "libtorch_cpu.so" in needed
    assert ("libtorch_cuda.so" in needed) == (library.name == "_C_cuda.abi3.so")
    assert not {
        name for name in needed if name.startswith(("libpython", "libcudart", "libcuda.", "libc10", "libtorch."))
    }


def test_imports_where_no_gpu_is_visible() -> None:
    ran = python("import macko; print(macko.MackoWeight.__name__)", CUDA_VISIBLE_DEVICES="")
    assert ran.stdout == "MackoWeight\n", ran.stderr


def test_cuda_op_without_the_cuda_library_says_what_to_do() -> None:
    if _library.cuda_missing is None:
        pytest.skip("the CUDA library is loaded")
    # A CPU torch has no CUDA tensors: the call enters the dispatcher where they would.
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match=r"macko::pack got CUDA tensors, and there is no kernel .*install") as error:
        torch.ops.macko.pack.default.redispatch(cuda, torch.zeros(2, 2, device="meta"), 4)
    assert _library.cuda_missing in str(error.value)


@pytest.mark.gpu
def test_cuda_library_that_does_not_load() -> None:
    ran = python(
        "import sys, torch; sys.modules['macko._C_cuda'] = None\n"
        "import macko; macko.ops.pack(torch.zeros(2, 2, device='cuda').half())"
    )
    assert "macko::pack got CUDA tensors" in ran.stderr
    assert "CUDA library does not load" in ran.stderr


def test_import_without_a_build_says_how_to_build(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "macko", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    ran = python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import macko")
    assert "macko's library is not built. In the source folder run `make build`" in ran.stderr


def test_library_that_does_not_load(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "macko", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "macko" / "_C.abi3.so").write_bytes(b"not a library")
    ran = python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import macko")
    assert f"does not load under torch {torch.__version__}" in ran.stderr


def test_every_data_file_is_packaged() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib is in Python 3.11 and newer")
    folder = Path(macko.__file__).parent
    pyproject = folder.parent / "pyproject.toml"
    if not pyproject.exists():
        pytest.skip("macko is installed, its source is not here")
    settings = tomllib.loads(pyproject.read_text())["tool"]["setuptools"]
    assert {p.parent.name for p in folder.rglob("*.py")} == {name.rpartition(".")[2] for name in settings["packages"]}
    kept = {path for pattern in settings["package-data"]["macko"] for path in folder.glob(pattern)}
    data = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".so")}
    assert data == kept
