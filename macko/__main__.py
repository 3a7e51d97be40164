"""`python -m macko`: what `macko doctor` says; with arguments the command `macko`."""

import sys

from . import cli
from .measure import doctor

if __name__ == "__main__":
    sys.exit(cli.main() if len(sys.argv) > 1 else doctor.main())
