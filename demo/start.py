"""Run set-up and the build of Kubernetes at the same time, then ``python -m demo``.

    python3 -m demo.start [PART...] [--kind KIND]

This module runs before the Python environment exists. It imports only the standard library and modules that
do the same.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from demo import build as background
from demo.build import Build
from tools.kube import binaries, machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LOGS = HERE / "logs"
BUILD_LOG = LOGS / "kubernetes-build.log"
HALVES = ("engine", "kubernetes")
KINDS = ("vllm", "sglang")
"""Kinds of engines, as in ``demo.engines``."""
SECONDS = {"engine": 75, "kubernetes": 25}
"""Duration of each part on two cores, after set-up and build."""
SET_UP_MINUTES, BUILD_MINUTES = 2.5, 5.5


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=description)
    parser.add_argument(
        "halves",
        nargs="*",
        metavar="PART",
        default=list(HALVES),
        help=f"parts to run: {', '.join(HALVES)} (default: both)",
    )
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help="kind of the engines (default: vllm)")
    # `main` passes the `Build.handle` of the build that it started; empty: it started no build.
    parser.add_argument("--build", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.halves) - set(HALVES):
        parser.error(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(HALVES)}")
    return options


def expected(halves: Sequence[str], *, is_set_up: bool) -> str:
    """Return sentences about the duration on two cores, and about downloads and builds."""
    missing = machine.missing(binaries.CLUSTER) if "kubernetes" in halves else []
    seconds = sum(SECONDS[half] for half in halves)
    if is_set_up and not missing:
        return f"This takes about {seconds} seconds."
    # The build runs during set-up and the engine part. Both slow it down.
    minutes = seconds / 60 + max(0 if is_set_up else SET_UP_MINUTES, BUILD_MINUTES if missing else 0)
    lines = [f"This takes about {minutes:.0f} minutes this first time, later {seconds} seconds."]
    if not is_set_up:
        lines.append("3 GB of Python packages are downloaded and installed.")
    if missing:
        lines.append(f"Kubernetes is built from source in the background ({', '.join(missing)}).")
        lines.append(f"The result is cached in {binaries.cache_directory().parent}.")
        lines.append("The build pauses during measurements.")
    return "\n".join(lines)


def build() -> Build:
    LOGS.mkdir(exist_ok=True)
    return background.kubernetes(BUILD_LOG, binaries.CLUSTER)


def main() -> None:
    options = arguments(__doc__)
    set_up = ROOT / "tools" / "setup.sh"
    python = str(ROOT / ".venv" / "bin" / "python")
    argv = [python, "-m", "demo", *options.halves, f"--kind={options.kind}"]
    if subprocess.run([set_up, "check"]).returncode == 0:
        os.execv(python, argv)
    print(expected(options.halves, is_set_up=False), flush=True)
    with build() if "kubernetes" in options.halves else nullcontext() as started:
        if status := subprocess.run([set_up]).returncode:
            sys.exit(status)
        # An exec keeps the process, so the build remains its child.
        os.execv(python, [*argv, f"--build={started.handle if started else ''}"])


if __name__ == "__main__":
    main()
