"""Taking a document out of a computed prompt with a small model: reading, rotating and staging its KV."""

import pytest
import torch

from lmcache_client.core.blend_jobs import BlendJob
from lmcache_client.vllm.blend.taking import TakeJob
from tests.harness.client.blend_model import TOKENS, VOCAB, Rank, difference, one_rank

__all__ = ["one_rank"]

START, END = 6, 28
PROMPT = [(7 * n * n + n) % VOCAB for n in range(40)]
TABLE = tuple(range(50, 50 + len(PROMPT) // TOKENS))


@pytest.mark.parametrize(
    ("order", "is_packed", "dtype"),
    [
        ("LBHNC", False, torch.float32),
        ("LBHNC", True, torch.float32),
        ("BLNHC", False, torch.bfloat16),
    ],
)
def test_document_is_taken_out_of_a_prompt(order, is_packed, dtype):
    """The document begins and ends inside blocks, and its last row has only one block.

    In the first layer, KV depends on tokens and positions alone. There, the staged KV is that of the document
    alone. All KV returns to its place.
    """
    rank = Rank(order, is_packed, dtype=dtype)
    blender, start, end = rank.blender, START, END
    error = 1e-5 if dtype == torch.float32 else 0.05
    num_tokens = (end - start) // TOKENS * TOKENS
    alone = rank.kv(rank.prefill(PROMPT[start:end]), num_tokens)
    prompt = rank.kv(rank.prefill(PROMPT), len(PROMPT))
    job = TakeJob(1, "r", (), start=start, num_tokens=num_tokens)
    blender.take(job, (1, 2), [(4, 5, 6), (6, 7, 7)])  # token 14 is in the prompt's block 3, numbered 4
    content = {name: staged[:3] for name, staged in blender.staged.items()}
    taken = rank.kv(content, num_tokens - 2 * TOKENS)
    name = next(iter(rank.layers))
    assert difference({name: taken[name]}, {name: alone[name][:, 2 * TOKENS :]}) <= error
    assert difference(taken, {name: kv[:, 2 * TOKENS :] for name, kv in alone.items()}) > 0.1
    for pages in blender.pages.values():
        pages.bytes[list(TABLE)] = 0
    placed = BlendJob("r", tuple(PROMPT), TABLE, 0, start, end, len(PROMPT) - 1, (), "all", 0.3)
    blender.place(placed, start + 2 * TOKENS, start + num_tokens, start, 0)
    content = {name: pages.bytes[list(TABLE)] for name, pages in blender.pages.items()}
    part = slice(start + 2 * TOKENS, start + num_tokens)
    back = {name: kv[:, part] for name, kv in rank.kv(content, len(PROMPT)).items()}
    assert difference(back, {name: kv[:, part] for name, kv in prompt.items()}) <= error
