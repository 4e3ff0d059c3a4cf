"""The pure core: building trajectories (`builder.py`) and resolving lineage (`lineage.py`).

Prints their JSON lines; exits non-zero if a claim of either does not hold.

Run: python -m benchmarks.core
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PARTS = ("builder", "lineage")


def main() -> int:
    """Each part in a process of its own, so that neither measures the other's memory."""
    files = [Path(__file__).with_name(f"{part}.py") for part in PARTS]
    codes = [subprocess.run([sys.executable, str(file)]).returncode for file in files]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
