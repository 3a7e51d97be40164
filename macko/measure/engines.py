"""`macko bench --engine vllm`: a model in vLLM dense, packed by macko, and in vLLM's own fp8 and int4.

vLLM is imported once, in a process that never touches CUDA, and each side runs in a fork of that one, with the engine
in it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Generator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..choose.options import Options
from . import runs
from .runs import Line, Result, Side

#: What config.json says of a checkpoint by GPTQ, whose weights may then be any bits. Without the names of what is
#: quantized vLLM looks for them in files, of which dummies have none, and leaves every layer dense, without a word.
_GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False,
    "modules_in_block_to_quantize": [
        *(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ],
}  # fmt: skip
#: Options of vLLM's LLM by side.
SIDES: dict[str, dict[str, Any]] = {
    "dense": {},
    "macko": {"quantization": "macko"},
    "fp8": {"quantization": "fp8"},
    "fp8-w8a16": {"quantization": "fp8"},
    "int4": {"hf_overrides": {"quantization_config": _GPTQ}},
    "int4-marlin": {"hf_overrides": {"quantization_config": _GPTQ}},
}
#: What else the environment of a side has.
_OF_SIDE = {
    "fp8-w8a16": {"VLLM_TEST_FORCE_FP8_MARLIN": "1"},
    "int4-marlin": {"VLLM_DISABLED_KERNELS": "MacheteLinearKernel,AllSparkLinearKernel"},  # which come before it
}
#: What of vLLM takes long to import.
_SLOW = ["vllm.model_executor.models.llama", "vllm.v1.worker.gpu_model_runner", "vllm.entrypoints.llm"]
#: Positions that a run takes besides: decoding is timed beyond a first token, and after a prompt vLLM wants one.
_MORE = 1
#: A side takes so many seconds at most: compiling for a new shape takes minutes.
TIMEOUT = 540
#: What vLLM is told by its environment, before it is imported.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function of ours looks at the model
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() would start CUDA else
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # ranks too have what was put into vLLM here
}


def run(options: argparse.Namespace, source: str) -> None:
    """Times every side in an order, prints a table, and appends each side's lines to options.json once it is done.

    Args:
        options: what macko bench was told.
        source: a folder of a dense pruned model, or random: with a size, whose weights are made on the spot.

    Raises:
        ImportError: there is no vLLM.
        ValueError: an option is of no use with an engine, or no side could be timed.
    """
    is_random = source.startswith("random:")
    if options.sparsity and not (is_random and len(options.sparsity) == 1):
        raise ValueError("--engine vllm takes a folder that is pruned, or random: and one --sparsity")
    if unknown := [side for side in options.sides if side not in SIDES]:
        raise ValueError(f"--sides has {', '.join(unknown)}, expected some of {', '.join(SIDES)}")
    if (int4 := [side for side in options.sides if side.startswith("int4")]) and not is_random:
        raise ValueError(f"--sides has {int4[0]}, which is of random: alone: its weights are no model's")
    given = engine_args(options.engine_args)
    runs.check(options)
    if importlib.util.find_spec("vllm") is None:
        raise ImportError("--engine vllm: vLLM is not installed beside macko")
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    results: list[Result] = []
    if is_random:
        source = _random_folder(source)
        given = {"load_format": "dummy", "skip_tokenizer_init": True, **given}
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(source)
    runs.set_lengths(options, given.get("max_model_len") or config.get("max_position_embeddings"), _MORE)
    for side in options.sides:
        results += _forked(side, source, options, given)
    if not results:
        raise ValueError("no side could be timed")
    print(runs.table(results, memory="weights"))


def asked_of_macko(options: argparse.Namespace) -> dict[str, Any]:
    """What of the options macko's config in vLLM is told, and the config says otherwise."""
    asked = {} if options.format == "auto" else {"format": options.format}
    if options.values:
        asked["values"] = options.values
    return {**asked, "ignore": []} if Options(options.format).any_zeros else asked


def _random_folder(source: str) -> str:
    """A folder with the config alone, beside vLLM's compiled code, which is found again by the folder's name only."""
    folder = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser() / "macko" / source[len("random:") :]
    config = runs.random_config(source).to_json_string()
    folder.mkdir(parents=True, exist_ok=True)
    (part := folder / f"config.{os.getpid()}").write_text(config, encoding="utf-8")
    part.replace(folder / "config.json")  # at once: another process may be reading it
    return str(folder)


def engine_args(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(given := json.loads(text), dict):
            return given
    raise ValueError(f"--engine-args is {text!r}, expected a JSON object")


def _forked(side: str, folder: str, options: argparse.Namespace, given: dict[str, Any]) -> list[Result]:
    """What a process of its own finds, each written to options.json at once; a line says so where it finds nothing."""
    results: list[Result] = []
    for result, line in in_a_process(_measure, side, folder, options, given):
        if result is not None:
            results.append(result)
            runs.show([result], memory="weights")
        runs.append(options.json, [line])
    if not results:
        print(f"{side}: no times", flush=True)
    return results


def import_early() -> None:
    """Begins to import vLLM in the process that sides are forks of, while the caller does something else."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_SLOW)
    forkserver.ensure_running()


def in_a_process(measure: Callable[..., None], *what: Any, seconds: float | None = None) -> Generator[Any, None, None]:
    """What measure(*what, pipe) sends from a process of its own that can use CUDA, until it fails or time is over.

    seconds: that it may take, TIMEOUT by default.
    """
    # Not a fork of this process: transformers may have asked for GPUs here, and no fork can use CUDA after that. Nor
    # can a fork of one that imports vLLM alone, where vLLM has asked.
    end = time.monotonic() + (TIMEOUT if seconds is None else seconds)
    for method in ("forkserver", "spawn"):
        with contextlib.closing(_messages(method, end, measure, *what)) as messages:
            for found in messages:
                if found == _NO_CUDA:
                    break
                yield found
            else:
                return


#: What a process sends that cannot use CUDA.
_NO_CUDA = "no CUDA"


def _messages(method: str, end: float, measure: Callable[..., None], *what: Any) -> Generator[Any, None, None]:
    """What _run sends from a process that is started so, until it fails or the clock is at `end`."""
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_SLOW)
    theirs, ours = context.Pipe()
    process = context.Process(target=_run, args=(measure, *what, ours))
    process.start()
    ours.close()
    wait = 0
    try:
        while theirs.poll(max(0, end - time.monotonic())):
            if (found := theirs.recv()) is None:
                wait = 5
                break
            yield found
    except EOFError:
        pass  # it has printed why
    finally:
        process.join(wait)
        process.kill()
        process.join()  # or it might still hold memory when the next one begins


def _run(measure: Callable[..., None], *what: Any) -> None:
    """Measures, where the process can use CUDA; else says that it cannot."""
    if torch.cuda._is_in_bad_fork():
        what[-1].send(_NO_CUDA)
    else:
        measure(*what)
    what[-1].send(None)


def _measure(name: str, folder: str, options: argparse.Namespace, given: dict[str, Any], pipe: Any) -> None:
    """Runs one side, and sends each result as soon as it is there, with the line that says it."""
    os.environ.update(_OF_SIDE.get(name, {}))
    import vllm
    from vllm import LLM

    _time_loading()
    any_weight = Options(options.format).any_zeros
    makes = given.get("load_format") == "dummy" and name == "macko"
    sparsity = 0.0 if any_weight or not makes else (options.sparsity or [0.5])[0]
    if makes:
        _fill_dummies(sparsity, getattr(torch, options.weights_dtype) if options.weights_dtype else None)
    side = Side(name, sparsity, None)
    longest = runs.longest(options) + _MORE
    # All prompts of a batch in one step, where they are not many tokens: decoding begins for all at once.
    prompts = min(max(options.batch) * options.prompt_tokens[0], 8192)
    on_gpu = torch.cuda.is_available()
    engine = {
        "dtype": options.dtype or ("float16" if on_gpu and not any_weight else "bfloat16"), "max_model_len": longest,
        "max_num_seqs": max(options.batch), "max_num_batched_tokens": max(longest, prompts, 2048),
        "enable_prefix_caching": False, "seed": 0, **SIDES[name], **given,
    }  # fmt: skip
    engine["hf_overrides"] = {**SIDES[name].get("hf_overrides", {}), **given.get("hf_overrides", {})}
    if name == "macko" and (asked := asked_of_macko(options)):
        engine["hf_overrides"]["macko"] = asked
    start = time.perf_counter()
    llm = LLM(folder, **engine)
    started = time.perf_counter() - start
    ranks = llm.apply_model(bytes_and_seconds)
    nbytes, loading = max(size for size, _ in ranks), max((each for _, each in ranks if each), default=None)
    if makes and loading is None:  # vLLM says what its ranks are, on a CPU for one
        raise RuntimeError("vLLM's ranks are no forks, so their random weights have no zeros: give a folder")
    weights = "" if loading is None else f"the weights took {loading:.1f} s, "
    print(f"{name}: {weights}all of starting {started:.1f} s", flush=True)
    about = {"engine": "vllm", "vllm": vllm.__version__, "engine_args": engine}
    config = llm.model_config.hf_text_config
    about |= {"layers": config.num_hidden_layers, "hidden": config.hidden_size}
    about |= {"weights_s": loading, "start_s": started}
    about |= runs.about_run(options, "source", "format", "values")
    about["weights_dtype"] = options.weights_dtype if makes else None  # other sides' dummies are vLLM's

    def send(result: Result, gpu: float | None) -> None:
        """gpu: the seconds of it that kernels ran; the rest is the engine's own, which few layers do not hide."""
        pipe.send((result, {**dataclasses.asdict(result), "gpu_ms": None if gpu is None else gpu * 1e3, **about}))

    for batch in options.batch:
        prompt, new = options.prompt_tokens[0], options.new_tokens
        more, less = (partial(generate, llm, batch, prompt, count) for count in (1 + new, 1))
        seconds, gpu = (
            None if found is None else found / new
            for found in (runs.difference(more, less, on_gpu), gpu_difference(llm, more, less))
        )
        send(runs.result(side, "decode", batch, prompt, batch, seconds, nbytes), gpu)
    for prompt in options.prompt_tokens:
        call = partial(generate, llm, 1, prompt, 1)
        seconds = min(runs.seconds(call, on_gpu, 3))
        send(runs.result(side, "prefill", 1, prompt, prompt, seconds, nbytes), gpu_seconds(llm, call))
    pipe.send((None, {**dataclasses.asdict(side), **_tokens(llm, options), **about}))


def _tokens(llm: Any, options: argparse.Namespace) -> Line:
    """A greedy continuation, and at each token how far the second most likely was: near 0, other sums may take that."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=options.new_tokens, ignore_eos=True, logprobs=2, detokenize=False)
    found = llm.generate(_prompts(1, options.prompt_tokens[0]), params, use_tqdm=False)[0].outputs[0]
    likely = (sorted((about.logprob for about in step.values()), reverse=True) for step in found.logprobs)
    margins = [round(first - second, 4) for first, second, *_ in likely]
    about = {"what": "tokens", "batch": 1, "prompt_tokens": options.prompt_tokens[0]}
    return {**about, "token_ids": list(found.token_ids), "margins": margins}


def generate(llm: Any, batch: int, prompt_tokens: int, new_tokens: int) -> Any:
    """Greedy tokens after so many prompts at once, and no fewer."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    return llm.generate(_prompts(batch, prompt_tokens), params, use_tqdm=False)


def gpu_seconds(llm: Any, call: Callable[[], Any]) -> float | None:
    """How long kernels ran while this was called, by torch's profiler, of the rank where that is longest: ranks may be
    processes of their own. None where there is no GPU."""
    if not torch.cuda.is_available():
        return None
    llm.apply_model(_start_profile)
    call()
    return max(llm.apply_model(_stop_profile))


def gpu_difference(llm: Any, longer: Callable[[], Any], shorter: Callable[[], Any]) -> float | None:
    """How much longer the GPU is busy with one call than with another; None where there is no GPU."""
    more, less = gpu_seconds(llm, longer), gpu_seconds(llm, shorter)
    return None if more is None or less is None else more - less


#: Of this rank, while it runs.
_profile: list[Any] = []


def _start_profile(_model: nn.Module) -> None:
    _profile[:] = [torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])]
    _profile[0].start()


def _stop_profile(_model: nn.Module) -> float:
    torch.cuda.synchronize()
    (profile := _profile.pop()).stop()
    return runs.busy_us(runs.gpu_events(profile)) / 1e6


def _prompts(batch: int, tokens: int) -> Any:
    return [{"prompt_token_ids": [(7 * i + j) % 400 + 3 for j in range(tokens)]} for i in range(batch)]


def _time_loading() -> None:
    """Lets vLLM note on each model how long its weights took from the files to the form that they are used in."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    load = BaseModelLoader.load_model

    def load_model(self: Any, *args: Any, **more: Any) -> nn.Module:
        start = time.perf_counter()
        model = load(self, *args, **more)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        model.macko_loading_s = time.perf_counter() - start
        return model

    BaseModelLoader.load_model = load_model


def bytes_and_seconds(model: Any) -> tuple[int, float | None]:
    """Bytes of all weights that the model holds, and the seconds that they took to load, if a fork of ours did it."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.nbytes for t in tensors.values()), getattr(model, "macko_loading_s", None)


def _fill_dummies(sparsity: float, dtype: torch.dtype | None) -> None:
    """Random weights of the right spread, so many of the smallest zero, in place of vLLM's dummies, which have none; of
    that dtype before they have the model's, if one is given."""
    from ..integrations import vllm, vllm_experts

    convert, stack, spread = vllm.convert_weight, vllm_experts.stack_of, 0.02
    threshold = spread * statistics.NormalDist().inv_cdf((1 + sparsity) / 2)

    def fill(weight: Tensor) -> Tensor:
        for part in weight if weight.dim() == 3 else [weight]:  # experts one by one: what this takes besides is theirs
            part.normal_(0, spread)
            if dtype is not None:
                part.copy_(part.to(dtype))
            part.mul_(part.abs() >= threshold)
        return weight

    vllm.convert_weight = lambda name, weight, *how: convert(name, fill(weight), *how)  # type: ignore[assignment]
    vllm_experts.stack_of = lambda weight, *how: stack(fill(weight), *how)  # type: ignore[assignment]
