"""Waits of tests for the control plane."""

import pytest

from testing.kube.api import ApiError, wait_for


def test_wait_repeats_what_is_missing_and_raises_what_is_refused():
    answers = iter([ApiError(404, "none"), ApiError(503, "busy"), ConnectionRefusedError(), "", "ready"])

    def condition() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert wait_for(condition) == "ready"
    answers = iter([ApiError(403, "forbidden")])
    with pytest.raises(ApiError, match="forbidden"):
        wait_for(condition)
    answers = iter(["", "", ""])
    with pytest.raises(TimeoutError, match="last: ''"):
        wait_for(condition, 0)
