"""Loggers of the library."""

import logging
import uuid

import pytest

from lmcache.logging import init_logger


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
