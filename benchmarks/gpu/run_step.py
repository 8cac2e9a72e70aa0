"""The process of one step: ``python -m benchmarks.gpu.run_step STEP FOLDER SECONDS [--tiny]``.

Exits with 1 if the step found a problem or failed.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from benchmarks.gpu.plan import STEPS
from benchmarks.gpu.results import Results
from benchmarks.gpu.scale import TINY, Scale


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run_step")
    parser.add_argument("step", choices=[step.name for step in STEPS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    step = next(step for step in STEPS if step.name == args.step)
    results = Results(args.folder, args.step, args.seconds)
    try:
        module = importlib.import_module(f"benchmarks.gpu.steps.{args.step}")
        module.run(results, TINY if args.tiny else Scale())
    except Exception as error:
        traceback.print_exc()
        results.problem(f"{type(error).__name__}: {error}", step.meaning)
    return 1 if results.num_problems else 0


def _stop(number: int, _: FrameType | None) -> None:
    """End the step at its time limit, so that it removes its files in shared memory and ends its children."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    raise SystemExit(main())
