"""``python -m testing.soak``: run traffic on a real sidecar for a long time while parts of it fail.

The exit status is 1 if an answer was wrong, if something leaked, or if the run proves too little.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable

from testing.child_process import ProcessDied, wait_until
from testing.soak import checks
from testing.soak.client import WRONG_STATUS
from testing.soak.faults import Faults
from testing.soak.memory import MEBIBYTE, private_bytes, trend, without_ring
from testing.soak.pages import Reader
from testing.soak.world import MIN_MEMORY_MIB, START_SECONDS, World

DEFAULT_SECONDS = 3600
WARM_UP_SECONDS = 5.0
_READ_SECONDS = 1.0
"""Pause between two reads of all pages."""
_REPORT_SECONDS = 30.0
_SETTLE_SECONDS = 60.0
"""Time in which a sidecar without clients must release what it holds for them."""


class Soak:
    """One run. ``violations`` is empty if everything was right."""

    def __init__(self, world: World, seconds: float, seed: int) -> None:
        self.violations: list[str] = []
        self._world, self._seconds = world, seconds
        self._faults, self._pages = Faults(world, seed), Reader()
        self._began = self._reported = time.monotonic()
        self._memory: list[tuple[float, int]] = []
        self._memory_pid = 0
        self._idle = self._end = checks.Held.of(world.sidecar.pid)

    def run(self) -> None:
        """Run traffic and faults, then check what is left."""
        self._start_clients()
        self._faults.start()
        try:
            while (elapsed := time.monotonic() - self._began) < self._seconds:
                self._run_second(elapsed)
                self._report_progress(elapsed)
        finally:
            self._faults.stop()
        self._faults.check()
        self._end_traffic()
        self._check_end()

    def _run_second(self, elapsed: float) -> None:
        """Make a fault of a process or a file, read the pages, and sample the memory for a second."""
        if elapsed > self._seconds / 2:  # the last half has one sidecar, so that its memory can be compared
            self._faults.processes.end_restarts()
        if elapsed > min(WARM_UP_SECONDS, self._seconds / 8):
            self._faults.processes.make_one()
        self._pages.read(self._world.sidecar.pid, self._world.sidecar.get)
        pause = time.monotonic() + _READ_SECONDS
        while time.monotonic() < pause:
            self._sample_memory()
            self._check_clients()
            self._faults.check()
            time.sleep(0.1)

    def _start_clients(self) -> None:
        """Start the clients, and start the clock when each has had a request."""
        for client in self._world.clients:
            client.start()
        wait_until(self._world.have_all_requests, timeout=START_SECONDS, what="all clients have requests")
        self._began = self._reported = time.monotonic()

    def _sample_memory(self) -> None:
        pid = self._world.sidecar.pid
        if pid != self._memory_pid:
            self._memory, self._memory_pid = [], pid
            self._idle = checks.Held.of(pid)
        self._memory.append((time.monotonic(), without_ring(private_bytes(pid), self._pages.num_in_ring)))

    def _check_clients(self) -> None:
        for client in self._world.clients:
            client.check()

    def _report_progress(self, elapsed: float) -> None:
        if time.monotonic() > self._reported + _REPORT_SECONDS:
            self._reported = time.monotonic()
            counts = self._world.counts()
            done = f"{counts['requests']} requests, {counts['loaded']} rows loaded"
            num_faults = self._faults.overlap.counts.total()
            say(f"{elapsed:.0f} of {self._seconds:.0f} s: {done}, {num_faults} faults")

    def _end_traffic(self) -> None:
        for client in self._world.clients:
            if (status := client.terminate(timeout=30)) != 0:
                name = "loaded wrong bytes" if status == WRONG_STATUS else f"ended with status {status}"
                self.violations.append(f"{client.name} {name}: {client.log[-2000:]}")
        self._world.save_hits()

    def _check_end(self) -> None:
        """Wait until the idle sidecar has released everything, and check the rest."""
        world = self._world
        self._wait_until_clear("after the last client", lambda: list(checks.of_idle_stats(world.stats())))
        self._wait_until_clear(
            "after the last rotation of keys", lambda: list(checks.of_keys(world.stats(), world.key_version))
        )
        digest = hashlib.sha256(world.tenants_file.read_bytes()).hexdigest()
        self._wait_until_clear(
            "after the last change of shares", lambda: list(checks.of_tenants(world.stats(), digest))
        )
        world.write(world.size_file, f"{MIN_MEMORY_MIB}Mi")  # a slot that is still in use would block this
        self._wait_until_clear("after a last resize", self._resize_problem)
        tiers = checks.TIERS if self._seconds >= checks.SECONDS_FOR_ALL_TIERS else checks.TIERS[:1]
        self.violations += checks.of_counts(world.counts(), world.hit_tokens, tiers)
        self.violations += checks.of_tenant_hits(world.tenant_hits)
        if self._seconds >= checks.SECONDS_FOR_ALL_TIERS:
            overlap = self._faults.overlap
            self.violations += checks.of_overlap(overlap.counts, overlap.at_once)
        self._end = checks.Held.of(world.sidecar.pid)
        self.violations += checks.of_resources(self._idle, self._end)
        stats = world.stats()
        log, used_bytes = world.sidecar.log_path.read_text(errors="replace"), stats["disk"]["used_bytes"]
        self.violations += checks.of_files(world.sidecar.folder, world.disk, used_bytes, log)
        self.violations += checks.of_memory(trend(self._memory))
        self.violations += checks.of_log(log)

    def _resize_problem(self) -> list[str]:
        memory = self._world.stats()["memory"]
        is_resized = memory["size_bytes"] == memory["target_bytes"] == MIN_MEMORY_MIB << 20
        problem = memory["resize_problem"]
        return [] if is_resized and not problem else [f"the sidecar does not shrink: {problem}"]

    def _wait_until_clear(self, when: str, find: Callable[[], list[str]]) -> None:
        try:
            wait_until(lambda: not find(), timeout=_SETTLE_SECONDS)
        except AssertionError:
            self.violations += [f"{problem}, {_SETTLE_SECONDS:.0f} s {when}" for problem in find()]

    def report(self) -> str:
        """Return what was done and counted, in lines."""
        counts = self._world.counts()
        share = counts["loaded"] / max(1, counts["looked_up"])
        lines = [
            f"faults: {table(self._faults.overlap.counts)}",
            f"of these, while keys and password rotated together: {table(self._faults.overlap.at_once)}",
            f"clients: {table(counts)}",
            f"rows loaded: {share:.1%} of those looked up (at least {checks.MIN_HIT_SHARE:.0%})",
            f"tokens of hits: {table(self._world.hit_tokens)}",
            f"tokens of hits by tenant: {table(self._world.tenant_hits)}",
            f"valid answers: {table(self._pages.num_answers)}",
            f"resources of the sidecar after its start: {self._idle}; at the end: {self._end}",
        ]
        if len(self._memory) >= 4:
            line, num_in_ring = trend(self._memory), self._pages.num_in_ring
            lines.append(
                f"private memory of the sidecar: {line.mebibytes:.1f} MiB, {line.growth_mebibytes:+.1f} MiB"
                f" in the last {line.seconds:.0f} s (limit {checks.max_growth(line.seconds):+.1f} MiB),"
                f" without {-without_ring(0, num_in_ring) / MEBIBYTE:.1f} MiB for {num_in_ring} requests in"
                " the ring of samples"
            )
        return "\n".join(lines)


def table(counts: Counter[str]) -> str:
    """Format counts in one line."""
    return (
        ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in sorted(counts.items())) or "none"
    )


def say(text: str) -> None:
    """Print lines of progress."""
    print("\n".join(f"[soak] {line}" for line in text.splitlines()), flush=True)


def main() -> int:
    """Run. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m testing.soak", description=__doc__)
    default = int(os.environ.get("SOAK_SECONDS") or DEFAULT_SECONDS)
    parser.add_argument("--seconds", type=int, default=default)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="order of the faults")
    options = parser.parse_args()
    if options.seconds < 20:
        parser.error("--seconds (SOAK_SECONDS) must be 20 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # end the processes, as Ctrl-C does
    say(f"{options.clients} clients for {options.seconds} s, order of faults {options.seed}")
    with World(options.clients) as world:
        soak = Soak(world, options.seconds, options.seed)
        try:
            soak.run()
        except (AssertionError, ProcessDied) as error:
            soak.violations.append(str(error))
        say(soak.report())
        for violation in soak.violations:
            say(f"VIOLATION: {violation}")
        if soak.violations:
            world.is_folder_retained = True
            log = world.folder / "sidecar.log"
            log.write_bytes(world.sidecar.log_path.read_bytes())
            say(f"Logs: {world.folder}. `--seed {options.seed}` repeats the order of the faults.")
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
