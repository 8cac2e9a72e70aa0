"""``python -m demo``: both halves, then the table and ``demo/report.json``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.report import table
from demo import engine, kubernetes
from demo.show import note, step, title

HERE = Path(__file__).resolve().parent
LOGS = HERE / "logs"
HALVES = ("engine", "kubernetes")


def build_meanwhile() -> subprocess.Popen[bytes]:
    """Gets the Kubernetes binaries in the background; on a machine that has them it ends at once."""
    log = (LOGS / "kubernetes-build.log").open("wb")
    argv = [sys.executable, "-m", "tools.kube.binaries"]
    return subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=lambda: os.nice(15))


def wait_for_build(build: subprocess.Popen[bytes]) -> None:
    """With progress: the first time, Kubernetes is compiled, which takes minutes."""
    if not _ended_within(build, seconds=2):
        with step("Kubernetes is being built from source, once (6-8 minutes on two cores)"):
            while not _ended_within(build, seconds=10):
                lines = (LOGS / "kubernetes-build.log").read_text(errors="replace").strip().splitlines()
                note(lines[-1] if lines else "starting")
    if build.returncode:
        sys.exit((LOGS / "kubernetes-build.log").read_text(errors="replace")[-3000:])


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def rows(report: dict[str, dict[str, object]]) -> list[tuple[str, str]]:
    """The report as a table."""
    shown: list[tuple[str, str]] = []
    for name, figures in report.get("engine", {}).items():
        assert isinstance(figures, dict)
        hit = f"{figures['ttft_ms']} ms, {figures['share_of_cold']:.1%} of cold"
        shown.append((f"time to first token, {name}", f"{hit}, {figures['cached_tokens']} tokens cached"))
    for name, figure in report.get("kubernetes", {}).items():
        what, _, unit = name.rpartition("_")
        shown.append((what.replace("_", " "), f"{figure} {unit}"))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("halves", nargs="*", metavar="HALF", default=list(HALVES), help="engine, kubernetes")
    halves = parser.parse_args().halves
    if unknown := set(halves) - set(HALVES):
        parser.error(f"unknown half {', '.join(sorted(unknown))}; there are {', '.join(HALVES)}")
    LOGS.mkdir(exist_ok=True)
    build = build_meanwhile() if "kubernetes" in halves else None
    report: dict[str, dict[str, object]] = {}
    if "engine" in halves:
        report["engine"] = engine.run(LOGS)
    if build is not None:
        wait_for_build(build)
        report["kubernetes"] = kubernetes.run(LOGS)
    title("What you saw")
    print(table(("what", "measured"), rows(report)))
    (HERE / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print("\nreport: demo/report.json   logs: demo/logs/", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
