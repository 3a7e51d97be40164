"""How weights are to be packed, as a caller says it."""

from __future__ import annotations

import dataclasses

import torch

from ..weights import codes
from ..weights.formats import (
    FORMATS,
    SLIDE_PATTERNS,
    Dense8Weight,
    PackedWeight,
    SlideWeight,
    Sparse8Weight,
    format_named,
)
from .times import SLIDE_DTYPES

#: Formats that leave the layout of each weight to be chosen.
CHOICES = ("auto", "smallest", "mixed")
#: How "auto" may hold values: in fewer bits, every one of them exactly; as they are; or rounded to 8 bits.
VALUES = ("exact", "raw", *codes.KINDS)
#: Tokens that slide's kernels are chosen for where nobody says how many there will be: a prompt's.
SLIDE_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Options:
    """How weights are packed: the arguments of sparsify_ of these names.

    Attributes:
        format: a name in FORMATS or CHOICES.
        tokens: given to a layer at a time, if the caller knows. "auto" chooses by it, and a report's times are of so
            many, or of one. On a GPU of compute capability 9.0 the choice is tile, whose time hardly grows with them,
            unless the caller says 1: then it is what is fastest for one, sell in most cases, with which a prompt takes
            longer. On other GPUs it is tile from 2 on. By it "slide" and "mixed" take a pattern's kernel or the dense
            one; default: 2048.
        pattern: of formats "slide" and "mixed", as dtype and keep_dense: "2:4" to "14:16", or "auto" for the sparsest
            that a weight fits. With "slide" a layer that does not fit stays dense.
        dtype: "int8", "fp8", or None for the weight's.
        values: of "auto": "exact" may hold values in fewer bits, each of them exactly (sparse11, in place of tile where
            that is no slower at these tokens, or nobody measured); "raw" holds them as they are; "fp8" and "int8" round
            them to 8 bits with a scale a row: sparse8, or dense8 where that is smaller. Of formats "dense8" and
            "sparse8": "fp8", which is their default, or "int8".
        keep_dense: a layer holds one weight, for the kernel that was picked; with this the dense one too where the
            pattern's kernel is faster for a range of tokens only: the report says which range.

    Raises:
        ValueError: there is no such format, pattern, dtype or values, tokens is no number from 1, or the format has no
            pattern, or says itself how it holds values.
    """

    format: str = "auto"
    tokens: int | None = None
    pattern: str = "auto"
    dtype: str | None = None
    keep_dense: bool = False
    values: str = "exact"

    def __post_init__(self) -> None:
        if self.format not in CHOICES:
            format_named(self.format, *CHOICES)
        if not self.may_slide and (self.pattern, self.dtype, self.keep_dense) != ("auto", None, False):
            only = 'pattern, dtype and keep_dense are of formats "slide" and "mixed"'
            raise ValueError(f"{only}, the format is {self.format!r}")
        if self.pattern != "auto" and self.pattern not in SLIDE_PATTERNS:
            raise ValueError(f"pattern is {self.pattern!r}, expected one of auto, {', '.join(SLIDE_PATTERNS)}")
        if self.dtype is not None and self.dtype not in SLIDE_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(SLIDE_DTYPES)} or None")
        if self.values not in VALUES:
            raise ValueError(f"values is {self.values!r}, expected one of {', '.join(VALUES)}")
        of_bytes = self.in_bytes and self.format in (Dense8Weight.format, Sparse8Weight.format)
        if self.values != "exact" and self.format not in ("auto", "mixed") and not of_bytes:
            raise ValueError(f'values is of formats "auto" and "mixed", the format is {self.format!r}')
        if self.in_bytes and self.format == "mixed":
            raise ValueError(f'values={self.values!r} is of format "auto"; slide\'s 8 bits are dtype={self.values!r}')
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise ValueError(f"tokens is {self.tokens!r}, expected a number from 1")

    @property
    def may_slide(self) -> bool:
        """Whether weights of a pattern are packed for its kernel, which is chosen for `slide_tokens`."""
        return self.format in (SlideWeight.format, "mixed")

    @property
    def in_bytes(self) -> bool:
        """Whether values are rounded to 8 bits, by who asks for that."""
        return self.values in codes.KINDS

    @property
    def slide_tokens(self) -> int:
        return self.tokens or SLIDE_TOKENS

    @property
    def layout_tokens(self) -> int | None:
        """Tokens that layouts of any mask are chosen for, if known; `tokens` may be said of slide's kernels."""
        return None if self.may_slide else self.tokens

    def not_on(self, device: torch.device) -> str:
        """Why the format does not run on a device; nothing where it does, or one is chosen that does."""
        types = FORMATS[self.format].device_types if self.format in FORMATS else PackedWeight.device_types
        return "" if device.type in types else f"{self.format} runs on {' and '.join(types)} only"

    @property
    def again(self) -> Options | None:
        """What chooses again where a weight that was packed so moves to another kind of device, if anything."""
        return Options(tokens=self.layout_tokens, values=self.values) if self.format in ("auto", "mixed") else None


#: What is chosen by where nobody says anything.
AUTO = Options()
