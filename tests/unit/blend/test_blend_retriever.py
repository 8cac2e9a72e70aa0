import threading
from typing import Any

import pytest
import torch

from lmcache.blend.retriever import SPTBlendRetriever
from lmcache.config import LMCacheEngineMetadata

NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 2, 3, 4
DEADLINE_SECONDS = 10


class FakeEngine:
    """A fake engine that holds given segments; its KV is a function of the token."""

    def __init__(self, fmt: str = "vllm") -> None:
        self.fmt = fmt
        self.held: dict[tuple[int, ...], int] = {}  # number of retrievable tokens of each segment
        self.retrieved: list[list[int]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def kv(self, tokens: list[int]) -> torch.Tensor:
        """Return KV ``[num_layers, 2, num_tokens, num_heads, head_size]``, or heads before tokens."""
        element = torch.arange(NUM_LAYERS * 2 * NUM_HEADS * HEAD_SIZE).view(NUM_LAYERS, 2, 1, NUM_HEADS, -1)
        kv = element + 1000.0 * torch.tensor(tokens).view(1, 1, -1, 1, 1)
        return kv if self.fmt == "vllm" else kv.transpose(2, 3)

    def empty(self, num_tokens):
        return torch.full_like(self.kv([0] * num_tokens), torch.nan)

    def retrieve_into(self, tokens, out):
        assert self.may_answer.wait(DEADLINE_SECONDS)
        self.retrieved.append(tokens.tolist())
        if -1 in tokens:
            raise OSError("the remote storage is unavailable")
        length = self.held.get(tuple(tokens.tolist()), 0)
        out.narrow(2 if self.fmt == "vllm" else 3, 0, length).copy_(self.kv(tokens.tolist()[:length]))
        return length


def retriever(engine: Any, spt: list[int] | None = None) -> SPTBlendRetriever:
    shape = (NUM_LAYERS, 2, 16, NUM_HEADS, HEAD_SIZE)
    metadata = LMCacheEngineMetadata("model", 1, 0, engine.fmt, torch.float32, shape)
    return SPTBlendRetriever(engine, metadata) if spt is None else SPTBlendRetriever(spt, engine, metadata)


def check(result, engine: FakeEngine, layer: int, tokens: list[int], positions: list[int | None]) -> None:
    """Compare a layer with the KV of the stored tokens; position None means not retrieved."""
    valid = torch.tensor([position is not None for position in positions])
    assert result.valid_mask.tolist() == valid.int().tolist()
    assert result.original_positions.tolist() == [position or 0 for position in positions]
    assert result.valid_mask.device.type == "cpu"
    dim = 0 if engine.fmt == "vllm" else 1
    for half, retrieved in ((0, result.k), (1, result.v)):
        expected = engine.kv(tokens)[layer, half]
        assert retrieved.shape == expected.shape
        assert torch.equal(retrieved.movedim(dim, 0)[valid], expected.movedim(dim, 0)[valid])


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
def test_batch_with_hits_partial_hits_and_misses(fmt):
    engine = FakeEngine(fmt)
    engine.held = {(1, 2, 3): 3, (4, 5, 6, 7): 2, (9,): 1}
    task = retriever(engine).new_request(
        [torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), torch.tensor([9, 1, 2, 3])], [[3, 7], [1]]
    )
    for layer in (1, 0, 1):
        positions = [0, 1, 2, 0, 1, None, None, None, 0, 0, 1, 2]
        check(task.result(layer), engine, layer, [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], positions)


def test_result_without_hits_has_no_kv():
    result = (
        retriever(FakeEngine()).new_request([torch.tensor([1, 2]), torch.tensor([3])], [[1], []]).result(0)
    )
    assert result.k is None
    assert result.v is None
    assert result.valid_mask.tolist() == [0, 0, 0]
    assert result.original_positions.tolist() == [0, 0, 0]


def test_defect_23_accepts_segments_without_tokens():
    engine = FakeEngine()
    engine.held = {(1, 2): 2}
    blend = retriever(engine, spt=[7])
    tokens, starts = blend.drop_spt_and_get_indices([7, 1, 2, 7, 7, 3, 7])
    assert tokens == [1, 2, 3]
    assert starts == [0, 2, 2, 3]
    check(blend.new_request([torch.tensor(tokens)], [starts]).result(0), engine, 0, tokens, [0, 1, None])
    assert sorted(engine.retrieved) == [[1, 2], [3]]
    empty = blend.new_request([torch.tensor([], dtype=torch.long)], [[0]]).result(0)
    assert empty.k is None
    assert len(empty.valid_mask) == 0


def test_defect_26_request_returns_before_its_kv_arrives_and_a_failed_segment_is_a_miss():
    engine = FakeEngine()
    engine.held = {(1, 2): 2}
    engine.may_answer.clear()
    task = retriever(engine).new_request([torch.tensor([-1, 5, 1, 2])], [[2]])
    assert engine.retrieved == []
    engine.may_answer.set()
    for layer in range(NUM_LAYERS):
        result = task.result(layer)
        check(result, engine, layer, [-1, 5, 1, 2], [None, None, 0, 1])
        for tensor in (result.k, result.v, result.valid_mask, result.original_positions):
            tensor.zero_()  # the caller owns the results


@pytest.mark.parametrize("starts", [[2, 1], [-1], [4]])
def test_refuses_indices_outside_the_prompt_or_out_of_order(starts):
    with pytest.raises(ValueError, match="indices"):
        retriever(FakeEngine()).new_request([torch.tensor([1, 2, 3])], [starts])
    with pytest.raises(ValueError, match="zip"):
        retriever(FakeEngine()).new_request([torch.tensor([1, 2, 3])], [])


def test_separators_may_be_token_sequences():
    blend = retriever(FakeEngine(), spt=[7, 8])
    assert blend.drop_spt_and_get_indices([1, 7, 8, 7, 2, 7, 8, 3, 7]) == ([1, 7, 2, 3, 7], [1, 3])
    assert blend.drop_spt_and_get_indices([]) == ([], [])
    with pytest.raises(ValueError, match="separator"):
        retriever(FakeEngine()).drop_spt_and_get_indices([1])


def test_both_constructors_accept_keyword_arguments():
    engine: Any = FakeEngine()
    metadata = retriever(engine).metadata
    assert SPTBlendRetriever(cache_engine=engine, metadata=metadata).spt == []
    assert SPTBlendRetriever([7], engine, metadata=metadata).spt == [7]
    assert SPTBlendRetriever(metadata=metadata, spt=(7, 8), cache_engine=engine).cache_engine is engine


def test_refuses_unknown_format():
    with pytest.raises(ValueError, match="Invalid format: other"):
        retriever(FakeEngine("other"))
