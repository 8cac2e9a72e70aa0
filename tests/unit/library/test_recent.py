"""What is remembered of keys whose number nothing bounds."""

from __future__ import annotations

from lmcache.recent import Recent


def test_the_oldest_key_is_forgotten() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"], recent["b"], recent["c"] = 1, 2, 3
    assert list(recent.items()) == [("b", 2), ("c", 3)]


def test_a_key_that_is_set_again_is_the_latest_and_one_that_is_read_is_not() -> None:
    recent: Recent[str, int] = Recent(2)
    recent["a"], recent["b"] = 1, 2
    recent["a"] = 3
    assert recent["b"] == 2
    recent["c"] = 4
    assert list(recent.items()) == [("a", 3), ("c", 4)]


def test_a_default_counts_like_any_other_key() -> None:
    recent: Recent[str, int] = Recent(1)
    assert recent.setdefault("a", 1) == 1
    assert recent.setdefault("b", 2) == 2
    assert list(recent) == ["b"]
