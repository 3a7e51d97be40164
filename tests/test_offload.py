"""offloadable_: offloaders move every packed byte and nothing changes; without it they are refused by name."""

import contextlib
import copy
import importlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import macko
from macko import SparseLinear
from macko.nn.experts import PackedStack
from macko.nn.offload import OffloadableLinear, check_offloadable
from macko.weights import FORMATS
from tests.common import assert_same_bits, random_weight
from tests.tiny_diffusion import needs_diffusers
from tests.tiny_llama import small_llama

accelerate: Any = importlib.import_module("accelerate") if importlib.util.find_spec("accelerate") else None
needs_accelerate = pytest.mark.skipif(accelerate is None, reason="accelerate is not installed")
X = torch.randn(5, 256, generator=torch.Generator().manual_seed(7)).bfloat16()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(256, 256, bias=False) for _ in range(3))
        self.norm, self.down = nn.LayerNorm(256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.q_proj(x) * self.k_proj(x) + self.v_proj(x))) + x


class Model(nn.Module):
    """Blocks, and a Parameter of the model's own, as Wan has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(256))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * self.scale)
        return x


@torch.no_grad()
def models(format: str = "dense12") -> tuple[Model, Model, Tensor]:
    """A dense model, the same packed, and what that says of X."""
    torch.manual_seed(0)
    dense = Model().bfloat16().requires_grad_(False)
    if format != "dense12":
        for seed, layer in enumerate(m for m in dense.modules() if isinstance(m, nn.Linear)):
            layer.weight.copy_(random_weight(256, 256, 0.3, torch.bfloat16, seed=seed) / 16)
    model = copy.deepcopy(dense)
    macko.sparsify_(model, format=format, ignore=(), progress=False, merge=False)
    assert len(layers_of(model)) == 8
    return dense, model, model(X)


def layers_of(model: nn.Module) -> list[SparseLinear]:
    return [module for module in model.modules() if isinstance(module, SparseLinear)]


def packed_places(model: nn.Module) -> set[str]:
    """Where the bytes of packed weights are."""
    held = [t for layer in layers_of(model) for t in (*layer._parameters.values(), *layer._buffers.values())]
    return {tensor.device.type for tensor in held if tensor is not None}


@torch.no_grad()
def assert_says(model: nn.Module, wanted: Tensor) -> None:
    for _ in range(2):  # the second pass has been through an offload
        assert_same_bits(model(X), wanted)


# ---- The layer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["dense12", "macko", "bitmap"])
def test_a_layer_is_the_same_and_holds_frozen_bytes(format: str) -> None:
    _, model, wanted = models(format)
    held = sum(layer.packed.nbytes for layer in layers_of(model))
    told = macko.offloadable_(model)
    assert_says(model, wanted)
    assert told.layers == 8
    assert told.nbytes == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert told.nbytes <= told.pinned < 2 * told.nbytes
    for layer in layers_of(model):
        assert type(layer) is OffloadableLinear
        assert layer.format == format
        assert not list(layer.buffers())
        packed = {name: p for name, p in layer.named_parameters() if name != "bias"}
        assert list(packed) == list(layer.packed.tensor_names)
        assert {(p.dtype, p.requires_grad) for p in packed.values()} == {(torch.uint8, False)}
    assert held == sum(layer.packed.nbytes for layer in layers_of(model))
    assert macko.offloadable_(model) == told
    assert_says(copy.deepcopy(model), wanted)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert_says(torch.load(buffer, weights_only=False), wanted)


def test_merged_layers_are_split() -> None:
    _, model, _ = models()
    assert macko.merge_(model)
    macko.offloadable_(model)
    assert {type(layer) for layer in layers_of(model)} == {OffloadableLinear}


def test_moving_keeps_parameters_and_another_dtype_converts() -> None:
    dense, model, _ = models()
    macko.offloadable_(model)
    before = list(model.parameters())
    assert all(a is b for a, b in zip(model.to("cpu").parameters(), before, strict=True))
    assert {p.device.type for p in copy.deepcopy(model).to("meta").parameters()} == {"meta"}
    model.half()
    dense.half()
    for layer in layers_of(model):
        assert layer.dtype == torch.float16
    weight = model.blocks[0].down.weight
    assert_same_bits(weight.as_subclass(Tensor), dense.blocks[0].down.weight)
    with pytest.raises(TypeError, match="packed bytes cannot be cast"):
        model.type(torch.float16)


@pytest.mark.parametrize("source", ["held", "dense", "canonical"])
@pytest.mark.parametrize("assign", [False, True])
def test_states_are_loaded(source: str, assign: bool) -> None:
    format = "macko" if source == "canonical" else "dense12"
    _, model, wanted = models(format)
    other = copy.deepcopy(model)
    for layer in layers_of(other):
        layer._hold(layer._format.from_dense(layer.weight.flip(0).as_subclass(Tensor).contiguous()))
    macko.offloadable_(other)
    state = model.state_dict()
    if source == "held":
        macko.offloadable_(model)
        state = model.state_dict()
        assert {"blocks.0.down.data", "blocks.0.down._extra_state", "blocks.0.down.bias"} < state.keys()
        assert "blocks.0.down.weight" not in state
    elif source == "dense":
        assert state["blocks.0.down.weight"].shape == (256, 256)
    other.load_state_dict(state, assign=assign)
    assert_says(other, wanted)
    broken = {name: tensor for name, tensor in state.items() if name != "blocks.0.down.bias"}
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.0.down.bias"):
        other.load_state_dict(broken)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*blocks.0.down.other"):
        other.load_state_dict(state | {"blocks.0.down.other": X})
    if source == "held":
        state["blocks.0.down.data"] = state["blocks.0.down.data"].clone()
        state["blocks.0.down.data"][24640:] = 255
        with pytest.raises(RuntimeError, match=r"blocks.0.down: not a dense12 weight"):
            other.load_state_dict(state)
        with pytest.raises(RuntimeError, match="no data of its dense12 weight"):
            other.load_state_dict({name: t for name, t in state.items() if not name.endswith(".data")})


def test_files_are_those_of_before(tmp_path: Path) -> None:
    _, model, _ = models()
    macko.save_model(model, tmp_path / "a.safetensors")
    macko.offloadable_(model)
    macko.save_model(model, tmp_path / "b.safetensors")
    a, b = (load_file(tmp_path / name) for name in ("a.safetensors", "b.safetensors"))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert_same_bits(b[name], tensor)


def test_packed_experts_are_refused_by_name() -> None:
    stack = PackedStack.__new__(PackedStack)
    nn.Module.__init__(stack)
    model = nn.Sequential(models()[1], stack)
    with pytest.raises(ValueError, match="offloadable_: 1 is a packed stack of experts"):
        macko.offloadable_(model)
    assert {type(layer) for layer in layers_of(model)} == {SparseLinear}
    with pytest.raises(ValueError, match="an offload: 0 is packed by macko, and would stay where it is"):
        check_offloadable(nn.Sequential(stack), "an offload")


def test_a_change_of_the_weight_is_refused() -> None:
    _, model, _ = models()
    macko.offloadable_(model)
    with pytest.raises(RuntimeError, match="fuse adapters before that call"):
        model.blocks[0].down.weight.data += 1


def test_compress_for_an_offloader() -> None:
    dense = nn.Sequential(nn.Linear(1024, 1024)).bfloat16()
    model = copy.deepcopy(dense)
    report = macko.compress_(model, offload=True, progress=False)
    assert [row.format for row in report] == ["dense12"]
    assert type(model[0]) is OffloadableLinear
    with pytest.raises(ValueError, match="merge is of models that are not offloaded"):
        macko.compress_(dense, offload=True, merge=True)


# ---- accelerate ------------------------------------------------------------------------------------------------------


def cpu(model: nn.Module, folder: Path) -> None:
    accelerate.cpu_offload(model, "cpu", offload_buffers=True)


def sequential(model: nn.Module, folder: Path) -> None:
    """As enable_sequential_cpu_offload calls it, for a model without Parameters of its own."""
    accelerate.cpu_offload(model, "cpu", offload_buffers=False)


def disk(model: nn.Module, folder: Path) -> None:
    accelerate.disk_offload(model, folder, "cpu")


def device_map(model: nn.Module, folder: Path) -> None:
    places = {"scale": "cpu", "blocks.0": "cpu", "blocks.1": "disk"}
    accelerate.dispatch_model(model, places, offload_dir=folder)


WAYS = [cpu, sequential, disk, device_map]


@needs_accelerate
@pytest.mark.parametrize("format", ["dense12", "macko"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_accelerate_moves_all(way: Any, format: str, tmp_path: Path) -> None:
    _, model, wanted = models(format)
    macko.offloadable_(model)
    way(model, tmp_path)
    moved = model.blocks[1] if way is device_map else model
    assert packed_places(moved) == {"meta"}
    assert_says(model, wanted)
    assert packed_places(moved) == {"meta"}
    with pytest.raises(RuntimeError, match=r"its weight is offloaded: take the offloader's hooks away"):
        macko.save_model(model, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="offloadable_: an offloader has"):
        macko.offloadable_(model)


@needs_accelerate
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("merge", [False, True])
def test_accelerate_is_refused_before_anything_moves(way: Any, merge: bool, tmp_path: Path) -> None:
    _, model, wanted = models()
    if merge:
        macko.merge_(model)
    with pytest.raises(ValueError, match=r"offload of .*: (blocks.\d.)?q_proj is packed by macko, and would stay"):
        way(model, tmp_path)
    assert packed_places(model) <= {"cpu"}
    assert_says(model, wanted)
    macko.offloadable_(model)
    assert_says(model, wanted)


@needs_accelerate
@pytest.mark.parametrize("ready", [False, True])
def test_whole_models_are_moved(ready: bool) -> None:
    """As enable_model_cpu_offload does it."""
    _, model, wanted = models()
    if ready:
        macko.offloadable_(model)
    model, hook = accelerate.cpu_offload_with_hook(model, "cpu")
    assert_says(model, wanted)
    hook.offload()
    assert_says(model, wanted)


@needs_accelerate
@pytest.mark.parametrize("packed", [False, True])
def test_a_device_map_of_transformers(packed: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = small_llama(vocab_size=300, hidden_size=256, intermediate_size=512, num_key_value_heads=4)
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        wanted = model(tokens).logits
    if packed:
        macko.sparsify_(model, format="dense12", ignore=(), progress=False, merge=False)
    model.save_pretrained(tmp_path / "a", max_shard_size="300KB")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "disk"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    load = transformers.LlamaForCausalLM.from_pretrained
    asked = {"device_map": places, "offload_folder": str(tmp_path / "b")}
    with pytest.raises(
        ValueError, match=r"device_map puts layers on cpu and disk.*MackoConfig\(\.\.\., offload=True\)"
    ):
        load(tmp_path / "a", quantization_config=macko.MackoConfig(), **asked)
    offloading = macko.MackoConfig(**({} if packed else {"format": "dense12", "ignore": []}), offload=True)
    assert "offload" not in offloading.to_dict()
    model = load(tmp_path / "a", quantization_config=offloading, **asked)
    assert {type(layer) for layer in layers_of(model)} == {OffloadableLinear}
    assert len(layers_of(model)) == 15
    assert packed_places(model.model.layers[1]) == {"meta"}
    with torch.no_grad():
        for _ in range(2):
            assert_same_bits(model(tokens).logits, wanted)
    assert packed_places(model.model.layers[1]) == {"meta"}
    for place in ("cpu", {"": "disk"}):
        model = load(tmp_path / "a", quantization_config=offloading, device_map=place, offload_folder=tmp_path / "c")
        with torch.no_grad():
            assert_same_bits(model(tokens).logits, wanted)


# ---- diffusers' group offload ----------------------------------------------------------------------------------------

CPU = torch.device("cpu")


class Stream:
    def synchronize(self) -> None:
        pass


class Backend:
    """Streams of a pretended GPU."""

    def __init__(self, device: Any) -> None:
        pass

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self) -> Stream:
        return Stream()

    Stream = Stream


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses of what diffusers has put on the pretended GPU."""
    group_offloading = importlib.import_module("diffusers.hooks.group_offloading")
    addresses: set[int] = set()
    kept: list[Tensor] = []

    def transfer(self: Any, tensor: Tensor, source: Tensor, stream: Any) -> None:
        tensor.data = source.clone()
        kept.append(tensor.data)  # so that no other gets its address
        addresses.add(tensor.data_ptr())

    monkeypatch.setattr(group_offloading, "TorchDeviceBackend", Backend)
    monkeypatch.setattr(group_offloading.ModuleGroup, "_transfer_tensor_to_device", transfer)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self.clone())
    return addresses


def held_there(model: nn.Module, addresses: set[int]) -> int:
    tensors = [t for layer in layers_of(model) for t in (*layer.parameters(), *layer.buffers())]
    return sum(t.nbytes for t in tensors if t.data_ptr() in addresses)


@needs_diffusers
@pytest.mark.parametrize("level", ["leaf_level", "block_level", "disk"])
@pytest.mark.parametrize("ready", [False, True])
def test_group_offload(level: str, ready: bool, tmp_path: Path) -> None:
    hooks = importlib.import_module("diffusers.hooks")
    _, model, wanted = models()
    options: dict[str, Any] = {"offload_type": level, "num_blocks_per_group": 1}
    if level == "disk":
        options |= {"offload_type": "block_level", "offload_to_disk_path": str(tmp_path)}
    if level == "disk" and not ready:
        with pytest.raises(ValueError, match=r"group offloading: blocks.0.q_proj is packed by macko, and would stay"):
            hooks.apply_group_offloading(model, onload_device=CPU, offload_device=CPU, **options)
        assert_says(model, wanted)
    if ready or level == "disk":
        macko.offloadable_(model)
    hooks.apply_group_offloading(model, onload_device=CPU, offload_device=CPU, **options)
    assert_says(model, wanted)
    with pytest.raises(ValueError, match="offloadable_: an offloader has"):
        macko.offloadable_(model)


@needs_diffusers
def test_group_offload_with_a_stream_leaves_no_packed_byte(on_gpu: set[int]) -> None:
    group_offloading = importlib.import_module("diffusers.hooks.group_offloading")
    _, model, _ = models()
    with torch.no_grad():
        wanted = model.blocks[0](X)
    config = group_offloading.GroupOffloadingConfig(
        onload_device=CPU, offload_device=CPU, offload_type=group_offloading.GroupOffloadingType.BLOCK_LEVEL,
        non_blocking=True, record_stream=False, low_cpu_mem_usage=False, num_blocks_per_group=1, stream=Stream(),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"group offloading: blocks.0.q_proj is packed by macko, and would stay"):
        group_offloading._apply_group_offloading(model, config)
    told = macko.offloadable_(model)
    assert told.layers == 8
    block = model.blocks[0]
    group = group_offloading.ModuleGroup([block], CPU, CPU, block, block, stream=Stream())
    for _ in range(2):
        group.onload_()
        assert held_there(block, on_gpu) == sum(p.nbytes for layer in layers_of(block) for p in layer.parameters())
        with torch.no_grad():
            assert_same_bits(block(X), wanted)
        group.offload_()
        assert held_there(block, on_gpu) == 0


# ---- A GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.sm80
@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
@pytest.mark.parametrize("writer", ["kernel", "captured kernel", "copy", "stream"])
def test_a_product_reads_what_was_written_just_before_it(writer: str, tokens: int) -> None:
    """Products fetch weights before the kernel before them in the stream has ended (PDL)."""
    torch.manual_seed(0)
    w = (torch.randn(4096, 4096, device="cuda") / 64).bfloat16()
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
    weights = [FORMATS["dense12"].from_dense(one) for one in (w, w.flip(0).contiguous())]  # of the same table
    wanted = [weight.linear(x) for weight in weights]
    assert not torch.equal(*wanted)
    layer = SparseLinear.from_packed(weights[0])
    macko.offloadable_(nn.Sequential(layer))
    held = layer.get_parameter("data")
    contents = [weight.tensors()["data"].view(torch.uint8) for weight in weights]
    assert contents[0].shape == contents[1].shape == held.shape
    held.data = contents[0].clone()
    changed, pinned = contents[0] ^ contents[1], [content.cpu().pin_memory() for content in contents]
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def write(which: int) -> None:
        if writer == "stream":
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000)
                held.data = pinned[which].to("cuda", non_blocking=True)
            held.data.record_stream(main)
            main.wait_stream(side)
        elif writer == "copy":
            held.data.copy_(contents[which])
        else:
            torch.bitwise_xor(held.data, changed, out=held.data)

    with torch.no_grad():
        if writer == "captured kernel":
            layer(x)
            graph, made = torch.cuda.CUDAGraph(), []
            with torch.cuda.graph(graph):
                for which in (1, 0):
                    write(which)
                    made.append(layer(x))
            for _ in range(50):
                graph.replay()
                assert_same_bits(made[0], wanted[1])
                assert_same_bits(made[1], wanted[0])
            return
        outputs = []
        for turn in range(1, 101):
            torch.cuda._sleep(200_000)  # so that both wait in the stream, and the product may begin early
            write(turn % 2)
            outputs.append(layer(x))
    for turn, y in enumerate(outputs, 1):
        assert_same_bits(y, wanted[turn % 2])


@pytest.mark.gpu
@needs_diffusers
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_group_offload_on_a_gpu(stream: bool, record: bool) -> None:
    if record and not stream:
        pytest.skip("there is no stream to record")
    hooks = importlib.import_module("diffusers.hooks")
    _, model, _ = models()
    model.cuda()
    x = X.cuda()
    with torch.no_grad():
        wanted = model(x)
        macko.offloadable_(model.cpu())
        hooks.apply_group_offloading(
            model, onload_device=torch.device("cuda"), offload_device=CPU, offload_type="block_level",
            num_blocks_per_group=1, use_stream=stream, record_stream=record,
        )  # fmt: skip
        for _ in range(20):
            assert_same_bits(model(x), wanted)
    torch.cuda.synchronize()
    assert packed_places(model.blocks) == {"cpu"}
