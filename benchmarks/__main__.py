"""Runs every benchmark, or those named.

python -m benchmarks [core files store state mirrored scale serving multi_turn]
"""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("core", "files", "store", "state", "mirrored", "scale", "serving", "multi_turn")


def main(names: list[str]) -> int:
    """Each in a process of its own, so that none measures what another left behind. Returns 1 if any claim fails."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    codes = [subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode for name in names or BENCHMARKS]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
