"""macko in vLLM: the tokens and log-probabilities of the dense model, whichever way its layers came to be packed.

`make test-vllm` makes an environment with a vLLM for CPUs and runs this there: each run of vLLM takes half a minute.
"""

import dataclasses
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
from macko.weights import MackoWeight, Planes12Weight
from tests.common import assert_same_bits, edited, random_weight
from tests.tiny_llama import small_llama

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
    from macko.integrations.folders import pack_folder

    folder = tmp_path_factory.mktemp("vllm")
    model = small_llama(
        hidden_size=256, intermediate_size=688, num_attention_heads=8, head_dim=32, vocab_size=500,
        max_position_embeddings=256, attention_bias=True, mlp_bias=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
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
    """What a rank's product rounds away is added up, so sums in another order may part sequences at near ties."""
    options = {"quantization": "macko"} if case == "dense" else {}
    assert_same(run(case, tensor_parallel_size=2, **options), run("dense", tensor_parallel_size=2), rounding=True)


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


@pytest.fixture(scope="session")
def mixtures(folders: Path) -> Path:
    """NAME-dense, NAME-packed, and NAME-planes, its experts in planes; of two mixtures, half of their weights zero."""
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
        "vocab_size": 500, "max_position_embeddings": 256, "tie_word_embeddings": False, "num_experts_per_tok": 2,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(1)
    models = {
        "qwen": Qwen3MoeForCausalLM(Qwen3MoeConfig(moe_intermediate_size=512, num_experts=5, **sizes)),
        "mixtral": MixtralForCausalLM(MixtralConfig(intermediate_size=512, num_local_experts=4, **sizes)),
    }
    for name, model in models.items():
        model.to(torch.bfloat16)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if weight.dim() > 1 and "embed" not in key:
                    weight.mul_(4)  # so that the most likely token, and the experts, are clearly so
        macko.prune_(model, 0.5, ignore=["gate"])
        model.save_pretrained(folders / f"{name}-dense")
        in_planes(folders / f"{name}-dense", folders / f"{name}-planes")
        macko.sparsify_(model, ignore=["gate"])
        model.save_pretrained(folders / f"{name}-packed")
    return folders


def in_planes(source: Path, target: Path) -> None:
    """A folder whose experts are in planes, but one matrix of them."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors, layers = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if ".experts." in name and "experts.1.gate" not in name]:
        layer, planes = name.removesuffix(".weight"), Planes12Weight.from_dense(tensors[name])
        layers[layer] = planes.about()
        tensors |= {f"{layer}.{part}": tensor for part, tensor in planes.tensors().items()}
        tensors[name] = planes.empty_weight()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with edited(target / "config.json") as config:
        config["quantization_config"] = {"quant_method": "macko", "version": 2, "layers": layers}


@pytest.mark.parametrize("name", ["qwen", "mixtral"])
@pytest.mark.parametrize("way", ["dense", "dense12", "packed", "planes"])
def test_experts_are_packed(run: Callable[..., Any], mixtures: Path, name: str, way: str) -> None:
    options: dict[str, Any] = {"quantization": "macko"} if way.startswith("dense") else {}
    if way == "dense12":
        options["hf_overrides"] = {"macko": {"format": "dense12", "ignore": []}}
    got = run(f"{name}-{way}" if way != "dense12" else f"{name}-dense", **options)
    assert_same(got, run(f"{name}-dense"), rounding=True)  # vLLM's own kernel of experts sums in another order
    on_cpu = {"planes": "experts stays dense: dense products are faster here"}
    kinds = {"dense12": "dense12", "planes": "dense12"}
    packs = f"macko packs experts: {kinds.get(way, '')}"
    assert (packs if torch.cuda.is_available() else on_cpu.get(way, packs)) in got.log


@pytest.mark.parametrize("whole", [False, True], ids=["tp", "ep"])
@pytest.mark.parametrize("way", ["dense", "packed"])
def test_two_ranks_have_their_experts_or_their_part_of_each(
    run: Callable[..., Any], mixtures: Path, way: str, whole: bool
) -> None:
    options: dict[str, Any] = {"enable_expert_parallel": True} if whole else {}
    options |= {"quantization": "macko"} if way == "dense" else {}
    got = run(f"qwen-{way}", tensor_parallel_size=2, **options)
    assert_same(got, run("qwen-dense", tensor_parallel_size=2), rounding=True)  # vLLM's experts on a CPU know no EP
    assert "macko packs experts: " in got.log


def test_a_file_that_lacks_a_tensor_is_refused_by_the_name_of_the_layer(run: Callable[..., Any], folders: Path) -> None:
    shutil.copytree(folders / "packed", folders / "lacking")
    with edited(folders / "lacking" / "model.safetensors") as tensors:
        del tensors["model.layers.1.self_attn.k_proj.deltas"]
    assert "model.layers.1.self_attn.qkv_proj: the checkpoint has" in run("lacking", fails=True).log


@pytest.mark.parametrize("model", ["random:tiny", "random:tiny-mixtral"])
def test_bench_times_each_side(tmp_path: Path, model: str) -> None:
    sizes = ["--batch", "1", "2", "--prompt-tokens", "8", "--new-tokens", "4", "--dtype", "float16"]
    sizes += ["--weights-dtype", "bfloat16"]
    engine = json.dumps({**MORE, "enforce_eager": True})
    path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    given = ["--engine", "vllm", "--sides", "dense", "macko", "--engine-args", engine, "--json", "lines"]
    command = [sys.executable, "-m", "macko", "bench", model, *sizes, *given]
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


# ---- Experts ---------------------------------------------------------------------------------------------------------

#: A mixture of five experts, 2 a token: hidden, and the inner size, of which each of two ranks has a slab's columns.
EXPERTS, HIDDEN, INNER = 5, 256, 512
#: How a rank is told its part: alone, its rows and columns of each expert, or some experts whole.
RANKS = {"alone": {}, "tp": {"tp_size": 2}, "ep": {"ep_size": 2, "use_ep": True}}


def routed(config: Any, how: str = "alone", rank: int = 0, name: str = "b.0.mlp.experts", **more: Any) -> Any:
    """vLLM's layer of experts, with nothing loaded.

    Args:
        more: of its own arguments, of FusedMoEConfig's, or of the ranks'.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    here = {key.replace("size", "rank"): rank for key in RANKS[how] if "size" in key}
    of_ranks = {key: more.pop(key) for key in ("enable_eplb", "dp_size") if key in more}
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel = dataclasses.replace(parallel, **RANKS[how], **here, **of_ranks)
    own = {key: more.pop(key) for key in [*more] if key.startswith(("apply_router", "swiglu_limit", "ckpt_"))}
    manager = ExpertMapManager(
        max_num_batched_tokens=64, top_k=2, global_num_experts=EXPERTS, num_redundant_experts=0, num_expert_group=None,
        moe_parallel_config=parallel, placement_strategy="linear", enable_eplb=False,
    )  # fmt: skip
    about: dict[str, Any] = {
        "num_experts": EXPERTS, "num_logical_experts": EXPERTS, "num_local_experts": manager.local_num_experts,
        "experts_per_token": 2, "hidden_dim": HIDDEN, "intermediate_size": INNER, "moe_parallel_config": parallel,
        "in_dtype": torch.bfloat16, "activation": MoEActivation.SILU, "device": "cpu",
        "routing_method": RoutingMethodType.Renormalize,
    }  # fmt: skip
    with set_current_vllm_config(VllmConfig()):
        moe = FusedMoEConfig(**{**about, **more})
        return RoutedExperts(name, torch.bfloat16, moe, config, expert_map_manager=manager, **own)


def expert_weights(density: float = 0.5) -> dict[str, torch.Tensor]:
    """By number and projection: normal, with exponents as trained weights have them."""
    sizes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    names = {f"{e}.{key}": size for e in range(EXPERTS) for key, size in sizes.items()}
    made = {name: (torch.randn(size) * 0.05).bfloat16() for name, size in names.items()}
    return {name: weight.masked_fill(torch.rand(weight.shape) >= density, 0) for name, weight in made.items()}


def packed_tensors(weights: dict[str, torch.Tensor], kind: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What config.json says of experts, of each matrix but the first of expert 1 in this format, and their tensors."""
    layers, tensors = {}, {}
    for key, weight in weights.items():
        if key == "1.gate_proj":
            tensors[f"{key}.weight"] = weight
            continue
        packed = kind.from_dense(weight)
        layers[f"b.0.mlp.experts.{key}"] = packed.about()
        tensors |= {f"{key}.{part}": tensor for part, tensor in packed.tensors().items()}
        tensors[f"{key}.weight"] = packed.empty_weight()
    return layers, tensors


def routing(tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, of each two experts, of which the last one has none, and their weights."""
    x = torch.randn(tokens, HIDDEN).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:2] for _ in range(tokens)]).int()
    return x, ids, torch.rand(tokens, 2)


def assert_near_dense(parts: list[torch.Tensor], weights: dict[str, torch.Tensor], given: Any) -> None:
    """What ranks give, together, against float64 of the same weights, within roundings of what is between."""
    x, ids, p = given
    for token, experts in enumerate(ids.tolist()):
        wanted, bound = torch.zeros(HIDDEN, dtype=torch.float64), torch.zeros(HIDDEN, dtype=torch.float64)
        for slot, e in enumerate(experts):
            gate, up, down = (weights[f"{e}.{key}"].double() for key in ("gate_proj", "up_proj", "down_proj"))
            h = torch.nn.functional.silu(gate @ x[token].double()) * (up @ x[token].double())
            wanted += p[token, slot].double() * (down @ h)
            # Gate, up, silu's result and their product are rounded, and the output.
            bound += p[token, slot].double() * (down.abs() @ h.abs())
        got = sum(part[token].double() for part in parts)
        assert ((got - wanted).abs() <= 8 * 2**-8 * bound).all()


@pytest.mark.parametrize("how", RANKS)
@pytest.mark.parametrize("way", ["sparse arriving", "dense12 arriving", "packed", "planes"])
def test_ranks_of_experts_add_up_to_the_dense_ones(way: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from macko.integrations import vllm_experts

    monkeypatch.setattr(vllm_experts, "_gains", lambda device: True)
    torch.manual_seed(0)
    weights, given = expert_weights(), routing()
    tensors, config = {f"{key}.weight": w for key, w in weights.items()}, config_of({}, format="dense12", ignore=[])
    if way == "sparse arriving":
        config = config_of({})
    elif way in ("packed", "planes"):
        layers, tensors = packed_tensors(weights, MackoWeight if way == "packed" else Planes12Weight)
        config = config_of(layers)
    parts = []
    for rank in range(1 if how == "alone" else 2):
        layer = routed(config, how, rank)
        loaded = set(layer.load_weights(sorted(tensors.items())))
        assert loaded
        layer.quant_method.process_weights_after_loading(layer)
        wanted = {"sparse arriving": "tile", "packed": "tile"}.get(way, "dense12")
        assert {part.stack.packed.format for part in layer.children()} == {wanted}
        assert not any(param.numel() for param in layer.parameters())
        local = layer.macko_w2.stack.to_dense()
        whole = torch.stack([weights[f"{e}.down_proj"] for e in range(EXPERTS)])
        cut = {"alone": whole, "tp": whole.chunk(2, 2)[rank], "ep": whole[:3] if rank == 0 else whole[3:]}[how]
        assert_same_bits(local, cut.contiguous())
        parts.append(layer.quant_method.apply(layer, *(given[i] for i in (0, 2, 1)), None, None))
    assert_near_dense(parts, weights, given)


@pytest.mark.parametrize("format", ["auto", "dense12"])
def test_experts_one_by_one_give_what_the_stack_gives(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from macko.integrations import vllm_experts

    torch.manual_seed(0)
    weights, given = expert_weights(), routing(40)
    layer = routed(config_of({}, format=format))
    assert list(layer.load_weights((f"{key}.weight", w) for key, w in weights.items()))
    x, ids, p = given
    method = layer.quant_method
    at_once = method.apply(layer, x, p, ids, None, None)
    monkeypatch.setattr(vllm_experts, "MANY", 16)
    method.look_at_each(layer)
    sizes: list[int] = []

    def noted(layer: Any, experts: Any, x: torch.Tensor, *ends: Any) -> torch.Tensor:
        sizes.append(len(x))
        return one_by_one(layer, experts, x, *ends)

    one_by_one = vllm_experts.one_by_one
    monkeypatch.setattr(vllm_experts, "one_by_one", noted)
    for tokens in (39, 40):  # of 5 experts
        got = method.apply(layer, x[:tokens], p[:tokens], ids[:tokens], None, None)
        assert_same_bits(got, at_once[:tokens])
    assert sizes == [80]


def test_experts_that_gain_nothing_stay_dense_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("macko.integrations.vllm_experts.logger.info", lambda text, *args: said.append(text % args))
    for how in ("alone", "tp"):
        layer = routed(config_of({}), how)
        assert list(layer.load_weights((f"{key}.weight", w) for key, w in expert_weights(1.0).items()))
        assert type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"
    reason = "b.0.mlp.experts stays dense: under 25% sparse it would not pay"
    assert said == [reason, f"{reason} (with --enable-expert-parallel a rank has whole experts)"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"has_bias": True}, "its experts have biases"),
        ({"apply_router_weight_on_input": True}, "weights of the routing go to the input"),
        ({"swiglu_limit": 7.0}, "its gate is clamped"),
    ],
)
def test_experts_that_do_more_stay_dense_by_name(more: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("macko.integrations.vllm_experts.logger.info", lambda text, *args: said.append(text % args))
    assert type(routed(config_of({}), **more).quant_method).__name__ == "UnquantizedFusedMoEMethod"
    assert said == [f"b.0.mlp.experts stays dense: {reason}"]
    with pytest.raises(ValueError, match=f"b.0.mlp.experts is packed, and {reason}, which macko does not do in vLLM"):
        routed(config_of({"b.0.mlp.experts.3.up_proj": ABOUT}), **more)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("more", "option"),
    [
        ({"is_lora_enabled": True}, "--enable-lora"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"dp_size": 2}, r"--data-parallel-size \(all2all\)"),
    ],
)
def test_what_experts_do_not_go_with_is_refused_by_name(more: Any, option: str, is_packed: bool) -> None:
    config = config_of({"b.0.mlp.experts.3.up_proj": ABOUT} if is_packed else {})
    with pytest.raises(ValueError, match=f"b.0.mlp.experts: packed experts do not go with {option}: serve without it"):
        routed(config, **more)
    if not is_packed:
        layer = routed(config_of({}, ignore=["experts"]), **more)
        assert type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"


def test_experts_whose_sizes_vllm_fills_up_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    said: list[str] = []
    monkeypatch.setattr("macko.integrations.vllm_experts.logger.info", lambda text, *args: said.append(text % args))
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "maybe_roundup_sizes", lambda self, h, i, *more: (h, 640))
    filled = r"vLLM's own kernel fills \(256, 512\) up to \(256, 640\)"
    layer = routed(config_of({}, format="dense12"))
    method, weights = layer.quant_method, {"w13_weight": (EXPERTS, 1280, HIDDEN), "w2_weight": (EXPERTS, HIDDEN, 640)}
    for key, size in weights.items():
        setattr(layer, key, torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)))
    method.process_weights_after_loading(layer)
    assert re.fullmatch(f"b.0.mlp.experts stays dense: {filled}", said[0])
    assert layer.quant_method is method.dense
    with pytest.raises(ValueError, match=f"b.0.mlp.experts is packed, and {filled}: choose another --moe-backend"):
        routed(config_of({"b.0.mlp.experts.3.up_proj": ABOUT}))


def test_packed_experts_are_found_where_a_model_has_another_name_for_their_block() -> None:
    """Mixtral: mlp.experts.0.gate_proj in macko's files, block_sparse_moe in vLLM, and w1 in dense files."""
    weights = expert_weights()
    layers, tensors = packed_tensors(weights, MackoWeight)
    others = {"b.0.q_proj": ABOUT, "b.01.mlp.experts.0.up_proj": ABOUT, "b.0.mlp.shared_experts.up_proj": ABOUT}
    config = config_of(layers | others)
    layer = routed(config, name="b.0.block_sparse_moe.experts")
    in_files = ["b.0.mlp.experts.0.up_proj.values", "b.0.mlp.shared_experts.up_proj.values"]
    mapper = config.get_cache_scale_mapper()
    assert mapper.apply_list(in_files) == ["b.0.block_sparse_moe.experts.0.up_proj.values", in_files[1]]
    assert config_of({}).get_cache_scale_mapper().apply_list(in_files) == in_files
    other = config_of(layers)
    routed(other, ckpt_gate_proj_name="w1", ckpt_up_proj_name="w3", ckpt_down_proj_name="w2")
    assert other.get_cache_scale_mapper().apply_list(in_files) == ["b.0.mlp.experts.0.w3.values", in_files[1]]
    assert set(layer.quant_method.packed) == {key.removeprefix("b.0.mlp.experts.") for key in layers}
    assert list(layer.load_weights(tensors.items()))
    layer.quant_method.process_weights_after_loading(layer)
    got = layer.macko_w13.stack.to_dense()[2]
    assert_same_bits(got, torch.cat([weights["2.gate_proj"], weights["2.up_proj"]]))


def test_experts_of_which_something_lacks_or_is_twice_are_refused_by_name() -> None:
    layers, tensors = packed_tensors(expert_weights(), MackoWeight)
    layer = routed(config_of(layers))
    lacking = {key: tensor for key, tensor in tensors.items() if key != "3.up_proj.values"}
    assert list(layer.load_weights(lacking.items()))
    with pytest.raises(
        ValueError, match=r"b\.0\.mlp\.experts: the checkpoint has no 3\.up_proj\.values, or not all of it"
    ):
        layer.quant_method.process_weights_after_loading(layer)
    for key, tensor, reason in (
        ("3.up_proj.weight", torch.ones(2, 2), r"3\.up_proj: the files hold its weight packed, and a dense one too"),
        (
            "1.gate_proj.values",
            torch.ones(2),
            r"1\.gate_proj: the files have values of it, and config\.json has it dense",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            list(routed(config_of(layers)).load_weights([(key, tensor)]))
    tensors["2.down_proj.weight"], layers["b.0.mlp.experts.2.down_proj"] = tensors["2.down_proj.weight"], ABOUT
    with pytest.raises(ValueError, match=r"b\.0\.mlp\.experts\.2\.down_proj: "):
        list(routed(config_of(layers)).load_weights(tensors.items()))


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
