"""Weight updates of SGLang: no KV of old weights is found under the name of new ones."""

import contextlib
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from lmcache_client.errors import UnsupportedError
from lmcache_client.sglang.weights import _UPDATES, WeightWatch, install
from tests.harness.sglang.weights import (
    COMPONENTS,
    ENGINE,
    MANAGERS,
    NAMESPACE,
    RUNNER,
    UpdateError,
    WeightChecker,
    installed,
    make_classes,
    make_modules,
)


@pytest.fixture
def watch():
    return WeightWatch()


@pytest.fixture
def engine(watch):
    """An engine that records whether the cache is open during each of its calls."""
    updater_class, controller_class = make_classes()
    manager = installed(watch, updater_class, controller_class)
    state = SimpleNamespace(during=[], error=None, manager=manager)

    def record(call, result):
        state.during.append((call, name(watch) is None))
        if state.error is not None:
            raise state.error
        return result

    fake = SimpleNamespace(
        apply=lambda weights, fails: record("apply", weights),
        begin=lambda: record("begin", "begun"),
        end=lambda run_post_load: record("end", run_post_load),
        reset=lambda: record("reset", "emptied"),
    )
    state.updater, state.controller = updater_class(fake), controller_class(fake)
    return state


def name(watch):
    return watch.name(NAMESPACE, ENGINE)


@pytest.mark.parametrize("method", _UPDATES)
def test_update_closes_the_cache_until_a_flush(watch, engine, method):
    assert getattr(engine.updater, method)("w1") == "w1"
    assert engine.during == [("apply", True)], "closed before the weights change"
    assert name(watch) is None
    assert engine.controller.reset() == "emptied"
    assert engine.during[-1] == ("reset", True), "closed until the queues are empty"
    assert name(watch) not in (None, NAMESPACE)
    assert watch.private_reason.startswith("SGLang's weights were updated at ")


@pytest.mark.parametrize(
    ("calls", "names"),
    [
        ("flush", "a"),
        ("flush update", "a."),  # an earlier flush does not count
        ("update! flush", ".b"),
        ("update flush! flush", "..b"),
        ("update update flush update flush", "..b.c"),
        ("begin part flush end", "...b"),
        ("begin part end flush", "...b"),
        ("begin part flush part end flush", ".....b"),
        ("begin begin flush end end", "....b"),  # the main model and the draft model
        ("end begin flush", "a.."),
        ("begin flush end!", "..."),
        ("clear flush flush", "bcc"),  # until the flush, SGLang stores KV of its own caches, which may be old
        ("clear update clear flush", "b..c"),
        ("begin clear flush end", "...b"),
    ],
)
def test_names_after_calls(calls, names, watch, engine):
    """One name per call, which fails if it ends in "!". "a" is the shared name, "." is a closed cache."""
    functions = {
        "update": lambda: engine.updater.update_weights_from_disk("w"),
        "begin": engine.updater.begin_weight_update,
        "part": lambda: engine.updater.load_weights_from_distributed("w"),
        "end": lambda: engine.updater.end_weight_update(run_post_load=False),
        "flush": engine.controller.reset,
        "clear": watch.forget_all,
    }
    letters, given, listened = {None: ".", NAMESPACE: "a"}, "", []
    watch.subscribe(lambda: listened.append(name(watch)))
    for call in calls.split():
        engine.error = UpdateError() if call.endswith("!") else None
        with pytest.raises(UpdateError) if engine.error else contextlib.nullcontext():
            functions[call.rstrip("!")]()
        present = name(watch)
        assert listened[-1] == present
        given += letters.setdefault(present, "bcd"[len(letters) - 2])
    assert given == names


def test_each_generation_engine_and_namespace_has_a_name_of_its_own(watch):
    all_names = {NAMESPACE}
    for generation in range(1, 12):
        watch.forget_all()
        names = {
            watch.name(namespace, engine)
            for namespace in (NAMESPACE, b"m" * 32)
            for engine in (ENGINE, b"f" * 16)
        }
        all_names |= names
        assert (len(all_names), {len(digest) for digest in names}) == (1 + 4 * generation, {32})


class TestListeners:
    def test_listener_is_called_until_it_unsubscribes_even_if_another_fails(self, watch, engine, caplog):
        calls: list[str] = []

        def fail():
            raise ZeroDivisionError

        watch.subscribe(fail)
        end_first = watch.subscribe(lambda: calls.append("first"))
        watch.subscribe(lambda: calls.append("second"))
        calls.clear()
        assert engine.updater.update_weights_from_disk("w1") == "w1"
        end_first()
        end_first()
        watch.forget_all()
        assert calls == ["first", "second", "second"]
        assert "A backend did not notice that the weights changed" in caplog.text

    @pytest.mark.parametrize("action", ["subscribe", "forget"])
    def test_slow_listener_does_not_reopen_the_cache(self, watch, action):
        """A listener reads the name, and would use it after an update has begun on another thread."""
        in_use: list[bytes | None] = []
        has_read, may_go_on = threading.Event(), threading.Event()

        def rename():
            present = name(watch)
            if (action == "subscribe" or watch._generation) and not has_read.is_set():
                has_read.set()
                may_go_on.wait(0.2)  # in vain: the update can't begin before this call has ended
            in_use.append(present)

        def begin():
            watch.subscribe(rename)
            if action == "forget":
                watch.forget_all()

        def update():
            watch.begin_change()
            may_go_on.set()

        threads = [threading.Thread(target=begin)]
        threads[0].start()
        assert has_read.wait(60)
        threads.append(threading.Thread(target=update))
        threads[1].start()
        for thread in threads:
            thread.join(60)
        assert in_use[-2] is not None
        assert in_use[-1] is None


class TestInstall:
    @pytest.mark.parametrize("is_start", [True, False])
    def test_first_of_two_installs_counts_and_knows_whether_it_missed_a_change(self, watch, is_start):
        classes, calls = make_classes(), []
        assert not watch.is_complete
        installed(watch, *classes, is_start=is_start)
        installed(watch, *classes, is_start=not is_start)
        assert watch.is_complete is is_start
        watch.subscribe(lambda: calls.append(1))
        updater = classes[0](SimpleNamespace(apply=lambda weights, fails: weights))
        updater.update_weights_from_disk("w1")
        assert len(calls) == 2, "at the subscription and once for the update"

    def test_resumed_weights_get_a_new_name(self, watch, engine):
        assert engine.manager._import_static_state() == "restored"
        assert name(watch) not in (None, NAMESPACE)

    @pytest.mark.parametrize(
        "missing", [*_UPDATES, "begin_weight_update", "end_weight_update", "reset", "_import_static_state"]
    )
    def test_missing_function_is_refused_before_any_is_wrapped(self, watch, missing):
        classes = make_classes()
        modules = make_modules(*classes, import_static_state=lambda: None)
        manager = modules[COMPONENTS].weight_updater
        owner = next(owner for owner in (*classes, manager) if hasattr(owner, missing))
        delattr(owner, missing)
        with (
            mock.patch.dict(sys.modules, modules),
            pytest.raises(UnsupportedError, match=f"has no {owner.__name__}.{missing}"),
        ):
            install(is_start=True, watch=watch)
        functions = [function for owner in (*classes, manager) for function in vars(owner).values()]
        assert not any(hasattr(function, "_lmcache_watched") for function in functions)
        assert not watch.is_complete

    def test_version_without_the_classes_is_refused(self, watch, give_module):
        for module in (MANAGERS, COMPONENTS, RUNNER):
            give_module(module)
        with pytest.raises(UnsupportedError, match="updates weights in an unknown way"):
            install(is_start=True, watch=watch)


def test_random_weights_close_the_cache_until_the_next_flush(watch):
    """``/weights_checker`` overwrites the weights, to test whether an update restores them."""
    checker_class = type("WeightChecker", (WeightChecker,), {})
    updater_class, controller_class = make_classes()
    installed(watch, updater_class, controller_class, checker_class)
    checker_class()._reset_tensors()
    assert name(watch) is None
    watch.note_flushed()
    assert name(watch) not in (None, NAMESPACE)
