"""That verify/sanitize.py counts what compute-sanitizer says, with a stand-in for it: no GPU is needed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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
#: file of turns do 3 of 6 problems each, and those after them find none left.
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


DROPPED = """\
========= Warning: Error buffer overflow has been detected. Some records have been dropped
=========
========= 70 errors were skipped (error buffer overflow).
"""
MARK = "========= Uninitialized"
HEAD, OURS, THEIRS = UNINITIALISED.partition("========= ERROR")[0].split(MARK)
UNPRINTED = CLEAN.replace("0 errors", "102 errors") + "========= ERROR SUMMARY: 2 errors were not printed. Use more.\n"
READ = "Uninitialized __global__ memory read of size 4 bytes in few_cuda.cu:300"
#: What a tool is told to do and says, the exit status, and of the line that is kept.
SAID: dict[str, tuple[str, str, tuple[str, ...], int, dict[str, Any]]] = {
    "a clean run": ("memcheck", CLEAN, (), 0, {
        "errors": {}, "products": 6, "commit": "abc", "tool": "memcheck", "problems": 6, "problems_left": 0,
    }),
    "problems that nobody took": ("memcheck", CLEAN, ("--jobs", "1"), 1, {"problems": 3, "problems_left": 3}),
    "a kernel of ours and one of the library's": ("initcheck", UNINITIALISED, (), 1, {
        "errors": {READ: 2}, "of_others": 2,
    }),
    "dropped records, of the library's kernel before": ("initcheck", HEAD + MARK + THEIRS + DROPPED, (), 0, {
        "errors": {}, "of_others": 2 * 3,
    }),
    "dropped records, of ours before": ("initcheck", HEAD + MARK + THEIRS + MARK + OURS + DROPPED, (), 1, {
        "of_others": 2 * 1,
    }),
    "errors that were not printed": ("initcheck", UNPRINTED, (), 1, {"errors": {}, "unprinted": 4}),
    "a race": ("racecheck", RACE, (), 1, {}),
}  # fmt: skip


@pytest.mark.parametrize("what", SAID)
def test_what_a_tool_says_is_counted(compute_sanitizer: Path, what: str) -> None:
    tool, log, options, wanted, found = SAID[what]
    status, line = run(compute_sanitizer, tool, log, *options)
    assert (status, {key: line[key] for key in found}) == (wanted, found)
    if what == "dropped records, of ours before":
        assert len(line["errors"]) == 3
    if what == "a race":
        assert [place.rpartition(" in ")[2] for place in line["errors"]] == ["spmv_cuda.cu:287 and spmv_cuda.cu:281"]


def test_tools_at_once_share_the_processes(compute_sanitizer: Path) -> None:
    status, _ = run(compute_sanitizer, "memcheck synccheck", CLEAN, "--jobs", "4")
    assert status == 0
    lines = [json.loads(line) for line in (compute_sanitizer / "lines").read_text().splitlines()]
    assert [(line["tool"], line["jobs"]) for line in lines] == [("memcheck", 2), ("synccheck", 2)]


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


def test_shares_of_the_processes() -> None:
    assert sanitize.shares_of(["memcheck", "initcheck", "synccheck", "racecheck"], 28) == [4, 5, 5, 14]
    assert sanitize.shares_of(["racecheck"], 14) == [14]
    assert sanitize.shares_of(["memcheck", "initcheck"], 1) == [1, 1]


HANGS = STAND_IN.replace("pwd >&2", 'mkdir "$0.hangs" && echo a case && sleep 1000')  # the first one


@pytest.mark.slow
@pytest.mark.parametrize("another", [False, True])
def test_a_process_that_hangs_is_killed(
    compute_sanitizer: Path, monkeypatch: pytest.MonkeyPatch, another: bool
) -> None:
    """Where there is no time left its problems are, too; else another process goes on after it."""
    (compute_sanitizer / "compute-sanitizer").write_text(HANGS)
    monkeypatch.setitem(sanitize.STALL, "memcheck", 1)
    options = ("--jobs", "1") if another else ("--minutes", "0", "--grace", "0.02")
    status, line = run(compute_sanitizer, "memcheck", CLEAN, *options)
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
    assert any("Invalid __global__ read" in report and "spmv" in report for report in found), said.stderr
