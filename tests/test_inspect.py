"""macko inspect: panels of rows say what packing the whole matrix gives, and shapes that lie take little."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from macko import FORMATS, EcWeight, MackoWeight, cli
from macko.choose.auto import sparse11_of
from macko.choose.exponents import lacking, outside_table
from macko.choose.patterns import PATTERNS, density_of, matching_patterns, pattern_names
from macko.cli import main
from macko.files import VERSION, Checkpoint
from macko.integrations.compressed_tensors import Masked
from macko.measure import inspect
from macko.weights import Dense12Weight, Macko8Weight, PackedWeight, SlideWeight, Sparse11Weight, TileWeight
from tests.common import as_bitmask, assert_same_bits, edited, random_weight
from tests.kernels.codecs import Dense12, bits_of

BF16, F16 = torch.bfloat16, torch.float16


def pruned(rows: int, cols: int, density: float, dtype: torch.dtype = BF16) -> Tensor:
    """As magnitude leaves them: few exponents, which sparse11 holds, and some that its table and dense12's lack."""
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows + cols)) * 0.02
    w[w.abs() < w.abs().flatten().quantile(1 - density)] = 0
    w.view(-1)[::997] *= 2.0**40 if dtype == BF16 else 2.0**8
    return w.to(BF16).to(dtype)


def two_four(rows: int, cols: int, dtype: torch.dtype = BF16) -> Tensor:
    w = pruned(rows, cols, 1.0, dtype)
    w[:, ::4] = w[:, 2::4] = 0
    return w


def odd_last_row(rows: int, cols: int) -> Tensor:
    return torch.cat([two_four(rows - 1, cols), pruned(1, cols, 1.0)])


MATRICES: dict[str, Callable[[], Tensor]] = {
    "half": lambda: pruned(333, 777, 0.5),
    "some": lambda: pruned(129, 300, 0.3),
    "full": lambda: pruned(200, 300, 1.0),
    "once_bfloat16": lambda: pruned(130, 513, 0.5, F16),
    "never_bfloat16": lambda: random_weight(130, 513, 0.5, F16),
    "two_four": lambda: two_four(150, 336),
    "two_four_but_the_last_row": lambda: odd_last_row(193, 336),
    "wide": lambda: pruned(3, 9001, 0.45),
    "wider_than_a_panel": lambda: two_four(66, 2 * inspect.PANEL_COLS + 8),
    "wider_by_no_group": lambda: two_four(2, inspect.PANEL_COLS + 7),
    "one": lambda: pruned(1, 1, 1.0),
    "zeros": lambda: torch.zeros(70, 90, dtype=BF16),
    "ends_with_empty_rows": lambda: torch.cat([pruned(30, 500, 0.5), torch.zeros(300, 500, dtype=BF16)]),
    "no_rows": lambda: torch.zeros(0, 5, dtype=BF16),
    "no_columns": lambda: torch.zeros(5, 0, dtype=BF16),
    "float32": lambda: random_weight(130, 336, 0.4, torch.float32),
    "float8": lambda: two_four(130, 336, F16).to(torch.float8_e4m3fn),
}


@pytest.fixture(params=[1, 1 << 21])
def panel(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Elements of a panel: 64 rows each, or the whole."""
    monkeypatch.setattr(inspect, "PANEL", request.param)
    monkeypatch.setattr(inspect, "MORE_BYTES", 1 << 25)
    return int(request.param)


def assert_seen(seen: inspect.Seen, w: Tensor) -> None:
    """As packing the dense matrix whole says it."""
    assert (seen.density, seen.patterns) == (
        density_of(w) or 0,
        (pattern_names(matching_patterns(w, PATTERNS)) if w.numel() else []),
    )
    if w.dtype not in Dense12Weight.dtypes:
        assert seen.counts is None
        return
    assert seen.counts is not None
    for signed in (False, True):
        assert lacking(seen.counts, w.dtype, signed) == outside_table(w, signed)
    packed = MackoWeight.from_dense(w)
    assert seen.tile_bytes() == TileWeight.from_macko(packed).nbytes
    sparse11, dense12 = sparse11_of(packed), None
    assert seen.sparse11_bytes() == (sparse11.nbytes if sparse11 else None)
    with contextlib.suppress(ValueError):
        dense12 = Dense12Weight.from_dense(w)
    listed, _ = outside_table(w, signed=False)
    assert dense12 is None or dense12.listed == listed
    assert seen.dense12_bytes(listed) == (dense12.nbytes if dense12 else None)


@pytest.mark.parametrize("name", MATRICES)
def test_panels_say_what_packing_the_whole_gives(name: str, panel: int) -> None:
    w = MATRICES[name]()
    assert_seen(inspect.Seen(w, w.nbytes), w)
    if w.dtype in MackoWeight.dtypes:
        for bits in (2, 4, 8):
            packed = MackoWeight.from_dense(w, bits)
            assert_seen(inspect.Seen(packed, packed.nbytes + (1 << 20)), w)


@pytest.mark.parametrize("format", ["dense8", "sparse8"])
@pytest.mark.parametrize("kind", [0, 1])
def test_weights_of_8_bits_are_seen_as_codes_times_scales(format: str, kind: int, panel: int) -> None:
    for w in (random_weight(200, 300, 0.5, F16), random_weight(130, 70, 0.1, BF16), two_four(1, 700, F16)):
        saved = FORMATS[format].from_dense(w, kind).to_saved()
        assert isinstance(saved, Macko8Weight)
        assert_seen(inspect.Seen(saved.scaled(), saved.nbytes + (1 << 20)), saved.to_dense())


def bitmask_file(path: Path, w: Tensor) -> None:
    """A weight `a` of compressed-tensors."""
    path.mkdir(exist_ok=True)
    save_file({f"a.{name}": part for name, part in as_bitmask(w).items()}, path / "model.safetensors")
    about = {"sparsity_config": {"format": "sparse-bitmask"}}
    (path / "config.json").write_text(json.dumps({"quantization_config": about}))


@pytest.mark.parametrize("name", ["half", "two_four_but_the_last_row", "zeros", "no_rows", "no_columns", "float32"])
def test_bitmasks_are_seen_by_panels(name: str, panel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = MATRICES[name]()
    bitmask_file(tmp_path, w)
    monkeypatch.setattr("macko.integrations.compressed_tensors._DECODED", panel)
    with Checkpoint(tmp_path) as file:
        masked = Masked(file, "a")
        assert_same_bits(masked.to_dense(), w)
        assert masked.density == (density_of(w) or 0)
        assert_seen(inspect.Seen(masked, masked.nbytes), w)


def test_a_bitmask_whose_last_panel_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    bitmask_file(tmp_path, pruned(200, 300, 0.5))
    with edited(tmp_path / "model.safetensors") as tensors:
        tensors["a.bitmask"][-1, 0] ^= 1
    monkeypatch.setattr(inspect, "PANEL", 1)
    assert main(["inspect", str(tmp_path)]) == 1
    assert "a: bitmask has " in capsys.readouterr().err


def write(path: Path, **weights: Tensor | PackedWeight) -> Path:
    tensors: dict[str, Tensor] = {}
    layers = {}
    for name, weight in weights.items():
        if isinstance(weight, Tensor):
            tensors[f"{name}.weight"] = weight
        else:
            layers[name] = weight.about()
            tensors |= {f"{name}.{key}": t for key, t in weight.tensors().items()}
    save_file(tensors, path, metadata={"macko": json.dumps({"version": VERSION, "layers": layers})} if layers else None)
    return path


def test_the_table_does_not_depend_on_panels(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    half = pruned(333, 776, 0.5)
    names = {name: make() for name, make in MATRICES.items() if "no_" not in name}
    packed = {f"{name}_macko": MackoWeight.from_dense(w) for name, w in names.items() if name != "float8"}
    path = write(
        tmp_path / "file", **names, **packed, lm_head=half, embed_tokens=half.clone(), ec=EcWeight.from_dense(half),
        slide=SlideWeight.from_dense(two_four(70, 128), 2, 3), codes=FORMATS["sparse8"].from_dense(half).to_saved(),
    )  # fmt: skip
    said = set()
    for elements in (1, 100_000, 1 << 30):
        monkeypatch.setattr(inspect, "PANEL", elements)
        monkeypatch.setattr(inspect, "ELEMENTS_A_BYTE", 1 << 30)
        assert main(["inspect", str(path), "--gpu", "NVIDIA H200"]) == 0
        said.add(capsys.readouterr().out)
    assert len(said) == 1


# ---- Shapes that lie -------------------------------------------------------------------------------------------------


def sparse(rows: int, cols: int, columns: list[int], filled: int) -> MackoWeight:
    """The first `filled` of all rows have these columns."""
    w = MackoWeight.from_dense(torch.zeros(1, max(columns) + 1, dtype=F16).index_fill_(1, torch.tensor(columns), 1), 8)
    count = w.stored
    row_ptr = (torch.arange(rows + 1) * count).clamp(max=filled * count).int()
    values, deltas = (t[:count].repeat(filled) for t in (w.values, w.deltas))
    values, deltas = (torch.nn.functional.pad(t, (0, -len(t) % 8)) for t in (values, deltas))
    return MackoWeight(values, deltas, row_ptr, rows, cols, 8)


def most_resident() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.parametrize(
    "weight",
    [
        lambda: sparse(64, 2**31 - 1, [0], 0),
        lambda: sparse(64, 2**31 - 1, [0], 64),
        lambda: sparse(1, 2**31 - 1, [0], 1),
        lambda: sparse(2**20, 2**31 - 1, [0], 1),
        lambda: sparse(2**20, 1, [0], 2**20),
        lambda: sparse(50_000, 65_536, [0], 50_000),
        lambda: sparse(8192, 8192, list(range(9)), 8192),  # just over a density of 2^-10
        lambda: sparse(64, 2**20, list(range(1025)), 64),
        lambda: sparse(1, 2**24, list(range(0, 2**24, 255)), 1),
        lambda: sparse(4096, 4096, list(range(0, 4096, 64)), 4096),
        lambda: sparse(64, 30_000, list(range(0, 30_000, 150)), 64),
        lambda: torch.ones(1, 2**23, dtype=F16).index_fill_(1, torch.arange(0, 2**23, 2), 0),
        lambda: EcWeight.from_dense(torch.eye(2048, dtype=F16).repeat(1, 4)),
    ],
)
def test_a_look_takes_little_beside_the_file(
    weight: Callable[[], PackedWeight | Tensor], tmp_path: Path, capsys: Any
) -> None:
    """Up to 2^51 elements, in files of some kilobytes."""
    made = weight()
    if isinstance(made, PackedWeight):
        made.validate()
    path = write(tmp_path / "file", up=made)
    shape, size = "x".join(map(str, made.shape)), path.stat().st_size
    del made
    assert main(["inspect", str(write(tmp_path / "small", up=sparse(3, 9, [2], 1)))]) == 0  # torch's own first use
    counted = Path("/proc/self/clear_refs")
    with contextlib.suppress(OSError):
        counted.write_text("5")  # VmHWM begins anew
    before, begun = most_resident(), time.process_time()
    assert main(["inspect", str(path)]) == 0
    assert time.process_time() - begun < 2
    assert most_resident() - before <= 4 * size + (64 << 20)
    assert shape in capsys.readouterr().out


def test_what_is_not_worth_a_look_has_its_density(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "file", up=sparse(8192, 8192, list(range(9)), 4096))
    assert main(["inspect", str(path)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("up ")).split()
    assert row[:5] == ["up", "8192x8192", "0.001", "(99.9%)", "macko"]


def test_tune_leaves_what_is_not_worth_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half, found = pruned(70, 300, 0.5), {}

    def tuned(weights: Any, **_: Any) -> Path:
        found.update(weights)
        return write(tmp_path / "times")

    monkeypatch.setattr("macko.measure.tune.tune", tuned)
    monkeypatch.setattr(cli, "read", lambda path: {"linear": []})
    saved = FORMATS["sparse8"].from_dense(half).to_saved()
    path = write(
        tmp_path / "file", up=sparse(64, 2**31 - 1, [0], 1), a=MackoWeight.from_dense(half, 8), b=half,
        c=EcWeight.from_dense(half), d=saved, embed=half.clone(),
    )  # fmt: skip
    assert main(["tune", str(path), "--device", "cpu"]) == 0
    assert sorted(found) == ["a", "b.weight", "c", "d"]
    for name, w in found.items():
        assert_same_bits(w, saved.to_dense() if name == "d" else half)


def test_inspect_says_what_it_would_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w, spread = Dense12(BF16, 0).source(512, 512, rare=0.001), (2.0 ** torch.randint(-90, 90, (128, 256))).bfloat16()
    made = Dense12Weight.from_dense(w)
    save_file({"a.weight": w, "b.weight": spread, "embed.weight": w + 0}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path), "--gpu", "NVIDIA H200"]) == 0
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line for line in printed.splitlines()}
    assert lines["a.weight"].endswith(f"{made.nbytes / 1e3:.2f} kB ({made.listed / w.numel():.4%})")
    assert lines["b.weight"].endswith(" -")
    assert not lines["embed.weight"].endswith("%)")
    assert "as tile" not in printed  # nothing has zeros
    dense = f"{(w.nbytes + spread.nbytes) / 1e3:.2f} kB"
    assert f'of {dense}: sparsify_(values="raw") {dense}, sparsify_ {dense}, compress_ {dense}.' in lines["in"]
    save_file({"a.weight": w.half()}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path), "--gpu", "NVIDIA H200"]) == 0
    assert f"{made.nbytes / 1e3:.2f} kB" in capsys.readouterr().out
    save_file({"a.weight": w.half() * 1.01}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path), "--gpu", "NVIDIA H200"]) == 0
    assert "dense12" not in capsys.readouterr().out


def test_inspect_says_what_each_way_to_hold_weights_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("macko.measure.inspect.DENSE12_WEIGHTS", 256 * 512)
    torch.manual_seed(0)
    full, half = (torch.randn(256, 512).bfloat16() for _ in range(2))
    half = torch.where(half.abs() > 0.6745, half, 0)
    spread = torch.where(half != 0, 4.0 ** torch.randint(-60, 60, half.shape), 0).bfloat16()
    tensors = {"a": full, "b": half, "c": spread, "lm_head": half + 0, "small": half[:64].clone(), "embed": full + 0}
    save_file({f"{name}.weight": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path), "--gpu", "NVIDIA H200"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    long = Dense12Weight.from_dense(full).nbytes
    short, raw = (kind.from_dense(half).nbytes for kind in (Sparse11Weight, TileWeight))
    small = Sparse11Weight.from_dense(half[:64]).nbytes
    small_raw = TileWeight.from_dense(half[:64]).nbytes
    assert f" {raw / 1e3:.2f} kB {short / 1e3:.2f} kB (0.0000%)" in " ".join(lines["b.weight"].split())
    outside = lines["c.weight"].split("- (")[1].split("%")[0]
    assert 90 < float(outside) < 97  # 120 exponents, of which seven are held
    spread_raw = TileWeight.from_dense(spread).nbytes
    dense = sum(t.nbytes for name, t in tensors.items() if name != "embed")
    left = full.nbytes + half.nbytes
    by_way = (
        left + raw + spread_raw + small_raw,
        left + short + spread_raw + small,
        long + 2 * short + spread_raw + small,
    )
    texts = [f"{size / 1e3:.2f} kB" if size < 1e6 else f"{size / 1e6:.2f} MB" for size in (dense, *by_way)]
    assert 'of {}: sparsify_(values="raw") {}, sparsify_ {}, compress_ {}.'.format(*texts) in lines["in"]


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_what_inspect_counts_is_what_formats_list(dtype: torch.dtype) -> None:
    """outside_table against what packing says, of zeros of both signs, denormals, Inf, NaN and lower bits."""
    w = Dense12(dtype, 0).source(200, 300, rare=0.004)
    w[:, ::3], w[0, :4] = 0, bits_of(0x8000, 0x7F80, 0xFFC1, 0x0001).to(dtype)
    assert outside_table(w, signed=False) == (Dense12Weight.from_dense(w).listed, w.numel())
    made = Sparse11Weight.from_dense(w)
    assert outside_table(w, signed=True) == (made.listed, made.entries)
    assert outside_table(w[:0], signed=True) == (0, 0)
