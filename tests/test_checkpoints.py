"""Checkpoints as people have them: sparse and of 8 bits, of 4 bits, of torch.save, in float32. Written here, tiny."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import macko
from macko.cli import main
from macko.files import Checkpoint
from macko.integrations.compressed_tensors import Masked, decode, is_quantised, quantised, sparsity_format
from macko.weights import Sparse8Weight
from macko.weights.slidesparse import Slid
from tests.common import as_8_bits, as_bitmask, assert_same_bits, compressed_config, edited, of_two_four
from tests.tiny_llama import small_llama

transformers = pytest.importorskip("transformers")

FP8, PT = torch.float8_e4m3fn, {"format": "pt"}
#: Of compressed-tensors: whether 2:4, the kind of codes (None: 16 bits), how many scales.
KINDS = {
    "2of4-fp8-channel": (True, "float", "channel"),
    "2of4-fp8-tensor": (True, "float", "tensor"),
    "2of4-int8-channel": (True, "int", "channel"),
    "bitmask-int8-channel": (False, "int", "channel"),
    "2of4-bf16": (True, None, ""),
    "bitmask-bf16": (False, None, ""),
}


def llama(dtype: torch.dtype = torch.bfloat16) -> Any:
    model = small_llama(dtype, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_key_value_heads=4)
    model.config.architectures = ["LlamaForCausalLM"]
    return model


def linears(model: Any) -> dict[str, Tensor]:
    found = {name: m.weight.detach() for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    return {name: weight for name, weight in found.items() if name != "lm_head"}


def write(path: Path, model: Any, tensors: dict[str, Tensor], about: dict[str, Any] | None = None) -> None:
    """A folder of the model, but of these tensors, and what its config says of them."""
    path.mkdir()
    model.config.save_pretrained(path)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", PT)
    if about:
        with edited(path / "config.json") as config:
            config["quantization_config"] = about


def folder_of(path: Path, kind: str) -> dict[str, tuple[Tensor, Tensor | None]]:
    """A folder of this kind; of each layer its codes, or weight, and scales. One has a row of zeros with scale 0."""
    two_four, codes_are, strategy = KINDS[kind]
    model = llama()
    tensors = model.state_dict()
    found: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name, w in linears(model).items():
        kept, values, scales = of_two_four(w) if two_four else torch.rand(w.shape) < 0.4, w, None
        if codes_are:
            most = w.float().abs().amax(1, keepdim=True) if strategy == "channel" else w.float().abs().max()[None]
            scales = tensors[f"{name}.weight_scale"] = (most / (448 if codes_are == "float" else 127.5)).bfloat16()
            ratio = w.float() / scales.float()
            values = ratio.to(FP8) if codes_are == "float" else ratio.round().clamp(-128, 127).to(torch.int8)
            if strategy == "channel" and name.endswith("up_proj"):
                scales[5] = 0
                values.view(torch.uint8)[5] = 0
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{key}": tensor for key, tensor in as_bitmask(values, two_four, kept).items()}
        found[name] = (torch.where(kept, values.float(), 0).to(values.dtype), scales)
    mask = "sparse-24-bitmask" if two_four else "sparse-bitmask"
    about = compressed_config(codes_are, mask, strategy=strategy) if codes_are else compressed_config(mask)
    write(path, model, tensors, about)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_checkpoints_keep_codes_scales_and_bits(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = folder_of(tmp_path / "in", kind)
    with Checkpoint(tmp_path / "in") as file:
        for name, (values, _) in found.items():
            assert torch.equal(Masked(file, name).to_dense().float(), values.float())
    assert main(["inspect", str(tmp_path / "in")]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "layers.0.mlp.up_proj" in line)
    assert ("sparse-24-bitmask" if KINDS[kind][0] else "sparse-bitmask") in line.split()
    if KINDS[kind][1] is None:
        with edited(tmp_path / "in/config.json") as config:
            del config["dtype"]  # it is that of the values
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, (values, scales) in found.items():
        layer = model.get_submodule(name)
        if scales is None:
            assert_same_bits(layer.weight.as_subclass(Tensor) + 0, values + 0)
            continue
        assert isinstance(layer.packed, Sparse8Weight)
        assert torch.equal(layer.packed.codes().float(), values.float())
        each = scales.float().expand(len(values), 1)
        assert torch.equal(layer.packed.scales, torch.where(each == 0, 1, each)[:, 0])
        wanted = (values.float() * each).bfloat16()
        assert_same_bits(layer.weight.as_subclass(Tensor) + 0, wanted + 0)


@pytest.mark.parametrize("shards", [1, 2])
def test_every_tensor_under_a_mask_as_before_release_0_9(
    shards: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NAME.weight.bitmask, of embeddings, norms and biases too, in one file or in two."""
    model = small_llama(attention_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            zeros = torch.rand_like(parameter) < (0.1 if "norm" in name else 0.6)
            parameter.normal_().masked_fill_(zeros, 0)
    old, sparse = tmp_path / "old", tmp_path / "sparse"
    model.save_pretrained(old)
    parts = [
        {f"{name}.{key}": part for key, part in as_bitmask(tensor).items()}
        for name, tensor in load_file(old / "model.safetensors").items()
    ]
    (old / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for i in range(shards):
        tensors = {name: tensor for some in parts[i::shards] for name, tensor in some.items()}
        file = "model.safetensors" if shards == 1 else f"model-{i}.safetensors"
        save_file(tensors, old / file, PT)
        places |= dict.fromkeys(tensors, file)
    if shards > 1:
        (old / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    with edited(old / "config.json") as config:
        config["quantization_config"] = {**compressed_config("sparse-bitmask"), "version": "0.8.1"}

    assert main(["inspect", str(old)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[1] for row in rows if row[0] == "model.layers.0.mlp.up_proj"] == ["104x48"]
    assert not [row for row in rows if "norm" in row[0] or "bias" in row[0]]
    assert main(["convert", str(old), str(sparse), "--device", "cpu"]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(sparse)
    assert sum(isinstance(module, macko.SparseLinear) for module in loaded.modules()) == 14
    loaded.dequantize()
    wanted = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert_same_bits(tensor, wanted.pop(name))
    assert not wanted


def folder_of_8_bits(path: Path, kind: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Codes and scales without a mask, of which some layers have zeros; those of each."""
    model = small_llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_key_value_heads=4)
    macko.prune_(model.model.layers[0].mlp, 0.5, progress=False)
    tensors, found = model.state_dict(), {}
    for name, w in linears(model).items():
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor for part, tensor in as_8_bits(w, kind).items()}
        plain = as_8_bits(w, kind.replace("packed", "int"))
        found[name] = plain["weight"], plain["weight_scale"].float().flatten()
    write(path, model, tensors, compressed_config(kind))
    return found


@pytest.mark.parametrize("kind", ["float", "int", "packed"])
def test_8_bits_of_compressed_tensors_keep_codes_and_scales(kind: str, tmp_path: Path) -> None:
    found = folder_of_8_bits(tmp_path / "in", kind)
    if kind == "int":  # whatever the only file is called, and whatever else lies beside it
        file = (tmp_path / "in/model.safetensors").rename(tmp_path / "in/model-00001-of-00001.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(file), file.name)}
        (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps(index))
        save_file({"of.weight": torch.zeros(2, 2)}, tmp_path / "in/consolidated.safetensors")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    formats = set()
    for name, (values, scales) in found.items():
        packed = model.get_submodule(name).packed
        formats.add(packed.format)
        assert_same_bits(torch.where(values.float() == 0, 0, packed.codes().float()), values.float() + 0)
        assert_same_bits(packed.scales, scales)
    assert formats == {"dense8", "sparse8"}
    assert main(["inspect", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("packed", {"weight_packed": torch.zeros(7, dtype=torch.int32)}, "layers.0.mlp.up_proj: too many indices"),
        ("packed", {"weight_shape": torch.empty(2**33, 0, dtype=torch.int64)}, "two whole numbers"),  # as a list 64 GB
        ("int", {"weight": torch.empty(2**33, 0).char(), "weight_scale": torch.ones(1)}, "layers.0.mlp.up_proj: "),
        ("int", {"weight_scale": None}, "layers.0.mlp.up_proj: it has 8 bits, and no weight_scale"),
        ("int", {"weight": None}, "layers.0.mlp.up_proj: it has weight_scale, and none of weight"),
        ("packed", {"weight_packed": None}, "layers.0.mlp.up_proj: it has weight_s"),
        ("int", {"weight_scale": -torch.ones(256, 1)}, "model.layers.0.mlp.up_proj: scales have numbers"),
        ("int", {"num_bits": 4}, "4 bits a weight in the format None"),
        ("int", {"strategy": "group"}, "weights of strategy 'group'"),
        ("int", {"symmetric": False}, "weights of symmetric False"),
        ("int", {"--values": "fp8"}, "is quantised already"),
    ],
)
def test_8_bits_that_lie_or_are_of_another_kind_are_told_in_one_line(
    kind: str, change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What tensors hold, what the config says of all of them, and an option."""
    folder_of_8_bits(tmp_path / "in", kind)
    with edited(tmp_path / "in/model.safetensors") as tensors, edited(tmp_path / "in/config.json") as config:
        for name, value in change.items():
            if isinstance(value, Tensor):
                tensors[f"model.layers.0.mlp.up_proj.{name}"] = value
            elif value is None:
                del tensors[f"model.layers.0.mlp.up_proj.{name}"]
            else:
                config["quantization_config"]["config_groups"]["group_0"]["weights"][name] = value
    options = [word for option in change.items() if "--" in option[0] for word in option]
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_codes_in_a_row_of_scale_0_are_zeros(tmp_path: Path) -> None:
    codes, scales = torch.tensor([[3, 0], [-4, 5]]).char(), torch.tensor([[0.0], [0.5]])
    save_file({"up.weight": codes, "up.weight_scale": scales}, tmp_path / "a.safetensors")
    with Checkpoint(tmp_path / "a.safetensors") as file:
        dense = quantised(file, "up", torch.bfloat16).to_dense()
    assert dense.tolist() == [[0, 0], [-2, 2.5]]


def test_what_lies_about_codes_under_a_mask_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of(tmp_path / "in", "2of4-fp8-channel")
    file = tmp_path / "in/model.safetensors"
    whole = load_file(file)
    name = "model.layers.0.mlp.up_proj"
    nan = whole[f"{name}.compressed"].view(torch.uint8).clone()
    nan[0, 0] = 127
    for change, message in (
        ({"compressed": nan.view(FP8)}, "values have NaN"),
        ({"compressed": nan.view(FP8)[:, 1:].contiguous()}, "bits set, compressed has"),
        ({"bitmask": torch.zeros(3, 3, dtype=torch.uint8)}, "bitmask is torch.uint8 [3, 3]"),
        ({"weight_scale": torch.ones(7, 1)}, "scales have dtype"),
        ({"weight_zero_point": torch.ones(96, 1)}, "weight_zero_point is not zero"),
    ):
        save_file(whole | {f"{name}.{key}": tensor for key, tensor in change.items()}, file, PT)
        assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert name in error
        assert not (tmp_path / "out").exists()
    for part in ("bitmask", "shape", "compressed"):
        save_file({key: tensor for key, tensor in whole.items() if key != f"{name}.{part}"}, file, PT)
        assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 1, part
        assert f"{name}: " in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert main(["inspect", str(tmp_path / "in")]) == 1
    assert capsys.readouterr().err == f"macko inspect: {name}: there is no tensor {name}.compressed\n"


# ---- Words and configs of compressed-tensors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "two_four"),
    [((9, 44), False), ((9, 44), True), ((44,), False), ((5, 3, 11), False), ((2, 3, 2, 9), False)],
)
def test_decode_random_weights(sizes: tuple[int, ...], two_four: bool) -> None:
    w = torch.randn(sizes).relu().bfloat16()
    if two_four:
        w *= of_two_four(torch.rand(sizes))
        w[:, :8] = 0  # groups whose values are stored zeros
    parts = as_bitmask(w, two_four)
    assert_same_bits(decode(parts["shape"], parts["bitmask"], parts["compressed"]), w)


def test_decode_a_worked_example() -> None:
    # Row 0 holds columns 0 and 9, row 1 column 2: bit c % 8 of byte c / 8.
    bitmask = torch.tensor([[0b1, 0b10], [0b100, 0]], dtype=torch.uint8)
    w = decode(torch.tensor([2, 10]), bitmask, torch.tensor([1.0, 2, 3], dtype=torch.float16))
    assert w.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0, 0, 2], [0, 0, 3, 0, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.update(shape=torch.tensor([9])), "bitmask is"),
        (lambda p: p.update(shape=torch.tensor([9.0, 44])), "1 to 5 whole numbers"),
        (lambda p: p.update(shape=torch.empty(2**33, 0, dtype=torch.int64)), "1 to 5 whole numbers"),  # as a list 64 GB
        (lambda p: p.update(shape=torch.tensor([9, 50])), "bitmask is"),
        (lambda p: p.update(shape=torch.tensor([-9, 44])), "bitmask is"),
        (lambda p: p.update(shape=torch.tensor([9, 41])), "bits past column 41"),
        (lambda p: p.update(bitmask=p["bitmask"].view(torch.int8)), "bitmask is"),
        (lambda p: p.update(compressed=p["compressed"][:-1]), "bits set, compressed has"),
        (lambda p: p.update(compressed=p["compressed"].view(torch.int16)), "compressed is"),
    ],
)
def test_decode_refuses_what_does_not_fit(change: Callable[[dict[str, Tensor]], None], message: str) -> None:
    w = torch.ones(9, 44, dtype=torch.bfloat16)
    parts = as_bitmask(w, two_four=False)
    change(parts)
    with pytest.raises(ValueError, match=message):
        decode(parts["shape"], parts["bitmask"], parts["compressed"])


def test_formats_of_compressed_tensors() -> None:
    sparse = {"format": "sparse-bitmask"}
    for config in (
        {"quantization_config": {"quant_method": "compressed-tensors", "sparsity_config": sparse}},
        {"compression_config": {"sparsity_config": sparse}},
        {"sparsity_config": sparse},
    ):
        assert sparsity_format(config) == "sparse-bitmask"
    assert sparsity_format({}) is None
    assert sparsity_format({"quantization_config": None, "sparsity_config": {"format": "dense"}}) is None
    with pytest.raises(ValueError, match="format 'marlin-24'"):
        sparsity_format({"sparsity_config": {"format": "marlin-24"}})
    both = {"quantization_config": {"sparsity_config": sparse, "config_groups": {"group_0": {}}}}
    assert sparsity_format(both) == "sparse-bitmask"


@pytest.mark.parametrize("lie", [3, True, "sparse-bitmask", [{}]])
def test_a_config_of_compressed_tensors_that_lies(lie: Any) -> None:
    for config in (
        {"compression_config": lie},
        {"sparsity_config": lie},
        {"quantization_config": {"sparsity_config": lie}},
        {"sparsity_config": {"format": "sparse-bitmask"}, "config_groups": lie},
    ):
        with pytest.raises(ValueError, match=r"config\.json: \w+ is .*, expected a JSON object"):
            sparsity_format(config)
    for groups in (lie, {"group_0": lie}, {"group_0": {"weights": lie}}):
        with pytest.raises(ValueError, match=r"config\.json: \w+ is .*, expected a JSON object"):
            is_quantised({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}})


@pytest.mark.parametrize("lie", ["", [], 0, False, "macko"])
def test_a_quantization_config_that_is_no_object_is_refused(
    lie: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": lie}))
    assert main(["inspect", str(tmp_path)]) == 1
    assert "expected a JSON object" in capsys.readouterr().err


def test_8_bits_of_which_there_are_none_are_not_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    save_file({"up.weight": torch.ones(2, 2)}, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": compressed_config("int")}))
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    assert "has no layer of 8 bits" in capsys.readouterr().err


# ---- 4 bits ----------------------------------------------------------------------------------------------------------


def in_words(codes: Tensor) -> Tensor:
    """Codes of 4 bits, eight of a row in a word."""
    padded = torch.nn.functional.pad(codes + 8, (0, -codes.shape[1] % 8))
    words = (padded.view(len(codes), -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def folder_of_4_bits(path: Path, symmetric: bool = True) -> dict[str, Tensor]:
    """pack-quantized, groups of 32 columns, half of the weights 0; the weights."""
    model = llama()
    tensors, found = model.state_dict(), {}
    for name, w in linears(model).items():
        scales = (torch.rand(len(w), w.shape[1] // 32) + 0.5).bfloat16()
        zeros = torch.zeros(scales.shape, dtype=torch.long) if symmetric else torch.randint(-8, 8, scales.shape)
        of_each = zeros.repeat_interleave(32, 1)
        codes = torch.where(torch.rand(w.shape) < 0.5, torch.randint(-8, 8, w.shape), of_each)
        del tensors[f"{name}.weight"]
        parts = {"weight_packed": in_words(codes), "weight_scale": scales, "weight_shape": torch.tensor(w.shape)}
        parts |= {} if symmetric else {"weight_zero_point": in_words(zeros.t()).t().contiguous()}
        tensors |= {f"{name}.{key}": tensor for key, tensor in parts.items()}
        found[name] = ((codes - of_each) * scales.float().repeat_interleave(32, 1)).bfloat16()
    about = compressed_config("packed", num_bits=4, strategy="group", group_size=32, symmetric=symmetric)
    write(path, model, tensors, about | {"format": "pack-quantized"})
    return found


@pytest.mark.parametrize("symmetric", [True, False])
def test_4_bits_with_zeros_are_packed_at_16_with_a_warning(symmetric: bool, tmp_path: Path) -> None:
    found = folder_of_4_bits(tmp_path / "in", symmetric)
    with pytest.warns(UserWarning, match="have 4 bits, and are unpacked to 16"):
        assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "macko"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, wanted in found.items():
        assert model.get_submodule(name).format in ("macko", "bitmap")
        assert_same_bits(model.get_submodule(name).weight.as_subclass(Tensor), wanted + 0)


def test_4_bits_that_lie_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of_4_bits(tmp_path / "in")
    file, name = tmp_path / "in/model.safetensors", "model.layers.0.mlp.up_proj"
    whole = load_file(file)
    for change, message in (
        ({"weight_packed": torch.zeros(96, 7, dtype=torch.int32)}, "weight_packed is torch.int32 [96, 7]"),
        ({"weight_scale": torch.ones(96, 5)}, "weight_scale has shape [96, 5]"),
        ({"weight_zero_point": torch.zeros(11, 2, dtype=torch.int32)}, "weight_zero_point is torch.int32 [11, 2]"),
        ({"weight_g_idx": torch.zeros(64, dtype=torch.int32)}, "it has an order of columns"),
    ):
        save_file(whole | {f"{name}.{key}": tensor for key, tensor in change.items()}, file, PT)
        with pytest.warns(UserWarning, match="4 bits"):
            assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 1
        assert f"{name}: {message}" in capsys.readouterr().err


# ---- torch.save ------------------------------------------------------------------------------------------------------


def save_bin(folder: Path, model: Any, shards: int) -> None:
    folder.mkdir()
    model.config.save_pretrained(folder)
    state = dict(model.state_dict())
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    places = {name: f"pytorch_model-{i % shards + 1:05d}-of-{shards:05d}.bin" for i, name in enumerate(state)}
    for file in sorted({*places.values()}):
        torch.save({name: t.clone() for name, t in state.items() if places[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_bin_is_converted_and_inspected(shards: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    for weight in linears(model).values():
        weight[:, ::2] = 0
    save_bin(tmp_path / "in", model, shards)
    assert main(["inspect", str(tmp_path / "in")]) == 0
    assert "mlp.up_proj" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    packed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "planes"), "--format", "dense12"]) == 0
    assert not list((tmp_path / "planes").glob("*.bin"))
    lossless = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "planes", dtype="auto")
    for name, weight in linears(model).items():
        assert_same_bits(packed.get_submodule(name).weight.as_subclass(Tensor), weight + 0)
        assert_same_bits(lossless.get_submodule(name).weight, weight)
    loaded = macko.load_model(llama(), tmp_path / "in")
    assert_same_bits(loaded.lm_head.weight, model.lm_head.weight)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("this must not run",))


def test_a_bin_that_is_no_state_dict_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_bin(tmp_path / "in", llama(), 1)
    file = tmp_path / "in/pytorch_model.bin"
    for content in ({"a": Evil()}, {"a": 3}, [torch.ones(2)], None):
        if content is None:
            file.write_bytes(file.read_bytes()[:50])
        else:
            torch.save(content, file)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
            Checkpoint(tmp_path / "in")
        assert main(["inspect", str(tmp_path / "in")]) == 1
        said = capsys.readouterr()
        assert "this must not run" not in said.out
        assert said.err.startswith("macko inspect: ")
        assert said.err.count("\n") == 1


def test_the_bin_of_a_hub_name_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from macko.workdir import find_folder

    save_bin(tmp_path / "in", llama(), 1)
    asked: list[Any] = []

    def snapshot_download(name: str, **patterns: Any) -> str:
        asked.append(patterns)
        return str(tmp_path / "in")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_folder("some/model") == tmp_path / "in"
    assert asked[1] == {"allow_patterns": ["pytorch_model*.bin"]}


# ---- float32, and what is refused ------------------------------------------------------------------------------------


def test_float32_that_is_bfloat16_is_packed_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    model.float().save_pretrained(tmp_path / "in")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "dense12"]) == 0
    assert "are bfloat16 numbers, and are packed as such" in capsys.readouterr().err
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor.float(), model.state_dict()[name])


def test_other_float32_is_rounded_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama(torch.float32)
    model.save_pretrained(tmp_path / "in")
    arguments = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "dense12"]
    assert main(arguments) == 1
    assert "% of the float32 weights" in capsys.readouterr().err
    assert main([*arguments, "--dtype", "bfloat16"]) == 0
    assert "no bfloat16 numbers: they are rounded" in capsys.readouterr().err
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same_bits(loaded.lm_head.weight, model.lm_head.weight.bfloat16())


# ---- SlideSparse -----------------------------------------------------------------------------------------------------


def slid(w: Tensor, length: int, align: int) -> Tensor:
    """By the paper's greedy rule, one value after the other: in the first window over its column that has room."""
    rows, cols = w.shape
    groups, windows = -(-cols // length), length // 2 - 1
    out, values = torch.zeros(rows, -(-groups * windows * 4 // align) * align).tolist(), w.float().tolist()
    for row, of_row in enumerate(values):
        count: dict[tuple[int, int], int] = {}
        for col, value in enumerate(of_row):
            group, place = divmod(col, length)
            for window in range(max(0, place // 2 - 1), min(windows, place // 2 + 1)):
                if value and count.get((group, window), 0) < 2:
                    count[group, window] = count.get((group, window), 0) + 1
                    out[row][4 * (group * windows + window) + place - 2 * window] = value
                    break
    return torch.tensor(out).to(w.dtype)


def pruned_codes(rows: int, cols: int, length: int, dtype: torch.dtype) -> Tensor:
    """Any two columns of each group are zeros."""
    codes = torch.randint(1, 100, (rows, cols)) * torch.randint(0, 2, (rows, cols)).mul(2).sub(1)
    for first in range(0, cols, length):
        group = codes[:, first : first + length]
        group.scatter_(1, torch.rand(group.shape).argsort(1)[:, :2], 0)
    return codes.to(dtype)


@pytest.mark.parametrize("dtype", [torch.int8, FP8, torch.bfloat16])
@pytest.mark.parametrize("length", [4, 6, 8, 10, 16])
def test_slid_and_back_is_every_bit(length: int, dtype: torch.dtype) -> None:
    for cols in (length, 48, 100, 96 + length // 2):
        for align in (16, 32):
            w = pruned_codes(6, cols, length, dtype)
            note = Slid({"Z": 2, "L": length}, {"intermediate_size": cols})
            there = slid(w, length, align)
            assert there.float().count_nonzero() == w.float().count_nonzero()
            name = "model.layers.0.mlp.down_proj.weight"
            assert note.undo(name, there[:0]).shape == (0, cols)
            assert torch.equal(note.undo(name, there.double()), w.double())
            back = note.undo(name, there)
            assert back.dtype == dtype
            assert torch.equal(back.float(), w.float())


def slid_folder(path: Path, codes: str | None) -> dict[str, Tensor]:
    """A folder as SlideSparse's scripts leave one, in int8 with scales of rows or in bfloat16; weights before that."""
    model, found = llama(), {}
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, cols = tensors[name].shape
        found[name] = pruned_codes(rows, cols, 8, torch.int8 if codes else torch.bfloat16)
        tensors[name] = slid(found[name], 8, 16)
        if codes:
            scales = tensors[f"{name}_scale"] = torch.rand(rows, 1) + 0.5
            found[name] = (found[name] * scales).bfloat16()
    write(path, model, tensors, compressed_config(codes) if codes else None)
    (path / "slidesparse_config.json").write_text('{"Z": 2, "L": 8, "extra": {"skip_compress": true}}')
    return found


@pytest.mark.parametrize("codes", ["int", None])
def test_a_folder_of_slidesparse_is_as_it_was(
    codes: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = slid_folder(tmp_path / "in", codes)
    assert main(["inspect", str(tmp_path / "in")]) == 0
    assert "layers.0.mlp.down_proj" in capsys.readouterr().out
    if codes is None:
        model = macko.load_model(llama(), tmp_path / "in")
        for name, weight in found.items():
            assert_same_bits(model.get_parameter(name), weight)
    options = [] if codes else ["--min-sparsity", "0"]
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), *options]) == 0
    assert not (tmp_path / "out/slidesparse_config.json").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, weight in found.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert_same_bits(layer.weight.as_subclass(Tensor) + 0, weight + 0)


def test_a_folder_of_slidesparse_that_lies_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    slid_folder(folder, None)
    note, config = folder / "slidesparse_config.json", folder / "config.json"
    name, about = "model.layers.0.mlp.down_proj.weight", json.loads(config.read_text())

    def assert_refused(match: str) -> None:
        with pytest.raises(ValueError, match=match), Checkpoint(folder) as file:
            assert [file[name] for name in file]

    with pytest.raises(ValueError, match="give the folder"):
        Checkpoint(folder / "model.safetensors")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    macko.save_model(model, folder.parent / "in" / "own.safetensors")  # says itself what it holds
    macko.load_model(model, folder / "own.safetensors")
    (folder / "own.safetensors").unlink()
    for zeros, length in ((1, 8), (2, 7), (2, "8"), (2, 2)):
        note.write_text(json.dumps({"Z": zeros, "L": length}))
        assert_refused("Z:L is")
    note.write_text('{"Z": 2, "L": 6}')
    assert_refused("slid by L = 6 are")
    note.write_text('{"Z": 2, "L": 8}')
    config.write_text(json.dumps({**about, "intermediate_size": None}))
    assert_refused(f"how many columns {name} had is not known")
    config.write_text(json.dumps(about))
    whole = {key: tensor.clone() for key, tensor in load_file(folder / "model.safetensors").items()}
    doubled = whole[name].clone()
    doubled[0, 2] = doubled[0, 4] = 1  # of the windows 0 and 1 over column 2
    for weight, match in ((doubled, "in two windows"), (whole[name][:, :-1].contiguous(), "slid by L = 8 are")):
        save_file({**whole, name: weight}, folder / "model.safetensors")
        assert_refused(match)
    save_file({**whole, "embed_words.weight": whole[name].clone()}, folder / "model.safetensors")
    assert_refused("embed_words.weight may be slid")
    note.write_text('{"Z": 2, "L": 8, "extra": {"skip_slide": true}}')
    with Checkpoint(folder) as file:
        assert_same_bits(file[name], whole[name])
    there = slid(torch.ones(1, 8), 8, 16)
    there[0, 11], there[0, 13] = 0, 1
    with pytest.raises(ValueError, match="there are values behind its 8 columns"):
        Slid({"Z": 2, "L": 8}, {"intermediate_size": 8}).undo(name, there)
