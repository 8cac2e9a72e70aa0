"""``lmcache-sidecar top`` with a real sidecar and its traffic, once and on a real terminal."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from testing.child_process import REPOSITORY, free_port, wait_until
from tests.harness.sidecar_command import run_command
from tests.harness.tmux import Tmux
from tests.harness.traffic import traffic

TOP = [sys.executable, "-m", "lmcache_sidecar", "top"]
ENVIRONMENT = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'sidecar'}"}


@pytest.fixture
def terminal() -> Iterator[Tmux]:
    with Tmux(140, 30, ENVIRONMENT) as window:
        yield window


def command(*arguments: str) -> str:
    return shlex.join([*TOP, *arguments])


def test_prints_one_table_without_a_terminal(sidecar):
    def table() -> list[str] | None:
        """The lines; None if the busy sidecar did not answer in time, or got no request meanwhile."""
        ended = subprocess.run([*TOP, "--url", sidecar.url], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stderr) in ((0, ""), (1, ""))
        assert "\x1b" not in ended.stdout
        return ended.stdout.splitlines() if "50 %" in ended.stdout else None

    with traffic(sidecar):
        lines = wait_until(table)
    assert lines[0].startswith("1 of 1 pods counted, ")
    (memory,) = [line.split() for line in lines if line.startswith("memory tier ")]
    assert memory[3:5] == ["50", "%"]
    assert lines[-1].endswith("ok")


def test_rates_are_those_of_the_counters(sidecar):
    def figures_of_requests():
        before = sidecar.stats()
        _, text = run_command("top", "--url", sidecar.url, "--interval", "1", "-o", "json")
        (pod,) = json.loads(text)["pods"]
        return (json.loads(text), pod, before) if pod.get("requestsPerSecond") else None

    with traffic(sidecar):
        figures, pod, before = wait_until(figures_of_requests)
        after = sidecar.stats()
    num_requests = after["lookups"]["num_lookups"] - before["lookups"]["num_lookups"]
    assert figures["version"] == 1
    assert pod["requestsPerSecond"] < 1.1 * num_requests, "its interval of a second is part of this one"
    tokens = pod["tokensPerSecond"]
    assert tokens["memory"] == pytest.approx(256 * pod["requestsPerSecond"], rel=0.01)
    assert tokens["computed"] == pytest.approx(256 * pod["requestsPerSecond"], rel=0.01)
    (memory,) = pod["tiers"]
    row_bytes = after["memory"]["used_bytes"] / after["memory"]["used_rows"]
    # A request whose row is not stored yet may be counted.
    assert memory["writeBytesPerSecond"] == pytest.approx(row_bytes * pod["requestsPerSecond"], abs=row_bytes)


def test_server_that_does_not_answer_is_named():
    status, text = run_command("top", "--url", f"http://127.0.0.1:{free_port()}", "--interval", "1")
    assert status == 1
    assert "Connection refused" in text


def test_live_screen_shows_rates_and_q_restores_the_terminal(sidecar, terminal):
    with traffic(sidecar):
        terminal.run(command("--url", sidecar.url, "--interval", "1"))

        def is_right() -> bool:
            screen = terminal.screen
            has_hits = any(line.startswith("memory tier") and "50 %" in line for line in screen)
            pods = [line for line in screen if line.startswith("127.0.0.1:")]
            return has_hits and len(pods) == 1 and pods[0].endswith("ok") and "q quit" in screen[-1]

        wait_until(is_right, what="the screen shows the rates of the pod")
        assert terminal.is_alternate()
        terminal.press("s")
        terminal.wait_for("sorted by cluster")
        terminal.press("p")
        terminal.wait_for("paused")
        terminal.press("q")
        wait_until(terminal.is_restored)
    terminal.run("stty -a")
    assert " echo " in "\n".join(terminal.wait_for("icanon"))


def test_resized_window_stays_whole(sidecar, terminal):
    with traffic(sidecar):
        terminal.run(command("--url", sidecar.url))
        terminal.wait_for("1 of 1 pods counted")
        for columns, lines in ((60, 14), (200, 50), (40, 8)):
            terminal.resize(columns, lines)

            def is_whole(lines: int = lines, columns: int = columns) -> bool:
                screen = terminal.screen
                titles = [line for line in screen if line.startswith("POD")]
                is_size = len(screen) == lines and all(len(line) <= columns for line in screen)
                return is_size and len(titles) == 1 and screen[-1].startswith("q quit")

            wait_until(is_whole, what=f"the screen fits {columns} x {lines}")
        terminal.press("q")
        wait_until(terminal.is_restored)


def test_hung_sidecar_is_shown_and_the_screen_still_answers_keys(sidecar, terminal):
    with traffic(sidecar):
        terminal.run(command("--url", sidecar.url, "--interval", "1"))
        terminal.wait_for("1 of 1 pods counted")
    sidecar.freeze()
    terminal.wait_for("no answer within 1 s")
    terminal.press("s")
    terminal.wait_for("sorted by cluster")
    terminal.press("q")
    wait_until(terminal.is_restored)
    sidecar.thaw()


def test_interrupted_and_terminated_programs_restore_the_terminal(sidecar, terminal):
    for key in ("C-c", "C-z"):
        terminal.run(command("--url", sidecar.url))
        terminal.wait_for("q quit")
        wait_until(terminal.is_alternate)
        terminal.press(key)
        wait_until(terminal.is_restored)
    terminal.run("fg")
    wait_until(terminal.is_alternate)
    terminal.wait_for("q quit")
    terminal.press("q")
    wait_until(terminal.is_restored)
