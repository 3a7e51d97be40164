"""macko in vLLM: the tokens and log-probabilities of the dense model, whichever way its layers came to be packed.

`make test-vllm` makes an environment with a vLLM for CPUs and runs this there: each run of vLLM takes half a minute.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import macko
from macko.weights import MackoWeight
from tests.common import assert_same_bits, random_weight

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"),
]

#: Two roundings to bfloat16 of logits that are below 8: how far log-probabilities of a token may be from each other.
NEAR = 2 * 8 * 2**-8
ENGINE = {"dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 8, "skip_tokenizer_init": True, "seed": 0}
#: More of them, as JSON, where a machine needs it: {"attention_backend": "TRITON_ATTN"}.
MORE = json.loads(os.environ.get("MACKO_VLLM_ENGINE", "{}"))
ENGINE |= MORE
#: Its environment: no network, and two ranks share two cores.
QUIET = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


def generate(folder: str, options: dict[str, Any], adapter: str | None, out: str) -> None:
    """Runs vLLM, in a process of its own, and writes tokens and their log-probabilities as JSON."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(folder, **{"enforce_eager": True, **ENGINE, **options})
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8, 9, 10], list(range(20, 60)), [3])]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2, detokenize=False)
    asked = {"lora_request": LoRARequest("adapter", 1, adapter)} if adapter else {}
    outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False, **asked)]
    found = [[{str(t): about.logprob for t, about in step.items()} for step in o.logprobs] for o in outputs]
    Path(out).write_text(json.dumps({"tokens": [list(o.token_ids) for o in outputs], "logprobs": found}))


if __name__ == "__main__":
    generate(**json.loads(sys.argv[1]))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dense, half of its weights zero, and packed, its head too: with grouped queries and biases."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from macko.integrations.folders import pack_folder

    folder = tmp_path_factory.mktemp("vllm")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=32, vocab_size=500, max_position_embeddings=256, tie_word_embeddings=False, attention_bias=True,
        mlp_bias=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(4)  # so that the most likely token is clearly so
            elif name.endswith("bias"):
                weight.normal_(0, 0.1)
    macko.prune_(model, 0.5)
    model.save_pretrained(folder / "dense")
    pack_folder(folder / "dense", folder / "planes", ())
    macko.sparsify_(model, ignore=())
    model.save_pretrained(folder / "packed")
    return folder


@pytest.fixture(scope="session")
def run(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """run(folder, adapter=None, **options of vLLM): what generate writes, and the log; the same run once only."""
    done: dict[str, Any] = {}
    cache = tmp_path_factory.mktemp("cache")

    def run(folder: str, adapter: Path | None = None, fails: bool = False, **options: Any) -> Any:
        key = json.dumps([folder, str(adapter), options], sort_keys=True)
        if key in done:
            return done[key]
        out = tmp_path_factory.mktemp("run") / "out.json"
        call = {
            "folder": str(folders / folder),
            "options": options,
            "adapter": adapter and str(adapter),
            "out": str(out),
        }
        env = {**os.environ, **QUIET, "VLLM_CACHE_ROOT": str(cache)}
        command = [sys.executable, "-m", "tests.test_vllm", json.dumps(call)]
        process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
        log = process.stdout + process.stderr
        assert (process.returncode != 0) == fails, log
        result = SimpleNamespace(log=log, **({} if fails else json.loads(out.read_text())))
        done[key] = result
        return result

    return run


def assert_same(got: Any, wanted: Any, rounding: bool = False) -> None:
    """The same tokens, nearly as likely. With other rounding sequences may part, where two tokens are nearly as likely.

    Compiled code and GPUs round in other places.
    """
    for tokens, logprobs, right, likely in zip(got.tokens, got.logprobs, wanted.tokens, wanted.logprobs, strict=True):
        for at, (token, wanted_token) in enumerate(zip(tokens, right, strict=True)):
            key = str(token)
            assert key in likely[at]
            assert abs(likely[at][key] - logprobs[at][key]) < NEAR
            if token != wanted_token:
                assert rounding or torch.cuda.is_available()
                assert abs(likely[at][key] - likely[at][str(wanted_token)]) < NEAR
                break


def test_a_dense_folder_is_packed_as_it_arrives(run: Callable[..., Any]) -> None:
    got = run("dense", quantization="macko")
    assert_same(got, run("dense"))
    assert "macko packs linear layers" in got.log


def test_a_packed_folder_needs_no_option(run: Callable[..., Any]) -> None:
    assert_same(run("packed"), run("dense"))


def test_the_layout_can_be_chosen_and_a_layer_that_gains_nothing_is_named(run: Callable[..., Any]) -> None:
    asked = {"format": "macko", "ignore": ["down_proj"], "min_sparsity": 0.45}
    got = run("dense", quantization="macko", hf_overrides={"macko": asked})
    assert_same(got, run("dense"))
    assert "macko packs linear layers: macko" in got.log
    got = run("dense", quantization="macko", hf_overrides={"macko": {"min_sparsity": 0.6}})
    assert_same(got, run("dense"))
    for layer in (f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.qkv_proj", "mlp.down_proj")):
        assert f"{layer} stays dense: under 60% sparse it would not pay" in got.log
    assert "macko packs" not in got.log


def test_a_dense_folder_in_twelve_bits(run: Callable[..., Any]) -> None:
    got = run("dense", quantization="macko", hf_overrides={"macko": {"format": "dense12", "ignore": []}})
    assert_same(got, run("dense"))
    assert "macko packs linear layers: dense12" in got.log


def test_a_folder_in_twelve_bits_is_dense_on_a_cpu(run: Callable[..., Any]) -> None:
    got = run("planes")
    assert_same(got, run("dense"))
    where = "macko packs linear layers: dense12" if torch.cuda.is_available() else "macko unpacks linear layers here"
    assert where in got.log


def test_a_dense_folder_in_eight_bits(run: Callable[..., Any]) -> None:
    got = run("dense", quantization="macko", hf_overrides={"macko": {"values": "int8"}})
    assert "macko packs linear layers: sparse8 int8" in got.log
    assert len(got.tokens[0]) == 24


SLIDE = {"format": "slide", "pattern": "6:8", "values": "int8"}


@pytest.fixture(scope="session")
def slide_folders(folders: Path) -> Path:
    """dense-6-8, pruned to 6:8, and slide, packed as that in int8."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folders / "dense", dtype=torch.bfloat16)
    macko.prune_(model, pattern="6:8")
    model.save_pretrained(folders / "dense-6-8")
    report = macko.sparsify_(model, format="slide 6:8", values="int8")
    assert {row.format for row in report} - {"dense"} == {"slide 6:8 int8"}
    model.save_pretrained(folders / "slide")
    return folders


def test_slide_is_one_matrix_behind_stacked_layers(run: Callable[..., Any], slide_folders: Path) -> None:
    """A packed folder and a dense one have the same codes: the same tokens, and log-probabilities bit for bit."""
    packed = run("slide")
    dense = run("dense-6-8", quantization="macko", hf_overrides={"macko": SLIDE})
    for got in (packed, dense):
        assert "macko packs linear layers: slide 6:8 int8" in got.log
        assert "stays dense" not in got.log.replace("lm_head stays dense", "")
    assert (packed.tokens, packed.logprobs) == (dense.tokens, dense.logprobs)


def test_two_ranks_of_slide_have_the_codes_of_one(run: Callable[..., Any], slide_folders: Path) -> None:
    """Tokens of a row-parallel layer are rounded by each rank, so what it computes is near only."""
    two = [
        run("slide", tensor_parallel_size=2),
        run("dense-6-8", tensor_parallel_size=2, quantization="macko", hf_overrides={"macko": SLIDE}),
    ]
    assert (two[0].tokens, two[0].logprobs) == (two[1].tokens, two[1].logprobs)


@pytest.mark.parametrize("case", ["dense", "packed"])
def test_two_ranks_have_their_rows_and_columns(run: Callable[..., Any], case: str) -> None:
    options = {"quantization": "macko"} if case == "dense" else {}
    assert_same(run(case, tensor_parallel_size=2, **options), run("dense", tensor_parallel_size=2))


def test_compiled(run: Callable[..., Any]) -> None:
    assert_same(run("packed", enforce_eager=False), run("dense"), rounding=True)


def test_an_adapter_on_packed_layers(run: Callable[..., Any], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(3)
    sizes = {"self_attn.q_proj": (256, 256), "self_attn.v_proj": (64, 256), "mlp.down_proj": (256, 688)}
    tensors = {}
    for layer in (0, 1):
        for name, (rows, cols) in sizes.items():
            for half, shape in (("A", (8, cols)), ("B", (rows, 8))):
                tensor = (torch.randn(shape, generator=random) / 8).bfloat16()
                tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{half}.weight"] = tensor
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "task_type": "CAUSAL_LM"}
    about |= {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(about))
    options = {"enable_lora": True, "max_lora_rank": 8}
    wanted = run("dense", tmp_path, **options)
    assert wanted.tokens != run("dense").tokens
    assert_same(run("packed", tmp_path, **options), wanted)
    assert_same(run("dense", tmp_path, quantization="macko", **options), wanted)


def test_experts_stay_dense_and_that_is_said(run: Callable[..., Any], folders: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        hidden_size=256, intermediate_size=512, moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=32, vocab_size=500,
        max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    macko.prune_(model, 0.5)
    model.save_pretrained(folders / "experts")
    got = run("experts", quantization="macko")
    assert_same(got, run("experts"))
    assert "model.layers.1.mlp.experts stays dense: macko packs linear layers, not experts" in got.log
    assert "macko packs linear layers: " in got.log


def test_a_file_that_lacks_a_tensor_is_refused_by_the_name_of_the_layer(run: Callable[..., Any], folders: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folders / "packed", folders / "lacking")
    file = folders / "lacking" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.k_proj.deltas"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert "model.layers.1.self_attn.qkv_proj: the checkpoint has" in run("lacking", fails=True).log


def test_bench_times_each_side(tmp_path: Path) -> None:
    sizes = ["--batch", "1", "2", "--prompt-tokens", "8", "--new-tokens", "4", "--dtype", "float16"]
    sizes += ["--weights-dtype", "bfloat16"]
    engine = json.dumps({**MORE, "enforce_eager": True})
    path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    given = ["--engine", "vllm", "--sides", "dense", "macko", "--engine-args", engine, "--json", "lines"]
    command = [sys.executable, "-m", "macko", "bench", "random:tiny", *sizes, *given]
    process = subprocess.run(
        command, env={**os.environ, **QUIET, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    wanted = [("decode", 1), ("decode", 2), ("prefill", 1), ("tokens", 1)]
    assert [(x["model"], x["what"], x["batch"]) for x in lines] == [(m, *w) for m in ("dense", "macko") for w in wanted]
    assert all(len(line["token_ids"]) == len(line["margins"]) == 4 for line in lines if line["what"] == "tokens")
    dense, *_, packed = (line["peak_bytes"] for line in lines if line["what"] != "tokens")
    assert packed < dense  # of the dummies half were pruned and all were packed
    assert {(line["model"], line["weights_dtype"]) for line in lines} == {("dense", None), ("macko", "bfloat16")}
    assert all(0 < line["weights_s"] < line["start_s"] for line in lines)


def test_what_the_docs_say_to_paste_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "vllm.md").read_text()
    pasted = re.search(r"^    python -m benchmarks.engines --make tiny.*?(?=^- )", page, re.MULTILINE | re.DOTALL)
    assert pasted is not None
    more = f"skip_tokenizer_init=True, **{json.dumps(MORE)}"  # it stands within single quotes of the shell
    program = textwrap.dedent(pasted[0]).replace("skip_tokenizer_init=True", more)
    path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    command = ["bash", "-ec", f'python() {{ {sys.executable} "$@"; }}\n{program}']
    env = {**os.environ, **QUIET, "PYTHONPATH": path}
    process = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"^\[\d+(, \d+)*\]$", process.stdout, re.MULTILINE)  # the tokens


# ---- Without an engine -----------------------------------------------------------------------------------------------


def config_of(layers: dict[str, Any], **options: Any) -> Any:
    from macko.integrations.vllm import MackoConfig

    config = MackoConfig.from_config({"quant_method": "macko", "layers": layers, "of_a_later_macko": 1, **options})
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return config


ABOUT = {"format": "macko", "rows": 64, "cols": 64, "delta_bits": 4}


def test_siblings_of_which_some_are_packed_are_refused_by_name() -> None:
    from vllm.model_executor.layers.linear import QKVParallelLinear

    config = config_of({"a.q_proj": ABOUT, "a.v_proj": ABOUT})
    with pytest.raises(ValueError, match=r"a\.qkv_proj is one matrix .* a\.q_proj, a\.v_proj, packed, and a\.k"):
        config.get_quant_method(QKVParallelLinear.__new__(QKVParallelLinear), "a.qkv_proj")


def test_what_is_dense_beside_packed_layers_stays_so_but_in_a_format_for_any_weight() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import RowParallelLinear

    layer = RowParallelLinear.__new__(RowParallelLinear)
    with set_current_vllm_config(VllmConfig()):
        for format, kind in (("auto", "UnquantizedLinearMethod"), ("dense12", "Arriving")):
            config = config_of({"a.o_proj": ABOUT}, format=format)
            found = (config.get_quant_method(layer, f"a.{name}") for name in ("o_proj", "down_proj"))
            assert [type(method).__name__ for method in found] == ["Packed", kind]


def layers_with_kernels() -> list[tuple[Any, str]]:
    """Layers of vLLM's that read their weight themselves, and their names in a model."""
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.models.deepseek_v2 import DeepSeekV2FusedQkvAProjLinear

    kinds = (GateLinear, type("Later", (GateLinear,), {}), DeepSeekV2FusedQkvAProjLinear)
    return [(kind, "a.fused_qkv_a_proj" if "Qkv" in kind.__name__ else "a.gate") for kind in kinds]


@pytest.mark.parametrize("of_folder", ["dense", "packed beside", "dense12", "fp8"])
def test_a_layer_with_kernels_of_its_own_is_unquantised_for_vllm(of_folder: str) -> None:
    """vLLM asks for just that class, and else turns them off; DeepSeek's would read a weight that is not there."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    layers = {"a.q_proj": ABOUT} if of_folder == "packed beside" else {}
    options = {"dense12": {"format": "dense12", "ignore": []}, "fp8": {"values": "fp8"}}.get(of_folder, {})
    with set_current_vllm_config(VllmConfig()):
        config = config_of(layers, **options)
        for kind, name in layers_with_kernels():
            assert type(config.get_quant_method(kind.__new__(kind), name)) is UnquantizedLinearMethod
        plain = config.get_quant_method(ReplicatedLinear.__new__(ReplicatedLinear), "a.shared_expert_gate")
        assert (type(plain).__name__ == "Arriving") == (not layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_packed_router_is_unpacked_into_the_weight_that_its_kernels_read(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    w = random_weight(64, 64, 0.5, torch.bfloat16)
    saved = MackoWeight.from_dense(w)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    config = config_of({"a.gate": ABOUT, "a.fused_qkv_a_proj": ABOUT})
    with set_current_vllm_config(VllmConfig()):
        for kind, name in layers_with_kernels():
            layer = kind.__new__(kind)
            torch.nn.Module.__init__(layer)
            layer.tp_rank, layer.tp_size = 0, 1
            method = config.get_quant_method(layer, name)
            assert isinstance(method, UnquantizedLinearMethod)
            method.create_weights(layer, 64, [64], 64, 64, dtype, weight_loader=None)
            assert (layer.weight.dtype, layer.weight.shape) == (dtype, w.shape)  # what kernels are chosen by
            loaders = {key: param.weight_loader for key, param in layer.named_parameters()}
            with pytest.raises(ValueError, match=f"{name}: the checkpoint has no packed layer of it"):
                method.process_weights_after_loading(layer)
            loaders["weight"](layer.weight, torch.empty(0))  # as files have it beside packed tensors
            for key, tensor in saved.tensors().items():
                loaders[key](getattr(layer, key), tensor)
            assert_same_bits(layer.weight.data, w.to(dtype))
            assert [key for key, _ in layer.named_parameters()] == ["weight"]
            x = torch.ones(2, 64, dtype=dtype)
            assert_same_bits(method.dequantize_weight(layer), w.to(dtype))
            method.process_weights_after_loading(layer)
            torch.testing.assert_close(method.apply(layer, x), x @ w.to(dtype).t())


def test_every_option_of_a_folder_is_honoured() -> None:
    """What transformers' MackoConfig writes: no key of it is dropped on the way."""
    from macko.integrations import vllm
    from macko.integrations.transformers import MackoConfig

    asked: Any = {"format": "mixed", "pattern": "6:8", "ignore": ["a", "b"], "min_sparsity": 0.1, "values": "raw"}
    written = MackoConfig(layers={"a": ABOUT}, **asked).to_dict()
    config = vllm.MackoConfig.from_config(written)
    for _ in range(2):  # as it came, and as vLLM makes it anew with nothing asked for
        held = config.options
        found: Any = {"format": held.format, "values": held.values, "ignore": config.ignore, "layers": config.layers}
        found |= {"pattern": held.pattern}
        found |= {"min_sparsity": config.min_sparsity, "version": config.version, "quant_method": config.get_name()}
        assert found == {key: written[key] for key in found}
        assert written.keys() - found.keys() == set()
        config.maybe_update_config("", SimpleNamespace(get_text_config=lambda: SimpleNamespace(tie_word_embeddings=0)))


def test_values_can_be_asked_for_and_go_with_a_format() -> None:
    def asked(config: Any, **options: Any) -> Any:
        text = SimpleNamespace(tie_word_embeddings=False)
        config.maybe_update_config("", SimpleNamespace(macko=options, get_text_config=lambda: text))
        return config.options

    assert asked(config_of({}), values="int8").values == "int8"
    assert asked(config_of({}), values="fp8", format="dense8").in_bytes
    assert asked(config_of({}, values="raw"), tokens=3).values == "raw"
    assert asked(config_of({"a": ABOUT}, values="raw"), format="sell").values == "exact"  # which holds 16 bits anyhow
    with pytest.raises(ValueError, match=r"has values='fp8', and the folder is packed: 8 bits are made of a dense one"):
        asked(config_of({"a": ABOUT}), values="fp8")
    with pytest.raises(ValueError, match="values is 'fp4', expected one of"):
        asked(config_of({}), values="fp4")


def arrive(patch: pytest.MonkeyPatch, kind: Any, name: str, whole: torch.Tensor, rank: int, **options: Any) -> Any:
    """The packed part that a rank of two has of a dense checkpoint's weight, or the method that a dense one gets."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter

    from macko.weights import SlideWeight

    patch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: rank)
    patch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 2)

    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.tp_rank, layer.tp_size = rank, 2
    with set_current_vllm_config(VllmConfig()):
        method = layer.quant_method = config_of({}, **options).get_quant_method(layer, name)
        rows, cols = whole.shape
        sizes = (cols // 2, [rows]) if "Row" in kind.__name__ else (cols, [rows // 2])
        method.create_weights(layer, *sizes, cols, rows, torch.bfloat16, weight_loader=layer.weight_loader)
        layer.weight.weight_loader(layer.weight, whole)  # the last shard: it is packed then
    if layer.quant_method is not method:
        return layer.quant_method
    return SlideWeight(*(getattr(layer, name) for name in layer.macko_names), *layer.macko_header[1:])


def test_a_rank_packs_what_arrives_as_one_gpu_would(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    from macko.weights import SlideWeight

    w = random_weight(128, 320, 1.0, torch.bfloat16)
    w[:, 160:] *= 8  # the second rank has larger values
    w[:, 6::8] = w[:, 7::8] = 0
    w[64:, 4::8] = 0  # the second rank's rows fit 5:8 too, and so 10:12
    whole = SlideWeight.from_dense(w, 4, 0)
    asked = {"format": "slide", "values": "int8"}
    for rank in (0, 1):
        for kind, dim in ((RowParallelLinear, 1), (ColumnParallelLinear, 0)):
            size = whole.shape[dim] // 2
            wanted = whole.cut(dim, rank * size, (rank + 1) * size)
            got = arrive(monkeypatch, kind, "a.down_proj", w, rank, **asked)
            assert got.sizes() == wanted.sizes()
            for tensor, expected in zip(got.tensors().values(), wanted.tensors().values(), strict=True):
                assert_same_bits(tensor, expected)


def test_what_a_group_of_straddles_two_ranks_stays_dense_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    said: list[str] = []
    monkeypatch.setattr("macko.integrations.vllm.logger.info", lambda text, *args: said.append(text % args))
    w = random_weight(64, 160, 1.0, torch.bfloat16)
    w[:, 4::6] = w[:, 5::6] = 0
    method = arrive(monkeypatch, RowParallelLinear, "a.down_proj", w, 0, format="slide", values="int8")
    assert type(method).__name__ == "UnquantizedLinearMethod"
    assert said == [
        "a.down_proj stays dense: group 13 of 4:6 (columns 78 to 83) straddles two of 2 ranks, which have 80 columns "
        "each"
    ]


def test_packed_experts_are_refused_by_name() -> None:
    experts: Any = torch.nn.Module()
    experts.moe_config = None
    with pytest.raises(ValueError, match=r"a\.experts\.3\.up_proj is packed, and macko has no kernels for experts"):
        config_of({"a.experts.3.up_proj": ABOUT}).get_quant_method(experts, "a.experts")


def test_options_that_nobody_knows_are_refused() -> None:
    hf = SimpleNamespace(macko={"fmt": "tile"})
    with pytest.raises(ValueError, match=r'hf_overrides\["macko"\] has fmt, expected format, tokens, ignore, min_sp'):
        config_of({}).maybe_update_config("", hf)
    with pytest.raises(ValueError, match="format is 'tiel'"):
        config_of({}, format="tiel")
    with pytest.raises(ValueError, match="min_sparsity is 2"):
        config_of({}, min_sparsity=2)


def test_layers_of_a_shape_are_the_same_code_whatever_they_hold() -> None:
    """Else vLLM compiles each of them."""
    from vllm.config import VllmConfig, set_current_vllm_config

    from macko.integrations.vllm import Packed

    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.append((graph.code, [(tensor.device, tensor.dtype, tensor.shape) for tensor in inputs]))
        return graph.forward

    x = torch.randn(3, 96, dtype=torch.bfloat16)
    for density in (0.2, 0.6):
        with set_current_vllm_config(VllmConfig()):
            method = Packed(config_of({}), "a.o_proj", None, [])
        layer, packed = torch.nn.Module(), MackoWeight.smallest(random_weight(64, 96, density, torch.bfloat16))
        layer.quant_method = method
        method.hold(layer, packed)
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(lambda layer=layer: layer.quant_method.apply(layer, x), backend=backend)
            assert_same_bits(compiled(), packed.linear(x))
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_compiled_code_of_other_layers_is_not_taken_from_the_cache() -> None:
    """vLLM loads it by a hash of its config, without guards."""
    from vllm.config import VllmConfig, set_current_vllm_config

    from macko.integrations.vllm import Packed

    hashes = []
    for is_packed in (True, False):
        engine = VllmConfig()
        with set_current_vllm_config(engine):
            method = Packed(config_of({}), "a.o_proj", None, [])
        method.note(is_packed)
        hashes.append(engine.compute_hash())
    assert len({*hashes, VllmConfig().compute_hash()}) == 3


def test_a_vllm_of_another_interface_is_named_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.model_executor.model_loader.reload.layerwise as layerwise

    said: list[str] = []
    monkeypatch.delattr(layerwise, "initialize_online_processing")
    monkeypatch.delitem(sys.modules, "macko.integrations.vllm", raising=False)
    monkeypatch.setattr("logging.Logger.warning", lambda self, text, *args: said.append(text % args))
    macko.integrations.register_vllm()
    assert len(said) == 1
    assert "this is 0." in said[0]
    assert "initialize_online_processing" in said[0]
