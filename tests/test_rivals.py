"""benchmarks.rivals: torch's products of 8 and 4 bits are what the tables say they are."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import macko.measure.rivals
from benchmarks import report, rivals


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor]:
    monkeypatch.setattr(rivals, "copies", lambda tensors: [list(tensors)])
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 256, generator=generator).bfloat16(), torch.randn(8, 256, generator=generator).bfloat16()


def test_int4_product_is_that_of_the_groups(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    w, x = problem
    packed, scales, held = rivals.int4_pack(w, 2)
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, rivals.GROUP, scales).double()
    wanted = rivals.product(x, held)
    assert float((y - wanted).norm()) <= 2.0**-8 * float(wanted.norm())
    roundings = 2 * 8 * 2.0**-8  # of the scale and of the product, to bfloat16, at eight steps
    step = w.float().view(64, -1, rivals.GROUP).abs().amax(2, keepdim=True) / 7.5
    assert bool(((held - w).view(64, -1, rivals.GROUP).abs() <= (0.5 + roundings) * step).all())


def test_fp8_by_row_is_checked(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    w, x = problem
    rival = rivals.Rival("fp8_rows_quant", w)
    call = rival.calls(x)[0]
    assert 0.01 < rival.check(call, w, x) < 2.0**-4 * 2
    assert rival.nbytes == w.numel() + 4 * len(w)
    with pytest.raises(SystemExit, match="fp8_rows_quant: results are"):
        rival.check(lambda: call().roll(1, 1), w, x)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_with_fewer_bits_is_that_of_the_rounded_weight(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(256, 64, bias), "odd": nn.Linear(100, 64), "lm_head": nn.Linear(256, 64)})
    for name in macko.measure.rivals.RIVALS:
        made = copy.deepcopy(model).bfloat16()
        dense = made["q"]
        x = torch.randn(2, 3, 256).bfloat16()
        wanted = dense(x).float()
        assert macko.measure.rivals.replace_(made, name) == 1
        assert type(made["odd"]) is type(made["lm_head"]) is nn.Linear
        y = made["q"](x)
        assert (y.shape, y.dtype) == (wanted.shape, torch.bfloat16)
        assert (
            0.01 < float((y.float() - wanted).norm() / wanted.norm()) < 0.2
        )  # what 3 bits of mantissa, or 4 bits, lose


def test_table_has_rows_of_lines_only(tmp_path: Path) -> None:
    def line(kernel: str, density: float, us: float) -> str:
        shape = {"rows": 8, "cols": 8, "density": density, "dtype": "bfloat16", "tokens": 8, "held_bytes": 64}
        return json.dumps({"kernel": kernel, "dense_us": 10.0, "median_us": us, **shape}) + "\n"

    path = tmp_path / "spmm.jsonl"
    path.write_text(line("tile", 0.5, 5.0))
    assert report.part("rivals", path) == report.NO_LINES  # nothing to compare with
    path.write_text(line("tile", 0.5, 5.0) + line("int4", 1.0, 20.0))
    rows = report.part("rivals", path).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| tile, half zeros, exact", "| int4, groups of 128"]
    assert "0.50x (0.50x)" in rows[1]  # a loss is shown
