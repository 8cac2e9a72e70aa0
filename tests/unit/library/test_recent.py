"""Bounded maps of recent keys."""

from lmcache.common.recent import Recent


def test_oldest_key_is_dropped() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"], recent["b"], recent["c"] = 1, 2, 3
    assert list(recent.items()) == [("b", 2), ("c", 3)]


def test_setting_a_key_refreshes_its_age_and_reading_does_not() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"], recent["b"] = 1, 2
    recent["a"] = 3
    assert recent["b"] == 2
    recent["c"] = 4
    assert list(recent.items()) == [("a", 3), ("c", 4)]


def test_setdefault_counts_as_setting_a_key() -> None:
    recent: Recent[str, int] = Recent(1)
    assert recent.setdefault("a", 1) == 1
    assert recent.setdefault("b", 2) == 2
    assert list(recent) == ["b"]
