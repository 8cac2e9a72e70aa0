"""Loggers of the library, and log lines: their format and rate limit."""

import datetime
import logging
import os
import re
import subprocess
import sys
import uuid

import pytest

from lmcache.logging import init_logger
from lmcache_store.common.logs import FloodFilter, Reminders, formatter


def line(line_number: int, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("name", level, "file.py", line_number, "%d bytes", (3,), None)


def test_each_source_line_may_log_sixty_lines_a_minute():
    now = [0.0]
    floods = FloodFilter(lambda: now[0])
    assert [floods.filter(line(1)) for _ in range(100)] == [True] * 60 + [False] * 40
    assert floods.filter(line(2))
    now[0] = 60.0
    first, second = line(1), line(1)
    assert floods.filter(first)
    assert floods.filter(second)
    assert first.getMessage() == "3 bytes (40 more lines like this one were omitted)"
    assert second.getMessage() == "3 bytes"


def test_lasting_problem_is_due_every_ten_minutes():
    now = [0.0]
    reminders = Reminders(lambda: now[0])
    due = [reminders.is_due("a") for now[0] in (0.0, 1.0, 599.0, 600.0, 601.0)]
    assert due == [True, False, False, True, False]
    assert reminders.is_due("b")
    assert not reminders.is_due("a")
    for number in range(10_000):  # texts of clients, which may be hostile
        reminders.is_due(str(number))
    assert len(reminders._due) <= 128


def test_debug_lines_are_not_limited():
    floods = FloodFilter()
    assert all(floods.filter(line(1, logging.DEBUG)) for _ in range(100))


def test_control_characters_in_messages_are_escaped():
    record = line(1)
    record.msg, record.args = "reply: %s", ("x\n2026-01-01 CRITICAL all is lost\x1b[2K\u2028\udc80 ü",)
    text = formatter("text").format(record)
    assert text.endswith("name: reply: x\\n2026-01-01 CRITICAL all is lost\\x1b[2K\\u2028\\udc80 ü")
    assert text.isprintable()
    try:
        raise ValueError("x")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert formatter("text").format(record).splitlines()[1].startswith("Traceback")


_PROGRAM = """
import logging, sys
from lmcache_store.common.logs import set_up
set_up(sys.argv[1], "info")
logging.getLogger("name").info("%d bytes", 3)
logging.getLogger("name").debug("more")
"""


@pytest.mark.parametrize(
    ("log_format", "line"),
    [
        ("text", r"(?P<time>\S+) INFO    name: 3 bytes\n"),
        ("json", r'\{"time": "(?P<time>\S+)", "level": "INFO", "logger": "name", "message": "3 bytes"\}\n'),
    ],
)
def test_lines_have_utc_time(log_format, line):
    before = datetime.datetime.now(datetime.UTC)
    command = [sys.executable, "-c", _PROGRAM, log_format]
    environ = os.environ | {"TZ": "Asia/Tokyo"}
    output = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stderr
    match = re.fullmatch(line, output)
    assert match
    assert match["time"].endswith("Z")
    assert -0.001 < (datetime.datetime.fromisoformat(match["time"]) - before).total_seconds() < 60


# ---- loggers ----


@pytest.mark.parametrize(
    ("text", "level"), [(None, "INFO"), ("", "INFO"), ("debug", "DEBUG"), ("ERROR", "ERROR")]
)
def test_level_comes_from_the_environment(monkeypatch, text, level):
    monkeypatch.delenv("LMCACHE_LOG_LEVEL", raising=False)
    if text is not None:
        monkeypatch.setenv("LMCACHE_LOG_LEVEL", text)
    assert init_logger(uuid.uuid4().hex).level == getattr(logging, level)


def test_invalid_level_is_reported_and_ignored(monkeypatch, capsys):
    monkeypatch.setenv("LMCACHE_LOG_LEVEL", "loud")
    assert init_logger(uuid.uuid4().hex).level == logging.INFO
    assert "LMCACHE_LOG_LEVEL='loud'" in capsys.readouterr().err


def test_init_logger_returns_a_single_logger_per_name_without_propagation():
    name = uuid.uuid4().hex
    logger = init_logger(name)
    assert init_logger(name) is logger
    assert len(logger.handlers) == 1
    assert not logger.propagate
