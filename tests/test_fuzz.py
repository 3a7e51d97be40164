"""A short run of verify/fuzz.py, in processes of its own: a crash is a failure there, not the end of the suite."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from macko.weights import FORMATS, SAVED
from verify import fuzz

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_mutated_files_are_refused_or_read() -> None:
    pytest.importorskip("safetensors")
    command = [sys.executable, "-m", "verify.fuzz", "--cases", "1000", "--workers", "2", "--out", ""]
    done = subprocess.run(command, capture_output=True, text=True)
    line = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout
    assert line["failures"] == {}
    assert line["refused"] + line["accepted"] == line["cases"] == 1000
    assert line["accepted"] > 20
    assert 0 < line["most_seconds"] <= 2
    assert line["most_bytes"] > 0


@pytest.mark.parametrize(("folder", "place"), [("/clones/macko/tests", ""), (fuzz.PACKAGE, "x.py:2 broken")])
def test_a_clone_named_macko_is_not_the_package(folder: Any, place: str) -> None:
    code = compile("def broken():\n    raise ValueError\n", f"{folder}/x.py", "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        names["broken"]()
    assert fuzz.place_of(raised.value) == place


#: Of four cases the second does not end, and the third asks for more than 64 MB and four times its 100 bytes.
PLANTED = """
from verify import fuzz

def run_case(seed, case, weights, folder, config, made):
    made(100)
    while case == 1:
        pass
    assert len(bytearray((65 if case == 2 else 60) << 20))
    return "accepted"

fuzz.run_case, fuzz.honest, fuzz.SECONDS = run_case, list, 0.5
outcomes, failures = fuzz.watch(0, 4, 1, 0)
assert outcomes["accepted"] == 2, outcomes
assert 59 << 20 < outcomes["most_bytes"] < 64 << 20, outcomes
assert failures == [(1, "took over 0.5 s"), (2, "MemoryError in : ")], failures
"""


@pytest.mark.slow
def test_a_case_that_hangs_and_one_that_takes_memory_are_failures() -> None:
    pytest.importorskip("safetensors")
    done = subprocess.run([sys.executable, "-c", PLANTED], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_that_is_ended_counts_what_it_did(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    out = tmp_path / "line"
    command = [sys.executable, "-m", "verify.fuzz", "--cases", "1000000", "--workers", "2", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while process.poll() is None and not children.read_text():
            time.sleep(0.1)
        time.sleep(2)
        process.terminate()
        assert process.wait(60) == 0
    line = json.loads(out.read_text())
    assert line["failures"] == {}
    assert 0 < line["cases"] == line["refused"] + line["accepted"] < 1_000_000


def test_weights_of_every_format_are_changed() -> None:
    pytest.importorskip("safetensors")
    assert {weight.format for weight in fuzz.honest()} == {*FORMATS, *SAVED}


@pytest.mark.slow
def test_files_of_8_bits_are_read_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of a format that no weight in memory has."""
    pytest.importorskip("safetensors")
    read: set[str] = set()
    for name in ("read_file", "read_fields", "read_state"):

        def reader(*args: Any, name: str = name) -> bool:
            read.add(name)
            return False

        monkeypatch.setattr(fuzz, name, reader)
    weights = [weight for weight in fuzz.honest() if weight.format in SAVED]
    monkeypatch.setattr(fuzz, "FORMATS", {})
    for case in range(50):
        fuzz.run_case(0, case, weights, tmp_path, None, lambda size: None)
    assert read == {"read_file", "read_fields", "read_state"}


@pytest.mark.slow
def test_folders_that_lie_are_packed_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(fuzz, "CONVERTED", 1)
    said = [fuzz.run_case(0, case, [], tmp_path, fuzz.mackoconfig(), lambda size: None) for case in range(120)]
    assert said.count("accepted") > 12
    assert said.count("refused") > 60
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_c_core_refuses_or_reads_what_has_changed(tmp_path: Path) -> None:
    """As `make fuzz`, for a second and without sanitizers and optimisation, which take longer to compile."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    fuzz.write_corpus(tmp_path / "corpus")
    sources = [path for folder in ("csrc", "contrib") for path in (ROOT / folder).rglob("*.c")]
    sources = [path for path in sources if path.parent.name != "torch"]
    flags = ["-std=c17", "-D_GNU_SOURCE", "-O0", "-Wall", "-Wextra", "-Werror"]
    command = [compiler, *flags, "-o", tmp_path / "fuzz_core", ROOT / "verify" / "fuzz_core.c", *sources, "-lm"]
    subprocess.run(command, check=True)
    done = subprocess.run([tmp_path / "fuzz_core", tmp_path / "corpus", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f" {kind} " in done.stdout for kind in FORMATS if kind != "sell")
