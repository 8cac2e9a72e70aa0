"""Location of the installer uv, also for programs that ``make`` did not start."""

import sys
from pathlib import Path

import pytest

from tools import cache


def test_uv_of_the_project_is_found_without_make(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert cache.uv() == Path(sys.executable).parent / "uv"


def test_missing_uv_raises_error_with_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("LMCACHE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(FileNotFoundError, match="make setup"):
        cache.uv()
