"""Run the demo, print a table and write ``demo/report.json``: ``python -m demo``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext

from benchmarks.report import table
from demo import blend, engine, kubernetes, start
from demo.build import Build
from demo.engines import KINDS, Kind
from demo.show import note, show_background, step, title
from demo.start import HERE, LOGS


def finish(build: Build) -> None:
    """Wait for the build and print its progress. Ends the demo if the build failed."""
    if not build.is_over(2):
        with step("waiting for the build of Kubernetes from source; only the first run needs it"):
            while not build.is_over(10):
                note(build.progress())
    if build.status:
        sys.exit(build.log[-3000:])
    for line in build.log.splitlines():
        if "taking" in line:
            note(line.removeprefix("[kube] "))


def rows(report: dict[str, dict[str, object]]) -> list[tuple[str, str]]:
    """Return the rows of the table that the demo prints at its end."""
    lines: list[tuple[str, str]] = []
    for half, prompt in (("engine", ""), ("blend", "documents, ")):
        for name, figures in report.get(half, {}).items():
            assert isinstance(figures, dict)
            hit = f"{figures['ttft_ms']} ms, {figures['share_of_cold']:.1%} of cold"
            if "recomputed_tokens" in figures:
                counts = "{reused_tokens} tokens reused, {recomputed_tokens} recomputed".format(**figures)
            else:
                counts = f"{figures['cached_tokens']} tokens cached"
            lines.append((f"time to first token, {prompt}{name}", f"{hit}, {counts}"))
    for name, figure in report.get("kubernetes", {}).items():
        quantity, _, unit = name.rpartition("_")
        lines.append((quantity.replace("_", " "), f"{figure} {unit}"))
    return lines


def run(halves: Sequence[str], kind: Kind, build: Build | None) -> dict[str, dict[str, object]]:
    """Run parts of the demo. Returns the report of each part."""
    report: dict[str, dict[str, object]] = {}
    with ExitStack() as end:
        if "engine" in halves:
            kind.prepare()
            alone = build.paused if build is not None else nullcontext
            report["engine"], running = engine.run(kind, LOGS, alone, end)
        if build is not None:
            finish(build)
            report["kubernetes"] = kubernetes.run(LOGS, with_engine="engine" in halves)
        if "engine" in halves and kind.can_blend:
            report["blend"] = blend.run(running)
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
            show_background(build.progress)
        report = run(options.halves, KINDS[options.kind], build)
    title("Results")
    print(table(("measurement", "result"), rows(report)))
    (HERE / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print("\nreport: demo/report.json   logs: demo/logs/", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
