"""Where the installer is found, also by a program that was not started by ``make``."""

import sys
from pathlib import Path

import pytest

from tools import cache


def test_the_projects_own_uv_is_found_without_make(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert cache.uv() == Path(sys.executable).parent / "uv"


def test_without_uv_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("LMCACHE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(FileNotFoundError, match="make setup"):
        cache.uv()
