"""Small models of other libraries through pack, save and load: right, or stopped by name.

python -m pytest verify/sweep_libraries.py    a minute; what is not installed is skipped
"""

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import macko
from macko import SparseLinear
from tests.common import torch_threads

STOPS = r"size mismatch|Trying to set a tensor of shape|Cannot load .* because .* expected shape"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def with_zeros(model: nn.Module, share: float = 0.65) -> nn.Module:
    """Other zeros, and another count of them, in every linear layer."""
    chance = torch.Generator().manual_seed(0)
    for index, layer in enumerate(m for m in model.modules() if type(m) is nn.Linear):
        kept = torch.rand(layer.weight.shape, generator=chance) > share - 0.02 * (index % 7)
        layer.weight.data.mul_(kept)
    return model.eval()


def packed(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    macko.sparsify_(model, progress=False)
    assert any(isinstance(module, SparseLinear) for module in model.modules())
    return model


def close(got: Tensor, wanted: Tensor) -> None:
    assert (got - wanted).abs().max() <= 1e-4 * max(1.0, float(wanted.abs().max()))


# ---- diffusers -------------------------------------------------------------------------------------------------------


def _dit(diffusers: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    x = {"hidden_states": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([3]), "class_labels": torch.tensor([2])}
    return model, x


def _unet(diffusers: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )  # fmt: skip
    x = {"sample": torch.randn(1, 4, 8, 8), "timestep": 3, "encoder_hidden_states": torch.randn(1, 5, 32)}
    return model, x


def _flux(diffusers: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    x = {
        "hidden_states": torch.randn(1, 6, 16), "encoder_hidden_states": torch.randn(1, 5, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5]), "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip
    return model, x


def _vae(diffusers: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=8,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4,
    )  # fmt: skip
    return model, {"sample": torch.randn(1, 3, 16, 16)}


DIFFUSERS: dict[str, Callable[[Any], tuple[nn.Module, dict[str, Any]]]] = {
    "DiT": _dit, "UNet": _unet, "Flux": _flux, "VAE": _vae
}  # fmt: skip


@pytest.mark.parametrize("kind", DIFFUSERS)
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("shards", [None, "50KB"])
def test_diffusers(kind: str, memory: bool, shards: str | None, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    dense, inputs = DIFFUSERS[kind](diffusers)
    with_zeros(dense)
    wanted = dense(**inputs, return_dict=False)[0]
    sparse: Any = packed(dense)
    close(sparse(**inputs, return_dict=False)[0], wanted)
    sparse.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    with pytest.raises((RuntimeError, ValueError), match=STOPS):
        type(sparse).from_pretrained(tmp_path, low_cpu_mem_usage=memory)
    torch.manual_seed(1)
    loaded = macko.load_model(DIFFUSERS[kind](diffusers)[0], tmp_path).eval()
    close(loaded(**inputs, return_dict=False)[0], wanted)
    macko.save_model(sparse, tmp_path / "by_macko" / "model.safetensors")
    loaded = macko.load_model(DIFFUSERS[kind](diffusers)[0], tmp_path / "by_macko").eval()
    close(loaded(**inputs, return_dict=False)[0], wanted)


# ---- sentence-transformers -------------------------------------------------------------------------------------------


def bert(folder: Path, kind: str = "BertModel", **more: Any) -> str:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**sizes, vocab_size=99, **more)
    with_zeros(getattr(transformers, kind)(config)).save_pretrained(folder / "bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(94))]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    return str(folder / "bert")


@pytest.mark.parametrize("dense", [0, 1, 2])
@pytest.mark.parametrize("safe", [True, False])
def test_sentence_transformer(dense: int, safe: bool, tmp_path: Path) -> None:
    """The encoder alone, and with one or two Dense modules after it."""
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    parts = importlib.import_module("sentence_transformers.models")
    modules = [parts.Transformer(bert(tmp_path)), parts.Pooling(64), *(parts.Dense(64, 64) for _ in range(dense))]
    model = with_zeros(library.SentenceTransformer(modules=modules, device="cpu"))
    wanted = torch.tensor(model.encode(["w1 w2", "w3"]))
    model = packed(model)
    close(torch.tensor(model.encode(["w1 w2", "w3"])), wanted)
    model.save_pretrained(str(tmp_path / "saved"), safe_serialization=safe)
    if dense and not safe:  # pytorch_model.bin
        with pytest.raises(RuntimeError, match=STOPS):
            library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
        return
    loaded = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    close(torch.tensor(loaded.encode(["w1 w2", "w3"])), wanted)
    loaded.save_pretrained(str(tmp_path / "again"))
    again = library.SentenceTransformer(str(tmp_path / "again"), device="cpu")
    close(torch.tensor(again.encode(["w1 w2", "w3"])), wanted)
    for place in sorted((tmp_path / "saved").glob("*_Dense")):
        alone = macko.load_model(parts.Dense(64, 64), place)
        assert isinstance(alone.linear, SparseLinear)


def test_cross_encoder(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    model = with_zeros(
        library.CrossEncoder(bert(tmp_path, "BertForSequenceClassification", num_labels=1), device="cpu")
    )
    pairs = [("w1 w2", "w3"), ("w4", "w5 w6")]
    wanted = torch.tensor(model.predict(pairs))
    model = packed(model)
    close(torch.tensor(model.predict(pairs)), wanted)
    model.save_pretrained(str(tmp_path / "saved"))
    close(torch.tensor(library.CrossEncoder(str(tmp_path / "saved"), device="cpu").predict(pairs)), wanted)


def test_sparse_encoder(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    parts = importlib.import_module("sentence_transformers.sparse_encoder.models")
    modules = [parts.MLMTransformer(bert(tmp_path, "BertForMaskedLM")), parts.SpladePooling()]
    model = with_zeros(library.SparseEncoder(modules=modules, device="cpu"))
    encoded = lambda one: one.encode(["w1 w2", "w3"]).to_dense()  # noqa: E731
    wanted = encoded(model)
    model = packed(model)
    close(encoded(model), wanted)
    model.save_pretrained(str(tmp_path / "saved"))
    close(encoded(library.SparseEncoder(str(tmp_path / "saved"), device="cpu")), wanted)


# ---- accelerate, the Hub mixin, transformers' own loading by hand ----------------------------------------------------


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 90, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))


TOKENS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("shards", ["10GB", "100KB"])
@pytest.mark.parametrize("safe", [True, False])
def test_accelerate(shards: str, safe: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    dense = with_zeros(llama())
    wanted = dense(TOKENS).logits
    sparse = packed(dense)
    accelerate.Accelerator().save_model(sparse, tmp_path / "model", max_shard_size=shards, safe_serialization=safe)
    with pytest.raises((RuntimeError, ValueError), match=STOPS):
        accelerate.load_checkpoint_in_model(llama(), tmp_path / "model")
    with pytest.raises((RuntimeError, ValueError), match=STOPS):
        accelerate.load_checkpoint_and_dispatch(llama(), tmp_path / "model", device_map={"": "cpu"})
    if safe:
        close(macko.load_model(llama(), tmp_path / "model").eval()(TOKENS).logits, wanted)
    other = with_zeros(llama(), 0.5)
    again = packed(other)
    stopped = ""
    try:
        accelerate.load_checkpoint_in_model(again, tmp_path / "model")
    except RuntimeError as error:
        stopped = str(error)
    if stopped:  # a layer's tensors are in two shards, which accelerate reads one by one
        assert shards != "10GB"
        assert "not a macko weight" in stopped or "the state has" in stopped
    else:
        close(again(TOKENS).logits, wanted)


def test_accelerate_saves_and_loads_its_state(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    dense = with_zeros(llama())
    wanted = dense(TOKENS).logits
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(packed(dense))
    accelerator.save_state(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    accelerator.load_state(tmp_path)
    close(model(TOKENS).logits, wanted)


def test_hub_mixin(tmp_path: Path) -> None:
    hub: Any = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

    class Mixed(nn.Module, hub.PyTorchModelHubMixin):  # type: ignore[misc, name-defined]
        def __init__(self, width: int = 64) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(inplace=True), nn.Linear(width, 64))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    torch.manual_seed(0)
    dense, x = with_zeros(Mixed(96)), torch.randn(3, 64)
    sparse: Any = packed(dense)
    sparse.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=STOPS):
        Mixed.from_pretrained(tmp_path)
    close(macko.load_model(Mixed(96), tmp_path)(x), dense(x))
