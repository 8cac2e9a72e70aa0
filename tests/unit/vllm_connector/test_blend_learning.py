"""Documents that a scheduler side knows when a prompt arrives, and prompts that are not worth a search."""

import threading
from types import SimpleNamespace

import numpy as np

from lmcache_client.core import lookups
from lmcache_client.vllm.blend import known
from lmcache_client.vllm.blend.marks import make_mark, seed_of
from tests.harness.client.blend_rig import QUESTION, document, prompt
from tests.harness.sidecar.wire import NAMESPACE

START = [5] * 40


def test_common_start_of_earlier_prompts_hides_no_document(make_rig):
    rig, system = make_rig(blend="auto"), document(9, 80)
    rig.learn(1, 2)
    earlier = rig.send([*system, *document(3), *document(4)], "earlier", params=None)
    rig.scheduler._known.learn_prompt(earlier.all_token_ids, 448, rig.scheduler._states["earlier"].ticket)
    rig.send([*system, *document(2), *document(1), *document(5, 60)], params=None)
    documents = rig.scheduler._asked["r"].params.documents
    assert documents == (range(80), range(80, 280), range(280, 480))


def test_idle_engine_learns_the_documents_of_other_engines(make_rig, monkeypatch):
    monkeypatch.setattr(lookups, "_IDLE_SECONDS", 0.01)
    monkeypatch.setattr(known, "POLL_SECONDS", 0)
    rig, is_asked = make_rig(), threading.Semaphore(0)

    def share_marks(marks, since, timeout=None):
        is_asked.release()
        return SimpleNamespace(marks=np.array([mark], "<u8").tobytes(), since=1)

    mark = make_mark(document(1), 200, seed_of(NAMESPACE, None))
    rig.session.share_marks = share_marks
    for _ in range(2):
        assert is_asked.acquire(timeout=60)
    rig.drain_lookups()
    rig.send([*START, *document(1), *QUESTION])
    assert "r" in rig.scheduler._asked


def test_prompt_that_is_handed_over_is_not_searched(make_rig):
    """The decode engine would find no blended KV, and compute the prompt again."""
    rig = make_rig(blend="auto")
    rig.learn(1, 2)
    request = rig.send(prompt(2, 1, start=START), params={"do_remote_decode": True})
    assert rig.scheduler._asked == {}
    assert request.cache_salt is None


def test_engine_reuses_its_exact_blocks_if_blending_wins_little(rig):
    """With the salt of blended prompts, 188 tokens would be computed, and 220 without it."""
    rig.learn(1)
    request = rig.send([*[5] * 160, *document(1), *QUESTION])
    assert rig.match(request, 160) == (0, False)
    assert request.cache_salt is None
