"""Runs every kernel under the tools of compute-sanitizer, on one GPU, and keeps what they say.

    python tools/sanitize.py memcheck initcheck synccheck
    NVCC_APPEND_FLAGS=-DMACKO_EVERY_LANE_ARRIVES python tools/sanitize.py racecheck    # of a build made so

What runs are the small problems of tests/stress.py: sizes that fill no tile, odd ones, rings of stages that wrap; every
layout, width, kernel of older GPUs, packing, unpacking, norm and gate. --jobs processes share them, and begin none that
would not be over within --minutes. A line of tool, commit, seconds and errors is appended to --out. Exit status 1: an
error of a kernel of macko's that is not in KNOWN, a wrong product, or a process that did not end well.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
LANES = "MACKO_EVERY_LANE_ARRIVES"


class Known(NamedTuple):
    """A report that is no error: of which tool, what is in it, and why."""

    tool: str
    report: str
    why: str


#: None where racecheck looks at a build with LANES; docs/kernels.md says why it cannot follow any other.
KNOWN: tuple[Known, ...] = ()


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


def place_of(report: str) -> str:
    """What is wrong, and where: its first line, with the line that names a kernel."""
    title = re.sub(r"0x[0-9a-f]+", "0x", report.splitlines()[0])
    at = re.search(r"\bin (\S+\.cuh?:\d+)", report)
    return f"{title[:160]}{f' in {at[1]}' if at else ''}"


def command(tool: str, log: Path, shard: str, minutes: float, sanitizer: str) -> list[str]:
    # initcheck has to see what other kernels write; the others need to look at ours only.
    names = [] if tool == "initcheck" else ["--kernel-name", "kns=_cuda_cu_,kns=macko"]
    suite = [sys.executable, "-m", "tests.stress", "--once", "--shard", shard, "--minutes", str(minutes)]
    return [sanitizer, "--tool", tool, *names, "--log-file", str(log), *suite]


def sanitize(tool: str, jobs: int, minutes: float, sanitizer: str, only: str) -> dict[str, object]:
    """One tool over all shards at once."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # Each tensor is an allocation of its own, so that a step over its end is one over an allocation's.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        logs = [Path(folder, f"{i}.log") for i in range(jobs)]
        running = [
            subprocess.Popen(
                [*command(tool, log, f"{i}/{jobs}", minutes, sanitizer), "--only", only],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i, log in enumerate(logs)
        ]
        outputs = [process.communicate()[0] for process in running]
        found = [report for log in logs if log.exists() for report in reports(log.read_text(errors="replace"))]
    lines, broken = [], []
    for process, output in zip(running, outputs, strict=True):
        last = output.strip().splitlines()[-1] if output.strip() else ""
        if process.returncode or not last.startswith("{"):
            broken.append(f"exit status {process.returncode}: {output[-1500:]}")
        if last.startswith("{"):
            lines.append(json.loads(last))
    errors = [report for report in found if is_ours(report)]
    known = {r: k.why for r in errors for k in KNOWN if k.tool == tool and k.report in r}
    return {
        "what": "sanitize",
        "tool": tool,
        "commit": lines[0]["commit"] if lines else "unknown",
        "device": lines[0]["device"] if lines else "unknown",
        "seconds": round(time.monotonic() - begun),
        "jobs": jobs,
        "products": sum(line["products"] for line in lines),
        "problems_left": sum(line["problems_left"] for line in lines),
        "wrong": sum(line["wrong"] for line in lines),
        "errors": dict(Counter(place_of(report) for report in errors if report not in known)),
        "known": dict(Counter(known[report] for report in errors if report in known)),
        "of_others": len(found) - len(errors),
        "broken": broken,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="+", choices=TOOLS)
    parser.add_argument(
        "--jobs", type=int, default=max(1, min(12, (os.cpu_count() or 1) - 2)), help="processes at once"
    )
    parser.add_argument("--minutes", type=float, default=8, help="of each tool; what is begun then ends")
    parser.add_argument("--only", default="", metavar="TEXT", help="problems that have it in their name")
    parser.add_argument("--out", help="where lines are appended; default: benchmarks/results/<device>/sanitize.jsonl")
    args = parser.parse_args(arguments)
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        parser.error("there is no compute-sanitizer: it is in the CUDA toolkit")
    if "racecheck" in args.tools and LANES not in os.environ.get("NVCC_APPEND_FLAGS", ""):
        parser.error(
            f"racecheck needs a build made with NVCC_APPEND_FLAGS=-D{LANES}, and the same in its environment: "
            "it does not see that one lane arrives at a barrier for its warp"
        )
    bad = False
    for tool in args.tools:
        line = sanitize(tool, args.jobs, args.minutes, sanitizer, args.only)
        print(json.dumps(line), flush=True)
        folder = str(line["device"]).lower().removeprefix("nvidia ").replace(" ", "-")
        out = Path(args.out or Path("benchmarks/results", folder, "sanitize.jsonl"))
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: value for name, value in line.items() if name != "broken"}) + "\n")
        bad |= bool(line["errors"] or line["wrong"] or line["broken"] or line["problems_left"] or not line["products"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
