"""Any answer of a sidecar to ``/samples`` or ``/stats`` is refused as invalid, or the operator can use it.

Input: the number of keys to read (one byte), and the answer.
"""

import contextlib
import json
import math

from lmcache_operator.autoscaling.intake.answers import figures as figures_of
from lmcache_store.curves import answers
from lmcache_store.curves.answers import MAX_NUMBER
from tests.fuzz.target import Target

JSON_ERRORS = ValueError, RecursionError
"""Errors of the JSON parser, which the operator's HTTP client handles."""


def run(data: bytes) -> None:
    try:
        answer = json.loads(data[1:])
    except JSON_ERRORS:
        return
    max_keys = data[0] if data[0] else MAX_NUMBER
    answers.next_request(answer)
    with contextlib.suppress(answers.InvalidAnswerError):
        check_samples(answer, max_keys)
    with contextlib.suppress(answers.InvalidAnswerError):
        check_figures(answer)


def check_samples(answer: object, max_keys: int) -> None:
    samples = answers.samples(answer, max_keys)
    requests = list(samples.requests())
    assert sum(len(keys) for _, keys in requests) == len(samples.keys) <= max_keys
    assert all(math.isfinite(time) for time, _ in requests)
    assert 0 < samples.rate <= 1


def check_figures(answer: object) -> None:
    figures = figures_of(answer)
    assert all(number >= 0 for number in figures.counts)
    assert all(math.isfinite(number) for number in figures[1:])


TARGET = Target(run)
