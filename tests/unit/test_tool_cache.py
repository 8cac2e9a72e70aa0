"""Cached results of tools in the cache directory, when two processes build one of them."""

from tools import cache


def test_first_process_to_finish_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("LMCACHE_CACHE_DIR", str(tmp_path))

    def make_slowly(folder):
        cache.cached_directory("thing-1", lambda other: (other / "file").write_text("quick"))
        (folder / "file").write_text("slow")

    cache.cached_directory("thing-1", make_slowly)
    assert (tmp_path / "thing-1" / "file").read_text() == "quick"
    assert [path.name for path in tmp_path.iterdir()] == ["thing-1"]
