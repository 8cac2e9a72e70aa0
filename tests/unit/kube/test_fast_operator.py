"""Scaling of times and bytes in sidecars' answers. The results stay valid answers."""

from array import array

import pytest

from lmcache_store.curves import answers
from testing.kube.fast_operator import convert_times, scale_bytes
from testing.workloads.clock import Clock

CLOCK = Clock(1_700_000_000.0, 60.0)
ANSWER = {
    "version": 1, "now": 1_700_000_010.0, "started": 1_700_000_001.0, "namespace": "5f", "chunk_tokens": 256,
    "row_bytes": 4096, "below": 2**64, "since": 0, "next": 2, "dropped": 0, "t0": 1_700_000_004.0,
    "ms": [0, 1500], "num": [1, 2], "key": "0123456789abcdef" * 3, "tier": "-me",
}  # fmt: skip


def test_times_are_converted_to_the_fast_clock():
    samples = answers.samples(convert_times(ANSWER, CLOCK))
    assert samples.now == pytest.approx(1_700_000_600.0)
    assert samples.started == pytest.approx(1_700_000_060.0)
    assert [time for time, _ in samples.requests()] == pytest.approx([1_700_000_240.0, 1_700_000_330.0])


def test_empty_answer_has_no_times():
    empty = {**ANSWER, "namespace": "", "t0": 0, "ms": [], "num": [], "key": "", "tier": "", "next": 0}
    assert answers.samples(convert_times(empty, CLOCK)).times == array("d")


@pytest.mark.parametrize("answer", [None, [], "x"])
def test_invalid_answer_is_returned_unchanged(answer):
    assert convert_times(answer, CLOCK) == answer


def test_scaled_multiplies_only_byte_values():
    stats = {"memory": {"size_bytes": 64, "used_rows": 3}, "lookups": {"kv_bytes_per_token": 1.5, "gpus": 1}}
    assert scale_bytes(stats, 10) == {
        "memory": {"size_bytes": 640, "used_rows": 3}, "lookups": {"kv_bytes_per_token": 15.0, "gpus": 1}
    }  # fmt: skip
    assert answers.samples(scale_bytes(ANSWER, 1024)).row_bytes == 4 << 20
    assert scale_bytes(None, 10) is None
