"""A short run of tests/fuzz.py, in processes of its own: a crash is a failure there, not the end of the suite."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_mutated_files_are_refused_or_read() -> None:
    pytest.importorskip("safetensors")
    command = [sys.executable, "-m", "tests.fuzz", "--cases", "2000", "--workers", "2", "--out", ""]
    done = subprocess.run(command, capture_output=True, text=True)
    line = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout
    assert line["failures"] == {}
    assert line["refused"] + line["accepted"] == 2000
    assert line["accepted"] > 20
