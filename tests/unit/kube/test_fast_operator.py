"""What sidecars say of times and bytes is put into another world, and stays an answer."""

from array import array

import pytest
from lmcache_operator.scaling import answers

from testing.kube.fast_operator import scaled, sped_up
from testing.workloads.clock import Clock

CLOCK = Clock(1_700_000_000.0, 60.0)
ANSWER = {
    "version": 1, "now": 1_700_000_010.0, "started": 1_700_000_001.0, "namespace": "5f", "chunk_tokens": 256,
    "row_bytes": 4096, "below": 2**64, "since": 0, "next": 2, "dropped": 0, "t0": 1_700_000_004.0,
    "ms": [0, 1500], "num": [1, 2], "key": "0123456789abcdef" * 3, "tier": "-me",
}  # fmt: skip


def test_times_are_the_clocks():
    found = answers.samples(sped_up(ANSWER, CLOCK))
    assert found.now == pytest.approx(1_700_000_600.0)
    assert found.started == pytest.approx(1_700_000_060.0)
    assert [time for time, _ in found.requests()] == pytest.approx([1_700_000_240.0, 1_700_000_330.0])


def test_nothing_looked_up_has_no_time():
    empty = {**ANSWER, "namespace": "", "t0": 0, "ms": [], "num": [], "key": "", "tier": "", "next": 0}
    assert answers.samples(sped_up(empty, CLOCK)).times == array("d")


@pytest.mark.parametrize("answer", [None, [], "x"])
def test_what_is_no_answer_stays_none(answer):
    assert sped_up(answer, CLOCK) == answer


def test_all_that_is_bytes_is_more_and_nothing_else():
    told = {"memory": {"size_bytes": 64, "used_rows": 3}, "lookups": {"kv_bytes_per_token": 1.5, "gpus": 1}}
    assert scaled(told, 10) == {
        "memory": {"size_bytes": 640, "used_rows": 3}, "lookups": {"kv_bytes_per_token": 15.0, "gpus": 1}
    }  # fmt: skip
    assert answers.samples(scaled(ANSWER, 1024)).row_bytes == 4 << 20
    assert scaled(None, 10) is None
