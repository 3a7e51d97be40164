"""What an engine is told of macko: how a dense checkpoint is packed, and what config.json says of a packed one."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ..choose.options import Options
from ..files import check_about
from ..nn.convert import least_sparsity
from ..nn.find import IGNORED
from ..weights import codes, takes_any_weight
from ..weights.saved import is_slide


class _Method(str):
    """quant_method, a string for transformers, and for diffusers something that has a value."""

    value = property(str)


class Settings:
    """The options of every engine's config, which builds on this and adds its own.

    Args:
        format, ignore, min_sparsity, values: as in macko.sparsify_. 8 bits are made of what the files hold dense alone.
        pattern: of format "slide" or "mixed", as "6:8"; it may be said with the format too, as "slide 6:8".
        version, layers: of a packed checkpoint; see macko.files.

    Raises:
        ValueError: an option is out of its range or not of its type, or the files are of a newer version.
    """

    quant_method: Any
    #: As in macko.sparsify_; not in files.
    tokens: int | None = None

    def __init__(
        self,
        format: str = "auto",
        ignore: Iterable[str] = IGNORED,
        min_sparsity: float | None = None,
        version: int = 1,
        layers: dict[str, dict[str, Any]] | None = None,
        values: str = "exact",
        pattern: str = "auto",
    ) -> None:
        check_about({"version": version, "layers": layers}, "quantization_config")
        several = isinstance(ignore, Iterable) and not isinstance(ignore, str)
        self.ignore: list[Any] = list(ignore) if several else [ignore]
        if not all(isinstance(name, str) for name in self.ignore):
            raise ValueError(f"ignore is {ignore!r}, expected names")
        self.quant_method = _Method("macko")  # as config.json has it
        self.format, self.version, self.values, self.pattern = format, version, values, pattern
        self.layers = {} if layers is None else layers
        self.min_sparsity = least_sparsity(self.options, min_sparsity)

    @property
    def options(self) -> Options:
        """What weights are packed by that the files hold dense."""
        return Options(self.format, self.tokens, self.pattern, self.values)

    @property
    def slides(self) -> bool:
        """Whether layers are packed for slide's kernels, or are to be: which are for a prompt's tokens."""
        return self.options.may_slide or any(map(is_slide, self.layers.values()))

    @property
    def layout_options(self) -> Options:
        """What layouts are chosen by of weights that the files hold packed: 8 bits, or 12, are not made of these."""
        if takes_any_weight(self.format) or self.values in codes.KINDS:
            return Options(tokens=self.tokens)
        return self.options

    @staticmethod
    def arguments(about: Mapping[str, Any]) -> dict[str, Any]:
        """Of what config.json says the arguments of this, without what others, or a later macko, have noted there."""
        return {name: about[name] for name in inspect.signature(Settings).parameters if name in about}

    def overridden(self, asked: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The arguments of this config with those in their place that a user of the engine asks for.

        Args:
            where: the user says it, for errors.

        Raises:
            ValueError: there is no such option, or the files are packed and 8 bits are asked for.
        """
        names = ("format", "tokens", "ignore", "min_sparsity", "values", "pattern")
        # The format without its pattern, so that either can be asked for.
        own = {"format": self.options.format, "pattern": self.options.pattern}
        old = {name: getattr(self, name) for name in names} | own
        if unknown := sorted(set(asked) - set(old)):
            raise ValueError(f"{where} has {', '.join(unknown)}, expected {', '.join(old)}")
        if self.layers and asked.get("values", self.values) != self.values and asked["values"] in codes.KINDS:
            raise ValueError(
                f"{where} has values={asked['values']!r}, and the folder is packed: 8 bits are made of a dense one, "
                "with --quantization macko"
            )
        name, _, pattern = str(asked.get("format", own["format"])).partition(" ")
        if name != own["format"]:
            old |= {"values": "exact", "pattern": "auto", "tokens": None, "min_sparsity": None}  # the folder's format's
        elif pattern:
            old["pattern"] = "auto"  # the user's is said with the format
        return {**old, **asked, "version": self.version, "layers": self.layers}
