"""The knobs, and the room that decides which kernel multiplies."""

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from macko import _library
from macko.measure import doctor
from macko.nn.linear import unsupported
from tests.common import compiled
from tests.layouts import LAYOUTS

#: setup.py's DEFAULT_ARCHES.
DEFAULT = "7.5 8.0 8.6 8.9 9.0a 10.0 12.0+PTX"

CANNOT = {
    "stage=4": r"expected a key of cpu, copy, pdl, .*; got 'stage=4'",
    "=4": "got '=4'",
    "stages": "stages is '', expected a number",
    "stages=-1": "stages is '-1', expected a number",
    "stages=4x": "stages is '4x', expected a number",
    "stages=99999999999999999999": "expected a number",
    "pdl=2": r"pdl is '2', expected 0\|1",
    "cpu=avx": r"cpu is 'avx', expected scalar\|avx2\|avx512",
    "cpu=scalar|avx2": "cpu is ",
    "tile_gemm=128x256x1": "tile_gemm is '128x256x1', expected a number of rows x tokens x split_k x split",
    "tile_gemm=128x256x1x2x": "tile_gemm is",
    "tile_gemm=128x256x1xx": "tile_gemm is",
    "slide_tile=auto": "slide_tile is",
    "slide_tile=7x7": r"slide_tile is '7x7', expected 64x16\|.*\|256x128",  # no kernel has it
    "slide_tile=64x16|64x32": "slide_tile is",
    "shared_kb=9999999": "shared_kb is '9999999', expected a number to 1048576",  # whose bytes are no int
}


@pytest.mark.parametrize("keys", CANNOT)
def test_a_knob_that_there_is_not_is_an_error_and_changes_nothing(keys: str) -> None:
    path = _library._said("cpu=scalar")
    try:
        with pytest.raises(ValueError, match=CANNOT[keys]), _library.plan(f"cpu=avx2,{keys}"):
            pass
        assert _library._said("cpu=scalar") == path == "scalar"
    finally:
        _library._said(_library._plan)


def test_a_plan_ends_where_it_ends() -> None:
    """Also within another one, where the last word counts, and after an error."""
    best, outside = _library._said(""), _library._plan

    def within() -> None:
        with _library.plan("tile_gemm=128x256x1x2,cpu=avx512,,stages=4"):
            assert _library._said(_library._plan) == best
            raise ZeroDivisionError

    with _library.plan("cpu=scalar"):
        with pytest.raises(ZeroDivisionError):
            within()
        assert _library._plan == f"{outside},cpu=scalar"
    assert _library._plan == outside


#: Imports macko in a fork for each environment that is given, as JSON, and prints its vector path or what it says.
IMPORTS = """
import json, os, sys, torch
for given in json.loads(sys.argv[1]):
    if not os.fork():
        os.environ.update(given)
        try:
            from macko import _library
            print(json.dumps(_library.cpu_path), flush=True)
        except Exception as error:
            print(json.dumps(str(error)), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_the_environment_is_read_and_what_it_says_wrongly_is_named() -> None:
    wrong = [("MACKO_CPU", "avx"), ("MACKO_COPY", "x"), ("MACKO_PLAN", "cpu=scalar,zork=1")]
    given = [{"MACKO_CPU": "avx2", "MACKO_PLAN": "pdl=1,cpu=scalar"}, *({name: value} for name, value in wrong)]
    command = [sys.executable, "-c", IMPORTS, json.dumps(given)]
    path, *said = map(json.loads, subprocess.check_output(command, text=True).splitlines())
    assert path == "scalar"
    for text, (name, value) in zip(said, wrong, strict=True):
        assert all(part in text for part in (name, value, "expected"))


# Which kernel multiplies.


@pytest.mark.parametrize(
    ("arches", "capability", "keys", "wanted"),
    [
        ("8.0 9.0a", (9, 0), "", ("wgmma", 2**31 - 1)),
        ("8.0 9.0a", (9, 0), "copy=cp_async", ("mma.sync", 192)),
        ("8.0+PTX", (9, 0), "", ("mma.sync", 512)),  # the code of an A100, which the driver compiles
        ("7.5+PTX", (9, 0), "", ("none", 0)),
        ("8.0 12.0+PTX", (8, 9), "", ("mma.sync", 512)),
        ("8.0+PTX 9.0a", (12, 0), "", ("mma.sync", 512)),  # 9.0a is for 9.0 alone
        ("8.0 12.0+PTX", (8, 9), "tile_tokens=7", ("mma.sync", 7)),
        ("8.0 8.6", (8, 9), "", ("mma.sync", 512)),
        ("8.0 9.0a+PTX 10.0 12.0+PTX", (10, 3), "", ("mma.sync", 192)),
        ("", (10, 0), "", ("mma.sync", 192)),
        ("", (7, 5), "tile_tokens=7", ("none", 0)),
    ],
)
def test_which_kernels_a_gpu_gets_for_slabs(
    arches: str, capability: tuple[int, int], keys: str, wanted: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_library, "cuda_arches", tuple(arches.split()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with _library.plan(f"copy=bulk,{keys}"):
        assert _library.slab_kernels() == wanted


@pytest.mark.parametrize(
    ("arches", "capability", "wanted"),
    [
        ("8.0 9.0a", (9, 0), ""),
        ("8.0+PTX", (12, 1), ""),
        ("8.0", (8, 9), ""),
        ("", (7, 0), ""),  # said where the library is loaded
        ("8.0", (9, 0), "it is on A GPU, 9.0, and macko is compiled for 8.0: .* with TORCH_CUDA_ARCH_LIST=9.0"),
        ("8.0 9.0a", (12, 0), "compiled for 8.0, 9.0a: "),
        ("9.0a+PTX 12.0+PTX", (10, 0), "TORCH_CUDA_ARCH_LIST=10.0"),
        (DEFAULT, (11, 0), "TORCH_CUDA_ARCH_LIST=11.0"),  # a Jetson Thor: neither 10.0's machine code nor 12.0's PTX
        (DEFAULT, (7, 0), "macko is for 7.5 and newer"),
    ],
)
def test_a_gpu_for_which_there_is_no_code_is_told_so(
    arches: str, capability: tuple[int, int], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is packed there: else the first launch says that there is no kernel image."""
    monkeypatch.setattr(_library, "cuda_arches", tuple(arches.split()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = unsupported(torch.float16, torch.device("cuda")) or ""
    assert re.search(wanted, reason) if wanted else not reason
    if wanted:
        assert doctor.kernels_of(torch.device("cuda")) == f"no kernel runs: {reason}"


PATHS = ("spmv", "spmm", "few", "many", "ring", "dense rows")
ROOM = """
#include "codecs/dense12/dense12.h"
#include "codecs/tile/tile.h"
#include "slab/ring_plan.h"
#include "torch/path.h"
typedef struct weight {
    int dtype, in_parts;
    int64_t rows, cols, bytes;
} weight;
/* LAYOUTS' numbers; what a codec says of itself is in its ops.cpp. */
int path(int layout, const weight *w, int64_t tokens, const int *device, int64_t limit) {
    const macko_path_device on = {device[0], device[1], device[2], device[3] >= 9, limit >= 0, limit};
    const int is_tile = layout == 3, is_dense12 = layout == 6;
    const bool waits = is_tile ? w->bytes > MACKO_TILE_FOUR_STAGES : is_dense12 && w->cols > MACKO_DENSE12_FEW_COLS;
    const int64_t few = macko_few_tokens(w->rows, w->in_parts, waits);
    switch (layout) {
    case 0: return macko_canonical_path((macko_dtype)w->dtype, w->rows, w->cols, w->bytes, tokens, on);
    case 1: return macko_bitmap_path(w->cols, tokens, on);
    case 2: return macko_sell_path(w->rows, w->cols, w->bytes, tokens, on);
    case 4: return macko_ec_path(tokens);
    default: return macko_slab_path(w->rows, w->cols, few, macko_ring_tokens_of(device[3]), tokens, on);
    }
}
"""
#: From what number of tokens on which path: what a kernel of it stands for is in csrc/torch/path.h.
Paths = dict[int, str]


class Weight(ctypes.Structure):
    """As ROOM has it; bytes: canonical: entries, with padding; sell: of its slots; tile: of its largest slab."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("dtype", "in_parts")),
        *((name, ctypes.c_int64) for name in ("rows", "cols", "bytes")),
    )


Room = Callable[..., Paths]
F16, BF16, F32 = range(3)
#: Whether it is a GPU, has wgmma, has vectors; the major number of its compute capability.
CPU, OLD_CPU, HOPPER, OTHER_GPU = (0, 0, 1, 0), (0, 0, 0, 0), (1, 1, 0, 9), (1, 0, 0, 8)
HOPPER_BY_RINGS = (1, 0, 0, 9)  # MACKO_COPY=cp_async
DEVICES = {CPU: "CPU", OLD_CPU: "old CPU", HOPPER: "9.0", OTHER_GPU: "other GPU"}
END = 2**31


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    """The path by tokens: a number for each place where it changes, all up to 1100 and around 2^31 tried."""
    library = compiled(ROOM, tmp_path_factory.mktemp("room"))

    def paths(
        layout: str,
        device: tuple[int, ...],
        rows: int = 4096,
        cols: int = 4096,
        held: int = 0,
        dtype: int = F16,
        limit: int = -1,
        in_parts: bool = False,
    ) -> Paths:
        weight = Weight(dtype, in_parts, rows, cols, held)
        on = (ctypes.c_int * 4)(*device)
        found: Paths = {}
        for tokens in (*range(1100), 10**6, END - 1, END):
            about = ctypes.byref(weight), ctypes.c_int64(tokens), on, ctypes.c_int64(limit)
            index = library.path(LAYOUTS.index(layout), *about)
            if not found or PATHS[index] != list(found.values())[-1]:
                found[tokens] = PATHS[index]
        return found

    return paths


@pytest.mark.parametrize("device", DEVICES, ids=DEVICES.get)
def test_canonical_multiplies_one_token_and_on_a_cpu_a_few(room: Room, device: tuple[int, ...]) -> None:
    half, tenth = 4096 * 4096 // 2, 4096 * 4096 // 10
    for dtype, held, last in (
        *((F16, half, 20), (F16, tenth, 20), (BF16, half, 2), (BF16, tenth, 5), (F32, half, 4), (F32, tenth, 9)),
        *((BF16, 0, 10**6), (F32, 4096 * 4096, 3), (BF16, 4096 * 4096, 2)),
    ):
        paths = room("macko", device, held=held, dtype=dtype)
        if device in (HOPPER, OTHER_GPU):
            assert paths == {0: "dense rows", 1: "spmv", 2: "dense rows"}
        elif held:
            assert paths == {0: "spmv", last + 1: "dense rows"}
        else:
            assert paths == {0: "spmv", END - 1: "dense rows"}  # an entry of 16 million columns


def test_bitmap_turns_x_from_five_tokens_on_where_there_are_vectors(room: Room) -> None:
    assert room("bitmap", CPU) == {0: "spmv", 5: "spmm"}
    assert room("bitmap", OLD_CPU) == {0: "spmv", 5: "dense rows"}
    assert room("bitmap", CPU, cols=0) == {0: "spmv", 5: "dense rows"}


def test_sell_streams_as_long_as_dense_rows_take_longer(room: Room) -> None:
    """By the bytes held a byte of dense: those of density 0.5, 0.3 and 0.1, which are 0.66, 0.4 and 0.16."""
    for rows, cols, held, last in (
        *((4096, 4096, 0.66, 8), (4096, 4096, 0.4, 8), (4096, 4096, 0.16, 24), (4096, 4096, 0, 64)),
        *((8192, 8192, 0.66, 16), (8192, 8192, 0.4, 24), (8192, 8192, 0.16, 32), (4096, 4096, 2, 8)),
        *((4096, 24576, 0.66, 16), (4096, 24577, 0.66, 8), (4096, 30000, 0.16, 32), (0, 64, 0, 64), (8, 0, 0, 64)),
    ):
        paths = room("sell", HOPPER, rows, cols, int(held * rows * cols * 2))
        assert paths == {0: "spmm", 1: "spmv", 2: "spmm", last + 1: "dense rows"}, (rows, cols, held)
    for held, last in ((0.66, 3), (0.4, 4), (0.16, 8), (0, 20)):  # a pass takes one token without bulk copies
        paths = room("sell", OTHER_GPU, held=int(held * 4096 * 4096 * 2))
        assert paths == {0: "spmm", 1: "spmv", 2: "spmm", last + 1: "dense rows"}
    for device in (HOPPER, OTHER_GPU):
        few = {0: "spmm", 1: "spmv", 2: "dense rows"}
        assert room("sell", device, limit=0) == room("sell", device, limit=1) == few
        assert room("sell", device, held=10**9, limit=16) == {0: "spmm", 1: "spmv", 2: "spmm", 17: "dense rows"}


def test_tile_has_a_kernel_for_few_and_one_for_many(room: Room) -> None:
    assert room("tile", HOPPER) == room("tile", HOPPER, rows=1) == {0: "few", 65: "many", END: "dense rows"}
    assert room("tile", HOPPER, rows=4097) == {0: "few", 33: "many", END: "dense rows"}
    assert room("tile", HOPPER, held=22528) == room("tile", HOPPER) != room("tile", HOPPER, held=22529)
    assert room("tile", HOPPER, held=22529) == room("tile", HOPPER, rows=4097)
    assert room("tile", OTHER_GPU) == {0: "ring", 513: "dense rows"}
    assert room("tile", HOPPER_BY_RINGS) == {0: "ring", 193: "dense rows"}
    assert room("tile", HOPPER, rows=0) == {0: "few", END: "dense rows"}
    assert room("tile", CPU) == room("tile", HOPPER, cols=0) == {0: "dense rows"}
    assert room("tile", HOPPER, limit=0) == {0: "few", 1: "dense rows"}
    assert room("tile", OTHER_GPU, limit=0) == {0: "ring", 1: "dense rows"}
    assert room("tile", HOPPER, limit=100) == {0: "few", 65: "many", 101: "dense rows"}
    assert room("tile", OTHER_GPU, limit=1000) == {0: "ring", 1001: "dense rows"}


def test_the_kernel_for_few_has_no_registers_for_parts_of_64_tokens(room: Room) -> None:
    for layout in ("tile", "sparse11", "dense12", "dense8", "sparse8"):
        assert room(layout, HOPPER, in_parts=True) == {0: "few", 33: "many", END: "dense rows"}
        assert room(layout, OTHER_GPU, in_parts=True) == {0: "ring", 513: "dense rows"}


@pytest.mark.parametrize("name", ["sparse11", "dense8", "sparse8", "dense12"])
def test_other_codecs_have_them_too(room: Room, name: str) -> None:
    up_to_64, up_to_32 = ({0: "few", last + 1: "many", END: "dense rows"} for last in (64, 32))
    assert room(name, HOPPER) == room(name, HOPPER, held=30_000) == up_to_64
    assert room(name, HOPPER, cols=4097) == (up_to_32 if name == "dense12" else up_to_64)
    assert room(name, HOPPER, rows=4097) == up_to_32
    assert room(name, HOPPER, rows=0) == {0: "few", END: "dense rows"}
    assert room(name, CPU) == room(name, HOPPER, cols=0) == {0: "dense rows"}
    assert room(name, OTHER_GPU) == room("tile", OTHER_GPU)
    assert room(name, HOPPER, limit=0) == {0: "few", 1: "dense rows"}
    assert room(name, HOPPER, limit=100) == {0: "few", 65: "many", 101: "dense rows"}


@pytest.mark.parametrize("device", DEVICES, ids=DEVICES.get)
def test_ec_is_alike_everywhere(room: Room, device: tuple[int, ...]) -> None:
    assert room("ec", device) == {0: "dense rows", 1: "spmv", 2: "dense rows"}
