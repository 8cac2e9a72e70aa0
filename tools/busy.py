"""``make test-busy FILES=...``: run test files many times next to busy loops, and stop at the first failure.

A test that depends on the speed of the machine fails here sooner than in CI.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NUM_LOOPS, NUM_RUNS = 4, 20


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Let ``number`` processes compute in this context."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> int:
    """Return the exit status of the first run of pytest that failed, or 0."""
    parser = argparse.ArgumentParser(prog="make test-busy FILES=...", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--runs", type=int, default=NUM_RUNS, help="default: %(default)s")
    parser.add_argument("--loops", type=int, default=NUM_LOOPS, help="default: %(default)s")
    options = parser.parse_args()
    with busy_loops(options.loops):
        for run in range(1, options.runs + 1):
            print(f"[busy] run {run} of {options.runs}", flush=True)
            if status := subprocess.run([sys.executable, "-m", "pytest", "-q", *options.files]).returncode:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
