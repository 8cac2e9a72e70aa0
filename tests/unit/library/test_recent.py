"""Bounded maps of recent keys."""

from lmcache_store.common.recent import Recent


def test_oldest_key_is_dropped_and_only_setting_refreshes_an_age() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"], recent["b"], recent["a"] = 1, 2, 3
    assert recent["b"] == 2
    recent["c"] = 4
    assert list(recent.items()) == [("a", 3), ("c", 4)]
    assert recent.setdefault("d", 6) == 6
    assert list(recent) == ["c", "d"]
