"""What config.json says of a folder reaches every engine; none of this needs one."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import macko
from macko.choose.options import Options
from macko.cli import parser
from macko.integrations.config import Settings
from macko.measure.engines import asked_of_macko
from tests.tiny_llama import small_llama

LAYERS = {"a": {"format": "macko", "rows": 64, "cols": 64, "delta_bits": 4}}


@pytest.mark.parametrize("values", ["raw", "fp8", "int8", "exact"])
def test_values_of_a_saved_folder_reach_an_engine(values: str, tmp_path: Path) -> None:
    model = small_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_key_value_heads=4)
    macko.prune_(model, 0.5)
    model.save_pretrained(tmp_path / "dense")
    config = macko.MackoConfig(values=values)
    loaded = type(model).from_pretrained(tmp_path / "dense", dtype=torch.bfloat16, quantization_config=config)
    loaded.save_pretrained(tmp_path / "packed")
    about = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    settings = Settings(**Settings.arguments({**about, "of_a_later_macko": 1}))
    assert settings.options == Options(values=values)
    assert settings.layers.keys() == {n for n, m in model.named_modules() if type(m) is nn.Linear} - {"lm_head"}


def test_no_option_is_dropped_on_the_way() -> None:
    asked: Any = {"format": "mixed", "pattern": "6:8", "ignore": ["a", "b"], "min_sparsity": 0.1, "values": "raw"}
    written = macko.MackoConfig(layers=LAYERS, **asked).to_dict()
    settings = Settings(**Settings.arguments(written))
    assert {name: getattr(settings, name) for name in written} == written
    assert inspect.signature(Settings).parameters.keys() == written.keys() - {"quant_method"}
    again = settings.overridden({}, "hf_overrides")
    assert again == {**asked, "version": written["version"], "layers": LAYERS, "tokens": None}


def test_a_folder_of_slide_layers_is_for_a_prompts_tokens() -> None:
    """Also one that sparsify_ has packed and save_pretrained written, whose keys say "auto"."""
    about = {"format": "slide", "rows": 64, "cols": 64, "n": 4, "element": 0, "source": 1, "sparse_from": 0}
    slide = {"b": {**about, "sparse_to": 0}}
    assert Settings(layers={**LAYERS, **slide}).slides
    assert Settings(layers=LAYERS, format="mixed").slides
    assert not Settings(layers=LAYERS).slides


def test_what_a_user_of_an_engine_asks_for_comes_before_the_folder() -> None:
    packed, dense = Settings(values="raw", layers=LAYERS), Settings()
    assert packed.overridden({"tokens": 3}, "")["values"] == "raw"
    assert packed.overridden({"format": "sell"}, "")["values"] == "exact"  # which holds 16 bits anyhow
    assert dense.overridden({"values": "fp8", "format": "dense8"}, "")["values"] == "fp8"
    asked = {"format": "slide", "pattern": "6:8", "values": "int8"}
    slide = Settings(**Settings.arguments(dense.overridden(asked, "")))
    assert (slide.options, slide.min_sparsity, dense.min_sparsity) == (Options("slide 6:8", values="int8"), 0, 0.25)
    for pattern in ("2:4", "6:8"):
        asked = {"pattern": pattern}
        assert Settings(**Settings.arguments(slide.overridden(asked, ""))).options.pattern == pattern
        whole = Settings("slide 6:8", values="int8").overridden(asked, "")
        assert Settings(**Settings.arguments(whole)).options == Options(f"slide {pattern}", values="int8")
        for asked in ({"format": f"slide {pattern}"}, {"format": "slide", "pattern": pattern}):  # the folder's format
            for folder in (slide, Settings("slide 6:8", values="int8")):
                said = Settings(**Settings.arguments(folder.overridden(asked, "")))
                assert said.options == Options(f"slide {pattern}", values="int8")
    with pytest.raises(ValueError, match="here has fmt, expected format, tokens, ignore, min_sparsity, values, patt"):
        dense.overridden({"fmt": "tile"}, "here")
    with pytest.raises(ValueError, match="here has values='fp8', and the folder is packed: 8 bits are made of a dense"):
        packed.overridden({"values": "fp8"}, "here")


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("format", "tiel", "format is 'tiel'"),
        ("values", "fp4", "values is 'fp4', expected one of"),
        ("min_sparsity", 2, "min_sparsity is 2"),
        ("ignore", [1], r"ignore is \[1\], expected names"),
        ("ignore", 1, "ignore is 1, expected names"),
        ("version", 99, "quantization_config is of version 99"),
        ("layers", {"a": {"format": "macko", "rows": -1}}, r"quantization_config: layers\['a'\]"),
    ],
)
def test_what_no_option_can_be_is_refused(option: str, value: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Settings(**{option: value})


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ([], {}),
        (["--values", "raw"], {"values": "raw"}),
        (["--values", "fp8", "--format", "dense8"], {"values": "fp8", "format": "dense8", "ignore": []}),
        (["--format", "tile"], {"format": "tile"}),
    ],
)
def test_bench_of_an_engine_hands_on_format_and_values(given: list[str], asked: dict[str, Any]) -> None:
    assert asked_of_macko(parser().parse_args(["bench", "random:tiny", "--engine", "vllm", *given])) == asked
