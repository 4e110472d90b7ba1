"""`python -m eightfold`, the same as the command `eightfold`."""

from __future__ import annotations

import sys

from eightfold.cli import main

if __name__ == "__main__":
    sys.exit(main())
