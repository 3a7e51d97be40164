"""Runs a command and prints a dot wherever it has said nothing for three seconds: python verify/alive.py COMMAND ..."""

import os
import select
import subprocess
import sys

SECONDS = 3


def main() -> int:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # or what it prints would come late, through a pipe
    process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    assert process.stdout is not None
    said, dots = process.stdout.fileno(), False
    try:
        while True:
            if not select.select([said], [], [], SECONDS)[0]:
                os.write(1, b".")
                dots = True
                continue
            text = os.read(said, 1 << 16)
            if dots:
                os.write(1, b"\n")
                dots = False
            if not text:
                return process.wait()
            os.write(1, text)
    except KeyboardInterrupt:  # which the command was told too
        return process.wait() or 130


if __name__ == "__main__":
    sys.exit(main())
