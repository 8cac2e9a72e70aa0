"""Advice about a larger memory tier, from samples of a workload with a known working set."""

import pytest

from lmcache_store.curves.answers import InvalidAnswerError
from lmcache_store.explain.findings import findings
from lmcache_store.explain.sizes import larger_memory
from testing.workloads.requests import row_hash

ROW_BYTES = 1 << 20
NUM_DOCUMENTS, LENGTH = 40, 10
"""Documents that requests read in turn. An LRU cache that cannot hold all of them hits nothing."""
WORKING_SET = NUM_DOCUMENTS * LENGTH * ROW_BYTES


def answer(num_requests: int) -> dict:
    """The ``/samples`` of a sidecar that sampled all keys of these requests."""
    keys = [
        row_hash(number % NUM_DOCUMENTS, chunk)
        for number in range(num_requests)
        for chunk in reversed(range(LENGTH))
    ]
    return {
        "version": 1, "now": 1e9, "started": 0, "namespace": "aa", "chunk_tokens": 256,
        "row_bytes": ROW_BYTES,
        "below": 1 << 64, "since": 0, "next": len(keys), "dropped": 0, "t0": 1e9 - 1000,
        "ms": [number * 10 for number in range(num_requests)], "num": [LENGTH] * num_requests,
        "key": "".join(f"{key:016x}" for key in keys), "tier": "m" * len(keys),
    }  # fmt: skip


def test_names_the_size_that_would_retain_the_evicted_chunks():
    larger = larger_memory(answer(400), WORKING_SET * 2 // 5, WORKING_SET * 2 // 5)
    assert larger is not None
    assert larger.factor == 3  # 1.2 x the working set
    assert larger.retained_share > 0.95
    assert larger.hit_ratios[1] < 0.05
    assert larger.hit_ratios[4] == pytest.approx(0.9, abs=0.05)  # of ten turns, the first one is cold
    causes = {"prompt_tokens": 100, "cause_tokens": {"evicted": 90, "new": 10}, "diverged_tokens": {}}
    (finding,) = findings(causes, advice_if_evicted=larger.advice())
    assert finding.statement.startswith("90 % of all prompt tokens were stored before")
    assert finding.advice.startswith("A memory tier of 3 x the size (480Mi) would have kept ")


@pytest.mark.parametrize(("num_requests", "usable"), [(400, 2 * WORKING_SET), (50, WORKING_SET // 2), (0, 1)])
def test_says_nothing_if_no_size_hits_more_or_samples_are_few(num_requests, usable):
    assert larger_memory(answer(num_requests), max(usable, WORKING_SET), usable) is None


def test_refuses_an_answer_of_another_server():
    with pytest.raises(InvalidAnswerError):
        larger_memory({"version": 9}, WORKING_SET, WORKING_SET)
