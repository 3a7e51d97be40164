"""Features where they meet: random sequences of what a user does to a model, beside a dense twin of torch's layers.

After every step the model is its twin: the same weights bit for bit (but for the sign of zeros), exact outputs where
all is small integers, the format that was asked for, the same ties, shared modules and biases, the same hooks. What is
refused is refused with a ValueError, a TypeError or what nn.Module.load_state_dict raises, and leaves all as it was.

A failure prints the shortest steps found, which `play` runs again. For thousands of new ones:

    python -m pytest tests/test_sequences.py --hypothesis-profile=long
"""

import contextlib
import copy
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import macko
from macko import SparseLinear
from macko.choose.auto import pack
from macko.choose.options import Options
from macko.measure import reference
from macko.nn import convert
from macko.nn.linear import HOOKS
from macko.nn.merge import MergedLinear
from macko.weights import FORMATS, ByteWeight
from tests.common import CPU_DTYPES, random_weight

F16, BF16, F32 = CPU_DTYPES
#: Rows, columns, density or pattern, whether values are small integers, bias. Widths of 256 and odd ones: with the odd
#: ones formats of blocks fill up more than they save.
LAYERS: dict[str, tuple[int, int, float | str, bool, bool]] = {
    "0.q_proj": (65, 257, 0.3, True, False),
    "0.k_proj": (33, 257, 0.4, False, False),
    "0.v_proj": (33, 257, 0.5, True, False),
    "0.gate_proj": (48, 257, 0.1, True, False),
    "0.up_proj": (48, 257, 0.6, True, False),
    "0.down_proj": (65, 257, 0.3, True, True),
    "1.q_proj": (64, 256, "2:4", True, False),
    "1.k_proj": (64, 256, "2:4", True, False),
    "1.v_proj": (64, 256, "6:8", False, False),
    "1.gate_proj": (64, 256, 1.0, True, False),
    "1.up_proj": (64, 256, 0.5, True, False),
    "1.down_proj": (65, 256, 0.4, False, True),
    "lm_head": (64, 256, 0.3, True, False),  # tied to the embedding
    "tied": (64, 256, 0.3, True, True),
    "too": (64, 256, 0.3, True, False),
}
NAMES = tuple(LAYERS)
#: Layers that share no parameter: they may be of another dtype than the others.
APART = ("0.q_proj", "0.v_proj", "0.gate_proj", "1.q_proj", "1.v_proj", "1.up_proj")
#: Layers that hang in a second place of the model.
ALIASES = {"1.again": "0.down_proj"}
#: What files hold of them is canonical.
CHOSEN = ("macko", "bitmap")


def fresh_twin() -> nn.Module:
    """The dense model, in float32, with all that is shared."""
    twin: Any = nn.Module()
    twin.register_module("0", nn.Module())
    twin.register_module("1", nn.Module())
    for seed, (name, (rows, cols, density, integers, bias)) in enumerate(LAYERS.items()):
        layer = nn.Linear(cols, rows, bias=bias)
        w = random_weight(rows, cols, density if isinstance(density, float) else 1.0, F32, seed=seed)
        if isinstance(density, str):
            kept, size = map(int, density.split(":"))
            w.view(rows, -1, size)[..., kept:] = 0
        if integers:
            w = w.sign() * (1 + (w.abs() > 0.7))
        else:
            w[0, ::3] *= 2.0**-30  # zeros in float16
        layer.weight = nn.Parameter(w)
        if bias:
            layer.bias = nn.Parameter(torch.arange(rows) % 5 - 2.0)
        put(twin, name, layer)
    for alias, name in ALIASES.items():
        twin.set_submodule(alias, twin.get_submodule(name))
    twin.get_submodule("1.down_proj").bias = twin.get_submodule("0.down_proj").bias
    twin.embed = nn.Embedding.from_pretrained(twin.lm_head.weight.detach(), freeze=False)
    twin.lm_head.weight = twin.embed.weight
    twin.too.weight = twin.tied.weight
    return twin


def on_meta(model: nn.Module) -> nn.Module:
    """The model there, with the ties that .to() loses."""
    ties = ids_to_names(model.named_parameters(remove_duplicate=False))
    model = model.to("meta")
    for first, *others in ties:
        for other in others:
            parent, _, last = other.rpartition(".")
            model.get_submodule(parent).register_parameter(last, model.get_parameter(first))
    return model


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Puts a layer at its name and wherever else it hangs."""
    for place in (name, *(alias for alias, of in ALIASES.items() if of == name)):
        parent, _, last = place.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)


def ids_to_names(pairs: Iterator[tuple[str, Any]]) -> set[tuple[str, ...]]:
    groups: dict[int, list[str]] = {}
    for name, one in pairs:
        groups.setdefault(id(one), []).append(name)
    return {tuple(group) for group in groups.values()}


def whole_of(layer: nn.Module) -> nn.Module:
    """What holds the packed tensors."""
    return layer._whole if isinstance(layer, MergedLinear) else layer


def contents(model: nn.Module) -> Any:
    """All that a failure must leave as it is, comparable, with no reference to the model's tensors."""
    tensors: dict[str, Any] = {}
    about: dict[str, Any] = {}
    wholes: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        whole = whole_of(module)
        first = wholes.setdefault(id(whole), name)
        options = [getattr(one, "_options", None) for one in (module, whole)]
        about[name] = (type(module).__name__, module.training, first, getattr(whole, "_format", None), options)
        about[name] += (getattr(whole, "_sizes", None), hooks_of(module))
        for key, tensor in (*module._parameters.items(), *whole._buffers.items()):
            if tensor is not None:
                data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                tensors[f"{name}.{key}"] = (tensor.dtype, tuple(tensor.shape), tensor.requires_grad, data)
    ties = ids_to_names((n, p) for n, p in model.named_parameters(remove_duplicate=False))
    return tensors, about, ties


def hooks_of(module: nn.Module) -> list[Any]:
    """How many hooks of each kind there are."""
    held = [vars(module)[name] for name in HOOKS]
    return [len(hooks) if isinstance(hooks, dict) else hooks for hooks in held]


def held(format: str, weight: Tensor) -> bool:
    """Whether a format that runs here holds a weight."""
    try:
        return not Options(format).not_on(weight.device) and bool(pack(weight, Options(format)))
    except ValueError:
        return False


def integers(cols: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """x of so few that products with the integer weights stay below 256 and are exact in every type."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randint(1, 3, (tokens, cols), generator=generator) * torch.tensor([1, -1])[torch.arange(cols) % 2]
    few = torch.rand(tokens, cols, generator=generator).argsort(1) < 20
    return torch.where(few, x, 0).to(dtype)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same x with other strides."""
    if layout == "columns":
        return x.t().contiguous().t()
    if layout == "gaps":
        return torch.stack([x, x + 1], -1).flatten(1)[:, ::2]
    if layout == "3d":
        return x[:, None]
    return x


class Refused(Exception):
    """A step that was refused, as it has to be: the next one begins where this one did."""


class Pair:
    """The model, its twin, and what they have to agree on besides what both say."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        self.twin: Any = fresh_twin().to(dtype)
        self.model: Any = copy.deepcopy(self.twin)
        #: Of layers in 8 bits: codes times scales in float32. They are rounded once.
        self.rounded: dict[str, Tensor] = {}
        #: Of packed layers: the format that was asked for, or None where it is chosen.
        self.wanted: dict[str, str | None] = {}

    # ---- What has to hold

    def check(self) -> None:
        model, twin = self.model, self.twin
        assert [n for n, _ in model.named_modules(remove_duplicate=False)] == [
            n for n, _ in twin.named_modules(remove_duplicate=False)
        ]
        assert ids_to_names(model.named_modules(remove_duplicate=False)) == ids_to_names(
            twin.named_modules(remove_duplicate=False)
        )
        layers = {name: model.get_submodule(name) for name in NAMES}
        packed = {name for name, layer in layers.items() if isinstance(layer, SparseLinear)}
        assert packed == set(self.wanted)
        no_parameters = {f"{name}.weight" for name in (*packed, *(a for a, of in ALIASES.items() if of in packed))}
        others = [(n, p) for n, p in twin.named_parameters(remove_duplicate=False) if n not in no_parameters]
        own = dict(model.named_parameters(remove_duplicate=False))
        assert set(own) == {name for name, _ in others}
        assert ids_to_names(iter(own.items())) == ids_to_names(iter(others))
        for name, parameter in others:
            assert own[name].dtype == parameter.dtype, name
            assert own[name].requires_grad == parameter.requires_grad, name
            assert torch.equal(own[name], parameter), name
        for name, layer in layers.items():
            like = twin.get_submodule(name)
            assert layer.training == like.training, name
            assert hooks_of(layer) == hooks_of(like), name
            assert layer.weight.dtype == like.weight.dtype, name
            assert torch.equal(layer.weight, like.weight), f"{name} as {getattr(layer, 'format', 'dense')}"
            if name in packed:
                assert layer.format in ([self.wanted[name]] if self.wanted[name] else CHOSEN), (name, layer.format)
        assert repr(model)
        self.call(2)

    def layers_named(self, name: str) -> list[str]:
        """The layer, and those that are one matrix with it."""
        whole = whole_of(self.model.get_submodule(name))
        return [other for other in NAMES if whole_of(self.model.get_submodule(other)) is whole]

    def whole_weight(self, name: str) -> Tensor:
        """The weight of the twin, or of all that is one matrix with it; of a copy whose siblings are gone its own."""
        return torch.cat([self.twin.get_submodule(other).weight.detach() for other in self.layers_named(name)])

    def packed_anew(self, names: Sequence[str], chosen: bool) -> None:
        """The layers are packed now in the formats they have; the twin gets what has been rounded."""
        for name in names:
            layer, like = self.model.get_submodule(name), self.twin.get_submodule(name)
            packed = layer.packed
            self.wanted[name] = None if chosen and not packed.keeps_format else layer.format
            if not isinstance(packed, ByteWeight):
                self.rounded.pop(name, None)
            elif name not in self.rounded:
                values = packed.codes().float() * packed.scales[:, None]
                w = like.weight.detach().float()
                assert ((values - w).abs() <= w.abs().amax(1, keepdim=True) / 24).all(), f"{name} is rounded too far"
                if LAYERS[name][3]:
                    assert torch.equal(values.to(like.weight.dtype), like.weight), f"{name} was on a grid"
                self.rounded[name] = values
                like.weight = nn.Parameter(values.to(like.weight.dtype), requires_grad=like.weight.requires_grad)

    def untie_twin(self, name: str) -> None:
        """A packed weight is a copy."""
        like = self.twin.get_submodule(name)
        like.weight = nn.Parameter(like.weight.detach().clone(), requires_grad=like.weight.requires_grad)

    @contextlib.contextmanager
    def refused_if(self, expected: bool) -> Iterator[None]:
        """What raises has to, leaves the model as it was, and says something."""
        before = contents(self.model)
        try:
            yield
        except (ValueError, TypeError) as error:
            if not expected or len(str(error)) < 10:
                raise
            for was, now in zip(before, contents(self.model), strict=True):
                assert was == now, f"what failed has changed the model: {error}"  # noqa: PT017
            raise Refused from None
        assert not expected, "it should have been refused"

    # ---- Steps

    def sparsify(self, format: str, **options: Any) -> None:
        known = {key: value for key, value in options.items() if key in ("tokens", "values")}
        try:
            Options(format, **known)
        except ValueError:
            expected = True
        else:
            expected = False
        with self.refused_if(expected):
            report = macko.sparsify_(self.model, format=format, **options)
        self._converted(report, format.partition(" ")[0] in ("auto", "mixed"))

    def compress(self, **options: Any) -> None:
        with self.refused_if(False):
            report = macko.compress_(self.model, **options)
        self._converted(report, True)

    def _converted(self, report: Any, chosen: bool) -> None:
        assert str(report)
        new = []
        for row in report:
            if row.name not in NAMES:
                continue
            layer = self.model.get_submodule(row.name)
            if row.reason:
                assert isinstance(layer, SparseLinear) == (row.name in self.wanted), row
            else:
                assert row.name not in self.wanted
                new.append(row.name)
                if not row.merged_with:
                    assert row.bytes_after == layer.packed.nbytes
                    assert row.bytes_after < row.bytes_before
        self.packed_anew(new, chosen)

    def interrupted(self, format: str, after: int, merge: bool) -> None:
        """sparsify_ that is stopped at a layer, or after the last one."""
        count, before = iter(range(after)), contents(self.model)

        def stopping(*args: Any) -> Any:
            if next(count, None) is None:
                raise KeyboardInterrupt
            return pack(*args)

        with mock.patch.object(convert, "pack", stopping), mock.patch.object(convert, "merge_", interrupt):
            try:
                self._converted(macko.sparsify_(self.model, format=format, merge=merge), format in ("auto", "mixed"))
            except KeyboardInterrupt:  # check() looks at weights: zeros of those that are made again are +0.0
                assert before[1:] == contents(self.model)[1:]

    def reformat(self, name: str, format: str) -> None:
        layer = self.model.get_submodule(name)
        if not isinstance(layer, SparseLinear):
            return
        names, before = self.layers_named(name), layer.format
        weight = self.whole_weight(name)
        stays = format in ("auto", "mixed") and whole_of(layer).packed.keeps_format
        in_bytes = all(name in self.rounded for name in names)
        expected = not stays and before != format and not (in_bytes and "8" in format) and not held(format, weight)
        expected |= format not in (*FORMATS, "auto", "mixed", "smallest")
        expected |= format in FORMATS and "cpu" not in FORMATS[format].device_types
        with self.refused_if(expected):
            layer.reformat_(format)
        assert layer.format == format or format not in FORMATS
        self.packed_anew(names, format in ("auto", "mixed"))

    def from_linear(self, name: str, format: str) -> None:
        layer, like = self.model.get_submodule(name), self.twin.get_submodule(name)
        if isinstance(layer, SparseLinear):
            return
        with self.refused_if(not held(format, layer.weight.detach())):
            sparse = SparseLinear.from_linear(layer, format)
        put(self.model, name, sparse)
        vars(like).update({hooks: vars(nn.Module())[hooks] for hooks in HOOKS})
        self.untie_twin(name)
        self.packed_anew([name], format in ("auto", "mixed"))

    def densify(self, name: str) -> None:
        layer, like = self.model.get_submodule(name), self.twin.get_submodule(name)
        if not isinstance(layer, SparseLinear):
            return
        put(self.model, name, layer.to_linear())
        vars(like).update({hooks: vars(nn.Module())[hooks] for hooks in HOOKS})
        self.untie_twin(name)
        like.weight.requires_grad_(False)
        self.rounded.pop(name, None)
        del self.wanted[name]

    def merge(self) -> None:
        for names in macko.merge_(self.model):
            assert len({id(whole_of(self.model.get_submodule(name))) for name in names}) == 1

    def split(self) -> None:
        macko.split_(self.model)
        assert not any(isinstance(module, MergedLinear) for module in self.model.modules())

    def to(self, dtype: torch.dtype, name: str, how: str) -> None:
        """Of the model, or of one layer and all that is one matrix with it."""
        move: Callable[[nn.Module], Any] = {
            "to": lambda module: module.to(dtype),
            "device": lambda module: module.to("cpu", dtype),
            "method": lambda module: {F16: module.half, BF16: module.bfloat16, F32: module.float}[dtype](),
        }[how]
        names = self.layers_named(name) if name else list(NAMES)
        slides = [n for n in names if self.wanted.get(n) == "slide"]
        if slides and dtype == F32:
            with self.refused_if(True):
                move(self.model.get_submodule(slides[0]))
        before = {n: self.twin.get_submodule(n).weight.dtype for n in names}
        for one in [name] if name else [""]:
            move(self.model.get_submodule(one))
        for one in names if name else [""]:
            move(self.twin.get_submodule(one))
        self._moved([n for n in names if before[n] != dtype], dtype)

    def _moved(self, names: Sequence[str], dtype: torch.dtype) -> None:
        for name in names:
            if name not in self.wanted:
                continue
            like, wanted = self.twin.get_submodule(name), self.wanted[name]
            if name in self.rounded:
                like.weight = nn.Parameter(self.rounded[name].to(dtype), requires_grad=like.weight.requires_grad)
                if dtype == F32:
                    del self.rounded[name]
            if wanted:
                keeps = dtype in FORMATS[wanted].dtypes and held(wanted, self.whole_weight(name).to(dtype))
                chosen = whole_of(self.model.get_submodule(name))._options  # after reformat_("auto")
                self.wanted[name] = wanted if keeps else None if chosen else "macko"

    def copied(self, how: str) -> None:
        def again(model: nn.Module) -> Any:
            if how == "deepcopy":
                return copy.deepcopy(model)
            if how == "pickle" and "ec" not in self.wanted.values():  # torch cannot read uint16 from a bare pickle
                return pickle.loads(pickle.dumps(model))
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            return torch.load(file, weights_only=False)

        self.model, self.twin = again(self.model), again(self.twin)

    def emptied(self) -> None:
        """to_empty, and the state again. What siblings are then can stand in the way of the first that is loaded."""
        state, emptied = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.model).to_empty(device="cpu")
        try:
            emptied.load_state_dict(state)
        except RuntimeError as error:
            if "split_" not in str(error) or not any(isinstance(m, MergedLinear) for m in emptied.modules()):
                raise
        else:
            self.model = emptied

    def loaded(
        self,
        into: str,
        merge: bool,
        dtype: torch.dtype | None,
        meta: bool,
        assign: bool,
        file: bool,
        held_as: str | None,
    ) -> None:
        """The state, or a file, into another model: dense or with the same layers packed in a format, merged or not, of
        another content, of a dtype, on meta. held_as: load_model's format."""
        target, twin, names = copy.deepcopy(self.twin), copy.deepcopy(self.twin), set(self.wanted)
        if dtype is not None:
            target, twin = target.to(dtype), twin.to(dtype)
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.copy_(parameter.roll(1, 0))
        if into == "dense" and file:
            names -= {name for name in names if self.wanted[name] == "dense12"}  # which files hold dense
        else:
            for name in names:
                layer = target.get_submodule(name)
                kind = into if into != "dense" and held(into, layer.weight) else "auto"
                put(target, name, SparseLinear.from_linear(layer, kind))
                vars(target.get_submodule(name)).update({hooks: vars(layer)[hooks] for hooks in HOOKS})
            if merge:
                macko.merge_(target)
        before = {name: target.get_submodule(name) for name in names}
        formats = {name: (layer.format, layer._options) for name, layer in before.items() if hasattr(layer, "format")}
        if meta:
            target, twin = on_meta(target), on_meta(twin)
        was = contents(self.model)
        try:
            if file:
                with tempfile.TemporaryDirectory() as folder:
                    macko.save_model(self.model, Path(folder) / "it")
                    target = macko.load_model(target, Path(folder) / "it", format=held_as)
                twin = copy.deepcopy(self.twin) if meta else twin
            else:
                assign |= meta
                target.load_state_dict(copy.deepcopy(self.model.state_dict()), assign=assign)
                twin.load_state_dict(copy.deepcopy(self.twin.state_dict()), assign=assign)
        except (RuntimeError, ValueError):
            assert was == contents(self.model)
            if all(self._can_load(name, layer, held_as if file else None) for name, layer in before.items()):
                raise
            raise Refused from None
        assert was == contents(self.model)
        source, rounded = self.wanted, self.rounded
        self.model, self.twin, self.wanted, self.rounded = target, twin, {}, {}
        for name in names:
            layer, like = target.get_submodule(name), twin.get_submodule(name)
            if name in rounded:  # even where its float16 values have been bfloat16 on the way
                like.weight = nn.Parameter(rounded[name].to(layer.dtype), requires_grad=like.weight.requires_grad)
                if isinstance(layer.packed, ByteWeight):
                    self.rounded[name] = rounded[name]
            if file and held_as:
                assert layer.format == held_as or held_as not in FORMATS
            elif source[name] in ("ec", "slide", "dense12", "dense8", "sparse8") and name in formats:
                keeps = layer.dtype in FORMATS[source[name]].dtypes and held(source[name], like.weight)
                assert layer.format == source[name] or not keeps or isinstance(layer, MergedLinear)
            elif name in formats and formats[name][1] is None and formats[name][0] in CHOSEN:
                assert layer.format == formats[name][0], name
        self.packed_anew(sorted(names), True)
        for name in names:
            if whole_of(target.get_submodule(name))._options is None:
                self.wanted[name] = target.get_submodule(name).format

    def _can_load(self, name: str, layer: nn.Module, held_as: str | None) -> bool:
        """Whether what this layer holds fits that one without a doubt."""
        if isinstance(layer, MergedLinear):  # siblings change one by one
            return False
        dense12 = self.wanted[name] == "dense12" and getattr(layer, "format", "dense12") != "dense12"
        float_slide = self.wanted[name] == "slide" and F32 in (layer.weight.dtype, self.model.get_submodule(name).dtype)
        weight = self.twin.get_submodule(name).weight.detach()
        dtypes = (weight.dtype, layer.weight.dtype)
        return not dense12 and not float_slide and (not held_as or all(held(held_as, weight.to(d)) for d in dtypes))

    def default_dtype(self, dtype: torch.dtype) -> None:
        torch.set_default_dtype(dtype)

    def mode(self, train: bool) -> None:
        for model in (self.model, self.twin):
            model.train(train)

    def bias(self, name: str, how: str) -> None:
        with self.refused_if(how == "new" and isinstance(self.model.get_submodule(name), MergedLinear)):
            self._bias(name, how)

    def _bias(self, name: str, how: str) -> None:
        for model in (self.model, self.twin):
            layer = model.get_submodule(name)
            if how == "new":
                layer.bias = nn.Parameter(torch.ones(layer.out_features, dtype=layer.weight.dtype))
            elif how == "none":
                layer.bias = None
            elif layer.bias is not None and how == "freeze":
                layer.bias.requires_grad_(not layer.bias.requires_grad)
            elif layer.bias is not None:
                with torch.no_grad():
                    layer.bias.neg_()

    def prune(self, sparsity: float) -> None:
        """Of layers that are dense still."""
        macko.prune_(self.model, sparsity, ignore=(), progress=False)
        with torch.no_grad():
            for name in set(NAMES) - set(self.wanted):
                pruned, like = self.model.get_submodule(name).weight, self.twin.get_submodule(name).weight
                assert torch.equal(torch.where(pruned != 0, like, 0), pruned)
                like.copy_(pruned)

    def copied_layer(self, name: str) -> None:
        """A copy in the layer's place, which shares nothing: of siblings it has a matrix by itself."""
        for model in (self.model, self.twin):
            put(model, name, copy.deepcopy(model.get_submodule(name)))

    def trainable(self, all_are: bool) -> None:
        for model in (self.model, self.twin):
            model.requires_grad_(all_are)

    def hook(self, name: str, pre: bool) -> None:
        for model in (self.model, self.twin):
            layer = model.get_submodule(name)
            register = layer.register_forward_pre_hook if pre else layer.register_forward_hook
            register(counted)

    def call(self, tokens: int, mode: str = "no_grad", layout: str = "", reverse: bool = False) -> None:
        """Every layer, siblings one after the other with the same x."""
        inputs: dict[Any, Tensor] = {}
        context: Any = {
            "no_grad": torch.no_grad, "grad": torch.enable_grad, "inference": torch.inference_mode,
            "autocast": lambda: torch.autocast("cpu", BF16),
        }[mode]  # fmt: skip
        for name in sorted(NAMES, reverse=reverse):
            layer, like = self.model.get_submodule(name), self.twin.get_submodule(name)
            key = (like.in_features, like.weight.dtype)
            if key not in inputs:
                inputs[key] = laid_out(integers(like.in_features, tokens, like.weight.dtype), layout)
            with context():
                y = layer(inputs[key])
            assert y.dtype == (BF16 if mode == "autocast" else like.weight.dtype)
            self._near(name, y, inputs[key], like)

    def _near(self, name: str, y: Tensor, x: Tensor, like: nn.Module) -> None:
        with torch.no_grad():
            wanted, error = reference.linear(x, like.weight, like.bias, like.weight.dtype)
            if bool((like.weight == like.weight.round()).all()):  # codes times scales are integers when rounded
                assert torch.equal(y.detach().double(), wanted), name
            elif y.dtype == like.weight.dtype:  # autocast rounds dense weights
                assert ((y.detach().double() - wanted).abs() <= error).all(), name

    def backward(self, tokens: int, reverse: bool) -> None:
        """Gradients of x and of biases, siblings in one graph."""
        inputs: dict[Any, Tensor] = {}
        for name in sorted(NAMES, reverse=reverse):
            layer, like = self.model.get_submodule(name), self.twin.get_submodule(name)
            key = (like.in_features, like.weight.dtype)
            x = inputs.setdefault(key, integers(*key[:1], tokens, key[1]).requires_grad_())
            y = layer(x)
            ones = torch.ones_like(y)
            wanted, error = reference.linear(ones, like.weight.detach().t(), None, y.dtype)
            found = torch.autograd.grad(y, x, ones, retain_graph=True)[0]
            assert ((found.double() - wanted).abs() <= error).all(), name
            if layer.bias is not None and layer.bias.requires_grad:
                of_bias = torch.autograd.grad(y, layer.bias, ones, retain_graph=True)[0]
                assert torch.equal(of_bias, torch.full_like(of_bias, tokens)), name


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def counted(module: nn.Module, *args: Any) -> None:
    """A hook that pickles."""


def play(*steps: tuple[Any, ...], dtype: torch.dtype = F32) -> Pair:
    """The steps, each (name of a method of Pair, its arguments), with a check after each."""
    pair = Pair(dtype)
    with warnings.catch_warnings(), contextlib.ExitStack() as undo:
        warnings.simplefilter("ignore", UserWarning)  # of models that stay dense
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        for name, *args in steps:
            kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
            with contextlib.suppress(Refused):
                getattr(pair, name)(*args, **kwargs)
            pair.check()
    return pair


def step(name: str, *args: Any, **kwargs: Any) -> Any:
    return st.tuples(st.just(name), *args, *([st.fixed_dictionaries(kwargs)] if kwargs else []))


CPU_FORMATS = ("macko", "bitmap", "ec", "slide", "dense12", "dense8", "sparse8")
FORMAT = st.sampled_from(["auto", *CPU_FORMATS, "mixed", "smallest"])
ROUNDED = FORMAT.filter(lambda format: format not in ("slide", "mixed"))  # which round activations too
EVERY = st.one_of(FORMAT, st.sampled_from(["sell", "tile", "sparse11", "nothing"]))
NAME, DTYPE, BOOL = st.sampled_from(NAMES), st.sampled_from(CPU_DTYPES), st.booleans()
IGNORE = st.sampled_from([(), ("lm_head",), ("q_proj",), ("0.*",), ("*.k_proj", "1.up_proj")])
TOKENS = st.sampled_from([None, 1, 16])
STEPS = st.one_of(
    step("sparsify", EVERY, tokens=TOKENS, merge=st.sampled_from([None, True]), ignore=IGNORE),
    step("sparsify", st.just("auto"), values=st.sampled_from(["raw", "fp8", "int8", "fp16"]), merge=BOOL,
         ignore=IGNORE, device=st.sampled_from([None, "cpu"])),
    step("sparsify", st.sampled_from(["slide", "slide 2:4", "mixed", "mixed 6:8"]), merge=BOOL),
    step("sparsify", ROUNDED, min_sparsity=st.sampled_from([0.0, 0.45]), merge=BOOL, values=st.just("int8")),
    step("compress", values=st.sampled_from(["exact", "fp8", "int8"]), merge=BOOL, ignore=IGNORE),
    step("interrupted", FORMAT, st.integers(0, 9), BOOL),
    step("reformat", NAME, EVERY),
    step("from_linear", NAME, FORMAT),
    step("densify", NAME),
    step("merge"),
    step("split"),
    step("to", DTYPE, st.sampled_from(["", *APART]), st.sampled_from(["to", "device", "method"])),
    step("copied", st.sampled_from(["deepcopy", "pickle", "save"])),
    step("emptied"),
    step("loaded", st.one_of(st.just("dense"), FORMAT), BOOL, st.one_of(st.none(), DTYPE), BOOL, BOOL, BOOL,
         st.one_of(st.none(), FORMAT)),
    step("copied_layer", NAME),
    step("trainable", BOOL),
    step("default_dtype", st.sampled_from([BF16, F32, torch.float64])),
    step("mode", BOOL),
    step("bias", NAME, st.sampled_from(["new", "none", "freeze", "negate"])),
    step("prune", st.sampled_from([0.3, 0.5])),
    step("hook", NAME, BOOL),
    step(
        "call", st.sampled_from([0, 1, 2, 3, 5, 17, 70]), st.sampled_from(["no_grad", "grad", "inference", "autocast"]),
        st.sampled_from(["", "columns", "gaps", "3d"]), BOOL,
    ),
    step("backward", st.sampled_from([1, 3, 17]), BOOL),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 2)
@given(st.lists(STEPS, min_size=1, max_size=10), DTYPE)
def test_any_sequence_leaves_the_model_its_twin(steps: list[tuple[Any, ...]], dtype: torch.dtype) -> None:
    play(*steps, dtype=dtype)
