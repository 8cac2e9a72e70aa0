"""Passes that fail on some tensor parallel ranks: the ranks never go on with different collectives."""

from types import SimpleNamespace

import pytest
import torch

from lmcache_client.core.blend_jobs import BlendJob
from lmcache_client.errors import UnsupportedError
from lmcache_client.vllm.blend import ranks
from lmcache_client.vllm.blend.prompt import PromptPasses


@pytest.mark.parametrize(
    ("fails_here", "fails_there", "error"),
    [(True, True, torch.OutOfMemoryError), (True, False, SystemExit), (False, True, SystemExit)],
)
def test_engine_ends_if_a_pass_fails_on_some_ranks_only(monkeypatch, fails_here, fails_there, error):
    """A rank that went on alone would pair its next collective with one of this pass."""

    def run(*_):
        if fails_here:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=2))
    monkeypatch.setattr(ranks, "of_all_ranks", lambda values, operation: values + fails_there)
    passes = SimpleNamespace(
        run=run, fitting=lambda positions, budget: (len(positions),) * 2, block_tokens=4, device="cpu"
    )
    job = BlendJob("r", (0,) * 8, (1, 2), 0, 0, 4, 7, (), "first", 0.1)
    is_placed, stored_at = torch.zeros(7, dtype=torch.bool), torch.zeros(7, dtype=torch.int64)
    prompt = PromptPasses(job, is_placed, stored_at, passes, {}, {})
    with pytest.raises(error):
        next(prompt.compute_chosen(prompt.choose(prompt.is_reusable), 100))


@pytest.mark.parametrize("is_refused_there", [True, False])
def test_rank_that_can_not_blend_says_why_unless_all_ranks_refuse(monkeypatch, caplog, is_refused_there):
    """Rank 0 logs its own reason. If another rank has one, rank 0 refers to the log of that rank."""

    def refuse():
        raise UnsupportedError("layer 3: a reason")

    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=2))
    monkeypatch.setattr(ranks, "of_all_ranks", lambda values, operation: values + (not is_refused_there))
    with pytest.raises(UnsupportedError, match="layer 3: a reason"):
        ranks.on_all_ranks(refuse)
    assert ("layer 3: a reason" in caplog.text) == (not is_refused_there)
