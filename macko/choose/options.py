"""How weights are to be packed, as a caller says it."""

from __future__ import annotations

import dataclasses

import torch

from ..weights import (
    FORMATS,
    SLIDE_PATTERNS,
    Dense8Weight,
    PackedWeight,
    SlideWeight,
    Sparse8Weight,
    codes,
    format_named,
    takes_any_weight,
)
from .times import SLIDE_DTYPES

#: Formats that leave the layout of each weight to be chosen.
CHOICES = ("auto", "smallest", "mixed")
#: How "auto" may hold values: in fewer bits, every one of them exactly; as they are; or rounded to 8 bits.
VALUES = ("exact", "raw", *codes.KINDS)
#: What of them the formats take that take any; others hold values in their own way.
_VALUES_OF = {
    **dict.fromkeys(("auto", "mixed"), VALUES),
    **dict.fromkeys((SlideWeight.format, Dense8Weight.format, Sparse8Weight.format), ("exact", *codes.KINDS)),
}
#: Tokens that slide's kernels are chosen for where nobody says how many there will be: a prompt's.
SLIDE_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Options:
    """How weights are packed: the arguments of sparsify_ of these names.

    Attributes:
        format: a name in FORMATS or CHOICES; of "slide" and "mixed" with or without a pattern, as "slide 6:8".
        tokens: how many a layer gets at a time, if the caller knows. "auto" chooses by it, and a report's times are
            for that many, by default for one. On a GPU the choice is tile, whose time hardly grows with them, unless
            the caller says 1: then it is what is fastest for one, sell in most cases, with which a prompt takes
            longer. Times of this GPU count before, as `macko tune` finds them; where nobody measured tile and by count
            it is slower than dense, the layer stays dense. By it "slide" and "mixed" take a pattern's kernel or the
            dense one; default: 2048.
        pattern: what `format` says of it: "2:4" to "14:16", or "auto" for the sparsest that a weight fits. With "slide"
            a layer that does not fit stays dense.
        values: of "auto": "exact" may hold values in fewer bits, each of them exactly (sparse11, in place of tile where
            that is no slower at these tokens, or nobody measured); "raw" holds them as they are; "fp8" and "int8" round
            them to 8 bits with a scale a row: sparse8, or dense8 where that is smaller. Of formats "dense8" and
            "sparse8": "fp8", which is their default, or "int8". Of "slide": "exact" for the weight's own 16 bits, "fp8"
            or "int8", which rounds activations too. Of "mixed" as of "auto", but 8 bits are those of slide, and other
            layers stay exact.

    Raises:
        ValueError: there is no such format, pattern or values, tokens is no number from 1, or the format has no
            pattern, or says itself how it holds values.
    """

    format: str = "auto"
    tokens: int | None = None
    pattern: str = "auto"
    values: str = "exact"

    def __post_init__(self) -> None:
        format, _, pattern = self.format.partition(" ") if isinstance(self.format, str) else (self.format, "", "")
        if format not in CHOICES:
            format_named(format, *CHOICES)
        object.__setattr__(self, "format", format)
        if pattern and self.pattern not in ("auto", pattern):
            raise ValueError(f"format has the pattern {pattern}, and pattern is {self.pattern!r}: leave one out")
        object.__setattr__(self, "pattern", pattern or self.pattern)
        if not self.may_slide and self.pattern != "auto":
            raise ValueError(f'a pattern is of formats "slide" and "mixed", the format is {self.format!r}')
        if self.pattern != "auto" and self.pattern not in SLIDE_PATTERNS:
            raise ValueError(f"pattern is {self.pattern!r}, expected one of auto, {', '.join(SLIDE_PATTERNS)}")
        if self.values not in VALUES:
            raise ValueError(f"values is {self.values!r}, expected one of {', '.join(VALUES)}")
        if self.values not in (expected := _VALUES_OF.get(self.format, ("exact",))):
            raise ValueError(f"values is {self.values!r}, format {self.format!r} takes {', '.join(expected)}")
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise ValueError(f"tokens is {self.tokens!r}, expected a number from 1")

    @property
    def may_slide(self) -> bool:
        """Whether weights of a pattern are packed for its kernel, which is chosen for `slide_tokens`."""
        return self.format in (SlideWeight.format, "mixed")

    @property
    def any_zeros(self) -> bool:
        """Whether the format is for weights with zeros or none; others gain by zeros."""
        return takes_any_weight(self.format)

    @property
    def in_bytes(self) -> bool:
        """Whether all values are rounded to 8 bits; those of slide's own 8 bits are not meant."""
        return self.values in codes.KINDS and not self.may_slide

    @property
    def slide_element(self) -> torch.dtype | None:
        """The type that slide's kernels multiply; None: the weight's own."""
        return SLIDE_DTYPES.get(self.values)

    @property
    def slide_tokens(self) -> int:
        return self.tokens or SLIDE_TOKENS

    @property
    def layout_tokens(self) -> int | None:
        """Tokens that layouts of any mask are chosen for, if known; `tokens` may be said of slide's kernels."""
        return None if self.may_slide else self.tokens

    def not_on(self, device: torch.device, dtype: torch.dtype | None = None) -> str:
        """Why the format does not run on a device; nothing where it does, or one is chosen that does.

        Args:
            dtype: of a weight there, if the GPU's kernels are asked about too.
        """
        kind = Dense8Weight if self.in_bytes else FORMATS.get(self.format)
        types = kind.device_types if kind else PackedWeight.device_types
        if device.type not in types:
            return f"{self.format} runs on {' and '.join(types)} only"
        if kind and dtype and device.type == "cuda":
            element = (self.may_slide and self.slide_element) or dtype
            if not kind.runs(device, element):
                name = str(element).removeprefix("torch.")
                return f"{kind.format} has no kernel for {name} on {torch.cuda.get_device_name(device)}"
        return ""

    @property
    def again(self) -> Options | None:
        """What chooses again where a weight that was packed so moves to another kind of device, if anything."""
        if self.format not in ("auto", "mixed"):
            return None
        return Options(
            tokens=self.layout_tokens, values="exact" if self.slide_element and self.may_slide else self.values
        )


#: What is chosen by where nobody says anything.
AUTO = Options()
