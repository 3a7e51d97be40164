"""A new layout is a file in C and a class in Python: a copy of the source gets one, is built and put to use."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import macko

ROOT = Path(macko.__file__).parent.parent

#: csrc/toy/ops.cpp: the dense matrix with its rows from the last to the first.
OPS = r"""
#include "../torch/packed.h"
#include "../torch/tensors.h"
namespace macko {
namespace {
Tensor flipped(const Tensor &t, int64_t dim) {
    std::array<StableIValue, 2> stack{torch::stable::detail::from(t), torch::stable::detail::from(Ints{dim})};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::flip", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
}
const Tensor &matrix_of(const char *op, const Packed &p) {
    check_value_dtype(op, "reversed", p[0]);
    check_dim(op, "reversed", p[0], 2);
    if (p[0].size(0) != p.rows() || p[0].size(1) != p.cols())
        fail(op, "reversed has shape ", shape_name(p[0]), ", expected [", p.rows(), ", ", p.cols(), "]");
    check_contiguous(op, "reversed", p[0]);
    return p[0];
}
Made lay_out(const Packed &p, const Ints &) {
    return {{flipped(canonical_layout.dense(p, true), 0)}, {63, p.rows(), p.cols(), p.number(0)}};
}
Tensor dense(const Packed &p, bool) { return flipped(matrix_of("dense", p), 0); }
Tensor check(const Packed &p) {
    const Tensor &t = matrix_of("check", p);
    const auto *bytes = static_cast<const uint8_t *>(t.const_data_ptr());
    Tensor found = new_fault(t);
    *fault_in(found) = {};
    for (int64_t size = t.element_size(), i = size - 1; i < t.numel() * size; i += size)
        if ((bytes[i] & 0x7f) == 0x7f) *fault_in(found) = {1, i / size / p.cols(), i / size % p.cols(), 0};
    return found;
}
Tensor linear(const Packed &p, const Tensor &x, const std::optional<Tensor> &bias_any) {
    const Tensor &t = matrix_of("linear", p);
    check_tokens("linear", x, "reversed", t, p.cols());
    auto bias = checked_bias("linear", bias_any, "reversed", t, t.scalar_type(), p.rows());
    if (bias) bias = flipped(*bias, 0);
    return flipped(dense_linear(x, t, bias), -1);
}
} // namespace
const Registered toy_layout({.name = "toy", .number = 63, .tensors = 1, .numbers = 1,
                             .lay_out = lay_out, .dense = dense, .check = check, .linear = linear});
} // namespace macko
"""

#: macko/weights/toy.py
CLASS = """import dataclasses
from collections.abc import Mapping
from typing import ClassVar
from torch import Tensor
from .base import PackedWeight

@dataclasses.dataclass(frozen=True, eq=False)
class ToyWeight(PackedWeight):
    format: ClassVar[str] = "toy"
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    values_name: ClassVar[str] = "reversed"
    faults: ClassVar[Mapping[int, str]] = {1: "row {place} from the end, column {entry} is too large"}
    reversed: Tensor
    rows: int
    cols: int
    delta_bits: int = 4
"""
BUILD = ("setup.py", "--quiet", "build_ext", "--inplace")
USE = r"""
import copy, dataclasses, pytest, torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from macko import FORMATS, MackoWeight, SparseLinear, load_model, save_model
from macko.measure.doctor import self_test
from macko.choose.auto import layouts

self_test(torch.device("cpu"), torch.bfloat16)
Toy, whole = FORMATS["toy"], lambda *shape: torch.randint(-3, 4, shape).float()
for Toy.is_layout in (False, True):  # a format of its own in files; saved as canonical
    for rows, cols in ((5, 7), (1, 64), (33, 1), (0, 4), (4, 0)):
        w, bias = whole(rows, cols), whole(rows)
        toy = Toy.from_dense(w)
        assert torch.equal(toy.to_dense(), w) and torch.equal(toy.to_macko().to_dense(), w)
        for tokens in ((), (1,), (3,), (2, 0), (2, 5)):
            x = whole(*tokens, cols)
            assert torch.equal(toy.linear(x, bias), nn.functional.linear(x, w, bias)), (w.shape, tokens)
    dense = nn.Linear(7, 5)
    dense.weight.data = whole(5, 7)
    layer = SparseLinear.from_linear(dense, format="toy")
    save_model(layer, "saved.safetensors")
    loaded, other = (SparseLinear.from_linear(nn.Linear(7, 5), "toy") for _ in range(2))
    other.load_state_dict(layer.state_dict())
    for read in (load_model(loaded, "saved.safetensors"), other):
        assert type(read.packed) is Toy and torch.equal(read.weight, dense.weight)
    assert torch.equal(copy.deepcopy(layer).bfloat16().weight, dense.weight.bfloat16())
    assert (Toy in layouts(MackoWeight.from_dense(w))) == Toy.is_layout  # what "smallest" and tune try
    x = whole(4, 7).requires_grad_()
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        y, wanted = call(x), dense(x)
        grads = (torch.autograd.grad((y * y).sum(), [x, bias]) for y, bias in ((y, layer.bias), (wanted, dense.bias)))
        assert torch.equal(y, wanted) and all(map(torch.equal, *grads))
broken = layer.packed.reversed.index_fill(0, torch.tensor([1]), float("inf"))
with pytest.raises(ValueError, match="not a toy weight: row 1 from the end, column 6 is too large"):
    dataclasses.replace(layer.packed, reversed=broken).validate()
with pytest.raises(ValueError, match=r"not a toy weight: .*reversed has shape \[4, 7\], expected \[5, 7\]"):
    dataclasses.replace(layer.packed, reversed=broken[1:]).validate()
with FakeTensorMode(), pytest.raises(NotImplementedError, match="lay_out: .* layout toy"):
    Toy.from_macko(MackoWeight.zeros(2, 3, torch.float32))
"""

USE_CODEC = r"""
import copy, dataclasses, pytest, torch
from torch import nn
from macko.cli import main
from macko import FORMATS, SparseLinear, load_model, save_model
from macko.measure.doctor import self_test

self_test(torch.device("cpu"), torch.bfloat16)
Toy, devices = FORMATS["toy16"], ["cpu", *["cuda"] * torch.cuda.is_available()]
whole = lambda *shape: torch.randint(-3, 4, shape)
for device in devices:
    for rows, cols in ((5, 7), (64, 256), (65, 257), (200, 520), (0, 4), (4, 0)):
        for dtype in Toy.dtypes:
            w, bias = whole(rows, cols).to(device, dtype), whole(rows).to(device, dtype)
            toy = Toy.from_dense(w)
            toy.validate()
            assert torch.equal(toy.to_dense(), w) and torch.equal(toy.data.cpu(), Toy.from_dense(w.cpu()).data)
            for tokens in (1, 3, 9, 20, 64, 65, 200):  # by the kernels for few and for many, where there are
                x = whole(tokens, cols).to(device, dtype)
                assert torch.equal(toy.linear(x, bias), nn.functional.linear(x, w, bias)), (device, w.shape, tokens)
    dense = nn.Sequential(nn.Linear(128, 96), nn.Linear(96, 64)).to(device, torch.bfloat16)
    model = nn.Sequential(*(SparseLinear.from_linear(layer, format="toy16") for layer in dense))
    assert all(type(layer.packed) is Toy for layer in model)
    x = torch.randn(3, 128, dtype=torch.bfloat16, device=device)
    torch.testing.assert_close(model(x), dense(x))
    save_model(model, "saved.safetensors")
    loaded = load_model(copy.deepcopy(dense), "saved.safetensors")
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(loaded, dense))
    merged = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(merged(x), model(x))
    assert main(["inspect", "saved.safetensors"]) in (0, None)
broken = model[0].packed.data.clone()
broken[64 * 128 :].fill_(1)
with pytest.raises(ValueError, match="not a toy16 weight: .* is outside of the matrix and not 0"):
    dataclasses.replace(model[0].packed, data=broken).validate()
with pytest.raises(ValueError, match="not a toy16 weight: .*data has 64 elements, expected"):
    dataclasses.replace(model[0].packed, data=broken[:64]).validate()
"""


def copy_of_source(target: Path, kind: str, name: str) -> None:
    """With a class more in Python."""
    if not (ROOT / "setup.py").exists():
        pytest.skip("macko is installed, its source is not here")
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for folder in filter(Path.exists, map(ROOT.joinpath, ("csrc", "contrib", "macko", "build/objects"))):
        shutil.copytree(folder, target / folder.relative_to(ROOT), ignore=ignore)
    for told in (*target.glob("build/objects/*.cmd"), *target.glob("build/objects/_C*/*.d")):
        told.write_text(told.read_text().replace(str(ROOT), str(target)))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, target)
    (target / "macko/weights" / f"{name}.py").write_text(kind)


def run(folder: Path, *command: str, cuda: bool = False) -> None:
    environment = {**os.environ, "MACKO_CUDA": str(int(cuda))}
    ran = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_a_new_layout_is_a_file_and_a_class(tmp_path: Path) -> None:
    copy_of_source(tmp_path, CLASS, "toy")
    (tmp_path / "csrc/toy").mkdir()
    (tmp_path / "csrc/toy/ops.cpp").write_text(OPS)
    (tmp_path / "use.py").write_text(USE)
    run(tmp_path, *BUILD)
    run(tmp_path, "use.py")
    (tmp_path / "csrc/toy/ops.cpp").write_text(OPS.replace(".number = 63", ".number = 9"))
    run(tmp_path, *BUILD)
    with pytest.raises(AssertionError, match=r"ImportError: .*the number of the layout (toy|sparse8) is another one's"):
        run(tmp_path, "-c", "import macko")


@pytest.mark.slow
def test_a_new_codec_is_a_folder_and_a_class(tmp_path: Path) -> None:
    """The kernels of slabs multiply it: where there is nvcc they are compiled, where there is a GPU too they run."""
    copy_of_source(tmp_path, (ROOT / "tests/toy16/toy16.py").read_text(), "toy16")
    shutil.copytree(ROOT / "tests/toy16", tmp_path / "csrc/codecs/toy16")
    (tmp_path / "use.py").write_text(USE_CODEC)
    nvcc = shutil.which("nvcc")
    run(tmp_path, *BUILD, cuda=bool(nvcc and torch.cuda.is_available()))
    run(tmp_path, "use.py")
    for name in ("few", "many", "ring", "pack") if nvcc and not torch.cuda.is_available() else ():
        # To PTX: what ptxas makes of it, which takes as long again, says nothing of the codec.
        command = [nvcc, "-std=c++17", "-ptx", "-arch=sm_90a", f"csrc/codecs/toy16/{name}_cuda.cu", "-o", os.devnull]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
