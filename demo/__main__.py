"""``python -m demo``: both halves, then the table and ``demo/report.json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from benchmarks.report import table
from demo import engine, kubernetes, start
from demo.build import Build
from demo.show import note, show_beside, step, title
from demo.start import HERE, LOGS


def finish(build: Build) -> None:
    """Wait for the build, with progress. Ends the demo if the build failed."""
    if not build.is_over(2):
        with step("Kubernetes is still being built from source, once"):
            while not build.is_over(10):
                note(build.progress())
    if build.status:
        sys.exit(build.log[-3000:])
    for line in build.log.splitlines():
        if "taking" in line:
            note(line.removeprefix("[kube] "))


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


def run(halves: Sequence[str], build: Build | None) -> dict[str, dict[str, object]]:
    """The report of each half."""
    report: dict[str, dict[str, object]] = {}
    if "engine" in halves:
        report["engine"] = engine.run(LOGS, build.paused if build is not None else nullcontext)
    if build is not None:
        finish(build)
        report["kubernetes"] = kubernetes.run(LOGS)
    return report


def main() -> int:
    options = start.arguments(__doc__)
    LOGS.mkdir(exist_ok=True)
    build = None
    if options.build is None:
        print(start.expected(options.halves, is_set_up=True), flush=True)
    if options.build:
        build = Build.adopt(options.build, start.BUILD_LOG)
    elif "kubernetes" in options.halves:
        build = start.build()
    with build or nullcontext():
        if build is not None:
            show_beside(build.progress)
        report = run(options.halves, build)
    title("What you saw")
    print(table(("what", "measured"), rows(report)))
    (HERE / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print("\nreport: demo/report.json   logs: demo/logs/", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
