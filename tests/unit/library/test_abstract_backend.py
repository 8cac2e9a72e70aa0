"""Methods that a backend inherits."""

import logging

import pytest
import torch

from lmcache.storage_backend.abstract_backend import LMCBackendInterface
from lmcache.utils import CacheEngineKey


class DictBackend(LMCBackendInterface):
    def __init__(self, dst_device="cuda"):
        super().__init__(dst_device)
        self.chunks = {}
        self.puts = []

    def put(self, key, kv_chunk, blocking=True):
        self.puts.append((key, blocking))
        self.chunks[key] = kv_chunk

    def contains(self, key):
        return key in self.chunks

    def get(self, key):
        return self.chunks.get(key)

    def close(self):
        pass


def key(number):
    return CacheEngineKey("vllm", "model", 1, 0, str(number))


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_keeps_the_given_device(device):
    assert DictBackend(device).dst_device == device


def test_default_device_is_cuda():
    assert DictBackend().dst_device == "cuda"


def test_refuses_invalid_device():
    with pytest.raises(RuntimeError):
        DictBackend("abacus")


def test_interface_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        LMCBackendInterface("cpu")


@pytest.mark.parametrize("blocking", [True, False])
def test_batched_put_puts_each_chunk_and_returns_their_number(blocking):
    backend = DictBackend("cpu")
    chunks = ((key(number), torch.tensor(number)) for number in range(3))
    assert backend.batched_put(chunks, blocking=blocking) == 3
    assert backend.puts == [(key(number), blocking) for number in range(3)]


def test_batched_get_returns_chunks_in_order_and_lazily():
    backend = DictBackend("cpu")
    backend.put(key(0), torch.tensor(0))
    backend.put(key(2), torch.tensor(2))
    requested = []
    answers = iter(backend.batched_get(requested.append(number) or key(number) for number in range(3)))
    assert requested == []
    assert next(answers) == torch.tensor(0)
    assert requested == [0]
    assert next(answers) is None
    assert next(answers) == torch.tensor(2)
    assert list(answers) == []


def test_batched_methods_log_no_line_per_call(monkeypatch):
    lines: list[object] = []
    monkeypatch.setattr(logging.Logger, "info", lambda *arguments: lines.append(arguments))
    backend = DictBackend("cpu")
    assert backend.batched_put([("a", torch.ones(1))]) == 1
    assert list(backend.batched_get(["a"])) == [torch.ones(1)]
    assert not lines
