"""Files that lie, through everything that reads them: only ValueError may come of it.

    python -m verify.fuzz --cases 1000000 --seed 0

A case takes an honest weight of some format and changes its sizes, its tensors, the JSON or the bytes of the file.
What passes validation is unpacked and multiplied too; some files go through from_pretrained. Or it is a folder, dense
or of compressed-tensors, for `macko convert`, which writes the whole of another or says one line. A case may take two
seconds, and memory of four times what it reads and 64 MB. The run ends with one JSON line, which --out appends to a
file, also where SIGTERM or Ctrl-C ends it: its cases are those so far. `--only N` runs one case here, to look at its
traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import json
import math
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import macko
from macko import FORMATS, EcWeight, MackoWeight, SparseLinear
from macko.cli import main as command
from macko.files import VERSION, Checkpoint, as_extra_state
from macko.weights import SAVED, Macko8Weight, PackedWeight, Planes12Weight, SellWeight, SlideWeight
from tests.common import as_8_bits, as_bitmask, compressed_config, random_weight

PACKAGE = Path(macko.__file__).parent
RESULTS = Path(__file__).parents[1] / "benchmarks/results/cpu/fuzz.jsonl"
#: What a case may take: seconds of the processor, or ten times as many by the clock, as other work may run beside it;
#: and of memory, beside what the process has when it begins, so many bytes a byte of the file and these.
SECONDS = 2.0
BYTES_A_BYTE, MORE_BYTES = 4, 64 << 20
#: Share of files that go through transformers too, which takes 20 ms, and of cases that go through `macko convert`.
PRETRAINED, CONVERTED = 0.02, 0.01
#: Rows, columns and elements up to which what was accepted is also run: the shape of a sparse matrix costs nothing.
SMALL = 1 << 20

Sizes = dict[str, Any]
Tensors = dict[str, Any]


def honest() -> list[PackedWeight]:
    """Weights of every format and option that a CPU can make; sell's is empty, as only a GPU packs it."""
    made: list[PackedWeight] = []
    others = [k for k in FORMATS.values() if "cpu" in k.device_types and k not in (MackoWeight, SlideWeight)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        shapes = ((72, 40, 0.4), (3, 700, 0.05), (1, 1, 1.0), (0, 5, 0.0), (5, 0, 0.0))
        for rows, cols, density in shapes if dtype == torch.float16 else shapes[:2]:
            w = random_weight(rows, cols, density, dtype).bfloat16().to(dtype)  # what dense12 holds in float16, too
            made += [MackoWeight.from_dense(w, bits) for bits in (2, 4, 8)]
            made += [kind.from_dense(w) for kind in others if dtype in kind.dtypes]
            made.append(EcWeight.paper(w))
            if dtype != torch.float32:
                made.append(FORMATS["tile"].from_dense(w))
    w = random_weight(300, 520, 0.1, torch.float16)
    w[:, ::4] = random_weight(300, 130, 0.9, torch.float16)
    made.append(EcWeight.from_dense(w, lanes=1, tile_rows=1024, max_slabs=4))
    made.append(EcWeight.paper(w.repeat_interleave(4, 0), 8))
    made += [EcWeight.from_dense(random_weight(4, cols, 0.01, torch.float16)) for cols in (65_537, 70_001)]
    for n, element in ((0, 0), (2, 1), (4, 0), (4, 2), (8, 3)):
        w = random_weight(70, 130, 1.0, torch.bfloat16 if element == 3 else torch.float16)
        w[:, ::2] = 0
        made.append(SlideWeight.from_dense(w, n, element))
    w = random_weight(70, 300, 1.0, torch.bfloat16)
    w[:60:20, ::64] *= 2.0**40
    w[64:68, 256:260] *= 2.0**40  # the last slab's list has no room left
    made.append(FORMATS["dense12"].from_dense(w))
    made += [
        Planes12Weight.from_dense(w[:, :cols].to(dtype)) for cols in (300, 33) for dtype in (w.dtype, torch.float16)
    ]
    w[:, ::2] = 0
    made += [FORMATS["sparse11"].from_dense(w.to(dtype)) for dtype in (torch.bfloat16, torch.float16)]
    in_bytes = [FORMATS[name].from_dense(w, kind) for name in ("dense8", "sparse8") for kind in (0, 1)]
    made += [*in_bytes, *map(Macko8Weight.from_bytes, in_bytes)]
    perm = torch.arange(9, dtype=torch.int32).expand(2, 9).contiguous()
    block = torch.tensor([[0, 0, 0, 9, 0, 0, 1, 0]], dtype=torch.int32)
    made.append(SellWeight(torch.zeros(0).half(), torch.zeros(256).short(), block, perm, 9, 20, 3, 8, 0, 0))
    return made


@functools.cache
def unpacked() -> list[tuple[Tensors, Sizes]]:
    """Of folders to convert, dense ones and those of compressed-tensors: a layer's tensors, and config.json."""
    made: list[tuple[Tensors, Sizes]] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        w = random_weight(24, 40, 0.3, dtype)
        pairs = (w.view(-1, 4) * torch.tensor([0, 1, 0, 1])).view(24, 40).to(dtype)
        config = pretrained_config(24, 40, dtype)
        made += [({"weight": w}, config)] * 2
        for kind, parts in (
            ("sparse-bitmask", as_bitmask(w, two_four=False)),
            ("sparse-24-bitmask", as_bitmask(pairs, two_four=True)),
            *((kind, as_8_bits(w, kind)) for kind in ("float", "int", "packed")),
        ):
            made.append((parts, {**config, "quantization_config": compressed_config(kind)}))
    return made


# ---- Changes ---------------------------------------------------------------------------------------------------------

EDGES = (0, 1, -1, 2**31 - 2, 2**31 - 1)
NUMBERS = (
    *(0, 1, 2, 3, 7, 8, 16, 31, 32, 64, 127, 128, 255, 256, 65535, 65536, 65537, 2**24, 2**30),
    *(2**31 - 64, 2**31 - 2, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 10**30),
)
NO_NUMBERS: tuple[Any, ...] = (True, False, None, 1.0, 1e9, float("nan"), "40", "", [], [40], {}, {"rows": 3})
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32),
    *(torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.uint32),
)
TEXTS = ("", "{", "[]", "null", "3", '"macko"', "[" * 100_000, '{"a":' * 50_000, "\x00", '{"version": 1e400}', "NaN")
NAMES = ("", ".", "other", "layer.layer", "[/x]", "\ud800", "no_such_layer", "forward", "weight", "a" * 300)


def number(choose: random.Random, near: Any = 0) -> Any:
    """A size that may lie by one, by much, or be no size at all."""
    if choose.random() < 0.15:
        return choose.choice(NO_NUMBERS)
    if choose.random() < 0.4:
        return choose.choice(EDGES)
    if choose.random() < 0.3 and type(near) is int:
        return choose.choice((near - 1, near + 1, near * 2, near // 2, -near, near + 64))
    return choose.choice(NUMBERS) * choose.choice((1, 1, 1, -1))


def change_sizes(choose: random.Random, sizes: Sizes, tensors: Tensors) -> None:
    names = [name for name in sizes if name != "format"]
    what = choose.randrange(10)
    if what == 0:
        sizes["format"] = choose.choice((*FORMATS, *SAVED, "elves", "auto", None, ["macko"], 3))
    elif what == 1:
        sizes[choose.choice((*names, "elves", *tensors))] = number(choose)
    elif what == 2 and names:
        del sizes[choose.choice(names)]
    elif what == 3 and names:
        first, second = choose.choice(names), choose.choice(names)
        sizes[first], sizes[second] = sizes[second], sizes[first]
    elif names:
        name = choose.choice([n for n in names if n in ("rows", "cols") or choose.random() < 0.5] or names)
        sizes[name] = number(choose, sizes[name])


def change_tensors(choose: random.Random, sizes: Sizes, tensors: Tensors) -> None:
    name = choose.choice(list(tensors))
    t = tensors[name]
    if not isinstance(t, Tensor):
        return
    what = choose.randrange(13)
    if what == 0:
        del tensors[name]
    elif what == 1:
        other = choose.choice(list(tensors))
        tensors[name], tensors[other] = tensors[other], t
    elif what == 2:
        t = t.reshape(-1)
        tensors[name] = t[: choose.choice((0, 1, max(0, len(t) - 1), max(0, len(t) - 8), len(t) // 2))].clone()
    elif what == 3:
        tensors[name] = torch.cat([t.reshape(-1), t.reshape(-1)[: choose.choice((1, 8, 64))]])
    elif what == 4:
        shape = [*t.shape, 1] if choose.random() < 0.3 else [t.numel()] if t.dim() != 1 else [1, t.numel()]
        tensors[name] = t.reshape(choose.choice(([], shape)) if t.numel() == 1 else shape)
    elif what == 5:
        with contextlib.suppress(RuntimeError):  # not every type is a view of every other, or can be converted to it
            tensors[name] = t.view(choose.choice(DTYPES))
    elif what == 6:
        with contextlib.suppress(RuntimeError):
            tensors[name] = t.to(choose.choice(DTYPES))
    elif what == 7:
        tensors[name] = torch.empty(choose.choice(([0], [0, 0], [0, 2**24], [0, 2**40], [2**33, 0], [])), dtype=t.dtype)
    elif t.numel():
        bits = t.contiguous().clone().reshape(-1).view(torch.uint8)
        for _ in range(choose.choice((1, 1, 2, 5))):
            at = choose.randrange(len(bits))
            size = choose.choice((1, t.element_size()))
            at -= at % size
            value = choose.choice((0, 1, 0x7F, 0x80, 0xFF, choose.randrange(256)))
            if what < 10:
                bits[at : at + size] = value
            elif what == 10:
                bits[at] ^= 1 << choose.randrange(8)
            elif what == 11:  # a number one less or more, where types are of that size
                step = choose.choice((-1, 1)) % 2 ** (8 * size)
                found = int.from_bytes(bytes(bits[at : at + size].tolist()), "little") + step
                data = (found % 2 ** (8 * size)).to_bytes(size, "little")
                bits[at : at + size] = torch.tensor(list(data), dtype=torch.uint8)
            else:
                bits[at : at + 64] = torch.tensor([choose.randrange(256) for _ in bits[at : at + 64]]).byte()
        tensors[name] = bits.view(t.dtype).reshape(t.shape)


def change_about(choose: random.Random, about: Any) -> Any:
    what = choose.randrange(7)
    if what == 0:
        about["version"] = number(choose, VERSION)
    elif what == 1:
        about[choose.choice(("layers", "shared", "other"))] = choose.choice((*NO_NUMBERS, {"layer": 3}, {"x": "layer"}))
    elif what == 2:
        about["layers"][choose.choice(NAMES)] = about["layers"]["layer"]
    elif what == 3:
        about["shared"] = {choose.choice(NAMES): choose.choice((*NAMES, "layer.values", 3))}
    elif what == 4:
        del about[choose.choice(list(about))]
    elif what == 5:
        about["layers"]["layer"] = choose.choice(NO_NUMBERS)
    else:
        return choose.choice((*NO_NUMBERS, about["layers"]))
    return about


#: What a word of a config.json may be in place of another.
WORDS = ("macko", "compressed-tensors", "sparse-bitmask", "dense", "float", "int8", "bfloat16", "utils", "BertModel")


def change_json(choose: random.Random, about: dict[str, Any]) -> None:
    """Replaces a part of a JSON object, or leaves it out."""
    name = choose.choice(list(about))
    part = about[name]
    if isinstance(part, dict) and part and choose.random() < 0.8:
        change_json(choose, part)
    elif choose.random() < 0.2:
        del about[name]
    else:
        word = choose.choice(WORDS)
        about[name] = choose.choice((number(choose, part), word, [word], {word: word}))


#: Types of a safetensors header.
TYPES = {
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.int8: "I8",
    torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.uint16: "U16", torch.uint32: "U32",
}  # fmt: skip


def file_bytes(choose: random.Random, tensors: Tensors, metadata: dict[str, str], lies: bool) -> bytes:
    """A safetensors file, whose header lies about what is after it where that is asked for.

    Else it is as safetensors writes it: wide elements first, behind a header of whole words. So tensors begin where
    their types may, and what looks at content is reached.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    data = b""
    for name, t in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        content = bytes(t.contiguous().reshape(-1).view(torch.uint8).tolist()) if t.numel() else b""
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": TYPES[t.dtype], "shape": list(t.shape), "data_offsets": offsets}
        data += content
    if lies:
        entry = header[choose.choice(list(tensors))]
        what = choose.randrange(7)
        if what == 0:
            entry["shape"] = [number(choose, size) for size in entry["shape"]]
        elif what == 1:
            entry["data_offsets"][choose.randrange(2)] = number(choose, entry["data_offsets"][1])
        elif what == 2:
            entry["dtype"] = choose.choice((*TYPES.values(), "F4", "E8M0", None))
        elif what == 3:
            del entry[choose.choice(list(entry))]
        elif what == 4:
            header["__metadata__"] = choose.choice(({}, None, [], {"macko": 3}))
    text = json.dumps(header).encode()
    text += b" " * (choose.randrange(9) if lies else -len(text) % 8)
    length = number(choose, len(text)) if lies and what == 5 else len(text)
    length = length % 2**64 if type(length) is int else 0
    whole = length.to_bytes(8, "little") + text + data
    if lies and what == 6:
        cut = choose.randrange(len(whole))
        whole = whole[:cut] if choose.random() < 0.5 else whole[:cut] + b"\xff" + whole[cut + 1 :]
    return whole


# ---- Readers ---------------------------------------------------------------------------------------------------------


def use(packed: PackedWeight) -> None:
    """What anyone does with a weight that has been validated, where its shape is no burden."""
    rows, cols = packed.shape
    if isinstance(packed, SellWeight) or max(rows, cols) > SMALL:
        return
    if packed.of_files:
        if rows * cols > SMALL:
            return
        packed.parted().cut(0, rows // 3, rows).to_dense()
        packed.parted().cut(1, cols // 3, cols).to_dense()
        with contextlib.suppress(ValueError):  # dense12 does not hold every weight that planes do
            packed = packed.materialized()
        if packed.of_files:
            return
    _ = packed.density, packed.stored, packed.nbytes, packed.label
    for tokens in (1, 3):
        packed.linear(torch.ones(tokens, cols, dtype=packed.dtype), torch.ones(rows, dtype=packed.dtype))
    if rows * cols <= SMALL:
        packed.to_dense()
        packed.to_macko().validate()


class Model(nn.Module):
    """A linear layer of the honest weight's shape, and the same once more."""

    def __init__(self, rows: int, cols: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(cols, rows, bias=False, dtype=dtype)
        self.again = self.layer


def read_file(choose: random.Random, weight: PackedWeight, path: Path) -> bool:
    """Whether any reader accepts the file."""
    accepted = False
    refused = contextlib.suppress(ValueError, FileNotFoundError)  # an index may name a file that is not there
    with refused, Checkpoint(path) as file:
        for name in file.layers:
            with contextlib.suppress(ValueError):
                use(file.packed(name))
                accepted = True
    with refused:
        start = choose.randrange(3)
        with torch.device("meta" if start == 0 else "cpu"):
            model: nn.Module = Model(*weight.shape, weight.dtype)
        if start == 2:
            model.layer = model.again = SparseLinear(weight.cols, weight.rows, bias=False, dtype=weight.dtype)
        model = macko.load_model(model, path)
        assert isinstance(model.layer, nn.Linear)
        model.layer(torch.ones(2, weight.cols, dtype=model.layer.weight.dtype))
        accepted = True
    if choose.random() < 0.05:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            command(["inspect", str(path)])
    return accepted


@functools.cache
def pretrained_class() -> Any:
    """A transformers model of one layer, by `rows`, `cols` and `dtype` of its config; None without transformers."""
    if mackoconfig() is None:
        return None
    import transformers
    from transformers import PreTrainedConfig, PreTrainedModel

    class Config(PreTrainedConfig):
        model_type = "fuzzed"

    class Fuzzed(PreTrainedModel):
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = nn.Linear(config.cols, config.rows, bias=False)
            self.other = nn.Parameter(torch.zeros(1))  # as transformers wants one that is no packed layer's
            self.post_init()

    transformers.AutoConfig.register("fuzzed", Config)
    transformers.Fuzzed = Fuzzed  # type: ignore[attr-defined]  # where `macko convert` looks for it
    return Fuzzed


def import_all() -> None:
    """What transformers imports when it reads the first model: no case is to be charged with that."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    weight = MackoWeight.zeros(3, 5, torch.float16)
    with tempfile.TemporaryDirectory() as name:
        folder, tensors = Path(name), {f"layer.{key}": t for key, t in weight.tensors().items()}
        (folder / "model.safetensors").write_bytes(file_bytes(random.Random(0), tensors, {"format": "pt"}, False))
        layers = {"layer": weight.about()}
        as_pretrained(folder, weight, {"quant_method": "macko", "version": VERSION, "layers": layers})
        assert read_pretrained(pretrained_class(), folder)


def read_pretrained(kind: Any, folder: Path) -> bool:
    """The same as transformers reads it; what that says of a file by itself, macko has no part in."""
    try:
        model = kind.from_pretrained(folder, dtype="auto")
    except ValueError:
        return False
    except Exception as error:
        if place_of(error):
            raise
        return False
    model.layer(torch.ones(2, model.layer.in_features, dtype=model.layer.weight.dtype))
    return True


def read_fields(weight: PackedWeight, sizes: Sizes, tensors: Tensors) -> bool:
    """The same as a dataclass of any format, layouts too."""
    kind = {**FORMATS, **SAVED}.get(sizes["format"]) if isinstance(sizes.get("format"), str) else None
    if kind is None:
        return False
    fields = {name: size for name, size in sizes.items() if name != "format"}
    try:
        packed = kind(**{**tensors, **fields})
    except TypeError:  # Python's: not the fields of a dataclass
        return False
    with contextlib.suppress(ValueError):
        packed.validate()
        use(packed)
        return True
    return False


def read_state(weight: PackedWeight, about: Any, tensors: Tensors) -> bool:
    """The same as a state_dict."""
    layer = SparseLinear(weight.cols, weight.rows, bias=False, dtype=weight.dtype)
    try:
        layer.load_state_dict({**tensors, "_extra_state": as_extra_state(about)})
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise
        return False
    layer.state_dict()
    layer(torch.ones(2, weight.cols, dtype=layer.dtype))
    return True


def run_case(
    seed: int, case: int, weights: list[PackedWeight], folder: Path, config: Any, made: Callable[[int], None]
) -> str:
    """What became of it: accepted or refused. Whatever is raised is a failure. made: is told the bytes to be read."""
    choose = random.Random(f"{seed}/{case}")
    torch.manual_seed(case)
    if config is not None and choose.random() < CONVERTED:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            return "accepted" if run_convert(choose, Path(name), made) else "refused"
    kind = choose.choice([*FORMATS, *SAVED])
    weight = choose.choice([weight for weight in weights if weight.format == kind])
    tensors: Tensors = dict(weight.tensors())
    way = choose.choice(("file", "file", "fields", "state"))
    of_fields: Sizes = {"format": kind, **weight.sizes()}
    sizes = of_fields if way == "fields" else weight.about() or of_fields
    honest_header = way != "file" or choose.random() < 0.75
    for _ in range(choose.choice((1, 1, 1, 2, 3)) if honest_header or choose.random() < 0.2 else 0):
        choose.choice((change_sizes, change_tensors))(choose, sizes, tensors)
        if not tensors:
            tensors = {"values": torch.zeros(1)}
    there = [t for t in tensors.values() if isinstance(t, Tensor)]
    size = sum(t.numel() * t.element_size() for t in there)
    if way == "fields":
        if choose.random() < 0.05:
            tensors[choose.choice(list(tensors))] = choose.choice((None, 3, [1, 2], torch.zeros(3, device="meta")))
        elif choose.random() < 0.05:
            name = choose.choice(list(tensors))
            t = tensors[name]
            turned = t.expand(2, *t.shape)[0] if choose.random() < 0.5 else torch.stack([t, t], -1)[..., 0]
            tensors[name] = choose.choice((turned, t.to_sparse() if t.dtype == torch.float32 else turned))
        made(size)
        accepted = read_fields(weight, sizes, tensors)
    elif way == "state":
        made(size)
        accepted = read_state(weight, sizes if choose.random() < 0.95 else choose.choice(NO_NUMBERS), tensors)
    else:
        about: Any = {"version": VERSION, "layers": {"layer": sizes}, "shared": {}}
        about["shared"] = {f"again.{name}": f"layer.{name}" for name in tensors}
        if choose.random() < 0.15:
            about = change_about(choose, about)
        text = choose.choice(TEXTS) if choose.random() < 0.03 else json.dumps(about)
        if choose.random() < 0.02:
            cut = choose.randrange(len(text) + 1)
            text = text[:cut] + choose.choice(("", "\x00", "}", "\ufffd")) + text[cut + 1 :]
        if config is not None and choose.random() < 0.2 and isinstance(about, dict):
            with contextlib.suppress(ValueError):
                slip = choose.choice(("format", "ignore", "min_sparsity"))
                config.from_dict({**about, slip: choose.choice(NO_NUMBERS)})
        path = folder / "model.safetensors"
        named = {f"layer.{name}": t for name, t in tensors.items()}
        size = path.write_bytes(file_bytes(choose, named, {"format": "pt", "macko": text}, not honest_header))
        if choose.random() < 0.03:
            as_folder(choose, folder, about)
            path = folder
            made(size)
            accepted = read_file(choose, weight, path)
        elif config is not None and choose.random() < PRETRAINED:
            about = {"quant_method": "macko", **about} if isinstance(about, dict) else about
            as_pretrained(folder, weight, about)
            made(size)
            accepted = read_pretrained(pretrained_class(), folder)
        else:
            made(size)
            accepted = read_file(choose, weight, path)
        for other in folder.iterdir():
            other.unlink()
    return "accepted" if accepted else "refused"


def pretrained_config(rows: int, cols: int, dtype: torch.dtype) -> Sizes:
    """config.json of a `pretrained_class`."""
    name = str(dtype).removeprefix("torch.")
    return {"model_type": "fuzzed", "architectures": ["Fuzzed"], "rows": rows, "cols": cols, "dtype": name}


def as_pretrained(folder: Path, weight: PackedWeight, about: Any) -> None:
    """A config.json of `pretrained_class` that says this of the file's layers."""
    config = {**pretrained_config(*weight.shape, weight.dtype), "quantization_config": about}
    (folder / "config.json").write_text(json.dumps(config))


def as_folder(choose: random.Random, folder: Path, about: Any) -> None:
    """The file as one of a Hugging Face folder, with an index and a config.json that may both lie."""
    config: Any = {"quantization_config": {"quant_method": "macko", **about} if isinstance(about, dict) else about}
    config = choose.choice((config, config, *NO_NUMBERS, {"quantization_config": choose.choice(NO_NUMBERS)}))
    (folder / "config.json").write_text(choose.choice((json.dumps(config), choose.choice(TEXTS))))
    if choose.random() < 0.5:
        write_index(choose, folder, "model.safetensors")


def write_index(choose: random.Random, folder: Path, file: str) -> None:
    """An index of a folder with this file that may lie."""
    index: Any = {"weight_map": {"layer.values": file}}
    lies = (*NO_NUMBERS, {"weight_map": choose.choice(NO_NUMBERS)}, {"weight_map": {"a": 3}})
    (folder / "model.safetensors.index.json").write_text(json.dumps(choose.choice((index, index, *lies))))


def as_unpacked(choose: random.Random, folder: Path) -> tuple[int, bool]:
    """Fills a folder to convert, which may lie; the bytes of its file, and whether config.json is honest."""
    tensors, config = copy.deepcopy(choose.choice(unpacked()))
    honest_header, honest_config = choose.random() < 0.75, choose.random() < 0.5
    for _ in range(choose.choice((0, 1, 1, 2)) if honest_header and honest_config else choose.random() < 0.1):
        if tensors:
            change_tensors(choose, {}, tensors)
    for _ in range(0 if honest_config else choose.choice((1, 1, 2))):
        if config:
            change_json(choose, config)
    text = choose.choice(TEXTS) if not honest_config and choose.random() < 0.05 else json.dumps(config)
    (folder / "config.json").write_text(text)
    named = {**{f"layer.{name}": t for name, t in tensors.items()}, "other": torch.zeros(1)}
    name = choose.choice(("model.safetensors", "model-00001-of-00001.safetensors"))
    if name != "model.safetensors" or choose.random() < 0.2:
        honest = {"metadata": {}, "weight_map": dict.fromkeys(named, name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(honest))
        if choose.random() < 0.2:
            write_index(choose, folder, name)
    content = file_bytes(choose, named, {"format": "pt"}, not honest_header)
    return (folder / name).write_bytes(content), honest_config


def run_convert(choose: random.Random, folder: Path, made: Callable[[int], None]) -> bool:
    """Whether `macko convert` has packed a folder that may lie: what it wrote can be read; else nothing is left."""
    source, target = folder / "in", folder / "out"
    source.mkdir()
    size, honest_config = as_unpacked(choose, source)
    made(size)
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        if choose.random() < 0.1:
            command(["inspect", str(source)])
        code = command(["convert", str(source), str(target), "--device", "cpu"])
    left = {path.name for path in folder.iterdir()}
    if code:
        line = said.getvalue().splitlines()[-1]  # after a bar of transformers'
        assert left == {"in"}, f"{left} after {line}"
        assert line.startswith("macko convert: "), line
        assert not re.search("memory|MemoryError", line), line
        return False
    assert left == {"in", "out"}, left
    with Checkpoint(target) as file:
        assert file.layers
        for name in file.layers:
            use(file.packed(name))
    if honest_config:
        with contextlib.suppress(ValueError):  # 8 bits are packed as they are, whatever shape config.json says
            pretrained_class().from_pretrained(target, dtype="auto")
    return True


# ---- Processes -------------------------------------------------------------------------------------------------------


def mackoconfig() -> Any:
    """What reads config.json, where transformers is installed."""
    try:
        from macko.integrations.transformers import MackoConfig
    except ImportError:
        return None
    return MackoConfig


def place_of(error: BaseException) -> str:
    """The innermost place in macko that an error has passed, if any."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if Path(code.co_filename).is_relative_to(PACKAGE):
            place = f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return place


def kind_of(error: BaseException) -> str:
    """Type, innermost place in macko, and the first words: what makes two failures the same."""
    place = place_of(error)
    text = re.sub(r"\S*/", "", str(error))  # no folders of this machine
    words = re.sub(r"[0-9]+", "N", text)[:60].replace("\n", " ")
    return f"{type(error).__name__} in {place}: {words}"


class Limits:
    """What a case may take of this process, and the most that one took: seconds of the processor, resident bytes."""

    def __init__(self, most: Any) -> None:
        self.most, self.resident, self.began = most, 0, 0.0

    def begin(self, size: int) -> None:
        """A file of so many bytes is read from now on."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        pages = Path("/proc/self/statm").read_text().split()
        mapped, self.resident = (int(count) * resource.getpagesize() for count in pages[:2])
        # Of what is asked for, so also of what nobody touches: then MemoryError, or RuntimeError of torch.
        limit = mapped + BYTES_A_BYTE * size + MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the process
        self.began = time.process_time()

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        self.most[0] = max(self.most[0], time.process_time() - self.began)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10
        self.most[1] = max(self.most[1], peak - self.resident)


def work(seed: int, first: int, stop: int, step: int, at: Any, counts: Any, most: Any, log: str, config: Any) -> None:
    """Cases first, first + step, ... below stop; writes what fails to the log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who watches ends it
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    weights, limits = honest(), Limits(most)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        for case in range(first, stop, step):
            at[0], at[1] = case, time.monotonic()
            try:
                counts[run_case(seed, case, weights, Path(folder), config, limits.begin) == "accepted"] += 1
            except BaseException as error:
                limits.end()
                with open(log, "a") as file:
                    file.write(json.dumps([case, kind_of(error)]) + "\n")
                for other in Path(folder).iterdir():
                    other.unlink()
            limits.end()
        at[0] = -1


def watch(seed: int, cases: int, workers: int, start: int) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """Runs all cases, or until a signal; how many were refused and accepted, the most that one took, the failures."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    context, config = get_context("fork"), mackoconfig()
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # each of its threads would ask for 64 MB of addresses
    if config is not None:
        import_all()
    failures: list[tuple[int, str]] = []
    stop = start + cases
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as log:
        counts = [context.RawArray("q", 2) for _ in range(workers)]
        most = [context.RawArray("d", 2) for _ in range(workers)]
        places = [context.RawArray("d", 2) for _ in range(workers)]

        def begin(worker: int, first: int) -> Any:
            places[worker][0], places[worker][1] = first, time.monotonic()
            arguments = (seed, first, stop, workers, places[worker], counts[worker], most[worker], log.name, config)
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            return process

        running = {worker: begin(worker, start + worker) for worker in range(workers)}
        while running and not ended.is_set():
            time.sleep(0.05)
            for worker, process in list(running.items()):
                case, since = int(places[worker][0]), places[worker][1]
                late = process.is_alive() and time.monotonic() - since > 10 * SECONDS
                if late:
                    process.kill()
                elif process.is_alive():
                    continue
                process.join()
                if int(places[worker][0]) < 0:
                    del running[worker]
                    continue
                slow = late or process.exitcode == -signal.SIGPROF
                died = f"took over {SECONDS:g} s" if slow else f"ended with status {process.exitcode}"
                failures.append((case, died))
                if case + workers < stop:
                    running[worker] = begin(worker, case + workers)
                else:
                    del running[worker]
        for process in running.values():
            process.kill()
            process.join()
        failures += [tuple(json.loads(line)) for line in log]
        refused, accepted = (sum(count[i] for count in counts) for i in range(2))
        seconds, grown = (max(each[i] for each in most) for i in range(2))
    took = {"most_seconds": round(seconds, 3), "most_bytes": int(grown)}
    return {"refused": refused, "accepted": accepted, **took}, sorted(failures)


def write_corpus(folder: Path) -> None:
    """The honest weights for verify/fuzz_core.c, which says what the files hold."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = ["macko", "bitmap", "ec", "tile", "dense12", "sparse11", "dense8", "sparse8", "slide", "planes12"]
    for number, weight in enumerate(weight for weight in honest() if weight.format in kinds):
        arrays = [
            bytes(t.reshape(-1).view(torch.uint8).tolist()) if t.numel() else b"" for t in weight.tensors().values()
        ]
        sizes = weight.sizes()
        extra = next((sizes[name] for name in ("widest", "slab_units", "delta_bits", "n") if name in sizes), 0)
        low = next((sizes[name] for name in ("table_low", "kind", "element") if name in sizes), 0)
        table = [low, sizes.get("table_high", 0)]
        if isinstance(weight, EcWeight):
            extra = weight.tile_ptr.shape[1] - 1
        dtype = (torch.float16, torch.bfloat16, torch.float32).index(weight.dtype)
        lengths = [len(array) for array in arrays] + [0] * (8 - len(arrays))
        header = [kinds.index(weight.format), dtype, *weight.shape, extra, *table, len(arrays), *lengths]
        (folder / f"{number:03d}").write_bytes(struct.pack("<16q", *header) + b"".join(arrays))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m verify.fuzz", description="Mutated files through every reader.")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, help="run this one case here")
    parser.add_argument("--corpus", metavar="FOLDER", help="write the honest weights there, and run nothing")
    parser.add_argument("--out", default=str(RESULTS), help="where the line is appended; empty: nowhere")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.corpus:
        write_corpus(Path(options.corpus))
        return 0
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(run_case(options.seed, options.only, honest(), Path(folder), mackoconfig(), lambda size: None))
        return 0
    begun = time.monotonic()
    outcomes, failures = watch(options.seed, options.cases, options.workers, options.start)
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    line = {
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "cases": outcomes["refused"] + outcomes["accepted"] + len(failures),
        "seed": options.seed,
        "start": options.start,
        "seconds": math.ceil(time.monotonic() - begun),
        **outcomes,
        "failures": Counter(kind for _, kind in failures),
    }
    for kind, case in {kind: case for case, kind in reversed(failures)}.items():  # the first of each kind
        print(f"case {case}: {kind}")
    print(json.dumps(line))
    if options.out:
        with open(options.out, "a") as file:
            file.write(json.dumps(line) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
