"""Packed weights: a class a format, how files hold them, how they are cut and joined.

Every module of this folder is imported, so that a format's class is found by lying in one (registry.py).
"""

import importlib
import pkgutil

from . import codes, shards
from .base import SIZES, PackedWeight, slices
from .bitmap import BitmapWeight
from .bytes import ByteWeight, Dense8Weight, Macko8Weight, Sparse8Weight
from .canonical import MackoWeight
from .ec import EcWeight
from .planes import Planes12Weight
from .registry import FORMATS, SAVED, format_named, takes_any_weight, with_own_files
from .saved import saved_as
from .sell import SellWeight
from .slab import Dense12Weight, SlabWeight, Sparse11Weight, TileWeight
from .slide import (
    SLIDE_ELEMENTS,
    SLIDE_PATTERNS,
    SLIDE_SOURCES,
    SlideWeight,
    fits_pattern,
    sparsest_pattern,
    straddling,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "FORMATS",
    "SAVED",
    "SIZES",
    "SLIDE_ELEMENTS",
    "SLIDE_PATTERNS",
    "SLIDE_SOURCES",
    "BitmapWeight",
    "ByteWeight",
    "Dense8Weight",
    "Dense12Weight",
    "EcWeight",
    "Macko8Weight",
    "MackoWeight",
    "PackedWeight",
    "Planes12Weight",
    "SellWeight",
    "SlabWeight",
    "SlideWeight",
    "Sparse8Weight",
    "Sparse11Weight",
    "TileWeight",
    "codes",
    "fits_pattern",
    "format_named",
    "saved_as",
    "shards",
    "slices",
    "sparsest_pattern",
    "straddling",
    "takes_any_weight",
    "with_own_files",
]
