"""Sparse models in other libraries' hands: what they save, load and average is right, or stopped by name."""

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from safetensors.torch import load_model as load_safetensors
from safetensors.torch import save_model as save_safetensors
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import macko
from macko import SparseLinear
from macko.files import Checkpoint, packed_state
from macko.weights import FORMATS, SAVED
from tests.common import HALVES, assert_same_bits, random_weight
from tests.tiny_llama import small_llama

#: What a CPU can make; sell cannot be.
ON_CPU = [name for name in FORMATS if name != "sell"]
#: Of them those whose files have canonical names.
BY_NAMES = [name for name in ON_CPU if name not in ("ec", "slide", "dense12")]
X = torch.randn(5, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 48, dtype=torch.bfloat16)
        self.down = nn.Linear(48, 64, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def dense(seed: int = 0, density: float = 0.4) -> Two:
    """Other zeros, and another count of them, in each layer and for each seed."""
    torch.manual_seed(seed)
    model = Two()
    for index, layer in enumerate((model.up, model.down)):
        share = density * (1 - 0.1 * (index + seed % 3))
        rows, cols = layer.weight.shape
        layer.weight.data = random_weight(rows, cols, share, torch.bfloat16, seed=2 * seed + index)
    return model


def held_in(format: str, weight: Tensor) -> macko.weights.PackedWeight:
    """A weight packed on the CPU, in layouts of GPUs too."""
    return FORMATS[format].from_dense(weight)


def sparse(format: str, seed: int = 0, density: float = 0.4) -> Two:
    model = dense(seed, density)
    for name, layer in list(model.named_children()):
        setattr(model, name, SparseLinear.from_packed(held_in(format, layer.weight.detach()), layer.bias))
    return model


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(X)


# ---- Readers that know nothing of macko ------------------------------------------------------------------------------


def with_accelerate(model: nn.Module, folder: Path) -> None:
    pytest.importorskip("accelerate").Accelerator().save_model(model, folder)


def by_safetensors(model: nn.Module, other: nn.Module, folder: Path) -> None:
    save_safetensors(model, str(folder / "file"))
    load_safetensors(other, folder / "file", strict=False)


def from_a_file_of_macko(model: nn.Module, other: nn.Module, folder: Path) -> None:
    macko.save_model(model, folder / "file")
    load_safetensors(other, folder / "file", strict=False)


def pickled_state(model: nn.Module, other: nn.Module, folder: Path) -> None:
    torch.save(model.state_dict(), folder / "file")
    other.load_state_dict(torch.load(folder / "file"), strict=False)


def by_accelerate(model: nn.Module, other: nn.Module, folder: Path) -> None:
    with_accelerate(model, folder)
    pytest.importorskip("accelerate").load_checkpoint_in_model(other, folder)


def by_device_map(model: nn.Module, other: nn.Module, folder: Path) -> None:
    with_accelerate(model, folder)
    pytest.importorskip("accelerate").load_checkpoint_and_dispatch(other, folder, device_map={"": "cpu"})


STOPPED: dict[str, Callable[[nn.Module, nn.Module, Path], Any]] = {
    "strict=False": lambda model, other, _: other.load_state_dict(model.state_dict(), strict=False),
    "assign": lambda model, other, _: other.load_state_dict(model.state_dict(), strict=False, assign=True),
    "safetensors": by_safetensors,
    "a file of macko's": from_a_file_of_macko,
    "torch.save": pickled_state,
    "accelerate": by_accelerate,
    "device_map": by_device_map,
}


@pytest.mark.parametrize("way", STOPPED)
@pytest.mark.parametrize("format", [name for name in ON_CPU if name != "dense12"])
def test_a_dense_model_stops_at_a_packed_state(format: str, way: str, tmp_path: Path) -> None:
    """Where it would go on with the weights that it was made with."""
    assert_stops(sparse(format), dense(1), way, tmp_path)


@pytest.mark.parametrize("way", ["strict=False", "safetensors"])
@pytest.mark.parametrize("format", BY_NAMES)
def test_a_dense_model_stops_at_a_merged_state(format: str, way: str, tmp_path: Path) -> None:
    model, other = sparse(format), dense(1)
    model.gate, other.gate = copy.deepcopy(model.up), copy.deepcopy(other.up)
    for one in (model, other):
        for name in ("up", "gate"):
            one.get_submodule(name).register_parameter("bias", None)
    assert macko.merge_(model, [("up", "gate")])
    assert_stops(model, other, way, tmp_path)


def assert_stops(model: nn.Module, other: nn.Module, way: str, tmp_path: Path) -> None:
    with pytest.raises(
        (RuntimeError, ValueError), match=r"size mismatch for \w+\.weight|Trying to set a tensor of shape"
    ):
        STOPPED[way](model, other, tmp_path)


def test_a_hub_mixin_stops_at_a_packed_folder_and_macko_reads_it(tmp_path: Path) -> None:
    hub: Any = pytest.importorskip("huggingface_hub")

    class Mixed(Two, hub.PyTorchModelHubMixin):  # type: ignore[misc, name-defined]
        pass

    model = Mixed()
    model.load_state_dict(dense().state_dict())
    macko.sparsify_(model, min_sparsity=0, progress=False)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        Mixed.from_pretrained(tmp_path)
    assert_same_bits(outputs(macko.load_model(Mixed(), tmp_path)), outputs(model))


@pytest.mark.parametrize("format", ON_CPU)
@pytest.mark.parametrize("density", [0.4, 0.0])
def test_what_others_save_comes_back_into_sparse_and_dense_models(format: str, density: float, tmp_path: Path) -> None:
    """A weight without a value has several empty tensors, which savers may take for one and the same."""
    model = sparse(format, density=density)
    with_accelerate(model, tmp_path / "accelerate")
    save_safetensors(model, str(tmp_path / "file"))
    torch.save(model.state_dict(), tmp_path / "pickled")
    accelerate = pytest.importorskip("accelerate")
    others = {format, "bitmap"} if format != "dense12" else {"dense12"}
    for held in ON_CPU if density and format != "dense12" else others:
        again = sparse(held, 1)
        load_safetensors(again, tmp_path / "file")
        assert_same_bits(outputs(again), outputs(model))
        again = sparse(held, 1)
        again.load_state_dict(torch.load(tmp_path / "pickled"))
        assert_same_bits(outputs(again), outputs(model))
    for held in others:  # 0.1 s each
        again = sparse(held, 1)
        accelerate.load_checkpoint_in_model(again, tmp_path / "accelerate")
        assert_same_bits(outputs(again), outputs(model))
    for path in (tmp_path / "file", tmp_path / "accelerate") if format != "dense12" else ():
        for start in (dense(1), dense(1).to("meta"), sparse("bitmap", 1)):
            loaded = macko.load_model(start, path)
            assert isinstance(loaded.up, SparseLinear)
            assert (loaded.up.weight != model.up.weight).sum() == 0


def test_older_states_without_the_empty_weight_load() -> None:
    for format in ON_CPU:
        model, again = sparse(format), sparse(format, 1)
        state = {name: tensor for name, tensor in model.state_dict().items() if tensor.numel() or "weight" not in name}
        again.load_state_dict(state)
        assert_same_bits(outputs(again), outputs(model))


def test_the_empty_weight_has_the_columns_and_of_8_bits_the_type() -> None:
    for kind, dtype in ((0, torch.float8_e4m3fn), (1, torch.int8)):
        packed = FORMATS["sparse8"].from_dense(dense().up.weight.detach(), kind=kind)  # type: ignore[call-arg]
        empty = SparseLinear.from_packed(packed).state_dict()["weight"]
        assert (empty.shape, empty.dtype) == ((0, 64), dtype)
    assert sparse("bitmap").state_dict()["up.weight"].dtype == torch.bfloat16


# ---- Canonical tensors without _extra_state --------------------------------------------------------------------------


@pytest.mark.parametrize("format", BY_NAMES)
def test_names_of_files_are_read_whatever_the_layer_holds(format: str, tmp_path: Path) -> None:
    model = sparse(format)
    save_file(packed_state(model)[0], tmp_path / "model.safetensors")  # as Trainer's checkpoints have it
    for held in ON_CPU:
        for assign in (False, True):
            again = sparse(held, 1)
            again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False, assign=assign)
            assert_same_bits(outputs(again), outputs(model))
    for held in ("bitmap", "sparse8"):
        again = sparse(held, 1)
        pytest.importorskip("accelerate").load_checkpoint_in_model(again, tmp_path)
        assert_same_bits(outputs(again), outputs(model))
    loaded = macko.load_model(dense(1), tmp_path)
    assert_same_bits(outputs(loaded), outputs(model))


@pytest.mark.parametrize("held", ["macko", "bitmap"])
@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("places", [None, "auto", {"": "cpu"}, {"up": "cpu", "down": "cpu"}])
def test_accelerate_reads_by_a_device_map_too(held: str, on_meta: bool, places: Any, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = sparse("macko")
    save_file(packed_state(model)[0], tmp_path / "model.safetensors")
    again = sparse(held, 1).to("meta" if on_meta else "cpu")
    again = accelerate.load_checkpoint_and_dispatch(again, tmp_path, device_map=places)
    assert_same_bits(outputs(again), outputs(model))
    with pytest.raises(ValueError, match="sparse layers, which are not offloaded to disk"):
        accelerate.load_checkpoint_in_model(
            sparse(held, 1), tmp_path, device_map={"up": "cpu", "down": "disk"}, offload_folder=tmp_path / "off"
        )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_width_of_deltas_follows_from_sizes(bits: int) -> None:
    weight = dense().up.weight.detach()
    layer = SparseLinear.from_packed(FORMATS["macko"].from_dense(weight, delta_bits=bits))
    state = layer.state_dict()
    del state["_extra_state"]
    other = SparseLinear(64, 48, bias=False, dtype=torch.bfloat16)
    other.load_state_dict(state)
    assert_same_bits(other.weight.as_subclass(Tensor), weight)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("format", ["ec", "slide"])
def test_a_format_whose_sizes_nothing_says_is_refused_by_name(format: str, strict: bool) -> None:
    state, _ = packed_state(sparse(format))
    for held in ON_CPU:
        if held != format:
            with pytest.raises(RuntimeError, match=f"up: (the state has a weight of format {format} |size mismatch)"):
                sparse(held, 1).load_state_dict(dict(state), strict=strict)


def test_a_state_of_fewer_columns_is_refused() -> None:
    """No entry of which is outside of the layer."""
    layer = SparseLinear.from_packed(held_in("macko", random_weight(48, 40, 0.4, torch.bfloat16)))
    state = layer.state_dict()
    del state["_extra_state"]
    with pytest.raises(RuntimeError, match=r"the state has shape \[48, 40\], the layer \[48, 64\]"):
        SparseLinear(64, 48, bias=False, dtype=torch.bfloat16).load_state_dict(state)


def test_values_of_8_bits_of_an_unknown_kind_are_refused() -> None:
    state, _ = packed_state(sparse("sparse8"))
    state = {name: tensor for name, tensor in state.items() if not name.endswith("weight")}
    with pytest.raises(RuntimeError, match="values have 8 bits, and nothing beside them says of which kind"):
        sparse("bitmap", 1).load_state_dict(state)


# ---- macko.load_model reads what others wrote, or says whose it is ---------------------------------------------------


def test_an_index_of_shards(tmp_path: Path) -> None:
    """A layer's tensors lie in several of them."""
    model, places = sparse("bitmap"), {}
    for index, (name, tensor) in enumerate(model.state_dict().items()):
        places[name] = f"diffusion_pytorch_model-{index}.safetensors"
        save_file({name: tensor}, tmp_path / places[name])
    index_file = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": places}))
    for path in (tmp_path, index_file):
        assert_same_bits(outputs(macko.load_model(dense(1), path)), outputs(model))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "consolidated.safetensors"])
@pytest.mark.parametrize("model_name", ["model", "diffusion_pytorch_model", "weights"])
def test_other_files_beside_a_model_do_not_count(name: str, model_name: str, tmp_path: Path) -> None:
    model = sparse("macko")
    save_safetensors(model, str(tmp_path / f"{model_name}.safetensors"))
    save_file({"another": torch.zeros(3)}, tmp_path / name)
    assert_same_bits(outputs(macko.load_model(dense(1), tmp_path)), outputs(model))
    with Checkpoint(tmp_path) as file:
        assert set(file.layers) == {"up", "down"}


def test_a_folder_of_adapters_says_so(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(FileNotFoundError, match="holds adapters alone"):
        macko.load_model(dense(), tmp_path)


OTHERS = {
    "gptq": ({"up.qweight": torch.int32, "up.scales": torch.float16}, {"quant_method": "gptq"}),
    "gptq or awq": ({"up.qweight": torch.int32, "up.qzeros": torch.int32}, None),
    "bitsandbytes": ({"up.weight": torch.uint8, "up.weight.absmax": torch.float32}, None),
    "compressed-tensors": ({"up.weight_packed": torch.int32}, None),
    "torchao": ({"up._weight_qdata": torch.int8}, None),
    "fp8 in blocks": ({"up.weight": torch.float8_e4m3fn, "up.weight_scale_inv": torch.float32}, None),
    "elves": ({"up.weight": torch.bfloat16}, {"quant_method": "elves"}),
}


@pytest.mark.parametrize("whose", OTHERS)
def test_a_folder_of_another_quantiser_is_told_in_one_line(whose: str, tmp_path: Path) -> None:
    tensors, about = OTHERS[whose]
    save_file({name: torch.zeros(4, 4).to(dtype) for name, dtype in tensors.items()}, tmp_path / "model.safetensors")
    if about is not None:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": about}))
    with pytest.raises(ValueError, match=rf"^[^\n]*it is quantised by {whose}[^\n]*$"):
        macko.load_model(dense(), tmp_path)


def test_a_models_own_tensors_of_such_names_are_its_own(tmp_path: Path) -> None:
    model, again = sparse("macko"), dense(1)
    for one in (model, again):
        one.register_buffer("qweight", torch.ones(3))
    macko.save_model(model, tmp_path / "model.safetensors")
    assert_same_bits(outputs(macko.load_model(again, tmp_path)), outputs(model))


# ---- Who writes a packed weight that nobody changes ------------------------------------------------------------------

INITS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda w: nn.init.normal_(tensor=w),
    "uniform_": lambda w: nn.init.uniform_(a=0.0, tensor=w),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(tensor=w, std=0.02),
    "constant_": lambda w: nn.init.constant_(w, 3.0),
    "constant_ by name": lambda w: nn.init.constant_(val=3.0, tensor=w),
    "zeros_": nn.init.zeros_,
    "ones_": lambda w: nn.init.ones_(tensor=w),
    "eye_": nn.init.eye_,
    "xavier_uniform_": lambda w: nn.init.xavier_uniform_(tensor=w),
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(tensor=w, a=1.0),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": lambda w: nn.init.orthogonal_(tensor=w),
    "sparse_": lambda w: nn.init.sparse_(w, 0.5),
    "data.fill_": lambda w: w.data.fill_(0),
    "a view": lambda w: w.view(-1).fill_(0),
    "a row": lambda w: w[3].zero_(),
    "rows": lambda w: w.unbind()[0].zero_(),
    "the transposed": lambda w: w.t().mul_(2),
    "a slice": lambda w: w[:, 2:5].copy_(torch.ones(48, 3)),
    "out": lambda w: torch.mul(w, 2, out=w),
    "inplace": lambda w: nn.functional.relu(w, inplace=True),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
}


@pytest.mark.parametrize("way", INITS)
def test_no_change_of_the_dense_copy_is_lost(way: str) -> None:
    layer = SparseLinear.from_linear(dense().up.float())
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="is packed: this is a dense copy"):
            INITS[way](layer.weight)


def test_what_changes_nothing_may_be_done_with_the_dense_copy() -> None:
    layer = sparse("macko").up
    weight = layer.weight
    weight.requires_grad = False
    weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="is packed"):
        weight.requires_grad = True
    total = torch.zeros_like(weight)
    total.add_(weight)
    total.copy_(weight.t().t())
    assert type(weight.clone()) is type(weight + 1) is type(weight.float()) is Tensor
    weight.clone().zero_()
    assert_same_bits(total, layer.weight.as_subclass(Tensor))


def test_transformers_passes_over_a_packed_weight() -> None:
    init = pytest.importorskip("transformers.initialization")
    for device in ("cpu", "meta"):
        layer = sparse("macko").up.to(device)
        init.xavier_uniform_(layer.weight)
        assert getattr(layer.weight, "_is_hf_initialized", False)


# ---- Averages --------------------------------------------------------------------------------------------------------

AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema one by one": {"avg_fn": get_ema_avg_fn(0.9)},
    "shares": {"avg_fn": lambda averaged, one, count: averaged * 0.3 + one * 0.7},
}


@pytest.mark.parametrize("way", AVERAGES)
@pytest.mark.parametrize("format", ON_CPU)
@pytest.mark.parametrize("moved", [False, True])
def test_an_average_is_right_or_refused_by_name(format: str, way: str, moved: bool, tmp_path: Path) -> None:
    model = sparse(format)
    averaged: Any = AveragedModel(model, device="cpu" if moved else None, use_buffers=True, **AVERAGES[way])
    try:
        for _ in range(4):
            averaged.update_parameters(model)
    except NotImplementedError:  # of torch: ec has types that it does not add
        return
    same = all(torch.equal(a, b) for a, b in zip(averaged.module.buffers(), model.buffers(), strict=True))
    held = averaged.module
    uses: dict[str, Callable[[], Any]] = {
        "forward": lambda: held(X),
        "state_dict": held.state_dict,
        "save_model": lambda: macko.save_model(held, tmp_path / "averaged"),
        "weight": lambda: (held.up.weight, held.down.weight),
        "pickled": lambda: torch.load(io.BytesIO(pickled(held)), weights_only=False)(X),
    }
    for use in uses.values():
        if same:
            use()
        else:
            with pytest.raises(RuntimeError, match=r"somebody has written into \w+ .*use_buffers=False"):
                use()


def pickled(model: nn.Module) -> bytes:
    torch.save(model, file := io.BytesIO())
    return file.getvalue()


def test_an_average_of_parameters_alone_is_right() -> None:
    model = sparse("bitmap")
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(4):
        averaged.update_parameters(model)
    assert_same_bits(outputs(averaged), outputs(model))


def test_an_average_by_hand_over_the_state_is_found_too() -> None:
    model = sparse("macko")
    averaged = copy.deepcopy(model)
    for own, new in zip(averaged.state_dict().values(), model.state_dict().values(), strict=True):
        own.copy_(0.9 * own + 0.1 * new)
    with pytest.raises(RuntimeError, match="somebody has written into"):
        averaged(X)
    averaged.load_state_dict(model.state_dict())  # which makes it whole, and is looked at on
    assert_same_bits(outputs(averaged), outputs(model))
    averaged.up.deltas.copy_(averaged.up.deltas // 2)
    with pytest.raises(RuntimeError, match="somebody has written into deltas"):
        averaged(X)


@pytest.mark.parametrize("format", ON_CPU)
def test_a_copy_may_move_and_be_written_over_with_the_same(format: str) -> None:
    """As DistributedDataParallel does, which sends buffers before each step."""
    model = sparse(format)
    other = copy.deepcopy(model)
    for own, same in zip(other.buffers(), model.buffers(), strict=True):
        own.copy_(same.clone())
    assert_same_bits(outputs(other), outputs(model))
    for dtype in HALVES:
        try:
            moved, wanted = copy.deepcopy(other).to(dtype), copy.deepcopy(model).to(dtype)
        except TypeError:  # slide
            continue
        x = X.to(dtype)
        assert_same_bits(moved(x).detach(), wanted(x).detach())
    assert_same_bits(outputs(copy.deepcopy(copy.copy(other))), outputs(model))


# ---- Training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ON_CPU)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64)])
def test_outputs_may_be_changed_in_place(format: str, shape: tuple[int, ...]) -> None:
    """As of nn.Linear, by nn.ReLU(inplace=True) and by adapters."""
    layer = sparse(format).up
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    wanted = torch.autograd.grad(layer(x).relu().sum(), x)[0]
    assert_same_bits(torch.autograd.grad(nn.functional.relu(layer(x), inplace=True).sum(), x)[0], wanted)
    y = layer(x)
    y += 1
    assert_same_bits(
        torch.autograd.grad((y - 1).relu().sum(), x)[0], torch.autograd.grad(((layer(x) + 1) - 1).relu().sum(), x)[0]
    )


@pytest.mark.parametrize("merged", [False, True])
def test_an_input_of_another_dtype_is_told_of_autocast(merged: bool) -> None:
    model = sparse("macko")
    if merged:
        layer: Any = model.up
        layer.bias = None
        model.gate = copy.deepcopy(model.up)
        assert macko.merge_(model, [("up", "gate")])
    with pytest.raises(RuntimeError, match=r"x has dtype float32.*torch\.autocast\('cpu', torch\.bfloat16\)"):
        model(X.float())
    with torch.autocast("cpu", torch.bfloat16):
        model(X.float())


def tiny_llama_with_zeros() -> Any:
    pytest.importorskip("transformers")
    model = small_llama(torch.float32).train()
    macko.prune_(model, 0.6, progress=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("format", ["bitmap", "macko"])
@pytest.mark.parametrize("flow", ["resumed", "best at end"])
@pytest.mark.parametrize("lora", [False, True])
def test_trainer_reads_its_own_checkpoints(format: str, flow: str, lora: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny_llama_with_zeros()
    macko.sparsify_(model, format=format, progress=False)
    wanted = model.model.layers[0].mlp.up_proj.weight
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    tokens = torch.randint(90, (8, 12))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    options = {
        "output_dir": str(tmp_path), "max_steps": 2, "save_steps": 1, "report_to": [], "use_cpu": True,
        "per_device_train_batch_size": 4, "learning_rate": 1e-2, "disable_tqdm": True,
    }  # fmt: skip
    if flow == "best at end":
        options |= {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(**options), train_dataset=data, eval_dataset=data
    )
    trainer.train()
    trained = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    if flow == "resumed":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        trainer.args.max_steps = 2
        trainer.train(resume_from_checkpoint=True)
        for name, parameter in model.named_parameters():
            if name in trained:
                assert_same_bits(parameter.detach(), trained[name].detach())
    layer = model.get_submodule(f"{'base_model.model.' if lora else ''}model.layers.0.mlp.up_proj")
    assert isinstance(layer, SparseLinear)
    assert layer.format == format
    assert_same_bits(layer.weight, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdaLoraConfig", "LoraConfig", "IA3Config"])
def test_adapters_that_freeze_and_add_in_place(kind: str) -> None:
    peft = pytest.importorskip("peft")
    more: dict[str, dict[str, Any]] = {
        "AdaLoraConfig": {"total_step": 10, "tinit": 0, "tfinal": 1},
        "IA3Config": {"feedforward_modules": []},
    }
    options = {"target_modules": ["q_proj"], **more.get(kind, {})}
    tokens, losses = torch.arange(12).view(2, 6), []
    for format in (None, "macko", "bitmap"):
        model = tiny_llama_with_zeros()
        if format:
            macko.sparsify_(model, format=format, progress=False)
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, getattr(peft, kind)(**options))
        loss = adapted(input_ids=tokens, labels=tokens).loss
        loss.backward()
        grads = [p.grad.abs().sum() for p in adapted.parameters() if p.grad is not None]
        losses.append(torch.stack([loss.detach(), *grads]))
    assert torch.allclose(losses[1], losses[0], rtol=1e-4, atol=1e-6)
    assert torch.allclose(losses[2], losses[0], rtol=1e-4, atol=1e-6)


def test_files_alone_are_no_formats_of_layers() -> None:
    """So that the lists above miss none."""
    assert set(SAVED) == {"macko8", "planes12"}


def test_a_copy_whose_layer_has_two_names_is_emptied() -> None:
    """Each name's turn follows the other one's writing, which is not somebody else's."""
    layer = macko.SparseLinear.from_linear(nn.Linear(64, 64))
    model = nn.ModuleDict({"one": nn.Sequential(layer), "other": nn.Sequential(layer)})
    state, copied = model.state_dict(), copy.deepcopy(model)
    copied.to_empty(device="cpu")
    copied.load_state_dict(state)
    x = torch.randn(3, 64)
    torch.testing.assert_close(copied["one"](x), layer(x))
