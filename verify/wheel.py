"""A wheel by itself: installed into an environment of its own beside the torch that is here, its self-test, its size.

    make wheel && python -m verify.wheel dist/macko-*.whl [--out benchmarks/results/code/wheel.jsonl]

Fails where it does not install, or `python -m macko` finds a fault. A line says what it takes, packed and installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

from benchmarks.timing import append_jsonl, commit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, help="file for the line")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        # All that is installed here; .pth files in there, of an editable macko, do not count.
        site = sysconfig.get_path("purelib", "posix_prefix", vars={"base": folder})
        Path(site, "others.pth").write_text(sysconfig.get_path("purelib"))
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", args.wheel.resolve()]
        subprocess.run(install, check=True)
        subprocess.run([python, "-m", "macko"], check=True, cwd=folder)
    with zipfile.ZipFile(args.wheel) as files:
        libraries = {x.filename: x.file_size for x in files.infolist() if x.filename.endswith(".so")}
        line = {
            "wheel": args.wheel.name, "commit": commit(), "bytes": args.wheel.stat().st_size,
            "installed_bytes": sum(x.file_size for x in files.infolist()), "libraries": libraries,
        }  # fmt: skip
    print(f"{args.wheel.name}: {line['bytes'] / 1e6:.1f} MB, installed {line['installed_bytes'] / 1e6:.1f} MB")
    if args.out:
        append_jsonl(args.out, **line)


if __name__ == "__main__":
    main()
