"""Log lines that somebody else provokes: as many as tell what goes on."""

from __future__ import annotations

import logging

from lmcache_sidecar.logs import Floods


def line(place: int, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("name", level, "file.py", place, "%d bytes", (3,), None)


def test_one_place_in_the_code_has_sixty_lines_a_minute():
    now = [0.0]
    floods = Floods(lambda: now[0])
    assert [floods.filter(line(1)) for _ in range(100)] == [True] * 60 + [False] * 40
    assert floods.filter(line(2))
    now[0] = 60.0
    first, second = line(1), line(1)
    assert floods.filter(first)
    assert floods.filter(second)
    assert first.getMessage() == "3 bytes (40 more lines like this one were left out)"
    assert second.getMessage() == "3 bytes"


def test_debug_lines_are_all_written():
    floods = Floods()
    assert all(floods.filter(line(1, logging.DEBUG)) for _ in range(100))
