"""Reads the sidecar's pages as Prometheus, an operator and people do, and checks each answer."""

from __future__ import annotations

import contextlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from lmcache_store.causes import CAUSES, num_computed
from lmcache_store.curves import answers
from testing.soak.rows import TENANTS

_MAX_REQUESTS = 100
_SUMS = "prompt_tokens", "hit_tokens"
"""Figures of tenants whose sum must be that of all requests."""


class InvalidPageError(AssertionError):
    """A page is missing, incomplete or contradicts itself."""


class Reader:
    """Reads all pages of one sidecar at a time."""

    def __init__(self) -> None:
        self.num_answers: Counter[str] = Counter()
        """Valid answers by page."""
        self._start()

    @property
    def num_in_ring(self) -> int:
        """Number of requests in the sidecar's ring of samples at the last read."""
        return len(self._ring)

    def _start(self, pid: int = 0) -> None:
        self._pid, self._position = pid, 0
        self._counters: dict[str, float] = {}
        self._ring: deque[int] = deque()  # positions of the requests in the ring
        self._num_dropped = 0  # samples that have left the ring

    def read(self, pid: int, get: Callable[[str], str]) -> None:
        """Read each page of the sidecar process ``pid`` once. Raises InvalidPageError.

        ``get`` returns the body of a path. It raises OSError if there is no answer with status 200.
        Reads nothing while the process opens its tiers, because it has only a part of ``/stats`` then.
        """
        if pid != self._pid:
            self._start(pid)
            if is_starting(get):
                self._start()
                return
        for path, check in (
            ("/stats", self._check_stats),
            ("/metrics", self._check_metrics),
            (f"/samples?since={self._position}", self._check_samples),
            ("/requests", self._check_requests),
        ):
            page = path.partition("?")[0]
            try:
                check(get(path))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise InvalidPageError(f"the page {page} is invalid: {error!r}") from error
            self.num_answers[page] += 1

    def _check_stats(self, text: str) -> None:
        stats = json.loads(text)
        for problem in of_sums(stats):
            raise ValueError(problem)
        self._num_dropped = stats["lookups"]["samples_dropped"]

    def _check_metrics(self, text: str) -> None:
        counters = _counters(text)
        if not counters:
            raise ValueError("it has no counters")
        for name, number in self._counters.items():
            if counters.get(name, -1.0) < number:
                raise ValueError(f"the counter {name} was {number} and is {counters.get(name)}")
        self._counters = counters

    def _check_samples(self, text: str) -> None:
        answer = json.loads(text)
        samples, position = answers.samples(answer), int(answer["since"])
        if samples.next < self._position:
            raise ValueError(f"its position {samples.next} is before {self._position}")
        self._position = samples.next
        for size in samples.sizes:
            self._ring.append(position)
            position += size
        while self._ring and self._ring[0] < self._num_dropped:
            self._ring.popleft()

    def _check_requests(self, text: str) -> None:
        requests = json.loads(text)["requests"]
        if len(requests) > _MAX_REQUESTS:
            raise ValueError(f"it has {len(requests)} requests")
        for request in requests:
            tokens = request["tokens"]
            is_explained = set(tokens) <= set(CAUSES) and sum(tokens.values()) > 0
            if request["tenant"] not in TENANTS or not is_explained:
                raise ValueError(f"it has the request {request}")


def is_starting(get: Callable[[str], str]) -> bool:
    """Whether a sidecar has not opened its tiers yet. On a busy machine this takes seconds."""
    with contextlib.suppress(OSError, ValueError):  # reading the page again shows the error
        stats = json.loads(get("/stats"))
        return "causes" not in stats and str(stats.get("not_ready_reason", "")).startswith("starting")
    return False


def of_sums(stats: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sums of ``/stats`` that are wrong: causes and tenants share the tokens of all requests."""
    causes, tenants = stats["causes"], stats["tenants"]
    prompt_tokens, by_cause = causes["prompt_tokens"], causes["cause_tokens"]
    totals = prompt_tokens, prompt_tokens - num_computed(by_cause)
    if sum(by_cause.values()) != prompt_tokens:
        yield f"the causes of {prompt_tokens} tokens add up to {sum(by_cause.values())}"
    for name, total in zip(_SUMS, totals, strict=True):
        if sum(tenants[name].values()) != total:
            yield f"{name} of {total} tokens by tenant: {tenants[name]}"


def _counters(text: str) -> dict[str, float]:
    """Return the counters of a text for Prometheus, by name and labels."""
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in text_string_to_metric_families(text)
        if family.type == "counter"
        for sample in family.samples
    }
