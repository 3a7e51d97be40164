"""Every model of transformers that can be made small, through packing, saving and loading, beside a dense twin.

    python -m pytest verify/sweep.py              half an hour on a core
    python -m verify.sweep OUT.jsonl              the same, and the counts as a line

Every linear layer has other zeros, and another count of them, than the next one: one mask for all hides layers that
are taken for each other, and tensors that are cut where those of a dense weight would be.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import inspect
import itertools
import json
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import macko
from macko.measure.reference import linear as reference
from tests.common import torch_threads

transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")

#: Numbers of configs by their names, the first pattern that fits counts; smaller ones stay.
SIZES = (
    (r"num_key_value_heads|(^|_)kv_heads$|key_value_heads", 2),
    (r"head_dim$|^d_kv$|attention_head_size|kv_channels|head_size$", 16),
    (r"n(um)?_?\w*heads?$", 4),
    (r"n(um)?_\w*layers?$|^depth$|coder_layers$|num_blocks$", 2),
    (r"vocab_size$", 99),
    (r"experts_per_tok|top_?k$", 2),
    (r"experts$", 4),
    (r"intermediate_size$|ffn_dim$|d_ff$|feedforward\w*|ffn_\w*size$|d_inner$|mlp_dim$|inner_dim|n_inner", 128),
    (r"hidden_size$|hidden_dim$|d_model$|n_embd$|^dim$|projection_dim$|embedding_size|\w*_dim$|\w*channels$", 64),
    (r"max_\w*positions?(_embeddings)?$|n_positions|max_seq\w*|context_length", 128),
    (r"image_size$", 32),
    (r"patch_size$", 8),
)
#: Weights of the largest model that is taken.
LIMIT = 30_000_000
#: What a config has to be told besides.
OPTIONS: dict[str, dict[str, Any]] = {
    "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
    "autoformer": {"prediction_length": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "esm": {"vocab_size": 99, "pad_token_id": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl_text": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
}
#: Models by an option that gives them other layers.
VARIANTS: dict[str, dict[str, Any]] = {
    "dinov2 swiglu": {"use_swiglu_ffn": True},
    "dinov2_with_registers swiglu": {"use_swiglu_ffn": True},
    "inkling_mm_model dense": {"text_config": {"dense_mlp_idx": 2}},
    "tipsv2_vision_model swiglu": {"use_swiglu_ffn": True},
}
#: What cannot be made small, and why; the line of `main` has transformers' own words.
NOT_SMALL: dict[str, str] = {
    "the small sizes do not reach what makes it large": """
        align align_vision_model apertus1p5 blt depth_pro dots3_note_vision_encoder efficientnet florence2
        florence_vision fun_asr_nano gemma4 gemma4_text mamba2 molmo2 muse_spark muse_spark_audio
        nemotron_h_omni neucodec perceiver qwen2_5_omni_bigvgan qwen2_5_omni_token2wav vibevoice
        vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder
        vibevoice_asr xcodec2
    """,
    "its default config, or one so small, makes no model": """
        chameleon cohere_compass cohere_compass_text dbrx deepseek_ocr2 deepseek_ocr2_text diffusion_gemma
        diffusion_gemma_text dots3_note dots3_note_text emu3 ernie4_5_vl_moe ernie4_5_vl_moe_text gemma3n_text
        gemma4_assistant granite4_vision hunyuan_vl mimi mimi_decoder moonshine_streaming nougat
        pix2struct_text_model pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder pp_ocrv5_server_det
        pp_ocrv6_medium_det qwen3_omni_moe_talker_text reformer t5gemma2_decoder t5gemma2_encoder t5gemma2_text
        upernet vitmatte voxtral_realtime_text
    """,
    "no model of transformers has this config by itself": """
        edgetam_mask_decoder edgetam_prompt_encoder edgetam_video_mask_decoder edgetam_video_prompt_encoder
        gemma4_unified_audio gemma4_unified_vision idefics_perciever idefics_vision layoutxlm pp_chart2table
        pp_chart2table_vision sam2_mask_decoder sam2_prompt_encoder sam2_video_mask_decoder
        sam2_video_prompt_encoder sam3_geometry_encoder sam3_lite_text_geometry_encoder
        sam3_tracker_mask_decoder sam3_tracker_prompt_encoder sam3_tracker_video_mask_decoder
        sam3_tracker_video_prompt_encoder sam_hq_mask_decoder sam_hq_prompt_encoder sam_mask_decoder
        sam_prompt_encoder sapiens2_head t5_gemma_module vibevoice_diffusion
    """,
    "as small transformers itself does not save and load it": """
        inkling_audio qwen2_5_omni qwen3_omni_moe
    """,
    "it needs natten": """
        dinat
    """,
    "it needs PIL": """
        edgetam edgetam_vision_model fast_vlm gemma3n gemma3n_vision pe_audio_video pe_audio_video_encoder
        pe_video pe_video_encoder perception_lm timm_wrapper
    """,
    "it needs torchaudio": """
        higgs_audio_v2_tokenizer
    """,
    "it needs detectron2": """
        layoutlmv2
    """,
    "it needs timm": """
        timm_backbone
    """,
}
KINDS = (*transformers.CONFIG_MAPPING, *(kind for kind in VARIANTS if kind.split()[0] in transformers.CONFIG_MAPPING))


class NotSmall(Exception):
    """A model cannot be made as small, or at all, of its config's defaults."""


def shrunk(config: Any, **options: Any) -> Any:
    """A config of small sizes, in its parts too, where the given one has defaults."""
    ids = itertools.count(21)
    sizes: dict[str, Any] = {}
    for key, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            sizes[key] = shrunk(value, **options.pop(key, {}))
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in SIZES if re.search(pattern, key)), value)
            if re.search(SIZES[0][0], key) and value == getattr(config, "num_attention_heads", None):
                size = 4  # as many as heads, on which fused files of q, k and v count
            if re.search(r"_token_(id|index)$", key) and value >= 99:
                size = next(ids)
            if size < value:
                sizes[key] = size
        elif isinstance(value, (list, tuple)) and re.fullmatch(r"depths|num_(attention_)?heads", key):
            sizes[key] = [1 if key == "depths" else 2] * len(value)
    try:
        return type(config)(**{**sizes, **options})
    except Exception:  # some have to fit others, or the defaults of others
        fit: dict[str, Any] = dict(options)
        for key, value in [*sizes.items(), *sizes.items()]:
            with contextlib.suppress(Exception):
                type(config)(**{key: value, **fit})
                fit = {key: value, **fit}
        return type(config)(**fit)


def classes(config: Any) -> list[Any]:
    """The models of a config: that of AutoModel first."""
    kind = type(config)
    found = transformers.MODEL_MAPPING.get(kind, [])
    found = list(found) if isinstance(found, (list, tuple)) else [found]
    with contextlib.suppress(ImportError):
        modeling = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
        found += [
            c
            for _, c in inspect.getmembers(modeling, inspect.isclass)
            if issubclass(c, transformers.PreTrainedModel)
            and getattr(c, "config_class", None) is kind
            and not c.__name__.endswith("PreTrainedModel")
        ]
    return found


def small(kind: str) -> Any:
    """A small model of random weights whose linear layers have zeros, each another count of them."""
    name = kind.split()[0]
    try:
        options = {**OPTIONS.get(name, {}), **VARIANTS.get(kind, {})}
        config = shrunk(transformers.CONFIG_MAPPING[name](**options), **options)
        models = classes(config)
    except Exception as error:
        raise NotSmall(f"{type(error).__name__}: {one_line(error)}") from None
    reason = "no model of transformers has this config"
    for model_class in models:
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in model_class._from_config(copy.deepcopy(config)).parameters())
            if count > LIMIT:
                raise NotSmall(f"{count} weights")
            torch.manual_seed(0)
            model = model_class._from_config(copy.deepcopy(config), dtype=torch.float32).eval()
            break
        except Exception as error:
            reason = one_line(error) if isinstance(error, NotSmall) else f"{type(error).__name__}: {one_line(error)}"
    else:
        raise NotSmall(reason)
    chance = torch.Generator().manual_seed(1)
    for index, module in enumerate(model.modules()):
        if type(module) is nn.Linear:
            share = 0.55 + 0.25 * ((index * 7) % 11) / 11
            with torch.no_grad():
                module.weight.normal_(0, module.weight.shape[1] ** -0.5, generator=chance)
                module.weight *= torch.rand(module.weight.shape, generator=chance) > share
                if module.bias is not None:
                    module.bias.normal_(0, 0.1, generator=chance)
    return model


def one_line(error: BaseException) -> str:
    return re.sub(r"(https?:/)?/\S+", "...", " ".join(str(error).split()))[:160]


def dense_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights and buffers that are saved, packed ones dense, by the names that they have in a dense model."""
    state: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        held = {} if isinstance(module, macko.SparseLinear) else dict(module._buffers)
        held |= module._parameters
        state |= {
            f"{name}.{key}": tensor.detach()
            for key, tensor in held.items()
            if tensor is not None and key not in module._non_persistent_buffers_set
        }
        if isinstance(module, macko.SparseLinear):
            state[f"{name}.weight"] = module.packed.to_dense()
    return state


def assert_same(model: nn.Module, twin: dict[str, torch.Tensor], what: str) -> None:
    """Bit for bit, but for the sign of zero."""
    state = dense_state(model)
    assert state.keys() >= twin.keys(), f"{what}: no {sorted(twin.keys() - state.keys())[0]}"
    for name, tensor in twin.items():
        assert state[name].dtype == tensor.dtype, f"{what}: {name} is {state[name].dtype}, wanted {tensor.dtype}"
        assert torch.equal(torch.nan_to_num(state[name]), torch.nan_to_num(tensor)), f"{what}: {name} is another"


def packed_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, macko.SparseLinear)]


@contextlib.contextmanager
def checked(model: nn.Module, twin: dict[str, torch.Tensor]) -> Iterator[list[str]]:
    """Within it each product of a packed layer is held to the bound of the dense one; gives the layers that ran."""
    ran: list[str] = []

    def check(name: str, layer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        wanted, bound = reference(x, twin[f"{name}.weight"], layer.bias, y.dtype)
        assert ((y.double() - wanted).abs() <= bound).all() or not wanted.isfinite().all(), f"{name}: wrong product"
        ran.append(name)

    hooks = [
        module.register_forward_hook(lambda layer, inputs, y, name=name: check(name, layer, inputs[0], y))
        for name, module in model.named_modules()
        if isinstance(module, macko.SparseLinear)
    ]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


def inputs_of(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """What may be inputs of a model."""
    chance = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 20, (2, 9), generator=chance)
    name = getattr(model, "main_input_name", "input_ids")
    name = name[0] if isinstance(name, (list, tuple)) else name
    wanted = inspect.signature(model.forward).parameters
    given = {"input_ids": ids} if "input_ids" in wanted else {}
    if "decoder_input_ids" in wanted:
        given["decoder_input_ids"] = ids
    sizes = {v for k, v in vars(model.config).items() if k == "image_size" and isinstance(v, int)} or {32, 16}
    for size in sizes:
        picture = {
            "pixel_values": torch.randn(1, getattr(model.config, "num_channels", 3), size, size, generator=chance)
        }
        yield {**given, **picture} if name == "pixel_values" and "pixel_values" in wanted else given
        yield {**given, **picture} if "pixel_values" in wanted else given
    for shape in ((1, 80, 64), (1, 64, 80), (1, 128, 64), (1, 4000), (1, 9, 64), (2, 9, 128)):
        yield {**given, name: torch.randn(shape, generator=chance)}


def loaded_from(model_class: Any, folder: Path, **options: Any) -> Any:
    """As AutoModel does: some classes have another config of their own than that of the folder."""
    config = {"config": transformers.AutoConfig.from_pretrained(folder), **options}
    return model_class.from_pretrained(folder, dtype=torch.float32, **config)


def run_through(kind: str) -> tuple[str, str]:
    """("right", what), ("nothing packed", ...) or ("refused", why); AssertionError where numbers are wrong."""
    model = small(kind)
    load = partial(loaded_from, type(model))
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        before = {f"{n}.weight": m.weight.detach() for n, m in model.named_modules() if type(m) is nn.Linear}
        try:
            for _ in range(2):  # what was loaded is not always what the config said
                model.save_pretrained(place / "dense")
                model = load(place / "dense")
        except Exception as error:
            raise NotSmall(f"dense, it is not saved and loaded: {type(error).__name__}: {one_line(error)}") from None
        twin = dense_state(model)
        if lost := [name for name, tensor in before.items() if not torch.equal(tensor, twin[name])]:
            raise NotSmall(f"dense, it is loaded with another {lost[0]}")

        sparse = copy.deepcopy(model)
        macko.sparsify_(sparse, progress=False)
        if not (names := packed_names(sparse)):
            return "nothing packed", ""
        assert_same(sparse, twin, "sparsify_")
        try:
            sparse.save_pretrained(place / "sparse")
        except ValueError as error:
            if not any(name in str(error) for name in names):
                raise
            return "refused", one_line(error)
        own_names = joined(sparse)
        loaded = load(place / "sparse")
        assert packed_names(loaded) == names, "loaded: other layers are packed"
        assert_same(loaded, twin, "loaded")

        converted = load(place / "dense", quantization_config=macko.MackoConfig())
        assert packed_names(converted) == names, "MackoConfig: other layers are packed"
        assert_same(converted, twin, "MackoConfig")
        given = load(place / "dense", config=sparse.config)
        assert_same(given, twin, "config of a sparse model")

        converted.save_pretrained(place / "again")
        again = load(place / "again")
        assert packed_names(again) == names, "saved again: other layers are packed"
        assert_same(again, twin, "saved again")

        forward = ran_right(model, loaded, twin)
        fresh = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.float32)
        by_file = ""
        try:
            assert_same(macko.load_model(fresh, place / "sparse"), twin, "load_model")
        except ValueError as error:
            by_file = f", load_model: {one_line(error)}"

        again.dequantize()
        assert not packed_names(again), "dequantize left packed layers"
        assert_same(again, twin, "dequantize")
        again.save_pretrained(place / "last")
        assert_same(load(place / "last"), twin, "saved dense")
    return "right", f"{len(names)} packed{own_names}{forward}{by_file}"


def joined(model: Any) -> str:
    """Whether transformers would have joined packed layers as it saves the model."""
    from macko.integrations import saving

    return ", own names" if saving._own_names(model, saving.packed_with_empty(model, None)[0]) is not None else ""


def ran_right(model: Any, loaded: Any, twin: dict[str, torch.Tensor]) -> str:
    """Runs the packed model where the dense one runs, each packed product checked."""
    for inputs in inputs_of(model):
        with torch.no_grad():
            try:
                copy.deepcopy(model)(**inputs)
            except Exception:
                continue
            with checked(loaded, twin) as ran:
                loaded(**inputs)
            return f", {len(set(ran))} run"
    chance = torch.Generator().manual_seed(3)
    with checked(loaded, twin), torch.no_grad():
        for module in loaded.modules():
            if isinstance(module, macko.SparseLinear):
                module(torch.randn(3, module.in_features, generator=chance))
    return ", layers run alone"


@pytest.mark.parametrize("kind", KINDS)
def test_through_packing_saving_and_loading(kind: str) -> None:
    with torch_threads(1):
        try:
            outcome, _ = run_through(kind)
        except NotSmall as reason:
            known = next((why for why, kinds in NOT_SMALL.items() if kind in kinds.split()), None)
            if known is None:
                pytest.fail(f"{kind} could be made small: {reason}")
            pytest.skip(f"{known}: {reason}")
    assert outcome in ("right", "nothing packed", "refused")


def main(out: str, *kinds: str) -> None:
    """Writes a line: how many came through, and of the others which, and why."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    outcomes: dict[str, dict[str, str]] = {}
    start = time.time()
    with torch_threads(1):
        for kind in kinds or KINDS:
            try:
                outcome, note = run_through(kind)
            except NotSmall as reason:
                outcome, note = "not small", str(reason)
            except Exception as error:
                outcome, note = "wrong", f"{type(error).__name__}: {one_line(error)}"
            outcomes.setdefault(outcome, {})[kind] = note
            print(f"{kind}: {outcome}. {note}", flush=True)
            gc.collect()
    right = outcomes.get("right", {})
    line = {
        "what": "models of transformers through packing, saving and loading",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "macko": macko.__version__,
        "seconds": round(time.time() - start),
        **{outcome.replace(" ", "_"): len(by_kind) for outcome, by_kind in outcomes.items()},
        "forward": sum(" run" in note and "alone" not in note for note in right.values()),
        "converted_by_transformers": sorted(kind for kind, note in right.items() if "own names" in note),
        "load_model_refuses": sorted(kind for kind, note in right.items() if "load_model" in note),
        "which": {outcome: by_kind for outcome, by_kind in outcomes.items() if outcome != "right"},
    }
    with Path(out).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
