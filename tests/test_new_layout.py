"""A new layout is a file and a row in C, a class in Python: a copy of the source gets one, is built and put to use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    return {{flipped(canonical_layout.dense(p, true), 0)}, {MACKO_LAYOUT_TOY, p.rows(), p.cols(), p.own(0)}};
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
const Layout toy_layout = {
    .name = "toy", .tensors = 1, .own = 1, .lay_out = lay_out, .dense = dense, .check = check, .linear = linear};
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
    number: ClassVar[int] = 10
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    values_name: ClassVar[str] = "reversed"
    faults: ClassVar[Mapping[int, str]] = {1: "row {place} from the end, column {entry} is too large"}
    reversed: Tensor
    rows: int
    cols: int
    delta_bits: int = 4
"""
TOY = "LAYOUT(TOY, toy_layout)"
#: All that changes outside of the layout's own files: (file, what stands there once, what stands there then).
ROWS = [
    ("csrc/torch/path.h", "LAYOUT(SPARSE8, sparse8_layout)", "LAYOUT(SPARSE8, sparse8_layout) " + TOY),
]

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


@pytest.mark.slow
def test_a_new_layout_is_two_files_and_a_row(tmp_path: Path) -> None:
    if not (ROOT / "setup.py").exists():
        pytest.skip("macko is installed, its source is not here")
    ignore = shutil.ignore_patterns("*.so", "_C_cuda*", "__pycache__")
    for folder in filter(Path.exists, map(ROOT.joinpath, ("csrc", "contrib", "macko", "build/objects"))):
        shutil.copytree(folder, tmp_path / folder.relative_to(ROOT), ignore=ignore)
    for told in (*tmp_path.glob("build/objects/*.cmd"), *tmp_path.glob("build/objects/_C/*.d")):
        told.write_text(told.read_text().replace(str(ROOT), str(tmp_path)))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    before = os.path.getmtime(table := tmp_path / "csrc/torch/path.h")
    for name, old, new in ROWS:
        text = (tmp_path / name).read_text()
        assert text.count(old) == 1, name
        (tmp_path / name).write_text(text.replace(old, new))
    # A row at the end changes no other number: of the objects only that of the table itself has to be made anew.
    os.utime(table, (before, before))
    (tmp_path / "csrc/torch/library.cpp").touch()
    (tmp_path / "csrc/toy").mkdir()
    (tmp_path / "csrc/toy/ops.cpp").write_text(OPS)
    (tmp_path / "macko/weights/toy.py").write_text(CLASS)
    (tmp_path / "use.py").write_text(USE)
    for command in (["setup.py", "--quiet", "build_ext", "--inplace"], ["use.py"]):
        environment = {**os.environ, "MACKO_CUDA": "0"}
        ran = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
