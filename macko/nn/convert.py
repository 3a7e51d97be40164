"""sparsify_ and compress_: the linear layers of a model as SparseLinear, in place."""

from __future__ import annotations

import contextlib
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from tqdm.auto import tqdm

from ..choose.auto import (
    DENSE12_SHARE,
    choosable,
    counted_note,
    expected_us,
    not_dense12,
    pack,
    sparse11_note,
    us_of,
    worst_of,
)
from ..choose.options import VALUES, Options
from ..choose.patterns import density_of
from ..choose.slide import slide_note, slides
from ..weights import SLIDE_PATTERNS, Dense12Weight, PackedWeight, straddling
from .experts import (
    NOT_OFFLOADED,
    FoundExperts,
    SparseExperts,
    Stack,
    find_experts,
    is_experts,
    not_stacked,
    oriented,
    packed_rows,
    projections,
    replace,
)
from .find import Filter, FoundLinear, check_model, find_linears, tied_parameters, unpackable
from .linear import SparseLinear, unsupported, with_hooks
from .merge import merge_
from .offload import offloadable_
from .report import LayerReport, Report

#: Layers under this sparsity stay dense: with 2-bit gaps three quarters of the values take 0.84 of the dense bytes. One
#: token costs at least the reading of these bytes, so less than that is soon lost to a kernel's fixed costs.
MIN_SPARSITY = 0.25

#: By library, what is called with each model that sparsify_ has converted: macko.integrations put theirs here.
CONVERTED: dict[str, Callable[[nn.Module], None]] = {}

# Modules that hand a child's weight to a fused kernel in place of calling the child: it would be unpacked at each step.
_READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def sparsify_(
    model: nn.Module,
    *,
    format: str = "auto",
    ignore: Iterable[str] = ("lm_head",),
    filter_fn: Filter | None = None,
    min_sparsity: float | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    tokens: int | None = None,
    merge: bool | None = None,
    values: str = "exact",
    **old: Any,
) -> Report:
    """Replaces the linear layers that hold enough zeros by SparseLinear, in place, with the same outputs.

    Layer by layer: the peak of memory is the model and one dense layer more. All or nothing: when one layer fails, or
    the user interrupts, the model is as it was. A second call changes nothing. Converted weights are frozen; biases
    stay the Parameters they were, and hooks on a layer go with it.

    Args:
        model: any module that holds nn.Linear.
        format: a name in macko.FORMATS; "auto": what should take the least time where the layer is, dense too, chosen
            again when it moves; "smallest": the fewest bytes in memory, found by packing in every format; or "mixed":
            slide for layers of an n:m pattern where that is faster, else as "auto". A pattern may follow "slide" and
            "mixed", as "slide 6:8"; else it is the sparsest that a weight fits.
        ignore: layers to leave dense: full names, last components of names, or globs over full names. "lm_head" stands
            for the output heads of a model of transformers by any name, those of classifiers too.
        filter_fn: filter_fn(module, full name) says whether to convert a layer that ignore does not match; a mixture's
            experts are one module, without in_features.
        min_sparsity: layers with a smaller share of zeros stay dense, as do those that would not become smaller;
            default: 0 for format "slide", else 0.25. "dense12" does not look at zeros.
        device: where to pack each layer, and where the whole model is in the end; default: where it is.
        progress: show a bar when it takes more than a second.
        tokens: how many a layer gets at a time, if you know: 1 for one text that is written, the number of texts for
            several. "auto" chooses what is fastest for so many; on a GPU of compute capability 9.0 the default is as
            good for prompts, on a CPU it is for one.
        values: "exact" holds them in fewer bits where that keeps every one; "raw" leaves them as they are; "fp8" and
            "int8" round to 8 bits, which no default does. macko.choose.Options has more of this, and of tokens.
        merge: whether to pack q, k, v and gate, up as one matrix each (macko.merge_); default: on a GPU, where each
            launch counts.
        old: dtype and pattern, which are values and a part of format now; they go in macko 0.3.

    Returns:
        A Report: every nn.Linear, with its density, bytes, expected gain on this GPU, and why it was skipped.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512))
        >>> macko.prune_(model, 0.5)
        >>> print(macko.sparsify_(model))

    Raises:
        TypeError: the model is none, as a folder's name; or there is no such argument.
        ValueError: no such format; min_sparsity outside 0 to 1; tokens is no number from 1; a pattern that the format
            does not take; the model is itself an nn.Linear.
    """
    format, values = _as_now(format, values, old)
    options = Options(format, tokens, values=values)
    least = least_sparsity(options, min_sparsity)
    _refuse_one_layer(model, "sparsify_")
    convert = partial(convert_layer, options=options, min_sparsity=least)
    stack = partial(convert_experts, options=options, min_sparsity=least)
    found = find_linears(model, ignore, filter_fn), find_experts(model, ignore, filter_fn)
    report = _convert_all(model, *found, convert, stack, device, merge, progress)
    warn_if_unchanged(report, "sparsify_")
    return report


def _as_now(format: str, values: str, old: dict[str, Any]) -> tuple[str, str]:
    """format and values, with what sparsify_'s arguments of before 0.2 say of them."""
    if unknown := sorted(old.keys() - {"dtype", "pattern"}):
        raise TypeError(f"sparsify_() got an unexpected keyword argument {unknown[0]!r}")
    if (dtype := old.get("dtype")) is not None:
        if format not in ("slide", "mixed") or values not in ("exact", dtype):
            wanted = 'of formats "slide" and "mixed", without values'
            raise ValueError(f"dtype is {wanted}: format is {format!r}, values is {values!r}")
        warnings.warn(f"sparsify_(dtype={dtype!r}) is values={dtype!r} now", DeprecationWarning, stacklevel=3)
        values = dtype
    if (pattern := old.get("pattern", "auto")) != "auto":
        warnings.warn(
            f'sparsify_(pattern={pattern!r}) is format="{format} {pattern}" now', DeprecationWarning, stacklevel=3
        )
        format = f"{format} {pattern}"
    return format, values


#: Names of what compress_ packs of a pipeline begin so.
_COMPONENTS = ("transformer", "unet", "text_encoder")


def compress_(
    model: Any,
    *,
    ignore: Iterable[str] = (),
    filter_fn: Filter | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    tokens: int | None = None,
    merge: bool | None = None,
    copy_tied: bool = False,
    values: str = "exact",
    offload: bool = False,
) -> Any:
    """Holds the weights of a model's linear layers in fewer bytes, in place, zeros or none; lossless by default.

    Layers that hold enough zeros are packed as sparsify_ packs them, if that takes fewer bytes than 1.5 a weight. All
    others, lm_head too, are held in 12 bits an element: dense12 (docs/lossless.md), on GPUs on which it is faster than
    dense, as measured or by count. That is for bfloat16, and for float16 weights that were bfloat16 once, as those of
    Llama-2 were. Weights keep every bit, but for the sign of zeros where they are packed as sparse.
    Layers tied to an embedding and those too small to gain stay dense; the report says so. Otherwise as sparsify_.

    values="fp8" and "int8" round all weights to 8 bits with a scale a row instead, but on GPUs before 8.0: sparse8
    where layers hold enough zeros, else dense8.

    Args:
        model: any module that holds nn.Linear, or a pipeline of diffusers: its transformers or UNet, and its text
            encoders, one by one.
        filter_fn, device, progress, merge: as in sparsify_.
        ignore: layers to leave, as in sparsify_; none by default.
        tokens: as in sparsify_; dense12 is taken where it gains for so many.
        copy_tied: whether a layer that shares its weight with an nn.Embedding gets a copy of it as dense12. The
            embedding looks up single rows of the dense weight, the layer reads all of its own: so a token reads half a
            byte a weight less, and memory holds one and a half more. Training the embedding does not change the copy.
        values: "exact", "fp8" or "int8".
        offload: whether an offloader is to move the layers (macko.offloadable_): nothing is merged, and what is on the
            CPU is held in dense12 too.

    Returns:
        A Report: of a dense12 layer its note says what share of its weights is listed; a copy's bytes are with the
        dense weight's. Of a pipeline one of each component, by name.

    Raises:
        TypeError, ValueError: as sparsify_, and for other values; components of a pipeline before that stay packed.
    """
    options_of_all = {key: value for key, value in locals().items() if key != "model"}
    if not isinstance(model, nn.Module) and isinstance(parts := getattr(model, "components", None), dict):
        modules = {
            name: part for name, part in parts.items() if name.startswith(_COMPONENTS) and isinstance(part, nn.Module)
        }
        if not modules:
            raise ValueError(f"compress_: the {type(model).__name__} has no {', '.join(_COMPONENTS)} to pack")
        return {name: compress_(part, **options_of_all) for name, part in modules.items()}
    if values not in (expected := [name for name in VALUES if name != "raw"]):
        raise ValueError(f"values is {values!r}, expected one of {', '.join(expected)}")
    if copy_tied and values != "exact":
        raise ValueError(f'copy_tied is of values="exact", values is {values!r}')
    if merge and offload:
        raise ValueError("merge is of models that are not offloaded: leave it out, or offload")
    _refuse_one_layer(model, "compress_")
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    options = Options(tokens=tokens, values=values)
    convert = partial(_compress_layer, options=options, embedded=embedded, copy_tied=copy_tied, offload=offload)
    stack = partial(_compress_experts, options=options)
    merge = False if offload else merge
    found = find_linears(model, ignore, filter_fn), find_experts(model, ignore, filter_fn)
    for experts in found[1] if offload else ():
        experts.left_out = experts.left_out or NOT_OFFLOADED
    report = _convert_all(model, *found, convert, stack, device, merge, progress)
    warn_if_unchanged(report, "compress_")
    if offload:
        offloadable_(model)
    return report


def _refuse_one_layer(model: nn.Module, what: str) -> None:
    check_model(model, what)
    if is_experts(model):
        raise ValueError(f"{what} replaces modules in a model, this model is one of experts: give it what holds them")
    if isinstance(model, nn.Linear):
        raise ValueError(
            f"{what} replaces layers in a model, this model is one layer: use SparseLinear.from_linear(model)"
        )


def least_sparsity(options: Options, asked: float | None) -> float:
    """min_sparsity as asked for, or by default: slide gains by its kernel, other formats by zeros.

    Raises:
        ValueError: it is none.
    """
    if asked is None:
        return 0.0 if options.format == "slide" else MIN_SPARSITY
    if not isinstance(asked, (int, float)) or not 0 <= asked <= 1:
        raise ValueError(f"min_sparsity is {asked!r}, expected 0 to 1")
    return asked


def _convert_all(
    model: nn.Module,
    found: list[FoundLinear],
    found_experts: list[FoundExperts],
    convert: Callable[..., tuple[LayerReport, SparseLinear | None]],
    stack: Callable[..., tuple[list[LayerReport], SparseExperts | None]],
    device: torch.device | str | None,
    merge: bool | None,
    progress: bool,
) -> Report:
    """What became of all layers, converted in place; whatever stops it leaves the model as it was."""
    tied, device = tied_parameters(model), None if device is None else torch.device(device)
    rows = packed_rows(model)
    with contextlib.ExitStack() as undo:
        with tqdm(found, disable=not progress, delay=1, unit="layer", leave=False) as bar:
            for layer in bar:
                bar.set_description(layer.name, refresh=False)
                row, sparse = convert(layer, device=device, tied=tied)
                about = (row.shape, row.density, row.format, 0, 0, f"is {row.name}")
                rows += [row, *(LayerReport(name, *about) for name in layer.aliases)]
                if sparse is not None:
                    undo.callback(_replace(layer, sparse))
        for of_experts in found_experts:
            more, experts = stack(of_experts, device=device, tied=tied)
            rows += more
            if experts is not None:
                undo.callback(_replace_experts(model, of_experts, experts))
        if device is not None:
            _move(model, device, undo)
        if merge is None:
            merge = any(layer.device.type == "cuda" for layer in model.modules() if isinstance(layer, SparseLinear))
        if merge:
            found.clear()  # so that each layer's memory is free once it is part of a merged one
            layer = sparse = None  # type: ignore[assignment]
            merged = {name: [n for n in names if n != name] for names in merge_(model) for name in names}
            for row in rows:
                row.merged_with = merged.get(row.name, [])
        undo.pop_all()  # nothing is to be undone
    for converted in CONVERTED.values():
        converted(model)
    target = device or next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return Report(
        rows + unpackable(model, is_experts), notes=counted_note(torch.device(target), (row.us_after for row in rows))
    )


def warn_if_unchanged(report: Report, what: str) -> None:
    """Warns, with the commonest reason, where a conversion has left a model without any sparse layer."""
    if any(row.format != "dense" for row in report):
        return
    if not report.layers:
        warnings.warn(f"{what} changed nothing: the model has no linear layer", stacklevel=3)
        return
    kinds = [re.sub(r"[\d.,]+", "", row.reason) for row in report]  # as "it would take 80 bytes, dense 64"
    kind, count = Counter(kinds).most_common(1)[0]
    reason = report.layers[kinds.index(kind)].reason
    others = "all of them" if count == len(report) else f"{count} of them"
    warnings.warn(f"{what} changed none of {len(report)} layers, {others} because: {reason}", stacklevel=3)


def convert_layer(
    layer: FoundLinear,
    options: Options,
    min_sparsity: float,
    device: torch.device | None,
    tied: dict[int, list[str]],
) -> tuple[LayerReport, SparseLinear | None]:
    """The layer's row, and its replacement where there is one."""
    module = layer.module
    if row := _row_without_weight(layer, options):
        return row, None
    dense = module.weight.detach()
    size, target = dense.nbytes, device or dense.device
    row = LayerReport(layer.name, tuple(dense.shape), None, "dense", size, size)
    row.reason = layer.left_out or _why_not(module.weight, layer.name, options, target, tied)
    if not row.reason:
        dense = dense.to(target)
    row.density = density_of(dense)
    if row.density is None:
        return row, None
    us = expected_us(dense.shape[0], dense.shape[1], row.density, dense.dtype, target, options.layout_tokens)
    row.us_before = row.us_after = us.get("dense")
    row.reason = row.reason or _why_not_worth(dense, row.density, us, options, min_sparsity)
    packed = None if row.reason else _packed(dense, row, options)
    if packed is None:
        return row, None
    bias = module.bias
    if bias is not None and bias.device != packed.device:  # where "cuda" is cuda:0
        bias = nn.Parameter(bias.detach().to(packed.device), requires_grad=bias.requires_grad)
    sparse = SparseLinear.from_packed(packed, bias, options=options).train(module.training)
    with_hooks(sparse, module)
    row.format, row.bytes_after, row.us_after = packed.label, packed.nbytes, us_of(packed, us, options)
    if options.again:
        row.worst = worst_of(dense.shape[0], dense.shape[1], row.density, dense.dtype, target, packed.format)
    return row, sparse


def _compress_layer(
    layer: FoundLinear,
    options: Options,
    device: torch.device | None,
    tied: dict[int, list[str]],
    embedded: set[int],
    copy_tied: bool,
    offload: bool = False,
) -> tuple[LayerReport, SparseLinear | None]:
    """What convert_layer gives where that takes fewer bytes than dense12; else dense12 where it gains.

    In 8 bits: what convert_layer gives of any weight. embedded: ids of embeddings' weights, of which a layer may have a
    copy.
    """
    row, sparse = convert_layer(layer, options, 0.0 if options.in_bytes else MIN_SPARSITY, device, tied)
    if options.in_bytes:
        return row, sparse
    if sparse is not None and row.bytes_after < DENSE12_SHARE * row.bytes_before:
        return row, sparse
    if isinstance(layer.module, SparseLinear) or _weight_out_of_reach(layer):
        return row, None
    weight = layer.module.weight
    target, copied = device or weight.device, id(weight) in tied and id(weight) in embedded
    if layer.left_out or _why_not(weight, layer.name, options, target, {} if copied else tied):
        return row, None
    if reason := not_dense12(weight, None if offload and target.type == "cpu" else target, options.layout_tokens):
        row.reason = row.reason and reason
        return row, sparse
    if copied and not copy_tied:
        row.reason += "; copy_tied=True packs a copy"
        return row, None
    shorter, packed = convert_layer(layer, Options(Dense12Weight.format), 0.0, device, {} if copied else tied)
    if copied and packed:
        shorter.bytes_after += shorter.bytes_before
        shorter.note += ", a copy: the embedding holds it dense"
    return (row, sparse) if sparse and not packed else (shorter, packed)


def convert_weight(
    name: str,
    weight: Tensor,
    options: Options,
    min_sparsity: float,
    device: torch.device | None = None,
    left_out: str = "",
) -> tuple[LayerReport, SparseLinear | None]:
    """What convert_layer gives of a layer by itself, without a bias, for a weight that comes from a file.

    left_out: why it is to stay dense, if it is.
    """
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return convert_layer(FoundLinear(name, linear, [], [], left_out or None), options, min_sparsity, device, {})


def convert_experts(
    found: FoundExperts,
    options: Options,
    min_sparsity: float,
    device: torch.device | None,
    tied: dict[int, list[str]],
) -> tuple[list[LayerReport], SparseExperts | None]:
    """A row of each projection of an experts module, and what takes its place: all of it is packed, or nothing."""
    module, rows, stacks = found.module, [], {}
    for key in projections(module):
        w, parameter = oriented(module, key), module._parameters[key]
        row = LayerReport(f"{found.name}.{key}", tuple(w.shape), None, "dense", w.nbytes, w.nbytes, linear=False)
        rows.append(row)
        target = device or w.device
        row.reason = found.left_out or _experts_out_of_reach(module, key) or ""
        row.reason = row.reason or _why_not(parameter, row.name, options, target, tied) or not_stacked(options, target)  # type: ignore[arg-type]
        if row.reason or any(other.reason for other in rows):
            continue
        stacks[key] = stack_of(w.to(target), row, options, min_sparsity)
    if reason := next((f"{row.name.rpartition('.')[2]}: {row.reason}" for row in rows if row.reason), None):
        for row in rows:
            row.format, row.bytes_after, row.reason = "dense", row.bytes_before, row.reason or reason
        return rows, None
    return rows, SparseExperts(module, stacks)  # type: ignore[arg-type]  # without a reason none is None


def _experts_out_of_reach(module: nn.Module, key: str) -> str:
    """Why weights of experts alone do not say what they compute, or nothing."""
    if hasattr(module._parameters[key], "placements"):
        return "its weight is a DTensor: load the model with a macko.MackoConfig, which packs what each process gets"
    if "forward" in vars(module):
        return "its forward has been replaced"
    return ""


def stack_of(w: Tensor, row: LayerReport, options: Options, min_sparsity: float) -> Stack | None:
    """[experts, rows, cols] packed, and the row filled in; None where it does not pay, and the row says why."""
    row.density = density_of(w.reshape(-1, w.shape[2]))
    if row.density is not None and 1 - row.density < min_sparsity and not options.any_zeros:
        row.reason = f"under {min_sparsity:.0%} sparse it would not pay"
        return None
    try:
        stack = Stack.from_dense(w, options)
    except ValueError as error:
        row.reason = str(error)
        return None
    if stack.packed.nbytes >= row.bytes_before:
        row.reason = f"as {stack.packed.format} it would take {stack.packed.nbytes} bytes, dense {row.bytes_before}"
        return None
    row.format, row.bytes_after, row.note, row.linear = stack.packed.label, stack.packed.nbytes, stack.packed.note, True
    return stack


def _compress_experts(
    found: FoundExperts, options: Options, device: torch.device | None, tied: dict[int, list[str]]
) -> tuple[list[LayerReport], SparseExperts | None]:
    """What convert_experts gives where that takes fewer bytes than dense12; else dense12 where it gains."""
    rows, sparse = convert_experts(found, options, MIN_SPARSITY, device, tied)
    after, before = (sum(getattr(row, name) for row in rows) for name in ("bytes_after", "bytes_before"))
    if found.left_out or options.in_bytes or (sparse is not None and after < DENSE12_SHARE * before):
        return rows, sparse
    weight = oriented(found.module, projections(found.module)[0])
    if reason := not_dense12(weight, device or weight.device):
        for row in rows:
            row.reason = row.reason and reason
        return rows, sparse
    shorter, packed = convert_experts(found, Options(Dense12Weight.format), 0.0, device, tied)
    return (rows, sparse) if sparse and not packed else (shorter, packed)


def _replace_experts(model: nn.Module, found: FoundExperts, sparse: SparseExperts) -> Callable[[], None]:
    """Puts packed experts in the place of dense ones; returns what undoes it. The dense ones are let go."""
    dense = weakref.ref(found.module)
    trainable = [name for name in projections(sparse) if found.module._parameters[name].requires_grad]  # type: ignore[union-attr]
    replace(model, {found.module: sparse})
    found.module = sparse

    def undo() -> None:
        kept = dense()
        if kept is None:
            kept = sparse.to_dense()
            for name in trainable:
                kept._parameters[name].requires_grad_()  # type: ignore[union-attr]
        replace(model, {sparse: kept})

    return undo


def _row_without_weight(layer: FoundLinear, options: Options) -> LayerReport | None:
    """The row of a layer that has no dense weight to look at; None for any other."""
    module = layer.module
    if isinstance(module, SparseLinear):
        size, shape = module.packed.nbytes, tuple(module.packed.shape)
        density = None if module.device.type == "meta" else module.packed.density
        return LayerReport(layer.name, shape, density, module.format, size, size, "is sparse already")
    if reason := _weight_out_of_reach(layer):
        shape = (module.out_features, module.in_features)
        size = sum(p.nbytes for p in module.parameters() if not is_lazy(p) and p.dim() == 2)
        if options.format == "slide":
            reason = _refused_shards(module.weight, options.pattern) or reason
        return LayerReport(layer.name, shape, None, "dense", size, size, layer.left_out or reason)
    return None


def _why_not(weight: Tensor, layer: str, options: Options, target: torch.device, tied: dict[int, list[str]]) -> str:
    """Why a weight is not looked at, or nothing."""
    if weight.device.type == "meta":
        return "its weight is on the meta device"
    if id(weight) in tied:
        return f"its weight is shared with {', '.join(name for name in tied[id(weight)] if name != f'{layer}.weight')}"
    return unsupported(weight.dtype, target) or options.not_on(target, weight.dtype)


def _why_not_worth(dense: Tensor, density: float, us: dict[str, float], options: Options, min_sparsity: float) -> str:
    """Why a weight is not packed, or nothing: of what is known before it is."""
    if 1 - density < min_sparsity and not options.any_zeros:
        return f"under {min_sparsity:.0%} sparse it would not pay"
    sparse_us = choosable(us)
    if (
        options.again
        and not options.in_bytes
        and sparse_us
        and min(sparse_us.values()) >= us.get("dense", float("inf"))
        and not (options.may_slide and slides(dense, options))
    ):
        best = min(sparse_us, key=sparse_us.__getitem__)
        many = f"{options.layout_tokens} tokens" if (options.layout_tokens or 1) > 1 else "a token"
        return f"dense is as fast here: {us['dense']:.1f} us {many}, as {best} {sparse_us[best]:.1f} us"
    return ""


def _packed(dense: Tensor, row: LayerReport, options: Options) -> PackedWeight | None:
    """The packed weight, if it is smaller; else None, and the row says why."""
    try:
        packed = pack(dense, options)
    except ValueError as error:  # the format does not hold every weight
        row.reason = str(error)
        return None
    if packed.nbytes >= row.bytes_before and options.again and not packed.keeps_format:
        packed = packed.to_macko()  # a layout fills up small weights to whole blocks
    row.note = slide_note(dense, packed, options) or sparse11_note(packed, options)
    if packed.nbytes < row.bytes_before:
        row.note = packed.note or row.note
        return packed
    row.reason = row.note or f"as {packed.format} it would take {packed.nbytes} bytes, dense {row.bytes_before}"
    return None


def _weight_out_of_reach(layer: FoundLinear) -> str | None:
    """Why this layer's weight alone does not say what the layer computes, or None."""
    module = layer.module
    if parametrize.is_parametrized(module):
        return "it is parametrized: call torch.nn.utils.parametrize.remove_parametrizations first"
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is a subclass of nn.Linear and may do something else"
    if "weight" not in module._parameters:
        return "a hook makes its weight: call torch.nn.utils.prune.remove (or remove_weight_norm) first"
    if type(module.weight) is not nn.Parameter:
        return f"its weight is a {type(module.weight).__name__}"
    forward = vars(module).get("forward")  # its own where accelerate has taken a hook away
    if forward is not None and getattr(forward, "__func__", None) is not nn.Linear.forward:
        return "its forward has been replaced"
    if layer.changed:
        return layer.changed
    for parent, _ in layer.places:
        if isinstance(parent, _READ_THEIR_CHILDREN):
            return f"{type(parent).__name__} reads its weight itself"
    return None


def check_shards(cols: int, shards: int, pattern: str) -> None:
    """Whether a weight's columns can be cut into equal shards (as torch.chunk does) without cutting a group.

    A pattern is kept by a shard where its groups are those of the whole weight: slide after sharding.

    Raises:
        ValueError: a group straddles two shards: names them; or there is no such pattern.
    """
    if pattern not in SLIDE_PATTERNS:
        raise ValueError(f"pattern is {pattern!r}, expected one of {', '.join(SLIDE_PATTERNS)}")
    if group := group_between(cols, shards, pattern):
        raise ValueError(group)


def group_between(cols: int, shards: int, pattern: str) -> str:
    """The group of a pattern that equal shards of a weight's columns would cut, and where, or nothing."""
    width = -(-cols // max(1, shards))
    for shard in range(1, shards):
        start = min(shard * width, cols)
        if group := straddling(cols, start, SLIDE_PATTERNS[pattern]):
            return f"{group} straddles shards {shard - 1} and {shard} of {shards}, which meet at column {start}"
    return ""


def _refused_shards(weight: Tensor, pattern: str) -> str | None:
    """Why a DTensor is no weight to pack, or None for any other tensor."""
    placements, mesh = getattr(weight, "placements", None), getattr(weight, "device_mesh", None)
    if placements is None or mesh is None:
        return None
    for dim, placement in enumerate(placements):
        is_cut = placement.is_shard(1) and pattern != "auto"
        if is_cut and (group := group_between(weight.shape[1], mesh.size(dim), pattern)):
            return group
    return "its weight is a DTensor: pack the shard, to_local(), in a layer of its own"


def _replace(layer: FoundLinear, sparse: SparseLinear) -> Callable[[], None]:
    """Puts the sparse layer in every place of the dense one; returns what undoes it.

    The dense module is let go, so that its memory is free for the next layer. Undoing takes it back where somebody else
    still holds it; else it is made again from the packed weight, or where that is rounded from a copy on the CPU.
    """
    places = layer.places
    module, weight = weakref.ref(layer.module), weakref.ref(layer.module.weight)
    bias, trainable, home = layer.module.bias, layer.module.weight.requires_grad, layer.module.weight.device
    copy = None if sparse.packed.lossless else layer.module.weight.detach().cpu()
    for parent, attribute in places:
        setattr(parent, attribute, sparse)
    layer.module = sparse  # let go

    def undo() -> None:
        dense = module()
        if dense is None:
            now = getattr(*places[0])  # not held here: merging lets it go
            dense = now.to_linear()
            kept = weight()
            again = dense.weight if copy is None else copy
            dense.weight = nn.Parameter(again.to(home), trainable) if kept is None else kept
            dense.register_parameter("bias", bias)
            with_hooks(dense, now)
        for parent, attribute in places:
            setattr(parent, attribute, dense)

    return undo


def _move(model: nn.Module, device: torch.device, undo: contextlib.ExitStack) -> None:
    """model.to(device), undone by `undo`."""
    homes: list[tuple[Any, str, Tensor, Tensor]] = []
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            homes += [(tensors, name, t, t.data) for name, t in tensors.items() if t is not None]

    def back() -> None:
        for tensors, name, tensor, data in homes:
            tensor.data = data
            tensors[name] = tensor

    undo.callback(back)
    model.to(device)
    homes[:] = [home for home in homes if home[0][home[1]] is not home[2] or home[2].data_ptr() != home[3].data_ptr()]
