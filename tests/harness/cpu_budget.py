"""A pytest plugin that compares the processor time of each test file with ``tests/budget.toml``.

``--cpu-report FILE`` writes the seconds of each file as JSON, and prints files beyond their budget. In CI, a
file that needs more than twice its budget and 15 s fails the run. Less is no failure, because the same work
needs more seconds while other work runs.

Slow processors need more seconds, too, and so do those that a host lends to several machines. So each worker
times a small piece of work once a second. If its mean time is twice the reference, all budgets double.

The time of a file includes all processes that its worker started, also killed ones and orphans. ``getrusage``
and ``time`` miss those, because they count a process when its parent waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "budget.toml"
INTERVAL_SECONDS = 1.0
"""Time between two samples. The last interval of a process is lost if no parent waits for it."""

REFERENCE_MS = 0.33
"""Processor time of ``probe`` on the processor of ``tests/budget.toml``. Estimated, not measured there: a run
on a slower processor took 0.71 ms a probe, and 2.15 times the sum of all lines."""

FORK_SERVER_SECONDS = 15.0
"""Time to start an engine's fork server. It counts for the first file that uses the engine."""

OUTSIDE = "collection, set-up and end"
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """Processor time of one process, in seconds."""

    parent: int
    used: float
    reaped: float
    """Time of all children that the process waited for, and of their children."""

    @classmethod
    def read(cls, pid: int) -> Usage:
        """Read the time from /proc. Raises OSError if the process has ended."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used, system, children, children_system = (int(field) / _TICKS_PER_SECOND for field in fields[11:15])
        return cls(int(fields[1]), used + system, children + children_system)


def probe() -> float:
    """Return the processor time of a small piece of work, in milliseconds."""
    start = time.thread_time()
    table: dict[int, int] = {}
    for number in range(4000):
        table[number % 257] = table.get(number % 257, 0) + number
    return (time.thread_time() - start) * 1000


class ProcessTree:
    """This process and all processes that descend from it, also after their parents have ended."""

    def __init__(self) -> None:
        self._known: dict[int, Usage] = {os.getpid(): Usage.read(os.getpid())}

    def used(self) -> float:
        """Return the processor time since the last call, in seconds."""
        alive = self._alive()
        ended = [usage for pid, usage in self._known.items() if pid not in alive]
        total = 0.0
        for pid, usage in alive.items():
            before = self._known.get(pid, Usage(0, 0.0, 0.0))
            counted = sum(child.used + child.reaped for child in ended if child.parent == pid)
            total += usage.used - before.used + max(0.0, usage.reaped - before.reaped - counted)
        self._known = alive
        return total

    def _alive(self) -> dict[int, Usage]:
        everything: dict[int, Usage] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    everything[int(name)] = Usage.read(int(name))
        alive = {pid: everything[pid] for pid in self._known if pid in everything}
        children: dict[int, list[int]] = {}
        for pid, usage in everything.items():
            children.setdefault(usage.parent, []).append(pid)
        pending = list(alive)
        while pending:
            for pid in children.get(pending.pop(), ()):
                if pid not in alive:
                    alive[pid] = everything[pid]
                    pending.append(pid)
        return alive


class Meter:
    """Adds up the time of each file in one worker of pytest-xdist, or in the only process."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.probes_ms: list[float] = []
        self._tree = ProcessTree()
        self._file = OUTSIDE
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="cpu-budget", daemon=True)
        self._thread.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Assign the time from now on to the file of this test."""
        if (file := item.nodeid.partition("::")[0]) != self._file:
            self._add()
            self._file = file
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Give the result to the process that started the workers."""
        self._end.set()
        self._thread.join()
        self._add()
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["cpu_seconds"] = dict(self.seconds)
            output["cpu_probes_ms"] = self.probes_ms

    def _sample(self) -> None:
        while not self._end.wait(INTERVAL_SECONDS):
            self._add()
            self.probes_ms.append(probe())

    def _add(self) -> None:
        with self._lock:
            self.seconds[self._file] += self._tree.used()  # type: ignore[assignment]  # a Counter of seconds


class Report:
    """Prints the result of all workers."""

    def __init__(self, path: Path, budget: Mapping[str, Any], is_enforced: bool) -> None:
        self.seconds: Counter[str] = Counter()
        self.probes_ms: list[float] = []
        self._path, self._budget, self._is_enforced = path, budget, is_enforced

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the result of a worker."""
        output = getattr(node, "workeroutput", {})
        self.seconds.update(output.get("cpu_seconds", {}))
        self.probes_ms += output.get("cpu_probes_ms", [])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the result. Fail the run if a file needs far more than its budget."""
        if (meter := session.config.pluginmanager.get_plugin("cpu-meter")) is not None:
            self.seconds.update(meter.seconds)
            self.probes_ms += meter.probes_ms
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(dict(self.seconds.most_common()), indent=1))
        if self._faults():
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the sum, and the files beyond their budget. Each reason to fail the run is an error."""
        terminalreporter.section("processor time")
        terminalreporter.line(f"{sum(self.seconds.values()):7.1f} CPU-s in all, budget {self._sum():.0f}")
        if self.probes_ms:
            probe_ms = f"a probe took {fmean(self.probes_ms):.2f} ms, reference {REFERENCE_MS} ms"
            terminalreporter.line(f"{self._slowness():7.2f} x the budgets of {FILE.name}, because {probe_ms}")
        for file, seconds in self.seconds.most_common():
            if seconds > self._limit(file) and file != OUTSIDE:
                terminalreporter.line(f"{seconds:7.1f} CPU-s {file}, budget {self._limit(file):.1f}")
        for place, message in self._faults().items():
            error = SimpleNamespace(reprcrash=SimpleNamespace(message=message))
            report = pytest.CollectReport(place, "failed", error, None)
            terminalreporter.stats.setdefault("error", []).append(report)

    def _faults(self) -> dict[str, str]:
        """The reasons to fail the run, by file."""
        if not self._is_enforced:
            return {}
        faults = {
            file: f"{seconds:.1f} CPU-s, budget {self._limit(file):.1f}:"
            " make it lighter, or give it a line in tests/budget.toml"
            for file, seconds in self.seconds.most_common()
            if self._is_far_over(file)
        }
        if (total := sum(self.seconds.values())) > 1.25 * self._sum():
            faults["tests/budget.toml"] = f"{total:.1f} CPU-s in all, budget {self._sum():.0f}"
        return faults

    def _limit(self, file: str) -> float:
        return self._slowness() * self._budget["files"].get(file, self._budget["default"])["seconds"]

    def _sum(self) -> float:
        return self._slowness() * self._budget["sum"]

    def _slowness(self) -> float:
        """The mean of all probes, because a host takes a processor away in bursts."""
        return max(1.0, fmean(self.probes_ms) / REFERENCE_MS) if self.probes_ms else 1.0

    def _is_far_over(self, file: str) -> bool:
        return file != OUTSIDE and self.seconds[file] > 2 * self._limit(file) + FORK_SERVER_SECONDS


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--cpu-report``."""
    parser.addoption("--cpu-report", help="measure the processor time by test file", metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in each worker, and report in the process that started the workers. This may be one process."""
    if not (report := config.getoption("cpu_report")):
        return
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Meter(), "cpu-meter")
    if not is_worker:
        import tomllib  # Python 3.11; tests on a GPU also run with 3.10

        config.pluginmanager.register(
            Report(Path(report), tomllib.loads(FILE.read_text()), "CI" in os.environ)
        )
