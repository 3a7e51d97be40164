"""Planes, as files hold dense12: every bit, cut and checked; files, folders and engines that read them."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import macko
from macko import SparseLinear, _library
from macko.choose.options import Options
from macko.cli import main
from macko.files import FolderWriter
from macko.integrations.stacked import Share
from macko.weights import FORMATS, SAVED, Dense12Weight, Planes12Weight, saved_as
from tests.common import assert_same_bits, edited
from tests.reference import planes12_to_dense
from tests.test_stacked import stack_of
from tests.tiny_llama import small_llama

DTYPES = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def trained(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16, spread: float = 0.5) -> Tensor:
    """Scales that differ by row and column: some in a thousand are listed. NaN, -Inf and -0.0 are among them."""
    w = (
        torch.randn(rows, cols)
        * torch.exp(spread * torch.randn(rows, 1))
        * torch.exp(0.3 * torch.randn(1, cols))
        * 0.02
    )
    w = w.bfloat16().to(dtype)
    for place, value in enumerate((float("nan"), -float("inf"), -0.0)):
        if place < w.numel():
            w.view(-1)[place * 7 % w.numel()] = value
    return w


def assert_holds(packed: Planes12Weight, w: Tensor) -> None:
    packed.validate()
    for dense in (packed.to_dense(), planes12_to_dense(packed)):
        assert_same_bits(dense, w)


# ---- Bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["scalar", "avx2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_of_16_bits(dtype: torch.dtype, path: str) -> None:
    if path == "avx2" and _library.cpu_path == "scalar":
        pytest.skip("no AVX2")
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    with _library.plan(f"cpu={path}"):
        for shape in ((256, 256), (1 << 16, 1), (1, 1 << 16)):
            w = every[torch.randperm(1 << 16)].view(shape)
            packed = Planes12Weight.from_dense(w)
            assert packed.listed > 1 << 14
            assert_same_bits(packed.to_dense(), w)
            packed.validate()


@pytest.mark.parametrize("path", ["scalar", "avx2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_matrices_of_any_shape(dtype: torch.dtype, path: str) -> None:
    for rows, cols in ((0, 5), (5, 0), (1, 1), (3, 31), (2, 32), (7, 33), (64, 255), (5, 2113)):
        for spread in (0.0, 0.5, 4.0):
            w = trained(rows, cols, dtype, spread)
            with _library.plan(f"cpu={path}"):
                assert_holds(Planes12Weight.from_dense(w), w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_reads_the_same_bits(dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    shapes = ((0, 5), (5, 0), (1, 1), (3, 31), (7, 32), (7, 33), (64, 256), (65, 2120), (5, 2113))
    for w in (*(trained(*shape, dtype, 2.0) for shape in shapes), every.view(256, 256), every.view(1, -1)):
        packed = Planes12Weight.from_dense(w)
        there: Any = packed.to("cuda")
        there.validate()
        assert_same_bits(there.to_dense().cpu(), w)
        if w.numel() > 1 << 10:
            low = torch.empty(w.numel() + 1, dtype=torch.uint8, device="cuda")[1:].view(w.shape)  # aligned to a byte
            assert_same_bits(there.replace(low=low.copy_(there.low)).to_dense().cpu(), w)
    w = trained(300, 520, dtype)
    made = Planes12Weight.from_dense(w).materialized(torch.device("cuda"))
    assert_same_bits(made.data.cpu(), Dense12Weight.from_dense(w).data)


def test_vector_and_scalar_write_the_same_bytes() -> None:
    for dtype in DTYPES:
        w = trained(33, 4200, dtype)
        with _library.plan("cpu=scalar"):
            plain = Planes12Weight.from_dense(w)
        for name, tensor in Planes12Weight.from_dense(w).tensors().items():
            assert torch.equal(tensor, plain.tensors()[name]), name


@pytest.mark.parametrize("shape", [(300, 384), (64, 2432), (100, 101)])
def test_bytes_are_three_quarters_and_the_list(shape: tuple[int, int]) -> None:
    w = trained(*shape)
    packed = Planes12Weight.from_dense(w)
    cols = shape[1]
    share = packed.listed / w.numel()
    padding = 0.25 / cols if cols % 2 else 0  # half a byte a row
    assert packed.nbytes / w.nbytes == pytest.approx(0.75 + 3 * share + 2 / cols + padding + 12 / w.nbytes)


def test_the_table_and_the_list_are_those_of_dense12() -> None:
    for dtype in DTYPES:
        w = trained(130, 520, dtype)
        planes, slabs = Planes12Weight.from_dense(w), FORMATS["dense12"].from_dense(w)
        sizes = slabs.sizes()
        table = sizes["table_low"].to_bytes(4, "little") + sizes["table_high"].to_bytes(4, "little")
        assert bytes(planes.table.tolist()) == table
        assert planes.listed == sizes["listed"]
        assert planes.is_held_packed(True)
        assert not planes.is_held_packed(False)


def test_a_slab_that_is_too_full_is_held_dense() -> None:
    w, rare = torch.randn(640, 2560).bfloat16(), 2.0 ** torch.randint(-100, 100, (64, 256))
    w[:64, :256] = torch.where(torch.rand(64, 256) < 0.15, rare.bfloat16(), w[:64, :256])
    planes = Planes12Weight.from_dense(w)
    assert planes.listed < w.numel() // 100
    with pytest.raises(ValueError, match="the table of dense12"):
        FORMATS["dense12"].from_dense(w)
    assert not planes.is_held_packed(True)


# ---- Rows and columns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cols", [64, 65])
def test_cuts_are_the_dense_cuts(cols: int) -> None:
    for dtype in DTYPES:
        w = trained(20, cols, dtype, 1.0)
        packed = Planes12Weight.from_dense(w)
        for start, stop in ((0, 20), (0, 7), (7, 20), (5, 5), (3, 4)):
            assert_holds(packed.cut(0, start, stop), w[start:stop])
            assert_holds(packed.cut(1, start, stop), w[:, start:stop])
        assert_holds(packed.cut(1, 33, cols), w[:, 33:])
        assert_holds(packed.cut(1, 32, cols).cut(0, 9, 12), w[9:12, 32:])


# ---- What no packing makes -------------------------------------------------------------------------------------------


def faulty() -> list[tuple[str, Planes12Weight]]:
    torch.manual_seed(0)
    w = trained(9, 65, spread=2.0)
    w[3:5, 10:20] = float("inf")
    packed = Planes12Weight.from_dense(w)
    row = int(packed._listed_rows()[0])
    col = int(packed.columns[0])
    held = next(c for c in range(65) if c not in packed.columns[packed._listed_rows() == row].tolist())

    def changed(name: str, *index: int, to: int) -> Planes12Weight:
        tensor = packed.tensors()[name].clone()
        tensor[index] = to
        return packed.replace(**{name: tensor})

    pair = int(packed.high[row, col // 2])
    return [
        ("byte 0 of its table", changed("table", 0, to=3)),
        ("byte 2 of its table", changed("table", 2, to=int(packed.table[1]))),
        ("byte 7 of its table", changed("table", 7, to=128)),
        (r"row_ptr\[0\] is 1", changed("row_ptr", 0, to=1)),
        (r"row_ptr\[9\] is", changed("row_ptr", 9, to=packed.listed - 1)),
        (r"row_ptr\[1\] is -1", changed("row_ptr", 1, to=-1)),
        ("outside of the matrix", changed("columns", 0, to=65)),
        ("outside of the matrix", changed("columns", 0, to=-1)),
        ("has a code, or stands", changed("values", 0, to=int(w[row, held : held + 1].view(torch.int16)))),
        ("has a code, or stands", changed("low", row, col, to=1)),
        ("has a code, or stands", changed("high", row, col // 2, to=pair | (128 if col % 2 else 8))),
        ("nibble after its last column is 3", changed("high", 2, 32, to=int(packed.high[2, 32]) | 48)),
        ("low has shape", packed.replace(low=packed.low[:-1])),
        ("high has shape", packed.replace(high=packed.high[:, :-1])),
        ("table has 7 bytes", packed.replace(table=packed.table[:7])),
        ("row_ptr has 9 entries", packed.replace(row_ptr=packed.row_ptr[:9])),
        ("values has", packed.replace(values=packed.values[:-1])),
        ("low has dtype int8", packed.replace(low=packed.low.view(torch.int8))),
        ("source is 2", packed.replace(source=2)),
    ]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", range(19))
def test_each_fault_is_named(case: int, device: str) -> None:
    message, packed = faulty()[case]
    packed = packed.replace(**{name: tensor.to(device) for name, tensor in packed.tensors().items()})
    with pytest.raises(ValueError, match=f"not a planes12 weight: .*{message}"):
        packed.validate()
    if message in ("outside of the matrix", r"row_ptr\[1\] is -1"):
        with pytest.raises(RuntimeError, match=r"row_ptr|columns"):  # and nothing is written elsewhere
            packed.to_dense()


def test_a_column_twice_in_a_row_is_named() -> None:
    w = 4.0 ** (torch.arange(64) % 7)[None].bfloat16()
    w[0, 3], w[0, 4] = float("inf"), float("nan")
    packed = Planes12Weight.from_dense(w)
    columns = packed.columns.clone()
    columns[columns.tolist().index(4)] = 3
    with pytest.raises(ValueError, match="is not after the one before it"):
        packed.replace(columns=columns).validate()


def test_what_files_say_of_it_is_checked() -> None:
    about = Planes12Weight.from_dense(trained(3, 4)).about()
    assert about == {"format": "planes12", "rows": 3, "cols": 4, "dtype": "bfloat16"}
    kind, sizes, _ = saved_as(about)
    assert (kind, sizes) == (Planes12Weight, {"rows": 3, "cols": 4, "source": 1})
    for other in ({"dtype": "float32"}, {"dtype": 1}, {"dtype": None}, {"rows": -1}, {"more": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(other))}|integers"):
            saved_as(about | other)
    with pytest.raises(ValueError, match="holds bfloat16 and float16, the weight is float32"):
        Planes12Weight.from_dense(torch.ones(2, 2))


# ---- Files -----------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 512)
        self.down = nn.Linear(512, 256, bias=False)


def models() -> tuple[Mlp, Mlp]:
    """A dense model and the same one in dense12."""
    dense, packed = Mlp().bfloat16(), Mlp().bfloat16()
    packed.load_state_dict(dense.state_dict())
    macko.sparsify_(packed, format="dense12", ignore=(), progress=False)
    assert all(isinstance(layer, SparseLinear) for layer in packed.children())
    return dense, packed


def test_a_saved_model_is_smaller_and_the_same(tmp_path: Path) -> None:
    dense, packed = models()
    file = tmp_path / "model.safetensors"
    macko.save_model(packed, file)
    assert file.stat().st_size < 0.77 * sum(p.nbytes for p in dense.parameters())
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["macko"])
        assert about["version"] == 2
        assert {layer["format"] for layer in about["layers"].values()} == {"planes12"}
        kinds = {opened.get_tensor(name).dtype for name in opened.keys() if "weight" not in name}  # noqa: SIM118
        assert kinds == {torch.uint8, torch.int16, torch.int32, torch.bfloat16}  # the last of the bias
    with torch.device("meta"):
        on_meta = Mlp()
    models_: list[nn.Module] = [Mlp().bfloat16(), on_meta]
    for model in models_:
        loaded: Any = macko.load_model(model, file)
        assert type(loaded.up) is nn.Linear
        assert loaded.up.weight.requires_grad
        assert_same_bits(loaded.up.weight, dense.up.weight)
        assert_same_bits(loaded.down.weight, dense.down.weight)
    models_ = [models()[1], macko.load_model(Mlp().bfloat16(), file, format="dense12")]
    for model in models_:
        again: Any = macko.load_model(model, file)
        assert again.up.format == "dense12"
        assert_same_bits(again.up.weight, dense.up.weight)


def test_who_knows_nothing_of_macko_stops(tmp_path: Path) -> None:
    dense, packed = models()
    macko.save_model(packed, tmp_path / "a.safetensors")
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        dense.load_state_dict(load_file(tmp_path / "a.safetensors"), strict=False)


def test_files_of_other_layers_stay_of_version_1(tmp_path: Path) -> None:
    model = Mlp().bfloat16()
    model.up.weight.data[:, ::2] = 0
    macko.sparsify_(model, format="macko", progress=False, min_sparsity=0.3)
    macko.save_model(model, tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as opened:
        assert json.loads(opened.metadata()["macko"])["version"] == 1


def test_where_slabs_gain_the_layer_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on such a GPU."""
    dense, packed = models()
    macko.save_model(packed, tmp_path / "a.safetensors")
    monkeypatch.setattr("macko.choose.auto.is_held_packed", lambda weight, device: weight.is_held_packed(True))
    loaded: Any = macko.load_model(Mlp().bfloat16(), tmp_path / "a.safetensors")
    assert loaded.up.format == loaded.down.format == "dense12"
    assert_same_bits(loaded.down.weight, dense.down.weight)


def test_a_damaged_list_names_the_layer(tmp_path: Path) -> None:
    _, packed = models()
    file = tmp_path / "a.safetensors"
    macko.save_model(packed, file)
    with edited(file) as tensors:
        tensors["down.columns"] += 600
    for options in ({}, {"format": "dense12"}):
        with pytest.raises(ValueError, match=r"down.*not a planes12 weight"):
            macko.load_model(Mlp().bfloat16(), file, **options)


# ---- Folders ---------------------------------------------------------------------------------------------------------


def save_tiny(folder: Path, shard: str) -> None:
    """A dense model whose files have so many bytes at most."""
    model = small_llama(vocab_size=300, hidden_size=256, intermediate_size=512, num_key_value_heads=4)
    model.save_pretrained(folder, max_shard_size=shard)


def weights_in(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_same_folders(one: Path, other: Path) -> None:
    before, after = weights_in(one), weights_in(other)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert_same_bits(after[name], tensor)
    assert json.loads((one / "config.json").read_text()) == json.loads((other / "config.json").read_text())


@pytest.mark.parametrize("shard", ["1GB", "300KB"])
def test_convert_and_back_gives_the_original_files(
    tmp_path: Path, shard: str, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    save_tiny(tmp_path / "in", shard)
    packed, back = str(tmp_path / "packed"), str(tmp_path / "back")
    assert main(["convert", str(tmp_path / "in"), packed, "--format", "dense12"]) == 0
    assert "in 12 bits a weight, every bit of it" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(packed)
    for name, tensor in weights_in(tmp_path / "in").items():
        assert_same_bits(model.get_parameter(name), tensor)
    assert not any(isinstance(module, SparseLinear) for module in model.modules())
    assert main(["convert", packed, back, "--to", "dense"]) == 0
    assert "each with the checksum" in capsys.readouterr().out
    assert_same_folders(tmp_path / "in", Path(back))


#: Converts and back, and what is sparse, once to load what it needs; prints the megabytes that each then takes more.
PEAKS = """
import gc, sys, threading, time
from macko.cli import main

def resident():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) / 1024

def peak(*arguments):
    gc.collect()
    done, sizes = threading.Event(), [resident()]
    def watch():
        while not done.wait(0.0005):
            sizes.append(resident())
    watcher = threading.Thread(target=watch)
    watcher.start()
    assert main(["convert", *arguments, "--overwrite"]) == 0
    done.set()
    watcher.join()
    return max(sizes) - sizes[0]

for _ in range(2):
    dense, packed, back, sparse = sys.argv[1:]
    peaks = [peak(dense, packed, "--format", "dense12"), peak(packed, back, "--to", "dense"), peak(sparse, packed)]
print(*peaks)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read in /proc")
def test_convert_holds_one_layer_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_key_value_heads": 4}
    model = small_llama(**sizes)
    model.save_pretrained(tmp_path / "in")
    macko.prune_(model, 0.5, progress=False)
    model.save_pretrained(tmp_path / "sparse")
    (whole,) = (tmp_path / "in").glob("*.safetensors")
    layer = 512 * 2048 * 2 / 2**20
    assert whole.stat().st_size / 2**20 > 20 * layer
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes
    folders = [str(tmp_path / name) for name in ("in", "packed", "back", "sparse")]
    printed = subprocess.run(
        [sys.executable, "-c", PEAKS, *folders], env=environment, capture_output=True, text=True, check=True
    )
    packing, unpacking, sparse = map(float, printed.stdout.split()[-3:])
    assert packing < 0.75 * layer + 4  # its planes, while they are made, and the interpreter's own
    assert unpacking < layer + 4
    assert sparse < 2 * layer + 4  # as it is held here, and as in files


def test_a_file_is_aligned_and_none_where_nothing_comes(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8), "half": torch.arange(5).half(), "empty": torch.empty(0, 4),
        "even": torch.arange(12.0).view(3, 4), "int": torch.arange(7, dtype=torch.int32), "one": torch.tensor(2.0),
        "true": torch.tensor([True, False]), "t": torch.arange(8.0).view(2, 4).t(),
        "scales": torch.arange(9, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }  # fmt: skip
    writer = FolderWriter(tmp_path)
    writer.add("some.safetensors", tensors.items(), tensors, {"even": 7})
    writer.add("none.safetensors", [], ["odd"])
    assert [file.name for file in tmp_path.iterdir()] == ["some.safetensors"]
    assert writer.size == sum(tensor.nbytes for tensor in tensors.values())
    with safe_open(tmp_path / "some.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "crc32": '{"even": 7}'}
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            assert torch.equal(read.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
            assert read.shape == tensor.shape
            assert read.dtype == tensor.dtype
            assert read.data_ptr() % tensor.element_size() == 0
    with pytest.raises(ValueError, match=r"c is torch.complex128, which macko does not write"):
        writer.add("no.safetensors", [("c", torch.zeros(2, dtype=torch.complex128))], ["c"])
    with pytest.raises(ValueError, match=r"much.safetensors: its header may take 100,\d+,\d+ bytes, of at most"):
        writer.add("much.safetensors", [], ["x" * 50_000_000])


def test_other_bits_than_were_packed_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    save_tiny(tmp_path / "in", "1GB")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "packed"), "--format", "dense12"]) == 0
    with edited(tmp_path / "packed/model.safetensors") as tensors:
        low = next(tensor for name, tensor in tensors.items() if name.endswith("up_proj.low"))
        held = (low != 0).nonzero()[0]
        low[held[0], held[1]] ^= 1
    assert main(["convert", str(tmp_path / "packed"), str(tmp_path / "back"), "--to", "dense"]) == 1
    assert "up_proj is not the weight that was packed" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_to_dense_wants_a_packed_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    save_tiny(tmp_path / "in", "1GB")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "dense"]) == 1
    assert "has no layer that macko packed" in capsys.readouterr().err


def test_a_packed_model_saves_as_planes_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    save_tiny(tmp_path / "in", "1GB")
    config = macko.MackoConfig(format="dense12", ignore=[])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", quantization_config=config)
    model.save_pretrained(tmp_path / "out", max_shard_size="300KB")
    about = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert about["version"] == 2
    assert {layer["format"] for layer in about["layers"].values()} == {"planes12"}
    before = weights_in(tmp_path / "in")
    on = "macko.integrations.transformers.is_held_packed"
    for packs in (False, True):
        monkeypatch.setattr(on, lambda weight, device, packs=packs: weight.is_held_packed(packs))
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert again.lm_head.__class__ is (SparseLinear if packs else nn.Linear)
        for name, tensor in again.state_dict().items():
            assert_same_bits(tensor, before[name])
        again.save_pretrained(tmp_path / f"again{packs}")
        kept = json.loads((tmp_path / f"again{packs}/config.json").read_text())
        assert ("quantization_config" in kept) == packs


# ---- Engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packs", [False, True])
def test_a_rank_gets_its_rows_and_columns(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = trained(128, 96), trained(64, 96)
    monkeypatch.setattr(
        "macko.integrations.stacked.is_held_packed", lambda weight, device: weight.is_held_packed(packs)
    )
    share = Share((64, 32), 96, rank=1, ranks=2)
    made = stack_of(Planes12Weight.from_dense(q), Planes12Weight.from_dense(k)).pack(
        share, torch.bfloat16, CPU, Options()
    )
    assert isinstance(made, FORMATS["dense12"] if packs else Tensor)
    dense = made if isinstance(made, Tensor) else made.to_dense()
    assert_same_bits(dense, torch.cat([q[64:], k[32:]]))
    share = Share((128,), 48, rank=1, ranks=2)
    made = stack_of(Planes12Weight.from_dense(q)).pack(share, torch.bfloat16, CPU, Options())
    dense = made if isinstance(made, Tensor) else made.to_dense()
    assert_same_bits(dense, q[:, 48:])


def test_it_is_no_format_of_layers() -> None:
    assert SAVED["planes12"] is Planes12Weight
    assert "planes12" not in FORMATS
    assert [field.name for field in dataclasses.fields(Planes12Weight)] == [
        *Planes12Weight.tensor_names, *Planes12Weight.size_names
    ]  # fmt: skip
    with pytest.raises(ValueError, match="format is 'planes12', expected one of"):
        SparseLinear.from_linear(nn.Linear(64, 64).bfloat16(), "planes12")
