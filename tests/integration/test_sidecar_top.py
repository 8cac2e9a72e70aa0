"""``lmcache-sidecar top`` with a real sidecar and its traffic, once and on a real terminal."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from testing.child_process import REPOSITORY, free_port, wait_until
from tests.harness.tmux import Tmux
from tests.harness.traffic import traffic

TOP = [sys.executable, "-m", "lmcache_sidecar", "top"]
ENVIRONMENT = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'sidecar'}"}


def once(*arguments: str) -> tuple[int, str]:
    ended = subprocess.run([*TOP, *arguments], capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""
    return ended.returncode, ended.stdout


@pytest.fixture
def terminal() -> Iterator[Tmux]:
    with Tmux(140, 30, ENVIRONMENT) as window:
        yield window


def command(*arguments: str) -> str:
    return shlex.join([*TOP, *arguments])


def test_prints_one_table_without_a_terminal(sidecar):
    with traffic(sidecar):
        status, text = once("--url", sidecar.url)
    assert status == 0
    assert text.startswith("1 of 1 pods counted, ")
    assert "\x1b" not in text
    (memory,) = [line.split() for line in text.splitlines() if line.startswith("memory tier ")]
    assert memory[3:5] == ["50", "%"]
    assert text.splitlines()[-1].endswith("ok")


def test_rates_are_those_of_the_counters(sidecar):
    with traffic(sidecar):
        before = sidecar.stats()
        status, text = once("--url", sidecar.url, "-o", "json")
        after = sidecar.stats()
    figures = json.loads(text)
    (pod,) = figures["pods"]
    num_requests = after["lookups"]["num_lookups"] - before["lookups"]["num_lookups"]
    seconds = after["uptime_seconds"] - before["uptime_seconds"]
    assert status == 0
    assert figures["version"] == 1
    assert pod["requestsPerSecond"] == pytest.approx(num_requests / seconds, rel=0.5)
    tokens = pod["tokensPerSecond"]
    assert tokens["memory"] == pytest.approx(256 * pod["requestsPerSecond"], rel=0.01)
    assert tokens["computed"] == pytest.approx(256 * pod["requestsPerSecond"], rel=0.01)
    (memory,) = pod["tiers"]
    row_bytes = after["memory"]["used_bytes"] / after["memory"]["used_rows"]
    assert memory["writeBytesPerSecond"] == pytest.approx(row_bytes * pod["requestsPerSecond"], rel=0.1)


def test_server_that_does_not_answer_is_named():
    status, text = once("--url", f"http://127.0.0.1:{free_port()}", "--interval", "1")
    assert status == 1
    assert "Connection refused" in text


def test_live_screen_shows_rates_and_q_restores_the_terminal(sidecar, terminal):
    with traffic(sidecar):
        terminal.run(command("--url", sidecar.url, "--interval", "1"))
        screen = terminal.wait_for("1 of 1 pods counted")
        assert terminal.is_alternate()
        assert any(line.startswith("memory tier") and "50 %" in line for line in screen)
        (pod,) = [line for line in screen if line.startswith("127.0.0.1:")]
        assert pod.endswith("ok")
        assert "q quit" in screen[-1]
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
