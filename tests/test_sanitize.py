"""That tools/sanitize.py counts what compute-sanitizer says, with a stand-in for it: no GPU is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import sanitize

RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at void <unnamed>::spmv<__half>(sell_matrix)+0x1330 in spmv_cuda.cu:287
=========     and Read access at void <unnamed>::spmv<__half>(sell_matrix)+0x1200 in spmv_cuda.cu:281 [384 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""  # noqa: E501
UNINITIALISED = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void macko::tile_few_kernel<__half, (int)8>(macko::few_task)+0x90 in few_cuda.cu:300
=========     by thread (0,0,0) in block (1,0,0)
=========     Address 0x7f0000000400
=========
========= Uninitialized __global__ memory read of size 16 bytes
=========     at sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute+0x700
=========     by thread (32,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
#: Takes the arguments of compute-sanitizer, and writes the log that lies beside it, once a process.
STAND_IN = """\
#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
cp "$(dirname "$0")/log" "$2"
echo '{"products": 3, "problems_left": 0, "wrong": 0, "commit": "abc", "device": "NVIDIA H200"}'
"""


@pytest.fixture
def compute_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(STAND_IN)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("NVCC_APPEND_FLAGS", raising=False)
    return tmp_path


def run(folder: Path, tool: str, log: str) -> tuple[int, dict]:
    (folder / "log").write_text(log)
    status = sanitize.main([tool, "--jobs", "2", "--out", str(folder / "lines")])
    return status, json.loads((folder / "lines").read_text().splitlines()[-1])


def test_a_clean_run(compute_sanitizer: Path) -> None:
    status, line = run(compute_sanitizer, "memcheck", CLEAN)
    assert status == 0
    assert line["errors"] == {}
    assert (line["products"], line["commit"], line["tool"]) == (6, "abc", "memcheck")


def test_an_error_of_a_kernel_of_ours_and_one_of_the_librarys(compute_sanitizer: Path) -> None:
    status, line = run(compute_sanitizer, "initcheck", UNINITIALISED)
    assert status == 1
    assert line["errors"] == {"Uninitialized __global__ memory read of size 4 bytes in few_cuda.cu:300": 2}
    assert line["of_others"] == 2


def test_a_race_and_one_that_is_known(compute_sanitizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", f"-D{sanitize.LANES}")
    status, line = run(compute_sanitizer, "racecheck", RACE)
    assert status == 1
    assert [place.rpartition(" in ")[2] for place in line["errors"]] == ["spmv_cuda.cu:287"]
    monkeypatch.setattr(sanitize, "KNOWN", (sanitize.Known("racecheck", "spmv_cuda.cu:281", "a reason"),))
    status, line = run(compute_sanitizer, "racecheck", RACE)
    assert status == 0
    assert line["known"] == {"a reason": 2}


def test_racecheck_of_a_build_that_it_cannot_follow(
    compute_sanitizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(compute_sanitizer, "racecheck", CLEAN)
    assert "racecheck needs a build made with NVCC_APPEND_FLAGS" in capsys.readouterr().err


def test_a_process_that_dies_is_no_clean_run(compute_sanitizer: Path) -> None:
    (compute_sanitizer / "compute-sanitizer").write_text("#!/bin/sh\nexit 3\n")
    status, line = run(compute_sanitizer, "memcheck", CLEAN)
    assert status == 1
    assert line["products"] == 0
