"""Files: bit-equal round trips without a dense weight, ties kept, and nothing in a file believed."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import macko
from macko import weights
from macko.files import VERSION, Checkpoint
from tests.common import assert_same_bits, assert_same_model, device_dtypes, random_weight


class Model(nn.Module):
    """What a file can get wrong: a bias and none, tied and shared layers, buffers, an empty and a full row."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 40, dtype=dtype)
        self.up = nn.Linear(40, 72, dtype=dtype)
        self.down = nn.Linear(72, 40, bias=False, dtype=dtype)
        self.again = self.down
        self.norm = nn.LayerNorm(40, dtype=dtype)
        self.head = nn.Linear(40, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.norm(self.again(self.down(self.up(x)).repeat(1, 2)[:, :72].relu())))


def sparse_model(dtype: torch.dtype = torch.bfloat16) -> Model:
    model = Model(dtype).requires_grad_(False)
    model.up.weight.copy_(random_weight(72, 40, 0.4, dtype, kind="uneven_both"))
    model.up.weight[3], model.up.weight[71] = 0, 1
    model.down.weight.copy_(random_weight(40, 72, 0.1, dtype))
    report = macko.sparsify_(model)
    assert [row.name for row in report.changed] == ["up", "down"]
    return model


class Siblings(nn.Module):
    """Layers that merge, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(64, 64, bias=name == "o_proj", dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x) + self.k_proj(x) + self.v_proj(x))


def siblings(density: float, format: str) -> Siblings:
    torch.manual_seed(0)
    model = Siblings().requires_grad_(False)
    macko.prune_(model, 1 - density)
    assert len(macko.sparsify_(model, format=format).changed) == 4
    return model


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


@pytest.mark.parametrize("start", [Model, on_meta, sparse_model])
def test_round_trip(tmp_path: Path, start: Callable[[], nn.Module]) -> None:
    model = sparse_model()
    macko.save_model(model, tmp_path / "folder" / "model.safetensors")
    loaded = macko.load_model(start(), tmp_path / "folder" / "model.safetensors")
    assert_same_model(loaded, model)
    assert isinstance(loaded.up, macko.SparseLinear)
    assert loaded.again is loaded.down
    assert loaded.head.weight is loaded.embed.weight
    assert type(loaded.up.bias) is nn.Parameter
    tokens = torch.arange(5)
    if start is not on_meta:  # there the buffer that is not saved has no content
        assert_same_bits(loaded(tokens), model(tokens))


def test_a_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        macko.save_model(sparse_model(), tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640


def test_hooks_of_a_dense_layer_go_with_the_packed_one(tmp_path: Path) -> None:
    macko.save_model(sparse_model(), tmp_path / "model.safetensors")
    model, seen = Model(), []
    hook = model.up.register_forward_hook(lambda *_: seen.append(1))
    macko.load_model(model, tmp_path / "model.safetensors")(torch.arange(5))
    assert len(seen) == 1
    hook.remove()
    model(torch.arange(5))
    assert len(seen) == 1


@pytest.mark.parametrize(("device", "dtype"), device_dtypes())
def test_every_dtype_on_every_device(tmp_path: Path, device: str, dtype: torch.dtype) -> None:
    model = sparse_model(dtype).to(device)
    macko.save_model(model, tmp_path / "model.safetensors")
    for loaded in (
        macko.load_model(Model(dtype).to(device), tmp_path / "model.safetensors"),
        macko.load_model(on_meta(), tmp_path / "model.safetensors", device=device),
    ):
        assert_same_model(loaded, model)
        assert loaded.up.device.type == device


def test_a_model_keeps_its_dtype(tmp_path: Path) -> None:
    macko.save_model(sparse_model(torch.float32), tmp_path / "model.safetensors")
    loaded = macko.load_model(Model(torch.bfloat16), tmp_path / "model.safetensors")
    assert {loaded.up.dtype, loaded.embed.weight.dtype} == {torch.bfloat16}
    assert_same_bits(loaded.up.weight, sparse_model(torch.float32).up.weight.bfloat16())


def test_a_model_that_is_one_layer(tmp_path: Path) -> None:
    layer = macko.SparseLinear.from_linear(nn.Linear(8, 4))
    macko.save_model(layer, tmp_path / "layer.safetensors")
    loaded = macko.load_model(nn.Linear(8, 4), tmp_path / "layer.safetensors")
    assert_same_model(loaded, layer)


def test_no_dense_weight_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sparse_model()
    for name in ("from_dense", "to_dense"):
        monkeypatch.setattr(weights.MackoWeight, name, lambda *_, **__: pytest.fail("made a dense weight"))
    macko.save_model(model, tmp_path / "model.safetensors")
    assert_same_model(macko.load_model(on_meta(), tmp_path / "model.safetensors"), model)


def test_what_the_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    macko.save_model(sparse_model(), path)
    with safe_open(path, framework="pt") as file:
        names, about = set(file.keys()), json.loads(file.metadata()["macko"])
    assert about["version"] == 1
    assert about["layers"]["up"] == {"format": "macko", "rows": 72, "cols": 40, "delta_bits": 4}
    assert {name for name in names if name.startswith("up.")} == {
        "up.values", "up.deltas", "up.row_ptr", "up.bias", "up.weight"
    }  # fmt: skip
    assert about["shared"] == {
        "again.values": "down.values", "again.deltas": "down.deltas", "again.row_ptr": "down.row_ptr",
        "head.weight": "embed.weight",
    }  # fmt: skip
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    model = sparse_model()
    macko.save_model(model, path)
    before = path.read_bytes()

    def fail(tensors: Any, name: Any, metadata: Any = None) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("macko.files.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        macko.save_model(model, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_overwriting_the_file_that_was_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = sparse_model()
    macko.save_model(model, path)
    loaded = macko.load_model(on_meta(), path)  # its tensors may be the file's own pages
    macko.save_model(sparse_model(torch.float16), path)
    assert_same_model(loaded, model)


def test_a_layer_at_two_places_is_saved_once(tmp_path: Path) -> None:
    layer = macko.SparseLinear.from_linear(nn.Linear(256, 64, bias=False), "bitmap")
    macko.save_model(nn.Sequential(layer, nn.ReLU()), tmp_path / "once")
    macko.save_model(nn.ModuleList([layer, layer]), tmp_path / "twice")
    once, twice = ((tmp_path / name).stat().st_size for name in ("once", "twice"))
    assert twice < once + 1000
    dense = layer.to_linear()
    loaded = macko.load_model(nn.ModuleList([dense, dense]), tmp_path / "twice")
    assert loaded[0] is loaded[1]
    assert_same_bits(loaded[0].weight, layer.weight)


def test_overlapping_views_are_saved_apart(tmp_path: Path) -> None:
    model = nn.Module()
    whole = torch.arange(10.0)
    for name, view in (("whole", whole), ("part", whole[2:5]), ("turned", whole.view(2, 5).t())):
        model.register_buffer(name, view)
    macko.save_model(model, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert {name: t.tolist() for name, t in loaded.items()} == {n: t.tolist() for n, t in model.named_buffers()}


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def get_extra_state(self) -> Any:
            return {"any": "thing"}

    with pytest.raises(TypeError, match="_extra_state is a dict"):
        macko.save_model(Odd(), tmp_path / "model.safetensors")


LAYOUTS = [
    pytest.param(name, kind.device_types[0], marks=[pytest.mark.gpu] if kind.device_types == ("cuda",) else [])
    for name, kind in weights.FORMATS.items()
    if kind.is_layout
]


@pytest.mark.parametrize(("format", "device"), LAYOUTS)
def test_execution_layouts_are_not_saved(tmp_path: Path, format: str, device: str) -> None:
    model = sparse_model().to(device)
    canonical = copy.deepcopy(model)
    for layer in (model.up, model.down):
        layer.reformat_(format)  # type: ignore[operator]
    assert {model.up.format, model.again.format} == {format}
    macko.save_model(model, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["macko"])["layers"]["up"]["format"] == "macko"
    loaded = macko.load_model(on_meta(), tmp_path / "model.safetensors", device=device)
    assert_same_model(loaded, canonical)
    for start, options in ((on_meta(), {"device": device, "format": format}), (copy.deepcopy(model), {})):
        loaded = macko.load_model(start, tmp_path / "model.safetensors", **options)  # type: ignore[arg-type]
        assert loaded.up.format == format
        assert_same_model(loaded, canonical)


# ---- Untrusted files -------------------------------------------------------------------------------------------------


def damaged(path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> Path:
    """A file of the sparse model, with its tensors and metadata changed."""
    macko.save_model(sparse_model(), path)
    tensors = {name: t.clone() for name, t in load_file(path).items()}
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["macko"])
    change(tensors, about)
    save_file(tensors, path, metadata={"format": "pt", "macko": json.dumps(about)})
    return path


Damage = Callable[[dict[str, Tensor], dict[str, Any]], Any]


def put(name: str, index: int, value: int) -> Damage:
    return lambda tensors, about: tensors[name].__setitem__(index, value)


def of(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return lambda tensors, about: tensors.update({f"up.{name}": change(tensors[f"up.{name}"])})


def says(**sizes: Any) -> Damage:
    return lambda tensors, about: about["layers"]["up"].update(sizes)


DAMAGE: dict[str, Damage] = {
    "row_ptr falls": put("up.row_ptr", 5, 0),
    "a column past the end": put("up.deltas", 0, 0xFF),
    "values cut": of("values", lambda t: t[:-8]),
    "deltas cut": of("deltas", lambda t: t[:4]),
    "no rows": of("row_ptr", lambda t: t[:0]),
    "values of another type": of("values", lambda t: t.view(torch.int16)),
    "deltas of another type": of("deltas", lambda t: t.view(torch.int8)),
    "row_ptr of another type": of("row_ptr", lambda t: t.float()),
    "two dimensions": of("values", lambda t: t.view(2, -1)),
    "no values": lambda tensors, about: tensors.pop("up.values"),
    "more columns": says(cols=41),
    "fewer columns": says(cols=39),
    "huge columns": says(cols=2**62),
    "columns are text": says(cols="40"),
    "other delta bits": says(delta_bits=8),
    "impossible delta bits": says(delta_bits=3),
    "no columns": lambda tensors, about: about["layers"]["up"].pop("cols"),
    "an unknown size": says(elves=3),
    "an unknown format": says(format="elves"),
    "no format": lambda tensors, about: about["layers"]["up"].pop("format"),
    "no sizes at all": lambda tensors, about: about["layers"].update(up="macko"),
    "format is a list": says(format=["macko"]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_layer_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = damaged(tmp_path / "model.safetensors", DAMAGE[name])
    for start in (Model, on_meta):
        with pytest.raises(ValueError, match=r"\bup\b"):
            macko.load_model(start(), path)
    if name != "more columns":  # and without a model
        with pytest.raises(ValueError, match=r"\bup\b"), Checkpoint(path) as file:
            file.packed("up")


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{", '{"version": 1, "layers": []}', '{"version": 1, "shared": {"a": 3}}']
)
def test_damaged_metadata_is_refused_with_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1)}, path, metadata={"macko": text})
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        Checkpoint(path)


@pytest.mark.parametrize("shape", [[0, 2**63], [2**64 - 1, 0], [0, 2, 2**63 - 1]])
def test_a_size_that_no_tensor_has_is_refused_with_the_file(tmp_path: Path, shape: list[int]) -> None:
    """Of a tensor without elements the header may say any."""
    path = tmp_path / "model.safetensors"
    header = json.dumps({"a": {"dtype": "F16", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with Checkpoint(path) as file, pytest.raises(ValueError, match=r"^\S*model\.safetensors: [^\n]*verflow[^\n]*$"):
        file["a"]


@pytest.mark.parametrize("version", [VERSION + 1, 10**9, 0, -1, None, "1", 1.0, True])
def test_an_unknown_version_is_refused(tmp_path: Path, version: Any) -> None:
    path = damaged(tmp_path / "model.safetensors", lambda tensors, about: about.update(version=version))
    wanted = "install a newer one" if isinstance(version, int) and version > VERSION else "expected a whole number"
    with pytest.raises(ValueError, match=wanted):
        macko.load_model(Model(), path)


def test_foreign_metadata_is_let_be(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    macko.save_model(sparse_model(), path)
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), "somebody": "else"}
    about = {**json.loads(metadata["macko"]), "note": "of mine"}
    save_file(load_file(path), path, metadata={**metadata, "macko": json.dumps(about)})
    assert_same_model(macko.load_model(Model(), path), macko.load_model(on_meta(), path))


def test_a_weight_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    model = sparse_model()
    path = damaged(tmp_path / "file", lambda tensors, about: tensors.update({"up.weight": model.up.weight + 0}))
    with pytest.raises(ValueError, match="up: the state has a dense weight, and this layer is sparse"):
        macko.load_model(sparse_model(), path)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    macko.save_model(sparse_model(), path)
    for name, module, message in (
        ("up", nn.Identity(), "a packed layer up, in the model it is a Identity"),
        ("up", nn.Linear(40, 73), r"up: size mismatch: the state has shape \[72, 40\], the layer \[73, 40\]"),
        ("extra", nn.Linear(3, 3), r"extra\.weight"),
    ):
        other = Model()
        setattr(other, name, module)
        with pytest.raises(ValueError, match=message):
            macko.load_model(other, path)
    other = Model()
    del other.up
    with pytest.raises(ValueError, match="a packed layer up, the model has no such module"):
        macko.load_model(other, path)
    with pytest.raises(ValueError, match="a packed layer up, which the model cannot hold: it is float64; macko holds"):
        macko.load_model(Model().double(), path)  # as float32 on a GPU


def test_a_format_that_does_not_run_there_is_refused_by_layer(tmp_path: Path) -> None:
    macko.save_model(sparse_model(), tmp_path / "model")
    with pytest.raises(ValueError, match="model: up: format sell runs on cuda only, the weight is on cpu"):
        macko.load_model(sparse_model(), tmp_path / "model", format="sell")


def test_a_dense_file_loads_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    assert_same_model(macko.load_model(nn.Sequential(nn.Linear(3, 3)), tmp_path / "model.safetensors"), model)


def test_an_index_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    macko.save_model(sparse_model(), tmp_path / "model.safetensors")
    (tmp_path / "folder").mkdir()
    index = {"weight_map": {"up.values": "../model.safetensors"}}
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError):
        Checkpoint(tmp_path / "folder")


# ---- torch.distributed.checkpoint ------------------------------------------------------------------------------------


def checkpoint(model: nn.Module, folder: Path) -> None:
    dcp.save(get_model_state_dict(model), checkpoint_id=folder, no_dist=True)


FORMATS_HELD = ["auto", "macko", "ec"]


@pytest.mark.parametrize("format", FORMATS_HELD)
@pytest.mark.parametrize("merge", [False, True])
def test_a_distributed_checkpoint_into_a_model_of_the_same_sizes(tmp_path: Path, format: str, merge: bool) -> None:
    model, fresh = siblings(0.4, format), siblings(0.4, format)
    with torch.no_grad():
        for name, buffer in fresh.named_buffers():
            if name.endswith("values"):
                buffer.mul_(2)
        fresh.o_proj.bias.zero_()
    if merge:
        macko.merge_(model)
    checkpoint(model, tmp_path)
    state = get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_model_state_dict(fresh, state)
    assert_same_model(fresh, model)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert_same_bits(fresh(x), model(x))


@pytest.mark.parametrize("format", FORMATS_HELD)
def test_a_distributed_checkpoint_into_a_model_of_other_sizes(tmp_path: Path, format: str) -> None:
    model, fresh = siblings(0.4, format), siblings(0.7, "auto")
    checkpoint(model, tmp_path)
    reader = dcp.FileSystemReader(tmp_path)
    state = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    set_model_state_dict(fresh, state)
    assert_same_model(fresh, model)
    full, another = StateDictOptions(full_state_dict=True), siblings(0.7, "auto")
    set_model_state_dict(another, get_model_state_dict(model, options=full), options=full)
    assert_same_model(another, model)
