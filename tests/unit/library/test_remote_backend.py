import contextlib
import struct
import threading

import pytest
import torch

from lmcache.storage_backend import queued_backend, remote_backend
from lmcache.storage_backend.remote_backend import LMCPipelinedRemoteBackend, LMCRemoteBackend
from lmcache.storage_backend.serde.formats import RawSerializer
from testing.child_process import wait_until
from tests.harness.library.dict_connector import DictConnector
from tests.harness.library.kv_cache import CHUNK, make_chunk, make_config, make_key, make_metadata

URL = "lm://localhost:1"


@pytest.fixture
def open_backend(connector):
    """Open backends and close them at teardown."""
    with contextlib.ExitStack() as stack:

        def make(kind=LMCRemoteBackend, serde="torch", shape=None):
            metadata = make_metadata()
            metadata.kv_shape = shape or metadata.kv_shape
            config = make_config(None, remote_url=URL, remote_serde=serde)
            return stack.enter_context(contextlib.closing(kind(config, metadata, "cpu")))

        yield make


@pytest.fixture(params=[LMCRemoteBackend, LMCPipelinedRemoteBackend])
def backend(request, connector, open_backend):
    backend = open_backend(request.param)
    yield backend
    connector.may_answer.set()
    backend.close()
    assert connector.is_closed
    assert not connector.calls["after close"]


def put_chunks(backend, names: str) -> None:
    for name in names:
        backend.put(make_key(name), make_chunk(seed=ord(name)))


def names_of(chunks) -> list[str | None]:
    """Return the name of each chunk."""
    known = {bytes(make_chunk(seed=ord(name)).view(torch.uint8).numpy()): name for name in "abcdefgh"}
    return [None if c is None else known[bytes(c.contiguous().view(torch.uint8).numpy())] for c in chunks]


def keys_of(names: str) -> list:
    return [make_key(name) for name in names]


def test_requires_a_url_and_a_serde():
    for config in (make_config(None, remote_url=URL), make_config(None, remote_serde="torch")):
        with pytest.raises(AssertionError, match="remote_url and remote_serde"):
            LMCRemoteBackend(config, make_metadata(), "cpu")


def test_list_skips_foreign_names(backend, connector):
    put_chunks(backend, "ab")
    for name in ("foreign", "", "a@b@c@d@e", "\udcff@m@1@0"):
        connector.values[name] = b""
    assert sorted(backend.list()) == keys_of("ab")


@pytest.mark.parametrize(
    "value", [b"garbage", RawSerializer().to_bytes(make_chunk())], ids=["bytes", "old format"]
)
def test_invalid_values_are_misses(backend, connector, value):
    put_chunks(backend, "abc")
    connector.values[make_key("b").to_string()] = value
    assert names_of(backend.batched_get(keys_of("abc"))) == ["a", None, "c"]
    assert backend.num_faults == 1


@pytest.mark.parametrize(("serde", "method"), [("_serializer", "to_bytes"), ("_deserializer", "from_bytes")])
def test_defect_09_any_error_of_the_serde_gives_misses(backend, monkeypatch, serde, method):
    def fail(content, label):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(getattr(backend, serde), method, fail)
        put_chunks(backend, "a")
        assert list(backend.batched_get(keys_of("a"))) == [None]
        assert backend.num_faults == 1
    put_chunks(backend, "a")
    assert names_of(backend.batched_get(keys_of("a"))) == ["a"]


@pytest.mark.parametrize("pattern", ["aXc", "XXc", "aXXXefXh", "XXXX", "abcdefgh", ""])
def test_defect_02_results_keep_positions_of_misses(backend, pattern):
    put_chunks(backend, pattern.replace("X", ""))
    keys = [make_key(name if name != "X" else f"missing {index}") for index, name in enumerate(pattern)]
    assert names_of(backend.batched_get(keys)) == [None if name == "X" else name for name in pattern]


def test_defect_09_nonblocking_puts_continue_after_a_failure(backend, connector):
    backend.put(make_key("x" * 200), make_chunk(), blocking=False)  # the store refuses long keys
    put_chunks(backend, "a")
    backend.put(make_key("b"), make_chunk(seed=ord("b")), blocking=False)
    wait_until(lambda: backend.contains(make_key("b")))
    assert names_of(backend.batched_get(keys_of("ab"))) == ["a", "b"]
    assert backend.num_faults == 1


@pytest.mark.parametrize(
    "error", [ConnectionError(), TimeoutError(), struct.error(), RuntimeError(), KeyError()]
)
def test_defect_09_dead_server_gives_misses(backend, connector, error):
    connector.error = error
    put_chunks(backend, "abcdefgh")
    answers = iter(backend.batched_get(keys_of("abcdefgh")))
    first = [next(answers)]
    connector.is_down = True
    names = names_of(first + list(answers))
    assert len(names) == 8
    assert names == [*"abcdefgh"[: names.index(None)], *[None] * (8 - names.index(None))]


def test_defect_09_close_stops_workers_before_the_connection(backend, connector):
    connector.may_answer.clear()
    for name in "abcd":
        backend.put(make_key(name), make_chunk(seed=ord(name)), blocking=False)
    reader = threading.Thread(target=lambda: list(backend.batched_get(keys_of("ab"))))
    reader.start()
    closer = threading.Thread(target=backend.close)
    closer.start()
    connector.may_answer.set()
    closer.join(60)
    reader.join(60)
    assert not closer.is_alive()
    assert not reader.is_alive()
    assert len(connector.values) == 4, "queued chunks are stored first"
    # The misses below must not use the closed connector; the fixture checks this.
    assert list(backend.batched_get(keys_of("ab"))) == [None, None]
    assert backend.get(make_key("a")) is None


def test_defect_12_faults_are_logged_once(backend, connector, monkeypatch):
    lines = []
    monkeypatch.setattr(remote_backend.logger, "warning", lambda *arguments: lines.append(arguments))
    connector.is_down = True
    for name in "abc":
        backend.put(make_key(name), make_chunk())
    assert len(lines) == 1
    assert backend.num_faults == 3


def test_full_queue_drops_and_counts_puts(backend, connector, monkeypatch):
    monkeypatch.setattr(queued_backend, "MAX_QUEUED_BYTES", 2 * make_chunk().nbytes)
    connector.may_answer.clear()
    for name in "abcde":
        backend.put(make_key(name), make_chunk(), blocking=False)  # does not block
    assert backend.num_faults == 3
    connector.may_answer.set()
    wait_until(lambda: len(connector.values) == 2)


def test_queued_put_does_not_undo_a_later_put(backend, connector, monkeypatch):
    may_set, set_value, is_blocked = threading.Event(), connector.set, threading.Event()

    def block_first_call(name: str, content: bytes) -> None:
        if not is_blocked.is_set():
            is_blocked.set()
            assert may_set.wait(60)
        set_value(name, content)

    monkeypatch.setattr(connector, "set", block_first_call)
    older, newer = make_chunk(seed=ord("a")), make_chunk(seed=ord("b"))
    for name in ("started", "queued"):
        backend.put(make_key(name), older, blocking=False)
    assert is_blocked.wait(60)
    backend.put(make_key("queued"), newer)  # the busy worker does not block this put
    later_put = threading.Thread(target=backend.put, args=(make_key("started"), newer))
    later_put.start()
    later_put.join(0.2)
    may_set.set()
    later_put.join()
    backend.put(make_key("last"), newer, blocking=False)
    wait_until(lambda: backend.contains(make_key("last")))
    assert names_of([backend.get(make_key(name)) for name in ("started", "queued")]) == ["b", "b"]


# ---- labels of values ----


@pytest.mark.parametrize("serde", ["torch", "safetensor", "fast", "cachegen"])
def test_swapped_values_are_misses_and_are_written_again(connector, open_backend, serde):
    backend = open_backend(serde=serde)
    put_chunks(backend, "ab")
    first, second = (key.to_string() for key in keys_of("ab"))
    connector.values[first], connector.values[second] = connector.values[second], connector.values[first]
    assert list(backend.batched_get(keys_of("ab"))) == [None, None]
    assert backend.num_faults == 2
    assert backend.prefix_length(keys_of("ab")) == 0, (
        "a store skips existing chunks, so it must not find these"
    )
    put_chunks(backend, "ab")
    assert backend.prefix_length(keys_of("ab")) == 2
    assert None not in list(backend.batched_get(keys_of("ab")))


def sized(dimension: int, size: int) -> tuple[int, ...]:
    """Return the shape of a full chunk with another size of one dimension."""
    shape = list(make_metadata().kv_shape)
    shape[dimension] = size
    return tuple(shape)


@pytest.mark.parametrize(("dimension", "size"), [(0, 5), (3, 9), (4, 64)])
def test_chunks_of_another_geometry_are_misses(open_backend, dimension, size):
    shape = sized(dimension, size)
    writer, reader = open_backend(shape=shape), open_backend()
    writer.put(make_key("a"), torch.ones(shape, dtype=torch.float16))
    assert torch.equal(writer.get(make_key("a")), torch.ones(shape, dtype=torch.float16))
    assert reader.get(make_key("a")) is None
    assert reader.num_faults == 1


def test_engines_of_different_chunk_lengths_share_short_chunks(open_backend):
    writer, reader = open_backend(shape=sized(2, 4 * CHUNK)), open_backend()
    writer.put(make_key("a"), make_chunk(3))
    assert torch.equal(reader.get(make_key("a")), make_chunk(3))


# ---- round trips ----


class BatchConnector(DictConnector):
    """A connector that supports batched calls, and counts each batch as a single call."""

    def exists_many(self, keys):
        self._called("exists_many", "")
        return [key in self.values for key in keys]

    def get_many(self, keys):
        self._called("get_many", "")
        return [self.values.get(key) for key in keys]


@pytest.fixture
def batch_connector(monkeypatch):
    connector = BatchConnector()
    monkeypatch.setattr(remote_backend, "CreateConnector", lambda url: connector)
    return connector


def test_prefix_length_of_many_chunks_takes_a_single_round_trip(open_backend, batch_connector):
    backend = open_backend()
    put_chunks(backend, "abcdefg")
    assert backend.prefix_length(keys_of("abcdefgh")) == 7
    assert batch_connector.calls["exists_many"] == 1
    assert backend.prefix_length(keys_of("haaaaa")) == 0
    assert backend.prefix_length(keys_of("a" * 100 + "h")) == 100
    assert batch_connector.calls["exists_many"] == 4
    assert batch_connector.calls["exists"] == 0


def test_fetching_four_chunks_takes_a_single_round_trip(open_backend, batch_connector):
    backend = open_backend()
    put_chunks(backend, "abcdefgh")
    assert names_of(backend.batched_get(keys_of("abcdefgh"))) == [*"abcdefgh"]
    assert (batch_connector.calls["get_many"], batch_connector.calls["get"]) == (2, 0)


def test_refused_key_does_not_affect_other_keys(backend, connector, monkeypatch):
    put_chunks(backend, "abcd")
    get = connector.get

    def refuse(key):
        if key == make_key("b").to_string():
            raise ValueError("a list, not a value")
        return get(key)

    monkeypatch.setattr(connector, "get", refuse)
    assert names_of(backend.batched_get(keys_of("abcd"))) == ["a", None, "c", "d"]
