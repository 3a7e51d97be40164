"""That verify/sanitize.py counts what compute-sanitizer says, with a stand-in for it: no GPU is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verify import sanitize

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
=========     at void macko::slab_few_kernel<__half, (int)8>(macko::few_task)+0x90 in few_cuda.cu:300
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
#: Takes the arguments of compute-sanitizer, and writes the log that lies beside it. The first two processes with a
#: file of turns do 3 of 6 problems each, and those behind them find none left.
STAND_IN = """\
#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
cp "$(dirname "$0")/log" "$2"
while [ "$1" != --turns ]; do shift; done
pwd >&2
if mkdir "$2.first" || mkdir "$2.second"; then done=3; else done=0; fi
echo "{\\"products\\": $done, \\"by_layout\\": {\\"tile\\": $done}, \\"problems\\": $done," \
    "\\"problems_left\\": $((6 - done)), \\"wrong\\": 0, \\"device\\": \\"NVIDIA H200\\"}"
"""


@pytest.fixture
def compute_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(STAND_IN)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("MACKO_COMMIT", "abc")
    (tmp_path / "lanes/macko").mkdir(parents=True)
    (tmp_path / "lanes/macko/_C_cuda.abi3.so").write_bytes(b"for tools")
    return tmp_path


def run(folder: Path, tools: str, log: str, *options: str) -> tuple[int, dict]:
    (folder / "log").write_text(log)
    others = ["--jobs", "2", "--out", str(folder / "lines"), "--lanes", str(folder / "lanes"), *options]
    status = sanitize.main([*tools.split(), *others])
    return status, json.loads((folder / "lines").read_text().splitlines()[-1])


def test_a_clean_run(compute_sanitizer: Path) -> None:
    status, line = run(compute_sanitizer, "memcheck", CLEAN)
    assert status == 0
    assert line["errors"] == {}
    assert (line["products"], line["commit"], line["tool"]) == (6, "abc", "memcheck")
    assert (line["problems"], line["problems_left"]) == (6, 0)


def test_problems_that_nobody_took(compute_sanitizer: Path) -> None:
    status, line = run(compute_sanitizer, "memcheck", CLEAN, "--jobs", "1")
    assert status == 1
    assert (line["problems"], line["problems_left"]) == (3, 3)


def test_tools_at_once_share_the_processes(compute_sanitizer: Path) -> None:
    status, _ = run(compute_sanitizer, "memcheck synccheck", CLEAN, "--jobs", "4")
    assert status == 0
    lines = [json.loads(line) for line in (compute_sanitizer / "lines").read_text().splitlines()]
    assert [(line["tool"], line["jobs"]) for line in lines] == [("memcheck", 2), ("synccheck", 2)]


def test_an_error_of_a_kernel_of_ours_and_one_of_the_librarys(compute_sanitizer: Path) -> None:
    status, line = run(compute_sanitizer, "initcheck", UNINITIALISED)
    assert status == 1
    assert line["errors"] == {"Uninitialized __global__ memory read of size 4 bytes in few_cuda.cu:300": 2}
    assert line["of_others"] == 2


DROPPED = """\
========= Warning: Error buffer overflow has been detected. Some records have been dropped
=========
========= 70 errors were skipped (error buffer overflow).
"""


def test_records_that_were_dropped_are_of_the_kernel_before(compute_sanitizer: Path) -> None:
    head, ours, theirs = UNINITIALISED.partition("========= ERROR")[0].split("========= Uninitialized")
    mark = "========= Uninitialized"
    status, line = run(compute_sanitizer, "initcheck", head + mark + theirs + DROPPED)
    assert (status, line["errors"], line["of_others"]) == (0, {}, 2 * 3)
    status, line = run(compute_sanitizer, "initcheck", head + mark + theirs + mark + ours + DROPPED)
    assert (status, len(line["errors"]), line["of_others"]) == (1, 3, 2 * 1)


def test_a_race(compute_sanitizer: Path) -> None:
    status, line = run(compute_sanitizer, "racecheck", RACE)
    assert status == 1
    assert [place.rpartition(" in ")[2] for place in line["errors"]] == ["spmv_cuda.cu:287"]


LAST = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at void macko::copy_async<(int)16>(int)+0x40 in cuda.cuh:130
=========     and Read access at unsigned int macko::load_value<(bool)1>(unsigned int)+0x80 in decode.cuh:20 [4 hazards]
=========     and Read access at unsigned int macko::load_value<(bool)1>(unsigned int)+0x90 in decode.cuh:20 [4 hazards]
=========
"""
OTHER_READ = "=========     and Read access at macko::read_32(unsigned int)+0xa0 in decode.cuh:29 [4 hazards]\n"


@pytest.mark.parametrize(
    ("log", "known"),
    [
        (LAST, True),
        (LAST.replace("=========\n", OTHER_READ), False),
        (LAST.replace("copy_async<", "bulk_copy<"), False),
    ],
)
def test_a_race_that_is_known_is_so_as_a_whole(compute_sanitizer: Path, log: str, known: bool) -> None:
    status, line = run(compute_sanitizer, "racecheck", log)
    assert status == (not known)
    assert (sum(line["known"].values()), sum(line["errors"].values())) == ((2, 0) if known else (0, 2))


@pytest.mark.slow
def test_tools_run_with_the_library_made_for_them(compute_sanitizer: Path) -> None:
    lanes = sanitize.package_with(compute_sanitizer / "lanes")
    assert (lanes / "macko/_C_cuda.abi3.so").read_bytes() == b"for tools"
    said = subprocess.run(
        [sys.executable, "-c", "import verify.stress, macko; print(macko.__file__)"],
        cwd=lanes,
        env={**os.environ, "PYTHONPATH": str(lanes)},
        capture_output=True,
        text=True,
    )
    assert said.stdout.strip() == str(lanes / "macko/__init__.py"), said.stderr


@pytest.mark.parametrize("tool", sanitize.LEAN)
def test_without_the_library_made_for_it(compute_sanitizer: Path, tool: str) -> None:
    with pytest.raises(SystemExit, match=r"initcheck and racecheck need .* made with NVCC_APPEND_FLAGS"):
        run(compute_sanitizer, tool, CLEAN, "--lanes", str(compute_sanitizer))


def test_a_process_that_dies_is_no_clean_run(compute_sanitizer: Path) -> None:
    (compute_sanitizer / "compute-sanitizer").write_text("#!/bin/sh\nexit 3\n")
    status, line = run(compute_sanitizer, "memcheck", CLEAN)
    assert status == 1
    assert (line["products"], line["broken"]) == (0, ["exit status 3 at no case"] * 2)


DIES = """echo another case
echo a case
echo 'Traceback (most recent call last):'
exit 6"""


def test_another_process_goes_on_behind_one_that_dies(
    compute_sanitizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its case is named, and the first lines of its log are shown."""
    tool = compute_sanitizer / "compute-sanitizer"
    tool.write_text(STAND_IN.replace("pwd >&2", f'if mkdir "$0.died"; then\n{DIES}\nfi 2>&1'))
    options = ("--jobs", "1", "--logs", str(compute_sanitizer / "logs"))
    status, line = run(compute_sanitizer, "memcheck", UNINITIALISED, *options)
    assert status == 1
    assert (line["broken"], line["problems"], line["problems_left"]) == (["exit status 6 at a case"], 3, 3)
    said = capsys.readouterr().out
    assert "memcheck, exit status 6 at a case:\n========= COMPUTE-SANITIZER\n" in said
    assert "Traceback" in said
    assert (compute_sanitizer / "logs/memcheck.0.log").read_text() == UNINITIALISED


def test_errors_that_were_not_printed(compute_sanitizer: Path) -> None:
    log = CLEAN.replace("0 errors", "102 errors") + "========= ERROR SUMMARY: 2 errors were not printed. Use more.\n"
    status, line = run(compute_sanitizer, "initcheck", log)
    assert status == 1
    assert (line["errors"], line["unprinted"]) == ({}, 4)


def test_shares_of_the_processes() -> None:
    assert sanitize.shares_of(["memcheck", "initcheck", "synccheck", "racecheck"], 28) == [4, 5, 5, 14]
    assert sanitize.shares_of(["racecheck"], 14) == [14]
    assert sanitize.shares_of(["memcheck", "initcheck"], 1) == [1, 1]


HANGS = STAND_IN.replace("pwd >&2", 'mkdir "$0.hangs" && echo a case && sleep 1000')  # the first one


@pytest.mark.slow
def test_a_process_that_hangs_is_killed_and_its_problems_are_left(compute_sanitizer: Path) -> None:
    (compute_sanitizer / "compute-sanitizer").write_text(HANGS)
    status, line = run(compute_sanitizer, "memcheck", CLEAN, "--minutes", "0", "--grace", "0.02")
    assert status == 1
    assert (line["broken"], line["problems"], line["problems_left"]) == (["exit status -9 at a case"], 3, 3)
    assert line["seconds"] < 100


@pytest.mark.slow
def test_another_process_goes_on_behind_one_that_hangs(
    compute_sanitizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (compute_sanitizer / "compute-sanitizer").write_text(HANGS)
    monkeypatch.setitem(sanitize.STALL, "memcheck", 1)
    status, line = run(compute_sanitizer, "memcheck", CLEAN, "--jobs", "1")
    assert status == 1
    assert (line["broken"], line["problems"], line["problems_left"]) == (["exit status -9 at a case"], 3, 3)
    assert line["seconds"] < 100


#: x claims more elements than its allocation has.
PAST_THE_END = """\
import torch, macko
w = torch.zeros(1, 1 << 22, dtype=torch.float16, device="cuda")
w[0, ::1000] = 1
packed = macko.MackoWeight.from_dense(w)
there = torch.zeros(64, dtype=torch.float16, device="cuda")
class X:
    __cuda_array_interface__ = dict(shape=(1 << 22,), typestr="<f2", data=(there.data_ptr(), False), version=3)
packed.linear(torch.as_tensor(X(), device="cuda"))
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.slow
def test_memcheck_looks_at_our_kernels(tmp_path: Path) -> None:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        pytest.skip("there is no compute-sanitizer")
    log = tmp_path / "log"
    command = [tool, "--tool", "memcheck", *sanitize.OURS, "--log-file", str(log), sys.executable, "-c", PAST_THE_END]
    environment = {**os.environ, "PYTHONPATH": str(sanitize.ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = [report for report in sanitize.reports(log.read_text()) if sanitize.is_ours(report)]
    assert any("Invalid __global__ read" in report and "spmv_cuda.cu" in report for report in found), said.stderr
