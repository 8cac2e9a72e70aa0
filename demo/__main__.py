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
from demo.show import note, show_beside, step, title
from tools.kube import binaries

HERE = Path(__file__).resolve().parent
LOGS = HERE / "logs"
HALVES = ("engine", "kubernetes")


class Build:
    """Gets the Kubernetes binaries in the background; on a machine that has them it ends at once."""

    def __init__(self) -> None:
        self._log = LOGS / "kubernetes-build.log"
        argv = [sys.executable, "-m", "tools.kube.binaries"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=lambda: os.nice(15))

    def progress(self) -> str:
        """One line; empty when it is over."""
        if self._process.poll() is not None:
            return ""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"building Kubernetes for part 2: {lines[-1].removeprefix('[kube]').strip() if lines else ''}"

    def wait(self) -> None:
        """Until it is done, with progress. Ends the demo when it failed."""
        if not self._ended_within(seconds=2):
            with step("Kubernetes is still being built from source, once"):
                while not self._ended_within(seconds=10):
                    note(self.progress())
        if self._process.returncode:
            sys.exit(self._log.read_text(errors="replace")[-3000:])

    def _ended_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def expected(halves: list[str]) -> str:
    """How long it will take, on two cores."""
    minutes = sum({"engine": 2, "kubernetes": 1}[half] for half in halves)
    if "kubernetes" not in halves or binaries.find():
        return f"This takes about {minutes} minutes."
    return (
        f"This takes about {minutes} minutes, and up to 8 more this first time: Kubernetes is built from\n"
        f"source while part 1 runs, and kept in {binaries.cache_directory().parent}."
    )


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
    print(expected(halves), flush=True)
    build = Build() if "kubernetes" in halves else None
    if build is not None:
        show_beside(build.progress)
    report: dict[str, dict[str, object]] = {}
    if "engine" in halves:
        report["engine"] = engine.run(LOGS)
    if build is not None:
        build.wait()
        report["kubernetes"] = kubernetes.run(LOGS)
    title("What you saw")
    print(table(("what", "measured"), rows(report)))
    (HERE / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print("\nreport: demo/report.json   logs: demo/logs/", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
