"""What is made once and kept in the cache directory, for runs of the tools."""

from __future__ import annotations

import pytest

from tools import cache


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("LMCACHE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_is_made_once(root):
    made = [cache.kept("thing-1", lambda folder: (folder / "file").write_text("first")) for _ in range(2)]
    assert made == [root / "thing-1"] * 2
    cache.kept("thing-1", lambda folder: (folder / "file").write_text("second"))
    assert (root / "thing-1" / "file").read_text() == "first"


def test_what_fails_leaves_nothing(root):
    def fail(folder):
        (folder / "file").write_text("half")
        raise OSError("the registry is gone")

    with pytest.raises(OSError, match="the registry is gone"):
        cache.kept("thing-1", fail)
    assert list(root.iterdir()) == []
    cache.kept("thing-1", lambda folder: (folder / "file").write_text("whole"))
    assert (root / "thing-1" / "file").read_text() == "whole"


def test_the_first_of_two_processes_wins(root):
    def make_slowly(folder):
        cache.kept("thing-1", lambda other: (other / "file").write_text("quick"))
        (folder / "file").write_text("slow")

    cache.kept("thing-1", make_slowly)
    assert (root / "thing-1" / "file").read_text() == "quick"
    assert [path.name for path in root.iterdir()] == ["thing-1"]
