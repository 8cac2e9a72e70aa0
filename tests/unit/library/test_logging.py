"""Loggers of the library."""

from __future__ import annotations

import logging
import uuid

import pytest

from lmcache.logging import init_logger


@pytest.mark.parametrize(
    ("text", "level"), [(None, "INFO"), ("", "INFO"), ("debug", "DEBUG"), ("ERROR", "ERROR")]
)
def test_the_level_is_that_of_the_environment(monkeypatch, text, level):
    monkeypatch.delenv("LMCACHE_LOG_LEVEL", raising=False)
    if text is not None:
        monkeypatch.setenv("LMCACHE_LOG_LEVEL", text)
    assert init_logger(uuid.uuid4().hex).level == getattr(logging, level)


def test_a_level_that_is_none_is_said_and_harmless(monkeypatch, capsys):
    monkeypatch.setenv("LMCACHE_LOG_LEVEL", "loud")
    assert init_logger(uuid.uuid4().hex).level == logging.INFO
    assert "LMCACHE_LOG_LEVEL='loud'" in capsys.readouterr().err


def test_a_logger_keeps_to_itself_and_is_made_once():
    name = uuid.uuid4().hex
    logger = init_logger(name)
    assert init_logger(name) is logger
    assert len(logger.handlers) == 1
    assert not logger.propagate
