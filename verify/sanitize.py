"""Runs every kernel under the tools of compute-sanitizer, on one GPU, and keeps what they say.

    python -m verify.sanitize memcheck synccheck
    python -m verify.sanitize initcheck racecheck    # of a CUDA library made for both, as `make sanitize` does

What runs are the small problems of verify/stress.py: sizes that fill no tile, odd ones, rings of stages that wrap;
every layout, width, kernel of older GPUs, packing, unpacking, norm and gate; first all of them at one size. initcheck
and racecheck follow torch's kernels, too, and take seconds a product: theirs are one size for float16, which fills no
tile, and a wide one for bfloat16, with a bias only. The tools run at once, each in its part of --jobs
processes, which take turns at its problems and begin none after --minutes. Where one dies or hangs, its case and the
first lines of its log are shown, and another process goes on after it. A line of tool, commit, seconds and errors is
appended to --out. Exit status 1: an error of a kernel of macko's that is not in KNOWN, or one that was not printed, a
wrong product, a process that did not end well, or a problem for which there was no time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
LANES = "MACKO_EVERY_LANE_ARRIVES"
#: Seconds that a process may take to its first case, and from one to the next if not 100: then it hangs.
START, STALL = 300, {"initcheck": 300, "racecheck": 300}
#: What follows all kernels, torch's and the library's too: of the problems these get those of `verify.stress --lean`,
#: with a library made with LANES.
LEAN = ("initcheck", "racecheck")
#: Parts of the processes that a tool has at first, if not 1.
SHARE = {"racecheck": 3}
#: Lines of a log that are shown of a process that died first, and of the others.
FIRST_LOG, OTHER_LOGS = 60, 6

FAILURE = re.compile(r"^(?:Traceback|terminate called|Fatal Python error)", re.MULTILINE)
#: Errors of a kernel beyond those that the tool had room for.
OVERFLOW = re.compile("error buffer overflow", re.IGNORECASE)
#: Errors beyond --print-limit: nobody knows whose.
UNPRINTED = re.compile(r"(\d+) errors? (?:was|were) not printed")

#: Kernels of macko's by what is in their mangled names; those in no namespace have their file's.
OURS = ["--kernel-name", "kns=_cuda_cu_", "--kernel-name", "kns=macko"]
#: What looks at all kernels. initcheck has to see what others write, as torch's sums and zeros that packing reads, and
#: so reports their reads, too: they must not use the limit up. Nor must copies of results to the host, a record each 32
#: bytes: bulk copies stored them, which the tool does not see. racecheck dies at a kernel of the library's GEMM if it
#: is told to leave that out (H200).
LOOK = {
    "initcheck": ["--print-limit", "10000", "--show-backtrace", "no", "--check-api-memory-access", "no"],
    "racecheck": [],
}


class Known(NamedTuple):
    """A report that is no error: of which tool, what the whole of it is like, and why."""

    tool: str
    report: str
    why: str


#: Where initcheck and racecheck look at a library made with LANES; docs/verifying.md says why they can follow no other.
KNOWN = (
    Known(
        "racecheck",
        r"\w+: Race reported between Write access at (?![^\n]*bulk_copy)[^\n]*"
        r"(\nand Read access at [^\n]*load_(value<\(bool\)1>|row<)[^\n]*)+",
        "what a stream's last group reads behind its last value is dropped",
    ),
)


def reports(log: str) -> list[str]:
    """The errors of a log, each with the lines that say where. Blocks are parted by a line of nothing but the mark."""
    lines = [line.removeprefix("=========").strip() for line in log.splitlines() if line.startswith("=========")]
    blocks = "\n".join(lines).split("\n\n")
    kept = []
    for block in blocks:
        text = re.sub(r"^(COMPUTE-SANITIZER|.* SUMMARY: .*)$", "", block, flags=re.MULTILINE).strip()
        if text:
            kept.append(text)
    return kept


def is_ours(report: str) -> bool:
    """Of a kernel of macko's, or of none; else it is the library's, or torch's."""
    return "_cuda.cu" in report or "macko" in report or not re.search(r"^(at|and) ", report, re.MULTILINE)


def by_owner(found: Sequence[str]) -> tuple[list[str], list[str]]:
    """A log's reports: of macko's kernels, or of none; and of others. That records of a kernel were dropped is said
    after those that were kept, so it is that kernel's; and at the end for all."""
    ours: list[str] = []
    others: list[str] = []
    dropped = False  # of ours
    for report, before in zip(found, ["", *found], strict=False):
        if not OVERFLOW.search(report):
            mine = is_ours(report)
        elif "detected" in report:
            mine = not before or is_ours(before)
            dropped |= mine
        else:
            mine = dropped
        (ours if mine else others).append(report)
    return ours, others


def place_of(report: str) -> str:
    """What is wrong, and where: its first line, with the line that names a kernel; of a race the other accesses too."""
    title = re.sub(r"0x[0-9a-f]+", "0x", report.splitlines()[0])
    places = list(dict.fromkeys(re.findall(r"\bin (\S+\.cuh?:\d+)", report)))[: 4 if "Race" in title else 1]
    return f"{title[:160]}{' in ' if places else ''}{' and '.join(places)}"


def commit() -> str:
    said = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return os.environ.get("MACKO_COMMIT") or said.stdout.strip() or "unknown"


def package_with(lanes: Path) -> Path:
    """A folder with the package and what runs it, as they are here, and the CUDA library of `lanes`."""
    libraries = list(lanes.glob("macko/_C_cuda.*so"))
    if not libraries:
        raise SystemExit(
            f"{' and '.join(LEAN)} need {lanes}/macko/_C_cuda.abi3.so, made with NVCC_APPEND_FLAGS=-D{LANES} (make "
            "sanitize): racecheck does not see that one lane arrives at a barrier for its warp, and initcheck would "
            "write down each look at a flag that nobody has set"
        )
    ignored = shutil.ignore_patterns("__pycache__", "_C_cuda.*", "results")
    for name in ("macko", "benchmarks", "tests", "verify"):
        shutil.copytree(ROOT / name, lanes / name, ignore=ignored, dirs_exist_ok=True)
    return lanes.resolve()


class Job(NamedTuple):
    process: subprocess.Popen[bytes]
    output: Path
    log: Path

    def runs(self) -> bool:
        return self.process.poll() is None

    def hangs(self, stall: float) -> bool:
        """It names each case when it begins."""
        said = self.output.stat()
        return self.runs() and time.time() - said.st_mtime > (stall if said.st_size else START)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def said(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def logged(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def named(self) -> list[str]:
        """Cases, and lines of what it has done, before what it said when it died."""
        return FAILURE.split(self.said(), maxsplit=1)[0].rstrip().splitlines()

    def line(self) -> dict[str, Any] | None:
        """What it said last that it has done."""
        return next((json.loads(line) for line in reversed(self.named()) if line.startswith("{")), None)

    def case(self) -> str:
        """The one in which it is; empty: in none."""
        last = "".join(self.named()[-1:])
        return "" if last.startswith("{") else last

    def why(self, lines: int) -> str:
        """The first lines of its log, less the host's frames, and of what it said when it died."""
        log = [line for line in self.logged().splitlines() if "Host Frame" not in line][:lines]
        failure = FAILURE.search(self.said())
        return "\n".join([*log, *(self.said()[failure.start() :].splitlines()[:lines] if failure else ())])


class Run:
    """One tool over the small problems, in processes that take turns at them."""

    def __init__(self, tool: str, jobs: int, folder: Path, options: argparse.Namespace) -> None:
        self.tool, self.jobs, self.folder, self.options = tool, jobs, folder, options
        self.where = options.package if tool in LEAN else ROOT
        self.begun = self.ended = time.monotonic()
        self.is_over = False  #: no process more is of use
        self.started: list[Job] = []
        for _ in range(jobs):
            self.start()

    def start(self) -> None:
        output = self.folder / f"{self.tool}.{len(self.started)}"
        log = output.with_suffix(output.suffix + ".log")
        minutes = self.options.minutes - (time.monotonic() - self.begun) / 60
        command = [self.options.sanitizer, "--tool", self.tool, *LOOK.get(self.tool, OURS), "--log-file", str(log)]
        command += [sys.executable, "-m", "verify.stress", "--once", "--minutes", str(minutes)]
        command += ["--lean"] if self.tool in LEAN else []
        command += ["--only", self.options.only, "--turns", str(self.folder / f"{self.tool}.turns")]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.where),
            "MACKO_COMMIT": commit(),
            "OMP_NUM_THREADS": "1",  # what is wanted is computed on the CPU, by as many processes as it has cores
            # Each tensor is an allocation of its own, so that a step over its end is one over an allocation's.
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        }
        with output.open("w") as file:  # a pipe that nobody reads meanwhile would fill up
            process = subprocess.Popen(
                command,
                cwd=self.where,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(Job(process, output, log))

    def running(self) -> int:
        return sum(job.runs() for job in self.started)

    def look(self, is_late: bool) -> None:
        """Kills what hangs. Another one is of use unless one ended with no problem or time left, or in no case."""
        for job in self.started:
            if job.runs() and (is_late or job.hangs(STALL.get(self.tool, 100))):
                job.kill()
        self.is_over |= is_late or any(not job.runs() and not job.case() for job in self.started)
        if self.running():
            self.ended = time.monotonic()

    def broken(self) -> list[Job]:
        return [job for job in self.started if job.process.returncode or job.case() or not job.line()]

    def line(self) -> dict[str, Any]:
        logs = [job.logged() for job in self.started]
        owned = [by_owner(reports(log)) for log in logs]
        lines = [line for job in self.started if (line := job.line())]
        errors = [report for ours, _ in owned for report in ours]
        known = {r: k.why for r in errors for k in KNOWN if k.tool == self.tool and re.fullmatch(k.report, r)}
        done = sum(line["problems"] for line in lines)
        return {
            "what": "sanitize",
            "tool": self.tool,
            "only": self.options.only,
            "commit": commit(),
            "device": lines[0]["device"] if lines else "unknown",
            "seconds": round(self.ended - self.begun),
            "jobs": self.jobs,
            "products": sum(line["products"] for line in lines),
            "by_layout": dict(sum((Counter(line["by_layout"]) for line in lines), Counter())),
            "problems": done,
            "problems_left": lines[0]["problems"] + lines[0]["problems_left"] - done if lines else None,
            "wrong": sum(line["wrong"] for line in lines),
            "errors": dict(Counter(place_of(report) for report in errors if report not in known)),
            "known": dict(Counter(known[report] for report in errors if report in known)),
            "of_others": sum(len(others) for _, others in owned),
            "unprinted": sum(int(count) for log in logs for count in UNPRINTED.findall(log)),
            "broken": [f"exit status {job.process.returncode} at {job.case() or 'no case'}" for job in self.broken()],
        }


def wait_for(runs: Sequence[Run], jobs: int, until: float) -> None:
    """What dies or hangs costs one problem: another process goes on with those after it. And where a tool has ended,
    the slower ones get its processes."""
    while True:
        is_late = time.monotonic() > until
        for run in runs:
            run.look(is_late)
        waiting, running = [run for run in runs if not run.is_over], sum(run.running() for run in runs)
        if waiting and running < jobs:
            min(waiting, key=lambda run: (run.running() - run.jobs, -SHARE.get(run.tool, 1))).start()
        elif running:
            time.sleep(0.2)
        else:
            return


def shares_of(tools: Sequence[str], jobs: int) -> list[int]:
    """Processes of each tool, by SHARE; at least one."""
    weights = [SHARE.get(tool, 1) for tool in tools]
    ends = [jobs * sum(weights[: i + 1]) // sum(weights) for i in range(len(tools))]
    return [max(1, end - begin) for begin, end in zip([0, *ends], ends, strict=False)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="+", choices=TOOLS)
    parser.add_argument(
        "--jobs", type=int, default=max(4, min(28, (os.cpu_count() or 1) - 2)), help="processes at once, of all tools"
    )
    parser.add_argument("--minutes", type=float, default=8, help="what is begun then ends")
    parser.add_argument("--grace", type=float, default=1.5, metavar="MINUTES", help="then what still runs is killed")
    parser.add_argument("--only", default="", metavar="TEXT", help="problems that have it in their name")
    parser.add_argument(
        "--lanes", type=Path, default=ROOT / "build/lanes", help=f"has a macko/_C_cuda made with {LANES}"
    )
    parser.add_argument("--logs", help="a new folder that keeps what processes and tools said; default: none")
    parser.add_argument("--out", help="where lines are appended; default: benchmarks/results/<device>/sanitize.jsonl")
    options = parser.parse_args(arguments)
    options.sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(options.sanitizer).exists():
        parser.error("there is no compute-sanitizer: it is in the CUDA toolkit")
    options.package = package_with(options.lanes) if set(options.tools) & set(LEAN) else None
    bad, until = False, time.monotonic() + (options.minutes + options.grace) * 60
    with contextlib.ExitStack() as stack:
        folder = Path(options.logs or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        shares = shares_of(options.tools, options.jobs)
        runs = [Run(tool, jobs, folder, options) for tool, jobs in zip(options.tools, shares, strict=True)]
        wait_for(runs, options.jobs, until)
        lines = [run.line() for run in runs]
        for run in runs:
            for count, job in enumerate(run.broken()):
                print(f"{run.tool}, exit status {job.process.returncode} at {job.case() or 'no case'}:")
                print(job.why(OTHER_LOGS if count else FIRST_LOG))
    for line in lines:
        print(json.dumps(line), flush=True)
        device = str(line["device"]).lower().removeprefix("nvidia ").replace(" ", "-")
        out = Path(options.out or Path("benchmarks/results", device, "sanitize.jsonl"))
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        failures = ("errors", "unprinted", "wrong", "broken", "problems_left")
        bad |= any(line[key] for key in failures) or not line["products"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
