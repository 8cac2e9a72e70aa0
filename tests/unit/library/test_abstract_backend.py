"""Methods that a backend inherits."""

import pytest
import torch

from lmcache.storage_backend.abstract_backend import LMCBackendInterface
from tests.harness.library.kv_cache import DictBackend, make_key


class AnyDevice(DictBackend):
    __init__ = LMCBackendInterface.__init__


@pytest.mark.parametrize(("arguments", "device"), [(["cpu"], "cpu"), (["cuda:1"], "cuda:1"), ([], "cuda")])
def test_keeps_the_given_device(arguments, device):
    assert AnyDevice(*arguments).dst_device == device


def test_refuses_invalid_device():
    with pytest.raises(RuntimeError):
        AnyDevice("abacus")


def key(number):
    return make_key(str(number))


@pytest.mark.parametrize("blocking", [True, False])
def test_batched_put_puts_each_chunk_and_returns_their_number(monkeypatch, blocking):
    backend, puts = DictBackend(), []
    monkeypatch.setattr(backend, "put", lambda key, chunk, blocking: puts.append((key, int(chunk), blocking)))
    chunks = ((key(number), torch.tensor(number)) for number in range(3))
    assert backend.batched_put(chunks, blocking=blocking) == 3
    assert puts == [(key(number), number, blocking) for number in range(3)]


def test_batched_get_returns_chunks_in_order_and_lazily():
    backend = DictBackend()
    backend.put(key(0), torch.tensor(0))
    backend.put(key(2), torch.tensor(2))
    requested = []

    def keys():
        for number in range(3):
            requested.append(number)
            yield key(number)

    answers = iter(backend.batched_get(keys()))
    assert requested == []
    assert next(answers) == torch.tensor(0)
    assert requested == [0]
    assert next(answers) is None
    assert next(answers) == torch.tensor(2)
    assert list(answers) == []
