"""Passes that fail on some tensor parallel ranks: the ranks never go on with different collectives."""

from datetime import timedelta
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

    def run(*_, **options):
        if fails_here:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=2))
    monkeypatch.setattr(ranks, "of_all_ranks", lambda values, *_: values + fails_there)
    passes = SimpleNamespace(
        run=run, fitting=lambda positions, budget: (len(positions),) * 2, block_tokens=4, device="cpu"
    )
    job = BlendJob("r", (0,) * 8, (1, 2), 0, 0, 4, 7, (), "first", 0.1)
    is_placed, stored_at = torch.zeros(7, dtype=torch.bool), torch.zeros(7, dtype=torch.int64)
    prompt = PromptPasses(job, is_placed, stored_at, passes, {"layer": None}, {})
    with pytest.raises(error):
        next(prompt.compute_chosen(prompt.choose(prompt.is_reusable), 100))


def test_rank_whose_pass_failed_does_not_wait_for_ranks_in_a_collective(monkeypatch):
    """Ranks in a collective wait for its part, and never come to an agreement. So the engine must end."""
    deadlines = []

    def all_reduce(values, operation, group, async_op):
        def wait(patience):
            deadlines.append(patience)
            raise RuntimeError("Operation timed out!")

        return SimpleNamespace(wait=wait)

    def fail():
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=2, cpu_group=None))
    monkeypatch.setattr(ranks, "all_reduce", all_reduce)
    with pytest.raises(SystemExit):
        ranks.run_together(fail)
    assert deadlines == [timedelta(minutes=1)]


@pytest.mark.parametrize("has_failed_there", [False, True])
def test_rank_runs_no_pass_of_the_test_without_the_others(monkeypatch, has_failed_there):
    """A rank that has failed between two passes agrees with the others in their next pass, and only once."""
    agreements, passes = [], []

    def of_all_ranks(values, *_):
        agreements.append(values.tolist())
        num_failed = int(len(agreements) == 1 and has_failed_there)
        return values * 2 - num_failed

    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=2))
    monkeypatch.setattr(ranks, "of_all_ranks", of_all_ranks)

    def test():
        ranks.go_on_together(lambda: passes.append("run"))

    if has_failed_there:
        with pytest.raises(UnsupportedError, match="another tensor parallel rank"):
            ranks.on_all_ranks(test)
        assert (passes, agreements) == ([], [[1]])
    else:
        ranks.on_all_ranks(test)
        assert (passes, agreements) == (["run"], [[1], [0], [1]])


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
