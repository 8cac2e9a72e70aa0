"""Tensor copies of any layout write exactly the target bytes, streamed or not."""

import pytest
import torch

from lmcache.storage_backend import tensors
from tests.harness.scope import third

SHAPE = (3, 2, 64, 8, 64)  # K or V of a layer has 64 KiB in fp16


def values(shape, dtype=torch.float16):
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


@pytest.fixture(params=[True, False], ids=["streamed", "by numpy"])
def is_streamed(request):
    return request.param


@pytest.fixture
def calls(is_streamed, monkeypatch):
    """Return a list of the sizes of streamed pieces."""
    sizes: list[int] = []
    stream = tensors._streaming_copy()
    if stream is None and is_streamed:
        pytest.skip("the loop can't be compiled without llvmlite")

    def count(to, from_, piece_sizes):
        sizes.extend(piece_sizes.tolist())
        stream(to, from_, piece_sizes)

    monkeypatch.setattr(tensors, "_streaming_copy", lambda: count if is_streamed else None)
    return sizes


LAYOUTS = {
    "whole": lambda t: t,
    "first tokens": lambda t: t.narrow(2, 0, 32),
    "last tokens": lambda t: t.narrow(2, 17, 47),
    "heads": lambda t: t.narrow(3, 2, 3),
    "other order": lambda t: t.transpose(2, 3),
    "every second layer": lambda t: t[::2],
    "single layer": lambda t: t[1, 1],
    "empty": lambda t: t[:0],
}


CASES = [
    (to, from_, dtype)
    for to in LAYOUTS
    for from_ in ("the same", "contiguous", "another offset")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.complex128)
]


@pytest.mark.parametrize(("to", "from_", "dtype"), third(CASES))
def test_copy_writes_exactly_the_target(calls, to, from_, dtype):
    memory, payload = torch.zeros(SHAPE, dtype=dtype), values(SHAPE, dtype)
    target, source = LAYOUTS[to](memory), LAYOUTS[to](payload)
    if from_ == "contiguous":
        source = source.contiguous()
    if from_ == "another offset":
        shifted = torch.zeros(source.numel() + 1, dtype=dtype)[1:].view(source.shape)
        source = shifted.copy_(source)
    tensors.copy(target, source)
    expected = torch.zeros(SHAPE, dtype=dtype)
    LAYOUTS[to](expected).copy_(LAYOUTS[to](payload))
    assert torch.equal(memory, expected)


def test_chunk_is_copied_into_a_longer_tensor_piece_by_piece(calls, is_streamed):
    blob, chunk = torch.zeros(3, 2, 256, 8, 64, dtype=torch.float16), values((3, 2, 64, 8, 64))
    assert blob.data_ptr() % 64 == 0
    tensors.copy(blob.narrow(2, 64, 64), chunk)
    assert torch.equal(blob[:, :, 64:128], chunk)
    assert blob.count_nonzero() == chunk.count_nonzero()
    assert calls == [64 * 8 * 64 * 2] * 6 * is_streamed


def test_only_aligned_memory_is_streamed(calls, is_streamed):
    memory, payload = torch.empty(2 << 20, dtype=torch.uint8), values([1 << 20], torch.uint8)
    first = -memory.data_ptr() % 64
    for offset in (0, 1):
        target = memory[first + offset :][: 1 << 20]
        tensors.copy(target, payload)
        assert torch.equal(target, payload)
        assert calls == [1 << 20] * is_streamed
