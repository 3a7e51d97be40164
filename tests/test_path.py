"""The knobs, and the room that decides which kernel multiplies."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from macko import _library

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
    """Also within another one, where the last word counts, and behind an error."""
    best, outside = _library._said(""), _library._plan

    def within() -> None:
        with _library.plan("tile_gemm=128x256x1x2,cpu=avx512,,stages=4"):
            assert _library._said(_library._plan) == best
            raise ZeroDivisionError

    with _library.plan("cpu=scalar"):
        pytest.raises(ZeroDivisionError, within)
        assert _library._plan == f"{outside},cpu=scalar"
    assert _library._plan == outside


@pytest.mark.parametrize(
    ("name", "value"), [("MACKO_CPU", "avx"), ("MACKO_COPY", "x"), ("MACKO_PLAN", "cpu=scalar,zork=1")]
)
def test_what_the_environment_says_wrongly_is_named(name: str, value: str) -> None:
    environment = {**os.environ, name: value}
    ran = subprocess.run([sys.executable, "-c", "import macko"], env=environment, capture_output=True, text=True)
    assert ran.returncode
    assert all(part in ran.stderr for part in (name, value, "expected"))


def test_the_environment_is_read() -> None:
    environment = {**os.environ, "MACKO_CPU": "avx2", "MACKO_PLAN": "pdl=1,cpu=scalar"}
    code = "from macko import _library; print(_library.cpu_path)"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "scalar\n"
