"""Cached results of tools in the cache directory."""

import pytest

from tools import cache


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("LMCACHE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_builds_each_entry_once(root):
    folders = [
        cache.cached_directory("thing-1", lambda folder: (folder / "file").write_text("first"))
        for _ in range(2)
    ]
    assert folders == [root / "thing-1"] * 2
    cache.cached_directory("thing-1", lambda folder: (folder / "file").write_text("second"))
    assert (root / "thing-1" / "file").read_text() == "first"


def test_failed_build_leaves_no_files(root):
    def fail(folder):
        (folder / "file").write_text("half")
        raise OSError("the registry is unavailable")

    with pytest.raises(OSError, match="the registry is unavailable"):
        cache.cached_directory("thing-1", fail)
    assert list(root.iterdir()) == []
    cache.cached_directory("thing-1", lambda folder: (folder / "file").write_text("whole"))
    assert (root / "thing-1" / "file").read_text() == "whole"


def test_first_process_to_finish_wins(root):
    def make_slowly(folder):
        cache.cached_directory("thing-1", lambda other: (other / "file").write_text("quick"))
        (folder / "file").write_text("slow")

    cache.cached_directory("thing-1", make_slowly)
    assert (root / "thing-1" / "file").read_text() == "quick"
    assert [path.name for path in root.iterdir()] == ["thing-1"]
