"""`macko bench`: a transformers model dense against sparse, in one process, one model held at a time."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..choose.auto import multiplies_codes
from ..choose.options import Options
from ..choose.patterns import density_of
from ..files import check_whole
from ..fuse import Fuse
from ..nn.convert import MIN_SPARSITY, sparsify_
from ..nn.experts import PackedStack, SparseExperts, find_experts, is_experts, oriented, projections
from ..nn.find import IGNORED, find_linears
from ..nn.linear import SparseLinear
from ..nn.merge import split_
from ..nn.report import Report
from ..pruning.prune import prune_
from ..weights.codes import KINDS
from . import reference, runs
from .rivals import replace_
from .runs import Line, Result, Side

#: How generate() compiles the step of one token, by the value of --compile; each with CUDA graphs.
COMPILED: dict[str, dict[str, Any]] = {
    "default": {},  # what generate() does by itself with a static cache
    # Kernels begin before the one before them has ended; the model's 300 to 900 tensors are not checked at every token.
    "fast": {"triton.enable_pdl": True, "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe},
}
#: And dense products of one token by kernels that are searched for, which takes longer to compile.
COMPILED["max"] = {**COMPILED["fast"], "coordinate_descent_tuning": True}
#: What "fast" and "max" have besides where layers are sparse, so that both sides are at their best: norms and sums in
#: the products, which Inductor's dense products have by themselves, and small kernels put together. What the latter do
#: to dense was not measured on a quiet host.
FOR_SPARSE: dict[str, Any] = {"post_grad_custom_pre_pass": Fuse(), "combo_kernels": True}


def run(options: argparse.Namespace, source: str, measuring: Callable[..., list[Result]] | None = None) -> None:
    """Loads, prunes where asked, times dense, converts, times sparse at each sparsity, and prints all.

    Args:
        options: what macko bench was told.
        source: the folder of the model, or random: with a size.
        measuring: what to do instead of measure_all, for a benchmark that looks at other things.

    Raises:
        ValueError: an option is of no use, before anything is timed; or no layer is sparse enough.
    """
    runs.check(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := Options(options.format).not_on(device):
        raise ValueError(f"--format {reason}, models are timed on {device.type} here")
    if options.compile is None:
        options.compile = "default" if device.type == "cuda" else "no"
    if options.merge is None:
        options.merge = device.type == "cuda"  # as sparsify_
    any_weight = Options(options.format).any_zeros
    dtype = getattr(torch, options.dtype or ("float16" if device.type == "cuda" and not any_weight else "bfloat16"))
    model = _load(source, device, dtype, options.weights_dtype)
    prunes = options.source[:7] == "random:" and not any_weight
    sparsities: list[float | None] = sorted(options.sparsity or ([0.5] if prunes else []))
    runs.set_lengths(options, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    prompts = _prompts(options, model).to(device)
    results: list[Result] = []
    about = runs.about_run(options, "source", "format", "values", "merge", "compile", "new_tokens", "weights_dtype")
    about |= {"dtype": str(dtype).removeprefix("torch.")}

    def measure(model: Any, side: Side, lines: list[Line]) -> None:
        """Also writes the lines at once: what comes after may fail."""
        torch._dynamo.reset()  # what was compiled for the model before holds memory
        gc.collect()
        torch.cuda.empty_cache()
        found = (measuring or measure_all)(side, model, prompts, options, lines)
        results.extend(found)
        runs.append(options.json, ({**line, **about} for line in (*lines, *map(dataclasses.asdict, found))))

    for index, sparsity in enumerate(sparsities or [None]):
        _make_dense(model)
        if sparsity:
            prune_(model, sparsity)
        dense_logits, dense_bits = _logits(model, prompts[:1]), _bits(model)
        if not (any_weight or options.values in KINDS or _has_zeros(model)):
            _convert(model, options)  # which says why no layer can be packed, before dense is timed
            _make_dense(model)
        if index == 0:
            measure(model, Side("dense", 0.0, None), [])
        _make_dense(model)
        report = _convert(model, options)
        zeros, weights = Report(report.changed).zeros
        side = Side(options.format if any_weight else "sparse", round(zeros / weights, 3), options.tokens)
        logits = _logits(model, prompts[:1])
        error, largest = (logits - dense_logits).abs().max().item(), dense_logits.abs().max().item()
        print(str(report).splitlines()[-1])
        print(f"{side}, logits: {error:.3g} apart at most, the largest is {largest:.3g} ({dtype})")
        worst = check_layers(model, prompts[:1], (*options.batch, 128), dense_bits)
        print(f"{side}, {_verdict(worst)}", flush=True)
        line = {"what": "logits", **dataclasses.asdict(side), "error": error, "largest": largest, "layers": worst}
        measure(model, side, [line])
    del model
    for name in options.against:
        measure(_rival(name, source, device, dtype, prompts, options), Side(name, 0.0, None), [])
    if results:
        print(runs.table(results))


def _has_zeros(model: Any) -> bool:
    """Whether some layer is likely to be packed."""
    found = [layer.module.weight for layer in find_linears(model, IGNORED, None) if not layer.left_out]
    for experts in find_experts(model, IGNORED, None):
        found += [oriented(experts.module, key)[0] for key in projections(experts.module)]
    return any((density_of(weight.detach()) or 0.0) <= 1 - MIN_SPARSITY for weight in found)


def _rival(
    name: str, source: str, device: torch.device, dtype: torch.dtype, prompts: Tensor, options: argparse.Namespace
) -> Any:
    """The model, not pruned, with a rival's layers; says how many, and how far its logits are from the dense ones."""
    model = _load(source, device, dtype, options.weights_dtype)
    before, layers = _logits(model, prompts[:1]), replace_(model, name)
    error = (_logits(model, prompts[:1]) - before).abs().max().item()
    print(f"{name}, {layers} layers, logits: {error:.3g} apart at most, the largest is {before.abs().max():.3g}")
    return model


def _convert(model: Any, options: argparse.Namespace) -> Report:
    """sparsify_ as asked for; where zeros do not count lm_head too. ValueError where nothing changes."""
    ignore = () if Options(options.format).any_zeros else IGNORED
    how = {
        "format": options.format,
        "merge": options.merge,
        "tokens": options.tokens,
        "values": options.values or "exact",
    }
    report = sparsify_(model, ignore=ignore, **how)
    if not report.changed and not ignore:
        raise ValueError(f"{options.source}: {report.layers[0].reason}")
    if not report.changed:
        reasons = "; ".join(dict.fromkeys(layer.reason for layer in report.layers if layer.reason))
        raise ValueError(f"{options.source} has no layer to pack: {reasons or 'it has none that is linear'}")
    return report


def _prompts(options: argparse.Namespace, model: Any) -> Tensor:
    """As many tokens as the longest run needs, [batch, prompt]."""
    prompts = torch.arange(max(options.batch) * max(options.prompt_tokens)).view(max(options.batch), -1)
    return prompts * 7919 % model.config.vocab_size


def measure_all(
    side: Side, model: Any, prompts: Tensor, options: argparse.Namespace, lines: list[Line]
) -> list[Result]:
    """Decoding at every batch size after the first prompt length, the prefill of one sequence at every length; each is
    printed once it is known."""
    first, results = options.prompt_tokens[0], []
    decoding = (_decode(side, model, prompts[:batch, :first], options) for batch in options.batch)
    for result in itertools.chain(
        decoding, (_prefill(side, model, prompts[:1, :count]) for count in options.prompt_tokens)
    ):
        runs.show([result])
        results.append(result)
    return results


def generate(model: Any, prompts: Tensor, new_tokens: int, compiled: str, **more: Any) -> None:
    """Greedily, whatever ends a text; compiled as --compile says. more: of model.generate()."""
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **more}
    if compiled == "no":
        settings["disable_compile"] = True
    else:
        settings["cache_implementation"] = "static"
        if options := COMPILED[compiled]:
            from transformers import CompileConfig

            sparse = any(isinstance(module, (SparseExperts, SparseLinear)) for module in model.modules())
            options = {"triton.cudagraphs": True, **options, **(FOR_SPARSE if sparse else {})}
            settings["compile_config"] = CompileConfig(mode=None, options=options)  # type: ignore[arg-type]
    model.generate(prompts, max_new_tokens=new_tokens, **settings)


def _decode(side: Side, model: Any, prompts: Tensor, options: argparse.Namespace) -> Result:
    """A token after the first is what a long generation takes beyond one of a single token, over their number."""
    counts = (1 + options.new_tokens, 1)
    longer, shorter = (partial(generate, model, prompts, count, options.compile) for count in counts)
    longer()  # compiles, which takes memory of its own
    if prompts.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = runs.difference(longer, shorter, prompts.is_cuda)
    per_token = None if seconds is None else seconds / options.new_tokens
    return runs.result(side, "decode", len(prompts), prompts.shape[1], len(prompts), per_token, _peak(prompts))


def _peak(prompts: Tensor) -> int | None:
    return torch.cuda.max_memory_allocated() if prompts.is_cuda else None


def _prefill(side: Side, model: Any, prompts: Tensor) -> Result:
    """What generate() does before its first token: not compiled. A GPU waits for the host there, so of many calls."""
    if prompts.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        calls = 30 if prompts.is_cuda else 6
        seconds = min(runs.seconds(lambda: model(prompts, logits_to_keep=1), prompts.is_cuda, calls))
    return runs.result(side, "prefill", 1, prompts.shape[1], prompts.shape[1], seconds, _peak(prompts))


def _make_dense(model: Any) -> None:
    """The model's sparse layers as dense ones again, one by one."""
    split_(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, SparseLinear):
            model.set_submodule(name, module.to_linear())
        elif isinstance(module, SparseExperts):
            model.set_submodule(name, module.to_dense())


def _logits(model: Any, prompt: Tensor) -> Tensor:
    with torch.no_grad():
        return model(prompt[:, :128]).logits.float().cpu()


def _bits(model: nn.Module) -> dict[str, Tensor]:
    """Of the weight of each linear layer and of all experts the sums of its bits by column and by row."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found[name] = _sums_of_bits(module.weight.detach().as_subclass(Tensor))
        elif is_experts(module):
            found |= {f"{name}.{key}": _sums_of_bits(oriented(module, key)) for key in projections(module)}
        elif isinstance(module, SparseExperts):
            found |= {f"{name}.{key}": _sums_of_bits(s.to_dense()) for key, s in module.packed_stacks().items()}
    return found


def _sums_of_bits(weight: Tensor) -> Tensor:
    """What tells weights apart, [..., rows, cols]."""
    weight = weight + 0  # -0.0, which no format keeps, is 0.0
    bits = weight.view(torch.int16 if weight.element_size() == 2 else torch.int32)
    return torch.cat((bits.sum(-2).flatten(), bits.sum(-1).flatten())).cpu()


def check_layers(model: nn.Module, prompt: Tensor, tokens: Iterable[int], dense_bits: dict[str, Tensor]) -> list[Line]:
    """Each sparse layer against its dense twin, on what it is given in the model for these numbers of tokens.

    Of experts each projection, with the first, the last and the busiest of those that have tokens.

    A bound on logits, through every layer, would be too wide to say anything. But nothing changes beside the layers: so
    each weight has to be the twin's bit for bit, unless it was rounded to 8 bits, and each output within what rounding
    explains (reference.linear) of the float64 product of the same input. One token is a kernel of macko's, of several
    the sums may be torch's. One layer is dense at a time.

    Returns:
        For each number of tokens the largest difference over its bound, "of_bound", and the layer where it is.

    Raises:
        ValueError: a weight is another one than in dense_bits, which is from `_bits` of the dense model.
    """
    rounded = {n for n, m in model.named_modules() if isinstance(m, SparseLinear) and not m.packed.lossless}
    for name, bits in _bits(model).items():
        if name not in rounded and not torch.equal(bits, dense_bits[name]):
            raise ValueError(f"{name}: the packed weight is not the dense one")
    worst: list[Line] = []

    def compare(name: str, layer: SparseLinear, x: Tensor, y: Tensor) -> None:
        packed = layer.packed
        weight = layer.weight.as_subclass(Tensor)
        if x.is_cuda and multiplies_codes(x.device, x[..., 0].numel()):
            weight = packed.unrounded()
        x, weight = packed.multiplied(x) or (x, weight)
        judge(name, x, weight, layer.bias, y, packed.cuts(x))

    def compare_experts(
        name: str,
        part: PackedStack,
        y: Tensor,
        x: Tensor,
        ends: Tensor,
        order: Tensor | None = None,
        top_k: int = 1,
        gated: bool = False,
    ) -> None:
        if order is not None:
            x = x[order // top_k]
        if gated:  # by torch, whose exp is another one: the product alone is judged
            gate, up = x.chunk(2, -1)
            x = nn.functional.silu(gate) * up
            y = part.forward(x, ends)
        begins, weights = [0, *ends.tolist()], part.stack.to_dense()
        counts = [end - begin for begin, end in itertools.pairwise(begins)]
        some = [e for e, count in enumerate(counts) if count]
        for e in {*some[:1], *some[-1:], *([max(some, key=counts.__getitem__)] if some else [])}:
            here = slice(begins[e], begins[e + 1])
            judge(name, x[here], weights[e], None, y[here])

    def judge(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, cuts: int = 0) -> None:
        wanted, bound = reference.linear(x, weight, bias, y.dtype, by_torch=x[..., 0].numel() > 1, cuts=cuts)
        # Inf on both sides is no difference; NaN, and Inf on one side, are over every bound.
        same = y.isinf() & (y == wanted.to(y.dtype))
        off = torch.where(same, 0.0, (y - wanted).abs() / bound).nan_to_num(nan=torch.inf)
        of_bound = off.max().item()
        if of_bound >= worst[-1]["of_bound"]:
            worst[-1] |= {"of_bound": of_bound, "layer": name}

    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for name, layer in model.named_modules():
            if isinstance(layer, SparseLinear):
                hook = layer.register_forward_hook(lambda layer, args, y, name=name: compare(name, layer, args[0], y))
                hooks.enter_context(hook)
            elif isinstance(layer, PackedStack):
                hook = layer.register_forward_hook(
                    lambda part, args, y, name=name: compare_experts(name, part, y, *args)
                )
                hooks.enter_context(hook)
        for count in sorted({min(count, prompt.shape[1]) for count in tokens}):
            worst.append({"tokens": count, "of_bound": 0.0})
            model(prompt[:, :count], use_cache=False)
    return worst


def _verdict(worst: list[Line]) -> str:
    """What check_layers found, for people; the lines of --json have each number of tokens."""
    largest = max(worst, key=lambda found: found["of_bound"])
    tokens = f"{largest['tokens']} token{'s' if largest['tokens'] > 1 else ''}"
    if "layer" not in largest:
        return "outputs of each layer equal to dense but for rounding: NOT KNOWN, no packed layer was called"
    outcome = "yes" if largest["of_bound"] <= 1 else "NO, THEY ARE WRONG"
    where = f"worst {largest['of_bound']:.2g} of the bound, at {tokens}, {largest['layer']}"
    return f"outputs of each layer equal to dense but for rounding: {outcome} ({where})"


def _load(source: str, device: torch.device, dtype: torch.dtype, weights_dtype: str | None) -> Any:
    """A checkpoint, or a model of random weights, that were of weights_dtype before where that is given."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    if not source.startswith("random:"):
        dense, loaded = auto.from_pretrained(source, dtype=dtype, output_loading_info=True)
        check_whole(dense, loaded["missing_keys"], loaded["unexpected_keys"], source)
        return dense.to(device).eval()
    config = runs.random_config(source, dtype=dtype)  # which transformers before 5.9 does not note by itself
    torch.manual_seed(0)
    with device, torch.no_grad():
        model = auto.from_config(config, dtype=dtype).eval()
        if weights_dtype:
            for parameter in model.parameters():
                parameter.copy_(parameter.to(getattr(torch, weights_dtype)))
    return model
