"""What a backend inherits."""

from __future__ import annotations

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
def test_the_device_is_kept_as_it_was_given(device):
    assert DictBackend(device).dst_device == device


def test_the_device_is_cuda_unless_said():
    assert DictBackend().dst_device == "cuda"


def test_a_device_that_is_none_is_refused():
    with pytest.raises(RuntimeError):
        DictBackend("abacus")


def test_the_interface_alone_can_not_be_made():
    with pytest.raises(TypeError, match="abstract"):
        LMCBackendInterface("cpu")


@pytest.mark.parametrize("blocking", [True, False])
def test_batched_put_puts_each_and_counts(blocking):
    backend = DictBackend("cpu")
    chunks = ((key(number), torch.tensor(number)) for number in range(3))
    assert backend.batched_put(chunks, blocking=blocking) == 3
    assert backend.puts == [(key(number), blocking) for number in range(3)]


def test_batched_get_answers_every_key_in_order_and_lazily():
    backend = DictBackend("cpu")
    backend.put(key(0), torch.tensor(0))
    backend.put(key(2), torch.tensor(2))
    asked = []
    answers = iter(backend.batched_get(asked.append(number) or key(number) for number in range(3)))
    assert asked == []
    assert next(answers) == torch.tensor(0)
    assert asked == [0]
    assert next(answers) is None
    assert next(answers) == torch.tensor(2)
    assert list(answers) == []


def test_the_default_batched_methods_write_no_line_per_call(monkeypatch):
    lines: list[object] = []
    monkeypatch.setattr(logging.Logger, "info", lambda *arguments: lines.append(arguments))
    backend = DictBackend("cpu")
    assert backend.batched_put([("a", torch.ones(1))]) == 1
    assert list(backend.batched_get(["a"])) == [torch.ones(1)]
    assert not lines
