"""What an engine is told of macko: how a dense checkpoint is packed, and what config.json says of a packed one."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ..choose.options import Options
from ..files import VERSION, check_about
from ..nn.convert import MIN_SPARSITY, check_min_sparsity
from ..nn.find import IGNORED
from ..weights import codes, takes_any_weight


class _Method(str):
    """quant_method, a string for transformers, and for diffusers something that has a value."""

    value = property(str)


class Settings:
    """The options of every engine's config, which builds on this and adds its own.

    Args:
        format, ignore, min_sparsity, values: as in macko.sparsify_. 8 bits are made of what the files hold dense alone.
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
        min_sparsity: float = MIN_SPARSITY,
        version: int = VERSION,
        layers: dict[str, dict[str, Any]] | None = None,
        values: str = "exact",
    ) -> None:
        check_about({"version": version, "layers": layers}, "quantization_config")
        check_min_sparsity(min_sparsity)
        several = isinstance(ignore, Iterable) and not isinstance(ignore, str)
        self.ignore: list[Any] = list(ignore) if several else [ignore]
        if not all(isinstance(name, str) for name in self.ignore):
            raise ValueError(f"ignore is {ignore!r}, expected names")
        self.quant_method = _Method("macko")  # as config.json has it
        self.format, self.min_sparsity, self.version, self.values = format, min_sparsity, version, values
        self.layers = {} if layers is None else layers
        _ = self.options  # which are looked at

    @property
    def options(self) -> Options:
        """What weights are packed by that the files hold dense."""
        return Options(self.format, self.tokens, values=self.values)

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
        old = {name: getattr(self, name) for name in ("format", "tokens", "ignore", "min_sparsity", "values")}
        if unknown := sorted(set(asked) - set(old)):
            raise ValueError(f"{where} has {', '.join(unknown)}, expected {', '.join(old)}")
        if self.layers and asked.get("values", self.values) != self.values and asked["values"] in codes.KINDS:
            raise ValueError(
                f"{where} has values={asked['values']!r}, and the folder is packed: 8 bits are made of a dense one, "
                "with --quantization macko"
            )
        if asked.get("format", self.format) != self.format:
            old["values"] = "exact"  # the folder's are of its own format
        return {**old, **asked, "version": self.version, "layers": self.layers}
