"""``POST /hicache/storage-backend/clear`` and ``/flush_cache`` after a hidden change of weights."""

from __future__ import annotations

import pytest

from lmcache.engines.sglang.weights import WeightWatch

NAMESPACE, ENGINE = b"n" * 32, b"e" * 16


@pytest.fixture
def watch():
    return WeightWatch()


def name(watch):
    return watch.name(NAMESPACE, ENGINE)


def test_kv_stored_between_clear_and_flush_is_not_found_afterwards(watch):
    """SGLang's own caches hold KV of the old weights until the flush, and SGLang stores it meanwhile."""
    names = [name(watch)]
    listened = []
    watch.subscribe(lambda: listened.append(name(watch)))
    watch.forget_all()
    names.append(name(watch))
    watch.note_flushed()
    names.append(name(watch))
    assert len(set(names)) == 3
    assert listened[-2:] == names[1:]


def test_flush_without_clear_changes_nothing(watch):
    watch.note_flushed()
    assert name(watch) == NAMESPACE
    watch.forget_all()
    watch.note_flushed()
    after = name(watch)
    watch.note_flushed()
    assert name(watch) == after


def test_clear_during_an_update_stays_closed_until_the_update_ends(watch):
    watch.begin_update()
    watch.forget_all()
    watch.note_flushed()
    assert name(watch) is None
    watch.end_update()
    assert name(watch) not in (None, NAMESPACE)
